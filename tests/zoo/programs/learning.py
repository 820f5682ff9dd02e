"""Programs that learn from teachers, from pairs, and from adversaries."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations

from tests.zoo.programs.entry import (
    CLASSES,
    ROWS,
    WIDTH,
    Batch,
    Tensor,
    floats,
    images,
    mlp,
    points,
    program,
    views,
)

# ---- teachers and targets


@program("mean-teacher", views)
class MeanTeacher(nn.Module):
    """A teacher whose weights follow the student's (Tarvainen & Valpola, 2017), written to in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.student = mlp(WIDTH, 16, 16, CLASSES)
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)

    @torch.no_grad()
    def follow(self, decay: float = 0.9) -> None:
        for mean, p in zip(self.teacher.parameters(), self.student.parameters(), strict=True):
            mean.mul_(decay).add_(p, alpha=1 - decay)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        if self.training:
            self.follow()
        with torch.no_grad():
            target = self.teacher(z).softmax(-1)
        return F.mse_loss(self.student(x).softmax(-1), target) + F.mse_loss(self.student(z), x[:, :CLASSES])


@program("byol", views)
class Byol(nn.Module):
    """Bootstrap your own latent (Grill et al., 2020): the target's ``.data`` is set anew in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.online = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.target = copy.deepcopy(self.online)
        self.predictor = mlp(8, 16, 8, act=nn.ReLU)
        for p in self.target.parameters():
            p.requires_grad = False

    def move(self) -> None:
        for p, t in zip(self.online.parameters(), self.target.parameters(), strict=True):
            t.data = t.data * 0.9 + p.data * 0.1

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        one, two = self.predictor(self.online(x)), self.predictor(self.online(z))
        with torch.no_grad():
            self.move()
            there, here = self.target(z), self.target(x)
        return (2 - F.cosine_similarity(one, there) - F.cosine_similarity(two, here)).mean()


@program("moco", views)
class Moco(nn.Module):
    """Momentum contrast (He et al., 2020): a queue of keys in a buffer, and where it stands in another."""

    queue: Tensor
    place: Tensor

    def __init__(self, size: int = 32) -> None:
        super().__init__()
        self.query, self.key = mlp(WIDTH, 16, 8), mlp(WIDTH, 16, 8)
        self.key.load_state_dict(self.query.state_dict())
        self.key.requires_grad_(False)
        self.register_buffer("queue", F.normalize(torch.randn(8, size), dim=0))
        self.register_buffer("place", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def enqueue(self, keys: Tensor) -> None:
        start = int(self.place)
        self.queue[:, start : start + len(keys)] = keys.t()
        self.place[0] = (start + len(keys)) % self.queue.shape[1]

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        q = F.normalize(self.query(x), dim=1)
        with torch.no_grad():
            for k, p in zip(self.key.parameters(), self.query.parameters(), strict=True):
                k.data = k.data * 0.99 + p.data * 0.01
            keys = F.normalize(self.key(z), dim=1)
        same = torch.einsum("nc,nc->n", q, keys)[:, None]
        other = torch.einsum("nc,ck->nk", q, self.queue.clone())
        logits = torch.cat([same, other], 1) / 0.2
        self.enqueue(keys)
        return F.cross_entropy(logits, torch.zeros(len(logits), dtype=torch.long))


@program("dqn", lambda g: {**points(g), "r": floats(g, ROWS), "next": floats(g, ROWS, WIDTH)})
class DQN(nn.Module):
    """Deep Q-learning (Mnih et al., 2015): the target is copied every second step, as a counter says."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.target = mlp(WIDTH, 16, CLASSES, act=nn.ReLU), mlp(WIDTH, 16, CLASSES, act=nn.ReLU)
        self.target.load_state_dict(self.q.state_dict())
        self.steps = 0

    def forward(self, x: Tensor, y: Tensor, r: Tensor, next: Tensor) -> Tensor:
        if self.steps % 2 == 0:
            with torch.no_grad():
                for t, p in zip(self.target.parameters(), self.q.parameters(), strict=True):
                    t.copy_(p)
        self.steps += 1
        chosen = self.q(x).gather(1, y[:, None]).squeeze(1)
        with torch.no_grad():
            wanted = r + 0.9 * self.target(next).max(1).values
        return F.smooth_l1_loss(chosen, wanted)


