"""``colossalai.nn.layer``: torch's layers, which the plan cuts."""

from typing import Any

from espalier.compat.absent import or_absent
from espalier.compat.colossalai import nn as _nn

__path__: list[str] = []  # there are modules in it

_WHOLE = "torch.nn's layers are cut by the plan: write the model for one device"


def _of_nn(name: str) -> Any:
    return getattr(_nn, name)


__getattr__ = or_absent(
    __name__,
    "colossalai.nn.layer",
    {
        "parallel_1d parallel_2d parallel_2p5d parallel_3d vanilla": _WHOLE,
        "layernorm": "torch.nn.LayerNorm is cut by the plan",
        "moe": "Plan(expert=n) finds experts in the model, as transformers writes them",
        "parallel_sequence": "Plan(context=n) cuts sequences of plain attention",
        "scaled_softmax": "torch's scaled_dot_product_attention is cut by the plan",
        "wrapper": "parameters that stages share are found in the model",
    },
    _of_nn,
    elsewhere={
        "base_layer colossalai_layer common dropout embedding linear normalization utils": __name__,
    },
)
