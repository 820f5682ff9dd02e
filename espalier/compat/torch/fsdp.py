"""``FullyShardedDataParallel`` and ``fully_shard``, with what ``torch.distributed.fsdp`` has beside them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import (
    BackwardPrefetch,
    CPUOffload,
    CPUOffloadPolicy,
    FullOptimStateDictConfig,
    FullStateDictConfig,
    LocalOptimStateDictConfig,
    LocalStateDictConfig,
    MixedPrecision,
    MixedPrecisionPolicy,
    OffloadPolicy,
    OptimStateDictConfig,
    OptimStateKeyType,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    ShardingStrategy,
    StateDictConfig,
    StateDictSettings,
    StateDictType,
)
from torch.distributed.fsdp.wrap import (
    CustomPolicy,
    ModuleWrapPolicy,
    always_wrap_policy,
    enable_wrap,
    lambda_auto_wrap_policy,
    size_based_auto_wrap_policy,
    transformer_auto_wrap_policy,
    wrap,
)

from espalier.compat.absent import or_absent
from espalier.compat.common import LateModule, precision_of
from espalier.compat.torch.data_parallel import Said, of_group, take_hook
from espalier.compat.torch.fully import (
    FSDPModule,
    GradientReductionHandle,
    UnshardHandle,
    fully_shard,
    mesh_of,
    register_fsdp_forward_method,
    sharding_of,
    share_comm_ctx,
)
from espalier.engine.states import whole_states
from espalier.mesh.process import running_rank
from espalier.texts import refuse
from espalier.trees import tree_map


class _Kind(NamedTuple):
    """How state dicts are given."""

    kind: StateDictType = StateDictType.FULL_STATE_DICT
    config: Any = None
    optimizer_config: Any = None


class FullyShardedDataParallel(LateModule):
    """As ``torch.distributed.fsdp.FullyShardedDataParallel``: each rank gives its rows, and holds its pieces.

    Wrap the whole model; what was wrapped within it is taken as a part of it. What is gathered together is
    chosen here, by the model's blocks.

    Args:
        sharding_strategy: ``FULL_SHARD`` is ``zero=3``, ``SHARD_GRAD_OP`` 2, ``NO_SHARD`` 0; the hybrid ones
            copy between nodes (``LOCAL_WORLD_SIZE`` ranks each), or along ``device_mesh``'s first axis.
        cpu_offload: ``Plan(offload=...)``: pieces of parameters and gradients, and states, on the host.
        mixed_precision: ``Plan(precision=...)``.
        device_mesh: of one axis, or of two: copies, pieces.
        auto_wrap_policy, backward_prefetch, forward_prefetch, limit_all_gathers, use_orig_params, device_id,
        sync_module_states: no effect: parameters stay the program's own objects, with rank 0's values.
        plan: keys of a :class:`~espalier.Plan`: what else there is to be beside ``data``.
    """

    def __init__(
        self,
        module: nn.Module,
        process_group: Any = None,
        sharding_strategy: ShardingStrategy | None = None,
        cpu_offload: CPUOffload | None = None,
        auto_wrap_policy: Any = None,
        backward_prefetch: Any = BackwardPrefetch.BACKWARD_PRE,
        mixed_precision: MixedPrecision | None = None,
        ignored_modules: Any = None,
        param_init_fn: Callable[[nn.Module], None] | None = None,
        device_id: Any = None,
        sync_module_states: bool = False,
        forward_prefetch: bool = False,
        limit_all_gathers: bool = True,
        use_orig_params: bool = False,
        ignored_states: Any = None,
        device_mesh: Any = None,
        *,
        plan: Said = None,
    ) -> None:
        whole = "all parameters are the engine's: expected None"
        several = isinstance(process_group, tuple)
        mistakes = [
            ("ignored_modules", "...", whole) if ignored_modules else None,
            ("ignored_states", "...", whole) if ignored_states else None,
            ("param_init_fn", "...", "build the model within espalier.deferred() instead")
            if param_init_fn is not None
            else None,
            ("process_group", "two groups", "expected device_mesh = init_device_mesh(..., (copies, pieces))")
            if several
            else None,
        ]
        refuse("FullyShardedDataParallel", [x for x in mistakes if x is not None])
        strategy = ShardingStrategy.FULL_SHARD if sharding_strategy is None else sharding_strategy
        said = sharding_of(strategy, cpu_offload, device_mesh)
        if mixed_precision is not None:
            dtypes = mixed_precision.param_dtype, mixed_precision.reduce_dtype, mixed_precision.buffer_dtype
            said["precision"] = precision_of(*dtypes)
        super().__init__(_unwrapped(module), "own", said, plan, mesh_of)
        self.mistakes += of_group(process_group)
        self._kind = _Kind()

    # ---- torch's own methods

    def clip_grad_norm_(self, max_norm: float, norm_type: float = 2.0) -> torch.Tensor:
        """Clip the gradients of all ranks by their norm together, which is given back."""
        return nn.utils.clip_grad_norm_(self.module.parameters(), max_norm, norm_type)

    def check_is_root(self) -> bool:
        """It is: what was wrapped within is a part of it."""
        return True

    @staticmethod
    def fsdp_modules(module: nn.Module, root_only: bool = False) -> list[FullyShardedDataParallel]:
        """The wrapped modules in one."""
        return [m for m in module.modules() if isinstance(m, FullyShardedDataParallel)]

    @staticmethod
    def summon_full_params(module: nn.Module, *args: Any, **kwargs: Any) -> AbstractContextManager[None]:
        """Parameters answer for their whole values anyway: reading one on all ranks gathers it."""
        return nullcontext()

    # ---- state dicts

    @staticmethod
    def set_state_dict_type(
        module: nn.Module,
        state_dict_type: StateDictType,
        state_dict_config: Any = None,
        optim_state_dict_config: Any = None,
    ) -> Any:
        """How state dicts are given from now on; what held before is given back.

        Raises:
            MistakeError: flat local state dicts are asked for.
        """
        if state_dict_type is StateDictType.LOCAL_STATE_DICT:
            reason = "there are no flat parameters: expected FULL_STATE_DICT or SHARDED_STATE_DICT"
            refuse("FullyShardedDataParallel", [("state_dict_type", state_dict_type, reason)])
        before = _Kind()
        for wrapped in FullyShardedDataParallel.fsdp_modules(module):
            before = wrapped._kind
            wrapped._kind = _Kind(state_dict_type, state_dict_config, optim_state_dict_config)
        return before

    @staticmethod
    @contextmanager
    def state_dict_type(module: nn.Module, state_dict_type: StateDictType, *configs: Any) -> Iterator[None]:
        """How state dicts are given while open."""
        before = FullyShardedDataParallel.set_state_dict_type(module, state_dict_type, *configs)
        try:
            yield
        finally:
            FullyShardedDataParallel.set_state_dict_type(module, *before)

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """Whole plain tensors, or DTensors of this rank's pieces, as was said."""
        if self._kind.kind is StateDictType.SHARDED_STATE_DICT and self.is_made:
            return self.module.state_dict(destination=destination, prefix=prefix)
        state = super().state_dict(destination=destination, prefix=prefix)
        return self._as_said(state, self._kind.config)

    def _as_said(self, state: Any, config: Any) -> Any:
        if getattr(config, "rank0_only", False) and self.engine.mesh.rank:
            return {}
        if getattr(config, "offload_to_cpu", False):
            return tree_map(lambda x: x.cpu() if isinstance(x, torch.Tensor) else x, state)
        return state

    @staticmethod
    def optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, optim_state_dict: Any = None, group: Any = None
    ) -> dict[str, Any]:
        """The optimizer's states, whole, by the names of parameters (a collective)."""
        states = whole_states(optim.state_dict() if optim_state_dict is None else optim_state_dict)
        state = _renamed(states, _names_of(model, optim).__getitem__)
        for wrapped in FullyShardedDataParallel.fsdp_modules(model):
            return wrapped._as_said(state, wrapped._kind.optimizer_config)
        return state

    @staticmethod
    def get_state_dict_type(module: nn.Module) -> _Kind:
        """How state dicts are given: ``state_dict_type`` and the two configurations."""
        return next((m._kind for m in FullyShardedDataParallel.fsdp_modules(module)), _Kind())

    def register_comm_hook(self, state: Any, hook: Callable[..., Any]) -> None:
        """In which dtype gradients travel: see :meth:`DistributedDataParallel.register_comm_hook`."""
        take_hook(self, hook)

    # ---- what there was before optim_state_dict

    @staticmethod
    def full_optim_state_dict(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_input: Any = None,
        rank0_only: bool = True,
        group: Any = None,
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict`, on rank 0 alone unless said otherwise (a collective)."""
        state = FullyShardedDataParallel.optim_state_dict(model, optim)
        return {} if rank0_only and state and running_rank() else state

    @staticmethod
    def sharded_optim_state_dict(
        model: nn.Module, optim: torch.optim.Optimizer, group: Any = None
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict`."""
        return FullyShardedDataParallel.optim_state_dict(model, optim)

    @staticmethod
    def shard_full_optim_state_dict(
        full_optim_state_dict: Mapping[str, Any],
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict_to_load`, of what all ranks have.

        Raises:
            MistakeError: there is no ``optim``.
        """
        if optim is None:
            refuse("FullyShardedDataParallel", [("optim", None, "expected the optimizer, by its name")])
        assert optim is not None
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, full_optim_state_dict)

    @staticmethod
    def flatten_sharded_optim_state_dict(
        sharded_optim_state_dict: Mapping[str, Any], model: nn.Module, optim: torch.optim.Optimizer
    ) -> dict[str, Any]:
        """:meth:`optim_state_dict_to_load`."""
        return FullyShardedDataParallel.optim_state_dict_to_load(model, optim, sharded_optim_state_dict)

    @staticmethod
    def scatter_full_optim_state_dict(
        full_optim_state_dict: Mapping[str, Any] | None,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
        group: Any = None,
    ) -> dict[str, Any]:
        """:meth:`shard_full_optim_state_dict`, of what rank 0 has (a collective)."""
        said = [full_optim_state_dict]
        if dist.is_initialized() and dist.get_world_size() > 1:
            dist.broadcast_object_list(said, src=0)
        whole = said[0] or {"state": {}, "param_groups": []}
        return FullyShardedDataParallel.shard_full_optim_state_dict(whole, model, optim=optim)

    @staticmethod
    def rekey_optim_state_dict(
        optim_state_dict: Mapping[str, Any],
        optim_state_key_type: OptimStateKeyType,
        model: nn.Module,
        optim_input: Any = None,
        optim: torch.optim.Optimizer | None = None,
    ) -> dict[str, Any]:
        """States by the numbers of parameters as states by their names, or the other way round."""
        of: dict[Any, Any] = dict(enumerate(_names_of(model, optim)))
        if optim_state_key_type is OptimStateKeyType.PARAM_ID:
            of = {name: i for i, name in of.items()}
        return _renamed(optim_state_dict, lambda key: of.get(key, key))

    @staticmethod
    def optim_state_dict_to_load(
        model: nn.Module,
        optim: torch.optim.Optimizer,
        optim_state_dict: Mapping[str, Any],
        is_named_optimizer: bool = False,
        load_directly: bool = False,
        group: Any = None,
    ) -> dict[str, Any]:
        """States by names as ``optim.load_state_dict`` takes them; each rank keeps its pieces then."""
        numbers = {name: i for i, name in enumerate(_names_of(model, optim))}
        states = _renamed(optim_state_dict, numbers.__getitem__)
        states["state"] = {i: dict(x) for i, x in states["state"].items()}
        if load_directly:
            optim.load_state_dict(states)
        return states


