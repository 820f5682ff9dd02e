"""Talk beside the traffic: short messages among all ranks of a mesh, with a time limit.

For tools that watch a program. The talk has a gloo group of its own on the CPU, whatever carries the
tensors, so it mixes with no other traffic, stands in no ledger, and a rank that does not come is an
error after the limit instead of a wait for ever. What a rank does last it leaves as a note in the
store that all ranks share.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from espalier.mesh import Mesh

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


class Side:
    """The talk of one mesh; made by all its ranks at one place of the program.

    Args:
        limit: seconds that a rank waits for the others.
        doing: what this rank does, for its note.
    """

    def __init__(self, mesh: Mesh, limit: float, doing: str) -> None:
        self._rank, self._size, self._count = mesh.rank, mesh.size(), 0
        self._limit = timedelta(seconds=limit)
        base = dist.PrefixStore("espalier.side/" + "-".join(map(str, mesh.ranks)), _default_store())
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
        told = [m[8:] for m in first]
        if longest > _SHORT:
            told = self._all_gather(message.ljust(longest, b"\0"))
        return [m[:n] for m, n in zip(told, lengths, strict=True)]

    def _all_gather(self, message: bytes) -> list[bytes]:
        mine = torch.frombuffer(bytearray(message), dtype=torch.uint8)
        theirs = [torch.empty_like(mine) for _ in range(self._size)]
        self._group.allgather([theirs], [mine]).wait()
        return [bytes(x.numpy()) for x in theirs]

    def _notes(self) -> list[tuple[int, str, bool]]:
        found = []
        for rank in range(self._size):
            key = f"note/{rank}"
            known = self._store.check([key])
            told = json.loads(self._store.get(key)) if known else (0, "nothing that it told of", False)
            found.append((int(told[0]), str(told[1]), bool(told[2])))
        return found


def told_by_first(mesh: Mesh, axes: Sequence[int], message: str, about: str) -> str:
    """What the first rank along the axes says; all ranks along them call this, each with its message."""
    if mesh.is_dry or all(mesh.shape[a] == 1 for a in axes):
        return message
    store = dist.PrefixStore(f"espalier.{about}/" + "-".join(map(str, mesh.ranks)), _default_store())
    # each rank counts what it was told; where all are in step the numbers agree
    number = store.add(f"count/{mesh.rank}", 1)
    others = [c for a, c in enumerate(mesh.coordinate) if a not in axes]
    key = f"{others}/{list(axes)}/{number}"
    if all(mesh.coordinate[a] == 0 for a in axes):
        store.set(key, message)
    return bytes(store.get(key)).decode()


def compared_with_first(mesh: Mesh, head: bytes, body: bytes, about: str) -> tuple[bytes, bool]:
    """What the mesh's first rank says, head and body, and whether all ranks' bodies are the same.

    All ranks call this; each waits for all.

    Raises:
        RuntimeError: not all came within the time limit of the world's store.
    """
    store = dist.PrefixStore(f"espalier.{about}/" + "-".join(map(str, mesh.ranks)), _default_store())
    # each rank counts its comparisons; where all are in step the numbers agree
    number = store.add(f"count/{mesh.rank}", 1)
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


def _default_store() -> Any:
    # torch has no public name for it
    return dist.distributed_c10d._get_default_store()


def named(ranks: Sequence[int]) -> str:
    """Ranks in words."""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks))}"
