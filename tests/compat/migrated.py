"""Programs of examples/coming_from as ``espalier migrate`` changes them: its diff is applied."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterable
from pathlib import Path

from typer.testing import CliRunner

from espalier.cli import app

PROGRAMS = Path(__file__).parent.parent.parent / "examples" / "coming_from"


def migrate(names: Iterable[str], folder: Path) -> None:
    """Write them to a folder, under their names."""
    for name in names:
        program = folder / f"{name}.py"
        for path in PROGRAMS.glob(f"{name}.*"):
            shutil.copy(path, folder)
        before = program.read_text("utf-8")
        told = CliRunner().invoke(app, ["migrate", str(program)])
        assert told.exit_code == 0, (name, told.output)
        diff = told.stdout[told.stdout.index("--- ") :]
        subprocess.run(["git", "apply", "-p0"], input=diff.encode(), cwd=folder, check=True)
        assert program.read_text("utf-8") != before
