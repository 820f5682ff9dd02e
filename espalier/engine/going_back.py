"""The backward pass of a loss that a pipeline computes.

The program's calls are done in the last stage, on each micro-batch: so nothing is computed twice. A loss that
is one of all rows (rows meet, as in contrastive losses, or are taken by their places; outputs of several
calls do) is none of micro-batches. It is computed of the output's value, on all ranks; and what goes through
the stages, micro-batch after micro-batch, is its gradient with respect to that (Gao et al., *Scaling Deep
Contrastive Learning Batch Size under Memory Limited Setup*, 2021).
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any, NamedTuple

import torch

from espalier.engine.accumulation import UnseenCountError, is_sum
from espalier.engine.kept import PARTS, Kept, captured, evaluated, in_order, wanting, with_writes
from espalier.engine.model_run import ModelRun
from espalier.engine.observing import Place
from espalier.engine.row_order import Beside, RowsMeetError, beside_rows
from espalier.parallel.pipeline.arguments import leaves, refilled
from espalier.parallel.pipeline.objects import closed, opened
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.observers import tell

Leaves = Mapping[int, torch.Tensor]  # by the ``id`` of what they stand for


class _Loss(NamedTuple):
    """A loss that goes back.

    Attributes:
        calls: all that it is made of, in order.
        beside: the tensors in it beside the output; ``trained``: those of them that want gradients.
        inputs: those of the model that want gradients.
        draws: whether it draws random numbers.
    """

    of: Kept
    calls: Sequence[Kept]
    beside: Sequence[torch.Tensor]
    trained: Sequence[torch.Tensor]
    inputs: Sequence[torch.Tensor]
    draws: bool

    @property
    def source(self) -> ModelRun:
        """The call of the model that it is made of."""
        return self.of._source

    def leaves(self) -> Leaves:
        """Leaves in the place of all that wants gradients beside the model."""
        return {id(x): x.detach().requires_grad_() for x in (*self.trained, *self.inputs)}


def gone_back(
    of: Kept, calls: Sequence[Kept], of_loss: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]
) -> tuple[torch.Tensor, Leaves]:
    """Forward and backward of a loss: its value, and the leaves whose gradients are to be handed on.

    Args:
        calls: all that it is made of, in order.
        of_loss: the tensors in it beside the output.
        inputs: those of the model that want gradients.
    """
    source, draws = of._source, any(one._is_drawn for one in calls)
    loss = _Loss(of, calls, of_loss, wanting(calls), inputs, draws)
    if not draws and source.may_be_whole() and any(type(x) is DTensor for x in loss.trained):
        return _of_whole(loss)
    known, form = source.known_losses, _form_of(source, calls)
    if sees := any(isinstance(source.made_by.get(id(x)), Place) for x in of_loss):
        refuse_sights(source.is_part or draws)
    if source.is_of_all and draws:
        raise TypeError(_DRAWS)
    may_be_of_all = (sees or source.is_cut()) and not draws
    if not sees and not source.is_of_all and (known.get(form, True) or not may_be_of_all):
        is_tried = may_be_of_all and form not in known
        try:
            with source.tried() if is_tried else nullcontext():
                out = _by_parts(loss, is_tried)
        except (RowsMeetError, UnseenCountError):  # on all ranks
            if not is_tried:
                raise
        else:
            known[form] = True
            return out
    out = _of_all(loss)
    if not sees and form not in known:
        known[form] = False
        tell(_OF_ALL)
    return out


def refuse_sights(is_refused: bool) -> None:
    """See that gradients go back through what hooks have seen.

    Raises:
        ValueError: they do not.
    """
    if is_refused:
        raise ValueError(
            "The loss hangs on what a forward hook has taken of a module, and draws random numbers, or each "
            "rank has rows of its own: in a pipeline its gradient does not come to the module then. Let the "
            "model's forward return it."
        )


def refuse_without_graph(of: Kept, calls: Sequence[Kept]) -> None:
    """See that a gradient goes through a loss, unless one has gone through another of these ``calls``.

    Raises:
        RuntimeError: none does.
    """
    source = of._source
    goes_on = source.all_want_gradients and all(x._step is None or x._step.state.grad for x in calls)
    if goes_on and _form_of(source, calls) in source.known_losses:
        return
    shapes = of._shapes()
    if isinstance(shapes, torch.Tensor) and not shapes.requires_grad:
        raise RuntimeError("backward() of what no gradient goes through: detached, or under no_grad().")


def _form_of(source: ModelRun, calls: Iterable[Kept]) -> Hashable:
    """By which losses are known that went back: what is done in them."""
    return source.rows(), *(_name(one) for one in calls)


def _name(one: Kept) -> Hashable:
    """Which call it is; of a method, its name."""
    if one._step is None:
        return None
    named = [x for x in one._step.args if isinstance(x, str)]
    return getattr(one._step.func, "__name__", ""), *named


def _by_parts(loss: _Loss, is_tried: bool) -> tuple[torch.Tensor, Leaves]:
    """The calls are done on each micro-batch, in the last stage.

    Raises:
        RowsMeetError: they are not to be; where it ``is_tried``, that they cannot is one, too.
    """
    source = loss.source
    if not source.is_whole and any(one._statistics() for one in loss.calls):
        raise RowsMeetError("The loss normalizes the batch, of which micro-batches have parts.")
    beside = _leaves_beside(loss)
    here = source.here((x for x in loss.beside if id(x) not in beside), in_last=True)
    by_row, rows_beside = _of_rows(
        loss.of, [x for x in loss.beside if id(x) not in beside and id(x) not in here]
    )
    share = 1.0 if _is_given(loss.calls) else source.share_of_loss
    replayed = partial(_replayed, loss.of, rows_beside, [*by_row], {**here, **beside}, share, is_tried)
    return source.train([*by_row.values()], replayed, beside, loss.draws), beside


def _is_given(calls: Sequence[Kept]) -> bool:
    """Whether a loss is made of a number that the model gives: of the rows of all ranks."""
    parts: set[int] = set()
    for one in calls:
        step = one._step
        if step is not None and not (step.func in PARTS and id(step.args[0]) in parts):
            continue
        parts.add(id(one))
        shapes = one._shapes()
        if isinstance(shapes, torch.Tensor) and not shapes.ndim:
            return True
    return False


def _of_rows(of: Kept, held: Sequence[torch.Tensor]) -> tuple[dict[int, torch.Tensor], Beside]:
    """Those that micro-batches have parts of, by ``id``, with the batch's rows as their first dim."""
    rows = of._source.rows()
    by_row = {
        id(x): x for x in held if not x.ndim or (x.shape[0] == rows and not isinstance(x, torch.nn.Parameter))
    }
    beside = Beside(frozenset(), {})
    if not of._source.is_whole:
        beside = beside_rows(of, rows)
        by_row |= {id(x): beside.by_rows(x, rows) for x in held if id(x) in {*beside.several, *beside.chosen}}
    return by_row, beside


