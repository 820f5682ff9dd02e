"""The planner's search: recordings, prices, the space, the best of it, and what is said of it."""

from __future__ import annotations

import json
import math
import re
import tomllib
from collections import Counter
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from espalier import Plan, dry_run
from espalier.cli.main import app
from espalier.models import GPT, GPTConfig, MoE, MoEConfig
from espalier.parallel.schedules import Costs, generate, live, simulate
from espalier.planner import Cluster, Recorder, Search
from espalier.planner.cells import Cell, Refused
from espalier.planner.compare import Comparison, Measured
from espalier.planner.compose import Totals
from espalier.planner.events import drawn, lanes
from espalier.planner.explain import (
    Checked,
    gigabytes,
    report,
    to_dict,
    to_toml,
    variants,
    why_not,
    words,
)
from espalier.planner.prediction import plan_table
from espalier.planner.prices import Prices
from espalier.planner.recording import Op, Recording, Sent, added, grown, noted
from espalier.planner.whole import check, more_ranks, sensitivity, too_large
from espalier.tensor.dry_runs import UNCOUNTED
from espalier.train.plan_page import compare_page, front, plan_page
from tests.asked import left_to_sweeps
from tests.pure.browsing import all_of, opened, violations

H100 = Cluster.load("h100-sxm")


def given(layers: int = 5, rows: int = 8) -> tuple[Any, Any, Any]:
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=128, max_positions=16, layers=layers, hidden=32, heads=4))
        x = torch.empty(rows, 16, dtype=torch.int64)
    return net, torch.optim.AdamW(net.parameters()), {"input_ids": x, "labels": x}


@pytest.fixture(scope="module")
def recorder(tmp_path_factory: pytest.TempPathFactory) -> Recorder:
    net, optimizer, batch = given()
    return Recorder(net, optimizer, batch, {}, tmp_path_factory.mktemp("recordings"))


def totals(counts: Any) -> dict[Any, list[int]]:
    """Of each phase and operation: FLOPs, bytes moved, bytes sent."""
    found: dict[Any, list[int]] = {}
    for phase, events in counts.items():
        for event, n in events.items():
            row = found.setdefault((phase, event[0]), [0, 0, 0])
            if isinstance(event, Sent):
                row[2] += n * event.bytes
            else:
                row[0] += n * event.flops
                row[1] += n * event.moved
    return {key: row for key, row in found.items() if any(row)}


@pytest.mark.parametrize(
    "cell",
    [
        Cell(recompute="full"),
        Cell(tensor=2, sequence_parallel=True, precision="bfloat16"),
        Cell(tensor=4, tensor_mode="2d", rows=2),
        Cell(tensor=8, tensor_mode="3d", rows=4),
    ],
    ids=str,
)
def test_blocks_add_up_to_the_whole(recorder: Recorder, cell: Cell) -> None:
    costs = recorder.costs(cell)
    whole = recorder._run(cell, 5)
    composed = {phase: Counter(costs.rest.get(phase, {})) for phase in costs.rest.keys() | costs.block.keys()}
    for phase, events in costs.block.items():
        for event, n in events.items():
            composed[phase][event] += 5 * n
    assert totals(composed) == totals(whole.counts())
    assert whole.parameters == costs.rest_bytes + 5 * costs.block_bytes
    assert whole.kept == costs.rest_kept + 5 * costs.block_kept
    assert Recording.from_list(json.loads(json.dumps(whole.to_list()))) == whole


@pytest.mark.parametrize("plan", [{"data": 2, "zero": 1}, {"context_kind": "ring", "accumulate": 2}], ids=str)
def test_gradients_are_summed_along_context_once(recorder: Recorder, plan: dict[str, Any]) -> None:
    chosen = Plan.from_dict({"context": 2, **plan})
    net, optimizer, batch = given()
    sent: Counter[str] = Counter()
    for entry in dry_run(net, chosen, batch, optimizer=optimizer).ledger.entries:
        if entry.op != "all_reduce" or entry.bytes > 100:  # of counts and norms
            is_sum = entry.op in ("all_reduce", "reduce_scatter", "all_gather")
            sent["data" if is_sum else "context"] += entry.bytes
    told = Search(recorder, H100, Plan(), ranks=chosen.world_size).of(chosen).sent
    assert told["data"] == pytest.approx(sent["data"], rel=0.02)
    assert told["context"] == pytest.approx(sent["context"], rel=0.02)


