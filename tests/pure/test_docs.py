"""The documentation tells the truth: its examples run, its links lead somewhere."""

from __future__ import annotations

import contextlib
import io
import os
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

import espalier.api
from espalier.mesh.process import finish
from tests.pool import Pool

PRELOAD = ["torch._dynamo.backends.common", "torch._inductor.pattern_matcher"]
ROOT = Path(__file__).parent.parent.parent
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
RUN = [page for page in PAGES if "```python" in page.read_text("utf-8")]


def script(path: str, *arguments: str) -> str:
    """What a script of the repository prints, run in this process."""
    printed = io.StringIO()
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.chdir(ROOT),
        contextlib.redirect_stdout(printed),
    ):
        patch.setattr(sys, "argv", [path, *arguments])
        runpy.run_path(path, run_name="__main__")
    return printed.getvalue()


def run_pages(rank: int, world: int, port: int, *pages: str) -> str:
    """As ``espalier run -n 4 docs/run.py PAGES`` would: with the watch over the ranks."""
    del os.environ["ESPALIER_FAULTS"]
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}  # pages name folders by it
    printed = script("docs/run.py", *pages)
    finish()
    return printed


@pytest.mark.long
@pytest.mark.filterwarnings("default")
def test_the_examples_of_all_pages_run() -> None:
    """Every Python block works, and prints what the page says; on ranks apart, as pages change rules."""
    pages = [str(page.relative_to(ROOT)) for page in RUN]
    pool = Pool(forked=True)
    try:
        printed, *_ = pool(4, run_pages, os.getpid(), *pages, timeout=900)
    finally:
        pool.close()
    ended = [line for line in printed.splitlines() if line.endswith(" blocks")]
    assert [line.partition(":")[0] for line in ended] == pages


def loop(rank: int, world: int, *arguments: str) -> str:
    """What the plain loop prints."""
    return script("examples/plain_loop.py", *arguments)


@pytest.mark.world(4)
def test_the_plain_loop_prints_the_same_losses_under_every_layout(ranks: Any) -> None:
    """One process against data 2 × tensor 2, and pipe 2 × data 2."""
    (alone,) = ranks(1, loop)
    spread, *others = ranks(4, loop, "--tensor", "2")
    staged, *_ = ranks(4, loop, "--pipe", "2")
    assert others == ["", "", ""]

    def losses(printed: str) -> list[str]:
        return [line for line in printed.splitlines() if line.startswith("step")]

    assert len(losses(alone)) == 4
    assert losses(alone) == losses(spread) == losses(staged)
    assert "S(0)" in spread and "S(1)" in spread, "the two layers are column and row"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_the_links_of_a_page_lead_somewhere(page: Path) -> None:
    """Links to files and to headings of the repository; the web is left alone."""
    text = page.read_text("utf-8")
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith("http"):
            continue
        name, _, heading = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{page.name} links to {target}"
        if heading:
            found = {anchor(line) for line in re.findall(r"^#+ (.*)$", path.read_text("utf-8"), re.MULTILINE)}
            assert heading in found, f"{page.name} links to {target}"


def anchor(heading: str) -> str:
    """A heading's anchor, as GitHub makes it."""
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def test_all_pages_stand_in_the_navigation_of_the_site() -> None:
    """And the reference names all public names, each once; `make docs` itself is strict."""
    docs = ROOT / "docs"
    listed = re.findall(r"^ +- .*: (\S+\.md)$", (ROOT / "mkdocs.yml").read_text("utf-8"), re.MULTILINE)
    made = {"index.md", "changelog.md", "commands.md"}  # docs/site_hooks.py makes them
    assert sorted(listed) == sorted({*made, *(str(page.relative_to(docs)) for page in docs.rglob("*.md"))})
    reference = "".join(page.read_text("utf-8") for page in (docs / "api").glob("*.md"))
    shown = re.findall(r"^::: espalier\.api\.(\w+)$", reference, re.MULTILINE)
    shown += ["DeviceMesh", "init_device_mesh", "Partial", "Placement", "Replicate", "Shard"]  # torch's own
    assert sorted(shown) == sorted(espalier.api.__all__)
