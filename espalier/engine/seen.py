"""What a program may see of gradients between a backward pass and the step, and what it makes of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.parallel import Plan
from espalier.parallel.data.gradients import gradient_of
from espalier.tensor.caller import user_frame


class SeenGradients:
    """Bars ``p.grad`` while it is no gradient of the whole batch; tells of changes to what is another thing.

    Gradients of several micro-batches lack a factor, or are under way, until they are finished. Those of a
    pipeline are one rank's, those of float16 are scaled: fine to look at, wrong to clip by their norm.
    """

    def __init__(self, module: nn.Module, plan: Plan) -> None:
        self._module, self._plan = module, plan
        self._noted: tuple[int, int] | None = None
        self._reasons: list[str] = []  # to bar them; the parameters hold it

    def watch(self, parameters: Iterable[torch.Tensor]) -> None:
        """Bar these when all are barred."""
        for p in parameters:
            p._unfinished = self._reasons  # type: ignore[attr-defined]

    @property
    def is_barred(self) -> bool:
        """Whether reading a gradient is an error."""
        return bool(self._reasons)

    def bar(self) -> None:
        """Gradients are not finished."""
        here = ", on each rank those of its own stages" if self._plan.pipe > 1 else ""
        self._reasons.append(
            "p.grad between engine.accumulate(parts) and engine.step(): gradients are known after "
            f"engine.finish_gradients(){here}. To clip by the norm of all, write Plan(clip=1.0), or "
            "initialize(..., max_grad_norm=1.0); to drop them, engine.zero_grad()."
        )

    def admit(self) -> None:
        """Gradients are about to be finished."""
        self._reasons.clear()

    def forget(self) -> None:
        """There are none."""
        self._reasons.clear()
        self._noted = None

    def note(self) -> None:
        """Remember gradients as they were finished, where they are not those of the whole batch."""
        if self._plan.precision.scales or self._plan.pipe > 1:
            self._noted = self._mark()

    def _mark(self) -> tuple[int, int] | None:
        """Changes when gradients are written to."""
        with raw():
            grads = (gradient_of(p) for p in self._module.parameters())
            return next(((id(grad), grad._version) for grad in grads if grad is not None), None)

    def check(self) -> None:
        """Before a step: tell of gradients that were changed since."""
        noted, self._noted = self._noted, None
        if noted is not None and self._mark() != noted:
            reason = f"the gradient times engine.scale ({self._plan.precision})"
            if self._plan.pipe > 1:
                reason = "that of this rank's stages alone"
            warnings.warn(
                f"p.grad was changed before the step. With {self._plan} what is there is {reason}: a norm of "
                "all of them, as clip_grad_norm_ takes, is another. Plan(clip=1.0), or initialize(..., "
                "max_grad_norm=1.0), clips by the right one.",
                stacklevel=user_frame()[0],
            )


__all__ = ["SeenGradients"]
