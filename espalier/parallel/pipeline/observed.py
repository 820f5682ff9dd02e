"""Hooks of a program on modules of a model in stages that look, and change nothing.

Such a hook is called on all ranks, with what its module was given and gave, whichever rank has computed it.
That it changes nothing is read of its code: it gives nothing back.
"""

from __future__ import annotations

import dis
from collections.abc import Callable, Container, Sequence
from functools import partial
from types import CellType, CodeType, MethodType
from typing import Any, Protocol

from torch import nn

# methods and functions that give nothing
_GIVE_NOTHING = frozenset(
    "__setitem__ append appendleft add clear discard extend insert update print remove setattr".split()
)


class Looker(Protocol):
    """Has hooks called that look."""

    def met(self, hook: Observed, args: Sequence[Any]) -> Any: ...


class Observed:
    """In a table of hooks, in the place of one that looks.

    Attributes:
        hook: the program's.
        module: the name of that which has it.
        table: which of its tables; ``key``: where in it.
    """

    def __init__(self, looker: Looker, hook: Callable[..., Any], module: str, table: str, key: int) -> None:
        self.hook, self.module, self.table, self.key = hook, module, table, key
        self._looker = looker
        self.__module__ = getattr(hook, "__module__", None) or ""  # it is the program's own

    def __call__(self, *args: Any) -> Any:
        return self._looker.met(self, args)

    def takes_named(self, module: nn.Module) -> bool:
        """Whether it is given named arguments, too."""
        return self.key in vars(module).get(f"{self.table}_with_kwargs", {})

    def __deepcopy__(self, memo: dict[int, Any]) -> Observed:
        return self  # the hooks of a module's copy are the module's


def only_looks(hook: Any) -> bool:
    """Whether it is certain that a hook gives nothing back."""
    while isinstance(hook, partial | MethodType):
        hook = hook.func if isinstance(hook, partial) else hook.__func__
    if not hasattr(hook, "__code__"):
        hook = vars(type(hook)).get("__call__")
    code = getattr(hook, "__code__", None)
    if not isinstance(code, CodeType):
        return False
    steps = [step for step in dis.get_instructions(code) if step.opname not in ("CACHE", "NOP")]
    for i, step in enumerate(steps):
        if step.opname == "RETURN_CONST" and step.argval is not None:
            return False
        if step.opname == "RETURN_VALUE" and not _is_none(steps[:i]):
            return False
    return "YIELD_VALUE" not in {step.opname for step in steps}


def is_of_modules(hook: Any, modules: Container[Any]) -> bool:
    """Whether a hook is one of these modules' own, whose forwards may go by what it has noted."""
    while isinstance(hook, partial):
        hook = hook.func
    held = [cell.cell_contents for cell in getattr(hook, "__closure__", None) or () if _has_contents(cell)]
    held += [getattr(hook, "__self__", None), *(getattr(hook, "__defaults__", None) or ())]
    return any(isinstance(x, nn.Module) and x in modules for x in held)


def _has_contents(cell: CellType) -> bool:
    try:
        cell.cell_contents  # noqa: B018
    except ValueError:  # not set yet
        return False
    return True


def _is_none(steps: Sequence[dis.Instruction]) -> bool:
    """Whether what these instructions end with is None."""
    last = steps[-1]
    if last.opname == "LOAD_CONST":
        return last.argval is None
    if last.opname not in ("CALL", "CALL_KW"):
        return False
    # arguments that are pushed before it, and, from Python 3.13 on, the names of those that have some
    missing = (last.arg or 0) + (last.opname == "CALL_KW")
    rest = [*steps[:-1]]
    while rest and rest[-1].opname in ("PRECALL", "KW_NAMES"):
        del rest[-1]
    for step in reversed(rest):
        if missing == 0 and step.opname in ("LOAD_METHOD", "LOAD_ATTR", "LOAD_GLOBAL"):
            return step.argval in _GIVE_NOTHING
        if step.is_jump_target or "JUMP" in step.opname:
            return False
        missing -= dis.stack_effect(step.opcode, step.arg)
    return False
