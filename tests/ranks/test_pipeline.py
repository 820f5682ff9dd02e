"""Pipelines against the same model on one process, in float64."""

from __future__ import annotations

import copy
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.parallel.pipeline import generate, live, to_csv
from tests.asked import left_to_sweeps, on_sweeps
from tests.ranks.test_engine import SIZES as PLAIN_SIZES
from tests.ranks.test_engine import batch
from tests.ranks.test_experts import SIZES as EXPERTS

TOLERANCE = 1e-10
SIZES = {**PLAIN_SIZES, "moe": EXPERTS}
Trial = tuple[dict[str, Any], str, dict[str, Any]]


def model(kind: str, **changes: Any) -> nn.Module:
    torch.manual_seed(1)
    return espalier.models.build(kind, {**SIZES[kind], **changes}).double()


def labels(data: dict[str, torch.Tensor]) -> int:
    return int((data["labels"] != -100).sum())


def mean_loss(net: nn.Module, parts: list[dict[str, torch.Tensor]]) -> torch.Tensor:
    """That of micro-batches as one batch."""
    counts = [labels(part) for part in parts]
    return sum(n * net(**part).loss for n, part in zip(counts, parts, strict=True)) / sum(counts)


def dry(plan: dict[str, Any], kind: str, changes: dict[str, Any], rows: int, coordinate: Any) -> Any:
    with torch.device("meta"):
        twin = espalier.models.build(kind, {**SIZES[kind], **changes}).double()
    data = {k: torch.empty_like(v, device="meta") for k, v in batch(rows).items()}
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW(twin.parameters()), "max_grad_norm": 0.5}
    count = labels if kind == "moe" else None
    return espalier.dry_run(twin, plan, data, **given, coordinate=coordinate, count=count)


