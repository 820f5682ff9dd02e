"""DeepSpeed's learning-rate schedules, under its names and arguments.

Each is a function of the number of steps done, ``i`` (from 0 after the first ``step()``, which the engine
makes after the first update; before it the rates are those of the schedule's beginning).
"""

from __future__ import annotations

import inspect
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import torch

from espalier.compat.absent import or_absent
from espalier.texts import MistakeError, did_you_mean, unknown_key

Rates = float | Sequence[float]


class Schedule(ABC):
    """Sets the learning rates of an optimizer's groups, step by step.

    Args:
        last_batch_iteration: steps done before, less one.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, last_batch_iteration: int = -1) -> None:
        self.optimizer, self.last_batch_iteration = optimizer, last_batch_iteration
        self._last_lr: list[Any] = [group["lr"] for group in optimizer.param_groups]

    def _begin(self) -> None:
        if self.last_batch_iteration == -1:
            self._set(self.first())

    @abstractmethod
    def get_lr(self) -> list[float]:
        """The rate of each group now."""

    def first(self) -> list[float]:
        """The rates before the first step."""
        return self.get_lr()

    def get_last_lr(self) -> list[Any]:
        """The rates that were set last."""
        return self._last_lr

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one, or to a given number."""
        after = self.last_batch_iteration + 1
        self.last_batch_iteration = after if last_batch_iteration is None else last_batch_iteration
        self._set(self.get_lr())

    def _set(self, rates: Sequence[float]) -> None:
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        self._last_lr = list(rates)

    def state_dict(self) -> dict[str, Any]:
        """What a later run needs to go on."""
        return {"last_batch_iteration": self.last_batch_iteration}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from there; rates follow at the next step, as in DeepSpeed."""
        self.last_batch_iteration = int(state["last_batch_iteration"])

    def _each(self, rates: Rates, name: str) -> list[float]:
        """One number for each group.

        Raises:
            ValueError: there are more or fewer.
        """
        groups = len(self.optimizer.param_groups)
        if not isinstance(rates, list | tuple):
            return [rates] * groups  # type: ignore[list-item]
        if len(rates) != groups:
            raise MistakeError(type(self).__name__, [(name, rates, f"expected {groups}, one for each group")])
        return [*rates]


class _Warmup(Schedule):
    def _warm(self, steps: int, kind: str) -> None:
        if not isinstance(steps, int) or steps <= 0:
            wrong = ("warmup_num_steps", steps, "expected a whole number above 0")
            raise MistakeError(type(self).__name__, [wrong])
        if kind not in ("log", "linear"):
            raise MistakeError(type(self).__name__, [("warmup_type", kind, "expected log or linear")])
        self.warmup_num_steps, self.warmup_type = max(2, steps), kind

    @property
    def _part(self) -> float | None:
        """How much of the warm-up is done; None after it."""
        i = self.last_batch_iteration
        if i >= self.warmup_num_steps:
            return None
        if self.warmup_type == "log":
            return math.log(i + 1) / math.log(self.warmup_num_steps)
        return i / self.warmup_num_steps


class WarmupLR(_Warmup):
    """From ``warmup_min_lr`` up to ``warmup_max_lr``, and on there.

    Args:
        warmup_max_lr: by default the optimizer's own.
        warmup_type: up by the logarithm of the step, or in a line.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates | None = None,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._warm(warmup_num_steps, warmup_type)
        if warmup_max_lr is None:
            warmup_max_lr = [float(group["lr"]) for group in optimizer.param_groups]
        self.min_lrs = self._each(warmup_min_lr, "warmup_min_lr")
        self.max_lrs = self._each(warmup_max_lr, "warmup_max_lr")
        self._begin()

    def first(self) -> list[float]:
        """The lowest."""
        return self.min_lrs

    def get_lr(self) -> list[float]:
        """The rate of each group now."""
        if self.last_batch_iteration < 0:
            return self.first()
        part = self._part
        share = self._after() if part is None else part
        return [low + (high - low) * share for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def _after(self) -> float:
        return 1.0


class WarmupDecayLR(WarmupLR):
    """Up to ``warmup_max_lr``, then down in a line to ``warmup_min_lr`` at step ``total_num_steps``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_lr: Rates = 0.0,
        warmup_max_lr: Rates = 0.001,
        warmup_num_steps: int = 1000,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        self.total_num_steps = total_num_steps
        super().__init__(
            optimizer, warmup_min_lr, warmup_max_lr, warmup_num_steps, warmup_type, last_batch_iteration
        )
        _warn_if_short(total_num_steps, self.warmup_num_steps)

    def _after(self) -> float:
        left = self.total_num_steps - self.last_batch_iteration
        return max(0.0, left / max(1.0, self.total_num_steps - self.warmup_num_steps))


class WarmupCosineLR(_Warmup):
    """Up to the optimizer's own rates, then down along a cosine to ``cos_min_ratio`` of them."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        total_num_steps: int,
        warmup_min_ratio: float = 0.0,
        warmup_num_steps: int = 1000,
        cos_min_ratio: float = 0.0001,
        warmup_type: Literal["log", "linear"] = "log",
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        self._warm(warmup_num_steps, warmup_type)
        self.total_num_steps, self.warmup_min_ratio = total_num_steps, warmup_min_ratio
        self.cos_min_ratio = cos_min_ratio
        self.org_lrs = [float(group["lr"]) for group in optimizer.param_groups]
        _warn_if_short(total_num_steps, self.warmup_num_steps)
        self._begin()

    def get_lr(self) -> list[float]:
        """The rate of each group now."""
        ratio = 0.0 if self.last_batch_iteration < 0 else self._ratio()
        return [rate * ratio for rate in self.org_lrs]

    def _ratio(self) -> float:
        if (part := self._part) is not None:
            return self.warmup_min_ratio + part * (1 - self.warmup_min_ratio)
        after = self.last_batch_iteration - self.warmup_num_steps + 1
        progress = min(1.0, after / max(1, self.total_num_steps - self.warmup_num_steps))
        return max(
            0.0, self.cos_min_ratio + (1 - self.cos_min_ratio) * (1 + math.cos(math.pi * progress)) / 2
        )


def _warn_if_short(total: int, warmup: int) -> None:
    if total < warmup:
        warnings.warn(f"total_num_steps {total} is less than warmup_num_steps {warmup}.", stacklevel=3)


class LRRangeTest(Schedule):
    """Ever higher rates, from ``lr_range_test_min_lr`` on, to see which diverge (Smith 2018)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        lr_range_test_min_lr: Rates = 1e-3,
        lr_range_test_step_size: int = 2000,
        lr_range_test_step_rate: float = 1.0,
        lr_range_test_staircase: bool = False,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        if not isinstance(lr_range_test_step_size, int) or lr_range_test_step_size <= 0:
            wrong = ("lr_range_test_step_size", lr_range_test_step_size, "expected a whole number above 0")
            raise MistakeError("LRRangeTest", [wrong])
        self.min_lr = self._each(lr_range_test_min_lr, "lr_range_test_min_lr")
        self.step_size, self.step_rate = lr_range_test_step_size, lr_range_test_step_rate
        self.staircase = lr_range_test_staircase
        self._begin()

    def first(self) -> list[float]:
        """The lowest."""
        return self.min_lr

    def get_lr(self) -> list[float]:
        """The rate of each group now."""
        part = (self.last_batch_iteration + 1) / self.step_size
        factor = 1 + self.step_rate * (math.floor(part) if self.staircase else part)
        return [rate * factor for rate in self.min_lr]


class OneCycle(Schedule):
    """One cycle of rates up and down, momentum (the first beta) down and up; then a decay (Smith 2018)."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        cycle_min_lr: Rates,
        cycle_max_lr: Rates,
        decay_lr_rate: float = 0.0,
        cycle_first_step_size: int = 2000,
        cycle_second_step_size: int | None = None,
        cycle_first_stair_count: int = 0,
        cycle_second_stair_count: int | None = None,
        decay_step_size: int = 0,
        cycle_momentum: bool = True,
        cycle_min_mom: Rates = 0.8,
        cycle_max_mom: Rates = 0.9,
        decay_mom_rate: float = 0.0,
        last_batch_iteration: int = -1,
    ) -> None:
        super().__init__(optimizer, last_batch_iteration)
        second = cycle_first_step_size if cycle_second_step_size is None else cycle_second_step_size
        if cycle_first_step_size <= 0 or second < 0:
            wrong = (
                "cycle_first_step_size",
                cycle_first_step_size,
                "expected above 0, and the second at least 0",
            )
            raise MistakeError("OneCycle", [wrong])
        self.first_size, self.second_size = float(cycle_first_step_size), float(second)
        self.total_size = self.first_size + self.second_size
        stairs = cycle_first_stair_count
        self.stairs = stairs, stairs if cycle_second_stair_count is None else cycle_second_stair_count
        self.decay_step_size, self.decay_lr_rate = decay_step_size, decay_lr_rate
        self.decay_mom_rate = decay_mom_rate
        self.min_lrs = self._each(cycle_min_lr, "cycle_min_lr")
        self.max_lrs = self._each(cycle_max_lr, "cycle_max_lr")
        self.cycle_momentum = cycle_momentum and "betas" in optimizer.defaults
        if cycle_momentum and not self.cycle_momentum:
            message = f"{type(optimizer).__name__} has no betas: OneCycle leaves its momentum as it is."
            warnings.warn(message, stacklevel=2)
        self.min_moms = self._each(cycle_min_mom, "cycle_min_mom")
        self.max_moms = self._each(cycle_max_mom, "cycle_max_mom")
        if last_batch_iteration == -1:
            self._set(self.min_lrs)
            self._set_momentum(self.min_moms)

    def _height(self) -> float:
        """Where the cycle is between its lowest (0) and its highest (1)."""
        i = (self.last_batch_iteration + 1) % self.total_size
        rising = i <= self.first_size
        part = i / self.first_size if rising else (self.total_size - i) / self.second_size
        stairs = self.stairs[0 if rising else 1]
        return math.floor(part * stairs) / stairs if stairs else part

    @property
    def _decay(self) -> float | None:
        """Steps of the decay, in its intervals; None while the cycle goes on."""
        if self.last_batch_iteration < self.total_size:
            return None
        after = self.last_batch_iteration - self.total_size + 1
        return after / self.decay_step_size if self.decay_step_size else 0.0

    def get_lr(self) -> list[float]:
        """The rate of each group now."""
        if (decay := self._decay) is not None:
            return [rate / (1 + self.decay_lr_rate * decay) for rate in self.min_lrs]
        height = self._height()
        return [low + (high - low) * height for low, high in zip(self.min_lrs, self.max_lrs, strict=True)]

    def get_mom(self) -> list[float] | None:
        """The first beta of each group now; None where it is left alone."""
        if not self.cycle_momentum:
            return None
        if (decay := self._decay) is not None:
            return [beta * (1 + self.decay_mom_rate * decay) for beta in self.max_moms]
        height = self._height()
        return [high - (high - low) * height for low, high in zip(self.min_moms, self.max_moms, strict=True)]

    def step(self, last_batch_iteration: int | None = None) -> None:
        """Go on by one, or to a given number."""
        super().step(last_batch_iteration)
        if (moms := self.get_mom()) is not None:
            self._set_momentum(moms)

    def _set_momentum(self, moms: Sequence[float]) -> None:
        if self.cycle_momentum:
            for group, beta in zip(self.optimizer.param_groups, moms, strict=True):
                group["betas"] = (beta, 0.99)


