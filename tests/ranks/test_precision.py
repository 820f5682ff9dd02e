"""Low precision: float32 masters, against a hand-written loop on one process with the same arithmetic."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterable
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import espalier
from espalier import Replicate, Shard
from espalier.comm.collectives import sum_whole
from espalier.engine.norm import LossScaler
from espalier.parallel.plan import LossScale
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

    def step(self, data: dict[str, torch.Tensor], scale: float = 1.0) -> tuple[float, float]:
        """One step; gives the loss and the norm of the gradient."""
        low = next(self.net.parameters()).dtype
        output = self.net(**{k: x.to(low) if x.is_floating_point() else x for k, x in data.items()})
        loss = output if isinstance(output, torch.Tensor) else output.loss
        (loss * scale).backward()
        for p, master in zip(self.net.parameters(), self.masters, strict=True):
            assert p.grad is not None
            master.grad, p.grad = p.grad.float() / scale, None
        norm = nn.utils.clip_grad_norm_(self.masters, self.clip)
        self.optimizer.step()
        with torch.no_grad():
            for p, master in zip(self.net.parameters(), self.masters, strict=True):
                p.copy_(master)
        return loss.item(), norm.item()


# A number of 16 bits is off by up to 2^-9 of itself, and the parts of the batch that ranks compute are
# rounded apart. What was seen: losses 7e-5 apart, norms 4e-4 of their size, masters 1.3e-2 of their way.
LOSS, NORM, WAY, STEPS = 5e-4, 2e-3, 0.03, 4


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
        assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm) < NORM * norm
        assert all(p.dtype is torch.bfloat16 and p.grad is None for p in net.parameters())
    for (name, value), master, p in zip(
        engine.full_state_dict().items(), plain.masters, net.parameters(), strict=True
    ):
        moved = (master - initial[name]).norm()
        assert (value - master).norm() < WAY * moved, name
        assert torch.equal(espalier.full_tensor(p), value.bfloat16()), "parameters are their masters, rounded"
    for p in net.parameters():
        for x in ours.state[p].values():
            assert x.ndim == 0 or x.dtype is torch.float32


@pytest.mark.parametrize(
    ("zero", "optimizer"), [(0, "SGD"), (1, "Adam"), (2, "AdamW"), (3, "Adam"), (3, "SGD")]
)
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
        ours = getattr(torch.optim, optimizer)(net.parameters(), **OPTIMIZERS[optimizer])
        full = {**plan, "zero": zero, "chunk_megabytes": 0.01}
        engine = espalier.initialize(net, ours, full, max_grad_norm=0.3)
        seen = []
        for step in range(4):
            loss = engine.train_step(batch(8, step))
            assert engine.grad_norm is not None and engine.grad_norm.item() > 0.3, "nothing is clipped"
            seen.append((loss.item(), engine.grad_norm.item()))
        runs.append((seen, engine.full_state_dict()))
    for seen, state in runs[1:]:
        assert seen == runs[0][0]
        for name, value in state.items():
            assert torch.equal(value, runs[0][1][name]), name


@pytest.mark.parametrize(
    "precision", ["float32", "bfloat16", {"compute": "bfloat16", "reduce": "float32"}], ids=str
)
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


class Spiky(nn.Module):
    """Its gradient overflows in float16 where the batch says so."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(4, 6), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, spike: torch.Tensor) -> torch.Tensor:
        y = self.second(self.first(x).relu())
        return (y.float() * spike.float()).square().mean()


def spiky_batch(step: int, row: int | None = None) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    spike = torch.ones(8, 1)
    if row is not None:
        spike[row] = 3e4
    return {"x": torch.randn(8, 4, generator=generator), "spike": spike}


