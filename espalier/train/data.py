"""Batches, drawn from (seed, step, row) alone, the same whatever the number of ranks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from importlib.util import find_spec
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol, Self

import numpy as np
import torch

from espalier.train.corpus import Corpus, Tokens
from espalier.train.job import Job
from espalier.train.model_spec import Facts, Labels, imported
from espalier.train.sections import FolderData, OwnData, TextData, TokenData

# ---- images in folders, one for each class


_ENDINGS = frozenset({".png", ".jpg", ".jpeg", ".bmp", ".webp", ".ppm", ".tif", ".tiff"})


@dataclass(frozen=True)
class ImageFolder:
    """Images and the numbers of their classes: ``pixel_values`` [channels, height, width] and ``labels``.

    Attributes:
        files: each with its class.
        image: [channels, height, width] that they are brought to.
        mean, std: by channel: values from 0 to 1 less the mean, divided by std.
        flip: mirror half of them.
    """

    files: Sequence[tuple[Path, int]]
    image: tuple[int, int, int]
    mean: Sequence[float]
    std: Sequence[float]
    flip: bool

    @classmethod
    def pair(cls, data: FolderData, image: tuple[int, int, int], classes: int) -> tuple[Self, Self]:
        """What to train and what to validate on.

        Raises:
            ValueError: there are no images, or of more classes than the model has.
        """
        if find_spec("PIL") is None:
            reason = "images are read by pillow, which is not installed: pip install 'espalier[data]'"
            raise ValueError(reason)
        root = Path(data.source)
        if not root.is_dir():
            raise ValueError(f"data.source = {data.source!r} is no folder")
        inner = [root / name for name in ("train", "val") if (root / name).is_dir()]
        if len(inner) == 2:
            names = _classes(inner[0], classes)
            train, val = ([(p, i) for i, c in enumerate(names) for p in _files(at / c)] for at in inner)
        else:
            train, val = [], []
            for i, name in enumerate(_classes(root, classes)):
                files = _files(root / name)
                # spread over each class, in the order of names
                kept = max(round(len(files) * data.val_fraction), 1) if len(files) > 1 else 0
                apart = {j * len(files) // kept for j in range(kept)}
                train += [(p, i) for j, p in enumerate(files) if j not in apart]
                val += [(p, i) for j, p in enumerate(files) if j in apart]
        if not train or not val:
            raise ValueError(f"data.source = {data.source!r} has too few images to train and to validate on")
        channels = image[0]
        for key, values in (("mean", data.mean), ("std", data.std)):
            if len(values) not in (1, channels):
                raise ValueError(f"data.{key} = {values}: expected one number, or one for each of {channels}")
        mean, std = (list(v) * (channels // len(v)) for v in (data.mean, data.std))
        return cls(train, image, mean, std, data.flip), cls(val, image, mean, std, False)

    def __len__(self) -> int:
        return len(self.files)

    def row(self, index: int, draw: np.random.Generator) -> Mapping[str, Any]:
        """One image."""
        from PIL import Image

        path, label = self.files[index]
        channels, height, width = self.image
        with Image.open(path) as opened:
            colours = opened.convert("L" if channels == 1 else "RGB")
            resized = colours.resize((width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(resized, np.float64).reshape(height, width, -1).transpose(2, 0, 1) / 255
        if self.flip and draw.random() < 0.5:
            pixels = pixels[:, :, ::-1]
        mean, std = (np.array(x).reshape(-1, 1, 1) for x in (self.mean, self.std))
        return {"pixel_values": (pixels - mean) / std, "labels": label}


def _classes(root: Path, most: int) -> list[str]:
    names = sorted(p.name for p in root.iterdir() if p.is_dir() and not p.name.startswith("."))
    if not names:
        raise ValueError(f"{root} has no folders: expected one for each class")
    if len(names) > most:
        raise ValueError(f"{root} has {len(names)} classes, but the model tells {most} apart")
    return names


def _files(folder: Path) -> list[Path]:
    if not folder.is_dir():
        return []
    return sorted(p for p in folder.rglob("*") if p.suffix.lower() in _ENDINGS and p.is_file())


# ---- batches

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]
_MASKED_SHARE = 0.15
_MORE_TO_VALIDATE = "give more text, a larger data.val_fraction, or a text of its own as data.validation"


class BatchSource(Protocol):
    """An endless sequence of global batches."""

    @property
    def size(self) -> int:
        """Rows of a global batch."""
        ...

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Rows ``rows`` of the global batch of ``step``; first dim of each tensor: the rows."""
        ...


