"""Ranks killed within saves; ``benchmarks/kill.py`` kills 200 times."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kill import Chain
from tests.pool import forks


def test_the_newest_checkpoint_is_whole_after_every_kill(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "checkpoints", seed=1, context=forks())
    while (kills := sum(chain.at.values())) < 6 or chain.at["no save under way"] == kills:
        assert kills < 30, "no kill met a save that was under way"
        chain.kill()
    assert chain.wrong == []
