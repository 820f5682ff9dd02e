"""Several optimizers of one model: one for matrices beside AdamW, and those of a generator and its critic."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.parallel.several import Several

TOLERANCE = 1e-9


class Gan(nn.Module):
    """Two players in one module; says which loss it makes."""

    def __init__(self) -> None:
        super().__init__()
        self.maker = nn.Sequential(nn.Linear(4, 12), nn.Tanh(), nn.Linear(12, 6))
        self.critic = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 1))

    def forward(self, x: torch.Tensor, z: torch.Tensor, of_critic: bool) -> torch.Tensor:
        fake = self.maker(z)
        if of_critic:
            real, made = self.critic(x), self.critic(fake.detach())
            return (nn.functional.softplus(-real) + nn.functional.softplus(made)).mean()
        return nn.functional.softplus(-self.critic(fake)).mean()


class Net(nn.Module):
    """Matrices, and others."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(6, 12)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(12, 12), nn.Tanh()) for _ in range(4))
        self.leave = nn.Linear(12, 3)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.enter(x)
        for block in self.blocks:
            x = x + block(x)
        return nn.functional.cross_entropy(self.leave(x), y)


def net(kind: type[nn.Module]) -> Any:
    torch.manual_seed(0)
    return kind().double()


def split(model: nn.Module) -> list[torch.optim.Optimizer]:
    """Muon would round to 16 bits within."""
    inner = [p for name, p in model.named_parameters() if "blocks" in name and p.ndim == 2]
    ids = set(map(id, inner))
    rest = [p for p in model.parameters() if id(p) not in ids]
    return [torch.optim.Adafactor(inner, lr=0.02), torch.optim.AdamW(rest, lr=1e-2)]


def players(model: Any) -> list[torch.optim.Optimizer]:
    return [
        torch.optim.Adam(model.maker.parameters(), 1e-2),
        torch.optim.SGD(model.critic.parameters(), 0.1, 0.9),
    ]


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (8,), generator=generator)


def play(
    model: Any, optimizers: Sequence[torch.optim.Optimizer], stepping: Sequence[torch.optim.Optimizer]
) -> list[float]:
    """Critic and maker in turns; ``zero_grad`` of one leaves what it has brought to the other."""
    losses = []
    schedules = [torch.optim.lr_scheduler.StepLR(x, 1, 0.5) for x in optimizers]
    for step in range(3):
        x, _ = batch(step)
        for optimizer, of_critic in ((stepping[1], True), (stepping[0], False)):
            optimizer.zero_grad()
            loss = model(x, batch(step + 10)[0][:, :4].contiguous(), of_critic)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        for schedule in schedules:
            schedule.step()
    return losses


def rounds(model: Any, optimizers: Sequence[torch.optim.Optimizer]) -> list[float]:
    """All step after one backward pass, and the second one in every other step alone."""
    losses = []
    for step in range(4):
        loss = model(*batch(step))
        loss.backward()
        for optimizer in optimizers[: 1 + step % 2]:
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"data": 2, "zero": 3, "offload": {"states": "host", "gradients": "host", "parameters": "host"}},
    {"pipe": 2},
)


def equal(engine: Any, plain: nn.Module, what: Any) -> None:
    for name, x in engine.full_state_dict().items():
        assert (x - plain.state_dict()[name]).abs().max() < TOLERANCE, (what, name)


def in_loops(rank: int, world: int) -> None:
    for plan in PLANS:
        for kind, of, loop in ((Net, split, rounds), (Gan, players, None)):
            if loop is None and "pipe" in plan:
                continue  # which stage has a loss hangs on an argument
            plain, ours = net(kind), net(kind)
            first, second = of(plain), of(ours)
            module, *second = espalier.prepare(ours, *second, plan=plan)
            losses = [
                rounds(m, o) if loop is not None else play(m, o, o)
                for m, o in ((plain, first), (module, second))
            ]
            assert losses[0] == pytest.approx(losses[1], abs=TOLERANCE), (plan, kind)
            equal(module.engine, plain, (plan, kind))
            if loop is not None:
                assert module.engine.steps == 4  # one for each backward pass


def by_the_engine(rank: int, world: int, folder: str) -> None:
    """Clipped by the norm over all, saved, and loaded under another plan."""
    options: dict[str, Any] = {"offload": {"states": "host"}}
    for plan in ({"data": 2, "zero": 1}, {"data": 2, "zero": 3, **options}, {"pipe": 2, "accumulate": 2}):
        plain, ours = net(Net), net(Net)
        first = split(plain)
        engine = espalier.initialize(ours, split(ours), {**plan, "clip": 0.1})
        assert isinstance(engine.optimizer, Several)
        for step in range(4):
            plain(*batch(step)).backward()
            nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            for optimizer in first:
                optimizer.step()
                optimizer.zero_grad()
            engine.train_step(dict(zip("xy", batch(step), strict=True)))
            if step == 1:
                path = f"{folder}/{'-'.join(plan)}"
                engine.save(path)
                again = net(Net)
                # the other engine's states are read by name, whichever optimizer they are of
                engine = espalier.initialize(again, split(again), {"data": 2, "zero": 2, "clip": 0.1})
                engine.load(path)
        equal(engine, plain, plan)


