"""``deepspeed.ops.adagrad``: torch's; where it updates says the plan."""

from __future__ import annotations

import torch

from espalier.compat.absent import or_absent
from espalier.compat.deepspeed.optimizers import Parameters


class DeepSpeedCPUAdagrad:
    """Adagrad of torch."""

    def __new__(  # type: ignore[misc]
        cls,
        model_params: Parameters,
        lr: float = 1e-2,
        eps: float = 1e-10,
        weight_decay: float = 0.0,
        amsgrad: bool = False,
        fp32_optimizer_states: bool = True,
    ) -> torch.optim.Optimizer:
        """The optimizer."""
        if not fp32_optimizer_states:
            raise ValueError(
                "DeepSpeedCPUAdagrad(fp32_optimizer_states=False): expected True: states are float32."
            )
        return torch.optim.Adagrad(model_params, lr=lr, eps=eps, weight_decay=weight_decay)


__getattr__ = or_absent(
    __name__,
    "deepspeed.ops.adagrad",
    {},
    elsewhere={"cpu_adagrad": __name__},
)
