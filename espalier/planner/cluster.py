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

Bandwidths are 10^9 bytes a second that one rank sends, memory is 10^9 bytes, times are microseconds.
"""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from espalier.texts import Count, MistakeError, Positive, Settings, did_you_mean, read_table

Source = Literal["measured", "shipped", "assumed"]
Part = Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)]
Time = Annotated[float, Field(ge=0, allow_inf_nan=False)]


class Device(Settings):
    """One device.

    Attributes:
        kind: its name.
        memory_gb: its memory.
        reserved_gb: of it, what the runtime and its buffers take.
        bandwidth_gbs: of its memory.
        tflops: peaks of matrix products, by dtype.
        ceiling: the share of the peak that large products reach in training.
        memory_share: the share of the memory's bandwidth that other operations reach.
        host_us_per_op: that the host takes to start an operation.
        unfused: the share of the bytes of operations bound by memory that is left where kernels are fused.
        attention: its kernel: ``"flash"``, or ``"math"``, which writes all scores.
    """

    kind: str
    memory_gb: Positive
    reserved_gb: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    bandwidth_gbs: Positive
    tflops: dict[str, Positive]
    ceiling: Part = 0.65
    memory_share: Part = 0.8
    host_us_per_op: Time = 6.0
    unfused: Part = 1.0
    attention: Literal["flash", "math"] = "flash"


class Level(Settings):
    """Ranks that reach one another by the same kind of link, the innermost first.

    Attributes:
        name: of the level.
        ranks: that stand in one group of this level, with all levels inside.
        bandwidth_gbs: that one rank can send while all of its group do.
        latency_us: of one message.
        efficiency: the share of the bandwidth that collectives reach.
    """

    name: str
    ranks: Count
    bandwidth_gbs: Positive
    latency_us: Time = 10.0
    efficiency: Part = 0.8


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
        provenance: of numbers; what stands nowhere there is assumed.
    """

    device: Device
    level: tuple[Level, ...]
    provenance: tuple[Provenance, ...] = ()

    @property
    def ranks(self) -> int:
        """Of all."""
        return self.level[-1].ranks

    @property
    def memory_bytes(self) -> float:
        """What a plan may take on a rank."""
        return (self.device.memory_gb - self.device.reserved_gb) * 1e9

    @model_validator(mode="after")
    def _fits(self) -> Cluster:
        mistakes: list[tuple[str, Any, str]] = []
        if not self.level:
            mistakes.append(("level", [], "expected one [[level]] or more: ranks that reach one another"))
        inner = 1
        for i, level in enumerate(self.level):
            if level.ranks % inner or (i and level.ranks == inner):
                told = f"a multiple of the {inner} ranks of the level inside of it, and more"
                mistakes.append((f"level.{i}.ranks", level.ranks, f"expected {told}"))
            inner = level.ranks
            if level.bandwidth_gbs > 20_000:
                mistakes.append((f"level.{i}.bandwidth_gbs", level.bandwidth_gbs, _units("bytes a second")))
        d = self.device
        if d.memory_gb > 10_000:
            mistakes.append(("device.memory_gb", d.memory_gb, _units("bytes")))
        if d.bandwidth_gbs > 100_000:
            mistakes.append(("device.bandwidth_gbs", d.bandwidth_gbs, _units("bytes a second")))
        for dtype, peak in d.tflops.items():
            if dtype not in _DTYPES:
                mistakes.append((f"device.tflops.{dtype}", peak, did_you_mean(dtype, _DTYPES, _KNOWN)))
            if peak > 100_000:
                mistakes.append((f"device.tflops.{dtype}", peak, _units("operations a second", "10^12")))
        if d.reserved_gb >= d.memory_gb:
            mistakes.append(("device.reserved_gb", d.reserved_gb, "expected less than memory_gb"))
        if mistakes:
            raise MistakeError("Cluster", mistakes)
        return self

    @staticmethod
    def load(path: str | Path) -> Cluster:
        """That of a file, or by name one of those that are shipped (:func:`shipped`).

        Raises:
            ValueError: there is none; or every mistake in it.
        """
        known = shipped()
        if str(path) in known and not Path(path).exists():
            text = (_FOLDER / f"{path}.toml").read_text("utf-8")
        else:
            try:
                text = Path(path).read_text("utf-8")
            except OSError as error:
                near = did_you_mean(str(path), known, f"those that are shipped are {', '.join(known)}")
                raise ValueError(f"The cluster {path} cannot be read: {error.strerror}; {near}.") from None
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
        given = {k: tuple(x) if k in ("level", "provenance") else x for k, x in tables.items()}
        return read_table(Cluster, given, "")

    def to_toml(self) -> str:
        """As :meth:`load` takes it."""
        lines: list[str] = ["[device]", *_rows(self.device)]
        for level in self.level:
            lines += ["", "[[level]]", *_rows(level)]
        for known in self.provenance:
            lines += ["", "[[provenance]]", *_rows(known)]
        return "\n".join([*lines, ""])

    def source(self, key: str) -> Provenance:
        """From where a number is known, by its dotted key: what is said of the longest part of it."""
        told = [p for p in self.provenance if key == p.key or key.startswith(f"{p.key}.")]
        return max(told, key=lambda p: len(p.key), default=Provenance(key=key, source="assumed", spread=0.3))

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
_FOLDER = files("espalier.planner") / "shipped"


def shipped() -> tuple[str, ...]:
    """The names of the clusters that come with the package."""
    return tuple(sorted(f.name.removesuffix(".toml") for f in _FOLDER.iterdir() if f.name.endswith(".toml")))


def _units(what: str, unit: str = "10^9") -> str:
    return f"more than any device has: expected {unit} {what}"


def _rows(table: Settings) -> list[str]:
    return [f"{name} = {_toml(value)}" for name, value in table.model_dump().items()]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{k} = {_toml(x)}" for k, x in value.items()) + "}"
    if isinstance(value, str):
        text = value.replace("\\", "\\\\").replace('"', '\\"')
        return f'"{text}"'
    return repr(value)