@dataclass(frozen=True)
class TextBatches:
    """Windows of a text: ``input_ids`` and ``labels``, each [rows, sequence], int64.

    Attributes:
        tokens: [n] token ids, memory-mapped.
        size: rows of a global batch.
        sequence: tokens of a row.
        labels: what the model wants as labels.
        seed: of the draws.
        mask: token that hides the masked ones.
        spread: None draws windows at random; a number of batches spreads exactly
            so many evenly over the tokens, for validation.
    """

    tokens: np.ndarray[Any, Any]
    size: int
    sequence: int
    labels: Labels
    seed: int
    mask: int = 1
    spread: int | None = None

    def __post_init__(self) -> None:
        _check_length(self.tokens, self.sequence)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Rows of the global batch of ``step``."""
        return _collected(self, step, rows)

    def row(self, step: int, row: int, draw: np.random.Generator) -> Pair:
        """Inputs and labels of one row."""
        start = self._start(step, row, draw)
        window = self.tokens[start : start + self.sequence + 1].astype(np.int64)
        return _aligned(window, self.labels, self.mask, draw)

    def _start(self, step: int, row: int, draw: np.random.Generator) -> int:
        last = len(self.tokens) - self.sequence - 1
        if self.spread is None:
            return int(draw.integers(last + 1))
        index = (step % self.spread) * self.size + row
        return index * last // max(self.spread * self.size - 1, 1)


@dataclass(frozen=True)
class TokenBatches:
    """Random tokens: ``input_ids`` and ``labels``, each [rows, sequence], int64.

    A share ``ignored`` of the labels is -100, drawn for each row anew.
    """

    vocab_size: int
    size: int
    sequence: int
    labels: Labels
    seed: int
    ignored: float

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Rows of the global batch of ``step``."""
        return _collected(self, step, rows)

    def row(self, step: int, row: int, draw: np.random.Generator) -> Pair:
        """Inputs and labels of one row."""
        window = draw.integers(self.vocab_size, size=self.sequence + 1)
        inputs, labels = _aligned(window, self.labels, 0, draw)
        if self.labels == "masked":
            return inputs, labels
        return inputs, np.where(draw.random(self.sequence) < self.ignored * 2 * draw.random(), -100, labels)


