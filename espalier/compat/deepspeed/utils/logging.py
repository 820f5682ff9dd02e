"""``deepspeed.utils.logging``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.utils import log_dist, log_dist_once, logger, set_log_level_from_string

__all__ = ["log_dist", "log_dist_once", "logger", "set_log_level_from_string"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.utils.logging",
    {
        "LoggerFactory get_current_level get_dist_msg get_log_level_from_string print_configuration "
        "print_dist "
        "print_json_dist should_log_le warning_once": (
            'logging is Python\'s own: logging.getLogger("deepspeed"), and log_dist(message, ranks)'
        )
    },
)
