"""``colossalai.pipeline``: where a rank is in its pipeline; schedules are the plan's."""

from __future__ import annotations

from typing import Any

import torch.distributed as dist
from torch import nn

from espalier.compat.absent import Absent, or_absent
from espalier.compat.common import Axes
from espalier.mesh.process import running_rank
from espalier.texts import refuse


class PipelineStageManager:
    """Which stage this rank has, of ``plugin.stage_manager``.

    With several stages a rank, the last rank has the last, as schedules lay them here; ``"zbv"`` turns round
    there, and the first rank has it.

    Args:
        axes: the ranks of the pipeline.
        style: of its schedule.
        num_model_chunks: stages of a rank.
    """

    def __init__(self, axes: Axes, style: str = "1f1b", num_model_chunks: int = 1) -> None:
        self._axes, self._turns = axes, style == "zbv"
        self.is_interleave, self.use_zbv = style in ("interleaved", "zbv"), self._turns
        self.num_model_chunks = num_model_chunks

    @property
    def num_stages(self) -> int:
        """Ranks of the pipeline."""
        return self._axes.size

    @property
    def stage(self) -> int:
        """This one among them."""
        return self._axes.rank

    def is_first_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank has the first stage."""
        return self.stage == 0

    is_first_device = is_first_stage

    def is_last_stage(self, ignore_chunk: bool = False) -> bool:
        """Whether this rank has the last stage; with ``ignore_chunk`` whether it is the last rank."""
        return self.stage == (0 if self._turns and not ignore_chunk else self.num_stages - 1)

    def is_last_device(self) -> bool:
        """Whether this rank is the last."""
        return self.stage == self.num_stages - 1

    def get_rank(self) -> int:
        """The world's number of this rank."""
        return running_rank()

    def get_prev_rank(self) -> int:
        """The world's number of the one before; before the first is the last."""
        return self._axes.ranks[self.stage - 1]

    def get_next_rank(self) -> int:
        """The world's number of the next; behind the last is the first."""
        return self._axes.ranks[(self.stage + 1) % self.num_stages]

    def get_p2p_process_group(self) -> dist.ProcessGroup | None:
        """That of the pipeline: all of its ranks must ask."""
        group: dist.ProcessGroup | None = self._axes.group()
        return group

    init_process_group_by_stages = Absent(
        "PipelineStageManager.init_process_group_by_stages",
        "parameters that stages share are found in the model",
    )


class PipelineGraph:
    """For ``scheduler_nodes=``, where it has no effect: ``pp_style="zbv"`` makes its own table here.

    Args:
        options: costs and memory of its actions.
    """

    def __init__(self, *args: Any, **options: Any) -> None:
        self.options = options

    def get_v_schedule(self) -> list[Any]:
        """Nothing."""
        return []


_STYLES = "HybridParallelPlugin(pp_style=) names schedules; Plan(schedule=) takes others, and tables"
_WHOLE = "the plan cuts the model by itself: build it whole"


def build_pipeline_model(layers: nn.Module, num_chunks: int = 1, verbose: bool = False) -> nn.Module:
    """The model, whole: the plan cuts it into stages.

    Raises:
        MistakeError: ``num_chunks`` is not 1.
    """
    if num_chunks != 1:
        reason = "expected 1: initialize(..., plan=Plan(pipe=n, schedule='interleaved', stages_per_rank=2))"
        refuse("build_pipeline_model", [("num_chunks", num_chunks, f"{reason} has several stages a rank")])
    return layers


def build_pipeline_model_from_cfg(config: Any, num_chunks: int = 1, **options: Any) -> nn.Module:
    """Not from a configuration.

    Raises:
        MistakeError: always.
    """
    refuse("build_pipeline_model_from_cfg", [("config", config, "build the model, whole: the plan cuts it")])
    raise AssertionError


__all__ = [
    "PipelineGraph",
    "PipelineStageManager",
    "build_pipeline_model",
    "build_pipeline_model_from_cfg",
]

__getattr__ = or_absent(
    __name__,
    "colossalai.pipeline",
    {
        "layer_spec middleware pipelinable": _WHOLE,
        "base generate interleaved_pp one_f_one_b zero_bubble_pp": _STYLES,
        "p2p": "stages of a pipeline send by themselves",
        "pipeline_process_group": "engine.mesh has the axes and their groups",
        "rpc": "Plan(pipe=n, schedule='1f1b') runs stages; `espalier run` starts ranks",
        "weight_grad_store": "Plan(schedule='zbv') puts gradients of weights off",
        "PipelineSchedule OneForwardOneBackwardSchedule InterleavedSchedule ZeroBubbleVPipeScheduler "
        "ScheduledNode": _STYLES,
        "PipelineP2PCommunication": "stages of a pipeline send by themselves",
        "PipelinableContext PipelinableModel LayerSpec partition_uniform partition_balanced "
        "build_kwargs_for_module build_kwargs_for_function exec_func_with_kwargs": _WHOLE,
        "build_from_config build_from_registry build_gradient_handler build_model build_loss build_hooks "
        "build_dataset build_optimizer build_lr_scheduler build_schedule": (
            "make it by its class: configurations name no classes here"
        ),
    },
    elsewhere={"builder pipeline schedule stage_manager utils v_schedule": __name__},
)
