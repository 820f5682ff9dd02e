"""Loops as researchers write them, on four ranks, under plans that join several kinds: as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize
from torch.utils.data import DataLoader, TensorDataset

from tests.ranks.habits import compare

TOLERANCE = 1e-10
Lay = Callable[..., Any]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 4))


def gradients_given(lay: Lay) -> list[Any]:
    """Gradients of several losses are taken aside, mixed, and given instead; a pass may add to them."""
    model = net()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    seen: list[Any] = []
    for step in range(4):
        taken = []
        for part in range(2):
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch(2 * step + part)[0]), batch(step)[1])
            loss.backward()
            taken.append([p.grad.clone() for p in model.parameters()])
            seen.append(loss.item())
        if step != 1:  # then they are given in the place of others
            optimizer.zero_grad()
        for p, one, other in zip(model.parameters(), *taken, strict=True):
            p.grad = one - 0.5 * other
        if step == 2:
            F.cross_entropy(model(batch(9)[0]), batch(9)[1]).backward()
        seen += [p.grad.detach().clone() for p in model.parameters()]
        if step == 3:
            for p, (one, other) in zip(model.parameters(), zip(*taken, strict=True), strict=True):
                p.grad += one * other
            seen.append(nn.utils.clip_grad_norm_(model.parameters(), 0.1))
        optimizer.step()
    return [*seen, *model.parameters()]


def copies_trained_beside(lay: Lay) -> list[Any]:
    """Reptile: a copy learns a task, and the way it went is the model's gradient."""
    model = net()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    seen: list[Any] = []
    for step in range(2):
        fast = copy.deepcopy(model)
        inner = torch.optim.SGD(fast.parameters(), 0.1)
        loss = F.cross_entropy(fast(batch(step)[0]), batch(step)[1])
        loss.backward()
        inner.step()
        optimizer.zero_grad()
        for p, q in zip(model.parameters(), fast.parameters(), strict=True):
            p.grad = p.data - q.data
        optimizer.step()
        seen.append(loss.item())
    return [*seen, *model.parameters()]


def adversaries_in_one_box(lay: Lay) -> list[Any]:
    """CycleGAN: parts are called by themselves; who judges is frozen while the others learn of it."""
    box = nn.ModuleDict({"makes": nn.Linear(6, 6), "judges": nn.Linear(6, 1)})
    making = torch.optim.Adam(box["makes"].parameters(), 1e-2)
    box, making, judging = lay(box, making, torch.optim.Adam(box["judges"].parameters(), 1e-2))
    makes, judges = box["makes"], box["judges"]
    seen: list[Any] = []
    for step in range(2):
        real = batch(step)[0]
        made = makes(real)
        judges.requires_grad_(False)
        making.zero_grad()
        loss = (judges(made) - 1).square().mean() + F.l1_loss(made, real)
        loss.backward()
        making.step()
        judges.requires_grad_(True)
        judging.zero_grad()
        for rows, wanted in ((real, 1.0), (made.detach(), 0.0)):
            judged = (judges(rows) - wanted).square().mean()
            judged.backward()
            seen.append(judged.item())
        judging.step()
        seen.append(loss.item())
    return [*seen, *box.parameters()]


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).T


def parametrized_values_kept(lay: Lay) -> list[Any]:
    """``parametrize.cached`` is open when the first call lays the model out, also with values from before."""
    return [*with_values_kept(lay, reads=False), *with_values_kept(lay, reads=True)]


def with_values_kept(lay: Lay, reads: bool) -> list[Any]:
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4))
    parametrize.register_parametrization(model[0], "weight", Symmetric())
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    seen: list[Any] = []
    for step in range(2):
        x, y = batch(step)
        with parametrize.cached():
            if reads:
                seen.append(model[0].weight.detach().clone())
            loss = F.cross_entropy(model(x) + 0.1 * model(-x), y)
        optimizer.zero_grad()
        loss.backward()
        seen += [loss.item(), *(p.grad.detach().clone() for p in model.parameters())]
        optimizer.step()
    return [*seen, *model.parameters()]


