"""Tokens go to the ranks that hold their experts, and what these make of them comes back.

A stack of experts keeps its own ``forward``: it is called on this rank's experts alone and on the rows that
are theirs, each with one expert and the weight 1. Before it, rows are sorted by expert and sent along each
axis that cuts both the experts and the tokens: first how many, then the rows. After it they go back the same
way, where each token's are weighed and added up. Along an axis that cuts the experts while all of its ranks
hold the same tokens nothing is sent: each computes what is for its experts, and the result is Partial.

No expert has a limit, so nothing is dropped but what the model says (an index of ``num_experts``). Ranks to
which no token comes take part in everything with no rows. Lepikhin et al. 2020 (GShard); dropless: Gale et
al. 2022 (MegaBlocks).
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import lru_cache
from types import MethodType
from typing import Any, NamedTuple

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw
from torch.overrides import TorchFunctionMode

from espalier.comm import collectives as door
from espalier.comm import move, pieces
from espalier.comm.rows import send_rows
from espalier.comm.traced import recording
from espalier.layout import Layout
from espalier.layout.layout import R, V
from espalier.parallel.expert.modules import stacks
from espalier.tensor import plain, stamp
from espalier.tensor.dtensor import DTensor, layout_of, redistribute
from espalier.trees import tree_map


def send_tokens(model: nn.Module) -> None:
    """Let the stacks of experts in a model, whose parameters are DTensors, exchange tokens; in place."""
    for module in stacks(model).values():
        module.forward = MethodType(_forward, module)


def _forward(
    module: nn.Module,
    hidden_states: torch.Tensor,
    top_k_index: torch.Tensor,
    top_k_weights: torch.Tensor,
) -> torch.Tensor:
    """In place of the ``forward`` of a stack of experts; DTensors in and out.

    Raises:
        NotImplementedError: it is being compiled.
    """
    if recording():
        raise NotImplementedError(
            f"espalier.compile: how many rows go to which experts of this {type(module).__name__} hangs on "
            "values, and a graph has fixed shapes. Compile the modules beside it (attention, a shared MLP)."
        )
    if hidden_states.ndim != 2:
        flat = [x.flatten(0, -2) for x in (hidden_states, top_k_index, top_k_weights)]
        return _forward(module, *flat).view_as(hidden_states)
    experts = layout_of(next(module.parameters(recurse=False)))
    mesh, cutting = experts.mesh, experts.cuts[0]
    given = layout_of(hidden_states, mesh)
    states, out = [], []
    for a, s in enumerate(given.axes):
        shared = V if experts.axes[a] == V else R
        states.append(0 if s == 0 else V if a in cutting else shared)
        out.append(0 if s == 0 else "sum" if a in cutting else shared)
    differ = [a for a, s in enumerate(states) if s != R]
    rows = Layout.of(mesh, tuple(states), (given.cuts[0], ()), given.shape)
    x, weights, index = (_local(t, rows) for t in (hidden_states, top_k_weights, top_k_index))
    with raw():
        own = {name: _own(p, "." not in name, differ) for name, p in module.named_parameters()}
        y = _Dispatch(module, own, experts, [a for a in cutting if states[a] == 0])(x, index, weights)
        return stamp(y, Layout.of(mesh, tuple(out), rows.cuts, rows.shape))


def _local(x: torch.Tensor, rows: Layout) -> torch.Tensor:
    """This rank's part of something with the tokens first."""
    own = layout_of(x, rows.mesh)
    states = tuple(R if s == V and not x.is_floating_point() else s for s in rows.axes)
    dst = Layout.of(rows.mesh, states, rows.cuts, own.shape)
    return plain(redistribute(x if isinstance(x, DTensor) else stamp(x.view_as(x), own), dst))


def _own(p: Any, stacked: bool, differ: list[int]) -> torch.Tensor:
    """What experts here compute with of a parameter: their own, or the whole of what all of them share."""
    layout = p._layout if stacked else Layout.replicated(p._layout.mesh, p._layout.shape)
    return plain(move(p, p._layout, layout.with_varied(differ)))


class _Leg(NamedTuple):
    """One exchange: along which axis, how many rows came from and went to each, how they were sorted."""

    axis: int
    got: list[int]
    gave: list[int]
    order: torch.Tensor