def test_rows_add_up(recorder: Recorder) -> None:
    one, two, four = (recorder._run(Cell(rows=n), 2) for n in (1, 2, 4))
    told = grown(one, two, 4)
    asked = Cell(rows=4), Cell(rows=4, tensor_mode="2d"), Cell(rows=2)
    assert [recorder._recorded(cell) for cell in asked] == [(1, 2), (4,), (2,)]
    assert (told.events, told.held, told.kept) == (four.events, four.held, four.kept)
    assert four.peak * 0.9 < told.peak <= four.peak, "another moment may be the fullest one"


def test_recorded_ahead_is_what_is_recorded(recorder: Recorder, tmp_path: Path) -> None:
    net, optimizer, batch = given()
    ahead = Recorder(net, optimizer, batch, {}, tmp_path)
    cells = [Cell(rows=rows, recompute=kind) for rows in (1, 2) for kind in ("none", "full")]
    ahead.ahead(cells, (1, 3), "float32")
    assert ahead.recorded == len(list(tmp_path.iterdir())) in (0, 14)  # none on one core
    for cell in cells:
        assert ahead.costs(cell) == recorder.costs(cell)
    assert ahead.update(3, "float32") == recorder.update(3, "float32")


def test_what_the_engine_refuses_is_kept_too(tmp_path: Path) -> None:
    with torch.device("meta"):
        net = MoE(MoEConfig(layers=4, hidden=16, heads=2, vocab_size=32, max_positions=8, experts=2))
    ids = torch.empty(4, 8, dtype=torch.int64, device="meta")
    told = []
    for taken in (2, 0):  # a step is recorded with one micro-batch, and with two, of which it knows no mean
        kept = Recorder(
            net, torch.optim.AdamW(net.parameters()), {"input_ids": ids, "labels": ids}, {}, tmp_path
        )
        with pytest.raises(Refused, match="count=") as refused:
            kept.update(0, "float32")
        told.append(str(refused.value))
        assert kept.recorded == taken
    assert told[0] == told[1]


def test_small_sums_of_all_blocks_are_taken_apart() -> None:
    one, two = Sent("all_reduce", "tensor", 20), Sent("all_reduce", "tensor", 30)
    less, more = ({phase: Counter([x]) for phase in ("forward", "backward", "step")} for x in (one, two))
    more_each = added(less, more)
    assert more_each["backward"] == Counter([Sent("all_reduce", "tensor", 10)])
    assert list(more_each) == ["forward", "backward", "step"]  # sums are the same in each process


def test_prices_grow_with_sizes_and_stay_below_the_peak() -> None:
    prices = Prices(H100, {"data": 64, "tensor": 8})
    peak = H100.device.tflops["bfloat16"] * 1e12 * H100.device.ceiling
    before = 0.0
    for n in (64, 512, 4096, 16384):
        op = Op("mm", "matmul", (1, n, 4096, 4096), "bfloat16", 2 * n * 4096**2, 2 * (n * 8192 + 4096**2))
        assert before <= prices.op(op) and prices.op(op) >= op.flops / peak
        before = prices.op(op)
    seen = Op("flash", "attention", (1, 8, 2048, 64), "float16", 2**33, 2**20)
    moved = Op("add", "other", (), "float32", 0, 2**30)
    slow = H100.device.model_copy(update={"attention": "math", "unfused": 0.5})
    other = Prices(H100.model_copy(update={"device": slow}), {"data": 1})
    assert other.op(seen) > prices.op(seen) and other.op(moved) * 2 == prices.op(moved)
    sent = [prices.sent("all_reduce", "tensor", n) for n in (0, 2**10, 2**20, 2**30)]
    assert sent == sorted(sent) and sent[0] >= 2 * 3 * 9e-6
    assert prices.sent("all_reduce", "data", 2**30) > sent[-1], "the fabric is slower than the node"
    assert prices.sent("all_reduce", "pipe", 0, 0) == 0


@pytest.fixture(scope="module")
def search(recorder: Recorder) -> Search:
    fixed = {"recompute": "none", "sequence_parallel": False}
    return Search(recorder, H100, Plan(precision="bfloat16"), ranks=8, fixed=fixed)


