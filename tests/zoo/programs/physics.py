"""Programs of physics, of densities, and of graphs and sets."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.programs.entry import (
    CLASSES,
    ROWS,
    WIDTH,
    Batch,
    Generator,
    Tensor,
    classes,
    floats,
    images,
    mlp,
    points,
    program,
)

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
