"""float64 throughout: casts to float32 inside a model are carried out as casts to float64.

Many models compute norms, softmax or the loss in float32 whatever their weights' type. Compared
in float64, such a cast would round what is to be compared to seven digits.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class Double(TorchFunctionMode):
    """While active, no call takes a float64 tensor down to float32.

    Attributes:
        kept: number of casts that were changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                self.kept += 1
                return first
            if any(a is torch.float32 for a in (*args, *kwargs.values())):
                self.kept += 1
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in kwargs.items()}
        return func(*args, **kwargs)
