"""Global batches of a dataset, and where they stand."""

from __future__ import annotations

import gc
import itertools
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from espalier.engine.batches import has_rows
from espalier.engine.collation import hangs_together
from espalier.tensor.observers import tell
from espalier.texts import whole
from espalier.trees import instances_of, tensors_in, tree_map

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
        whole("engine.loader: batch_size", batch_size, least=-math.inf)
        if not callable(seed):
            whole("engine.loader: seed", seed, least=-math.inf)
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
            tell(
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
        return self._take(tree_map(lambda x: x[here] if has_rows(x) else x, batch), size)

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
        tell(
            f"The checkpoint has the position of {len(states or ())} loader(s), and this engine has "
            f"{len(loaders)}: the others begin at their first batch."
        )
    elif not loaders and _has_shuffled():
        tell(
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
