"""Loops of programs whose parameters and states lie off the device, on axes of one rank, too."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from tests.ranks.habits import Lay, compare, loss_of, trained
from tests.ranks.habitual import net
from tests.ranks.test_hooks_of_parameters import Tied, step_of_tied


def states_taken_back(lay: Lay) -> list[Any]:
    """The states of an earlier step, whole, of parameters that no axis cuts."""
    model, out = net(), []
    groups = [{"params": [p for p in model.parameters() if p.ndim == n]} for n in (2, 1)]
    model, optimizer = lay(model, torch.optim.AdamW(groups, 0.05))
    kept: tuple[Any, Any] = ({}, {})
    for step in range(5):
        out.append(trained(model, optimizer, step).item())
        if step == 1:
            kept = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
        elif step == 2:
            model.load_state_dict(kept[0])
            optimizer.load_state_dict(kept[1])
    states = optimizer.state_dict()["state"]
    return [*out, *model.parameters(), *[states[i]["exp_avg"] for i in range(6)]]


def tables_of_two_stages(lay: Lay) -> list[Any]:
    """The first has all parameters of the model, which it never calls whole."""
    model = Tied()
    model, optimizer = lay(model, torch.optim.NAdam(model.parameters(), 0.05))
    return [*[step_of_tied(model, optimizer, step) for step in range(3)], *model.parameters()]


def gradients_that_are_kept(lay: Lay) -> list[Any]:
    """Two passes for one step, and gradients of one loss that a program holds while it makes another's."""
    model, out = net(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for step in range(3):
        optimizer.zero_grad()
        loss_of(model, 2 * step).backward()
        loss_of(model, 2 * step + 1).backward()
        optimizer.step()
    optimizer.zero_grad()
    loss_of(model, 6).backward()
    first = [p.grad for p in model.parameters()]
    optimizer.zero_grad()
    loss_of(model, 7).backward()
    out += [x.square().sum().item() for x in first if x is not None]
    return [*out, *model.parameters()]


def gradients_past_a_load(lay: Lay) -> list[Any]:
    """Weights are loaded, and another optimizer comes, between a backward pass and its step."""
    model, out = net(), list[Any]()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1, momentum=0.9))
    for step in range(4):
        if step in (0, 3):  # there are none
            model.load_state_dict({name: x * 0.9 for name, x in model.state_dict().items()})
        loss_of(model, 2 * step).backward()
        if step == 1:
            model.load_state_dict({name: x * 0.9 for name, x in model.state_dict().items()})
        elif step == 2:
            optimizer = torch.optim.Adam(model.parameters(), 0.05)
        loss = loss_of(model, 2 * step + 1)
        loss.backward()
        out += [loss.item(), *(p.grad.norm() for p in model.parameters())]
        optimizer.step()
        if step == 2:
            model.load_state_dict({name: x * 0.9 for name, x in model.state_dict().items()})
        out += [p.grad.norm() for p in model.parameters()]
        optimizer.zero_grad()
    return [*out, *model.parameters()]


def states_of_what_is_frozen(lay: Lay) -> list[Any]:
    """An optimizer that makes states at once has some of parameters that get no gradients."""
    model, out = net(), []
    for p in model[0].parameters():
        p.requires_grad_(False)
    model, optimizer = lay(model, torch.optim.Adagrad(model.parameters(), 0.1))
    for step in range(3):
        out.append(trained(model, optimizer, step).item())
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    states = optimizer.state_dict()["state"]
    return [*out, *model.parameters(), *[states[i]["sum"] for i in range(6)]]


PROGRAMS = (
    states_taken_back,
    tables_of_two_stages,
    gradients_that_are_kept,
    gradients_past_a_load,
    states_of_what_is_frozen,
)
AWAY = {"parameters": "host", "states": "host"}
PLANS: tuple[dict[str, Any], ...] = (
    {"tensor": 2, "offload": AWAY},
    {"pipe": 2, "offload": AWAY},
    {"data": 2, "zero": 3, "offload": AWAY},
    {"data": 2, "zero": 1, "offload": {"gradients": "host"}},
    {"pipe": 2, "offload": {**AWAY, "gradients": "host"}},
)


def compared(rank: int, world: int) -> None:
    for program in PROGRAMS:
        compare(program, [(plan, {}) for plan in PLANS])


@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
def test_offloaded_loops(ranks: Any) -> None:
    ranks(2, compared)
