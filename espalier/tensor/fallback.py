"""Functions without a rule: Python composites are entered, the rest is gathered, run, and warned of."""

from __future__ import annotations

import functools
import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from functools import lru_cache
from typing import Any

import torch
from torch.autograd import Function
from torch.autograd.graph import get_gradient_edge
from torch.overrides import handle_torch_function

from espalier.comm import move
from espalier.comm.custom_ops import dividing, recorders, recording, unrecorded
from espalier.comm.redistribute import on_dry, written_on_dry
from espalier.layout import Layout, gradient_layout, same_data
from espalier.layout.layout import R
from espalier.meanwhile import setting
from espalier.mesh import Mesh
from espalier.tensor.dry_autocast import answered_for_meta, autocast_dtype
from espalier.tensor.dtensor import (
    DTensor,
    absent,
    is_sparse,
    layout_of,
    left,
    plain,
    redistribute,
    refuse_nested,
    stamp,
)
from espalier.tensor.loans import is_view, lend, loans_in
from espalier.tensor.observers import tell
from espalier.tensor.random import REJECTING, drawing_alike, drawing_by_key
from espalier.torch_private import raw, saved_tensors_hooks, version_of, with_torch_functions
from espalier.trees import leaves, tensors_in, tree_map

# a composite asks these whether to hand itself over; entered, it must go on instead
_QUESTIONS = ("has_torch_function", "has_torch_function_unary", "has_torch_function_variadic")


class GatherWarning(UserWarning):
    """An operation has no rule: its inputs were gathered, and every rank computed all of it."""


def enter_or_gather(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh
) -> Any:
    """Carry out a call that no rule speaks for.

    Raises:
        NotImplementedError: it writes in place something that cannot be written back.
    """
    if kwargs.get("out") is not None:
        return _into(func, args, dict(kwargs))
    if getattr(func, "__name__", "") in _TURNING and type(args[0]) is DTensor:
        return _turn(func, args, kwargs)
    inner = _entrance(func) if function_of(func) is None else None
    name = getattr(function_of(func) or func, "__name__", "")
    if name in _REJECTING and not recording():
        with drawing_by_key(mesh, kwargs.get("generator")):
            return _gather(func, args, {k: x for k, x in kwargs.items() if k != "generator"}, mesh)
    with drawing_alike(mesh) if name in _DRAWING or name in _REJECTING else nullcontext():
        return _gather(func, args, kwargs, mesh) if inner is None else inner(*args, **kwargs)


def answering(args: Any, kwargs: Any) -> Any:
    """Among a call's arguments one that is no tensor, and answers torch's calls by itself.

    Such as what a pipeline has yet to compute: ``target.eq(output)``. Of what torch asks first, the others
    would never be asked.
    """
    return next(filter(answers_itself, leaves((args, kwargs))), None)


def answers_itself(x: Any) -> bool:
    """Whether it says what functions of torch do with it, as tensors may, and is none."""
    return not isinstance(x, torch.Tensor) and hasattr(type(x), "__torch_function__")


StandsFor = dict[tuple[torch.autograd.graph.Node, int], DTensor]
_standing: ContextVar[StandsFor | None] = ContextVar("standing", default=None)

# what draws plain numbers, each rank its own
_DRAWING = frozenset(
    """
    fractional_max_pool2d fractional_max_pool3d fractional_max_pool2d_with_indices
    fractional_max_pool3d_with_indices svd_lowrank pca_lowrank lobpcg
    """.split()
)
_REJECTING = REJECTING | {"_Dirichlet"}


def function_of(func: Callable[..., Any]) -> type[Function] | None:
    """The autograd function of which ``func`` is the ``apply``, if it is one's."""
    owner = getattr(func, "__self__", None)
    return owner if isinstance(owner, type) and issubclass(owner, Function) else None


