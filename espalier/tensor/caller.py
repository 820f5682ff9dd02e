"""Where in the user's program a call comes from."""

from __future__ import annotations

import contextlib
import os
import sys
from types import CodeType, FrameType

import torch
from torch import nn

_OURS = os.path.dirname(os.path.dirname(__file__)) + os.sep
_MODELS = os.path.join(_OURS, "models") + os.sep  # plain models, as a user's own
_TORCH = os.path.dirname(torch.__file__) + os.sep
_MODULE_CALL: CodeType = nn.Module._call_impl.__code__


def user_frame() -> tuple[int, FrameType]:
    """The first frame that is neither the library's nor torch's, and how far it is above the caller's."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back is not None and _inside(frame.f_code.co_filename):
        level, frame = level + 1, frame.f_back
    return level, frame


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


_WATCHERS = ("watch", "explain", "sanitize", "compare", "caller")
_BELOW = (
    os.path.join(_OURS, "comm") + os.sep,
    *(os.path.join(_OURS, "tensor", f"{name}.py") for name in _WATCHERS),
)


def _inside(path: str) -> bool:
    return path.startswith((_OURS, _TORCH, contextlib.__file__)) and not path.startswith(_MODELS)
