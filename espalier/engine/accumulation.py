"""Accumulation: several micro-batches as one batch, averaged over what their losses average over.

Micro-batch i has the loss l_i, a mean over n_i elements; that of the whole batch is Σ n_i l_i / Σ n_i
(huggingface/transformers issue 34191 tells what comes of Σ l_i / k). Σ n_i is known after the last one
only: so the gradient of each is weighed by n_i / n_1, and the whole at the end by n_1 / Σ n_i.

What a loss is a mean over is seen while the model computes it (:class:`Counting`). A watcher of the forward
pass marks what comes out of the reductions over the batch's rows: *means* with their counts, *sums*, and
*mixtures*, of which neither can be told. A mark goes along with the value through arithmetic that keeps its
meaning; any other makes a mixture, so that nothing is guessed."""

from __future__ import annotations

import math
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F

from espalier.comm.custom_ops import recording
from espalier.device import MOVES, is_accelerator
from espalier.device import number as number_on
from espalier.layout import Layout
from espalier.layout.layout import is_partial
from espalier.meanwhile import having, setting
from espalier.mesh import Mesh
from espalier.parallel.pipeline.single_rank import Followed
from espalier.sharding.spec import bound_to
from espalier.tensor import DTensor, full_tensor, plain, redistribute, stamp
from espalier.tensor.observers import Go, Watcher, is_of_program, tell, watching
from espalier.tensor.rules import RULES
from espalier.tensor.rules.loss import OF_CLASSES, divisors, mean_alone, reduction_of
from espalier.torch_private import raw
from espalier.trees import leaves, tensors_in

Count = Callable[[Any], Any] | Literal["sum"]
Number = torch.Tensor | None  # None: the loss is a sum, each micro-batch counts once


class OfAll(float):
    """A number that is the same for all micro-batches of a step: no count of the rows of one.

    So is a multiple of it.
    """

    def __mul__(self, other: float) -> OfAll:
        return OfAll(float(self) * other) if isinstance(other, int | float) else NotImplemented

    __rmul__ = __mul__


class UnseenCountError(ValueError):
    """What a loss is a mean over cannot be seen."""


