"""What an engine can tell of itself: memory, traffic, order; as data that prints as tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from espalier.comm import Ledger
from espalier.device import has_peak, peak_memory, restart_peak
from espalier.meanwhile import having
from espalier.mesh import Mesh
from espalier.parallel.data.chunks import Chunk, ShardedParam
from espalier.parallel.data.stages import Lies
from espalier.parallel.data.zero import ZeroState
from espalier.parallel.plan import PLACES
from espalier.tensor import plain
from espalier.tensor.live_memory import DryMemory, LiveMemory
from espalier.texts import in_columns
from espalier.torch_private import getter, memory_id, raw

_grad = getter("grad")


@dataclass(frozen=True)
class StateBytes:
    """One kind of state on this rank, in bytes.

    Attributes:
        name: ``"parameters"``, ``"gradients"``, ``"states"``, ``"masters"``, ``"gathered"``, ``"buffers"``.
        bytes: by place: ``"device"`` (where the model computes), ``"host"``, ``"disk"``.
        formula: what ZeRO's table says for all ranks on average, without padding (gradients: at their most,
            while the backward pass goes on); None where it says nothing.
    """

    name: str
    bytes: dict[str, int]
    formula: int | None = None

    @property
    def total(self) -> int:
        """In all places."""
        return sum(self.bytes.values())


@dataclass(frozen=True)
class Memory:
    """What an engine holds on this rank now; ``str()`` of it is a table.

    Attributes:
        kinds: a row each.
        plan: the plan, in words.
        device: where the model computes.
        peak: the most bytes that the device had allocated so far; None where it does not count (a CPU).
        updates: how the host and the device share those of states in the host's memory, if both do.
    """

    kinds: tuple[StateBytes, ...]
    plan: str
    device: str
    peak: int | None
    updates: str = ""

    def __getitem__(self, name: str) -> StateBytes:
        return next(kind for kind in self.kinds if kind.name == name)

    def __str__(self) -> str:
        places = [p for p in PLACES if p == "device" or any(kind.bytes.get(p) for kind in self.kinds)]
        rows = [["bytes on this rank", *(self.device if p == "device" else p for p in places), "formula"]]
        total = StateBytes("total", {p: sum(kind.bytes.get(p, 0) for kind in self.kinds) for p in places})
        for kind in (*self.kinds, total):
            formula = "" if kind.formula is None else f"{kind.formula:,}"
            rows.append([kind.name, *(f"{kind.bytes.get(p, 0):,}" for p in places), formula])
        lines = [self.plan, *in_columns(rows, "<>"), *([self.updates] if self.updates else [])]
        return "\n".join(lines if self.peak is None else [*lines, f"peak on {self.device}: {self.peak:,}"])


def memory(module: nn.Module, optimizer: torch.optim.Optimizer | None, data: ZeroState, plan: str) -> Memory:
    """What there is now of each kind, by where its chunks lie between their uses."""
    stage = data.stage
    chunk_of = {id(m.p): chunk for chunk in data.chunks for m in chunk.members}
    sizes = {name: dict.fromkeys(PLACES, 0) for name in ("parameters", "gradients", "states", "masters")}
    with raw():
        cut = [] if data.prefetcher is None else data.prefetcher.held
        for g in cut:
            place = g.chunk.places.get("parameters", "device")
            sizes["parameters"][place] += g.chunk.size * g.chunk.dtype.itemsize
        if data.prefetcher is None:
            sizes["parameters"]["device"] = _storages(m.p for m in data.members)
        for chunk in data.chunks:
            sizes["gradients"][chunk.places.get("gradients", "device")] += _gradients(chunk)
            if chunk.master is not None:
                sizes["masters"][chunk.places.get("states", "device")] += local_bytes(chunk.master)
        for p, state in () if optimizer is None else optimizer.state.items():
            place = chunk_of[id(p)].places.get("states", "device") if id(p) in chunk_of else "device"
            sizes["states"][place] += state_bytes(state)
        gathered = sum(storage.nbytes() for g in cut for storage in g.storages)
        buffers = _storages(module.buffers())
    trained = [m for chunk in data.chunks for m in chunk.members]
    formula = {
        "parameters": sum(_whole(m) / _share(m, stage.parameters) for m in data.members),
        "gradients": sum(
            _whole(m) / _share(m, stage.addends) for c in data.chunks if not c.in_place for m in c.members
        ),
        "states": _states(optimizer, trained, stage.states),
        "masters": sum(
            4 * m.size / _share(m, stage.states)
            for c in data.chunks
            if c.master is not None
            for m in c.members
        ),
    }
    kinds = [StateBytes(name, places, _floor(formula[name])) for name, places in sizes.items()]
    kinds = [k for k in kinds if k.name != "masters" or k.total]
    for name, here in (("gathered", gathered), ("buffers", buffers)):
        if here:
            kinds.append(StateBytes(name, {"device": here}))
    device = data.mesh.device()
    peak = peak_memory(device) if has_peak(device) else None
    shares = None if data.offloaded_step is None else data.offloaded_step.shares
    updates = str(shares) if shares is not None and shares.is_asked else ""
    return Memory(tuple(kinds), plan, str(device), peak, updates)


def _gradients(chunk: Chunk) -> int:
    if chunk.lent:  # where the parameters are that were counted
        return 0
    if chunk.gradient is not None:
        return local_bytes(chunk.gradient)
    grads = (p.__dict__.get("_reduced", _grad(p)) for p in (m.p for m in chunk.members))
    return sum(local_bytes(g) for g in grads if g is not None)


def _share(m: ShardedParam, lies: Lies) -> int:
    """How many ranks share what there is of a parameter."""
    return m.shard_group.n if lies == "S" else 1


def _floor(n: float | None) -> int | None:
    return None if n is None else int(n + 1e-6)


def _states(
    optimizer: torch.optim.Optimizer | None, trained: Sequence[ShardedParam], lies: Lies
) -> float | None:
    """Bytes of the states if each lies as its parameter; None before the first step, or for other states."""
    total = 0.0
    for m in trained:
        states = [x for x in optimizer.state.get(m.p, {}).values() if torch.is_tensor(x)] if optimizer else []
        if any(x.ndim and x.shape != m.p.shape for x in states):
            return None
        total += m.size * sum(x.element_size() for x in states if x.ndim) / _share(m, lies)
    return total or None


def _whole(m: ShardedParam) -> int:
    return m.size * m.dtype.itemsize


def local_bytes(x: torch.Tensor) -> int:
    """Of this rank's part."""
    with raw():
        return x.numel() * x.element_size()


