"""The sanitizer: what is typed equal on several ranks is compared, and the order of collectives.

The laws of the types say what must be equal: values along the axes where they are replicated (deferred
ones too), gradients where theirs are. Hashes of all these are written down call by call and compared
when the ranks next meet (see ``compare``).
"""

from __future__ import annotations

import atexit
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from espalier.comm import Collective
from espalier.layout import Layout, gradient_layout
from espalier.layout.layout import D, R
from espalier.mesh import Mesh
from espalier.tensor.compare import CheckRecord, Comparison, fingerprint
from espalier.tensor.dtensor import DTensor, plain
from espalier.tensor.fallback import writes
from espalier.tensor.observers import (
    Trail,
    Watcher,
    in_backward,
    library_function,
    module_path,
    site,
    user_frame,
    watching,
)
from espalier.tensor.random import position_of_keys, same_position
from espalier.tensor.rules import RULES
from espalier.texts import dtype_name
from espalier.torch_private import getter, memory_id, raw, version_of
from espalier.trees import tensors_in, tree_map

_grad = getter("grad")
# their content is whatever the memory held
_UNSET = frozenset("empty empty_like empty_strided empty_permuted new new_empty new_empty_strided".split())
_SIMPLE = (int, float, complex, bool, str, type(None), torch.dtype, torch.device, slice, type(...))

_PLAIN = (
    "A plain tensor among DTensors is taken to be the same on all ranks. Seed all ranks alike, load the same "
    "data on each, or say how it lies: espalier.distribute_tensor, DTensor.from_local."
)
_CHANGED = (
    "It was changed in place since it was last compared: look for a write to a local part (to_local(), "
    ".data) or an update that not all ranks make alike."
)
_ENTERED = (
    "It was made outside of the dispatcher (from_local, local_map, a parameter that each rank filled by "
    "itself) and said to be replicated: give the same values on all ranks, or say Shard or Partial."
)
_RESULT = (
    "What went in was equal as far as it is typed so. Usually it is random numbers of a generator that is "
    "not in step, a number that depends on the rank, or a kernel that is not deterministic "
    "(torch.use_deterministic_algorithms; espalier.sanitize(tolerance=...) lets small differences pass)."
)
_GRADIENT = (
    "Usually a hook changes the gradient on some ranks only, a custom backward (local_map) gives each rank "
    "its own share where the type says the whole, or a kernel is not deterministic."
)
_RANDOM = (
    "The ranks' CPU generators are out of step: some drew more random numbers than others. Give what only "
    "some ranks draw a generator of its own, or seed all ranks again (torch.manual_seed)."
)


class _CheckedCall:
    """A call that is being watched; ``inner``: others were made inside."""

    def __init__(
        self,
        desk: Comparison,
        func: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        inputs: list[torch.Tensor],
    ) -> None:
        self.desk, self.inputs, self.inner = desk, inputs, False
        self.name: str = getattr(func, "__name__", str(func))
        self.where = site(user_frame()[1])
        self.special = RULES.special(func) is not None
        self.written = tensors_in(kwargs.get("out"))
        if writes(func):
            self.written += tensors_in(args[:1])
        said = [repr(tree_map(_said, x)) for x in (*args, *kwargs.items())]
        self.text = f"{self.name}({', '.join(said):.300})"


