"""Optimizers that multiply matrices in 16 bits within their step, on matrices that are cut.

Muon in its many copies (timm's, a script's own) orthogonalizes momenta in bfloat16. Done piece by piece,
its products and norms would be summed over ranks and round otherwise than on one process, which shows in the
third digit of an update. So what such a step casts to 16 bits is made whole there, and each rank goes on as
one process does. torch's own Muon is dealt out instead (:mod:`espalier.tensor.muon`). Nothing says which
optimizer is one of these: it is tried, on small tensors.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from espalier.layout import Layout
from espalier.parallel.apart import Step, is_torchs, tried
from espalier.tensor import DTensor, redistribute
from espalier.tensor.dry_runs import flop_counts
from espalier.tensor.observers import tell
from espalier.torch_private import TorchDispatchMode
from espalier.trees import leaves

_SHORT = (torch.bfloat16, torch.float16)
_NOTE = "_multiplies_in_16_bits"  # at an optimizer: whether it does


def rounding_as_one(
    optimizer: torch.optim.Optimizer, parameters: Iterable[DTensor]
) -> AbstractContextManager[object]:
    """Inside, a step of this optimizer rounds its products as on one process."""
    if is_torchs(optimizer) or all(p._layout.is_plain or p.ndim < 2 for p in parameters):
        return nullcontext()
    found = vars(optimizer).get(_NOTE)
    if found is None:
        found = vars(optimizer)[_NOTE] = _multiplies(optimizer)
        if found:
            tell(
                f"{type(optimizer).__name__} multiplies matrices in 16 bits within its step, as a trial on "
                "small tensors shows. Summed over ranks, these products would round otherwise than on one "
                "process: so each matrix is gathered, and every rank computes with all of it. Of "
                "torch.optim.Muon matrices are dealt out to the ranks."
            )
    return _Whole() if found else nullcontext()


class _Whole(TorchFunctionMode):
    """Gathers each cut matrix that is cast to 16 bits."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        out = func(*args, **(kwargs or {}))
        if type(out) is not DTensor or out.ndim < 2 or out.dtype not in _SHORT or out._layout.is_plain:
            return out
        source = args[0] if args else None
        if not isinstance(source, torch.Tensor) or source.dtype == out.dtype or source.shape != out.shape:
            return out
        return redistribute(out, Layout.replicated(out._layout.mesh, out.shape))


def _multiplies(optimizer: torch.optim.Optimizer) -> bool:
    """Whether some steps on small tensors make such a product."""
    seen = _Products()

    def watched(twin: torch.optim.Optimizer, params: list[torch.Tensor]) -> Step:
        def step() -> None:
            if not seen.found:
                with seen:
                    twin.step()

        return step

    tried(optimizer, torch.device("cpu"), [(watched, 1.0)], _size)
    return seen.found


def _size(ndim: int) -> tuple[int, ...]:
    """One at which no optimizer takes a matrix for a vector."""
    return (16,) * min(ndim, 2) + (3,) * (ndim - 2)


class _Products(TorchDispatchMode):
    """Whether a product of matrices in 16 bits was made."""

    def __init__(self) -> None:
        super().__init__()
        self.found = False

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if getattr(func, "overloadpacket", None) in flop_counts():
            self.found |= any(x.dtype in _SHORT for x in leaves((args, kwargs), torch.Tensor))
        return func(*args, **(kwargs or {}))
