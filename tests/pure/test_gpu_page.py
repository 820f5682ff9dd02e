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


def test_sections(gpu: Any, monkeypatch: Any, tmp_path: Path, capsys: Any) -> None:
    sections = [
        gpu.Section("good", "What holds", ("-c", "print('seen')"), 60),
        gpu.Section("bad", "What fails", ("-c", "raise SystemExit(3)"), 60),
        gpu.Section(
            "hangs", "What hangs", ("-c", "import time; print('now', flush=True); time.sleep(99)"), 3
        ),
        gpu.Section("missing", "What cannot be", ("-c", ""), 60, {}, "there is one device"),
    ]
    monkeypatch.setattr(gpu, "sections", lambda: sections)
    page = tmp_path / "page.md"
    monkeypatch.setattr(sys, "argv", ["gpu.py", "--write", str(page)])
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
    assert "seen" in written and "now" in written


@pytest.mark.skipif(count() > 0, reason="there is a GPU")
def test_without_a_gpu_the_simulated_part_is_run(gpu: Any, monkeypatch: Any, capsys: Any) -> None:
    (simulated,) = gpu.sections()
    assert simulated.argv[-1] == "tests/sim"
    monkeypatch.setattr(gpu, "sections", lambda: [simulated._replace(argv=("-c", "print('as on a GPU')"))])
    monkeypatch.setattr(sys, "argv", ["gpu.py"])
    assert gpu.main() == 0
    told = capsys.readouterr().out
    assert "No GPU is visible here" in told and "as on a GPU" in told


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