class Sanitizer(Watcher):
    """Writes down what this rank does. Made by :func:`sanitize`."""

    def __init__(self, limit: float, tolerance: float) -> None:
        self._limit, self._tolerance = limit, tolerance
        self._desks: dict[Mesh, Comparison] = {}
        self._calls: list[_CheckedCall] = []
        self._trail: Trail[str] = Trail()
        self._open = True
        # stands on tensors for "compared by this sanitizer"; holds nothing alive
        self._token = object()
        self._handles: list[Any] = []

    # ---- beginning and end

    def open(self, forever: AbstractContextManager[None] | None = None) -> None:
        """Watch optimizers; and, in a context that nobody closes, calls."""
        if forever is not None:
            forever.__enter__()
            self._forever = forever
        self._handles.append(register_optimizer_step_pre_hook(self._step))

    def close(self, error: BaseException | None) -> None:
        """Compare what is left; after an error only tell the others of it."""
        self._open = False
        for handle in self._handles:
            handle.remove()
        where = site(user_frame()[1])
        for desk in self._desks.values():
            if error is None:
                desk.meet("the end of sanitize()", where)
            desk.leave("the end of sanitize()" + ("" if error is None else f", left with {error!r:.300}"))

    def forget(self) -> None:
        """Drop all that is written down, and the means to talk."""
        self._open = False
        self._desks.clear()

    # ---- what is seen

    def around(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], go: Callable[[], Any]) -> Any:
        """A call: its arguments, its inputs, its results, and their gradients to come."""
        tensors = tensors_in((args, kwargs))
        desk = self._desk(next((x._layout.mesh for x in tensors if type(x) is DTensor), None))
        if desk is None:
            return go()
        with raw():
            call = _CheckedCall(desk, func, args, kwargs, tensors)
            state = torch.get_rng_state()
        self._calls.append(call)
        try:
            with self._trail.made_by(f"{call.name} ({call.where})"):
                out = go()
        finally:
            self._calls.pop()
            if self._calls:
                self._calls[-1].inner = True
        # calls inside have told of the values already
        if not call.inner:
            with raw():
                if not same_position(state, torch.get_rng_state()):
                    axes, what = tuple(range(desk.mesh.ndim)), f"the random state before {call.name}"
                    hashed = fingerprint(position_of_keys(desk.mesh, state))
                    desk.write(CheckRecord(what, call.where, "torch's CPU generator", axes, hashed, _RANDOM))
                self._values(call, [x for x in tensors_in(out) if type(x) is DTensor])
        return out

    def saw(self, event: Collective) -> None:
        """A collective is about to start: all ranks of the mesh meet."""
        desk = self._desk(event.mesh)
        if desk is None or event.whole is None:
            return
        owner = self._trail.here() if in_backward() else None
        call = f"the backward of {owner}" if owner else self._calls[-1].name if self._calls else ""
        doing = f"{event.op} along {event.where!r} in {call or library_function()}"
        size = f"{list(event.whole)} {event.dtype}".replace("torch.", "")
        with raw():
            desk.meet(doing, site(user_frame()[1]), size, event.axis)

    def claimed(self, x: torch.Tensor, layout: Layout, what: str) -> None:
        """A plain tensor that is said to lie so."""
        desk, axes = self._desk(layout.mesh), _equal_along(layout)
        if desk is not None and axes:
            with raw():
                cause = _ENTERED if what.startswith("from_local") else _PLAIN
                self._write(desk, what, site(user_frame()[1]), plain(x), layout, axes, cause)

    def _step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        """Before an optimizer's step: its parameters and their gradients."""
        where, name = site(user_frame()[1]), type(optimizer).__name__
        met: dict[Mesh, Comparison] = {}
        with raw():
            for g, group in enumerate(optimizer.param_groups):
                names = group.get("param_names") or [f"{g}.{i}" for i in range(len(group["params"]))]
                for label, p in zip(names, group["params"], strict=False):
                    layout: Layout | None = p.__dict__.get("_layout")
                    desk = self._desk(layout.mesh) if layout is not None else None
                    if layout is None or desk is None:
                        continue
                    met[desk.mesh] = desk
                    self._compare(f"parameter {label} of {name}", where, p, layout, _CHANGED)
                    grad = _grad(p)
                    if grad is not None:
                        lies = grad.__dict__.get("_layout") or gradient_layout(layout)
                        self._compare(f"the gradient of parameter {label}", where, grad, lies, _GRADIENT)
            for desk in met.values():
                desk.meet(f"the step of {name}", where)

    # ---- what is written down

    def _desk(self, mesh: Mesh | None) -> Comparison | None:
        if mesh is None or mesh.is_dry or mesh.size() == 1 or not mesh.is_member:
            return None
        desk = self._desks.get(mesh)
        if desk is None:
            desk = self._desks[mesh] = Comparison(mesh, self._limit, self._tolerance)
        return desk

    def _values(self, call: _CheckedCall, results: list[DTensor]) -> None:
        """What went into a call and what came out, but for calls that compute nothing."""
        call.desk.write(CheckRecord(f"the call of {call.name}", call.where, call.text))
        if call.special or (results and all(_aliases(x, call) for x in results)):
            return
        for i, x in enumerate(call.inputs):
            # what was written to may have been anything before, and is told of below
            if any(x is written for written in call.written):
                continue
            what = f"input {i} of {call.name}"
            if type(x) is DTensor:
                known = x.__dict__.get("_sane") is self._token
                self._compare(what, call.where, x, x._layout, _CHANGED if known else _ENTERED)
                if x.requires_grad and x.is_leaf:
                    self._follow_leaf(f"the gradient of {what}", call.where, x)
            else:
                axes = tuple(range(call.desk.mesh.ndim))
                self._write(call.desk, what + ", a plain tensor,", call.where, x, None, axes, _PLAIN)
        for i, x in enumerate(results):
            what = f"the result of {call.name}" if len(results) == 1 else f"result {i} of {call.name}"
            if call.name not in _UNSET and not _aliases(x, call):
                self._compare(what, call.where, x, x._layout, _RESULT)
                self._follow(call.desk, f"the gradient of {what}", call.where, x)

    def _compare(self, what: str, where: str, x: Any, layout: Layout, cause: str) -> None:
        axes, desk = _equal_along(layout), self._desk(layout.mesh)
        x._sane = self._token
        if axes and desk is not None:
            self._write(desk, what, where, plain(x), layout, axes, cause)

    def _write(
        self,
        desk: Comparison,
        what: str,
        where: str,
        x: torch.Tensor,
        layout: Layout | None,
        axes: tuple[int, ...],
        cause: str,
    ) -> None:
        x = plain(x.detach())
        form = f"{dtype_name(x.dtype)} {list(x.shape) if layout is None else layout}"
        strided = x if x.layout is torch.strided else None
        desk.write(
            CheckRecord(what, where, form, axes, fingerprint(x), cause, strided, version_of(x), layout)
        )

    def _follow(self, desk: Comparison, what: str, where: str, x: DTensor) -> None:
        """Write the gradient of a result down when the backward pass has it, after the hooks on it."""
        lies, node, number = gradient_layout(x._layout), x.grad_fn, x.output_nr
        if node is None or not _equal_along(lies):
            return

        def before(grads: tuple[torch.Tensor | None, ...]) -> None:
            grad = grads[number]
            if grad is not None and self._open:
                with raw(), torch.no_grad():
                    self._write(desk, what, where, plain(grad), lies, _equal_along(lies), _GRADIENT)

        node.register_prehook(before)

    def _follow_leaf(self, what: str, where: str, x: DTensor) -> None:
        if x.__dict__.get("_sane_leaf") is self._token:
            return
        x._sane_leaf = self._token  # type: ignore[attr-defined]
        lies, module, desk = gradient_layout(x._layout), module_path(), self._desk(x._layout.mesh)
        what += f" in {module}" if module else ""

        def after(leaf: torch.Tensor) -> None:
            with raw(), torch.no_grad():
                grad = _grad(leaf)
                if grad is not None and desk is not None and self._open:
                    layout = grad.__dict__.get("_layout") or lies
                    if _equal_along(layout):
                        self._write(desk, what, where, plain(grad), layout, _equal_along(layout), _GRADIENT)

        self._handles.append(x.register_post_accumulate_grad_hook(after))


