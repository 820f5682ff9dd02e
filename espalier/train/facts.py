"""What a run is: its plan and ranks, which rank holds what, what it is made of, what its devices can do."""

from __future__ import annotations

import math
import os
import platform
import socket
import sys
import time
from collections.abc import Mapping
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch
from torch import nn

from espalier.blocks import parts
from espalier.comm.control import gather_objects
from espalier.device import EXACT, FASTER, is_accelerator, is_exact, names
from espalier.engine.checkpointing import tree_of
from espalier.layout import Layout, local_box
from espalier.planner import Cluster, shipped
from espalier.texts import dtype_name

SHOWN = 64
"""Ranks that are told one by one: of more the first."""

_PACKAGES = ("espalier", "torch", "numpy", "transformers", "tokenizers", "safetensors")


def facts_of(engine: Any, known: Mapping[str, Any]) -> dict[str, Any]:
    """What a run is, in values that JSON knows; every rank must call. Complete on the first rank alone.

    Args:
        engine: whose parameters are laid out.
        known: what the caller knows: ``steps``, ``tokens``, ``flops``, ``entropy``, ``job``, ``unit``.
    """
    mesh, plan = engine.mesh, engine.plan
    device = mesh.device()
    parameters = sum(p.numel() for p in engine.module.parameters())
    here = {
        "coordinate": dict(zip(mesh.names, mesh.coordinate, strict=True)),
        "host": socket.gethostname(),
        "pid": os.getpid(),
        "device": names()[device.index or 0] if is_accelerator(device) else platform.machine() + " CPU",
        "rate": _measured_rate(device, compute_dtype(engine)),
    }
    ranks = gather_objects(here, mesh)
    own = holdings(engine)
    holds = gather_objects(own if mesh.rank < SHOWN else None, mesh)
    facts = {key: value for key, value in known.items() if value is not None}
    if "flops" not in facts and known.get("tokens"):
        facts["flops"] = 6 * parameters * known["tokens"]
    return {
        **facts,
        "parameters": parameters,
        "model": type(engine.module).__name__,
        "optimizer": type(engine.optimizer).__name__,
        "plan": {"words": str(plan), "axes": plan.axes, "ranks": mesh.size()},
        "mesh": {"names": mesh.names, "shape": mesh.shape},
        "ranks": ranks[:SHOWN],
        "peak": _peak(device, ranks, compute_dtype(engine)),
        "holds": holds[:SHOWN],
        "versions": versions(),
    }


def versions() -> dict[str, str]:
    """Of what a run is made of."""
    known = {"python": platform.python_version()}
    for name in _PACKAGES:
        if name in sys.modules:
            try:
                known[name] = version(name)
            except PackageNotFoundError:  # run from its source
                known[name] = str(getattr(sys.modules[name], "__version__", "?"))
    return {**known, "system": platform.platform()}


def held_by_kind(engine: Any) -> dict[str, int]:
    """Bytes of this rank now, by kind: parameters, gradients, states, ...; on all places together."""
    return {kind.name: kind.total for kind in engine.memory().kinds}


def timeline_of(engine: Any) -> dict[str, Any]:
    """When the ranks of the first pipeline did what in the last step, and what its schedule says."""
    measured = engine.timeline()
    table = {"schedule": str(measured.schedule).partition("\n")[0], "bubble": measured.bubble_fraction}
    for name, timeline in {"measured": measured, "predicted": measured.predicted()}.items():
        table[name] = [
            [[str(action.kind), action.stage, action.micro_batch, start, end] for action, start, end in row]
            for row in timeline.spans
        ]
    return table


# ---- which rank holds what


def holdings(engine: Any) -> list[dict[str, Any]]:
    """What this rank holds of each part of the model, in order.

    Of each part: its ``name``, its ``bytes`` in all and ``here``, and of its largest parameter the
    ``parameter``, its ``shape``, and the share of its first and last dim that is here, as
    ``[start, end, start, end]``: ``box``; ``states``: the same of the optimizer's states.
    """
    module, mesh = engine.module, engine.mesh
    data, saves = engine.passes.data, engine.passes.saves
    with torch.no_grad():
        lies = {name: layout for name, (_, layout, _) in tree_of(module, None, mesh, saves).items()}
        with data.precise(on_device=False):
            tree = tree_of(module, engine.optimizer, mesh, saves)
    states: dict[str, Layout] = {}
    for name, (local, layout, _) in tree.items():
        if name.startswith("optimizer.state.") and local.ndim:
            states.setdefault(name.removeprefix("optimizer.state.").rpartition(".")[0], layout)
    return [
        row for name, named in _parts(module).items() if (row := _part(name, named, lies, states)) is not None
    ]


