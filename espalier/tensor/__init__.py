"""DTensor: a typed local tensor above autograd, its dispatcher, rules and public functions."""

import os
from types import SimpleNamespace

from espalier.sharding.spec import Operand, Spec
from espalier.tensor import dispatch as _dispatch  # puts the dispatcher into DTensor
from espalier.tensor.api import (
    arange,
    distribute_tensor,
    elementwise,
    empty,
    eye,
    from_local,
    full,
    full_tensor,
    lay_out,
    linspace,
    logspace,
    ones,
    rand,
    randint,
    randn,
    randperm,
    register_rule,
    register_sharding,
    rowwise,
    to_local,
    zeros,
)
from espalier.tensor.compare import SanitizeError, compared
from espalier.tensor.compiled import compile
from espalier.tensor.deferred import deferred
from espalier.tensor.dispatch import implicit_replication, strict
from espalier.tensor.dtensor import DTensor, layout_of, plain, redistribute, stamp
from espalier.tensor.explain import Explanation, explain, explaining, visualize_sharding
from espalier.tensor.fallback import GatherWarning
from espalier.tensor.guard import install as _install_guard
from espalier.tensor.loans import await_values, refresh
from espalier.tensor.modules import distribute_module, local_map
from espalier.tensor.observers import tell_of_absent_gradient
from espalier.tensor.sanitize import sanitize, switch_on
from espalier.tensor.stored import chunk_list, from_torch, reduced, shard, spec_of, to_torch, write_items

DTensor._above = SimpleNamespace(
    await_values=await_values,
    chunk_list=chunk_list,
    compared=compared,
    from_local=from_local,
    from_torch=from_torch,
    reduced=reduced,
    refresh=refresh,
    shard=shard,
    spec_of=spec_of,
    tell_of_absent_gradient=tell_of_absent_gradient,
    to_local=to_local,
    to_torch=to_torch,
    write_items=write_items,
)
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
