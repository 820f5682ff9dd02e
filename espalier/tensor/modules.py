"""Modules whose parameters are DTensors: torch's distribute_module."""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, cast

import torch
from torch import nn

from espalier.comm import collectives, move
from espalier.comm.custom_ops import recorders
from espalier.comm.functions import OwnFunction
from espalier.layout import Layout, Placement, Replicate, Shard
from espalier.layout.layout import R
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor.api import check_parts, from_local, lay_out, to_local
from espalier.tensor.dtensor import DTensor, as_recorded, left, plain, redistribute, stamp
from espalier.torch_private import (
    function_of,
    own_buffers,
    own_parameters,
    raw,
    takes_tangents,
    watch_flat_weights,
)
from espalier.trees import flat_map, flatten, nodes_from, unflatten


def lay_out_parameter(p: nn.Parameter, layout: Layout, *, source: int | Sequence[int] | None = 0) -> None:
    """Make a parameter a DTensor in place: who holds it (an optimizer, a tied module) goes on holding it.

    One that was cut before it was known how it is to lie (``_is_cut_early``) is moved.

    Raises:
        ValueError: it is a DTensor already, and lies otherwise.
    """
    if isinstance(p, DTensor) and vars(p).pop("_is_cut_early", False):
        with torch.no_grad():
            value = redistribute(cast("DTensor", p.detach()), layout.undeferred)
        with raw():
            _become(p, stamp(value.detach(), layout))
        return
    if isinstance(p, DTensor):
        if p._layout is not layout:
            raise ValueError(
                f"A parameter that lies as {p._layout!r} is to lie as {layout!r} too: it was laid out "
                "before, or two modules share it. Say the same of both."
            )
        return
    _become(p, lay_out(p, layout, source=source))


def _become(p: nn.Parameter, dtensor: DTensor) -> None:
    """Let a plain parameter be a DTensor."""
    with raw():
        p.grad = None
        p.data = plain(dtensor.detach())
    stamp(p, dtensor._layout.own)._is_param = True


