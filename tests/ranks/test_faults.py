"""Ranks that die, leave, hang or disagree, for real: all stop, and one report says who, where and in what."""

from __future__ import annotations

import fcntl
import json
import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from espalier import Faults, Mesh
from espalier.checkpoint import newest
from espalier.comm import all_reduce
from espalier.faults import watched
from tests.asked import ASKED

WORLDS = (
    # those that last longest first
    "compute:2:0 patient:2:1 leave:2:1 bare:2:1 stop:2:1 sleep:4:2 sleep:2:0 kill:4:0 raise:4:2 differ:2:1 "
    "exit:2:1 skip:2:1 save:2:1 pipe:2:1 host:3:0 end:3:1"
).split()
WORLDS += ["kill:2:1", "raise:2:1"] if ASKED else []  # as of four ranks
PROMISED = 10.0  # seconds


@dataclass
class End:
    """How a world ended."""

    place: Path
    codes: dict[int, int]
    seconds: float
    errors: list[str]

    @property
    def reports(self) -> list[str]:
        """What the ranks reported."""
        return [
            report
            for error in self.errors
            for report in re.findall(r"espalier: .*?are stopped\.", error, re.S)
        ]

    @property
    def run(self) -> tuple[str, bool]:
        """What the run's folder says of its end, and whether that is the report."""
        (event,) = map(json.loads, (self.place / "run/events.jsonl").read_text().splitlines())
        told = f"espalier: {event['text']}" in self.reports[0]
        return json.loads((self.place / "run/run.json").read_text())["status"], told


