"""What programs do around a prepared model and its parameters: under every plan as on one process."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm

import espalier
from espalier.parallel.pipeline.record import SplitError
from tests.ranks.habits import Lay, as_it_is, batch, compare, loss_of, stepped, trained
from tests.ranks.habits_of_calls import compare_calls
from tests.ranks.habits_of_functions import (
    functions_of_torchscript,
    functions_that_torch_compiles,
    losses_of_torchscript,
    tensors_for_one_call,
    transforms_in_blocks,
    transforms_of_the_model,
)
from tests.ranks.habits_of_optimizers import (
    averages_of_weights,
    fused_optimizers_made_later,
    gradients_dropped_by_hand,
    hooks_around_a_closure,
    hooks_of_an_optimizer,
    optimizers_around_others,
    optimizers_of_a_part,
    optimizers_of_two_models,
    optimizers_that_answer_for_others,
    optimizers_that_ask_for_a_class,
    optimizers_within_the_backward_pass,
    penalties_by_themselves,
    rates_and_metrics_as_tensors,
    weights_as_a_vector,
    weights_put_aside,
)
from tests.ranks.habitual import (
    GAN,
    Acting,
    Adapted,
    Anew,
    Critic,
    Decorated,
    Encoder,
    Fading,
    Flow,
    Graph,
    Habitual,
    OfObjects,
    PastAutocast,
    Points,
    Remembering,
    Seen,
    Spectral,
    Stack,
    Tempered,
    Turned,
    Weighed,
    net,
)


def hooks_put_on_before(lay: Lay) -> list[Any]:
    """A hook of each parameter's gradient, as of the whole batch: one that is not linear, too."""
    model, norms = net(), []

    def clamp(grad: torch.Tensor) -> torch.Tensor:
        norms.append(grad.norm().item())
        return grad.clamp(-0.02, 0.02)

    handles = [p.register_hook(clamp) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.5)
    model, optimizer = lay(model, optimizer)
    out: list[Any] = []
    for step in range(4):
        if step == 3:
            handles[0].remove()
        loss = trained(model, optimizer, step)
        out.append(loss.item())
    assert len(norms) == 4 * len(handles) - 1
    return [*out, *sorted(norms), *model.parameters()]


def recomputed_drawn_and_averaged(lay: Lay) -> list[Any]:
    model, out = Habitual(), []
    optimizer = torch.optim.AdamW(model.parameters(), 0.1)
    model, optimizer = lay(model, optimizer)
    for step in range(3):
        loss = trained(model, optimizer, step)
        model.eval()
        with torch.no_grad():
            out += [loss.item(), loss_of(model, step).item()]
        model.train()
    return [*out, nn.utils.parameters_to_vector(model.parameters())]


def methods_onto_finished_gradients(lay: Lay) -> list[Any]:
    """An actor's loss goes through a critic's method, and adds to gradients that have had a step (TD3)."""
    actor, critic = net(6, 2), Critic()
    of_actor, of_critic = (torch.optim.Adam(m.parameters(), 0.05) for m in (actor, critic))
    actor, of_actor = lay(actor, of_actor)
    critic, of_critic = lay(critic, of_critic)
    out: list[Any] = []
    for step in range(3):
        x, _ = batch(step)
        estimates = critic(x, x[:, :2])
        out.append(stepped(sum((q - x[:, 2:3]).square().mean() for q in estimates), of_critic).item())
        out.append(stepped(-critic.first(x, actor(x)).mean(), of_actor).item())
    return [*out, *actor.parameters(), *critic.parameters()]


def parts_called_by_themselves(lay: Lay) -> list[Any]:
    """The generator's loss adds to gradients that the discriminator has had its step with."""
    model = GAN()
    of_generator = torch.optim.Adam(model.generator.parameters(), 1e-2)
    of_discriminator = torch.optim.Adam(model.discriminator.parameters(), 1e-2)
    model, of_generator, of_discriminator = lay(model, of_generator, of_discriminator)
    out = []
    for step in range(4):
        x, _ = batch(step)
        noise = x[:, :3] * 2
        if step != 2:  # one step of the generator alone, onto what there is
            fake = model.generator(noise).detach()
            loss = model.discriminator(fake).mean() - model.discriminator(x).mean()
            of_discriminator.zero_grad()
            loss.backward()
            of_discriminator.step()
            out.append(loss.item())
        loss = -model.discriminator(model.generator(noise)).mean()
        of_generator.zero_grad()
        loss.backward()
        of_generator.step()
        out += [loss.item(), sum(p.grad.pow(2).sum() for p in model.parameters())]
    return [*out, *model.parameters()]


