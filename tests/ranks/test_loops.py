"""Plain loops: what torch's own calls do on one process, they do under every plan, or say what to write."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

import espalier
from espalier.tensor.observers import Watcher, watching

TOLERANCE = 1e-9
clip = nn.utils.clip_grad_norm_


class Net(nn.Module):
    """A layer that only some batches use, and one that is frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(6, 10), nn.Linear(10, 3)
        self.seldom, self.frozen = nn.Linear(10, 10), nn.Linear(10, 10)
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor, y: torch.Tensor, extra: bool) -> torch.Tensor:
        h = torch.tanh(self.first(x)) + self.frozen(torch.tanh(self.first(x)))
        if extra:
            h = h + self.seldom(h)
        return nn.functional.cross_entropy(self.last(h), y)


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor, bool]:
    generator = torch.Generator().manual_seed(step)
    x = torch.randn(8, 6, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (8,), generator=generator), step % 3 == 1


class Plain:
    """What a loop calls, on one process."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.net, self.optimizer = net, optimizer
        self.schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)
        self.norms: list[Any] = []

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.net(*batch)

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()

    def step(self) -> None:
        self.optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        self.net.zero_grad()

    def note(self) -> None:
        for name, p in self.net.named_parameters():
            self.norms.append((name, p.grad is not None))
            if p.grad is not None:
                self.norms.append(espalier.full_tensor(p.grad).clone())


class Ours(Plain):
    """The same, of an engine."""

    def __init__(self, net: nn.Module, optimizer: torch.optim.Optimizer, plan: dict[str, Any]) -> None:
        if plan.get("zero", 0) != 1:  # a schedule may be made before the engine, or after it
            super().__init__(net, optimizer)
        self.engine = espalier.initialize(net, optimizer, plan)
        if plan.get("zero", 0) == 1:
            super().__init__(net, optimizer)

    def __call__(self, batch: Any) -> torch.Tensor:
        return self.engine(batch)

    def backward(self, loss: torch.Tensor) -> None:
        self.engine.backward(loss)

    def step(self) -> None:
        self.engine.step()

    def zero_grad(self) -> None:
        self.engine.zero_grad()


def at_the_top(of: Plain, step: int) -> None:
    of.optimizer.zero_grad()
    loss = of(batch(step))
    loss.backward()
    clip(of.net.parameters(), 0.1)
    of.note()
    of.optimizer.step()
    of.note()
    of.norms.append(espalier.full_tensor(of.engine.loss if isinstance(of, Ours) else loss.detach()).clone())
    of.schedule.step()


def at_the_end(of: Plain, step: int) -> None:
    of.backward(of(batch(step)))
    of.norms.append(espalier.full_tensor(clip(of.net.parameters(), 0.1)).clone())
    of.optimizer.step()
    of.net.zero_grad()
    of.note()


def to_zero(of: Plain, step: int) -> None:
    of(batch(step)).backward()
    of.optimizer.step()
    of.optimizer.zero_grad(set_to_none=False)
    of.note()


def by_hand(of: Plain, step: int) -> None:
    for i in range(3):
        of.backward(of(batch(5 * step + i)) / 3)
        of.note()
    of.step()


def by_hand_plainly(of: Plain, step: int) -> None:
    for i in range(3):
        (of(batch(5 * step + i)) / 3).backward()
        if i == 1:
            clip(of.net.parameters(), 0.05)
    of.note()
    of.optimizer.step()
    of.zero_grad()


def mixed(of: Plain, step: int) -> None:
    of.backward(of(batch(step)))
    (0.5 * of(batch(step + 1))).backward()
    both = of(batch(step + 2)) + of(batch(step + 3))
    both.backward()
    of.step()
    of(batch(step)).backward()
    of.optimizer.step()  # and gradients stay
    of.note()


def twice(of: Plain, step: int) -> None:
    loss = of(batch(step))
    loss.backward(retain_graph=True)
    loss.backward()
    of.note()
    of.optimizer.step()
    of.optimizer.step()  # the same gradients again
    of.optimizer.zero_grad()


def looked_at(of: Plain, step: int) -> None:
    """Gradients asked of autograd are none of the parameters'."""
    loss = of(batch(step))
    loss.backward(retain_graph=True)
    of.note()
    torch.autograd.grad(loss, of.net.last.weight)
    of.note()
    of.optimizer.step()
    torch.autograd.grad(of(batch(step)), of.net.last.weight)
    of.note()
    of.optimizer.zero_grad()