def trains(rank: int, world: int, trials: list[Trial]) -> None:
    """The same losses, gradients, norms and parameters as one process, and the ledger a dry run foretells."""
    for plan, kind, changes in trials:
        net = model(kind, **changes)
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        count = labels if kind == "moe" else None  # its balance loss is of micro-batches
        engine = espalier.initialize(net, ours, plan, max_grad_norm=0.5, count=count)
        # two micro-batches are of one size, of which each is traced; more are uneven
        rows = 8 if plan.get("accumulate") == 2 else 9
        for step in range(2):
            parts = engine.cut(batch(rows, step))
            expected = mean_loss(plain, parts if kind == "moe" else [batch(rows, step)])
            expected.backward()
            engine.accumulate(parts)
            engine.finish_gradients()
            assert engine.loss is not None and abs(engine.loss.item() - expected.item()) < TOLERANCE, plan
            found = engine.full_gradients()
            for name, q in plain.named_parameters():
                grad = found[name]
                assert grad is not None and q.grad is not None
                assert (grad - q.grad).abs().max() < TOLERANCE, (plan, kind, step, name)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            assert engine.step()
            assert engine.grad_norm is not None
            assert abs(engine.grad_norm.item() - norm.item()) < TOLERANCE, (plan, kind, step)
        state = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            assert (state[name] - value).abs().max() < TOLERANCE, (plan, kind, name)
        with torch.no_grad():
            # each rank traces each size: these are of the sizes that were trained on
            parts = engine.cut(batch(rows, 8))[:2]
            assert abs(engine.evaluate(parts).item() - mean_loss(plain, parts).item()) < TOLERANCE
        with espalier.ledger(engine.mesh) as book:
            engine.train_step(batch(rows))
        # of the first stage, of one within and of the last; where tokens go to experts a dry run cannot know
        if rank in (0, world - 1, world // 2 - 1 if plan["pipe"] > 2 else 0) and kind != "moe":
            foretold = dry(plan, kind, changes, rows, engine.mesh.coordinate)
            assert book.entries == foretold.ledger.entries, (plan, kind)


TWO = {"pipe": 2, "accumulate": 4}
FOUR, TIED = {"layers": 4}, {"layers": 4, "tied": True}
WITHIN = {"chunk_megabytes": 0.002, "sequence_parallel": True, "recompute": "selective"}
TRIALS: list[Trial] = [
    ({**TWO, "data": 2, "tensor": 2, "schedule": "1f1b", "zero": 3}, "gpt", {"layers": 3}),
    ({**TWO, "data": 2, "tensor": 2, "schedule": "zb-h1", "zero": 1, **WITHIN}, "gpt2", TIED),
    ({**TWO, "tensor": 4, "tensor_mode": "2d", "schedule": "gpipe"}, "gpt2", {}),
    ({**TWO, "accumulate": 2, "tensor": 4, "tensor_mode": "2.5d", "depth": 2, "zero": 1}, "gpt2", {}),
    ({**TWO, "context": 2, "data": 2, "zero": 3, "schedule": "zbv", "stages_per_rank": 2}, "gpt2", TIED),
    (
        {**TWO, "context": 2, "tensor": 2, "schedule": "interleaved", "stages_per_rank": 2},
        "gpt",
        {"layers": 4},
    ),
    (
        {**TWO, "accumulate": 2, "data": 2, "replicate": 2, "zero": 3, "schedule": "naive"},
        "gpt2",
        {"tied": True},
    ),
    (
        {**TWO, "accumulate": 2, "data": 4, "zero": 1, "schedule": "gpipe", "chunk_megabytes": 0.002},
        "gpt",
        {},
    ),
    ({**TWO, "accumulate": 2, "data": 4, "expert": 2, "zero": 2, "schedule": "zb-h1"}, "moe", {}),
    ({**TWO, "accumulate": 2, "tensor": 4, "tensor_mode": "2d", "schedule": "gpipe"}, "moe", {}),
    ({"pipe": 4, "tensor": 2, "accumulate": 8, "sequence_parallel": True, "schedule": "zb-h1"}, "gpt2", TIED),
    ({"pipe": 4, "data": 2, "accumulate": 4, "zero": 2}, "gpt2", TIED),
    ({**TWO, "data": 2, "tensor": 2, "recompute": "selective", "zero": 3, "schedule": "zb-h1"}, "gpt", {}),
    ({"pipe": 8, "accumulate": 9, "cuts": [f"blocks.{i}" for i in range(1, 8)]}, "gpt2", {"layers": 8}),
]


@pytest.mark.world(8)
@pytest.mark.parametrize(
    "trial", left_to_sweeps(range(len(TRIALS)), 7, 9, 10, 12, why="others have all of it")
)
def test_equals_one_process(ranks: Any, trial: int) -> None:
    ranks(8, trains, [TRIALS[trial]], timeout=240.0)


OF_SIXTEEN: list[Trial] = [
    ({**TWO, "accumulate": 2, "tensor": 8, "tensor_mode": "3d", "schedule": "zb-h1"}, "gpt2", TIED),
    (
        {
            **TWO,
            "accumulate": 2,
            "tensor": 8,
            "tensor_mode": "3d",
            "schedule": "zbv",
            "stages_per_rank": 2,
            "zero": 1,
        },
        "gpt",
        FOUR,
    ),
    (
        {**TWO, "accumulate": 2, "tensor": 8, "tensor_mode": "2.5d", "depth": 2, "schedule": "zb-h1"},
        "gpt2",
        TIED,
    ),
]


@on_sweeps("16 ranks")
@pytest.mark.world(16)
@pytest.mark.parametrize("trial", range(len(OF_SIXTEEN)))
def test_of_sixteen_ranks(ranks: Any, trial: int) -> None:
    ranks(16, trains, [OF_SIXTEEN[trial]], timeout=500.0)


OF_FOUR: list[Trial] = [
    ({**TWO, "data": 2, "schedule": "mine.csv", "zero": 2}, "gpt", {}),
    ({**TWO, "data": 2, "recompute": "full", "schedule": "zbv", "stages_per_rank": 2}, "gpt2", TIED),
    ({**TWO, "data": 2, "zero": 2, "offload": {"states": "host"}}, "gpt2", TIED),
    ({"pipe": 2, "data": 2}, "gpt2", {}),
]


@pytest.mark.world(4)
@pytest.mark.parametrize("trial", range(len(OF_FOUR)))
def test_of_four_ranks(ranks: Any, trial: int, tmp_path: Path) -> None:
    plan, kind, changes = OF_FOUR[trial]
    if plan.get("schedule") == "mine.csv":
        plan = {**plan, "schedule": str(tmp_path / "mine.csv")}
        (tmp_path / "mine.csv").write_text(to_csv(generate("zb-h1", 2, 4)))
    ranks(4, trains, [(plan, kind, changes)], timeout=240.0)


def goes_on_after_evaluations(rank: int, world: int, plan: dict[str, Any]) -> None:
    net = model("gpt2", layers=4)
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan, max_grad_norm=0.5)
    engine.train_step(batch(8))
    foretold = dry(plan, "gpt2", {"layers": 4}, 8, engine.mesh.coordinate)
    for n in (1, 2):
        engine.evaluate([batch(8, 7)] * n)
        with espalier.ledger(engine.mesh) as book:
            engine.train_step(batch(8))
        assert book.entries == foretold.ledger.entries, n


