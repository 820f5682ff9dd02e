"""What torch's checkpoints and pickles keep of a DTensor.

``torch.distributed.checkpoint`` asks a tensor which boxes of the global one it holds, and for their values;
so what one layout saved, any other loads. A pickle keeps this rank's part, its layout and its mesh: it is
read by a rank that holds the same part. One of a whole tensor is read anywhere; where there is no such mesh,
as a plain tensor.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from contextvars import ContextVar
from typing import Any

import torch
import torch.distributed.tensor as theirs

from espalier.comm import move
from espalier.comm.functions import OwnFunction
from espalier.layout import Layout, Placement, Shard, local_box
from espalier.layout.layout import Box, D, R, known_layout
from espalier.meanwhile import setting
from espalier.mesh import Mesh
from espalier.mesh.mesh import known_mesh
from espalier.tensor.api import lay_out
from espalier.tensor.dtensor import DTensor, plain, stamp
from espalier.tensor.inputs import moved_before
from espalier.tensor.loans import ViewSource, await_values, here, is_whole
from espalier.tensor.observers import tell
from espalier.torch_private import dtensor_spec, raw, strided_shard, wrap_door


def write_items(x: DTensor, name: str) -> list[Any]:
    """What this rank can write of it; of what several offer torch's planner takes one.

    Raises:
        RuntimeError: it is Partial.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    items = []
    for box in _boxes(x, name):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        with raw():
            properties = TensorProperties.create_from_tensor(plain(x))
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(x._layout.shape))
        items.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return items


