"""A model as stages: run one after another, they are the model."""

from __future__ import annotations

from collections.abc import Callable
from decimal import Decimal
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import nn

from espalier.models import build
from espalier.parallel.pipeline.arguments import Ref, leaves
from espalier.parallel.pipeline.measure import measured
from espalier.parallel.pipeline.programs import ProgramStep
from espalier.parallel.pipeline.split import Split, SplitError, split
from espalier.parallel.pipeline.trace import trace

SIZES = {"vocab_size": 64, "max_positions": 16, "layers": 4, "hidden": 32, "heads": 4}
IDS = torch.arange(24).reshape(2, 12) % 64


def called(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple) else model(batch)


def loss_of(out: Any) -> torch.Tensor:
    found = getattr(out, "loss", None)
    if found is not None:
        return found
    return sum(x.square().mean() for x in leaves(out, torch.Tensor) if x.requires_grad)  # type: ignore[return-value]


def whole(model: nn.Module, batch: Any) -> tuple[Any, torch.Tensor]:
    out = called(model, batch)
    loss = loss_of(out)
    loss.backward()
    return out, loss


def staged(found: Split, batch: Any) -> tuple[Any, torch.Tensor]:
    """Output and loss of the stages, each with a graph of its own, as on ranks; gradients in the model."""
    given: list[tuple[torch.Tensor, ...]] = []
    sent: list[Any] = [()]
    for program in found.at(batch).stages:
        given.append(tuple(x.detach().requires_grad_(x.requires_grad) for x in sent[-1]))
        for x, value in zip(given[-1], program.inputs, strict=True):
            assert (tuple(x.shape), x.dtype, x.requires_grad) == (value.shape, value.dtype, value.grad)
        sent.append(program(given[-1], batch))
    loss = loss_of(sent[-1])
    loss.backward()
    for out, received in zip(sent[-2:0:-1], given[:0:-1], strict=True):
        pairs = [(o, x.grad) for o, x in zip(out, received, strict=True) if x.grad is not None]
        torch.autograd.backward([o for o, _ in pairs], [g for _, g in pairs])
    return sent[-1], loss


def equal(model: nn.Module, batch: Any, found: Split, *, exact: bool = True) -> None:
    """The stages give what the model gives: output, loss, gradients."""
    results = []
    for run in (whole, staged):
        torch.manual_seed(3)
        model.zero_grad()
        out, loss = run(found if run is staged else model, batch)  # type: ignore[operator]
        grads = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
        results.append((out, loss.detach(), grads))
    (out, loss, grads), (other, other_loss, other_grads) = results
    close = {"rtol": 0.0, "atol": 0.0} if exact else {"rtol": 1e-12, "atol": 1e-14}
    assert type(out) is type(other)
    torch.testing.assert_close(leaves(other, torch.Tensor), leaves(out, torch.Tensor), rtol=0, atol=0)
    torch.testing.assert_close(other_loss, loss, rtol=0, atol=0)
    assert grads.keys() == other_grads.keys()
    torch.testing.assert_close(other_grads, grads, **close)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("number", [1, 2, 4])
@pytest.mark.parametrize("name", ["gpt", "gpt2", "moe"])
def test_our_models(name: str, number: int, training: bool) -> None:
    given = {**SIZES, "dropout": 0.1} if name != "moe" else {**SIZES, "experts": 4}
    model = build(name, given).double().train(training)
    found = split(model, number, {"input_ids": IDS, "labels": IDS})
    equal(model, {"input_ids": IDS, "labels": IDS}, found)
    equal(model, {"input_ids": IDS[:, :5].repeat(2, 1), "labels": IDS[:, :5].repeat(2, 1)}, found)


def test_sequential_with_writes_in_place() -> None:
    parts = [nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.ReLU(inplace=True)) for _ in range(6)]
    model = nn.Sequential(*(m for part in parts for m in part)).double()
    x = torch.randn(5, 8).double()
    for cuts in (None, ["2", "5"], ["4", "8"]):
        found = split(model, 3, x, cuts)
        assert cuts is None or found.cuts == tuple(cuts)
        equal(model, x, found)


