"""Optimizers of the program's own, updated apart: as offloaded chunks, and as stages of a pipeline."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.parallel.apart import makes_one_of_all, updates_each_alone, use_of_closure
from tests.ranks.habitual import Lookahead
from tests.ranks.test_sums_of_losses import layers

TOLERANCE = 1e-10
Params = Any


class Own(torch.optim.Optimizer):
    """Momentum by hand."""

    def __init__(self, params: Params, lr: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "d": 0.5})

    @property
    def held(self) -> list[tuple[dict[str, Any], torch.Tensor]]:
        pairs = [(group, p) for group in self.param_groups for p in group["params"]]
        return [(group, p) for group, p in pairs if p.grad is not None]

    def factor(self) -> Any:
        return 1.0

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        factor = self.factor()
        for group, p in self.held:
            state = self.state[p]
            state.setdefault("m", torch.zeros_like(p)).mul_(0.9).add_(p.grad)  # type: ignore[arg-type]
            p.add_(state["m"] * (factor * group["lr"]), alpha=-1.0)


class Limited(Own):
    """By the norm of all gradients."""

    def factor(self) -> Any:
        squares = [(p.grad**2).sum() for _, p in self.held]  # type: ignore[operator]
        return (0.2 / (sum(squares, torch.zeros(())).sqrt() + 1e-6)).clamp(max=1.0)


class Estimating(Own):
    """By a number of all that goes from step to step in the options."""

    def factor(self) -> Any:
        total = sum((p.grad * p).sum().item() for _, p in self.held)  # type: ignore[operator]
        for group in self.param_groups:
            group["d"] = 0.9 * group["d"] + 0.01 * total
        return 1.0 + self.param_groups[0]["d"] if self.param_groups else 1.0


class Counting(Own):
    """By how often it was called, which it notes in a list."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.calls: list[int] = []

    def factor(self) -> Any:
        self.calls.append(len(self.calls))
        return 1.0 / len(self.calls)


class Listing(Own):
    """Keeps tensors in the order of the parameters."""

    def __init__(self, params: Params) -> None:
        super().__init__(params)
        self.means = [torch.zeros_like(p) for group in self.param_groups for p in group["params"]]

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        every = [p for group in self.param_groups for p in group["params"]]
        for mean, p in zip(self.means, every, strict=True):
            if p.grad is not None:
                p.sub_(mean.lerp_(p.grad, 0.3), alpha=0.1)


def averaging(params: Params) -> torch.optim.Optimizer:
    """Around another."""
    return Lookahead(torch.optim.Adam(params, 0.05))


class Counted(Own):
    """By a count of its own, which is a number: each update of a part finds the same."""

    calls = 0

    def factor(self) -> Any:
        self.calls += 1
        return 1.0 / self.calls


class Stacked(Own):
    """Computes with all parameters of a shape at once."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        of_shape: dict[tuple[int, ...], list[torch.Tensor]] = {}
        for _, p in self.held:
            of_shape.setdefault(tuple(p.shape), []).append(p)
        for shape, params in of_shape.items():
            grads = torch.stack([p.grad for p in params])  # type: ignore[misc]
            if len(shape) == 2:
                grads = grads @ grads.mT @ grads / (grads.flatten(1).norm(dim=1)[:, None, None] ** 2 + 1e-12)
            for p, grad in zip(params, grads, strict=True):
                p.sub_(grad, alpha=0.1)


class Clipping(Own):
    """By torch's function, which takes the norm over all stages."""

    def factor(self) -> Any:
        nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 0.2)
        return 1.0


class Noisy(Own):
    def factor(self) -> Any:
        return 1.0 + 0.5 * torch.rand(())


class Faint(Own):
    """By the norm of all gradients, of which little is felt."""

    def factor(self) -> Any:
        return 1.0 + 1e-4 * sum((p.grad**2).sum().sqrt() for _, p in self.held)  # type: ignore[operator]


class Growing(Own):
    """By an estimate of all that grows where gradients stay as they are, and else not."""

    def factor(self) -> Any:
        pairs = [(self.state[p].get("m"), p.grad.sign()) for _, p in self.held]  # type: ignore[union-attr]
        ways = [(m.sign() * sign).mean().item() for m, sign in pairs if m is not None]
        for group in self.param_groups:
            group["d"] *= 1.1 if ways and sum(ways) / len(ways) > 0.9 else 1.0
        return self.param_groups[0]["d"]