def _leaves_beside(loss: _Loss) -> Leaves:
    """Leaves in the place of what wants gradients beside the model: inputs, and what a loss has of its own.

    Raises:
        RowsMeetError: they are rows of the batch, of which micro-batches have parts.
        ValueError: the ranks that make the loss do not have it.
    """
    source = loss.source
    _refuse_parts(loss.trained)
    rows = source.rows() if source.is_cut() else -1
    in_parts = [x for x in loss.trained if x.shape[:1] == (rows,) and not isinstance(x, torch.nn.Parameter)]
    if any(id(x) not in source.made_by or not source.is_whole for x in in_parts):
        raise RowsMeetError(_MORE)
    return loss.leaves()


def _refuse_parts(trained: Sequence[torch.Tensor]) -> None:
    """See that what wants gradients beside the model is whole on all ranks.

    Raises:
        ValueError: it is not.
    """
    if any(type(x) is DTensor for x in trained):
        raise ValueError(_MORE)


def _of_all(loss: _Loss) -> tuple[torch.Tensor, Leaves]:
    """The loss is computed of the output's value on all ranks; its gradient goes through the stages.

    Raises:
        ValueError: gradients would go back to what is neither rows nor a mean or sum over them.
    """
    source = loss.source
    _refuse_parts(loss.trained)
    beside = dict(loss.leaves())
    given = opened(source.value())
    values = leaves(given, torch.Tensor)
    tensors = source.without_graph([_leaf(x) for x in values])
    output = closed(refilled(given, tensors))  # of which a distribution may make others
    with torch.enable_grad():
        value = evaluated(loss.of, {**source.here(loss.beside), **beside}, lambda: output, fresh=True)
    value.backward()
    for one in loss.calls:
        one._has_counted = True
    seen: dict[Place, torch.Tensor] = {}
    for x in loss.trained:
        if isinstance(place := source.made_by.get(id(x)), Place):
            grad = beside.pop(id(x)).grad
            seen |= {} if grad is None else {place: grad}
    grads = [x.grad for x in tensors]
    if seen:  # what the others are added to
        grads = [
            torch.zeros_like(x) if grad is None and x.requires_grad else grad
            for x, grad in zip(tensors, grads, strict=True)
        ]
    _through_stages(source, grads, {id(x): beside[id(x)] for x in loss.inputs}, seen)
    return full_tensor(value).detach().clone(), beside


