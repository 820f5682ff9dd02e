"""Scenes drawn by lot whose models have more of what people build (``drawn_scenes.py``), under plans that mix
axes, modes and settings: attention with rotary positions and shared keys, experts, decoders, packed rows,
convolutions of all kinds, norms, own functions; context, experts, grids, schedules, residency, compilation.
"""

from __future__ import annotations

import random
import tempfile
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

from tests.zoo.drawn_bricks import WIDTH, kinds
from tests.zoo.drawn_nets import Net
from tests.zoo.drawn_scenes import Scene

Tensor = torch.Tensor
CAUSAL = ("turning", "stacked", "grouped")


class Turning(nn.Module):
    """Causal attention with rotary positions, grouped keys, and norms of queries and keys."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm = how, nn.RMSNorm(WIDTH)
        self.q, self.kv = nn.Linear(WIDTH, WIDTH, bias=False), nn.Linear(WIDTH, WIDTH, bias=False)
        self.out, self.of_heads = nn.Linear(WIDTH, WIDTH), nn.RMSNorm(2)
        self.register_buffer("angles", torch.tensor([1.0, 0.1]), persistent=False)

    def turned(self, x: Tensor) -> Tensor:
        """By positions."""
        at = torch.outer(torch.arange(x.shape[-2]).to(x.dtype), self.angles[:1])  # type: ignore[index]
        one, other = x[..., :1], x[..., 1:]
        return torch.cat([one * at.cos() - other * at.sin(), other * at.cos() + one * at.sin()], -1)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        q = self.q(h).unflatten(-1, (4, 2)).transpose(1, 2)
        k, v = (t.unflatten(-1, (2, 2)).transpose(1, 2) for t in self.kv(h).chunk(2, -1))
        if self.how == "normed":
            q, k = self.of_heads(q), self.of_heads(k)
        q, k = self.turned(q), self.turned(k)
        if self.how == "repeated":
            k, v = k.repeat_interleave(2, 1), v.repeat_interleave(2, 1)
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "window":
            n = x.shape[1]
            mask = torch.ones(n, n, dtype=torch.bool).tril().triu(-1)
            y = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, enable_gqa=True)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.out(y.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Stack(nn.Module):
    """Experts, stacked: each of a token's few has a weight."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.num_experts = how, 4
        self.up = nn.Parameter(torch.randn(4, 12, WIDTH) / 3)
        self.down = nn.Parameter(torch.randn(4, WIDTH, 12) / 3)

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        out = torch.zeros_like(hidden_states)
        for e in range(self.num_experts):
            token, place = torch.where(top_k_index == e)
            if self.how == "hasty" and not len(token):
                continue
            y = F.linear(F.silu(F.linear(hidden_states[token], self.up[e])), self.down[e])
            out = out.index_add(0, token, y * top_k_weights[token, place, None])
        return out


class Routed(nn.Module):
    """A mixture of experts, beside one that all tokens pass."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.norm, self.gate, self.experts = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4), Stack(how)
        self.shared = nn.Linear(WIDTH, WIDTH) if how == "shared" else None

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(x)
        rows = h.reshape(-1, WIDTH)
        weights, index = self.gate(rows).softmax(-1).topk(1 if self.how == "one" else 2, -1)
        weights = weights / weights.sum(-1, keepdim=True) if self.how == "shared" else weights
        y = self.experts(rows, index, weights).reshape(x.shape)
        return y if self.shared is None else y + self.shared(h)  # type: ignore[no-any-return]


class Decoding(nn.Module):
    """torch's own decoders and attention."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        if how == "cross":
            self.inner: nn.Module = nn.MultiheadAttention(WIDTH, 2, batch_first=True, kdim=4, vdim=4)
        elif how == "transformer":
            self.inner = nn.Transformer(WIDTH, 2, 1, 1, 12, dropout=0.0, batch_first=True, norm_first=True)
        else:
            layer = nn.TransformerDecoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True, activation="gelu")
            self.inner = nn.TransformerDecoder(layer, 1, nn.LayerNorm(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "cross":
            return self.inner(x, x[..., :4], x[..., 4:], average_attn_weights=False)[0]  # type: ignore[no-any-return]
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], dtype=x.dtype)
        if self.how == "transformer":
            return self.inner(x * 0.5, x, tgt_mask=mask)  # type: ignore[no-any-return]
        return self.inner(x, x.flip(1), tgt_mask=mask, tgt_is_causal=True)  # type: ignore[no-any-return]