class Reaching(Own):
    """By how far all have come: at a small learning rate that is seen after many steps alone."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, lr=1e-5)

    def factor(self) -> Any:
        for _, p in self.held:
            self.state[p].setdefault("first", p.detach().clone())
        moved = [(self.state[p]["first"] - p).abs().max().item() for _, p in self.held]
        return max(1.0, *moved)


class Drawing(Own):
    """By random numbers for each parameter."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for _, p in self.held:
            p.sub_(p.grad * (1.0 + torch.rand(())), alpha=0.1)  # type: ignore[operator]


class Aside(torch.optim.Optimizer):
    """Sharpness-aware: the gradient of a place beside, of another optimizer."""

    def __init__(self, params: Params) -> None:
        super().__init__(params, {"rho": 0.05})
        self.base = torch.optim.SGD(self.param_groups, 0.1, momentum=0.9)
        self.param_groups = self.base.param_groups

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        assert closure is not None, "it requires a closure"
        held = [p for group in self.param_groups for p in group["params"]]
        norm = torch.stack([p.grad.norm() for p in held]).norm()  # type: ignore[union-attr]
        aside = [p.grad * (0.05 / (norm + 1e-12)) for p in held]  # type: ignore[operator]
        for p, way in zip(held, aside, strict=True):
            p.add_(way)
        self.zero_grad()
        with torch.enable_grad():
            loss = closure()
        for p, way in zip(held, aside, strict=True):
            p.sub_(way)
        self.base.step()
        return loss


class Asking(Own):
    """By the loss itself."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        with torch.enable_grad():
            loss = closure()
        for _, p in self.held:
            p.sub_(p.grad, alpha=0.1 * min(float(loss.detach()), 0.5))
        return loss


class Polyak(Asking):
    """By the loss, and the norm of all gradients."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        with torch.enable_grad():
            loss = closure()
        norm = sum(p.grad.square().sum() for _, p in self.held)
        for _, p in self.held:
            p.sub_(p.grad, alpha=float(loss.detach()) / float(norm + 1.0))
        return loss


ALONE = (Own, Counted, Stacked)
TOGETHER = (Limited, Estimating, Counting, Listing, averaging, Clipping)
OF_ALL = (Limited, Estimating)
TRIED = (Faint, Growing, Reaching, Drawing)
KINDS: tuple[Callable[[Params], torch.optim.Optimizer], ...] = (*ALONE, *TOGETHER)


