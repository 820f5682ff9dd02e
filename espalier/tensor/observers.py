"""Watching the dispatcher: explanations and the sanitizer are watchers.

While a watcher is open, the dispatcher has each call shown to the watchers before it carries it out. So a
program that nobody watches pays a look at one attribute. (Another function in the place of
``DTensor.__torch_function__`` would have Python look up the type's attributes anew after each change, and,
from 3.13 on, after a thousand changes at every access.)
"""

from __future__ import annotations

import contextlib
import copy
import dis
import os
import sys
import warnings
from bisect import bisect_right
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import cache, lru_cache, partial
from types import CodeType, FrameType
from typing import Any, Generic, Literal, TypeVar

import torch
import typing_extensions
from torch import nn

from espalier.comm import Collective, observed
from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.torch_private import (
    LEAF_NUMBER,
    current_node,
    module_call,
    next_node_number,
    node_number,
    unscales,
)

Go = Callable[[], Any]


class Watcher:
    """What one may watch. All methods do nothing but let things happen.

    Attributes:
        inside: see the calls inside compiled regions too, which then run as they are written.
        traffic: see collectives.
        passes: see what stages of a pipeline compute, which is DTensors then.
    """

    inside = True
    traffic = True
    passes = True

    def around(self, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], go: Go) -> Any:
        """A torch call on DTensors; ``go()`` carries it out and gives its result."""
        return go()

    def saw(self, event: Collective) -> None:
        """A collective is about to start, on any mesh."""

    def claimed(self, x: torch.Tensor, layout: Layout, what: str) -> None:
        """A plain tensor enters that is said to lie so."""


@contextmanager
def watching(watcher: Watcher) -> Iterator[None]:
    """Show ``watcher`` all calls and all traffic of this process while the context is open.

    One that is open already stays so, and sees each once.
    """
    if any(other is watcher for other in watchers()):
        yield
        return
    DOOR.watchers = (*watchers(), watcher)
    try:
        with observed(watcher) if watcher.traffic else nullcontext():
            yield
    finally:
        DOOR.watchers = tuple(other for other in watchers() if other is not watcher)


def watchers() -> tuple[Watcher, ...]:
    """The open watchers."""
    return DOOR.watchers


def claim(x: torch.Tensor, layout: Layout, what: str) -> None:
    """Tell the watchers of a plain tensor that is taken to lie so: equal where it is replicated."""
    for watcher in watchers():
        watcher.claimed(x, layout, what)


class Door:
    """What calls pass on their way into the dispatcher.

    Attributes:
        watchers: those that are open; each call is shown to them first.
    """

    __slots__ = ("watchers",)

    def __init__(self) -> None:
        self.watchers: tuple[Watcher, ...] = ()


DOOR = Door()


