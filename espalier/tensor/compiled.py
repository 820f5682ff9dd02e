"""``espalier.compile``: a region of a program on DTensors as one compiled graph.

The first call with inputs of one kind runs as ever and is recorded (see
``espalier.tensor.recording``): what it comes down to on this rank is a graph on plain local tensors, with
the collectives in it. AOTAutograd traces that graph forward and backward and hands both to
the backend. Later calls with inputs of that kind run what was compiled.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from copy import copy
from types import CellType, FunctionType
from typing import Any

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.traced import symbolic
from espalier.layout import Layout
from espalier.tensor.dtensor import DTensor, plain, stamp
from espalier.tensor.random import draw_key
from espalier.tensor.recording import Key, Place, Recorder, Refused
from espalier.tensor.strictness import is_strict
from espalier.tensor.watch import watchers
from espalier.trees import flatten, unflatten

Backend = Callable[[torch.fx.GraphModule, list[torch.Tensor]], Callable[..., Any]]

_stride = vars(torch._C.TensorBase)["stride"]
_LIMIT = 16  # kinds of inputs for which one region is compiled
_CONSTANTS = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
_INTERNAL = (vars(torch.nn.Module()).keys() | {"_compiled_call_impl"}) - {"training"}
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


def compile(  # torch's own name for it
    model: Any = None,
    *,
    fullgraph: bool = True,
    dynamic: bool | None = None,
    backend: str | Backend = "inductor",
    mode: str | None = None,
    options: dict[str, Any] | None = None,
    disable: bool = False,
) -> Any:
    """Compile a module or a function of DTensors: one graph, collectives included.

    A module is changed in place (as by ``nn.Module.compile``: names of parameters stay) and given
    back; of a function a compiled one is given. The region is recorded and compiled anew for each
    kind of inputs: layouts, shapes, dtypes, strides, what needs a gradient, arguments that are no
    tensors, attributes of the modules (``training``, ...), grad mode, autocast. Python's own effects
    (prints, lists that grow) happen when it is recorded and not again. On dry meshes, under dispatch
    modes, and while it is explained or sanitized, the region runs uncompiled.

    Args:
        model: an ``nn.Module`` or a function; without one, a decorator is given.
        fullgraph: taken for torch's sake; a region always is one graph, or an error.
        dynamic: taken for torch's sake; shapes are always static, so True is an error.
        backend: as in ``torch.compile``: a name, or ``backend(graph_module, example_inputs)``. The
            graph module works on local tensors.
        mode: as in ``torch.compile``, for inductor.
        options: as in ``torch.compile``, for inductor.
        disable: give ``model`` back as it is.

    Raises:
        ValueError: ``dynamic=True``, or options for another backend than inductor.
        RuntimeError: (when called) the region reads a tensor's value, sets or hooks tensors, or
            uses a tensor that is no argument and belongs to no module; the message names the remedy.
    """
    if model is None:

        def decorate(model: Any) -> Any:
            return compile(
                model, fullgraph=fullgraph, dynamic=dynamic, backend=backend, mode=mode, options=options,
                disable=disable,
            )  # fmt: skip

        return decorate
    if dynamic:
        raise ValueError("espalier.compile: shapes are static; leave dynamic= out.")
    if disable:
        return model
    compiler = _backend(backend, mode, options)
    if isinstance(model, torch.nn.Module):
        model._compiled_call_impl = _Region(model._call_impl, model, compiler)
        return model
    return _Region(model, model, compiler)


def _backend(backend: str | Backend, mode: str | None, options: dict[str, Any] | None) -> Backend:
    if backend == "inductor":
        return torch._TorchCompileInductorWrapper(mode, options, False)
    if mode is not None or options is not None:
        raise ValueError(f"espalier.compile: mode= and options= are inductor's; the backend is {backend!r}.")
    if callable(backend):
        return backend
    from torch._dynamo import lookup_backend

    return lookup_backend(backend)


class _Region:
    """A function with what was compiled of it, by kind of inputs."""

    def __init__(self, call: Callable[..., Any], owner: Any, backend: Backend) -> None:
        self._call, self._owner, self._backend = call, owner, backend
        self._variants: dict[Any, list[_Variant]] = {}
        self._count = 0
        self.__name__ = getattr(owner, "__name__", type(owner).__name__)
        self.__doc__ = owner.__doc__

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if symbolic() or any(watcher.inside for watcher in watchers()):
            return self._call(*args, **kwargs)
        leaves, form = flatten((args, kwargs))
        key = (_state(), *map(_kind, leaves), _repeats(leaves), form)
        for variant in self._variants.get(key, ()):
            if variant.fits():
                given = variant.inputs(leaves)
                if variant.writes and _share_memory(given):
                    break  # traced as if each had memory of its own
                return variant.run(leaves, given)
        else:
            if self._count < _LIMIT and all(map(_compilable, leaves)):
                self._count += 1
                found, out = _record(self._call, self._owner, leaves, form, self._backend)
                self._variants.setdefault(key, []).append(found)
                return out
            if self._count == _LIMIT:
                self._count += 1
                warnings.warn(_too_many(self.__name__), stacklevel=2)
        return self._call(*args, **kwargs)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else _Region(self._call.__get__(instance), instance, self._backend)


def _state() -> Any:
    """What of torch's state decides about the program beside the inputs."""
    return (
        torch.is_grad_enabled(),
        torch.is_inference_mode_enabled(),
        torch.is_autocast_enabled("cpu") and torch.get_autocast_dtype("cpu"),
        torch.is_autocast_enabled("cuda") and torch.get_autocast_dtype("cuda"),
        torch.get_default_dtype(),
        is_strict.get(),
    )


