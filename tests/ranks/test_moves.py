"""Moves between layouts on real ranks: values, gradients, gradients of gradients, ledgers.

Every move is the identity on global values, so what it must give follows from the layouts alone.
``spread`` lays a global value out and ``whole`` puts local ones together; both know numpy only.
"""

from __future__ import annotations

import itertools
import math
import random
import traceback
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import espalier
from espalier import Mesh, Partial, Replicate, Shard
from espalier.comm import collectives, move
from espalier.layout import Layout
from tests.pool import RankError

State = int | str
Sizes = tuple[int, ...]
Locals = dict[tuple[int, ...], np.ndarray]
REDUCTIONS = {"sum": np.sum, "avg": np.mean, "max": np.max, "min": np.min, "product": np.prod}


class Spec(NamedTuple):
    """A layout in plain words: a state for each axis, and the order in which axes cut."""

    states: tuple[State, ...]
    order: tuple[int, ...]

    def on(self, mesh: Mesh, shape: Sizes) -> Layout:
        """The layout itself."""
        words: list[Any] = []
        for s in self.states:
            words.append(Shard(s) if isinstance(s, int) else Replicate() if s in "RD" else Partial(s))
        deferred = [i for i, s in enumerate(self.states) if s == "D"]
        return Layout(mesh, words, shape, order=self.order, deferred=deferred)

    @property
    def gradient(self) -> Spec:
        """The layout of the gradient, by the table of design section 3.1."""
        states = tuple("sum" if s == "D" else "D" if s in REDUCTIONS else s for s in self.states)
        return Spec(states, self.order)

    def averaged(self, sizes: Sizes) -> int:
        """Over how many ranks it averages."""
        return math.prod(n for n, s in zip(sizes, self.states, strict=True) if s == "avg")


class Case(NamedTuple):
    src: Spec
    dst: Spec
    shape: Sizes
    seed: int


# --- the reference -----------------------------------------------------------------------------------------


def spread(value: np.ndarray, spec: Spec, sizes: Sizes, chance: np.random.Generator) -> Locals:
    """A global value laid out: what each coordinate holds; addends are random."""
    held: Locals = dict.fromkeys(itertools.product(*map(range, sizes)), value)
    for axis, state in enumerate(spec.states):
        if state in REDUCTIONS:
            held = _addends(held, axis, str(state), sizes[axis], chance)
    for axis in spec.order:
        dim = spec.states[axis]
        if isinstance(dim, int):
            held = {at: _piece(x, dim, sizes[axis], at[axis]) for at, x in held.items()}
    return held


