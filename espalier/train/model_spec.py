"""Which model a job trains: Espalier's own plain ones, any of Hugging Face's, or the user's."""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal, Protocol, Self, get_args

from pydantic import Field

from espalier.models import (
    ConfigError,
    GPT2Config,
    GPTConfig,
    ViTConfig,
    build,
    config_class,
    config_from_dict,
    kinds,
)
from espalier.texts import (
    MISSING,
    Count,
    Mistake,
    MistakeError,
    Settings,
    did_you_mean,
    read_table,
    unknown_key,
)
from espalier.train.names import config_typos

if TYPE_CHECKING:
    from torch import nn

Labels = Literal["next", "same", "masked", "classes"]
"""What a model wants as labels: the next tokens; the same tokens (it shifts them itself);
tokens at masked positions; the class of an image."""


@dataclass(frozen=True)
class Facts:
    """What the data must fit.

    Attributes:
        labels: which labels the model wants.
        vocab_size: number of tokens; None for images.
        max_positions: longest sequence; None where there is no limit.
        image: [channels, height, width] of an image; None for text.
        classes: number of image classes; None for text.
    """

    labels: Labels
    vocab_size: int | None = None
    max_positions: int | None = None
    image: tuple[int, int, int] | None = None
    classes: int | None = None


class ModelSpec(Protocol):
    """A model that can be built, and what it needs."""

    @property
    def facts(self) -> Facts:
        """What the data must fit."""
        ...

    def build(self) -> nn.Module:
        """Build the plain model, in float32, on torch's default device."""
        ...

    @property
    def weights(self) -> str | None:
        """File or folder whose weights the model begins with; None for fresh ones."""
        ...

    def without_dropout(self) -> tuple[Self, list[str]]:
        """The same model with every dropout probability 0, and which keys were changed."""
        ...


@dataclass(frozen=True)
class PlainSpec:
    """One of `espalier.models`."""

    kind: str
    config: GPTConfig | GPT2Config | ViTConfig
    weights: str | None = None

    @property
    def facts(self) -> Facts:
        """What the data must fit."""
        c = self.config
        if isinstance(c, ViTConfig):
            return Facts("classes", image=(c.channels, c.image, c.image), classes=c.classes)
        return Facts("masked" if self.kind == "bert" else "next", c.vocab_size, c.max_positions)

    def build(self) -> nn.Module:
        """Build the plain model."""
        return build(self.kind, asdict(self.config))

    def without_dropout(self) -> tuple[Self, list[str]]:
        """The same model with dropout 0."""
        if self.config.dropout == 0:
            return self, []
        return replace(self, config=replace(self.config, dropout=0.0)), ["model.dropout"]


class Lora(Settings):
    """Low-rank adapters (peft's LoRA): the model's own weights stay as they are.

    Attributes:
        rank: of the adapters.
        alpha: they are scaled by alpha / rank; twice the rank when left out.
        dropout: of what goes into them.
        targets: names of the modules that get one, or "all-linear", or a regular expression.
        train: names of modules that are trained whole beside them.
    """

    rank: Count = 8
    alpha: Count | None = None
    dropout: float = 0.0
    targets: str | list[str] = "all-linear"
    train: list[str] = Field(default=[])

    def put_into(self, model: nn.Module) -> None:
        """Put adapters into a model of transformers; everything else is frozen."""
        from peft import LoraConfig, inject_adapter_in_model

        config = LoraConfig(
            r=self.rank,
            lora_alpha=2 * self.rank if self.alpha is None else self.alpha,
            lora_dropout=self.dropout,
            target_modules=self.targets,
            modules_to_save=self.train or None,
        )
        inject_adapter_in_model(config, model)


