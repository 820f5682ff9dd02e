"""Every rule under every layout: on axes of size 2 and 3, even and uneven, forward and gradient.

On three ranks few layouts are drawn for a sample, on four one, unless ``ESPALIER_SWEEP=1`` is in the
environment.
"""

from __future__ import annotations

import pytest

from tests.asked import ASKED
from tests.ranks.brute import check
from tests.ranks.cases import CASES

# else so few layouts of first samples are drawn on three ranks that each state of each tensor comes
FEW = 6


def report(results: list[list[str]]) -> None:
    """Fail with what the ranks found: for each call a layout or two, and how many more there are."""
    lines = list(dict.fromkeys(line for found in results for line in found))
    calls: dict[str, list[str]] = {}
    for line in lines:
        calls.setdefault(line.partition(" on Layout")[0], []).append(line)
    text = [
        "\n    ".join([*found[:2], *([f"... and {len(found) - 2} more"] if len(found) > 2 else [])])
        for found in calls.values()
    ]
    assert not lines, f"{len(lines)} calls went wrong:\n" + "\n".join(text)


@pytest.mark.parametrize("group", CASES)
@pytest.mark.parametrize("world", [2, 3])
def test_all_layouts_on_one_axis(ranks, world, group):
    few = None if world == 2 or ASKED else FEW
    report(ranks(world, check, group, {"axis": world}, few, timeout=300))


@pytest.mark.world(4)
@pytest.mark.parametrize("group", CASES)
def test_drawn_layouts_on_two_axes(ranks, group):
    report(ranks(4, check, group, {"one": 2, "two": 2}, 4 if ASKED else 1, timeout=300))
