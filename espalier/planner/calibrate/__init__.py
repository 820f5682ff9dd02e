"""This machine as a cluster: what its products, memory, host and links do.

On a rank for each of its accelerators, where there are some; else on one for each core.
"""

from __future__ import annotations

import platform
import statistics
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from espalier.comm import all_reduce
from espalier.device import (
    accelerator,
    cores,
    count,
    host_memory,
    is_accelerator,
    name,
    room,
    synchronize,
)
from espalier.mesh import Mesh
from espalier.mesh.launch import spawn
from espalier.planner.calibrate import engine, kinds, links, local
from espalier.planner.calibrate.timing import slowed, taken_by_others
from espalier.planner.cluster import Cluster, Device, Disk, Host, Level, Provenance, cache
from espalier.planner.prices import Prices

_BUSY = 0.1  # of a core that others may have
_UPDATE = "_fused_adamw_"
_UNKNOWN = 8e9  # bytes of a host that does not tell
_LEAST = 0.03  # what was measured may be off by more than it scatters


class BusyError(ValueError):
    """Others compute on this machine."""


def calibrate(
    ranks: int | None = None,
    say: Callable[[str], object] = lambda text: None,
    *,
    anyway: bool = False,
    disk: Path | None = None,
    device_type: str | None = None,
) -> Cluster:
    """Measure this machine, in a minute.

    Args:
        ranks: that do the same at once, as in a run; by default one for each accelerator, or core of a CPU.
        say: is told what is measured; it must be a function that other processes can import.
        anyway: measure where others compute, too; the spreads say it.
        disk: a folder on the disk that is measured, where plans keep what is off the device; one beside the
            recordings by default.
        device_type: what computes: ``"cpu"``, or the accelerator's type; by default that, if there is one.

    Raises:
        BusyError: others take the cores.
        ValueError: there are fewer devices of that type than ranks, or none.
    """
    kind = device_type or accelerator() or "cpu"
    there = " or ".join(x for x in ("cpu", accelerator()) if x)
    if kind not in there.split():
        raise ValueError(f"--device {kind}: this machine has no such devices; expected {there}.")
    if is_accelerator(kind):
        n = count() if ranks is None else ranks
    else:
        n = cores() if ranks is None else ranks
    folder = cache() / "offload" if disk is None else disk.absolute()
    measured = spawn(_rank, {"data": n}, say, anyway, folder, device_type=kind)
    lost = max(max(x["lost"]) for x in measured)
    if "products" not in measured[0]:
        raise BusyError(
            f"This machine is busy: others had {lost:.0%} of a core while {n} ranks wanted all of {n}. What "
            "would be measured holds for no run. Wait until it is quiet, measure fewer ranks (-n), or take "
            "it as it is with --anyway."
        )
    uneven = measured[0]["uneven"]
    if uneven > _BUSY:
        say(
            f"This machine's cores took {uneven:.0%} longer for the same work than at their best half of the "
            "time, by their own clock: others use the real cores behind them. Predictions may be off by as "
            "much."
        )
    cluster = combined(measured, sum(x for x in (lost, uneven) if x > _BUSY))
    say("what the engine's own step takes beside its operations")
    phases = {name: statistics.mean(x["phases"][name] for x in measured) for name in measured[0]["phases"]}
    left = engine.overhead(Prices(cluster, {"data": 1}), phases)
    device: dict[str, Any] = {
        "host_us_per_op": left["forward"],
        "backward_us_per_op": left["backward"],
        "step_us": left["step"],
    }
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update=_short(device))})
    prices = Prices(cluster, {"data": 1})
    shares = [
        engine.share(prices, trial, x["steps"][i])
        for x in measured
        for i, trial in enumerate(engine.large(kind))
    ]
    reached = {"in_steps": statistics.mean(shares)}
    cluster = cluster.model_copy(update={"device": cluster.device.model_copy(update=_short(reached))})
    beside = {"kinds": kinds.factors(cluster, measured[0]["kinds"], kinds.recorders(n, kind))}
    return cluster.model_copy(update={"device": cluster.device.model_copy(update=_short(beside))})


def _rank(mesh: Mesh, say: Callable[[str], object], anyway: bool, disk: Path) -> dict[str, Any]:
    """What one rank measures."""
    tell = say if mesh.coordinate[0] == 0 else _nothing
    tell(f"whether this machine is quiet, on {mesh.size()} ranks")
    before = taken_by_others()
    lost = [_most(mesh, before.share)]
    if lost[0] > _BUSY and not anyway:
        return {"lost": lost}
    device = mesh.device()
    beside: dict[str, dict[str, Any]] = {}
    if is_accelerator(device):
        tell(f"{name(device)}: copies from and to the host, and updates there")
        beside["accelerator"] = {"kind": name(device), **local.beside_host(mesh)}
    with torch.no_grad():
        sent = links.collectives(mesh, tell)
    tell("the engine's step on three models")
    visits = [engine.visit(mesh)]
    tell("steps under each kind of plan")
    tried = zip(kinds.trials(mesh.size(), mesh.device_type), kinds.STEPS, strict=True)
    under = [kinds.measure(mesh, trial, steps) for trial, steps in tried]
    between = taken_by_others()
    alone = local.alone(mesh, (torch.float32, torch.bfloat16), tell)
    tell(f"the disk of {disk}")
    stored = links.speeds(mesh, disk)
    tell("the engine's step once more")
    visits.append(engine.visit(mesh))
    took, *steps = engine.quietest(visits)
    after = taken_by_others()
    lost.append(_most(mesh, after.share))
    uneven = _most(mesh, slowed([*before.pieces, *between.pieces, *after.pieces]))
    if beside:
        synchronize(device)
        own = beside["accelerator"]
        free = room(device)
        # what the runtime and the communicators keep, which no tensor can have
        own["reserved"] = 0.0 if free is None else max(0.0, own["memory"] - free)
    rest = {"links": sent, "phases": took, "steps": steps, "kinds": under, "disk": stored}
    return {"lost": lost, "uneven": uneven, **rest, **alone, **beside}


