"""Batches: which rows a rank computes, and how they become DTensors."""

from __future__ import annotations

import hashlib
import itertools
import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch

from espalier.comm.control import gather_objects, numbers_of_all
from espalier.comm.row_exchange import overlaps, send_rows
from espalier.device import moved
from espalier.engine.given import rows_in
from espalier.engine.lengths import UnlikeError, all_alike, refuse_unlike_batches
from espalier.engine.row_lists import closed, lists_in, on_lists, opened, part_of, with_all_lists
from espalier.layout import Layout, Partial, Placement, Replicate, Shard, chunk_bounds
from espalier.layout.layout import bounds
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import DTensor, redistribute, stamp
from espalier.tensor.dtensor import is_sparse, refuse_nested
from espalier.tensor.observers import claim, tell
from espalier.tensor.rules.joint_failure import alike
from espalier.trees import leaves, named_leaves, tensors_in, tree_map

_EXHAUSTED, _RAGGED = -1, -2


class Own(NamedTuple):
    """Which rows of a global batch a rank has given.

    Attributes:
        size: of the batch.
        rows: this rank's.
        is_even: whether each rank has given those that it computes.
    """

    size: int
    rows: slice
    is_even: bool


class Batches:
    """The batches of one plan: their rows are cut along the plan's batch axes, as torch.chunk cuts.

    A batch is a tensor, or a dict, tuple or list of such, whose first dim are the rows; what has no dims
    is every rank's, as is a list with an entry for each row. A context axis cuts the second dim of what has
    two or three, [rows, sequence] or [rows, sequence, features], and the third of a mask, [rows, 1 or heads,
    sequence, sequence]. What else there is, images say, is whole along it.
    """

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.micro_batches = mesh, plan.accumulate
        self.axes = tuple(mesh.axis(name) for name in plan.batch_axes)
        self._context = mesh.axis("context") if plan.context > 1 else None
        self._cuts_parameters = plan.zero == 3
        self._has_told = False
        self._has_lists = False  # of tensors, an entry for each row: the ranks have agreed that there are
        mesh.rows |= {*self.axes, *([] if self._context is None else [self._context])}

    @property
    def _sizes(self) -> list[int]:
        return [self.mesh.shape[a] for a in self.axes]

    @property
    def readers(self) -> int:
        """How many parts a batch is cut into."""
        return math.prod(self._sizes)

    # ---- of a known size

    def rows(self, size: int) -> slice:
        """This rank's rows of a global batch."""
        start, n = bounds(size, self.axes, self.mesh.shape, self.mesh.coordinate)
        return slice(start, start + n)

    def parts(self, size: int) -> list[slice]:
        """The rows of all ranks of a global batch, in the order of coordinates."""
        ends = [0, *itertools.accumulate(self._even(size))]
        return [slice(start, end) for start, end in itertools.pairwise(ends)]

    def share(self, batch: Any) -> int:
        """The most rows that a rank computes of a global batch; 1 if it has none."""
        size = max((x.shape[0] for _, x in _leaves(batch)), default=1)
        return -(-size // self.readers)

    def local(self, rows: Any, size: int, lengths: frozenset[int] | None = None) -> Any:
        """This rank's rows of a global batch as DTensors.

        Args:
            lengths: of the sequences of the batch, where these rows are a part of it.
        """
        rows_in(size, 1)
        lengths = self._lengths(rows) if lengths is None else lengths
        among = self.readers
        if size < among:
            tell(
                f"A global batch of {size} rows leaves {among - size} of the {among} ranks that share it "
                "without work: use a larger batch or a smaller plan.data."
            )

        def wrap(x: Any) -> Any:
            if not has_rows(x) or isinstance(x, DTensor):
                return opened(x, self.mesh.device())
            layout = self._cut_by_rows((size, *x.shape[1:]))
            if tuple(x.shape) != layout.local_shape:
                raise ValueError(
                    f"Of a global batch of {size} this rank computes {layout.local_shape[0]} rows, "
                    f"but {x.shape[0]} were given. Load the rows engine.batch_rows({size}), or leave "
                    "size out: then the ranks exchange rows."
                )
            return self._cut_by_sequence(
                alike(stamp(moved(x, self.mesh.device()).view_as(x), layout)), lengths
            )

        return tree_map(wrap, rows)

    def _cut_by_rows(self, shape: Sequence[int]) -> Layout:
        axes = tuple(0 if a in self.axes else "R" for a in range(self.mesh.ndim))
        return Layout.of(self.mesh, axes, (self.axes, *((),) * (len(shape) - 1)), torch.Size(shape))

    def is_cut_as(self, x: DTensor) -> bool:
        """Whether a tensor on this or a larger mesh has this rank's rows of a batch."""
        rows, layout = self._cut_by_rows(x.shape), x._layout.own
        cut = [s for s, n in zip(rows.axes, self.mesh.shape, strict=True) if n > 1]
        return bool(x.ndim) and cut == [s for s, n in zip(layout.axes, self.mesh.shape, strict=True) if n > 1]

    def _lengths(self, batch: Any) -> frozenset[int]:
        """How long the sequences of a batch are, if they are cut."""
        if self._context is None:
            return frozenset()
        return frozenset(x.shape[1] for _, x in _leaves(batch) if x.ndim in (2, 3))

    def _cut_by_sequence(self, x: DTensor, lengths: frozenset[int]) -> DTensor:
        if self._context is None or (dim := _sequence(x, lengths)) is None:
            return x
        return redistribute(x, x._layout.with_axis(self._context, dim))

    def typed(self, batch: Any) -> Any:
        """A global batch, equal on all ranks, cut to this rank's rows; DTensors stay as they are."""

        batch = closed(dict(batch) if isinstance(batch, Mapping) else batch, "ragged")
        lengths = self._lengths(batch)

        def cut(x: Any) -> Any:
            if not has_rows(x) or isinstance(x, DTensor):
                return opened(x, self.mesh.device())
            claim(x, Layout.replicated(self.mesh, tuple(x.shape)), "the global batch given to the engine")
            if x.requires_grad and torch.is_grad_enabled() and self.readers > 1:
                # its gradient is to be that of all rows, as its value is
                whole = DTensor.from_local(x, self.mesh)
                return self._cut_by_sequence(redistribute(whole, self._cut_by_rows(x.shape)), lengths)
            return self.local(x[self.rows(x.shape[0])], x.shape[0], lengths)

        if not self._has_told and self.readers > 1 and not tensors_in(batch):
            self._tell_of_objects(batch)
        return tree_map(cut, batch)

    def _tell_of_objects(self, batch: Any) -> None:
        """Say so where tensors are in what is not opened: a TensorDict, a graph."""
        kinds = {type(x).__name__ for x in leaves(batch) if tensors_in(x, objects=2)}
        if kinds:
            self._has_told = True
            tell(
                f"The model is called with {', '.join(sorted(kinds))}, in which no rows are seen: each rank "
                "computes the whole batch, which is right, and no faster than one rank. Give tensors, or "
                "tuples, lists or dicts of them."
            )

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
        batch = closed(dict(batch) if isinstance(batch, Mapping) else batch, "ragged")
        shapes = {name: tuple(x.shape) for name, x in _leaves(batch)}
        sizes = {shape[0] for shape in shapes.values()}
        if len(sizes) != 1:
            raise ValueError(
                f"Of a batch with {shapes or 'no rows'} it is not clear what a micro-batch is: with "
                "Plan(accumulate=...) the first dim of each tensor must be the batch's rows. Or call the "
                "engine on each micro-batch."
            )
        return [part_of(batch, start, n, has_rows, self.mesh.device()) for start, n in self.cuts(sizes.pop())]

    # ---- of a size that the ranks agree on

    def gathered(self, rows: Any) -> Any:
        """What all ranks load, as one global batch; None where none has any.

        One small message, and rows that change places where the ranks have loaded unevenly.

        Raises:
            ValueError: on all ranks, if their batches do not fit together.
        """
        return self._gathered(rows)[0]

    def of_each(self, rows: Any) -> tuple[list[Any], int]:
        """What each reader gives, on all ranks, and which of it is this one's (a collective)."""
        host, device = torch.device("cpu"), self.mesh.device()
        of_all = self._by_place(gather_objects(_moved(rows, host), self.mesh))
        return [_moved(of[0], device) for _, of in sorted(of_all.items())], self.mesh.place(self.axes)

    def own(self, rows: Any) -> tuple[Any, Own | None]:
        """As :meth:`gathered`, and which rows are this rank's, to give it its own of what comes of them.

        Rows that are DTensors already are taken as they are. Without any there is no :class:`Own` either.
        """
        sizes = {x.shape[0] for x in tensors_in(rows) if x.ndim and isinstance(x, DTensor)}
        if len(sizes) == 1:
            size = sizes.pop()
            return rows, Own(size, self.rows(size), True)
        if not any(map(has_rows, tensors_in(rows))):
            return rows, None
        batch, held = self._gathered(rows)
        if held is None:
            return rows, None
        size, here = sum(held), self.mesh.place(self.axes)
        return batch, Own(size, slice(sum(held[:here]), sum(held[: here + 1])), held == self._even(size))

    def returned(self, x: DTensor, of: Own | None) -> tuple[torch.Tensor, float]:
        """This rank's rows of what came of a batch, plain; what has no rows is whole.

        What is made of it on each rank by itself is taken as that rank's addend of a mean over the ranks.

        Returns:
            it, and by what its gradient is to be multiplied.
        """
        mesh, layout = self.mesh, x._layout.own
        among = self.readers
        if not x.ndim or among == 1:
            same = redistribute(x, Layout.replicated(mesh, layout.shape))
            return same.to_local(grad_placements=[Replicate()] * mesh.ndim), 1.0
        cut = {layout.axes[a] for a in self.axes if mesh.shape[a] > 1 and type(layout.axes[a]) is int}
        size, rows, is_even = (0, slice(0), False) if of is None else of
        is_cut = len(cut) == 1
        dim = cut.pop() if is_cut else 0
        assert isinstance(dim, int)
        if dim and layout.shape[0] == size and (self._cuts_parameters or layout.shape[dim] % size):
            dim, is_cut = 0, False  # ranks share what a cut parameter has, such as a decoder's queries
        each, odd = divmod(layout.shape[dim], max(size, 1))  # a batch's rows may have become several each
        has_rows = size > 0 and each > 0 and not odd
        views = _batches_in(layout.shape[dim], size, mesh.put_together) if has_rows and each > 1 else 1
        has_rows &= each == 1 or is_cut or views > 1
        if views > 1:  # this rank has its rows of each
            each //= views
            x, dim = x.unflatten(dim, (views, size * each)), dim + 1
        if has_rows and is_even and (each == 1 or size % among == 0):
            axes = tuple(dim if a in self.axes else "R" for a in range(mesh.ndim))
            cuts = tuple(self.axes if d == dim else () for d in range(x.ndim))
            lies = Layout.of(mesh, axes, cuts, tuple(x.shape))
            grads: list[Placement] = [Shard(dim) if a in self.axes else Replicate() for a in range(mesh.ndim)]
            own = redistribute(x, lies).to_local(grad_placements=grads)
        else:
            everywhere = redistribute(x, Layout.replicated(mesh, tuple(x.shape)))
            own = everywhere.to_local(grad_placements=self.addends())
            if has_rows:
                own = own.narrow(dim, rows.start * each, (rows.stop - rows.start) * each)
        return own.flatten(dim - 1, dim) if views > 1 else own, 1 / among

    def beside(self, x: DTensor) -> tuple[torch.Tensor, float]:
        """The whole of what a loop uses beside this rank's rows, and by what its gradient is multiplied."""
        whole = redistribute(x, Layout.replicated(self.mesh, x._layout.shape))
        return whole.to_local(grad_placements=self.addends()), 1 / self.readers

    def addends(self) -> list[Placement]:
        """The placements of what each rank has made of its rows alone, and that is to be added up."""
        several = {a for a in self.axes if self.mesh.shape[a] > 1}
        return [Partial() if a in several else Replicate() for a in range(self.mesh.ndim)]

    def _even(self, size: int) -> list[int]:
        """How many rows of a global batch each rank computes, in the order of coordinates."""
        held = [size]
        for n in self._sizes:
            held = [part for whole in held for part in _chunks(whole, n)]
        return held

    def _gathered(self, rows: Any, pads: bool = True) -> tuple[Any, list[int] | None]:
        """The global batch, and how many of its rows each rank has given; None of one reader's without rows.

        Args:
            pads: where ranks have padded each to a length of its own, pad to the longest.
        """
        mesh, given = self.mesh, dict(rows) if isinstance(rows, Mapping) else rows
        rows = closed(given, "all" if self._has_lists else "none")
        if mesh.is_dry:
            size = _rows_of(rows) * self.readers
            rows = on_lists(lambda of: of * self.readers, rows)
            return self.local(rows, size), self._even(size)
        count, form = _EXHAUSTED, ""
        if rows is not None:
            count = _rows_of(rows)
            form = repr(_form(rows, count))
        digest = int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), signed=True)
        said = numbers_of_all([count, digest], mesh)
        counts = [n for n, _ in said]
        if all(n == _EXHAUSTED for n in counts):
            return None, []
        forms = {d for n, d in said if n != _EXHAUSTED}
        shared = self._by_place(counts)
        if _RAGGED in counts and not self._has_lists:
            self._has_lists = True
            return self._gathered(given, pads)
        if pads and len(forms) > 1 and _RAGGED not in counts:
            return self._gathered(all_alike(given, mesh), pads=False)
        if len(forms) > 1 or _RAGGED in counts or any(len(set(of)) > 1 for of in shared.values()):
            if len(forms) == self.readers == 1 and len({*counts}) == 1:
                return given, None
            shares = all(len({*of}) == 1 for of in self._by_place([*map(tuple, said)]).values())
            tensors = None if given is None else _leaves(given)
            refuse_unlike_batches(tensors, mesh, UnlikeError if shares else ValueError)
        if _EXHAUSTED in counts:
            first = next(i for i, n in enumerate(counts) if n != _EXHAUSTED)
            own = tree_map(lambda x: x[:0].cpu() if has_rows(x) else x, rows) if count >= 0 else None
            templates = gather_objects(own if mesh.ranks[first] == mesh.world_rank else None, mesh)
            rows = templates[first] if rows is None else rows
        rows = with_all_lists(rows, given is None, self._by_place, mesh)
        held = [max(of[0], 0) for _, of in sorted(shared.items())]
        size = sum(held)
        if held != self._even(size):  # those that lie as they are to keep their order
            rows = tree_map(lambda x: self._evened(x, held) if has_rows(x) else x, rows)
        return self.local(rows, size), held

    def _by_place(self, said: Sequence[Any]) -> dict[tuple[int, ...], list[Any]]:
        """What the ranks say, by their coordinates along the batch axes."""
        by_place: dict[tuple[int, ...], list[Any]] = {}
        places = itertools.product(*map(range, self.mesh.shape))
        for place, one in zip(places, said, strict=True):
            by_place.setdefault(tuple(place[a] for a in self.axes), []).append(one)
        return by_place

    def _evened(self, x: torch.Tensor, lengths: Sequence[int], level: int = 0) -> torch.Tensor:
        """The rows that the layout gives this rank, where each has loaded so many.

        ``lengths`` is told of the ranks that differ from this one on the axes from ``level`` on alone.
        """
        x, n, inner = moved(x, self.mesh.device()), self._sizes[level], math.prod(self._sizes[level + 1 :])
        matrix = [list(lengths[i * inner : (i + 1) * inner]) for i in range(n)]
        # the columns first send each row of the matrix as much as it needs in all, then the rows share
        columns = [sum(row[j] for row in matrix) for j in range(inner)]
        then = overlaps(_chunks(sum(lengths), n), columns)
        j = self.mesh.place(self.axes[level + 1 :])
        x = self._moved(x, self.axes[level], [row[j] for row in matrix], [row[j] for row in then])
        if level + 1 == len(self.axes):
            return x
        return self._evened(x, then[self.mesh.coordinate[self.axes[level]]], level + 1)

    def _moved(self, x: torch.Tensor, axis: int, have: Sequence[int], want: Sequence[int]) -> torch.Tensor:
        """Rows along one axis, in their order, from as many as each has to as many as each wants."""
        flow, here = overlaps(have, want), self.mesh.coordinate[axis]
        if all(flow[i][j] == 0 for i in range(len(have)) for j in range(len(want)) if i != j):
            return x
        return send_rows(x, self.mesh, axis, [row[here] for row in flow], flow[here])


