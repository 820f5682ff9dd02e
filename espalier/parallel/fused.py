"""Updates by torch's fused kernels for the CPU.

Such a kernel goes through memory once, and is several times as fast as the same update, operation by
operation. It takes elements by vectors, and what is left at the end of a tensor one by one, which may round
otherwise. So that an element's bits don't hang on how tensors are cut, what is left lies here at the start of
a vector of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from typing import Any

import torch

from espalier.tensor import plain

State = dict[str, Any]

_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
_WRONG = (torch.bfloat16, torch.float16)  # for SGD: up to torch 2.13 at least, whole vectors are not updated
_VECTOR = 64  # bytes: of the longest vectors, and of what the kernels cut a tensor into for threads


def has_host_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has a fused kernel for it on the CPU."""
    return type(optimizer) in _KERNELS


def may_fuse(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a fused kernel may update a group: it was asked for, or the choice was left open."""
    if (said := group.get("fused", False)) is not None:
        return bool(said)
    others = ("differentiable", "capturable")
    return has_host_kernel(optimizer) and group["foreach"] is None and not any(map(group.get, others))


@contextmanager
def fused(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """While open, the optimizer takes fused kernels where it may, on contiguous tensors of whole vectors.

    Torch functions are to be left alone, and parameters to be plain.
    """
    kept: list[tuple[State, Any, list[torch.Tensor]]] = []
    stands: list[_Stand] = []
    for group in optimizer.param_groups:
        if not may_fuse(optimizer, group):
            continue
        kept.append((group, group["fused"], group["params"]))
        params = [p for p in group["params"] if p.grad is not None]
        takes = (
            _suits(optimizer, group, params) if group["fused"] is None else not _is_wrong(optimizer, params)
        )
        group["fused"] = takes
        if takes:
            parts = {id(p): _Stand(p, optimizer) for p in params if not _is_ready(p)}
            stands += parts.values()
            held = [parts[id(p)].parts if id(p) in parts else [p] for p in params]
            group["params"] = [p for some in held for p in some]
    try:
        yield
    finally:
        for group, said, params in kept:
            group.update(fused=said, params=params)
        for stand in stands:
            stand.close(optimizer)


def _suits(optimizer: torch.optim.Optimizer, group: State, params: Sequence[torch.Tensor]) -> bool:
    """Whether the kernel takes all of them."""
    for p in params:
        grad = p.grad
        assert grad is not None
        if p.dtype not in _DTYPES or grad.dtype is not p.dtype or grad.layout is not torch.strided:
            return False
        # without values torch has the kernels of Adam only, and makes no states for them
        if not p.is_cpu and not (p.is_meta and "exp_avg" in optimizer.state.get(p, {})):
            return False
    if _is_wrong(optimizer, params):
        return False
    # torch's kernel of SGD begins with all momenta or with none
    return not group.get("momentum") or len({_has_momentum(optimizer, p) for p in params}) < 2


def _is_wrong(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> bool:
    return type(optimizer) is torch.optim.SGD and any(p.is_cpu and p.dtype in _WRONG for p in params)


def _has_momentum(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> bool:
    return optimizer.state.get(p, {}).get("momentum_buffer") is not None


def _is_ready(p: torch.Tensor) -> bool:
    assert p.grad is not None
    return p.is_contiguous() and p.grad.is_contiguous() and not (p.is_cpu and p.nbytes % _VECTOR)


class _Stand:
    """Stands in for a parameter while a kernel updates it: its whole vectors, and what is left in one more.

    Attributes:
        parts: what the optimizer is to hold.
    """

    def __init__(self, p: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._p, self._state = p, optimizer.state.get(p, {})
        self._left = p.nbytes % _VECTOR // p.element_size() if p.is_cpu else 0
        self._whole = p.numel() - self._left
        assert p.grad is not None
        self.parts = self._cut(p.detach())
        for part, grad in zip(self.parts, self._cut(plain(p.grad)), strict=True):
            part.grad = grad
        for name, x in self._state.items():
            is_number = name == "step" or not isinstance(
                x, torch.Tensor
            )  # a parameter may have no dims either
            for part, piece in zip(
                self.parts, [x, deepcopy(x)] if is_number else self._cut(plain(x)), strict=False
            ):
                optimizer.state[part][name] = piece

    def close(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parameter what the kernel has made of its parts."""
        self._put(self.parts, self._p.detach())
        made = [optimizer.state.pop(part, {}) for part in self.parts]
        for name, x in made[0].items():
            if name == "step" or not isinstance(x, torch.Tensor):
                self._state[name] = x
            elif not isinstance(self._state.get(name), torch.Tensor):
                self._state[name] = self._whole_of([state[name] for state in made])
            else:
                self._put([state[name] for state in made], plain(self._state[name]))
        if made[0]:
            optimizer.state[self._p] = self._state

    def _cut(self, x: torch.Tensor) -> list[torch.Tensor]:
        flat = x.contiguous().view(-1)
        parts = [flat[: self._whole]] if self._whole else []
        if self._left:
            parts.append(flat.new_zeros(_VECTOR // flat.element_size()))
            parts[-1][: self._left] = flat[self._whole :]
        return parts

    def _whole_of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))[: self._whole + self._left].view(self._p.shape)

    def _put(self, parts: Sequence[torch.Tensor], to: torch.Tensor) -> None:
        if not to.is_contiguous():
            to.copy_(self._whole_of(parts))
        elif self._left:  # the rest lies in it
            to.view(-1)[self._whole :] = parts[-1][: self._left]


__all__ = ["fused", "has_host_kernel", "may_fuse"]
