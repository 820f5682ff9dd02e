"""Blocks under candidate layouts: what each would send, and hold, on a mesh without processes.

A candidate says which groups of a block's parameters are cut, and whether what lies between blocks is whole
or cut over the sequence. A copy of the block on the ``meta`` device goes forward and backward in these
layouts; the ledger and the live memory of that run are its cost. Blocks that are alike are tried once.
"""

from __future__ import annotations

import copy
import itertools
import textwrap
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm import ledger
from espalier.layout import Layout, Placement, Replicate, Shard
from espalier.mesh import Mesh
from espalier.parallel.tensor.boundary import SEQUENCE, cut_sequences
from espalier.parallel.tensor.infer import Group
from espalier.tensor.apart import apart, on_meta
from espalier.tensor.dtensor import DTensor, plain, redistribute, stamp
from espalier.tensor.live import LiveMemory
from espalier.tensor.modules import lay_out_parameter
from espalier.trees import tensors_in, tree_map

# a trained parameter's bytes: itself, its gradient, two states
_COPIES = 4
_MOST = 4  # groups of which all subsets are tried


@dataclass(frozen=True)
class Cost:
    """What a block costs one rank in a step, in bytes.

    Attributes:
        forward, backward: sent along the tensor axis.
        kept: by the forward pass for the backward pass.
        held: parameters, their gradients and states.
    """

    forward: int
    backward: int
    kept: int
    held: int

    @property
    def total(self) -> int:
        """What is compared: a byte sent weighs as much as a byte of memory."""
        return self.forward + self.backward + self.kept + self.held


@dataclass
class Kind:
    """Blocks that are alike.

    Attributes:
        names: of the blocks.
        block: the first of them.
        groups: of its parameters, by their names in it.
        costs: by the groups that are cut and whether the sequence is; none if it was not tried.
        untried: why not.
    """

    names: list[str]
    block: nn.Module
    groups: list[Group]
    costs: dict[tuple[tuple[int, ...], bool], Cost] = field(default_factory=dict)
    untried: str = "it was not called"

    def best(self, sequence: bool) -> tuple[int, ...]:
        """The groups to cut."""
        if not self.costs:
            return tuple(i for i, group in enumerate(self.groups) if not group.uneven)
        tried = [cut for cut, s in self.costs if s == sequence]
        # of equals the one that cuts most
        return min(tried, key=lambda cut: (self.costs[cut, sequence].total, -len(cut)))


class Calls:
    """The first call of each block: its arguments, as shapes."""

    def __init__(self) -> None:
        self.of: dict[str, tuple[Any, Any]] = {}

    @contextmanager
    def watching(self, blocks: Mapping[str, nn.Module]) -> Iterator[None]:
        """While open, note calls."""

        def note(name: str, args: Any, kwargs: Any) -> None:
            with torch._C.DisableTorchFunction(), suppress(Exception):
                # what a block may write to (a cache of keys and values) is noted as it is before
                self.of.setdefault(name, copy.deepcopy(tree_map(_shape_of, (args, kwargs))))

        handles = [
            block.register_forward_pre_hook(
                lambda _, args, kwargs, name=name: note(name, args, kwargs), with_kwargs=True
            )
            for name, block in blocks.items()
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()


def _shape_of(x: Any) -> Any:
    return torch.empty_like(x, device="meta") if isinstance(x, torch.Tensor) else x


def kinds_of(blocks: Mapping[str, nn.Module], groups: Sequence[Group]) -> list[Kind]:
    """Blocks that are alike in type, parameters and groups."""
    found: dict[Any, Kind] = {}
    for name, block in blocks.items():
        prefix = f"{name}."
        own = [group.within(prefix) for group in groups if group and all(p.startswith(prefix) for p in group)]
        shapes = tuple((key, tuple(p.shape), p.dtype, p.requires_grad) for key, p in block.named_parameters())
        key = type(block), shapes, tuple(tuple(sorted(group.items())) for group in own)
        found.setdefault(key, Kind([], block, own)).names.append(name)
    return list(found.values())


def try_out(
    kind: Kind, call: tuple[Any, Any], mesh: Mesh, rows: int, boundaries: Sequence[bool], free: bool
) -> None:
    """Note the costs of a kind's candidates; none if its block cannot run without data.

    Args:
        call: a block's arguments, for one row.
        mesh: a dry one of the tensor axis alone.
        rows: of the batch that a rank computes.
        boundaries: whether the sequence is cut: what is tried.
        free: whether a group may be left whole.
    """
    n = len(kind.groups)
    sizes = (n,) if not free else range(n + 1) if n <= _MOST else (0, n - 1, n)
    found = {}
    try:
        for cut in itertools.chain.from_iterable(itertools.combinations(range(n), k) for k in sizes):
            dims = {name: dim for i in cut for name, dim in kind.groups[i].items()}
            for sequence in boundaries:
                with apart(kind.block, call, stand=on_meta) as twin:
                    args, kwargs = _inputs(twin.given, mesh, rows, sequence)
                    found[cut, sequence] = _tried(twin.module, args, kwargs, dims, mesh, sequence)
    except Exception as error:
        kind.untried = textwrap.shorten(f"{type(error).__name__}: {error}", 100)
        return
    kind.costs.update(found)


def _tried(
    twin: nn.Module, args: Any, kwargs: Any, dims: Mapping[str, int], mesh: Mesh, sequence: bool
) -> Cost:
    layouts = {}
    for name, p in twin.named_parameters():
        placement: Placement = Shard(dims[name]) if name in dims else Replicate()
        layouts[name] = Layout(mesh, [placement], tuple(p.shape))
        lay_out_parameter(p, layouts[name])
    if sequence:
        cut_sequences(twin, layouts, 0, ())
    memory, held = LiveMemory(), 0
    for p in twin.parameters():
        memory.hold(p)
        with raw():
            held += p.nbytes * (_COPIES if p.requires_grad else 1)
    with warnings.catch_warnings(), torch.enable_grad(), memory:
        warnings.simplefilter("ignore")
        before = memory.now
        with ledger(mesh) as forward:
            out = next(x for x in tensors_in(twin(*args, **kwargs)) if type(x) is DTensor)
            # what the next block gets
            out = redistribute(out, _between(mesh, out.shape, sequence))
        kept = memory.now - before
        with ledger(mesh) as backward:
            with raw():
                end = plain(out)
                ones = torch.ones_like(end)
            torch.autograd.backward(end, ones)
    sent, returned = (sum(entry.bytes for entry in book.entries) for book in (forward, backward))
    return Cost(sent, returned, kept, held)


def _inputs(call: tuple[Any, Any], mesh: Mesh, rows: int, sequence: bool) -> tuple[Any, Any]:
    """A block's arguments as a batch of so many rows has them: the first activation in its layout."""
    args, kwargs = call
    first = next(x for x in tensors_in((args, kwargs)) if x.is_floating_point())
    features = first.shape[-1]

    def made(x: Any) -> Any:
        if not isinstance(x, torch.Tensor):
            return x
        if not (x.is_floating_point() and x.ndim == first.ndim and x.shape[-1] == features):
            return x  # the same for every row, or so taken
        layout = _between(mesh, (rows, *x.shape[1:]), sequence and x is first)
        return stamp(x.new_empty(layout.local_shape), layout).requires_grad_()

    found: tuple[Any, Any] = tree_map(made, (args, kwargs))
    return found


def _between(mesh: Mesh, shape: Sequence[int], sequence: bool) -> Layout:
    layout = Layout.replicated(mesh, tuple(shape))
    return layout.with_axis(0, SEQUENCE) if sequence and len(shape) == 3 else layout
