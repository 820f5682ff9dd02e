"""Launching real processes: success, and every way in which a rank can fail."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import pytest
import torch.distributed as dist

import espalier
from espalier.files import temporary_folder
from espalier.mesh.launch import LaunchError, _blame, _explain, _tail, launch
from espalier.mesh.process import finish, start

# What every script of these tests begins with. A rank's process id is noted to see whether it has gone.
HEAD = """
import os, signal, sys, time
from pathlib import Path
import torch
import torch.distributed as dist
from espalier.mesh.process import finish, start
here = Path(__file__).parent
me = start()
(here / f"pid{me.rank}").write_text(str(os.getpid()))
"""

# What begins one whose ranks only have to be there.
BARE = """
import os, time
from pathlib import Path
(Path(__file__).parent / ("pid" + os.environ["RANK"])).write_text(str(os.getpid()))
"""


@pytest.fixture(autouse=True)
def _logs_in_the_tests_folder(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    monkeypatch.setenv("TMPDIR", str(tmp_path))


@pytest.fixture
def script(tmp_path):
    def write(body: str) -> Path:
        path = tmp_path / "script.py"
        path.write_text(HEAD + textwrap.dedent(body))
        return path

    return write


def gone(folder: Path, within: float = 5.0) -> bool:
    """No process that has noted its id in the folder runs any more."""
    pids = [int(path.read_text()) for path in folder.glob("pid*")]
    assert pids
    deadline = time.monotonic() + within
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.05)
    return False


def test_ranks_meet_print_and_leave(script, capfd):
    path = script(
        """
        value = torch.tensor([me.rank + 1.0])
        dist.all_reduce(value)
        print("sum", value.item(), sys.argv[1], os.environ["FLAVOUR"], torch.get_num_threads(), hash("a set"))
        print("a word of rank", me.rank, file=sys.stderr)
        finish()
        """
    )
    environment = dict(os.environ)
    handler = signal.getsignal(signal.SIGTERM)
    kept = path.parent / "runs/ranks"
    launch([str(path), "fast"], 2, env={"FLAVOUR": "sour", "OMP_NUM_THREADS": "1"}, logs=kept)
    out, err = capfd.readouterr()
    printed = {file.name: file.read_text() for file in kept.iterdir()}
    assert printed == {
        "rank1.stdout": out,
        "rank1.stderr": "a word of rank 1\n",
    }
    assert out.startswith("sum 3.0 fast sour 1 ")
    assert err == "a word of rank 0\n"
    assert gone(path.parent)
    assert dict(os.environ) == environment
    assert signal.getsignal(signal.SIGTERM) == handler


def test_ranks_that_wait_for_each_other_in_vain_try_again(tmp_path, capfd):
    """A rank does not answer the first time; then never."""
    path = tmp_path / "late.py"
    path.write_text(
        textwrap.dedent(
            """
            import os
            import torch, torch.distributed as dist
            from espalier.mesh import process
            from espalier.mesh.process import finish, start

            process.MEETING, join, away = 2.0, dist.init_process_group, 1

            def late(*args, **options):
                global away
                away -= 1
                if os.environ["RANK"] == "1" and away >= 0:
                    raise RuntimeError("nobody answers")
                return join(*args, **options)

            dist.init_process_group = late
            me = start("cpu")
            value = torch.tensor([me.rank + 1.0])
            dist.all_reduce(value)
            limit = dist.group.WORLD._get_backend(value.device).options._timeout
            print("sum", value.item(), limit.total_seconds())
            finish()
            away = 9
            try:
                start("cpu")
            except RuntimeError as error:
                print(error)
            """
        )
    )
    launch([str(path)], 2)
    out = capfd.readouterr().out
    assert out.startswith("sum 3.0 600.0\nrank 0 of 2 could not meet the others at 127.0.0.1:"), out
    assert "rank 1: nobody answers (tried 2 times)" in out or "(tried 2 times)" in out, out


def test_a_rank_that_raises_is_named_and_quoted(script, capfd):
    path = script(
        """
        if me.rank == 1:
            raise ValueError("the roof leaks")
        dist.barrier()
        """
    )
    with pytest.raises(LaunchError) as caught:
        launch([str(path)], 2)
    report = str(caught.value)
    assert report.startswith("rank 1 of 2 failed: exit code 1\n")
    assert "ValueError: the roof leaks" in report
    assert "script.py" in report
    assert (caught.value.rank, caught.value.exit_code) == (1, 1)
    # all that was written stands in the report
    assert report.endswith("All ranks have been stopped.") and caught.value.folder is None
    assert not list(path.parent.glob("espalier-*"))
    # Rank 0's own error, that its peer has gone, would be no news.
    assert capfd.readouterr() == ("", "")
    assert gone(path.parent)


def test_a_long_traceback_is_quoted_with_the_frames_of_the_program():
    package = Path(espalier.__file__).parent
    within = [f'  File "{package}/engine/passes.py", line {i}, in forward' for i in range(40)]
    lines = [
        "Traceback (most recent call last):",
        '  File "mine.py", line 31, in forward',
        "    x = self.up(x)",
    ]
    lines += [line for frame in within for line in (frame, "    return inner()", "           ^^^^^^^")]
    assert _tail([*lines, "RuntimeError: no"]) == [
        *lines[:3],
        within[-1],
        "    return inner()",
        "           ^^^^^^^",
        "RuntimeError: no",
    ]
    assert _tail(lines[:12]) == lines[:12]


def test_a_rank_that_left_well_is_not_said_to_have_failed(tmp_path):
    """The watch tells who has left; others end for want of it, with its code."""
    account = {
        "ranks": [1],
        "text": "rank 1 of 2 has left: its program has ended.",
        "delay": 0.0,
        "words": [],
    }
    (tmp_path / "account").write_text(json.dumps(account))
    for exits in ({0: 76}, {0: 76, 1: -signal.SIGTERM}):
        error = _explain(exits, 2, tmp_path, range(2), None)
        assert str(error).startswith("rank 1 of 2 has left: its program has ended.\n")
        assert "failed" not in str(error) and (error.rank, error.exit_code) == (1, 1)
    error = _explain({0: 76, 1: 3}, 2, tmp_path, range(2), None)
    assert str(error).startswith("rank 1 of 2 failed: exit code 3\nrank 1 of 2 has left")


def test_a_rank_that_the_watch_has_ended_is_not_said_to_want_memory(tmp_path):
    said = "rank 1 of 2 gave no sign of life for 5.3 s (on vm)."
    account = {"ranks": [1], "text": said, "delay": 5.3, "words": [], "silent": True}
    (tmp_path / "account").write_text(json.dumps(account))
    error = _explain({0: 76, 1: -signal.SIGKILL}, 2, tmp_path, range(2), None)
    assert str(error).startswith(said) and "SIGKILL" not in str(error)
    assert (error.rank, error.exit_code) == (1, -signal.SIGKILL)


def test_a_rank_that_exits_is_told_from_those_that_wait_for_it(script):
    path = script(
        """
        if me.rank == 1:
            print("on its way out")
            sys.exit(3)
        print("shown as it comes", file=sys.stderr)
        dist.barrier()
        """
    )
    with pytest.raises(LaunchError, match="rank 1 of 2 failed: exit code 3") as caught:
        launch([str(path)], 2)
    # what nobody has seen is kept, and nothing else
    (folder,) = path.parent.glob("espalier-*")
    assert caught.value.folder == folder and str(caught.value).endswith(f"What else they wrote: {folder}")
    assert {file.name: file.read_text() for file in folder.iterdir()} == {"rank1.stdout": "on its way out\n"}


def test_a_rank_that_is_killed_ends_the_others_soon(script, capfd):
    path = script(
        """
        dist.barrier()  # else gloo of the other, which still connects, may have a word
        if me.rank == 1:
            print("I feel faint", file=sys.stderr)
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(60)
        """
    )
    begin = time.monotonic()
    with pytest.raises(LaunchError, match="rank 1 of 2 failed: killed by SIGKILL") as caught:
        launch([str(path)], 2)
    assert time.monotonic() - begin < 20
    assert "I feel faint" in str(caught.value)
    assert caught.value.exit_code == -signal.SIGKILL
    assert capfd.readouterr() == ("", "")
    assert gone(path.parent)


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG is Linux's")
def test_ranks_go_when_the_launcher_goes(tmp_path, monkeypatch):
    code = "import sys; from espalier.mesh.launch import launch; launch(sys.argv[1:], 2)"
    launchers = {}  # all at once: they wait most of the time
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    try:
        for number in (signal.SIGKILL, signal.SIGINT, signal.SIGTERM):
            path = tmp_path / number.name / "script.py"
            path.parent.mkdir()
            # one of three has torch's threads, too
            path.write_text((HEAD if number == signal.SIGTERM else BARE) + "time.sleep(200)")
            launchers[number] = subprocess.Popen(
                [sys.executable, "-c", code, str(path)],
                stderr=subprocess.PIPE,
                start_new_session=True,
                env={**os.environ, "TMPDIR": str(temporary)},
                # a shell's background jobs ignore Ctrl-C, and so would what they start
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
            )
        deadline = time.monotonic() + 120
        for number, launcher in launchers.items():  # one that starts removes what killed ones have left
            while len(list((tmp_path / number.name).glob("pid*"))) < 2:
                assert launcher.poll() is None and time.monotonic() < deadline
                time.sleep(0.1)
        for number, launcher in launchers.items():
            launcher.send_signal(number)
            _, err = launcher.communicate(timeout=20)
            assert launcher.returncode == -number
            assert b"terminate called" not in err
            assert gone(tmp_path / number.name)
    finally:
        for launcher in launchers.values():
            launcher.kill()
            launcher.wait()
    (left,) = temporary.glob("espalier-*")
    monkeypatch.setattr(tempfile, "tempdir", str(temporary))
    (temporary / "espalier-kept").mkdir()  # what ranks of a run that failed wrote
    with temporary_folder() as folder, temporary_folder():
        assert not left.exists() and folder.exists()
    assert os.listdir(temporary) == ["espalier-kept"]


def test_scripts_may_catch_ctrl_c(tmp_path):
    """And save, before the run ends as one that is interrupted."""
    path = tmp_path / "script.py"
    path.write_text(
        BARE + "try: time.sleep(200)\n"
        "except KeyboardInterrupt:\n"
        "    time.sleep(0.5)\n"
        "    (Path(__file__).parent / ('saved' + os.environ['RANK'])).touch()\n"
    )
    command = [sys.executable, "-m", "espalier", "run", "-n", "2", str(path)]
    run = subprocess.Popen(
        command,
        stderr=subprocess.PIPE,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    try:
        deadline = time.monotonic() + 120
        while len(list(tmp_path.glob("pid*"))) < 2:
            assert run.poll() is None and time.monotonic() < deadline
            time.sleep(0.1)
        time.sleep(0.2)
        run.send_signal(signal.SIGINT)
        _, err = run.communicate(timeout=20)
    finally:
        run.kill()
        run.wait()
    assert run.returncode == 130 and b"interrupted" in err, err
    assert {x.name for x in tmp_path.glob("saved*")} == {"saved0", "saved1"} and gone(tmp_path)


def test_a_signal_that_is_ignored_stays_so(capfd, request):
    """As SIGHUP is under `nohup`: the run goes on when its terminal is closed."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    request.addfinalizer(lambda: signal.signal(signal.SIGHUP, before))
    body = "import os, signal, time; os.kill(os.getppid(), signal.SIGHUP); time.sleep(0.5); print('lived')"
    launch(["-c", body], 1)
    assert capfd.readouterr().out == "lived\n"
    assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN


def test_a_port_in_use_is_said_before_anything_starts(script):
    path = script("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(LaunchError, match=f"port {port} cannot be used .*choose another"):
            launch([str(path)], 2, port=port)


def test_requests_that_make_no_sense():
    with pytest.raises(ValueError, match="nproc=0"):
        launch(["-c", "pass"], 0)
    with pytest.raises(ValueError, match="expected what follows `python`"):
        launch("train.py", 1)
    with pytest.raises(LaunchError, match=r"no such file: nowhere\.py"):
        launch(["nowhere.py"], 1)
    with pytest.raises(ValueError, match="port=70000"):
        launch(["-c", "pass"], 1, port=70000)


def test_the_cause_is_told_from_the_consequences(tmp_path):
    def first(exits: dict[int, int]) -> int:
        return min(exits, key=lambda rank: _blame(rank, exits, tmp_path))

    (tmp_path / "rank0.failure").write_text("RuntimeError: Connection closed by peer [127.0.0.1]:4711")
    (tmp_path / "rank1.failure").write_text("ValueError: the roof leaks")
    os.utime(tmp_path / "rank0.failure", ns=(1, 1))
    terminated, aborted, killed = -signal.SIGTERM, -signal.SIGABRT, -signal.SIGKILL
    assert first({0: 1, 1: 1, 2: terminated}) == 1
    assert first({0: 1, 2: aborted, 3: terminated}) == 2
    assert first({0: 1, 1: 1, 3: killed}) == 3
    assert first({0: 1, 2: 7}) == 2


def test_a_single_process_is_a_world_of_one(monkeypatch):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    me = start("cpu")
    try:
        assert (me.rank, me.world_size, me.local_rank, me.device.type) == (0, 1, 0, "cpu")
        assert start("cpu") == me
        assert dist.get_world_size() == 1
    finally:
        finish()
    assert not dist.is_initialized()
    finish()


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "0"}, "WORLD_SIZE, MASTER_ADDR, MASTER_PORT missing"),
        ({"RANK": "one", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK='one'"),
        ({"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "x", "MASTER_PORT": "1"}, "RANK=2 but WORLD_SIZE=2"),
    ],
)
def test_an_environment_that_makes_no_sense(monkeypatch, environment, message):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=message):
        start("cpu")


def test_a_program_with_a_group_of_its_own_ends_well_with_the_watch_running(tmp_path, capfd):
    """A thread in a call of the store when the interpreter ends would abort the process.

    One of its ranks gives the group up, the other does not.
    """
    path = tmp_path / "own.py"
    path.write_text(
        textwrap.dedent(
            """
            import atexit, threading
            import torch, torch.distributed as dist

            @atexit.register
            def last():
                print(*[thread.name for thread in threading.enumerate()], flush=True)

            import espalier
            from espalier.faults import watched

            dist.init_process_group("gloo")
            linear = torch.nn.Linear(4, 2)
            sgd = torch.optim.SGD(linear.parameters())
            engine = espalier.initialize(linear, sgd, loss_fn=lambda y, x: y.sum())
            engine.train_step(torch.ones(4, 4))
            assert watched() is engine.pulse and engine.pulse.running
            print("trained", flush=True)
            if dist.get_rank():
                dist.destroy_process_group()
            """
        )
    )
    launch([str(path)], 2, env={"ESPALIER_FAULTS": "on"}, logs=tmp_path / "logs")
    printed = capfd.readouterr().out, (tmp_path / "logs/rank1.stdout").read_text()
    assert printed == ("trained\nMainThread\n",) * 2
