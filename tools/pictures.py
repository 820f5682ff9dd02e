"""Renew the pictures of pages in the documentation, from real runs, in a headless Chromium.

    python tools/pictures.py                  docs/pictures/report.png, report-dark.png, plan.png
    python tools/pictures.py --folder FOLDER  the runs stay there, with pictures of their whole pages

Trains the demo; a pipeline of which a rank is killed and started again, and which leaves out steps whose loss
leaps; and plans the shipped llama-7b. Takes some minutes.
"""

from __future__ import annotations

import argparse
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from PIL import Image
from selenium import webdriver

ROOT = Path(__file__).parent.parent
PICTURES = ROOT / "docs/pictures"
WIDTH = 885
ESPALIER = [sys.executable, "-m", "espalier"]

PIPELINE = """
[model]
kind = "gpt"
vocab_size = 512
max_positions = 64
layers = 8
hidden = 96
heads = 4
[data]
max_bytes = 400000
[plan]
pipe = 4
accumulate = 8
schedule = "interleaved"
stages_per_rank = 2
[optimizer]
lr = 3e-3
warmup = 10
[train]
steps = 120
batch_size = 16
sequence = 64
clip = 1.0
eval_every = 40
[checkpoint]
every = 20
[elastic]
restarts = 1
[spikes]
on_spike = "skip"
factor = 3.0
window = 40
"""


def browser(folder: Path, dark: bool) -> Any:
    """A headless Chromium in one of the two themes."""
    options = webdriver.ChromeOptions()
    for flag in (
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
    ):
        options.add_argument(flag)
    if found := shutil.which("chromium") or shutil.which("google-chrome"):
        options.binary_location = found
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    theme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
    driver.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [theme]})
    return driver


def shown(page: Path, *, dark: bool, scratch: Path) -> tuple[Image.Image, dict[str, tuple[int, int]]]:
    """The whole page as a picture, and from where to where each section with a heading goes."""
    driver = browser(scratch / f"chromium-{page.parent.name}-{dark}", dark)
    try:
        driver.get(page.as_uri())
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": WIDTH, "height": 900, "deviceScaleFactor": 1, "mobile": False},
        )
        time.sleep(0.5)  # it draws anew for the width
        height = driver.execute_script("return document.documentElement.scrollHeight")
        driver.execute_cdp_cmd(
            "Emulation.setDeviceMetricsOverride",
            {"width": WIDTH, "height": height, "deviceScaleFactor": 1, "mobile": False},
        )
        time.sleep(0.5)
        image = Image.open(io.BytesIO(driver.get_screenshot_as_png())).convert("RGB")
        places = driver.execute_script(
            "return [...document.querySelectorAll('h2, h3')].map(e => {"
            " const r = (e.closest('section') || e.parentElement).getBoundingClientRect();"
            " return [e.textContent, Math.round(r.top), Math.round(r.bottom)]; })"
        )
    finally:
        driver.quit()
    return image, {name: (top, bottom) for name, top, bottom in places}


def killed_once(command: list[str], folder: Path) -> None:
    """Run a job and kill its second rank once it has saved."""
    process = subprocess.Popen(command, cwd=folder, env=environment(), start_new_session=True)
    metrics, killed = folder / "runs/pipeline/metrics.jsonl", False
    while process.poll() is None:
        time.sleep(0.1)
        if not killed and metrics.exists() and metrics.read_text("utf-8").count("\n") >= 6:
            for entry in Path("/proc").glob("[0-9]*"):
                try:
                    told = (entry / "environ").read_bytes().split(b"\0")
                    parent = int((entry / "stat").read_text("utf-8").rpartition(")")[2].split()[1])
                    if b"RANK=1" in told and parent == process.pid:
                        os.kill(int(entry.name), signal.SIGKILL)
                        killed = True
                except (OSError, IndexError):
                    continue
    if process.returncode:
        sys.exit(f"{command} ended with {process.returncode}")


def environment() -> dict[str, str]:
    """So that the runs' folders are where the caller says."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}


def main() -> None:
    """Runs, then pictures."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--folder", type=Path)
    asked = parser.parse_args().folder
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        folder = asked.resolve() if asked else scratch
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "pipeline.toml").write_text(PIPELINE, encoding="utf-8")
        if not (folder / "runs/demo/report.html").exists():
            subprocess.run([*ESPALIER, "demo"], cwd=folder, env=environment(), check=True)
        if not (folder / "runs/pipeline/report.html").exists():
            killed_once([*ESPALIER, "train", "pipeline.toml"], folder)
        planned = [*ESPALIER, "plan", "llama-7b", "--cluster", "h100-sxm", "-n", "64", "--html", "plan.html"]
        if not (folder / "plan.html").exists():
            subprocess.run(planned, cwd=folder, env=environment(), check=True)

        demo, at = shown(folder / "runs/demo/report.html", dark=False, scratch=scratch)
        demo.crop((0, 0, WIDTH, at["Sent a step, by axis"][1] + 24)).save(
            PICTURES / "report.png", optimize=True
        )
        piped, dark_at = shown(folder / "runs/pipeline/report.html", dark=True, scratch=scratch)
        edges = dark_at["Which rank holds what"][0] - 24, dark_at["What happened"][1] + 24
        piped.crop((0, edges[0], WIDTH, edges[1])).save(PICTURES / "report-dark.png", optimize=True)
        plan, plan_at = shown(folder / "plan.html", dark=False, scratch=scratch)
        bottom = plan_at["Memory of the fullest rank"][1] + 24
        plan.crop((0, 0, WIDTH, bottom)).save(PICTURES / "plan.png", optimize=True)
        if asked:
            for file, page in (
                ("demo", "runs/demo/report.html"),
                ("pipeline", "runs/pipeline/report.html"),
                ("plan", "plan.html"),
            ):
                for dark in (False, True):
                    image, _ = shown(folder / page, dark=dark, scratch=scratch)
                    image.save(folder / f"{file}-{'dark' if dark else 'light'}.png")


if __name__ == "__main__":
    main()
