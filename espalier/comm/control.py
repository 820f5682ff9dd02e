"""Control messages: what every rank has to say, agreement on failure, and talk beside the traffic."""

from __future__ import annotations

import builtins
import contextlib
import json
import pickle
import re
import time
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from espalier.comm import collectives
from espalier.comm.custom_ops import symbolic
from espalier.device import backend_of, is_accelerator
from espalier.mesh import Mesh
from espalier.torch_private import default_store

# how torch refuses values; checkpointing ends its recomputation by an exception of another kind
REFUSALS = (RuntimeError, ValueError, IndexError)

_ROOM = 2048  # bytes of an error's words
_NOTE = "\x1f"  # between an error's words and its notes
_MET_BY = "Met by rank"


def looks(mesh: Mesh) -> bool:
    """Whether values are looked at: on a CPU, as by torch itself; a look at others waits for the device."""
    return mesh.device_type == "cpu" and not mesh.is_dry and not symbolic()


def agree(error: Exception | None, mesh: Mesh, axes: Iterable[int]) -> None:
    """Raise on all ranks along the axes, which all call this, what the first that failed met.

    One all-reduce of a byte along each axis, where nobody failed.

    Raises:
        Exception: this rank's own error, or one of the type and words of another's.
    """
    axes = tuple(axes)
    device = speaks_on(mesh)
    failed = torch.zeros(1, dtype=torch.uint8, device=device)
    if error is not None:
        failed.fill_(1)
    for axis in axes:
        collectives.all_reduce_(failed, mesh, axis, "max").wait()
    if not failed.item():
        return
    text = b""
    if error is not None:
        said = _NOTE.join([f"{type(error).__name__} {error}", *getattr(error, "__notes__", ())])
        text = f"{mesh.world_rank} {said}".encode()[:_ROOM]
    words = torch.zeros(1, _ROOM, dtype=torch.uint8, device="cpu")
    words[0, : len(text)] = torch.tensor(list(text), dtype=torch.uint8)
    words = words.to(device)
    for axis in axes:
        rows = collectives.all_gather(words, mesh, axis, 0, mesh.shape[axis])
        words = rows[rows[:, 0].nonzero()[:1, 0]] if rows[:, 0].any() else words
    message = bytes(words[0].tolist()).rstrip(b"\0").decode(errors="replace")
    rank, name, said = message.split(" ", 2)
    if int(rank) == mesh.world_rank and error is not None:
        raise error
    said, *notes = said.split(_NOTE)
    met = _made(name, said)
    for note in (*notes, f"{_MET_BY} {rank}."):
        met.add_note(note)
    raise met from error


def met_by(said: str) -> int | None:
    """Whose error it is that :func:`agree` has raised, in its words and notes; None: this rank's own."""
    found = re.search(rf"\n{_MET_BY} (\d+)\.$", said)
    return None if found is None else int(found[1])


def speaks_on(mesh: Mesh) -> torch.device:
    """Where words lie that ranks exchange: on the host, which reads them, if its tensors travel too."""
    if not is_accelerator(mesh.device_type):
        return torch.device("cpu")
    travels = not mesh.is_dry and (mesh.size() == 1 or backend_of("cpu") is not None)
    return torch.device("cpu") if travels else mesh.device()


def any_says(flag: bool, mesh: Mesh) -> bool:
    """Whether any rank of a mesh says yes."""
    return any(said for (said,) in numbers_of_all([int(flag)], mesh))


def _made(name: str, said: str) -> Exception:
    """An error of that type, if there is one that needs words alone."""
    kinds: list[Any] = [getattr(builtins, name, None)]
    known = [*REFUSALS]
    while known:
        kind = known.pop()
        kinds += [kind] if kind.__name__ == name else []
        known += kind.__subclasses__()
    for kind in kinds:
        with contextlib.suppress(TypeError):
            return kind(said)  # type: ignore[no-any-return]
    return RuntimeError(said)


# ---- small messages: what every rank of a mesh has to say, on every rank


