"""The backend of ranks of one host: tensors of the CPU go through memory that they share.

A rank puts what it sends into its segment, once for all who get it, and goes on; who gets it adds it up, or
copies it, from where it lies. Sums are taken in the order of the coordinates, so all ranks get the same bits.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch

from espalier.comm.backend import Summing, Work, as_it_lies, summable
from espalier.comm.gloo import TWO, Gloo, reduced, split
from espalier.comm.shared_memory import PROGRAM, Expected, Host
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh

T = TypeVar("T")

# bytes up to which each of several ranks sums all there is; beyond, each sums its part for all
_WHOLE: Final = 1 << 16
# ranks up to which they do so, whatever there is, beside the program; of more the threads of gloo do it
_FEW: Final = 8
# bytes up to which they are scattered so: who scatters waits for nobody, and a model's would pile up
_SCATTERED: Final = 1 << 20
# what a message is; a program's own messages have the tags from the last on
_GATHER, _SCATTER, _ALL_TO_ALL, _REDUCE, _REDUCED, _SHARE, _SUM, _BROADCAST, _PASS, _OWN = range(10)


class Shared(Gloo):
    """Tensors of the CPU, along an axis whose ranks share a host's memory.

    Args:
        ranks: those of the world, by coordinate; ``here`` is this one's.
        group: the name of their process group.
        limit: seconds that one waits for another.
    """

    def __init__(self, host: Host, ranks: Sequence[int], here: int, group: str, limit: float):
        super().__init__()
        host.open(ranks)
        self._host, self._ranks, self._here, self._limit = host, list(ranks), here, limit
        self._others = [i for i in range(len(ranks)) if i != here]
        self._channel = zlib.crc32(group.encode())

    def post(self, x: torch.Tensor, to: Sequence[int], tag: int, lane: int = PROGRAM) -> None:
        """Send contiguous ``x`` to some coordinates, for the thread that reads a lane."""
        if x.numel():
            self._host.send(x, [self._ranks[i] for i in to], self._channel, tag, lane)

    def expect(self, source: int, tag: int, nbytes: int, lane: int = PROGRAM) -> Expected | None:
        """What a coordinate sends so; None where there is nothing to come."""
        return Expected(self._host, self._ranks[source], self._channel, tag, nbytes, lane) if nbytes else None

    def _from_all(self, own: torch.Tensor, tag: int, shapes: Sequence[Sequence[int]]) -> _Rows:
        """What is to come from each, of a dtype; at this coordinate ``own``."""
        size = own.element_size()
        expected = [
            None if i == self._here else self.expect(i, tag, math.prod(shape) * size)
            for i, shape in enumerate(shapes)
        ]
        return _Rows(expected, shapes, self._here, own, self._limit)

    # ---- collectives

    def all_reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, op: str, *, beside: bool) -> Work[Any]:
        work = self._all_reduce(x, op, beside)
        return super().all_reduce(x, mesh, axis, op, beside=beside) if work is None else work

    def sum_whole(self, x: torch.Tensor, mesh: Mesh, axis: int, *, beside: bool) -> Work[Any]:
        work = self._all_reduce(x, "sum", beside)
        return super().sum_whole(x, mesh, axis, beside=beside) if work is None else work

    def _all_reduce(self, x: torch.Tensor, op: str, beside: bool) -> Work[Any] | None:
        x, op = summable(x, op)
        n, here = len(self._ranks), self._here
        if op not in TWO or not x.numel():
            return None
        if n == 2:
            self.post(x, self._others, _REDUCE)
            expected, do = self.expect(1 - here, _REDUCE, x.nbytes), TWO[op]
            assert expected is not None

            def rest() -> None:
                taken = expected.wait(self._limit)
                do(x, taken.view(x.shape, x.dtype), out=x)
                taken.give_back()

            return Work(rest=rest)
        # beside the program nobody is there to hand on sums of parts
        if x.nbytes <= _WHOLE or (beside and n <= _FEW):
            self.post(x, self._others, _REDUCE)
            rows = self._from_all(x, _REDUCE, [x.shape] * n)
            return Work(rest=lambda: rows.use(lambda received: x.copy_(reduced(received, op))))
        if beside:
            return None
        parts = split(x.view(-1), n)
        for i in self._others:
            self.post(parts[i], [i], _REDUCE)
        own = parts[here]
        rows = self._from_all(own, _REDUCE, [own.shape] * n)
        sums = [None if i == here else self.expect(i, _REDUCED, parts[i].nbytes) for i in range(n)]

        def hand_on() -> None:
            if own.numel():
                rows.use(lambda received: own.copy_(reduced(received, op)))
                self.post(own, self._others, _REDUCED)
            self._fill(parts, sums)

        return Work(rest=hand_on)

    def _fill(self, parts: Sequence[torch.Tensor], expected: Sequence[Expected | None]) -> None:
        for part, each in zip(parts, expected, strict=True):
            if each is not None:
                each.wait(self._limit).copy_to(part)

    def all_gather(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int, *, beside: bool
    ) -> Work[torch.Tensor]:
        n, here = len(self._ranks), self._here
        x = as_it_lies(x)
        self.post(x, self._others, _GATHER)
        shapes = [[*x.shape[:dim], chunk_bounds(size, n, i)[1], *x.shape[dim + 1 :]] for i in range(n)]
        rows = self._from_all(x, _GATHER, shapes)
        if math.prod(x.shape[:dim]) != 1:
            return Work(rest=lambda: rows.use(lambda received: torch.cat(received, dim)))
        # one piece lies behind the other
        out = x.new_empty([*x.shape[:dim], size, *x.shape[dim + 1 :]])
        parts = torch.split(out, [shape[dim] for shape in shapes], dim)
        parts[here].copy_(x)

        def together() -> torch.Tensor:
            self._fill(parts, rows.expected)
            return out

        return Work(rest=together)

    def reduce_scatter(self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
        n, here, x = len(self._ranks), self._here, x.resolve_conj().resolve_neg()
        pieces = [x.narrow(dim, *chunk_bounds(x.shape[dim], n, i)) for i in range(n)]
        for i in self._others:
            self.post(as_it_lies(pieces[i]), [i], _SCATTER)
        rows = self._from_all(pieces[here], _SCATTER, [pieces[here].shape] * n)
        return rows.use(lambda received: reduced(received, "max" if x.dtype is torch.bool else "sum"))

    def all_to_all(
        self, pieces: Sequence[torch.Tensor], shapes: Sequence[Sequence[int]], dim: int, mesh: Mesh, axis: int
    ) -> torch.Tensor:
        gives = [as_it_lies(p) for p in pieces]
        for i in self._others:
            self.post(gives[i], [i], _ALL_TO_ALL)
        return self._from_all(gives[self._here], _ALL_TO_ALL, shapes).use(
            lambda received: torch.cat(received, dim)
        )

    def exchange(
        self, flat: torch.Tensor, mesh: Mesh, axis: int, gets: list[int], gives: list[int]
    ) -> torch.Tensor:
        flat = flat.resolve_conj().resolve_neg()
        sent = torch.split(flat, gives)
        for i in self._others:
            self.post(sent[i], [i], _ALL_TO_ALL)
        out = flat.new_empty(sum(gets))
        parts = torch.split(out, gets)
        parts[self._here].copy_(sent[self._here])
        self._fill(parts, self._from_all(flat, _ALL_TO_ALL, [(n,) for n in gets]).expected)
        return out

    def broadcast(self, x: torch.Tensor, mesh: Mesh, axis: int, source: int) -> Work[Any]:
        if self._here == source:
            self.post(x, self._others, _BROADCAST)
            return Work()
        expected = [self.expect(source, _BROADCAST, x.nbytes)]
        return Work(rest=lambda: self._fill([x], expected))

    def scatter(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, shape: Sequence[int], source: int
    ) -> torch.Tensor:
        n, here, size = len(self._ranks), self._here, shape[dim]
        if math.prod(shape) * x.element_size() > _SCATTERED:
            return super().scatter(x, mesh, axis, dim, shape, source)
        at, length = chunk_bounds(size, n, here)
        if here != source:
            out = x.new_empty([*shape[:dim], length, *shape[dim + 1 :]])
            self._fill([out], [self.expect(source, _SCATTER, out.nbytes)])
            return out
        for i in self._others:
            self.post(as_it_lies(x.narrow(dim, *chunk_bounds(size, n, i))), [i], _SCATTER)
        return x.narrow(dim, at, length).clone(memory_format=torch.contiguous_format)

    def pass_on(self, x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int) -> Work[torch.Tensor]:
        n, out = len(self._ranks), x.new_empty(gets)
        self.post(as_it_lies(x), [(self._here + step) % n], _PASS)
        expected = [self.expect((self._here - step) % n, _PASS, out.nbytes)]

        def rest() -> torch.Tensor:
            self._fill([out], expected)
            return out

        return Work(rest=rest)

    def send(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, to: int, tag: int) -> Work[Any]:
        for x in xs:
            self.post(x, [to], _OWN + tag)
        return Work()

    def receive(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, source: int, tag: int) -> Work[Any]:
        expected = [self.expect(source, _OWN + tag, x.nbytes) for x in xs]
        return Work(rest=lambda: self._fill(xs, expected))

    def share(self, own: torch.Tensor, wires: Sequence[torch.Tensor], mesh: Mesh, axis: int) -> Work[Any]:
        self.post(own, self._others, _SHARE)
        expected = [
            None if i == self._here else self.expect(i, _SHARE, wire.nbytes) for i, wire in enumerate(wires)
        ]
        return Work(rest=lambda: self._fill(wires, expected))

    def sum_rows(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
        for i in self._others:
            self.post(rows[i], [i], _SUM)
        own = rows[self._here]
        return _Sum(self._from_all(own, _SUM, [own.shape] * len(rows)), rows)


class _Rows:
    """What comes from each coordinate of an axis.

    Attributes:
        expected: None at this rank's coordinate, and where there is nothing to come.
    """

    def __init__(
        self,
        expected: Sequence[Expected | None],
        shapes: Sequence[Sequence[int]],
        here: int,
        own: torch.Tensor,
        limit: float,
    ) -> None:
        self.expected = expected
        self._shapes, self._here, self._own, self._limit = shapes, here, own, limit

    def use(self, do: Callable[[list[torch.Tensor]], T]) -> T:
        """What becomes of it in its place, where it is not after this."""
        own, taken = self._own, [None if e is None else e.wait(self._limit) for e in self.expected]
        rows = [
            own if i == self._here else own.new_empty(shape) if t is None else t.view(shape, own.dtype)
            for i, (t, shape) in enumerate(zip(taken, self._shapes, strict=True))
        ]
        result = do(rows)
        for t in taken:
            if t is not None:
                t.give_back()
        return result


class _Sum(Summing):
    """A sum of rows that are read where they lie."""

    def __init__(self, rows: _Rows, sent: torch.Tensor) -> None:
        super().__init__((), Work(), sent, torch.empty_like(sent[0]) if len(sent) == 2 else None)
        self._from = rows

    def wait(self, out: torch.Tensor, *, add: bool = False) -> None:
        self._from.use(lambda received: self._add_up(received, out, add))
        self._sent = None
