"""Plain values as JSON, exactly, and back: no code is run to read them."""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Mapping
from typing import Any

import torch

Take = Callable[[str, torch.Tensor], str]
Give = Callable[[str], torch.Tensor]


def encode(value: Any, at: str, tensor: Take) -> Any:
    """What JSON can say of a value.

    Args:
        at: where it stands, for errors and the names of tensors.
        tensor: takes a tensor in it, and gives the name by which it will be known.

    Raises:
        ValueError: it, or something in it, is none of the plain values.
    """
    if value is None or type(value) in (bool, str, int):
        return value
    if type(value) is float:
        return value if math.isfinite(value) else {"$float": repr(value)}
    if isinstance(value, torch.Tensor):
        return {"$tensor": tensor(at, value)}
    if isinstance(value, tuple | list | deque):
        items = [encode(x, f"{at}.{i}", tensor) for i, x in enumerate(value)]
        return (
            items if isinstance(value, list) else {"$tuple" if isinstance(value, tuple) else "$deque": items}
        )
    if isinstance(value, Mapping):
        return _encode_mapping(value, at, tensor)
    if isinstance(value, bytes):
        return {"$bytes": base64.b64encode(value).decode()}
    if isinstance(value, complex):
        return {"$complex": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {"$dtype": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {"$device": str(value)}
    if hasattr(value, "item") and getattr(value, "shape", None) == ():  # a number of numpy's
        return encode(value.item(), at, tensor)
    for kind in (bool, int, float, str):
        if isinstance(value, kind):  # an enum's member, say
            return encode(kind(value), at, tensor)
    raise ValueError(
        f"{at} is a {type(value).__module__}.{type(value).__qualname__}, which cannot be saved. Give "
        "numbers, strings, tensors, or lists, tuples and dicts of them, or an object with state_dict()."
    )


def _encode_mapping(value: Mapping[Any, Any], at: str, tensor: Take) -> Any:
    plain = all(type(key) is str and not key.startswith("$") for key in value)
    kind = (
        "$counter" if isinstance(value, Counter) else "$ordered" if isinstance(value, OrderedDict) else None
    )
    if plain and kind is None:
        return {key: encode(x, f"{at}.{key}", tensor) for key, x in value.items()}
    pairs = [[encode(k, f"{at}.{k}", tensor), encode(x, f"{at}.{k}", tensor)] for k, x in value.items()]
    return {kind or "$dict": pairs}


def decode(value: Any, tensor: Give) -> Any:
    """The value again.

    Raises:
        ValueError: there is no such kind of value.
    """
    if isinstance(value, list):
        return [decode(x, tensor) for x in value]
    if not isinstance(value, dict):
        return value
    if len(value) != 1 or not next(iter(value)).startswith("$"):
        return {key: decode(x, tensor) for key, x in value.items()}
    ((kind, given),) = value.items()
    if kind == "$float":
        return float(given)
    if kind == "$tensor":
        return tensor(given)
    if kind == "$bytes":
        return base64.b64decode(given)
    if kind == "$complex":
        return complex(float(given[0]), float(given[1]))
    if kind == "$dtype" and isinstance(getattr(torch, given, None), torch.dtype):
        return getattr(torch, given)
    if kind == "$device":
        return torch.device(given)
    if kind in ("$tuple", "$deque"):
        items = [decode(x, tensor) for x in given]
        return tuple(items) if kind == "$tuple" else deque(items)
    if kind in ("$dict", "$ordered", "$counter"):
        pairs = {decode(k, tensor): decode(x, tensor) for k, x in given}
        return {"$dict": dict, "$ordered": OrderedDict, "$counter": Counter}[kind](pairs)
    raise ValueError(f"A value of the kind {kind!r} is not known; the checkpoint is of a later version.")