def chunk_list(x: DTensor) -> list[Any]:
    """What of it is to be read here.

    Raises:
        RuntimeError: it is Partial, or a view that shares no memory with its source.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    source = x.__dict__.get("_source")
    if x._layout.own is not x._layout and isinstance(source, ViewSource):
        raise RuntimeError(
            f"What is loaded into this view ({x._layout.own!r}) would not reach the tensor that it is a view "
            "of. Load into that one."
        )
    return [ChunkStorageMetadata(torch.Size(o), torch.Size(n)) for o, n in _boxes(x, "a tensor")]


def shard(x: DTensor) -> torch.Tensor:
    """The values of the box that is here; what is written to them is written to ``x``."""
    _check_firm(x, "a tensor")
    return here(x)[1]


def _boxes(x: DTensor, name: str) -> list[Box]:
    """The box that this rank holds, unless that is nothing."""
    _check_firm(x, name)
    layout = x._layout
    if not layout.mesh.is_member:
        return []
    box = local_box(layout)
    return [box] if math.prod(box.sizes) or 0 in layout.shape else []


def _check_firm(x: DTensor, name: str) -> None:
    if not x._layout.is_firm:
        raise RuntimeError(  # as torch's own; a ValueError it would take for another mistake
            f"{name} is {x._layout.own!r}: sums that are still to be done are not stored. "
            "Store x.redistribute(placements=...) with Replicate() or Shard(dim) in place of Partial()."
        )


def reduced(x: DTensor, *, is_kept: bool = True) -> tuple[Any, ...]:
    """How a DTensor is made again, for ``pickle`` and ``copy``; ``is_kept``: others may want to read it.

    A metric that is still to be summed, and that the program has compared ("the best"), is kept as its sum.
    """
    is_parameter = bool(getattr(x, "_is_param", False))
    if not x._layout.shape and (known := moved_before(x)) is not None and is_whole(known._layout):
        x = known
    layout, local = here(x)
    kind = layout.mesh.coordinate, x.requires_grad, is_parameter
    whole, mesh = is_whole(layout), layout.mesh
    is_all = mesh.is_member and (whole or mesh.is_dry)  # or there is nothing yet
    if is_kept and not is_all:
        tell(
            "A pickle of a tensor that is cut over ranks keeps this rank's part, which only this rank of "
            "such a mesh can read. What espalier.prepare gave has all: call model.state_dict() and "
            "optimizer.state_dict() on all ranks, and torch.save on one (model.module.state_dict() has "
            "parts). An engine has engine.state_dict() and engine.save(path), a tensor x.full_tensor(). "
            "engine.save(path, average=average) has averages and other copies of the model, whole."
        )
    if whole and not mesh.is_dry:
        (_, of_mesh), (_, (_, *of_layout)) = mesh.__reduce__(), layout.__reduce__()
        return rebuilt_whole, (local, of_mesh, tuple(of_layout), *kind)
    return rebuilt, (local, layout, *kind)


def rebuilt_whole(
    local: torch.Tensor,
    of_mesh: Sequence[Any],
    of_layout: Sequence[Any],
    coordinate: Sequence[int],
    requires_grad: bool,
    is_parameter: bool,
) -> torch.Tensor:
    """The tensor of which a pickle holds all; plain, where there is no mesh as it lay on."""
    try:
        mesh = known_mesh(*of_mesh)
    except ValueError:
        if is_parameter:
            return torch.nn.Parameter(local, requires_grad)
        return local.requires_grad_(requires_grad)
    return rebuilt(local, known_layout(mesh, *of_layout), coordinate, requires_grad, is_parameter)


def rebuilt(
    local: torch.Tensor, layout: Layout, coordinate: Sequence[int], requires_grad: bool, is_parameter: bool
) -> DTensor:
    """The DTensor of which a pickle holds a rank's part.

    Raises:
        ValueError: this rank holds another.
    """
    mesh, coordinate = layout.mesh, tuple(coordinate)
    same = tuple(local.shape) == layout.local_shape and local_box(layout, coordinate) == local_box(layout)
    if not same or any(mesh.coordinate[a] != coordinate[a] for a in layout.partial):
        raise ValueError(
            f"This is the part of {layout!r} that the rank at {coordinate} of the mesh holds; this rank is "
            f"at {mesh.coordinate}. Let each rank load what it saved. What any layout can load: "
            "torch.distributed.checkpoint, or engine.save."
        )
    if not local.is_meta and local.device.type != mesh.device_type:
        local = local.to(mesh.device())
    x = stamp(local, layout)
    with raw():
        torch.Tensor.requires_grad_(x, requires_grad)
    if is_parameter:
        x._is_param = True
    return x


_OLD = (known_mesh, "espalier.mesh.parts.known_mesh")  # where files of before name it
torch.serialization.add_safe_globals([rebuilt, rebuilt_whole, known_layout, known_mesh, _OLD])


# ---- the bridge to torch's own DTensor: the same local memory under the other type, and gradients flow


_Strided = strided_shard()


def to_torch(x: DTensor) -> theirs.DTensor:
    """See :meth:`DTensor.to_torch`."""
    layout = x._layout.own
    await_values((x,))
    # what is deferred is replicated there: its gradient comes back whole
    states = tuple(R if s == D else s for s in layout.axes)
    typed = Layout.of(layout.mesh, states, layout.cuts, layout.shape)
    with raw():
        local = plain(move(x, layout, typed))
        return theirs.DTensor.from_local(
            local,
            layout.mesh.to_torch(),
            _placements(typed),
            run_check=False,
            shape=torch.Size(layout.shape),
            stride=layout.whole_stride(local.stride()),
        )


def from_torch(x: theirs.DTensor) -> DTensor:
    """See :meth:`DTensor.from_torch`."""
    if not isinstance(x, theirs.DTensor):
        raise TypeError(f"from_torch expects a torch.distributed.tensor.DTensor, got {type(x).__name__}.")
    mesh, shape = Mesh.from_torch(x.device_mesh), tuple(x.shape)
    placements = [Shard(p.dim) if _is_strided(p) else p for p in x.placements]  # type: ignore[attr-defined]
    layout = Layout(mesh, placements, shape, order=_order(x.placements, mesh, shape))
    local = x.to_local()
    if hasattr(local, "wait"):  # a collective under way
        local = _Waited.apply(local)
    if tuple(local.shape) != layout.local_shape:
        raise ValueError(
            f"from_torch: the local part has the shape {list(local.shape)}, but {layout!r} gives this rank "
            f"{list(layout.local_shape)}. Redistribute it in torch first."
        )
    return stamp(local.view_as(local), layout)


class _Waited(OwnFunction):
    @staticmethod
    def forward(ctx: Any, x: Any) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        out: torch.Tensor = x.wait()
        return out

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> torch.Tensor | None:
        return grad


def spec_of(x: DTensor) -> Any:
    """See :attr:`DTensor._spec`."""

    layout = x._layout
    mesh, placements = layout.mesh.to_torch(), tuple(_placements(layout))
    return dtensor_spec(mesh, placements, torch.Size(layout.shape), x.stride(), x.dtype)


def _is_strided(placement: Placement) -> bool:
    return _Strided is not None and isinstance(placement, _Strided)


def _placements(layout: Layout) -> list[Placement]:
    """torch's placements, with its word for dims whose cuts do not come in the mesh's order."""
    sizes, placements = layout.mesh.shape, list(layout.placements)
    for d, cut in enumerate(layout.cuts):
        if list(cut) == sorted(cut):
            continue
        _check_even(layout.shape[d], math.prod(sizes[a] for a in cut), d)
        for at, axis in enumerate(cut):
            before = math.prod(sizes[a] for a in cut[:at] if a > axis)
            if before > 1:
                placements[axis] = _Strided(d, split_factor=before)
    return placements


def _order(placements: tuple[Placement, ...], mesh: Mesh, shape: tuple[int, ...]) -> list[int]:
    """The axes in the order in which they cut."""
    order: list[int] = []
    for axis in reversed(range(mesh.ndim)):
        placement = placements[axis]
        if not isinstance(placement, Shard) and not _is_strided(placement):
            continue
        dim = placement.dim  # type: ignore[attr-defined]
        later = [a for a in order if placements[a].dim == dim]  # type: ignore[attr-defined]
        factor = placement.split_factor if _is_strided(placement) else 1  # type: ignore[attr-defined]
        at, before = 0, 1
        while before < factor and at < len(later):
            before *= mesh.shape[later[at]]
            at += 1
        if before != factor:
            raise ValueError(
                f"from_torch: {placement} on axis {mesh.names[axis]!r} is cut by no later axes of the mesh "
                f"first (placements {list(placements)}, sizes {list(mesh.shape)}). Redistribute it first."
            )
        if factor > 1:
            cutting = [a for a, p in enumerate(placements) if getattr(p, "dim", None) == dim]
            _check_even(shape[dim], math.prod(mesh.shape[a] for a in cutting), dim)
        order.insert(order.index(later[at]) if at < len(later) else len(order), axis)
    return order


def _check_even(size: int, pieces: int, dim: int) -> None:
    if size % pieces:
        raise ValueError(
            f"Dim {dim} of size {size} is cut into {pieces} pieces by axes that are not in the mesh's order. "
            "Where the pieces are uneven, torch's DTensor cuts elsewhere: redistribute first."
        )


# ---- torch's helpers for state dicts, which know torch's own DTensor by its type, taught ours: once
#
# Those of ``torch.distributed.checkpoint.state_dict`` gather, send and offload what a dict holds, and
# ``async_save`` copies it first.


def teach_torch() -> None:
    """Wrap torch's helpers (a second call does nothing)."""
    for door, wrapper in (
        ("walk", _iterating),
        ("broadcast", _broadcasting),
        ("broadcast dict", _broadcasting_numbers),
        ("distribute dict", _distributing),
        ("plan", _making),
        ("stage", _staging),
        ("optimizer states", _in_parts),
    ):
        wrap_door(door, wrapper)


