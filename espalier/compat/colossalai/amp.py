"""``colossalai.amp``: names of mixed precision."""

from enum import Enum


class AMP_TYPE(Enum):
    """Under autocast (TORCH, APEX), or with parameters in float16 (NAIVE)."""

    APEX = "apex"
    TORCH = "torch"
    NAIVE = "naive"
