"""Copies of models to look at: they share nothing with the user's own, but memory while nobody writes."""

from __future__ import annotations

import contextlib
import copy
import functools
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.blocks import parameters_in
from espalier.tensor.dtensor import DETACHED, set_by_program
from espalier.tensor.names import ABSENT
from espalier.tensor.traces import untraced
from espalier.torch_private import TABLES, call_as_written, lazy_clone, memory_id, raw

_OF_CLASSES = (staticmethod, classmethod)  # functions, and the copy module knows them not
Stand = Callable[[torch.Tensor], torch.Tensor | None]
Instead = Callable[[nn.Module], Mapping[str, Any]]


class NotCopiedError(ValueError):
    """A model cannot be copied, so that nothing can be looked at without traces in it."""


class Apart:
    """A copy of a module, and of what is given beside it.

    Args:
        module: any module whose parameters are plain tensors, unless others stand for them.
        extra: its arguments, say.
        stand: gives what stands in the copy for a parameter or buffer; None: a copy.
        instead: gives for a module the attributes of which the copy has others, namely copies of those given;
            :data:`ABSENT` for none.

    Attributes:
        module, extra: the copies.

    Raises:
        NotCopiedError: one cannot be copied; it names the attribute.
    """

    def __init__(
        self,
        module: nn.Module,
        extra: Any = None,
        stand: Stand = lambda x: None,
        instead: Instead = lambda module: {},
    ) -> None:
        memo: dict[Any, Any] = {DETACHED: True}
        tensors = _Tensors()
        originals: list[Any] = [*parameters_in(module), *module.buffers()]
        other_attributes = [instead(part) for part in module.modules()]
        for part, attributes in zip(module.modules(), other_attributes, strict=True):
            memo.update({id(vars(part)[name]): None for name in attributes if name in vars(part)})
            memo.update({id(x): x for x in vars(part).values() if isinstance(x, _OF_CLASSES)})
        with torch.no_grad():
            for x in originals:
                other = stand(x)
                if other is not None:
                    vars(other).update(set_by_program(x))
                    memo[id(x)] = other
                elif type(x) in (nn.Parameter, torch.Tensor):
                    memo[id(x)] = tensors.held(x)
        try:
            with torch.no_grad(), tensors:
                self.module = copy.deepcopy(module, memo)
                for part, attributes in zip(self.module.modules(), other_attributes, strict=True):
                    for name, value in attributes.items():
                        if value is ABSENT:
                            vars(part).pop(name, None)
                        else:
                            vars(part)[name] = copy.deepcopy(value, memo)
                self.extra = copy.deepcopy(extra, memo)
        except Exception as error:
            raise NotCopiedError(_refused(module, error)) from error
        ids = {id(x) for x in originals}
        if self.module is module or any(id(x) in ids for x in parameters_in(self.module)):
            raise NotCopiedError(
                f"{type(module).__name__} cannot be copied: a __deepcopy__ in it gives the same parameters."
            )
        with torch.no_grad(), tensors:
            rebound = _Rebound(memo)
            for part in self.module.modules():
                rebound.attributes(part)
        run_as_written(self.module)
        originals += memo.get(id(memo), ())
        self._originals = {id(memo[id(x)]): x for x in originals if memo.get(id(x)) is not None}
        self._memo, self._tensors = memo, tensors  # kept, so that no id names two

    def original(self, x: Any) -> Any:
        """What a part of the copy is a copy of; itself if it is none."""
        return self._originals.get(id(x), x)

    def forget(self) -> None:
        """Let go of the originals, and share no memory with them: the copy goes on alone."""
        self._originals.clear()
        self._memo.clear()  # tensors in it may hold the graph that made them
        self._tensors.part()

    def release(self) -> None:
        """Let go of the copy: its parameters and buffers are emptied, whoever holds them."""
        with torch.no_grad(), raw():
            for x in self._tensors.copies:
                if x.layout is not torch.strided:
                    continue  # a sparse one takes no other memory
                x.data = torch.empty(0, dtype=x.dtype, device=x.device)
        self.forget()


@contextmanager
def apart(module: nn.Module, extra: Any = None, *how: Any, **more: Any) -> Iterator[Apart]:
    """A copy of a module, to be run while this is open: see :class:`Apart`, :func:`~.traces.untraced`."""
    with untraced(module):
        twin = Apart(module, extra, *how, **more)
        try:
            yield twin
        finally:
            twin.release()


def run_as_written(module: nn.Module) -> list[str]:
    """Let modules that ``torch.compile`` compiles run uncompiled, in place; gives their names."""
    return [name for name, part in module.named_modules() if call_as_written(part)]


def on_meta(x: torch.Tensor) -> torch.Tensor:
    """Stands for a parameter or buffer: its shape alone."""
    with raw():
        bare = torch.empty_like(x, device="meta")
    return nn.Parameter(bare, x.requires_grad) if isinstance(x, nn.Parameter) else bare


