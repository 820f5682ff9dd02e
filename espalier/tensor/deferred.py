"""Recorded operations, and in which order they are done again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.overrides import TorchFunctionMode

from espalier.comm import collectives
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.tensor.api import lay_out
from espalier.tensor.dtensor import become_parameter, plain, set_by_program
from espalier.tensor.modules import lay_out_parameter
from espalier.tensor.random import same_position, without_tag
from espalier.torch_private import TABLES, TorchDispatchMode, memory_id, own_buffers, schema_of, version_of
from espalier.trees import leaves, tensors_in, tree_map


@dataclass(frozen=True)
class Ref:
    """A tensor on the tape: a view of a storage."""

    storage: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    dtype: torch.dtype


class Op(NamedTuple):
    """A recorded call.

    Attributes:
        args, kwargs: with a :class:`Ref` for each tensor on the tape.
        reads: storages whose values it needs.
        writes: storages that it writes to.
        makes: its outputs in new storages, with their numbers among its outputs.
        fills: storages that it writes to as a whole, whatever was there.
        random: whether it draws random numbers.
        alone: whether these do not hang on any tensor's values.
    """

    func: Any
    args: Any
    kwargs: Any
    reads: set[int]
    writes: set[int]
    makes: list[tuple[int, Ref]]
    fills: set[int]
    random: bool
    alone: bool

    @property
    def changes(self) -> set[int]:
        """Storages whose values it makes or changes."""
        return self.writes | {at.storage for _, at in self.makes}

    @property
    def generator(self) -> torch.Generator | None:
        """A generator other than torch's own."""
        generators = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, torch.Generator)]
        return generators[0] if generators else None


class ReplayOrder:
    """What of a tape must be done to make some tensors, and in which order.

    Args:
        ops: the tape.
        sizes: bytes of each storage.
        targets: what is wanted, and what is called on it when it is done; after that it is let go of.
    """

    def __init__(
        self,
        ops: Sequence[Op],
        sizes: Sequence[int],
        targets: Sequence[tuple[Ref, Callable[[torch.Tensor], None]]],
    ) -> None:
        self._ops, self._sizes = ops, sizes
        self._targets: dict[int, list[tuple[Ref, Callable[[torch.Tensor], None]]]] = {}
        for at, take in targets:
            self._targets.setdefault(at.storage, []).append((at, take))
        self._memory: dict[int, torch.UntypedStorage] = {}
        self._done: set[int] = set()
        self._find_needed()
        self._find_order()

    def _find_needed(self) -> None:
        """From the end: needed is what makes or changes what is, and draws that hang on values."""
        live = set(self._targets)
        self._needed: set[int] = set()
        for i in reversed(range(len(self._ops))):
            op = self._ops[i]
            if op.changes & live or (op.random and not op.alone):
                self._needed.add(i)
                live -= {at.storage for _, at in op.makes} | op.fills
                live |= op.reads

    def _find_order(self) -> None:
        """What comes before what, and the last draw that each operation waits for."""
        writer: dict[int, int] = {}
        readers: dict[int, set[int]] = {}
        self._before: dict[int, set[int]] = {}
        self._after: dict[int, list[int]] = {}
        self._draw: dict[int, int] = {}
        self._uses: dict[int, int] = dict.fromkeys(self._targets, 0)
        for i in sorted(self._needed):
            op = self._ops[i]
            before = {writer[s] for s in op.reads | op.changes if s in writer}
            for s in op.changes:
                before |= readers.pop(s, set())
                writer[s] = i
            for s in op.reads - op.changes:
                readers.setdefault(s, set()).add(i)
            self._before[i] = before - {i}
            for j in self._before[i]:
                self._after.setdefault(j, []).append(i)
            self._draw[i] = i if op.random else max((self._draw[j] for j in before), default=-1)
            for s in op.reads | op.changes:
                self._uses[s] = self._uses.get(s, 0) + 1

    # ---- running

    def run(self) -> None:
        """Do all: draws in their order, what follows from a draw right after it.

        What no draw is in comes first, so that the tensors of a layer are ready at about the same time.
        """
        drawn = {s for i in self._needed if self._draw[i] >= 0 for s in self._touched(i)}
        for i in sorted(self._needed):
            if any(s in self._targets and s not in drawn for s in self._touched(i)):
                self._demand(i)
        for i, op in enumerate(self._ops):
            if op.random and i in self._needed:
                self._demand(i)
                self._follow(i, i)
            elif op.random:
                self.draw(op, self._sizes)
        for i in sorted(self._needed):
            if i not in self._done:
                self._demand(i)
                self._follow(i, len(self._ops))

    def run_in_order(self, state_before: Callable[[int], torch.Tensor]) -> None:
        """Do what is needed, one after the other, draws from the states that they have in the program."""
        for i in sorted(self._needed):
            if self._ops[i].random:
                torch.set_rng_state(state_before(i))
            self._do(i)

    def _demand(self, i: int) -> None:
        """Do an operation, and before it what it waits for."""
        waiting = [i]
        while waiting:
            now = waiting[-1]
            open_ = [j for j in self._before[now] if j not in self._done]
            if open_:
                waiting.extend(open_)
                continue
            waiting.pop()
            if now not in self._done:
                self._do(now)

    def _follow(self, i: int, draw: int) -> None:
        """Do what can be done after an operation, given all draws up to ``draw``."""
        coming = list(reversed(self._after.get(i, [])))
        while coming:
            now = coming.pop()
            if now in self._done or self._ops[now].random or self._draw[now] > draw:
                continue
            self._demand(now)
            coming.extend(reversed(self._after.get(now, [])))

    def _do(self, i: int) -> None:
        op = self._ops[i]
        _call(op, self._sizes, self._memory)
        self._done.add(i)
        for s in op.reads | op.changes:
            self._uses[s] -= 1
            if not self._uses[s]:
                for at, take in self._targets.get(s, ()):
                    take(_real(at, self._sizes, self._memory))
                self._memory.pop(s, None)

    def _touched(self, i: int) -> set[int]:
        return self._ops[i].reads | self._ops[i].changes

    @staticmethod
    def draw(op: Op, sizes: Sequence[int]) -> None:
        """Draw what nobody needs, so that the next draw gets what it should."""
        _call(op, sizes, {})


