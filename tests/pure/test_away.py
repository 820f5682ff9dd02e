"""The planner's search where states, gradients and parameters may be off the device, and experts apart."""

from __future__ import annotations

import json
import math
import re
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from espalier import Plan, dry_run
from espalier.models import GPT, GPTConfig, MoE, MoEConfig
from espalier.planner import Cluster, Found, Recorder, Search, composed
from espalier.planner.explain import report, to_dict, to_toml, why_not, words
from espalier.planner.memory import carried, ways
from espalier.planner.prediction import plan_table
from espalier.planner.prices import Prices
from espalier.planner.whole import check, chosen, too_large
from espalier.train.plan_page import plan_page
from tests.asked import left_to_sweeps

H100 = Cluster.load("h100-sxm")
WIDE = {"vocab_size": 128, "max_positions": 32, "layers": 5, "hidden": 192, "heads": 4}


def labels(batch: Any) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


def given(kind: str = "gpt", rows: int = 8) -> tuple[Any, Any, Any, dict[str, Any]]:
    with torch.device("meta"):
        net = MoE(MoEConfig(**WIDE, experts=4)) if kind == "moe" else GPT(GPTConfig(**WIDE))
        x = torch.empty(rows, 32, dtype=torch.int64)
    options = {"count": labels} if kind == "moe" else {}
    return net, torch.optim.AdamW(net.parameters()), {"input_ids": x, "labels": x}, options


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(*given(), tmp_path_factory.mktemp("recordings"))


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    return Recorder(*given("moe"), tmp_path_factory.mktemp("recordings"))


def with_memory(device: float, host: float = 1000.0, disk: float = 1000.0) -> Cluster:
    """H100 nodes with so many bytes a device, and bytes a host and its disk, in 10^9."""
    small = H100.device.model_copy(update={"memory_gb": device / 1e9, "reserved_gb": 0.0})
    update = {
        "device": small,
        "host": H100.host.model_copy(update={"memory_gb": host}),
        "disk": H100.disk.model_copy(update={"capacity_gb": disk}),
    }
    return H100.model_copy(update=update)


def searched(recorder: Recorder, cluster: Cluster, ranks: int = 1, **fixed: Any) -> tuple[Search, Found]:
    fixed = {"pipe": 1, "tensor": 1, "recompute": "none"} | fixed
    base = Plan(precision="bfloat16", chunk_megabytes=0.1, prefetch_megabytes=0.1)
    search = Search(recorder, cluster, base, ranks=ranks, fixed=fixed, memory=1.0)
    return search, search.run()


PLANS: list[dict[str, Any]] = [
    {"data": 1},
    {"data": 2},
    {"data": 2, "zero": 1},
    {"data": 4, "zero": 2},
    {"data": 4, "zero": 3},
    {"data": 2, "zero": 1, "pipe": 2, "accumulate": 4, "cuts": ("blocks.3",)},
]


@pytest.mark.parametrize("changes", left_to_sweeps(PLANS, 2, why="stage 1 is a pipeline's, too"), ids=str)
def test_memory_is_that_of_the_dry_run_on_the_device_and_off_it(changes: dict[str, Any]) -> None:
    net, optimizer, batch, _ = given(rows=16)
    small = {"chunk_megabytes": 0.3, "prefetch_megabytes": 0.3, "precision": "bfloat16"}
    plan = Plan(**{"accumulate": 2, **small, **changes})
    search = Search(Recorder(net, optimizer, batch, {}), H100, plan, ranks=plan.world_size)
    for offload in [*ways(plan, "nowhere")][plan.pipe - 1 :: plan.pipe]:  # a stage costs as much as a model
        told = search.of(plan.model_copy(update={"offload": offload}))
        places = [{"pipe": i} for i in range(plan.pipe)] if plan.pipe > 1 else [None]
        dry = [dry_run(net, told.plan, batch, optimizer=optimizer, coordinate=x) for x in places]
        assert told.bytes == pytest.approx(max(x.peak_bytes for x in dry), rel=0.15), offload
        fullest = max(dry, key=lambda x: sum(x.away_bytes.values()))
        assert told.away == pytest.approx(dict(fullest.away_bytes), rel=0.02), offload
        table = json.loads(json.dumps(fullest.to_dict()))
        assert sum(x["bytes"] for x in table["carried"]) == sum(fullest.carried.values()) > 0
        assert "bytes a step between places" in str(fullest)