def scales(rank: int, world: int, plan: dict[str, Any]) -> None:
    net = Spiky()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.Adam(net.parameters(), **OPTIMIZERS["Adam"])
    settings = {"init_scale": 256.0, "growth_interval": 2, "min_scale": 64.0}
    precision = {"compute": "float16", "loss_scale": settings}
    engine = espalier.initialize(net, optimizer, {**plan, "precision": precision}, max_grad_norm=0.1)
    hand = ByHand(plain, torch.float16, "Adam", 0.1)
    history = []
    for step, row in enumerate([None, 7, None, None, None]):
        before = {name: x.clone() for name, x in engine.full_state_dict().items()}
        loss = engine.train_step(spiky_batch(step, row))
        after = engine.full_state_dict()
        if row is None:
            expected, norm = hand.step(spiky_batch(step), engine.scaler.settings.init_scale)  # type: ignore[union-attr]
            assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm) < 2e-3 * norm
            assert abs(loss.item() - expected) < 2e-3
            for x, y, z in zip(after.values(), hand.masters, before.values(), strict=True):
                assert (x - y).norm() < 0.01 * (y - z).norm()
        else:
            assert all(torch.equal(x, after[name]) for name, x in before.items()), "the step was skipped"
            assert engine.grad_norm is not None and not engine.grad_norm.isfinite()
        assert all(p.grad is None for p in net.parameters())
        history.append((engine.scale, engine.skipped))
    assert history == [(256.0, 0), (128.0, 1), (128.0, 1), (256.0, 1), (256.0, 1)]
    other = LossScaler(LossScale())
    other.load_state_dict(engine.scaler.state_dict())  # type: ignore[union-attr]
    assert (other.scale, other.skipped) == (256.0, 1)
    # down to the minimum
    engine.train_step(spiky_batch(9, 0))
    engine.train_step(spiky_batch(9, 0))
    assert engine.scale == 64
    with pytest.raises(FloatingPointError, match=r"minimum(.|\n)*Of 4 .*first\.weight \(in the part of rank"):
        engine.train_step(spiky_batch(9, 0))
    steps = engine.steps  # who caught it goes on
    engine.backward(engine(spiky_batch(10)))
    optimizer.step()
    assert engine.steps == steps + 1


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_float16_skips_and_grows_on_all_ranks(ranks: Any, zero: int) -> None:
    ranks(4, scales, {"data": 4, "zero": zero})
    ranks(2, scales, {"data": 2, "zero": zero})


def autocasts(rank: int, world: int, plan: dict[str, Any], dtype: str) -> None:
    net = model("gpt", layers=1).float()
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3, eps=1e-3, fused=False) for m in (net, plain))
    engine = espalier.initialize(net, ours, {**plan, "precision": f"autocast-{dtype}"})
    for step in range(3):
        data = batch(8, step)
        with torch.autocast("cpu", getattr(torch, dtype)):
            expected = plain(**data).loss
        assert plain.head(torch.zeros(1, 24)).dtype is torch.float32
        (expected * engine.scale).backward()
        for p in plain.parameters():
            p.grad /= engine.scale
        theirs.step()
        norm = nn.utils.get_total_norm([p.grad for p in plain.parameters() if p.grad is not None])
        theirs.zero_grad()
        found = engine(data)
        assert found.dtype is expected.dtype and abs(found.item() - expected.item()) < LOSS
        engine.backward(found)
        engine.step()
        assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm.item()) < NORM * norm
    exact = model("gpt", layers=1).float()
    loss = exact(**batch(8)).loss
    assert loss.item() != engine(batch(8)).item(), "something is computed in 16 bits"
    initial = dict(exact.named_parameters())
    for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
        assert p.dtype is torch.float32
        found = espalier.full_tensor(p)
        assert (found - q).norm() < WAY * (q - initial[name]).norm(), name
        if world == 1:
            assert torch.equal(found, q), name


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_autocast(ranks: Any, dtype: str) -> None:
    ranks(1, autocasts, {}, dtype)
    ranks(4, autocasts, {"data": 4, "zero": 3}, dtype)
    ranks(4, autocasts, {"data": 2, "tensor": 2, "zero": 1}, dtype)


