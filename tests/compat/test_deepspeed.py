"""Programs of DeepSpeed's form, on gloo ranks: beside a plain loop, and beside DeepSpeed itself."""

from __future__ import annotations

import importlib.util
import json
import runpy
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from itertools import cycle, islice
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DistributedSampler, TensorDataset

from espalier.compat import deepspeed
from espalier.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipelineParallelGrid,
    PipeModelDataParallelTopology,
)
from espalier.tensor import DTensor
from tests.compat.migrated import PROGRAMS, migrate

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 20, 4
RUNS = [(stage, accumulate) for stage in (0, 1, 2, 3) for accumulate in (1, 2)]


def net() -> nn.Module:
    """The same on each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 3))


def config(stage: int, accumulate: int, **more: Any) -> dict[str, Any]:
    """Optimizer, schedule, clipping, a stage."""
    return {
        "train_micro_batch_size_per_gpu": ROWS,
        "gradient_accumulation_steps": accumulate,
        "steps_per_print": 1000,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.01, "torch_adam": True}},
        "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 0.01, "warmup_num_steps": 5}},
        "gradient_clipping": 0.3,
        "zero_optimization": {"stage": stage},
        **more,
    }


def batches(world: int, dtype: torch.dtype = torch.float32) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Rows of all ranks."""
    generator = torch.Generator().manual_seed(1)
    while True:
        x = torch.randn(ROWS * world, 6, generator=generator).to(dtype)
        yield x, torch.randint(3, (ROWS * world,), generator=generator)


def train(engine: Any, rank: int, world: int, steps: int = STEPS) -> list[float]:
    """The loop of a DeepSpeed program; this rank's losses, rate and norm of each micro-batch."""
    dtype, found = next(iter(engine.module.parameters())).dtype, []
    for x, y in islice(batches(world, dtype), steps * engine.gradient_accumulation_steps()):
        own = slice(rank * ROWS, rank * ROWS + ROWS)
        loss = F.cross_entropy(engine(x[own]), y[own])
        engine.backward(loss)
        engine.step()
        found += [loss.item(), engine.get_lr()[0], float(engine.get_global_grad_norm() or 0.0)]
    return found


def plain(accumulate: int, rank: int, world: int, dtype: torch.dtype) -> list[float]:
    """The same by torch alone, on the rows of all ranks."""
    model = net().to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.01)
    schedule = deepspeed.runtime.lr_schedules.WarmupLR(optimizer, warmup_max_lr=0.01, warmup_num_steps=5)
    found, norm = [], 0.0
    for i, (x, y) in enumerate(islice(batches(world, dtype), STEPS * accumulate), 1):
        losses = F.cross_entropy(model(x), y, reduction="none").view(world, ROWS).mean(1)
        (losses.mean() / accumulate).backward()
        if i % accumulate == 0:
            norm = float(nn.utils.clip_grad_norm_(model.parameters(), 0.3))
            optimizer.step()
            optimizer.zero_grad()
            schedule.step()
        found += [losses[rank].item(), schedule.get_last_lr()[0], norm]
    return found


def stages(rank: int, world: int) -> list[list[float]]:
    """Every stage, in float64, and what a plain loop gives."""
    found = []
    for stage, accumulate in RUNS:
        engine, *_ = deepspeed.initialize(model=net().double(), config=config(stage, accumulate))
        found.append(train(engine, rank, world))
        assert engine.global_steps == STEPS and engine.global_samples == STEPS * ROWS * accumulate * world
    return [*found, *(plain(k, rank, world, torch.float64) for k in (1, 2))]


@pytest.mark.world(2)
def test_every_stage_is_a_plain_loop(ranks: Any) -> None:
    """Losses, learning rates and norms, step by step."""
    for found in ranks(2, stages):
        for (_, accumulate), run in zip(RUNS, found, strict=False):
            assert run == pytest.approx(found[len(RUNS) + accumulate - 1], rel=1e-10)


def runs(engine: Any, utils: Any, rank: int, world: int) -> list[list[float]]:
    """What a rank holds of parameters, gradients and states as DeepSpeed's stage 3 cuts, read and written."""
    found, (x, y) = [], next(batches(world))
    own = slice(rank * ROWS, rank * ROWS + ROWS)
    engine.backward(F.cross_entropy(engine(x[own]), y[own]))
    for p in engine.module.parameters():
        grad = utils.safe_get_local_grad(p)
        found.append(grad.tolist())
        utils.safe_set_local_grad(p, grad * (rank + 2))
        found.append(utils.safe_get_local_grad(p).tolist())
    engine.step()
    for p in engine.module.parameters():
        for value, write in (
            (utils.safe_get_local_fp32_param(p), utils.safe_set_local_fp32_param),
            (utils.safe_get_local_optimizer_state(p, "exp_avg"), None),
        ):
            found.append(value.tolist())
            if write is not None:
                write(p, value * (rank + 0.5))
            else:
                utils.safe_set_local_optimizer_state(p, value * (rank + 3), "exp_avg")
        found.append(utils.safe_get_local_fp32_param(p).tolist())
        found.append(utils.safe_get_local_optimizer_state(p, "exp_avg").tolist())
    return found


