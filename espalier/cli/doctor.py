"""``espalier doctor``: what this machine has, what will be used, what is wrong.

``python -m espalier.cli.doctor`` is the smallest real run, which it tries: two ranks add their numbers.
"""

import os
import platform
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from typing import Literal

from rich.console import Console
from rich.table import Table

FindingState = Literal["good", "note", "wrong"]

_GLOO_SECONDS = 60.0
_RANKS = 2
_NEEDED = ("numpy", "pydantic", "tokenizers", "safetensors", "rich", "typer")

_USEFUL = {
    "transformers": 'jobs with model.kind = "hf"',
    "matplotlib": "loss.png and pictures of pipelines",
}


@dataclass(frozen=True)
class Finding:
    """One line of the examination.

    Attributes:
        what: what was looked at.
        observed: what is there.
        state: "good"; "note" where something works less well; "wrong" where a run would fail.
        remedy: what to do; empty where nothing need be done.
        fix: does it, and tells what was done; None where only people can.
    """

    what: str
    observed: str
    state: FindingState = "good"
    remedy: str = ""
    fix: Callable[[], str] | None = field(default=None, compare=False)


def examine() -> list[Finding]:
    """Look at this machine; takes some seconds, for two processes are started to talk to each other."""
    checks: list[Callable[[], list[Finding]]] = [
        _python,
        _torch,
        _devices,
        _machine,
        _threads,
        _environment,
        _packages,
        _leftovers,
        _gloo,
    ]
    findings = []
    for check in checks:
        try:
            findings.extend(check())
        # One broken part must not hide what is wrong with the others.
        except Exception as error:
            name = check.__name__.strip("_")
            findings.append(Finding(name, f"{type(error).__name__}: {error}", "wrong", "see the error"))
    return findings


def tell(console: Console, findings: list[Finding]) -> None:
    """Show the findings as a table, with a remedy beside each problem."""
    table = Table(title="espalier doctor", show_lines=False)
    for name in ("", "what", "found", "remedy"):
        table.add_column(name, overflow="fold")
    marks = {"good": "[green]good[/]", "note": "[yellow]note[/]", "wrong": "[bold red]wrong[/]"}
    for finding in findings:
        table.add_row(marks[finding.state], finding.what, finding.observed, finding.remedy)
    console.print(table, highlight=False)
    wrong = sum(finding.state == "wrong" for finding in findings)
    mendable = sum(finding.fix is not None for finding in findings)
    if mendable:
        console.print(f"espalier doctor --fix can do {mendable} of it")
    if wrong:
        console.print(f"{wrong} problem{'s' if wrong > 1 else ''} to solve, see the remedies above")
    else:
        console.print("nothing stands in the way of a run")


def mend(findings: list[Finding], say: Callable[[str], None]) -> int:
    """Do what can be done about the findings; how many were mended."""
    count = 0
    for finding in findings:
        if finding.fix is None:
            continue
        say(f"{finding.what}: {finding.remedy}")
        try:
            say(f"  {finding.fix()}")
            count += 1
        except (OSError, subprocess.SubprocessError) as error:
            last = (getattr(error, "stderr", None) or str(error)).strip().splitlines()[-1:]
            say(f"  it could not be done: {''.join(last)}")
    return count


def _installed(*packages: str) -> Callable[[], str]:
    """Installs packages by pip, into the environment that this runs in."""

    def install() -> str:
        command = [sys.executable, "-m", "pip", "install", *packages]
        subprocess.run(command, check=True, capture_output=True, text=True)
        return f"installed: {', '.join(packages)}"

    return install


def _leftovers() -> list[Finding]:
    """What processes that were killed have left of text that they prepared."""
    cache = Path(".espalier/data")
    halves = [path for path in cache.glob(".*-*") if path.is_dir() and not _lives(path)]
    if not halves:
        return []

    def remove() -> str:
        for path in halves:
            shutil.rmtree(path)
        return f"removed: {len(halves)} folder{'s' * (len(halves) != 1)}"

    text = f"{len(halves)} in {cache}, of processes that are gone"
    return [Finding("half-prepared data", text, "note", "remove them", remove)]


