"""Normalisations: what is normalised over must be whole."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from espalier.tensor.rules.spec import Operand, Rules, Spec


def over_last(
    x: Operand, normalized_shape: Sequence[int], weight: Any = None, bias: Any = None, *args: Any, **kw: Any
) -> Spec:
    """layer_norm and rms_norm: the last dims whole, weight and bias too."""
    last = len(normalized_shape)
    dims = tuple(None if i >= x.ndim - last else d for i, d in enumerate(x.dims()))
    small = [(None,) * o.ndim for o in (weight, bias) if isinstance(o, Operand)]
    return Spec([dims, *small], [dims], [x.shape])


def group_norm(x: Operand, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Spec:
    """Every sample by itself."""
    dims = (*x.dims()[:1], *(None,) * (x.ndim - 1))
    small = [(None,) * o.ndim for o in (weight, bias) if isinstance(o, Operand)]
    return Spec([dims, *small], [dims], [x.shape])


def normalize(x: Operand, p: float = 2.0, dim: Any = 1, eps: float = 1e-12, out: Any = None) -> Spec:
    """F.normalize: the dim whole."""
    gone = {d % x.ndim for d in ([dim] if isinstance(dim, int) else dim)}
    dims = tuple(None if i in gone else d for i, d in enumerate(x.dims()))
    return Spec([dims], [dims], [x.shape])


def register(rules: Rules) -> None:
    """Put the rules of this file into the table."""
    rules.name("layer_norm", "rms_norm")(over_last)
    rules.name("group_norm")(group_norm)
    rules.name("normalize")(normalize)
