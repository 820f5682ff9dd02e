"""Batches of a dataset: each rank loads its rows of them, and where they stand is saved with the rest."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, RandomSampler

from espalier.tensor.caller import user_frame

Rows = Callable[[int], slice]


class Loader:
    """Global batches of a dataset, epoch after epoch. Made by :meth:`espalier.Engine.loader`.

    Iterating over it gives what is left of an epoch, or the next one. The order is that of the seed and the
    epoch alone, so that it is the same on any number of ranks.

    Attributes:
        epoch: the one that is given, or comes next; from 0.
        batch: how many of its batches were given.
    """

    def __init__(
        self,
        take: Callable[[Any], Any],
        rows: Rows,
        dataset: Dataset[Any],
        batch_size: int,
        *,
        shuffle: bool,
        seed: int,
        drop_last: bool,
        collate_fn: Callable[[list[Any]], Any] | None,
        options: dict[str, Any],
    ) -> None:
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
        self._take, self._rows, self._size = take, rows, batch_size
        self._length = len(dataset)
        self._shuffle, self._seed, self._drop_last = shuffle, seed, drop_last
        self._resumed = False
        probe: DataLoader[Any] = DataLoader(dataset, collate_fn=collate_fn)
        self._share = _Share(self)
        self._loader: DataLoader[Any] = DataLoader(
            dataset,
            batch_sampler=self._share,
            collate_fn=_Collate(probe.collate_fn),
            generator=torch.Generator(),  # else each epoch would draw from torch's own
            **options,
        )

    def __len__(self) -> int:
        """Batches of an epoch."""
        full, rest = divmod(self._length, self._size)
        return full + (rest > 0 and not self._drop_last)

    def __iter__(self) -> Iterator[Any]:
        """The rest of the epoch, as :meth:`espalier.Engine.local_batch` gives it (all ranks must ask)."""
        if self.batch and not self._resumed:  # somebody has left the last one
            self.epoch, self.batch = self.epoch + 1, 0
        self._resumed = False
        epoch = self.epoch
        self._share.begin(epoch, self.batch)
        assert self._loader.generator is not None
        self._loader.generator.manual_seed(_mixed(self._seed, epoch) ^ 1)
        for rows in self._loader:
            with warnings.catch_warnings():
                if self.batch and self.batch + 1 == len(self):  # what is left may be too few for all ranks
                    warnings.filterwarnings("ignore", "A global batch of")
                batch = self._take(rows)
            self.batch += 1
            yield batch
            if self.epoch != epoch or self._resumed:
                return  # a checkpoint was loaded meanwhile
        self.epoch, self.batch = epoch + 1, 0

    def drawn(self, epoch: int, start: int) -> Iterator[list[int]]:
        """Of each batch of an epoch from ``start`` on, the rows of the dataset that this rank loads."""
        order: Sequence[int] = range(self._length)
        if self._shuffle:
            generator = torch.Generator().manual_seed(_mixed(self._seed, epoch))
            order = torch.randperm(self._length, generator=generator).tolist()
        for i in range(start, len(self)):
            batch = order[i * self._size : (i + 1) * self._size]
            yield list(batch[self._rows(len(batch))])

    def state_dict(self) -> dict[str, Any]:
        """Where it stands, and of what."""
        return {
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
        own = self.state_dict()
        wrong = [key for key in own if key not in ("epoch", "batch") and own[key] != state[key]]
        return [f"its loader has {key} = {state[key]}, this one {own[key]}" for key in wrong]

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from there.

        Raises:
            ValueError: it is of other batches.
        """
        if wrong := self.differences(state):
            raise ValueError(f"The position is of other batches: {'; '.join(wrong)}.")
        self.epoch, self.batch, self._resumed = state["epoch"], state["batch"], True


class _Share:
    """The numbers of the rows that this rank loads, batch by batch."""

    def __init__(self, loader: Loader) -> None:
        self._loader, self._at = loader, (0, 0)

    def begin(self, epoch: int, batch: int) -> None:
        """Begin there when iterated over next."""
        self._at = epoch, batch

    def __iter__(self) -> Iterator[list[int]]:
        return self._loader.drawn(*self._at)

    def __len__(self) -> int:
        return len(self._loader)


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
    elif not loaders and any(map(_is_shuffled, gc.get_objects())):
        _tell(
            "A checkpoint does not know where a shuffled DataLoader stands: it begins anew, with rows that "
            "were trained on already. engine.loader(dataset, batch_size=..., shuffle=True), made before "
            "engine.load, goes on where it was."
        )


def _is_shuffled(thing: Any) -> bool:
    """Whether it is a DataLoader of torch that draws at random, and says nowhere how far it is."""
    if not issubclass(type(thing), DataLoader) or hasattr(thing, "state_dict"):
        return False
    return isinstance(getattr(thing, "sampler", None), RandomSampler)


def _tell(message: str) -> None:
    warnings.warn(message, stacklevel=user_frame()[0])


__all__ = ["Loader", "restore_loaders"]