def _piece(x: np.ndarray, dim: int, n: int, index: int) -> np.ndarray:
    length = -(-x.shape[dim] // n)
    return np.take(x, range(x.shape[dim])[index * length : (index + 1) * length], axis=dim)


def _addends(held: Locals, axis: int, op: str, n: int, chance: np.random.Generator) -> Locals:
    parts: dict[tuple[int, ...], list[np.ndarray]] = {}
    result: Locals = {}
    for at, value in held.items():
        group = (*at[:axis], *at[axis + 1 :])
        if group not in parts:
            others = [chance.integers(-9, 9, value.shape).astype(value.dtype) for _ in range(n - 1)]
            if op == "product":
                others = [np.exp2(chance.integers(-2, 3, value.shape)) for _ in others]
                last = value / np.prod(others, axis=0)
            elif op in ("max", "min"):
                sign = -1 if op == "max" else 1
                others, last = [value + sign * np.abs(x) for x in others], value
            else:
                last = value * (n if op == "avg" else 1) - sum(others, np.zeros_like(value))
            mixed = [*others, last]
            parts[group] = [mixed[i] for i in chance.permutation(n)]
        result[at] = parts[group][at[axis]]
    return result


def whole(held: Locals, spec: Spec, sizes: Sizes) -> np.ndarray:
    """The global value of local ones, whose replicas must agree."""
    cuts = [a for a in spec.order if isinstance(spec.states[a], int)]
    sums = [a for a, s in enumerate(spec.states) if s in REDUCTIONS]
    for axis in [*reversed(cuts), *sums]:
        state, merged = spec.states[axis], {}
        for at in held:
            group = [held[*at[:axis], i, *at[axis + 1 :]] for i in range(sizes[axis])]
            if isinstance(state, int):
                merged[at] = np.concatenate(group, axis=state)
            else:
                merged[at] = REDUCTIONS[str(state)](np.stack(group), axis=0)
        held = merged
    values = list(held.values())
    for x in values[1:]:
        np.testing.assert_allclose(x, values[0], atol=1e-12, err_msg="replicas differ")
    return values[0]


# --- cases -------------------------------------------------------------------------------------------------


def specs(n_axes: int, ndim: int, states: tuple[State, ...]) -> list[Spec]:
    """Every layout of these states and of shards, in every order that makes a difference."""
    found = {}
    for axes in itertools.product((*states, *range(ndim)), repeat=n_axes):
        for order in itertools.permutations(range(n_axes)):
            cuts = tuple(tuple(a for a in order if axes[a] == d) for d in range(ndim))
            found.setdefault((axes, cuts), Spec(axes, order))
    return list(found.values())


def pairs(n_axes: int, shapes: list[Sizes], seed: int, sample: int | None) -> list[Case]:
    """Cases that have a gradient: all of them, or so many of each shape."""
    chance = random.Random(seed)
    cases = []
    for shape in shapes:
        every = specs(n_axes, len(shape), ("R", "D", "sum", "avg"))
        both = list(itertools.product(every, repeat=2))
        if sample is not None:
            both = chance.sample(both, min(sample, len(both)))
        cases += [Case(a, b, shape, seed + i) for i, (a, b) in enumerate(both)]
    return cases


# --- what the ranks do -------------------------------------------------------------------------------------


def values_of(case: Case, sizes: Sizes) -> tuple[dict[str, np.ndarray], dict[str, Locals]]:
    """The global values of a case (input, cotangent, cotangent's cotangent), and as they are laid out."""
    chance = np.random.default_rng(case.seed)
    names = {"x": case.src, "cotangent": case.dst.gradient, "second": case.src.gradient.gradient}
    # numbers that no reduction rounds, and no zero, which no product could make
    values = {k: chance.integers(1, 50, case.shape).astype(np.float64) for k in names}
    if case.seed % 4 == 0:
        values["cotangent"][...] = 3.0
    return values, {k: spread(values[k], spec, sizes, chance) for k, spec in names.items()}


def as_tensor(x: np.ndarray, seed: int) -> torch.Tensor:
    """A tensor of that content, sometimes transposed or expanded."""
    t = torch.tensor(x)
    if seed % 3 == 0 and t.ndim == 2:
        t = t.t().contiguous().t()
    if seed % 4 == 0 and t.numel() and bool((t == t.flatten()[0]).all()):
        t = t.flatten()[0].expand(t.shape)
    return t


def differentiated(
    src: Layout, dst: Layout, x: torch.Tensor, g: torch.Tensor, v: torch.Tensor
) -> tuple[torch.Tensor, ...]:
    """The move of x, its gradient for the cotangent g, and that gradient's own for v."""
    x, g = x.requires_grad_(), g.requires_grad_()
    y = move(x, src, dst)
    (gx,) = torch.autograd.grad(y, x, g, create_graph=True)
    (gg,) = torch.autograd.grad(gx, g, v)
    return y.detach(), gx.detach(), gg


def run_case(case: Case, mesh: Mesh) -> tuple[dict[str, np.ndarray], list[str]]:
    src, dst = case.src.on(mesh, case.shape), case.dst.on(mesh, case.shape)
    _, held = values_of(case, mesh.shape)
    x, g, v = (as_tensor(held[k][mesh.coordinate], case.seed) for k in ("x", "cotangent", "second"))
    assert x.shape == src.local_shape and v.shape == src.local_shape, "the reference cuts otherwise"
    before = x.clone()
    plain = move(x, src, dst)
    with espalier.ledger(mesh) as book:
        y, gx, gg = differentiated(src, dst, x.clone(), g.clone(), v)
    wrong = []
    if not torch.equal(x, before):
        wrong.append("the input was changed")
    if not torch.equal(plain, y):
        wrong.append("with and without gradient differ")
    if (y.shape, gx.shape, gg.shape) != (dst.local_shape, src.local_shape, dst.local_shape):
        wrong.append(f"local shapes {y.shape}, {gx.shape}, {gg.shape}")

    twin = Mesh.dry(dict(zip(mesh.names, mesh.shape, strict=True)), mesh.coordinate)
    a, b = case.src.on(twin, case.shape), case.dst.on(twin, case.shape)
    shapes = (a.local_shape, b.local_shape, a.local_shape)
    with espalier.ledger(twin) as guess:
        dry = differentiated(a, b, *[torch.empty(s, dtype=x.dtype, device="meta") for s in shapes])
    if guess != book:
        wrong.append(f"ledger {book.entries}, dry {guess.entries}")
    if [t.shape for t in dry] != [y.shape, gx.shape, gg.shape] or any(t.device.type != "meta" for t in dry):
        wrong.append("dry shapes differ")
    return {"y": y.numpy(), "gx": gx.numpy(), "gg": gg.numpy()}, wrong


def run_cases(rank: int, world: int, axes: dict[str, int], cases: list[Case]) -> Any:
    mesh = Mesh.from_env(axes)
    results: list[Any] = []
    for case in cases:
        try:
            results.append(run_case(case, mesh))
        except Exception:
            results.append(({}, [traceback.format_exc()]))
    return mesh.coordinate, results


def judge(case: Case, sizes: Sizes, found: dict[tuple[int, ...], Any]) -> list[str]:
    """What is wrong with what the ranks found."""
    wrong = [f"{at}: {text}" for at, (_, texts) in found.items() for text in texts]
    if any(not arrays for arrays, _ in found.values()):
        return wrong
    values, _ = values_of(case, sizes)
    # the derivative by a part of an average is a part of the derivative
    factor = case.dst.averaged(sizes) / case.src.averaged(sizes)
    expected = {
        "y": (case.dst, values["x"]),
        "gx": (case.src.gradient, values["cotangent"] * factor),
        "gg": (case.dst.gradient.gradient, values["second"] * factor),
    }
    for name, (spec, value) in expected.items():
        try:
            got = whole({at: arrays[name] for at, (arrays, _) in found.items()}, spec, sizes)
            np.testing.assert_allclose(got, value, atol=1e-10)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
    return wrong


MESHES = [
    # all pairs on one axis, a sample of each shape on two
    ({"a": 2}, [(4, 6), (5, 7), (1, 2), (2,), (0, 3)], None),
    ({"a": 3}, [(4, 6), (5, 7), (1, 2), (2,)], None),
    ({"a": 2, "b": 2}, [(4, 6), (5, 7), (1, 2), (2,)], 40),
    ({"a": 2, "b": 3}, [(4, 6), (5, 7), (1, 2), (2,)], 30),
    ({"a": 1, "b": 2}, [(5, 7)], 60),
]


@pytest.mark.parametrize(
    ("axes", "shapes", "sample"), MESHES, ids=lambda p: str(p) if type(p) is dict else ""
)
def test_moves(ranks: Any, axes: dict[str, int], shapes: list[Sizes], sample: int | None) -> None:
    sizes = tuple(axes.values())
    cases = pairs(len(axes), shapes, seed=1, sample=sample)
    answers = dict(ranks(math.prod(sizes), run_cases, axes, cases))
    failures = []
    for i, case in enumerate(cases):
        wrong = judge(case, sizes, {at: results[i] for at, results in answers.items()})
        failures += [f"{case}: {text}" for text in wrong]
    assert not failures, f"{len(failures)} failures in {len(cases)} cases:\n" + "\n".join(failures[:12])


def unsummed_cases(n_axes: int) -> list[Case]:
    """Reductions without gradient, along one axis, next to what commutes with them."""
    found = []
    for op, shape in itertools.product(("max", "min", "product"), [(5, 7), (1, 2)]):
        others = [s for s in specs(n_axes, 2, ("R",)) if s.states[0] == "R"]
        goals = specs(n_axes, 2, ("R", "D"))
        sources = [Spec((op, *s.states[1:]), s.order) for s in others]
        found += [Case(a, b, shape, len(found)) for a in sources for b in goals]
    return found


def reduce_unsummed(rank: int, world: int, axes: dict[str, int], cases: list[Case]) -> Any:
    mesh = Mesh.from_env(axes)
    results = []
    for case in cases:
        src, dst = case.src.on(mesh, case.shape), case.dst.on(mesh, case.shape)
        x = torch.tensor(values_of(case, mesh.shape)[1]["x"][mesh.coordinate])
        results.append(move(x, src, dst).numpy())
        with (
            espalier.ledger(mesh) as book,
            pytest.raises(ValueError, match=r"needs a gradient cannot be red"),
        ):
            move(x.requires_grad_(), src, dst)
        assert not book.entries, "told before anything is sent"
        with torch.no_grad():
            np.testing.assert_array_equal(move(x, src, dst).numpy(), results[-1])
    return mesh.coordinate, results


@pytest.mark.parametrize("axes", [{"a": 3}, {"a": 2, "b": 2}], ids=str)
def test_reductions_without_gradient(ranks: Any, axes: dict[str, int]) -> None:
    sizes = tuple(axes.values())
    cases = unsummed_cases(len(axes))
    answers = dict(ranks(math.prod(sizes), reduce_unsummed, axes, cases))
    for i, case in enumerate(cases):
        value = values_of(case, sizes)[0]["x"]
        got = whole({at: results[i] for at, results in answers.items()}, case.dst, sizes)
        np.testing.assert_allclose(got, value, atol=1e-12, err_msg=str(case))


# --- dtypes ------------------------------------------------------------------------------------------------

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "int64", "int32", "int16", "int8", "uint8", "bool",
    "complex64", "complex128", "float8_e4m3fn",
]  # fmt: skip


