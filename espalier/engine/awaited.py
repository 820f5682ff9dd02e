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
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from types import FrameType
from typing import Any, Self

import torch
from torch.distributions import Distribution, kl_divergence
from torch.distributions.kl import register_kl

from espalier.device import is_accelerator
from espalier.engine.call_states import asked_after_step
from espalier.engine.going_back import gone_back, hand_on, handed_out, refuse_without_graph
from espalier.engine.kept import (
    PARTS,
    SOUGHT,
    UNKNOWN,
    Hook,
    Kept,
    Step,
    call,
    call_method,
    captured,
    evaluated,
    given_in,
    hooked,
    is_of_all,
    refuse_transforms,
    refuse_written,
    step_of,
    with_each,
    with_writes,
)
from espalier.engine.model_run import ModelRun
from espalier.engine.observing import ONLY_LOOKS, Place
from espalier.engine.row_order import picked, picks
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.fallback import GatherWarning
from espalier.tensor.observers import program_asks_kind, reads_an_index, tell, writes_by_operator
from espalier.torch_private import all_given, memory_id, plain_call
from espalier.trees import leaves, tree_map

_STORED = frozenset("layout is_sparse is_quantized is_nested".split())
ATTRIBUTES = _STORED | frozenset("shape ndim dtype device requires_grad".split())
QUESTIONS = frozenset("size dim ndimension numel nelement is_floating_point is_complex".split())
_OF_DICTS = frozenset("get items keys values".split())
_OF_GRADIENTS = frozenset("register_hook retain_grad register_post_accumulate_grad_hook".split())
_OF_COUNTS = frozenset(getattr(operator, name) for name in "add sub mul floordiv mod pow neg".split())
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

    def __new__(cls, source: Any, step: Step | None = None) -> Any:
        """But of a dict, itself: programs make another like an output by ``type(out)(pairs)``."""
        return source if isinstance(source, dict) else super().__new__(cls)

    def __init__(self, source: ModelRun, step: Step | None = None) -> None:
        super().__init__(source, step)
        self._has_gone_back = self._is_retained = False
        self._is_used = self._is_own = False  # something was made of it; it was written to, and may be again
        self._only: Sequence[torch.Tensor] | None = None  # beside the model, what alone gets gradients
        self._follows = False  # known as a multiple of it has gone back
        self._handed_on: list[Any] | None = None  # losses of other calls that are to go back behind it
        self._gone: dict[str | int, tuple[Any, bool]] = {}  # parts that went back as losses
        # in the loss of another call: after how many writes, what it was then, and its value
        self._met: tuple[int, Awaited, torch.Tensor] | None = None
        self._seen_at: Place | None = None  # where a hook has taken it
        self._retained: torch.Tensor | None = None  # its gradient
        self._index: tuple[tuple[int, int], list[Any]] | None = None  # where it is one, and its numbers

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = all_given(func, kwargs)
        if func is torch.Tensor.backward:
            return args[0].backward(*args[1:], **kwargs)
        if func is torch.Tensor.as_subclass and _is_own_kind(*args[1:]):
            return args[0]
        is_first = bool(args) and isinstance(args[0], Awaited)
        keep = (args[0] if is_first else given_in(args, kwargs, Awaited)[0])._source.keep
        name = getattr(func, "__name__", "")
        if name in QUESTIONS and is_first:
            kept = partial(keep, func, args, kwargs)
            return args[0]._asked(name, lambda x: func(x, *args[1:], **kwargs), kept)
        writes = name in (*_IN_PLACE, "__setitem__") or _is_in_place(name)
        if (writes or kwargs.get("inplace")) and is_first:
            return args[0]._write(func, args[1:], kwargs)
        if writes or isinstance(kwargs.get("out"), torch.Tensor):
            return _written(func, args, kwargs, writes_by_operator(sys._getframe(1)))
        return keep(func, args, kwargs)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """What it will be: ``isinstance`` of a program tells tensors, tuples and dicts apart.

        Raises:
            TypeError: a transform of torch.func asks, which wants a tensor in memory.
        """
        refuse_transforms(sys._getframe(1))
        if not program_asks_kind(sys._getframe(1)):
            return type(self)
        will_be = self._will_be()
        return type(self._value() if will_be is UNKNOWN else will_be)

    def _will_be(self) -> Any:
        """It, with tensors that have no data, of a batch of any shape."""
        return self._source.form() if self._step is None else self._shapes()

    def _form(self) -> Any:
        """What the model gives there, if it is that, or in containers in it; ``UNKNOWN`` of all else."""
        if self._step is None:
            return self._source.form()
        of, *key = self._step.args if self._step.func in PARTS else (None,)
        form = of._form() if isinstance(of, Awaited) and not self._step.kwargs else UNKNOWN
        if form is UNKNOWN or isinstance(form, torch.Tensor):
            return UNKNOWN
        try:
            return self._step.func(form, *key)
        except Exception:  # who computes it says so
            return UNKNOWN

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        if name == "grad" and self._seen_at is not None:
            return self._retained
        will_be = self._will_be()
        if (constant := _constant(getattr, self._form(), name)) is not UNKNOWN:
            return constant
        if will_be is not UNKNOWN and not hasattr(will_be, name):
            raise AttributeError(f"{type(will_be).__name__!r} object has no attribute {name!r}")
        kept = partial(self._source.keep, getattr, (self, name), {})
        return (
            self._asked(name, lambda x: getattr(x, name), kept) if name in ATTRIBUTES else self._part(kept())
        )

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        kept = partial(self._source.keep, call, (self, *args), kwargs)
        step = self._step
        if step is None or step.func is not getattr or not isinstance(step.args[0], Awaited):
            return kept()
        of, name = step.args
        if name in QUESTIONS:
            return of._asked(name, lambda x: getattr(x, name)(*args, **kwargs), kept)
        if name == "type" and not args and not kwargs:
            return of._asked(name, lambda x: torch.empty(0, dtype=x.dtype, device=of.device).type(), kept)
        if name == "as_subclass" and _is_own_kind(*args):
            return of
        if name in _OF_GRADIENTS:
            return of._hook(name, *args, **kwargs)
        if name in _OF_DICTS and isinstance(will_be := of._will_be(), dict):
            return getattr({key: of[key] for key in will_be}, name)(*args, **kwargs)
        return of._write(call_method, (name, *args), kwargs) if _is_in_place(name) else kept()

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
        if name != "register_hook" or hook is None or self._is_used:
            raise TypeError(
                f"x.{name}(...) of what a pipeline has yet to compute: its gradient is on the ranks of the "
                "last stage alone. x.register_hook(hook) goes before anything is made of x; else put the "
                "hook into the model's forward."
            )
        self._source.see_all()
        kept = Hook(hook)
        self._step = self._source.keep(hooked, (self._before(), kept), {})._step
        self._is_drawn = False
        self._known = self._shape = None
        return kept

    def _before(self) -> Awaited:
        """What it is now, when it is to be another."""
        before = Awaited(self._source, self._step)
        before._is_drawn = self._is_drawn
        return before

    def _asked(self, name: str, ask: Callable[[Any], Any], kept: Callable[[], Any]) -> Any:
        """What can be said of a tensor without its value; kept if each micro-batch says another thing."""
        if name in _OF_ROWS and not self._source.is_whole and self._seen_at is None:
            return kept()
        shapes = self._shapes()
        if shapes is UNKNOWN and name in _OF_KIND and isinstance(value := self._value(), torch.Tensor):
            return ask(value)
        if not isinstance(shapes, torch.Tensor):
            return kept()
        return self._source.device if name == "device" else ask(shapes)

    def __getitem__(self, key: Any) -> Any:
        if self._index is not None and self._index[0] == _place_of(sys._getframe(1)):
            return self._index[1][key]
        if isinstance(key, str | int):
            constant = _constant(operator.getitem, self._form(), key)
            if constant is not UNKNOWN:
                return constant
        if isinstance(key, tuple) and leaves([key], torch.Tensor):
            columns = picks(self._shapes(), key)
            if columns is not None:
                return self._source.keep(picked, (self, columns), {})
        return self._part(self._source.keep(operator.getitem, (self, key), {}))

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
        if self._step is None or self._step.func not in PARTS:
            return None
        of, key = self._step.args
        if not isinstance(of, Awaited) or of._step is not None or not isinstance(key, str | int):
            return None
        form = of._source.form() if isinstance(key, int) else None
        return [*form][key] if isinstance(key, int) and isinstance(form, dict) and key < len(form) else key

    def _by(self, func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """What a function makes of it, and of other arguments: it sees values alone."""
        return self._source.keep(func, (self, *args), kwargs)

    def _opened(self) -> Any:
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
            RuntimeError: it went back before, and was not to go back again; or nothing in it has a gradient.
        """
        if self._has_gone_back and not self._is_retained:
            raise RuntimeError(
                "backward() of a loss that went back already. As on one process, write "
                "loss.backward(retain_graph=True) the first time; or (2 * loss).backward() once, which is "
                "one pass through the stages in place of two."
            )
        if gradient is not None:
            asked = (self, gradient, retain_graph, create_graph, None, inputs)
            return self._source.keep(torch.autograd.backward, asked, {})
        if create_graph or inputs is not None:
            sought = [] if inputs is None else [inputs] if isinstance(inputs, torch.Tensor) else [*inputs]
            of_them = (self, sought, None, retain_graph, create_graph)
            grads = self._source.keep(torch.autograd.grad, of_them, {"allow_unused": True})
            for p, grad in zip(sought, grads, strict=True):
                if grad is not None:
                    p.grad = grad if p.grad is None else p.grad + grad
            return None
        return self._go_back(retain_graph)

    def _go_back(self, retain_graph: bool | None) -> None:
        calls = with_writes(self, Kept._made_of)
        refuse_without_graph(self, calls)
        refuse_written(calls)
        self._source.stays |= bool(retain_graph)
        of_loss, inputs, made_by = captured(calls), self._source.wanting(), self._source.made_by
        with self._source.dropped_by_error(), self._source.together() if made_by else nullcontext():
            self._known, beside = gone_back(self, calls, of_loss, inputs)
            stood_for = {**{id(x): x for x in (*of_loss, *inputs)}, **made_by}
            hand_on(stood_for, beside, retain_graph, self._only, self._handed_on)
        self._source.share([x for one in calls if not one._has_counted for x in one._statistics()])
        for one in calls:
            one._has_counted = True
        self._source.has_gone_back = True
        self._has_gone_back, self._is_retained, whole = True, bool(retain_graph), self
        while whole._step is not None and whole._step.func is operator.truediv:
            inner, parts = whole._step.args
            if not isinstance(inner, Awaited) or not is_of_all(parts):
                break
            inner._known, inner._has_gone_back = whole._known * parts, True  # accelerate divides it
            inner._is_retained = whole._is_retained
            whole = inner
        self._tell_scaled(_scaled_by(whole))
        if (place := whole._place) is not None and whole._step is not None:
            whole._step.args[0]._gone[place] = whole._known, whole._is_retained

    def _is_over(self) -> bool:
        """Whether it has gone back, and is not to do so again: what is made of it is made of its value."""
        return self._has_gone_back and not self._is_retained

    def _value(self) -> Any:
        """What it is, without gradients: all ranks must ask."""
        self._note_asked()
        if self._known is None or (self._source.writes and not self._has_gone_back):
            needed = with_writes(self, lambda one: one._made_of() if one._known is None else ())
            refuse_written(one for one in needed if one._known is None)
            with torch.no_grad(), self._source.dropped_by_error():
                steps = [one._step for one in needed if one._known is None and one._step is not None]
                given = [x for step in steps for x in given_in(step.args, step.kwargs, torch.Tensor)]
                self._refuse_updated(given)
                here = self._source.here(given)
                self._known = evaluated(self, here, self._source.value)
        return self._known

    def _note_asked(self) -> None:
        """Where it is known as a multiple of it has gone back, let the call know: others may be asked for."""
        if self._follows:
            self._follows = False
            self._source.asked_for()

    def _tell_scaled(self, scaled: tuple[Any, Any] | None) -> None:
        """What it is a multiple of has its value, too, without rounding: a GradScaler scales losses."""
        if scaled is None or not isinstance(scaled[0], Awaited) or scaled[0]._known is not None:
            return
        inner, by = scaled
        by = by.detach() if isinstance(by, torch.Tensor) else by
        # an accelerator is not waited for: what scalers have there are powers of two
        is_far = isinstance(by, torch.Tensor) and is_accelerator(by.device)
        if not is_far and (not math.isfinite(by) or math.frexp(abs(by))[0] != 0.5):
            return
        inner._known, inner._follows = self._known / by, True

    def _refuse_updated(self, given: Iterable[torch.Tensor]) -> None:
        """See that it is not made of parameters that are others by now.

        Raises:
            ValueError: it is.
        """
        if self._source.is_updated and any(isinstance(x, DTensor) and x.requires_grad for x in given):
            raise asked_after_step()

    def _as_leaf(self, source: ModelRun) -> torch.Tensor:
        """Its value now, in the loss of another call of the model, where it gets a gradient.

        Raises:
            ValueError: it is no tensor.
        """
        writes = len(self._source.writes)
        if self._met is None or self._met[0] != writes:
            now = self._source.keep(torch.clone, (self,), {})  # it may be written to later
            value = full_tensor(now._value())
            if not isinstance(value, torch.Tensor):
                raise ValueError(SEVERAL)
            self._met = writes, now, value.detach().requires_grad_()
        _, now, leaf = self._met
        source.made_by[id(leaf)] = now
        return leaf

    def item(self) -> Any:
        """Its one number."""
        return self._value().item()

    def tolist(self) -> Any:
        """Its numbers."""
        return self._value().tolist()

    def numpy(self) -> Any:
        """Its numbers."""
        return self._value().numpy()

    def __array__(self, dtype: Any = None, copy: Any = None) -> Any:
        return self._value().__array__(dtype)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        return copy.deepcopy(full_tensor(self._value()), memo)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return full_tensor(self._value()).detach().__reduce_ex__(protocol)  # a file has the tensor

    def __dlpack__(self, **options: Any) -> Any:
        if not self._has_gone_back and self._wants_grad():
            tell(
                "torch.as_tensor, or DLPack, of what a pipeline has yet to compute gives its value, through "
                "which no gradient goes back. Make a loss of what the model gives itself; detach it for a "
                "metric.",
                GatherWarning,
            )
        return _tensor_of(self._value()).__dlpack__(**options)  # which torch.as_tensor asks for

    def __dlpack_device__(self) -> Any:
        return _tensor_of(self._value()).__dlpack_device__()

    def __float__(self) -> float:
        return float(self._value())

    def __int__(self) -> int:
        return int(self._value())

    def __bool__(self) -> bool:
        return bool(self._value())

    def __index__(self) -> int:
        shapes = self._shapes()
        if isinstance(shapes, torch.Tensor) and (shapes.is_floating_point() or shapes.ndim):
            raise TypeError("only a tensor that is one integer can be an index or a size")
        self._source.see_all()
        return operator.index(self._value())

    def __len__(self) -> int:
        if self._index is not None and self._index[0] == _place_of(sys._getframe(1)):
            return len(self._index[1])
        if reads_an_index(frame := sys._getframe(1)):
            self._be_index(frame)
        shapes = self._shapes()
        sized = self._value() if shapes is UNKNOWN else shapes
        if isinstance(sized, torch.Tensor) and not sized.ndim:
            raise TypeError(
                "A number that a pipeline has yet to compute has no length: x.item() asks for it."
            )
        return len(sized)

    def _be_index(self, frame: FrameType) -> None:
        """Be the index of a plain tensor, in a frame that has come to it: a sequence of numbers, then.

        Raises:
            TypeError: else torch takes it for a tuple, with an index for each dim; without a length, it does
                not.
        """
        value = full_tensor(self._value())
        if isinstance(value, torch.Tensor) and value.ndim:
            self._index = _place_of(frame), value.tolist()
            raise TypeError("It is one index, and no tuple of them.")

    def _read_index(self, numbers: list[Any]) -> Iterator[Any]:
        yield from numbers
        self._index = None

    def __contains__(self, key: Any) -> bool:
        will_be = self._will_be()
        return key in (will_be if isinstance(will_be, dict) else self._value())

    def __iter__(self) -> Iterator[Any]:
        if self._index is not None and self._index[0] == _place_of(sys._getframe(1)):
            return self._read_index(self._index[1])
        shapes = self._shapes()
        if isinstance(shapes, torch.Tensor) and not shapes.ndim:
            raise TypeError(
                "iteration over a number that a pipeline has yet to compute. If this is GradScaler.scale: "
                "in float16 the engine scales, Plan(precision='autocast-float16'); bfloat16 needs no scale."
            )
        if isinstance(shapes, tuple | list):
            return (_part_of(self, i, x) for i, x in enumerate(shapes))
        if not isinstance(shapes, torch.Tensor) and isinstance(shapes, Iterable):
            return iter(self._source.keep(list, (self,), {}))
        if not self._wants_grad():
            return iter(self._value())
        self._source.see_all()
        return (self[i] for i in range(len(self)))

    def __format__(self, spec: str) -> str:
        return format(self._value(), spec)

    def __repr__(self) -> str:
        # asks nobody: one rank may print alone, and debuggers do
        if self._known is None or (self._source.writes and not self._has_gone_back):
            return "<what a pipeline has yet to compute: where all ranks ask, x.item() and f'{x}' give it>"
        return repr(self._known)

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
        made = self._source.keep(func, (self._before(), *args), kwargs)
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
        self._source.see_all()
        made = self._source.keep(func, (self, *args), kwargs)
        if not isinstance(made, Awaited):
            raise TypeError(_WRITTEN)
        self._source.writes.append(made)
        return self

    def _writable(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[list[Any], dict[str, Any]]:
        """Arguments of a call that writes to it, as of its own call of the model.

        Raises:
            TypeError: gradients would go back through them to another call, and go through it to none.
        """
        awaited = given_in(args, kwargs, Awaited)
        if any(x._source is not self._source and x._wants_grad() for x in awaited) and not self._wants_grad():
            raise TypeError(_WRITTEN)
        return in_call(self._source, args, kwargs)

    def _may_be_shared(self) -> bool:
        """Whether others may hold its memory, who would see what is written to it."""
        return self._is_used or not (self._is_own or self._has_own_memory())

    def _has_own_memory(self) -> bool:
        """Whether it surely shares no memory with what it was made of."""
        shapes = self._shapes()
        if self._step is None or not isinstance(shapes, torch.Tensor):
            return False
        shapes_of = [x._shapes() for x in self._made_of()]
        made_of = [getattr(x, "__self__", x) for x in shapes_of]  # of a method, what that is of
        own = memory_id(shapes)
        every = leaves(made_of, torch.Tensor, (torch.Tensor,))
        is_known = all(x is not UNKNOWN for x in made_of)
        return is_known and all(memory_id(x) != own for x in every)

    __hash__ = object.__hash__


def _is_own_kind(*given: Any) -> bool:
    """Whether a call is given the class of what is awaited: ``x.as_subclass(type(y))``."""
    return bool(given) and isinstance(given[0], type) and issubclass(given[0], Awaited)


class Count(Awaited, int):
    """How long an output, or what was made of it, is in a dim, where a loss is computed on parts of the rows.

    As a number it is that of all rows, which whoever knows nothing of outputs takes: ``torch.zeros(n, m)``,
    ``range(n)``. In calls on outputs, ``out.view(n, -1)``, it is each part's own.
    """

    __torch_function__ = plain_call  # type: ignore[assignment]

    def __new__(cls, number: int, source: ModelRun, step: Step | None) -> Self:
        return int.__new__(cls, number)

    __repr__ = int.__repr__

    def __init__(self, number: int, source: ModelRun, step: Step | None) -> None:
        super().__init__(source, step)

    def _value(self) -> int:
        return int.__int__(self)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return int, (self._value(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> int:
        return self._value()


def _compared(name: str) -> Callable[..., Any]:
    of_outputs, of_numbers = getattr(Awaited, name), getattr(int, name)

    def compared(self: Count, other: Any) -> Any:
        return of_numbers(self, other) if isinstance(other, int) else of_outputs(self, other)

    return compared


def as_count(made: Awaited) -> Awaited:
    """What a call gives, as the number that it is, if it is a size or made of sizes."""
    step = made._step
    if step is not None and step.func in _OF_COUNTS:
        is_count = all(type(x) in (int, Count) for x in step.args)
    else:
        is_count = _is_size(made)
    if not is_count:
        return made
    number = made._shapes()
    return Count(number, made._source, step) if type(number) is int else made


def _is_size(of: Any) -> bool:
    """Whether it is the shape of something that is yet to be computed, or one of its sizes."""
    step = of._step if isinstance(of, Awaited) else None
    if step is None:
        return False
    if step.func is operator.getitem:
        return _is_size(step.args[0])
    return (step.func is getattr and step.args[1] == "shape") or step.name in _OF_ROWS


def _place_of(frame: FrameType) -> tuple[int, int]:
    return id(frame), frame.f_lasti


def _divergence(p: Any, q: Any) -> Any:
    return (p if isinstance(p, Awaited) else q)._source.keep(kl_divergence, (p, q), {})


for _kinds in ((Awaited, Distribution), (Distribution, Awaited), (Awaited, Awaited)):  # it goes by type()
    register_kl(*_kinds)(_divergence)


def _operator(func: Callable[..., Any], swaps: bool = False) -> Callable[..., Any]:
    def kept(self: Awaited, *others: Any) -> Any:
        return self._source.keep(func, (*others, self) if swaps else (self, *others), {})

    return kept


def _comparison(func: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    kept = _operator(func)

    def compared(self: Awaited, other: Any) -> Any:
        is_size = isinstance(other, int) if not isinstance(other, Awaited) else _is_size(other)
        if is_size and _is_size(self):
            return func(self._value(), value_of(other))  # torch takes nothing but a bool for one
        return kept(self, other)

    return compared


def _in_place_operator(name: str) -> Callable[..., Any]:
    def written(self: Awaited, other: Any) -> Any:
        if self._source.is_whole and not is_number(self) and self._may_be_shared():
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
for _name in "neg invert abs".split():
    setattr(Awaited, f"__{_name}__", _operator(getattr(operator, _name)))
for _name in "eq ne lt le gt ge".split():
    setattr(Awaited, f"__{_name}__", _comparison(getattr(operator, _name)))


for _name in "eq ne lt le gt ge".split():
    setattr(Count, f"__{_name}__", _compared(f"__{_name}__"))
Count.__hash__ = int.__hash__  # type: ignore[method-assign,assignment]


def is_number(x: Any) -> bool:
    """Whether it surely has no dims."""
    shapes = x._shapes() if isinstance(x, Awaited) else x
    return isinstance(shapes, int | float) or (isinstance(shapes, torch.Tensor) and not shapes.ndim)


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
        value = value_of(x)
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


def _tensor_of(value: Any) -> torch.Tensor:
    return full_tensor(value) if isinstance(value, torch.Tensor) else torch.as_tensor(value)


def value_of(x: Any) -> Any:
    return x._value() if isinstance(x, Awaited) else x


def done(func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """What a call gives for values."""
    values, named = with_each(value_of, args, kwargs)
    return func(*values, **named)


def _written(
    func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any], by_operator: bool
) -> Any:
    """What writes to a tensor is done at once, with values, through which gradients go back.

    Raises:
        TypeError: they cannot; or it is written as ``x += y``: torch has Python try ``x + y`` then, and the
            name is the sum's from now on.
    """
    awaited = given_in(args, kwargs, Awaited)
    if all(x._is_over() or not x._wants_grad() for x in awaited):
        return done(func, args, kwargs)
    if by_operator:
        raise TypeError("x += y of what a pipeline has yet to compute is x + y.")
    values, named = with_each(lambda x: handed_out(x) if isinstance(x, Awaited) else x, args, kwargs)
    return func(*values, **named)


def _itself(x: Any) -> Any:
    return x


def in_call(
    source: ModelRun, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> tuple[list[Any], dict[str, Any]]:
    """Arguments that hang on this call of the model: what others give are values.

    Through a value gradients go back to its own call when the loss has.
    """
    awaited = given_in(args, kwargs, Awaited)
    wanting = dict.fromkeys(x._source for x in awaited if x._wants_grad())
    others = [of for of in wanting if of is not source]
    if others:
        tell(_SLOW)
        # buffers are written to in the order of the calls
        for of in sorted((source, *others), key=lambda of: of.number):
            if of is not source or any(of.number < other.number for other in others):
                of.value()

    if others and source.is_part:
        source.see_all()

    def inner(x: Any) -> Any:
        if not isinstance(x, Awaited) or x._source is source:
            return x
        if not x._wants_grad():
            return x._value()
        return handed_out(x) if source.is_part else x._as_leaf(source)

    return with_each(inner, args, kwargs)


_WRITTEN = (
    "What a pipeline has yet to compute is written to, and others were made of it, or it is a part of "
    "something, the model's output say; or what has a gradient in another call of the model is written into "
    "it. Make a new one: x = x.clone() first, or call what gives one (torch.where, the function without the "
    "underscore)."
)
SEVERAL = (
    "Outputs of two calls of the model meet, or of one and its parameters. That goes for tensors of calls. "
    "Else it is made of one call, or is a sum of such losses and of penalties, loss_a + 0.5 * loss_b + "
    "penalty: call the model on both inputs, model(torch.cat([a, b])).chunk(2). What needs no gradient, "
    "detach()."
)
_SLOW = (
    "Outputs of two calls of the model meet in a loss. In a pipeline each call is computed twice then, once "
    "for the other's sake. Quicker is one call on both inputs, model(torch.cat([a, b])).chunk(2). What needs "
    "no gradient, detach()."
)


def _scaled_by(loss: Awaited) -> tuple[Any, Any] | None:
    """Of a product with a number what that is, and the number."""
    step = loss._step
    if step is None or getattr(step.func, "__name__", "").strip("_") not in ("mul", "rmul"):
        return None
    by, inner = sorted(step.args[-2:], key=lambda x: isinstance(x, Awaited))
    is_number_of_its_own = not isinstance(by, Awaited | DTensor) and is_number(by)
    return (inner, by) if is_number_of_its_own else None
