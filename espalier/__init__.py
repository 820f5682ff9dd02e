"""Espalier: write the model for one device; it is laid on a mesh of devices and trained there."""

from espalier.comm import Ledger, ledger
from espalier.engine import DryReport, Engine, dry_run, initialize
from espalier.layout import Layout, Partial, Placement, Replicate, Shard
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import (
    DTensor,
    GatherWarning,
    Operand,
    Spec,
    distribute_tensor,
    empty,
    full,
    full_tensor,
    layout_of,
    local_map,
    ones,
    rand,
    randn,
    register_rule,
    zeros,
)

__version__ = "0.1.0"
