"""What an output that is yet to be computed comes of: a call of the model, and hooks of its gradients."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from espalier.engine.accumulation import Number
from espalier.engine.observing import Place, Sight

Keep = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


class Source(Protocol):
    """A call of the model.

    Attributes:
        is_whole: whether a loss is computed on all rows at once, as many as the program sees.
        is_of_all: whether that is so since the program has asked for what micro-batches do not have.
        is_own: whether these are this rank's own rows; ``is_part``: and others have others.
        share_of_loss: what a rank's loss is multiplied by in that of all: 1, or a mean over ranks.
        device: this rank's.
        keep: makes, or keeps, a call with arguments that come of it: ``(func, args, kwargs)``.
        batch: what the engine was given, if it is one micro-batch of several; else None.
        stays: whether losses of it may go back several times.
        is_let_go: whether one micro-batch of several may go back.
        counts_alike: whether it counts as much as others, whatever its loss is a mean over.
        mean_over: what the loss of that is a mean over, where that was seen.
        has_gone_back: whether a loss made of it has.
        calls: numbers of the calls that the program makes of what it gives.
        made_by: of inputs that an earlier call is yet to compute, and of what else of other calls is in its
            loss, what they are values of, by ``id``.
        number: of the calls of the model, the which it is.
        writes: the program's calls that write to what others may share.
        sights: what hooks see, once it has its value.
        told: hooks of gradients of that; ``leaves``: what gets gradients in its place.
        handed_out: what the model gives, as ordinary tensors, if a program was given some.
        known_losses: of losses, by what is done in them: whether they were computed on parts of the rows.
    """

    is_whole: bool
    is_of_all: bool
    is_own: bool
    is_part: bool
    share_of_loss: float
    keep: Keep
    batch: Any
    stays: bool
    is_let_go: bool
    counts_alike: bool
    mean_over: Number
    has_gone_back: bool
    calls: Iterator[int]
    made_by: dict[int, Any]
    writes: list[Any]
    number: int
    sights: list[Sight]
    leaves: list[torch.Tensor]
    told: dict[Place, list[Callable[[torch.Tensor], Any]]]
    handed_out: Any

    @property
    def known_losses(self) -> dict[Hashable, bool]: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def is_updated(self) -> bool:
        """Whether optimizers have made a step since the call."""

    def asked_for(self) -> None:
        """A value of what it gives is: after a step, its outputs are to be kept from now on."""

    def shapes(self) -> Any:
        """What the model gives, its tensors without data (on ``meta``)."""

    def form(self) -> Any:
        """The same of a batch of any shape."""

    def rows(self) -> int:
        """How many the inputs given have."""

    def wanting(self) -> Sequence[torch.Tensor]:
        """The inputs that want gradients."""

    def value(self) -> Any:
        """What the model gives, without gradients."""

    def train(
        self,
        captured: list[torch.Tensor],
        loss: Callable[[Any, Any], Any],
        beside: Mapping[int, torch.Tensor],
        draws: bool = False,
        adds: bool = False,
        seen: Mapping[Place, tuple[torch.Tensor, int | str | None]] = {},
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; ``loss`` is of outputs and what was captured.

        Args:
            beside: leaves in the place of what else is to get gradients, of inputs and of the loss, on all
                ranks; by ``id``.
            draws: whether the loss draws random numbers.
            adds: whether the losses of micro-batches are to be added up, whatever they are.
            seen: gradients of what hooks have seen, and what that is of micro-batches' (:meth:`ways`).
        """

    def ways(self) -> Sequence[int | str | None]:
        """What each tensor of its :meth:`value`, and of what hooks see, is of those of micro-batches.

        The dim along which they are joined, or ``"mean"`` or ``"sum"``; None: none of these.
        """

    def tried(self) -> AbstractContextManager[None]:
        """While open, a pass that fails leaves no trace."""

    def sample(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function gives that draws random numbers, of values that no gradient goes back through.

        It draws what it draws under other plans, behind the model's numbers for its output.
        """

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let all ranks have what tensors are where the loss was computed."""

    def soon(self, through_stages: Callable[[], None]) -> None:
        """Make a pass through the stages that a backward pass of the program's has led to."""

    def becomes_one_of_several(self) -> bool:
        """Be one micro-batch of several; whether it can be yet."""

    def dropped_by_error(self) -> AbstractContextManager[None]:
        """While open, an error makes it no call that later ones run before them."""

    def see_all(self) -> None:
        """Let its losses be computed on all rows at once, of this rank's own where it has such."""

    def is_cut(self) -> bool:
        """Whether the loss is computed on parts of the rows."""

    def parameters(self) -> Iterable[torch.Tensor]:
        """The model's."""

    def may_be_whole(self) -> bool:
        """Whether its output can be computed whole on every rank, with a graph."""

    def whole_output(self, stand: Mapping[int, torch.Tensor]) -> Any:
        """Its output with a graph, as DTensors of all ranks; ``stand``: for some of its inputs, by ``id``."""

    def here(self, tensors: Iterable[torch.Tensor], in_last: bool = False) -> dict[int, torch.Tensor]:
        """By ``id``, what is made of parameters, plain on all ranks: all must ask.

        Args:
            in_last: not those that the last stage has.
        """

    def on_all(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that all ranks have, as a DTensor."""

    def aside(self) -> AbstractContextManager[None]:
        """While open, gradients that there are do not count: they are as before after it."""

    def together(self) -> AbstractContextManager[None]:
        """While open, losses that go back are one to hooks on parameters."""


class Hook:
    """A hook of a gradient that is yet to come: what ``register_hook`` gives of it."""

    def __init__(self, hook: Callable[[torch.Tensor], Any]) -> None:
        self._hook: Callable[[torch.Tensor], Any] | None = hook

    def remove(self) -> None:
        """Call it no more."""
        self._hook = None

    def __call__(self, grad: torch.Tensor) -> Any:
        return None if self._hook is None else self._hook(grad)


def hooked(x: torch.Tensor, hook: Hook) -> torch.Tensor:
    """A tensor whose gradient a hook sees, if it has one."""
    if x.requires_grad:
        x.register_hook(hook)
    return x
