"""Routes against an exhaustive search that shares no code with them.

What is whole is not split into addends on the way (see ``espalier.layout.routes``): the search below
may not do it either, but along axes where the goal is Partial.
"""

from __future__ import annotations

import functools
import itertools
import math
import random
import sys
from typing import Any

import pytest
import torch

from espalier import Mesh, Partial, Replicate, Shard
from espalier.layout import Layout, route

State = int | str
# states of the axes; for each dim the axes that cut it, outermost first
Node = tuple[tuple[State, ...], tuple[tuple[int, ...], ...]]
Sizes = tuple[int, ...]


def dry(*sizes: int) -> Mesh:
    return Mesh.dry({"abcd"[i]: n for i, n in enumerate(sizes)})


def nodes(n_axes: int, ndim: int, partials: tuple[str, ...] = ("sum",)) -> list[Node]:
    """All layouts of so many axes, in every order of cuts."""
    found: list[Node] = []
    for axes in itertools.product(("R", "D", *partials, *range(ndim)), repeat=n_axes):
        cutting = [[a for a, s in enumerate(axes) if s == d] for d in range(ndim)]
        found += [(axes, cuts) for cuts in itertools.product(*map(itertools.permutations, cutting))]
    return found


@functools.cache
def first_piece(size: int, pieces: tuple[int, ...]) -> int:
    """The length of the first piece of torch.chunk, axis after axis."""
    rows = torch.arange(size)
    for n in pieces:
        rows = rows.chunk(n)[0]
    return len(rows)


def largest(node: Node, sizes: Sizes, shape: Sizes) -> list[int]:
    """The biggest local shape."""
    return [first_piece(n, tuple(sizes[a] for a in cut)) for n, cut in zip(shape, node[1], strict=True)]


def changed(node: Node, axis: int, state: State) -> Node:
    axes, cuts = list(node[0]), [[a for a in cut if a != axis] for cut in node[1]]
    axes[axis] = state
    if isinstance(state, int):
        cuts[state].append(axis)
    return tuple(axes), tuple(map(tuple, cuts))


def bare(node: Node, sizes: Sizes) -> Node:
    """The same, replicated along axes of size 1."""
    axes = tuple("R" if n == 1 else s for s, n in zip(node[0], sizes, strict=True))
    return axes, tuple(tuple(a for a in cut if sizes[a] > 1) for cut in node[1])


def price(node: Node, axis: int, after: Node, sizes: Sizes, shape: Sizes) -> int:
    """Elements a rank sends: ring algorithms, pieces padded to the largest."""
    n, old, new = sizes[axis], node[0][axis], after[0][axis]
    before, behind = largest(node, sizes, shape), largest(after, sizes, shape)
    if old in PARTIALS and new in ("R", "D"):
        return 2 * (n - 1) * math.ceil(math.prod(before) / n)
    if isinstance(old, int) and isinstance(new, int):
        block = [min(a, b) for a, b in zip(before, behind, strict=True)]
        return (n - 1) * math.prod(block)
    if isinstance(old, int) and new in ("R", "D"):
        return (n - 1) * math.prod(before)
    if old == "sum" and isinstance(new, int):
        return (n - 1) * math.prod(behind)
    return 0


PARTIALS = ("sum", "max")
Graph = dict[Node, list[tuple[Node, int]]]


def graph(sizes: Sizes, shape: Sizes, sums: frozenset[int]) -> Graph:
    """Every step that changes one axis: a sharded one only if it is the innermost cut of its dim.

    New sums arise along the axes ``sums`` alone, maxima never; of both the last axis is reduced first.
    """
    steps: Graph = {}
    for node in nodes(len(sizes), len(shape), PARTIALS):
        steps[node] = []
        for axis, old in enumerate(node[0]):
            if isinstance(old, int) and node[1][old][-1] != axis:
                continue
            later = set(node[0][axis + 1 :])
            if old in PARTIALS and later & (set(PARTIALS) - {old}):
                continue
            for new in ("R", "D", "sum", *range(len(shape))):
                if old == "max" and new not in ("R", "D"):
                    continue
                if new != old and (new != "sum" or axis in sums):
                    after = changed(node, axis, new)
                    steps[node].append((after, price(node, axis, after, sizes, shape)))
    return steps


