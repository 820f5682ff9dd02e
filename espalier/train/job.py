"""The job file: what to train, on what, in which layout. Strict, and validated as a whole.

A job is a TOML file with the tables [model], [data], [plan], [optimizer],
[train], [evaluation], [checkpoint], [spikes], [elastic], [verify] and [faults]. Every mistake in it is told
at once: first what can be seen without torch, which takes seconds to import; then, where there is none, what
torch and transformers say.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, fields
from importlib.resources import files
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from tokenizers import Tokenizer

from espalier.faults.settings import Spikes
from espalier.parallel import Plan, PlanError
from espalier.texts import (
    MISSING,
    Mistake,
    MistakeError,
    did_you_mean,
    names_of_tables,
    read_table,
    unknown_key,
)
from espalier.train.model_spec import HF, Facts, ModelSpec, read_model
from espalier.train.names import name_mistakes
from espalier.train.sections import (
    CheckpointSection,
    DataSection,
    ElasticSection,
    EvaluationSection,
    FaultsSection,
    FolderData,
    ImageData,
    OptimizerSection,
    OwnData,
    TextData,
    TokenData,
    TrainSection,
    VerifySection,
)

_SHIPPED = files("espalier.train") / "shipped"
MASKS = ("<|mask|>", "[MASK]", "<mask>")
"""What tokenizers call the token that hides another; the first is that of ours."""


def shipped_jobs() -> tuple[str, ...]:
    """The names of the jobs that come with the package."""
    return names_of_tables(_SHIPPED)


class JobError(MistakeError):
    """A job that cannot be run; the message lists every mistake in it."""

    @property
    def source(self) -> str:
        """The file that the job came from."""
        return self.owner


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
    plan: Plan
    optimizer: OptimizerSection
    train: TrainSection
    verify: VerifySection
    faults: FaultsSection
    elastic: ElasticSection
    facts: Facts
    checkpoint: CheckpointSection | None = None
    spikes: Spikes | None = None
    evaluation: EvaluationSection | None = None

    @classmethod
    def load(
        cls,
        path: str | Path,
        overrides: Iterable[str] = (),
        *,
        ranks: int | None = None,
        resume: bool = False,
    ) -> Job:
        """Read and validate the job file ``path``.

        Args:
            path: a TOML file; or, where there is none, the name of a job that is shipped (`shipped_jobs`).
            overrides: texts such as ``plan.tensor=2``, applied on top.
            ranks: that the plan's other axes have to divide; its data axis takes what they leave.
            resume: whether the job must have checkpoints to go on from.

        Raises:
            JobError: when the file is missing or no TOML, or listing all that is wrong in it.
        """
        try:
            shipped = str(path) in shipped_jobs() and not Path(path).is_file()
            file = _SHIPPED / f"{path}.toml" if shipped else Path(path)
            raw = tomllib.loads(file.read_text("utf-8"))
        except OSError as error:
            raise JobError(
                str(path), [Mistake("file", MISSING, f"cannot be read: {error.strerror}{_near(Path(path))}")]
            ) from None
        except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
            raise JobError(str(path), [Mistake("file", MISSING, f"is not valid TOML: {error}")]) from None
        mistakes: list[Mistake] = []
        changed, overridden = apply_overrides(raw, overrides, mistakes)
        table = changed.get("plan", {})
        if ranks is not None and isinstance(table, Mapping):
            changed = {**changed, "plan": _sized(table, ranks)}
        if resume and "checkpoint" not in changed:
            expected = "the job has no table [checkpoint], so it saves none. Add one"
            mistakes.append(Mistake("--resume", MISSING, expected))
        return cls.from_dict(changed, source=str(path), mistakes=mistakes, overridden=overridden, ranks=ranks)

    @classmethod
    def from_dict(
        cls,
        raw: Mapping[str, Any],
        *,
        source: str = "job",
        mistakes: Iterable[Mistake] = (),
        overridden: frozenset[str] = frozenset(),
        ranks: int | None = None,
    ) -> Job:
        """Validate the tables ``raw``.

        Args:
            raw: table name to table.
            source: named in errors.
            mistakes: ones already found, told together with those found here.
            overridden: dotted keys that came from --set.
            ranks: see `load`.

        Raises:
            JobError: listing all that is wrong.
        """
        all_mistakes = list(mistakes)
        known = tuple(f.name for f in fields(cls) if f.name not in ("source", "raw", "facts"))
        tables: dict[str, Mapping[str, Any]] = {}
        for key, value in raw.items():
            if key not in known:
                all_mistakes.append(unknown_key(key, value, known))
            elif not isinstance(value, Mapping):
                all_mistakes.append(Mistake(key, value, f"expected a table, [{key}]"))
            else:
                tables[key] = value
        section = tables.get("model", {})
        later = section.get("kind") in HF  # what transformers says takes seconds
        folder = str(Path(source).parent)  # where the user's modules may be
        model = read_model(section, all_mistakes, folder, deep=False)
        data = _read_data(tables, all_mistakes)
        optimizer = _read("optimizer", OptimizerSection, tables, all_mistakes)
        all_mistakes.extend(name_mistakes(optimizer) if optimizer else ())
        train = _read("train", TrainSection, tables, all_mistakes)
        verify = _read("verify", VerifySection, tables, all_mistakes)
        evaluation = _read_if_given("evaluation", EvaluationSection, tables, all_mistakes)
        checkpoint = _read_if_given("checkpoint", CheckpointSection, tables, all_mistakes)
        spikes = _read_if_given("spikes", Spikes, tables, all_mistakes)
        elastic = _read("elastic", ElasticSection, tables, all_mistakes)
        faults = _read("faults", FaultsSection, tables, all_mistakes)
        plan = _read_plan(_without_auto(tables.get("plan", {}), all_mistakes), all_mistakes)
        all_mistakes.extend(_recovery_mistakes(spikes, elastic, plan, "checkpoint" in tables))
        if plan and ranks is not None and not tables.get("plan", {}).get("auto"):
            all_mistakes.extend(_rank_mistakes(plan, ranks))
        if plan and train and verify:
            all_mistakes.extend(_step_mistakes(plan, train, verify))
        if later and not all_mistakes:
            model = read_model(section, all_mistakes, folder, deep=True)
        if model and data and train and verify:
            all_mistakes.extend(_data_mistakes(model, data))
            all_mistakes.extend(_fit_mistakes(model.facts, data, train, verify))
        if optimizer and not all_mistakes:
            from espalier.train.optimizers import optimizer_mistakes

            all_mistakes.extend(optimizer_mistakes(optimizer))
        if all_mistakes or not (
            model and data and plan and optimizer and train and verify and faults and elastic
        ):
            raise JobError(source, all_mistakes, overridden)
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
            evaluation,
        )

    @property
    def auto(self) -> bool:
        """Whether the planner is to choose what [plan] does not say (see ``foresight.planned``)."""
        return bool(self.raw.get("plan", {}).get("auto", False))

    @property
    def name(self) -> str:
        """The job file's name without its ending."""
        return Path(self.source).stem

    @property
    def weights(self) -> str | None:
        """File or folder whose weights the model begins with; None for fresh ones."""
        return self.model.weights

    @property
    def tokenizer(self) -> Path | None:
        """The tokenizer.json that cuts text into tokens; None: one is to be trained."""
        return tokenizer_file(self.data, self.weights) if isinstance(self.data, TextData) else None

    @property
    def folder(self) -> str:
        """That of the job file."""
        return str(Path(self.source).parent)

    @property
    def unit(self) -> str:
        """What is counted a second: tokens, or images."""
        return "tokens" if self.facts.image is None else "images"

    @property
    def clip(self) -> float | None:
        """Largest norm of the gradient; None for no limit."""
        return self.plan.clip if self.train.clip is None else self.train.clip

    @property
    def out(self) -> Path:
        """Folder for the results."""
        return Path(self.train.out or f"runs/{self.name}")


