"""Where a model may be cut, and where to cut it so that the slowest part is as fast as can be."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from typing import NamedTuple

from torch import nn

from espalier.blocks import named_parameters_in
from espalier.parallel.pipeline.arguments import Ref, leaves
from espalier.parallel.pipeline.model_stand_ins import ModelStandIns
from espalier.parallel.pipeline.record import ModuleCall, SplitError, Trace
from espalier.tensor.dry_runs import OpCost
from espalier.texts import similar
from espalier.torch_private import own_parameters

_INTENSITY = 10  # operations that take as long as moving a byte
_GAIN = 0.03  # of the slowest stage's cost, for which a block is divided


class Segment(NamedTuple):
    """A part of a model between two places where it may be cut.

    Attributes:
        name: of the place where it begins; empty for what the model does itself before its first module.
        cost: of its forward pass, in any unit.
        parameters: bytes of the parameters that it uses, by name.
        work: what is counted of it.
        passing: bytes that a cut at its beginning would send on.
        within: whether it begins within a block, which a cut there would divide.
    """

    name: str
    cost: float
    parameters: Mapping[str, int]
    work: OpCost
    passing: int
    within: bool = False


def balance(segments: Sequence[Segment], number: int, memory: float | None = None) -> list[str]:
    """The places where stages begin, but for the first: the cost of the most expensive one is the least.

    Among these choices (of those that cost at most a hundredth more) it takes the one that sends the fewest
    bytes, and then the most even one. A block is divided only where that makes the most expensive stage
    cheaper by three hundredths. By dynamic programming over the cuts.

    Args:
        memory: bytes of parameters that a stage may hold; one that is used twice in it counts once.

    Raises:
        SplitError: there are fewer pieces than stages, or no choice keeps within the memory.
    """
    if number > len(segments):
        names = ", ".join(p.name or "its beginning" for p in segments)
        raise SplitError(
            f"{number} stages, but only {len(segments)} places where one may begin: {names}. "
            "Use fewer stages."
        )
    whole = whole_blocks(segments)
    plain, least = _cheapest(whole, number, memory)
    within, less = (plain, least) if len(whole) == len(segments) else _cheapest(segments, number, memory)
    if less == float("inf"):
        raise SplitError(
            f"No choice of {number} stages holds at most {memory:,.0f} bytes of parameters in each. "
            "Use more stages, or more memory."
        )
    return within if less < (1 - _GAIN) * least else plain


def whole_blocks(segments: Sequence[Segment]) -> list[Segment]:
    """The pieces where no block is divided."""
    return joined(segments, lambda segment: not segment.within)


def joined(segments: Sequence[Segment], begins: Callable[[Segment], bool]) -> list[Segment]:
    """The pieces where only some begin one; the others go with those before them."""
    groups: list[Segment] = []
    for p in segments:
        if not groups or begins(p):
            groups.append(p)
            continue
        before = groups[-1]
        groups[-1] = before._replace(
            cost=before.cost + p.cost,
            parameters={**before.parameters, **p.parameters},
            work=before.work.plus(p.work),
        )
    return groups


def _cheapest(segments: Sequence[Segment], number: int, memory: float | None) -> tuple[list[str], float]:
    """The best cuts and the cost of the slowest stage; that is infinite where there are none."""
    n = len(segments)
    sums = [0.0]
    for p in segments:
        sums.append(sums[-1] + p.cost)
    fits = _fitting(segments, memory)
    # best[k][j]: the least cost of the slowest of k parts that make the first j pieces
    best = [[0.0] + [float("inf")] * n]
    for k in range(1, number + 1):
        row = [float("inf")] * (n + 1)
        for j in range(k, n + 1):
            row[j] = min(
                (max(best[k - 1][i], sums[j] - sums[i]) for i in range(max(k - 1, fits[j]), j)),
                default=float("inf"),
            )
        best.append(row)
    least = best[number][n]
    return ([] if least == float("inf") else _lightest(segments, number, sums, fits, least * 1.01)), least


def _fitting(segments: Sequence[Segment], memory: float | None) -> list[int]:
    """For each number of pieces, the first one from which on they fit into the memory together."""
    firsts = [0]
    for j in range(1, len(segments) + 1):
        bytes_by_name: dict[str, int] = {}
        i = j
        while i > 0:
            bytes_by_name.update(segments[i - 1].parameters)
            if memory is not None and sum(bytes_by_name.values()) > memory:
                break
            i -= 1
        firsts.append(i)
    return firsts


def _lightest(
    segments: Sequence[Segment], number: int, sums: Sequence[float], fits: Sequence[int], limit: float
) -> list[str]:
    """Of the choices within a limit of cost, that which sends least, and then the most even one."""
    n = len(segments)
    none = (float("inf"), 0.0, 0)
    # bytes that are sent, the sum of the squares of costs, where the last part begins
    best: list[list[tuple[float, float, int]]] = [[(0.0, 0.0, 0)] + [none] * n]
    for k in range(1, number + 1):
        row = [none] * (n + 1)
        for j in range(k, n + 1):
            ways = [
                (
                    best[k - 1][i][0] + (segments[i].passing if i else 0),
                    best[k - 1][i][1] + (sums[j] - sums[i]) ** 2,
                    i,
                )
                for i in range(max(k - 1, fits[j]), j)
                if sums[j] - sums[i] <= limit
            ]
            row[j] = min(ways, default=none)
        best.append(row)
    cuts: list[str] = []
    j = n
    for k in range(number, 1, -1):
        j = best[k][j][2]
        cuts.append(segments[j].name)
    return cuts[::-1]


# ---- what a model consists of between the places where it may be cut


def segments_of(
    traced: Trace,
    model: nn.Module,
    stand_ins: ModelStandIns,
    costs: Mapping[str, float] | None = None,
    deep: Callable[[str], bool] | None = None,
) -> list[Segment]:
    """What a model consists of between the places where it may be cut.

    Args:
        deep: which other calls of modules, by their labels, count as places too, without a look at what a cut
            there would lose.

    Raises:
        SplitError: costs are given of modules that there are none of.
    """
    passing = _passing(traced)
    starts = _begins(traced, model)
    inner = _within(traced, model, stand_ins, starts, passing)
    if deep is not None:
        known = {*starts.values(), *inner.values(), 0}
        for label, call in labels_of(traced).items():
            if call.start not in known and call.start < len(traced.ops) and deep(label):
                inner[label] = call.start
                known.add(call.start)
    # a model that calls no module is one piece
    every = sorted({**starts, **inner}.items(), key=lambda item: item[1]) or [("", 0)]
    ends = [*(start for _, start in every[1:]), len(traced.ops)]
    sizes = {name: p.numel() * p.dtype.itemsize for name, p in named_parameters_in(model)}
    if costs is not None and (wrong := [n for n in costs if n and n not in starts and n not in inner]):
        raise SplitError(_near(wrong, [name for name, _ in every], "costs"))
    if any(not op.local for op in traced.ops[: every[0][1]]):
        every, ends = [("", 0), *every], [every[0][1], *ends]  # what the model does itself before
    result = []
    begin = 0
    for (name, _), end in zip(every, ends, strict=True):
        ops = [op for op in traced.ops[begin:end] if not op.local]
        work = OpCost()
        for op in ops:
            work = work.plus(op.work)
        used = {n for op in ops for n in op.reads if traced.values[n].source[0] == "parameter"}
        names_used = frozenset(traced.values[n].source[1] for n in used)
        cost = float(max(work.flops, 0) + _INTENSITY * work.moved) if costs is None else costs.get(name, 0.0)
        result.append(
            Segment(name, cost, {n: sizes[n] for n in names_used}, work, passing[begin], name in inner)
        )
        begin = end
    return result


def _passing(traced: Trace) -> list[int]:
    """For each operation, the bytes of what is not local, made before and used at it or later."""
    last = {r.number: len(traced.ops) for r in leaves(traced.out, Ref)}
    for i, op in enumerate(traced.ops):
        last.update((n, i) for n in op.reads if last.get(n, 0) < i)
    change = [0] * (len(traced.ops) + 2)
    for n, end in last.items():
        value = traced.values[n]
        if value.source[0] == "op" and not value.local:
            change[value.source[1] + 1] += value.tensor.nbytes
            change[end + 1] -= value.tensor.nbytes
    return list(accumulate(change))


def labels_of(traced: Trace) -> dict[str, ModuleCall]:
    """The calls of modules, by the module's name; ``name@k`` for the k-th."""
    labels: dict[str, ModuleCall] = {}
    count: dict[str, int] = {}
    for call in traced.calls:
        k = count[call.name] = count.get(call.name, 0) + 1
        if call.name:
            labels[call.name if k == 1 else f"{call.name}@{k}"] = call
    return labels


