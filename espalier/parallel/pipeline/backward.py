"""Backward passes of a stage: whole, or first for its inputs and later for its weights.

The weights' part is put off where that computes nothing twice. A node of the graph that leads both to the
stage's inputs and to weights (a matrix product, say) runs twice, each time for one of them, and the gradient
that came to it is kept in between. Weights that cannot be parted so get their gradients with the inputs.

Qi et al. 2024 (Zero Bubble Pipeline Parallelism).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import GradientEdge, Node, get_gradient_edge

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
    found: list[torch.Tensor] = []
    while parted:
        node, edges, came = parted.pop()
        given = [(GradientEdge(node, i), g) for i, g in enumerate(came) if g is not None]
        if given:
            targets = tuple(GradientEdge(to, place) for to, place in edges)
            outs = tuple(edge for edge, _ in given)
            grads = torch.autograd.grad(outs, targets, tuple(g for _, g in given), allow_unused=True)
            roots += [edge for edge, g in zip(targets, grads, strict=True) if g is not None]
            found += [g for g in grads if g is not None]
    if roots:
        torch.autograd.backward(tuple(roots), tuple(found))


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
        own = {node} if hasattr(node, "variable") and node not in inputs else set()
        weights[node] = frozenset(own.union(*(weights[to] for to in beyond)))
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
    found = []
    for node, beside in edges.items():
        late = list(dict.fromkeys(edge for edge in beside if not weights[edge[0]] & at_once))
        if late:
            found.append(_Parted(node, late, []))
    return found, at_once


def _is_hooked(node: Node) -> bool:
    return bool(getattr(getattr(node, "variable", None), "_backward_hooks", None))


__all__ = ["backward_for_inputs"]