def statistics_of_two_calls(lay: Lay) -> list[Any]:
    """A method sees whole batches, the call rows of them: both move what BatchNorm follows."""
    model = Encoder()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    out = []
    for step in range(3):
        x, _ = batch(step)
        if step:
            code, y = model.encode(x), model(x)
        else:
            y, code = model(x), model.encode(x)
        loss = y.square().mean() + code.pow(4).mean()
        out.append(stepped(loss, optimizer).item())
    return [*out, *model.parameters(), *model.buffers()]


def statistics_in_the_order_of_calls(lay: Lay) -> list[Any]:
    """What two calls give is asked for, or goes back, in another order than that of the calls.

    What a layer keeps of its inputs it keeps in evaluation, too, whether gradients are recorded or not.
    """
    inner = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 8), Fading()
    model = nn.Sequential(*inner, nn.Linear(8, 4))
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    out: list[Any] = []
    for step in range(4):
        optimizer.zero_grad()
        (x, y), (z, _) = batch(2 * step), batch(2 * step + 1)
        with torch.set_grad_enabled(step != 1):
            first = model(x)
        model.eval()
        with torch.set_grad_enabled(step % 2 == 0):
            out.append(model(x - z).square().mean().item())
        model.train()
        second = model(z * 3)
        if step == 0:  # a key that no gradient goes back through
            loss = (F.normalize(first) * F.normalize(second.detach())).sum()
            loss.backward()
        elif step == 1:
            loss = F.cross_entropy(second, y)
            loss.backward()
            out.append(first.sum().item())
        elif step == 2:
            out.append(F.cross_entropy(second, y).item())
            loss = F.cross_entropy(first, y)
            loss.backward()
        else:
            loss = second.square().mean() - first.mean()
            loss.backward()
        optimizer.step()
        out += [loss.item(), *(x.clone() for x in model.buffers())]
    return [*out, *model.parameters()]


def sparse_graphs(lay: Lay) -> list[Any]:
    model = Graph()
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 1e-2))
    out = []
    for step in range(3):
        graph = (torch.eye(8) + torch.ones(8, 8).triu(6 - step)).to_sparse()
        loss = model(batch(step)[0], graph).square().mean()
        out.append(stepped(loss, optimizer).item())
    other = nn.Sequential(nn.Linear(6, 6), Adapted(), nn.Tanh(), Adapted(), nn.Linear(6, 4))
    other, of_other = lay(other, torch.optim.Adam(other.parameters(), 1e-2))
    out += [trained(other, of_other, step).item() for step in range(2)]
    held = model.state_dict()
    assert held["rows"].layout is torch.sparse_coo and held["compressed"].layout is torch.sparse_csr
    if isinstance(model, espalier.EngineModule):
        with pytest.raises(ValueError, match=r"'rows' is sparse(.|\n)*persistent=False"):
            model.engine.save("nowhere")
    return [*out, *(x.to_dense() for x in held.values()), *other.parameters()]


def changes_of_the_model(lay: Lay) -> list[Any]:
    """Attributes, modules and buffers that are set on what stands for the model."""
    model = Tempered()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    out: list[Any] = []
    for step in range(5):
        model.temperature = 1.0 + step
        if step == 2:
            model.head = nn.Linear(8, 4)
            model.body[1] = nn.ReLU()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
        if step == 3:
            model.register_buffer("prior", torch.arange(4.0))
        if step == 4:  # the head of before is in no file
            model.load_state_dict({name: x * 0.9 for name, x in model.state_dict().items()})
        names = [name for name, _ in model.named_modules()]
        assert "body.4" in names and [n for n, _ in model.named_children()] == ["body", "head"]
        loss = trained(model, optimizer, step)
        out.append(loss.item())
    del model.prior
    model.eval()
    return [*out, model(batch(step)[0]), *model.parameters()]


