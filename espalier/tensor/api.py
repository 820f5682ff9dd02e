"""Public functions over DTensors, under torch.distributed.tensor's names."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from espalier.comm import collectives, move
from espalier.comm.redistribute import as_addend
from espalier.layout import Layout, Placement, Replicate, Shard, gradient_layout, local_box
from espalier.layout.layout import AxisState, D, R, is_partial, normal_dim
from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.sharding.spec import Operand, RuleFunction, Spec, spellings
from espalier.tensor.compare import compared
from espalier.tensor.dispatch import forget
from espalier.tensor.dtensor import DTensor, is_sparse, left, redistribute, refuse_nested, stamp, up_to_date
from espalier.tensor.loans import part_of
from espalier.tensor.observers import claim
from espalier.tensor.random import Key, bits, draw_key, integers, normal, uniform
from espalier.tensor.rules import RULES
from espalier.tensor.rules.pointwise import letters, nonlinear, operands_in
from espalier.texts import expect, whole
from espalier.torch_private import OpOverload, raw, schema_of
from espalier.trees import leaves, tensors_in, tree_map


def distribute_tensor(
    tensor: torch.Tensor,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    src_data_rank: int | Sequence[int] | None = 0,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """Lay a global tensor on a mesh; a leaf that needs gradients if ``tensor`` does.

    Args:
        tensor: the global tensor, a leaf. Its values count on the source alone, unless that is None. One on
            the meta device (on all ranks) gives a DTensor on it, to be filled later.
        device_mesh: by default the mesh whose ``with`` block is open.
        placements: one for each axis; replicated by default. Partial: addends whose sum it is.
        src_data_rank: whose values are sent: the rank at this coordinate on *every* axis, as in torch, or a
            coordinate for each axis. None: every rank holds the same values already, and nothing is sent.
        order: where several axes cut one dim, the axes (names or indices) in the order in which they cut,
            outermost first; by default the mesh's own.

    Raises:
        ValueError: there is no such source, or the tensor is no leaf.
    """
    mesh = as_mesh(device_mesh)
    if placements is None:
        placements = [Replicate()] * mesh.ndim
    if isinstance(tensor, DTensor):
        return tensor.redistribute(mesh, placements, order=order)
    _check_dense("distribute_tensor", tensor)
    if not tensor.is_leaf:
        raise ValueError(
            "distribute_tensor makes a new leaf, so that gradients would not reach what this tensor was "
            "computed from. Give a leaf (tensor.detach() is one); inside a computation use from_local."
        )
    layout = Layout(mesh, placements, tuple(tensor.shape), order=order)
    return lay_out(tensor, layout, source=src_data_rank)


def _check_dense(what: str, tensor: Any) -> None:
    """See that there is a tensor whose parts have shapes.

    Raises:
        TypeError, ValueError: there is none.
    """
    expect(f"{what}: the tensor", tensor, torch.Tensor, "a torch.Tensor (torch.as_tensor makes one)")
    refuse_nested(tensor)
    if is_sparse(tensor):
        raise ValueError(f"{what}: a sparse tensor ({tensor.layout}) has no layout. Give tensor.to_dense().")


def lay_out(tensor: torch.Tensor, layout: Layout, *, source: int | Sequence[int] | None = 0) -> DTensor:
    """Get this rank's part of a global tensor that the source has (None: that every rank has).

    An ``nn.Parameter`` stays one: the result is parameter and DTensor at once.
    """
    mesh = layout.mesh
    start = None if source is None else _coordinate(source, mesh)
    value = tensor.detach()
    if start is None:
        claim(value, Layout.replicated(mesh, tuple(value.shape)), "a tensor laid out as equal on all ranks")
    if mesh.is_dry:
        value = torch.empty(value.shape, dtype=value.dtype, device=mesh.device_type)
    if value.is_meta and not mesh.is_dry:
        local = value.new_empty(layout.local_shape)
    else:
        local = _cut(value, layout) if start is None else _sent(value, layout, start)
        local = as_addend(local, layout)
    out = stamp(local, layout)
    with raw():
        torch.Tensor.requires_grad_(out, tensor.requires_grad)
    if isinstance(tensor, torch.nn.Parameter):
        out._is_param = True
    return out


def _coordinate(source: int | Sequence[int], mesh: Mesh) -> tuple[int, ...]:
    coordinate = [source if n > 1 else 0 for n in mesh.shape] if isinstance(source, int) else list(source)
    for at in coordinate:
        whole("src_data_rank", at)
    if len(coordinate) != mesh.ndim or not all(
        0 <= at < n for at, n in zip(coordinate, mesh.shape, strict=True)
    ):
        raise ValueError(
            f"src_data_rank={source}: no rank of {mesh!r} has the coordinate {tuple(coordinate)}. A number "
            "is the coordinate on every axis; a sequence holds one for each."
        )
    return tuple(coordinate)


def _cut(value: torch.Tensor, layout: Layout) -> torch.Tensor:
    own = value[local_box(layout).slices].to(layout.mesh.device())
    return own.clone(memory_format=torch.contiguous_format)


def _sent(value: torch.Tensor, layout: Layout, source: tuple[int, ...]) -> torch.Tensor:
    """This rank's part of what the rank at ``source`` has: cut first, then copied, axis by axis."""
    mesh = layout.mesh
    if mesh.size() == 1:
        return _cut(value, layout)
    local: torch.Tensor | None = value.to(mesh.device()) if mesh.coordinate == source else None
    cutting = layout.order
    axes = [*cutting, *(a for a in range(mesh.ndim) if a not in cutting)]
    part = Layout.replicated(mesh, layout.shape)
    while axes:
        axis, before = axes.pop(0), part.local_shape
        if axis in cutting:
            part = part.with_axis(axis, layout.axes[axis])
        if any(mesh.coordinate[a] != source[a] for a in axes):
            collectives.pass_by("scatter" if axis in cutting else "broadcast", value, mesh, axis, before)
            continue  # the value is yet to come along these
        if local is None:
            local = torch.empty(0 if axis in cutting else before, dtype=value.dtype, device=mesh.device())
        if axis in cutting:
            dim = layout.axes[axis]
            assert isinstance(dim, int)
            local = collectives.scatter(local, mesh, axis, dim, before, source[axis])
        else:
            local = collectives.broadcast(local, mesh, axis, source[axis])
    assert local is not None and tuple(local.shape) == layout.local_shape
    return local


