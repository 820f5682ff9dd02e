"""``colossalai.builder``: models of several stages, which the plan cuts."""

from typing import Any

from torch import nn

from espalier.compat.absent import or_absent
from espalier.texts import refuse

__path__: list[str] = []  # there are modules in it


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


__all__ = ["build_pipeline_model", "build_pipeline_model_from_cfg"]

__getattr__ = or_absent(
    __name__,
    "colossalai.builder",
    {
        "build_from_config build_from_registry build_gradient_handler build_model build_loss build_hooks "
        "build_dataset build_optimizer build_lr_scheduler build_schedule": (
            "make it by its class: configurations name no classes here"
        )
    },
    elsewhere={"builder pipeline": __name__},
)
