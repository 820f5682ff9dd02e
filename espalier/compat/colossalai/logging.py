"""``colossalai.logging``: Python's, with the ranks that are to log."""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from espalier.compat.absent import or_absent
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

    def debug(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Tell in detail."""
        if self.logger.isEnabledFor(logging.DEBUG):
            self._log(logging.DEBUG, message, ranks)

    def set_level(self, level: str) -> None:
        """From which on it logs: ``"INFO"``, ``"DEBUG"``, ``"WARNING"`` or ``"ERROR"``."""
        self.logger.setLevel(level)

    def log_to_file(
        self, path: str | Path, mode: str = "a", level: str = "INFO", suffix: str | None = None
    ) -> None:
        """Write to a file of this rank, in a folder, too."""
        folder, ending = Path(path), "" if suffix is None else f"_{suffix}"
        folder.mkdir(parents=True, exist_ok=True)
        handler = logging.FileHandler(folder / f"rank_{running_rank()}{ending}.log", mode)
        handler.setLevel(level)
        handler.setFormatter(logging.Formatter("%(name)s - %(levelname)s: %(message)s"))
        self.logger.addHandler(handler)
        self.logger.setLevel(min(self.logger.getEffectiveLevel(), handler.level))

    def error(self, message: Any, ranks: Sequence[int] | None = None) -> None:
        """Tell of an error."""
        self._log(logging.ERROR, message, ranks)

    def _log(self, level: int, message: Any, ranks: Sequence[int] | None) -> None:
        rank = running_rank()
        if ranks is not None and rank not in ranks:
            return
        is_taken = self.logger.hasHandlers() and self.logger.isEnabledFor(level)
        if is_taken:
            self.logger.log(level, "%s", message)
        if not is_taken or not self._is_shown():
            print(message, file=sys.stdout if level < logging.WARNING else sys.stderr, flush=True)

    def _is_shown(self) -> bool:
        """Whether what it is told goes elsewhere than to the files of :meth:`log_to_file`."""
        own = [x for x in self.logger.handlers if not isinstance(x, logging.FileHandler)]
        parent = self.logger.parent
        return bool(own) or (self.logger.propagate and parent is not None and parent.hasHandlers())


def get_dist_logger(name: str = "colossalai") -> DistributedLogger:
    """The logger of that name."""
    return DistributedLogger(name)


def disable_existing_loggers(include: Any = None, exclude: Any = None) -> None:
    """Nothing: others' loggers stay as they are."""


__all__ = ["DistributedLogger", "disable_existing_loggers", "get_dist_logger"]

__getattr__ = or_absent(__name__, "colossalai.logging", {}, elsewhere={"logger": __name__})
