"""``optimizer.step()`` is the engine's."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any, Protocol, cast

import torch

from espalier.meanwhile import having
from espalier.parallel.apart import is_torchs, use_of_closure
from espalier.parallel.several import Several, holders, parts_of
from espalier.tensor import DTensor
from espalier.tensor.loans import is_whole
from espalier.tensor.observers import tell
from espalier.torch_private import call_before_step, keeps_hooks, without_hooks_before_step

_TOLD = "_told_of_gone"  # at an optimizer: that it was told of its engine
_NOTE = "_use_of_closure"  # at an optimizer: what :func:`use_of_closure` says


class Steps(Protocol):
    """Makes the steps of an optimizer."""

    @property
    def is_stepping(self) -> bool:
        """Whether it makes one."""

    def step_in_loop(self, optimizer: torch.optim.Optimizer) -> bool:
        """Make one that the program has asked the optimizer for; False: there is nothing that it would do."""

    def step_by_closure(self, optimizer: torch.optim.Optimizer, step: Callable[[], Any]) -> Any:
        """Let an optimizer make one of its own, which calls a closure within."""


def bind(optimizer: torch.optim.Optimizer, engine: Steps) -> None:
    """Let ``optimizer.step()`` be the engine's step; as a scheduler's wrapper it holds neither."""
    held_by, made_by = weakref.ref(optimizer), weakref.ref(engine)
    around = getattr(optimizer.step, "__func__", optimizer.step)
    is_method = around is not optimizer.step

    @functools.wraps(around)
    def method(self: torch.optim.Optimizer, *args: Any, **options: Any) -> Any:
        engine, own = made_by(), around.__get__(self, type(self)) if is_method else around
        if engine is None and self is held_by():
            _tell_of_gone(self)
        if engine is None or self is not held_by() or engine.is_stepping:
            return own(*args, **options)
        closure, out = args[0] if args else options.get("closure"), None
        inner, around_update = own, cast(AbstractContextManager[None], nullcontext())
        use = None if closure is None else _use_of_closure(self)
        if use == "never":
            closure, inner = None, partial(own, *args, **options)
        if closure is not None:
            if use == "within":
                return engine.step_by_closure(self, partial(own, *args, **options))
            if keeps_hooks(self):
                closure, around_update = call_before_step(self, closure), without_hooks_before_step(self)
            with torch.enable_grad():
                out = closure()
            if use is not None and not is_torchs(self):
                inner = partial(own, lambda: out)  # that asks what the loss is
        # within, the optimizer's own step, without what others have put around it: that runs now
        with having(self, step=inner), around_update:
            if not engine.step_in_loop(self):
                made = inner()
                out = made if closure is None else out
        return out

    @functools.wraps(around)
    def step(*args: Any, **options: Any) -> Any:
        return method(held_by(), *args, **options)  # type: ignore[arg-type]

    step.__func__ = method  # type: ignore[attr-defined]
    step.engine = method.engine = made_by  # type: ignore[attr-defined]  # a schedule's wrapper has it, too
    optimizer.step = step  # type: ignore[method-assign]


def _tell_of_gone(optimizer: torch.optim.Optimizer) -> None:
    """Tell of an optimizer whose engine is gone: nobody sums its gradients over the ranks.

    Raises:
        ValueError: its parameters are cut, and only an engine can update them.
    """
    name = type(optimizer).__name__
    said = (
        f"{name}.step(): the engine that makes its steps is gone, as nobody has kept what espalier.prepare "
        "(or initialize) gave back. Write model, optimizer = espalier.prepare(model, optimizer, plan=...), "
        "and call that model"
    )
    held = [p for group in optimizer.param_groups for p in group["params"]]
    if any(type(p) is DTensor and not is_whole(p._layout) for p in held):
        raise ValueError(f"{said}: its parameters are cut over the ranks.")
    if _TOLD not in vars(optimizer):
        vars(optimizer)[_TOLD] = True
        tell(
            f"{said}. Each rank computes by itself now, and is right only where all are given the same rows."
        )


def _use_of_closure(optimizer: torch.optim.Optimizer) -> str | None:
    if _NOTE not in vars(optimizer):
        vars(optimizer)[_NOTE] = use_of_closure(optimizer)
    found: str | None = vars(optimizer)[_NOTE]
    return found


def engine_of_steps(optimizer: torch.optim.Optimizer) -> Any:
    """The engine that makes the steps of an optimizer, as :func:`bind` says."""
    made_by = getattr(optimizer.step, "engine", None)
    return None if made_by is None else made_by()


def tell_of_others(optimizer: torch.optim.Optimizer | None, parameters: Iterable[torch.Tensor]) -> None:
    """Warn of an optimizer that has stepped these, and whose states a checkpoint would lack."""
    own = [] if optimizer is None else parts_of(optimizer)
    for x in holders(parameters):
        if not x.state or isinstance(x, Several) or engine_of_steps(x) is not None:
            continue
        if any(x.state is part.state or x.param_groups is part.param_groups for part in own):
            continue  # one around the other
        name, has = type(x).__name__, " and ".join(type(part).__name__ for part in own) or "none"
        tell(
            f"engine.save: {name}, made after espalier.prepare (or initialize), has stepped the model's "
            f"parameters, and the checkpoint will not have its states: the engine's own optimizer is {has}. "
            "Write model.engine.attach(optimizer, instead=True) once it is made, before its first step."
        )
