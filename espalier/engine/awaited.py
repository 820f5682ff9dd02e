"""Outputs that a pipeline has yet to compute: what is made of them is kept, and done in the last stage.

A plain loop asks for the output, makes a loss of it and lets that go back. In a pipeline there is no output
before the backward passes begin: so :class:`Awaited` stands for it. Calls of torch and operators on it give
others; ``backward()`` runs all micro-batches through the stages, with what was kept as their loss function.
Where a value is asked for before, the model is run once for it, without gradients.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, NoReturn, Protocol

import torch

from espalier.engine.accumulation import OfAll
from espalier.trees import leaves, tree_map

_CONSTANT = ("weight", "pos_weight")  # arguments of losses that may be as long as a batch


class Source(Protocol):
    """A call of the model."""

    def rows(self) -> int:
        """How many the inputs given have."""

    def value(self) -> Any:
        """What the model gives, without gradients."""

    def train(self, captured: list[torch.Tensor], loss: Callable[[Any, Any], Any]) -> torch.Tensor:
        """Forward and backward of all micro-batches; ``loss`` is of outputs and what was captured."""


class _Step(NamedTuple):
    """One call that was kept."""

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]


class Awaited:
    """An output of the model, or what was made of one, before it is there."""

    def __init__(self, source: Source, step: _Step | None = None) -> None:
        self._source, self._step = source, step
        self._known: Any = None
        self._has_gone_back = False

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.autograd.grad:
            raise TypeError(
                "torch.autograd.grad of an output: In a pipeline it is yet to be computed, and not where the "
                "input is. Take the gradient in the model's forward, or train under a plan without pipe."
            )
        return _kept(func, args, kwargs or {})

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return _kept(getattr, (self, name), {})

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return _kept(_call, (self, *args), kwargs)

    def by(self, func: Callable[[Any], Any]) -> Any:
        """What a function makes of it."""
        return _kept(func, (self,), {})

    def local_value(self) -> Awaited:
        """Itself."""
        return self

    def backward(self, gradient: None = None, retain_graph: bool | None = None) -> None:
        """Forward and backward of the step that it is the loss of.

        Raises:
            ValueError: another gradient than that of the loss itself is asked for; or something else in the
                loss wants one, too.
        """
        if gradient is not None:
            raise ValueError("In a pipeline backward() begins with the loss alone: scale the loss itself.")
        held = _captured(self)
        if any(x.requires_grad for x in held):
            raise ValueError(
                "The loss holds more that wants gradients than the model's output: parameters, say. In a "
                "pipeline they are not all where the loss is. Make it a part of the model's forward; for a "
                "penalty on parameters use the optimizer's weight_decay, or change p.grad before the step."
            )
        captured = [x for x in held if not x.ndim or x.shape[0] == self._source.rows()]
        self._known = self._source.train(captured, partial(_replayed, self, [id(x) for x in captured]))
        self._has_gone_back, whole = True, self
        while whole._step is not None and whole._step.func is operator.truediv:
            inner, parts = whole._step.args
            if not isinstance(inner, Awaited) or not isinstance(parts, int | float):
                break
            inner._known, inner._has_gone_back = whole._known * parts, True  # accelerate divides it
            whole = inner

    def value(self) -> Any:
        """What it is, without gradients: all ranks must ask."""
        if self._known is None:
            with torch.no_grad():
                self._known = _evaluated(self, {}, {}, self._source.value)
        return self._known

    def item(self) -> Any:
        """Its one number."""
        return self.value().item()

    def tolist(self) -> Any:
        """Its numbers."""
        return self.value().tolist()

    def numpy(self) -> Any:
        """Its numbers."""
        return self.value().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self.value().__array__(dtype)

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __len__(self) -> int:
        return len(self.value())

    def __iter__(self) -> Iterator[Any]:
        return iter(self.value())

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __setitem__(self, key: Any, value: Any) -> NoReturn:
        raise TypeError(
            "What a pipeline has yet to compute cannot be written to: clone() what you have of it."
        )

    __hash__ = object.__hash__


def _operator(func: Callable[..., Any], swaps: bool = False) -> Callable[..., Any]:
    def kept(self: Awaited, *others: Any) -> Any:
        return _kept(func, (*others, self) if swaps else (self, *others), {})

    return kept


for _name in "add sub mul truediv floordiv mod pow matmul".split():
    setattr(Awaited, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(Awaited, f"__r{_name}__", _operator(getattr(operator, _name), swaps=True))
for _name in "eq ne lt le gt ge neg getitem".split():
    setattr(Awaited, f"__{_name}__", _operator(getattr(operator, _name)))


def _call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _kept(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    first, *others = held = leaves([list(args), dict(kwargs)], Awaited)
    if all(x._has_gone_back for x in held):  # it is there: a sum of losses over steps, say
        values = tree_map(lambda x: x._known if isinstance(x, Awaited) else x, [list(args), dict(kwargs)])
        return func(*values[0], **values[1])
    if any(x._source is not first._source for x in others):
        raise ValueError(
            "Outputs of two calls of the model meet. In a pipeline a loss is made of one call: call the "
            "model on both inputs, model(torch.cat([a, b])).chunk(2); or, where losses are added, let each "
            "go back by itself, loss_a.backward() and loss_b.backward(), before the step."
        )
    return Awaited(first._source, _Step(func, list(args), dict(kwargs)))


def _captured(of: Awaited) -> list[torch.Tensor]:
    """The tensors that what was kept is made of, beside the output."""
    if of._step is None:
        return []
    kwargs = {name: x for name, x in of._step.kwargs.items() if name not in _CONSTANT}
    arguments = [list(of._step.args), kwargs]
    within = [x for one in leaves(arguments, Awaited) for x in _captured(one)]
    return list({id(x): x for x in [*within, *leaves(arguments, torch.Tensor)]}.values())


def _replayed(of: Awaited, ids: Sequence[int], output: Any, captured: Sequence[torch.Tensor]) -> Any:
    """What was kept, done on an output and the captured tensors' rows that belong to it."""
    try:
        return _evaluated(of, dict(zip(ids, captured, strict=True)), {}, lambda: output, fresh=True)
    except Exception as error:
        error.add_note(
            "This is the program's loss, which a pipeline computes on each micro-batch: on a part of the "
            "output's rows, and of each tensor that has as many rows as the batch."
        )
        raise


def _evaluated(
    of: Awaited,
    replacements: Mapping[int, torch.Tensor],
    done: dict[int, Any],
    output: Callable[[], Any],
    fresh: bool = False,
) -> Any:
    if id(of) in done:
        return done[id(of)]
    if of._known is not None and not fresh:
        return of._known
    if of._step is None:
        value = output()
    else:

        def inner(x: Any) -> Any:
            if isinstance(x, Awaited):
                return _evaluated(x, replacements, done, output, fresh)
            return replacements.get(id(x), x) if isinstance(x, torch.Tensor) else x

        step = of._step
        args = tree_map(inner, step.args)
        if step.func is operator.truediv and isinstance(step.args[1], int | float):
            args[1] = OfAll(args[1])  # the loop's own: it knows nothing of micro-batches
        value = step.func(*args, **tree_map(inner, dict(step.kwargs)))
    done[id(of)] = value
    return value
