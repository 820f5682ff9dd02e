"""Pipelines: schedules as data, a model split into stages, and what runs one by the other."""

from espalier.parallel.pipeline.actions import Action, Kind, Schedule
from espalier.parallel.pipeline.check import Report, ScheduleError, check, live
from espalier.parallel.pipeline.generate import KINDS, generate
from espalier.parallel.pipeline.measure import measured
from espalier.parallel.pipeline.messages import with_messages, without_messages
from espalier.parallel.pipeline.order import Costs, read_times
from espalier.parallel.pipeline.simulate import Span, Timeline, simulate
from espalier.parallel.pipeline.split import Split, SplitError, split
from espalier.parallel.pipeline.table import (
    TABLES,
    find_schedule,
    from_csv,
    from_toml,
    load,
    to_csv,
    to_toml,
    write_table,
)

__all__ = [
    "KINDS",
    "TABLES",
    "Action",
    "Costs",
    "Kind",
    "Report",
    "Schedule",
    "ScheduleError",
    "Span",
    "Split",
    "SplitError",
    "Timeline",
    "check",
    "find_schedule",
    "from_csv",
    "from_toml",
    "generate",
    "live",
    "load",
    "measured",
    "read_times",
    "simulate",
    "split",
    "to_csv",
    "to_toml",
    "with_messages",
    "without_messages",
    "write_table",
]
