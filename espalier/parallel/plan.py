"""The plan: which axes there are, how big, and what each is for. Data: printable, comparable, loadable."""

from __future__ import annotations

import difflib
import math
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, ValidationError
from pydantic_core import PydanticCustomError

from espalier.parallel.modes import ROWS, Mode, tensor_axes
from espalier.parallel.offload import Offload
from espalier.parallel.pipeline.actions import Schedule
from espalier.parallel.pipeline.generate import KINDS
from espalier.parallel.precision import Precision, as_precision

Size = Annotated[int, Field(ge=1)]


def _recompute(given: Any) -> Any:
    kinds = ("none", "full", "selective")
    said = list(given.values()) if isinstance(given, dict) else [given]
    named = not isinstance(given, dict) or all(isinstance(name, str) for name in given)
    if not said or not named or any(kind not in kinds for kind in said):
        raise PydanticCustomError(
            "recompute",
            'expected "none", "full", "selective", or a table of patterns of block names to these',
        )
    return given


def _as_tuple(given: Any) -> Any:
    return tuple(given) if isinstance(given, list) else given


def _schedule(given: Any) -> Any:
    if isinstance(given, Schedule) or given in KINDS:
        return given
    if isinstance(given, str | Path) and Path(given).is_file():
        return str(given)
    close = difflib.get_close_matches(str(given), KINDS, 1)
    known = ", ".join(KINDS)
    hint = f"did you mean {close[0]}?" if close else "there is no such file"
    raise PydanticCustomError("schedule", f"expected one of {known}, a Schedule, or a table's file; {hint}")


