"""local_map: plain functions of local tensors, inside typed edges."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw
from torch.autograd import forward_ad

from espalier.comm import collectives as door
from espalier.comm import move
from espalier.comm.traced import recorders
from espalier.layout import Layout, Placement, Replicate, Shard
from espalier.layout.layout import R
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor.api import check_parts, from_local, to_local
from espalier.tensor.dtensor import DTensor, as_recorded, plain, redistribute
from espalier.trees import flat_map, flatten, unflatten


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Sequence[Placement] | None] | None = None,
    in_grad_placements: Sequence[Sequence[Placement] | None] | None = None,
    device_mesh: MeshLike | None = None,
    *,
    redistribute_inputs: bool = False,
) -> Callable[..., Any]:
    """Run a function on local tensors, inside typed edges: the place for custom autograd and kernels.

    Called without any DTensor it is ``func`` itself.

    Args:
        func: takes and returns plain tensors, also in nested lists, tuples and dicts; ranks may do what they
            like between.
        out_placements: one list of placements if it returns one tensor, else a tuple of them, one for
            each output (``None`` for outputs that are no tensors).
        in_placements: for each positional argument (nested ones one by one) the placements it needs;
            ``None``, or none given: no tensor, or as it is.
        in_grad_placements: likewise for the gradients. By default: those of a replicated input are added up
            along an axis where any input or output is sharded or Partial, for there the ranks use it
            differently; where all is replicated, each rank's is taken to be the whole one.
        device_mesh: that of the outputs; by default the inputs'.
        redistribute_inputs: bring inputs to ``in_placements``; else another layout is an error.

    Raises:
        ValueError: an input does not lie as stated, or the outputs do not fit ``out_placements``.
    """
    if func is None:
        return functools.partial(
            local_map,
            out_placements=out_placements,
            in_placements=in_placements,
            in_grad_placements=in_grad_placements,
            device_mesh=device_mesh,
            redistribute_inputs=redistribute_inputs,
        )
    call = func
    outs = _one_for_each(out_placements)

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        flat, tree = flatten(args)
        flat_kwargs, kwargs_tree = flatten(kwargs)
        flat, flat_kwargs = [*map(as_recorded, flat)], [*map(as_recorded, flat_kwargs)]
        seen = [x for x in (*flat, *flat_kwargs) if isinstance(x, DTensor)]
        if not seen:
            return call(*args, **kwargs)
        mesh = as_mesh(device_mesh) if device_mesh is not None else seen[0]._layout.mesh
        wanted = _per_argument("in_placements", in_placements, flat)
        grads = _per_argument("in_grad_placements", in_grad_placements, flat)
        placed = [
            _placed(x, w, redistribute_inputs, i) for i, (x, w) in enumerate(zip(flat, wanted, strict=True))
        ]
        layouts = [x._layout for x in (*placed, *flat_kwargs) if isinstance(x, DTensor)]
        differ = _differing(mesh, layouts, outs)
        entered = [_entered(x, g, differ) for x, g in zip(placed, grads, strict=True)]
        named = [_entered(x, None, differ) for x in flat_kwargs]
        local = _Local([*entered, *named], layouts) if differ else None
        if local is not None:
            entered, named = local.inputs[: len(entered)], local.inputs[len(entered) :]
        out = call(*unflatten(entered, tree), **unflatten(named, kwargs_tree))
        if local is not None:
            out = flat_map(local.leaving, out)
        return _left(out, mesh, outs, layouts)

    return wrapped


def _one_for_each(out_placements: Any) -> tuple[Any, ...]:
    """The placements of each output, given those of one or a sequence of them."""
    if out_placements is None or all(isinstance(p, Placement) for p in out_placements):
        return (out_placements,)
    return tuple(out_placements)


def _per_argument(name: str, given: Sequence[Any] | None, flat: list[Any]) -> Sequence[Any]:
    given = given or ()
    if len(given) > len(flat):
        raise ValueError(
            f"local_map: {name} has {len(given)} entries, the call {len(flat)} positional argument(s) "
            "(nested ones counted one by one). Give placements for each, None for what is no DTensor."
        )
    return [*given, *[None] * (len(flat) - len(given))]


def _placed(x: Any, wanted: Any, redistribute_inputs: bool, position: int) -> Any:
    if not isinstance(x, DTensor) or wanted is None:
        return x
    mesh = x._layout.mesh
    layout = Layout(mesh, wanted, x._layout.shape)
    if layout.placements != x.placements:
        if not redistribute_inputs:
            raise ValueError(
                f"local_map: argument {position} lies as {list(x.placements)}, in_placements says "
                f"{list(wanted)}. Redistribute it, or pass redistribute_inputs=True."
            )
        return redistribute(x, layout)
    return x


def _differing(mesh: Mesh, inputs: list[Layout], outs: tuple[Any, ...]) -> list[int]:
    """The axes along which the ranks do different things."""
    placements = [lay.placements for lay in inputs if lay.mesh is mesh] + [p for p in outs if p is not None]
    return [a for a in range(mesh.ndim) if any(not isinstance(p[a], Replicate) for p in placements)]


def _entered(x: Any, grads: Any, differ: list[int]) -> Any:
    if not isinstance(x, DTensor):
        return x
    if grads is not None:
        return to_local(x, grads)
    own = x._layout
    varied = [a for a in differ if own.axes[a] == R]
    with raw():
        return plain(move(x, own, own.with_varied(varied)))


class _Local:
    """What ranks do between the edges of a call, each its own: the graphs of all have the same edges.

    A backward pass that reaches the call reaches all its inputs, on every rank. So what hangs on that, the
    order of collectives above all, is the same on all. To an input that a rank has not used goes no gradient;
    zeros, if what made it has others to meet backward.

    Attributes:
        inputs: the local inputs.
    """

    def __init__(self, inputs: list[Any], layouts: Sequence[Layout]) -> None:
        self.inputs, self._first = list(inputs), None
        at = [i for i, x in enumerate(inputs) if isinstance(x, torch.Tensor) and x.requires_grad]
        if at and torch.is_grad_enabled() and forward_ad._current_level < 0 and not recorders():
            for i, x in zip(at, _enter(*(inputs[i] for i in at)), strict=True):
                self.inputs[i] = x
            self._first = self.inputs[at[0]]
        self._has_nothing = any(0 in layout.local_shape and 0 not in layout.shape for layout in layouts)

    def leaving(self, x: Any) -> Any:
        """An output, behind all inputs; one that needs no gradient is left alone, but of nothing."""
        if self._first is None or not isinstance(x, torch.Tensor):
            return x
        may_need = x.is_floating_point() or x.is_complex()
        return _leave(x, self._first) if x.requires_grad or (self._has_nothing and may_need) else x


def _meets(node: Any) -> bool:
    """Whether backward ranks meet in a collective, from a node of the graph on; all ranks say the same."""
    seen, stack = set(), [node]
    while stack:
        node = stack.pop()
        if node is None or node in seen:
            continue
        if getattr(getattr(node, "_forward_cls", None), "meets", False):
            return True
        seen.add(node)
        stack += [beyond for beyond, _ in node.next_functions]
    return False


class _Enter(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(ctx: Any, *inputs: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.set_materialize_grads(False)
        ctx.like = [(x.shape, x.dtype, x.device) for x in inputs]
        return tuple(x.detach() for x in inputs)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if all(grad is not None for grad in grads):
            return grads
        return tuple(
            torch.zeros(like[0], dtype=like[1], device=like[2]) if grad is None and _meets(node) else grad
            for grad, like, (node, _) in zip(grads, ctx.like, ctx.next_functions, strict=True)
        )


class _Leave(torch.autograd.Function):
    espalier = True

    @staticmethod
    def forward(ctx: Any, out: torch.Tensor, entered: torch.Tensor) -> torch.Tensor:
        ctx.set_materialize_grads(False)
        return out.detach()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, None]:
        return grad, None


_enter: Callable[..., tuple[torch.Tensor, ...]] = super(torch.autograd.Function, _Enter).apply
_leave: Callable[..., torch.Tensor] = super(torch.autograd.Function, _Leave).apply


def _left(out: Any, mesh: Mesh, outs: tuple[Any, ...], inputs: list[Layout]) -> Any:
    flat, tree = flatten(out)
    if len(flat) != len(outs):
        raise ValueError(
            f"local_map: {len(flat)} value(s) came out, out_placements speaks of {len(outs)}. "
            "Give placements for each, None for what is no tensor."
        )
    found = []
    for x, placements in zip(flat, outs, strict=True):
        if isinstance(x, torch.Tensor) != (placements is not None):
            raise ValueError(
                f"local_map: a {type(x).__name__} came out for which out_placements holds {placements}. "
                "Tensors need placements, other values None."
            )
        found.append(x if placements is None else _typed(x, mesh, placements, inputs))
    return unflatten(found, tree)


def _typed(x: torch.Tensor, mesh: Mesh, placements: Sequence[Placement], inputs: list[Layout]) -> DTensor:
    sharding = [a for a, p in enumerate(placements) if isinstance(p, Shard)]
    if not sharding or all(_even(lay) for lay in inputs):
        return from_local(x, mesh, placements)
    # of uneven inputs the output may be uneven too: what its parts add up to the ranks have to ask each other
    sizes = torch.tensor(x.shape, device="cpu").to(mesh.device())
    for axis in reversed(sharding):
        dim = placements[axis].dim  # type: ignore[attr-defined]
        sizes[dim] = door.all_reduce(sizes, mesh, axis)[dim]
    shape = _guessed(x, mesh, placements, inputs) if mesh.is_dry else sizes.tolist()
    layout = Layout(mesh, placements, shape)
    check_parts(x, layout, tuple(x.shape) != layout.local_shape)
    return from_local(x, mesh, placements, shape=shape)


def _even(layout: Layout) -> bool:
    sizes = layout.mesh.shape
    return all(
        n % math.prod(sizes[a] for a in cut) == 0 for n, cut in zip(layout.shape, layout.cuts, strict=True)
    )


def _guessed(x: torch.Tensor, mesh: Mesh, placements: Sequence[Placement], inputs: list[Layout]) -> list[int]:
    """On a dry mesh: the global shape, dims of a part's size being taken for the input's that has it."""
    grown = Layout(mesh, placements, [n * mesh.size() for n in x.shape])
    known = {
        (part, cut): n
        for lay in inputs
        for part, cut, n in zip(lay.local_shape, lay.cuts, lay.shape, strict=True)
    }
    return [
        known.get((n, cut), n * math.prod(mesh.shape[a] for a in cut))
        for n, cut in zip(x.shape, grown.cuts, strict=True)
    ]
