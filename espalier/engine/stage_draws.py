"""Random numbers of a pipeline's run: each stage draws, of a micro-batch, what one process would draw there.

What a forward draws from torch's generators is known beforehand, from its run without data. What it draws
elsewhere (Python's and NumPy's generators, numbers that hang on values), and what the loss draws, ranks hear
from the one that has drawn it, behind the run.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any

import torch

from espalier.comm.control import any_says
from espalier.engine.model_call import ModelCall
from espalier.mesh import Mesh
from espalier.parallel.compose import Stages
from espalier.tensor.draws import Dice, Draw, States, draw_again, equal, restore, states
from espalier.tensor.observers import tell
from espalier.tensor.random import stream_of

Draws = tuple[tuple[Draw, ...], ...]  # of each stage, from torch's generators


class StageDraws:
    """Those of one run.

    Args:
        mesh: with the axis ``pipe``.
        draws_of: each micro-batch.
        rolling: the stages that draw from generators which are not torch's.
        loss_draws: whether losses draw; None: that is to be seen, by all ranks.
        trains: whether the model is in training mode.
    """

    def __init__(
        self,
        call: ModelCall,
        mesh: Mesh,
        stages: Stages,
        draws_of: Sequence[Draws],
        rolling: Sequence[int],
        loss_draws: bool | None,
        trains: bool,
    ) -> None:
        self._call, self._mesh, self._device, self._trains = call, mesh, mesh.device(), trains
        self._around, self._after = random_states(draws_of, stages.local, mesh)
        self._is_rolling, self._loss_draws = bool(rolling), loss_draws
        self._loss_ends: States | None = None  # what the losses so far have drawn
        self._dice: Dice | None = None
        if (rolling or loss_draws is not False) and not mesh.is_dry:
            if rolling or loss_draws:
                stream_of(mesh)  # agreed on by all at once, not by one stage alone
            self._dice = Dice(mesh, stages.places[max(rolling, default=-1)])

    def of_stage(self, stage: int, micro_batch: int, rolls: bool, compute: Callable[[], Any]) -> Any:
        """What a stage computes; ``rolls``: it draws what others hear behind the run."""
        begins, ends = self._around.get((stage, micro_batch), (None, None))
        if begins is not None:
            restore(self._device, begins)
        ends = ends or states(self._device)
        out = compute()
        if not (self._mesh.is_dry or rolls) and not equal(states(self._device), ends):
            _warn_of_draws(stage)
            restore(self._device, ends)  # as all other ranks
        return out

    def of_loss(self, compute: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch: it draws behind what the model draws for all of them."""
        if self._call.loss_fn is None or self._call.loss_draws is False or self._mesh.is_dry:
            return compute()
        begins = self._ends()
        if begins is not None:
            restore(self._device, begins)
        begins = begins or states(self._device)
        loss = compute()
        ends = states(self._device)
        if not equal(begins, ends):
            if self._loss_draws is False:  # as seen before: nobody else knows
                _warn_of_loss()
                restore(self._device, begins)
            else:
                self._loss_ends = ends
        return loss

    def _ends(self) -> States | None:
        """Behind what was drawn so far; None where it is known of nothing."""
        return self._loss_ends or self._call.loss_begins or self._after

    def leave(self) -> None:
        """The run is over: all ranks go on behind it, as one process does."""
        if (ends := self._ends()) is not None:
            restore(self._device, ends)
        if self._loss_draws is None and not self._mesh.is_dry:
            told = any_says(self._loss_ends is not None, self._mesh)
            self._loss_draws = self._call.seen_to_draw[self._trains] = told
        if self._dice is not None and (self._loss_draws or self._is_rolling):
            self._dice.tell()


@lru_cache(maxsize=64)
def _warn_of_draws(stage: int) -> None:
    # cached: once for each stage
    tell(
        f"Stage {stage} has drawn other random numbers than its run without data: how many hangs on values, "
        "or on what it has drawn before (a layer left out by lot, say). Other stages cannot know where to go "
        "on, and go on from where that run came to: right, but not the numbers that one process draws. For "
        "these, draw as many whatever comes, or from a torch.Generator of the module's own."
    )


@lru_cache(maxsize=1)
def _warn_of_loss() -> None:
    # cached: once
    tell(
        "The loss function has drawn random numbers, and did not in its first call. Other stages go on as if "
        "it had not: right, but not the numbers that one process draws. Draw in the first call, too, or from "
        "a torch.Generator of its own."
    )


def random_states(
    draws_of: Sequence[Draws], local: Sequence[int], mesh: Mesh
) -> tuple[dict[tuple[int, int], tuple[States, States]], States | None]:
    """The states of torch's generators before and after each stage of this rank and micro-batch, and all.

    They are those of one process, which does a micro-batch after the other.

    Args:
        draws_of: each micro-batch.
    """
    states_around: dict[tuple[int, int], tuple[States, States]] = {}
    if mesh.is_dry or not any(map(any, draws_of)):
        return states_around, None
    if mesh.size() > 1:
        stream_of(mesh)  # agreed on by all at once, not by each stage for each micro-batch
    device = mesh.device()
    before = now = states(device)
    for micro, stages in enumerate(draws_of):
        for stage, draws in enumerate(stages):
            draw_again(draws, device)
            was, now = now, states(device)
            if stage in local:
                states_around[stage, micro] = was, now
    restore(device, before)
    return states_around, now
