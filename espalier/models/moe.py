"""A mixture-of-experts GPT: a router sends each token through a few of many feed-forward layers."""

import math
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from espalier.device import has_grouped_products, moved
from espalier.models.config import logits_and_loss
from espalier.models.gpt import GPT, MLP, Attention
from espalier.models.sizes import MoEConfig


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
        logits: [batch, sequence, vocabulary], unnormalized log-probabilities; None with ``chunked_loss``
            where labels were given.
        loss: scalar, mean cross-entropy in nats, plus, in training, the weighted ``balance`` and ``z``; None
            where no labels were given.
        balance: scalar, mean of the blocks' balance losses.
        z: scalar, mean of the blocks' z-losses.
        dropped: integer scalar, pairs of a token and an expert that found no room, of all blocks.
    """

    logits: torch.Tensor | None
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
        rows, nothing = hidden_states[order // k].split([sum(sizes[:-1]), sizes[-1]])
        outputs = self.of_sorted(rows, sizes[:-1])
        every = torch.cat([outputs, torch.zeros_like(nothing)])[order.argsort()]
        return (every.view(tokens, k, hidden_states.shape[-1]) * top_k_weights.unsqueeze(-1)).sum(1)

    def of_sorted(self, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """What each expert makes of its rows, [rows, hidden] sorted by expert, ``sizes`` of each."""
        if takes_groups(rows, self.down_proj):
            ends = moved(torch.tensor(sizes, device="cpu").cumsum(0).to(torch.int32), rows.device)
            gate = F.grouped_mm(rows, self.gate_proj.mT, offs=ends)
            up = F.grouped_mm(rows, self.up_proj.mT, offs=ends)
            return F.grouped_mm(F.silu(gate) * up, self.down_proj.mT, offs=ends)
        return torch.cat([self._expert(e, x) for e, x in enumerate(rows.split(sizes))])

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        inner = F.silu(F.linear(x, self.gate_proj[number])) * F.linear(x, self.up_proj[number])
        return F.linear(inner, self.down_proj[number])


def takes_groups(rows: torch.Tensor, down: torch.Tensor) -> bool:
    """Whether torch multiplies the rows of all experts in one kernel: those of an accelerator, of 16 bits.

    It wants rows that begin at multiples of 16 bytes, of the experts' matrices too: ``down`` is the last.
    """
    narrow = rows.dtype is down.dtype is torch.bfloat16
    return narrow and has_grouped_products(rows.device.type) and not any(n % 8 for n in down.shape[1:])


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
        logits, loss = logits_and_loss(self.head, self.norm(x), labels, self.config.chunked_loss)
        balance, z, dropped = (torch.stack(one) for one in zip(*routings, strict=True))
        if loss is not None and self.training:
            loss = loss + self.config.balance * balance.mean() + self.config.z * z.mean()
        return MoEOutput(logits, loss, balance.mean(), z.mean(), dropped.sum())
