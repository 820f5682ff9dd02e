"""Gradients of a pipeline's stages by hand: each rank sees those of all, and what it does to them is done."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import espalier
from espalier.compat.deepspeed.runtime import utils
from espalier.compat.deepspeed.utils import tensors

TOLERANCE = 1e-10
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning"),
    pytest.mark.filterwarnings("ignore:A value is asked for that lies on:espalier.GatherWarning"),
    pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of"),
]


class Net(nn.Module):
    """Layers of which some batches leave one out, one is frozen, and one is never called."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.embed = nn.Embedding(8, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))
        self.blocks[1].requires_grad_(False)
        self.seldom, self.never = nn.Linear(6, 6), nn.Linear(6, 6)
        self.head = nn.Linear(6, 8, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor, often: torch.Tensor) -> torch.Tensor:
        h = self.embed(ids)
        for block in self.blocks:
            h = h + torch.tanh(block(h))
        if often.shape[1] > 1:
            h = h + self.seldom(h)
        return self.head(h)


def batch(step: int) -> tuple[tuple[torch.Tensor, torch.Tensor], torch.Tensor]:
    ids = torch.randint(0, 8, (8,), generator=torch.Generator().manual_seed(step))
    return (ids, torch.zeros(8, 1 + (step in (1, 2)))), ids.roll(1)


def those_of(net: nn.Module) -> list[torch.Tensor]:
    return [p.grad for p in net.parameters() if p.grad is not None]


def by_sum(net: nn.Module) -> Any:
    total = sum(p.grad.norm() ** 2 for p in net.parameters() if p.grad is not None) ** 0.5
    for p in net.parameters():
        if p.grad is not None:
            p.grad.mul_((0.3 / (total + 1e-6)).clamp(max=1.0))
    return total


def as_torch_once_did(net: nn.Module) -> Any:
    """What programs have copied from torch."""
    parameters = [p for p in net.parameters() if p.grad is not None]
    device = parameters[0].grad.device
    total = torch.norm(torch.stack([torch.norm(p.grad.detach(), 2.0).to(device) for p in parameters]), 2.0)
    coefficient = torch.clamp(0.2 / (total + 1e-6), max=1.0)
    for p in parameters:
        p.grad.detach().mul_(coefficient.to(p.grad.device))
    return total


def in_lists(net: nn.Module) -> Any:
    grads = those_of(net)
    total = torch.linalg.vector_norm(torch.stack(torch._foreach_norm(grads)))
    torch._foreach_mul_(grads, 0.1 / (total + 1e-6))
    torch._foreach_add_(grads, 0.001)
    return total


def by_torch(net: nn.Module) -> Any:
    total = nn.utils.get_total_norm(those_of(net), math.inf)
    nn.utils.clip_grads_with_norm_(net.parameters(), 0.01, total)
    nn.utils.clip_grad_value_(net.parameters(), 0.005)
    return nn.utils.get_total_norm(those_of(net)) + total


def one_by_one(net: nn.Module) -> Any:
    """Written, set, dropped."""
    for i, p in enumerate(net.parameters()):
        if p.grad is None:
            continue
        with torch.no_grad():
            p.grad.add_(p, alpha=0.01)
        if i % 5 == 0:
            p.grad.clamp_(-0.01, 0.01)
        elif i % 5 == 1:
            p.grad = p.grad * 0.5
        elif i % 5 == 2:
            p.grad.data.copy_(p.grad.sign())
        elif i % 5 == 3:
            p.grad = None
        else:
            p.grad.zero_()
    return nn.utils.parameters_to_vector(those_of(net))


def set_anew(net: nn.Module) -> Any:
    """By a number of all; and only where that is finite."""
    total = torch.stack([g.square().sum() for g in those_of(net)]).sum().sqrt()
    if not torch.isfinite(total):
        net.zero_grad()
    else:
        for p in net.parameters():
            if p.grad is not None:
                p.grad = p.grad * (0.1 / total)
    return total


