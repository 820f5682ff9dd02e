"""Programs of Colossal-AI's forms: what configurations and plugins mean, and their loops on gloo ranks."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import runpy
from collections.abc import Callable
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

from espalier import Plan
from espalier.compat import colossalai
from espalier.compat.colossalai import core
from espalier.compat.colossalai.amp import AMP_TYPE
from espalier.compat.colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
    MoeHybridParallelPlugin,
    Plugin,
    TorchDDPPlugin,
    TorchFSDPPlugin,
)
from espalier.compat.colossalai.config import load, plan_of
from espalier.compat.colossalai.core import global_context as gpc
from espalier.compat.colossalai.nn.optimizer import HybridAdam
from espalier.compat.colossalai.trainer import Trainer, hooks
from espalier.compat.colossalai.utils import share_of
from tests.compat.migrated import PROGRAMS, migrate

PRELOAD = ("sklearn.datasets",)  # the paper's program has its data from there, on each of eight ranks
HOST = dict.fromkeys(("parameters", "gradients", "states"), "host")
ON_CPU = {"model_config": {"tensor_placement_policy": "cpu"}}


@pytest.mark.parametrize(
    ("config", "ranks", "means"),
    [
        ({}, 2, {"data": 2}),
        (
            {"parallel": {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}, "NUM_MICRO_BATCHES": 4},
            8,
            {"pipe": 2, "tensor": 4, "tensor_mode": "2d", "accumulate": 4},
        ),
        (
            {"parallel": {"tensor": {"size": 8, "mode": "2.5d", "depth": 2}}, "clip_grad_norm": 1.0},
            16,
            {"data": 2, "tensor": 8, "tensor_mode": "2.5d", "depth": 2, "clip": 1.0},
        ),
        (
            {"parallel": {"pipeline": {"size": 2}, "tensor": {"size": 2, "mode": "sequence"}}},
            4,
            {"pipe": 2, "context": 2},
        ),
        (
            {"fp16": {"mode": AMP_TYPE.TORCH, "init_scale": 8}, "BATCH_SIZE": 3},
            1,
            {"precision": {"compute": "autocast-float16", "loss_scale": {"init_scale": 8.0}}},
        ),
        ({"fp16": {"mode": AMP_TYPE.APEX}}, 1, {"precision": {"compute": "autocast-float16"}}),
        (
            {"fp16": {"mode": AMP_TYPE.NAIVE, "clip_grad_norm": 0.5}},
            1,
            {"precision": "float16", "clip": 0.5},
        ),
        (
            {"fp16": {"mode": AMP_TYPE.TORCH, "enabled": False}},
            1,
            {"precision": {"compute": "autocast-float16", "loss_scale": {
                "init_scale": 1.0, "growth_factor": 1.0, "backoff_factor": 1.0}}},
        ),
        (
            {"zero": {"model_config": {"reuse_fp16_shard": True}, "optimizer_config": {"initial_scale": 32}}},
            1,
            {"zero": 3, "precision": {"compute": "float16", "loss_scale": {"init_scale": 32.0}}},
        ),
        ({"zero": ON_CPU, "gradient_accumulation": 2}, 1,
         {"zero": 3, "precision": "float16", "offload": HOST, "accumulate": 2}),
    ],
)  # fmt: skip
def test_configurations(config: dict[str, Any], ranks: int, means: dict[str, Any]) -> None:
    """What the paper's configurations mean."""
    assert plan_of(config, ranks) == Plan(**means)


