"""Batches: which rows a rank computes, how they become DTensors, and where those of a dataset stand.

Who comes from data parallelism by hand gives each rank its own rows. As a global batch, of which each rank
computes its part, all but one in n of them would be left out, and the loss would fall all the same. So in the
first step each rank's batches become one number, and its sums over the ranks ride on the message of the norm
(:class:`GivenBatches`)."""

from __future__ import annotations

import gc
import hashlib
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from espalier.comm.control import gather_objects, numbers_of_all
from espalier.comm.row_exchange import send_rows
from espalier.device import moved
from espalier.engine.collation import hangs_together
from espalier.engine.lengths import all_alike
from espalier.layout import Layout, Partial, Placement, Replicate, Shard, chunk_bounds
from espalier.layout.layout import bounds
from espalier.mesh import Mesh
from espalier.parallel import Plan
from espalier.tensor import DTensor, redistribute, stamp
from espalier.tensor.dtensor import is_sparse, refuse_nested
from espalier.tensor.observers import claim, user_frame
from espalier.tensor.rules.joint_failure import alike
from espalier.torch_private import open_transform, raw
from espalier.trees import instances_of, leaves, named_leaves, tensors_in, tree_map

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
    is every rank's. A context axis cuts the second dim of what has two or three, [rows, sequence] or [rows,
    sequence, features], and the third of a mask, [rows, 1 or heads, sequence, sequence]. What else there is,
    images say, is whole along it.
    """

    def __init__(self, mesh: Mesh, plan: Plan) -> None:
        self.mesh, self.micro_batches = mesh, plan.accumulate
        self.axes = tuple(mesh.axis(name) for name in plan.batch_axes)
        self._context = mesh.axis("context") if plan.context > 1 else None
        self._has_told = False
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
        lengths = self._lengths(rows) if lengths is None else lengths
        among = self.readers
        if size < among:
            warnings.warn(
                f"A global batch of {size} rows leaves {among - size} of the {among} ranks that share it "
                "without work: use a larger batch or a smaller plan.data.",
                stacklevel=user_frame()[0],
            )

        def wrap(x: Any) -> Any:
            if not _has_rows(x) or isinstance(x, DTensor):
                return x
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

        batch = dict(batch) if isinstance(batch, Mapping) else batch
        lengths = self._lengths(batch)

        def cut(x: Any) -> Any:
            if not _has_rows(x) or isinstance(x, DTensor):
                return x
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
            warnings.warn(
                f"The model is called with {', '.join(sorted(kinds))}, in which no rows are seen: each rank "
                "computes the whole batch, which is right, and no faster than one rank. Give tensors, or "
                "tuples, lists or dicts of them.",
                stacklevel=user_frame()[0],
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
        return self._gathered(rows)[0]

    def own(self, rows: Any) -> tuple[Any, Own | None]:
        """As :meth:`gathered`, and which rows are this rank's, to give it its own of what comes of them.

        Rows that are DTensors already are taken as they are. Without any there is no :class:`Own` either.
        """
        sizes = {x.shape[0] for x in tensors_in(rows) if x.ndim and isinstance(x, DTensor)}
        if len(sizes) == 1:
            size = sizes.pop()
            return rows, Own(size, self.rows(size), True)
        if not any(map(_has_rows, tensors_in(rows))):
            return rows, None
        batch, held = self._gathered(rows)
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

    def _gathered(self, rows: Any, pads: bool = True) -> tuple[Any, list[int]]:
        """The global batch, and how many of its rows each rank has given.

        Args:
            pads: where ranks have padded each to a length of its own, pad to the longest.
        """
        mesh = self.mesh
        if mesh.is_dry:
            size = _rows_of(rows) * self.readers
            return self.local(rows, size), self._even(size)
        rows = dict(rows) if isinstance(rows, Mapping) else rows
        count, form = _EXHAUSTED, ""
        if rows is not None:
            count, form = _rows_of(rows), repr(_form(rows))
        digest = int.from_bytes(hashlib.blake2b(form.encode(), digest_size=8).digest(), signed=True)
        said = numbers_of_all([count, digest], mesh)
        counts = [n for n, _ in said]
        if all(n == _EXHAUSTED for n in counts):
            return None, []
        forms = {d for n, d in said if n != _EXHAUSTED}
        shared = self._by_place(counts)
        if pads and len(forms) > 1 and _RAGGED not in counts:
            return self._gathered(all_alike(rows, mesh), pads=False)
        if len(forms) > 1 or _RAGGED in counts or any(len(set(of)) > 1 for of in shared.values()):
            self._refuse(rows)
        if _EXHAUSTED in counts:
            first = next(i for i, n in enumerate(counts) if n != _EXHAUSTED)
            own = tree_map(lambda x: x[:0].cpu() if _has_rows(x) else x, rows) if count >= 0 else None
            templates = gather_objects(own if mesh.ranks[first] == mesh.world_rank else None, mesh)
            rows = templates[first] if rows is None else rows
        held = [max(of[0], 0) for _, of in sorted(shared.items())]
        size = sum(held)
        if held != self._even(size):  # those that lie as they are to keep their order
            rows = tree_map(lambda x: self._evened(x, held) if _has_rows(x) else x, rows)
        return self.local(rows, size), held

    def _by_place(self, said: Sequence[Any]) -> dict[tuple[int, ...], list[Any]]:
        """What the ranks say, by their coordinates along the batch axes."""
        by_place: dict[tuple[int, ...], list[Any]] = {}
        places = itertools.product(*map(range, self.mesh.shape))
        for place, one in zip(places, said, strict=True):
            by_place.setdefault(tuple(place[a] for a in self.axes), []).append(one)
        return by_place

    def _refuse(self, rows: Any) -> None:
        shapes = None if rows is None else {name: tuple(x.shape) for name, x in _leaves(rows)}
        kinds = None if rows is None else {name: str(x.dtype) for name, x in _leaves(rows)}
        of_all = gather_objects((self.mesh.world_rank, shapes, kinds), self.mesh)
        alike = len({str(kinds) for _, shapes, kinds in of_all if shapes is not None}) == 1
        lines = ["The batches that the ranks give to engine.local_batch do not fit together:"]
        for rank, shapes, kinds in of_all:
            lines.append(f"  rank {rank}: {'no rows left' if shapes is None else shapes if alike else kinds}")
        lines.append(
            "Along the first dim the ranks may differ. Names, dtypes and other dims must be equal (pad to "
            "one length), and ranks that differ on no data axis must give the same."
        )
        raise ValueError("\n".join(lines))

    def _evened(self, x: torch.Tensor, lengths: Sequence[int], level: int = 0) -> torch.Tensor:
        """The rows that the layout gives this rank, where each has loaded so many.

        ``lengths`` is told of the ranks that differ from this one on the axes from ``level`` on alone.
        """
        x, n, inner = moved(x, self.mesh.device()), self._sizes[level], math.prod(self._sizes[level + 1 :])
        matrix = [list(lengths[i * inner : (i + 1) * inner]) for i in range(n)]
        # the columns first send each row of the matrix as much as it needs in all, then the rows share
        columns = [sum(row[j] for row in matrix) for j in range(inner)]
        then = _overlaps(_chunks(sum(lengths), n), columns)
        j = self.mesh.place(self.axes[level + 1 :])
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
    # what is sparse, a graph say, goes whole to all ranks
    if not isinstance(x, torch.Tensor) or x.ndim == 0 or is_sparse(x):
        return False
    refuse_nested(x)
    return True


def _stretch(start: int, n: int) -> Callable[[Any], Any]:
    return lambda x: x[start : start + n] if _has_rows(x) else x


def _leaves(batch: Any) -> list[tuple[str, torch.Tensor]]:
    """The tensors with rows, and where they stand."""
    leaves = named_leaves(batch, lambda _, x: isinstance(x, Mapping | tuple | list))
    return [(name or "batch", x) for name, x in leaves if _has_rows(x)]


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
    lengths = {x.shape[0] for _, x in _leaves(rows)}
    return lengths.pop() if len(lengths) == 1 else _RAGGED


def _form(rows: Any) -> list[tuple[str, str, tuple[int, ...]]]:
    return [(name, str(x.dtype), tuple(x.shape[1:])) for name, x in _leaves(rows)]


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


# ---- ranks that are given different batches where one is expected


_SAMPLES = 2**20  # of a tensor, that are looked at
_APART = 1e-4  # rounding is less (a batch that each rank computed by itself); another batch is about 1 away


class GivenBatches:
    """The global batches of the first step, as this rank was given them.

    Ranks are compared with those of the same place, along an axis whose others may do with less of the batch.

    Args:
        place: this rank's, of so many ``places``.
        readers: how many ranks may have rows of their own: then others than the first's are expected of them.
        own: this rank among those that may, and how many there are: ranks of one number have the same rows.

    Attributes:
        is_open: whether they are still to be compared.
    """

    def __init__(
        self, mesh: Mesh, place: int, places: int, readers: int = 1, own: tuple[int, int] = (0, 1)
    ) -> None:
        self._mesh, self._place, self._places, self._readers = mesh, place, places, readers
        self._own = own
        self.is_open = mesh.size() > 1
        self._sum: torch.Tensor | float = 0.0
        self._weight = 0
        self._is_own = False
        self._compared, self._looks = False, True
        self._undo: Callable[[], object] = lambda: None

    def note(self, batch: Any, own: bool = False) -> None:
        """Look at a batch that is about to be trained on; ``own``: at this rank's rows of one."""
        self._is_own |= own
        if not self.is_open or not torch.is_grad_enabled():
            return
        for x in tensors_in(dict(batch) if isinstance(batch, Mapping) else batch):
            if not isinstance(x, DTensor):
                self._weight += 1
                if not self._mesh.is_dry and x.numel():
                    self._sum = self._sum + self._weight * _mark(x).to(self._mesh.device())

    def look_at(self, module: nn.Module) -> None:
        """Look, until they are compared, at batches, too, with which the program calls the model itself."""
        if not self.is_open or not self._looks:
            return
        of, model = weakref.ref(self), weakref.ref(module)  # a copy of the module has the hook, too

        def look(called: nn.Module, args: tuple[Any, ...], named: dict[str, Any]) -> None:
            given = of()
            if given is None or torch.compiler.is_compiling() or open_transform() is not None:
                return
            if called is model():
                given.note([args, named])

        self._undo = module.register_forward_pre_hook(look, with_kwargs=True).remove
        vars(look)["leave"] = self._undo

    def look_away(self) -> None:
        """Leave these calls alone: the program trains by what stands around the model."""
        self._looks = False
        self._undo()

    def compare(self, parameters: Iterable[torch.Tensor]) -> None:
        """See, once, that ranks have the same gradients, of calls that the engine knows nothing of.

        Raises:
            ValueError: on all ranks, if they have not.
        """
        if self._compared or not self.is_open or self._mesh.is_dry:
            return
        with raw():
            marks = [_mark(p.grad) * i for i, p in enumerate(parameters, 1) if p.grad is not None]
            mark = float(sum(marks)) / len(marks) ** 2 if marks else 0.0
        (lowest, *_, highest) = sorted(numbers_of_all([round(mark / _APART)], self._mesh))
        if highest[0] - lowest[0] > 1:
            raise ValueError(_ALONE)
        self._compared = True

    def shares(self) -> list[torch.Tensor]:
        """What this rank gives to the sums; nothing once they were compared."""
        if not self.is_open:
            return []
        with raw():
            of, each = self._own if self._is_own else (0, 1)
            sums = torch.zeros(self._places, each, 3, dtype=torch.float64, device=self._mesh.device())
            if self._weight:
                mark = self._sum / self._weight**2
                for i, value in enumerate((1.0, mark, mark * mark)):
                    sums[self._place, of, i] = value
            return list(sums.view(-1).unbind())

    def check(self, sums: Sequence[torch.Tensor]) -> None:
        """Compare.

        Raises:
            ValueError: on all ranks, if they were given different batches.
        """
        self._sum, self._weight = 0.0, 0
        if not self._mesh.is_dry:
            with raw():
                rows = torch.stack(list(sums)).view(self._places, -1, 3).cpu()
            if max(_apart(rows.flatten(0, 1)), default=0.0) > _APART:
                raise ValueError(_OF_ONE_BATCH if self._is_own else _DIFFERENT)
            apart = _apart(rows.sum(1))
            if apart and max(apart) <= _APART and self._is_own and self._readers > 1:
                warnings.warn(_SAME, stacklevel=user_frame()[0])
        self.is_open = False
        self._undo()


