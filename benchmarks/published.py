"""Published runs: how far what the planner says is from what other people measured.

    .venv/bin/python benchmarks/published.py RUNS.csv

A row of the file is a run: GPU, sizes of the model, how it was cut, and one metric (``step_time_s``,
``tokens_per_s_per_gpu``, ``mfu_pct``, ``hw_tflops_per_gpu``; rows of other metrics are counted and left
out). The model is built on the meta device, recorded as `espalier plan` records it, and priced under that
plan on the shipped cluster of that GPU, with the constants of the row's ``profile`` in published.toml. No
row, and no source, is known to the code. ``--fit`` looks for a profile's constants on the file's rows;
``--unknown`` takes each profile for one that nobody knows, with the medians of the file's others.

Bars: a mean absolute error of 5 % on the sources whose profile is ``korthikanti`` or ``sc21-t1``, 8 % on
the others. Regret is the time lost by taking the run that is predicted the fastest of those with one model,
number of GPUs and batch. "scaled" is the error after one factor for the source: a wrong level, or a shape.
"""

from __future__ import annotations

import argparse
import csv
import itertools
import json
import math
import statistics
import sys
import tomllib
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

import torch

from espalier import Plan
from espalier.models import GPT, GPT2, GPT2Config, GPTConfig
from espalier.planner import Cluster, Recorder, Search
from espalier.planner.whole import recordings

_PROFILES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text("utf-8"))
_BARS = {"korthikanti": 0.05, "sc21-t1": 0.05}
_GRID = {
    "ceiling": (0.35, 0.42, 0.5, 0.58, 0.66, 0.74, 0.82, 0.9),
    "memory_share": (0.5, 0.6, 0.7, 0.8),
    "unfused": (0.15, 0.3, 0.45, 0.7, 1.0),
    "host_us_per_op": (1.0, 3.0, 6.0, 10.0, 14.0, 19.0, 25.0, 32.0, 40.0),
    "attention_ceiling": (None, 0.2, 0.27, 0.35, 0.45, 0.6),
}
_OF_A_GPU = ("ceiling", "attention_ceiling")
_ORDER = ("ceiling", "unfused", "host_us_per_op", "attention_ceiling", "memory_share", "ceiling", "unfused")
_NEAR = 0.88, 0.94, 1, 1.06, 1.12


class Run(NamedTuple):
    """A row: the plan, what it took, and what tells it from runs that it cannot be compared with."""

    row: dict[str, str]
    plan: Plan
    recorder: Recorder
    seconds: float