def _nothing(text: str) -> None:
    """Says nothing."""


def _most(mesh: Mesh, x: float) -> float:
    return float(all_reduce(torch.tensor(x), mesh, 0, "max"))


def combined(measured: Sequence[Mapping[str, Any]], lost: float) -> Cluster:
    """A cluster of what the ranks measured; ``lost`` is what others had of a core meanwhile, as a share."""
    n, here = len(measured), host_memory() or _UNKNOWN
    products = {dtype: _mean([x["products"][dtype] for x in measured]) for dtype in measured[0]["products"]}
    attentions = {
        dtype: _mean([x["attentions"][dtype] for x in measured]) for dtype in measured[0]["attentions"]
    }
    operations = {
        name: _grows(_mean([x["operations"][name] for x in measured])) for name in measured[0]["operations"]
    }
    spreads = {kind: statistics.median(x) for kind, x in measured[0]["spreads"].items()}
    copied, took = operations["copy_"][-1]
    there: Mapping[str, Any] | None = measured[0].get("accelerator")
    if there:  # counted is what it writes to as read, too: so it is by a CPU alone
        copied *= 2 / 3
    device: dict[str, Any] = {
        "kind": there["kind"] if there else _name(),
        "memory_gb": round(there["memory"] / 1e9 if there else here / n / 1e9, 3),
        "bandwidth_gbs": copied / took / 1e3,
        "tflops": {dtype: max(row[-1] for row in rows) / 1e3 for dtype, rows in products.items()},
        "ceiling": 1.0,
        "memory_share": 1.0,
        "host_us_per_op": 0.0,
        "waits": there is None,
        "products": products,
        "attentions": attentions,
        "operations": operations,
    }
    if there:
        device["reserved_gb"] = round(max(x["accelerator"]["reserved"] for x in measured) / 1e9, 3)
    sent = [x["links"] for x in measured]
    level: dict[str, Any] = {"name": "machine", "ranks": n, "bandwidth_gbs": device["bandwidth_gbs"]}
    if n > 1:
        tables = {
            name: tuple((float(n), *row) for row in _grows(_mean([x["collectives"][name] for x in sent])))
            for name in sent[0]["collectives"]
        }
        last = tables["send"][-1]
        level |= {"bandwidth_gbs": last[1] / last[2] / 1e3, "latency_us": tables["send"][0][2]}
        level |= {"efficiency": 1.0, "collectives": tables}
        level["beside"] = statistics.mean(x["beside"] for x in sent)
    known = [
        Provenance(key=key, source="measured", spread=round(max(_LEAST, *spread) + lost, 3))
        for key, spread in (
            ("device", (spreads["products"], spreads["operations"])),
            ("device.tflops", (spreads["products"], _LEAST)),
            ("device.memory_share", (spreads["operations"], _LEAST)),
            ("level", (statistics.median(sent[0]["spreads"] or [0.0]), _LEAST)),
        )
    ]
    host = {"memory_gb": round(here / 1e9, 3), "to_device_gbs": device["bandwidth_gbs"] / 2}
    if there:
        host |= {key: there[key] for key in ("to_device_gbs", "update_gbs")}
        spread = round(max(_LEAST, there["spread"]) + lost, 3)
        known.append(Provenance(key="host", source="measured", spread=spread))
    else:
        if _UPDATE in operations:
            updated, took = operations[_UPDATE][-1]
            host["update_gbs"] = n * updated / took / 1e3
        known.append(Provenance(key="host", source="measured", spread=known[0].spread))
    disk: dict[str, Any] = dict(measured[0].get("disk", {}))
    if disk:
        spread = round(max(_LEAST, disk.pop("spread")) + lost, 3)
        known.append(Provenance(key="disk", source="measured", spread=spread))
    return Cluster(
        device=Device(**_short(device)),
        level=(Level(**_short(level)),),
        host=Host(**_short(host)),
        disk=Disk(**_short(disk)),
        provenance=tuple(known),
    )


def _mean(rows: Sequence[Sequence[Sequence[float]]]) -> list[tuple[float, ...]]:
    """Of what several ranks measured of the same, number by number."""
    return [tuple(map(statistics.mean, zip(*same, strict=True))) for same in zip(*rows, strict=True)]


def _grows(points: Sequence[tuple[float, ...]]) -> tuple[tuple[float, float], ...]:
    """Points by size, none of which takes less than a smaller one."""
    rising: list[tuple[float, float]] = []
    for size, took in sorted(points):
        if not rising or size > rising[-1][0]:
            rising.append((size, max(took, rising[-1][1] if rising else 0.0)))
    return tuple(rising)


def _short(x: Any) -> Any:
    """The same with numbers of four digits, and lists as tuples."""
    if isinstance(x, Mapping):
        return {key: _short(value) for key, value in x.items()}
    if isinstance(x, list | tuple):
        return tuple(map(_short, x))
    return float(f"{x:.4g}") if isinstance(x, float) else x


def _name() -> str:
    """What the CPU is called."""
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text("utf-8", "replace").splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine() or "CPU"


show = partial(print, flush=True)
"""Says a line on the terminal, from whichever process."""
