"""Batches: which rows a rank computes, and how they become DTensors."""

from __future__ import annotations

import hashlib
import itertools
import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from espalier.comm.rows import send_rows
from espalier.comm.words import numbers_of_all, words_of_all
from espalier.layout import Layout, chunk_bounds
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import DTensor, redistribute, stamp
from espalier.tensor.caller import user_frame
from espalier.tensor.rules.counts import alike
from espalier.tensor.watch import claim
from espalier.trees import named_leaves, tree_map

_EXHAUSTED, _RAGGED = -1, -2


class Batches:
    """The batches of one plan: their rows are cut along the plan's batch axes, as torch.chunk cuts.

    A batch is a tensor, or a dict, tuple or list of such, whose first dim are the rows; what has no dims
    is every rank's. A context axis cuts the second dim of what has two or three, [rows, sequence] or [rows,
    sequence, features], and the third of a mask, [rows, 1 or heads, sequence, sequence]. What else there is,
    images say, is whole along it.
    """

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.micro_batches = mesh, plan.accumulate
        self.axes = tuple(mesh.axis(name) for name in plan.batch_axes)
        self._context = mesh.axis("context") if plan.context > 1 else None

    @property
    def _sizes(self) -> list[int]:
        return [self.mesh.shape[a] for a in self.axes]

    # ---- of a known size

    def rows(self, size: int) -> slice:
        """This rank's rows of a global batch."""
        start = 0
        for axis in self.axes:
            begin, size = chunk_bounds(size, self.mesh.shape[axis], self.mesh.coordinate[axis])
            start += begin
        return slice(start, start + size)

    def share(self, batch: Any) -> int:
        """The most rows that a rank computes of a global batch; 1 if it has none."""
        size = max((x.shape[0] for _, x in _leaves(batch)), default=1)
        return -(-size // math.prod(self._sizes))

    def local(self, rows: Any, size: int, lengths: frozenset[int] | None = None) -> Any:
        """This rank's rows of a global batch as DTensors.

        Args:
            lengths: of the sequences of the batch, where these rows are a part of it.
        """
        lengths = _lengths(rows) if lengths is None else lengths
        among = math.prod(self._sizes)
        if size < among:
            warnings.warn(
                f"A global batch of {size} rows leaves {among - size} of the {among} ranks that share it "
                "without work: use a larger batch or a smaller plan.data.",
                stacklevel=user_frame()[0],
            )

        def wrap(x: Any) -> Any:
            if not _has_rows(x) or isinstance(x, DTensor):
                return x
            axes = tuple(0 if a in self.axes else "R" for a in range(self.mesh.ndim))
            layout = Layout.of(
                self.mesh, axes, (self.axes, *((),) * (x.ndim - 1)), torch.Size((size, *x.shape[1:]))
            )
            if tuple(x.shape) != layout.local_shape:
                raise ValueError(
                    f"Of a global batch of {size} this rank computes {layout.local_shape[0]} rows, "
                    f"but {x.shape[0]} were given. Load the rows engine.batch_rows({size}), or leave "
                    "size out: then the ranks exchange rows."
                )
            own = alike(stamp(x.to(self.mesh.device()).view_as(x), layout))
            dim = _sequence(x, lengths)
            if self._context is None or dim is None:
                return own
            return redistribute(own, layout.with_axis(self._context, dim))

        return tree_map(wrap, rows)

    def typed(self, batch: Any) -> Any:
        """A global batch, equal on all ranks, cut to this rank's rows; DTensors stay as they are."""

        batch = dict(batch) if isinstance(batch, Mapping) else batch
        lengths = _lengths(batch)

        def cut(x: Any) -> Any:
            if not _has_rows(x) or isinstance(x, DTensor):
                return x
            claim(x, Layout.replicated(self.mesh, tuple(x.shape)), "the global batch given to the engine")
            return self.local(x[self.rows(x.shape[0])], x.shape[0], lengths)

        return tree_map(cut, batch)

    # ---- micro-batches

    def cuts(self, size: int) -> list[tuple[int, int]]:
        """The (first row, size) of each micro-batch of a global batch: alike, and none of no rows."""
        n = min(self.micro_batches, max(size, 1))
        starts = [size * i // n for i in range(n + 1)]
        return [(start, end - start) for start, end in itertools.pairwise(starts)]

    def cut(self, batch: Any) -> list[Any]:
        """The micro-batches of a global batch, whose rows are cut in order, whatever the number of ranks."""
        if self.micro_batches == 1:
            return [batch]
        batch = dict(batch) if isinstance(batch, Mapping) else batch
        shapes = {name: tuple(x.shape) for name, x in _leaves(batch)}
        sizes = {shape[0] for shape in shapes.values()}
        if len(sizes) != 1:
            raise ValueError(
                f"Of a batch with {shapes or 'no rows'} it is not clear what a micro-batch is: with "
                "Plan(accumulate=...) the first dim of each tensor must be the batch's rows. Or call the "
                "engine on each micro-batch."
            )
        return [tree_map(_stretch(start, n), batch) for start, n in self.cuts(sizes.pop())]

    # ---- of a size that the ranks agree on

    def gathered(self, rows: Any) -> Any:
        """What all ranks load, as one global batch; None where none has any.

        One small message, and rows that change places where the ranks have loaded unevenly.

        Raises:
            ValueError: on all ranks, if their batches do not fit together.
        """
        mesh = self.mesh
        if mesh.is_dry:
            return self.local(rows, _rows_of(rows) * math.prod(self._sizes))
        rows = dict(rows) if isinstance(rows, Mapping) else rows
        count, form = _EXHAUSTED, ""
        if rows is not None:
            count, form = _rows_of(rows), repr(_form(rows))
        digest = int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), signed=True)
        said = numbers_of_all([count, digest], mesh)
        counts = [n for n, _ in said]
        if all(n == _EXHAUSTED for n in counts):
            return None
        forms = {d for n, d in said if n != _EXHAUSTED}
        shared = self._by_place(counts)
        if len(forms) > 1 or _RAGGED in counts or any(len(set(of)) > 1 for of in shared.values()):
            self._refuse(rows)
        if _EXHAUSTED in counts:
            first = next(i for i, n in enumerate(counts) if n != _EXHAUSTED)
            own = tree_map(lambda x: x[:0].cpu() if _has_rows(x) else x, rows) if count >= 0 else None
            templates = words_of_all(own if mesh.ranks[first] == mesh.world_rank else None, mesh)
            rows = templates[first] if rows is None else rows
        held = [max(of[0], 0) for _, of in sorted(shared.items())]
        size = sum(held)
        return self.local(tree_map(lambda x: self._evened(x, held) if _has_rows(x) else x, rows), size)

    def _by_place(self, said: Sequence[Any]) -> dict[tuple[int, ...], list[Any]]:
        """What the ranks say, by their coordinates along the batch axes."""
        found: dict[tuple[int, ...], list[Any]] = {}
        places = itertools.product(*map(range, self.mesh.shape))
        for place, one in zip(places, said, strict=True):
            found.setdefault(tuple(place[a] for a in self.axes), []).append(one)
        return found

    def _refuse(self, rows: Any) -> None:
        shapes = None if rows is None else {name: tuple(x.shape) for name, x in _leaves(rows)}
        kinds = None if rows is None else {name: str(x.dtype) for name, x in _leaves(rows)}
        told = words_of_all((self.mesh.world_rank, shapes, kinds), self.mesh)
        alike = len({str(kinds) for _, shapes, kinds in told if shapes is not None}) == 1
        lines = ["The batches that the ranks give to engine.local_batch do not fit together:"]
        for rank, shapes, kinds in told:
            lines.append(f"  rank {rank}: {'no rows left' if shapes is None else shapes if alike else kinds}")
        lines.append(
            "Along the first dim the ranks may differ. Names, dtypes and other dims must be equal (pad to "
            "one length), and ranks that differ on no data axis must give the same."
        )
        raise ValueError("\n".join(lines))

    def _evened(self, x: torch.Tensor, held: Sequence[int], level: int = 0) -> torch.Tensor:
        """The rows that the layout gives this rank, where each has loaded so many.

        ``held`` is told of the ranks that differ from this one on the axes from ``level`` on alone.
        """
        x, n, inner = x.to(self.mesh.device()), self._sizes[level], math.prod(self._sizes[level + 1 :])
        matrix = [list(held[i * inner : (i + 1) * inner]) for i in range(n)]
        # the columns first send each row of the matrix as much as it needs in all, then the rows share
        columns = [sum(row[j] for row in matrix) for j in range(inner)]
        then = _overlaps(_chunks(sum(held), n), columns)
        j = 0
        for axis in self.axes[level + 1 :]:
            j = j * self.mesh.shape[axis] + self.mesh.coordinate[axis]
        x = self._moved(x, self.axes[level], [row[j] for row in matrix], [row[j] for row in then])
        if level + 1 == len(self.axes):
            return x
        return self._evened(x, then[self.mesh.coordinate[self.axes[level]]], level + 1)

    def _moved(self, x: torch.Tensor, axis: int, have: Sequence[int], want: Sequence[int]) -> torch.Tensor:
        """Rows along one axis, in their order, from as many as each has to as many as each wants."""
        flow, here = _overlaps(have, want), self.mesh.coordinate[axis]
        if all(flow[i][j] == 0 for i in range(len(have)) for j in range(len(want)) if i != j):
            return x
        return send_rows(x, self.mesh, axis, [row[here] for row in flow], flow[here])