def _parts(module: nn.Module) -> dict[str, dict[str, torch.Tensor]]:
    """The parameters of each block, and of what stands between them, by the names of both."""
    prefixes = [name for name in parts(module) if name]
    tensors: dict[str, dict[str, torch.Tensor]] = {}
    for name, p in module.named_parameters():
        inside = [prefix for prefix in prefixes if name.startswith(f"{prefix}.")]
        key = inside[0] if inside else name.rpartition(".")[0] or name
        tensors.setdefault(key, {})[name] = p
    return tensors


def _part(
    name: str, named: Mapping[str, torch.Tensor], lies: Mapping[str, Layout], states: Mapping[str, Layout]
) -> dict[str, Any] | None:
    largest = max(named, key=lambda key: named[key].numel())
    shape = tuple(named[largest].shape)
    whole = sum(p.numel() * p.element_size() for p in named.values())
    here = 0
    for key, p in named.items():
        layout = lies.get(f"model.{key}")
        if layout is not None and layout.mesh.is_member:
            here += math.prod(local_box(layout).sizes) * p.element_size()
    fields = {"name": name, "bytes": whole, "here": here, "parameter": largest, "shape": shape}
    own, state = lies.get(f"model.{largest}"), states.get(largest)
    return {**fields, "box": _share(own), "states": _share(state)}


def _share(layout: Layout | None) -> list[float] | None:
    """Of the first and the last dim, the part that is here; None where nothing is."""
    if layout is None or not layout.mesh.is_member:
        return None
    box, shape = local_box(layout), layout.shape
    if not math.prod(box.sizes):
        return None
    edges: list[float] = []
    for dim in (0, len(shape) - 1) if len(shape) > 1 else (0,):
        edges += [box.offsets[dim] / shape[dim], (box.offsets[dim] + box.sizes[dim]) / shape[dim]]
    return [*edges, 0.0, 1.0][:4] if shape else [0.0, 1.0, 0.0, 1.0]


# ---- what devices can do


def compute_dtype(engine: Any) -> torch.dtype:
    """In which most of the work is done."""
    precision = engine.plan.precision
    named = precision.parameters or precision.compute.rpartition("-")[2]
    if named != "float32":
        return getattr(torch, named)
    return next((p.dtype for p in engine.module.parameters()), torch.float32)


def slow_products(engine: Any) -> str | None:
    """What is said at the start of a run whose accelerators multiply slower than they could."""
    if (
        not is_accelerator(engine.mesh.device())
        or compute_dtype(engine) is not torch.float32
        or not is_exact()
    ):
        return None
    return f"float32 products are {EXACT}. {FASTER}, is quicker."


def _peak(device: torch.device, ranks: list[dict[str, Any]], dtype: torch.dtype) -> dict[str, Any]:
    """Operations a second of all ranks at their best, and from where that is known."""
    kind = dtype_name(dtype)
    if is_accelerator(device):
        known = published(ranks[0]["device"], kind)
        if known is not None:
            return {"rate": known[1] * len(ranks), "source": f"{known[0]}, {kind}, by its data sheet"}
    rate = sum(rank["rate"] for rank in ranks)
    return {"rate": rate, "source": f"products of two {kind} matrices on all ranks at once, measured"}


def published(device: str, dtype: str) -> tuple[str, float] | None:
    """The kind of a device, and its operations a second by its data sheet, if it is one that we know."""
    fits = []
    for name in shipped():
        kind = Cluster.load(name).device
        chip, _, form = kind.kind.partition("-")
        if chip.lower() in device.lower() and dtype in kind.tflops:
            near = form.lower()[:4] in device.lower()
            fits.append((near, -len(kind.kind), kind.kind, kind.tflops[dtype] * 1e12))
    if not fits:
        return None
    *_, name, rate = max(fits)
    return name, rate


def _measured_rate(device: torch.device, dtype: torch.dtype) -> float:
    """Operations a second of a product of matrices, here, while all ranks do the same."""
    n = 4096 if is_accelerator(device) else 384
    a = torch.ones(n, n, dtype=dtype, device=device)
    best = math.inf
    for _ in range(4):
        begun = time.perf_counter()
        (a @ a)[0, 0].item()
        best = min(best, time.perf_counter() - begun)
    return 2 * n**3 / best
