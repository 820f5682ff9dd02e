"""A model's forward pass, written down once, without its parameters' values.

The model runs on stand-ins for its parameters that have shapes but no values (torch's fake tensors); what
depends on the batch and on buffers alone (*local* values: masks, position ids, rotary tables) is computed for
real, so that control flow may depend on it. Each public torch call is recorded, and the call of each module
around it: what becomes of the record (``programs``) calls modules that lie within one stage as they are, and
repeats the calls of torch between them.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.blocks import blocks, called, named_parameters_in, parameters_in
from espalier.meanwhile import having
from espalier.parallel.pipeline.arguments import Part, Ref, leaves, mapped
from espalier.parallel.pipeline.model_stand_ins import (
    ModelStandIns,
    Outside,
    hooks_in,
    is_flag_of_hooks,
    newly_hooked,
    program_hooks,
    stand_in_values,
    unlike,
    valued,
)
from espalier.parallel.pipeline.objects import closed, opened
from espalier.parallel.pipeline.record import (
    METADATA,
    Again,
    Answer,
    AnswerRecorder,
    ModuleCall,
    Op,
    SplitError,
    TorchState,
    Trace,
    Value,
    ValuesError,
    heard,
    name_of,
    sizes_of,
    storage_of,
)
from espalier.parallel.pipeline.remembered import Place, gradients_left, may_be_told, says_data, value_at
from espalier.sharding.spec import bound_to
from espalier.tensor.before import is_of_torch
from espalier.tensor.copies import Apart, NotCopiedError
from espalier.tensor.dry_runs import CostMode, OpCost
from espalier.tensor.dtensor import is_sparse
from espalier.tensor.fallback import function_of
from espalier.tensor.rules.across_ranks import (
    as_if_all_had_it,
    barriers_passed,
    collectives_known,
    meets_in_backward,
    meets_ranks,
)
from espalier.tensor.traces import Generators
from espalier.torch_private import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensor,
    FakeTensorMode,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    all_given,
    forget_backward_hooks,
    own_buffers,
    unchecked_distributions,
    version_of,
)
from espalier.trees import tensors_in

# what a module that is called whole may do and a trace of fake tensors cannot
_HIDDEN = (
    DataDependentOutputException,
    DynamicOutputShapeException,
    UnsupportedFakeTensorException,
    UnsupportedOperatorException,
    NotImplementedError,
)
_NOISY = logging.getLogger("torch._subclasses.fake_tensor")  # logs what it raises


def trace(batch: Any, device: torch.device, stand_ins: ModelStandIns, whole: Collection[str] = ()) -> Trace:
    """Run a copy of a model once, with stand-ins for its parameters.

    Args:
        batch: the model's arguments: a dict (keywords), a tuple or list, or one tensor; plain tensors.
        device: on which it will be computed; what is local is computed there.
        stand_ins: the model, and what stands in for its parameters and buffers.
        whole: names of modules that are not to be divided.

    Raises:
        ValuesError: the control flow of a module that is to be divided depends on the values of parameters
            or activations.
        SplitError: the model cannot be copied, or has sparse tensors.
    """
    try:
        return _traced(batch, device, stand_ins, whole, is_watched=False)
    except _DrawnError:
        return _traced(batch, device, stand_ins, whole, is_watched=True)


def _traced(
    batch: Any, device: torch.device, stand_ins: ModelStandIns, whole: Collection[str], is_watched: bool
) -> Trace:
    """:func:`trace`; unless it is watched which modules draw random numbers that are not torch's, none may.

    To watch takes a tenth of the time, and hardly a model draws such.

    Raises:
        _DrawnError: one has drawn, and that is not watched.
    """
    batch = mapped(lambda x: x.detach().to(device) if isinstance(x, torch.Tensor) else x, batch)
    buffers = ((f"its buffer {name!r}", b) for name, b in stand_ins.model.named_buffers())
    _refuse_sparse(stand_ins.model, buffers)
    _refuse_sparse(stand_ins.model, (("a tensor of its batch", x) for x in leaves(batch, torch.Tensor)))
    with contextlib.ExitStack() as stack:
        stack.callback(setattr, _NOISY, "disabled", _NOISY.disabled)
        _NOISY.disabled = True
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        twin = stack.enter_context(_copied(stand_ins, fake, batch))
        for module in twin.module.modules():  # there is no graph here to hook into
            forget_backward_hooks(module)
        before, outside = stand_ins.snapshot(twin.module), Outside(twin.module)
        hooks = hooks_in(twin.module)
        of_program = {id(m): program_hooks(m) for m in twin.module.modules()}
        recorder = partial(_Recorder, twin, device, fake, whole, is_watched, of_program)
        run = partial(_recorded, twin, recorder)
        recorded = run()
        hooked = newly_hooked(twin.module, hooks)
        changes, beside = stand_ins.changes(twin.module, before), outside.changes()
        drawn = _torchs_drawn_from(twin.module, recorded)
        if changes or beside or drawn:
            modules = dict(twin.module.named_modules())
            recorded.sharing = stand_ins.sharing(twin.module, _but(drawn, changes))
            places = [*{(name, key): 0 for name, keys in changes.items() for key in keys} | drawn]
            places = [(name, key) for name, key in places if not is_of_torch(modules[name])]
            if hooked:
                now = {place: value_at(twin.module, *place) for place in places}
                places = [(n, k) for (n, k), value in now.items() if not is_flag_of_hooks(value, n, hooked)]
            recorded.remembers = bool(places)
            recorded.sets = {(name, key) for name, key in places if key not in own_buffers(modules[name])}
            recorded.tensors = {
                (name, key)
                for name, key in recorded.sets
                if tensors_in([vars(modules[name]).get(key)], objects=2)
            }
            later = _changed_again(recorded, run, stand_ins, twin.module, drawn)
            recorded.first = {
                Place(name, key, key in own_buffers(modules[name])): value
                for name, key in places
                if (name, key) not in drawn
                and key not in later.get(name, ())
                and _is_known(value := value_at(twin.module, name, key))
            }
    return recorded


def _changed_again(
    recorded: Trace,
    run: Callable[[], Trace],
    stand_ins: ModelStandIns,
    model: nn.Module,
    drawn: Container[tuple[str, str]],
) -> Mapping[str, list[str]]:
    """Run a model a second time, and note what is unlike the first run.

    What the first only sets up is no loss, as each stage begins like it; what changes again is.

    Returns:
        by the modules' names, the attributes that it sets again.
    """
    before, outside = stand_ins.snapshot(model), Outside(model)
    tell_of_gradients = gradients_left(model, recorded)
    again = run()
    tell_of_gradients(again)
    later = _but(drawn, stand_ins.changes(model, before))
    for name, keys in later.items():
        recorded.changed.setdefault(name, []).extend(f"sets {key!r}" for key in keys)
    beside = outside.changes()
    outside.tell_of_tensors(beside)
    for key, names in beside.items():
        for name in names:
            recorded.changed.setdefault(name, []).append(f"reads {key!r}, which changes each time")
            recorded.sharing[name] = recorded.sharing.get(name, set()) | names
    for name in unlike(recorded, again):
        said = recorded.changed.setdefault(name, [])
        said += [] if said else ["does something else when it is called again"]
    return later


def _torchs_drawn_from(model: nn.Module, of: Trace) -> dict[tuple[str, str], int]:
    """Where modules have a ``torch.Generator`` from which operations of a trace draw.

    Those are done again in stages, of which each has all draws of one or none.
    """
    return {
        (name, key): 0
        for name, module in (model.named_modules() if of.drawing else ())
        for key, x in vars(module).items()
        if of.drawing.get(id(x))
    }


def _but(drawn: Container[tuple[str, str]], changes: Mapping[str, list[str]]) -> dict[str, list[str]]:
    """What has changed, but for generators that were drawn from."""
    left = {name: [key for key in keys if (name, key) not in drawn] for name, keys in changes.items()}
    return {name: keys for name, keys in left.items() if keys}


def _refuse_sparse(model: nn.Module, named: Iterable[tuple[str, torch.Tensor]]) -> None:
    for said, x in named:
        if is_sparse(x):
            raise SplitError(
                f"{type(model).__name__} cannot be split: {said} is sparse ({x.layout}). Stages are found by "
                "a run without values, which sparse tensors do not have. Keep it dense (x.to_dense()), or "
                "train under a plan without pipe."
            )


def _is_known(value: Any) -> bool:
    """Whether it may be remembered, and has all values."""
    return may_be_told(value) and not any(isinstance(x, FakeTensor) for x in tensors_in([value]))


@contextlib.contextmanager
def _copied(stand_ins: ModelStandIns, fake: FakeTensorMode, batch: Any) -> Iterator[Apart]:
    with contextlib.ExitStack() as stack:
        try:
            twin = stack.enter_context(stand_ins.apart(fake, batch))
        except NotCopiedError as error:
            raise SplitError(
                f"{error}. A model is split by what a copy of it does, and each rank keeps a copy without "
                "data: let what cannot be copied have a __deepcopy__, or be no attribute of a module."
            ) from error
        yield twin


def _recorded(twin: Apart, made: Callable[[], _Recorder]) -> Trace:
    recorder, batch = made(), twin.extra
    recorder.begin(batch)
    before = None if recorder.is_watched else Generators()
    met = barriers_passed(recorder.passed), collectives_known(recorder.meets_within)
    seen = _calls_seen(recorder.module), unchecked_distributions()
    with met[0], met[1], seen[0], seen[1], recorder.worked, recorder:
        try:
            out = called(twin.module, closed(batch))
        except _Hidden as error:  # of a model with a __call__ of its own, which no call of a module encloses
            raise recorder.refused("", error) from error
    if before is not None and not before.as_now():
        raise _DrawnError
    trace = recorder.trace
    trace.out = mapped(recorder.ref, opened(out, recorder.is_known))
    constants = [value for value in trace.values if value.source[0] == "constant"]
    trace.constants = {value.number: twin.original(value.tensor) for value in constants}
    return trace


@contextlib.contextmanager
def _calls_seen(seen: Callable[..., Any]) -> Iterator[None]:
    """While open, ``seen(go, module, args, kwargs)`` is in the place of each call of a module."""
    go = nn.Module.__call__

    def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return seen(go, module, args, kwargs)

    with having(nn.Module, __call__=call):
        yield


class _Hidden(Exception):
    """A module does what cannot be followed, but may be called whole.

    Attributes:
        met: what ends in an error on any values of these shapes and dtypes, too; None: nothing does.
    """

    met: Exception | None = None

    def for_its_own(self, met: Exception | None) -> Self:
        """This one, of what the program's own code ends in."""
        self.met = met
        return self


