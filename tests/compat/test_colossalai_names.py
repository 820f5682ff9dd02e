"""Names that programs import from Colossal-AI: each is there, or says at its use what to do."""

from __future__ import annotations

import importlib
import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from torch import nn

from espalier.compat import colossalai
from espalier.compat.absent import Absent
from espalier.compat.colossalai import accelerator, core, utils
from espalier.compat.colossalai.booster.mixed_precision import (
    FP16ApexMixedPrecision,
    FP16NaiveMixedPrecision,
    FP16TorchMixedPrecision,
    mixed_precision_factory,
)
from espalier.compat.colossalai.context import Config, ParallelMode
from espalier.compat.colossalai.core import global_context as gpc
from espalier.compat.colossalai.pipeline import PipelineGraph
from espalier.compat.colossalai.shardformer import Policy, get_autopolicy
from espalier.compat.colossalai.tensor import ProcessGroup
from espalier.compat.migrate import migrate
from espalier.parallel.plan import Precision

HERE = "espalier.compat.colossalai"


def names() -> list[tuple[str, str, bool]]:
    """Modules and names of the packages 0.2.8, 0.3.9 and 0.5.0, and of what its examples import; those that
    are not there have a ``-`` before them."""
    lines = (Path(__file__).parent / "colossalai_names.txt").read_text("utf-8").splitlines()
    pairs = ((line.partition(": ")[0], word) for line in lines for word in line.partition(": ")[2].split())
    return [("" if module == "." else module, word.lstrip("-"), word[0] != "-") for module, word in pairs]


def found(module: str, name: str) -> Any:
    """As ``from module import name`` finds it."""
    full = ".".join(filter(None, (HERE, module)))
    scope: dict[str, Any] = {}
    exec(f"from {full} import {name}", scope)
    return scope[name]


def test_every_name() -> None:
    """Can be imported, is what the list says, and tells what to do if it is not there."""
    listed = names()
    wrong = []
    for module, name, is_there in listed:
        x = found(module, name)
        if isinstance(x, Absent) is is_there:
            wrong.append(f"{module}.{name}")
        elif not is_there:
            with pytest.raises(NotImplementedError, match=f"colossalai.*{name} is not there: .*[^ ]"):
                x()
    assert not wrong
    assert len(listed) > 900 and sum(is_there for *_, is_there in listed) > 250


def test_modules() -> None:
    """What is known of no place is Python's own error; a function stays one where a module takes its name."""
    for name in ("no_such", "nn.no_such", "legacy.no_such", "legacy.nn.no_such", "utils.model.no_such"):
        with pytest.raises(ModuleNotFoundError):
            importlib.import_module(f"{HERE}.{name}")
    for name in ("no_such", "__path_of_it__"):
        assert not hasattr(colossalai, name)
    assert colossalai.kernel.LayerNorm is nn.LayerNorm and colossalai.nn.layer.Linear is nn.Linear
    assert callable(colossalai.initialize) and callable(colossalai.legacy.initialize)
    module, x = importlib.import_module(f"{HERE}.utils.checkpoint"), torch.ones(2)
    assert utils.checkpoint is module and torch.equal(utils.checkpoint(torch.sin, False, x), x.sin())
    with pytest.raises(NotImplementedError, match="utils.checkpoint.save_checkpoint is not there: booster"):
        module.save_checkpoint()
    with pytest.raises(TypeError, match="is no function"):
        importlib.import_module(f"{HERE}.utils.profiler")()
    importlib.invalidate_caches()  # which asks each finder


def test_annotations_of_what_is_not_there() -> None:
    """Stand in a program that never uses it."""
    absent: Any = colossalai.shardformer.ShardConfig

    def function(x: Optional[absent], y: absent | None, z: None | absent) -> absent:  # noqa: UP045, RUF036
        return x, y, z

    assert not isinstance(function(None, None, None), absent)
    with pytest.raises(NotImplementedError, match="ShardConfig is not there"):
        absent.tensor_parallel_size = 2


