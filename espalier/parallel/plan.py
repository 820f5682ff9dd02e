"""The plan: which axes there are, how big, and what each is for. Data: printable, comparable, loadable."""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, get_args

from pydantic import AfterValidator, BeforeValidator, Field, PlainValidator, ValidationError, model_validator
from pydantic_core import PydanticCustomError

from espalier.parallel.schedules.actions import Schedule
from espalier.parallel.schedules.generate import KINDS
from espalier.texts import (
    MISSING,
    Count,
    MistakeError,
    Positive,
    Settings,
    did_you_mean,
    dtype_name,
    expect,
    mistakes_in,
    shown,
)

if TYPE_CHECKING:  # mistakes in a plan are told before torch is there
    import torch
    from torch import nn

# ---- the tensor axes of a plan: how the ranks that share each layer form a line, a grid or a cube
#
# ======== ========================== ======================================== =====================
# mode     axes                       activations [rows, ..., hidden]          rows are cut over
# ======== ========================== ======================================== =====================
# 1d       tensor                     whole, hidden cut inside of blocks       none of them
# 2d       row, col                   rows over row, hidden over col           row
# 2.5d     depth, row, col            rows over depth and row, hidden over col depth, row
# 3d       i, j, k                    rows over i and j, hidden over k         i, j
# ======== ========================== ======================================== =====================


Mode = Literal["1d", "2d", "2.5d", "3d"]

# the tensor axes that cut a batch's rows, outermost first
ROWS: Final = MappingProxyType({"1d": (), "2d": ("row",), "2.5d": ("depth", "row"), "3d": ("i", "j")})


