"""DeepSpeed's timers, ``engine.timers(name)``, and how fast rows pass, ``engine.tput_timer``."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

from espalier.compat.absent import or_absent
from espalier.mesh.process import running_rank

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
        if running_rank() in (ranks or [0]):
            print(f"milliseconds: {line}", flush=True)


class NoopTimer:
    """Timers that take no time, and tell none."""

    def __init__(self) -> None:
        self.timer = self

    def __call__(self, name: str) -> NoopTimer:
        return self

    def start(self) -> None:
        """Nothing."""

    def stop(self, **options: Any) -> None:
        """Nothing."""

    def reset(self) -> None:
        """Nothing."""

    def elapsed(self, **options: Any) -> float:
        """None has passed."""
        return 0.0

    mean = elapsed

    def get_timers(self) -> dict[str, Timer]:
        """There are none."""
        return {}

    def log(self, names: Iterable[str], **options: Any) -> None:
        """Nothing."""

    def get_mean(self, names: Iterable[str], **options: Any) -> dict[str, float]:
        """There are none."""
        return {}


class ThroughputTimer:
    """How fast rows pass, over all ranks, on the host's clock.

    Args:
        config: DeepSpeed's section ``timers.throughput``; ``config.enabled`` false lets it rest.
        batch_size: rows of a step, over all ranks.
        start_step: the first step that counts: those before it are slow.
        steps_per_output: how often it is told; None for never.
        logging_fn: takes the words; by default they are printed.

    Attributes:
        global_step_count: steps so far.
        total_elapsed_time: seconds of those that count.
    """

    def __init__(
        self,
        config: Any = None,
        batch_size: int | None = None,
        start_step: int = 2,
        steps_per_output: int | None = None,
        monitor_memory: bool = False,
        logging_fn: Callable[[str], object] = print,
    ) -> None:
        self._rests = config is not None and not getattr(config, "enabled", True)
        self.batch_size = 1 if batch_size is None else batch_size
        self.start_step, self.steps_per_output = start_step, steps_per_output
        self.logging = logging_fn
        self.epoch_count = self.micro_step_count = self.global_step_count = 0
        self.total_elapsed_time = self.step_elapsed_time = 0.0
        self._begun: float | None = None

    def update_epoch_count(self) -> None:
        """A new epoch begins."""
        self.epoch_count += 1
        self.micro_step_count = 0

    def start(self) -> None:
        """Before a micro-batch; not again before :meth:`stop`."""
        if not self._rests and self._begun is None:
            self._begun = time.perf_counter()

    def stop(self, global_step: bool = False, report_speed: bool = True) -> None:
        """Behind a micro-batch, and perhaps the step; nothing without :meth:`start`."""
        if self._begun is None:
            return
        seconds, self._begun = time.perf_counter() - self._begun, None
        counts = self.global_step_count >= self.start_step
        self.micro_step_count += 1
        self.global_step_count += global_step
        if not counts:
            return
        self.total_elapsed_time += seconds
        self.step_elapsed_time += seconds
        if global_step:
            every = self.steps_per_output
            if report_speed and every and self.global_step_count % every == 0:
                now = self.batch_size / self.step_elapsed_time
                self.logging(
                    f"step {self.global_step_count}: {self.avg_samples_per_sec():.2f} rows a second on "
                    f"average, {now:.2f} in this step"
                )
            self.step_elapsed_time = 0.0

    def avg_samples_per_sec(self) -> float:
        """Rows a second; ``-inf`` before the first step that counts has ended."""
        steps = self.global_step_count - self.start_step
        return self.batch_size * steps / self.total_elapsed_time if steps > 0 else float("-inf")


SynchronizedWallClockTimer = Timers

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.utils.timer",
    {
        "CudaEventTimer trim_mean": "engine.timers(name) are on the host's clock; "
        "get_accelerator().Event() is a device's"
    },
)
