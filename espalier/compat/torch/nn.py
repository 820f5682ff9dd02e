"""``torch.nn`` with the data-parallel wrappers in their places: ``from espalier.compat.torch import nn``."""

from types import SimpleNamespace
from typing import Any

from torch import nn

from espalier.compat.torch.data_parallel import DataParallel, DistributedDataParallel

parallel = SimpleNamespace(DataParallel=DataParallel, DistributedDataParallel=DistributedDataParallel)


def __getattr__(name: str) -> Any:
    return getattr(nn, name)


__all__ = ["DataParallel", "parallel"]
