"""Layouts, regions, the table of transitions and routes, without any traffic."""

from __future__ import annotations

import copy
import gc
import itertools
import math
import pickle
from typing import Any

import pytest
import torch

from espalier import Mesh, Partial, Replicate, Shard
from espalier.layout import (
    TABLE,
    Layout,
    chunk_bounds,
    gradient_layout,
    local_box,
    operation,
    same_cuts,
    same_data,
)
from espalier.layout.layout import D, R, known_layout
from espalier.layout.transitions import gradient_state, kind

State = int | str
# an independent picture of a layout: state of each axis, and for each dim the axes that cut it
Node = tuple[tuple[State, ...], tuple[tuple[int, ...], ...]]


def dry(*sizes: int, coordinate: tuple[int, ...] | None = None) -> Mesh:
    return Mesh.dry({"abcd"[i]: n for i, n in enumerate(sizes)}, coordinate)


def coordinates(mesh: Mesh) -> list[tuple[int, ...]]:
    return list(itertools.product(*map(range, mesh.shape)))


def own_rows(size: int, cut: tuple[int, ...], sizes: tuple[int, ...], at: tuple[int, ...]) -> list[int]:
    """The rows at a coordinate, by torch.chunk alone."""
    rows = torch.arange(size)
    for axis in cut:
        parts = rows.chunk(sizes[axis])
        rows = parts[at[axis]] if at[axis] < len(parts) else rows[:0]
    return rows.tolist()


def nodes(n_axes: int, ndim: int, states: tuple[State, ...] = (R, D, "sum")) -> list[Node]:
    """All layouts of so many axes, in every order of cuts."""
    found: list[Node] = []
    for axes in itertools.product((*states, *range(ndim)), repeat=n_axes):
        cutting = [[a for a, s in enumerate(axes) if s == d] for d in range(ndim)]
        found += [(axes, cuts) for cuts in itertools.product(*map(itertools.permutations, cutting))]
    return found


# --- layouts -----------------------------------------------------------------------------------------------


def test_equal_layouts_are_one_object() -> None:
    mesh = dry(2, 3)
    one = Layout(mesh, [Shard(0), Replicate()], (4, 6))
    assert Layout(mesh, (Shard(-2), Replicate()), [4, 6]) is one
    assert Layout(mesh, [Shard(0), Replicate()], torch.Size((4, 6)), order=("b", "a")) is one
    assert one.with_axis(1, "sum").with_axis(1, R) is one
    assert copy.copy(one) is one and copy.deepcopy(one) is one and copy.deepcopy([one])[0] is one
    assert Layout.replicated(mesh, (4, 6)) is Layout(mesh, [Replicate()] * 2, (4, 6))
    others = [
        Layout(mesh, [Shard(1), Replicate()], (4, 6)),
        Layout(mesh, [Shard(0), Replicate()], (4, 7)),
        Layout(mesh, [Shard(0), Replicate()], (4, 6), deferred=["b"]),
        Layout(mesh, [Shard(0), Partial()], (4, 6)),
        Layout(mesh, [Shard(0), Partial("avg")], (4, 6)),
        Layout(mesh, [Shard(0), Shard(0)], (4, 6)),
        Layout(mesh, [Shard(0), Shard(0)], (4, 6), order=("b", "a")),
        Layout(dry(2, 3), [Shard(0), Replicate()], (4, 6)),
    ]
    assert len({one, *others}) == len(others) + 1
    for layout in (one, *others):
        again = pickle.loads(pickle.dumps(layout))
        assert (
            repr(again) == repr(layout)
            and again.axes == layout.axes
            and repr(again.mesh) == repr(layout.mesh)
        )


def test_interning_outlives_neither_layout_nor_mesh() -> None:
    from espalier.layout import layout as module

    before = len(module._interned)
    for _ in range(20):
        Layout(dry(2), [Shard(0)], (3,))
    gc.collect()
    assert len(module._interned) <= before