class Reused(nn.Module):
    """Uses parameters as they are, transposed, in parts, and twice."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = nn.Parameter(torch.randn(2, 8, 8) / 3)
        self.inner, self.conv, self.head = nn.Linear(8, 8), nn.Conv1d(8, 8, 1), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.einsum("bli,hio->blo", x, self.heads)
        x = x @ self.inner.weight.T + F.linear(x, self.inner.weight[:, :8]) + self.inner(x)
        x = self.conv(x.mT).mean(2)
        return self.head(x) + F.linear(x, self.head.weight)


def casts_again(rank: int, world: int) -> None:
    """What is cast of a parameter for its forward pass is cast anew for its backward: it was written to."""
    found = []
    for plan in ({"data": 2}, {"data": 2, "zero": 3, "chunk_megabytes": 1e-4}):
        torch.manual_seed(0)
        net, data = Reused(), (torch.randn(4, 5, 8), torch.arange(4) % 3)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        low = {"precision": "autocast-bfloat16"}
        engine = espalier.initialize(net, optimizer, {**plan, **low}, loss_fn=F.cross_entropy)
        found.append([engine.train_step(data) for _ in range(3)])
        loss = engine(data)
        with torch.no_grad():
            net.inner.weight.mul_(2)
        expected = (
            nullcontext() if "zero" not in plan else pytest.raises(RuntimeError, match="written to between")
        )
        with expected:
            engine.backward(loss)
    assert found[0] == found[1]


def test_casts_again(ranks: Any) -> None:
    ranks(2, casts_again)


def casts_nothing(rank: int, world: int) -> None:
    """A rank without rows computes in the dtype of the others."""
    mesh = espalier.Mesh.from_env({"data": world})
    x, weight = torch.randn(1, 4, 6, 6), torch.randn(4, 4, 3, 3)
    calls: dict[Any, tuple[torch.Tensor, ...]] = {
        F.conv2d: (x, weight),
        F.scaled_dot_product_attention: (x, x, x),
        partial(F.grid_sample, align_corners=False): (x.bfloat16(), torch.rand(1, 6, 6, 2)),
    }
    for function, given in calls.items():
        cut = [[Shard(0)] if a.shape[0] == 1 else [Replicate()] for a in given]
        ours = [espalier.distribute_tensor(a, mesh, places) for a, places in zip(given, cut, strict=True)]
        with torch.autocast("cpu", torch.bfloat16):
            expected, found = function(*given), function(*ours)
        assert found.to_local().dtype is expected.dtype and found.to_local().shape[0] == (rank == 0), function
    low = espalier.distribute_tensor(x.bfloat16(), mesh, [Shard(0)])
    with pytest.raises(RuntimeError, match="should be the same"):  # on all ranks
        F.conv2d(low, espalier.distribute_tensor(weight, mesh, [Replicate()]))


def test_casts_of_nothing(ranks: Any) -> None:
    ranks(2, casts_nothing)


class Scaled(nn.Module):
    """Multiplies by a buffer between its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("scale", torch.rand(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x) * self.scale)


