"""Products on a grid or a cube of ranks: what x[b, k] · w[k, n] does where both are cut both ways.

Rows b of the activation are cut, features k and n of the weight. Along an axis the two then lie as one of

======  ==========  ==========  ================================================
kind    x is cut    w is cut    what is done along the axis
======  ==========  ==========  ================================================
``K``   rows b      k           w is brought together, rows stay cut
``N``   k           n           x is brought together, n stays cut
``B``   rows b      n           as ``K`` or ``N``, whichever the others leave
``C``   k           k           each rank has addends; their sum is cut again
======  ==========  ==========  ================================================

and the kinds of the axes together say which algorithm it is:

* ``K, N``: SUMMA (``espalier.tensor.rules.summa``). The product has its rows cut over the first, n over the
  second, and nothing is ever whole;
* ``B, C``: the same with a transposed weight (a vocabulary head that is tied to an embedding);
* ``B, B, C``: 3D (Agarwal et al. 1995). Along the axis that cuts rows first and n last w is brought
  together. The other two are a grid, on which rows travel panel by panel; the product has them cut along
  the other of the two, so these change roles from layer to layer.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from espalier.comm.traced import recording
from espalier.layout.layout import AxisState, R
from espalier.tensor.dry_autocast import autocast_dtype
from espalier.tensor.rules.spec import Operand, Placed, Runner, Spec, bound_to
from espalier.tensor.rules.summa import Grid, multiply

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
    found: dict[str, list[int]] = {}
    rows: set[int] = set()
    for axis, (s, t) in enumerate(zip(x.layout.axes, weight.layout.axes, strict=True)):
        if x.layout.mesh.shape[axis] == 1:
            continue
        if isinstance(t, int) != isinstance(s, int) and (isinstance(t, int) or s == x.ndim - 1):
            return None
        if isinstance(s, int) and isinstance(t, int):
            if s < x.ndim - 1:
                rows.add(s)
                found.setdefault("B" if t == n else "K", []).append(axis)
            else:
                found.setdefault("N" if t == n else "C", []).append(axis)
    return (rows.pop(), found) if len(rows) == 1 else None


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
            found = multiply("nt", matrix, flat, face).t()
            found = found.reshape(found.shape[0] // max(face.unit, 1), *lead, found.shape[1]).movedim(0, rows)
        else:
            lead = x.shape[:-1]
            flat = x.reshape(math.prod(lead), x.shape[-1])
            found = multiply(form, flat, matrix, grid)
            found = found.view(*lead, found.shape[1])
        return found if bias is None else found + bias.to(found.dtype)

    return run


def _operands(
    product: Product, args: Any, kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """The local tensors, plain for the backward pass, in the dtype that autocast would give them."""
    given = bound_to(product.names, args, kwargs)
    x, weight = (given[name].as_subclass(torch.Tensor) for name in (product.x, product.weight))
    dtype = autocast_dtype(x.device.type)
    if dtype is not None:
        x, weight = (t if t.dtype is torch.float64 else t.to(dtype) for t in (x, weight))
    return x, weight, None if product.bias is None else given.get(product.bias)