@pytest.mark.parametrize(
    ("config", "told"),
    [
        ({"paralel": {}}, "unknown key; did you mean parallel?"),
        ({"parallel": {"pipelin": 2}}, "did you mean parallel.pipeline?"),
        ({"parallel": {"tensor": {"size": 2, "mod": "1d"}}}, "did you mean parallel.tensor.mode?"),
        ({"parallel": {"tensor": {"size": 2, "mode": "4d"}}}, "expected one of 1d, 2d, 2.5d, 3d, sequence"),
        ({"parallel": {"tensor": {"size": 3}}}, "2 ranks are no multiple of pipeline 1 × tensor 3"),
        ({"parallel": {"data": 1}}, "expected 2: what 2 ranks leave"),
        ({"fp16": {"mode": "half"}}, "expected AMP_TYPE.TORCH"),
        ({"gradient_handler": [{"type": "X"}]}, "leave it out"),
        (
            {"zero": {"optimizer_config": {"inital_scale": 3}}},
            "did you mean zero.optimizer_config.initial_scale?",
        ),
    ],
)
def test_wrong_configurations(config: dict[str, Any], told: str) -> None:
    """Are told with what was meant."""
    with pytest.raises(ValueError, match="Colossal-AI's configuration: 1 mistake") as error:
        plan_of(config, 2)
    assert told in str(error.value)


def test_files(tmp_path: Path) -> None:
    """The names of a Python file are keys, and attributes."""
    (tmp_path / "config.py").write_text(
        "import math\nBATCH_SIZE = 4\nparallel = dict(pipeline=1)\n_own = 1\n"
    )
    found = load(tmp_path / "config.py")
    assert dict(found) == {"BATCH_SIZE": 4, "parallel": {"pipeline": 1}} and found.parallel.pipeline == 1
    found["model"] = {"type": nn.Linear, "in_features": 3, "out_features": 2}
    assert found.model.pop("type")(**found.model).weight.shape == (2, 3)
    found.EPOCHS = 5
    assert found["EPOCHS"] == 5
    with pytest.raises(AttributeError, match="no 'LR'"):
        _ = found.LR
    with pytest.raises(ValueError, match="the path of a Python file"):
        load(tmp_path / "none.py")


HALF: dict[str, Any] = {"compute": "float16", "loss_scale": {"growth_interval": 1000, "hysteresis": 2}}
LARGE = {**HALF, "loss_scale": {**HALF["loss_scale"], "init_scale": 2.0**32}}


@pytest.mark.parametrize(
    ("plugin", "ranks", "means"),
    [
        (TorchDDPPlugin(bucket_cap_mb=5, static_graph=True), 2, {"data": 2, "chunk_megabytes": 5.0}),
        (TorchFSDPPlugin(cpu_offload=True), 2, {"data": 2, "zero": 3, "offload": HOST}),
        (
            LowLevelZeroPlugin(stage=2, max_norm=1.0, reduce_bucket_size_in_m=1),
            2,
            {"data": 2, "zero": 2, "clip": 1.0, "precision": LARGE, "chunk_megabytes": 2.097152},
        ),
        (
            LowLevelZeroPlugin(extra_dp_size=2),
            4,
            {"data": 2, "replicate": 2, "zero": 1, "chunk_megabytes": 25.165824,
             "precision": LARGE},
        ),
        (
            GeminiPlugin(precision="bf16", offload_optim_frac=0.5, tp_size=2, extra_dp_size=2),
            8,
            {"data": 2, "replicate": 2, "tensor": 2, "zero": 3, "precision": "bfloat16",
             "offload": {"states": {"place": "host", "ratio": 0.5}}},
        ),
        (
            HybridParallelPlugin(tp_size=2, pp_size=2, num_microbatches=4, precision="fp32", zero_stage=1,
                                 pp_style="interleaved", num_model_chunks=2, enable_sequence_parallelism=True,
                                 sequence_parallelism_mode="split_gather", zero_bucket_size_in_m=1),
            8,
            {"data": 2, "tensor": 2, "pipe": 2, "accumulate": 4, "zero": 1, "schedule": "interleaved",
             "stages_per_rank": 2, "sequence_parallel": True, "chunk_megabytes": 4.194304},
        ),
        (
            HybridParallelPlugin(tp_size=1, pp_size=1, sp_size=2, precision="fp32",
                                 enable_sequence_parallelism=True, sequence_parallelism_mode="all_to_all"),
            4,
            {"data": 2, "context": 2, "context_kind": "ulysses"},
        ),
        (
            HybridParallelPlugin(tp_size=1, pp_size=2, microbatch_size=4, precision="fp32", pp_style="zbv",
                                 num_model_chunks=2, scheduler_nodes=[]),
            4,
            {"data": 2, "pipe": 2, "accumulate": 2, "schedule": "zbv", "stages_per_rank": 2},
        ),
        (
            HybridParallelPlugin(tp_size=1, pp_size=1, sp_size=2, precision="fp32",
                                 enable_sequence_parallelism=True),
            2,
            {"data": 1, "context": 2, "context_kind": "ulysses"},
        ),
        (
            MoeHybridParallelPlugin(tp_size=1, pp_size=2, ep_size=2, num_microbatches=2, precision="bf16"),
            8,
            {"data": 4, "pipe": 2, "expert": 2, "accumulate": 2, "precision": "bfloat16"},
        ),
    ],
)  # fmt: skip
def test_plugins(plugin: Plugin, ranks: int, means: dict[str, Any]) -> None:
    """What plugins mean."""
    assert plugin.plan(ranks) == Plan(**means)


