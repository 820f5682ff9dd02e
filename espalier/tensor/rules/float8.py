"""Linear layers whose products are of 8-bit floats.

What is multiplied is scaled, by the power of two that brings the largest of a tensor's values closest below
the largest of its dtype, and rounded to 8 bits: activations and weights to e4m3, gradients, whose range is
wider, to e5m2 (Micikevicius et al. 2022, arXiv 2209.05433). A power of two rounds nothing itself, and values
that were rounded so are found as they are when they are rounded again. The scale is of the tensor at hand,
made anew at each product: of what this rank multiplies, so a tensor that is cut has one for each piece. Sums
are in float32, results in the dtype of the activation.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch.autograd.function import once_differentiable
from torch.overrides import handle_torch_function, has_torch_function

from espalier.comm.custom_ops import recorders
from espalier.comm.functions import OwnFunction
from espalier.sharding.spec import Operand, Spec, rule
from espalier.tensor.dtensor import DTensor
from espalier.tensor.rules.matmul import linear
from espalier.torch_private import scaled_mm

MULTIPLE: Final = 16  # of which both dims of a weight must be multiples
FORWARD: Final[Any] = getattr(torch, "float8_e4m3fn", None)
_BACKWARD: Final = getattr(torch, "float8_e5m2", None)
_TINY: Final = 1e-12  # a tensor of zeros has a scale too
_EXPONENT: Final = 0x7F800000  # the bits of a float32


def float8_linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """``F.linear`` with products of 8-bit floats, forward and backward.

    Args:
        x: activations [..., k].
        weight: [n, k], both multiples of 16 on every rank.
        bias: [n].
    """
    operands = (x, weight) if bias is None else (x, weight, bias)
    if has_torch_function(operands) or recorders():
        out: torch.Tensor = handle_torch_function(float8_linear, operands, *operands)
        return out
    # plain for the backward pass
    flat, matrix = map(_plain, (x.reshape(-1, x.shape[-1]), weight))
    product: torch.Tensor = _Float8Product.apply(flat, matrix)
    product = product.view(*x.shape[:-1], weight.shape[0])
    return product if bias is None else product + bias


def _plain(x: torch.Tensor) -> torch.Tensor:
    """What a tracer stands a tensor in for stays what it is."""
    is_other = isinstance(x, DTensor | torch.nn.Parameter)
    return torch.Tensor.as_subclass(x, torch.Tensor) if is_other else x


@rule(float8_linear, loose=True)
def as_linear(x: Operand, weight: Operand, bias: Operand | None = None) -> Spec:
    """x[..., k] · weight[n, k]ᵀ + bias[n], as of ``F.linear``."""
    return linear(x, weight, bias)


class _Float8Product(OwnFunction):
    """x[m, k] · weight[n, k]ᵀ. Keeps both as they were given: a weight may be taken away meanwhile."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return product(x, weight.t(), (FORWARD, FORWARD))

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        x, weight = ctx.saved_tensors
        dtypes = _BACKWARD, FORWARD
        of_x = product(grad, weight, dtypes) if ctx.needs_input_grad[0] else None
        of_weight = product(grad.t(), x, dtypes) if ctx.needs_input_grad[1] else None
        return of_x, of_weight


def product(a: torch.Tensor, b: torch.Tensor, dtypes: Sequence[Any]) -> torch.Tensor:
    """a[m, k] · b[k, n], each rounded to 8 bits; in the dtype of ``a``."""
    if 0 in (*a.shape, *b.shape):
        return a.new_zeros(a.shape[0], b.shape[1])
    lacking = -a.shape[1] % MULTIPLE  # of tokens, where a gradient is summed over them
    if lacking:
        a, b = F.pad(a, (0, lacking)), F.pad(b, (0, 0, 0, lacking))
    left, scale = rounded(a, dtypes[0])
    right, other = rounded(b, dtypes[1])
    # the units want rows of the first and columns of the second one behind the other
    out: torch.Tensor = scaled_mm(
        left.contiguous(), right.t().contiguous().t(), scale_a=scale, scale_b=other, out_dtype=a.dtype
    )
    return out


def rounded(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """A tensor in a dtype of 8 bits, and the float32 factor that gives its values again."""
    most = torch.finfo(dtype).max
    factor = factor_of(x.detach().abs().amax().float(), dtype)
    return (x.float() * factor).clamp(-most, most).to(dtype), factor.reciprocal()


def factor_of(largest: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The largest powers of two by which float32 values of such size stay within a dtype."""
    ratio = torch.finfo(dtype).max / largest.clamp(min=_TINY)
    # its exponent's bits alone: torch.ldexp takes a power, which devices need not round as the host does
    return (ratio.view(torch.int32) & _EXPONENT).view(torch.float32)


def refused(device: torch.device) -> str | None:
    """Why a device has no products of 8-bit floats; None where it has."""
    if scaled_mm is None or FORWARD is None or _BACKWARD is None:
        return f"torch {torch.__version__} has none"
    try:
        here = torch.ones(MULTIPLE, MULTIPLE, device=device, dtype=torch.bfloat16)
        for dtypes in ((FORWARD, FORWARD), (_BACKWARD, FORWARD)):
            products = product(here, here, dtypes)
    except (RuntimeError, NotImplementedError, ValueError) as error:
        return str(error).partition("\n")[0]
    return None if math.isclose(float(products[0, 0]), MULTIPLE) else "its products are wrong"
