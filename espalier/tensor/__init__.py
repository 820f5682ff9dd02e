"""DTensor: a typed local tensor above autograd, its dispatcher, rules and public functions."""

import os

from espalier.tensor import dispatch as _dispatch  # puts the dispatcher into DTensor
from espalier.tensor.api import distribute_tensor, full_tensor, lay_out, register_rule
from espalier.tensor.compiled import compile
from espalier.tensor.deferred import deferred
from espalier.tensor.dtensor import DTensor, layout_of, plain, redistribute, stamp
from espalier.tensor.explain import Explanation, explain, explaining
from espalier.tensor.factories import (
    arange,
    empty,
    eye,
    full,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    zeros,
)
from espalier.tensor.fallback import GatherWarning
from espalier.tensor.guard import install as _install_guard
from espalier.tensor.library import elementwise, rowwise
from espalier.tensor.local_map import local_map
from espalier.tensor.modules import distribute_module
from espalier.tensor.rules.spec import Operand, Spec
from espalier.tensor.sanitize import SanitizeError, sanitize, switch_on
from espalier.tensor.sharding import register_sharding
from espalier.tensor.strictness import implicit_replication, strict
from espalier.tensor.visualize import visualize_sharding

_install_guard()
assert _dispatch
if os.environ.get("ESPALIER_SANITIZE", "0") not in ("", "0"):
    switch_on(os.environ["ESPALIER_SANITIZE"])

__all__ = [
    "DTensor",
    "Explanation",
    "GatherWarning",
    "Operand",
    "SanitizeError",
    "Spec",
    "arange",
    "compile",
    "deferred",
    "distribute_module",
    "distribute_tensor",
    "elementwise",
    "empty",
    "explain",
    "explaining",
    "eye",
    "full",
    "full_tensor",
    "implicit_replication",
    "lay_out",
    "layout_of",
    "linspace",
    "local_map",
    "logspace",
    "ones",
    "plain",
    "rand",
    "randint",
    "randn",
    "randperm",
    "redistribute",
    "register_rule",
    "register_sharding",
    "rowwise",
    "sanitize",
    "stamp",
    "strict",
    "visualize_sharding",
    "zeros",
]
