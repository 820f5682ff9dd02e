"""Layers of experts in DeepSpeed's form: the same routing, losses and updates as under DeepSpeed itself."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from espalier.compat import deepspeed
from espalier.compat.deepspeed.moe.layer import MoE
from espalier.compat.deepspeed.moe.sharded_moe import TopKGate
from espalier.compat.deepspeed.moe.utils import (
    has_moe_layers,
    is_moe_param,
    split_params_into_different_moe_groups_for_optimizer,
)

ROOT = Path(__file__).parents[2]
STEPS, ROWS = 20, 12
FEW = 6  # steps beside another axis
# of a layer; nothing drawn
RUNS: list[dict[str, Any]] = [
    {"num_experts": 4, "ep_size": 2, "use_rts": False, "min_capacity": 2},
    {"num_experts": 4, "ep_size": 1, "use_rts": False, "capacity_factor": 1.3, "use_residual": True},
    {"num_experts": 6, "ep_size": 2, "k": 2, "top2_2nd_expert_sampling": False, "min_capacity": 1},
    {"num_experts": 2, "ep_size": 2, "drop_tokens": False, "use_rts": False},
    {"num_experts": 4, "ep_size": 2, "k": 2, "top2_2nd_expert_sampling": False, "drop_tokens": False},
    {"num_experts": 5, "ep_size": 1, "k": 3, "capacity_factor": 0.9, "min_capacity": 1},
]


class Net(nn.Module):
    """A layer of experts between two others."""

    def __init__(self, kind: Any, **options: Any) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 8), nn.Linear(8, 3)
        self.moe = kind(8, nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), **options)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        y, balance, _ = self.moe(self.first(x))
        return self.last(y), balance


def net(kind: Any, options: dict[str, Any]) -> Net:
    torch.manual_seed(0)
    return Net(kind, **options)


def batch(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(100 * step + rank)
    return torch.randn(ROWS, 6, generator=generator), torch.randint(3, (ROWS,), generator=generator)


def groups(model: nn.Module, split: Any) -> Any:
    return split({"params": list(model.parameters()), "name": "all"})


def train(library: Any, kind: Any, split: Any, options: dict[str, Any], rank: int, stage: int) -> list[float]:
    """This rank's losses: of its labels, and how its tokens are balanced."""
    model = net(kind, options)
    config = {
        "train_micro_batch_size_per_gpu": ROWS,
        "optimizer": {"type": "Adam", "params": {"lr": 0.01, "weight_decay": 0.0, "torch_adam": True}},
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 1000.0,
    }
    engine, *_ = library.initialize(model=model, model_parameters=groups(model, split), config=config)
    losses = []
    for step in range(STEPS):
        x, y = batch(step, rank)
        logits, balance = engine(x)
        loss = F.cross_entropy(logits, y) + 0.1 * balance
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


def ours(rank: int, world: int, stage: int) -> list[list[float]]:
    return [
        train(deepspeed, MoE, split_params_into_different_moe_groups_for_optimizer, options, rank, stage)
        for options in RUNS
    ]


def of_one_process(options: dict[str, Any], world: int, dtype: torch.dtype = torch.float32) -> list[float]:
    """A plain loop whose batches are each rank's rows apart."""
    model = net(MoE, options).to(dtype)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        parts = []
        for rank in range(world):
            x, y = batch(step, rank)
            logits, balance = model(x.to(dtype))
            parts.append(F.cross_entropy(logits, y) + 0.1 * balance)
        loss = torch.stack(parts).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses


@pytest.mark.parametrize("stage", [1, 3])
def test_each_ranks_rows_are_a_group(ranks: Any, stage: int) -> None:
    """On two ranks as on one process that routes each rank's rows by themselves."""
    for run, of_ranks in zip(RUNS, zip(*ranks(2, ours, stage), strict=True), strict=True):
        mean = [sum(losses) / 2 for losses in zip(*of_ranks, strict=True)]
        assert mean == pytest.approx(of_one_process(run, 2), abs=1e-6), run