class _Dispatch:
    """One call of a stack of experts, on local tensors.

    Args:
        own: the parameters, by name: of this rank's experts.
        layout: of a stacked parameter.
        exchanged: the axes, among those that cut the experts, that cut the tokens too; outermost first.
    """

    def __init__(
        self, module: nn.Module, own: Mapping[str, torch.Tensor], layout: Layout, exchanged: list[int]
    ) -> None:
        self._module, self._own, self._mesh, self._axes = module, own, layout.mesh, exchanged
        self._experts, self._at = layout.shape[0], _places(layout)
        kept = [a for a in layout.cuts[0] if a not in exchanged]
        here = self._mesh.coordinate
        # the experts that tokens of this rank may go to, and then those that it meets on its way
        self._reach = [e for e, at in enumerate(self._at) if all(at[a] == here[a] for a in kept)]

    def __call__(self, x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        tokens, k = index.shape
        counts, chosen = self._sorted(index.flatten())
        rows, legs = x[chosen // k], []
        for axis in self._axes:
            rows, counts, leg = self._sent(rows, counts, axis)
            legs.append(leg)
        made = self._computed(rows, counts)
        for leg in reversed(legs):
            back = torch.empty_like(leg.order).scatter_(0, leg.order, _count_to(leg.order))
            made = send_rows(made[back], self._mesh, leg.axis, leg.gave, leg.got)
        every = made.new_zeros(tokens * k, made.shape[-1]).index_copy(0, chosen, made)
        return (every.view(tokens, k, -1) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _sorted(self, index: torch.Tensor) -> tuple[list[int], torch.Tensor]:
        """How many of the choices go to each expert in reach, and which, sorted by expert."""
        n = self._experts
        if self._mesh.is_dry:
            counts = [(len(index) + n - 1 - e) // n for e in self._reach]
            return counts, index.new_empty(sum(counts))
        every = index.bincount(minlength=n + 1).tolist()
        order = index.argsort(stable=True)
        parts = order.split(every)
        return [every[e] for e in self._reach], torch.cat([order[:0], *(parts[e] for e in self._reach)])

    def _sent(self, rows: torch.Tensor, counts: list[int], axis: int) -> tuple[torch.Tensor, list[int], _Leg]:
        """Rows sorted by expert sent to where these are along an axis, and sorted again."""
        mesh, n, here = self._mesh, self._mesh.shape[axis], self._mesh.coordinate[axis]
        there = [self._at[e][axis] for e in self._reach]
        mine = there.count(here)
        sizes = torch.tensor(counts, dtype=torch.int64, device=rows.device)
        told = door.send(sizes, mesh, axis, [mine] * n, [there.count(i) for i in range(n)])
        own = [c for c, at in zip(counts, there, strict=True) if at == here]
        came = [own] * n if mesh.is_dry else told.view(n, mine).tolist()
        gave = [sum(c for c, at in zip(counts, there, strict=True) if at == i) for i in range(n)]
        got = [sum(row) for row in came]
        rows = send_rows(rows, mesh, axis, got, gave)
        self._reach = [e for e, at in zip(self._reach, there, strict=True) if at == here]
        order = rows.new_empty(len(rows), dtype=torch.int64)
        if not mesh.is_dry:
            order = _ids(list(itertools.chain(*came)), mine, rows.device).argsort(stable=True)
        return rows[order], [sum(column) for column in zip(*came, strict=True)], _Leg(axis, got, gave, order)

    def _computed(self, rows: torch.Tensor, counts: list[int]) -> torch.Tensor:
        """What this rank's experts make of rows sorted by expert, in the dtype of the rows on all ranks."""
        if not len(rows):
            # code for tokens may leave all out where there are none: backward must come by here all the same
            nothing = [p.reshape(-1)[:0].sum().to(rows.dtype) for p in self._own.values()]
            return rows + torch.stack(nothing).sum()
        module, forward = self._module, type(self._module).forward
        known: AbstractContextManager[Any] = nullcontext()
        if self._mesh.is_dry:
            # transformers' decorator would choose kernels that don't run on every dtype without data
            forward, known = inspect.unwrap(forward), _Known()
        index = _ids(counts, len(counts), "cpu" if self._mesh.is_dry else rows.device).unsqueeze(1)
        with _held(module, self._own, len(counts)), known:
            made: torch.Tensor = forward(module, rows, index, rows.new_ones(len(rows), 1))
        return made.to(rows.dtype)


def _ids(counts: list[int], n: int, device: Any) -> torch.Tensor:
    """The number of the expert of each row, where rows lie by expert, n of these, again and again."""
    sizes = torch.tensor(counts, dtype=torch.int64, device=device)
    return torch.arange(len(counts), device=device).remainder(max(n, 1)).repeat_interleave(sizes)


def _count_to(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device)


@lru_cache(maxsize=1024)
def _places(layout: Layout) -> list[dict[int, int]]:
    """Of each expert, on which coordinate it lies along each axis that cuts them."""
    cut, shape = layout.cuts[0], layout.mesh.shape
    found: list[dict[int, int]] = [{} for _ in range(layout.shape[0])]
    coordinates = itertools.product(*(range(shape[a]) for a in cut))
    for at, ((start, end),) in zip(coordinates, pieces(layout, 0), strict=True):
        for e in range(start, end):
            found[e] = dict(zip(cut, at, strict=True))
    return found


@contextmanager
def _held(module: nn.Module, own: Mapping[str, torch.Tensor], n: int) -> Iterator[None]:
    """While open, a module holds other parameters, of n experts."""
    kept = []
    for name, x in own.items():
        at, _, last = name.rpartition(".")
        owner: Any = module.get_submodule(at)
        kept.append((owner, last, owner._parameters[last]))
        owner._parameters[last] = x
    before, module.num_experts = module.num_experts, n  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_experts = before
        for owner, last, p in kept:
            owner._parameters[last] = p


class _Known(TorchFunctionMode):
    """In a dry run: indices have values, and where they meet tensors without, they lose them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = (args, kwargs or {})
        devices = set()
        tree_map(lambda x: devices.add(x.device.type) if isinstance(x, torch.Tensor) else None, given)
        if len(devices) > 1 and func is not torch.Tensor.__getitem__:
            given = tree_map(lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, given)
        return func(*given[0], **given[1])


__all__ = ["send_tokens"]