def numbers_of_all(numbers: list[int], mesh: Mesh) -> list[list[int]]:
    """The numbers that each rank gives, equally many, in the order of ranks' coordinates.

    One all-gather along each axis.
    """
    own = torch.tensor([numbers], dtype=torch.int64, device=speaks_on(mesh))
    by_rank: list[list[int]] = _rows_of_all(own, mesh).tolist()
    return by_rank


def _rows_of_all(rows: torch.Tensor, mesh: Mesh) -> torch.Tensor:
    for axis in reversed(range(mesh.ndim)):
        rows = collectives.all_gather(rows, mesh, axis, 0, rows.shape[0] * mesh.shape[axis])
    return rows


def gather_objects(thing: Any, mesh: Mesh) -> list[Any]:
    """What each rank says (anything that can be pickled), in the order of ranks' coordinates."""
    said = pickle.dumps(thing)
    sizes = [size for (size,) in numbers_of_all([len(said)], mesh)]
    return [pickle.loads(of) for of in bytes_of_all(said, sizes, mesh)]


def bytes_of_all(said: bytes, sizes: Sequence[int], mesh: Mesh) -> list[bytes]:
    """What each rank says, where all know how long each has it, in the order of ranks' coordinates."""
    rows = torch.zeros(1, max(sizes), dtype=torch.uint8, device=speaks_on(mesh))
    if said:
        rows[0, : len(said)] = torch.frombuffer(bytearray(said), dtype=torch.uint8)
    said_by = _rows_of_all(rows, mesh).cpu().numpy()
    return [row[:size].tobytes() for row, size in zip(said_by, sizes, strict=True)]


# ---- talk beside the traffic: short messages among all ranks of a mesh, with a time limit
#
# For tools that watch a program. The talk has a gloo group of its own on the CPU, whatever carries the
# tensors, so it mixes with no other traffic, stands in no ledger, and a rank that does not come is an error
# after the limit instead of a wait for ever. What a rank does last it leaves as a note in the store that
# all ranks share.


_SHORT = 2048  # bytes of a message that goes in one exchange


class Absent(RuntimeError):
    """Not all ranks came within the limit.

    Attributes:
        seen: for each rank of the mesh (number of the last exchange it came to, what it said it does).
        number: the exchange that this rank waited in.
    """

    def __init__(self, seen: list[tuple[int, str]], number: int, cause: str) -> None:
        super().__init__(cause)
        self.seen, self.number = seen, number

    def __reduce__(self) -> Any:
        return type(self), (self.seen, self.number, *self.args)


class OutOfBand:
    """The talk of one mesh; made by all its ranks at one place of the program.

    Args:
        limit: seconds that a rank waits for the others.
        doing: what this rank does, for its note.
    """

    def __init__(self, mesh: Mesh, limit: float, doing: str) -> None:
        self._rank, self._size, self._count = mesh.rank, mesh.size(), 0
        self._limit = timedelta(seconds=limit)
        base = dist.PrefixStore("espalier.side/" + "-".join(map(str, mesh.ranks)), default_store())
        # each rank counts its own talks; where all are in step the numbers agree
        number = base.add(f"talks/{self._rank}", 1)
        self._store = dist.PrefixStore(str(number), base)
        self._group: Any = None
        self.note(doing)

    def exchange(self, message: bytes, doing: str) -> list[bytes]:
        """What each rank says, in the order of the mesh's ranks.

        Raises:
            Absent: not all came.
        """
        self._count += 1
        self.note(doing)
        began = time.monotonic()
        try:
            if self._group is None:
                self._group = dist.ProcessGroupGloo(self._store, self._rank, self._size, self._limit)
            return self._gathered(message)
        except (RuntimeError, dist.DistStoreError) as error:
            # one that went away breaks the talk at once, when others are still on their way
            while (notes := self._notes()) and time.monotonic() < began + self._limit.total_seconds():
                if all(left or count >= self._count for count, _, left in notes):
                    break
                time.sleep(0.05)
            raise Absent([note[:2] for note in notes], self._count, str(error)) from None

    def note(self, doing: str, left: bool = False) -> None:
        """Leave word of what this rank does, and whether it will not come again."""
        self._store.set(f"note/{self._rank}", json.dumps([self._count, doing, left]))

    def _gathered(self, message: bytes) -> list[bytes]:
        head = len(message).to_bytes(8, "little")
        first = self._all_gather((head + message[:_SHORT]).ljust(8 + _SHORT, b"\0"))
        lengths = [int.from_bytes(m[:8], "little") for m in first]
        longest = max(lengths)
        messages = [m[8:] for m in first]
        if longest > _SHORT:
            messages = self._all_gather(message.ljust(longest, b"\0"))
        return [m[:n] for m, n in zip(messages, lengths, strict=True)]

    def _all_gather(self, message: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self._size)]
        self._group.allgather([theirs], [mine]).wait()
        return [bytes(x.numpy()) for x in theirs]

    def _notes(self) -> list[tuple[int, str, bool]]:
        notes = []
        for rank in range(self._size):
            key = f"note/{rank}"
            known = self._store.check([key])
            note = json.loads(self._store.get(key)) if known else (0, "nothing that it told of", False)
            notes.append((int(note[0]), str(note[1]), bool(note[2])))
        return notes


