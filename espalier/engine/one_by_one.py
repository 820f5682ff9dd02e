"""Loops that pass batches through a pipeline by themselves: ``engine(batch)``, ``engine.backward(loss)``.

With ``Plan(accumulate=k)`` each is one micro-batch of k of a step, and passes through the stages alone, when
its loss goes back. Its gradients are weighed by what its loss is a mean over, as under any other plan.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch

from espalier.comm.control import any_says
from espalier.engine.accumulation import Accumulation, Number
from espalier.engine.awaited import Awaited
from espalier.engine.batches import loss_of
from espalier.engine.model_run import StagedPasses
from espalier.engine.sums import Sum
from espalier.meanwhile import having
from espalier.tensor.observers import tell

_ALONE = (
    "engine.backward(loss) in a pipeline: each of the {} micro-batches of a step passes through the stages "
    "alone, and stages wait for one another meanwhile. engine.train_step(batch), or "
    "engine.accumulate(engine.cut(batch)) and engine.step(), let them follow one behind the other."
)
_OWN = (
    "engine.backward(loss) of a loss that the program makes of outputs, with Plan(accumulate={0}) in a "
    "pipeline: there a call of the model is cut into {0} micro-batches where a value is asked for, its "
    "forward writes to its weights, or a loss goes back by itself, and so this one was, or each rank has "
    "rows of its own. Ask for values (loss.item()) after engine.backward(loss); or write loss.backward(), "
    "and a step after each; or engine.train_step(batch)."
)
_SEVERAL = (
    "engine.backward(loss) of a sum of losses of several calls of the model, with Plan(accumulate={0}) in a "
    "pipeline: there a call is one of {0} micro-batches. Write loss.backward(), and a step after each; or "
    "call the model once, with the rows of all calls; or train under a plan with accumulate = 1."
)


class LoopPasses(StagedPasses, Protocol):
    """What of :class:`~espalier.engine.staged.Staged` a loop needs beside what a call of its does."""

    accumulation: Accumulation | None

    @property
    def are_dropped(self) -> bool: ...
    def have_passed(self) -> None: ...
    def forget(self) -> None: ...
    def outputs(self, inputs: Any, rows: str, batch: Any = None) -> Any: ...
    def check_kept(self, of_step: Accumulation) -> None: ...
    def of_last(self, value: torch.Tensor) -> torch.Tensor: ...
    def multiply(self, factor: torch.Tensor | None) -> None: ...


class OneByOne:
    """The micro-batches of a step that the program passes by itself, through the stages of some passes."""

    def __init__(self, passes: LoopPasses) -> None:
        self._passes, self._has_told = passes, False
        self._adds: bool | None = None  # losses are sums; None: not known

    def loss(self, batch: Any) -> Any:
        """The loss of a batch, or, with ``accumulate``, of one micro-batch of a step, before it is there."""
        passes = self._passes
        loss_fn, (inputs, target) = passes.call.loss_fn, passes.call.parted(batch)
        out = passes.outputs(inputs, "all", batch if passes.averaging.size > 1 else None)
        return out._by(loss_of) if loss_fn is None else loss_fn(out, target)

    def backward(self, loss: torch.Tensor) -> None:
        """Let a loss go back, of a step or of a micro-batch.

        Raises:
            ValueError: it is none of this engine's, or one too many; or, with ``accumulate``, its call of the
                model was cut.
        """
        passes = self._passes
        if not (type(loss) is Awaited or type(loss) is Sum):
            raise ValueError(
                f"engine.backward(loss) got a {type(loss).__name__} that comes of no call of this engine. "
                "Give it what loss = engine(batch) is, or what is made of that or of engine(**inputs)."
            )
        run = loss._source
        whole = passes.averaging
        if whole.size > 1 and isinstance(loss, Sum) and loss.is_of_several:
            raise ValueError(_SEVERAL.format(whole.size))
        if passes.accumulation is not whole and whole.size > 1 and self._is_dropped():
            passes.forget()
        step = passes.accumulation
        if run.batch is None:
            if whole.size == 1:
                loss.backward()
                if isinstance(loss, Sum):
                    passes.loss = loss._value()
                return
            if not run.becomes_one_of_several():
                raise ValueError(_OWN.format(whole.size))
        if step is None or step is whole:
            whole.check_open()
            step = Accumulation(whole.size, whole.count, passes.mesh, ())
        step.check_open()
        passes.check_kept(step)
        if not self._has_told:
            self._has_told = True
            tell(_ALONE.format(step.size))
        earlier = passes.taken_gradients()
        passes.accumulation = whole
        try:
            with having(run, is_let_go=True):
                loss.backward()
            if isinstance(loss, Sum):
                passes.loss = loss._value()  # with what is added to that of the call
            assert passes.loss is not None
            one = torch.ones((), dtype=torch.float64, device=passes.mesh.device())
            number = one if run.counts_alike else self._mean_over(run.batch, run.mean_over)
            passes.multiply(step.weigh(passes.loss, number))
        finally:
            passes.add_gradients(earlier)
            passes.have_passed()
            passes.accumulation = step
        if step.complete:
            passes.multiply(step.factor())
        passes.loss = step.loss

    def _is_dropped(self) -> bool:
        """Whether the program has dropped the gradients of all micro-batches (sharpness-aware steps)."""
        step = self._passes.accumulation
        return step is not None and step.complete and self._passes.are_dropped

    def _mean_over(self, batch: Any, seen: Number) -> Number:
        """What the loss of a micro-batch is a mean over; ``seen`` is what the last stage saw."""
        passes = self._passes
        if passes.averaging.count is not None:
            return passes.averaging.number_of(batch)
        mesh = passes.mesh
        if self._adds is None:
            self._adds = mesh.is_dry or not any_says(seen is not None, mesh)
        if self._adds:
            return None
        zero = torch.zeros((), dtype=torch.float64, device=mesh.device())
        return passes.of_last(zero if seen is None else seen)

    def finish(self) -> None:
        """Let the micro-batches so far be all of the step."""
        passes = self._passes
        step = passes.accumulation
        if step is not None and step is not passes.averaging:
            passes.multiply(step.factor())
