"""Asynchronous tensor parallelism in a traced graph.

Products that wait for a gathered sequence, and sums that wait for products, go round a ring of ranks piece by
piece (``espalier.comm.ring``; Wang et al. 2023, Overlap Communication with Dependent Computation via
Decomposition). A graph of AOTAutograd multiplies matrices: a sequence that was gathered is seen as rows, and
multiplied; the sum of some products is seen as a sequence, whose pieces are summed over the ranks. Where a
cast stands between a product and its message, pieces travel in the message's dtype, as those of layers do.
"""

from __future__ import annotations

import json
import operator
from typing import Any, NamedTuple

import torch
from torch import fx

from espalier.comm.custom_ops import mesh_of, parsed
from espalier.comm.ring import SEQUENCE, operators
from espalier.tensor.bucketing import is_backward, said_of_graph
from espalier.torch_private import OpOverload, schema_of, with_effects

_ATEN = torch.ops.aten
_ROWS = frozenset([_ATEN.view.default, _ATEN._unsafe_view.default, _ATEN.reshape.default])
_CASTS = frozenset([_ATEN._to_copy.default, torch.ops.prims.convert_element_type.default])
_PRODUCT, _WITH_BIAS, _SUM = _ATEN.mm.default, _ATEN.addmm.default, _ATEN.add.Tensor
_PRODUCTS = (_PRODUCT, _WITH_BIAS)
# by which a matrix comes to be: nothing hangs on when it does
_TURNS = _ROWS | _CASTS | {_ATEN.t.default, _ATEN.permute.default, _ATEN.transpose.int, _ATEN.detach.default}


class _Spot(NamedTuple):
    """A collective of a graph, and the products that may go round with it.

    Attributes:
        node: of the collective, an effect.
        products: of matrices, each of which stands for one of its pieces.
    """

    node: fx.Node
    gathers: bool
    products: list[fx.Node]


