"""``--set section.key=value``: changes to a job from the command line."""

import tomllib
from collections.abc import Iterable
from copy import deepcopy
from typing import Any

from espalier.train.mistakes import Mistake


def parse_value(text: str) -> Any:
    """Read ``text`` as a TOML value; what is none (``gpt2``, ``runs/a``) is taken as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply_overrides(
    job: dict[str, Any], assignments: Iterable[str], mistakes: list[Mistake]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return a copy of ``job`` with each ``key.key=value`` applied, and the keys that were set.

    Args:
        job: nested tables as TOML gives them.
        assignments: texts such as ``plan.tensor=2``; the last one for a key wins.
        mistakes: what cannot be applied is added here.
    """
    changed = deepcopy(job)
    keys = set()
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) < 2:
            mistakes.append(
                Mistake("--set", assignment, "expected section.key=value, as in --set plan.tensor=2")
            )
            continue
        table: Any = changed
        for depth, part in enumerate(parts[:-1]):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                where = ".".join(parts[: depth + 1])
                mistakes.append(Mistake("--set", assignment, f"{where} is a value, not a table"))
                break
        else:
            table[parts[-1]] = parse_value(text.strip())
            keys.add(".".join(parts))
    return changed, frozenset(keys)
