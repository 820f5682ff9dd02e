"""What a rule says: how the dims of a function's inputs and outputs relate.

A rule is a Python function with the parameters of the torch function it speaks for. Where the
call has tensors it receives :class:`Operand` s; it returns a :class:`Spec`, in which *letters*
(any hashable) name dims, as in einsum. It says nothing of meshes, axes or placements: from the
letters ``espalier.sharding.solve`` derives every legal layout.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch

from espalier.comm.redistribute import redistribute_by, redistribute_plan, sums_here
from espalier.layout import Layout
from espalier.layout.layout import AxisState
from espalier.mesh import Mesh
from espalier.torch_private import BUILT_IN, nn_built_in

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
    """What a local runner is told: the layouts that its inputs have and its outputs will have.

    Attributes:
        notes: what a runner has found out about them, for further calls.
    """

    mesh: Mesh
    ins: tuple[Layout, ...]
    outs: tuple[Layout, ...]
    notes: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def axes_of(self, layout: Layout, dims: Iterable[int]) -> tuple[int, ...]:
        """The mesh axes (of size > 1) that cut any of these dims."""
        return tuple(a for d in dims for a in layout.cuts[d] if self.mesh.shape[a] > 1)

    def lacks(self) -> bool:
        """Whether some input or output has no elements on this rank, which many functions refuse."""
        return any(0 in layout.local_shape for layout in (*self.ins, *self.outs))

    def total(self, x: torch.Tensor, axes: Iterable[int]) -> torch.Tensor:
        """The first output, of which ``x``, not to be used again, is this rank's addend; differentiable."""
        done = self.outs[0]
        summed = set(axes)
        states = tuple("sum" if a in summed else s for a, s in enumerate(done.axes))
        cuts = tuple(tuple(a for a in cut if a not in summed) for cut in done.cuts)
        plan = redistribute_plan(Layout.of(done.mesh, states, cuts, done.shape), done)
        return redistribute_by(x, plan, alone=sums_here(x, plan))


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
        widens: the runner takes what torch refuses.
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
    widens: bool = False
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
    out: torch.Tensor = func(x.sum(empty, keepdim=True, dtype=x.dtype), *rest, **named)
    for d in empty:
        out = out.narrow(d, 0, 0)
    return out


RuleFunction = Callable[..., "Spec | None"]


# ---- the table from torch functions to rules, and the decorators that put a definition into it
#
# A rule stands beside the names of the functions that it speaks for::
#
# @rule("flip")
# def flip(x, *dims): ...
#
# @rule("add sub", inplace=True)  # add_ and sub_ too
# def add(x, other, *, alpha=1): ...
#
# @rule_with("float", torch.float32)  # casting(torch.float32) is the rule
# def casting(default=None): ...


Special = Callable[[Callable[..., Any], Iterable[type], tuple[Any, ...], dict[str, Any]], Any]


class Rules:
    """A table from torch functions to rules."""

    def __init__(self) -> None:
        self._rules: dict[Any, RuleFunction] = {}
        self._signatures: dict[Any, inspect.Signature] = {}
        self._specials: dict[Any, Special] = {}
        self._bodies: dict[Any, Callable[..., Any]] = {}
        self.loose: set[Any] = set()

    def add(self, function: Any, rule: RuleFunction, *, loose: bool = False) -> None:
        """Let ``rule`` speak for ``function``.

        ``loose``: neither the answer nor its runner hangs on dtypes, nor on more of a float than whether it
        is zero. So a call with another float, a rate that falls from step to step, finds the old answer.
        """
        self._rules[function] = rule
        self._signatures.pop(function, None)
        (self.loose.add if loose else self.loose.discard)(function)

    def get(self, function: Any) -> RuleFunction | None:
        """The rule for a function, if there is one."""
        return self._rules.get(function)

    def signature(self, function: Any) -> inspect.Signature:
        """The signature of the rule for a function that has one."""
        if function not in self._signatures:
            self._signatures[function] = inspect.signature(self._rules[function])
        return self._signatures[function]

    def add_special(self, function: Any, handler: Special) -> None:
        """Let ``handler(func, types, args, kwargs)`` take the whole call."""
        self._specials[function] = handler

    def special(self, function: Any) -> Special | None:
        """The handler for a function that no rule can describe, if there is one."""
        return self._specials.get(function)

    def functions(self) -> tuple[Any, ...]:
        """All functions that have a rule or are put together from others."""
        return (*self._rules, *(f for f in self._bodies if f not in self._rules))

    def compose(self, body: Callable[..., Any], *functions: Any) -> None:
        """Let ``body``, which calls other functions, stand for these where no rule speaks for a call.

        It gets the call's arguments (under torch's own names: dim, keepdim) and may give
        NotImplemented.
        """
        for function in functions:
            self._bodies[function] = body

    def body(self, function: Any) -> Callable[..., Any] | None:
        """What a function is put together from, if that is known."""
        return self._bodies.get(function)


def writing(rule: RuleFunction) -> RuleFunction:
    """The rule of the in-place form: the output is operand 0."""

    @functools.wraps(rule)
    def wrapped(*args: Any, **kwargs: Any) -> Spec | None:
        spec = rule(*args, **kwargs)
        if spec is None or tuple(spec.shapes[0]) != args[0].shape:
            return None
        spec.inplace = args[0].index
        return spec

    return wrapped