@dataclass(frozen=True)
class HuggingFaceSpec:
    """A model class of transformers, built from its config, unchanged, or with adapters.

    Attributes:
        name: of the class.
        config: what is given of its config, or what changes of that in ``path``.
        path: a folder with ``config.json``, as ``save_pretrained`` writes it.
        weights: file or folder of the weights to begin with.
        lora: adapters.
    """

    name: str
    config: Mapping[str, Any]
    path: str | None = None
    weights: str | None = None
    lora: Lora | None = None

    @property
    def facts(self) -> Facts:
        """What the data must fit, read from the config by transformers' common names."""
        config = self.config_object()
        labels = _labels_of(self.name)
        if labels == "classes":
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            return Facts("classes", image=(config.num_channels, height, width), classes=config.num_labels)
        text = config.get_text_config()
        return Facts(labels, text.vocab_size, getattr(text, "max_position_embeddings", None))

    def config_object(self) -> Any:
        """The transformers config."""
        kind = transformers_class(self.name).config_class
        stored = {} if self.path is None else _read_config(self.path)
        config = kind.from_dict({**stored, **self.config})
        config.architectures = [self.name]
        return config

    def build(self) -> nn.Module:
        """Build the model with fresh weights; nothing is downloaded."""
        model: nn.Module = transformers_class(self.name)(self.config_object())
        if self.lora is not None:
            self.lora.put_into(model)
        return model

    def without_dropout(self) -> tuple[Self, list[str]]:
        """The same model with every config value named like a dropout probability 0."""
        every = self.config_object().to_dict()
        active = [
            key
            for key, value in every.items()
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value > 0
        ]
        off = dict.fromkeys(active, 0.0)
        names = [f"model.config.{key}" for key in active]
        lora = self.lora
        if lora is not None and lora.dropout:
            lora = lora.model_copy(update={"dropout": 0.0})
            names.append("model.lora.dropout")
        return replace(self, config={**self.config, **off}, lora=lora), names


@dataclass(frozen=True)
class OwnSpec:
    """A model that a function of the user's gives.

    Attributes:
        reference: ``module:function``.
        arguments: of the function.
        facts: what the data must fit, as the job says it.
        folder: where modules are looked for beside the working folder.
        weights: file or folder of the weights to begin with.
        drops: whether dropout modules are as the function made them.
    """

    reference: str
    arguments: Mapping[str, Any]
    facts: Facts
    folder: str = "."
    weights: str | None = None
    drops: bool = True

    def build(self) -> nn.Module:
        """Call the function."""
        from torch import nn

        from espalier.torch_private import AnyDropout

        model = imported(self.reference, self.folder)(**self.arguments)
        if not isinstance(model, nn.Module):
            raise TypeError(f"{self.reference} gave a {type(model).__name__}, expected a torch.nn.Module")
        for module in () if self.drops else model.modules():
            if isinstance(module, AnyDropout):
                module.p = 0.0
            elif isinstance(module, nn.MultiheadAttention):
                module.dropout = 0.0
        return model

    def without_dropout(self) -> tuple[Self, list[str]]:
        """The same with torch's dropout modules at 0; what a model draws by itself it goes on drawing."""
        return replace(self, drops=False), ["its dropout modules"]


def imported(reference: str, folder: str = ".") -> Callable[..., Any]:
    """What ``module:function`` names; modules are looked for in the working folder and ``folder`` too.

    Raises:
        ValueError: there is no such module, or no such function in it.
    """
    name, colon, attribute = reference.partition(":")
    name = name.removesuffix(".py").replace("/", ".")
    if not colon or not name or not attribute:
        raise ValueError(f"{reference!r}: expected module:function, as in my_model:build")
    for place in (folder, os.getcwd()):
        if os.path.abspath(place) not in map(os.path.abspath, sys.path):
            sys.path.insert(0, os.path.abspath(place))
    try:
        module = importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name != name.partition(".")[0] and error.name != name:
            raise ValueError(f"{reference!r}: {name} needs {error.name}, which is not installed") from error
        raise ValueError(
            f"{reference!r}: there is no module {name} in {os.getcwd()} or {os.path.abspath(folder)}"
        ) from error
    value = getattr(module, attribute, None)
    if not callable(value):
        there = [n for n, x in vars(module).items() if callable(x) and not n.startswith("_")]
        hint = did_you_mean(attribute, there, lead="; ")
        raise ValueError(f"{reference!r}: {name} has no such function{hint}")
    function: Callable[..., Any] = value
    return function


# ---- the table [model]

HF = ("hf", "huggingface")