T = TypeVar("T")


def _read(
    section: str, kind: type[T], tables: Mapping[str, Mapping[str, Any]], mistakes: list[Mistake]
) -> T | None:
    """A section of the job; on failure adds to ``mistakes`` and gives None."""
    try:
        return read_table(kind, tables.get(section, {}), section)
    except MistakeError as error:
        mistakes.extend(error.mistakes)
        return None


def _read_if_given(
    section: str, kind: type[T], tables: Mapping[str, Mapping[str, Any]], mistakes: list[Mistake]
) -> T | None:
    """A section that a job may leave out; None also where it is."""
    return _read(section, kind, tables, mistakes) if section in tables else None


KINDS: Mapping[str, type[DataSection]] = MappingProxyType(
    {
        "text": TextData,
        "tokens": TokenData,
        "images": ImageData,
        "image-folder": FolderData,
        "module": OwnData,
    }
)


def _read_data(tables: Mapping[str, Mapping[str, Any]], mistakes: list[Mistake]) -> DataSection | None:
    kind = tables.get("data", {}).get("kind", "text")
    if kind not in KINDS:
        hint = did_you_mean(str(kind), KINDS, lead="; ")
        mistakes.append(Mistake("data.kind", kind, f"expected one of {', '.join(KINDS)}{hint}"))
        return None
    return _read("data", KINDS[kind], tables, mistakes)


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


