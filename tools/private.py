"""Fail where a private name of torch stands in the package outside of ``espalier/torch_private.py``.

Looked at are what is imported from torch, what is reached from that, and the private attributes that torch's
objects bear, whoever is asked for one: ``x._version`` is found whatever ``x`` is, and so is ``"_version"``.
A class of ours asks itself for what it defines. Operators of ``torch.ops`` pass.
"""

from __future__ import annotations

import ast
import inspect
import re
import sys
from collections import namedtuple
from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import TypeGuard

import torch
import torch.distributed.device_mesh
import torch.nn.utils.parametrize
import torch.utils.data

PACKAGE = Path("espalier")
HOME = PACKAGE / "torch_private.py"
# where the classes are whose objects programs hold
KINDS = (
    torch, torch._ops, torch.amp, torch.autograd, torch.autograd.graph, torch.distributed.device_mesh,
    torch._C._distributed_c10d, torch.fx, torch.library, torch.nn, torch.nn.parallel,
    torch.nn.utils.parametrize, torch.optim, torch.optim.lr_scheduler, torch.utils.data, torch.utils.hooks,
)  # fmt: skip
# of classes that take long to import
SOURCES = ("_dynamo/eval_frame.py", "distributed/tensor/_api.py")

# file, or "" for all of them: what it asks of others than torch's objects, and why
ALLOWED: dict[str, dict[str, str]] = {
    "": {"_layout": "of our DTensor"},
    "compat/accelerate.py": {"_schedulers": "of accelerate's Accelerator"},
    "compat/torch/data_parallel.py": {"_threads": "of ours, of which a module is not told"},
    "parallel/tensor/tables.py": {"_apply": "of styles, torch's and ours: torch lets others define it"},
    "planner/kept.py": {"_hash": "the end of a name"},
}


def is_private(name: str) -> bool:
    """Whether a name begins with one underscore."""
    return name[:1] == "_" != name[1:2]


def borne() -> set[str]:
    """The private attributes of torch's objects: what their classes have, and ask of ``self``."""
    outer = [x for place in KINDS for x in vars(place).values() if inspect.isclass(x)]
    inner = [x for kind in outer for x in vars(kind).values() if inspect.isclass(x)]
    kinds = {base for kind in outer + inner for base in kind.__mro__ if base.__module__.startswith("torch")}
    files = {getattr(sys.modules.get(kind.__module__), "__file__", None) for kind in kinds}
    files |= {str(Path(torch.__file__).parent / source) for source in SOURCES}
    names = {name for kind in kinds for name in vars(kind)}
    for file in files:
        if file is not None and file.endswith(".py"):
            names.update(re.findall(r"\bself\.(_\w+)", Path(file).read_text(encoding="utf-8")))
    return {name for name in names if is_private(name)} - set(dir(namedtuple("_", "")))


class Classes:
    """The classes of a package, and which attributes they define."""

    def __init__(self, trees: Iterable[ast.AST]) -> None:
        kinds = [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.ClassDef)]
        self._by_name = {name: [k for k in kinds if k.name == name] for name in {k.name for k in kinds}}

    def own(self, kind: ast.ClassDef, below: tuple[ast.ClassDef, ...] = ()) -> set[str]:
        """The attributes of a class, and of those of the package that it is derived from.

        Classes are known by their names alone: one that stands for another library's of its own name, and
        has that below it, is not looked at again from ``below``.
        """
        names: set[str] = set()
        known = (*below, kind)
        for node in ast.walk(kind):
            if isinstance(node, ast.FunctionDef):
                names.add(node.name)
            elif isinstance(node, ast.Name | ast.Attribute) and isinstance(node.ctx, ast.Store):
                names.add(dotted(node).removeprefix("self."))
            elif _is_slots(node):
                names.update(map(str, ast.literal_eval(node.value)))
        for base in kind.bases:
            name = dotted(base.value if isinstance(base, ast.Subscript) else base).rpartition(".")[2]
            bases = (other for other in self._by_name.get(name, ()) if other not in known)
            names.update(*(self.own(other, known) for other in bases))
        return names


