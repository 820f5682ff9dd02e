"""Real models train unchanged on data 2 × tensor 2, equal to one process in float64.

Under the layouts that the engine infers, and in a plain loop under layouts drawn at random for
every parameter on both axes: those no one would choose, and the results must be the same.
"""

from __future__ import annotations

from typing import Any

import pytest

from tests.peers.zoo import MODELS, compared

TOLERANCE = 1e-9


@pytest.mark.world(4)
@pytest.mark.parametrize("drawn", [False, True], ids=["engine", "drawn"])
@pytest.mark.parametrize("name", MODELS)
def test_equals_one_process(ranks: Any, name: str, drawn: bool) -> None:
    for worst, _ in ranks(4, compared, name, drawn, timeout=300):
        assert max(worst.values()) < TOLERANCE, worst


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit", "t5"])
def test_on_a_grid(ranks: Any, name: str) -> None:
    for worst, gathered in ranks(4, compared, name, False, {"tensor": 4, "tensor_mode": "2d"}, timeout=300):
        assert max(worst.values()) < TOLERANCE, worst
        assert not gathered
