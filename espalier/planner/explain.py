"""What a search found, as text: the best, what time goes to, why not others, what would change it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from espalier.parallel.schedules import Timeline
from espalier.parallel.schedules.simulate import terminal
from espalier.planner.cluster import Cluster
from espalier.planner.compose import Totals
from espalier.planner.events import Step, drawn
from espalier.planner.prediction import Found, Prediction, plan_table
from espalier.texts import in_columns, toml_value

_SHOWN = 8
_WIDE = 118  # characters of a timeline
_OF_TERMS = {
    "compute": ("device.tflops", "device.ceiling", "device.bandwidth_gbs"),
    "host": ("device.host_us_per_op",),
    "update": ("device.bandwidth_gbs", "device.memory_share"),
    "bubble": ("device.tflops", "device.ceiling"),
    "offload": ("host", "disk"),
}
_NEXT = tuple(
    "expert replicate tensor tensor_mode pipe zero recompute sequence_parallel "
    "async_tensor_parallel context schedule offload".split()
)
_UNSEARCHED = (
    "branches, other orders of the axes, shares of what is off the device, recompute_inputs, recomputation "
    "of some blocks alone"
)
_DEVICE = (
    (("host_us_per_op", "backward_us_per_op"), "host time"),
    (("ceiling", "attention_ceiling"), "products and attention"),
)
"""Numbers of a device that are varied together."""
_PLACES = {"host": "in the host's memory", "disk": "on disk"}


@dataclass(frozen=True)
class Checked:
    """A plan that was run dry, beside what was predicted of it.

    Attributes:
        prediction: that.
        totals: of the first stage's rank, and in a pipeline of the last one's.
        limit: bytes that it may take.
    """

    prediction: Prediction
    totals: Sequence[Totals]
    limit: float = math.inf

    @property
    def fits(self) -> bool:
        """Whether it takes no more than it may."""
        return self.bytes <= self.limit

    @property
    def bytes(self) -> int:
        """The most that lives at once on these ranks."""
        return max(t.peak_bytes for t in self.totals)

    @property
    def away(self) -> dict[str, int]:
        """The most bytes that lie off the device of one of them, by place."""
        places = dict.fromkeys(place for t in self.totals for place in t.away_bytes)
        return {place: max(t.away_bytes.get(place, 0) for t in self.totals) for place in places}

    @property
    def sent(self) -> dict[str, int]:
        """Bytes that these ranks send, the most along each axis."""
        by_axis: dict[str, int] = {}
        for totals in self.totals:
            own: dict[str, int] = {}
            for (axis, _), n in totals.sent.items():
                own[axis] = own.get(axis, 0) + n
            for axis, n in own.items():
                by_axis[axis] = max(by_axis.get(axis, 0), n)
        return by_axis


def gigabytes(count: float) -> str:
    """So many bytes in 10^9 bytes: two digits after the point; of less than one, three in all."""
    return f"{count / 1e9:.2f}" if count >= 1e9 or not count else f"{count / 1e9:.3g}"


def change(share: float) -> str:
    """What is so much more or less, in percent."""
    return f"{round(share, 3) + 0.0:+.1%}"  # never -0.0


def words(plan: Any) -> str:
    """A plan in a few words."""
    said = [
        f"{key} {getattr(plan, key)}" for key in ("pipe", "replicate", "data", "context", "expert", "tensor")
    ]
    said = [x for x in said if not x.endswith(" 1")]
    said += [plan.tensor_mode] if plan.tensor_mode != "1d" else []
    if plan.pipe > 1:
        said.append(plan.schedule + (f" v{plan.stages_per_rank}" if plan.stages_per_rank > 1 else ""))
    said += [f"ZeRO-{plan.zero}"] if plan.zero else []
    said += ["sequence"] if plan.sequence_parallel else []
    said += ["asynchronous"] if plan.async_tensor_parallel else []
    said += [f"recompute {plan.recompute}"] if plan.recompute != "none" else []
    by_place: dict[str, list[str]] = {}
    for kind, share in plan.offload.away.items():
        by_place.setdefault(share.place, []).append(kind)
    said += [f"{' + '.join(kinds)} on {place}" for place, kinds in by_place.items()]
    return " ".join(said) or "one rank"


def report(
    result: Found,
    checked: Sequence[Checked] = (),
    changes: Sequence[str] = (),
    timeline: Timeline | None = None,
    step: Step | None = None,
) -> str:
    """All of it, as text; with the step of the best one, and of its pipeline."""
    lines = []
    if result.best:
        first = result.best[0]
        lines += [*_table([*result.best[:_SHOWN], *result.plain], result), "", "time of the first:"]
        shares = sorted(first.terms.items(), key=lambda x: -x[1])
        cluster = result.cluster
        rows: list[tuple[str, ...]] = [
            (f"  {name}", f"{x:.4g} s", f"{x / first.seconds:.1%}", cluster.weakest(constants(name)))
            for name, x in shares
        ]
        rows += [
            (f"  ({name}, beside the program)", f"{x:.4g} s", "", "") for name, x in first.beside.items()
        ]
        lines += [*in_columns(rows, "<>><"), "", "memory of its fullest rank, 10^9 bytes:"]
        lines += in_columns([(f"  {k}", gigabytes(n)) for k, n in first.memory.items()], "<>")
        lines += off_the_device(first, cluster)
        if timeline is not None and len(timeline.spans) <= _SHOWN:
            of = f"{timeline.schedule.micro_batches} of {first.plan.accumulate} micro-batches"
            rows_of = terminal(timeline, _WIDE, colours=False)
            lines += ["", f"its pipeline's step, {of}:", *(f"  {line.plain.rstrip()}" for line in rows_of)]
        lines += _step(first, step) if step is not None else []
    else:
        lines += ["Nothing fits.", "", *_table([x for x in (result.least, *result.plain) if x], result)]
    if checked:
        lines += ["", "run dry, as one rank of the first and one of the last stage:"]
        lines += in_columns([("  plan", "predicted GB", "dry GB", ""), *map(_checked, checked)], "<>><")
    if result.best:
        lines += ["", "why not:", *(f"  {x}" for x in why_not(result))]
    if changes:
        lines += ["", "what would change it:", *(f"  {x}" for x in changes)]
    lines += ["", *origins(result)]
    if result.best:
        lines += ["", to_toml(plan_table(result.best[0].plan))]
    return "\n".join(lines)


def _step(first: Prediction, step: Step) -> list[str]:
    of = f"{step.micro_batches} of {first.plan.accumulate} micro-batches"
    at = " of the first stage" if first.plan.pipe > 1 else ""
    return [
        "",
        f"what a rank{at} does when, {of}:",
        *(f"  {line}" for line in drawn(step.ranks[0], step.seconds, _WIDE)),
    ]


def _checked(x: Checked) -> tuple[str, str, str, str]:
    left = "" if x.fits else f"left out: more than the {gigabytes(x.limit)} that it may take"
    left = left or " ".join(f"and {gigabytes(n)} on {place}" for place, n in x.away.items())
    return f"  {words(x.prediction.plan)}", gigabytes(x.prediction.bytes), gigabytes(x.bytes), left


def _table(rows: Iterable[Prediction], result: Found) -> list[str]:
    head = ("", "plan", "rows", "step s", "±", "from", "samples/s", "MFU", "GB", "GB sent")
    plain = {id(x) for x in result.plain}
    lines = [head]
    for number, x in enumerate(rows):
        name = "plain" if id(x) in plain and number >= min(len(result.best), _SHOWN) else f"{number + 1}"
        sent = " ".join(f"{axis} {n / 1e9:.3g}" for axis, n in x.sent.items() if n)
        size = f"{gigabytes(x.bytes)}{'' if x.fits else ' (too much)'}"
        known = result.cluster.weakest(key for term, n in x.terms.items() if n for key in constants(term))
        speed = f"{result.batch / x.seconds:.4g}", f"{result.mfu(x):.1%}"
        time = f"{x.seconds:.4g}", f"{x.error:.0%}", known, *speed
        size += "".join(f" + {gigabytes(n)} on {place}" for place, n in x.away.items())
        lines.append((name, words(x.plan), str(x.rows), *time, size, sent))
    return in_columns(lines, "<<>>><>>><")


def off_the_device(x: Prediction, cluster: Cluster) -> list[str]:
    """What of a rank lies where, of how much room it has there, one line each place."""
    rooms = {place: cluster.room(place, x.plan.world_size) / 1e9 for place in x.away}
    return [
        f"beside that, {gigabytes(n)} GB {_PLACES[place]}, of {rooms[place]:.4g} GB"
        for place, n in x.away.items()
    ]


def constants(term: str) -> tuple[str, ...]:
    """The keys of a cluster from which a term of a step's time is made."""
    return _OF_TERMS.get(term, ("level",))


