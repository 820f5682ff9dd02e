"""Programs whose modules are chosen by data, whose weights are made, and of sequences."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.programs.entry import (
    CLASSES,
    ROWS,
    WIDTH,
    Tensor,
    classes,
    floats,
    images,
    mlp,
    points,
    program,
    texts,
)

# ---- modules chosen by data, by chance, by time


@program("switch-experts", points)
class SwitchExperts(nn.Module):
    """Experts in a list, each called on the rows that chose it, and not at all if none did."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 6)
        self.experts = nn.ModuleList(mlp(WIDTH, 8, CLASSES, act=nn.ReLU) for _ in range(6))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        weight, chosen = self.gate(x).softmax(-1).max(-1)
        out = x.new_zeros(len(x), CLASSES)
        for i, expert in enumerate(self.experts):
            (rows,) = torch.where(chosen == i)
            if len(rows):
                out = out.index_add(0, rows, expert(x[rows]) * weight[rows, None])
        return F.cross_entropy(out, y)


@program("multi-task", lambda g: {**points(g), "task": torch.randint(0, 3, (ROWS,), generator=g)})
class MultiTask(nn.Module):
    """Heads chosen by which tasks a batch has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = mlp(WIDTH, 16, act=nn.ReLU, last=True)
        self.heads = nn.ModuleDict({str(i): nn.Linear(16, CLASSES) for i in range(3)})

    def forward(self, x: Tensor, y: Tensor, task: Tensor) -> Tensor:
        h, loss = self.body(x), x.new_zeros(())
        for i in task.unique().tolist():
            mask = task == i
            loss = loss + F.cross_entropy(self.heads[str(i)](h[mask]), y[mask], reduction="sum")
        return loss / len(x)


@program("stochastic-depth", points)
class StochasticDepth(nn.Module):
    """Layers left out by Python's own dice (Huang et al., 2016)."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(mlp(WIDTH, WIDTH, last=True) for _ in range(5))
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        for block in self.blocks:
            if random.random() < 0.6:
                x = x + block(x)
        return F.cross_entropy(self.head(x), y)


@program("annealed", points)
class Annealed(nn.Module):
    """A temperature that falls by a count of the module's own calls, and a history of what it was."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.calls = mlp(WIDTH, 16, CLASSES), 0
        self.history: list[float] = []

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        self.calls += 1
        self.history.append(1.0 / self.calls)
        return F.cross_entropy(self.net(x) / sum(self.history), y)


@program("gumbel-softmax", points)
class Gumbel(nn.Module):
    """Discrete choices with a gradient (Jang et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.choose, self.values = mlp(WIDTH, 16, 6), nn.Parameter(torch.randn(6, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(F.gumbel_softmax(self.choose(x), tau=0.7, hard=True) @ self.values, y)


@program("dropout-net", images)
class DropoutNet(nn.Module):
    """Dropout of every kind."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv2d(3, 8, 3, 2, 1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = F.dropout2d(F.relu(self.conv(x)), 0.3, self.training).mean((2, 3))
        return F.cross_entropy(self.head(F.dropout(h, 0.2, self.training)), y)


@program("augmented", images)
class Augmented(nn.Module):
    """Mixup by a permutation and a beta that the module draws (Zhang et al., 2018)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), nn.ReLU(), nn.Flatten(), nn.Linear(128, CLASSES))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        share = torch.rand(()).to(x.dtype)
        other = torch.randperm(len(x), device=x.device)
        logits = self.net(share * x + (1 - share) * x[other])
        return share * F.cross_entropy(logits, y) + (1 - share) * F.cross_entropy(logits, y[other])


# ---- weights that are made


class Symmetric(nn.Module):
    """A parametrization: the upper triangle, mirrored."""

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).transpose(-1, -2)


@program("parametrized", points)
class Parametrized(nn.Module):
    """Weights under parametrizations: weight norm, an orthogonal one, one of its own, read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first = parametrizations.weight_norm(nn.Linear(WIDTH, WIDTH))
        self.second = parametrizations.orthogonal(nn.Linear(WIDTH, WIDTH))
        self.third = nn.Linear(WIDTH, WIDTH)
        parametrize.register_parametrization(self.third, "weight", Symmetric())
        self.head = nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = torch.tanh(self.second(torch.tanh(self.first(x))))
        x = torch.tanh(self.third(x)) + F.linear(x, self.third.weight.t())
        return F.cross_entropy(self.head(x), y) + 1e-2 * self.first.weight.square().mean()


@program("old-weight-norm", texts)
class OldWeightNorm(nn.Module):
    """WaveNet's convolutions (van den Oord et al., 2016) under the hooks of torch's old weight norm."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        norm = torch.nn.utils.weight_norm
        self.filters = nn.ModuleList(norm(nn.Conv1d(8, 16, 2, dilation=2**i)) for i in range(2))
        self.head = nn.Conv1d(8, 20, 1)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1]).transpose(1, 2)
        for i, line in enumerate(self.filters):
            a, b = line(F.pad(x, (2**i, 0))).chunk(2, 1)
            x = x + torch.tanh(a) * torch.sigmoid(b)
        return F.cross_entropy(self.head(x), ids[:, 1:])


