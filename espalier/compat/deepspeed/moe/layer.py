"""``MoE``: a layer of experts."""

from __future__ import annotations

import torch
from torch import nn

from espalier.compat.deepspeed.moe.experts import Experts
from espalier.compat.deepspeed.moe.gate import Routing, TopKGate
from espalier.texts import refuse

_POLICIES = (None, "None", "Jitter", "RSample")


class MoE(nn.Module):
    """As ``deepspeed.moe.layer.MoE``: tokens go to ``k`` of ``num_experts`` copies of a module.

    ``deepspeed.initialize`` puts the experts on ``ep_size`` ranks, ``Plan(expert=ep_size)``.

    Args:
        hidden_size: of tokens.
        expert: a module from hidden to hidden.
        ep_size: ranks that the experts of a layer lie on, the same for all layers.
        k, capacity_factor, eval_capacity_factor, min_capacity, noisy_gate_policy, drop_tokens, use_rts,
        top2_2nd_expert_sampling: of the gate, see
            :class:`~espalier.compat.deepspeed.moe.gate.TopKGate`.
        use_residual: a copy of the module that sees every token stands beside the experts; a layer of two
            outputs weighs both.
        use_tutel: no effect: rows are sorted by expert.
        enable_expert_tensor_parallelism: no effect: along a tensor axis experts are cut one from another.

    Raises:
        MistakeError: experts are no multiple of ``ep_size``, or the policy is none.
    """

    def __init__(
        self,
        hidden_size: int,
        expert: nn.Module,
        num_experts: int = 1,
        ep_size: int = 1,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 4,
        use_residual: bool = False,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        use_tutel: bool = False,
        enable_expert_tensor_parallelism: bool = False,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        mistakes: list[tuple[str, object, str]] = []
        if num_experts % ep_size:
            mistakes.append(("num_experts", num_experts, f"expected a multiple of ep_size = {ep_size}"))
        if not 1 <= k <= num_experts:
            mistakes.append(("k", k, f"expected 1 to num_experts = {num_experts}"))
        if noisy_gate_policy not in _POLICIES:
            mistakes.append(("noisy_gate_policy", noisy_gate_policy, "expected Jitter, RSample or None"))
        refuse("MoE", mistakes)
        self.use_residual, self.ep_size, self.num_experts = use_residual, ep_size, num_experts
        self.num_local_experts, self.expert_group_name = num_experts // ep_size, f"ep_size_{ep_size}"
        gate = TopKGate(
            hidden_size,
            num_experts,
            k,
            capacity_factor,
            eval_capacity_factor,
            min_capacity,
            noisy_gate_policy,
            drop_tokens,
            use_rts,
            top2_2nd_expert_sampling,
        )
        self.deepspeed_moe = MOELayer(gate, Experts(expert, num_experts, self.expert_group_name))
        if use_residual:
            self.mlp, self.coefficient = expert, nn.Linear(hidden_size, 2)

    def set_deepspeed_parallelism(self, use_data_before_expert_parallel_: bool = False) -> None:
        """Nothing: ``deepspeed.initialize`` lays the experts out."""

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """What experts make of tokens.

        Args:
            hidden_states: [..., hidden].
            used_token: [tokens], 0 where one goes to no expert.

        Returns:
            the output, [..., hidden]; the balance loss, a scalar; how many tokens chose each expert.
        """
        output, routing = self.deepspeed_moe(hidden_states, used_token)
        if self.use_residual:
            beside = self.mlp(hidden_states)
            beside = beside[0] if isinstance(beside, tuple) else beside
            shares = self.coefficient(hidden_states).softmax(-1)
            output = output * shares[..., 0:1] + beside * shares[..., 1:]
        return output, routing.balance, routing.choices


class MOELayer(nn.Module):
    """A gate and its experts."""

    def __init__(self, gate: TopKGate, experts: Experts) -> None:
        super().__init__()
        self.gate, self.experts = gate, experts

    def forward(
        self, hidden_states: torch.Tensor, used_token: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, Routing]:
        """The output, and where tokens went."""
        tokens = hidden_states.reshape(-1, hidden_states.shape[-1])
        routing: Routing = self.gate(tokens, used_token)
        output = self.experts(tokens, routing.experts, routing.weights)
        return output.reshape(hidden_states.shape), routing


def layers(model: nn.Module) -> list[MoE]:
    """Those of a model."""
    return [module for module in model.modules() if isinstance(module, MoE)]


def axes_of_experts(model: nn.Module) -> dict[str, int]:
    """On how many ranks the experts of a model lie, as keys of a plan.

    Raises:
        MistakeError: layers say different numbers.
    """
    sizes = sorted({layer.ep_size for layer in layers(model)})
    if len(sizes) > 1:
        refuse("MoE", [("ep_size", sizes, "expected one number for all layers: experts lie on one axis")])
    return {"expert": sizes[0]} if sizes and sizes[0] > 1 else {}


__all__ = ["MOELayer", "MoE", "axes_of_experts", "layers"]
