"""Ranks that die, hang, or are asked to leave: seen, blamed, told on every rank, within seconds.

``liveness`` looks at what this process does, ``diagnosis`` judges the signs of all ranks, ``watchdog`` sends
and hears them, and stops.
"""

from typing import TYPE_CHECKING

from espalier.faults.settings import Faults, Spikes
from espalier.later import on_use

if TYPE_CHECKING:
    from espalier.faults.watchdog import watched
else:
    __getattr__ = on_use(__name__, {"watchdog": "watched"})

__all__ = ["Faults", "Spikes", "watched"]