def chosen(of: Plain, step: int) -> None:
    """Backward for some parameters alone, and for all of the same graph."""
    loss = of(batch(step))
    loss.backward(retain_graph=True, inputs=[of.net.last.weight, of.net.first.bias])
    of.note()
    torch.autograd.backward(loss, None, True, False, None, {"weight": of.net.first.weight})
    (2 * loss).backward()
    of.note()
    of.optimizer.step()
    of.optimizer.zero_grad()


def closure(of: Plain, step: int) -> None:
    def again() -> torch.Tensor:
        of.optimizer.zero_grad()
        loss = of(batch(step))
        loss.backward()
        return loss

    of.norms.append(espalier.full_tensor(of.optimizer.step(again)).detach().clone())


def empty(of: Plain, step: int) -> None:
    of.zero_grad()
    of.optimizer.step()
    of(batch(step)).backward()
    of.optimizer.zero_grad()
    of.optimizer.step()
    of(batch(step)).backward()
    nn.utils.clip_grad_value_(of.net.parameters(), 0.01)
    for p in of.net.parameters():
        if p.grad is not None:
            p.grad = p.grad * 2
    bias = of.net.first.bias
    kept, bias.grad = bias.grad, None
    bias.grad = kept * 3
    of.optimizer.step()
    of.note()
    of.zero_grad()


def directly(of: Plain, step: int) -> None:
    """The model itself is called, and what it gives is said to be the engine's, or not."""
    with torch.no_grad():
        of(batch(step))
    loss = of.net(*batch(step))
    loss.backward()
    of.net(*batch(step + 2)).backward()
    loss = of.net(*batch(step + 1))
    if isinstance(of, Ours):
        of.engine.follow(loss)
    loss.backward()
    clip(of.net.parameters(), 0.1)
    of.note()
    of.optimizer.step()
    of.optimizer.zero_grad()


LOOPS = (
    directly,
    at_the_top,
    at_the_end,
    to_zero,
    by_hand,
    by_hand_plainly,
    mixed,
    twice,
    closure,
    empty,
    looked_at,
    chosen,
)


def same(of: Plain, other: Plain, what: str) -> None:
    assert len(of.norms) == len(other.norms), what
    for i, (x, y) in enumerate(zip(of.norms, other.norms, strict=True)):
        if isinstance(x, tuple):
            assert x == y, (what, i, x, y)
        else:
            assert (x - y).abs().max() < TOLERANCE, (what, i, of.norms[i - 1])
    for (name, p), q in zip(of.net.named_parameters(), other.net.parameters(), strict=True):
        assert (espalier.full_tensor(p) - q).abs().max() < TOLERANCE, (what, name)


def loops(rank: int, world: int, plan: dict[str, Any], kind: str, names: list[str] | None = None) -> None:
    for loop in LOOPS:
        if names and loop.__name__ not in names:
            continue
        torch.manual_seed(0)
        net = Net().double()
        plain = copy.deepcopy(net)
        make: Callable[..., torch.optim.Optimizer] = getattr(torch.optim, kind)
        ours = Ours(net, make(net.parameters(), lr=0.05, weight_decay=0.1), plan)
        theirs = Plain(plain, make(plain.parameters(), lr=0.05, weight_decay=0.1))
        for of in (ours, theirs) if plan.get("zero") == 2 else ():
            of.optimizer.register_step_post_hook(lambda *_, of=of: of.norms.append(("stepped", True)))
        for step in range(4):
            loop(ours, step)
            loop(theirs, step)
            same(ours, theirs, f"{loop.__name__}, step {step}, {plan}")


