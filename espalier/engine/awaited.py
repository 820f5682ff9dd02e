"""Outputs that a pipeline has yet to compute: what is made of them is kept, and done in the last stage.

A plain loop asks for the output, makes a loss of it and lets that go back. In a pipeline there is no output
before the backward passes begin: so :class:`Awaited` stands for it. Calls of torch and operators on it give
others; ``backward()`` runs all micro-batches through the stages, with what was kept as their loss function.
Where a value is asked for before, the model is run once for it, without gradients.

Shapes, lengths and what can be unpacked are known without a value, from the shapes of an output that came of
inputs like these.
"""

from __future__ import annotations

import copy
import math
import operator
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch.distributions import Distribution, kl_divergence
from torch.distributions.kl import register_kl

from espalier.comm import all_reduce
from espalier.engine.awaited_source import Hook, Source, hooked
from espalier.engine.changed import marks_of
from espalier.engine.going_back import gone_back, hand_on
from espalier.engine.kept import (
    SOUGHT,
    UNKNOWN,
    Kept,
    Step,
    captured,
    evaluated,
    refuse_written,
    with_writes,
    without_data,
)
from espalier.engine.observing import ONLY_LOOKS, Place
from espalier.engine.row_order import picked, picks
from espalier.engine.seen import gradient_seen
from espalier.parallel.pipeline.record import TorchState
from espalier.parallel.pipeline.trace import statistics
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.asked import DRAWS
from espalier.tensor.dry_runs import Drawing
from espalier.tensor.fallback import GatherWarning
from espalier.tensor.observers import program_asks_kind, user_frame
from espalier.tensor.rules.across_ranks import COLLECTIVES, bound, warn
from espalier.torch_private import all_given, asserts, memory_id, raw
from espalier.trees import leaves, tree_map

_STORED = frozenset("layout is_sparse is_quantized is_nested".split())
_ATTRIBUTES = _STORED | frozenset("shape ndim dtype device requires_grad".split())
_QUESTIONS = frozenset("size dim ndimension numel nelement is_floating_point is_complex".split())
_OF_DICTS = frozenset("get items keys values".split())
_OF_GRADIENTS = frozenset("register_hook retain_grad register_post_accumulate_grad_hook".split())
_OF_KIND = _STORED | frozenset(  # Python goes by it
    "dtype ndim dim ndimension is_floating_point is_complex".split()
)
_OF_ROWS = frozenset("shape size numel nelement".split())  # another in each micro-batch
_IN_PLACE = {
    f"__i{name}__": getattr(operator, name) for name in "add sub mul truediv floordiv mod pow".split()
}


