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
import re
from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Final

from torch import nn
from torch.nn.utils.parametrize import is_parametrized

Table = Mapping[str, str]
_HOOKED = re.compile("_(g|v|orig)$")  # what torch.nn.utils.weight_norm and its kin call them

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


def kinds_of(model: nn.Module, table: Table) -> dict[str, str]:
    """For each module that the table names, what it says of it.

    Raises:
        ValueError: listing all patterns that match nothing and unknown kinds.
    """
    found: dict[str, str] = {}
    wrong: list[str] = []
    modules = dict(model.named_modules())
    for pattern, kind in table.items():
        matched = fnmatch.filter(modules, pattern)
        if kind not in KINDS:
            wrong.append(f"{pattern!r}: unknown kind {kind!r}; expected one of {', '.join(KINDS)}")
        elif not matched:
            wrong.append(f"{pattern!r} matches no module of {type(model).__name__}")
        found.update(dict.fromkeys(matched, kind))
    if wrong:
        raise ValueError("\n  ".join(["Tensor-parallel layouts:", *wrong]))
    return found


def by_table(model: nn.Module, table: Table) -> dict[str, int]:
    """For each parameter that the table cuts, the dim that the tensor axis cuts.

    Raises:
        ValueError: see :func:`kinds_of`.
    """
    cut: dict[str, int] = {}
    for name, kind in kinds_of(model, table).items():
        module = model.get_submodule(name)
        for own, of, parameter in parts_of(module):
            dim = dim_of(module, of, kind)
            # a factor for each row has one column
            if dim is not None and dim < parameter.ndim and (own == of or parameter.shape[dim] > 1):
                cut[f"{name}.{own}" if name else own] = dim
    return cut


def parts_of(module: nn.Module) -> Iterator[tuple[str, str, nn.Parameter]]:
    """A module's own parameters, and those that its parametrized tensors are made of.

    Yields:
        the parameter's name in the module, the name of what is made of it (``"weight"``), and itself.
    """
    for name, p in module.named_parameters(recurse=False):
        base = _HOOKED.sub("", name)
        yield name, base if base in vars(module) else name, p
    if is_parametrized(module):
        for of, held in module.parametrizations.items():  # type: ignore[operator, union-attr]
            for name, p in held.named_parameters(recurse=False):
                yield f"parametrizations.{of}.{name}", of, p


def kinds_from(model: nn.Module, cut: Mapping[str, int]) -> dict[str, str]:
    """The kinds of modules whose weights are cut so: the other way of :func:`by_table`."""
    found = {}
    for owner, module in model.named_modules():
        for own, of, _ in parts_of(module):
            dim = cut.get(f"{owner}.{own}" if owner else own)
            if dim is not None and of == "weight" and dim_of(module, of, "row") == dim:
                found[owner] = "row"
    return found


def dim_of(module: nn.Module, parameter: str, kind: str) -> int | None:
    """The dim of a module's parameter that the tensor axis cuts; None for one that stays whole."""
    if kind in ("column", "vocab"):
        return 1 if transposed(module) and parameter == "weight" else 0
    if kind == "row" and parameter == "weight":
        return 0 if transposed(module) else 1
    return None


def transposed(module: nn.Module) -> bool:
    """Whether a layer keeps its weight as [in, out]: transformers' Conv1D does."""
    return type(module).__name__ == "Conv1D"
