"""What a run without data tells of a program: the work that it takes, and each operation found out once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import nn

from espalier.comm.dry import know, values_of, without_data
from espalier.meanwhile import having
from espalier.tensor.dry_autocast import as_if_for_cpu
from espalier.tensor.live_memory import unseen
from espalier.tensor.observers import site, user_frame
from espalier.torch_private import (
    DispatchMode,
    FakeTensor,
    FakeTensorMode,
    can_decompose,
    dispatch_mode_stack,
    memory_id,
    raw,
    schema_of,
    without_torch_functions,
)
from espalier.trees import ATOMS, tensors_in, tree_map

# ---- what calls cost: floating-point operations and bytes, from shapes alone


# torch's counter brings Triton, whose import takes a tenth of a second: not before something is counted
def _forward_flops(q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_flop_count

    return int(sdpa_flop_count(q, _as_many_heads(q, k), _as_many_heads(q, v)))


def _backward_flops(grad: Any, q: Any, k: Any, v: Any, *_: Any, **__: Any) -> int:
    from torch.utils.flop_counter import sdpa_backward_flop_count

    return int(sdpa_backward_flop_count(grad, q, _as_many_heads(q, k), _as_many_heads(q, v)))


def _as_many_heads(q: Sequence[int], x: Sequence[int]) -> tuple[int, ...]:
    """The shape of keys or values that groups of queries share, one for each: torch 2.11 counts no others."""
    return (x[0], q[1], *x[2:])


def _convolution_backward_flops(grad: Any, x: Any, weight: Any, *rest: Any, **_: Any) -> int:
    """Of one with groups torch counts the weights' gradients once for each group."""
    from torch.utils.flop_counter import conv_flop_count

    is_transposed, asked = rest[4], rest[7]
    return sum(asked[:2]) * int(conv_flop_count(x, weight, grad, is_transposed))


def _grouped_flops(a: Any, b: Any, *_: Any, **__: Any) -> int:
    """Of products of groups of rows, each with a matrix of its own."""
    rows = a.numel() if len(a) == 2 or len(b) == 3 else a[1:].numel()
    return 2 * int(rows) * int(b[-1])


