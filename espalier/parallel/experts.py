"""Which modules of a model are stacks of experts.

Espalier's own, and those of transformers (Mixtral, Qwen, DeepSeek, GPT-OSS, ...), hold the weights of all
experts of a layer as parameters [experts, ...] and are called on tokens and their routing:
``experts(hidden [tokens, h], index [tokens, k], weights [tokens, k])``. They are known by that shape, so that
models need no change, and a user's own module is one of them if it is built so.
"""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import lru_cache
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.blocks import around
from espalier.comm import collectives, move, spans_of
from espalier.comm.custom_ops import recording
from espalier.comm.row_exchange import send_rows
from espalier.device import is_accelerator, moved
from espalier.layout import Layout
from espalier.layout.layout import D, R
from espalier.tensor import plain, stamp
from espalier.tensor.dry_runs import is_followed
from espalier.tensor.dtensor import DTensor, layout_of, redistribute, up_to_date
from espalier.torch_private import own_parameters, raw
from espalier.trees import tree_map


@runtime_checkable
class SortedExperts(Protocol):
    """A stack of experts that may be given rows sorted by expert, so that nothing is counted again."""

    def of_sorted(self, rows: torch.Tensor, sizes: list[int]) -> torch.Tensor:
        """What each expert makes of its rows.

        Args:
            rows: [rows, hidden], those of the first expert first.
            sizes: how many are each one's.
        """


_ROUTING = (("top_k_index", "top_k_weights"), ("router_indices", "routing_weights"))


def is_experts(module: nn.Module) -> bool:
    """Whether a module is a stack of experts."""
    n = getattr(module, "num_experts", None)
    parameters = list(module.parameters(recurse=False))
    if not isinstance(n, int) or not parameters or any(p.ndim < 2 or p.shape[0] != n for p in parameters):
        return False
    names = tuple(inspect.signature(type(module).forward).parameters)
    return names[2:4] in _ROUTING


def stacks(model: nn.Module) -> dict[str, nn.Module]:
    """The stacks of experts in a model, by name."""
    return {name: module for name, module in model.named_modules() if is_experts(module)}