@lru_cache(maxsize=1024)
def _entrance(func: Callable[..., Any]) -> Callable[..., Any] | None:
    """The body of a Python composite of torch, which no longer asks for overrides of itself."""
    code = getattr(func, "__code__", None)
    module = getattr(func, "__module__", "") or ""
    if code is None or not module.startswith("torch"):
        return None
    wrapped = hasattr(func, "__wrapped__")
    while hasattr(func, "__wrapped__"):
        func = func.__wrapped__
    if not isinstance(func, types.FunctionType):
        return None
    if not wrapped and not set(_QUESTIONS) & set(func.__code__.co_names):
        return None
    names = {**func.__globals__, **dict.fromkeys(_QUESTIONS, _no)}
    if names.get("torch") is torch and "overrides" in func.__code__.co_names:
        names["torch"] = _Unasking(torch)
    if names.get("overrides") is torch.overrides:  # as in torch itself: torch._assert
        names["overrides"] = _Unasking(torch.overrides)
    body = types.FunctionType(func.__code__, names, func.__name__, func.__defaults__, func.__closure__)
    body.__kwdefaults__ = func.__kwdefaults__
    return body


def _no(*args: Any) -> bool:
    return False


class _Unasking:
    """A module in which ``overrides`` says of everything that it has no override."""

    def __init__(self, module: types.ModuleType) -> None:
        self._module = module

    def __getattr__(self, name: str) -> Any:
        if name in _QUESTIONS:
            return _no
        value = getattr(self._module, name)
        return _Unasking(value) if value is torch.overrides else value