def _chunks(size: int, n: int) -> list[int]:
    return [chunk_bounds(size, n, i)[1] for i in range(n)]


def _overlaps(have: Sequence[int], want: Sequence[int]) -> list[list[int]]:
    """How much of each stretch of one division of a line lies in each of another."""
    ends, starts = list(itertools.accumulate(have)), list(itertools.accumulate(want))
    return [
        [max(0, min(end, stop) - max(end - n, stop - m)) for stop, m in zip(starts, want, strict=True)]
        for end, n in zip(ends, have, strict=True)
    ]


def _has_rows(x: Any) -> bool:
    return isinstance(x, torch.Tensor) and x.ndim > 0


def _stretch(start: int, n: int) -> Callable[[Any], Any]:
    return lambda x: x[start : start + n] if _has_rows(x) else x


def _leaves(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors with rows, and where they stand."""
    found = named_leaves(batch, lambda x: isinstance(x, Mapping | tuple | list))
    return [(name or "batch", x) for name, x in found if _has_rows(x)]


def _lengths(batch: Any) -> frozenset[int]:
    """How long the sequences of a batch are."""
    return frozenset(x.shape[1] for _, x in _leaves(batch) if x.ndim in (2, 3))


def _sequence(x: torch.Tensor, lengths: frozenset[int]) -> int | None:
    """The dim of an input that is the sequence."""
    if x.ndim in (2, 3) and x.shape[1] > 1:
        return 1
    return 2 if x.ndim == 4 and x.shape[2] == x.shape[3] and x.shape[2] in lengths else None


def _rows_of(rows: Any) -> int:
    found = {x.shape[0] for _, x in _leaves(rows)}
    return found.pop() if len(found) == 1 else _RAGGED


def _form(rows: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(x.dtype), tuple(x.shape[1:])) for name, x in _leaves(rows)]


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model gives."""
    if isinstance(output, torch.Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(found, torch.Tensor):
        return found
    raise ValueError(
        f"The model returned {type(output).__name__} without a loss. Give it labels, let it return the "
        "loss, or pass loss_fn=lambda output, batch: ... to initialize."
    )


__all__ = ["Batches", "loss_of"]
