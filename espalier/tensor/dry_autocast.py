"""Autocast for tensors without data.

``torch.autocast`` casts what lies on the device it is opened for, and the ``meta`` device is none of these.
While :class:`DryAutocast` is open, calls on meta tensors are cast as autocast casts them on the CPU, where
it is open there. There is no second table of what is cast: torch is asked once for each operation and its
inputs' dtypes, with tensors that pretend to lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.library import Library, fallthrough_kernel

from espalier.torch_private import (
    AUTOCAST_KEY,
    BELOW_AUTOCAST,
    DispatchMode,
    FakeTensorMode,
    autocast_operators,
    disable_modes,
    forget_library,
    is_a_view,
    past_autocast_key,
    with_autocast_key,
    without_torch_functions,
)
from espalier.trees import flatten, unflatten

# its devices have no tensors here: so nothing else comes this way
_KIND = "ipu"
_LIKE = "cpu"


class DryAutocast:
    """While open, meta tensors are cast as ``torch.autocast("cpu", ...)`` would, wherever that is open.

    A copy of a parameter is kept until autocast ends, as autocast keeps it. May be opened within itself.

    Raises:
        ValueError: this torch has no place for it.
    """

    def __init__(self) -> None:
        if AUTOCAST_KEY is None:
            raise ValueError(
                f"torch {torch.__version__} has no autocast for tensors without data: a dry run cannot know "
                "their dtypes. Use precision = 'bfloat16' or 'float16' for it."
            )
        self._open: list[ExitStack | None] = []
        self._casts: dict[Any, tuple[tuple[int, torch.dtype], ...]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> None:
        if torch.is_autocast_enabled(_KIND):
            self._open.append(None)
            return
        with ExitStack() as stack:
            others, library = Library("_", "IMPL"), Library("aten", "IMPL")
            stack.callback(forget_library, others)
            stack.callback(forget_library, library)
            others.fallback(fallthrough_kernel, AUTOCAST_KEY.name)
            for op in _all_cast():
                library.impl(op, partial(self._call, op), AUTOCAST_KEY.name, with_keyset=True)
            clear = torch.clear_autocast_cache
            stack.callback(setattr, torch, "clear_autocast_cache", clear)

            def cleared() -> None:
                self._copies.clear()
                clear()

            torch.clear_autocast_cache = cleared  # which torch.autocast calls when the outermost one ends
            stack.callback(self._copies.clear)
            torch.set_autocast_enabled(_KIND, True)
            stack.callback(torch.set_autocast_enabled, _KIND, False)
            stack.enter_context(with_autocast_key())
            self._open.append(stack.pop_all())

    def __exit__(self, *error: Any) -> None:
        stack = self._open.pop()
        if stack is not None:
            stack.close()

    @contextmanager
    def autocast(self, dtype: torch.dtype) -> Iterator[None]:
        """While open, this is, and autocast beneath it."""
        with self, torch.autocast(_LIKE, dtype):
            yield

    def _call(self, op: Any, keys: Any, *args: Any, **kwargs: Any) -> Any:
        """In the place of an operation."""
        below = keys & BELOW_AUTOCAST
        if not torch.is_autocast_enabled(_LIKE):
            return op.redispatch(below, *args, **kwargs)
        flat, form = flatten((args, kwargs))
        places = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        key = op, torch.get_autocast_dtype(_LIKE), str(form), tuple((i, flat[i].dtype) for i in places)
        with without_torch_functions():
            if key not in self._casts:
                self._casts[key] = _asked(op, flat, places, form)
            for i, dtype in self._casts[key]:
                if flat[i].is_meta:
                    flat[i] = self._cast(flat[i], dtype)
        args, kwargs = unflatten(flat, form)
        with past_autocast_key():
            return op.redispatch(below, *args, **kwargs)

    def _cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        leaf = _leaf_of(x)
        lasting = dtype is torch.get_autocast_dtype(_LIKE) and x.dtype is torch.float32
        if leaf is None or not lasting or not torch.is_autocast_cache_enabled():
            return x.to(dtype)
        if id(leaf) not in self._copies:
            self._copies[id(leaf)] = leaf, x.to(dtype)
        return self._copies[id(leaf)][1]


def _leaf_of(x: torch.Tensor) -> torch.Tensor | None:
    """The leaf with a gradient that a tensor is, or that it is without its class: a dry run's is an alias."""
    if not x.requires_grad:
        return None
    if not x.is_leaf and type(x.grad_fn).__name__ == "AliasBackward0":
        node = x.grad_fn.next_functions[0][0]  # type: ignore[union-attr]
        x = getattr(node, "variable", x)
    return x if x.is_leaf and not is_a_view(x) else None


