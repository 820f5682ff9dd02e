"""Names of torch and of transformers, read from their source: an import takes seconds, a typo should not."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from espalier.texts import Mistake, did_you_mean, similar, unknown_key
from espalier.train.sections import OptimizerSection

_UNUSABLE = ("Optimizer", "LBFGS")


@cache
def optimizers() -> dict[str, tuple[str, ...]]:
    """The arguments of each optimizer of torch.optim that a job may name, but for its parameters."""
    torch_spec = find_spec("torch")
    if torch_spec is None or not torch_spec.submodule_search_locations:
        raise ImportError("torch is not installed")
    folder = Path(torch_spec.submodule_search_locations[0]) / "optim"
    return {
        name: arguments
        for name, arguments in _classes(folder)
        if name not in _UNUSABLE and not name.startswith("_")
    }


def _classes(folder: Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    for node in ast.parse((folder / "__init__.py").read_text("utf-8")).body:
        if not isinstance(node, ast.ImportFrom) or not (node.module or "").startswith("torch.optim."):
            continue
        file = folder / f"{(node.module or '').removeprefix('torch.optim.')}.py"
        wanted = {alias.name for alias in node.names}
        for each in ast.parse(file.read_text("utf-8")).body if file.is_file() else ():
            if isinstance(each, ast.ClassDef) and each.name in wanted:
                yield each.name, _arguments(each)


def _arguments(node: ast.ClassDef) -> tuple[str, ...]:
    for each in node.body:
        if isinstance(each, ast.FunctionDef) and each.name == "__init__":
            return tuple(a.arg for a in (*each.args.args[2:], *each.args.kwonlyargs))
    return ()


def name_mistakes(section: OptimizerSection) -> list[Mistake]:
    """An optimizer that torch has not, and arguments that it does not take."""
    known = optimizers()
    if section.name not in known:
        hint = did_you_mean(section.name, known, f"expected one of {', '.join(sorted(known))}")
        return [Mistake("optimizer.name", section.name, f"torch.optim has none usable by this name; {hint}")]
    accepted = known[section.name]
    own = sorted({*accepted, *OptimizerSection.model_fields})
    mistakes = [
        unknown_key(f"optimizer.{key}", value, own)
        for key, value in section.arguments.items()
        if key not in accepted
    ]
    if section.rest and section.name != "Muon":
        expected = 'is for the parameters that Muon leaves: optimizer.name = "Muon"'
        mistakes.append(Mistake("optimizer.rest", section.rest, expected))
    mistakes += [
        unknown_key(f"optimizer.rest.{key}", value, sorted(known["AdamW"]))
        for key, value in section.rest.items()
        if key not in known["AdamW"]
    ]
    every = {*accepted, *(known["AdamW"] if section.name == "Muon" else ())}
    for i, group in enumerate(section.groups):
        where = f"optimizer.groups[{i}]"
        said = group.get("pattern")
        listed = said if isinstance(said, list) else [said]
        if not listed or not all(isinstance(pattern, str) and pattern for pattern in listed):
            expected = 'expected a pattern of names of parameters, as pattern = "*.bias", or a list of them'
            mistakes.append(Mistake(f"{where}.pattern", said, expected))
        mistakes += [
            unknown_key(f"{where}.{key}", value, ["pattern", *sorted(every)])
            for key, value in group.items()
            if key not in every and key != "pattern"
        ]
    return mistakes


# ---- typos in a config of transformers
#
# Only what is surely one is told: a key that its file says nowhere, and that is spelled nearly like one that
# it has. Whatever else may be wrong transformers itself says, later.

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