def shown(go: Go, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call that watchers are shown, the last of them first, before it is carried out."""
    for watcher in DOOR.watchers:
        go = partial(watcher.around, func, args, kwargs, go)
    return go()


# ---- which call a node of the backward graph belongs to

Item = TypeVar("Item")
_TRAIL = 200_000  # so many calls are remembered
_DEPTH = 2_000  # so many calls may stand in one


class Trail(Generic[Item]):
    """From the nodes that autograd records to the calls that made them.

    Autograd numbers the nodes of a thread in the order in which they are made; a call made those
    between the next number before it and the next one after.
    """

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._ends: list[int] = []
        self._items: list[Item] = []
        self._open = 0

    @contextmanager
    def made_by(self, item: Item) -> Iterator[None]:
        """The nodes made while the context is open are ``item``'s, but for those of contexts inside."""
        if not self._open and len(self._starts) > _TRAIL:
            self.__init__()  # type: ignore[misc]
        start, place = _number(), len(self._starts)
        self._starts.append(start)
        self._ends.append(start)
        self._items.append(item)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            self._ends[place] = _number()
            if self._ends[place] == start:
                del self._starts[place:], self._ends[place:], self._items[place:]

    def here(self) -> Item | None:
        """The item whose node the backward pass is at."""
        node = current_node() if current_node is not None else None
        number = LEAF_NUMBER if node is None else node_number(node)
        if number == LEAF_NUMBER:
            return None
        at = bisect_right(self._starts, number)
        # the last one to start before; it, or one of those that it stands in
        for i in range(at - 1, max(at - _DEPTH, 0) - 1, -1):
            if self._starts[i] <= number < self._ends[i]:
                return self._items[i]
        return None


def _number() -> int:
    return next_node_number() if next_node_number is not None else 0


def in_backward() -> bool:
    """Whether the backward pass is running in this thread."""
    return current_node is not None and current_node() is not None


# ---- where in the user's program a call comes from


_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MODELS = os.path.join(_OURS, "models") + os.sep  # plain models, as a user's own
_TORCH = os.path.dirname(torch.__file__) + os.sep
_WRITERS = os.path.join(_TORCH, "utils", "tensorboard") + os.sep  # ask for values as programs do
_TRANSFORMS = os.path.join(_TORCH, "_functorch") + os.sep
_DISTRIBUTIONS = os.path.join(_TORCH, "distributions", "distribution.py")
_MODULE_CALL: CodeType = module_call.__code__


def _is_ours(code: CodeType) -> bool:
    return code.co_filename.startswith(_OURS) and not code.co_filename.startswith(_MODELS)


def user_frame() -> tuple[int, FrameType]:
    """The first frame that is neither the library's nor torch's, and how far it is above the caller's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level, frame


def tell(message: str, category: type[Warning] = UserWarning) -> None:
    """Warn, at the line of the program that has led here."""
    warnings.warn(message, category, stacklevel=user_frame()[0])


def is_of_program(frame: FrameType) -> bool:
    """Whether it is of neither the library's nor torch's code."""
    return not _inside(frame.f_code.co_filename)


def program_lines() -> tuple[tuple[str, int], ...]:
    """Where in the program a copy is made: the line, and that which has called what it stands in."""
    places: list[tuple[str, int]] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and len(places) < 2:
        path = frame.f_code.co_filename
        if not _inside(path) and path != copy.__file__:
            places.append((path, frame.f_lineno))
        frame = frame.f_back
    return tuple(places)


def who_asks_for_gradients() -> Literal["program", "zero_grad", "torch", "us"]:
    """Who asks for ``p.grad``, whose getter calls what calls this, or sets it.

    What else of torch asks than ``zero_grad``, an optimizer or clipping, is to find what this rank updates.
    ``GradScaler`` is to find what a program does: on all ranks as many, as an overflow counts everywhere.
    """
    code = sys._getframe(3).f_code
    if code.co_name == "zero_grad":
        return "zero_grad"
    if code is unscales or not _inside(code.co_filename):
        return "program"
    return "us" if code.co_filename.startswith(_OURS) else "torch"


def called_by_program() -> bool:
    """Whether the program makes the call that a watcher, which calls this, is shown.

    The library may, and ``zero_grad``, to as many gradients as a rank has.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code is not _WATCHED:
        frame = frame.f_back
    caller = None if frame is None else _below_methods(frame.f_back)
    if caller is None or caller.co_name == "zero_grad":
        return False
    return not _is_ours(caller)


def distributions_check() -> bool:
    """Whether what calls this is called by a distribution of torch's, which looks at its arguments."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_ours(frame.f_code):
        frame = frame.f_back
    return frame is not None and frame.f_code.co_filename == _DISTRIBUTIONS


def is_transform(frame: FrameType) -> bool:
    """Whether a frame is of ``torch.vmap`` or a transform of ``torch.func``."""
    return frame.f_code.co_filename.startswith(_TRANSFORMS)


def program_asks_kind(frame: FrameType | None) -> bool:
    """Whether a frame asks by ``isinstance`` what something is, and is the program's or called by it.

    The C++ of torch asks for ``__class__``, too, and takes what says that it is a tensor for one in memory.
    """
    while frame is not None and frame.f_code.co_filename.startswith("<frozen abc"):
        frame = frame.f_back  # of a class like Mapping
    if frame is None or _is_ours(frame.f_code) or not _runs_isinstance(frame.f_code, frame.f_lasti):
        return False
    while frame is not None and frame.f_code.co_filename.startswith(_TORCH):
        frame = frame.f_back
    return frame is not None and not _is_ours(frame.f_code)


@lru_cache(maxsize=1024)
def _runs_isinstance(code: CodeType, place: int) -> bool:
    """Whether what a frame has come to is a call of ``isinstance``, or a case of a match."""
    now = _instruction(code, place)
    if not now.opname.endswith("CALL"):
        return now.opname == "MATCH_CLASS"
    begins = _begins(now)  # a call's name stands where the call begins
    return begins is not None and any(
        i.argval == "isinstance" and _begins(i) == begins for i in dis.get_instructions(code)
    )


def reads_an_index(frame: FrameType) -> bool:
    """Whether a frame has come to ``x[...]``."""
    now = _instruction(frame.f_code, frame.f_lasti)
    return now.opname in ("BINARY_SUBSCR", "STORE_SUBSCR") or now.argrepr.startswith("[")


def writes_by_operator(frame: FrameType) -> bool:
    """Whether a frame has come to ``x += ...`` or its like."""
    now = _instruction(frame.f_code, frame.f_lasti)
    return now.opname == "BINARY_OP" and now.argrepr.endswith("=")


@lru_cache(maxsize=1024)
def _instruction(code: CodeType, place: int) -> dis.Instruction:
    return next(i for i in dis.get_instructions(code) if i.offset == place)


def _begins(instruction: dis.Instruction) -> tuple[int, int] | None:
    """The line and column where its text begins; None if that is not known (``-X no_debug_ranges``)."""
    place = instruction.positions
    if place is None or place.lineno is None or place.col_offset is None:
        return None
    return place.lineno, place.col_offset


def asked_by_program() -> bool:
    """Whether the program asks for a value, by a method of a DTensor."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename not in _METHODS:
        frame = frame.f_back
    caller = _below_methods(frame)
    return caller is not None and not _inside(caller.co_filename)


def called_now() -> CodeType:
    """What of the library, or of torch, the program has called."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _inside(frame.f_back.f_code.co_filename):
        frame = frame.f_back
    return frame.f_code


def _below_methods(frame: FrameType | None) -> CodeType | None:
    """What calls a method of DTensor, or calls this itself."""
    while frame is not None and frame.f_code.co_filename in _METHODS:
        frame = frame.f_back
    return None if frame is None else frame.f_code


def tell_of_absent_gradient(mesh: Mesh, level: int = 2) -> None:
    """Warn a program that asks for ``p.grad`` where none is shown and other ranks have it.

    Args:
        level: how far the program is above this call.
    """
    if not _inside(sys._getframe(level).f_code.co_filename):
        warnings.warn(
            f"p.grad is None here: the parameter is trained on ranks {list(mesh.ranks)}, in another stage "
            "or branch. What is done to each gradient by itself, in the same way, is right. What is made "
            "of all of them (a norm) is not: torch.nn.utils.clip_grad_norm_(model.parameters(), math.inf) "
            "gives their norm over all stages, engine.full_gradients() all of them, on all ranks.",
            stacklevel=level + 1,
        )


def site(frame: FrameType) -> str:
    """``file:line``, the file relative to where the program runs if it lies there."""
    path, here = frame.f_code.co_filename, os.getcwd() + os.sep
    return f"{path.removeprefix(here)}:{frame.f_lineno}"


def module_path() -> str:
    """The module whose ``forward`` runs now, by its name in the outermost one; empty outside of any."""
    running: list[nn.Module] = []
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_code is _MODULE_CALL:
            running.append(frame.f_locals["self"])
        frame = frame.f_back
    if not running:
        return ""
    inner, root = running[0], running[-1]
    names = [name for name, module in root.named_modules() if module is inner]
    return names[0] if names and names[0] else type(inner).__name__


def library_function() -> str:
    """The function of the library, above the door to the network, that is at work now."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        path, name = frame.f_code.co_filename, frame.f_code.co_qualname
        if path.startswith(_OURS) and not path.startswith(_BELOW) and "<" not in name:
            return name
        frame = frame.f_back
    return "backward"


# what torch puts around its functions
_AROUND = (contextlib.__file__, typing_extensions.__file__)
_WATCHED: CodeType = shown.__code__
_METHODS = tuple(
    os.path.join(_OURS, "tensor", f"{name}.py")
    for name in "dispatch dtensor api shortcuts guard optimizer_steps transforms flex_attention".split()
)
_WATCHERS = ("observers", "explain", "sanitize", "compare")
_BELOW = (
    os.path.join(_OURS, "comm") + os.sep,
    *(os.path.join(_OURS, "tensor", f"{name}.py") for name in _WATCHERS),
)


@cache
def _inside(path: str) -> bool:
    return path.startswith((_OURS, _TORCH, *_AROUND)) and not path.startswith((_MODELS, _WRITERS))


# ---- what the modules of a model send: forward, and in the backward pass of what they computed


class ByModule:
    """Bytes that this rank sent, by the innermost module whose ``forward`` computed what they serve.

    Attributes:
        sent: a module's name to bytes forward and backward; ``""`` for what stands outside.
    """

    def __init__(self) -> None:
        self.sent: dict[str, list[int]] = {}
        self._running: list[tuple[str, ExitStack]] = []
        self._trail: Trail[str] = Trail()

    def saw(self, event: Collective) -> None:
        """Enter a collective."""
        back = in_backward()
        # what is computed again for the backward pass runs in a module too
        name = self._running[-1][0] if self._running else self._trail.here() if back else None
        self.sent.setdefault(name or "", [0, 0])[back] += event.sent

    def _enters(self, name: str) -> None:
        stack = ExitStack()
        stack.enter_context(self._trail.made_by(name))
        self._running.append((name, stack))

    def _leaves(self) -> None:
        self._running.pop()[1].close()


@contextmanager
def by_module(model: nn.Module) -> Iterator[ByModule]:
    """Record what the modules of ``model`` send while the context is open."""
    recorder = ByModule()

    def enters(name: str, *_: Any) -> None:
        recorder._enters(name)

    with ExitStack() as hooks, observed(recorder):
        for name, module in model.named_modules():
            hooks.enter_context(module.register_forward_pre_hook(partial(enters, name), prepend=True))
            leaving = module.register_forward_hook(lambda *_: recorder._leaves(), always_call=True)
            hooks.enter_context(leaving)
        yield recorder
