"""``deepspeed.checkpointing``: recomputation, which is torch's here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils.checkpoint import checkpoint as recomputed


def checkpoint(function: Callable[..., Any], *args: Any) -> Any:
    """What ``function(*args)`` gives; it is computed again in the backward pass."""
    return recomputed(function, *args, use_reentrant=False)


def configure(*args: Any, **kwargs: Any) -> None:
    """Nothing: what the configuration says of recomputation is in the plan."""


def is_configured() -> bool:
    """Yes."""
    return True


def reset() -> None:
    """Nothing is kept between steps."""