def without_names(net: nn.Module) -> Any:
    """Adaptive clipping, by each parameter's own norm."""
    for p in net.parameters():
        if p.grad is not None:
            largest = p.detach().norm().clamp(min=1e-3) * 0.01
            size = p.grad.norm().clamp(min=1e-6)
            p.grad.copy_(torch.where(size > largest, p.grad * (largest / size), p.grad))
    return torch.cat([g.flatten() for g in those_of(net)])


def not_finite(net: nn.Module) -> Any:
    first = next(p for p in net.parameters() if p.grad is not None)
    first.grad.fill_(math.nan)
    return torch.zeros(()) if torch.isfinite(set_anew(net)) else torch.ones(())


def overflown(net: nn.Module) -> Any:
    """GradScaler's check, where a gradient of one stage alone is not finite."""
    grads, found = those_of(net), []
    for grad in (grads[0], grads[-1]):
        overflow = torch.zeros(())
        grad.fill_(math.inf)
        torch._amp_foreach_non_finite_check_and_unscale_(grads, overflow, torch.tensor(0.5))
        grad.zero_()
        found.append(overflow)
    return torch.stack(found)


def noisy(net: nn.Module) -> Any:
    """The draws of DTensors, which are the same wherever these lie."""
    torch.manual_seed(7)
    mesh = espalier.Mesh.from_env({"data": torch.distributed.get_world_size()})
    for grad in those_of(net):
        if isinstance(grad, espalier.DTensor):
            grad.add_(torch.randn_like(grad), alpha=0.1)
        else:
            like = espalier.zeros(*grad.shape, dtype=grad.dtype, device_mesh=mesh)
            grad.add_(espalier.full_tensor(torch.randn_like(like)), alpha=0.1)
    return torch.zeros(())


def by_numbers_of_each(net: nn.Module) -> Any:
    """Numbers of one parameter each, and of its gradient, which logs and rules want on the host."""
    told: list[float] = []
    for p in net.parameters():
        told += [p.norm().item(), float(p.detach().abs().max()), float(f"{p.mean():.12f}")]
        told += p.data.flatten()[:2].tolist()
        if p.grad is None:
            continue
        size = p.grad.norm().item()
        held = p.detach().clone()
        told += [torch.equal(p, held), torch.allclose(p, held + 1), p.grad.allclose(p.grad * 2)]
        told += [size, p.grad.data.norm(1).cpu().item(), p.grad.numpy().sum()]
        told.append(bool(torch.isnan(p.grad).any()))
        told.append((p.grad * torch.arange(p.shape[-1])).sum().item())
        mean = p.grad.square().mean()
        told += [mean.double().sqrt().item(), mean.mul_(2).item(), p.grad.contiguous().detach().sum().item()]
        if size > 0.02:
            p.grad.mul_(0.02 / size)
        told += [p.grad.norm().item(), p.grad.view(-1)[-1].item()]
    nn.utils.clip_grad_norm_(net.parameters(), 0.05)
    told += [g.norm().item() for g in those_of(net)]
    torch._foreach_mul_(those_of(net), 0.5)
    told += [g.norm().item() for g in those_of(net)]
    first = next(p for p in net.parameters() if p.grad is not None)
    first.grad = first.grad * 2
    return torch.tensor([*told, first.grad.norm().item()], dtype=torch.float64)


CHANGES: tuple[Callable[[nn.Module], Any], ...] = (
    by_sum,
    as_torch_once_did,
    in_lists,
    by_torch,
    one_by_one,
    set_anew,
    without_names,
    by_numbers_of_each,
    overflown,
    noisy,
    not_finite,
)


def same(what: Any, ours: Any, plain: torch.Tensor) -> None:
    assert (espalier.full_tensor(ours) - plain).abs().max() < TOLERANCE, what