def casts_buffers(rank: int, world: int, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net, data = Scaled(), torch.randn(4, 8)
    expected = copy.deepcopy(net).bfloat16()(data.bfloat16()).sum().item()

    def loss(precision: Any) -> float:
        model = copy.deepcopy(net)
        optimizer = torch.optim.SGD(model.parameters())
        engine = espalier.initialize(
            model, optimizer, {**plan, "precision": precision}, loss_fn=lambda y, _: y.sum()
        )
        return float(engine.train_step((data, data)))

    assert loss({"compute": "bfloat16", "buffers": "bfloat16"}) == pytest.approx(expected, rel=0.02)
    with pytest.raises(RuntimeError, match="dtype") as met:
        loss("bfloat16")
    notes = "".join(met.value.__notes__)
    assert "no buffers (scale)" in notes and '"buffers": "bfloat16"' in notes


def test_buffers_are_cast_where_the_plan_says_so(ranks: Any) -> None:
    for plan in ({"data": 2, "zero": 3}, {"pipe": 2, "cuts": ("second",)}):
        ranks(2, casts_buffers, plan)


def bytes_held(rank: int, world: int, plan: dict[str, Any]) -> tuple[int, ...]:
    """Elements; bytes of parameters, gradients before the step, masters and states."""
    net = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    optimizer = torch.optim.Adam(net.parameters())
    engine = espalier.initialize(net, optimizer, plan, loss_fn=lambda y, _: y.square().mean())
    data = torch.randn(4, 64)
    engine.train_step(data)
    engine.backward(engine(data))
    engine.finish_gradients()

    def size(tensors: Iterable[torch.Tensor]) -> int:
        with torch._C.DisableTorchFunctionSubclass():
            return sum(x.numel() * x.element_size() for x in tensors)

    states = [x for state in optimizer.state.values() for x in state.values() if x.ndim]
    grads = [p.grad for p in net.parameters() if p.grad is not None]
    elements = sum(p.numel() for p in net.parameters())
    return elements, size(net.parameters()), size(grads), size(engine.masters()) + size(states)


@pytest.mark.parametrize("reduce", [None, "float32"])
def test_memory_is_what_the_formulas_say(ranks: Any, reduce: str | None) -> None:
    precision = {"compute": "bfloat16", "reduce": reduce}
    wide = 4 if reduce else 2
    for zero, (parameters, gradients, states) in enumerate([(1, 1, 1), (1, 1, 4), (1, 4, 4), (4, 4, 4)]):
        plan = {"data": 4, "zero": zero, "precision": precision}
        gradients = 4 if zero == 1 else gradients
        for n, *found in ranks(4, bytes_held, plan):
            assert found == [2 * n // parameters, wide * n // gradients, 12 * n // states]


def low_ledger(rank: int, world: int, plan: dict[str, Any]) -> Any:
    net = model("gpt", layers=1).float()
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan, max_grad_norm=1.0)
    engine.train_step(batch(8))
    with espalier.ledger(engine.mesh) as book:
        engine.train_step(batch(8, 1))
    with torch.device("meta"):
        twin = model("gpt", layers=1).float()
    report = espalier.dry_run(
        twin,
        plan,
        {k: torch.empty_like(v, device="meta") for k, v in batch(8).items()},
        optimizer=torch.optim.AdamW(twin.parameters()),
        max_grad_norm=1.0,
        coordinate=engine.mesh.coordinate,
    )
    states = [x for state in engine.optimizer.state.values() for x in state.values()]  # type: ignore[union-attr]
    with torch._C.DisableTorchFunctionSubclass():
        held = sum(x.numel() * x.element_size() for x in (*states, *engine.masters()))
    return book.entries, report.ledger.entries, held, report.state_bytes


@pytest.mark.parametrize(
    "plan",
    [
        {"data": 4, "zero": 3, "precision": "bfloat16"},
        {"data": 2, "tensor": 2, "zero": 1, "precision": {"compute": "float16", "reduce": "float32"}},
        {"data": 4, "zero": 2, "precision": "autocast-bfloat16"},
        {"tensor": 4, "precision": "autocast-bfloat16", "sequence_parallel": True},
        {"tensor": 4, "tensor_mode": "2d", "precision": "autocast-float16"},
        {"context": 2, "pipe": 2, "accumulate": 2, "precision": "autocast-bfloat16"},
        {"data": 2, "pipe": 2, "zero": 3, "precision": "autocast-bfloat16", "recompute": "full"},
    ],
    ids=str,
)
def test_a_dry_run_is_as_the_real_one(ranks: Any, plan: dict[str, Any]) -> None:
    for real, dry, held, told in ranks(4, low_ledger, plan):
        assert real == dry and held == told


WAYS: dict[str, Any] = {
    "copy_": lambda p: p.copy_(torch.full(p.shape, 0.5)),
    "mul_": lambda p: p.mul_(0.5),
    "lerp_": lambda p: p.lerp_(torch.zeros_like(p), 0.5),
    "setitem": lambda p: p.__setitem__(0, 0.5),
    "foreach": lambda p: torch._foreach_mul_([p], 0.5),
    "init": lambda p: nn.init.constant_(p, 0.5),
    "data=": lambda p: setattr(p, "data", p.data * 0.5),
}


def is_written_to(rank: int, world: int, plan: dict[str, Any]) -> None:
    """What others write to parameters between steps is what their masters go on from."""
    net = model("gpt", layers=1).float()
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.0), plan)
    engine.train_step(batch(8))
    for i, (way, write) in enumerate(WAYS.items()):
        name, p = [(name, p) for name, p in net.named_parameters() if p.ndim == 2][i % 3]
        expected = espalier.full_tensor(p).detach().clone()
        with torch.no_grad():
            WAYS[way](expected)
            write(p)
        engine.train_step(batch(8))
        assert torch.equal(espalier.full_tensor(p), expected), way
        assert torch.equal(engine.full_state_dict()[name], expected.float()), way


@pytest.mark.parametrize("precision", ["bfloat16", "float32"])
@pytest.mark.parametrize("zero", [0, 1, 3])
def test_what_is_written_between_steps_is_gone_on_from(ranks: Any, zero: int, precision: str) -> None:
    ranks(2, is_written_to, {"data": 2, "zero": zero, "precision": precision})


