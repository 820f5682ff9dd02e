"""What ``booster.boost`` gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from espalier.engine import EngineModule
from espalier.engine import initialize as lay_on_mesh
from espalier.parallel import Plan


class Boosted(EngineModule):
    """A model that an engine trains: a call takes and gives this rank's rows."""

    def __init__(self, model: nn.Module, optimizer: Any, plan: Plan, options: dict[str, Any]) -> None:
        criteria: list[Callable[[Any, Any], torch.Tensor]] = []

        def loss(output: Any, batch: Any) -> torch.Tensor:
            return criteria[-1](output, batch)

        engine = lay_on_mesh(model, optimizer, plan, loss_fn=loss, **options)
        super().__init__(engine, rows="own")
        self._criteria = criteria

    def judge_by(self, criterion: Callable[[Any, Any], torch.Tensor]) -> None:
        """Take a criterion for the passes that follow."""
        self._criteria[:] = [criterion]

    def unwrap(self) -> nn.Module:
        """The model."""
        return self.module
