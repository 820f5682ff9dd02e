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
import math
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache
from typing import Any, Final, NamedTuple

import torch

from espalier.comm import Work, collectives
from espalier.comm.custom_ops import recording
from espalier.comm.functions import MeetingFunction
from espalier.layout import chunk_bounds
from espalier.layout.layout import AxisState, R
from espalier.mesh import Mesh
from espalier.sharding.spec import Operand, Placed, Runner, Spec, bound_to
from espalier.tensor.dry_autocast import autocast_dtype


class Grid(NamedTuple):
    """The two axes of a grid, and the dim whose panels travel.

    Attributes:
        size: of that dim, whole, in units that are never cut.
        unit: elements of the dim in a unit.
        longest: elements of the dim in a panel, at most.
        turned: ``nt`` gives the transposed view of a contiguous matrix.
    """

    mesh: Mesh
    rows: int
    columns: int
    size: int
    unit: int = 1
    longest: int = 2**62
    turned: bool = False

    def own(self, axis: int) -> int:
        """Elements of the dim on this rank, of a matrix that an axis cuts there."""
        return chunk_bounds(self.size, self.mesh.shape[axis], self.mesh.coordinate[axis])[1] * self.unit


class Panel(NamedTuple):
    """A stretch of the dim: its owners, by rows' and by columns' cuts, and where it begins there."""

    length: int
    row: int
    in_row: int
    column: int
    in_column: int