def first_of(tokenizer: Tokenizer, names: Iterable[str]) -> int | None:
    """The number of the first of these tokens that a tokenizer has."""
    numbers = (tokenizer.token_to_id(name) for name in names)
    return next((number for number in numbers if number is not None), None)


def _data_mistakes(model: ModelSpec, data: DataSection) -> list[Mistake]:
    """What does not go together within [data], and with the model's vocabulary."""
    if not isinstance(data, TextData):
        return []
    mistakes = []
    for i, part in enumerate(data.parts):
        at = f"data.mixture[{i}]" if data.mixture else "data"
        if (part.prompt is None) != (part.answer is None):
            expected = "prompt and answer are columns that go together: give both"
            mistakes.append(Mistake(f"{at}.prompt", part.prompt or MISSING, expected))
        if part.chat is not None and part.answer is not None:
            expected = "a row is a conversation, or a question and its answer: leave one out"
            mistakes.append(Mistake(f"{at}.chat", part.chat, expected))
        if part.loss == "answers" and part.chat is None and part.answer is None:
            expected = "answers are in conversations (chat = ...) or pairs (prompt = ..., answer = ...)"
            mistakes.append(Mistake(f"{at}.loss", part.loss, expected))
    if data.rows == "padded" and data.order == "random":
        mistakes.append(Mistake("data.order", "random", "is for packed rows, which begin anywhere"))
    if model.facts.vocab_size is None:
        expected = "text needs the number of the model's tokens: give model.vocab_size"
        return [*mistakes, Mistake("model.vocab_size", MISSING, expected)]
    return mistakes or _tokenizer_mistakes(model.facts, data, model.weights)


def _tokenizer_mistakes(facts: Facts, data: TextData, weights: str | None) -> list[Mistake]:
    """What keeps the tokens of a text from meaning to the model what they meant to those who trained it."""
    path = tokenizer_file(data, weights)
    asked = data.tokenizer if data.tokenizer is not None else MISSING
    if path is None:
        if weights is None:
            return []
        problem = (
            f"the numbers of a fresh tokenizer mean nothing to model.weights = {weights!r}: name the "
            "tokenizer.json that they were trained with, or its folder (Hugging Face's "
            "tokenizer.save_pretrained(folder) writes one)"
        )
        return [Mistake("data.tokenizer", MISSING, problem)]
    try:
        tokenizer = Tokenizer.from_file(str(path))
    except Exception as error:
        problem = f"expected a tokenizer.json, or a folder that has one: {path} cannot be read ({error})"
        return [Mistake("data.tokenizer", asked, problem)]
    most = max(tokenizer.get_vocab(with_added_tokens=True).values(), default=-1) + 1
    if facts.vocab_size is not None and most > facts.vocab_size:
        problem = (
            f"{path} has tokens up to number {most - 1}, but the model has a vocabulary of {facts.vocab_size}"
        )
        return [Mistake("data.tokenizer", asked, problem)]
    if facts.labels == "masked" and first_of(tokenizer, MASKS) is None:
        problem = f"this model is trained to fill in masked tokens, and {path} has none for that (as [MASK])"
        return [Mistake("data.tokenizer", asked, problem)]
    return []