REFERENCE = """
import json, logging, sys
sys.path.insert(0, {root!r})
import deepspeed
import torch
from deepspeed.utils import logger
from tests.compat.test_deepspeed import RUNS, config, net, runs, train

logger.setLevel(logging.ERROR)
deepspeed.init_distributed(dist_backend="gloo")
rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
found = []
for stage, accumulate in RUNS:
    engine = deepspeed.initialize(model=net(), config=config(stage, accumulate))[0]
    found.append(train(engine, rank, world))
    if (stage, accumulate) == (3, 1):
        held = runs(engine, deepspeed.utils, rank, world)
found.append(held)
with open(f"{{sys.argv[1]}}/{{rank}}.json", "w") as file:
    json.dump(found, file)
"""


def singles(rank: int, world: int) -> list[Any]:
    """Every stage, in float32; and the runs of each without accumulation."""
    found, held = [], []
    for stage, accumulate in RUNS:
        engine, *_ = deepspeed.initialize(model=net(), config=config(stage, accumulate))
        found.append(train(engine, rank, world))
        if accumulate == 1:
            held.append(runs(engine, deepspeed.utils, rank, world))
    return [*found, held]


@pytest.mark.world(2)
def test_every_stage_is_deepspeed(ranks: Any, tmp_path: Path) -> None:
    """The same program under DeepSpeed itself: the same losses and rates, in float32; and the same runs of
    parameters, gradients and states, which here every stage has."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip(
            "needs DeepSpeed: pip install --no-deps deepspeed einops hjson msgpack ninja psutil py-cpuinfo"
        )
    script = tmp_path / "reference.py"
    script.write_text(REFERENCE.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [*launch, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**_environment(), "DS_ACCELERATOR": "cpu"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    for rank, found in enumerate(ranks(2, singles)):
        theirs = json.loads((tmp_path / f"{rank}.json").read_text())
        for held in found[-1]:
            assert [len(x) for x in held] == [len(x) for x in theirs[-1]]
            for ours, right in zip(held, theirs[-1], strict=True):
                assert ours == pytest.approx(right, abs=2e-6)
        for run, ours, right in zip(RUNS, found[:-1], theirs[:-1], strict=True):
            assert ours[::3] == pytest.approx(right[::3], abs=1e-6), run
            assert ours[1::3] == pytest.approx(right[1::3], abs=1e-9), run


def _environment() -> dict[str, str]:
    import os

    return {**os.environ, "OMP_NUM_THREADS": "1"}


def half(rank: int, world: int, folder: Path) -> None:
    """A whole program in float16 with its JSON, ZeRO 1 and 2: a plain loop's losses, within its rounding."""
    names = runpy.run_path(str(folder / "deepspeed_zero.py"))
    found = [names["main"](stage) for stage in (1, 2)]
    rows, model = names["digits"](640), names["network"]()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.001)
    order = [*DistributedSampler(rows, 1, 0)]
    losses: list[float] = []
    for ids in [order[i : i + 64] for i in range(0, 640, 64)] * 2:
        images, labels = rows[ids]
        each = F.cross_entropy(model(images), labels, reduction="none")
        losses.append(each[rank::world].mean().item())
        optimizer.zero_grad()
        each.mean().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
    assert found[0] == found[1] and len(losses) == 20 and losses[-1] < 0.9 * losses[0]
    assert found[0] == pytest.approx(losses, abs=4e-3)


@pytest.mark.world(2)
def test_a_program_in_float16(ranks: Any, tmp_path: Path) -> None:
    """As ``espalier migrate`` changes it."""
    migrate(["deepspeed_zero"], tmp_path)
    ranks(2, half, tmp_path)
    bodies = [
        (PROGRAMS / f"{name}.py").read_text("utf-8").partition("\n\n\n")[2]
        for name in ("deepspeed_zero", "deepspeed_zero_here")
    ]
    assert bodies[0] == bodies[1] != ""


# ---- what else an engine does


