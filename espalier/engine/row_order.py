"""What a loss of a pipeline's output pairs with the output's rows, where these are no longer the first dim.

``F.cross_entropy(logits.view(-1, classes), targets.view(-1))``: a micro-batch has some rows of the batch, and
so some of the targets, of which a row has several. They can be cut if the first dim of what they meet goes
through the rows one after the other, as it does after ``view``. That hangs on what was done with the output;
where that is not known, nothing is said.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence, Set
from typing import Any, NamedTuple

import torch

from espalier.engine.kept import SOUGHT, Kept, call_method, in_order, varying
from espalier.trees import leaves

_RESHAPES = frozenset("view reshape flatten unflatten contiguous unsqueeze squeeze".split())
# of each number, or along the last dim
_OF_EACH = frozenset(
    "float double half bfloat16 to type clone detach neg abs exp log log1p sqrt square sigmoid logsigmoid "
    "tanh relu softplus softmax log_softmax clamp normalize zeros_like ones_like full_like rand_like".split()
)
_OVER = frozenset("mean sum prod amax amin norm vector_norm logsumexp var std any all argmax argmin".split())
_OF_DIM = frozenset("softmax log_softmax gather scatter normalize".split())
_PAIRING = frozenset(
    "add sub mul div truediv true_divide pow where eq ne lt le gt ge logical_and logical_or and or "
    "masked_fill gather scatter maximum minimum lerp".split()
)
_PRODUCTS = ("linear", "matmul")
_LOSSES = frozenset(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss binary_cross_entropy kl_div "
    "binary_cross_entropy_with_logits gaussian_nll_loss poisson_nll_loss soft_margin_loss multi_margin_loss "
    "multilabel_soft_margin_loss multilabel_margin_loss picked".split()
)
_BY_CLASS = frozenset("cross_entropy nll_loss multi_margin_loss".split())  # what comes third has no rows


_MOVED = "moved"
_Way = int | torch.Tensor | str | None
_AT_DIM = frozenset("narrow select index_select unbind flip".split())  # the dim comes first
_IN_PARTS = frozenset("chunk split tensor_split roll".split())  # the dim comes second


class RowsMeetError(ValueError):
    """A loss takes rows of the batch by their places, or has them meet others: it is one of all rows."""


class Beside(NamedTuple):
    """Tensors that a loss pairs with the output's rows, though they have not as many, by ``id``.

    Attributes:
        several: those that have several numbers a row.
        chosen: of those that have numbers where a mask is true: the mask.
    """

    several: Set[int]
    chosen: Mapping[int, torch.Tensor]

    def by_rows(self, x: torch.Tensor, rows: int) -> torch.Tensor:
        """A tensor with the batch's rows as its first dim."""
        if (mask := self.chosen.get(id(x))) is not None:
            everywhere = x.new_zeros(mask.numel(), *x.shape[1:])
            everywhere[mask.flatten()] = x
            return everywhere.unflatten(0, (rows, -1))
        return x.unflatten(0, (rows, -1)) if id(x) in self.several else x

    def as_used(self, parts: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Parts of such tensors, as the program has the whole ones."""
        flat = {*self.several, *self.chosen}
        used = {key: x.flatten(0, 1) if key in flat else x for key, x in parts.items()}
        for key, mask in self.chosen.items():
            used[key] = used[key][used[id(mask)].flatten()]
        return used


def beside_rows(of: Kept, rows: int) -> Beside:
    """What a loss pairs with the output's rows, but for tensors of as many rows.

    Args:
        of: the loss.
        rows: of the batch.

    Raises:
        RowsMeetError: rows are taken by their places in the batch, or meet each other.
    """
    walk = _Walk(rows)
    for one in in_order(of, walk.met):
        walk.see(one)
    if walk.by_place:
        raise RowsMeetError(
            f"The loss takes rows of the batch by their places, or has them meet others: {walk.by_place}. In "
            "a pipeline with accumulate above 1 it is computed on each micro-batch, whose rows have other "
            "places. Choose rows by a mask (out[mask], y[mask]), write -1 for how many they are, let the "
            "model's forward compute it, or plan accumulate = 1."
        )
    several = {key for key, way in walk.paired.items() if isinstance(way, int)}
    chosen = {key: mask for key, mask in walk.paired.items() if isinstance(mask, torch.Tensor)}
    of_rows = {key: m for key, m in chosen.items() if m.shape[0] == rows or id(m) in several}
    return Beside(several, of_rows)


def picked(x: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """``x[arange(len(x)), columns]`` of a matrix, each row by itself."""
    places = torch.where(columns < 0, columns + x.shape[1], columns)
    return x.gather(1, places.unsqueeze(1)).squeeze(1)


def picks(shapes: Any, key: tuple[Any, ...]) -> torch.Tensor | None:
    """The columns, where an index picks one number of each row of a matrix; None where it does not.

    ``x[arange(len(x)), columns]``; the rows may be a range, a list or an array.
    """
    if not (isinstance(shapes, torch.Tensor) and shapes.ndim == 2 and len(key) == 2):
        return None
    index, columns = key
    rows = shapes.shape[0]
    if not isinstance(columns, torch.Tensor) or columns.dtype is not torch.long or columns.shape != (rows,):
        return None
    if not (isinstance(index, range | list) or hasattr(index, "__array__")) or len(index) != rows:
        return None
    if isinstance(index, list) and any(type(i) is not int for i in index):
        return None
    index = torch.as_tensor(index)
    if index.dtype is not torch.long or not torch.equal(index, torch.arange(rows, device=index.device)):
        return None
    return columns


class _Walk:
    """Goes from a loss to the output.

    Of what it meets it tells the *way*: how many numbers of the first dim there are for each row, if they go
    through the rows in order; the mask that chose them from such ones; that rows are another dim; or None.

    Attributes:
        paired: the way of tensors that meet what has it, by ``id``.
        by_place: a call of which a part of the rows makes something else.
    """

    def __init__(self, rows: int) -> None:
        self.paired: dict[int, _Way] = {}
        self.by_place: str | None = None
        self._rows = rows
        self._seen: dict[int, _Way] = {}

    def met(self, of: Any) -> list[Any]:
        """What is yet to be computed that a call meets rows of."""
        return [x for x in self._found(of) if isinstance(x, Kept) and self._is_tensor(x)]

    def _found(self, of: Any) -> list[Any]:
        if of._step is None:
            return []
        _, first, others, _ = _read(of._step)
        return leaves([[first, others, varying(of._step)]], SOUGHT, SOUGHT)

    def see(self, of: Any) -> _Way:
        """The way of what is yet to be computed."""
        if id(of) not in self._seen:
            self._seen[id(of)] = self._of_call(of) if of._step is not None else self._of_model(of)
        return self._seen[id(of)]

    def _of_shape(self, of: Any) -> int | None:
        shapes = of._shapes()
        is_cut = isinstance(shapes, torch.Tensor) and shapes.ndim and shapes.shape[0] % self._rows == 0
        return shapes.shape[0] // self._rows if is_cut else None

    def _of_model(self, of: Any) -> int | None:
        """Of what the model gives: it may go through several numbers a row in any order."""
        return 1 if self._of_shape(of) == 1 else None

    def _of_call(self, of: Any) -> _Way:
        name, first, others, options = _read(of._step)
        met = self.met(of)
        way = self._in_common(name, met)
        ndim = next((x._shapes().ndim for x in met if isinstance(x._shapes(), torch.Tensor)), 0)
        if isinstance(way, int):
            if name == "getitem":
                others = [_without_full(others[0], way * self._rows)]
            if ndim and _is_by_place(name, others, options, ndim):
                self.by_place = f"a loss with {name}" if name != "getitem" else "out[...] of some"
            if name == "einsum" and isinstance(first, str) and len(met) > 1 and not _by_one_letter(first):
                self.by_place = "einsum of rows and rows"
        if way == _MOVED or (isinstance(way, int) and _moves_first(name, others, options, ndim)):
            return _MOVED if len(met) == 1 or name in _PAIRING else None
        if _along_first(name, others, options, ndim):
            way = None
        chooses = self._chooses(name, others, met, way)
        pairs = chooses or name in _PAIRING or name in _LOSSES
        target = options.get("target", others[0] if others else None) if name in _BY_CLASS else None
        for x in self._found(of):
            if isinstance(x, Kept) or not x.ndim or x.shape[0] == self._rows:
                continue
            fits = pairs and way is not None and x.shape[0] == self._length(way)
            fits = fits and (name in _LOSSES or chooses or x.ndim == ndim)
            known = way if fits and (target is None or target is x) else None
            self.paired[id(x)] = known if self.paired.get(id(x), known) is known else None
        if isinstance(first, Kept) and _is_whole(of):
            return self._of_model(of)
        if chooses:
            return others[0]  # the mask
        if isinstance(way, torch.Tensor):
            keeps = name == "getitem" and _keeps_first(name, others, options, 2)
            return way if pairs or keeps or name in _OF_EACH else None
        if way is None or name in _RESHAPES:
            return None if way is None else self._of_shape(of)
        keeps = _keeps_first(name, others, options, ndim)
        keeps = keeps and (name not in _PRODUCTS or isinstance(first, Kept))
        return way if (pairs or keeps or name in _OF_EACH) and self._of_shape(of) == way else None

    def _in_common(self, name: str, met: Sequence[Any]) -> _Way:
        """The way of all that a call meets; None if they have several."""
        seen = [(x, self.see(x)) for x in met]
        ways = {way for x, way in seen if way is not None or name not in _PAIRING or not _is_number(x)}
        if _MOVED in ways and any(isinstance(way, int) for way in ways):
            self.by_place = f"{name} of rows and rows"
        return ways.pop() if len(ways) == 1 else None

    def _is_tensor(self, of: Any) -> bool:
        """Not a size of one."""
        shapes = of._shapes()
        return not isinstance(shapes, int | float | tuple) or (_is_whole(of) and not isinstance(shapes, int))

    def _length(self, way: int | torch.Tensor | str) -> int:
        if isinstance(way, str):
            return -1
        return way * self._rows if isinstance(way, int) else int(way.sum())

    def _chooses(self, name: str, others: Sequence[Any], met: Sequence[Any], way: _Way) -> bool:
        """Whether it is ``x[mask]``, of a mask of the program's."""
        if name != "getitem" or not isinstance(way, int) or not isinstance(others[0], torch.Tensor):
            return False
        mask, shapes = others[0], met[0]._shapes()
        return mask.dtype is torch.bool and mask.ndim > 0 and shapes.shape[: mask.ndim] == mask.shape


def _read(step: Any) -> tuple[str, Any, list[Any], Mapping[str, Any]]:
    """The name of the function or method, what it is of, and its other arguments."""
    args, name = [*step.args], step.name
    if step.method is not None:
        return name, step.method[0], args[1:], step.kwargs
    if step.func is call_method:  # one that writes
        args, name = [args[0], *args[2:]], str(args[1])
    is_in_place = name.endswith("_") and not name.startswith("_")
    return name.rstrip("_") if is_in_place else name, args[0] if args else None, args[1:], step.kwargs


def _is_whole(of: Any) -> bool:
    """Whether it is the model's output, or a part of it that has a name or a number."""
    while of._step is not None:
        func, args = of._step.func, of._step.args
        if func not in (getattr, operator.getitem) or not isinstance(args[0], Kept):
            return False
        if not isinstance(args[1], str | int):
            return False
        of = args[0]
    return True


def _is_number(of: Any) -> bool:
    """Whether it is one number, with which rows meet no others."""
    shapes = of._shapes()
    return isinstance(shapes, torch.Tensor) and not shapes.ndim


def _along_first(name: str, others: Sequence[Any], options: Mapping[str, Any], ndim: int) -> bool:
    """Whether a function of one dim goes along the first."""
    dims = [x for x in (*others, *options.values()) if type(x) is int]
    return name in _OF_DIM and any(x % ndim == 0 for x in dims if ndim)


def _is_by_place(name: str, others: Sequence[Any], options: Mapping[str, Any], ndim: int) -> bool:
    """Whether a call does to the first dim what hangs on the places in it, or on how many they are."""
    if name == "getitem":
        first = _first_of(others[0])
        if isinstance(first, torch.Tensor):
            return first.dtype is not torch.bool and first.ndim > 0
        return isinstance(first, int | slice) and not _is_full(first)
    if name in ("view", "reshape"):
        sizes = others[0] if others and isinstance(others[0], tuple | list) else others
        return bool(sizes) and type(sizes[0]) is int and sizes[0] > 1
    if name in ("flipud", "pdist", "cdist"):
        return name != "cdist" or ndim == 2
    if name not in _AT_DIM and name not in _IN_PARTS:
        return False
    where = others[:1] if name in _AT_DIM else others[1:2]
    dims = options.get("dim", options.get("dims", where[0] if where else None if name == "roll" else 0))
    if name == "flip" and others and type(others[0]) is int:
        dims = list(others)
    every = dims if isinstance(dims, tuple | list) else [dims]
    return any(d is None or (type(d) is int and d % ndim == 0) for d in every)


def _first_of(key: Any) -> Any:
    """What an index says of the first dim."""
    return key[0] if isinstance(key, tuple) and key else key


def _is_full(key: Any) -> bool:
    return isinstance(key, slice) and key.start is key.stop is key.step is None


def _without_full(key: Any, length: int) -> Any:
    """An index, whose first part is ``:`` if it takes all of so many."""
    first = _first_of(key)
    if not isinstance(first, slice) or type(first.stop) is not int or first.stop < length:
        return key
    if first.start not in (None, 0) or first.step not in (None, 1):
        return key
    return (slice(None), *key[1:]) if isinstance(key, tuple) else slice(None)


def _by_one_letter(equation: str) -> bool:
    """Whether the first dim of all that an einsum takes is one and the same."""
    return len({part.strip()[:1] for part in equation.split("->")[0].split(",")}) == 1


def _moves_first(name: str, others: Sequence[Any], options: Mapping[str, Any], ndim: int) -> bool:
    """Whether another dim comes first then, and what was first is there still."""
    if name == "getitem":
        return _first_of(others[0]) is None
    if name == "getattr":
        return others[0] in ("T", "H") or (others[0] in ("mT", "mH") and ndim == 2)
    if name == "unsqueeze":
        return bool(others) and others[0] in (0, -ndim - 1)
    if name in ("t", "adjoint"):
        return ndim == 2
    if name in ("transpose", "swapaxes", "permute"):
        return not _keeps_first(name, others, options, ndim)
    return False


def _keeps_first(name: str, others: Sequence[Any], options: Mapping[str, Any], ndim: int) -> bool:
    """Whether a call leaves the first dim as it is: one of other dims."""
    if name == "getitem" and others:
        key = others[0] if isinstance(others[0], tuple) else (others[0],)
        plain = all(x is None or x is Ellipsis or isinstance(x, slice | int) for x in key)
        first = key[0] if key else None
        reach = sum(x is not None and x is not Ellipsis for x in key)
        return plain and (_is_full(first) if first is not Ellipsis else reach < ndim)
    if name in _OVER or name in ("cat", "concat", "stack"):
        dims = options.get("dim", others[0] if others else None)
        every = dims if isinstance(dims, tuple | list) else [dims]
        return bool(every) and all(type(d) is int and d % ndim != 0 for d in every)
    if name in _PRODUCTS:
        return ndim > 1
    if name in ("transpose", "swapaxes", "permute"):
        order = others[0] if others and isinstance(others[0], tuple | list) else others
        if name == "permute":
            return bool(order) and order[0] == 0
        return len(order) == 2 and all(type(x) is int and x % ndim != 0 for x in order)
    return False
