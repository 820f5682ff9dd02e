"""torch's own op database on DTensors: no wrong answer, no error where the plain call has none.

Each operation on two ranks or on three; with ``ESPALIER_SWEEP=1`` in the environment on both, in more calls;
with a larger number in so many of each form. tests/ranks/test_rules.py obeys it too.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.asked import ASKED
from tests.pool import RankError
from tests.ranks.ours import Ours
from tests.ranks.sweep import Finding, Sweep, part

# calls for an operation in each pass; more find more
FEW = 2 * ASKED or 1
PARTS = 6
RUN = [(world, index) for world in (2, 3) for index in range(PARTS) if ASKED or index % 2 == world % 2]

# what cannot be right, by operation: a part of the message, which gives the reason
MOVES = "its data would have to move"
MEMORY = "would change the shape or the memory of what each rank holds"
SPARSE = "gives sparse gradients, which are not summed over ranks"
REFUSED = {
    "as_strided": MEMORY,  # as_strided_
    "as_strided.partial_views": MEMORY,
    "nn.functional.embedding": SPARSE,
    "nn.functional.embedding_bag": SPARSE,
    "resize_": MEMORY,
    "resize_as_": MEMORY,
    "squeeze": MOVES,  # squeeze_ of a sharded dim
    "squeeze.multiple": MOVES,
}
# drawn layouts may or may not bring these to it
SELDOM = {"squeeze", "squeeze.multiple", "nn.functional.embedding", "nn.functional.embedding_bag"}


def swept(rank: int, world: int, index: int, few: int, notes: Path) -> list[Finding]:
    return list(Sweep(Ours(), rank, world, notes).run(part(index, PARTS), seed=world, few=few))


@pytest.mark.parametrize(("world", "index"), RUN)
def test_op_db(ranks: Any, world: int, index: int, tmp_path: Path) -> None:
    try:
        findings = ranks(world, swept, index, FEW, tmp_path, timeout=600)[0]
    except RankError as error:
        # of a note the first line: behind it may stand what is left of a longer one
        notes = [(note.name, note.read_text().partition("\n")[0]) for note in sorted(tmp_path.iterdir())]
        at = "\n".join(f"{name} was at {note}" for name, note in notes)
        raise AssertionError(f"{error}\n{at}") from error
    bad = [
        f
        for f in findings
        if f.outcome == "wrong" or (f.outcome == "refused" and REFUSED.get(f.op, "-") not in f.text)
    ]
    assert not bad, f"{len(bad)} of {len(findings)} calls went wrong:\n" + "\n".join(map(str, bad))
    refused = {f.op for f in findings if f.outcome == "refused"}
    ours = {f.op for f in findings} & set(REFUSED) - SELDOM
    assert refused >= ours, f"no longer refused, so take it off the list: {sorted(ours - refused)}"
