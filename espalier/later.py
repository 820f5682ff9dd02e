"""Names of a package that are imported when they are used: what needs torch takes seconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def on_use(package: str, homes: Mapping[str, str]) -> Callable[[str], Any]:
    """A package's ``__getattr__``, which imports a name from where it is when it is first asked for.

    Args:
        package: its ``__name__``.
        homes: modules of the package to the names, apart by spaces, that they have.
    """
    of = {name: module for module, names in homes.items() for name in names.split()}

    def getter(name: str) -> Any:
        if name not in of:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getattr(import_module(f"{package}.{of[name]}"), name)

    return getter
