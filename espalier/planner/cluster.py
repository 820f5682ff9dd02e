"""A cluster as data: what its devices and links can do, and from where each number is known.

A TOML file; ``espalier/planner/shipped`` has some that are built from published figures:

    [device]
    kind = "H100-SXM"
    memory_gb = 80
    bandwidth_gbs = 3350
    tflops = {bfloat16 = 989, float32 = 67}

    [[level]]
    name = "node"
    ranks = 8
    bandwidth_gbs = 450

    [[level]]
    name = "fabric"
    ranks = 512
    bandwidth_gbs = 50

    [host]
    memory_gb = 2000
    to_device_gbs = 50

Bandwidths are 10^9 bytes a second that one rank sends, memory is 10^9 bytes, times are microseconds. What was
measured at several sizes stands there as points, and takes the place of these rates: ``espalier calibrate``
writes such a file of the machine at hand, which goes by the name of ``here``.
"""

from __future__ import annotations

import math
import os
import tomllib
from collections.abc import Iterable, Iterator
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import Field, model_validator

from espalier.texts import (
    Count,
    MistakeError,
    Positive,
    Settings,
    did_you_mean,
    in_columns,
    names_of_tables,
    read_table,
    toml_value,
)

Source = Literal["measured", "shipped", "assumed"]
Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Share = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]
Points = tuple[tuple[Time, ...], ...]
HERE = "here"  # the cluster that was measured on this machine
KINDS = ("full", "selective", "zero-2", "zero-3", "tensor", "sequence", "context", "pipe", "divided")
"""Kinds of plans: recomputation, ZeRO with gradients and with parameters cut, 1D tensor parallelism without
and with sequence parallelism, context, pipelines, and such ones whose backward pass is divided in two."""


class Device(Settings):
    """One device.

    Attributes:
        kind: its name.
        memory_gb: its memory.
        reserved_gb: of it, what the runtime and its buffers take.
        bandwidth_gbs: of its memory.
        tflops: peaks of matrix products, by dtype.
        ceiling: the share of the peak that large products reach in training.
        attention_ceiling: the share of the peak that attention over long sequences reaches; ``ceiling`` if
            not given.
        memory_share: the share of the memory's bandwidth that other operations reach.
        host_us_per_op: that the host takes to start an operation.
        unfused: the share of the bytes of operations bound by memory that is left where kernels are fused.
        attention: its kernel: ``"flash"``, or ``"math"``, which writes all scores.
        waits: the host does the operations itself, one after another, as a CPU does; else it runs ahead.
        backward_us_per_op: the host's time for an operation of a backward pass; as of others if not given.
        in_steps: what measured products, attentions and operations reach in a step, of what they reach alone.
        step_us: the host's time for an update of the parameters, beside its operations.
        kinds: what the host's time and the computation are under a kind of plan (:data:`KINDS`), of what they
            are in plain data parallelism; two numbers each, 1 where nothing is given.
        products: measured rates of matrix products, by dtype: rows of m, n, k and 10^9 operations a second,
            at every mix of some sizes.
        attentions: of attention, alike: rows of sequence, width, and 10^9 operations a second of forward and
            of backward.
        operations: of others, by torch's name: rows of bytes read and written, and microseconds; those of
            ``"add"`` stand for all that have none.
    """

    kind: str
    memory_gb: Positive
    reserved_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    bandwidth_gbs: Positive
    tflops: dict[str, Positive]
    ceiling: Part = 0.65
    attention_ceiling: Part | None = None
    memory_share: Part = 0.8
    host_us_per_op: Time = 6.0
    unfused: Part = 1.0
    attention: Literal["flash", "math"] = "flash"
    waits: bool = False
    backward_us_per_op: Time | None = None
    step_us: Time = 0.0
    in_steps: Part = 1.0
    products: dict[str, Points] = Field(default_factory=dict)
    attentions: dict[str, Points] = Field(default_factory=dict)
    operations: dict[str, Points] = Field(default_factory=dict)
    kinds: dict[str, tuple[Positive, Positive]] = Field(default_factory=dict)


