"""``Pipe``, as torch had it in ``torch.distributed.pipeline.sync``."""

from __future__ import annotations

from functools import partial
from typing import Any, Self

import torch
from torch import nn

from espalier.compat.common import LateModule, tell_of_ranks, world_size
from espalier.compat.torch.data_parallel import Said
from espalier.texts import refuse
from espalier.trees import tree_map


class Pipe(LateModule):
    """As ``torch.distributed.pipeline.sync.Pipe``: a ``Sequential`` whose parts are on different ranks.

    torch's was one process with several devices; here each rank runs the script (``espalier run -n 2
    script.py``), and gives the same batches. A part for each rank is taken as it is, by its number of
    modules; else the model is cut where stages are about equal. Outputs are there once the loss goes back:
    until then they keep what is made of them. ``output.local_value()`` is the output itself.

    Args:
        module: a ``Sequential``, or any model.
        chunks: micro-batches.
        checkpoint: ``"never"``; ``"always"`` and ``"except_last"`` are ``Plan(recompute="full")`` where the
            model has blocks: the results are the same.
        deferred_batch_norm: False.
        plan: keys of a :class:`~espalier.Plan` that hold in place of these: a ``schedule``, say.
    """

    def __init__(
        self,
        module: nn.Module,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
        *,
        plan: Said = None,
    ) -> None:
        if deferred_batch_norm:
            reason = "batch norm follows each micro-batch: expected False"
            refuse("Pipe", [("deferred_batch_norm", True, reason)])
        if checkpoint not in ("always", "except_last", "never"):
            refuse("Pipe", [("checkpoint", checkpoint, "expected always, except_last or never")])
        tell_of_ranks(
            "Pipe in one process computes on one of the {devices} devices here, with the same results"
        )
        ranks, said = world_size(), {}
        if ranks > 1:
            names = [name for name, _ in module.named_children()]
            said = {"pipe": ranks, "schedule": "gpipe", "accumulate": chunks}
            if isinstance(module, nn.Sequential) and len(names) == ranks:
                said["cuts"] = names[1:]
        super().__init__(module, "whole", said, plan)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """What the model gives, or will give."""
        return tree_map(_with_value, super().forward(*args, **kwargs))

    def to(self, *args: Any, **kwargs: Any) -> Self:
        """Itself: stages are where the plan says, also where a list of devices is given."""
        return self


def _with_value(x: Any) -> Any:
    if isinstance(x, torch.Tensor):
        x.local_value = partial(_itself, x.view_as(x))  # type: ignore[attr-defined]  # x would hold itself
    return x


def _itself(x: torch.Tensor) -> torch.Tensor:
    return x