def test_wrong_plugins() -> None:
    """All mistakes at once; what has no effect is known."""
    with pytest.raises(ValueError, match="LowLevelZeroPlugin: 2 mistakes") as error:
        LowLevelZeroPlugin(stag=1, fp8_communication=True)
    assert "did you mean stage?" in str(error.value) and "not to be had here" in str(error.value)
    with pytest.raises(
        ValueError, match="num_microbatches: is needed with a pipeline|num_microbatches = None"
    ):
        HybridParallelPlugin(tp_size=1, pp_size=2)
    assert HybridParallelPlugin(2, 1).plan(2).tensor == 2
    with pytest.raises(TypeError, match=r"takes 2 argument\(s\) without a name"):
        LowLevelZeroPlugin(1, "bf16", 2.0)
    with pytest.raises(ValueError, match="ep_size: is needed|ep_size = None: is needed"):
        MoeHybridParallelPlugin(tp_size=1, pp_size=1)
    with pytest.raises(AttributeError, match="pg_mesh is not there: plugin.dp_group"):
        _ = TorchDDPPlugin().pg_mesh
    with pytest.raises(ValueError, match="3 ranks are no multiple of the 2"):
        HybridParallelPlugin(tp_size=2, pp_size=1).plan(3)
    assert TorchDDPPlugin(static_graph=True).idle == {"static_graph": "there is no such choice here"}


