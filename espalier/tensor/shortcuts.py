"""Ways to the dispatcher that are shorter than torch's own.

Where a DTensor's method is called torch looks at each argument in C, puts the call together anew, and asks
the type by name; where a function of ``torch.nn.functional`` is, it does so in Python. That takes as long as
the dispatcher itself. So methods that have a rule go there at once, and those functions by a shorter door.
Where a mode is open, which is to see the call, or torch functions are left alone, they go as ever.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from espalier.tensor.dispatch import NO_KWARGS
from espalier.tensor.dtensor import DTensor
from espalier.tensor.rules import RULES
from espalier.torch_private import function_modes, tensor_attributes, torch_functions_on, wrap_door

_TYPES = (DTensor,)
# of an operator's other side: what is no tensor of another type, nor decides what comes out
_SIDES = frozenset({DTensor, int, float})
# torch hands these operators on as the methods of these names
_OPERATORS = {
    "__add__": "add", "__radd__": "add", "__sub__": "sub", "__mul__": "mul", "__rmul__": "mul",
    "__truediv__": "div", "__matmul__": "matmul",
}  # fmt: skip
_PLAIN = frozenset({DTensor, torch.Tensor, nn.Parameter, type(None)})


def install() -> None:
    """Take them (a second call does nothing)."""
    for name, function in tensor_attributes().items():
        is_method = type(function).__name__ == "method_descriptor" and not name.startswith("_")
        if is_method and name not in vars(DTensor) and RULES.get(getattr(torch.Tensor, name)) is not None:
            setattr(DTensor, name, _method(getattr(torch.Tensor, name)))
    for name, named in _OPERATORS.items():
        setattr(DTensor, name, _operator(getattr(torch.Tensor, name), getattr(torch.Tensor, named)))
    wrap_door("functional", _handed_on)


def _method(func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(func)
    def method(self: DTensor, *args: Any, **kwargs: Any) -> Any:
        if torch_functions_on() and not function_modes():
            return DTensor.__torch_function__(func, _TYPES, (self, *args), kwargs)
        return func(self, *args, **kwargs)

    return method


def _operator(original: Callable[..., Any], func: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def operator(self: DTensor, other: Any) -> Any:
        if type(other) in _SIDES and torch_functions_on() and not function_modes():
            return DTensor.__torch_function__(func, _TYPES, (self, other), NO_KWARGS)
        return original(self, other)

    return operator


def _handed_on(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a function of ``torch.nn.functional`` calls where an argument's type is to take the call."""

    @functools.wraps(original)
    def handed_on(function: Callable[..., Any], relevant: Any, *args: Any, **kwargs: Any) -> Any:
        if not function_modes() and _PLAIN.issuperset(map(type, relevant)):
            return DTensor.__torch_function__(function, _TYPES, args, kwargs)
        return original(function, relevant, *args, **kwargs)

    return handed_on
