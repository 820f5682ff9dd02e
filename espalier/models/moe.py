"""A mixture-of-experts GPT: a router sends each token through a few of many feed-forward layers."""

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from espalier.models.gpt import GPT, MLP, Attention, GPTConfig
from espalier.models.output import token_loss


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    """Sizes of a `MoE`: those of a `GPT`, whose ``ffn`` is the inner width of one expert, and these.

    Attributes:
        experts: number of experts of a block.
        top_k: how many of them each token is routed to.
        shared: width of the feed-forward layer that every token passes besides, in experts; 0 for none.
        normalize: whether a token's weights of its experts are scaled so that they add up to 1.
        capacity: an expert takes at most so many times the tokens that would be its even share of the
            batch, the first ones, and drops the rest; None: it takes all that come.
        balance: weight of the balance loss in the loss.
        z: weight of the router's z-loss in the loss.
    """

    experts: int = 8
    top_k: int = 2
    shared: int = 0
    normalize: bool = True
    capacity: float | None = None
    balance: float = 0.01
    z: float = 0.001

    def _mistakes(self) -> list[str]:
        found = super()._mistakes()
        if self.experts < 1:
            found.append(f"experts = {self.experts} must be at least 1")
        if not 1 <= self.top_k <= max(self.experts, 1):
            found.append(f"top_k = {self.top_k} must be at least 1 and at most experts = {self.experts}")
        if self.capacity is not None and self.capacity <= 0:
            found.append(f"capacity = {self.capacity} must be above 0, or left out")
        found += [
            f"{name} = {value} must be at least 0"
            for name in ("shared", "balance", "z")
            if (value := getattr(self, name)) < 0
        ]
        return found


class Routing(NamedTuple):
    """What the losses need of one block's routing.

    Attributes:
        balance: scalar; 1 where all experts get equal shares, ``experts`` where one gets all.
        z: scalar.
        dropped: integer scalar, pairs of a token and an expert that found no room.
    """

    balance: torch.Tensor
    z: torch.Tensor
    dropped: torch.Tensor


class MoEOutput(NamedTuple):
    """Output of a `MoE`.

    Attributes:
        logits: [batch, sequence, vocabulary], unnormalized log-probabilities.
        loss: scalar, mean cross-entropy in nats, plus, in training, the weighted ``balance`` and ``z``; None
            where no labels were given.
        balance: scalar, mean of the blocks' balance losses.
        z: scalar, mean of the blocks' z-losses.
        dropped: integer scalar, pairs of a token and an expert that found no room, of all blocks.
    """

    logits: torch.Tensor
    loss: torch.Tensor | None
    balance: torch.Tensor
    z: torch.Tensor
    dropped: torch.Tensor