class RingRewriting:
    """Rewrites the graphs of one compiled region. All ranks compile it; those that come again, alone."""

    def __init__(self) -> None:
        self._agreed: dict[str, list[int]] = {}

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph as AOTAutograd gives it to a compiler, forward or backward."""
        effects = graph.find_nodes(op="call_function", target=with_effects())
        spots = [spot for node in effects if (spot := _spot(node)) is not None]
        if not spots:
            return
        found = [len(spot.products) for spot in spots]
        for spot, agreed in zip(spots, self._common(graph, spots, found), strict=True):
            if agreed and agreed == len(spot.products):
                _Round(graph, spot).write()

    def _common(self, graph: fx.Graph, spots: list[_Spot], found: list[int]) -> list[int]:
        """Of each spot how many products it has, 0 where the ranks differ: they must send the same."""
        program = json.dumps([is_backward(graph), *map(_in_words, spots)])
        if program not in self._agreed:
            whole = max((mesh_of(spot.node.args[3]) for spot in spots), key=lambda mesh: mesh.size())  # type: ignore[arg-type]
            counts = said_of_graph(whole, program, found) if whole.is_member else None
            by_spot = [set(of_one) for of_one in zip(*(counts or []), strict=True)]
            self._agreed[program] = [n if by_spot and by_spot[i] == {n} else 0 for i, n in enumerate(found)]
        return self._agreed[program]


def _spot(node: fx.Node) -> _Spot | None:
    """What a collective is: a sequence gathered, or summed and cut; None of others."""
    _, called, *rest = node.args
    name = schema_of(called).name if isinstance(called, OpOverload) else ""
    if name not in ("espalier::all_gather", "espalier::reduce_scatter"):
        return None
    x, mesh, axis, constants = rest
    value, n = x.meta["val"], mesh_of(mesh).shape[axis]  # type: ignore[union-attr, arg-type, index]
    dim, *_ = parsed(constants)  # type: ignore[arg-type]
    gathers = name.endswith("gather")
    if dim != SEQUENCE or value.ndim != SEQUENCE + 2 or not value.is_floating_point() or n == 1:
        return None
    products = _of_gathered(node) if gathers else _of_summed(x)  # type: ignore[arg-type]
    return _Spot(node, gathers, products)


def _in_words(spot: _Spot) -> list[Any]:
    _, _, _, mesh, axis, constants = spot.node.args
    return [spot.gathers, mesh_of(mesh).names, axis, constants]  # type: ignore[arg-type]


def _of_gathered(node: fx.Node) -> list[fx.Node]:
    """The products of a gathered sequence, seen as rows, by matrices that are there as it is gathered."""
    products = []
    for given in (user for user in node.users if user.args[1] == 1):
        width = given.meta["val"].shape[-1]
        cast = [x for x in given.users if _is_cast(x)]
        for x in (given, *cast):
            seen = [r for r in x.users if r.target in _ROWS and len(_shape(r)) == 2 and _shape(r)[1] == width]
            again = [c for rows in seen if x is given for c in rows.users if _is_cast(c)]
            for rows in (*seen, *again):
                products += [user for user in rows.users if _multiplies(user, rows, node)]
    return products


def _is_cast(node: fx.Node) -> bool:
    """Whether it changes a dtype, and nothing else."""
    if node.target not in _CASTS:
        return False
    before, after = node.all_input_nodes[0].meta["val"], node.meta["val"]
    return bool(before.is_floating_point() and after.is_floating_point() and before.device == after.device)


def _multiplies(node: fx.Node, rows: fx.Node, gathering: fx.Node) -> bool:
    """Whether a node is a product of rows by a matrix that is there as they are gathered."""
    known = node.target in _PRODUCTS and not node.kwargs
    return known and node.args[-2] is rows and _is_there(node.args[-1], gathering)


def _is_there(matrix: Any, node: fx.Node) -> bool:
    """Whether a matrix is made of what stands before a node, by steps that may be done there."""
    waiting = [matrix]
    while waiting:
        x = waiting.pop()
        if x < node:
            continue
        if x.target not in _TURNS:
            return False
        waiting += x.all_input_nodes
    return True


def _of_summed(x: fx.Node) -> list[fx.Node]:
    """The products whose sum a sequence is, and nothing else uses; none where there is more in the sum."""
    products, waiting = [], [x]
    while waiting:
        node = waiting.pop()
        if node.target is _SUM and not node.kwargs:
            a, b = node.args
            alike = isinstance(a, fx.Node) and isinstance(b, fx.Node) and _shape(a) == _shape(b)
            if len(node.users) > 1 or not alike:
                return []
            waiting += [b, a]  # type: ignore[list-item]
        elif (product := _product_of(node, x)) is not None:
            products.append(product)
        else:
            return []
    # a bias is added before the cast
    return [] if _are_cast(products, x) and any(p.target is _WITH_BIAS for p in products) else products


def _are_cast(products: list[fx.Node], x: fx.Node) -> bool:
    """Whether a sum has another dtype than some of its products."""
    return {product.meta["val"].dtype for product in products} != {x.meta["val"].dtype}


def _product_of(node: fx.Node, x: fx.Node) -> fx.Node | None:
    """The product that an addend of a sum ``x`` is, seen as a sequence, and cast to the dtype of the sum."""
    if node.meta["val"].dtype is not x.meta["val"].dtype:
        return None
    casts = 0
    while node.target in _ROWS or _is_cast(node):
        source = node.args[0]
        casts += node.target in _CASTS
        if len(node.users) > 1 or casts > 1 or not isinstance(source, fx.Node):
            return None
        node = source
    fits = node.target in _PRODUCTS and not node.kwargs and len(node.users) == 1
    if not fits or _shape(node)[1] != _shape(x)[2]:
        return None
    is_biased = node.target is _WITH_BIAS
    return None if is_biased and len(_shape(node.args[0])) != 1 else node  # type: ignore[arg-type]


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


class _Round:
    """One spot, written anew."""

    def __init__(self, graph: fx.Graph, spot: _Spot) -> None:
        self._graph, self._spot = graph, spot
        _, _, self._x, self._mesh, self._axis, self._constants = spot.node.args

    def write(self) -> None:
        """Write it in place of the collective."""
        (self._gather if self._spot.gathers else self._sum)()

    def _gather(self) -> None:
        node, products = self._spot.node, self._spot.products
        weights = [product.args[-1] for product in products]
        biases = [self._bias(product) for product in products]
        for operand in (*weights, *biases):
            if operand is not None:
                self._bring(operand)
        _, size = parsed(self._constants)  # type: ignore[arg-type]
        (given,) = (user for user in node.users if user.args[1] == 1)
        whole = given.meta["val"]
        values = [product.meta["val"] for product in products]
        outs = [whole.new_empty(*whole.shape[:2], out.shape[1], dtype=out.dtype) for out in values]
        arguments = (self._x, self._mesh, self._axis, size, weights, biases)
        everything = self._effect(operators()[0], arguments, [whole, *outs])
        with self._graph.inserting_after(everything):
            first = self._new(operator.getitem, (everything, 0), whole)
        given.replace_all_uses_with(first)
        last = first
        for i, (product, out) in enumerate(zip(products, outs, strict=True), start=1):
            with self._graph.inserting_after(last):
                last = self._new(operator.getitem, (everything, i), out)
            with self._graph.inserting_after(last):
                rows = product.meta["val"]
                last = self._new(_ATEN.reshape.default, (last, list(rows.shape)), rows)
            if product.target is _WITH_BIAS and biases[i - 1] is None:
                with self._graph.inserting_before(product):
                    biased = self._new(_SUM, (last, product.args[0]), rows)
                product.replace_all_uses_with(biased)
            else:
                product.replace_all_uses_with(last)
            self._drop(product)
        self._graph.erase_node(given)
        self._graph.erase_node(node)

    def _sum(self) -> None:
        node, x = self._spot.node, self._x
        assert isinstance(x, fx.Node)
        sequence = _shape(x)
        xs, weights, biases = [], [], []
        for product in self._spot.products:
            *bias, rows, weight = product.args
            weights.append(weight)
            biases += bias
            value = rows.meta["val"]  # type: ignore[union-attr]
            shape = [*sequence[:2], value.shape[1]]
            with self._graph.inserting_before(node):
                xs.append(self._new(_ATEN.reshape.default, (rows, shape), value.reshape(shape)))
        (given,) = (user for user in node.users if user.args[1] == 1)
        dtype = x.meta["val"].dtype if _are_cast(self._spot.products, x) else None
        arguments = (xs, self._mesh, self._axis, sequence[SEQUENCE], weights, biases, dtype)
        given.replace_all_uses_with(self._effect(operators()[1], arguments, given.meta["val"]))
        self._graph.erase_node(given)
        self._graph.erase_node(node)
        self._drop(x)

    def _bias(self, product: fx.Node) -> Any:
        """The vector that a product is added to, if it is there as the sequence is gathered."""
        bias = product.args[0]
        fits = product.target is _WITH_BIAS and len(_shape(bias)) == 1  # type: ignore[arg-type]
        return bias if fits and _is_there(bias, self._spot.node) else None

    def _drop(self, node: fx.Node) -> None:
        """Erase what nobody uses any more."""
        waiting = {node: None}
        while waiting:
            unused, _ = waiting.popitem()
            of_ours = unused.target in _ROWS | _CASTS or unused.target in (_SUM, *_PRODUCTS)
            if of_ours and not unused.users:
                waiting |= dict.fromkeys(unused.all_input_nodes)
                self._graph.erase_node(unused)

    def _effect(self, operation: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
        """The operation in the collective's place of the chain; gives the node of what it gives."""
        node = self._spot.node
        after = next((user for user in node.users if user.args[1] == 0), None)
        token = None if after is None else after.meta.get("val")
        with self._graph.inserting_before(node):
            effect = self._new(with_effects(), (node.args[0], operation, *arguments), (token, value))
            between = self._new(operator.getitem, (effect, 0), token)
            given = self._new(operator.getitem, (effect, 1), value)
        if after is not None:
            after.replace_all_uses_with(between)
            self._graph.erase_node(after)
        return given

    def _bring(self, x: Any) -> None:
        """Let a matrix be made before the collective."""
        if not x < self._spot.node:
            for source in x.all_input_nodes:
                self._bring(source)
            self._spot.node.prepend(x)

    def _new(self, target: Any, args: Any, value: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta["val"] = value
        return node
