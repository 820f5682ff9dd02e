"""The table of transitions: what one axis does, forward and backward, to change its state.

The gradient of a value has a state that follows from the value's own:

=========  ==========================================  ====================================
value      what the ranks hold                         its gradient
=========  ==========================================  ====================================
``R``      the same value, on every rank               ``R``: every rank gets it whole
``D``      the same value, used differently by each    ``P``: what each rank got is an addend
``S(d)``   disjoint slices along dim d                 ``S(d)``
``P``      addends                                     ``D``: the same on every rank, and each goes
                                                       on with it from its own addend
=========  ==========================================  ====================================

``D`` (deferred) differs from ``R`` in nothing but its gradient. Carrying the difference as a state
makes the table closed: the backward of ``a -> b`` is the forward of ``grad(b) -> grad(a)``, and the
gradient of a gradient has the type of the value. So derivatives of any order need nothing more,
and a test derives the second column from the first. (Were the gradient of ``P`` taken as ``R``,
first derivatives would be the same and second ones would miss the other ranks' share.)

The same four types stand in JAX's shard_map and in meta-pytorch/spmd_types, under other letters; their V is
our ``S``:

=============================  =========  ==================  =========================
what                           here       spmd_types          shard_map
=============================  =========  ==================  =========================
same value, gradient the same  ``R``      I                   invarying
same value, gradient partial   ``D``      R                   reduced, printed R
disjoint parts                 ``S(d)``   V or S(d)           varying, printed V
addends                        ``P``      P                   unreduced, U
=============================  =========  ==================  =========================
"""

from __future__ import annotations

from functools import cache
from types import MappingProxyType
from typing import Final

from espalier.layout.layout import AxisState, D, Layout, is_partial

IDENTITY: Final = "identity"
ALL_REDUCE: Final = "all_reduce"
ALL_GATHER: Final = "all_gather"
REDUCE_SCATTER: Final = "reduce_scatter"
ALL_TO_ALL: Final = "all_to_all"
SLICE: Final = "slice"
PAD: Final = "pad"
KEEP: Final = "keep"

# (from, to): (forward, backward). SLICE: own slice. PAD: own slice among zeros. KEEP: coordinate 0
# keeps its value, the others hold zeros.
TABLE: Final = MappingProxyType(
    {
        ("R", "R"): (IDENTITY, IDENTITY),
        ("P", "R"): (ALL_REDUCE, IDENTITY),
        ("P", "S"): (REDUCE_SCATTER, ALL_GATHER),
        ("S", "R"): (ALL_GATHER, SLICE),
        ("R", "S"): (SLICE, ALL_GATHER),
        ("S", "S"): (ALL_TO_ALL, ALL_TO_ALL),
        ("R", "P"): (KEEP, IDENTITY),
        ("R", "D"): (IDENTITY, ALL_REDUCE),  # defer: Megatron's f
        ("S", "D"): (ALL_GATHER, REDUCE_SCATTER),  # gather and defer, fused
        ("P", "D"): (ALL_REDUCE, ALL_REDUCE),
        ("D", "D"): (IDENTITY, IDENTITY),
        ("D", "R"): (IDENTITY, KEEP),
        ("D", "S"): (SLICE, PAD),
        ("D", "P"): (KEEP, KEEP),
        ("S", "P"): (PAD, SLICE),
        ("P", "P"): (IDENTITY, IDENTITY),
    }
)


def kind(state: AxisState) -> str:
    """The table's letter for a state code."""
    if isinstance(state, int):
        return "S"
    return "P" if is_partial(state) else state


@cache
def operation(src: AxisState, dst: AxisState) -> str:
    """The forward operation that takes one axis from ``src`` to ``dst``."""
    if src == dst:
        return IDENTITY
    return TABLE[kind(src), kind(dst)][0]


def gradient_state(state: AxisState) -> AxisState:
    """The state of the gradient of a value in ``state``."""
    if state == D:
        return "sum"
    return D if is_partial(state) else state


def gradient_layout(layout: Layout) -> Layout:
    """The layout of the gradient of a value that lies as ``layout``."""
    known = layout._gradient
    if known is None:
        states = tuple(gradient_state(s) for s in layout.axes)
        known = layout._gradient = Layout.of(layout.mesh, states, layout.cuts, layout.shape)
    return known
