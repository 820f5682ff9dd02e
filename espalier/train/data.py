"""Batches, drawn from (seed, step, row) alone: the same whatever the number of ranks."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import torch

from espalier.train.job import Job, TextData, TokenData
from espalier.train.specs import Facts, Labels
from espalier.train.text import Text, prepare_text

Pair = tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]

_MASKED_SHARE = 0.15


class Batches(Protocol):
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
        if len(self.tokens) <= self.sequence:
            raise ValueError(
                f"a sequence of {self.sequence} tokens needs a text of at least {self.sequence + 1}, "
                f"but this part of it has {len(self.tokens)}; shorten train.sequence or give more text"
            )

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


def prepare(job: Job, report: Callable[[str], None] = lambda message: None) -> Text | None:
    """Prepare the job's text, or find it prepared; None for random data.

    Raises:
        ValueError: for a source without text, or too small a vocabulary.
    """
    if not isinstance(job.data, TextData):
        return None
    assert job.facts.vocab_size is not None
    return prepare_text(
        source=job.data.source,
        pattern=job.data.pattern,
        cache=Path(job.data.cache),
        vocab_size=job.facts.vocab_size,
        max_bytes=job.data.max_bytes,
        val_fraction=job.data.val_fraction,
        tokenizer=job.tokenizer,
        report=report,
    )


def training_batches(
    job: Job, text: Text | None, *, size: int, sequence: int, seed: int, dtype: torch.dtype
) -> Batches:
    """The batches to train on.

    Args:
        job: says which kind of data.
        text: the prepared text, for text.
        size: rows of the global batch.
        sequence: tokens of a row.
        seed: of the draws.
        dtype: of images.
    """
    if text is not None:
        return TextBatches(text.train, size, sequence, job.facts.labels, seed, text.mask)
    return _random_batches(job, job.facts, size, sequence, seed, dtype)


def validation_batches(job: Job, text: Text | None, *, dtype: torch.dtype) -> Batches:
    """The batches to validate on: windows spread over the text kept apart, or other random ones."""
    train = job.train
    if text is not None:
        return TextBatches(
            text.val,
            train.batch_size,
            train.sequence,
            job.facts.labels,
            train.seed,
            text.mask,
            spread=train.eval_batches,
        )
    other = train.seed + 2**32
    return _random_batches(job, job.facts, train.batch_size, train.sequence, other, dtype)


def _random_batches(
    job: Job, facts: Facts, size: int, sequence: int, seed: int, dtype: torch.dtype
) -> Batches:
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
