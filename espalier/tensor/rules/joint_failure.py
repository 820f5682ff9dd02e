"""Failing together: what torch refuses for its values on one rank, it refuses on all."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, NamedTuple, NoReturn

import torch
import torch.nn.functional as F

from espalier.comm import Work, collectives
from espalier.comm.control import REFUSALS, agree, looks
from espalier.comm.custom_ops import recording
from espalier.layout import Layout, may_be_empty
from espalier.layout.layout import D, R
from espalier.meanwhile import setting
from espalier.mesh import Mesh
from espalier.sharding.spec import Placed, Runner, Spec
from espalier.tensor.dtensor import DTensor, plain
from espalier.torch_private import memory_id, raw, version_of


def fail_together(spec: Spec, run: Runner | None, placed: Placed) -> Runner | None:
    """``run``, after which the ranks agree on whether it failed, where only some may have met a reason to.

    Along the axes of its own collectives ``run`` fails on all ranks or on none: a dim that an axis cuts and
    an index that it cuts are not of one call, unless they are of one letter.
    """
    uneven = any(map(may_be_empty, (*placed.ins, *placed.outs)))  # what is empty may not be looked at
    asked = placed.ins if uneven else [placed.ins[i] for i in spec.fails]
    axes = tuple(
        a for a, n in enumerate(placed.mesh.shape) if n > 1 and any(x.axes[a] not in (R, D) for x in asked)
    )
    if not axes:
        return run

    def runner(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        out: Any = None
        met: Exception | None = None
        try:
            out = func(*args, **kwargs) if run is None else run(func, args, kwargs, placed)
        except REFUSALS as error:
            met = error
        if looks(placed.mesh):
            agree(met, placed.mesh, axes)
        elif met is not None:
            raise met
        return out

    return runner


def within(
    index: torch.Tensor, n: int, mesh: Mesh, ask: Callable[[int], Any], but: int | None = None
) -> bool:
    """Look for indices of a dim of ``n``, other than ``but``, that torch refuses.

    ``ask(i)`` has torch say so of one of them. Gives whether it is sure that all are in range, none ``but``.
    """
    if not looks(mesh) or not index.numel():
        return False
    low, high = map(int, torch.aminmax(index))
    if low >= 0 and high < n:
        return but is None or not low <= but <= high
    if but is None:
        ask(low if low < 0 else high)
    else:
        within(index.masked_fill(index == but, 0), n, mesh, ask)
    return False


def with_one(x: torch.Tensor, i: int) -> torch.Tensor:
    """A tensor of one element of this dtype and these many dims."""
    return torch.full((1,) * x.ndim, i, dtype=x.dtype)


# ---- how many targets count, on all ranks: what the mean of a loss over classes divides by
#
# It is sent before the loss is computed, and, from the second forward pass on, before the model is: a
# target that is one of the batch's own tensors is there from the beginning. So no rank waits for the others
# in the middle of a pass.


class CountKind(NamedTuple):
    """What is counted.

    Attributes:
        ignored: the target that does not count.
        classes: those above are refused.
        dtype: of the count.
        axes: of the mesh, along which the targets are cut.
    """

    ignored: int
    classes: int
    dtype: torch.dtype
    axes: tuple[int, ...]


class TargetCount:
    """The number, or weights, of the targets that count, on its way.

    Where some rank's targets would make the loss fail, it is NaN.
    """

    def __init__(
        self, target: torch.Tensor, kind: CountKind, mesh: Mesh, weight: torch.Tensor | None
    ) -> None:
        self._mesh, self._axes = mesh, kind.axes
        self._met: Exception | None = None
        self._asks = bool(kind.axes) and looks(mesh)
        try:
            if self._asks:
                _look(target, kind, mesh)
            self._sum = counted(target, kind.ignored, kind.dtype, weight)
        except REFUSALS as error:
            if not self._asks:
                raise
            self._met = error
            self._sum = torch.full((), math.nan, dtype=kind.dtype, device=target.device)
        self._left = list(kind.axes)
        self._pending: Work[Any] = Work()
        if self._left and not recording():
            self._pending = collectives.all_reduce_(self._sum, mesh, self._left.pop(0), beside=True)

    def arrive(self) -> None:
        """Wait for what is under way."""
        self._pending.wait()

    def wait(self, met: Exception | None = None) -> torch.Tensor:
        """The count of all ranks; where the loss failed on some it fails on all."""
        self.arrive()
        for axis in self._left:
            self._sum = collectives.all_reduce(self._sum, self._mesh, axis)
        self._left.clear()
        if self._asks and math.isnan(self._sum.item()):
            agree(met or self._met, self._mesh, self._axes)
        return self._sum

    def refuse(self, met: Exception) -> NoReturn:
        """Fail on all ranks by what the loss failed by here."""
        self.wait(met)
        raise met


def counted(
    target: torch.Tensor, ignored: int, dtype: torch.dtype, weight: torch.Tensor | None
) -> torch.Tensor:
    """The number, or weights, of the targets that count here."""
    valid = target != ignored
    counts = valid if weight is None else weight.detach()[target.masked_fill(~valid, 0)] * valid
    return counts.sum(dtype=dtype)


def _look(target: torch.Tensor, kind: CountKind, mesh: Mesh) -> None:
    def ask(i: int) -> torch.Tensor:
        return F.nll_loss(torch.empty(()).expand(1, kind.classes), torch.tensor([i]))

    within(target, kind.classes, mesh, ask, but=kind.ignored)


class CountsAhead:
    """Counts of what a batch holds, sent when a forward pass begins: those that the last one asked for.

    Passes with gradients go by such, and those without by theirs: an evaluation changes nothing for a step.
    All ranks must send the same. So it takes only tensors that are :func:`alike` on all: of these a view is
    a copy on all of them, or on none.
    """

    def __init__(self) -> None:
        self._asked: dict[bool, dict[tuple[int, CountKind], None]] = {}  # by whether there are gradients
        self._wanted: dict[tuple[int, CountKind], None] = {}  # in this pass
        self._tensors: list[torch.Tensor | None] = []
        self._sent: dict[tuple[int, CountKind], tuple[TargetCount, int]] = {}

    @contextmanager
    def of(self, tensors: Sequence[Any]) -> Iterator[None]:
        """While open, the forward pass of a batch with these tensors runs."""
        trains = torch.is_grad_enabled()
        wanted = self._asked.get(trains, {})
        self._wanted = self._asked[trains] = {}
        self._tensors = [plain(x) if is_alike(x) else None for x in tensors]
        with raw():
            for i, kind in wanted:
                x = self._tensors[i] if i < len(tensors) else None
                if (
                    x is not None
                    and not x.is_floating_point()
                    and _cuts(tensors[i]._layout) == set(kind.axes)
                ):
                    count = TargetCount(x, kind, tensors[i]._layout.mesh, None)
                    self._sent[i, kind] = count, version_of(x)
        try:
            with setting(counts_ahead, self):
                yield
                for count, _ in self._sent.values():
                    count.arrive()  # nobody may have asked for it
        finally:
            self._sent.clear()
            self._tensors.clear()

    def find(self, target: torch.Tensor, kind: CountKind) -> TargetCount | None:
        """The count of a target, if it is under way; if it could be, the next pass sends it ahead."""
        if recording() or not kind.axes:
            return None
        target = plain(target)
        for i, x in enumerate(self._tensors):
            if x is None or _place(x) != _place(target):
                continue
            if not target.is_contiguous():
                return None
            self._wanted[i, kind] = None
            count, version = self._sent.get((i, kind), (None, 0))
            return count if version_of(x) == version else None
        return None


counts_ahead: ContextVar[CountsAhead | None] = ContextVar("ahead", default=None)


def alike(x: DTensor) -> DTensor:
    """Say of a tensor, if it is so, that all ranks hold contiguous parts of one shape of it."""
    layout = x._layout
    sizes = [math.prod(layout.mesh.shape[a] for a in cut) for cut in layout.cuts]
    even = all(n and n % size == 0 for n, size in zip(layout.shape, sizes, strict=True))
    with raw():
        if even and x.is_contiguous() and not x.is_inference():
            x.__dict__["_alike"] = True
    return x


def is_alike(x: Any) -> bool:
    """Whether that was said of it."""
    return type(x) is DTensor and "_alike" in x.__dict__


def _place(x: torch.Tensor) -> tuple[Any, ...]:
    """Which memory it is; also on a dry mesh, where none has an address."""
    return memory_id(x), x.storage_offset(), x.numel(), x.dtype


def _cuts(layout: Layout) -> set[int]:
    return {a for cut in layout.cuts for a in cut if layout.mesh.shape[a] > 1}