def test_the_best_is_the_best_of_all(search: Search) -> None:
    found = search.run()
    scored = [x for plan, rows in search.space.candidates() if (x := search.score(plan, rows)) and x.fits]
    assert len(found.best) == found.scored
    assert len(scored) == sum(not x.plan.offload.away for x in found.best)
    assert found.best[0].seconds == min(search.simulated(x).seconds for x in scored) <= scored[0].seconds
    assert all(x.plan.world_size == 8 for x in found.best)
    assert {x.plan.tensor_mode for x in found.best} == {"1d", "2d", "2.5d", "3d"}
    assert {x.plan.pipe for x in found.best} > {1, 2} and {x.plan.tensor for x in found.best} >= {1, 2, 4}
    assert [x.plan.zero for x in found.plain] == [0, 3]
    assert all(found.best[0].seconds <= x.seconds for x in found.plain)
    for x in found.best[:20]:
        assert math.isclose(sum(x.terms.values()), x.seconds, rel_tol=0.02), x
        assert Plan(**plan_table(x.plan)) == x.plan
    text = report(found, changes=sensitivity(search, found))
    assert "why not:" in text and "device.host_us_per_op  assumed" in text and "links -20 %" in text
    assert to_toml(plan_table(found.best[0].plan)) in text
    dotted = Plan(recompute={"layers.0": "full"}, offload={"states": "host"})
    assert Plan(**tomllib.loads(to_toml(plan_table(dotted)))["plan"]) == dotted
    assert len(why_not(found)) >= 3
    first = json.loads(json.dumps(to_dict(found)))["best"][0]
    assert first["seconds"] == found.best[0].seconds
    # the share of the peak is that of the plain model's operations
    net, _, batch = given()
    with torch.no_grad(), FlopCounterMode(display=False, custom_mapping=UNCOUNTED) as counter:
        net(**batch)
    assert found.flops == 3 * counter.get_total_flops()
    assert first["mfu"] == pytest.approx(found.flops / (first["seconds"] * 8 * 989e12))


def test_what_is_told_of_one_rank(recorder: Recorder) -> None:
    """Nothing of axes that one rank cannot have; what 16 bits would do; a fifth is a fifth, both ways."""
    search = Search(recorder, H100, Plan(), ranks=1, fixed={"accumulate": 1})
    found = search.run()
    assert not [x for x in why_not(found) if x.startswith(("tensor", "pipe", "async", "context"))]
    changes = sensitivity(search, found)
    assert sum(x.startswith('precision = "bfloat16" in [plan]: ') for x in changes) == 1
    more, less = (variants(H100)[f"products and attention {sign}"].device for sign in ("+20 %", "-20 %"))
    own = H100.device
    for key in ("ceiling", "attention_ceiling"):
        sizes = [getattr(x, key) for x in (less, own, more)]
        assert sizes == pytest.approx([0.8 * sizes[1], sizes[1], 1.2 * sizes[1]])


def test_all_of_it_as_a_page(search: Search, browser: Any, tmp_path: Path) -> None:
    found = search.run()
    first = found.best[0]
    piped = next(x for x in found.best if x.plan.pipe > 1 and x.plan.stages_per_rank > 1)
    timeline = search.timeline(piped, 4)
    assert timeline is not None and search.timeline(replace(piped, plan=Plan(data=8)), 4) is None
    step = search.step(piped, 4)
    assert step is not None
    found = replace(found, best=[piped, first])
    page = tmp_path / "plan.html"
    given = {"changes": ["links: <none>"], "timeline": timeline, "step": step}
    page.write_text(plan_page("<b>mine", found, **given), "utf-8")
    opened(browser, page)
    assert all_of(browser, "h1")[0].text == "Plan for <b>mine", "what is given is text"
    assert all_of(browser, "#changes li")[0].text == "links: <none>"
    rows = [row.text for row in all_of(browser, "#best tbody tr")]
    assert rows[0].startswith(f"1 {words(piped.plan)}") and len(rows) == 2 + len(found.plain) - (
        any(x is first for x in found.plain)
    )
    assert len(all_of(browser, "#pipeline svg[role=img] title")) == sum(map(len, timeline.spans))
    assert len(all_of(browser, "#step svg[role=img] title")) == sum(map(len, (*step.ranks, step.block)))
    assert len(all_of(browser, "#ranks tbody tr")) == piped.plan.pipe == len(piped.by_rank)
    edge = front(found)
    assert len(all_of(browser, "#pareto circle title")) == len(edge) >= 1
    for x in edge:
        assert not any(y.bytes < x.bytes and y.seconds < x.seconds for y in found.best)
    widths = [float(re.search(r"[\d.]+", x.get_attribute("style"))[0]) for x in all_of(browser, "#time span")]  # type: ignore[index]
    assert max(widths) <= 100 and min(widths) >= 0
    right_in_both_themes(browser)
    # the same plan beside a run of it
    real = Measured(1.1 * piped.seconds, 0.02, piped.terms, {}, piped.memory, {"pipe": 8.0}, 4, timeline)
    compared = Comparison(piped, real)
    page.write_text(compare_page("<b>mine", compared, timeline), "utf-8")
    opened(browser, page)
    assert all_of(browser, "h1")[0].text == "Plan and run of <b>mine"
    for section, rows in zip(("terms", "memory", "sent"), compared.rows().values(), strict=True):
        assert [row.text for row in all_of(browser, f"#{section} td:first-child")] == [
            name for name, *_ in rows
        ]
    for side in ("predicted", "measured"):
        shown = all_of(browser, f"#{side} svg[role=img] title")
        assert len(shown) == sum(map(len, timeline.spans))
    right_in_both_themes(browser)