class Plan(BaseModel):
    """A mix of parallelism. All mistakes in its arguments are told at once, as one ``ValueError``.

    Attributes:
        pipe: ranks, or groups of them, that hold different stages of the model. A batch passes through in
            ``accumulate`` micro-batches; to keep all ranks at work these should be several times as many.
        schedule: what each of them does when: ``"naive"``, ``"gpipe"``, ``"1f1b"``, ``"interleaved"``,
            ``"zb-h1"``, ``"zbv"``, a :class:`~espalier.parallel.pipeline.actions.Schedule`, or the file of a
            table of one. The results are the same.
        stages_per_rank: stages of each; ``"interleaved"`` takes 2 or more, ``"zbv"`` 2, the others 1.
        cuts: the modules at which the stages but the first begin; None: where stages are about equal.
        balance: equal in operations and bytes (``"counted"``), or in the time that parts of the model take on
            the ranks' devices before the first step (``"measured"``).
        data: ranks that share the batch, and what ``zero`` says of parameters, gradients and states.
        expert: ranks, among those that share the batch, that hold different experts of a model that has
            some: it divides ``data``. The mesh then has the axes ``data``, of size ``data / expert``, and
            ``expert``; a batch's rows are cut along both, and along ``expert`` tokens travel to experts.
        branch: ranks, or groups of them, that hold different branches of a layer (attention and MLP of
            GPT-J's kind, the towers of a model) and compute them at the same time; which modules these are
            says ``initialize(..., branches=...)``.
        zero: what is cut along the data axis: nothing (0, as DDP), the optimizer's states (1), gradients
            too (2), parameters too (3, as FSDP). The results are the same.
        replicate: groups of ``data`` ranks that hold the same and share the batch too (hybrid sharding:
            cut inside a node, replicate across).
        tensor: ranks that share each layer (heads, hidden and vocabulary dims).
        sequence_parallel: with ``tensor``: what lies between layers that are cut (the residual stream, norms,
            dropouts) is cut over the sequence, as in Megatron-LM. The results are the same. ``"auto"``: if
            that is cheaper, in bytes sent and held.
        tensor_mode: how they do: ``"1d"`` (a line, Megatron-LM), ``"2d"`` (a grid, SUMMA), ``"2.5d"``
            (``depth`` grids upon each other) or ``"3d"`` (a cube). But in 1d they share the batch's rows too.
        depth: grids of ``"2.5d"``.
        context: ranks that share each sequence: inputs are cut along dim 1. Parameters are replicated along
            this axis, and their gradients summed.
        context_kind: how attention sees a whole sequence: ``"ring"`` (keys and values travel from rank to
            rank), ``"ulysses"`` (for its time heads are cut in place of the sequence), ``"gather"`` (keys and
            values are gathered), or ``"auto"``: of the first two what sends less.
        clip: largest 2-norm of all gradients together; larger ones are scaled down to it. None: no limit.
        accumulate: micro-batches of a step; each rank holds the activations of one at a time.
        chunk_megabytes: parameters and gradients move along the data axis in buffers of about this size,
            gradients as soon as one is full, while the backward pass goes on.
        prefetch_megabytes: with ``zero=3``, so much of the parameters is gathered before it is needed.
        precision: ``"float32"`` (parameters as given, nothing is cast), ``"bfloat16"``, ``"float16"``
            (both with float32 masters), ``"autocast-bfloat16"``, ``"autocast-float16"``, or a table of the
            arguments of :class:`~espalier.parallel.precision.Precision`.
        offload: where parameters, gradients and states lie between their uses, a table of the arguments of
            :class:`~espalier.parallel.offload.Offload`: ``{states = "host"}``, say. Parameters off the device
            need ``zero=3``, gradients ``zero`` of 1 or more; a data axis of 1 needs neither.
        gradients: where finished gradients are until the step: ``"beside"`` the parameters, or ``"in-place"``
            of them, which spares 2 of 16 bytes a parameter: the backward pass has used those of 16 bits for
            the last time, and the step makes them anew from their float32 masters. It needs these, and
            ``accumulate`` of 1; the results are the same.
        recompute: what blocks computed and the backward pass computes again, to spare memory: ``"none"``,
            ``"full"`` (all but a block's inputs), ``"selective"`` (all but matrix products and outputs of
            attention), or a table of name patterns of blocks to these (the first that matches holds).
        recompute_inputs: what is kept of the inputs of such a block: the ``"whole"``, this rank's slice
            (``"sharded"`` over the tensor axis), or a copy in ``"host"`` memory.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    pipe: Size = 1
    schedule: Annotated[Any, PlainValidator(_schedule)] = "1f1b"
    stages_per_rank: Size = 1
    cuts: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    balance: Literal["counted", "measured"] = "counted"
    data: Size = 1
    expert: Size = 1
    branch: Size = 1
    zero: Literal[0, 1, 2, 3] = 0
    replicate: Size = 1
    tensor: Size = 1
    sequence_parallel: bool | Literal["auto"] = False
    tensor_mode: Mode = "1d"
    depth: Size = 1
    context: Size = 1
    context_kind: Literal["auto", "ring", "ulysses", "gather"] = "auto"
    clip: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    accumulate: Size = 1
    chunk_megabytes: Annotated[float, Field(gt=0, allow_inf_nan=False)] = 25.0
    prefetch_megabytes: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 50.0
    precision: Annotated[Precision, BeforeValidator(as_precision)] = Precision()
    offload: Offload = Offload()
    gradients: Literal["beside", "in-place"] = "beside"
    recompute: Annotated[str | dict[str, str], PlainValidator(_recompute)] = "none"
    recompute_inputs: Literal["whole", "sharded", "host"] = "whole"

    def __init__(self, **given: Any) -> None:
        try:
            super().__init__(**given)
        except ValidationError as error:
            found = [_mistake(dict(item), type(self)) for item in error.errors(include_url=False)]
            raise PlanError(found) from None
        found = [*self._pipe_mistakes(), *self._tensor_mistakes(), *self._gradient_mistakes()]
        if self.data % self.expert:
            found.append(("expert", self.expert, f"it divides data = {self.data}, whose ranks share experts"))
        if self.expert > 1 and self.replicate > 1:
            found.append(("expert", self.expert, "experts are not copied: expected replicate = 1"))
        if self.data * self.replicate * self.context > 1:
            cut = {"parameters": 3, "gradients": 1}
            away = [(kind, s) for kind, s in self.offload.shares.items() if s.place != "device"]
            found += [
                (f"offload.{kind}", s.place, f"what is off the device is cut: expected zero >= {cut[kind]}")
                for kind, s in away
                if self.zero < cut.get(kind, 0)
            ]
        if found:
            raise PlanError(found)

    def _pipe_mistakes(self) -> list[tuple[str, Any, str]]:
        found: list[tuple[str, Any, str]] = []
        stages, several = self.pipe * self.stages_per_rank, self.stages_per_rank > 1
        if self.cuts is not None and len(self.cuts) != stages - 1:
            found.append(("cuts", self.cuts, f"{stages} stage(s) begin at {stages - 1} module(s)"))
        if self.balance == "measured" and (self.cuts is not None or self.pipe == 1):
            why = "cuts are given" if self.pipe > 1 else "there is one stage"
            found.append(("balance", self.balance, f"{why}: there is nothing to balance"))
        if self.pipe == 1:
            if several:
                found.append(("stages_per_rank", self.stages_per_rank, "stages need pipe of 2 or more"))
            return found
        told = {"interleaved": "interleaved needs 2 or more", "zbv": "zbv needs 2"}
        told.update(dict.fromkeys(("naive", "gpipe", "1f1b", "zb-h1"), f"{self.schedule} needs 1"))
        right = {"interleaved": several, "zbv": self.stages_per_rank == 2}
        kind = self.schedule if self.schedule in KINDS else None
        if kind is not None and not right.get(kind, not several):
            found.append(("stages_per_rank", self.stages_per_rank, f"schedule = {told[kind]}"))
        if isinstance(self.schedule, Schedule):
            for key, own, its in (
                ("pipe", self.pipe, self.schedule.ranks),
                ("accumulate", self.accumulate, self.schedule.micro_batches),
            ):
                if own != its:
                    found.append((key, own, f"the schedule given is for {its}"))
        return found

    def _gradient_mistakes(self) -> list[tuple[str, Any, str]]:
        """What keeps gradients from taking the place of parameters."""
        if self.gradients == "beside":
            return []
        low, reduce = self.precision.parameters, self.precision.reduce
        away = self.offload.gradients.place, self.offload.parameters.place
        reasons = (
            (low is None, "parameters need masters: expected precision = bfloat16 or float16"),
            (low and reduce not in (None, low), f"they need the parameters' size: expected reduce = {low}"),
            (self.accumulate > 1, "a second micro-batch needs the parameters: expected accumulate = 1"),
            (self.pipe > 1, "a pipeline's later micro-batches need the parameters: expected pipe = 1"),
            (away != ("device", "device"), "both are on the device: expected no other place in offload"),
        )
        return [("gradients", self.gradients, told) for wrong, told in reasons if wrong]

    def _tensor_mistakes(self) -> list[tuple[str, Any, str]]:
        if self.tensor_mode == "2.5d" and self.tensor > 1 and self.depth == 1:
            return [("depth", 1, "2.5d needs 2 grids or more (one alone is tensor_mode = '2d')")]
        if self.tensor_mode != "2.5d" and self.depth > 1:
            return [("depth", self.depth, "only tensor_mode = '2.5d' has a depth: expected 1")]
        if self.tensor_mode != "1d" and self.sequence_parallel:
            told = "only tensor_mode = '1d' leaves anything whole to cut"
            return [("sequence_parallel", self.sequence_parallel, told)]
        if self.tensor_mode != "1d" and self.branch > 1:
            return [("branch", self.branch, "branches go with tensor_mode = '1d': expected 1")]
        try:
            tensor_axes(self.tensor_mode, self.tensor, self.depth)
        except ValueError as error:
            return [("tensor", self.tensor, str(error))]
        return []

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Plan:
        """The plan of a dict such as ``{"data": 2, "tensor": 2}``."""
        return cls(**given)

    @classmethod
    def from_toml(cls, path: str | Path) -> Plan:
        """The plan in a TOML file: its table ``[plan]``, or the whole file if it has none."""
        try:
            tables = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise ValueError(f"The plan {path} cannot be read: {error.strerror}.") from None
        except tomllib.TOMLDecodeError as error:
            raise ValueError(f"The plan {path} is not valid TOML: {error}.") from None
        return cls(**tables.get("plan", tables))

    @property
    def axes(self) -> dict[str, int]:
        """The mesh's axes, outermost first (the last has the closest neighbours)."""
        pipe = {"pipe": self.pipe} if self.pipe > 1 else {}
        hybrid = {"replicate": self.replicate} if self.replicate > 1 else {}
        experts = {"expert": self.expert} if self.expert > 1 else {}
        context = {"context": self.context} if self.context > 1 else {}
        branches = {"branch": self.branch} if self.branch > 1 else {}
        data = {"data": self.data // self.expert, **context, **experts}
        return {**pipe, **hybrid, **data, **branches, **self.tensor_axes}

    @property
    def tensor_axes(self) -> dict[str, int]:
        """The axes whose ranks share each layer, outermost first."""
        return tensor_axes(self.tensor_mode, self.tensor, self.depth)

    @property
    def data_axes(self) -> tuple[str, ...]:
        """The axes along which gradients are summed chunk by chunk, outermost first.

        State is cut along all of them but ``replicate``.
        """
        return tuple(name for name in self.axes if name in ("replicate", "data", "context", "expert"))

    @property
    def batch_axes(self) -> tuple[str, ...]:
        """The axes that cut the batch's rows, outermost first."""
        return (*(name for name in self.data_axes if name != "context"), *ROWS[self.tensor_mode])

    @property
    def words(self) -> dict[str, str]:
        """What the rules are told of the mesh's axes (see ``Mesh.telling``)."""
        return {} if self.context_kind == "auto" else {"context": self.context_kind}

    @property
    def world_size(self) -> int:
        """Number of ranks."""
        return math.prod(self.axes.values())

    def __str__(self) -> str:
        kinds = {name: f" ({word})" for name, word in self.words.items()}
        axes = " × ".join(f"{name} {n}{kinds.get(name, '')}" for name, n in self.axes.items())
        zero = f", ZeRO {self.zero}" if self.zero else ""
        kind = self.schedule.kind if isinstance(self.schedule, Schedule) else self.schedule
        each = f", {self.stages_per_rank} stages a rank" if self.stages_per_rank > 1 else ""
        pipe = f", {kind}{each}" if self.pipe > 1 else ""
        sequence = {True: ", sequence parallel", "auto": ", sequence parallel if cheaper"}
        precision = "" if self.precision == Precision() else f", {self.precision}"
        away = f", {self.offload}" if str(self.offload) else ""
        place = ", gradients in place" if self.gradients == "in-place" else ""
        return f"{axes}{pipe}{sequence.get(self.sequence_parallel, '')}{zero}{precision}{place}{away}"


class PlanError(ValueError):
    """A plan that cannot be.

    Attributes:
        mistakes: (key, what was given, what is expected) for each mistake.
    """

    def __init__(self, mistakes: Sequence[tuple[str, Any, str]]) -> None:
        self.mistakes = tuple(mistakes)
        lines = [f"{key} = {given!r}: {expected}" for key, given, expected in mistakes]
        super().__init__("\n  ".join([f"Plan: {len(lines)} mistake(s)", *lines]))

    def __reduce__(self) -> Any:
        return type(self), (self.mistakes,)


def _mistake(item: dict[str, Any], model: type[BaseModel]) -> tuple[str, Any, str]:
    name = ".".join(map(str, item["loc"]))
    if item["type"] == "extra_forbidden":
        *tables, key = item["loc"]
        for table in tables:
            model = model.model_fields[table].annotation  # type: ignore[assignment]
        known = list(model.model_fields)
        close = difflib.get_close_matches(key, known, 1)
        hint = f"did you mean {close[0]}?" if close else f"known keys: {', '.join(known)}"
        return name, item["input"], f"unknown key; {hint}"
    return (
        name,
        item["input"],
        item["msg"].replace("Input should be", "expected").removeprefix("Value error, "),
    )
