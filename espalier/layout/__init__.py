"""How a global tensor lies on a mesh, and how to get from one way to another. Pure: no traffic."""

from torch.distributed.tensor.placement_types import Partial, Placement, Replicate, Shard

from espalier.layout.layout import (
    Box,
    Layout,
    any_alive,
    chunk_bounds,
    local_box,
    may_be_empty,
    same_cuts,
    same_data,
)
from espalier.layout.routes import CrossMeshRoute, Parcel, Route, Step, crossing, route
from espalier.layout.transitions import TABLE, gradient_layout, operation

__all__ = [
    "TABLE",
    "Box",
    "CrossMeshRoute",
    "Layout",
    "Parcel",
    "Partial",
    "Placement",
    "Replicate",
    "Route",
    "Shard",
    "Step",
    "any_alive",
    "chunk_bounds",
    "crossing",
    "gradient_layout",
    "local_box",
    "may_be_empty",
    "operation",
    "route",
    "same_cuts",
    "same_data",
]