def right_in_both_themes(browser: Any) -> None:
    for theme in ("light", "dark"):
        browser.execute_script(f"document.documentElement.dataset.theme = '{theme}'")
        assert violations(browser) == [], theme
    assert browser.get_log("browser") == []


def test_products_into_given_tensors_cost_as_others() -> None:
    """Tensors that are written into are no factors, and count once."""
    x, weight = torch.empty(4, 3, 8, device="meta"), torch.empty(4, 8, 5, device="meta")
    out = torch.empty(4, 3, 5, device="meta")
    plain = noted(lambda: torch.bmm(x, weight))
    into = noted(lambda: torch.bmm(x, weight, out=out))
    assert plain == into
    assert plain[0].sizes == (4, 3, 5, 8)
    assert plain[0].moved == 4 * (4 * 3 * 8 + 4 * 8 * 5 + 4 * 3 * 5)


def test_causal_attention_is_half() -> None:
    """That a kernel keeps its sums for the backward pass makes it no causal one."""
    q = torch.empty(2, 4, 64, 16, device="meta")
    attend = torch.ops.aten._scaled_dot_product_efficient_attention
    whole, half = (noted(lambda: attend(q, q, q, None, True, 0.0, causal)) for causal in (False, True))  # noqa: B023
    assert [op.flops for op in whole] == [4 * 2 * 4 * 64 * 64 * 16]
    assert 2 * half[0].flops == whole[0].flops


def test_of_tables_the_rows_in_question_move() -> None:
    """Of what is repeated without being there only what is there counts, too."""
    table = torch.empty(1000, 8, device="meta", requires_grad=True)
    rows, values = torch.empty(2, 3, dtype=torch.int64, device="meta"), torch.empty(6, 8, device="meta")
    flat, functional = rows.view(-1), nn.functional
    row, index = 8 * 4, 6 * 8
    for name, run, moved in (
        ("embedding", lambda: functional.embedding(rows, table), 12 * row + index),
        ("index", lambda: table[flat], 12 * row + index),
        ("gather", lambda: table.gather(1, rows), 12 * 4 + index),
        ("index_add_", lambda: table.detach().index_add_(0, flat, values), 18 * row + index),
        ("clone", lambda: values[:1].expand(50, -1).clone(), 51 * row),
    ):
        assert next(op.moved for op in noted(run) if op.name == name) == moved, name
    bags = noted(lambda: functional.embedding_bag(rows, table))
    assert next(op.moved for op in bags if op.name == "_embedding_bag") < 12 * row + 2 * index


