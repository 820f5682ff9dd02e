"""Which lists of a batch have an entry for each row."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from espalier.engine.row_lists import closed, lists_in, opened

X, BOX = torch.zeros(2, 3), {"boxes": torch.zeros(2, 4)}
IMAGES = [torch.zeros(3, n, n) for n in (4, 5)]


@pytest.mark.parametrize(
    ("batch", "none", "ragged", "every"),
    [
        ([torch.zeros(8, 3), torch.zeros(8)], 0, 0, 0),  # as loaders collate
        (([torch.zeros(8, 3), torch.zeros(8)], 0), 0, 0, 0),
        ([torch.zeros(8, 3), torch.zeros(3)], 0, 0, 0),
        ([BOX], 0, 0, 1),
        ({"x": X, "y": [BOX, BOX]}, 1, 1, 1),
        ({"x": X, "y": [torch.zeros(3), torch.zeros(2)]}, 0, 1, 1),
        ({"x": X, "y": [torch.zeros(2), torch.zeros(2)]}, 0, 0, 1),
        ((IMAGES, [BOX, BOX]), 0, 0, 2),
    ],
)
def test_closed(batch: Any, none: int, ragged: int, every: int) -> None:
    assert len(lists_in(closed(batch))) == none
    assert len(lists_in(closed(batch, "ragged"))) == ragged
    assert len(lists_in(closed(batch, "all"))) == every
    assert str(opened(closed(batch, "all"), torch.device("cpu"))) == str(batch)
