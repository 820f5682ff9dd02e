"""Programs as researchers write them: small, whole, and in none of them a word of parallelism.

Each is a module that gives its loss, or a module of several parts and a loop over them (``loop``).
"""

from __future__ import annotations

import copy
import itertools
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize

from tests.zoo.cases import Case

ROWS, WIDTH, CLASSES = 8, 12, 5
Tensor = torch.Tensor
Generator = torch.Generator
Batch = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A program: its model, its batches, and, where one optimizer is not all, its loop."""

    build: Callable[[], nn.Module]
    draw: Callable[[Generator], Batch]
    loop: Callable[..., Any] | None = None


PROGRAMS: dict[str, Program] = {}


def program(name: str, draw: Callable[[Generator], Batch], *, loop: Any = None) -> Any:
    """Enter a model into the zoo."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        PROGRAMS[name] = Program(build, draw, loop)
        return build

    return enter


def case(name: str) -> Case:
    """The case of a program."""
    of = PROGRAMS[name]

    def drawn(model: nn.Module, generator: Generator) -> Iterator[Batch]:
        yield of.draw(generator)

    return Case(f"programs/{name}", of.build, drawn, loop=of.loop)


# ---- batches


def floats(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(generator: Generator, n: int = CLASSES, *shape: int) -> Tensor:
    return torch.randint(0, n, shape or (ROWS,), generator=generator)


def points(generator: Generator) -> Batch:
    """Rows of features, and their classes."""
    return {"x": floats(generator, ROWS, WIDTH), "y": classes(generator)}


def views(generator: Generator) -> Batch:
    """Rows of features, seen twice."""
    x = floats(generator, ROWS, WIDTH)
    return {"x": x + 0.1 * floats(generator, ROWS, WIDTH), "z": x + 0.1 * floats(generator, ROWS, WIDTH)}


def images(generator: Generator) -> Batch:
    """Images, and their classes."""
    return {"x": floats(generator, ROWS, 3, 8, 8), "y": classes(generator)}


def texts(generator: Generator) -> Batch:
    """Token ids."""
    return {"ids": classes(generator, 20, ROWS, 10)}


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh, last: bool = False) -> nn.Sequential:
    """Linear layers, with something between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*(layers if last else layers[:-1]))


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


# ---- physics


@program("pinn", lambda g: {"t": floats(g, ROWS, 1), "x": floats(g, ROWS, 1)})
class Pinn(nn.Module):
    """Burgers' equation in the loss (Raissi et al., 2019): second derivatives of the network."""

    def __init__(self) -> None:
        super().__init__()
        self.net = mlp(2, 16, 16, 1)

    def forward(self, t: Tensor, x: Tensor) -> Tensor:
        t, x = t.detach().requires_grad_(), x.detach().requires_grad_()
        u = self.net(torch.cat([t, x], 1))
        ones = torch.ones_like(u)
        ut, ux = torch.autograd.grad(u, (t, x), ones, create_graph=True)
        (uxx,) = torch.autograd.grad(ux, x, ones, create_graph=True)
        return (ut + u * ux - 0.1 * uxx).pow(2).mean() + (u - torch.sin(x)).pow(2).mean()


@program("hamiltonian", lambda g: {"x": floats(g, ROWS, 6), "dx": floats(g, ROWS, 6)})
class Hamiltonian(nn.Module):
    """Hamiltonian networks (Greydanus et al., 2019): the output is a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(6, 16, 16, 1)

    def forward(self, x: Tensor, dx: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (slope,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=True)
        q, p = slope.chunk(2, 1)
        return F.mse_loss(torch.cat([p, -q], 1), dx)


@program("neural-ode", points)
class NeuralODE(nn.Module):
    """An ODE's right side as a network (Chen et al., 2018), solved by Runge and Kutta: used sixteen times."""

    def __init__(self) -> None:
        super().__init__()
        self.rhs, self.head = mlp(WIDTH + 1, 16, WIDTH), nn.Linear(WIDTH, CLASSES)
        self.calls = 0

    def f(self, t: float, x: Tensor) -> Tensor:
        self.calls += 1
        return self.rhs(torch.cat([x, torch.full_like(x[:, :1], t)], 1))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = 0.25
        for i in range(4):
            t = i * h
            a = self.f(t, x)
            b = self.f(t + h / 2, x + h / 2 * a)
            c = self.f(t + h / 2, x + h / 2 * b)
            d = self.f(t + h, x + h * c)
            x = x + h / 6 * (a + 2 * b + 2 * c + d)
        return F.cross_entropy(self.head(x), y)


