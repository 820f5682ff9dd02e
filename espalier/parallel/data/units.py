"""Which parameters move together: the modules of a model as units, and units as chunks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from espalier.parallel.data.chunks import Chunk, Member

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)


def units(model: nn.Module) -> list[nn.Module]:
    """The modules whose parameters are gathered together while their forward runs, in order.

    They are the elements of the outermost lists of blocks, and what stands beside these lists. A module
    that is divided so is a unit for the parameters that are its own.
    """
    found: list[nn.Module] = []

    def visit(module: nn.Module) -> None:
        if not _has_blocks(module):
            found.append(module)
            return
        if any(True for _ in module.parameters(recurse=False)):
            found.append(module)
        for child in module.children():
            if not any(True for _ in child.parameters()):
                continue
            if isinstance(module, _LISTS):
                found.append(child)
            else:
                visit(child)

    visit(model)
    return found


def blocks(model: nn.Module) -> dict[str, nn.Module]:
    """The elements of the outermost lists of blocks, by name; those without parameters are left out."""
    found: dict[str, nn.Module] = {}

    def visit(module: nn.Module, prefix: str) -> None:
        for name, child in module.named_children():
            if not any(True for _ in child.parameters()):
                continue
            if isinstance(module, _LISTS):
                found[prefix + name] = child
            else:
                visit(child, f"{prefix}{name}.")

    visit(model, "")
    return found


def _has_blocks(module: nn.Module) -> bool:
    for m in module.modules():
        if isinstance(m, _LISTS) and sum(any(True for _ in c.parameters()) for c in m.children()) > 1:
            return True
    return False


def by_unit(members: Sequence[Member], model: nn.Module) -> list[tuple[list[nn.Module], Chunk]]:
    """Chunks of the parameters of each unit, and the modules that use them.

    A parameter that several units share belongs to the first, and all that hold it use its chunk.
    """
    by_id = {id(m.p): m for m in members}
    taken: dict[int, Chunk] = {}
    chunks: list[tuple[list[nn.Module], Chunk]] = []
    within = units(model)
    known = {id(unit) for unit in within}
    for unit in within:
        divided = any(id(m) in known for m in unit.modules() if m is not unit)
        own = unit.parameters(recurse=not divided)
        fresh = [by_id[id(p)] for p in own if id(p) in by_id and id(p) not in taken]
        for alike in _alike(list(dict.fromkeys(fresh))):
            chunk = Chunk(alike)
            chunks.append(([unit], chunk))
            taken.update({id(m.p): chunk for m in alike})
    users = {id(chunk): modules for modules, chunk in chunks}
    inside = {id(chunk): {id(m) for u in modules for m in u.modules()} for modules, chunk in chunks}
    for module in model.modules():
        for p in module._parameters.values():
            shared = None if p is None else taken.get(id(p))
            if shared is not None and id(module) not in inside[id(shared)]:
                users[id(shared)].append(module)
                inside[id(shared)].add(id(module))
    return chunks


def by_size(members: Sequence[Member], megabytes: float) -> list[Chunk]:
    """Chunks of about that size; the first is a tenth, so that sending starts early."""
    groups: list[list[Member]] = []
    limit = megabytes * 1e5
    open_: dict[Any, tuple[list[Member], float]] = {}
    for m in members:
        kind, size = (m.dtype, m.p.device, m.axes), m.size * m.dtype.itemsize
        group, filled = open_.get(kind, ([], 0.0))
        if not group or filled + size > limit:
            limit = megabytes * (1e6 if groups else 1e5)
            group, filled = [], 0.0
            groups.append(group)
        group.append(m)
        open_[kind] = group, filled + size
    return [Chunk(group) for group in groups]


def _alike(members: Sequence[Member]) -> Iterator[list[Member]]:
    """Members apart by dtype, device, axes, and whether they are trained."""
    groups: dict[tuple[torch.dtype, torch.device, tuple[int, ...], bool], list[Member]] = {}
    for m in members:
        groups.setdefault((m.dtype, m.p.device, m.axes, m.p.requires_grad), []).append(m)
    yield from groups.values()
