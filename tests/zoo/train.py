"""One model, trained under a plan and on one process: how far apart the two are, or how the first ended.

The functions of ranks (:func:`reference`, :func:`trial`) are called by a pool (``tests/pool.py``). What the
one process has, its batches and values among them, goes through a file.
"""

from __future__ import annotations

import linecache
import math
import random
import re
import traceback
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy
import torch
from torch import nn

import espalier
from espalier.engine.accumulation import UnseenCountError
from espalier.parallel.experts import stacked
from espalier.tensor import GatherWarning
from espalier.tensor.modules import lay_out_parameter
from espalier.train.verify import Double
from tests.zoo.cases import Batch, Case, case

STEPS, CLIP, TOLERANCE = 3, 1.0, 1e-9
# Where rounding alone makes larger differences so much more is allowed; what is looser still is not tried.
MARGIN, LOOSEST = 300, 1e-8
SOURCE = str(Path(espalier.__file__).parent)
LossFunction = Callable[[Any, Any], torch.Tensor]
End = Literal["exact", "refused", "wrong", "failed", "hung", "unfit"]
# words by which a refusal says what to do
REMEDY = re.compile(
    r"\b(pass|give|use|put|leave|expected|move|make|call|write|say|name|build|take|set|choose|hook|cast|wrap|"
    r"register|mark|split|add|remove|let|turn|state|tell|redistribute|pip install|instead|run)\b",
    re.IGNORECASE,
)


@dataclass(frozen=True)
class Verdict:
    """How a trial of a model under a plan ended.

    Attributes:
        end: ``"unfit"``: the model cannot be trained on one process as it is built here, or not by the plan.
        words: what was said, or how far apart the two are.
        where: of an error: the innermost line.
        gathered: functions that had no rule.
    """

    end: End
    words: str = ""
    where: str = ""
    gathered: tuple[str, ...] = ()

    @property
    def says_what_to_do(self) -> bool:
        """Whether a refusal's words have a remedy."""
        return bool(REMEDY.search(self.words))


class TrialError(RuntimeError):
    """What a rank's trial ended with, in a form that can be sent to another process."""

    def __init__(self, verdict: Verdict) -> None:
        super().__init__(verdict.words)
        self.verdict = verdict

    def __reduce__(self) -> Any:
        return type(self), (self.verdict,)


def refusal_or_failure(error: BaseException) -> Verdict:
    """Words that the library raised on purpose are a refusal, everything else is a failure."""
    frames = traceback.extract_tb(error.__traceback__)
    last = frames[-1]
    line = (last.line or linecache.getline(last.filename, last.lineno or 0)).strip()
    meant = last.filename.startswith(SOURCE) and line.startswith("raise")
    kinds = (ValueError, NotImplementedError, TypeError, RuntimeError)
    own = next((f for f in reversed(frames) if f.filename.startswith(SOURCE)), last)
    name = Path(own.filename).relative_to(SOURCE) if own.filename.startswith(SOURCE) else own.filename
    words = f"{type(error).__name__}: {error}"
    return Verdict(
        "refused" if meant and isinstance(error, kinds) else "failed", words[:2000], f"{name}:{own.lineno}"
    )


# ---- the loss


def outputs(found: Any) -> Iterator[torch.Tensor]:
    """The tensors of a model's output, in its order, but for caches."""
    if isinstance(found, torch.Tensor):
        yield found
    elif isinstance(found, dict):
        for key, value in found.items():
            if "past" not in key:
                yield from outputs(value)
    elif isinstance(found, tuple | list):
        for value in found:
            yield from outputs(value)


def made_up(found: Any, batch: Any = None) -> torch.Tensor:
    """A loss for a model that has none: of the first numbers that it gives and that need a gradient."""
    for x in outputs(found):
        if x.is_floating_point() and x.requires_grad and x.numel() > 1:
            return x.sin().mean()
    raise ValueError("the model gives nothing that needs a gradient")


