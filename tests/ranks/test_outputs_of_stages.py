"""Values of a pipeline's outputs in a plain loop: looking at them changes nothing, whenever it is done."""

from __future__ import annotations

import cProfile
import pstats
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import espalier

WHEN = ("never", "before", "between", "after")
TOLERANCE = 1e-10


class Out(NamedTuple):
    logits: torch.Tensor
    mean: torch.Tensor


class Net(nn.Module):
    """Draws random numbers, and has buffers that follow what comes."""

    def __init__(self, p: float) -> None:
        super().__init__()
        self.first, self.norm, self.drop = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(p)
        self.last = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Out:
        logits = self.last(self.drop(torch.tanh(self.norm(self.first(x)))))
        return Out(logits, logits.mean())


def looked_at(out: Any, y: torch.Tensor) -> list[Any]:
    """As loops take metrics."""
    logits = out.logits.detach()
    return [(out.logits.argmax(-1) == y).sum().item(), logits.square().sum().item()]


def run(model: Any, optimizer: Any, batches: Any, when: str) -> tuple[list[float], list[Any]]:
    losses, values = [], []
    torch.manual_seed(7)
    for x, y in batches:
        optimizer.zero_grad()
        out = model(x)
        loss = numpy.float64(1.0) * F.cross_entropy(out.logits, y)  # as of a mixture's weight
        if when == "before":
            values.append([*looked_at(out, y), loss.item()])
        loss.backward()
        if when == "between":
            values.append([*looked_at(out, y), loss.item()])
        optimizer.step()
        if when == "after":
            values.append([*looked_at(out, y), loss.item()])
        losses.append(loss.item())
    return losses, values


def batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    draws = [torch.Generator().manual_seed(step) for step in range(3)]
    return [
        (torch.randn(8, 6, generator=g, dtype=torch.float64), torch.randint(0, 3, (8,), generator=g))
        for g in draws
    ]


def model_of(
    p: float, plan: dict[str, Any] | None, rows: Any = "all", norm: bool = True
) -> tuple[Any, Any, Net]:
    torch.manual_seed(0)
    net = Net(p).double()
    if not norm:
        net.norm = nn.Identity()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
    if plan is None:
        return net, optimizer, net
    return *espalier.prepare(net, optimizer, plan=plan, rows=rows)[:2], net


def same(got: list[Any], expected: list[Any], what: Any) -> None:
    for a, b in zip(got, expected, strict=True):
        assert max(abs(x - y) for x, y in zip(a, b, strict=True)) < TOLERANCE, what


def on_two(rank: int, world: int) -> None:
    of_one = {when: run(*model_of(0.0, None)[:2], batches(), when) for when in WHEN}
    for plan in ({"pipe": 2}, {"pipe": 2, "accumulate": 2}):
        for p in (0.0, 0.5):
            results, buffers = {}, []
            for when in WHEN:
                model, optimizer, net = model_of(p, plan)
                results[when] = run(model, optimizer, batches(), when)
                buffers.append([x.clone() for x in net.buffers() if not x.is_meta])
            for when in WHEN:
                losses, values = results[when]
                assert losses == results["never"][0], (plan, p, when)  # looking changes nothing
                if when != "never":
                    same(values, results["after"][1], (plan, p, when))
                for x, y in zip(buffers[WHEN.index(when)], buffers[0], strict=True):
                    assert torch.equal(x, y), (plan, p, when)
                if p == 0 and "accumulate" not in plan:  # batch norm sees micro-batches
                    for got, expected in zip(losses, of_one[when][0], strict=True):
                        assert abs(got - expected) < TOLERANCE, (plan, when)
                    same(values, of_one[when][1], (plan, when))
    told(rank)
    twice()


def twice() -> None:
    """A second backward pass through one call repeats what was drawn in the first."""
    x, y = batches()[0]
    for accumulate in (1, 2):
        model, optimizer, net = model_of(0.5, {"pipe": 2, "accumulate": accumulate})
        out = model(x)
        loss = F.cross_entropy(out.logits, y)
        loss.backward(retain_graph=True)
        once = {name: grad.clone() for name, grad in model.engine.full_gradients().items()}
        kept = [b.clone() for b in net.buffers()]
        loss.backward()
        for name, grad in model.engine.full_gradients().items():
            assert (grad - 2 * once[name]).abs().max() < TOLERANCE, (accumulate, name)
        assert all(map(torch.equal, net.buffers(), kept))
        with pytest.raises(RuntimeError, match=r"backward\(retain_graph=True\) the first time"):
            loss.backward()
        (-2 * F.cross_entropy(out.logits, y)).backward()
        for name, grad in model.engine.full_gradients().items():
            assert grad.abs().max() < TOLERANCE, (accumulate, name)
        loss = F.cross_entropy(model(x).logits, y)
        loss.backward(retain_graph=True)
        optimizer.step()
        with pytest.raises(RuntimeError, match="parameters were updated since"):
            loss.backward()


