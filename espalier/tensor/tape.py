"""Recorded operations, and in which order they are done again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from espalier.trees import tensors_in, tree_map


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
        found = [x for x in (*self.args, *self.kwargs.values()) if isinstance(x, torch.Generator)]
        return found[0] if found else None


class Schedule:
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
    def given(x: Any) -> Any:
        return _real(x, sizes, memory) if isinstance(x, Ref) else x

    with torch.no_grad():
        outs = tensors_in([op.func(*tree_map(given, op.args), **tree_map(given, op.kwargs))])
        for i, at in op.makes:
            out = outs[i]
            storage = out.untyped_storage()
            own = all(storage._cdata != other._cdata for other in memory.values())
            lies = (tuple(out.shape), tuple(out.stride()), out.storage_offset())
            if own and lies == (at.shape, at.stride, at.offset) and storage.nbytes() == sizes[at.storage]:
                memory[at.storage] = storage
            else:
                _real(at, sizes, memory).copy_(out)