@lru_cache(maxsize=4096)
def panels(size: int, rows: int, columns: int, unit: int = 1, longest: int = 2**62) -> tuple[Panel, ...]:
    """The stretches between the cuts, in order; long ones in parts."""
    size, wide, high = (n * unit for n in (size, -(-size // rows), -(-size // columns)))
    cuts = sorted({*range(0, size, wide or 1), *range(0, size, high or 1), size})
    ends = [e for a, b in itertools.pairwise(cuts) for e in (*range(a + longest, b, longest), b)]
    return tuple(
        Panel(end - start, start // wide, start % wide, start // high, start % high)
        for start, end in itertools.pairwise((0, *ends))
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
    product: torch.Tensor = _SummaProduct.apply(form, a, b, grid)
    return product


class _SummaProduct(MeetingFunction):
    @staticmethod
    def forward(ctx: Any, form: str, a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(a, b)
        ctx.arguments = form, grid
        return _FORMS[form](a, b, grid)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if grad is None:
            return None, None, None, None
        form, grid = ctx.arguments
        a, b = ctx.saved_tensors
        if form == "nt" and all(ctx.needs_input_grad[1:3]) and not torch.is_grad_enabled():
            return None, *_both_of_nt(grad, a.conj(), b.conj(), grid), None
        at = {"a": a.conj(), "b": b.conj(), "g": grad}
        of_a, of_b = (
            multiply(way, at[left], at[right], grid) if needed else None
            for (way, left, right), needed in zip(BACKWARD[form], ctx.needs_input_grad[1:3], strict=True)
        )
        return None, of_a, of_b, None


class _Sum:
    """A sum of products; those of 16 bits are added up in float32."""

    def __init__(self, rows: int, columns: int, like: torch.Tensor) -> None:
        self._dtype = like.dtype
        self._narrow = like.dtype.is_floating_point and like.dtype.itemsize == 2
        dtype = torch.float32 if self._narrow else like.dtype
        self._total = torch.zeros(rows, columns, dtype=dtype, device=like.device)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> None:
        if self._narrow:
            self._total.add_(a @ b)
        else:
            torch.addmm(self._total, a, b, out=self._total)

    def get(self) -> torch.Tensor:
        return self._total.to(self._dtype)


def _addend(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    """A product that is summed in place: no product that a policy of recomputation would keep."""
    return torch.mm(a, b, out=a.new_empty(a.shape[0], b.shape[1]))


def _nn(a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
    total = _Sum(a.shape[0], b.shape[1], a)
    for _, left, right in _coming(grid, a, b):
        total.add(left, right)
    return total.get()


def _nt(a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
    coming = _coming(grid, None, b)
    if grid.turned:
        parts = ((p.column, p.in_column, _addend(right, a.t())) for p, _, right in coming)
        return _summed(parts, grid, grid.columns, 0).t()
    parts = ((p.column, p.in_column, _addend(a, right.t())) for p, _, right in coming)
    return _summed(parts, grid, grid.columns, 1)


def _tn(a: torch.Tensor, b: torch.Tensor, grid: Grid) -> torch.Tensor:
    parts = ((p.row, p.in_row, _addend(left.t(), b)) for p, left, _ in _coming(grid, a, None))
    return _summed(parts, grid, grid.rows, 0)


def _both_of_nt(
    grad: torch.Tensor, a: torch.Tensor, b: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    """The derivatives of ``nt`` by both operands; the gradient's panels travel once."""
    of_a = _Sum(a.shape[0], a.shape[1], a)

    def parts() -> Iterator[tuple[int, int, torch.Tensor]]:
        for p, left, right in _coming(grid, grad, b):
            of_a.add(left, right)
            yield p.row, p.in_row, _addend(left.t(), a)

    of_b = _summed(parts(), grid, grid.rows, 0)
    return of_a.get(), of_b


_FORMS: Final[dict[str, Callable[..., torch.Tensor]]] = {"nn": _nn, "nt": _nt, "tn": _tn}
_NOTHING: Final = torch.empty(0)


def _coming(
    grid: Grid, a: torch.Tensor | None, b: torch.Tensor | None
) -> Iterator[tuple[Panel, torch.Tensor, torch.Tensor]]:
    """The panels of ``a``'s columns and of ``b``'s rows, each begun while the one before it is used."""
    shape = grid.mesh.shape
    todo = panels(grid.size, shape[grid.rows], shape[grid.columns], grid.unit, grid.longest)

    def begun(p: Panel) -> tuple[tuple[torch.Tensor, Work[Any]], ...]:
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
) -> tuple[torch.Tensor, Work[Any]]:
    """A panel of what the owner along an axis has, under way to the others."""
    if x is None:
        return _NOTHING, Work()
    if mesh.coordinate[axis] == owner:
        panel = x.narrow(dim, start, length).contiguous().resolve_conj()
    else:
        panel = x.new_empty([length if d == dim else n for d, n in enumerate(x.shape)])
    return panel, collectives.broadcast_(panel, mesh, axis, owner)


def _summed(parts: Iterable[tuple[int, int, torch.Tensor]], grid: Grid, axis: int, dim: int) -> torch.Tensor:
    """What owners of panels of the result get; of each: owner, where it begins there, this rank's addend."""
    mesh = grid.mesh
    out: torch.Tensor | None = None
    under_way: tuple[torch.Tensor, torch.Tensor | None, Work[Any]] | None = None

    def land(part: torch.Tensor, place: torch.Tensor | None, pending: Work[Any]) -> None:
        pending.wait()
        if place is not None:
            place.copy_(part)

    for owner, start, part in parts:
        if out is None:
            out = part.new_empty([grid.own(axis) if d == dim else n for d, n in enumerate(part.shape)])
        place = out.narrow(dim, start, part.shape[dim]) if owner == mesh.coordinate[axis] else None
        sending = part, place, collectives.reduce_(part, mesh, axis, owner)
        if under_way is not None:
            land(*under_way)
        under_way = sending
    if under_way is not None:
        land(*under_way)
    assert out is not None, "a dim of no elements is cut"
    return out


# ---- products on a grid or a cube of ranks: what x[b, k] · w[k, n] does where both are cut both ways
#
# Rows b of the activation are cut, features k and n of the weight. Along an axis the two then lie as one of
#
# ======  ==========  ==========  ================================================
# kind    x is cut    w is cut    what is done along the axis
# ======  ==========  ==========  ================================================
# ``K``   rows b      k           w is brought together, rows stay cut
# ``N``   k           n           x is brought together, n stays cut
# ``B``   rows b      n           as ``K`` or ``N``, whichever the others leave
# ``C``   k           k           each rank has addends; their sum is cut again
# ======  ==========  ==========  ================================================
#
# and the kinds of the axes together say which algorithm it is:
#
# * ``K, N``: SUMMA (``espalier.tensor.rules.summa``). The product has its rows cut over the first, n over the
#   second, and nothing is ever whole;
# * ``B, C``: the same with a transposed weight (a vocabulary head that is tied to an embedding);
# * ``B, B, C``: 3D (Agarwal et al. 1995). Along the axis that cuts rows first and n last w is brought
#   together. The other two are a grid, on which rows travel panel by panel; the product has them cut along
#   the other of the two, so these change roles from layer to layer.


# bytes of a panel at most: what is in flight stays small beside the blocks, and each product large
_LARGE_PANEL = 2**27


class Product(NamedTuple):
    """A product of a rule's call: which operands, how its function names them, and how the weight lies.

    Attributes:
        names: of the function's parameters, in order.
        x, weight, bias: names of the operands among them.
        n: the dim of the weight that is n; the other is k.
    """

    names: str
    x: str
    weight: str
    bias: str | None
    n: int


LINEAR = Product("input weight bias", "input", "weight", "bias", 0)
MATMUL = Product("input other", "input", "other", None, 1)
REVERSED = Product("other input", "input", "other", None, 1)
ADDMM = Product("input mat1 mat2", "mat1", "mat2", "input", 1)


def lay_on_grid(
    spec: Spec, product: Product, x: Operand, weight: Operand, bias: Operand | None = None
) -> Spec:
    """Let a product's spec decide for itself, if its operands lie on a grid or a cube."""
    kinds = _kinds(x, weight, product.n)
    if kinds is None:
        return spec
    rows, by_kind = kinds
    k, n = x.ndim - 1, product.n
    letter, mesh = spec.ins[x.index][rows], x.layout.mesh

    def say(
        axis: int, of_x: AxisState, of_w: AxisState, of_bias: AxisState, out: AxisState, name: Any
    ) -> None:
        states: list[AxisState] = [R] * len(spec.ins)
        states[x.index], states[weight.index] = of_x, of_w
        if bias is not None:
            states[bias.index] = of_bias
        spec.decided[axis] = tuple(states), (out,), name

    def grid(rows: int, columns: int, size: int, *others: int) -> Grid:
        longest = max(1, _LARGE_PANEL // (x.dtype.itemsize * max(1, *others)))
        return Grid(mesh, rows, columns, size, longest=longest)

    wide = bias.ndim - 1 if bias is not None else R
    tokens = math.prod(x.layout.padded_shape[:-1])
    padded = weight.layout.padded_shape
    match by_kind:
        case {"K": [first], "N": [second], **rest} if not rest:
            say(first, rows, 1 - n, R, rows, letter)
            say(second, k, n, wide, k, "n")
            spec.run = _by_panels(product, "nn", grid(first, second, weight.shape[1 - n], tokens, padded[n]))
        case {"B": [first], "C": [second], **rest} if not rest:
            say(first, rows, n, R, rows, letter)
            say(second, k, 1 - n, wide, k, "k")
            spec.run = _by_panels(product, "nt", grid(first, second, weight.shape[n], tokens, padded[1 - n]))
        case {"B": [_, _] as both, "C": [third], **rest} if not rest:
            second, first = x.layout.cuts[rows][-1], weight.layout.cuts[n][-1]
            if sorted(both) == sorted((first, second)):
                say(first, rows, R, R, rows, letter)
                say(second, rows, n, wide, k, "n")
                say(third, k, 1 - n, R, rows, "k")
                block = x.layout.with_axis(second, R).local_shape[rows]
                spec.run = _by_panels(
                    product,
                    "cube",
                    grid(second, third, block, padded[n] * mesh.shape[first], padded[1 - n]),
                    rows,
                )
    return spec


def _kinds(x: Operand, weight: Operand, n: int) -> tuple[int, dict[str, list[int]]] | None:
    """The dim of the rows, and the axes of each kind.

    None where rows are cut along several dims or none, or what is multiplied along an axis of its own.
    """
    if x.ndim < 2 or weight.ndim != 2:
        return None
    axes_by_kind: dict[str, list[int]] = {}
    rows: set[int] = set()
    for axis, (s, t) in enumerate(zip(x.layout.axes, weight.layout.axes, strict=True)):
        if x.layout.mesh.shape[axis] == 1:
            continue
        if isinstance(t, int) != isinstance(s, int) and (isinstance(t, int) or s == x.ndim - 1):
            return None
        if isinstance(s, int) and isinstance(t, int):
            if s < x.ndim - 1:
                rows.add(s)
                axes_by_kind.setdefault("B" if t == n else "K", []).append(axis)
            else:
                axes_by_kind.setdefault("N" if t == n else "C", []).append(axis)
    return (rows.pop(), axes_by_kind) if len(rows) == 1 else None


def _by_panels(product: Product, form: str, grid: Grid, rows: int = 0) -> Runner:
    """A runner: a product panel by panel, and the bias after it."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        if recording():
            raise RuntimeError(
                'espalier.compile: a product on a grid of ranks (tensor_mode "2d", "2.5d", "3d") goes panel '
                "by panel, with messages on their way meanwhile, and cannot be in one graph. Compile the "
                'modules around it, each on its own, or take tensor_mode = "1d".'
            )
        x, weight, bias = _operands(product, args, kwargs)
        matrix = weight.t() if (product.n == 0) == (form == "nn") else weight
        if form == "cube":
            # in one face of the cube, the transposed product of the transposed weight and the rows
            first = x.movedim(rows, 0)
            lead = first.shape[1:-1]
            face = grid._replace(unit=math.prod(lead), turned=True)
            flat = first.reshape(first.shape[0] * face.unit, x.shape[-1])
            multiplied = multiply("nt", matrix, flat, face).t()
            multiplied = multiplied.reshape(
                multiplied.shape[0] // max(face.unit, 1), *lead, multiplied.shape[1]
            ).movedim(0, rows)
        else:
            lead = x.shape[:-1]
            flat = x.reshape(math.prod(lead), x.shape[-1])
            multiplied = multiply(form, flat, matrix, grid)
            multiplied = multiplied.view(*lead, multiplied.shape[1])
        return multiplied if bias is None else multiplied + bias.to(multiplied.dtype)

    return run


def _operands(
    product: Product, args: Any, kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The local tensors, plain for the backward pass, in the dtype that autocast would give them."""
    bound = bound_to(product.names, args, kwargs)
    x, weight = (torch.Tensor.as_subclass(bound[name], torch.Tensor) for name in (product.x, product.weight))
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, weight = (t if t.dtype is torch.float64 else t.to(dtype) for t in (x, weight))
    return x, weight, None if product.bias is None else bound.get(product.bias)
