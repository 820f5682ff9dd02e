"""What modules' attributes are between a loop's call of a pipeline's model and its backward pass.

The forward, which sets them, has yet to run. A tensor that is asked for is an error; a number is what it was,
and whoever has asked is told once the forward has set another.
"""

from __future__ import annotations

from collections.abc import MutableMapping
from typing import Any, NoReturn
from weakref import WeakKeyDictionary

import torch
from torch import nn

from espalier.tensor.names import ABSENT
from espalier.torch_private import BUFFERS
from espalier.trees import leaves


class Unset:
    """In the place of a tensor that a forward sets, while that has been called and has not run.

    Args:
        name: of the attribute.
        before: what it was; :data:`~espalier.tensor.names.ABSENT` if it was not there.
    """

    def __init__(self, name: str, before: Any) -> None:
        self._name, self._before = name, before

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        """That of what will stand there, for who looks whether there is a tensor."""
        return torch.Tensor

    def _refuse(self, *_: Any) -> NoReturn:
        raise ValueError(
            f"{self._name} is set by the model's forward, which in a pipeline runs with loss.backward(). Ask "
            "for it after that. What belongs to the loss let the forward return, and make the loss of its "
            "output."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self._refuse()

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for x in leaves([list(args), dict(kwargs or {})]):
            if type(x) is cls:
                x._refuse()


for _name in (
    "add radd iadd sub rsub mul rmul truediv rtruediv pow matmul neg abs float int bool len iter getitem "
    "lt le gt ge array index"
).split():
    setattr(Unset, f"__{_name}__", Unset._refuse)


class _Watched:
    """In the place of an attribute of a class: notes of which modules somebody has asked for it.

    Args:
        of: the class.
        key: the attribute's name.

    Attributes:
        noted: for each module of which that is to be known, where to note it, and as what.
    """

    def __init__(self, of: type[nn.Module], key: str) -> None:
        self._of, self._key, self._was = of, key, vars(of).get(key, ABSENT)
        self.noted: MutableMapping[nn.Module, tuple[set[tuple[str, str]], tuple[str, str]]]
        self.noted = WeakKeyDictionary()
        setattr(of, key, self)

    def remove(self) -> None:
        """Let the class have what it had."""
        if self._was is ABSENT:
            delattr(self._of, self._key)
        else:
            setattr(self._of, self._key, self._was)

    def __get__(self, module: nn.Module | None, owner: type) -> Any:
        if module is not None:
            if module in self.noted:
                asked, name = self.noted[module]
                asked.add(name)
            for table in (vars(module), vars(module).get(BUFFERS, {})):
                if self._key in table:
                    return table[self._key]
        for base in owner.__mro__:
            x = self._was if base is self._of else vars(base).get(self._key, ABSENT)
            if x is not ABSENT:
                return x.__get__(module, owner) if hasattr(type(x), "__get__") else x
        raise AttributeError(f"{owner.__name__!r} has no attribute {self._key!r}")

    def __set__(self, module: nn.Module, value: Any) -> None:
        vars(module)[self._key] = value

    def __delete__(self, module: nn.Module) -> None:
        if self._key not in vars(module):
            raise AttributeError(self._key)
        del vars(module)[self._key]


_watched: dict[tuple[type, str], _Watched] = {}


class Hidden:
    """The attributes and buffers of a model that a forward sets, while it has been called and has not run.

    Attributes:
        asked: of what is no error, by module's name and its own, what somebody has asked for meanwhile.
    """

    def __init__(self) -> None:
        self.asked: set[tuple[str, str]] = set()
        self._tensors: set[tuple[str, str]] = set()  # that the next forward will set, surely
        self._all: set[tuple[str, str]] = set()

    def note(self, those: set[tuple[str, str]], tensors: set[tuple[str, str]], is_step: bool = False) -> None:
        """Those have been set, or will be, and hold tensors or don't; in a step others were not set."""
        self._all |= those
        self._tensors = tensors if is_step else self._tensors | tensors

    def hide(self, model: nn.Module) -> None:
        """Let who asks be told that the forward has yet to set them."""
        for name, key in self._tensors:
            table = vars(model.get_submodule(name))
            if type(before := table.get(key, ABSENT)) is not Unset:
                table[key] = Unset(f"{name}.{key}" if name else key, before)
        for name, key in self._all - self._tensors:
            module = model.get_submodule(name)
            own = type(module)
            if (own, key) not in _watched:
                if _is_descriptor(own, key):
                    continue
                _watched[own, key] = _Watched(own, key)
            _watched[own, key].noted[module] = self.asked, (name, key)

    def show(self, model: nn.Module) -> None:
        """Let them be what they were, but for what others have set since."""
        for name, key in self._tensors:
            table = vars(model.get_submodule(name))
            if type(there := table.get(key)) is Unset:
                if there._before is ABSENT:
                    del table[key]
                else:
                    table[key] = there._before
        for name, key in self._all:
            module = model.get_submodule(name)
            watched = _watched.get((type(module), key))
            if watched is not None and watched.noted.pop(module, None) is not None and not watched.noted:
                _watched.pop((type(module), key)).remove()


def _is_descriptor(of: type, key: str) -> bool:
    """Whether a class says itself what an attribute is (a property)."""
    return any(hasattr(type(vars(base)[key]), "__set__") for base in of.__mro__ if key in vars(base))
