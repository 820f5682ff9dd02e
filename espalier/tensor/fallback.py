"""Functions without a rule: Python composites are entered, the rest is gathered, run, and warned of."""

from __future__ import annotations

import types
import warnings
from collections.abc import Callable
from functools import lru_cache
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import move
from espalier.comm.moves import on_dry
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.tensor.caller import user_frame
from espalier.tensor.dtensor import DTensor, layout_of, stamp

# a composite asks these whether to hand itself over; entered, it must go on instead
_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class GatherWarning(UserWarning):
    """An operation has no rule: its inputs were gathered, and every rank computed all of it."""


def enter_or_gather(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
) -> Any:
    """Carry out a call that no rule speaks for.

    Raises:
        NotImplementedError: it writes in place something that cannot be written back.
    """
    if kwargs.get("out") is not None:
        return _into(func, args, dict(kwargs))
    inner = _entrance(func)
    if inner is not None:
        return inner(*args, **kwargs)
    return _gather(func, args, kwargs, mesh)


@lru_cache(maxsize=1024)
def _entrance(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a Python composite of torch, which no longer asks for overrides of itself."""
    code = getattr(func, "__code__", None)
    module = getattr(func, "__module__", "") or ""
    if code is None or not module.startswith("torch"):
        return None
    wrapped = hasattr(func, "__wrapped__")
    while hasattr(func, "__wrapped__"):
        func = func.__wrapped__
    if not isinstance(func, types.FunctionType):
        return None
    if not wrapped and not set(_QUESTIONS) & set(func.__code__.co_names):
        return None
    names = {**func.__globals__, **dict.fromkeys(_QUESTIONS, _no)}
    if names.get("torch") is torch and "overrides" in func.__code__.co_names:
        names["torch"] = _Unasking(torch)
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*args: Any) -> bool:
    return False


class _Unasking:
    """A module in which ``overrides`` says of everything that it has no override."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name in _QUESTIONS:
            return _no
        value = getattr(self._module, name)
        return _Unasking(value) if value is torch.overrides else value


def _into(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    out = kwargs.pop("out")
    result = func(*args, **kwargs)
    with torch.no_grad():
        for target, value in zip(
            *((x,) if isinstance(x, torch.Tensor) else x for x in (out, result)), strict=True
        ):
            target.copy_(value)
    return out


def _gather(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> Any:
    name = getattr(func, "__name__", str(func))
    held: list[Layout] = []
    target = args[0] if args and writes(func, name) else None

    def whole(x: Any) -> Any:
        if type(x) is DTensor:
            own = x._layout
            held.append(own)
            full = Layout.replicated(mesh, own.shape)
            moved = move(x, own, full)
            if x is target and own is not full:
                return moved.as_subclass(torch.Tensor).clone()
            return moved if x is target else moved.as_subclass(torch.Tensor)
        return on_dry(x, mesh) if mesh.is_dry and isinstance(x, torch.Tensor) else x

    with raw():
        local_args, local_kwargs = tree_map(whole, args), tree_map(whole, kwargs)
        if any(lay is not Layout.replicated(mesh, lay.shape) for lay in held):
            _warn(name, tuple(held))
        out = func(*local_args, **local_kwargs)
        if isinstance(target, DTensor):
            written = local_args[0]
            if written is not target:
                home = target._layout
                target.copy_(move(written, Layout.replicated(mesh, tuple(written.shape)), home))
            return target
    return tree_map(lambda x: _stamp_whole(x, mesh), out)


def _stamp_whole(x: Any, mesh: Mesh) -> Any:
    if isinstance(x, torch.Tensor) and type(x) is not DTensor:
        return stamp(x, layout_of(x, mesh))
    return x


def writes(func: Callable[..., Any], name: str) -> bool:
    """Whether a function writes to its first argument, to go by its name."""
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in ("__setitem__", "__set__")
        or (
            name.startswith("__i")
            and name.endswith("__")
            and name not in ("__invert__", "__index__", "__int__")
        )
    )


def tree_map(fn: Callable[[Any], Any], tree: Any) -> Any:
    """``fn`` on every leaf of nested tuples (named ones too), lists and dicts."""
    if isinstance(tree, dict):
        return {k: tree_map(fn, v) for k, v in tree.items()}
    if isinstance(tree, tuple | list) and not isinstance(tree, torch.Size):
        parts = [tree_map(fn, x) for x in tree]
        if hasattr(tree, "_fields"):
            return type(tree)(*parts)
        if type(tree) in (tuple, list):
            return type(tree)(parts)
        return type(tree)(parts)
    return fn(tree)


@lru_cache(maxsize=4096)
def _warn(name: str, held: tuple[Layout, ...]) -> None:
    # cached: once for each operation and layouts
    given = ", ".join(map(repr, held))
    warnings.warn(
        f"{name} has no sharding rule, so its inputs ({given}) are gathered and every rank computes all of "
        "it. The result is right, but slow; espalier.register_rule can teach it.",
        GatherWarning,
        stacklevel=user_frame()[0],
    )
