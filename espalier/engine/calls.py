"""Calls that a program makes on what a pipeline has yet to compute: what is kept, and what is done at once.

Kept is what gives a value and does no more. Done at once, with values, is what has effects beside (a
collective, an assertion), what draws numbers that no gradient goes back through, and what is made of losses
that have gone back.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from espalier.engine.awaited import SEVERAL, Awaited, as_count, done, in_call, value_of
from espalier.engine.gradients import go_back, gradients
from espalier.engine.kept import PARTS, SOUGHT, UNKNOWN, call, given_in, step_of, with_each
from espalier.engine.model_run import ModelRun
from espalier.engine.sums import Sum, added
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.asked import DRAWS
from espalier.tensor.draws import Drawing
from espalier.tensor.rules.across_ranks import COLLECTIVES, bound, warn
from espalier.torch_private import asserts
from espalier.trees import leaves, tree_map


def keep(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives, one of whose arguments a pipeline has yet to compute."""
    if func in asserts:
        return done(func, args, kwargs)
    if func in COLLECTIVES:
        return _across_ranks(func, tuple(args), dict(kwargs))
    if (of_gradients := _OF_GRADIENTS.get(func)) is not None:
        return of_gradients(*args, **kwargs)
    awaited = given_in(args, kwargs, Awaited)
    if all(x._is_over() for x in awaited):  # a sum of losses over steps, say
        return done(func, args, kwargs)
    if not kwargs and (terms := added(func, args)) is not None:
        return terms
    if any(isinstance(x, Sum) for x in awaited):
        return _of_sums(func, args, kwargs)
    return _of_calls(func, args, kwargs, awaited)


def _of_calls(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], awaited: Sequence[Awaited]
) -> Any:
    if any(x._source is not awaited[0]._source for x in awaited):
        args, kwargs, awaited = _of_one_call(args, kwargs, awaited)
    if func is not getattr:
        for x in awaited:
            x._is_used = True
            if func is call and x._step is not None and x._step.func is getattr:
                x._step.args[0]._is_used = True  # its method was called
    source = awaited[0]._source
    held, named = with_each(_beside, args, kwargs)
    made = Awaited(source, step_of(source, func, held, named))
    is_over = source.has_gone_back and func not in PARTS and not made._wants_grad()
    if not _only_computes(made):
        if _draws(made):
            if not made._wants_grad() or getattr(func, "__name__", "") in _FLAT:
                return _sampled(source, func, held, named)
            made._is_drawn = True
        elif made._shapes() is None:  # it gives nothing: it does something
            return done(func, args, kwargs)
    return made._value() if is_over else as_count(made)  # as metrics take it: a tensor


