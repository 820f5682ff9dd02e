"""Sums of losses in pipelines: of several calls of the model, and of penalties on parameters.

Each call goes through the stages once; what is added to it goes back beside.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Iterable, Sequence
from functools import partial, reduce
from typing import Any, NamedTuple

import torch

from espalier.comm import all_reduce
from espalier.engine.awaited import ATTRIBUTES, QUESTIONS, Awaited, is_number
from espalier.engine.kept import call_method, without_data
from espalier.engine.model_run import ModelRun
from espalier.tensor import DTensor, full_tensor
from espalier.torch_private import raw


class Term(NamedTuple):
    """A number that a sum is made of: of a call of the model, of parameters alone, or a product of both."""

    loss: Awaited | None
    factor: torch.Tensor | None = None

    def done(self, func: Callable[..., Any], *more: Any) -> Term:
        """What a function that is linear gives for it."""
        if self.loss is None:
            return Term(None, func(self.factor, *more))
        return _term(func(self.loss, *more), self.factor)

    def detached(self) -> Term:
        """Without gradients."""
        factor = None if self.factor is None else self.factor.detach()
        return _term(None if self.loss is None else self.loss.detach(), factor)

    def value(self) -> Any:
        """Its value, on every rank."""
        factor = 1 if self.factor is None else _on_all(self.factor)
        return factor if self.loss is None else self.loss._value() * factor

    def weighed(self) -> tuple[Awaited, torch.Tensor]:
        """Its loss, times a leaf with the value of its factor, whose gradient will be the loss's value."""
        assert self.loss is not None
        by = torch.ones(()) if self.factor is None else _on_all(self.factor)
        by = by.detach().clone().requires_grad_()
        return self.loss._source.keep(_weighed, (self.loss, by), {}), by

    def beside(self) -> torch.Tensor | None:
        """What goes back through its factor, if something does, when its loss has gone back."""
        if self.factor is None or not self.factor.requires_grad:
            return None
        return self.factor if self.loss is None else self.factor * self.loss._value()


def _term(loss: Any, factor: torch.Tensor | None) -> Term:
    """The same, of what may be a number by now, as its call has gone back."""
    if loss is None or isinstance(loss, Awaited):
        return Term(loss, factor)
    return Term(None, loss if factor is None else loss * factor)


