"""Collectives of a traced graph put together and begun early.

What a graph of AOTAutograd asks of the network stands in it as operators in a chain (see
``espalier.comm.custom_ops``). Those that do not wait for one another, of one kind, axis and dtype, become one
message; each message begins as soon as what it carries is there, and is waited for where its values are used.

All ranks must come to the same messages in the same order, though their graphs may differ: one rank's addend
is another's zero, which hangs on nothing. So the ranks tell each other, once for a graph, what hangs on what
(Li et al. 2020, "PyTorch Distributed", buckets gradients likewise, there by one order for all).
"""

from __future__ import annotations

import json
import math
import operator
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Any, NamedTuple, cast

import torch
from torch import fx

from espalier.comm.backend import Work, as_it_lies, pad_to
from espalier.comm.collectives import all_reduce_, gathering, start_gather, start_sum
from espalier.comm.control import OutOfBand
from espalier.comm.custom_ops import defined, mesh_of, parsed
from espalier.comm.ring import GATHERED, SUMMED
from espalier.device import is_accelerator
from espalier.layout import chunk_bounds
from espalier.mesh import Mesh
from espalier.texts import dtype_name
from espalier.torch_private import OpOverload, disable_modes, keep_order, schema_of, with_effects
from espalier.trees import leaves

# ---- several collectives of a compiled graph as one, begun and ended apart
#
# ``torch.ops.espalier.begin_bucket`` starts one message for several tensors, which travel one behind the
# other; ``end_bucket`` waits and gives what each collective by itself would have given. What the graph does
# in between goes on meanwhile. Both are effects, in the order in which they stand


class Part(NamedTuple):
    """One collective of a bucket.

    Attributes:
        constants: what the collective is told beside tensor, mesh and axis.
        shape: of what it gives on this rank.
    """

    constants: tuple[Any, ...]
    shape: tuple[int, ...]


def begin(
    op: str, xs: Sequence[torch.Tensor], mesh: Mesh, axis: int, parts: Sequence[Part]
) -> Work[list[torch.Tensor]]:
    """Start one collective for tensors of one dtype, in place of one for each; gives the results.

    Args:
        op: ``all_reduce`` (sums), ``all_gather`` or ``reduce_scatter``, as in ``espalier.comm.collectives``.
    """
    return {"all_reduce": _summing, "all_gather": _gathering, "reduce_scatter": _scattering}[op](
        xs, mesh, axis, parts
    )


def _summing(xs: Any, mesh: Mesh, axis: int, parts: Sequence[Part]) -> Work[list[torch.Tensor]]:
    flat = _behind_each_other(xs) if len(xs) > 1 else xs[0].clone(memory_format=torch.contiguous_format)
    # on the CPU what is not beside the program adds in the order of coordinates, as by itself
    work = all_reduce_(flat, mesh, axis, beside=is_accelerator(flat.device))
    return Work((work,), lambda: [flat] if len(xs) == 1 else _apart(flat, [part.shape for part in parts]))


