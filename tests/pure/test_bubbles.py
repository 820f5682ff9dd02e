"""Bubbles that others have published, from the times of actions and messages that they measured."""

from __future__ import annotations

import pytest

from espalier.parallel.pipeline import Costs, generate, simulate

# Zero Bubble Pipeline Parallelism (Qi et al., 2023): stages; micro-batches; milliseconds of F, I, W and of a
# message; stages a rank where interleaved; bubbles of 1F1B, of it interleaved, and of ZB-H1.
PUBLISHED = [
    (8, 24, (18.522, 18.086, 9.337, 0.601), 3, (0.2431, 0.1055, 0.1585)),
    (8, 32, (18.513, 18.086, 9.331, 0.626), 3, (0.1985, 0.0818, 0.1242)),
    (8, 64, (18.546, 18.097, 9.321, 0.762), 3, (0.1240, 0.0443, 0.0674)),
    (8, 24, (29.718, 29.444, 19.927, 0.527), 4, (0.2347, 0.0808, 0.1323)),
    (8, 32, (29.802, 29.428, 19.530, 0.577), 4, (0.1898, 0.0628, 0.1045)),
    (8, 64, (29.935, 29.621, 19.388, 0.535), 4, (0.1091, 0.0320, 0.0554)),
    (16, 48, (11.347, 11.248, 8.132, 0.377), 3, (0.2552, 0.1104, 0.1397)),
    (16, 64, (11.307, 11.254, 8.101, 0.379), 3, (0.2082, 0.0852, 0.1088)),
    (16, 128, (11.325, 11.308, 8.109, 0.378), 3, (0.1251, 0.0445, 0.0576)),
    (32, 96, (10.419, 10.207, 7.715, 0.408), 2, (0.2646, 0.1493, 0.1421)),
    (32, 128, (10.408, 10.204, 7.703, 0.408), 2, (0.2168, 0.1164, 0.1106)),
    (32, 256, (10.402, 10.248, 7.698, 0.460), 2, (0.1352, 0.0624, 0.0594)),
]


def bubble(kind: str, p: int, m: int, v: int, times: tuple[float, float, float], latency: float) -> float:
    """The part of a step in which a rank has nothing to do."""
    f, i, w = (x / v for x in times)
    took = simulate(generate(kind, p, m, v), Costs(f, i, w, latency=latency)).step_time
    return 1 - m * sum(times) / took


@pytest.mark.parametrize(("p", "m", "measured", "v", "told"), PUBLISHED)
def test_bubbles_are_those_that_were_published(
    p: int, m: int, measured: tuple[float, ...], v: int, told: tuple[float, float, float]
) -> None:
    *times, message = measured
    f, i, w = times
    plain, interleaved, zero = told
    assert round(bubble("1f1b", p, m, 1, (f, i, w), message), 4) == plain
    assert round(bubble("zb-h1", p, m, 1, (f, i, w), message), 4) == zero
    # theirs of the interleaved one has some messages less on its way
    without, with_all = (bubble("interleaved", p, m, v, (f, i, w), x) for x in (0.0, message))
    assert without < interleaved < with_all < interleaved + 0.004