_BY_NAME = {kind.__name__: kind for kind in (WarmupLR, WarmupDecayLR, WarmupCosineLR, OneCycle, LRRangeTest)}


def make(name: str, params: Mapping[str, Any], optimizer: torch.optim.Optimizer) -> Any:
    """The schedule that a configuration names: one of these, or of ``torch.optim.lr_scheduler``.

    Raises:
        ValueError: there is none of that name, or an option is unknown.
    """
    kind = _BY_NAME.get(name) or getattr(torch.optim.lr_scheduler, name, None)
    if kind is None:
        hint = did_you_mean(name, _BY_NAME, f"known: {', '.join(_BY_NAME)}, and torch's", show=str)
        wrong = [("scheduler.type", name, f"unknown schedule; {hint}")]
        raise MistakeError("DeepSpeed's configuration", wrong)
    takes = [key for key in inspect.signature(kind).parameters if key != "optimizer"]
    if strange := [key for key in params if key not in takes]:
        unknown = [unknown_key(f"scheduler.params.{key}", params[key], takes) for key in strange]
        raise MistakeError("DeepSpeed's configuration", unknown)
    return kind(optimizer, **params)


__all__ = ["LRRangeTest", "OneCycle", "WarmupCosineLR", "WarmupDecayLR", "WarmupLR"]

__getattr__ = or_absent(
    __name__,
    "deepspeed.runtime.lr_schedules",
    {
        "add_tuning_arguments parse_arguments get_config_from_args get_lr_from_config override_params "
        "override_lr_range_test_params override_1cycle_params override_warmupLR_params "
        "override_warmupCosineLR_params": (
            "say the schedule in the section scheduler of the configuration, from arguments of your own"
        ),
        "update_lr get_torch_optimizer": "the schedules are torch's, on torch's optimizer",
    },
)