class Level(Settings):
    """Ranks that reach one another by the same kind of link, the innermost first.

    Attributes:
        name: of the level.
        ranks: that stand in one group of this level, with all levels inside.
        bandwidth_gbs: that one rank can send while all of its group do.
        latency_us: of one message.
        efficiency: the share of the bandwidth that collectives reach.
        beside: of what is sent beside the program, the share that costs it no time.
        collectives: measured, by name: rows of ranks, bytes that one of them sends, and microseconds.
    """

    name: str
    ranks: Count
    bandwidth_gbs: Positive
    latency_us: Time = 10.0
    efficiency: Part = 0.8
    beside: Share = 1.0
    collectives: dict[str, Points] = Field(default_factory=dict)


class Host(Settings):
    """The memory of a host, which the ranks of the innermost level share.

    Attributes:
        memory_gb: of one host.
        to_device_gbs: between it and one device, each way, while all devices of the host do so.
        update_gbs: that all ranks of a host together read and write in it while they update parameters there.
    """

    memory_gb: Positive = 1000.0
    to_device_gbs: Positive = 20.0
    update_gbs: Positive = 160.0


class Disk(Settings):
    """The disk of a host, which the ranks of the innermost level share.

    Attributes:
        capacity_gb: of one host.
        read_gbs, write_gbs: of all of a host's ranks together.
        directory: where a plan keeps what is on it.
    """

    capacity_gb: Positive = 2000.0
    read_gbs: Positive = 5.0
    write_gbs: Positive = 2.5
    directory: str = "offload"


class Provenance(Settings):
    """From where numbers are known.

    Attributes:
        key: of them, dotted; those below it too.
        source: ``"measured"`` on the cluster, ``"shipped"`` (published by others), or ``"assumed"``.
        spread: by how much they may be off, as a share.
    """

    key: str
    source: Source
    spread: Time = 0.2