@program("distillation", points)
class Distillation(nn.Module):
    """A frozen teacher's soft targets (Hinton et al., 2015)."""

    def __init__(self) -> None:
        super().__init__()
        self.teacher = mlp(WIDTH, 32, CLASSES, act=nn.ReLU).requires_grad_(False).eval()
        self.student = mlp(WIDTH, 8, CLASSES, act=nn.ReLU)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        own = self.student(x)
        soft = F.kl_div((own / 2).log_softmax(-1), (self.teacher(x) / 2).softmax(-1), reduction="batchmean")
        return soft * 4 + F.cross_entropy(own, y)


# ---- contrastive


@program("simclr", views)
class SimCLR(nn.Module):
    """NT-Xent (Chen et al., 2020): every row against all others of the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.head = mlp(WIDTH, 16, 16, act=nn.ReLU), mlp(16, 16, 8, act=nn.ReLU)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        both = F.normalize(self.head(self.encoder(torch.cat([x, z]))), dim=1)
        n = len(x)
        scores = both @ both.t() / 0.5
        scores = scores.masked_fill(torch.eye(2 * n, dtype=torch.bool), -1e9)
        target = torch.cat([torch.arange(n, 2 * n), torch.arange(n)])
        return F.cross_entropy(scores, target)


@program("barlow-twins", views)
class BarlowTwins(nn.Module):
    """Redundancy reduction (Zbontar et al., 2021): a correlation over the batch."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(WIDTH, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 8))
        self.norm = nn.BatchNorm1d(8, affine=False)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        c = self.norm(self.encoder(x)).t() @ self.norm(self.encoder(z)) / len(x)
        on = (torch.diagonal(c) - 1).pow(2).sum()
        off = (c - torch.diag(torch.diagonal(c))).pow(2).sum()
        return on + 0.005 * off


@program("vicreg", views)
class Vicreg(nn.Module):
    """Variance, invariance, covariance (Bardes et al., 2022)."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(WIDTH, 16, 8, act=nn.GELU)

    def forward(self, x: Tensor, z: Tensor) -> Tensor:
        a, b = self.encoder(x), self.encoder(z)
        loss = F.mse_loss(a, b)
        for e in (a, b):
            e = e - e.mean(0)
            loss = loss + F.relu(1 - torch.sqrt(e.var(0) + 1e-4)).mean()
            cov = e.t() @ e / (len(e) - 1)
            loss = loss + (cov.pow(2).sum() - cov.diagonal().pow(2).sum()) / e.shape[1]
        return loss


@program("memory-bank", lambda g: {**points(g), "rows": torch.randperm(16, generator=g)[:ROWS]})
class MemoryBank(nn.Module):
    """Instance discrimination (Wu et al., 2018): a bank of what was seen, updated at the rows seen now."""

    bank: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(WIDTH, 16, 8)
        self.register_buffer("bank", F.normalize(torch.randn(16, 8), dim=1))

    def forward(self, x: Tensor, y: Tensor, rows: Tensor) -> Tensor:
        v = F.normalize(self.encoder(x), dim=1)
        loss = F.cross_entropy(v @ self.bank.t().clone() / 0.1, rows)
        with torch.no_grad():
            self.bank[rows] = F.normalize(0.5 * self.bank[rows] + 0.5 * v, dim=1)
        return loss


@program("triplet", lambda g: {**views(g), "other": floats(g, ROWS, WIDTH)})
class Triplet(nn.Module):
    """One encoder, used three times."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = mlp(WIDTH, 16, 8, act=nn.ELU)

    def forward(self, x: Tensor, z: Tensor, other: Tensor) -> Tensor:
        return F.triplet_margin_loss(self.encoder(x), self.encoder(z), self.encoder(other))


# ---- adversaries


class Generates(nn.Module):
    """The generator, and its critic, of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = mlp(4, 16, WIDTH, act=nn.ReLU)
        self.critic = mlp(WIDTH, 16, 1, act=nn.ELU)


class Criticizes(nn.Module):
    """The critic's own loss: what is real against what is not."""

    def __init__(self, critic: nn.Module) -> None:
        super().__init__()
        self.critic = critic

    def forward(self, real: Tensor, fake: Tensor) -> Tensor:
        return F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake)).mean()