def own_loss(found: Any, batch: Any = None) -> torch.Tensor | None:
    """The loss that a model gives itself, if it does."""
    loss = found if isinstance(found, torch.Tensor) else getattr(found, "loss", None)
    usable = isinstance(loss, torch.Tensor) and loss.numel() == 1 and loss.requires_grad
    return loss if usable else None


def called(model: nn.Module, batch: Batch) -> Any:
    """As the engine calls it."""
    if isinstance(batch, dict):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def parts_of(batch: Batch, parts: int) -> list[Batch]:
    """A batch as so many of fewer rows."""
    if isinstance(batch, torch.Tensor):
        return list(batch.chunk(parts)) if batch.ndim else [batch] * parts
    if isinstance(batch, dict):
        cut = {key: parts_of(value, parts) for key, value in batch.items()}
        return [{key: values[i] for key, values in cut.items()} for i in range(parts)]
    if isinstance(batch, tuple | list):
        rows = [parts_of(value, parts) for value in batch]
        return [type(batch)(values[i] for values in rows) for i in range(parts)]
    return [batch] * parts


def rows_of(batch: Batch) -> int:
    """Rows of a batch."""
    return next(len(x) for x in outputs(batch) if x.ndim)


# ---- one process


def seeded() -> None:
    """Every generator that a model may draw from, in the same state."""
    torch.manual_seed(7)
    random.seed(7)
    numpy.random.seed(7)  # noqa: NPY002


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an epsilon that keeps gradients of nearly zero from counting as much as the others."""
    trained = [p for p in model.parameters() if p.requires_grad]
    return torch.optim.AdamW(trained, lr=1e-2, weight_decay=0.1, eps=1e-4)


def values_of(model: nn.Module) -> dict[str, torch.Tensor]:
    """Parameters and buffers, by name."""
    named = [*model.named_parameters(), *model.named_buffers()]
    return {name: x.detach().clone() for name, x in named}


def settled(of: Case) -> tuple[int, bool]:
    """Which form of batch a model takes, and whether its loss is its own.

    Raises:
        TrialError: none works.
    """
    model = of.model()
    if of.loop is not None:
        return 0, True
    tried: list[str] = []
    for number in range(40):
        try:
            batch = of.batch(model, number, 5)
        except StopIteration:
            break
        try:
            seeded()
            model.zero_grad()
            found = called(model, batch)
            loss = own_loss(found)
            (made_up(found) if loss is None else loss).backward()
            return number, loss is not None
        except Exception as error:
            given = ", ".join(batch) if isinstance(batch, dict) else type(batch).__name__
            tried.append(f"{given}: {type(error).__name__}: {str(error)[:160]}")
    raise TrialError(Verdict("unfit", "; ".join(tried[:3]) or "no inputs are known"))


def reference(rank: int, world: int, name: str, accumulate: int, file: Path) -> None:
    """Train on one process, and write down what came of it.

    Raises:
        TrialError: the model cannot be trained as it is built here.
    """
    of = case(name)
    with warnings.catch_warnings(), Double():
        warnings.simplefilter("ignore")
        try:
            number, own = settled(of)
            model = of.model()
        except TrialError:
            raise
        except Exception as error:
            raise TrialError(Verdict("unfit", f"{type(error).__name__}: {error}"[:500])) from None
        batches = [of.batch(model, number, 11 + step) for step in range(STEPS)]
        start = values_of(model)
        end = _alone(of, model, own, batches, accumulate)
        nearby = of.model()
        with torch.no_grad():
            for p in nearby.parameters():
                p.mul_(1 + 1e-15 * torch.randn_like(p))
        rounding = max(gaps(_alone(of, nearby, own, batches, accumulate), end).values())
    if not all(map(math.isfinite, [*end.losses, *end.norms])):
        raise TrialError(Verdict("unfit", f"losses {end.losses}, gradient norms {end.norms} on one process"))
    if all(torch.equal(end.values[k], start[k]) for k, _ in model.named_parameters() if k in end.values):
        raise TrialError(Verdict("unfit", "nothing trains on one process"))
    if not rounding < LOOSEST:
        raise TrialError(Verdict("unfit", f"a change of 1e-15 of its parameters makes one of {rounding:.1e}"))
    near = max(TOLERANCE, MARGIN * rounding)
    torch.save({"batches": batches, "own": own, "start": start, "end": end, "near": near}, file)


def _alone(of: Case, model: nn.Module, own: bool, batches: Sequence[Batch], accumulate: int) -> Trained:
    """What one process trains; with an engine if the model draws random numbers.

    These come by the stream that does not hang on layouts.
    """
    start = values_of(model)
    found = plain(of, model, own, batches, accumulate)
    if not found.drew:
        return found
    try:
        return laid(of, _as_at(of, start), own, batches, {"accumulate": accumulate})
    except UnseenCountError:
        return laid(of, _as_at(of, start), own, batches, {"accumulate": accumulate}, rows_of)


def _as_at(of: Case, start: dict[str, torch.Tensor]) -> nn.Module:
    """The model, with these values."""
    model = of.model()
    with torch.no_grad():
        for name, x in (*model.named_parameters(), *model.named_buffers()):
            x.copy_(start[name])
    return model


# ---- who trains


class Alone:
    """A module, its optimizer, and a plain loop."""

    def __init__(self, module: nn.Module, loss_fn: LossFunction | None, accumulate: int) -> None:
        self.module, self.loss_fn, self.accumulate = module, loss_fn, accumulate
        self.optimizer = optimizer_of(module)
        self.norms: list[float] = []
        self.drew = False  # within the model, or its loss

    def train(self, batch: Batch) -> float:
        """One step; the loss."""
        self.optimizer.zero_grad()
        total = 0.0
        before = torch.get_rng_state()
        for part in parts_of(batch, self.accumulate):
            found = called(self.module, part)
            loss = own_loss(found) if self.loss_fn is None else self.loss_fn(found, part)
            assert loss is not None
            (loss / self.accumulate).backward()
            total += loss.item() / self.accumulate
        self.drew = self.drew or not torch.equal(torch.get_rng_state(), before)
        self.norms.append(nn.utils.clip_grad_norm_(self.module.parameters(), CLIP).item())
        self.optimizer.step()
        return total

    def predict(self, inputs: Any) -> Any:
        """The output, without gradients."""
        with torch.no_grad():
            return called(self.module, inputs)

    def zero_grad(self) -> None:
        """Forget gradients that are none of the next step's."""
        self.module.zero_grad()