_parts_asked: ContextVar[bool] = ContextVar("espalier.parts", default=False)


def in_parts() -> AbstractContextManager[None]:
    """While open, state dicts of optimizers have what this rank holds, and nothing is sent for them."""
    return setting(_parts_asked, True)


def parts_are_asked_for() -> bool:
    """Whether :func:`in_parts` is open."""
    return _parts_asked.get()


def _in_parts(original: Callable[..., Any]) -> Callable[..., Any]:
    """Of what a rank holds torch's helpers gather what is to be whole."""

    @functools.wraps(original)
    def states(*args: Any, **kwargs: Any) -> Any:
        with in_parts():
            return original(*args, **kwargs)

    return states


def _iterating(original: Callable[..., Any]) -> Callable[..., Any]:
    """To a tensor of ours is done what is to be done to a DTensor."""

    @functools.wraps(original)
    def iterate(tree: Any, of_sharded: Any, of_dtensor: Any, of_tensor: Any, **options: Any) -> Any:
        chosen = of_dtensor if type(tree) is DTensor else of_tensor
        return original(tree, of_sharded, of_dtensor, chosen, **options)

    return iterate


def _broadcasting(original: Callable[..., None]) -> Callable[..., None]:
    """Of the whole tensors that arrive, those of ours take their parts."""

    @functools.wraps(original)
    def broadcast(full: Any, local: dict[str, Any], keys: list[str], *args: Any, **options: Any) -> None:
        ours = {key: local[key] for key in keys if type(local.get(key)) is DTensor}
        original(full, local, keys, *args, **options)
        for key, x in ours.items():
            local[key] = _filled(x, local[key])

    return broadcast