def from_local(
    local: torch.Tensor,
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    *,
    run_check: bool = False,
    shape: Sequence[int] | None = None,
    grad_placements: Sequence[Placement] | None = None,
    order: Sequence[int | str] | None = None,
) -> DTensor:
    """See :meth:`DTensor.from_local`."""
    mesh = as_mesh(device_mesh)
    placements = placements if placements is not None else [Replicate()] * mesh.ndim
    if isinstance(local, DTensor):
        raise TypeError("from_local expects this rank's plain part, got a DTensor already.")
    _check_dense("from_local", local)
    if shape is None:
        grown = list(local.shape)
        for n, placement in zip(mesh.shape, placements, strict=False):
            if isinstance(placement, Shard) and -len(grown) <= placement.dim < len(grown):
                grown[placement.dim] *= n
        shape = grown
    layout = Layout(mesh, placements, shape, order=order)
    wrong = tuple(local.shape) != layout.local_shape
    if run_check:
        check_parts(local, layout, wrong)
    if wrong:
        raise ValueError(
            f"from_local: rank {mesh.rank} gave a part of the shape {list(local.shape)}, but {layout!r} "
            f"gives it {list(layout.local_shape)}. Pieces are cut as torch.chunk does; pass the right shape=."
        )
    if local.device.type != mesh.device_type and not local.is_meta:
        local = local.to(mesh.device())
    if run_check:
        local = _first_of_all(local, layout)
    claim(local, layout, "from_local's part")
    layout_held = layout if grad_placements is None else _held(layout, grad_placements, "from_local")
    return stamp(move(local.view_as(local), layout_held, layout), layout)


_DTYPES = sorted((x for x in vars(torch).values() if isinstance(x, torch.dtype)), key=str)


