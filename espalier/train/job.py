"""The job file: what to train, on what, in which layout. Strict, and validated as a whole.

A job is a TOML file with the tables [model], [data], [plan], [optimizer],
[train], [checkpoint], [spikes], [elastic], [verify] and [faults]. Every mistake in it is told at once.
"""

import inspect
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from tokenizers import Tokenizer

from espalier.comm.verdict import Faults
from espalier.models import nearest
from espalier.parallel import Plan, PlanError
from espalier.train.mistakes import MISSING, JobError, Mistake, read_section, unknown_key
from espalier.train.overrides import apply_overrides
from espalier.train.specs import Facts, ModelSpec, read_model
from espalier.train.text import mask_of

Count = Annotated[int, Field(ge=1)]
Natural = Annotated[int, Field(ge=0)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]
Fraction = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    """A table of the job file: no unknown keys, no guessed types."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class TextData(Section):
    """Text, cut into tokens.

    Attributes:
        source: "stdlib" for the source of Python's standard library, or a file or folder.
        pattern: which files of the folder are read.
        cache: folder for the prepared tokens.
        max_bytes: read no more than this many bytes of text.
        val_fraction: share of the text kept for validation.
        tokenizer: a ``tokenizer.json``, or a folder that has one, as Hugging Face saves it; when left out
            that beside the model's weights, or a byte-pair tokenizer that is trained on the text for a model
            that begins with fresh ones.
    """

    kind: Literal["text"] = "text"
    source: str = "stdlib"
    pattern: str = "*.py"
    cache: str = ".espalier/data"
    max_bytes: Count | None = None
    val_fraction: Annotated[float, Field(gt=0, lt=1)] = 0.05
    tokenizer: Annotated[str, Field(min_length=1)] | None = None


class TokenData(Section):
    """Random tokens and labels.

    Attributes:
        ignored: share of the labels that are -100, so that ranks count different numbers of them.
    """

    kind: Literal["tokens"]
    ignored: Fraction = 0.1


class ImageData(Section):
    """Random images and classes."""

    kind: Literal["images"]


DataSection = TextData | TokenData | ImageData


class OptimizerSection(Section):
    """An optimizer of torch.optim by name, with its arguments, and the learning-rate schedule.

    Attributes:
        name: class in torch.optim.
        lr: highest learning rate.
        warmup: steps in which the rate rises linearly to ``lr``.
        schedule: "constant", or "cosine" down to ``final_lr`` times ``lr`` at the last step.
        final_lr: share of ``lr`` left at the end of the cosine.
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = "AdamW"
    lr: Positive = 1e-3
    warmup: Natural = 0
    schedule: Literal["constant", "cosine"] = "constant"
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.1

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the class, lists as tuples."""
        extra = self.model_extra or {}
        return {"lr": self.lr, **{k: tuple(v) if isinstance(v, list) else v for k, v in extra.items()}}


class TrainSection(Section):
    """How to train.

    Attributes:
        steps: optimizer steps.
        batch_size: sequences (or images) of the global batch.
        sequence: tokens of a sequence.
        clip: largest norm of the gradient; that of the plan when left out.
        seed: of the weights, the batches and the sample.
        eval_every: steps between validations; 0 for one at the end only.
        eval_batches: global batches of a validation.
        log_every: steps between two lines of the log.
        dtype: of parameters and computation.
        out: folder for the results; "runs/<name of the job>" when left out.
        sample_tokens: tokens of text to write at the end; 0 for none.
        prompt: start of that text.
        temperature: of that text; 0 takes the likeliest token.
    """

    steps: Count = 100
    batch_size: Count = 16
    sequence: Count = 128
    clip: Positive | None = None
    seed: Natural = 0
    eval_every: Natural = 0
    eval_batches: Count = 4
    log_every: Count = 10
    dtype: Literal["float32", "float64", "bfloat16"] = "float32"
    out: str | None = None
    sample_tokens: Natural = 120
    prompt: Annotated[str, Field(min_length=1)] = "def "
    temperature: Annotated[float, Field(ge=0)] = 0.7


class CheckpointSection(Section):
    """What is saved of a run while it goes.

    Attributes:
        directory: folder for the checkpoints; "checkpoints" in train.out when left out.
        every: steps between two; 0 for one at the end only.
        keep: how many to keep, the newest.
        asynchronous: train on while one is written.
        durable: where none is asynchronous, go on when each outlives a crash of the machine.
    """

    directory: Annotated[str, Field(min_length=1)] | None = None
    every: Natural = 0
    keep: Count | None = 3
    asynchronous: bool = True
    durable: bool = False


class VerifySection(Section):
    """How to compare the plan with one process, in float64.

    Attributes:
        steps: optimizer steps compared.
        seed: of weights and batches.
        tolerance: largest absolute difference that passes.
        batch_size: of the global batch; [train]'s when left out.
        sequence: tokens of a sequence; [train]'s when left out.
    """

    steps: Count = 3
    seed: Natural = 0
    tolerance: Positive = 1e-9
    batch_size: Count | None = None
    sequence: Count | None = None


class FaultsSection(Section):
    """How ranks that die or hang are looked for (see `espalier.Faults`).

    Attributes:
        watch: false for not at all.
        limit: seconds of silence, or of all ranks doing nothing, that are too long.
        outside: the same where a rank waits for a file, a socket or a process.
        grace: seconds that `espalier train` leaves its ranks to save in, when it is asked to leave.
    """

    watch: bool = True
    limit: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 5.0
    outside: Annotated[float, Field(ge=1, allow_inf_nan=False)] = 60.0
    grace: Count = 30

    @property
    def settings(self) -> Faults:
        """For the engine."""
        return Faults(self.watch, self.limit, max(self.outside, self.limit))


class SpikesSection(Section):
    """What to do about steps that look wrong, by the names of `espalier.Spikes`.

    Attributes:
        on_nan: where loss or gradients are not finite: "stop", "skip" the batch, or "rollback" to the last
            checkpoint and skip it then.
        on_spike: the same where loss or gradient norm leap up, or "ignore".
        factor: deviations above the median that are a spike.
        window: steps that the median is of.
        least: steps before a spike is looked for.
        limit: so many such steps in a row, or rollbacks, and it stops.
    """

    on_nan: Literal["stop", "skip", "rollback"] = "stop"
    on_spike: Literal["ignore", "stop", "skip", "rollback"] = "ignore"
    factor: Positive = 10.0
    window: Count = 100
    least: Count = 20
    limit: Count = 10


class ElasticSection(Section):
    """How a run goes on when ranks die.

    Attributes:
        restarts: how often `espalier train` starts all ranks again, from the last checkpoint; torchrun has
            its own --max-restarts.
        min_data: smallest data axis to go on with where there are fewer ranks than the plan has, or a rank
            dies again and again; the plan's when left out.
    """

    restarts: Natural = 0
    min_data: Count | None = None


@dataclass(frozen=True)
class Job:
    """A validated job.

    Attributes:
        source: file the job came from.
        raw: the tables it was made from, overrides applied; `from_dict` of it gives the job again.
        facts: what the model asks of the data.
    """

    source: str
    raw: Mapping[str, Any]
    model: ModelSpec
    data: DataSection
    plan: Mapping[str, Any]
    optimizer: OptimizerSection
    train: TrainSection
    verify: VerifySection
    faults: FaultsSection
    elastic: ElasticSection
    facts: Facts
    checkpoint: CheckpointSection | None = None
    spikes: SpikesSection | None = None

    @classmethod
    def load(cls, path: str | Path, overrides: Iterable[str] = ()) -> "Job":
        """Read and validate the job file ``path``.

        Args:
            path: a TOML file.
            overrides: texts such as ``plan.tensor=2``, applied on top.

        Raises:
            JobError: when the file is missing or no TOML, or listing all that is wrong in it.
        """
        try:
            raw = tomllib.loads(Path(path).read_text("utf-8"))
        except OSError as error:
            raise JobError(
                str(path), [Mistake("file", MISSING, f"cannot be read: {error.strerror}{_near(Path(path))}")]
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise JobError(str(path), [Mistake("file", MISSING, f"is not valid TOML: {error}")]) from None
        mistakes: list[Mistake] = []
        changed, overridden = apply_overrides(raw, overrides, mistakes)
        return cls.from_dict(changed, source=str(path), mistakes=mistakes, overridden=overridden)

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        source: str = "job",
        mistakes: Iterable[Mistake] = (),
        overridden: frozenset[str] = frozenset(),
    ) -> "Job":
        """Validate the tables ``raw``.

        Args:
            raw: table name to table.
            source: named in errors.
            mistakes: ones already found, told together with those found here.
            overridden: dotted keys that came from --set.

        Raises:
            JobError: listing all that is wrong.
        """
        found = list(mistakes)
        known = tuple(field.name for field in fields(cls) if field.name not in ("source", "raw", "facts"))
        tables: dict[str, Mapping[str, Any]] = {}
        for key, value in raw.items():
            if key not in known:
                found.append(unknown_key(key, value, known))
            elif not isinstance(value, Mapping):
                found.append(Mistake(key, value, f"expected a table, [{key}]"))
            else:
                tables[key] = value
        model = read_model(tables.get("model", {}), found)
        data = _read_data(tables.get("data", {}), found)
        optimizer = read_section("optimizer", OptimizerSection, tables.get("optimizer", {}), found)
        if optimizer:
            found.extend(_optimizer_mistakes(optimizer))
        train = read_section("train", TrainSection, tables.get("train", {}), found)
        verify = read_section("verify", VerifySection, tables.get("verify", {}), found)
        checkpoint = None
        if "checkpoint" in tables:
            checkpoint = read_section("checkpoint", CheckpointSection, tables["checkpoint"], found)
        spikes = None
        if "spikes" in tables:
            spikes = read_section("spikes", SpikesSection, tables["spikes"], found)
        elastic = read_section("elastic", ElasticSection, tables.get("elastic", {}), found)
        found.extend(_recovery_mistakes(spikes, elastic, tables))
        faults = read_section("faults", FaultsSection, tables.get("faults", {}), found)
        plan = tables.get("plan", {})
        found.extend(_plan_mistakes(plan))
        if model and isinstance(data, TextData):
            found.extend(_tokenizer_mistakes(model.facts, data, tables["model"].get("weights")))
        if model and data and train and verify:
            found.extend(_fit_mistakes(model.facts, data, train, verify))
            found.extend(_micro_batch_mistakes(plan, train, verify))
        if train and train.clip is not None and plan.get("clip") is not None:
            found.append(Mistake("plan.clip", plan["clip"], "train.clip says it already: leave one out"))
        if found or not (model and data and optimizer and train and verify and faults and elastic):
            raise JobError(source, found, overridden)
        return cls(
            source,
            dict(raw),
            model,
            data,
            plan,
            optimizer,
            train,
            verify,
            faults,
            elastic,
            model.facts,
            checkpoint,
            spikes,
        )

    @property
    def name(self) -> str:
        """The job file's name without its ending."""
        return Path(self.source).stem

    @property
    def weights(self) -> str | None:
        """File or folder whose weights the model begins with; None for fresh ones."""
        path: str | None = self.raw["model"].get("weights")
        return path

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json that cuts text into tokens; None: one is to be trained."""
        return tokenizer_file(self.data, self.weights) if isinstance(self.data, TextData) else None

    @property
    def clip(self) -> float | None:
        """Largest norm of the gradient; None for no limit."""
        return self.plan.get("clip") if self.train.clip is None else self.train.clip

    @property
    def out(self) -> Path:
        """Folder for the results."""
        return Path(self.train.out or f"runs/{self.name}")


def _read_data(values: Mapping[str, Any], mistakes: list[Mistake]) -> DataSection | None:
    choices: dict[str, type[DataSection]] = {"text": TextData, "tokens": TokenData, "images": ImageData}
    kind = values.get("kind", "text")
    if kind not in choices:
        mistakes.append(Mistake("data.kind", kind, f"expected one of {', '.join(choices)}"))
        return None
    return read_section("data", choices[kind], values, mistakes)


def tokenizer_file(data: TextData, weights: str | None) -> Path | None:
    """The tokenizer that a job names, or that lies beside its weights; it need not be there."""
    if data.tokenizer is not None:
        path = Path(data.tokenizer)
        return path / "tokenizer.json" if path.is_dir() else path
    if weights is None:
        return None
    path = Path(weights)
    beside = (path if path.is_dir() else path.parent) / "tokenizer.json"
    return beside if beside.is_file() else None


def _tokenizer_mistakes(facts: Facts, data: TextData, weights: Any) -> list[Mistake]:
    """What keeps the tokens of a text from meaning to the model what they meant to those who trained it."""
    weights = weights if isinstance(weights, str) else None
    path = tokenizer_file(data, weights)
    asked = data.tokenizer if data.tokenizer is not None else MISSING
    if path is None:
        if weights is None:
            return []
        told = (
            f"the numbers of a fresh tokenizer mean nothing to model.weights = {weights!r}: name the "
            "tokenizer.json that they were trained with, or its folder (Hugging Face's "
            "tokenizer.save_pretrained(folder) writes one)"
        )
        return [Mistake("data.tokenizer", MISSING, told)]
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        told = f"expected a tokenizer.json, or a folder that has one: {path} cannot be read ({error})"
        return [Mistake("data.tokenizer", asked, told)]
    most = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if facts.vocab_size is not None and most > facts.vocab_size:
        told = (
            f"{path} has tokens up to number {most - 1}, but the model has a vocabulary of {facts.vocab_size}"
        )
        return [Mistake("data.tokenizer", asked, told)]
    if facts.labels == "masked" and mask_of(tokenizer) is None:
        told = f"this model is trained to fill in masked tokens, and {path} has none for that (as [MASK])"
        return [Mistake("data.tokenizer", asked, told)]
    return []


def _optimizer_mistakes(section: OptimizerSection) -> list[Mistake]:
    names = {
        name
        for name, value in vars(torch.optim).items()
        if inspect.isclass(value) and issubclass(value, torch.optim.Optimizer)
    } - {"Optimizer", "LBFGS"}
    if section.name not in names:
        close = nearest(section.name, names)
        hint = f"did you mean {close!r}?" if close else f"expected one of {', '.join(sorted(names))}"
        return [Mistake("optimizer.name", section.name, f"torch.optim has none usable by this name; {hint}")]
    chosen = getattr(torch.optim, section.name)
    accepted = set(inspect.signature(chosen).parameters) - {"params"}
    known = accepted | set(OptimizerSection.model_fields)
    unknown = [
        unknown_key(f"optimizer.{key}", value, known)
        for key, value in section.arguments.items()
        if key not in accepted
    ]
    if unknown:
        return unknown
    device = "cuda" if torch.cuda.is_available() else "cpu"
    p = torch.nn.Parameter(torch.zeros(1, 1, device=device))
    p.grad = torch.ones_like(p)
    try:
        chosen([p], **section.arguments).step()
    except (ValueError, TypeError, RuntimeError, AssertionError, ArithmeticError) as error:
        return [Mistake("optimizer", section.arguments, f"torch.optim.{section.name} says: {error}")]
    return []


def _plan_mistakes(plan: Mapping[str, Any]) -> list[Mistake]:
    try:
        if Plan.from_dict(dict(plan)).branch > 1:
            told = "no job can say which modules are branches: espalier.initialize(..., branches=...) can"
            return [Mistake("plan.branch", plan["branch"], f"{told}; expected 1")]
    except PlanError as error:
        return [Mistake(f"plan.{key}", given, expected) for key, given, expected in error.mistakes]
    return []


def _fit_mistakes(
    facts: Facts, data: DataSection, train: TrainSection, verify: VerifySection
) -> list[Mistake]:
    images = isinstance(data, ImageData)
    if images != (facts.labels == "classes"):
        fitting = "images" if facts.labels == "classes" else "text or tokens"
        return [Mistake("data.kind", data.kind, f"this model needs {fitting}")]
    if images or facts.max_positions is None:
        return []
    lengths = {"train.sequence": train.sequence, "verify.sequence": verify.sequence or 0}
    return [
        Mistake(key, length, f"is longer than the model's {facts.max_positions} positions")
        for key, length in lengths.items()
        if length > facts.max_positions
    ]


def _micro_batch_mistakes(
    plan: Mapping[str, Any], train: TrainSection, verify: VerifySection
) -> list[Mistake]:
    parts = plan.get("accumulate", 1)
    sizes = {"train.batch_size": train.batch_size, "verify.batch_size": verify.batch_size}
    return [
        Mistake(key, size, f"has too few rows for plan.accumulate = {parts} micro-batches")
        for key, size in sizes.items()
        if isinstance(parts, int) and size is not None and size < parts
    ]


def _recovery_mistakes(
    spikes: SpikesSection | None, elastic: ElasticSection | None, tables: Mapping[str, Mapping[str, Any]]
) -> list[Mistake]:
    """What speaks of checkpoints without a table for them."""
    mistakes = []
    saves = "checkpoint" in tables
    if spikes is not None:
        if spikes.least > spikes.window:
            mistakes.append(
                Mistake("spikes.least", spikes.least, f"is above spikes.window = {spikes.window}")
            )
        mistakes += [
            Mistake(
                f"spikes.{key}", "rollback", "needs checkpoints to roll back to: add a table [checkpoint]"
            )
            for key in ("on_nan", "on_spike")
            if getattr(spikes, key) == "rollback" and not saves
        ]
    if elastic is not None and elastic.restarts and not saves:
        mistakes.append(
            Mistake(
                "elastic.restarts", elastic.restarts, "needs checkpoints to restart from: add [checkpoint]"
            )
        )
    data = tables.get("plan", {}).get("data", 1)
    least = None if elastic is None else elastic.min_data
    if least is not None and isinstance(data, int) and least > data:
        mistakes.append(Mistake("elastic.min_data", least, f"is above plan.data = {data}"))
    return mistakes


def _near(path: Path) -> str:
    folder = path.parent
    if not folder.is_dir():
        return f"; there is no folder {folder}"
    close = nearest(path.name, [p.name for p in folder.glob("*.toml")])
    return f"; did you mean {folder / close}?" if close else ""