@pytest.mark.parametrize("schedule", ["gpipe", "1f1b", "interleaved"])
def test_evaluations_do_not_change_what_a_step_gathers(ranks: Any, schedule: str) -> None:
    plan = {**TWO, "data": 2, "zero": 3, "schedule": schedule}
    if schedule == "interleaved":
        plan["stages_per_rank"] = 2
    ranks(4, goes_on_after_evaluations, plan)


class Slow(nn.Linear):
    """Takes time of which no count tells, on some ranks: computing, or while others compute."""

    works = naps = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        end = time.thread_time() + self.works
        while time.thread_time() < end:
            pass
        time.sleep(self.naps)
        return super().forward(x)


def balances(rank: int, world: int) -> Any:
    """Cuts by counts and by time; a step after the latter."""
    found = []
    for balance in ("counted", "measured"):
        torch.manual_seed(4)
        net = nn.Sequential(*(Slow(8, 8) for _ in range(6))).double()
        net[0].works, net[5].naps = 0.02 * rank, 0.05 * rank
        before = [p.clone() for p in net.parameters()]
        plain = copy.deepcopy(net)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = espalier.initialize(net, optimizer, {**TWO, "balance": balance}, loss_fn=F.mse_loss)
        data = torch.randn(8, 8).double(), torch.zeros(8, 8).double()
        expected = F.mse_loss(plain(data[0]), data[1])
        assert abs(engine.train_step(data).item() - expected.item()) < TOLERANCE
        assert all(torch.equal(p, q) for p, q in zip(plain.parameters(), before, strict=True))
        found.append(engine.stages.split.cuts)
    return found


def test_stages_are_balanced_by_time(ranks: Any) -> None:
    """Rank 1 alone is slow in the first part, and both cut after it."""
    assert ranks(2, balances) == [[("3",), ("1",)]] * 2
    with pytest.raises(ValueError, match="a dry run has none"):
        dry({**TWO, "balance": "measured"}, "gpt2", {}, 4, None)


# ---- what is drawn, held and met


def dropout_losses(rank: int, world: int, plan: dict[str, Any]) -> list[float]:
    net = model("gpt2", dropout=0.2, layers=4)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    torch.manual_seed(5)
    return [engine.train_step(batch(7, step)).item() for step in range(3)]


def test_dropout_is_that_of_one_process(ranks: Any) -> None:
    (alone,) = ranks(1, dropout_losses, {"accumulate": 4})
    for plan in (
        {**TWO, "schedule": "zb-h1"},
        {**TWO, "schedule": "interleaved", "stages_per_rank": 2, "recompute": "full"},
    ):
        for found in ranks(2, dropout_losses, plan):
            assert found == pytest.approx(alone, abs=TOLERANCE)


def low_precision(rank: int, world: int, plan: dict[str, Any], precision: dict[str, Any]) -> Any:
    torch.manual_seed(3)
    net = espalier.models.build("gpt2", {**SIZES["gpt2"], "tied": False})
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine = espalier.initialize(net, optimizer, {**plan, "precision": precision}, max_grad_norm=0.5)
    losses = [engine.train_step(batch(8, step)).item() for step in range(7)]
    state = {k: v.tolist() for k, v in engine.full_state_dict().items()}
    return losses, engine.skipped, engine.scale, engine.grad_norm.item(), state


@pytest.mark.parametrize(
    "precision",
    [
        {"compute": "bfloat16", "reduce": "float32"},
        {"compute": "float16", "loss_scale": {"init_scale": 2.0**20}},
        {"compute": "autocast-bfloat16"},
        {"compute": "autocast-float16", "loss_scale": {"init_scale": 2.0**20}},
    ],
    ids=lambda precision: precision["compute"],
)
def test_masters_and_loss_scales_are_those_of_one_process(ranks: Any, precision: dict[str, Any]) -> None:
    (alone,) = ranks(1, low_precision, {"accumulate": 4}, precision)
    for found in ranks(2, low_precision, TWO, precision):
        assert found[:3] == alone[:3] and found[3] == pytest.approx(alone[3]) and found[4] == alone[4]
    assert 0 < alone[1] < 7 or "bfloat16" in precision["compute"], "some steps are skipped"


