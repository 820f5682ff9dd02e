"""``deepspeed.utils.timer``: on the host's clock."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.timers import NoopTimer, ThroughputTimer
from espalier.compat.deepspeed.timers import Timers as SynchronizedWallClockTimer

__all__ = ["NoopTimer", "SynchronizedWallClockTimer", "ThroughputTimer"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.utils.timer",
    {
        "CudaEventTimer trim_mean": "engine.timers(name) are on the host's clock; "
        "get_accelerator().Event() is a device's"
    },
)
