"""The tables "what maps to what" in docs/: tests show each row, and plans there have the fields they name."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

from espalier import Plan

ROOT = Path(__file__).parents[2]
PAGES = (
    "accelerate",
    "colossal-ai",
    "deepspeed",
    "from-torch",
    "lightning-fabric",
    "torch-wrappers",
    "transformers-trainer",
)
SOURCES = (
    "tests/*/*.py",
    "tests/compat/*_surface.txt",
    "tests/compat/*_names.txt",
    "examples/coming_from/*.py",
)
# rows that say a word of the prose in code, or the beginning of many names, and what shows them
OTHERWISE = {
    "`checkpoint-N`": ("checkpoint",),
    "`FullyShardedDataParallel(model, FULL_SHARD)`": ("FullyShardedDataParallel", "ShardingStrategy"),
    "`ScheduleGPipe`": ("Schedule1F1B", "get_schedule_class", "SCHEDULES"),
    "`zero_*()`": ("zero_optimization", "fp16_enabled", "flops_profiler_enabled"),
    "`initialize(model, optimizer, criterion, loaders": ("initialize", "train_dataloader", "Trainer"),
}


def rows(page: str) -> Iterator[tuple[str, str]]:
    """The first two cells of each row of a page's tables."""
    for line in (ROOT / "docs" / f"{page}.md").read_text("utf-8").splitlines():
        cells = [cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]]
        is_key = cells[1:2] in (["honoured"], ["refused"], ["no effect"])  # of DeepSpeed's: a test of its own
        if line.startswith("|") and len(cells) > 1 and not is_key and not set(line) <= set("|- "):
            yield cells[0], cells[1]


def code(cell: str) -> list[str]:
    """What stands between backticks."""
    return re.findall(r"`([^`]+)`", cell)


@cache
def words() -> frozenset[str]:
    """Those of tests, but for this one, and of the programs that they run."""
    paths = {path for pattern in SOURCES for path in ROOT.glob(pattern)} - {Path(__file__)}
    return frozenset(word for path in paths for word in re.findall(r"\w+", path.read_text("utf-8")))


@pytest.mark.parametrize("page", PAGES)
def test_each_name_is_tried(page: str) -> None:
    """Tests use every name that the left of a row has."""
    table = [*rows(page)]
    assert len(table) > 5
    for left, _ in table:
        otherwise = next((known for start, known in OTHERWISE.items() if left.startswith(start)), None)
        names = otherwise or [name for text in code(left) for name in re.findall(r"[A-Za-z_]\w*", text)]
        assert [name for name in names if name not in words()] == [], left


def test_plans_have_these_fields() -> None:
    """``Plan(zero=3)`` and ``plan={"zero": 3}`` name what a plan has, with values that it takes."""
    count = 0
    for _, right in (row for page in PAGES for row in rows(page)):
        for text in code(right):
            call = re.search(r"(?:Plan|EspalierStrategy)\(.*\)", text)
            tree = _parsed(call[0] if call else text)
            for node in ast.walk(tree) if tree else ():
                if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "Plan":
                    fields = {k.arg: k.value for k in node.keywords}
                elif isinstance(node, ast.Dict) and call is None and "plan" in text:
                    fields = {k.value: v for k, v in zip(node.keys, node.values, strict=True)}  # type: ignore[union-attr]
                else:
                    continue
                count += 1
                assert fields.keys() <= Plan.model_fields.keys(), text
                known = {name: x.value for name, x in fields.items() if isinstance(x, ast.Constant)}
                Plan(**{name: x for name, x in known.items() if x is not ...})  # type: ignore[arg-type]
    assert count > 10


def _parsed(text: str) -> ast.AST | None:
    """Where nothing is said of a value, three dots stand for it."""
    try:
        return ast.parse(re.sub(r"=(?=[,)])", "=...", text))
    except SyntaxError:
        return None
