"""What of a call's arguments decides how it is carried out: the key to the dispatcher's cache."""

from __future__ import annotations

from typing import Any

import torch

from espalier.tensor.dtensor import DTensor
from espalier.tensor.strictness import is_strict

Path = tuple[Any, ...]  # to an argument, or to a part of one

# what of an argument is not part of the key where the rule is loose: a DTensor's dtype, a float's value
TOLD = frozenset({DTensor, float, complex, tuple, list, torch.Size, dict})
# what stands for itself
_ITSELF = frozenset({int, type(None), str, torch.dtype, torch.device, torch.memory_format})


def key_of(a: Any) -> Any:
    """What stands for an argument in the key of a call, whatever the function."""
    t = type(a)
    if t in _ITSELF:
        return a
    if t is DTensor:
        return a._layout
    if t is bool:
        return (bool, a)  # else True would be found for 1
    if t is float or t is complex:
        return t if a else 0.0  # of a scalar's value, no more than whether it is zero decides
    if t is slice:
        parts = a.start, a.stop, a.step
        return (slice, *[x if type(x) in _ITSELF else key_of(x) for x in parts])
    if t is tuple or t is list or t is torch.Size:
        return (t, *[x if type(x) in _ITSELF else key_of(x) for x in a])
    if isinstance(a, torch.Tensor):
        return (t, a.shape, a.dtype, is_strict.get()) if a.ndim else (t, a.dtype)
    if isinstance(a, dict):
        return (dict, *[(k, key_of(v)) for k, v in a.items()])
    try:
        hash(a)
    except TypeError:
        return t
    return a


def told(a: Any) -> Any:
    """Of an argument, what :func:`key_of` leaves out."""
    t = type(a)
    if t is DTensor:
        return a.dtype
    if t in (tuple, list, torch.Size, dict):
        return tuple([told(x) for x in (a.values() if t is dict else a) if type(x) in TOLD])
    return a if t in (float, complex) else None


def whole_key_of(a: Any) -> Any:
    """What stands for an argument of one process: all of it, but of tensors only their shapes and dtypes.

    Raises:
        TypeError: (when hashed) some part has no hash.
    """
    if isinstance(a, torch.Tensor):
        return (torch.Tensor, tuple(a.shape), a.dtype)
    if isinstance(a, dict):
        return (dict, *[(k, whole_key_of(v)) for k, v in a.items()])
    if isinstance(a, tuple | list):
        return (type(a), *[whole_key_of(x) for x in a])
    if isinstance(a, slice):
        return (slice, *map(whole_key_of, (a.start, a.stop, a.step)))
    return (type(a), a)


def put(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, value: Any) -> tuple[Any, Any]:
    """A call's arguments with another value where a path leads."""
    if isinstance(path[0], str):
        return args, {**kwargs, path[0]: _replaced(kwargs[path[0]], path[1:], value)}
    i = path[0]
    return (*args[:i], _replaced(args[i], path[1:], value), *args[i + 1 :]), kwargs


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    parts = list(tree)
    parts[path[0]] = _replaced(parts[path[0]], path[1:], value)
    return type(tree)(parts)
