"""The tensor axes of a plan: how the ranks that share each layer form a line, a grid or a cube.

======== ========================== ======================================== =====================
mode     axes                       activations [rows, ..., hidden]          rows are cut over
======== ========================== ======================================== =====================
1d       tensor                     whole, hidden cut inside of blocks       none of them
2d       row, col                   rows over row, hidden over col           row
2.5d     depth, row, col            rows over depth and row, hidden over col depth, row
3d       i, j, k                    rows over i and j, hidden over k         i, j
======== ========================== ======================================== =====================
"""

from __future__ import annotations

import math
from types import MappingProxyType
from typing import Final, Literal

Mode = Literal["1d", "2d", "2.5d", "3d"]

# the tensor axes that cut a batch's rows, outermost first
ROWS: Final = MappingProxyType({"1d": (), "2d": ("row",), "2.5d": ("depth", "row"), "3d": ("i", "j")})


def tensor_axes(mode: Mode, ranks: int, depth: int) -> dict[str, int]:
    """The tensor axes of a plan and their sizes, outermost first.

    A grid has the row and column counts that are closest, no more rows than columns: 8 ranks are 2 x 4.

    Raises:
        ValueError: so many ranks form no such grid or cube; says what does.
    """
    if mode == "1d":
        return {"tensor": ranks}
    if mode == "2d":
        return _grid(ranks)
    if mode == "2.5d":
        if ranks % depth:
            raise ValueError(f"2.5d puts depth grids upon each other: expected a multiple of depth = {depth}")
        return {"depth": depth, **_grid(ranks // depth)}
    side = round(ranks ** (1 / 3))
    if side**3 != ranks:
        below = max(n for n in range(1, side + 1) if n**3 < ranks)
        raise ValueError(f"3d needs a cube of ranks: expected {below**3} or {(below + 1) ** 3}")
    return {"i": side, "j": side, "k": side}


def _grid(ranks: int) -> dict[str, int]:
    rows = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
    return {"row": rows, "col": ranks // rows}