def die(folder: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name != "ESPALIER_FAULTS"}
    done = subprocess.run(
        [sys.executable, "-m", "tests.ranks.dying", str(folder), *WORLDS],
        env=environment | {"GLOO_SOCKET_IFNAME": "lo"},
        timeout=400,  # some 20 s on a quiet machine
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr


@pytest.fixture(scope="module")
def ended(of_all_processes) -> dict[str, End]:
    folder = of_all_processes / "dying"
    folder.mkdir(exist_ok=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # they die once for all processes of pytest
        if not (folder / "done").exists():
            die(folder)
            (folder / "done").touch()
    found = {}
    for world in WORLDS:
        place = folder / world
        ends = [json.loads((place / f"end{rank}").read_text()) for rank in range(int(world.split(":")[1]))]
        errors = [(place / f"err{rank}").read_text() for rank in range(len(ends))]
        last = max(time for _, time in ends)
        codes = {rank: code for rank, (code, _) in enumerate(ends)}
        found[world] = End(place, codes, last - float((place / "deed").read_text()), errors)
    return found


@pytest.mark.long
@pytest.mark.parametrize(
    "world",
    [w for w in WORLDS if w.split(":")[0] not in "compute patient leave host bare end".split()],
)
def test_all_stop_with_one_report_that_names_the_rank(ended, world):
    kind, size, who = world.split(":")
    end = ended[world]
    assert len(end.reports) == 1, "\n----\n".join(end.errors)
    report = end.reports[0]
    assert report.startswith(f"espalier: rank {who} of {size} ") or kind == "differ"
    told = re.search(r"Noticed ([\d.]+) s after (its|the) last move", report)
    assert told is not None and float(told[1]) < PROMISED
    assert end.seconds < 3 * PROMISED  # on a busy machine
    assert "at step 3" in report or kind == "skip"
    assert "all_reduce of [2] float64 along 'data'" in report or kind in ("differ", "sleep", "pipe")
    assert "these are its last words" in report or kind == "raise"
    assert sum("these are its last words" in error for error in end.errors) <= 2
    for rank, code in end.codes.items():
        if rank != int(who):
            assert code == 76, end.codes
    assert end.run == ("failed", True)


def test_a_run_without_a_first_rank_is_told_of_by_the_next(ended):
    """Its page said "running" for ever, and lacked the report, as it did where a rank hung."""
    assert ended["kill:4:0"].run == ended["host:3:0"].run == ("failed", True)


def test_a_killed_rank_is_gone_and_the_others_say_where_they_are(ended):
    report = ended["kill:4:0"].reports[0]
    assert "is gone: its process has ended without a word" in report
    assert re.search(
        r"Ranks? [\d, ]*3: (connection lost|waiting|going on), at step 3, .*reduce_scatter", report
    )
    assert ended["kill:4:0"].codes[0] == -9


def test_an_error_is_told_by_the_rank_that_raised_it(ended):
    for world in {"raise:2:1", "raise:4:2"} & {*WORLDS}:
        end, who = ended[world], int(world[-1])
        assert f"rank {who} of {world[6]} failed: ValueError: a bad thing, at step 3" in end.reports[0]
        assert [rank for rank, error in enumerate(end.errors) if "Traceback" in error] == [who]
        assert end.codes[who] == 1


def test_those_that_wait_at_the_end_are_stopped_with_one_report(ended):
    """They had given up their world by then, and knew of no verdict: each had a traceback of its own."""
    end = ended["end:3:1"]
    assert end.codes == {0: 76, 1: 1, 2: 76}
    assert len(end.reports) == 1 and "rank 1 of 3 failed: ValueError: a bad end" in end.reports[0]
    assert [rank for rank, error in enumerate(end.errors) if "Traceback" in error] == [1]


def test_a_checkpoint_stays_whose_ranks_die_before_they_agreed_on_it(ended):
    """The next save, which asks how it went, meets a rank that is gone; ``keep = 1`` left no other."""
    assert newest(ended["save:2:1"].place / "checkpoints") is not None


def test_in_a_pipeline_the_action_of_the_schedule_is_named(ended):
    report = ended["pipe:2:1"].reports[0]
    assert re.search(r"Rank 0: [a-z ]+, at step 3, in action 0[A-Z_]+\d, \w+ along 'pipe'", report)


def test_without_the_store_the_others_say_who_kept_it(ended):
    end = ended["host:3:0"]
    assert end.codes == {0: -9, 1: 76, 2: 76} and end.seconds < 3 * PROMISED
    (report,) = end.reports
    assert "rank 1 of 3 has lost a connection in reduce_scatter" in report and "at step 3" in report
    assert "rank 0, whose process kept it, is gone: it has ended without a word" in report
    assert not any("Traceback" in error for error in end.errors)


def test_one_that_leaves_early_is_named(ended):
    assert "has left: its program has ended, at step 3" in ended["exit:2:1"].reports[0]
    assert "A collective is made by all of its ranks" in ended["exit:2:1"].reports[0]
    assert ended["exit:2:1"].codes == {0: 76, 1: 0}


def test_one_that_sleeps_is_told_from_those_that_wait_for_it(ended):
    report = ended["sleep:4:2"].reports[0]
    assert "has done nothing for" in report and "ranks/dying.py" in report
    assert re.search(r"Ranks 0, 1, 3: waiting, at step 3, in reduce_scatter", report)


def test_a_program_without_an_engine_is_watched_too(ended):
    end = ended["bare:2:1"]
    (report,) = end.reports
    assert "rank 1 of 2 has done nothing for" in report and "ranks/dying.py" in report
    assert "in all_reduce of [2] float32 along 'data' (its no. 3)" in report
    assert end.codes == {0: 76, 1: 76} and end.seconds < 3 * PROMISED


def test_a_stopped_process_gives_no_sign_and_is_ended(ended):
    assert "gave no sign of life for" in ended["stop:2:1"].reports[0]
    assert ended["stop:2:1"].codes[1] == -9


def test_collectives_that_differ_are_told_with_both_sides(ended):
    report = ended["differ:2:1"].reports[0]
    assert re.search(
        r"part ways at their no. \d+: rank 0: reduce_scatter of \[2, \d+\] float64 \(step 3\); "
        r"rank 1: all_reduce of \[5\] float32 \(step 3\)",
        report,
    )


def test_one_that_skipped_a_step_is_named(ended):
    assert "rank 1 of 2 has left" in ended["skip:2:1"].reports[0]
    assert (
        "at step 5" in ended["skip:2:1"].reports[0]
    )  # it has made its last, the other waits in its own fifth


def test_a_slow_rank_is_waited_for(ended):
    for world in ("compute:2:0", "patient:2:1"):
        assert ended[world].reports == [] and ended[world].codes == {0: 0, 1: 0}


@pytest.mark.long
def test_ranks_that_are_told_to_leave_wait_for_a_slow_one(ended):
    end = ended["leave:2:1"]
    said = [(end.place / f"out{rank}").read_text() for rank in end.codes]
    assert end.codes == {0: 0, 1: 0} and not end.reports, (end.codes, end.errors)
    assert said[0] == said[1] and said[0].startswith("left after step ")


def leaves_unwatched(rank: int, world: int) -> int:
    """The step after which a rank leaves, where one of them is asked to."""
    mesh, pulse = Mesh.from_env({"data": world}), watched(Faults(watch=False))
    for step in range(1, 20):
        all_reduce(torch.ones(2), mesh, 0)
        if rank == 1 and step == 3:
            pulse.signals.asked = True
        if pulse.to_leave(step):
            return step
    return 0


@pytest.mark.world(2)
def test_all_leave_after_one_step_where_nobody_watches(ranks):
    first, second = ranks(2, leaves_unwatched, timeout=30)
    assert 3 < first == second
