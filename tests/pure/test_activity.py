"""What a watch sees of another process."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable

import pytest

from espalier.comm.activity import Activity, computed_by, is_ready, sees_processes
from espalier.comm.verdict import Faults, Heard, Sign, judge


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.skipif(not sees_processes(), reason="no /proc")
def test_a_process_that_wants_a_core_is_told_from_one_that_is_stopped():
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as child:
        try:
            assert until(lambda: is_ready(child.pid) and (computed_by(child.pid) or 0) > 0)
            os.kill(child.pid, signal.SIGSTOP)
            assert until(lambda: not is_ready(child.pid))
            assert computed_by(child.pid) is not None
        finally:
            child.kill()
    assert not is_ready(child.pid) and computed_by(child.pid) is None


def test_a_silent_rank_that_is_short_of_a_core_is_waited_for():
    def heard(vouched: bool) -> dict[int, Heard]:
        return {0: Heard(Sign(0, "one", 1), 0.1), 1: Heard(Sign(1, "one", 2), 6.0, vouched)}

    assert judge(heard(vouched=True), Faults()) is None
    found = judge(heard(vouched=False), Faults())
    assert found is not None and found.ranks == (1,) and "no sign of life for 6.0 s" in found.text


def test_a_look_keeps_nothing_of_what_it_has_seen():
    class Held:
        pass

    looks = threading.Event(), threading.Event()

    def watch() -> None:
        activity = Activity((), None)
        looks[0].wait(30)
        activity.look(hard=False)
        looks[1].set()

    def work() -> "weakref.ref[Held]":
        held = Held()
        looks[0].set()
        assert looks[1].wait(30)
        return weakref.ref(held)

    watcher = threading.Thread(target=watch)
    watcher.start()
    gc.disable()
    try:
        assert work()() is None
    finally:
        gc.enable()
        watcher.join()