class _Tensors(TorchFunctionMode):
    """Copies the tensors that ``deepcopy`` meets: also those that are not leaves, as leaves.

    Copies share memory with what they are copies of until one of both is written to, where torch can do that;
    what shares memory goes on to.
    """

    def __init__(self) -> None:
        super().__init__()
        self._storages: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
        self.copies: list[torch.Tensor] = []

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__deepcopy__ and type(args[0]) is torch.Tensor:
            x, memo = args
            copied = self.of(x).requires_grad_(x.requires_grad)
            copied.__dict__.update(copy.deepcopy(vars(x), memo))
            return copied
        return func(*args, **(kwargs or {}))

    def held(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a parameter or buffer."""
        copied = self.of(x).requires_grad_(x.requires_grad)
        if isinstance(x, nn.Parameter):
            copied = nn.Parameter(copied.detach(), x.requires_grad)
        vars(copied).update(set_by_program(x))
        self.copies.append(copied)
        return copied

    def part(self) -> None:
        """Share no memory any more: torch cannot resize what is shared so, and ZeRO does."""
        storages, self._storages = list(self._storages.values()), {}
        while storages:
            storage, twin = storages.pop()
            del twin
            if storage.nbytes() and storage.device.type != "meta":
                torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage).data_ptr()

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """A copy of a tensor, without its history."""
        x = x.detach()
        if x.layout is not torch.strided or x.is_conj() or x.is_neg():
            return x.clone()
        storage = x.untyped_storage()
        if memory_id(storage) not in self._storages:
            whole = torch.empty(0, dtype=torch.uint8, device=x.device).set_(storage)
            twin = None
            # what is not resizable (a file's, NumPy's) has no allocator: torch crashes when it parts them
            if storage.resizable():
                with contextlib.suppress(RuntimeError):  # memory that torch has not made: shared, say
                    twin = lazy_clone(whole)
            if twin is None:
                twin = whole.clone()
            self._storages[memory_id(storage)] = storage, twin.untyped_storage()
            if x.is_meta and (values := getattr(storage, "values", None)) is not None:
                twin.untyped_storage().values = values.clone()  # type: ignore[attr-defined]
        twin_storage = self._storages[memory_id(storage)][1]
        bare = torch.empty(0, dtype=x.dtype, device=x.device)
        return bare.set_(twin_storage, x.storage_offset(), x.size(), x.stride())


class _Rebound:
    """Lets the functions among a copy's attributes (hooks, say) close over copies, too."""

    def __init__(self, memo: dict[int, Any]) -> None:
        self._memo = memo
        self._known: dict[int, tuple[Any, Any]] = {}

    def attributes(self, module: nn.Module) -> None:
        """Those of a module."""
        for name, value in vars(module).items():
            if name not in TABLES and (other := self._of(value)) is not value:
                vars(module)[name] = other

    def _of(self, x: Any) -> Any:
        if isinstance(x, types.FunctionType):
            return self._function(x)
        if isinstance(x, types.MethodType) and isinstance(x.__func__, types.FunctionType):
            func = self._function(x.__func__)
            return x if func is x.__func__ else types.MethodType(func, x.__self__)
        if type(x) is functools.partial:
            func = self._of(x.func)
            return x if func is x.func else functools.partial(func, *x.args, **x.keywords)
        if isinstance(x, dict):
            for key, value in x.items():
                if (other := self._of(value)) is not value:
                    x[key] = other
        elif type(x) is list:
            x[:] = map(self._of, x)
        return x

    def _function(self, f: types.FunctionType) -> types.FunctionType:
        if id(f) in self._known:
            return self._known[id(f)][1]
        if not (f.__closure__ or f.__defaults__ or f.__kwdefaults__):
            return f
        cells = tuple(types.CellType() for _ in f.__closure__ or ())
        twin = types.FunctionType(f.__code__, f.__globals__, f.__name__, None, cells or None)
        self._known[id(f)] = f, twin
        twin.__dict__.update(vars(f))
        twin.__module__, twin.__qualname__ = f.__module__, f.__qualname__
        twin.__defaults__ = self._copied(f.__defaults__)
        twin.__kwdefaults__ = self._copied(f.__kwdefaults__)
        for cell, original_cell in zip(cells, f.__closure__ or (), strict=True):
            try:
                cell.cell_contents = self._copied(original_cell.cell_contents)
            except ValueError:
                continue  # it is empty
        return twin

    def _copied(self, x: Any) -> Any:
        try:
            return self._of(copy.deepcopy(x, self._memo))
        except Exception:
            return x  # it is shared


def _refused(module: nn.Module, error: Exception) -> str:
    said = f"{type(module).__name__} cannot be copied"
    for name, part in module.named_modules():
        for key, value in vars(part).items():
            if key in TABLES:
                continue
            try:
                with torch.no_grad(), _Tensors():
                    copy.deepcopy(value)
            except Exception as met:
                at = f"{name}.{key}" if name else key
                return f"{said}, for its attribute {at} ({type(value).__name__}) cannot be: {met}"
    return f"{said}: {type(error).__name__}: {error}"
