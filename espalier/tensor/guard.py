"""What would bypass the type is refused: custom autograd functions, functional transforms.

``torch.autograd.Function.apply`` does not ask ``__torch_function__``: its backward would get
plain local gradients beside saved DTensors, and the result would be silently local. ``torch.vmap``
and ``torch.func.grad`` wrap tensors in C++, and the type is lost on the way. So these doors are
wrapped, once, when the library is imported; for calls without DTensors that costs one look at
the arguments.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.utils.checkpoint
from torch._C import DisableTorchFunctionSubclass as raw
from torch._functorch import eager_transforms, vmap
from torch.overrides import handle_torch_function

from espalier.comm.traced import recorders
from espalier.tensor.dtensor import DTensor

# torch's own functions that take tensors through without computing with them
_PASSING = frozenset({("torch.utils.checkpoint", "_NoopSaveInputs")})


def install() -> None:
    """Wrap ``torch.autograd.Function.apply`` (a second call does nothing)."""
    base = torch.autograd.Function
    original = base.__dict__["apply"].__func__
    if getattr(original, "_espalier", False):
        return

    def apply(cls: Any, *args: Any, **kwargs: Any) -> Any:
        for a in args:
            if type(a) is DTensor and not getattr(cls, "espalier", False):
                name = (cls.__module__, cls.__name__)
                if name not in _PASSING:
                    raise TypeError(_refusal(name, a))
        if recorders():
            return handle_torch_function(cls.apply, (), *args, **kwargs)
        return original(cls, *args, **kwargs)

    apply._espalier = True  # type: ignore[attr-defined]
    base.apply = classmethod(apply)  # type: ignore[assignment]
    # checkpointing compares what it saved with what it recomputes: local parts both, wherever it asks
    checks = getattr(torch.utils.checkpoint, "_allowed_determinism_checks_to_fns", {})
    for mode, describe in checks.items():
        checks[mode] = _of_local(describe)
    for module, name in ((vmap, "_add_batch_dim"), (eager_transforms, "_wrap_for_grad")):
        if hasattr(module, name):  # private, so it may go
            setattr(module, name, _closed(getattr(module, name)))


def _of_local(describe: Callable[[torch.Tensor], Any]) -> Callable[[torch.Tensor], Any]:
    def described(x: torch.Tensor) -> Any:
        with raw():
            return describe(x)

    return described


def _closed(door: Callable[..., Any]) -> Callable[..., Any]:
    def checked(*args: Any) -> Any:
        for a in args:
            if type(a) is DTensor:
                raise TypeError(
                    "torch.vmap and torch.func's transforms would compute on local data alone; got a DTensor "
                    f"({a._layout!r}). Use torch.autograd.grad, write the batch dim out, or wrap the call in "
                    "espalier.local_map, which states the layouts at its edges."
                )
        return door(*args)

    return checked


def _refusal(name: tuple[str, str], x: DTensor) -> str:
    if name == ("torch.utils.checkpoint", "CheckpointFunction"):
        return (
            "Reentrant checkpointing recomputes on plain local tensors and would give wrong gradients for "
            f"DTensors ({x._layout!r}). Call torch.utils.checkpoint.checkpoint(..., use_reentrant=False)."
        )
    return (
        f"{name[1]}.apply was given a DTensor ({x._layout!r}). A custom autograd function computes on local "
        "data and would silently give local results. Wrap the call in espalier.local_map, which states the "
        "layouts at its edges, or call it on to_local()."
    )
