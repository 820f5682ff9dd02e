"""Pieces of a sequence that go round the ring of the ranks that hold it, while others are multiplied."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from espalier.comm.collectives import passing
from espalier.comm.custom_ops import defined, mesh_of
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.torch_private import keep_order

# of [batch, sequence, features]
SEQUENCE = 1


class Ring(NamedTuple):
    """The ranks among which a sequence is cut, and its length."""

    mesh: Mesh
    axis: int
    size: int

    def piece(self, turn: int) -> tuple[int, int]:
        """Start and length of the piece of the rank so many places on."""
        n = self.mesh.shape[self.axis]
        return chunk_bounds(self.size, n, (self.mesh.coordinate[self.axis] + turn) % n)

    @property
    def turns(self) -> range:
        """One for each rank."""
        return range(self.mesh.shape[self.axis])

    def coming(self, x: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
        """The pieces of all ranks, and where each begins; the next is on its way while one is used."""
        x = x.contiguous()
        for turn in self.turns:
            start, _ = self.piece(-turn)
            length = self.piece(-turn - 1)[1]
            shape = (x.shape[0], length, x.shape[2])
            following = None
            if turn < self.turns[-1]:
                following = passing(x.view(-1), self.mesh, self.axis, torch.Size(shape).numel())
            yield start, x
            if following is not None:
                x = following.wait().view(shape)

    def summed(self, addend: Callable[[int, int], torch.Tensor]) -> torch.Tensor:
        """This rank's piece of the sum of what the ranks have; of each piece, in turn, the addend."""
        coming = None
        for turn in self.turns:
            total = addend(*self.piece(turn + 1))
            if coming is not None:
                total.add_(coming.wait().view_as(total))
            if turn < self.turns[-1]:
                gets = torch.Size((total.shape[0], self.piece(turn + 2)[1], total.shape[2])).numel()
                coming = passing(total.view(-1), self.mesh, self.axis, gets, -1)
        return total


def gathered_products(
    ring: Ring,
    x: torch.Tensor,
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor | None] | None = None,
) -> list[torch.Tensor]:
    """A sequence, gathered, and what it gives by each of some matrices ``[features, out]``, in their dtypes.

    Args:
        x: this rank's piece, ``[batch, piece, features]``.
        biases: one for each matrix; None: none has any.
    """
    whole = x.new_empty(len(x), ring.size, x.shape[2])
    outs = [x.new_empty(len(x), ring.size, w.shape[1], dtype=w.dtype) for w in weights]
    layers = list(zip(weights, biases or [None] * len(weights), outs, strict=True))
    for start, piece in ring.coming(x):
        length = piece.shape[SEQUENCE]
        for weight, bias, out in layers:
            multiply(piece.to(weight.dtype), weight, bias, out.narrow(SEQUENCE, start, length))
        whole.narrow(SEQUENCE, start, length).copy_(piece)
    return [whole, *outs]


def summed_products(
    ring: Ring,
    xs: Sequence[torch.Tensor],
    weights: Sequence[torch.Tensor],
    biases: Sequence[torch.Tensor] = (),
    dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """This rank's piece of the sum, over ranks and pairs, of the products of sequences by matrices.

    Args:
        xs: whole sequences, ``[batch, sequence, features]``.
        biases: that this rank adds to each row of its products.
        dtype: that of the sum, to which each product is cast; None: that of the products.
    """

    def addend(start: int, length: int) -> torch.Tensor:
        total: torch.Tensor | None = None
        for x, weight in zip(xs, weights, strict=True):
            rows = x.narrow(SEQUENCE, start, length).to(weight.dtype)
            if dtype is None:
                total = multiply(rows, weight, total, total)
            else:
                part = multiply(rows, weight).to(dtype)
                total = part if total is None else total.add_(part)
        assert total is not None
        for bias in biases:
            total += bias
        return total

    return ring.summed(addend)


def multiply(
    x: torch.Tensor,
    weight: torch.Tensor,
    added: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """``x · weight + added``, ``[batch, rows, out]``; into ``out``, which may be a stretch of more."""
    matrix = weight.expand(len(x), -1, -1)
    if added is None:
        return torch.bmm(x, matrix, out=out)
    return torch.baddbmm(added, x, matrix, out=out)


# ---- as operators, which ``espalier.tensor.ring_rewriting`` writes into compiled graphs

Tensors = list[torch.Tensor]
Biases = list[torch.Tensor | None]
GATHERED, SUMMED = "gathered_products", "summed_products"


@lru_cache
def operators() -> tuple[Any, Any]:
    """The two, as effects: ``mesh``, ``axis`` and what the collective in whose place they stand is told."""
    spot = "str mesh, int axis, int size, Tensor[] weights"
    gathered = f"{GATHERED}(Tensor x, {spot}, Tensor?[] biases) -> Tensor[]"
    summed = f"{SUMMED}(Tensor[] xs, {spot}, Tensor[] biases, ScalarType? dtype) -> Tensor"
    pair = defined(gathered, _gathered, _gathered_shapes), defined(summed, _summed, _summed_shape)
    for operator in pair:
        keep_order(operator)
    return pair


def _gathered(x: torch.Tensor, mesh: str, axis: int, size: int, weights: Tensors, biases: Biases) -> Tensors:
    return gathered_products(Ring(mesh_of(mesh), axis, size), x, weights, biases)


def _summed(
    xs: Tensors,
    mesh: str,
    axis: int,
    size: int,
    weights: Tensors,
    biases: Tensors,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    return summed_products(Ring(mesh_of(mesh), axis, size), xs, weights, biases, dtype)


def _gathered_shapes(
    x: torch.Tensor, mesh: str, axis: int, size: int, weights: Tensors, biases: Biases
) -> Tensors:
    outs = [x.new_empty(len(x), size, w.shape[1], dtype=w.dtype) for w in weights]
    return [x.new_empty(len(x), size, x.shape[2]), *outs]


def _summed_shape(
    xs: Tensors,
    mesh: str,
    axis: int,
    size: int,
    weights: Tensors,
    biases: Tensors,
    dtype: torch.dtype | None,
) -> torch.Tensor:
    _, length = Ring(mesh_of(mesh), axis, size).piece(0)
    return xs[0].new_empty(len(xs[0]), length, weights[0].shape[1], dtype=dtype or weights[0].dtype)
