"""Parameters that share memory with others, which they no longer do once they are laid out."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import torch
from torch import nn

from espalier.blocks import named_parameters_in
from espalier.tensor.observers import tell
from espalier.texts import few
from espalier.torch_private import holders_of_memory, memory_id

_Named = list[tuple[str, torch.Tensor]]


def refuse_shared(model: nn.Module) -> None:
    """See that what is trained lies in memory of its own: laid out, each parameter and buffer does.

    Raises:
        ValueError: another parameter or buffer lies in it.
    """
    for some in _by_memory(model).values():
        for a, b in _meeting(some):
            if a[1].requires_grad or b[1].requires_grad:
                raise ValueError(
                    f"{_both(a, b, some)} of {type(model).__name__} are two tensors that share memory, and "
                    "are trained: laid out, each has its own, and what changes one would not reach the "
                    "other. To tie them put one parameter in both places (b.weight = a.weight, in place of "
                    "b.weight.data = a.weight.data); else give each its own (b.weight.data = "
                    "a.weight.data.clone())."
                )


def tell_of_shared(model: nn.Module) -> None:
    """Warn of what will no longer see what is written to parameters, nor they what is written to it.

    That are parameters of the same model that are not trained, those of other models (``q.data = p.data``),
    and what parameters are stretches of (a flat buffer).
    """
    held = _by_memory(model)
    for some in held.values():
        for a, b in _meeting(some):
            if isinstance(a[1], nn.Parameter) and isinstance(b[1], nn.Parameter):
                tell(
                    f"{_both(a, b, some)} of {type(model).__name__} are two tensors that share memory. Laid "
                    "out, each has its own: what is written to one does not reach the other. To tie them put "
                    "one parameter in both places (b.weight = a.weight)."
                )
    beside = {memory: some for memory, some in held.items() if holders_of_memory(some[0][1]) > len(some)}
    if not beside:
        return
    known = {id(x) for some in beside.values() for _, x in some}
    elsewhere, parts = set[str](), set[str]()
    for x in _tensors():
        if id(x) in known or (near := beside.get(memory_id(x))) is None:
            continue
        met = [name for name, p in near if isinstance(p, nn.Parameter) and _meet(p, x)]
        if isinstance(x, nn.Parameter):
            elsewhere.update(met)
        elif met and x.nbytes > max(p.nbytes for name, p in near if name in met):
            parts.update(met)

    def named(of: set[str]) -> str:
        names = few([name for some in held.values() for name, _ in some if name in of])
        return f"{names} of {type(model).__name__}"

    if elsewhere:
        tell(
            f"{named(elsewhere)} and parameters of another model share memory "
            "(q.data = p.data). Laid out, they have their own: what is written to one, or trained, does not "
            "reach the other. To tie them put one parameter in both places (b.weight = a.weight); for a copy "
            "write q.data.copy_(p.data), or q.data = p.data.clone()."
        )
    if parts:
        tell(
            f"{named(parts)} are stretches of a tensor that the program holds. Laid out, "
            "they have memory of their own: what is written to that tensor does not reach them. Write to the "
            "parameters."
        )


def _by_memory(model: nn.Module) -> dict[int, _Named]:
    """The parameters and buffers that lie in each memory."""
    held: dict[int, _Named] = {}
    for name, x in (*named_parameters_in(model), *model.named_buffers()):
        if _has_address(x):
            held.setdefault(memory_id(x), []).append((name, x))
    return held


def _has_address(x: torch.Tensor) -> bool:
    return type(x) in (torch.Tensor, nn.Parameter) and x.layout is torch.strided and not x.is_meta


def _tensors() -> Iterator[torch.Tensor]:
    """All that there are."""
    return (x for x in gc.get_objects() if type(x) in (torch.Tensor, nn.Parameter) and _has_address(x))


def _meeting(some: _Named) -> Iterator[tuple[tuple[str, torch.Tensor], tuple[str, torch.Tensor]]]:
    """Those of one memory that have elements in common."""
    before: _Named = []  # those that reach to where the next one begins
    for b, y in sorted(some, key=lambda named: _span(named[1])) if len(some) > 1 else ():
        first = _span(y)[0]
        before = [(a, x) for a, x in before if _span(x)[1] >= first]
        yield from (((a, x), (b, y)) for a, x in before if _meet(x, y))
        before.append((b, y))


def _both(a: tuple[str, torch.Tensor], b: tuple[str, torch.Tensor], some: _Named) -> str:
    return " and ".join(name for name, _ in some if name in (a[0], b[0]))


def _meet(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors of one memory have an element in common."""
    if not (x.numel() and y.numel()):
        return False
    firsts, lasts = zip(*map(_span, (x, y)), strict=True)
    if x.itemsize != y.itemsize:
        return True
    known = torch.zeros(max(lasts) - min(firsts) + 1, dtype=torch.bool, device="cpu")
    in_x, in_y = (known.as_strided(t.shape, t.stride(), t.storage_offset() - min(firsts)) for t in (x, y))
    in_x.fill_(True)
    return bool(in_y.any())


def _span(x: torch.Tensor) -> tuple[int, int]:
    """The first and the last element of memory that it has."""
    first = x.storage_offset()
    return int(first), int(first + sum((n - 1) * step for n, step in zip(x.shape, x.stride(), strict=True)))
