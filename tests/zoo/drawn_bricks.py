"""More bricks for programs that are drawn by lot: what people write in a block, one habit each."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

Tensor = torch.Tensor
WIDTH = 8  # of what goes from brick to brick, in its last dim


class Written(nn.Module):
    """Writes in place to activations, and to views of them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line, self.gain = how, nn.Linear(WIDTH, WIDTH), nn.Parameter(torch.ones(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        if self.how == "slice":
            h[..., :4] *= 0.5
            h[..., 4:].add_(self.gain[4:])
        elif self.how == "narrow":
            part = h.narrow(-1, 2, 3)
            part.mul_(self.gain[2:5]).tanh_()
        elif self.how == "turned":
            h.transpose(0, -1).mul_(1.5).add_(0.1)
        elif self.how == "filled":
            out = torch.zeros_like(h)
            out[..., ::2] = h[..., ::2]
            out[..., 1::2] += h[..., 1::2] * self.gain[1::2]
            h = out
        elif self.how == "masked":
            h.masked_fill_(torch.arange(WIDTH) % 3 == 0, 0.3)
        elif self.how == "row":
            h[0] = h[0] * 2
            h[-1].mul_(self.gain)
        elif self.how == "put":
            h[..., [0, 3]] = h[..., [1, 2]] * 2
        elif self.how == "viewed":
            h.view(*h.shape[:-1], 2, 4)[..., 0, :].sub_(0.2)
        else:
            torch.mul(h.detach(), 0.1, out=(noted := torch.empty_like(h)))
            h = h + noted
        return torch.tanh(h)


class Handled(nn.Module):
    """Writes to a parameter's or a buffer's data, or puts another tensor in a buffer's place."""

    state: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("state", torch.full((WIDTH,), 0.5), persistent=how != "hidden")

    def forward(self, x: Tensor) -> Tensor:
        new = x.detach().flatten(0, -2).mean(0)
        if self.how == "weight":
            self.line.weight.data = F.normalize(self.line.weight.data, dim=1)
        elif self.how == "clamp":
            self.line.weight.data.clamp_(-0.29, 0.31)
        elif self.how == "div":
            self.line.weight.data.div_(self.line.weight.data.norm(dim=0, keepdim=True))
        elif self.how == "row":
            self.line.weight.data[0] = 0.1
        elif self.how == "grad":
            with torch.no_grad():
                self.line.bias.mul_(0.9).add_(new, alpha=0.1)
        elif self.how == "set":
            self.state.data = 0.9 * self.state.data + 0.1 * new
        elif self.how == "data":
            self.state.data.mul_(0.9).add_(0.1 * new)
        elif self.how == "anew":
            self.state = 0.9 * self.state + 0.1 * new
        elif self.how == "slot":
            self.state[:3] = new[:3]
        elif self.how == "copy":
            self.state.copy_(0.5 * self.state + new)
        else:
            self.state.lerp_(new, 0.1)
        return torch.tanh(self.line(x)) * (1 + self.state)


class Beside(nn.Module):
    """Parameters beside their modules: turned, cut, summed, of each other."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.a, self.b = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        a, b = self.a, self.b
        if self.how == "turned":
            return torch.tanh(F.linear(a(x), b.weight.t()) + b.bias)
        if self.how == "product":
            return torch.tanh(F.linear(x, a.weight @ b.weight, a.bias + b.bias))
        if self.how == "cut":
            low = F.linear(x, a.weight[:4], a.bias[:4])
            return torch.tanh(torch.cat([low, b(x)[..., 4:] + b.weight[4:, 0]], -1))
        if self.how == "normed":
            return torch.tanh(F.linear(x, a.weight / a.weight.norm(dim=1, keepdim=True)) * b.bias + b(x))
        if self.how == "order":
            order = a.weight.detach().sum(1).argsort()
            return torch.tanh(F.linear(x, a.weight[order]) + b(x))
        if self.how == "stack":
            weights = torch.stack([a.weight, b.weight])
            return torch.tanh(torch.einsum("...i,koi->k...o", x, weights).sum(0) + a.bias)
        return torch.tanh(a(x) * b.weight.pow(2).mean() + b(x).mean() * b.bias.sum())


class Tied(nn.Module):
    """Layers that share a parameter."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if how == "weight":
            self.b.weight = self.a.weight
        elif how == "bias":
            self.b.bias = self.a.bias
        else:
            self.b = self.a
        self.c = nn.Sequential(self.a, nn.Tanh(), self.b) if how != "module" else self.b

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x))) + self.c(x))


