"""What a watch sees of another process."""

import ctypes
import gc
import math
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable
from functools import partial

import pytest
import torch
import torch.distributed as dist

from espalier.comm import collectives
from espalier.faults.diagnosis import Heard, Sign, Verdict, judge
from espalier.faults.liveness import Activity, Device, Look, Signals, _seen, computed_by, is_ready
from espalier.faults.settings import Faults
from espalier.faults.watchdog import Watchdog, _Stderr
from espalier.mesh import Mesh


def until(true: Callable[[], bool]) -> bool:
    end = time.monotonic() + 30
    while not (found := true()) and time.monotonic() < end:
        time.sleep(0.05)
    return found


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="no /proc")
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


def test_ranks_that_make_other_calls_are_told_sooner_than_those_that_wait():
    def heard(quiet: float, other: str) -> dict[int, Heard]:
        calls = {0: ("all_gather of [8, 4] float32", 7), 1: (other, 7)}
        return {
            rank: Heard(
                Sign(rank, "one", rank, state="waits", quiet=quiet, recent=[("0, 1", number, what, 2)]), 0.0
            )
            for rank, (what, number) in calls.items()
        }

    same = "all_gather of [8, 4] float32"
    assert judge(heard(2.5, same), Faults()) is None
    found = judge(heard(5.5, same), Faults())
    assert found is not None and "is the network between them whole?" in found.text
    assert judge(heard(1.5, "reduce_scatter of [72] float32"), Faults()) is None
    found = judge(heard(2.5, "reduce_scatter of [72] float32"), Faults())
    assert found is not None and "part ways at their no. 7" in found.text


def test_a_network_that_loses_what_is_sent_is_told_from_ranks_that_are_out_of_step(monkeypatch):
    def heard(resends):
        rows = [("0, 1", 1, "all_reduce of [2] float64", 1)], [("0, 1", 2, "all_reduce of [9] float32", 1)]
        signs = [
            Sign(
                r, f"host{r}", 9, state="waits", quiet=5.5, recent=rows[0] + rows[1][: 1 - r], resends=resends
            )
            for r in range(2)
        ]
        return {sign.rank: Heard(Sign.loads(sign.dumps()), 0.0) for sign in signs}

    assert "out of step" in judge(heard(False), Faults()).text
    found = judge(heard(True), Faults())
    assert "What ranks 0, 1 sent does not arrive" in found.text and "MTU" in found.text and not found.ranks
    # what the kernel says of a connection, of which nothing is acknowledged
    told = bytearray(192)
    monkeypatch.setattr(socket.socket, "getsockopt", lambda *given: bytes(told))
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        activity = Activity((), None)
        for times, resends in ((2, False), (3, True)):
            told[2] = times
            activity._carried()
            assert activity._resends == resends


def test_calls_of_trials_on_a_dry_mesh_are_none_of_the_ranks():
    """Ranks share trials of layouts among them: each tries others."""
    watch, mesh = Watchdog(Faults()), Mesh.dry({"tensor": 2})
    mesh.ledgers.append(watch)
    x = torch.zeros(4, device="meta")
    collectives.all_reduce(x, mesh, 0)
    assert not watch._recent and not watch._counts


def test_an_error_of_sentences_is_followed_by_one_of_its_own():
    def told(message: str) -> str:
        found = judge({0: Heard(Sign(0, "one", 1, step=3, end="failed", message=message), 0.0)}, Faults())
        assert found is not None
        return found.text.partition("\nNoticed")[0]

    assert told("ValueError: a bad thing") == "rank 0 of 1 failed: ValueError: a bad thing, at step 3."
    assert (
        told("ValueError: Bad. Do this.")
        == "rank 0 of 1 failed: ValueError: Bad. Do this.\nIt was at step 3."
    )


def test_of_ranks_that_raise_alike_the_one_is_blamed_that_has_met_the_error():
    def sign(rank: int, message: str, at: float) -> Heard:
        return Heard(Sign(rank, "one", rank, end="failed", message=message, at=at), 0.0)

    first, own = sign(0, "ValueError: bad\nMet by rank 1.", 1.0), sign(1, "ValueError: bad", 2.0)
    found = judge({0: first, 1: own, 2: sign(2, "ValueError: bad\nMet by rank 1.", 3.0)}, Faults())
    assert found is not None and found.ranks == (1,) and found.text.startswith("rank 1 of 3 failed:")
    found = judge({0: first, 1: Heard(Sign(1, "one", 1), 0.0)}, Faults())  # it has caught its own
    assert found is not None and found.ranks == (0,)


@pytest.mark.parametrize("leave", [False, True])
def test_one_that_has_told_of_its_end_is_left_to_say_why(monkeypatch, leave):
    """A busy machine hears late: the culprit was killed before it had printed its traceback."""

    class Left(Exception):
        pass

    def left(code: int) -> None:
        raise Left(code)

    with subprocess.Popen([sys.executable, "-c", "import time; time.sleep(0.5)"]) as culprit:
        watchdog = Watchdog(Faults())
        watchdog._near, watchdog._machine = [1], "one"
        watchdog._signs = {1: (Sign(1, "one", culprit.pid), time.monotonic() - 5.0)}
        monkeypatch.setattr(os, "_exit", left)
        with pytest.raises(Left):
            watchdog._obey(Verdict((1,), "", 0.0, leave=leave))
        assert culprit.wait() == (0 if leave else -signal.SIGKILL)


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