def test_what_is_carried_is_composed_as_all_else() -> None:
    net, optimizer, batch, _ = given(rows=8)
    plan = Plan(
        data=2, zero=3, accumulate=2, offload={"states": "host", "parameters": "host"}, prefetch_megabytes=0.1
    )
    dry = dry_run(net, plan, batch, optimizer=optimizer)
    short = composed(net, plan, batch, optimizer=optimizer)
    assert short.carried == dry.carried and short.away_bytes == dry.away_bytes


def test_offload_is_found_where_nothing_fits_without(recorder: Recorder) -> None:
    _, roomy = searched(recorder, H100)
    assert not roomy.best[0].plan.offload.away, "it fits, and offload is slower"
    assert any(x.plan.offload.away for x in roomy.best)
    assert any(line.startswith("offload states on host: +") for line in why_not(roomy))
    states = roomy.best[0].memory["states"]
    small = with_memory(min(x.bytes for x in roomy.best if not x.plan.offload.away) - 0.5 * states)
    search, tight = searched(recorder, small)
    assert tight.best and all(x.plan.offload.away for x in tight.best)
    first = tight.best[0]
    assert first.plan.offload.states.place == "host" and first.terms["offload"] > 0
    assert first.seconds == min(x.seconds for x in tight.best) and first.sent["host"] > 0
    assert math.isclose(sum(first.terms.values()), first.seconds, rel_tol=1e-9)
    assert not tight.plain[0].fits and not tight.plain[0].plan.offload.away
    # and it is what all the ways of all plans would have told
    every = [
        y
        for plan, rows in search.space.candidates()
        for offload in ways(plan, "offload")
        if (y := search.score(plan.model_copy(update={"offload": offload}), rows)) and y.fits
    ]
    assert first.seconds == pytest.approx(min(x.seconds for x in every))


def test_what_is_found_is_said(recorder: Recorder) -> None:
    _, roomy = searched(recorder, H100)
    least = min(x.bytes for x in roomy.best if not x.plan.offload.away)
    search, tight = searched(recorder, with_memory(least * 0.8))
    kept, runs = check(search, tight, recorder)
    assert runs[0].fits and runs[0].away == pytest.approx(dict(runs[0].prediction.away), rel=0.02)
    first = kept.best[0]
    text = report(kept, runs)
    assert "on host" in words(first.plan) and "in the host's memory, of" in text
    assert re.search(r"offload +[\d.e-]+ s +[\d.]+% +assumed", text) and re.search(
        r"host +assumed +± 30%", text
    )
    assert "offload = {" in text and 'states = "host"' in to_toml(plan_table(first.plan))
    assert Plan(**plan_table(first.plan)) == first.plan
    table = json.loads(json.dumps(to_dict(kept, runs)))
    assert table["best"][0]["away"]["host"] == first.away["host"]
    assert table["checked"][0]["away"]["host"] == runs[0].away["host"]
    page = plan_page("job", kept, runs)
    assert "<dt>on host</dt>" in page and "states" in page and 'class="back c7"' in page
    plan = chosen(kept)
    assert "offload" in plan.why and "states on host" in str(plan)


def test_host_and_disk_have_room_or_not(recorder: Recorder) -> None:
    _, roomy = searched(recorder, H100)
    tight = min(x.bytes for x in roomy.best if not x.plan.offload.away) * 0.8
    _, found = searched(recorder, with_memory(tight))
    rests = found.best[0].away["host"]
    _, less = searched(recorder, with_memory(tight, host=rests * 0.5 / 1e9))
    assert less.best and all(x.away.get("disk") for x in less.best), "states go to disk"
    assert less.best[0].plan.offload.directory == "offload"
    assert less.best[0].seconds > found.best[0].seconds
    _, none = searched(recorder, with_memory(tight, host=rests * 1e-3 / 1e9, disk=rests * 1e-3 / 1e9))
    assert not none.best and none.least is not None
    assert re.search(r"Beside them it has .* GB on (host|disk), where a rank has", too_large(none))
    # ranks of a host share it
    assert (
        with_memory(1e9, host=8.0).room("host", 4) == 2e9
        and with_memory(1e9, host=8.0).room("host", 64) == 1e9
    )


def test_a_cpu_has_no_memory_beside_its_hosts(recorder: Recorder) -> None:
    _, roomy = searched(recorder, H100)
    tight = min(x.bytes for x in roomy.best if not x.plan.offload.away) * 0.8
    small = with_memory(tight)
    cpu = small.model_copy(update={"device": small.device.model_copy(update={"waits": True})})
    _, found = searched(recorder, cpu)
    assert all(x.plan.offload.states.place == "disk" for x in found.best)


