"""Hooks that look at modules of a pipeline, in plain loops: on all ranks, with numbers of one process."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import offload_wrapper

import espalier
from espalier.parallel.pipeline.observed import only_looks
from tests.ranks.habits import Lay, compare, stepped

TOLERANCE = 1e-9
pytestmark = pytest.mark.filterwarnings(
    "ignore:A value is asked for that lies on ranks:espalier.GatherWarning"
)


def net() -> nn.Sequential:
    return nn.Sequential(*[nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)], nn.Linear(6, 4))


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, (8,), generator=generator)


def laid(lay: Lay, model: nn.Module) -> tuple[Any, Any]:
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    return model, optimizer


def features(lay: Lay) -> list[Any]:
    """A loss hangs on what modules of each stage give and are given: of a student, and of its teacher."""
    model, teacher = net(), net().requires_grad_(False)
    found, wanted, out = dict[str, Any](), dict[str, Any](), list[Any]()

    def keep(name: str, into: dict[str, Any]) -> Callable[..., None]:
        def hook(module: nn.Module, args: Any, given: Any) -> None:
            into[name] = given
            into[f"into {name}"] = args[0]

        return hook

    for name in ("0", "1.1", "3.0"):
        model.get_submodule(name).register_forward_hook(keep(name, found))
        teacher.get_submodule(name).register_forward_hook(keep(name, wanted))
    model, optimizer = laid(lay, model)
    for step in range(3):
        x, y = batch(step)
        teacher(x)
        loss = F.cross_entropy(model(x), y)
        loss = loss + sum(F.mse_loss(found[name], wanted[name]) for name in wanted if name != "into 0")
        loss = loss + 0.1 * found["1.1"].abs().mean() * found["into 3.0"].square().sum()
        out.append(stepped(loss, optimizer).item())
        out += [found["0"].detach().clone(), found["into 3.0"].norm().item()]
    return [*out, *model.parameters()]


def features_alone(lay: Lay) -> list[Any]:
    """The loss is of features, and of nothing that the model gives."""
    model, found, out = net(), list[Any](), list[Any]()
    model, optimizer = laid(lay, model)
    handle = model[1].register_forward_hook(lambda module, args, given: found.append(given))
    for step in range(2):
        model(batch(step)[0])
        loss = found[-1].square().mean() + found[-1][:, 0].abs().sum()
        loss.backward()
        out.append(loss.item())
        optimizer.step()
        optimizer.zero_grad()
    handle.remove()
    out.append(stepped(F.cross_entropy(model(batch(3)[0]), batch(3)[1]), optimizer).item())
    assert len(found) == 2
    return [*out, *model.parameters()]


def maps(lay: Lay) -> list[Any]:
    """Where a class's score comes from: gradients of features, by hooks of three kinds."""
    model, out = net(), list[Any]()
    model, optimizer = laid(lay, model)
    out.append(stepped(F.cross_entropy(model(batch(0)[0]), batch(0)[1]), optimizer).item())
    values, gradients = dict[str, Any](), dict[str, Any]()

    def forward(module: nn.Module, args: Any, given: Any) -> None:
        values["hooked"] = given.detach()
        given.register_hook(lambda grad: gradients.update(hooked=grad))

    def retained(module: nn.Module, args: Any, given: Any) -> None:
        values["retained"] = given
        given.retain_grad()

    def backward(module: nn.Module, into: Any, of: Any) -> None:
        gradients["of"], gradients["into"] = of[0].detach(), into[0].detach()

    handles = [model[0].register_forward_hook(forward), model[2].register_forward_hook(retained)]
    handles += [model[i].register_full_backward_hook(backward) for i in (1, 3)]
    model.eval()
    for step in range(2):
        gradients.clear()
        score = model(batch(step)[0])
        score[:, 1].mean().backward()
        gradients["retained"] = values["retained"].grad
        out += [gradients[name] for name in sorted(gradients)]
        out.append((values["hooked"] * gradients["hooked"]).sum(1).relu())
        optimizer.zero_grad()
    for handle in handles:
        handle.remove()
    return [*out, model(batch(1)[0]).detach(), *model.parameters()]