def _grouped_product(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Of tensors without data; where both have two dims the contracted one is in groups."""
    sizes = [*a.shape[-2:-1], *b.shape[-1:]]
    if a.ndim == b.ndim:
        sizes = [len(a) if a.ndim == 3 or offs is None else len(offs), *sizes]
    like = b if type(b) is FakeTensor else a
    return like.new_empty(sizes, dtype=out_dtype or a.dtype)


# attention's kernels: the CPU's, which dry runs use (see ``tensor.rules.attention_blocks``), and devices'
_ATTENTION = [
    f"_scaled_dot_product_{kernel}"
    for kernel in ("flash_attention_for_cpu", "flash_attention", "efficient_attention", "cudnn_attention")
]
# what torch's counter does not know: the first of these, grouped queries (in torch 2.11), experts' products,
# gradients of convolutions with groups
UNCOUNTED: dict[Any, Callable[..., int]] = {
    torch.ops.aten.convolution_backward: _convolution_backward_flops,
    torch.ops.aten._grouped_mm: _grouped_flops,
    **{getattr(torch.ops.aten, name): _forward_flops for name in _ATTENTION},
    **{getattr(torch.ops.aten, f"{name}_backward"): _backward_flops for name in _ATTENTION},
}
_FOLLOWED = 2**21  # elements of tensors whose values are computed
_RANDOM = torch.Tag.nondeterministic_seeded
_SIZED = torch.Tag.dynamic_output_shape
_MASKS = (torch.bool, torch.uint8)
_META = torch.device("meta")


class OpCost(NamedTuple):
    """What a call costs.

    Attributes:
        flops: floating-point operations.
        moved: bytes read and written, if nothing stays in caches.
        kept: bytes of what it made.
    """

    flops: int = 0
    moved: int = 0
    kept: int = 0

    def plus(self, other: OpCost) -> OpCost:
        """The sum."""
        return OpCost(self.flops + other.flops, self.moved + other.moved, self.kept + other.kept)


class CostMode(DispatchMode):
    """Adds up the work of torch's operations, call by call.

    Attributes:
        total: since the last :meth:`begin`.
        random: whether one of these drew random numbers.
        sized: whether one gave as many numbers as values said (``nonzero``, an index that is a mask).
    """

    def __init__(self) -> None:
        super().__init__()
        self.total, self.random, self.sized = OpCost(), False, False
        self._nested = False
        self._counts = flop_counts()

    def begin(self) -> None:
        """A call begins."""
        if not self._nested:
            self.total, self.random, self.sized = OpCost(), False, False

    @contextmanager
    def as_one(self) -> Iterator[None]:
        """While open, all is one call's work."""
        self.begin()
        with having(self, _nested=True):
            yield

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        out = remembered(func, args, kwargs)
        self.random = self.random or _RANDOM in func.tags
        packet = func.overloadpacket
        if _SIZED in func.tags and (packet is not torch.ops.aten.index or has_mask(args[1])):
            self.sized = True
        count = self._counts.get(packet)
        flops = int(count(*args, **kwargs, out_val=out)) if count is not None else 0
        is_view = any(
            a.alias_info is not None and not a.alias_info.is_write for a in schema_of(func).arguments
        )
        written = 0 if is_view else sum(map(_held, tensors_in([out])))
        read = 0 if is_view else sum(map(_held, tensors_in([args, kwargs])))
        self.total = self.total.plus(OpCost(flops, written + read, written))
        return out


def has_mask(indices: Any) -> bool:
    """Whether an index gives as many numbers as its values say; one of numbers gives as many as it has."""
    return any(x.dtype in _MASKS for x in tensors_in([indices]))


def _held(x: torch.Tensor) -> int:
    """The bytes of a tensor; of a sparse one torch does not say."""
    return x.nbytes if x.layout is torch.strided else 0


# ---- operations on tensors without data, each found out once


class _Bare(NamedTuple):
    """A tensor without data, as an argument."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


class _Made(NamedTuple):
    """What an operation gives: shapes, strides and types of new tensors, and its FLOPs.

    Attributes:
        offset: of a view the place of its first number after that of the first argument; else None.
    """

    kind: type
    outputs: tuple[_Bare, ...]
    flops: int
    offset: int | None = None


def remembered(func: Any, args: Any, kwargs: Any) -> Any:
    """What an operation gives, found out once where it makes new tensors of some that have no data."""
    if func is torch.ops.aten._grouped_mm.default and any(type(x) is FakeTensor for x in args[:2]):
        return _grouped_product(*args, **kwargs)  # torch makes that of bfloat16 alone
    out = _remembered(func, args, kwargs)
    return func(*args, **kwargs) if out is None else out[0]


def _remembered(func: Any, args: Any, kwargs: Any) -> tuple[Any, _Made] | None:
    """What an operation gives and what is known of it; None where it must be called."""
    tensors: list[torch.Tensor] = []
    is_view = _is_view(func)
    if not (is_view or _is_plain(func)):
        return None
    if is_view and type(args[0]) is not FakeTensor:
        return None  # of others torch makes them at once
    with without_torch_functions():
        described = _described((args, tuple(kwargs.items())), tensors)
        mode, device = _home(tensors)
        if described is None or device is None:
            return None
        made = _made(func, described, device, torch.get_default_dtype(), torch.is_inference_mode_enabled())
        if made is None:
            return None
        if made.offset is None:
            new = [torch.empty_strided(*sizes, dtype=dtype, device=_META) for *sizes, dtype in made.outputs]
        else:
            (shape, stride, dtype), at = made.outputs[0], tensors[0].storage_offset() + made.offset
            bare = torch.empty(0, dtype=dtype, device=_META)
            new = [bare.set_(tensors[0].untyped_storage(), at, shape, stride)]
        if mode is not None:
            new = [FakeTensor(mode, x, device) for x in new]
    return new[0] if made.kind is torch.Tensor else made.kind(new), made


def _home(tensors: list[torch.Tensor]) -> tuple[FakeTensorMode | None, torch.device | None]:
    """Where what is made of tensors lies: the mode of torch's fake ones, if some are; their device.

    That is ``meta`` for tensors without data. Beside fake ones others may have data. No device: they differ,
    or all have data.
    """
    mode = next((x.fake_mode for x in tensors if type(x) is FakeTensor), None)
    if mode is None:
        return None, _META if tensors and all(x.is_meta for x in tensors) else None
    device: torch.device | None = None
    for x in tensors:
        if type(x) not in (FakeTensor, torch.Tensor, nn.Parameter):
            return mode, None
        on = x.fake_device if type(x) is FakeTensor else x.device
        if on != (device or on):
            return mode, None
        device = on
    return mode, device


@cache
def _is_plain(func: Any) -> bool:
    """Whether an operation of torch draws nothing, writes to nothing, and gives no view."""
    schema = schema_of(func)
    changes = any(a.alias_info is not None for a in (*schema.arguments, *schema.returns))
    return func.namespace == "aten" and _RANDOM not in func.tags and not changes


@cache
def _is_in_place(func: Any) -> bool:
    """Whether an operation of torch writes to its first argument, number by number, and draws nothing."""
    writes = schema_of(func).is_mutable and func.overloadpacket.__name__.endswith("_")
    return writes and torch.Tag.pointwise in func.tags and _RANDOM not in func.tags


@cache
def _is_view(func: Any) -> bool:
    """Whether an operation of torch gives one view of its first argument, wherever that begins."""
    if func is torch.ops.aten._unsafe_view.default:
        return True  # of the same memory, though torch does not say so
    arguments, returns = schema_of(func).arguments, schema_of(func).returns
    if func.namespace != "aten" or func.overloadpacket is torch.ops.aten.as_strided or len(returns) != 1:
        return False
    aliased = [i for i, a in enumerate(arguments) if a.alias_info is not None]
    info = returns[0].alias_info
    is_one = info is not None and not info.is_write and str(returns[0].type) == "Tensor"
    return is_one and aliased == [0] and not schema_of(func).is_mutable


@lru_cache(maxsize=16384)
def _made(
    func: Any, described: Any, device: torch.device, default: torch.dtype, inference: bool
) -> _Made | None:
    """What an operation makes of arguments that are described; None where it must be asked each time.

    Args:
        device: of tensors; another than ``meta`` for torch's fake tensors.
        default, inference: what else it hangs on, as it is now.
    """
    fake = nullcontext() if device == _META else _fake_mode()
    inputs: list[torch.Tensor] = []

    def undescribed(x: Any) -> Any:
        if type(x) is _Bare:
            inputs.append(torch.empty_strided(x.shape, x.stride, dtype=x.dtype, device=device))
            return inputs[-1]
        kind, content = x
        return kind(map(undescribed, content)) if kind in (tuple, list) else content

    with unseen(), without_torch_functions(), fake:
        args, kwargs = undescribed(described)
        try:
            out = func(*args, **dict(kwargs))
        except Exception:
            return None  # who asks for it is told why
        count = flop_counts().get(func.overloadpacket)
        flops = 0 if count is None else int(count(*args, **dict(kwargs), out_val=out))
        return _as_view(out, inputs[0], flops) if _is_view(func) else _as_made(out, inputs, flops)


@cache
def _fake_mode() -> FakeTensorMode:
    """Made once: torch notes of each where in a program it was made, which takes long."""
    return FakeTensorMode(allow_non_fake_inputs=True)


@cache
def flop_counts() -> Mapping[Any, Callable[..., Any]]:
    """What counts the FLOPs of operations."""
    from torch.utils.flop_counter import FlopCounterMode

    return FlopCounterMode(display=False, custom_mapping=UNCOUNTED).flop_registry


class Recalled(DispatchMode):
    """While open, counts FLOPs; what torch makes of meta tensors is found out once for equal arguments.

    A step does the same for each block and each micro-batch, and many of torch's operations take longer
    without data than with it. Views, writes and draws are left to torch. What is computed of small tensors of
    integers whose values are known (see :func:`~espalier.comm.dry.know`) has values, too.

    Attributes:
        flops: floating-point operations, as torch's own counter has them, which takes operations apart.
    """

    looks_on = True

    def __init__(self) -> None:
        super().__init__()
        self.flops = 0
        self._counts = flop_counts()
        self._ways: dict[Any, tuple[Callable[..., Any], bool, bool]] = {}
        self._open: list[AbstractContextManager[None]] = []

    def __enter__(self) -> Recalled:
        self._open.append(as_if_for_cpu())
        self._open[-1].__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._open.pop().__exit__(*error)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = self._ways.get(func)
        if known is None:
            follows = func.namespace == "aten" and func is not torch.ops.aten._local_scalar_dense.default
            way = self._way(func)
            known = way, bool(schema_of(func).is_mutable), follows and way != self._apart
            self._ways[func] = known
        (way, writes, follows), kwargs = known, kwargs or {}
        if not follows or (writes and isinstance(args[0], torch.Tensor) and not args[0].is_meta):
            return way(func, args, kwargs)
        inputs = _without_floats(args, kwargs)
        values = None if inputs is None else list(map(values_of, inputs))
        if values is not None and all(x is not None for x in values):
            return self._computed(way, func, args, kwargs, values)
        out = way(func, args, kwargs)
        if writes:  # from now on nobody knows what is there
            for x in tensors_in([args[:1], kwargs.get("out")]):
                if x.is_meta and not x.is_floating_point():
                    know(x, None)
        return out

    def _computed(
        self, way: Callable[..., Any], func: Any, args: Any, kwargs: Any, known: list[torch.Tensor | None]
    ) -> Any:
        """What an operation gives whose inputs' values are known."""
        if _RANDOM in func.tags or func.overloadpacket.__name__.startswith(("empty", "new_empty")):
            return way(func, args, kwargs)
        left = iter(known)
        with raw():
            real = tree_map(lambda x: next(left) if isinstance(x, torch.Tensor) else x, (args, kwargs))
            if "device" in real[1]:
                real[1]["device"] = torch.device("cpu")
            if schema_of(func).is_mutable:
                out = way(func, args, kwargs)
                func(*real[0], **real[1])
                return out
            try:
                out = way(func, args, kwargs)
            except (NotImplementedError, RuntimeError):  # torch cannot tell shapes that hang on values
                return without_data(func(*real[0], **real[1]))
            made = [x for x in tensors_in([out]) if x.is_meta and not x.is_floating_point()]
            seen = {memory_id(x) for x in tensors_in([args, kwargs])}
            if any(x.numel() <= _FOLLOWED and memory_id(x) not in seen for x in made):
                try:
                    computed = func(*real[0], **real[1])
                except NotImplementedError:  # of such a dtype another device does it
                    return out
                of = [x for x in tensors_in([computed]) if not x.is_floating_point()]
                for x, values in zip(made, of, strict=True):
                    if x.numel() <= _FOLLOWED and memory_id(x) not in seen:
                        know(x, values)
        return out

    def _way(self, func: Any) -> Callable[..., Any]:
        """How an operation is done."""
        if func is torch.ops.aten._local_scalar_dense.default:
            return _value
        if func is torch.ops.aten._grouped_mm.default:
            return self._grouped
        if func.overloadpacket not in self._counts and can_decompose(func):
            return self._apart
        if _is_in_place(func):
            return self._written
        return self._recalled if _is_plain(func) else self._called

    def _called(self, func: Any, args: Any, kwargs: Any) -> Any:
        out = func(*args, **kwargs)
        count = self._counts.get(func.overloadpacket)
        if count is not None:
            self.flops += int(count(*args, **kwargs, out_val=out))
        return out

    def _grouped(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A product by groups of rows: without data torch makes that of bfloat16 alone."""
        if not args[0].is_meta:
            return self._called(func, args, kwargs)
        out = _grouped_product(*args, **kwargs)
        self.flops += int(self._counts[func.overloadpacket](*args, **kwargs, out_val=out))
        return out

    def _written(self, func: Any, args: Any, kwargs: Any) -> Any:
        """A write to each number of a tensor; nothing is asked where what is given is like the tensor."""
        into = args[0]
        if into.is_floating_point() and into.is_meta and into.layout is torch.strided:
            described = into.shape, into.dtype
            tensors = tensors_in([args, kwargs])
            if all(x.is_meta and (x.shape, x.dtype) == described for x in tensors):
                return into
        return self._called(func, args, kwargs)

    def _apart(self, func: Any, args: Any, kwargs: Any) -> Any:
        with self:
            return func.decompose(*args, **kwargs)

    def _recalled(self, func: Any, args: Any, kwargs: Any) -> Any:
        known = _remembered(func, args, kwargs)
        if known is None:
            return self._called(func, args, kwargs)
        out, made = known
        self.flops += made.flops
        return out


def is_followed() -> bool:
    """Whether a :class:`Recalled` is open."""
    return any(isinstance(mode, Recalled) for mode in dispatch_mode_stack())


class NoValueError(ValueError, RuntimeError):
    """A program asks for a value in a dry run."""


def _value(func: Any, args: Any, kwargs: Any) -> Any:
    """The value of a tensor that has one."""
    with raw():
        values = values_of(args[0])
        if values is not None:
            return func(values)
    raise NoValueError(
        f"A dry run has no values (all is on the meta device), and {site(user_frame()[1])} asks for one. "
        "Known are masks and other integers that the batch has with their values (on the CPU, not as meta "
        "tensors), and what is computed of them: batch['attention_mask'] = torch.ones(...). Else let the "
        "model not ask for it, or branch on x.device.type == 'meta'."
    )


def _without_floats(args: Any, kwargs: Any) -> list[torch.Tensor] | None:
    """The tensors that an operation is given; None where one is of floats, or so large that none looks in."""
    inputs = []
    for x in (*args, *kwargs.values()):
        for y in x if isinstance(x, tuple | list) else (x,):
            if isinstance(y, torch.Tensor):
                if y.dtype.is_floating_point or y.dtype.is_complex:
                    return None
                inputs.append(y)
    return inputs


_ATOMS = tuple(ATOMS)


def _described(x: Any, tensors: list[torch.Tensor]) -> Any:
    """What tells an argument apart; None where it may not be described.

    Args:
        tensors: that were met; these are added.
    """
    if type(x) in ATOMS:
        return type(x), x
    if isinstance(x, torch.Tensor):
        if x.layout is not torch.strided or x.dtype.is_complex:
            return None
        if type(x) is FakeTensor and x.constant is not None:
            return None
        tensors.append(x)
        return _Bare(tuple(x.shape), x.stride(), x.dtype)
    if isinstance(x, tuple | list):
        parts = []
        for part in x:
            described = _described(part, tensors)
            if described is None:
                return None
            parts.append(described)
        return list if isinstance(x, list) else tuple, tuple(parts)
    return (type(x), x) if isinstance(x, _ATOMS) else None


def _spanned(x: torch.Tensor) -> int:
    """The bytes from a tensor's first number to its last."""
    last = sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True))
    return (last + 1) * x.itemsize if x.numel() else 0