def mesh_wide(rank: int, world: int) -> None:
    """Copies of data groups, two kinds of axes, states off the device, and masters: each with some loops."""
    some = ["at_the_top", "by_hand_plainly", "mixed", "empty"]
    loops(rank, world, {"data": 2, "replicate": 2, "zero": 2}, "AdamW", some)
    loops(rank, world, {"data": 2, "tensor": 2, "zero": 3}, "AdamW", some)
    away = {"states": "host", "gradients": "host"}
    loops(rank, world, {"data": 4, "zero": 2, "offload": away, "chunk_megabytes": 0.001}, "AdamW", some)
    loops(rank, world, {"data": 4, "zero": 1, "chunk_megabytes": 0.001}, "Adafactor", ["at_the_top", "mixed"])


PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2, "zero": 0},
    {"data": 2, "zero": 1},
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"tensor": 2},
)


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_a_plain_loop_trains_as_on_one_process(ranks: Any, plan: dict[str, Any]) -> None:
    ranks(2, loops, plan, "AdamW")


def test_plain_loops_on_more_axes(ranks: Any) -> None:
    ranks(4, mesh_wide)


def scaled(rank: int, world: int) -> None:
    """A loop with torch's autocast and GradScaler, in which the third step overflows."""
    for plan in (*PLANS, {"data": 2, "zero": 2, "precision": "bfloat16"}):
        for fused in (False, True):
            torch.manual_seed(0)
            net = Net()
            plain = copy.deepcopy(net)
            ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.01, fused=fused) for m in (net, plain))
            found = []
            for of in (Ours(net, ours, plan), Plain(plain, theirs)):
                scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=2)
                scales = []
                for step in range(4):
                    of.optimizer.zero_grad()
                    x, y, extra = batch(step)
                    x = x.float() * (1e38 if step == 2 else 1.0)
                    with torch.autocast("cpu", dtype=torch.bfloat16):
                        loss = of((x, y, extra))
                    scaler.scale(loss).backward()
                    if fused:
                        scaler.unscale_(of.optimizer)
                        clip(of.net.parameters(), 0.1)
                    scaler.step(of.optimizer)
                    scaler.update()
                    scales.append(scaler.get_scale())
                found.append(scales)
            assert found[0] == found[1], (plan, fused)
            for p, q in zip(net.parameters(), plain.parameters(), strict=True):
                assert (espalier.full_tensor(p) - q).abs().max() < 2e-2, (plan, fused)


def test_autocast_and_grad_scaler_of_a_plain_loop(ranks: Any) -> None:
    ranks(2, scaled)


def refused(rank: int, world: int) -> None:
    def made(**plan: Any) -> Ours:
        torch.manual_seed(0)
        net = Net().double()
        return Ours(net, torch.optim.SGD(net.parameters(), lr=0.1), {"data": 2, **plan})

    of = made()
    for call in (of.step, of.engine.finish_gradients):
        with pytest.raises(ValueError, match=r"no gradients(.|\n)*engine.backward\(loss\) first"):
            call()
    with pytest.raises(ValueError, match="0 were called"):
        made(accumulate=2).backward(torch.ones(()))
    of = made(accumulate=2, zero=2)
    with pytest.raises(ValueError, match=r"Write engine.backward\(loss\)"):
        of(batch(0)).backward()
    of.zero_grad()
    torch.autograd.grad(of(batch(0)), of.net.last.weight)
    of.zero_grad()
    other = made(data=1, tensor=2, accumulate=2)
    with pytest.raises(ValueError, match=r"Write engine.backward\(loss\)"):
        other(batch(0)).backward()
    of.backward(of(batch(0)))
    with pytest.raises(ValueError, match=r"after 1 of(.|\n)*engine.step\(\) in its place"):
        of.optimizer.step()
    of.net.zero_grad()
    with pytest.raises(ValueError, match=r"zero_grad\(\) after 1 of(.|\n)*Leave it out"):
        of.backward(of(batch(0)))
    of.zero_grad()
    of.backward(of(batch(0)))
    of.backward(of(batch(1)))
    of.optimizer.step()
    of.engine.accumulate([batch(0), batch(1)])
    with pytest.raises(RuntimeError, match=r"engine.finish_gradients\(\)(.|\n)*Plan\(clip"):
        clip(of.net.parameters(), 0.1)
    of.zero_grad()
    assert of.engine.steps == 1 and all(p.grad is None for p in of.net.parameters())
    net = nn.Linear(6, 3)
    engine = espalier.initialize(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1),
        {"data": 2, "precision": "float16"},
        loss_fn=lambda out, y: nn.functional.cross_entropy(out.float(), y),
    )
    x, y, _ = batch(0)
    with pytest.raises(ValueError, match=r"float16 the engine scales(.|\n)*Write engine.backward\(loss\)"):
        engine((x.float(), y)).backward()
    engine.zero_grad()
    engine.backward(engine((x.float(), y)))
    net.weight.grad.mul_(0.5)
    with pytest.warns(UserWarning, match=r"times engine.scale(.|\n)*Plan\(clip=1.0\)"):
        engine.optimizer.step()


