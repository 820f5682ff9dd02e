"""``deepspeed.moe``: layers of experts with DeepSpeed's own gates, on :mod:`espalier.parallel.experts`.

Each rank that reads rows of its own is a group for itself, as there: what an expert takes, and the loss that
balances experts, are of the tokens of one rank; the loss is the mean of the ranks'. Lepikhin et al. 2020
(GShard), Fedus et al. 2021 (Switch).
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any, NamedTuple, Self

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call

from espalier.compat.absent import or_absent
from espalier.layout import Partial, Replicate, Shard
from espalier.models.moe import Experts as Stack
from espalier.tensor import DTensor, local_map
from espalier.tensor.random import in_single
from espalier.texts import refuse


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


_JITTER = 0.01


class Routing(NamedTuple):
    """Where tokens go.

    Attributes:
        experts: [tokens, k], those of each; the number of experts stands for none.
        weights: [tokens, k] in float32.
        balance: scalar, the loss by which experts get equal shares.
        choices: [experts], how many tokens chose each, before any was dropped.
    """

    experts: torch.Tensor
    weights: torch.Tensor
    balance: torch.Tensor
    choices: torch.Tensor


class TopKGate(nn.Module):
    """A linear layer in float32, and what it chooses.

    Args:
        model_dim: of tokens.
        k: experts of a token.
        capacity_factor, eval_capacity_factor: an expert takes so many times its even share of a rank's
            tokens.
        min_capacity: which it takes in any case.
        noisy_gate_policy: ``"Jitter"``, ``"RSample"`` (for ``k = 1``) or None, in training.
        drop_tokens: whether those beyond it are dropped; else experts take all.
        use_rts: with ``k = 1``: whether those that are kept are drawn.
        top2_2nd_expert_sampling: with ``k = 2``: whether the second expert is drawn.
    """

    def __init__(
        self,
        model_dim: int,
        num_experts: int,
        k: int = 1,
        capacity_factor: float = 1.0,
        eval_capacity_factor: float = 1.0,
        min_capacity: int = 8,
        noisy_gate_policy: str | None = None,
        drop_tokens: bool = True,
        use_rts: bool = True,
        top2_2nd_expert_sampling: bool = True,
    ) -> None:
        super().__init__()
        self.wg = nn.Linear(model_dim, num_experts, bias=False)
        self.k, self.min_capacity, self.drop_tokens = k, min_capacity, drop_tokens
        self.capacity_factor, self.eval_capacity_factor = capacity_factor, eval_capacity_factor
        self.noisy_gate_policy, self.use_rts = noisy_gate_policy, use_rts
        self.top2_2nd_expert_sampling = top2_2nd_expert_sampling

    def forward(self, tokens: torch.Tensor, used_token: torch.Tensor | None = None) -> Routing:
        """Choose.

        Args:
            tokens: [tokens, model_dim].
            used_token: [tokens], 0 where one goes to no expert (with ``k = 1``).
        """
        policy = self.noisy_gate_policy if self.training else None
        x = tokens.float()
        if policy == "Jitter":
            x = x * (1 + _JITTER * (2 * torch.rand_like(x) - 1))
        logits = F.linear(x, self.wg.weight.float())
        drawn: torch.Tensor | None = None  # in the gate's order, whatever the ranks
        first, seconds = None, logits.detach()
        if self.k == 1:
            first = seconds + _gumbel(seconds) if policy == "RSample" else None
            drawn = torch.rand_like(logits) if self.use_rts and self.drop_tokens else None
        elif self.k == 2 and self.top2_2nd_expert_sampling:
            seconds = seconds + _gumbel(seconds)
        factor = self.capacity_factor if self.training else self.eval_capacity_factor
        room = partial(_room, factor * min(self.k, logits.shape[1]), self.min_capacity)
        choose = partial(_chosen, self.k, room if self.drop_tokens else None)
        given: list[Any] = [logits, first, seconds, drawn, used_token if self.k == 1 else None]
        if not isinstance(logits, DTensor):
            return Routing(*choose(*given))
        rows = [p if p == Shard(0) else Replicate() for p in logits.placements]
        sizes = [n for n, p in zip(logits.device_mesh.shape, rows, strict=True) if p == Shard(0)]
        summed = [Partial() if p == Shard(0) else p for p in rows]
        map_rows = local_map(
            choose,
            out_placements=(rows, rows, summed, summed),
            in_placements=[rows if isinstance(x, DTensor) else None for x in given],
            redistribute_inputs=True,
        )
        routing = Routing(*map_rows(*given))
        return routing._replace(balance=routing.balance / math.prod(sizes))


def _gumbel(like: torch.Tensor) -> torch.Tensor:
    tiny = torch.finfo(like.dtype).tiny
    return -(-torch.rand_like(like).clamp_min(tiny).log()).clamp_min(tiny).log()


def _room(factor: float, least: int, tokens: int, experts: int) -> int:
    """What an expert takes: computed in float32, which decides where a share is next to a whole number."""
    share = in_single(in_single(factor) * in_single(tokens / experts))
    return max(math.ceil(share), least)


def _chosen(
    k: int,
    room: partial[int] | None,
    logits: torch.Tensor,
    first: torch.Tensor | None,
    seconds: torch.Tensor,
    drawn: torch.Tensor | None,
    used: torch.Tensor | None,
) -> tuple[torch.Tensor, ...]:
    """The fields of :class:`Routing`, of one rank's tokens."""
    tokens, experts = logits.shape
    scale: float = experts
    chances = logits.softmax(1)
    limit = None if room is None else room(tokens, experts)
    if k == 1:
        best = (chances if first is None else first).argmax(1, keepdim=True)
        chosen = F.one_hot(best[:, 0], experts)
        if used is not None:
            chosen = chosen * used.to(chosen.dtype).view(-1, 1)
        counts, shares = chosen.sum(0), chosen
        if limit is not None:
            taken = (chosen if drawn is None else chosen * drawn).topk(min(limit, tokens), 0).indices
            chosen = chosen * torch.zeros_like(chosen).scatter(0, taken, 1)
        index, masks, total = best, [chosen], None
    elif k == 2:
        best = chances.argmax(1)
        one = F.one_hot(best, experts)
        second = seconds.masked_fill(one.bool(), -math.inf).argmax(1)
        two = F.one_hot(second, experts)
        counts, shares = (one + two).sum(0), one
        if limit is not None:
            behind = two.cumsum(0) - 1 + one.sum(0, keepdim=True)
            one, two = one * (one.cumsum(0) - 1 < limit), two * (behind < limit)
        index, masks = torch.stack([best, second], 1), [one, two]
        total = (chances * (one + two)).sum(1, keepdim=True)
    else:
        weights, index = chances.topk(k, 1)
        chosen = torch.zeros_like(chances, dtype=torch.int64).scatter(1, index, 1)
        counts, shares, scale = chosen.sum(0), chosen, experts / k
        if limit is not None:  # those that want it most
            wanted = torch.zeros_like(chances).scatter(1, index, weights).detach()
            taken = wanted.topk(min(limit, tokens), 0, sorted=False).indices
            chosen = chosen * torch.zeros_like(chosen).scatter(0, taken, 1)
        masks, total = [chosen] * k, (chances * chosen).sum(1, keepdim=True)
    kept = torch.cat([m.gather(1, index[:, i : i + 1]) for i, m in enumerate(masks)], 1)
    weights = chances.gather(1, index) * kept
    if total is not None:
        weights = weights / total.clamp_min(torch.finfo(total.dtype).eps)
    rows = max(tokens, 1)
    balance = scale * (chances.sum(0) / rows * (shares.to(chances.dtype).sum(0) / rows)).sum()
    return torch.where(kept > 0, index, experts), weights, balance, counts


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
            :class:`~espalier.compat.deepspeed.moe.TopKGate`.
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


