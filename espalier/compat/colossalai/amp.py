"""``colossalai.amp``: names of mixed precision."""

from enum import Enum

from espalier.compat.absent import or_absent

__path__: list[str] = []  # there are modules in it


class AMP_TYPE(Enum):
    """Under autocast (TORCH, APEX), or with parameters in float16 (NAIVE)."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"


__all__ = ["AMP_TYPE"]

__getattr__ = or_absent(
    __name__,
    "colossalai.amp",
    {
        "apex_amp torch_amp": "the configuration, or Booster(mixed_precision=), says the precision",
        "naive_amp": "Plan(precision={'compute': 'float16', 'loss_scale': {...}}) scales losses",
        "convert_to_amp convert_to_apex_amp convert_to_naive_amp convert_to_torch_amp": (
            "fp16 = dict(mode=AMP_TYPE.TORCH) in the configuration says it"
        ),
    },
    elsewhere={"amp_type": __name__},
)
