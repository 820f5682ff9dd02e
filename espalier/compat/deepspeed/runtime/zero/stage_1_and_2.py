"""``deepspeed.runtime.zero.stage_1_and_2``: its estimates of memory.

They are DeepSpeed's arithmetic, of 16-bit training with Adam. What a plan takes here tell
``espalier plan`` and ``engine.engine.memory()``.
"""

from __future__ import annotations

from torch import nn

from espalier.compat.absent import or_absent

_HEAD = "Estimated memory needed for params, optim states and gradients for a:"


def estimate_zero2_model_states_mem_needs(
    total_params: int,
    num_gpus_per_node: int = 1,
    num_nodes: int = 1,
    cpu_offload: bool = True,
    additional_buffer_factor: float = 1.5,
) -> tuple[int, int]:
    """Bytes of a host and of a GPU."""
    gpus = num_nodes * num_gpus_per_node
    if cpu_offload:
        return int(total_params * max(4 * gpus, 16) * additional_buffer_factor), 2 * total_params
    gpu = 2 * total_params + int(18 * total_params / gpus)
    return int(total_params * 4 * num_gpus_per_node * additional_buffer_factor), gpu


def estimate_zero2_model_states_mem_needs_all_live(
    model: nn.Module, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print them for a model."""
    estimate_zero2_model_states_mem_needs_all_cold(
        sum(p.numel() for p in model.parameters()), num_gpus_per_node, num_nodes, additional_buffer_factor
    )


def estimate_zero2_model_states_mem_needs_all_cold(
    total_params: int, num_gpus_per_node: int = 1, num_nodes: int = 1, additional_buffer_factor: float = 1.5
) -> None:
    """Print them for a number of parameters."""
    print(setup_told(num_gpus_per_node, num_nodes, f"{total_params // 10**6}M total params."))
    for offloads in (True, False):
        host, gpu = estimate_zero2_model_states_mem_needs(
            total_params, num_gpus_per_node, num_nodes, offloads, additional_buffer_factor
        )
        print(row_told(host, gpu, f"offload_optimizer={place_told(offloads)}"))


def setup_told(gpus: int, nodes: int, model: str) -> str:
    """The head of a table."""
    machines = f"{nodes} node{'s' if nodes > 1 else ''}, {gpus} GPU{'s' if gpus > 1 else ''} per node"
    return f"{_HEAD}\nHW: Setup with {machines}.\nSW: Model with {model}\n  per CPU  |  per GPU |   Options"


def row_told(host: int, gpu: int, options: str) -> str:
    """A row of it."""
    return f" {host / 2**30:7.2f}GB | {gpu / 2**30:6.2f}GB | {options}"


def place_told(is_on_host: bool) -> str:
    """Where something lies, as wide as DeepSpeed writes it."""
    return "cpu " if is_on_host else "none"


__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.zero.stage_1_and_2",
    {
        "DeepSpeedZeroOptimizer": "engine.optimizer is torch's own; engine.plan.zero says what is cut",
        "IPGBucket GradPartitionBufferGroup input isclose lcm model_to_params print_rank_msg "
        "get_alignment_padding split_half_float_double": "it is DeepSpeed's own: leave it out",
    },
)
