"""``deepspeed.utils.logging``."""

from espalier.compat.deepspeed.utils import log_dist, logger, set_log_level_from_string

__all__ = ["log_dist", "logger", "set_log_level_from_string"]
