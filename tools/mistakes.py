"""Make mistakes that people make, one after the other, with a clock.

    python tools/mistakes.py                            all of them, in some five minutes
    python tools/mistakes.py Ctrl-C killed              those whose names have one of these words
    python tools/mistakes.py --write docs/mistakes.md   the table goes into that page

Each is a command of its own in a folder of its own: those of `tests/pure/test_mistakes.py` that are made
before ranks start, then those of running ranks. Of each is looked at how long it takes from the mistake to
the end of the command, the exit code, what is said, and which processes and files are left behind. Exit
code 1 where one is late or ends otherwise than it should.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType

ROOT = Path(__file__).parent.parent
sys.path.insert(0, str(ROOT))

from tests.pure.test_mistakes import FILES, PREPARED, TYPED  # noqa: E402

AT_ONCE, BEFORE, RANKS = (
    1.0,
    5.0,
    10.0,
)  # seconds: what is wrong in a job file; before ranks start; with ranks
HELP = 0.3
MARK = "ESPALIER_MISTAKE"  # in the environment of all processes of a trial
KEPT = {".espalier", "runs"}  # what a run leaves on purpose

HEAD = """
import os, signal, sys, time
from pathlib import Path
import torch
from torch import nn
import espalier

ranks = int(os.environ.get("WORLD_SIZE", "1"))
rank = int(os.environ.get("RANK", "0"))
torch.manual_seed(0)
model = nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))
optimizer = torch.optim.AdamW(model.parameters())

def here():
    "The mistake is made now."
    Path(f"here{rank}").touch()

def engine(**plan):
    return espalier.initialize(model, optimizer, espalier.Plan(**plan), loss_fn=nn.functional.mse_loss)

def batch():
    return torch.randn(4, 4), torch.randn(4, 4)

def step(e):
    loss = e(batch()); e.backward(loss); e.step()
    return loss
"""


@dataclass(frozen=True)
class Trial:
    """A mistake, and how it should end.

    Attributes:
        says: what the answer has, as a regular expression.
        typed: after `python -m espalier`.
        body: of `script.py`, behind `HEAD`.
        code: of exit.
        limit: seconds from the mistake to the end.
        act: makes the mistake while it runs.
        before: a command, after `python -m espalier`, that has to end well first.
        small: folders that are mounted with room for so many kilobytes.
        orphans: folders whose owner is no more, so that nobody can remove them.
    """

    says: str
    typed: str = "run -n 2 script.py"
    body: str = ""
    code: int = 1
    limit: float = RANKS
    act: Callable[[subprocess.Popen[bytes], Path], None] | None = None
    before: str = ""
    small: Mapping[str, int] = field(default_factory=lambda: MappingProxyType({}))
    orphans: bool = False


def _until(done: Callable[[], bool], process: subprocess.Popen[bytes]) -> None:
    end = time.monotonic() + 60
    while not done() and process.poll() is None and time.monotonic() < end:
        time.sleep(0.02)


def _going(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait until it trains."""
    file = folder / "runs/job/metrics.jsonl"
    _until(lambda: (folder / "here0").exists() or (file.exists() and file.stat().st_size > 0), process)
    (folder / "here0").touch()


def _send(number: signal.Signals) -> Callable[[subprocess.Popen[bytes], Path], None]:
    def act(process: subprocess.Popen[bytes], folder: Path) -> None:
        _going(process, folder)
        if number == signal.SIGINT:  # a terminal sends it to all
            os.killpg(process.pid, number)
        else:
            process.send_signal(number)

    return act


TRAIN = "train job.toml --set plan.data=2"
LONG = f"{TRAIN} --set train.steps=1000000 --set train.log_every=1"
SAVES = "--set checkpoint.every=0"
PAIR = "e = engine(data=2)\nstep(e)\n"

