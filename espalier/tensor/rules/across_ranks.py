"""Collectives of torch.distributed that a program, or a library that it uses, calls by itself on DTensors.

A DTensor stands for one value that all ranks have, so that value is what these send and receive: whole,
whatever part of it lies here.
"""

from __future__ import annotations

import functools
import inspect
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FunctionType
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.nn.functional as dist_functions
from torch.autograd import Function
from torch.overrides import TorchFunctionMode, handle_torch_function, has_torch_function

from espalier.meanwhile import having
from espalier.sharding.spec import special
from espalier.tensor.dtensor import DTensor, layout_of, stamp
from espalier.tensor.fallback import function_of
from espalier.tensor.names import is_known, names_in
from espalier.tensor.observers import tell
from espalier.trees import leaves, tensors_in, tree_map

# those whose results are the same on all ranks, and which argument gets them; of a reduction all may have it
_WRITTEN = {
    "all_reduce": "tensor",
    "all_reduce_coalesced": "tensors",
    "reduce": "tensor",
    "broadcast": "tensor",
    "all_gather": "tensor_list",
    "all_gather_coalesced": "output_tensor_lists",
    "all_gather_single": "output_tensor",
    "all_gather_into_tensor": "output_tensor",
}
# of others DTensors may be what is sent, if all ranks call them, and not what is received
_OTHERS = {
    "gather": "gather_list",
    "gather_single": "gather_tensor",
    "gather_into_tensor": "gather_tensor",
    "scatter": "tensor",
    "reduce_scatter": "output",
    "reduce_scatter_single": "output",
    "reduce_scatter_tensor": "output",
    "all_to_all": "output_tensor_list",
    "all_to_all_single": "output",
}
_OF_TWO = ("send", "isend", "recv", "irecv")
# before torch 2.13; not isend and irecv, which torch compares with what it knows by these names
_UNASKING = (
    "all_gather_coalesced all_reduce_coalesced all_to_all broadcast gather recv reduce reduce_scatter "
    "scatter send"
).split()
_ALIKE = (dist.ReduceOp.AVG, dist.ReduceOp.MAX, dist.ReduceOp.MIN, dist.ReduceOp.BAND, dist.ReduceOp.BOR)