class Cluster(Settings):
    """A cluster.

    Attributes:
        device: all are alike.
        level: from the innermost to the outermost, which holds all ranks.
        host, disk: of each host, which is a group of the innermost level.
        provenance: of numbers; what stands nowhere there is assumed.
        unusual: dotted keys of numbers that are meant though no known machine has such ones.
    """

    device: Device
    level: tuple[Level, ...]
    host: Host = Host()
    disk: Disk = Disk()
    provenance: tuple[Provenance, ...] = ()
    unusual: tuple[str, ...] = ()

    @property
    def ranks(self) -> int:
        """Of all."""
        return self.level[-1].ranks

    @property
    def memory_bytes(self) -> float:
        """What a plan may take on a rank."""
        return (self.device.memory_gb - self.device.reserved_gb) * 1e9

    def room(self, place: str, ranks: int) -> float:
        """Bytes off the device that each of so many ranks has at a place, ``"host"`` or ``"disk"``."""
        of_host = self.host.memory_gb if place == "host" else self.disk.capacity_gb
        return of_host * 1e9 / min(ranks, self.level[0].ranks)

    @model_validator(mode="after")
    def _fits(self) -> Cluster:
        mistakes: list[tuple[str, Any, str]] = []
        if not self.level:
            mistakes.append(("level", [], "expected one [[level]] or more: ranks that reach one another"))
        inner = 1
        for i, level in enumerate(self.level):
            if level.ranks % inner or (i and level.ranks == inner):
                expected = f"a multiple of the {inner} ranks of the level inside of it, and more"
                mistakes.append((f"level.{i}.ranks", level.ranks, f"expected {expected}"))
            inner = level.ranks
        d = self.device
        for dtype, peak in d.tflops.items():
            if dtype not in _DTYPES:
                mistakes.append((f"device.tflops.{dtype}", peak, did_you_mean(dtype, _DTYPES, _KNOWN)))
        if not d.tflops:
            mistakes.append(
                ("device.tflops", {}, "expected a peak for one dtype or more, as {bfloat16 = 989}")
            )
        mistakes += [*_points(self), *outside(self), *_strangers(self)]
        for name, shares in d.kinds.items():
            if name not in KINDS:
                expected = did_you_mean(name, KINDS, f"expected one of {', '.join(KINDS)}")
                mistakes.append((f"device.kinds.{name}", shares, expected))
        if d.reserved_gb >= d.memory_gb:
            mistakes.append(("device.reserved_gb", d.reserved_gb, "expected less than memory_gb"))
        if mistakes:
            raise MistakeError("Cluster", mistakes)
        return self

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """That of a file, or by name one of those that are shipped (:func:`shipped`), or of :func:`here`.

        Raises:
            ValueError: there is none; or every mistake in it.
        """
        known = shipped()
        if str(path) == HERE and not Path(path).exists():
            path = here()
            if not path.is_file():
                raise ValueError("This machine has not been measured yet: run espalier calibrate first.")
        if str(path) in known and not Path(path).exists():
            text = (_FOLDER / f"{path}.toml").read_text("utf-8")
        else:
            try:
                text = Path(path).read_text("utf-8")
            except OSError as error:
                near = did_you_mean(str(path), known, f"those that are shipped are {', '.join(known)}.")
                raise ValueError(f"The cluster {path} cannot be read: {error.strerror}; {near}") from None
        try:
            tables = tomllib.loads(text)
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"The cluster {path} is not valid TOML: {error}.") from None
        return Cluster.from_dict(tables)

    @staticmethod
    def from_dict(tables: dict[str, Any]) -> Cluster:
        """That of plain values.

        Raises:
            MistakeError: every mistake in them.
        """
        return read_table(
            Cluster, {k: x if k == "device" else _tuples(x) for k, x in _rowed(tables).items()}, ""
        )

    def told(self) -> list[str]:
        """What it has, in a few lines for people."""
        device, rows = self.device, [("device", self.device.kind)]
        rows += [
            (f"products, {dtype}", f"up to {peak:.4g} · 10^12 operations a second")
            for dtype, peak in device.tflops.items()
        ]
        rows.append(("memory", f"{device.memory_gb:.4g} GB a rank, {device.bandwidth_gbs:.4g} GB a second"))
        backward = device.backward_us_per_op
        more = "" if backward is None else f", {backward:.3g} in a backward pass"
        rows.append(
            ("host", f"{device.host_us_per_op:.3g} µs an operation{more}; {device.step_us:.4g} µs an update")
        )
        if device.products:
            rows.append(("in a step", f"{device.in_steps:.0%} of what products and operations reach alone"))

        def known(key: str) -> str:
            return " (assumed)" if self.source(key).source == "assumed" else ""

        host, disk = self.host, self.disk
        room = f"{host.memory_gb:.4g} GB{known('host.memory_gb')}"
        rows.append(
            (
                "memory of a host",
                f"{room}, updates {host.update_gbs:.3g} GB a second{known('host.update_gbs')}",
            )
        )
        speeds = f"{disk.read_gbs:.3g} GB a second read, {disk.write_gbs:.3g} written"
        rows.append(("disk of a host", f"{speeds}{known('disk')}"))
        for level in self.level:
            text = f"{level.ranks} ranks, {level.bandwidth_gbs:.4g} GB a second, {level.latency_us:.3g} µs"
            rows.append((f"links, {level.name}", f"{text}; {level.beside:.0%} beside the program"))
        return in_columns(rows, "<<")

    def to_toml(self) -> str:
        """As :meth:`load` takes it."""
        lines = [f"unusual = {toml_value(self.unusual)}", ""] if self.unusual else []
        lines += ["[device]", *_rows(self.device)]
        for level in self.level:
            lines += ["", "[[level]]", *_rows(level)]
        for name, table in (("host", self.host), ("disk", self.disk)):
            lines += ["", f"[{name}]", *_rows(table)] if table.model_fields_set else []
        for known in self.provenance:
            lines += ["", "[[provenance]]", *_rows(known)]
        return "\n".join([*lines, ""])

    def source(self, key: str) -> Provenance:
        """From where a number is known, by its dotted key: what is said of the longest part of it."""
        rows = [p for p in self.provenance if key == p.key or key.startswith(f"{p.key}.")]
        return max(rows, key=lambda p: len(p.key), default=Provenance(key=key, source="assumed", spread=0.3))

    def weakest(self, keys: Iterable[str]) -> Source:
        """The least sure of where numbers are known from: what is made of them is no surer."""
        return max((self.source(key).source for key in keys), key=_SURE.index, default="assumed")

    def span(self, ranks: int, stride: int) -> tuple[Level, int]:
        """The outermost level that a group of ranks crosses, ``stride`` apart, and how many it has inside.

        Returns:
            the level; the number of the group's ranks in one group of the level inside of it.
        """
        inner = 1
        for level in self.level:
            if ranks * stride <= level.ranks or level is self.level[-1]:
                return level, max(1, min(ranks, inner // stride))
            inner = level.ranks
        raise AssertionError


_DTYPES = ("float32", "bfloat16", "float16", "float64")
_KNOWN = f"expected one of {', '.join(_DTYPES)}"
_SURE: tuple[Source, ...] = ("measured", "shipped", "assumed")
_FOLDER = files("espalier.planner") / "shipped"


def cache() -> Path:
    """The folder of what is kept from one search to the next; ``ESPALIER_CACHE`` names another."""
    return Path(os.environ.get("ESPALIER_CACHE", Path.home() / ".cache" / "espalier"))


def here() -> Path:
    """The file of the cluster that is this machine, as ``espalier calibrate`` measured it."""
    return cache() / f"{HERE}.toml"


def shipped() -> tuple[str, ...]:
    """The names of the clusters that come with the package."""
    return names_of_tables(_FOLDER)


def _strangers(cluster: Cluster) -> list[tuple[str, Any, str]]:
    """Provenance of what there is not."""
    known = {
        "device": Device.model_fields.keys(),
        "level": {*Level.model_fields, *(level.name for level in cluster.level)},
        "host": Host.model_fields.keys(),
        "disk": Disk.model_fields.keys(),
    }
    mistakes: list[tuple[str, Any, str]] = []
    for i, row in enumerate(cluster.provenance):
        table, _, rest = row.key.partition(".")
        name = rest.partition(".")[0]
        if table not in known:
            hint = did_you_mean(
                table, known, "expected device, level, host or disk, and after a dot one of its keys"
            )
            mistakes.append((f"provenance.{i}.key", row.key, f"there is no such table; {hint}"))
        elif name and name not in known[table]:
            hint = did_you_mean(name, known[table], f"known are {', '.join(known[table])}")
            mistakes.append((f"provenance.{i}.key", row.key, f"{table} has no such key; {hint}"))
    return mistakes


def _tuples(x: Any) -> Any:
    return tuple(map(_tuples, x)) if isinstance(x, list | tuple) else x


def _rowed(tables: dict[str, Any]) -> dict[str, Any]:
    """The same with lists of points as tuples, as they are kept."""

    def rowed(table: Any) -> Any:
        if not isinstance(table, dict):
            return table
        return {
            key: {k: _tuples(x) for k, x in value.items()} if isinstance(value, dict) else value
            for key, value in table.items()
        }

    with_rows = dict(tables)
    for key, value in tables.items():
        with_rows[key] = [rowed(x) for x in value] if isinstance(value, list | tuple) else rowed(value)
    return with_rows


def _points(cluster: Cluster) -> list[tuple[str, Any, str]]:
    """What is wrong with measured points."""
    device = cluster.device
    kinds: list[tuple[str, dict[str, Points], int, str]] = [
        ("device.products", device.products, 4, "m, n, k, 10^9 operations a second"),
        (
            "device.attentions",
            device.attentions,
            4,
            "sequence, width, 10^9 operations a second, and backward",
        ),
        ("device.operations", device.operations, 2, "bytes, microseconds"),
    ]
    kinds += [
        (f"level.{i}.collectives", level.collectives, 3, "ranks, bytes, microseconds")
        for i, level in enumerate(cluster.level)
    ]
    mistakes: list[tuple[str, Any, str]] = []
    for key, tables, width, columns in kinds:
        for name, rows in tables.items():
            if not rows or any(len(row) != width for row in rows):
                mistakes.append((f"{key}.{name}", rows, f"expected rows of {columns}"))
    for key, tables, axes in (("products", device.products, 3), ("attentions", device.attentions, 2)):
        for name, rows in tables.items():
            sizes = [len({row[i] for row in rows}) for i in range(min(axes, min(map(len, rows), default=0)))]
            if len({row[:axes] for row in rows}) != math.prod(sizes):
                mistakes.append((f"device.{key}.{name}", rows, "expected a row for every mix of these sizes"))
    if device.operations and "add" not in device.operations:
        mistakes.append(
            ("device.operations", device.operations, 'expected "add", which stands for all others')
        )
    return mistakes


def _rows(table: Settings) -> list[str]:
    values = table.model_dump(exclude_none=True).items()
    return [f"{name} = {toml_value(value)}" for name, value in values if value != {}]


# ---- what numbers of a cluster there may be: one a thousand times off is of another unit

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
