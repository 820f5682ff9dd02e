"""Gradients in the place of the parameters: the same bits, 14 bytes a parameter in place of 16."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import espalier
from espalier.mesh import Mesh
from espalier.models import build
from tests.ranks.test_data_memory import EVEN, Settled, even, storage_bytes, tokens
from tests.ranks.test_engine import batch, model

IN_PLACE = {"gradients": "in-place"}


def engine_of(plan: dict[str, Any], **sizes: Any) -> Any:
    net = model("gpt2", layers=2, hidden=20, tied=True, **sizes).float()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return espalier.initialize(net, optimizer, {"precision": "bfloat16", "clip": 0.3, **plan})


def run(engine: Any, steps: int) -> tuple[list[Any], Any, list[int]]:
    seen = []
    for step in range(steps):
        loss = engine.train_step(batch(8, step))
        norm = repr(engine.grad_norm.item())  # of a step that is skipped no number
        seen.append((loss.item(), norm, engine.scale, engine.skipped))
    for p in engine.module.parameters():
        assert p.grad is None and p.dtype in (torch.bfloat16, torch.float16)
    sent = [e.bytes for e in engine.ledger().entries]
    values = [espalier.full_tensor(p.detach()) for p in engine.module.parameters()]
    return seen, [values, engine.full_state_dict()], [len(sent), sum(sent)]


def same_bits(rank: int, world: int, plans: list[tuple[dict[str, Any], str]]) -> None:
    for plan, stages in plans:
        for zero in map(int, stages):
            full = {**plan, "zero": zero, "chunk_megabytes": 0.01}
            beside, there = run(engine_of(full), STEPS), run(engine_of({**full, **IN_PLACE}), STEPS)
            assert there[0] == beside[0], (plan, zero)
            assert any(float(norm) > 0.3 for _, norm, *_ in there[0]), "nothing is clipped"
            torch.testing.assert_close(there[1], beside[1], rtol=0, atol=0)
            assert there[2] == beside[2], (plan, zero)
            if "float16" in str(plan):
                assert 0 < there[0][-1][3] < STEPS, "no step was skipped, or all"


STEPS = 3
FALLS = {"init_scale": 2.0**24, "backoff_factor": 2.0**-8}
SKIPS = {"precision": {"compute": "float16", "loss_scale": FALLS}}


@pytest.mark.parametrize(
    ("world", "plans"),
    [
        (1, [({}, "0"), (SKIPS, "0")]),
        (2, [({"data": 2, **SKIPS}, "0123"), ({"data": 2, "recompute": "full"}, "03")]),
        (
            4,
            [
                ({"data": 4}, "0123"),
                ({"data": 2, "tensor": 2, "sequence_parallel": True}, "13"),
                ({"replicate": 2, "data": 2}, "02"),
            ],
        ),
    ],
    ids=str,
)
def test_in_place_gives_the_same_bits(ranks: Any, world: int, plans: list[Any]) -> None:
    ranks(world, same_bits, plans)


def test_in_place_with_states_away(ranks: Any, tmp_path: Path) -> None:
    disk = {"states": {"place": "disk", "ratio": 0.5}, "directory": str(tmp_path)}
    for offload, stages in (({"states": "host"}, "03"), (disk, "1")):
        ranks(2, same_bits, [({"data": 2, "offload": offload}, stages)])


def shares(engine: Any, data: Any) -> tuple[int, int]:
    """Bytes of parameters with their gradients, when both are there, and of states."""
    engine.backward(engine(data))
    engine.finish_gradients()
    net = engine.module
    assert all(p.grad is not None for p in net.parameters())
    held = storage_bytes([*net.parameters(), *(p.grad for p in net.parameters())])
    table = engine.memory()
    assert (table["gradients"].total, table["gradients"].formula) == (0, 0)
    assert table["parameters"].total == pytest.approx(held, rel=0.02)
    engine.step()
    states = [x for s in engine.optimizer.state.values() for x in s.values() if isinstance(x, torch.Tensor)]
    return held, storage_bytes([*states, *engine.masters()])


def holds(rank: int, world: int, n: int) -> None:
    for zero in range(4):
        plan = {"data": n, "zero": zero, "precision": "bfloat16", "chunk_megabytes": 0.05, **IN_PLACE}
        mesh = Mesh.dry(espalier.Plan.from_dict(plan).axes) if n != world else None
        with torch.device("cpu" if mesh is None else "meta"):
            net = build("gpt", even(n))
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan, mesh=mesh)
        found = shares(engine, tokens(n, "cpu" if mesh is None else "meta"))
        whole = sum(p.numel() for p in net.parameters())
        expected = 2 * whole / (n if zero == 3 else 1), 12 * whole / (n if zero else 1)
        assert found == pytest.approx(expected, rel=0.02), (zero, n)


@pytest.mark.parametrize(("world", "n"), [(1, 1), (2, 2), (1, 64)])
def test_in_place_takes_fourteen_bytes(ranks: Any, world: int, n: int) -> None:
    ranks(world, holds, n)


def peak_of_dry(sizes: dict[str, Any], plan: dict[str, Any]) -> int:
    with torch.device("meta"):
        net = build("gpt", sizes)
    optimizer = torch.optim.AdamW(net.parameters())
    found = espalier.dry_run(net, plan, tokens(plan["data"], "meta"), optimizer=optimizer)
    return found.peak_bytes


def peaks(rank: int, world: int) -> list[tuple[int, int]]:
    found = []
    for zero in (0, 3):
        plan = {"data": world, "zero": zero, "precision": "bfloat16", **IN_PLACE, "clip": 1.0}
        plan.update(chunk_megabytes=0.05, prefetch_megabytes=0.1)
        dry = peak_of_dry(EVEN, plan)
        net = build("gpt", EVEN)
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan)
        for _ in range(2):
            engine.train_step(tokens(world, "cpu"))
        states = [x for s in engine.optimizer.state.values() for x in s.values()]
        held = [*net.parameters(), *net.buffers(), *states, *engine.masters()]
        with Settled(engine.resized, round(1.005 * dry)) as memory:
            for x in held:
                memory.hold(x)
            engine.train_step(tokens(world, "cpu"))
        found.append((memory.peak, dry))
    return found


def test_in_place_has_the_peak_that_a_dry_run_says(ranks: Any) -> None:
    for real, dry in ranks(2, peaks)[0]:
        assert dry == pytest.approx(real, rel=0.005)


def test_in_place_no_step_takes_more_than_fourteen_bytes_and_some_chunks() -> None:
    sizes, plan = {**EVEN, "layers": 8}, {"data": 1, "precision": "bfloat16", "chunk_megabytes": 0.05}
    with torch.device("meta"):
        whole = sum(p.numel() for p in build("gpt", sizes).parameters())
    assert 18 * whole < peak_of_dry(sizes, plan)  # with gradients in float32, for the update of all at once
    assert 14 * whole < peak_of_dry(sizes, {**plan, **IN_PLACE}) < 15 * whole


def reads_and_writes(rank: int, world: int, zero: int) -> None:
    data, twins = batch(8), []
    for more in ({}, IN_PLACE):
        engine = engine_of({"data": world, "zero": zero, "chunk_megabytes": 0.01, **more})
        engine.train_step(data)
        engine.backward(engine(data))
        engine.finish_gradients()
        p, q, r = list(engine.module.parameters())[:3]
        with torch.no_grad():
            seen = [espalier.full_tensor(p.detach()).clone(), p.norm().item(), engine.evaluate([data]).item()]
            seen.append({name: x.clone() for name, x in engine.full_state_dict().items()})
            assert p.mul_(0.5) is p
            q.add_(1)
            r.data = r.detach() + 2
            seen += [espalier.full_tensor(x.detach()).clone() for x in (p, q, r)]
            seen.append(engine.evaluate([data]).item())
        q.requires_grad_(False)
        assert not q.requires_grad
        q.requires_grad_(True)
        if more:
            for again, what in ((engine, data), (torch.sum, p), (engine.train_step, data)):
                with pytest.raises(RuntimeError, match="in-place"):
                    again(what)
        engine.step()
        seen.append(engine.train_step(data).item())
        engine.backward(engine(data))
        engine.zero_grad()
        seen += [espalier.full_tensor(x.detach()).clone() for x in (p, q, r)]
        twins.append([*seen, engine.full_state_dict()])
    torch.testing.assert_close(twins[1], twins[0], rtol=0, atol=0)


@pytest.mark.parametrize("zero", range(4))
def test_parameters_are_read_and_written_between_backward_and_step(ranks: Any, zero: int) -> None:
    ranks(2, reads_and_writes, zero)


def passes_on(rank: int, world: int, folder: str) -> None:
    before = {"data": world, "zero": 2, **IN_PLACE, "chunk_megabytes": 0.01}
    engine = engine_of(before)
    engine.train_step(batch(8))
    path = engine.save(folder)
    expected = run(engine, 2)
    for plan in ({"data": world, "zero": 3, **IN_PLACE}, {"data": world, "zero": 1}, before):
        other = engine_of(plan)
        other.backward(other(batch(8, 5)))  # gradients stand in place when it is loaded
        other.load(path)
        found = run(other, 2)
        assert found[0] == expected[0]
        torch.testing.assert_close(found[1], expected[1], rtol=0, atol=0)


def test_checkpoints_of_it_load_elsewhere(ranks: Any, tmp_path: Path) -> None:
    ranks(2, passes_on, str(tmp_path))


class Odd(torch.nn.Module):
    """A weight that no batch uses, one used twice, and one detached in an earlier block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = torch.nn.ModuleList([torch.nn.Linear(8, 8) for _ in range(3)])
        self.idle = torch.nn.Linear(8, 8)
        self.last = torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (self.blocks[0], *self.blocks):
            x = block(x).tanh() + x
        return self.last(x).square().mean()


