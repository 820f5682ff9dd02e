"""Schedules and optimizers of ``espalier.compat.colossalai``, against what those of Colossal-AI 0.5.0 gave.

Its own classes made ``colossalai_numbers.json``, from the functions of this file, in float64; its schedules
with torch 2.5's cosine, of which it is made (the first rate is the optimizer's whenever ``last_epoch`` is 0).
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from espalier.compat.colossalai.nn import lr_scheduler, optimizer

NUMBERS = json.loads((Path(__file__).parent / "colossalai_numbers.json").read_text("utf-8"))

SCHEDULES: list[tuple[str, dict[str, Any]]] = [
    ("CosineAnnealingLR", {"total_steps": 10, "eta_min": 0.01}),
    ("CosineAnnealingWarmupLR", {"total_steps": 12, "warmup_steps": 4, "eta_min": 0.02}),
    ("CosineAnnealingWarmupLR", {"total_steps": 9}),
    ("FlatAnnealingLR", {"total_steps": 12, "pct_start": 0.5}),
    ("FlatAnnealingWarmupLR", {"total_steps": 14, "warmup_steps": 3, "pct_start": 0.4, "eta_min": 0.01}),
    ("LinearWarmupLR", {"total_steps": 12, "warmup_steps": 3}),
    ("MultiStepLR", {"total_steps": 12, "milestones": [3, 8], "gamma": 0.5}),
    ("MultiStepWarmupLR", {"total_steps": 12, "warmup_steps": 3, "milestones": [2, 5, 9], "gamma": 0.5}),
    ("OneCycleLR", {"total_steps": 15, "pct_start": 0.4}),
    ("PolynomialLR", {"total_steps": 10, "end_lr": 0.01, "power": 2.0}),
    ("PolynomialWarmupLR", {"total_steps": 12, "warmup_steps": 4, "end_lr": 0.01, "power": 1.5}),
    ("StepLR", {"total_steps": 12, "step_size": 3, "gamma": 0.5}),
    ("ExponentialLR", {"total_steps": 12, "gamma": 0.9}),
]
OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("Lamb", {"lr": 0.1}),
    ("Lamb", {"lr": 0.1, "weight_decay": 0.1, "bias_correction": True, "betas": [0.8, 0.9]}),
    ("Lamb", {"lr": 0.1, "adam": True}),
    ("Lars", {"lr": 0.5}),
    ("Lars", {"lr": 0.5, "momentum": 0.9, "weight_decay": 0.1, "eeta": 0.01, "epsilon": 1e-6}),
    ("CAME", {"lr": 0.1}),
    ("CAME", {"lr": 0.1, "weight_decay": 0.1, "clip_threshold": 0.5}),
    ("Adafactor", {}),
    ("Adafactor", {"beta1": 0.9, "weight_decay": 0.1, "scale_parameter": False, "warmup_init": True}),
]


def rates(kind: Callable[..., Any], options: dict[str, Any]) -> list[list[float]]:
    """Of both groups of an optimizer, at each of fourteen steps."""
    p, q = (nn.Parameter(torch.ones(1, dtype=torch.float64)) for _ in range(2))
    made = torch.optim.SGD([{"params": [p], "lr": 0.5}, {"params": [q], "lr": 0.1}], momentum=0.9)
    schedule, found = kind(made, **options), []
    for _ in range(14):
        found.append([group["lr"] for group in made.param_groups])
        made.step()
        schedule.step()
    return found


def parameters() -> list[nn.Parameter]:
    """A matrix, a vector, and one of zeros."""
    ramp = torch.arange(12, dtype=torch.float64)
    values = ramp.sin().view(3, 4), (2 * ramp[:5]).cos(), torch.zeros(3, dtype=torch.float64)
    return [nn.Parameter(x) for x in values]


def give_gradients(held: list[nn.Parameter], step: int) -> None:
    """Others at each step; of one element beyond what Lars takes."""
    for i, p in enumerate(held):
        ramp = torch.arange(p.numel(), dtype=torch.float64).view(p.shape)
        p.grad = (ramp * (step + 1) + i).cos() / 3
    held[1].grad.view(-1)[0] = 40.0  # type: ignore[union-attr]


def updated(kind: Callable[..., Any], options: dict[str, Any]) -> list[list[float]]:
    """The parameters after four steps."""
    held = parameters()
    made = kind(held, **options)
    for step in range(4):
        give_gradients(held, step)
        made.step()
    return [p.detach().flatten().tolist() for p in held]


@pytest.mark.parametrize("at", range(len(SCHEDULES)), ids=[name for name, _ in SCHEDULES])
def test_rates(at: int) -> None:
    """Step by step; and from a state in the middle."""
    name, options = SCHEDULES[at]
    assert NUMBERS["schedules"][at][:2] == [name, options]
    kind = getattr(lr_scheduler, name)
    for here, right in zip(rates(kind, options), NUMBERS["schedules"][at][2], strict=True):
        assert here == pytest.approx(right, rel=1e-12, abs=1e-15)


def test_a_schedule_goes_on_from_its_state(tmp_path: Path) -> None:
    """Which is numbers, so that it is loaded without trust."""
    found = []
    for breaks_off in (False, True):
        made = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.5)
        schedule = lr_scheduler.CosineAnnealingWarmupLR(made, total_steps=9, warmup_steps=3)
        for step in range(7):
            made.step()
            schedule.step()
            if step == 3 and breaks_off:
                torch.save([schedule.state_dict(), made.state_dict()], tmp_path / "states")
                states = torch.load(tmp_path / "states", weights_only=True)
                made = torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1)
                schedule = lr_scheduler.CosineAnnealingWarmupLR(made, total_steps=2)
                schedule.load_state_dict(states[0])
                made.load_state_dict(states[1])
        found.append(made.param_groups[0]["lr"])
    assert found[0] == found[1] < 0.5


@pytest.mark.parametrize("at", range(len(OPTIMIZERS)), ids=[name for name, _ in OPTIMIZERS])
def test_updates(at: int) -> None:
    """Of a matrix, a vector and zeros."""
    name, options = OPTIMIZERS[at]
    assert NUMBERS["optimizers"][at][:2] == [name, options]
    near = 1e-11 if name == "Adafactor" else 1e-14  # whose rows and columns are float32 there
    for here, right in zip(
        updated(getattr(optimizer, name), options), NUMBERS["optimizers"][at][2], strict=True
    ):
        assert here == pytest.approx(right, rel=1e-11, abs=near)


def test_wrong_options() -> None:
    """Are told with what was expected; a rate that does not count is told."""
    held = parameters()
    for kind, options, told in (
        (optimizer.Lamb, {"lr": -1.0}, "lr = -1.0: expected a rate"),
        (optimizer.Lars, {"eeta": 0.0}, "eeta = 0.0: expected a number above 0"),
        (optimizer.CAME, {}, "lr = None: expected a rate"),
        (optimizer.Adafactor, {"relative_step": False}, "expected a rate with relative_step=False"),
        (optimizer.FusedSGD, {"lr": 0.1, "wd_after_momentum": True}, "expected False"),
        (optimizer.FusedAdam, {"lr": 0.1, "weight_decai": 0.1}, "FusedAdam: 1 mistake"),
    ):
        with pytest.raises(ValueError, match=told):
            kind(held, **options)  # type: ignore[operator]
    with pytest.warns(UserWarning, match="has no effect, as in Colossal-AI"):
        optimizer.Adafactor(held, lr=0.1)
    assert optimizer.DistributedLamb(held).defaults["bias_correction"]
    assert optimizer.HybridAdam(model_params=held, lr=0.25).param_groups[0]["lr"] == 0.25
    assert optimizer.FusedAdam(held, 0.1, True, (0.8, 0.9), 1e-7, False).defaults["eps"] == 1e-7
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.Adafactor(held, lr=0.1, relative_step=False)