class Routed(nn.Module):
    """A layer of experts whose output alone goes on, beside its input."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.moe = MoE(8, nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8)), **options)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.moe(x)[0]


def stages_of(options: dict[str, Any]) -> list[nn.Module]:
    torch.manual_seed(0)
    return [nn.Linear(6, 8), Routed(**options), nn.GELU(), Routed(**options), nn.Linear(8, 3)]


BESIDE = [RUNS[0], RUNS[1], RUNS[4]]
CONFIG: dict[str, Any] = {
    "train_micro_batch_size_per_gpu": ROWS,
    "optimizer": {"type": "AdamW", "params": {"lr": 0.01, "weight_decay": 0.0}},
}


def place_of(engine: Any) -> int:
    """Which of the two ranks that bring rows of their own this is."""
    mesh = engine.engine.mesh
    return int(mesh.coordinate[mesh.axis("expert" if engine.engine.plan.expert == 2 else "data")])


def beside(rank: int, world: int) -> dict[str, list[list[float]]]:
    """Losses on two ranks of data, which share the experts, times two of a tensor axis, or of stages."""
    losses: dict[str, list[list[float]]] = {"tensor": [], "pipe": []}
    for options in BESIDE:
        model = net(MoE, options).double()
        engine, *_ = deepspeed.initialize(model=model, config=CONFIG, plan={"tensor": 2})
        assert engine.engine.plan.tensor == engine.engine.plan.data == 2
        assert engine.engine.plan.expert == options["ep_size"]
        ((name, group),) = engine.expert_parallel_group.items()
        assert name == f"ep_size_{dist.get_world_size(group)}" == f"ep_size_{options['ep_size']}"
        assert deepspeed.utils.groups._get_expert_parallel_world_size(name) == options["ep_size"]
        here = place_of(engine)
        losses["tensor"].append([])
        for step in range(FEW):
            x, y = batch(step, here)
            logits, balance = engine(x.double())
            loss = F.cross_entropy(logits, y) + 0.1 * balance
            engine.backward(loss)
            engine.step()
            losses["tensor"][-1].append(loss.item())
        piped = deepspeed.PipelineModule(stages_of(options), num_stages=2, loss_fn=F.cross_entropy).double()
        config = {**CONFIG, "gradient_accumulation_steps": 2}
        engine, *_ = deepspeed.initialize(model=piped, config=config)
        assert engine.engine.plan.pipe == 2 and engine.engine.plan.expert == options["ep_size"]
        rows = ((x.double(), y) for x, y in (batch(i, place_of(engine)) for i in range(2 * FEW)))
        losses["pipe"].append([float(engine.train_batch(rows)) for _ in range(FEW)])
    return losses


def of_stages_on_one_process(options: dict[str, Any]) -> list[float]:
    """A plain loop whose micro-batches are each rank's rows apart."""
    model = nn.Sequential(*stages_of(options)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.0)
    losses = []
    for step in range(FEW):
        rows = [batch(2 * step + i, rank) for i in range(2) for rank in range(2)]
        loss = torch.stack([F.cross_entropy(model(x.double()), y) for x, y in rows]).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.world(4)
def test_beside_a_tensor_axis_and_in_a_pipeline(ranks: Any) -> None:
    """The losses of one process; gates compute in float32, as DeepSpeed's."""
    of_ranks = ranks(4, beside)
    for i, options in enumerate(BESIDE):
        mean = [sum(x) / 4 for x in zip(*(losses["tensor"][i] for losses in of_ranks), strict=True)]
        assert mean == pytest.approx(of_one_process(options, 2, torch.float64)[:FEW], abs=1e-7), options
        alone = of_stages_on_one_process(options)
        for losses in of_ranks:
            assert losses["pipe"][i] == pytest.approx(alone, abs=1e-7), options


REFERENCE = """
import json, logging, sys
sys.path.insert(0, {root!r})
import deepspeed
import torch
from deepspeed.moe.layer import MoE
from deepspeed.moe.utils import split_params_into_different_moe_groups_for_optimizer as split
from deepspeed.utils import logger
from tests.compat.test_deepspeed_moe import RUNS, train

logger.setLevel(logging.ERROR)
deepspeed.init_distributed(dist_backend="gloo")
rank = torch.distributed.get_rank()
found = [train(deepspeed, MoE, split, options, rank, 0) for options in RUNS]
with open(f"{{sys.argv[1]}}/{{rank}}.json", "w") as file:
    json.dump(found, file)
"""


