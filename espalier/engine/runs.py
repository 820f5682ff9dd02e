"""Parameters that lie one after the other in memory, updated as one.

Chunks put parameters, gradients and this rank's pieces of either into flat buffers. An optimizer that works
element by element does to a stretch of such buffers, bit by bit, what it does to each parameter in it, in a
dozen calls instead of a dozen for each. Its states then lie in flat buffers too, of which every parameter has
its view: what ``optimizer.state`` says of a parameter is what it would say anyway.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from operator import is_, itemgetter
from typing import Any, NamedTuple

import torch
from torch.autograd.graph import increment_version

from espalier.parallel.fused import may_fuse
from espalier.tensor import plain, stamp

State = dict[str, Any]

# elements of a run, if no fused kernel updates it: so what is computed on the way stays in a cache, and small
_MOST = 2**18
_OTHERWISE = ("foreach", "capturable", "differentiable")
# the C functions themselves: the way of every step, and a gradient is a DTensor
_address, _in_a_row = torch._C.TensorBase.data_ptr, torch._C.TensorBase.is_contiguous
_grad = vars(torch._C.TensorBase)["grad"].__get__
_dtype = vars(torch._C.TensorBase)["dtype"].__get__


class _Group(NamedTuple):
    """What the parameters of a group are: in runs of so many elements at most, in none, without gradients."""

    ids: list[int]
    most: float
    runs: list[_Run]
    alone: list[torch.Tensor]
    idle: list[torch.Tensor]

    def is_valid(self, params: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, most: float) -> bool:
        """Whether it would be the same again."""
        return (
            list(map(id, params)) == self.ids
            and self.most == most
            and all(_grad(p) is None for p in self.idle)
            and not any(_grad(p) is None for p in self.alone)
            and all(run.is_valid(optimizer) for run in self.runs)
        )


class Runs:
    """The runs of an optimizer's parameters.

    Torch functions are to be left alone, and parameters to be plain (their class is ``nn.Parameter``), while
    its methods are called.
    """

    def __init__(self) -> None:
        self._groups: dict[int, _Group] = {}

    @contextmanager
    def joined(self, optimizer: torch.optim.Optimizer) -> Iterator[list[torch.Tensor]]:
        """While open, the optimizer holds runs in place of what is in them; gives the other parameters."""
        kept = [group["params"] for group in optimizer.param_groups]
        before, self._groups = self._groups, {}
        others: list[torch.Tensor] = []
        for i, group in enumerate(optimizer.param_groups):
            params = group["params"]
            if any(group.get(name) for name in _OTHERWISE):
                others += params
                continue
            found, most = before.get(i), math.inf if may_fuse(optimizer, group) else _MOST
            if found is None or not found.is_valid(params, optimizer, most):
                found = _joined(params, optimizer, most)
            self._groups[i] = found
            others += found.alone
            group["params"] = [*[run.open(optimizer) for run in found.runs], *found.alone, *found.idle]
        try:
            yield others
        finally:
            for group, params in zip(optimizer.param_groups, kept, strict=True):
                group["params"] = params
            for run in (run for found in self._groups.values() for run in found.runs):
                run.close(optimizer)


def _joined(params: Sequence[torch.Tensor], optimizer: torch.optim.Optimizer, most: float) -> _Group:
    found = _Group(list(map(id, params)), most, [], [], [p for p in params if p.grad is None])
    for members in _adjacent([p for p in params if p.grad is not None], most):
        run = _Run.of(members, optimizer) if len(members) > 1 else None
        if run is None:
            found.alone.extend(members)
        else:
            found.runs.append(run)
    return found


class _Run:
    """Parameters one after the other.

    Args:
        states: theirs.
        state: of all as one.
    """

    def __init__(self, members: list[torch.Tensor], states: list[State], state: State) -> None:
        self._members, self._states, self._state = members, states, state
        self._sizes = [p.numel() for p in members]
        self._places = _steps(members), _steps(list(map(_grad, members)))
        self._flat: torch.Tensor | None = None
        # by name: those of the members that are views of a buffer, and of single numbers that buffer
        self._views: dict[str, list[torch.Tensor]] = {}
        self._numbers: dict[str, torch.Tensor] = {}
        for name in state:
            self._share(name)

    @staticmethod
    def of(members: list[torch.Tensor], optimizer: torch.optim.Optimizer) -> _Run | None:
        """A run, if the states of its members allow it."""
        states: list[State] = [optimizer.state.get(p, {}) for p in members]
        state: State = {}
        if any(given.keys() != states[0].keys() for given in states):
            return None
        for name, first in states[0].items():
            values = [given[name] for given in states]
            if not isinstance(first, torch.Tensor):
                if any(x is not first and x != first for x in values):
                    return None
                state[name] = first
                continue
            if any(not isinstance(x, torch.Tensor) or _dtype(x) is not _dtype(first) for x in values):
                return None
            tensors = [plain(x) for x in values]
            if all(x.ndim == 0 and x.equal(tensors[0]) for x in tensors):
                state[name] = tensors[0].clone()
            elif all(x.shape == p.shape and x.is_cpu for x, p in zip(tensors, members, strict=True)):
                state[name] = torch.cat([x.reshape(-1) for x in tensors])
            else:
                return None
        return _Run(members, states, state)

    def is_valid(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether its members still follow each other, and have the states that it gave them."""
        grads = list(map(_grad, self._members))
        if any(grad is None for grad in grads) or not all(map(_in_a_row, grads)):
            return False
        if (_steps(self._members), _steps(grads)) != self._places:
            return False
        if not (_in_one(self._members[0], self._members[-1]) and _in_one(grads[0], grads[-1])):
            return False
        if not all(map(is_, map(optimizer.state.get, self._members, self._states), self._states)):
            return False
        try:
            for name, parts in self._views.items():
                if not all(map(is_, map(itemgetter(name), self._states), parts)):
                    return False
        except KeyError:
            return False
        return all(x.equal(self._state[name].expand_as(x)) for name, x in self._numbers.items())

    def open(self, optimizer: torch.optim.Optimizer) -> torch.Tensor:
        """The flat tensor that is all its members, with its gradient and state."""
        first, n = self._members[0], sum(self._sizes)
        assert first.grad is not None
        self._flat = first.detach().as_strided((n,), (1,))
        self._flat.grad = plain(first.grad).as_strided((n,), (1,))
        if self._state:
            optimizer.state[self._flat] = self._state
        return self._flat

    def close(self, optimizer: torch.optim.Optimizer) -> None:
        """Give the members their parts of what the optimizer has made of the run."""
        assert self._flat is not None
        before, self._state = dict(self._state), optimizer.state.pop(self._flat, {})
        self._flat = None
        for name, x in self._state.items():
            if name not in before or x is not before[name]:
                self._share(name)
                optimizer.state.update(zip(self._members, self._states, strict=True))
            elif name in self._numbers:
                self._numbers[name].fill_(x.item())
        increment_version(self._members)

    def _share(self, name: str) -> None:
        """Let each member have its part of one of the states of all."""
        x = self._state[name]
        parts: list[Any] = [x] * len(self._members)
        if isinstance(x, torch.Tensor) and not x.ndim:
            self._numbers[name] = x.repeat(len(parts))
            parts = self._views[name] = list(self._numbers[name].unbind())
            self._state[name] = parts[0]
        elif isinstance(x, torch.Tensor):
            for i, (p, part) in enumerate(zip(self._members, x.split(self._sizes), strict=True)):
                parts[i], layout = part.view(p.shape), getattr(p, "_layout", None)
                if layout is not None:
                    stamp(parts[i], layout)
            self._views[name] = parts
        for given, part in zip(self._states, parts, strict=True):
            given[name] = part


