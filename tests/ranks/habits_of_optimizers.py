"""What programs do with optimizers, and with all weights at once: tests/ranks/test_habits.py compares it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from tests.ranks.habits import Lay, as_it_is, batch, loss_of, trained
from tests.ranks.habitual import Lookahead, OnSphere, Outer, Point, Rotated, net


def hooks_of_an_optimizer(lay: Lay) -> list[Any]:
    """Before a step they clip gradients, after it they bound weights: by norms of the whole model.

    Some weights begin with states anew, wherever they lie.
    """
    model, out = net(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)

    def clip(of: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in of.param_groups for p in group["params"]]
        out.append(float(nn.utils.clip_grad_norm_(held, 0.01)))

    @torch.no_grad()
    def bound(of: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in of.param_groups for p in group["params"]]
        out.append(float(sum(p.square().sum() + p.grad.abs().sum() for p in held)))  # type: ignore[union-attr]
        for p in held:
            p.div_(p.norm().clamp(min=1.0))

    optimizer.register_step_pre_hook(clip)
    optimizer.register_step_post_hook(bound)
    model, optimizer = lay(model, optimizer)
    for step in range(3):
        loss = trained(model, optimizer, step)
        out.append(loss.item())
        if step == 1:
            first, *_, last = model.parameters()
            del optimizer.state[first]
            optimizer.state.pop(last)
    assert len(out) == 9
    return [*out, nn.utils.parameters_to_vector(model.parameters())]


def optimizers_that_ask_for_a_class(lay: Lay) -> list[Any]:
    """Parameters of a class of their own, which an optimizer moves in another way than the others."""
    model = nn.Sequential(nn.Linear(6, 6), Rotated(6, 3.0), nn.Tanh(), nn.Linear(6, 4))
    given = model[1].turn
    model, optimizer = lay(model, OnSphere(model.parameters(), 0.1))
    out = [trained(model, optimizer, step).item() for step in range(3)]
    assert isinstance(given, Point) and not isinstance(model[0].weight, Point)
    if not hasattr(model, "engine") or model.engine.plan.pipe == 1:
        copied = copy.deepcopy(model[1].turn)
        assert isinstance(copied, Point) and copied.radius == 3.0
    return [*out, *model.parameters()]


def hooks_around_a_closure(lay: Lay) -> list[Any]:
    """Before a step its hooks see what the step before has left: the closure makes gradients anew."""
    model, out = net(), list[Any]()
    optimizer = torch.optim.SGD(model.parameters(), 0.5, momentum=0.9)

    def clip(of: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        held = [p for group in of.param_groups for p in group["params"]]
        has_gradients = [p for p in held if p.grad is not None]
        out.append(float(nn.utils.clip_grad_norm_(has_gradients, 0.01)) if has_gradients else 0.0)

    optimizer.register_step_pre_hook(clip)
    model, optimizer = lay(model, optimizer)
    for step in range(3):

        def closure(step: int = step) -> torch.Tensor:
            if step != 1:
                optimizer.zero_grad()
            loss = loss_of(model, step)
            loss.backward()
            return loss

        out.append(optimizer.step(closure).item())  # type: ignore[arg-type]
    return [*out, *model.parameters()]


def rates_and_metrics_as_tensors(lay: Lay) -> list[Any]:
    """A schedule writes to a rate that is a tensor; norms and losses are added up where they are."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 5)
    model, optimizer = lay(model, optimizer)
    losses, norms = torch.zeros(()), torch.zeros(())
    for step in range(4):
        loss = loss_of(model, step)
        loss.backward()
        norms = norms + espalier.full_tensor(nn.utils.clip_grad_norm_(model.parameters(), 0.05).detach())
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        losses = losses + espalier.full_tensor(loss.detach())
    return [losses, norms, nn.utils.parameters_to_vector(model.parameters())]


def optimizers_within_the_backward_pass(lay: Lay) -> list[Any]:
    model = net()
    optimizers = {p: torch.optim.SGD([p], 0.1, momentum=0.9) for p in model.parameters()}

    def update(p: torch.Tensor) -> None:
        optimizers[p].step()
        optimizers[p].zero_grad()

    for p in model.parameters():
        p.register_post_accumulate_grad_hook(update)
    model, out = lay(model), []
    for step in range(3):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        out.append(loss.item())
    return [*out, *model.parameters()]


