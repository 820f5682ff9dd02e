"""``espalier migrate``: programs of other systems, line by line."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from espalier.cli import app
from espalier.compat.migrate import migrate

DEEPSPEED = '''\
"""Trains."""
import os, deepspeed
import deepspeed.comm as dist
from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam  # both
from deepspeed.runtime.lr_schedules import WarmupLR

CONFIG = {"train_batch_size": 8, "zero_optimization": {"stage": 2, "overlap_comm": True, "stag": 1}}


def main(net, grüße="ü"):
    with deepspeed.zero.Init():
        pass
    engine, *_ = deepspeed.initialize(model=net, config=CONFIG, mpu=None)
    return deepspeed.default_inference_config(), deepspeed.DeepSpeedHybridEngine(net)
'''


def test_deepspeed() -> None:
    """Imports change, configurations are examined, what is not there is told; the rest stays as it is."""
    found = migrate(DEEPSPEED)
    assert found.systems == ("DeepSpeed",)
    assert found.after == DEEPSPEED.replace(
        "import os, deepspeed\nimport deepspeed.comm as dist\nfrom deepspeed.ops.adam",
        "import os\nfrom espalier.compat import deepspeed\n"
        "from espalier.compat.deepspeed import comm as dist\n"
        "from espalier.compat.deepspeed.ops.adam",
    ).replace("from deepspeed.runtime", "from espalier.compat.deepspeed.runtime")
    ast.parse(found.after)
    told = [(note.line, note.is_missing, note.text.partition(":")[0]) for note in found.notes]
    assert told == [
        (7, False, "configuration"),
        (7, True, "configuration"),
        (14, True, "deepspeed.DeepSpeedHybridEngine has no equivalent here"),
        (14, True, "deepspeed.default_inference_config has no equivalent here"),
    ]
    assert "did you mean zero_optimization.stage?" in found.notes[1].text
    assert found.diff("x.py").startswith("--- x.py\n+++ x.py\n@@ -1,8 +1,9 @@")


def test_grids_of_ranks() -> None:
    """One is compared with the plan's, another is not there."""
    notes = migrate("import deepspeed\ndeepspeed.initialize(model=None, mpu=grid, mesh_param=(2, 2))\n").notes
    assert [(x.is_missing, x.text.partition(":")[0]) for x in notes] == [
        (True, "mesh_param= has no equivalent here"),
        (False, "mpu= is to say what the plan says"),
    ]


def test_configuration_in_a_file(tmp_path: Path) -> None:
    """The file that a program names is read."""
    (tmp_path / "ds.json").write_text(json.dumps({"train_batch_size": 1, "amp": {"enabled": True}}))
    program = "import deepspeed\ndeepspeed.initialize(model=None, config='ds.json')\n"
    (note,) = migrate(program, tmp_path).notes
    assert note.is_missing and "amp = {'enabled': True}: not to be had here" in note.text


def test_nothing_of_another_system() -> None:
    """Stays as it is."""
    program = "import torch\nfrom torch import nn\nx = nn.Linear(2, 2)\n"
    assert migrate(program)[1:] == (program, (), ())


def test_colossal_and_dtensor() -> None:
    """Names under submodules, and those that move into the package itself; what stays, stays."""
    program = (
        "import colossalai\n"
        "from colossalai.core import global_context as gpc\n"
        "from colossalai.trainer import Trainer, hooks\n"
        "from colossalai.booster.plugin import GeminiPlugin, GeminiCheckpointIO\n"
        "from torch.distributed.tensor import DTensor, Shard\n"
    )
    found = migrate(program)
    assert found.after == (
        "from espalier.compat import colossalai\n"
        "from espalier.compat.colossalai.core import global_context as gpc\n"
        "from espalier.compat.colossalai.trainer import Trainer, hooks\n"
        "from espalier.compat.colossalai.booster.plugin import GeminiPlugin\n"
        "from colossalai.booster.plugin import GeminiCheckpointIO\n"
        "from espalier import DTensor, Shard\n"
    )
    (note,) = found.notes
    assert note.is_missing and note.text.startswith("colossalai.booster.plugin.GeminiCheckpointIO has no")


def test_trainer_and_accelerate() -> None:
    """Names in full too; what asks another library for parallelism is told as a plan."""
    program = (
        "import transformers\n"
        "from accelerate import Accelerator, notebook_launcher\n"
        "arguments = transformers.TrainingArguments('out', fsdp='full_shard offload', deepspeed=None)\n"
        "trainer = transformers.Trainer(None, arguments)\n"
        "other = transformers.TrainingArguments(\n"
        "    deepspeed={'zero_optimization': {'stage': 2, 'offload_optimizer': {'device': 'cpu'}}})\n"
    )
    found = migrate(program)
    assert found.after == program.replace(
        "from accelerate import Accelerator, notebook_launcher\n",
        "from espalier.compat.accelerate import Accelerator\n"
        "from accelerate import notebook_launcher\n"
        "from espalier.compat.transformers import Trainer\n",
    ).replace("= transformers.Trainer(", "= Trainer(")
    told = [(note.line, note.is_missing, note.text.rpartition("plan=")[2]) for note in found.notes]
    place = "'host'"
    assert told == [
        (2, True, found.notes[0].text),
        (
            3,
            True,
            f"{{'zero': 3, 'offload': {{'parameters': {place}, 'gradients': {place}, 'states': {place}}}}})",
        ),
        (4, False, told[2][2]),
        (6, True, f"{{'zero': 2, 'offload': {{'states': {place}}}}})"),
    ]
    assert "espalier.spawn" in found.notes[0].text


