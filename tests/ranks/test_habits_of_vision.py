"""What programs that train on images and sounds do: under every plan as on one process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from tests.ranks.habits import compare

TOLERANCE = 1e-9
Lay = Callable[..., Any]  # a model and optimizers, as they are or prepared


def drawn(step: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(step))


def went(optimizer: torch.optim.Optimizer, loss: torch.Tensor) -> float:
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


class Muon(torch.optim.Optimizer):
    """As scripts have it: momenta are orthogonalized in bfloat16, and vectors take their sign."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["momentum"] = torch.zeros_like(p)
                update = state["momentum"].lerp_(p.grad, 0.5)
                if p.ndim > 1 and min(p.shape) > 3:  # which small tensors have not
                    x = update.view(len(p), -1).bfloat16()
                    x = x / (x.norm() + 1e-7)
                    for _ in range(3):
                        square = x @ x.mT
                        x = 3.4445 * x + (-4.775 * square + 2.0315 * square @ square) @ x
                    update = x.view_as(p).to(p.dtype)
                else:
                    update = update / (update.abs() + 1)
                p.add_(update, alpha=-group["lr"])


def orthogonal_momenta(lay: Lay) -> list[Any]:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 12), nn.Tanh(), nn.Linear(12, 4))
    model, optimizer = lay(model, Muon(model.parameters(), 0.01))
    out = [went(optimizer, model(drawn(step, 8, 6)).square().mean()) for step in range(4)]
    return [*out, *model.state_dict().values()]


def curvature(lay: Lay) -> list[Any]:
    """A step with gradients that have a graph."""
    model, out = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        optimizer.zero_grad()
        model(drawn(step, 8, 6)).square().mean().backward(create_graph=True)
        grads = [p.grad for p in model.parameters()]
        around = torch.autograd.grad(grads, [*model.parameters()], [torch.ones_like(g) for g in grads])
        out += [x.sum().item() for x in around]
        optimizer.step()
    return [*out, *model.state_dict().values()]


def judged_without_gradients(lay: Lay) -> list[Any]:
    """What a generator with batch norm gives is detached for the discriminator; that call never goes back."""
    made = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 4))
    judge, out = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 1)), []
    made, makes = lay(made, torch.optim.SGD(made.parameters(), 0.1))
    judge, judges = lay(judge, torch.optim.SGD(judge.parameters(), 0.1))
    for step in range(3):
        noise, real = drawn(step, 8, 6), drawn(step + 9, 8, 4)
        fake = made(noise).detach()
        out.append(went(judges, F.relu(1 - judge(torch.cat([fake, real]))).mean()))
        again = made(noise * 2)
        out += [again.mean().item(), went(makes, -judge(again).mean()), int(made[1].num_batches_tracked)]
    made.eval()
    with torch.no_grad():
        out.append(made(drawn(5, 8, 6)))
    return [*out, *made.state_dict().values()]


class Features(nn.Module):
    """Gives what its layers give."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 8), nn.Linear(8, 8)])

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        out = []
        for layer in self.layers:
            x = torch.tanh(layer(x))
            out.append(x)
        return out


def inputs_that_are_trained(lay: Lay) -> list[Any]:
    """The image is what an optimizer writes to, before the parts of its loss are asked for."""
    model, out = Features(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        went(optimizer, model(drawn(step, 8, 6))[1].square().mean())
    model.requires_grad_(False)
    image = drawn(7, 2, 6).requires_grad_()
    moves = torch.optim.Adam([image], 0.05)
    for _ in range(3):
        first, second = model(image)
        style = (first.T @ first).square().mean()
        loss = second.square().mean() + style
        moves.zero_grad()
        loss.backward()
        moves.step()
        out += [style.item(), loss.item()]
    return [*out, image]


PLANS: dict[Any, tuple[dict[str, Any], ...]] = {
    orthogonal_momenta: ({"data": 2, "zero": 3}, {"tensor": 2}),
    curvature: ({"tensor": 2},),  # others are refused
    judged_without_gradients: ({"data": 2, "zero": 3}, {"pipe": 2}),
    inputs_that_are_trained: ({"pipe": 2},),
}


def compared(rank: int, world: int) -> None:
    for program in PLANS:
        compare(program, [(plan, {}) for plan in PLANS[program]], TOLERANCE)


@pytest.mark.filterwarnings("ignore:Muon multiplies matrices in 16 bits")
@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.filterwarnings("ignore:p.grad is None here")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks")
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:.*has no sharding rule:espalier.GatherWarning")
def test_habits_of_vision(ranks: Any) -> None:
    ranks(2, compared)


def written_to(rank: int, world: int) -> None:
    model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan={"pipe": 2})
    went(optimizer, model(drawn(0, 8, 6)).square().mean())
    went(optimizer, model(drawn(1, 8, 6)).square().mean())
    queue, batch = drawn(2, 4, 5), drawn(3, 8, 6)
    out = model(batch)
    hits = (out.detach() @ queue).mean()
    went(optimizer, out.square().mean())
    queue[:, 0] = 0
    with pytest.raises(ValueError, match=r"shape \(4, 5\) was written to"):
        hits.item()
    loss = model(batch).square().mean()
    batch.zero_()
    with pytest.raises(ValueError, match=r"shape \(8, 6\) was written to"):
        loss.backward()


def test_what_is_written_to_before_it_is_used(ranks: Any) -> None:
    ranks(2, written_to)