class Kept(nn.Module):
    """Parameters in lists and dicts, of any shape."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.scales = nn.ParameterList([nn.Parameter(torch.rand(WIDTH)) for _ in range(3)])
        self.named = nn.ParameterDict(
            {"up": nn.Parameter(torch.randn(WIDTH, 12) / 3), "down": nn.Parameter(torch.randn(12, WIDTH) / 3)}
        )
        self.factor = nn.Parameter(torch.tensor(0.7))

    def forward(self, x: Tensor) -> Tensor:
        for i, scale in enumerate(self.scales):
            x = torch.tanh(x * scale + i * 0.1)
        if self.how == "items":
            for name, p in sorted(self.named.items(), reverse=True):
                x = torch.tanh(x @ p) if name == "up" else x @ p
        elif self.how == "all":
            x = x * sum(p.sum() for p in self.parameters()).tanh()
        else:
            x = x @ self.named["up"] @ self.named["down"]
        return x * self.factor


class Applied(nn.Module):
    """Calls what it is given."""

    def forward(self, x: Tensor, part: nn.Module, again: bool = False, **more: nn.Module) -> Tensor:
        x = torch.tanh(part(x))
        for other in more.values():
            x = x + other(x)
        return part(x) if again else x


class Lent(nn.Module):
    """Gives its modules, or parameters of theirs, to another module's call."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.apply_to = how, Applied()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "weights":
            return torch.tanh(self.apply_to(x, lambda h: F.linear(h, self.a.weight), other=self.b))
        return torch.tanh(self.apply_to(x, self.a, again=self.how == "again", other=self.b))


@dataclass
class Out:
    """What a part gives."""

    hidden: Tensor
    beside: Tensor | None = None
    number: int = 1


class Pair(NamedTuple):
    """The same as a tuple."""

    hidden: Tensor
    rest: dict[str, Any]


class Giving(nn.Module):
    """A part of another one: takes and gives containers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Any, *, mask: Tensor | None = None, past: list[Tensor] | None = None) -> Any:
        if isinstance(x, dict):
            x = x["x"]
        h = torch.tanh(self.line(x))
        if mask is not None:
            h = h * mask
        if past is not None:
            past.append(h)
        if self.how == "dict":
            return {"hidden": h, "none": None, "number": 3, "deep": [h * 2, {"x": h.sum(-1)}]}
        if self.how == "data":
            return Out(h, None if past is None else past[0])
        if self.how == "named":
            return Pair(h, {"norm": h.norm(dim=-1, keepdim=True), "text": "none"})
        if self.how == "list":
            return [h, None, (h[..., :1], 2)]
        return h


class Boxed(nn.Module):
    """Calls parts that take and give containers."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.first, self.second = Giving(how), Giving("plain")
        self.register_buffer("mask", torch.arange(WIDTH) % 3 != 1)

    def forward(self, x: Tensor) -> Tensor:
        past: list[Tensor] = []
        out = self.first({"x": x}, mask=self.mask, past=past)
        if self.how == "dict":
            h = out["hidden"] + 0.1 * out["deep"][0] + out["deep"][1]["x"].unsqueeze(-1)
        elif self.how == "data":
            h = out.hidden + (0 if out.beside is None else out.beside) * out.number
        elif self.how == "named":
            h = out.hidden / (1 + out.rest["norm"])
        elif self.how == "list":
            h = out[0] + out[2][0] * out[2][1]
        else:
            h = out
        h = self.second(h, mask=None, past=past)
        return h + past[0] * past[1]