def modules_around(lay: Lay) -> list[Any]:
    """A module that holds the model (a likelihood's, say) loads what its state dict gives."""
    model = Tempered()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    around = nn.ModuleDict({"model": model, "other": nn.Linear(2, 2)})
    out: list[Any] = []
    for step in range(3):
        out.append(trained(model, optimizer, step).item())
        around.load_state_dict({name: x * 0.9 for name, x in around.state_dict().items()})
    return [*out, *around.parameters()]


def containers(lay: Lay) -> list[Any]:
    model = net()
    model = lay(model)
    out = [F.cross_entropy(model(batch(0)[0]), batch(0)[1]).item(), len(model)]
    for p in model[:2].parameters():
        p.requires_grad_(False)
    out += [p.requires_grad for layer in model for p in layer.parameters()]
    return out


def complex_weights(lay: Lay) -> list[Any]:
    """As of Fourier operators; some are never used."""
    model = nn.Sequential(nn.Linear(6, 6), Spectral(6), nn.Linear(6, 6), Spectral(6), nn.Linear(6, 4))
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.05))
    out = [trained(model, optimizer, step).item() for step in range(3)]
    return [*out, *(torch.view_as_real(p.detach()) if p.is_complex() else p for p in model.parameters())]


def derivatives_of_inputs(lay: Lay) -> list[Any]:
    """Second ones, as of a differential equation: plain ones start from what was made of an output."""
    model = net()
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.05))
    out: list[Any] = []
    for step in range(3):
        x = batch(step)[0].requires_grad_()
        u = model(x)
        one = torch.ones_like(u)
        (slope,) = torch.autograd.grad(u, x, one, create_graph=True)
        (bend,) = torch.autograd.grad(slope, x, one.sum(1, keepdim=True) * x.detach(), create_graph=True)
        out += [slope.detach(), bend.detach()]
        value = u.square()
        value[-1, 1:] *= 3  # writes what it has read into the same memory
        value[0, 2] *= 2
        out.append(stepped((bend.square() + slope * value[:, :1]).mean() + value.sum(), optimizer).item())
    return [*out, *model.parameters()]


def parameters_given(lay: Lay) -> list[Any]:
    """Losses of several tasks, weighed outside of the model by a parameter of it."""
    model = Weighed()
    model, optimizer = lay(model, torch.optim.AdamW(model.parameters(), 0.1))
    out: list[Any] = []
    for step in range(3):
        x, y = batch(step)
        given, weights = model(x)
        loss = (torch.stack([F.cross_entropy(given, y), given.square().mean()]) * weights.exp()).sum()
        out.append(stepped(loss, optimizer).item())
    return [*out, *model.state_dict().values()]


def norms_that_are_synchronized(lay: Lay) -> list[Any]:
    """Layers of programs for several ranks, made of batch norms, and a copy whose statistics are new."""
    is_plain, out = lay is as_it_is, []  # on several ranks torch's own run on accelerators alone
    first = nn.Sequential(nn.BatchNorm1d(8), nn.ReLU())
    model: nn.Module = nn.Sequential(nn.Linear(6, 8), first, nn.Linear(8, 12), nn.BatchNorm1d(12), net(12))
    if not is_plain:
        model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
        first[0], first[1] = Acting(8), nn.Identity()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        out.append(trained(model, optimizer, step).item())
    assert sum(isinstance(m, nn.SyncBatchNorm) for m in model.modules()) == 2 * (not is_plain)
    average = torch.optim.swa_utils.AveragedModel(model)
    torch.optim.swa_utils.update_bn([batch(step)[0] for step in range(3)], average)
    model.eval()
    with torch.no_grad():
        out += [loss_of(model, 3).item(), loss_of(average, 3).item()]
    return [*out, *model.state_dict().values()]


