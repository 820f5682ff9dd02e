"""Sums along the tensor axis on the simulated device: what they copy first."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from espalier.comm import redistribute
from tests.sim.plans import STEPS, trained
from tests.sim.transport import Shared

BACK = "redistribute_by < comm/redistribute.py:RedistributePlan.back"


def copied(shared: Shared, rank: int, world: int, plain: bool) -> tuple[float, list[float], set[str]]:
    """Copies before backward sums, a step; losses; and faults."""
    with pytest.MonkeyPatch.context() as patch:
        if plain:
            patch.setattr(redistribute, "is_alone", lambda grad: False)
        run = trained(shared, rank, world, {"tensor": world}, {"kernels": True}, "")
    copies = sum(n for (kind, _, where), n in run.told.items() if kind == "kernel" and BACK in where)
    return copies / (STEPS - 1), run.losses, {kind for kind, _, _ in run.told} - {"kernel"}


@pytest.mark.world(2)
def test_a_gradient_that_is_alone_is_summed_where_it_is(
    on_sim: Callable[..., list[Any]], figures: list[str]
) -> None:
    for (copies, losses, told), (before, same, _) in zip(
        on_sim(2, copied, False), on_sim(2, copied, True), strict=True
    ):
        assert not told and losses == same
        assert copies == 0 and before >= 4
    figures.append(
        f"tensor                       2 ranks: {copies:g} copies before backward sums ({before:g})"
    )
