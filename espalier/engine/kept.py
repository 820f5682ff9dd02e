"""What a pipeline has yet to compute, as a graph of the calls that a program made on the model's output."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from types import FrameType
from typing import Any, NamedTuple

import torch

from espalier.engine.accumulation import OfAll
from espalier.engine.call_states import Mark, marks_of, refuse_changed
from espalier.engine.model_run import ModelRun
from espalier.parallel.pipeline.arguments import cloned
from espalier.parallel.pipeline.record import TorchState
from espalier.parallel.pipeline.trace import statistics
from espalier.tensor.observers import is_transform
from espalier.trees import leaves, tree_map

PARTS = (getattr, operator.getitem)  # what calls take of what another gave
UNKNOWN = object()  # in the place of shapes that hang on values
# arguments of losses that may be as long as a batch; of these they have a number for each of the input's
_CONSTANT = ("weight", "pos_weight")
_OF_EACH = frozenset(
    "mse_loss l1_loss huber_loss binary_cross_entropy binary_cross_entropy_with_logits".split()
)


class Step(NamedTuple):
    """One call that was kept, what torch was told then, and which it is of the program's.

    Attributes:
        marks: of the tensors that it was given beside, which are not to be written to before it is made.
    """

    func: Callable[..., Any]
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    state: TorchState
    number: int
    marks: list[Mark]

    @property
    def method(self) -> tuple[Kept, str] | None:
        """Of what it calls a method, and that one's name; None where it calls a function."""
        of = self.args[0]._step if self.func is call and isinstance(self.args[0], Kept) else None
        return (of.args[0], str(of.args[1])) if of is not None and of.func is getattr else None

    @property
    def name(self) -> str:
        """Of the function or method."""
        return getattr(self.func, "__name__", "") if self.method is None else self.method[1]

    def renew(self) -> None:
        """What it was given beside may have been written to until now."""
        self.marks[:] = marks_of(x for x, _ in self.marks)


class Kept:
    """The model's output, or a call that was kept, before it is there.

    Names begin with an underscore: others are those of the output.
    """

    def __init__(self, source: ModelRun, step: Step | None = None) -> None:
        self._source, self._step = source, step
        self._known: Any = None  # its value
        self._shape: Any = None
        self._is_drawn = False  # at random, when the loss goes back
        self._has_counted = False  # in a batch norm's statistics, on all ranks

    def _made_of(self) -> list[Kept]:
        """What the call that it comes of was given, of what is yet to be computed."""
        step = self._step
        return [] if step is None else given_in(step.args, step.kwargs, Kept)

    def _statistics(self) -> list[torch.Tensor]:
        """What the call that it comes of writes to: running means and variances."""
        step = self._step
        if step is None:
            return []
        return [x for x in statistics(step.func, step.args, step.kwargs) if isinstance(x, torch.Tensor)]

    def _shapes(self) -> Any:
        """It, with tensors that have no data, and need gradients if it does; ``UNKNOWN`` if that fails."""
        if self._shape is None:
            output = self._source.shapes()
            with torch.enable_grad():
                try:
                    self._shape = evaluated(self, {}, lambda: output, on_meta=True)
                except Exception:  # it hangs on values, or is computed where there is data alone
                    self._shape = UNKNOWN
        return self._shape

    def _wants_grad(self) -> bool:
        """Whether gradients would go back through it, as it is used here."""
        if not torch.is_grad_enabled():
            return False
        shapes = self._shapes()
        if shapes is UNKNOWN:
            return not self._is_detached()
        return any(x.requires_grad for x in leaves(shapes, torch.Tensor, (torch.Tensor,)))

    def _is_detached(self) -> bool:
        """Whether it comes of ``x.detach()``."""
        return self._step is not None and self._step.name == "detach"


def in_order(of: Kept, made_of: Callable[[Kept], Iterable[Kept]]) -> list[Kept]:
    """It and all that it is made of, each once; what others are made of comes before them."""
    order, seen, under_way = list[Kept](), {id(of)}, [(of, iter(made_of(of)))]
    while under_way:  # a program's chain of calls may be longer than Python lets functions call each other
        one, rest = under_way[-1]
        if (inner := next((x for x in rest if id(x) not in seen), None)) is None:
            order.append(one)
            under_way.pop()
        else:
            seen.add(id(inner))
            under_way.append((inner, iter(made_of(inner))))
    return order


def with_writes(of: Kept, made_of: Callable[[Kept], Iterable[Kept]]) -> list[Kept]:
    """:func:`in_order`, with the calls that have written to what others share, and what these are made of."""
    roots = (*of._source.writes, of)
    return [*{id(one): one for root in roots for one in in_order(root, made_of)}.values()]


def refuse_written(calls: Iterable[Kept]) -> None:
    """See that nothing was written to that calls, which are to be made, were given beside the output.

    Raises:
        ValueError: something was.
    """
    refuse_changed(mark for one in calls if one._step is not None for mark in one._step.marks)


def varying(step: Step) -> dict[str, Any]:
    """Named arguments but for those that are the same for all rows: weights of classes."""
    first = step.args[0] if step.args else None
    shapes = first._shapes() if isinstance(first, Kept) else UNKNOWN
    takes_each = getattr(step.func, "__name__", "") in _OF_EACH

    def is_constant(name: str, x: Any) -> bool:
        if name not in _CONSTANT:
            return False
        if not takes_each or not isinstance(x, torch.Tensor) or not isinstance(shapes, torch.Tensor):
            return True
        return (x.ndim, x.shape[:1]) != (shapes.ndim, shapes.shape[:1])

    return {name: x for name, x in step.kwargs.items() if not is_constant(name, x)}


