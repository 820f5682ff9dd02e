"""The backward pass of a loss that a pipeline computes: the program's calls, done on each micro-batch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from espalier.engine.awaited_source import Source
from espalier.engine.kept import Kept, evaluated
from espalier.engine.row_order import Beside, beside_rows
from espalier.tensor import DTensor

Leaves = Mapping[int, torch.Tensor]  # by the ``id`` of what they stand for


def of_rows(of: Kept, held: Sequence[torch.Tensor]) -> tuple[dict[int, torch.Tensor], Beside]:
    """Those that micro-batches have parts of, by ``id``, with the batch's rows as their first dim."""
    rows = of._source.rows()
    by_row = {
        id(x): x for x in held if not x.ndim or (x.shape[0] == rows and not isinstance(x, torch.nn.Parameter))
    }
    beside = Beside(frozenset(), {})
    if not of._source.is_whole:
        beside = beside_rows(of, rows)
        by_row |= {id(x): beside.by_rows(x, rows) for x in held if id(x) in {*beside.several, *beside.chosen}}
    return by_row, beside


def leaves_beside(of_loss: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], source: Source) -> Leaves:
    """Leaves in the place of what wants gradients beside the model: inputs, and what a loss has of its own.

    Raises:
        ValueError: the ranks that make the loss do not have it, or have it in parts.
    """
    wanting = [x for x in of_loss if x.requires_grad]
    rows = source.rows() if source.is_cut() else -1
    if any(
        type(x) is DTensor or (x.shape[:1] == (rows,) and not isinstance(x, torch.nn.Parameter))
        for x in wanting
        if id(x) not in source.made_by
    ):
        raise ValueError(
            "The loss holds more of the model, or more of the batch's rows, that wants gradients than the "
            "model's output, and is not a sum: in a pipeline such things are not where it is computed. Add a "
            "penalty to the whole loss, or weigh that (loss + penalty, weight * loss); or let the model's "
            "forward compute it."
        )
    return {id(x): x.detach().requires_grad_() for x in (*wanting, *inputs)}


def hand_on(
    stood_for: Mapping[int, Any],
    leaves: Leaves,
    retain_graph: bool | None,
    only: Sequence[torch.Tensor] | None,
) -> None:
    """Let gradients of leaves go back through what they stood for; ``only`` to these, if they are given."""
    grads = {key: x.grad for key, x in leaves.items() if x.grad is not None}
    awaited = {key for key in grads if isinstance(stood_for[key], Kept)}
    if (here := [key for key in grads if key not in awaited]) and (only is None or only):
        roots = [stood_for[key] for key in here]
        torch.autograd.backward(roots, [grads[key] for key in here], retain_graph=retain_graph, inputs=only)
    if awaited and only is None:  # of other calls, which go back now
        weighed = [(stood_for[key] * grads[key]).sum() for key in grads if key in awaited]
        sum(weighed[1:], weighed[0]).backward(retain_graph=retain_graph)


def replayed(
    of: Kept,
    by_row: Beside,
    ids: Sequence[int],
    beside: Leaves,
    output: Any,
    captured: Sequence[torch.Tensor],
) -> Any:
    """What was kept, done on an output and the captured tensors' rows that belong to it."""
    replacements = {**by_row.as_used(dict(zip(ids, captured, strict=True))), **beside}
    try:
        return evaluated(of, replacements, lambda: output, fresh=True)
    except Exception as error:
        error.add_note(
            "This is the program's loss, which a pipeline computes on each micro-batch: on a part of the "
            "output's rows, and of each tensor that has as many rows as the batch, or that meets them where "
            "rows of the batch come first (output.view(-1, classes), targets.view(-1)). Keep that order, or "
            "let the model's forward compute the loss; with accumulate = 1 any loss goes."
        )
        raise