class Sum(Awaited):
    """Numbers that go back one after the other: losses of several calls, and penalties on parameters."""

    def __init__(self, terms: Sequence[Term]) -> None:
        losses: dict[ModelRun, Awaited] = {}  # of each call one: it goes through the stages once
        for loss in (term.loss for term in terms if term.loss is not None and term.factor is None):
            before = losses.get(loss._source)
            losses[loss._source] = (
                loss if before is None else loss._source.keep(operator.add, (before, loss), {})
            )
        super().__init__(next(term.loss._source for term in terms if term.loss is not None))
        others = [term for term in terms if term.loss is None or term.factor is not None]
        self._scaled: tuple[Any, Any] | None = None  # of what it is a multiple, and how many times
        self._terms = [*map(Term, losses.values()), *others]

    @property
    def is_of_several(self) -> bool:
        """Whether losses of more than one call are in it."""
        return len({term.loss._source for term in self._terms if term.loss is not None}) > 1

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if name in (*ATTRIBUTES, *QUESTIONS):
            return getattr(self._shapes(), name) if name != "device" else self._source.device
        return partial(self._each, name)

    def _each(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of a number, where it is as if each term had been asked; else of its value."""
        if self._is_over() or not (name == "detach" or name in _OF_EACH):
            return self._source.keep(call_method, (self, name, *args), kwargs)
        if name == "detach":
            terms = [term.detached() for term in self._terms]
        else:
            terms = [term.done(partial(call_method, **kwargs), name, *args) for term in self._terms]
        is_known = all(term.loss is None for term in terms)  # each went back by itself
        return sum(term.value() for term in terms) if is_known else Sum(terms)

    def _will_be(self) -> Any:
        return self._shapes()

    def _shapes(self) -> Any:
        parts = [without_data(x) if isinstance(x, torch.Tensor) else x._shapes() for x in self._parts()]
        return torch.stack([x.detach().reshape(()) for x in parts]).sum().requires_grad_(self._wants_grad())

    def _parts(self) -> list[Any]:
        return [x for term in self._terms for x in term if x is not None]

    def _wants_grad(self) -> bool:
        if not torch.is_grad_enabled():
            return False
        return any(x.requires_grad if isinstance(x, torch.Tensor) else x._wants_grad() for x in self._parts())

    def _go_back(self, retain_graph: bool | None) -> None:
        of_calls: dict[ModelRun, list[Awaited]] = {}  # each goes through the stages once: hooks see all of it
        own: dict[ModelRun, list[Term]] = {}
        for term in self._terms:
            if term.loss is not None and term.loss._wants_grad():
                own.setdefault(term.loss._source, []).append(term)
        leaves: list[tuple[Term, torch.Tensor]] = []
        for source, terms in own.items():
            if len(terms) == 1 and terms[0].factor is None:
                of_calls[source] = [terms[0].loss]  # type: ignore[list-item]
                continue
            for term in terms:
                loss, by = term.weighed()
                leaves.append((term, by))
                of_calls.setdefault(source, []).append(loss)
        with self._source.together():
            while of_calls:
                source = next((x for x in of_calls if not _is_awaited(x, of_calls)), next(iter(of_calls)))
                losses = of_calls.pop(source)
                whole = reduce(partial(_together, source), losses)
                whole._handed_on = []
                whole.backward(retain_graph=retain_graph)
                for loss in whole._handed_on:
                    of_calls.setdefault(loss._source, []).append(loss)
            for term, by in leaves:  # computed anew they may be others: a model may write to its buffers
                if term.loss is not None and term.loss._known is None and by.grad is not None:
                    term.loss._known = by.grad
            factors = [end for term in self._terms if (end := term.beside()) is not None]
            if factors:  # which may be made of the same
                torch.autograd.backward(factors, retain_graph=retain_graph)
        self._value()
        self._tell_scaled(self._scaled)
        self._has_gone_back, self._is_retained = True, bool(retain_graph)

    def _value(self) -> Any:
        self._note_asked()
        if self._known is None:
            with torch.no_grad():
                self._known = sum(term.value() for term in self._terms)
        return self._known


def added(func: Callable[..., Any], args: Sequence[Any]) -> Sum | None:
    """What adds numbers of several calls, or of parameters alone, or multiplies such; None of all else."""
    name = getattr(func, "__name__", "").strip("_")
    name = name[1:] if name in ("radd", "rmul") else name
    if name not in _LINEAR or not all(isinstance(x, Awaited | torch.Tensor | int | float) for x in args):
        return None
    awaited = [x for x in args if isinstance(x, Awaited)]
    with_grad = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    are_several = any(x._source is not awaited[0]._source for x in awaited if x._wants_grad())
    if not (are_several or with_grad or any(isinstance(x, Sum) for x in awaited)):
        return None
    if not torch.is_grad_enabled() or not all(is_number(x) for x in args):
        return None
    terms = [_terms_of(x) for x in args]
    if name == "add":
        return Sum([*terms[0], *terms[1]])
    if name == "sub":
        return Sum([*terms[0], *(term.done(operator.neg) for term in terms[1])])
    if name == "neg":
        return Sum([term.done(operator.neg) for term in terms[0]])
    first, second = args
    if name == "mul" and not isinstance(first, Awaited):
        first, second, terms = second, first, terms[::-1]
    if isinstance(second, Awaited) or not isinstance(first, Awaited):
        return None
    by = operator.mul if name == "mul" else operator.truediv
    if not isinstance(second, torch.Tensor) or not second.requires_grad:
        out = Sum([term.done(by, second) for term in terms[0]])
        out._scaled = (first, second) if name == "mul" else None
        return out
    factor = second if name == "mul" else 1 / second
    return Sum(
        [term._replace(factor=factor if term.factor is None else term.factor * factor) for term in terms[0]]
    )


def _weighed(loss: torch.Tensor, by: torch.Tensor) -> torch.Tensor:
    return loss * by


def _together(source: ModelRun, loss: Awaited, more: Awaited) -> Awaited:
    both: Awaited = source.keep(operator.add, (loss, more), {})
    return both


def _is_awaited(source: ModelRun, others: Iterable[ModelRun]) -> bool:
    """Whether another of these calls is to give it gradients."""
    made_by = (x for other in others if other is not source for x in other.made_by.values())
    return any(isinstance(x, Awaited) and x._source is source for x in made_by)


def _terms_of(x: Any) -> Sequence[Term]:
    if isinstance(x, Sum):
        return x._terms
    if isinstance(x, Awaited):
        return [Term(x)]
    if isinstance(x, torch.Tensor):
        return [Term(None, x)]
    return [Term(None, torch.tensor(float(x)))] if x else []


def _on_all(x: torch.Tensor) -> torch.Tensor:
    """The value of a number, plain, on every rank: also of one in a stage, or of copies in several."""
    x = x.detach()
    if not isinstance(x, DTensor) or (whole := x.device_mesh.outermost) is x.device_mesh:
        return full_tensor(x)
    with raw():
        nowhere = torch.full((), -math.inf, dtype=x.dtype, device=whole.device())
        value = full_tensor(x) if x.device_mesh.is_member else nowhere
        for axis in range(whole.ndim):
            value = all_reduce(value, whole, axis, "max")
    return value


_LINEAR = frozenset("add sub mul truediv div true_divide neg".split())


# methods of a number that each of its addends may be asked
_OF_EACH = frozenset("clone contiguous cpu double float mean squeeze sum to type view_as".split())
