"""Functions of arrays, by NumPy's names and arguments.

Packages that compute with arrays of any kind (opt_einsum, and what builds on it) look for them in the package
that an array's class is of. Where there are none they take an array for one of NumPy's.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

__all__ = ["einsum", "tensordot", "transpose"]


def einsum(equation: str, *operands: torch.Tensor) -> torch.Tensor:
    """``torch.einsum``."""
    return torch.einsum(equation, *operands)


def tensordot(x: torch.Tensor, y: torch.Tensor, axes: int | Sequence[Any] = 2) -> torch.Tensor:
    """``torch.tensordot``."""
    return torch.tensordot(x, y, dims=axes)


def transpose(x: torch.Tensor, axes: Sequence[int]) -> torch.Tensor:
    """``x.permute``."""
    return x.permute(*axes)