class Laid:
    """A module, its optimizer, and the engine, as a user makes it."""

    def __init__(
        self,
        module: nn.Module,
        loss_fn: LossFunction | None,
        plan: dict[str, Any],
        count: Callable[[Any], int] | None = None,
        compile: bool | str = False,
    ) -> None:
        self.engine = espalier.initialize(
            module, optimizer_of(module), plan, loss_fn=loss_fn, max_grad_norm=CLIP, count=count,
            compile=compile,
        )  # fmt: skip
        self.predict, self.zero_grad = self.engine.predict, self.engine.zero_grad
        self.norms: list[float] = []

    def train(self, batch: Batch) -> float:
        """One step; the loss."""
        loss = self.engine.train_step(batch)
        assert self.engine.grad_norm is not None
        self.norms.append(float(self.engine.grad_norm))
        return float(loss)


class Strewn(Alone):
    """A module whose parameters lie in layouts drawn at random, uneven and empty shards among them."""

    def __init__(self, module: nn.Module, loss_fn: LossFunction | None = None) -> None:
        self.mesh = espalier.Mesh.from_env({"data": 2, "tensor": 2})
        lot = random.Random(7)
        for p in module.parameters():
            dims = [lot.randrange(-1, p.ndim) for _ in range(2)]
            cut = [espalier.Replicate() if dim < 0 else espalier.Shard(dim) for dim in dims]
            lay_out_parameter(p, espalier.Layout(self.mesh, cut, p.shape))
        super().__init__(module, loss_fn, 1)

    def train(self, batch: Batch) -> float:
        """One step of torch's own loop, the batch's rows cut."""
        rows = [espalier.Shard(0), espalier.Replicate()]

        def laid_out(x: Any) -> Any:
            return espalier.distribute_tensor(x, self.mesh, rows) if isinstance(x, torch.Tensor) else x

        return super().train({key: laid_out(x) for key, x in batch.items()})


