"""The table of layouts: how each parameter lies, what its module sends, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from espalier.engine.accumulation import Count
from espalier.engine.dry import dry_engine
from espalier.layout import Layout
from espalier.layout.layout import state_name
from espalier.parallel import Plan
from espalier.tensor.by_module import by_module
from espalier.tensor.dtensor import DTensor, recorded_layout


@dataclass(frozen=True)
class LayoutRow:
    """A parameter of a module, or a module that has none and sends.

    Attributes:
        module: its name.
        parameter: its name in the module; empty if it has none.
        layout: what each axis cuts; ``"whole"`` if none does.
        forward, backward: bytes that the first rank sends for the module in a step, along all axes; with
            the module's first row.
        why: who decided, or what a trial showed.
    """

    module: str
    parameter: str
    layout: str
    forward: int
    backward: int
    why: str


@dataclass(frozen=True)
class LayoutTable:
    """What :func:`explain_layouts` found; printed, a table in which layers that are alike stand once.

    Attributes:
        plan: the plan.
        sequence: whether activations between blocks are cut over the sequence.
        why: the reason for that.
        rows: one for each parameter.
    """

    plan: Plan
    sequence: bool
    why: str
    rows: list[LayoutRow] = field(default_factory=list)

    def __str__(self) -> str:
        shown: dict[tuple[Any, ...], int] = {}
        for row in self.rows:
            module = re.sub(r"\d+", "*", row.module)
            key = module, row.parameter, row.layout, f"{row.forward:,}", f"{row.backward:,}", row.why
            shown[key] = shown.get(key, 0) + 1
        head = ("module", "parameter", "layout", "forward", "backward", "why")
        lines = [head, *((f"{m} × {n}" if n > 1 else m, *rest) for (m, *rest), n in shown.items())]
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        form = "  ".join(f"{{:{'>' if i in (3, 4) else '<'}{w}}}" for i, w in enumerate(widths))
        printed = [f"{form}  {{}}".format(*line).rstrip() for line in lines]
        between = "cut over the sequence" if self.sequence else "whole"
        reason = f" ({self.why})" if self.why else ""
        return "\n".join([f"plan            {self.plan}", f"between blocks  {between}{reason}", "", *printed])


def explain_layouts(
    model: nn.Module,
    plan: Plan | Mapping[str, Any],
    batch: Any,
    *,
    optimizer: torch.optim.Optimizer | None = None,
    layouts: Mapping[str, str] | None = None,
    count: Count | None = None,
) -> LayoutTable:
    """How a plan lays a model out, and what each module sends for it: forward and backward of one dry step.

    Args:
        model, plan, batch, optimizer, layouts, count: as for :func:`~espalier.dry_run`.

    Raises:
        ValueError: a parameter is not on ``meta``.
    """
    engine = dry_engine(model, plan, batch, optimizer=optimizer, layouts=layouts, count=count)
    with by_module(model) as traffic:
        for part in engine.cut(batch):
            engine.backward(engine(part))
        engine.finish_gradients()
    assert engine.arrangement is not None
    chosen = engine.arrangement.chosen
    table = LayoutTable(engine.plan, chosen.sequence, chosen.why.get("", ""))
    for name, module in model.named_modules():
        forward, backward = traffic.sent.get(name, (0, 0))
        own = {key: p for key, p in module.named_parameters(recurse=False) if isinstance(p, DTensor)}
        for key, p in own.items():
            why = chosen.why.get(f"{name}.{key}" if name else key, chosen.rest)
            table.rows.append(LayoutRow(name, key, _shown(recorded_layout(p)), forward, backward, why))
            forward = backward = 0
        if forward or backward:
            table.rows.append(LayoutRow(name or "(outside)", "", "", forward, backward, ""))
    return table


def _shown(layout: Layout) -> str:
    names, sizes = layout.mesh.names, layout.mesh.shape
    cut = [f"{names[a]}:{state_name(layout.axes[a])}" for a in layout.order if sizes[a] > 1]
    return " ".join(cut) or "whole"


__all__ = ["LayoutRow", "LayoutTable", "explain_layouts"]