def copies_made_before(lay: Lay) -> list[Any]:
    """Copies of the plain model get their values by ``a.data = ...``, and give them back."""
    model, out = net(), []
    average, target = copy.deepcopy(model), copy.deepcopy(model)
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    for step in range(3):
        out.append(trained(model, optimizer, step).item())
        for p, a, t in zip(model.parameters(), average.parameters(), target.parameters(), strict=True):
            a.data = 0.9 * a.data + 0.1 * p.data
            t.data = p.data.clone()
        out += [loss_of(average, step).item(), loss_of(target, step).item()]
    for p, a in zip(model.parameters(), average.parameters(), strict=True):
        p.data = a.data.clone()
    return [*out, loss_of(model, 3).item(), *model.parameters(), *average.parameters()]


def layers_that_come_later(lay: Lay) -> list[Any]:
    """A copy of a layer that has gradients, and a new one, which the optimizer is given; and parameters that
    ``weight_norm`` makes of one that there is, in whose memory it leaves one of them."""
    model, out = Stack(), []
    model, optimizer = lay(model, torch.optim.AdamW(model.parameters(), 0.1))
    for step in range(4):
        out.append(trained(model, optimizer, step).item())
        if step in (1, 2):
            layer = copy.deepcopy(model.layers[0]) if step == 1 else nn.Linear(12, 12)
            assert all(p.grad is None for p in layer.parameters())
            model.layers.append(layer)
            optimizer.add_param_group({"params": list(layer.parameters()), "lr": 0.05})
        if step == 1:
            weight_norm(model.leave)
            optimizer.add_param_group({"params": list(model.leave.parametrizations.parameters())})
    return [*out, *model.parameters()]


def blocks_that_are_copied_and_changed(lay: Lay) -> list[Any]:
    """What is written to by blocks that are computed again: in a copy, and in modules that come later."""
    model = Stack()
    model.layers = nn.ModuleList(
        nn.Sequential(spectral_norm(nn.Linear(12, 12)), nn.BatchNorm1d(12)) for _ in range(2)
    )
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    out = [trained(model, optimizer, 0).item()]
    twin = copy.deepcopy(model)
    inner = torch.optim.SGD(twin.parameters(), 0.1)
    out += [trained(twin, inner, step).item() for step in (1, 2)]
    model.layers[1][0] = spectral_norm(nn.Linear(12, 12))
    with torch.inference_mode():
        model.layers[0].register_buffer("noted", torch.ones(3), persistent=False)
    out += [trained(model, optimizer, step).item() for step in (1, 2, 3)]
    return [*out, *model.state_dict().values(), *twin.state_dict().values()]


def rows_that_come_later(lay: Lay) -> list[Any]:
    """Parameters give way to others with more rows, which take over their states."""
    model, out = Points(), []
    groups = [{"params": [p], "name": name} for name, p in model.named_parameters()]
    model, optimizer = lay(model, torch.optim.Adam(groups, 0.05))
    for step in range(4):
        out.append(trained(model, optimizer, step).item())
        for group in optimizer.param_groups if step == 1 else ():
            old = group["params"][0]
            state = optimizer.state.pop(old)
            new = nn.Parameter(torch.cat([old.detach(), old.detach()[:2] * 0.9]))
            for name in ("exp_avg", "exp_avg_sq"):
                state[name] = torch.cat([state[name], torch.zeros_like(state[name][:2])])
            group["params"], optimizer.state[new] = [new], state
            setattr(model, group["name"], new)
    return [*out, *model.parameters()]


def adjoint_methods(lay: Lay) -> list[Any]:
    model = Flow()
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.1))
    return [*[trained(model, optimizer, step).item() for step in range(3)], *model.parameters()]


def objects_and_other_paths(lay: Lay) -> list[Any]:
    """A model gives an object that is no container, and goes through fewer or more layers at times."""
    model, out = Remembering(), list[Any]()
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.05))
    for step, number in enumerate((3, 1, 4, 0, 3)):
        x, y = batch(step)
        scores, seen = model(x, number)
        assert seen.kind == "seen"
        out.append(stepped(F.cross_entropy(scores, y) + seen.sizes() / 10, optimizer).item())
    with torch.no_grad():
        _, seen = model(batch(9)[0])
    assert type(seen) is Seen and len(seen.layers) == 3
    return [*out, seen.sizes(), *model.parameters()]