def rows_in_their_order(lay: Lay) -> list[Any]:
    """What a loader gives, and what the model makes of it, stands in the loader's order."""
    model = nn.Linear(6, 4)
    rows = torch.arange(13.0)[:, None].expand(13, 6).contiguous()
    loaders = [DataLoader(TensorDataset(rows, torch.arange(13)), size) for size in (8, 5)]
    model, _, *loaders = lay(model, torch.optim.SGD(model.parameters(), 0.1), *loaders)
    seen: list[Any] = []
    with torch.no_grad():
        for loader in loaders:
            outputs = []
            for x, y in loader:
                outputs.append(model(x))
                seen += [x, y]
            seen.append(torch.cat(outputs))
    return seen


class Steps(nn.Module):
    """Goes over its input step by step: each weight is used several times."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRUCell(2, 5), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x.new_zeros(len(x), 5)
        for step in range(3):
            h = self.cell(x[:, 2 * step : 2 * step + 2], h)
        return self.head(h)


def weights_used_again(lay: Lay) -> list[Any]:
    """Where a schedule puts weights' gradients off, such ones cannot wait."""
    model = nn.Sequential(nn.Linear(6, 6), Steps())
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    return trained(model, optimizer)


def weights_given_whole(lay: Lay) -> list[Any]:
    """Plain tensors become the data of parameters, which are cut, or lie elsewhere."""
    model = net()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    losses = trained(model, optimizer)[:2]
    model[0].weight.data, model[2].weight.data = torch.ones(12, 6) * 0.1, torch.eye(4, 12)
    return [*losses, *trained(model, optimizer)]


class Standardized(nn.Module):
    """Weights are used beside their modules."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            w = layer.weight / (layer.weight.std(1, keepdim=True) + 1e-3)
            x = x + torch.tanh(layer(x) + x @ w)
        out: torch.Tensor = self.head(x)
        return out


def weights_beside_their_modules(lay: Lay) -> list[Any]:
    """What is gathered for them is there yet, when the next micro-batch comes."""
    model = Standardized()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    return trained(model, optimizer)


class Judged(nn.Module):
    """Who judges is called on what is made, and on what there is: stages share its weights."""

    def __init__(self) -> None:
        super().__init__()
        self.makes, self.judges = nn.Linear(6, 6), nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        made = self.makes(x)
        return self.judges(made), self.judges(made.detach()), self.judges(x)


def weights_shared_by_two_losses(lay: Lay) -> list[Any]:
    """Optimizers step in turn; one's gradients, which are kept, are no reason to drop the other's."""
    model = Judged()
    two = [torch.optim.SGD(of.parameters(), 0.1) for of in (model.makes, model.judges)]
    model, *two = lay(model, *two)
    seen: list[Any] = []
    for step in range(2):
        for i, optimizer in enumerate(two):
            whole, made, real = model(batch(step)[0])
            loss = F.softplus(made - real).mean() if i else F.softplus(-whole).mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
    return [*seen, *model.state_dict().values()]


def trained(model: Any, optimizer: Any, balance: float = 0.0) -> list[Any]:
    """The losses of two steps, and the weights."""
    seen: list[Any] = []
    for step in range(2):
        optimizer.zero_grad()
        out = model(batch(step)[0])
        if balance:
            out, spread = out
        loss = F.cross_entropy(out, batch(step)[1])
        if balance:
            loss = loss + balance * spread
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return [*seen, *model.state_dict().values()]


class Reader(nn.Module):
    """Gives states of layers, whose second dim has the rows, and what has no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.reads, self.head = nn.LSTM(2, 4, 2, batch_first=True), nn.Linear(4, 4)
        self.register_buffer("places", torch.arange(8.0).view(4, 2))

    def forward(self, x: torch.Tensor) -> Any:
        out, states = self.reads(x.view(len(x), 3, 2))
        return self.head(out[:, -1]), states, self.places.sin()


def rows_in_another_dim(lay: Lay) -> list[Any]:
    """Values of outputs, before a loss goes back, after a step, and without gradients."""
    model = Reader()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    seen: list[Any] = []
    for step in range(3):
        out, states, places = model(batch(step)[0])
        if step:
            seen += [x.detach().square().sum().item() for x in (*states, places)]
        loss = F.cross_entropy(out, batch(step)[1])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        seen += [loss.item(), *(x.detach().clone() for x in states)]
    model.eval()
    with torch.no_grad():
        out, states, places = model(batch(9)[0][:6])
    assert [x.shape for x in (out, *states, places)] == [(6, 4), (2, 6, 4), (2, 6, 4), (4, 2)]
    return [*seen, out, *states, places]


