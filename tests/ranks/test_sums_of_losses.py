"""In pipelines: losses that are sums, of calls and penalties, and gradients that a program takes or gives."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.tensor.stored import in_parts

TOLERANCE = 1e-10
Program = Callable[[nn.Module, Any, int], list[Any]]


class Tied(nn.Module):
    """Its first and last layer share a matrix."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner = nn.Linear(6, 12, bias=False), nn.Sequential(nn.Linear(12, 12), nn.Tanh())
        self.second, self.last = nn.Sequential(nn.Linear(12, 12), nn.Tanh()), nn.Linear(6, 12, bias=False)
        self.last.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.inner(self.first(x))) @ self.last.weight


def layers() -> nn.Module:
    return nn.Sequential(
        nn.Linear(6, 12),
        nn.Tanh(),
        nn.Linear(12, 12),
        nn.GELU(),
        nn.Linear(12, 8),
        nn.ReLU(),
        nn.Linear(8, 6),
    )


def loss_of(model: nn.Module, number: int, rows: int = 8) -> torch.Tensor:
    generator = torch.Generator().manual_seed(number)
    x = torch.randn(rows, 6, dtype=torch.float64, generator=generator)
    return F.cross_entropy(model(x), torch.randint(0, 6, (rows,), generator=generator))