def test_what_the_plan_says_of_offload_holds(recorder: Recorder) -> None:
    base = Plan(precision="bfloat16", offload={"states": "host"})
    search = Search(recorder, H100, base, ranks=1, fixed={"recompute": "none"})
    assert {str(x.plan.offload) for x in search.run().best} == {"states on host"}
    _, found = searched(recorder, H100, offload={})
    assert not any(x.plan.offload.away for x in found.best)


def test_slower_links_and_hosts_take_longer(recorder: Recorder) -> None:
    plan = Plan(data=2, zero=3, accumulate=2, precision="bfloat16")
    away = recorder.away(3, "bfloat16", 2)

    def took(offload: dict[str, Any], **changes: float) -> float:
        tables = {name: dict(getattr(H100, name)) for name in ("host", "disk")}
        for key, x in changes.items():
            table, _, name = key.partition("__")
            tables[table][name] = x
        cluster = H100.model_copy(update={k: type(getattr(H100, k))(**t) for k, t in tables.items()})
        prices = Prices(cluster, plan.axes)
        of = plan.model_copy(update={"offload": Plan(data=2, zero=3, offload=offload).offload})
        given = {"size": 1e9, "ranks": 2.0, "moved": 15.0, "behind": 0.0, "updated": 1e-3}
        return carried(of, away, prices, **given, has_kernel=True).waited

    host = {"states": "host", "gradients": "host", "parameters": "host"}
    disk = {"states": "disk", "directory": "x"}
    assert took(host, host__to_device_gbs=5.0) > took(host)
    assert took({"states": "host"}, host__update_gbs=20.0) > took({"states": "host"})
    assert took(disk, disk__write_gbs=0.5) > took(disk) > took({"states": "host"})
    assert took(disk, disk__read_gbs=0.5) > took(disk)
    # a device that updates has states brought and sent, whatever the host can do
    by_device = {"states": "host", "update": "device"}
    assert took(by_device, host__update_gbs=20.0) == took(by_device)
    assert took(by_device, host__to_device_gbs=5.0) > took(by_device)


def test_experts_lie_apart_where_that_is_best(mixture: Recorder) -> None:
    assert mixture.experts == 4
    _, found = searched(mixture, H100, ranks=8)
    assert {x.plan.expert for x in found.best} == {1, 2, 4}
    first = found.best[0]
    assert first.plan.expert > 1 and first.sent["expert"] > 0 and first.terms["expert"] > 0
    assert all(x.plan.expert == 1 for x in found.plain)
    assert f"expert {first.plan.expert}" in words(first.plan)
    assert any(line.startswith("expert ") for line in why_not(found))
    _, fixed = searched(mixture, H100, ranks=8, expert=2)
    assert {x.plan.expert for x in fixed.best} == {2}


def test_groups_that_hold_the_same_stand_one_on_a_host(recorder: Recorder) -> None:
    _, found = searched(recorder, H100, ranks=8)
    assert {x.plan.replicate for x in found.best} == {1}, "one host has them all"
    slow = [level.model_copy(update={"ranks": n}) for level, n in zip(H100.level, (2, 4096), strict=True)]
    slow[1] = slow[1].model_copy(update={"bandwidth_gbs": 1.0, "latency_us": 500.0})
    of_two = H100.model_copy(update={"level": tuple(slow)})
    _, apart = searched(recorder, of_two, ranks=8, zero=3, accumulate=1)
    first = apart.best[0]
    assert (first.plan.replicate, first.plan.data) == (4, 2), "gathers stay within hosts of two"
    assert all(x.plan.replicate == 1 for x in apart.plain) and words(first.plan).startswith(
        "replicate 4 data 2"
    )
    assert any(line.startswith("replicate 1: +") for line in why_not(apart))
    net, optimizer, batch, _ = given()
    dry = dry_run(net, first.plan, batch, optimizer=optimizer)
    assert first.sent["replicate"] == pytest.approx(dry.ledger.by_axis()["replicate"], rel=0.01)
    assert first.sent["data"] == pytest.approx(dry.ledger.by_axis()["data"], rel=0.15)
    assert first.bytes == pytest.approx(dry.peak_bytes, rel=0.15)
    _, fixed = searched(recorder, H100, ranks=8, replicate=2, zero=1)
    assert {(x.plan.replicate, x.plan.data) for x in fixed.best} == {(2, 4)}


