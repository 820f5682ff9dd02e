"""How a call's inputs come to the layouts that it needs; what was moved once is remembered."""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from typing import Any

import torch

from espalier.comm.redistribute import redistribute_by, redistribute_plan, sums_here
from espalier.layout import Layout
from espalier.layout.layout import D, R
from espalier.layout.transitions import ALL_GATHER, ALL_REDUCE, ALL_TO_ALL
from espalier.tensor.dtensor import DTensor, stamp
from espalier.tensor.saved import Shard, hold
from espalier.torch_private import getter, method, raw, read_version, swap_impls, swapped
from espalier.trees import tensors_in

# the C getters themselves: to be called where torch functions are not intercepted
_requires_grad = getter("requires_grad")
_is_leaf = getter("is_leaf")
_is_inference = method("is_inference")
_grad_enabled, _inference_mode = torch.is_grad_enabled, torch.is_inference_mode_enabled
Path = tuple[Any, ...]  # to an argument, or to a part of one


class Move:
    """One input's way from the layout it has to the one the call needs."""

    __slots__ = ("dst", "gathers", "only_varies", "path", "plan", "remember", "src", "total")

    def __init__(self, path: Path, src: Layout, dst: Layout) -> None:
        self.path, self.src, self.dst = path, src, dst
        self.plan = redistribute_plan(src, dst)
        self.only_varies = src.cuts == dst.cuts and all(
            a == b or (a == R and b == D) for a, b in zip(src.axes, dst.axes, strict=True)
        )
        ops = self.plan.kinds
        self.gathers = bool(ops & {ALL_GATHER, ALL_TO_ALL}) and ALL_REDUCE not in ops
        self.remember = self.only_varies or bool(ops & {ALL_GATHER, ALL_TO_ALL, ALL_REDUCE})
        self.total: Layout | None = None  # on the way, where addends are summed first, and all is recorded
        if self.plan.sums and self.plan.scale is None:
            total = src
            for axis in self.plan.sums:
                total = total.with_axis(axis, R)
            self.total = total if redistribute_plan(src, total).summed else None


def moved_by(x: torch.Tensor, m: Move) -> torch.Tensor:
    """``x`` in its new layout; what was moved once is remembered on it (never on a leaf).

    So that Q, K and V share one gather and one backward all-reduce. A leaf lives longer than a
    step: its moved form would hold memory, and a reference cycle through its gradient accumulator.
    """
    if not m.remember or type(x) is not DTensor:
        return redistribute_by(x, m.plan)
    if x._layout is not m.src and x._layout is m.total:  # summed where it was
        return x if m.total is m.dst else redistribute_by(x, redistribute_plan(m.total, m.dst))
    if _is_leaf(x) and (_requires_grad(x) or getattr(x, "_is_param", False)):
        return redistribute_by(x, m.plan)
    if _is_inference(x) or _inference_mode():
        return redistribute_by(x, m.plan)  # no versions are counted that would tell what is out of date
    tag = (m.dst, read_version(x), _grad_enabled())
    if m.gathers:
        return _gathered(x, m, tag)
    known = x.__dict__.get("_moved")
    if known is not None and known[0] == tag and read_version(known[1]) == known[2]:
        return known[1]
    moved = redistribute_by(x, m.plan)
    x._moved = (tag, moved, read_version(moved))  # type: ignore[attr-defined]
    return moved


def moved_before(x: DTensor) -> DTensor | None:
    """How a call of all ranks has had a tensor in another layout, if it is as it was."""
    tag, moved, version = x.__dict__.get("_moved", (None, None, None))
    if moved is None or tag[1] != read_version(x) or read_version(moved) != version:
        return None
    with raw():
        return stamp(moved.detach(), tag[0])