def attached(rank: int, world: int, folder: Path) -> None:
    """One after the other, behind the engine, before and after the first step."""
    for plan in ({"data": 2}, {"data": 2, "zero": 2}, {"tensor": 2}):
        plain, ours = net(Net), net(Net)
        first, second = split(plain), split(ours)
        engine = espalier.initialize(ours, None, plan)
        engine.attach(second[1])
        for step in range(4):
            if step == 2:
                engine.attach(second[0])
            for whole, optimizers in ((plain, first), (engine, second)):
                whole(*batch(step)).backward()
                for optimizer in optimizers if step > 1 else optimizers[1:]:
                    optimizer.step()
                whole.zero_grad()
        equal(engine, plain, plan)
        assert engine.has_optimizer(second[0]) and engine.has_optimizer(second[1])
    with pytest.raises(ValueError, match="held by two"):
        engine.attach(torch.optim.SGD(ours.parameters()))
    other = torch.optim.Adam(ours.parameters())
    engine(*batch(0)).backward()
    other.step()
    engine.zero_grad()
    with pytest.warns(UserWarning, match=r"Adam, made after(.|\n)*not have its states(.|\n)*instead=True"):
        engine.save(folder)
    del other
    ours = net(Net)
    pair = split(ours)
    engine = espalier.initialize(ours, pair[1], {"data": 2, "zero": 2, "offload": {"states": "host"}})
    engine.train_step(dict(zip("xy", batch(0), strict=True)))
    with pytest.raises(ValueError, match="before the first step"):
        engine.attach(pair[0])


def changed(model: Any, first: torch.optim.Optimizer) -> tuple[list[float], list[dict[str, Any]]]:
    """Another optimizer goes on from the first one's states, and then one of another kind."""

    def steps(optimizer: torch.optim.Optimizer) -> None:
        for step in range(2):
            loss = model(*batch(step))
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())

    losses: list[float] = []
    steps(first)
    second = torch.optim.AdamW(model.parameters(), lr=2e-2)
    second.load_state_dict(copy.deepcopy(first.state_dict()))  # else they share memory on one process
    steps(second)
    third = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    steps(third)
    return losses, [copy.deepcopy(optimizer.state_dict()) for optimizer in (first, second, third)]


def in_the_middle(rank: int, world: int) -> None:
    for plan in ({"data": 2, "zero": 3}, {"pipe": 2}):
        plain = net(Net)
        expected = changed(plain, torch.optim.AdamW(plain.parameters(), lr=1e-2))
        ours = net(Net)
        found = changed(*espalier.prepare(ours, torch.optim.AdamW(ours.parameters(), lr=1e-2), plan=plan))
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)


def in_float16(rank: int, world: int) -> None:
    """The second optimizer steps with the scale of the gradients, not with the one that is next."""
    scale = {"init_scale": 64.0, "growth_interval": 1}
    plan = {"data": 2, "precision": {"compute": "float16", "loss_scale": scale}}
    results = []
    for several in (False, True):
        model = net(Net).float()
        groups = split(model)
        parts = [torch.optim.SGD(g.param_groups[0]["params"], 0.1) for g in groups]
        one = torch.optim.SGD(model.parameters(), 0.1)
        engine = espalier.initialize(model, parts if several else one, plan)
        for step in range(3):
            x, y = batch(step)
            engine.backward(engine((x.float(), y)))
            for optimizer in parts if several else [one]:
                optimizer.step()
            for optimizer in parts if several else [one]:
                optimizer.zero_grad()
        assert engine.scale == 64.0 * 2**3 and engine.steps == 3
        results.append(engine.full_state_dict())
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


def refused(rank: int, world: int) -> None:
    model = net(Net)
    with pytest.raises(ValueError, match=r"2 parameter\(s\) are held by two of the optimizers"):
        espalier.initialize(
            model,
            [torch.optim.SGD(model.enter.parameters()), torch.optim.AdamW(model.parameters())],
            {"data": 2},
        )
    parts = split(model)
    engine = espalier.initialize(
        model, parts, {"data": 2, "zero": 2, "gradients": "in-place", "precision": "bfloat16"}
    )
    engine.backward(engine(batch(0)))
    with pytest.raises(ValueError, match=r"Adafactor.step\(\): (.|\n)*Write engine.step\(\)"):
        parts[0].step()
    assert engine.step()


def test_several_optimizers_step_as_on_one_process(ranks: Any) -> None:
    ranks(2, in_loops)


def test_an_engine_steps_several_optimizers_and_saves_them(ranks: Any, tmp_path: Path) -> None:
    ranks(2, by_the_engine, str(tmp_path))


def test_optimizers_are_attached_one_after_the_other(ranks: Any, tmp_path: Path) -> None:
    ranks(2, attached, tmp_path)


def test_another_optimizer_goes_on_in_the_middle(ranks: Any) -> None:
    ranks(2, in_the_middle)


def test_one_scale_for_all_optimizers(ranks: Any) -> None:
    ranks(2, in_float16)


def test_what_several_optimizers_cannot_be(ranks: Any) -> None:
    ranks(2, refused)
