"""What an editor offers while a script is written, and what it marks.

Jedi completes, also in notebooks and prompts. Pyright, which is in many editors, checks ``typed.py``, as mypy
does in ``make lint``.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import espalier

ROOT = Path(__file__).parents[2]

SCRIPT = """
import espalier
from torch import nn
engine = espalier.initialize(nn.Linear(2, 2), None, espalier.Plan(data=2))
"""


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        ("espalier.", set(espalier.__all__)),
        ("espalier.Plan(ze", {"zero="}),
        ("espalier.initialize(nn.Linear(2, 2), lo", {"loss_fn="}),
        ("engine.", {"backward", "step", "save", "load", "memory"}),
    ],
)
def test_it_completes(typed: str, offered: set[str]) -> None:
    jedi = pytest.importorskip("jedi", reason="needs jedi: pip install jedi")
    lines = (SCRIPT + typed).splitlines()
    found = jedi.Script("\n".join(lines)).complete(len(lines), len(lines[-1]))
    assert offered <= {each.name for each in found}


def test_pyright_sees_what_there_is_and_what_is_not(tmp_path: Path) -> None:
    """It finds no error in a script, and an error in each line that is marked as one."""
    pyright = shutil.which("pyright")
    if pyright is None:
        pytest.skip("needs pyright: npm install --global pyright")
    shutil.copy(ROOT / "tests/typed.py", tmp_path)
    settings = {"reportUnnecessaryTypeIgnoreComment": "error", "extraPaths": [str(ROOT)]}
    (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
    command = [pyright, "--project", str(tmp_path), "--pythonpath", sys.executable, "--outputjson"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    told = json.loads(done.stdout)
    assert told["summary"]["filesAnalyzed"] == 1
    assert [
        f"{each['range']['start']['line'] + 1}: {each['message']}" for each in told["generalDiagnostics"]
    ] == []
