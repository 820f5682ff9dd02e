"""Losses that a program makes itself, known to all ranks once they have gone back.

Of a loss made of rows that ranks share each rank has an addend, and who asks for its value asks all. Programs
print it on one rank alone, mostly after ``loss.backward()``, which all ranks call. So the ranks sum it beside
that, in one message with the losses that it is a sum of (``loss = ce + 0.1 * aux``), and these tensors become
their values. To autograd those are others, made of the addends.

Numbers of which nothing goes back (how many rows were right, a loss under ``no_grad``) have no such moment:
they are summed when the loop makes them.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch

from espalier.comm.collectives import all_reduce_, sum_here
from espalier.comm.functions import OwnFunction
from espalier.comm.redistribute import move
from espalier.layout import Layout
from espalier.layout.layout import R, is_partial
from espalier.layout.routes import SUMS
from espalier.mesh import Mesh
from espalier.tensor.dtensor import DTensor, plain, stamp
from espalier.torch_private import raw, swap_impls, swapped, version_of
from espalier.trees import tensors_in

_FEW = 1 << 12  # numbers, that are as good as one
_MOST = 32  # numbers of one message: a sum over steps has no end
_NOT_ALONE = frozenset({"_source", "_unfinished", "_reduced"})  # others know it by its addends


class Term(NamedTuple):
    """One number, of which each rank has an addend.

    Attributes:
        holder: the tensor, weakly: ranks may keep it or not, but all sum it.
        addend: this rank's, outside autograd.
        layout: how the tensor lies.
        version: the tensor's.
        terms: those that it is made of.
    """

    holder: weakref.ref[DTensor]
    addend: torch.Tensor
    layout: Layout
    version: int
    terms: tuple[Term, ...]


def adds_up(layout: Layout) -> bool:
    """Whether a tensor is one number that is a sum, or an average, over ranks."""
    states = [layout.axes[axis] for axis in layout.partial if layout.mesh.shape[axis] > 1]
    return not layout.shape and bool(states) and all(state in SUMS for state in states)


def is_summed_at_once(layout: Layout) -> bool:
    """Whether these are a few numbers made of rows that ranks share, which may have to be known at once."""
    return not layout.mesh.rows.isdisjoint(layout.partial) and math.prod(layout.shape) <= _FEW


def known_at_once(out: torch.Tensor) -> torch.Tensor:
    """Such numbers, of which nothing goes back: summed now, if a program's loop makes them (a collective).

    All ranks compute them, and it may be that one alone prints them.
    """
    if type(out) is not DTensor or not out._layout.mesh.sums_at_once:
        return out
    with raw():
        if out.requires_grad:
            return out
        lies = out._layout
        states = tuple(R if is_partial(state) else state for state in lies.axes)
        whole = Layout.of(lies.mesh, states, lies.cuts, lies.shape)
        return stamp(plain(move(out, lies, whole)), whole)


@contextmanager
def as_addends(*meshes: Mesh) -> Iterator[None]:
    """While open, it is not the program's loop that computes: numbers stay addends until they are used."""
    of_loops = [mesh for mesh in meshes if mesh.sums_at_once]
    for mesh in of_loops:
        mesh.sums_at_once = False
    try:
        yield
    finally:
        for mesh in of_loops:
            mesh.sums_at_once = True


def note_terms(out: torch.Tensor, operands: Iterable[Any]) -> None:
    """Note of a number that may go back which numbers it is made of."""
    with raw():
        if not out.requires_grad:
            return
    found = [_term(x) for x in tensors_in(operands) if type(x) is DTensor and not x._layout.shape]
    out._terms = tuple(found)  # type: ignore[attr-defined]


def _term(x: DTensor) -> Term:
    with raw():
        addend, version = plain(x.detach()), version_of(x)
    return Term(weakref.ref(x), addend, x._layout, version, x.__dict__.get("_terms", ()))