def casts(rank: int, world: int, plan: dict[str, Any]) -> Any:
    """Stages that give 16 bits under autocast, and a loss that is made under it too."""
    torch.manual_seed(3)
    net = nn.Sequential(*(part for _ in range(4) for part in (nn.Linear(8, 8), nn.Tanh())), nn.Linear(8, 8))
    mix = torch.randn(8, 8)
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    plan = {**plan, "accumulate": 4, "precision": "autocast-bfloat16"}
    engine = espalier.initialize(net, optimizer, plan, loss_fn=lambda out, y: F.mse_loss(out @ mix, y))
    losses = [engine.train_step((torch.randn(8, 8), torch.ones(8, 8))).item() for _ in range(3)]
    if world > 1:
        wires = next(iter(engine.stages.shape_inference._known.values())).wires
        assert {wire.dtype for of in wires for wire in of} == {torch.bfloat16}
    return losses, {k: v.tolist() for k, v in engine.full_state_dict().items()}


def test_autocast_is_that_of_one_process(ranks: Any) -> None:
    (alone,) = ranks(1, casts, {})
    two = {"schedule": "zbv", "stages_per_rank": 2, "cuts": ["2", "4", "6"]}
    for plan in (two, {"schedule": "zb-h1", "cuts": ["3"]}, {"recompute": "full", "cuts": ["4"]}):
        for found in ranks(2, casts, {"pipe": 2, **plan}):
            assert found == alone
    for losses, _ in ranks(4, casts, {"pipe": 2, "data": 2, "zero": 3}):
        assert losses == pytest.approx(alone[0], rel=1e-2)


def casts_dry(rank: int, world: int, plan: dict[str, Any]) -> Any:
    """A step's ledger, and how far its memory rises, of the real one and of a dry one."""
    found, coordinate = [], None
    for dry in (False, True):
        with torch.device("meta" if dry else "cpu"):
            parts = [part for _ in range(4) for part in (nn.Linear(64, 64), nn.Tanh())]
            net, data = nn.Sequential(*parts), (torch.ones(256, 64), torch.ones(256, 64))
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        if dry:
            made = partial(espalier.engine.dry.dry_engine, batch=data, coordinate=coordinate)
        else:
            made = espalier.initialize
        engine = made(net, optimizer=optimizer, plan=plan, loss_fn=F.mse_loss)
        coordinate = engine.mesh.coordinate
        engine.train_step(data)
        watch = engine.watch()
        begun = watch.live.now
        with espalier.ledger(engine.mesh) as book, watch:
            engine.train_step(data)
        found.append((book.entries, watch.peak - begun))
    return found


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_dry_run_knows_what_autocast_casts(ranks: Any, recompute: str) -> None:
    plan = {"pipe": 2, "cuts": ["4"], "accumulate": 4, "schedule": "gpipe", "recompute": recompute}
    for found in ranks(2, casts_dry, {**plan, "precision": "autocast-bfloat16"}):
        (entries, rise), (foretold, told) = found
        assert entries == foretold
        assert abs(rise - told) < 512, "some numbers; in float32 it would be 30 KiB more"


