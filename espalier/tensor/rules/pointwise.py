"""Functions that work element by element, with broadcasting."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import torch

from espalier.comm import collectives, move
from espalier.device import MOVES
from espalier.layout import Layout, same_data
from espalier.layout.layout import R
from espalier.sharding.spec import (
    Dims,
    Letter,
    Operand,
    Placed,
    RuleFunction,
    Spec,
    rule,
    rule_in_place,
    rule_with,
    special,
)
from espalier.tensor.dtensor import DTensor, layout_of, plain, stamp
from espalier.tensor.loans import StandIn, await_values, loans_in, refresh
from espalier.tensor.meshes import brought
from espalier.tensor.told import note_zeroed
from espalier.torch_private import check_and_unscale_, foreach_norms, plain_call, raw
from espalier.trees import leaves, tensors_in, tree_map

# f(x) linear in x: a Partial passes through
LINEAR = """
    neg negative positive clone detach alias_copy detach_copy resolve_conj
    resolve_neg conj conj_physical
""" + " ".join(MOVES)

NONLINEAR = """
    abs absolute acos acosh angle arccos arcsin arctan asin asinh atan atanh bitwise_not ceil
    cos cosh deg2rad digamma erf erfc erfinv exp exp2 expm1 fix floor frac isfinite isinf isnan
    isneginf isposinf isreal lgamma log log10 log1p log2 logical_not logit mvlgamma nan_to_num
    polygamma rad2deg reciprocal round rsqrt sgn sigmoid sign signbit sin sinc sinh sqrt square
    tan tanh trunc bool int long short byte char i0 expit entr log_ndtr ndtr ndtri
    relu relu6 elu selu celu gelu silu mish hardtanh hardsigmoid hardswish hardshrink softshrink
    tanhshrink softsign softplus logsigmoid leaky_relu threshold clamp clamp_min clamp_max clip
    invert gammaln psi multigammaln i0e i1 i1e erfcx airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1
    modified_bessel_i0 modified_bessel_i1 modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0
    scaled_modified_bessel_k1 spherical_bessel_j0
"""

# several tensors, no linearity used
BROADCAST = """
    pow float_power atan2 fmod remainder floor_divide maximum minimum fmax fmin hypot copysign nextafter
    logaddexp logaddexp2 logical_and logical_or logical_xor bitwise_and bitwise_or bitwise_xor
    bitwise_left_shift bitwise_right_shift eq ne lt le gt ge greater greater_equal less less_equal
    not_equal xlogy heaviside ldexp isclose mod floordiv and or xor lshift rshift gcd lcm igamma igammac
    gammainc gammaincc xlog1py zeta arctan2 chebyshev_polynomial_t chebyshev_polynomial_u
    chebyshev_polynomial_v chebyshev_polynomial_w hermite_polynomial_h hermite_polynomial_he
    laguerre_polynomial_l legendre_polynomial_p shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u
    shifted_chebyshev_polynomial_v shifted_chebyshev_polynomial_w
"""


def letters(shape: Sequence[int], out: Sequence[int], name: str = "d") -> Dims:
    """Letters of a shape broadcast to ``out``: one per output dim, none where it is stretched."""
    return broadcast([(name, i) for i in range(len(out))], shape, out)


def broadcast(dims: Sequence[Letter | None], shape: Sequence[int], out: Sequence[int]) -> Dims:
    """The same of an ``out`` that has these letters."""
    skip = len(out) - len(shape)
    return tuple(dims[i + skip] if n == out[i + skip] else None for i, n in enumerate(shape))


def elementwise(
    operands: Sequence[Operand], linear: Sequence[tuple[int, ...]] = (), run: Callable[..., Any] | None = None
) -> Spec:
    """The spec of a broadcasting function of these operands."""
    shape = tuple(torch.broadcast_shapes(*(o.shape for o in operands)))
    out = tuple(("d", i) for i in range(len(shape)))
    return Spec([letters(o.shape, shape) for o in operands], [out], [shape], linear=linear, run=run)


def operands_in(*trees: Any) -> list[Operand]:
    """All operands among arguments, in the order of their indices."""
    return sorted(leaves(trees, Operand), key=lambda o: o.index)


# by itself: torch.linalg.polar, from torch 2.14 on, is of matrices
@rule(NONLINEAR, BROADCAST, torch.polar, inplace=True, loose=True)
def nonlinear(*args: Any, **kwargs: Any) -> Spec:
    """No linearity: a Partial is reduced first."""
    return elementwise(operands_in(args, kwargs))


@rule(LINEAR, torch.real, torch.imag, torch.Tensor.real.__get__, torch.Tensor.imag.__get__, loose=True)  # type: ignore[attr-defined]
@rule_in_place("neg_ negative_ conj_physical_", loose=True)
def linear(x: Operand, *args: Any, **kwargs: Any) -> Spec:
    """Linear in its one operand."""
    return elementwise([x], linear=[(0,)])


@rule("contiguous", loose=True)
def contiguous(x: Operand, memory_format: torch.memory_format = torch.contiguous_format) -> Spec:
    """One row of a dim is contiguous wherever it lies; its stride is to tell of the global tensor's too."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        out: torch.Tensor = func(*args, **kwargs)
        strides = torch.empty(out.shape, device="meta").stride()
        if memory_format is not torch.contiguous_format or out.stride() == strides:
            return out
        return out.as_strided(out.shape, strides)

    spec = elementwise([x], linear=[(0,)], run=run)
    spec.when = lambda placed: any(
        n < 2 and n < whole for n, whole in zip(placed.outs[0].local_shape, placed.outs[0].shape, strict=True)
    )
    return spec


