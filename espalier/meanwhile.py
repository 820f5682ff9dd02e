"""Values that hold for a while, and methods of what may be gone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar
from weakref import WeakMethod

T = TypeVar("T")


@contextmanager
def setting(variable: ContextVar[T], value: T) -> Iterator[None]:
    """While open, a context variable has a value; then the one before."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def having(thing: Any, **values: Any) -> Iterator[None]:
    """While open, attributes of a thing have these values; then those that they had."""
    before = {name: getattr(thing, name) for name in values}
    for name, value in values.items():
        setattr(thing, name, value)
    try:
        yield
    finally:
        for name, value in before.items():
            setattr(thing, name, value)


def call_if_there(method: WeakMethod[Any], *args: Any) -> Any:
    """What a method gives, if what it is of is still there; else None."""
    out = method()
    return None if out is None else out(*args)
