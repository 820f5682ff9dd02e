"""The planner for those who call it: from a model, a batch and a cluster to a plan, and why."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from espalier.engine.dry import check_dry
from espalier.engine.model_call import LossFunction
from espalier.parallel import Plan
from espalier.parallel.plan import Precision
from espalier.parallel.several import Optimizers, as_one
from espalier.planner.cells import Recorder
from espalier.planner.cluster import Cluster, cache
from espalier.planner.explain import Checked, change, gigabytes, variants, words
from espalier.planner.prediction import Found, Prediction
from espalier.planner.search import Search
from espalier.texts import expect, whole

_NEAR = 200  # of the best are priced again for each change of the cluster
_CHECKED, _MOST = 3, 8  # of the best that fit are run dry, of so many


def recordings() -> Path:
    """The folder of recordings."""
    return cache() / "recordings"


def auto(
    model: nn.Module,
    batch: Any,
    cluster: Cluster | str | Path,
    *,
    loss_fn: LossFunction | None = None,
    optimizer: Optimizers | None = None,
    ranks: int | None = None,
    **fixed: Any,
) -> Plan:
    """The best plan for a model on a cluster: see :meth:`espalier.Plan.auto`."""
    check_dry(model, optimizer, batch)
    expect(
        "Plan.auto: the cluster",
        cluster,
        Cluster | str | Path,
        "the name of a cluster, its file, or a Cluster",
    )
    ranks = None if ranks is None else whole("ranks", ranks, 1)
    cluster = cluster if isinstance(cluster, Cluster) else Cluster.load(cluster)
    optimizer = torch.optim.AdamW(model.parameters()) if optimizer is None else as_one(optimizer)
    recorder = Recorder(model, optimizer, batch, {"loss_fn": loss_fn} if loss_fn else {}, recordings())
    base = Plan(**{key: fixed[key] for key in ("precision", "clip") if key in fixed})
    result = Search(recorder, cluster, base, ranks=ranks, fixed=fixed).run()
    return chosen(result)


def chosen(result: Found) -> Plan:
    """The best plan of a search, with why.

    Raises:
        ValueError: nothing fits.
    """
    if not result.best:
        raise ValueError(too_large(result))
    return result.best[0].plan.model_copy(update={"why": why(result)})


def why(result: Found) -> str:
    """Why the first is the first, in one sentence."""
    first = result.best[0]
    shares = sorted(first.terms.items(), key=lambda x: -x[1])[:3]
    spent = ", ".join(f"{name} {x / first.seconds:.0%}" for name, x in shares)
    text = (
        f"best of {result.scored:,} on {result.cluster.device.kind}: {first.seconds:.4g} s a step ({spent})"
    )
    if len(result.best) > 1:
        text += f"; next {words(result.best[1].plan)}, {result.best[1].seconds / first.seconds - 1:+.1%}"
    return text


def too_large(result: Found, dry: Sequence[Checked] = ()) -> str:
    """What is said where nothing fits; of what was run dry, by that."""
    least, limit = result.least, min(result.limit, result.cluster.memory_bytes)
    assert least is not None
    rows = f"{least.rows} row{'s' * (least.rows != 1)}"
    needs = next((x.bytes for x in dry if x.prediction is least), least.bytes)
    return (
        f"No plan fits: {words(least.plan)} with {rows} a micro-batch needs "
        f"least, {gigabytes(needs)} GB on a rank, of {gigabytes(limit)} that it may take. "
        f"{_room(result)}Take more ranks, or a smaller model or sequence."
    )


def _room(result: Found) -> str:
    """What lacks room off the device, if that is it, or what could be there."""
    least, cluster = result.least, result.cluster
    assert least is not None
    rooms = {place: cluster.room(place, least.plan.world_size) for place in least.away}
    full = [
        f"{n / 1e9:.4g} GB on {place}, where a rank has {rooms[place] / 1e9:.4g}"
        for place, n in least.away.items()
        if n > rooms[place]
    ]
    if full:
        return f"Beside them it has {' and '.join(full)}. "
    if "offload" in result.fixed:
        return "What is off the device, [plan] says. "
    return "States, gradients and parameters off the device leave too much on it, too. "


def more_ranks(search: Search) -> int | None:
    """The least doubling of ranks with which something fits; None: the cluster has not so many."""
    ranks = search.ranks * 2
    while ranks <= search.cluster.ranks:
        try:
            if search.again(ranks=ranks).run().best:
                return ranks
        except ValueError:
            return None
        ranks *= 2
    return None


def check(search: Search, result: Found, recorder: Recorder) -> tuple[Found, list[Checked]]:
    """Run the best dry, on their first and last stage's ranks, until some are known to fit.

    Returns:
        what was found without those that take more than they may; all dry runs.
    """
    runs: list[Checked] = []
    recorder.totals_ahead([(x.plan, place) for x in result.best[:_CHECKED] for place in _ends(x.plan)])
    for x in result.best[:_MOST]:
        run = checked(x, recorder)
        runs.append(replace(run, limit=search.limit))
        if sum(run.fits for run in runs) == _CHECKED:
            break
    wrong = [run.prediction for run in runs if not run.fits]
    best = [x for x in result.best if all(x is not y for y in wrong)]
    least = result.least if best else min(runs, key=lambda run: run.bytes).prediction
    return replace(result, best=best, least=least), runs


def checked(x: Prediction, recorder: Recorder) -> Checked:
    """Run a plan dry, on its first and last stage's ranks."""
    return Checked(x, [recorder.totals(x.plan, place) for place in _ends(x.plan)])