def weights_beside_rows(lay: Lay) -> list[Any]:
    """A loss of all rows takes a weight as it is, as of prototypes that a queue is compared with."""
    model, out, queue = net(), list[Any](), torch.zeros(0, 6)
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        x, y = batch(step)
        scores = model(x)
        with torch.no_grad():
            near = torch.cat([queue @ model[0].weight.t(), scores.detach() @ model[-1].weight])
            share = near.softmax(0)[-8:].mean(1)
            queue = torch.cat([queue, x])[-8:]
        out += [share.sum().item()] if step == 2 else []
        out.append(stepped((F.cross_entropy(scores, y, reduction="none") * share).sum(), optimizer).item())
    return [*out, *model.parameters()]


class Given(nn.Sequential):
    """What it gives hangs on its weights alone, as a flow's base does."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6))
        self.seed = nn.Parameter(torch.ones(1, 6))

    def forward(self) -> torch.Tensor:
        return super().forward(self.seed)


def nothing_given(lay: Lay) -> list[Any]:
    """The model is called without rows, which the loss has."""
    model, out = Given(), list[Any]()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        loss = (model() - batch(step)[0]).square().mean()
        out += [loss.item()] if step == 1 else []
        out.append(stepped(loss, optimizer).item())
    return [*out, *model.parameters()]


class Rare(nn.Module):
    """Softmax in clusters: how many rows each has, and which there are, hangs on the labels."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 8), nn.Tanh())
        self.leave = nn.AdaptiveLogSoftmaxWithLoss(8, 4, [1, 3], div_value=2.0)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> Any:
        return self.leave(self.enter(x), y).loss


def sizes_by_labels(lay: Lay) -> list[Any]:
    model, out = Rare(), list[Any]()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        x, y = batch(step)
        out.append(stepped(model(x, y % 2 if step == 3 else y), optimizer).item())
    return [*out, *model.parameters()]


def parameters_in_other_places(lay: Lay) -> list[Any]:
    """Layers of one stage exchange their weights, and share one."""
    model = nn.Sequential(nn.Linear(6, 12), *(net(12, 12) for _ in range(3)), nn.Linear(12, 4))
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    out, inner = list[Any](), [x for x in model[1].modules() if isinstance(x, nn.Linear)]
    a, b = inner[0], inner[-1]
    for step in range(6):
        if step == 2:
            a.weight, b.weight = b.weight, a.weight
        if step == 4:
            a.weight = b.weight
        out.append(trained(model, optimizer, step).item())
    return [*out, *model.parameters()]


def layers_past_autocast(lay: Lay) -> list[Any]:
    model = nn.Sequential(net(6, 12), PastAutocast(), nn.Linear(12, 12), PastAutocast(), nn.Linear(12, 4))
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    return [*(trained(model, optimizer, step).item() for step in range(2)), *model.parameters()]


def functions_of_ones_own_in_losses(lay: Lay) -> list[Any]:
    model, out = net(), list[Any]()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(2):
        x, y = batch(step)
        loss = F.cross_entropy(Turned.apply(model(x), 0.3), y)  # type: ignore[no-untyped-call]
        out.append(stepped(loss, optimizer).item())
    return [*out, *model.parameters()]


def tables_of_the_programs(lay: Lay) -> list[Any]:
    """Plain tensors are read and written by what is made of an output: one index, of any number of rows."""
    model = net()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    table, numbers, out = torch.arange(16.0).reshape(4, 4).sin(), torch.arange(40), []
    for step, rows in enumerate((2, 8, 40)):
        given = model(torch.cat([batch(5 * step + i)[0] for i in range(5)])[:rows])
        best, above = given.argmax(-1), given.detach() > 0
        read = [table[best], table[:, best], table[best, best], numbers[:rows][best > 1], table[best[0]]]
        read += [torch.ones(rows, 4)[above], numbers[:rows][above.any(-1)]]
        out += [x.detach() for x in read]
        written = table.clone()
        written[best] = 2.0
        out += [written, stepped((given * table[best]).mean(), optimizer)]
    last = [*model.parameters()][-1]
    with torch.no_grad():
        torch.mul(last, 2.0, out=written[0])  # of a stage, where each rank has the table
    return [*out, written, *model.parameters()]


