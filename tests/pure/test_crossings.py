"""What goes where between two meshes: everything wanted, nothing twice, no more than an exhaustive search."""

from __future__ import annotations

import itertools
import math
import random

import numpy as np
import pytest

from espalier import Mesh, Partial, Replicate, Shard
from espalier.layout import Box, Layout, crossing, local_box, route
from espalier.layout.routes import hand_over


def dry(axes: dict[str, int], ranks: list[int]) -> Mesh:
    return Mesh.dry(axes, ranks=ranks, world_rank=0)


def drawn(chance: random.Random, mesh: Mesh, shape: tuple[int, ...], partial: bool) -> Layout:
    words = [Replicate(), *([Partial()] if partial else []), *map(Shard, range(len(shape)))]
    order = list(range(mesh.ndim))
    chance.shuffle(order)
    return Layout(mesh, [chance.choice(words) for _ in mesh.shape], shape, order=order)


def boxes(layout: Layout) -> dict[int, Box]:
    """What each rank of the world holds."""
    where = np.ndindex(*layout.mesh.shape)
    return {rank: local_box(layout, at) for rank, at in zip(layout.mesh.ranks, where, strict=True)}


def meshes(chance: random.Random) -> Mesh:
    axes = chance.choice(
        [{"a": 1}, {"a": 2}, {"a": 3}, {"a": 2, "b": 2}, {"a": 2, "b": 3}, {"a": 2, "b": 2, "c": 2}]
    )
    return dry(axes, chance.sample(range(9), math.prod(axes.values())))


def test_every_rank_gets_what_it_wants_once_and_from_one_that_holds_it() -> None:
    chance = random.Random(0)
    for _ in range(400):
        shape = chance.choice([(12, 8), (5, 7), (1, 3), (4,), (0, 2), (), (3, 2, 5)])
        src = drawn(chance, meshes(chance), shape, partial=False)
        dst = drawn(chance, meshes(chance), shape, partial=True)
        held, wanted = boxes(src), boxes(dst)
        counts = {rank: np.zeros(shape, dtype=int) for rank in wanted}
        for giver, getter, box in hand_over(src, dst):
            whole = np.zeros(shape, dtype=int)
            whole[held[giver].slices] = 1
            assert whole[box.slices].all(), "a rank gives what it does not hold"
            assert math.prod(box.sizes)
            own = np.zeros(shape, dtype=bool)
            if getter in held:
                own[held[getter].slices] = True
            assert giver == getter or not own[box.slices].any(), "a rank gets what it holds"
            counts[getter][box.slices] += 1
        for rank, at in zip(dst.mesh.ranks, np.ndindex(*dst.mesh.shape), strict=True):
            right = np.zeros(shape, dtype=int)
            if not any(at[a] for a in dst.partial):
                right[wanted[rank].slices] = 1
            np.testing.assert_array_equal(counts[rank], right)


def sent_by(src: Layout, dst: Layout) -> dict[int, int]:
    sent = dict.fromkeys(src.mesh.ranks, 0)
    for giver, getter, box in hand_over(src, dst):
        sent[giver] += math.prod(box.sizes) if giver != getter else 0
    return sent


@pytest.mark.parametrize(("n", "m"), [(1, 3), (2, 1), (2, 3), (3, 2), (4, 4), (4, 6)])
def test_copies_share_the_work(n: int, m: int) -> None:
    src = Layout(dry({"a": n}, list(range(n))), [Replicate()], (24, 10))
    for word in (Replicate(), Shard(0), Shard(1)):
        dst = Layout(dry({"b": m}, list(range(n, n + m))), [word], (24, 10))
        sent = sent_by(src, dst)
        total = sum(math.prod(box.sizes) for box in boxes(dst).values())
        assert sum(sent.values()) == total
        # to the nearest row of a box
        assert max(sent.values()) <= total / n + 24


def test_a_crossing_is_the_cheapest_of_all_layouts_at_the_crossing() -> None:
    chance = random.Random(1)
    for _ in range(25):
        shape = chance.choice([(12, 8), (6, 4)])
        src = drawn(chance, dry({"a": 2, "b": 2}, [0, 1, 2, 3]), shape, partial=True)
        dst = drawn(chance, dry({"x": 3}, chance.sample(range(7), 3)), shape, partial=True)
        found = crossing(src, dst)
        words = [Replicate(), Shard(0), Shard(1)]
        firm = [
            Layout(src.mesh, w, shape, order=o)
            for w in itertools.product(words, repeat=2)
            for o in ((0, 1), (1, 0))
        ]
        best = min(
            route(src, a).elements + max(sent_by(a, b).values()) + route(b, dst).elements
            for a in firm
            for b in [dst, *(Layout(dst.mesh, [w], shape) for w in words)]
        )
        steps = route(src, found.leaving), route(found.landing, dst)
        sent = max(sent_by(found.leaving, found.landing).values())
        assert found.elements == steps[0].elements + sent + steps[1].elements
        # the search takes all open axes alike, and no detour by other shards
        assert best <= found.elements <= 1.5 * best, (src, dst, found.elements, best)


def test_partials_are_scattered_before_and_whole_values_gathered_behind() -> None:
    first, second = dry({"a": 4}, [0, 1, 2, 3]), dry({"b": 4}, [4, 5, 6, 7])
    src = Layout(first, [Partial()], (16, 4))
    found = crossing(src, Layout(dry({"b": 6}, list(range(4, 10))), [Replicate()], (16, 4)))
    assert found.leaving.placements == found.landing.placements == (Shard(0),)
    assert found.elements == 48 + 16 + 5 * 12
    same = crossing(Layout(first, [Shard(0)], (16, 4)), Layout(second, [Shard(0)], (16, 4)))
    assert same.elements == 16 and len(same.parcels) == 4
    own = crossing(
        Layout(first, [Shard(0)], (16, 4)),
        Layout(dry({"b": 2, "c": 2}, [0, 1, 2, 3]), [Shard(0)] * 2, (16, 4)),
    )
    assert own.elements == 0


def test_large_dry_meshes_cross_too() -> None:
    first = dry({"data": 64, "tensor": 8}, list(range(512)))
    second = dry({"stage": 8, "data": 32}, list(range(256, 512)))
    src = Layout(first, [Shard(0), Partial()], (4096, 1024))
    dst = Layout(second, [Shard(1), Shard(0)], (4096, 1024))
    found = crossing(src, dst)
    assert found.leaving.is_firm and found.leaving.axes[1] != "R"
    assert sum(math.prod(box.sizes) for _, _, box in found.parcels) == 4096 * 1024


def test_what_cannot_cross_is_told() -> None:
    first, second = dry({"a": 2}, [0, 1]), dry({"b": 2}, [2, 3])
    src = Layout(first, [Shard(0)], (4,))
    with pytest.raises(ValueError, match="shape must be the same"):
        crossing(src, Layout(second, [Shard(0)], (5,)))
    with pytest.raises(ValueError, match="turned into a Partial of max"):
        crossing(src, Layout(second, [Partial("max")], (4,)))
    with pytest.raises(ValueError, match=r"seen from rank 0.*seen from rank 3"):
        first.check_same_world(Mesh.dry({"b": 2}, ranks=[2, 3], world_rank=3))
    with pytest.raises(ValueError, match="one process alone"):
        first.check_same_world(Mesh.single())
