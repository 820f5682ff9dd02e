"""``deepspeed.zero``: models built without memory, parameters whole for a time, estimates of memory."""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import product
from typing import Any, Final

import torch
from torch import nn

from espalier.comm import collectives
from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.groups import init_distributed
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.mesh.process import running_size
from espalier.parallel.data.chunks import show
from espalier.tensor import DTensor, deferred, lay_out, plain
from espalier.tensor.deferred import make_parameters_real
from espalier.torch_private import raw


class Init:
    """While open, modules are built without memory: ``deepspeed.initialize`` then builds each rank's part.

    Args:
        module: laid out by ``deepspeed.initialize`` in any case.
        enabled: else it does nothing.
        options: DeepSpeed's others; where parameters lie and in which dtype says the configuration.
    """

    def __init__(
        self, module: nn.Module | None = None, *args: Any, enabled: bool = True, **options: Any
    ) -> None:
        self._stack, self._enabled = ExitStack(), enabled

    def __enter__(self) -> None:
        if self._enabled:
            self._stack.enter_context(deferred())

    def __exit__(self, *error: Any) -> None:
        self._stack.__exit__(*error)


@contextmanager
def GatheredParameters(
    params: Any, modifier_rank: int | None = None, fwd_module: Any = None, enabled: bool = True
) -> Iterator[None]:
    """While open, parameters show their whole values, which this rank may read and change by itself.

    Every rank must enter and leave. What ``modifier_rank`` has made of them all ranks hold afterwards;
    without it what was changed is dropped. Parameters that :class:`Init` left without memory have it from
    then on, on each rank, until ``deepspeed.initialize`` cuts them.
    """
    if isinstance(params, torch.Tensor):
        params = [params]
    elif isinstance(params, nn.Module):
        params = params.parameters()
    params = list(params) if enabled else []
    with _not_yet_cut(params, modifier_rank), _cut(_distinct(params), modifier_rank):
        yield


@contextmanager
def _not_yet_cut(params: Iterable[Any], modifier_rank: int | None) -> Iterator[None]:
    """Of ``GatheredParameters``, what it does before ``deepspeed.initialize``."""
    held = [p for p in params if isinstance(p, nn.Parameter) and not isinstance(p, DTensor) and p.is_meta]
    make_parameters_real(held)
    before = [] if modifier_rank is not None else [p.detach().clone() for p in held]
    yield
    if modifier_rank is None:
        values: Iterable[torch.Tensor] = before
    else:
        init_distributed()
        changed = [p.detach() for p in held]
        ranks = running_size() if held else 1
        mesh = Mesh.from_env({"data": ranks}) if ranks > 1 else None
        values = [x if mesh is None else collectives.broadcast(x, mesh, 0, modifier_rank) for x in changed]
    with torch.no_grad():
        for p, value in zip(held, values, strict=True):
            p.copy_(value)


@contextmanager
def _cut(held: list[DTensor], modifier_rank: int | None) -> Iterator[None]:
    """Of ``GatheredParameters``, what it does with parameters of an engine."""
    wholes = [p.full_tensor().detach().clone() for p in held]
    with raw():
        before = [(p, plain(p.data), p._layout) for p in held]
        for (p, _, layout), whole in zip(before, wholes, strict=True):
            show(p, plain(whole), Layout.replicated(layout.mesh, layout.shape))
    _say(held, ZeroParamStatus.AVAILABLE)
    try:
        yield
    finally:
        _say(held, ZeroParamStatus.NOT_AVAILABLE)
        with raw():
            values = [plain(p.data) for p in held]
            for p, data, layout in before:
                show(p, data, layout)
    if modifier_rank is not None:
        for p, x in zip(held, values, strict=True):
            own = p._layout.own
            at = [int(i) for i in torch.unravel_index(torch.tensor(modifier_rank), own.mesh.shape)]
            with torch.no_grad():
                p.copy_(lay_out(x, own, source=at))  # each rank is sent its part


class ZeroParamType(enum.Enum):
    """How DeepSpeed keeps a parameter."""

    NORMAL = 1
    PARTITIONED = 2
    REMOTE = 3


class ZeroParamStatus(enum.Enum):
    """``p.ds_status`` of a parameter that stage 3 cuts: whole under :func:`GatheredParameters`."""

    AVAILABLE = 1
    NOT_AVAILABLE = 2
    INFLIGHT = 3