def surface(rank: int, world: int, folder: str) -> None:
    """float16, a saved run that goes on, weights, data, parameters for a time, monitors."""
    fp16 = {"enabled": True, "initial_scale_power": 40, "hysteresis": 1}
    engine, *_ = deepspeed.initialize(model=net(), config=config(2, 1, fp16=fp16))
    train(engine, rank, world, 1)
    assert not engine.was_step_applied() and engine.skipped_steps == 1 and engine.loss_scale() == 2.0**39
    assert engine.get_lr() == [0.0], "a skipped step is none of the schedule's"

    dataset = TensorDataset(torch.arange(48.0).view(8, 6), torch.zeros(8, dtype=torch.long))
    extra = {
        "csv_monitor": {"enabled": True, "output_path": folder, "job_name": "csv"},
        "comms_logger": {"enabled": True, "verbose": True},
        "memory_breakdown": True,
        "steps_per_print": 2,
    }
    parameters = {"stage3_gather_16bit_weights_on_model_save": True, "stage": 3}
    told = config(3, 1, zero_optimization=parameters, **extra)
    with deepspeed.zero.Init():
        model = net()
    engine, optimizer, loader, _ = deepspeed.initialize(model=model, config=told, training_data=dataset)
    assert [len(x) for x, _ in loader] == [ROWS] * (2 // world) and isinstance(optimizer, torch.optim.AdamW)
    train(engine, rank, world, 2)
    weight = engine.module[0].weight
    assert isinstance(weight, DTensor) and (world == 1 or weight.to_local().numel() < weight.numel())
    right = weight.full_tensor()
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=world - 1):
        assert torch.equal(weight.to_local(), right)
        if rank == world - 1:
            with torch.no_grad():
                weight[0] = 7.0
    assert weight.full_tensor()[0].eq(7).all() and torch.equal(weight.full_tensor()[1:], right[1:])
    engine.save_checkpoint(folder, client_state={"epoch": 3})
    assert engine.save_16bit_model(folder)
    saved = torch.load(f"{folder}/pytorch_model.bin", weights_only=True)
    assert saved["0.weight"][0].eq(7).all() and type(saved["0.weight"]) is torch.Tensor
    after = train(engine, rank, world, 2)

    again, *_ = deepspeed.initialize(model=net(), config=config(1, 1))
    path, state = again.load_checkpoint(folder)
    assert state == {"epoch": 3} and path is not None and path.endswith("global_step2")
    assert (again.global_steps, again.global_samples) == (2, 2 * ROWS * world)
    assert again.get_lr() == [pytest.approx(after[1])] or again.lr_scheduler.last_batch_iteration == 1
    assert train(again, rank, world, 2) == pytest.approx(after, rel=1e-5)
    lines = Path(f"{folder}/csv/Train_Samples_train_loss.csv").read_text().splitlines()
    assert len(lines) >= 3 and lines[0] == "step,train_loss"
    with pytest.warns(UserWarning, match="nothing was loaded"):
        assert again.load_checkpoint(f"{folder}/none") == (None, {})


@pytest.mark.world(2)
def test_surface(ranks: Any, tmp_path: Path) -> None:
    """All at once, on two ranks."""
    ranks(2, surface, str(tmp_path))


# ---- a pipeline


def layers() -> list[Any]:
    """A tied layer, specs, a function."""
    tied = {"bias": False}
    return [
        deepspeed.TiedLayerSpec("in", nn.Linear, 6, 16, **tied),
        torch.tanh,
        deepspeed.LayerSpec(nn.Linear, 16, 16),
        nn.GELU(),
        deepspeed.LayerSpec(nn.Linear, 16, 16),
        deepspeed.TiedLayerSpec(
            "in", nn.Linear, 6, 16, forward_fn=lambda m, x: F.linear(x, m.weight.t()), **tied
        ),
    ]