@dataclass
class Trained:
    """What came of a training: losses, gradient norms, and parameters and buffers by name.

    Attributes:
        drew: whether a model drew random numbers from torch's generator.
    """

    losses: list[float]
    norms: list[float]
    values: dict[str, torch.Tensor]
    drew: bool = False


def plain(of: Case, model: nn.Module, own: bool, batches: Sequence[Batch], accumulate: int) -> Trained:
    """Train without Espalier."""
    trainers: list[Alone] = []

    def trainer(module: nn.Module, loss_fn: LossFunction | None = None) -> Alone:
        trainers.append(Alone(module, loss_fn, accumulate))
        return trainers[-1]

    losses = _loop(of, model, own, batches, trainer)
    drew = any(t.drew for t in trainers)
    return Trained(losses, [n for t in trainers for n in t.norms], values_of(model), drew)


def laid(
    of: Case,
    model: nn.Module,
    own: bool,
    batches: Sequence[Batch],
    plan: dict[str, Any],
    count: Callable[[Any], int] | None = None,
    compile: bool | str = False,
) -> Trained:
    """Train under a plan."""
    trainers: list[Laid] = []

    def trainer(module: nn.Module, loss_fn: LossFunction | None = None) -> Laid:
        trainers.append(Laid(module, loss_fn, plan, count, compile))
        return trainers[-1]

    losses = _loop(of, model, own, batches, trainer)
    values: dict[str, torch.Tensor] = {}
    for t in trainers:
        prefix = next((f"{name}." for name, m in model.named_modules() if name and m is t.engine.module), "")
        values |= {prefix + name: x for name, x in t.engine.full_state_dict().items()}
        if t.engine.plan.pipe == 1:
            values |= {k: espalier.full_tensor(x) for k, x in model.named_buffers() if k not in values}
    return Trained(losses, [n for t in trainers for n in t.norms], values)


def by_hand(of: Case, model: nn.Module, batches: Sequence[Batch]) -> Trained:
    """Train by a plain loop on DTensors, in layouts that no one would choose."""
    strewn = Strewn(model)
    seeded()
    losses = [strewn.train(batch) for batch in batches]
    named = (*model.named_parameters(), *model.named_buffers())
    return Trained(losses, strewn.norms, {name: espalier.full_tensor(x).detach() for name, x in named})


def _loop(of: Case, model: nn.Module, own: bool, batches: Sequence[Batch], trainer: Any) -> list[float]:
    seeded()
    if of.loop is not None:
        return list(of.loop(model, trainer, batches))
    one = trainer(model, None if own else made_up)
    return [one.train(batch) for batch in batches]


# ---- under a plan