def averages_of_weights(lay: Lay) -> list[Any]:
    """torch's own, of a model that is prepared: a copy of it, which is called, and learns its statistics."""
    model = nn.Sequential(net(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    model, optimizer = lay(model, optimizer)
    first, frozen = torch.optim.swa_utils.AveragedModel(model), copy.deepcopy(model)
    for p in frozen.parameters():
        p.detach_()
    out: list[Any] = []
    for step in range(3):
        loss = trained(model, optimizer, step)
        for own, p in zip(frozen.parameters(), model.parameters(), strict=True):
            own.mul_(0.9).add_(p.data, alpha=0.1)
        states = [[x for x in m.state_dict().values() if x.is_floating_point()] for m in (frozen, model)]
        torch._foreach_lerp_(*states, weight=0.2)
        if step == 1:
            later = torch.optim.swa_utils.AveragedModel(
                model, multi_avg_fn=torch.optim.swa_utils.get_ema_multi_avg_fn(0.9)
            )
        if step:
            later.update_parameters(model)
        first.update_parameters(model)
        out.append(loss.item())
    out.append(loss_of(frozen.eval(), step).item())
    for average in (first, later):
        torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(3)], average)
        average.eval()
        with torch.no_grad():
            out.append(loss_of(average, step).item())
    for average in (first, copy.deepcopy(later)):
        model.load_state_dict(average.module.state_dict())
        out += [x.clone() for x in model.state_dict().values()]
        out.append(loss_of(average, step).item())
    model.load_state_dict(frozen.state_dict())
    return [*out, *model.state_dict().values()]


def weights_put_aside(lay: Lay) -> list[Any]:
    """An average's weights for an evaluation, and the own ones back: by ``p.data``, as many programs do."""
    model = net()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out: list[Any] = []
    for step in range(3):
        x, y = batch(step)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        for p in model.parameters():  # as zero_grad() was once written
            p.grad.detach_().zero_()
        aside = [p.data for p in model.parameters()]
        for p in model.parameters():
            p.data = 0.5 * p.data
        with torch.no_grad():
            out += [loss.item(), F.cross_entropy(model(x), y).item()]
        for p, own in zip(model.parameters(), aside, strict=True):
            p.data = own
        if step == 0:
            averages = [p.detach().clone() for p in model.parameters()]
        for _ in range(2):  # exchanged, and back
            for p, average in zip(model.parameters(), averages, strict=True):
                p.data, average.data = average.data, p.data
            with torch.no_grad():
                out.append(F.cross_entropy(model(x), y).item())
    model[0].bias.data, model[2].bias.data = model[2].bias.data, model[0].bias.data
    return [*out, *averages, *model.parameters()]


def weights_as_a_vector(lay: Lay) -> list[Any]:
    """Evolution's steps: all weights are one vector, which is set anew."""
    model = net(6, 1)
    model = lay(model)
    x, _ = batch(0)
    weights, out = nn.utils.parameters_to_vector(model.parameters()).detach(), []
    for _ in range(2):
        nn.utils.vector_to_parameters(weights + 0.1 * torch.arange(len(weights)).sin(), model.parameters())
        with torch.no_grad():
            out.append(model(x).square().mean().item())
        weights = nn.utils.parameters_to_vector(model.parameters()).detach() * (1.0 + out[-1])
        nn.utils.vector_to_parameters(weights, model.parameters())
        out += list(nn.utils.parameters_to_vector(model.parameters()).detach()[-2:])
    return [*out, *model.parameters()]


def optimizers_of_a_part(lay: Lay) -> list[Any]:
    """Two of a head alone, on a body that is frozen: a stage has nothing that either would update."""
    model = net()
    model[:4].requires_grad_(False)
    optimizers = torch.optim.SGD([model[4].weight], 0.5), torch.optim.Adam([model[4].bias], 0.1)
    model, *both = lay(model, *optimizers)
    out: list[Any] = []
    for step in range(3):
        loss = loss_of(model, step)
        loss.backward()
        for optimizer in both:
            optimizer.step()
        for optimizer in both:
            optimizer.zero_grad()
        out.append(loss.item())
    return [*out, *model.state_dict().values()]


def fused_optimizers_made_later(lay: Lay) -> list[Any]:
    """Of the prepared model's parameters: they step by themselves, and have states as gradients lie."""
    model = net()
    model, first = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    out: list[Any] = [trained(model, first, 0)]
    for optimizer in (
        torch.optim.SGD(model.parameters(), 0.1, momentum=0.9, fused=True),
        torch.optim.Adagrad(model.parameters(), 0.1, fused=True),
        torch.optim.AdamW(model.parameters(), 0.1, amsgrad=True, fused=True),
    ):
        out += [trained(model, optimizer, step) for step in range(3)]
    return [*out, *model.state_dict().values()]


