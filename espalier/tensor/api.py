"""Public functions over DTensors, under torch.distributed.tensor's names."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import collectives as door
from espalier.comm import move
from espalier.layout import Layout, Placement, Replicate, Shard, gradient_layout, local_box
from espalier.layout.layout import R, is_partial
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.tensor.dtensor import DTensor, layout_of, plain, stamp
from espalier.tensor.fallback import tree_map
from espalier.tensor.random import draw_key, normal, uniform
from espalier.tensor.rules import RULES
from espalier.tensor.rules.spec import RuleFunction
from espalier.tensor.watch import claim


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | None = 0,
) -> DTensor:
    """Lay a global tensor on a mesh; a leaf that needs gradients if ``tensor`` does.

    Args:
        tensor: the global tensor (its values count on rank 0 alone unless ``src_data_rank`` is None).
        placements: one for each axis; replicated by default.
        src_data_rank: 0: rank 0's values are sent to all. None: every rank holds the same values
            already, and nothing is sent.

    Raises:
        ValueError: a Partial placement, a tensor on another device than the mesh's, or another source.
    """
    mesh = as_mesh(device_mesh)
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements)
    layout = Layout(mesh, placements, tuple(tensor.shape))
    if any(is_partial(s) for s in layout.axes):
        raise ValueError(
            f"distribute_tensor cannot make {list(placements)}: a given tensor is one value, not addends. "
            "Use Replicate or Shard, or DTensor.from_local."
        )
    if src_data_rank not in (0, None):
        raise ValueError(f"src_data_rank is 0 or None, not {src_data_rank}.")
    return lay_out(tensor, layout, send=src_data_rank == 0)


def lay_out(tensor: torch.Tensor, layout: Layout, *, send: bool = True) -> DTensor:
    """Cut this rank's part from a global tensor (after sending rank 0's values, if asked).

    An ``nn.Parameter`` stays one: the result is parameter and DTensor at once.
    """
    value = tensor.detach()
    mesh = layout.mesh
    if not send:
        claim(value, mesh, range(mesh.ndim), "a tensor laid out as equal on all ranks")
    if mesh.is_dry:
        local = torch.empty(layout.local_shape, dtype=value.dtype, device=mesh.device_type)
    else:
        value = value.to(mesh.device())
        if send:
            for axis in range(mesh.ndim):
                value = door.broadcast(value, mesh, axis)
        local = value[local_box(layout).slices].clone(memory_format=torch.contiguous_format)
    out = stamp(local, layout)
    with raw():
        torch.Tensor.requires_grad_(out, tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        out._is_param = True
    return out


def from_local(
    local: torch.Tensor,
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
) -> DTensor:
    """See :meth:`DTensor.from_local`."""
    mesh = as_mesh(device_mesh)
    placements = placements if placements is not None else [Replicate()] * mesh.ndim
    if isinstance(local, DTensor):
        raise TypeError("from_local expects this rank's plain part, got a DTensor already.")
    if shape is None:
        grown = list(local.shape)
        for n, placement in zip(mesh.shape, placements, strict=False):
            if isinstance(placement, Shard):
                grown[placement.dim] *= n
        shape = grown
    layout = Layout(mesh, placements, shape)
    if tuple(local.shape) != layout.local_shape:
        raise ValueError(
            f"from_local: rank {mesh.rank} gave a part of the shape {list(local.shape)}, but {layout!r} "
            f"gives it {list(layout.local_shape)}. Pieces are cut as torch.chunk does; pass the right shape=."
        )
    claim(local, mesh, [a for a, s in enumerate(layout.axes) if s == R], "from_local's part")
    if run_check:
        _check_replicas(local.detach(), layout)
    return stamp(local.view_as(local), layout)


def _check_replicas(local: torch.Tensor, layout: Layout) -> None:
    mesh = layout.mesh
    differs = []
    for axis, state in enumerate(layout.axes):
        if state == R:
            first = door.broadcast(local, mesh, axis)
            flag = torch.tensor(float(not torch.equal(first, local)), device=local.device)
            if mesh.is_dry or not door.all_reduce(flag, mesh, axis, "max"):
                continue
            differs.append(mesh.names[axis])
    if differs:
        raise ValueError(
            f"from_local: the parts are said to be replicated along {', '.join(differs)}, but differ between "
            "ranks. Give the same values on all, or say Shard or Partial."
        )


def to_local(x: DTensor, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """See :meth:`DTensor.to_local`."""
    layout = x._layout
    mesh = layout.mesh
    recorded = x.requires_grad and torch.is_grad_enabled()
    if grad_placements is None:
        unclear = [mesh.names[a] for a, s in enumerate(layout.axes) if s == R and mesh.shape[a] > 1]
        if recorded and unclear:
            raise ValueError(
                f"to_local() of a tensor that is replicated along {', '.join(unclear)} and needs a gradient: "
                "say what its gradients will be. grad_placements=[Replicate(), ...] if every rank computes "
                "the same from it, Partial() on axes where they compute different things."
            )
        with raw():
            return plain(x)
    wanted = Layout(mesh, grad_placements, layout.shape)
    varied = [a for a, s in enumerate(layout.axes) if s == R and is_partial(wanted.axes[a])]
    held = layout.with_varied(varied)
    if gradient_layout(held).axes != wanted.axes:
        raise ValueError(
            f"grad_placements {list(grad_placements)} do not fit a value that lies as {layout!r}: the "
            "gradient of a shard is a shard of the same dim, that of a Partial is replicated, that of a "
            "replicated value replicated or Partial."
        )
    with raw():
        return plain(move(x, layout, held) if recorded else x)


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    """The plain global tensor of a DTensor (a collective); a plain tensor comes back."""
    return x.full_tensor() if isinstance(x, DTensor) else x


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

    Args:
        func: takes and returns plain tensors; ranks may do what they like between.
        out_placements: one sequence of placements if it returns one tensor, else a tuple of them
            (``None`` for outputs that are no tensors).
        in_placements: for each tensor argument the placements it needs (``None``: as it is).
        in_grad_placements: for each tensor argument those of its gradient; by default what follows
            from the type, replicated inputs being taken to be used differently on each rank.
        redistribute_inputs: bring inputs to ``in_placements``; else another layout is an error.

    Raises:
        ValueError: an input does not lie as stated.
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

    @functools.wraps(call)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        mesh = as_mesh(device_mesh) if device_mesh is not None else _first_mesh((args, kwargs))
        where = iter(range(len(args) + len(kwargs)))

        def enter(x: Any) -> Any:
            if not isinstance(x, DTensor):
                return x
            i = next(where)
            wanted = in_placements[i] if in_placements is not None else None
            grads = in_grad_placements[i] if in_grad_placements is not None else None
            return _entered(x, mesh, wanted, grads, redistribute_inputs, i)

        out = call(*tree_map(enter, args), **tree_map(enter, kwargs))
        if isinstance(out, torch.Tensor):
            return _left(out, mesh, out_placements)
        return type(out)(
            _left(x, mesh, p) if isinstance(x, torch.Tensor) else x
            for x, p in zip(out, out_placements, strict=True)
        )

    return wrapped


def _entered(
    x: DTensor, mesh: Mesh, wanted: Any, grads: Any, redistribute_inputs: bool, position: int
) -> torch.Tensor:
    if wanted is not None and tuple(wanted) != x.placements:
        if not redistribute_inputs:
            raise ValueError(
                f"local_map: tensor argument {position} lies as {list(x.placements)}, in_placements says "
                f"{list(wanted)}. Redistribute it, or pass redistribute_inputs=True."
            )
        x = x.redistribute(mesh, wanted)
    if grads is not None:
        return to_local(x, grads)
    with raw():
        return plain(move(x, x._layout, x._layout.with_varied(range(mesh.ndim))))


def _left(x: torch.Tensor, mesh: Mesh, placements: Any) -> DTensor:
    if placements is None:
        raise ValueError("local_map: a tensor came out for which out_placements holds None.")
    return from_local(x, mesh, placements)


def _first_mesh(tree: Any) -> Mesh:
    from espalier.tensor.dispatch import tensors_in

    for x in tensors_in(tree):
        if isinstance(x, DTensor):
            return x._layout.mesh
    raise ValueError("local_map: no argument is a DTensor and no device_mesh was given.")


def register_rule(*functions: Callable[..., Any]) -> Callable[[RuleFunction], RuleFunction]:
    """Teach the dispatcher a function: the decorated rule says how its dims relate.

    >>> @register_rule(my_op)                                         # doctest: +SKIP
    ... def _(x, scale):
    ...     return Spec(ins=[x.dims()], outs=[x.dims()], shapes=[x.shape], linear=[(0,)])

    See :class:`espalier.Spec` for the words. ``my_op`` must be a function that honours
    ``__torch_function__``: torch's own, a ``torch.library`` op, or Python made of them and
    wrapped by ``torch.overrides.wrap_torch_function``.
    """

    def register(rule: RuleFunction) -> RuleFunction:
        from espalier.tensor.dispatch import forget

        for function in functions:
            RULES.add(function, rule, typed=True)
        forget()
        return rule

    return register


# ---- factories


def _factory(
    size: tuple[Any, ...],
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None,
    requires_grad: bool,
    make: Callable[[Layout, torch.device], torch.Tensor],
) -> DTensor:
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    mesh = as_mesh(device_mesh)
    layout = Layout(mesh, placements or [Replicate()] * mesh.ndim, shape)
    local = make(layout, mesh.device())
    return stamp(local.requires_grad_(requires_grad), layout)


def full(
    size: Sequence[int],
    fill_value: Any,
    *,
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """``torch.full`` on a mesh. On axes where it is Partial, coordinate 0 holds the value."""

    def make(layout: Layout, device: torch.device) -> torch.Tensor:
        elsewhere = any(layout.mesh.coordinate[a] for a in layout.partial)
        return torch.full(layout.local_shape, 0 if elsewhere else fill_value, dtype=dtype, device=device)

    return _factory((size,), device_mesh, placements, requires_grad, make)


def zeros(*size: Any, device_mesh: MeshLike, **options: Any) -> DTensor:
    """``torch.zeros`` on a mesh (options: placements, dtype, requires_grad)."""
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return full(shape, 0, device_mesh=device_mesh, **{"dtype": torch.get_default_dtype(), **options})


def ones(*size: Any, device_mesh: MeshLike, **options: Any) -> DTensor:
    """``torch.ones`` on a mesh (options: placements, dtype, requires_grad)."""
    shape = size[0] if len(size) == 1 and not isinstance(size[0], int) else size
    return full(shape, 1, device_mesh=device_mesh, **{"dtype": torch.get_default_dtype(), **options})


def empty(
    *size: Any,
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
) -> DTensor:
    """``torch.empty`` on a mesh."""
    return _factory(
        size,
        device_mesh,
        placements,
        requires_grad,
        lambda layout, device: torch.empty(layout.local_shape, dtype=dtype, device=device),
    )


def rand(
    *size: Any,
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Uniform values in [0, 1), the same under every layout and number of ranks."""
    return _random(uniform, size, device_mesh, placements, dtype, requires_grad, generator)


def randn(
    *size: Any,
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None = None,
    dtype: torch.dtype | None = None,
    requires_grad: bool = False,
    generator: torch.Generator | None = None,
) -> DTensor:
    """Standard normal values, the same under every layout and number of ranks."""
    return _random(normal, size, device_mesh, placements, dtype, requires_grad, generator)


def _random(
    draw: Callable[..., torch.Tensor],
    size: tuple[Any, ...],
    device_mesh: MeshLike,
    placements: Sequence[Placement] | None,
    dtype: torch.dtype | None,
    requires_grad: bool,
    generator: torch.Generator | None,
) -> DTensor:
    kind, key = dtype or torch.get_default_dtype(), draw_key(generator)

    def make(layout: Layout, device: torch.device) -> torch.Tensor:
        if layout.partial:
            raise ValueError(f"Random values cannot be Partial ({layout!r}): use Replicate or Shard.")
        return draw(layout, key, kind, device)

    return _factory(size, device_mesh, placements, requires_grad, make)


__all__ = [
    "distribute_tensor",
    "empty",
    "from_local",
    "full",
    "full_tensor",
    "lay_out",
    "layout_of",
    "local_map",
    "ones",
    "rand",
    "randn",
    "register_rule",
    "to_local",
    "zeros",
]
