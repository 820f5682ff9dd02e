"""Gradients of weights that are put off until a stage's inputs have theirs, for which the stage before waits.

Where a schedule says when: a backward pass in two parts, first for the inputs and later for the weights
(Qi et al. 2024, Zero Bubble Pipeline Parallelism). Else only those of linear layers, until the message is on
its way.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

from espalier.tensor import DTensor, plain, stamp
from espalier.tensor.dtensor import layout_of
from espalier.tensor.observers import Go, Watcher
from espalier.torch_private import gradient_hooks, raw, version_of

# ---- of linear layers
#
# Products are those of ``torch.nn.functional.linear``, each computed once; of a weight that is used several
# times they are added up in another order.


class _LinearCall(NamedTuple):
    """A linear layer's weights, what entered it (and its version then), and the gradient of what it gave."""

    weight: torch.Tensor
    bias: torch.Tensor | None
    x: torch.Tensor
    version: int
    grad: torch.Tensor


class DeferredWeightGrads:
    """What was put off."""

    def __init__(self) -> None:
        self._products: deque[_LinearCall] = deque()

    def add(
        self, weight: torch.Tensor, bias: torch.Tensor | None, x: torch.Tensor, version: int, grads: Any
    ) -> None:
        """One more, if a gradient has come."""
        if grads[0] is not None:
            self._products.append(_LinearCall(weight, bias, x, version, grads[0]))

    def do(self) -> None:
        """Add to the gradients of the weights.

        Raises:
            RuntimeError: what entered a layer was written to.
        """
        with torch.no_grad(), raw():
            while self._products:
                weight, bias, x, version, grad = self._products.popleft()
                if version_of(x) != version:
                    raise RuntimeError(
                        f"A tensor of the shape {list(x.shape)} that entered a linear layer has been written "
                        "to since, and the gradient of the layer's weight needs it as it was."
                    )
                _add(weight, grad.t().mm(x.reshape(math.prod(x.shape[:-1]), x.shape[-1])))
                if bias is not None:
                    _add(bias, grad.sum(0))

    @contextmanager
    def of(self, parameters: Iterable[torch.Tensor]) -> Iterator[None]:
        """While open, what plain parameters compute has their gradients put off to here."""
        chosen: list[Any] = [p for p in dict.fromkeys(parameters) if _fits(p)]
        for p in chosen:
            p.bare, p.later = p.detach(), self
            p.__class__ = _Weight
        try:
            yield
        finally:
            for p in chosen:
                p.__class__ = nn.Parameter
                del p.bare, p.later


class PutOffDry(Watcher):
    """On a dry mesh, where steps are done on DTensors, puts off what :class:`DeferredWeightGrads` would."""

    traffic = False

    def __init__(self, parameters: Iterable[torch.Tensor], later: DeferredWeightGrads) -> None:
        with raw():
            fitting = [p for p in parameters if p.requires_grad and p.grad_dtype is p.dtype]
        self._chosen, self._later = {id(p): p for p in fitting}, later

    def around(self, func: Any, args: Any, kwargs: Any, go: Go) -> Any:
        """Carry a call out, with weights of which autograd does not know."""
        if func is not F.linear or kwargs or len(args) != 3 or not torch.is_grad_enabled():
            return go()
        x, weight, bias = args
        weighs = id(weight) in self._chosen and (bias is None or id(bias) in self._chosen)
        if not (weighs and isinstance(x, DTensor) and x.requires_grad and x.dtype is weight.dtype):
            return go()
        out = F.linear(x, _bare(weight), None if bias is None else _bare(bias))
        with raw():
            node = _product_of(out)
            if node is not None:
                entered = plain(x)
                node.register_prehook(partial(self._later.add, weight, bias, entered, version_of(entered)))
        return out


def _bare(p: torch.Tensor) -> torch.Tensor:
    with raw():
        return stamp(p.detach(), layout_of(p))


class _Weight(nn.Parameter):
    """A parameter of which ``F.linear`` puts the gradient off: its class in a forward pass.

    Attributes:
        bare: itself, of which autograd does not know.
        later: to when.
    """

    bare: torch.Tensor
    later: DeferredWeightGrads

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with raw():
            if func is F.linear and not kwargs and len(args) == 3 and torch.is_grad_enabled():
                x, weight, bias = args
                weighs = type(weight) is _Weight and (bias is None or type(bias) is _Weight)
                if weighs and x.requires_grad and x.dtype is weight.dtype:
                    out = F.linear(x, weight.bare, None if bias is None else bias.bare)
                    node = _product_of(out)
                    if node is not None and out.dtype is x.dtype:  # no autocast
                        node.register_prehook(partial(weight.later.add, weight, bias, x, version_of(x)))
                        return out
            return func(*args, **(kwargs or {}))


def _product_of(out: torch.Tensor) -> Any:
    """The node of the graph that is a linear layer's product, behind that of a view."""
    node: Any = out.grad_fn
    if type(node).__name__ in _VIEWS:
        node = node.next_functions[0][0]
    return node if type(node).__name__ in _PRODUCTS else None


_VIEWS = ("ViewBackward0", "UnsafeViewBackward0")
_PRODUCTS = ("AddmmBackward0", "MmBackward0")


def _fits(p: torch.Tensor) -> bool:
    """Whether autograd would add up its gradients in its own dtype, unseen."""
    return type(p) is nn.Parameter and p.requires_grad and p.grad_dtype is p.dtype


def _add(p: torch.Tensor, grad: torch.Tensor) -> None:
    if p.grad is None:
        p.grad = grad
    else:
        p.grad.add_(grad)