def _as_made(out: Any, inputs: list[torch.Tensor], flops: int) -> _Made | None:
    """What was given, if that is new tensors like the inputs, each with its own memory and no more."""
    outputs = list(out) if isinstance(out, tuple | list) else [out]
    seen = {memory_id(x) for x in inputs}
    for x in outputs:
        if type(x) is not type(inputs[0]) or x.device != inputs[0].device or x.dtype.is_complex:
            return None
        if x.layout is not torch.strided:
            return None
        if type(x) is FakeTensor and x.constant is not None:
            return None
        storage = x.untyped_storage()
        if memory_id(storage) in seen or x.storage_offset() or storage.nbytes() != _spanned(x):
            return None
        seen.add(memory_id(storage))
    kind = torch.Tensor if isinstance(out, torch.Tensor) else type(out)
    return _Made(kind, tuple(_Bare(tuple(x.shape), x.stride(), x.dtype) for x in outputs), flops)


def _as_view(out: Any, first: torch.Tensor, flops: int) -> _Made | None:
    """What was given, if that is a view of the first argument, of the same numbers."""
    if type(out) is not type(first) or out.dtype != first.dtype or out.device != first.device:
        return None
    if memory_id(out) != memory_id(first):
        return None
    bare = _Bare(tuple(out.shape), out.stride(), out.dtype)
    return _Made(torch.Tensor, (bare,), flops, int(out.storage_offset()))
