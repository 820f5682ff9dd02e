"""``colossalai.nn.optimizer``: torch's where it has one; where it updates says the plan.

Those that torch lacks go operation by operation, as Colossal-AI 0.5 computes them, exact on whatever layout.
"""

from __future__ import annotations

import math
import warnings
from typing import Any, Final

import torch

from espalier.compat.absent import or_absent
from espalier.compat.common import OneByOne
from espalier.texts import Mistake, refuse

_TAKEN: Final = ("betas", "eps", "weight_decay", "amsgrad")
# where states lie is the plan's, and what is printed nobody's
_IDLE: Final = ("nvme_offload_fraction", "nvme_offload_dir", "simd_log", "set_grad_none")


def HybridAdam(
    model_params: Any = None, lr: float = 1e-3, *args: Any, **options: Any
) -> torch.optim.Optimizer:
    """AdamW of torch; where it updates says the plan.

    Args:
        options: ``betas``, ``eps``, ``weight_decay``, ``amsgrad``; ``adamw_mode=False`` is Adam.
            ``nvme_offload_fraction``, ``nvme_offload_dir``, ``simd_log`` and ``set_grad_none`` have no
            effect: ``Plan(offload=...)`` says where states lie.

    Raises:
        MistakeError: ``bias_correction=False``, or an option that is none.
    """
    order = ("bias_correction", "betas", "eps", "weight_decay", "adamw_mode", *_IDLE[:2])
    return _adam("HybridAdam", model_params, lr, {**dict(zip(order, args, strict=False)), **options})


CPUAdam = HybridAdam


def FusedAdam(params: Any = None, lr: float = 1e-3, *args: Any, **options: Any) -> torch.optim.Optimizer:
    """As :func:`HybridAdam`."""
    order = ("bias_correction", "betas", "eps", "adamw_mode", "weight_decay", "amsgrad", "set_grad_none")
    return _adam("FusedAdam", params, lr, {**dict(zip(order, args, strict=False)), **options})


def _adam(name: str, params: Any, lr: float, options: dict[str, Any]) -> torch.optim.Optimizer:
    for other in ("params", "model_params"):  # the first argument, as it is called by either
        if params is None:
            params = options.pop(other, None)
    adamw = options.pop("adamw_mode", True)
    mistakes = []
    if not options.pop("bias_correction", True):
        mistakes.append(("bias_correction", False, "torch's Adam corrects: expected True"))
    known = ", ".join((*_TAKEN, "adamw_mode", "bias_correction", *_IDLE))
    mistakes += [(k, x, f"expected one of {known}") for k, x in options.items() if k not in _TAKEN + _IDLE]
    refuse(name, mistakes)
    taken = {key: options[key] for key in _TAKEN if key in options}
    return (torch.optim.AdamW if adamw else torch.optim.Adam)(params, lr=lr, **{"weight_decay": 0.0, **taken})


def FusedSGD(
    params: Any,
    lr: float,
    momentum: float = 0,
    dampening: float = 0,
    weight_decay: float = 0,
    nesterov: bool = False,
    wd_after_momentum: bool = False,
) -> torch.optim.Optimizer:
    """SGD of torch.

    Raises:
        MistakeError: ``wd_after_momentum=True``.
    """
    if wd_after_momentum:
        refuse("FusedSGD", [("wd_after_momentum", True, "torch's SGD decays before: expected False")])
    return torch.optim.SGD(params, lr, momentum, dampening, weight_decay, nesterov)


class _Update(OneByOne):
    def setup_distributed(self, *args: Any, **options: Any) -> None:
        """Nothing: parameters know how they lie."""


def _check(owner: str, group: dict[str, Any], betas: int = 0) -> None:
    """See that options are in their bounds.

    Raises:
        MistakeError: one is not.
    """
    least = {"lr": "a rate of 0 or more", "eps": "0 or more", "epsilon": "0 or more"}
    least |= {"momentum": "0 or more", "weight_decay": "0 or more"}
    mistakes: list[Mistake | tuple[str, Any, str]] = []
    for key, expected in least.items():
        value = group.get(key, 0)
        if not isinstance(value, tuple) and (value is None or value < 0):
            mistakes.append((key, value, f"expected {expected}"))
    if betas and not all(0 <= beta <= 1 for beta in group["betas"]):
        mistakes.append(("betas", group["betas"], f"expected {betas} numbers from 0 to 1"))
    refuse(owner, mistakes)


def _averaged(state: dict[str, Any], name: str, x: torch.Tensor, beta: float) -> torch.Tensor:
    """A running average, from 0 on, with one more."""
    if name not in state:
        state[name] = torch.zeros_like(x)
    average: torch.Tensor = state[name].mul_(beta).add_(x, alpha=1 - beta)
    return average