@program("hypernetwork", points)
class Hypernetwork(nn.Module):
    """A network that makes another's weights, for each row (Ha et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.code, self.make = nn.Linear(WIDTH, 6), nn.Linear(6, WIDTH * CLASSES + CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        made = self.make(torch.tanh(self.code(x)))
        weight, bias = made.split([WIDTH * CLASSES, CLASSES], 1)
        logits = torch.bmm(weight.view(-1, CLASSES, WIDTH), x.unsqueeze(2)).squeeze(2) + bias
        return F.cross_entropy(logits, y)


@program("maml", lambda g: {**points(g), "more": floats(g, ROWS, WIDTH), "label": classes(g)})
class Maml(nn.Module):
    """A step of gradient descent within forward, and a gradient through it (Finn et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 16, CLASSES)

    def forward(self, x: Tensor, y: Tensor, more: Tensor, label: Tensor) -> Tensor:
        weights = dict(self.net.named_parameters())
        loss = F.cross_entropy(functional_call(self.net, weights, (x,)), y)
        slopes = torch.autograd.grad(loss, list(weights.values()), create_graph=True)
        fast = {k: w - 0.1 * g for (k, w), g in zip(weights.items(), slopes, strict=True)}
        return F.cross_entropy(functional_call(self.net, fast, (more,)), label)


@program("lora", texts)
class Lora(nn.Module):
    """Low-rank adapters beside frozen layers (Hu et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.base = nn.Embedding(20, 16), mlp(16, 16, 16, act=nn.GELU)
        self.head = nn.Linear(16, 20)
        for part in (self.embed, self.base, self.head):
            part.requires_grad_(False)
        self.down, self.up = nn.Parameter(torch.randn(16, 2)), nn.Parameter(torch.zeros(2, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids[:, :-1])
        x = self.base(x) + x @ self.down @ self.up
        return F.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten())


@program(
    "factorization", lambda g: {"user": classes(g, 20), "item": classes(g, 30), "stars": floats(g, ROWS)}
)
class Factorization(nn.Module):
    """Matrix factorization with ``max_norm``: the lookup itself writes to the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.user, self.item = nn.Embedding(20, 8, max_norm=1.0), nn.Embedding(30, 8, max_norm=1.0)
        self.bias = nn.Embedding(30, 1)

    def forward(self, user: Tensor, item: Tensor, stars: Tensor) -> Tensor:
        guess = (self.user(user) * self.item(item)).sum(1) + self.bias(item).squeeze(1)
        return F.mse_loss(guess, stars)


# ---- sequences


@program("char-rnn", texts)
class CharRnn(nn.Module):
    """Recurrent layers of each kind, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 12)
        self.gru, self.lstm = (
            nn.GRU(12, 12, batch_first=True),
            nn.LSTM(12, 10, 2, batch_first=True, bidirectional=True),
        )
        self.head = nn.Linear(20, 20)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.lstm(self.gru(self.embed(ids))[0])[0]
        return F.cross_entropy(self.head(x).transpose(1, 2), ids)


@program("recurrent-memory", texts)
class RecurrentMemory(nn.Module):
    """Attention to what the last batch left behind (Dai et al., 2019): a detached buffer."""

    memory: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(20, 16), nn.Linear(16, 20)
        self.q, self.k, self.v = (nn.Linear(16, 16) for _ in range(3))
        self.register_buffer("memory", torch.zeros(4, 16))

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        seen = torch.cat([self.memory.expand(len(x), -1, -1), x], 1)
        x = x + F.scaled_dot_product_attention(self.q(x), self.k(seen), self.v(seen))
        with torch.no_grad():
            self.memory.copy_(0.5 * self.memory + 0.5 * x.mean(0)[-4:])
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


@program("ctc", lambda g: {"x": floats(g, ROWS, 12, WIDTH), "target": 1 + classes(g, 7, ROWS, 4)})
class Ctc(nn.Module):
    """Connectionist temporal classification (Graves et al., 2006)."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.head = nn.Conv1d(WIDTH, 16, 3, padding=1), nn.Linear(16, 8)

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = F.relu(self.conv(x.transpose(1, 2))).transpose(1, 2)
        log = self.head(h).log_softmax(-1).transpose(0, 1)
        sizes = torch.full((len(x),), 12), torch.full((len(x),), 4)
        return F.ctc_loss(log, target, *sizes)