def _looks_while_functions_return() -> None:
    """Garbage is collected at each of many places of a look, and meanwhile the main thread goes elsewhere."""
    main = threading.get_ident()
    there, go_on, elsewhere, over = (threading.Semaphore(0) for _ in range(4))
    left: list[int] = []

    def leave() -> None:
        left.append(1)
        go_on.release()
        elsewhere.acquire()

    class Cycle:
        def __init__(self) -> None:
            self.me = self

        def __del__(self) -> None:
            if threading.get_ident() != main and not left:
                leave()

    def deep(n: int) -> None:
        if n:
            return deep(n - 1)
        there.release()
        go_on.acquire()

    def other(n: int, *values: object) -> None:
        if n:
            return other(n - 1, *values, {}, 1.5, (n,))
        elsewhere.release()
        over.acquire()

    def watch() -> None:
        activity = Activity((), None)
        for count in range(1, 41):
            there.acquire()
            gc.collect()
            left.clear()
            Cycle()
            gc.set_threshold(count)
            activity.look(hard=False)
            gc.set_threshold(0)
            if not left:
                leave()
            over.release()

    gc.set_threshold(0)
    watcher = threading.Thread(target=watch)
    watcher.start()
    for _ in range(40):
        deep(20)
        other(20)
    watcher.join()


def _looks_while_threads_begin() -> None:
    """States of threads are made without the interpreter's lock, as for threads of C++ that call Python."""
    libc, python = ctypes.CDLL(None), ctypes.pythonapi
    python.PyInterpreterState_Get.restype = ctypes.c_void_p
    interpreter, many = ctypes.c_void_p(python.PyInterpreterState_Get()), ctypes.c_size_t(200_000)
    # which calls what it is to compare with, and finds nothing
    begin = partial(libc.lfind, interpreter, interpreter, ctypes.byref(many), 0, python.PyThreadState_New)
    beginner = threading.Thread(target=begin)
    beginner.start()
    while beginner.is_alive():
        _seen(0)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="no fork")
@pytest.mark.parametrize("looks", [_looks_while_functions_return, _looks_while_threads_begin])
def test_a_look_is_safe(looks: Callable[[], None]) -> None:
    pid = os.fork()
    if not pid:
        signal.alarm(20)  # what is overwritten may wait for ever
        looks()
        os._exit(0)
    assert os.waitpid(pid, 0)[1] == 0


def test_a_device_that_comes_past_no_mark_is_stuck() -> None:
    passed: list[bool] = []

    def mark() -> Callable[[], bool]:
        passed.append(False)
        number = len(passed) - 1
        return lambda: passed[number]

    device = Device(mark)
    assert [device.stuck(now) for now in (100.0, 101.0, 160.0)] == [0.0, 1.0, 60.0]
    passed[0] = True
    assert [device.stuck(now) for now in (161.0, 163.0)] == [0.0, 2.0] and len(passed) == 2
    device.moves()  # what comes then is new to it
    assert device.stuck(170.0) == 0.0 and len(passed) == 3
    assert Device(None).stuck(5.0) == 0.0
    if not torch.accelerator.is_available():
        assert Device.of_program().stuck(5.0) == 0.0


def test_one_that_only_its_device_keeps_busy_is_taken_to_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """The thread that looks, over a main thread that computes and whose device hangs."""
    monkeypatch.setattr("espalier.faults.watchdog._QUIET", 0.0)
    monkeypatch.setattr(Signals, "came", lambda *given: time.sleep(0.01))
    monkeypatch.setattr(Activity, "look", lambda *given, **more: Look("busy", "here"))
    pulse = Watchdog(Faults(limit=1.0, outside=1.0))
    pulse._over, pulse._world, pulse._answered = threading.Event(), dist.group.WORLD, math.inf
    pulse._device = Device(lambda: lambda: False)
    looker = threading.Thread(target=pulse._look_on)
    looker.start()
    try:
        until = time.monotonic() + 20
        while pulse._look.state != "waits" and time.monotonic() < until:
            time.sleep(0.01)
        assert pulse._look == Look("waits", "here")
        quiet = pulse._quiet_since
        pulse.step += 1  # it goes on
        while pulse._look.state != "busy" and time.monotonic() < until:
            time.sleep(0.01)
        assert pulse._quiet_since > quiet
    finally:
        pulse._over.set()
        looker.join()


def test_a_stream_that_answers_nothing_is_written_to(monkeypatch: pytest.MonkeyPatch) -> None:
    """As standard error is of Ray's workers: its `write` returns None."""

    class Silent:
        def __init__(self) -> None:
            self.text = ""

        def write(self, text: str) -> None:
            self.text += text

    stream = Silent()
    monkeypatch.setattr(sys, "stderr", stream)
    over = _Stderr.over(stream)
    assert over.write("one\ntwo") == 7 and stream.text == "one\ntwo" and over.last() == ["one", "two"]
    over.end()
    assert sys.stderr is stream
