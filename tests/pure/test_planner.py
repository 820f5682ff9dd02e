"""The planner: what is composed of shallow dry runs is what the deep one tells."""

from __future__ import annotations

import random
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.models import GPT, GPTConfig
from espalier.planner import Cluster, Totals, composed, shipped
from espalier.planner.compose import NotComposed, shallow
from espalier.planner.prices import Prices
from espalier.planner.recording import Op
from tests.asked import left_to_sweeps

SMALL = {"chunk_megabytes": 0.01, "prefetch_megabytes": 0.01}


def given(layers: int, rows: int, **more: Any) -> tuple[Any, Any, Any]:
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=131, max_positions=16, layers=layers, hidden=48, heads=4, **more))
        x = torch.empty(rows, 16, dtype=torch.int64)
    return net, {"input_ids": x, "labels": x}, torch.optim.AdamW(net.parameters())


def both(plan: dict[str, Any], layers: int, coordinate: Any = None, **more: Any) -> tuple[Totals, Totals]:
    rows = plan.get("data", 1) * plan.get("accumulate", 1) * (4 if plan.get("tensor_mode") else 1)
    net, batch, optimizer = given(layers, rows, **more)
    kept = [p for group in optimizer.param_groups for p in group["params"]]
    short = composed(net, plan, batch, optimizer=optimizer, coordinate=coordinate, max_grad_norm=1.0)
    assert len(net.blocks) == layers
    assert all(a is b for a, b in zip(kept, optimizer.param_groups[0]["params"], strict=True))
    report = espalier.dry_run(net, plan, batch, optimizer=optimizer, coordinate=coordinate, max_grad_norm=1.0)
    whole = Totals.of(report)
    assert whole.peak_bytes == report.peak_bytes
    assert max(whole.peaks, key=whole.peaks.__getitem__) == report.peak_at
    return short, whole


def drawn(seed: int) -> tuple[dict[str, Any], int, dict[str, Any]]:
    lot = random.Random(seed)
    plan: dict[str, Any] = {
        "data": lot.choice([1, 2, 3, 4]),
        "zero": lot.choice([0, 1, 2, 3]),
        "precision": lot.choice(["float32", "bfloat16"]),
        "recompute": lot.choice(["none", "full", "selective"]),
        **lot.choice([{}, {"tensor": 2}, {"tensor": 2, "sequence_parallel": True}, {"context": 2}]),
        **lot.choice([{}, {}, {"tensor": 4, "tensor_mode": "2d", "context": 1, "sequence_parallel": False}]),
        **SMALL,
    }
    if plan["zero"]:
        plan["offload"] = lot.choice([{}, {}, {"states": "host"}])
    return plan, lot.randint(9, 10), {"dropout": lot.choice([0.0, 0.1]), "tied": lot.random() < 0.5}


@pytest.mark.parametrize("seed", left_to_sweeps(range(3, 7), 2, why="2 and 4 have all of it"))
def test_drawn_plans_are_told_right(seed: int) -> None:
    plan, layers, more = drawn(seed)
    short, whole = both(plan, layers, **more)
    assert short.differs(whole) == [], plan


@pytest.mark.parametrize("seed", range(3))
def test_composed_is_the_whole(seed: int) -> None:
    plan, layers, more = drawn(seed)
    short, whole = both(plan, layers, **more)
    assert not short.why and short.runs in (3, 5), short.why
    assert short.differs(whole) == [], plan


@pytest.mark.parametrize("rank", range(2))
@pytest.mark.parametrize(
    "plan", [{}, {"schedule": "zb-h1"}, {"data": 2, "zero": 1, "recompute": "full"}], ids=str
)
def test_composed_stages(plan: dict[str, Any], rank: int) -> None:
    plan = {"pipe": 2, "accumulate": 4, "cuts": ("blocks.5",), **SMALL, **plan}
    short, whole = both(plan, 10, {"pipe": rank})
    assert not short.why and short.runs > 1, short.why
    assert short.differs(whole) == [] and short.rank["pipe"] == rank
    assert bool(whole.slots) == (plan.get("zero") == 1)


