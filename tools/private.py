"""Fail where a private name of torch stands in the package outside of ``espalier/torch_private.py``.

Names of ``torch.ops`` are operators, and pass.
"""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

HOME = Path("espalier/torch_private.py")


def private(dotted: str) -> bool:
    """Whether it is a name of torch with a private part."""
    first, *rest = dotted.split(".")
    return first == "torch" and rest[:1] != ["ops"] and any(n[:1] == "_" != n[1:2] for n in rest)


def imported(tree: ast.AST) -> Iterator[tuple[str, str]]:
    """What a file calls modules and names that it imports, and what they are."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.asname, alias.name) for alias in node.names if alias.asname)
        elif isinstance(node, ast.ImportFrom) and node.module:
            yield from ((alias.asname or alias.name, f"{node.module}.{alias.name}") for alias in node.names)


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Each name of torch that is imported, or reached from it, with its line."""
    known = dict(imported(tree))
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            yield from ((node.lineno, f"{node.module}.{alias.name}") for alias in node.names)
        elif isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.Attribute):
            parts: list[str] = []
            inner: ast.expr = node
            while isinstance(inner, ast.Attribute):
                parts.append(inner.attr)
                inner = inner.value
            if isinstance(inner, ast.Name):
                yield node.lineno, ".".join([known.get(inner.id, inner.id), *reversed(parts)])
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "getattr":
            of, name = node.args[:2]
            if isinstance(name, ast.Constant) and isinstance(of, ast.Name | ast.Attribute):
                yield node.lineno, f"{ast.unparse(of)}.{name.value!s}"


def main() -> int:
    """Print what there is; 1 if there is any."""
    found = [
        f"{path}:{line}: {name} is private: give it a name in {HOME}"
        for path in sorted(Path("espalier").rglob("*.py"))
        if path != HOME
        for line, name in sorted(set(names(ast.parse(path.read_text(encoding="utf-8")))))
        if private(name)
    ]
    print("\n".join(found) or "no private name of torch outside of its file")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
