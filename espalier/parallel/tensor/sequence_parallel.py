"""Megatron's sequence parallelism (Korthikanti et al. 2022): the sequence is cut between blocks.

Under 1D tensor parallelism what lies between the column and the row layers is cut; the residual stream, its
norms and dropouts are whole on every rank. Here these are cut over the sequence, along the same axis. It is
a matter of where a layout changes, and the rules carry it on from there:

* what is looked up in an embedding comes as a shard: its ids are cut, and a sum over a sharded vocabulary
  is reduce-scattered;
* a block that is given a whole activation takes this rank's slice;
* a column layer gathers its input. Layers that share it gather once; the backward pass keeps the shard,
  gathers it again, and reduce-scatters the gradient;
* the addends that a row layer gives are reduce-scattered.

The all-reduces of 1D so become pairs of half their size, forward and backward; the one thing more is the
gathering for the backward pass. A norm's parameters meet shards, so their gradients are summed: by the
engine, in one message (the axis is deferred for them, design section 3.1).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from functools import lru_cache
from typing import Any

import torch
from torch import nn

from espalier.blocks import around, named_parameters_in
from espalier.comm.redistribute import on_dry
from espalier.comm.ring import SEQUENCE
from espalier.layout import Layout
from espalier.layout.layout import D, R
from espalier.parallel.tensor.ring_products import product
from espalier.parallel.tensor.tables import parts_of, transposed
from espalier.tensor.dtensor import DTensor, layout_of, redistribute, stamp, up_to_date
from espalier.tensor.inputs import Move, moved_by, shard_of
from espalier.tensor.saved import Shard, close_saving, gather_before_backward, open_saving
from espalier.torch_private import PARAMETERS, own_parameters, raw
from espalier.trees import tensors_in, tree_map

Call = Callable[..., Any]


def cut_sequences(
    model: nn.Module,
    layouts: Mapping[str, Layout],
    axis: int,
    blocks: Iterable[nn.Module],
    asynchronous: bool = False,
) -> None:
    """Cut what lies between a model's blocks over the sequence, in place.

    Args:
        layouts: of the model's parameters, by name.
        axis: the tensor axis' index.
        blocks: the modules whose inputs are cut, if they hold a layer that is cut.
        asynchronous: whether linear layers multiply while sequences are on their way.
    """
    cut = {id(p): layouts[name].axes[axis] for name, p in named_parameters_in(model)}
    met: set[int] = set()
    for module in model.modules():
        roles = _roles(module, cut)
        if is_norm(module) and any(cut.get(id(p)) == D for p in module.parameters()):
            around(module, functools.partial(_norm, axis=axis))
        elif roles:
            met.add(id(module))
            by_ring = product if asynchronous else None
            around(module, functools.partial(_layer, axis=axis, gathers="column" in roles, by_ring=by_ring))
        elif type(module).forward is nn.Embedding.forward:
            around(module, functools.partial(_lookup, axis=axis))
    cut_inputs([b for b in blocks if any(id(m) in met for m in b.modules() if m is not b)], axis)


def cut_inputs(blocks: Iterable[nn.Module], axis: int) -> None:
    """Cut the first input of blocks, where it is whole along an axis, over the sequence, in place."""
    for block in blocks:
        around(block, functools.partial(_block, axis=axis))


def is_norm(module: nn.Module) -> bool:
    """Whether a module is a norm of any library: its parameters are vectors."""
    return "norm" in type(module).__name__.lower() and all(p.ndim < 2 for p in module.parameters())


def _roles(module: nn.Module, cut: Mapping[int, Any]) -> set[str]:
    """Whether a module multiplies by weights cut over the output features, the input features, or both."""
    if isinstance(module, nn.MultiheadAttention):
        # it multiplies by its output layer's weight itself
        whole = all(cut.get(id(p)) in (R, D) for p in module.parameters())
        return set() if whole else {"column", "row"}
    if not (isinstance(module, nn.Linear) or transposed(module)):
        return set()
    # of a weight that is made of several parameters those tell that have its dims
    parts = [p for own, of, p in parts_of(module) if of == "weight" and (own == of or 1 not in p.shape)]
    dims = {cut.get(id(p)) for p in parts}
    return {"column" if d == int(transposed(module)) else "row" for d in dims if isinstance(d, int)}


def _layer(
    module: nn.Module,
    own: Call,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    *,
    axis: int,
    gathers: bool,
    by_ring: Callable[[nn.Module, Call, Any, int], DTensor | None] | None,
) -> Any:
    """A layer with a weight that is cut: shards of a sequence come in, and leave."""
    if by_ring is not None and len(args) == 1 and not kwargs:
        multiplied = by_ring(module, own, args[0], axis)
        if multiplied is not None:
            return multiplied

    def wanted(x: DTensor) -> Layout | None:
        layout = x._layout.own
        state = layout.axes[axis]
        between = isinstance(state, int) and 0 < state < layout.ndim - 1
        return layout.with_axis(axis, D) if between else None

    def left(x: Any) -> Any:
        partial = type(x) is DTensor and x._layout.axes[axis] == "sum"
        return _cut(x, axis) if partial and x._layout.ndim > 2 else x

    return tree_map(left, call_on_whole(own, args, kwargs, wanted) if gathers else own(*args, **kwargs))


def _norm(module: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, axis: int) -> Any:
    """A norm for whose parameters the axis is deferred: of a whole input one rank gives their gradient."""
    x = next(iter(tensors_in((args, kwargs))), None)
    if type(x) is not DTensor or x._layout.axes[axis] == D or isinstance(x._layout.axes[axis], int):
        return own(*args, **kwargs)
    before = own_parameters(module)
    vars(module)[PARAMETERS] = {name: p if p is None else _once(p, axis) for name, p in before.items()}
    try:
        return own(*args, **kwargs)
    finally:
        vars(module)[PARAMETERS] = before


def _once(p: Any, axis: int) -> Any:
    layout = p._layout.own
    return redistribute(p, layout.with_axis(axis, R)) if layout.axes[axis] == D else p


def _lookup(module: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, axis: int) -> Any:
    """An embedding, given the ids of this rank's stretch of the sequence."""
    ids, *rest = args or kwargs.values()
    if rest or not isinstance(ids, torch.Tensor):
        return own(*args, **kwargs)
    table: Any = own_parameters(module).get("weight")  # not what a parametrization would make here
    if table is None:
        return own(*args, **kwargs)
    layout = table._layout.own
    if type(ids) is DTensor:
        # the gradient of a table that is whole is summed, that of what was looked up would be gathered
        fits = ids.ndim == 2 and (layout.axes[axis] == 0 or 2 * layout.shape[0] < ids.numel())
    else:
        # positions, the same for every row
        fits = ids.ndim > 0 and layout.axes[axis] == 0 and ids.numel() == ids.shape[-1]
        if fits:
            with raw():
                here = on_dry(ids, layout.mesh) if layout.mesh.is_dry else ids
                ids = stamp(here.view_as(here), layout_of(ids, layout.mesh))
    if fits and layout.axes[axis] in (0, R, D):
        return own(_cut(ids, axis, ids.ndim - 1))
    return own(*args, **kwargs)