def trial(
    rank: int, world: int, name: str, plan: dict[str, Any], file: Path, compile: bool | str = False
) -> Verdict:
    """Train under a plan, and compare with what the one process wrote down.

    Args:
        compile: as of :func:`espalier.initialize`.

    Raises:
        TrialError: it ended with an error.
    """
    of, kept = case(name), torch.load(file, weights_only=False)
    if plan.get("expert", 1) > 1 and not stacked(of.model()):
        raise TrialError(Verdict("unfit", "it has no experts to lay apart"))
    with warnings.catch_warnings(record=True) as caught, Double():
        warnings.simplefilter("always")
        try:
            try:
                verdict = _compared(of, plan, kept, None, compile)
            except UnseenCountError:  # what its words ask for
                verdict = _compared(of, plan, kept, rows_of, compile)
        except Exception as error:
            raise TrialError(refusal_or_failure(error)) from None
    words = [verdict.words, *uncompiled_in(caught)]
    return Verdict(verdict.end, "; ".join(filter(None, words)), verdict.where, gathered_in(caught))


def gathered_in(caught: Sequence[warnings.WarningMessage]) -> tuple[str, ...]:
    """The functions that had no rule."""
    return tuple(sorted({str(w.message).split()[0] for w in caught if issubclass(w.category, GatherWarning)}))


def uncompiled_in(caught: Sequence[warnings.WarningMessage]) -> list[str]:
    """What was to be compiled, and runs as it is written."""
    return sorted({text for w in caught if "uncompiled" in (text := str(w.message))})


def _compared(
    of: Case,
    plan: dict[str, Any],
    kept: dict[str, Any],
    count: Callable[[Any], int] | None,
    compile: bool | str,
) -> Verdict:
    model = _as_at(of, kept["start"])
    found, right = laid(of, model, kept["own"], kept["batches"], plan, count, compile), kept["end"]
    if wrong := differences(found, right, kept["near"]):
        more = f" and {len(wrong) - 6} more" if len(wrong) > 6 else ""
        return Verdict("wrong", ", ".join(wrong[:6]) + more)
    return Verdict("exact", "count= is given" if count is not None else "")


def differences(found: Trained, right: Trained, near: float = TOLERANCE) -> list[str]:
    """What is not the same, and by how much."""
    return [f"{name} {gap:.1e}" for name, gap in gaps(found, right).items() if not gap < near]


def gaps(found: Trained, right: Trained) -> dict[str, float]:
    """The largest difference of each thing that both have."""
    series = {"loss": (found.losses, right.losses), "gradient norm": (found.norms, right.norms)}
    result = {name: apart(numbers(given), numbers(due)) for name, (given, due) in series.items()}
    values = ((name, due) for name, due in right.values.items() if name in found.values)
    return result | {name: apart(found.values[name], due) for name, due in values}


def compared(
    rank: int, world: int, name: str, plan: dict[str, Any] | None, form: int = 0
) -> tuple[list[str], tuple[str, ...]]:
    """Both trainings on each rank: what is not the same, and the functions that had no rule.

    Args:
        plan: None: a plain loop on DTensors in drawn layouts, on data 2 × tensor 2.
        form: which of the batches that the case draws.
    """
    of = case(name)
    model, other = of.model(), of.model()
    batches = [of.batch(model, form, 11 + step) for step in range(2)]
    with warnings.catch_warnings(record=True) as caught, Double():
        warnings.simplefilter("always")
        right = plain(of, other, True, batches, 1)
        found = by_hand(of, model, batches) if plan is None else laid(of, model, True, batches, plan)
    others = [str(w.message) for w in caught if not issubclass(w.category, GatherWarning)]
    assert not others, others
    return differences(found, right), gathered_in(caught)


def numbers(given: Sequence[float]) -> torch.Tensor:
    """Losses or norms."""
    return torch.tensor(given, dtype=torch.float64)


def apart(given: torch.Tensor, right: torch.Tensor) -> float:
    """The largest difference, relative where values are large."""
    if given.shape != right.shape:
        return math.inf
    if not right.numel():
        return 0.0
    given, right = given.detach().double(), right.detach().double()
    scale = max(1.0, float(right.abs().nan_to_num(posinf=1.0).max()))
    gap = (
        float((given - right).nan_to_num(nan=math.inf).abs().max()) if not torch.equal(given, right) else 0.0
    )
    return gap / scale
