"""Pipeline schedules: what they do, what they promise, and that faults in them are found."""

from __future__ import annotations

import gc
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from espalier.parallel.pipeline import (
    KINDS,
    Action,
    ActionKind,
    Costs,
    Schedule,
    ScheduleError,
    check,
    find_schedule,
    from_csv,
    from_toml,
    generate,
    live,
    load,
    simulate,
    to_csv,
    to_toml,
    with_messages,
    without_messages,
)
from espalier.parallel.schedules.generate import dual_pipe_v, interleaved_zero_bubble, looped_bfs
from espalier.parallel.schedules.simulate import draw
from tests.asked import ASKED

STAGES = {kind: 2 if kind in ("interleaved", "zbv") else 1 for kind in KINDS}


@pytest.fixture(autouse=True)
def _no_collector() -> Iterator[None]:
    """Millions of small tuples and no cycles: the collector would take most of the time."""
    gc.disable()
    yield
    gc.enable()


def bubble_and_live(schedule: Schedule, costs: Costs) -> tuple[float, float]:
    """What `simulate` says of a step, and `live` of the fullest rank."""
    return simulate(schedule, costs).bubble, max(live(schedule))


def micro_batches(p: int, last: int) -> list[int]:
    """From p to the last: all for few ranks; for more, those around which something begins, unless asked."""
    every = range(p, last + 1)
    begins = {p, p + 1, 2 * p - 1, 2 * p, 2 * p + 1, 2 * p + 2, 3 * p, 3 * p + 3, 4 * p, last}
    return [m for m in every if ASKED or p < 5 or m in begins]


# What facts.md 4 promises. Times of one rank and micro-batch: F = 2, B = 5 of which W = 1, whatever v is, but
# for zbv, which is about F = I = W.
F, I, W = 2.0, 4.0, 1.0  # noqa: E741
B = I + W


@pytest.mark.parametrize("p", range(2, 17))
def test_bubble_and_live_micro_batches_are_those_of_the_papers(p: int) -> None:
    """For numbers of micro-batches from the number of ranks to 64."""
    costs = Costs(F, I, W)
    for m in micro_batches(p, 64):
        assert bubble_and_live(generate("gpipe", p, m), costs) == ((p - 1) * (F + B), m)
        assert bubble_and_live(generate("1f1b", p, m), costs) == ((p - 1) * (F + B), p)
        assert bubble_and_live(generate("zb-h1", p, m), costs) == ((p - 1) * (F + B - 2 * W), p)
    assert bubble_and_live(generate("naive", p, p), costs) == (p * (p - 1) * (F + B), 1)


@pytest.mark.parametrize("v", range(1, 5))
@pytest.mark.parametrize("p", range(2, 17))
def test_interleaving_divides_the_bubble(p: int, v: int) -> None:
    """By v; live is p + (p-1)/v, as facts.md has it, from 2p micro-batches on, and p for p of them.

    One stage a rank is 1F1B.
    """
    costs = Costs(F, I, W)  # of a stage: a rank's are v times as long
    for m in range(p, 65, p):
        schedule = generate("interleaved", p, m, v)
        promised = p if v == 1 or m == p else p * (1 + (p - 1) / (p * v))
        bubble, most = bubble_and_live(schedule, costs)
        assert bubble == (p - 1) * (v * F + v * B) / v
        assert most == pytest.approx(promised, abs=1e-9)
        if v == 1:
            assert schedule.actions == generate("1f1b", p, m).actions