def told_by_first(mesh: Mesh, axes: Sequence[int], message: str, about: str) -> str:
    """What the first rank along the axes says; all ranks along them call this, each with its message."""
    if mesh.is_dry or all(mesh.shape[a] == 1 for a in axes):
        return message
    store, number = _talk(mesh, about)
    others = [c for a, c in enumerate(mesh.coordinate) if a not in axes]
    key = f"{others}/{list(axes)}/{number}"
    if all(mesh.coordinate[a] == 0 for a in axes):
        store.set(key, message)
    return bytes(store.get(key)).decode()


def said_by_some(mesh: Mesh, n: int, message: bytes, about: str) -> list[bytes]:
    """What the first n ranks of a mesh say, in their order; all its ranks call this, each with its message.

    It stands in no ledger.
    """
    store, number = _talk(mesh, about)
    if mesh.rank < n:
        store.set(f"{number}/{mesh.rank}", message)  # type: ignore[arg-type]  # bytes do too
    return [bytes(store.get(f"{number}/{place}")) for place in range(n)]


class Board:
    """What some have to say, for whoever wants to know later: of each the last before a turn.

    All ranks of a mesh make it, and count turns alike. Nobody waits, and it stands in no ledger.
    """

    def __init__(self, mesh: Mesh, about: str) -> None:
        store, number = _talk(mesh, about)
        self._store = dist.PrefixStore(str(number), store)
        self._turn, self._count = 0, 0
        self._known: dict[int, tuple[int, bytes]] = {}

    def say(self, by: int, message: bytes) -> None:
        """Say something from the next turn on; one rank speaks for each ``by``."""
        # two places by turns: who reads is at this turn or the one before
        self._count += 1
        head = f"{self._turn + 1} {self._count} ".encode()
        self._store.set(f"{by}/{self._count % 2}", head + message)  # type: ignore[arg-type]  # bytes do too

    def turn(self) -> None:
        """From now on what was said before it counts."""
        self._turn += 1

    def said(self, by: int) -> bytes:
        """What counts now; nothing where nothing was said."""
        turn, message = self._known.get(by, (-1, b""))
        if turn != self._turn:
            places = [key for i in range(2) if self._store.check([key := f"{by}/{i}"])]
            told = [bytes(self._store.get(key)).split(b" ", 2) for key in places]
            counting = [(int(at), int(count), words) for at, count, words in told if int(at) <= self._turn]
            message = max(counting, default=(0, 0, b""))[2]
            self._known[by] = self._turn, message
        return message


