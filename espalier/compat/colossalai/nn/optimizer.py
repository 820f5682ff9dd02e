"""``colossalai.nn.optimizer``: each is torch's; where it updates says the plan."""

from __future__ import annotations

from typing import Any

import torch


def HybridAdam(params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    """AdamW of torch; where it updates says the plan."""
    adamw = options.pop("adamw_mode", True)
    kept = {key: options[key] for key in ("betas", "eps", "weight_decay", "amsgrad") if key in options}
    return (torch.optim.AdamW if adamw else torch.optim.Adam)(params, lr=lr, **{"weight_decay": 0.0, **kept})


CPUAdam = FusedAdam = HybridAdam