def own_error(error: SplitError) -> Exception | None:
    """What the model itself would end in, where that is why it cannot be split."""
    return error.__cause__.met if isinstance(error.__cause__, _Hidden) else None


@contextlib.contextmanager
def told_as_own() -> Iterator[None]:
    """While open, a model that cannot be split ends in its own error, if that is why."""
    try:
        yield
    except SplitError as error:
        if (met := own_error(error)) is None:
            raise
        raise met from error


class _OwnBackward(_Hidden):
    """An autograd function uses parameters of modules that are none of its arguments."""


class _DrawnError(Exception):
    """A module has drawn random numbers that are not torch's, and nobody watches which."""


class _Recorder(TorchFunctionMode):
    divides = True

    def __init__(
        self,
        twin: Apart,
        device: torch.device,
        fake: FakeTensorMode,
        whole: Collection[str],
        is_watched: bool,
        hooks: Mapping[int, set[int]],
    ) -> None:
        super().__init__()
        self.model, self.fake, self.is_watched, self._hooks = twin.module, fake, is_watched, hooks
        self.trace, self._original = Trace(device, TorchState.now(device.type)), twin.original
        model = twin.module
        self.worked = CostMode()
        self._known: dict[int, int] = {}  # by id of tensors, which the trace keeps
        self._names = {id(m): name for name, m in model.named_modules()}
        self._forwards = {id(m): m.forward for m in model.modules()}
        clusters = nn.AdaptiveLogSoftmaxWithLoss  # they call their parts where labels fall into them
        self._clusters = [name for name, m in model.named_modules() if isinstance(m, clusters)]
        apart = tuple(f"{name}." for name in (*whole, *self._clusters))
        inner = [name for name in blocks(model) if not name.startswith(apart)]
        self.trace.containers = frozenset(
            name for name in self._names.values() if not name or any(b.startswith(f"{name}.") for b in inner)
        )
        self._path: list[int] = []
        self._quiet = 0
        self._within: list[nn.Module] = []  # modules that are called by what is not looked into
        self._meets = False
        self._drawn: Generators | None = None
        self._buffers: set[int] = set()
        # storages of buffers that were written to, and of what is made of them
        self._changing: set[int] = set()

    # ---- values

    def begin(self, batch: Any) -> None:
        """Note what the batch, the parameters and the buffers are."""
        for i, x in enumerate(leaves(batch, torch.Tensor)):
            self.trace.inputs.append(self._add(x, ("batch", i), True, False))
        for name, p in named_parameters_in(self.model):
            self.trace.sources["parameter", name] = self._add(p, ("parameter", name), False, p.requires_grad)
        for name, b in self.model.named_buffers():
            self.trace.sources["buffer", name] = self._add(b, ("buffer", name), True, False)
            self._buffers.add(storage_of(b))

    def _add(self, x: torch.Tensor, source: tuple[str, Any], local: bool, grad: bool) -> int:
        if id(x) not in self._known:
            self._known[id(x)] = len(self.trace.values)
            self.trace.values.append(Value(len(self.trace.values), x, source, local, grad))
        return self._known[id(x)]

    def ref(self, x: Any) -> Any:
        """A :class:`Ref` in the place of a tensor; other leaves as they are."""
        if not isinstance(x, torch.Tensor):
            return self._original(x)
        if id(x) not in self._known:
            if isinstance(x, FakeTensor):
                raise _Hidden(f"a tensor of the shape {list(x.shape)} that no torch call has made")
            if x.requires_grad:
                raise SplitError(
                    f"A tensor of the shape {list(x.shape)} is used that requires gradients and is no "
                    "parameter of the model. Make it one (nn.Parameter), so that a stage can hold it; to "
                    "what takes a model apart by hooks (attributions, say) give engine.full_model()."
                )
            self._add(x, ("constant", None), True, False)
        return Ref(self._known[id(x)])

    def is_known(self, x: torch.Tensor) -> bool:
        """Whether :meth:`ref` takes it."""
        return id(x) in self._known or not (isinstance(x, FakeTensor) or x.requires_grad)

    def _given(self, x: Any) -> Any:
        """As :meth:`ref`; a :class:`Part` in the place of a module, which others have too."""
        name = self._names.get(id(x)) if isinstance(x, nn.Module) else None
        return self.ref(x) if name is None else Part(name)

    def _is_local(self, number: int) -> bool:
        value = self.trace.values[number]
        return value.local and value.storage not in self.trace.bound

    def _has_grad(self, number: int) -> bool:
        value = self.trace.values[number]
        return value.grad or self.trace.bound.get(value.storage, False)

    # ---- modules

    def module(self, go: Callable[..., Any], module: nn.Module, args: Any, kwargs: Any) -> Any:
        """In the place of the call of a module."""
        name = self._names.get(id(module))
        if self._quiet:
            self._within.append(module)
        if name is None or self._quiet or self._is_decorated(module):  # made by the forward itself
            return go(module, *args, **kwargs)
        t = self.trace
        mark, worked = (len(t.ops), len(t.calls), len(t.values)), self.worked.total
        self._watch_python()
        call = self._begin(name, args, kwargs)
        try:
            out = t.made(call, module, go(module, *args, **kwargs), self.ref)
            call.out, call.end = mapped(self.ref, out), len(t.ops)
            return out
        except (_Hidden, *_HIDDEN) as error:
            if name in self.trace.containers:
                raise self.refused(name, error) from error
            self._forget(mark)
            self.worked.total = worked
            return self._whole(name, module, args, kwargs, error)
        finally:
            self._watch_python()
            self._path.pop()

    def _is_decorated(self, module: nn.Module) -> bool:
        """Whether what calls it has put another forward into it, or hooks: stages have its own."""
        return any(
            m.forward != self._forwards.get(id(m)) or not program_hooks(m) <= self._hooks.get(id(m), set())
            for m in module.modules()
        )

    @contextlib.contextmanager
    def again(self, contexts: Callable[[], Any] | None = None) -> Iterator[None]:
        """While open, what happens is computed again in the backward pass, by ``torch.utils.checkpoint``."""
        t = self.trace
        start, calls = len(t.ops), len(t.calls)
        yield
        if not self._quiet and torch.is_grad_enabled() >= t.state.grad:
            t.again.append(Again(start, len(t.ops), calls, contexts))

    def passed(self) -> None:
        """A barrier was come to: by the module whose forward goes on here, and those around it."""
        self._meets = True
        self.trace.meets |= {self.trace.calls[i].name for i in self._path}

    def meets_within(self) -> bool:
        """A collective is called: whether by what is not looked into."""
        if self._quiet:
            self.passed()
        return bool(self._quiet)

    def _watch_python(self) -> None:
        """Note if the module whose forward goes on here has drawn random numbers that are not torch's."""
        if not self.is_watched:
            return
        if self._drawn is not None and not self._drawn.as_now() and self._path:
            name = self.trace.calls[self._path[-1]].name
            if name not in self.trace.dice:
                self.trace.changed.setdefault(name, []).append(
                    "draws random numbers from Python's or NumPy's generator"
                )
                self.trace.dice.add(name)
            self._drawn = None
        self._drawn = self._drawn or Generators()

    def refused(self, name: str, error: Exception) -> ValuesError:
        if isinstance(error, _OwnBackward):
            return ValuesError(
                name,
                f"{type(self.model).__name__} cannot be split: {error}, an autograd function, is called in "
                f"the forward of {name or 'the model'!r}, which is to be divided among stages, and uses "
                "modules itself. What it does forward and backward lies in one stage. Call it in a module of "
                "its own for as many blocks as a stage is to have.",
            )
        said = str(error) if isinstance(error, _Hidden) else f"{type(error).__name__}: {error}"
        return ValuesError(
            name,
            f"{type(self.model).__name__} cannot be split: the forward of {name or 'the model'!r}, which is "
            f"to be divided among stages, depends on the values of activations or parameters ({said}). Move "
            "this part into a module of its own, which then lies in one stage, or decide it from the batch.",
        )

    def _forget(self, mark: tuple[int, int, int]) -> None:
        t = self.trace
        for value in t.values[mark[2] :]:
            self._known.pop(id(value.tensor), None)
        del t.ops[mark[0] :], t.calls[mark[1] :], t.values[mark[2] :]
        t.answers[:] = [said for said in t.answers if said[0] < mark[1]]
        t.again[:] = [again for again in t.again if again.calls <= mark[1]]
        for ops in t.drawing.values():
            ops[:] = [op for op in ops if op < mark[0]]

    def _whole(self, name: str, module: nn.Module, args: Any, kwargs: Any, error: Exception) -> Any:
        """A module that does what fakes cannot follow: run by itself on some values, for its shapes."""
        self._quiet += 1
        self._meets = False
        within = AnswerRecorder()
        try:
            with self.worked.as_one(), torch.no_grad(), stand_in_values(module.modules()) as stood:
                given_some = mapped(valued, (args, kwargs))
                stand_ins = set(map(id, stood.values()))
                pairs = [*stood.items(), *((b, b) for b in module.buffers() if id(b) not in stand_ins)]
                before = {storage_of(own): _sum(x) for own, x in pairs}
                with within:
                    out = module(*given_some[0], **given_some[1])
                written = {s for own, x in pairs if _sum(x) != before[s := storage_of(own)]}
        except Exception as other:
            words = f"{error} in {name!r}, which could not be run by itself either: {other}"
            raise _Hidden(words).for_its_own(other) from error
        finally:
            self._quiet -= 1
        if self._meets:
            self.trace.meets.add(name)
        inner = filter(says_data, module.modules())
        self.trace.may_write |= {self._names[id(m)] for m in inner if id(m) in self._names}
        for x in (x for m in module.modules() for x in vars(m).values() if isinstance(x, torch.Generator)):
            self.trace.drawing.setdefault(id(x), []).append(len(self.trace.ops))
        grad = torch.is_grad_enabled() and any(p.requires_grad for p in parameters_in(module))
        numbers = [x.number for x in leaves(mapped(self.ref, (args, kwargs)), Ref)]
        grad = grad or (torch.is_grad_enabled() and any(self._has_grad(n) for n in numbers))
        new: list[int] = []

        def fake(x: Any) -> Any:
            if not isinstance(x, torch.Tensor):
                return x
            self._quiet += 1
            with self.fake:
                like = torch.empty(x.shape, dtype=x.dtype, device=self.trace.device)
            self._quiet -= 1
            new.append(self._add(like, ("op", len(self.trace.ops)), False, grad and x.is_floating_point()))
            return like

        out = mapped(fake, out)
        self._path.pop()
        call = self._begin(name, args, kwargs)
        call.out, call.end = mapped(self.ref, out), call.start + 1
        self.trace.answers += [(call.number, -1, answer) for answer in within.answers]
        work = self.worked.total
        given_and_out = (call.args, call.kwargs), call.out, tuple(numbers), new, written
        self._note(name, *given_and_out, local=False, work=work)
        return out

    def _begin(self, name: str, args: Any, kwargs: Any) -> ModuleCall:
        t, parent = self.trace, self._path[-1] if self._path else -1
        traced = mapped(self._given, args), mapped(self._given, kwargs)
        t.calls.append(
            ModuleCall(len(t.calls), name, parent, len(t.ops), TorchState.now(t.device.type), *traced)
        )
        self._path.append(t.calls[-1].number)
        return t.calls[-1]

    # ---- torch calls

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = all_given(func, kwargs)
        name = getattr(func, "__name__", "")
        call = func
        if meets_ranks(func):
            self._meets, call = True, partial(as_if_all_had_it, func)
        if self._quiet or name in METADATA:
            return call(*args, **kwargs)
        tensors = leaves((args, kwargs), torch.Tensor)
        versions = [version_of(x) for x in tensors]
        reads = mapped(self.ref, (args, kwargs))
        numbers = tuple(dict.fromkeys(x.number for x in leaves(reads, Ref)))
        local = all(self._is_local(n) for n in numbers)
        if name == "__get__" and getattr(func, "__self__", None) is torch.Tensor.requires_grad:
            return self._has_grad(numbers[0])
        if name == "__set__":
            raise _Hidden(f"it sets the attribute {func.__self__.__name__!r} of a tensor")  # type: ignore[attr-defined]
        if (function := function_of(func)) is not None:
            call = partial(self._by_itself, function, numbers, leaves((args, kwargs), nn.Module))
        self.worked.begin()
        out, answer = _run(func, call, tensors, args, kwargs)
        if name == "to" and any(out is x for x in tensors):
            # it moves nothing here, but may where the stages run
            out = torch.ops.aten.alias.default(out)
        work, drew, sized = self.worked.total, self.worked.random, self.worked.sized
        outputs = leaves(out, torch.Tensor)
        _refuse_sparse(self.model, ((f"what {name_of(func)} gives in its forward", x) for x in outputs))
        written = {storage_of(x) for x, v in zip(tensors, versions, strict=True) if version_of(x) != v}
        written |= {storage_of(x) for x in statistics(func, args, kwargs) if isinstance(x, torch.Tensor)}
        if answer is not None:
            self.trace.answers.append((self._path[-1] if self._path else -1, len(self.trace.ops), answer))
        if not outputs and not written:
            if tensors and name != "__get__":
                self._note_read(func, reads, numbers, local, out)
            return out
        local = local and not drew
        grad = torch.is_grad_enabled() and any(self._has_grad(n) for n in numbers)
        grad = grad and name not in ("detach", "__get__")
        if not local:
            for s in written:
                self.trace.bound[s] = self.trace.bound.get(s, False) or grad
        number, before = len(self.trace.ops), len(self.trace.values)
        for generator in leaves((args, kwargs), torch.Generator) if drew else ():
            self.trace.drawing.setdefault(id(generator), []).append(number)
        for x in outputs:
            flows = grad and (x.is_floating_point() or x.is_complex())
            self._add(x, ("op", number), local and storage_of(x) not in self.trace.bound, flows)
        makes = range(before, len(self.trace.values))
        self._changing |= written & self._buffers
        if self._is_changing(numbers):
            self._changing |= {self.trace.values[n].storage for n in makes}
        out_refs = mapped(self.ref, out)
        self._note(func, reads, out_refs, numbers, makes, written, local=local, work=work)
        if sized and self._path and self.trace.calls[self._path[-1]].name in self._clusters:
            raise _Hidden(f"{name_of(func)} gives as many rows as a cluster has")
        if sized and local:  # what is made of it has its size, and Python may go by that
            given: tuple[Any, Any] = tuple(map(Ref, makes)), {}
            self._note(sizes_of, given, sizes_of(*outputs), tuple(makes), local=True, read=True)
        return out

    def _by_itself(
        self, function: type, numbers: tuple[int, ...], given: list[nn.Module], *args: Any, **kwargs: Any
    ) -> Any:
        """What an autograd function gives: it is one call, whatever modules it calls."""
        self._quiet += 1
        self._within, meets, self._meets = [], self._meets, False
        try:
            out = function.apply(*args, **kwargs)  # type: ignore[attr-defined]
        finally:
            self._quiet -= 1
            self._meets = self._meets or meets_in_backward(function)
            if self._meets:
                self.trace.meets.add(function.apply)  # type: ignore[attr-defined]
            self._meets = self._meets or meets
        known = {id(self.trace.values[n].tensor) for n in numbers}
        # a module that it is given would be called by another stage's backward pass, too
        if given or any(id(p) not in known for m in self._within for p in parameters_in(m)):
            raise _OwnBackward(function.__name__)
        return out

    def _is_changing(self, numbers: tuple[int, ...]) -> bool:
        """Whether values hang on what this forward has written to a buffer."""
        changing = self._changing
        return bool(changing) and any(self.trace.values[n].storage in changing for n in numbers)

    def _note_read(self, func: Any, reads: Any, numbers: tuple[int, ...], local: bool, out: Any) -> None:
        """A value that Python has seen: a local one, which each later batch must have again."""
        if self._is_certain(numbers):
            return
        if self._is_changing(numbers):
            raise _Hidden(f"{name_of(func)} reads of a buffer what the forward has written to it")
        if not local or any(isinstance(self.trace.values[n].tensor, FakeTensor) for n in numbers):
            raise _Hidden(f"{name_of(func)} reads what the model computes or draws")
        self._note(func, reads, out, numbers, local=True, read=True)

    def _is_certain(self, numbers: tuple[int, ...]) -> bool:
        """Whether what is read is ``torch.rand(...) < p`` with a p of 0: a layer that is never left out."""
        kind, at = self.trace.values[numbers[0]].source
        op = self.trace.ops[at] if kind == "op" else None
        if op is None or getattr(op.func, "__name__", "") not in ("lt", "__lt__") or len(op.args) != 2:
            return False
        x, p = op.args
        kind, at = self.trace.values[x.number].source if isinstance(x, Ref) else ("", 0)
        drawn = kind == "op" and getattr(self.trace.ops[at].func, "__name__", "") == "rand"
        return drawn and isinstance(p, int | float) and p <= 0

    def _note(
        self,
        func: Any,
        arguments: Any,
        out: Any,
        reads: tuple[int, ...],
        makes: Iterable[int] = (),
        writes: Iterable[int] = (),
        *,
        local: bool,
        read: bool = False,
        work: OpCost | None = None,
    ) -> None:
        state, call = TorchState.now(self.trace.device.type), self._path[-1] if self._path else -1
        args, kwargs = arguments
        makes, writes, work = tuple(makes), frozenset(writes), work or OpCost()
        op = Op(func, args, kwargs, out, reads, makes, writes, local, read, state, work, call)
        self.trace.ops.append(op)