def check_parts(local: torch.Tensor, layout: Layout, wrong: bool) -> None:
    """Raise on all ranks if any has a part that does not fit, or they disagree on global shape or dtype."""
    mesh = layout.mesh
    said = torch.tensor(
        [_DTYPES.index(local.dtype), len(layout.shape), *layout.shape, *[0] * 64][:64], device="cpu"
    )
    most = torch.cat([torch.tensor([int(wrong)], device="cpu"), said, -said]).to(mesh.device())
    for axis in range(mesh.ndim):
        most = collectives.all_reduce(most, mesh, axis, "max")
    if not mesh.is_dry and (most[0] or not torch.equal(most[1:65], -most[65:])):
        raise ValueError(
            f"from_local(run_check=True): the parts do not make one tensor. Rank {mesh.rank} gave "
            f"{list(local.shape)} of {local.dtype}, for {layout!r}. Parts must be of one dtype, and cut as "
            "torch.chunk does; where they are uneven, pass shape=."
        )


def _first_of_all(local: torch.Tensor, layout: Layout) -> torch.Tensor:
    """``local`` with the values of coordinate 0 on the axes where it is replicated; gradients stay here."""
    first = local.detach()
    for axis, state in enumerate(layout.axes):
        if state == R:
            first = collectives.broadcast(first, layout.mesh, axis)
    out = local.clone()
    out.detach().copy_(first)
    return out


def to_local(x: DTensor, grad_placements: Sequence[Placement] | None = None) -> torch.Tensor:
    """See :meth:`DTensor.to_local`."""
    layout, part = x._layout.own, part_of(x)
    x = up_to_date(x) if part is None else part
    if x._layout.own is not layout:
        x = redistribute(x, layout)
    mesh = layout.mesh
    recorded = x.requires_grad and torch.is_grad_enabled()
    if grad_placements is None:
        unsaid = [a for a, s in enumerate(layout.axes) if s == R and mesh.shape[a] > 1] if recorded else []
        out = left(x)
        return compared(out, layout, unsaid, "to_local") if unsaid else out
    layout_held = _held(layout, grad_placements, "to_local")
    with raw():
        return left(move(x, layout, layout_held) if recorded else x)


def _held(layout: Layout, grads: Sequence[Placement], what: str) -> Layout:
    """The layout of the same local data whose gradients lie as said.

    Raises:
        ValueError: there is none.
    """
    wanted = Layout(layout.mesh, grads, layout.shape, order=layout.order)
    states = [
        s if s not in (R, D) else D if is_partial(g) else R
        for s, g in zip(layout.axes, wanted.axes, strict=True)
    ]
    layout_held = Layout.of(layout.mesh, tuple(states), layout.cuts, layout.shape)
    if gradient_layout(layout_held).placements != wanted.placements:
        raise ValueError(
            f"{what}: grad_placements {list(grads)} do not fit a value that lies as {layout!r}: the "
            "gradient of a shard is a shard of the same dim, that of a Partial is replicated, that of a "
            "replicated value replicated or Partial."
        )
    return layout_held


def full_tensor(x: torch.Tensor) -> torch.Tensor:
    """The plain global tensor of a DTensor (a collective); a plain tensor comes back."""
    return x.full_tensor() if isinstance(x, DTensor) else x


def register_rule(*functions: Callable[..., Any]) -> Callable[[RuleFunction], RuleFunction]:
    """Teach the dispatcher a function: the decorated rule says how its dims relate.

    >>> @register_rule(my_op)                                         # doctest: +SKIP
    ... def _(x, scale):
    ...     return Spec(ins=[x.dims()], outs=[x.dims()], shapes=[x.shape], linear=[(0,)])

    See :class:`espalier.Spec` for the words. ``my_op`` must be a function that honours
    ``__torch_function__``: torch's own, a ``torch.library`` op, or Python made of them and
    wrapped by ``torch.overrides.wrap_torch_function``; or a ``torch.autograd.Function``, whose
    ``apply`` the rule then describes: forward and backward see local tensors.
    """

    if not functions:
        raise TypeError("register_rule() was given no function: write @register_rule(my_op).")
    for function in functions:
        expect("register_rule: the function", function, Callable, "a function, or a torch.autograd.Function")

    def register(rule: RuleFunction) -> RuleFunction:
        expect("register_rule: the rule", rule, Callable, "a function that gives a Spec")
        for function in functions:
            if isinstance(function, type) and issubclass(function, torch.autograd.Function):
                function = function.apply
            RULES.add(function, rule)
        forget()
        return rule

    return register