class Packed(nn.Module):
    """Recurrent layers over rows of several lengths, or with more layers, or both ways."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        both = how == "both"
        make = nn.GRU if how == "packed" else nn.LSTM
        self.inner = make(WIDTH, WIDTH // (2 if both else 1), 2, batch_first=True, bidirectional=both)

    def forward(self, x: Tensor) -> Tensor:
        if self.how != "packed":
            return self.inner(x)[0]  # type: ignore[no-any-return]
        lengths = torch.arange(len(x)) % x.shape[1] + 1
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        return pad_packed_sequence(self.inner(packed)[0], batch_first=True, total_length=x.shape[1])[0]  # type: ignore[no-any-return]


class Folded(nn.Module):
    """Convolutions of one, two and three dims over a row's features, and norms between."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        dims = {"line": 1, "plane": 2, "space": 3, "back": 2, "instance": 1}[how]
        conv = (nn.Conv1d, nn.Conv2d, nn.Conv3d)[dims - 1]
        self.first = conv(1, 4, 3, padding=1)
        self.norm = {"plane": nn.GroupNorm(2, 4), "instance": nn.InstanceNorm1d(4, affine=True)}.get(
            how, nn.Identity()
        )
        back = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[dims - 1]
        self.second = back(4, 1, 3, padding=1) if how in ("back", "space") else conv(4, 1, 1)
        self.shape = {1: (8,), 2: (2, 4), 3: (2, 2, 2)}[dims]

    def forward(self, x: Tensor) -> Tensor:
        h = x.reshape(-1, 1, *self.shape)
        return torch.tanh(self.second(F.silu(self.norm(self.first(h))))).reshape(x.shape)


class Rounded(torch.autograd.Function):
    """Rounds; its gradient is that of what it rounds."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(x, scale)
        return x * scale

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        x, scale = ctx.saved_tensors
        return grad * scale, (grad * x).flatten(0, -2).sum(0)


class Owned(nn.Module):
    """Functions, parametrizations, checkpoints and calls of one's own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line, self.other = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.scale = nn.Parameter(torch.linspace(0.5, 1.5, WIDTH))
        self.table = nn.Parameter(torch.randn(5, WIDTH))
        if how == "orthogonal":
            parametrizations.orthogonal(self.line)

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        if self.how == "function":
            return torch.tanh(Rounded.apply(h, self.scale))
        if self.how == "called":
            given = {"weight": self.line.weight * self.scale, "bias": self.line.bias}
            return torch.tanh(torch.func.functional_call(self.other, given, (x,)))
        if self.how == "checkpoint":
            return checkpoint(lambda y: torch.tanh(self.other(torch.sin(y))), h, use_reentrant=False)  # type: ignore[no-any-return]
        if self.how == "bag":
            at = (h.detach()[..., :3].abs() * 4).long().clamp(max=4).reshape(-1, 3)
            return h + F.embedding_bag(at, self.table, mode="mean").reshape(h.shape)
        if self.how == "added":
            rows = h.reshape(-1, WIDTH)
            at = torch.arange(len(rows)) % 5
            return (
                h
                + torch.zeros_like(self.table).index_add(0, at, rows).index_select(0, at).reshape(h.shape) / 8
            )
        if self.how == "bilinear":
            return torch.tanh(F.bilinear(h, x, self.table[:, :, None] * self.scale, None)).repeat_interleave(
                2, -1
            )[..., :WIDTH]
        if self.how == "mixed":
            return torch.einsum("...i,ki,kj->...j", h, self.table, self.table).softmax(-1) * self.scale
        return torch.tanh(h) * self.scale


