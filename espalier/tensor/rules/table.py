"""The table from torch functions to rules, and the decorators that put a definition into it.

A rule stands beside the names of the functions that it speaks for::

    @rule("flip")
    def flip(x, *dims): ...

    @rule("add sub", inplace=True)  # add_ and sub_ too
    def add(x, other, *, alpha=1): ...

    @rule_with("float", torch.float32)  # casting(torch.float32) is the rule
    def casting(default=None): ...
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any, Protocol, TypeVar

import torch

from espalier.tensor.rules.spec import RuleFunction, Spec

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
        torch._C._nn,
        getattr(torch._C, "_special"),  # noqa: B009 (unknown to the stubs)
        getattr(torch._C, "_linalg"),  # noqa: B009
        torch._C._VariableFunctions,
    )
    found: list[Any] = []
    for name in names:
        for place in places:
            function = getattr(place, name, None)
            if callable(function) and not isinstance(function, type) and function not in found:
                found.append(function)
        for special in (f"__{name}__", f"__r{name}__"):
            function = getattr(torch.Tensor, special, None)
            if callable(function) and special in _OPERATORS and function not in found:
                found.append(function)
    return found


def _views() -> frozenset[Any]:
    names = """
        adjoint alias as_strided chunk detach diagonal dsplit expand expand_as hsplit imag mT mH moveaxis
        movedim narrow permute real select split split_with_sizes squeeze swapaxes swapdims t tensor_split
        transpose unbind unflatten unfold unsqueeze view view_as view_as_complex view_as_real vsplit
    """
    found = {f for name in names.split() for f in spellings(name)}
    getters = {getattr(torch.Tensor, name).__get__ for name in "T H mT mH real imag".split()}
    # the nn.functional of this name copies
    return frozenset(found - {torch.nn.functional.unfold, torch._C._nn.im2col} | getters)


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

    def register(own: Definition) -> Definition:
        _speaks(own, functions_of(named), loose)
        if inplace:
            names = " ".join(one for one in named if isinstance(one, str)).split()
            _speaks(writing(own), [f for n in names for f in spellings(n + "_", f"__i{n}__")], loose)
        return own

    return register


def rule_in_place(*named: Named, loose: bool = False) -> Decorator:
    """The rule below speaks for these functions, which write what it describes to operand 0."""

    def register(own: Definition) -> Definition:
        _speaks(writing(own), functions_of(named), loose)
        return own

    return register


def rule_with(named: Named, *given: Any, loose: bool = False) -> Decorator:
    """What the function below makes of ``given`` is the rule for these functions."""

    def register(maker: Definition) -> Definition:
        _speaks(maker(*given), functions_of(named), loose)
        return maker

    return register


def rule_of_each(named: Named, *given: Any) -> Decorator:
    """What the function below makes of each of these functions, and of ``given``, is the rule for it."""

    def register(maker: Definition) -> Definition:
        for function in functions_of(named):
            _speaks(maker(function, *given), [function], False)
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


def composed_with(named: Named, *given: Any) -> Decorator:
    """What the function below makes of ``given`` is the body that stands for these functions."""

    def register(maker: Definition) -> Definition:
        RULES.compose(maker(*given), *functions_of(named))
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
        found = spellings(name)
        assert found, f"torch has no {name}"
        functions += found
    return functions


def _speaks(own: RuleFunction, functions: Iterable[Any], loose: bool) -> None:
    """Of two rules of one file for a function the later speaks; two files may not both have one."""
    for function in functions:
        other = RULES.get(function)
        assert other is None or other.__module__ == own.__module__, (
            f"{own.__module__} has a rule for {function}, and {other.__module__} another"
        )
        RULES.add(function, own, loose=loose)
