"""What an optimizer holds in a step, and updates by torch's fused kernels.

For a step others may take the place of its parameters: see :func:`holding`.

Such a kernel goes through memory once, and is several times as fast as the same update, operation by
operation. It takes elements by vectors, and what is left at the end of a tensor one by one, which may round
otherwise. So that an element's bits don't hang on how tensors are cut, what is left lies here at the start of
a vector of zeros.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from itertools import repeat
from operator import is_
from typing import Any, Protocol

import torch

from espalier.device import is_accelerator, moved
from espalier.tensor import plain
from espalier.torch_private import fused_devices, getter, method

State = dict[str, Any]

_KERNELS = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)
_OF_ACCELERATORS = _KERNELS[:3]
_DTYPES = {torch.float32, torch.float64, torch.bfloat16, torch.float16}
_STRIDED = {torch.strided}
# the C functions themselves: this is the way of every step
_in_a_row, _nbytes = method("is_contiguous"), getter("nbytes")
_grad = getter("grad")
_device, _dtype, _is_cpu = (getter(name) for name in ("device", "dtype", "is_cpu"))
_layout = getter("layout")
_WRONG = (torch.bfloat16, torch.float16)  # for SGD: up to torch 2.13 at least, whole vectors are not updated

VECTOR = 64
"""Bytes: of the longest vectors, and what torch lets a tensor's memory begin at a multiple of."""