def statistics(func: Any, args: Any, kwargs: Any) -> tuple[Any, ...]:
    """What a normalisation of the batch writes to and does not say so."""
    if func in (F.batch_norm, F.instance_norm):
        names = "input running_mean running_var weight bias training"
    elif func in (torch.batch_norm, torch.instance_norm):
        names = "input weight bias running_mean running_var training"
    else:
        return ()
    bound = bound_to(names, args[:6], kwargs)
    writes = bound.get("training", bound.get("use_input_stats", func is F.instance_norm))
    return (bound.get("running_mean"), bound.get("running_var")) if writes else ()


def _run(
    func: Callable[..., Any],
    call: Callable[..., Any],
    tensors: Sequence[torch.Tensor],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> tuple[Any, Answer | None]:
    """What a call of a function gives, and what is heard of it (see :func:`heard`).

    Raises:
        _Hidden: it would need values that are not there.
    """
    try:
        # what needs a gradient is followed here: what is real could not get one from what is fake
        with torch.no_grad() if tensors else contextlib.nullcontext():
            return heard(call, args, kwargs)
    except DataDependentOutputException as error:
        raise _Hidden(f"{name_of(func)} reads what the model computes") from error
    except Exception as error:
        if isinstance(error, (_Hidden, *_HIDDEN)) or not any(isinstance(x, FakeTensor) for x in tensors):
            raise
        said = f"{name_of(func)} on tensors without values: {error}"
        raise _Hidden(said).for_its_own(_met_on_values(func, args, kwargs)) from error


def _met_on_values(func: Callable[..., Any], args: Any, kwargs: Any) -> Exception | None:
    """What a function ends in on some values in the place of none."""
    try:
        with torch.no_grad():
            given = mapped(valued, (args, kwargs))
            func(*given[0], **given[1])
    except Exception as error:
        return error
    return None


def _sum(x: torch.Tensor) -> float:
    """A number that tells whether values were changed."""
    return float(x.detach().nan_to_num().double().sum()) if x.numel() else 0.0