def goes_on(rank: int, world: int, plan: dict[str, Any]) -> None:
    """Gradients of several backward passes add up in float32, finished between or not."""
    net = model("gpt", layers=1).float()
    plain = copy.deepcopy(net).bfloat16()
    sums = [torch.zeros(p.shape) for p in net.parameters()]
    engine = espalier.initialize(net, None, plan)
    for step in range(6):
        with nullcontext() if step in (2, 5) else engine.no_sync():
            engine.backward(engine(batch(8, step)))
        if step == 2:
            engine.finish_gradients()
        plain(**batch(8, step)).loss.backward()
        for p, total in zip(plain.parameters(), sums, strict=True):
            assert p.grad is not None
            total += p.grad
            p.grad = None
    engine.finish_gradients()
    for p, total in zip(net.parameters(), sums, strict=True):
        assert p.grad is not None and p.grad.dtype is torch.float32
        assert (espalier.full_tensor(p.grad) - total).norm() < 3 * NORM * total.norm()


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_gradients_add_up_in_float32(ranks: Any, zero: int) -> None:
    ranks(2, goes_on, {"data": 2, "zero": zero, "precision": {"compute": "bfloat16", "reduce": "float32"}})


def test_gradients_add_up_in_float32_alone(ranks: Any) -> None:
    ranks(1, goes_on, {"precision": {"compute": "bfloat16", "reduce": "float32"}})


def with_statistics(rank: int, world: int, plan: dict[str, Any]) -> None:
    """Parameters in 16 bits beside statistics in float32, of which torch refuses the two: bit by bit."""
    torch.manual_seed(0)
    net = nn.Sequential(
        nn.Conv1d(3, 4, 3),
        nn.BatchNorm1d(4),
        nn.Tanh(),
        nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    )
    for norm in (net[1], net[3]):
        nn.init.uniform_(norm.weight, 0.5, 2)
    plain = copy.deepcopy(net).bfloat16()
    for norm in (plain[1], plain[3]):
        norm.float()
    net, _ = espalier.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), plan={**plan, "precision": "bfloat16"}
    )
    for is_training in (True, False):
        net.train(is_training)
        plain.train(is_training)
        x = torch.randn(4, 3, 8)
        out, expected = net(x), plain(x.bfloat16())
        assert torch.equal(espalier.full_tensor(out.detach()), expected)
        out.float().square().sum().backward()
        expected.float().square().sum().backward()
    gradients = net.engine.full_gradients()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(gradients[name].float(), p.grad.float(), rtol=0.02, atol=0.02)
    held = net.state_dict()
    for name, x in plain.named_buffers():
        torch.testing.assert_close(held[name], x, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("plan", [{}, {"tensor": 2}, {"pipe": 2}], ids=str)
def test_norms_of_batches_in_16_bits(ranks: Any, plan: dict[str, int]) -> None:
    ranks(2 if plan else 1, with_statistics, plan)


def averaged(rank: int, world: int, plan: dict[str, Any]) -> None:
    """Averages of float32 that were made before parameters were rounded, and a copy that is called."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    average, by_hand = AveragedModel(net, multi_avg_fn=get_ema_multi_avg_fn(0.5)), copy.deepcopy(net)
    expected = [[p.detach().clone() for p in net.parameters()] for _ in range(2)]
    net, optimizer = espalier.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), plan={**plan, "precision": "bfloat16"}
    )
    for step in range(3):
        x = torch.randn(4, 6)
        net(x).float().square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", espalier.GatherWarning)  # of several stages
            average.update_parameters(net)
            for own, p in zip(by_hand.parameters(), net.parameters(), strict=True):
                own.detach().lerp_(p.detach(), weight=0.1)
        rounded = [x.bfloat16().float() for x in net.engine.full_state_dict().values()]
        for (first, second), new in zip(zip(*expected, strict=True), rounded, strict=True):
            first.lerp_(new, 0.5) if step else first.copy_(new)
            second.lerp_(new, 0.1)
    for held, wanted in zip((average, by_hand), expected, strict=True):
        assert all(torch.equal(p, own) for p, own in zip(held.parameters(), wanted, strict=True))
    with torch.no_grad():
        assert torch.equal(espalier.full_tensor(copy.deepcopy(net)(x)), espalier.full_tensor(net(x)))


@pytest.mark.parametrize("plan", [{"data": 2}, {"tensor": 2}, {"pipe": 2}], ids=str)
def test_averages_of_rounded_weights(ranks: Any, plan: dict[str, int]) -> None:
    ranks(2, averaged, plan)
