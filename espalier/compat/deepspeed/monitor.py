"""Where events of a run go: DeepSpeed's monitors, and its count of operations."""

from __future__ import annotations

import csv
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final, Protocol

from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from espalier.compat.absent import or_absent
from espalier.mesh.process import running_rank
from espalier.tensor.dry_runs import UNCOUNTED

Event = tuple[str, float, int]


class Writer(Protocol):
    """Takes events."""

    def write_events(self, events: Iterable[Event]) -> None:
        """Write them: name, value, and the number of samples so far."""


class Monitor:
    """All writers that a configuration asks for.

    Args:
        values: of the configuration, dotted; none on ranks that write nothing.

    Attributes:
        writers: may be added to.
    """

    def __init__(self, values: Mapping[str, Any]) -> None:
        self.writers: list[Writer] = []
        for name, kind in (("csv_monitor", CSV), ("tensorboard", TensorBoard), ("wandb", WandB)):
            if values.get(f"{name}.enabled"):
                self.writers.append(kind({key: values.get(f"{name}.{key}") for key in _OPTIONS}))

    @property
    def enabled(self) -> bool:
        """Whether anybody writes."""
        return bool(self.writers)

    def write_events(self, events: Iterable[Event]) -> None:
        """Write events: name, value, and the number of samples so far."""
        events = list(events)
        for writer in self.writers:
            writer.write_events(events)


class MonitorMaster(Monitor):
    """Those of a configuration, on the first rank.

    Args:
        monitor_config: ``DeepSpeedConfig(config).monitor_config``.
    """

    def __init__(self, monitor_config: Any) -> None:
        sections = {} if running_rank() else vars(monitor_config)
        super().__init__(
            {
                f"{name}.{key}": value
                for name, section in sections.items()
                if name != "enabled"
                for key, value in vars(section).items()
            }
        )


_OPTIONS = ("output_path", "job_name", "team", "group", "project")


class CSV:
    """A file for each name: number of samples, value."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        job = options["job_name"] or "DeepSpeedJobName"
        self.folder = Path(options["output_path"] or "") / job
        self.folder.mkdir(parents=True, exist_ok=True)

    def write_events(self, events: Iterable[Event]) -> None:
        """Append them."""
        for name, value, samples in events:
            path = self.folder / f"{name.replace('/', '_').replace(' ', '_')}.csv"
            is_new = not path.exists()
            with path.open("a", newline="") as file:
                rows = csv.writer(file)
                if is_new:
                    rows.writerow(["step", name.rpartition("/")[2]])
                rows.writerow([samples, value])


class TensorBoard:
    """Torch's writer, which needs the package tensorboard."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        from torch.utils.tensorboard import SummaryWriter  # fails by saying what is missing

        job = options["job_name"] or "DeepSpeedJobName"
        self.writer: Any = SummaryWriter(str(Path(options["output_path"] or "") / job))

    def write_events(self, events: Iterable[Event]) -> None:
        """Write them."""
        for event in events:
            self.writer.add_scalar(*event)
        self.writer.flush()


class WandB:
    """The package wandb."""

    def __init__(self, options: Mapping[str, Any]) -> None:
        import wandb

        self.run = wandb.init(
            project=options["project"] or "deepspeed", group=options["group"], entity=options["team"]
        )

    def write_events(self, events: Iterable[Event]) -> None:
        """Write them."""
        for name, value, samples in events:
            self.run.log({name: value}, step=samples)


class Flops:
    """Counts the floating-point operations of one step on this rank, and its time."""

    def __init__(self, values: Mapping[str, Any], module: nn.Module) -> None:
        self.at = values.get("flops_profiler.profile_step", 1)
        self._path = values.get("flops_profiler.output_file")
        self._parameters = sum(p.numel() for p in module.parameters())
        self._counter: FlopCounterMode | None = None
        self._begin = 0.0

    def begin(self, step: int) -> None:
        """Before each forward pass."""
        if step == self.at and self._counter is None:
            self._counter = FlopCounterMode(display=False, custom_mapping=UNCOUNTED)
            self._begin = time.perf_counter()
            self._counter.__enter__()

    def end(self, step: int, rank: int) -> None:
        """After each step."""
        if step != self.at or self._counter is None:
            return
        self._counter.__exit__(None, None, None)
        seconds, count = time.perf_counter() - self._begin, self._counter.get_total_flops()
        self._counter = None
        report = (
            f"step {step}: {self._parameters:,} parameters; {count:,} floating-point operations of matrix "
            f"products, convolutions and attention on each rank in {seconds:.3f} s"
        )
        if rank == 0 and self._path:
            Path(self._path).write_text(f"{report}\n", "utf-8")
        elif rank == 0:
            print(report, flush=True)


_FILES: Final = MappingProxyType({"enabled": False, "output_path": "", "job_name": "DeepSpeedJobName"})
_SECTIONS: Final[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
    {
        "tensorboard": _FILES,
        "wandb": MappingProxyType({"enabled": False, "group": None, "team": None, "project": "deepspeed"}),
        "csv_monitor": _FILES,
    }
)


def get_monitor_config(param_dict: Mapping[str, Any]) -> SimpleNamespace:
    """``tensorboard``, ``wandb`` and ``csv_monitor`` with what is given and defaults; ``enabled``: is any of
    them."""
    sections = {
        name: SimpleNamespace(**{**defaults, **(param_dict.get(name) or {})})
        for name, defaults in _SECTIONS.items()
    }
    return SimpleNamespace(**sections, enabled=any(section.enabled for section in sections.values()))


__all__ = ["CSV", "Flops", "Monitor", "MonitorMaster", "TensorBoard", "WandB", "get_monitor_config"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.monitor",
    {
        "csvMonitor TensorBoardMonitor WandbMonitor": "MonitorMaster(config) writes all that a configuration "
        "asks for, and engine.monitor.writers may be added to",
        "comet CometMonitor EventsLogScheduler": "engine.monitor.writers.append(...) with a write_events of "
        "your own",
        "utils check_tb_availability check_wandb_availability check_comet_availability": (
            "a package that is missing is told when its writer is made"
        ),
        "TensorBoardConfig WandbConfig CSVConfig CometConfig DeepSpeedMonitorConfig": (
            "get_monitor_config(config) takes a dict"
        ),
    },
    elsewhere={"monitor config csv_monitor tensorboard wandb": __name__},
)