def test_migrated_imports() -> None:
    """Names move where they are there; the others stay, with what to do."""
    told = migrate(
        "import colossalai\n"
        "from colossalai.nn.optimizer.hybrid_adam import HybridAdam\n"
        "from colossalai.legacy.core import global_context as gpc\n"
        "from colossalai.shardformer import PipelineGradientCheckpointConfig, ShardFormer\n"
        "from colossalai.initialize import launch\n"
        "launch(0, 1, 'localhost', 29500)\n"
        "colossalai.inference.InferenceEngine(None)\n"
        "from colossalai.booster.plugin import GeminiPlugin\n"
        "GeminiPlugin(precision='bf16', pin_memory=True, use_fp8=True, precison=1, **g)\n"
    )
    assert told.after.splitlines()[:6] == [
        "from espalier.compat import colossalai",
        "from espalier.compat.colossalai.nn.optimizer.hybrid_adam import HybridAdam",
        "from espalier.compat.colossalai.legacy.core import global_context as gpc",
        "from espalier.compat.colossalai.shardformer import PipelineGradientCheckpointConfig",
        "from colossalai.shardformer import ShardFormer",
        "from espalier.compat.colossalai.initialize import launch",
    ]
    missing = [note.text for note in told.notes if note.is_missing]
    assert len(missing) == 4
    assert "colossalai.shardformer.ShardFormer has no equivalent here: Booster with Hybrid" in missing[0]
    assert "colossalai.inference has no equivalent here: engine.predict" in missing[1]
    assert missing[2].startswith("GeminiPlugin: precison = 1: unknown key; did you mean precision?")
    assert missing[3].startswith("GeminiPlugin: use_fp8 = True: not to be had here")
    assert "GeminiPlugin: pin_memory has no effect: always so" in [note.text for note in told.notes]


@pytest.mark.parametrize(
    ("launch", "args", "rank"),
    [
        ("launch", (3, 8, "here", 29500), "3"),
        ("launch", ({"LR": 1}, 2, 8, "here", "29500"), "2"),
        ("launch_from_slurm", ("here", 29500), "5"),
        ("launch_from_openmpi", ({"LR": 1}, "here", 29500), "6"),
        ("launch_from_torch", ("gloo",), "7"),
    ],
)
def test_launching_with_and_without_a_configuration(
    monkeypatch: pytest.MonkeyPatch, launch: str, args: tuple[Any, ...], rank: str
) -> None:
    """As releases before and after 0.4 are called."""
    said = {"RANK": "7", "WORLD_SIZE": "8", "MASTER_ADDR": "there", "MASTER_PORT": "1"}
    said |= {"SLURM_PROCID": "5", "SLURM_NPROCS": "8"}
    said |= {"OMPI_COMM_WORLD_RANK": "6", "OMPI_COMM_WORLD_SIZE": "8", "LOCAL_RANK": "0"}
    for name, value in {**said, "LOCAL_WORLD_SIZE": "8"}.items():
        monkeypatch.setenv(name, value)
    started: list[tuple[Any, str, str]] = []
    monkeypatch.setattr(
        core, "start", lambda kind: started.append((kind, os.environ["RANK"], os.environ["MASTER_ADDR"]))
    )
    monkeypatch.setattr(core.dist, "is_initialized", lambda: False)
    getattr(colossalai, launch)(*args, seed=3)
    host = "there" if launch == "launch_from_torch" else "here"
    assert started == [("cpu" if args == ("gloo",) else None, rank, host)]
    assert dict(gpc.config) == (args[0] if isinstance(args[0], dict) else {})