def has_host_kernel(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch has a fused kernel for it on the CPU."""
    return type(optimizer) in _KERNELS


def may_fuse(optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> bool:
    """Whether a fused kernel may update a group: it was asked for, or the choice was left open."""
    if (said := group.get("fused", False)) is not None:
        return bool(said)
    others = ("differentiable", "capturable")
    return has_host_kernel(optimizer) and group["foreach"] is None and not any(map(group.get, others))


class Substitute(Protocol):
    """What an optimizer updates in place of parameters."""

    def close(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parameters what the optimizer has made of it."""


@contextmanager
def holding(optimizer: torch.optim.Optimizer) -> Iterator[list[Substitute]]:
    """While open, the groups of an optimizer may hold others than its parameters: those noted in the list."""
    kept = [(group, group["params"], group.get("fused")) for group in optimizer.param_groups]
    substitutes: list[Substitute] = []
    count = len(optimizer.state)
    try:
        yield substitutes
    finally:
        for group, params, said in kept:
            group["params"] = params
            if "fused" in group:
                group["fused"] = said
        for substitute in reversed(substitutes):
            substitute.close(optimizer)
        if substitutes and len(optimizer.state) != count:
            _put_in_order(optimizer)


def _put_in_order(optimizer: torch.optim.Optimizer) -> None:
    """Let states stand as their parameters do, on all ranks alike, whatever of these lies together here."""
    held = (p for group in optimizer.param_groups for p in group["params"])
    places = {id(p): place for place, p in enumerate(held)}
    states = sorted(optimizer.state.items(), key=lambda pair: places.get(id(pair[0]), len(places)))
    optimizer.state.clear()
    optimizer.state.update(states)


def fuse(optimizer: torch.optim.Optimizer, substitutes: list[Substitute]) -> None:
    """Let the optimizer take fused kernels where it may, on contiguous tensors of whole vectors.

    It is :func:`holding` what is noted. Torch functions are to be left alone, and parameters to be plain.
    """
    for group in optimizer.param_groups:
        if not may_fuse(optimizer, group):
            continue
        params, grads = group["params"], list(map(_grad, group["params"]))
        if any(map(is_, grads, repeat(None))):
            params = [p for p, grad in zip(params, grads, strict=True) if grad is not None]
            grads = [grad for grad in grads if grad is not None]
        suits = not _is_wrong(optimizer, params)
        takes = suits and (group["fused"] is not None or _suits(optimizer, group, params, grads))
        if takes or group["fused"] is not None or not any(is_accelerator(p.device) for p in params):
            group["fused"] = takes  # else torch takes calls on lists there, if nothing is said
        if takes:
            _bring_counts(optimizer, params)
            parts = {id(p): _Stand(p, optimizer) for p in _unready(params, grads)}
            substitutes += parts.values()
            group["params"] = params
            if parts:
                lists = [parts[id(p)].parts if id(p) in parts else [p] for p in params]
                group["params"] = [p for some in lists for p in some]


def _suits(
    optimizer: torch.optim.Optimizer,
    group: State,
    params: Sequence[torch.Tensor],
    grads: Sequence[torch.Tensor],
) -> bool:
    """Whether the kernel, where the choice is ours, takes all of them."""
    dtypes = list(map(_dtype, params))
    if not _DTYPES.issuperset(dtypes) or list(map(_dtype, grads)) != dtypes:
        return False
    if not _STRIDED.issuperset(map(_layout, grads)):
        return False
    if not all(map(_is_cpu, params)) and not _has_device_kernel(optimizer, params):
        # without values torch has the kernels of Adam only, and makes no states for them
        ready = (p.is_cpu or (p.is_meta and "exp_avg" in optimizer.state.get(p, {})) for p in params)
        if not all(ready):
            return False
    rate = group.get("lr")
    is_read = not isinstance(rate, torch.Tensor) or rate.is_cpu or rate.dtype is torch.float32
    if not is_read and not all(map(_is_cpu, params)):
        return False  # kernels of devices read a rate there in float32
    # torch's kernel of SGD begins with all momenta or with none
    return not group.get("momentum") or len({_has_momentum(optimizer, p) for p in params}) < 2


def _has_device_kernel(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> bool:
    """Whether all are on accelerators, for which torch has a fused kernel."""
    kinds = {device.type for device in set(map(_device, params))}
    return (
        type(optimizer) in _OF_ACCELERATORS
        and all(map(is_accelerator, kinds))
        and kinds.issubset(fused_devices())
    )


def _bring_counts(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> None:
    """A fused kernel wants the count of steps where the parameter is: it may come from the host, once."""
    if all(map(_is_cpu, params)):
        return
    held = [optimizer.state.get(p, {}) for p in params]
    counts = [state["step"] for state in held if isinstance(state.get("step"), torch.Tensor)]
    if len(set(map(_device, counts)) | {*map(_device, params)}) == 1:
        return  # as after the first step
    for p, state in zip(params, held, strict=True):
        step = state.get("step")
        if isinstance(step, torch.Tensor) and step.device != p.device and not p.is_meta:
            state["step"] = moved(step, p.device)


def _is_wrong(optimizer: torch.optim.Optimizer, params: Sequence[torch.Tensor]) -> bool:
    return type(optimizer) is torch.optim.SGD and any(p.is_cpu and p.dtype in _WRONG for p in params)


def _has_momentum(optimizer: torch.optim.Optimizer, p: torch.Tensor) -> bool:
    return optimizer.state.get(p, {}).get("momentum_buffer") is not None


def _unready(params: Sequence[torch.Tensor], grads: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Those that are not contiguous, as their gradients are to be, or on the CPU no whole vectors."""
    ready = zip(params, map(_in_a_row, params), map(_in_a_row, grads), map(_nbytes, params), strict=True)
    return [p for p, in_a_row, grad, n in ready if not (in_a_row and grad) or (n % VECTOR and p.is_cpu)]


class _Stand:
    """Stands in for a parameter while a kernel updates it: its whole vectors, and what is left in one more.

    Attributes:
        parts: what the optimizer is to hold.
    """

    def __init__(self, p: torch.Tensor, optimizer: torch.optim.Optimizer) -> None:
        self._p, self._state = p, optimizer.state.get(p, {})
        self._left = p.nbytes % VECTOR // p.element_size() if p.is_cpu else 0
        self._whole = p.numel() - self._left
        assert p.grad is not None
        self.parts = self._cut(p.detach())
        for part, grad in zip(self.parts, self._cut(plain(p.grad)), strict=True):
            part.grad = grad
        states: list[State] = [{} for _ in self.parts]
        for name, x in self._state.items():
            # by its name, as a parameter may have no dims either
            is_number = name == "step" or not isinstance(x, torch.Tensor)
            pieces = [x, _copied(x)] if is_number else self._cut(plain(x))
            for state, piece in zip(states, pieces, strict=False):
                state[name] = piece
        if self._state:
            optimizer.state.update(zip(self.parts, states, strict=True))

    def close(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the parameter what the kernel has made of its parts."""
        self._put(self.parts, self._p.detach())
        states = [optimizer.state.pop(part, {}) for part in self.parts]
        for name, x in states[0].items():
            if name == "step" or not isinstance(x, torch.Tensor):
                self._state[name] = x
            elif not isinstance(self._state.get(name), torch.Tensor):
                self._state[name] = self._whole_of([state[name] for state in states])
            else:
                self._put([state[name] for state in states], plain(self._state[name]))
        if states[0]:
            optimizer.state[self._p] = self._state

    def _cut(self, x: torch.Tensor) -> list[torch.Tensor]:
        flat = x.contiguous().view(-1)
        parts = [flat[: self._whole]] if self._whole else []
        if self._left:
            parts.append(flat.new_zeros(VECTOR // flat.element_size()))
            parts[-1][: self._left] = flat[self._whole :]
        return parts

    def _whole_of(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts))[: self._whole + self._left].view(self._p.shape)

    def _put(self, parts: Sequence[torch.Tensor], to: torch.Tensor) -> None:
        if not to.is_contiguous():
            to.copy_(self._whole_of(parts))
        elif self._left:  # the rest lies in it
            to.view(-1)[self._whole :] = parts[-1][: self._left]


def _copied(x: Any) -> Any:
    return x.clone() if isinstance(x, torch.Tensor) else deepcopy(x)


def whole_vectors(elements: int, dtype: torch.dtype) -> int:
    """So many elements, and as many more as fill the last of their vectors."""
    vector = VECTOR // dtype.itemsize
    return -(-elements // vector) * vector
