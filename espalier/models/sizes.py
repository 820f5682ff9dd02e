"""The sizes of the models, told of every mistake in them; no torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

from espalier.texts import MistakeError, read_table

C = TypeVar("C")


class ConfigError(MistakeError):
    """A configuration with mistakes."""


def raise_if(owner: str, mistakes: Iterable[str]) -> None:
    """Raise `ConfigError` with all ``mistakes``, if there are any."""
    listed = list(mistakes)
    if listed:
        raise ConfigError(owner, listed)


def below_one(config: object, names: Iterable[str]) -> list[str]:
    """A mistake for each named size that is given and not at least 1."""
    values = {name: getattr(config, name) for name in names}
    return [
        f"{name} = {value} must be at least 1"
        for name, value in values.items()
        if not (value is None or value >= 1)
    ]


def no_probability(dropout: float) -> list[str]:
    """The mistake of a dropout that is none."""
    return [] if 0 <= dropout < 1 else [f"dropout = {dropout} must be at least 0 and below 1"]


def config_from_dict(config: type[C], values: Mapping[str, Any], section: str = "") -> C:
    """Build the dataclass ``config`` from plain values, strictly.

    Args:
        section: name of their table, which stands before keys in errors.

    Raises:
        ConfigError: listing every unknown key (with the nearest known one)
            and every value of the wrong type.
    """
    try:
        return read_table(config, values, section)
    except MistakeError as error:
        raise ConfigError(config.__name__, error.mistakes) from None


class _Checked:
    """Sizes that tell their mistakes when they are made."""

    __pydantic_config__: ClassVar[dict[str, Any]] = {"extra": "forbid"}

    def __post_init__(self) -> None:
        raise_if(type(self).__name__, self._mistakes())

    @abstractmethod
    def _mistakes(self) -> list[str]: ...


@dataclass(frozen=True, kw_only=True)
class GPTConfig(_Checked):
    """Sizes of a `GPT`.

    Attributes:
        vocab_size: number of tokens.
        max_positions: longest sequence.
        layers: number of blocks.
        hidden: width of the residual stream.
        heads: number of query heads.
        kv_heads: number of key and value heads, a divisor of ``heads``; as many when None.
        head_dim: width of one head, even; ``hidden / heads`` when None.
        ffn: inner width of the feed-forward layer; ``8/3 hidden`` rounded up to 8 when None.
        dropout: probability, after the embedding, in attention and after each block's two halves.
        bias: whether the Linear layers of the blocks have biases.
        tied: whether the head's weight is the embedding's.
        rope_base: base of the rotary angles.
        norm_eps: added to the mean square in RMSNorm.
        chunked_loss: whether the loss is computed for a part of the tokens after the other, so that the
            logits of all tokens are never held (from torch 2.13 on).
    """

    vocab_size: int = 4096
    max_positions: int = 1024
    layers: int = 4
    hidden: int = 192
    heads: int = 6
    kv_heads: int | None = None
    head_dim: int | None = None
    ffn: int | None = None
    dropout: float = 0.0
    bias: bool = False
    tied: bool = False
    rope_base: float = 10_000.0
    norm_eps: float = 1e-5
    chunked_loss: bool = False

    def _mistakes(self) -> list[str]:
        positive = ("vocab_size", "max_positions", "layers", "hidden", "heads", "kv_heads", "head_dim", "ffn")
        mistakes = below_one(self, positive)
        if mistakes:
            return mistakes
        if self.head_dim is None and self.hidden % self.heads:
            mistakes.append(
                f"hidden = {self.hidden} is not a multiple of heads = {self.heads}; "
                "change one of them, or give head_dim"
            )
        elif self.size_of_head % 2:
            mistakes.append(f"the width of a head, {self.size_of_head}, must be even for rotary positions")
        if self.heads % self.size_of_kv:
            mistakes.append(f"heads = {self.heads} is not a multiple of kv_heads = {self.kv_heads}")
        return mistakes + no_probability(self.dropout)

    @property
    def size_of_head(self) -> int:
        """Width of one head."""
        return self.head_dim or self.hidden // self.heads

    @property
    def size_of_kv(self) -> int:
        """Number of key and value heads."""
        return self.kv_heads or self.heads

    @property
    def size_of_ffn(self) -> int:
        """Inner width of the feed-forward layer."""
        return self.ffn or -(-8 * self.hidden // 24) * 8


@dataclass(frozen=True, kw_only=True)
class MoEConfig(GPTConfig):
    """Sizes of a `MoE`: those of a `GPT`, whose ``ffn`` is the inner width of one expert, and these.

    Attributes:
        experts: number of experts of a block.
        top_k: how many of them each token is routed to.
        shared: width of the feed-forward layer that every token passes besides, in experts; 0 for none.
        normalize: whether a token's weights of its experts are scaled so that they add up to 1.
        capacity: an expert takes at most so many times the tokens that would be its even share of the
            batch, the first ones, and drops the rest; None: it takes all that come.
        balance: weight of the balance loss in the loss.
        z: weight of the router's z-loss in the loss.
    """

    experts: int = 8
    top_k: int = 2
    shared: int = 0
    normalize: bool = True
    capacity: float | None = None
    balance: float = 0.01
    z: float = 0.001

    def _mistakes(self) -> list[str]:
        mistakes = super()._mistakes()
        if self.experts < 1:
            mistakes.append(f"experts = {self.experts} must be at least 1")
        if not 1 <= self.top_k <= max(self.experts, 1):
            mistakes.append(f"top_k = {self.top_k} must be at least 1 and at most experts = {self.experts}")
        if self.capacity is not None and self.capacity <= 0:
            mistakes.append(f"capacity = {self.capacity} must be above 0, or left out")
        mistakes += [
            f"{name} = {value} must be at least 0"
            for name in ("shared", "balance", "z")
            if (value := getattr(self, name)) < 0
        ]
        return mistakes


class BlockSizes(_Checked):
    """What a block with LayerNorm and GELU needs to know, of any kind of model."""

    hidden: int
    heads: int
    ffn: int | None
    dropout: float
    bias: bool
    norm_eps: float
    _positive: ClassVar[str]  # names of those that must be at least 1

    def _mistakes(self) -> list[str]:
        mistakes = below_one(self, self._positive.split())
        if not mistakes and self.hidden % self.heads:
            mistakes.append(f"hidden = {self.hidden} is not a multiple of heads = {self.heads}")
        return mistakes + no_probability(self.dropout)

    @property
    def size_of_ffn(self) -> int:
        """Inner width of the feed-forward layer."""
        return self.ffn or 4 * self.hidden


@dataclass(frozen=True, kw_only=True)
class GPT2Config(BlockSizes):
    """Sizes of a `GPT2`.

    Attributes:
        vocab_size: number of tokens.
        max_positions: longest sequence.
        layers: number of blocks.
        hidden: width of the residual stream, a multiple of ``heads``.
        heads: number of attention heads.
        ffn: inner width of the feed-forward layer; ``4 hidden`` when None.
        dropout: probability, after the embeddings, in attention and after each block's two halves.
        bias: whether Linear and LayerNorm have biases.
        tied: whether the head's weight is the embedding's.
        norm_eps: added to the variance in LayerNorm.
        chunked_loss: as a `GPTConfig`'s.
    """

    vocab_size: int = 4096
    max_positions: int = 1024
    layers: int = 4
    hidden: int = 192
    heads: int = 6
    ffn: int | None = None
    dropout: float = 0.0
    bias: bool = True
    tied: bool = True
    norm_eps: float = 1e-5
    chunked_loss: bool = False

    _positive: ClassVar[str] = "vocab_size max_positions layers hidden heads ffn"


@dataclass(frozen=True, kw_only=True)
class BERTConfig(GPT2Config):
    """Sizes of a `BERT`: those of a `GPT2`."""


@dataclass(frozen=True, kw_only=True)
class ViTConfig(BlockSizes):
    """Sizes of a `ViT`.

    Attributes:
        image: height and width of an image, a multiple of ``patch``.
        patch: height and width of a patch.
        channels: of an image.
        classes: number of classes.
        layers: number of blocks.
        hidden: width of the residual stream, a multiple of ``heads``.
        heads: number of attention heads.
        ffn: inner width of the feed-forward layer; ``4 hidden`` when None.
        dropout: probability, after the embeddings, in attention and after each block's two halves.
        bias: whether Linear, Conv2d and LayerNorm have biases.
        norm_eps: added to the variance in LayerNorm.
    """

    image: int = 32
    patch: int = 4
    channels: int = 3
    classes: int = 10
    layers: int = 4
    hidden: int = 192
    heads: int = 6
    ffn: int | None = None
    dropout: float = 0.0
    bias: bool = True
    norm_eps: float = 1e-6

    _positive: ClassVar[str] = "image patch channels classes layers hidden heads ffn"

    def _mistakes(self) -> list[str]:
        mistakes = super()._mistakes()
        if self.patch >= 1 and self.image % self.patch:
            mistakes.append(f"image = {self.image} is not a multiple of patch = {self.patch}")
        return mistakes