def _kind(x: Any) -> Any:
    """What of an input decides about the program: of tensors all but their values."""
    if isinstance(x, torch.Tensor):
        with raw():
            where = x._layout if type(x) is DTensor else (tuple(x.shape), x.device)
            return (where, x.dtype, x.requires_grad, _stride(x))
    if isinstance(x, _CONSTANTS):
        return (type(x), x)
    return (type(x), id(x))


def _repeats(leaves: list[Any]) -> Any:
    """Which arguments are one tensor, if any are."""
    tensors = [id(x) for x in leaves if isinstance(x, torch.Tensor)]
    return None if len(set(tensors)) == len(tensors) else tuple(map(tensors.index, tensors))


def _share_memory(given: list[torch.Tensor]) -> bool:
    return len({x.untyped_storage()._cdata for x in given}) < len(given)


def _too_many(name: str) -> str:
    return (
        f"espalier.compile: {name} was called with more than {_LIMIT} kinds of inputs; from now on a new "
        "kind runs uncompiled. Keep shapes, layouts and arguments that are no tensors from changing (pad "
        "batches, pass numbers as tensors)."
    )


def _compilable(x: Any) -> bool:
    """Dry runs count what the program does, so they run it as it is."""
    if type(x) is DTensor:
        return not x._layout.mesh.is_dry
    return not isinstance(x, torch.Tensor) or x.device.type != "meta"


