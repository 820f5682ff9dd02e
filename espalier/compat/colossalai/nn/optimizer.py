"""``colossalai.nn.optimizer``: each is torch's; where it updates says the plan."""

from __future__ import annotations

from typing import Any, Final

import torch

from espalier.texts import refuse

_TAKEN: Final = ("betas", "eps", "weight_decay", "amsgrad")
# where states lie is the plan's, and what is printed nobody's
_IDLE: Final = ("nvme_offload_fraction", "nvme_offload_dir", "simd_log", "set_grad_none")


def HybridAdam(params: Any, lr: float = 1e-3, **options: Any) -> torch.optim.Optimizer:
    """AdamW of torch; where it updates says the plan.

    Args:
        options: ``betas``, ``eps``, ``weight_decay``, ``amsgrad``; ``adamw_mode=False`` is Adam.
            ``nvme_offload_fraction``, ``nvme_offload_dir``, ``simd_log`` and ``set_grad_none`` have no
            effect: ``Plan(offload=...)`` says where states lie.

    Raises:
        MistakeError: ``bias_correction=False``, or an option that is none.
    """
    adamw = options.pop("adamw_mode", True)
    mistakes = []
    if not options.pop("bias_correction", True):
        mistakes.append(("bias_correction", False, "torch's Adam corrects: expected True"))
    known = ", ".join((*_TAKEN, "adamw_mode", "bias_correction", *_IDLE))
    mistakes += [(k, x, f"expected one of {known}") for k, x in options.items() if k not in _TAKEN + _IDLE]
    refuse("HybridAdam", mistakes)
    taken = {key: options[key] for key in _TAKEN if key in options}
    return (torch.optim.AdamW if adamw else torch.optim.Adam)(params, lr=lr, **{"weight_decay": 0.0, **taken})


CPUAdam = FusedAdam = HybridAdam
