"""``colossalai.logging``: Python's, with the ranks that are to log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from typing import Any

from espalier.mesh.process import running_rank


class DistributedLogger:
    """Logs on some ranks only."""

    def __init__(self, name: str) -> None:
        self.logger = logging.getLogger(name)

    def info(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Tell."""
        self._log(logging.INFO, message, ranks)

    def warning(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Warn."""
        self._log(logging.WARNING, message, ranks)

    def error(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Tell of an error."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: Any, ranks: Sequence[int] | None) -> None:
        rank = running_rank()
        if ranks is not None and rank not in ranks:
            return
        if self.logger.hasHandlers() and self.logger.isEnabledFor(level):
            self.logger.log(level, "%s", message)
        else:
            print(message, file=sys.stdout if level < logging.WARNING else sys.stderr, flush=True)


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of that name."""
    return DistributedLogger(name)


def disable_existing_loggers(include: Any = None, exclude: Any = None) -> None:
    """Nothing: others' loggers stay as they are."""