def test_convolutions_are_products_of_patches() -> None:
    """For each group, patches by kernels; a transposed one the other way round."""
    x = torch.empty(4, 8, 10, 10, device="meta", requires_grad=True)
    plain = nn.Conv2d(8, 6, 3, groups=2, device="meta")
    transposed = nn.ConvTranspose2d(6, 4, 3, stride=2, device="meta")
    found = noted(lambda: transposed(plain(x)).sum().backward())
    sizes = [op.sizes for op in found if op.kind == "matmul"]
    there, back = (2, 4 * 8 * 8, 3, 4 * 9), (1, 4 * 8 * 8, 4 * 9, 6)
    assert sizes == [there, back, back, there]
    flops = [op.flops for op in found if op.kind == "matmul"]
    assert flops == [2 * math.prod(there), 2 * math.prod(back), 4 * math.prod(back), 4 * math.prod(there)]


def test_messages_under_products_cost_what_products_leave_of_them() -> None:
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=512, max_positions=2048, layers=4, hidden=8192, heads=64))
        x = torch.empty(8, 2048, dtype=torch.int64)
    recorder = Recorder(net, torch.optim.AdamW(net.parameters()), {"input_ids": x, "labels": x}, {})
    fixed = {"tensor": 8, "recompute": "none"}
    search = Search(recorder, H100, Plan(precision="bfloat16"), ranks=8, fixed=fixed)
    table = {"tensor": 8, "sequence_parallel": True, "precision": "bfloat16"}
    waits, goes_on = (search.of(Plan(**table, async_tensor_parallel=x)) for x in (False, True))
    assert goes_on.sent["tensor"] == pytest.approx(waits.sent["tensor"], rel=1e-3)
    assert 0 < goes_on.terms["tensor"] < waits.terms["tensor"] / 2
    assert "tensor" not in waits.beside and goes_on.beside["tensor"] > waits.terms["tensor"] / 2
    found = search.run()
    first = found.best[0]
    assert first.plan.async_tensor_parallel and any(x.plan == goes_on.plan for x in found.best)
    text = report(found)
    assert "asynchronous" in text and "(tensor, beside the program)" in text
    assert "async_tensor_parallel False: +" in text, "why not without"
    # where the cores that multiply carry the messages nothing is hidden, and pieces are no faster
    cpu = H100.model_copy(update={"device": H100.device.model_copy(update={"waits": True})})
    slow = search.again(cluster=cpu)
    waits, goes_on = (slow.of(Plan(**table, async_tensor_parallel=x)) for x in (False, True))
    assert not goes_on.beside and goes_on.seconds >= waits.seconds
    assert not slow.run().best[0].plan.async_tensor_parallel


@pytest.mark.parametrize(
    "table",
    [
        {"data": 4, "tensor": 2, "zero": 1, "accumulate": 2},
        {"data": 8, "zero": 3},
        {"pipe": 4, "data": 2, "accumulate": 4},
        {"pipe": 2, "tensor": 4, "accumulate": 4, "schedule": "zb-h1", "sequence_parallel": True},
    ],
    ids=str,
)
def test_events_add_up_to_the_predicted_step(search: Search, table: dict[str, Any]) -> None:
    plan = Plan(**table, precision="bfloat16")
    found = search.of(plan)
    step = search.step(found, found.plan.accumulate)
    assert step is not None and len(step.ranks) == found.plan.pipe
    assert math.isclose(step.seconds, found.seconds)
    for row in step.ranks:
        names = lanes(row)
        assert names[:2] == ["compute", "host"] and {"data", "tensor"} & {*table} <= {*names}
        for lane in names:
            spans = sorted((x for x in row if x.lane == lane), key=lambda x: x.start)
            assert spans[0].start >= 0 and max(x.end for x in spans) <= step.seconds * (1 + 1e-9)
            if lane != "data":  # gathers of the step before may be under way when sums begin
                assert all(a.end <= b.start * (1 + 1e-9) + 1e-12 for a, b in pairwise(spans)), lane
        assert sum(x.end - x.start for x in row if x.name == "update") == pytest.approx(found.terms["update"])
    # of a block, each operation and each message: as recorded, but views, which the device does not see
    costs = search._recorder.costs(search._cell(found.plan, found.rows))
    counted = Counter(x.name for x in step.block if x.lane not in ("compute", "host"))
    recorded: Counter[str] = Counter()
    for events in costs.block.values():
        for event, n in events.items():
            recorded[event[0]] += n if isinstance(event, Sent) else 0
    # small sums of all blocks together are a message of none of them
    assert counted == recorded or (plan.sequence_parallel and (recorded - counted).total() == 2)
    assert {x.name for x in step.block if x.lane == "host"} >= {"view", "mm", *counted}
    products = [x for x in step.block if x.lane == "compute" and x.name in ("mm", "addmm")]
    assert len(products) == sum(
        n for events in costs.block.values() for event, n in events.items() if event[0] in ("mm", "addmm")
    )
    assert len(drawn(step.ranks[0], step.seconds, 80)) == len(lanes(step.ranks[0]))
    shown = {event["name"] for event in step.trace() if event["ph"] == "X"}
    assert {x.name for row in step.ranks for x in row} <= shown


