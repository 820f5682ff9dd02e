"""Tensor parallelism on a grid or a cube of ranks (2D, 2.5D, 3D): every weight matrix is cut both ways.

The table, outermost cut first. *features* are the output features, *hidden* a model's residual stream.

=================================  =======================  =====================================
parameter                          2d and 2.5d              3d
=================================  =======================  =====================================
Linear ("column")                  in row, features col     in k, features j then i
Linear after a column one ("row")  in row, features col     in j, features k then i
Embedding                          rows row, features col   rows j then i, features k
vectors, whatever else             last dim as features     last dim as features, j or k alone
=================================  =======================  =====================================

With rows of activations cut over row (2d), depth and row (2.5d) or i and j (3d) the rule of a linear
layer sees by these layouts which algorithm fits (``espalier.tensor.rules.grids``). In 3d a column layer
gives rows over i and k, features over j; a row layer takes these and gives back what the first took.

2D: Xu and You 2021 (2104.05343), after SUMMA (van de Geijn, Watts 1997); 2.5D: Wang et al. 2021
(2105.14500); 3D: Bian et al. 2021 (2105.14450), after Agarwal et al. 1995.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

from torch import nn

from espalier.parallel.tensor.tables import parts_of, transposed

Axes = tuple[str, ...]
Cuts = tuple[Axes, ...]  # of a parameter: for each dim the axes that cut it, outermost first


@dataclass(frozen=True)
class _Role:
    """The axes that cut a weight's input and output features; activations have the outermost of each."""

    into: Axes
    out: Axes


_GRID: Final = _Role(("row",), ("col",))
_FLAT: Final = MappingProxyType({"column": _GRID, "row": _GRID, "vocab": _GRID})
_CUBE: Final = MappingProxyType(
    {
        "column": _Role(("k",), ("j", "i")),
        "row": _Role(("j",), ("k", "i")),
        "vocab": _Role(("j", "i"), ("k",)),
    }
)
ROLES: Final[Mapping[str, Mapping[str, _Role]]] = MappingProxyType({"2d": _FLAT, "2.5d": _FLAT, "3d": _CUBE})


_CONVOLUTIONS: Final = (nn.Conv1d, nn.Conv2d, nn.Conv3d)


def by_grid(
    model: nn.Module, mode: str, kinds: Mapping[str, str], sizes: Mapping[str, int]
) -> dict[str, Cuts]:
    """For each parameter, for each dim, the axes that cut it.

    A dim with fewer elements than ranks stays whole.

    Args:
        kinds: of modules by name, ``"column"``, ``"row"``, ``"vocab"`` or ``"whole"``; others are
            ``"column"``, or ``"vocab"`` if they are embeddings.
        sizes: of the mesh's axes.
    """
    found: dict[int, Cuts] = {}
    for name, module in model.named_modules():
        looked_up = isinstance(module, nn.Embedding)
        kind = kinds.get(name, "vocab" if looked_up else "column")
        for _, own, p in parts_of(module):
            # of a weight that is tied the embedding decides
            if looked_up or id(p) not in found:
                cuts = ((),) * p.ndim if kind == "whole" else _cuts(module, own, p.ndim, ROLES[mode], kind)
                found[id(p)] = tuple(
                    axes if n >= math.prod(sizes[a] for a in axes) else ()
                    for n, axes in zip(p.shape, cuts, strict=True)
                )
    return {name: found[id(p)] for name, p in model.named_parameters()}


def _cuts(module: nn.Module, parameter: str, ndim: int, roles: Mapping[str, _Role], kind: str) -> Cuts:
    role = roles[kind]
    if isinstance(module, nn.Linear) or transposed(module):
        if parameter == "weight" and ndim == 2:
            return (role.into, role.out) if transposed(module) else (role.out, role.into)
        if ndim == 1:
            return (role.out[:1],)
    if isinstance(module, nn.Embedding) and ndim == 2:
        return role.into, role.out
    hidden = roles["row"].out[:1]
    if isinstance(module, _CONVOLUTIONS):
        return (hidden, *((),) * (ndim - 1))
    return (*((),) * (ndim - 1), hidden) if ndim else ()
