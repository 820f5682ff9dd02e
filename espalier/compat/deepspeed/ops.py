"""``deepspeed.ops``: the optimizers that DeepSpeed makes by name, as torch's own; those that torch lacks.

What works element by element is torch's own class, which the engine updates on local tensors; the others go
operation by operation, exact on whatever layout.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Protocol

import torch
from torch import nn

from espalier.compat.absent import or_absent
from espalier.compat.common import OneByOne
from espalier.parallel.several import Several
from espalier.texts import Mistake, MistakeError, did_you_mean, unknown_key

Parameters = Iterable[torch.Tensor] | Iterable[dict[str, Any]]


def adam_or_adamw(
    params: Parameters,
    lr: float = 1e-3,
    bias_correction: bool = True,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    adam_w_mode: bool = True,
    weight_decay: float | None = None,
    amsgrad: bool = False,
    torch_adam: bool = False,
    fp32_optimizer_states: bool = True,
    set_grad_none: bool = True,
    foreach: bool | None = None,
    freeze_step: int | None = None,
) -> torch.optim.Optimizer:
    """Adam as DeepSpeed has it: AdamW, unless ``adam_w_mode`` is off.

    Args:
        weight_decay: by default none; with ``torch_adam`` what torch's optimizer has, 0.01 of AdamW.

    Raises:
        ValueError: no bias correction, states in less than float32, or 1-bit Adam's warm-up.
    """
    wrong: list[tuple[str, Any, str]] = []
    if not bias_correction:
        wrong.append(("bias_correction", False, "torch's Adam corrects it always"))
    if not fp32_optimizer_states:
        wrong.append(("fp32_optimizer_states", False, "states are float32, or the update is another"))
    if freeze_step is not None:
        wrong.append(("freeze_step", freeze_step, "gradients are not compressed"))
    if wrong:
        raise MistakeError("Adam", wrong)
    kind = torch.optim.AdamW if adam_w_mode else torch.optim.Adam
    first, second = betas
    if weight_decay is None:
        weight_decay = 0.01 if torch_adam and adam_w_mode else 0.0
    return kind(params, lr=lr, betas=(first, second), eps=eps, weight_decay=weight_decay, amsgrad=amsgrad)


class Scaled(Protocol):
    """What of DeepSpeed's engine an optimizer shows."""

    global_steps: int

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer."""

    def loss_scale(self) -> float:
        """By which the loss is multiplied."""

    def dynamic_loss_scale(self) -> bool:
        """Whether it follows the gradients."""

    def was_step_applied(self) -> bool:
        """Whether the last step has updated."""

    def backward(self, loss: torch.Tensor) -> torch.Tensor:
        """Gradients of a loss."""


def show_scale(engine: Scaled) -> None:
    """Let the optimizer, which is torch's own, have what programs ask DeepSpeed's: ``cur_scale``,
    ``loss_scale``, ``overflow``, ``dynamic_loss_scale`` and ``backward``, as of the last step."""
    if engine.optimizer is None:
        return
    shown = vars(engine.optimizer)
    shown["cur_scale"] = shown["loss_scale"] = engine.loss_scale()
    shown["dynamic_loss_scale"] = engine.dynamic_loss_scale()
    shown["overflow"] = engine.global_steps > 0 and not engine.was_step_applied()
    if "backward" not in shown:
        owner = weakref.ref(engine)
        shown["backward"] = lambda loss, **options: owner().backward(loss, **options)  # type: ignore[union-attr]


class Lion(OneByOne):
    """Lion (Chen et al. 2023): the sign of an average of gradients.

    Args:
        betas: of the average that is stepped by, and of the one that is kept.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": tuple(betas), "weight_decay": weight_decay})

    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        first, second = group["betas"]
        state = self.state[p]
        if not state:
            state["exp_avg"] = torch.zeros_like(p)
        average = state["exp_avg"]
        p.mul_(1 - group["lr"] * group["weight_decay"])
        p.add_(average.mul(first).add(grad, alpha=1 - first).sign(), alpha=-group["lr"])
        average.mul_(second).add_(grad, alpha=1 - second)