@pytest.mark.parametrize("dtype", [None, torch.bfloat16])
def test_parts_are_timed_one_by_one(dtype: torch.dtype | None) -> None:
    """Without values, and without a trace of it left."""
    model = build("gpt2", {**SIZES, "dropout": 0.1})
    state = {name: x.clone() for name, x in model.state_dict().items()}
    drawn = torch.get_rng_state()
    costs = measured(model, {"input_ids": IDS, "labels": IDS}, dtype=dtype, rounds=1)
    assert list(costs) == [segment.name for segment in split(model, 2, IDS).segments]
    assert all(seconds > 0 for seconds in costs.values())
    assert all(torch.equal(x, state[name]) for name, x in model.state_dict().items())
    assert all(p.grad is None and type(p) is nn.Parameter for p in model.parameters())
    assert torch.equal(torch.get_rng_state(), drawn)
    with torch.device("meta"):
        bare = build("gpt2", SIZES)
    assert measured(bare, IDS, device=torch.device("cpu"), rounds=1).keys() == costs.keys()
    slow = dict.fromkeys(costs, 1.0) | {"blocks.0": 20.0}
    assert split(model, 2, IDS, costs=slow).cuts == ("blocks.0.mlp_norm",)
    assert split(model, 2, IDS, costs=slow, divide=False).cuts == ("blocks.1",)
    slow |= {"blocks.0": 100.0}
    assert split(model, 2, IDS, costs=slow).cuts == ("blocks.1",)
    slow |= {"blocks.2": 60.0, "blocks.2.mlp_norm": 150.0}
    assert split(model, 2, IDS, costs=slow).cuts == ("blocks.2.mlp_norm",)


class Layer(nn.Module):
    """Of a stack; what it does may keep a stage from beginning within it."""

    def __init__(self, odd: str) -> None:
        super().__init__()
        self.odd = odd
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        self.register_buffer("calls", torch.zeros(()))
        if odd == "parameter":
            self.scale = nn.Parameter(torch.ones(8))
        if odd == "hook":
            self.register_forward_hook(lambda *_: None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.odd == "attribute":
            self.last = len(getattr(self, "last", "")) * "x" + "x"
        if self.odd == "buffer":
            self.calls += 1
        x = x + self.first(x).tanh()
        y = self.second(x * self.scale if self.odd == "parameter" else x)
        return x + y.tanh()


@pytest.mark.parametrize("odd", ["", "hook", "attribute", "buffer", "parameter", "forward"])
def test_a_block_is_divided_where_that_loses_nothing(odd: str) -> None:
    """The stack has an odd number of layers, so that two stages are even where one is cut in two."""
    model = nn.Sequential(*(Layer(odd) for _ in range(3)))
    if odd == "forward":  # as recomputation leaves it
        model[1].forward = model[1].forward  # type: ignore[method-assign]
    x = torch.randn(4, 8)
    found = split(model, 2, x)
    whole = split(model, 2, x, divide=False)
    assert found.cuts == (whole.cuts if odd else ("1.second",))
    assert whole.cuts[0] in ("1", "2")
    equal(model, x, found)
    # three parts that are even anyway are left whole
    assert split(model, 3, x).cuts == ("1", "2")


def test_layers_laid_over_devices_by_hand_are_on_the_one_of_now() -> None:
    """Whichever of its kind the program names, by whatever name, in place of that of the trace."""
    x, was, here = torch.ones(2), torch.device("cuda", 0), torch.device("cpu")
    calls: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
        (torch.Tensor.to, (Ref(0), "cuda:1"), {}),
        (torch.Tensor.to, (Ref(0), torch.device("cuda", 1), torch.float64), {}),
        (torch.Tensor.to, (Ref(0),), {"device": "cuda"}),
        (torch.zeros, (3,), {"device": "cuda:1"}),
    ]
    for func, args, kwargs in calls:
        env: dict[int, Any] = {0: x}
        ProgramStep(func, func.__name__, args, kwargs, Ref(1), None).run(env, {}, was, here)
        assert env[1].device == here, (func, args, kwargs)


def test_wrong_cuts_are_named() -> None:
    model = build("gpt", SIZES)
    batch = {"input_ids": IDS, "labels": IDS}
    with pytest.raises(SplitError, match=r"'block.2': did you mean 'blocks.2'"):
        split(model, 2, batch, ["block.2"])
    with pytest.raises(SplitError, match="not in the order"):
        split(model, 3, batch, ["blocks.2", "blocks.1"])
    with pytest.raises(SplitError, match=r"3 stages begin at 2 cuts, got 1"):
        split(model, 3, batch, ["blocks.2"])
    equal(model, batch, split(model, 13, batch))  # one more than there are places that lose nothing
    with pytest.raises(SplitError, match="200 stages, but only"):
        split(model, 200, batch)
    with pytest.raises(SplitError, match="9 stages, but only 8 places"):
        split(model, 9, batch, divide=False)


class Own(nn.Module):
    """Computes with a parameter of its own before its only module."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.out = nn.Parameter(torch.randn(8, 8)), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(torch.tanh(x @ self.weight)).square().mean()


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(8, 16), nn.Linear(16, 16), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.c(torch.tanh(self.b(torch.relu(self.a(x)))))


class Wrapped(nn.Module):
    """A model with one child, in which all is."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).square().mean()