def trained(
    plan: dict[str, Any], tied: bool, by_loop: bool, changes: tuple[Callable[[nn.Module], Any], ...] = CHANGES
) -> None:
    torch.manual_seed(0)
    net = Net(tied).double()
    plain = copy.deepcopy(net)
    loss_fn = nn.functional.cross_entropy
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.05) for m in (net, plain))
    if by_loop:
        model, _ = espalier.prepare(net, ours, plan=plan)
        engine = model.engine
    else:
        engine = espalier.initialize(net, ours, plan, loss_fn=loss_fn)
    for step, change in enumerate(changes):
        what = plan, tied, by_loop, change.__name__
        inputs, labels = batch(step)
        for _ in range(1 + (step == 2)) if by_loop else ():
            loss_fn(model(*inputs), labels).backward()
            loss_fn(plain(*inputs), labels).backward()
        if not by_loop:
            engine.accumulate(engine.cut((inputs, labels)))
            engine.finish_gradients()
            loss_fn(plain(*inputs), labels).backward()
        are = [[p.grad is not None for p in m.parameters()] for m in (net, plain)]
        assert are[0] == are[1], (what, are)
        same(what, change(net), change(plain))
        are = [[p.grad is not None for p in m.parameters()] for m in (net, plain)]
        assert are[0] == are[1], (what, are)
        for name, grad in engine.full_gradients().items():
            expected = plain.get_parameter(name).grad
            assert (grad is None) == (expected is None), (what, name)
            if grad is not None:
                same((what, name), grad.nan_to_num(1e3), expected.nan_to_num(1e3))
        if change is not not_finite:
            ours.step()
            theirs.step()
        ours.zero_grad()
        theirs.zero_grad()
        assert all(p.grad is None for p in net.parameters()), what
    for name, value in engine.full_state_dict().items():
        same((plan, tied, by_loop, name), value, plain.state_dict()[name])


class Growing(torch.optim.Optimizer):
    """Clips each gradient by itself in its step, as GrokAdamW does, or all that it holds."""

    def __init__(self, parameters: Any, each: bool) -> None:
        super().__init__(parameters, {"lr": 0.1})
        self.each = each

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            if not self.each:
                nn.utils.clip_grad_norm_(group["params"], 0.02)
            for p in group["params"]:
                if p.grad is None:
                    continue
                if self.each:
                    nn.utils.clip_grad_norm_(p, 0.01)
                p.add_(p.grad, alpha=-group["lr"])


def in_an_optimizer(rank: int, world: int) -> None:
    for each in (True, False):
        torch.manual_seed(0)
        net = Net(False).double()
        plain = copy.deepcopy(net)
        ours, theirs = (Growing(m.parameters(), each) for m in (net, plain))
        loss_fn = nn.functional.cross_entropy
        engine = espalier.initialize(net, ours, {"pipe": 2}, loss_fn=loss_fn)
        for step in range(2):
            inputs, labels = batch(step)
            loss_fn(plain(*inputs), labels).backward()
            theirs.step()
            theirs.zero_grad()
            with pytest.warns(UserWarning, match=r"trained on ranks \[\d\], in another stage"):
                engine.train_step((inputs, labels))
            for name, value in engine.full_state_dict().items():
                same((each, step, name), value, plain.state_dict()[name])


def asked_by_some(rank: int, world: int) -> None:
    """What one rank asks of its own stage works; of another's it ends when that goes on without."""
    net = Net(False).double()
    plain = copy.deepcopy(net)
    model, optimizer = espalier.prepare(net, torch.optim.SGD(net.parameters(), lr=0.1), plan={"pipe": 2})
    inputs, labels = batch(0)
    nn.functional.cross_entropy(model(*inputs), labels).backward()
    if rank == 0:
        assert net.embed.weight.grad.norm().item() > 0
    assert net.never.weight.grad is None and net.head.weight.grad.shape == (8, 6)
    assert net.head.weight.grad is net.head.weight.grad
    nn.functional.cross_entropy(plain(*inputs), labels).backward()
    tensors.own_by(model.engine)
    for name, p in net.named_parameters():
        whole, expected = tensors.safe_get_full_grad(p), plain.get_parameter(name).grad
        assert whole is None if expected is None else (whole - expected).abs().max() < 1e-6, name
    right = utils.get_grad_norm(plain.parameters()), utils.get_grad_zeros(plain.parameters())
    assert abs(utils.get_grad_norm(net.parameters()) - right[0]) < TOLERANCE
    assert utils.get_grad_zeros(net.parameters()) == right[1]
    if rank == 0:
        with pytest.raises(ValueError, match=r"rank 1 has gone on without asking. All ranks must ask"):
            net.head.weight.grad.norm().item()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)
    assert net.head.weight.grad is not None and net.never.weight.grad is None
    assert sum(p.grad.norm() for p in net.parameters() if p.grad is not None) == 0
    net.zero_grad()
    assert net.head.weight.grad is None and net.embed.weight.grad is None