def test_small_pieces_are_copied_as_in_the_whole() -> None:
    """Runs are so deep that those of the first chunks that are copied for an update are the whole's."""
    plan = {"data": 2, "zero": 1, "chunk_megabytes": 0.02}
    short, whole = both(plan, 14, bias=True)
    assert short.runs > 1 and short.differs(whole) == [], short.why


def test_what_is_not_affine_is_run_whole() -> None:
    for plan, layers, why in (
        ({"data": 2}, 8, "several blocks go into one chunk"),
        ({"data": 2, "chunk_megabytes": 0.08}, 8, "it is not deep: chunks are alike every 3 blocks"),
        ({"pipe": 2, "accumulate": 2}, 8, "stages do not begin at blocks that the plan names"),
        ({}, 3, "it is not deep"),
    ):
        short, whole = both(plan, layers)
        assert short.runs == 1 and why in short.why and short.differs(whole) == []
    net, batch, _ = given(8, 1)
    net.blocks[3].mlp.extra = nn.Parameter(torch.empty(3, device="meta"))
    found = composed(net, {}, batch)
    assert found.runs == 1 and found.why == "there are 2 kinds of blocks"


def test_a_difference_is_told() -> None:
    net, batch, _ = given(2, 2)
    one, two = (Totals.of(espalier.dry_run(net, {"data": 2, "zero": z}, batch)) for z in (0, 1))
    assert any(line.startswith("peaks") for line in one.differs(two))
    assert one.differs(one) == []


def test_blocks_that_share_parameters_stay() -> None:
    net, _, optimizer = given(4, 1)
    net.blocks[3].mlp = net.blocks[0].mlp
    with pytest.raises(NotComposed, match="share parameters"), shallow(net, optimizer, "blocks", 2):
        pass
    assert len(net.blocks) == 4


def test_a_cluster_as_toml(tmp_path: Path) -> None:
    for name in shipped():
        cluster = Cluster.load(name)
        (tmp_path / "c.toml").write_text(cluster.to_toml(), "utf-8")
        assert Cluster.load(tmp_path / "c.toml") == cluster, name
    assert len(shipped()) >= 10
    h100 = Cluster.load("h100-sxm")
    assert h100.source("device.ceiling.bfloat16").spread == 0.15
    assert h100.source("device.memory_gb").source == "shipped"
    assert h100.source("host").source == "assumed"
    node, fabric = h100.level
    assert h100.span(8, 1) == (node, 1)
    assert h100.span(4, 8) == (fabric, 1)
    assert h100.span(16, 2) == (fabric, 4)


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"memory_gb": -1}, "device.memory_gb = -1: expected greater than 0"),
        ({"memory_gb": 80e9}, "expected 10^9 bytes"),
        ({"memory_gb": 0.08}, "device.memory_gb = 0.08: less than any device has: expected 10^9 bytes, 1.68"),
        ({"bandwidth_gbs": 3.35}, "expected 10^9 bytes a second, 198 to 1e+05 by tflops. Check the unit"),
        ({"tflops": {"bfloat16": 0.989}}, "device.bandwidth_gbs = 3350.0: more than any device has"),
        ({"ceiling": 0.00053}, "device.ceiling = 0.00053: less than any device has: expected a share of 1"),
        ({"host_us_per_op": 6000.0}, "more than any machine takes: expected microseconds"),
        ({"bandwidth_gbs": -3.0}, "device.bandwidth_gbs = -3.0: expected greater than 0"),
        ({"tflops": {"bfloat16": 989e12}}, "expected 10^12 operations a second"),
        ({"tflops": {"bfloat": 989.0}}, "did you mean"),
        ({"memroy_gb": 3.0}, "unknown key"),
        ({"reserved_gb": 81.0}, "expected less than memory_gb"),
        ({"tflops": {}}, "expected a peak for one dtype or more"),
        (
            {"host_us_per_op": 6e-6},
            "device.host_us_per_op = 6e-06: less than any machine takes: expected micro",
        ),
    ],
    ids=str,
)
def test_a_cluster_with_mistakes(change: dict[str, Any], told: str) -> None:
    tables = tomllib.loads(Cluster.load("h100-sxm").to_toml())
    tables["device"].update(change)
    with pytest.raises(ValueError, match=re.escape(told)):
        Cluster.from_dict(tables)