@pytest.mark.parametrize(
    ("placements", "shape", "keywords", "message"),
    [
        ([Shard(0)], (4, 6), {}, r"1 placement\(s\)(.|\n)*expected 2(.|\n)*a, b"),
        ([Shard(0)] * 3, (4, 6), {}, "3 placement"),
        ([Shard(2), Replicate()], (4, 6), {}, "axis 'a': dim 2 is out of range for a tensor of 2 dims"),
        ([Replicate(), Shard(-3)], (4, 6), {}, "axis 'b': dim -3 is out of range"),
        ([Shard(0), Replicate()], (), {}, "without dims cannot be sharded"),
        ([Replicate(), Partial("median")], (4, 6), {}, "'b': unknown placement(.|\n)*sum, avg"),
        ([None, Replicate()], (4, 6), {}, "'a': unknown placement None"),
        (["S(0)", Replicate()], (4, 6), {}, "unknown placement"),
        (
            [Shard(0), Replicate()],
            (4, 6),
            {"deferred": ["a"]},
            r"'a' cannot be deferred: the tensor is S\(0\)",
        ),
        ([Partial(), Replicate()], (4, 6), {"deferred": [0]}, "'a' cannot be deferred"),
        ([Shard(0), Replicate()], (4, 6), {"deferred": ["c"]}, "no axis 'c'"),
        ([Shard(0), Replicate()], (4, 6), {"deferred": [2]}, "no axis 2"),
        ([Shard(0), Shard(0)], (4, 6), {"order": ["b", "d"]}, "no axis 'd'"),
        ([Shard(0), Shard(0)], (4, 6), {"order": [1, 5]}, "no axis 5"),
    ],
)
def test_mistakes_are_told(placements: Any, shape: Any, keywords: Any, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Layout(dry(2, 3), placements, shape, **keywords)


def special_placements() -> list[Any]:
    from torch.distributed.tensor import placement_types as torch_types

    found: list[Any] = []
    if hasattr(torch_types, "_StridedShard"):
        found.append(torch_types._StridedShard(0, split_factor=2))
    if hasattr(torch_types, "_MaskPartial"):
        found.append(torch_types._MaskPartial(offset_shape=torch.Size((4, 6))))
    return found


@pytest.mark.parametrize("placement", special_placements(), ids=lambda p: type(p).__name__)
def test_torchs_special_placements_are_not_taken_for_plain_ones(placement: Any) -> None:
    with pytest.raises(ValueError, match="unknown placement"):
        Layout(dry(2), [placement], (4, 6))


def test_placements_round_trip() -> None:
    mesh = dry(2, 3)
    choices = [
        Replicate(),
        Shard(0),
        Shard(1),
        *(Partial(op) for op in ("sum", "avg", "max", "min", "product")),
    ]
    for pair in itertools.product(choices, repeat=2):
        layout = Layout(mesh, pair, (5, 7))
        assert layout.placements == pair
        assert Layout(mesh, layout.placements, layout.shape) is layout
        assert layout.partial == tuple(i for i, p in enumerate(pair) if isinstance(p, Partial))
        assert layout.is_firm == (not layout.partial)
        assert layout.is_plain == all(isinstance(p, Replicate) for p in pair)
    for node in nodes(2, 2):
        layout = Layout.of(mesh, *node, (5, 7))
        again = Layout(mesh, layout.placements, layout.shape, order=layout.order, deferred=layout.deferred)
        assert again is layout and layout.deferred == tuple(i for i, s in enumerate(node[0]) if s == D)


def test_axes_by_number_count_from_the_back_too() -> None:
    mesh = dry(2, 3)
    swapped = Layout(mesh, [Shard(0), Shard(0)], (12,), order=("b", "a"))
    assert Layout(mesh, [Shard(0), Shard(0)], (12,), order=(-1, 0)) is swapped
    assert "b then a" in repr(swapped)
    deferred = Layout(mesh, [Shard(0), Replicate()], (12,), deferred=("b",))
    assert Layout(mesh, [Shard(0), Replicate()], (12,), deferred=(-1, 1)) is deferred
    assert "b3:D" in repr(deferred)


def test_same_data_forgets_axes_of_size_one_only() -> None:
    mesh = dry(1, 2, 1)
    states = [Replicate(), Shard(0), Shard(1), Partial()]
    layouts = [Layout(mesh, p, (4, 6)) for p in itertools.product(states, repeat=3)]
    layouts += [Layout(mesh, [Shard(0)] * 3, (4, 6), order=(2, 1, 0))]
    for a, b in itertools.product(layouts, repeat=2):
        assert same_data(a, b) == (a.axes[1] == b.axes[1])
    both = dry(2, 2)
    assert not same_data(
        Layout(both, [Shard(0)] * 2, (8,)), Layout(both, [Shard(0)] * 2, (8,), order=("b", "a"))
    )


# --- regions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", range(10))
@pytest.mark.parametrize("n", range(1, 6))
def test_pieces_are_those_of_chunk(size: int, n: int) -> None:
    for index in range(n):
        start, length = chunk_bounds(size, n, index)
        assert list(range(start, start + length)) == own_rows(size, (0,), (n,), (index,))


@pytest.mark.parametrize("sizes", [(2,), (3,), (2, 3), (3, 2), (2, 1, 3)], ids=str)
@pytest.mark.parametrize("shape", [(4, 6), (5, 7), (1, 2), (0, 3), (7, 1)], ids=str)
def test_boxes_tile_the_tensor(sizes: tuple[int, ...], shape: tuple[int, ...]) -> None:
    for node in nodes(len(sizes), len(shape), (R,)):
        axes, cuts = node
        mesh = dry(*sizes)
        layout = Layout.of(mesh, axes, cuts, shape)
        held = torch.zeros(shape, dtype=torch.int64)
        for at in coordinates(mesh):
            box = local_box(layout, at)
            rows = [list(range(o, o + n)) for o, n in zip(box.offsets, box.sizes, strict=True)]
            expected = [own_rows(n, cut, sizes, at) for n, cut in zip(shape, cuts, strict=True)]
            # where a box is empty, its offset says nothing
            assert rows == expected, (layout, at)
            held[box.slices] += 1
            there = Layout.of(dry(*sizes, coordinate=at), axes, cuts, shape)
            assert there.local_shape == box.sizes and local_box(there) == box
            assert all(a <= b for a, b in zip(box.sizes, there.padded_shape, strict=True))
        copies = math.prod(n for n, s in zip(sizes, axes, strict=True) if s == R)
        assert (held == copies).all(), layout


def test_two_axes_cut_one_dim_in_either_order() -> None:
    for order, expected in [
        (("a", "b"), {(0, 0): (0, 2), (0, 1): (2, 2), (0, 2): (4, 0), (1, 0): (4, 1), (1, 2): (6, 1)}),
        (("b", "a"), {(0, 0): (0, 2), (1, 0): (2, 1), (0, 1): (3, 2), (1, 1): (5, 1), (1, 2): (7, 0)}),
    ]:
        layout = Layout(dry(2, 3), [Shard(0), Shard(0)], (7,), order=order)
        for at, (start, length) in expected.items():
            box = local_box(layout, at)
            assert (box.offsets, box.sizes) == ((start,), (length,)), (order, at)


def test_same_cuts_against_brute_force() -> None:
    for size, factor, sizes in itertools.product(
        range(9), range(1, 5), [(1,), (2,), (3,), (4,), (2, 2), (2, 3), (3, 2), (2, 1, 2)]
    ):
        axes = tuple(range(len(sizes)))
        places = itertools.product(*map(range, sizes))
        expected = all(
            own_rows(size * factor, axes, sizes, at)
            == [r * factor + i for r in own_rows(size, axes, sizes, at) for i in range(factor)]
            for at in places
        )
        found = same_cuts(size, factor, sizes)
        # equal in the end, though cut apart on the way, is no harm to refuse
        assert found == expected, (size, factor, sizes)


# --- the table ---------------------------------------------------------------------------------------------


def test_the_tables_backward_follows_from_the_gradient_states() -> None:
    letters = "RDSP"
    assert set(TABLE) == set(itertools.product(letters, repeat=2))
    gradient = {"R": "R", "D": "P", "S": "S", "P": "D"}
    for letter, state in zip(letters, (R, D, 1, "sum"), strict=True):
        assert kind(state) == letter and kind(gradient_state(state)) == gradient[letter]
        assert gradient_state(gradient_state(state)) == state
    for (src, dst), (_, backward) in TABLE.items():
        there, back = gradient[dst], gradient[src]
        assert backward == TABLE[there, back][0], f"backward of {src} -> {dst} goes {there} -> {back}"


def test_operations_between_states() -> None:
    states = (R, D, 0, 1, "sum")
    for a, b in itertools.product(states, repeat=2):
        expected = "identity" if a == b else TABLE[kind(a), kind(b)][0]
        assert operation(a, b) == expected
    assert operation("max", R) == "all_reduce"


def test_gradient_layouts() -> None:
    mesh = dry(2, 3)
    for axes, cuts in nodes(2, 2, (R, D, "sum", "avg")):
        layout = Layout.of(mesh, axes, cuts, (4, 6))
        grad = gradient_layout(layout)
        expected = [{D: "sum", "sum": D, "avg": D}.get(s, s) if isinstance(s, str) else s for s in axes]
        assert grad.axes == tuple(expected) and grad.cuts == cuts and grad.shape == (4, 6)
        assert gradient_layout(layout) is grad


# --- old names ---------------------------------------------------------------------------------------------


def test_sums_along_axes_of_one_rank_are_made() -> None:
    mesh = Mesh.dry({"data": 2, "tensor": 1})
    both = Layout(mesh, [Partial(), Partial("max")], (4,))
    assert both.summed is both.summed is Layout(mesh, [Partial(), Replicate()], (4,))
    assert both.summed.summed is both.summed


def test_deferred_by_its_old_name() -> None:
    mesh = Mesh.dry({"a": 2})
    with pytest.warns(DeprecationWarning, match="deferred="):
        old = Layout(mesh, [Replicate()], (4,), varied=["a"])
    assert old is Layout(mesh, [Replicate()], (4,), deferred=["a"])
    assert known_layout(mesh, ["V"], [[]], [4]) is old


def test_a_pickle_of_before_finds_its_mesh() -> None:
    mesh = Mesh.dry({"of_before": 2})  # no other test has one like it
    pickled = pickle.dumps(mesh, protocol=2)
    of_before = pickled.replace(b"cespalier.mesh.mesh\nknown_mesh", b"cespalier.mesh.parts\nknown_mesh")
    assert of_before != pickled and pickle.loads(of_before) is mesh
