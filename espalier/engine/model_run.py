"""A call of a model in stages by a plain loop: its output where that is asked for, and its training pass.

On one process the output is there when the model was called. In a pipeline it is computed in the pass that
trains, or, where a value is asked for before, in a forward pass of its own: that draws the same random
numbers. What a call in training changes (buffers, as batch norm's, what modules remember, generators) is
changed then, and by no later pass of the call: it may have none.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from itertools import count
from typing import Any, Protocol, cast

import torch

from espalier.blocks import parameters_in
from espalier.comm.collectives import sum_whole
from espalier.comm.control import any_says, gather_objects
from espalier.engine.accumulation import Accumulation, Number
from espalier.engine.batches import Own
from espalier.engine.beside import check_beside, share_gradients
from espalier.engine.call_states import CallStates, Surroundings, asked_after_step, marks_of, refuse_changed
from espalier.engine.full_model import on_all_ranks, replaced, whole_output
from espalier.engine.given_batches import GivenBatches
from espalier.engine.late_draws import LateDraws
from espalier.engine.micro_batches import Foreseen
from espalier.engine.model_call import LossFunction, plain_output
from espalier.engine.norm import LossScaler
from espalier.engine.observing import InPass, Observers, Place, Sight
from espalier.engine.output_rows import (
    OfParts,
    cut_gradient,
    joined_gradients,
    like,
    may_lie,
    on_device,
    on_host,
    own_rows,
    row_dim,
    way_of,
)
from espalier.engine.passes import Backward, Loss, Phase
from espalier.engine.stage_draws import Draws
from espalier.engine.waiting import WaitingForStages
from espalier.meanwhile import having
from espalier.mesh.parts import at
from espalier.parallel import Plan
from espalier.parallel.pipeline.arguments import cloned, leaves, mapped, refilled
from espalier.parallel.pipeline.objects import closed, opened, opened_inputs, refuse_objects, sendable
from espalier.parallel.pipeline.record import TorchState
from espalier.tensor import DTensor, full_tensor
from espalier.tensor.asked import name_of
from espalier.tensor.draws import States
from espalier.tensor.meshes import brought
from espalier.tensor.observers import tell
from espalier.trees import tree_map

# makes, or keeps, a call: of a function, its arguments, and those with names
Keep = Callable[[Callable[..., Any], Sequence[Any], Mapping[str, Any]], Any]


class StagedPasses(Surroundings, Protocol):
    """Those of :class:`~espalier.engine.staged.Staged`."""

    plan: Plan
    loss: torch.Tensor | None
    updates: int
    observers: Observers
    last_factor: torch.Tensor | None
    counts_one: bool  # what a loss is a mean over is to be known of one micro-batch, too
    scaler: LossScaler | None
    first_batches: GivenBatches
    averaging: Accumulation
    beside: Sequence[torch.Tensor]

    def lay_out(self, inputs: Any) -> None: ...
    def foreseen(self, parts: Sequence[Any]) -> Foreseen: ...
    def drawn_to(self, draws: Draws | None) -> States | None: ...
    def everywhere(self, name: str, x: torch.Tensor) -> torch.Tensor: ...
    def written(self) -> tuple[int, int]: ...
    def output(self, inputs: Any) -> Any: ...
    def forward(self, batch: Any) -> torch.Tensor: ...
    def train(self, parts: Iterable[Any], phase: Phase, forward: Loss, backward: Backward) -> None: ...
    def finish_gradients(self, beside: Iterable[torch.Tensor] = ()) -> None: ...
    def taken_gradients(self) -> dict[torch.nn.Parameter, torch.Tensor]: ...
    def add_gradients(self, taken: Mapping[torch.nn.Parameter, torch.Tensor]) -> None: ...
    def call_waiting(self) -> None: ...
    def when_beside_is_over(self, through_stages: Callable[[], None]) -> None: ...
    @property
    def waiting(self) -> WaitingForStages: ...


class ModelRun:
    """A call of a model in stages, of which a loss may be made elsewhere.

    Calls that the program makes of what it gives are kept (``espalier.engine.kept``), and done in its
    training pass. What the last stage gives there is kept, on the host, in the first step; and in later ones
    if the program has asked for it after one.

    Args:
        rows: as for :meth:`espalier.Engine.outputs`.
        made_by: of inputs that an earlier call is yet to compute, what they are values of, by ``id``.
        keep: what makes, or keeps, calls with what it gives.
        batch: of which this is to be one micro-batch of several, which pass alone; None: it is not.

    Attributes:
        is_whole: whether a loss is computed on all rows at once, as many as the program sees.
        is_of_all: whether that is so since the program has asked for what micro-batches do not have.
        is_own: whether these are this rank's own rows; ``is_part``: and others have others.
        share_of_loss: what a rank's loss is multiplied by in that of all: 1, or a mean over ranks.
        batch: as given, or its inputs, if it has become one micro-batch of several.
        stays: whether losses of it may go back several times.
        is_let_go: the engine has been asked to let one of several micro-batches go back.
        counts_alike: of such a one the program makes the loss: it counts as much as others.
        mean_over: of such a one, what its loss is a mean over, once it went back; in the last stage.
        has_gone_back: whether a loss made of it has.
        late: what is seen of its draws where they are not known before it runs.
        calls: numbers of the calls that the program makes of what it gives.
        made_by: of inputs that an earlier call is yet to compute, and of what else of other calls is in its
            loss, what they are values of, by ``id``.
        number: of the calls of the model, the which it is.
        writes: the program's calls that write to what others may share.
        sights: what hooks see, once it has its value.
        told: hooks of gradients of that; ``leaves``: what gets gradients in its place.
        handed_out: what the model gives, as ordinary tensors, if a program was given some.
    """

    stays = is_let_go = counts_alike = False
    mean_over: Number = None

    def __init__(
        self,
        passes: StagedPasses,
        inputs: Any,
        rows: str,
        made_by: dict[int, Any],
        keep: Keep,
        batch: Any = None,
    ) -> None:
        self.batch = batch
        inputs = opened_inputs(inputs)
        self._passes, self._inputs, self.is_own, self.keep = passes, inputs, rows == "own", keep
        refuse_objects(inputs)
        self._updates, self._written = passes.updates, passes.written()
        self._marks = marks_of(leaves(inputs, torch.Tensor))
        # what is trained itself, as an image: its optimizer writes to it
        self._earlier = {id(x): x.detach().clone() for x, _ in self._marks if x.requires_grad and x.is_leaf}
        modules = [*passes.call.module.modules()]
        self._settings, self._modes = _settings(modules), [(m, m.training) for m in modules]
        self._trains = passes.call.module.training
        self._state = TorchState.now(passes.mesh.device_type)
        readers = passes.mesh[passes.plan.batch_axes].size() if self.is_own else 1
        self.is_part, self.share_of_loss = readers > 1, 1 / readers
        self._is_one = batch is not None or passes.plan.accumulate == 1 or not self.rows()
        self.is_whole, self.is_of_all = not self.is_part and self._is_one, False
        self._is_aside = False
        self._states = CallStates(passes, self._state.grad, self._trains)
        self.has_gone_back, self.made_by = False, made_by
        self.calls: Iterator[int] = count()
        self.writes: list[Any] = []
        self._loop = passes.loop_calls
        self._foreseen = Foreseen()
        self.late = LateDraws(passes.mesh, self._loop)
        self.number = next(self._loop.numbers)
        self._own: list[Own | None] = []  # of each micro-batch of the training pass
        self._kept: list[Any] | None = None  # of each, in the last stage; elsewhere empty
        self._value: Any = None  # when it was asked for
        self._ways: list[int | str | None] = []  # of its tensors, and of those that hooks see
        self.sights: list[Sight] = []  # what hooks see
        self.told: dict[Place, list[Callable[[torch.Tensor], Any]]] = {}  # hooks of gradients
        self.leaves: list[torch.Tensor] = []
        self.handed_out: Any = None
        self._hooks = passes.observers.hooks
        self._loop.to_run.append(self)

    @property
    def device(self) -> torch.device:
        """This rank's."""
        return self._passes.mesh.device()

    def lay_out(self) -> None:
        """Lay the model out for its inputs, unless it is."""
        self._passes.lay_out(self._first_parts()[0])
        self._written = self._passes.written()

    def _first_parts(self) -> list[Any]:
        """Its micro-batches, of all ranks, as it is laid out by."""
        few = 0 < self.rows() < self._passes.plan.accumulate  # a micro-batch itself, it seems
        return self._parts(self._inputs, whole=few)[0]

    def foresee(self) -> None:
        """Know what it draws and gives: the program draws behind that, as on one process, though it runs
        later."""
        passes = self._passes
        if self.is_part:
            return
        with self._as_called():
            self._foreseen = passes.foreseen(self._first_parts())
        if self.batch is not None or passes.plan.accumulate > 1:
            return
        ends = passes.drawn_to(self._foreseen.draws)
        if ends is not None:
            self._states.have_drawn(ends)
        elif self._loop.runs_at_call:
            self.value()
        elif not passes.mesh.is_dry:
            self.late.note()

    def look(self) -> None:
        """Run at once, for what it leaves, and to see whether it draws."""
        with self.late.looking():
            self.value()

    def soon(self, through_stages: Callable[[], None]) -> None:
        """Make a pass through the stages that a backward pass of the program's has led to."""
        self._passes.when_beside_is_over(through_stages)

    def becomes_one_of_several(self) -> bool:
        """Be one micro-batch of several; whether it can be yet: not where it counts that it ran in parts."""
        has_run = self._value is not None and self._states.may_change
        if self.is_own or has_run or self._states.has_trained:
            return False
        self.batch, self.is_whole, self.counts_alike = self._inputs, True, True
        return True

    def see_all(self) -> None:
        """Let its losses be computed on all rows at once, of this rank's own where it has such."""
        if not self.is_whole:
            self.is_whole = self.is_of_all = True

    def is_cut(self) -> bool:
        """Whether the loss is computed on parts of the rows."""
        mesh, plan = self._passes.mesh, self._passes.plan
        return not self.is_whole or mesh[plan.batch_axes].size() > 1

    def rows(self) -> int:
        """How many the inputs given have."""
        return max((x.shape[0] for x in leaves(self._inputs, torch.Tensor) if x.ndim), default=0)

    def wanting(self) -> list[torch.Tensor]:
        """The inputs that want gradients.

        Raises:
            TypeError: one is made of what is trained, and is this rank's own rows, or those of a loader.
        """
        tensors = leaves(self._inputs, torch.Tensor)
        wanting = [*{id(x): x for x in tensors if x.requires_grad}.values()]
        in_parts = [x for x in wanting if self.is_part or isinstance(x, DTensor)]
        if not in_parts:
            return wanting
        what = (
            "An input of the model wants a gradient, and each rank has rows of its own. In a pipeline none "
            "goes back to these: give all ranks the whole batch, make what wants it in the model's forward, "
            "pass x.detach(), or train under a plan without pipe."
        )
        if any(not x.is_leaf or isinstance(x, torch.nn.Parameter) for x in in_parts):
            raise TypeError(what)
        tell(f"{what} x.grad stays as it is.")
        return [x for x in wanting if not self.is_part and not isinstance(x, DTensor)]

    @property
    def known_losses(self) -> dict[Hashable, bool]:
        """Of losses, by what is done in them: whether they were computed on parts of the rows."""
        return self._loop.known_losses

    @property
    def is_updated(self) -> bool:
        """Whether optimizers have made a step since the call."""
        return self._passes.updates != self._updates

    def asked_for(self) -> None:
        """A value of what it gives is: after a step, its outputs are to be kept from now on."""
        self._loop.keeps_outputs |= self.is_updated

    def value(self) -> Any:
        """What the model gives, plain: whole, or this rank's rows.

        Raises:
            ValueError: parameters were updated since, and the output was not kept.
        """
        self._loop.keeps_outputs |= self._kept is not None
        if self._value is None:
            self._value = self._computed()
        return closed(cloned(self._value))  # what a program keeps may write to it

    def shapes(self) -> Any:
        """What the model gives, its tensors on ``meta``: as it gave for inputs like these before.

        Those need gradients through which they go back; where that is not known, floats.
        """
        known = self._loop.output_shapes
        key = (*self._form_key, _shapes_of(self._inputs))
        if key not in known:
            with torch.no_grad(), self.dropped_by_error():
                is_value = self.is_own or self._passes.plan.accumulate == 1
                out = self.value() if is_value else self._aside(self._inputs)[0]
                known[key] = known[self._form_key] = mapped(like, opened(out))
        with torch.enable_grad():
            shapes = cloned(known[key])
            return closed(refilled(shapes, self.without_graph(leaves(shapes, torch.Tensor))))

    def without_graph(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Those of what it gives, detached where no gradients go back through them."""
        wanting = self._foreseen.wanting
        if len(wanting) != len(tensors):
            return [*tensors]
        return [x if wants else x.detach() for x, wants in zip(tensors, wanting, strict=True)]

    @property
    def all_want_gradients(self) -> bool:
        """Whether gradients go back through all that it gives, as far as that is known."""
        return all(self._foreseen.wanting)

    def form(self) -> Any:
        """What it gives, its tensors on ``meta``: as it gave for inputs of these kinds, of any shape."""
        known = self._loop.output_shapes
        return closed(known[self._form_key]) if self._form_key in known else self.shapes()

    @property
    def _form_key(self) -> tuple[Hashable, ...]:
        """What an output's kinds follow from."""
        heard = self._foreseen.heard

        def of(x: Any) -> Any:
            if isinstance(x, torch.Tensor):
                return None
            is_heard = heard is not None and not isinstance(x, str | bool | complex | None)
            return type(x) if is_heard else repr(x)

        return *map(of, leaves(self._inputs)), heard, self.is_own, self._trains, self._settings

    def _computed(self) -> Any:
        passes = self._passes
        if self._kept is not None:
            here = [sendable(plain_output(mapped(on_device, output))) for output in self._kept]
            outputs = gather_objects(here, passes.mesh["pipe"])[passes.stages.places[-1]]
            if outputs and isinstance(outputs[0], Exception):
                raise outputs[0]
            if len(outputs) == len(self._own):
                return self._joined([(out, []) for out in outputs], self._own, is_kept=True)
        if self.is_updated:
            raise asked_after_step()
        inputs = self._inputs
        if self._state.grad:
            self._refuse_written()
            refuse_changed(mark for mark in self._marks if id(mark[0]) not in self._earlier)
            inputs = mapped(lambda x: self._earlier.get(id(x), x), inputs)
        parts, own = self._parts(inputs)
        passes.lay_out(parts[0])  # after which buffers are others
        self._let_earlier_run()
        if not self._state.grad and (self._trains or passes.stages.split.remembers):
            parts, own = self._parts(inputs, whole=True)  # what it remembers is of one call
        with self.late.open(), self._states.looking(), self._as_called():
            outputs = [self._seen(part) for part in parts]
        return self._joined(outputs, own, inputs)

    def _let_earlier_run(self) -> None:
        """Before this call writes to buffers or draws random numbers, those do that were made before it.

        What they give has not been asked for: they run for that alone, and, if a loss goes back, again.
        """
        if self not in self._loop.to_run:
            return
        n = self._loop.to_run.index(self)
        earlier, self._loop.to_run[: n + 1] = self._loop.to_run[:n], []
        for run in earlier if self._states.may_change else ():
            if run._is_as_called():
                try:
                    with torch.no_grad():
                        run.value()
                except Exception as error:  # of all ranks
                    _tell_of_earlier(error)

    @contextmanager
    def dropped_by_error(self) -> Iterator[None]:
        """While open, an error, which the program is told, makes it no call that later ones run first."""
        try:
            yield
        except Exception:
            self._loop.to_run[:] = [run for run in self._loop.to_run if run is not self]
            raise

    def _has_run(self) -> bool:
        return self._value is not None or self._states.has_run

    def _is_as_called(self) -> bool:
        """Whether it has not run, and what it computes with is what it was at the call."""
        if self._has_run() or self.is_updated:
            return False
        try:
            self._refuse_written()
            refuse_changed(mark for mark in self._marks if id(mark[0]) not in self._earlier)
        except (ValueError, RuntimeError):
            return False
        return True

    def _seen(self, part: Any) -> tuple[Any, list[Sight]]:
        """What the model gives for a micro-batch, and what hooks see."""
        passes = self._passes
        return passes.observers.looked(lambda: opened(passes.output(part)))

    def _joined(
        self,
        outputs: list[tuple[Any, list[Sight]]],
        own: list[Own | None],
        inputs: Any = None,
        is_kept: bool = False,
    ) -> Any:
        """One output, of those of micro-batches; of each the rows that are this rank's.

        Which dim of a tensor has the rows, and whether any has, an output of all rows shows, once.
        """
        passes, rows_of = self._passes, self._loop.row_dims
        key = (*self._form_key, *(x.ndim for x in leaves(self._inputs, torch.Tensor)), len(outputs[0][1]))
        trees = [(out, [sight.args for sight in sights]) for out, sights in outputs]
        parts = [leaves(tree, torch.Tensor) for tree in trees]
        whole: list[torch.Tensor] | None = None
        dims = rows_of.get(key)
        fits = dims is not None and may_lie(dims, parts)
        if len(outputs) == 1 and not fits:
            dims = [0 if x.ndim else None for x in parts[0]]
        elif not fits:
            whole = self._of_all_rows(self._inputs if is_kept else inputs)
            dims = rows_of[key] = [
                row_dim([x.shape for x in of_parts], x.shape)
                for x, *of_parts in zip(whole, *parts, strict=True)
            ]
        assert dims is not None
        joined: list[Any] = []
        ways: list[int | str | None] = []
        for i, dim in enumerate(dims):
            if dim is not None:
                ways.append(dim)
                of_parts = [own_rows(of, x[i], dim) for x, of in zip(parts, own, strict=True)]
                joined.append(of_parts[0] if len(of_parts) == 1 else torch.cat(of_parts, dim))
            elif len(outputs) == 1:
                joined.append(parts[0][i])
                ways.append("sum")
            elif is_kept:
                joined.append(OfParts())
                ways.append(None)
            else:  # a loss, say, is to be of all rows
                whole = self._of_all_rows(inputs) if whole is None else whole
                joined.append(whole[i])
                ways.append(way_of([x[i] for x in parts], passes.call.batches.cuts(self.rows()), whole[i]))
        self._ways = ["sum"] * len(ways) if len(outputs) == 1 and not self.is_part else ways
        whole_tree = refilled(trees[0], joined)
        self.sights = [s._replace(args=args) for s, args in zip(outputs[0][1], whole_tree[1], strict=True)]
        return whole_tree[0]

    def ways(self) -> Sequence[int | str | None]:
        """What each tensor of its value, and of what hooks see, is of those of micro-batches.

        The dim along which they are joined, or ``"mean"`` or ``"sum"``; None: none of these.
        """
        self.value()
        return self._ways

    def _of_all_rows(self, inputs: Any) -> list[torch.Tensor]:
        """The tensors of an output of all rows, made aside."""
        out, sights = self._aside(self._passes.call.batches.own(inputs)[0] if self.is_own else inputs)
        return leaves((out, [sight.args for sight in sights]), torch.Tensor)

    def _aside(self, inputs: Any) -> tuple[Any, list[Sight]]:
        """What the model gives for all rows, and what hooks see; nothing else knows of it."""
        with self._states.untouched(), self._as_called():
            return self._seen(inputs)

    def _refuse_written(self) -> None:
        """See that parameters are those of the call, as far as nothing else has run since."""
        passes, (runs, versions) = self._passes, self._written
        now = passes.written()
        if not passes.mesh.is_dry and any_says(now[0] == runs and now[1] != versions, passes.mesh):
            raise ValueError(
                "A value of the model's output is asked for, and parameters were written to since the model "
                "was called. In a pipeline it is computed when it is asked for, of the parameters as they "
                "are then: ask for it before (loss.item()), or call the model afterwards."
            )

    @contextmanager
    def _as_called(self) -> Iterator[None]:
        """While open, the model runs as it was called: under that autocast, its modules in those modes."""
        with ExitStack() as stack:
            stack.enter_context(having(self._passes.call, asked=self._state))
            for m, mode in self._modes:
                if m.training is not mode:
                    stack.enter_context(having(m, training=mode))
            yield

    def _parts(self, batch: Any, whole: bool = False) -> tuple[list[Any], list[Own | None]]:
        """Its micro-batches, of all ranks, and which rows of each are this rank's; as a ``whole``, one."""
        batches = self._passes.call.batches
        parts = [batch] if whole or self._is_one or self.batch is not None else batches.cut(batch)
        if not self.is_own:
            return parts, [None] * len(parts)
        of_ranks = [batches.own(part) for part in parts]
        return [part for part, _ in of_ranks], [own for _, own in of_ranks]

    @property
    def _is_counted(self) -> bool:
        """Whether it is to be seen what the loss of this micro-batch is a mean over."""
        return self.batch is not None and not self.counts_alike and self._passes.averaging.count is None

    def _check_alone(self, beside: Sequence[torch.Tensor], adds: bool) -> None:
        """See that a micro-batch of several can be weighed.

        Raises:
            ValueError: it cannot.
        """
        reason = None
        if not self.is_let_go:
            reason = "loss.backward() does not weigh it: write engine.backward(loss)"
        elif beside:
            reason = "it hangs on what wants gradients beside the model (an input, a parameter of the loss)"
        elif adds and self._is_counted:
            reason = "rows meet in it, and what it is a mean over cannot be seen: say it with count=..."
        if reason is not None:
            raise ValueError(
                f"The loss of one of Plan(accumulate={self._passes.averaging.size}) micro-batches that pass "
                f"through a pipeline alone: {reason}. Or give the whole batch: engine.train_step(batch), or "
                "engine.accumulate(engine.cut(batch)) and engine.step()."
            )

    def share(self, tensors: Sequence[torch.Tensor]) -> None:
        """Let all ranks have what tensors are where the loss was computed (a collective)."""
        mesh = self._passes.mesh["pipe"]
        if mesh.is_dry or not tensors:
            return
        is_last = mesh.rank == self._passes.stages.places[-1]
        with torch.no_grad():
            for x in dict.fromkeys(tensors):
                x.copy_(sum_whole(x.flatten() if is_last else x.new_zeros(x.numel()), mesh).view_as(x))

    def parameters(self) -> Iterable[torch.Tensor]:
        """The model's."""
        return parameters_in(self._passes.call.module)

    def may_be_whole(self) -> bool:
        """Whether all ranks have its inputs, no two stages copies of a parameter, and this is no dry run."""
        mesh = self._passes.mesh
        return not (self.is_part or self.batch is not None or mesh.is_dry or mesh.copied)

    def whole_output(self, stand: Mapping[int, torch.Tensor]) -> Any:
        """What the model gives, with a graph, as DTensors of all ranks; ``stand``: for some of its inputs."""
        passes, mesh = self._passes, self._passes.mesh
        self.lay_out()
        self._let_earlier_run()
        # what it leaves, later calls find
        if self._trains and self._states.may_change and not self._has_run():
            with torch.no_grad():
                self.value()
        inputs = replaced(self._inputs, stand, mesh)
        with self._states.untouched(), self._as_called(), passes.call.autocast():
            return whole_output(passes.call.module, passes.everywhere, mesh, inputs)

    def here(self, tensors: Iterable[torch.Tensor], in_last: bool = False) -> dict[int, torch.Tensor]:
        """By ``id``, what is made of parameters, plain on all ranks: all must ask.

        Args:
            in_last: not those that the last stage has.
        """
        mesh = self._passes.mesh
        # rows of loaders lie in the stage of each rank, and have no name
        lying = [x for x in tensors if type(x) is DTensor and name_of(x) is not None]
        if in_last and lying:
            last = at(mesh, mesh.axis("pipe"), self._passes.stages.places[-1])
            lying = [x for x in lying if not set(last.ranks) <= set(x._layout.mesh.ranks)]
        with torch.no_grad():
            return {id(x): brought(cast(DTensor, x.detach()), mesh).full_tensor() for x in lying}

    def on_all(self, x: torch.Tensor) -> torch.Tensor:
        """A tensor that all ranks have, as a DTensor."""
        return on_all_ranks(x, self._passes.mesh)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """While open, gradients that there are do not count: they are as before after it."""
        earlier, self._is_aside = self._passes.taken_gradients(), True
        try:
            yield
        finally:
            self._is_aside = False
            self._passes.taken_gradients()
            self._passes.add_gradients(earlier)
            self._passes.averaging.closed = True

    @contextmanager
    def together(self) -> Iterator[None]:
        """While open, losses that go back are one to hooks on parameters."""
        passes = self._passes
        with passes.waiting.together(passes.taken_gradients, passes.add_gradients):
            yield
        if not self._is_aside:
            passes.call_waiting()

    def sample(self, func: Callable[..., Any], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
        """What a function gives that draws random numbers, of values that no gradient goes back through.

        It draws what it draws under other plans, behind the model's numbers for its output.
        """
        mesh = self._passes.mesh

        def laid(x: Any) -> Any:
            is_plain = isinstance(x, torch.Tensor) and not isinstance(x, DTensor)
            return on_all_ranks(x.detach().to(mesh.device()), mesh) if is_plain else x

        with torch.no_grad():
            arguments, named = (tree_map(laid, x, (torch.Tensor,)) for x in (list(args), dict(kwargs)))
            return tree_map(
                lambda x: full_tensor(x) if isinstance(x, torch.Tensor) else x, func(*arguments, **named)
            )

    @contextmanager
    def tried(self) -> Iterator[None]:
        """While open, a pass that fails leaves no trace: a loss may turn out to be one of all rows."""
        passes = self._passes
        earlier = passes.taken_gradients()
        passes.add_gradients(earlier)
        try:
            with self._states.undone_by_error():
                yield
        except Exception:
            passes.taken_gradients()  # they may be there yet
            passes.add_gradients(earlier)
            passes.hide()
            raise

    def train(
        self,
        captured: list[torch.Tensor],
        loss: LossFunction,
        beside: Mapping[int, torch.Tensor],
        draws: bool = False,
        adds: bool = False,
        seen: Mapping[Place, tuple[torch.Tensor, int | str | None]] = {},
    ) -> torch.Tensor:
        """Forward and backward of all micro-batches; gives their loss as one.

        Where they went before, they go as they went then: nothing is drawn, and no buffer is written, anew.

        Args:
            loss: of outputs and what was ``captured``.
            beside: leaves in the place of what else is to get gradients, of inputs and of the loss, on all
                ranks; by ``id``.
            draws: whether the loss draws random numbers.
            adds: whether the losses of micro-batches are to be added up, whatever they are.
            seen: gradients of what hooks have seen, and what that is of micro-batches' (:meth:`ways`).

        Raises:
            RuntimeError: they went before, and parameters were updated since.
        """
        passes, call = self._passes, self._passes.call
        leaves_beside = [*beside.values()]
        check_beside(leaves_beside, passes.plan)
        if self._states.has_trained and self.is_updated:
            raise RuntimeError(
                "backward() through a call of the model that a loss went back through before, and its "
                "parameters were updated since: call the model again, or make the step after all backward "
                "passes; of what the forward gave without gradients (targets), take x.detach()."
            )
        if self.batch is not None:
            self._check_alone(leaves_beside, adds)
        refuse_changed(self._marks)
        self._let_earlier_run()
        if self.is_own:
            passes.first_batches.note(self._inputs, own=True)
        earlier = passes.taken_gradients()
        inputs = mapped(lambda x: beside.get(id(x), x), self._inputs)
        parts, self._own = self._parts((inputs, captured))
        kept: list[Any] = []

        def loss_of_kept(output: Any, more: Any) -> Any:
            kept.append(mapped(on_host, opened(output)))
            return loss(output, more)

        keeps = self._loop.keeps_outputs or not passes.updates
        before, call.loss_fn = call.loss_fn, loss_of_kept if keeps else loss
        passes.beside = leaves_beside
        try:
            numbers = [] if self.batch is not None else leaves((self._inputs, captured), torch.Tensor)
            in_order = passes.averaging.of_one_call(numbers, adds)
            of_parts = having(passes, counts_one=(self.is_part and not adds) or self._is_counted)
            training = self._states.training(draws, self.stays)
            late, as_called = self.late.open(), self._as_called()
            with late, training, in_order, as_called, self._looked_at(seen), of_parts:
                passes.train(parts, lambda name: None, passes.forward, lambda loss: None)
            passes.finish_gradients(leaves_beside)
            self.mean_over = passes.averaging.number
        finally:
            call.loss_fn, passes.beside = before, ()
        share_gradients(leaves_beside, passes.mesh["pipe"], mean=False)
        if keeps:
            self._kept = kept
        passes.add_gradients(earlier)
        if not self._is_aside:
            passes.call_waiting()
        self._tell_of_gradients(seen)
        assert passes.loss is not None
        return full_tensor(passes.loss).detach().clone()

    def _looked_at(
        self, seen: Mapping[Place, tuple[torch.Tensor, int | str | None]]
    ) -> AbstractContextManager[None]:
        cuts, scale = self._passes.call.batches.cuts(self.rows()), self._scale()
        added = {place: cut_gradient(grad * scale, way, cuts) for place, (grad, way) in seen.items()}
        return self._passes.observers.going_back(InPass(self._hooks, added, self.told))

    def _scale(self) -> Any:
        """By which the engine multiplies losses."""
        return 1 if self._passes.scaler is None else self._passes.scaler.scale

    def _tell_of_gradients(self, seen: Collection[Place]) -> None:
        """Call hooks that see gradients, with those of the pass that was made.

        Raises:
            RuntimeError: a gradient of what a hook has taken has not gone back.
        """
        observers = self._passes.observers
        if observers.missed(seen):
            raise RuntimeError(
                "A hook has taken what a module gives for the loss, and nothing else of the model's output "
                "hangs on it: in a pipeline its gradient does not come to the module. Let the model's "
                "forward return it."
            )
        if not (self.told or observers.look_back):
            return
        factor, scale = self._passes.last_factor, self._scale()
        rows = [size for _, size in self._passes.call.batches.cuts(self.rows())]
        for of, calls in observers.gradients().items():
            for several in zip(*(calls[i] for i in sorted(calls)), strict=True):
                grads = joined_gradients(several, rows, (1 if factor is None else factor) / scale)
                if isinstance(of, Place):
                    for hook in self.told[of]:
                        if hook(grads) is not None:
                            raise TypeError(_CHANGES)
                else:
                    observers.call(of, grads)


_CHANGES = (
    "A hook on the gradient of what a forward hook has taken gives another gradient. In a pipeline it is "
    "called after the backward pass, and changes nothing: put it into the model's forward."
)


def _shapes_of(inputs: Any) -> Hashable:
    return tuple((tuple(x.shape), x.dtype) for x in leaves(inputs, torch.Tensor))


def _settings(modules: Iterable[torch.nn.Module]) -> Hashable:
    """The flags of the configurations of a model's modules: an output may have more parts by them.

    Not what else these say, which may be another on each rank: who saves a model writes its dtype there.
    """
    held = [config for m in modules if hasattr(config := vars(m).get("config"), "__dict__")]
    said = {id(config): vars(config).items() for config in held}
    return tuple(flag for flags in said.values() for flag in flags if type(flag[1]) is bool)


def _tell_of_earlier(error: Exception) -> None:
    """Warn of a call that fails as it runs before a later one, for what it draws and writes."""
    tell(
        f"A call of the model of which nothing was asked ends in {type(error).__name__}: {error}. On one "
        "process that call had raised it; in a pipeline it runs now, for what it draws and writes."
    )
