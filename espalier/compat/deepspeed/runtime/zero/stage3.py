"""``deepspeed.runtime.zero.stage3``: its estimates of memory (see ``stage_1_and_2``)."""

from __future__ import annotations

from itertools import product

from torch import nn

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.runtime.zero.stage_1_and_2 import place_told, row_told, setup_told


def estimate_zero3_model_states_mem_needs(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    cpu_offload_params: bool = True,
    zero_init: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int, int]:
    """Bytes of a host, of a GPU, and of the largest layer there."""
    gpus, share, layer = num_nodes * num_gpus_per_node, 1 / num_nodes, 4 * largest_layer_params
    while_built: float = 4 * num_gpus_per_node
    if not cpu_offload:
        gpu = layer + int(18 * total_params / gpus)
        host = (largest_layer_params if zero_init else total_params) * while_built
    else:
        gpu = layer if cpu_offload_params else layer + int(2 * total_params / gpus)
        each = (18 if cpu_offload_params else 16) * share
        host = total_params * (each if zero_init else max(while_built, each))
    return int(host * additional_buffer_factor), gpu, layer


def estimate_zero3_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print them for a model."""
    largest = max(sum(p.numel() for p in m.parameters(recurse=False)) for m in model.modules())
    estimate_zero3_model_states_mem_needs_all_cold(
        sum(p.numel() for p in model.parameters()),
        largest,
        num_gpus_per_node,
        num_nodes,
        additional_buffer_factor,
    )


def estimate_zero3_model_states_mem_needs_all_cold(
    total_params: int,
    largest_layer_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    additional_buffer_factor: float = 1.5,
) -> None:
    """Print them for numbers of parameters."""
    size = f"{total_params // 10**6}M total params, {largest_layer_params // 10**6}M largest layer params."
    print(setup_told(num_gpus_per_node, num_nodes, size))
    for states, parameters, built_cut in product((True, False), repeat=3):
        if parameters and not states:
            continue
        host, gpu, _ = estimate_zero3_model_states_mem_needs(
            total_params,
            largest_layer_params,
            num_gpus_per_node,
            num_nodes,
            states,
            parameters,
            built_cut,
            additional_buffer_factor,
        )
        places = f"offload_param={place_told(parameters)}, offload_optimizer={place_told(states)}"
        print(row_told(host, gpu, f"{places}, zero_init={int(built_cut)}"))


__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.zero.stage3",
    {
        "IPGBucketZ3 input isclose lcm model_to_params move_to_cpu print_rank_0": (
            "it is DeepSpeed's own: leave it out"
        ),
        "DeepSpeedZeroOptimizer_Stage3": "engine.optimizer is torch's own; engine.plan.zero says what is cut",
        "unwrap_model_for_generation": "engine.engine.generate(ids, n) writes text under any plan",
    },
)
