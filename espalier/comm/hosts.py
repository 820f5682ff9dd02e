"""The backend of ranks on several hosts, several on one: memory among a host's ranks, gloo between hosts.

One rank of a host, the *first*, speaks for it: the others hand it what they have, it puts that together or
adds it up, sends the other hosts' firsts what is for them, and hands on what it gets. So each byte crosses
the network once for all ranks of a host. The first's courier does it, beside the program, whatever each rank
does next. Sums are taken over the ranks of each host, and then over the hosts, in the order of coordinates.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, Final, TypeVar

import torch

from espalier.comm.backend import Summing, Work, as_it_lies, summable
from espalier.comm.gloo import TWO, Gloo, exchange_among, reduced, split
from espalier.comm.shared import Shared
from espalier.comm.shared_memory import COURIER, Expected, Host
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.torch_private import backend_for

T = TypeVar("T")

# what a message is: for the first, from the first (a program's own have other tags)
_UP: Final = 1 << 20
_DOWN: Final = _UP + 1
_BY_FIRST: Final = ("all_reduce", "all_gather", "reduce_scatter")


class Hosts(Gloo):
    """Tensors of the CPU, along an axis over several hosts.

    Args:
        ranks, here, group, limit: as of :class:`Shared`.
        homes: the coordinates on each host.
        places: the ranks' numbers in the process group, by coordinate.
    """

    def __init__(
        self,
        host: Host,
        ranks: Sequence[int],
        here: int,
        group: str,
        limit: float,
        homes: Sequence[Sequence[int]],
        places: Sequence[int],
    ) -> None:
        super().__init__(host.elsewhere(ranks), len(ranks))
        self._host, self._homes, self._here, self._limit = host, homes, here, limit
        self._at = next(i for i, home in enumerate(homes) if here in home)
        self._home = list(homes[self._at])
        self._firsts = [places[home[0]] for home in homes]
        self._is_first = here == self._home[0]
        self.of_home = Shared(host, [ranks[i] for i in self._home], self._home.index(here), group, limit)

    # ---- by way of the first

    def _by_first(
        self,
        own: torch.Tensor,
        sizes: Sequence[int],
        together: Callable[[list[torch.Tensor]], Sequence[torch.Tensor]],
        result: int,
    ) -> _Handed:
        """Start to hand flat ``own`` to the first, and to get from it what it makes of the host's.

        Args:
            sizes: elements of what each rank of the host hands it.
            together: makes of these one tensor for all ranks of the host, or one for each.
            result: elements of this rank's.
        """
        home, size = self.of_home, own.element_size()
        if not self._is_first:
            home.post(own, [0], _UP, COURIER)
            return _Handed(home.expect(0, _DOWN, result * size), own, result, self._limit)
        coming = [home.expect(i, _UP, n * size, COURIER) if i else None for i, n in enumerate(sizes)]

        def hand_on() -> torch.Tensor:
            taken = [None if e is None else e.wait(self._limit) for e in coming]
            rows = [
                own if i == 0 else own.new_empty(0) if t is None else t.view((sizes[i],), own.dtype)
                for i, t in enumerate(taken)
            ]
            results = together(rows)
            others = range(1, len(rows))
            if len(results) == 1:
                home.post(results[0], others, _DOWN)
            else:
                for i in others:
                    home.post(results[i], [i], _DOWN)
            for t in taken:
                if t is not None:
                    t.give_back()
            return results[0]

        return _Handed(self._host.courier.do(hand_on), own, result, self._limit)

    def _between(
        self, gives: Sequence[torch.Tensor], sizes: Sequence[int], mesh: Mesh, axis: int
    ) -> list[torch.Tensor]:
        """What the hosts' firsts send this one, which sends each its part."""
        at = self._at
        gets = [gives[at] if i == at else gives[at].new_empty(n) for i, n in enumerate(sizes)]
        group = mesh.group(axis) if axis >= 0 else mesh.whole_group()
        backend = backend_for(group, gives[at].device)
        exchange_among("hosts", gives, gets, backend, at, self._firsts).wait()
        return gets

    def _total(self, rows: list[torch.Tensor], op: str, mesh: Mesh, axis: int) -> Sequence[torch.Tensor]:
        parts, n, at = split(reduced(rows, op), len(self._homes)), len(self._homes), self._at
        own = reduced(self._between(parts, [parts[at].numel()] * n, mesh, axis), op)
        return [torch.cat(self._between([own] * n, [p.numel() for p in parts], mesh, axis))]

    def _gathered(
        self, rows: list[torch.Tensor], sizes: Sequence[int], mesh: Mesh, axis: int
    ) -> Sequence[torch.Tensor]:
        of_hosts = [[sizes[i] for i in home] for home in self._homes]
        bundle = torch.cat(rows)
        bundles = self._between([bundle] * len(of_hosts), [sum(each) for each in of_hosts], mesh, axis)
        pieces = [bundle[:0]] * len(sizes)
        for home, each, got in zip(self._homes, of_hosts, bundles, strict=True):
            for i, piece in zip(home, torch.split(got, each), strict=True):
                pieces[i] = piece
        return [torch.cat(pieces)]

    def _scattered(
        self, rows: list[torch.Tensor], sizes: Sequence[int], op: str, mesh: Mesh, axis: int
    ) -> Sequence[torch.Tensor]:
        pieces = torch.split(reduced(rows, op), list(sizes))
        parts = [torch.cat([pieces[i] for i in home]) for home in self._homes]
        gets = self._between(parts, [parts[self._at].numel()] * len(parts), mesh, axis)
        return torch.split(reduced(gets, op), [sizes[i] for i in self._home])

    # ---- collectives

    def all_reduce(self, x: torch.Tensor, mesh: Mesh, axis: int, op: str, *, beside: bool) -> Work[Any]:
        x, op = summable(x, op)
        # partial sums are not rounded to 16 bits on their way
        if op not in TWO or not x.numel() or _is_narrow(x.dtype):
            return super().all_reduce(x, mesh, axis, op, beside=beside)
        flat, n = x.view(-1), x.numel()
        handed = self._by_first(
            flat, [n] * len(self._home), lambda rows: self._total(rows, op, mesh, axis), n
        )
        return Work(rest=lambda: handed.use(flat.copy_))

    def sum_whole(self, x: torch.Tensor, mesh: Mesh, axis: int, *, beside: bool) -> Work[Any]:
        if not x.numel() or _is_narrow(x.dtype):
            return super().sum_whole(x, mesh, axis, beside=beside)
        return self.all_reduce(x, mesh, axis, "sum", beside=beside)

    def _gather(self, own: torch.Tensor, sizes: Sequence[int], mesh: Mesh, axis: int) -> _Handed:
        return self._by_first(
            own,
            [sizes[i] for i in self._home],
            lambda rows: self._gathered(rows, sizes, mesh, axis),
            sum(sizes),
        )

    def all_gather(
        self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int, size: int, *, beside: bool
    ) -> Work[torch.Tensor]:
        n, x = mesh.shape[axis], as_it_lies(x)
        shapes = [[*x.shape[:dim], chunk_bounds(size, n, i)[1], *x.shape[dim + 1 :]] for i in range(n)]
        sizes = [math.prod(shape) for shape in shapes]
        handed = self._gather(x.view(-1), sizes, mesh, axis)

        def joined(flat: torch.Tensor) -> torch.Tensor:
            parts = torch.split(flat, sizes)
            return torch.cat([part.view(shape) for part, shape in zip(parts, shapes, strict=True)], dim)

        return Work(rest=lambda: handed.use(joined))

    def share(self, own: torch.Tensor, wires: Sequence[torch.Tensor], mesh: Mesh, axis: int) -> Work[Any]:
        sizes = [own.numel()] * mesh.shape[axis]
        handed = self._gather(own, sizes, mesh, axis)

        def fill(flat: torch.Tensor) -> None:
            for i, row in enumerate(torch.split(flat.view(wires[0].dtype), wires[0].numel())):
                if i != self._here:
                    wires[i].copy_(row)

        return Work(rest=lambda: handed.use(fill)) if own.numel() else Work()

    def _scatter(self, own: torch.Tensor, sizes: Sequence[int], op: str, mesh: Mesh, axis: int) -> _Handed:
        def summed(rows: list[torch.Tensor]) -> Sequence[torch.Tensor]:
            return self._scattered(rows, sizes, op, mesh, axis)

        return self._by_first(own, [own.numel()] * len(self._home), summed, sizes[self._here])

    def reduce_scatter(self, x: torch.Tensor, mesh: Mesh, axis: int, dim: int) -> torch.Tensor:
        if _is_narrow(x.dtype):
            return super().reduce_scatter(x, mesh, axis, dim)
        x, n = x.resolve_conj().resolve_neg(), mesh.shape[axis]
        pieces = [x.narrow(dim, *chunk_bounds(x.shape[dim], n, i)) for i in range(n)]
        op = "max" if x.dtype is torch.bool else "sum"
        flat = torch.cat([piece.reshape(-1) for piece in pieces])
        handed = self._scatter(flat, [piece.numel() for piece in pieces], op, mesh, axis)
        return handed.use(lambda row: row.view(pieces[self._here].shape).clone())

    def sum_rows(self, rows: torch.Tensor, mesh: Mesh, axis: int) -> Summing:
        if _is_narrow(rows.dtype):
            return super().sum_rows(rows, mesh, axis)
        n, size = rows.shape
        return _Sum(self._scatter(rows.view(-1), [size] * n, "sum", mesh, axis), rows)

    # ---- from rank to rank

    def pass_on(self, x: torch.Tensor, mesh: Mesh, axis: int, gets: int, step: int) -> Work[torch.Tensor]:
        n, out = mesh.shape[axis], x.new_empty(gets)
        sent = self.send([as_it_lies(x)] if x.numel() else [], mesh, axis, (self._here + step) % n, 0)
        coming = self.receive([out] if gets else [], mesh, axis, (self._here - step) % n, 0)
        return Work((coming, sent), lambda: out)

    def send(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, to: int, tag: int) -> Work[Any]:
        if to in self._home:
            return self.of_home.send(xs, mesh, axis, self._home.index(to), tag)
        return super().send(xs, mesh, axis, to, tag)

    def receive(self, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, source: int, tag: int) -> Work[Any]:
        if source in self._home:
            return self.of_home.receive(xs, mesh, axis, self._home.index(source), tag)
        return super().receive(xs, mesh, axis, source, tag)

    def beyond(self, op: str, sent: int, dtype: torch.dtype | None, to: int | None) -> int:
        is_sum, n, hosts, k = op != "all_gather", self._size, len(self._homes), len(self._home)
        if op not in _BY_FIRST or (is_sum and dtype is not None and _is_narrow(dtype)):
            return super().beyond(op, sent, dtype, to)
        if not self._is_first:
            return 0
        if op == "all_reduce":
            return sent * n * (hosts - 1) // (hosts * (n - 1))
        return sent * (n - k if is_sum else k * (hosts - 1)) // (n - 1)


def _is_narrow(dtype: torch.dtype) -> bool:
    return dtype.itemsize < 4 and dtype.is_floating_point


class _Handed:
    """What a rank gets from its host's first.

    Args:
        coming: the first's is what its courier makes.
        size: its elements.
    """

    def __init__(
        self, coming: Expected | Future[torch.Tensor] | None, own: torch.Tensor, size: int, limit: float
    ) -> None:
        self._coming, self._own, self._size, self._limit = coming, own, size, limit

    def use(self, do: Callable[[torch.Tensor], T]) -> T:
        """What becomes of it in its place, where it is not after this."""
        if isinstance(self._coming, Expected):
            taken = self._coming.wait(self._limit)
            result = do(taken.view((self._size,), self._own.dtype))
            taken.give_back()
            return result
        return do(self._own.new_empty(0) if self._coming is None else self._coming.result())


class _Sum(Summing):
    """A sum of rows by way of the first."""

    def __init__(self, row: _Handed, sent: torch.Tensor) -> None:
        super().__init__((), Work(), sent)
        self._row = row

    def wait(self, out: torch.Tensor, *, add: bool = False) -> None:
        self._row.use(lambda row: self._add_up([row], out, add))
        self._sent = None
