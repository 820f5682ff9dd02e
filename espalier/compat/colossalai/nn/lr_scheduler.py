"""``colossalai.nn.lr_scheduler``: schedules by step."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import lr_scheduler as _schedules


class CosineAnnealingLR(_schedules.CosineAnnealingLR):
    """Torch's, over ``total_steps``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min, last_epoch)


class LinearWarmupLR(_schedules.LambdaLR):
    """Up in a line for ``warmup_steps``, down in a line to 0 at ``total_steps``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, warmup_steps: int = 0, last_epoch: int = -1
    ) -> None:
        def factor(step: int) -> float:
            if step < warmup_steps:
                return (step + 1) / (warmup_steps + 1)
            return (total_steps - step) / max(total_steps - warmup_steps, 1)

        super().__init__(optimizer, factor, last_epoch)


class MultiStepLR(_schedules.MultiStepLR):
    """Torch's; ``total_steps`` is not needed."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        milestones: Any = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, milestones or [], gamma, last_epoch)
