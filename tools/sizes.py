"""Print the files over 500 lines and the functions over 80: a sign to look again, not an error."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 500
FUNCTION_LINES = 80
FOLDERS = ("espalier", "tests", "benchmarks", "tools", "docs", "examples")


def oversized(path: Path) -> Iterator[str]:
    """One line of text for the file if it is long, and for each of its long functions."""
    source = path.read_text(encoding="utf-8")
    lines = source.count("\n")
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines"
    for node in ast.walk(ast.parse(source, str(path))):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines"


def main() -> None:
    """Check the folders given, else all that hold Python code."""
    folders = sys.argv[1:] or [folder for folder in FOLDERS if Path(folder).is_dir()]
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [line for path in paths for line in oversized(path)]
    print(f"{len(paths)} files; over {FILE_LINES} lines a file or {FUNCTION_LINES} a function: {len(found)}")
    for line in found:
        print(f"  {line}")


if __name__ == "__main__":
    main()
