"""``colossalai.nn``: torch's layers, which the plan cuts; its optimizers; schedules by step; a metric."""

from typing import Any

from torch import nn as _nn

from espalier.compat.colossalai.nn import lr_scheduler, metric, optimizer

__all__ = ["lr_scheduler", "metric", "optimizer"]


def __getattr__(name: str) -> Any:
    return getattr(_nn, name)