@rule_with("to type type_as")
@rule_with("float", torch.float32)
@rule_with("double", torch.float64)
@rule_with("half", torch.float16)
@rule_with("bfloat16", torch.bfloat16)
def casting(default: torch.dtype | None = None) -> RuleFunction:
    """The rule of a cast: a Partial is reduced first, unless the type stays."""

    def rule(x: Operand, *args: Any, **kwargs: Any) -> Spec:
        operands = operands_in(x, args, kwargs)
        words = (*args, *kwargs.values())
        target = next((w for w in words if isinstance(w, torch.dtype)), default or x.dtype)
        if len(operands) == 2:
            target = operands[1].dtype
        named = any(isinstance(w, str | type) and "Tensor" in str(w) for w in words)
        # also where nothing would be rounded away: fewer bytes cross the mesh before such a cast
        linear = [(0,)] if not named and target == x.dtype else []
        ins: list[Dims] = [o.dims(("x", o.index)) for o in operands]
        return Spec(ins, ins[:1], [x.shape], linear=linear, unread=range(1, len(operands)))

    return rule


@rule("prelu", inplace=True, loose=True)
def prelu(x: Operand, weight: Operand) -> Spec:
    """One slope for all, or one for each index of dim 1."""
    dims = x.dims()
    channel = dims[1] if x.ndim > 1 and weight.ndim and x.shape[1] == weight.shape[0] else None
    return Spec([dims, (channel,) * weight.ndim], [dims], [x.shape])


@rule("add sub subtract rsub", inplace=True, loose=True)
def add(x: Any, other: Any, *, alpha: Any = 1) -> Spec:
    """x + other: jointly linear in two tensors, affine in one and a number; 0 is what sum() starts from."""
    operands = operands_in(x, other)
    number = other if isinstance(x, Operand) else x
    if len(operands) == 2:
        return elementwise(operands, linear=[(0, 1)])
    return elementwise(operands, linear=[(0,)] if _is_zero(number) else ())


def _is_zero(number: Any) -> bool:
    """Whether an argument is the number 0 (of a number, the cache of calls knows no more than that)."""
    return isinstance(number, int | float) and not number


@rule("mul multiply", inplace=True, loose=True)
def mul(x: Any, other: Any) -> Spec:
    """x * other: linear in each."""
    operands = operands_in(x, other)
    return elementwise(operands, linear=[(i,) for i in range(len(operands))])


@rule("div divide true_divide truediv", inplace=True, loose=True)
def div(x: Any, other: Any, *, rounding_mode: str | None = None) -> Spec:
    """x / other: linear in x."""
    operands = operands_in(x, other)
    over = isinstance(x, Operand) and rounding_mode is None
    return elementwise(operands, linear=[(x.index,)] if over else ())


@rule(torch.Tensor.__rdiv__, torch.Tensor.__rtruediv__, loose=True)
def reverse_div(x: Any, other: Any) -> Spec:
    """other / x."""
    return elementwise(operands_in(x, other))


@rule_in_place(torch.Tensor.copy_)
def copy_(x: Operand, source: Any, non_blocking: bool = False) -> Spec:
    """x takes the values of source, whatever it held."""
    operands = operands_in(x, source)
    return elementwise(operands, linear=[(0, 1)] if len(operands) == 2 else ())


