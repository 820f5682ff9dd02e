"""Ranks killed within saves; ``benchmarks/kill.py`` kills 200 times."""

from __future__ import annotations

from pathlib import Path

from benchmarks.kill import Chain


def test_the_newest_checkpoint_is_whole_after_every_kill(tmp_path: Path) -> None:
    chain = Chain(tmp_path / "checkpoints", seed=1)
    for _ in range(6):
        chain.kill()
    assert chain.wrong == []
    assert sum(chain.at.values()) == 6 and chain.at["no save under way"] < 6
