"""Several collectives of a compiled graph as one, begun and ended apart.

``torch.ops.espalier.begin_bucket`` starts one message for several tensors, which travel one behind the other;
``end_bucket`` waits and gives what each collective by itself would have given. What the graph does in between
goes on meanwhile. Both are effects, in the order in which they stand (``espalier.tensor.bucketing`` writes
them into graphs).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import torch

from espalier.comm.backend import Work, as_it_lies, pad_to
from espalier.comm.collectives import all_reduce_, gathering, start_gather, start_sum
from espalier.comm.custom_ops import library, mesh_of, parsed
from espalier.device import is_accelerator
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.torch_private import keep_order


class Part(NamedTuple):
    """One collective of a bucket.

    Attributes:
        constants: what the collective is told beside tensor, mesh and axis.
        shape: of what it gives on this rank.
    """

    constants: tuple[Any, ...]
    shape: tuple[int, ...]


def begin(
    op: str, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, parts: Sequence[Part]
) -> Work[list[torch.Tensor]]:
    """Start one collective for tensors of one dtype, in place of one for each; gives the results.

    Args:
        op: ``all_reduce`` (sums), ``all_gather`` or ``reduce_scatter``, as in ``espalier.comm.collectives``.
    """
    return {"all_reduce": _summing, "all_gather": _gathering, "reduce_scatter": _scattering}[op](
        xs, mesh, axis, parts
    )


def _summing(xs: Any, mesh: Mesh, axis: int, parts: Sequence[Part]) -> Work[list[torch.Tensor]]:
    flat = _behind_each_other(xs) if len(xs) > 1 else xs[0].clone(memory_format=torch.contiguous_format)
    # on the CPU what is not beside the program adds in the order of coordinates, as by itself
    work = all_reduce_(flat, mesh, axis, beside=is_accelerator(flat.device))
    return Work((work,), lambda: [flat] if len(xs) == 1 else _apart(flat, [part.shape for part in parts]))


def _gathering(xs: Any, mesh: Mesh, axis: int, parts: Sequence[Part]) -> Work[list[torch.Tensor]]:
    if len(xs) == 1:
        work = gathering(xs[0], mesh, axis, *parts[0].constants)
        return Work(rest=lambda: [work.wait()])
    n, cuts = mesh.shape[axis], [part.constants for part in parts]
    pieces = [pad_to(x, dim, -(-size // n)) for x, (dim, size) in zip(xs, cuts, strict=True)]
    own = _behind_each_other(pieces)
    rows = own.new_empty(n, own.numel())
    filled, shapes = start_gather(rows, own, mesh, axis), [piece.shape for piece in pieces]

    def together() -> list[torch.Tensor]:
        by_rank = [_views(row, shapes) for row in rows.unbind(0)]
        outs = []
        for i, (dim, size) in enumerate(cuts):
            held = [views[i].narrow(dim, 0, chunk_bounds(size, n, at)[1]) for at, views in enumerate(by_rank)]
            outs.append(torch.cat(held, dim))
        return outs

    return Work((filled,), together)


def _scattering(xs: Any, mesh: Mesh, axis: int, parts: Sequence[Part]) -> Work[list[torch.Tensor]]:
    n, dims = mesh.shape[axis], [part.constants[0] for part in parts]
    shapes = [[*x.shape[:d], -(-x.shape[d] // n), *x.shape[d + 1 :]] for x, d in zip(xs, dims, strict=True)]
    rows = torch.stack(
        [
            _behind_each_other(
                [
                    pad_to(x.narrow(dim, *chunk_bounds(x.shape[dim], n, at)), dim, shape[dim])
                    for x, dim, shape in zip(xs, dims, shapes, strict=True)
                ]
            )
            for at in range(n)
        ]
    )
    summing = start_sum(rows, mesh, axis)

    def own() -> list[torch.Tensor]:
        flat = torch.empty_like(rows[0])
        summing.wait(flat)
        pieces = zip(_views(flat, shapes), dims, parts, strict=True)
        return [piece.narrow(dim, 0, part.shape[dim]).clone() for piece, dim, part in pieces]

    return Work(rest=own)


def _behind_each_other(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([as_it_lies(x).reshape(-1) for x in xs])


def _views(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _apart(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    # each in memory of its own: a compiler may write over one and not know of the others
    return [view.clone() for view in _views(flat, shapes)]


# ---- as operators


@lru_cache
def operators() -> tuple[Any, Any]:
    """The two operators.

    ``begin_bucket`` gives a number, as a tensor on the CPU, by which ``end_bucket`` knows what it waits for.
    """
    home = library()
    home.define("begin_bucket(Tensor[] xs, str mesh, int axis, str op, str parts) -> Tensor")
    home.define("end_bucket(Tensor number, str mesh, str parts, str dtype, str device) -> Tensor[]")
    home.impl("begin_bucket", _begin, "CompositeExplicitAutograd")
    home.impl("end_bucket", _end, "CompositeExplicitAutograd")
    torch.library.register_fake("espalier::begin_bucket", _number, lib=home)
    torch.library.register_fake("espalier::end_bucket", _shaped, lib=home)
    pair = torch.ops.espalier.begin_bucket.default, torch.ops.espalier.end_bucket.default
    for operator in pair:
        keep_order(operator)
    return pair


def _begin(xs: list[torch.Tensor], mesh: str, axis: int, op: str, parts: str) -> torch.Tensor:
    on = mesh_of(mesh)
    work = begin(op, xs, on, axis, _parts(parts))
    on.under_way[id(work)] = work
    return torch.tensor(id(work), dtype=torch.int64)


def _end(number: torch.Tensor, mesh: str, parts: str, dtype: str, device: str) -> list[torch.Tensor]:
    done: list[torch.Tensor] = mesh_of(mesh).under_way.pop(int(number)).wait()
    return done


def _number(xs: list[torch.Tensor], mesh: str, axis: int, op: str, parts: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _shaped(number: torch.Tensor, mesh: str, parts: str, dtype: str, device: str) -> list[torch.Tensor]:
    kind = getattr(torch, dtype)
    return [torch.empty(part.shape, dtype=kind, device=device) for part in _parts(parts)]


def _parts(words: str) -> list[Part]:
    return [Part(*part) for part in parsed(words)]
