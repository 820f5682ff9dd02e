"""``deepspeed.comm``: torch.distributed under this name; ``engine.ledger()`` tells what was sent."""

import os
from typing import Any

import torch.distributed as _dist

from espalier.compat.deepspeed.engine import init_distributed

__all__ = ["get_local_rank", "init_distributed"]


def get_local_rank() -> int:
    """This rank's number on its host."""
    return int(os.environ.get("LOCAL_RANK", "0"))


def __getattr__(name: str) -> Any:
    return getattr(_dist, name)