def _broadcasting_numbers(original: Callable[..., None]) -> Callable[..., None]:
    """The same, of tensors without dims, which go with the names."""

    @functools.wraps(original)
    def broadcast(full: Any, local: dict[str, Any], *args: Any, **options: Any) -> None:
        ours = {key: x for key, x in local.items() if type(x) is DTensor and not x.ndim}
        original(full, local, *args, **options)
        for key, x in ours.items():
            if key in local:
                local[key] = _filled(x, local[key])

    return broadcast


def _distributing(original: Callable[..., None]) -> Callable[..., None]:
    """The same, of whole tensors that every rank has."""

    @functools.wraps(original)
    def distribute(full: dict[str, Any], local: dict[str, Any], *args: Any, **options: Any) -> None:
        for key, value in full.items():
            x = local.get(key)
            original({key: value}, local, *args, **options)
            if type(x) is DTensor:
                local[key] = _filled(x, local[key])

    return distribute


def _filled(x: DTensor, value: Any) -> Any:
    """``x`` with the values of a whole tensor; one like it where that is on meta, or would round them."""
    if not isinstance(value, torch.Tensor) or type(value) is DTensor:
        return value
    with torch.no_grad():
        laid = lay_out(value, x._layout.own, source=None)
        if x.is_meta or x.dtype is not laid.dtype:
            return laid
        with raw():
            plain(x.detach()).copy_(plain(laid))
    return x


def _making(original: Callable[..., Any]) -> Callable[..., Any]:
    """Before a load, what is on the meta device gets memory, on ranks that hold a part of it."""

    @functools.wraps(original)
    def iterate(tree: Any, *of_kinds: Any) -> Any:
        if type(tree) is not DTensor:
            return original(tree, *of_kinds)
        layout = tree._layout.own
        if not tree.is_meta or layout.mesh.is_dry:
            return tree
        local = torch.empty(layout.local_shape, dtype=tree.dtype, device=layout.mesh.device())
        return stamp(local, layout)

    return iterate


def _staging(original: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """This rank's part is copied, in its layout."""

    @functools.wraps(original)
    def offload(self: Any, x: torch.Tensor, memo: dict[int, Any], **options: Any) -> torch.Tensor:
        if type(x) is not DTensor:
            return original(self, x, memo, **options)
        layout, local = here(x)
        copy = stamp(original(self, local, memo, **options), layout)
        self._keep_alive(local, memo)  # which knows it by its id
        memo[id(x)] = copy
        return copy

    return offload
