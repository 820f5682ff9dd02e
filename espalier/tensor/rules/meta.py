"""Calls that are no computation: metadata, hooks, backward."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from espalier.comm import move
from espalier.layout import Layout, gradient_layout
from espalier.layout.layout import R, is_partial
from espalier.mesh import Mesh
from espalier.sharding.spec import bound_to, special, spellings
from espalier.tensor import loans
from espalier.tensor.dtensor import DTensor, layout_of, plain, recorded_layout, stamp
from espalier.tensor.fallback import answers_itself, stood_for
from espalier.tensor.loans import StandIn, hand_out, note_given, pass_on, share
from espalier.tensor.saved import saving_places
from espalier.tensor.told import Telling, as_addends, note_alias, share_of_addend
from espalier.tensor.waiting import put_last, wait, waiting_hooks
from espalier.torch_private import (
    ASIDE,
    TYPED_STORAGE,
    dual_parts,
    forward_dual,
    hooks_after_gradient,
    plain_call,
    raw,
    tensor_attributes,
    torch_functions_on,
)

# the same for the local and the global tensor, or about storage
_ONCE = (
    "A block that is compiled has no gradients of gradients. Where a program takes them in its first step it "
    "runs uncompiled; one that begins later is to leave compile out: initialize(..., compile=False), or "
    "train.compile = false."
)
_ASIDE = """
    requires_grad_ is_floating_point is_complex is_signed is_inference element_size get_device retain_grad
    is_contiguous
    is_set_to share_memory_ is_shared is_pinned is_conj is_neg is_distributed result_type is_coalesced
    __hash__ __dlpack_device__ dim_order
""".split()


def _attributes() -> Iterator[Any]:
    """The getters and setters of what tensors have besides data and other tensors."""
    apart = set(vars(DTensor)) | {"T", "mT", "H", "mH", "real", "imag", "data"}
    for name, attribute in tensor_attributes().items():
        if type(attribute).__name__ == "getset_descriptor" and name not in apart:
            yield attribute.__get__
            yield attribute.__set__


@special(*spellings(*_ASIDE, *ASIDE), *_attributes())
def aside(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Answered by the local tensor."""
    return plain_call(func, types, args, kwargs)


