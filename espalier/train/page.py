"""A run's folder as one page, which needs nothing beside itself; and two runs as one.

The page is ``pages/run.html`` with its style, its script and the run's data put in. It opens from disk, and
loads nothing: its policy (a meta tag) lets it run its own script only, by its checksum.
"""

from __future__ import annotations

import base64
import hashlib
import html
import json
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

from espalier.files import write_file
from espalier.texts import few, toml_key, toml_value
from espalier.train.metrics import readable_bytes, readable_time

PAGE = "report.html"
MOST = 2000
"""Records that a page has; of longer runs a part, evenly."""

_FOLDER = files("espalier.train") / "pages"


def read_run(folder: Path) -> dict[str, Any]:
    """What is known of a run, in values that JSON knows.

    Raises:
        ValueError: the folder is none of a run.
    """
    if not (folder / "metrics.jsonl").is_file():
        near = sorted(path.parent for path in folder.glob("*/metrics.jsonl")) if folder.is_dir() else []
        hint = " Its folders " + few([*map(str, near)], 5) + " are such." if near else ""
        raise ValueError(
            f"{folder} is no folder of a run: it has no metrics.jsonl. `espalier train` makes one in runs/, "
            f"or in train.out.{hint}"
        )
    facts = folder / "run.json"
    run = json.loads(facts.read_text("utf-8")) if facts.is_file() else {}
    run.setdefault("name", folder.resolve().name)
    records = list(lines_of(folder / "metrics.jsonl"))
    events = list(lines_of(folder / "events.jsonl"))
    sample = folder / "sample.txt"
    if sample.is_file() and records:
        events.append({"kind": "sample", "text": sample.read_text("utf-8"), "step": records[-1]["step"]})
    return {**run, "folder": str(folder), "records": _thinned(records), "events": events}


def read_runs(*folders: Path) -> list[dict[str, Any]]:
    """Several runs, each under a name of its own: with its folder where jobs have the same name."""
    runs = [read_run(folder) for folder in folders]
    if len({run["name"] for run in runs}) < len(runs):
        runs = [{**run, "name": f"{run['name']}, {run['folder']}"} for run in runs]
    return runs


def lines_of(path: Path) -> Iterator[dict[str, Any]]:
    """The objects of a file; a line that is not whole yet is left out."""
    if not path.is_file():
        return
    for line in path.read_text("utf-8").splitlines():
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            yield record


def _thinned(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    step = math.ceil(len(records) / MOST)
    last = len(records) - 1
    return [r for i, r in enumerate(records) if not i % step or i == last or r.get("val_loss") is not None]


def write_page(folder: Path) -> Path:
    """Write a run's page into its folder."""
    path = folder / PAGE
    write_file(path, page([read_run(folder)]).encode(), last=False)
    return path


def page(runs: list[dict[str, Any]], *, live: bool = False) -> str:
    """The page of a run, or of several that are compared.

    Args:
        live: it asks ``data.json`` for what is new.
    """
    script = (_FOLDER / "run.js").read_text("utf-8")
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    title = " and ".join(str(run["name"]) for run in runs)
    differences = job_differences(*runs) if len(runs) == 2 else []
    data = as_json({"runs": runs, "live": live, "differences": differences})
    parts = {
        "@@POLICY@@": policy(digest),
        "@@TITLE@@": html.escape(title),
        "@@STYLE@@": style(),
        "@@DATA@@": data.replace("<", "\\u003c").replace("\u2028", "\\u2028").replace("\u2029", "\\u2029"),
        "@@SCRIPT@@": script,
    }
    text = (_FOLDER / "run.html").read_text("utf-8")
    return re.sub(r"@@\w+@@", lambda mark: parts[mark[0]], text)


def style() -> str:
    """The style of all pages."""
    return (_FOLDER / "run.css").read_text("utf-8")


def policy(digest: str) -> str:
    """What the page may load: its own script, by its checksum, and what its own server says."""
    return (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; "
        "connect-src 'self'; img-src data:; base-uri 'none'; form-action 'none'"
    )


def as_json(value: Any) -> str:
    """JSON that browsers read: what is not finite is null there."""
    return json.dumps(_finite(value), allow_nan=False, separators=(",", ":"), default=str)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): _finite(x) for key, x in value.items()}
    return [_finite(x) for x in value] if isinstance(value, list | tuple) else value


# ---- two runs


def job_differences(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """What two runs' jobs say differently: the key, and what each says."""
    jobs = [_flat(tomllib.loads(run.get("job") or "")) for run in (a, b)]
    keys = sorted(jobs[0].keys() | jobs[1].keys())
    return [
        (key, *(json.dumps(t[key], default=str) if key in t else "–" for t in jobs))  # type: ignore[misc]
        for key in keys
        if jobs[0].get(key) != jobs[1].get(key)
    ]


def compared(a: Mapping[str, Any], b: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """How two runs ended, and what their jobs say differently: a row each, the first with their names."""
    rows = [("", str(a["name"]), str(b["name"]))]
    unit = "images" if a.get("unit") == b.get("unit") == "images" else "tokens"
    endings = [_ending(run, unit) for run in (a, b)]
    rows += [(key, endings[0][key], endings[1][key]) for key in endings[0]]
    return rows + job_differences(a, b)


def _ending(run: Mapping[str, Any], unit: str) -> dict[str, str]:
    records = run["records"]
    losses = [r["loss"] for r in records if r["loss"] is not None and math.isfinite(r["loss"])]
    validated = [r["val_loss"] for r in records if r.get("val_loss") is not None]
    rates = sorted(r["tokens_per_second"] for r in records)
    last: dict[str, Any] = records[-1] if records else {"step": 0, "memory": [0], "seconds": 0.0}
    return {
        "status": run.get("status", "–"),
        "steps": f"{last['step']:,}",
        "training loss": f"{losses[-1]:.4f}" if losses else "–",
        "validation loss": f"{validated[-1]:.4f}" if validated else "–",
        f"{unit} a second": f"{rates[len(rates) // 2]:,.0f}" if rates else "–",
        "peak memory": readable_bytes(max(last["memory"])),
        "trained for": readable_time(last["seconds"]),
    }


def _flat(table: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _flat(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def to_toml(tables: Mapping[str, Any]) -> str:
    """Tables as a TOML file says them."""
    return "\n".join(_table(tables, ())).strip() + "\n"


def _table(table: Mapping[str, Any], path: tuple[str, ...]) -> Iterator[str]:
    plain = {key: value for key, value in table.items() if not isinstance(value, Mapping)}
    if path and (plain or not table):
        yield f"[{'.'.join(map(toml_key, path))}]"
    for key, value in plain.items():
        if value is not None:
            yield f"{toml_key(key)} = {toml_value(value)}"
    if plain:
        yield ""
    for key, value in table.items():
        if isinstance(value, Mapping):
            yield from _table(value, (*path, key))
