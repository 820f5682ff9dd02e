"""A model that cannot be divided among stages: the last one computes all of it, the others nothing.

That is right, and slow: one rank of the axis ``pipe`` computes and holds what one process would. It is what
is left where a forward pass changes the model, takes gradients, or decides by values between its modules.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import nn

from espalier.parallel.pipeline.runtime import Agreed
from espalier.parallel.pipeline.split import StageProgram
from espalier.parallel.pipeline.trees import called


class WholeProgram(StageProgram):
    """What a stage does that has all of a model, or nothing.

    Args:
        model: what it computes; None: nothing.
    """

    def __init__(self, number: int, model: nn.Module | None) -> None:
        self.number, self._whole = number, model
        self.inputs, self.outputs, self.steps, self.given = (), (), (), frozenset()
        self.inner = () if model is None else tuple(model.modules())

    def __call__(self, received: Sequence[torch.Tensor], batch: Any, runner: Any = None) -> Any:
        """The model's output; of a stage that does nothing, no tensors."""
        return () if self._whole is None else called(self._whole, batch)

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that it uses."""
        return [] if self._whole is None else list(self._whole.parameters())

    def buffers(self) -> list[torch.Tensor]:
        """The buffers that it uses."""
        return [] if self._whole is None else list(self._whole.buffers())


class Undivided:
    """A model as stages of which the last has all, as :class:`~espalier.parallel.pipeline.split.Split`."""

    def __init__(self, model: nn.Module, number: int) -> None:
        self._model, last = model, number - 1
        self.cuts: tuple[str, ...] = ()
        self.dice = last
        self.stages = tuple(WholeProgram(i, model if i == last else None) for i in range(number))
        nothing = ((),) * last
        rebuild: tuple[Callable[[Any], tuple[Any, ...]], ...] = (tuple,) * last
        self._agreed = Agreed(nothing, nothing, False, rebuild, ((),) * number, {})

    def at_all(self, batches: Iterable[Any]) -> list[Undivided]:
        """The same for each batch."""
        return [self for _ in batches]

    @property
    def users(self) -> dict[str, tuple[int, ...]]:
        """For each parameter and buffer, by all its names, the stage that uses it."""
        model, last = self._model, (len(self.stages) - 1,)
        every = *model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)
        return {name: last for name, _ in every}

    def agreement(self, *_: Any) -> Agreed:
        """In the place of :class:`~espalier.parallel.pipeline.agreement.Agreement`: nothing is sent."""
        return self._agreed


__all__ = ["Undivided", "WholeProgram"]