def _asking(func: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, which asks who answers for what it is given."""

    @functools.wraps(func)
    def call(*args: Any, **kwargs: Any) -> Any:
        given = leaves([list(args), kwargs])
        if has_torch_function(given):
            return handle_torch_function(call, given, *args, **kwargs)
        return func(*args, **kwargs)

    return call


def _have_them_ask() -> None:
    """Let collectives that ask nobody ask, as all do from torch 2.13 on: they would send this rank's part."""
    for name in _UNASKING:
        function = getattr(dist, name, None)
        if function is not None and "has_torch_function" not in inspect.unwrap(function).__code__.co_names:
            setattr(dist, name, _asking(function))


def _known() -> Iterator[Callable[..., Any]]:
    _have_them_ask()
    for name in (*_WRITTEN, *_OTHERS, *_OF_TWO):
        function = getattr(dist, name, None)  # some versions of torch lack some
        if function is not None:
            yield function


COLLECTIVES = frozenset(_known())
_KNOWN_OUTCOMES = frozenset(
    func for func in COLLECTIVES if func.__name__ in _WRITTEN and "coalesced" not in func.__name__
)
# torch.distributed.nn.functional's
_WITH_GRADIENTS = frozenset(
    kind
    for kind in vars(dist_functions).values()
    if isinstance(kind, type) and issubclass(kind, Function) and kind is not Function
)


@special(*COLLECTIVES)
def of_whole_values(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The call on the whole values, which are written back where it is to write.

    Raises:
        NotImplementedError: it would give each rank another value, or only two ranks make it.
    """
    name = func.__name__
    given, target = bound(func, args, kwargs)
    written = [x for x in tensors_in(target) if type(x) is DTensor]
    _refuse(name, given, written)
    if func in _KNOWN_OUTCOMES and any(_is_of_some(x) for x in tensors_in(given)):
        return as_if_all_had_it(func, *args, **kwargs)
    warn(name, given)
    wholes: dict[int, torch.Tensor] = {}

    def whole(x: Any) -> Any:
        if type(x) is not DTensor:
            return x
        value = wholes.get(id(x))
        if value is None:
            value = wholes[id(x)] = x.full_tensor().contiguous()
        return value

    with torch.no_grad():
        given = {key: tree_map(whole, value) for key, value in given.items()}
    if name == "reduce":
        given.pop("dst", None)
        given.pop("group_dst", None)
        func = dist.all_reduce
    work = func(**given)
    if written and work is not None:
        work.wait()
    with torch.no_grad():
        for x in written:
            value = wholes[id(x)]
            x.copy_(stamp(value, layout_of(value, x.device_mesh)))
    return work


class AllHaveIt(TorchFunctionMode):
    """While open, collectives give what they would if all ranks called them with what this one has.

    So they do within a stage of a pipeline: what a model computes there is one value of all ranks, and those
    of other stages do not come to the call.
    """

    answers = True

    def __torch_function__(
        self, func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        call = partial(as_if_all_had_it, func) if meets_ranks(func) else func
        if call is func and (function := function_of(func)) is not None and meets_in_backward(function):
            call = _going_back(function).apply
        return call(*args, **(kwargs or {}))

    def __enter__(self) -> Any:
        self._passed = barriers_passed(), collectives_known()
        for passed in self._passed:
            passed.__enter__()
        return super().__enter__()

    def __exit__(self, *raised: Any) -> None:
        super().__exit__(*raised)
        for passed in reversed(self._passed):
            passed.__exit__(*raised)


@contextmanager
def barriers_passed(seen: Callable[[], Any] = lambda: None) -> Iterator[None]:
    """While open, nobody waits at barriers of torch.distributed; ``seen`` is told of each."""

    def passed(*args: Any, async_op: bool = False, **kwargs: Any) -> Ended | None:
        seen()
        return Ended() if async_op else None

    barriers = dict.fromkeys(("barrier", "monitored_barrier"), passed)
    with having(dist, **barriers), having(dist.distributed_c10d, **barriers):
        yield


@contextmanager
def collectives_known(seen: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """While open, collectives that a program calls where no mode sees them give what :class:`AllHaveIt` says.

    So do those in an autograd function.

    Args:
        seen: is told of each, and says whether they do.
    """

    def known(func: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(func)
        def call(*args: Any, **kwargs: Any) -> Any:
            of = sys._getframe(1).f_globals.get("__name__") or ""
            is_own = of.partition(".")[0] == "espalier"
            return func(*args, **kwargs) if is_own or not seen() else as_if_all_had_it(func, *args, **kwargs)

        return call

    # where torch itself finds them by name, modes are told of the functions
    with having(dist, **{func.__name__: known(func) for func in COLLECTIVES}):
        yield


def meets_ranks(func: Any) -> bool:
    """Whether a call of it sends tensors to other ranks."""
    if func in COLLECTIVES:
        return True
    function = function_of(func)  # or what on_wholes makes of one
    return function is not None and not _WITH_GRADIENTS.isdisjoint(function.__mro__)


_NAMES = frozenset(func.__name__ for func in COLLECTIVES)
_MOST = 100  # functions that are looked at


@functools.lru_cache(maxsize=256)
def meets_in_backward(function: Any) -> bool:
    """Whether the backward of an autograd function may call collectives, by the names in its code."""
    waiting, seen = [function.backward], set[Any]()
    while waiting and len(seen) < _MOST:
        f = inspect.unwrap(waiting.pop())
        if isinstance(f, FunctionType) and f not in seen and not is_known(f):
            seen.add(f)
            names = {*names_in(f.__code__)}
            if names & _NAMES:
                return True
            waiting += [x for name in names if callable(x := f.__globals__.get(name))]
    return False


@functools.lru_cache(maxsize=256)
def _going_back(function: Any) -> Any:
    """The same function, whose collectives give in the backward pass, too, what :class:`AllHaveIt` says."""

    def backward(ctx: Any, *grads: Any) -> Any:
        with collectives_known():
            return function.backward(ctx, *grads)

    return type(function.__name__, (function,), {"backward": staticmethod(backward)})


def _all_reduced(op: Any, group: Any, x: torch.Tensor) -> torch.Tensor:
    if op == dist.ReduceOp.SUM:
        return x * dist.get_world_size(group)
    if op not in _ALIKE:
        raise NotImplementedError(f"torch.distributed.nn.all_reduce by {op} in a pipeline")
    return x.clone()


def _all_gathered(group: Any, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
    return tuple(x.clone() for _ in range(dist.get_world_size(group)))


# of torch.distributed.nn.functional's, those that give all ranks the same, with the same gradients
_DIFFERENTIABLE: dict[str, tuple[str, Callable[..., Any]]] = {
    "_AllReduce": ("all_reduce", _all_reduced),
    "_AllGather": ("all_gather", _all_gathered),
}


def as_if_all_had_it(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A collective's outcome where all ranks of its group call it with what this one has.

    Raises:
        NotImplementedError: it gives each rank another value, or has gradients of its own.
    """
    name = getattr(getattr(func, "__self__", None), "__name__", func.__name__)  # an autograd function's
    if name in _DIFFERENTIABLE:
        name, outcome = _DIFFERENTIABLE[name]
        *op, group, _ = args
        warn(name, {"group": group, **dict(zip(("op",), op, strict=False))})
        return outcome(*args)
    if func not in _KNOWN_OUTCOMES:
        raise NotImplementedError(
            f"torch.distributed.{name} in the forward of a model in a pipeline: ranks of other "
            "stages do not come to it. What the model computes is of the whole batch already: leave the call "
            "out, or make it outside, with the model's output."
        )
    name = func.__name__
    given, target = bound(func, args, kwargs)
    warn(name, given)
    n, op = dist.get_world_size(given.get("group")), given.get("op", dist.ReduceOp.SUM)
    with torch.no_grad():
        if "reduce" in name and op == dist.ReduceOp.SUM:
            target.mul_(n)
        elif "reduce" in name and op not in _ALIKE:
            raise NotImplementedError(
                f"torch.distributed.{name} by {op} in the forward of a model in a pipeline"
            )
        elif name == "all_gather":
            for x in target:
                x.copy_(given["tensor"])
        elif "gather" in name:
            target.view(n, -1).copy_(given["input_tensor"].reshape(1, -1))
    return Ended() if given.get("async_op") else None


class Ended:
    """What is under way, in torch's words, and has ended."""

    def wait(self, *args: Any) -> bool:
        return True

    def is_completed(self) -> bool:
        return True


def bound(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[dict[str, Any], Any]:
    """The arguments of such a call by their names, and what of them it writes to."""
    name, given = func.__name__, inspect.signature(func).bind(*args, **kwargs).arguments
    return given, given.get(_WRITTEN.get(name, _OTHERS.get(name, "")))


def _is_of_some(x: torch.Tensor) -> bool:
    """Whether a tensor is on some ranks alone, in a stage or a branch: others have no value to send."""
    return type(x) is DTensor and x.device_mesh.size() < x.device_mesh.outermost.size()


def _refuse(name: str, given: dict[str, Any], written: list[DTensor]) -> None:
    if written and name not in _WRITTEN:
        raise NotImplementedError(
            f"torch.distributed.{name} into a DTensor: a DTensor is one value of all ranks, and each would "
            "get another. Let it write to a plain tensor (torch.empty)."
        )
    if name not in _OF_TWO:
        return
    for x in tensors_in(given):
        if type(x) is DTensor:
            layout = x._layout.own
            if not layout.is_plain or name.endswith("recv"):
                raise NotImplementedError(
                    f"torch.distributed.{name} of a DTensor that lies as {layout!r}: it is one value of all "
                    "ranks, and two of them make this call. Let all ranks call x.full_tensor(), or use "
                    "x.to_local()."
                )


def warn(name: str, given: dict[str, Any]) -> None:
    """Tell that what such a call is given is one value of all ranks already."""
    if dist.get_world_size(given.get("group")) == 1:
        return
    if "reduce" in name and given.get("op", dist.ReduceOp.SUM) not in _ALIKE:
        effect = "adds it up once for each rank"
    elif "gather" in name:
        effect = "gives it once for each rank"
    else:
        return
    tell(
        f"torch.distributed.{name} of a DTensor {effect}: its value is that of all ranks already, of the "
        "whole batch. Leave the call out, and a division by the number of ranks after it. Where a library "
        "makes it, tell it not to: VectorQuantize(sync_codebook=False). What is this rank's own is "
        "x.to_local()."
    )