STAGES: list[dict[str, Any]] = [{}, {"zero": 1}, {"zero": 3}, {"zero": 3, "offload": {"states": "host"}}]


@pytest.mark.parametrize(
    ("expert", "changes"),
    left_to_sweeps(product([2, 4], STAGES), 1, 3, 4, 6, why="each size has some of the stages"),
    ids=str,
)
def test_memory_and_bytes_of_experts_apart_are_those_of_the_dry_run(
    expert: int, changes: dict[str, Any]
) -> None:
    net, optimizer, batch, options = given("moe", rows=16)
    small = {"chunk_megabytes": 0.3, "prefetch_megabytes": 0.3}
    plan = Plan(data=4, expert=expert, accumulate=2, **small, **changes)
    search = Search(Recorder(net, optimizer, batch, options), H100, plan, ranks=4)
    told = search.of(plan)
    dry = dry_run(net, plan, batch, optimizer=optimizer, **options)
    assert told.bytes == pytest.approx(dry.peak_bytes, rel=0.1)
    exchanged = sum(n for (axis, op), (_, n) in dry.ledger.by_op().items() if op == "all_to_all")
    assert told.sent["expert"] == pytest.approx(exchanged, rel=0.02)
    summed = sum(n for (axis, op), (_, n) in dry.ledger.by_op().items() if op != "all_to_all")
    assert told.sent["data"] == pytest.approx(summed, rel=0.15 if plan.zero == 3 else 0.05)
    assert told.away == pytest.approx(dict(dry.away_bytes), rel=0.02)


def test_stages_with_experts_apart_send_each_other_what_a_dry_run_says(mixture: Recorder) -> None:
    plan = Plan(pipe=2, data=2, expert=2, accumulate=4, cuts=("blocks.3",))
    told = Search(mixture, H100, plan, ranks=4).of(plan)
    net, optimizer, batch, options = given("moe")
    options |= {"optimizer": optimizer, "coordinate": {"pipe": 0}}
    sent = dry_run(net, plan, batch, **options).ledger.by_axis()
    assert told.sent["pipe"] == pytest.approx(sent["pipe"], rel=0.01)


def test_a_path_of_disk_is_the_clusters(tmp_path: Path) -> None:
    text = H100.to_toml().replace('directory = "offload"', f'directory = "{tmp_path}"')
    (tmp_path / "c.toml").write_text(text, "utf-8")
    cluster = Cluster.load(tmp_path / "c.toml")
    last = list(ways(Plan(), cluster.disk.directory))[-1]
    assert last.directory == str(tmp_path) and last.parameters.place == "disk"
    for table, key in (("host", "memory_gb"), ("disk", "read_gbs")):
        wrong = replace_number(text, table, key, -1.0)
        (tmp_path / "c.toml").write_text(wrong, "utf-8")
        with pytest.raises(ValueError, match=f"{table}.{key} = -1.0: expected greater than 0"):
            Cluster.load(tmp_path / "c.toml")
    (tmp_path / "c.toml").write_text(replace_number(text, "host", "to_device_gbs", 5e10), "utf-8")
    with pytest.raises(ValueError, match="host.to_device_gbs = 50000000000.0: more than any device has"):
        Cluster.load(tmp_path / "c.toml")


def replace_number(text: str, table: str, key: str, x: float) -> str:
    head, tail = text.split(f"[{table}]")
    return f"{head}[{table}]{re.sub(rf'{key} = [^ ]*?$', f'{key} = {x}', tail, count=1, flags=re.M)}"


@pytest.mark.parametrize("zero", [1, 2])
def test_what_was_updated_is_gathered_under_the_next_forward_pass(recorder: Recorder, zero: int) -> None:
    """On accelerators; a CPU, which waits, has all of it in its step."""
    told = []
    for waits in (False, True):
        device = H100.device.model_copy(update={"waits": waits})
        cluster = H100.model_copy(update={"device": device})
        search, _ = searched(recorder, cluster, 2)
        plan = Plan(data=2, zero=zero, chunk_megabytes=0.001)
        told.append(search.of(plan))
    (early, late) = told
    assert early.sent == late.sent
    both = [x.terms["data"] + x.beside.get("data", 0.0) for x in told]
    assert both[0] == pytest.approx(both[1]), "as much is sent"
    assert early.terms["data"] < late.terms["data"]