def cheapest(steps: Graph, start: Node) -> dict[Node, float]:
    """Bellman-Ford: what every layout costs from here."""
    cost: dict[Node, float] = dict.fromkeys(steps, math.inf)
    cost[start] = 0
    changing = {start}
    while changing:
        improved = set()
        for node in changing:
            for after, extra in steps[node]:
                if cost[node] + extra < cost[after]:
                    cost[after] = cost[node] + extra
                    improved.add(after)
        changing = improved
    return cost


def check(sizes: Sizes, shape: Sizes, pairs: list[tuple[Node, Node]]) -> list[str]:
    mesh, wrong = dry(*sizes), []
    graphs: dict[frozenset[int], Graph] = {}
    known: dict[tuple[Node, frozenset[int]], dict[Node, float]] = {}
    for pair in pairs:
        src, dst = (bare(node, sizes) for node in pair)
        sums = frozenset(i for i, s in enumerate(dst[0]) if s == "sum")
        if sums not in graphs:
            graphs[sums] = graph(sizes, shape, sums)
        if (src, sums) not in known:
            known[src, sums] = cheapest(graphs[sums], src)
        best = known[src, sums][dst]
        a, b = Layout.of(mesh, *src, shape), Layout.of(mesh, *dst, shape)
        given = [Layout.of(mesh, *node, shape) for node in pair]
        if best == math.inf:
            with pytest.raises(ValueError, match="No route"):
                route(*given)
            continue
        found = route(*given)
        here = a
        for step in found.steps:
            assert step.src is here and step.dst is here.with_axis(step.axis, step.dst.axes[step.axis])
            after = (step.dst.axes, step.dst.cuts)
            paid = price((here.axes, here.cuts), step.axis, after, sizes, shape)
            if step.elements != paid:
                wrong.append(f"{step} costs {paid}, said {step.elements}")
            here = step.dst
        assert here is b and found.elements == sum(step.elements for step in found.steps)
        if found.elements != best:
            way = " ".join(f"{s.operation}@{s.axis}" for s in found.steps)
            wrong.append(f"{a} -> {b}: {found.elements} by {way}, possible {best}")
    return wrong


@pytest.mark.parametrize("shape", [(12, 12), (5, 7), (1, 2)], ids=str)
def test_routes_on_two_axes_are_the_cheapest(shape: Sizes) -> None:
    every = nodes(2, 2)
    wrong = check((2, 3), shape, list(itertools.product(every, repeat=2)))
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])


@pytest.mark.parametrize(
    ("sizes", "shape"),
    [
        ((2, 2, 2), (16, 8)),
        ((2, 2, 2), (5, 7)),
        ((2, 3, 2), (12, 10)),
        ((2, 2, 3), (3, 8, 2)),
        ((2, 1, 2), (4,)),
        ((1, 2, 2), (5, 7)),
    ],
    ids=str,
)
def test_routes_on_three_axes_are_the_cheapest(sizes: Sizes, shape: Sizes) -> None:
    chance = random.Random(0)
    every, mixed = nodes(3, len(shape)), nodes(3, len(shape), PARTIALS)
    starts = [*chance.sample(every, 5), *chance.sample(mixed, 3)]
    pairs = [(src, dst) for src in starts for dst in (*chance.sample(every, 30), *chance.sample(mixed, 10))]
    wrong = check(sizes, shape, pairs)
    assert not wrong, f"{len(wrong)} wrong:\n" + "\n".join(wrong[:20])


def test_a_route_is_found_without_looking_at_all_layouts(monkeypatch: pytest.MonkeyPatch) -> None:
    module = sys.modules[route.__module__]
    looked, neighbours = [0], module._neighbours

    def counted(*args: Any) -> Any:
        looked[0] += 1
        return neighbours(*args)

    monkeypatch.setattr(module, "_neighbours", counted)
    mesh, shape, chance = dry(2, 2, 2), (16, 8, 12, 10), random.Random(0)
    every = nodes(3, 4)
    for _ in range(40):
        route(*(Layout.of(mesh, *chance.choice(every), shape) for _ in range(2)))
    # there are 435 layouts; a look at one takes some 50 microseconds
    assert looked[0] / 40 < 60
    # what a program does all day
    looked[0] = 0
    src = Layout(mesh, [Shard(0), Shard(1), Replicate()], shape)
    route(src, Layout(mesh, [Shard(0), Replicate(), Replicate()], shape))
    assert looked[0] <= 30