def parts_that_are_decorated(lay: Lay) -> list[Any]:
    """Another forward for one call; copies that are made anew; values as of their own class."""
    values: list[Any] = []
    for model in (Decorated(), Anew()):
        model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
        for step in range(2):
            x, y = batch(step)
            out = model(x)
            loss = F.cross_entropy(out.as_subclass(type(out)), y)
            kept = loss.detach()
            values += [stepped(loss, optimizer), kept.as_subclass(type(kept)) * 2]
            values.append(model(x).detach().as_subclass(torch.Tensor).square().mean().item())
        values += model.parameters()
    return values


PROGRAMS = (
    fused_optimizers_made_later,
    gradients_dropped_by_hand,
    tables_of_the_programs,
    complex_weights,
    derivatives_of_inputs,
    optimizers_that_ask_for_a_class,
    layers_past_autocast,
    functions_of_ones_own_in_losses,
    adjoint_methods,
    objects_and_other_paths,
    parameters_in_other_places,
    layers_that_come_later,
    rows_that_come_later,
    functions_of_torchscript,
    losses_of_torchscript,
    penalties_by_themselves,
    copies_made_before,
    functions_that_torch_compiles,
    parameters_given,
    optimizers_of_a_part,
    optimizers_of_two_models,
    optimizers_around_others,
    optimizers_that_answer_for_others,
    norms_that_are_synchronized,
    weights_as_a_vector,
    weights_put_aside,
    tensors_for_one_call,
    transforms_in_blocks,
    transforms_of_the_model,
    changes_of_the_model,
    modules_around,
    containers,
    hooks_put_on_before,
    methods_onto_finished_gradients,
    optimizers_within_the_backward_pass,
    parts_called_by_themselves,
    statistics_of_two_calls,
    statistics_in_the_order_of_calls,
    sparse_graphs,
    averages_of_weights,
    norms_that_are_synchronized,
    hooks_of_an_optimizer,
    hooks_around_a_closure,
    rates_and_metrics_as_tensors,
    recomputed_drawn_and_averaged,
)
# these have an optimizer update stand-ins of what it holds, or what is of another model
ON_DEVICE = optimizers_around_others, optimizers_that_answer_for_others, optimizers_of_two_models
STAGED = (
    gradients_dropped_by_hand,
    adjoint_methods,
    objects_and_other_paths,
    parameters_in_other_places,
    tables_of_the_programs,
    complex_weights,
    functions_of_ones_own_in_losses,
    layers_past_autocast,
    transforms_in_blocks,
    functions_of_torchscript,
    losses_of_torchscript,
    penalties_by_themselves,
    statistics_in_the_order_of_calls,
    sparse_graphs,
    parameters_given,
    optimizers_of_a_part,
    optimizers_that_ask_for_a_class,
    averages_of_weights,
    hooks_of_an_optimizer,
    hooks_around_a_closure,
    rates_and_metrics_as_tensors,
    recomputed_drawn_and_averaged,
)
STAGES: tuple[dict[str, Any], ...] = ({"pipe": 2}, {"pipe": 2, "recompute": "full"})


class EachRow(nn.Module):
    """Has a weight for each row, and is not called with one."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 4)
        self.each = nn.Parameter(torch.ones(8, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(torch.cat((x[:, 1:], self.each), 1))))


def weights_for_each_row(prepare: Any) -> list[Any]:
    """The model does not take one row; a number of a weight's kind is made of it."""
    model = EachRow()
    model, optimizer = prepare(model, torch.optim.SGD(model.parameters(), 0.1))
    losses = [trained(model, optimizer, step) for step in range(2)]
    return [*losses, model.up.weight, model.each, model.up.weight.new(3).zero_() + model.down.bias.sum()]


PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 2, "chunk_megabytes": 0.001},
    {"data": 2, "zero": 3},
    {"data": 2, "zero": 3, "recompute": "selective", "offload": {"states": "host", "parameters": "host"}},
    {"tensor": 2},
)


# these compute with a parameter's data (p.data) beside tensors of the device
OF_DATA = (
    copies_made_before,
    transforms_of_the_model,
    averages_of_weights,
    layers_that_come_later,
    rows_that_come_later,
)


def compared(rank: int, world: int) -> None:
    for program in PROGRAMS:
        plans = (*PLANS, *STAGES) if program in STAGED else PLANS
        if program in ON_DEVICE:
            plans = tuple(plan for plan in plans if "offload" not in plan)
        compare(program, [(plan, {}) for plan in plans])
    compare(sizes_by_labels, [(plan, {}) for plan in STAGES])
    for program in (weights_beside_rows, nothing_given):
        compare(program, [({"pipe": 2, "accumulate": number}, {}) for number in (1, 2)])
    compare(blocks_that_are_copied_and_changed, [(PLANS[4], {}), ({"tensor": 2, "recompute": "full"}, {})])
    told_of_time()
    compare(parts_that_are_decorated, [(plan, {}) for plan in (PLANS[0], PLANS[3], PLANS[5], *STAGES)])
    compare(weights_for_each_row, [({"tensor": 2}, {})])
    compare_calls(rank)
    for change in (tied, exchanged, others):
        refused_among_stages(change)
    model = espalier.prepare(net(), plan={"data": 2})
    with pytest.raises(TypeError, match="laid over the ranks already"):
        nn.parallel.DistributedDataParallel(model)
    model = espalier.prepare(OfObjects(6, 4).double(), plan={"data": 2})
    with pytest.warns(UserWarning, match="called with SimpleNamespace, in which no rows are seen"):
        assert model(SimpleNamespace(rows=batch(0)[0])).shape == (8, 4)


def told_of_time() -> None:
    """Gradients do not go from a call of stages to the one before, through what that has left."""
    model = nn.Sequential(nn.Linear(6, 6), Fading(is_detached=False), nn.Linear(6, 4)).double()
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan={"pipe": 2})
    with pytest.warns(UserWarning, match="'1.trace'.*the call before has left there, with a gradient"):
        trained(model, optimizer, 0)


def tied(model: nn.Sequential) -> None:
    model[4].weight = model[0].weight


def exchanged(model: nn.Sequential) -> None:
    model[0].weight, model[4].weight = model[4].weight, model[0].weight


def others(model: nn.Sequential) -> None:
    model[4].weight = nn.Parameter(model[4].weight.detach().clone())


def refused_among_stages(change: Any) -> None:
    """What stages have was said by the first batch: no rank goes on with other parameters, or waits."""
    model = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    plan = {"pipe": 2, "schedule": "zb-h1", "accumulate": 2}
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    trained(model, optimizer, 0)
    change(model)
    said = "came later" if change is others else "were tied or exchanged since"
    with pytest.raises(SplitError, match=said):
        trained(model, optimizer, 1)


@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:(forward|.* of sparse tensors) has no sharding rule")
@pytest.mark.filterwarnings("ignore:__getitem__ has no sharding rule")
@pytest.mark.filterwarnings("ignore:The autograd function (Adjoint|Turned) has no rule")
@pytest.mark.filterwarnings("ignore:.*was compiled by torch.compile")
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
@pytest.mark.filterwarnings("ignore:A loss is one of all rows")
@pytest.mark.filterwarnings(
    "ignore:(Flow|Graph|Sequential|Anew) cannot be split:espalier.parallel.compose.UndividedWarning"
)
@pytest.mark.filterwarnings("ignore:.torch.jit.* is deprecated")  # torch.func.jvp uses it, too
@pytest.mark.filterwarnings("ignore:torch.vmap or a transform of torch.func is given DTensors")
@pytest.mark.filterwarnings("ignore:A transform of torch.func in a block that is computed again")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:p.grad is None here")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_habits(ranks: Any) -> None:
    ranks(2, compared)
