"""The tables of a job file, each with what is known of its values before anything is built."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, ConfigDict, Field

from espalier.faults.settings import Faults
from espalier.texts import Count, MistakeError, Positive, Settings

Natural = Annotated[int, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, lt=1)]
Track = Literal["tensorboard", "wandb", "mlflow"]


def as_list(value: Any) -> Any:
    """A lone word as a list of it."""
    return [value] if isinstance(value, str) else value


Share = Annotated[float, Field(gt=0, lt=1)]
Text = Annotated[str, Field(min_length=1)]
Format = Literal["auto", "text", "jsonl", "parquet", "datasets", "tokens"]


class Source(Settings):
    """Where text comes from, and what of it.

    Attributes:
        source: "stdlib" for the source of Python's standard library, or a file or folder.
        format: of what is there: "text" (each file is a document), "jsonl" (each line), "parquet" (each
            row), "datasets" (a folder of ``Dataset.save_to_disk``), "tokens" (.bin and .npy, tokens already);
            "auto" tells by the names.
        pattern: which files of the folder are read; "*.py" for the standard library, else what is there.
        field: column that holds the text.
        chat: column that holds a conversation, a list of {role, content}; in place of ``field``.
        prompt, answer: columns that hold a question and the answer to it; in place of ``field``.
        loss: what is learned: "all", or "answers" alone, which are what the assistant says; the latter where
            there are answers.
        dtype: of tokens in .bin files.
        max_bytes: read no more than this many bytes.
    """

    source: Text = "stdlib"
    format: Format = "auto"
    pattern: Text | None = None
    field: Text = "text"
    chat: Text | None = None
    prompt: Text | None = None
    answer: Text | None = None
    loss: Literal["all", "answers"] | None = None
    dtype: Literal["uint16", "uint32", "int32", "int64"] = "uint16"
    max_bytes: Count | None = None

    @property
    def only_answers(self) -> bool:
        """Whether the loss is on answers alone."""
        answers = self.chat is not None or self.answer is not None
        return answers if self.loss is None else self.loss == "answers"


class Part(Source):
    """One of several sources that are mixed; what it does not say is as [data] says.

    Attributes:
        weight: its share of the rows, beside those of the others.
    """

    weight: Positive = 1.0


class TextData(Source):
    """Text, cut into tokens.

    Attributes:
        mixture: several sources, in place of ``source``: [[data.mixture]] once for each.
        validation: a file or folder to validate on, read as ``source``; ``val_fraction`` of that if left out.
        cache: folder for the prepared tokens.
        val_fraction: share of the text kept for validation.
        tokenizer: a ``tokenizer.json``, or a folder that has one, as Hugging Face saves it; when left out
            that beside the model's weights, or a byte-pair tokenizer that is trained on the text for a model
            that begins with fresh ones.
        chat_template: file of the template (Jinja) that makes text of a conversation; the tokenizer's own
            when left out.
        rows: "packed": documents one behind the other, cut into rows. "padded": a document a row.
        order: "random": rows begin anywhere. "epochs": each row once, in another order each time. By default
            the first for packed rows, the second for padded ones.
    """

    kind: Literal["text"] = "text"
    mixture: list[Part] = Field(default=[])
    validation: Text | None = None
    cache: Text = ".espalier/data"
    val_fraction: Share = 0.05
    tokenizer: Text | None = None
    chat_template: Text | None = None
    rows: Literal["packed", "padded"] = "packed"
    order: Literal["random", "epochs"] | None = None

    @property
    def drawn(self) -> bool:
        """Whether rows begin anywhere."""
        return (self.order or ("random" if self.rows == "packed" else "epochs")) == "random"

    @property
    def parts(self) -> list[Part]:
        """The sources, one of them at least."""
        own = {name: getattr(self, name) for name in Source.model_fields}
        parts = self.mixture or [Part()]
        return [Part(**{**own, **{n: getattr(part, n) for n in part.model_fields_set}}) for part in parts]


class TokenData(Settings):
    """Random tokens and labels.

    Attributes:
        ignored: share of the labels that are -100, so that ranks count different numbers of them.
    """

    kind: Literal["tokens"]
    ignored: Fraction = 0.1


class ImageData(Settings):
    """Random images and classes."""

    kind: Literal["images"]


class FolderData(Settings):
    """Images in folders, one for each class.

    Attributes:
        source: folder of the classes' folders, or of ``train`` and ``val`` that hold these.
        val_fraction: share of each class kept for validation, where there is no ``val``.
        mean, std: of each channel, by which values from 0 to 1 are brought to about -1 to 1.
        flip: whether half of the images to train on are mirrored.
    """

    kind: Literal["image-folder"]
    source: Text
    val_fraction: Share = 0.05
    mean: list[float] = Field(default=[0.5])
    std: list[Positive] = Field(default=[0.5])
    flip: bool = False


class OwnData(Settings):
    """Your own dataset.

    Attributes:
        build: ``module:function``, which gives a dataset, or a pair of one to train and one to validate on;
            each has ``len()`` and gives, by number, a dict of what the model is called with for one row.
        arguments: of the function.
    """

    kind: Literal["module"]
    build: Text
    arguments: dict[str, Any] = Field(default={})


DataSection = TextData | TokenData | ImageData | FolderData | OwnData


class OptimizerSection(Settings):
    """An optimizer of torch.optim by name, with its arguments, and the learning-rate schedule.

    Attributes:
        name: class in torch.optim. Muon takes the matrices inside the model, and AdamW the rest.
        lr: highest learning rate.
        warmup: steps in which the rate rises linearly to ``lr``.
        schedule: "constant"; "cosine" or "linear" down to ``final_lr`` times ``lr`` at the last step; "wsd",
            which stays at ``lr`` and goes down linearly in the last steps alone.
        final_lr: share of ``lr`` left at the end.
        cooldown: share of the steps in which "wsd" goes down.
        decay: what ``weight_decay`` holds for: "matrices", not norms and biases; or "all".
        groups: parameters with arguments of their own: tables of a ``pattern`` of names (or a list of them)
            and the arguments. The first that matches holds.
        rest: the arguments of Muon's AdamW: [optimizer.rest].
    """

    model_config = ConfigDict(extra="allow", frozen=True, strict=True)

    name: str = "AdamW"
    lr: Positive = 1e-3
    warmup: Natural = 0
    schedule: Literal["constant", "cosine", "linear", "wsd"] = "constant"
    final_lr: Annotated[float, Field(ge=0, le=1)] = 0.1
    cooldown: Annotated[float, Field(gt=0, le=1)] = 0.2
    decay: Literal["matrices", "all"] = "matrices"
    groups: list[dict[str, Any]] = Field(default=[])
    rest: dict[str, Any] = Field(default={})

    @property
    def arguments(self) -> dict[str, Any]:
        """Keyword arguments for the class, lists as tuples."""
        return {"lr": self.lr, **as_arguments(self.model_extra or {})}


def as_arguments(table: dict[str, Any]) -> dict[str, Any]:
    """Values of TOML as an optimizer of torch takes them: lists as tuples."""
    return {k: tuple(v) if isinstance(v, list) else v for k, v in table.items()}


class TrainSection(Settings):
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
        compile: whether the model's blocks are compiled, by inductor (espalier.initialize(compile=True)).
        out: folder for the results; "runs/<name of the job>" when left out.
        track: "tensorboard", "wandb", "mlflow", or a list of them: they are told how it goes, too.
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
    compile: bool = False
    out: str | None = None
    track: Annotated[list[Track], BeforeValidator(as_list)] = Field(default_factory=list)
    sample_tokens: Natural = 120
    prompt: Text = "def "
    temperature: Annotated[float, Field(ge=0)] = 0.7


Metric = Literal["loss", "perplexity", "accuracy"]


class EvaluationSection(Settings):
    """What validations measure, and what follows from it. Without this table they measure the loss.

    Attributes:
        metrics: beside the loss: "perplexity", and "accuracy" (the share of labels that are the likeliest).
        best_by: which of these tells the best model.
        keep_best: keep the weights of the best validation, in ``best`` in train.out, and end with them.
        patience: stop after so many validations in a row without a better one; 0: never.
        least: by how much better one has to be.
    """

    metrics: list[Metric] = Field(default=["loss", "perplexity"])
    best_by: Metric = "loss"
    keep_best: bool = True
    patience: Natural = 0
    least: Annotated[float, Field(ge=0)] = 0.0

    @property
    def upward(self) -> bool:
        """Whether more is better."""
        return self.best_by == "accuracy"


class CheckpointSection(Settings):
    """What is saved of a run while it goes.

    Attributes:
        directory: folder for the checkpoints; "checkpoints" in train.out when left out.
        every: steps between two; 0 for one at the end only.
        keep: how many to keep, the newest.
        asynchronous: train on while one is written.
        durable: where none is asynchronous, go on when each outlives a crash of the machine.
    """

    directory: Text | None = None
    every: Natural = 0
    keep: Count | None = 3
    asynchronous: bool = True
    durable: bool = False


class VerifySection(Settings):
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


@dataclass(frozen=True)
class FaultsSection(Faults):
    """How ranks that die or hang are looked for; ``outside`` is never below ``limit``.

    Attributes:
        grace: seconds that `espalier train` leaves its ranks to save in, when it is asked to leave.
    """

    grace: int = 30

    def __post_init__(self) -> None:
        object.__setattr__(self, "outside", max(self.outside, self.limit))
        super().__post_init__()
        if self.grace < 1:
            raise MistakeError("Faults", [("grace", self.grace, "expected at least 1")])


class ElasticSection(Settings):
    """How a run goes on when ranks die.

    Attributes:
        restarts: how often `espalier train` starts all ranks again, from the last checkpoint; torchrun has
            its own --max-restarts.
        min_data: smallest data axis to go on with where there are fewer ranks than the plan has, or a rank
            dies again and again; the plan's when left out.
    """

    restarts: Natural = 0
    min_data: Count | None = None