def in_low_precision(rank: int, world: int) -> None:
    """Gradients that are wider or narrower than their parameters, or as these; ranks find them alike."""
    on_host = {"compute": "float16", "loss_scale": {"init_scale": 16.0}}
    wide, narrow = {"compute": "bfloat16", "reduce": "float32"}, {"compute": "float32", "reduce": "bfloat16"}
    loss_fn = nn.functional.cross_entropy
    for precision in (on_host, wide, narrow):
        torch.manual_seed(0)
        net = Net(False)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        plan = {"pipe": 2, "data": 2, "zero": 1, "precision": precision}
        engine = espalier.initialize(net, optimizer, plan, loss_fn=lambda out, y: loss_fn(out.float(), y))
        # where no device is asked for values, the host's own words tell of missing gradients
        with patch("espalier.engine.staged.is_accelerator", return_value=precision is on_host):
            engine.accumulate([batch(0)])
            engine.finish_gradients()
        assert net.never.weight.grad is None
        grads = those_of(net)
        assert len({g.dtype for g in grads}) == 1 and len(grads) == 8, grads
        total = espalier.full_tensor(torch.stack([g.norm() for g in grads]).norm()) / engine.scale
        norm = espalier.full_tensor(nn.utils.clip_grad_norm_(net.parameters(), math.inf))
        assert abs(total - norm) < 0.01 * norm, precision


def by_scaler(rank: int, world: int) -> None:
    """GradScaler, with an optimizer of one stage alone: what overflows in one is skipped in all."""
    torch.manual_seed(0)
    net = Net(False).double()
    plain, loss_fn, found = copy.deepcopy(net), nn.functional.cross_entropy, []
    for of in (net, plain):
        now: list[int] = []
        weight = of.head.weight
        weight.register_hook(lambda grad, now=now: grad * (math.inf if now[-1] == 1 else 1.0))
        rest = [p for p in of.parameters() if p is not weight]
        optimizers = [torch.optim.SGD(held, lr=0.1) for held in (rest, [weight])]
        model = espalier.prepare(of, *optimizers, plan={"pipe": 2})[0] if of is net else of
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
        for step in range(4):
            now.append(step)
            inputs, labels = batch(step)
            scaler.scale(loss_fn(model(*inputs), labels)).backward()
            scaler.unscale_(optimizers[step % 2])
            for optimizer in optimizers:
                scaler.step(optimizer)
                optimizer.zero_grad()
            scaler.update()
            found.append(scaler.get_scale())
    assert found[:4] == found[4:]
    for name, p in net.named_parameters():
        same(name, p, plain.get_parameter(name))


def on_two(rank: int, world: int) -> None:
    trained({"pipe": 2}, False, True)
    trained({"pipe": 2, "accumulate": 2}, True, False)
    in_an_optimizer(rank, world)
    asked_by_some(rank, world)
    by_scaler(rank, world)


def on_four(rank: int, world: int) -> None:
    some = by_sum, in_lists, overflown, by_numbers_of_each, one_by_one, without_names
    trained({"pipe": 2, "data": 2, "zero": 2}, False, True, some)
    trained({"pipe": 2, "data": 2, "zero": 3, "accumulate": 2}, True, False, some)
    trained({"pipe": 2, "tensor": 2}, True, True, some)
    trained({"pipe": 4}, True, False, (*some, by_torch))
    in_low_precision(rank, world)


def test_gradients_of_all_stages_by_hand(ranks: Any) -> None:
    ranks(2, on_two)
    ranks(4, on_four)
