"""``colossalai.nn.lr_scheduler``: schedules by step, each told how many there are."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Sequence
from typing import Any

import torch
from torch.optim import lr_scheduler as _schedules

from espalier.compat.absent import or_absent
from espalier.texts import refuse


class _Staged(_schedules.LRScheduler):
    """Up in a line for ``warmup_steps``, on as it is for ``flat_steps``, then down.

    Its state is numbers: what is saved can be loaded without trust.
    """

    warmup_steps = flat_steps = 0

    def get_lr(self) -> list[Any]:
        """The rate of each group now."""
        return [self._rate(self.last_epoch, rate) for rate in self.base_lrs]

    def _rate(self, step: int, rate: Any) -> Any:
        if step < self.warmup_steps:
            return (step + 1) / self.warmup_steps * rate
        after = step - self.warmup_steps - self.flat_steps
        return rate if after < 0 else self._after(after, rate)

    @abstractmethod
    def _after(self, step: int, rate: Any) -> Any:
        """So many steps after the beginning of the way down."""


class _Cosine(_Staged):
    def __init__(self, optimizer: torch.optim.Optimizer, steps: int, eta_min: float, last_epoch: int) -> None:
        self.steps, self.eta_min = steps, eta_min
        super().__init__(optimizer, last_epoch)

    def _after(self, step: int, rate: Any) -> Any:
        return self.eta_min + (rate - self.eta_min) * (1 + math.cos(math.pi * step / self.steps)) / 2


class CosineAnnealingLR(_schedules.CosineAnnealingLR):
    """Torch's, over ``total_steps``."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, eta_min: float = 0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, total_steps, eta_min, last_epoch)


class CosineAnnealingWarmupLR(_Cosine):
    """Up in a line for ``warmup_steps``, then down along a cosine to ``eta_min`` at ``total_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        eta_min: float = 0.0,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_steps = int(warmup_steps)
        super().__init__(optimizer, total_steps - warmup_steps, eta_min, last_epoch)


class FlatAnnealingLR(_Cosine):
    """The same for a share ``pct_start`` of the steps, then down along a cosine to 0."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        pct_start: float = 0.72,
        last_epoch: int = -1,
    ) -> None:
        _check_share(type(self), pct_start)
        self.flat_steps = int(total_steps * pct_start)
        super().__init__(optimizer, total_steps - self.flat_steps, 0.0, last_epoch)


class FlatAnnealingWarmupLR(_Cosine):
    """As :class:`FlatAnnealingLR`, behind ``warmup_steps`` up in a line."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        pct_start: float = 0.72,
        eta_min: float = 0,
        last_epoch: int = -1,
    ) -> None:
        _check_share(type(self), pct_start)
        self.warmup_steps = warmup_steps
        self.flat_steps = int((total_steps - warmup_steps) * pct_start)
        super().__init__(optimizer, total_steps - warmup_steps - self.flat_steps, eta_min, last_epoch)


def _check_share(kind: type, share: float) -> None:
    if not 0 <= share <= 1:
        refuse(kind.__name__, [("pct_start", share, "expected a share from 0 to 1")])


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


class MultiStepWarmupLR(_Staged):
    """Up in a line for ``warmup_steps``, then times ``gamma`` at each of the milestones behind them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        milestones: Sequence[int] | None = None,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        if not milestones:
            refuse("MultiStepWarmupLR", [("milestones", milestones, "expected steps, one at least")])
        self.warmup_steps, self.gamma = warmup_steps, gamma
        self.milestones = [step - warmup_steps for step in milestones or () if step >= warmup_steps]
        super().__init__(optimizer, last_epoch)

    def _after(self, step: int, rate: Any) -> Any:
        return rate * self.gamma ** sum(one <= step for one in self.milestones)


class _Polynomial(_Staged):
    def __init__(
        self, optimizer: torch.optim.Optimizer, steps: int, end_lr: float, power: float, last_epoch: int
    ) -> None:
        if end_lr < 0:
            refuse(type(self).__name__, [("end_lr", end_lr, "expected 0 or more")])
        self.steps, self.end_lr, self.power = steps, end_lr, power
        super().__init__(optimizer, last_epoch)

    def _after(self, step: int, rate: Any) -> Any:
        left = 1 - min(step, self.steps) / self.steps
        return (rate - self.end_lr) * left**self.power + self.end_lr


class PolynomialLR(_Polynomial):
    """Down to ``end_lr`` at ``total_steps``, by a power of what is left of them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, total_steps, end_lr, power, last_epoch)


class PolynomialWarmupLR(_Polynomial):
    """As :class:`PolynomialLR`, behind ``warmup_steps`` up in a line."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        warmup_steps: int = 0,
        end_lr: float = 0.0001,
        power: float = 1.0,
        last_epoch: int = -1,
    ) -> None:
        self.warmup_steps = warmup_steps
        super().__init__(optimizer, total_steps - warmup_steps, end_lr, power, last_epoch)


class OneCycleLR(_schedules.OneCycleLR):
    """Torch's, up to the rates that the optimizer has."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, *args: Any, **options: Any
    ) -> None:
        names = tuple(
            "pct_start anneal_strategy cycle_momentum base_momentum max_momentum div_factor "
            "final_div_factor last_epoch".split()
        )
        options = {**dict(zip(names, args, strict=False)), **options}
        super().__init__(optimizer, [x["lr"] for x in optimizer.param_groups], total_steps, **options)


class _Counted(_schedules.LRScheduler):
    """Torch's; ``total_steps`` is not needed."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, *args: Any, **options: Any
    ) -> None:
        super().__init__(optimizer, *args, **options)


class LambdaLR(_Counted, _schedules.LambdaLR):
    """Torch's; ``total_steps`` is not needed."""


class MultiplicativeLR(_Counted, _schedules.MultiplicativeLR):
    """Torch's; ``total_steps`` is not needed."""


class StepLR(_schedules.StepLR):
    """Torch's; ``total_steps`` is not needed."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_steps: int,
        step_size: int = 1,
        gamma: float = 0.1,
        last_epoch: int = -1,
    ) -> None:
        super().__init__(optimizer, step_size, gamma, last_epoch)


class ExponentialLR(_schedules.ExponentialLR):
    """Torch's; ``total_steps`` is not needed."""

    def __init__(
        self, optimizer: torch.optim.Optimizer, total_steps: int, gamma: float = 1.0, last_epoch: int = -1
    ) -> None:
        super().__init__(optimizer, gamma, last_epoch)


__all__ = [
    "CosineAnnealingLR",
    "CosineAnnealingWarmupLR",
    "ExponentialLR",
    "FlatAnnealingLR",
    "FlatAnnealingWarmupLR",
    "LambdaLR",
    "LinearWarmupLR",
    "MultiStepLR",
    "MultiStepWarmupLR",
    "MultiplicativeLR",
    "OneCycleLR",
    "PolynomialLR",
    "PolynomialWarmupLR",
    "StepLR",
]

__getattr__ = or_absent(
    __name__,
    "colossalai.nn.lr_scheduler",
    {
        "DelayerScheduler TwoStageScheduler WarmupDelayerScheduler WarmupScheduler": (
            "CosineAnnealingWarmupLR and the like warm up; torch's SequentialLR joins others"
        )
    },
    elsewhere={"cosine delayed linear multistep onecycle poly": __name__},
)
