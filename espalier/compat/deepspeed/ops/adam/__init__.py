"""``deepspeed.ops.adam``: each is torch's AdamW or Adam; where it updates says the plan."""

from __future__ import annotations

from typing import Any

import torch

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.optimizers import Parameters, adam


class FusedAdam:
    """AdamW, or with ``adam_w_mode=False`` Adam, of torch."""

    def __new__(cls, params: Parameters, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        """The optimizer."""
        return adam(params, *args, **kwargs)


class DeepSpeedCPUAdam:
    """AdamW, or with ``adamw_mode=False`` Adam, of torch."""

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        adamw_mode: bool = True,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        return adam(
            model_params,
            lr=lr,
            bias_correction=bias_correction,
            betas=betas,
            eps=eps,
            weight_decay=weight_decay,
            amsgrad=amsgrad,
            adam_w_mode=adamw_mode,
            fp32_optimizer_states=fp32_optimizer_states,
        )


_KERNELS = "updates are torch's, of many tensors at a time"

__getattr__ = or_absent(
    __name__,
    "deepspeed.ops.adam",
    {
        "zenflow_cpu_adam zenflow_torch_adam ZenFlowCPUAdam ZenFlowSelectiveAdamW "
        "ZenFlowSelectiveAdamW_stage3": ("`offload_optimizer` of the configuration lays states on the host"),
        "multi_tensor_apply multi_tensor_applier": _KERNELS,
    },
    elsewhere={"fused_adam cpu_adam": __name__},
)
