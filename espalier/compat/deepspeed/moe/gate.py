"""DeepSpeed's gates: which experts a token goes to, with which weight, and which find no room.

Each rank that reads rows of its own is a group for itself, as there: what an expert takes, and the loss that
balances experts, are of the tokens of one rank; the loss is the mean of the ranks'. Lepikhin et al. 2020
(GShard), Fedus et al. 2021 (Switch).
"""

from __future__ import annotations

import math
import struct
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from espalier.layout import Partial, Replicate, Shard
from espalier.tensor import DTensor, local_map

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
    share = _single(_single(factor) * _single(tokens / experts))
    return max(math.ceil(share), least)


def _single(x: float) -> float:
    value: float = struct.unpack("f", struct.pack("f", x))[0]
    return value


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


__all__ = ["Routing", "TopKGate"]