def main() -> int:
    """Score a file; the exit status is 1 where a bar is missed."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("file", type=Path, nargs="?", help="without one there is nothing to price")
    parser.add_argument("--fit", metavar="PROFILE", help="print constants that fit this profile's rows best")
    parser.add_argument("--profile", help="score rows of this profile alone")
    parser.add_argument("--unknown", action="store_true", help="score rows by the other profiles' medians")
    given = parser.parse_args()
    if given.file is None:
        print("no runs are given, nothing is priced: published.py RUNS.csv (docs/planning.md)")
        return 0
    with given.file.open(newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    models: dict[Any, Recorder] = {}
    runs, left = [], 0
    for row in rows:
        if (given.fit or given.profile) not in (None, row["profile"]):
            continue
        found = read(row, models)
        if found is None:
            left += 1
        else:
            runs.append(found)
    if given.fit:
        print(fitted(runs))
        return 0
    by_source: dict[tuple[str, str], list[tuple[Run, float]]] = defaultdict(list)
    for run in runs:
        told = predicted(run, medians(run, runs) if given.unknown else constants(run))
        if told is None:
            left += 1
        else:
            by_source[run.row["profile"], run.row["source"]].append((run, told))
    print(
        f"{'n':>4} {'MAPE':>6} {'median':>6} {'p90':>6} {'bias':>7} {'scaled':>6} {'regret':>6}  "
        "bar        profile, source"
    )
    missed = 0
    for (profile, source), pairs in sorted(by_source.items()):
        bar = _BARS.get(profile, 0.08)
        missed += tell(pairs, bar, f"{profile}, {source[:60]}")
    print(f"{left} rows have a metric that is no time, or do not run here")
    return bool(missed)


def read(row: dict[str, str], models: dict[Any, Recorder]) -> Run | None:
    """A row as a plan and seconds; None where it tells no time."""
    if any(not (row[key] or "1").isdigit() for key in _NUMBERS) or row["gpu"] not in _PROFILES["gpus"]:
        return None  # another kind of attention, say, or a device that no cluster has
    number = {key: int(row[key] or 1) for key in _NUMBERS}
    seconds = seconds_of(row, number)
    if seconds is None:
        return None
    key = tuple(number[x] for x in ("layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"))
    if key not in models:
        models[key] = recorder(number)
    kind, _, virtual = row["schedule"].partition("_v")
    stages = int(virtual or 2) if kind == "interleaved" else 1
    recompute = "full" if row["activation_ckpt"].startswith("full") else "none"
    pipe, layers = number["pp"], number["layers"]
    if pipe * stages > layers:
        return None
    few, more = divmod(layers, pipe * stages)
    sizes = [few + (i < more) for i in range(pipe * stages)]
    cuts = tuple(f"blocks.{sum(sizes[: i + 1])}" for i in range(pipe * stages - 1)) or None
    accumulate = max(1, number["global_batch"] // (number["dp"] * number["micro_batch"]))
    plan = Plan(
        pipe=pipe,
        schedule="interleaved" if stages > 1 and pipe > 1 else "1f1b",
        stages_per_rank=stages if pipe > 1 else 1,
        cuts=cuts if pipe > 1 else None,
        data=number["dp"],
        tensor=number["tp"],
        context=number["cp"],
        zero=int((row["zero"] or "0")[0]),
        accumulate=accumulate,
        sequence_parallel="sequence_parallel" in row["activation_ckpt"],
        recompute=recompute,
        precision="bfloat16",  # as float16, but for the scale of the loss
    )
    return Run(row, plan, models[key], seconds)


_NUMBERS = (
    *("n_gpus", "layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq"),
    *("micro_batch", "global_batch", "tp", "pp", "dp", "cp"),
)


def recorder(number: dict[str, int]) -> Recorder:
    """Of the row's model: a plain GPT-2, or Llama's kind where heads or the MLP say so."""
    sizes = {"vocab_size": number["vocab"], "max_positions": number["seq"]}
    sizes |= {key: number[key] for key in ("layers", "hidden", "heads", "ffn")}
    plain = number["kv_heads"] in (1, number["heads"]) and number["ffn"] == 4 * number["hidden"]
    with torch.device("meta"):
        model = GPT2(GPT2Config(**sizes)) if plain else GPT(GPTConfig(**sizes, kv_heads=number["kv_heads"]))
        tokens = torch.empty(64, number["seq"], dtype=torch.int64)
    batch = {"input_ids": tokens, "labels": tokens}
    return Recorder(model, torch.optim.AdamW(model.parameters()), batch, {}, recordings())


def seconds_of(row: dict[str, str], number: dict[str, int]) -> float | None:
    """What a step took."""
    metric, value = row["measured_metric"], float(row["measured_value"])
    b, s, n = number["global_batch"], number["seq"], number["n_gpus"]
    layers, h, v = number["layers"], number["hidden"], number["vocab"]
    if metric == "step_time_s":
        return value
    if metric == "tokens_per_s_per_gpu":
        return b * s / (n * value)
    if metric == "hw_tflops_per_gpu":
        return 96 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (16 * layers * h)) / (n * value * 1e12)
    if metric == "mfu_pct":
        peak = max(Cluster.load(_PROFILES["gpus"][row["gpu"]]).device.tflops.values()) * 1e12
        flops = 72 * b * s * layers * h**2 * (1 + s / (6 * h) + v / (12 * layers * h))
        return flops / (n * peak * value / 100)
    return None


def constants(run: Run) -> dict[str, Any]:
    """Of the row's profile."""
    table = _PROFILES["profile"]
    found = dict(table.get(run.row["profile"], table["default"]))
    found |= found.pop("gpu", {}).get(run.row["gpu"], {})
    return {key: x for key, x in found.items() if key != "from"}


def medians(run: Run, runs: list[Run]) -> dict[str, Any]:
    """Of the profiles that other runs have: of all, and the share of the peak of those on this GPU."""
    own, gpu = run.row["profile"], run.row["gpu"]
    others = {(x.row["profile"], x.row["gpu"]): constants(x) for x in runs if x.row["profile"] != own}
    known = {key: x for key, x in others.items() if key[0] in _PROFILES["profile"]}
    found = {"unfused": statistics.median({name: x["unfused"] for (name, _), x in known.items()}.values())}
    if shares := [x["ceiling"] for (_, its), x in known.items() if its == gpu and "ceiling" in x]:
        found["ceiling"] = statistics.median(shares)
    return found


