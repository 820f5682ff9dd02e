"""``deepspeed.runtime.lr_schedules``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.schedules import LRRangeTest, OneCycle, WarmupCosineLR, WarmupDecayLR, WarmupLR

__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.lr_schedules",
    {
        "add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config override_params "
        "override_lr_range_test_params override_1cycle_params override_warmupLR_params "
        "override_warmupCosineLR_params": (
            "say the schedule in the section scheduler of the configuration, from arguments of your own"
        ),
        "update_lr get_torch_optimizer": "the schedules are torch's, on torch's optimizer",
    },
)
