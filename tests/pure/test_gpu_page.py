"""``make gpu``: a section that fails or hangs is told, and the others go on."""

from __future__ import annotations

import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from espalier.device import count

TOOL = Path(__file__).parents[2] / "tools" / "gpu.py"


@pytest.fixture
def gpu() -> Any:
    """The tool, as a module."""
    spec = importlib.util.spec_from_file_location("gpu_tool", TOOL)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("together", [False, True])
def test_sections(gpu: Any, monkeypatch: Any, tmp_path: Path, capsys: Any, together: bool) -> None:
    sections = [
        gpu.Section("good", "What holds", ("-c", "print('seen')"), 60),
        gpu.Section("bad", "What fails", ("-c", "raise SystemExit(3)"), 60),
        gpu.Section(
            "hangs", "What hangs", ("-c", "import time; print('now', flush=True); time.sleep(99)"), 3
        ),
        gpu.Section("missing", "What cannot be", ("-c", ""), 60, {}, "there is one device"),
    ]
    monkeypatch.setattr(gpu, "sections", lambda: sections)
    monkeypatch.setattr(gpu, "count", lambda: 1)
    monkeypatch.setattr(gpu, "devices_by_name", lambda: ["one that is quick"])
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--write", str(page), *["--together"] * together])
    assert gpu.main() == 1
    assert "failed: bad, hangs" in capsys.readouterr().out
    written = page.read_text()
    for row in (
        "| What holds | holds |",
        "| What fails | FAILS |",
        "exit status 3 |",
        "not done in 3 s |",
        "| What cannot be | left out |",
        "there is one device |",
    ):
        assert row in written
    assert "seen" in written and "now" in written and "- one that is quick" in written


@pytest.mark.skipif(count() > 0, reason="there is a GPU")
@pytest.mark.parametrize("status", [0, 1])
def test_without_a_gpu_the_simulated_part_is_run(
    gpu: Any, monkeypatch: Any, capsys: Any, tmp_path: Path, status: int
) -> None:
    """And decides how the command ends; what a GPU has told is not written over."""
    (simulated,) = gpu.sections()
    assert simulated.argv[-1] == "tests/sim"
    program = f"print('as on a GPU'); raise SystemExit({status})"
    monkeypatch.setattr(gpu, "sections", lambda: [simulated._replace(argv=("-c", program))])
    page = tmp_path / "page.md"
    page.write_text("of a GPU")
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--write", str(page)])
    assert gpu.main() == status
    told = capsys.readouterr().out
    assert "No GPU is visible here" in told and "as on a GPU" in told and "is not written" in told
    assert page.read_text() == "of a GPU"


def test_together_what_compares_times_runs_alone(gpu: Any, monkeypatch: Any, tmp_path: Path) -> None:
    """The others wait for each other, which they could not one by one."""
    meet = (
        "import sys, time; from pathlib import Path; mine, other = map(Path, sys.argv[1:]); mine.touch()\n"
        "while not other.exists(): time.sleep(0.05)\n"
    )
    one, two, last = (str(tmp_path / name) for name in ("one", "two", "last"))
    ended = f"from pathlib import Path; assert Path({one!r}).exists(); Path({last!r}).touch()"
    sections = [
        gpu.Section("timed", "Times", ("-c", ended), 30, alone=True),
        gpu.Section("one", "One", ("-c", meet, one, two), 30),
        gpu.Section("two", "Two", ("-c", meet, two, one), 30),
    ]
    monkeypatch.setattr(gpu, "sections", lambda: sections)
    monkeypatch.setattr(gpu, "count", lambda: 0)
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--together"])
    assert gpu.main() == 0 and Path(last).exists()


class Library:
    """In place of NCCL's."""

    def ncclGetVersion(self, number: Any) -> None:
        number._obj.value = 23007


@pytest.mark.parametrize(
    ("devices", "left_out"),
    [(1, {"compiled-2", "plans-2", "plans-4", "killed"}), (2, {"plans-4"}), (4, set())],
)
def test_ranks_share_a_device_by_the_nccl_that_is_loaded(
    gpu: Any, monkeypatch: Any, devices: int, left_out: set[str]
) -> None:
    """What was installed later than torch counts, and not what torch was compiled with."""

    def missing(name: str) -> Any:
        raise OSError(name)

    def without() -> set[str]:
        return {section.name for section in gpu.sections() if section.needs} - {"lightning"}

    monkeypatch.setattr(gpu.dist, "is_nccl_available", lambda: True)
    monkeypatch.setattr(gpu, "count", lambda: devices)
    monkeypatch.setattr(gpu.torch.cuda.nccl, "version", lambda: (2, 29, 7, "rc"))
    monkeypatch.setattr(gpu.ctypes, "CDLL", missing)
    assert gpu.nccl() == (2, 29, 7) and without() == left_out
    monkeypatch.setattr(gpu.ctypes, "CDLL", lambda name: Library())
    assert gpu.nccl() == (2, 30, 7) and without() == left_out - (
        {"compiled-2", "killed", "plans-2", "plans-4"} if devices == 1 else set()
    )
    assert all(
        section.env["CUDA_VISIBLE_DEVICES"] == "" for section in gpu.sections() if section.name == "simulated"
    )


def test_the_devices_are_named_by_another_process(gpu: Any, monkeypatch: Any) -> None:
    """This one lives as long as the ranks: it must open nothing on their devices."""
    asked: list[Any] = []
    run = subprocess.run

    def watched(argv: Any, **more: Any) -> Any:
        asked.append(argv)
        return run(argv, **more)

    monkeypatch.setattr(subprocess, "run", watched)
    named = gpu.devices_by_name()
    assert len(named) == count() and [argv[0] for argv in asked] == [sys.executable]
    assert not hasattr(gpu, "names")


BENCHMARK = """
import sys
sys.path[:0] = ["benchmarks"]
import torch.distributed as dist
import gpu
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)

def broken():
    raise ValueError("no such kernel" + chr(10) + "and more")

def breaks_later():
    return broken

makers = {"ddp": broken, "stage 0": breaks_later, "ZeRO-3": lambda: lambda: None}
for group in gpu.groups("cpu", {}).values():
    assert {name for pair in group.pairs for name in pair} == set(group.makers)
steps, failed = gpu.begun(makers)
assert list(steps) == ["ZeRO-3"], steps
assert set(failed) == {"ddp", "stage 0"} and set(failed.values()) == {"rank 0: ValueError: no such kernel"}
dist.destroy_process_group()
"""


def test_what_does_not_run_is_left_out_of_the_benchmark() -> None:
    """Of ours too: the others are measured, and that it failed is said at the end."""
    root = TOOL.parents[1]
    env = {**os.environ, "PYTHONPATH": str(root)}
    subprocess.run([sys.executable, "-c", BENCHMARK], cwd=root, env=env, check=True, timeout=100)