def places(rank: int, world: int) -> list[Any]:
    """What a program of the paper's form asks of its place."""
    told: list[Any] = []
    for parallel in (
        {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}},
        {"tensor": {"size": 4, "mode": "2d"}},
        {"tensor": {"size": 2, "mode": "sequence"}},
    ):
        colossalai.launch({"parallel": parallel})
        modes = (ParallelMode.DATA, ParallelMode.PIPELINE, ParallelMode.TENSOR, ParallelMode.MODEL)
        told.append([gpc.get_world_size(mode) for mode in (*modes, ParallelMode.GLOBAL)])
        told.append([gpc.is_initialized(mode) for mode in (*modes, ParallelMode.SEQUENCE)])
        whole = torch.distributed.get_world_size(gpc.get_group(ParallelMode.TENSOR))
        assert whole == gpc.tensor_parallel_size == len(gpc.get_ranks_in_group(ParallelMode.TENSOR))
        assert gpc.get_ranks_in_group(ParallelMode.TENSOR)[gpc.get_local_rank(ParallelMode.TENSOR)] == rank
        with pytest.raises(ValueError, match="give the model whole rows"):
            gpc.get_local_rank(ParallelMode.PARALLEL_2P5D_DEP)
    colossalai.launch({"parallel": {"pipeline": 2, "tensor": {"size": 2, "mode": "1d"}}})
    stage = gpc.get_local_rank(ParallelMode.PIPELINE)
    assert (gpc.is_pipeline_first_stage(), gpc.is_pipeline_last_stage()) == (stage == 0, stage == 1)
    ends = gpc.is_first_rank(ParallelMode.PIPELINE), gpc.is_last_rank(ParallelMode.PIPELINE)
    assert ends == (stage == 0, stage == 1)
    assert utils.is_no_pp_or_last_stage() == (stage == 1) and utils.is_using_pp()
    assert gpc.get_next_global_rank(ParallelMode.PIPELINE) == gpc.get_prev_global_rank(ParallelMode.PIPELINE)
    assert not utils.is_using_ddp() and not utils.is_using_sequence() and utils.is_dp_rank_0()
    colossalai.launch({})
    return told


@pytest.mark.world(4)
def test_places(ranks: Callable[..., Any]) -> None:
    """Groups are those of the configuration, by what their ranks share."""
    right = [
        [1, 2, 2, 4, 4], [True, True, True, True, False],
        [1, 1, 4, 4, 4], [True, False, True, True, False],
        [2, 1, 2, 2, 4], [True, False, True, True, True],
    ]  # fmt: skip
    assert ranks(4, places) == [right] * 4


def test_accelerator() -> None:
    """Of a machine without one, as Colossal-AI's CPU accelerator."""
    device = accelerator.get_accelerator()
    if not device.is_available():
        assert (device.name, device.get_current_device()) == ("cpu", torch.device("cpu"))
        assert device.max_memory_allocated() == 0 and device.is_synchronous
    model = nn.Linear(2, 2)
    assert device.set_to_device(model) is model and device.set_to_device([model, model]) == [model, model]
    with device.autocast(dtype=torch.bfloat16):
        assert model(torch.ones(1, 2)).dtype is torch.bfloat16
    device.empty_cache()
    device.synchronize()
    device.set_device()
    assert "name=" in repr(device)