# ---- factories: torch's own, with a mesh and placements; the same values under every layout


Make = Callable[[Layout, torch.device], torch.Tensor]


def _factory(
    given: tuple[Any, ...],
    make: Make,
    /,
    *,
    size: Any = (),
    device_mesh: MeshLike | None = None,
    placements: Sequence[Placement] | None = None,
    layout: torch.layout = torch.strided,
    requires_grad: bool = False,
    order: Sequence[int | str] | None = None,
    **others: Any,
) -> DTensor:
    if others:
        raise TypeError(
            f"New DTensors have no option {', '.join(others)}: expected dtype, device_mesh, placements, "
            "order, requires_grad or layout. They lie on the mesh's device."
        )
    if layout is not torch.strided:
        raise ValueError(f"layout={layout}: a DTensor is strided. (How it lies on the mesh: placements=.)")
    mesh = as_mesh(device_mesh)
    sizes = given or (size,)
    shape: Any = sizes[0] if len(sizes) == 1 and isinstance(sizes[0], Iterable) else sizes
    lay = Layout(mesh, placements or [Replicate()] * mesh.ndim, shape, order=order)
    return stamp(as_addend(make(lay, mesh.device()), lay).requires_grad_(requires_grad), lay)


def full(
    size: Sequence[int], fill_value: Any, *, dtype: torch.dtype | None = None, **options: Any
) -> DTensor:
    """``torch.full`` on a mesh (options: device_mesh, placements, order, requires_grad, layout).

    Every factory takes these options. Without ``device_mesh`` the mesh is the one whose ``with`` block is
    open; without ``placements`` the tensor is replicated.
    """
    return _like_torch(partial(torch.full, fill_value=fill_value), (size,), dtype, options)


def _like_torch(
    make: Callable[..., torch.Tensor], size: tuple[Any, ...], dtype: torch.dtype | None, options: Any
) -> DTensor:
    """What a factory of torch's gives for this rank's part."""
    expect("dtype", dtype, torch.dtype | None, "a torch.dtype")
    return _factory(size, lambda lay, device: make(lay.local_shape, dtype=dtype, device=device), **options)