def has_moe_layers(m: nn.Module) -> tuple[bool, int]:
    """Whether a model has layers of experts, and how many experts the first has."""
    found = layers(m)
    return bool(found), found[0].num_experts if found else 0


def is_moe_param(param: torch.Tensor) -> bool:
    """Whether it holds experts."""
    return not getattr(param, "allreduce", True)


def split_params_into_shared_and_expert_params(
    params: Iterable[nn.Parameter],
) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """Those that are not experts', and those that are."""
    held = list(params)
    return [p for p in held if not is_moe_param(p)], [p for p in held if is_moe_param(p)]


def split_params_into_different_moe_groups_for_optimizer(
    param_groups: Mapping[str, Any] | Iterable[dict[str, Any]], max_group_size: float | None = None
) -> list[dict[str, Any]]:
    """An optimizer's groups, with those of experts' parameters apart (``moe=True``), behind the others.

    Args:
        max_group_size: no effect: gradients travel in chunks, whatever the groups.
    """
    given = [dict(param_groups)] if isinstance(param_groups, Mapping) else list(param_groups)
    apart: list[dict[str, Any]] = []
    for group in given:
        group["params"], experts = split_params_into_shared_and_expert_params(group["params"])
        for name in dict.fromkeys(p.group_name for p in experts):  # type: ignore[attr-defined]
            own = [p for p in experts if p.group_name == name]  # type: ignore[attr-defined]
            apart.append({**group, "name": name, "moe": True, "params": own})
    return given + apart


__all__ = [
    "MOELayer",
    "MoE",
    "TopKGate",
    "has_moe_layers",
    "is_moe_param",
    "split_params_into_different_moe_groups_for_optimizer",
    "split_params_into_shared_and_expert_params",
]

__getattr__ = or_absent(
    __name__,
    "deepspeed.moe",
    {
        "ep_count ep_experts ep_kernels ep_repack ep_router ep_tp_dispatch fused_expert_layout": (
            "experts are a stack that the plan cuts: MoE(ep_size=n), or plan={'expert': n}"
        ),
        "mappings": "tokens are cut and gathered over the tensor axis by the layouts of the layers",
        "top1gating top2gating topkgating multiplicative_jitter gumbel_rsample einsum": (
            "TopKGate(model_dim, num_experts, k) gives each token's experts and weights"
        ),
        "configure_moe_param_groups is_moe_param_group split_params_grads_into_shared_and_expert_params": (
            "split_params_into_different_moe_groups_for_optimizer makes groups; norms are the engine's"
        ),
    },
    elsewhere={"experts layer sharded_moe utils": __name__},
)
