"""Autograd functions of well-known libraries, and the two rules that most functions need.

Functions are known by the package they come from and their name, so no library is imported for them.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch.autograd import Function

from espalier.layout.layout import normal_dim
from espalier.tensor.rules import RULES
from espalier.tensor.rules.pointwise import found, letters, nonlinear
from espalier.tensor.rules.spec import Operand, RuleFunction, Spec


def elementwise(*args: Any, **kwargs: Any) -> Spec:
    """The rule of a function that works element by element on all tensors it is given, broadcast together.

    >>> espalier.register_rule(MyFunction)(espalier.elementwise)      # doctest: +SKIP

    It has one output, of the shape to which the inputs are broadcast.
    """
    return nonlinear(*args, **kwargs)


def rowwise(x: Operand, *args: Any, **kwargs: Any) -> Spec:
    """The rule of a function that works on each row of its first tensor by itself.

    A row is all that the last dim holds; what else the function is given it uses whole for each row. It has
    one output, of the first tensor's shape.

    >>> espalier.register_rule(MyNorm)(espalier.rowwise)              # doctest: +SKIP
    """
    return _along(x, -1, found(args, kwargs))


def _along(x: Operand, dim: int, others: list[Operand]) -> Spec:
    """Of a function that looks along one dim of the first tensor."""
    at = normal_dim(dim, x.ndim)
    dims = tuple(None if i == at else d for i, d in enumerate(x.dims()))
    return Spec([dims, *((None,) * o.ndim for o in others)], [dims], [x.shape])


def knows(function: type[Function]) -> bool:
    """Whether there is a rule for an autograd function; one of a library's is put into the table."""
    if RULES.get(function.apply) is not None:
        return True
    own = (function.__module__.partition(".")[0], function.__qualname__)
    if own in _RULES:
        RULES.add(function.apply, _RULES[own])
    elif own in _BODIES and RULES.body(function.apply) is None:
        RULES.compose(_BODIES[own], function.apply)
    return own in _RULES


def _masked_softmax(x: Operand, mask: Operand, dim: int) -> Spec:
    """A softmax along a dim (of DeBERTa and its kin)."""
    at = normal_dim(dim, x.ndim)
    dims = x.dims()
    of_mask = letters(mask.shape, x.shape)
    return Spec([dims, of_mask], [dims], [x.shape], blocked=frozenset([dims[at]]))


def _quantized(x: Operand, k: Any, percentile_mode: Any, scale: Operand) -> Spec | None:
    """One scale for all (of I-BERT)."""
    dims = x.dims()
    return Spec([dims, (None,) * scale.ndim], [dims], [x.shape]) if scale.shape.numel() == 1 else None  # type: ignore[attr-defined]


def _of_experts(*operands: Operand) -> Spec:
    """scores, multiplier, selected_experts, masked_gates, mask_for_one: a row is a token (of Phi-MoE)."""
    ins = [("n", *(None,) * (o.ndim - 1)) for o in operands]
    return Spec(ins, [("n", *(None,) * (operands[1].ndim - 1))], [operands[1].shape])


def _unsorted(vectors: Operand, logits: Operand, order: Operand, back: Operand) -> Spec:
    """vectors [b, h, s, d], the others [b, h, s]: put in another order along s (of Reformer)."""
    ins = [("b", "h", None, "d"), *[("b", "h", None)] * 3]
    return Spec(ins, ins[:2], [vectors.shape, logits.shape])


def _expected(
    query_mask: Operand, key_mask: Operand, query: Operand, key: Operand, value: Operand, config: Any
) -> Spec:
    """query [b, n, d], key [b, m, d], value [b, m, e] (of YOSO)."""
    ins = [("b", "n"), ("b", None), ("b", "n", None), ("b", None, None), ("b", None, None)]
    return Spec(ins, [("b", "n", None)], [(*query.shape[:2], value.shape[-1])])


def _dropped(x: torch.Tensor, context: Any) -> torch.Tensor:
    """A dropout whose mask a context may keep (of SEW-D)."""
    get_mask = sys.modules["transformers.models.sew_d.modeling_sew_d"].get_mask
    mask, rate = get_mask(x, context)
    return x.masked_fill(mask, 0) / (1 - rate) if rate > 0 else x


def _batch_norm(
    x: torch.Tensor,
    weight: Any,
    bias: Any,
    running_mean: Any,
    running_var: Any,
    eps: float,
    momentum: float,
    *of_group: Any,
) -> torch.Tensor:
    """Batch norms of DTensors are those of the whole batch anyway."""
    return F.batch_norm(x, running_mean, running_var, weight, bias, True, momentum, eps)


_ELEMENTWISE = {
    "transformers": "GeLUFunction SqrtBoundDerivative floor_ste round_ste",
    "timm": (
        "SwishAutoFn MishAutoFn HardSigmoidAutoFn HardSwishAutoFn HardMishAutoFn SwishJitAutoFn "
        "MishJitAutoFn HardSigmoidJitAutoFn HardSwishJitAutoFn HardMishJitAutoFn"
    ),
    "efficientnet_pytorch": "SwishImplementation",
}
_RULES: dict[tuple[str, str], RuleFunction] = {
    **{(package, name): elementwise for package, names in _ELEMENTWISE.items() for name in names.split()},
    ("transformers", "ActQuant"): rowwise,
    ("transformers", "XSoftmax"): _masked_softmax,
    ("transformers", "SymmetricQuantFunction"): _quantized,
    ("transformers", "PhimoeMultiplier"): _of_experts,
    ("transformers", "ReverseSort"): _unsorted,
    ("transformers", "YosoCumulation"): _expected,
}
_BODIES: dict[tuple[str, str], Callable[..., Any]] = {
    ("transformers", "XDropout"): _dropped,
    ("torch", "SyncBatchNorm"): _batch_norm,
}

__all__ = ["elementwise", "knows", "rowwise"]
