"""What a rule says: how the dims of a function's inputs and outputs relate.

A rule is a Python function with the parameters of the torch function it speaks for. Where the
call has tensors it receives :class:`Operand` s; it returns a :class:`Spec`, in which *letters*
(any hashable) name dims, as in einsum. It says nothing of meshes, axes or placements: from the
letters ``espalier.tensor.rules.solve`` derives every legal layout.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from espalier.comm import move
from espalier.layout import Layout
from espalier.layout.layout import AxisState
from espalier.mesh import Mesh

Letter = Hashable
Dims = tuple[Letter | None, ...]

DONE = "done"


class Operand:
    """A tensor of the call as a rule sees it: global shape, dtype, and where it stands."""

    __slots__ = ("dtype", "index", "layout", "path")

    def __init__(self, index: int, layout: Layout, dtype: torch.dtype, path: tuple[Any, ...]) -> None:
        self.index = index
        self.layout = layout
        self.dtype = dtype
        self.path = path

    @property
    def shape(self) -> tuple[int, ...]:
        """The global shape."""
        return self.layout.shape

    @property
    def ndim(self) -> int:
        """Number of dims."""
        return len(self.layout.shape)

    def dims(self, name: Hashable = "d") -> Dims:
        """A letter of its own for each dim."""
        return tuple((name, i) for i in range(self.ndim))


@dataclass(slots=True)
class Placed:
    """What a local runner is told: the layouts that its inputs have and its outputs will have."""

    mesh: Mesh
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]

    def axes_of(self, layout: Layout, dims: Iterable[int]) -> tuple[int, ...]:
        """The mesh axes (of size > 1) that cut any of these dims."""
        return tuple(a for d in dims for a in layout.cuts[d] if self.mesh.shape[a] > 1)

    def lacks(self) -> bool:
        """Whether some input or output has no elements on this rank, which many functions refuse."""
        return any(0 in layout.local_shape for layout in (*self.ins, *self.outs))

    def total(self, x: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
        """The first output, of which ``x`` is this rank's addend along ``axes``; differentiable."""
        done = self.outs[0]
        summed = set(axes)
        states = tuple("sum" if a in summed else s for a, s in enumerate(done.axes))
        cuts = tuple(tuple(a for a in cut if a not in summed) for cut in done.cuts)
        return move(x, Layout.of(done.mesh, states, cuts, done.shape), done)


Runner = Callable[..., Any]


@dataclass(slots=True)
class Spec:
    """How the dims of one call relate.

    Attributes:
        ins: for each operand, a letter per dim. ``None``: this dim cannot be sharded.
        outs: for each output, likewise.
        shapes: the outputs' global shapes.
        reduce: letters missing from an output that may be sharded all the same: to the reduction
            that the output then lacks (``"sum"``, ...), or ``DONE`` if the runner does it itself.
        linear: groups of operands in which the function is jointly linear: if exactly those are
            Partial, so is the output.
        addends: operands added to a contraction's result (a bias): Partial where it is.
        blocked: letters that may not be sharded.
        factors: letter to (size, factor) pairs: some dim named by this letter counts ``factor``
            elements for each of ``size``, and cuts must fall between them.
        run: ``run(func, args, kwargs, placed)`` calls the function on local tensors; by default
            ``func(*args, **kwargs)``.
        when: whether the layouts chosen need ``run`` at all; by default they do.
        tail: the arguments after the first for the local call, from the layouts (for views).
        inplace: the operand that is written to; its layout stays.
        buffers: operands that the runner writes to besides; their layouts stay too.
        ways: more that one axis may do, told outright: states of the operands, and of the outputs.
        sends: for a letter the elements that the runner reduces along an axis that cuts it: local ones, as
            the operands lie.
        passes: for a letter the operands whose parts the runner hands to each other rank of an axis that cuts
            it: as much is sent as where they are gathered.
        unread: operands of which nothing but shape and dtype is asked: they stay as they lie.
        decided: axes for which the rule itself says, from how its operands lie, what happens: states of the
            operands, states of the outputs, and the letter that is cut.
        fails: operands whose values alone may make the call fail (an index out of range): where they differ
            from rank to rank the ranks agree on it.
    """

    ins: Sequence[Dims]
    outs: Sequence[Dims]
    shapes: Sequence[tuple[int, ...]]
    reduce: Mapping[Any, str] = field(default_factory=dict)
    linear: Sequence[tuple[int, ...]] = ()
    addends: Sequence[int] = ()
    blocked: frozenset[Letter] = frozenset()
    factors: Mapping[Any, Sequence[tuple[int, int]]] = field(default_factory=dict)
    run: Runner | None = None
    when: Callable[[Placed], Any] | None = None
    tail: Callable[[Placed], tuple[Any, ...]] | None = None
    inplace: int | None = None
    buffers: Sequence[int] = ()
    sends: Mapping[Any, int] = field(default_factory=dict)
    passes: Mapping[Any, tuple[int, ...]] = field(default_factory=dict)
    fails: Sequence[int] = ()
    unread: Sequence[int] = ()
    ways: Sequence[tuple[tuple[AxisState, ...], tuple[AxisState, ...]]] = ()
    decided: dict[int, tuple[tuple[AxisState, ...], tuple[AxisState, ...], Letter]] = field(
        default_factory=dict
    )


def outcome(function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[tuple[int, ...]]:
    """The shapes of what a function gives, from a call on the meta device (lacking it there, on numbers)."""

    def empty(x: Any, device: str) -> Any:
        if isinstance(x, Operand) and device == "meta":
            return torch.empty(x.shape, dtype=x.dtype, device=device)
        if isinstance(x, Operand):
            # matrices of full rank, windows above zero
            counted = torch.arange(math.prod(x.shape), dtype=torch.float64)
            return counted.square_().sin_().div_(2).add_(1).to(x.dtype).view(x.shape)
        return type(x)(empty(y, device) for y in x) if type(x) in (tuple, list) else x

    def call(device: str) -> Any:
        return function(*(empty(a, device) for a in args), **{k: empty(v, device) for k, v in kwargs.items()})

    with torch.no_grad():
        try:
            out = call("meta")
        except NotImplementedError:
            out = call("cpu")
    return [tuple(x.shape) for x in (out if isinstance(out, tuple | list) else (out,))]


def bound_to(names: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name."""
    return dict(zip(names.split(), args, strict=False)) | kwargs


def of_nothing(placed: Placed, *inputs: torch.Tensor, out: int = 0) -> torch.Tensor:
    """Zeros for an output, by default the first, of a rank with an empty shard.

    They hang on all inputs that have gradients: where a collective waits in the backward pass, every rank
    must get there. So must it in the backward of the backward pass, where the gradient of one input hangs on
    the others.
    """
    zeros = inputs[0].new_zeros(placed.outs[out].local_shape)
    smooth = [x.reshape(-1)[:0].sum() for x in inputs if x.is_floating_point() or x.is_complex()]
    return zeros + torch.expm1(sum(smooth[1:], smooth[0])) if smooth else zeros


def of_one(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> torch.Tensor:
    """What a function that keeps its input's dims gives of none: of one row of zeros, less that row.

    Some functions refuse to take nothing, or give it back in another dtype or without a gradient.
    """
    named = dict(kwargs)
    x, *rest = args or (named.pop(next(iter(named))),)
    empty = [d for d, n in enumerate(x.shape) if not n]
    out = func(x.sum(empty, keepdim=True, dtype=x.dtype), *rest, **named)
    for d in empty:
        out = out.narrow(d, 0, 0)
    return out


RuleFunction = Callable[..., "Spec | None"]