class Accumulation:
    """The micro-batches of one step.

    Args:
        size: micro-batches of a step.
        count: as for ``initialize``; None to see it.
        axes: of the mesh, those that share the batch's rows.

    Attributes:
        count: as given.
        done: micro-batches whose gradients are there.
        closed: there will be no more micro-batches.
        number: what the loss of all micro-batches so far is a mean over.
    """

    def __init__(self, size: int, count: Count | None, mesh: Mesh, axes: tuple[int, ...]) -> None:
        self.size, self.count, self._mesh = size, count, mesh
        # along axes of a grid, and of experts, weights are cut, too
        data = tuple(a for a in axes if mesh.names[a] in ("data", "replicate"))
        self._watcher = Counting(axes, data)
        self._adds = False
        self._pending: list[Number] = []
        self.reset()

    def reset(self) -> None:
        """After a step."""
        self.done, self.closed, self._settled = 0, False, False
        self._watcher.answers.clear()
        self._pending.clear()
        self._first: Number = None
        self.number: Number = None
        self._total: torch.Tensor | None = None
        self._like: tuple[torch.dtype, Layout | None] = (torch.float64, None)

    def forward(self, batch: Any, forward: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The loss of a micro-batch; what it is a mean over is remembered.

        Raises:
            ValueError: that cannot be known.
        """
        if not torch.is_grad_enabled():
            return forward(batch)
        loss, number = self.counted(batch, forward)
        self._pending.append(number)
        return loss

    def evaluate(self, parts: Iterable[Any], forward: Callable[[Any], torch.Tensor]) -> torch.Tensor:
        """The loss of micro-batches as one batch: a plain scalar. It is no part of a step.

        Raises:
            ValueError: what a loss is a mean over cannot be known, or there is no micro-batch.
        """
        losses = []
        for part in parts:
            loss, number = self.counted(part, forward)
            losses.append((loss, number))
        return averaged(losses)

    def counted(self, batch: Any, forward: Callable[[Any], torch.Tensor]) -> tuple[torch.Tensor, Number]:
        """The loss of a micro-batch, and what it is a mean over.

        Raises:
            ValueError: that cannot be known.
        """
        if self._adds:
            return forward(batch), None
        if self.count is None:
            self._watcher.rows = max((x.shape[0] for x in tensors_in(batch) if x.ndim), default=0)
            with watching(self._watcher):
                loss = forward(batch)
            return loss, self._seen(loss)
        return forward(batch), self.number_of(batch)

    @contextmanager
    def of_one_call(self, numbers: Iterable[torch.Tensor], adds: bool = False) -> Iterator[None]:
        """While open, micro-batches are parts of one call, which was given these numbers: they are of all.

        Sums that are divided by one of them are to be added up.

        Args:
            adds: whether losses are to be added up, whatever they are.
        """
        of_all = [x for x in numbers if not x.ndim]
        with having(self, _adds=adds), having(self._watcher, of_all=of_all):
            yield

    @property
    def followed(self) -> Followed | None:
        """The values of a forward pass that :meth:`counted` looks at."""
        looks = self.count is None and not self._adds
        watcher = self._watcher
        return Followed(watcher, _is_marked, mean_on_one_rank, watcher.see_sized) if looks else None

    def check_open(self) -> None:
        """See that another micro-batch may follow.

        Raises:
            ValueError: it would be one too many.
        """
        if self.complete:
            raise ValueError(
                f"The gradients of {self.done} micro-batches are finished (Plan.accumulate is {self.size}): "
                "call engine.step() before the next backward."
            )

    def check(self) -> None:
        """Before a micro-batch's backward pass.

        Raises:
            ValueError: it is one too many, or it is not one micro-batch's loss.
        """
        self.check_open()
        if len(self._pending) != 1:
            raise ValueError(
                f"With Plan(accumulate={self.size}) each engine.backward(loss) must follow one "
                f"engine(batch), whose loss it is; {len(self._pending)} were called. Evaluate under no_grad."
            )

    def backward(self, loss: torch.Tensor) -> None:
        """Add a micro-batch's gradients."""
        (number,) = self._pending
        weight = self.weigh(loss, number)
        self._pending.clear()
        if weight is None:
            loss.backward()
        else:
            loss.backward(weight)

    def expect(self) -> None:
        """Of the next micro-batch the loss is made elsewhere: all such count alike."""
        if not self._pending:
            self._pending.append(torch.ones((), dtype=torch.float64, device=self._mesh.device()))

    def pass_by(self) -> None:
        """Count a micro-batch whose gradients came without its loss being seen.

        Raises:
            ValueError: others of the step were weighed by their losses.
        """
        if self._total is not None:
            raise ValueError(
                "Of the micro-batches of a step, some losses went back by loss.backward() and some by "
                "engine.backward(loss). Write engine.backward(loss) for all of them."
            )
        self._pending.clear()
        self.done += 1
        one = torch.ones((), dtype=torch.float64, device=self._mesh.device())
        self._first, self.number = one, one * self.done

    def weigh(self, loss: torch.Tensor, number: Number) -> Number:
        """The weight of the next micro-batch, given its loss and what :meth:`counted` said; None: 1.

        Raises:
            ValueError: one loss is a mean, another a sum.
        """
        if self.done and (number is None) != (self._first is None):
            raise ValueError("Of the micro-batches of a step, some losses are means and some are sums.")
        weight, value = None, loss.detach() if loss.requires_grad else loss
        if isinstance(value, DTensor) and self._like[1] not in (None, value._layout):
            # one is a sum over ranks yet, the other is not
            whole = Layout.replicated(self._mesh, value.shape)
            value, self._total = redistribute(value, whole), plain(redistribute(self._sum(), whole))
        with raw():
            here = plain(value).to(torch.float64)
            if number is not None:
                here = here * number
                if self._first is None or self.number is None:
                    # of a micro-batch that counts nothing the gradients are zero under any weight
                    self._first, self.number = torch.where(number == 0, 1, number), number
                else:
                    weight, self.number = (number / self._first).to(loss.dtype), self.number + number
            self._total = here if self._total is None else self._total + here
        self._like = loss.dtype, value._layout if isinstance(value, DTensor) else None
        self.done += 1
        return weight

    @property
    def complete(self) -> bool:
        """Whether the step is due."""
        return self.closed or self.done == self.size

    def factor(self) -> torch.Tensor | None:
        """What makes the gradients those of the whole batch, once; no micro-batch may follow."""
        self.closed = self.done > 0
        if self._settled or self._first is None or self.number is None:
            return None
        self._settled = True
        with raw():
            return self._first / self.number

    @property
    def loss(self) -> torch.Tensor | None:
        """That of all micro-batches so far as one batch; None before the first."""
        if self._total is None:
            return None
        dtype, layout = self._like
        with raw():
            mean = (self._total if self.number is None else self._total / self.number).to(dtype)
        return mean if layout is None else stamp(mean, layout)

    def _sum(self) -> DTensor:
        """The weighed sum of losses so far, as it lies."""
        layout = self._like[1]
        assert self._total is not None and layout is not None
        return stamp(self._total.view_as(self._total), layout)

    def number_of(self, batch: Any) -> Number:
        """What the loss of a micro-batch is a mean over, as :attr:`count` says, which is not None.

        Raises:
            ValueError: it is no number above 0.
        """
        if not callable(count := self.count):
            return None
        if self._mesh.is_dry:  # there are no values to count
            return torch.ones((), dtype=torch.float64, device=self._mesh.device())
        value, device = count(batch), self._mesh.device()
        number = full_tensor(value) if isinstance(value, torch.Tensor) else torch.tensor(value, device="cpu")
        if number.numel() == 1 and is_accelerator(number.device):
            # nobody waits for it; where it is none, nor is the loss
            counted = number.reshape(()).to(device, torch.float64)
            return torch.where(counted > 0, counted, math.nan)
        if number.numel() != 1 or not number.item() > 0:
            raise ValueError(
                f"count= gave {value!r} for a micro-batch; expected a number above 0: of the tokens (or "
                "rows) that its loss is a mean over."
            )
        return number_on(number.item(), device, torch.float64)

    def _seen(self, loss: torch.Tensor) -> Number:
        mark = mark_of(loss)
        if type(mark) is Sum:
            return None
        counts = (
            [full_tensor(n) if isinstance(n, torch.Tensor) else n for n in mark.counts]
            if type(mark) is Mean
            else []
        )
        if not counts or (not self._mesh.is_dry and any(n != counts[0] for n in counts[1:])):
            reason = "is none of a loss function's own means or sums"
            if counts:
                reason = f"adds up means over {' and '.join(str(int(n)) for n in counts)} elements"
            elif mark is not None:
                reason = f"comes from rows that met in {mark.of!r}"  # type: ignore[union-attr]
                if mark.of in _COUNTS | _INTO:  # type: ignore[union-attr]
                    reason += " (counts of each class: make them of the whole batch, and give them with it)"
            raise UnseenCountError(
                "To average over micro-batches the engine must know how many elements the loss of each is a "
                f"mean over, and cannot see it: this loss {reason}. Say it with initialize(..., count=...): "
                "a function of a micro-batch, such as "
                "count=lambda batch: int((batch['labels'] != -100).sum()); or count='sum' if the losses of "
                "the micro-batches are to be added."
            )
        device = self._mesh.device()
        if isinstance(counts[0], torch.Tensor):
            return counts[0].to(device, torch.float64)
        return number_on(counts[0], device, torch.float64)


def with_labels(batch: Any) -> Any:
    """A batch whose labels are known for such: all but the first of a tuple, or what has their name."""
    first, *labels = batch if isinstance(batch, tuple | list) and batch else [batch]
    if isinstance(first, Mapping):
        labels += [x for name, x in first.items() if re.search("label|target", str(name))]
    for x in tensors_in(labels):
        if type(x) is DTensor:
            x.__dict__["_given"] = True
    return batch


def is_given(x: torch.Tensor) -> bool:
    """Whether it is one of a batch's labels, or made of them alone."""
    return "_given" in x.__dict__


def _is_marked(x: torch.Tensor) -> bool:
    return mark_of(x) is not None


def averaged(parts: Sequence[tuple[torch.Tensor, Number]]) -> torch.Tensor:
    """The loss of micro-batches, each with what it is a mean over, as one batch: a plain scalar in float64.

    Raises:
        ValueError: there is none.
    """
    if not parts:
        raise ValueError("There is nothing to evaluate: no batch was given.")
    losses = torch.stack([full_tensor(loss).to(torch.float64).reshape(()) for loss, _ in parts])
    counts = [n for _, n in parts if n is not None]
    if not counts:
        return losses.sum()
    weights = torch.stack(counts)
    return (losses * weights).sum() / weights.sum()


# ---- what a loss is a mean over


class Mean(NamedTuple):
    """A mean, or a sum of means; ``counts``: over how many elements (a 0-d tensor where values decide)."""

    counts: tuple[int | torch.Tensor, ...]


class Sum(NamedTuple):
    """A sum over rows, and the number that it is as a divisor."""

    value: DTensor


class Rows(NamedTuple):
    """Rows that are no longer cut among the ranks; ``apart``: surely nothing was made of several of them."""

    apart: bool


class Mixture(NamedTuple):
    """What depends on several rows otherwise than by a mean or a sum.

    Attributes:
        turns: it compares a mean or a sum: who asks for it goes another way by it.
    """

    of: str
    turns: bool = False


Mark = Mean | Sum | Rows | Mixture

_ELEMENTS = frozenset(
    {
        F.mse_loss, F.l1_loss, F.huber_loss, F.smooth_l1_loss, F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits, F.soft_margin_loss, F.kl_div, F.poisson_nll_loss,
        F.hinge_embedding_loss, F.margin_ranking_loss,
    }
)  # fmt: skip
_ROWS = frozenset(
    {F.cosine_embedding_loss, F.triplet_margin_loss, F.multi_margin_loss, F.multilabel_margin_loss}
)
_WEIGHTED = frozenset({F.mse_loss, F.l1_loss})  # by their weights a mean is divided too

_OF_TENSORS = DTensor.item.__code__.co_filename
# counts of all rows, which rows take again by their own values: weights of classes
_COUNTS = frozenset("bincount histc histogram unique unique_consecutive".split())
_INTO = frozenset("scatter_add scatter_add_ index_add index_add_ scatter_reduce scatter_reduce_".split())
# what takes parts of a tensor by their places
_PARTS = frozenset(
    getattr(place, name)
    for name in "chunk split tensor_split narrow __getitem__".split()
    for place in (torch, torch.Tensor)
    if hasattr(place, name)
)
_SAME = frozenset(
    "view reshape squeeze unsqueeze flatten view_as to float double half bfloat16 type type_as contiguous "
    "clone detach requires_grad_ alias".split()
).union(MOVES)
_ADD = frozenset("add __add__ __radd__ __iadd__ add_ sub __sub__ __rsub__ __isub__ sub_ subtract".split())
_MUL = frozenset("mul __mul__ __rmul__ __imul__ mul_ multiply".split())
_DIV = frozenset("div __truediv__ __itruediv__ div_ divide true_divide".split())
_COMPARED = frozenset("gt ge lt le greater greater_equal less less_equal".split())
_BY_ROWS = frozenset(
    "linear embedding layer_norm rms_norm group_norm dropout pad scaled_dot_product_attention conv1d "
    "cross_entropy nll_loss mse_loss l1_loss huber_loss smooth_l1_loss binary_cross_entropy_with_logits "
    "conv2d conv3d max_pool1d max_pool2d avg_pool1d avg_pool2d adaptive_avg_pool2d".split()
)
# along dims
_ALONG = frozenset(
    "sum mean prod amax amin max min argmax argmin any all std var norm vector_norm logsumexp median cumsum "
    "cumprod softmax log_softmax sort topk normalize".split()
)
# of the second matrix, where what a product has as columns comes from
_COLUMNS = {"matmul": 1, "__matmul__": 1, "mm": 1, "linear": 0, "inner": 0, "cdist": 0}
# their values are not the given ones'
_FRESH = frozenset(
    "new_zeros new_ones new_full new_empty new_tensor zeros_like ones_like full_like empty_like "
    "backward register_hook retain_grad size dim".split()
)


class Counting(Watcher):
    """Marks the results of a forward pass.

    Args:
        axes: of the mesh, those that share the batch's rows.
        data: those of them that cut nothing else.

    Attributes:
        rows: of a micro-batch.
        of_all: numbers that are the same for all micro-batches of a step.
        answers: to what was asked of labels alone in this step, by the place in the program.
    """

    inside = traffic = False

    def __init__(self, axes: tuple[int, ...], data: tuple[int, ...]) -> None:
        self._axes, self._data, self.rows = axes, data, 0
        self.of_all: list[torch.Tensor] = []
        self.answers: dict[Any, Any] = {}

    def see_sized(self, func: Any, inputs: Sequence[torch.Tensor], outputs: Sequence[torch.Tensor]) -> None:
        """Mark counts of rows that were not computed, in a run without data."""
        name = getattr(func, "__name__", "")
        rowed = any(type(x) is DTensor and (mark_of(x) or self._cut(x._layout)) for x in inputs)
        for x in outputs if name in _COUNTS and rowed else ():
            if type(x) is DTensor:
                x.__dict__.setdefault("_mark", Mixture(name))

    def around(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], go: Go) -> Any:
        """Carry a call out and mark what comes of it."""
        if recording():
            return go()
        dtensors = list(_tensors(args)) + list(_tensors(kwargs.values())) if kwargs else list(_tensors(args))
        out = self._marked(func, args, kwargs, go, dtensors)
        if dtensors and all("_given" in x.__dict__ for x in dtensors):
            self._follow_labels(func, out)
        return out

    def _follow_labels(self, func: Any, out: Any) -> None:
        """Know what is made of labels alone, and tell of what Python makes of those of a micro-batch."""
        for x in _tensors((out,)):
            x.__dict__["_given"] = True
            if mark_of(x) is not None and not x._layout.shape:
                x.__dict__.setdefault("_when_asked", self.hear)
        if getattr(func, "__name__", "").startswith("unique") and any(map(mark_of, _tensors((out,)))):
            tell_of_labels()

    def hear(self, answer: Any) -> None:
        """Note what was asked of labels alone; where micro-batches answer otherwise, warn."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == _OF_TENSORS:
            frame = frame.f_back
        if frame is None or not is_of_program(frame):
            return  # a rule asks: what comes of it is marked
        if self.answers.setdefault((frame.f_code, frame.f_lasti), answer) != answer:
            tell_of_labels()

    def _marked(
        self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], go: Go, dtensors: list[DTensor]
    ) -> Any:
        before = [x.__dict__.get("_mark") for x in dtensors]
        marked = any(before)
        mixed = next((m for m in before if type(m) is Mixture), None) if marked else None
        if mixed is None and func in OF_CLASSES:
            out = _of_classes(func, args, kwargs, go)
        elif marked and mixed is None and _is_quotient(func, dtensors, before):
            # a micro-batch that counts nothing adds nothing: it is no 0 / 0, as the whole batch is none
            out = func(args[0], torch.where(dtensors[1] == 0, 1, dtensors[1]))
            out.__dict__.pop("_mark", None)  # it is marked below, as what the program has called
        else:
            out = go()
        if mixed is None and len(dtensors) > 1 and self._meet(func, dtensors):
            mixed = Mixture(func.__name__)
        if mixed is None and func in _PARTS and self._has_fewer_rows(args, out):
            mixed = Mixture(func.__name__)
            for x in _tensors((out,)):
                x.__dict__["_mark"] = mixed
            return out
        unmarked = not marked and type(out) is DTensor and "_mark" not in out.__dict__
        if (
            mixed is None
            and unmarked
            and (self._cut(out._layout) or not any(self._cut(x._layout) for x in dtensors))
        ):
            return out  # rows stay rows, or there are none: so for most calls
        for x in (out,) if type(out) is DTensor else tuple(_tensors((out,))):
            inner = mark_of(x)
            if inner is not None and all(x is not y for y in dtensors):
                continue  # made by a call inside this one
            mark = mixed or self._mark(func, args, kwargs, dtensors, before, x)
            if mark is not None:
                x.__dict__["_mark"] = mark
                if type(mark) is Mixture and mark.turns:
                    x.__dict__["_when_asked"] = _tell_of_turns
        if out is None and dtensors and mixed is not None:
            dtensors[0].__dict__["_mark"] = mixed  # x[i] = mixture
        return out

    def _is_of_all(self, x: Any) -> bool:
        if isinstance(x, OfAll):
            return True
        if not self.of_all or not isinstance(x, torch.Tensor) or x.ndim or x.is_meta:
            return False
        with raw():  # stages get it as a view
            return any(plain(x).data_ptr() == plain(number).data_ptr() for number in self.of_all)

    def _has_fewer_rows(self, args: Any, out: Any) -> bool:
        """Whether some rows of a micro-batch were taken by where they stand: of the whole batch, others.

        Of several batches that were joined, one is not fewer.
        """
        x, first = args[0], next(_tensors((out,)), None)
        if type(x) is not DTensor or first is None or first.ndim != x.ndim:
            return False
        if any(isinstance(i, torch.Tensor) for i in leaves(args[1:])):
            return False
        dims = {cut for a in self._axes if type(cut := x._layout.axes[a]) is int}
        return any(first.shape[d] < min(self.rows, x.shape[d]) for d in dims)

    def _meet(self, func: Any, dtensors: list[DTensor]) -> bool:
        """Whether rows meet rows in a product of matrices, as in a contrastive loss."""
        place = _COLUMNS.get(func.__name__)
        if place is None or any(x.ndim != 2 for x in dtensors[:2]):
            return False
        first, second = ([x._layout.axes[a] for a in self._data] for x in dtensors[:2])
        return place in second and any(type(cut) is int for cut in first)

    def _cut(self, layout: Layout) -> bool:
        return any(type(layout.axes[a]) is int for a in self._axes)

    def _mark(
        self,
        func: Any,
        args: Any,
        kwargs: Any,
        dtensors: list[DTensor],
        before: list[Mark | None],
        out: DTensor,
    ) -> Mark | None:
        name = getattr(func, "__name__", "")
        if any(type(m) in (Mean, Sum) for m in before):
            if name in _DIV and type(before[0]) is Sum and self._is_of_all(args[-1]):
                return _sum(out)
            return _combined(name, args, kwargs, dtensors, before, out)
        rowed = [x for x, m in zip(dtensors, before, strict=True) if m is not None or self._cut(x._layout)]
        if not rowed or name in _FRESH or self._cut(out._layout):
            return None
        if not out._layout.shape:
            apart = all(m is None or m.apart for m in before)  # type: ignore[union-attr]
            return _reduced(func, name, args, kwargs, dtensors, out, apart) or Mixture(name)
        # on a grid the axes that share rows cut features, too: addends of a linear layer are of one row
        summed = [a for a in self._axes if is_partial(out._layout.axes[a])]
        if name not in _BY_ROWS and any(
            all(not is_partial(x._layout.axes[a]) for x in dtensors) for a in summed
        ):
            return Mixture(name)
        mark = _of_rows(func, name, args, kwargs, out)
        together = any(type(m) is Rows and not m.apart for m in before)
        return Rows(False) if together and type(mark) is Rows else mark


def _of_rows(func: Any, name: str, args: Any, kwargs: Any, out: DTensor) -> Mark:
    """The mark of what a call makes of rows, where it is not cut into rows itself."""
    first = args[0] if args else kwargs.get("input")
    if name in _COUNTS or (name in _INTO and out.ndim == 1):
        return Mixture(name)
    if name in _ALONG and isinstance(first, DTensor):
        dims = kwargs.get("dim", args[1] if len(args) > 1 else None)
        dims = dims if isinstance(dims, tuple | list) else (dims,)
        if all(isinstance(d, int) and d % first.ndim for d in dims):
            return Rows(True)
        return Rows(True) if any(isinstance(d, torch.Tensor) for d in dims) else Mixture(name)
    if name == "__getitem__":
        masked = any(x.dtype == torch.bool for x in _tensors((args[1],)))
        return Rows(masked or out.ndim == args[0].ndim)
    module = getattr(RULES.get(func), "__module__", "").rpartition(".")[2]
    return Rows(module in ("pointwise", "views", "joining") or name in _BY_ROWS)


def _is_quotient(func: Any, dtensors: list[DTensor], before: list[Mark | None]) -> bool:
    """Whether a call makes a mean of a sum, by a sum of weights: one that has no gradient of its own."""
    is_of_sums = len(before) == 2 and type(before[0]) is Sum and type(before[1]) is Sum
    return is_of_sums and getattr(func, "__name__", "") in _DIV and not dtensors[1].requires_grad


def mark_of(x: Any) -> Mark | None:
    """What is known of a result."""
    mark: Mark | None = x.__dict__.get("_mark") if type(x) is DTensor else None
    return mark


def is_sum(loss: Any) -> bool:
    """Whether a loss that was followed is a sum over rows, and no mean."""
    return type(mark_of(loss)) is Sum


def _sum(out: DTensor) -> Sum:
    """The mark of a sum: apart from the graph, and not the sum itself, which would hold itself."""
    with raw():
        return Sum(stamp(plain(out.detach()), out._layout))


def _tensors(items: Any) -> Iterator[DTensor]:
    for x in items:
        if type(x) is DTensor:
            yield x
        elif isinstance(x, tuple | list):
            yield from _tensors(x)


def _of_classes(func: Any, args: Any, kwargs: Any, go: Go) -> Any:
    """A loss over classes, marked."""
    bound = bound_to(OF_CLASSES[func], args, kwargs)
    with setting(divisors, []):
        out = go()
        divisor = divisors.get()
    if type(out) is not DTensor or out._layout.shape or mark_of(out) is not None:
        return out  # of rows, or marked by a call inside this one
    logits, reduction = bound["input"], bound.get("reduction", "mean")
    mark: Mark = Mixture("cross_entropy")
    if mark_of(bound.get("weight")) is not None:
        pass  # of classes, made of this micro-batch's rows: others have others
    elif divisor:
        mark = Mean((divisor[0],))
    elif reduction == "sum":
        mark = _sum(out)
    elif reduction == "mean" and bound["target"].shape == logits.shape:  # probabilities
        mark = Mean((logits.numel() // logits.shape[1 if logits.ndim > 1 else 0],))
    out.__dict__["_mark"] = mark
    return out


def mean_on_one_rank(func: Callable[..., Any], result: torch.Tensor) -> Callable[..., torch.Tensor] | None:
    """What does, on plain tensors, what a call did that made a mean over tokens, and marks what it makes.

    None if it has made something else.
    """
    mark = mark_of(result)
    if func not in OF_CLASSES or type(mark) is not Mean or not isinstance(mark.counts[0], torch.Tensor):
        return None

    def mean(*args: Any, **kwargs: Any) -> torch.Tensor:
        out, divisor = mean_alone(func, args, kwargs)
        out.__dict__["_mark"] = Mean((divisor,))
        return out

    return mean


def _reduced(
    func: Any, name: str, args: Any, kwargs: Any, dtensors: list[DTensor], out: DTensor, apart: bool
) -> Mark | None:
    """The mark of the number that a call makes of tensors with rows, which are ``apart`` or may not be."""
    x = dtensors[0]
    if name == "mean":
        return Mean((x.numel(),)) if apart else None
    if name in ("sum", "count_nonzero"):
        return _sum(out) if apart else None
    losses = func in _ELEMENTS or func in _ROWS or func is F.ctc_loss
    if not losses or (reduction := reduction_of(args, kwargs)) is None:
        return None
    if reduction == "sum":
        return _sum(out)
    if func in _WEIGHTED and kwargs.get("weight") is not None:
        return None
    if func is F.ctc_loss:
        return Mean((x.shape[1],)) if x.ndim == 3 else None
    if func in _ROWS or reduction == "batchmean":
        return Mean((x.shape[0],)) if x.ndim else None
    if reduction == "mean" and func in _ELEMENTS:
        target = args[1] if len(args) > 1 else kwargs.get("target", x)
        return Mean((torch.broadcast_shapes(x.shape, target.shape).numel(),))
    return None


def _combined(
    name: str, args: Any, kwargs: Any, dtensors: list[DTensor], before: list[Mark | None], out: DTensor
) -> Mark:
    """The mark of what a call makes of marked values (none of them a mixture)."""
    marks = [m for m in before if isinstance(m, Mean | Sum)]
    means = [m for m in marks if isinstance(m, Mean)]
    sums = [m for m in marks if isinstance(m, Sum)]
    alone = len(dtensors) == 1
    if alone and (name in _SAME or (name in ("mean", "sum") and dtensors[0].numel() == 1)):
        return marks[0]
    if out._layout.shape or any(x._layout.shape for x in dtensors):
        return Mixture(name)
    if name.strip("_") in _COMPARED:
        is_guard = bool(sums) and any(isinstance(x, int | float) and not x for x in args)  # are there any?
        return Mixture(name, turns=not is_guard)
    if name in _ADD:
        if not sums:
            return Mean(tuple(n for m in means for n in m.counts))
        if len(sums) == len(args) == 2:
            return _sum(out)
    if name in ("neg", "__neg__") or (name in _MUL and len(marks) == 1):
        return means[0] if means else _sum(out)
    if name in _DIV and len(args) == 2:
        if means and not sums and len(means) == 1 and before[0] is means[0] and args[0] is dtensors[0]:
            return means[0]
        # a divisor with a gradient is no weight: the gradient of such a quotient is no mean of gradients
        if len(sums) == 2 and not dtensors[1].requires_grad:
            return Mean((sums[1].value,))
    if name in ("clamp", "clamp_min", "clip") and alone and sums:
        low, high = _bounds(args, kwargs)
        if high is None and isinstance(low, int | float) and low <= 1:
            return sums[0]  # against a division by zero
    return Mixture(name)


def tell_of_labels() -> None:
    """Warn of a loss that hangs on what the labels of a micro-batch are together."""
    tell(
        "The loss hangs on what Python was told of all labels of a micro-batch together (if (y == 1).any(): "
        "...; y.sum().item(); y.unique()): each micro-batch goes by its own, and the whole batch may go by "
        "others. Compute it of the whole batch before, and give it with that; or plan accumulate = 1."
    )


def _tell_of_turns(answer: Any) -> None:
    if type(answer) is not bool:  # the number itself, to be shown
        return
    tell(
        "The loss's code asks whether a mean or a sum over a micro-batch is above or below something (if "
        "loss > 1.0: ...): each micro-batch goes its own way, and the whole batch may go another. Compare "
        "row by row, torch.where(losses > 1.0, ...).mean(), or plan accumulate = 1."
    )


def _bounds(args: Any, kwargs: Any) -> tuple[Any, Any]:
    low, high = (*args[1:], None, None)[:2]
    return kwargs.get("min", low), kwargs.get("max", high)
