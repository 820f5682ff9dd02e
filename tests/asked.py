"""How much is asked of the suite: ``ESPALIER_SWEEP`` in the environment runs what stands behind it."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

ASKED = int(os.environ.get("ESPALIER_SWEEP", "0"))
"""So many draws; 1 asks for all that is not drawn, too."""


def on_sweeps(why: str) -> pytest.MarkDecorator:
    """Of a test, or of one of its parameters: it is left to sweeps, for this reason."""
    return pytest.mark.skipif(not ASKED, reason=f"ESPALIER_SWEEP=1 runs it: {why}")


def left_to_sweeps(every: Iterable[Any], *left: int, why: str) -> list[Any]:
    """A test's parameters, in tuples where there are several; those of these numbers are left to sweeps."""
    tuples = [each if isinstance(each, tuple) else (each,) for each in every]
    return [pytest.param(*x, marks=[on_sweeps(why)] if i in left else []) for i, x in enumerate(tuples)]
