"""``deepspeed.runtime.zero.partition_parameters``."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.zero import (
    GatheredParameters,
    Init,
    ZeroParamStatus,
    ZeroParamType,
    register_external_parameter,
    unregister_external_parameter,
)

__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
]


def is_zero_param(parameter: object) -> bool:
    """Whether stage 3 cuts it."""
    return hasattr(parameter, "ds_id")


__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.zero.partition_parameters",
    {
        "free_param AllGatherHandle AllGatherCoalescedHandle InsertPostInitMethodToModuleSubClasses": (
            "parameters are gathered and dropped by the engine; GatheredParameters shows them whole"
        ),
        "AllReduceCoalescedHandle MultipleAllGatherHandles NoGatherCoalescedHandle NoGatherHandle "
        "CUDAQuantizer "
        "QuantizationInfo get_allgather_dtype get_all_subclasses get_new_tensor_fn_for_dtype debug_rank0 "
        "print_rank_0 zero_wrapper_for_fp_tensor_constructor": "it is DeepSpeed's own: leave it out",
        "shutdown_init_context restore_init_context DeepSpeedTensorOverride": "leave the `with "
        "zero.Init():` block",
    },
)
