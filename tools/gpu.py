"""``make gpu``: all that wants a GPU, in ten minutes, on one page.

    python tools/gpu.py [--only NAME ...] [--minutes 10] [--together] [--write docs/figures-gpu.md]

Each section is a process of its own with a time limit: where one fails, it says so, and the others go on.
What the minutes do not reach for is left out, and said to be. The page is written anew after each section.
Without a GPU it says so, runs the simulated device's tests, and writes no page: what a GPU told stays.

``--together`` is for a machine of many cores that is lent by the minute: what compares no times is run at
once, and what does, alone behind it.
"""

from __future__ import annotations

import argparse
import ctypes
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed as dist

import espalier
from espalier.device import VISIBLE, accelerator, count

ROOT = Path(__file__).resolve().parent.parent
# this checkout first, and then what the caller has named
SEARCHED = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
CHECKS = str(ROOT / "tools" / "gpu_checks.py")
SHARES = (2, 30)  # from this version of NCCL on ranks may share a device
LINES = 60  # of a section's words on the page
LEAST = 20  # seconds that are worth a start
COMPILED = ("zero 3", "sequence", "asynchronous", "asynchronous, selective")  # plans of gpu_checks.py
NO_GPU = "No GPU is visible here: only the simulated part is run."


class Section(NamedTuple):
    """What is run, with a limit in seconds.

    ``needs`` tells why it cannot be, if so; ``alone``: it compares times, so that nothing may run beside it.
    """

    name: str
    title: str
    argv: Sequence[str]
    limit: int
    env: Mapping[str, str] = {}
    needs: str = ""
    alone: bool = False


@dataclass
class Outcome:
    """What became of a section: ``held``; None where it was not run."""

    section: Section
    held: bool | None
    words: str
    seconds: float = 0.0
    lines: list[str] = field(default_factory=list)

    @property
    def mark(self) -> str:
        """In a word."""
        return "left out" if self.held is None else "holds" if self.held else "FAILS"


def nccl() -> tuple[int, ...]:
    """NCCL's version; () where torch has none.

    Of the library that is loaded: it may have been updated, and torch tells what it was compiled with.
    """
    if not dist.is_nccl_available():
        return ()
    number = ctypes.c_int()
    try:
        ctypes.CDLL("libnccl.so.2").ncclGetVersion(ctypes.byref(number))
    except (OSError, AttributeError):  # torch has it in itself
        return tuple(torch.cuda.nccl.version()[:3])
    return number.value // 10000, number.value // 100 % 100, number.value % 100


def sections() -> list[Section]:
    """In the order in which they are run: what tells most of what no GPU has told yet, first."""
    devices = count()
    simulated = Section(
        "simulated",
        "The simulated device",
        ("-m", "pytest", "-q", "tests/sim"),
        600,
        dict.fromkeys(VISIBLE, "") if devices else {},  # it is another kind of device beside the CPU
    )
    if not devices:
        return [simulated]
    shared = ""
    if devices < 2 and nccl() < SHARES:
        shared = (
            f"one device, and NCCL {'.'.join(map(str, nccl())) or 'is missing'}: ranks share a device from "
            f"{SHARES[0]}.{SHARES[1]} on (pip install -U 'nvidia-nccl-cu13>=2.30')"
        )
    share = {} if devices > 1 else {"ESPALIER_SHARE_DEVICE": "1", "NCCL_MULTI_RANK_GPU_ENABLE": "1"}
    four = shared or ("" if devices in (1,) or devices >= 4 else f"{devices} devices: neither one nor four")
    compiled = ("plans", "--ranks", "2", "--names", *(f"compiled, {name}" for name in COMPILED))
    lightning = "" if find_spec("pytorch_lightning") else "Lightning is not installed (pytorch-lightning)"
    return [
        Section("compiled", "Compiled blocks", (CHECKS, "compiled"), 180),
        Section("compiled-2", "Compiled blocks, two ranks", (CHECKS, *compiled), 240, share, shared),
        Section("tests", "The tests of CUDA", ("-m", "pytest", "-q", "tests/gpu"), 180),
        Section("kernels", "Kernels, launches, memory", (CHECKS, "kernels"), 120, alone=True),
        Section(
            "peers",
            "Beside DDP, FSDP2, Megatron-core and DeepSpeed",
            (str(ROOT / "benchmarks" / "gpu.py"),),
            300,
            alone=True,
        ),
        Section("lightning", "Lightning's 16-mixed", (CHECKS, "lightning"), 120, {}, lightning),
        Section("alone", "Precisions, recomputation", (CHECKS, "alone"), 150),
        Section("offload", "Offload: optimizers, precisions, places", (CHECKS, "offload"), 180),
        Section("waits", "Nobody waits for the device in a step", (CHECKS, "waits"), 90),
        Section(
            "sanitizer",
            "Torch's sanitizer of streams",
            (CHECKS, "sanitizer"),
            120,
            {"TORCH_CUDA_SANITIZER": "1"},
        ),
        Section("plans-2", "NCCL, two ranks", (CHECKS, "plans", "--ranks", "2"), 240, share, shared),
        Section("plans-4", "NCCL, four ranks", (CHECKS, "plans", "--ranks", "4"), 180, share, four),
        Section("killed", "A rank is killed", (CHECKS, "killed"), 150, share, shared),
        Section("doctor", "Versions and doctor", ("-m", "espalier", "doctor"), 60),
        Section("calibrate", "What the device computes and sends", (CHECKS, "calibrated"), 150, alone=True),
        simulated,
    ]