@rule("where", inplace=True, loose=True)
def where(condition: Operand, x: Any = None, other: Any = None) -> Spec | None:
    """Linear in the two values together."""
    if x is None or other is None:
        return None
    operands = operands_in(condition, x, other)
    if condition.dtype is not torch.bool and isinstance(x, Operand) and x.dtype is torch.bool:
        # the method: x.where(condition, other)
        values = tuple(o.index for o in operands if o is not x)
        return elementwise(operands, linear=[values] if len(values) == 2 or _is_zero(other) else ())
    if len(operands) == 3:
        return elementwise(operands, linear=[(1, 2)])
    return elementwise(operands, linear=[(1,)] if _is_zero(x) or _is_zero(other) else ())


@rule("masked_fill", inplace=True, loose=True)
def masked_fill(x: Operand, mask: Operand, value: Any) -> Spec:
    """Where the mask is, value; linear if that is zero."""
    return elementwise(operands_in(x, mask, value), linear=[(0,)] if _is_zero(value) else ())


@rule("addcmul", inplace=True, loose=True)
def addcmul(x: Operand, t1: Operand, t2: Operand, *, value: Any = 1) -> Spec:
    """x + value * t1 * t2."""
    return elementwise([x, t1, t2], linear=[(0, 1), (0, 2)])


@rule("addcdiv", inplace=True, loose=True)
def addcdiv(x: Operand, t1: Operand, t2: Operand, *, value: Any = 1) -> Spec:
    """x + value * t1 / t2."""
    return elementwise([x, t1, t2], linear=[(0, 1)])


@rule("lerp", inplace=True, loose=True)
def lerp(x: Operand, end: Operand, weight: Any) -> Spec:
    """x + weight * (end - x); in the dtype of x, which is another in averages of rounded weights."""
    spec = elementwise(operands_in(x, end, weight), linear=[(0, 1)], run=_in_dtype_of_first)
    spec.widens = True
    return spec