def staged(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=0.1) for m in (net, plain))
    mean = nn.functional.cross_entropy
    plan = {"pipe": 2, "accumulate": 2, "cuts": ["2"], "clip": 0.1}
    engine = espalier.initialize(net, ours, plan, loss_fn=mean)
    for step in range(3):
        x, y, _ = batch(step)
        mean(plain(x), y).backward()
        if step == 0:
            engine((x, y))  # of which nothing is asked
        ours.zero_grad()
        engine.accumulate(engine.cut((x, y)))
        with pytest.raises(RuntimeError, match=r"engine.finish_gradients\(\)(.|\n)*Plan\(clip"):
            clip(net.parameters(), 0.1)
        if step == 1:
            engine.finish_gradients()
            for p in (*net.parameters(), *plain.parameters()):
                p.grad.mul_(0.01)
        ours.step()
        clip(plain.parameters(), 0.1)
        theirs.step()
        theirs.zero_grad()
        for name, value in engine.full_state_dict().items():
            assert (value - plain.state_dict()[name]).abs().max() < TOLERANCE, (step, name)


class Tied(nn.Module):
    """Three stages' worth of layers, whose first and last share a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.middle, self.head = nn.Embedding(7, 6), nn.Linear(6, 6), nn.Linear(6, 7, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.middle(self.embed(x))))


@torch.no_grad()
def of_all(net: nn.Module) -> list[torch.Tensor]:
    """What programs make of all parameters, which lie in several stages of a pipeline."""
    weights = list(net.parameters())
    decayed = torch._foreach_mul(weights, 0.9)
    return [
        sum(p.square().sum() for p in weights),
        torch.stack([p.detach().norm() for p in weights]),
        torch.stack(torch._foreach_norm(weights)),
        nn.utils.parameters_to_vector(weights),
        torch.cat([x.flatten() for x in decayed]),
        weights[0].norm() * weights[-1],
    ]


def together(rank: int, world: int, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)], nn.Linear(6, 1)).double()
    plain = copy.deepcopy(net)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = espalier.initialize(net, optimizer, plan, loss_fn=nn.functional.mse_loss)
    x = batch(0)[0]
    engine.lay_out((x, x[:, :1]))
    with pytest.warns(espalier.GatherWarning, match="several stages"):
        found = of_all(net)
    for a, b in zip(found, of_all(plain), strict=True):
        assert (espalier.full_tensor(a) - b).abs().max() < TOLERANCE, plan


def clipped(rank: int, world: int, plan: dict[str, Any], dtype: torch.dtype) -> None:
    """A loop that clips by itself: by norms of several orders, of all parameters, and of one stage's."""
    torch.manual_seed(0)
    net = Tied().to(dtype)
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.5) for m in (net, plain))
    mean, exact = nn.functional.cross_entropy, TOLERANCE if dtype is torch.float64 else 5e-3
    engine = espalier.initialize(net, ours, plan, loss_fn=lambda out, y: mean(out.to(dtype), y))
    for step, order in enumerate((2.0, 1.0, 3.0, math.inf)):
        x = torch.randint(0, 7, (8,), generator=torch.Generator().manual_seed(step))
        mean(plain(x), x).backward()
        if plan.get("pipe", 1) > 1:
            engine.accumulate(engine.cut((x, x)))
            engine.finish_gradients()
        else:
            engine.backward(engine((x, x)))
        if step == 0 and plan.get("pipe", 1) > 1:
            with pytest.warns(espalier.GatherWarning):  # in several stages; the head's weight is in two
                for a, b in zip(of_all(net), of_all(plain), strict=True):
                    assert (espalier.full_tensor(a) - b).abs().max() < exact, plan
        for of in ("", "middle", "embed"):
            parts = [m.get_submodule(of).parameters() for m in (net, plain)]
            norm, expected = (clip(part, 0.5**step / 20, order) for part in parts)
            norm, expected = float(espalier.full_tensor(norm)), float(expected)
            assert math.isclose(norm, expected, rel_tol=exact), (plan, order, of, norm, expected)
        ours.step()
        ours.zero_grad()
        theirs.step()
        theirs.zero_grad()
        for name, value in engine.full_state_dict().items():
            off = (value - plain.state_dict()[name]).abs().max()
            assert off < exact, (plan, order, name, off)