def predicted(run: Run, change: dict[str, Any], *, closed: bool = False) -> float | None:
    """Seconds that the planner says; ``closed``: a pipeline's by its closed form."""
    cluster = Cluster.load(_PROFILES["gpus"][run.row["gpu"]])
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update=change)})
    search = Search(run.recorder, cluster, run.plan, ranks=min(run.plan.world_size, cluster.ranks))
    found = search.score(run.plan, int(run.row["micro_batch"]))
    if found is None or closed:
        return None if found is None else found.seconds
    return search.simulated(found).seconds


def tell(pairs: list[tuple[Run, float]], bar: float, name: str) -> int:
    """A line of the table; 1 where the bar is missed."""
    off = [told / run.seconds - 1 for run, told in pairs]
    sizes = sorted(map(abs, off))
    mean, middle = statistics.mean(sizes), statistics.median(sizes)
    scale = math.exp(statistics.mean(math.log(run.seconds / told) for run, told in pairs))
    scaled = statistics.mean(abs(told * scale / run.seconds - 1) for run, told in pairs)
    groups: dict[Any, list[tuple[float, float]]] = defaultdict(list)
    for run, told in pairs:
        key = tuple(run.row[x] for x in ("gpu", "n_gpus", "layers", "hidden", "seq", "global_batch"))
        groups[key].append((told, run.seconds))
    lost = [min(g)[1] / min(x for _, x in g) - 1 for g in groups.values() if len(g) > 1]
    regret = f"{statistics.mean(lost):.1%}" if lost else "-"
    cells = f"{len(pairs):>4} {mean:>6.1%} {middle:>6.1%} {sizes[int(0.9 * (len(sizes) - 1))]:>6.1%}"
    held = "held" if mean <= bar else "missed"
    print(f"{cells} {statistics.mean(off):>+7.1%} {scaled:>6.1%} {regret:>6}  {bar:.0%} {held}  {name}")
    return mean > bar


def fitted(runs: list[Run]) -> str:
    """Constants of the grid with a small mean absolute error, found one at a time, as a table of TOML.

    Where the runs are of several GPUs, each has its own share of the peak.
    """
    name = runs[0].row["profile"]
    begun = {"ceiling": 0.66, "memory_share": 0.8, "unfused": 0.45, "host_us_per_op": 3.0}
    kernels = ("flash", "math")
    common, error = min((_fit(runs, {"attention": x, **begun}, _ORDER) for x in kernels), key=lambda x: x[1])
    lines = [f"[profile.{name}]", *_lines(common)]
    by_gpu: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        by_gpu[run.row["gpu"]].append(run)
    own, off = [], 0.0
    for gpu, some in by_gpu.items() if len(by_gpu) > 1 else ():
        found, its = _fit(some, common, 2 * _OF_A_GPU)
        off += its * len(some) / len(runs)
        own += ["", f'[profile.{name}.gpu."{gpu}"]', *_lines({key: found.get(key) for key in _OF_A_GPU})]
    lines.append(f'from = "fitted on {len(runs)} given runs, mean error {off or error:.1%}"')
    return "\n".join([*lines, *own])


def _lines(table: dict[str, Any]) -> list[str]:
    return [f"{key} = {json.dumps(x)}" for key, x in table.items() if x is not None]


def _fit(runs: list[Run], kept: dict[str, Any], order: Iterable[str]) -> tuple[dict[str, Any], float]:
    """The constants, and their mean absolute error."""

    def error(change: dict[str, Any]) -> float:
        off = [told / run.seconds - 1 for run in runs if (told := predicted(run, change, closed=True))]
        return statistics.mean(map(abs, off)) if off else math.inf

    for key in order:
        kept = min(({**kept, key: value} for value in _GRID[key]), key=error)
    # ...and between two of the grid; what is slow in memory looks like what is slow in products
    for keys in (("ceiling", "memory_share", "unfused"), ("attention_ceiling",)):
        known = [key for key in keys if kept.get(key)]
        near = [[min(round(kept[key] * n, 3), 1.0) for n in _NEAR] for key in known]
        mixes = [dict(zip(known, values, strict=True)) for values in itertools.product(*near)]
        kept = min(({**kept, **mix} for mix in mixes), key=error)
    return kept, error(kept)


if __name__ == "__main__":
    sys.exit(main())