def test_fabric() -> None:
    """A strategy by name is one of the plan; one of another library's is told."""
    program = (
        "from lightning_fabric import Fabric\n"
        "from lightning_fabric.strategies import DDPStrategy, FSDPStrategy\n"
        "fabric = Fabric(devices=2, strategy='fsdp')\n"
    )
    found = migrate(program)
    assert found.systems == ("Lightning Fabric",)
    assert found.after == program.replace("'fsdp'", "EspalierStrategy({'zero': 3})").replace(
        "from lightning_fabric.strategies import DDPStrategy, FSDPStrategy\n",
        "from espalier.compat.fabric import DDPStrategy\n"
        "from lightning_fabric.strategies import FSDPStrategy\n"
        "from espalier.compat.fabric import EspalierStrategy\n",
    )
    (note,) = found.notes
    assert note.is_missing and "FSDPStrategy has no equivalent here: Fabric(strategy=Espalier" in note.text


@pytest.mark.parametrize(
    ("name", "plan"),
    [("ddp", ""), ("deepspeed_stage_1", "{'zero': 1}"), ("deepspeed_stage_2", "{'zero': 2}")],
)
def test_fabrics_strategies_by_name(name: str, plan: str) -> None:
    """As plans; a class of another library's is told."""
    program = f"from lightning_fabric import Fabric\nfabric = Fabric(strategy='{name}')\n"
    after = migrate(program).after
    assert after.endswith(f"fabric = Fabric(strategy=EspalierStrategy({plan}))\n")
    (note,) = migrate("from lightning_fabric.strategies import ModelParallelStrategy\n").notes
    assert note.is_missing and "EspalierStrategy(plan={...})" in note.text


@pytest.mark.parametrize("package", ["pytorch_lightning", "lightning", "lightning.pytorch"])
def test_lightnings_trainer(package: str) -> None:
    """It stays where it is, with a strategy of the plan that its strategy's name says."""
    for name, plan in (("deepspeed_stage_3", "{'zero': 3}"), ("ddp_find_unused_parameters_true", "")):
        found = migrate(f"import {package} as pl\ntrainer = pl.Trainer(strategy='{name}', devices=2)\n")
        assert found.after == (
            f"import {package} as pl\nfrom espalier.compat.lightning import EspalierStrategy\n"
            f"trainer = pl.Trainer(strategy=EspalierStrategy({plan}), devices=2)\n"
        )
        assert found.systems == ("Lightning",) and not found.notes
    (note,) = migrate("from pytorch_lightning.strategies import FSDPStrategy\n").notes
    assert note.is_missing and "Trainer(strategy=EspalierStrategy(" in note.text


def test_fabric_of_the_package_lightning() -> None:
    """It stays where it is, in full or by name: it takes strategies of Espalier's."""
    strategy = "from espalier.compat.fabric import EspalierStrategy\n"
    for imports, of in (
        ("from lightning.fabric import Fabric, seed_everything\n", ""),
        ("import lightning as L\n", "L."),
    ):
        before = f"fabric = {of}Fabric(strategy='ddp')\n"
        after = f"fabric = {of}Fabric(strategy=EspalierStrategy())\n"
        assert migrate(imports + before).after == imports + strategy + after
    (note,) = migrate("from lightning.fabric.strategies import FSDPStrategy\n").notes
    assert note.is_missing and "EspalierStrategy(plan={...})" in note.text


def test_command(tmp_path: Path) -> None:
    """Diff and notes; exit code 1 where something has no equivalent; --write changes the file."""
    script = tmp_path / "train.py"
    script.write_text("import deepspeed\n")
    runner = CliRunner()
    done = runner.invoke(app, ["migrate", str(script), "--write"])
    assert done.exit_code == 0 and "+from espalier.compat import deepspeed" in done.output
    assert script.read_text() == "from espalier.compat import deepspeed\n"
    script.write_text("import deepspeed\ndeepspeed.DeepSpeedHybridEngine()\n")
    done = runner.invoke(app, ["migrate", str(script)])
    assert (
        done.exit_code == 1 and "train.py:2: deepspeed.DeepSpeedHybridEngine has no equivalent" in done.output
    )
    script.write_text("def")
    assert runner.invoke(app, ["migrate", str(script)]).exit_code == 2


@pytest.mark.parametrize(
    "line", ["from . import deepspeed\n", "x.deepspeed.initialize()\n", "deepspeed = 1\n"]
)
def test_other_things_of_that_name(line: str) -> None:
    """Are left alone."""
    assert migrate(line).after == line


def test_names_of_inner_modules() -> None:
    """Programs import from where torch itself keeps what its packages hand on."""
    program = (
        "from torch.distributed.pipelining.schedules import ScheduleGPipe\n"
        "from torch.distributed.pipelining.microbatch import TensorChunkSpec, merge_chunks\n"
        "from torch.distributed.fsdp._fully_shard import fully_shard, share_comm_ctx\n"
        "from accelerate.local_sgd import LocalSGD\n"
    )
    found = migrate(program)
    assert found.after.splitlines() == [
        "from espalier.compat.torch.pipelining import ScheduleGPipe",
        "from espalier.compat.torch.pipelining import TensorChunkSpec",
        "from torch.distributed.pipelining.microbatch import merge_chunks",
        "from espalier.compat.torch.fsdp import fully_shard, share_comm_ctx",
        "from accelerate.local_sgd import LocalSGD",
    ]
    (note,) = found.notes
    assert note.is_missing and "leave it out: every step is of all rows" in note.text