def statistics(lay: Lay) -> list[Any]:
    """Counters and means, each called as often as on one process; of a call without gradients, too."""
    model, seen, counts = net(), list[float](), {"flops": 0, "calls": 0}

    def count(module: nn.Module, args: Any, given: Any) -> None:
        counts["calls"] += 1
        if isinstance(module, nn.Linear):
            counts["flops"] += args[0].numel() * module.out_features
        module.seen += given.shape[0]

    for module in model.modules():
        module.register_buffer("seen", torch.zeros(()))
    first = model[0].register_forward_hook(
        lambda m, args, given: seen.append(given.detach().abs().mean().item())
    )
    model.register_forward_hook(count)
    model, optimizer = laid(lay, model)
    handles = [m.register_forward_hook(count) for m in model.modules() if not [*m.children()]]
    with torch.no_grad():
        model(batch(0)[0])
    for handle in handles:
        handle.remove()
    losses = [stepped(F.cross_entropy(model(batch(s)[0]), batch(s)[1]), optimizer).item() for s in range(2)]
    first.remove()
    losses.append(stepped(F.cross_entropy(model(batch(2)[0]), batch(2)[1]), optimizer).item())
    assert len(seen) == 3 and counts["calls"] == 13
    return [*seen, *losses, counts["flops"], *model.buffers(), *model.parameters()]


PROGRAMS = features, features_alone, maps, statistics
PLANS: dict[int, list[dict[str, Any]]] = {
    2: [
        {"pipe": 2},
        {"pipe": 2, "accumulate": 2},
        {"pipe": 2, "recompute": "full"},
        {"pipe": 2, "accumulate": 4, "stages_per_rank": 2, "schedule": "interleaved"},
    ],
    4: [{"pipe": 2, "data": 2}, {"pipe": 2, "data": 2, "zero": 3, "accumulate": 2}, {"pipe": 2, "tensor": 2}],
}


def compared(rank: int, world: int) -> None:
    for program in PROGRAMS:
        compare(program, [(plan, {}) for plan in PLANS[world]], TOLERANCE)


@pytest.mark.filterwarnings("ignore:Modules have forward hooks")
@pytest.mark.filterwarnings("ignore:A loss is one of all rows")
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.parametrize("world", [2, 4])
def test_hooks_that_look(ranks: Any, world: int) -> None:
    ranks(world, compared)


class Waits(nn.Module):
    """Waits for other ranks, and asks them for a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, ranks = self.linear(x), 1
        mean = x.detach().mean()
        if dist.is_initialized():
            dist.barrier()
            dist.all_reduce(mean)
            ranks = dist.get_world_size()
            dist.barrier(async_op=True).wait()
        return x - mean / ranks


class Barrier(Waits):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if dist.is_initialized():
            dist.barrier()
        return self.linear(x)


def waiting(lay: Lay) -> list[Any]:
    model, out = nn.Sequential(net()[:2], Waits(), nn.Sequential(Barrier(), nn.Tanh()), net()), list[Any]()
    model, optimizer = laid(lay, model)
    for step in range(2):
        x, y = batch(step)
        out.append(stepped(F.cross_entropy(model(x), y), optimizer).item())
    return [*out, *model.parameters()]


def waits(rank: int, world: int) -> None:
    compare(waiting, [({"pipe": 2}, {})], TOLERANCE)
    compare(bounded, [({"pipe": 2}, {})], TOLERANCE)


@pytest.mark.filterwarnings("ignore:Outputs of two calls of the model meet in a loss")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:torch.distributed.all_reduce of a DTensor")
def test_barriers_and_bounds_in_stages(ranks: Any) -> None:
    ranks(2, waits)


def several(lay: Lay) -> list[Any]:
    """A hook of several gradients at once, and one of whichever comes first; blocks that save on the host."""
    model, norms, firsts, out = net(), list[float](), list[int](), list[Any]()
    model[1], model[3] = offload_wrapper(model[1]), offload_wrapper(model[3])
    model, optimizer = laid(lay, model)
    handles = [
        torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda grads: norms.append(sum(g.square().sum().item() for g in grads))
        ),
        torch.autograd.graph.register_multi_grad_hook(
            list(model.parameters()), lambda grad: firsts.append(1), mode="any"
        ),
    ]
    for step in range(3):
        if step == 2:
            for handle in handles:
                handle.remove()
        x, y = batch(step)
        out.append(stepped(F.cross_entropy(model(x), y), optimizer).item())
    assert len(norms) == len(firsts) == 2
    return [*out, *norms, *model.parameters()]


@dataclass
class Listener:
    """It has no hash."""

    name: str


class Clamps(nn.Module):
    """Gradients of what it gives are bounded."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.listeners = nn.Linear(6, 6), list[Any]()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        if x.requires_grad:
            x.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
        return x.tanh()