def autocast_dtype(device: str) -> torch.dtype | None:
    """In which dtype autocast computes on a type of device; None where it is not open."""
    if device == "meta":
        device = _LIKE if torch.is_autocast_enabled(_KIND) else device
    if not torch.amp.is_autocast_available(device) or not torch.is_autocast_enabled(device):
        return None
    return torch.get_autocast_dtype(device)


def without_autocast(device: str) -> torch.autocast:
    """While open, autocast casts nothing on a type of device on which there is autocast."""
    return torch.autocast(_LIKE if device == "meta" else device, enabled=False)


def _all_cast() -> list[Any]:
    """The operations that autocast knows."""
    names = autocast_operators()
    parts = (name.removeprefix("aten::").partition(".") for name in names if name.startswith("aten::"))
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in parts]


def _asked(
    op: Any, flat: Sequence[Any], places: Sequence[int], form: Any
) -> tuple[tuple[int, torch.dtype], ...]:
    """Which of an operation's tensors autocast casts, and to which dtypes, one after the other as it does."""
    stand_ins = list(flat)
    with ExitStack() as stack:
        stack.enter_context(past_autocast_key())
        stack.enter_context(disable_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode())
        casts = stack.enter_context(_Casts())
        for i in places:
            x = flat[i]
            stand_ins[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_LIKE)
        args, kwargs = unflatten(stand_ins, form)
        op(*args, **kwargs)
    at = {id(stand_ins[i]): i for i in places}
    return tuple((at[id(x)], to) for x, to in casts.seen if id(x) in at)


class _Casts(DispatchMode):
    """Notes which tensors are cast, and to what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
            self.seen.append((args[0], kwargs["dtype"]))
        return func(*args, **kwargs)


def answered_for_meta(tensors: Iterable[Any]) -> AbstractContextManager[None]:
    """While open, and if one of these lies nowhere: torch answers for ``meta``, see :func:`as_if_for_cpu`."""
    has_one = any(isinstance(x, torch.Tensor) and x.is_meta for x in tensors)
    return as_if_for_cpu() if has_one else nullcontext()


@contextmanager
def as_if_for_cpu() -> Iterator[None]:
    """While open, torch answers whether autocast is on for ``meta``, too, and switches it as for the CPU.

    Code that computes on plain tensors asks for the device that they are on, or turns autocast off there
    (``torch.autocast(x.device.type, enabled=False)``); torch ends in an error for this one.
    """
    is_enabled, dtype_of, made = torch.is_autocast_enabled, torch.get_autocast_dtype, torch.autocast.__init__

    def enabled(device_type: str | None = None) -> bool:
        if device_type == "meta":
            return autocast_dtype("meta") is not None
        return is_enabled() if device_type is None else is_enabled(device_type)

    @wraps(made)
    def made_like(of: torch.autocast, device_type: str, *args: Any, **kwargs: Any) -> None:
        made(of, _LIKE if device_type == "meta" else device_type, *args, **kwargs)

    torch.is_autocast_enabled = enabled
    torch.get_autocast_dtype = lambda device_type: dtype_of(_LIKE if device_type == "meta" else device_type)
    setattr(torch.autocast, "__init__", made_like)  # noqa: B010 - programs hold the class itself
    try:
        yield
    finally:
        torch.is_autocast_enabled, torch.get_autocast_dtype = is_enabled, dtype_of
        setattr(torch.autocast, "__init__", made)  # noqa: B010
