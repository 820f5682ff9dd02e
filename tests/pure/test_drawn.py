"""What dropout keeps hangs on a key and an element's number alone, and on nothing that shows."""

from __future__ import annotations

import math

import pytest
import torch

from espalier.tensor.random import kept_at

KEYS = [5, 6, 12345678901234567, -(1 << 63), -(1 << 63) + (1 << 62)]


def by_hand(index: int, key: int, p: float) -> bool:
    """The hash, as its steps are told, in whole numbers."""
    wide, narrow = (1 << 64) - 1, (1 << 32) - 1
    step = 0x2545F4914F6CDD1D * pow(0x9E3779B97F4A7C15, -1, 1 << 64)
    first = (key * step & wide) >> 32
    second = (key ^ 0x5851F42D4C957F2D) * 0xD1342543DE82EF95 & wide
    signed = second - (1 << 64) if second >> 63 else second
    second = ((signed ^ signed >> 29) * 0x94D049BB133111EB & wide) >> 32
    high = (index >> 32) * 0x85EBCA6B
    x = (index + first + high) * 0x9E3779B1 & narrow
    x = (x ^ x >> 16) * 0x21F0AAAD + second + high & narrow
    x = (x ^ x >> 15) * 0xD35A2D97 & narrow
    return ((x ^ 1 << 31) >> 8) >= p * (1 << 24)  # counted from minus 2^31 on


@pytest.mark.parametrize("key", KEYS)
def test_elements_are_kept_as_by_hand(key: int) -> None:
    """Of numbers below and above 2^32, by a key that is a number or, in recorded programs, a tensor."""
    index = torch.cat([torch.arange(n, n + 40) for n in (0, (1 << 31) - 20, (1 << 32) - 20, 7 << 40)])
    for p in (0.0, 0.25, 0.5, 1 - 2**-24):
        kept = kept_at(index.clone(), key, p)
        assert kept.tolist() == [by_hand(n, key, p) for n in index.tolist()]
        assert torch.equal(kept_at(index, torch.tensor(key), p), kept)


def test_a_probability_next_to_one() -> None:
    """Single precision rounds it to one."""
    assert not kept_at(torch.arange(10_000), 3, 1 - 1e-12).any()


@pytest.mark.parametrize("p", [0.1, 0.5])
def test_masks_of_neighbours_and_keys_are_apart(p: float) -> None:
    """As coins are: no mean, row, column, distance or other key tells of an element (5 sigma)."""
    count, side = 1 << 18, 1 << 9
    masks = [
        (kept_at(torch.arange(count), key, p).double() - (1 - p)) / math.sqrt(p * (1 - p)) for key in KEYS
    ]
    masks.append((kept_at(torch.arange(count) + (1 << 32), 5, p).double() - (1 - p)) / math.sqrt(p * (1 - p)))
    for i, mask in enumerate(masks):
        assert abs(mask.sum()) < 5 * math.sqrt(count)
        for other in masks[:i]:
            assert abs(mask @ other) < 5 * math.sqrt(count), i
        for apart in (1, 2, 3, 8, 64, 100, *(1 << n for n in range(8, 18))):
            assert abs(mask[apart:] @ mask[:-apart]) < 5 * math.sqrt(count - apart), (i, apart)
        for dim in (0, 1):
            spread = (mask.view(side, side).sum(dim) ** 2 / side).sum() - side
            assert abs(spread) < 5 * math.sqrt(2 * side), (i, dim)