def carry(rank: int, world: int, name: str) -> list[str]:
    dtype = getattr(torch, name)
    mesh = Mesh.from_env({"a": 2, "b": 2})
    shape = (5, 6)
    generator = torch.Generator().manual_seed(3)
    value = torch.randint(0, 2 if dtype is torch.bool else 9, shape, generator=generator).to(torch.float32)
    whole_value = value.to(dtype) * (1 + 2j) if dtype.is_complex else value.to(dtype)
    wrong = []
    states: tuple[State, ...] = ("R",) if name in ("float8_e4m3fn", "int16") else ("R", "sum")
    replicated = Spec(("R", "R"), (0, 1)).on(mesh, shape)
    for spec in specs(2, 2, states):
        layout = spec.on(mesh, shape)
        there = move(whole_value, replicated, layout)
        for goal in (replicated, Layout(mesh, [Replicate(), Shard(1)], shape)):
            try:
                back = move(there, layout, goal)
                expected = move(whole_value, replicated, goal)
                if back.dtype is not dtype or not torch.equal(_bytes(back), _bytes(expected)):
                    wrong.append(f"{layout} -> {goal}: {back} instead of {expected}")
            except Exception as error:
                wrong.append(f"{layout} -> {goal}: {error}")
    return wrong


def _bytes(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.uint8)


