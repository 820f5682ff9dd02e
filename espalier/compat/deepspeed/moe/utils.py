"""What programs ask about experts' parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.moe.layer import layers


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and how many experts the first has."""
    found = layers(m)
    return bool(found), found[0].num_experts if found else 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether it holds experts."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those that are not experts', and those that are."""
    held = list(params)
    return [p for p in held if not is_moe_param(p)], [p for p in held if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """An optimizer's groups, with those of experts' parameters apart (``moe=True``), behind the others.

    Args:
        max_group_size: no effect: gradients travel in chunks, whatever the groups.
    """
    given = [dict(param_groups)] if isinstance(param_groups, Mapping) else list(param_groups)
    apart: list[dict[str, Any]] = []
    for group in given:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        for name in dict.fromkeys(p.group_name for p in experts):  # type: ignore[attr-defined]
            own = [p for p in experts if p.group_name == name]  # type: ignore[attr-defined]
            apart.append({**group, "name": name, "moe": True, "params": own})
    return given + apart


__all__ = [
    "has_moe_layers",
    "is_moe_param",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

__getattr__ = or_absent(
    __name__,
    "deepspeed.moe.utils",
    {
        "configure_moe_param_groups is_moe_param_group split_params_grads_into_shared_and_expert_params": (
            "split_params_into_different_moe_groups_for_optimizer makes groups; norms are the engine's"
        )
    },
)