def test_slower_parts_never_make_it_faster(search: Search) -> None:
    first = search.run().best[0]
    own = search.score(first.plan, first.rows)
    assert own is not None
    device = H100.device.model_copy(update={"ceiling": H100.device.ceiling / 2, "host_us_per_op": 60.0})
    levels = tuple(x.model_copy(update={"bandwidth_gbs": x.bandwidth_gbs / 9}) for x in H100.level)
    for change in ({"device": device}, {"level": levels}):
        slow = search.again(cluster=H100.model_copy(update=change)).score(first.plan, first.rows)
        assert slow is not None and slow.seconds >= own.seconds


def test_a_pipeline_of_equal_stages_takes_its_closed_form(search: Search) -> None:
    plan = next(p for p, _ in search.space.candidates() if p.pipe == 4 and p.schedule == "1f1b")
    real = simulate(generate("1f1b", 4, plan.accumulate), Costs(1.0, 2.0, 0.0)).step_time
    assert math.isclose(search._closed(plan, [3.0] * 4), real)


def test_micro_batches_that_live(search: Search) -> None:
    for kind, v in (("1f1b", 1), ("zb-h1", 1), ("interleaved", 2), ("interleaved", 3), ("zbv", 2)):
        plan = Plan(pipe=4, accumulate=12, schedule=kind, stages_per_rank=v)
        counted = live(generate(kind, 4, 12, v), 0.7)
        told = search._live(plan, 0.7)
        assert all(a <= b <= a + 1 for a, b in zip(counted, told, strict=True)), (kind, counted, told)


def test_nothing_fits(recorder: Recorder) -> None:
    small = H100.device.model_copy(update={"memory_gb": 0.0003, "reserved_gb": 0.0})
    fixed = {"recompute": "none", "sequence_parallel": False, "pipe": 1, "tensor": 1}
    search = Search(recorder, H100.model_copy(update={"device": small}), Plan(), ranks=1, fixed=fixed)
    found = search.run()
    assert not found.best and found.least is not None
    assert re.search(r"No plan fits: states \+ .* on host .* needs least, .* GB on a rank", too_large(found))
    assert "of 0.000276 that it may take" in too_large(found)
    run = Totals(found.least.plan, {}, 0, {}, {}, 0, 0, {"backward": 5_120_000})
    assert "needs least, 0.00512 GB" in too_large(found, [Checked(found.least, [run])])
    assert gigabytes(0) == "0.00" and gigabytes(27.4e9) == "27.40"
    assert "Nothing fits." in report(found) and more_ranks(search) in (2, 4, 8, None)


def test_bad_input_gets_a_sentence(recorder: Recorder) -> None:
    for change, told in (
        ({"ranks": 5000}, "the cluster has 4096"),
        ({"ranks": -3}, "ranks = -3: expected 1 or more"),
        ({"fixed": {"tensr": 2}}, "tensr = 2: unknown key; did you mean tensor"),
        ({"fixed": {"tensor": "two"}}, "tensor = 'two': expected a valid integer"),
        ({"fixed": {"tp": 0}}, "tensor = 0: expected greater than or equal to 1"),
        ({"memory": 1.5}, "expected a share of the device's memory"),
    ):
        with pytest.raises(ValueError, match=told):
            Search(recorder, H100, Plan(), **change)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="7 ranks for a batch of 8 rows, where pipe = 1, tensor = 1. Change"):
        Search(recorder, H100, Plan(), ranks=7, fixed={"pipe": 1, "tensor": 1}).run()


JOB = """
[model]
kind = "gpt"
layers = 4
hidden = 32
heads = 4
vocab_size = 128
max_positions = 16
[data]
kind = "tokens"
[train]
batch_size = 4
sequence = 16
[plan]
"""
FIXED = 'precision = "bfloat16"\nrecompute = "none"\npipe = 1\ntensor = 1\n'