def read_model(
    values: Mapping[str, Any], mistakes: list[Mistake], folder: str = ".", *, deep: bool = True
) -> ModelSpec | None:
    """Read the [model] table; on failure add to ``mistakes`` and return None.

    Args:
        folder: that of the job file, where modules of the user's may be.
        deep: ask transformers about a model of its own; else None where there is nothing else to tell.
    """
    every = (*kinds(), *HF, "module")
    kind = values.get("kind", MISSING)
    if kind is MISSING:
        mistakes.append(Mistake("model.kind", kind, f"is missing; expected one of {', '.join(every)}"))
        return None
    weights = values.get("weights")
    if not isinstance(weights, str | None):
        expected = "expected the path of a file or folder with weights"
        mistakes.append(Mistake("model.weights", weights, expected))
        return None
    if weights is not None and not Path(weights).exists():
        mistakes.append(Mistake("model.weights", weights, "is not there: give a file or folder with weights"))
        return None
    rest = {key: value for key, value in values.items() if key not in ("kind", "weights")}
    if kind in HF:
        return _read_huggingface(rest, weights, mistakes, deep)
    if kind == "module":
        return _read_own(rest, weights, folder, mistakes)
    if kind not in every:
        hint = did_you_mean(str(kind), every, lead="; ")
        mistakes.append(Mistake("model.kind", kind, f"expected one of {', '.join(every)}{hint}"))
        return None
    try:
        return PlainSpec(kind, config_from_dict(config_class(kind), rest, "model"), weights)
    except ConfigError as error:
        mistakes.extend(error.mistakes)
        return None


class OwnTable(Settings):
    """The table [model] of ``kind = "module"``.

    Attributes:
        build: ``module:function``; the function gives the model, which is called as ``model(**batch)``.
        arguments: of the function.
        labels: what the model wants as labels: "same" (the tokens themselves: it shifts them), "next"
            (shifted already), "masked", or "classes" (of images).
        vocab_size: number of tokens.
        max_positions: longest sequence.
        image: [channels, height, width].
        classes: of images.
    """

    build: str
    arguments: dict[str, Any] = Field(default={})
    labels: Labels = "same"
    vocab_size: Count | None = None
    max_positions: Count | None = None
    image: list[Count] | None = None
    classes: Count | None = None


def _read_own(
    values: Mapping[str, Any], weights: str | None, folder: str, mistakes: list[Mistake]
) -> ModelSpec | None:
    try:
        table = read_table(OwnTable, values, "model")
    except MistakeError as error:
        mistakes.extend(error.mistakes)
        return None
    if ":" not in table.build:
        expected = 'expected module:function, as in "my_model:build"'
        mistakes.append(Mistake("model.build", table.build, expected))
        return None
    image = table.image
    if image is not None and len(image) != 3:
        mistakes.append(Mistake("model.image", image, "expected [channels, height, width]"))
        return None
    if table.labels == "classes" and (image is None or table.classes is None):
        mistakes.append(Mistake("model.image", MISSING, "images need model.image and model.classes"))
        return None
    size = None if image is None else (image[0], image[1], image[2])
    facts = Facts(table.labels, table.vocab_size, table.max_positions, size, table.classes)
    return OwnSpec(table.build, table.arguments, facts, folder, weights)


def _read_huggingface(
    values: Mapping[str, Any], weights: str | None, mistakes: list[Mistake], deep: bool
) -> ModelSpec | None:
    before = len(mistakes)
    known = ("kind", "weights", "path", "class", "task", "config", "fresh", "lora")
    mistakes.extend(
        unknown_key(f"model.{key}", value, known) for key, value in values.items() if key not in known
    )
    config, path, fresh = values.get("config", {}), values.get("path"), values.get("fresh", False)
    if not isinstance(config, Mapping):
        mistakes.append(Mistake("model.config", config, "expected a table, [model.config]"))
        return None
    if not isinstance(fresh, bool):
        mistakes.append(Mistake("model.fresh", fresh, "expected true or false"))
    stored: Mapping[str, Any] = {}
    if path is not None:
        try:
            stored = _read_config(path)
        except ValueError as error:
            mistakes.append(Mistake("model.path", path, str(error)))
            return None
    lora = None
    if "lora" in values:
        lora = _read_lora(values["lora"], mistakes)
    if weights is None and path is not None and not fresh and _has_weights(Path(path)):
        weights = path
    if lora is not None and weights is None:
        expected = "adapters are for a model that has weights: give model.path or model.weights"
        mistakes.append(Mistake("model.lora", MISSING, expected))
    name = values.get("class", MISSING)
    if not isinstance(name, str) and name is not MISSING:
        expected = 'expected a class of transformers, as "LlamaForCausalLM"'
        mistakes.append(Mistake("model.class", name, expected))
    if not deep:
        mistakes.extend(config_typos(name, {**stored, **config}.get("model_type"), config))
    if not deep or len(mistakes) > before:
        return None
    try:
        name = _class_name(name, {**stored, **config}, values.get("task"))
        config_class = transformers_class(name).config_class
        _labels_of(name)
    except ValueError as error:
        mistakes.append(Mistake("model.class", name, str(error)))
        return None
    # A transformers config keeps unknown keys silently, so they are looked for here.
    known_keys = sorted({*config_class().to_dict(), *config_class.attribute_map, "num_labels"})
    mistakes.extend(
        unknown_key(f"model.config.{key}", value, known_keys)
        for key, value in config.items()
        if key not in known_keys
    )
    if len(mistakes) > before:
        return None
    spec = HuggingFaceSpec(name, dict(config), path, weights, lora)
    try:
        _ = spec.facts
    # Each config class checks its values in its own way.
    except Exception as error:
        mistakes.append(Mistake("model.config", MISSING, " ".join(str(error).split())))
        return None
    return spec