def typed_conversion(apply: Callable[..., nn.Module]) -> Callable[..., nn.Module]:
    """torch's ``nn.Module._apply``, whose function may make DTensors of plain parameters, in place.

    torch alone would put a DTensor's local memory behind the plain parameter, and drop the type.
    """

    @functools.wraps(apply)
    def wrapped(self: nn.Module, fn: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
        def typed(x: torch.Tensor) -> torch.Tensor:
            out = fn(x)
            if type(out) is DTensor and type(x) is not DTensor and isinstance(x, nn.Parameter):
                _become(x, out)
                return x
            return out

        typed._espalier = True  # type: ignore[attr-defined]
        # the modules inside are given the wrapped function
        return apply(self, fn if getattr(fn, "_espalier", False) else typed, recurse)

    return wrapped


@contextmanager
def unwatched(model: nn.Module) -> Iterator[None]:
    """While open, nobody sees whether weights are exchanged for others: torch exchanges no tensor then.

    Recurrent modules do so by weak references. What a module has computed of its weights before (that of
    torch's ``weight_norm``, say) does by its graph, which is let go of.
    """
    for m in model.modules():
        for name in [k for k, x in vars(m).items() if isinstance(x, torch.Tensor) and not x.is_leaf]:
            vars(m)[name] = vars(m)[name].detach()
    watching: list[Any] = [m for m in model.modules() if isinstance(m, nn.RNNBase)]
    for m in watching:
        watch_flat_weights(m, False)
    try:
        yield
    finally:
        for m in watching:
            watch_flat_weights(m, True)


def distribute_module(
    module: nn.Module,
    device_mesh: MeshLike | None = None,
    partition_fn: Callable[..., None] | None = None,
    input_fn: Callable[..., Any] | None = None,
    output_fn: Callable[..., Any] | None = None,
) -> nn.Module:
    """Make a module's parameters and buffers DTensors, in place, and prepare what goes in and comes out.

    Args:
        module: what ``partition_fn`` leaves plain in it is replicated, with rank 0's values.
        device_mesh: by default the mesh whose ``with`` block is open.
        partition_fn: ``partition_fn(name, submodule, device_mesh)``, called for each submodule; one of two
            arguments is not given the name. It may lay out parameters one by one, or all by
            ``submodule._apply(lambda t: distribute_tensor(t, device_mesh, placements))``, which keeps the
            parameters' identity.
        input_fn: ``input_fn(module, inputs, device_mesh)`` gives the inputs in place of a forward's own; one
            of two arguments is not given the module.
        output_fn: ``output_fn(module, outputs, device_mesh)``, likewise for the outputs.

    Raises:
        ValueError: it was called for this module before, or a function takes another number of arguments.
    """
    if getattr(module, "_distribute_module_applied", False):
        raise ValueError(
            f"distribute_module was called for this {type(module).__name__} before; it can be called once."
        )
    partition, enter, leave = (
        None if function is None else _of_three(function, name)
        for name, function in (
            ("partition_fn", partition_fn),
            ("input_fn", input_fn),
            ("output_fn", output_fn),
        )
    )
    mesh = as_mesh(device_mesh)
    on_mesh = mesh if device_mesh is None else device_mesh
    for name, part in module.named_modules():
        if partition is not None:
            partition(name, part, on_mesh)
        for p in own_parameters(part).values():
            if p is not None and not isinstance(p, DTensor):
                lay_out_parameter(p, Layout.replicated(mesh, tuple(p.shape)))
        for key, buffer in own_buffers(part).items():
            if buffer is not None and not isinstance(buffer, DTensor):
                own_buffers(part)[key] = lay_out(buffer, Layout.replicated(mesh, tuple(buffer.shape)))
    if enter is not None:
        module.register_forward_pre_hook(lambda part, inputs: enter(part, inputs, on_mesh))
    if leave is not None:
        module.register_forward_hook(lambda part, inputs, outputs: leave(part, outputs, on_mesh))
    module._distribute_module_applied = True  # type: ignore[assignment]
    return module


def _of_three(function: Callable[..., Any], name: str) -> Callable[..., Any]:
    """A function of three arguments; one of two is not given the first.

    Raises:
        ValueError: it takes another number.
    """
    kinds = [p.kind for p in inspect.signature(function).parameters.values()]
    taken = kinds.count(inspect.Parameter.POSITIONAL_ONLY)
    taken += kinds.count(inspect.Parameter.POSITIONAL_OR_KEYWORD)
    if taken == 3 or inspect.Parameter.VAR_POSITIONAL in kinds:
        return function
    if taken == 2:
        return lambda first, *rest: function(*rest)
    first = "the submodule's name, the submodule" if name == "partition_fn" else "the module, what passes"
    raise ValueError(
        f"{name} takes {taken} argument(s); expected three ({first}, device_mesh), or the last two of them."
    )


# ---- local_map: plain functions of local tensors, inside typed edges


def local_map(
    func: Callable[..., Any] | None = None,
    out_placements: Any = None,
    in_placements: Sequence[Sequence[Placement] | None] | None = None,
    in_grad_placements: Sequence[Sequence[Placement] | None] | None = None,
    device_mesh: MeshLike | None = None,
    *,
    redistribute_inputs: bool = False,
    spmd_types: bool = False,
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
        spmd_types: no effect: a check of torch's, from 2.14 on, of what placements say here.

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


def _per_argument(name: str, placements: Sequence[Any] | None, flat: list[Any]) -> Sequence[Any]:
    placements = placements or ()
    if len(placements) > len(flat):
        raise ValueError(
            f"local_map: {name} has {len(placements)} entries, the call {len(flat)} positional argument(s) "
            "(nested ones counted one by one). Give placements for each, None for what is no DTensor."
        )
    return [*placements, *[None] * (len(flat) - len(placements))]


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
    layout = x._layout
    deferred = [a for a in differ if layout.axes[a] == R]
    with raw():
        return left(move(x, layout, layout.with_deferred(deferred)))


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
        if at and torch.is_grad_enabled() and not takes_tangents() and not recorders():
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
    return any(getattr(function_of(beyond), "meets", False) for beyond in nodes_from([node]))


class _Enter(OwnFunction):
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


class _Leave(OwnFunction):
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
    results = []
    for x, placements in zip(flat, outs, strict=True):
        if isinstance(x, torch.Tensor) != (placements is not None):
            raise ValueError(
                f"local_map: a {type(x).__name__} came out for which out_placements holds {placements}. "
                "Tensors need placements, other values None."
            )
        results.append(x if placements is None else _typed(x, mesh, placements, inputs))
    return unflatten(results, tree)


def _typed(x: torch.Tensor, mesh: Mesh, placements: Sequence[Placement], inputs: list[Layout]) -> DTensor:
    sharding = [a for a, p in enumerate(placements) if isinstance(p, Shard)]
    if not sharding or all(_even(lay) for lay in inputs):
        return from_local(x, mesh, placements)
    # of uneven inputs the output may be uneven too: what its parts add up to the ranks have to ask each other
    sizes = torch.tensor(x.shape, device="cpu").to(mesh.device())
    for axis in reversed(sharding):
        dim = placements[axis].dim  # type: ignore[attr-defined]
        sizes[dim] = collectives.all_reduce(sizes, mesh, axis)[dim]
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


class _OfAllRows(nn.SyncBatchNorm):
    """Is as the layers that it was made of, as these see all rows here: on CPUs and without data, too."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return nn.BatchNorm1d.forward(self, input)


def see_all_rows(model: nn.Module) -> None:
    """Let each ``SyncBatchNorm`` of a model leave it to layouts whose rows it sees; it keeps its class."""
    for module in model.modules():
        kind = type(module)
        if not isinstance(module, nn.SyncBatchNorm) or issubclass(kind, _OfAllRows):
            continue
        # below what others (timm) derive of torch's, and before that
        bases = (_OfAllRows,) if kind is nn.SyncBatchNorm else (kind, _OfAllRows)
        module.__class__ = type(kind.__name__, bases, {"__module__": kind.__module__})
