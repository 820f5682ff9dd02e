"""What torch's checkpoints and pickles keep of a DTensor.

``torch.distributed.checkpoint`` asks a tensor which boxes of the global one it holds, and for their values;
so what one layout saved, any other loads. A pickle keeps this rank's part, its layout and its mesh: it is
read by a rank that holds the same part.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.layout import Layout, local_box
from espalier.layout.layout import known_layout
from espalier.layout.regions import Box
from espalier.mesh.parts import known_mesh
from espalier.tensor.dtensor import DTensor, plain, stamp
from espalier.tensor.loans import Source
from espalier.tensor.memory import here


def write_items(x: DTensor, name: str) -> list[Any]:
    """What this rank can write of it; of what several offer torch's planner takes one.

    Raises:
        RuntimeError: it is Partial.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

    found = []
    for box in _boxes(x, name):
        offsets, sizes = torch.Size(box.offsets), torch.Size(box.sizes)
        with raw():
            properties = TensorProperties.create_from_tensor(plain(x))
        data = TensorWriteData(ChunkStorageMetadata(offsets, sizes), properties, torch.Size(x._layout.shape))
        found.append(WriteItem(MetadataIndex(name, offsets), WriteItemType.SHARD, tensor_data=data))
    return found


def chunk_list(x: DTensor) -> list[Any]:
    """What of it is to be read here.

    Raises:
        RuntimeError: it is Partial, or a view that shares no memory with its source.
    """
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

    source = x.__dict__.get("_source")
    if x._layout.own is not x._layout and isinstance(source, Source):
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


def reduced(x: DTensor) -> tuple[Any, ...]:
    """How a DTensor is made again, for ``pickle`` and ``copy``."""
    layout, local = here(x)
    is_parameter = bool(getattr(x, "_is_param", False))
    return rebuilt, (local, layout, layout.mesh.coordinate, x.requires_grad, is_parameter)


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


torch.serialization.add_safe_globals([rebuilt, known_layout, known_mesh])

__all__ = ["chunk_list", "rebuilt", "reduced", "shard", "write_items"]