def captured(calls: Iterable[Kept]) -> list[torch.Tensor]:
    """The tensors that calls were given beside the output."""
    found: dict[int, torch.Tensor] = {}
    for one in calls:
        if (step := one._step) is not None:
            trained = [x for x in step.kwargs.values() if isinstance(x, torch.Tensor) and x.requires_grad]
            arguments = [list(step.args), varying(step), trained]
            written = set(map(id, one._statistics()))
            found |= {id(x): x for x in leaves(arguments, torch.Tensor, SOUGHT) if id(x) not in written}
    return [*found.values()]


def wanting(calls: Iterable[Kept]) -> list[torch.Tensor]:
    """Of :func:`captured` those that gradients go back to: used not under ``torch.no_grad()`` alone."""
    recorded = (one for one in calls if one._step is not None and one._step.state.grad)
    return [x for x in captured(recorded) if x.requires_grad]


def evaluated(
    of: Kept,
    replacements: Mapping[int, torch.Tensor],
    output: Callable[[], Any],
    fresh: bool = False,
    on_meta: bool = False,
) -> Any:
    """What it is: the calls that were kept are made, in the program's order, as random numbers are drawn.

    Args:
        replacements: for tensors that are given beside the output, by ``id``.
        output: what the model gives.
        fresh: whether to make calls whose values are known.
        on_meta: whether tensors have no data.

    Raises:
        TypeError: a call draws random numbers, and is not to be made yet.
    """

    def known(one: Kept) -> Any:
        if on_meta:
            return None if one._shape is UNKNOWN else one._shape
        return None if fresh or writes else one._known

    def value_of(x: Any) -> Any:
        if isinstance(x, Kept):
            return values[id(x)]
        if isinstance(x, torch.Tensor):
            return without_data(x) if on_meta else spare.get(id(x), replacements.get(id(x), x))
        return x

    values: dict[int, Any] = {}
    spare: dict[int, torch.Tensor] = {}
    writes = not on_meta and bool(of._source.writes)  # made anew each time, to what is made anew
    needed = (with_writes if writes else in_order)(
        of, lambda one: one._made_of() if known(one) is None else ()
    )
    for one in sorted(needed, key=lambda one: -1 if one._step is None else one._step.number):
        if (value := known(one)) is None and (step := one._step) is None:
            value = cloned(output()) if writes else output()
        elif value is None and step is not None:
            if one._is_drawn and not fresh and not on_meta:
                raise TypeError(
                    f"{getattr(step.func, '__name__', step.func)} draws random numbers, in the last stage "
                    "of the pipeline, when the loss goes back: what is made of that has no value beside the "
                    "loss's. Draw beforehand what it hangs on (noise = torch.rand(x.shape)), let the "
                    "model's forward do it, or ask for the value of x.detach()."
                )
            counted = one._statistics() if one._has_counted else ()  # they are not to count again
            spare = {id(x): x.clone() for x in counted}
            args, kwargs = with_each(value_of, step.args, step.kwargs)
            is_alone = one._source.batch is not None  # a micro-batch that the loop knows
            if step.func is operator.truediv and is_of_all(step.args[1]) and not (on_meta or is_alone):
                args[1] = OfAll(args[1])  # the loop's own: it knows nothing of micro-batches
            with (
                nullcontext() if step.state.grad else torch.no_grad(),
                step.state.cast_again(one._source.device.type),
            ):
                value = step.func(*args, **kwargs)
            if not on_meta:  # the call itself may write to some
                step.renew()
                one._has_counted = one._has_counted or not fresh
        values[id(one)] = value
        if on_meta:
            one._shape = value
    return values[id(of)]


def is_of_all(x: Any) -> bool:
    """Whether it is a number that is the same for all parts of the rows."""
    return isinstance(x, int | float) and not isinstance(x, Kept)


def without_data(x: torch.Tensor) -> torch.Tensor:
    """A tensor on ``meta`` like one that is given beside the output."""
    return torch.empty(x.shape, dtype=x.dtype, device="meta", requires_grad=x.requires_grad)


SOUGHT = (Kept, torch.Tensor)


def given_in(args: Iterable[Any], kwargs: Mapping[str, Any], kind: type) -> list[Any]:
    """What is of a kind among the arguments of a call."""
    return leaves([list(args), dict(kwargs)], kind, SOUGHT)


def with_each(
    fn: Callable[[Any], Any], args: Iterable[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments of a call, with what a function gives in the place of each."""
    return tree_map(fn, list(args), SOUGHT), tree_map(fn, dict(kwargs), SOUGHT)


def step_of(
    source: ModelRun, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
) -> Step:
    """A call that is made now, and kept."""
    given = given_in(args, kwargs, torch.Tensor)
    written = set(map(id, statistics(func, args, kwargs)))  # by the call itself
    marks = marks_of(x for x in given if id(x) not in written)
    return Step(func, args, kwargs, TorchState.now(source.device.type), next(source.calls), marks)


def call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A call of what was kept."""
    return func(*args, **kwargs)


def call_method(x: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    """A call of a method that writes."""
    return getattr(x, name)(*args, **kwargs)


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


def refuse_transforms(frame: FrameType) -> None:
    """See that no transform of torch.func asks what something is that is yet to be computed.

    Raises:
        TypeError: one does, which wants a tensor in memory.
    """
    if is_transform(frame):
        raise TypeError(
            "torch.vmap, or a transform of torch.func, is given what a model in a pipeline gives, which is "
            "there only when the loss goes back. Write it for all rows at once; put the transform into the "
            "model's forward; or train under a plan without pipe."
        )