@pytest.mark.parametrize("name", DTYPES)
def test_dtypes(ranks: Any, name: str) -> None:
    for wrong in ranks(4, carry, name):
        assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:10])


def reduced(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world})
    src = Layout(mesh, [Partial()], (2, 2))
    goals = [Layout(mesh, [p], (2, 2)) for p in (Replicate(), Shard(0), Shard(1))]
    bits = torch.tensor([[True, rank == 0], [rank == 1, False]])
    for goal in goals:
        # as + does it: True and True are True
        found = move(move(bits, src, goal), goal, goals[0])
        assert found.view(torch.uint8).tolist() == [[1, 1], [1, 0]]
    for lazy in (torch.tensor([[1 + 2j, rank], [0, 3j]]).conj(), torch._neg_view(torch.rand(2, 2))):
        expected = collectives.all_reduce(lazy.resolve_conj().resolve_neg(), mesh, 0)
        for goal in goals:
            torch.testing.assert_close(move(move(lazy, src, goal), goal, goals[0]), expected)
        for a, b in itertools.product(goals, repeat=2):
            part = move(lazy + 0, goals[0], a)
            kept = part.conj().resolve_conj().conj() if lazy.is_complex() else torch._neg_view(-part)
            torch.testing.assert_close(move(kept, a, b), move(part, a, b))


def test_bools_are_added_as_bools_and_lazy_views_are_resolved(ranks: Any) -> None:
    ranks(2, reduced)


def averages(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world})
    src, dst = Layout(mesh, [Partial("avg")], (2,)), Layout(mesh, [Replicate()], (2,))
    for dtype in (torch.float32, torch.complex64):
        local = torch.tensor([1.0, 5.0]).to(dtype) * (2 * rank)
        torch.testing.assert_close(move(local, src, dst), torch.tensor([1.0, 5.0]).to(dtype) * (world - 1))
    for dtype in (torch.int64, torch.bool):
        with pytest.raises(ValueError, match="average"):
            move(torch.ones(2, dtype=dtype), src, dst)


def test_averages_of_every_dtype(ranks: Any) -> None:
    ranks(2, averages)


def test_a_failing_case_is_seen(ranks: Any) -> None:
    with pytest.raises(RankError, match="no axis 'b'"):
        ranks(2, no_such_axis)


def no_such_axis(rank: int, world: int) -> None:
    Layout(Mesh.from_env({"a": world}), [Replicate()], (2,), deferred=["b"])


def alike(rank: int, world: int) -> list[bytes]:
    mesh = Mesh.from_env({"a": world})
    found = []
    # few and many elements: as many as a rank sends straight to each other one, and more
    for size, dtype in itertools.product((0, 1, 5, 600_000), (torch.float32, torch.float16)):
        given = [
            torch.randn(size, generator=torch.Generator().manual_seed(i)).to(dtype) for i in range(world)
        ]
        for op, whole in (("sum", torch.sum), ("max", torch.amax), ("product", torch.prod)):
            if op == "product" and dtype is torch.float16:
                continue
            got = given[rank].clone()
            collectives.all_reduce_(got, mesh, 0, op).wait()
            expected = whole(torch.stack(given).double(), 0)
            torch.testing.assert_close(got.double(), expected, rtol=3e-3, atol=3e-3)
            found.append(got[:1000].numpy().tobytes())
    return found


@pytest.mark.parametrize("world", [2, 3])
def test_reductions_are_the_same_bits_on_all_ranks(ranks: Any, world: int) -> None:
    first, *others = ranks(world, alike)
    assert all(other == first for other in others)