def _begins(traced: Trace, model: nn.Module) -> dict[str, int]:
    """Where a stage may begin, in order: at blocks of the outermost lists, and beside these."""
    parts = {
        name for name, m in model.named_modules()
        if name and name not in traced.containers and name.rpartition(".")[0] in traced.containers
    }  # fmt: skip
    result: dict[str, int] = {}
    for label, call in labels_of(traced).items():
        if call.name in parts and call.start not in result.values():
            result[label] = call.start
    return dict(sorted(result.items(), key=lambda item: item[1]))


def _within(
    traced: Trace,
    model: nn.Module,
    stand_ins: ModelStandIns,
    starts: Mapping[str, int],
    passing: Sequence[int],
) -> dict[str, int]:
    """Where a stage may begin within such a part: at modules that it calls, where no more is sent than at
    its own beginning (of the residual stream, not beside it), if nothing is lost when it is divided."""
    labels, modules = labels_of(traced), dict(model.named_modules())
    parts = {labels[label].number: labels[label] for label in starts}
    taken = set(starts.values())
    result: dict[str, int] = {}
    for label, call in labels.items():
        part = parts.get(call.parent)
        if part is None or call.start in taken or not passing[call.start] <= passing[part.start]:
            continue
        divided = modules[part.name]
        lost = part.name in traced.changed or stand_ins.hooked(divided) or "forward" in vars(divided)
        if not lost and not own_parameters(divided):
            result[label] = call.start
            taken.add(call.start)
    return result


def bounds_of(traced: Trace, cuts: Sequence[str]) -> list[int]:
    labels = {label: call.start for label, call in labels_of(traced).items()}
    if wrong := [c for c in cuts if c not in labels]:
        raise SplitError(_near(wrong, list(labels), "cuts"))
    bounds = [labels[c] for c in cuts]
    order = sorted(cuts, key=lambda c: labels[c])
    if list(cuts) != order:
        raise SplitError(f"cuts = {list(cuts)} are not in the order in which the model calls them: {order}.")
    for cut, low, high in zip(cuts, [0, *bounds], bounds, strict=False):
        if low == high:
            raise SplitError(
                f"cuts: before {cut!r} begins, its stage's predecessor would have nothing to do."
            )
    return bounds


def _near(wrong: Sequence[str], names: list[str], what: str) -> str:
    lines = [f"{what} name modules that the forward pass does not call:"]
    for name in wrong:
        near = similar(name, names, 3)
        lines.append(f"  {name!r}" + (f": did you mean {', '.join(map(repr, near))}?" if near else ""))
    return "\n".join(lines)
