"""What optimizers torch has, read from its source: importing it takes seconds, and a typo should not."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from importlib.util import find_spec
from pathlib import Path

from espalier.texts import Mistake, did_you_mean, unknown_key
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