def odd(rank: int, world: int) -> None:
    for zero in range(4):
        twins = []
        for more in ({}, IN_PLACE):
            torch.manual_seed(0)
            net = Odd()
            plan = {"data": world, "zero": zero, "precision": "bfloat16", "chunk_megabytes": 1e-4}
            optimizer = torch.optim.AdamW(net.parameters(), lr=0.1)
            engine = espalier.initialize(net, optimizer, {**plan, "recompute": {"blocks.1": "full"}, **more})
            losses = [engine.train_step((torch.randn(8, 8),)).item() for _ in range(3)]
            assert not engine.optimizer.state.get(net.idle.weight)
            twins.append([losses, engine.full_state_dict(), espalier.full_tensor(net.idle.weight.detach())])
        torch.testing.assert_close(twins[1], twins[0], rtol=0, atol=0)


def test_idle_and_repeated_parameters(ranks: Any) -> None:
    ranks(2, odd)


def test_what_cannot_be_is_said_at_once() -> None:
    with pytest.raises(ValueError, match="need masters") as error:
        espalier.Plan(gradients="in-place", accumulate=2, offload={"gradients": "host"})
    assert "accumulate = 1" in str(error.value) and "offload" in str(error.value)
    with pytest.raises(ValueError, match="reduce = bfloat16"):
        espalier.Plan(gradients="in-place", precision={"compute": "bfloat16", "reduce": "float32"})
