"""What modules remember of their forwards, in attributes and buffers: set by stages, told to all ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn

import torch
from torch import nn

from espalier.comm.control import gather_objects
from espalier.mesh import Mesh
from espalier.parallel.pipeline.record import ModelStandIns
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.before import is_of_torch
from espalier.tensor.traces import ABSENT
from espalier.torch_private import raw
from espalier.trees import leaves, tensors_in, tree_map

_TOLD = (
    torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.Size, torch.dtype, torch.device,
)  # fmt: skip
_CONTAINERS = (list, tuple, dict, set, deque)


class _Gone:
    """In the place of an attribute that was taken away."""


class Remembered:
    """The attributes and buffers that a pass sets on ranks whose stages have the modules.

    Told are tensors, numbers, names and containers of these. All ranks have whole plain tensors then, without
    a history.

    Args:
        model: before the pass.
        mesh: with the axis ``pipe``.

    Attributes:
        tensors: by module's name and their own, the attributes that were found to hold tensors.
    """

    def __init__(self, model: nn.Module, mesh: Mesh) -> None:
        self._model, self._line, self._device = model, mesh["pipe"], mesh.device()
        self._before = ModelStandIns.snapshot(model)
        self.tensors: set[tuple[str, str]] = set()

    def tell(self) -> None:
        """After the pass: all ranks come here."""
        modules = dict(self._model.named_modules())
        told: dict[tuple[str, str, bool], Any] = {}
        for name, keys in ModelStandIns.changes(self._model, self._before).items():
            module = modules[name]
            for key in () if is_of_torch(module) else keys:
                is_buffer = key in module._buffers
                value = (module._buffers if is_buffer else vars(module)).get(key, _Gone())
                if _may_be_told(value):
                    whole = told[name, key, is_buffer] = _each(_whole, value)
                    if any(type(x) is DTensor for x in tensors_in([value])):
                        self._take(module, key, is_buffer, whole)
        for i, others in enumerate(gather_objects(told, self._line)):
            for (name, key, is_buffer), value in others.items():
                if not is_buffer and tensors_in([value]):
                    self.tensors.add((name, key))
            if i != self._line.rank:
                for (name, key, is_buffer), value in others.items():
                    self._take(modules[name], key, is_buffer, value)

    def _take(self, module: nn.Module, key: str, is_buffer: bool, value: Any) -> None:
        table: dict[str, Any] = module._buffers if is_buffer else vars(module)
        if isinstance(value, _Gone):
            table.pop(key, None)
            return
        value = _each(self._here, value)
        was: Any = table.get(key)
        if type(was) is type(value) and isinstance(value, list | dict | set | deque):
            was.clear()  # others may hold it
            (was.extend if isinstance(value, list | deque) else was.update)(value)
        else:
            table[key] = value

    def _here(self, x: Any) -> Any:
        return x.to(self._device) if isinstance(x, torch.Tensor) else x


def _each(fn: Callable[[Any], Any], x: Any) -> Any:
    return deque(map(partial(_each, fn), x), x.maxlen) if type(x) is deque else tree_map(fn, x)


def _whole(x: Any) -> Any:
    if not isinstance(x, torch.Tensor):
        return x
    whole = full_tensor(x).detach()
    with raw():
        return whole.cpu()


def _may_be_told(x: Any) -> bool:
    if isinstance(x, nn.Parameter):
        return False
    if type(x) in _CONTAINERS:
        return all(map(_may_be_told, [*x.keys(), *x.values()] if isinstance(x, dict) else x))
    return isinstance(x, (*_TOLD, _Gone))


class Unset:
    """In the place of a tensor that a forward sets, while that has been called and has not run.

    Args:
        name: of the attribute.
        before: what it was; :data:`~espalier.tensor.traces.ABSENT` if it was not there.
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


def hide(model: nn.Module, attributes: Iterable[tuple[str, str]]) -> None:
    """Let who asks for attributes be told that the forward has yet to set them."""
    for name, key in attributes:
        table = vars(model.get_submodule(name))
        if type(before := table.get(key, ABSENT)) is not Unset:
            table[key] = Unset(f"{name}.{key}" if name else key, before)


def show(model: nn.Module, attributes: Iterable[tuple[str, str]]) -> None:
    """Let them be what they were, but for what others have set since."""
    for name, key in attributes:
        table = vars(model.get_submodule(name))
        if type(there := table.get(key)) is Unset:
            if there._before is ABSENT:
                del table[key]
            else:
                table[key] = there._before