class Ballot:
    """Whether all ranks of a mesh come to one thing: who does not knows nothing of it, and nobody else waits.

    All ranks of the mesh make it. It stands in no ledger.
    """

    def __init__(self, mesh: Mesh, about: str) -> None:
        store, number = _talk(mesh, about)
        self._store, self._ranks = dist.PrefixStore(str(number), store), mesh.size()

    def all_come(self, to: str, within: timedelta) -> bool:
        """Whether all have come in time; those that have come hear the same."""
        place = f"{to}/all"
        if self._store.add(f"{to}/ranks", 1) == self._ranks:
            self._store.compare_set(place, "", "yes")
        else:
            try:
                self._store.wait([place], within)
            except RuntimeError:  # it is too late
                self._store.compare_set(place, "", "no")
        return bytes(self._store.get(place)) == b"yes"


class Answers:
    """What ranks leave for others, which wait for it; who goes on is known to have left all that it will.

    All ranks of a mesh make it, and go on alike. It stands in no ledger.
    """

    def __init__(self, mesh: Mesh, about: str) -> None:
        self._rank, self._turn = mesh.world_rank, 0
        store, number = _talk(mesh, about)
        self._store = dist.PrefixStore(str(number), store)
        self._left: list[list[str]] = [[]]  # the places of the last turns

    def tell(self, key: str, message: bytes) -> None:
        """Leave an answer, until three turns later."""
        self._store.set(place := f"{self._rank}/{self._turn}/{key}", message)  # type: ignore[arg-type]
        self._left[-1].append(place)

    def ask(self, key: str, of: int) -> bytes | None:
        """What that rank of the world leaves in this turn; None if it goes on without, or never comes."""
        place, pause = f"{of}/{self._turn}/{key}", 1e-4
        limit: timedelta = self._store.timeout  # type: ignore[attr-defined]  # torch's stubs leave it out
        ends = time.monotonic() + limit.total_seconds()
        while not self._store.check([place]):
            has_left = self._store.check([at := f"{of}/turn"]) and int(self._store.get(at)) > self._turn
            if has_left or time.monotonic() > ends:
                return bytes(self._store.get(place)) if self._store.check([place]) else None
            time.sleep(pause)
            pause = min(2 * pause, 0.02)
        return bytes(self._store.get(place))

    def go_on(self, tells: bool) -> None:
        """The next turn begins. No rank may still be two turns behind when it ends.

        Args:
            tells: whether to tell those who wait for an answer.
        """
        self._turn += 1
        if tells:
            self._store.set(f"{self._rank}/turn", str(self._turn))
        self._left.append([])
        if len(self._left) > 3:
            for place in self._left.pop(0):
                self._store.delete_key(place)


def _talk(mesh: Mesh, about: str) -> tuple[dist.Store, int]:
    """Where all ranks of a mesh say what a thing is about, and how often this one has come there."""
    store = dist.PrefixStore(f"espalier.{about}/" + "-".join(map(str, mesh.ranks)), default_store())
    # each rank counts for itself; where all are in step the numbers agree
    return store, store.add(f"count/{mesh.rank}", 1)


def compared_with_first(mesh: Mesh, head: bytes, body: bytes, about: str) -> tuple[bytes, bool]:
    """What the mesh's first rank says, head and body, and whether all ranks' bodies are the same.

    All ranks call this; each waits for all.

    Raises:
        RuntimeError: not all came within the time limit of the world's store.
    """
    store, number = _talk(mesh, about)
    try:
        if mesh.rank == 0:
            store.set(f"{number}/first", head + body)  # type: ignore[arg-type]  # bytes do too
        first = bytes(store.get(f"{number}/first"))
        unlike = 1 << 32
        count = store.add(f"{number}/came", 1 if first[len(head) :] == body else 1 + unlike)
        if count % unlike == mesh.size():
            store.set(f"{number}/all", "same" if count < unlike else "differ")
            for key in ("first", "came", "all"):  # of the one before, which all have left
                store.delete_key(f"{number - 1}/{key}")
        return first, bytes(store.get(f"{number}/all")) == b"same"
    except dist.DistStoreError as error:
        late = [mesh.ranks[i] for i in range(mesh.size()) if store.add(f"count/{i}", 0) < number]
        raise RuntimeError(
            f"Rank {mesh.world_rank} has waited for {named(late)} to agree on what is {about}. {error}"
        ) from None


def named(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