def _lives(path: Path) -> bool:
    """Whether the process that a folder is named for runs."""
    pid = path.name.rpartition("-")[2]
    return not pid.isdecimal() or Path(f"/proc/{pid}").exists()


def _python() -> list[Finding]:
    version = platform.python_version()
    return [Finding("python", f"{version} at {sys.executable}")]


def _torch() -> list[Finding]:
    import torch
    import torch.distributed as dist

    from espalier.device import known_backends

    release = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2] if part.isdecimal())
    if release < (2, 11):
        remedy = "pip install 'torch>=2.11'"
        findings = [Finding("torch", torch.__version__, "wrong", remedy, _installed("torch>=2.11"))]
    else:
        findings = [_tried(torch.__version__, release)]
    if not dist.is_available():
        remedy = "install a build of torch that has torch.distributed"
        return [*findings, Finding("torch.distributed", "not in this build", "wrong", remedy)]
    backends = known_backends()
    if "gloo" not in backends:
        remedy = "install a build of torch with gloo: CPU ranks talk through it"
        return [*findings, Finding("backends", ", ".join(backends) or "none", "wrong", remedy)]
    return [*findings, Finding("backends", ", ".join(backends))]


def _tried(version: str, release: tuple[int, ...]) -> Finding:
    from espalier.torch_private import NEWEST_TRIED

    if release <= NEWEST_TRIED:
        return Finding("torch", version)
    tried = f"{NEWEST_TRIED[0]}.{NEWEST_TRIED[1]}"
    observed = f"{version}, newer than what the tests were run with (2.11 to {tried})"
    remedy = f"none, if it does as it should; else tell us, and pip install 'torch=={tried}.*'"
    return Finding("torch", observed, "note", remedy)


def _devices() -> list[Finding]:
    import torch.distributed as dist

    from espalier import device

    kind, count = device.accelerator(), device.count()
    if kind is None or not count:
        return [Finding("devices", "CPU only; ranks are processes that share the host's memory, or use gloo")]
    names = ", ".join(device.names())
    use = f"{count} {kind.upper()}: {names}; plans of up to {count} ranks use them, larger ones the CPU"
    backend = dist.get_default_backend_for_device(kind)
    if not dist.is_backend_available(backend):
        return [Finding("devices", use, "wrong", f"install a build of torch with {backend.upper()}")]
    return [Finding("devices", use), _products(kind)]


def _products(kind: str) -> Finding:
    """How an accelerator multiplies in float32, the dtype that a job has by default."""
    import torch

    from espalier.device import EXACT, FASTER, is_exact

    if is_exact():
        return Finding("float32 products", EXACT, "note", FASTER)
    precision = torch.get_float32_matmul_precision()
    return Finding("float32 products", f"{precision}: on {kind.upper()} by units of lower precision")


def _machine() -> list[Finding]:
    cores = _cores()
    findings = [Finding("cores", f"{cores} usable of {os.cpu_count()}")]
    try:
        total = min(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), _container_limit())
        low = total < 4e9
        remedy = "a rank takes some 0.3 GB before it holds a model; use few ranks" if low else ""
        findings.append(Finding("memory", f"{total / 1e9:.1f} GB", "note" if low else "good", remedy))
    except (ValueError, OSError, AttributeError):
        findings.append(Finding("memory", "unknown on this system", "note"))
    disk = shutil.disk_usage(".").free
    full = disk < 1e9
    remedy = "make room: data and results are written below the working folder" if full else ""
    findings.append(Finding("disk", f"{disk / 1e9:.1f} GB free here", "note" if full else "good", remedy))
    if not os.access(".", os.W_OK):
        remedy = "change to a folder you may write to, or set train.out and data.cache"
        findings.append(Finding("working folder", "not writable", "wrong", remedy))
    return findings


