"""``deepspeed.monitor.config``: what a configuration says of monitors, by attributes."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, SimpleNamespace
from typing import Any, Final

from espalier.compat.absent import or_absent

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


__all__ = ["get_monitor_config"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.monitor.config",
    {
        "TensorBoardConfig WandbConfig CSVConfig CometConfig DeepSpeedMonitorConfig": (
            "get_monitor_config(config) takes a dict"
        )
    },
)