@dataclass(frozen=True)
class ImageBatches:
    """Random images: ``pixel_values`` [rows, channels, height, width] and ``labels`` [rows]."""

    image: tuple[int, int, int]
    classes: int
    size: int
    seed: int
    dtype: torch.dtype

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Rows of the global batch of ``step``."""
        wanted = range(self.size)[rows]
        pixels = np.empty((len(wanted), *self.image))
        labels = np.empty(len(wanted), np.int64)
        for index, row in enumerate(wanted):
            draw = np.random.default_rng((self.seed, step, row))
            pixels[index] = draw.standard_normal(self.image)
            labels[index] = draw.integers(self.classes)
        return {
            "pixel_values": torch.from_numpy(pixels).to(self.dtype),
            "labels": torch.from_numpy(labels),
        }


def training_batches(
    job: Job, corpus: Corpus | None, *, size: int, sequence: int, seed: int, dtype: torch.dtype
) -> BatchSource:
    """The batches to train on.

    Args:
        job: says which kind of data.
        corpus: the prepared text, for text.
        size: rows of the global batch.
        sequence: tokens of a row.
        seed: of the draws.
        dtype: of images.
    """
    data = job.data
    if corpus is not None:
        assert isinstance(data, TextData)
        alone = corpus.parts[0][1]
        if data.rows == "packed" and data.drawn and len(corpus.parts) == 1 and alone.learned is None:
            return TextBatches(alone.ids, size, sequence, job.facts.labels, seed, corpus.mask)
        return SampledBatches(_of_texts(job, corpus.parts, corpus, sequence), size, seed, dtype)
    if isinstance(data, FolderData | OwnData):
        return SampledBatches([(1.0, _apart(job)[0])], size, seed, dtype)
    return _random_batches(job, job.facts, size, sequence, seed, dtype)


def check_data(job: Job, corpus: Corpus | None, *, size: int, sequence: int, validated: bool) -> None:
    """Look before ranks start whether there is enough to draw batches from.

    A dataset of the user's own is left to the ranks: making it may take its time.

    Args:
        job: says which kind of data.
        corpus: the prepared text, for text.
        size: rows of the global batch.
        sequence: tokens of a row.
        validated: whether batches to validate on will be drawn, too.

    Raises:
        ValueError: where there is not.
    """
    if isinstance(job.data, OwnData):
        return
    training_batches(job, corpus, size=size, sequence=sequence, seed=0, dtype=torch.float32)
    if validated:
        validation_batches(job, corpus, dtype=torch.float32)


def validation_batches(job: Job, corpus: Corpus | None, *, dtype: torch.dtype) -> BatchSource:
    """The batches to validate on: spread over what is kept apart, or other random ones."""
    train, data = job.train, job.data
    size, sequence, count = train.batch_size, train.sequence, train.eval_batches
    if corpus is not None:
        assert isinstance(data, TextData)
        alone = corpus.validation[0][1]
        if data.rows == "packed":
            for _, text in corpus.validation:
                _check_length(text.ids, sequence, "kept for validation", _MORE_TO_VALIDATE)
        if data.rows == "packed" and len(corpus.validation) == 1 and alone.learned is None:
            labels, mask = job.facts.labels, corpus.mask
            return TextBatches(alone.ids, size, sequence, labels, train.seed, mask, spread=count)
        held = _of_texts(job, corpus.validation, corpus, sequence, drawn=False)
        return SampledBatches(held, size, train.seed, dtype, first=0, ordered=count)
    if isinstance(data, FolderData | OwnData):
        samples = _apart(job)[1]
        return SampledBatches([(1.0, samples)], size, train.seed, dtype, first=0, ordered=count)
    other = train.seed + 2**32
    return _random_batches(job, job.facts, size, sequence, other, dtype)


def _of_texts(
    job: Job, texts: Sequence[tuple[float, Tokens]], corpus: Corpus, sequence: int, drawn: bool = True
) -> list[tuple[float, Samples]]:
    data, labels, mask = job.data, job.facts.labels, corpus.mask
    assert isinstance(data, TextData)
    if data.rows == "padded":
        return [(weight, Padded(text, sequence, labels, mask)) for weight, text in texts]
    drawn = drawn and data.drawn
    return [(weight, Windows(text, sequence, labels, mask, drawn)) for weight, text in texts]


def _apart(job: Job) -> tuple[Samples, Samples]:
    """What a job trains and validates on, of images or of the user's own data."""
    data, facts = job.data, job.facts
    if isinstance(data, FolderData):
        assert facts.image is not None and facts.classes is not None
        train, val = ImageFolder.pair(data, facts.image, facts.classes)
        return train, val
    assert isinstance(data, OwnData)
    sets = imported(data.build, job.folder)(**data.arguments)
    train_set, val_set = sets if isinstance(sets, tuple) else (sets, sets)
    for dataset in (train_set, val_set):
        if not hasattr(dataset, "__len__") or not hasattr(dataset, "__getitem__"):
            kind = type(dataset).__name__
            raise ValueError(f"data.build gave a {kind}, expected a dataset with len() and rows by number")
    return Own(train_set), Own(val_set)


def _random_batches(
    job: Job, facts: Facts, size: int, sequence: int, seed: int, dtype: torch.dtype
) -> BatchSource:
    if facts.image is not None:
        assert facts.classes is not None
        return ImageBatches(facts.image, facts.classes, size, seed, dtype)
    assert facts.vocab_size is not None and isinstance(job.data, TokenData)
    return TokenBatches(facts.vocab_size, size, sequence, facts.labels, seed, job.data.ignored)


def _collected(of: TextBatches | TokenBatches, step: int, rows: slice) -> dict[str, torch.Tensor]:
    wanted = range(of.size)[rows]
    inputs = np.empty((len(wanted), of.sequence), np.int64)
    labels = np.empty_like(inputs)
    for index, row in enumerate(wanted):
        inputs[index], labels[index] = of.row(step, row, np.random.default_rng((of.seed, step, row)))
    return {"input_ids": torch.from_numpy(inputs), "labels": torch.from_numpy(labels)}


def _aligned(window: np.ndarray[Any, Any], labels: Labels, mask: int, draw: np.random.Generator) -> Pair:
    """Inputs and labels, each [sequence], from a window of sequence + 1 tokens."""
    inputs = window[:-1]
    if labels == "next":
        return inputs, window[1:]
    if labels == "same":
        return inputs, inputs
    hidden = draw.random(len(inputs)) < _MASKED_SHARE
    hidden[draw.integers(len(inputs))] = True
    return np.where(hidden, mask, inputs), np.where(hidden, inputs, -100)


