"""Names and modules of other systems that mean nothing here: they can be imported, a use says what to do."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import MappingProxyType, ModuleType
from typing import Any, NoReturn, TypeVar, Union

T = TypeVar("T")


class Absent:
    """Stands for one such name.

    Args:
        name: in full, as the other system has it.
        instead: what to do, without a full stop.
    """

    def __init__(self, name: str, instead: str) -> None:
        vars(self).update(name=name, instead=instead)

    name: str
    instead: str

    def __setattr__(self, name: str, value: Any) -> NoReturn:
        self._refuse()

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

    def __or__(self, other: Any) -> Any:  # in the type of an argument
        return Union[self, other]  # noqa: UP007

    def __ror__(self, other: Any) -> Any:
        return Union[other, self]  # noqa: UP007

    def __repr__(self) -> str:
        return f"<{self.name}: not there>"


class _Module(ModuleType):
    """A module that is made; called, it is the function that had its name, whose place an import takes."""

    function: Callable[..., Any] | None = None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self.function is None:
            raise TypeError(f"the module {self.__name__!r} is no function")
        return self.function(*args, **kwargs)


class AbsentModule(_Module):
    """Stands for a module of such names, and of modules of such.

    Args:
        name: under which it is imported.
        theirs: its name in the other system.
        instead: what to do in place of all that it has, without a full stop.
    """

    def __init__(self, name: str, theirs: str, instead: str) -> None:
        super().__init__(name, f"{theirs} is not there: {instead}.")
        self.theirs, self.instead = theirs, instead

    def __getattr__(self, name: str) -> Absent:
        if name.startswith("__"):
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        return Absent(f"{self.theirs}.{name}", self.instead)


class _Other(_Module):
    """A module that has the names of another; what is in it is what is in that one.

    Args:
        name: under which it is imported.
        theirs: its name in the other system.
        home: the other.
    """

    def __init__(self, name: str, theirs: str, home: ModuleType) -> None:
        super().__init__(name, home.__doc__)
        self._theirs, self._home = theirs, home

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") and name != "__all__":
            raise AttributeError(f"module {self.__name__!r} has no attribute {name!r}")
        found = getattr(self._home, name)
        return Absent(f"{self._theirs}.{name}", found.instead) if type(found) is Absent else found

    def _below(self, name: str) -> AbsentModule | _Other | None:
        """What is in it under a name."""
        here, theirs = f"{self.__name__}.{name}", f"{self._theirs}.{name}"
        try:
            home = import_module(f"{self._home.__name__}.{name}")
        except ModuleNotFoundError as error:
            if error.name != f"{self._home.__name__}.{name}":
                raise
            return None
        if isinstance(home, AbsentModule):
            return AbsentModule(here, theirs, home.instead)
        return _Other(here, theirs, home)


class Names:
    """A module's ``__getattr__``, which has what is not there, or is elsewhere: see :func:`or_absent`."""

    def __init__(
        self,
        package: str,
        theirs: str,
        instead: Mapping[str, str],
        getter: Callable[[str], Any] | None,
        elsewhere: Mapping[str, str],
    ) -> None:
        self._package, self._theirs, self._getter = package, theirs, getter
        self._instead, self._elsewhere = one_by_one(instead), one_by_one(elsewhere)

    def __call__(self, name: str) -> Any:
        if name in self._elsewhere:
            return import_module(self._elsewhere[name])
        if name in self._instead:
            return Absent(f"{self._theirs}.{name}", self._instead[name])
        if self._getter is None:
            raise AttributeError(f"module {self._package!r} has no attribute {name!r}")
        return self._getter(name)

    def module(self, name: str) -> AbsentModule | _Other | None:
        """What ``import package.name`` finds where there is no such file."""
        here, theirs = f"{self._package}.{name}", f"{self._theirs}.{name}"
        if name in self._elsewhere:
            return _Other(here, theirs, import_module(self._elsewhere[name]))
        if name in self._instead:
            return AbsentModule(here, theirs, self._instead[name])
        return None


def or_absent(
    package: str,
    theirs: str,
    instead: Mapping[str, str],
    getter: Callable[[str], Any] | None = None,
    elsewhere: Mapping[str, str] = MappingProxyType({}),
) -> Callable[[str], Any]:
    """A module's ``__getattr__``, which has the names that are not there.

    They are also modules that can be imported, with all that is below them: so a file counts as a package.

    Args:
        package: its ``__name__``.
        theirs: the module's name in the other system.
        instead: names, apart by spaces, to what to do in their place.
        getter: finds the others; by default there are none.
        elsewhere: names of modules, apart by spaces, to the module that has their names here.
    """
    vars(sys.modules[package]).setdefault("__path__", [])
    return Names(package, theirs, instead, getter, elsewhere)


def one_by_one(table: Mapping[str, T]) -> dict[str, T]:
    """A table whose keys are names, apart by spaces, as one of single names."""
    return {name: text for names, text in table.items() for name in names.split()}


class _Made(Loader):
    """Gives a module that is made."""

    def __init__(self, module: ModuleType) -> None:
        self._module = module

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        """Nothing: it has all it needs."""


class _Finder(MetaPathFinder):
    """Finds modules of which a package's :class:`Names` tell, and no file. It holds nothing."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        package, _, name = fullname.rpartition(".")
        parent = sys.modules.get(package)
        module: _Module | None = None
        if isinstance(parent, AbsentModule):
            module = AbsentModule(fullname, f"{parent.theirs}.{name}", parent.instead)
        elif isinstance(parent, _Other):
            module = parent._below(name)
        elif parent is not None and isinstance(names := vars(parent).get("__getattr__"), Names):
            module = names.module(name)
        if module is None:
            return None
        function = vars(parent).get(name)
        module.function = function if callable(function) else None
        return ModuleSpec(fullname, _Made(module), is_package=True)


sys.meta_path.append(_Finder())  # behind Python's own: a module that is a file is that file
