"""Several optimizers of one model as one: Muon for its matrices and AdamW for the rest, say."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence
from itertools import islice
from typing import Any

import torch

from espalier.meanwhile import having
from espalier.torch_private import keeps_hooks
from espalier.trees import instances_of

State = dict[str, Any]
Optimizers = torch.optim.Optimizer | Sequence[torch.optim.Optimizer]


def holders(parameters: Iterable[torch.Tensor]) -> list[torch.optim.Optimizer]:
    """The optimizers that hold any of these, wherever the program keeps them."""
    own = {id(p) for p in parameters}
    return [
        x
        for x in instances_of(torch.optim.Optimizer)
        if any(id(p) in own for group in x.param_groups for p in group["params"])
    ]


class Several(torch.optim.Optimizer):
    """Optimizers that an engine steps together; each can also be stepped by itself.

    Groups and states are the parts' own, in their order: what is written to them here is written there.

    Args:
        parts: optimizers, no two of which hold the same parameter.

    Raises:
        ValueError: a parameter is in two of them.
    """

    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self.parts = tuple(parts)
        self.defaults: dict[str, Any] = {}
        self._step_part: Callable[[torch.optim.Optimizer], Any] = _step
        held = [id(p) for group in self.param_groups for p in group["params"]]
        if twice := len(held) - len(set(held)):
            kinds = ", ".join(type(part).__name__ for part in self.parts)
            raise ValueError(
                f"{twice} parameter(s) are held by two of the optimizers ({kinds}). Give each to one. To "
                "train by one after the other, give the first alone, and then write "
                "model.engine.attach(other, instead=True), or make the other when the first is gone."
            )
        super().__setstate__({})  # hooks, as of an optimizer that was loaded

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """Those of all parts."""
        return [group for part in self.parts for group in part.param_groups]

    @property
    def state(self) -> MutableMapping[torch.Tensor, State]:  # type: ignore[override]
        """Those of all parts, by parameter."""
        return _States(self.parts)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of each."""
        loss = None if closure is None else torch.enable_grad()(closure)()
        for part in self.parts:
            self._step_part(part)
        return loss

    def step_by(self, step_part: Callable[[torch.optim.Optimizer], None]) -> None:
        """:meth:`step`, with what is around it (a schedule counts it), by this of each part."""
        with having(self, _step_part=step_part):
            self.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Of all parts."""
        for part in self.parts:
            part.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Refused: which part would have it?"""
        raise ValueError("These are several optimizers: call add_param_group of the one that is to train it.")

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what :meth:`state_dict` of optimizers with the same groups has given."""
        groups = iter(state_dict["param_groups"])
        for part in self.parts:
            own = list(islice(groups, len(part.param_groups)))
            held = {i for group in own for i in group["params"]}
            states = {i: state for i, state in state_dict["state"].items() if i in held}
            part.load_state_dict({"state": states, "param_groups": own})


def as_one(optimizers: Optimizers) -> torch.optim.Optimizer:
    """One optimizer, of one or of several.

    Raises:
        TypeError: something else is among them.
        ValueError: there is none, or a parameter is in two of them.
    """
    is_one = isinstance(optimizers, torch.optim.Optimizer)
    if not is_one and not isinstance(optimizers, Iterable):
        given = optimizers.__name__ if isinstance(optimizers, type) else type(optimizers).__name__
        raise TypeError(
            f"The optimizer is {given}, expected one that is made, such as "
            "torch.optim.AdamW(model.parameters()), a list of these, or None to evaluate only."
        )
    parts: list[torch.optim.Optimizer] = [optimizers] if is_one else list(optimizers)  # type: ignore[list-item, arg-type]
    for part in parts:
        if not isinstance(part, torch.optim.Optimizer):
            raise TypeError(f"Expected optimizers of torch.optim, got {type(part).__name__} among them.")
        if not keeps_hooks(part):  # one around another, which never called ours
            step = type(part).step
            torch.optim.Optimizer.__setstate__(part, {})
            if type(part).step is not step:  # others of this class have no hooks that it would call
                type(part).step = step  # type: ignore[method-assign]
            _share_state(part)
    if not parts:
        raise ValueError(
            "Expected an optimizer or a list of them, got an empty list. To evaluate only, give None."
        )
    return parts[0] if len(parts) == 1 else Several(parts)


def inner_of(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer | None:
    """The optimizer of the same groups that one is around."""
    held = (x for x in vars(optimizer).values() if isinstance(x, torch.optim.Optimizer))
    return next((x for x in held if x.param_groups is optimizer.param_groups), None)


def _share_state(outer: torch.optim.Optimizer) -> None:
    """Let one around another that has no states of its own have the other's, as all that there are."""
    inner = inner_of(outer)
    if inner is None or outer.state or outer.state is inner.state:
        return

    def share(inner: torch.optim.Optimizer) -> None:
        outer.state = inner.state

    share(inner)
    inner.register_load_state_dict_post_hook(share)  # which gives it another


def parts_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that it is."""
    return optimizer.parts if isinstance(optimizer, Several) else (optimizer,)


def _step(part: torch.optim.Optimizer) -> None:
    part.step()


class _States(MutableMapping[torch.Tensor, State]):
    def __init__(self, parts: Sequence[torch.optim.Optimizer]) -> None:
        self._parts = parts

    def _owner(self, p: torch.Tensor) -> torch.optim.Optimizer:
        for part in self._parts:
            if any(p is held for group in part.param_groups for held in group["params"]):
                return part
        raise KeyError(p)

    def __getitem__(self, p: torch.Tensor) -> State:
        for part in self._parts:
            if p in part.state:
                return part.state[p]
        return self._owner(p).state[p]

    def get(self, p: torch.Tensor, default: Any = None) -> Any:
        return next((part.state[p] for part in self._parts if p in part.state), default)

    def __contains__(self, p: object) -> bool:
        return any(p in part.state for part in self._parts)

    def __setitem__(self, p: torch.Tensor, state: State) -> None:
        self._owner(p).state[p] = state

    def __delitem__(self, p: torch.Tensor) -> None:
        del self._owner(p).state[p]

    def __iter__(self) -> Iterator[torch.Tensor]:
        for part in self._parts:
            yield from part.state

    def __len__(self) -> int:
        return sum(len(part.state) for part in self._parts)