# ---- backward passes of a stage in two parts
#
# The weights' part is put off where that computes nothing twice. A node of the graph that leads both to the
# stage's inputs and to weights (a matrix product, say) runs twice, each time for one of them, and the
# gradient that came to it is kept in between. Weights that cannot be parted so get their gradients with the
# inputs.


_Edge = tuple[Node, int]
_Grads = Sequence[torch.Tensor | None]


class _Parted(NamedTuple):
    """A node that is to run again, its edges to weights, and the gradients that came to it."""

    node: Node
    edges: list[_Edge]
    came: list[torch.Tensor | None]


def backward_for_inputs(
    roots: Sequence[GradientEdge],
    grads: Sequence[torch.Tensor],
    leaves: Sequence[torch.Tensor],
    dry: bool = False,
) -> Callable[[], None]:
    """Add to the gradients of a stage's inputs.

    Args:
        roots, grads: the stage's outputs, and their gradients.
        leaves: its inputs.
        dry: operations were given aliases of the weights, which are passed over: gradients then come to the
            weights in the order in which they do in a real run.

    Returns:
        what adds to the gradients of its weights.
    """
    if not roots:
        return lambda: None
    if not leaves:
        return lambda: torch.autograd.backward(tuple(roots), tuple(grads))
    way, weights = _explored((edge.node for edge in roots), {get_gradient_edge(x).node for x in leaves})
    beside = [weights[edge.node] for edge in roots if not way[edge.node]]  # outputs of weights alone
    parted, at_once = _parted(way, weights, set().union(*beside), dry)
    handles = [part.node.register_prehook(_keeper(part.came)) for part in parted]
    try:
        inputs: Any = [*leaves, *(node.variable for node in at_once)]  # type: ignore[attr-defined]
        torch.autograd.backward(tuple(roots), tuple(grads), retain_graph=bool(parted), inputs=inputs)
    finally:
        for handle in handles:
            handle.remove()
    return lambda: _backward_for_weights(parted)


def _keeper(came: list[torch.Tensor | None]) -> Callable[[_Grads], None]:
    return lambda grads: came.extend(grads)


def _backward_for_weights(parted: list[_Parted]) -> None:
    roots: list[GradientEdge] = []
    root_grads: list[torch.Tensor] = []
    while parted:
        node, edges, came = parted.pop()
        starts = [(GradientEdge(node, i), g) for i, g in enumerate(came) if g is not None]
        if starts:
            targets = tuple(GradientEdge(to, place) for to, place in edges)
            outs = tuple(edge for edge, _ in starts)
            grads = torch.autograd.grad(outs, targets, tuple(g for _, g in starts), allow_unused=True)
            roots += [edge for edge, g in zip(targets, grads, strict=True) if g is not None]
            root_grads += [g for g in grads if g is not None]
    if roots:
        torch.autograd.backward(tuple(roots), tuple(root_grads))


def _explored(
    roots: Iterable[Node], inputs: set[Node]
) -> tuple[dict[Node, bool], dict[Node, frozenset[Node]]]:
    """For each node of a graph whether it leads to inputs, and to which other leaves."""
    way: dict[Node, bool] = {}
    weights: dict[Node, frozenset[Node]] = {}
    stack = [(node, False) for node in roots]
    while stack:
        node, done = stack.pop()
        if node in way and not done:
            continue
        beyond = [to for to, _ in node.next_functions if to is not None]
        if not done and beyond:
            stack.append((node, True))
            stack += [(to, False) for to in beyond if to not in way]
            continue
        way[node] = node in inputs or any(way[to] for to in beyond)
        leaf = {node} if hasattr(node, "variable") and node not in inputs else set()
        weights[node] = frozenset(leaf.union(*(weights[to] for to in beyond)))
    return way, weights


def _parted(
    way: dict[Node, bool], weights: dict[Node, frozenset[Node]], at_once: set[Node], dry: bool
) -> tuple[list[_Parted], set[Node]]:
    """Which nodes run again for which edges, and the weights that are not put off: those given, and more."""
    edges: dict[Node, list[_Edge]] = {}
    reached: dict[Node, set[Node]] = {}  # for each node off the way, the nodes of the way that lead to it
    for node, on in way.items():
        if not on:
            continue
        for to, place in node.next_functions:
            if to is None or way[to] or not weights[to]:
                continue
            while dry and to.name() == "AliasBackward0" and (behind := to.next_functions[0])[0] is not None:
                to, place = behind[0], behind[1]
            edges.setdefault(node, []).append((to, place))
            stack = [to]
            while stack:
                here = stack.pop()
                if node not in reached.setdefault(here, set()):
                    reached[here].add(node)
                    stack += [beyond for beyond, _ in here.next_functions if beyond is not None]
    for node, beside in edges.items():
        for to, _ in beside:
            # a custom function may do all its work both times; a hook of a weight would run twice
            if isinstance(node, BackwardCFunction) or len(reached[to]) > 1 or _is_hooked(to):
                at_once |= weights[to]
    size = -1
    while size != len(at_once):  # all uses of a weight, or none
        size = len(at_once)
        for beside in edges.values():
            for to, _ in beside:
                if weights[to] & at_once:
                    at_once |= weights[to]
    parted = []
    for node, beside in edges.items():
        late = list(dict.fromkeys(edge for edge in beside if not weights[edge[0]] & at_once))
        if late:
            parted.append(_Parted(node, late, []))
    return parted, at_once


def _is_hooked(node: Node) -> bool:
    leaf: torch.Tensor | None = getattr(node, "variable", None)
    return leaf is not None and bool(gradient_hooks(leaf))