class Lamb(_Update):
    """LAMB (You et al. 2019): Adam's update, scaled for each parameter by its norm.

    Args:
        adam: scale none: so it is Adam.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        adam: bool = False,
        bias_correction: bool = False,
    ) -> None:
        defaults = {
            "lr": lr,
            "betas": tuple(betas),
            "eps": eps,
            "weight_decay": weight_decay,
            "bias_correction": bias_correction,
        }
        _check("Lamb", defaults, betas=2)
        self.adam = adam
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        first, second = group["betas"]
        state = self.state[p]
        state["step"] = step = state.get("step", 0) + 1
        mean, squares = (
            _averaged(state, "exp_avg", grad, first),
            _averaged(state, "exp_avg_sq", grad * grad, second),
        )
        rate = group["lr"]
        if group["bias_correction"]:
            rate *= (1 - second**step) ** 0.5 / (1 - first**step)
        direction = mean / (squares.sqrt() + group["eps"]) + group["weight_decay"] * p
        if self.adam:
            p.sub_(direction * rate)
            return
        of_weight, of_step = p.norm(), direction.norm()
        scales = (of_weight > 0) & (of_step > 0)
        p.sub_(direction * torch.where(scales, of_weight / of_step, torch.ones_like(of_step)) * rate)


class Lars(_Update):
    """LARS (You et al. 2017): SGD whose rate is scaled for each parameter by its norm and its gradient's.

    Args:
        eeta: by how much.
        epsilon: added to the norms it is divided by.

    A group with ``lars=False`` is updated by SGD. As in Colossal-AI, a scale is 50 at most, and an element
    of a gradient 10.
    """

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        momentum: float = 0,
        eeta: float = 1e-3,
        weight_decay: float = 0,
        epsilon: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "momentum": momentum,
            "weight_decay": weight_decay,
            "eeta": eeta,
            "epsilon": epsilon,
            "lars": True,
        }
        _check("Lars", defaults)
        if not 0 < eeta <= 1:
            refuse("Lars", [("eeta", eeta, "expected a number above 0, and 1 at most")])
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        rate, decay = group["lr"], group["weight_decay"]
        if group["lars"]:
            of_weight, of_grad = p.norm(), grad.norm()
            scale = group["eeta"] * of_weight / (of_grad + decay * of_weight + group["epsilon"])
            scales = (of_weight > 0) & (of_grad > 0)
            rate = torch.where(scales, scale, torch.ones_like(of_weight)).clamp(0.0, 50.0) * rate
            grad = grad + decay * p
        grad = grad.clamp(-10.0, 10.0)
        if group["momentum"]:
            state = self.state[p]
            if "momentum_buffer" in state:
                state["momentum_buffer"].mul_(group["momentum"]).add_(grad)
            else:
                state["momentum_buffer"] = grad.clone()
            grad = state["momentum_buffer"]
        p.sub_(grad * rate)


class _Factored(_Update):
    """Keeps squares of a matrix by the means of its rows and of its columns (Shazeer & Stern 2018)."""

    def _mean_squares(
        self, state: dict[str, Any], name: str, squares: torch.Tensor, beta: float
    ) -> torch.Tensor:
        """One over the root of what is kept, with these."""
        if squares.ndim < 2:
            return _averaged(state, name, squares, beta).rsqrt()
        for end, dim in (("row", -1), ("col", -2)):
            _averaged(state, f"{name}_{end}", squares.mean(dim), beta)
        rows, columns = state[f"{name}_row"], state[f"{name}_col"]
        of_rows = (rows / rows.mean(-1, keepdim=True)).rsqrt().unsqueeze(-1)
        return of_rows * columns.unsqueeze(-2).rsqrt()

    @staticmethod
    def _clipped(update: torch.Tensor, threshold: float) -> torch.Tensor:
        """With a root of the mean square of a threshold at most."""
        return update / (update.norm() / update.numel() ** 0.5 / threshold).clamp(min=1.0)


class Adafactor(_Factored):
    """Adafactor (Shazeer & Stern 2018), as Colossal-AI has it.

    Rates are relative, as there: ``lr`` counts with ``relative_step=False`` alone, and ``scale_parameter``
    scales by ``eps[1]``, not by a parameter's own size.
    """

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-3),
        clip_threshold: float = 1.0,
        decay_rate: float = -0.8,
        beta1: float | None = None,
        weight_decay: float = 0.0,
        scale_parameter: bool = True,
        relative_step: bool = True,
        warmup_init: bool = False,
    ) -> None:
        if warmup_init and not relative_step:
            refuse("Adafactor", [("warmup_init", True, "expected relative_step=True with it")])
        if lr is None and not relative_step:
            refuse("Adafactor", [("lr", None, "expected a rate with relative_step=False")])
        if lr is not None and relative_step:
            message = (
                f"Adafactor(lr={lr}) has no effect, as in Colossal-AI: relative_step=False lets it count."
            )
            warnings.warn(message, stacklevel=2)
        defaults = {
            "lr": None if relative_step else lr,
            "eps": tuple(eps),
            "clip_threshold": clip_threshold,
            "decay_rate": decay_rate,
            "beta1": beta1,
            "weight_decay": weight_decay,
            "scale_parameter": scale_parameter,
            "relative_step": relative_step,
            "warmup_init": warmup_init,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        state = self.state[p]
        state["step"] = step = state.get("step", 0) + 1
        rate = group["lr"]
        if group["relative_step"]:
            rate = min(1e-6 * step if group["warmup_init"] else 1e-2, 1 / math.sqrt(step))
        if group["scale_parameter"]:
            rate *= group["eps"][1]
        squares = grad.square() + group["eps"][0]
        beta = 1 - step ** group["decay_rate"]
        update = self._mean_squares(state, "exp_avg_sq", squares, beta) * grad
        update = self._clipped(update, group["clip_threshold"]) * rate
        if (first := group["beta1"]) is not None:
            update = _averaged(state, "exp_avg", update, first)
        if group["weight_decay"]:
            p.sub_(p * (group["weight_decay"] * rate))
        p.sub_(update)


class CAME(_Factored):
    """CAME (Luo et al. 2023): Adafactor's update, by how well it foretells itself."""

    def __init__(
        self,
        params: Any,
        lr: float | None = None,
        eps: tuple[float, float] = (1e-30, 1e-16),
        clip_threshold: float = 1.0,
        betas: tuple[float, float, float] = (0.9, 0.999, 0.9999),
        weight_decay: float = 0.0,
    ) -> None:
        defaults = {
            "lr": lr,
            "eps": tuple(eps),
            "clip_threshold": clip_threshold,
            "betas": tuple(betas),
            "weight_decay": weight_decay,
        }
        _check("CAME", defaults, betas=3)
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        state, (first, second, third) = self.state[p], group["betas"]
        state["step"] = state.get("step", 0) + 1
        squares = grad.square() + group["eps"][0]
        update = self._mean_squares(state, "exp_avg_sq", squares, second) * grad
        update = self._clipped(update, group["clip_threshold"])
        average = _averaged(state, "exp_avg", update, first)
        if grad.ndim > 1:
            unsteady = (update - average).square() + group["eps"][1]
            average = self._mean_squares(state, "exp_avg_res", unsteady, third) * average
        if group["weight_decay"]:
            p.sub_(p * (group["weight_decay"] * group["lr"]))
        p.sub_(average * group["lr"])