def summed(rank: int, world: int) -> None:
    """Sums over what is in all batches of a step, as transformers and accelerate make them, added up."""
    found = {}
    for plan in (None, {"pipe": 2}, {"pipe": 2, "accumulate": 2}):
        model, optimizer, _ = model_of(0.0, plan, norm=False)
        total, seen = torch.zeros((), dtype=torch.float64), []
        for _ in range(2):
            rows = batches()
            items = torch.tensor(sum(len(y) for _, y in rows))
            for x, y in rows:
                with model.no_sync() if plan else nullcontext():
                    loss = F.cross_entropy(model(x).logits, y, reduction="sum") / items
                    (loss / 0.5).backward()
                total += loss.detach()
                seen.append((3 * loss).item())
            seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
        assert type(total) is torch.Tensor
        found[str(plan)] = [*seen, total.item()]
        if plan is not None:
            same([found[str(plan)]], [found["None"]], plan)
    model = model_of(0.0, {"pipe": 2, "accumulate": 2}, norm=False)[0]
    out = model(x).logits
    with pytest.warns(UserWarning, match="one of all rows"):  # a micro-batch has fewer
        loss = F.cross_entropy(out, y, reduction="sum") / out.shape[0]
        loss.backward()
    assert loss.item() == pytest.approx(F.cross_entropy(out.detach(), y).item(), abs=TOLERANCE)


def told(rank: int) -> None:
    model, optimizer, _ = model_of(0.0, {"pipe": 2, "accumulate": 2})
    for step, (x, y) in enumerate(batches()):
        out = model(x)
        F.cross_entropy(out.logits, y).backward()
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:  # the first step's was not asked for, so this one was not kept
            with pytest.raises(ValueError, match=r"after optimizer.step\(\)(.|\n)*before the step"):
                out.logits.argmax(-1).tolist()
    model, optimizer, _ = model_of(0.0, {"pipe": 2, "accumulate": 2})
    for _ in range(2):
        optimizer.zero_grad()
        out = model(x)
        F.cross_entropy(out.logits, y).backward()
        optimizer.step()
        out.logits.argmax(-1).tolist()  # so the next step's is kept
    with pytest.raises(ValueError, match=r"another in each micro-batch(.|\n)*loss.item\(\)"):
        out.mean.item()

    model = model_of(0.0, {"pipe": 2, "accumulate": 2})[0]
    out = model(x)
    with patch.object(model.engine.passes, "output", wraps=model.engine.passes.output) as output:
        first = looked_at(out, y)
        asked = output.call_count
        torch.zeros(8, 3, dtype=torch.float64).add_(out.logits.detach()).add_(1.0)  # another's
        assert looked_at(out, y) == first and output.call_count == asked > 0
    with pytest.warns(UserWarning, match=r"two calls of the model(.|\n)*torch.cat"):
        loss = F.cross_entropy(out.logits, y) * F.cross_entropy(model(x + 1).logits, y)
        loss.backward()
    scale = next(model.parameters()).mean()
    with pytest.warns(UserWarning, match=r"multiplies an output with(.|\n)*parameters of the model"):
        F.cross_entropy(out.logits * scale, y).backward()
    with pytest.raises(IndexError):
        F.cross_entropy(out.logits, y.clone().fill_(9)).backward()


def on_four(rank: int, world: int) -> None:
    """Each rank's own rows."""
    for plan in ({"pipe": 2, "data": 2}, {"pipe": 2, "data": 2, "accumulate": 2}):
        torch.manual_seed(0)
        nets = [nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double() for _ in range(2)]
        nets[1].load_state_dict(nets[0].state_dict())
        optimizers = [torch.optim.SGD(m.parameters(), lr=0.5) for m in nets]
        model, optimizers[0] = espalier.prepare(nets[0], optimizers[0], plan=plan, rows="own")[:2]
        place = model.engine.mesh.coordinate[model.engine.mesh.axis("data")]
        here = (slice(0, 4), slice(4, 8))[place]
        for x, y in batches():
            out, expected = model(x[here]), nets[1](x)
            F.cross_entropy(out, y[here]).backward()
            F.cross_entropy(expected, y).backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
            got = torch.tensor(out.detach().tolist(), dtype=torch.float64)
            assert (got - expected[here]).abs().max() < TOLERANCE, plan