@program("actor-critic", lambda g: {**points(g), "gain": floats(g, ROWS), "old": -floats(g, ROWS).abs()})
class ActorCritic(nn.Module):
    """Proximal policy optimization (Schulman et al., 2017): advantages normalized over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.actor, self.critic = (
            mlp(WIDTH, 16, last=True),
            nn.Linear(16, CLASSES),
            nn.Linear(16, 1),
        )

    def forward(self, x: Tensor, y: Tensor, gain: Tensor, old: Tensor) -> Tensor:
        h = self.body(x)
        policy = torch.distributions.Categorical(logits=self.actor(h), validate_args=False)
        value = self.critic(h).squeeze(1)
        better = (gain - value).detach()
        better = (better - better.mean()) / (better.std() + 1e-8)
        ratio = (policy.log_prob(y) - old).exp()
        clipped = torch.min(ratio * better, ratio.clamp(0.8, 1.2) * better).mean()
        return -clipped + 0.5 * F.mse_loss(value, gain) - 0.01 * policy.entropy().mean()


@program("unet", lambda g: {"x": floats(g, ROWS, 3, 8, 8), "mask": classes(g, 3, ROWS, 8, 8)})
class UNet(nn.Module):
    """Down, up, and across (Ronneberger et al., 2015), with group and batch norms."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1), nn.BatchNorm2d(8), nn.ReLU())
        self.down = nn.Sequential(nn.MaxPool2d(2), nn.Conv2d(8, 16, 3, 1, 1), nn.GroupNorm(4, 16), nn.ReLU())
        self.up = nn.ConvTranspose2d(16, 8, 2, 2)
        self.out = nn.Conv2d(16, 3, 1)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        side = self.enter(x)
        deep = F.interpolate(F.avg_pool2d(self.down(side), 2), scale_factor=2, mode="nearest")
        return F.cross_entropy(self.out(torch.cat([side, self.up(deep)], 1)), mask)


@program("sparse-autoencoder", points)
class SparseAutoencoder(nn.Module):
    """The k largest features alone (Makhzani & Frey, 2014), decoder rows kept at norm one in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = nn.Linear(WIDTH, 24), nn.Linear(24, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.training:
            self.decoder.weight.data = F.normalize(self.decoder.weight.data, dim=0)
        h = F.relu(self.encoder(x - self.decoder.bias))
        best = h.topk(4, -1)
        sparse = torch.zeros_like(h).scatter(-1, best.indices, best.values)
        return F.mse_loss(self.decoder(sparse), x)


@program("arcface", points)
class ArcFace(nn.Module):
    """An angular margin (Deng et al., 2019), and centers that follow (Wen et al., 2016)."""

    centers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.body, self.weight = mlp(WIDTH, 16, 8, act=nn.PReLU), nn.Parameter(torch.randn(CLASSES, 8))
        self.register_buffer("centers", torch.zeros(CLASSES, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x)
        cosine = F.linear(F.normalize(h), F.normalize(self.weight)).clamp(-0.999, 0.999)
        one = F.one_hot(y, CLASSES).bool()
        logits = torch.where(one, torch.cos(torch.acos(cosine) + 0.3), cosine) * 8
        loss = F.cross_entropy(logits, y) + 0.01 * (h - self.centers[y]).pow(2).sum(1).mean()
        with torch.no_grad():
            moved = torch.zeros_like(self.centers).index_add_(0, y, h - self.centers[y])
            self.centers.add_(moved, alpha=0.1)
        return loss


@program("capsules", points)
class Capsules(nn.Module):
    """Dynamic routing (Sabour et al., 2017): softmax over agreements, three times."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, CLASSES, 4, 6) * 0.2)

    @staticmethod
    def squash(x: Tensor) -> Tensor:
        norm = x.pow(2).sum(-1, keepdim=True)
        return norm / (1 + norm) * x * (norm + 1e-8).rsqrt()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        votes = torch.einsum("bid,icdo->bico", x.view(-1, 3, 4), self.weight)
        logits = votes.new_zeros(votes.shape[:3])
        for i in range(3):
            out = self.squash(torch.einsum("bic,bico->bco", logits.softmax(2), votes))
            if i < 2:
                logits = logits + (votes * out[:, None]).sum(-1).detach()
        return F.multi_margin_loss(out.norm(dim=-1), y)