def state_bytes(state: Mapping[str, Any]) -> int:
    """Of this rank's part of what an optimizer keeps for a parameter."""
    return sum(local_bytes(x) for x in state.values() if isinstance(x, torch.Tensor))


def _storages(tensors: Iterable[torch.Tensor]) -> int:
    """Bytes of the memory behind tensors, which may share it."""
    seen = {}
    for x in tensors:
        storage = plain(x.detach()).untyped_storage()
        seen[memory_id(storage)] = storage.nbytes()
    return sum(seen.values())


# ---- order


@dataclass(frozen=True)
class ChunkMove:
    """A chunk that moves along the data axis.

    Attributes:
        what: ``"gather for forward"``, ``"gather for backward"`` or ``"sum gradients"``.
        bytes: of its whole parameters or gradients.
        parameters: their names.
    """

    what: str
    bytes: int
    parameters: tuple[str, ...]


class MoveOrder(tuple[ChunkMove, ...]):
    """The chunks that move in a step: gathers in the order last seen, then the sums in theirs."""

    __slots__ = ()

    def __str__(self) -> str:
        rows = [["", "what", "bytes", "parameters"]]
        for i, moved in enumerate(self, 1):
            names, more = moved.parameters, len(moved.parameters) - 2
            named = ", ".join(names if more < 1 else (names[0], f"... {more} more ...", names[-1]))
            rows.append([str(i), moved.what, f"{moved.bytes:,}", named])
        return "\n".join(in_columns(rows, "<<><")) if self else "Nothing moves along the data axis."


