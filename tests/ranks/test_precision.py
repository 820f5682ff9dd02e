"""Low precision: float32 masters, against a hand-written loop on one process with the same arithmetic."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.comm.collectives import sum_whole
from tests.ranks.test_engine import batch, model

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 1e-3, "eps": 1e-3},
    "AdamW": {"lr": 1e-3, "eps": 1e-3, "fused": True},
}


class ByHand:
    """Mixed precision as the literature has it: a 16-bit model, float32 masters, one process."""

    def __init__(self, net: nn.Module, dtype: torch.dtype, optimizer: str, clip: float) -> None:
        self.masters = [p.detach().clone().requires_grad_() for p in net.parameters()]
        self.net, self.clip = net, clip
        for p in net.parameters():
            p.data = p.data.to(dtype)
        self.optimizer = getattr(torch.optim, optimizer)(self.masters, **OPTIMIZERS[optimizer])

    def step(self, data: dict[str, torch.Tensor]) -> tuple[float, float]:
        """One step; gives the loss and the norm of the gradient."""
        loss = self.net(**data).loss
        loss.backward()
        for p, master in zip(self.net.parameters(), self.masters, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float(), None
        norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.net.parameters(), self.masters, strict=True):
                p.copy_(master)
        return loss.item(), norm.item()


# Each number of 16 bits is off by up to 2^-9 of itself, and the ranks' parts of the batch are rounded apart:
# losses differ by some of these, and an update of lr by some hundredths of lr, now and then by more.
LOSS, STEPS = 2e-2, 6


def follows(rank: int, world: int, plan: dict[str, Any], optimizer: str) -> None:
    net = model("gpt", layers=1).float()
    plain = ByHand(copy.deepcopy(net), torch.bfloat16, optimizer, 0.5)
    ours = getattr(torch.optim, optimizer)(net.parameters(), **OPTIMIZERS[optimizer])
    engine = espalier.initialize(net, ours, plan, max_grad_norm=0.5)
    initial = {name: x.clone() for name, x in engine.full_state_dict().items()}
    for (name, value), master in zip(initial.items(), plain.masters, strict=True):
        assert value.dtype is torch.float32 and torch.equal(value, master), name
    for step in range(STEPS):
        data = batch(8, step)
        expected, norm = plain.step(data)
        found = engine.train_step(data)
        assert abs(found.item() - expected) < LOSS
        assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm) < LOSS * norm
        assert all(p.dtype is torch.bfloat16 and p.grad is None for p in net.parameters())
    for (name, value), master, p in zip(
        engine.full_state_dict().items(), plain.masters, net.parameters(), strict=True
    ):
        moved = (master - initial[name]).norm()
        assert (value - master).norm() < 0.05 * moved, (name, (value - master).norm(), moved)
        assert torch.equal(espalier.full_tensor(p), value.bfloat16()), "parameters are their masters, rounded"
    for p in net.parameters():
        for x in ours.state[p].values():
            assert x.ndim == 0 or x.dtype is torch.float32


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_bfloat16_with_masters(ranks: Any, zero: int, optimizer: str) -> None:
    for plan in ({"data": 4}, {"data": 2, "tensor": 2}, {"replicate": 2, "data": 2}):
        ranks(4, follows, {**plan, "zero": zero, "precision": "bfloat16", "chunk_megabytes": 0.02}, optimizer)


def test_masters_without_communication(ranks: Any) -> None:
    ranks(1, follows, {"precision": "bfloat16"}, "AdamW")


def takes_over(rank: int, world: int, plan: dict[str, Any]) -> None:
    net = model("gpt", layers=1).float()
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.0), plan)
    engine.train_step(batch(4))
    other = {name: x + 1 for name, x in model("gpt", layers=1).float().state_dict().items()}
    net.load_state_dict(
        {name: espalier.distribute_tensor(x, engine.mesh) for name, x in other.items()}, strict=False
    )
    engine.train_step(batch(4))
    for name, value in engine.full_state_dict().items():
        assert torch.equal(value, other[name].bfloat16().float())


@pytest.mark.parametrize("zero", [0, 2, 3])
def test_masters_follow_what_is_loaded(ranks: Any, zero: int) -> None:
    ranks(2, takes_over, {"data": 2, "zero": zero, "precision": "bfloat16"})


def stages_bit_equal(rank: int, world: int, plan: dict[str, Any], optimizer: str) -> None:
    runs = []
    for zero in range(4):
        net = model("gpt2", layers=1, hidden=20, tied=True).float()
        # not fused: torch's fused CPU kernels round the last elements of a tensor otherwise than the others
        ours = getattr(torch.optim, optimizer)(net.parameters(), **OPTIMIZERS[optimizer] | {"fused": False})
        full = {**plan, "zero": zero, "chunk_megabytes": 0.01}
        engine = espalier.initialize(net, ours, full, max_grad_norm=0.3)
        seen = []
        for step in range(10):
            loss = engine.train_step(batch(8, step))
            assert engine.grad_norm is not None and engine.grad_norm.item() > 0.3, "nothing is clipped"
            seen.append((loss.item(), engine.grad_norm.item()))
        runs.append((seen, engine.full_state_dict()))
    for seen, state in runs[1:]:
        assert seen == runs[0][0]
        for name, value in state.items():
            assert torch.equal(value, runs[0][1][name]), name


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("plan", "optimizer"),
    [({"data": 4}, "AdamW"), ({"data": 2, "tensor": 2}, "Adam"), ({"replicate": 2, "data": 2}, "SGD")],
    ids=str,
)
def test_stages_are_bit_equal(ranks: Any, plan: dict[str, Any], optimizer: str, precision: str) -> None:
    ranks(4, stages_bit_equal, {**plan, "precision": precision}, optimizer)


def messages_of_a_norm(rank: int, world: int, plan: dict[str, Any]) -> list[tuple[str, str, int]]:
    net = model("gpt", layers=1)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    engine.backward(engine(batch(8)))
    engine.finish_gradients()
    with espalier.ledger(engine.mesh) as book:
        engine.step()
    return [tuple(entry) for entry in book.entries if entry.op == "all_reduce"]


@pytest.mark.parametrize(
    ("plan", "axes"),
    [
        ({"data": 4, "zero": 3}, "data"),
        ({"data": 2, "tensor": 2}, "data,tensor"),
        ({"replicate": 2, "data": 2, "zero": 2}, "replicate,data"),
    ],
    ids=str,
)
def test_a_norm_is_one_message(ranks: Any, plan: dict[str, Any], axes: str) -> None:
    for found in ranks(4, messages_of_a_norm, plan):
        assert found == [("all_reduce", axes, 2 * 3 * 8)]


def sums_over_a_part(rank: int, world: int) -> None:
    mesh = espalier.Mesh.from_env({"data": 2, "tensor": 2}, ranks=[5, 1, 2, 4])
    if mesh.is_member:
        with espalier.ledger(mesh) as book:
            found = sum_whole(torch.tensor(float(rank)), mesh)
        assert found.item() == 12 and [tuple(e) for e in book.entries] == [("all_reduce", "data,tensor", 24)]


@pytest.mark.world(6)
def test_a_sum_over_a_part_of_the_world(ranks: Any) -> None:
    ranks(6, sums_over_a_part)
