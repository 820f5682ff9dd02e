"""Fourier transforms: linear; the dims transformed are whole, the others may be sharded."""

from __future__ import annotations

from typing import Any

import torch

from espalier.layout.layout import normal_dim
from espalier.tensor.rules.spec import Dims, Operand, Placed, RuleFunction, Spec, of_one, outcome
from espalier.tensor.rules.table import rule, rule_of_each


@rule_of_each("fft ifft rfft irfft hfft ihfft", (-1,))
@rule_of_each("fft2 ifft2 rfft2 irfft2 hfft2 ihfft2", (-2, -1))
@rule_of_each("fftn ifftn rfftn irfftn hfftn ihfftn", None)
def transform(function: Any, default: tuple[int, ...] | None) -> RuleFunction:
    """The rule of ``function(x, n, dim, norm)``, which transforms these dims by default.

    None: all, or as many of the last as there are sizes.
    """

    def rule(x: Operand, n: Any = None, dim: Any = None, norm: str | None = None, **kw: Any) -> Spec:
        n = kw.pop("s", n)
        given = (dim,) if isinstance(dim, int) else dim if dim is not None else default
        if given is None:
            count = x.ndim if n is None else len(n)
            given = range(x.ndim - count, x.ndim)
        whole = {normal_dim(d, x.ndim) for d in given}
        words = {} if dim is None else {"dim": dim}
        return _over_others(x, whole, outcome(function, x, n, **words)[0])

    return rule


def _over_others(x: Operand, whole: set[int], shape: tuple[int, ...]) -> Spec:
    dims: Dims = tuple(None if i in whole else d for i, d in enumerate(x.dims()))
    out = (*dims, *(None,) * (len(shape) - x.ndim))
    return Spec([dims], [out], [shape], linear=[(0,)], run=of_one, when=Placed.lacks)


@rule(torch.fft.fftshift, torch.fft.ifftshift)
def shift(x: Operand, dim: Any = None) -> Spec:
    """fftshift and ifftshift."""
    given = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    return _over_others(x, {normal_dim(d, x.ndim) for d in given}, x.shape)


@rule_of_each("stft istft")
def short_time(function: Any) -> RuleFunction:
    """stft and istft: the batch may be sharded, the window is whole."""

    def rule(x: Operand, *args: Any, **kwargs: Any) -> Spec:
        shape = outcome(function, x, *args, **kwargs)[0]
        single = x.ndim == (1 if function.__name__ == "stft" else 2)
        lead: Dims = () if single else ("b",)
        window = [(None,)] if any(isinstance(a, Operand) for a in (*args, *kwargs.values())) else []
        given, result = ((*lead, *(None,) * (n - len(lead))) for n in (x.ndim, len(shape)))
        return Spec([given, *window], [result], [shape], linear=[(0,)], run=of_one, when=Placed.lacks)

    return rule
