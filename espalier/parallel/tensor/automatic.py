"""Which parameters the tensor axis cuts, and what lies between blocks: a table, or what trials show."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import nn

from espalier.mesh import Mesh
from espalier.parallel.tensor.infer import Group, infer, run_once
from espalier.parallel.tensor.tables import Table, by_table
from espalier.parallel.tensor.trial import Calls, Kind, kinds_of, try_out

_TABLE = "the table"


@dataclass(frozen=True)
class Chosen:
    """Layouts on the tensor axis.

    Attributes:
        cut: for each parameter that is cut, by name, the dim.
        sequence: whether activations between blocks are cut over the sequence.
        rest: the reason for parameters of which ``why`` says nothing.
        why: for parameters by name, and for ``""`` (the sequence), the reason.
    """

    cut: dict[str, int]
    sequence: bool
    rest: str = ""
    why: dict[str, str] = field(default_factory=dict)


def choose(
    model: nn.Module,
    ranks: int,
    blocks: Mapping[str, nn.Module],
    *,
    table: Table | None = None,
    batch: Any = None,
    rows: int = 1,
    sequence: bool | Literal["auto"] = False,
) -> Chosen | None:
    """The layouts of a model on a tensor axis.

    A table decides on the parameters. Without one they are tried: each kind of block in all ways to cut the
    groups of parameters that the rules allow to cut (see :mod:`~espalier.parallel.tensor.infer`). With
    ``sequence="auto"`` both boundaries are tried, and the cheaper one is taken for all blocks.

    Args:
        ranks: of the tensor axis.
        blocks: by name.
        batch: the model's arguments, of one row.
        rows: that a rank computes at a time.

    Returns:
        None if a batch is needed and missing.
    """
    if ranks == 1:
        return Chosen({}, False, "no tensor axis")
    described = None if table is None else by_table(model, table)
    if described is not None and sequence != "auto":
        return Chosen(described, sequence, _TABLE)
    if batch is None:
        return None
    calls = Calls()

    def watching(copy: nn.Module) -> AbstractContextManager[None]:
        return calls.watching({name: copy.get_submodule(name) for name in blocks})

    if described is None:
        groups = infer(model, batch, ranks, watching)
    else:
        groups = [Group({p: d for p, d in described.items() if p.startswith(f"{name}.")}) for name in blocks]
        with suppress(Exception):  # then nothing is tried
            run_once(model, batch, watching)
    boundaries = (False, True) if sequence == "auto" else (sequence,)
    kinds, mesh = kinds_of(blocks, groups), Mesh.dry({"tensor": ranks})
    for kind in kinds:
        if kind.names[0] in calls.of and (kind.groups or len(boundaries) > 1):
            try_out(kind, calls.of[kind.names[0]], mesh, rows, boundaries, free=described is None)
    tried = [kind for kind in kinds if kind.costs]
    totals = {s: sum(len(k.names) * k.costs[k.best(s), s].total for k in tried) for s in boundaries}
    cuts = min(totals, key=lambda s: (totals[s], s))
    chosen = Chosen(
        described or {}, cuts, "a cut of it would be undone at once" if described is None else _TABLE
    )
    chosen.why[""] = _of_boundary(cuts, totals, bool(tried))
    if described is None:
        _take(chosen, groups, kinds)
    return chosen


def _take(chosen: Chosen, groups: Sequence[Group], kinds: list[Kind]) -> None:
    """Cut the groups whose trial says so; of those that were not tried the even ones."""
    for group in groups:
        if not group.uneven:
            chosen.cut.update(group)
        chosen.why.update(dict.fromkeys(group, f"{_untried(group)} (it is in no block to be tried)"))
    for kind in kinds:
        best = kind.best(chosen.sequence)
        for i, group in enumerate(kind.groups):
            why = f"{_untried(group)} (its block was not tried: {kind.untried})"
            if kind.costs:
                why = _of_group(kind, i, best, chosen.sequence)
            for block in kind.names:
                for p, dim in group.items():
                    name = f"{block}.{p}"
                    chosen.why[name] = why
                    chosen.cut.pop(name, None)
                    if i in best:
                        chosen.cut[name] = dim


def _untried(group: Group) -> str:
    return "cutting it would move data inside" if group.uneven else "cut, for it can be"


def _of_group(kind: Kind, i: int, best: tuple[int, ...], sequence: bool) -> str:
    other = tuple(sorted({*best} ^ {i}))
    if (other, sequence) not in kind.costs:
        return "the cheapest of what was tried"
    cut, whole = (best, other) if i in best else (other, best)
    a, b = kind.costs[cut, sequence], kind.costs[whole, sequence]
    sent = a.forward + a.backward - b.forward - b.backward
    return f"cut, it sends {sent:,} B more and frees {b.kept + b.held - a.kept - a.held:,} B"


def _of_boundary(cut: bool, totals: Mapping[bool, int], tried: bool) -> str:
    if len(totals) == 1:
        return "the plan"
    if not tried:
        return "no block could be tried"
    return f"bytes sent and held by all blocks: {totals[True]:,} cut, {totals[False]:,} whole"