class DistributedLamb(Lamb):
    """:class:`Lamb` with another default: the plan cuts parameters and states of all of them."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-6,
        weight_decay: float = 0,
        bias_correction: bool = True,
    ) -> None:
        super().__init__(params, lr, betas, eps, weight_decay, bias_correction=bias_correction)


DistributedCAME, DistributedAdaFactor = CAME, Adafactor


def cast_to_distributed(optim: torch.optim.Optimizer) -> torch.optim.Optimizer:
    """The optimizer: its parameters know how they lie."""
    return optim


__all__ = [
    "CAME",
    "Adafactor",
    "CPUAdam",
    "DistributedAdaFactor",
    "DistributedCAME",
    "DistributedLamb",
    "FusedAdam",
    "FusedSGD",
    "HybridAdam",
    "Lamb",
    "Lars",
    "cast_to_distributed",
]

_SMALL = (
    "states in eight bits or of low rank are not there: Plan(offload={'states': 'host'}) puts them elsewhere"
)
__getattr__ = or_absent(
    __name__,
    "colossalai.nn.optimizer",
    {
        "colossalai_optimizer": "optimizers stay as they are",
        "FusedLAMB": "Lamb(bias_correction=True) with max_norm=1.0 of the plugin is nearest to it",
        "GaLoreAdamW GaLoreAdafactor GaLoreAdamW8bit DistGaloreAwamW get_galore_param_groups": _SMALL,
        "NVMeOptimizer": "Plan(offload={'states': 'disk'}) keeps states on a disk",
        "ColossalaiOptimizer": "optimizers stay as they are",
        "GeminiAdamOptimizer ZeroOptimizer": "colossalai.zero has them",
    },
    elsewhere={
        "adafactor came cpu_adam distributed_adafactor distributed_came distributed_galore distributed_lamb "
        "fused_adam fused_lamb fused_sgd galore hybrid_adam lamb lars nvme_optimizer": __name__,
        "gemini_optimizer zero_optimizer": "espalier.compat.colossalai.zero",
    },
)
