"""The proof that a layout changed nothing: a plan against the same plain model on one process.

Everything is in float64, so that what differs is an error and not rounding:
the sums of a layout are taken in another order, which costs some 1e-15.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from espalier.checkpoint.foreign import load_into
from espalier.engine.batches import loss_of
from espalier.parallel.plan import Plan
from espalier.torch_private import all_given
from espalier.train.building import build_model, build_optimizer, count_of, weights_of
from espalier.train.corpus import prepare
from espalier.train.data import training_batches
from espalier.train.job import Job


@dataclass(frozen=True)
class Difference:
    """The largest absolute difference of a kind, and where it is.

    Attributes:
        value: largest absolute difference; infinite where one side has a NaN or nothing to compare.
        where: name of the parameter; empty for the loss.
    """

    value: float = 0.0
    where: str = ""


@dataclass(frozen=True)
class StepReport:
    """Differences at one optimizer step.

    Attributes:
        step: counted from 1.
        reference_loss: in nats.
        loss: of the global batch.
        grad_norm: of the whole gradient before clipping; zero where the job does not clip.
        gradients: of every parameter, before the step.
        parameters: after the step.
    """

    step: int
    reference_loss: float
    loss: Difference
    grad_norm: Difference
    gradients: Difference
    parameters: Difference

    @property
    def differences(self) -> tuple[Difference, ...]:
        """All of them, in the order of the fields."""
        return self.loss, self.grad_norm, self.gradients, self.parameters


@dataclass(frozen=True)
class Verification:
    """The whole comparison.

    Attributes:
        model: what was compared.
        plan: in words.
        parameters: number of the model's parameters.
        tolerance: largest difference that passes.
        steps: one report for each optimizer step.
        notices: what was changed for the comparison.
    """

    model: str
    plan: str
    parameters: int
    tolerance: float
    steps: list[StepReport] = field(default_factory=list)
    notices: list[str] = field(default_factory=list)

    @property
    def worst(self) -> float:
        """The largest difference of all."""
        values = [d.value for s in self.steps for d in s.differences]
        return max(values, default=float("inf"))

    @property
    def passed(self) -> bool:
        """Whether every difference is within the tolerance."""
        return self.worst <= self.tolerance


def verify(job: Job) -> Verification | None:
    """Compare the job's plan with one process, on this rank.

    The reference runs on rank 0 alone: a copy of the plain model made before
    `espalier.initialize`, on the same global batches, with torch and nothing else.

    Returns:
        The comparison on rank 0, None on the others.
    """
    import espalier

    settings = job.verify
    spec, silenced = job.model.without_dropout()
    notices = []
    if silenced:
        notices.append(f"dropout set to 0 ({', '.join(silenced)}): the reference draws other random numbers")
    job = replace(job, model=spec)
    model = build_model(spec, settings.seed, torch.float64)
    begins_with = weights_of(job)
    if begins_with is not None:
        load_into(model, begins_with)
    reference = copy.deepcopy(model)
    optimizer = build_optimizer(job.optimizer, model)
    plan = espalier.Plan.from_dict({**job.raw.get("plan", {}), "precision": "float32"})
    if job.plan.precision != plan.precision:
        notices.append("plan.precision left out: the comparison is in float64")
    options: dict[str, Any] = {"max_grad_norm": job.clip, "count": count_of(job.model)}
    engine = espalier.initialize(model, optimizer, plan, **options)
    batches = training_batches(
        job,
        prepare(job),
        size=settings.batch_size or job.train.batch_size,
        sequence=settings.sequence or job.train.sequence,
        seed=settings.seed,
        dtype=torch.float64,
    )
    plain = PlainRun(job, reference.to(engine.mesh.device())) if engine.mesh.rank == 0 else None
    reports = []
    for step in range(1, settings.steps + 1):
        parts = [
            engine.local_batch(batches.batch(step, rows), size)
            for rows, size in engine.micro_batches(batches.size)
        ]
        with Double() as double:
            engine.accumulate(parts)
        engine.finish_gradients()
        gradients = {n: g if g is None else g.clone() for n, g in engine.full_gradients().items()}
        assert engine.loss is not None
        value = float(engine.loss)
        engine.step()
        weights = engine.full_state_dict()
        if plain is None:
            continue
        plain_loss = plain.backward(batches.batch(step))
        of_gradients = compare({n: p.grad for n, p in reference.named_parameters()}, gradients)
        of_norm = Difference()
        plain_norm = plain.step()
        if plain_norm is not None and engine.grad_norm is not None:
            of_norm = Difference(_distance(plain_norm, float(engine.grad_norm)))
        plain_weights: dict[str, torch.Tensor | None] = dict(reference.named_parameters())
        of_parameters = compare(plain_weights, {n: x for n, x in weights.items() if n in plain_weights})
        of_loss = Difference(_distance(plain_loss, value))
        reports.append(StepReport(step, plain_loss, of_loss, of_norm, of_gradients, of_parameters))
    if plain is None:
        return None
    if double.kept:
        notices.append(f"{double.kept} casts to float32 inside the model kept in float64, on both sides")
    count = sum(p.numel() for p in reference.parameters())
    return Verification(type(reference).__name__, _words(plan), count, settings.tolerance, reports, notices)


def _words(plan: Plan) -> str:
    """The plan, with what its own words leave out and a reader of the proof has asked for."""
    parts = f", {plan.accumulate} micro-batches" if plan.accumulate > 1 else ""
    recompute = "" if plan.recompute == "none" else ", recomputation"
    return f"{plan}{parts}{recompute}"


class PlainRun:
    """The reference: a plain loop of torch, with no Espalier in it."""

    def __init__(self, job: Job, model: nn.Module) -> None:
        self._model = model
        self._optimizer = build_optimizer(job.optimizer, model)
        self._clip = job.clip

    def backward(self, batch: dict[str, torch.Tensor]) -> float:
        """Compute the gradients of the global batch; return its loss in nats."""
        self._optimizer.zero_grad()
        device = next(self._model.parameters()).device
        with Double():
            loss = loss_of(self._model(**{name: tensor.to(device) for name, tensor in batch.items()}))
        loss.backward()
        return float(loss.item())

    def step(self) -> float | None:
        """Clip and update the parameters; the norm of the gradient, where the job clips."""
        norm = None
        if self._clip is not None:
            norm = float(nn.utils.clip_grad_norm_(self._model.parameters(), self._clip))
        self._optimizer.step()
        return norm


def compare(expected: dict[str, torch.Tensor | None], actual: dict[str, torch.Tensor | None]) -> Difference:
    """The largest absolute difference between tensors of the same names.

    A tensor missing on one side counts as zeros; another shape, a NaN on one
    side, or a name on one side only is an infinite difference.
    """
    if expected.keys() != actual.keys():
        odd = sorted(expected.keys() ^ actual.keys())
        return Difference(float("inf"), f"only on one side: {', '.join(odd)}")
    worst = Difference()
    for name, a in expected.items():
        value = _tensor_distance(a, actual[name])
        if value > worst.value:
            worst = Difference(value, name)
    return worst


def _tensor_distance(a: torch.Tensor | None, b: torch.Tensor | None) -> float:
    if a is None or b is None:
        rest = b if a is None else a
        return 0.0 if rest is None or not rest.numel() else float(rest.detach().abs().max())
    if a.shape != b.shape:
        return float("inf")
    if not a.numel():
        return 0.0
    gap = float((a.detach() - b.detach().to(a.device)).abs().max())
    return float("inf") if gap != gap else gap


def _distance(a: float, b: float) -> float:
    gap = abs(a - b)
    return float("inf") if gap != gap else gap


# ---- float64 throughout


class Double(TorchFunctionMode):
    """While active, no call takes a float64 tensor down to float32.

    Attributes:
        kept: number of casts that were changed.
    """

    def __init__(self) -> None:
        super().__init__()
        self.kept = 0

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = all_given(func, kwargs)
        first = args[0] if args else kwargs.get("input")
        if isinstance(first, torch.Tensor) and first.dtype == torch.float64:
            if func is torch.Tensor.float:
                self.kept += 1
                return first
            if any(a is torch.float32 for a in (*args, *kwargs.values())):
                self.kept += 1
                args = tuple(torch.float64 if a is torch.float32 else a for a in args)
                kwargs = {k: torch.float64 if a is torch.float32 else a for k, a in kwargs.items()}
        return func(*args, **kwargs)