def test_the_command_and_a_job_that_asks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path / "cache"))
    job = tmp_path / "job.toml"
    job.write_text(JOB + 'precision = "bfloat16"\n', "utf-8")
    call = [
        "plan",
        str(job),
        "--cluster",
        "h100-sxm",
        "-n",
        "4",
        "--json",
        str(tmp_path / "f.json"),
        "--html",
        str(tmp_path / "f.html"),
        "--trace",
        str(tmp_path / "t.json"),
        "--quick",
    ]
    for fixed in ("pipe=1", "tensor=1", "recompute=none"):
        call += ["--fix", fixed]
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0, done.output
    assert "[plan]\ndata = 4" in done.output
    assert json.loads((tmp_path / "f.json").read_text("utf-8"))["best"][0]["plan"]["data"] == 4
    assert "<title>Plan for job · espalier" in (tmp_path / "f.html").read_text("utf-8")
    assert "what a rank does when, 1 of 1 micro-batches" in done.output
    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    named = [event["args"]["name"] for event in events if event["ph"] == "M"]
    assert named[:4] == ["rank 0", "compute", "host", "data"]
    assert CliRunner().invoke(app, [*call, "--memory", "1e-6"]).exit_code == 1
    call[call.index("pipe=1")] = "pipe=2"
    done = CliRunner().invoke(app, call)
    assert done.exit_code == 0 and re.search(r"its pipeline's step, \d of \d micro-batches", done.output)
    assert "\n  pipe" not in done.output, "what is fixed has no others"
    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert list(processes.values())[:3] == ["predicted", "rank 0", "rank 1"]
    assert {event["pid"] for event in events} == {*processes}

    from espalier.train.foresight import planned
    from espalier.train.job import Job, JobError

    job.write_text(JOB + FIXED + 'auto = true\ncluster = "h100-sxm"\nranks = 4\n', "utf-8")
    made = planned(Job.load(job))
    assert made.plan.data == 4 and "s a step" in made.plan.why and not made.auto
    for wrong, told in (
        ("auto = true\n", "needs the cluster"),
        ('cluster = "x"\n', "is for auto = true alone"),
    ):
        job.write_text(JOB + wrong, "utf-8")
        with pytest.raises(JobError, match=told):
            Job.load(job)


def test_a_plan_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ESPALIER_CACHE", str(tmp_path))
    net, optimizer, batch = given(4, 2)
    fixed: dict[str, Any] = {"pipe": 1, "tensor": 1, "recompute": "none", "precision": "bfloat16"}
    plan = Plan.auto(net, batch, "h100-sxm", optimizer=optimizer, ranks=2, **fixed)
    assert plan.data == 2 and plan.why.startswith("best of")


def test_what_does_not_fit_when_run_dry_is_left_out(recorder: Recorder) -> None:
    search = Search(recorder, H100, Plan(), ranks=4)
    found = search.run()
    kept, runs = check(search, found, recorder)
    assert kept.best == found.best and len(runs) == 3 and all(run.fits for run in runs)
    fullest = max(run.bytes for run in runs)
    search.limit = fullest - 1
    left, runs = check(search, found, recorder)
    wrong = [run.prediction for run in runs if not run.fits]
    assert wrong and sum(run.fits for run in runs) == 3
    assert [x for x in found.best if all(x is not y for y in wrong)] == left.best
    assert f"left out: more than the {gigabytes(search.limit)} that it may take" in report(left, runs)
    search.limit = 1
    nothing, runs = check(search, found, recorder)
    assert len(runs) == 8 and not any(run.fits for run in runs)
    assert all(x.prediction not in nothing.best for x in runs)


PEAKS = (
    Plan(data=2),
    Plan(data=4, zero=1, recompute="full"),
    Plan(data=4, zero=1, recompute="full", accumulate=2),
    Plan(data=4, zero=2, precision="bfloat16", recompute="full"),
    Plan(data=2, precision="bfloat16", recompute="full"),
    Plan(data=2, zero=3),
    Plan(data=4, zero=3, precision="autocast-bfloat16"),
    Plan(data=4, recompute="full", precision="autocast-bfloat16", accumulate=2),
)


WIDE = (Plan(data=4, zero=1, recompute="full"), Plan(data=4, zero=3, recompute="full"))


