"""A model as a pipeline's stages: which rank has what, and what runs it."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from espalier.layout import Layout
from espalier.mesh import Mesh
from espalier.mesh.parts import at
from espalier.parallel.compose import Arrangement, lay_out_model
from espalier.parallel.offload import Offload
from espalier.parallel.pipeline.actions import Action, Kind, Schedule
from espalier.parallel.pipeline.agreement import Agreement, twin_of
from espalier.parallel.pipeline.messages import with_messages
from espalier.parallel.pipeline.record import SplitError
from espalier.parallel.pipeline.runtime import Agreed, Runtime
from espalier.parallel.pipeline.split import Split, split
from espalier.parallel.pipeline.table import find_schedule
from espalier.parallel.pipeline.undivided import Undivided
from espalier.parallel.plan import Plan
from espalier.tensor.apart import NotCopiedError
from espalier.tensor.caller import user_frame


class UndividedWarning(UserWarning):
    """What was to be divided among stages lies in one: a module, or the whole model."""


class Stages:
    """The stages of a model under a plan.

    Args:
        mesh: with the axis ``pipe``.
        example: of the model's inputs.
        costs: of modules, by which stages are balanced; by default what is counted.

    Attributes:
        split: the model as stages.
        places: the coordinate on the axis ``pipe`` of each stage.
        local: the numbers of this rank's.
        has_last: whether the last one is among them.
        users: for each parameter, the coordinates on the axis ``pipe`` whose stages use it, in their order.
        homes: for each parameter the first of them, which counts it.
        meshes: for each parameter, by its id, the mesh on which it lies as seen from here.
        parts: the names of the parameters that each stage of this rank uses.
        runtime, agreement: what runs the stages, and knows what they tell one another.
    """

    def __init__(
        self, model: nn.Module, plan: Plan, mesh: Mesh, example: Any, costs: Mapping[str, float] | None = None
    ) -> None:
        self._model, self._plan, self._mesh = model, plan, mesh
        self._schedules: dict[tuple[int, Kind | None], Schedule] = {}
        self._kind, self._per_rank = plan.schedule, plan.stages_per_rank
        places = self.schedule(plan.accumulate).stage_to_rank
        device = torch.device("cpu") if mesh.is_dry else mesh.device()
        whole = plan.recompute != "none"  # what is computed again are whole blocks
        self.split: Split | Undivided
        try:
            self.split = split(model, len(places), example, plan.cuts, costs, device=device, divide=not whole)
        except SplitError as error:
            if plan.cuts is not None or isinstance(error.__cause__, NotCopiedError):
                raise
            self.split = Undivided(model, plan.pipe)
            # as one process does: the backward pass of a micro-batch before the next one's forward
            self._kind, self._per_rank = "1f1b", 1
            self._schedules.clear()
            places = self.schedule(plan.accumulate).stage_to_rank
            _warn(
                f"{error} Until then the last stage computes and holds the whole model, and the other "
                f"{plan.pipe - 1} do nothing: right, but no faster than without a pipeline."
            )
        else:
            for why in self.split.whole:
                _warn(f"{why} Until then {why.module!r} lies in one stage, however long that takes.")
        self.places = places
        here = mesh.coordinate[mesh.axis("pipe")]
        self.local = tuple(i for i, rank in enumerate(places) if rank == here)
        self.has_last = places[-1] == here
        used = self.split.users
        self.users = {name: tuple(dict.fromkeys(places[i] for i in of)) for name, of in used.items()}
        self.meshes: dict[int, Mesh] = {}
        for name, p in model.named_parameters():
            ranks = self.users[name]
            self.meshes[id(p)] = at(mesh, "pipe", here if here in ranks else ranks[0])
        self.homes = {name: ranks[0] for name, ranks in self.users.items()}
        self.parts = tuple(frozenset(name for name, of in used.items() if i in of) for i in self.local)
        # a block that is computed again would be so for inputs and for weights
        parts_backward = plan.zero < 3 and plan.recompute == "none" and plan.offload == Offload()
        self.runtime = Runtime(mesh, at(mesh, "pipe", here), parts_backward)
        self.agreement: Callable[..., Agreed]

    def prepare(self, arrangement: Arrangement, mesh: Mesh) -> None:
        """Before the model is laid out: make its twin.

        Args:
            arrangement: of the model.
            mesh: of this rank's stages.
        """
        if isinstance(self.split, Undivided):
            self.agreement = self.split.agreement
            return
        shape = dict(zip(mesh.names, mesh.shape, strict=True))
        dry = Mesh.dry(shape, mesh.coordinate).telling(**mesh.words)
        twin = twin_of(self._model)
        branches = arrangement.branches.items()
        lies = Arrangement()
        for name, lay in arrangement.items():
            number = next((k for branch, k in branches if name.startswith(f"{branch}.")), None)
            on = dry if number is None else at(dry, "branch", number)
            lies[name] = Layout.of(on, lay.axes, lay.cuts, lay.shape)
        lies.chosen, lies.branches = arrangement.chosen, arrangement.branches
        plan = self._plan
        lay_out_model(twin, lies, dry, plan.model_copy(update={"zero": 0, "offload": Offload()}))
        simple = plan.recompute == "none" and plan.offload == Offload()
        alone = self.local if simple and mesh.size() == 1 and not mesh.is_dry else ()
        self.agreement = Agreement(self._model, twin, dry, mesh, alone)

    def schedule(self, micro_batches: int, only: Kind | None = None) -> Schedule:
        """What ranks do with so many micro-batches; ``only`` actions of a kind.

        Raises:
            ValueError: the plan's schedule is for another number.
        """
        key = micro_batches, only
        if key not in self._schedules:
            self._schedules[key] = with_messages(self._made(micro_batches, only))
        return self._schedules[key]

    def _made(self, m: int, only: Kind | None) -> Schedule:
        plan = self._plan
        if only is not None:
            of = self.schedule(plan.accumulate)
            rows = [
                tuple(Action(only, stage, i) for i in range(m) for stage in of.stages_of(rank))
                for rank in range(of.ranks)
            ]
            return replace(of, micro_batches=m, actions=tuple(rows))
        return find_schedule(self._kind, plan.pipe, m, self._per_rank)


def _warn(said: str) -> None:
    warnings.warn(said, UndividedWarning, stacklevel=user_frame()[0])
