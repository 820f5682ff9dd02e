"""Custom autograd functions applied to DTensors are refused.

``torch.autograd.Function.apply`` does not ask ``__torch_function__``: its backward would get
plain local gradients beside saved DTensors, and the result would be silently local. So ``apply``
is wrapped, once, when the library is imported; for calls without DTensors that costs one scan of
the arguments.
"""

from __future__ import annotations

from typing import Any

import torch

from espalier.tensor.dtensor import DTensor

# torch's own functions that take tensors through without computing with them
_PASSING = ("torch.utils.checkpoint",)


def install() -> None:
    """Wrap ``torch.autograd.Function.apply`` (a second call does nothing)."""
    base = torch.autograd.Function
    original = base.__dict__["apply"].__func__
    if getattr(original, "_espalier", False):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for a in args:
            if type(a) is DTensor and not getattr(cls, "espalier", False) and cls.__module__ not in _PASSING:
                raise TypeError(
                    f"{cls.__name__}.apply was given a DTensor ({a._layout!r}). A custom autograd function "
                    "computes on local data and would silently give local results. Wrap the call in "
                    "espalier.local_map, which states the layouts at its edges, or call it on to_local()."
                )
        return original(cls, *args, **kwargs)

    apply._espalier = True  # type: ignore[attr-defined]
    base.apply = classmethod(apply)  # type: ignore[assignment]
