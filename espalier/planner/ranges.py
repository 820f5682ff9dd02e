"""What numbers of a cluster there may be: one a thousand times off is of another unit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

_GB, _GBS, _US = "10^9 bytes", "10^9 bytes a second", "microseconds (10^-6 s)"
_TFLOPS, _PART = "10^12 operations a second", "a share of 1"


class Range(NamedTuple):
    """A number of a cluster, and between what such ones lie.

    Attributes:
        key: dotted.
        given: the number.
        least, most: the range.
        unit: of the number.
        why: of what the range is, if not of all devices.
    """

    key: str
    given: float
    least: float
    most: float
    unit: str
    why: str = ""

    @property
    def told(self) -> str:
        """What is expected, and what to do."""
        who = "any machine takes" if self.unit == _US else "any device has"
        between = f"{self.least:.3g} to {self.most:.3g}{f' {self.why}' if self.why else ''}"
        return (
            f"{'less' if self.given < self.least else 'more'} than {who}: expected {self.unit}, {between}. "
            f'Check the unit; if you mean it, have unusual = ["{self.key}"] as the first line of the file'
        )


def ranges(cluster: Any) -> Iterator[Range]:
    """All numbers of a :class:`~espalier.planner.Cluster` that have a range."""
    d = cluster.device
    moved = d.bandwidth_gbs
    yield Range("device.memory_gb", d.memory_gb, 0.0005 * moved, 10_000, _GB, "by the memory's bandwidth")
    peak = max(d.tflops.values(), default=0.0)
    if peak:
        least, most = max(peak / 5, 0.01), min(peak * 2000, 100_000)
        yield Range("device.bandwidth_gbs", moved, least, most, _GBS, "by tflops")
    for dtype, x in d.tflops.items():
        yield Range(f"device.tflops.{dtype}", x, 1e-4, 100_000, _TFLOPS)
    for key in ("ceiling", "attention_ceiling", "memory_share", "unfused", "in_steps"):
        yield Range(f"device.{key}", getattr(d, key) or 1.0, 0.005, 1, _PART)
    for key, most in (("host_us_per_op", 2_000.0), ("backward_us_per_op", 2_000.0), ("step_us", 1e7)):
        yield Range(f"device.{key}", getattr(d, key) or 1.0, 0.02, most, _US)
    for i, level in enumerate(cluster.level):
        least = moved / (1_000 if i < len(cluster.level) - 1 else 30_000)
        yield Range(
            f"level.{i}.bandwidth_gbs", level.bandwidth_gbs, least, 20_000, _GBS, "beside such devices"
        )
        yield Range(f"level.{i}.latency_us", level.latency_us or 1.0, 0.02, 20_000, _US)
        yield Range(f"level.{i}.efficiency", level.efficiency, 0.005, 1, _PART)
    for key, least, most, unit in (
        ("host.memory_gb", 0.5, 100_000.0, _GB),
        ("host.to_device_gbs", 0.3, 2_000.0, _GBS),
        ("host.update_gbs", 0.3, 5_000.0, _GBS),
        ("disk.capacity_gb", 0.5, 1e7, _GB),
        ("disk.read_gbs", 0.01, 1_000.0, _GBS),
        ("disk.write_gbs", 0.01, 1_000.0, _GBS),
    ):
        table, _, name = key.partition(".")
        yield Range(key, getattr(getattr(cluster, table), name), least, most, unit)
    yield from _measured(cluster)


def _measured(cluster: Any) -> Iterator[Range]:
    """The best of measured points, beside what the device is said to have: small ones are far from it."""
    d = cluster.device
    for table, rows_of in (("products", d.products), ("attentions", d.attentions)):
        for dtype, rows in rows_of.items():
            peak = d.tflops.get(dtype, max(d.tflops.values(), default=0.0)) * 1e3
            best = max((row[-1] for row in rows if row), default=0.0)
            if peak and best:
                told = "by tflops"
                unit = "10^9 operations a second"
                yield Range(f"device.{table}.{dtype}", best, peak / 1e5, peak * 1e2, unit, told)
    kinds = [("device.operations", d.operations, d.bandwidth_gbs)]
    kinds += [(f"level.{i}.collectives", x.collectives, x.bandwidth_gbs) for i, x in enumerate(cluster.level)]
    for key, tables, rate in kinds:
        for name, rows in tables.items():
            best = max((row[-2] / row[-1] / 1e3 for row in rows if len(row) > 1 and row[-1]), default=0.0)
            if best:
                told = "by bandwidth_gbs, of bytes and microseconds"
                yield Range(f"{key}.{name}", best, rate / 1e5, rate * 1e4, _GBS, told)


def outside(cluster: Any) -> list[tuple[str, Any, str]]:
    """Mistakes: numbers out of their range, and unusual ones that there are not.

    Those that are said to be unusual, or were measured on the cluster, are what they are.
    """
    every = list(ranges(cluster))
    found: list[tuple[str, Any, str]] = [
        (x.key, x.given, x.told)
        for x in every
        if not x.least <= x.given <= x.most
        and x.key not in cluster.unusual
        and cluster.source(x.key).source != "measured"
    ]
    known = {x.key for x in every}
    for key in cluster.unusual:
        if key not in known:
            found.append(("unusual", key, f"expected keys with a range: {', '.join(sorted(known))}"))
    return found