def _of_whole(loss: _Loss) -> tuple[torch.Tensor, Leaves]:
    """The loss has derivatives of an output in it, or parameters: it is made on all ranks, with a graph.

    The graph is kept for what else of it goes back in the same sum.
    """
    beside = loss._replace(trained=[x for x in loss.trained if type(x) is not DTensor]).leaves()
    value = whole_loss(loss.of, beside)
    value.backward(retain_graph=True)
    return full_tensor(value).detach().clone(), beside


def whole_loss(loss: Kept, stand: Mapping[int, torch.Tensor]) -> torch.Tensor:
    """What a program has made of the output, with a graph, as a DTensor of all ranks.

    Args:
        stand: for inputs, and for what it is made of beside the output; by ``id``.
    """
    tell(_WHOLE)
    source = loss._source
    with torch.enable_grad():
        beside = captured(with_writes(loss, Kept._made_of))
        given = {id(x): source.on_all(stand.get(id(x), x)) for x in beside}
        output = source.whole_output(stand)
        value: torch.Tensor = evaluated(loss, given, lambda: output, fresh=True)
        return value


def _through_stages(
    source: ModelRun,
    grads: Sequence[torch.Tensor | None],
    of_inputs: Leaves,
    seen: Mapping[Place, torch.Tensor],
) -> None:
    """Let the gradients of an output's tensors, and of what hooks have seen, go through the stages.

    Raises:
        ValueError: one is of what is neither rows nor a mean or sum over them.
    """
    rows, of_rows, others = source.rows(), dict[int, torch.Tensor](), dict[int, tuple[torch.Tensor, bool]]()
    ways = source.ways()
    counts = [len(leaves(sight.args, torch.Tensor)) for sight in source.sights]
    places = [Place(s.hook, s.call, i) for s, n in zip(source.sights, counts, strict=True) for i in range(n)]
    of_places = dict(zip(places, ways[len(grads) :], strict=True))
    for i, grad in enumerate(grads):
        if grad is None:
            continue
        way = ways[i]
        if way is None:
            if not grad.any():
                continue
            raise ValueError(_NO_ROWS)
        if isinstance(way, str):
            others[i] = grad, way == "mean"
        else:
            of_rows[i] = (grad * source.share_of_loss).movedim(way, 0).unflatten(0, (rows, -1))
    if of_rows or others:
        dtype = next(x.dtype for x in (*of_rows.values(), *(grad for grad, _ in others.values())))
        share = torch.full((rows,), 1 / max(rows, 1), dtype=dtype, device=source.device)
        weighed = partial(_weighed, {i: ways[i] for i in of_rows}, others)
        seen_so = {place: (grad, of_places[place]) for place, grad in seen.items()}
        source.train([share, *of_rows.values()], weighed, of_inputs, adds=True, seen=seen_so)