class Lamb(OneByOne):
    """LAMB (You et al. 2019): Adam's update, scaled for each parameter by its norm.

    Args:
        max_coeff, min_coeff: bounds of that factor.
        eps_inside_sqrt: add ``eps`` to the second moment, and not to its root.
    """

    def __init__(
        self,
        params: Parameters,
        lr: float = 1e-3,
        bias_correction: bool = True,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        eps_inside_sqrt: bool = False,
        weight_decay: float = 0.0,
        max_coeff: float = 10.0,
        min_coeff: float = 0.01,
    ) -> None:
        defaults = {
            "lr": lr,
            "bias_correction": bias_correction,
            "betas": tuple(betas),
            "eps": eps,
            "eps_inside_sqrt": eps_inside_sqrt,
            "weight_decay": weight_decay,
            "max_coeff": max_coeff,
            "min_coeff": min_coeff,
        }
        super().__init__(params, defaults)

    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        first, second = group["betas"]
        state = self.state[p]
        if not state:
            state.update(step=0, exp_avg=torch.zeros_like(p), exp_avg_sq=torch.zeros_like(p))
        state["step"] += 1
        state["exp_avg"].mul_(first).add_(grad, alpha=1 - first)
        state["exp_avg_sq"].mul_(second).addcmul_(grad, grad, value=1 - second)
        size = group["lr"]
        if group["bias_correction"]:
            steps = state["step"]
            size *= (1 - second**steps) ** 0.5 / (1 - first**steps)
        inside = group["eps_inside_sqrt"]
        root = (state["exp_avg_sq"] + group["eps"] * inside).sqrt() + group["eps"] * (not inside)
        direction = state["exp_avg"] / root + group["weight_decay"] * p
        ratio = p.norm() / direction.norm()
        ratio = torch.where(ratio.isfinite() & (ratio > 0), ratio, torch.ones_like(ratio))
        p.sub_(direction * ratio.clamp(group["min_coeff"], group["max_coeff"]) * size)


_MUON = {"lr", "momentum", "weight_decay", "nesterov", "ns_steps", "muon_lr"}
_AUXILIARY = {"lr", "betas", "eps", "weight_decay", "adam_lr"}


def muon(module: nn.Module, groups: list[dict[str, Any]], params: Mapping[str, Any]) -> Several:
    """Matrices but of embeddings and the last layer go to Muon, the rest to Adam, as DeepSpeed has it.

    Args:
        groups: of parameters, with options of their own.
        params: of both; ``muon_lr`` and ``adam_lr`` are for one of them.

    Raises:
        ValueError: an unknown option.
    """
    params = {key: value for key, value in params.items() if key != "adam_w_mode"}
    if strange := [key for key in params if key not in _MUON | _AUXILIARY]:
        raise MistakeError("Muon", [unknown_key(key, params[key], _MUON | _AUXILIARY) for key in strange])
    matrices = {
        id(p)
        for name, p in module.named_parameters()
        if p.ndim == 2 and not any(word in name.lower() for word in ("embed", "lm_head"))
    }
    matrices -= {id(p) for m in module.modules() if isinstance(m, nn.Embedding) for p in m.parameters()}
    parts: list[torch.optim.Optimizer] = []
    for group in groups:
        for use_muon, known, own in ((True, _MUON, "muon_lr"), (False, _AUXILIARY, "adam_lr")):
            held = [p for p in group["params"] if p.requires_grad and (id(p) in matrices) is use_muon]
            if held:
                options: dict[str, Any] = {"weight_decay": 0.0}
                options.update({key: params[key] for key in known & params.keys() if key != own})
                if own in params:
                    options["lr"] = params[own]
                options.update({key: x for key, x in group.items() if key in known})
                kind = torch.optim.Muon if use_muon else torch.optim.AdamW
                parts.append(kind([{"params": held, "use_muon": use_muon, **options}]))
    return Several(parts)


_BY_NAME: dict[str, Callable[..., torch.optim.Optimizer]] = {
    "adam": adam_or_adamw,
    "lamb": Lamb,
    "lion": Lion,
}
_ONE_BIT = ("onebitadam", "zerooneadam", "onebitlamb")
_MUP = ("muadam", "muadamw", "musgd")