class Experts(nn.Module):
    """One matrix for each, in one parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.num_experts, self.weight = 4, nn.Parameter(torch.randn(4, 6, 6))

    def forward(
        self, x: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
    ) -> torch.Tensor:
        of_all = torch.einsum("th,ehk->tek", x, self.weight)
        chosen = of_all.gather(1, top_k_index.unsqueeze(-1).expand(-1, -1, 6))
        return (chosen * top_k_weights.unsqueeze(-1)).sum(1)


class Routed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts, self.last = nn.Linear(6, 4), Experts(), nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, index = self.router(x).softmax(-1).topk(2)
        return x + self.last(self.experts(x, index, weights))


class Balanced(nn.Module):
    """Takes what its routers give past their blocks, as models of transformers do."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.head = nn.ModuleList([Routed(), Routed()]), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        given: list[torch.Tensor] = []
        hooks = [
            layer.router.register_forward_hook(lambda module, args, out: given.append(out))
            for layer in self.layers
        ]
        for layer in self.layers:
            x = layer(x)
        for hook in hooks:
            hook.remove()
        return self.head(x), torch.cat(given).softmax(-1).mean(0).square().sum()


def experts_of_divided_blocks(lay: Lay) -> list[Any]:
    """Nobody calls the block, which would make their parameters whole."""
    model = Balanced()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    return trained(model, optimizer, balance=0.1)


class Pooled(nn.Module):
    """A learned query looks at all of a row's places; a stage sends it to another, expanded."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.query, self.leave = (
            nn.Linear(3, 8),
            nn.Parameter(torch.randn(1, 1, 8)),
            nn.Linear(8, 4),
        )
        self.layers = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.pool = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for layer in self.layers:
            x = layer(x).tanh()
        pooled, _ = self.pool(self.query.expand(len(x), -1, -1), x, x)
        return self.leave(pooled[:, 0])


def learned_queries(lay: Lay) -> list[Any]:
    model, seen = Pooled(), list[Any]()
    model, optimizer = lay(model, torch.optim.AdamW(model.parameters(), 0.1))
    for step in range(3):
        x, y = batch(step)
        with torch.no_grad():
            seen.append(model(x.view(8, 2, 3)))
        optimizer.zero_grad()
        loss = F.cross_entropy(model(x.view(8, 2, 3)), y)
        loss.backward()
        optimizer.step()
        seen.append(loss.item())
    return seen


PLANS: list[dict[str, Any]] = [
    {"data": 2, "replicate": 2, "zero": 3},
    {"data": 2, "replicate": 2, "zero": 2},
    {"data": 2, "tensor": 2, "zero": 3},
]
PROGRAMS = (
    gradients_given,
    copies_trained_beside,
    adversaries_in_one_box,
    parametrized_values_kept,
    rows_in_their_order,
)


STAGED: dict[Callable[[Lay], list[Any]], list[dict[str, Any]]] = {
    experts_of_divided_blocks: [{"data": 2, "pipe": 2, "zero": 3}],
    weights_shared_by_two_losses: [{"data": 2, "pipe": 2}, {"data": 2, "pipe": 2, "zero": 3}],
    weights_given_whole: [{"tensor": 2, "pipe": 2}],
    weights_beside_their_modules: [
        {
            "data": 2,
            "pipe": 2,
            "accumulate": 4,
            "zero": 3,
            "chunk_megabytes": 0.001,
            "prefetch_megabytes": 0.001,
        }
    ],
    rows_in_another_dim: [{"data": 2, "pipe": 2, "accumulate": 2}],
    learned_queries: [
        {
            "data": 2,
            "pipe": 2,
            "accumulate": 4,
            "zero": 3,
            "chunk_megabytes": 0.001,
            "schedule": "interleaved",
            "stages_per_rank": 2,
        }
    ],
    weights_used_again: [
        {"data": 2, "pipe": 2, "accumulate": 4, "schedule": "zb-h1", "zero": zero} for zero in (0, 2)
    ],
}


def compared(rank: int, world: int) -> None:
    for program in PROGRAMS:
        compare(program, [(plan, {}) for plan in PLANS], TOLERANCE)
    for program, plans in STAGED.items():
        compare(program, [(plan, {}) for plan in plans], TOLERANCE)


@pytest.mark.filterwarnings("ignore:A global batch of . rows leaves")
def test_habits_on_four(ranks: Any) -> None:
    ranks(4, compared)
