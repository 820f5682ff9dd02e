"""``torch.autograd`` of what a pipeline has yet to compute: backward passes, and gradients by themselves."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch

from espalier.engine.awaited import Awaited
from espalier.engine.going_back import whole_loss
from espalier.engine.kept import Kept
from espalier.engine.model_run import ModelRun
from espalier.engine.seen import gradient_seen
from espalier.engine.sums import Sum
from espalier.tensor import DTensor


def gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` of a loss with respect to parameters of the model, to inputs, and its own."""
    loss = _weighed(outputs, grad_outputs)
    sought = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    of_model = set(map(id, loss._source.parameters()))
    beside = [x for x in sought if id(x) not in of_model]
    is_simple = not is_grads_batched and not isinstance(loss, Sum)
    if create_graph and is_simple and _is_of_inputs(loss._source, beside):
        return _with_graph(loss, sought, allow_unused, materialize_grads)
    asks_for_more = create_graph or is_grads_batched
    is_made = any(type(x) is DTensor or not x.is_leaf for x in beside)
    if asks_for_more or is_made or (beside and isinstance(loss, Sum)):
        raise TypeError(
            "torch.autograd.grad: In a pipeline it gives the gradients of a loss with respect to the model's "
            "parameters, its inputs, and parameters of the loss; with create_graph=True those with respect "
            "to what inputs of one call are made of, which all ranks give whole. Others are not where the "
            "loss is: take them in the model's forward, or train under a plan without pipe."
        )
    before = [x.grad for x in beside]
    try:
        for x in beside:
            x.grad = None
        loss._only = beside
        with loss._source.aside():
            loss.backward(retain_graph=retain_graph)
            found = [None if (grad := gradient_seen(p)) is None else _copied(grad) for p in sought]
    finally:
        loss._only = None
        for x, grad in zip(beside, before, strict=True):
            x.grad = grad
    if materialize_grads:
        return tuple(
            torch.zeros_like(p) if grad is None else grad for p, grad in zip(sought, found, strict=True)
        )
    if not allow_unused and any(grad is None for grad in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


def _with_graph(
    loss: Kept, sought: Sequence[torch.Tensor], allow_unused: bool | None, materialize_grads: bool
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` of a loss with respect to inputs of the model, of which losses may be made.

    Args:
        sought: tensors that all ranks have, whole, and parameters of the model.
    """
    with torch.enable_grad():
        grads = torch.autograd.grad(
            whole_loss(loss, {}),
            sought,
            create_graph=True,
            allow_unused=allow_unused,
            materialize_grads=materialize_grads,
        )
        return tuple(
            grad if grad is None or type(x) is DTensor else loss._source.on_all(grad)
            for x, grad in zip(sought, grads, strict=True)
        )


def _is_of_inputs(source: ModelRun, sought: Sequence[torch.Tensor]) -> bool:
    """Whether what is sought are inputs, or what they are made of, which all ranks have whole."""
    if source.made_by or not source.may_be_whole():
        return False
    return all(type(x) is torch.Tensor and x.requires_grad for x in sought)


def _weighed(outputs: Any, gradients: Any) -> Awaited:
    """The loss that a backward pass of several outputs is of, which begins with these gradients of them."""
    several: list[Any] = [outputs] if isinstance(outputs, Awaited) else [*outputs]
    begins: list[Any] = [gradients] if isinstance(gradients, torch.Tensor | Awaited | None) else [*gradients]
    if len(begins) == 1 and begins[0] is None:
        begins = begins * len(several)
    if len(begins) != len(several):
        raise RuntimeError(f"{len(several)} tensors to start from, but {len(begins)} gradients for them.")
    losses: list[Any] = []
    for x, gradient in zip(several, begins, strict=True):
        if gradient is not None:
            losses.append((x * gradient).sum())
        elif isinstance(x, Awaited) and isinstance(x._shapes(), tuple):
            losses.extend(x)  # += would ask what is awaited first
        else:
            losses.append(x)
    total: Awaited = sum(losses[1:], losses[0])
    return total


def go_back(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward`` of losses, or of what else is made of outputs, with its gradients."""
    gradients = grad_variables if grad_tensors is None else grad_tensors
    _weighed(tensors, gradients).backward(None, retain_graph, create_graph, inputs)


def _copied(grad: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient, whose numbers all ranks may ask for: of this pass."""
    if isinstance(grad, DTensor) and (asked := grad._asked) is not None:
        asked.changed()
    return copy.deepcopy(grad)
