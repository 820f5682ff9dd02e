"""Sums along the tensor axis on the simulated device: what they copy first."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from espalier.comm import redistribute
from espalier.sharding import spec
from espalier.tensor import inputs
from tests.sim.plans import STEPS, trained
from tests.sim.transport import Shared

SUM = "comm/redistribute.py:redistribute_by"
BACK = f"{SUM} < comm/redistribute.py:RedistributePlan.back"
Copies = tuple[float, float]


def copied(
    shared: Shared, rank: int, world: int, kind: str, plain: bool
) -> tuple[Copies, list[float], dict[str, torch.Tensor], set[str]]:
    """Copies before sums, forward and backward, a step; losses and weights; and faults."""
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(redistribute, "is_alone", lambda grad: False)
            for module in (spec, inputs):
                patch.setattr(module, "sums_here", lambda x, plan: False)
        run = trained(shared, rank, world, {"tensor": world}, {"kernels": True, "kind": kind}, "")
    # a bias is added by one rank, and cleared on the others
    sums: Counter[str] = Counter()
    for (of, what, where), n in run.told.items():
        if of == "kernel" and SUM in where:
            sums[where] += -n if what == "aten::zero_" else n
    back = sum(n for where, n in sums.items() if BACK in where)
    copies = (sum(sums.values()) - back) / (STEPS - 1), back / (STEPS - 1)
    return copies, run.losses, run.weights, {of for of, _, _ in run.told} - {"kernel"}


@pytest.mark.world(2)
@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_what_nobody_else_holds_is_summed_where_it_is(
    on_sim: Callable[..., list[Any]], figures: list[str], kind: str
) -> None:
    """Results of row layers, with and without a bias, and of the embedding; and gradients."""
    for (copies, losses, weights, told), (before, same, unmoved, _) in zip(
        on_sim(2, copied, kind, False), on_sim(2, copied, kind, True), strict=True
    ):
        assert not told and losses == same
        assert all(torch.equal(weights[name], unmoved[name]) for name in unmoved)
        assert copies == (0, 0) and before[0] >= 5 and before[1] >= 4
    figures.append(
        f"tensor, {kind:5}                2 ranks: {copies} copies before sums, there and back ({before})"
    )
