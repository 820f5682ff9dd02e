"""Tensor-parallel layouts by name pattern, for models that are described.

A pattern (``fnmatch``) names modules; what it says holds for their parameters:

============  ===============================================================
``column``    the output features are cut: weight [out, in] on out, bias too
``row``       the input features are cut: weight on in, bias whole
``vocab``     the rows of an embedding are cut
``whole``     nothing is cut
============  ===============================================================

Column then row is Megatron-LM's pair: no communication between them, one all-reduce after.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from types import MappingProxyType
from typing import Final

from torch import nn

Table = Mapping[str, str]

_GPT2: Final[Table] = MappingProxyType(
    {
        "embed": "vocab",
        "*.attention.[qkv]_proj": "column",
        "*.attention.o_proj": "row",
        "*.mlp.up_proj": "column",
        "*.mlp.down_proj": "row",
        "head": "column",
    }
)
_GPT: Final[Table] = MappingProxyType({**_GPT2, "*.mlp.gate_proj": "column"})
_VIT: Final[Table] = MappingProxyType({name: kind for name, kind in _GPT2.items() if "*" in name})
# what every token passes; the experts themselves are laid out by espalier.parallel.expert
_MOE: Final[Table] = MappingProxyType(
    {name.replace(".mlp.", ".shared."): kind for name, kind in _GPT.items()}
)

# by class name, so that this file needs none of the models
TABLES: Final[Mapping[str, Table]] = MappingProxyType(
    {"GPT": _GPT, "GPT2": _GPT2, "BERT": _GPT2, "ViT": _VIT, "MoE": _MOE}
)

KINDS: Final = ("column", "row", "vocab", "whole")


def table_for(model: nn.Module) -> Table | None:
    """The table of a described model (one of ``espalier.models``), or None."""
    if not type(model).__module__.startswith("espalier.models"):
        return None
    names = [name for name, _ in model.named_modules()]
    table = TABLES.get(type(model).__name__, {})
    return {pattern: kind for pattern, kind in table.items() if fnmatch.filter(names, pattern)} or None


def by_table(model: nn.Module, table: Table) -> dict[str, int]:
    """For each parameter that the table cuts, the dim that the tensor axis cuts.

    Raises:
        ValueError: listing all patterns that match nothing, unknown kinds, and kinds that don't fit.
    """
    cut: dict[str, int] = {}
    wrong: list[str] = []
    modules = dict(model.named_modules())
    for pattern, kind in table.items():
        matched = fnmatch.filter(modules, pattern)
        if kind not in KINDS:
            wrong.append(f"{pattern!r}: unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
        elif not matched:
            wrong.append(f"{pattern!r} matches no module of {type(model).__name__}")
        for name in matched if kind in KINDS else ():
            for own, parameter in modules[name].named_parameters(recurse=False):
                dim = _dim(modules[name], own, kind)
                if dim is not None and dim < parameter.ndim:
                    cut[f"{name}.{own}" if name else own] = dim
    if wrong:
        raise ValueError("\n  ".join(["Tensor-parallel layouts:", *wrong]))
    return cut


def _dim(module: nn.Module, parameter: str, kind: str) -> int | None:
    if kind in ("column", "vocab"):
        return 1 if transposed(module) and parameter == "weight" else 0
    if kind == "row" and parameter == "weight":
        return 0 if transposed(module) else 1
    return None


def transposed(module: nn.Module) -> bool:
    """Whether a layer keeps its weight as [in, out]: transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D"
