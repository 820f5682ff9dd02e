"""Names of other systems that mean nothing here: a program can import them, and a use says what to do."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn


class Absent:
    """Stands for one such name.

    Args:
        name: in full, as the other system has it.
        instead: what to do, without a full stop.
    """

    def __init__(self, name: str, instead: str) -> None:
        self.name, self.instead = name, instead

    def _refuse(self) -> NoReturn:
        raise NotImplementedError(f"{self.name} is not there: {self.instead}.")

    def __call__(self, *args: Any, **kwargs: Any) -> NoReturn:
        self._refuse()

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # Python's own questions
            raise AttributeError(name)
        self._refuse()

    def __mro_entries__(self, bases: tuple[Any, ...]) -> NoReturn:
        self._refuse()

    def __instancecheck__(self, instance: Any) -> bool:
        return False

    def __repr__(self) -> str:
        return f"<{self.name}: not there>"


def or_absent(
    package: str, theirs: str, instead: Mapping[str, str], getter: Callable[[str], Any] | None = None
) -> Callable[[str], Any]:
    """A module's ``__getattr__``, which has the names that are not there.

    Args:
        package: its ``__name__``.
        theirs: the module's name in the other system.
        instead: names, apart by spaces, to what to do in their place.
        getter: finds the others; by default there are none.
    """
    by_name = {name: text for names, text in instead.items() for name in names.split()}

    def get(name: str) -> Any:
        if name in by_name:
            return Absent(f"{theirs}.{name}", by_name[name])
        if getter is None:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        return getter(name)

    return get
