"""Every kind of layout: reductions of all kinds and dtypes, stated orders of cuts, dims of size 0 and 1."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import espalier
from espalier import DTensor, Layout, Mesh, Partial, Replicate, Shard
from tests.ranks.brute import A, Case, X, bools, case, check_case, ints
from tests.ranks.test_rules import report

# --- reductions --------------------------------------------------------------------------------------------

REDUCED: dict[str, Callable[..., torch.Tensor]] = {
    "sum": lambda x, d: x.sum(d, dtype=x.dtype),
    "avg": lambda x, d: x.mean(d),
    "max": lambda x, d: x.amax(d),
    "min": lambda x, d: x.amin(d),
    "product": lambda x, d: x.prod(d, dtype=x.dtype),
}


def mixed(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": 2, "b": 2})
    parts = torch.randn(2, 2, 5, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    for one, two in itertools.product(REDUCED, repeat=2):
        local = parts[mesh.coordinate]
        x = DTensor.from_local(local, mesh, [Partial(one), Partial(two)])
        # the last axis first
        right = REDUCED[one](REDUCED[two](parts, 1), 0)
        torch.testing.assert_close(x.full_tensor(), right)
        for goal in ([Shard(0), Replicate()], [Replicate(), Shard(0)], [Shard(0), Shard(0)]):
            y = x.redistribute(mesh, goal)
            torch.testing.assert_close(y.full_tensor(), right)
        torch.testing.assert_close((x + 1).full_tensor(), right + 1)
        torch.testing.assert_close((x * 2).sum().full_tensor(), (right * 2).sum())
        if {one, two} <= {"sum", "avg"} or one == two:
            continue
        last = x.redistribute(mesh, [Partial(one), Replicate()])
        torch.testing.assert_close(last.to_local(), REDUCED[two](parts, 1)[mesh.coordinate[0]])
        if two not in ("sum", "avg"):
            with pytest.raises(ValueError, match=r"turned into a|last axis alone"):
                x.redistribute(mesh, [Replicate(), Partial(two)])


def test_of_different_reductions_the_last_axis_is_done_first(ranks: Any) -> None:
    ranks(4, mixed)


DTYPES = [
    torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16,
    torch.int8, torch.uint8, torch.bool, torch.complex64, torch.complex128,
]  # fmt: skip


def reductions(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world})
    twin = Mesh.dry({"a": world}, (rank,))
    values = torch.tensor([[1, 0, 2, 1, 100], [1, 0, 1, 0, 90], [0, 0, 3, 2, 80]])
    for dtype, (op, reduce) in itertools.product(DTYPES, REDUCED.items()):
        parts = values.to(dtype) * (1 - 2j) if dtype.is_complex else values.to(dtype)
        floats = dtype.is_floating_point or dtype.is_complex
        x = DTensor.from_local(parts[rank], mesh, [Partial(op)])
        refused = {"avg": not floats, "max": dtype.is_complex, "min": dtype.is_complex}.get(op, False)
        if refused:
            with pytest.raises(ValueError, match=r"average needs a floating|no order"):
                x.full_tensor()
            continue
        right = reduce(parts, 0)
        for goal in (Replicate(), Shard(0)):
            with espalier.ledger(mesh) as book:
                y = x.redistribute(mesh, [goal])
            with espalier.ledger(twin) as guess:
                dry = espalier.empty(5, device_mesh=twin, placements=[Partial(op)], dtype=dtype)
                dry.redistribute(twin, [goal])
            assert y.dtype is dtype and guess == book, (dtype, op)
            torch.testing.assert_close(y.full_tensor(), right)


def test_every_dtype_under_every_reduction(ranks: Any) -> None:
    ranks(3, reductions)


def specials(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world})
    some = [float("nan"), float("inf"), -float("inf"), 0.0, -0.0, 1.5, -2.25]
    # in a product of three these would overflow, or not, as it is associated
    extreme = [*some, 1e-40, 65504.0]
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16):
        for op in ("max", "min", "product", "sum"):
            numbers = extreme if op in ("max", "min") else some
            parts = torch.tensor(list(itertools.product(numbers, repeat=world))).t().to(dtype)
            x = DTensor.from_local(parts[rank].contiguous(), mesh, [Partial(op)])
            found = x.full_tensor()
            right = REDUCED[op](parts, 0)
            torch.testing.assert_close(found, right, equal_nan=True, rtol=1e-2, atol=0)
            same = DTensor.from_local(found, mesh, [Replicate()], run_check=not right.isnan().any())
            assert torch.equal(same.isnan().full_tensor(), right.isnan())
            if op == "product":
                # the sign of a zero too
                zero = right == 0
                assert torch.equal(found.signbit()[zero], right.signbit()[zero])


def test_nan_infinities_and_negative_zeros(ranks: Any) -> None:
    ranks(3, specials)


# --- the order of cuts -------------------------------------------------------------------------------------


def orders(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": 2, "b": 2})
    value = torch.arange(14.0, dtype=torch.float64).view(7, 2)
    both = [Shard(0), Shard(0)]
    i, j = mesh.coordinate
    for order, first, second in (
        (None, (2, i), (2, j)),
        (["b", "a"], (2, j), (2, i)),
        ([1, 0], (2, j), (2, i)),
    ):
        right = value
        for n, at in (first, second):
            pieces = right.chunk(n)
            right = pieces[at] if at < len(pieces) else right[:0]
        laid = Layout(mesh, both, (7, 2), order=order)
        made = [
            espalier.distribute_tensor(value, mesh, both, order=order),
            espalier.distribute_tensor(value, mesh, [Shard(1), Replicate()]).redistribute(
                mesh, both, order=order
            ),
            DTensor.from_local(right, mesh, both, shape=(7, 2), order=order),
            espalier.arange(14.0, device_mesh=mesh, dtype=torch.float64)
            .view(7, 2)
            .redistribute(placements=both, order=order),
        ]
        for x in made:
            assert espalier.layout_of(x) is laid and torch.equal(x.to_local(), right)
            assert torch.equal(x.full_tensor(), value)
            # an operation keeps it
            y = (x * 2 + x).exp()
            assert espalier.layout_of(y) is laid and torch.equal(y.full_tensor(), (value * 3).exp())
        x = made[0].requires_grad_()
        x.to_local(grad_placements=both).square().sum().backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * value)  # type: ignore[union-attr]
        torch.manual_seed(0)
        drawn = espalier.rand(7, 2, device_mesh=mesh, placements=both, order=order)
        torch.manual_seed(0)
        assert torch.equal(drawn.full_tensor(), espalier.rand(7, 2, device_mesh=mesh).full_tensor())


def test_a_stated_order_of_cuts(ranks: Any) -> None:
    ranks(4, orders)


# --- dims of size 0 and 1 ----------------------------------------------------------------------------------

ZERO, ONE = X((0, 3)), X((1, 3))
EDGES = [
    case("add", A(ZERO, X((3,))), A(ONE, X((4, 1))), A(X(()), X((1,))), A(X((1, 1)), X(()))),
    case("mul", A(ZERO, X((0, 1))), A(ONE, ONE), A(X((1,)), X((5,)))),
    case("matmul", A(ZERO, X((3, 2))), A(X((2, 0)), X((0, 3))), A(ONE, X((3, 1))), A(X((4, 1)), X((1, 2)))),
    case("sum", A(ZERO), A(ZERO, 0), A(ZERO, 1), A(ONE, 0), A(ONE, 0, True), A(X((1,)))),
    case("mean", A(ONE), A(ONE, 0), A(ZERO, 1)),
    case("softmax", A(ONE, 0), A(ONE, 1), A(ZERO, 1), A(X((1,)), 0)),
    case("cat", A([ZERO, ONE, X((2, 3))]), A([X((2, 0)), X((2, 1))], 1), A([ONE, ONE])),
    case("view", A(X((0, 6)), (0, 2, 3)), A(X((1, 6)), (6,)), A(X((2, 1, 3)), (2, 3)), A(X((1, 1)), (1,))),
    case("reshape", A(X((2, 0, 3)), (0, 6)), A(X((1, 4)), (2, 2))),
    case("transpose", A(ZERO, 0, 1), A(ONE, 0, 1)),
    case("squeeze", A(ONE), A(ONE, 0), A(X((1, 1)))),
    case("unsqueeze", A(ZERO, 0), A(X(()), 0)),
    case("expand", A(ONE, (4, 3)), A(X((1,)), (2, 5))),
    case("exp", A(ZERO), A(ONE), A(X(()))),
    case("amax", A(ONE, 0), A(ONE), A(ZERO, 1)),
    case("layer_norm", A(ONE, (3,)), A(ZERO, (3,)), A(X((3, 1)), (1,))),
    case("linear", A(ONE, X((2, 3)), X((2,))), A(ZERO, X((2, 3)), X((2,))), A(X((4, 3)), X((1, 3)), X((1,)))),
    case("embedding", A(X((4, 3)), ints((0,), 0, 4)), A(X((1, 3)), ints((1,), 0, 1))),
    case("where", A(bools((1, 3)), ZERO, X((1,))), A(bools((3,)), ONE, X(()))),
    case("cross_entropy", A(X((1, 3)), ints((1,), 0, 3)), A(X((1, 1)), ints((1,), 0, 1))),
    case("cumsum", A(ZERO, 0), A(ONE, 0)),
]


def edges(rank: int, world: int, axes: dict[str, int], few: int | None) -> list[str]:
    mesh = Mesh.from_env(axes)
    return [line for of in EDGES for line in check_case(first_spelling(of), mesh, few)]


def first_spelling(of: Case) -> Case:
    of.functions[1:] = []
    return of


@pytest.mark.parametrize(("axes", "few"), [({"a": 3}, None), ({"a": 2, "b": 2}, 8)], ids=["3", "2x2"])
def test_dims_of_size_0_and_1(ranks: Any, axes: dict[str, int], few: int | None) -> None:
    report(ranks(3 if few is None else 4, edges, axes, few, timeout=300))


def casts_and_steps(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"a": world})
    for shape in ((0, 2), (1, 2), (2, 1), (1,), ()):
        places: list[Any] = [Replicate(), *map(Shard, range(len(shape)))]
        for place in places:
            torch.manual_seed(1)
            value = torch.randn(shape, dtype=torch.float64)
            x = espalier.distribute_tensor(value, mesh, [place])
            for dtype in (torch.float32, torch.int64, torch.bool, torch.bfloat16):
                y = x.to(dtype)
                assert y.dtype is dtype and torch.equal(y.full_tensor(), value.to(dtype))
            assert torch.equal(x.float().double().full_tensor(), value.float().double())
            for make in (torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad):
                for foreach in (False, True):
                    mine = espalier.distribute_tensor(torch.nn.Parameter(value.clone()), mesh, [place])
                    theirs = torch.nn.Parameter(value.clone())
                    for p in (mine, theirs):
                        optimizer = make([p], lr=0.1, foreach=foreach)
                        for _ in range(2):
                            optimizer.zero_grad()
                            (p.sin().sum() + p.square().sum()).backward()
                            torch.nn.utils.clip_grad_norm_([p], 0.5)
                            optimizer.step()
                    torch.testing.assert_close(mine.full_tensor().detach(), theirs.detach())
            grown = F.pad(x, (0, 1)) if shape else x
            assert grown.shape == (F.pad(value, (0, 1)) if shape else value).shape


def test_casts_and_optimizers_on_small_dims(ranks: Any) -> None:
    ranks(3, casts_and_steps)