class _Variant:
    """A region compiled for one kind of inputs.

    Attributes:
        writes: an input is written to in place.
    """

    def __init__(
        self,
        compiled: Callable[..., Any],
        recorder: Recorder,
        watch: list[Watch],
        outputs: list[Any],
        form: Any,
    ) -> None:
        self.writes = recorder.writes
        self._compiled, self._sources, self._watch = compiled, recorder.sources, watch
        self._outputs, self._form = outputs, form
        self._draws = any(isinstance(s, Key) for s in self._sources)
        self._places = [(*s, _kind(s.get())) for s in self._sources if type(s) is Place]

    def fits(self) -> bool:
        """Whether modules and their tensors are as they were when it was recorded."""
        try:
            return all(_same(holder[key], value) for holder, key, value in self._watch) and all(
                _kind(holder[key]) == kind for holder, key, kind in self._places
            )
        except (KeyError, IndexError, ValueError):  # deleted meanwhile
            return False

    def inputs(self, leaves: list[Any]) -> list[torch.Tensor]:
        """The local tensors that the graph takes, keys of random operations left out."""
        with raw():
            return [
                plain(leaves[s] if isinstance(s, int) else s.holder[s.key])
                for s in self._sources if not isinstance(s, Key)
            ]  # fmt: skip

    def run(self, leaves: list[Any], given: list[torch.Tensor]) -> Any:
        """The outputs for arguments of this kind."""
        if self._draws:
            rest = iter(given)
            given = [
                torch.tensor(draw_key(s.mesh, s.generator), dtype=torch.int64)
                if isinstance(s, Key)
                else next(rest)
                for s in self._sources
            ]
        made = self._compiled(*given)
        outs = []
        for what, which, layout in self._outputs:
            if what == "made":
                outs.append(made[which] if layout is None else stamp(made[which], layout))
            elif what == "source":
                source = self._sources[which]
                outs.append(leaves[source] if type(source) is int else source.get())
            else:
                outs.append(which)
        return unflatten(outs, self._form)


def _record(
    call: Callable[..., Any], owner: Any, leaves: list[Any], form: Any, backend: Backend
) -> tuple[_Variant, Any]:
    """Run the region once, and compile what it did."""
    places: dict[int, Place] = {}
    watch = list(_watched(owner, places))
    for place in places.values():
        place.get().__dict__.pop("_moved", None)  # what was moved before would not be seen to move
    recorder = Recorder(places)
    entered = list(leaves)
    first: dict[int, int] = {}
    for i, x in enumerate(leaves):
        if isinstance(x, torch.Tensor):
            at = first.setdefault(id(x), i)
            entered[i] = _fresh(x) if at == i else entered[at]
            if at == i:
                recorder.take(entered[i], i)
    args, kwargs = unflatten(entered, form)
    with recorder:
        out = call(*args, **kwargs)
    _refuse_changes(watch, owner, places)
    results, out_form = flatten(out)
    given = {node: i for i, node in enumerate(n for n in recorder.graph.nodes if n.op == "placeholder")}
    made: dict[Any, int] = {}
    outputs = [_output(x, recorder, given, made) for x in results]
    module = recorder.finish(made)
    compiled = backend(module, [_example(source, entered) for source in recorder.sources])
    for i, (what, which, _) in enumerate(outputs):
        source = recorder.sources[which] if what == "source" else None
        if type(source) is int:
            results[i] = leaves[source]
    variant = _Variant(compiled, recorder, watch, outputs, out_form)
    return variant, unflatten(results, out_form)


def _fresh(x: torch.Tensor) -> torch.Tensor:
    """The tensor again without what was remembered on it."""
    with raw():
        y = x.as_subclass(torch.Tensor) if type(x) is DTensor else x.view_as(x)
    return stamp(y, x._layout) if type(x) is DTensor else y


def _output(x: Any, recorder: Recorder, given: dict[Any, int], made: dict[Any, int]) -> Any:
    if not isinstance(x, torch.Tensor):
        if not isinstance(x, _CONSTANTS):
            raise Refused(
                f"espalier.compile: the region returns a {type(x).__name__}. Return tensors, numbers, or "
                "tuples, lists and dicts of them (or register the class with torch.utils._pytree)."
            )
        return ("constant", x, None)
    node = recorder.node(x)
    if node in given:
        return ("source", given[node], None)
    layout: Layout | None = x._layout if type(x) is DTensor else None
    return ("made", made.setdefault(node, len(made)), layout)


def _example(source: Any, entered: list[Any]) -> torch.Tensor:
    """A plain tensor of the same kind as an input, for the tracer."""
    if type(source) is Key:
        return torch.zeros((), dtype=torch.int64)
    x: torch.Tensor = source.get() if type(source) is Place else entered[source]
    with raw():
        like = torch.empty_strided(tuple(x.shape), _stride(x), dtype=x.dtype, device=x.device)
        return like.requires_grad_(x.requires_grad)


