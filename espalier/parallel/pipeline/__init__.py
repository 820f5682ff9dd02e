"""Pipelines: schedules as data, a model split into stages, and what runs one by the other."""

from espalier.parallel.pipeline.actions import Action, Kind, Schedule
from espalier.parallel.pipeline.generate import KINDS, generate
from espalier.parallel.pipeline.messages import with_messages

__all__ = ["KINDS", "Action", "Kind", "Schedule", "generate", "with_messages"]
