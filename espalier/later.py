"""Imports of what takes seconds, as everything that needs torch does: when it is used, and quickly."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import Any


@contextmanager
def uncollected() -> Iterator[None]:
    """Without looks for garbage: what is imported or made meanwhile stays.

    They take a fifth to a fourth of the time of imports, as of all that makes many objects.
    """
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def importing() -> Iterator[None]:
    """Imports of this package in the midst of a program: without looks for garbage, and unseen by its seeds.

    What is imported may draw of Python's generator (rich does), behind ``random.seed(0)``.
    """
    import random

    state = random.getstate()
    try:
        with uncollected():
            yield
    finally:
        random.setstate(state)


def on_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``, which imports a name from where it is when it is first asked for.

    Args:
        package: its ``__name__``.
        homes: modules of the package to the names, apart by spaces, that they have; ``""`` to its modules.
    """
    of = {name: module for module, names in homes.items() for name in names.split()}

    def getter(name: str) -> Any:
        if name not in of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        with importing():
            module = import_module(f"{package}.{of[name] or name}")
        return getattr(module, name) if of[name] else module

    return getter