@program("deep-equilibrium", points)
class Equilibrium(nn.Module):
    """A fixed point (Bai et al., 2019), whose gradient is solved for in a hook."""

    def __init__(self) -> None:
        super().__init__()
        self.inside, self.outside = nn.Linear(16, 16), nn.Linear(WIDTH, 16)
        self.head = nn.Linear(16, CLASSES)
        with torch.no_grad():
            self.inside.weight.mul_(0.3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        given = self.outside(x)
        with torch.no_grad():
            z = torch.zeros_like(given)
            for _ in range(12):
                z = torch.tanh(self.inside(z) + given)
        z = torch.tanh(self.inside(z) + given)
        if self.training:
            start = z.detach().requires_grad_()
            again = torch.tanh(self.inside(start) + given)

            def solve(grad: Tensor) -> Tensor:
                v = grad
                for _ in range(12):
                    v = torch.autograd.grad(again, start, v, retain_graph=True)[0] + grad
                return v

            z.register_hook(solve)
        return F.cross_entropy(self.head(z), y)


@program(
    "nerf", lambda g: {"origin": floats(g, ROWS, 3), "way": floats(g, ROWS, 3), "color": floats(g, ROWS, 3)}
)
class Nerf(nn.Module):
    """Radiance fields (Mildenhall et al., 2020): encoded positions, and light summed along rays."""

    powers: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("powers", 2.0 ** torch.arange(3), persistent=False)
        self.body, self.density, self.color = (
            mlp(18, 16, 16, act=nn.ReLU, last=True),
            nn.Linear(16, 1),
            nn.Linear(16, 3),
        )

    def forward(self, origin: Tensor, way: Tensor, color: Tensor) -> Tensor:
        depth = torch.linspace(0.1, 1.0, 6, dtype=origin.dtype)
        at = origin[:, None] + way[:, None] * depth[:, None]
        coded = (at[..., None] * self.powers).flatten(-2)
        h = self.body(torch.cat([coded.sin(), coded.cos()], -1))
        alpha = 1 - torch.exp(-F.relu(self.density(h)).squeeze(-1) * 0.2)
        through = torch.cumprod(torch.cat([torch.ones_like(alpha[:, :1]), 1 - alpha + 1e-10], -1), -1)[:, :-1]
        return F.mse_loss(((alpha * through)[..., None] * torch.sigmoid(self.color(h))).sum(1), color)


# ---- densities


class Coupling(nn.Module):
    """Half of the features scale and shift the other half."""

    mask: Tensor

    def __init__(self, flip: bool) -> None:
        super().__init__()
        self.net = mlp(WIDTH, 16, 2 * WIDTH)
        self.register_buffer("mask", (torch.arange(WIDTH) % 2 == int(flip)).double())

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        scale, shift = self.net(x * self.mask).chunk(2, 1)
        scale = torch.tanh(scale) * (1 - self.mask)
        return x * self.mask + (1 - self.mask) * (x * scale.exp() + shift), scale.sum(1)


@program("realnvp", points)
class RealNVP(nn.Module):
    """A normalizing flow of couplings (Dinh et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = nn.ModuleList(Coupling(i % 2 == 0) for i in range(4))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        total = x.new_zeros(len(x))
        for step in self.steps:
            x, log = step(x)
            total = total + log
        normal = torch.distributions.Normal(torch.zeros_like(x), 1.0, validate_args=False)
        return -(normal.log_prob(x).sum(1) + total).mean()


@program("glow", points)
class Glow(nn.Module):
    """A flow with invertible matrices and norms that the first batch sets (Kingma & Dhariwal, 2018)."""

    ready: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.matrices = nn.ParameterList(torch.linalg.qr(torch.randn(WIDTH, WIDTH))[0] for _ in range(2))
        self.shift, self.scale = nn.Parameter(torch.zeros(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.register_buffer("ready", torch.tensor(0))
        self.couplings = nn.ModuleList([Coupling(True), Coupling(False)])

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        if self.ready == 0:
            with torch.no_grad():
                self.shift.copy_(-x.mean(0))
                self.scale.copy_(-torch.log(x.std(0) + 1e-6))
                self.ready.fill_(1)
        x = (x + self.shift) * self.scale.exp()
        total = self.scale.sum() + x.new_zeros(len(x))
        for matrix, coupling in zip(self.matrices, self.couplings, strict=True):
            x = x @ matrix
            total = total + torch.linalg.slogdet(matrix)[1]
            x, log = coupling(x)
            total = total + log
        return (0.5 * x.pow(2).sum(1) - total).mean()


@program("vae", points)
class Vae(nn.Module):
    """A variational autoencoder (Kingma & Welling, 2014): noise by ``randn_like``."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = mlp(WIDTH, 16, 8), mlp(4, 16, WIDTH)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        mean, log = self.encoder(x).chunk(2, 1)
        z = mean + torch.randn_like(mean) * (0.5 * log).exp()
        kl = -0.5 * (1 + log - mean.pow(2) - log.exp()).sum(1).mean()
        return F.mse_loss(self.decoder(z), x) + 0.1 * kl


@program("vq-vae", images)
class VqVae(nn.Module):
    """Vector quantization (van den Oord et al., 2017), its codebook a moving mean in buffers."""

    book: Tensor
    count: Tensor
    total: Tensor

    def __init__(self, codes: int = 10, width: int = 4) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Conv2d(3, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, width, 1))
        self.decoder = nn.Sequential(nn.ConvTranspose2d(width, 8, 4, 2, 1), nn.ReLU(), nn.Conv2d(8, 3, 1))
        self.register_buffer("book", torch.randn(codes, width))
        self.register_buffer("count", torch.ones(codes))
        self.register_buffer("total", self.book.clone())

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.encoder(x).permute(0, 2, 3, 1)
        flat = h.reshape(-1, h.shape[-1])
        near = torch.cdist(flat, self.book).argmin(1)
        code = F.embedding(near, self.book).view(h.shape)
        if self.training:
            with torch.no_grad():
                one = F.one_hot(near, len(self.book)).to(flat.dtype)
                self.count.mul_(0.9).add_(one.sum(0), alpha=0.1)
                self.total.mul_(0.9).add_(one.t() @ flat, alpha=0.1)
                self.book.copy_(self.total / self.count.clamp(min=1e-3)[:, None])
        quantized = h + (code - h).detach()
        back = self.decoder(quantized.permute(0, 3, 1, 2))
        return F.mse_loss(back, x) + 0.25 * F.mse_loss(h, code.detach())


