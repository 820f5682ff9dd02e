"""What programs make of a model and its losses by torch.func, torch.compile and TorchScript."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from tests.ranks.habits import Lay, batch, loss_of, stepped, trained
from tests.ranks.habitual import Compiled, Scaled, Trained, net


def transforms_in_blocks(lay: Lay) -> list[Any]:
    """What torch.func differentiates within a forward that is computed again, too."""
    model = nn.Sequential(Trained(), Trained(), nn.Linear(6, 4))
    model, optimizer = lay(model, torch.optim.AdamW(model.parameters(), 0.1))
    return [*(trained(model, optimizer, step).item() for step in range(3)), *model.parameters()]


def transforms_of_the_model(lay: Lay) -> list[Any]:
    """The model as a function that torch.func differentiates, and for each row."""
    model = net(6, 6)
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    with torch.no_grad():
        model(batch(0)[0])
    out: list[Any] = []
    for step in range(2):
        x, y = batch(step)
        score, along = torch.func.jvp(model, (x,), (x.cos(),))
        (((x.cos() * along).sum(-1) + score.square().sum(-1)).mean()).backward()
        held = {name: p.detach() for name, p in model.named_parameters()}

        def loss_of_row(held: Any, x: torch.Tensor, y: torch.Tensor, model: Any = model) -> torch.Tensor:
            return F.cross_entropy(torch.func.functional_call(model, held, (x[None],)), y[None])

        rows = torch.func.vmap(torch.func.grad(loss_of_row), (None, 0, 0))(held, x, y)
        for name, p in model.named_parameters():
            p.grad.add_(rows[name].clamp(-0.1, 0.1).mean(0))
        optimizer.step()
        optimizer.zero_grad()
        out += [score, along]
    # as libraries make it that train weights of their own in a model's place (higher)
    kind = type("Patched", (model.__class__,), {"forward": type(model).forward})
    patched = kind.__new__(kind)
    nn.Module.__init__(patched)
    for name, child in nn.Module.named_children(model):
        patched.add_module(name, child)
    return [*out, patched(batch(2)[0]), *model.parameters()]


def tensors_for_one_call(lay: Lay) -> list[Any]:
    """Weights that are a step further, which a loss hangs on, and another buffer."""
    model, out = Scaled(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        x, y = batch(step)
        held = dict(model.named_parameters())
        gradients = torch.autograd.grad(F.cross_entropy(model(x), y), list(held.values()))
        given = {name: p - 0.1 * g for (name, p), g in zip(held.items(), gradients, strict=True)}
        given["shift"] = model.shift * 2
        loss = F.cross_entropy(torch.func.functional_call(model, given, (x,)), y)
        out.append(stepped(loss, optimizer).item())
        assert all(p is held[name] for name, p in model.named_parameters())
    return [*out, *model.parameters(), *model.buffers()]


def functions_that_torch_compiles(lay: Lay) -> list[Any]:
    """In a model, of its output, and around its call, before it is laid out, too."""
    model = Compiled()
    model, optimizer = lay(model, torch.optim.AdamW(model.parameters(), 0.1))
    turned = torch.compile(lambda x: x.roll(1, 0) * 1.5, backend="eager")

    @torch.compile(backend="eager")
    def loss_of_output(out: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(out, y)

    @torch.compile(backend="eager")
    def given(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return loss_of_output(model(turned(x)), y)

    losses = []
    for step in range(3):
        loss = given(*batch(step))
        losses.append(stepped(loss, optimizer).item())
    return [*losses, *model.parameters()]


def spread_out(x: torch.Tensor) -> torch.Tensor:
    return (x - x.mean(0)) / (x.std(-1, keepdim=True) + 0.1)


def functions_of_torchscript(lay: Lay) -> list[Any]:
    """In a model, and of its parameters."""
    model = net()
    model[1].forward = torch.jit.script(spread_out)
    penalty = torch.jit.trace(lambda x: x.square().mean() + x.sum(), torch.ones(2))
    model, optimizer = lay(model, torch.optim.AdamW(model.parameters(), 0.1))
    losses = []
    for step in range(3):
        loss = loss_of(model, step) + sum(penalty(p) for p in model.parameters())
        losses.append(stepped(loss, optimizer).item())
    return [*losses, *model.parameters()]


def losses_of_torchscript(lay: Lay) -> list[Any]:
    """A function and a module, of what the model gives."""
    model = net()
    distance, spread = torch.jit.script(nn.MSELoss()), torch.jit.script(spread_out)
    model, optimizer = lay(model, torch.optim.AdamW(model.parameters(), 0.1))
    losses = []
    for step in range(3):
        out = model(batch(step)[0])
        loss = distance(out, torch.ones(8, out.shape[-1])) + spread(out).cos().sum()
        if step == 1:
            losses.append(loss.item())
        losses.append(stepped(loss, optimizer).item())
    return [*losses, nn.utils.parameters_to_vector(model.parameters())]
