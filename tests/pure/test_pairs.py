"""What a plan of two axes sends is what its parts send alone, of what is local to them. Dry runs.

What a rank sends in a step is linear in the batch's rows: so much a row, of activations, and a rest, of
parameters. Two runs tell them apart.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from functools import cache
from typing import Any

import pytest
import torch

import espalier
from espalier import Plan
from espalier.models import build

SIZES = {"vocab_size": 512, "max_positions": 32, "layers": 1, "hidden": 32, "heads": 8}
ROWS, LENGTH = 16, 32

ROW_SHARERS: dict[str, dict[str, Any]] = {
    "zero 0": {"data": 2},
    "zero 3": {"data": 2, "zero": 3},
    "replicate": {"replicate": 2},
}
CONTEXTS: dict[str, dict[str, Any]] = {
    kind: {"context": 2, "context_kind": kind} for kind in ("ring", "ulysses", "gather")
}
TENSORS: dict[str, dict[str, Any]] = {
    "tensor": {"tensor": 2},
    "sequence": {"tensor": 2, "sequence_parallel": True},
    "2d": {"tensor": 4, "tensor_mode": "2d"},
    "2.5d": {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
    "3d": {"tensor": 8, "tensor_mode": "3d"},
}
PIPE: dict[str, Any] = {"pipe": 2, "accumulate": 2}
EXPERT: dict[str, Any] = {"data": 2, "expert": 2}
GRADIENTS = {"replicate", "data", "context", "expert"}

Sent = Counter[tuple[str, str]]


def together(a: dict[str, Any], b: dict[str, Any]) -> Plan:
    joint = {**a, **b}
    if "expert" in joint:
        joint["data"] = 2 * (b if "expert" in a else a).get("data", 1)
    return Plan(**joint)


@cache
def sent(plan: Plan, rows: int, kind: str) -> tuple[Sent, int]:
    """Bytes by axis and operation, and those of parameters; of a pipeline, of all stages together."""
    total: Sent = Counter()
    held, names = 0, list(plan.axes)
    for stage in range(plan.pipe):
        with torch.device("meta"):
            # a pipeline has two blocks, and so has what it is compared with
            model = build(kind, {**SIZES, "layers": plan.accumulate})
            optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
            ids = torch.zeros(rows, LENGTH, dtype=torch.long)
        report = espalier.dry_run(
            model,
            plan,
            {"input_ids": ids, "labels": ids},
            optimizer=optimizer,
            count=(lambda batch: 1.0) if kind == "moe" and plan.accumulate > 1 else None,
            coordinate=tuple(stage if name == "pipe" else 0 for name in names),
        )
        held += report.parameter_bytes
        for entry in report.ledger.entries:
            total[entry.axis, entry.op] += entry.bytes
    return total, held


def parts(plan: Plan, kind: str) -> tuple[dict[tuple[str, str], float], dict[tuple[str, str], float], int]:
    """What is sent for ROWS rows, and what whatever the rows; bytes of parameters."""
    (once, held), (twice, _) = sent(plan, ROWS, kind), sent(plan, 2 * ROWS, kind)
    keys = once.keys() | twice.keys()
    return {k: twice[k] - once[k] for k in keys}, {k: 2 * once[k] - twice[k] for k in keys}, held


def compare(name: str, axes: set[str], alone: Plan, pair: Plan, share: float, kind: str = "gpt") -> list[str]:
    """Where along some axes a pair sends, for activations, other than its share of what one sends alone."""
    single, both = parts(alone, kind)[0], parts(pair, kind)[0]
    wrong = []
    for key in sorted(single.keys() | both.keys()):
        wanted, found = single.get(key, 0) * share, both.get(key, 0)
        # labels, few bytes, may lie otherwise
        if key[0] in axes and abs(wanted - found) > 0.02 * abs(wanted) + 2 * ROWS * LENGTH:
            wrong.append(f"{name}: {key[1]} along {key[0]}: {found:,} bytes, expected {wanted:,.0f}")
    return wrong


def own_axes(plan: dict[str, Any]) -> set[str]:
    found = Plan(**plan)
    return {name for name, n in found.axes.items() if n > 1 and (name != "data" or "expert" not in plan)}


def test_activations_beside_axes_that_share_rows() -> None:
    wrong = []
    others = {**CONTEXTS, **TENSORS, "expert": EXPERT}
    for (a, one), (b, other) in itertools.product(others.items(), ROW_SHARERS.items()):
        if (a == "expert" and b == "replicate") or (b == "zero 0" and a not in CONTEXTS):
            continue  # experts are not copied; what ZeRO does beside tensors is the same for all stages
        kind = "moe" if a == "expert" else "gpt"
        wrong += compare(f"{a} beside {b}", own_axes(one), Plan(**one), together(one, other), 0.5, kind)
    assert not wrong, "\n".join(wrong)


def test_activations_beside_axes_that_share_sequences() -> None:
    wrong = []
    for (a, one), (b, other) in itertools.product({**TENSORS, "expert": EXPERT}.items(), CONTEXTS.items()):
        if b == "gather" and a != "tensor":
            continue
        kind = "moe" if a == "expert" else "gpt"
        wrong += compare(f"{a} beside {b}", own_axes(one), Plan(**one), together(one, other), 0.5, kind)
    assert not wrong, "\n".join(wrong)


def test_activations_beside_axes_that_share_layers() -> None:
    wrong = []
    for (a, one), (b, other) in itertools.product(CONTEXTS.items(), TENSORS.items()):
        share = 1 / other["tensor"]
        wrong += compare(f"{a} beside {b}", {"context"}, Plan(**one), together(one, other), share)
    for b in ("tensor", "sequence"):
        pair = together(EXPERT, TENSORS[b])  # a rank holds half of the experts, and sends what is for these
        wrong += compare(f"expert beside {b}", {"expert"}, Plan(**EXPERT), pair, 0.5, "moe")
    assert not wrong, "\n".join(wrong)


def test_a_pipeline_sends_what_is_local_and_its_stages_what_the_model_does() -> None:
    wrong = []
    shares = {**dict.fromkeys(ROW_SHARERS, 0.5), **dict.fromkeys(CONTEXTS, 0.5), "expert": 0.5}
    shares |= {"tensor": 1, "sequence": 0.5, "2d": 1 / 4, "2.5d": 1 / 8, "3d": 1 / 8}
    every = {**ROW_SHARERS, **CONTEXTS, **TENSORS, "expert": EXPERT}
    for b in ("zero 0", "ring", "ulysses", "sequence", "3d", "expert"):
        other = every[b]
        kind = "moe" if b == "expert" else "gpt"
        pair = Plan(**PIPE, **other)
        wrong += compare(f"pipe beside {b}", {"pipe"}, Plan(**PIPE), pair, shares[b], kind)
        alone = Plan(**other, accumulate=2)
        wrong += compare(f"{b} beside pipe", own_axes(other), alone, pair, 1, kind)
    assert not wrong, "\n".join(wrong)


@pytest.mark.parametrize("zero", [0, 1, 3])
def test_parameters_are_summed_once_along_all_axes_that_vary_them(zero: int) -> None:
    """(n - 1)/n of what is local, as often as of n ranks of a data axis alone."""
    wrong = []
    data = {"data": 2, "zero": zero}
    _, rest, _ = parts(Plan(**data), "gpt")
    times = _of_parameters(rest) / parts(Plan(data=2), "gpt")[2] * 2
    assert 2 <= times <= 3.05
    for other in (*TENSORS.values(), CONTEXTS["ring"], {"replicate": 2}, {"pipe": 2}):
        if zero == 3 and not {"replicate", "pipe"}.isdisjoint(other):
            continue  # gathered along fewer axes than summed; kept by the last stage
        plan = Plan(**data, **other)
        _, rest, _ = parts(plan, "gpt")
        held = parts(plan.model_copy(update={"zero": 0}), "gpt")[2]
        n = math.prod(size for name, size in plan.axes.items() if name in GRADIENTS)
        found, wanted = _of_parameters(rest), times * held * (n - 1) / n
        if abs(found - wanted) > 0.05 * wanted:
            wrong.append(f"{plan}: {found:,} bytes, expected {wanted:,.0f}")
    assert not wrong, "\n".join(wrong)


def _of_parameters(rest: dict[tuple[str, str], float]) -> float:
    return sum(b for (axis, _), b in rest.items() if GRADIENTS & set(axis.split(",")))
