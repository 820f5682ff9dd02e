"""What a divided forward calls by ``torch.utils.checkpoint`` is computed again in the backward pass."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    checkpoint_sequential,
    create_selective_checkpoint_contexts,
)

import espalier
from espalier.torch_private import TorchDispatchMode

Tensor = torch.Tensor
again = partial(checkpoint, use_reentrant=False)


class Block(nn.Module):
    def __init__(self, norm: type[nn.Module]) -> None:
        super().__init__()
        self.norm, self.up, self.down, self.drop = (
            norm(8),
            nn.Linear(8, 16),
            nn.Linear(16, 8),
            nn.Dropout(0.2),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop(self.down(F.gelu(self.up(self.norm(x)))))


class Own(Block):
    """A block that sees to it itself, as those of transformers do."""

    def __call__(self, x: Tensor) -> Any:
        return again(super().__call__, x)


class Net(nn.Module):
    """Four blocks; of what is between them the forward computes some itself."""

    def __init__(self, way: str, norm: type[nn.Module] = nn.LayerNorm) -> None:
        super().__init__()
        kind = Own if way == "own" else Block
        self.way, self.blocks = way, nn.ModuleList(kind(norm) for _ in range(4))
        self.scale, self.head = nn.Parameter(torch.linspace(0.5, 1.5, 8)), nn.Linear(8, 3)

    def pair(self, i: int, x: Tensor) -> Tensor:
        return self.blocks[i + 1](self.blocks[i](x) * self.scale).tanh()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.way in ("each", "each, once"):
            for block in self.blocks:
                x = again(block, x) if self.way == "each" else block(x)
        elif self.way == "reentrant" and torch.is_grad_enabled():  # else torch warns
            x = checkpoint(
                self.pair, 2, checkpoint(self.pair, 0, x * self.scale, use_reentrant=True), use_reentrant=True
            )
        elif self.way == "within":  # one in the other, and cut by the stages
            x = again(lambda x: self.pair(2, again(self.pair, 0, x)), x)
        elif self.way == "sequential":
            x = checkpoint_sequential([*self.blocks], 2, x, use_reentrant=False)
        elif self.way == "selective":
            kept = partial(create_selective_checkpoint_contexts, products_kept)
            x = again(self.pair, 2, again(self.pair, 0, x, context_fn=kept), context_fn=kept)
        else:
            x = self.pair(2, self.pair(0, x))
        return F.cross_entropy(self.head(x), y)


def products_kept(context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


class Counted(TorchDispatchMode):
    """How often some operations are done."""

    looks_on = True

    def __init__(self) -> None:
        super().__init__()
        self.gelu = self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.gelu += func is torch.ops.aten.gelu.default
        self.products += func in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return func(*args, **(kwargs or {}))


def trains(rank: int, world: int, net: Any, plan: dict[str, Any]) -> Any:
    """Losses, parameters and statistics, and how often was computed what is computed again."""
    torch.manual_seed(0)
    model = net().double()
    engine = espalier.initialize(model, torch.optim.AdamW(model.parameters(), lr=0.01), plan)
    drawn = torch.Generator().manual_seed(1)
    losses = []
    for _ in range(3):
        x = torch.randn(8, 8, generator=drawn, dtype=torch.float64)
        batch = {"x": x, "y": torch.randint(3, (8,), generator=drawn)}
        with Counted() as counted:
            losses.append(engine.train_step(batch).item())
    with torch.no_grad():
        losses.append(engine.evaluate([batch]).item())
    return losses, engine.full_state_dict(), counted.gelu, counted.products


def same(found: Any, wanted: Any) -> None:
    assert found[0] == pytest.approx(wanted[0], abs=1e-12)
    for name, value in wanted[1].items():
        torch.testing.assert_close(found[1][name], value, rtol=0, atol=1e-12)


PLANS: list[dict[str, Any]] = [
    {"pipe": 2, "schedule": "1f1b"},
    {"pipe": 2, "schedule": "zb-h1"},
    {"pipe": 2, "schedule": "interleaved", "stages_per_rank": 2},
]


@pytest.mark.parametrize(
    ("way", "times"),
    [("each", 8), ("own", 8), ("reentrant", 8), ("within", 8), ("sequential", 6)],  # torch leaves its end
)
def test_blocks_are_computed_again_once(ranks: Any, way: str, times: int) -> None:
    """Nor twice where a backward pass is in two parts."""
    (alone,) = ranks(1, trains, partial(Net, way), {"accumulate": 2})
    for plan in PLANS if way in ("each", "own") else PLANS[:1]:
        found = ranks(2, trains, partial(Net, way), {**plan, "accumulate": 2})
        for of in found:
            same(of, alone)
        assert sum(of[2] for of in found) == 2 * times


@pytest.mark.parametrize(
    "plan",
    [{"pipe": 2, "data": 2, "zero": 3}, {"pipe": 2, "tensor": 2, "accumulate": 2}],
    ids=lambda plan: "-".join(plan),
)
def test_beside_other_axes(ranks: Any, plan: dict[str, Any]) -> None:
    (alone,) = ranks(1, trains, partial(Net, "within"), {"accumulate": plan.get("accumulate", 1)})
    for found in ranks(4, trains, partial(Net, "within"), plan):
        same(found, alone)


def test_what_a_policy_keeps_is_not_computed_again(ranks: Any) -> None:
    (plain,) = ranks(1, trains, partial(Net, "none"), {})
    found = ranks(2, trains, partial(Net, "selective"), {"pipe": 2})
    for of in found:
        same(of, plain)
    assert sum(of[2] for of in found) == 2 * 4
    assert sum(of[3] for of in found) == plain[3]


def test_a_batch_counts_once(ranks: Any) -> None:
    """What is computed again writes to no statistics, in whatever order micro-batches come back."""
    (plain,) = ranks(1, trains, partial(Net, "each, once", nn.BatchNorm1d), {"accumulate": 2})
    for found in ranks(2, trains, partial(Net, "each", nn.BatchNorm1d), {"pipe": 2, "accumulate": 2}):
        same(found, plain)


def test_memory_and_work_are_those_of_a_plan_that_recomputes() -> None:
    def told(way: str, **plan: Any) -> tuple[int, int]:
        with torch.device("meta"):
            model = Net(way)
            batch = {"x": torch.empty(1024, 8), "y": torch.empty(1024, dtype=torch.long)}
        optimizer = torch.optim.AdamW(model.parameters())
        report = espalier.dry_run(model, espalier.Plan(pipe=2, **plan), batch, optimizer=optimizer)
        return report.peak_bytes, report.flops

    assert told("each") == told("each, once", recompute="full") < told("each, once")
