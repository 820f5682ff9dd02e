"""Models, layers and optimizers of programs that tests/ranks/test_habits.py compares."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from importlib import import_module
from typing import Any, cast

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint


def net(wide: int = 6, out: int = 4) -> nn.Sequential:
    return nn.Sequential(nn.Linear(wide, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, out))


class Habitual(nn.Module):
    """Recomputes by reentrant checkpoints, draws from a generator of its own, averages over all batches."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(6, 6), nn.Linear(6, 4)
        self.inner = nn.ModuleList(nn.Linear(6, 6) for _ in range(3))
        self.norm = nn.BatchNorm1d(6, momentum=None)  # type: ignore[arg-type]
        self.generator = torch.Generator().manual_seed(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for layer in self.inner:
            again = checkpoint(layer, x, use_reentrant=True) if self.training else layer(x)
            x = x + again.tanh()
        if self.training:
            drawn = torch.randn(x.shape, generator=self.generator, dtype=x.dtype, device="cpu")
            x = x + drawn.to(x.device)
        return self.head(self.norm(x))


class Critic(nn.Module):
    """Two estimates, of which a method of its own gives one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = net(8, 1), net(8, 1)

    def forward(self, x: torch.Tensor, action: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.first(x, action), self.other(torch.cat([x, action], 1))

    def first(self, x: torch.Tensor, action: torch.Tensor) -> torch.Tensor:
        return self.one(torch.cat([x, action], 1))


class GAN(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.generator, self.discriminator = net(3, 6), net(6, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.discriminator(x)


class Encoder(nn.Module):
    """Is called by a method, too."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8))
        self.last = nn.Linear(8, 4)

    def encode(self, x: torch.Tensor) -> torch.Tensor:
        return self.first(x)  # type: ignore[no-any-return]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.encode(x))  # type: ignore[no-any-return]


class Graph(nn.Module):
    """Convolutions over graphs: one that it holds, in either layout, and one that it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 12), nn.Linear(12, 4)
        self.register_buffer("rows", (2 * torch.eye(8)).to_sparse())
        self.register_buffer("compressed", torch.ones(8, 8).tril().to_sparse_csr())

    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        hidden = torch.sparse.mm(self.rows, self.first(x)).relu()  # type: ignore[operator]
        return self.compressed @ self.last(graph @ hidden)  # type: ignore[no-any-return, operator]


class Adapted(nn.Linear):
    """Adds to some of its weights what it makes sparse, as adapters do (SHiRA)."""

    def __init__(self) -> None:
        super().__init__(6, 6)
        self.some = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.tensor([[0, 2, 5], [1, 3, 0]], device=x.device)
        return nn.functional.linear(
            x,
            self.weight + torch.sparse_coo_tensor(places, self.some, (6, 6), check_invariants=False),
            self.bias,
        )


class Tempered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head, self.temperature = net(6, 8), nn.Linear(8, 4), 1.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.head(self.body(x)) / self.temperature
        return h + self.prior if hasattr(self, "prior") else h


class Trained(nn.Module):
    """A block with a step of its own: a weight goes down the gradient of what it makes of each row."""

    def __init__(self) -> None:
        super().__init__()
        self.line, self.weight = nn.Linear(6, 6), nn.Parameter(torch.eye(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.line(x))

        def apart(weight: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
            return (torch.tanh(weight @ row) - row).square().sum()

        slope = torch.vmap(torch.func.grad(apart), (None, 0))(self.weight, hidden)
        _, back = torch.func.vjp(lambda h: torch.sin(h * self.line.bias), hidden)
        return x + torch.einsum("nij,nj->ni", self.weight - 0.1 * slope, hidden) + back(hidden)[0]


class Scaled(nn.Module):
    """Has parameters and a buffer of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.scale = net(), nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.arange(4.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(x) * self.scale + self.shift


def swish(x: torch.Tensor) -> torch.Tensor:
    return x * (1.1 * x).sigmoid()


class Compiled(nn.Module):
    """Calls functions that are compiled by torch, each in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.mid, self.out = nn.Linear(6, 12), nn.Linear(12, 12), nn.Linear(12, 4)
        self.act = torch.compile(swish, backend="eager", fullgraph=True)
        self.inner = torch.compile(self.between, backend="eager")

    def between(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.mid(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.inner(self.act(self.up(x))))


class Weighed(nn.Module):
    """Gives a parameter, as it is, beside what it computes; writes into zeros that it has made."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 4)
        self.weights = nn.Parameter(torch.ones(2))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = self.first(x)
        beside = torch.zeros(len(x), 6)
        beside[:, :3] = h[:, 3:] * 2
        beside[:, 3:].copy_(h[:, :3])
        return self.head(self.second(h.tanh()).tanh() + beside), self.weights


class Point(nn.Parameter):
    """A parameter whose rows stay on a sphere."""

    radius: float

    def __new__(cls, data: torch.Tensor, radius: float) -> Point:
        point = nn.Parameter.__new__(cls, data)
        point.radius = radius
        return cast(Point, point)

    def __deepcopy__(self, memo: dict[int, Any]) -> Point:
        if id(self) not in memo:
            memo[id(self)] = Point(self.detach().clone(), self.radius)
        return cast(Point, memo[id(self)])


class Rotated(nn.Module):
    def __init__(self, n: int, radius: float) -> None:
        super().__init__()
        rows = torch.randn(n, n, dtype=torch.float64)
        self.turn = Point(radius * F.normalize(rows, dim=1), radius)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.turn


class OnSphere(torch.optim.Optimizer):
    """Steps along spheres, where a parameter is a point on one."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.sub_(p.grad, alpha=group["lr"])
                    if isinstance(p, Point):
                        p.copy_(p.radius * F.normalize(p, dim=1))


class Fading(nn.Module):
    """It adds what it remembers of earlier calls, in evaluation too (as spiking neurons and traces do)."""

    def __init__(self, *, is_detached: bool = True) -> None:
        super().__init__()
        self.is_detached = is_detached
        self.register_buffer("trace", torch.zeros(0, dtype=torch.float64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.trace.shape != x.shape[1:]:  # nothing yet
            self.trace = torch.ones_like(x[0]).detach()
        self.trace = 0.5 * self.trace + x.mean(0)
        self.trace = self.trace.detach() if self.is_detached else self.trace
        return x + self.trace


class Spectral(nn.Module):
    """Complex weights, contracted by what the package of an array's class has for it (as opt_einsum does)."""

    def __init__(self, n: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(n // 2 + 1, 2, 2, dtype=torch.complex128))
        self.spare = nn.Parameter(torch.randn(3, dtype=torch.complex128))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        modes = torch.fft.rfft(torch.stack([x, x.sin()], 1))
        home: Any = import_module(type(modes).__module__.partition(".")[0])
        y = home.einsum("bim,mio->bom", modes, self.weight)
        y = torch.view_as_complex(torch.view_as_real(y) * 0.5)
        mixed = home.tensordot(y, self.weight.mean(0), ([1], [0]))
        return torch.fft.irfft(mixed.sum(2), n=x.shape[1])


class Lookahead(torch.optim.Optimizer):
    """An optimizer around another, which does not call the constructor of torch's."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self.inner, self.steps = inner, 0
        self.param_groups, self.defaults, self.state = inner.param_groups, inner.defaults, inner.state
        self.slow = {p: p.detach().clone() for group in self.param_groups for p in group["params"]}

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.inner.zero_grad(set_to_none)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.inner.step()
        self.steps += 1
        for p, slow in self.slow.items() if self.steps % 2 == 0 else ():
            slow.add_(p - slow, alpha=0.5)
            p.copy_(slow)


class Acting(nn.SyncBatchNorm):
    """As timm has it."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        return super().forward(input).relu()


class Outer(Lookahead):
    """Has hooks of steps alone, and states that it never uses (timm's)."""

    def __init__(self, inner: torch.optim.Optimizer) -> None:
        self._optimizer_step_pre_hooks, self._optimizer_step_post_hooks = OrderedDict(), OrderedDict()
        super().__init__(inner)
        self.state = defaultdict(dict)

    def state_dict(self) -> dict[str, Any]:  # type: ignore[override]
        return self.inner.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.inner.load_state_dict(state_dict)
        self.param_groups = self.inner.param_groups


class Stack(nn.Module):
    """Layers in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 12), nn.Linear(12, 4)
        self.layers = nn.ModuleList([nn.Linear(12, 12)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = x + layer(x).tanh()
        return self.leave(x)


class Points(nn.Module):
    """Points that vote by their distance."""

    def __init__(self) -> None:
        super().__init__()
        self.place, self.vote = nn.Parameter(torch.rand(5, 6)), nn.Parameter(torch.rand(5, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (-torch.cdist(x, self.place)).exp() @ self.vote


class Adjoint(torch.autograd.Function):
    """Euler's steps along a field; backward, gradients with respect to what was saved are asked for."""

    @staticmethod
    def forward(ctx: Any, field: nn.Module, x: torch.Tensor, *parameters: torch.Tensor) -> torch.Tensor:
        ctx.field = field
        with torch.no_grad():
            for _ in range(2):
                x = x + field(x) / 2
        ctx.save_for_backward(x, *parameters)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, *parameters = ctx.saved_tensors
        sums = [torch.zeros_like(p) for p in parameters]
        for _ in range(2):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                y = ctx.field(x)
                of_x, *of_them = torch.autograd.grad(y, (x, *parameters), grad / 2, allow_unused=True)
            x, grad = x - y.detach() / 2, grad + of_x
            sums = [a if b is None else a + b for a, b in zip(sums, of_them, strict=True)]
        return None, grad, *sums


class Flow(nn.Module):
    """What a field makes of its input."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.field, self.leave = nn.Linear(6, 8), net(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.leave(Adjoint.apply(self.field, self.enter(x), *self.field.parameters()))


class Seen:
    """What a model remembers of a batch: no container."""

    def __init__(self, layers: list[torch.Tensor]) -> None:
        self.layers, self.kind = layers, "seen"

    def sizes(self) -> torch.Tensor:
        return sum((x.square().mean(0) for x in self.layers), torch.zeros(())).sum()


class Remembering(nn.Module):
    """Gives an object of its own beside scores; a number says how many layers it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(6, 8), nn.Linear(8, 4)
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))

    def forward(self, x: torch.Tensor, number: int = 4) -> tuple[torch.Tensor, Seen]:
        passed = [self.enter(x)]
        for layer in self.layers[:number]:
            passed.append(layer(passed[-1]).tanh())
        return self.leave(passed[-1]), Seen(passed[::2])


class PastAutocast(nn.Module):
    """A layer that computes in its input's dtype where autocast is open, as rotary embeddings do."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.autocast(x.device.type, enabled=False):
            return x * torch.arange(x.shape[-1], device=x.device).cos()


class Turned(torch.autograd.Function):
    """Gives gradients that are not those of what its forward does."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: float) -> torch.Tensor:
        ctx.weight = weight
        return x.exp()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        return -ctx.weight * grad, None


class Decorated(nn.Module):
    """Parts have another forward, or a hook, for one call, and one from the first on; one of the output is
    written to."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = nn.Linear(6, 6), net(), nn.Linear(4, 4)
        self.is_hooked = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if not self.is_hooked:
            self.third.register_forward_hook(lambda _, args, out: out * 1.5)
            self.is_hooked = True
        handle = self.first.register_forward_pre_hook(lambda _, args: (args[0] - 0.5,))
        x = torch.tanh(self.first(x))
        handle.remove()
        forward, kept = self.second.forward, []

        def decorated(x: torch.Tensor) -> torch.Tensor:
            kept[:] = kept or [2 * forward(x)]
            return kept[0]

        self.second.forward = decorated  # type: ignore[method-assign]
        try:
            x = self.second(x) + self.second(None)
        finally:
            self.second.forward = forward  # type: ignore[method-assign]
        x = self.third(x).unflatten(1, (2, 2))
        for i in range(2):
            x[i, :1] += self.first.weight[0, :2]
        return x.flatten(1)


class Anew(nn.Module):
    """A copy of it has parameters of other names, as of a model of Keras."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number, self.parts = number, nn.ModuleDict({f"{number}_{i}": nn.Linear(6, 6) for i in range(4)})

    def __deepcopy__(self, memo: dict[int, Any]) -> Anew:
        return Anew(self.number + 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = torch.tanh(part(x))
        return x


class OfObjects(nn.Linear):
    """Is called with an object that has the rows."""

    def forward(self, batch: Any) -> torch.Tensor:  # type: ignore[override]
        return super().forward(batch.rows)