def mark_as_cut(module: nn.Module) -> None:
    """Give the parameters that stage 3 cuts what programs ask of them: ``ds_id``, ``ds_status``, ..."""
    for i, p in enumerate(module.parameters()):
        if isinstance(p, DTensor):
            vars(p).update(ds_id=i, ds_shape=p.shape, ds_numel=p.numel())
            vars(p)["ds_param_type"] = ZeroParamType.PARTITIONED
            _say([p], ZeroParamStatus.NOT_AVAILABLE)


def _say(held: Iterable[DTensor], status: ZeroParamStatus) -> None:
    for p in held:
        if hasattr(p, "ds_id"):
            vars(p)["ds_status"] = status


def _distinct(params: Iterable[Any]) -> list[DTensor]:
    return [p for p in {id(p): p for p in params}.values() if isinstance(p, DTensor)]


def register_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Nothing: a parameter is gathered wherever it is used."""


def unregister_external_parameter(module: nn.Module, parameter: Any) -> None:
    """Nothing, either."""


def is_zero_param(parameter: object) -> bool:
    """Whether stage 3 cuts it."""
    return hasattr(parameter, "ds_id")


# ---- estimates of memory: DeepSpeed's arithmetic, of 16-bit training with Adam. What a plan takes here tell
# ``espalier plan`` and ``engine.engine.memory()``.


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


__all__ = [
    "GatheredParameters",
    "Init",
    "ZeroParamStatus",
    "ZeroParamType",
    "estimate_zero2_model_states_mem_needs",
    "estimate_zero2_model_states_mem_needs_all_cold",
    "estimate_zero2_model_states_mem_needs_all_live",
    "estimate_zero3_model_states_mem_needs",
    "estimate_zero3_model_states_mem_needs_all_cold",
    "estimate_zero3_model_states_mem_needs_all_live",
    "is_zero_param",
    "register_external_parameter",
    "unregister_external_parameter",
]

_WHOLE: Final = "parameters are gathered and dropped by the engine; GatheredParameters shows them whole"
_CUT: Final = "an nn.Linear is cut by tensor_parallel.autotp_size, or by layouts= of deepspeed.initialize"

__getattr__ = or_absent(
    __name__,
    "deepspeed.zero",
    {
        "TiledLinear TiledLinearReturnBias linear tiling": _CUT,
        "DeepSpeedZeRoOffload parameter_offload": "`offload_param` of the configuration lays parameters on "
        "the host",
        "contiguous_memory_allocator offload_states partitioned_param_coordinator partitioned_param_profiler "
        "test": "the engine gathers and drops parameters, in chunks: Plan(chunk_megabytes=)",
        "muon": 'say {"type": "Muon"} in the section optimizer of the configuration',
        "config offload_config leaf_module_config": "say the section zero_optimization as a dict: "
        "deepspeed.initialize(config=)",
        "unwrap_model_for_generation": "engine.engine.generate(ids, n) writes text under any plan",
        "utils": "engine.plan says how the model is laid out",
        "free_param AllGatherHandle AllGatherCoalescedHandle InsertPostInitMethodToModuleSubClasses": _WHOLE,
        "shutdown_init_context restore_init_context DeepSpeedTensorOverride": "leave the `with zero.Init():` "
        "block: in it modules are built without memory",
        "DeepSpeedZeroOptimizer DeepSpeedZeroOptimizer_Stage3": (
            "engine.optimizer is torch's own; engine.plan.zero says what is cut"
        ),
        "AllReduceCoalescedHandle MultipleAllGatherHandles NoGatherCoalescedHandle NoGatherHandle "
        "CUDAQuantizer QuantizationInfo get_allgather_dtype get_all_subclasses get_new_tensor_fn_for_dtype "
        "debug_rank0 print_rank_0 zero_wrapper_for_fp_tensor_constructor IPGBucket IPGBucketZ3 "
        "GradPartitionBufferGroup input isclose lcm model_to_params move_to_cpu print_rank_msg "
        "get_alignment_padding split_half_float_double": "it is DeepSpeed's own: leave it out",
    },
    elsewhere={"partition_parameters stage3 stage_1_and_2": __name__},
)