def make(
    name: str, params: Mapping[str, Any], module: nn.Module, parameters: Parameters | None
) -> torch.optim.Optimizer:
    """The optimizer that a configuration names.

    Args:
        params: its options.
        parameters: tensors or groups of them; by default all of the model that need a gradient.

    Raises:
        ValueError: there is none of that name, or an option is unknown.
    """
    held = [p for p in module.parameters() if p.requires_grad] if parameters is None else list(parameters)
    groups: list[Any] = [dict(x) if isinstance(x, Mapping) else x for x in held]
    key, options = name.lower(), dict(params)
    if "betas" in options:
        options["betas"] = tuple(options["betas"])
    if key == "muon":
        loose = [x for x in groups if not isinstance(x, dict)]
        return muon(module, [x for x in groups if isinstance(x, dict)] + [{"params": loose}], options)
    if key == "adamw":
        key, options["adam_w_mode"] = "adam", True
    known = {n.lower(): n for n, kind in vars(torch.optim).items() if _is_optimizer(kind)}
    if key in _BY_NAME:
        kind = _BY_NAME[key]
    elif key in known:
        kind = getattr(torch.optim, known[key])
    else:
        raise MistakeError("DeepSpeed's configuration", [("optimizer.type", name, _unknown(key, known))])
    takes = inspect.signature(kind).parameters
    if strange := [key for key in options if key not in takes]:
        reasons = {"max_grad_norm": "clipping is said by gradient_clipping, outside of the optimizer"}
        names = [n for n in takes if n != "params"]
        wrong = [
            Mistake(f"optimizer.params.{k}", options[k], reasons[k])
            if k in reasons
            else unknown_key(f"optimizer.params.{k}", options[k], names)
            for k in strange
        ]
        raise MistakeError("DeepSpeed's configuration", wrong)
    return kind(groups, **options)


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def _unknown(key: str, known: Mapping[str, str]) -> str:
    if key in _ONE_BIT:
        return "gradients are not compressed, so that the results are the same: expected Adam or Lamb"
    if key in _MUP:
        return "make it yourself (from mup) and pass it as deepspeed.initialize(optimizer=...)"
    names = [*known.values(), "Lamb", "Lion", "Muon"]
    all_of_them = f"known: {', '.join(names)}"
    return f"unknown optimizer; {did_you_mean(key, names, all_of_them, show=str)}"


class FusedAdam:
    """AdamW, or with ``adam_w_mode=False`` Adam, of torch."""

    def __new__(cls, params: Parameters, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:  # type: ignore[misc]
        """The optimizer."""
        return adam_or_adamw(params, *args, **kwargs)


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
        update = lr, bias_correction, betas, eps, adamw_mode, weight_decay, amsgrad
        return adam_or_adamw(model_params, *update, fp32_optimizer_states=fp32_optimizer_states)


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


FusedLamb, FusedLion, DeepSpeedCPULion = Lamb, Lion, Lion

__all__ = [
    "DeepSpeedCPUAdagrad",
    "DeepSpeedCPUAdam",
    "DeepSpeedCPULion",
    "FusedAdam",
    "FusedLamb",
    "FusedLion",
]

__getattr__ = or_absent(
    __name__,
    "deepspeed.ops",
    {
        "transformer DeepSpeedTransformerLayer DeepSpeedTransformerConfig triton_ops compile": (
            "models run as they are written: engine.compile() compiles their blocks"
        ),
        "deepspeed4science": "write flex_attention of torch in the model",
        "pin_memory": "get_accelerator().pin_memory(tensor), or tensor.pin_memory()",
        "sparse_attention": "DeepSpeed has dropped it: write flex_attention of torch in the model",
        "fp_quantizer quantizer": "weights are not quantised in training",
        "aio gds op_builder": "threads of the process read and write files; there are no kernels to build",
        "random_ltd": "choose data and sequence lengths in the data set",
        "zenflow_cpu_adam zenflow_torch_adam ZenFlowCPUAdam ZenFlowSelectiveAdamW "
        "ZenFlowSelectiveAdamW_stage3": "`offload_optimizer` of the configuration lays states on the host",
        "multi_tensor_apply multi_tensor_applier": "updates are torch's, of many tensors at a time",
    },
    elsewhere={
        "adagrad cpu_adagrad adam fused_adam cpu_adam lamb fused_lamb lion fused_lion cpu_lion": __name__
    },
)
