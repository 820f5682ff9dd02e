"""Programs that ask what kind of thing a pipeline's output is, before it is computed."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers.utils import ModelOutput

import espalier
from tests.ranks.habits import Lay, batch, compare, stepped
from tests.ranks.habitual import net

SGD = partial(torch.optim.SGD, lr=0.2)


class Pair(NamedTuple):
    logits: torch.Tensor
    norm: torch.Tensor | None


@dataclass
class Output(ModelOutput):
    logits: torch.Tensor | None = None
    norm: torch.Tensor | None = None
    more: torch.Tensor | None = None


class Giving(nn.Module):
    """A model that gives what it computes in one of several kinds."""

    def __init__(self, kind: Any) -> None:
        super().__init__()
        self.layers, self.kind = net(), kind

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.layers(x)
        given = {"logits": logits, "norm": logits.square().sum(-1)}
        return self.kind(**given)


def alone(logits: torch.Tensor, norm: torch.Tensor) -> torch.Tensor:
    return logits


def listed(logits: torch.Tensor, norm: torch.Tensor) -> list[torch.Tensor]:
    return [logits, norm]


def paired(logits: torch.Tensor, norm: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    return logits, norm


KINDS: tuple[Any, ...] = (alone, listed, paired, Pair, dict, OrderedDict, Output)


def loss_of(out: Any, y: torch.Tensor) -> Any:
    """As loops ask that go with any model."""
    assert hasattr(out, "items") == isinstance(out, dict) and not hasattr(out, "loss")
    assert hasattr(out, "logits") == isinstance(out, Pair | Output) and hasattr(
        out, "numel"
    ) == torch.is_tensor(out)
    loss = torch.zeros(())
    if isinstance(out, ModelOutput):
        assert "logits" in out and "more" not in out and out.get("more") is None
    match out:
        case torch.Tensor():
            assert torch.is_tensor(out)
        case dict() | tuple() | list():
            assert not torch.is_tensor(out)
        case _:
            raise AssertionError(type(out))
    if torch.is_tensor(out):
        assert isinstance(out, torch.Tensor) and not isinstance(out, nn.Parameter | tuple | Mapping)
        logits = out
    elif isinstance(out, Mapping):
        assert isinstance(out, dict) and not isinstance(out, torch.Tensor | Sequence)
        assert "norm" in out and "loss" not in out and [*out] == [*out.keys()] == ["logits", "norm"]
        out = {**out}
        logits = out.pop("logits")
        loss = sum(0.1 * value.mean() for name, value in out.items() if name != "loss")
    else:
        assert isinstance(out, tuple | list) and not isinstance(out, torch.Tensor | dict)
        if isinstance(out, Pair):
            loss = 0.3 * out.norm.mean()
        logits, *others = out
        loss = loss + sum(0.1 * x.mean() for x in others if isinstance(x, torch.Tensor))
    return loss + F.cross_entropy(logits, y)


def kinds(kind: Any, lay: Lay) -> list[Any]:
    model, out = Giving(kind), list[Any]()
    model, optimizer = lay(model, SGD(model.parameters()))
    for step in range(2):
        x, y = batch(step)
        out.append(stepped(loss_of(model(x), y), optimizer).item())
        with torch.no_grad():
            out.append(loss_of(model(x), y).item())
    return [*out, *model.parameters()]


def repackaged(hidden: Any) -> Any:
    """As in torch's example of a language model."""
    if isinstance(hidden, torch.Tensor):
        return hidden.detach()
    return tuple(repackaged(h) for h in hidden)


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.last = nn.LSTM(6, 5, 2, batch_first=True), net(5, 4)

    def forward(self, x: torch.Tensor, hidden: Any = None) -> tuple[torch.Tensor, Any]:
        out, hidden = self.cell(x.unsqueeze(1), hidden)
        return self.last(out.squeeze(1)), tuple(h.transpose(0, 1) for h in hidden)


def handed_on(lay: Lay) -> list[Any]:
    """A recurrent model's state, which goes from step to step."""
    model, out, hidden = Recurrent(), list[Any](), (torch.zeros(8, 2, 5), torch.zeros(8, 2, 5))
    model, optimizer = lay(model, SGD(model.parameters()))
    for step in range(3):
        x, y = batch(step)
        hidden = tuple(h.transpose(0, 1).contiguous() for h in repackaged(hidden))
        logits, hidden = model(x, hidden)
        out.append(stepped(F.cross_entropy(logits, y), optimizer).item())
    return [*out, *repackaged(hidden), *model.parameters()]


def hard_rows(lay: Lay) -> list[Any]:
    """A loss of as many rows as their values say, of which is asked what kind of thing they are."""
    model, out = net(), list[Any]()
    model, optimizer = lay(model, SGD(model.parameters()))
    for step in range(2):
        x, y = batch(step)
        losses = F.cross_entropy(model(x), y, reduction="none")
        hard = losses[losses > losses.detach().mean()]
        assert torch.is_tensor(hard) and hard.ndim == 1
        out.append(stepped(hard.clamp(min=torch.finfo(hard.dtype).tiny).mean(), optimizer).item())
    return [*out, *model.parameters()]


def asserted(lay: Lay) -> list[Any]:
    """What an output is said to be is looked at, where it is said."""
    model = lay(net(), None)[0]
    out = model(batch(0)[0])
    assert out.layout is torch.strided and not out.is_sparse
    torch.testing.assert_close(out, out.detach())
    torch._assert((out < 100).all(), "small")
    for wrong in (
        lambda: torch.testing.assert_close(out, out.detach() + 1),
        lambda: torch._assert((out > 100).all(), "large"),
    ):
        with pytest.raises(AssertionError):
            wrong()
    return [out.sum().item()]


