"""Typos in a config of transformers, seen in its source: to import it takes seconds, and a typo should not.

Only what is surely one is told: a key that its file says nowhere, and that is spelled nearly like one that it
has. Whatever else may be wrong transformers itself says, later.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from espalier.texts import Mistake, similar, unknown_key

_ALIKE = 0.75


def config_typos(name: Any, model_type: Any, config: Mapping[str, Any]) -> list[Mistake]:
    """Keys of a config that are spelled nearly as they should be.

    Args:
        name: the class of the model, if it is given.
        model_type: the kind of architecture, if that is.
        config: keys and values.
    """
    package = find_spec("transformers")
    if package is None or not package.submodule_search_locations:
        return []
    root = Path(package.submodule_search_locations[0])
    try:
        kind = model_type if isinstance(model_type, str) else _kind_of(root, str(name))
        text = (root / "models" / kind.replace("-", "_") / f"configuration_{kind}.py").read_text("utf-8")
        common = (root / "configuration_utils.py").read_text("utf-8")
        known = {*_fields(text), *_fields(common)}
    except (OSError, ValueError, SyntaxError):
        return []
    said = {*re.findall(r"\w+", text), *re.findall(r"\w+", common)}
    return [
        unknown_key(f"model.config.{key}", value, sorted(known))
        for key, value in config.items()
        if key not in said and similar(key, known, least=_ALIKE)
    ]


def _kind_of(root: Path, name: str) -> str:
    """The kind of architecture that a class is of."""
    text = (root / "models" / "auto" / "modeling_auto.py").read_text("utf-8")
    match = re.search(rf'\("([\w-]+)",\s*"{re.escape(name)}"\)', text)
    if match is None:
        raise ValueError(name)
    return match[1]


def _fields(text: str) -> Iterator[str]:
    """What the classes of a source have as fields, and as other names of these."""
    for node in ast.parse(text).body:
        for each in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(each, ast.AnnAssign) and isinstance(each.target, ast.Name):
                yield each.target.id
            elif isinstance(each, ast.FunctionDef) and each.name == "__init__":
                yield from (a.arg for a in (*each.args.args, *each.args.kwonlyargs))
            elif isinstance(each, ast.Assign) and isinstance(each.value, ast.Dict):
                target = each.targets[0]
                if isinstance(target, ast.Name) and target.id == "attribute_map":
                    yield from (str(k.value) for k in each.value.keys if isinstance(k, ast.Constant))
