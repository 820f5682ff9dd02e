"""Experts on different ranks, in float64 against the same model on one process."""

from __future__ import annotations

import copy
import math
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.models import build
from espalier.models.moe import Experts
from tests.ranks.test_engine import TOLERANCE, apart, batch, same_steps
from tests.zoo.drawn_mixes import Routed

SIZES = {
    "vocab_size": 37, "hidden": 24, "heads": 4, "kv_heads": 2, "layers": 2, "max_positions": 16,
    "ffn": 10, "experts": 5, "top_k": 2, "shared": 1, "balance": 0.1, "z": 0.01,
}  # fmt: skip


def model(**changes: Any) -> nn.Module:
    torch.manual_seed(1)
    return build("moe", {**SIZES, **changes}).double()


def same(engine: espalier.Engine, plain: nn.Module, steps: int = 3, rows: int = 6) -> None:
    same_steps(engine, plain, torch.optim.AdamW(plain.parameters(), lr=1e-2), steps, rows)


def started(net: nn.Module, plan: dict[str, Any]) -> tuple[espalier.Engine, nn.Module]:
    plain = copy.deepcopy(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    return espalier.initialize(net, optimizer, plan, max_grad_norm=0.5), plain


def train(rank: int, world: int, plans: list[dict[str, Any]], **changes: Any) -> None:
    for plan in plans:
        engine, plain = started(model(**changes), plan)
        same(engine, plain)
        if plan.get("zero") == 3:  # what is not experts' is cut among all
            rest = [p for name, p in engine.module.named_parameters() if ".experts." not in name]
            held = sum(math.prod(espalier.layout_of(p).local_shape) for p in rest)
            assert held * world < 1.15 * sum(p.numel() for p in rest)


@pytest.mark.parametrize(
    "plans",
    [
        [{"data": 2, "expert": 2, "zero": zero, "chunk_megabytes": 0.002} for zero in (0, 1, 2, 3)]
        + [{"data": 2}, {"tensor": 2}],
        [
            {"data": 4, "expert": 4, "zero": 3},
            {"data": 4, "expert": 2, "zero": 1},
            {"data": 4, "expert": 2, "zero": 3},
            {"data": 2, "expert": 2, "tensor": 2},
        ],
    ],
    ids=["2", "4"],
)
def test_training_equals_one_process(ranks: Any, plans: list[dict[str, Any]]) -> None:
    ranks(espalier.Plan.from_dict(plans[0]).world_size, train, plans)


GRID = {"tensor": 4, "tensor_mode": "2d"}


class Normed(Experts):
    """Experts with a layer that all of them share: its parameters have no entry for each."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.norm = nn.RMSNorm(config.hidden)

    def _expert(self, number: int, x: torch.Tensor) -> torch.Tensor:
        return self.norm(super()._expert(number, x))


def on_grids(rank: int, world: int, trials: list[tuple[dict[str, Any], dict[str, Any]]]) -> None:
    for plan, changes in trials:
        net = model(**changes)
        for block in net.blocks:
            block.moe.experts = Normed(net.config).double()
            for p in block.moe.experts.parameters():
                nn.init.normal_(p, std=0.3)
        engine, plain = started(net, plan)
        same(engine, plain, 2)
        layout = espalier.layout_of(engine.module.blocks[0].moe.experts.up_proj)
        # one from another, along all axes of the grid
        assert {layout.mesh.names[a] for a in layout.cuts[0]} >= set(engine.plan.tensor_axes)


@pytest.mark.parametrize(
    ("world", "trials"),
    [
        (4, [(GRID, {}), ({**GRID, "recompute": "full"}, {"experts": 3, "layers": 1})]),  # fewer than ranks
        (
            8,
            [
                ({"tensor": 8, "tensor_mode": "2.5d", "depth": 2}, {"layers": 1}),
                ({"tensor": 8, "tensor_mode": "3d"}, {"layers": 1}),
                ({**GRID, "data": 2, "zero": 3}, {}),
                ({**GRID, "data": 2, "expert": 2, "zero": 1}, {"layers": 1}),
            ],
        ),
    ],
)
def test_experts_on_grids(ranks: Any, world: int, trials: Any) -> None:
    ranks(world, on_grids, trials)


def beside_context(rank: int, world: int) -> None:
    engine, plain = started(model(layers=1), {"data": 2, "expert": 2, "context": 2, "zero": 2})
    same(engine, plain, steps=2)


def test_sequences_that_are_cut(ranks: Any) -> None:
    ranks(4, beside_context)


def limited(rank: int, world: int) -> None:
    for capacity in (0.5, 1.0):
        net = model(capacity=capacity, layers=1)
        engine, plain = started(net, {"data": 2, "expert": 2, "zero": 2})
        same(engine, plain, steps=2)
        with torch.no_grad():
            ours, theirs = (run(**batch(6)).dropped for run in (net, plain))
        assert ours.item() == theirs.item() > 0


def test_capacity_is_that_of_the_whole_batch(ranks: Any) -> None:
    ranks(2, limited)


def extremes(rank: int, world: int) -> None:
    for zero in (0, 3):
        net = model(top_k=1, balance=0.5, layers=1)
        for block in net.blocks:
            block.moe.router.weight.data.zero_()
        engine, plain = started(net, {"data": 2, "expert": 2, "zero": zero})
        seen: list[int] = []
        experts = plain.blocks[0].moe.experts
        experts.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(len(args[1].unique())))
        same(engine, plain)
        assert seen[0] == 1 and max(seen) > 1  # all tokens to one expert, later to several


def autocast(rank: int, world: int) -> None:
    """The rank without a token for its experts gets what others made of its own, in their dtype."""
    net = model(top_k=1, layers=1).float()
    net.blocks[0].moe.router.weight.data.zero_()
    plain = copy.deepcopy(net)
    plan = {"data": 2, "expert": 2, "precision": "autocast-bfloat16"}
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan)
    with torch.autocast("cpu", torch.bfloat16):
        expected = plain(**batch(6)).loss
    expected.backward()
    loss = engine(batch(6))
    assert abs(loss.item() - expected.item()) < 1e-3
    engine.backward(loss)
    engine.finish_gradients()
    assert apart(net, plain, gradients=True) < 1e-2


def few_rows(rank: int, world: int) -> None:
    """A rank without a token, computing again in its backward pass what others send it."""
    engine, plain = started(model(), {"data": 2, "expert": 2, "zero": 3, "recompute": "full"})
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "A global batch of 1 rows leaves 1 of the 2 ranks")
        same(engine, plain, rows=1)
        # of tokens that are rows themselves the other rank has none, either
        plain = nn.Sequential(Routed("two"), nn.Linear(8, 2)).double()
        net = espalier.prepare(copy.deepcopy(plain), plan={"data": 2, "expert": 2, "zero": 3})
        found: list[torch.Tensor] = []
        row = torch.linspace(-1, 1, 8, dtype=torch.float64)[None]
        net(row).sum().backward()
        plain(row).sum().backward()
        assert apart(net, plain, gradients=True) < 1e-12
        for one in (net, plain):  # parameters that are given lie otherwise
            given = {name: p.detach() * 0.9 for name, p in one.named_parameters()}
            found.append(espalier.full_tensor(torch.func.functional_call(one, given, (row,))))
        assert (found[0] - found[1]).abs().max() < 1e-12


def test_all_tokens_to_one_expert_and_ranks_without_tokens(ranks: Any) -> None:
    ranks(2, extremes)
    ranks(2, few_rows)
    ranks(2, autocast)


def traffic(rank: int, world: int) -> None:
    engine, plain = started(model(), {"data": 2, "expert": 2})
    sent: list[int] = []
    for block in plain.blocks:
        block.moe.experts.register_forward_pre_hook(lambda _, args: sent.append(crossing(args[1], rank)))
    data = batch(6)
    plain(**data)
    with espalier.ledger(engine.mesh) as book:
        engine.backward(engine(data))
    bytes_ = [entry.bytes for entry in book.entries if entry.op == "all_to_all" and entry.axis == "expert"]
    # of each block: how many for each of the other's experts; the rows there; what was made of them, back
    there = 2 if rank == 0 else 3
    row, own = SIZES["hidden"] * 8, [sent[0][0], sent[1][0]]
    others = [sent[0][1], sent[1][1]]
    forward = [n for i in (0, 1) for n in (there * 8, own[i] * row, others[i] * row)]
    backward = [n for i in (1, 0) for n in (own[i] * row, others[i] * row)]
    assert bytes_ == forward + backward, (bytes_, forward, backward)


def crossing(index: torch.Tensor, rank: int) -> tuple[int, int]:
    """Of 6 rows of a batch: how many choices leave this rank for the other's experts, and the other way."""
    of_rank = index.view(2, -1)
    away = [int((of_rank[0] >= 3).sum()), int((of_rank[1] < 3).sum())]
    return away[rank], away[1 - rank]


def test_only_tokens_of_the_others_experts_are_sent(ranks: Any) -> None:
    ranks(2, traffic)


def test_a_dry_run_takes_the_shares_of_experts_to_be_equal() -> None:
    def run(expert: int, kind: str = "moe") -> espalier.DryReport:
        with torch.device("meta"):
            net = build("moe", {**SIZES, "experts": 8, "shared": 0})
            tokens = torch.zeros(16, 12, dtype=torch.int64)
        plan = {"data": 8, "expert": expert, "zero": 1}
        optimizer = torch.optim.AdamW(net.parameters())
        return espalier.dry_run(net, plan, {"input_ids": tokens, "labels": tokens}, optimizer=optimizer)

    one, four = run(1), run(4)
    assert one.flops == four.flops
    assert four.parameter_bytes < one.parameter_bytes
    rows = 2 * 12 * 2 * 3 // 4 * SIZES["hidden"] * 4  # of 2 rows a rank, 2 choices; 3 of 4 experts elsewhere
    sent = [e.bytes for e in four.ledger.entries if e.axis == "expert" and e.op == "all_to_all"]
    assert sorted(sent) == sorted([6 * 8] * 2 + [rows] * 8)


def balanced(rank: int, world: int, plan: dict[str, Any]) -> None:
    """Every token goes to every expert: then a dry run knows all."""
    sizes = {**SIZES, "experts": 4, "top_k": 4}
    plan = {**plan, "clip": 1.0}

    def made(device: str) -> tuple[nn.Module, torch.optim.Optimizer, dict[str, torch.Tensor]]:
        with torch.device(device):
            net = build("moe", sizes)
        return net, torch.optim.AdamW(net.parameters()), {k: x.to(device) for k, x in batch(6).items()}

    net, optimizer, data = made("cpu")
    engine = espalier.initialize(net, optimizer, plan)
    for _ in range(2):
        engine.train_step(data)
    net, optimizer, data = made("meta")
    at = engine.mesh.coordinate
    report = espalier.dry_run(net, plan, data, optimizer=optimizer, coordinate=at)
    assert engine.ledger() == report.ledger


def test_a_dry_run_of_equal_shares_is_the_real_step(ranks: Any) -> None:
    ranks(2, balanced, {"data": 2, "expert": 2, "zero": 3})
    ranks(4, balanced, GRID)


class Listed(nn.Module):
    """A mixture of experts that nobody would recognise: a list of layers, and another name for everything."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(12, 4)
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(12, 9), nn.GELU(), nn.Linear(9, 12)) for _ in range(4)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights, choice = self.router(x).softmax(-1).topk(2, -1)
        out = torch.zeros_like(x)
        for number, layer in enumerate(self.layers):
            row, slot = torch.where(choice == number)
            out.index_add_(0, row, layer(x[row]) * weights[row, slot, None])
        return out.square().mean()


def listed(rank: int, world: int) -> None:
    torch.manual_seed(3)
    net = Listed().double()
    plain = copy.deepcopy(net)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters()), {"data": 2, "zero": 3})
    x = torch.randn(7, 12, dtype=torch.float64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", espalier.GatherWarning)
        loss = engine(x)
        engine.backward(loss)
    plain(x).backward()
    engine.finish_gradients()
    assert abs(loss.item() - plain(x).item()) < TOLERANCE
    assert apart(net, plain, gradients=True) < TOLERANCE


def test_experts_of_another_form_are_right_all_the_same(ranks: Any) -> None:
    ranks(2, listed)


def compiled(rank: int, world: int) -> str:
    engine, _ = started(model(layers=1), {"data": 2, "expert": 2})
    engine.module.blocks[0] = espalier.compile(engine.module.blocks[0])
    with pytest.raises(NotImplementedError) as caught:
        engine(batch(6))
    return str(caught.value)


def test_experts_are_not_compiled(ranks: Any) -> None:
    assert "which experts of this Experts hangs on values" in ranks(2, compiled)[0]