def _chunks(size: int, n: int) -> list[int]:
    return [chunk_bounds(size, n, i)[1] for i in range(n)]


def has_rows(x: Any) -> bool:
    """Whether its first dim are rows; what is sparse, a graph say, goes whole to all ranks."""
    if not isinstance(x, torch.Tensor) or x.ndim == 0 or is_sparse(x):
        return False
    refuse_nested(x)
    return True


def _leaves(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors with rows, and where they stand."""
    leaves = named_leaves(batch, lambda _, x: isinstance(x, Mapping | tuple | list))
    return [(name or "batch", x) for name, x in leaves if has_rows(x)]


def _sequence(x: torch.Tensor, lengths: frozenset[int]) -> int | None:
    """The dim of an input that is the sequence."""
    if x.ndim in (2, 3) and x.shape[1] > 1:
        return 1
    return 2 if x.ndim == 4 and x.shape[2] == x.shape[3] and x.shape[2] in lengths else None


def _batches_in(length: int, size: int, put_together: Mapping[int, tuple[int, ...]]) -> int:
    """How many batches of a size, with as many rows for each of its own, lie one after the other."""
    parts = put_together.get(length, ()) if length > size else ()
    within = [_batches_in(part, size, put_together) for part in parts]
    each = {divmod(part, size * n) for part, n in zip(parts, within, strict=True)}
    return sum(within) if [odd for _, odd in each] == [0] else 1


def _rows_of(rows: Any) -> int:
    lengths = {x.shape[0] for _, x in _leaves(rows)} | {len(x.rows) for x in lists_in(rows)}
    return lengths.pop() if len(lengths) == 1 else _RAGGED


def _form(rows: Any, count: int) -> list[Any]:
    from_dim = 0 if count == _RAGGED else 1
    shapes = [(name, str(x.dtype), tuple(x.shape[from_dim:])) for name, x in _leaves(rows)]
    return [*shapes, len(lists_in(rows))]


def _moved(batch: Any, device: torch.device) -> Any:
    return tree_map(lambda x: moved(x, device) if isinstance(x, torch.Tensor) else x, batch)


def loss_of(output: Any) -> torch.Tensor:
    """The loss in what a model gives."""
    if isinstance(output, torch.Tensor):
        return output
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    if isinstance(loss, torch.Tensor):
        return loss
    raise ValueError(
        f"The model returned {type(output).__name__} without a loss. Give it labels, let it return the "
        "loss, or pass loss_fn=lambda output, batch: ... to initialize."
    )
