"""Every module of DeepSpeed's (0.19) can be imported, with all of its public classes and functions: they are
here, or a use says what to do."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import pickle
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier.compat import deepspeed
from espalier.compat.absent import Absent, AbsentModule
from espalier.compat.migrate import migrate

# a line for each module: its name, and, of those that are here, its public classes and functions
LIST = Path(__file__).parent / "deepspeed_modules.txt"
OURS = deepspeed.__name__


def listed() -> dict[str, list[str]]:
    """The names of each module."""
    lines = [line.partition(":") for line in LIST.read_text("utf-8").splitlines()]
    return {module: names.split() for module, _, names in lines}


def of_package(folder: Path) -> dict[str, list[str]]:
    """The same of a package's files, of all modules."""
    found = {}
    for file in sorted(folder.rglob("*.py")):
        path = file.relative_to(folder).with_suffix("")
        parts = path.parts[:-1] if path.name == "__init__" else path.parts
        if not parts or any(part.startswith(("_", "test")) for part in parts):
            continue
        tree = ast.parse(file.read_text("utf-8"))
        kinds = ast.ClassDef | ast.FunctionDef
        names = {x.name for x in tree.body if isinstance(x, kinds) and not x.name.startswith("_")}
        found[".".join(parts)] = sorted(names)
    return found


def test_every_module_and_name() -> None:
    """None ends in an ImportError; of a module that is not there a use of any name says what to do."""
    there = 0
    for name, names in listed().items():
        module: Any = importlib.import_module(f"{OURS}.{name}")
        assert module is sys.modules[f"{OURS}.{name}"]
        if isinstance(module, AbsentModule):
            assert not names
            with pytest.raises(NotImplementedError, match=rf"deepspeed\.{name}\.Any is not there: \S"):
                module.Any()
            continue
        there += 1
        missing = [x for x in names if not hasattr(module, x)]
        assert not missing, f"{name} has no {missing}"
        assert not hasattr(module, "no_such_name")
    assert there > 50


def test_the_list_is_deepspeeds() -> None:
    """All of its modules, and the names of those that are here."""
    spec = importlib.util.find_spec("deepspeed")
    if spec is None or spec.origin is None:
        pytest.skip("needs DeepSpeed: see tests/compat/test_deepspeed.py")
    theirs = of_package(Path(spec.origin).parent)
    known = listed()
    assert sorted(known) == sorted(theirs)
    here = {x for x in theirs if not isinstance(importlib.import_module(f"{OURS}.{x}"), AbsentModule)}
    assert known == {name: names if name in here else [] for name, names in theirs.items()}


def test_what_is_elsewhere() -> None:
    """DeepSpeed's own modules have the same things as the packages about them."""
    for module, name, home in (
        ("ops.adam.cpu_adam", "DeepSpeedCPUAdam", "ops.adam"),
        ("ops.adam.fused_adam", "FusedAdam", "ops.adam"),
        ("ops.lion.fused_lion", "FusedLion", "ops.lion"),
        ("accelerator.real_accelerator", "get_accelerator", "accelerator"),
        ("comm.comm", "init_distributed", "comm"),
        ("utils.tensor_fragment", "safe_get_local_grad", "utils"),
        ("utils.init_on_device", "OnDevice", "utils"),
        ("utils.z3_leaf_module", "set_z3_leaf_modules", "utils"),
        ("moe.sharded_moe", "TopKGate", "moe"),
        ("monitor.monitor", "MonitorMaster", "monitor"),
    ):
        both = [getattr(importlib.import_module(f"{OURS}.{x}"), name) for x in (module, home)]
        assert both[0] is both[1] and not isinstance(both[0], Absent)
    importlib.import_module(f"{OURS}.utils.z3_leaf_module")
    assert callable(deepspeed.utils.z3_leaf_module), "the function, not the module"


