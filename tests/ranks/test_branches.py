"""Branches of a layer on different ranks, in float64 against the same model on one process."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.models.gpt import MLP, Attention, GPTConfig, rotary_tables
from espalier.tensor import DTensor

TOLERANCE = 1e-9
CONFIG = GPTConfig(vocab_size=37, hidden=24, heads=4, max_positions=12, bias=True)


class Block(nn.Module):
    """GPT-J's: attention and MLP have one input."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(24)
        self.attention, self.mlp = Attention(CONFIG), MLP(CONFIG)
        self.dropout = nn.Dropout(0.0)

    def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        y = self.norm(x)
        return self.dropout(self.attention(y, cos, sin) + self.mlp(y)) + x


class Parallel(nn.Module):
    """A GPT of such blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(37, 24)
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(24, 37)
        cos, sin = rotary_tables(12, 6, 1e4)
        self.register_buffer("cos", cos)
        self.register_buffer("sin", sin)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, self.cos, self.sin)
        return F.cross_entropy(self.head(x).flatten(0, 1), ids.flatten())


TABLE = {"*.attention": 0, "*.mlp": 1}


def train(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        torch.manual_seed(2)
        net = Parallel().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        layouts = {"*.[qkvgu]*_proj": "column", "*.[od]*_proj": "row"} if plan.get("tensor") else None
        engine = espalier.initialize(
            net, ours, {"branch": 2, **plan}, branches=TABLE, layouts=layouts, max_grad_norm=0.5
        )
        at = engine.mesh.coordinate[engine.mesh.axis("branch")]
        for step in range(3):
            ids = torch.randint(0, 37, (4, 12), generator=torch.Generator().manual_seed(step))
            loss, expected = engine(ids), plain(ids)
            assert abs(loss.item() - expected.item()) < TOLERANCE
            engine.backward(loss)
            expected.backward()
            engine.finish_gradients()
            for (name, p), q in zip(net.named_parameters(), plain.parameters(), strict=True):
                elsewhere = next((k for m, k in TABLE.items() if m[1:] in name), at) != at
                assert isinstance(p, DTensor) and p.is_meta == elsewhere, name
                if elsewhere:
                    with pytest.warns(UserWarning, match="another stage or branch"):
                        assert p.grad is None
                else:
                    assert (espalier.full_tensor(p.grad) - q.grad).abs().max() < TOLERANCE, name
            engine.step()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm.item()) < TOLERANCE
            for name, x in engine.full_state_dict().items():
                assert (x - plain.state_dict()[name]).abs().max() < TOLERANCE, name


def test_training_equals_one_process(ranks: Any) -> None:
    ranks(2, train, [{}, {"recompute": "full"}])


@pytest.mark.parametrize("plan", [{"data": 2, "zero": 1}, {"data": 2, "zero": 3}, {"tensor": 2}], ids=str)
def test_beside_other_axes(ranks: Any, plan: dict[str, Any]) -> None:
    ranks(4, train, [plan])


class Towers(nn.Module):
    """Two encoders of different inputs, whose outputs meet."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Sequential(nn.Embedding(37, 16), nn.Linear(16, 8))
        self.image = nn.Sequential(nn.Linear(12, 20), nn.GELU(), nn.Linear(20, 8))
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, ids: torch.Tensor, pixels: torch.Tensor) -> torch.Tensor:
        words, image = self.words(ids).mean(1), self.image(pixels)
        scores = self.scale * F.normalize(words, dim=-1) @ F.normalize(image, dim=-1).T
        return F.cross_entropy(scores, torch.arange(len(scores)))