def _is_slots(node: ast.AST) -> TypeGuard[ast.Assign]:
    return isinstance(node, ast.Assign) and [dotted(target) for target in node.targets] == ["__slots__"]


def dotted(node: ast.expr) -> str:
    """A name, and what is reached from it; of what is no name, that alone."""
    parts: list[str] = []
    while isinstance(node, ast.Attribute):
        parts.append(node.attr)
        node = node.value
    return ".".join([node.id if isinstance(node, ast.Name) else "", *reversed(parts)])


class Reader:
    """Finds private names of torch in a file.

    Args:
        tree: the file.
        names: private attributes of torch's objects.
        classes: those of the package.
    """

    def __init__(self, tree: ast.AST, names: Collection[str], classes: Classes) -> None:
        self._names, self._classes = names, classes
        self._imported: dict[str, str] = {}
        for node in ast.walk(tree):
            if isinstance(node, ast.Import | ast.ImportFrom):
                for full, alias in zip(_imports(node), node.names, strict=True):
                    called = alias.asname or alias.name.partition(".")[0]
                    self._imported[called] = full if alias.asname or "." not in alias.name else called

    def found(self, node: ast.AST, own: Collection[str] = ()) -> Iterator[tuple[int, str]]:
        """What stands in a part of the file, and its line; ``own``: what the class that it is in defines."""
        line = getattr(node, "lineno", 0)
        if isinstance(node, ast.ClassDef):
            own = self._classes.own(node)
        elif isinstance(node, ast.Import | ast.ImportFrom):
            yield from ((line, name) for name in _imports(node) if private(name))
        elif isinstance(node, ast.Attribute):
            yield from ((line, name) for name in self._asked(node.value, node.attr, own))
        elif isinstance(node, ast.Call) and dotted(node.func) == "getattr":
            of, name = node.args[:2]
            if isinstance(name, ast.Constant) and name.value not in self._names:
                yield from ((line, name) for name in self._asked(of, str(name.value), own))
        elif isinstance(node, ast.Constant) and node.value in self._names:
            yield line, repr(node.value)
        for child in ast.iter_child_nodes(node):
            is_part_of_text = isinstance(node, ast.JoinedStr) and isinstance(child, ast.Constant)
            if not is_part_of_text and not _is_slots(child):
                yield from self.found(child, own)

    def _asked(self, of: ast.expr, name: str, own: Collection[str]) -> Iterator[str]:
        """What is asked of something by a name, if it is private to torch."""
        asked = dotted(of) if is_private(name) else ""
        first, dot, rest = asked.partition(".")
        full = f"{self._imported.get(first, first)}{dot}{rest}.{name}"
        if first in self._imported and not full.startswith("espalier."):
            yield from [full] if private(full) else []
        elif name in self._names and not (asked in ("self", "cls") and name in own):
            yield f"{ast.unparse(of)}.{name}"


def _imports(node: ast.Import | ast.ImportFrom) -> list[str]:
    of = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
    return [of + alias.name for alias in node.names]


def private(name: str) -> bool:
    """Whether it is a name of torch with a private part."""
    first, *rest = name.split(".")
    return first == "torch" and rest[:1] != ["ops"] and any(map(is_private, rest))


def main() -> int:
    """Print what there is, and what is allowed without need; 1 if there is any."""
    paths = [path for path in sorted(PACKAGE.rglob("*.py")) if path != HOME]
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in paths}
    names, classes = borne(), Classes(trees.values())
    found: list[str] = []
    needed: set[tuple[str, str]] = set()
    for path, tree in trees.items():
        for line, name in sorted(set(Reader(tree, names, classes).found(tree))):
            last = name.rpartition(".")[2].strip("'")
            files = [f for f in ("", str(path.relative_to(PACKAGE))) if last in ALLOWED.get(f, {})]
            needed.update((file, last) for file in files)
            if not files:
                found.append(f"{path}:{line}: {name} is private: give it a name in {HOME}")
    for file, allowed in ALLOWED.items():
        spare = [x for x in allowed if x in names and (file, x) not in needed]  # another torch has others
        found += [f"{PACKAGE / file} asks for {x} no more" for x in spare]
    print("\n".join(found) or "no private name of torch outside of its file")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