@program("ddpm", images)
class Ddpm(nn.Module):
    """Diffusion (Ho et al., 2020): times by ``randint``, noise by ``randn_like``."""

    kept: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.time = nn.Embedding(10, 8)
        self.down = nn.Conv2d(3, 8, 3, 2, 1)
        self.up = nn.ConvTranspose2d(8, 3, 4, 2, 1)
        self.register_buffer("kept", torch.cumprod(1 - torch.linspace(1e-3, 0.2, 10), 0))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        t = torch.randint(0, 10, (len(x),), device=x.device)
        noise = torch.randn_like(x)
        kept = self.kept[t].view(-1, 1, 1, 1)
        noisy = kept.sqrt() * x + (1 - kept).sqrt() * noise
        h = F.silu(self.down(noisy) + self.time(t)[:, :, None, None])
        return F.mse_loss(self.up(h), noise)


@program("score-matching", points)
class ScoreMatching(nn.Module):
    """Hyvärinen's score matching (2005): the trace of a Jacobian, a row at a time."""

    def __init__(self) -> None:
        super().__init__()
        self.score = mlp(WIDTH, 16, WIDTH, act=nn.Softplus)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        s = self.score(x)
        trace = x.new_zeros(len(x))
        for i in range(4):
            trace = trace + torch.autograd.grad(s[:, i].sum(), x, create_graph=True)[0][:, i]
        return (trace + 0.5 * s.pow(2).sum(1)).mean()


@program("langevin", points)
class Langevin(nn.Module):
    """An energy-based model (Du & Mordatch, 2019): samples by noisy descent within forward."""

    def __init__(self) -> None:
        super().__init__()
        self.energy = mlp(WIDTH, 16, 1, act=nn.SiLU)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fake = torch.randn_like(x)
        for _ in range(3):
            fake = fake.detach().requires_grad_()
            (slope,) = torch.autograd.grad(self.energy(fake).sum(), fake)
            fake = fake - 0.1 * slope + 0.05 * torch.randn_like(fake)
        real, made = self.energy(x), self.energy(fake.detach())
        return (real - made).mean() + 0.1 * (real.pow(2) + made.pow(2)).mean()


@program("mixture-density", lambda g: {"x": floats(g, ROWS, WIDTH), "target": floats(g, ROWS, 1)})
class MixtureDensity(nn.Module):
    """A mixture of Gaussians as output (Bishop, 1994)."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.heads = mlp(WIDTH, 16, last=True), nn.ModuleList(nn.Linear(16, 3) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Tensor:
        h = self.body(x)
        weight, mean, log = (head(h) for head in self.heads)
        each = -0.5 * ((target - mean) / log.exp()).pow(2) - log - 0.5 * math.log(2 * math.pi)
        return -torch.logsumexp(weight.log_softmax(1) + each, 1).mean()


# ---- graphs and sets


def graph(generator: Generator) -> Batch:
    """Features of a graph's nodes for each row, and its edges, the same for all."""
    return {"x": floats(generator, ROWS, 6, WIDTH), "y": classes(generator)}