def towers(rank: int, world: int) -> None:
    for plan in ({"branch": 2, "data": world // 2}, {"branch": 2, "data": world // 2, "zero": 3}):
        torch.manual_seed(2)
        net = Towers().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        engine = espalier.initialize(net, ours, plan, branches={"words": 0, "image": 1})
        for step in range(3):
            torch.manual_seed(step)
            data = {"ids": torch.randint(0, 37, (6, 5)), "pixels": torch.randn(6, 12, dtype=torch.float64)}
            loss, expected = engine.train_step(data), plain(**data)
            assert abs(loss.item() - expected.item()) < TOLERANCE
            expected.backward()
            theirs.step()
            theirs.zero_grad()
        for name, x in engine.full_state_dict().items():
            assert (x - plain.state_dict()[name]).abs().max() < TOLERANCE, name


def test_towers(ranks: Any) -> None:
    ranks(2, towers)
    ranks(4, towers)


ONE = ("branch", "all_reduce", 4 * 12 * 24 * 4)


def said(book: espalier.Ledger) -> list[tuple[str, str, int]]:
    return [(entry.axis, entry.op, entry.bytes) for entry in book.entries]


def traffic(rank: int, world: int) -> list[int]:
    engine = espalier.initialize(Parallel(), None, {"branch": 2}, branches=TABLE)
    ids = torch.zeros(4, 12, dtype=torch.int64)
    with espalier.ledger(engine.mesh) as book:
        loss = engine(ids)
    assert said(book) == [ONE] * 2
    with espalier.ledger(engine.mesh) as book:
        engine.backward(loss)
    assert said(book) == [ONE] * 2
    flops = []
    for plan in ({"branch": 2}, {}):
        with torch.device("meta"):
            dry = Parallel()
        table, at = (TABLE, (0, rank, 0)) if plan else (None, None)
        report = espalier.dry_run(dry, plan, ids.to("meta"), branches=table, coordinate=at)
        assert said(report.ledger) == [ONE] * (4 if plan else 0)
        flops.append(report.flops)
    return flops


def test_branches_meet_in_one_sum_and_divide_the_work(ranks: Any) -> None:
    (first, whole), (second, _) = ranks(2, traffic)
    outside = 3 * 2 * 4 * 12 * 24 * 37  # the head is computed by both
    assert first + second == whole + outside


def piped(rank: int, world: int, plan: dict[str, Any]) -> None:
    """Stages whose layers have branches, and the ledger that a dry run foretells."""
    torch.manual_seed(2)
    net = Parallel().double()
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
    plan = {"pipe": 2, "branch": 2, "accumulate": 2, **plan}
    engine = espalier.initialize(net, ours, plan, branches=TABLE, max_grad_norm=0.5)
    for step in range(3):
        ids = torch.randint(0, 37, (4, 12), generator=torch.Generator().manual_seed(step))
        expected = plain(ids)
        if step == 0:
            assert abs(engine.evaluate([ids]).item() - expected.item()) < TOLERANCE
        expected.backward()
        engine.accumulate(engine.cut(ids))
        engine.finish_gradients()
        assert engine.loss is not None and abs(engine.loss.item() - expected.item()) < TOLERANCE
        found = engine.full_gradients()
        for name, q in plain.named_parameters():
            assert (found[name] - q.grad).abs().max() < TOLERANCE, name
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        engine.step()
        assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm.item()) < TOLERANCE
    for name, x in engine.full_state_dict().items():
        assert (x - plain.state_dict()[name]).abs().max() < TOLERANCE, name
    with espalier.ledger(engine.mesh) as book:
        engine.train_step(ids)
    with torch.device("meta"):
        dry = Parallel().double()
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW(dry.parameters()), "max_grad_norm": 0.5}
    at = engine.mesh.coordinate
    report = espalier.dry_run(dry, plan, ids.to("meta"), branches=TABLE, coordinate=at, **given)
    assert report.ledger.entries == book.entries


@pytest.mark.parametrize("schedule", ["1f1b", "zb-h1"])
def test_stages_with_branches(ranks: Any, schedule: str) -> None:
    ranks(4, piped, {"schedule": schedule})


@pytest.mark.world(8)
def test_stages_with_branches_and_shards(ranks: Any) -> None:
    ranks(8, piped, {"data": 2, "zero": 3})


def random(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    """Dropout in a branch draws what it draws without branches."""
    found = []
    for plan in plans:
        torch.manual_seed(2)
        net = Parallel().double()
        for block in net.blocks:
            block.attention.dropout, block.dropout.p = 0.3, 0.3
            block.mlp.down_proj = nn.Sequential(block.mlp.down_proj, nn.Dropout(0.3))
        table = {"branches": TABLE} if "branch" in plan else {"layouts": {"head": "column"}}
        engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.0), plan, **table)
        torch.manual_seed(5)
        found.append(engine.train_step(torch.arange(48).view(4, 12) % 37).item())
    assert abs(found[0] - found[1]) < TOLERANCE


def test_random_values_are_those_without_branches(ranks: Any) -> None:
    ranks(2, random, [{"branch": 2}, {"tensor": 2}])
    two = {"accumulate": 2}
    ranks(4, random, [{"pipe": 2, "branch": 2, **two}, {"data": 2, "tensor": 2, **two}])


def test_what_cannot_be() -> None:
    def refused(plan: dict[str, int], table: dict[str, int] | None, net: nn.Module) -> str:
        mesh = espalier.Mesh.dry(espalier.Plan(**plan).axes)
        with pytest.raises(ValueError) as caught:
            espalier.initialize(net, None, plan, mesh=mesh, branches=table)
        return str(caught.value)

    with torch.device("meta"):
        net = Parallel()
    assert "branch = 2, and the modules that are branches: None" in refused({"branch": 2}, None, net)
    assert "branch = 1" in refused({}, TABLE, net)
    text = refused({"branch": 2}, {"*.attn": 0, "*.mlp": 2, "*.mlp.up_proj": 0, "*.attention": 0}, net)
    assert "'*.attn' matches no module" in text and "2 is none of the branches 0 to 1" in text
    assert "'blocks.0.mlp.up_proj' lies within 'blocks.0.mlp'" in text
    net.blocks[0].mlp.down_proj.weight = net.blocks[1].mlp.down_proj.weight
    net.blocks[1].attention.o_proj.bias = net.head.bias
    assert "is used in" in refused({"branch": 2}, TABLE, net)
