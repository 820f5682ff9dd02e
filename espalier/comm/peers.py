"""Messages from one rank to another along an axis; they arrive in the order in which they are sent."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from espalier.comm.collectives import Pending, _record
from espalier.comm.direct import Works
from espalier.comm.wire import as_wire
from espalier.mesh import Mesh


def send_to(xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, to: int, tag: int) -> Pending:
    """Start to send tensors to a coordinate of the axis; they must stay as they are until the wait.

    Args:
        tag: of this and its :func:`receive_from`. Messages of one tag arrive in the order in which they are
            sent. NCCL knows no tags: there all messages between two ranks do.
    """
    xs = [x.contiguous().resolve_conj() for x in xs if x.numel()]
    if not xs:
        return Pending()
    _record(mesh, "send", axis, sum(x.numel() * x.element_size() for x in xs))
    if mesh.is_dry:
        return Pending()
    place = (mesh.order(axis) or range(mesh.shape[axis]))[to]
    wires = [as_wire(x) for x in xs]
    works = [mesh.backend(axis, w.device).send([w], place, tag) for w in wires]
    return Pending(works[0] if len(works) == 1 else Works(works), lambda: wires)


def receive_from(
    like: Sequence[tuple[Sequence[int], torch.dtype]], mesh: Mesh, axis: int, source: int, tag: int
) -> tuple[list[torch.Tensor], Pending]:
    """Start to receive tensors of these shapes and dtypes from a coordinate of the axis.

    Returns:
        the tensors, and what to wait for before they are used.
    """
    outs = [torch.empty(tuple(shape), dtype=dtype, device=mesh.device()) for shape, dtype in like]
    filled = [x for x in outs if x.numel()]
    if not filled:
        return outs, Pending()
    _record(mesh, "receive", axis, 0)
    if mesh.is_dry:
        return outs, Pending()
    place = (mesh.order(axis) or range(mesh.shape[axis]))[source]
    works = [mesh.backend(axis, x.device).recv([as_wire(x)], place, tag) for x in filled]
    return outs, Pending(works[0] if len(works) == 1 else Works(works))


__all__ = ["receive_from", "send_to"]
