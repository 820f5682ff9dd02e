"""The cuts of a pipeline against all that there are."""

from __future__ import annotations

import itertools
import random

import pytest

from espalier.parallel.pipeline.balance import Segment, balance
from espalier.parallel.pipeline.record import SplitError
from espalier.tensor.dry_runs import OpCost


def stages(pieces: list[Segment], cuts: tuple[str, ...]) -> list[list[Segment]]:
    found: list[list[Segment]] = [[]]
    for piece in pieces:
        if piece.name in cuts:
            found.append([])
        found[-1].append(piece)
    return found


def held(stage: list[Segment]) -> int:
    return sum({name: n for piece in stage for name, n in piece.parameters.items()}.values())


def test_no_choice_is_better() -> None:
    draw = random.Random(0)
    refused = 0
    for _ in range(60):
        n, number = draw.randint(2, 8), draw.randint(1, 4)
        pieces = [
            Segment(f"p{i}", draw.randint(1, 9), {f"w{draw.randint(0, 5)}": 4, f"v{i}": 2}, OpCost(), 1)
            for i in range(n)
        ]
        memory = draw.choice([None, 14, 20])
        choices = [
            stages(pieces, cuts) for cuts in itertools.combinations([p.name for p in pieces[1:]], number - 1)
        ]
        fitting = [c for c in choices if memory is None or max(map(held, c)) <= memory]
        if not fitting:
            refused += 1
            with pytest.raises(SplitError, match="stages"):
                balance(pieces, number, memory)
            continue
        best = min(max(sum(p.cost for p in stage) for stage in choice) for choice in fitting)
        found = stages(pieces, tuple(balance(pieces, number, memory)))
        assert len(found) == number and (memory is None or max(map(held, found)) <= memory)
        assert max(sum(p.cost for p in stage) for stage in found) <= best * 1.01
    assert 0 < refused < 60