def _into(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """``out=``: the call without it, written to the given tensors, which keep their layouts."""
    out = kwargs.pop("out")
    targets = (out,) if isinstance(out, torch.Tensor) else tuple(out)
    result = func(*args, **kwargs)
    values = (result,) if isinstance(result, torch.Tensor) else tuple(result)
    pairs = list(zip(targets, values, strict=True))
    if any(t.dtype != v.dtype or t.shape != v.shape or v.requires_grad for t, v in pairs):
        error = torch_error(func, args, {**kwargs, "out": out})
        if error is not None:
            raise error
    with torch.no_grad():
        for target, value in pairs:
            if target.shape != value.shape:
                _resize(target, value)
            target.copy_(value)
    if isinstance(out, torch.Tensor):
        return out
    kind = getattr(torch.return_types, type(result).__name__ + "_out", None)
    return kind(targets) if kind is not None else out


def _resize(target: torch.Tensor, value: torch.Tensor) -> None:
    """Give what is to be written to the shape of the value; it stays sharded where it can."""
    if type(target) is not DTensor:
        target.resize_(value.shape)
        return
    layout = target._layout
    dims = [s if not isinstance(s, int) or s < value.ndim else R for s in layout.axes]
    cuts = tuple(tuple(a for a, s in enumerate(dims) if s == d) for d in range(value.ndim))
    lay = Layout.of(layout.mesh, tuple(dims), cuts, tuple(value.shape))
    with raw():
        target.resize_(lay.local_shape)
    target._layout = lay


def asks_in_place(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a call says ``inplace=True``: entered, its function calls the one with the underscore."""
    if kwargs.get("inplace") is True:
        return True
    at = _place_of_inplace(func) if any(a is True for a in args) else None
    return at is not None and at < len(args) and args[at] is True


@lru_cache(maxsize=1024)
def _place_of_inplace(func: Callable[..., Any]) -> int | None:
    code = getattr(func, "__code__", None)
    names = code.co_varnames[: code.co_argcount] if code is not None else ()
    return names.index("inplace") if "inplace" in names else None


def torch_error(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What torch raises for tensors of these shapes; None if it takes them, or if that is not known.

    Asked on the meta device, where nothing is computed; its words for what it does not take may be others
    than a real device's, which is then asked too.
    """
    error = _error_on("meta", func, args, kwargs)
    if error is None and kwargs.get("out") is not None:
        error = _error_on("cpu", func, args, kwargs)  # meta takes an out of any dtype
        return error if any(word in str(error) for word in ("dtype", "scalar type", "tensor out")) else None
    if error is None or isinstance(error, NotImplementedError) or "meta" in str(error).lower():
        return None
    return _error_on("cpu", func, args, kwargs)


def rejected(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Exception | None:
    """What torch says of arguments that no values can make right."""
    try:
        asked = func, whole_key_of(args), whole_key_of(kwargs)
        if asked in _taken:
            return None
    except TypeError:
        asked = None  # with something that has no hash
    with torch.no_grad():
        error = _error_on("meta", func, args, kwargs)
        if error is not None:
            error = _error_on("cpu", func, args, kwargs, fill=1)
            return None if isinstance(error, torch.linalg.LinAlgError) else error  # those are of values
    if asked is not None:
        if len(_taken) >= _TAKEN_LIMIT:
            _taken.clear()
        _taken.add(asked)
    return None


def whole_key_of(a: Any) -> Any:
    """What stands for an argument of one process: all of it, but of tensors only their shapes and dtypes.

    Raises:
        TypeError: (when hashed) some part has no hash.
    """
    if isinstance(a, torch.Tensor):
        return (torch.Tensor, tuple(a.shape), a.dtype)
    if isinstance(a, dict):
        return (dict, *[(k, whole_key_of(v)) for k, v in a.items()])
    if isinstance(a, tuple | list):
        return (type(a), *[whole_key_of(x) for x in a])
    if isinstance(a, slice):
        return (slice, *map(whole_key_of, (a.start, a.stop, a.step)))
    return (type(a), a)


# calls that torch takes: the same ones come again in other layouts
_taken: set[Any] = set()
_TAKEN_LIMIT = 10_000


def _error_on(
    device: str, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], fill: int = 0
) -> Exception | None:
    def describe(x: Any) -> Any:
        if isinstance(x, torch.Tensor):
            needs_grad = x.requires_grad and torch.is_grad_enabled()
            is_made = needs_grad and not x.is_leaf  # it may be written to
            return functools.partial(_blank, tuple(x.shape), x.dtype, device, fill, needs_grad, is_made)
        return torch.device(device) if isinstance(x, torch.device) else x

    def make(x: Any) -> Any:
        return x() if type(x) is functools.partial and x.func is _blank else x

    described = tree_map(describe, (args, kwargs))
    lows = (autocast_dtype(x.device.type) for x in tensors_in((args, kwargs)))
    low = next((dtype for dtype in lows if dtype is not None), None)
    casts = nullcontext() if device == "meta" or low is None else torch.autocast(device, low)
    with uncounted(), casts:
        args, kwargs = tree_map(make, described)
        try:
            # device="cpu" may be among the arguments, and then random functions draw
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                func(*args, **kwargs)
        except Exception as error:
            return error
        return None


def _blank(
    shape: tuple[int, ...], dtype: torch.dtype, device: str, fill: int, grad: bool, is_made: bool
) -> torch.Tensor:
    if device == "meta" or math.prod(shape) < 1 << 16:
        like = torch.full(shape, fill, dtype=dtype, device=device)
    else:  # expanded from one element: it cannot be written to
        like = torch.full((), fill, dtype=dtype, device=device).expand(shape)
    like = like.requires_grad_() if grad else like
    return like.clone() if is_made and like.is_contiguous() else like


@contextmanager
def uncounted() -> Iterator[None]:
    """While open, what others count (operations, memory, saved tensors), or record, is not counted."""
    hooked = saved_tensors_hooks(True) is not None
    with (
        unrecorded(),
        torch.autograd.graph.saved_tensors_hooks(_same, _same) if hooked else nullcontext(),
    ):
        yield


def _same(x: torch.Tensor) -> torch.Tensor:
    return x


def _gather(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], mesh: Mesh) -> Any:
    custom = function_of(func)
    name = getattr(func, "__name__", getattr(func, "name", str(func)))  # the second of TorchScript
    layouts: list[Layout] = []
    target = args[0] if args and writes(func) else None
    gathered: list[tuple[DTensor, torch.Tensor, int]] = []
    stands_for: StandsFor = {}

    def whole(x: Any) -> Any:
        value = gather(x)
        if custom is not None and type(x) is DTensor:
            _note(stands_for, value, x)
        return value

    def gather(x: Any) -> Any:
        if type(x) is not DTensor:
            return on_dry(x, mesh) if mesh.is_dry and isinstance(x, torch.Tensor) else x
        layout = x._layout
        layouts.append(layout)
        full = Layout.replicated(mesh, layout.shape)
        moved = move(x, layout, full)
        if same_data(layout, full):  # not whether it moved: of a deferred value that hangs on the rank
            return x if x is target else left(moved)
        value = left(moved)
        if name == "as_strided":  # it sees the memory
            value = _in_order(value, layout.whole_stride(x.stride()))
        value = value.clone() if x is target else value
        gathered.append((x, value, version_of(value)))
        return value

    with raw():
        local_args, local_kwargs = tree_map(whole, args), tree_map(whole, kwargs)
        if isinstance(target, torch.Tensor) and type(target) is not DTensor and not mesh.is_member:
            raise absent(layouts[0])
        if any(not lay.is_plain for lay in layouts):
            if name in _RESHAPING and type(target) is DTensor and not _is_plain(target):
                raise NotImplementedError(
                    f"{name} of a DTensor that is not replicated ({target._layout!r}): it would change the "
                    "shape or the memory of what each rank holds, and the rest of the layout with it. "
                    "Redistribute to Replicate first, or call the function without the underscore."
                )
            if custom is None:
                sparse = any(map(is_sparse, tensors_in((args, kwargs))))
                of_sum = type(target) is DTensor and bool(target._layout.partial)
                _warn(f"{name} of sparse tensors" if sparse else name, tuple(layouts), of_sum)
            else:
                _warn_of(custom.__name__, custom.__module__, _collective_in(custom))
        call = func if custom is None else on_wholes(custom, stands_for)
        try:
            out = call(*local_args, **local_kwargs)
        except NotImplementedError as error:  # its shape hangs on values, which are on other ranks
            raise error if mesh.is_member else absent(layouts[0]) from error
        if mesh.is_dry and isinstance(target, torch.Tensor) and type(target) is not DTensor:
            written_on_dry(target, local_args[0])
        averages = _averages(name, args, kwargs)
        for x, value, before in gathered:
            if version_of(value) != before or x is target or any(x is a for a in averages):
                x.copy_(move(value, Layout.replicated(mesh, tuple(value.shape)), x._layout))
        if type(target) is DTensor:
            shape = tuple(plain(target).shape)
            if shape != target._layout.local_shape:
                target._layout = Layout.replicated(mesh, shape)
            return target
    out = tree_map(lambda x: _stamp_whole(x, mesh), out)
    if custom is not None:
        return tree_map(lambda x: cut_again(x, layouts), out)
    return lend(out, func, args, kwargs) if is_view(func, args) else out


def _in_order(x: torch.Tensor, stride: tuple[int, ...]) -> torch.Tensor:
    """``x`` with its dims in memory as of a tensor with such strides."""
    order = sorted(range(x.ndim), key=lambda d: (-stride[d], d))
    return x.permute(order).contiguous().permute([order.index(d) for d in range(x.ndim)])


def _is_plain(x: DTensor) -> bool:
    return x._layout.own is Layout.replicated(x._layout.mesh, x._layout.shape)


def _averages(name: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """What a normalisation writes to and does not say so."""
    if "batch_norm" not in name and "instance_norm" not in name:
        return ()
    return (*args[3:5], kwargs.get("running_mean"), kwargs.get("running_var"))


def _turn(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """What turns a tensor into a view of itself: as the call that gives the view does."""
    x = args[0]
    with torch.no_grad():
        view = getattr(torch.Tensor, func.__name__[:-1])(*args, **kwargs)
    if loans_in([view]):
        raise NotImplementedError(
            f"{func.__name__} of a DTensor that lies as {x._layout!r}: its data would have to move, away "
            f"from the views of it that there may be. Call {func.__name__[:-1]}, or redistribute first."
        )
    with raw():
        x.as_strided_(view.size(), view.stride(), view.storage_offset())
    x._layout = view._layout
    return x


_TURNING = frozenset("t_ transpose_ swapaxes_ swapdims_ squeeze_ unsqueeze_".split())
# what changes the shape of its first argument, or the memory behind it, in place
_RESHAPING = frozenset("resize_ resize_as_ set_ as_strided_".split())


def _stamp_whole(x: Any, mesh: Mesh) -> Any:
    if isinstance(x, torch.Tensor) and type(x) is not DTensor:
        refuse_nested(x)
        if x.layout is torch.strided:  # what is sparse stays plain: a DTensor's data is strided
            return stamp(x, layout_of(x, mesh))
    return x


def cut_again(x: Any, layouts: Sequence[Layout]) -> Any:
    """What a user's own function made, cut where an input of its shape was, for what comes after it.

    A batch that was gathered would stay so to the end of the model, and every rank would compute all of it.
    """
    like = next((lay for lay in layouts if type(x) is DTensor and lay.shape == x._layout.shape), None)
    if like is None:
        return x
    axes = tuple(s if isinstance(s, int) else R for s in like.axes)
    return redistribute(x, Layout.of(like.mesh, axes, like.cuts, like.shape))


def writes(func: Callable[..., Any]) -> bool:
    """Whether a function's name says that it writes to its first argument."""
    name = getattr(func, "__name__", "")
    return (
        (name.endswith("_") and not name.endswith("__"))
        or name in ("__setitem__", "__set__")
        or (
            name.startswith("__i")
            and name.endswith("__")
            and name not in ("__invert__", "__index__", "__int__")
        )
    )


def _collective_in(custom: type[Function]) -> str:
    """What a custom function sums or gathers over ranks by, if its forward says so."""
    names = getattr(getattr(custom.forward, "__code__", None), "co_names", ())
    return next((x for x in names if x.startswith(("all_gather", "all_reduce", "reduce_scatter"))), "")


@lru_cache(maxsize=4096)
def _warn_of(name: str, module: str, collective: str) -> None:
    # cached: once for each function
    if collective:
        tell(
            f"The autograd function {name} calls {collective} itself, and what it is given here is of all "
            "ranks already, of the whole batch: that is gathered, or added up, once for each rank. So are "
            f"its gradients. Leave {name} out within the model, and what divides by the number of ranks; or "
            "call it on what the model gives, in a loop where ranks have rows of their own."
        )
        return
    tell(
        f"The autograd function {name} has no rule, so its inputs are gathered and every rank computes all "
        "of it, forward and backward. The result is right, but slow. If it works element by element, "
        f"espalier.register_rule({name})(espalier.elementwise) makes it fast; if each row (all but the last "
        "dim of its first tensor) is worked on by itself, espalier.rowwise does; for other functions see "
        "espalier.register_rule and espalier.local_map.",
        GatherWarning,
    )


@lru_cache(maxsize=4096)
def _warn(name: str, layouts_held: tuple[Layout, ...], writes_to_sum: bool) -> None:
    # cached: once for each operation and layouts
    layouts = ", ".join(map(repr, layouts_held))
    why, instead = "", "espalier.register_rule can teach it."
    if writes_to_sum:
        why = " for what it writes to, a sum of which each rank has an addend"
        instead = "write to a new tensor: inplace=False, the function without the underscore."
    tell(
        f"{name} has no sharding rule{why}, so its inputs ({layouts}) are gathered and every rank computes "
        f"all of it. The result is right, but slow; {instead}",
        GatherWarning,
    )


# ---- ``torch.autograd.Function`` on DTensors
#
# A custom function computes on plain data, typed at its edges:
#
# * one that has a rule (``register_rule(MyFunction)``) goes the way of every ruled call: its ``forward``
#   and ``backward`` see local tensors, in the layouts that the rule allows;
# * one that has none gets whole tensors, as any function without a rule does (see :func:`on_wholes`);
# * the identity on which a module's full backward hooks hang: the hooks see DTensors;
# * reentrant checkpointing: what it runs, and runs again, gets its inputs with their layouts.


Apply = Callable[..., Any]


def layouts_of(values: Sequence[Any]) -> list[Layout | None]:
    """The layout of each DTensor, None for all else."""
    return [x._layout.own if type(x) is DTensor else None for x in values]


def stamped(values: Sequence[Any], layouts: Sequence[Layout | None]) -> list[Any]:
    """Aliases of local tensors as DTensors, where there is a layout for them."""
    return [
        x if lay is None or x is None or type(x) is DTensor else stamp(x.view_as(x), lay)
        for x, lay in zip(values, layouts, strict=True)
    ]


def run_on_locals(original: Apply, cls: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
    """The function on local tensors: the call that the dispatcher makes.

    Raises:
        RuntimeError: it wrote to an input, which its rule cannot say.
    """
    locals_ = [left(a) if isinstance(a, torch.Tensor) else a for a in args]
    before = _versions(args)
    if recorders():
        out = handle_torch_function(cls.apply, (), *locals_, **kwargs)
    else:
        out = original(cls, *locals_, **kwargs)
    if _versions(args) != before:
        raise RuntimeError(
            f"{cls.__name__}.apply has written to a DTensor it was given. An autograd function with a rule "
            "must return new tensors; write to a clone inside it."
        )
    return out


def _versions(args: Sequence[Any]) -> list[int]:
    return [version_of(a) for a in args if isinstance(a, torch.Tensor)]


def on_wholes(cls: type[Function], stands_for: StandsFor | None = None) -> Apply:
    """``cls.apply`` for plain tensors that every rank holds whole, whatever the function meets inside.

    Its code may use more tensors than it is given: the parameters of a module, what a closure holds. So where
    DTensors come into it torch functions are intercepted, as anywhere; and what goes out of ``forward`` and
    ``backward``, or is saved between them, is whole and plain again. A backward that asks for gradients with
    respect to what it was given, as adjoint methods do, means the DTensors for which that stands.
    """
    twin = cls.__dict__.get("_twin")
    if twin is None:
        names: dict[str, Any] = {"__module__": cls.__module__, "__qualname__": cls.__qualname__}
        names["espalier"] = True  # what it is given is as it should be
        saving = "setup_context" if cls.setup_context is not Function.setup_context else "forward"
        for name in ("forward", "setup_context", "backward", "vjp", "jvp"):
            if getattr(cls, name) is not getattr(Function, name):
                names[name] = staticmethod(_enclosed(getattr(cls, name), name == saving))
        metaclass: Any = type(cls)
        twin = cls._twin = metaclass(cls.__name__, (cls,), names)  # type: ignore[attr-defined]
    apply: Apply = twin.apply
    if not stands_for:
        return apply

    def applied(*args: Any, **kwargs: Any) -> Any:
        with standing(stands_for):
            return apply(*args, **kwargs)

    return applied


def _enclosed(method: Callable[..., Any], saves: bool) -> Callable[..., Any]:
    goes_back = method.__name__ in ("backward", "vjp")

    @functools.wraps(method)
    def enclosed(*args: Any, **kwargs: Any) -> Any:
        within = standing(args[0].stands_for) if goes_back else nullcontext()
        with with_torch_functions(), within, answered_for_meta(args):
            out = method(*args, **kwargs)
        if saves:
            args[0].stands_for = stands_for = dict(_standing.get() or {})
            if any(type(x) is DTensor for x in args[0].to_save or ()):
                args[0].to_save = tuple(_whole(x, stands_for) for x in args[0].to_save)
        return tuple(map(_whole, out)) if type(out) is tuple else _whole(out)

    return enclosed


def _whole(x: Any, stands_for: StandsFor | None = None) -> Any:
    if type(x) is not DTensor:
        return x
    with raw(), nullcontext() if stands_for is None else torch.enable_grad():
        layout = layout_of(x)
        value = plain(move(x, layout, Layout.replicated(layout.mesh, layout.shape)))
    if stands_for is not None:
        _note(stands_for, value, x)
    return value


def _note(stands_for: StandsFor, value: torch.Tensor, x: DTensor) -> None:
    """Note for what a whole value stands; of a stand-in that is what it stands in for."""
    if value.requires_grad and torch.is_grad_enabled():
        stands_for[get_gradient_edge(value)[:2]] = x.__dict__.get("_of", x)


def standing(stands_for: StandsFor) -> AbstractContextManager[None]:
    """While open, plain whole values that autograd knows by these edges stand for DTensors."""
    return setting(_standing, stands_for)


def stood_for(x: Any) -> Any:
    """The DTensor for which a plain whole value stands in a custom function, or ``x``."""
    known = _standing.get()
    if not known or type(x) is DTensor or not isinstance(x, torch.Tensor) or not x.requires_grad:
        return x
    return known.get(get_gradient_edge(x)[:2], x)


def carried(original: Apply, cls: Any, args: Sequence[Any]) -> Any:
    """A function that gives back what it gets, typed as before."""
    outs = original(cls, *map(plain, args))
    return tuple(x if lay is None else stamp(x, lay) for x, lay in zip(outs, layouts_of(args), strict=True))


def typed_recomputation(generator: Callable[..., Any]) -> Callable[..., Any]:
    """torch's non-reentrant checkpointing, whose inputs come back with their layouts.

    Hooks on saved tensors (of a checkpoint around this one, of offloading) give back plain ones. Who divides
    a model is told what is computed so.
    """
    signature = inspect.signature(generator)
    kinds = [p.kind for p in signature.parameters.values()]
    several = inspect.Parameter.VAR_POSITIONAL
    # behind the function and options, or all of them in one
    inputs = slice(kinds.index(several) - 1, None) if several in kinds else 0

    @functools.wraps(generator)
    def wrapped(run: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        if (divider := dividing()) is not None:
            return _divided(divider, signature.bind(run, *args, **kwargs).arguments.get("context_fn"))
        layouts = layouts_of(args[inputs])
        if not any(layouts):
            return generator(run, *args, **kwargs)
        return generator(lambda *xs, **named: run(*stamped(xs, layouts), **named), *args, **kwargs)

    return wrapped


def _divided(divider: Any, contexts: Callable[[], Any] | None) -> Iterator[None]:
    with divider.again(contexts):
        yield


def checkpointed(original: Apply, cls: Any, run: Callable[..., Any], preserve: Any, *args: Any) -> Any:
    """Reentrant checkpointing: autograd sees local tensors, ``run`` sees DTensors, both times.

    Gradients need no types of their own here: what autograd hands to the outputs and takes from the
    inputs lies in their gradient layouts, within the recomputation as without.
    """
    layouts = layouts_of(args)
    for layout in filter(None, layouts):
        layout.mesh.nests += 1
    left: list[Layout | None] = []

    def local(*inputs: Any) -> Any:
        out = run(*stamped(inputs, layouts))
        alone = not isinstance(out, tuple | list)
        outs = (out,) if alone else out
        left[:] = layouts_of(outs)
        with raw():
            locals_out = tuple(plain(x) if isinstance(x, torch.Tensor) else x for x in outs)
        return locals_out[0] if alone else locals_out

    with raw():
        inputs = [plain(a) if isinstance(a, torch.Tensor) else a for a in args]
    out = original(cls, local, preserve, *inputs)
    if not isinstance(out, tuple):
        return out if left[0] is None else stamp(out, left[0])
    return tuple(x if lay is None else stamp(x, lay) for x, lay in zip(out, left, strict=True))


class TypedNode:
    """A node of autograd's graph whose hooks see and return DTensors; of an identity, in these layouts."""

    def __init__(self, node: torch.autograd.graph.Node, layouts: Sequence[Layout | None]) -> None:
        self._node = node
        self._layouts = [None if lay is None else gradient_layout(lay) for lay in layouts]

    def register_hook(self, hook: Callable[[Any, Any], Any]) -> Any:
        """As the node's own."""

        def typed(inputs: Any, outputs: Any) -> Any:
            gradients = hook(tuple(stamped(inputs, self._layouts)), tuple(stamped(outputs, self._layouts)))
            return None if gradients is None else tuple(map(self._local, gradients, self._layouts))

        return self._node.register_hook(typed)

    @staticmethod
    def _local(grad: Any, layout: Layout | None) -> Any:
        if grad is None or layout is None:
            return grad
        with raw():
            return plain(move(grad, layout_of(grad, layout.mesh), layout))


def typed_hooks(apply_on_tensors: Callable[..., Any]) -> Callable[..., Any]:
    """torch's ``BackwardHook._apply_on_tensors``, whose hooks see DTensors where the module had them."""

    def wrapped(self: Any, fn: Callable[[Any], Any], args: Any) -> Any:
        layouts = layouts_of([a for a in args if isinstance(a, torch.Tensor)])
        if not any(layouts):
            return apply_on_tensors(self, fn, args)
        return apply_on_tensors(self, lambda node: fn(TypedNode(node, layouts)), args)

    return wrapped