def all_clipped(rank: int, world: int) -> None:
    staged = {"pipe": 2, "accumulate": 2, "cuts": ["head"]}
    clipped(rank, world, staged, torch.float64)
    together(rank, world, {"pipe": 2, "accumulate": 2})
    scaled = {"compute": "float16", "loss_scale": {"init_scale": 1024.0}}
    clipped(rank, world, {"data": 2, "zero": 2, "precision": scaled}, torch.float32)


def clipped_on_four(rank: int, world: int) -> None:
    for zero in (0, 3):
        clipped(rank, world, {"pipe": 2, "data": 2, "zero": zero, "accumulate": 2}, torch.float64)
    clipped(rank, world, {"pipe": 2, "tensor": 2, "accumulate": 2}, torch.float64)
    for more in ({"zero": 3, "data": 2}, {"tensor": 2}):
        together(rank, world, {"pipe": 2, "accumulate": 2, **more})


class Calls(Watcher):
    """How many calls on DTensors there were."""

    def __init__(self) -> None:
        self.count = 0

    def around(self, func: Any, args: Any, kwargs: Any, go: Callable[[], Any]) -> Any:
        self.count += 1
        return go()


def clipped_at_once(rank: int, world: int) -> None:
    """Not gradient by gradient; and what is not finite in one stage is an error on all ranks."""
    torch.manual_seed(0)
    net = nn.Sequential(*[nn.Linear(4, 4) for _ in range(6)]).double()
    optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.5)
    net, optimizer = espalier.prepare(net, optimizer, plan={"pipe": 2})
    for factor in (1.0, math.inf):
        net(torch.ones(2, 4, dtype=torch.float64)).sum().backward()
        with torch.no_grad():
            if (grad := [*net.parameters()][-1].grad) is not None and factor > 1:
                grad.fill_(factor)
        with watching(calls := Calls()):
            if factor == 1:
                norm = clip(net.parameters(), 0.1, error_if_nonfinite=True)
                assert norm.item() > 0.1
            else:
                with pytest.raises(RuntimeError, match="non-finite"):
                    clip(net.parameters(), 0.1, error_if_nonfinite=True)
        assert not calls.count
        if factor == 1:
            assert math.isclose(clip(net.parameters(), 1.0).item(), 0.1, rel_tol=1e-5)
        optimizer.zero_grad()


def test_clipping_by_hand_takes_the_norm_of_all_stages(ranks: Any) -> None:
    ranks(2, all_clipped)
    ranks(2, clipped_at_once)
    ranks(4, clipped_on_four)


def test_what_a_loop_cannot_say_is_refused_with_the_line_to_write(ranks: Any) -> None:
    ranks(2, refused)
    ranks(2, staged)


