"""Models that have methods, hooks and objects of their own around torch's: as on one process."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import weakref
from collections import OrderedDict
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Self

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrize, prune

import espalier
from tests.ranks.habits import Lay, batch, compare, loss_of, trained


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.head = nn.Linear(6, 8), nn.Linear(8, 4)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


class Trainer(Net):
    """Its ``train`` is no mode: it is a step, whose gradients come without a call of the model."""

    def train(self, x: Any = True, y: torch.Tensor | None = None) -> Any:  # type: ignore[override]
        return super().train(x) if y is None else F.cross_entropy(self.forward(x), y)


def steps_of_its_own(lay: Lay) -> list[Any]:
    torch.manual_seed(0)
    model: Any = Trainer()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    out: list[Any] = []
    for step in range(2):
        loss = model.train(*batch(step))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    assert model.train(False) is model and not model.training
    return [*out, *model.parameters()]


class Methods(Net):
    """Has its own of what a program calls."""

    evaluated = moved = zeroed = calls = 0

    def eval(self) -> Self:
        self.evaluated += 1
        return super().eval()

    def train(self, mode: bool = True) -> Self:
        super().train(mode)
        self.enter.requires_grad_(not mode)
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.zeroed += 1
        for p in self.parameters():
            if p.grad is not None:
                p.grad.mul_(0.5)

    def requires_grad_(self, requires_grad: bool = True) -> Self:
        self.blocks.requires_grad_(requires_grad)
        return self

    def to(self, *args: Any, **kwargs: Any) -> Self:
        self.moved += 1
        return super().to(*args, **kwargs)

    def apply(self, fn: Any) -> Self:
        self.head.apply(fn)
        return self

    def __call__(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        self.calls += 1
        return super().__call__(x) * scale  # type: ignore[no-any-return]

    def __enter__(self) -> Self:
        self.kept = {name: p.detach().clone() for name, p in self.named_parameters()}
        with torch.no_grad():
            for p in self.parameters():
                p.mul_(0.5)
        return self

    def __exit__(self, *error: Any) -> None:
        with torch.no_grad():
            for name, p in self.named_parameters():
                p.copy_(self.kept.pop(name))

    def __int__(self) -> int:
        return self.calls


def set_weight(m: nn.Module) -> None:
    if isinstance(m, nn.Linear):
        nn.init.constant_(m.weight, 0.05)


def methods_of_its_own(lay: Lay) -> list[Any]:
    model, out = Methods(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    assert isinstance(model, Methods) and isinstance(model, nn.Module)
    assert model.to(torch.float64) is model
    for step in range(4):
        model.train()
        model.requires_grad_(step != 2)
        x, y = batch(step)
        loss = F.cross_entropy(model(x, scale=1.5), y)
        loss.backward()
        optimizer.step()
        model.zero_grad()
        if step == 1:
            model.apply(set_weight)
        assert model.eval() is model and not model.training
        with torch.no_grad(), model as same:
            out += [loss.item(), loss_of(same, step).item()]
    out += [model.evaluated, model.moved, model.zeroed, int(model)]
    return [*out, nn.utils.parameters_to_vector(model.parameters())]


class Named(Net):
    """Its ``named_parameters()`` gives other names, and not all."""

    def named_parameters(self, *args: Any, **kwargs: Any) -> Any:
        for name, p in super().named_parameters(*args, **kwargs):
            if "head" not in name:
                yield name.replace("blocks", "layers"), p


def names_of_its_own(lay: Lay) -> list[Any]:
    model, out = Named(), []
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.1))
    for step in range(4):
        if step == 2:
            kept = {name: x.clone() for name, x in model.state_dict().items()}
        out.append(trained(model, optimizer, step).item())
    model.load_state_dict(kept)
    every = [*dict(model.named_parameters()).values(), *model.head.parameters()]
    return [*out, nn.utils.parameters_to_vector(every)]


class Versioned(nn.Module):
    """Says its version, writes a number, and takes it back."""

    _version = 2

    def __init__(self) -> None:
        super().__init__()
        self.w, self.k, self.was = nn.Parameter(torch.ones(8)), 3.0, 0

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        destination[f"{prefix}k"] = torch.tensor(self.k)

    def _load_from_state_dict(self, state: Any, prefix: str, notes: Any, *args: Any) -> None:
        self.k, self.was = float(state.pop(f"{prefix}k")), notes.get("version", 1)
        super()._load_from_state_dict(state, prefix, notes, *args)
        with torch.no_grad():
            self.w.mul_(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.w * self.k


class Renames(nn.Sequential):
    """Keeps its last layer alone, under another name."""

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        state = super().state_dict(*args, **kwargs)
        return OrderedDict((f"m.{name}", x) for name, x in state.items() if not name.startswith("0."))

    def load_state_dict(self, state: Any, strict: bool = False, **kwargs: Any) -> Any:  # type: ignore[override]
        own = {name.removeprefix("m."): x for name, x in state.items()}
        return super().load_state_dict(own, strict, **kwargs)


def hooked(model: nn.Sequential) -> list[Any]:
    """What hooks of state dicts find, which they add to."""
    seen: list[Any] = []
    model.register_state_dict_post_hook(lambda m, state, *_: state.update(more=torch.ones(2)))
    model.register_load_state_dict_pre_hook(lambda m, state, *_: seen.extend(state.pop("more").tolist()))
    model[2].register_load_state_dict_post_hook(lambda m, keys: seen.append(str(keys)))
    return seen


def state_dicts_of_its_own(lay: Lay) -> list[Any]:
    out: list[Any] = []
    for kind, held, missing, seen, version in ((nn.Sequential, 7, 0, 3, 2), (Renames, 4, 2, 0, 1)):
        model = kind(nn.Linear(6, 8), Versioned(), nn.Linear(8, 4))
        found = hooked(model) if seen else []
        model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.1))
        out.append(trained(model, optimizer, 0).item())
        kept = model.state_dict()
        for name in kept:
            kept[name] = kept[name].clone()
        assert len(kept) == held
        model[1].k = 1.0
        out.append(trained(model, optimizer, 1).item())
        given = model.load_state_dict(kept)
        assert len(given.missing_keys) == missing and len(found) == seen
        assert model[1].k == 3.0 and model[1].was == version
        out += [trained(model, optimizer, 2).item(), nn.utils.parameters_to_vector(model.parameters())]
    return out


class Star(Net):
    def forward(self, *inputs: torch.Tensor, scale: float = 1.0, **more: float) -> torch.Tensor:
        return super().forward(inputs[0]) * scale * more.get("t", 1.0)


class First(Net):
    def forward(self, x: torch.Tensor, /, *, scale: float = 1.0) -> torch.Tensor:
        return super().forward(x) * scale


def other_state_dicts(lay: Lay) -> list[Any]:
    """A program tries names, and gives others where torch refuses them."""
    model, out = Net(), []
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.1))
    for step in range(2):
        out.append(trained(model, optimizer, step).item())
        held = {f"net.{name}": x * 0.5 for name, x in model.state_dict().items()}
        held["net.head.weight"] = held["net.head.weight"][:, :2]
        try:
            model.load_state_dict(held)
        except RuntimeError:
            own = {name.removeprefix("net."): x for name, x in held.items() if "head" not in name}
            out.append(len(model.load_state_dict(own, strict=False).missing_keys))
    return [*out, nn.utils.parameters_to_vector(model.parameters())]


def arguments_without_names(lay: Lay) -> list[Any]:
    out: list[Any] = []
    for model, more in ((Star(), {"scale": 2.0, "t": 0.5}), (First(), {"scale": 2.0})):
        signature = inspect.signature(model.forward)
        model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
        assert inspect.signature(model.forward) == signature
        for step in range(2):
            x, y = batch(step)
            loss = F.cross_entropy(model(x, **more), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            out.append(loss.item())
        out.append(nn.utils.parameters_to_vector(model.parameters()))
    return out


@dataclasses.dataclass
class Options:
    temperature: float = 1.0
    inner: Any = None


class Slots:
    __slots__ = ("scale",)

    def __init__(self) -> None:
        self.scale = 1.0


class Configured(Net):
    """Reads objects that the program changes, and changes one."""

    def __init__(self) -> None:
        super().__init__()
        self.options = Options(inner=SimpleNamespace(factor=1.0))
        self.nested, self.slots = {"a": [{"b": 1.0}]}, Slots()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        factor = self.options.temperature * self.options.inner.factor * self.nested["a"][0]["b"]
        return super().forward(x) * factor * self.slots.scale


def options_in_objects(lay: Lay) -> list[Any]:
    model, out = Configured(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(5):
        if step == 1:
            model.options.temperature = 0.5
        elif step == 2:
            model.options.inner.factor = 0.7
        elif step == 3:
            model.nested["a"][0]["b"] = 2.0
        elif step == 4:
            model.slots.scale = 3.0
        out.append(trained(model, optimizer, step).item())
    return [*out, *model.state_dict().values()]


class Counts(nn.Module):
    def __init__(self, calls: Any) -> None:
        super().__init__()
        self.linear, self.calls = nn.Linear(6, 6), calls

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.n += 1
        self.calls.inner.temperature *= 1.1
        return x + self.linear(x).tanh() / self.calls.n / self.calls.inner.temperature


class CountsTwice(nn.Module):
    """Blocks that count in one object."""

    def __init__(self) -> None:
        super().__init__()
        calls = SimpleNamespace(n=0, inner=Options())
        self.blocks = nn.ModuleList(Counts(calls) for _ in range(2))
        self.head = nn.Linear(6, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)  # type: ignore[no-any-return]


def counts_in_objects(lay: Lay) -> list[Any]:
    model = CountsTwice()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    return [*[trained(model, optimizer, step).item() for step in range(3)], *model.state_dict().values()]


NUMBERS = {"global": 1.0}


class Numbers:
    temperature = 1.0


class ReadsNames(Net):
    """Reads what stands beside it under names."""

    factor = 1.0

    def __init__(self, closed: list[float]) -> None:
        super().__init__()
        self.scale = lambda: closed[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_names = NUMBERS["global"] * Numbers.temperature * type(self).factor
        return super().forward(x) * by_names * self.scale()


def change_by_name(step: int, kind: Any, closed: list[float]) -> None:
    """Another number each step, before the first as it was: a global, one of two classes, one closed over."""
    if step == 0:
        NUMBERS["global"], Numbers.temperature, kind.factor = 1.0, 1.0, 1.0
    elif step == 1:
        NUMBERS["global"] = 0.5
    elif step == 2:
        Numbers.temperature = 0.7
    elif step == 3:
        kind.factor = 2.0
    elif step == 4:
        closed[0] = 1.5


def numbers_by_names(lay: Lay) -> list[Any]:
    closed = [1.0]
    change_by_name(0, ReadsNames, closed)
    model, out = ReadsNames(closed), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(5):
        change_by_name(step, ReadsNames, closed)
        out.append(trained(model, optimizer, step).item())
    return [*out, *model.state_dict().values()]


class Reading(nn.Module):
    """A block that reads all of these."""

    factor = shadowed = 1.0

    def __init__(self, options: Any, closed: list[float]) -> None:
        super().__init__()
        self.linear, self.options, self.nested = nn.Linear(6, 6), options, {"a": [1.0]}
        self.scale = lambda: closed[0]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        by_names = NUMBERS["global"] * Numbers.temperature * type(self).factor * self.shadowed
        held = self.options.temperature * self.options.inner.temperature * self.nested["a"][0]
        return x + self.linear(x).tanh() * by_names * held * self.scale()


def numbers_of_blocks(lay: Lay) -> list[Any]:
    options, closed, out = Options(inner=Numbers()), [1.0], []
    change_by_name(0, Reading, closed)
    model = nn.Sequential(nn.Sequential(Reading(options, closed), Reading(options, closed)), nn.Linear(6, 4))
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(9):
        change_by_name(step, Reading, closed)
        if step == 5:
            options.temperature = 0.9
        elif step == 6:
            model[0][1].nested["a"][0] = 0.8
        elif step == 7:
            model[0][0].shadowed = 0.5
        elif step == 8:
            model[0][1].linear.forward = lambda x: 0.5 * x
        out.append(trained(model, optimizer, step).item())
    return [*out, *model.state_dict().values()]


class CountsByName(nn.Module):
    """A block that counts in an attribute of its class."""

    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        CountsByName.calls += 1
        return x + self.linear(x).tanh() / CountsByName.calls


class CountsItself(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        NUMBERS["calls"] += 1.0
        return super().forward(x) / NUMBERS["calls"]


def counts_by_names(lay: Lay) -> list[Any]:
    CountsByName.calls, NUMBERS["calls"], out = 0, 0.0, []
    blocks = nn.Sequential(nn.Sequential(CountsByName(), CountsByName()), nn.Linear(6, 4))
    for model in (blocks, CountsItself()):
        model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
        out += [trained(model, optimizer, step).item() for step in range(3)]
        out += [*model.state_dict().values()]
    return out


def hooks_of_outputs(lay: Lay) -> list[Any]:
    model, out = Net(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(4):
        x, y = batch(step)
        given = model(x)
        handle = given.register_hook(lambda grad: grad.clamp(-0.02, 0.02))
        loss = F.cross_entropy(given, y)
        loss.register_hook(lambda grad: 2 * grad)
        if step == 2:
            handle.remove()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        out.append(loss.item())
    return [*out, *model.state_dict().values()]


class Freezes(Net):
    def freeze(self, is_frozen: bool) -> Self:
        self.enter.requires_grad_(not is_frozen)
        return self


def methods_that_give_the_model(lay: Lay) -> list[Any]:
    model, out = Freezes(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    for step in range(3):
        model = model.freeze(step == 1)
        out.append(trained(model, optimizer, step).item())
    return [*out, *model.state_dict().values()]


def forwards_put_in_place(lay: Lay) -> list[Any]:
    """Before the first step, after it, and taken away."""
    model, out = Net(), []
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.1))
    before = model.forward
    model.forward = lambda x: 0.5 * before(x)
    out += [trained(model, optimizer, step).item() for step in range(2)]
    model.forward = lambda x: 2.0 * before(x)
    out.append(trained(model, optimizer, 2).item())
    model.forward = before
    out.append(trained(model, optimizer, 3).item())
    return [*out, *model.parameters()]


class Symmetric(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu() + x.triu(1).mT

    def right_inverse(self, x: torch.Tensor) -> torch.Tensor:
        return x.triu()


def states_put_in_place(lay: Lay) -> list[Any]:
    model, out = Net(), []
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.1))
    for step in range(4):
        out.append(trained(model, optimizer, step).item())
        if step == 0:
            with torch.no_grad():
                model.head.weight.set_(torch.full((4, 8), 0.1))
                parametrize.register_parametrization(model.blocks[1], "weight", Symmetric())
        for p in model.parameters():
            if step == 1:
                optimizer.state[p]["exp_avg"] = torch.zeros_like(p)
            elif step == 2:
                optimizer.state[p]["exp_avg_sq"] = torch.full(p.shape, 0.1)
    return [*out, *model.parameters()]


PROGRAMS = (
    numbers_by_names,
    numbers_of_blocks,
    counts_by_names,
    hooks_of_outputs,
    methods_that_give_the_model,
    forwards_put_in_place,
    states_put_in_place,
    steps_of_its_own,
    methods_of_its_own,
    names_of_its_own,
    state_dicts_of_its_own,
    other_state_dicts,
    arguments_without_names,
    options_in_objects,
    counts_in_objects,
)
UNSTAGED = (steps_of_its_own, forwards_put_in_place, states_put_in_place)
PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 3, "recompute": "full", "offload": {"states": "host"}},
    {"tensor": 2},
    {"pipe": 2},
)


def compared(rank: int, world: int, at: int) -> None:
    program = PROGRAMS[at]
    plans: list[tuple[dict[str, Any], dict[str, Any]]] = [(plan, {}) for plan in PLANS]
    if program in UNSTAGED:
        plans = [each for each in plans if "pipe" not in each[0]]
    if program is counts_by_names:
        plans = [each for each in plans if "recompute" not in each[0]]  # such numbers advance twice in it
    if program is numbers_of_blocks:
        plans += [(plan, {"compile": "eager"}) for plan in PLANS if plan in ({"tensor": 2}, PLANS[0])]
    compare(program, plans)


@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore::espalier.parallel.compose.UndividedWarning")
@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
@pytest.mark.parametrize("at", range(len(PROGRAMS)), ids=[program.__name__ for program in PROGRAMS])
def test_as_on_one_process(ranks: Any, at: int) -> None:
    ranks(2, compared, at)


def told(rank: int, world: int) -> None:
    """What stages cannot do of it is told with what to write, also where it was dropped in silence once."""
    model: Any = espalier.prepare(Net(), plan={"data": 2})
    with pytest.raises(ValueError, match=r"stays in torch\.float32(.|\n)*before espalier\.prepare"):
        model.to("cpu", torch.float64)
    model = espalier.prepare(Net(), plan={"data": 2, "precision": "bfloat16"})
    with pytest.warns(UserWarning, match=r"stays in torch\.bfloat16(.|\n)*the plan says precision"):
        model.float()
    plain = Net()
    x, y = batch(0)
    model = espalier.prepare(copy.deepcopy(plain), plan={"pipe": 2})
    assert model.double() is model  # until its first batch
    expected = F.cross_entropy(plain.double()(x), y).item()
    assert F.cross_entropy(model(x), y).item() == pytest.approx(expected, abs=1e-12)
    with pytest.raises(ValueError, match=r"stays in torch\.float64"):
        model.half()
    model = Net()
    model, _ = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan={"pipe": 2})
    x, y = (value.float() if value.is_floating_point() else value for value in batch(0))
    given = model(x)
    with pytest.raises(TypeError, match=r"x\.retain_grad(.|\n)*register_hook"):
        given.retain_grad()
    with pytest.raises(NotImplementedError, match=r"before espalier\.prepare"):
        model.forward = lambda x: x
    state = {"weight": torch.ones(4, 8), "bias": torch.zeros(4)}
    model.head.load_state_dict(state, assign=True)
    with pytest.raises(ValueError, match=r"'head\.weight', 'head\.bias' came later(.|\n)*p\.data = value"):
        F.cross_entropy(model(x), y).backward()


def steps_replaced(rank: int, world: int) -> None:
    """What a program has put around a step sees whole gradients, or is told when to put it there."""

    def halved(optimizer: torch.optim.Optimizer, seen: list[float]) -> None:
        own = optimizer.step

        def step(*args: Any, **options: Any) -> Any:
            held = [p for group in optimizer.param_groups for p in group["params"]]
            seen.append(float(torch.stack([p.grad.norm() for p in held]).norm()))
            with torch.no_grad():
                for p in held:
                    p.grad.mul_(0.5)
            return own(*args, **options)

        optimizer.step = step  # type: ignore[method-assign]

    results = []
    for plan in (None, {"data": 2, "zero": 2}, {"tensor": 2}):
        torch.manual_seed(0)
        model: Any = Net()
        optimizer = torch.optim.SGD(model.parameters(), 0.1)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # has put something around it
        norms: list[float] = []
        if plan is not None:
            model, optimizer = espalier.prepare(model, optimizer, plan=plan)
        halved(optimizer, norms)
        for step in range(2):
            trained(lambda x, model=model: model(x.float()), optimizer, step)  # type: ignore[arg-type]
        schedule.step()
        whole = [espalier.full_tensor(p).detach().flatten() for p in model.parameters()]
        results.append(torch.cat([torch.tensor(norms), *whole]))
        other = Net()
        optimizer = torch.optim.SGD(other.parameters(), 0.1)
        halved(optimizer, norms)
        if plan is not None:
            with pytest.raises(ValueError, match="Replace it afterwards"):
                espalier.prepare(other, optimizer, plan=plan)
    for found in results[1:]:
        assert (found - results[0]).abs().max() < 1e-5


class Ordered(Net):
    """Calls its blocks in an order that changes."""

    order = (0, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for i in self.order:
            x = x + self.blocks[i](x).tanh()
        return self.head(x)  # type: ignore[no-any-return]


ASIDE: list[torch.Tensor] = []


class PutsAside(Net):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        ASIDE.append(x.square().mean())
        return self.head(x)  # type: ignore[no-any-return]


def other_orders(rank: int, world: int) -> None:
    """Modules that are called in another order, and tensors for a loss that come too late."""
    model: Any = Ordered()
    plan = {"pipe": 2, "cuts": ("blocks.1",)}
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    trained(lambda x: model(x.float()), optimizer, 0)  # type: ignore[arg-type]
    model.order = (1, 0)
    with pytest.raises(ValueError, match=r"is used in stage [01] this time(.|\n)*call them in one order"):
        trained(lambda x: model(x.float()), optimizer, 1)  # type: ignore[arg-type]
    late: Any = espalier.prepare(PutsAside(), plan={"pipe": 2})
    with pytest.warns(UserWarning, match="puts tensors into 'ASIDE'"):
        F.cross_entropy(late(batch(0)[0].float()), batch(0)[1]).backward()


@pytest.mark.filterwarnings("ignore::espalier.parallel.compose.UndividedWarning")
def test_other_orders_and_what_comes_too_late(ranks: Any) -> None:
    ranks(2, other_orders)


@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:Seems like `optimizer.step..` has been overridden")
def test_steps_that_a_program_replaces(ranks: Any) -> None:
    ranks(2, steps_replaced)


def test_what_stages_cannot_do_is_told(ranks: Any) -> None:
    ranks(2, told)


def masks(rank: int, world: int) -> None:
    """A weight that a hook sets, as pruning does, is on all ranks what it is in its stage."""
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    prune.l1_unstructured(model[0], "weight", 0.3)
    model, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.5), plan={"pipe": 2})
    for step in range(2):
        x, y = batch(step)
        loss = F.cross_entropy(model(x.float()), y)
        optimizer.zero_grad()
        loss.backward()
        before = espalier.full_tensor(model[0].weight_orig * model[0].weight_mask).detach().clone()
        optimizer.step()
    held = model[0].weight.detach()
    assert type(held) is torch.Tensor and torch.equal(held, before)


@pytest.mark.filterwarnings("ignore:A value is asked for that lies on ranks:espalier.GatherWarning")
def test_weights_that_hooks_set(ranks: Any) -> None:
    ranks(2, masks)


def weakly_held(rank: int, world: int) -> None:
    model = Net()
    held = [weakref.ref(p) for p in model.parameters()]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    laid, optimizer = espalier.prepare(model, optimizer, plan={"pipe": 2})
    trained(lambda x: laid(x.float()), optimizer, 0)  # type: ignore[arg-type]
    assert all(of() is p for of, p in zip(held, laid.parameters(), strict=True))


def test_weak_references_to_parameters(ranks: Any) -> None:
    ranks(2, weakly_held)


def saved_and_loaded(rank: int, world: int, folder: Path) -> None:
    """Checkpoints and weights in files go by a model's own ways, too; a pickle has the plain model."""
    for plan in ({"data": 2, "zero": 3}, {"pipe": 2}):
        losses = []
        for is_loaded in (False, True):
            torch.manual_seed(0)
            model: Any = nn.Sequential(nn.Linear(6, 8), Versioned(), Named())
            model[2].enter = nn.Linear(8, 8)
            optimizer = torch.optim.Adam(model.parameters(), 0.1)
            model, optimizer = espalier.prepare(model, optimizer, plan=plan, example=batch(0)[0].float())
            place = folder / "-".join(map(str, plan))
            if is_loaded:
                model[1].k = 1.0
                model.engine.load(place)
            else:
                trained(_of_single(model), optimizer, 0)
                model[1].k = 2.0
                model.engine.save(place)
                with torch.no_grad():
                    model[1].w.mul_(0.5)  # as it does when it is loaded
            assert model[1].k == 2.0
            losses.append(trained(_of_single(model), optimizer, 1).item())
            torch.save(model, folder / f"model-{rank}")
            read = torch.load(folder / f"model-{rank}", weights_only=False)
            assert type(read) is nn.Sequential and read[1].k == model[1].k
            assert torch.equal(read[1].w, model.engine.full_state_dict()["1.w"])
        assert losses[0] == pytest.approx(losses[1], abs=1e-6)
        file, w = folder / f"weights-{rank}", model.state_dict()["1.w"].clone()
        torch.save(model.state_dict(), file)
        model[1].k = 5.0
        model.engine.load_weights(file)
        assert model[1].k == 2.0 and torch.equal(model.state_dict()["1.w"], w / 2)


def _of_single(model: nn.Module) -> Any:
    return lambda x: model(x.float())


def test_files(ranks: Any, tmp_path: Path) -> None:
    ranks(2, saved_and_loaded, tmp_path)
