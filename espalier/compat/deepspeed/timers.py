"""DeepSpeed's timers, ``engine.timers(name)``, and how fast rows pass, ``engine.tput_timer``."""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Final

import torch.distributed as dist

FORWARD: Final = "fwd"
BACKWARD: Final = "bwd"
STEP: Final = "step"


class Timer:
    """Times on the host's clock, one after the other, of which milliseconds are told."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._begun: float | None = None
        self._seconds: list[float] = []

    def start(self) -> None:
        """Begin.

        Raises:
            ValueError: it runs.
        """
        if self._begun is not None:
            raise ValueError(f"timers({self.name!r}).start(): it runs already. Call stop() first.")
        self._begun = time.perf_counter()

    def stop(self, reset: bool = False, record: bool = False) -> None:
        """End.

        Raises:
            ValueError: it does not run.
        """
        if self._begun is None:
            raise ValueError(f"timers({self.name!r}).stop(): it does not run. Call start() first.")
        self._seconds.append(time.perf_counter() - self._begun)
        self._begun = None

    def reset(self) -> None:
        """Forget."""
        self._begun = None
        self._seconds.clear()

    def elapsed(self, reset: bool = True) -> float:
        """Milliseconds since it was last reset; one that runs goes on."""
        if runs := self._begun is not None:
            self.stop()
        milliseconds = 1000 * sum(self._seconds)
        if reset:
            self.reset()
        if runs:
            self.start()
        return milliseconds

    def mean(self) -> float:
        """Of the times, in milliseconds; 0 without any."""
        return 1000 * sum(self._seconds) / len(self._seconds) if self._seconds else 0.0


class Timers:
    """Timers by name: ``fwd``, ``bwd`` and ``step`` are the engine's own."""

    def __init__(self) -> None:
        self.timers: dict[str, Timer] = {}

    def __call__(self, name: str) -> Timer:
        return self.timers.setdefault(name, Timer(name))

    def get_timers(self) -> dict[str, Timer]:
        """All that there are."""
        return self.timers

    def get_mean(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> dict[str, float]:
        """Of each that there is, the mean in milliseconds."""
        means = {name: self.timers[name].mean() / normalizer for name in names if name in self.timers}
        if reset:
            for name in means:
                self.timers[name].reset()
        return means

    def told(self, names: Iterable[str], normalizer: float = 1.0, reset: bool = True) -> str:
        """A line of what has elapsed."""
        there = [name for name in names if name in self.timers]
        return ", ".join(f"{name} {self.timers[name].elapsed(reset) / normalizer:.2f}" for name in there)

    def log(
        self,
        names: Iterable[str],
        normalizer: float = 1.0,
        reset: bool = True,
        memory_breakdown: bool = False,
        ranks: Sequence[int] | None = None,
    ) -> None:
        """Print, on rank 0 or on ``ranks``, the milliseconds of each."""
        line = self.told(names, normalizer, reset)
        if (dist.get_rank() if dist.is_initialized() else 0) in (ranks or [0]):
            print(f"milliseconds: {line}", flush=True)