# ---- what a region hangs on beside its arguments

Watch = tuple[Any, Any, Any]  # holder, key, value


def _watched(owner: Any, places: dict[int, Place]) -> Iterator[Watch]:
    """All that the program may hang on beside its arguments; tensors go into ``places``."""
    if isinstance(owner, torch.nn.Module):
        yield from _of_module(owner, places)
    else:
        yield from _of_function(owner, places, set())


def _of_function(function: Any, places: dict[int, Place], seen: set[int]) -> Iterator[Watch]:
    function = inspect.unwrap(function)
    bound = getattr(function, "__self__", None)
    if isinstance(bound, torch.nn.Module):
        yield from _of_module(bound, places)
    function = getattr(function, "__func__", function)
    if not isinstance(function, FunctionType) or id(function) in seen:
        return
    seen.add(id(function))
    if function.__module__.split(".")[0] in ("torch", "espalier"):
        return
    kept: list[Watch] = [
        (_Cell(cell), name, cell.cell_contents)
        for name, cell in zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    ]
    names = function.__code__.co_names
    kept += [(function.__globals__, n, function.__globals__[n]) for n in names if n in function.__globals__]
    for holder, key, value in kept:
        yield from _of_value(holder, key, value, places)
        if isinstance(value, torch.nn.Module):
            yield from _of_module(value, places)
        elif isinstance(value, FunctionType):
            yield from _of_function(value, places, seen)


def _of_module(root: torch.nn.Module, places: dict[int, Place]) -> Iterator[Watch]:
    for module in root.modules():
        for holder in (module._parameters, module._buffers, module._modules, module.__dict__):
            for key, value in holder.items():
                if key not in _INTERNAL:
                    yield from _of_value(holder, key, value, places)
        for name in _HOOKS:
            yield module.__dict__, name, module.__dict__[name].copy()


def _of_value(holder: Any, key: Any, value: Any, places: dict[int, Place]) -> Iterator[Watch]:
    if isinstance(value, torch.Tensor):
        places.setdefault(id(value), Place(holder, key))
    elif isinstance(value, tuple | list | dict):
        yield holder, key, copy(value)
        for k, x in value.items() if isinstance(value, dict) else enumerate(value):
            if isinstance(x, torch.Tensor):
                places.setdefault(id(x), Place(value, k))
    else:
        yield holder, key, value


class _Cell:
    """A variable of an enclosing function, read as a mapping is."""

    def __init__(self, cell: CellType) -> None:
        self.cell = cell

    def __getitem__(self, name: str) -> Any:
        return self.cell.cell_contents


def _identity(holder: Any) -> int:
    return id(holder.cell if type(holder) is _Cell else holder)


def _same(a: Any, b: Any) -> bool:
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple | list):
        return len(a) == len(b) and all(map(_same, a, b))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[k], b[k]) for k in a)
    return isinstance(a, _CONSTANTS) and bool(a == b)


def _refuse_changes(watch: list[Watch], owner: Any, places: dict[int, Place]) -> None:
    """Raise if the region itself changed what it hangs on: compiled, it would not."""
    after: dict[int, Place] = {}
    now = {(_identity(holder), key): value for holder, key, value in _watched(owner, after)}
    before = {(_identity(holder), key): value for holder, key, value in watch}
    changed = [k for _, k in before.keys() ^ now.keys()]
    changed += [at[1] for at in before.keys() & now.keys() if not _same(before[at], now[at])]
    changed += [places.get(i, after.get(i)).key for i in places.keys() ^ after.keys()]  # type: ignore[union-attr]
    if changed:
        raise Refused(
            f"espalier.compile: the region sets {', '.join(sorted(map(str, set(changed))))} when it runs; "
            "compiled, it would not. Return the value, or write a number that changes into a buffer in place."
        )