ON_RANKS = {
    "a port in use": Trial(
        "port .* cannot be used", "run -n 2 --port {port} script.py", code=2, limit=BEFORE
    ),
    "a script that is not there": Trial("no such file", "run -n 2 scirpt.py", code=2, limit=BEFORE),
    "a script with an error in its first line": Trial("NameError: name 'tehre'", body="here(); tehre"),
    "a plan for more ranks than there are": Trial("needs 4 rank", body="here(); engine(data=4)"),
    "a plan for fewer ranks than there are": Trial("needs 1 rank", body="here(); engine(data=1)"),
    "a wrong key of a plan, in a script": Trial("did you mean data", body="here(); engine(daat=2)"),
    "fewer rows than ranks": Trial(
        "leaves 1 of the 2 ranks(.|\n)*use a larger batch",
        body="e = engine(data=2)\nhere(); e((torch.randn(1, 4), torch.randn(1, 4)))",
        code=0,
    ),
    "other rows on each rank": Trial(
        "The ranks were given different batches",
        body="e = engine(data=2)\ntorch.manual_seed(rank)\nhere()\nfor _ in range(50): step(e)",
    ),
    "loss.backward() and optimizer.step() in place of the engine's (it does the same)": Trial(
        "",
        body="e = engine(data=2, zero=1)\nloss = e(batch())\nhere(); loss.backward(); optimizer.step()",
        code=0,
    ),
    "a forgotten backward": Trial(
        r"engine\.backward\(loss\) first", body="e = engine(data=2)\nloss = e(batch())\nhere(); e.step()"
    ),
    "loss.item() and a print on one rank alone (they work)": Trial(
        "0\\.", body=f"{PAIR}loss = step(e)\nhere()\nif rank == 0: print(loss.item(), loss)", code=0
    ),
    "full_tensor() on one rank alone": Trial(
        "The collectives of ranks 0, 1 part ways",
        body="e = engine(data=2, zero=3)\nstep(e)\nhere()\n"
        "if rank == 0: print(model[0].weight.full_tensor())\nstep(e)",
        code=76,
    ),
    ".numpy() of a part on one rank alone, at the end": Trial(
        "rank 1 of 2 has left: its program has ended(.|\n)*all_gather(.|\n)*made by all of its ranks",
        body="e = engine(tensor=2)\nstep(e)\nhere()\n"
        "if rank == 0: print(model[0].weight.detach().numpy().shape)",
    ),
    ".numpy() of a part (it is the whole)": Trial(
        r"\(8, 4\)",
        body="e = engine(tensor=2)\nhere(); print(model[0].weight.detach().numpy().shape)",
        code=0,
    ),
    "an exception on one rank": Trial(
        "rank 1 of 2 failed.*ValueError: the roof leaks",
        body=f"{PAIR}if rank == 1: here(); raise ValueError('the roof leaks')\nstep(e)",
    ),
    "exit() on one rank": Trial(
        "rank 1 of 2 failed", body=f"{PAIR}if rank == 1: here(); sys.exit(1)\nstep(e)"
    ),
    "a rank that leaves the loop sooner": Trial(
        "rank 1 of 2 has left: its program has ended",
        body=f"{PAIR}for i in range(9):\n    if rank == 1 and i == 4: here(); break\n    step(e)",
    ),
    "a killed rank": Trial(
        "rank 1 of 2 failed: killed by SIGKILL",
        body=f"{PAIR}if rank == 1: here(); os.kill(os.getpid(), signal.SIGKILL)\nstep(e)",
        code=137,
    ),
    "a rank that hangs": Trial(
        "rank 1 of 2", body=f"{PAIR}if rank == 1: here(); time.sleep(100)\nstep(e)", code=76
    ),
    "a crash in compiled code": Trial(
        "rank 1 of 2 failed: killed by SIGSEGV",
        body=f"{PAIR}if rank == 1: here(); os.kill(os.getpid(), signal.SIGSEGV)\nstep(e)",
        code=139,
    ),
    "Ctrl-C": Trial(
        "interrupted after step .*; saved in .*: go on with --resume",
        f"{LONG} {SAVES}",
        code=130,
        act=_send(signal.SIGINT),
    ),
    "Ctrl-C without checkpoints": Trial(
        r"interrupted after step .*nothing saved, for want of \[checkpoint\]",
        LONG,
        code=130,
        act=_send(signal.SIGINT),
    ),
    "Ctrl-C in a script": Trial(
        "interrupted; all ranks have been stopped",
        body=f"{PAIR}here()\nwhile True: step(e)",
        code=130,
        act=_send(signal.SIGINT),
    ),
    "a closed terminal": Trial("", f"{LONG} {SAVES}", code=75, act=_send(signal.SIGHUP)),
    "a machine that asks to leave": Trial(
        "asked to leave, and left after step .*; saved in",
        f"{LONG} {SAVES}",
        code=75,
        act=_send(signal.SIGTERM),
    ),
    "a killed launcher": Trial("", LONG, code=-9, act=_send(signal.SIGKILL), orphans=True),
    "a loss that is no number": Trial(
        "the loss is (nan|inf)",
        f"{TRAIN} --set optimizer.lr=1e30 --set optimizer.name=SGD --set train.steps=50",
        code=2,
    ),
    "another model's checkpoint": Trial(
        "hidden|shape|\\[64, 32\\]",
        f"{TRAIN} {SAVES} --resume --set model.hidden=32",
        code=2,
        before=f"{TRAIN} {SAVES}",
    ),
    "checkpoints of an earlier run": Trial(
        "has checkpoints of an earlier run", f"{TRAIN} {SAVES}", code=2, before=f"{TRAIN} {SAVES}"
    ),
    "a full disk": Trial(
        "No space left|full", f"{TRAIN} --set model.hidden=256 {SAVES}", code=2, small={"runs": 600}
    ),
    "a budget that is too small": Trial(
        "cannot be met",
        f"{TRAIN} --set train.steps=6 --set plan.zero=3 --set plan.offload.states=auto "
        "--set plan.offload.budget_gigabytes=1e-9",
        code=0,
    ),
}