ROWS = {
    "routed": kinds(Routed, "two one shared hasty"),
    "folded": kinds(Folded, "line plane space back instance"),
    "owned": kinds(Owned, "function called checkpoint bag added bilinear mixed orthogonal"),
}
ALONG = {
    "turning": kinds(Turning, "plain normed repeated window"),
    "decoding": kinds(Decoding, "cross transformer decoder"),
    "packed": kinds(Packed, "packed both deep"),
}


class Mixed(Net):
    """A net that has some of these, too."""

    def __init__(self, lot: random.Random) -> None:
        super().__init__(lot)
        known = ROWS | (ALONG if self.is_long else {})
        for _ in range(lot.randint(1, 2)):
            name = lot.choice(sorted(known))
            block = known[name](lot)
            self.blocks.insert(lot.randint(0, len(self.blocks)), block)
            self.names.append(f"{name}.{block.how}")


class Mix(Scene):
    """A scene of such a net."""

    def net(self) -> Mixed:
        torch.manual_seed(1)
        random.seed(1)
        return Mixed(random.Random(f"mix {self.seed}")).double()


def plans(seed: int) -> list[dict[str, Any]]:
    """Two plans of the same number of ranks; ``compile`` beside them is an argument of ``prepare``."""
    return plans_of(random.Random(f"plans of mix {seed}"), Mix(seed).net())


def plans_of(lot: random.Random, net: Any) -> list[dict[str, Any]]:
    """Two plans that a lot draws for a net."""
    world = lot.choice([2, 2, 4])
    routed = any(name.startswith("routed") for name in net.names)
    return [plan_of(lot, world, routed, net.is_long) for _ in range(2)]


def plan_of(lot: random.Random, world: int, routed: bool, is_long: bool) -> dict[str, Any]:
    found: dict[str, Any] = {}
    axes = ["data", "tensor", "pipe", "replicate"] + 2 * ["context"] * is_long + 2 * ["expert"] * routed
    for _ in range(world.bit_length() - 1):
        axis = lot.choice(axes)
        axis = "data" if axis == "pipe" and "pipe" in found else axis
        axis = "data" if {axis, *found} >= {"expert", "replicate"} else axis
        if axis == "expert":
            found["data"] = 2 * found.get("data", 1)
        found[axis] = 2 * found.get(axis, 1) if axis != "expert" or found["data"] > 2 else found["data"]
    if found.get("expert", 1) > 1 and found["data"] % found["expert"]:
        found["expert"] = found["data"]
    found["zero"] = lot.choice([1, 2, 3] if "replicate" in found else [0, 0, 1, 2, 3, 3])
    if found.get("tensor") == 4 and lot.random() < 0.7:
        found["tensor_mode"] = "2d"
    elif "tensor" in found:
        found["sequence_parallel"] = lot.choice([False, True, "auto"])
        found["async_tensor_parallel"] = found["sequence_parallel"] is True and lot.random() < 0.3
    if "context" in found:
        found["context_kind"] = lot.choice(["auto", "ring", "ulysses", "gather"])
    if "pipe" in found:
        found["schedule"] = lot.choice(["1f1b", "gpipe", "zb-h1", "naive", "interleaved", "zbv"])
        found["stages_per_rank"] = 2 if found["schedule"] in ("interleaved", "zbv") else 1
    elif lot.random() < 0.03:
        found["compile"] = "aot_eager"
    if found["zero"] and lot.random() < 0.25:
        kinds = ["states", "gradients", "parameters"][: found["zero"]]
        away = {
            kind: lot.choice(["host", "host", "disk"])
            for kind in lot.sample(kinds, lot.randint(1, len(kinds)))
        }
        found["offload"] = away | ({"directory": tempfile.gettempdir()} if "disk" in away.values() else {})
    found["recompute"] = lot.choice(["none", "none", "full", "selective"])
    found["recompute_inputs"] = lot.choice(["whole", "sharded", "host"])
    found["chunk_megabytes"] = lot.choice([25.0, 0.001])
    found["prefetch_megabytes"] = lot.choice([50.0, 0.0])
    return found
