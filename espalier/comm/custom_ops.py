"""Collectives inside compiled graphs.

A tracer (AOTAutograd beneath ``espalier.compile``) runs programs on tensors without values, under
dispatch modes. There a collective must be an operator: so each function behind :func:`collective` is
also ``torch.ops.espalier.<name>``, whose kernel is the function itself, ledger included, and
whose shape function is the function on a dry mesh. Its effects are ordered: no compiler may leave
one out or change their order, or the ranks would wait for each other for ever.
"""

from __future__ import annotations

import ast
import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import torch
from torch.overrides import handle_torch_function

from espalier.mesh import Mesh
from espalier.torch_private import (
    ONLOOKERS,
    DefaultDevice,
    disable_modes,
    dispatch_mode_stack,
    dispatch_modes,
    function_mode_stack,
    function_modes,
    keep_order,
    raw,
    without_torch_functions,
)

# how many dispatch modes are on
observers: Callable[[], int] = dispatch_modes


def tracers() -> int:
    """How many dispatch modes are on that may trace a program, or keep what operations give.

    Not those that only look on, which say so by an attribute ``looks_on``, and torch's own counters: what is
    done must not hang on who counts it.
    """
    modes = dispatch_modes()
    if modes:
        modes = sum(not _looks_on(type(mode)) for mode in dispatch_mode_stack())
    return modes


def _looks_on(kind: type) -> bool:
    return getattr(kind, "looks_on", False) or kind.__module__ in ONLOOKERS


def recorders() -> int:
    """How many torch function modes are on, which may record a program.

    Not that of ``torch.set_default_device``, which only says where tensors are made.
    """
    modes = function_modes()
    if modes:
        modes = sum(type(mode) is not DefaultDevice for mode in function_mode_stack())  # type: ignore[no-untyped-call]
    return modes


def traced(mesh: Mesh) -> bool:
    """Whether what is done on a mesh must be an operator of a trace."""
    return bool(tracers()) and not mesh.is_dry


def recording() -> bool:
    """Whether a program is being recorded, to be compiled."""
    return _mode_that("records") is not None


def dividing() -> Any:
    """Who records a program, to divide it among stages; None: nobody does."""
    return _mode_that("divides")


def answering() -> bool:
    """Whether collectives are not made, but answered (see ``espalier.tensor.rules.across_ranks``)."""
    return _mode_that("answers") is not None


def _mode_that(does: str) -> Any:
    modes = function_mode_stack() if recorders() else ()  # type: ignore[no-untyped-call]
    return next((mode for mode in modes if getattr(mode, does, False)), None)


@contextmanager
def unrecorded() -> Iterator[None]:
    """While open, calls go to local tensors, and are no part of what is recorded or counted of a program."""
    with disable_modes(), without_torch_functions() if recording() else raw():
        yield


def symbolic() -> bool:
    """Whether a program is being traced or recorded: nothing may hang on values then."""
    return bool(tracers()) or recording()


def observed() -> bool:
    """Whether a program is being recorded, or anyone sees its operations: they must be there to be seen."""
    return bool(observers()) or recording()


_meshes: weakref.WeakValueDictionary[str, Mesh] = weakref.WeakValueDictionary()
_words: weakref.WeakKeyDictionary[Mesh, str] = weakref.WeakKeyDictionary()


def collective(function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Make ``function(x, mesh, axis, *constants)`` an operator where it is traced."""

    @functools.wraps(function)
    def entered(x: torch.Tensor, mesh: Mesh, axis: int, *constants: Any) -> Any:
        if recorders():
            return handle_torch_function(entered, (), x, mesh, axis, *constants)
        # who only looks on sees one operation, too
        if observers() and not mesh.is_dry and mesh.shape[axis] > 1:
            plain = tuple(tuple(c) if isinstance(c, torch.Size) else c for c in constants)
            return _operator(function)(x, _word(mesh), axis, repr(plain))
        return function(x, mesh, axis, *constants)

    return entered


@lru_cache
def library() -> Any:
    """Where operators of the name space ``espalier`` are defined."""
    return torch.library.Library("espalier", "DEF")  # type: ignore[no-untyped-call]


def defined(signature: str, kernel: Callable[..., Any], shaped: Callable[..., Any]) -> Any:
    """A new operator of the name space, ``name(arguments) -> results``.

    Args:
        shaped: the same without values.
    """
    home, name = library(), signature.partition("(")[0]
    home.define(signature)
    home.impl(name, kernel, "CompositeExplicitAutograd")
    torch.library.register_fake(f"espalier::{name}", shaped, lib=home)
    return getattr(torch.ops.espalier, name).default


@lru_cache
def _operator(function: Callable[..., torch.Tensor]) -> Any:
    # made when first traced: programs that compile nothing are spared the time
    def kernel(x: torch.Tensor, mesh: str, axis: int, constants: str) -> torch.Tensor:
        return function(x, _meshes[mesh], axis, *parsed(constants))

    def shaped(x: torch.Tensor, mesh: str, axis: int, constants: str) -> torch.Tensor:
        out = function(x, _dry(_meshes[mesh]), axis, *parsed(constants))
        return torch.empty_like(x, memory_format=torch.contiguous_format) if out is x else out

    signature = f"{function.__name__}(Tensor x, str mesh, int axis, str constants) -> Tensor"
    operator = defined(signature, kernel, shaped)
    keep_order(operator)
    return operator


@lru_cache
def copy_operator() -> Any:
    """A copy that no compiler leaves out."""
    return defined("copied(Tensor x) -> Tensor", torch.clone, torch.clone)


@lru_cache(maxsize=4096)
def parsed(constants: str) -> Any:
    """What an operator of a collective is told in words."""
    return ast.literal_eval(constants)


def _word(mesh: Mesh) -> str:
    """A name for a mesh and this rank's place in it, from which follow the shapes (caches rely on it)."""
    known = _words.get(mesh)
    if known is None:
        axes = " ".join(f"{name}{n}" for name, n in zip(mesh.names, mesh.shape, strict=True))
        known = _words[mesh] = f"{axes} at {mesh.coordinate} #{len(_words)}"
        _meshes[known] = mesh
    return known


def mesh_of(word: str) -> Mesh:
    """The mesh that an operator of a collective names."""
    return _meshes[word]


def _dry(mesh: Mesh) -> Mesh:
    axes = dict(zip(mesh.names, mesh.shape, strict=True))
    return Mesh.dry(axes, coordinate=mesh.coordinate, device_type=mesh.device_type)