def rows(rank: int, world: int) -> None:
    """Each rank's own rows as the global batch, where they are, and where they are not."""
    mine = torch.Generator().manual_seed(rank)
    shared = batch(0)[:2]
    own = torch.randn(8, 6, generator=mine, dtype=torch.float64), shared[1]

    def made(**plan: Any) -> espalier.Engine:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        return espalier.initialize(net, optimizer, plan, loss_fn=nn.functional.cross_entropy)

    plans: tuple[dict[str, Any], ...] = (
        {"data": 2, "tensor": 2},
        {"data": 4, "zero": 3},
        {"data": 4, "accumulate": 2},
        {"pipe": 2, "data": 2, "cuts": ["2"]},
        {"tensor": 4},
    )
    for plan in plans:
        engine = made(**plan)
        before = {name: x.clone() for name, x in engine.module.state_dict().items()}
        for _ in range(2):
            with pytest.raises(ValueError, match=r"different batches(.|\n)*engine.local_batch\(batch\)"):
                engine.train_step(own)
        after = engine.full_state_dict()
        assert all(torch.equal(x, after[name]) for name, x in before.items())
        engine.evaluate(engine.cut(own))  # nobody is told of what is evaluated
        engine.train_step(shared)
        engine.train_step(own)  # nor later on
        made(**plan).train_step((shared[0] * (1 + 1e-14 * rank), shared[1]))  # each has computed it
        if plan.get("pipe", 1) == 1 and "accumulate" not in plan:  # a loop that calls the model itself
            engine = made(**plan)
            laid_out = plan.get("tensor", 1) == 1
            nn.functional.cross_entropy(engine.module(own[0]), own[1]).backward()
            with pytest.raises(
                ValueError, match="different batches" if laid_out else "ranks have different gradients"
            ):
                engine.optimizer.step()
        if plan.get("data", 1) > 1 and "accumulate" not in plan:
            engine = made(**plan)
            place = engine.mesh.coordinate[engine.mesh.axis("data")]
            theirs = torch.randn(4, 6, generator=torch.Generator().manual_seed(place), dtype=torch.float64)
            engine.train_step(engine.local_batch((theirs, shared[1][:4])))


def test_own_rows_taken_for_the_global_batch_are_told_of(ranks: Any) -> None:
    ranks(4, rows)


def compiled(rank: int, world: int) -> None:
    """What ``torch.compile`` is put around runs as it is written, whatever wraps the model."""
    results = []
    for around in (False, True):
        torch.manual_seed(0)
        net = Net().double()
        model, optimizer = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan={"data": 2})
        called = torch.compile(model, backend="eager") if around else model
        for step in range(3):
            with (
                pytest.warns(UserWarning, match=r"engine.compile\(\)")
                if around and not step
                else nullcontext()
            ):
                called(*batch(step)).backward()
            optimizer.step()
            optimizer.zero_grad()
        results.append(model.engine.full_state_dict())
    for name, x in results[0].items():
        assert torch.equal(x, results[1][name]), name


def test_a_model_that_is_laid_out_is_not_compiled(ranks: Any) -> None:
    ranks(2, compiled)


def penalty(net: nn.Module) -> torch.Tensor:
    matrices = [p for p in net.parameters() if p.ndim == 2]
    return sum(
        ((p @ p.t()).square().mean() + p.sum() for p in matrices), torch.zeros((), dtype=torch.float64)
    )