def counts(model: Any, optimizer: Any, loader: Any) -> list[Any]:
    """As metrics keep them: in tensors of their own, of outputs and of a loader's rows."""
    confusion, right, made = torch.zeros(3, 3, dtype=torch.long), torch.zeros(3, dtype=torch.long), []
    total = torch.zeros(())
    for x, y in loader:
        out = model((2 * x).to(x.dtype))
        loss = F.cross_entropy(out, y)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found = out.argmax(-1)
        assert isinstance(found, torch.Tensor) and isinstance(out.detach(), torch.Tensor)
        confusion += torch.bincount(3 * y + found, minlength=9).reshape(3, 3)
        right.add_(((found == y)[:, None] & (y[:, None] == torch.arange(3))).sum(0))
        total += y.sum()
        made.append(torch.as_tensor(loss, dtype=torch.float64).detach())
    return [*confusion.flatten().tolist(), *right.tolist(), float(total), *map(float, made)]


def counted(rank: int, world: int, plan: dict[str, int]) -> None:
    rows = [torch.cat(x) for x in zip(*batches(), strict=True)]
    expected: list[Any] | None = None
    for of in (None, plan):
        torch.manual_seed(0)
        net: Any = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()
        optimizer = torch.optim.SGD(net.parameters(), lr=0.5)
        loader: Any = DataLoader(TensorDataset(*rows), batch_size=7)
        if of is not None:
            net, optimizer, loader = espalier.prepare(net, optimizer, loader, plan=of)
        given = counts(net, optimizer, loader)
        expected = expected or given
        assert given == pytest.approx(expected, abs=TOLERANCE), of


@pytest.mark.parametrize("plan", [{"pipe": 2}, {"pipe": 2, "accumulate": 2}, {"pipe": 2, "data": 2}])
def test_counts_of_a_loaders_rows(ranks: Any, plan: dict[str, int]) -> None:
    ranks(2 * plan.get("data", 1), counted, plan)


def test_looking_at_outputs_of_a_pipeline_changes_nothing(ranks: Any) -> None:
    ranks(2, on_two)


def test_losses_that_are_shares_of_a_steps_sum(ranks: Any) -> None:
    ranks(2, summed)


def test_own_rows_of_outputs_after_a_step(ranks: Any) -> None:
    ranks(4, on_four)


def hooked(rank: int, world: int) -> None:
    """Who collects features by hooks is told, once, of those that are in another stage."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 6)).double()
    model, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan={"pipe": 2})
    x, found, names = torch.ones(4, 6, dtype=torch.float64), dict[str, Any](), ("0", "2")
    with torch.no_grad():
        expected = model(x)  # no hook, no word
        for name in names:
            collect = partial(found.__setitem__, name)
            net.get_submodule(name).register_forward_hook(lambda _, given, out, collect=collect: collect(out))
        with pytest.warns(UserWarning, match=f"'{names[1 - rank]}' has a hook.* give features"):
            assert torch.equal(model(x), expected)
        assert [*found] == [names[rank]]
        model(x)


def test_hooks_in_stages_of_other_ranks_are_told_of(ranks: Any) -> None:
    ranks(2, hooked)


def counted_on_the_host(rank: int, world: int) -> None:
    """What hangs on the plan or on the program's text is found once, not in each step."""
    net = nn.Sequential(nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 4)).double()
    optimizer = torch.optim.SGD(net.parameters(), 0.1)
    model, optimizer = espalier.prepare(net, optimizer, plan={"pipe": 2})
    x, y = torch.ones(4, 6, dtype=torch.float64), torch.arange(4)

    def step() -> None:
        out = model(x)
        assert isinstance(out, torch.Tensor)
        loss = F.cross_entropy(out, y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()

    step()
    step()
    profile = cProfile.Profile()
    profile.runcall(step)
    called = {name for _, _, name in pstats.Stats(profile).stats}  # type: ignore[attr-defined]
    assert "backward" in called
    assert not called & {"_create_sub_mesh", "get_instructions", "_draws", "_bare", "without_data", "_build"}


def test_host_work_that_is_done_once(ranks: Any) -> None:
    ranks(2, counted_on_the_host)


class Passes(nn.Module):
    """Its first features cross all stages."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6) for _ in range(4)).double()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        features = x = self.layers[0](x)
        for layer in [*self.layers][1:]:
            x = torch.tanh(layer(x))
        return x, features


def evaluated_with_gradients(rank: int, world: int) -> None:
    """A program need not write torch.no_grad() around an evaluation."""
    net = Passes()
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
    expected = [out.detach().clone() for out in net(x)]
    plan = {"pipe": 2, "accumulate": 2, "schedule": "interleaved", "stages_per_rank": 2}
    model, _ = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan=plan)
    model.eval()
    for got, out in zip(model(x), expected, strict=True):
        assert torch.allclose(got.detach(), out, atol=1e-12)


def test_evaluations_with_gradients_of_what_crosses_stages(ranks: Any) -> None:
    ranks(2, evaluated_with_gradients)