def _in_dtype_of_first(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
    x, end = args[0], args[1] if len(args) > 1 else kwargs["end"]
    if end.dtype is not x.dtype:
        args, kwargs = (x, end.to(x.dtype), *args[2:]), {k: y for k, y in kwargs.items() if k != "end"}
    return func(*args, **kwargs)


@rule("complex", loose=True)
def complex_(real: Operand, imag: Operand) -> Spec:
    """real + i imag: jointly linear."""
    return elementwise([real, imag], linear=[(0, 1)])


@rule("view_as_real view_as_real_copy", loose=True)
def as_real(x: Operand) -> Spec:
    """Complex numbers as a new last dim of two; linear."""
    return Spec([x.dims()], [(*x.dims(), None)], [(*x.shape, 2)], linear=[(0,)])


@rule("view_as_complex view_as_complex_copy", loose=True)
def as_complex(x: Operand) -> Spec:
    """A last dim of two as complex numbers; linear."""
    dims = x.dims()[:-1]
    return Spec([(*dims, None)], [dims], [x.shape[:-1]], linear=[(0,)])


@rule("frexp", loose=True)
def frexp(x: Operand) -> Spec:
    """Mantissa and exponent."""
    return Spec([x.dims()], [x.dims()] * 2, [x.shape] * 2)


@rule_in_place("zero_", loose=True)
def zero_(x: Operand) -> Spec:
    """Zeros are zeros in every layout, a Partial too."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        note_zeroed(args[0] if args else kwargs["input"])
        return func(*args, **kwargs)

    return elementwise([x], linear=[(0,)], run=run)


@rule_in_place(torch.Tensor.fill_, loose=True)
def fill_(x: Operand, value: Any) -> Spec:
    """One value everywhere; where x is Partial, coordinate 0 takes it and the others zero."""

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
        lay = placed.outs[0]
        value = args[1] if len(args) > 1 else kwargs["value"]
        if isinstance(value, int | float) and not value:
            note_zeroed(args[0])
        away = any(lay.mesh.coordinate[a] for a in lay.partial)
        return args[0].fill_(value * 0 if away else value)

    averaged = any(x.layout.axes[a] != "sum" for a in x.layout.partial)
    return elementwise(operands_in(x, value), linear=[] if averaged else [(0,)], run=run)


@rule(torch.functional.broadcast_tensors, loose=True)
def broadcast_tensors(*tensors: Any) -> Spec:
    """Each stretched to the shape of all: a shard of one is stretched to a shard."""
    operands = operands_in(tensors)
    spec = elementwise(operands)
    n = len(operands)

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        # torch gives back what has the shape already: on some ranks only, and it may be plain
        return tuple([x.view_as(x) if any(x is a for a in args) else x for x in func(*args)])

    return Spec(spec.ins, [*spec.outs] * n, [*spec.shapes] * n, run=run)


@rule("zeros_like ones_like empty_like full_like", loose=True)
def like(x: Operand, *args: Any, **kwargs: Any) -> Spec:
    """zeros_like and friends: the layout of x, where it is Partial replicated."""
    return elementwise([x])


# ---- torch._foreach_* and torch._fused_*: what optimizers call on lists of tensors
#
# Both work element by element, so where the tensors at one place of all lists lie alike, the call runs on
# the local tensors. Where they do not, the tensors of the later lists are brought to the layout of the first;
# and beside a plain one of the first, which is whole, to all ranks. What is Partial (a gradient by hand) is
# summed; where it is written to, its addends are then those of the result.


@special(
    *(
        getattr(torch, name)
        for name in dir(torch)
        if name.startswith(("_foreach_", "_fused_")) and callable(getattr(torch, name))
    )
)
def foreach(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """An elementwise function over lists of tensors."""
    name = func.__name__
    written = name.endswith("_")
    if name == "_foreach_zero_":
        for x in args[0]:
            note_zeroed(x)
    if name.startswith("_foreach_lerp") and len(args) > 1:  # as lerp of two tensors
        ends = [y.to(x.dtype) for x, y in zip(args[0], args[1], strict=True)]
        args = (args[0], ends, *args[2:])
    tensors = tensors_in((args, kwargs))
    await_values(tensors)
    if not written and loans_in(tensors):
        args, kwargs = tree_map(partial(_read, func), (args, kwargs))
    if len({x._layout.mesh for x in tensors if type(x) is DTensor}) > 1:
        args = tuple(map(_known_to_all, args))
        kwargs = {name: _known_to_all(x) for name, x in kwargs.items()}
    layouts = [x._layout if type(x) is DTensor else None for x in args[0]]
    args = tuple(map(_whole_scalar, args))
    kwargs = {name: _whole_scalar(x) for name, x in kwargs.items()}
    if not _alike((*args, *kwargs.values()), layouts):
        if not written:
            layouts = [_as_others(i, lay, args) for i, lay in enumerate(layouts)]
        layouts = [None if lay is None else _firm(lay) for lay in layouts]
        # fused optimizers write all lists but the gradients, the others only the first
        fused, given = name.startswith("_fused_"), args
        writes = [written and (i != 1 if fused else i == 0) for i in range(len(args))]
        with raw():
            args = tuple(_aligned(a, layouts, fused and w) for a, w in zip(args, writes, strict=True))
            kwargs = {k: _aligned(a, layouts, False) for k, a in kwargs.items()}
        if written:
            out = plain_call(func, types, args, kwargs)
            for before, after, w in zip(given, args, writes, strict=True):
                if w and before is not after:
                    _write_back(before, after, layouts)
            return None if out is None else type(out)(given[0])
    out = plain_call(func, types, args, kwargs)
    if isinstance(out, tuple | list) and not written:
        for x, lay in zip(out, layouts, strict=False):
            if lay is not None:
                stamp(x, lay)
    return out


def _read(func: Callable[..., Any], x: Any) -> Any:
    """What a call computes with in place of a loan."""
    if type(x) is not DTensor or x._layout.own is x._layout:
        return x
    source = x._source  # type: ignore[attr-defined]
    if isinstance(source, StandIn):
        return source.stand_in(func)
    refresh(x)
    with raw():
        return stamp(x.view_as(x), x._layout.own)


def _alike(lists: tuple[Any, ...], layouts: list[Layout | None]) -> bool:
    """Whether nothing has to move: all lists of tensors lie as the first, none is Partial."""
    if not all(lay is None or lay.is_firm for lay in layouts):
        return False
    for a in lists:
        if isinstance(a, tuple | list) and len(a) == len(layouts) and a and isinstance(a[0], torch.Tensor):
            layouts_of_a = [x._layout if type(x) is DTensor else None for x in a]
            if layouts_of_a != layouts and not all(
                lay is None and not x.ndim for lay, x in zip(layouts_of_a, a, strict=True)
            ):
                return False
    return True


def _firm(layout: Layout) -> Layout:
    """Without Partials: these functions are not linear."""
    axes = tuple(s if isinstance(s, int) or s == "D" else R for s in layout.axes)
    return Layout.of(layout.mesh, axes, layout.cuts, layout.shape)


def _whole(x: DTensor) -> torch.Tensor:
    return plain(move(x, x._layout, Layout.replicated(x._layout.mesh, x._layout.shape)))


def _known_to_all(x: Any) -> Any:
    """One tensor for all of a list, where they lie in several stages."""
    return brought(x, x._layout.mesh.outermost) if type(x) is DTensor else x


def _whole_scalar(x: Any) -> Any:
    """One tensor for all of a list, a factor say, as a number."""
    if type(x) is not DTensor:
        return x
    with raw():
        return _whole(x)


def _as_others(i: int, layout: Layout | None, lists: tuple[Any, ...]) -> Layout | None:
    """The layout of the first list's tensor at a place; of a plain one that of its like in another list."""
    if layout is not None:
        return layout
    for a in lists[1:]:
        x = a[i] if isinstance(a, tuple | list) and len(a) == len(lists[0]) else None
        if type(x) is DTensor and x.shape == lists[0][i].shape:
            return x._layout
    return None


def _broadcast(layout: Layout, shape: Sequence[int]) -> Layout:
    """That of a tensor of another shape which meets one that lies so (a factor, say, or one for each row)."""
    before = layout.ndim - len(shape)
    if before < 0:
        return Layout.replicated(layout.mesh, shape)
    same = [n == layout.shape[before + dim] for dim, n in enumerate(shape)]
    cuts = tuple(layout.cuts[before + dim] if is_same else () for dim, is_same in enumerate(same))
    axes = [s - before if isinstance(s, int) and s >= before and same[s - before] else R for s in layout.axes]
    return Layout.of(layout.mesh, tuple(axes), cuts, tuple(shape))


def _aligned(a: Any, layouts: list[Layout | None], written: bool) -> Any:
    if not isinstance(a, tuple | list) or len(a) != len(layouts):
        return a
    out = []
    for x, lay in zip(a, layouts, strict=True):
        if type(x) is DTensor and lay is None:
            if written:
                raise ValueError(
                    f"A call on lists writes to a DTensor that lies as {x._layout!r} beside a plain tensor: "
                    "of each place all must be DTensors, or none."
                )
            out.append(_whole(x))
            continue
        if not isinstance(x, torch.Tensor) or lay is None or (type(x) is not DTensor and x.ndim == 0):
            out.append(x)
            continue
        if type(x) is DTensor and x._layout.mesh is not lay.mesh and not written:
            x = brought(x, lay.mesh)
        if type(x) is not DTensor and not lay.mesh.is_member:  # of another stage
            out.append(torch.empty(lay.local_shape, dtype=x.dtype, device="meta"))
            continue
        layout = layout_of(x, lay.mesh)
        if layout.shape != lay.shape and not written:
            lay = _broadcast(lay, layout.shape)
        if layout is not lay and layout.shape == lay.shape and not same_data(layout, lay):
            x = move(x, layout, lay)
        out.append(x)
    return type(a)(out) if type(a) in (tuple, list) else out


def _write_back(before: Sequence[Any], after: Sequence[Any], layouts: Sequence[Layout | None]) -> None:
    """What was written to tensors in other layouts, to those that they are of: a sum's addends, or states."""
    for x, moved, lay in zip(before, after, layouts, strict=True):
        if moved is x or lay is None:
            continue
        if type(x) is DTensor:
            x.copy_(stamp(moved, lay))
        else:
            x.copy_(move(moved, lay, layout_of(x, lay.mesh)))


@special(foreach_norms)
def foreach_norm(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The norm of each tensor, global."""
    ord_ = args[1] if len(args) > 1 else kwargs.get("ord", 2)
    return tuple(torch.linalg.vector_norm(x, ord_, dtype=kwargs.get("dtype")) for x in args[0])


@special(check_and_unscale_)
def unscale(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """GradScaler's check: an overflow anywhere, in another stage too, is an overflow everywhere."""
    grads, overflow, scale = args
    with raw():
        if here := [x for x in grads if not x.is_meta]:
            func(here, overflow, scale)
        for x in grads:
            if type(x) is DTensor:
                mesh = x._layout.mesh.outermost
                for axis in range(mesh.ndim):
                    overflow.copy_(collectives.all_reduce(overflow, mesh, axis, "max"))
                break
    return None