def _check_length(
    tokens: np.ndarray[Any, Any], sequence: int, part: str = "to train on", more: str = "give more text"
) -> None:
    if len(tokens) <= sequence:
        raise ValueError(
            f"a sequence of {sequence} tokens needs a text of at least {sequence + 1}, but the part of it "
            f"{part} has {len(tokens)}: shorten train.sequence, or {more}"
        )


# ---- samples that are there, each with its number: in an order drawn for each epoch, or mixed by shares


class Samples(Protocol):
    """Samples by number."""

    def __len__(self) -> int:
        """How many there are."""
        ...

    def row(self, index: int, draw: np.random.Generator) -> Mapping[str, Any]:
        """One of them: arrays or numbers by name; the draws are those of its place in the run."""
        ...


@dataclass(frozen=True)
class Windows:
    """Rows of a text, one behind the other; or, where they are drawn, as many that begin anywhere.

    Attributes:
        text: the tokens.
        sequence: of a row.
        labels: what the model wants as labels.
        mask: token that hides the masked ones.
        drawn: whether rows begin anywhere.
    """

    text: Tokens
    sequence: int
    labels: Labels
    mask: int
    drawn: bool = False

    def __post_init__(self) -> None:
        _check_length(self.text.ids, self.sequence)

    def __len__(self) -> int:
        return (len(self.text.ids) - 1) // self.sequence

    def row(self, index: int, draw: np.random.Generator) -> Mapping[str, Any]:
        """One row."""
        start = index * self.sequence
        if self.drawn:
            start = int(draw.integers(len(self.text.ids) - self.sequence))
        stop = start + self.sequence + 1
        learned = None if self.text.learned is None else self.text.learned[start:stop]
        return _labelled(self.text.ids[start:stop].astype(np.int64), learned, self.labels, self.mask, draw)


@dataclass(frozen=True)
class Padded:
    """Documents, a row each: what is longer than it is cut off, what is shorter filled up, without labels."""

    text: Tokens
    sequence: int
    labels: Labels
    mask: int

    @cached_property
    def _starts(self) -> np.ndarray[Any, Any]:
        starts = self.text.starts
        return np.array([0, len(self.text.ids)]) if starts is None else starts

    def __len__(self) -> int:
        return len(self._starts) - 1

    def row(self, index: int, draw: np.random.Generator) -> Mapping[str, Any]:
        """One row."""
        start, stop = int(self._starts[index]), int(self._starts[index + 1])
        n = min(stop - start, self.sequence + 1)
        window = np.zeros(self.sequence + 1, np.int64)
        window[:n] = self.text.ids[start : start + n]
        learned = np.zeros(self.sequence + 1, np.uint8)
        learned[:n] = 1 if self.text.learned is None else self.text.learned[start : start + n]
        row = dict(_labelled(window, learned, self.labels, self.mask, draw))
        if self.labels == "masked":  # others look to the left alone, where no filling is
            row["attention_mask"] = (np.arange(self.sequence) < n).astype(np.int64)
        return row


def _labelled(
    window: np.ndarray[Any, Any],
    learned: np.ndarray[Any, Any] | None,
    labels: Labels,
    mask: int,
    draw: np.random.Generator,
) -> Mapping[str, Any]:
    """Inputs and labels, which are -100 where nothing is learned."""
    inputs, wanted = _aligned(window, labels, mask, draw)
    if learned is not None:
        counts = learned[1:] if labels == "next" else learned[:-1]
        wanted = np.where(counts, wanted, -100)
        if labels == "masked":
            inputs = np.where(counts, inputs, window[:-1])
    return {"input_ids": inputs, "labels": wanted}


@dataclass(frozen=True)
class Own:
    """The user's dataset."""

    dataset: Any

    def __len__(self) -> int:
        return len(self.dataset)

    def row(self, index: int, draw: np.random.Generator) -> Mapping[str, Any]:
        """One row."""
        row = self.dataset[index]
        if not isinstance(row, Mapping):
            raise ValueError(
                f"data.build: row {index} of the dataset is a {type(row).__name__}, expected a dict of what "
                "the model is called with: input_ids, labels, ..."
            )
        return row


