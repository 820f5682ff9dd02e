"""Calls around a module's forward: their order, and how they go."""

import copy
import inspect
import pickle
from typing import Any

import torch
from torch import nn

from espalier.blocks import around


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))

    def forward(self, x: torch.Tensor, *, shift: float = 0.0) -> torch.Tensor:
        return x * self.scale + shift


def adding(n: float) -> Any:
    return lambda module, own, args, kwargs: own(*args, **kwargs) * 10 + n


def test_the_last_call_is_outermost_and_all_go_again() -> None:
    net, x = Scaled(), torch.tensor(1.0)
    seen: list[nn.Module] = []
    net.register_forward_hook(lambda module, args, out: seen.append(out.item()))
    undo = [around(net, adding(1)), around(net, adding(3))]
    assert net(x, shift=1.0) == 313 and seen == [313.0]
    undo.pop()()
    assert net(x) == 21
    undo.pop()()
    assert net(x) == 2 and "forward" not in vars(net)


def test_what_a_user_put_there_stays_within() -> None:
    net = Scaled()
    net.forward = own = lambda x: x + 5  # type: ignore[method-assign]
    undo = around(net, adding(1))
    assert net(torch.tensor(1.0)) == 61
    undo()
    assert net.forward is own


def test_the_signature_is_the_modules_own() -> None:
    net = Scaled()
    around(net, adding(1))
    around(net, adding(2))
    assert list(inspect.signature(net.forward).parameters) == ["x", "shift"]


def test_a_copy_has_the_calls_and_its_own_parameters() -> None:
    net, x = Scaled(), torch.tensor(1.0)
    around(net, adding(1))
    around(net, adding(3))
    copied = copy.deepcopy(net)
    with torch.no_grad():
        net.scale.fill_(7.0)
    assert copied(x) == 213 and net(x) == 713


def test_a_pickle_has_none() -> None:
    net, x = Scaled(), torch.tensor(1.0)
    around(net, adding(1))
    assert pickle.loads(pickle.dumps(net))(x) == 2