def test_pickles_name_modules() -> None:
    """What was pickled under a module's name is found, whether it is a file or stands for a part of one."""
    for module, name in (
        ("moe.layer", "MoE"),
        ("runtime.config", "DeepSpeedConfig"),
        ("ops.adam", "FusedAdam"),
    ):
        kind = pickle.loads(f"c{OURS}.{module}\n{name}\n.".encode())
        assert kind is getattr(importlib.import_module(f"{OURS}.{module}"), name)
        assert pickle.loads(pickle.dumps(kind)) is kind


def test_what_programs_do_with_what_is_not_there() -> None:
    """Imports, annotations, star imports; what DeepSpeed has dropped; and modules that nobody has."""
    names: dict[str, Any] = {}
    text = f"""
from {OURS}.inference.v2.engine_factory import build_hf_engine
from {OURS}.inference.v2 import *
import {OURS}.elasticity.elasticity as elastic, {OURS}.compression.helper

def ask(engine: build_hf_engine | None = None, config: None | build_hf_engine = None) -> None: ...
"""
    exec(text, names)
    with pytest.raises(
        NotImplementedError, match=r"build_hf_engine is not there: deepspeed.init_inference\("
    ):
        names["build_hf_engine"]("model")
    with pytest.raises(
        NotImplementedError, match=r"elasticity\.compute is not there: DeepSpeed has dropped it"
    ):
        names["elastic"].compute()
    for nobody in ("inferense", "runtime.no_such", "utils.z3_leaf_module.more", "comm.no_such.deeper"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{OURS}.{nobody}")


def test_migrate_tells_of_modules() -> None:
    """A module that is not there stays, with what to do; one that is elsewhere moves."""
    told = migrate(
        "from deepspeed.inference.v2 import InferenceEngineV2\n"
        "import deepspeed.runtime.domino.transformer\n"
        "from deepspeed.ops.adam.cpu_adam import DeepSpeedCPUAdam\n"
    )
    missing = [note.text for note in told.notes if note.is_missing]
    assert len(missing) == 2 and "autotp_size" in missing[1]
    assert missing[0].startswith(
        "deepspeed.inference.v2.InferenceEngineV2 has no equivalent here: deepspeed.init"
    )
    assert "from deepspeed.inference.v2 import InferenceEngineV2" in told.after
    assert f"from {OURS}.ops.adam.cpu_adam import DeepSpeedCPUAdam" in told.after


def test_leaf_modules_by_name() -> None:
    """Noted alike however they are named."""
    model = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Sequential(torch.nn.Linear(2, 2)))
    utils = deepspeed.utils
    assert utils.set_z3_leaf_modules_by_name(model, ["1.0"]) == ([model[1][0]], [])
    assert utils.get_z3_leaf_modules(model) == [model[1][0]]
    assert utils.set_z3_leaf_modules_by_suffix(model, ["0", "x"], raise_if_not_found=False) == (
        [model[0], model[1][0]],
        ["x"],
    )
    with pytest.raises(ValueError, match="is named y"):
        utils.set_z3_leaf_modules_by_name(model, ["1", "y"])
    with pytest.raises(ValueError, match="no module of Conv2d"):
        utils.set_z3_leaf_modules(model, [torch.nn.Conv2d])
    assert utils.unset_z3_leaf_modules(model, ["Linear"]) == [model[0], model[1][0]]
    assert utils.get_z3_leaf_modules(model) == []


def test_what_a_pipeline_module_has_not() -> None:
    """An error that says what to do, for names of DeepSpeed's; torch's for others."""
    model = deepspeed.PipelineModule([torch.nn.Linear(2, 2)], num_stages=1)
    model.set_checkpoint_interval(2)
    assert model.activation_checkpoint_interval == 2 and model.topology().get_dim("pipe") == 1
    for name in ("stage_owner", "save_state_dict", "allreduce_tied_weight_gradients"):
        with pytest.raises(AttributeError, match=rf"PipelineModule\.{name} is not there: \S"):
            getattr(model, name)
    with pytest.raises(AttributeError, match="has no attribute 'no_such'"):
        _ = model.no_such