AUTO = ("auto", "cluster", "ranks")
"""What a job's table [plan] has beside a plan's arguments, where the planner is to choose the others."""


_AXES = ("data", "pipe", "replicate", "context", "branch", "tensor", "tensor_mode", "depth")
"""What says how many ranks a plan has; those of ``expert`` are of the data axis."""


def _without_auto(table: Mapping[str, Any], mistakes: list[Mistake]) -> dict[str, Any]:
    """What of the table are a plan's arguments."""
    asked, cluster, ranks = (table.get(key) for key in AUTO)
    if asked not in (None, True, False):
        mistakes.append(Mistake("plan.auto", asked, "expected true or false"))
    elif asked and not isinstance(cluster, str):
        expected = "auto = true needs the cluster it chooses for: a shipped one's name, or a file"
        mistakes.append(Mistake("plan.cluster", MISSING if cluster is None else cluster, expected))
    elif asked and not (ranks is None or (type(ranks) is int and ranks > 0)):
        mistakes.append(Mistake("plan.ranks", ranks, "expected a number of ranks of the cluster"))
    elif not asked:
        for key, value in (("cluster", cluster), ("ranks", ranks)):
            if value is not None:
                mistakes.append(Mistake(f"plan.{key}", value, "is for auto = true alone"))
    return {key: value for key, value in table.items() if key not in AUTO}


