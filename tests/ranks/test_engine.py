"""The engine against the same model on one process, in float64."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier import Partial
from espalier.layout import local_box
from espalier.models import build
from espalier.tensor import DTensor, stamp
from espalier.tensor.dtensor import plain, up_to_date
from tests.pool import RankError

TOLERANCE = 1e-9
SIZES = {
    "gpt": {"vocab_size": 37, "hidden": 24, "heads": 4, "kv_heads": 2, "layers": 2, "max_positions": 16},
    "gpt2": {"vocab_size": 37, "hidden": 24, "heads": 4, "layers": 2, "max_positions": 16},
}


def batch(rows: int, seed: int = 0, vocabulary: int = 37) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(0, vocabulary, (rows, 12), generator=generator)
    labels = torch.randint(0, vocabulary, (rows, 12), generator=generator)
    labels[torch.rand(labels.shape, generator=generator) < 0.2] = -100
    return {"input_ids": ids, "labels": labels}


def model(kind: str = "gpt", **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    return build(kind, {**SIZES[kind], **changes}).double()


@torch.no_grad()
def apart(found: nn.Module, expected: nn.Module, gradients: bool) -> float:
    """By how much the two differ at most, in what this rank holds: all ranks look."""
    worst = 0.0
    for p, q in zip(found.parameters(), expected.parameters(), strict=True):
        a, b = (p.grad, q.grad) if gradients else (p, q)
        assert (a is None) == (b is None)
        if a is None or b is None:
            continue
        if isinstance(a, DTensor) and not any(isinstance(x, Partial) for x in a.placements):
            a = up_to_date(a)
            assert a.shape == b.shape
            a, b = plain(a), b[local_box(a._layout.own).slices]
        else:
            a = espalier.full_tensor(a)
        assert a.shape == b.shape
        worst = max(worst, (a - b).abs().max().item() if a.numel() else 0.0)
    return worst


def same_backward(engine: espalier.Engine, plain: nn.Module, data: dict[str, torch.Tensor]) -> None:
    """The same loss on both, and a backward pass through each."""
    loss, expected = engine(data), plain(**data).loss
    assert abs(loss.item() - expected.item()) < TOLERANCE
    engine.backward(loss)
    expected.backward()


def same_steps(
    engine: espalier.Engine, plain: nn.Module, theirs: torch.optim.Optimizer, steps: int, rows: int = 6
) -> None:
    """Train both, gradients clipped to 0.5: losses, gradients, their norm and parameters are the same."""
    net = engine.module
    for step in range(steps):
        same_backward(engine, plain, batch(rows, step))
        engine.finish_gradients()
        assert apart(net, plain, gradients=True) < TOLERANCE
        engine.step()
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm.item()) < TOLERANCE
        assert apart(net, plain, gradients=False) < TOLERANCE


def sees_cut(axis: str) -> Callable[..., None]:
    """A forward hook: what goes in and out is cut over the sequence, along an axis."""

    def look(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
        at = out._layout.mesh.axis(axis)
        assert [x._layout.axes[at] for x in (given[0], out)] == [1, 1], (given[0]._layout, out._layout)

    return look


def same_over_cut_sequences(
    kind: str, plan: dict[str, Any], axis: str, watched: Callable[[nn.Module], Iterable[nn.Module]]
) -> None:
    """A plan that cuts sequences along an axis: so are what these modules of a block get and give."""
    net = model(kind, tied=kind == "gpt2")
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (net, plain))
    engine = espalier.initialize(net, ours, plan, max_grad_norm=0.5)
    for block in net.blocks:
        for module in watched(block):
            module.register_forward_hook(sees_cut(axis))
    same_steps(engine, plain, theirs, 2)
    # rows of five positions: on four ranks 2, 2, 1 and 0; the graph is the same
    same_backward(engine, plain, {name: x[:, :5] for name, x in batch(4, 7).items()})
    engine.finish_gradients()
    assert apart(net, plain, gradients=True) < TOLERANCE


def same_training(
    rank: int, world: int, kind: str, plan: dict[str, Any], optimizer: str, options: dict[str, Any]
) -> None:
    net = model(kind, tied=kind == "gpt2")
    plain = copy.deepcopy(net)
    make = getattr(torch.optim, optimizer)
    ours, theirs = make(net.parameters(), **options), make(plain.parameters(), **options)
    engine = espalier.initialize(net, ours, plan, max_grad_norm=0.5)
    same_steps(engine, plain, theirs, 3)


@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
@pytest.mark.parametrize(
    "plan", [{"data": 4}, {"tensor": 2}, {"tensor": 4}, {"data": 2, "tensor": 2}], ids=str
)
def test_training_equals_one_process(ranks: Any, kind: str, plan: dict[str, int]) -> None:
    world = espalier.Plan.from_dict(plan).world_size
    ranks(world, same_training, kind, plan, "AdamW", {"lr": 1e-2, "weight_decay": 0.1})


# Adafactor is no elementwise optimizer: it steps on DTensors
@pytest.mark.parametrize(
    ("optimizer", "options"),
    [
        ("SGD", {"lr": 0.1, "momentum": 0.9}),
        ("Adam", {"lr": 1e-2, "foreach": True}),
        ("AdamW", {"lr": 1e-2, "fused": True}),
        ("Adagrad", {"lr": 1e-2}),
        ("Adafactor", {"lr": 1e-2}),
    ],
)
def test_optimizers(ranks: Any, optimizer: str, options: dict[str, Any]) -> None:
    ranks(4, same_training, "gpt", {"data": 2, "tensor": 2}, optimizer, options)


@pytest.mark.parametrize("zero", [1, 2])
def test_fused_optimizers_update_pieces_that_are_not_contiguous(ranks: Any, zero: int) -> None:
    options = {"lr": 1e-2, "fused": True}
    ranks(2, same_training, "gpt", {"data": 2, "zero": zero}, "AdamW", options)


def one_step_ledger(
    rank: int, world: int, kind: str, plan: dict[str, int], rows: int, count: Any = None
) -> Any:
    net = model(kind)
    engine = espalier.initialize(
        net, torch.optim.AdamW(net.parameters()), plan, max_grad_norm=1.0, count=count
    )
    engine.train_step(batch(rows))
    with espalier.ledger(engine.mesh) as book:
        engine.train_step(batch(rows, 1))
    with torch.device("meta"):
        twin = build(kind, SIZES[kind])
    twin = twin.double()
    data = {k: torch.empty_like(v, device="meta") for k, v in batch(rows).items()}
    report = espalier.dry_run(
        twin,
        plan,
        data,
        optimizer=torch.optim.AdamW(twin.parameters()),
        max_grad_norm=1.0,
        count=count,
        coordinate=engine.mesh.coordinate,
    )
    assert book.entries, "a step communicates"
    return book.entries, report.ledger.entries


@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
@pytest.mark.parametrize(
    ("plan", "rows"),
    [({"data": 4}, 8), ({"tensor": 4}, 4), ({"data": 2, "tensor": 2}, 8), ({"data": 2, "tensor": 2}, 5)],
    ids=str,
)
def test_ledger_equals_dry_run(ranks: Any, kind: str, plan: dict[str, int], rows: int) -> None:
    for real, dry in ranks(4, one_step_ledger, kind, plan, rows):
        assert real == dry


def accumulates(rank: int, world: int, plan: dict[str, int]) -> None:
    net = model()
    plain = copy.deepcopy(net)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    first, second, third = (batch(4, s) for s in range(3))
    with engine.no_sync(), espalier.ledger(engine.mesh) as book:
        engine.backward(engine(first))
    assert "data" not in {e.axis for e in book.entries if e.bytes > 64}, "nothing is reduced yet"
    engine.backward(engine(second))
    engine.finish_gradients()
    for data in (first, second):
        plain(**data).loss.backward()
    assert apart(net, plain, gradients=True) < TOLERANCE
    # a further backward without a step adds to what was reduced
    engine.backward(engine(third))
    engine.finish_gradients()
    plain(**third).loss.backward()
    assert apart(net, plain, gradients=True) < TOLERANCE


@pytest.mark.parametrize("plan", [{"data": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_accumulation(ranks: Any, plan: dict[str, int]) -> None:
    ranks(4, accumulates, plan)


class Branches(nn.Module):
    """Parameters that are unused, frozen, or used by some rows only."""

    def __init__(self) -> None:
        super().__init__()
        self.used, self.unused, self.frozen, self.rare = (nn.Linear(3, 3) for _ in range(4))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, rare: bool) -> torch.Tensor:
        y = self.frozen(self.used(x))
        return (self.rare(y) if rare else y).square().mean()


def some_gradients(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = Branches().double()
    plain = copy.deepcopy(net)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters(), weight_decay=0.5), {"data": world})
    x = torch.randn(4, 3, dtype=torch.float64)
    for rare in (False, True):
        engine.backward(engine((x, rare)))
        engine.finish_gradients()
        plain(x, rare).backward()
        assert net.unused.weight.grad is None and net.frozen.weight.grad is None
        assert (net.rare.weight.grad is not None) == rare
        assert apart(net, plain, gradients=True) < TOLERANCE
        engine.optimizer.zero_grad()  # type: ignore[union-attr]
        plain.zero_grad()
    # used by one rank alone: the others get its gradient all the same
    engine.backward(engine((x, engine.mesh.rank == 1)))
    engine.finish_gradients()
    assert all(g is not None for g in (net.rare.weight.grad, net.used.weight.grad))
    net.rare.weight.grad.full_tensor()  # type: ignore[union-attr]
    before = espalier.full_tensor(net.unused.weight).clone()
    engine.step()
    assert torch.equal(espalier.full_tensor(net.unused.weight), before), "no gradient, no decay"


def test_unused_and_frozen_parameters(ranks: Any) -> None:
    ranks(2, some_gradients)


def seeded_apart(rank: int, world: int) -> list[float]:
    torch.manual_seed(rank)
    net = build("gpt", {**SIZES["gpt"], "dropout": 0.1}).double()
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), {"data": 2, "tensor": 2})
    return [engine.train_step(batch(4, s)).item() for s in range(3)]


def test_ranks_seeded_differently_train_rank_0s_model(ranks: Any) -> None:
    losses = ranks(4, seeded_apart)
    assert all(one == losses[0] for one in losses)


def dropout_losses(rank: int, world: int, plan: dict[str, int]) -> list[float]:
    net = model("gpt2", dropout=0.2)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    torch.manual_seed(5)
    return [engine.train_step(batch(4, s)).item() for s in range(3)]


def test_dropout_is_the_same_under_every_plan(ranks: Any) -> None:
    alone = ranks(1, dropout_losses, {})[0]
    for plan in ({"data": 2}, {"tensor": 2}, {"data": 2, "tensor": 2}, {"data": 4}):
        found = ranks(espalier.Plan.from_dict(plan).world_size, dropout_losses, plan)[0]
        assert found == pytest.approx(alone, abs=TOLERANCE)


def overlap(rank: int, world: int) -> int:
    net = model()
    engine = espalier.initialize(net, None, {"data": world, "chunk_megabytes": 0.01})
    seen: list[int] = []
    with espalier.ledger(engine.mesh) as book:
        first = next(iter(net.parameters()))
        first.register_post_accumulate_grad_hook(
            lambda p: seen.append(sum(e.bytes > 64 for e in book.entries))
        )
        engine.backward(engine(batch(4)))
        engine.finish_gradients()
    return seen[0]


def test_reduction_starts_during_backward(ranks: Any) -> None:
    assert min(ranks(2, overlap)) >= 2


def living_tensors(rank: int, world: int) -> list[int]:
    import gc

    net = model()
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": 2, "tensor": 2})
    counts = []
    for step in range(12):
        engine.train_step(batch(4, step))
        if step in (2, 11):
            counts.append(sum(issubclass(type(x), torch.Tensor) for x in gc.get_objects()))
    return counts


def test_no_tensor_outlives_its_step(ranks: Any) -> None:
    for counts in ranks(4, living_tensors):
        # one tensor a step would be nine; a stray one comes from elsewhere in the process
        assert counts[-1] - counts[0] < 5, counts


def wrong_uses(rank: int, world: int) -> None:
    with pytest.warns((DeprecationWarning, FutureWarning)):
        scripted = torch.nn.Sequential(torch.jit.script(torch.nn.Linear(2, 2)))
    with pytest.raises(ValueError, match=r"^0: compiled by torch.jit(.|\n)*Give the module itself"):
        espalier.initialize(scripted, None, {"data": world})
    net = model()
    with pytest.raises(ValueError, match="needs 3 rank"):
        espalier.initialize(net, None, {"data": 3})
    with pytest.raises(ValueError, match="is the model's"):
        espalier.initialize(net, torch.optim.SGD(model("gpt2").parameters()), {"data": world})
    with pytest.raises(ValueError, match=r"matches no module(.|\n)*unknown kind"):
        espalier.initialize(net, None, {"tensor": world}, layouts={"nowhere": "row", "head": "colum"})
    with pytest.raises(ValueError, match="2 mistake"):
        espalier.initialize(net, None, {"dat": 1, "tensor": 0})
    with pytest.raises(ValueError, match=r"clip=1.0\) and max_grad_norm=0.5"):
        espalier.initialize(net, None, {"data": world, "clip": 1.0}, max_grad_norm=0.5)
    engine = espalier.initialize(net, None, {"data": world})
    with pytest.raises(ValueError, match="DTensor already"):
        espalier.initialize(net, None, {"data": world})
    with pytest.raises(ValueError, match="no optimizer"):
        engine.step()
    with pytest.raises(ValueError, match="without a loss"):
        engine({"input_ids": batch(4)["input_ids"]})
    with pytest.raises(ValueError, match="Load the rows"):
        engine.local_batch(batch(4), 4)


def test_wrong_uses_are_told(ranks: Any) -> None:
    ranks(2, wrong_uses)


def state(rank: int, world: int) -> None:
    net = model("gpt2", tied=True)
    plain = copy.deepcopy(net)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": 2, "tensor": 2})
    assert net.head.weight is net.embed.weight
    assert isinstance(net.head.weight, nn.Parameter) and isinstance(net.head.weight, DTensor)
    whole = engine.full_state_dict()
    for name, value in plain.state_dict().items():
        assert type(whole[name]) is torch.Tensor and torch.equal(whole[name], value)
    engine.train_step(batch(4))
    assert engine.optimizer is not None
    for p in net.parameters():
        moment = engine.optimizer.state[p]["exp_avg"]
        assert isinstance(moment, DTensor) and moment._layout is p._layout  # type: ignore[attr-defined]
    with torch.no_grad():
        net.eval()
        assert abs(engine(batch(4)).item()) < 10


def test_states_and_names(ranks: Any) -> None:
    ranks(4, state)


def culprit(rank: int, world: int) -> None:
    if rank == 1:
        raise RuntimeError("no more")
    net = model()
    stamp(torch.zeros(1), espalier.Layout(espalier.Mesh.single(), [espalier.Replicate()], (1,)))
    espalier.initialize(net, None, {"data": world})


def test_a_rank_that_fails_is_named(ranks: Any) -> None:
    with pytest.raises(RankError, match="no more"):
        ranks(2, culprit, timeout=20)
