"""Espalier: write the model for one device; it is laid on a mesh of devices and trained there."""

from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from espalier.comm import Ledger, ledger
from espalier.engine import DryReport, Engine, dry_run, initialize
from espalier.layout import Layout, Partial, Placement, Replicate, Shard
from espalier.mesh import Mesh, spawn
from espalier.parallel import Plan
from espalier.tensor import (
    DTensor,
    Explanation,
    GatherWarning,
    Operand,
    SanitizeError,
    Spec,
    arange,
    distribute_tensor,
    empty,
    explain,
    explaining,
    eye,
    full,
    full_tensor,
    layout_of,
    linspace,
    local_map,
    logspace,
    ones,
    rand,
    randint,
    randn,
    register_rule,
    sanitize,
    strict,
    zeros,
)

__version__ = "0.1.0"

__all__ = [
    "DTensor",
    "DeviceMesh",
    "DryReport",
    "Engine",
    "Explanation",
    "GatherWarning",
    "Layout",
    "Ledger",
    "Mesh",
    "Operand",
    "Partial",
    "Placement",
    "Plan",
    "Replicate",
    "SanitizeError",
    "Shard",
    "Spec",
    "arange",
    "distribute_tensor",
    "dry_run",
    "empty",
    "explain",
    "explaining",
    "eye",
    "full",
    "full_tensor",
    "init_device_mesh",
    "initialize",
    "layout_of",
    "ledger",
    "linspace",
    "local_map",
    "logspace",
    "ones",
    "rand",
    "randint",
    "randn",
    "register_rule",
    "sanitize",
    "spawn",
    "strict",
    "zeros",
]