def before_and_after_layout(rank: int, world: int) -> None:
    """The first batch of tensor plans lays parameters out: what was recorded of them before is another's."""
    for plan in ({"tensor": 2}, {"data": 2, "zero": 3}):
        nets = [nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 12), nn.Linear(12, 3)) for _ in "ab"]
        for net in nets:
            torch.manual_seed(0)
            for p in net.double().parameters():
                nn.init.normal_(p, std=0.3)
            prune.l1_unstructured(net[2], "weight", 0.3)  # a graph that is held and never gone through
        optimizers = [torch.optim.SGD(net.parameters(), lr=0.1) for net in nets]
        model = espalier.prepare(nets[0], optimizers[0], plan=plan)[0]
        x, y, _ = batch(0)
        early = penalty(nets[0])
        if "tensor" in plan:
            with pytest.raises(ValueError, match=r"weight was used(.|\n)*example=batch"):
                (nn.functional.cross_entropy(model(x), y) + early).backward()
            optimizers[0].zero_grad()
        for _ in range(3):
            for called, net, optimizer in zip((model, nets[1]), nets, optimizers, strict=True):
                loss = nn.functional.cross_entropy(called(x), y) + 0.1 * penalty(net)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        for name, x in model.engine.full_state_dict().items():
            assert (x - nets[1].state_dict()[name]).abs().max() < TOLERANCE, (plan, name)


def test_graphs_from_before_the_layout(ranks: Any) -> None:
    ranks(2, before_and_after_layout)


def fresh_states(rank: int, world: int) -> None:
    """A run that tries rates, goes back to where it began, states and all, and begins again."""
    for zero in range(4):
        nets = [nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 3)).double() for _ in "ab"]
        nets[1].load_state_dict(nets[0].state_dict())
        losses: list[list[float]] = []
        for i, net in enumerate(nets):
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)
            model: Any = net
            if i == 0:
                model = espalier.prepare(net, optimizer, plan={"data": 2, "zero": zero})[0]
            weights, states = copy.deepcopy(net.state_dict()), copy.deepcopy(optimizer.state_dict())
            losses.append([])
            for step in range(6):
                if step == 3:
                    net.load_state_dict(weights)
                    optimizer.load_state_dict(states)
                x, y, _ = batch(step)
                loss = nn.functional.cross_entropy(model(x), y)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[-1].append(loss.item())
        assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < TOLERANCE, (zero, losses)


def test_states_from_before_the_first_step(ranks: Any) -> None:
    ranks(2, fresh_states)


class Scaled(torch.utils.data.Dataset[torch.Tensor]):
    """Rows that are scaled by lot, with dice of the dataset's own."""

    def __init__(self, seed: int) -> None:
        self.lot = random.Random(seed)

    def __len__(self) -> int:
        return 20

    def __getitem__(self, i: int) -> torch.Tensor:
        return torch.full((1,), float(i)) * (2 if self.lot.random() < 0.4 else 1)


def same_order(rank: int, world: int) -> None:
    """A DataLoader that draws its order from a generator of its own, over several epochs."""
    rows = torch.arange(20.0)[:, None]
    dataset = torch.utils.data.TensorDataset(rows)

    def loader(**more: Any) -> Any:
        generator = torch.Generator().manual_seed(5)
        return torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True, generator=generator, **more)

    net = nn.Linear(1, 1)
    _, spread = espalier.prepare(net, loader(), plan={"data": 2})
    plain = loader()
    for _ in range(3):
        for (a,), (b,) in zip(spread, plain, strict=True):
            assert torch.equal(espalier.full_tensor(a), b)
    for seed in range(3):  # one at which the first row is the same when it is asked for again
        _, spread = espalier.prepare(nn.Linear(1, 1), DataLoader(Scaled(seed), 8), plan={"data": 2})
        for a, b in zip(spread, DataLoader(Scaled(seed), 8), strict=True):
            assert torch.equal(espalier.full_tensor(a), b)
    sampler = torch.utils.data.DistributedSampler(dataset)
    own = torch.utils.data.DataLoader(dataset, batch_size=4, sampler=sampler)
    espalier.prepare(nn.Linear(1, 1), own, plan={"data": 2})
    with pytest.raises(ValueError, match=r"DistributedSampler cuts rows for 2 ranks(.|\n)*without it"):
        espalier.prepare(nn.Linear(1, 1), own, plan={"tensor": 2})


@pytest.mark.filterwarnings("ignore:Each rank loads all rows of each batch. random numbers")
def test_orders_of_loaders(ranks: Any) -> None:
    ranks(2, same_order)