def bounded(lay: Lay) -> list[Any]:
    """Hooks of activations that are not linear see the gradient of a whole sum: of terms and of calls."""
    model, scale, out = (
        nn.Sequential(Clamps(), Clamps(), Clamps()),
        nn.Parameter(torch.tensor(0.3)),
        list[Any](),
    )
    model, optimizer = lay(model, torch.optim.SGD([*model.parameters(), scale], 0.5))
    for step in range(3):
        x, y = batch(step)
        one = model(x)
        if step == 0:
            loss = torch.exp(-scale) * F.cross_entropy(one, y) + scale * one.square().mean()
        elif step == 1:
            other = model(0.5 * x)
            loss = F.cross_entropy(one, y) + F.cross_entropy(other, y) + F.mse_loss(one, other)
        else:
            loss = F.cross_entropy(one, y) + model(one).square().mean()
        out.append(stepped(loss, optimizer).item())
        model[1].listeners.append(Listener("bounds"))  # it was empty
    return [*out, scale, *model.parameters()]


class Encoder(nn.Module):
    """In evaluation torch's layers go another way where no gradients are recorded: padded places are zero."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(6, 2, 8, dropout=0.0, batch_first=True)
        self.inner, self.last = nn.TransformerEncoder(layer, 2), nn.Linear(6, 4)

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        return self.last(self.inner(x, src_key_padding_mask=mask).mean(1))


def padded(lay: Lay) -> list[Any]:
    model, out = Encoder(), list[Any]()
    mask = torch.arange(5)[None] >= torch.tensor([5, 4, 3, 5, 2, 5, 4, 1])[:, None]
    model, optimizer = laid(lay, model)
    for step in range(2):
        _, y = batch(step)
        x = torch.randn(8, 5, 6, generator=torch.Generator().manual_seed(step))
        out.append(stepped(F.cross_entropy(model(x, mask), y), optimizer).item())
        model.eval()
        out.append(F.cross_entropy(model(x, mask), y).item())
        with torch.no_grad():
            out.append(F.cross_entropy(model(x, mask), y).item())
        model.train()
    return [*out, *model.parameters()]


def saved(rank: int, world: int) -> None:
    for program in (several, padded):
        compare(program, [({"pipe": 2}, {}), ({"pipe": 2, "accumulate": 2}, {})], TOLERANCE)


@pytest.mark.filterwarnings("ignore:.*nested tensors")
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.filterwarnings("ignore:.*Encoder cannot be split:espalier.parallel.compose.UndividedWarning")
def test_hooks_of_several_gradients_and_values_that_are_asked_for(ranks: Any) -> None:
    ranks(2, saved)


def told(rank: int, world: int) -> None:
    model, kept = net().double(), dict[str, Any]()

    def writes(module: nn.Module, args: Any, given: Any) -> None:
        given.mul_(2)

    model, _ = laid(partial(espalier.prepare, plan={"pipe": 2}), model)
    x, _ = batch(0)
    handle = model[1].register_forward_hook(writes)
    for grad in (True, False):
        with torch.set_grad_enabled(grad), pytest.raises(TypeError, match=r"writes to(.|\n)*only looks"):
            model(x)
    handle.remove()

    def changes(module: nn.Module, args: Any, given: Any) -> None:
        given.register_hook(lambda grad: 2 * grad)
        kept["given"] = given

    handle = model[1].register_forward_hook(changes)
    with pytest.raises(TypeError, match=r"gives another gradient"):
        model(x).sum().backward()
    handle.remove()


@pytest.mark.filterwarnings("ignore:Modules have forward hooks")
def test_hooks_that_do_more_are_told(ranks: Any) -> None:
    ranks(2, told)


class Doubling:
    """Its name says that nothing is given back."""

    def update(self, x: torch.Tensor) -> torch.Tensor:
        return x * 2


def apart(rank: int, world: int) -> None:
    """Hooks of one rank, and one whose code does not say what it does."""
    torch.manual_seed(0)
    before, seen = torch.get_default_dtype(), list[Any]()
    torch.set_default_dtype(torch.float64)
    try:
        plain = net()
        x, y = batch(0)
        expected = F.cross_entropy(plain(x), y).item()
        if rank == 0:
            plain[0].register_forward_hook(lambda module, args, out: seen.append(out))
        model = espalier.prepare(plain, plan={"pipe": 2})
        alone = pytest.warns(UserWarning, match="on this rank, and not on all") if not rank else nullcontext()
        began = time.monotonic()
        with alone:  # all come to the first call: nobody waits
            loss = F.cross_entropy(model(x), y)
        assert abs(loss.item() - expected) < TOLERANCE and time.monotonic() - began < 30
        loss.backward()
        assert bool(seen) == (rank == 0)
        if rank == 0:
            plain[2].register_forward_hook(lambda module, args, out: seen.append(out))
        alone = pytest.warns(UserWarning, match="on this rank, and not on all") if not rank else nullcontext()
        with patch("espalier.engine.observing._WAIT_AGAIN", timedelta(seconds=1)), alone:
            loss = F.cross_entropy(model(x), y)
        loss.backward()
        doubled = net()
        doubled[2].register_forward_hook(lambda module, args, out: Doubling().update(out))
        with pytest.raises(TypeError, match="has given something back"):
            espalier.prepare(doubled, plan={"pipe": 2})(x)
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:Modules have forward hooks")
def test_hooks_of_one_rank_and_those_that_hide_what_they_do(ranks: Any) -> None:
    ranks(2, apart)


def removed(rank: int, world: int) -> None:
    """A hook that all ranks had, and one has no more."""
    torch.manual_seed(0)
    before, seen = torch.get_default_dtype(), list[Any]()
    torch.set_default_dtype(torch.float64)
    try:
        plain = net()
        expected = [F.cross_entropy(plain(x), y).item() for x, y in map(batch, range(3))]
        model = espalier.prepare(plain, plan={"pipe": 2})
        handle = plain[0].register_forward_hook(lambda module, args, out: seen.append(out.sum().item()))
        for step in range(3):
            x, y = batch(step)
            if step == 1 and rank == 1:
                handle.remove()
            told = nullcontext() if step != 1 else pytest.warns(UserWarning, match="removed on some ranks")
            with told:
                loss = F.cross_entropy(model(x), y)
            assert abs(loss.item() - expected[step]) < TOLERANCE
            loss.backward()
            assert step or len(seen) == 1
    finally:
        torch.set_default_dtype(before)


@pytest.mark.filterwarnings("ignore:Modules have forward hooks")
def test_hooks_removed_on_one_rank_are_told_at_once(ranks: Any) -> None:
    ranks(2, removed)


def test_what_only_looks_is_read_of_code() -> None:
    found: dict[str, Any] = {}

    class Keeps:
        def __call__(self, module: Any, args: Any, out: Any) -> None:
            self.out = out

        def keep(self, module: Any, args: Any, out: Any) -> None:
            if out is not None:
                return
            self.out = args

        def halve(self, module: Any, args: Any, out: Any) -> Any:
            return out / 2

    def named(name: str, module: Any, args: Any, out: Any) -> None:
        found[name] = out.detach()

    looks = [
        Keeps(),
        Keeps().keep,
        partial(named, "a"),
        lambda module, args, out: found.update(out=out),
        lambda module, args, out: found.__setitem__("out", out.detach().abs().mean()),
    ]
    others = [
        Keeps().halve,
        lambda module, args, out: out * 2,
        lambda module, args, out: found.get("out"),
        lambda module, args, out: (found.update(out=out), out)[1],
        lambda module, args, out: found.update(out=out) or out,
    ]
    assert all(map(only_looks, looks)) and not any(map(only_looks, others))