class Hasty(nn.Module):
    """Goes through more or fewer of its layers, as it counts its calls; leaves early."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        if self.how == "return" and self.calls % 3 == 2:
            return x
        for i, layer in enumerate(self.layers):
            x = x + 0.5 * torch.tanh(layer(x))
            if self.how == "break" and i >= self.calls % 3:
                break
            if self.how == "skip" and i == self.calls % 2:
                continue
            x = x * 0.9
        return x


class Cells(nn.Module):
    """Steps of a recurrent cell over one input, or over parts of it."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.cell = nn.GRUCell(WIDTH, WIDTH) if how == "gru" else nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        rows = x.reshape(-1, WIDTH)
        state: Any = torch.zeros_like(rows)
        if self.how == "lstm":
            state = (state, state)
        for i in range(2):
            state = self.cell(rows * (1 + i), state)
        return (state if self.how == "gru" else state[0]).reshape(x.shape)


class Again(nn.Module):
    """Computes its parts again by hand."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.scale = how, nn.Parameter(torch.ones(WIDTH))
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def inner(self, x: Tensor, scale: float = 1.0) -> Tensor:
        return torch.tanh(self.b(torch.tanh(self.a(x)) * self.scale)) * scale

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "reentrant":
            return checkpoint(self.inner, x, use_reentrant=True)  # type: ignore[no-any-return]
        if self.how == "module":
            return torch.tanh(checkpoint(self.a, x, use_reentrant=False) + self.b(x))
        return checkpoint(self.inner, x, scale=0.8, use_reentrant=False)  # type: ignore[no-any-return]


class Transformed(nn.Module):
    """torch.func within a block."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "call":
            given = {name: p * 0.9 for name, p in self.line.named_parameters()}
            return torch.tanh(torch.func.functional_call(self.line, given, (x,)))
        rows = x.reshape(-1, WIDTH)
        if self.how == "vmap":
            return torch.vmap(lambda row: torch.tanh(self.line(row)))(rows).reshape(x.shape)
        slope = torch.vmap(torch.func.grad(lambda row: torch.tanh(self.line(row)).square().sum()))(rows)
        return x - 0.2 * slope.reshape(x.shape)


class Hooked(nn.Module):
    """Hooks of modules, of parameters and of activations that change what goes through them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line, self.norms = how, nn.Linear(WIDTH, WIDTH), []  # type: ignore[var-annotated]
        if how == "forward":
            self.line.register_forward_hook(lambda module, given, out: out * 0.8)
        elif how == "before":
            self.line.register_forward_pre_hook(lambda module, given: (given[0] + module.bias,))
        elif how == "backward":
            self.line.register_full_backward_hook(lambda module, grads, of_out: (grads[0] * 0.5,))
        elif how == "back_first":
            self.line.register_full_backward_pre_hook(lambda module, of_out: (of_out[0] * 1.5,))
        elif how == "parameter":
            self.line.weight.register_hook(lambda grad: grad.clamp(-0.011, 0.013))
            self.line.bias.register_hook(lambda grad: grad / (1 + grad.norm()))

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        if self.how == "activation" and h.requires_grad:
            h.register_hook(lambda grad: grad * 0.5 / (1 + 100 * grad.norm()))
            h.register_hook(lambda grad: self.norms.append(grad.norm().item()))
        return torch.tanh(h)


class Stopped(nn.Module):
    """Parts through which no gradient goes."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line, self.other = how, nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        if how == "bias":
            self.line.bias.requires_grad_(False)
        elif how == "frozen":
            self.other.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        if self.how == "detach":
            return h + torch.tanh(self.other(h.detach())) * x.detach()
        if self.how == "no_grad":
            with torch.no_grad():
                weight = self.other(h).softmax(-1)
            return h * (1 + weight) + self.other(x)
        if self.how == "through":
            hard = (h * 4).round() / 4
            return h + (hard - h).detach() + self.other(x)
        return h + torch.tanh(self.other(x))


