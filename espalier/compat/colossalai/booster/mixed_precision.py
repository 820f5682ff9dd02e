"""``colossalai.booster.mixed_precision``: what ``Booster(mixed_precision=)`` takes beside names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from espalier.compat.absent import or_absent
from espalier.compat.colossalai.config import scale_of
from espalier.texts import MistakeError, did_you_mean, refuse


class MixedPrecision:
    """One of these.

    Attributes:
        precision: as a plan says it.
    """

    precision: Any = "float32"


class FP16TorchMixedPrecision(MixedPrecision):
    """float16 under autocast, and a loss scale."""

    def __init__(
        self,
        init_scale: float = 2.0**16,
        growth_factor: float = 2.0,
        backoff_factor: float = 0.5,
        growth_interval: int = 2000,
    ) -> None:
        scale = {
            "init_scale": init_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "growth_interval": growth_interval,
        }
        self.precision = {"compute": "autocast-float16", "loss_scale": scale_of(scale)}


class FP16ApexMixedPrecision(MixedPrecision):
    """float16 under autocast (``"O1"``), or of parameters (``"O2"``, ``"O3"``).

    Raises:
        MistakeError: an argument that would change the result.
    """

    def __init__(
        self,
        opt_level: str = "O1",
        cast_model_type: Any = None,
        patch_torch_functions: bool | None = None,
        keep_batchnorm_fp32: bool | str | None = None,
        master_weights: bool | None = None,
        loss_scale: float | str | None = None,
        cast_model_outputs: Any = None,
        num_losses: int = 1,
        verbosity: int = 1,
        min_loss_scale: float | None = None,
        max_loss_scale: float = 2.0**24,
    ) -> None:
        kinds = {"O0": "float32", "O1": "autocast-float16", "O2": "float16", "O3": "float16"}
        mistakes = [
            (key, value, "not to be had here: opt_level says it, with float32 masters")
            for key, value in (
                ("cast_model_type", cast_model_type),
                ("patch_torch_functions", patch_torch_functions),
                ("keep_batchnorm_fp32", keep_batchnorm_fp32),
                ("master_weights", master_weights),
                ("cast_model_outputs", cast_model_outputs),
            )
            if value is not None
        ]
        if opt_level not in kinds:
            mistakes.append(("opt_level", opt_level, f"expected one of {', '.join(kinds)}"))
        refuse(type(self).__name__, mistakes)
        self.precision = {"compute": kinds[opt_level]}
        if opt_level != "O0":
            scale: dict[str, Any] = {"min_scale": min_loss_scale}
            if isinstance(loss_scale, int | float):  # it stays
                scale |= {"init_scale": loss_scale, "growth_factor": 1.0, "backoff_factor": 1.0}
            self.precision["loss_scale"] = scale_of(scale)


class FP16NaiveMixedPrecision(MixedPrecision):
    """Parameters in float16, with float32 masters, and a loss scale."""

    def __init__(
        self,
        log_num_zeros_in_grad: bool = False,
        initial_scale: float = 2.0**32,
        growth_factor: float = 2,
        backoff_factor: float = 0.5,
        hysteresis: int = 2,
        max_scale: float = 2.0**32,
        verbose: bool | None = None,
    ) -> None:
        scale = {
            "initial_scale": initial_scale,
            "growth_factor": growth_factor,
            "backoff_factor": backoff_factor,
            "hysteresis": hysteresis,
        }
        self.precision = {"compute": "float16", "loss_scale": scale_of(scale)}


class BF16MixedPrecision(MixedPrecision):
    """bfloat16 under autocast."""

    precision = "autocast-bfloat16"


_BY_NAME: Final[dict[str, Callable[[], MixedPrecision]]] = {
    "fp16": FP16TorchMixedPrecision,
    "bf16": BF16MixedPrecision,
    "fp16_apex": FP16ApexMixedPrecision,
    "fp16_naive": FP16NaiveMixedPrecision,
}


def mixed_precision_factory(mixed_precision_type: str) -> MixedPrecision:
    """The one of that name.

    Raises:
        MistakeError: there is none.
    """
    if mixed_precision_type not in _BY_NAME:
        hint = did_you_mean(str(mixed_precision_type), _BY_NAME, f"known: {', '.join(_BY_NAME)}", show=str)
        raise MistakeError("Booster", [("mixed_precision", mixed_precision_type, f"unknown; {hint}")])
    return _BY_NAME[mixed_precision_type]()


__all__ = [
    "BF16MixedPrecision",
    "FP16ApexMixedPrecision",
    "FP16NaiveMixedPrecision",
    "FP16TorchMixedPrecision",
    "MixedPrecision",
    "mixed_precision_factory",
]

__getattr__ = or_absent(
    __name__,
    "colossalai.booster.mixed_precision",
    {
        "FP8MixedPrecision FP8_MixedPrecision": "gradients and activations are of 16 bits at least",
        "FP16_Apex_MixedPrecision FP16_Torch_MixedPrecision FP32_MixedPrecision BF16_MixedPrecision": (
            "its name is without the first underscore: FP16TorchMixedPrecision"
        ),
    },
    elsewhere={"bf16 fp16_apex fp16_naive fp16_torch fp8 mixed_precision_base": __name__},
)
