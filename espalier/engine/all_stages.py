"""Steps, in a pipeline, of optimizers that make something of all their parameters or gradients.

A rank's optimizer has those of its own stage. So the ranks along the axis ``pipe`` tell one another what
theirs are before each step; each updates all, and keeps its own. Nothing of others stays between steps:
checkpoints, loads and changes by the program go as they do elsewhere.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch

from espalier.comm import move
from espalier.comm.collectives import broadcast_
from espalier.comm.control import gather_objects
from espalier.engine.beside import held_by
from espalier.layout import Layout
from espalier.layout.layout import AxisState
from espalier.mesh import Mesh
from espalier.mesh.parts import at
from espalier.parallel.fused import holding
from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.asked import apart
from espalier.tensor.dtensor import layout_of
from espalier.torch_private import keep_own_list, raw, setter
from espalier.trees import leaves, tree_map

_PIPE = "pipe"
_set_grad = setter("grad")


def take_all_stages(optimizer: torch.optim.Optimizer) -> None:
    """Let each step of an optimizer be made of the parameters of all stages."""
    optimizer._takes_all_stages = True  # type: ignore[attr-defined]
    if isinstance(optimizer, torch.optim.LBFGS):
        optimizer.step = MethodType(step_by_closure, optimizer)  # type: ignore[method-assign]


@contextmanager
def of_all_stages(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, an optimizer that takes all stages holds copies of other stages' parameters, with their states.

    All ranks along ``pipe`` must come to it (collective).
    """
    held = [p for p in held_by(optimizer) if type(p) is DTensor]
    whole = held[0]._layout.mesh.outermost if held else None
    if whole is None or whole.is_dry or not vars(optimizer).get("_takes_all_stages"):
        yield
        return
    copies = _copies(optimizer, held, whole)
    try:
        with holding(optimizer):
            for group in optimizer.param_groups:
                group["params"] = [copies.get(id(p), p) for p in group["params"]]
            yield
    finally:
        for copy in copies.values():
            optimizer.state.pop(copy, None)


def step_by_closure(
    optimizer: torch.optim.LBFGS, closure: Callable[[], Any], step: Callable[..., Any] | None = None
) -> Any:
    """A step that asks for the loss itself, with the parameters of all stages (collective).

    All ranks go the same way: they have the same numbers.

    Args:
        step: the optimizer's own, of those of this rank; None: that of its class.
    """
    loss = closure()  # as the step begins, and as the first batch lays the model out
    own = [group["params"] for group in optimizer.param_groups]
    held = [p for params in own for p in params if type(p) is DTensor]
    calls, filled = 0, list[DTensor]()
    try:
        with of_all_stages(optimizer), ExitStack() as alone:
            every = [group["params"] for group in optimizer.param_groups]
            copies = [p for params in every for p in params if type(p) is DTensor]
            keep_own_list(optimizer)

            def found() -> Any:
                nonlocal calls, loss
                calls += 1
                if calls > 1:
                    alone.close()
                    _drop(filled)
                    _hold(optimizer, own)
                    loss = closure()
                    _hold(optimizer, every)
                    grads = {i: [_gradient(p)] for i, p in enumerate(held) if p._layout.mesh.is_member}
                    with raw():
                        for i, (grad,) in _brought(grads, held[0]._layout.mesh.outermost).items():
                            _set_grad(copies[i], grad)
                filled[:] = _filled(copies)
                if held:  # each rank computes with all that there is
                    alone.enter_context(apart(held[0]._layout.mesh.outermost))
                return loss

            return (step or type(optimizer).step)(optimizer, found)
    finally:
        keep_own_list(optimizer)
        _drop(filled)


def _drop(params: Sequence[DTensor]) -> None:
    """Drop their gradients."""
    with raw():
        for p in params:
            _set_grad(p, None)


