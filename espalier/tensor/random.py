"""Random values that do not depend on the layout.

Each random operation draws one 64-bit key from torch's default CPU generator, the same on all ranks
(see ``espalier.tensor.seeding``); each element's value is a hash of that key and the element's *global*
index. So values are the same under any layout and any number of ranks, on CPU and GPU alike, and
``torch.manual_seed``, ``fork_rng``, ``get_rng_state`` and checkpointing's own care of the RNG work.

The hash is the finaliser of SplitMix64 (Steele, Lea, Flood, OOPSLA 2014) over a Weyl sequence,
with half of the key added between its rounds, so that the streams of two keys are not shifted
copies of each other.
"""

from __future__ import annotations

import math

import torch
from torch.overrides import handle_torch_function

from espalier.comm.traced import recorders
from espalier.layout import Layout, local_box
from espalier.mesh import Mesh
from espalier.tensor.seeding import shared_draw


def _signed(value: int) -> int:
    value &= (1 << 64) - 1
    return value - (1 << 64) if value >= 1 << 63 else value


def _times(key: Key, factor: int) -> Key:
    """The product modulo 2^64, as int64 counts."""
    return key * _signed(factor) if isinstance(key, torch.Tensor) else _signed(key * factor)


_WEYL = _signed(0x9E3779B97F4A7C15)
_STEP = _signed(0x2545F4914F6CDD1D * pow(0x9E3779B97F4A7C15, -1, 1 << 64))
_MIX1 = _signed(0xBF58476D1CE4E5B9)
_MIX2 = _signed(0x94D049BB133111EB)
_DIGITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}


Key = int | torch.Tensor  # a 0-d int64 tensor in recorded programs, which are given keys when they run


def draw_key(mesh: Mesh, generator: torch.Generator | None = None) -> Key:
    """The key of one random operation, from torch's CPU generator, the same on all ranks of the mesh."""
    if recorders():
        return handle_torch_function(draw_key, (), mesh, generator)
    if generator is not None and generator.device.type != "cpu":
        raise ValueError(
            "DTensors draw their keys from a CPU generator, so that they are the same on every device; "
            f"got one on {generator.device}. Pass torch.Generator('cpu') or none."
        )
    return shared_draw(mesh, generator)


def element_index(layout: Layout, device: torch.device) -> torch.Tensor:
    """The flat global index (row-major, int64) of each element of this rank's box."""
    box = local_box(layout)
    if all(n == full for n, full in zip(box.sizes[1:], layout.shape[1:], strict=True)):
        start = box.offsets[0] * layout.stride[0] if box.offsets else 0
        return torch.arange(start, start + math.prod(box.sizes), device=device).view(box.sizes)
    total = torch.zeros((), dtype=torch.int64, device=device)
    for d, (start, n, step) in enumerate(zip(box.offsets, box.sizes, layout.stride, strict=True)):
        along = (
            torch.arange(start * step, (start + n) * step, step, device=device)
            if n
            else torch.empty(0, dtype=torch.int64, device=device)
        )
        total = total + along.view([-1 if i == d else 1 for i in range(len(box.sizes))])
    return total.contiguous()


def bits(index: torch.Tensor, key: Key) -> torch.Tensor:
    """64 random bits (as int64) for each index; ``index`` is overwritten."""
    # index * _WEYL + key * 0x2545F4914F6CDD1D; inductor cannot multiply a bare index by so large a number
    x = index.add_(_times(key, _STEP)).mul_(_WEYL)
    x = _xor_shift(x, 30).mul_(_MIX1).add_(_times(key ^ 0x5851F42D4C957F2D, 0xD1342543DE82EF95))
    x = _xor_shift(x, 27).mul_(_MIX2)
    return _xor_shift(x, 31)


def uniform(layout: Layout, key: Key, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's part of uniform values in [0, 1), multiples of the dtype's resolution."""
    return uniform_at(element_index(layout, device), key, dtype)


def uniform_at(index: torch.Tensor, key: Key, dtype: torch.dtype) -> torch.Tensor:
    """The :func:`uniform` values of elements of these flat global indices; ``index`` is overwritten."""
    digits = _DIGITS.get(dtype, 24)
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    top = _right(bits(index, key), 64 - digits)
    return top.to(wide).mul_(2.0**-digits).to(dtype)


def normal(layout: Layout, key: Key, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """This rank's part of standard normal values (Box and Muller, 1958)."""
    wide = torch.float64 if dtype == torch.float64 else torch.float32
    index = element_index(layout, device)
    radius = uniform_open(bits(index.clone(), key), wide).log_().mul_(-2).sqrt_()
    angle = uniform_open(bits(index, key ^ 0x3C6EF372FE94F82B), wide).mul_(2 * math.pi)
    return radius.mul_(angle.cos_()).to(dtype)


def integers(layout: Layout, key: Key, low: int, high: int, device: torch.device) -> torch.Tensor:
    """This rank's part of whole numbers in [low, high), as int64."""
    raw = bits(element_index(layout, device), key)
    return raw.bitwise_and_((1 << 62) - 1).remainder_(high - low).add_(low)


def uniform_open(raw: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Uniform values in (0, 1] from random bits."""
    digits = _DIGITS[dtype]
    return _right(raw, 64 - digits).add_(1).to(dtype).mul_(2.0**-digits)


def _right(x: torch.Tensor, n: int) -> torch.Tensor:
    return (x >> n).bitwise_and_((1 << (64 - n)) - 1)


def _xor_shift(x: torch.Tensor, n: int) -> torch.Tensor:
    return x.bitwise_xor_(_right(x, n))