def spellings(*names: str) -> list[Any]:
    """Every public torch callable of one of these names.

    Looked for in torch, torch.Tensor (also as ``__name__`` and ``__rname__``), torch.nn.functional,
    torch.special, torch.linalg and the bindings beneath them.
    """
    places = (
        torch,
        torch.Tensor,
        torch.nn.functional,
        torch.special,
        torch.linalg,
        torch.fft,
        *BUILT_IN,
    )
    callables: list[Any] = []
    for name in names:
        for place in places:
            function = getattr(place, name, None)
            if callable(function) and not isinstance(function, type) and function not in callables:
                callables.append(function)
        for special in (f"__{name}__", f"__r{name}__"):
            function = getattr(torch.Tensor, special, None)
            if callable(function) and special in _OPERATORS and function not in callables:
                callables.append(function)
    return callables


def _views() -> frozenset[Any]:
    names = """
        adjoint alias as_strided chunk detach diagonal dsplit expand expand_as hsplit imag mT mH moveaxis
        movedim narrow permute real select split split_with_sizes squeeze swapaxes swapdims t tensor_split
        transpose unbind unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit
    """
    functions = {f for name in names.split() for f in spellings(name)}
    getters = {getattr(torch.Tensor, name).__get__ for name in "T H mT mH real imag".split()}
    # the nn.functional of this name copies
    return frozenset(functions - {torch.nn.functional.unfold, nn_built_in.im2col} | getters)


_OPERATORS = frozenset(
    f"__{prefix}{op}__"
    for op in (
        "add sub mul truediv div floordiv mod pow matmul and or xor lshift rshift eq ne lt le gt ge "
        "neg pos abs invert"
    ).split()
    for prefix in ("", "r")
)

# what torch promises to be views of the first argument (slices too, see ``espalier.tensor.loans``)
VIEWS = _views()


# ---- what stands above a definition, and puts it into the table

RULES = Rules()

Named = Any  # a function, a text of names (see ``spellings``), or a tuple of both
Definition = TypeVar("Definition", bound=Callable[..., Any])


class Decorator(Protocol):
    """What a decorator here is: the definition stays as it is."""

    def __call__(self, definition: Definition, /) -> Definition:
        """Put it into the table."""


def rule(*named: Named, inplace: bool = False, loose: bool = False) -> Decorator:
    """The rule below speaks for these functions: given themselves, or by names in any public spelling.

    With ``inplace``, also for the spellings of the names that end in an underscore, writing operand 0.
    ``loose``: see :meth:`Rules.add`.
    """

    def register(definition: Definition) -> Definition:
        _speaks(definition, functions_of(named), loose)
        if inplace:
            names = " ".join(one for one in named if isinstance(one, str)).split()
            _speaks(writing(definition), [f for n in names for f in spellings(n + "_", f"__i{n}__")], loose)
        return definition

    return register


def rule_in_place(*named: Named, loose: bool = False) -> Decorator:
    """The rule below speaks for these functions, which write what it describes to operand 0."""

    def register(definition: Definition) -> Definition:
        _speaks(writing(definition), functions_of(named), loose)
        return definition

    return register


def rule_with(named: Named, *args: Any, loose: bool = False) -> Decorator:
    """What the function below makes of ``args`` is the rule for these functions."""

    def register(maker: Definition) -> Definition:
        _speaks(maker(*args), functions_of(named), loose)
        return maker

    return register


def rule_of_each(named: Named, *args: Any) -> Decorator:
    """What the function below makes of each of these functions, and of ``args``, is the rule for it."""

    def register(maker: Definition) -> Definition:
        for function in functions_of(named):
            _speaks(maker(function, *args), [function], False)
        return maker

    return register


def special(*named: Named) -> Decorator:
    """The handler below takes the calls of these functions (see :meth:`Rules.add_special`)."""

    def register(handler: Definition) -> Definition:
        for function in functions_of(named):
            RULES.add_special(function, handler)
        return handler

    return register


def composed(*named: Named) -> Decorator:
    """The body below stands for these functions (see :meth:`Rules.compose`)."""

    def register(body: Definition) -> Definition:
        RULES.compose(body, *functions_of(named))
        return body

    return register


def composed_with(named: Named, *args: Any) -> Decorator:
    """What the function below makes of ``args`` is the body that stands for these functions."""

    def register(maker: Definition) -> Definition:
        RULES.compose(maker(*args), *functions_of(named))
        return maker

    return register


def functions_of(named: Named) -> list[Any]:
    """The functions given themselves, and every public spelling of the names."""
    if isinstance(named, tuple):
        return [function for one in named for function in functions_of(one)]
    if not isinstance(named, str):
        return [named]
    functions: list[Any] = []
    for name in named.split():
        callables = spellings(name)
        assert callables, f"torch has no {name}"
        functions += callables
    return functions


def _speaks(own: RuleFunction, functions: Iterable[Any], loose: bool) -> None:
    """Of two rules of one file for a function the later speaks; two files may not both have one."""
    for function in functions:
        other = RULES.get(function)
        assert other is None or other.__module__ == own.__module__, (
            f"{own.__module__} has a rule for {function}, and {other.__module__} another"
        )
        RULES.add(function, own, loose=loose)