@pytest.mark.parametrize(
    ("launch", "names"),
    [
        ("launch_from_slurm", ("SLURM_PROCID", "SLURM_NPROCS")),
        ("launch_from_openmpi", ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")),
    ],
)
def test_launchers(monkeypatch: pytest.MonkeyPatch, launch: str, names: tuple[str, str]) -> None:
    """Ranks are those that the launcher has counted; under another one it is said which."""
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    started: list[dict[str, str]] = []
    monkeypatch.setattr(core, "start", lambda device: started.append(dict(os.environ)))
    monkeypatch.setattr(core.dist, "is_initialized", lambda: False)
    with pytest.raises(ValueError, match=f"{names[0]} and {names[1]}(.|\n)*launch_from_torch"):
        getattr(colossalai, launch)({"LR": 1}, "here", 29500)
    for name, value in zip(names, ("3", "8"), strict=True):
        monkeypatch.setenv(name, value)
    getattr(colossalai, launch)({"LR": 1}, "here", 29500, seed=5)
    (variables,) = started
    assert (variables["RANK"], variables["WORLD_SIZE"]) == ("3", "8")
    assert (variables["MASTER_ADDR"], variables["MASTER_PORT"]) == ("here", "29500")
    assert gpc.config.LR == 1 and torch.initial_seed() == 5


def test_layers_are_torchs() -> None:
    """``col_nn.Linear`` is cut by the plan as any."""
    from espalier.compat.colossalai import nn as col_nn

    assert col_nn.Linear is nn.Linear and col_nn.LayerNorm is nn.LayerNorm


def test_who_brings_which_rows() -> None:
    """Ranks of the tensor axes that cut rows bring rows of their own."""
    plan = Plan(data=2, tensor=4, tensor_mode="2d")
    assert [share_of(plan, rank) for rank in range(8)] == [(4, place) for place in (0, 0, 1, 1, 2, 2, 3, 3)]


# ---- loops


def net() -> nn.Module:
    """The same on each call."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 4)).double()


class Taking(nn.Module):
    """A model that is given its batch whole, labels and all."""

    def __init__(self) -> None:
        super().__init__()
        self.net = net()

    def forward(self, x: torch.Tensor, labels: torch.Tensor | None = None) -> torch.Tensor:
        return self.net(x)


def judged(output: torch.Tensor, batch: dict[str, torch.Tensor]) -> torch.Tensor:
    """The loss of a batch."""
    return F.cross_entropy(output, batch["labels"])


def dataset() -> TensorDataset:
    """Sixteen rows."""
    generator = torch.Generator().manual_seed(1)
    return TensorDataset(
        torch.randn(16, 6, generator=generator).double(), torch.randint(4, (16,), generator=generator)
    )


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW."""
    return torch.optim.AdamW(model.parameters(), lr=0.02)


def plain(epochs: int) -> list[torch.Tensor]:
    """Parameters after epochs of batches of 8 rows, clipped."""
    model = net()
    optimizer = optimizer_of(model)
    for _ in range(epochs):
        for x, y in DataLoader(dataset(), 8):
            F.cross_entropy(model(x), y).backward()
            nn.utils.clip_grad_norm_(model.parameters(), 0.5)
            optimizer.step()
            optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def assert_same(engine: Any, right: list[torch.Tensor]) -> None:
    """The model's parameters are these."""
    for x, y in zip(engine.engine.full_state_dict().values(), right, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-9, atol=1e-12)


class Strided:
    """A rank's rows of batches of 8, as a loader would give them."""

    def __init__(self, share: int, here: int) -> None:
        self.share, self.here = share, here

    def __iter__(self) -> Any:
        return (tuple(t.chunk(self.share)[self.here] for t in rows) for rows in DataLoader(dataset(), 8))


def of_the_paper(rank: int, world: int) -> list[float]:
    """A loop, and the Trainer with hooks, under configurations; a pipeline."""
    right = plain(1)
    for parallel, share, here in (
        ({}, world, rank),
        ({"tensor": {"size": world, "mode": "1d"}}, 1, 0),
        ({"tensor": {"size": world, "mode": "2d"}}, 1, 0),  # all bring the same rows
    ):
        colossalai.launch({"parallel": parallel, "clip_grad_norm": 0.5})
        model = net()
        engine, loader, *_ = colossalai.initialize(
            model, optimizer_of(model), nn.CrossEntropyLoss(), Strided(share, here)
        )
        engine.train()
        for x, y in loader:
            engine.zero_grad()
            with pytest.raises(NotImplementedError, match="execute_schedule takes pairs"):
                engine.schedule.data_process_func = None
            output = engine(x)
            assert output.shape == (len(x), 4)
            engine.backward(engine.criterion(output, y))
            engine.step()
        assert_same(engine, right)

    told = []
    micro = {"NUM_MICRO_BATCHES": 2, "clip_grad_norm": 0.5}
    for config in ({"clip_grad_norm": 0.5}, {"parallel": {"pipeline": world}, **micro}):
        colossalai.launch(config)
        assert gpc.config.clip_grad_norm == 0.5
        model, seen = net(), []

        class Hook(hooks.BaseHook):
            def after_train_iter(
                self, trainer: Trainer, output: Any, label: Any, loss: Any, seen: Any = seen
            ) -> None:
                seen.append(float(loss))

        optimizer = optimizer_of(model)
        engine, *_ = colossalai.initialize(model, optimizer, nn.CrossEntropyLoss())
        share, here = share_of(engine.engine.plan, rank)
        trainer = Trainer(engine)
        schedule = torch.optim.lr_scheduler.ConstantLR(optimizer, factor=1.0)
        trainer.fit(
            Strided(share, here),
            epochs=2,
            test_dataloader=Strided(share, here),
            hooks=[
                Hook(),
                hooks.LossHook(),
                hooks.LRSchedulerHook(schedule, by_epoch=True),
                hooks.AccuracyHook(colossalai.nn.metric.Accuracy()),
                hooks.LogMetricByEpochHook(),
            ],
        )
        assert trainer.cur_step == len(seen) == 4 and trainer.states["metrics"]["train"]["LR"] == 0.02
        assert_same(engine, plain(2))
        told += [trainer.states["metrics"]["test"][name] for name in ("Loss", "Accuracy")]
    return told


@pytest.mark.world(2)
def test_the_papers_programs(ranks: Callable[..., Any]) -> None:
    """The parameters of a plain loop, and the same metrics whatever the plan."""
    for told in ranks(2, of_the_paper):
        assert told[:2] == pytest.approx(told[2:])


def boosted(rank: int, world: int, folder: str) -> None:
    """Plugins around a plain loop; a pipeline; weights out and in."""
    right = plain(1)
    plugins = (
        TorchDDPPlugin(),
        LowLevelZeroPlugin(stage=1, precision="fp32", max_norm=0.5),
        HybridParallelPlugin(tp_size=1, pp_size=2, num_microbatches=2, precision="fp32", max_norm=0.5),
    )
    for i, plugin in enumerate(plugins):
        booster = colossalai.Booster(plugin=plugin)

        def boosted_net(booster: Any = booster, i: int = i) -> tuple[Any, Any]:
            model = Taking() if i == 2 else net()
            return booster.boost(model, optimizer_of(model))[:2]

        def epoch(model: Any, optimizer: Any, booster: Any = booster, i: int = i) -> None:
            share, here = share_of(model.engine.plan, rank)
            for batch in Strided(share, here):
                if i == 2:
                    rows = iter([{"x": batch[0], "labels": batch[1]}])
                    assert booster.execute_pipeline(rows, model, judged, optimizer)["loss"] is not None
                else:
                    booster.backward(F.cross_entropy(model(batch[0]), batch[1]), optimizer)
                    if i == 0:
                        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
                optimizer.step()
                optimizer.zero_grad()

        model, optimizer = boosted_net()
        epoch(model, optimizer)
        assert_same(model, right)
        for shard in (False, True, False, True):  # the second time over what is there
            booster.save_model(model, f"{folder}/{i}{'' if shard else '.pt'}", shard=shard)
            booster.save_optimizer(optimizer, f"{folder}/{i} states{'' if shard else '.pt'}", shard=shard)
        dist.barrier()
        for end in (".pt", ""):
            again, states = boosted_net()
            booster.load_model(again, f"{folder}/{i}{end}")
            assert_same(again, right)
            booster.load_optimizer(states, f"{folder}/{i} states{end}")
            epoch(again, states)
            assert_same(again, plain(2))
        booster.save_checkpoint(model, f"{folder}/{i} all")
        again, states = boosted_net()
        booster.load_checkpoint(again, f"{folder}/{i} all")
        schedule = torch.optim.lr_scheduler.StepLR(states, 1)
        epoch(again, states)
        assert_same(again, plain(2))
        schedule.step()
        booster.save_lr_scheduler(schedule, f"{folder}/{i} schedule")
        dist.barrier()
        other = torch.optim.lr_scheduler.StepLR(states, 1)
        booster.load_lr_scheduler(other, f"{folder}/{i} schedule")
        assert other.last_epoch == schedule.last_epoch == 1
        with pytest.raises(ValueError, match="was not boosted"):
            booster.save_optimizer(optimizer_of(net()), f"{folder}/none")
    loader = plugins[0].prepare_dataloader(dataset(), 4)
    assert [len(x) for x, _ in islice(loader, 3)] == [4, 4]


@pytest.mark.world(2)
def test_booster(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """The parameters of a plain loop."""
    ranks(2, boosted, str(tmp_path))


# ---- a program in the form of each plugin, as espalier migrate changes it


def of_torch(batch: int, clips: bool) -> list[float]:
    """The losses of its loop on one process."""
    names = runpy.run_path(str(PROGRAMS / "colossal_here.py"))
    torch.manual_seed(0)
    model, found = names["Network"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.003, weight_decay=0.0)
    for _ in range(2):
        for images, labels in DataLoader(names["digits"](0, 192), batch):
            loss = F.cross_entropy(model(images), labels)
            loss.backward()
            if clips:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
    return found


def migrated_program(rank: int, world: int, folder: Path) -> dict[str, list[float]]:
    """This rank's losses, under each plugin."""
    names = runpy.run_path(str(folder / "colossal.py"))
    kinds = names["PLUGINS"]
    shared = ("tensor", "pipeline")  # all ranks have the same rows
    return {kind: names["main"](kind, 16 if kind in shared else 8) for kind in kinds}


@pytest.mark.world(2)
def test_a_program_of_each_plugin(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """The diff of ``espalier migrate`` is applied, and what comes of it run."""
    migrate(["colossal"], tmp_path)
    losses = of_torch(16, False), of_torch(16, True)
    assert losses[0] != losses[1] and all(len(x) >= 20 and max(x) < 3 > 2 * min(x) for x in losses)
    for kind, of_ranks in _by_kind(ranks(2, migrated_program, tmp_path)).items():
        mean = [sum(x) / 2 for x in zip(*of_ranks, strict=True)]
        right = losses[kind not in ("ddp", "fsdp")]  # these have no max_norm
        if kind == "gemini":  # bfloat16
            assert mean == pytest.approx(right, abs=0.05), kind
        else:
            assert mean == pytest.approx(right, abs=1e-6), kind
    bodies = [
        (PROGRAMS / f"{name}.py").read_text("utf-8").partition("\n\n\n")[2]
        for name in ("colossal", "colossal_here")
    ]
    assert bodies[0] == bodies[1] != ""


def of_torch_with_a_schedule() -> tuple[list[float], float, float]:
    """Losses, and the loss and accuracy on rows that are not trained on."""
    names = runpy.run_path(str(PROGRAMS / "colossal_trainer_here.py"))
    torch.manual_seed(0)
    model, losses = names["network"](), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    for epoch in range(2):
        optimizer.param_groups[0]["lr"] = 0.01 * (1 + epoch) / 3
        for images, labels in DataLoader(names["digits"](0, 160), 16):
            loss = F.cross_entropy(model(images), labels)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            losses.append(loss.item())
    images, labels = (torch.stack(column) for column in zip(*names["digits"](160, 192), strict=True))
    with torch.no_grad():
        logits = model(images)
    right = (logits.argmax(-1) == labels).float().mean()
    return losses, F.cross_entropy(logits, labels).item(), right.item()


def migrated_trainer(rank: int, world: int, folder: Path) -> list[Any]:
    """Losses and metrics, under the paper's configuration and others."""
    names = runpy.run_path(str(folder / "colossal_trainer.py"))
    config = names["CONFIG"]
    assert config["parallel"] == {"pipeline": 2, "tensor": {"size": 4, "mode": "2d"}}
    trainings = []
    for name, parallel in (
        ("paper", config["parallel"]),
        ("data", {"tensor": {"size": 2, "mode": "1d"}}),
    ):
        size = 16 if name == "paper" else 4  # of each rank of the data axis
        more = {"parallel": parallel, "LOG_PATH": f"{folder}/{name}", "BATCH_SIZE": size}
        trainings.append(names["main"]({**config, **more}))
    engine, *_ = colossalai.initialize(
        model := names["network"](), optimizer_of(model), nn.CrossEntropyLoss()
    )  # what the first plan saved, under the second
    trainer, test = Trainer(engine), colossalai.utils.get_dataloader(names["digits"](160, 192), batch_size=4)
    load = hooks.LoadCheckpointHook(f"{folder}/paper/saved", finetune=True)
    trainer.fit([], epochs=1, test_dataloader=test, hooks=[load, hooks.LossHook()])
    trainings.append(trainer.states["metrics"]["test"]["Loss"])
    return trainings


@pytest.mark.world(8)
def test_the_papers_trainer_as_migrated(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """A configuration of pipeline and 2D tensors, engine, Trainer and hooks: the losses of a plain loop."""
    migrate(["colossal_trainer"], tmp_path)
    right, test_loss, accuracy = of_torch_with_a_schedule()
    assert len(right) == 20 and right[0] > 2 > 2 * right[-1]
    *trainings, loaded = zip(*ranks(8, migrated_trainer, tmp_path, timeout=240), strict=True)
    assert loaded == pytest.approx([test_loss] * 8, abs=1e-6)
    for of_ranks in trainings:
        losses = [sum(x) / 8 for x in zip(*(losses for losses, _ in of_ranks), strict=True)]
        assert losses == pytest.approx(right, abs=1e-6)
        for _, metrics in of_ranks:
            assert metrics["test"]["Loss"] == pytest.approx(test_loss, abs=1e-6)
            assert metrics["test"]["Accuracy"] == pytest.approx(accuracy)
            assert metrics["train"]["Loss"] == pytest.approx(sum(right[10:]) / 10, abs=1e-6)
            assert metrics["train"]["LR"] == pytest.approx(0.01) and metrics["train"]["Throughput"] > 0
    assert [*tmp_path.glob("paper/rank_0/events*")] and [*tmp_path.glob("paper/saved/*")]


def _by_kind(found: list[dict[str, list[float]]]) -> dict[str, list[list[float]]]:
    return {kind: [of_rank[kind] for of_rank in found] for kind in found[0]}


def test_arguments_of_plugins() -> None:
    """Each that Colossal-AI 0.5.0 takes is honoured, has no effect that is told, or is refused; defaults are
    the same.
    """
    lines = (Path(__file__).parent / "colossalai_surface.txt").read_text("utf-8").splitlines()
    signatures = {
        name: dict(word.partition("=")[::2] for word in words.split())
        for name, _, words in (line.partition(": ") for line in lines)
    }
    kinds = {x.__name__: x for x in [*Plugin.__subclasses__(), MoeHybridParallelPlugin]}
    assert signatures.keys() == kinds.keys()
    for name, kind in kinds.items():
        answered = [*kind._known, *kind._without, *kind._refused]
        assert len(answered) == len({*answered}), name
        assert [word for word in signatures[name] if word not in answered] == [], name
        needs = {"tp_size": 2, "pp_size": 2, "num_microbatches": 4} if "Hybrid" in name else {}
        needs |= {"ep_size": 2} if "Moe" in name else {}
        plan = kind(**needs).plan(8)
        for word, text in signatures[name].items():
            if word not in needs and text:
                default = ast.literal_eval(text)
                assert kind(**needs, **{word: default}).plan(8) == plan, (name, word)
        for word, reason in kind._without.items():
            assert kind(**needs, **{word: None}).idle == {word: reason} and reason
        for word, (nothing, _) in kind._refused.items():
            kind(**needs, **{word: nothing})
            with pytest.raises(ValueError, match=f"{word}(.|\n)*not to be had here"):
                kind(**needs, **{word: not nothing})
    if importlib.util.find_spec("colossalai") is not None:
        plugins = importlib.import_module("colossalai.booster.plugin")
        for name, words in signatures.items():
            assert [*inspect.signature(getattr(plugins, name)).parameters] == [*words], name


def test_arguments_of_optimizers() -> None:
    """None is dropped in silence."""
    one = [nn.Parameter(torch.ones(2))]
    assert HybridAdam(one, betas=(0.8, 0.9), nvme_offload_fraction=0.5).defaults["betas"] == (0.8, 0.9)
    assert type(HybridAdam(one, adamw_mode=False)) is torch.optim.Adam
    with pytest.raises(ValueError, match=r"HybridAdam: 2 mistakes(.|\n)*bias_correction(.|\n)*weight_decai"):
        HybridAdam(one, bias_correction=False, weight_decai=0.1)


def test_names_beside_engines(capsys: pytest.CaptureFixture[str]) -> None:
    """A coordinator, models without memory, and what is not there."""
    coordinator = colossalai.cluster.DistCoordinator()
    assert coordinator.is_master() and coordinator.is_node_master() and coordinator.world_size == 1
    assert coordinator.is_last_process()
    with pytest.raises(ValueError, match="ophooks(.|\n)*torch's hooks work on modules"):
        colossalai.initialize(net(), optimizer_of(net()), ophooks=[1])
    with pytest.raises(ValueError, match=r"schedule=\.\.\.\)\) says it"):
        Trainer(None, schedule="1f1b")  # type: ignore[arg-type]
    with coordinator.priority_execution():
        coordinator.print_on_master("here")
    assert capsys.readouterr().out == "here\n"
    assert coordinator.on_master_only()(lambda x: x + 1)(2) == 3
    torch.manual_seed(0)
    with colossalai.lazy.LazyInitContext():
        model = torch.nn.Linear(3, 2)
    assert model.weight.is_meta
    colossalai.lazy.LazyInitContext.materialize(model)
    torch.manual_seed(0)
    assert torch.equal(model.weight, torch.nn.Linear(3, 2).weight)
    with pytest.raises(NotImplementedError, match="ShardConfig is not there: Booster"):
        colossalai.shardformer.ShardConfig()


@pytest.mark.skipif(torch.accelerator.is_available(), reason="answers of a CPU")
def test_small_answers() -> None:
    """Of timers, of utilities and of the accelerator, on a machine without a GPU."""
    utilities, timers = colossalai.utils, colossalai.utils.MultiTimer()
    timers.start("a")
    seconds = timers.stop("a", keep_in_history=True)
    timer = timers.get_timer("a")
    assert timer.has_history and timer.get_history_sum() == seconds == timers.history("a")[0]
    timers.reset("b")
    assert timer.has_history
    timers.reset("a")
    timers.set_status(False)
    assert not (timer.has_history or timers.is_on())
    given, cpu = torch.ones(3), torch.device("cpu")
    utilities.free_storage(given)
    utilities.colo_set_process_memory_fraction(0.5)
    line, here = nn.Linear(1, 1), colossalai.accelerator.get_accelerator()
    grads = []
    for enable in (False, True):
        with utilities.conditional_context(torch.no_grad(), enable):
            grads.append(torch.is_grad_enabled())
    for answer, right in (
        (grads, [True, False]),
        (given.untyped_storage().size(), 0),
        (utilities.get_current_device(), cpu),
        (utilities.is_ddp_ignored(given), False),
        (utilities.colo_device_memory_used(cpu), 0),
        (utilities.colo_device_memory_capacity(cpu) > 2**20, True),
        (utilities.set_to_cuda([line]), line),
        (utilities.set_to_cuda([line, line]), [line, line]),
        (vars(utilities.get_default_parser().parse_args(["--rank", "3"]))["rank"], 3),
        (here.communication_backend, "gloo"),
        (here.get_device_properties(), None),
        (here.get_version()[0], "3"),
        (here.device_name(), "cpu"),
    ):
        assert answer == right
