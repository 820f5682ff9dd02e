"""Tensor parallelism on grids and cubes of ranks (2d, 2.5d, 3d) against one process, in float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F

import espalier
from espalier.models import build
from espalier.models.gpt2 import GPT2
from tests.asked import on_sweeps
from tests.ranks.test_engine import SIZES, batch, model, same_steps


class Undescribed(GPT2):
    """A model without a table: what feeds what is inferred."""


Trial = tuple[dict[str, Any], str, dict[str, Any]]


def prepared(net: Any, described: bool, frozen: bool) -> Any:
    if not described:
        net.__class__ = Undescribed
    for p in list(net.parameters())[1::3] if frozen else ():
        p.requires_grad_(False)
    return net


def dry(
    plan: dict[str, Any], kind: str, sizes: dict[str, Any], rows: int, coordinate: Any, *how: bool
) -> Any:
    with torch.device("meta"):
        twin = build(kind, sizes)
    twin = prepared(twin.double(), *how)
    data = {k: torch.empty_like(v, device="meta") for k, v in batch(rows).items()}
    optimizer = torch.optim.AdamW(twin.parameters())
    given: dict[str, Any] = {"optimizer": optimizer, "max_grad_norm": 0.5, "coordinate": coordinate}
    return espalier.dry_run(twin, plan, data, **given)


def trains(rank: int, world: int, trials: list[Trial]) -> None:
    """The same steps as one process, and the ledger that a dry run foretells."""
    for plan, kind, changes in trials:
        changes = dict(changes)
        how = changes.pop("described", True), changes.pop("frozen", False)
        net = prepared(model(kind, **changes), *how)
        plain = copy.deepcopy(net)
        options = {"lr": 1e-2, "weight_decay": 0.1}
        ours, theirs = (torch.optim.AdamW(m.parameters(), **options) for m in (net, plain))
        engine = espalier.initialize(net, ours, plan, max_grad_norm=0.5)
        same_steps(engine, plain, theirs, 2)
        with espalier.ledger(engine.mesh) as book:
            engine.train_step(batch(5))
        if rank in (0, world - 1):
            foretold = dry(plan, kind, {**SIZES[kind], **changes}, 5, engine.mesh.coordinate, *how)
            assert book.entries == foretold.ledger.entries, (plan, kind)


GRID = {"tensor": 4, "tensor_mode": "2d"}
BOTH = {"tensor": 8, "tensor_mode": "2.5d", "depth": 2}
CUBE = {"tensor": 8, "tensor_mode": "3d"}


def test_a_grid_of_four(ranks: Any) -> None:
    uneven = {"hidden": 18, "heads": 3, "vocab_size": 37}  # 3 heads for 2 columns, 6 rows for 2 of 5
    ranks(
        4,
        trains,
        [
            (GRID, "gpt", {"tied": True, "layers": 1}),
            (GRID, "gpt2", uneven),
            ({**GRID, "recompute": "selective"}, "gpt2", {**uneven, "layers": 1, "frozen": True}),
            (GRID, "gpt", {"bias": True, "layers": 1}),
        ],
    )


@pytest.mark.parametrize(
    "trials",
    [
        [(BOTH, "gpt2", {}), (BOTH, "gpt", {"hidden": 20, "heads": 2, "layers": 1, "bias": True})],
        [
            (CUBE, "gpt2", {"layers": 1, "described": False}),
            (CUBE, "gpt", {"hidden": 20, "heads": 2, "layers": 1, "bias": True}),
        ],
        [
            ({**GRID, "data": 2, "zero": 3}, "gpt2", {"layers": 1}),
            ({**GRID, "tensor": 8, "recompute": "full"}, "gpt", {"tied": True, "layers": 1}),
        ],
        [({**GRID, "data": 2, "zero": zero}, "gpt", {"layers": 1}) for zero in (0, 1, 2)],
    ],
    ids=["2.5d", "3d", "2d", "stages"],
)
def test_eight_ranks(ranks: Any, trials: list[Trial]) -> None:
    ranks(8, trains, trials)


def products(rank: int, world: int, axes: dict[str, int], sizes: tuple[int, int, int]) -> None:
    """A linear layer on a grid: value, first and second derivatives; its blocks alone are kept."""
    b, k, n = sizes
    mesh = espalier.Mesh.from_env(axes)
    torch.manual_seed(0)
    x, weight, bias, g = (torch.randn(s, dtype=torch.float64) for s in ((b, 3, k), (n, k), (n,), (b, 3, n)))
    rows, features = espalier.Shard(0), espalier.Shard(2)

    def tensors(*placements: Any) -> list[torch.Tensor]:
        given = zip((x, weight, bias), placements, strict=True)
        return [espalier.distribute_tensor(t, mesh, p).requires_grad_() for t, p in given]

    def derivatives(f: Any, ins: list[torch.Tensor], g: torch.Tensor) -> list[torch.Tensor]:
        y = f(*ins)
        first = torch.autograd.grad((y.sin() * g).sum(), ins, create_graph=True)
        second = torch.autograd.grad(sum(t.square().sum() for t in first), ins)
        return [y, *first, *second]

    vector = [espalier.Replicate(), espalier.Shard(0)]
    straight = tensors([rows, features], [espalier.Shard(1), espalier.Shard(0)], vector)
    tied = tensors([rows, features], [espalier.Shard(0), espalier.Shard(1)], vector)
    for ins in (straight, tied):
        for f in (F.linear, lambda x, w, c: x @ w.t() + c):
            expected = derivatives(f, [t.clone().requires_grad_() for t in (x, weight, bias)], g)
            with espalier.ledger(mesh) as book:
                y = f(*ins)
            assert y.placements == (rows, features) and {e.op for e in book.entries} <= {
                "broadcast",
                "reduce",
            }
            found = derivatives(f, ins, espalier.distribute_tensor(g, mesh, [rows, features]))
            for one, other in zip(found, expected, strict=True):
                assert (espalier.full_tensor(one) - other).abs().max().item() < 1e-11


def test_products_by_panels(ranks: Any) -> None:
    ranks(4, products, {"row": 2, "col": 2}, (4, 8, 12))
    ranks(6, products, {"row": 2, "col": 3}, (5, 7, 11))
    ranks(6, products, {"row": 3, "col": 2}, (2, 2, 4))  # the last row of ranks has nothing


def with_copies(rank: int, world: int, stages: list[int]) -> None:
    kinds = ({"tensor_mode": "2.5d", "depth": 2}, {"tensor_mode": "3d"})
    plans = [{"data": 2, "tensor": 8, "zero": zero, **kind} for kind in kinds for zero in stages]
    trains(rank, world, [(plan, "gpt", {"layers": 1}) for plan in plans])


@on_sweeps("16 ranks")
@pytest.mark.world(16)
@pytest.mark.filterwarnings("ignore:A global batch of")  # some ranks have no rows
def test_cubes_and_stacks_of_grids_with_a_data_axis(ranks: Any) -> None:
    ranks(16, with_copies, [0, 1, 2, 3], timeout=500)