def _ends(plan: Plan) -> list[dict[str, int]]:
    """A rank of the first and one of the last stage, by the names of axes."""
    return [{}] if plan.pipe == 1 else [{"pipe": 0}, {"pipe": plan.pipe - 1}]


def sensitivity(search: Search, result: Found) -> list[str]:
    """What a fifth more or less of the cluster's parts does to the choice, one line each."""
    lines, first = [], result.best[0]
    near = result.best[:_NEAR]
    for name, cluster in variants(result.cluster).items():
        if (name.startswith("hosts") and not first.away) or (
            name.startswith("disks") and "disk" not in first.away
        ):
            continue
        other = search.again(cluster=cluster)
        scored = [y for x in near if (y := other.score(x.plan, x.rows)) is not None]
        if not scored:
            continue
        best = min(scored, key=lambda x: x.seconds)
        own = next(y for y in scored if y.plan == first.plan and y.rows == first.rows)
        by = own.seconds / _closed(search, first) - 1
        then = "the same plan" if best.seconds > own.seconds * 0.995 else f"then {words(best.plan)}"
        lines.append(f"{name}: {change(by)}, {then}")
    lines += _in_16_bits(search, first)
    tight = [x for x in result.best if x.bytes <= 0.8 * result.cluster.memory_bytes]
    if first.bytes > 0.8 * result.cluster.memory_bytes and tight:
        lines.append(
            f"memory -20 %: then {words(tight[0].plan)}, {tight[0].seconds / first.seconds - 1:+.1%}"
        )
    return lines


def _in_16_bits(search: Search, first: Prediction) -> list[str]:
    """What bfloat16 would do to a job in float32, where the device has faster products of it."""
    peaks = search.cluster.device.tflops
    if first.plan.precision != Precision() or peaks.get("bfloat16", 0.0) <= 1.5 * peaks.get(
        "float32", math.inf
    ):
        return []
    precision = Precision(compute="bfloat16")
    other = search.again(precision=precision)
    x = other.score(first.plan.model_copy(update={"precision": precision}), first.rows)
    if x is None:
        return []
    by = x.seconds / _closed(search, first) - 1
    return [f'precision = "bfloat16" in [plan]: {change(by)}, {gigabytes(x.bytes)} GB']


def _closed(search: Search, x: Prediction) -> float:
    again = search.score(x.plan, x.rows)
    assert again is not None
    return again.seconds
