"""What a linear layer and a block send in each tensor mode: the formulas, in elements summed over all ranks.

Dry meshes; X [b, s, h], W [h, h'], Y [b, s, h']. 2d and 2.5d: 3(q-1)(S_X + d S_W) + 2(d-1) S_W. 3d:
2(q-1)(S_X + S_W + S_Y) with what was gathered kept for backward; only shards are kept here, so that X
and W are gathered once more: (q-1)(S_X + S_W) on top.
"""

from __future__ import annotations

import itertools
from collections import Counter
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier import Layout, Mesh, Plan, Replicate, Shard
from espalier.models import build
from espalier.parallel import arrange
from espalier.tensor import stamp

B, S, H, WIDE = 36, 2, 72, 144
SX, SW, SY = B * S * H, H * WIDE, B * S * WIDE


def sent(mesh: Mesh, book: espalier.Ledger) -> Counter[str]:
    found: Counter[str] = Counter()
    for entry in book.entries:
        found[entry.op] += entry.bytes // 4
    return found


def on_all(plan: Plan, run: Any) -> Counter[str]:
    """What ``run(mesh)`` sends, on all ranks together: elements by operation."""
    total: Counter[str] = Counter()
    for coordinate in itertools.product(*map(range, plan.axes.values())):
        mesh = Mesh.dry(plan.axes, coordinate)
        with espalier.ledger(mesh) as book:
            run(mesh)
        total += sent(mesh, book)
    return total


def laid(mesh: Mesh, shape: tuple[int, ...], cuts: list[tuple[str, ...]]) -> torch.Tensor:
    places: list[Any] = [Replicate()] * mesh.ndim
    for dim, axes in enumerate(cuts):
        for axis in axes:
            places[mesh.axis(axis)] = Shard(dim)
    layout = Layout(mesh, places, shape, order=[a for axes in cuts for a in axes])
    return stamp(torch.empty(layout.local_shape, device="meta"), layout).requires_grad_()


def layer(plan: Plan, kind: str = "column") -> Any:
    """Forward and backward of a linear layer, in its mode's layouts."""

    def run(mesh: Mesh) -> None:
        net = nn.ModuleDict({"a": nn.Linear(H, WIDE, bias=False, device="meta")})
        weight = arrange(net, plan, mesh, table={"a": kind})["a.weight"]  # type: ignore[index]
        w = stamp(torch.empty(weight.local_shape, device="meta"), weight).requires_grad_()
        hidden = {"1d": ("tensor",) if kind == "row" else (), "3d": ("k",)}.get(plan.tensor_mode, ("col",))
        y = F.linear(laid(mesh, (B, S, H), [plan.batch_axes, (), hidden]), w)
        if plan.tensor_mode == "1d" and kind == "row":
            y = y.redistribute(placements=[Replicate()] * mesh.ndim)
        y.backward(torch.empty_like(y))

    return run


def total(plan: Plan, kind: str = "column") -> int:
    return on_all(plan, layer(plan, kind)).total()


def test_a_layer() -> None:
    for ranks in (2, 4):
        assert total(Plan(tensor=ranks), "column") == 2 * (ranks - 1) * SX
        assert total(Plan(tensor=ranks), "row") == 2 * (ranks - 1) * SY
    for q in (2, 3, 4):
        plan = Plan(tensor=q * q, tensor_mode="2d")
        found = on_all(plan, layer(plan))
        assert found.total() == 3 * (q - 1) * (SX + SW) and set(found) == {"broadcast", "reduce"}
    for d, q in ((2, 2), (4, 2), (2, 3)):
        plan = Plan(tensor=d * q * q, tensor_mode="2.5d", depth=d)
        assert total(plan) == 3 * (q - 1) * (SX + d * SW) + 2 * (d - 1) * SW
    for q in (2, 3):
        plan = Plan(tensor=q**3, tensor_mode="3d")
        again = (q - 1) * (SX + SW)
        assert total(plan) == 2 * (q - 1) * (SX + SW + SY) + again


def test_a_grid_that_is_not_square() -> None:
    # each matrix goes to the other ranks along one axis
    rows, columns = 3, 4
    plan = Plan(tensor=rows * columns, tensor_mode="2d")
    assert total(plan) == 3 * ((columns - 1) * SX + (rows - 1) * SW)


def block(plan: Plan) -> Any:
    """Forward and backward of a transformer block of 2 rows a head, in its mode's layouts."""

    def run(mesh: Mesh) -> None:
        with torch.device("meta"):
            net = build("gpt2", {**SIZES, "bias": False})
        for name, layout in arrange(net, plan, mesh).items():  # type: ignore[union-attr]
            p = net.get_parameter(name)
            p.data = torch.empty(layout.local_shape, device="meta")
            stamp(p, layout)
        hidden = ("k",) if plan.tensor_mode == "3d" else ("col",)
        y = net.blocks[0](laid(mesh, (B, S, H), [plan.batch_axes, (), hidden]))  # type: ignore[operator, index]
        y.backward(torch.empty_like(y))

    return run


HEADS = 6
SIZES = {"vocab_size": 72, "max_positions": S, "layers": 1, "hidden": H, "heads": HEADS}
FFN = 4 * H


def norms(ranks: int, others: int) -> int:
    """Two norms over a cut hidden dim: four moments a token over its ranks, a weight over the others."""
    return 2 * (2 * (ranks - 1) * 4 * B * S + 2 * (others - 1) * H)


def test_a_block() -> None:
    """The products as the formulas say, and beside them the norms alone."""
    for d, q in ((1, 2), (1, 3), (2, 2)):
        mode: dict[str, Any] = {"tensor_mode": "2d"} if d == 1 else {"tensor_mode": "2.5d", "depth": d}
        plan = Plan(tensor=d * q * q, **mode)
        matrices = [(H, H)] * 4 + [(H, FFN), (FFN, H)]
        panels = sum(3 * (q - 1) * (B * S * n + d * n * m) for n, m in matrices)
        over_depth = sum(2 * (d - 1) * n * m for n, m in matrices)
        found = on_all(plan, block(plan))
        assert found["broadcast"] + found["reduce"] == panels
        assert found.total() == panels + over_depth + norms(q, d * q)
    q = 2
    plan = Plan(tensor=q**3, tensor_mode="3d")
    products = (q - 1) * sum(3 * (B * S * n + n * m) + 2 * B * S * m for n, m in matrices)
    assert on_all(plan, block(plan)).total() == products + norms(q, q * q)


def test_of_a_tensor_that_lends_shape_or_dtype_nothing_is_sent() -> None:
    mesh = Mesh.dry({"one": 1, "data": 2, "tensor": 2})
    x, y = (laid(mesh, (8, 6, 4), [("data",), (), ("tensor",)]).detach() for _ in range(2))
    flat = laid(mesh, (48, 4), [("data",), ("tensor",)]).detach()
    column = laid(mesh, (8, 1, 4), [("data",), (), ("tensor",)]).detach()
    with espalier.ledger(mesh) as book:
        found = [flat.view_as(y), flat.reshape_as(y), x.type_as(y), x.to(y), column.expand_as(y)]
    assert not book.entries
    assert {espalier.layout_of(z) for z in found} == {espalier.layout_of(x)}
