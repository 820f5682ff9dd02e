"""Run the Python blocks of pages, each page as one script: every example in the documentation works.

    espalier run -n 4 docs/run.py docs/layouts-and-rules.md

A block whose first line is ``# examples/NAME.py`` is a file of the repository: it must be the same,
and is not run here. Lines after ``# prints:`` say what a block prints on rank 0; that is compared.
A block after the comment ``<!-- one process -->`` sends nothing: rank 0 alone runs it, the others go on.
"""

from __future__ import annotations

import contextlib
import io
import os
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent
_BLOCK = re.compile(r"^(<!-- one process -->\n+)?```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
_PRINTS = "# prints:\n"


def blocks(page: Path) -> list[tuple[int, str, bool]]:
    """The page's Python blocks, each with the number of its first line, and whether it is of one process."""
    text = page.read_text("utf-8")
    return [
        (text.count("\n", 0, found.start(2)) + 1, found[2], found[1] is not None)
        for found in _BLOCK.finditer(text)
    ]


def expected(block: str) -> list[str]:
    """What the block says that it prints."""
    after = block.partition(_PRINTS)[2]
    return [line.removeprefix("#").strip() for line in after.splitlines() if line.startswith("#")]


def main() -> None:
    """Run the pages that the arguments name."""
    for name in sys.argv[1:]:
        run(Path(name))


def run(page: Path) -> None:
    """Run one page; the process ends if it does not do what it says."""
    names = {"__name__": "__page__"}
    count, first = 0, os.environ.get("RANK", "0") == "0"
    for line, block, is_of_one in blocks(page):
        title, _, body = block.partition("\n")
        if title.startswith("# examples/"):
            name = title.removeprefix("# ")
            if (ROOT / name).read_text("utf-8").strip() != body.strip():
                sys.exit(f"{page}:{line}: this block differs from {name}")
            continue
        if is_of_one and not first:
            continue
        written = io.StringIO()
        with contextlib.redirect_stdout(written):
            # leading newlines, so that a traceback tells the line of the page
            exec(compile("\n" * (line - 1) + block, str(page), "exec"), names)
        printed = [text.strip() for text in written.getvalue().splitlines() if text.strip()]
        says = expected(block)
        if first and printed != says:
            sys.exit("\n  ".join([f"{page}:{line}: printed", *printed, "but the page says", *says]))
        count += 1
    if first:
        print(f"{page}: {count} blocks")


if __name__ == "__main__":
    main()