@contextmanager
def left_out(model: nn.Module) -> Iterator[None]:
    """While open, the stacks of experts in a model hand tokens on: to see how all else computes."""

    def forward(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return x * weights.sum(-1, keepdim=True).to(x.dtype)

    with ExitStack() as put_around:
        for module in stacks(model).values():
            put_around.callback(around(module, lambda module, own, args, kwargs: forward(*args, **kwargs)))
        yield


def stacked(model: nn.Module) -> set[str]:
    """The names of the parameters that hold one entry for each expert."""
    return {
        f"{name}.{own}" if name else own
        for name, module in stacks(model).items()
        for own, _ in module.named_parameters(recurse=False)
    }


# ---- tokens go to the ranks that hold their experts, and what these make of them comes back
#
# A stack of experts keeps its own ``forward``: it is called on this rank's experts alone and on the rows
# that are theirs, each with one expert and the weight 1. Before it, rows are sorted by expert and sent
# along each axis that cuts both the experts and the tokens: first how many, then the rows. After it they go
# back the same way, where each token's are weighed and added up. Along an axis that cuts the experts while
# all of its ranks hold the same tokens nothing is sent: each computes what is for its experts, and the
# result is Partial.
#
# No expert has a limit, so nothing is dropped but what the model says (an index of ``num_experts``). Ranks
# to which no token comes take part in everything with no rows. Lepikhin et al. 2020 (GShard); dropless:
# Gale et al. 2022 (MegaBlocks).


def send_tokens(model: nn.Module) -> None:
    """Let the stacks of experts in a model, whose parameters are DTensors, exchange tokens; in place."""
    for module in stacks(model).values():
        around(module, lambda module, own, args, kwargs: _forward(module, *args, **kwargs))


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
    first: Any = next(module.parameters(recurse=False))
    experts = layout_of(up_to_date(first))  # where a block is divided, nobody has made its parameters whole
    mesh = experts.mesh
    cutting = [a for a in experts.cuts[0] if mesh.shape[a] > 1]
    layout = layout_of(hidden_states, mesh)
    states, out = [], []
    for a, s in enumerate(layout.axes):
        shared = D if experts.axes[a] == D else R
        states.append(0 if s == 0 else D if a in cutting else shared)
        out.append(0 if s == 0 else "sum" if a in cutting else shared)
    differ = [a for a, s in enumerate(states) if s != R]
    rows = Layout.of(mesh, tuple(states), (layout.cuts[0], ()), layout.shape)
    x, weights, index = (_local(t, rows) for t in (hidden_states, top_k_weights, top_k_index))
    with raw():
        parameters = {name: _own(p, "." not in name, differ) for name, p in module.named_parameters()}
        y = _Dispatch(module, parameters, experts, [a for a in cutting if states[a] == 0])(x, index, weights)
        return stamp(y, Layout.of(mesh, tuple(out), rows.cuts, rows.shape))


def _local(x: torch.Tensor, rows: Layout) -> torch.Tensor:
    """This rank's part of something with the tokens first."""
    layout = layout_of(x, rows.mesh)
    states = tuple(R if s == D and not x.is_floating_point() else s for s in rows.axes)
    dst = Layout.of(rows.mesh, states, rows.cuts, layout.shape)
    return plain(redistribute(x if isinstance(x, DTensor) else stamp(x.view_as(x), layout), dst))


def _own(p: Any, stacked: bool, differ: list[int]) -> torch.Tensor:
    """What experts here compute with of a parameter: their own, or the whole of what all of them share."""
    p = up_to_date(p)
    layout = p._layout if stacked else Layout.replicated(p._layout.mesh, p._layout.shape)
    return plain(move(p, p._layout, layout.with_deferred(differ)))


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
        counts, chosen, came = self._sorted(index.flatten())
        rows, legs = x[chosen // k], []
        for i, axis in enumerate(self._axes):
            rows, counts, leg = self._sent(rows, counts, axis, came if i == 0 else None)
            legs.append(leg)
        outputs = self._computed(rows, counts)
        for leg in reversed(legs):
            back = torch.empty_like(leg.order).scatter_(0, leg.order, _count_to(leg.order))
            outputs = send_rows(outputs[back], self._mesh, leg.axis, leg.gave, leg.got)
        every = outputs.new_zeros(tokens * k, outputs.shape[-1]).index_copy(0, chosen, outputs)
        return (every.view(tokens, k, outputs.shape[-1]) * weights.unsqueeze(-1)).sum(1).to(x.dtype)

    def _sorted(self, index: torch.Tensor) -> tuple[list[int], torch.Tensor, list[int] | None]:
        """How many of the choices go to each expert in reach, which, sorted by expert, and how many come.

        The last where the numbers are on an accelerator: there those of the first exchange are sent before
        the host reads any, so that it waits once.
        """
        n = self._experts
        if self._mesh.is_dry:
            counts = [(len(index) + n - 1 - e) // n for e in self._reach]
            return counts, index.new_empty(sum(counts)), None
        came: list[int] | None = None
        if is_accelerator(index.device):
            sizes = index.new_zeros(n + 1).scatter_add_(0, index, torch.ones_like(index))
            to_read = [sizes]
            if self._axes:
                reach = moved(torch.tensor(self._reach, device="cpu"), index.device)
                to_read.append(self._told(sizes.index_select(0, reach), self._axes[0]))
            numbers = torch.cat(to_read).tolist()
            every, came = numbers[: n + 1], numbers[n + 1 :]
        else:
            every = index.bincount(minlength=n + 1).tolist()
        order = index.argsort(stable=True)
        parts = order.split(every)
        chosen = torch.cat([order[:0], *(parts[e] for e in self._reach)])
        return [every[e] for e in self._reach], chosen, came

    def _told(self, sizes: torch.Tensor, axis: int) -> torch.Tensor:
        """How many rows come from each rank for each expert here; ``sizes`` go to those in reach."""
        n = self._mesh.shape[axis]
        there = [self._at[e][axis] for e in self._reach]
        mine = there.count(self._mesh.coordinate[axis])
        return collectives.send(sizes, self._mesh, axis, [mine] * n, [there.count(i) for i in range(n)])

    def _sent(
        self, rows: torch.Tensor, counts: list[int], axis: int, numbers: list[int] | None
    ) -> tuple[torch.Tensor, list[int], _Leg]:
        """Rows sorted by expert sent to where these are along an axis, and sorted again.

        Args:
            numbers: what :meth:`_told` gives, if it was asked already.
        """
        mesh, n, here = self._mesh, self._mesh.shape[axis], self._mesh.coordinate[axis]
        there = [self._at[e][axis] for e in self._reach]
        mine = there.count(here)
        own = [c for c, at in zip(counts, there, strict=True) if at == here]
        if numbers is None:
            sizes = moved(torch.tensor(counts, dtype=torch.int64, device="cpu"), rows.device)
            sizes_there = self._told(sizes, axis)
            numbers = own * n if mesh.is_dry else sizes_there.tolist()
        came = [numbers[i * mine : (i + 1) * mine] for i in range(n)]
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
        if isinstance(module, SortedExperts):
            with _held(module, self._own, len(counts)):
                return module.of_sorted(rows, counts).to(rows.dtype)
        known: AbstractContextManager[Any] = nullcontext()
        device = rows.device
        if self._mesh.is_dry and not (_is_grouped(module) and is_followed()):
            # transformers' decorator would choose kernels that don't run on every dtype without data
            forward, known, device = inspect.unwrap(forward), _Known(), torch.device("cpu")
        index = _ids(counts, len(counts), device).unsqueeze(1)
        with _held(module, self._own, len(counts)), known:
            outputs: torch.Tensor = forward(module, rows, index, rows.new_ones(len(rows), 1))
        return outputs.to(rows.dtype)


def _is_grouped(module: nn.Module) -> bool:
    """Whether transformers computes all of a stack's experts in products of groups of rows."""
    return getattr(getattr(module, "config", None), "_experts_implementation", None) == "grouped_mm"


def _ids(counts: list[int], n: int, device: Any) -> torch.Tensor:
    """The number of the expert of each row, where rows lie by expert, n of these, again and again."""
    sizes = moved(torch.tensor(counts, dtype=torch.int64, device="cpu"), torch.device(device))
    numbers = torch.arange(len(counts), device=device).remainder(max(n, 1))
    return numbers.repeat_interleave(sizes, output_size=sum(counts))


def _count_to(x: torch.Tensor) -> torch.Tensor:
    return torch.arange(len(x), device=x.device)


@lru_cache(maxsize=1024)
def _places(layout: Layout) -> list[dict[int, int]]:
    """Of each expert, on which coordinate it lies along each axis that cuts them."""
    cut, shape = layout.cuts[0], layout.mesh.shape
    places: list[dict[int, int]] = [{} for _ in range(layout.shape[0])]
    coordinates = itertools.product(*(range(shape[a]) for a in cut))
    for at, ((start, end),) in zip(coordinates, spans_of(layout, 0), strict=True):
        for e in range(start, end):
            places[e] = dict(zip(cut, at, strict=True))
    return places


@contextmanager
def _held(module: nn.Module, parameters: Mapping[str, torch.Tensor], n: int) -> Iterator[None]:
    """While open, a module holds other parameters, of n experts."""
    kept = []
    for name, x in parameters.items():
        at, _, last = name.rpartition(".")
        owner: Any = module.get_submodule(at)
        kept.append((owner, last, own_parameters(owner)[last]))
        own_parameters(owner)[last] = x
    before, module.num_experts = module.num_experts, n  # type: ignore[assignment]
    try:
        yield
    finally:
        module.num_experts = before
        for owner, last, p in kept:
            own_parameters(owner)[last] = p


class _Known(TorchFunctionMode):
    """In a dry run: indices have values, and where they meet tensors without, they lose them."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        call_arguments = (args, kwargs or {})
        devices = set()
        tree_map(
            lambda x: devices.add(x.device.type) if isinstance(x, torch.Tensor) else None, call_arguments
        )
        if len(devices) > 1 and func is not torch.Tensor.__getitem__:
            call_arguments = tree_map(
                lambda x: x.to("meta") if isinstance(x, torch.Tensor) else x, call_arguments
            )
        return func(*call_arguments[0], **call_arguments[1])
