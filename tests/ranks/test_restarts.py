"""Runs that are broken off by force or by request, go on, and have the losses of one that was left alone."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
import pickle
import shutil
import signal
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import yaml

from espalier.mesh.launch import LaunchError
from espalier.train import runlog, trainer
from espalier.train.job import Job, JobError
from espalier.train.run import PREEMPTED, fitted, main, run
from espalier.train.runlog import RunLog, append
from espalier.train.trackers import Callback, Event
from espalier.train.trainer import Preempted, RunCheckpoints, TrainingError, train

STEPS = 160  # so many that a signal is heard in mid-run
ROOT = Path(__file__).parents[2]


def job(folder: Path, **changes: Any) -> Job:
    tables: dict[str, Any] = {
        "model": {
            "kind": "gpt",
            "vocab_size": 40,
            "layers": 1,
            "hidden": 16,
            "heads": 2,
            "max_positions": 12,
        },
        "data": {"kind": "tokens"},
        "plan": {},
        "optimizer": {"lr": 1e-3, "schedule": "cosine"},
        "train": {"steps": STEPS, "batch_size": 8, "sequence": 12, "log_every": 1, "dtype": "float64"},
        "checkpoint": {"every": 5},
    }
    tables["train"].update(out=str(folder / "out"), eval_batches=1)
    tables |= {key: changes.pop(key) for key in list(changes) if key in tables}
    for key, value in changes.items():
        table, _, name = key.partition("_")
        tables.setdefault(table, {})[name] = value
    return Job.from_dict(tables)


def losses(folder: Path) -> list[float]:
    path = folder / "out/metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []
    assert [r["step"] for r in records] == list(range(1, len(records) + 1))
    return [r["loss"] for r in records]


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> list[float]:
    """One process that nobody disturbs."""
    folder = tmp_path_factory.mktemp("alone")
    train(job(folder))
    return losses(folder)


def rank_of(number: int) -> int:
    """The process of a rank that this process's launch has started; 0 where there is none."""
    for entry in Path("/proc").iterdir():
        try:
            told = (entry / "environ").read_bytes().split(b"\0")
            mine = int((entry / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid()
        except (OSError, IndexError):
            continue
        if (
            mine
            and f"RANK={number}".encode() in told
            and b"espalier.train.rank" in (entry / "cmdline").read_bytes()
        ):
            return int(entry.name)
    return 0


def send(number: signal.Signals, rank: int, folder: Path, after: int, times: int, saved: bool) -> None:
    path, killed, asked = folder / "out/metrics.jsonl", 0, job(folder)
    for _ in range(times):
        while (
            not path.exists()
            or path.read_text().count("\n") < after
            or (saved and RunCheckpoints.newest(asked) is None)
            or (found := rank_of(rank)) in (0, killed)
        ):
            if path.exists() and path.read_text().count("\n") == STEPS:
                return  # it came to its end unhurt
            time.sleep(0.02)
        killed = found
        os.kill(killed, number)


def signalled(
    number: signal.Signals, folder: Path, *, times: int = 1, saved: bool = False, **changes: Any
) -> tuple[Any, list[str]]:
    """A run on two ranks, the second of which gets a signal in mid-run; its result and reports.

    Args:
        saved: the signal waits for a checkpoint, which is written beside the steps.
    """
    said: list[str] = []
    thread = threading.Thread(target=send, args=(number, 1, folder, 8, times, saved), daemon=True)
    thread.start()
    result = run("train", job(folder, plan_data=2, **changes), report=said.append)
    thread.join()
    return result, said


@pytest.mark.skipif(sys.platform != "linux", reason="finds its ranks by /proc")
def test_a_killed_rank_is_started_again_from_the_last_checkpoint_and_left_out_the_second_time(
    tmp_path, alone
):
    # the second signal comes as soon as there is a process for it, so that nothing was saved between
    changes = {"elastic_restarts": 2, "elastic_min_data": 1, "checkpoint_every": 20}
    result, said = signalled(signal.SIGKILL, tmp_path, times=2, saved=True, **changes)
    assert result.steps == STEPS and result.ranks == 1 and len(said) == 2
    assert "rank 1 of 2 failed: killed by SIGKILL" in said[0]
    assert "rank 1 of 2 is gone" in said[0] and "Noticed" in said[0]
    assert "Starting again on 2 ranks, from step-00000" in said[0]
    assert "rank 1 of 2 failed: killed by SIGKILL" in said[1]
    assert "Starting again on 1 rank, from step-00000" in said[1]
    told = [json.loads(line) for line in (tmp_path / "out/events.jsonl").read_text().splitlines()]
    restarts = [event for event in told if event["kind"] == "restart"]
    assert [event["text"] for event in restarts] == said and all(event["step"] for event in restarts)
    assert "failed" not in {
        event["kind"] for event in told
    }  # what a lost connection said stands in a restart
    torch.testing.assert_close(losses(tmp_path), alone, rtol=0, atol=1e-9)


@pytest.mark.skipif(sys.platform != "linux", reason="finds its ranks by /proc")
def test_a_run_that_is_asked_to_leave_saves_and_goes_on_with_fewer_ranks(tmp_path, alone):
    result, said = signalled(signal.SIGTERM, tmp_path)
    assert isinstance(result, Preempted) and said == []
    assert 8 <= result.step < STEPS and result.saved.endswith(f"step-{result.step:08}")
    assert len(losses(tmp_path)) == result.step
    train(job(tmp_path), resume=True)
    torch.testing.assert_close(losses(tmp_path), alone, rtol=0, atol=1e-9)


def test_what_a_run_gives_is_kept_before_any_rank_leaves(tmp_path, monkeypatch):
    # the first to leave with exit code 75 has the others ended
    left = Preempted(3, "step-3")
    kept: list[bytes] = []
    (tmp_path / "job.json").write_text(
        json.dumps({"raw": job(tmp_path).raw, "source": "", "debug": False, "options": {}})
    )
    monkeypatch.setattr("espalier.train.run._ACTIONS", {"train": lambda job: left})
    monkeypatch.setattr("espalier.train.run.start", lambda device_type: SimpleNamespace(world_size=1))
    monkeypatch.setattr("espalier.train.run.finish", lambda: kept.append((tmp_path / "result").read_bytes()))
    assert main(["train", str(tmp_path)]) == PREEMPTED
    assert pickle.loads(kept[0]) == left


def test_the_data_axis_shrinks_as_far_as_it_may(tmp_path):
    asked = job(tmp_path, plan_data=4, plan_tensor=2, elastic_min_data=2)
    assert [fitted(asked, n).plan.data for n in (8, 6, 4, 2, 5)] == [4, 3, 2, 4, 4]
    assert fitted(job(tmp_path, plan_data=4), 2).plan.data == 4


def test_after_two_deaths_of_one_rank_with_nothing_saved_between_it_goes_on_without(tmp_path, monkeypatch):
    asked = job(tmp_path, plan_data=4, elastic_restarts=9, elastic_min_data=2)
    # (who dies, what was saved before)
    deaths = iter([(2, 0), (3, 5), (3, 10), (3, 10), (1, 10), (1, 10), (0, 10), (0, 10), (0, 10)])
    sizes: list[tuple[int, int, bool]] = []

    def attempt(action: str, job: Job, ranks: int, *given: Any) -> str:
        sizes.append((ranks, job.plan.data, given[-1].get("resume", False)))
        who, saved = next(deaths, (None, 0))
        if who is None:
            return "done"
        if saved:
            (tmp_path / f"step-{saved}").mkdir(exist_ok=True)
        raise LaunchError(f"rank {who} died", who, -9)

    def newest(job: Job) -> Path | None:
        return max(tmp_path.glob("step-*"), key=lambda path: int(path.name[5:]), default=None)

    said: list[str] = []
    monkeypatch.setattr("espalier.train.run._attempt", attempt)
    monkeypatch.setattr(RunCheckpoints, "newest", staticmethod(newest))
    assert run("train", asked, report=said.append) == "done"
    assert [ranks for ranks, *_ in sizes] == [4, 4, 4, 4, 3, 3, 2, 2, 2, 2]
    assert all(ranks == data for ranks, data, _ in sizes)
    assert [resumes for *_, resumes in sizes] == [False] + [True] * 9
    assert "rank 2 died\nStarting again on 4 ranks, from the beginning; 8 more times" in said[0]
    assert "rank 3 died\nStarting again on 3 ranks, from step-10; 5 more times" in said[3]
    deaths = iter([(0, 10)] * 10)
    with pytest.raises(LaunchError, match="rank 0 died"):
        run("train", asked, report=said.append)


def test_what_there_is_to_go_on_from_is_said_where_nobody_starts_again(tmp_path, monkeypatch):
    asked = job(tmp_path, plan_data=4)

    def attempt(*given: Any) -> str:
        asked.out.mkdir()
        (asked.out / "metrics.jsonl").write_text('{"step": 7}\n')
        lost = "Connection closed by peer: rank 1 has ended, or left the process group"
        append(asked.out, Event("failed", lost, 9, ""))
        raise LaunchError("rank 1 died", 1, -9)

    monkeypatch.setattr("espalier.train.run._attempt", attempt)
    monkeypatch.setattr(RunCheckpoints, "newest", staticmethod(lambda job: Path("step-5")))
    with pytest.raises(
        LaunchError, match="rank 1 died\nIts newest checkpoint is step-5: go on with --resume.\nIf memory"
    ):
        run("train", asked)
    (event,) = map(json.loads, (asked.out / "events.jsonl").read_text().splitlines())
    assert event["kind"] == "failed" and event["step"] == 9 and event["text"].startswith("rank 1 died")
    assert json.loads((asked.out / "run.json").read_text())["status"] == "failed"


class Poisoned:
    """Batches of images, one of which is not finite."""

    def __init__(self, batches: Any, at: int) -> None:
        self._batches, self._at, self.size = batches, at, batches.size
        self.drawn: list[int] = []

    def batch(self, step: int, rows: slice = slice(None)) -> Any:
        self.drawn.append(step)
        found = self._batches.batch(step, rows)
        if step == self._at:
            found["pixel_values"] = found["pixel_values"] * math.nan
        return found


def with_images(
    folder: Path, monkeypatch: pytest.MonkeyPatch, at: int, **changes: Any
) -> tuple[Any, Poisoned]:
    made = []

    def batches(*given: Any, **options: Any) -> Poisoned:
        made.append(Poisoned(genuine(*given, **options), at))
        return made[0]

    genuine = trainer.training_batches
    with monkeypatch.context() as patch:
        patch.setattr(trainer, "training_batches", batches)
        model: dict[str, Any] = {
            "kind": "vit",
            "image": 8,
            "patch": 4,
            "channels": 1,
            "classes": 3,
            "hidden": 8,
            "heads": 2,
        }
        model["layers"] = 1
        result = train(job(folder, model=model, data_kind="images", train_steps=12, **changes))
    return result, made[0]


def test_a_rollback_leaves_the_batch_out(tmp_path, monkeypatch):
    back, drawn = with_images(tmp_path / "back", monkeypatch, 8, spikes_on_nan="rollback")
    skipped, _ = with_images(tmp_path / "skip", monkeypatch, 8, spikes_on_nan="skip")
    assert drawn.drawn == [*range(1, 9), 6, 7, *range(9, 13)]  # the last checkpoint was of step 5
    assert back.steps == skipped.steps == 12 and back.loss == skipped.loss
    steps = [json.loads(x)["step"] for x in (tmp_path / "back/out/metrics.jsonl").read_text().splitlines()]
    assert steps == [1, 2, 3, 4, 5, 6, 7, 9, 10, 11, 12]


def test_without_a_checkpoint_to_go_back_to_it_stops_and_names_the_culprits(tmp_path, monkeypatch):
    with pytest.raises(TrainingError, match=r"step 3: the loss is nan.*not finite are.*no checkpoint yet"):
        with_images(tmp_path, monkeypatch, 3, spikes_on_nan="rollback")


class Second(Callback):
    """Another run, which begins in the same folder after three steps."""

    def begin(self, run: Any) -> None:
        self.run, self.ends = run, []

    def record(self, record: Any) -> None:
        if record.step == 3:
            with RunLog(self.run.folder, self.run.engine, tokens=8, after=2) as log:
                log.write(3, 0.5)

    def end(self, status: str) -> None:
        self.ends.append(status)


def test_a_run_ends_where_another_has_begun_in_its_folder(tmp_path, monkeypatch):
    """As two hosts do where torch's rendezvous has forgotten the one that was silent for too long."""
    monkeypatch.setattr(runlog, "_LOOK", 0.0)
    second = Second()
    with pytest.raises(
        TrainingError, match=rf"another run has begun in .*process {os.getpid()} on .*This one"
    ):
        train(job(tmp_path), callbacks=[second])
    assert losses(tmp_path)[2:] == [0.5] and second.ends == ["left"]
    assert not (tmp_path / "out/events.jsonl").exists()
    assert json.loads((tmp_path / "out/run.json").read_text())["status"] == "finished"


def test_tables_that_need_checkpoints_say_so(tmp_path):
    raw = dict(job(tmp_path, plan_data=4, spikes_on_spike="rollback").raw)
    del raw["checkpoint"]
    with pytest.raises(JobError) as error:
        Job.from_dict(dict(raw, elastic={"restarts": 2, "min_data": 5}))
    told = str(error.value)
    assert "spikes.on_spike" in told and "elastic.restarts" in told and "elastic.min_data = 5" in told


def torchrun_of(name: str, ranks: int) -> tuple[list[str], dict[str, str]]:
    """The command of a ready file, and its environment, on one host."""
    if name == "slurm.sbatch":
        environment = {"LAUNCH": "env", "RANKS_PER_NODE": str(ranks), "MASTER": "127.0.0.1", "PORT": "0"}
        return ["bash", str(ROOT / "deploy" / name), "job.toml"], environment
    *_, spec = yaml.safe_load_all((ROOT / "deploy" / name).read_text())
    container = spec["spec"]["template"]["spec"]["containers"][0]
    changed = {
        "--nnodes=2": "--nnodes=1",
        "--nproc-per-node=8": f"--nproc-per-node={ranks}",
        "/runs/job.toml": "job.toml",
    }
    changed["--rdzv-endpoint=espalier-0.espalier:29400"] = "--rdzv-endpoint=127.0.0.1:0"
    assert set(changed) <= set(container["args"])
    given = [changed.get(word, word) for word in container["args"]]
    return [*container["command"], *given], {each["name"]: each["value"] for each in container["env"]}


@pytest.mark.skipif(shutil.which("bash") is None, reason="needs bash")
@pytest.mark.parametrize(("name", "ranks"), [("slurm.sbatch", 1), ("kubernetes.yaml", 1)])
def test_the_commands_of_the_ready_files_train(tmp_path, name, ranks):
    (tmp_path / "job.toml").write_text(
        '[model]\nkind = "gpt"\nvocab_size = 40\nlayers = 1\nhidden = 16\nheads = 2\nmax_positions = 12\n'
        f'[data]\nkind = "tokens"\n[plan]\ndata = {ranks}\n[train]\nsteps = 2\nbatch_size = 4\n'
        "sequence = 12\n[checkpoint]\n"
    )
    command, settings = torchrun_of(name, ranks)
    bins = [str(Path(sys.executable).parent), os.environ["PATH"]]
    environment = os.environ | settings | {"PATH": os.pathsep.join(bins), "PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    assert (tmp_path / "runs/job/checkpoints/step-00000002").is_dir()


@pytest.mark.skipif(
    sys.platform != "linux" or os.geteuid() != 0 or shutil.which("ip") is None,
    reason="hosts are played by network namespaces, which need Linux, root and iproute2",
)
def test_a_host_that_is_cut_off_and_comes_back_trains_on():
    command = [sys.executable, str(ROOT / "benchmarks/hosts.py")]  # it has limits of its own, and clears up
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr[-8000:]
    if done.stdout.startswith("skipped"):
        pytest.skip(done.stdout)
    for line in (
        "the first trains on alone",
        "both train again",
        "gave no sign of life",
        "largest difference",
    ):
        assert line in done.stdout


SLOW = """
import time
from espalier.models import GPT, GPTConfig

class Slow(GPT):
    def forward(self, *given, **named):
        time.sleep(0.1)  # the cores are left to the other run, which may begin later
        return super().forward(*given, **named)

def build():
    return Slow(GPTConfig(vocab_size=40, layers=1, hidden=16, heads=2, max_positions=12))
"""
OWN = {"kind": "module", "build": "slow:build", "labels": "next", "vocab_size": 40, "max_positions": 12}


@pytest.mark.skipif(sys.platform != "linux", reason="needs a terminal of its own, and /proc")
def test_ctrl_c_and_a_closed_terminal_save_and_leave_no_process(tmp_path):
    """`espalier train -n 2` in a terminal, both at once."""
    runs = {}
    try:
        for way in ("ctrl-c", "closed"):
            folder = tmp_path / way
            folder.mkdir()
            path = folder / "job.toml"
            (folder / "slow.py").write_text(SLOW)
            tables = job(folder, model=OWN, plan_data=2, train_steps=100_000, checkpoint_every=0).raw
            path.write_text("\n".join(f"[{name}]\n{toml(table)}" for name, table in tables.items()))
            runs[way] = in_a_terminal([sys.executable, "-m", "espalier", "train", str(path)])
        said: dict[str, bytes] = dict.fromkeys(runs, b"")
        terminals = {way: terminal for way, (_, terminal) in runs.items()}

        def seen(done: Callable[[], bool]) -> bool:
            """Whether it is done; what the terminal says meanwhile is read, or its program would wait."""
            for each, terminal in terminals.items():
                with contextlib.suppress(OSError):
                    while data := os.read(terminal, 65536):
                        said[each] += data
            return done()

        until(partial(seen, lambda: all(len(losses(tmp_path / way)) >= 3 for way in runs)))
        ranks = {way: children(process.pid) for way, (process, _) in runs.items()}
        assert all(len(found) >= 2 for found in ranks.values())
        os.write(terminals["ctrl-c"], b"\x03")
        os.close(terminals.pop("closed"))
        until(partial(seen, lambda: runs["ctrl-c"][0].poll() is not None))
        os.close(terminals.pop("ctrl-c"))
        for way, (process, _) in runs.items():
            assert process.wait(30) == (130 if way == "ctrl-c" else 75)
            until(lambda way=way: not any(Path(f"/proc/{pid}").exists() for pid in ranks[way]))
            (saved,) = (tmp_path / way / "out/checkpoints").glob("step-*")
            assert f"step-{len(losses(tmp_path / way)):08}" == saved.name
        last = said["ctrl-c"].decode()
        assert f"interrupted after step {len(losses(tmp_path / 'ctrl-c'))}; saved in" in last
        assert "go on with --resume" in last
    finally:
        for process, _ in runs.values():
            process.kill()
            process.wait()


def in_a_terminal(command: list[str]) -> tuple[subprocess.Popen[bytes], int]:
    """A command whose terminal this test holds the other end of."""
    ours, theirs = os.openpty()

    def enter() -> None:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # workers of pytest-xdist ignore it
        signal.signal(signal.SIGHUP, signal.SIG_DFL)  # ...and what `nohup` starts, this
        fcntl.ioctl(theirs, termios.TIOCSCTTY, 0)

    process = subprocess.Popen(
        command,
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        preexec_fn=enter,
        env={**os.environ, "COLUMNS": "300"},
    )
    os.close(theirs)
    os.set_blocking(ours, False)
    return process, ours


def toml(table: dict[str, Any]) -> str:
    """Values that JSON and TOML write alike."""
    return "".join(f"{key} = {json.dumps(value)}\n" for key, value in table.items())


def children(pid: int) -> list[int]:
    """Of a process, all below it."""
    own = [int(x) for x in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    return own + [below for child in own for below in children(child)]


def until(done: Callable[[], bool], seconds: float = 90) -> None:
    """Wait for it."""
    end = time.monotonic() + seconds
    while not done():
        assert time.monotonic() < end
        time.sleep(0.05)