def holds(rank: int, world: int) -> None:
    """No more micro-batches than the schedule says, and parameters only where they belong."""
    for schedule, v in (("gpipe", 1), ("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("zbv", 2)):
        net = model("gpt2", layers=4)
        plan = {**TWO, "schedule": schedule, "stages_per_rank": v, "accumulate": 6}
        engine = espalier.initialize(net, torch.optim.Adagrad(net.parameters()), plan)
        engine.train_step(batch(6))
        promised = live(generate(schedule, 2, 6, v))[rank]
        assert engine.stages.runtime.most == promised * v, schedule
        for name, p in net.named_parameters():
            assert p.is_meta == (rank not in engine.stages.users[name]), name
        whole = sum(p.numel() for p in net.parameters()) * 8
        assert engine.memory()["parameters"].total < 0.7 * whole
    with pytest.raises(ValueError, match=r"engine.train_step\(batch\)"):
        engine.follow(torch.zeros(()))


def test_what_a_rank_holds(ranks: Any) -> None:
    ranks(2, holds)


def test_outputs_are_let_go_when_they_are_sent() -> None:
    def peak(m: int) -> int:
        with torch.device("meta"):
            net = nn.Sequential(nn.Linear(8, 800), nn.Linear(800, 4))
        plan = {"pipe": 2, "accumulate": m, "schedule": "gpipe", "cuts": ["1"]}
        data = torch.empty(8 * m, 8, device="meta"), torch.empty(8 * m, 4, device="meta")
        engine = espalier.engine.dry.dry_engine(
            net, plan, data, loss_fn=F.mse_loss, optimizer=torch.optim.SGD(net.parameters(), lr=0.1)
        )
        watch = engine.watch()
        with watch:
            engine.train_step(data)
        return watch.peak

    output = 8 * 800 * 4
    assert peak(8) - peak(2) < 2 * output


class Odd(nn.Module):
    """Fails when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Linear(6, 6)
        self.fails = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.fails:
            raise LookupError("odd rows")
        return self.body(x)


def fails(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = nn.Sequential(*(Odd() for _ in range(4)))
    engine = espalier.initialize(
        net, torch.optim.SGD(net.parameters(), lr=0.1), {**TWO, "pipe": 4}, loss_fn=F.mse_loss
    )
    data = torch.ones(8, 6), torch.zeros(8, 6)
    losses = [engine.train_step(data).item()]
    for stage in range(4):
        net[stage].fails = True
        with pytest.raises(LookupError, match="odd rows"):
            engine.train_step(data)
        with pytest.raises(LookupError, match="odd rows"):
            engine.evaluate([data])
        net[stage].fails = False
    losses += [engine.train_step(data).item() for _ in range(2)]
    assert losses[0] > losses[1] > losses[2]


def test_a_failure_in_a_stage_is_met_by_all(ranks: Any) -> None:
    ranks(4, fails)


def writes(rank: int, world: int, trials: list[tuple[dict[str, Any], str]]) -> None:
    """Text as of one process that computes all tokens anew; each token travels once."""
    prompt = torch.arange(10).reshape(2, 5) * 3
    for plan, kind in trials:
        net = model(kind, layers=2)
        plain = copy.deepcopy(net)
        engine = espalier.initialize(net, None, plan)
        given: dict[str, Any] = {"temperature": 0.0, "max_positions": 7}  # the last tokens: of a part
        expected = espalier.models.generate(plain, prompt, 4, cache=False, **given)
        assert torch.equal(engine.generate(prompt, 4, **given), expected), (plan, kind)
        sent = []
        for cache in (True, False):
            given = {"top_k": 5, "generator": torch.Generator().manual_seed(1), "cache": cache}
            with espalier.ledger(engine.mesh) as book:
                drawn = engine.generate(prompt, 3, **given)
            sent.append(sum(e.bytes for e in book.entries if (e.op, e.axis) == ("send", "pipe")))
            given = {"top_k": 5, "generator": torch.Generator().manual_seed(1)}
            assert torch.equal(drawn, espalier.models.generate(plain, prompt, 3, **given))
        if kind == "moe":
            assert 2 * sent[0] <= sent[1], "and numbers for the losses of experts"
        elif "pipe" in plan and "cuts" not in plan:
            assert sent[0] * (5 + 6 + 7) == sent[1] * (5 + 1 + 1)
        else:
            assert sent[0] == sent[1]


def test_each_token_is_computed_once(ranks: Any) -> None:
    within = {"pipe": 2, "cuts": ["blocks.1.attention.o_proj"]}  # attention is divided: nothing is kept
    twice = {"pipe": 2, "stages_per_rank": 2, "schedule": "zbv"}
    ranks(2, writes, [({"pipe": 2}, "gpt"), (twice, "gpt2"), (within, "gpt2"), ({"context": 2}, "gpt")])
    ranks(2, writes, [({"data": 2, "expert": 2}, "moe"), ({"pipe": 2}, "moe")])
    ranks(4, writes, [({"pipe": 2, "tensor": 2}, "gpt"), ({"data": 2, "tensor": 2, "zero": 3}, "gpt2")])


def changing(rank: int, world: int) -> None:
    """Shapes, numbers of micro-batches and modes change from step to step."""
    net = model("gpt2", layers=2)
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain))
    engine = espalier.initialize(net, ours, TWO)
    for rows, length in ((8, 12), (3, 7), (1, 12), (9, 5), (8, 12)):
        data = {k: v[:, :length] for k, v in batch(rows, rows).items()}
        expected = plain(**data).loss
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        assert abs(engine.train_step(data).item() - expected.item()) < TOLERANCE
        net.eval()
        assert abs(engine.evaluate([data]).item() - plain(**data).loss.item()) < TOLERANCE
        net.train()


def test_shapes_may_change(ranks: Any) -> None:
    ranks(2, changing)