@pytest.mark.parametrize(("vocabulary", "plans"), [(64, PEAKS), (8192, WIDE)], ids=["narrow", "wide"])
def test_memory_is_that_of_dry_runs(vocabulary: int, plans: tuple[Plan, ...]) -> None:
    """Gradients come as activations go, of ZeRO-1 and 2 cut; masters take whole ones in their own dtype.

    A wide head's logits are gone when the blocks' gradients come.
    """
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=vocabulary, max_positions=64, layers=8, hidden=128, heads=2))
        x = torch.empty(8, 64, dtype=torch.int64)
    optimizer, batch = torch.optim.AdamW(net.parameters()), {"input_ids": x, "labels": x}
    recorder = Recorder(net, optimizer, batch, {})
    for plan in (plan.model_copy(update={"chunk_megabytes": 0.1}) for plan in plans):
        told = Search(recorder, H100, plan, ranks=plan.data).of(plan)
        dry = dry_run(net, plan, batch, optimizer=optimizer)
        assert told.bytes == pytest.approx(dry.peak_bytes, rel=0.04), plan
        assert told.sent["data"] == pytest.approx(dry.ledger.by_axis()["data"], rel=1e-3), plan


@pytest.mark.parametrize(("schedule", "stages"), [("zb-h1", 1), ("zbv", 2)])
def test_memory_of_a_divided_backward_pass_is_that_of_the_dry_run(schedule: str, stages: int) -> None:
    """Gradients that wait for the second part are as large as the activations."""
    with torch.device("meta"):
        net = GPT(GPTConfig(vocab_size=64, max_positions=64, layers=8, hidden=32, heads=2))
        x = torch.empty(64, 64, dtype=torch.int64)
    optimizer, batch = torch.optim.AdamW(net.parameters()), {"input_ids": x, "labels": x}
    plan = Plan(pipe=4, accumulate=8, schedule=schedule, stages_per_rank=stages)
    search = Search(Recorder(net, optimizer, batch, {}), H100, plan, ranks=4)
    told = search.of(plan)
    for place, kinds in ((0, told.by_rank[0]), (3, told.by_rank[-1])):
        dry = dry_run(net, told.plan, batch, optimizer=optimizer, coordinate={"pipe": place})
        assert sum(kinds.values()) == pytest.approx(dry.peak_bytes, rel=0.1)


PIPELINES: list[dict[str, Any]] = [
    {"pipe": 2, "accumulate": 4},
    {"pipe": 4, "accumulate": 8, "tensor": 2, "sequence_parallel": True},
    {"pipe": 2, "accumulate": 4, "schedule": "interleaved", "stages_per_rank": 2, "recompute": "full"},
    {"pipe": 2, "accumulate": 4, "schedule": "zbv", "stages_per_rank": 2, "precision": "bfloat16"},
]


@pytest.mark.parametrize(
    ("tied", "table"),
    left_to_sweeps(product([False, True], PIPELINES), 1, 3, 4, 6, why="each pipeline is sent tied or not"),
    ids=str,
)
def test_what_stages_send_is_what_dry_runs_send(tied: bool, table: dict[str, Any]) -> None:
    with torch.device("meta"):
        sizes = {"vocab_size": 64, "max_positions": 16, "layers": 5, "hidden": 32, "heads": 4}
        net = GPT(GPTConfig(tied=tied, **sizes))
        tokens = torch.empty(8, 16, dtype=torch.int64)
    batch, optimizer = {"input_ids": tokens, "labels": tokens}, torch.optim.AdamW(net.parameters())
    own = Recorder(net, optimizer, batch, {})
    stages = table["pipe"] * table.get("stages_per_rank", 1)
    plan = Plan(**table, cuts=tuple(own.names[1:stages]))
    search = Search(own, H100, Plan(precision=table.get("precision", "float32")), ranks=plan.world_size)
    found = search.of(plan)
    sent = []
    for i in range(plan.pipe):
        report = dry_run(net, plan, batch, optimizer=optimizer, coordinate={"pipe": i})
        sent.append(report.ledger.by_op()["pipe", "send"][1])
    cell = search._cell(plan, found.rows)
    assert own.boundary(cell).sent(plan) == sent and found.sent["pipe"] == max(sent)
    assert (own.boundary(cell).once > 0) == tied
