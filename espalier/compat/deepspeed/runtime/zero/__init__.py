"""``deepspeed.runtime.zero``: what ``deepspeed.zero`` has, under the names of its modules."""

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.runtime.zero import partition_parameters, stage3, stage_1_and_2
from espalier.compat.deepspeed.runtime.zero.partition_parameters import *  # noqa: F403

__all__ = ["partition_parameters", "stage3", "stage_1_and_2"]
__all__ += partition_parameters.__all__

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.zero",
    {
        "TiledLinear TiledLinearReturnBias": "an nn.Linear is cut by tensor_parallel.autotp_size, or by "
        "layouts= of deepspeed.initialize",
        "DeepSpeedZeRoOffload parameter_offload": "`offload_param` of the configuration lays parameters on "
        "the host",
        "contiguous_memory_allocator offload_states partitioned_param_coordinator partitioned_param_profiler "
        "test": "the engine gathers and drops parameters, in chunks: Plan(chunk_megabytes=)",
        "linear tiling": "an nn.Linear is cut by tensor_parallel.autotp_size, or by layouts= of "
        "deepspeed.initialize",
        "muon": 'say {"type": "Muon"} in the section optimizer of the configuration',
        "DeepSpeedTensorOverride": "leave it out: `with zero.Init():` builds modules without memory",
        "config offload_config leaf_module_config": "say the section zero_optimization as a dict: "
        "deepspeed.initialize(config=)",
        "unwrap_model_for_generation": "engine.engine.generate(ids, n) writes text under any plan",
        "utils": "engine.plan says how the model is laid out",
    },
)
