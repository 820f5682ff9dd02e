"""What tensors are on the wire: as backends carry them, reduce them, and keep their order."""

from __future__ import annotations

import torch

# what every backend carries; the rest goes as bytes
_CARRIED = frozenset(
    {torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8}
)


def as_wire(x: torch.Tensor) -> torch.Tensor:
    """Contiguous ``x`` as the network may carry it, where nothing is computed on the way."""
    return x if x.dtype in _CARRIED else x.reshape(-1).view(torch.uint8)


def as_it_lies(x: torch.Tensor) -> torch.Tensor:
    """``x``, contiguous, in memory, with no conjugation or sign that is still to come."""
    if x._is_zerotensor():  # a gradient of sgn: all zero, and nowhere
        return x.clone(memory_format=torch.contiguous_format)
    return x.contiguous().resolve_conj().resolve_neg()


def summable(x: torch.Tensor, op: str) -> tuple[torch.Tensor, str]:
    """The same memory in a dtype that every backend reduces, and the operation to do on it."""
    if x.dtype is torch.bool:
        # True and True are True: bytes must stay 0 or 1
        return x.view(torch.uint8), {"sum": "max", "product": "min"}.get(op, op)
    if x.is_neg() and op in ("sum", "avg"):
        x = torch._neg_view(x)  # as it lies in memory
    if x.dtype.is_complex and op in ("sum", "avg"):
        return torch.view_as_real(x.conj() if x.is_conj() else x), op
    return x, op


def in_order(x: torch.Tensor, op: str) -> torch.Tensor:
    """Integers in the order of the floats; NaN is the largest of all for max, the smallest for min."""
    wide = x if x.dtype is torch.float64 else x.float()
    key = _flipped(wide.view(torch.int64 if wide.dtype is torch.float64 else torch.int32))
    worst = torch.iinfo(key.dtype).max if op == "max" else torch.iinfo(key.dtype).min
    return key.masked_fill(wide.isnan(), worst)


def in_floats(key: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The floats that :func:`in_order` took."""
    wide = _flipped(key).view(torch.float64 if key.dtype is torch.int64 else torch.float32)
    return wide.to(dtype)


def _flipped(bits: torch.Tensor) -> torch.Tensor:
    """From the bits of floats, sign and magnitude, to integers that count up; and back."""
    info = torch.iinfo(bits.dtype)
    return bits ^ ((bits >> (info.bits - 1)) & info.max)


def pad_to(x: torch.Tensor, dim: int, size: int) -> torch.Tensor:
    """Contiguous ``x`` with zeros at the end of a dim, up to a size."""
    if x.shape[dim] == size:
        return as_it_lies(x)
    out = x.new_zeros([*x.shape[:dim], size, *x.shape[dim + 1 :]])
    out.narrow(dim, 0, x.shape[dim]).copy_(x)
    return out