def devices_by_name() -> list[str]:
    """The devices' names, asked for in a process of its own: to ask may open a context on one, for good."""
    ask = "from espalier.device import names; print(*names(), sep='\\n')"
    env = {**os.environ, "PYTHONPATH": SEARCHED}
    told = subprocess.run(
        [sys.executable, "-c", ask], cwd=ROOT, env=env, text=True, capture_output=True, check=False
    )
    if told.returncode:
        return [f"{count()} x {accelerator()}, which cannot be named: {told.stderr.strip().splitlines()[-1]}"]
    return told.stdout.split("\n")[: count()]


def run(section: Section, left: float) -> Outcome:
    """Run a section, and what it started, to its limit at most, or that of all, which is so far away."""
    if section.needs:
        return Outcome(section, None, section.needs)
    if left < LEAST:
        return Outcome(section, None, f"no time was left: --minutes N, or --only {section.name}")
    limit = min(section.limit, left)
    env = {**os.environ, "PYTHONPATH": SEARCHED, "OMP_NUM_THREADS": "1", **section.env}
    began = time.perf_counter()
    process = subprocess.Popen(
        [sys.executable, *section.argv], cwd=ROOT, env=env, text=True, errors="replace",
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT, start_new_session=True,
    )  # fmt: skip
    try:
        said, _ = process.communicate(timeout=limit)
        held = process.returncode == 0
        words = "" if held else f"exit status {process.returncode}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)
        try:
            said, _ = process.communicate(timeout=20)
        except subprocess.TimeoutExpired:  # something that it started holds its output still
            said = ""
        held, words = False, f"not done in {limit:.0f} s"
    return Outcome(section, held, words, time.perf_counter() - began, said.splitlines()[-LINES:])


def page(outcomes: Sequence[Outcome], devices: Sequence[str]) -> str:
    """All of it as Markdown; ``devices``: by name."""
    listed = "\n".join(f"- {name}" for name in devices)
    where = listed or NO_GPU
    versions = ".".join(map(str, nccl())) or "none"
    about = f"Espalier {espalier.__version__}, torch {torch.__version__}, NCCL {versions}."
    lines = ["# Figures of GPUs", "", "What `make gpu` wrote.", "", about, "", where, ""]
    lines += ["| section | | seconds | |", "|---|---|--:|---|"]
    lines += [f"| {o.section.title} | {o.mark} | {o.seconds:.0f} | {o.words} |" for o in outcomes]
    for o in outcomes:
        if o.lines:
            lines += ["", f"## {o.section.title}", "", "```text", *(line.rstrip() for line in o.lines), "```"]
    return "\n".join([*lines, ""])


def tell(outcome: Outcome, titled: bool = True) -> None:
    """Print what became of a section, under its title if that does not stand there yet."""
    if titled:
        print(f"== {outcome.section.title}")
    for line in outcome.lines:
        print(f"   {line}")
    print(f"   {outcome.mark} {outcome.words} ({outcome.seconds:.0f} s)", flush=True)


def main() -> int:
    """Run the sections; the exit status: 1 if one of them fails."""
    words = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    words.add_argument("--only", nargs="*", metavar="NAME", help="sections to run; by default all")
    words.add_argument("--write", type=Path, help="a file for the page")
    words.add_argument("--minutes", type=float, default=10, help="for all of it; by default 10")
    words.add_argument("--together", action="store_true", help="what compares no times, at once")
    said = words.parse_args()
    chosen = sections()
    unknown = set(said.only or ()) - {section.name for section in chosen}
    if unknown:
        words.error(f"there is no section {sorted(unknown)} here; there are {[s.name for s in chosen]}")
    outcomes: list[Outcome] = []
    devices = devices_by_name() if count() else []
    print("\n".join(devices) or NO_GPU)
    if said.write and not devices:
        print(f"{said.write} is not written: it is for what a GPU tells.")
    end = time.perf_counter() + 60 * said.minutes
    chosen = [section for section in chosen if not said.only or section.name in said.only]
    beside = [section for section in chosen if said.together and not section.alone]

    def keep(outcome: Outcome, titled: bool) -> None:
        tell(outcome, titled)
        outcomes.append(outcome)
        if said.write and devices:
            said.write.write_text(page(outcomes, devices), encoding="utf-8")

    with ThreadPoolExecutor(max(len(beside), 1)) as pool:
        at_once = [pool.submit(run, section, end - time.perf_counter()) for section in beside]
        for done in as_completed(at_once):
            keep(done.result(), titled=True)
    for section in chosen:
        if section not in beside:
            print(f"== {section.title}", flush=True)
            keep(run(section, end - time.perf_counter()), titled=False)
    failed = [o.section.name for o in outcomes if o.held is False]
    print(f"failed: {', '.join(failed)}" if failed else "all that was run holds")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
