"""The table of layouts: how each parameter lies, what its module sends, and why."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
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

_OUTSIDE = "(outside)"
_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # of a list's element


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

    In a pipeline each module's bytes are those of the first rank of its stage.

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
            module = _NUMBER.sub("*", row.module)
            key = module, row.parameter, row.layout, f"{row.forward:,}", f"{row.backward:,}", row.why
            shown[key] = shown.get(key, 0) + 1
        head = ("module", "parameter", "layout", "forward", "backward", "why")
        lines = [head, *((f"{m} × {n}" if n > 1 else m, *rest) for (m, *rest), n in shown.items())]
        sent = [sum(getattr(row, way) for row in self.rows) for way in ("forward", "backward")]
        lines.append(("(all)", "", "", *(f"{n:,}" for n in sent), ""))
        widths = [max(len(line[i]) for line in lines) for i in range(5)]
        form = "  ".join(f"{{:{'>' if i in (3, 4) else '<'}{w}}}" for i, w in enumerate(widths))
        printed = [f"{form}  {{}}".format(*line).rstrip() for line in lines]
        between = "cut over the sequence" if self.sequence else "whole"
        reason = f" ({self.why})" if self.why else ""
        return "\n".join(
            [
                f"plan            {self.plan}",
                f"between blocks  {between}{reason}",
                "bytes sent      by one rank in a step; of modules that stand several times (×), by each",
                "",
                *printed,
            ]
        )


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
    made = plan if isinstance(plan, Plan) else Plan.from_dict(plan)
    given: dict[str, Any] = {"optimizer": optimizer, "layouts": layouts, "count": count}
    if made.pipe == 1:
        return _explained(model, made, batch, None, given)
    rows: dict[tuple[str, str], LayoutRow] = {}
    for stage in range(made.pipe):
        place = tuple(stage if name == "pipe" else 0 for name in made.axes)
        table = _explained(model, made, batch, place, given)
        for row in table.rows:
            if row.module == _OUTSIDE:
                row = replace(row, module=f"{_OUTSIDE}, rank {stage} of the pipe")
            key = row.module, row.parameter
            before = rows.get(key, replace(row, forward=0, backward=0))
            sent = {way: getattr(row, way) + getattr(before, way) for way in ("forward", "backward")}
            rows[key] = replace(row, **sent)
    return replace(table, rows=list(rows.values()))


def _explained(
    model: nn.Module, plan: Plan, batch: Any, coordinate: tuple[int, ...] | None, given: Mapping[str, Any]
) -> LayoutTable:
    """The table as one rank sees it."""
    engine = dry_engine(model, plan, batch, coordinate=coordinate, **given)
    model = engine.module
    with by_module(model) as traffic:
        engine.accumulate(engine.cut(batch))
        engine.finish_gradients()
    assert engine.arrangement is not None
    chosen = engine.arrangement.chosen
    table = LayoutTable(engine.plan, chosen.sequence, chosen.why.get("", ""))
    names = {id(p): name for name, p in model.named_parameters()}  # the first of those that are tied
    for name, module in model.named_modules():
        forward, backward = traffic.sent.get(name, (0, 0))
        for key, p in module.named_parameters(recurse=False):
            if not isinstance(p, DTensor):
                continue
            own = f"{name}.{key}" if name else key
            why = chosen.why.get(names[id(p)], chosen.rest)
            if names[id(p)] != own:
                why = f"tied to {names[id(p)]}"
            table.rows.append(LayoutRow(name, key, _shown(recorded_layout(p)), forward, backward, why))
            forward = backward = 0
        if forward or backward:
            table.rows.append(LayoutRow(name or _OUTSIDE, "", "", forward, backward, ""))
    return table


def _shown(layout: Layout) -> str:
    names, sizes = layout.mesh.names, layout.mesh.shape
    cut = [f"{names[a]}:{state_name(layout.axes[a])}" for a in layout.order if sizes[a] > 1]
    return " ".join(cut) or "whole"


__all__ = ["LayoutRow", "LayoutTable", "explain_layouts"]
