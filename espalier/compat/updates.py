"""Optimizers of other systems that torch lacks: operation by operation, exact on whatever layout."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch


class OneByOne(torch.optim.Optimizer):
    """Updates one parameter after the other."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Update.

        Returns:
            what ``closure`` gives.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    self._update(group, p, p.grad)
        return loss

    @abstractmethod
    def _update(self, group: dict[str, Any], p: torch.Tensor, grad: torch.Tensor) -> None:
        """Let a parameter be what it is after the step."""