def _apart(sums: torch.Tensor) -> list[float]:
    """How far marks are apart, of each place that has some: by their number, sum and sum of squares."""
    return [math.sqrt(max(squares / n - (of / n) ** 2, 0.0)) for n, of, squares in sums.tolist() if n]


@torch.no_grad()
def _mark(x: torch.Tensor) -> torch.Tensor:
    """A number of about 1 that hangs on all elements (on some, of a large tensor) and their order."""
    with raw():
        refuse_nested(x)
        if is_sparse(x):
            x = x.detach().to_sparse_coo().coalesce().values()
        x = torch.view_as_real(x.detach().resolve_conj()) if x.is_complex() else x.detach()
        flat = x.reshape(-1)
        flat = flat[:: -(-flat.numel() // _SAMPLES)].to(torch.float64).nan_to_num(0.0, 0.0, 0.0)
        wave = (
            torch.arange(1.0, 1 + flat.numel(), dtype=torch.float64, device=flat.device).mul_(math.e).sin_()
        )
        return (flat @ wave) / flat.norm().clamp(min=1e-30) + float(x.ndim + x.shape.numel() % 1009)


_DIFFERENT = (
    "The ranks were given different batches. A batch of plain tensors is the whole global batch, equal on "
    "all ranks: each rank computes its rows of it, and those that it alone was given would be left out. "
    "Nothing was updated. If each rank loads its own rows (a DistributedSampler), write "
    "engine(engine.local_batch(batch)) in place of engine(batch), and so with train_step; or train what "
    'espalier.prepare(model, optimizer, rows="own") gives. Else give all ranks the same batch: one order, '
    "one seed."
)

_ALONE = (
    "optimizer.step(): the ranks have different gradients. The model, which is laid out at the first batch "
    "that the engine is given, is not yet: these are of calls of the model itself, which each rank made "
    "whole, on a batch of its own. Give all ranks the same, or train by engine(batch), by "
    'engine.outputs(inputs), or what espalier.prepare(model, optimizer, rows="own") gives.'
)

_OF_ONE_BATCH = (
    "Ranks that share the model's layers, along tensor axes, were given different rows. They work on one "
    "batch together, and rows of all but one of them would be left out. Nothing was updated. Give them the "
    "same rows: let samplers count the ranks that read rows of their own, DistributedSampler(data, "
    "num_replicas=ranks // tensor, rank=rank // tensor) where tensor is the last axis of the plan."
)

_SAME = (
    "All ranks gave the model the very same rows: a step computes what one rank alone would. If a DataLoader "
    "reads the whole dataset on every rank, give it a DistributedSampler; or give it to espalier.prepare, "
    "which cuts its batches over the ranks."
)


# ---- batches of a dataset


Rows = Callable[[int], slice]
# called when an epoch is asked for, it gives the state of the generator that seeds workers, and what, called
# before the first batch, gives that of a generator whose randperm is the epoch's order
Orders = Callable[[], tuple[torch.Tensor, Callable[[], torch.Tensor]]]


class Loader:
    """Global batches of a dataset, epoch after epoch. Made by :meth:`espalier.Engine.loader`.

    Iterating over it gives what is left of an epoch, or the next one. The order is that of the seed and the
    epoch alone, so that it is the same on any number of ranks.

    What else a program asks of it (``dataset``, ``batch_size``, ``sampler``, ...) is that of torch's
    ``DataLoader`` which one process would have.

    Attributes:
        epoch: the one that is given, or comes next; from 0.
        batch: how many of its batches were given.
    """

    def __init__(
        self,
        take: Callable[..., Any],
        rows: Rows,
        parts: Callable[[int], list[slice]],
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int | Orders,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        options: dict[str, Any],
    ) -> None:
        if isinstance(dataset, DataLoader):
            raise ValueError(
                "engine.loader takes a dataset, got a DataLoader: engine.loader(loader.dataset, batch_size), "
                "or espalier.prepare(model, optimizer, loader), which takes DataLoaders."
            )
        if isinstance(dataset, IterableDataset) or not hasattr(dataset, "__len__"):
            raise ValueError(
                f"engine.loader needs a dataset of known length whose rows have numbers, got "
                f"{type(dataset).__name__}. Of a stream, give each rank's rows to engine.local_batch(rows)."
            )
        if batch_size < 1:
            raise ValueError(f"batch_size = {batch_size}: expected the rows of a global batch, 1 or more.")
        ours = {"batch_sampler", "sampler", "batch_size", "generator"} & options.keys()
        if ours:
            raise ValueError(f"engine.loader draws the rows itself: leave out {', '.join(sorted(ours))}.")
        self.epoch = self.batch = 0
        self._take, self._rows, self._parts = take, rows, parts
        self._size = batch_size
        self._dataset: Any = dataset
        self._shuffle, self._drop_last = shuffle, drop_last
        self._orders = seed if callable(seed) else None
        self._seed = None if callable(seed) else seed
        self._order: torch.Tensor | None = None
        self._resumed, self._loads = False, 0
        plain: DataLoader[Any] = DataLoader(
            dataset, batch_size, collate_fn=collate_fn, drop_last=drop_last, **options
        )
        self._share = _Share()
        self._is_whole: bool | None = False  # whether each rank loads all rows; None: that is to be found out
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._share,
            collate_fn=_Collate(plain.collate_fn),
            generator=torch.Generator(),  # else each epoch would draw from torch's own
            **options,
        )
        self._collate: Callable[[list[Any]], Any] = plain.collate_fn
        self._plain = plain

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_"):
            raise AttributeError(name)
        return getattr(self._plain, name)

    def __setattr__(self, name: str, value: Any) -> None:
        if "_plain" in vars(self) and name not in vars(self) and hasattr(self._plain, name):
            raise ValueError(
                f"{name} of a loader cannot be set once ranks share its batches: give it to the DataLoader "
                "before espalier.prepare takes it, or to engine.loader."
            )
        super().__setattr__(name, value)

    def stand_for(self, loader: DataLoader[Any]) -> None:
        """Be asked in the place of a DataLoader of the program's, and give the very batches that it would."""
        self._plain, self._is_whole = loader, None

    @property
    def _length(self) -> int:
        return len(self._dataset)

    def __len__(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self._length, self._size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch, as :meth:`espalier.Engine.local_batch` gives it (all ranks must ask)."""
        resumed, self._resumed = self._resumed, False
        epoch, start = self.epoch, self.batch
        if start and not resumed:  # somebody has left the last one, or is in its midst
            epoch, start = epoch + 1, 0
        workers, draw = torch.Generator().manual_seed(_mixed(self._seed or 0, epoch) ^ 1).get_state(), None
        if self._orders is not None and not (resumed and self._order is not None and start):
            workers, draw = self._orders()
        return self._given(epoch, start, workers, draw)

    def _given(
        self, epoch: int, batch: int, workers: torch.Tensor, draw: Callable[[], torch.Tensor] | None
    ) -> Iterator[Any]:
        """Batches of an epoch. Each says where the loader stands: several may be gone through at once."""
        order = self._order if draw is None else draw()
        loads = self._loads
        drawn = self._drawn(epoch, batch, order)
        if self._is_whole is None and (first := next(drawn, None)) is not None:
            self._is_whole = self._hangs_together(first)
            drawn = itertools.chain([first], drawn)
        self._share.begin(self._loaded(drawn))
        assert self._loader.generator is not None
        self._loader.generator.set_state(workers)
        for rows in self._loader:
            with warnings.catch_warnings():
                if batch and batch + 1 == len(self):  # what is left may be too few for all ranks
                    warnings.filterwarnings("ignore", "A global batch of")
                taken = self._of_all(rows, batch) if self._is_whole else self._take(rows)
            batch += 1
            self.epoch, self.batch, self._order = epoch, batch, order
            yield taken
            if self._loads != loads:
                return  # a checkpoint was loaded meanwhile
        self.epoch, self.batch = epoch + 1, 0

    def _drawn(self, epoch: int, start: int, state: torch.Tensor | None) -> Iterator[Sequence[int]]:
        """The numbers of the rows of each batch of an epoch from ``start`` on."""
        order: Sequence[int] = range(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(_mixed(self._seed or 0, epoch))
            if state is not None:
                generator.set_state(state)
            order = torch.randperm(self._length, generator=generator).tolist()
        for i in range(start, len(self)):
            yield order[i * self._size : (i + 1) * self._size]

    def _loaded(self, drawn: Iterator[Sequence[int]]) -> Iterator[list[int]]:
        """Of the rows of each batch those that this rank loads."""
        for batch in drawn:
            yield list(batch if self._is_whole else batch[self._rows(len(batch))])

    def _hangs_together(self, numbers: Sequence[int]) -> bool:
        """Whether a batch has to be loaded as a whole, and say so where that takes longer."""
        if len(self._parts(len(numbers))) == 1:
            return True
        reason = hangs_together(self._dataset, self._collate, numbers, self._parts(len(numbers)))
        if reason is not None:
            _tell(
                f"Each rank loads all rows of each batch: {reason}, and the batches are to be those of one "
                "process. It is quicker where each loads its own: by engine.loader(dataset, ...), whose "
                "ranks draw and collate for themselves, or of a DataLoader with a DistributedSampler."
            )
        return reason is not None

    def _of_all(self, batch: Any, i: int) -> Any:
        """A global batch that every rank has loaded; one whose rows are not first stays as it is."""
        size = min(self._size, self._length - i * self._size)
        if any(x.shape[0] != size for x in tensors_in(batch) if x.ndim):
            return batch
        here = self._rows(size)
        return self._take(tree_map(lambda x: x[here] if _has_rows(x) else x, batch), size)

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and of what."""
        order = {} if self._order is None else {"order": bytes(self._order.tolist()).hex()}
        return {
            **order,
            "epoch": self.epoch,
            "batch": self.batch,
            "rows": self._length,
            "batch_size": self._size,
            "shuffle": self._shuffle,
            "seed": self._seed,
            "drop_last": self._drop_last,
        }

    def differences(self, state: dict[str, Any]) -> list[str]:
        """In what the batches of a position that was saved are others."""
        position = self.state_dict()
        wrong = [
            key for key in position if key not in ("epoch", "batch", "order") and position[key] != state[key]
        ]
        return [f"its loader has {key} = {state[key]}, this one {position[key]}" for key in wrong]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it is of other batches.
        """
        if wrong := self.differences(state):
            raise ValueError(f"The position is of other batches: {'; '.join(wrong)}.")
        self.epoch, self.batch, self._resumed = state["epoch"], state["batch"], True
        self._loads += 1
        if "order" in state:
            self._order = torch.tensor(list(bytes.fromhex(state["order"])), dtype=torch.uint8)


class _Share:
    """The numbers of the rows that this rank loads, batch by batch."""

    def __init__(self) -> None:
        self._drawn: Iterator[list[int]] = iter(())

    def begin(self, drawn: Iterator[list[int]]) -> None:
        """Give these when iterated over next."""
        self._drawn = drawn

    def __iter__(self) -> Iterator[list[int]]:
        return self._drawn


class _Collate:
    """Makes a batch of rows; None of none."""

    def __init__(self, collate: Callable[[list[Any]], Any]) -> None:
        self._collate = collate

    def __call__(self, rows: list[Any]) -> Any:
        return self._collate(rows) if rows else None


def _mixed(seed: int, epoch: int) -> int:
    """A seed for an epoch."""
    return (seed * 0x9E3779B97F4A7C15 + epoch * 0xBF58476D1CE4E5B9 + 1) % 2**63


def restore_loaders(loaders: Sequence[Loader], states: Sequence[dict[str, Any]] | None) -> None:
    """Let loaders go on where a checkpoint says, and tell of what it does not say."""
    for loader, state in zip(loaders, states or (), strict=False):
        loader.load_state_dict(state)
    if len(loaders) > len(states or ()):
        _tell(
            f"The checkpoint has the position of {len(states or ())} loader(s), and this engine has "
            f"{len(loaders)}: the others begin at their first batch."
        )
    elif not loaders and _has_shuffled():
        _tell(
            "A checkpoint does not know where a shuffled DataLoader stands: it begins anew, with rows that "
            "were trained on already. engine.loader(dataset, batch_size=..., shuffle=True), made before "
            "engine.load, goes on where it was."
        )


def _has_shuffled() -> bool:
    """Whether the process has such a loader, which is no garbage."""
    if not any(map(_is_shuffled, instances_of(DataLoader))):
        return False
    gc.collect()
    return any(map(_is_shuffled, instances_of(DataLoader)))


def _is_shuffled(loader: Any) -> bool:
    """Whether a DataLoader of torch draws at random, and says nowhere how far it is."""
    return not hasattr(loader, "state_dict") and isinstance(getattr(loader, "sampler", None), RandomSampler)


def _tell(message: str) -> None:
    warnings.warn(message, stacklevel=user_frame()[0])