def why_not(result: Found) -> list[str]:
    """One line for each value that the first could have otherwise: the best that has, and what it costs."""
    first, lines = result.best[0], []
    for key in _NEXT:
        own = getattr(first.plan, key)
        if key in result.fixed or (key == "schedule" and first.plan.pipe == 1):
            continue
        others = [x for x in result.best if getattr(x.plan, key) != own]
        if key == "schedule":
            others = [x for x in others if x.plan.pipe > 1]
        if not others:
            if key in result.tried:
                lines.append(f"{key}: with another than {_said(own)}, of what was tried, nothing fits")
            continue
        x = min(others, key=lambda x: x.seconds)
        names = first.terms.keys() | x.terms.keys()
        worst = max(sorted(names), key=lambda n: x.terms.get(n, 0.0) - first.terms.get(n, 0.0))
        more = x.terms.get(worst, 0.0) - first.terms.get(worst, 0.0)
        by = x.seconds / first.seconds - 1
        same = " (within the error)" if by < first.error / 3 else ""
        other = (
            f"{change(by)}{same}, {worst} {more:+.3g} s ({words(x.plan)}, {x.rows} row{'s' * (x.rows != 1)})"
        )
        lines.append(f"{key} {_said(getattr(x.plan, key))}: {other}")
    return lines