def _aliases(x: DTensor, call: _CheckedCall) -> bool:
    """Whether a result is an input, or a view of one: nothing was computed."""
    if any(x is written for written in call.written):
        return False
    storage = memory_id(x)
    return any(x is y or storage == memory_id(y) for y in call.inputs if y.layout is torch.strided)


def _equal_along(layout: Layout) -> tuple[int, ...]:
    states = zip(layout.mesh.shape, layout.axes, strict=True)
    return tuple(axis for axis, (n, state) in enumerate(states) if n > 1 and state in (R, D))


def _said(x: Any) -> Any:
    """An argument as all ranks must give it."""
    if type(x) is DTensor:
        return x._layout
    if isinstance(x, torch.Tensor):
        return list(x.shape)
    return x if isinstance(x, _SIMPLE) else type(x).__name__


@contextmanager
def sanitize(*, limit: float = 30.0, tolerance: float = 0.0) -> Iterator[None]:
    """While open, compare what the types say is equal on several ranks, and the order of collectives.

    Values are compared bit for bit along the axes on which they are replicated, and gradients likewise:
    results of calls, what enters (plain tensors among DTensors, ``from_local``, parameters), what an
    optimizer is about to use; the arguments of calls; the state of the random generator. The ranks compare
    before each collective, at each optimizer's step, and at the end of the context; each of these must be
    reached by all ranks of the mesh from the same line. It sends a few hundred bytes each time, which no
    ledger shows, and changes no result. ``ESPALIER_SANITIZE=1`` in the environment opens it for a whole
    program (``ESPALIER_SANITIZE=limit=60,tolerance=1e-6`` with options).

    Args:
        limit: seconds to wait for a rank that does not come.
        tolerance: let values differ by so much, relative to the largest of the tensor; zero: not in one
            bit. A ring all-reduce gives all ranks the same bits, for each element is added up on one of
            them. What may differ in the last bits is a kernel that is not deterministic. Such differences
            grow from step to step, so better make it deterministic.

    Raises:
        SanitizeError: on every rank: what differs, the line, the axis, the ranks, the usual cause.
    """
    if limit <= 0 or tolerance < 0:
        raise ValueError(f"sanitize: limit={limit} must be above 0, tolerance={tolerance} not below.")
    watcher = Sanitizer(limit, tolerance)
    with watching(watcher):
        watcher.open()
        error: BaseException | None = None
        try:
            yield
        except BaseException as raised:
            error = raised
            raise
        finally:
            watcher.close(error)


def switch_on(setting: str) -> None:
    """Open the sanitizer for the whole program, as ``ESPALIER_SANITIZE`` tells.

    Raises:
        ValueError: an unknown option.
    """
    options = {}
    for part in setting.split(",") if setting != "1" else ():
        name, _, value = part.partition("=")
        try:
            options[{"limit": "limit", "tolerance": "tolerance"}[name.strip()]] = float(value)
        except (KeyError, ValueError):
            raise ValueError(
                f"ESPALIER_SANITIZE={setting}: {part!r} is not understood. Say 1, or limit=SECONDS and "
                "tolerance=NUMBER with a comma between."
            ) from None
    watcher = Sanitizer(**{"limit": 30.0, "tolerance": 0.0} | options)
    watcher.open(watching(watcher))
    # gloo must be gone before the interpreter is; what is still to be compared is not: others may be gone
    atexit.register(watcher.forget)