def _gathering(xs: Any, mesh: Mesh, axis: int, parts: Sequence[Part]) -> Work[list[torch.Tensor]]:
    if len(xs) == 1:
        work = gathering(xs[0], mesh, axis, *parts[0].constants)
        return Work(rest=lambda: [work.wait()])
    n, cuts = mesh.shape[axis], [part.constants for part in parts]
    pieces = [pad_to(x, dim, -(-size // n)) for x, (dim, size) in zip(xs, cuts, strict=True)]
    own = _behind_each_other(pieces)
    rows = own.new_empty(n, own.numel())
    filled, shapes = start_gather(rows, own, mesh, axis), [piece.shape for piece in pieces]

    def together() -> list[torch.Tensor]:
        by_rank = [_views(row, shapes) for row in rows.unbind(0)]
        outs = []
        for i, (dim, size) in enumerate(cuts):
            held = [views[i].narrow(dim, 0, chunk_bounds(size, n, at)[1]) for at, views in enumerate(by_rank)]
            outs.append(torch.cat(held, dim))
        return outs

    return Work((filled,), together)


def _scattering(xs: Any, mesh: Mesh, axis: int, parts: Sequence[Part]) -> Work[list[torch.Tensor]]:
    n, dims = mesh.shape[axis], [part.constants[0] for part in parts]
    shapes = [[*x.shape[:d], -(-x.shape[d] // n), *x.shape[d + 1 :]] for x, d in zip(xs, dims, strict=True)]
    rows = torch.stack(
        [
            _behind_each_other(
                [
                    pad_to(x.narrow(dim, *chunk_bounds(x.shape[dim], n, at)), dim, shape[dim])
                    for x, dim, shape in zip(xs, dims, shapes, strict=True)
                ]
            )
            for at in range(n)
        ]
    )
    summing = start_sum(rows, mesh, axis)

    def own() -> list[torch.Tensor]:
        flat = torch.empty_like(rows[0])
        summing.wait(flat)
        pieces = zip(_views(flat, shapes), dims, parts, strict=True)
        return [piece.narrow(dim, 0, part.shape[dim]).clone() for piece, dim, part in pieces]

    return Work(rest=own)


def _behind_each_other(xs: Sequence[torch.Tensor]) -> torch.Tensor:
    return torch.cat([as_it_lies(x).reshape(-1) for x in xs])


def _views(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    parts = torch.split(flat, [math.prod(shape) for shape in shapes])
    return [part.view(tuple(shape)) for part, shape in zip(parts, shapes, strict=True)]


def _apart(flat: torch.Tensor, shapes: Sequence[Sequence[int]]) -> list[torch.Tensor]:
    # each in memory of its own: a compiler may write over one and not know of the others
    return [view.clone() for view in _views(flat, shapes)]


# ---- as operators


@lru_cache
def operators() -> tuple[Any, Any]:
    """The two operators.

    ``begin_bucket`` gives a number, as a tensor on the CPU, by which ``end_bucket`` knows what it waits for.
    """
    begins = "begin_bucket(Tensor[] xs, str mesh, int axis, str op, str parts) -> Tensor"
    ends = "end_bucket(Tensor number, str mesh, str parts, str dtype, str device) -> Tensor[]"
    pair = defined(begins, _begin, _number), defined(ends, _end, _shaped)
    for one in pair:
        keep_order(one)
    return pair


def _begin(xs: list[torch.Tensor], mesh: str, axis: int, op: str, parts: str) -> torch.Tensor:
    on = mesh_of(mesh)
    work = begin(op, xs, on, axis, _parts(parts))
    on.under_way[id(work)] = work
    return torch.tensor(id(work), dtype=torch.int64)


def _end(number: torch.Tensor, mesh: str, parts: str, dtype: str, device: str) -> list[torch.Tensor]:
    done: list[torch.Tensor] = mesh_of(mesh).under_way.pop(int(number)).wait()
    return done


def _number(xs: list[torch.Tensor], mesh: str, axis: int, op: str, parts: str) -> torch.Tensor:
    return torch.empty((), dtype=torch.int64, device="cpu")


def _shaped(number: torch.Tensor, mesh: str, parts: str, dtype: str, device: str) -> list[torch.Tensor]:
    kind = getattr(torch, dtype)
    return [torch.empty(part.shape, dtype=kind, device=device) for part in _parts(parts)]


def _parts(words: str) -> list[Part]:
    return [Part(*part) for part in parsed(words)]


# ---- graphs

_LIMIT = 600.0  # seconds in which all ranks must have compiled their graph
_PUT_TOGETHER = {"all_reduce": [(), ("sum",)], "all_gather": None, "reduce_scatter": None}
Groups = list[list[int]]  # for each message the numbers of the collectives in it


class Call(NamedTuple):
    """A collective of a graph.

    Attributes:
        key: what must be equal for two to travel together; None: it goes by itself.
        nbytes: of what it takes or gives, whichever is more.
    """

    node: fx.Node
    name: str
    key: tuple[Any, ...] | None
    nbytes: int


class Bucketing:
    """Rewrites the graphs of one compiled region.

    Args:
        limit: the most bytes that several tensors of one message have together.
    """

    def __init__(self, limit: float) -> None:
        self._limit = limit
        self._agreed: dict[str, Groups] = {}

    def __call__(self, graph: fx.Graph) -> None:
        """Rewrite a graph as AOTAutograd gives it to a compiler, forward or backward."""
        calls = _calls(graph)
        if not any(call.key for call in calls):
            return
        before = _order_kept(graph)
        needs = _needs(graph, calls, before)
        keys = [call.key for call in calls if call.key]
        groups = [[i] for i in range(len(calls))]
        if len(set(keys)) < len(keys):
            groups = self._groups(graph, calls, needs) or groups
        _Rewriting(graph, calls, before).write(groups)

    def _groups(self, graph: fx.Graph, calls: list[Call], needs: list[int]) -> Groups | None:
        """What travels together; None where the ranks cannot agree."""
        meshes = [_mesh(call) for call in calls if call.name]
        whole = max(meshes, key=lambda mesh: mesh.size())
        if not whole.is_member or any(set(mesh.ranks) - set(whole.ranks) for mesh in meshes):
            return None
        program = json.dumps([is_backward(graph), [_in_words(call) for call in calls]])
        known = self._agreed.get(program)
        if known is not None and _possible(known, needs):
            # one rank alone may have to compile again: it must come to what all have agreed on
            return known
        all_said = said_of_graph(whole, program, [needs, [call.nbytes for call in calls]])
        if all_said is None:
            return None
        needs_of, sizes = zip(*all_said, strict=True)
        anywhere = [_any_of(masks) for masks in zip(*needs_of, strict=True)]
        largest = list(map(max, zip(*sizes, strict=True)))
        groups = self._agreed[program] = _together(
            [call.key for call in calls], anywhere, largest, self._limit
        )
        return groups


def is_backward(graph: fx.Graph) -> bool:
    """Whether a graph of AOTAutograd is a backward pass."""
    return any(n.op == "placeholder" and n.name.startswith("tangents") for n in graph.nodes)


def said_of_graph(mesh: Mesh, program: str, own: Any) -> list[Any] | None:
    """What each rank says of the graph that all compile; None where it is not the same program on all."""
    with disable_modes():
        talk = OutOfBand(mesh, _LIMIT, "compiles")
        all_said = talk.exchange(json.dumps([program, own]).encode(), "compiles a graph")
    programs, said = zip(*map(json.loads, all_said), strict=True)
    return list(said) if set(programs) == {program} else None


def _calls(graph: fx.Graph) -> list[Call]:
    """The effects of a graph, in order; none where they are no single chain."""
    effect, calls, token = with_effects(), [], None
    for node in graph.find_nodes(op="call_function", target=effect):
        before = node.args[0]
        if token is not None and before is not token:
            return []
        token = next((user for user in node.users if user.args[1] == 0), None)
        calls.append(_call(node))
    return calls


def _call(node: fx.Node) -> Call:
    _, called, *rest = node.args
    full = schema_of(called).name if isinstance(called, OpOverload) else ""
    space, _, name = full.partition("::")
    if space == "espalier" and name in (GATHERED, SUMMED):
        return Call(node, name, None, 0)
    if space != "espalier" or len(rest) != 4:
        return Call(node, "", None, 0)
    x, mesh, axis, constants = cast("tuple[fx.Node, str, int, str]", rest)
    value = x.meta["val"]
    alike = _PUT_TOGETHER.get(name, [])
    fits = value.is_floating_point() and (alike is None or parsed(constants) in alike)
    key = (name, mesh, axis, value.dtype) if fits else None
    return Call(node, name, key, max(value.nbytes, _given(node).nbytes))


def _given(node: fx.Node) -> Any:
    """What a collective gives, without values; whether anything takes it may hang on the rank."""
    return node.meta["val"][1]


def _mesh(call: Call) -> Mesh:
    return mesh_of(call.node.args[3])  # type: ignore[arg-type]


def _in_words(call: Call) -> str:
    """What all ranks say of a collective alike."""
    if not call.name:
        return str(call.node.args[1])
    (x, *_) = leaves(call.node.args[2], fx.Node)
    dtype = x.meta["val"].dtype
    return f"{call.name} {_mesh(call).names} {call.node.args[4]} {dtype} {call.key is not None}"


def _order_kept(graph: fx.Graph) -> dict[fx.Node, list[fx.Node]]:
    """For nodes that must stay behind others without taking anything from them: those others.

    Random numbers are drawn in one order; what writes to memory waits for all before it, and all wait for it.
    """
    before: dict[fx.Node, list[fx.Node]] = {}
    drawn: list[fx.Node] = []
    written: list[fx.Node] = []
    since: list[fx.Node] = []
    effect = with_effects()
    for node in graph.nodes:
        if node.op in ("placeholder", "output") or node.target is effect:
            continue
        schema = schema_of(node.target) if isinstance(node.target, OpOverload) else None
        tags = getattr(node.target, "tags", ())
        if written:
            before.setdefault(node, []).extend(written)
        if torch.Tag.nondeterministic_seeded in tags:
            before.setdefault(node, []).extend(drawn)
            drawn = [node]
        if schema is not None and schema.is_mutable:
            before.setdefault(node, []).extend(since)
            written, since = [node], []
        since.append(node)
    return before


def _needs(graph: fx.Graph, calls: list[Call], before: dict[fx.Node, list[fx.Node]]) -> list[int]:
    """For each effect those that must have ended before it, as bits; the chain itself left aside."""
    number = {call.node: i for i, call in enumerate(calls)}
    masks: dict[fx.Node, int] = {}
    needs, blocked = [], 0
    for node in graph.nodes:
        at = number.get(node)
        sources = (
            node.all_input_nodes if at is None else [n for n in node.all_input_nodes if n is not node.args[0]]
        )
        mask = 0
        for source in (*sources, *before.get(node, ())):
            mask |= masks[source]
        if at is not None:
            # of an effect that is none of ours nobody knows what it does: all before it, and all behind
            mask = mask | blocked if calls[at].name else (1 << at) - 1
            needs.append(mask)
            blocked |= 0 if calls[at].name else 1 << at
            mask |= 1 << at
        masks[node] = mask
    return needs


def _any_of(masks: Iterable[int]) -> int:
    union = 0
    for mask in masks:
        union |= mask
    return union


def _together(keys: Sequence[Any], needs: Sequence[int], sizes: Sequence[int], limit: float) -> Groups:
    """Messages in an order in which each has what it needs: every collective joins the first that it can."""
    needs = _closed(needs)
    groups: Groups = []
    for i, key in enumerate(keys):
        held = [sum(1 << j for j in group) for group in groups]
        behind = max((at + 1 for at, mask in enumerate(held) if mask & needs[i]), default=0)
        for group in groups[behind:]:
            fits = sizes[i] + sum(sizes[j] for j in group) <= limit
            if key is not None and keys[group[0]] == key and fits:
                group.append(i)
                break
        else:
            groups.append([i])
    return groups


def _closed(needs: Sequence[int]) -> list[int]:
    """With what is needed by what is needed; the ranks together may need what none needs alone."""
    closed: list[int] = []
    for mask in needs:
        closed.append(mask | _any_of(closed[j] for j in range(mask.bit_length()) if mask >> j & 1))
    return closed


def _possible(groups: Groups, needs: Sequence[int]) -> bool:
    done = 0
    for group in groups:
        if any(needs[i] & ~done for i in group):
            return False
        done |= _any_of(1 << i for i in group)
    return True


class _Rewriting:
    """A graph with its collectives written anew, as messages begun and ended."""

    def __init__(self, graph: fx.Graph, calls: list[Call], before: dict[fx.Node, list[fx.Node]]) -> None:
        self._graph, self._calls, self._before = graph, calls, before
        self._begun: list[fx.Node] = []  # what starts each message, in order
        self._new_nodes: list[fx.Node] = []

    def write(self, groups: Groups) -> None:
        """Write the messages, in this order, in place of the collectives."""
        first, last = self._calls[0].node, self._calls[-1].node
        (output,) = self._graph.find_nodes(op="output")
        token: Any = first.args[0]
        final = next((user for user in last.users if user.args[1] == 0), None)
        self._token_meta = None if final is None else final.meta.get("val")
        with self._graph.inserting_before(output):
            for group in groups:
                token = self._message([self._calls[i] for i in group], token)
        if final is not None:
            final.replace_all_uses_with(token)
        for call in reversed(self._calls):
            for user in list(call.node.users):
                assert not user.users, "what a collective gave is used, and was not put in its place"
                self._graph.erase_node(user)
            self._graph.erase_node(call.node)
        self._settle(output)

    def _message(self, calls: list[Call], token: Any) -> fx.Node:
        effect, meta = with_effects(), self._token_meta
        if calls[0].key is None:
            (old,) = (call.node for call in calls)
            message = self._new(effect, (token, *old.args[1:]), old.meta.get("val"))
            message.kwargs = old.kwargs
            self._begun.append(message)
            for user in list(old.users):
                if user.args[1] != 0:
                    self._replace(user, self._item(message, user.args[1], user.meta.get("val")))
            return self._item(message, 0, meta)
        begin, end = operators()
        _, _, _, mesh, axis, _ = calls[0].node.args
        values = [_given(call.node) for call in calls]
        parts = repr(
            [
                (parsed(call.node.args[5]), tuple(value.shape))  # type: ignore[arg-type]
                for call, value in zip(calls, values, strict=True)
            ]
        )
        xs = [call.node.args[2] for call in calls]
        with values[0].fake_mode:
            number_meta = torch.empty((), dtype=torch.int64)
        arguments = (xs, mesh, axis, calls[0].name, parts)
        begun = self._new(effect, (token, begin, *arguments), (meta, number_meta))
        self._begun.append(begun)
        between, number = self._item(begun, 0, meta), self._item(begun, 1, number_meta)
        dtype, device = dtype_name(values[0].dtype), str(values[0].device)
        ended = self._new(effect, (between, end, number, mesh, parts, dtype, device), (meta, values))
        everything = self._item(ended, 1, values)
        for i, call in enumerate(calls):
            for result in [user for user in call.node.users if user.args[1] == 1]:
                self._replace(result, self._item(everything, i, values[i]))
        return self._item(ended, 0, meta)

    def _item(self, node: fx.Node, index: Any, value: Any) -> fx.Node:
        return self._new(operator.getitem, (node, index), value)

    def _new(self, target: Any, args: Any, value: Any) -> fx.Node:
        node = self._graph.call_function(target, args)
        node.meta["val"] = value
        self._new_nodes.append(node)
        return node

    def _replace(self, old: fx.Node, new: fx.Node) -> None:
        new.meta.update({key: value for key, value in old.meta.items() if key != "val"})
        old.replace_all_uses_with(new)
        if old in self._before:
            self._before[new] = self._before.pop(old)
        for sources in self._before.values():
            sources[:] = [new if source is old else source for source in sources]

    def _settle(self, output: fx.Node) -> None:
        """Bring the nodes into an order: as it was, but messages begin as soon as they can."""
        written = {node for node in self._graph.nodes if node.op not in ("placeholder", "output")}
        new = set(self._new_nodes)
        old = [node for node in self._graph.nodes if node in written and node not in new]
        order: dict[fx.Node, None] = {}

        def sources(node: fx.Node) -> list[fx.Node]:
            return [n for n in (*node.all_input_nodes, *self._before.get(node, ())) if n in written]

        def bring(wanted: fx.Node) -> None:
            stack = [wanted]
            while stack:
                missing = [n for n in sources(stack[-1]) if n not in order]
                if missing:
                    stack += reversed(missing)
                elif (node := stack.pop()) not in order:
                    order[node] = None

        waiting = list(reversed(self._begun))
        for node in (*old, *self._new_nodes):
            while waiting and all(n in order for n in self._carried(waiting[-1]) if n in written):
                bring(waiting.pop())
            bring(node)
        for node in order:
            output.prepend(node)

    def _carried(self, begun: fx.Node) -> list[fx.Node]:
        return [n for n in (*begun.all_input_nodes, *self._before.get(begun, ())) if n is not begun.args[0]]
