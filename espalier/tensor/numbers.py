"""Numbers given as tensors: sizes, bounds of slices, places.

Torch takes a 0-dim tensor of integers wherever it takes such a number. Its value decides about the call, and
is no part of the dispatcher's key: so it is read first, and the call made with the number.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from espalier.tensor.rules.table import spellings

_NAMES = """
    view reshape view_copy expand expand_copy broadcast_to repeat tile unflatten flatten narrow narrow_copy
    permute transpose swapaxes swapdims movedim moveaxis unsqueeze select select_copy unfold roll chunk split
    split_with_sizes split_copy tensor_split unsafe_chunk unsafe_split topk kthvalue resize_ new_zeros
    new_ones new_empty new_full diagonal tril triu pad interpolate one_hot rot90 as_strided
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d
    adaptive_max_pool1d adaptive_max_pool2d adaptive_max_pool3d
"""
_MAKERS = "zeros ones empty full rand randn randint randperm eye arange range linspace logspace"
_MAKING = frozenset(getattr(torch, name) for name in _MAKERS.split())
_TAKING = frozenset(f for name in _NAMES.split() for f in spellings(name)) | {torch.split}
_INDEXING = frozenset({torch.Tensor.__getitem__, torch.Tensor.__setitem__})


def are_tensors(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a number that the call takes is given as a tensor."""
    if func in _INDEXING:
        return _among(args[1], False)
    if func in _TAKING:
        return any(_among(a, True) for a in (*args[1:], *kwargs.values()))
    return func in _MAKING and _among([*args, *kwargs.values()], True)


def read(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with these numbers as numbers (a collective for each DTensor that is not replicated)."""
    if func in _INDEXING:
        return (args[0], _number(args[1], False), *args[2:]), kwargs
    named = {k: v if k in ("input", "self") else _number(v, True) for k, v in kwargs.items()}
    first = tuple(_number(a, True) for a in args[:1]) if func in _MAKING else args[:1]
    return (*first, *(_number(a, True) for a in args[1:])), named


def _is_number(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and not x.ndim and x.dtype in _INTEGERS


_INTEGERS = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


def _among(x: Any, here: bool) -> bool:
    if isinstance(x, slice):
        return any(map(_is_number, (x.start, x.stop, x.step)))
    if type(x) in (tuple, list):
        return any(_among(y, here) for y in x)
    return here and _is_number(x)


def _number(x: Any, here: bool) -> Any:
    if isinstance(x, slice):
        return slice(*(_number(y, True) for y in (x.start, x.stop, x.step)))
    if type(x) in (tuple, list):
        return type(x)(_number(y, here) for y in x)
    return int(x) if here and _is_number(x) else x
