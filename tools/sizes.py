"""Print the files over 600 lines of code, the functions over 80, and whether the package has over 150 files.

Each is a sign to look again, not an error. Docstrings, comments and blank lines are not code.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

FILE_LINES = 600
FUNCTION_LINES = 80
PACKAGE, PACKAGE_FILES = Path("espalier"), 150
FOLDERS = ("espalier", "tests", "benchmarks", "tools", "docs", "examples")


def oversized(path: Path) -> Iterator[str]:
    """One line of text for the file if it is long, and for each of its long functions."""
    source = path.read_text(encoding="utf-8")
    tree = ast.parse(source, str(path))
    lines = code_lines(source, tree)
    if lines > FILE_LINES:
        yield f"{path}: {lines} lines of code"
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > FUNCTION_LINES:
                yield f"{path}:{node.lineno}: {node.name} has {length} lines"


def code_lines(source: str, tree: ast.Module) -> int:
    """How many lines of a file are code."""
    stripped = map(str.strip, source.splitlines())
    lines = {number for number, line in enumerate(stripped, 1) if line and not line.startswith("#")}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant | ast.JoinedStr) and node.end_lineno != node.lineno:  # a long text
            lines.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                lines -= set(range(first.lineno, (first.end_lineno or first.lineno) + 1))
    return len(lines)


def main() -> None:
    """Check the folders given, else all that hold Python code."""
    folders = sys.argv[1:] or [folder for folder in FOLDERS if Path(folder).is_dir()]
    paths = sorted(path for folder in folders for path in Path(folder).rglob("*.py"))
    found = [line for path in paths for line in oversized(path)]
    inside = sum(PACKAGE in path.parents for path in paths)
    if inside > PACKAGE_FILES:
        found.append(f"{PACKAGE}: {inside} files")
    bars = (
        f"{FILE_LINES} lines of code a file, {FUNCTION_LINES} a function or {PACKAGE_FILES} files a package"
    )
    print(f"{len(paths)} files; over {bars}: {len(found)}")
    for line in found:
        print(f"  {line}")


if __name__ == "__main__":
    main()