def sharp(plan: dict[str, Any] | None) -> torch.Tensor:
    """Sharpness-aware steps by hand: micro-batches at a place beside, once gradients were dropped."""
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
    optimizer = torch.optim.SGD(model.parameters(), 0.1, momentum=0.9)
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan)
    held = list(model.parameters())

    def go_back(step: int) -> None:
        x, y = batch(step)
        for rows in (slice(0, len(y) // 2), slice(len(y) // 2, None)):
            loss = nn.functional.cross_entropy(model(x[rows]), y[rows])
            (loss / 2 if plan is None else loss).backward()

    for step in range(3):
        go_back(step)
        with torch.no_grad():
            norm = torch.stack([p.grad.norm() for p in held]).norm()  # type: ignore[union-attr]
            ways = [p.grad * (0.05 / norm) for p in held]  # type: ignore[operator]
            for p, way in zip(held, ways, strict=True):
                p.add_(way)
        optimizer.zero_grad()
        go_back(step)
        with torch.no_grad():
            for p, way in zip(held, ways, strict=True):
                p.sub_(way)
        optimizer.step()
        optimizer.zero_grad()
    return torch.cat([espalier.full_tensor(p).detach().flatten() for p in held])


def by_closures(rank: int, world: int) -> None:
    torch.set_default_dtype(torch.float64)
    plans: list[dict[str, Any]] = [
        {"data": 2},
        {"data": 2, "zero": 1},
        {"data": 2, "zero": 3},
        {"tensor": 2},
        {"pipe": 2},
        {"pipe": 2, "accumulate": 2},
    ]
    try:
        for kind in (Aside, Own, Asking, Polyak):
            expected = trained(kind, None, by_closure=True)
            for plan in plans:
                with warnings.catch_warnings():
                    warnings.simplefilter("ignore")  # a norm of all stages
                    apart = (trained(kind, plan, by_closure=True) - expected).abs().max().item()
                assert apart < TOLERANCE, f"{kind} under {plan}: {apart}"
        expected = sharp(None)
        for plan in ({"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}):
            assert (sharp({**plan, "accumulate": 2}) - expected).abs().max() < TOLERANCE, plan
        for plan in ({"data": 2, "accumulate": 2}, {"pipe": 2, "accumulate": 2}):
            model = net()
            optimizer = torch.optim.SGD(model.parameters(), 0.1)
            engine = espalier.initialize(model, optimizer, plan, loss_fn=nn.functional.cross_entropy)
            for step in (0, 1, 0, 1):  # the engine's own loop, too
                engine.backward(engine(batch(step)))
                if step:
                    optimizer.zero_grad()
        model = espalier.prepare(net(), plan={"data": 2})
        made_later = Aside(model.parameters())  # which has another within
        model(batch(0)[0]).sum().backward()
        assert model.engine.optimizer is made_later
        with pytest.raises(ValueError, match="asks for the loss as often as it likes"):
            trained(Aside, {"data": 2, "clip": 0.1}, by_closure=True)
    finally:
        torch.set_default_dtype(torch.float32)


def net() -> nn.Module:
    torch.manual_seed(0)
    return layers()


def trained(
    kind: Callable[[Params], torch.optim.Optimizer], plan: dict[str, Any] | None, by_closure: bool = False
) -> torch.Tensor:
    """By ``optimizer.step()``, or by ``optimizer.step(closure)``."""
    model: Any = net()
    optimizer: Any = kind(model.parameters())
    if plan is not None:
        model, optimizer = espalier.prepare(model, optimizer, plan=plan)
    seen: list[Any] = []
    for step in range(4):
        generator = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)

        def closure(x: torch.Tensor = x, y: torch.Tensor = y) -> torch.Tensor:
            seen.append(0)  # and so how often it is called
            loss = F.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            return loss

        loss: Any = closure() if not by_closure or kind in (Aside, Own) else None
        stepped = optimizer.step(closure) if by_closure else optimizer.step()
        assert kind is not Own or stepped is None
        seen.append((loss if stepped is None else stepped).item())
    seen += model.state_dict().values()
    return torch.cat([torch.as_tensor(x).detach().flatten().double() for x in seen])


def same(rank: int, world: int, folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    disk = {"parameters": "disk", "states": "disk", "directory": str(folder)}
    half = {"states": {"place": "host", "ratio": 0.5}}
    small = {"chunk_megabytes": 0.0005, "prefetch_megabytes": 0.0005}
    plans: list[dict[str, Any]] = [
        {"data": 2, "zero": 1, "offload": {"gradients": "host", "states": "host"}, **small},
        {"data": 2, "zero": 3, "offload": disk, **small},
        {"tensor": 2, "zero": 1, "offload": half, **small},
        {"pipe": 2},
    ]
    try:
        for kind in KINDS:
            expected = trained(kind, None)
            for plan in plans:
                with warnings.catch_warnings(record=True) as caught:
                    warnings.simplefilter("always")
                    if "pipe" in plan and kind is averaging:
                        continue  # refused in words: it writes to parameters of other stages
                    apart = (trained(kind, plan) - expected).abs().max().item()
                assert apart < TOLERANCE, f"{kind} under {plan}: {apart}"
                said = any("does not update each parameter by itself" in str(w.message) for w in caught)
                assert said == ("offload" in plan and kind in TOGETHER), (kind, plan)
                said = any("send one another all parameters" in str(w.message) for w in caught)
                assert said == ("pipe" in plan and kind in OF_ALL), (kind, plan)
    finally:
        torch.set_default_dtype(torch.float32)


def test_offloaded_updates_and_stages_equal_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(2, same, tmp_path)


@pytest.mark.filterwarnings("ignore:engine.backward.loss. in a pipeline")
def test_steps_that_call_a_closure_within_equal_one_process(ranks: Any) -> None:
    ranks(2, by_closures)


def test_how_an_optimizer_calls_a_closure_is_tried() -> None:
    kinds = (Own, Asking, Aside, torch.optim.Adam)
    found = [use_of_closure(kind(net().parameters())) for kind in kinds]
    assert found == ["never", "first", "within", "first"]
    assert not makes_one_of_all(Asking(net().parameters()))
    assert makes_one_of_all(Polyak(net().parameters()))


def test_what_an_optimizer_does_is_tried() -> None:
    cpu, before = torch.device("cpu"), torch.get_rng_state()
    for kind in (*KINDS, *TRIED, Noisy, torch.optim.AdamW, torch.optim.LBFGS):
        optimizer = kind(net().parameters())
        kept = [p.detach().clone() for group in optimizer.param_groups for p in group["params"]]
        torch.set_rng_state(before)
        alone = kind in (*ALONE, Drawing, torch.optim.AdamW)
        assert updates_each_alone(optimizer, cpu) == alone, kind
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            assert makes_one_of_all(optimizer) == (kind in (*OF_ALL, *TRIED)), kind
        said = ["could not be tried" in str(w.message) for w in caught]
        assert said == ([True] if kind in (Listing, averaging) else []), (kind, said)
        assert torch.equal(torch.get_rng_state(), before) and not optimizer.state
        assert getattr(optimizer, "calls", []) in ([], 0)
        held = [p for group in optimizer.param_groups for p in group["params"]]
        assert all(p.grad is None and torch.equal(p, was) for p, was in zip(held, kept, strict=True))


class Tied(nn.Module):
    """Its first matrix is its last; one is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.inner = nn.Sequential(
            nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.GELU(), nn.Linear(12, 6)
        )
        self.last.weight = self.first.weight
        self.inner[2].weight.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.last(self.inner(torch.tanh(self.first(x))))
        return y


def tied() -> tuple[nn.Module, list[torch.optim.Optimizer]]:
    torch.manual_seed(0)
    model = Tied()
    last = [*model.inner[4].parameters()]
    rest = [p for p in model.parameters() if all(p is not of for of in last)]
    return model, [Estimating(rest), torch.optim.AdamW(last, 0.01)]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def alone(clip: float | None) -> dict[str, torch.Tensor]:
    """What four steps on one process come to."""
    model, optimizers = tied()
    for step in range(4):
        x, y = batch(step)
        model.zero_grad()
        F.cross_entropy(model(x), y).backward()
        if clip is not None:
            nn.utils.clip_grad_norm_(model.parameters(), clip)
        for optimizer in optimizers:
            optimizer.step()
    return model.state_dict()


def started(plan: dict[str, Any]) -> Any:
    return espalier.initialize(*tied(), plan, loss_fn=F.cross_entropy)


def of_all(rank: int, world: int, folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    mixes: list[dict[str, Any]] = [
        {"pipe": 4, "accumulate": 4, "clip": 0.3},
        {"data": 2, "pipe": 2, "zero": 1, "accumulate": 2},
        {"data": 2, "pipe": 2, "zero": 3},
        {"tensor": 2, "pipe": 2, "accumulate": 2},
    ]
    try:
        for i, plan in enumerate(mixes):
            for steps in (range(2), range(2, 4)):
                with pytest.warns(UserWarning, match="send one another all parameters"):
                    engine = started(plan)
                if steps.start:
                    engine.load(folder / str(i))
                for step in steps:
                    engine.train_step(batch(step))
                if not steps.start:
                    engine.save(folder / str(i))
            ends = engine.full_state_dict()
            apart = max((ends[name] - x).abs().max().item() for name, x in alone(plan.get("clip")).items())
            assert apart < TOLERANCE, (plan, apart)
        with pytest.raises(ValueError, match="train under a plan without offload"):
            started({"pipe": 2, "data": 2, "zero": 1, "offload": {"states": "host"}})
    finally:
        torch.set_default_dtype(torch.float32)


def test_what_makes_something_of_all_stages_equals_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(4, of_all, tmp_path)