@pytest.mark.parametrize(
    ("make", "number", "cuts"),
    [
        (Own, 2, ("out",)),
        (lambda: Wrapped(Layers()), 2, ("inner.b",)),
        (lambda: Wrapped(Layers()), 3, ("inner.b", "inner.c")),
        (lambda: Wrapped(Wrapped(Layers())), 3, ("inner.inner.b", "inner.inner.c")),
        (lambda: Wrapped(Own()), 2, ("inner.out",)),
    ],
)
def test_places_are_found_where_no_list_has_them(make: Any, number: int, cuts: tuple[str, ...]) -> None:
    model, x = make(), torch.randn(4, 8)
    found = split(model, number, x)
    assert found.cuts == cuts and len(found.segments) >= number
    equal(model, x, found)
    with pytest.raises(SplitError, match="places where one may begin"):
        split(model, 9, x)


class Deep(nn.Module):
    """A number says how many of its layers are called, and how often."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.out = nn.ModuleList(nn.Linear(6, 6) for _ in range(6)), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, number: int, turns: bool = False) -> torch.Tensor:
        for layer in reversed(self.layers) if turns else self.layers[:number]:
            x = torch.tanh(layer(x))
        return self.out(x)


@pytest.mark.parametrize("first", [6, 2])
@pytest.mark.parametrize("number", [2, 3])
def test_another_way_through_a_model_is_divided_by_where_its_weights_lie(number: int, first: int) -> None:
    model, x = Deep(), torch.randn(4, 6)
    division = split(model, number, {"x": x, "number": first})
    known = division.users
    for called in (6, 3, 1, 0):
        batch = {"x": x, "number": called}
        other = division.at(batch)
        equal(model, batch, other)
        assert all(stage.number in known[name] for stage in other.stages for name in stage.uses)
    with pytest.raises(SplitError, match="order"):
        division.at({"x": x, "number": 6, "turns": True})


class Counted(nn.Module):
    """Is given something beside its rows, which a function of both takes."""

    def __init__(self, use: Callable[[torch.Tensor, Any], torch.Tensor]) -> None:
        super().__init__()
        self.layers, self.use = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4))), use

    def forward(self, x: torch.Tensor, given: Any) -> torch.Tensor:
        return self.use(self.layers(x), given)


def every_other(x: torch.Tensor, i: int) -> torch.Tensor:
    return x * 2 if i % 4 in (1, 2) and not i / 3 > 2 else x


def by_kind(x: torch.Tensor, i: int) -> torch.Tensor:
    return x * 2 if type(i) is int else x


def traces_of(use: Callable[[torch.Tensor, Any], torch.Tensor], make: Callable[[int], Any]) -> list[int]:
    """How often a model is traced for each of some things that it is given; the stages are the model."""
    model, x, counts = Counted(use), torch.ones(2, 6), list[int]()
    found = split(model, 2, (x, make(0)))
    with patch("espalier.parallel.pipeline.split.trace", wraps=trace) as traced:
        for i in range(1, 8):
            given = make(i)  # it may come where one was that is gone
            before, sent = traced.call_count, ()
            for program in found.at((x, given)).stages:
                sent = program(sent, (x, given))
            assert torch.equal(sent, model(x, given))
            counts.append(traced.call_count - before)
    return counts


@pytest.mark.parametrize(
    ("use", "counts"),
    [
        (lambda x, i: x, [2, 0, 0, 0, 0, 0, 0]),  # of a second one it is looked at what is asked
        (every_other, [2, 2, 2, 0, 0, 0, 0]),
        (lambda x, i: x * (i + 1), [2, 2, 2, 2, 1, 1, 1]),
        (lambda x, i: x * [1.0, 2.0, 3.0][i % 3], [2, 2, 2, 0, 0, 0, 0]),
        (lambda x, i: x[: i + 1], [2, 2, 2, 2, 1, 1, 1]),
        (by_kind, [2, 2, 2, 2, 1, 1, 1]),
    ],
)
def test_numbers_that_count_batches_are_traced_by_what_is_asked_of_them(use: Any, counts: list[int]) -> None:
    assert traces_of(use, lambda i: i) == counts


@pytest.mark.parametrize(
    ("make", "use"),
    [
        (lambda i: np.array([i % 3, 1.0]), lambda x, given: x * float(given.sum())),
        (lambda i: SimpleNamespace(i=i % 3), lambda x, given: x * given.i),
        (lambda i: Decimal(i % 3), lambda x, given: x * float(given)),
    ],
)
def test_objects_beside_rows_count_by_what_they_hold(make: Any, use: Any) -> None:
    assert traces_of(use, make) == [1, 1, 0, 0, 0, 0, 0]
