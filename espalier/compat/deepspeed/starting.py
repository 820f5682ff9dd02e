"""``deepspeed.initialize``: a configuration and a model become an engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset

from espalier.compat.common import Axes, counts_one
from espalier.compat.deepspeed import ops, schedules
from espalier.compat.deepspeed.config import Config, load, read
from espalier.compat.deepspeed.engine import DeepSpeedEngine
from espalier.compat.deepspeed.groups import init_distributed
from espalier.compat.deepspeed.moe import axes_of_experts
from espalier.compat.deepspeed.pipe import PipelineEngine, PipelineModule
from espalier.engine import Spikes
from espalier.engine import initialize as lay_on_mesh
from espalier.mesh import Mesh
from espalier.mesh.process import running_rank, running_size
from espalier.parallel import Plan

_LIMIT = 2**31  # DeepSpeed skips steps that are not finite as long as it takes


def initialize(
    args: Any = None,
    model: nn.Module | None = None,
    optimizer: Any = None,
    model_parameters: Iterable[Any] | None = None,
    training_data: Dataset[Any] | None = None,
    lr_scheduler: Any = None,
    distributed_port: int = 29500,
    mpu: Any = None,
    dist_init_required: bool | None = None,
    collate_fn: Callable[[list[Any]], Any] | None = None,
    config: Any = None,
    mesh_param: Any = None,
    config_params: Any = None,
    *,
    plan: Mapping[str, Any] | None = None,
    **options: Any,
) -> tuple[DeepSpeedEngine, Any, Any, Any]:
    """``deepspeed.initialize``, on Espalier.

    Args:
        args: ``args.deepspeed_config`` is the configuration, if ``config`` is not given.
        optimizer: or a function of the parameters that makes one; by default the configuration's.
        mpu: a grid of ranks, Megatron's or DeepSpeed's: it is to say what the plan says.
        model_parameters: what the configuration's optimizer updates; by default all that need a gradient.
        lr_scheduler: or a function of the optimizer that makes one; by default the configuration's.
        config: a dict, or the path of a JSON file.
        plan: more of the plan, for which the configuration has no word: ``{"expert": 2}``, say.
        options: more for :func:`espalier.initialize`: ``layouts=``, ``example=``.

    Returns:
        engine, optimizer, loader of ``training_data``, schedule.

    Raises:
        ValueError: listing every mistake of the configuration.
    """
    if model is None:
        raise ValueError("deepspeed.initialize needs model=...")
    if mesh_param is not None:
        raise ValueError(
            "deepspeed.initialize(mesh_param=...): which axes there are says the configuration "
            "(tensor_parallel.autotp_size, sequence_parallel_size) or plan={...}."
        )
    path = getattr(args, "deepspeed_config", None)
    source = config if config is not None else config_params if config_params is not None else path
    if source is None:
        raise ValueError("deepspeed.initialize needs config=..., or --deepspeed_config in args.")
    init_distributed()
    stages = model.num_stages if isinstance(model, PipelineModule) else 1
    tables = with_tensor_axis(load(source), model)
    settings = read(tables, running_size(), pipe=stages, plan={**axes_of_experts(model), **(plan or {})})
    if mpu is not None:
        compare(mpu, settings.plan)
    kind = DeepSpeedEngine
    if isinstance(model, PipelineModule):
        kind, settings = PipelineEngine, model.arranged(settings)
        options.setdefault("loss_fn", model.loss_fn)
    brought = optimizer, lr_scheduler
    if optimizer is None and settings.optimizer is not None:
        optimizer = ops.make(*settings.optimizer, model, model_parameters)
    elif callable(optimizer) and not isinstance(optimizer, torch.optim.Optimizer):
        optimizer = optimizer(list(model.parameters()) if model_parameters is None else model_parameters)
    options.setdefault("count", counts_one)
    if settings.skips:
        options.setdefault("spikes", Spikes(on_nan="skip", limit=_LIMIT))
    inner = lay_on_mesh(model, optimizer, settings.plan, **options)
    if lr_scheduler is None and settings.scheduler is not None:
        if optimizer is None:
            raise ValueError("The configuration has a scheduler, but there is no optimizer for it.")
        lr_scheduler = schedules.make(*settings.scheduler, optimizer)
    elif callable(lr_scheduler) and not hasattr(lr_scheduler, "step"):
        lr_scheduler = lr_scheduler(optimizer)
    if inner.mesh.rank == 0:
        _tell(settings)
    engine = kind(inner, settings, tables, lr_scheduler)
    engine.client_optimizer, engine.client_lr_scheduler = brought
    engine.mpu = engine.mpu or mpu
    if training_data is not None:
        engine.reads(training_data, collate_fn)
    return engine, engine.optimizer, engine.training_dataloader, engine.lr_scheduler


def _tell(settings: Config) -> None:
    """Print what there is to say of a configuration."""
    if settings.notes:
        print(settings.notes, flush=True)
    if settings.values.get("dump_state"):
        print(f"DeepSpeed's configuration became {settings.plan!r}", flush=True)


def compare(mpu: Any, plan: Plan) -> None:
    """See that a program's grid of ranks is the plan's.

    Raises:
        ValueError: it is another.
    """
    sizes = "get_tensor_model_parallel_world_size get_slice_parallel_world_size get_model_parallel_world_size"
    place = Mesh.dry(plan.axes, world_rank=running_rank())
    sharing = Axes.among(place, plan.batch_axes)
    for what, questions, right in (
        ("rank(s) of a tensor axis", sizes.split(), plan.tensor),
        ("rank(s) that share the batch", ["get_data_parallel_world_size"], sharing.size),
        ("as this rank's number among those", ["get_data_parallel_rank"], sharing.rank),
    ):
        told = next((getattr(mpu, name)() for name in questions if hasattr(mpu, name)), right)
        if told != right:
            raise ValueError(
                f"deepspeed.initialize(mpu=...): it says {told} {what}, and the plan ({plan}) {right}: "
                "expected the same. The configuration says which axes there are (autotp_size, "
                "sequence_parallel_size), or plan={...}; layers of the model are plain, the engine cuts them."
            )


_TENSOR = "_deepspeed_tp_size"


def tp_model_init(
    model: nn.Module, tp_size: int, dtype: torch.dtype, config: Any = None, **options: Any
) -> nn.Module:
    """The model, in a dtype; ``deepspeed.initialize`` will cut its tensors over ``tp_size`` ranks."""
    setattr(model, _TENSOR, tp_size)
    return model.to(dtype)


def with_tensor_axis(tables: dict[str, Any], model: nn.Module) -> dict[str, Any]:
    """A configuration, with what :func:`tp_model_init` was told of a model, or a topology says of it.

    Raises:
        ValueError: the two differ.
    """
    size, said = getattr(model, _TENSOR, None), "tp_model_init(tp_size=...)"
    if isinstance(model, PipelineModule) and model.tensor_size is not None:
        size, said = model.tensor_size, "the topology's axis model"
    if size is None:
        return tables
    section = tables.get("tensor_parallel") or {}
    if section.get("autotp_size") not in (None, 0, size):
        raise ValueError(
            f"tensor_parallel.autotp_size = {section['autotp_size']} of the configuration, and {said} is "
            f"{size}: expected the same."
        )
    return {**tables, "tensor_parallel": {**section, "autotp_size": size}}