def test_of_equal_bytes_the_fewest_steps() -> None:
    mesh = dry(2, 3)
    src = Layout(mesh, [Shard(0), Replicate()], (4, 6))
    dst = Layout(mesh, [Replicate(), Replicate()], (4, 6), deferred=["a"])
    assert [s.operation for s in route(src, dst).steps] == ["all_gather"]
    partial = Layout(mesh, [Partial(), Replicate()], (4, 6))
    assert [s.operation for s in route(partial, src).steps] == ["reduce_scatter"]
    whole = Layout.replicated(mesh, (4, 6))
    assert route(whole, src).elements == 0 and len(route(whole, src).steps) == 1


def test_a_route_to_the_same_layout_is_empty() -> None:
    mesh = dry(2, 3)
    for axes, cuts in nodes(2, 2):
        layout = Layout.of(mesh, axes, cuts, (4, 6))
        assert route(layout, layout) == ((), 0)


@pytest.mark.parametrize("op", ["max", "min", "product"])
def test_no_route_makes_a_maximum(op: str) -> None:
    mesh = dry(2, 3)
    dst = Layout(mesh, [Replicate(), Partial(op)], (4, 6))
    for start in (Replicate(), Shard(0), Partial()):
        with pytest.raises(ValueError, match="cannot be turned into a Partial of max, min or product"):
            route(Layout(mesh, [Replicate(), start], (4, 6)), dst)
    # but one that stays is carried along, and one that goes is reduced once
    src = Layout(mesh, [Shard(0), Partial(op)], (4, 6))
    assert [s.operation for s in route(src, dst).steps] == ["all_gather"]
    for end in (Replicate(), Shard(1), Partial()):
        steps = route(src, Layout(mesh, [Shard(0), end], (4, 6))).steps
        assert [s.operation for s in steps].count("all_reduce") == 1


def test_other_shapes_and_meshes_are_told() -> None:
    one, other = dry(2), dry(2)
    with pytest.raises(ValueError, match="must be the same"):
        route(Layout(one, [Shard(0)], (4,)), Layout(one, [Shard(0)], (5,)))
    with pytest.raises(ValueError, match="must be the same"):
        route(Layout(one, [Shard(0)], (4,)), Layout(other, [Replicate()], (4,)))


def test_axes_of_size_one_cost_nothing() -> None:
    mesh, other = dry(1, 2), dry(2)
    for a, b in itertools.product(nodes(2, 2, PARTIALS), repeat=2):
        src, dst = Layout.of(mesh, *a, (4, 6)), Layout.of(mesh, *b, (4, 6))
        if "max" in (a[0][1], b[0][1]):
            continue
        found, alone = route(src, dst), []
        for node in (a, b):
            cuts = tuple(tuple(i - 1 for i in cut if i) for cut in node[1])
            alone.append(Layout.of(other, node[0][1:], cuts, (4, 6)))
        assert found.elements == route(*alone).elements
        assert {step.axis for step in found.steps} <= {1}


def test_a_large_dry_mesh_is_as_good_as_a_small_one() -> None:
    mesh = Mesh.dry({"data": 64, "pipe": 8, "tensor": 8}, coordinate=(63, 7, 7))
    src = Layout(mesh, [Shard(0), Replicate(), Shard(0)], (4096, 1000))
    assert src.local_shape == (8, 1000)
    dst = Layout(mesh, [Shard(0), Replicate(), Shard(1)], (4096, 1000))
    assert dst.local_shape == (64, 125)
    found = route(src, dst)
    assert [(s.operation, s.axis) for s in found.steps] == [("all_to_all", 2)]
    assert found.elements == 7 * 8 * 125
