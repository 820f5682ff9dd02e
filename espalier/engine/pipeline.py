"""The engine of a pipeline: a step's micro-batches pass through the model's stages, by a schedule."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import nullcontext
from typing import Any, NoReturn

import torch
from torch._C import DisableTorchFunctionSubclass as raw

from espalier.comm.agreement import agree
from espalier.comm.collectives import broadcast, sum_whole
from espalier.comm.peers import receive_from, send_to
from espalier.engine.accumulation import Number, averaged
from espalier.engine.engine import Engine
from espalier.engine.micro import Prediction, Step
from espalier.engine.norm import Norm, scale_gradients, share_of
from espalier.layout import Layout, gradient_layout
from espalier.parallel import Arrangement, arrange, everywhere
from espalier.parallel.data.gradients import gradient_of
from espalier.parallel.pipeline import Kind, Schedule, SplitError, Timeline
from espalier.parallel.pipeline.measure import measured_by_all
from espalier.parallel.pipeline.stages import Stages
from espalier.parallel.pipeline.undivided import Undivided
from espalier.tensor import DTensor, full_tensor, plain, stamp
from espalier.tensor.dtensor import layout_of
from espalier.trees import tree_map

_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
_grad: Any = torch.Tensor.grad


class PipelineEngine(Engine):
    """Trains a model whose stages lie on different ranks. Made by :func:`initialize`, of ``Plan(pipe=...)``.

    A step is made by :meth:`train_step`, or by :meth:`accumulate` and :meth:`step`.
    """

    def __init__(self, *given: Any) -> None:
        super().__init__(*given)
        self._stages: Stages | None = None
        self._accumulation = self._evaluation
        self._axis = self.mesh.axis("pipe")
        self._told: tuple[torch.Tensor | None, ...] | None = None
        self._dtype: torch.dtype | None = None
        self._weighed = self._is_finished = False

    def _arrange(self, batch: Any, sample: Any, **given: Any) -> Arrangement | None:
        if batch is None:
            return None
        inputs = self._parted(dict(batch) if isinstance(batch, Mapping) else batch)[0]
        example = tree_map(self._plain, inputs)
        costs, unmeasured = None, None
        if self.plan.balance == "measured":
            try:
                costs = self._measured(example)
            except SplitError as error:
                unmeasured = error
        self._stages = Stages(self.module, self.plan, self.mesh, example, costs)
        if unmeasured is not None and not isinstance(self._stages.split, Undivided):
            raise unmeasured
        found = arrange(self.module, self.plan, self._here, batch=sample, stages=self.stages.meshes, **given)
        assert found is not None
        found.parts = self.stages.parts
        self.stages.prepare(found, self._here)
        return found

    def _plain(self, x: Any) -> Any:
        """An input to trace the model on; of a dry mesh there are no values: zeros."""
        if not isinstance(x, torch.Tensor):
            return x
        return torch.zeros(x.shape, dtype=x.dtype) if self.mesh.is_dry else full_tensor(x)

    def _measured(self, example: Any) -> Mapping[str, float]:
        """The time that parts of the model take on so many rows as a rank computes."""
        if self.mesh.is_dry:
            raise ValueError(
                'balance = "measured" needs the devices that will compute: a dry run has none. Say where '
                "stages begin: Plan(cuts=engine.stages.split.cuts) of a real run."
            )
        rows, low = self._batches.share(example), self.plan.precision.parameters
        dtype = None if low is None else getattr(torch, low)

        def cut(x: Any) -> Any:
            return self._cast(x[:rows] if isinstance(x, torch.Tensor) and x.ndim else x)

        with self._autocast():
            whole = self.plan.recompute != "none"
            part = tree_map(cut, example)
            return measured_by_all(self.mesh, self.module, part, divide=not whole, dtype=dtype)

    def lay_out(self, batch: Any = None) -> None:
        """Lay the parameters out; a batch is needed to split the model."""
        if self._data is None:
            super().lay_out(batch)
            if self._data is not None:
                self._data.gradients.share({id(p) for p, _ in self._shared()})
                self._share_values()

    # ---- a step

    def accumulate(self, parts: Iterable[Any], phase: Callable[[str], Any] = lambda name: None) -> None:
        """Forward and backward of all micro-batches of a step: :meth:`step` is next.

        Args:
            parts: what :meth:`cut` gives, or of each of the :meth:`micro_batches` the :meth:`local_batch`.
            phase: is told when a ``"forward"`` and when a ``"backward"`` begins.

        Raises:
            ValueError: there are no micro-batches, or the last ones wait for a step.
        """
        of_step, parts = self._accumulation, list(parts)
        assert of_step is not None
        if of_step.closed or not parts:
            raise ValueError(
                "engine.accumulate takes all micro-batches of one step: call engine.step() before the next."
                if parts
                else "There are no micro-batches to train on."
            )
        self.lay_out(parts[0])
        assert self._data is not None
        if self.optimizer is not None:
            self._traffic.begin()
            for part in parts:
                self._given_batches.note(part)
        work = Step(self, parts, phase, counts=len(parts) > 1)
        for part in self._data.gradients.parts:
            part.hold()
        self._told, self._weighed, self._is_finished = None, len(parts) > 1, False
        self._seen.admit()
        self._has_gradients = True
        self._run(work, self.stages.schedule(len(parts)))
        self._data.end_step()
        of_step.closed = True
        self.loss = of_step.loss
        self._seen.bar()

    def _saves(self, name: str) -> bool:
        return self.stages.homes.get(name, 0) == self.mesh.coordinate[self._axis]

    def _run(self, work: Step, schedule: Schedule) -> None:
        assert self._data is not None
        self._data.begin_forward()
        with self._watch or nullcontext(), self._casts or nullcontext(), work.open(schedule):
            self.stages.runtime.run(schedule, work.agreed, work)
        work.leave()
        if self.mesh.is_dry and self._failure is not None:
            raise self._failure

    @property
    def stages(self) -> Stages:
        """The model as stages, and what runs them.

        Raises:
            ValueError: it was not laid out yet.
        """
        if self._stages is None:
            raise ValueError("A pipeline is split by its first batch: call engine.train_step on one first.")
        return self._stages

    @property
    def _failure(self) -> Exception | None:
        return self.stages.runtime.failure

    def _finished(self) -> dict[str, torch.Tensor]:
        assert self._data is not None
        self._seen.admit()
        if not self._is_finished:
            self._is_finished = True
            self._data.gradients.finish()
            self._sum_shared()
        mine = self.mesh.coordinate[self._axis]
        return {n: g for n, g in self._data.counted().items() if self.stages.homes[n] == mine}

    def _start_norm(
        self, counted: Mapping[str, torch.Tensor]
    ) -> tuple[Callable[[], tuple[torch.Tensor, torch.Tensor | None]], Callable[[], Any]]:
        told = self._told
        shares, given = [] if told else self._shares(), self._given_batches.shares()
        norm = Norm(list(counted.values()), None, self.mesh, [*shares, *given])
        self._compare(norm.more()[len(shares) :] if given else ())

        def factor() -> Any:
            return None if told else self._heard(norm.more()[: len(shares)])

        def wait() -> tuple[torch.Tensor, torch.Tensor | None]:
            factor()
            return norm.wait()[0], self.loss

        return wait, factor

    def finish_gradients(self) -> None:
        """Wait until every ``p.grad`` is the gradient of the whole batch, times :attr:`scale`."""
        self._finished()
        if self._told is None:
            factor = self._heard(sum_whole(torch.stack(self._shares()), self.mesh).unbind())
            if factor is not None:
                scale_gradients([p for p in self.module.parameters() if isinstance(p, DTensor)], factor)
        self._seen.note()

    # ---- what the last stage knows

    def _shares(self) -> list[torch.Tensor]:
        """What this rank gives to the sums: the loss, its dtype, the factor of gradients, failures."""
        of_step = self._accumulation
        assert of_step is not None
        with raw():
            zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device())
            failed = zero if self._failure is None else zero + 1
            if self.loss is None or not self.stages.has_last:
                return [zero, zero, zero, failed]
            first = self._here.rank == 0
            factor = of_step.factor()
            code = _DTYPES.index(self.loss.dtype) if first else 0
            return [
                share_of(self.loss, self._here).to(zero),
                zero + code,
                zero if factor is None or not first else factor.to(zero),
                failed,
            ]

    def _heard(self, sums: Sequence[torch.Tensor]) -> torch.Tensor | None:
        """The factor of gradients; the loss is known then.

        Raises:
            Exception: what a rank has met in its stage, on all ranks.
        """
        if self._told is None:
            with raw():
                loss, code, factor, failed = sums
                if not self.mesh.is_dry and failed.item():
                    self._give_up()
                if self._dtype is None:
                    self._dtype = self.loss.dtype if self.loss is not None and self.stages.has_last else None
                    if self._dtype is None and not self.mesh.is_dry:
                        self._dtype = _DTYPES[int(code.item())]
                lies = Layout.replicated(self.mesh, ())
                self.loss = stamp(loss.to(self._dtype or torch.float32).clone(), lies)
                ones = torch.ones_like(factor)
                self._told = (torch.where(factor == 0, ones, factor) if self._weighed else None,)
        return self._told[0]

    def _give_up(self) -> NoReturn:
        failure, self.stages.runtime.failure = self._failure, None
        self.zero_grad()
        agree(failure, self.mesh, range(self.mesh.ndim))
        raise AssertionError("a rank has failed")

    # ---- parameters that several stages use

    def _shared(self) -> list[tuple[torch.nn.Parameter, tuple[int, ...]]]:
        """Those that stages of other ranks use too, and the coordinates of these and this rank, in order."""
        assert self.stages is not None and self._data is not None
        users = self.stages.users
        return [(m.p, users[m.name]) for m in self._data.members if len(users[m.name]) > 1]

    def _exchanged(self, x: torch.Tensor, among: Sequence[int]) -> list[torch.Tensor]:
        """What each of some coordinates of the pipe has in place of this rank's tensor."""
        mine = self.mesh.coordinate[self._axis]
        tag = 2 * (self.plan.pipe * self.plan.stages_per_rank)
        like = [(tuple(x.shape), x.dtype)]
        sent = [send_to([x], self.mesh, self._axis, to, tag) for to in among if to != mine]
        found = []
        for source in among:
            if source == mine:
                found.append(x)
                continue
            (got,), pending = receive_from(like, self.mesh, self._axis, source, tag)
            pending.wait()
            found.append(got)
        for pending in sent:
            pending.wait()
        return found

    def _share_values(self) -> None:
        """Copies of a parameter have the values of the first."""
        assert self._data is not None
        with self._data.updating(), raw():
            for p, among in self._shared():
                own = plain(p.detach())
                own.copy_(self._exchanged(own.contiguous(), among)[0])

    def _sum_shared(self) -> None:
        """The gradient of a parameter is the sum of those of its copies; None if none of them has one."""
        assert self._data is not None
        without = self._data.gradients.without
        with raw():
            for p, among in self._shared():
                grad = gradient_of(p)
                is_there = grad is not None and id(p) not in without
                if grad is None:
                    own = plain(p.detach())
                    grad = stamp(own.new_zeros(own.shape, dtype=p.grad_dtype), gradient_layout(layout_of(p)))
                here = plain(grad)
                # with it whether there is one
                wire = torch.empty(here.numel() + 1, dtype=here.dtype, device=here.device)
                wire[:-1].copy_(here.reshape(-1))
                wire[-1] = float(is_there)
                others = self._exchanged(wire, among)
                if not is_there and not self.mesh.is_dry and not any(other[-1].item() for other in others):
                    p.grad = None
                    continue
                total = others[0][:-1]
                for other in others[1:]:
                    total = total + other[:-1]
                here.copy_(total.view(here.shape))
                if gradient_of(p) is None:
                    _grad.__set__(p, grad)

    # ---- evaluation

    def evaluate(self, parts: Iterable[Any]) -> torch.Tensor:
        """The loss of several batches as one, without gradients: a plain scalar, the same on every rank.

        Args:
            parts: micro-batches, which pass through the stages one behind the other; each weighs by what its
                loss is a mean over.

        Raises:
            ValueError: that cannot be seen, or there is none.
        """
        found: list[tuple[torch.Tensor, Number]] = []
        some: list[Any] = []
        with torch.no_grad():
            for part in parts:
                some.append(part)
                if len(some) == 4 * self.plan.pipe:
                    found += self._passed(some)
                    some = []
            found += self._passed(some)
            return self._of_last(averaged(found))

    def __call__(self, batch: Any) -> torch.Tensor:
        """The loss of a batch, under ``torch.no_grad()`` alone: the same on every rank."""
        return self.forward(batch)

    def forward(self, batch: Any) -> torch.Tensor:
        """As a call."""
        if torch.is_grad_enabled():
            self._refuse("engine(batch)")
        ((loss, _),) = self._passed([batch], counts=False)
        return self._of_last(averaged([(loss, None)]))

    def backward(self, loss: torch.Tensor) -> None:
        """Not of a pipeline.

        Raises:
            ValueError: always.
        """
        self._refuse("engine.backward(loss)")

    def no_sync(self) -> NoReturn:
        """Not of a pipeline.

        Raises:
            ValueError: always.
        """
        self._refuse("engine.no_sync()")

    def _refuse(self, what: str) -> NoReturn:
        raise ValueError(
            f"{what}: with {self.plan} the micro-batches of a step pass through the stages together. Call "
            "engine.train_step(batch), or engine.accumulate(parts) and engine.step(); to evaluate, "
            "engine.evaluate(parts)."
        )

    def _passed(self, parts: Sequence[Any], counts: bool = True) -> list[tuple[torch.Tensor, Number]]:
        """The loss of each micro-batch, and what it is a mean over; on all but the last stage, nothings."""
        if not parts:
            return []
        self.lay_out(parts[0])
        work = Step(self, parts, lambda name: None, counts)
        self._run(work, self.stages.schedule(len(parts), only=Kind.F))
        nothing = torch.zeros((), dtype=torch.float64, device=self.mesh.device())
        return [work.losses.get(i, (nothing, None)) for i in range(len(parts))]

    def _of_last(self, value: torch.Tensor) -> torch.Tensor:
        """A whole number of the last stage's, on all ranks.

        Raises:
            Exception: what a rank has met in its stage, on all ranks.
        """
        zero = torch.zeros((), dtype=torch.float64, device=self.mesh.device())
        told = self.stages.has_last and self._here.rank == 0
        sums = [value.to(zero) if told else zero, zero if self._failure is None else zero + 1]
        found, failed = sum_whole(torch.stack(sums), self.mesh).unbind()
        if not self.mesh.is_dry and failed.item():
            self._give_up()
        return found.clone()

    def _output(self, inputs: Any) -> Any:
        work = Prediction(self, [inputs], lambda name: None, counts=False)
        self._run(work, self.stages.schedule(1, only=Kind.F))
        self._of_last(torch.zeros((), dtype=torch.float64, device=self.mesh.device()))
        places = self.stages.schedule(1, only=Kind.F).stage_to_rank
        return work.everywhere(places[-1])

    # ---- what there is to know

    def timeline(self) -> Timeline:
        """When each rank along the axis ``pipe`` did what in the last step; all of them call this.

        ``timeline.predicted()`` is what the schedule promises with the same times of its actions;
        :func:`espalier.parallel.pipeline.draw.draw` draws both.

        Raises:
            ValueError: there was no step yet.
        """
        return self.stages.runtime.timeline()

    def _everywhere(self, name: str, x: torch.Tensor) -> torch.Tensor:
        home = self.stages.homes.get(name, 0)
        dtype = x.dtype
        if x.is_floating_point() and self.plan.precision.parameters is not None:
            dtype = torch.float32  # of masters, where they are
        if home == self.mesh.coordinate[self._axis]:
            whole = everywhere(x, self._here).detach().to(dtype)
        else:
            whole = torch.empty(x.shape, dtype=dtype, device=self.mesh.device())
        return broadcast(whole, self.mesh, self._axis, home)


__all__ = ["PipelineEngine"]