def sum_in_place(x: torch.Tensor, m: Move, operands: Iterable[Any]) -> None:
    """Let a product's addends, if no graph has saved them, become their sum in their own memory.

    Who holds the tensor then holds the sum. What was recorded of the addends stays as it was: the sum is
    another tensor to autograd.
    """
    total = m.total
    if swap_impls is None or total is None or type(x) is not DTensor or x._layout is not m.src:
        return
    if _KNOWN & x.__dict__.keys() or sum(operand is x for operand in operands) != 1:
        return
    plan = redistribute_plan(m.src, total)
    if sums_here(x, plan) and type(x.grad_fn).__name__ in _PRODUCTS:
        # where they cannot, it has the sum's memory all the same, whose gradient is each addend's
        swapped(x, redistribute_by(x, plan, alone=True))
        x.__dict__.pop("_moved", None)
        x._layout = total


def note_addends(call_arguments: tuple[Any, ...]) -> None:
    for x in tensors_in(call_arguments):
        if type(x) is DTensor and x._layout.partial:
            x._saved = True  # type: ignore[attr-defined]


_KNOWN = frozenset({"_saved", "_source", "_handed_out", "_unfinished", "_reduced"})
"""Attributes of tensors that others may know by their addends."""
_PRODUCTS = frozenset(f"{name}Backward0" for name in "Mm Addmm Bmm Baddbmm Linear View UnsafeView".split())


def _gathered(x: DTensor, m: Move, tag: Any) -> torch.Tensor:
    """``x`` gathered; the mesh remembers the last one, as long as ``x`` lives.

    Remembered on ``x`` itself it would stay as long as autograd keeps ``x`` for the backward pass.
    """
    known = _lately(x, m, tag)
    if known is None:
        known = redistribute_by(x, m.plan)
        _remember(x, m, tag, known)
    return known


def _lately(x: DTensor, m: Move, tag: Any) -> torch.Tensor | None:
    if m.src.mesh.lately is not None:
        owner, known, moved = m.src.mesh.lately
        # what came out of a call may be a view of the moved tensor, and have been written to
        if owner() is x and known == (tag, read_version(moved)):
            return moved
    return None


def _remember(x: DTensor, m: Move, tag: Any, moved: torch.Tensor) -> None:
    mesh = m.src.mesh

    def forget_it(owner: Any) -> None:
        if mesh.lately is not None and mesh.lately[0] is owner:
            mesh.lately = None

    mesh.lately = (weakref.ref(x, forget_it), (tag, read_version(moved)), moved)


def known_gathered(x: DTensor, m: Move) -> torch.Tensor | None:
    """``x`` gathered by such a move, if that was done lately."""
    return _lately(x, m, (m.dst, read_version(x), _grad_enabled()))


def remember_gathered(x: DTensor, m: Move, moved: torch.Tensor) -> None:
    """Let other calls with ``x`` take what was gathered of it; called where what is moved is remembered."""
    if not (_is_leaf(x) and _requires_grad(x)):
        _remember(x, m, (m.dst, read_version(x), _grad_enabled()), moved)


def shard_of(x: torch.Tensor, moved: torch.Tensor, m: Move) -> Shard:
    """What stands for a gathered tensor until the backward pass; one for all operations that use it."""
    known: Shard | None = moved.__dict__.get("_shard")
    if known is None:
        known = moved._shard = hold(x, moved, m.src, m.dst)  # type: ignore[attr-defined]
    return known


# ---- arguments by where they stand


def at(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path) -> Any:
    """The argument, or part of one, that a path leads to."""
    value: Any = kwargs[path[0]] if isinstance(path[0], str) else args[path[0]]
    for i in path[1:]:
        value = value[i]
    return value


def put(args: tuple[Any, ...], kwargs: dict[str, Any], path: Path, value: Any) -> tuple[Any, Any]:
    """A call's arguments with another value where a path leads."""
    if isinstance(path[0], str):
        return args, {**kwargs, path[0]: _replaced(kwargs[path[0]], path[1:], value)}
    i = path[0]
    return (*args[:i], _replaced(args[i], path[1:], value), *args[i + 1 :]), kwargs


def _replaced(tree: Any, path: Path, value: Any) -> Any:
    if not path:
        return value
    parts = list(tree)
    parts[path[0]] = _replaced(parts[path[0]], path[1:], value)
    return type(tree)(parts)