def _real(at: Ref, sizes: Sequence[int], memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    if at.storage not in memory:
        memory[at.storage] = torch.UntypedStorage(sizes[at.storage])
    whole = torch.empty(0, dtype=at.dtype)
    return whole.set_(memory[at.storage], at.offset, at.shape, at.stride)


def _call(op: Op, sizes: Sequence[int], memory: dict[int, torch.UntypedStorage]) -> None:
    def real(x: Any) -> Any:
        return _real(x, sizes, memory) if isinstance(x, Ref) else x

    with torch.no_grad():
        outs = tensors_in([op.func(*tree_map(real, op.args), **tree_map(real, op.kwargs))])
        for i, at in op.makes:
            out = outs[i]
            storage = out.untyped_storage()
            is_new = all(memory_id(storage) != memory_id(other) for other in memory.values())
            lies = (tuple(out.shape), tuple(out.stride()), out.storage_offset())
            if is_new and lies == (at.shape, at.stride, at.offset) and storage.nbytes() == sizes[at.storage]:
                memory[at.storage] = storage
            else:
                _real(at, sizes, memory).copy_(out)


# ---- models built without memory: what constructors do is recorded, and done when it is known who needs
# what
#
# While :func:`deferred` is open, tensors are made on the meta device, and the operations that make and fill
# them are written on a tape. Replayed in memory, the tape gives the values that the constructor would have
# given: random operations draw from torch's CPU generator in the order of the program. All else is done
# where its inputs are at hand, so that a tensor lives whole only from its last draw to its last operation.


_aten = torch.ops.aten
_RANDOM = torch.Tag.nondeterministic_seeded
# what they write does not hang on what was there, nor do their draws
_DRAWS = frozenset(
    packet
    for name in "normal_ uniform_ random_ exponential_ log_normal_ cauchy_ geometric_".split()
    if (packet := getattr(_aten, name, None)) is not None
)
_FILLS = _DRAWS | {_aten.zero_, _aten.fill_, _aten.copy_}
_MAKES = frozenset((_aten.rand, _aten.randn, _aten.randint, _aten.randperm))
_VALUES = (torch.Tensor.tolist, torch.Tensor.numpy, torch.Tensor.__array__)


class Tape:
    """What was done to tensors that have no memory yet.

    Attributes:
        ops: in the order of the program.
        start: the state of torch's CPU generator before the first draw; None if there was none.
        resting: whether what is done now is not to be recorded.
    """

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.start: torch.Tensor | None = None
        self.resting = False
        self._storages: list[torch.UntypedStorage] = []  # held, so that their addresses stay theirs
        self._numbers: dict[int, int] = {}
        self._states: dict[int, torch.Tensor] = {}

    @property
    def has_asked(self) -> bool:
        """Whether the program asked for a random value, on which what followed may hang."""
        return bool(self._states)

    # ---- recording

    def ref(self, x: torch.Tensor) -> Ref | None:
        """Where a tensor lies; None if it is not on this tape."""
        number = self._numbers.get(memory_id(x))
        if number is None:
            return None
        if x.is_conj() or x.is_neg():
            raise NotImplementedError("espalier.deferred(): a conjugated view cannot be recorded.")
        return Ref(number, tuple(x.shape), tuple(x.stride()), int(x.storage_offset()), x.dtype)

    def adopt(self, x: torch.Tensor) -> Ref:
        """Take a new tensor's storage on the tape."""
        storage = x.untyped_storage()
        self._numbers[memory_id(storage)] = len(self._storages)
        self._storages.append(storage)
        storage._deferred = self  # type: ignore[attr-defined]
        ref = self.ref(x)
        assert ref is not None
        return ref

    def record(self, func: Any, args: Any, kwargs: Any, out: Any) -> None:
        """Write down a call, if it made or wrote to anything."""
        writes, filled = set(), set()
        for x in _written(func, args, kwargs):
            at = self.ref(x)
            assert at is not None
            writes.add(at.storage)
            if func.overloadpacket in _FILLS and _covers(x):
                filled.add(at.storage)
        makes = []
        for i, x in enumerate(tensors_in([out])):
            if self.ref(x) is None:
                makes.append((i, self.adopt(x)))
        if not makes and not writes:
            return  # a view
        random = _RANDOM in func.tags
        if random:
            self._note_state()
        args, kwargs = tree_map(self._kept, args), tree_map(self._kept, dict(kwargs))
        for name, value in (("device", torch.device("cpu")), ("pin_memory", False)):
            if kwargs.get(name) is not None:
                kwargs[name] = value
        reads = {x.storage for x in leaves((args, kwargs), Ref)} - filled
        alone = not random or func.overloadpacket in (_DRAWS | _MAKES)
        self.ops.append(Op(func, args, kwargs, reads, writes, makes, filled, random, alone))

    def _kept(self, x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        at = self.ref(x)
        return x.detach().clone() if at is None else at

    def _note_state(self) -> None:
        state = torch.get_rng_state()
        if self.start is None:
            self.start = state
        elif not same_position(state, self.start):
            raise NotImplementedError(
                "espalier.deferred(): torch's random state was set between two draws of the constructor, "
                "which cannot be recorded. Seed before the first draw, or build the model without it."
            )

    def sizes(self) -> list[int]:
        """Bytes of each storage."""
        return [storage.nbytes() for storage in self._storages]

    # ---- values

    def value(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor's values, whole, on the CPU; torch's random state is left as it is."""
        at = self.ref(x)
        assert at is not None
        values: list[torch.Tensor] = []
        schedule = ReplayOrder(self.ops, self.sizes(), [(at, lambda y: values.append(y.clone()))])
        before, self.resting = torch.get_rng_state(), True
        try:
            schedule.run_in_order(self._state_before)
        finally:
            self.resting = False
            torch.set_rng_state(before)
        return values[0]

    def _state_before(self, number: int) -> torch.Tensor:
        """The state of torch's generator before a random operation."""
        if any(op.random and (op.generator is not None or not op.alone) for op in self.ops[: number + 1]):
            raise NotImplementedError(
                "espalier.deferred(): the constructor asks for a random value, and has drawn from its own "
                "generator, or numbers that hang on values. Build the model without it."
            )
        assert self.start is not None
        last = -1
        for i, op in enumerate(self.ops[: number + 1]):
            if op.random:
                if i not in self._states:
                    if last >= 0:
                        torch.set_rng_state(self._states[last])
                        ReplayOrder.draw(self.ops[last], self.sizes())
                    self._states[i] = self.start if last < 0 else torch.get_rng_state()
                last = i
        return self._states[number]

    def replay(
        self,
        wanted: Sequence[tuple[torch.Tensor, Callable[[torch.Tensor], None]]],
        start: torch.Tensor | None,
    ) -> None:
        """Make tensors real one by one, in the order in which they are ready.

        Args:
            wanted: each with what is called on its values, whole, on the CPU; they are let go of after.
            start: in place of the recorded random state, equal on all ranks.
        """
        targets = []
        for x, take in wanted:
            at = self.ref(x)
            assert at is not None
            targets.append((at, take))
        before = torch.get_rng_state()
        if start is not None:
            torch.set_rng_state(start)
        try:
            ReplayOrder(self.ops, self.sizes(), targets).run()
        finally:
            if start is None or not same_position(before, start):
                torch.set_rng_state(before)  # the program has drawn or seeded since


def _written(func: Any, args: Any, kwargs: Any) -> list[torch.Tensor]:
    """The tensors that a call writes to."""
    written = []
    for i, argument in enumerate(schema_of(func).arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            written += tensors_in(args[i] if i < len(args) else kwargs.get(argument.name))
    return written


def _covers(x: torch.Tensor) -> bool:
    dense = torch.ops.aten.is_non_overlapping_and_dense.default(x)
    return bool(dense) and x.numel() * x.element_size() == x.untyped_storage().nbytes()


class _RecordMode(TorchDispatchMode):
    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, tape = kwargs or {}, self._tape
        if tape.resting:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        ours = [x for x in tensors if tape.ref(x) is not None]
        if func in (_aten._local_scalar_dense.default, _aten.equal.default) and ours:
            return func(*[tape.value(x) if tape.ref(x) is not None else x for x in args])
        if func is _aten.lift_fresh.default and not ours:
            out = _twin(args[0])
            tape.record(_aten.clone.default, args, {}, out)
            return out
        if tensors and not ours:
            if _RANDOM in func.tags:
                raise NotImplementedError(_REAL.format(func))
            return func(*args, **kwargs)
        if any(tape.ref(x) is None for x in _written(func, args, kwargs)):
            raise NotImplementedError(_REAL.format(func))
        meta = {id(x): _twin(x) for x in tensors if tape.ref(x) is None}
        run_args, run_kwargs = (tree_map(lambda x: meta.get(id(x), x), t) for t in (args, kwargs))
        if any(a.name == "device" for a in schema_of(func).arguments):
            if not tensors or kwargs.get("device") is not None:
                run_kwargs = {**run_kwargs, "device": torch.device("meta")}
            run_kwargs.pop("pin_memory", None)
        out = func(*run_args, **run_kwargs)
        tape.record(func, args, kwargs, out)
        return out


_REAL = (
    "espalier.deferred(): {} writes to, or draws for, a tensor that holds memory already (made "
    "before, or loaded). Fill it before, or build the model without espalier.deferred()."
)


def _twin(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_strided(x.size(), x.stride(), dtype=x.dtype, device="meta")


class _Disguise(TorchFunctionMode):
    """Lets programs take recorded tensors for what they stand for: some skip what they do on meta."""

    def __init__(self, tape: Tape) -> None:
        super().__init__()
        self._tape = tape

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if args and isinstance(args[0], torch.Tensor):
            if func == torch.Tensor.device.__get__ and args[0].is_meta:
                return torch.device("cpu")
            if func == torch.Tensor.is_meta.__get__:  # type: ignore[attr-defined]
                return False
            if func in _VALUES and self._tape.ref(args[0]) is not None:
                return func(self._tape.value(args[0]), *args[1:], **(kwargs or {}))
        return func(*args, **(kwargs or {}))


@contextmanager
def deferred() -> Iterator[None]:
    """While open, modules are built without memory; ``espalier.initialize`` then builds each rank's part.

    The values are those that the same program would have drawn without it: also where the model is cast, or
    its weights are drawn again, in here. What is done to the model's tensors must be done in here.

    >>> with espalier.deferred():                                     # doctest: +SKIP
    ...     model = GPT(config).to(torch.bfloat16)
    >>> engine = espalier.initialize(model, AdamW(model.parameters()), plan)

    Raises:
        NotImplementedError: a tensor that holds memory already is written to, or torch is seeded between two
            draws.
    """
    tape = Tape()
    seen: list[torch.Tensor] = []
    hook = register_module_parameter_registration_hook(lambda module, name, p: seen.append(p))
    try:
        with _Disguise(tape), _RecordMode(tape):
            yield
    finally:
        hook.remove()
    for p in seen:
        if isinstance(p, torch.Tensor):
            p._deferred_version = version_of(p)  # type: ignore[attr-defined]


def tape_of(x: torch.Tensor) -> Tape | None:
    """The tape that a tensor without memory is on; None if it has memory.

    Raises:
        ValueError: it is on the meta device, and on no tape, or it was written to since.
    """
    if not x.is_meta:
        return None
    tape: Tape | None = getattr(x.untyped_storage(), "_deferred", None)
    if tape is None:
        raise ValueError(
            f"A tensor of the shape {list(x.shape)} is on the meta device, so it has no values. Build the "
            "model under `with espalier.deferred():` in place of `with torch.device('meta'):`, which records "
            "how they are made. What casts or replaces them belongs in there, and an optimizer whose states "
            "are made at once (Adagrad)."
        )
    if getattr(x, "_deferred_version", version_of(x)) != version_of(x):
        raise ValueError(
            f"A parameter of the shape {list(x.shape)} was written to after `with espalier.deferred():`, "
            "when it had no memory. Do that inside, or after espalier.initialize."
        )
    return tape


def lay_out_parameters(
    parameters: Sequence[tuple[nn.Parameter, Layout]], then: Callable[[nn.Parameter], None]
) -> None:
    """Make parameters DTensors in place; of those that have no memory yet, each rank makes its part alone.

    Args:
        then: is called with each when it is one, before the next is.

    Raises:
        ValueError: see :func:`tape_of` and :func:`~espalier.tensor.modules.lay_out_parameter`.
    """
    on_tape: dict[Tape, list[tuple[nn.Parameter, Layout]]] = {}
    for p, layout in parameters:
        tape = None if layout.mesh.is_dry else tape_of(p)
        if tape is None:
            lay_out_parameter(p, layout)
            then(p)
        else:
            on_tape.setdefault(tape, []).append((p, layout))
    for tape, laid_out in on_tape.items():
        start = _agreed(tape, laid_out[0][1].mesh)
        tape.replay([(p, partial(_become, p, layout, then)) for p, layout in laid_out], start)


def _agreed(tape: Tape, mesh: Mesh) -> torch.Tensor | None:
    """The random state from which all ranks replay a tape: rank 0's.

    Raises:
        ValueError: on all ranks, if what was recorded on some hangs on other random values.
    """
    if tape.start is None:
        return None
    start = from_rank_0(tape.start, mesh)
    other = torch.tensor([tape.has_asked and not same_position(start, tape.start)], dtype=torch.int32)
    other = other.to(mesh.device())
    for axis in range(mesh.ndim):
        other = collectives.all_reduce(other, mesh, axis, "max")
    if other.item():
        raise ValueError(
            "espalier.deferred(): the model's constructor asks for random values (trunc_normal_ draws until "
            "all are inside, say), and the ranks drew different ones. Seed all ranks alike before it."
        )
    return start


def _become(
    p: nn.Parameter, layout: Layout, then: Callable[[nn.Parameter], None], whole: torch.Tensor
) -> None:
    """Let a parameter without memory be this rank's part of its value: who holds it goes on holding it."""
    local = plain(lay_out(whole, layout, source=None))
    become_parameter(p, local, layout)
    del whole, local
    then(p)


def make_parameters_real(parameters: Sequence[nn.Parameter]) -> None:
    """Give parameters without memory their values, whole, on the CPU; who holds them goes on holding them.

    torch's random state is left as it is.

    Raises:
        ValueError: see :func:`tape_of`.
    """
    on_tape: dict[Tape, list[nn.Parameter]] = {}
    for p in parameters:
        if (tape := tape_of(p)) is not None:
            on_tape.setdefault(tape, []).append(p)
    before = torch.get_rng_state()
    for tape, held in on_tape.items():
        tape.replay([(p, partial(_get_memory, p)) for p in held], tape.start)
    torch.set_rng_state(before)


def _get_memory(p: nn.Parameter, whole: torch.Tensor) -> None:
    become_parameter(p, whole.clone())


class _Values:
    """Values of recorded tensors: what is one tensor, or one memory, is one again."""

    def __init__(self) -> None:
        self._memories: dict[int, torch.UntypedStorage] = {}
        self._tensors: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # by the ids of the first, held

    def of(self, x: torch.Tensor, tape: Tape) -> torch.Tensor:
        """That of a tensor on a tape, with what a program has set on it."""
        if id(x) not in self._tensors:
            memory = memory_id(x)
            if memory not in self._memories:
                whole = torch.empty(0, dtype=x.dtype, device="meta").set_(x.untyped_storage())
                self._memories[memory] = tape.value(whole).untyped_storage()
            value = torch.empty(0, dtype=x.dtype)
            value.set_(self._memories[memory], x.storage_offset(), x.shape, x.stride())
            vars(value).update(set_by_program(x))
            self._tensors[id(x)] = x, value.requires_grad_(x.requires_grad)
        return self._tensors[id(x)][1]


def make_the_rest_real(model: nn.Module) -> None:
    """Give a model's buffers, and recorded tensors that are attributes of its modules, their values.

    Raises:
        ValueError: see :func:`tape_of`.
    """
    values = _Values()

    def real(x: Any) -> Any:
        if not isinstance(x, torch.Tensor) or not x.is_meta or isinstance(x, nn.Parameter):
            return x
        tape: Tape | None = getattr(x.untyped_storage(), "_deferred", None)
        return x if tape is None else values.of(x, tape)

    for module in model.modules():
        make_values_real(own_buffers(module), values.of)
        for name, value in vars(module).items():
            if name not in TABLES and any(x.is_meta for x in tensors_in(value)):
                vars(module)[name] = tree_map(real, value)


def make_values_real(
    table: MutableMapping[str, Any],
    value_of: Callable[[torch.Tensor, Tape], torch.Tensor] = lambda x, tape: tape.value(x),
) -> None:
    """Give the tensors among a mapping's values theirs.

    Raises:
        ValueError: see :func:`tape_of`.
    """
    for name, x in table.items():
        tape = tape_of(x) if isinstance(x, torch.Tensor) else None
        if tape is not None:
            table[name] = value_of(x, tape)


def from_rank_0(state: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    """Rank 0's random state, on all ranks of a mesh."""
    state = state.to(mesh.device())
    for axis in range(mesh.ndim):
        state = collectives.broadcast(state, mesh, axis)
    return plain(state).cpu()


def share_random_state(mesh: Mesh) -> bool:
    """All ranks go on from rank 0's random state: what they draw, plain or for DTensors, is in step.

    Returns:
        whether this rank would have drawn other numbers.
    """
    if mesh.is_dry or mesh.size() == 1:
        return False
    own = without_tag(torch.get_rng_state())
    first = from_rank_0(own, mesh)
    torch.set_rng_state(first)
    return not same_position(own, first)
