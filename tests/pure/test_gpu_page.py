"""``make gpu``: a section that fails or hangs is told, and the others go on."""

from __future__ import annotations

import importlib.util
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
