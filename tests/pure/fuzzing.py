"""What the fuzzer draws: values that nobody expects, and files with a few bytes changed."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

SHARE = int(os.environ.get("ESPALIER_FUZZ", "1"))
"""How many times as many examples are tried as in the suite; from 2 on they are others each time."""


def tries(examples: int) -> Callable[[Any], Any]:
    """As many examples of a test, without a deadline; the same ones each time in the suite."""
    return settings(
        max_examples=examples * SHARE,
        deadline=None,
        derandomize=SHARE == 1,
        database=None,
        suppress_health_check=list(HealthCheck),
    )


junk = st.one_of(
    st.sampled_from(
        [
            None,
            True,
            False,
            0,
            -1,
            1,
            2,
            3,
            7,
            10**6,
            2**31,
            2**63 - 1,
            -(2**63),
            0.0,
            -0.5,
            0.5,
            1e-300,
            1e300,
        ]
    ),
    st.sampled_from([float("nan"), float("inf"), float("-inf")]),
    st.sampled_from(
        ["", " ", "0", "auto", "none", "gpt", "../..", "/", "a\nb", "é✓😀", "\x1b[31m", "x" * 300]
    ),
    st.text(max_size=8),
    st.sampled_from([[], [1], ["a", 2], [[]], {}, {"a": 1}, {"": {}}, {"a": {"b": [1, {"c": None}]}}]),
)
"""A value of a table."""


@st.composite
def changed(draw: st.DrawFn, tables: dict[str, Any], keys: list[str]) -> dict[str, Any]:
    """Tables of which a few places have another value, or none, or that have keys they don't know."""
    found = copy.deepcopy(tables)
    for _ in range(draw(st.integers(1, 4))):
        at: Any = found
        while True:
            name = draw(st.sampled_from([*at, *keys]) | st.text(max_size=5)) if at or keys else "x"
            if isinstance(at.get(name), dict) and draw(st.booleans()):
                at = at[name]
                continue
            if draw(st.integers(0, 4)) == 0:
                at.pop(name, None)
            else:
                at[name] = copy.deepcopy(draw(junk))
            break
    return found


@st.composite
def damaged(draw: st.DrawFn, content: bytes) -> bytes:
    """A file's content, cut off, longer, or with a few bytes changed."""
    found = bytearray(content)
    for _ in range(draw(st.integers(1, 4))):
        way = draw(st.integers(0, 5))
        at = draw(st.integers(0, max(len(found) - 1, 0)))
        if way == 0:
            del found[at:]
        elif way == 1:
            found[at:at] = draw(st.binary(max_size=12))
        elif way == 2:
            del found[at : at + draw(st.integers(1, 16))]
        else:
            found[at : at + 1] = bytes([draw(st.integers(0, 255))])
    return bytes(found)


@st.composite
def mutated(draw: st.DrawFn, tree: Any) -> Any:
    """JSON in which a few values are gone, others, or other numbers."""
    found = copy.deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        at: Any = found
        while at:
            key = draw(st.sampled_from(list(at) if isinstance(at, dict) else list(range(len(at)))))
            if isinstance(at[key], dict | list) and draw(st.integers(0, 4)):
                at = at[key]
                continue
            way = draw(st.integers(0, 3))
            if way == 0:
                del at[key]
            elif way == 1 and isinstance(at[key], int):
                at[key] += draw(st.sampled_from([-1, 1, 2**40, -(2**40), 2**63, 10**30]))
            else:
                at[key] = copy.deepcopy(draw(junk))
            break
    return found