@dataclass(frozen=True)
class SampledBatches:
    """Batches of samples: of each source by its share, each sample once before any comes again.

    Attributes:
        sources: samples, each with its share.
        size: rows of a global batch.
        seed: of the order and of what samples draw.
        dtype: of what is not whole numbers.
        first: the step that is counted as the first.
        ordered: take them as they stand, spread evenly over so many batches, for validation; 0: shuffled.
    """

    sources: Sequence[tuple[float, Samples]]
    size: int
    seed: int
    dtype: torch.dtype = torch.float32
    first: int = 1
    ordered: int = 0

    def __post_init__(self) -> None:
        if not all(len(samples) for _, samples in self.sources):
            raise ValueError(
                "there is nothing to draw from in one of the sources (or in what is kept of it for "
                "validation): give more data, or another data.val_fraction"
            )

    @cached_property
    def _mix(self) -> Mix:
        return Mix(tuple(weight for weight, _ in self.sources), self.seed)

    def batch(self, step: int, rows: slice = slice(None)) -> dict[str, torch.Tensor]:
        """Rows of the global batch of ``step``."""
        samples = [self._row(step, row) for row in range(self.size)[rows]]
        if not samples:  # of the shapes and dtypes that rows have
            return {name: x[:0] for name, x in self._stacked([self._row(step, 0)]).items()}
        return self._stacked(samples)

    def _row(self, step: int, row: int) -> Mapping[str, Any]:
        number = (step - self.first) * self.size + row
        which, index = self._mix.place(number)
        samples = self.sources[which][1]
        count = len(samples)
        if self.ordered:
            total = max(round(self.ordered * self.size * self._mix.shares[which]), 1)
            index = (index % total) * count // total if count > total else index % count
        else:
            epoch, index = divmod(index, count)
            index = shuffled(index, count, (self.seed, which, epoch))
        return samples.row(index, np.random.default_rng((self.seed, step, row)))

    def _stacked(self, samples: Sequence[Mapping[str, Any]]) -> dict[str, torch.Tensor]:
        stacked = {}
        for name in samples[0]:
            x = torch.stack([torch.as_tensor(row[name]) for row in samples])
            stacked[name] = x.to(self.dtype) if x.is_floating_point() else x
        return stacked


@dataclass(frozen=True)
class Mix:
    """Which source a row is of, and the how-many-eth of it: exact in each block of rows, in a drawn order.

    Attributes:
        weights: of the sources.
        seed: of the order.
    """

    weights: tuple[float, ...]
    seed: int

    @cached_property
    def shares(self) -> list[float]:
        """Of all rows."""
        return [weight / sum(self.weights) for weight in self.weights]

    def place(self, number: int) -> tuple[int, int]:
        """The source and the number in it of the row of this number in the run."""
        if len(self.weights) == 1:
            return 0, number
        size = max(1000, math.ceil(2 / min(self.shares)))  # so that each source has a row in each block
        block, at = divmod(number, size)
        which, counted = _block(tuple(self.shares), self.seed, block, size)
        return int(which[at]), int(counted[at])


@lru_cache(maxsize=4)
def _block(
    shares: tuple[float, ...], seed: int, block: int, size: int
) -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """The source of each row of a block, and the number of each in its source."""
    before, after = (_counts(shares, number * size) for number in (block, block + 1))
    which = np.repeat(np.arange(len(shares)), np.subtract(after, before))
    which = np.random.default_rng((seed, block, len(shares))).permutation(which)
    counted = np.empty(size, np.int64)
    for i, start in enumerate(before):
        own = which == i
        counted[own] = start + np.arange(own.sum())
    return which, counted


def _counts(shares: tuple[float, ...], rows: int) -> list[int]:
    """Rows of each source among so many: as near to their shares as whole numbers are."""
    edges = [round(float(edge) * rows) for edge in np.cumsum([0.0, *shares[:-1]])]
    return [after - before for before, after in pairwise([*edges, rows])]


def shuffled(index: int, count: int, key: tuple[int, ...]) -> int:
    """Where the ``index``-th of ``count`` is in an order that a key draws, without making all of it.

    A Feistel network of four rounds over the next power of four, gone through again until it lands below
    ``count`` (Black and Rogaway, Ciphers with arbitrary finite domains, 2002).
    """
    half = max((max(count - 1, 1).bit_length() + 1) // 2, 1)
    keys = np.random.SeedSequence(key).generate_state(4, np.uint64)
    low = (1 << half) - 1
    while True:
        left, right = index >> half, index & low
        for each in keys:
            mixed = (right + int(each)) * 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
            mixed ^= mixed >> 29
            mixed = mixed * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
            left, right = right, left ^ (mixed >> 32 & low)
        index = left << half | right
        if index < count:
            return index