def _sized(table: Mapping[str, Any], ranks: int) -> Mapping[str, Any]:
    """A table [plan] whose data axis takes what its other axes leave of ``ranks``."""
    if table.get("auto"):
        return table
    try:
        plan = Plan.from_dict({key: table[key] for key in _AXES if key in table})
    except PlanError:  # told where the whole table is read
        return table
    data, rest = divmod(ranks, plan.world_size // plan.data)
    return table if rest or data == plan.data else {**table, "data": data}


def _read_plan(table: Mapping[str, Any], mistakes: list[Mistake]) -> Plan | None:
    try:
        plan = Plan.from_dict(table)
    except PlanError as error:
        mistakes.extend(mistake.under("plan") for mistake in error.mistakes)
        return None
    if plan.branch > 1:
        advice = "no job can say which modules are branches: espalier.initialize(..., branches=...) can"
        mistakes.append(Mistake("plan.branch", plan.branch, f"{advice}; expected 1"))
    return plan


def _fit_mistakes(
    facts: Facts, data: DataSection, train: TrainSection, verify: VerifySection
) -> list[Mistake]:
    if isinstance(data, OwnData):
        return []
    images = isinstance(data, ImageData | FolderData)
    if images != (facts.labels == "classes"):
        fitting = "images or image-folder" if facts.labels == "classes" else "text or tokens"
        return [Mistake("data.kind", data.kind, f"this model needs {fitting}")]
    if images or facts.max_positions is None:
        return []
    lengths = {"train.sequence": train.sequence, "verify.sequence": verify.sequence or 0}
    return [
        Mistake(key, length, f"is longer than the model's {facts.max_positions} positions")
        for key, length in lengths.items()
        if length > facts.max_positions
    ]


def _step_mistakes(plan: Plan, train: TrainSection, verify: VerifySection) -> list[Mistake]:
    sizes = {"train.batch_size": train.batch_size, "verify.batch_size": verify.batch_size}
    mistakes = []
    if train.clip is not None and plan.clip is not None:
        mistakes.append(Mistake("plan.clip", plan.clip, "train.clip says it already: leave one out"))
    return mistakes + [
        Mistake(key, size, f"has too few rows for plan.accumulate = {plan.accumulate} micro-batches")
        for key, size in sizes.items()
        if size is not None and size < plan.accumulate
    ]


def _rank_mistakes(plan: Plan, ranks: int) -> list[Mistake]:
    """A number of ranks that the plan's other axes do not divide."""
    others = plan.world_size // plan.data
    if ranks % others == 0:
        return []
    rest = " × ".join(
        f"{name} {size}" for name, size in plan.axes.items() if name not in ("data", "expert") and size > 1
    )
    below = ranks - ranks % others
    near = [str(n) for n in (below, below + others) if n]
    expected = (
        f"does not fit the plan, whose other axes ({rest}) multiply to {others}: it must be a multiple of "
        f"{others}, as {' or '.join(near)}; or change the plan, --set plan.<axis>=<size>"
    )
    return [Mistake("-n", ranks, expected)]


def _recovery_mistakes(
    spikes: Spikes | None, elastic: ElasticSection | None, plan: Plan | None, saves: bool
) -> list[Mistake]:
    """What speaks of checkpoints without a table for them, and of a larger data axis than there is."""
    mistakes = []
    if spikes is not None and not saves:
        advice = "needs checkpoints to roll back to: add a table [checkpoint]"
        mistakes += [
            Mistake(f"spikes.{key}", "rollback", advice)
            for key in ("on_nan", "on_spike")
            if getattr(spikes, key) == "rollback"
        ]
    if elastic is not None and elastic.restarts and not saves:
        advice = "needs checkpoints to restart from: add [checkpoint]"
        mistakes.append(Mistake("elastic.restarts", elastic.restarts, advice))
    least = None if elastic is None else elastic.min_data
    if least is not None and plan is not None and least > plan.data:
        mistakes.append(Mistake("elastic.min_data", least, f"is above plan.data = {plan.data}"))
    return mistakes


def _near(path: Path) -> str:
    folder = path.parent
    shipped = shipped_jobs()
    if not path.suffix:
        return "; " + did_you_mean(path.name, shipped, f"those that are shipped are {', '.join(shipped)}")
    hint = f"; did you mean the shipped {path.stem}?" if path.stem in shipped else ""
    if not folder.is_dir():
        return f"; there is no folder {folder}{hint}"
    names = [p.name for p in folder.glob("*.toml")]
    return hint or did_you_mean(path.name, names, lead="; ", show=lambda name: str(folder / name))


# ---- --set


def parse_value(text: str) -> Any:
    """Read ``text`` as a TOML value; what is none (``gpt2``, ``runs/a``) is taken as a string."""
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def apply_overrides(
    job: dict[str, Any], assignments: Iterable[str], mistakes: list[Mistake]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Return a copy of ``job`` with each ``key.key=value`` applied, and the keys that were set.

    Args:
        job: nested tables as TOML gives them.
        assignments: texts such as ``plan.tensor=2``; the last one for a key wins.
        mistakes: what cannot be applied is added here.
    """
    changed = deepcopy(job)
    keys = set()
    for assignment in assignments:
        key, equals, text = assignment.partition("=")
        parts = key.strip().split(".")
        if not equals or not all(parts) or len(parts) < 2:
            mistakes.append(
                Mistake("--set", assignment, "expected section.key=value, as in --set plan.tensor=2")
            )
            continue
        table: Any = changed
        for depth, part in enumerate(parts[:-1]):
            table = table.setdefault(part, {})
            if not isinstance(table, dict):
                where = ".".join(parts[: depth + 1])
                mistakes.append(Mistake("--set", assignment, f"{where} is a value, not a table"))
                break
        else:
            table[parts[-1]] = parse_value(text.strip())
            keys.add(".".join(parts))
    return changed, frozenset(keys)