def test_small_things(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of ``utils``, ``logging`` and ``context``, without a world."""
    utils.set_seed(3)
    first = torch.rand(2)
    utils.set_seed(3)
    assert torch.equal(torch.rand(2), first)
    utils.ensure_path_exists(str(tmp_path / "a" / "b.pt"))
    assert (tmp_path / "a").is_dir()
    once = utils.disposable(lambda: 5)
    assert (once(), once()) == (5, None)
    x = torch.ones(2, requires_grad=True)
    (gradient,) = torch.autograd.grad(utils.checkpoint(torch.sin, False, x).sum(), x)
    assert torch.equal(gradient, x.cos())
    with pytest.raises(ValueError, match="recompute_inputs"):
        utils.checkpoint(torch.sin, True, x)
    timers = utils.MultiTimer()
    timers.start("a")
    assert timers.stop("a", keep_in_history=True) == timers.get_timer("a").get_history_mean() > 0
    assert [name for name, _ in timers] == ["a"] and timers.history("a") == [timers.get_elapsed_time("a")]
    logger = colossalai.logging.get_dist_logger("espalier of a test")
    logger.log_to_file(tmp_path / "logs", suffix="x")
    logger.info("told", ranks=[0])
    logger.debug("not told")
    for handler in [*logging.getLogger("espalier of a test").handlers]:
        logging.getLogger("espalier of a test").removeHandler(handler)
        handler.close()
    assert (tmp_path / "logs" / "rank_0_x.log").read_text().endswith("INFO: told\n")
    utils.print_rank_0("here")
    utils.report_memory_usage("now")
    assert capsys.readouterr().out.endswith(
        "here\nnow: allocated 0.00 MB, at most 0.00 MB, reserved 0.00 MB\n"
    )
    (tmp_path / "config.py").write_text("LR = 3\n")
    config = Config.from_file(tmp_path / "config.py")
    config.BATCH = 4
    assert dict(config) == {"LR": 3, "BATCH": 4} and config.LR == 3
    p = nn.Parameter(torch.ones(4))
    p.grad = torch.tensor([0.0, 1.0, 0.0, 2.0])
    assert utils.count_zeros_fp32([p]) == 2


def test_what_configurations_hold() -> None:
    """Policies, schedules and groups are kept, without effect; degrees of tensors are refused."""

    class Own(Policy):
        def module_policy(self) -> dict[str, Any]:
            return {}

    model = nn.Linear(2, 2)
    assert get_autopolicy(model).model is model and Own().module_policy() == {}
    assert PipelineGraph(n_stage=2, f_cost=1).get_v_schedule() == []
    assert (ProcessGroup().world_size(), ProcessGroup().tp_world_size()) == (1, 1)
    with pytest.raises(ValueError, match=r"tp_degree = 2: expected 1"):
        ProcessGroup(tp_degree=2)
    assert colossalai.builder.build_pipeline_model(model) is model
    with pytest.raises(ValueError, match="stages_per_rank"):
        colossalai.builder.build_pipeline_model(model, num_chunks=2)


def test_algorithms(monkeypatch: pytest.MonkeyPatch) -> None:
    """Are those that a configuration asks for; without a word they stay."""
    model, cudnn = nn.Linear(2, 2), torch.backends.cudnn
    # once torch.testing was imported, flags are set by contexts alone
    monkeypatch.setattr(vars(torch.backends)["m"], "__allow_nonbracketed_mutation_flag", True)
    for name in ("benchmark", "deterministic"):
        monkeypatch.setattr(cudnn, name, getattr(cudnn, name))
    for config in ({"cudnn_benchmark": True, "cudnn_deterministic": True}, {}, {"cudnn_benchmark": False}):
        colossalai.initialize(model, torch.optim.SGD(model.parameters(), lr=0.1), config=config)
        assert cudnn.deterministic and cudnn.benchmark is config.get("cudnn_benchmark", True)
        model = nn.Linear(2, 2)


def test_mixed_precision() -> None:
    """By name, and as objects."""
    for made, compute, scale in (
        (mixed_precision_factory("fp16"), "autocast-float16", 65536.0),
        (FP16TorchMixedPrecision(init_scale=8.0), "autocast-float16", 8.0),
        (mixed_precision_factory("bf16"), "autocast-bfloat16", None),
        (mixed_precision_factory("fp16_apex"), "autocast-float16", 65536.0),
        (mixed_precision_factory("fp16_naive"), "float16", 2.0**32),
        (FP16ApexMixedPrecision("O2", loss_scale=4.0), "float16", 4.0),
        (FP16NaiveMixedPrecision(initial_scale=16.0, hysteresis=3), "float16", 16.0),
    ):
        said = made.precision if isinstance(made.precision, dict) else {"compute": made.precision}
        precision = Precision(**said)
        assert precision.compute == compute
        assert scale is None or precision.loss_scale.init_scale == scale
    with pytest.raises(ValueError, match="mixed_precision = 'fp18': unknown; did you mean"):
        colossalai.Booster(mixed_precision="fp18")
    with pytest.raises(ValueError, match="master_weights"):
        FP16ApexMixedPrecision(master_weights=False)
