"""Which model a job trains: Espalier's own plain ones, or any of Hugging Face's."""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, Protocol, Self

from torch import nn

from espalier.models import (
    ConfigError,
    GPT2Config,
    GPTConfig,
    ViTConfig,
    build,
    config_class,
    config_from_dict,
    kinds,
    nearest,
)
from espalier.train.mistakes import MISSING, Mistake, unknown_key

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

    def without_dropout(self) -> tuple[Self, list[str]]:
        """The same model with every dropout probability 0, and which keys were changed."""
        ...


@dataclass(frozen=True)
class PlainSpec:
    """One of `espalier.models`."""

    kind: str
    config: GPTConfig | GPT2Config | ViTConfig

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


@dataclass(frozen=True)
class HuggingFaceSpec:
    """A model class of transformers, built from its config, unchanged."""

    name: str
    config: Mapping[str, Any]

    @property
    def facts(self) -> Facts:
        """What the data must fit, read from the config by transformers' common names."""
        config = self.config_object()
        labels = _labels_of(self.name)
        if labels == "classes":
            size = config.image_size
            height, width = (size, size) if isinstance(size, int) else size
            return Facts("classes", image=(config.num_channels, height, width), classes=config.num_labels)
        return Facts(labels, config.vocab_size, getattr(config, "max_position_embeddings", None))

    def config_object(self) -> Any:
        """The transformers config."""
        return _transformers_class(self.name).config_class(**dict(self.config))

    def build(self) -> nn.Module:
        """Build the model with fresh weights; nothing is downloaded."""
        return _transformers_class(self.name)(self.config_object())

    def without_dropout(self) -> tuple[Self, list[str]]:
        """The same model with every config value named like a dropout probability 0."""
        every = self.config_object().to_dict()
        active = [
            key
            for key, value in every.items()
            if ("dropout" in key or key.endswith("pdrop")) and isinstance(value, float) and value > 0
        ]
        off = dict.fromkeys(active, 0.0)
        return replace(self, config={**self.config, **off}), [f"model.config.{key}" for key in active]


def read_model(values: Mapping[str, Any], mistakes: list[Mistake]) -> ModelSpec | None:
    """Read the [model] table; on failure add to ``mistakes`` and return None."""
    every = (*kinds(), "huggingface")
    kind = values.get("kind", MISSING)
    if kind is MISSING:
        mistakes.append(Mistake("model.kind", kind, f"is missing; expected one of {', '.join(every)}"))
        return None
    if not isinstance(values.get("weights", ""), str):
        expected = "expected the path of a file or folder with weights"
        mistakes.append(Mistake("model.weights", values["weights"], expected))
    rest = {key: value for key, value in values.items() if key not in ("kind", "weights")}
    if kind == "huggingface":
        return _read_huggingface(rest, mistakes)
    if kind not in every:
        close = nearest(str(kind), every)
        hint = f"; did you mean {close!r}?" if close else ""
        mistakes.append(Mistake("model.kind", kind, f"expected one of {', '.join(every)}{hint}"))
        return None
    try:
        return PlainSpec(kind, config_from_dict(config_class(kind), rest))
    except ConfigError as error:
        mistakes.extend(Mistake(f"model ({kind})", MISSING, text) for text in error.mistakes)
        return None


def _read_huggingface(values: Mapping[str, Any], mistakes: list[Mistake]) -> ModelSpec | None:
    before = len(mistakes)
    known = ("kind", "class", "config")
    mistakes.extend(
        unknown_key(f"model.{key}", value, known) for key, value in values.items() if key not in known
    )
    name, config = values.get("class", MISSING), values.get("config", {})
    if not isinstance(name, str):
        mistakes.append(
            Mistake("model.class", name, 'expected a class of transformers, as "LlamaForCausalLM"')
        )
        return None
    if not isinstance(config, Mapping):
        mistakes.append(Mistake("model.config", config, "expected a table, [model.config]"))
        return None
    try:
        config_class = _transformers_class(name).config_class
        _labels_of(name)
    except ValueError as error:
        mistakes.append(Mistake("model.class", name, str(error)))
        return None
    # A transformers config keeps unknown keys silently, so they are looked for here.
    known_keys = {*config_class().to_dict(), *config_class.attribute_map, "num_labels"}
    mistakes.extend(
        unknown_key(f"model.config.{key}", value, known_keys)
        for key, value in config.items()
        if key not in known_keys
    )
    if len(mistakes) > before:
        return None
    spec = HuggingFaceSpec(name, dict(config))
    try:
        spec.config_object()
    # Each config class checks its values in its own way.
    except Exception as error:
        mistakes.append(Mistake("model.config", MISSING, " ".join(str(error).split())))
        return None
    return spec


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


def _transformers_class(name: str) -> Any:
    try:
        import transformers
    except ImportError:
        raise ValueError("transformers is not installed; run: pip install transformers") from None
    if "TRANSFORMERS_VERBOSITY" not in os.environ:
        # Its advice on configs is about checkpoints; none are loaded here.
        transformers.logging.set_verbosity_error()
    found = getattr(transformers, name, None)
    if found is None:
        close = nearest(name, [n for n in dir(transformers) if _has_known_ending(n)])
        hint = f"; did you mean {close!r}?" if close else ""
        raise ValueError(f"transformers {transformers.__version__} has no such class{hint}")
    if not hasattr(found, "config_class"):
        raise ValueError("this is not a model class of transformers, for it has no config_class")
    return found


def _has_known_ending(name: str) -> bool:
    return name.endswith(("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForImageClassification"))