@dataclass(frozen=True)
class Outcome:
    """How a trial ended: seconds, exit code, what was said, and what is wrong with that."""

    seconds: float
    code: int
    text: str
    wrong: list[str]


def main() -> None:
    """Make them, and print the table."""
    parser = argparse.ArgumentParser()
    parser.add_argument("words", nargs="*")
    parser.add_argument("--write", type=Path)
    given = parser.parse_args()
    trials = {"`espalier --help`, which is none": Trial("Usage", "--help", code=0, limit=HELP)}
    for name, (typed, says) in TYPED.items():
        typed = f"train job.toml {typed}" if typed.startswith("-") else typed
        limit = AT_ONCE if typed.startswith("train") and name not in PREPARED else BEFORE
        trials[name] = Trial(re.escape(says), typed, code=2, limit=limit)
    trials |= ON_RANKS
    chosen = {name: t for name, t in trials.items() if not given.words or any(w in name for w in given.words)}
    lines = ["| mistake | told within | seconds | exit code | left behind |", "|---|---|---|---|---|"]
    late = 0
    for name, trial in chosen.items():
        outcome = made(trial)
        late += bool(outcome.wrong)
        lines.append(
            f"| {name} | {trial.limit:g} s | {outcome.seconds:.1f} | {outcome.code} | "
            f"{'; '.join(outcome.wrong) or ('its own folders' if trial.orphans else 'nothing')} |"
        )
        print(lines[-1], flush=True)
        if outcome.wrong:
            print("\n".join("    " + line for line in outcome.text.splitlines()[-25:]), flush=True)
    print(f"{len(chosen) - late} of {len(chosen)} end as they should")
    if given.write:
        page = given.write.read_text("utf-8")
        head, _, rest = page.partition("\n| ")
        tail = rest.partition("\n\n")[2]
        given.write.write_text(f"{head}\n" + "\n".join(lines) + f"\n\n{tail}", "utf-8")
    sys.exit(bool(late))