def order(data: ZeroState) -> MoveOrder:
    """What is recorded."""
    moves = []
    if data.prefetcher is not None:
        for use in data.prefetcher.recorded:
            chunk = data.prefetcher.held[use.chunk].chunk
            moves.append(_moved(f"gather for {use.phase}", chunk))
    return MoveOrder([*moves, *(_moved("sum gradients", chunk) for chunk in data.gradients.chunks)])


def _moved(what: str, chunk: Chunk) -> ChunkMove:
    return ChunkMove(what, sum(map(_whole, chunk.members)), tuple(m.name for m in chunk.members))


# ---- traffic


class Traffic:
    """Ledgers of whole steps: of the first two, and of those for which it is asked.

    A ledger costs a step some microseconds for each collective; so later ones have none.
    """

    def __init__(self, mesh: Mesh) -> None:
        self._mesh, self._first, self._asked = mesh, 2, False
        self._open: Ledger | None = None
        self.last: Ledger | None = None

    def begin(self) -> None:
        """A forward pass of training begins."""
        if self._open is None and (self._first or self._asked):
            self._open = Ledger()
            self._mesh.ledgers.append(self._open)

    def end(self, *, done: bool = True) -> None:
        """The step is done, or given up."""
        if self._open is not None:
            self._mesh.ledgers[:] = [book for book in self._mesh.ledgers if book is not self._open]
            if done:
                self.last, self._first = self._open, max(self._first - 1, 0)
            self._open = None

    def asked(self) -> AbstractContextManager[None]:
        """Record each step that begins in here."""
        return having(self, _asked=True)


# ---- the memory of a device while an engine runs


class PeakMemory:
    """The peak of a device's memory while this is open; may be opened again.

    An accelerator's allocator tells it, elsewhere :class:`LiveMemory`.

    Args:
        live: follows what lives where there is no allocator to ask; holds what was there before.
        together: those that ask the same allocator, which knows one peak; this one becomes one of them.
    """

    def __init__(self, device: torch.device, live: LiveMemory, together: WeakSet[PeakMemory]) -> None:
        self._device, self.live, self._by_allocator = device, live, has_peak(device)
        self._together, self._before = together, 0
        together.add(self)
        self.restart()

    def restart(self) -> None:
        """Begin a new peak; for others that follow it the old one goes on."""
        self.live.peak = 0
        if self._by_allocator:
            for one in self._together:
                one._before = one.peak
            restart_peak(self._device)
        self._before = 0

    @property
    def peak(self) -> int:
        """The most bytes since then."""
        return max(self._before, peak_memory(self._device)) if self._by_allocator else self.live.peak

    def fit(self, data: ZeroState, optimizer: torch.optim.Optimizer) -> bool:
        """Place chunks by the memory that a step took; says whether no further step need be looked at.

        Where the allocator knows the peak all are, each by itself: what has fitted may not fit a longer
        batch, and what has not fitted may fit a shorter one.
        """
        settled = data.fit(self.peak, optimizer)
        if self._by_allocator or not settled:
            self.restart()
        return settled and not self._by_allocator

    def __enter__(self) -> None:
        if not self._by_allocator:
            self.live.__enter__()

    def __exit__(self, *error: Any) -> None:
        if not self._by_allocator:
            self.live.__exit__(*error)


def follow_peak(
    module: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    data: ZeroState,
    together: WeakSet[PeakMemory],
) -> PeakMemory:
    """A watch that begins with what an engine holds, one of those of this engine."""
    kind = DryMemory if data.mesh.is_dry else LiveMemory
    peak = PeakMemory(data.mesh.device(), kind(data.resized), together)
    states = optimizer.state.values() if optimizer is not None else ()
    state_tensors = [x for state in states for x in state.values() if isinstance(x, torch.Tensor)]
    for x in (*data.watched(peak.live.ignore, peak.live.count), *module.buffers(), *state_tensors):
        peak.live.hold(x)
    return peak
