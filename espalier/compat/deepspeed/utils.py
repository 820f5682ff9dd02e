"""``deepspeed.utils``: what training programs take from there."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import torch.distributed as dist

logger = logging.getLogger("deepspeed")


def log_dist(message: str, ranks: Sequence[int] | None = None, level: int = logging.INFO) -> None:
    """Log on some ranks; by default on all."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    if not ranks or -1 in ranks or rank in ranks:
        logger.log(level, "[Rank %d] %s", rank, message)


class RepeatingLoader:
    """A loader that begins anew when it ends."""

    def __init__(self, loader: Iterable[Any]) -> None:
        self.loader = loader
        self._batches: Iterator[Any] = iter(loader)

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            return next(self._batches)
        except StopIteration:
            self._batches = iter(self.loader)
            return next(self._batches)
