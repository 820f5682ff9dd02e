"""Accumulation: several micro-batches as one batch, averaged over what their losses average over.

Micro-batch i has the loss l_i, a mean over n_i elements; that of the whole batch is Σ n_i l_i / Σ n_i
(huggingface/transformers issue 34191 tells what comes of Σ l_i / k). Σ n_i is known after the last one
only: so the gradient of each is weighed by n_i / n_1, and the whole at the end by n_1 / Σ n_i.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.engine.counting import Counting, Mean, Sum, mark_of, mean_on_one_rank
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.parallel.pipeline.alone import Followed
from espalier.tensor import DTensor, full_tensor, plain, redistribute, stamp
from espalier.tensor.watch import watching

Count = Callable[[Any], Any] | Literal["sum"]
Number = torch.Tensor | None  # None: the loss is a sum, each micro-batch counts once


class UnseenCountError(ValueError):
    """What a loss is a mean over cannot be seen."""


class Accumulation:
    """The micro-batches of one step.

    Args:
        size: micro-batches of a step.
        count: as for ``initialize``; None to see it.
        axes: of the mesh, those that share the batch's rows.

    Attributes:
        done: micro-batches whose gradients are there.
        closed: there will be no more micro-batches.
    """

    def __init__(self, size: int, count: Count | None, mesh: Mesh, axes: tuple[int, ...]) -> None:
        self.size, self._count, self._mesh = size, count, mesh
        self._watcher = Counting(axes)
        self._pending: list[Number] = []
        self.reset()

    def reset(self) -> None:
        """After a step."""
        self.done, self.closed, self._settled = 0, False, False
        self._pending.clear()
        self._first: Number = None
        self._number: Number = None
        self._total: torch.Tensor | None = None
        self._like: tuple[torch.dtype, Layout | None] = (torch.float64, None)

    def forward(self, batch: Any, forward: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch; what it is a mean over is remembered.

        Raises:
            ValueError: that cannot be known.
        """
        if not torch.is_grad_enabled():
            return forward(batch)
        loss, number = self.counted(batch, forward)
        self._pending.append(number)
        return loss

    def evaluate(self, parts: Iterable[Any], forward: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The loss of micro-batches as one batch: a plain scalar. It is no part of a step.

        Raises:
            ValueError: what a loss is a mean over cannot be known, or there is no micro-batch.
        """
        found = []
        for part in parts:
            loss, number = self.counted(part, forward)
            found.append((loss, number))
        return averaged(found)

    def counted(self, batch: Any, forward: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, Number]:
        """The loss of a micro-batch, and what it is a mean over.

        Raises:
            ValueError: that cannot be known.
        """
        if self._count is None:
            with watching(self._watcher):
                loss = forward(batch)
            return loss, self._seen(loss)
        loss = forward(batch)
        return loss, None if self._count == "sum" else self._told(self._count, batch)

    @property
    def followed(self) -> Followed | None:
        """The values of a forward pass that :meth:`counted` looks at."""
        return Followed(self._watcher, _is_marked, mean_on_one_rank) if self._count is None else None

    def check(self) -> None:
        """Before a micro-batch's backward pass.

        Raises:
            ValueError: it is one too many, or it is not one micro-batch's loss.
        """
        if self.complete:
            raise ValueError(
                f"The gradients of {self.done} micro-batches are finished (Plan.accumulate is {self.size}): "
                "call engine.step() before the next backward."
            )
        if len(self._pending) != 1:
            raise ValueError(
                f"With Plan(accumulate={self.size}) each engine.backward(loss) must follow one "
                f"engine(batch), whose loss it is; {len(self._pending)} were called. Evaluate under no_grad."
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradients."""
        (number,) = self._pending
        weight = self.weigh(loss, number)
        self._pending.clear()
        if weight is None:
            loss.backward()
        else:
            loss.backward(weight)

    def weigh(self, loss: torch.Tensor, number: Number) -> Number:
        """The weight of the next micro-batch, given its loss and what :meth:`counted` said; None: 1.

        Raises:
            ValueError: one loss is a mean, another a sum.
        """
        if self.done and (number is None) != (self._first is None):
            raise ValueError("Of the micro-batches of a step, some losses are means and some are sums.")
        weight, value = None, loss.detach() if loss.requires_grad else loss
        if isinstance(value, DTensor) and self._like[1] not in (None, value._layout):
            # one is a sum over ranks yet, the other is not
            whole = Layout.replicated(self._mesh, value.shape)
            value, self._total = redistribute(value, whole), plain(redistribute(self._sum(), whole))
        with raw():
            here = plain(value).to(torch.float64)
            if number is not None:
                here = here * number
                if self._first is None or self._number is None:
                    # of a micro-batch that counts nothing the gradients are zero under any weight
                    self._first, self._number = torch.where(number == 0, 1, number), number
                else:
                    weight, self._number = (number / self._first).to(loss.dtype), self._number + number
            self._total = here if self._total is None else self._total + here
        self._like = loss.dtype, value._layout if isinstance(value, DTensor) else None
        self.done += 1
        return weight

    @property
    def complete(self) -> bool:
        """Whether the step is due."""
        return self.closed or self.done == self.size

    def factor(self) -> torch.Tensor | None:
        """What makes the gradients those of the whole batch, once; no micro-batch may follow."""
        self.closed = self.done > 0
        if self._settled or self._first is None or self._number is None:
            return None
        self._settled = True
        with raw():
            return self._first / self._number

    @property
    def loss(self) -> torch.Tensor | None:
        """That of all micro-batches so far as one batch; None before the first."""
        if self._total is None:
            return None
        dtype, layout = self._like
        with raw():
            found = (self._total if self._number is None else self._total / self._number).to(dtype)
        return found if layout is None else stamp(found, layout)

    def _sum(self) -> DTensor:
        """The weighed sum of losses so far, as it lies."""
        layout = self._like[1]
        assert self._total is not None and layout is not None
        return stamp(self._total.view_as(self._total), layout)

    def _told(self, count: Callable[[Any], Any], batch: Any) -> torch.Tensor:
        if self._mesh.is_dry:  # there are no values to count
            return torch.ones((), dtype=torch.float64, device=self._mesh.device())
        found = count(batch)
        number = full_tensor(found) if isinstance(found, torch.Tensor) else torch.tensor(found)
        if number.numel() != 1 or not number.item() > 0:
            raise ValueError(
                f"count= gave {found!r} for a micro-batch; expected a number above 0: of the tokens (or "
                "rows) that its loss is a mean over."
            )
        return number.reshape(()).to(self._mesh.device(), torch.float64)

    def _seen(self, loss: torch.Tensor) -> Number:
        mark = mark_of(loss)
        if type(mark) is Sum:
            return None
        counts = (
            [full_tensor(n) if isinstance(n, torch.Tensor) else n for n in mark.counts]
            if type(mark) is Mean
            else []
        )
        if not counts or (not self._mesh.is_dry and any(n != counts[0] for n in counts[1:])):
            reason = "is none of a loss function's own means or sums"
            if counts:
                reason = f"adds up means over {' and '.join(str(int(n)) for n in counts)} elements"
            elif mark is not None:
                reason = f"comes from rows that met in {mark.of!r}"  # type: ignore[union-attr]
            raise UnseenCountError(
                "To average over micro-batches the engine must know how many elements the loss of each is a "
                f"mean over, and cannot see it: this loss {reason}. Say it with initialize(..., count=...): "
                "a function of a micro-batch, such as "
                "count=lambda batch: int((batch['labels'] != -100).sum()); or count='sum' if the losses of "
                "the micro-batches are to be added."
            )
        number = torch.as_tensor(counts[0], device=self._mesh.device())
        return number.to(torch.float64)


def _is_marked(x: torch.Tensor) -> bool:
    return mark_of(x) is not None


def averaged(parts: Sequence[tuple[torch.Tensor, Number]]) -> torch.Tensor:
    """The loss of micro-batches, each with what it is a mean over, as one batch: a plain scalar in float64.

    Raises:
        ValueError: there is none.
    """
    if not parts:
        raise ValueError("There is nothing to evaluate: no batch was given.")
    found = torch.stack([full_tensor(loss).to(torch.float64).reshape(()) for loss, _ in parts])
    counts = [n for _, n in parts if n is not None]
    if not counts:
        return found.sum()
    weights = torch.stack(counts)
    return (found * weights).sum() / weights.sum()


__all__ = ["Accumulation", "Count", "UnseenCountError", "averaged"]