def handed_out(x: Kept) -> Any:
    """What it is, on all ranks, as ordinary tensors: gradients come to the model when they go back.

    Raises:
        TypeError: the calls that it comes of draw random numbers, or write.
    """
    source = x._source
    calls = in_order(x, Kept._made_of)
    _refuse_parts(wanting(calls))
    if source.writes or any(one._is_drawn for one in calls):
        raise TypeError(_HELD)
    if source.handed_out is None:
        tell(_OF_ALL)
        value = opened(source.value())
        start = torch.zeros((), requires_grad=True)
        tensors = _OutOfStages.apply(source, start, *leaves(value, torch.Tensor))
        source.handed_out = closed(refilled(value, source.without_graph(tensors)))
    with torch.enable_grad():
        return evaluated(x, source.here(captured(calls)), lambda: source.handed_out, fresh=True)


def _brought_back(source: ModelRun, grads: Sequence[torch.Tensor | None]) -> None:
    """Let the gradients of what was handed out go through the stages, and to what the call was given."""
    inputs = source.wanting()
    of_inputs = {id(x): x.detach().requires_grad_() for x in inputs}
    with torch.enable_grad(), source.together() if source.made_by else nullcontext():
        _through_stages(source, grads, of_inputs, {})
        hand_on({**{id(x): x for x in inputs}, **source.made_by}, of_inputs, True, None)
    source.has_gone_back, source.handed_out = True, None  # which holds the source


class _OutOfStages(torch.autograd.Function):
    """The tensors of an output, whose gradients go through the stages."""

    @staticmethod
    def forward(ctx: Any, source: ModelRun, start: torch.Tensor, *tensors: torch.Tensor) -> Any:
        ctx.source = source
        ctx.set_materialize_grads(False)
        out = tuple(x.view_as(x) for x in tensors)
        ctx.mark_non_differentiable(*(x for x in out if not (x.is_floating_point() or x.is_complex())))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor | None) -> Any:
        ctx.source.soon(partial(_brought_back, ctx.source, grads))
        return None, None, *[None for _ in grads]


def _leaf(x: torch.Tensor) -> torch.Tensor:
    """A leaf of that value, which gets a gradient, if it may have one."""
    return x.detach().requires_grad_() if x.is_floating_point() or x.is_complex() else x


def _weighed(
    dims: Mapping[int, Any],
    others: Mapping[int, tuple[torch.Tensor, bool]],
    output: Any,
    captured: Sequence[torch.Tensor],
) -> torch.Tensor:
    """A loss of a micro-batch, of which the sum over all has the gradients that the output is to have.

    Args:
        dims: of the output's tensors that have rows, by their numbers, the dim of these.
        others: of those without, the gradient, and whether it is shared among micro-batches.
        captured: the share of each row, and the gradients of those with rows.
    """
    tensors, (share, *grads) = leaves(opened(output), torch.Tensor), captured
    terms = [
        (tensors[i] * grad.flatten(0, 1).movedim(0, dim)).sum()
        for (i, dim), grad in zip(dims.items(), grads, strict=True)
    ]
    terms += [
        (tensors[i] * grad).sum() * (share.sum() if is_shared else 1)
        for i, (grad, is_shared) in others.items()
    ]
    total: torch.Tensor = sum(terms[1:], terms[0])
    return total


