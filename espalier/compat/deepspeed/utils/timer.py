"""``deepspeed.utils.timer``: on the host's clock."""

from espalier.compat.deepspeed.timers import NoopTimer, ThroughputTimer
from espalier.compat.deepspeed.timers import Timers as SynchronizedWallClockTimer

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]
