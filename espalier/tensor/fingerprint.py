"""A 64-bit hash of a tensor's bytes: equal for equal bytes, a NaN's and a negative zero's too.

Each 8-byte word is mixed with its place and the results are added up, so a large tensor is hashed
in parallel, in any order, where it lies.
"""

from __future__ import annotations

import torch

from espalier.tensor.random import bits

_STEP = 0x2545F4914F6CDD1D  # odd: places stay apart
_PIECE = 1 << 20  # words hashed at once, which bounds the memory


def fingerprint(x: torch.Tensor) -> torch.Tensor:
    """The hash of a plain tensor's elements, in row-major order, as a 0-d int64 tensor on its device."""
    words = _words(x.detach())
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    for start in range(0, words.numel(), _PIECE):
        piece = words[start : start + _PIECE]
        place = torch.arange(start + 1, start + 1 + piece.numel(), device=words.device)
        total += bits(place.mul_(_STEP).add_(piece), 0).sum()
    return total


def _words(x: torch.Tensor) -> torch.Tensor:
    if x.layout is not torch.strided:
        x = x.to_dense()
    flat = x.resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.element_size() < 8 or flat.storage_offset() * flat.element_size() % 8:
        flat = flat.view(torch.uint8)
        flat = torch.cat([flat, flat.new_zeros(-flat.numel() % 8)])
    return flat.view(torch.int64)