def _filled(params: Sequence[DTensor]) -> list[DTensor]:
    """Give those without a gradient one of zeros, beside them: what a rank makes of one may lie elsewhere."""
    with raw():
        bare = [p for p in params if p.grad is None]
        for p in bare:
            _set_grad(p, stamp(torch.zeros_like(plain(p)), layout_of(p)))
    return bare


def _hold(optimizer: torch.optim.Optimizer, params: Sequence[list[torch.Tensor]]) -> None:
    for group, held in zip(optimizer.param_groups, params, strict=True):
        group["params"] = held


@dataclass(frozen=True)
class _Told:
    """How a tensor lies on its stage's ranks; ``axes`` is None of a plain one."""

    axes: tuple[AxisState, ...] | None
    cuts: tuple[tuple[int, ...], ...]
    shape: tuple[int, ...]
    dtype: torch.dtype

    @staticmethod
    def of(x: Any) -> Any:
        """What is told of a tensor; all else is told as it is."""
        if not isinstance(x, torch.Tensor):
            return x
        if type(x) is not DTensor:
            return _Told(None, (), tuple(x.shape), x.dtype)
        layout = x._layout.own
        return _Told(layout.axes, layout.cuts, layout.shape, x.dtype)

    def layout(self, mesh: Mesh) -> Layout | None:
        return None if self.axes is None else Layout.of(mesh, self.axes, self.cuts, self.shape)


def _copies(
    optimizer: torch.optim.Optimizer, held: Sequence[DTensor], whole: Mesh
) -> Mapping[int, torch.Tensor]:
    """Of the parameters of other stages, by ``id``, what they are there, as they lie on the ranks of this
    one; the optimizer has their states."""
    here = [(i, p) for i, p in enumerate(held) if p._layout.mesh.is_member]
    own = {i: [p, _gradient(p), optimizer.state.get(p, {})] for i, p in here}
    copies = dict[int, torch.Tensor]()
    with raw():
        for i, (copy, grad, state) in _brought(own, whole).items():
            _set_grad(copy, grad)
            optimizer.state[copy.requires_grad_(held[i].requires_grad)] = state
            copies[id(held[i])] = copy
    return copies


def _gradient(p: DTensor) -> torch.Tensor | None:
    """A parameter's, as the parameter lies: copies take no other, and ZeRO may cut gradients alone."""
    grad = p.grad
    if type(grad) is not DTensor:
        return grad
    lies, whole = layout_of(grad), layout_of(p)
    return grad if lies is whole else stamp(move(plain(grad), lies, whole), whole)


def _brought(own: Mapping[int, Any], whole: Mesh) -> dict[int, Any]:
    """What other stages have, by number, as it lies on the ranks of this one; each has its ``own``."""
    axis = whole.axis(_PIPE)
    here = whole.coordinate[axis]
    stage = at(whole, axis, here)
    told = gather_objects({i: tree_map(_Told.of, of) for i, of in own.items()}, whole[(_PIPE,)])
    brought = dict[int, Any]()
    for i in sorted({i for of in told for i in of}):
        home = next(number for number, of in enumerate(told) if i in of)
        tensors = iter(leaves(own[i], torch.Tensor) if home == here else ())

        def sent(x: Any, home: int = home, tensors: Iterator[torch.Tensor] = tensors) -> Any:
            return _sent(x, tensors, whole, axis, home, stage) if isinstance(x, _Told) else x

        tree = tree_map(sent, told[home][i])
        if i not in own:
            brought[i] = tree
    return brought


def _sent(
    x: _Told, own: Iterator[torch.Tensor], whole: Mesh, axis: int, home: int, stage: Mesh
) -> torch.Tensor:
    """A tensor of the stage that is its home, as it lies on the ranks of this one."""
    layout = x.layout(stage)
    if whole.coordinate[axis] == home:
        local = plain(next(own)).detach().contiguous()
    else:
        shape = x.shape if layout is None else layout.local_shape
        local = torch.empty(shape, dtype=x.dtype, device=whole.device())
    broadcast_(local, whole, axis, home).wait()
    return local if layout is None else stamp(local, layout)