class Graph(nn.Module):
    """A ring of six nodes with two chords."""

    edges: Tensor

    def __init__(self) -> None:
        super().__init__()
        ring = torch.tensor([[0, 1], [1, 2], [2, 3], [3, 4], [4, 5], [5, 0], [0, 3], [1, 4]])
        self.register_buffer("edges", torch.cat([ring, ring.flip(1)]).t().contiguous())


@program("message-passing", graph)
class MessagePassing(Graph):
    """Messages along edges, summed where they arrive by ``index_add`` (Gilmer et al., 2017)."""

    def __init__(self) -> None:
        super().__init__()
        self.message = nn.ModuleList([nn.Linear(2 * WIDTH, WIDTH) for _ in range(2)])
        self.update, self.head = nn.GRUCell(WIDTH, WIDTH), nn.Linear(WIDTH, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        source, target = self.edges
        for message in self.message:
            sent = torch.relu(message(torch.cat([x[:, source], x[:, target]], -1)))
            got = torch.zeros_like(x).index_add(1, target, sent)
            x = self.update(got.flatten(0, 1), x.flatten(0, 1)).view_as(x)
        return F.cross_entropy(self.head(x.mean(1)), y)


@program("graph-attention", graph)
class GraphAttention(Graph):
    """Attention over neighbours (Veličković et al., 2018), by ``scatter_add`` and ``scatter_reduce``."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.score, self.head = nn.Linear(WIDTH, 8), nn.Linear(16, 1), nn.Linear(8, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        source, target = self.edges
        h = self.line(x)
        score = F.leaky_relu(self.score(torch.cat([h[:, source], h[:, target]], -1)).squeeze(-1), 0.2)
        at = target.expand(len(x), -1)
        top = torch.full_like(x[..., 0], -1e9).scatter_reduce(1, at, score.detach(), "amax")
        weight = torch.exp(score - top.gather(1, at))
        total = torch.zeros_like(x[..., 0]).scatter_add(1, at, weight)
        weight = weight / total.gather(1, at)
        out = torch.zeros_like(h).index_add(1, target, weight[..., None] * h[:, source])
        return F.cross_entropy(self.head(F.elu(out).amax(1)), y)


@program(
    "packed-graphs",
    lambda g: {
        "x": floats(g, ROWS, 4, WIDTH),
        "adj": (torch.rand(ROWS, 4, 4, generator=g) < 0.5).double(),
        "y": classes(g),
    },
)
class PackedGraphs(nn.Module):
    """A convolution on dense adjacency matrices (Kipf & Welling, 2017), normalized by degrees."""

    def __init__(self) -> None:
        super().__init__()
        self.lines, self.head = (
            nn.ModuleList([nn.Linear(WIDTH, 16), nn.Linear(16, 16)]),
            nn.Linear(16, CLASSES),
        )

    def forward(self, x: Tensor, adj: Tensor, y: Tensor) -> Tensor:
        adj = ((adj + adj.transpose(1, 2)) > 0).to(x.dtype) + torch.eye(adj.shape[1], dtype=x.dtype)
        scale = adj.sum(-1).rsqrt()
        adj = scale[:, :, None] * adj * scale[:, None, :]
        for line in self.lines:
            x = torch.relu(torch.bmm(adj, line(x)))
        return F.cross_entropy(self.head(x.sum(1)), y)


@program("set-transformer", lambda g: {"x": floats(g, ROWS, 7, 16), "y": classes(g)})
class SetTransformer(nn.Module):
    """Induced points that attend to a set (Lee et al., 2019)."""

    def __init__(self) -> None:
        super().__init__()
        self.points = nn.Parameter(torch.randn(1, 4, 16))
        self.attend, self.back = (nn.MultiheadAttention(16, 4, batch_first=True) for _ in range(2))
        self.norm, self.head = nn.LayerNorm(16), nn.Linear(16, CLASSES)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        points = self.points.expand(len(x), -1, -1)
        inner = self.attend(points, x, x, need_weights=False)[0]
        x = self.norm(x + self.back(x, inner, inner, need_weights=False)[0])
        return F.cross_entropy(self.head(x.mean(1)), y)


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