def zeros(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.zeros`` on a mesh (options as for :func:`full`)."""
    return _like_torch(torch.zeros, size, dtype, options)


def ones(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.ones`` on a mesh (options as for :func:`full`)."""
    return _like_torch(torch.ones, size, dtype, options)


def empty(*size: Any, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.empty`` on a mesh (options as for :func:`full`)."""
    return _like_torch(torch.empty, size, dtype, options)


def _vector(make: Callable[..., torch.Tensor], args: tuple[Any, ...], options: dict[str, Any]) -> DTensor:
    """A vector that is made whole and cut, so that each element is rounded as in the whole one."""
    kwargs = {
        name: options.pop(name) for name in ("dtype", "base", "steps", "end", "step") if name in options
    }
    args = tuple(x.item() if isinstance(x, torch.Tensor) else x for x in args)

    def cut(lay: Layout, device: torch.device) -> torch.Tensor:
        whole = make(*args, device=device, **kwargs)
        return whole[local_box(lay).slices].clone()

    length = make(*args, device="meta", **kwargs).shape[0]
    return _factory((length,), cut, **options)


def arange(*bounds: Any, **options: Any) -> DTensor:
    """``torch.arange([start,] end[, step])`` on a mesh (options as for :func:`full`, and dtype)."""
    return _vector(torch.arange, bounds, options)


def linspace(start: Any, end: Any, steps: int, **options: Any) -> DTensor:
    """``torch.linspace`` on a mesh (options as for :func:`full`, and dtype)."""
    return _vector(torch.linspace, (start, end, steps), options)


def logspace(start: Any, end: Any, steps: int, base: float = 10.0, **options: Any) -> DTensor:
    """``torch.logspace`` on a mesh (options as for :func:`full`, and dtype)."""
    return _vector(torch.logspace, (start, end, steps, base), options)


def eye(n: int, m: int | None = None, *, dtype: torch.dtype | None = None, **options: Any) -> DTensor:
    """``torch.eye`` on a mesh (options as for :func:`full`)."""

    def make(lay: Layout, device: torch.device) -> torch.Tensor:
        (top, left), (height, width) = local_box(lay)
        rows, columns = (
            torch.arange(start, start + length, device=device)
            for start, length in ((top, height), (left, width))
        )
        return (rows[:, None] == columns).to(dtype or torch.get_default_dtype())

    return _factory((n, n if m is None else m), make, **options)


def rand(
    *size: Any, dtype: torch.dtype | None = None, generator: torch.Generator | None = None, **options: Any
) -> DTensor:
    """Uniform values in [0, 1), the same under every layout (options as for :func:`full`)."""
    kind = dtype or torch.get_default_dtype()
    make = _random(lambda lay, key, device: uniform(lay, key, kind, device), generator)
    return _factory(size, make, **options)


def randn(
    *size: Any, dtype: torch.dtype | None = None, generator: torch.Generator | None = None, **options: Any
) -> DTensor:
    """Standard normal values, the same under every layout (options as for :func:`full`)."""
    kind = dtype or torch.get_default_dtype()
    make = _random(lambda lay, key, device: normal(lay, key, kind, device), generator)
    return _factory(size, make, **options)


def randint(
    *args: Any,
    dtype: torch.dtype = torch.int64,
    generator: torch.Generator | None = None,
    **options: Any,
) -> DTensor:
    """``torch.randint([low,] high, size)`` on a mesh (options as for :func:`full`).

    The values are the same under every layout and number of ranks.
    """
    bounds = dict(zip(("high", "size") if len(args) < 3 else ("low", "high", "size"), args, strict=False))
    bounds |= {name: options.pop(name) for name in ("low", "high", "size") if name in options}
    if len(args) > 3 or not {"high", "size"} <= bounds.keys():
        raise TypeError(f"randint([low,] high, size) was given {list(args)}.")
    low, high = (whole("randint: a bound", n, -math.inf) for n in (bounds.get("low", 0), bounds["high"]))
    if low >= high:
        raise ValueError(f"randint: low must be less than high; got {low} and {high}.")
    if high - low >= 1 << 63:
        raise ValueError(
            f"randint: from {low} to {high} are more numbers than 2^63, up to which can be drawn."
        )
    make = _random(lambda lay, key, device: integers(lay, key, low, high, device).to(dtype), generator)
    return _factory((bounds["size"],), make, **options)


def randperm(
    n: int, *, dtype: torch.dtype = torch.int64, generator: torch.Generator | None = None, **options: Any
) -> DTensor:
    """``torch.randperm`` on a mesh (options as for :func:`full`): the same order under every layout.

    Every rank makes all of it, and keeps its part.
    """

    whole("randperm: n", n)

    def make(lay: Layout, key: Key, device: torch.device) -> torch.Tensor:
        order = bits(torch.arange(n, device=device), key).sort(stable=True).indices
        return order[local_box(lay).slices].to(dtype)

    return _factory((n,), _random(make, generator), **options)


def _random(
    make: Callable[[Layout, Key, torch.device], torch.Tensor], generator: torch.Generator | None
) -> Make:
    def checked(lay: Layout, device: torch.device) -> torch.Tensor:
        if lay.partial:
            raise ValueError(f"Random values cannot be Partial ({lay!r}): use Replicate or Shard.")
        return make(lay, draw_key(lay.mesh, generator), device)

    return checked


# ---- autograd functions of well-known libraries, and the two rules that most functions need
#
# Functions are known by the package they come from and their name, so no library is imported for them.


def elementwise(*args: Any, **kwargs: Any) -> Spec:
    """The rule of a function that works element by element on all tensors it is given, broadcast together.

    >>> espalier.register_rule(MyFunction)(espalier.elementwise)      # doctest: +SKIP

    It has one output, of the shape to which the inputs are broadcast.
    """
    return nonlinear(*args, **kwargs)


def rowwise(x: Operand, *args: Any, **kwargs: Any) -> Spec:
    """The rule of a function that works on each row of its first tensor by itself.

    A row is all that the last dim holds; what else the function is given it uses whole for each row. It has
    one output, of the first tensor's shape.

    >>> espalier.register_rule(MyNorm)(espalier.rowwise)              # doctest: +SKIP
    """
    return _along(x, -1, operands_in(args, kwargs))


def _along(x: Operand, dim: int, others: list[Operand]) -> Spec:
    """Of a function that looks along one dim of the first tensor."""
    at = normal_dim(dim, x.ndim)
    dims = tuple(None if i == at else d for i, d in enumerate(x.dims()))
    return Spec([dims, *((None,) * o.ndim for o in others)], [dims], [x.shape])


def knows(function: type[Function]) -> bool:
    """Whether there is a rule for an autograd function; one of a library's is put into the table."""
    if RULES.get(function.apply) is not None:
        return True
    name = (function.__module__.partition(".")[0], function.__qualname__)
    if name in _RULES:
        RULES.add(function.apply, _RULES[name])
    elif name in _BODIES and RULES.body(function.apply) is None:
        RULES.compose(_BODIES[name], function.apply)
    return name in _RULES


def _masked_softmax(x: Operand, mask: Operand, dim: int) -> Spec:
    """A softmax along a dim (of DeBERTa and its kin)."""
    at = normal_dim(dim, x.ndim)
    dims = x.dims()
    of_mask = letters(mask.shape, x.shape)
    return Spec([dims, of_mask], [dims], [x.shape], blocked=frozenset([dims[at]]))


def _quantized(x: Operand, k: Any, percentile_mode: Any, scale: Operand) -> Spec | None:
    """One scale for all (of I-BERT)."""
    dims = x.dims()
    return Spec([dims, (None,) * scale.ndim], [dims], [x.shape]) if scale.shape.numel() == 1 else None  # type: ignore[attr-defined]


def _of_experts(*operands: Operand) -> Spec:
    """scores, multiplier, selected_experts, masked_gates, mask_for_one: a row is a token (of Phi-MoE)."""
    ins = [("n", *(None,) * (o.ndim - 1)) for o in operands]
    return Spec(ins, [("n", *(None,) * (operands[1].ndim - 1))], [operands[1].shape])


def _unsorted(vectors: Operand, logits: Operand, order: Operand, back: Operand) -> Spec:
    """vectors [b, h, s, d], the others [b, h, s]: put in another order along s (of Reformer)."""
    ins = [("b", "h", None, "d"), *[("b", "h", None)] * 3]
    return Spec(ins, ins[:2], [vectors.shape, logits.shape])


def _expected(
    query_mask: Operand, key_mask: Operand, query: Operand, key: Operand, value: Operand, config: Any
) -> Spec:
    """query [b, n, d], key [b, m, d], value [b, m, e] (of YOSO)."""
    ins = [("b", "n"), ("b", None), ("b", "n", None), ("b", None, None), ("b", None, None)]
    return Spec(ins, [("b", "n", None)], [(*query.shape[:2], value.shape[-1])])


def _dropped(x: torch.Tensor, context: Any) -> torch.Tensor:
    """A dropout whose mask a context may keep (of SEW-D)."""
    get_mask = sys.modules["transformers.models.sew_d.modeling_sew_d"].get_mask
    mask, rate = get_mask(x, context)
    return x.masked_fill(mask, 0) / (1 - rate) if rate > 0 else x


def _batch_norm(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    eps: float,
    momentum: float,
    *of_group: Any,
) -> torch.Tensor:
    """Batch norms of DTensors are those of the whole batch anyway."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


_ELEMENTWISE = {
    "transformers": "GeLUFunction SqrtBoundDerivative floor_ste round_ste",
    "timm": (
        "SwishAutoFn MishAutoFn HardSigmoidAutoFn HardSwishAutoFn HardMishAutoFn SwishJitAutoFn "
        "MishJitAutoFn HardSigmoidJitAutoFn HardSwishJitAutoFn HardMishJitAutoFn"
    ),
    "efficientnet_pytorch": "SwishImplementation",
}
_RULES: dict[tuple[str, str], RuleFunction] = {
    **{(package, name): elementwise for package, names in _ELEMENTWISE.items() for name in names.split()},
    ("transformers", "ActQuant"): rowwise,
    ("transformers", "XSoftmax"): _masked_softmax,
    ("transformers", "SymmetricQuantFunction"): _quantized,
    ("transformers", "PhimoeMultiplier"): _of_experts,
    ("transformers", "ReverseSort"): _unsorted,
    ("transformers", "YosoCumulation"): _expected,
}
_BODIES: dict[tuple[str, str], Callable[..., Any]] = {
    ("transformers", "XDropout"): _dropped,
    ("torch", "SyncBatchNorm"): _batch_norm,
}


# ---- register_sharding: torch's way to describe an operator, as acceptable placements along one axis


Way = tuple[Sequence[Placement | None], Sequence[Placement | None]]
ShardingFunction = Callable[..., Sequence[Way]]


def register_sharding(op: Any) -> Callable[[ShardingFunction], ShardingFunction]:
    """Teach the dispatcher an operator by the placements that it may have along one axis of a mesh.

    Args:
        op: an overload of ``torch.ops``, or several. For one of aten's, the public functions of its name are
            taught too.

    The decorated function has the operator's parameters; where the call has a tensor it gets its global
    ``shape``, ``ndim`` and ``dtype``. It returns pairs of lists: placements of the outputs, and of the inputs
    (``None`` for arguments that are no tensors). Everything replicated is always possible.

    Raises:
        ValueError: the operator writes to its inputs, or the placements do not fit the call.
    """
    ops = op if isinstance(op, list | tuple) else [op]
    for one in ops:
        expect("register_sharding: op", one, OpOverload, "an overload, such as torch.ops.aten.add.Tensor")
        if schema_of(one).is_mutable:
            raise ValueError(f"register_sharding: {one} writes to its inputs; use espalier.register_rule.")

    def register(function: ShardingFunction) -> ShardingFunction:
        for one in ops:
            space, name = schema_of(one).name.split("::")
            public = spellings(name) if space == "aten" else []
            register_rule(one, one.overloadpacket, *public)(_rule(one, function))
        return function

    return register


def _rule(op: Any, function: ShardingFunction) -> RuleFunction:
    def rule(*args: Any, **kwargs: Any) -> Spec:
        values = leaves((args, kwargs))
        places = [i for i, x in enumerate(values) if isinstance(x, Operand)]
        ins = [values[i].shape for i in places]
        args_on_meta, kwargs_on_meta = tree_map(_on_meta, (args, kwargs))
        shapes = [x.shape for x in tensors_in(op(*args_on_meta, **kwargs_on_meta))]
        ways = []
        for outs, states_in in function(*args, **kwargs):
            wanted = [states_in[i] for i in places if i < len(states_in)]
            if len(outs) != len(shapes) or len(wanted) != len(ins) or None in (*outs, *wanted):
                raise ValueError(
                    f"register_sharding for {op}: the call has {len(values)} argument(s), tensors at "
                    f"{places}, and {len(shapes)} output(s); got placements {list(states_in)} and "
                    f"{list(outs)}."
                )
            ways.append((_states(wanted, ins), _states(outs, shapes)))
        return Spec(
            ins=[(None,) * len(shape) for shape in ins],
            outs=[(None,) * len(shape) for shape in shapes],
            shapes=[tuple(shape) for shape in shapes],
            ways=ways,
        )

    return rule


def _on_meta(x: Any) -> Any:
    return torch.empty(x.shape, dtype=x.dtype, device="meta") if isinstance(x, Operand) else x


def _states(placements: Sequence[Any], shapes: Sequence[Sequence[int]]) -> tuple[AxisState, ...]:
    states: list[AxisState] = []
    for placement, shape in zip(placements, shapes, strict=True):
        if placement.is_shard():
            states.append(normal_dim(placement.dim, len(shape), f"{placement}: dim"))
        else:
            states.append(placement.reduce_op if placement.is_partial() else R)
    return tuple(states)
