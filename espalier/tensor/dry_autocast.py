"""Autocast for tensors without data.

``torch.autocast`` casts what lies on the device it is opened for, and the ``meta`` device is none of these.
While :class:`DryAutocast` is open, calls on meta tensors are cast as autocast casts them on the CPU, where it
is open there. There is no second table of what is cast: torch is asked once for each operation and its
inputs' dtypes, with tensors that pretend to lie on the CPU.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.library import Library, fallthrough_kernel
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from espalier.trees import flatten, unflatten

# its devices have no tensors here: so nothing else comes this way
_KIND = "ipu"
_KEY: Any = getattr(torch._C.DispatchKey, "AutocastIPU", None)
_BELOW = None if _KEY is None else torch._C._dispatch_keyset_full_after(_KEY)
_LIKE = "cpu"


class DryAutocast:
    """While open, meta tensors are cast as ``torch.autocast("cpu", ...)`` would, wherever that is open.

    A copy of a parameter is kept until autocast ends, as autocast keeps it. May be opened within itself.

    Raises:
        ValueError: this torch has no place for it.
    """

    def __init__(self) -> None:
        if _KEY is None:
            raise ValueError(
                f"torch {torch.__version__} has no autocast for tensors without data: a dry run cannot know "
                "their dtypes. Use precision = 'bfloat16' or 'float16' for it."
            )
        self._open: list[ExitStack | None] = []
        self._casts: dict[Any, tuple[torch.dtype | None, ...]] = {}
        self._copies: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def __enter__(self) -> None:
        if torch.is_autocast_enabled(_KIND):
            self._open.append(None)
            return
        with ExitStack() as stack:
            others, library = Library("_", "IMPL"), Library("aten", "IMPL")
            stack.callback(others._destroy)
            stack.callback(library._destroy)
            others.fallback(fallthrough_kernel, _KEY.name)
            for op in _all_cast():
                library.impl(op, partial(self._call, op), _KEY.name, with_keyset=True)
            clear = torch.clear_autocast_cache
            stack.callback(setattr, torch, "clear_autocast_cache", clear)

            def cleared() -> None:
                self._copies.clear()
                clear()

            torch.clear_autocast_cache = cleared  # which torch.autocast calls when the outermost one ends
            stack.callback(self._copies.clear)
            torch.set_autocast_enabled(_KIND, True)
            stack.callback(torch.set_autocast_enabled, _KIND, False)
            stack.enter_context(torch._C._IncludeDispatchKeyGuard(_KEY))
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
        below = keys & _BELOW
        if not torch.is_autocast_enabled(_LIKE):
            return op.redispatch(below, *args, **kwargs)
        flat, form = flatten((args, kwargs))
        given = [i for i, x in enumerate(flat) if isinstance(x, torch.Tensor)]
        key = op, torch.get_autocast_dtype(_LIKE), str(form), tuple((i, flat[i].dtype) for i in given)
        with torch._C.DisableTorchFunction():
            if key not in self._casts:
                self._casts[key] = _asked(op, flat, given, form)
            for i, dtype in zip(given, self._casts[key], strict=True):
                if dtype is not None and flat[i].is_meta:
                    flat[i] = self._cast(flat[i], dtype)
        args, kwargs = unflatten(flat, form)
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_KEY)):
            return op.redispatch(below, *args, **kwargs)

    def _cast(self, x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        lasting = dtype is torch.get_autocast_dtype(_LIKE) and x.dtype is torch.float32
        lasting = lasting and x.requires_grad and x.is_leaf and not x._is_view()
        if not lasting or not torch.is_autocast_cache_enabled():
            return x.to(dtype)
        if id(x) not in self._copies:
            self._copies[id(x)] = x, x.to(dtype)
        return self._copies[id(x)][1]


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
    names = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    found = (name.removeprefix("aten::").partition(".") for name in names if name.startswith("aten::"))
    return [getattr(getattr(torch.ops.aten, name), overload or "default") for name, _, overload in found]


def _asked(op: Any, flat: Sequence[Any], given: Sequence[int], form: Any) -> tuple[torch.dtype | None, ...]:
    """To which dtypes autocast casts an operation's tensors; None where it does not."""
    stand_ins, off = list(flat), torch._C.DispatchKeySet(_KEY)
    with ExitStack() as stack:
        stack.enter_context(torch._C._ExcludeDispatchKeyGuard(off))
        stack.enter_context(_disable_current_modes())
        stack.enter_context(torch.no_grad())
        stack.enter_context(FakeTensorMode())
        casts = stack.enter_context(_Casts())
        for i in given:
            x = flat[i]
            stand_ins[i] = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=_LIKE)
        args, kwargs = unflatten(stand_ins, form)
        op(*args, **kwargs)
    return tuple(next((to for x, to in casts.seen if x is stand_ins[i]), None) for i in given)


class _Casts(TorchDispatchMode):
    """Notes which tensors are cast, and to what."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[tuple[torch.Tensor, torch.dtype]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.ops.aten._to_copy.default and kwargs.get("dtype") is not None:
            self.seen.append((args[0], kwargs["dtype"]))
        return func(*args, **kwargs)


__all__ = ["DryAutocast", "autocast_dtype", "without_autocast"]