class Nested(nn.Module):
    """Gives containers in containers, with what is no tensor among it."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = net()

    def forward(self, x: torch.Tensor) -> Any:
        logits = self.layers(x)
        return {"logits": logits, "aux": {"kl": None, "kind": "square", "parts": Pair(logits.square(), None)}}


def nested(lay: Lay) -> list[Any]:
    """A loss that asks what there is, deep within."""
    model, out = Nested(), list[Any]()
    model, optimizer = lay(model, SGD(model.parameters()))
    for step in range(2):
        x, y = batch(step)
        given = model(x)
        loss, aux = F.cross_entropy(given["logits"], y), given["aux"]
        if aux["kl"] is not None:
            loss = loss + 1
        if aux["parts"].norm is None and aux["kind"] == "square":
            loss = loss + 0.1 * aux["parts"].logits.mean()
        code = torch.distributions.MultivariateNormal(
            given["logits"], scale_tril=torch.eye(4), validate_args=False
        )
        loss = loss - 0.01 * code.log_prob(x[:, :4]).mean()  # sizes are compared there
        out.append(stepped(loss, optimizer).item())
    return [*out, *model.parameters()]


class Acts(NamedTuple):
    choice: Any
    by: Any
    opened: Any
    value: torch.Tensor


class Policy(nn.Module):
    """Gives distributions of torch's, of several kinds, and a number for each row, by names that much has."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(3)])
        self.head = nn.Linear(6, 8)

    def forward(self, x: torch.Tensor) -> Acts:
        a, b, c, value = self.head(self.body(x)).split((3, 2, 2, 1), 1)
        return Acts(
            torch.distributions.Categorical(logits=a),
            torch.distributions.Normal(b, F.softplus(c)),
            torch.distributions.Independent(torch.distributions.Normal(c, 1.0), 1),
            value.squeeze(1),
        )


def policies(lay: Lay) -> list[Any]:
    """A policy's gradient, and a code's divergence from a prior."""
    model, out = Policy(), list[Any]()
    model, optimizer = lay(model, SGD(model.parameters()))
    prior = torch.distributions.Normal(torch.zeros(2), torch.ones(2))
    for step in range(3):
        x, _ = batch(step)
        with torch.no_grad():
            action = model(x)[0].sample()
        choice, code, *_ = acts = model(x)
        joint, value = acts.opened, acts.value
        assert isinstance(choice, torch.distributions.Categorical)
        gain = (x[:, 0] - value.detach()) * choice.log_prob(action)
        loss = (value - x[:, 0]).square().mean() - gain.mean() - 0.1 * choice.entropy().mean()
        loss = loss + torch.distributions.kl_divergence(code, prior).sum(1).mean()
        loss = loss - 0.1 * joint.log_prob(x[:, :2]).mean() + 0.1 * acts.by.mean.square().mean()
        out += [stepped(loss, optimizer).item(), action.double()]
        with torch.no_grad():
            out += [model(x)[1].stddev, model(x)[0].probs]
    return [*out, *model.parameters()]


class Held:
    """A class of one's own, which has its tensors in a slot, and in another object's attribute."""

    __slots__ = ("inner", "logits")

    def __init__(self, logits: torch.Tensor, norm: torch.Tensor) -> None:
        self.logits, self.inner = logits, SimpleNamespace(norm=[norm], of=self, n=3)


class Kept(Held):
    def __reduce_ex__(self, protocol: Any) -> Any:
        raise TypeError("not to be copied")


def predicted(rank: int, world: int) -> None:
    """What an engine gives is plain, whatever it is in; a pipeline says what it cannot give."""
    x = batch(0)[0].float()
    torch.manual_seed(0)
    plain = Giving(Held)
    expected = plain(x)
    for plan in ({"data": 2}, {"tensor": 2}, {"data": 2, "zero": 3}, {"pipe": 2}):
        given = espalier.initialize(copy.deepcopy(plain), None, plan).predict(x)
        assert type(given) is Held and given.inner.of is given and given.inner.n == 3
        for value, whole in ((given.logits, expected.logits), (given.inner.norm[0], expected.inner.norm[0])):
            assert type(value) is torch.Tensor and torch.allclose(value, whole, atol=1e-6)
    with pytest.raises(TypeError, match="gives a Kept, which holds tensors, and cannot be copied"):
        espalier.initialize(Giving(Kept), None, {"pipe": 2}).predict(x)


def test_predictions_are_plain(ranks: Any) -> None:
    ranks(2, predicted)


def compared(rank: int, world: int) -> None:
    for kind in KINDS:
        program = partial(kinds, kind)
        program.__name__ = f"kinds of {kind.__name__}"  # type: ignore[attr-defined]
        compare(program, [({"pipe": 2}, {}), ({"pipe": 2, "accumulate": 2}, {}), ({"data": 2}, {})])
    for program in (policies, nested):
        compare(program, [({"pipe": 2}, {}), ({"pipe": 2, "accumulate": 2}, {})])
    for whole in (handed_on, hard_rows, asserted):
        compare(whole, [({"pipe": 2}, {}), ({"data": 2}, {})])


@pytest.mark.filterwarnings("ignore:A loss is one of all rows")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:__getitem__ has no sharding rule:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:Recurrent cannot be split:espalier.parallel.compose.UndividedWarning")
def test_kinds_of_outputs(ranks: Any) -> None:
    ranks(2, compared)