def adversaries(model: Generates, trainer: Callable[..., Any], batches: list[Batch]) -> list[Any]:
    """Two optimizers, in turns: the critic on what the generator made, the generator through the critic."""
    judge = Criticizes(model.critic)
    critic = trainer(judge)
    generator = trainer(model.generator, lambda fake, batch: F.softplus(-judge.critic(fake)).mean())
    losses = []
    for batch in batches:
        fake = generator.predict((batch["noise"],))
        losses.append(critic.train((batch["x"], fake)))
        losses.append(generator.train((batch["noise"],)))
        critic.zero_grad()
    return losses


@program("gan", lambda g: {"x": floats(g, ROWS, WIDTH), "noise": floats(g, ROWS, 4)}, loop=adversaries)
def gan() -> nn.Module:
    return Generates()


@program("gan-phases", lambda g: {"x": floats(g, ROWS, WIDTH), "noise": floats(g, ROWS, 4)})
class GanPhases(Generates):
    """Both players in one module, their turns counted by it."""

    def __init__(self) -> None:
        super().__init__()
        self.turn = 0

    def forward(self, x: Tensor, noise: Tensor) -> Tensor:
        self.turn += 1
        fake = self.generator(noise)
        if self.turn % 2:
            return F.softplus(-self.critic(x)).mean() + F.softplus(self.critic(fake.detach())).mean()
        return F.softplus(-self.critic(fake)).mean()


@program(
    "wgan-gp",
    lambda g: {
        "x": floats(g, ROWS, WIDTH),
        "noise": floats(g, ROWS, 4),
        "mix": torch.rand(ROWS, 1, generator=g).double(),
    },
)
class WganGP(Generates):
    """Wasserstein critic with a gradient penalty (Gulrajani et al., 2017): a gradient within forward."""

    def forward(self, x: Tensor, noise: Tensor, mix: Tensor) -> Tensor:
        fake = self.generator(noise)
        between = (mix * x + (1 - mix) * fake.detach()).requires_grad_()
        (slope,) = torch.autograd.grad(self.critic(between).sum(), between, create_graph=True)
        penalty = (slope.norm(2, dim=1) - 1).pow(2).mean()
        return self.critic(fake).mean() - self.critic(x).mean() + 10 * penalty


@program("r1-penalty", points)
class R1(nn.Module):
    """A critic of images' kind with the R1 penalty (Mescheder et al., 2018), on inputs themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.critic = mlp(WIDTH, 16, 16, 1, act=nn.Softplus)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        score = self.critic(x)
        (slope,) = torch.autograd.grad(score.sum(), x, create_graph=True)
        return F.softplus(-score).mean() + 0.5 * slope.pow(2).sum(1).mean()


@program("fgsm", points)
class Fgsm(nn.Module):
    """Adversarial training (Goodfellow et al., 2015): inputs moved along the sign of their gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 16, CLASSES, act=nn.ReLU)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(F.cross_entropy(self.net(x), y), x)
        return F.cross_entropy(self.net((x + 0.1 * slope.sign()).detach()), y)


class Reverse(torch.autograd.Function):
    """The gradient, with its sign turned."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # type: ignore[override]
        return -0.5 * grad


@program("dann", lambda g: {**points(g), "domain": torch.randint(0, 2, (ROWS,), generator=g)})
class Dann(nn.Module):
    """Domain-adversarial training (Ganin et al., 2016), with an autograd function of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.features, self.label = mlp(WIDTH, 16, 16, last=True), nn.Linear(16, CLASSES)
        self.domain = mlp(16, 8, 2)

    def forward(self, x: Tensor, y: Tensor, domain: Tensor) -> Tensor:
        h = self.features(x)
        return F.cross_entropy(self.label(h), y) + F.cross_entropy(self.domain(Reverse.apply(h)), domain)


@program("spectral-norm-critic", images)
class SpectralCritic(nn.Module):
    """Spectral normalization (Miyato et al., 2018): each reading of a weight moves its buffers."""

    def __init__(self) -> None:
        super().__init__()
        norm = parametrizations.spectral_norm
        self.body = nn.Sequential(
            norm(nn.Conv2d(3, 8, 3, 2, 1)),
            nn.LeakyReLU(0.1),
            norm(nn.Conv2d(8, 8, 3, 2, 1)),
            nn.LeakyReLU(0.1),
        )
        self.head, self.embed = norm(nn.Linear(8, 1)), norm(nn.Embedding(CLASSES, 8))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.body(x).sum((2, 3))
        return F.relu(1 - self.head(h).squeeze(1) - (self.embed(y) * h).sum(1)).mean()