def _names_of(model: nn.Module, optim: torch.optim.Optimizer | None) -> list[str]:
    """The names of the parameters that an optimizer holds, in its order; without one, of all."""
    names = {id(p): name for name, p in model.named_parameters()}
    if optim is None:
        return [*names.values()]
    return [names[id(p)] for group in optim.param_groups for p in group["params"]]


def _renamed(states: Mapping[str, Any], named: Callable[[Any], Any]) -> dict[str, Any]:
    """An optimizer's states under other keys."""
    return {
        "state": {named(key): x for key, x in states["state"].items()},
        "param_groups": [
            {**group, "params": [*map(named, group["params"])]} for group in states["param_groups"]
        ],
    }


def _unwrapped(module: nn.Module) -> nn.Module:
    """A module without what was wrapped in it."""
    for parent in list(module.modules()):
        for name, child in parent.named_children():
            if isinstance(child, FullyShardedDataParallel):
                setattr(parent, name, child.module)
    return module.module if isinstance(module, FullyShardedDataParallel) else module


__all__ = [
    "BackwardPrefetch",
    "CPUOffload",
    "CPUOffloadPolicy",
    "CustomPolicy",
    "FSDPModule",
    "FullOptimStateDictConfig",
    "FullStateDictConfig",
    "FullyShardedDataParallel",
    "GradientReductionHandle",
    "LocalOptimStateDictConfig",
    "LocalStateDictConfig",
    "MixedPrecision",
    "MixedPrecisionPolicy",
    "ModuleWrapPolicy",
    "OffloadPolicy",
    "OptimStateDictConfig",
    "OptimStateKeyType",
    "ShardedOptimStateDictConfig",
    "ShardedStateDictConfig",
    "ShardingStrategy",
    "StateDictConfig",
    "StateDictSettings",
    "StateDictType",
    "UnshardHandle",
    "always_wrap_policy",
    "enable_wrap",
    "fully_shard",
    "lambda_auto_wrap_policy",
    "register_fsdp_forward_method",
    "share_comm_ctx",
    "size_based_auto_wrap_policy",
    "transformer_auto_wrap_policy",
    "wrap",
]

__getattr__ = or_absent(
    __name__,
    "torch.distributed.fsdp",
    {
        "FlatParameter": "the engine gathers parameters, and lets them go",
        "DataParallelMeshDims": "say fully_shard(mesh=...), of the axes replicate and shard",
    },
)
