"""Walk the way of someone new, from an empty environment to a report in the browser, with a clock.

    python tools/first_run.py

Makes the wheel; then, in a folder of its own that goes in the end, what the docs' first page says: a virtual
environment, `pip install`, `espalier demo`, its report in a headless Chromium. Prints how long each step
took. Arguments are handed to `pip install`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).parent.parent
LIMIT = 300.0


def main() -> None:
    """Exit code 1 where it takes more than five minutes, or the page does not show a curve."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)

        def run(*command: str | Path) -> str:
            done = subprocess.run(
                [*map(str, command)], cwd=folder, env=environment, capture_output=True, text=True
            )
            if done.returncode:
                sys.exit(f"{command}\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
            return done.stdout

        run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
        (wheel,) = folder.glob("*.whl")
        bin_ = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
        chromium = shutil.which("chromium") or shutil.which("google-chrome")
        if chromium is None:
            sys.exit("no Chromium here: apt-get install chromium")
        shown = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={folder}/chromium"]
        report = (folder / "runs/demo/report.html").as_uri()
        steps: list[tuple[str, list[str | Path]]] = [
            ("python -m venv", [sys.executable, "-m", "venv", folder / "venv"]),
            ("pip install espalier", [bin_ / "pip", "install", "--quiet", *sys.argv[1:], wheel]),
            ("espalier demo", [bin_ / "espalier", "demo"]),
            ("the report in a browser", [chromium, *shown, "--dump-dom", report]),
        ]
        total, page = 0.0, ""
        for what, command in steps:
            began = time.monotonic()
            page = run(*command)
            took = time.monotonic() - began
            total += took
            print(f"{what:24} {took:6.1f} s", flush=True)
        print(f"{'all':24} {total:6.1f} s")
        if 'data-series="validation"' not in page or total > LIMIT:
            sys.exit(f"expected the page with its curves within {LIMIT:.0f} s")


if __name__ == "__main__":
    main()