def _steps(tensors: Sequence[torch.Tensor]) -> list[int]:
    """How far each lies behind the first, in bytes."""
    start = _address(tensors[0])
    return [_address(x) - start for x in tensors]


def _in_one(first: torch.Tensor, last: torch.Tensor) -> bool:
    """Whether memory that begins with a tensor goes on to the end of another."""
    storage = plain(first).untyped_storage()
    return _address(last) + plain(last).nbytes <= storage.data_ptr() + storage.nbytes()


def _adjacent(params: Sequence[torch.Tensor], most: float) -> list[list[torch.Tensor]]:
    """Parameters with gradients, by stretches in which both lie one after the other."""
    found: list[list[torch.Tensor]] = []
    here = there = 0
    left = 0.0
    for address, _, p in sorted([(p.data_ptr(), i, p) for i, p in enumerate(params)]):
        grad, n = p.grad, p.numel()
        assert grad is not None
        at = _address(grad)
        joins = p.ndim > 0 and p.is_cpu and _dtype(grad) is p.dtype and p.is_contiguous() and _in_a_row(grad)
        fits = joins and 0 < n <= left and address == here and at == there and p.dtype is found[-1][0].dtype
        if fits and _in_one(found[-1][0], p) and _in_one(found[-1][0].grad, grad):  # type: ignore[arg-type]
            found[-1].append(p)
        else:
            found.append([p])
            left = most if joins else 0
        here, there, left = address + p.nbytes, at + p.nbytes, left - n
    return found


__all__ = ["Runs"]