@pytest.mark.world(2)
def test_layers_of_experts_are_deepspeeds(ranks: Any, tmp_path: Path) -> None:
    """The same program under DeepSpeed itself: the same losses, in float32."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: see tests/compat/test_deepspeed.py")
    script = tmp_path / "reference.py"
    script.write_text(REFERENCE.format(root=str(ROOT)))
    launch = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    done = subprocess.run(
        [*launch, "--rdzv-backend", "c10d", "--rdzv-endpoint", "localhost:0", str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"},
        timeout=400,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    theirs = [json.loads((tmp_path / f"{rank}.json").read_text()) for rank in range(2)]
    found = ranks(2, ours, 0)
    for i, run in enumerate(RUNS):  # the balance here is that of both ranks
        mean = [sum(losses) / 2 for losses in zip(*(of[i] for of in found), strict=True)]
        right = [sum(losses) / 2 for losses in zip(*(of[i] for of in theirs), strict=True)]
        assert mean == pytest.approx(right, abs=1e-6), run


def test_gates_that_draw() -> None:
    """Only those within capacity are kept, whatever is drawn; none is where the program says so."""
    torch.manual_seed(0)
    tokens = torch.randn(40, 8)
    for options in ({}, {"k": 2}, {"noisy_gate_policy": "RSample"}, {"noisy_gate_policy": "Jitter"}):
        gate = TopKGate(8, 4, min_capacity=1, capacity_factor=0.5, **options)
        first, second = gate(tokens), gate(tokens)
        k = options.get("k", 1)
        for routing in (first, second):
            assert routing.experts.shape == routing.weights.shape == (40, k)
            assert routing.experts.flatten().bincount(minlength=5)[:4].max() <= 5 * k
            assert (routing.experts == 4).eq(routing.weights == 0).all()
            assert routing.choices.sum() == 40 * k
        assert not torch.equal(first.experts, second.experts)
        gate.eval()
        gate.use_rts = gate.top2_2nd_expert_sampling = False
        assert torch.equal(gate(tokens).experts, gate(tokens).experts)
    used = torch.ones(40)
    used[3] = 0
    routing = TopKGate(8, 4, drop_tokens=False)(tokens, used)
    assert routing.experts[3] == 4 and (routing.experts == 4).sum() == 1 and routing.choices.sum() == 39


def test_what_programs_ask() -> None:
    """Groups, parameters, and what is refused."""
    model = net(MoE, {"num_experts": 4, "k": 2})
    assert has_moe_layers(model) == (True, 4) and has_moe_layers(nn.Linear(1, 1)) == (False, 0)
    shared, apart = groups(model, split_params_into_different_moe_groups_for_optimizer)
    assert apart["moe"] and apart["name"] == "ep_size_1" and all(map(is_moe_param, apart["params"]))
    assert len(apart["params"]) == 4 and len(shared["params"]) == len(list(model.parameters())) - 4
    config = {"train_batch_size": 6, "optimizer": {"type": "Adam", "params": {"lr": 0.1}}}
    engine = deepspeed.initialize(model=model, config=config)[0]
    assert engine.has_moe_layers and engine.num_experts == [4]
    with pytest.raises(
        ValueError, match=r"num_experts(.|\n)*multiple of ep_size = 2(.|\n)*noisy_gate_policy"
    ):
        MoE(8, nn.Linear(8, 8), num_experts=3, ep_size=2, noisy_gate_policy="Loud")
    with pytest.raises(ValueError, match=r"running_mean(.|\n)*constant of its forward"):
        MoE(8, nn.BatchNorm1d(8))
    two = nn.ModuleList([MoE(8, nn.Linear(8, 8), n, n) for n in (1, 2)])
    with pytest.raises(ValueError, match=r"ep_size(.|\n)*one number for all layers"):
        deepspeed.initialize(model=two, config=config)