@pytest.mark.parametrize(
    ("table", "change", "told"),
    [
        ("level", {"bandwidth_gbs": -50.0}, "level.0.bandwidth_gbs = -50.0: expected greater than 0"),
        (
            "level",
            {"bandwidth_gbs": 450e9},
            "level.0.bandwidth_gbs = 450000000000.0: more than any device has",
        ),
        ("level", {"bandwidth_gbs": 0.45}, "10^9 bytes a second, 3.35 to 2e+04 beside such devices"),
        ("level", {"bandwidth_gbs": 0.45}, 'have unusual = ["level.0.bandwidth_gbs"] as the first line'),
        ("level", {"latency_us": 0.009}, "level.0.latency_us = 0.009: less than any machine takes"),
        ("level", {"collectives": {"all_reduce": [[8, 10**6, 2e-5]]}}, "of bytes and microseconds"),
        ("level", {"latency_us": 9e6}, "level.0.latency_us = 9000000.0: more than any machine takes"),
        ("level", {"bandwith_gbs": 3.0}, "did you mean level.0.bandwidth_gbs?"),
        ("provenance", {"key": "device.celing"}, "device has no such key; did you mean 'ceiling'?"),
        ("provenance", {"key": "devise.ceiling"}, "there is no such table; did you mean 'device'?"),
    ],
    ids=str,
)
def test_links_with_mistakes(table: str, change: dict[str, Any], told: str) -> None:
    tables = tomllib.loads(Cluster.load("h100-sxm").to_toml())
    tables[table][0].update(change)
    with pytest.raises(ValueError, match=re.escape(told)):
        Cluster.from_dict(tables)


def test_unusual_numbers_are_taken_where_they_are_meant() -> None:
    tables = tomllib.loads(Cluster.load("h100-sxm").to_toml())
    tables["level"][0]["bandwidth_gbs"] = 0.45
    made = Cluster.from_dict({**tables, "unusual": ["level.0.bandwidth_gbs"]})
    assert made.level[0].bandwidth_gbs == 0.45
    assert Cluster.from_dict(tomllib.loads(made.to_toml())) == made
    with pytest.raises(ValueError, match="unusual = 'level.0.bandwidth': expected keys with a range"):
        Cluster.from_dict({**tables, "unusual": ["level.0.bandwidth"]})


def test_levels_stand_in_one_another() -> None:
    tables = tomllib.loads(Cluster.load("h100-sxm").to_toml())
    tables["level"][1]["ranks"] = 12
    with pytest.raises(ValueError, match="a multiple of the 8 ranks of the level inside of it"):
        Cluster.from_dict(tables)
    with pytest.raises(ValueError, match="did you mean 'h100-sxm'"):
        Cluster.load("h100-smx")


def test_a_device_waits_for_its_host_block_by_block() -> None:
    h100 = Cluster.load("h100-sxm")
    device = h100.device.model_copy(update={"host_us_per_op": 10.0})
    prices = Prices(h100.model_copy(update={"device": device}), {"data": 1})
    big, small = (Op("add", "other", (), "float32", 0, size) for size in (10**9, 100))
    rate = device.bandwidth_gbs * 1e9 * device.memory_share
    slow = prices.of({"forward": Counter({small: 10})}, "forward")
    assert slow.idle == pytest.approx(10 * (10e-6 - 100 / rate))
    ahead = prices.of({"forward": Counter({big: 10, small: 10})}, "forward")
    assert ahead.host < ahead.compute and ahead.idle == pytest.approx(0.3 * slow.idle)
    # what comes after it lends it no time
    both = slow.plus(prices.of({"forward": Counter({big: 10})}, "forward"))
    assert both.idle == slow.idle and both.alone == pytest.approx(both.compute + slow.idle)


@pytest.mark.parametrize("name", ["h100-sxm", "v100-sxm"])
def test_products_of_8_bits_are_priced_as_those_of_16(name: str) -> None:
    prices = Prices(Cluster.load(name), {"data": 1})
    kinds = ("float8_e4m3fn", "bfloat16")
    eight, half = (Op("mm", "matmul", (1, 4096, 4096, 4096), kind, 2 * 4096**3, 0) for kind in kinds)
    assert prices.op(eight) == prices.op(half) > 0