@special(*spellings("numel"))
def numel(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> int:
    """Elements of the global tensor."""
    return math.prod((args[0] if args else kwargs["input"]).shape)


@special(*spellings("detach_"))
def detach_in_place(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """Nothing, of what has no history: a gradient that is a view of others' memory, which torch refuses."""
    x = args[0]
    return plain_call(func, types, args, kwargs) if x.requires_grad else x


@special(torch.Tensor.data.__get__)  # type: ignore[attr-defined]
def same(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """A tensor over the same data, in the same layout."""
    x = written(args[0], func)
    with raw():
        out = stamp(func(x, *args[1:], **kwargs), x._layout.own)
        hand_out(x, out)
        note_alias(out, args[0])
    return out if x._layout.own is x._layout else share(out, x)


def written(x: torch.Tensor, func: Callable[..., Any]) -> Any:
    """Where the data of a tensor is, for who may write to it."""
    if type(x) is not DTensor or x._layout.own is x._layout:
        return x
    source = x.__dict__["_source"]
    return source.stand_in(func) if isinstance(source, StandIn) and source.takes(func) else x


@special(torch.Tensor.data.__set__)  # type: ignore[attr-defined]
def set_data(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """x.data = y: the data of y; x stays as it lies, unless its global shape changes."""
    x, y = written(args[0], func), args[1]
    if type(x) is DTensor and type(y) is not DTensor and tuple(y.shape) != x._layout.local_shape:
        whole = Layout.replicated(x._layout.mesh, x._layout.shape)
        if tuple(y.shape) != whole.shape:
            raise ValueError(
                f"x.data = y: x is a DTensor of the shape {list(whole.shape)}, locally "
                f"{list(x._layout.local_shape)}, y a plain tensor of the shape {list(y.shape)}. Assign a "
                "DTensor, the whole value, or this rank's part."
            )
        if x._layout.mesh.is_member:
            with raw():
                y = stamp(y.detach(), whole)
    if type(x) is DTensor and type(y) is not DTensor and not x._layout.mesh.is_member:
        return None  # its data is on other ranks
    with raw():
        if type(x) is DTensor:
            note_given(x)
        if type(x) is DTensor and type(y) is DTensor and y._layout is not x._layout:
            if x._layout.shape == y._layout.shape and (x._layout.is_firm or y._layout.partial):
                # autograd may know the local shape already, and who holds x takes no addends for it
                y = move(y.detach(), y._layout.own, x._layout.own)
            else:
                x._layout = y._layout
        func(x, y)
        if type(x) is DTensor:
            pass_on(args[1], x)
    return None


@special(
    torch.Tensor.new_zeros,
    torch.Tensor.new_ones,
    torch.Tensor.new_empty,
    torch.Tensor.new_full,
    torch.Tensor.new_tensor,
    torch.Tensor.new,
)
def new(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """x.new_zeros(...) and its like: replicated on x's mesh."""
    if loans.are_tensors(func, args, kwargs):
        args, kwargs = loans.read(func, args, kwargs)
        return func(*args, **kwargs)
    if func is torch.Tensor.new and any(type(x) is DTensor for x in args[1:]):
        return args[1].detach()  # as torch has it: the same memory
    mesh = args[0]._layout.mesh
    with raw():
        out = func(*args, **kwargs)
        return stamp(out, Layout.replicated(mesh, tuple(out.shape)))


@special(torch.Tensor.backward)
def backward(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """loss.backward(): each rank from its own addend, or from the replicated value."""
    bound = bound_to("self gradient retain_graph create_graph inputs", args, kwargs)
    loss, gradient = bound.pop("self"), bound.pop("gradient", None)
    with raw():
        local, gradient = seeded(loss, gradient)
    # intercepted again: hooks and recomputation see DTensors
    with _recorded(bound, loss):
        went_back((loss,), partial(torch.autograd.backward, local, gradient, **bound))


@special(torch.autograd.grad)
def gradients(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """torch.autograd.grad: gradients that lie as those of their inputs do."""
    bound = bound_to("outputs inputs grad_outputs", args, kwargs)
    if bound.pop("is_grads_batched", False):
        return _one_by_one(func, bound)
    outputs, inputs = (
        x if isinstance(x, tuple | list) else (x,) for x in (bound.pop("outputs"), bound.pop("inputs"))
    )
    grad_outputs = bound.pop("grad_outputs", None)
    grad_outputs = grad_outputs if isinstance(grad_outputs, tuple | list) else (grad_outputs,) * len(outputs)
    with raw():
        ends = [
            seeded(x, g) if type(x) is DTensor else (x, g) for x, g in zip(outputs, grad_outputs, strict=True)
        ]
        sought, inputs = inputs, [stood_for(x) for x in inputs]
        edges = [get_gradient_edge(x) if isinstance(x, torch.Tensor) else x for x in inputs]
    zeros = bound.pop("materialize_grads", False)
    if zeros:
        bound["allow_unused"] = True
    with _recorded(bound, *outputs):
        grads = torch.autograd.grad([x for x, _ in ends], edges, [g for _, g in ends], **bound)

    def typed(x: Any, g: torch.Tensor | None) -> torch.Tensor | None:
        lay = recorded_layout(x) if type(x) is DTensor else None
        if g is None and zeros and isinstance(x, torch.Tensor):
            shape = x.shape if lay is None else lay.local_shape
            g = plain(x).new_zeros(shape, requires_grad=bool(bound.get("create_graph")))
        return g if g is None or lay is None else stamp(g.view_as(g), gradient_layout(lay))

    with raw():
        found = tuple(map(typed, inputs, grads))
        if bound.get("create_graph") and (mesh := _mesh_of_stages(outputs)) is not None:
            found = tuple(_lying_on(mesh, g) for g in found)
        for x in sought if not bound.get("create_graph") else ():
            if isinstance(source := getattr(x, "_source", None), StandIn):
                source.unused()
    return found


def _mesh_of_stages(outputs: Iterable[Any]) -> Mesh | None:
    """The mesh of all stages, where something of these outputs lies."""
    meshes = (x._layout.mesh for x in outputs if type(x) is DTensor)
    return next((mesh for mesh in meshes if mesh.within is None and mesh.beside is not None), None)


def _lying_on(mesh: Mesh, grad: torch.Tensor | None) -> torch.Tensor | None:
    """A gradient of a plain tensor that has a graph on all ranks.

    Plain, it would meet a parameter of a stage in that stage alone, and go back there alone.
    """
    if grad is None or type(grad) is DTensor or not grad.requires_grad:
        return grad
    return stamp(grad.view_as(grad), Layout.replicated(mesh, tuple(grad.shape)))


def _one_by_one(func: Callable[..., Any], bound: dict[str, Any]) -> Any:
    """The gradients for each of a batch of starts, one after the other."""
    grad_outputs = bound.pop("grad_outputs")
    starts = grad_outputs if isinstance(grad_outputs, tuple | list) else (grad_outputs,)
    n = next(g.shape[0] for g in starts if g is not None)
    last = bound.pop("retain_graph", None)
    if last is None:
        last = bool(bound.get("create_graph"))
    grads = [
        gradients(
            func,
            (),
            (),
            bound
            | {
                "grad_outputs": [None if g is None else g[i] for g in starts],
                "retain_graph": last or i < n - 1,
            },
        )
        for i in range(n)
    ]
    return tuple(None if some[0] is None else torch.stack(some) for some in zip(*grads, strict=True))


def _recorded(options: Mapping[str, Any], *ends: Any) -> AbstractContextManager[object]:
    """Around a backward pass that may be recorded itself."""
    mesh = next((x._layout.mesh for x in ends if type(x) is DTensor), None)
    return saving_places(mesh) if mesh is not None and options.get("create_graph") else nullcontext()


def went_back(roots: Sequence[Any], go: Callable[[], None]) -> None:
    """A backward pass that begins at these, by ``go``; engines with stages on their mesh know of it.

    If it finishes an engine's gradients, its losses are known to all ranks then.
    """
    meshes = {id(mesh := x._layout.mesh): mesh for x in roots if type(x) is DTensor}.values()
    for mesh in meshes:
        if mesh.outermost.beside is not None:
            return mesh.outermost.beside(roots, go)
    for engaged in {each for mesh in meshes if mesh.before_going for each in mesh.before_going}:
        engaged.see_begin()
    telling = Telling(roots)
    passes = {id(mesh.going): mesh.going for mesh in meshes}.values()
    for of_mesh in passes:
        of_mesh.append(telling)
    try:
        with as_addends(*meshes):
            go()
    except RuntimeError as error:
        if "double backward" in str(error):
            error.add_note(_ONCE)
        raise
    finally:
        for of_mesh in passes:
            of_mesh.remove(telling)
    telling.end()


def seeded(x: DTensor, gradient: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Where backward starts on this rank, and the local gradient it starts from."""
    if not torch.is_grad_enabled():  # as in torch, it may be called where nothing is recorded: in a hook, say
        with torch.enable_grad():
            return seeded(x, gradient)
    layout = x._layout
    for n, state in zip(layout.mesh.shape, layout.axes, strict=True):
        if state in ("max", "min", "product") and n > 1:
            raise ValueError(
                f"A Partial({state}) value has no gradient: only sums and averages have one. Redistribute "
                "before the operation that made it."
            )
    share = share_of_addend(layout)
    if gradient is not None:
        local = plain(move(gradient, layout_of(gradient, layout.mesh), gradient_layout(layout)))
        return plain(x), local if share == 1 else local * share
    if math.prod(layout.shape) != 1:
        raise RuntimeError(
            f"Gradients without a given start need a loss of one element; its shape is {list(layout.shape)}."
        )
    # an addend's gradient is one on every rank, as is that of a replicated value
    axes = tuple(s if is_partial(s) else R for s in layout.axes)
    start = plain(move(x, layout, Layout.of(layout.mesh, axes, ((),) * layout.ndim, layout.shape)))
    return start, None if share == 1 else torch.full_like(start, share)


def whole_starts(original: Callable[..., Any]) -> Callable[..., Any]:
    """What a backward pass starts from: plain tensors from the whole of gradients that are cut.

    torch asks what is to have gradients who answers for it, and not the gradients that are given.
    """

    @wraps(original)
    def starts(outputs: Any, grads: Sequence[Any], *args: Any, **kwargs: Any) -> Any:
        if torch_functions_on():
            grads = [
                _plain_start(g) if type(x) is torch.Tensor and type(g) is not torch.Tensor else g
                for x, g in zip(outputs, grads, strict=False)
            ]
        return original(outputs, grads, *args, **kwargs)

    return starts


def _plain_start(gradient: Any) -> Any:
    if type(gradient) is DTensor:
        return gradient.full_tensor()
    return torch.as_tensor(gradient) if answers_itself(gradient) else gradient


@special(forward_dual)
def make_dual(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> DTensor:
    """Forward-mode derivatives: the tangent lies as its primal does."""
    x, tangent, *level = args
    lay = x._layout if type(x) is DTensor else layout_of(x, tangent._layout.mesh)
    with raw():
        tangent = plain(move(tangent, layout_of(tangent, lay.mesh), lay))
        return stamp(func(plain(x), tangent, *level, **kwargs), lay)


@special(dual_parts)
def unpack_dual(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The primal and the tangent, if there is one."""
    with raw():
        dual = func(plain(args[0]), *args[1:], **kwargs)
    return type(dual)([x if x is None else stamp(x, args[0]._layout) for x in dual])


@special(torch.Tensor.register_hook)
def register_hook(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """The hook sees and returns DTensors."""
    x, hook = args
    waiting = waiting_hooks(x)
    if waiting is not None and waiting.before is not None and x.requires_grad:
        return wait(waiting.before, hook)
    with raw():
        return func(x, of_dtensors(hook, gradient_layout(recorded_layout(x))))


@special(torch.Tensor.register_post_accumulate_grad_hook)
def register_hook_after(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Any:
    """It is called before the gradient is taken, to be summed; or waits until it is."""
    x, hook = args
    if (waiting := waiting_hooks(x)) is not None and x.requires_grad:
        return wait(waiting.after, hook)
    handle = plain_call(func, types, args, kwargs)
    with raw():
        put_last(hooks_after_gradient(x))
    return handle


def of_dtensors(hook: Callable[[Any], Any], lay: Layout) -> Callable[[Any], Any]:
    """A hook on a tensor's gradient, which lies so, as torch calls it with what this rank has of it."""

    def wrapped(grad: torch.Tensor | None) -> torch.Tensor | None:
        if grad is None:  # it goes past what needs one
            return None
        result = hook(stamp(grad.view_as(grad), lay))
        if result is None:
            return None
        with raw():
            return plain(move(result, layout_of(result, lay.mesh), lay))

    return wrapped


@special("is_same_size")
def same_size(
    func: Callable[..., Any], types: Iterable[type], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> bool:
    """Whether two global shapes are equal."""
    a, b = args
    return bool(a.shape == b.shape)


special(*spellings("data_ptr", "const_data_ptr", "__dlpack__"))(loans.address)
special(*spellings("untyped_storage", "storage", TYPED_STORAGE))(loans.storage)
special(torch.Tensor.storage_offset)(loans.storage_offset)
special(torch.Tensor.__cuda_array_interface__.__get__)(loans.interface)