class Experts(nn.Module):
    """SwiGLU feed-forward layers whose weights are stacked, [experts, out, in]."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.num_experts = config.experts
        inner = (config.experts, config.size_of_ffn, config.hidden)
        self.gate_proj = nn.Parameter(torch.empty(inner))
        self.up_proj = nn.Parameter(torch.empty(inner))
        self.down_proj = nn.Parameter(torch.empty(config.experts, config.hidden, config.size_of_ffn))

    def forward(
        self, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        """The weighted sum of what each token's experts make of it.

        Args:
            hidden_states: [tokens, hidden].
            top_k_index: [tokens, k], which experts; ``num_experts`` stands for none.
            top_k_weights: [tokens, k].

        Returns:
            [tokens, hidden].
        """
        tokens, k = top_k_index.shape
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        sizes = chosen.bincount(minlength=self.num_experts + 1).tolist()
        rows = hidden_states[order // k].split(sizes)
        made = [self._expert(e, rows[e]) for e in range(self.num_experts)]
        every = torch.cat([*made, torch.zeros_like(rows[-1])])[order.argsort()]
        return (every.view(tokens, k, hidden_states.shape[-1]) * top_k_weights.unsqueeze(-1)).sum(1)

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(F.linear(x, self.gate_proj[number])) * F.linear(x, self.up_proj[number])
        return F.linear(inner, self.down_proj[number])


class MoELayer(nn.Module):
    """A router and its experts: [b, s, hidden] to [b, s, hidden]."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.top_k, self.normalize, self.capacity = config.top_k, config.normalize, config.capacity
        self.router = nn.Linear(config.hidden, config.experts, bias=False)
        self.experts = Experts(config)
        self.shared = MLP(config, config.shared * config.size_of_ffn) if config.shared else None

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        rows = x.flatten(0, 1)
        logits = self.router(rows)
        if logits.dtype.itemsize == 2:
            logits = logits.float()
        chances = logits.softmax(-1)
        weights, index = chances.topk(self.top_k, -1)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        routing = self._losses(logits, chances, index)
        if self.capacity is not None:
            kept = self._with_room(index, self.capacity)
            routing = routing._replace(dropped=(~kept).sum())
            index = torch.where(kept, index, logits.shape[-1])
        y = self.experts(rows, index, weights.to(rows.dtype)).view_as(x)
        return (y if self.shared is None else y + self.shared(x)), routing

    def _losses(self, logits: torch.Tensor, chances: torch.Tensor, index: torch.Tensor) -> Routing:
        """Balance: Fedus et al. 2021 (Switch), over all k choices; z: Zoph et al. 2022 (ST-MoE)."""
        n = logits.shape[-1]
        share = one_of(index, n).to(chances.dtype).mean((0, 1))
        balance = n * (share * chances.mean(0)).sum()
        return Routing(balance, logits.logsumexp(-1).square().mean(), share.new_zeros((), dtype=torch.int64))

    def _with_room(self, index: torch.Tensor, capacity: float) -> torch.Tensor:
        """Whether each choice, in the order of tokens, is among the first that its expert takes."""
        n = self.experts.num_experts
        chosen = index.flatten()
        sizes = one_of(chosen, n).sum(0)
        # by experts, and by tokens within each: the place of each choice, from that of its expert's first
        place = chosen.argsort(stable=True).argsort() - (sizes.cumsum(0) - sizes)[chosen]
        return (place < math.ceil(capacity * index.numel() / n)).view_as(index)


def one_of(index: torch.Tensor, n: int) -> torch.Tensor:
    """Which of n each index is: [..., n] of bools."""
    return index.unsqueeze(-1) == torch.arange(n, device=index.device)


class Block(nn.Module):
    """Attention and experts, each on the normalized residual stream."""

    def __init__(self, config: MoEConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.attention = Attention(config)
        self.moe_norm = nn.RMSNorm(config.hidden, eps=config.norm_eps)
        self.moe = MoELayer(config)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, Routing]:
        x = x + self.dropout(self.attention(self.attention_norm(x), cos, sin))
        y, routing = self.moe(self.moe_norm(x))
        return x + self.dropout(y), routing


class MoE(GPT):
    """A `GPT` whose feed-forward layers are mixtures of experts, for one device.

    Called as a `GPT`; returns a `MoEOutput`.
    """

    block = Block
    config: MoEConfig

    def __init__(self, config: MoEConfig) -> None:
        super().__init__(config)
        for module in self.modules():
            if isinstance(module, Experts):
                nn.init.normal_(module.gate_proj, std=0.02)
                nn.init.normal_(module.up_proj, std=0.02)
                nn.init.normal_(module.down_proj, std=0.02 / math.sqrt(2 * config.layers))

    def forward(  # type: ignore[override]
        self,
        input_ids: torch.Tensor,
        labels: torch.Tensor | None = None,
        position_ids: torch.Tensor | None = None,
    ) -> MoEOutput:
        x, cos, sin = self.embedded(input_ids, position_ids)
        routings = []
        for block in self.blocks:
            x, routing = block(x, cos, sin)
            routings.append(routing)
        logits = self.head(self.norm(x))
        balance, z, dropped = (torch.stack(one) for one in zip(*routings, strict=True))
        loss = None if labels is None else token_loss(logits, labels)
        if loss is not None and self.training:
            loss = loss + self.config.balance * balance.mean() + self.config.z * z.mean()
        return MoEOutput(logits, loss, balance.mean(), z.mean(), dropped.sum())
