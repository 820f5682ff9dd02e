"""Any module as a stack of experts, whose parameters are ``[experts, ...]``."""

from __future__ import annotations

import copy
from typing import Any, Self

import torch
from torch import nn
from torch.func import functional_call

from espalier.models.moe import Experts as Stack


class Experts(Stack):
    """Copies of a module, one for each expert.

    Its parameter ``fc.weight`` is here ``fc__weight``, ``[experts, ...]``.

    Args:
        expert: takes and gives tokens ``[..., hidden]``; of a tuple that it gives the first counts.
        number: of experts.
        group_name: by which programs know experts' parameters.

    Raises:
        ValueError: it has buffers, or a parameter of no dims.
    """

    def __init__(self, expert: nn.Module, number: int, group_name: str) -> None:
        nn.Module.__init__(self)
        self.num_experts = number
        wrong = [name for name, _ in expert.named_buffers()]
        wrong += [name for name, p in expert.named_parameters() if not p.ndim]
        if wrong:
            raise ValueError(
                f"MoE(expert={type(expert).__name__}): {', '.join(wrong)}: experts are stacked by their "
                "parameters, each with a dim or more. Make a buffer a constant of its forward, and a number "
                "a parameter of one element."
            )
        # its own parameters are none of the model's
        self.__dict__["_one"] = copy.deepcopy(expert).to("meta")
        self._names = {name.replace(".", "__"): name for name, _ in expert.named_parameters()}
        for own, name in self._names.items():
            p = expert.get_parameter(name)
            stacked = nn.Parameter(torch.stack([p.detach()] * number), p.requires_grad)
            stacked.allreduce, stacked.group_name = False, group_name  # type: ignore[attr-defined]
            self.register_parameter(own, stacked)

    def train(self, mode: bool = True) -> Self:
        """The experts too."""
        self.__dict__["_one"].train(mode)
        return super().train(mode)

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """As of any stack of experts, in the dtype of the tokens."""
        return super().forward(hidden_states, top_k_index, top_k_weights).to(hidden_states.dtype)

    def of_sorted(self, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """What each expert makes of its rows, [rows, hidden] sorted by expert, ``sizes`` of each."""
        return torch.cat([self._of_one(e, x) if len(x) else x for e, x in enumerate(rows.split(sizes))])

    def _of_one(self, number: int, x: torch.Tensor) -> Any:
        own = {name: getattr(self, mine)[number] for mine, name in self._names.items()}
        output = functional_call(self.__dict__["_one"], own, (x,))
        return output[0] if isinstance(output, tuple) else output


__all__ = ["Experts"]