def made(trial: Trial) -> Outcome:
    """Make one mistake."""
    with tempfile.TemporaryDirectory(prefix="mistake-") as name:
        return _made(trial, Path(name))


def _made(trial: Trial, folder: Path) -> Outcome:
    work, temporary = folder / "work", folder / "tmp"
    for place in (work, temporary):
        place.mkdir()
    for name, content in {**FILES, "script.py": HEAD + trial.body + "\n"}.items():
        (work / name).parent.mkdir(exist_ok=True)
        (work / name).write_text(content, "utf-8")
    mark = uuid.uuid4().hex
    environment = {name: value for name, value in os.environ.items() if name not in ("RANK", "WORLD_SIZE")}
    environment |= {MARK: mark, "TMPDIR": str(temporary), "PYTHONPATH": str(ROOT), "COLUMNS": "300"}
    environment["PYTHONDONTWRITEBYTECODE"] = "1"
    with contextlib.ExitStack() as stack:
        for name, kilobytes in trial.small.items():
            (work / name).mkdir()
            mount = ["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "none", str(work / name)]
            if subprocess.run(mount, capture_output=True).returncode:
                return Outcome(0.0, 0, "", ["needs a right to mount: not tried"])
            stack.callback(subprocess.run, ["umount", str(work / name)], check=True)
        port = stack.enter_context(socket.socket())
        port.bind(("127.0.0.1", 0))
        port.listen()

        def start(typed: str) -> subprocess.Popen[bytes]:
            typed = typed.format(port=port.getsockname()[1])
            with (folder / "said").open("wb") as said:
                return subprocess.Popen(
                    [sys.executable, "-m", "espalier", *typed.split()],
                    cwd=work,
                    env=environment,
                    stdout=said,
                    stderr=subprocess.STDOUT,
                    stdin=subprocess.DEVNULL,
                    start_new_session=True,
                    preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
                )

        if trial.before:
            code = start(trial.before).wait(60)
            assert code == 0, (folder / "said").read_text("utf-8")
        names = {path.name for path in work.iterdir()}
        began, began_at = time.monotonic(), time.time()
        process = start(trial.typed)
        if trial.act is not None:
            trial.act(process, work)
        try:
            code = process.wait(60)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            code = process.wait()
        seconds = time.monotonic() - began
        marks = [path.stat().st_mtime for path in work.glob("here*")]
        if marks:  # from the mistake on, not from the command
            seconds -= max(marks) - began_at
        time.sleep(0.2 if trial.typed.startswith("run") or "data=2" in trial.typed else 0.0)
        text = (folder / "said").read_text("utf-8", errors="replace")
        left = _left(mark, work, names, None if trial.orphans else temporary)
        return Outcome(seconds, code, text, left + _wrong(trial, seconds, code, text))


def _left(mark: str, work: Path, names: set[str], temporary: Path | None) -> list[str]:
    """Processes that still run, and files that nobody asked for."""
    left = []
    for each in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (each / "environ").read_bytes():
                left.append(f"process {each.name}")
    files = [path for path in work.iterdir() if path.name not in names | KEPT]
    files = [path for path in files if not path.name.startswith("here")]
    if temporary is not None:  # torch makes that one whenever it is imported
        files += [path for path in temporary.iterdir() if not path.name.startswith("torchinductor_")]
    return left + [f"`{path.name}`" for path in files]


def _wrong(trial: Trial, seconds: float, code: int, text: str) -> list[str]:
    wrong = []
    if seconds > trial.limit:
        wrong.append("LATE")
    if code != trial.code:
        wrong.append(f"expected exit code {trial.code}")
    if not re.search(trial.says, text, re.DOTALL):
        wrong.append("SAYS SOMETHING ELSE")
    if "Traceback" in text and trial.typed.startswith("train"):
        wrong.append("a traceback")
    return wrong


if __name__ == "__main__":
    main()