def optimizers_of_two_models(lay: Lay) -> list[Any]:
    """Each prepared by itself; in some steps one of them alone has gradients, or a weight has them anew."""
    encoder, decoder = net(6, 4), net(4, 4)
    decoder[0].weight.requires_grad_(False)
    groups = [{"params": encoder.parameters()}, {"params": [*decoder.parameters()], "lr": 0.02}]
    optimizer = torch.optim.AdamW(groups, 0.1, weight_decay=0.1)
    seen: list[Any] = []
    optimizer.register_step_pre_hook(
        lambda of, *_: seen.append(
            sum(p.grad.square().sum() for g in of.param_groups for p in g["params"] if p.grad is not None)
        )
    )
    encoder, optimizer = lay(encoder, optimizer)
    decoder = lay(decoder)
    schedule, out = torch.optim.lr_scheduler.StepLR(optimizer, 2), list[Any]()
    both = [*encoder.parameters(), *decoder.parameters()]
    for step in range(5):
        x, y = batch(step)
        if step == 1:
            decoder[0].weight.requires_grad_(True)
        code = encoder(x) if step != 3 else x[:, :4]
        loss = F.cross_entropy(decoder(code) if step != 2 else code, y)
        if step != 4:  # there are those of the step before, too
            optimizer.zero_grad(set_to_none=step == 3)
        loss.backward()
        out += [loss.item(), nn.utils.clip_grad_norm_(both, 0.1)]
        optimizer.step()
        schedule.step()
    optimizer.zero_grad()
    for step in range(3):  # by the engine's own step, which drops gradients
        x, y = batch(step)
        F.cross_entropy(decoder(x[:, :4] if step == 0 else encoder(x)), y).backward()
        if lay is as_it_is:
            optimizer.step()
            optimizer.zero_grad()
        else:
            assert (encoder if step < 2 else decoder).engine.step()
    if lay is not as_it_is:
        assert encoder.engine.steps == 8
        with pytest.raises(ValueError, match="no gradients since the last step"):
            encoder.engine.step()
    states = optimizer.state_dict()["state"]
    return [*out, *seen, *both, *(state["exp_avg"] for _, state in sorted(states.items()))]


def optimizers_around_others(lay: Lay) -> list[Any]:
    model = net()
    model, optimizer = lay(model, Lookahead(torch.optim.Adam(model.parameters(), 0.1)))
    return [*[trained(model, optimizer, step).item() for step in range(4)], *model.parameters()]


def optimizers_that_answer_for_others(lay: Lay) -> list[Any]:
    model, out = net(), []
    model, optimizer = lay(model, Outer(torch.optim.Adam(model.parameters(), 0.1)))
    for step in range(4):
        out.append(trained(model, optimizer, step).item())
        states = optimizer.state_dict()
        out += [states["state"][i]["exp_avg"].sum() for i in range(6)]
        assert not any(isinstance(x, espalier.DTensor) for x in states["state"][0].values())
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(states))
    return [*out, *model.parameters()]


def penalties_by_themselves(lay: Lay) -> list[Any]:
    """Of parameters: they go back after the loss, of an earlier graph too, and before it."""
    model = net()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    losses = []
    for step in range(4):
        loss, penalty = loss_of(model, step), 0.1 * sum(p.square().sum() for p in model.parameters())
        optimizer.zero_grad()
        for part in (penalty, loss) if step == 2 else (loss, penalty):
            part.backward()
        if step == 3:
            (0.1 * next(model.parameters()).abs().sum()).backward()
            losses.append(nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        optimizer.step()
        losses.append(loss.item())
    return [*losses, *model.parameters()]


def gradients_dropped_by_hand(lay: Lay) -> list[Any]:
    """Before the first backward pass, and before each."""
    model = net()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    with torch.no_grad():
        out: list[Any] = [model(batch(9)[0]).sum()]
    for step in range(3):
        for p in model.parameters():
            if step == 2:
                del p.grad
            else:
                p.grad = None
        loss = loss_of(model, step)
        loss.backward()
        grads = [p.grad for p in model.parameters() if p.grad is not None]
        out += [
            loss.item(),
            torch.tensor(float(len(grads))),
            nn.utils.parameters_to_vector(grads).norm().item(),
        ]
        optimizer.step()
    return [*out, *model.parameters()]