@pytest.mark.parametrize("v", range(1, 4))
@pytest.mark.parametrize("p", range(1, 9))
def test_schedules_of_torch(p: int, v: int) -> None:
    """Their bubbles and what they hold; each passes the checker, with and without its messages."""
    costs = Costs(F, I, W)  # of a stage: a rank's are v times as long
    for m in [*range(1, p), *micro_batches(p, 4 * p)]:
        made = [looped_bfs(p, m, v)]
        if m % max(1, m // p) == 0:
            made.append(interleaved_zero_bubble(p, m, v))
        if v == 2 and m >= 2 * p:
            made.append(dual_pipe_v(p, m, v))
        for schedule in made:
            assert check(schedule) == check(with_messages(schedule))
            assert schedule.stages == p * v and schedule.micro_batches == m
        if m % p == 0:
            assert bubble_and_live(made[0], costs) == ((p - 1) * (F + B), m)
            bubble, most = bubble_and_live(made[1], costs)
            assert bubble == (p - 1) * (F + B - 2 * W) and most == pytest.approx(p)
    with pytest.raises(ValueError, match="expected a multiple of the 2 rounds"):
        interleaved_zero_bubble(2, 5, v)


@pytest.mark.parametrize(("p", "v"), [(2, 2), (3, 4), (4, 2), (5, 3), (8, 2), (13, 2)])
def test_interleaving_any_number_of_micro_batches(p: int, v: int) -> None:
    """Where p does not divide m the bubble is the same, and groups of g > p hold (g-p)(v-1)/v more."""
    costs = Costs(F, I, W)
    for m in micro_batches(p, 64):
        bubble, most = bubble_and_live(generate("interleaved", p, m, v), costs)
        group = -(-m // (m // p))
        assert bubble == (p - 1) * (F + B)
        assert most == pytest.approx(min(m, p + (p - 1) / v + (group - p) * (v - 1) / v), abs=1e-9)


@pytest.mark.parametrize("p", range(2, 17))
def test_zbv_has_no_bubble_but_ranks_begin_one_after_another(p: int) -> None:
    """facts.md says "~0" where F = I = W: no rank idles once it has begun, from 2p-1 micro-batches on.

    The last rank begins after p-1 stages, so the step is that much longer. With fewer micro-batches rank 0
    has nothing to do before the first comes back: after 2p-1 stages, of which it can fill m.
    """
    for m in micro_batches(p, 64):
        schedule = generate("zbv", p, m, 2)
        timeline = simulate(schedule)  # 1 for each of a stage, so F = I = W = 2 of a rank
        short = max(0, 2 * p - 1 - m)
        assert max(timeline.idle_within) == short
        assert timeline.bubble == p - 1 + max(0, short - 1)
        assert max(live(schedule)) == p


@pytest.mark.parametrize(
    "times", [(2, 3, 3), (2, 2, 3), (1, 1, 2), (3, 1, 2), (1, 5, 1), (5, 1, 1), (3, 4, 2)]
)
def test_zb_h1_where_weight_gradients_are_long(times: tuple[float, float, float]) -> None:
    """facts.md's (p-1)(F+B-2W) holds while W is no longer than F and I.

    No schedule that holds p micro-batches can do better than (p-1) max(F, I) otherwise: the last rank cannot
    begin before (p-1) F, and rank 0 waits (p-1) I for its first gradient with all it may hold.
    """
    f, i, w = times
    for p in (2, 3, 4, 7):
        for m in (p, p + 1, 2 * p, 20):
            bubble, most = bubble_and_live(generate("zb-h1", p, m), Costs(f, i, w))
            assert (bubble, most) == ((p - 1) * max(f + i - w, i, f), p)


@pytest.mark.parametrize("kind", KINDS)
def test_every_schedule_passes_the_checker(kind: str) -> None:
    """With and without its messages, fewer micro-batches than ranks and one rank alone included."""
    for p in (1, 2, 3, 4, 7):
        for m in {1, 2, p - 1, p, p + 1, 2 * p, 3 * p + 1} - {0}:
            for v in {STAGES[kind], 3 if kind == "interleaved" else STAGES[kind]}:
                schedule = generate(kind, p, m, v)
                full = with_messages(schedule)
                assert check(schedule) == check(full)
                assert without_messages(full) == schedule
                crossings = p * v - 1 if kind != "zbv" else 2 * (p - 1)
                assert check(schedule).messages == (2 * m * crossings if p > 1 else 0)
                assert check(schedule).live == live(full)


def test_live_counts_what_is_held() -> None:
    """By the definition: forwards begun, less whole or weights' backwards ended."""
    for kind in KINDS:
        schedule = generate(kind, 3, 7, STAGES[kind])
        for rank, row in enumerate(schedule.actions):
            most = waiting = 0.0
            for end in range(len(row) + 1):
                kinds = [action.kind for action in row[:end]]
                most = max(
                    most,
                    sum(k is ActionKind.F for k in kinds)
                    - sum(k in (ActionKind.B, ActionKind.W) for k in kinds),
                )
                done = [sum(k is of for k in kinds) for of in (ActionKind.I, ActionKind.W)]
                held = sum(k is ActionKind.F for k in kinds) - sum(k is ActionKind.B for k in kinds)
                waiting = max(waiting, held - done[1] + 0.5 * (done[0] - done[1]))
            assert live(schedule)[rank] == most / STAGES[kind]
            assert live(schedule, 0.5)[rank] == waiting / STAGES[kind]


def schedules() -> st.SearchStrategy[Schedule]:
    """Good ones, of all kinds, small."""
    return st.builds(
        lambda kind, p, m, full: (with_messages if full else without_messages)(
            generate(kind, p, m, STAGES[kind])
        ),
        st.sampled_from(list(KINDS)),
        st.integers(2, 4),
        st.integers(1, 6),
        st.booleans(),
    )


def with_row(schedule: Schedule, rank: int, row: list[Action]) -> Schedule:
    """With another row."""
    rows = list(schedule.actions)
    rows[rank] = tuple(row)
    return replace(schedule, actions=tuple(rows))


@settings(max_examples=150, deadline=None)
@given(schedules(), st.data())
def test_an_action_lost_doubled_or_changed_is_found(schedule: Schedule, data: st.DataObject) -> None:
    """And the message names the rank."""
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    place = data.draw(st.integers(0, len(row) - 1))
    action = row[place]
    how = data.draw(st.sampled_from(["lost", "doubled", "kind", "stage", "micro-batch"]))
    if how == "lost":
        del row[place]
    elif how == "doubled":
        row.insert(data.draw(st.integers(0, len(row))), action)
    elif how == "kind":
        row[place] = action._replace(
            kind=data.draw(st.sampled_from([k for k in ActionKind if k is not action.kind]))
        )
    elif how == "stage":
        row[place] = action._replace(stage=action.stage + data.draw(st.sampled_from([-1, 1])))
    else:
        row[place] = action._replace(micro_batch=action.micro_batch + data.draw(st.sampled_from([-1, 1])))
    with pytest.raises(ScheduleError, match=f"rank {rank}"):
        check(with_row(schedule, rank, row))


@settings(max_examples=150, deadline=None)
@given(schedules(), st.data())
def test_what_passes_the_checker_can_be_executed(schedule: Schedule, data: st.DataObject) -> None:
    """Any two actions of a rank change places: the checker passes it if and only if it can be executed.

    Executed here by another program, slower and simpler: all ranks at once, an action when all it needs
    has been done, a message when both its ends are there (rendezvous) or its send has been (buffered).
    """
    rank = data.draw(st.integers(0, schedule.ranks - 1))
    row = list(schedule.actions[rank])
    a, b = (data.draw(st.integers(0, len(row) - 1)) for _ in range(2))
    row[a], row[b] = row[b], row[a]
    changed = with_row(schedule, rank, row)
    works = executes(changed, rendezvous=True) and executes(changed, rendezvous=False)
    if works:
        check(changed)
    else:
        with pytest.raises(ScheduleError, match=r"rank \d"):
            check(changed)


def executes(schedule: Schedule, *, rendezvous: bool) -> bool:
    """Does each rank come to the end of its row?"""
    at = [0] * schedule.ranks
    done: set[Action] = set()
    wires: dict[tuple[int, int], list[Action]] = {}

    def stands(rank: int) -> Action | None:
        row = schedule.actions[rank]
        return row[at[rank]] if at[rank] < len(row) else None

    def has_inputs(action: Action) -> bool:
        kind, stage, micro = action
        owner = schedule.stage_to_rank

        def back(s: int) -> bool:
            return Action(ActionKind.B, s, micro) in done or Action(ActionKind.I, s, micro) in done

        if kind is ActionKind.F:
            crosses = schedule.has_messages and stage > 0 and owner[stage - 1] != owner[stage]
            got = Action(ActionKind.RECV_F, stage, micro) in done if crosses else True
            return stage == 0 or (got and Action(ActionKind.F, stage - 1, micro) in done)
        if kind is ActionKind.W:
            return Action(ActionKind.I, stage, micro) in done
        if kind is ActionKind.SEND_F:
            return Action(ActionKind.F, stage, micro) in done
        if kind is ActionKind.SEND_B:
            return back(stage)
        last = stage == schedule.stages - 1
        crosses = schedule.has_messages and not last and owner[stage + 1] != owner[stage]
        got = Action(ActionKind.RECV_B, stage, micro) in done if crosses else True
        return Action(ActionKind.F, stage, micro) in done and (last or (got and back(stage + 1)))

    def receive(action: Action) -> Action:
        if action.kind is ActionKind.SEND_F:
            return Action(ActionKind.RECV_F, action.stage + 1, action.micro_batch)
        return Action(ActionKind.RECV_B, action.stage - 1, action.micro_batch)

    moved = True
    while moved:
        moved = False
        for rank in range(schedule.ranks):
            action = stands(rank)
            if action is None:
                continue
            peer = None if action.kind.computes else schedule.peer(action)
            if action.kind in (ActionKind.SEND_F, ActionKind.SEND_B):
                assert peer is not None
                if not has_inputs(action):
                    continue
                if rendezvous:
                    if stands(peer) != receive(action):
                        continue
                    done.add(receive(action))
                    at[peer] += 1
                else:
                    wires.setdefault((rank, peer), []).append(receive(action))
            elif not action.kind.computes:
                assert peer is not None
                if rendezvous or wires.get((peer, rank), [None])[0] != action:
                    continue
                wires[peer, rank].pop(0)
                if not wires[peer, rank]:
                    del wires[peer, rank]
            elif not has_inputs(action):
                continue
            done.add(action)
            at[rank] += 1
            moved = True
    return all(stands(rank) is None for rank in range(schedule.ranks))


def test_faults_are_told_with_rank_action_and_what_is_missing() -> None:
    """One of each sort."""
    good = generate("1f1b", 2, 2)

    def told(schedule: Schedule) -> str:
        with pytest.raises(ScheduleError) as caught:
            check(schedule)
        return str(caught.value)

    def parse(*rows: str) -> Schedule:
        actions = tuple(tuple(map(Action.parse, row.split())) for row in rows)
        return Schedule("mine", 2, 2, (0, 1), actions)

    assert "rank 1, stage 1, micro-batch 1: B (or I and W) of its backward is missing" in told(
        parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1")
    )
    assert "rank 1, stage 1, micro-batch 1: W of its backward is missing" in told(
        parse("0F0 0F1 0B0 0B1", "1F0 1B0 1F1 1I1")
    )
    assert "rank 0, action 1, 0B0: needs 0F0, which this rank does only later, at action 2" in told(
        parse("0F1 0B0 0F0 0B1", "1F0 1B0 1F1 1B1")
    )
    assert "rank 1, action 4, 0F1: stage 0 is on rank 0" in told(parse("0F0 0B0 0B1", "1F0 1B0 1F1 1B1 0F1"))
    stuck = told(parse("0F0 0B0 0F1 0B1", "1F0 1F1 1B0 1B1"))
    assert "rank 0 waits for ever at its action 1, 0B0: it needs 1B0 of rank 1" in stuck
    assert "rank 1 waits for ever at its action 1, 1F1: it needs 0F1 of rank 0" in stuck
    # sends before receives on both ranks: fine where sends do not wait, but not where they do
    crossed = parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F0 1F0 1B0 1SEND_B0 1RECV_F1 1F1 1B1 1SEND_B1",
    )
    assert (
        "rank 0 waits for ever at 0SEND_F1, where sends wait for their receives: rank 1 stands at 1SEND_B0"
        in told(crossed)
    )
    swapped = parse(
        "0F0 0SEND_F0 0F1 0SEND_F1 0RECV_B0 0B0 0RECV_B1 0B1",
        "1RECV_F1 1RECV_F0 1F0 1F1 1B0 1SEND_B0 1B1 1SEND_B1",
    )
    assert "rank 1, 1RECV_F1: receives message 0 of rank 0, which sends what 1RECV_F0 expects" in told(
        swapped
    )
    assert "stage 1 is on rank 5: expected one of 2" in told(replace(good, stage_to_rank=(0, 5)))
    assert "3 rows of actions for 2 ranks" in told(replace(good, actions=(*good.actions, ())))


@pytest.mark.parametrize("kind", KINDS)
def test_a_table_says_the_same(kind: str, tmp_path: Path) -> None:
    """CSV and TOML, as text and as files."""
    schedule = generate(kind, 3, 4, STAGES[kind])
    assert from_csv(to_csv(schedule), kind) == schedule
    assert from_toml(to_toml(schedule)) == schedule
    full = with_messages(schedule)
    assert from_toml(to_toml(full)) == full
    path = tmp_path / f"{kind}.csv"
    path.write_text("\n" + to_csv(schedule).replace(",", ", ,"))
    assert load(path) == schedule
    assert (
        find_schedule(str(path), 3, 4, STAGES[kind])
        == schedule
        == find_schedule(schedule, 3, 4, STAGES[kind])
    )


def test_tables_with_mistakes(tmp_path: Path) -> None:
    """Each says what and where."""
    for text, told in (
        ("0F0,0B0\n1F0,1X0\n", "rank 1, action 1: '1X0' is no action"),
        ("0F0,0B0\n2F0,2B0\n", "no rank has stage 1"),
        ("0F0,0B0,1B0\n1F0\n", "rank 1 has 1F0, but stage 1 is on rank 0"),
        ("0F0\n1F0,1B0\n", "rank 0, stage 0, micro-batch 0: B"),
        ("", "no rank has stage 0"),
    ):
        (tmp_path / "mine.csv").write_text(text)
        with pytest.raises(ValueError, match=f"mine.csv: (?s:.*){told}".replace("(or", r"\(or")):
            load(tmp_path / "mine.csv")
    (tmp_path / "mine.toml").write_text("rows = [1]\nother = 3")
    with pytest.raises(ValueError, match="one string a rank.*unknown: other"):
        load(tmp_path / "mine.toml")
    with pytest.raises(ValueError, match=r"none.toml cannot be read: No such file"):
        load(tmp_path / "none.toml")
    with pytest.raises(ValueError, match="for 4 micro-batches: expected 8"):
        find_schedule(generate("gpipe", 2, 4), 2, 8)


def test_sizes_that_there_is_no_schedule_of() -> None:
    """Said clearly."""
    for arguments, told in (
        (("1f1b", 2, 4, 2), "1f1b has one stage a rank, not 2"),
        (("zbv", 2, 4, 1), "zbv has 2 stages a rank, not 1"),
        (("gpipe", 0, 4, 1), "0 ranks, 4 micro-batches"),
        (("zigzag", 2, 4, 1), "'zigzag': expected one of naive, gpipe"),
    ):
        with pytest.raises(ValueError, match=told):
            generate(*arguments)


def test_the_simulator_by_hand() -> None:
    """Two ranks, stages of different length, messages that take time and wait for each other."""
    schedule = generate("gpipe", 2, 2)
    costs = Costs([1, 4], [2, 3], [1, 1], latency=0.5, message=[10, 99], bandwidth=5)
    timeline = simulate(schedule, costs)
    # a message is 10 bytes (what stage 0 gives out), 2 s on the wire; the second waits for the first
    assert [(str(s.action), s.start, s.end) for s in timeline.spans[0]] == [
        ("0F0", 0, 1), ("0F1", 1, 2), ("0B0", 18, 21), ("0B1", 22, 25),
    ]  # fmt: skip
    assert [(str(s.action), s.start, s.end) for s in timeline.spans[1]] == [
        ("1F0", 3.5, 7.5), ("1F1", 7.5, 11.5), ("1B0", 11.5, 15.5), ("1B1", 15.5, 19.5),
    ]  # fmt: skip
    assert timeline.step_time == 25
    assert timeline.busy == (8, 16)
    assert timeline.bubble == 9
    assert timeline.bubble_fraction == 1 - 24 / 50
    assert timeline.idle_within == (17, 0)
    assert timeline.peak_bytes([100, 7]) == (200, 14)
    again = simulate(schedule, replace(timeline.costs(), latency=0.5, message=[10, 99], bandwidth=5))
    assert again == timeline
    with pytest.raises(ValueError, match="1 costs for 2 stages"):
        simulate(schedule, Costs([1]))


def test_a_trace_has_every_action(tmp_path: Path) -> None:
    timeline = simulate(generate("zb-h1", 3, 5), Costs(1e-3, 2e-3, 3e-3))
    draw(tmp_path / "t.json", {"mine": timeline, "again": timeline})
    events = json.loads((tmp_path / "t.json").read_text("utf-8"))["traceEvents"]
    found = [e for e in events if e["ph"] == "X" and e["pid"] == 1]
    told = [(r, span) for r, row in enumerate(timeline.spans) for span in row]
    assert len(found) == len(told) == 3 * 5 * 3
    for event, (rank, ((kind, stage, micro_batch), start, end)) in zip(found, told, strict=True):
        assert event["tid"] == rank and event["name"] == f"{kind}{micro_batch}"
        assert event["args"] == {"stage": stage, "micro-batch": micro_batch}
        assert event["ts"] == pytest.approx(start * 1e6) and event["dur"] == pytest.approx(
            (end - start) * 1e6
        )