def _read_lora(values: Any, mistakes: list[Mistake]) -> Lora | None:
    if not isinstance(values, Mapping):
        mistakes.append(Mistake("model.lora", values, "expected a table, [model.lora]"))
        return None
    if importlib.util.find_spec("peft") is None:
        mistakes.append(Mistake("model.lora", MISSING, "needs peft; run: pip install 'espalier[hf]'"))
        return None
    try:
        return read_table(Lora, values, "model.lora")
    except MistakeError as error:
        mistakes.extend(error.mistakes)
        return None


def _read_config(path: Any) -> dict[str, Any]:
    """The config.json of a folder.

    Raises:
        ValueError: there is none.
    """
    file = Path(str(path)) / "config.json"
    try:
        config = json.loads(file.read_text("utf-8"))
    except OSError:
        reason = (
            "expected a local folder with a config.json, as save_pretrained writes (nothing is downloaded)"
        )
        raise ValueError(reason) from None
    except ValueError as error:
        raise ValueError(f"{file} is no JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} holds no config")
    return config


def _has_weights(folder: Path) -> bool:
    patterns = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*.bin", "*.bin.index.json")
    return any(any(folder.glob(pattern)) for pattern in patterns)


Task = Literal["causal-lm", "masked-lm", "image-classification"]
_MAPPINGS = MappingProxyType(
    {
        "causal-lm": "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES",
        "masked-lm": "MODEL_FOR_MASKED_LM_MAPPING_NAMES",
        "image-classification": "MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES",
    }
)


def _class_name(name: Any, config: Mapping[str, Any], task: Any) -> str:
    """The class that a job names, or the one of its config's architecture and task.

    Raises:
        ValueError: neither says one.
    """
    if isinstance(name, str):
        return name
    if task is not None and task not in get_args(Task):
        raise ValueError(f"model.task = {task!r}: expected one of {', '.join(get_args(Task))}")
    kind, architectures = config.get("model_type"), config.get("architectures") or []
    known = [str(each) for each in architectures if _has_known_ending(str(each))]
    if task is None and known:
        return known[0]
    if kind is None:
        raise ValueError(
            'is missing: give a class of transformers, as "LlamaForCausalLM", model.path (a folder with '
            'config.json), or model.config.model_type = "llama"'
        )
    from transformers.models.auto import modeling_auto

    names = getattr(modeling_auto, _MAPPINGS[task or "causal-lm"])
    for candidate in known:
        if candidate in names.values():
            return candidate
    if kind not in names:
        hint = did_you_mean(str(kind), names, lead="; ")
        raise ValueError(f"transformers has no {task or 'causal-lm'} model of model_type = {kind!r}{hint}")
    classes = names[kind]
    return str(classes if isinstance(classes, str) else classes[0])


def _labels_of(name: str) -> Labels:
    endings: dict[str, Labels] = {
        "ForCausalLM": "same",
        "LMHeadModel": "same",
        "ForMaskedLM": "masked",
        "ForImageClassification": "classes",
    }
    for ending, labels in endings.items():
        if name.endswith(ending):
            return labels
    raise ValueError(f"expected a class whose name ends in one of {', '.join(endings)}")


def transformers_class(name: str) -> Any:
    """A model class of transformers.

    Raises:
        ValueError: there is none of that name, or no transformers.
    """
    try:
        import transformers
    except ImportError:
        raise ValueError("transformers is not installed; run: pip install transformers") from None
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        # Its advice on configs is about checkpoints; none are loaded here.
        transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name, None)
    if kind is None:
        hint = did_you_mean(name, filter(_has_known_ending, dir(transformers)), lead="; ")
        raise ValueError(f"transformers {transformers.__version__} has no such class{hint}")
    if not hasattr(kind, "config_class"):
        raise ValueError("this is not a model class of transformers, for it has no config_class")
    return kind


def _has_known_ending(name: str) -> bool:
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForImageClassification"))