class Telling:
    """Lets losses that go back, and what they are made of, be known on all ranks (a collective).

    They are sent when it is known that a pass finishes gradients, mostly before it makes any, and waited for
    at its end.

    Args:
        roots: where the pass begins.
    """

    def __init__(self, roots: Iterable[Any]) -> None:
        self._roots = roots
        self._sums: list[_Sum] | None = None  # those under way

    def begin(self) -> None:
        """Send them, once."""
        if self._sums is not None:
            return
        ends = [
            x for x in self._roots if type(x) is DTensor and not x._layout.shape and not x._layout.mesh.is_dry
        ]
        groups: dict[Any, list[Term]] = {}
        for term in _all_of(map(_term, ends)):
            if adds_up(term.layout):
                key = (term.layout.mesh, *term.layout.partial, term.addend.dtype)
                groups.setdefault(key, []).append(term)
        self._sums = [_Sum(terms[:_MOST]) for terms in groups.values()]

    def end(self) -> None:
        """Let them be known, those that were sent."""
        for under_way in self._sums or ():
            under_way.become_known()


def _all_of(terms: Iterable[Term]) -> Iterator[Term]:
    """Terms, and those that they are made of, each once."""
    seen: set[int] = set()  # references to one tensor are one object
    waiting = [*terms][::-1]
    while waiting:
        term = waiting.pop()
        if id(term.holder) not in seen:
            seen.add(id(term.holder))
            yield term
            waiting += reversed(term.terms)


class _Sum:
    """Numbers that lie along the same axes, summed in one message."""

    def __init__(self, terms: Sequence[Term]) -> None:
        first, *self._left = terms[0].layout.partial
        self._terms, self._mesh = terms, terms[0].layout.mesh
        with raw(), torch.no_grad():
            self._values = torch.stack([term.addend * share_of_addend(term.layout) for term in terms])
            self._work = all_reduce_(self._values, self._mesh, first, beside=True)

    def become_known(self) -> None:
        with raw(), torch.no_grad():
            self._work.wait()
            sum_here(self._values, self._mesh, self._left)
        for term, value in zip(self._terms, self._values.unbind(), strict=True):
            x = term.holder()
            if x is not None and _is_as_it_was(x, term):
                share = share_of_addend(term.layout)
                with raw(), torch.enable_grad():
                    known = _Known.apply(plain(x), value, share)
                if not swapped(x, known):
                    if share != 1.0:
                        continue
                    with raw():  # its gradient is that of the addend
                        x.data = value.clone()
                x.__dict__.pop("_moved", None)
                x.__dict__.pop("_terms", None)
                stamp(x, Layout.replicated(term.layout.mesh, ()))


def _is_as_it_was(x: DTensor, term: Term) -> bool:
    """Whether a tensor may become what its addends were summed to."""
    if swap_impls is None or x._layout is not term.layout or _NOT_ALONE & x.__dict__.keys():
        return False
    with raw():
        stays = x.retains_grad or (x.is_leaf and x.requires_grad)
        return version_of(x) == term.version and not stays


def note_zeroed(x: Any) -> None:
    """A program has written zeros there: a gradient is dropped so."""
    while isinstance(x, torch.Tensor):
        if type(x) is DTensor and (passed := x._layout.mesh.outermost.passed):
            x.__dict__["_zeroed"] = passed
        x = x.__dict__.get("_alias_of")


def is_zeroed(x: torch.Tensor, since: int) -> bool:
    """Whether a program has written zeros there since so many micro-batches have gone back."""
    zeroed: int = x.__dict__.get("_zeroed", -1)
    return zeroed >= since or ("_alias_of" in x.__dict__ and is_zeroed(x.__dict__["_alias_of"], since))


def note_alias(out: torch.Tensor, x: Any) -> None:
    """What is written to a tensor is written to another, too, as far as torch cannot tell."""
    if type(x) is DTensor and x._layout.mesh.outermost.passed:
        with raw():
            if not x.requires_grad:  # a gradient; else its graph would live as long
                out.__dict__["_alias_of"] = x


def share_of_addend(layout: Layout) -> float:
    """The share of a rank's addend in what its tensor is: all of it in a sum, a part in an average."""
    share = 1.0
    for n, state in zip(layout.mesh.shape, layout.axes, strict=True):
        share /= n if state == "avg" else 1
    return share


class _Known(OwnFunction):
    """A number that is known, made of this rank's addend; differentiable to any order."""

    @staticmethod
    def forward(ctx: Any, addend: torch.Tensor, value: torch.Tensor, share: float) -> torch.Tensor:
        ctx.share = share
        return value.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad * ctx.share, None, None
