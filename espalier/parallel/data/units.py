"""Which parameters move together: the modules of a model as units, and units as chunks."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import torch
from torch import nn

from espalier.parallel.data.chunks import Chunk, Lane, Member

_LISTS = (nn.ModuleList, nn.Sequential, nn.ModuleDict)
Kind = tuple[torch.dtype, torch.device, Lane, tuple[int, ...], bool]


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


def parts(model: nn.Module) -> dict[str, nn.Module]:
    """The :func:`blocks`, by name; of a model without lists its children that have parameters.

    A module with one such child is taken for a wrapper of it; a model that has none is one part, named "".
    """
    return blocks(model) or _children(model)


def segments(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that are called and between which little is kept, by name.

    They are the :func:`parts`; where all of these are single layers, in lists, what the lists stand in.
    """
    found = parts(model)
    if isinstance(model, _LISTS) or any(_with_parameters(m) for m in found.values()):
        return found
    outer = _children(model)
    return outer if any(_with_parameters(m) for m in outer.values()) else found


def _children(model: nn.Module) -> dict[str, nn.Module]:
    prefix, inner = "", _with_parameters(model)
    while len(inner) == 1:
        ((name, child),) = inner.items()
        if not _with_parameters(child):
            break
        prefix, inner = f"{prefix}{name}.", _with_parameters(child)
    return {prefix + name: child for name, child in inner.items()} or {"": model}


def _with_parameters(module: nn.Module) -> dict[str, nn.Module]:
    return {name: m for name, m in module.named_children() if any(True for _ in m.parameters())}


def _has_blocks(module: nn.Module) -> bool:
    for m in module.modules():
        if isinstance(m, _LISTS) and sum(any(True for _ in c.parameters()) for c in m.children()) > 1:
            return True
    return False


def by_unit(members: Sequence[Member], model: nn.Module) -> list[tuple[list[nn.Module], Chunk]]:
    """Chunks of the parameters of each unit, and the modules that use them.

    A parameter that several units share belongs to the first, and all that hold it use its chunk. What is
    small beside the others (a last norm, say) shares a chunk that stays whole for a pass: less to wait for.
    Of a unit that has but some of its parameters here, the others being on another stage, the modules in it
    are units: it is never called itself.
    """
    by_id = {id(m.p): m for m in members}
    taken: dict[int, Chunk] = {}
    parts: list[tuple[list[nn.Module], list[Member]]] = []
    within = [part for unit in units(model) for part in _called(unit, by_id.keys())]
    known = {id(unit) for unit in within}
    for unit in within:
        divided = any(id(m) in known for m in unit.modules() if m is not unit)
        own = unit.parameters(recurse=not divided)
        fresh = [m for p in own if (m := by_id.pop(id(p), None)) is not None]
        parts += (([unit], alike) for alike in _alike(fresh).values())
    small = _small([sum(m.largest * m.dtype.itemsize for m in part) for _, part in parts])
    pools: dict[Kind, tuple[list[nn.Module], list[Member]]] = {}
    together: list[tuple[list[nn.Module], list[Member]]] = []
    for i, (modules, part) in enumerate(parts):
        pool = pools.get(_kind(part[0])) if i in small else None
        if pool is not None:
            pool[0].extend(modules)
            pool[1].extend(part)
            continue
        together.append((modules, part))
        if i in small:  # where the first stands: as gradients come from the last on, these are whole late
            pools[_kind(part[0])] = together[-1]
    chunks = [(modules, Chunk(part)) for modules, part in together]
    pooled = {id(part[0]) for _, part in pools.values()}
    for _, chunk in chunks:
        chunk.stays = any(id(m) in pooled for m in chunk.members)
        taken.update({id(m.p): chunk for m in chunk.members})
    users = {id(chunk): modules for modules, chunk in chunks}
    inside = {id(chunk): {id(m) for u in modules for m in u.modules()} for modules, chunk in chunks}
    for module in model.modules():
        for p in module._parameters.values():
            shared = None if p is None else taken.get(id(p))
            if shared is not None and id(module) not in inside[id(shared)]:
                users[id(shared)].append(module)
                inside[id(shared)].add(id(module))
    return chunks


def _called(unit: nn.Module, here: Collection[int]) -> list[nn.Module]:
    """A unit, or if only some of its parameters are here, itself and the units within it."""
    held = [id(p) in here for p in unit.parameters()]
    if all(held) or not any(held):
        return [unit]
    return [unit, *(part for child in unit.children() for part in _called(child, here))]


def by_size(members: Sequence[Member], megabytes: float) -> list[Chunk]:
    """Chunks of about that size; the first is a tenth, so that sending starts early."""
    groups: list[list[Member]] = []
    limit = megabytes * 1e5
    open_: dict[Kind, tuple[list[Member], float]] = {}
    for m in members:
        kind, size = _kind(m), m.largest * m.dtype.itemsize
        group, filled = open_.get(kind, ([], 0.0))
        if not group or filled + size > limit:
            limit = megabytes * (1e6 if groups else 1e5)
            group, filled = [], 0.0
            groups.append(group)
        group.append(m)
        open_[kind] = group, filled + size
    return [Chunk(group) for group in groups]


def by_part(members: Sequence[Member], parts: Sequence[Collection[str]]) -> list[list[Member]]:
    """The members of each part alone, and, last, the others."""
    found: list[list[Member]] = [[] for _ in (*parts, None)]
    for m in members:
        own = [i for i, names in enumerate(parts) if m.name in names]
        found[own[0] if len(own) == 1 else -1].append(m)
    return found


def smallest(chunks: Sequence[Chunk], most: float) -> set[int]:
    """The members whose pieces are the smallest, so many that their bytes are at most these."""
    found: set[int] = set()
    for m in sorted((m for chunk in chunks for m in chunk.members), key=lambda m: m.slot):
        most -= m.slot * m.dtype.itemsize
        if most < 0:
            break
        found.add(id(m))
    return found


def _small(sizes: Sequence[int]) -> set[int]:
    """The numbers of the smallest parts, together no more than a tenth of the largest one."""
    found: set[int] = set()
    left = max(sizes, default=0) / 10
    for i in sorted(range(len(sizes)), key=lambda i: sizes[i]):
        left -= sizes[i]
        if left < 0:
            break
        found.add(i)
    return found


def _kind(m: Member) -> Kind:
    return m.dtype, m.full.mesh.device(), m.lane, m.outer, m.p.requires_grad


def _alike(members: Sequence[Member]) -> dict[Kind, list[Member]]:
    """Members apart by dtype, device, axes, and whether they are trained."""
    groups: dict[Kind, list[Member]] = {}
    for m in members:
        groups.setdefault(_kind(m), []).append(m)
    return groups