def hand_on(
    stood_for: Mapping[int, Any],
    leaves: Leaves,
    retain_graph: bool | None,
    only: Sequence[torch.Tensor] | None,
    later: list[Any] | None = None,
) -> None:
    """Let gradients of leaves go back through what they stood for; ``only`` to these, if they are given.

    Args:
        later: gets the losses of other calls, which go back now without it.
    """
    grads = {key: x.grad for key, x in leaves.items() if x.grad is not None}
    awaited = {key for key in grads if isinstance(stood_for[key], Kept)}
    if (here := [key for key in grads if key not in awaited]) and (only is None or only):
        roots = [stood_for[key] for key in here]
        torch.autograd.backward(roots, [grads[key] for key in here], retain_graph=retain_graph, inputs=only)
    if awaited and only is None:  # of other calls, which go back now
        weighed = [(stood_for[key] * grads[key]).sum() for key in grads if key in awaited]
        if later is not None:
            later += weighed
        else:
            sum(weighed[1:], weighed[0]).backward(retain_graph=retain_graph)


def _replayed(
    of: Kept,
    by_row: Beside,
    ids: Sequence[int],
    beside: Leaves,
    share: float,
    is_tried: bool,
    output: Any,
    captured: Sequence[torch.Tensor],
) -> Any:
    """What was kept, done on an output and the captured tensors' rows that belong to it."""
    replacements = {**by_row.as_used(dict(zip(ids, captured, strict=True))), **beside}
    try:
        loss = evaluated(of, replacements, lambda: output, fresh=True)
        return loss * share if share != 1 and is_sum(loss) else loss
    except Exception as error:
        if is_tried:
            raise RowsMeetError(f"{type(error).__name__}: {error}") from error
        error.add_note(_ON_PARTS)
        raise


_ON_PARTS = (
    "This is the program's loss, which a pipeline computes on each micro-batch: on a part of the "
    "output's rows, and of each tensor that has as many rows as the batch, or that meets them where "
    "rows of the batch come first (output.view(-1, classes), targets.view(-1)). Keep that order, or "
    "let the model's forward compute the loss; with accumulate = 1 any loss goes."
)
_MORE = (
    "The loss holds more of the model, or more of the batch's rows, that wants gradients than the "
    "model's output, and is not a sum: in a pipeline such things are not where it is computed. Add a "
    "penalty to the whole loss, or weigh that (loss + penalty, weight * loss); or let the model's "
    "forward compute it."
)
_OF_ALL = (
    "A loss is one of all rows (rows meet, or are taken by their places), and a pipeline computes losses on "
    "parts of them. So the model runs twice: for its output, of which the loss is computed on all ranks, and "
    "for its gradients. Quicker is a loss that is a mean or a sum over rows, or one of the model's forward."
)
_NO_ROWS = (
    "The loss is one of all rows, and hangs on something in the model's output that has none of its own and "
    "is no mean or sum over them. In a pipeline with accumulate above 1, or where ranks share the rows, let "
    "the model give rows, or compute the loss in its forward; or plan accumulate = 1."
)
_DRAWS = (
    "The loss draws random numbers, and it takes rows by their places or their number, which micro-batches "
    "do not have. Let the model's forward draw them, or draw beforehand (noise = torch.rand(x.shape)); or "
    "plan accumulate = 1."
)
_HELD = (
    "What a pipeline has yet to compute is written into a tensor, a gradient is to go back through it, and "
    "it draws random numbers, or was written to itself. Make a new tensor (torch.cat, torch.stack, "
    "torch.where), or detach() what is written."
)
_WHOLE = (
    "torch.autograd.grad(..., create_graph=True) in a pipeline, or a loss that multiplies an output with its "
    "derivatives or with parameters of the model: for it the model is computed once more, whole, on every "
    "rank, with all its weights. Right, but slow. Such losses (penalties on gradients, equations in "
    "derivatives) train quicker under a plan without pipe, or computed in the model's forward."
)