def tensor_axes(mode: Mode, ranks: int, depth: int) -> dict[str, int]:
    """The tensor axes of a plan and their sizes, outermost first.

    A grid has the row and column counts that are closest, no more rows than columns: 8 ranks are 2 x 4.

    Raises:
        ValueError: so many ranks form no such grid or cube; says what does.
    """
    if mode == "1d":
        return {"tensor": ranks}
    if mode == "2d":
        return _grid(ranks)
    if mode == "2.5d":
        if ranks % depth:
            raise ValueError(f"2.5d puts depth grids upon each other: expected a multiple of depth = {depth}")
        return {"depth": depth, **_grid(ranks // depth)}
    side = round(ranks ** (1 / 3))
    if side**3 != ranks:
        below = max(n for n in range(1, side + 1) if n**3 < ranks)
        raise ValueError(f"3d needs a cube of ranks: expected {below**3} or {(below + 1) ** 3}")
    return {"i": side, "j": side, "k": side}


def _grid(ranks: int) -> dict[str, int]:
    rows = max(n for n in range(1, math.isqrt(ranks) + 1) if ranks % n == 0)
    return {"row": rows, "col": ranks // rows}


# ---- the part of a plan that says where state lies between its uses. Data, like the plan


Place = Literal["device", "host", "disk"]
PLACES: Final[tuple[str, ...]] = get_args(Place)
Updater = Literal["host", "device", "auto"]


def _at_most(most: int, unit: int, name: str) -> AfterValidator:
    """Refuses a size that no device holds: it was written in smaller units, bytes say."""

    def check(value: float) -> float:
        if value > most:
            raise PydanticCustomError(
                "unit",
                "expected at most {most} {name}; so many bytes would be {meant}",
                {"most": f"{most:,}", "name": name, "meant": f"{value / unit:.4g}"},
            )
        return value

    return AfterValidator(check)


_MEGABYTES = _at_most(10**6, 10**6, "megabytes")
_GIGABYTES = _at_most(10**4, 10**9, "gigabytes")


class Share(Settings):
    """Where a part of one kind of state lies; a lone string is ``place``.

    Attributes:
        place: ``"device"``, ``"host"`` (pinned memory, where there is a device), ``"disk"``; ``"auto"``
            stands for ``{place = "host", ratio = "auto"}``.
        ratio: the share of the chunks' bytes that lies there; the rest is on the device. ``"auto"``: what
            does not fit below ``budget_gigabytes``, as the first steps show.
    """

    place: Place = "device"
    ratio: Annotated[float, Field(ge=0, le=1)] | Literal["auto"] = 1.0


def as_share(value: Any) -> Any:
    """A lone string as the table that it stands for; the rest as it is."""
    if value == "auto":
        return {"place": "host", "ratio": "auto"}
    return {"place": value} if isinstance(value, str) else value


Where = Annotated[Share, BeforeValidator(as_share)]


class Offload(Settings):
    """Where parameters, gradients and states lie between their uses: a residency for each kind.

    Attributes:
        parameters: this rank's pieces of the parameters.
        gradients: this rank's pieces of the finished gradients.
        states: the optimizer's states, and master copies of low-precision parameters.
        directory: for what is on disk. Each rank makes a folder of its own in there, which is removed at
            the end.
        budget_gigabytes: of the device's memory (10^9 bytes), for kinds whose ratio is ``"auto"``: states
            are kept on the device first, then gradients and parameters, as far as they fit. None: nine
            tenths of what an accelerator has free.
        update: who updates what has its states in the host's memory: the ``"host"``, the ``"device"`` (states
            are brought and sent back), or both at the same time, by the speeds that the first steps show
            (``"auto"``). Optimizers without a kernel for the host are the device's. The results are the same.
    """

    parameters: Where = Share()
    gradients: Where = Share()
    states: Where = Share()
    directory: str | None = None
    budget_gigabytes: Annotated[Positive, _GIGABYTES] | None = None
    update: Updater = "host"

    @property
    def shares(self) -> dict[str, Share]:
        """The residency of each kind."""
        return {"states": self.states, "gradients": self.gradients, "parameters": self.parameters}

    @property
    def away(self) -> dict[str, Share]:
        """The residency of each kind that is not all on the device."""
        return {kind: share for kind, share in self.shares.items() if share.place != "device"}

    @property
    def is_by_budget(self) -> bool:
        """Whether what lies where follows from the memory that there is."""
        return any(s.ratio == "auto" for s in self.shares.values())

    @model_validator(mode="after")
    def _fits(self) -> Offload:
        shares, budget = self.shares.values(), self.budget_gigabytes
        mistakes: list[tuple[str, Any, str]] = []
        if any(s.place == "disk" for s in shares) and self.directory is None:
            mistakes.append(("directory", MISSING, "what is on disk needs a folder there: directory = ..."))
        if budget is not None and not self.is_by_budget:
            needed = 'budget_gigabytes is for a ratio that is auto: states = "auto", say'
            mistakes.append(("budget_gigabytes", budget, needed))
        if self.update != "host" and self.states.place != "host":
            mistakes.append(
                ("update", self.update, 'no states are on the host: expected states = "host" beside it')
            )
        if mistakes:
            raise MistakeError("Offload", mistakes)
        return self

    def __str__(self) -> str:
        updater = {"host": "", "device": ", updated by the device", "auto": ", updated by both"}[self.update]
        return ", ".join(f"{kind} on {s.place}{_part(s)}" for kind, s in self.away.items()) + updater


def _part(share: Share) -> str:
    if share.ratio == "auto":
        return " as needed"
    return "" if share.ratio == 1 else f" ({share.ratio:.0%})"


# ---- the part of a plan that says in which dtypes it computes. Data, like the plan


class LossScale(Settings):
    """How the loss is scaled in float16, so that small gradients don't vanish; named as in GradScaler.

    Attributes:
        init_scale: the first scale.
        growth_factor: it grows by this after ``growth_interval`` steps without an overflow.
        backoff_factor: it shrinks by this where a gradient overflows; that step is skipped. 1 keeps it fixed.
        growth_interval: see ``growth_factor``.
        hysteresis: so many steps overflow before it shrinks; all of them are skipped.
        refill: when these are counted anew: at the scale's next ``"growth"``, or after each step without an
            overflow (``"always"``).
        min_scale: below it training ends with an error, which names the parameters that overflowed.
    """

    init_scale: Positive = 65536.0
    growth_factor: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 2.0
    backoff_factor: Annotated[float, Field(gt=0, le=1)] = 0.5
    growth_interval: Count = 2000
    hysteresis: Count = 1
    refill: Literal["growth", "always"] = "growth"
    min_scale: Positive = 1.0


def _as_tuple(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


class Precision(Settings):
    """In which dtypes a plan computes, sends gradients and updates; a lone string is ``compute``.

    Attributes:
        compute: ``"float32"`` casts nothing: parameters are as given. With ``"bfloat16"`` and ``"float16"``
            the model computes in parameters of that dtype, and the optimizer updates float32 masters of
            them. With ``"autocast-bfloat16"`` and ``"autocast-float16"`` the parameters stay as given and
            the forward pass runs under ``torch.autocast``. ``"float8"`` is ``"bfloat16"`` with products of
            8-bit floats, forward and backward, in the linear layers of the model's blocks.
        keep: patterns of the names of layers that stay in bfloat16 under ``"float8"``: ``"*.router"``.
        reduce: the dtype in which gradients travel and are summed; by default the parameters' own.
        buffers: the dtype to which floating buffers are cast; by default they stay as given.
        loss_scale: settings of the loss scaling that every form of float16 has.
    """

    compute: Literal["float32", "bfloat16", "float16", "autocast-bfloat16", "autocast-float16", "float8"] = (
        "float32"
    )
    keep: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] = ()
    reduce: Literal["float32", "bfloat16", "float16"] | None = None
    buffers: Literal["float32", "bfloat16", "float16"] | None = None
    loss_scale: LossScale = LossScale()

    @property
    def parameters(self) -> str | None:
        """The dtype to which parameters are cast; None where they stay as given."""
        if self.compute == "float8":
            return "bfloat16"
        return self.compute if self.compute in ("bfloat16", "float16") else None

    @property
    def autocast(self) -> str | None:
        """The dtype of ``torch.autocast``; None where it is off."""
        way, _, dtype = self.compute.partition("-")
        return dtype if way == "autocast" else None

    @property
    def scales(self) -> bool:
        """Whether the loss is scaled."""
        return self.compute in ("float16", "autocast-float16")

    def __str__(self) -> str:
        return self.compute if self.reduce is None else f"{self.compute}, reduced in {self.reduce}"


def as_precision(value: Any) -> Any:
    """A lone string, or a dtype of torch's, as the table that it stands for; the rest as it is."""
    if isinstance(value, str):
        return {"compute": value}
    if str(value).startswith("torch."):
        return {"compute": dtype_name(value)}
    if not isinstance(value, Mapping | Precision):
        keys = ", ".join(Precision.model_fields)
        raise PydanticCustomError("precision", f"expected a word, such as 'bfloat16', or a table of {keys}")
    return value


# ---- the plan itself


def _recompute(value: Any) -> Any:
    kinds = ("none", "full", "selective")
    said = list(value.values()) if isinstance(value, dict) else [value]
    named = not isinstance(value, dict) or all(isinstance(name, str) for name in value)
    if not said or not named or any(kind not in kinds for kind in said):
        raise PydanticCustomError(
            "recompute",
            'expected "none", "full", "selective", or a table of patterns of block names to these',
        )
    return value


def _stage(value: Any) -> Any:
    if type(value) is not int or value not in range(4):  # True and 3.0 are equal to stages
        raise PydanticCustomError("zero", "expected 0, 1, 2 or 3")
    return value


def _schedule(value: Any) -> Any:
    if isinstance(value, Schedule) or value in KINDS:
        return value
    if isinstance(value, str | Path) and Path(value).is_file():
        return str(value)
    known = ", ".join(KINDS)
    hint = did_you_mean(str(value), KINDS, "there is no such file", show=str)
    raise PydanticCustomError("schedule", f"expected one of {known}, a Schedule, or a table's file; {hint}")


_NAMES = MappingProxyType(
    {
        "dp": "data",
        "tp": "tensor",
        "pp": "pipe",
        "cp": "context",
        "ep": "expert",
        "micro_batches": "accumulate",
        "gradient_accumulation_steps": "accumulate",
        "max_grad_norm": "clip",
        "gradient_clipping": "clip",
        "zero_stage": "zero",
    }
)
_DTYPES = MappingProxyType({"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"})
_SCHEDULES = MappingProxyType(
    {"interleaved1f1b": "interleaved", "zbvzerobubble": "zbv", "sequential": "naive", "zb1p": "zb-h1"}
)


def _as_plain(value: Any) -> Any:
    """Tables and lists of other kinds (omegaconf's, say) as Python's own."""
    if isinstance(value, Mapping):
        return {key: _as_plain(x) for key, x in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str | bytes | tuple | list):
        return [_as_plain(x) for x in value]
    return value


def known_as(arguments: Mapping[str, Any]) -> dict[str, Any]:
    """A plan's arguments under the plan's names, where others were used that people know.

    ``dp``, ``tp``, ``pp``, ``cp``, ``ep`` are ``data``, ``tensor``, ``pipe``, ``context``, ``expert``;
    ``fsdp=n`` is ``data=n, zero=3``; ``bf16=True`` and ``fp16=True`` are ``precision="bfloat16"`` and
    ``"float16"``, which may be written ``"bf16"`` and ``"fp16"``; ``micro_batches`` and
    ``gradient_accumulation_steps`` are ``accumulate``, ``max_grad_norm`` and ``gradient_clipping`` ``clip``,
    ``zero_stage`` ``zero``. A schedule may be called as in torch: ``"1F1B"``, ``"Interleaved1F1B"``.

    Raises:
        PlanError: one thing is said twice.
    """
    keys: dict[str, Any] = {}
    said: dict[str, str] = {}
    twice: list[tuple[str, Any, str]] = []

    def say(name: str, value: Any, by: str) -> None:
        if name in said:
            twice.append((by, arguments[by], f"{said[name]} says the same: leave one of them out"))
        keys[name], said[name] = _as_plain(value), by

    for key, value in arguments.items():
        if key == "fsdp" and isinstance(value, bool):
            twice.append((key, value, "expected the number of ranks: fsdp = 4 is data = 4, zero = 3"))
        elif key == "fsdp":
            say("data", value, key)
            say("zero", 3, key)
        elif key in ("bf16", "fp16"):
            if not isinstance(value, bool):
                twice.append((key, value, "expected True or False"))
            elif value:
                say("precision", _DTYPES[key], key)
        else:
            say(_NAMES.get(key, key), value, key)
    if isinstance(precision := keys.get("precision"), str):
        way, dash, dtype = precision.rpartition("-")
        keys["precision"] = f"{way}{dash}{_DTYPES.get(dtype, dtype)}"
    if isinstance(schedule := keys.get("schedule"), str):
        name = schedule.lower().removeprefix("schedule")
        name = _SCHEDULES.get(name, name)
        keys["schedule"] = name if name in KINDS else schedule
    if twice:
        raise PlanError(twice)
    return keys


class Plan(Settings):
    """A mix of parallelism. All mistakes in its arguments are told at once, as one ``ValueError``.

    Names that people know from elsewhere are taken, too: see :func:`known_as`.

    Attributes:
        pipe: ranks, or groups of them, that hold different stages of the model. A batch passes through in
            ``accumulate`` micro-batches; to keep all ranks at work these should be several times as many.
        schedule: what each of them does when: ``"naive"``, ``"gpipe"``, ``"1f1b"``, ``"interleaved"``,
            ``"zb-h1"``, ``"zbv"``, a :class:`~espalier.parallel.schedules.Schedule`, or the file of a
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
        async_tensor_parallel: with ``sequence_parallel``: linear layers multiply a piece of the sequence
            while the next is on its way, and a sum travels on while the next addend is computed. As many
            bytes are sent; on accelerators they take less of a step.
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
        prefetch_megabytes: with ``zero=3``, so much of the parameters is gathered before it is needed, and in
            any case the next block, if it is above 0.
        precision: ``"float32"`` (parameters as given, nothing is cast), ``"bfloat16"``, ``"float16"``
            (both with float32 masters), ``"float8"``, ``"autocast-bfloat16"``, ``"autocast-float16"``, or a
            table of the arguments of :class:`~espalier.parallel.plan.Precision`.
        offload: where parameters, gradients and states lie between their uses, a table of the arguments of
            :class:`~espalier.parallel.plan.Offload`: ``{states = "host"}``, say. Parameters off the device
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
        why: what chose it, and why; empty for a plan that was written by hand.
    """

    pipe: Count = 1
    schedule: Annotated[Any, PlainValidator(_schedule)] = "1f1b"
    stages_per_rank: Count = 1
    cuts: Annotated[tuple[str, ...], BeforeValidator(_as_tuple)] | None = None
    balance: Literal["counted", "measured"] = "counted"
    data: Count = 1
    expert: Count = 1
    branch: Count = 1
    zero: Annotated[int, PlainValidator(_stage)] = 0
    replicate: Count = 1
    tensor: Count = 1
    sequence_parallel: bool | Literal["auto"] = False
    async_tensor_parallel: bool = False
    tensor_mode: Mode = "1d"
    depth: Count = 1
    context: Count = 1
    context_kind: Literal["auto", "ring", "ulysses", "gather"] = "auto"
    clip: Positive | None = None
    accumulate: Count = 1
    chunk_megabytes: Annotated[Positive, _MEGABYTES] = 25.0
    prefetch_megabytes: Annotated[float, Field(ge=0, allow_inf_nan=False), _MEGABYTES] = 50.0
    precision: Annotated[Precision, BeforeValidator(as_precision)] = Precision()
    offload: Offload = Offload()
    gradients: Literal["beside", "in-place"] = "beside"
    recompute: Annotated[str | dict[str, str], PlainValidator(_recompute)] = "none"
    recompute_inputs: Literal["whole", "sharded", "host"] = "whole"
    why: str = ""

    if TYPE_CHECKING:  # so that editors complete the keys, and checkers see a wrong one

        def __init__(
            self,
            *,
            pipe: int = 1,
            schedule: str | Schedule = "1f1b",
            stages_per_rank: int = 1,
            cuts: Sequence[str] | None = None,
            balance: Literal["counted", "measured"] = "counted",
            data: int = 1,
            expert: int = 1,
            branch: int = 1,
            zero: int = 0,
            replicate: int = 1,
            tensor: int = 1,
            sequence_parallel: bool | Literal["auto"] = False,
            async_tensor_parallel: bool = False,
            tensor_mode: Mode = "1d",
            depth: int = 1,
            context: int = 1,
            context_kind: Literal["auto", "ring", "ulysses", "gather"] = "auto",
            clip: float | None = None,
            accumulate: int = 1,
            chunk_megabytes: float = 25.0,
            prefetch_megabytes: float = 50.0,
            precision: str | Mapping[str, Any] | Precision | torch.dtype = ...,
            offload: Mapping[str, Any] | Offload = ...,
            gradients: Literal["beside", "in-place"] = "beside",
            recompute: str | Mapping[str, str] = "none",
            recompute_inputs: Literal["whole", "sharded", "host"] = "whole",
            why: str = "",
            # by the names that people know: see known_as
            dp: int = 1,
            tp: int = 1,
            pp: int = 1,
            cp: int = 1,
            ep: int = 1,
            micro_batches: int = 1,
            gradient_accumulation_steps: int = 1,
            max_grad_norm: float | None = None,
            gradient_clipping: float | None = None,
            zero_stage: int = 0,
            fsdp: int = 1,
            bf16: bool = False,
            fp16: bool = False,
        ) -> None: ...

    else:

        def __init__(self, *tables: Any, **arguments: Any) -> None:
            if tables:
                raise TypeError(
                    "Plan(...) takes values by their names, such as Plan(data=2, tensor=2), and those of a "
                    f"dict as Plan(**table); the first argument is {shown(tables[0])}."
                )
            try:
                super().__init__(**known_as(arguments))
            except ValidationError as error:
                raise PlanError(mistakes_in(error, type(self))) from None

    @model_validator(mode="after")
    def _fits(self) -> Plan:
        mistakes = [*self._pipe_mistakes(), *self._tensor_mistakes(), *self._gradient_mistakes()]
        if self.data % self.expert:
            expected = f"expected a divisor of data = {self.data}, whose ranks share experts"
            mistakes.append(("expert", self.expert, expected))
        if self.expert > 1 and self.replicate > 1:
            mistakes.append(("expert", self.expert, "experts are not copied: expected replicate = 1"))
        if self.data * self.replicate * self.context > 1:
            cut = {"parameters": 3, "gradients": 1}
            mistakes += [
                (f"offload.{kind}", s.place, f"what is off the device is cut: expected zero >= {cut[kind]}")
                for kind, s in self.offload.away.items()
                if self.zero < cut.get(kind, 0)
            ]
        if mistakes:
            raise PlanError(mistakes)
        return self

    def _pipe_mistakes(self) -> list[tuple[str, Any, str]]:
        mistakes: list[tuple[str, Any, str]] = []
        stages, several = self.pipe * self.stages_per_rank, self.stages_per_rank > 1
        if self.cuts is not None and len(self.cuts) != stages - 1:
            mistakes.append(("cuts", self.cuts, f"{stages} stage(s) begin at {stages - 1} module(s)"))
        if self.balance == "measured" and (self.cuts is not None or self.pipe == 1):
            why = "cuts are given" if self.pipe > 1 else "there is one stage"
            mistakes.append(("balance", self.balance, f"{why}: there is nothing to balance"))
        if self.pipe == 1:
            if several:
                mistakes.append(("stages_per_rank", self.stages_per_rank, "stages need pipe of 2 or more"))
            return mistakes
        needs = {"interleaved": "interleaved needs 2 or more", "zbv": "zbv needs 2"}
        needs.update(dict.fromkeys(("naive", "gpipe", "1f1b", "zb-h1"), f"{self.schedule} needs 1"))
        right = {"interleaved": several, "zbv": self.stages_per_rank == 2}
        kind = self.schedule if self.schedule in KINDS else None
        if kind is not None and not right.get(kind, not several):
            mistakes.append(("stages_per_rank", self.stages_per_rank, f"schedule = {needs[kind]}"))
        if isinstance(self.schedule, Schedule):
            for key, own, its in (
                ("pipe", self.pipe, self.schedule.ranks),
                ("accumulate", self.accumulate, self.schedule.micro_batches),
            ):
                if own != its:
                    mistakes.append((key, own, f"the schedule given is for {its}"))
        return mistakes

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
        return [("gradients", self.gradients, reason) for wrong, reason in reasons if wrong]

    def _tensor_mistakes(self) -> list[tuple[str, Any, str]]:
        if self.tensor_mode != "1d" and self.precision.compute == "float8":
            return [("tensor_mode", self.tensor_mode, "products of float8 go with tensor_mode = '1d'")]
        if self.pipe > 1 and self.precision.compute == "float8":
            return [("pipe", self.pipe, "products of float8 go with pipe = 1")]
        if self.tensor_mode == "2.5d" and self.tensor > 1 and self.depth == 1:
            return [("depth", 1, "2.5d needs 2 grids or more (one alone is tensor_mode = '2d')")]
        if self.tensor_mode != "2.5d" and self.depth > 1:
            return [("depth", self.depth, "only tensor_mode = '2.5d' has a depth: expected 1")]
        if self.tensor_mode != "1d" and self.sequence_parallel:
            only_1d = "only tensor_mode = '1d' leaves anything whole to cut"
            return [("sequence_parallel", self.sequence_parallel, only_1d)]
        if self.async_tensor_parallel and not self.sequence_parallel:
            needs = "what lies between layers is to be cut: expected sequence_parallel = true beside it"
            return [("async_tensor_parallel", True, needs)]
        if self.tensor_mode != "1d" and self.branch > 1:
            return [("branch", self.branch, "branches go with tensor_mode = '1d': expected 1")]
        try:
            tensor_axes(self.tensor_mode, self.tensor, self.depth)
        except ValueError as error:
            return [("tensor", self.tensor, str(error))]
        return []

    @classmethod
    def auto(
        cls,
        model: nn.Module,
        batch: Any,
        cluster: Any,
        *,
        loss_fn: Callable[[Any, Any], torch.Tensor] | None = None,
        optimizer: torch.optim.Optimizer | Iterable[torch.optim.Optimizer] | None = None,
        ranks: int | None = None,
        **fixed: Any,
    ) -> Plan:
        """The best plan for a model on a cluster; its ``why`` says why.

        Args:
            model: on the ``meta`` device, as for :func:`~espalier.dry_run`.
            batch: the global batch, as meta tensors.
            cluster: the name of one that is shipped (``"h100-sxm"``), the file of one, or one.
            loss_fn: as for :func:`~espalier.initialize`.
            optimizer: built on the model's parameters, or several as a list; AdamW if not given.
            ranks: how many of the cluster's are used; all by default.
            fixed: values of the plan that are not searched: ``precision="bfloat16"``, ``tensor=8``.

        Raises:
            ValueError: nothing fits; says what is the least that would.
        """
        # by name: the planner stands above, and is loaded by those alone who ask it
        auto = import_module("espalier.planner").auto
        plan: Plan = auto(model, batch, cluster, loss_fn=loss_fn, optimizer=optimizer, ranks=ranks, **fixed)
        return plan

    @classmethod
    def from_dict(cls, given: Mapping[str, Any]) -> Plan:
        """The plan of a dict such as ``{"data": 2, "tensor": 2}``."""
        expect(
            "The plan", given, Mapping, 'a dict of its arguments, such as {"data": 2, "tensor": 2, "zero": 1}'
        )
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
        return cls.from_dict(tables.get("plan", tables))

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
    def bare_axes(self) -> dict[str, int]:
        """:attr:`axes` without ``tensor`` where that has one rank: of a mesh that has no such axis."""
        return {name: n for name, n in self.axes.items() if name != "tensor" or n > 1}

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
        travels = ", asynchronous" if self.async_tensor_parallel else ""
        precision = "" if self.precision == Precision() else f", {self.precision}"
        away = f", {self.offload}" if str(self.offload) else ""
        place = ", gradients in place" if self.gradients == "in-place" else ""
        return (
            f"{axes}{pipe}{sequence.get(self.sequence_parallel, '')}{travels}{zero}{precision}{place}{away}"
        )


class PlanError(MistakeError):
    """A plan that cannot be."""

    def __init__(self, mistakes: Iterable[tuple[str, Any, str]]) -> None:
        super().__init__("Plan", mistakes)

    def __reduce__(self) -> Any:
        return type(self), (self.mistakes,)