def _threads() -> list[Finding]:
    import torch

    threads = os.environ.get("OMP_NUM_THREADS")
    cores = _cores()
    if threads is None:
        text = f"one a rank (OMP_NUM_THREADS is not set); {torch.get_num_threads()} for a single process"
        return [Finding("threads", text)]
    if not threads.isdecimal() or int(threads) < 1:
        remedy = "unset OMP_NUM_THREADS or give a whole number"
        return [Finding("threads", f"OMP_NUM_THREADS={threads!r}", "wrong", remedy)]
    if int(threads) > max(cores // 2, 1):
        remedy = "OMP_NUM_THREADS times the ranks should not exceed the cores; unset it for one a rank"
        return [Finding("threads", f"{threads} a rank (OMP_NUM_THREADS) on {cores} cores", "note", remedy)]
    return [Finding("threads", f"{threads} a rank (OMP_NUM_THREADS)")]


def _environment() -> list[Finding]:
    left = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT") if name in os.environ]
    if not left:
        return []
    text = ", ".join(f"{name}={os.environ[name]}" for name in left)
    if {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= set(left):
        remedy = "right within torchrun; elsewhere unset them, or no ranks will be started"
        return [Finding("environment", text, "note", remedy)]
    return [Finding("environment", text, "wrong", f"unset {' '.join(left)}: torchrun sets all four or none")]


def _packages() -> list[Finding]:
    versions = {name: _version(name) for name in _NEEDED}
    missing = [name for name, version in versions.items() if version is None]
    there = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    findings = [Finding("packages", there)]
    if missing:
        remedy = f"pip install {' '.join(missing)}"
        observed = f"missing: {', '.join(missing)}"
        findings.append(Finding("packages", observed, "wrong", remedy, _installed(*missing)))
    for name, use in _USEFUL.items():
        version = _version(name)
        if version is None:
            remedy = f"pip install {name}, for {use}"
            findings.append(Finding(name, "not installed", "note", remedy, _installed(name)))
        else:
            findings.append(Finding(name, version))
    return findings


def _gloo() -> list[Finding]:
    """Two processes add their ranks: the smallest real run."""
    began = time.perf_counter()
    environment = {
        name: value
        for name, value in os.environ.items()
        if name not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    }
    try:
        done = subprocess.run(
            [sys.executable, "-m", "espalier.cli.doctor"],
            env=environment,
            capture_output=True,
            text=True,
            timeout=_GLOO_SECONDS,
            check=False,
        )
    except subprocess.TimeoutExpired:
        remedy = "a firewall or proxy may stop local connections; try GLOO_SOCKET_IFNAME=lo"
        return [Finding("two ranks", f"no answer within {_GLOO_SECONDS:.0f} s", "wrong", remedy)]
    if done.returncode:
        last = (done.stderr.strip() or "no message").splitlines()[-12:]
        remedy = "local processes must reach each other; try GLOO_SOCKET_IFNAME=lo"
        return [Finding("two ranks", "\n".join(last), "wrong", remedy)]
    return [Finding("two ranks", f"started and added their ranks in {time.perf_counter() - began:.1f} s")]


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _container_limit() -> float:
    """Bytes that a container's control group allows; infinite where there is none."""
    try:
        return float(Path("/sys/fs/cgroup/memory.max").read_text())
    except (OSError, ValueError):
        return float("inf")


def _version(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def handshake() -> None:
    """Start the two ranks, or be one of them."""
    import torch

    from espalier.comm import all_reduce
    from espalier.mesh import Mesh
    from espalier.mesh.launch import launch
    from espalier.mesh.process import finish, start

    if "RANK" not in os.environ:
        launch(["-m", "espalier.cli.doctor"], _RANKS)
        return
    process = start("cpu", timeout=20.0)
    try:
        total = all_reduce(torch.tensor([process.rank + 1.0]), Mesh.from_env({"data": _RANKS}), 0)
        if total.item() != _RANKS * (_RANKS + 1) / 2:
            sys.exit(f"the ranks added up to {total.item()}")
    finally:
        finish()


if __name__ == "__main__":
    handshake()
