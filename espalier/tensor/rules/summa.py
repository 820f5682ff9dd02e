"""Products of matrices that a grid of ranks holds in blocks, panel by panel (SUMMA).

Every matrix [p, q] has p cut over the grid's rows and q over its columns. With panels as fine as the cuts:

* ``nn``, A[m, k] · B[k, n]: a panel of A's columns goes along each row of ranks, a panel of B's rows along
  each column, and every rank adds up their products;
* ``nt``, A[m, n'] · B[n, n']ᵀ: a panel of B's rows goes along each column of ranks; the products with A are
  summed along each row of ranks, onto the owner of that panel of the result;
* ``tn``, A[m', m]ᵀ · B[m', n]: the same the other way round.

While a panel is multiplied the next is on its way. The three are closed under differentiation, so each
keeps its operands' own blocks and nothing else, and derivatives of every order run panel by panel. The dim
whose panels travel is the same in a product and in its derivatives. Grids need not be square: where rows and
columns cut that dim differently the panels lie between the cuts of both.

van de Geijn, Watts 1997; its use for the three products of a linear layer: Xu, You 2021 (2104.05343).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from espalier.comm import Pending
from espalier.comm import collectives as door
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh


class Grid(NamedTuple):
    """The two axes of a grid, and the global size of the dim whose panels travel."""

    mesh: Mesh
    rows: int
    columns: int
    size: int


class Panel(NamedTuple):
    """A stretch of the dim: its owners, by rows' and by columns' cuts, and where it begins there."""

    length: int
    row: int
    in_row: int
    column: int
    in_column: int


@lru_cache(maxsize=4096)
def panels(size: int, rows: int, columns: int) -> tuple[Panel, ...]:
    """The stretches between the cuts, in order."""
    wide, high = -(-size // rows), -(-size // columns)
    cuts = sorted({*range(0, size, wide or 1), *range(0, size, high or 1), size})
    return tuple(
        Panel(end - start, start // wide, start % wide, start // high, start % high)
        for start, end in itertools.pairwise(cuts)
    )


# the derivatives by A and by B: the form, and which of a, b and the gradient g it multiplies
BACKWARD: Final = {
    "nn": (("nt", "g", "b"), ("tn", "a", "g")),
    "nt": (("nn", "g", "b"), ("tn", "g", "a")),
    "tn": (("nt", "b", "g"), ("nn", "a", "g")),
}


def multiply(form: str, a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
    """The product of two matrices, of which this rank has a block each; differentiable to any order.

    Args:
        form: ``"nn"``, ``"nt"`` or ``"tn"``.
    """
    product: torch.Tensor = _Product.apply(form, a, b, grid)
    return product


class _Product(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(ctx: Any, form: str, a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        ctx.given = form, grid
        return _FORMS[form](a, b, grid)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        form, grid = ctx.given
        a, b = ctx.saved_tensors
        at = {"a": a.conj(), "b": b.conj(), "g": grad}
        of_a, of_b = (
            multiply(way, at[left], at[right], grid) if needed else None
            for (way, left, right), needed in zip(BACKWARD[form], ctx.needs_input_grad[1:3], strict=True)
        )
        return None, of_a, of_b, None


def _nn(a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
    # 16-bit products are added up in float32
    narrow = a.dtype.is_floating_point and a.dtype.itemsize == 2
    total = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float32 if narrow else a.dtype, device=a.device)
    for _, left, right in _coming(grid, a, b):
        if narrow:
            total.add_(left @ right)
        else:
            torch.addmm(total, left, right, out=total)
    return total.to(a.dtype)


def _nt(a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
    parts = ((p.column, p.in_column, a @ right.t()) for p, _, right in _coming(grid, None, b))
    return _summed(parts, grid, grid.columns, [a.shape[0], -1])


def _tn(a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
    parts = ((p.row, p.in_row, left.t() @ b) for p, left, _ in _coming(grid, a, None))
    return _summed(parts, grid, grid.rows, [-1, b.shape[1]])


_FORMS: Final[dict[str, Callable[..., torch.Tensor]]] = {"nn": _nn, "nt": _nt, "tn": _tn}
_NOTHING: Final = torch.empty(0)


def _coming(
    grid: Grid, a: torch.Tensor | None, b: torch.Tensor | None
) -> Iterator[tuple[Panel, torch.Tensor, torch.Tensor]]:
    """The panels of ``a``'s columns and of ``b``'s rows, each begun while the one before it is used."""
    todo = panels(grid.size, grid.mesh.shape[grid.rows], grid.mesh.shape[grid.columns])

    def begun(p: Panel) -> tuple[tuple[torch.Tensor, Pending], ...]:
        return (
            _panel(a, 1, p.in_column, p.length, grid.mesh, grid.columns, p.column),
            _panel(b, 0, p.in_row, p.length, grid.mesh, grid.rows, p.row),
        )

    under_way = begun(todo[0]) if todo else ()
    for panel, following in zip(todo, (*todo[1:], None), strict=False):
        now, under_way = under_way, () if following is None else begun(following)
        for _, pending in now:
            pending.wait()
        yield panel, now[0][0], now[1][0]


def _panel(
    x: torch.Tensor | None, dim: int, start: int, length: int, mesh: Mesh, axis: int, owner: int
) -> tuple[torch.Tensor, Pending]:
    """A panel of what the owner along an axis has, under way to the others."""
    if x is None:
        return _NOTHING, Pending()
    if mesh.coordinate[axis] == owner:
        panel = x.narrow(dim, start, length).contiguous().resolve_conj()
    else:
        panel = x.new_empty([length if d == dim else n for d, n in enumerate(x.shape)])
    return panel, door.broadcast_(panel, mesh, axis, owner)


def _summed(
    parts: Iterable[tuple[int, int, torch.Tensor]], grid: Grid, axis: int, shape: list[int]
) -> torch.Tensor:
    """What owners of panels of the result get; of each: owner, where it begins there, this rank's addend."""
    mesh, dim = grid.mesh, shape.index(-1)
    shape[dim] = chunk_bounds(grid.size, mesh.shape[axis], mesh.coordinate[axis])[1]
    out: torch.Tensor | None = None
    under_way: tuple[torch.Tensor, torch.Tensor | None, Pending] | None = None

    def land(part: torch.Tensor, place: torch.Tensor | None, pending: Pending) -> None:
        pending.wait()
        if place is not None:
            place.copy_(part)

    for owner, start, part in parts:
        out = part.new_empty(shape) if out is None else out
        place = out.narrow(dim, start, part.shape[dim]) if owner == mesh.coordinate[axis] else None
        sending = part, place, door.reduce_(part, mesh, axis, owner)
        if under_way is not None:
            land(*under_way)
        under_way = sending
    if under_way is not None:
        land(*under_way)
    assert out is not None, "a dim of no elements is cut"
    return out