def _block(module: nn.Module, own: Call, args: tuple[Any, ...], kwargs: dict[str, Any], *, axis: int) -> Any:
    """A block, given this rank's slice of the activation that is its first input."""
    x = next(iter(tensors_in((args, kwargs))), None)
    if type(x) is DTensor and x.ndim == 3 and x.is_floating_point() and x._layout.axes[axis] in (R, D):
        args, kwargs = tree_map(lambda y: _cut(y, axis) if y is x else y, (args, kwargs))
    return own(*args, **kwargs)


def _cut(x: DTensor, axis: int, dim: int = SEQUENCE) -> DTensor:
    """``x`` cut over the sequence, if it is long enough for each rank to get some of it."""
    layout = x._layout.own
    if layout.shape[dim] < layout.mesh.shape[axis]:
        return x
    return redistribute(x, layout.with_axis(axis, dim))


# ---- a call on gathered inputs of which the backward pass keeps the shards
#
# The dispatcher does so for one function. Here it is done for a stretch of program, a module's ``forward``
# say: what it saves of a gathered input, or of a view of it, is replaced by the shard.


def call_on_whole(
    function: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    wanted: Callable[[DTensor], Layout | None],
) -> Any:
    """``function(*args, **kwargs)``, its DTensors brought first to the layouts that are wanted.

    A tensor that several calls in a row bring to one layout is moved once, and so is its gradient.

    Args:
        wanted: the layout of an input during the call; None: as it is.
    """
    shards: list[Shard] = []

    def brought(x: Any) -> Any:
        if type(x) is not DTensor:
            return x
        x = up_to_date(x)
        layout = wanted(x)
        if layout is None or layout is x._layout.own:
            return x
        with raw():
            way = _way(x._layout.own, layout)
            moved = moved_by(x, way)
            if way.gathers and moved.requires_grad:
                shards.append(shard_of(x, moved, way))
            return stamp(moved, layout)

    args, kwargs = tree_map(brought, args), tree_map(brought, kwargs)
    if not shards:
        return function(*args, **kwargs)
    hooks = open_saving(shards)
    try:
        out = function(*args, **kwargs)
    finally:
        close_saving(hooks)
    with raw():
        gather_before_backward(out, shards)
    return out


@lru_cache(maxsize=4096)
def _way(src: Layout, dst: Layout) -> Move:
    return Move((), src, dst)