class Awaited(Kept):
    """An output of the model, or what was made of one, before it is there."""

    __array_ufunc__ = None  # a number of NumPy's times this is this, as with tensors

    def __init__(self, source: Source, step: Step | None = None) -> None:
        super().__init__(source, step)
        self._has_gone_back = self._is_retained = False
        self._is_used = self._is_own = False  # something was made of it; it was written to, and may be again
        self._only: Sequence[torch.Tensor] | None = None  # beside the model, what alone gets gradients
        self._gone: dict[str | int, tuple[Any, bool]] = {}  # parts that went back as losses
        # in the loss of another call: after how many writes, what it was then, and its value
        self._met: tuple[int, Awaited, torch.Tensor] | None = None
        self._seen_at: Place | None = None  # where a hook has taken it
        self._retained: torch.Tensor | None = None  # its gradient

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = all_given(func, kwargs)
        if func is torch.autograd.grad:
            return _gradients(*args, **kwargs)
        if func is torch.autograd.backward:
            return _go_back(*args, **kwargs)
        if func is torch.Tensor.backward:
            return args[0].backward(*args[1:], **kwargs)
        if func in asserts:
            return _done(func, args, kwargs)
        if func in COLLECTIVES:
            return _across_ranks(func, args, kwargs)
        name = getattr(func, "__name__", "")
        if name in _QUESTIONS and args and isinstance(args[0], Awaited):
            kept = partial(_kept, func, args, kwargs)
            return args[0]._asked(name, lambda x: func(x, *args[1:], **kwargs), kept)
        writes = name in (*_IN_PLACE, "__setitem__") or _is_in_place(name)
        if (writes or kwargs.get("inplace")) and args and isinstance(args[0], Awaited):
            return args[0]._write(func, args[1:], kwargs)
        if writes or isinstance(kwargs.get("out"), torch.Tensor):
            return _written(func, name, args, kwargs)
        return _kept(func, args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What it will be: ``isinstance`` of a program tells tensors, tuples and dicts apart."""
        if not program_asks_kind(sys._getframe(1)):
            return type(self)
        will_be = self._will_be()
        return type(self.value() if will_be is UNKNOWN else will_be)

    def _will_be(self) -> Any:
        """It, with tensors that have no data, of a batch of any shape."""
        return self._source.form() if self._step is None else self._shapes()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "grad" and self._seen_at is not None:
            return self._retained
        will_be = self._will_be()
        if self._step is None and (constant := _constant(getattr, will_be, name)) is not UNKNOWN:
            return constant
        if will_be is not UNKNOWN and not hasattr(will_be, name):
            raise AttributeError(f"{type(will_be).__name__!r} object has no attribute {name!r}")
        kept = partial(_kept, getattr, (self, name), {})
        return (
            self._asked(name, lambda x: getattr(x, name), kept) if name in _ATTRIBUTES else self._part(kept())
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = partial(_kept, _call, (self, *args), kwargs)
        step = self._step
        if step is None or step.func is not getattr or not isinstance(step.args[0], Awaited):
            return kept()
        of, name = step.args
        if name in _QUESTIONS:
            return of._asked(name, lambda x: getattr(x, name)(*args, **kwargs), kept)
        if name in _OF_GRADIENTS:
            return of._hook(name, *args, **kwargs)
        if name in _OF_DICTS and isinstance(will_be := of._will_be(), dict):
            return getattr({key: of[key] for key in will_be}, name)(*args, **kwargs)
        return of._write(_call_method, (name, *args), kwargs) if _is_in_place(name) else kept()

    def _hook(self, name: str, hook: Callable[..., Any] | None = None) -> Hook:
        """Call of a gradient of it: ``x.register_hook(hook)``, as of a tensor.

        Raises:
            TypeError: it cannot be called of the whole gradient here.
        """
        place = self._seen_at
        if place is not None and name == "retain_grad":
            name, hook = "register_hook", partial(setattr, self, "_retained")
        if place is not None and name == "register_hook" and hook is not None:
            kept = Hook(hook)
            self._source.told.setdefault(place, []).append(kept)
            return kept
        if name != "register_hook" or hook is None or self._is_used or not self._source.is_whole:
            raise TypeError(
                f"x.{name}(...) of what a pipeline has yet to compute: its gradient is on the ranks of the "
                "last stage alone, and of several micro-batches there is one of each. x.register_hook(hook) "
                "goes with accumulate = 1, before anything is made of x; else put the hook into the model's "
                "forward."
            )
        kept = Hook(hook)
        self._step = _kept(hooked, (self._before(), kept), {})._step
        self._is_drawn = False
        self._known = self._shape = None
        return kept

    def _before(self) -> Awaited:
        """What it is now, when it is to be another."""
        before = Awaited(self._source, self._step)
        before._is_drawn = self._is_drawn
        return before

    def _only_computes(self) -> bool:
        """Whether the call that it comes of is one of those that are known to give a value and do no more."""
        step = self._step
        if step is None or step.func in _ONLY_COMPUTE:
            return True
        method = step.args[0]._step if step.func is _call and isinstance(step.args[0], Awaited) else None
        return method is not None and method.func is getattr and method.args[1] in _METHODS

    def _draws(self) -> bool:
        """Whether the call that it comes of draws random numbers."""
        step = self._step
        if step is None:
            return False
        for x in self._made_of():
            x._shapes()  # beforehand: what they draw is not this one's
        with Drawing(None) as drawing:
            known = self._shapes()
        by_name = known is UNKNOWN and any(d in getattr(step.func, "__name__", "") for d in DRAWS)
        return bool(drawing.draws) or by_name

    def _asked(self, name: str, ask: Callable[[Any], Any], kept: Callable[[], Any]) -> Any:
        """What can be said of a tensor without its value; kept if each micro-batch says another thing."""
        if name in _OF_ROWS and not self._source.is_whole and self._seen_at is None:
            return kept()
        shapes = self._shapes()
        if shapes is UNKNOWN and name in _OF_KIND and isinstance(value := self.value(), torch.Tensor):
            return ask(value)
        if not isinstance(shapes, torch.Tensor):
            return kept()
        return self._source.device if name == "device" else ask(shapes)

    def __getitem__(self, key: Any) -> Any:
        if self._step is None and isinstance(key, str | int):
            constant = _constant(operator.getitem, self._source.form(), key)
            if constant is not UNKNOWN:
                return constant
        if isinstance(key, tuple) and leaves([key], torch.Tensor):
            columns = picks(self._shapes(), key)
            if columns is not None:
                return _kept(picked, (self, columns), {})
        return self._part(_kept(operator.getitem, (self, key), {}))

    def _part(self, part: Any) -> Any:
        """A part of the output; one that went back as the loss before is that loss."""
        gone = self._gone and isinstance(part, Awaited) and self._gone.get(part._place or "")
        if gone:
            part._known, part._is_retained = gone
            part._has_gone_back = True
        return part

    @property
    def _place(self) -> str | int | None:
        """Which part of the output it is; None of all else. ``output[0]`` of one with names has its name."""
        if self._step is None or self._step.func not in (getattr, operator.getitem):
            return None
        of, key = self._step.args
        if not isinstance(of, Awaited) or of._step is not None or not isinstance(key, str | int):
            return None
        form = of._source.form() if isinstance(key, int) else None
        return [*form][key] if isinstance(key, int) and isinstance(form, dict) and key < len(form) else key

    def by(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function makes of it, and of other arguments: it sees values alone."""
        return _kept(func, (self, *args), kwargs)

    def opened(self) -> Any:
        """A dict (of no class of its own) of what will be in it, if it will be one; else itself."""
        form = self._source.form() if self._step is None else None
        return {key: self[key] for key in form} if type(form) is dict else self

    def local_value(self) -> Awaited:
        """Itself."""
        return self

    def backward(
        self,
        gradient: torch.Tensor | None = None,
        retain_graph: bool | None = None,
        create_graph: bool = False,
        inputs: torch.Tensor | Sequence[torch.Tensor] | None = None,
    ) -> None:
        """Forward and backward of the step that it is the loss of.

        Args:
            gradient: what each of its numbers is multiplied by in the loss; by default it is the loss.
            retain_graph: whether it may go back again.
            inputs: the parameters that get gradients; by default all.

        Raises:
            ValueError: something in the loss wants a gradient that is no parameter.
            RuntimeError: it went back before, and was not to go back again.
        """
        if self._has_gone_back and not self._is_retained:
            raise RuntimeError(
                "backward() of a loss that went back already. As on one process, write "
                "loss.backward(retain_graph=True) the first time; or (2 * loss).backward() once, which is "
                "one pass through the stages in place of two."
            )
        if gradient is not None:
            return _go_back(self, gradient, retain_graph, create_graph, inputs=inputs)
        if create_graph or inputs is not None:
            sought = [] if inputs is None else [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
            return _give(
                sought, _gradients(self, sought, None, retain_graph, create_graph, allow_unused=True)
            )
        return self._go_back(retain_graph)

    def _go_back(self, retain_graph: bool | None) -> None:
        calls = with_writes(self, Kept._made_of)
        refuse_written(calls)
        of_loss, inputs, made_by = captured(calls), self._source.wanting(), self._source.made_by
        with self._source.together() if made_by else nullcontext():
            self._known, beside = gone_back(self, calls, of_loss, inputs)
            stood_for = {**{id(x): x for x in (*of_loss, *inputs)}, **made_by}
            hand_on(stood_for, beside, retain_graph, self._only)
        self._source.share([x for one in calls if not one._has_counted for x in one._statistics()])
        for one in calls:
            one._has_counted = True
        self._source.has_gone_back = True
        self._has_gone_back, self._is_retained, whole = True, bool(retain_graph), self
        while whole._step is not None and whole._step.func is operator.truediv:
            inner, parts = whole._step.args
            if not isinstance(inner, Awaited) or not isinstance(parts, int | float):
                break
            inner._known, inner._has_gone_back = whole._known * parts, True  # accelerate divides it
            inner._is_retained = whole._is_retained
            whole = inner
        if (place := whole._place) is not None and whole._step is not None:
            whole._step.args[0]._gone[place] = whole._known, whole._is_retained

    def _is_over(self) -> bool:
        """Whether it has gone back, and is not to do so again: what is made of it is made of its value."""
        return self._has_gone_back and not self._is_retained

    def value(self) -> Any:
        """What it is, without gradients: all ranks must ask."""
        if self._known is None or (self._source.writes and not self._has_gone_back):
            needed = with_writes(self, lambda one: one._made_of() if one._known is None else ())
            refuse_written(one for one in needed if one._known is None)
            with torch.no_grad():
                self._known = evaluated(self, {}, self._source.value)
        return self._known

    def _as_leaf(self, source: Source) -> torch.Tensor:
        """Its value now, in the loss of another call of the model, where it gets a gradient.

        Raises:
            ValueError: it is no tensor.
        """
        writes = len(self._source.writes)
        if self._met is None or self._met[0] != writes:
            now = _kept(torch.clone, (self,), {})  # it may be written to later
            value = full_tensor(now.value())
            if not isinstance(value, torch.Tensor):
                raise ValueError(_SEVERAL)
            self._met = writes, now, value.detach().requires_grad_()
        _, now, leaf = self._met
        source.made_by[id(leaf)] = now
        return leaf

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

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(full_tensor(self.value()), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return full_tensor(self.value()).detach().__reduce_ex__(protocol)  # a file has the tensor

    def __dlpack__(self, **options: Any) -> Any:
        if not self._has_gone_back and self._wants_grad():
            warnings.warn(
                "torch.as_tensor, or DLPack, of what a pipeline has yet to compute gives its value, through "
                "which no gradient goes back. Make a loss of what the model gives itself; detach it for a "
                "metric.",
                GatherWarning,
                stacklevel=user_frame()[0],
            )
        return full_tensor(self.value()).__dlpack__(**options)  # which torch.as_tensor asks for

    def __dlpack_device__(self) -> Any:
        return full_tensor(self.value()).__dlpack_device__()

    def __float__(self) -> float:
        return float(self.value())

    def __int__(self) -> int:
        return int(self.value())

    def __bool__(self) -> bool:
        return bool(self.value())

    def __index__(self) -> int:
        if not self._source.is_whole:
            raise TypeError(
                "A number of what a pipeline has yet to compute, as an index or a size: a loss is computed "
                "on each micro-batch, and the number is another there. Write -1 for rows, or ask the batch."
            )
        return operator.index(self.value())

    def __len__(self) -> int:
        shapes = self._shapes()
        sized = self.value() if shapes is UNKNOWN else shapes
        if isinstance(sized, torch.Tensor) and not sized.ndim:
            raise TypeError(
                "A number that a pipeline has yet to compute has no length: x.item() asks for it."
            )
        return len(sized)

    def __contains__(self, key: Any) -> bool:
        will_be = self._will_be()
        return key in (will_be if isinstance(will_be, dict) else self.value())

    def __iter__(self) -> Iterator[Any]:
        shapes = self._shapes()
        if isinstance(shapes, torch.Tensor) and not shapes.ndim:
            raise TypeError(
                "iteration over a number that a pipeline has yet to compute. If this is GradScaler.scale: "
                "in float16 the engine scales, Plan(precision='autocast-float16'); bfloat16 needs no scale."
            )
        if isinstance(shapes, tuple | list):
            return (_part_of(self, i, x) for i, x in enumerate(shapes))
        if not isinstance(shapes, torch.Tensor) and isinstance(shapes, Iterable):
            return iter(_kept(list, (self,), {}))
        if not self._wants_grad():
            return iter(self.value())
        if not self._source.is_whole:
            raise TypeError(
                "A loop over the rows of what a pipeline has yet to compute: its loss is computed on each "
                "micro-batch, and knows no single rows. Use calls of torch on all of them, or detach() it."
            )
        return (self[i] for i in range(len(self)))

    def __format__(self, spec: str) -> str:
        return format(self.value(), spec)

    def __setitem__(self, key: Any, value: Any) -> None:
        self._write(_set_item, (key, value), {})

    def _write(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Awaited:
        """A call that writes to it: from now on it is what that gives, as are others that share its memory.

        Raises:
            TypeError: others may share it, and a loss is computed on each micro-batch; or another call of the
                model is written into it.
        """
        if self._seen_at is not None:
            raise TypeError(ONLY_LOOKS)
        args, kwargs = self._writable(args, kwargs)
        if self._may_be_shared():
            return self._write_in_order(func, args, kwargs)
        made = _kept(func, (self._before(), *args), kwargs)
        if isinstance(made, Awaited):
            self._step, self._is_drawn = made._step, made._is_drawn
        else:  # it is there already: drawn at random
            self._step = step_of(self._source, _itself, (made,), {})
            self._is_drawn = False
        self._known = self._shape = None
        self._is_own = True
        return self

    def _write_in_order(
        self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]
    ) -> Awaited:
        """What is made of its memory later is made after the call, and what was made before it, before."""
        made = _kept(func, (self, *args), kwargs) if self._source.is_whole else None
        if not isinstance(made, Awaited):
            raise TypeError(_WRITTEN)
        self._source.writes.append(made)
        return self

    def _writable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of a call that writes to it, as of its own call of the model.

        Raises:
            TypeError: gradients would go back through them to another call, and go through it to none.
        """
        awaited = leaves([list(args), dict(kwargs)], Awaited, SOUGHT)
        if any(x._source is not self._source and x._wants_grad() for x in awaited) and not self._wants_grad():
            raise TypeError(_WRITTEN)
        return _in_call(self._source, args, kwargs)

    def _may_be_shared(self) -> bool:
        """Whether others may hold its memory, who would see what is written to it."""
        return self._is_used or not (self._is_own or self._has_own_memory())

    def _has_own_memory(self) -> bool:
        """Whether it surely shares no memory with what it was made of."""
        shapes = self._shapes()
        if self._step is None or not isinstance(shapes, torch.Tensor):
            return False
        made_of = [x._shapes() for x in self._made_of()]
        own = memory_id(shapes)
        every = leaves(made_of, torch.Tensor, (torch.Tensor,))
        is_known = all(x is not UNKNOWN for x in made_of)
        return is_known and all(memory_id(x) != own for x in every)

    __hash__ = object.__hash__


def _divergence(p: Any, q: Any) -> Any:
    return _kept(kl_divergence, (p, q), {})


for _kinds in ((Awaited, Distribution), (Distribution, Awaited), (Awaited, Awaited)):  # it goes by type()
    register_kl(*_kinds)(_divergence)


def _operator(func: Callable[..., Any], swaps: bool = False) -> Callable[..., Any]:
    def kept(self: Awaited, *others: Any) -> Any:
        return _kept(func, (*others, self) if swaps else (self, *others), {})

    return kept


def _in_place_operator(name: str) -> Callable[..., Any]:
    def written(self: Awaited, other: Any) -> Any:
        if self._source.is_whole and not _is_number(self) and self._may_be_shared():
            return self._write_in_order(getattr(operator, name), *self._writable((other,), {}))
        return _IN_PLACE[name](self, other)  # the name is the sum's from now on

    return written


for _name in _IN_PLACE:
    setattr(Awaited, _name, _in_place_operator(_name))
for _name in "add sub mul truediv floordiv mod pow matmul".split():
    setattr(Awaited, f"__{_name}__", _operator(getattr(operator, _name)))
    setattr(Awaited, f"__r{_name}__", _operator(getattr(operator, _name), swaps=True))
for _name in "and or xor".split():
    setattr(Awaited, f"__{_name}__", _operator(getattr(operator, f"__{_name}__")))
    setattr(Awaited, f"__r{_name}__", _operator(getattr(operator, f"__{_name}__"), swaps=True))
for _name in "eq ne lt le gt ge neg invert abs".split():
    setattr(Awaited, f"__{_name}__", _operator(getattr(operator, _name)))


def _call(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    return func(*args, **kwargs)


def _call_method(x: Any, name: str, *args: Any, **kwargs: Any) -> Any:
    return getattr(x, name)(*args, **kwargs)


def _set_item(x: Any, key: Any, value: Any) -> Any:
    x[key] = value
    return x


def _is_in_place(name: str) -> bool:
    """Whether a function of that name writes to its first argument."""
    return name.endswith("_") and not name.startswith("_") and name != "requires_grad_"


def _constant(get: Callable[[Any, Any], Any], form: Any, key: Any) -> Any:
    """A part of an output that is there in every batch, as it is none of its tensors: a None, or a name."""
    if isinstance(form, torch.Tensor):
        return UNKNOWN
    try:
        part = get(form, key)
    except Exception:  # who computes it says so
        return UNKNOWN
    return part if part is None or isinstance(part, str | bool) else UNKNOWN


def _part_of(of: Awaited, i: int, shapes: Any) -> Any:
    """One of several things that are yet to be computed; a name or a None is known."""
    return shapes if shapes is None or isinstance(shapes, str | bool) else of[i]


def entering(inputs: Any) -> tuple[Any, dict[int, Awaited]]:
    """Inputs of a call of the model, with the values of what an earlier call has yet to compute.

    Gives, too, of those through which gradients go back to that call, by ``id``, what they are values of.

    Raises:
        ValueError: they would, and it is no tensor.
    """
    made_by: dict[int, Awaited] = {}

    def enter(x: Any) -> Any:
        value = _value_of(x)
        if not isinstance(x, Awaited) or not x._wants_grad():
            return value
        if not isinstance(value, torch.Tensor):
            raise ValueError(
                f"What one call of the model gives, a {type(value).__name__}, goes into another as a whole. "
                "In a pipeline pass the tensors in it, or let the forward go through the steps itself."
            )
        if value.is_floating_point():
            made_by[id(value.requires_grad_())] = x
        return value

    return tree_map(enter, inputs, SOUGHT), made_by


def _value_of(x: Any) -> Any:
    return x.value() if isinstance(x, Awaited) else x


def _done(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives for values."""
    values, named = (tree_map(_value_of, x, SOUGHT) for x in (list(args), dict(kwargs)))
    return func(*values, **named)


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
        values[id(x)] = value = full_tensor(x.value()).clone()
        x._write(lambda was, value: value, (value,), {})

    def value_of(x: Any) -> Any:
        return values[id(x)] if id(x) in values else _value_of(x)

    work = func(**{name: tree_map(value_of, x, SOUGHT) for name, x in given.items()})
    if values and work is not None:
        work.wait()
    for x in leaves([target], Awaited, SOUGHT):  # it has written to their values, as it should
        if x._step is not None:
            x._step.renew()
    return work


def _written(func: Callable[..., Any], name: str, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What writes to a tensor is done at once, with values; nothing could go back through it."""
    awaited = leaves([list(args), dict(kwargs)], Awaited, SOUGHT)
    if all(x._is_over() or not x._wants_grad() for x in awaited):
        return _done(func, args, kwargs)
    if name in _IN_PLACE:  # the name is the sum's from now on
        return _kept(_IN_PLACE[name], args, kwargs)
    raise TypeError(
        f"{name or func}: what a pipeline has yet to compute is written into a tensor, and a gradient is "
        "to go back through it. Make a new tensor (torch.cat, torch.stack, torch.where), or detach() what "
        "is written."
    )


def _kept(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    awaited = leaves([list(args), dict(kwargs)], Awaited, SOUGHT)
    if all(x._is_over() for x in awaited):  # a sum of losses over steps, say
        return _done(func, args, kwargs)
    if not kwargs and (terms := _added(func, args)) is not None:
        return terms
    if any(isinstance(x, _Sum) for x in awaited):
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
            if func is _call and x._step is not None and x._step.func is getattr:
                x._step.args[0]._is_used = True  # its method was called
    source = awaited[0]._source
    held, named = (tree_map(_beside, x, (torch.Tensor, Awaited)) for x in (list(args), dict(kwargs)))
    made = Awaited(source, step_of(source, func, held, named))
    is_over = source.has_gone_back and func not in _PARTS and not made._wants_grad()
    if not made._only_computes():
        if made._draws():
            if not made._wants_grad() or getattr(func, "__name__", "") in _FLAT:
                return _sampled(source, func, held, named)
            made._is_drawn = True
        elif made._shapes() is None:  # it gives nothing: it does something
            return _done(func, args, kwargs)
    return made.value() if is_over else made  # as metrics take it: a tensor


def step_of(source: Source, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Step:
    """A call that is made now, and kept."""
    given = leaves([list(args), dict(kwargs)], torch.Tensor, SOUGHT)
    written = set(map(id, statistics(func, args, kwargs)))  # by the call itself
    marks = marks_of(x for x in given if id(x) not in written)
    return Step(func, args, kwargs, TorchState.now(source.device.type), next(source.calls), marks)


def _sampled(source: Source, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call draws that no gradient goes back through: at once, as others hang on it."""
    if getattr(func, "__name__", "").endswith("_like") and isinstance(args[0], Awaited):
        shapes = args[0]._shapes()
        if isinstance(shapes, torch.Tensor):  # its values do not matter
            args = [torch.zeros(shapes.shape, dtype=shapes.dtype, device=source.device), *args[1:]]
    values, named = (tree_map(_value_of, x, SOUGHT) for x in (list(args), dict(kwargs)))
    return source.sample(func, values, named)


def _itself(x: Any) -> Any:
    return x


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
    args, kwargs = _in_call(max((x._source for x in sought), key=lambda of: of.number), args, kwargs)
    return args, kwargs, leaves([args, kwargs], Awaited, SOUGHT)


def _in_call(
    source: Source, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that hang on this call of the model: what others give are values.

    Through a value gradients go back to its own call when the loss has.

    Raises:
        ValueError: they would, and a loss is computed on a part of the rows alone.
    """
    awaited = leaves([list(args), dict(kwargs)], Awaited, SOUGHT)
    wanting = dict.fromkeys(x._source for x in awaited if x._wants_grad())
    others = [of for of in wanting if of is not source]
    if others:
        if any(of.is_own for of in (source, *others)):
            raise ValueError(_SEVERAL)
        warnings.warn(_SLOW, stacklevel=user_frame()[0])
        # buffers are written to in the order of the calls
        for of in sorted((source, *others), key=lambda of: of.number):
            if of is not source or any(of.number < other.number for other in others):
                of.value()

    def inner(x: Any) -> Any:
        if not isinstance(x, Awaited) or x._source is source:
            return x
        return x._as_leaf(source) if x._wants_grad() else x.value()

    return tree_map(inner, list(args), SOUGHT), tree_map(inner, dict(kwargs), SOUGHT)


class _Term(NamedTuple):
    """A number that a sum is made of: of a call of the model, of parameters alone, or a product of both."""

    loss: Awaited | None
    factor: torch.Tensor | None = None

    def done(self, func: Callable[..., Any], *more: Any) -> _Term:
        """What a function that is linear gives for it."""
        if self.loss is None:
            return _Term(None, func(self.factor, *more))
        return _term(func(self.loss, *more), self.factor)

    def detached(self) -> _Term:
        """Without gradients."""
        factor = None if self.factor is None else self.factor.detach()
        return _term(None if self.loss is None else self.loss.detach(), factor)

    def value(self) -> Any:
        """Its value, on every rank."""
        factor = 1 if self.factor is None else _on_all(self.factor)
        return factor if self.loss is None else self.loss.value() * factor

    def backward(self, retain_graph: bool | None) -> torch.Tensor | None:
        """Forward and backward of its loss; gives what goes back through its factor, if something does."""
        if (loss := self.loss) is not None:
            if self.factor is not None:
                loss = _kept(operator.mul, (loss, _on_all(self.factor)), {})
            if loss._wants_grad():
                loss.backward(retain_graph=retain_graph)
        if self.factor is None or not self.factor.requires_grad:
            return None
        return self.factor if self.loss is None else self.factor * self.loss.value()


def _term(loss: Any, factor: torch.Tensor | None) -> _Term:
    """The same, of what may be a number by now, as its call has gone back."""
    if loss is None or isinstance(loss, Awaited):
        return _Term(loss, factor)
    return _Term(None, loss if factor is None else loss * factor)


class _Sum(Awaited):
    """Numbers that go back one after the other: losses of several calls, and penalties on parameters."""

    def __init__(self, terms: Sequence[_Term]) -> None:
        losses: dict[Source, Awaited] = {}  # of each call one: it goes through the stages once
        for loss in (term.loss for term in terms if term.loss is not None and term.factor is None):
            before = losses.get(loss._source)
            losses[loss._source] = loss if before is None else _kept(operator.add, (before, loss), {})
        super().__init__(next(term.loss._source for term in terms if term.loss is not None))
        others = [term for term in terms if term.loss is None or term.factor is not None]
        self._terms = [*map(_Term, losses.values()), *others]

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(torch.Tensor, name):
            raise AttributeError(f"'Tensor' object has no attribute {name!r}")
        if name in (*_ATTRIBUTES, *_QUESTIONS):
            return getattr(self._shapes(), name) if name != "device" else self._source.device
        return partial(self._each, name)

    def _each(self, name: str, *args: Any, **kwargs: Any) -> Any:
        """A method of a number, where it is as if each term had been asked; else of its value."""
        if self._is_over() or not (name == "detach" or name in _OF_EACH):
            return _kept(_call_method, (self, name, *args), kwargs)
        if name == "detach":
            terms = [term.detached() for term in self._terms]
        else:
            terms = [term.done(partial(_call_method, **kwargs), name, *args) for term in self._terms]
        is_known = all(term.loss is None for term in terms)  # each went back by itself
        return sum(term.value() for term in terms) if is_known else _Sum(terms)

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
        with self._source.together():
            ends = [term.backward(retain_graph) for term in self._terms]
            factors = [end for end in ends if end is not None]
            if factors:  # which may be made of the same
                torch.autograd.backward(factors, retain_graph=retain_graph)
        self.value()
        self._has_gone_back, self._is_retained = True, bool(retain_graph)

    def value(self) -> Any:
        if self._known is None:
            with torch.no_grad():
                self._known = sum(term.value() for term in self._terms)
        return self._known

    def _as_one(self) -> Awaited:
        """The same number, as made of one call.

        Raises:
            ValueError: parameters are in it, or each call has a part of the rows alone.
        """
        losses = [term.loss for term in self._terms if term.loss is not None and term.factor is None]
        if len(losses) < len(self._terms):
            raise ValueError(_SEVERAL)
        total = losses[0]
        for loss in losses[1:]:
            total = _of_calls(operator.add, (total, loss), {}, [total, loss])
        return total


def _added(func: Callable[..., Any], args: Sequence[Any]) -> _Sum | None:
    """What adds numbers of several calls, or of parameters alone, or multiplies such; None of all else."""
    name = getattr(func, "__name__", "").strip("_")
    name = name[1:] if name in ("radd", "rmul") else name
    if name not in _LINEAR or not all(isinstance(x, Awaited | torch.Tensor | int | float) for x in args):
        return None
    awaited = [x for x in args if isinstance(x, Awaited)]
    with_grad = [x for x in args if isinstance(x, torch.Tensor) and x.requires_grad]
    are_several = any(x._source is not awaited[0]._source for x in awaited if x._wants_grad())
    if not (are_several or with_grad or any(isinstance(x, _Sum) for x in awaited)):
        return None
    if not torch.is_grad_enabled() or not all(_is_number(x) for x in args):
        return None
    terms = [_terms_of(x) for x in args]
    if name == "add":
        return _Sum([*terms[0], *terms[1]])
    if name == "sub":
        return _Sum([*terms[0], *(term.done(operator.neg) for term in terms[1])])
    if name == "neg":
        return _Sum([term.done(operator.neg) for term in terms[0]])
    first, second = args
    if name == "mul" and not isinstance(first, Awaited):
        first, second, terms = second, first, terms[::-1]
    if isinstance(second, Awaited) or not isinstance(first, Awaited):
        return None
    by = operator.mul if name == "mul" else operator.truediv
    if not isinstance(second, torch.Tensor) or not second.requires_grad:
        return _Sum([term.done(by, second) for term in terms[0]])
    factor = second if name == "mul" else 1 / second
    return _Sum(
        [term._replace(factor=factor if term.factor is None else term.factor * factor) for term in terms[0]]
    )


def _of_sums(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives for sums as numbers, or, where gradients go back through it, as made of one call.

    Raises:
        ValueError: they would go back to parameters, or each call has a part of the rows alone.
    """
    arguments = [list(args), dict(kwargs)]
    sums = leaves(arguments, _Sum, SOUGHT)
    numbers = {id(x): x.value() for x in sums}
    args, kwargs = tree_map(lambda x: numbers.get(id(x), x), arguments, SOUGHT)
    out = func(*args, **kwargs)
    kept = leaves([out], SOUGHT, SOUGHT)
    if any(x._wants_grad() for x in sums) and any(
        isinstance(x, Awaited) or x.is_floating_point() for x in kept
    ):
        as_one = {id(x): x._as_one() for x in sums}
        args, kwargs = tree_map(lambda x: as_one.get(id(x), x), arguments, SOUGHT)
        return _kept(func, args, kwargs)
    return out


def _is_number(x: Any) -> bool:
    """Whether it surely has no dims."""
    shapes = x._shapes() if isinstance(x, Awaited) else x
    return isinstance(shapes, int | float) or (isinstance(shapes, torch.Tensor) and not shapes.ndim)


def _terms_of(x: Any) -> Sequence[_Term]:
    if isinstance(x, _Sum):
        return x._terms
    if isinstance(x, Awaited):
        return [_Term(x)]
    if isinstance(x, torch.Tensor):
        return [_Term(None, x)]
    return [_Term(None, torch.tensor(float(x)))] if x else []


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


def _gradients(
    outputs: Any,
    inputs: Any,
    grad_outputs: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    only_inputs: bool = True,
    allow_unused: bool | None = None,
    is_grads_batched: bool = False,
    materialize_grads: bool = False,
) -> tuple[torch.Tensor | None, ...]:
    """``torch.autograd.grad`` of a loss with respect to parameters of the model, to inputs, and its own."""
    loss = _weighed(outputs, grad_outputs)
    sought = (inputs,) if isinstance(inputs, torch.Tensor) else tuple(inputs)
    of_model = set(map(id, loss._source.parameters()))
    beside = [x for x in sought if id(x) not in of_model]
    asks_for_more = create_graph or is_grads_batched
    is_made = any(type(x) is DTensor or not x.is_leaf for x in beside)
    if asks_for_more or is_made or (beside and isinstance(loss, _Sum)):
        raise TypeError(
            "torch.autograd.grad: In a pipeline it gives the gradients of a loss with respect to the model's "
            "parameters, its inputs, and parameters of the loss. Others, and those of gradients "
            "(create_graph=True), are not where the loss is: take them in the model's forward, or train "
            "under a plan without pipe."
        )
    before = [x.grad for x in beside]
    try:
        for x in beside:
            x.grad = None
        loss._only = beside
        with loss._source.aside():
            loss.backward(retain_graph=retain_graph)
            found = [None if (grad := gradient_seen(p)) is None else _copied(grad) for p in sought]
    finally:
        loss._only = None
        for x, grad in zip(beside, before, strict=True):
            x.grad = grad
    if materialize_grads:
        return tuple(
            torch.zeros_like(p) if grad is None else grad for p, grad in zip(sought, found, strict=True)
        )
    if not allow_unused and any(grad is None for grad in found):
        raise RuntimeError(
            "One of the differentiated Tensors appears to not have been used in the graph. Set "
            "allow_unused=True if this is the desired behavior."
        )
    return tuple(found)


def _weighed(outputs: Any, gradients: Any) -> Awaited:
    """The loss that a backward pass of several outputs is of, which begins with these gradients of them."""
    several: list[Any] = [outputs] if isinstance(outputs, Awaited) else [*outputs]
    begins: list[Any] = [gradients] if isinstance(gradients, torch.Tensor | Awaited | None) else [*gradients]
    if len(begins) == 1 and begins[0] is None:
        begins = begins * len(several)
    if len(begins) != len(several):
        raise RuntimeError(f"{len(several)} tensors to start from, but {len(begins)} gradients for them.")
    losses: list[Any] = []
    for x, gradient in zip(several, begins, strict=True):
        if gradient is not None:
            losses.append((x * gradient).sum())
        elif isinstance(x, Awaited) and isinstance(x._shapes(), tuple):
            losses += x
        else:
            losses.append(x)
    total: Awaited = sum(losses[1:], losses[0])
    return total


def _go_back(
    tensors: Any,
    grad_tensors: Any = None,
    retain_graph: bool | None = None,
    create_graph: bool = False,
    grad_variables: Any = None,
    inputs: Any = None,
) -> None:
    """``torch.autograd.backward`` of losses, or of what else is made of outputs, with its gradients."""
    gradients = grad_variables if grad_tensors is None else grad_tensors
    _weighed(tensors, gradients).backward(None, retain_graph, create_graph, inputs)


def _copied(grad: torch.Tensor) -> torch.Tensor:
    """A copy of a gradient, whose numbers all ranks may ask for: of this pass."""
    if isinstance(grad, DTensor) and (asked := grad._asked) is not None:
        asked.changed()
    return copy.deepcopy(grad)


def _give(parameters: Sequence[torch.Tensor], grads: Sequence[torch.Tensor | None]) -> None:
    """Add gradients to those that parameters have."""
    for p, grad in zip(parameters, grads, strict=True):
        if grad is not None:
            p.grad = grad if p.grad is None else p.grad + grad


_SEVERAL = (
    "Outputs of two calls of the model meet, or of one and its parameters. That goes for tensors of calls, "
    "where all ranks give the whole batch: no rows that a rank has of its own. Else it is made of one call, "
    "or is a sum of such losses and of penalties, loss_a + 0.5 * loss_b + penalty: call the model on both "
    "inputs, model(torch.cat([a, b])).chunk(2). What needs no gradient, detach()."
)
_WRITTEN = (
    "What a pipeline has yet to compute is written to, and others were made of it, or it is a part of "
    "something, the model's output say; or what has a gradient in another call of the model is written into "
    "it. Make a new one: x = x.clone() first, or call what gives one (torch.where, the function without the "
    "underscore)."
)
_SLOW = (
    "Outputs of two calls of the model meet in a loss. In a pipeline each call is computed twice then, once "
    "for the other's sake. Quicker is one call on both inputs, model(torch.cat([a, b])).chunk(2). What needs "
    "no gradient, detach()."
)
_PARTS = (getattr, operator.getitem)
# what calls are mostly of: not asked whether they draw, or do something beside giving a value
_ONLY_COMPUTE = frozenset(
    [
        *_PARTS,
        *(getattr(operator, name) for name in "add sub mul truediv neg pow".split()),
        *(F.cross_entropy, F.nll_loss, F.mse_loss, F.l1_loss, F.smooth_l1_loss, F.kl_div),
        *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits, F.log_softmax, F.softmax),
    ]
)
_METHODS = frozenset("contiguous detach double flatten float mean reshape squeeze sum transpose view".split())
_FLAT = frozenset("bernoulli normal poisson".split())  # whose gradients are zero
_LINEAR = frozenset("add sub mul truediv div true_divide neg".split())
# methods of a number that each of its addends may be asked
_OF_EACH = frozenset("clone contiguous cpu double float mean squeeze sum to type view_as".split())