def of_two_calls(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """As of a GAN's real and made rows; what is logged is asked for before and after."""
    one, other = loss_of(model, 2 * step), loss_of(model, 2 * step + 1, rows=4)
    if step == 0:
        loss = (one + 0.5 * other) / 2
    elif step == 1:
        loss = sum([one, -other, other * 3, one])
        assert torch.isfinite(loss) and not loss > 1e9
    else:
        loss = other - torch.mul(one, -1)
    seen = [loss.detach().item() if step == 1 else 0.0, float(loss.dim())]
    loss.backward()
    return [*seen, loss.item(), one.item()]


def logged(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """Sums of which some, or all, have gone back: by themselves, or as a whole."""
    one, other = loss_of(model, 2 * step), loss_of(model, 2 * step + 1)
    loss, total = one + 0.5 * other, torch.zeros(())
    penalty = loss + 0.01 * sum(p.square().sum() for p in model.parameters())
    if step == 0:
        loss.backward()
    else:
        one.backward()
        total += loss.detach()
        if step == 2:
            other.backward()
            total += loss.detach() + penalty.detach()
            with torch.no_grad():
                total += loss.double() + penalty.sum()
    total += loss.detach() + penalty.detach().clone()
    with torch.no_grad():
        total += loss.mean() / 2
    return [total, loss.detach().item()]


def decay(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """A penalty on all parameters: within the loss, or by itself before it or after it."""
    loss = loss_of(model, step)
    penalty = 0.01 * sum(p.square().sum() for p in model.parameters())
    if step == 0:
        loss.backward()
        penalty.backward()
    elif step == 1:
        penalty.backward()
        loss.backward()
    else:
        loss = loss + penalty
        loss.backward()
    return [loss.item(), nn.utils.clip_grad_norm_(model.parameters(), 0.5)]


def sparse(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """A penalty on the first parameter alone, which lies in one stage; once nothing else goes back."""
    penalty = 0.1 * next(model.parameters()).abs().sum()
    loss = penalty if step == 1 else loss_of(model, step) + penalty
    loss.backward()
    return [nn.utils.clip_grad_norm_(model.parameters(), 0.5)]


def weighed(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """By a number that is trained, too, by the program's own step."""
    if step == 0:
        optimizer.doubt = torch.zeros((), dtype=torch.float64, requires_grad=True)
    doubt = optimizer.doubt
    loss = torch.exp(-doubt) * loss_of(model, step) + doubt
    loss.backward()
    with torch.no_grad():
        doubt -= 0.1 * doubt.grad
        doubt.grad = None
    return [loss.item(), doubt.item()]


def sharing(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """Weights, and penalties, that are made of the same."""
    if step == 0:
        optimizer.shares = torch.zeros(2, dtype=torch.float64, requires_grad=True)
    shares = optimizer.shares
    weights, penalty = shares.softmax(0), sum(p.square().sum() for p in model.parameters())
    losses = weights[0] * loss_of(model, step) + weights[1] * loss_of(model, step + 1)
    loss = -(-losses - 0.01 * penalty) - 0.005 * penalty
    loss.backward()
    (seen,) = (shares.grad.clone(),)
    shares.grad = None
    return [loss.item(), seen]


def taken(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """Gradients that are asked for are added to none; then they are what a step is made by."""
    held = list(model.parameters())
    if step == 1:
        loss_of(model, 7).backward()
    gradients = torch.autograd.grad(loss_of(model, step) + loss_of(model, step + 9), held)
    seen = [torch.stack([g.norm() for g in gradients]).norm()]
    for p, g in zip(held, gradients, strict=True):
        assert (p.grad is None) == (step != 1)
        p.grad = g if p.grad is None else p.grad + g.clamp(-0.01, 0.01)
    return [*seen, nn.utils.clip_grad_norm_(held, 0.05)]


def met(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """Two losses of one call: the gradients of each, and then those of their sum."""
    output = model(torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step)))
    losses, held = [output.square().mean(), output.tanh().mean()], list(model.parameters())
    gradients = [torch.autograd.grad(loss, held, retain_graph=True) for loss in losses]
    dot = torch.stack([(a * b).sum() for a, b in zip(*gradients, strict=True)]).sum()
    both = torch.autograd.grad(losses, held, retain_graph=True)
    dot = dot + torch.stack([(a * b).sum() for a, b in zip(both, gradients[0], strict=True)]).sum()
    (losses[0] + 2 * losses[1]).backward()
    if dot.item() < 0:
        held[0].grad = gradients[0][0] + held[0].grad
    return [dot, *(loss.item() for loss in losses)]


def begun(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """Backward passes that begin with gradients of outputs, or of several losses at once."""
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
    output, held = model(x), list(model.parameters())
    if step == 0:
        output.backward((output.detach().softmax(1) - 0.25) / 8, retain_graph=True)
        gradients = torch.autograd.grad(output, held, grad_outputs=torch.full_like(output, 0.1))
        return [torch.stack([g.norm() for g in gradients])]
    rows = output.square().mean(1)
    if step == 1:
        rows.backward(gradient=x[:, 0].abs())
        return [rows.sum().item()]
    losses = [rows.sum(), loss_of(model, 9)]
    torch.autograd.backward(losses)
    torch.Tensor.backward(loss_of(model, 7))
    torch.autograd.backward([loss_of(model, 8)], grad_tensors=[torch.tensor(0.5)])
    return [loss.item() for loss in losses]


def followed(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """Losses are added up after the optimizer's step; rows of parameters are written to, and values."""
    if step == 0:
        optimizer.total = 0.0
    else:
        optimizer.total += optimizer.last
    optimizer.last = loss = loss_of(model, step)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            p[0] *= 0.9
            if p.ndim == 2:
                p[:, 1].add_(0.01)
                p[1, 2] = 0.3
    return [float(torch.as_tensor(optimizer.total).detach())]


def given(model: nn.Module, optimizer: Any, step: int) -> list[Any]:
    """Gradients by hand, alone and before a loss goes back."""
    if step == 0:
        loss_of(model, step).backward()
        return []
    for p in model.parameters():
        p.grad = torch.full_like(p, 0.1)
    if step == 2:
        loss_of(model, step).backward()
    gradients = [p.grad for p in model.parameters()]
    torch._foreach_mul_(gradients, 0.5)
    if step == 1:  # also one of a weight of which several stages have copies
        next(model.parameters()).grad = None
    return [nn.utils.clip_grad_norm_(model.parameters(), 0.02, norm_type=step * math.inf)]


PROGRAMS: dict[Program, tuple[Callable[[], nn.Module], ...]] = {
    of_two_calls: (layers, Tied),
    logged: (layers,),
    decay: (layers,),  # tensors of several stages do not meet where stages have copies
    sparse: (layers, Tied),
    weighed: (layers,),
    sharing: (layers,),
    taken: (layers,),
    met: (layers,),
    begun: (layers,),
    followed: (layers, Tied),
    given: (layers, Tied),
}
PLANS: tuple[dict[str, Any], ...] = (
    {"pipe": 4},
    {"pipe": 2, "tensor": 2},
    {"pipe": 2, "data": 2, "zero": 2, "accumulate": 2, "schedule": "interleaved", "stages_per_rank": 2},
)
ALSO: dict[Program, tuple[dict[str, Any], ...]] = {
    decay: ({"pipe": 2, "data": 2}, {"pipe": 2, "data": 2, "zero": 3, "chunk_megabytes": 0.001}),
    given: ({"pipe": 2, "data": 2, "zero": 1}, {"data": 4, "zero": 1}, {"data": 2, "tensor": 2, "zero": 2}),
}


def trained(program: Program, make: Callable[[], nn.Module], plan: dict[str, Any] | None) -> torch.Tensor:
    """All that it has seen in three steps, and the parameters after them."""
    torch.manual_seed(0)
    model: Any = make().double()
    optimizer: Any = torch.optim.AdamW(model.parameters(), 0.01)
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan)
        with torch.no_grad():
            loss_of(model, 0)  # parameters are not used before they are laid out
    seen: list[Any] = []
    for step in range(3):
        seen += program(model, optimizer, step)
        optimizer.step()
        optimizer.zero_grad()
    seen += model.state_dict().values()
    return torch.cat([espalier.full_tensor(torch.as_tensor(x)).detach().flatten().double() for x in seen])


def same(rank: int, world: int) -> None:
    for program, models in PROGRAMS.items():
        for make in models:
            expected = trained(program, make, None)
            for plan in (*PLANS, *ALSO.get(program, ())):
                apart = (trained(program, make, plan) - expected).abs().max().item()
                assert apart < TOLERANCE, f"{program.__name__} of {make.__name__} under {plan}: {apart}"


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:add_ has no sharding rule:espalier.GatherWarning")
def test_sums_penalties_and_gradients_by_hand(ranks: Any) -> None:
    ranks(4, same)


def of_another(states: Any) -> Any:
    """What a rank of the other stage has, without its values."""
    mine = sorted(states["state"])
    others = [i for group in states["param_groups"] for i in group["params"] if i not in mine]
    return {**states, "state": {i: {"momentum_buffer": None} for i in others}}


def failed(rank: int, world: int) -> None:
    """What fails on the ranks of one stage is an error on all."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model = espalier.prepare(net, plan={"pipe": 2, "data": 2})
    loss_of(model, 0).backward()
    penalty = net[2].weight.square().sum()  # type: ignore[operator]
    with torch.no_grad():
        net[2].weight.mul_(0.9)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="modified by an inplace"):
        penalty.backward()


def logged_later(rank: int, world: int) -> None:
    """A loss of two calls, which goes back times a scale, is asked for after the first step, too."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    due = (loss_of(net, 0) + loss_of(net, 1)).item()
    model, optimizer = espalier.prepare(
        net, torch.optim.SGD(net.parameters(), 0.1), plan={"pipe": 2, "data": 2}
    )
    loss = loss_of(model, 0) + loss_of(model, 1)
    (1024 * loss).backward()
    optimizer.step()
    assert abs(loss.item() - due) < TOLERANCE


def refused(rank: int, world: int) -> None:
    failed(rank, world)
    logged_later(rank, world)
    model = layers().double()
    prepared, optimizer = espalier.prepare(
        model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9), plan={"pipe": 2, "data": 2}
    )
    loss_of(prepared, 0).backward()
    optimizer.step()
    first, *_, last = model.parameters()
    with in_parts():
        states = optimizer.state_dict()
    with pytest.raises(ValueError, match=r"another rank's stages(.|\n)*engine.save"):
        optimizer.load_state_dict(of_another(states))
    optimizer.zero_grad()
    whole = prepared.engine.full_model()
    (loss_of(whole, 1) ** next(whole.parameters()).square().mean()).backward()
    with pytest.warns(UserWarning, match="computed once more"):
        (loss_of(prepared, 1) ** first.square().mean()).backward()
    grads = prepared.engine.full_gradients()
    for name, p in whole.named_parameters():
        assert p.grad is None or (grads[name] - p.grad).abs().max() < 1e-10, name
    optimizer.zero_grad()
    loss = loss_of(prepared, 1) + first.square().mean()
    with pytest.raises(ValueError, match=r"one and its parameters(.|\n)*is a sum"):
        torch.exp(loss)
    with pytest.raises(ValueError, match=r"one and its parameters(.|\n)*is a sum"):
        loss.pow(2)
    with pytest.warns(UserWarning, match="computed once more"):
        (grad,) = torch.autograd.grad(loss_of(prepared, 1), [first], create_graph=True)
    assert grad.requires_grad
    with pytest.raises(TypeError, match="the model's parameters"):
        torch.autograd.grad(loss_of(prepared, 1), [torch.ones(2, requires_grad=True) * 2])
    here = first if first.to_local().device.type != "meta" else last  # type: ignore[operator]
    with pytest.raises(RuntimeError, match=r"began at a plain tensor(.|\n)*full_tensor"):
        here.full_tensor().sum().backward()  # type: ignore[operator]


def test_what_is_no_sum_is_told(ranks: Any) -> None:
    ranks(4, refused)