def pipeline(rank: int, world: int) -> list[list[float]]:
    """On two stages, with ZeRO, and on one; evaluation too."""
    found = []
    for stage, pipe in ((0, 1), (0, 2), (2, 2)):
        torch.manual_seed(0)
        model = deepspeed.PipelineModule(layers(), num_stages=pipe, loss_fn=F.cross_entropy).double()
        each = {"train_micro_batch_size_per_gpu": ROWS * world // (world // pipe)} if pipe else {}
        engine, *_ = deepspeed.initialize(model=model, config={**config(stage, 2), **each})
        share, here = world // pipe, engine.engine.mesh.coordinate[engine.engine.mesh.axis("data")]
        rows = [
            (x.chunk(share)[here], y.chunk(share)[here]) for x, y in islice(batches(world, torch.float64), 4)
        ]
        data = cycle(rows)
        same_grid(engine, rank, world, pipe)  # its groups do not stand in the way of the split
        losses = [float(engine.train_batch(data)) for _ in range(5)]
        losses.append(float(engine.eval_batch(data)))
        engine.set_train_batch_size(3 * engine.train_batch_size() // 2)  # of 3 micro-batches
        assert engine.gradient_accumulation_steps() == 3
        losses += [float(engine.train_batch(data)) for _ in range(2)]
        found.append(losses)
    return found


def same_grid(engine: Any, rank: int, world: int, pipe: int) -> None:
    """Its places and groups are those of DeepSpeed's topology."""
    topology = PipeDataParallelTopology(pipe, world // pipe)
    assert engine.module.topology().mapping == topology.mapping and engine.mpu is engine.grid
    assert engine.grid.topology() is engine.module.topology() and engine.module.num_pipeline_stages() == pipe
    at = topology.get_coord(rank)
    assert (engine.grid.get_stage_id(), engine.grid.get_data_parallel_id()) == (at.pipe, at.data)
    assert (
        engine.stage_id == at.pipe
        and engine.grid.stage_to_global(pipe - 1, data=0) == (pipe - 1) * world // pipe
    )
    for axis, group in (
        ("pipe", engine.grid.get_pipe_parallel_group()),
        ("data", engine.grid.get_data_parallel_group()),
        ("model", engine.grid.get_slice_parallel_group()),
    ):
        ranks = [x for x in topology.get_axis_comm_lists(axis) if rank in x] or [[rank]]
        assert torch.distributed.get_process_group_ranks(group) == ranks[0]


def topologies(rank: int, world: int) -> None:
    """One that is given cuts layers over its axis model, and is that of the plan or refused."""
    rows = [(x, y) for x, y in islice(batches(1, torch.float64), 2)]
    losses = []
    for grid in (PipeModelDataParallelTopology(1, world, 1), PipeModelDataParallelTopology(world, 1, 1)):
        torch.manual_seed(0)
        model = deepspeed.PipelineModule(layers(), topology=grid, loss_fn=F.cross_entropy).double()
        engine, *_ = deepspeed.initialize(model=model, config=config(0, 2))
        assert (
            engine.grid.topology() is grid
            and engine.grid.get_slice_parallel_rank() == grid.get_coord(rank).model
        )
        assert (engine.plan.pipe, engine.plan.tensor) == (grid.get_dim("pipe"), grid.get_dim("model"))
        losses.append([float(engine.train_batch(cycle(rows))) for _ in range(3)])
    assert losses[0] == pytest.approx(losses[1], rel=1e-10)
    for wrong, more in (
        (PipeModelDataParallelTopology(1, 1, world), {"tensor_parallel": {"autotp_size": world}}),
        (PipeModelDataParallelTopology(1, world, 1), {"tensor_parallel": {"autotp_size": 2 * world}}),
    ):
        model = deepspeed.PipelineModule(layers(), topology=wrong, loss_fn=F.cross_entropy)
        with pytest.raises(ValueError, match="expected the same"):
            deepspeed.initialize(model=model, config=config(0, 1, **more))
    grid = PipelineParallelGrid(PipeDataParallelTopology(1, world))
    engine, *_ = deepspeed.initialize(model=net(), mpu=grid, config=config(1, 1))
    assert engine.mpu is grid and engine.dp_world_size == grid.get_data_parallel_world_size() == world
    for told, match in (
        ({"get_model_parallel_world_size": world}, "says 2 rank.s. of a tensor axis, and the plan .* 1:"),
        ({"get_data_parallel_world_size": 1}, "says 1 rank.s. that share the batch, and .* 2:"),
        ({"get_data_parallel_rank": rank + 1}, "as this rank's number among those, and the plan"),
    ):
        mpu = SimpleNamespace(**{name: partial(int, n) for name, n in told.items()})
        with pytest.raises(ValueError, match=match):
            deepspeed.initialize(model=net(), mpu=mpu, config=config(1, 1))
    with pytest.raises(ValueError, match=r"num_stages=3\): expected a divisor"):
        deepspeed.PipelineModule(layers(), num_stages=3).topology()


@pytest.mark.world(2)
def test_topologies(ranks: Any) -> None:
    """On two ranks."""
    ranks(2, topologies)


@pytest.mark.world(2)
def test_pipeline(ranks: Any) -> None:
    """The stages compute what one does."""
    for found in ranks(2, pipeline):
        assert found[1] == pytest.approx(found[0], rel=1e-10) and found[2] == pytest.approx(
            found[0], rel=1e-10
        )
        assert found[0][4] < found[0][0]
