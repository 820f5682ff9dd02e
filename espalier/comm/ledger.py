"""The ledger: what crossed which axis."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NamedTuple, Protocol, runtime_checkable

import torch

from espalier.mesh import Mesh
from espalier.mesh.mesh import MeshLike, as_mesh
from espalier.texts import in_columns


class Collective(NamedTuple):
    """A collective that is about to start.

    Attributes:
        sent: bytes that this rank sends (ring algorithms).
        dtype: of what is sent, where that is one tensor.
        whole: a shape that all ranks of the axis must agree on, however uneven their parts; None for an
            exchange that only those ranks of the mesh make that have something for each other.
        goal: for what crosses to another mesh, that one; ``axis`` is -1, and the ranks of both take part.
            Where ``axis`` is -1 without a goal, all ranks of the mesh do.
        beyond: bytes that this rank sends to other hosts for it (on the CPU): fewer than ``sent`` where
            messages stay on the host, or another of its ranks sends them; more where it sends theirs.
    """

    mesh: Mesh
    op: str
    axis: int
    sent: int
    dtype: torch.dtype | None
    whole: tuple[int, ...] | None
    goal: Mesh | None = None
    beyond: int = 0

    @property
    def where(self) -> str:
        """The axis' name; several, joined, for all ranks of a mesh (``"data,tensor"``) or what crosses
        (``"data,tensor->stage"``)."""
        if self.goal is None and self.axis >= 0:
            return self.mesh.names[self.axis]
        if self.goal is None:
            return ",".join(name for name, n in zip(self.mesh.names, self.mesh.shape, strict=True) if n > 1)
        return f"{','.join(self.mesh.names)}->{','.join(self.goal.names)}"


class Observer(Protocol):
    """What may hang on a mesh to see its traffic."""

    def saw(self, event: Collective) -> None:
        """A collective is about to start; an error raised here keeps it from starting."""


@runtime_checkable
class Waiting(Protocol):
    """An observer that is told of a dry mesh when the program waits for what is passed on, too."""

    def waits(self, axis: str) -> None:
        """For the oldest message along the axis that has begun and was not waited for."""


class Entry(NamedTuple):
    """One collective: its name, the mesh axis, and the bytes this rank sent (ring algorithms).

    What goes among all ranks of a mesh has the axis ``"data,tensor"``. What crosses to another mesh stands
    in the ledgers of both, its axis as ``"data,tensor->stage"``.
    """

    op: str
    axis: str
    bytes: int


class Ledger:
    """The collectives of a stretch of program, in order.

    Two ledgers are equal if they hold the same entries in the same order; a real step's ledger
    equals that of its dry run.

    Attributes:
        entries: the collectives.
        beyond_host: bytes that this rank sent to other hosts, by the axes' names (on the CPU; a dry run knows
            no hosts).
    """

    def __init__(self) -> None:
        self.entries: list[Entry] = []
        self.beyond_host: Counter[str] = Counter()

    def saw(self, event: Collective) -> None:
        """Enter a collective."""
        self.entries.append(Entry(event.op, event.where, event.sent))
        if event.beyond:
            self.beyond_host[event.where] += event.beyond

    def by_axis(self) -> dict[str, int]:
        """Bytes that this rank sent along each axis, by the axes' names in order."""
        total: Counter[str] = Counter()
        for entry in self.entries:
            total[entry.axis] += entry.bytes
        return dict(sorted(total.items()))

    def by_op(self) -> dict[tuple[str, str], tuple[int, int]]:
        """(axis, op) to (number of calls, bytes sent)."""
        total: dict[tuple[str, str], tuple[int, int]] = {}
        for op, axis, sent in self.entries:
            calls, so_far = total.get((axis, op), (0, 0))
            total[axis, op] = (calls + 1, so_far + sent)
        return total

    def clear(self) -> None:
        """Forget all entries."""
        self.entries.clear()
        self.beyond_host.clear()

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Ledger) and self.entries == other.entries

    __hash__ = None  # type: ignore[assignment]

    def __str__(self) -> str:
        rows = [("axis", "op", "calls", "bytes sent")]
        rows += [(axis, op, str(n), f"{sent:,}") for (axis, op), (n, sent) in sorted(self.by_op().items())]
        lines = in_columns(rows, "<<>>")
        lines += [f"to other hosts along {axis}: {n:,} bytes" for axis, n in sorted(self.beyond_host.items())]
        return "\n".join(lines)

    def __repr__(self) -> str:
        return f"Ledger({len(self.entries)} entries, {sum(e.bytes for e in self.entries):,} bytes)"


@contextmanager
def ledger(mesh: MeshLike) -> Iterator[Ledger]:
    """Record all traffic on ``mesh`` while the context is open.

    >>> with espalier.ledger(engine.mesh) as led:      # doctest: +SKIP
    ...     engine.train_step(batch)
    >>> led.by_axis()                                  # doctest: +SKIP
    {'data': 1234, 'tensor': 5678}
    """
    on: Mesh = as_mesh(mesh)
    book = Ledger()
    on.ledgers.append(book)
    try:
        yield book
    finally:
        # by identity: ledgers of equal content are equal
        on.ledgers[:] = [other for other in on.ledgers if other is not book]


@contextmanager
def observed(observer: Observer) -> Iterator[None]:
    """Show ``observer`` all traffic while the context is open, on meshes still to be made too."""
    Mesh.everywhere = (*Mesh.everywhere, observer)
    for mesh in list(Mesh.known):
        if all(other is not observer for other in mesh.ledgers):  # a mesh and its parts share theirs
            mesh.ledgers.append(observer)
    try:
        yield
    finally:
        Mesh.everywhere = tuple(other for other in Mesh.everywhere if other is not observer)
        for mesh in list(Mesh.known):
            mesh.ledgers[:] = [other for other in mesh.ledgers if other is not observer]