def _said(value: Any) -> str:
    return str(value) or "none"


def origins(result: Found) -> list[str]:
    """From where the figures are, and what was not looked at."""
    cluster = result.cluster
    keys = ["device.tflops", "device.ceiling", "device.bandwidth_gbs", "device.host_us_per_op", "level"]
    keys += ["host", "disk"] if any(x.away for x in result.best[:_SHOWN]) else []
    known = [(f"  {key}", cluster.source(key).source, f"± {cluster.source(key).spread:.0%}") for key in keys]
    lines = [f"{result.scored:,} plans scored from {result.recorded} new dry runs; constants:"]
    lines += in_columns(known, "<<>")
    lines += [
        "assumed: no stragglers, experts routed evenly, the data axis hides behind 90 % of what it may.",
        f"not searched: {_UNSEARCHED}: give them in [plan].",
    ]
    if result.refused:
        lines.append("refused:")
        lines += [f"  {key}: {why}".splitlines()[0] for key, why in list(result.refused.items())[:5]]
    return lines


def to_toml(table: Mapping[str, Any]) -> str:
    """The table ``[plan]`` to paste."""
    return "\n".join(["[plan]", *(f"{key} = {toml_value(x)}" for key, x in table.items())])


def to_dict(result: Found, checked: Sequence[Checked] = ()) -> dict[str, Any]:
    """As JSON takes it."""
    return {
        "cluster": result.cluster.model_dump(mode="json"),
        "batch": result.batch,
        "flops": result.flops,
        "best": [_numbers(x, result) for x in result.best[:_SHOWN]],
        "plain": [_numbers(x, result) for x in result.plain],
        "least": _numbers(result.least, result) if result.least else None,
        "scored": result.scored,
        "recorded": result.recorded,
        "refused": dict(result.refused),
        "checked": [
            {
                "plan": plan_table(x.prediction.plan),
                "bytes": x.bytes,
                "away": x.away,
                "sent": x.sent,
                "fits": x.fits,
            }
            for x in checked
        ],
    }


def _numbers(x: Prediction, result: Found) -> dict[str, Any]:
    return {**x.to_dict(), "mfu": result.mfu(x)}


def variants(cluster: Cluster) -> dict[str, Cluster]:
    """The same cluster with one thing a fifth more or less."""
    clusters = {}
    for sign, factor in (("-20 %", 0.8), ("+20 %", 1.2)):
        levels = tuple(
            x.model_copy(update={"bandwidth_gbs": x.bandwidth_gbs * factor}) for x in cluster.level
        )
        device = cluster.device
        clusters[f"links {sign}"] = cluster.model_copy(update={"level": levels})
        for keys, name in _DEVICE:
            own = {key: getattr(device, key) for key in keys if getattr(device, key) is not None}
            top = math.inf if "host" in name else 1.0
            to = {key: min(top, x * factor) for key, x in own.items()}
            clusters[f"{name} {sign}"] = cluster.model_copy(update={"device": device.model_copy(update=to)})
        host = cluster.host.model_copy(
            update={
                "to_device_gbs": cluster.host.to_device_gbs * factor,
                "update_gbs": cluster.host.update_gbs * factor,
            }
        )
        clusters[f"hosts {sign}"] = cluster.model_copy(update={"host": host})
        speeds = {key: getattr(cluster.disk, key) * factor for key in ("read_gbs", "write_gbs")}
        clusters[f"disks {sign}"] = cluster.model_copy(
            update={"disk": cluster.disk.model_copy(update=speeds)}
        )
    return clusters
