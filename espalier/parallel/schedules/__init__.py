"""Schedules of pipelines: data, generated or read from a table, checked, simulated, drawn."""

from espalier.parallel.schedules.actions import (
    Action,
    ActionKind,
    Costs,
    Schedule,
    read_times,
    with_messages,
    without_messages,
)
from espalier.parallel.schedules.generate import (
    KINDS,
    TABLES,
    find_schedule,
    from_csv,
    from_toml,
    generate,
    load,
    to_csv,
    to_toml,
    write_table,
)
from espalier.parallel.schedules.simulate import Report, ScheduleError, Span, Timeline, check, live, simulate

__all__ = [
    "KINDS",
    "TABLES",
    "Action",
    "ActionKind",
    "Costs",
    "Report",
    "Schedule",
    "ScheduleError",
    "Span",
    "Timeline",
    "check",
    "find_schedule",
    "from_csv",
    "from_toml",
    "generate",
    "live",
    "load",
    "read_times",
    "simulate",
    "to_csv",
    "to_toml",
    "with_messages",
    "without_messages",
    "write_table",
]