def _of_sums(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives for sums as numbers, or, where gradients go back through it, as made of one call.

    Raises:
        ValueError: they would go back to parameters, or each call has a part of the rows alone.
    """
    sums = given_in(args, kwargs, Sum)
    numbers = {id(x): x._value() for x in sums}
    known, named = with_each(lambda x: numbers.get(id(x), x), args, kwargs)
    out = func(*known, **named)
    kept = leaves([out], SOUGHT, SOUGHT)
    if any(x._wants_grad() for x in sums) and any(
        isinstance(x, Awaited) or x.is_floating_point() for x in kept
    ):
        as_one = {id(x): _as_one(x) for x in sums}
        return keep(func, *with_each(lambda x: as_one.get(id(x), x), args, kwargs))
    return out


def _as_one(total: Sum) -> Awaited:
    """The same number, as made of one call.

    Raises:
        ValueError: parameters are in it, or each call has a part of the rows alone.
    """
    losses = [term.loss for term in total._terms if term.loss is not None and term.factor is None]
    if len(losses) < len(total._terms):
        raise ValueError(SEVERAL)
    sum_of_all = losses[0]
    for loss in losses[1:]:
        sum_of_all = _of_calls(operator.add, (sum_of_all, loss), {}, [sum_of_all, loss])
    return sum_of_all


def _sampled(
    source: ModelRun, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Any:
    """What a call draws that no gradient goes back through: at once, as others hang on it."""
    if getattr(func, "__name__", "").endswith("_like") and isinstance(args[0], Awaited):
        shapes = args[0]._shapes()
        if isinstance(shapes, torch.Tensor):  # its values do not matter
            args = [torch.zeros(shapes.shape, dtype=shapes.dtype, device=source.device), *args[1:]]
    return source.sample(func, *with_each(value_of, args, kwargs))


def _only_computes(made: Awaited) -> bool:
    """Whether the call that it comes of is one of those that are known to give a value and do no more."""
    step = made._step
    if step is None or step.func in _ONLY_COMPUTE:
        return True
    return step.method is not None and step.name in _METHODS


def _draws(made: Awaited) -> bool:
    """Whether the call that it comes of draws random numbers."""
    step = made._step
    if step is None:
        return False
    for x in made._made_of():
        x._shapes()  # beforehand: what they draw is not this one's
    with Drawing(None) as drawing:
        known = made._shapes()
    by_name = known is UNKNOWN and any(d in getattr(step.func, "__name__", "") for d in DRAWS)
    return bool(drawing.draws) or by_name


def _beside(x: Any) -> Any:
    """What is to be computed with in the last stage: no other rank takes part there, so what lies on all is
    brought to each at once. Rows of loaders lie in stages, there too."""
    if type(x) is not DTensor or x.requires_grad or x._layout.mesh.outermost is not x._layout.mesh:
        return x
    return x.full_tensor()


def _of_one_call(
    args: Sequence[Any], kwargs: Mapping[str, Any], awaited: Sequence[Awaited]
) -> tuple[Sequence[Any], Mapping[str, Any], list[Awaited]]:
    """Arguments that hang on one call of the model, the latest."""
    sought = [x for x in awaited if x._wants_grad()] or awaited
    args, kwargs = in_call(max((x._source for x in sought), key=lambda of: of.number), args, kwargs)
    return args, kwargs, given_in(args, kwargs, Awaited)


def _across_ranks(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A collective of torch.distributed is made at once, with values.

    Raises:
        TypeError: what it writes to has a gradient, or others were made of it.
    """
    given, target = bound(func, args, kwargs)
    if any(not x._source.is_own for x in leaves([given], Awaited, SOUGHT)):
        warn(func.__name__, given)
    values: dict[int, Any] = {}
    for x in leaves([target], Awaited, SOUGHT):
        if x._wants_grad():
            raise TypeError(
                f"torch.distributed.{func.__name__} writes to what a pipeline has yet to compute, and a "
                "gradient is to go back through it. Give it x.detach().clone()."
            )
        values[id(x)] = value = full_tensor(x._value()).clone()
        x._write(lambda was, value: value, (value,), {})

    def sent(x: Any) -> Any:
        return values[id(x)] if id(x) in values else value_of(x)

    work = func(**{name: tree_map(sent, x, SOUGHT) for name, x in given.items()})
    if values and work is not None:
        work.wait()
    for x in leaves([target], Awaited, SOUGHT):  # it has written to their values, as it should
        if x._step is not None:
            x._step.renew()
    return work


# what calls are mostly of: not asked whether they draw, or do something beside giving a value
_ONLY_COMPUTE = frozenset(
    [
        *PARTS,
        *(getattr(operator, name) for name in "add sub mul truediv neg pow".split()),
        *(F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div),
        *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.log_softmax, F.softmax),
    ]
)
_METHODS = frozenset("contiguous detach double flatten float mean reshape squeeze sum transpose view".split())
_FLAT = frozenset("bernoulli normal poisson".split())  # whose gradients are zero
_OF_GRADIENTS: dict[Any, Callable[..., Any]] = {
    torch.autograd.grad: gradients,
    torch.autograd.backward: go_back,
}
