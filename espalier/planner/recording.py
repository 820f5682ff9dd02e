"""Recordings: what one dry step of the engine does, operation by operation.

There is no second description of the model: the engine runs a shallow copy of it without data, and what it
did is noted with its sizes. Two depths tell what a block adds, two sizes of a micro-batch what a row adds.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from espalier.blocks import blocks, parameters_in
from espalier.comm import Collective, ledger
from espalier.engine.engine import Engine
from espalier.engine.report import local_bytes
from espalier.tensor.dry_runs import Recalled, flop_counts
from espalier.tensor.live_memory import LiveMemory
from espalier.torch_private import DispatchMode, getter, raw, schema_of
from espalier.trees import tensors_in

# views by other names
_VIEWS = ("_unsafe_view", "_reshape_alias")
# of the rows of a table that are asked for
_LOOKUPS = ("embedding", "_embedding_bag", "index", "index_select", "gather", "take")
_STORES = (
    *("index_put_", "index_add_", "index_copy_", "index_fill_"),
    *("scatter_", "scatter_add_", "scatter_reduce_"),
)
_CAUSAL = " (causal)"
# these products add to what they are given first
_ADDING = ("addmm", "baddbmm")
# these give memory to what comes after them, and move nothing
_FREE = ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided")
_grad = getter("grad")
_BLOCKS = "blocks"


class Op(NamedTuple):
    """An operation on local tensors.

    Attributes:
        name: torch's.
        kind: ``"matmul"``, ``"attention"``, ``"other"`` (bound by memory), or ``"view"`` (the host's alone).
        sizes: of a matrix product [batches, m, n, k], of attention [batches, heads, sequence, width].
        dtype: of its first tensor.
        flops: floating-point operations.
        moved: bytes read and written, if nothing stays in caches.
    """

    name: str
    kind: str
    sizes: tuple[int, ...]
    dtype: str
    flops: int
    moved: int

    @property
    def is_causal(self) -> bool:
        """Whether it is attention of which half is left out, and half of the operations count."""
        return self.name.endswith(_CAUSAL)


class Under(NamedTuple):
    """An operation that is done while messages are on their way, and how many these are."""

    op: Op
    messages: int


class Sent(NamedTuple):
    """A collective.

    Attributes:
        op: its operation.
        axis: along which.
        bytes: that this rank sends.
        under: of a message that is passed on, what the program does until it waits for it.
    """

    op: str
    axis: str
    bytes: int
    under: tuple[Under, ...] = ()


Event = Op | Sent
Counts = Mapping[str, Counter[Event]]


@dataclass(frozen=True)
class Recording:
    """What a rank does in one step.

    Attributes:
        events: in order, each with its phase: ``"forward"``, ``"backward"`` or ``"step"``.
        parameters: bytes of this rank's.
        held: bytes that live before the step: parameters, states.
        kept: bytes more that live between forward and backward.
        peak: the most bytes that live at once until a block has a gradient, beside finished gradients.
        later: the same from then on; 0 where there are no blocks.
        carried: bytes that go between the device and other places, by phase, kind and way.
    """

    events: tuple[tuple[str, Event], ...]
    parameters: int
    held: int
    kept: int
    peak: int
    later: int = 0
    carried: Mapping[tuple[str, str, str], int] = field(default_factory=dict)

    def counts(self) -> dict[str, Counter[Event]]:
        """How often what is done, by phase."""
        counts: dict[str, Counter[Event]] = {}
        for (phase, event), n in Counter(self.events).items():
            counts.setdefault(phase, Counter())[event] = n
        return counts

    def to_list(self) -> list[Any]:
        """As JSON takes it; each event once."""
        known = {event: i for i, event in enumerate(dict.fromkeys(event for _, event in self.events))}
        rows = [[phase, known[event]] for phase, event in self.events]
        carried = [[*key, n] for key, n in self.carried.items()]
        numbers = [self.parameters, self.held, self.kept, self.peak, self.later, carried]
        events = [
            [*event[:-1], [[list(op), n] for op, n in event.under]]
            if isinstance(event, Sent)
            else list(event)
            for event in known
        ]
        return [events, rows, *numbers]

    @staticmethod
    def from_list(table: Sequence[Any]) -> Recording:
        """That of what :meth:`to_list` gave."""
        known: list[Event] = []
        for row in table[0]:
            if len(row) == len(Sent._fields):
                name, axis, size, under = row
                known.append(Sent(name, axis, size, tuple(Under(_op_of(op), n) for op, n in under)))
            else:
                known.append(_op_of(row))
        carried = {(phase, kind, way): n for phase, kind, way, n in table[7]}
        events = tuple((phase, known[i]) for phase, i in table[1])
        parameters, held, kept, peak, later = table[2:7]
        return Recording(events, parameters, held, kept, peak, later, carried)


def _op_of(row: Sequence[Any]) -> Op:
    name, kind, sizes, dtype, flops, moved = row
    return Op(name, kind, tuple(sizes), dtype, flops, moved)


def record(engine: Engine, batch: Any, *, steps: bool = False, recalled: Recalled | None = None) -> Recording:
    """Run one step of a dry engine, and note what it does.

    Args:
        engine: of :func:`~espalier.engine.dry.dry_engine`.
        batch: the global batch, as meta tensors.
        steps: with the optimizer's update; a step before it makes its states.
        recalled: what operations gave in other recordings.
    """
    work = recalled or Recalled()
    if steps:
        with work:
            engine.accumulate(engine.cut(batch))
            engine.step()
    memory, mode = engine.watch().live, _Recorder()
    with work, memory, _gradients_aside(engine, memory):
        memory.phase = "forward"
        held, kept = memory.now, [0]
        carried, seen = Counter[tuple[str, str, str]](), [engine.carried()]

        def phase(name: str) -> None:
            if name == "backward" and mode.phase == "forward":
                kept[0] = max(kept[0], memory.now - held)
            now = engine.carried()
            carried.update({(mode.phase, x.kind, x.way): n for x, n in (now - seen[0]).items()})
            seen[0] = now
            mode.phase = name
            if name != "backward" or memory.phase != _BLOCKS:
                memory.phase = name

        with ledger(engine.mesh) as book, mode:
            engine.mesh.ledgers.append(mode)
            try:
                engine.accumulate(engine.cut(batch), phase=phase)
                phase("backward")
                engine.finish_gradients()
                phase("step")
                if steps:
                    engine.step()
                phase("")
            finally:
                engine.mesh.ledgers[:] = [x for x in engine.mesh.ledgers if x is not mode]
        assert len(book.entries) == mode.seen
    peak, later = (max(memory.peaks.get(x, 0) for x in of) for of in (("forward", "backward"), (_BLOCKS,)))
    parameters = sum(map(local_bytes, parameters_in(engine.module)))
    return Recording(tuple(mode.events), parameters, held, kept[0], peak, later, dict(carried))


@contextmanager
def _gradients_aside(engine: Engine, memory: LiveMemory) -> Iterator[None]:
    """While open, a gradient that is there counts in no peak: plans cut them, and send them early.

    Peaks from the first one of a block on are told apart.
    """
    counted: set[int] = set()

    def came(p: torch.Tensor) -> None:
        with raw():
            grad = _grad(p)
        if grad is not None and id(p) not in counted:  # else it is sent already
            counted.add(id(p))
            memory.aside += grad.nbytes
            if id(p) in of_blocks:
                memory.phase = _BLOCKS

    with raw():
        trained = [p for p in parameters_in(engine.module) if p.requires_grad]
        of_blocks = {id(p) for block in blocks(engine.module).values() for p in parameters_in(block)}
        handles = [p.register_post_accumulate_grad_hook(came) for p in trained]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class _Recorder(DispatchMode):
    """Notes operations and collectives while it is open."""

    looks_on = True

    def __init__(self) -> None:
        super().__init__()
        self.phase, self.seen = "forward", 0
        self.events: list[tuple[str, Event]] = []
        # where messages that are on their way stand among these, and what is done meanwhile
        self._under_way: dict[int, list[Under]] = {}
        self._count = flop_counts()
        self._views: dict[Any, bool] = {}

    def saw(self, event: Collective) -> None:
        """A collective is about to start."""
        self.seen += 1
        if event.op == "pass_on":
            self._under_way[len(self.events)] = []
        self.events.append((self.phase, Sent(event.op, event.where, event.sent)))

    def waits(self, axis: str) -> None:
        """The program waits for the oldest message along an axis."""
        place = next(place for place in self._under_way if self.events[place][1][1] == axis)
        phase, event = self.events[place]
        assert isinstance(event, Sent)
        self.events[place] = phase, event._replace(under=tuple(self._under_way.pop(place)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        with raw():
            out = func(*args, **kwargs)
            packet = func.overloadpacket
            name = packet.__name__
            if name not in _FREE:
                op = self._op(func, packet, name, args, kwargs, out)
                self.events.append((self.phase, op))
                if op.kind != "view":
                    for meanwhile in self._under_way.values():
                        meanwhile.append(Under(op, len(self._under_way)))
        return out

    def _op(self, func: Any, packet: Any, name: str, args: Any, kwargs: Any, out: Any) -> Op:
        # what is written into counts once, as what comes out
        tensors = tensors_in([args, {key: x for key, x in kwargs.items() if key != "out"}])
        outputs = tensors_in([out])
        first = tensors[0] if tensors else outputs[0] if outputs else None
        dtype = "" if first is None else str(first.dtype).removeprefix("torch.")
        if func not in self._views:
            arguments = schema_of(func).arguments
            self._views[func] = name in _VIEWS or any(
                a.alias_info is not None and not a.alias_info.is_write for a in arguments
            )
        if self._views[func]:
            return Op(name, "view", (), dtype, 0, 0)
        moved = _moved(name, tensors, outputs)
        count = self._count.get(packet)
        if count is None:
            return Op(name, "other", (), dtype, 0, moved)
        flops = int(count(*args, **kwargs, out_val=out))
        if "attention" in name:
            q = tensors[1] if "backward" in name else tensors[0]
            names = [argument.name for argument in schema_of(func).arguments]
            told = dict(zip(names, args, strict=False)) | kwargs
            if told.get("is_causal") or told.get("custom_mask_type"):  # 1 and 2: both are causal
                flops, name = flops // 2, name + _CAUSAL
            return Op(name, "attention", tuple(q.shape), dtype, flops, moved)
        sizes = _product_sizes(name, args, outputs[0]) if outputs else None
        if sizes is None:
            return Op(name, "other", (), dtype, flops, moved)
        return Op(name, "matmul", sizes, dtype, flops, moved)


def _moved(name: str, tensors: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> int:
    """Bytes read and written: of a table those of the rows in question, of repeated ones those there are."""
    reads, writes = sum(map(_bytes, tensors)), sum(map(_bytes, outputs))
    if name not in _LOOKUPS and name not in _STORES:
        return reads + writes
    table, *others = tensors
    whole, rows = _bytes(table), writes
    if name == "_embedding_bag":
        rows = others[0].numel() * _bytes(table[0])
    elif name in _STORES and others:
        rows = writes = _bytes(others[-1]) if others[-1].ndim else whole
    return reads - whole + min(rows, whole) + writes


def _bytes(x: torch.Tensor) -> int:
    there = (n for n, stride in zip(x.shape, x.stride(), strict=True) if stride)
    return math.prod(there) * x.itemsize


def _product_sizes(name: str, args: Any, product: torch.Tensor) -> tuple[int, int, int, int] | None:
    """Of the products that an operation is: [batches, m, n, k]; None: of no matrices.

    A convolution is, for each of its groups, the product of all patches by the kernels: so is its backward
    pass, which has two of them with as many operations each.
    """
    if name in ("convolution", "convolution_backward"):
        # what is patched: the input, or, of a transposed one, what comes out
        of_output = args[0] if name == "convolution_backward" else product
        x, weight, *_, is_transposed, _, groups = args[name == "convolution_backward" :][:9]
        places = x if is_transposed else of_output
        inner, outer = weight[0].numel(), weight.shape[0] // groups
        if is_transposed:
            inner, outer = outer, inner
        return groups, places.numel() // places.shape[1], outer, inner
    matrices = [x for x in tensors_in(args)[name in _ADDING :] if x.ndim > 1]
    if len(matrices) < 2:
        return None
    batches = product.shape[0] if product.ndim > 2 else 1
    return batches, product.shape[-2], product.shape[-1], matrices[0].shape[-1]


def noted(run: Callable[[], object]) -> list[Op]:
    """The operations that a function does, of plain tensors."""
    mode = _Recorder()
    with mode:
        run()
    return [event for _, event in mode.events if isinstance(event, Op)]


# ---- what a block adds, and what a row adds


class NotAlike(Exception):
    """Two recordings are not of the same program."""


def grown(less: Recording, more: Recording, rows: int, of: tuple[int, int] = (1, 2)) -> Recording:
    """What is done with so many rows, of recordings with fewer.

    Args:
        of: the rows of both.

    Raises:
        NotAlike: the two differ in more than their sizes.
    """
    if rows == of[0]:
        return less
    if rows == of[1]:
        return more

    def line(a: int, b: int) -> int:
        return a + (b - a) * (rows - of[0]) // (of[1] - of[0])

    def between(a: Op, b: Op) -> Op:
        sizes = tuple(map(line, a.sizes, b.sizes))
        return a._replace(sizes=sizes, flops=line(a.flops, b.flops), moved=line(a.moved, b.moved))

    known: dict[tuple[Event, Event], Event] = {}
    events = []
    if len(less.events) != len(more.events):
        raise NotAlike
    for (phase, a), (_, b) in zip(less.events, more.events, strict=True):
        event = known.get((a, b))
        if event is None:
            if a[0] != b[0] or a[1] != b[1] or len(a) != len(b):
                raise NotAlike
            if isinstance(a, Op) and isinstance(b, Op):
                event = between(a, b)
            else:
                assert isinstance(a, Sent) and isinstance(b, Sent)
                if len(a.under) != len(b.under):
                    raise NotAlike
                pairs = zip(a.under, b.under, strict=True)
                under = tuple(Under(between(x.op, y.op), x.messages) for x, y in pairs)
                event = Sent(a.op, a.axis, line(a.bytes, b.bytes), under)
            known[a, b] = event
        events.append((phase, event))
    names = "held", "kept", "peak", "later"
    held, kept, peak, later = (line(getattr(less, x), getattr(more, x)) for x in names)
    return Recording(tuple(events), less.parameters, held, kept, peak, later)


def added(shallow: Counts, deep: Counts, times: int = 1) -> dict[str, Counter[Event]]:
    """What is done more than ``times`` the shallow counts say, by phase.

    What stands once for all blocks (small gradients summed together) is another event in a deeper model: of
    such ones, which only one of the two has, the sizes are taken apart.

    Raises:
        NotAlike: there is less of it.
    """
    return {
        phase: _more(shallow.get(phase, Counter()), deep.get(phase, Counter()), times)
        for phase in dict.fromkeys((*shallow, *deep))  # in the same order in each process
    }


def _more(less: Mapping[Event, int], more: Mapping[Event, int], times: int) -> Counter[Event]:
    counts = Counter(more)
    for event, n in less.items():
        counts[event] -= times * n
    changed = {event[:2] for event, n in counts.items() if n < 0}
    events: Counter[Event] = Counter()
    sums: dict[tuple[str, str], list[int]] = {}
    for event, n in counts.items():
        if event[:2] not in changed or (n >= 0 and event in less):
            if n:
                events[event] = n
            continue
        total = sums.setdefault(event[:2], [0, 0])
        if isinstance(event, Sent):
            total[0] += n * event.bytes
        else:
            total[0] += n * event.moved
            total[1] += n * event.flops
    for (name, where), (size, flops) in sums.items():
        if flops < 0 or where == "matmul":
            raise NotAlike
        if size > 0:
            is_op = where in ("other", "view", "attention")
            events[Op(name, "other", (), "", flops, size) if is_op else Sent(name, where, size)] += 1
    return events