class Quantized(nn.Module):
    """Codes of a book that follows what is given it (VQ-VAE)."""

    book: Tensor
    counts: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)
        self.register_buffer("book", torch.randn(6, WIDTH))
        self.register_buffer("counts", torch.ones(6))
        self.loss: Tensor | float = 0.0

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        rows = h.reshape(-1, WIDTH)
        far = rows.pow(2).sum(1, keepdim=True) - 2 * rows @ self.book.t() + self.book.pow(2).sum(1)
        code = far.argmin(1)
        found = F.embedding(code, self.book) if self.how == "embedding" else self.book[code]
        found = found.reshape(h.shape)
        if self.training:
            with torch.no_grad():
                if self.how == "hot":
                    hot = F.one_hot(code, 6).to(h.dtype)
                    counts, sums = hot.sum(0), hot.t() @ rows
                else:
                    counts = torch.zeros_like(self.counts).scatter_add_(0, code, torch.ones_like(rows[:, 0]))
                    sums = torch.zeros_like(self.book).index_add_(0, code, rows.detach())
                self.counts.mul_(0.9).add_(counts, alpha=0.1)
                self.book.lerp_(sums / counts.clamp(min=1).unsqueeze(1), 0.1)
        return h + (found - h).detach() + 0.1 * h


class Taken(nn.Module):
    """Sorts, gathers, scatters, sums up and puts by indices, over a row's features."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        if self.how == "sort":
            values, order = h.sort(-1)
            return values + x.gather(-1, order)
        if self.how == "top":
            values, at = h.topk(3, -1)
            return x + torch.zeros_like(h).scatter(-1, at, values)
        if self.how == "scatter":
            at = h.detach().argsort(-1)
            return torch.zeros_like(h).scatter_add(-1, at, h * 2) + x
        if self.how == "cumsum":
            return torch.tanh(h.cumsum(-1) - h.flip(-1).cumsum(0) * 0.1)
        if self.how == "einsum":
            return torch.einsum("...i,...j,ij->...j", h, x, self.line.weight).tanh()
        if self.how == "unfold":
            return F.pad(h, (1, 1)).unfold(-1, 3, 1).pow(2).mean(-1)
        if self.how == "roll":
            return h + x.roll((1, 2), (0, -1)) - torch.cat([h[1:], h[:1]]) * 0.3
        if self.how == "diag":
            return torch.diag_embed(h).cumsum(-1).diagonal(dim1=-2, dim2=-1) + torch.outer(
                h.flatten()[:1], self.line.bias
            )
        if self.how == "put":
            at = torch.arange(0, WIDTH, 2)
            return h.index_put((*(torch.arange(1) for _ in range(h.ndim - 1)), at), h[0, ..., 0].sum() * 0.1)
        if self.how == "pairs":
            rows = h.reshape(-1, WIDTH)
            far = torch.cdist(rows, rows * 0.5 + 0.3)
            return (far.softmax(-1) @ rows).reshape(h.shape)
        if self.how == "norms":
            return h / h.norm(dim=-1, keepdim=True) * h.std(-1, keepdim=True) + h.logsumexp(-1, keepdim=True)
        return h.repeat_interleave(2, -1).reshape(*h.shape, 2).prod(-1) + h.amax(-1, keepdim=True)


class Waves(nn.Module):
    """Complex numbers: of a row's spectrum, of pairs, of its own."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)
        self.filter = nn.Parameter(torch.randn(WIDTH // 2 + 1, 2) / 2)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        by = torch.view_as_complex(self.filter)
        if self.how == "fft":
            return torch.fft.irfft(torch.fft.rfft(h) * by, n=WIDTH)
        if self.how == "rows":
            return torch.fft.fft(torch.fft.fft(h, dim=0), dim=-1).real * 0.1
        if self.how == "turn":
            pairs = torch.view_as_complex(h.reshape(*h.shape[:-1], 4, 2))
            turned = pairs * torch.polar(torch.ones_like(self.filter[:4, 0]), self.filter[:4, 1])
            return torch.view_as_real(turned).flatten(-2)
        both = torch.complex(h, x) * by.sum()
        return both.abs() + both.angle().cos() + both.conj().imag


class Whole(nn.Module):
    """Integers and bools made of values, and what hangs on them."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)
        self.table = nn.Embedding(7, WIDTH, padding_idx=0 if how == "padded" else None)
        self.register_buffer("edges", torch.tensor([-0.5, -0.1, 0.2, 0.7]))

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        if self.how == "buckets":
            return h + self.table(torch.bucketize(h.detach()[..., 0], self.edges))
        if self.how == "hot":
            hot = F.one_hot(h.detach().argmax(-1) % 7, 7)
            return h + hot.to(h.dtype) @ self.table.weight
        if self.how == "where":
            return torch.where(h > 0, self.table.weight[1], h * self.table.weight[2])
        if self.how == "select":
            mask = h.detach()[..., 0] > 0
            out = h.clone()
            out[mask] = h[mask] * 2 + self.table.weight[3]
            return out
        if self.how == "count":
            many = (h.detach() > 0).sum(-1)
            return h + self.table(many % 7) * many.unsqueeze(-1) / WIDTH
        if self.how == "any":
            mask = (h > 0.5).any(-1, keepdim=True) & ~(h < -0.8).all(-1, keepdim=True)
            return h * mask + self.table.weight[4] * ~mask
        return h + self.table((h.detach()[..., 0].abs() * 6).long().clamp(0, 6))


class Spread(nn.Module):
    """Norms, and statistics of the batch."""

    peak: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line = how, nn.Linear(WIDTH, WIDTH)
        self.norm: nn.Module = nn.LayerNorm(WIDTH)
        if how == "rms":
            self.norm = nn.RMSNorm(WIDTH)
        elif how == "group":
            self.norm = nn.GroupNorm(2, WIDTH)
        self.register_buffer("peak", torch.ones(WIDTH), persistent=False)
        self.running: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        h = self.line(x)
        if self.how in ("rms", "layer"):
            return torch.tanh(self.norm(h))
        if self.how == "group":
            return torch.tanh(self.norm(h.reshape(-1, WIDTH)).reshape(h.shape))
        rows = h.reshape(-1, WIDTH)
        if self.how == "peak":
            with torch.no_grad():
                torch.maximum(self.peak, rows.abs().amax(0), out=self.peak)
            return torch.tanh(h / self.peak)
        if self.how == "own":
            mean = rows.detach().mean(0)
            self.running = mean if self.running is None else 0.9 * self.running + 0.1 * mean
            return torch.tanh(h - self.running)
        return torch.tanh((h - rows.mean(0)) / (rows.var(0, unbiased=False) + 0.1).sqrt())


class Priced(nn.Module):
    """Leaves an addend of the loss on itself."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.line, self.price = how, nn.Linear(WIDTH, WIDTH), torch.zeros(())

    def forward(self, x: Tensor) -> Tensor:
        h = torch.tanh(self.line(x))
        if self.how == "decay":
            self.price = 0.1 * sum(p.square().sum() for p in self.parameters())
        elif self.how == "activity":
            self.price = 0.1 * h.abs().add(0.1).log().mean()
        else:
            self.price = 0.1 * (
                h.reshape(-1, WIDTH).softmax(-1).mean(0).square().sum() * self.line.bias.sum()
            )
        return h


class Attending(nn.Module):
    """Attention over a sequence, with masks."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.norm = how, nn.LayerNorm(WIDTH)
        if how == "module" or how == "padded":
            self.inner: nn.Module = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
        elif how == "layer":
            self.inner = nn.TransformerEncoderLayer(WIDTH, 2, 12, dropout=0.0, batch_first=True)
        else:
            self.inner = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        n = x.shape[1]
        mask = torch.ones(n, n, dtype=torch.bool).tril()
        if self.how == "layer":
            return self.inner(x)  # type: ignore[no-any-return]
        h = self.norm(x)
        if self.how == "module":
            return self.out(self.inner(h, h, h, attn_mask=~mask, need_weights=False)[0])  # type: ignore[no-any-return]
        if self.how == "padded":
            padding = torch.zeros(x.shape[:2], dtype=torch.bool)
            padding[:, -1] = True
            return self.out(self.inner(h, h, h, key_padding_mask=padding)[0])  # type: ignore[no-any-return]
        q, k, v = (t.unflatten(-1, (2, -1)).transpose(1, 2) for t in self.inner(h).chunk(3, -1))
        if self.how == "fused":
            h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        elif self.how == "masked":
            h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        else:
            scores = (q @ k.transpose(-1, -2)) / 2
            h = scores.masked_fill(~mask, float("-inf")).softmax(-1) @ v
        return self.out(h.transpose(1, 2).flatten(-2))  # type: ignore[no-any-return]


class Along(nn.Module):
    """Convolutions and recurrent layers along a sequence."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how = how
        self.inner: nn.Module
        if how in ("gru", "lstm"):
            self.inner = (nn.GRU if how == "gru" else nn.LSTM)(WIDTH, WIDTH, batch_first=True)
        elif how == "depth":
            self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=2, groups=WIDTH)
        else:
            self.inner = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
        self.back = nn.ConvTranspose1d(WIDTH, WIDTH, 2, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        if self.how in ("gru", "lstm"):
            return self.inner(x)[0]  # type: ignore[no-any-return]
        h = x.transpose(1, 2)
        if self.how == "depth":
            h = self.inner(h)[..., : x.shape[1]]
        elif self.how == "pool":
            h = self.back(F.avg_pool1d(self.inner(h), 2))
        else:
            h = self.inner(h)
        return torch.tanh(h).transpose(1, 2)


def kinds(make: Callable[[str], nn.Module], words: str) -> Callable[[random.Random], nn.Module]:
    """A brick, in one of these kinds."""
    return lambda lot: make(lot.choice(words.split()))


BRICKS: dict[str, Callable[[random.Random], nn.Module]] = {
    "written": kinds(Written, "slice narrow turned filled masked row put viewed out"),
    "handled": kinds(Handled, "weight clamp div row grad set data anew slot copy hidden"),
    "beside": kinds(Beside, "turned product cut normed order stack mixed"),
    "tied": kinds(Tied, "weight bias module"),
    "kept": kinds(Kept, "items all keys"),
    "lent": kinds(Lent, "weights again once"),
    "boxed": kinds(Boxed, "dict data named list plain"),
    "hasty": kinds(Hasty, "return break skip"),
    "cells": kinds(Cells, "gru lstm"),
    "again": kinds(Again, "reentrant module plain"),
    "transformed": kinds(Transformed, "call vmap grad"),
    "hooked": kinds(Hooked, "forward before backward back_first parameter activation"),
    "stopped": kinds(Stopped, "bias frozen detach no_grad through"),
    "quantized": kinds(Quantized, "hot embedding plain"),
    "taken": kinds(Taken, "sort top scatter cumsum einsum unfold roll diag put pairs norms prod"),
    "waves": kinds(Waves, "fft rows turn own"),
    "whole": kinds(Whole, "padded buckets hot where select count any plain"),
    "spread": kinds(Spread, "rms layer group peak own batch"),
    "priced": kinds(Priced, "decay activity balance"),
}
"""Of rows, or of sequences of them."""

ALONG: dict[str, Callable[[random.Random], nn.Module]] = {
    "attending": kinds(Attending, "module padded layer fused masked own"),
    "along": kinds(Along, "gru lstm depth pool conv"),
}
"""Of sequences alone."""
