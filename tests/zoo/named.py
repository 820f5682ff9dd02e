"""Well-known models, each with sizes and batches of its own (padded rows, pairs of sides)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

from tests.zoo.cases import Case

VOCABULARY, ROWS, LENGTH = 96, 4, 10
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

SIDES = {
    f"{side}_{key}": n
    for side in ("encoder", "decoder")
    for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}

Batch = dict[str, Any]


def tokens(generator: torch.Generator, rows: int = ROWS) -> torch.Tensor:
    """Random token ids [rows, LENGTH]."""
    return torch.randint(4, VOCABULARY, (rows, LENGTH), generator=generator)


def causal(generator: torch.Generator) -> Batch:
    """Inputs that are their own labels."""
    ids = tokens(generator)
    return {"input_ids": ids, "labels": ids}


def padded(generator: torch.Generator) -> Batch:
    """As :func:`causal`, with rows of different lengths: a padding mask, labels ignored where it is 0."""
    ids = tokens(generator)
    lengths = torch.randint(LENGTH // 2, LENGTH + 1, (ROWS, 1), generator=generator)
    mask = (torch.arange(LENGTH) < lengths).long()
    return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(mask == 0, -100)}


def translated(generator: torch.Generator) -> Batch:
    """A source and a target sequence."""
    return {**padded(generator), "labels": tokens(generator)}


def images(generator: torch.Generator) -> Batch:
    """Images [rows, 3, 32, 32] of six classes."""
    return {
        "pixel_values": torch.randn(ROWS, 3, 32, 32, generator=generator, dtype=torch.float64),
        "labels": torch.randint(0, 6, (ROWS,), generator=generator),
    }


def hugging_face(name: str, /, **config: Any) -> nn.Module:
    """A transformers model class from a small config, all dropout off."""
    import transformers

    transformers.logging.set_verbosity_error()
    kind = getattr(transformers, name)
    made = kind.config_class(**config)
    for key, value in made.to_dict().items():
        if isinstance(value, float) and ("drop" in key or key.endswith("pdrop")):
            setattr(made, key, 0.0)
    if hasattr(made, "num_local_experts"):
        made._experts_implementation = "eager"  # the grouped product takes no float64
    return kind(made)


def text(name: str, **config: Any) -> Callable[[], nn.Module]:
    """A language model with the common names of sizes."""
    return lambda: hugging_face(name, vocab_size=VOCABULARY, **{**SIZES, **config})


def t5() -> nn.Module:
    sizes = {"d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}
    return hugging_face(
        "T5ForConditionalGeneration", vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes
    )


def bart() -> nn.Module:
    return hugging_face("BartForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, **SIDES)


def whisper() -> nn.Module:
    return hugging_face(
        "WhisperForConditionalGeneration", vocab_size=VOCABULARY, d_model=32, num_mel_bins=8,
        max_source_positions=8, max_target_positions=LENGTH, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, suppress_tokens=None, begin_suppress_tokens=None, **SIDES,
    )  # fmt: skip


def spoken(generator: torch.Generator) -> Batch:
    """Sixteen frames of sound and what is said."""
    sound = torch.randn(ROWS, 8, 16, generator=generator, dtype=torch.float64)
    return {"input_features": sound, "labels": tokens(generator)}


def clip() -> nn.Module:
    common = {**SIZES, "projection_dim": 16}
    return hugging_face(
        "CLIPModel",
        text_config={
            **common,
            "vocab_size": VOCABULARY,
            "max_position_embeddings": LENGTH,
            "eos_token_id": 3,
        },
        vision_config={**common, "image_size": 32, "patch_size": 8},
        projection_dim=16,
    )


def captioned(generator: torch.Generator) -> Batch:
    """Images and their captions; the loss compares each with all."""
    return {
        "input_ids": tokens(generator),
        "pixel_values": images(generator)["pixel_values"],
        "return_loss": True,
    }


class Out(NamedTuple):
    """What the models below give."""

    loss: torch.Tensor


class Residual(nn.Module):
    """Two convolutions and a way around them (He et al., 2015)."""

    def __init__(self, inside: int, outside: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(outside), nn.BatchNorm2d(outside)])
        self.around = nn.Conv2d(inside, outside, 1, stride) if stride > 1 else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = F.relu(self.norms[0](self.first(x)), inplace=True)
        return F.relu(self.norms[1](self.second(y)) + self.around(x))


class ResNet(nn.Module):
    """A residual network of torch's own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 8, 7, 2, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(3, 2, 1)
        )
        self.blocks = nn.Sequential(Residual(8, 8, 1), Residual(8, 16, 2), Residual(16, 18, 2))
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(18, 6))

    def forward(self, pixel_values: torch.Tensor, labels: torch.Tensor) -> Out:
        return Out(F.cross_entropy(self.head(self.blocks(self.stem(pixel_values))), labels))


class Recurrent(nn.Module):
    """A language model of LSTM layers, its embedding tied to the head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, 18)
        self.lstm = nn.LSTM(18, 18, num_layers=2, batch_first=True)
        self.head = nn.Linear(18, VOCABULARY)
        self.head.weight = self.embedding.weight

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> Out:
        states, _ = self.lstm(self.embedding(input_ids))
        logits = self.head(states)[:, :-1]
        return Out(F.cross_entropy(logits.reshape(-1, VOCABULARY), labels[:, 1:].reshape(-1)))


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[torch.Generator], Batch]]] = {
    # decoders
    "gpt2": (
        lambda: hugging_face("GPT2LMHeadModel", vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4),
        padded,
    ),
    "llama": (text("LlamaForCausalLM", num_key_value_heads=2), padded),
    "qwen3": (text("Qwen3ForCausalLM", num_key_value_heads=2, head_dim=8), causal),
    "gemma2": (text("Gemma2ForCausalLM", num_key_value_heads=2, head_dim=8, sliding_window=4), causal),
    "gpt-neox": (text("GPTNeoXForCausalLM"), padded),
    # encoders
    "bert": (text("BertForMaskedLM"), padded),
    "modernbert": (
        text(
            "ModernBertForMaskedLM",
            local_attention=4,
            pad_token_id=0,
            eos_token_id=1,
            bos_token_id=2,
            cls_token_id=1,
            sep_token_id=2,
        ),
        padded,
    ),
    # encoder and decoder
    "t5": (t5, translated),
    "bart": (bart, translated),
    "whisper": (whisper, spoken),
    # vision
    "vit": (text("ViTForImageClassification", image_size=32, patch_size=8, num_labels=6), images),
    "resnet": (
        lambda: hugging_face(
            "ResNetForImageClassification",
            embedding_size=8,
            hidden_sizes=[8, 16],
            depths=[1, 1],
            num_labels=6,
            layer_type="basic",
        ),
        images,
    ),
    "swin": (
        lambda: hugging_face(
            "SwinForImageClassification",
            image_size=32,
            patch_size=4,
            embed_dim=16,
            depths=[2, 1],
            num_heads=[2, 4],
            window_size=4,
            num_labels=6,
        ),
        images,
    ),
    "clip": (clip, captioned),
    "torch-resnet": (ResNet, images),
    "torch-lstm": (Recurrent, causal),
    # mixture of experts
    "mixtral": (
        text(
            "MixtralForCausalLM",
            num_key_value_heads=2,
            num_local_experts=4,
            num_experts_per_tok=2,
            output_router_logits=True,
        ),
        causal,
    ),
    # state space
    "mamba": (text("MambaForCausalLM", state_size=4), causal),
    "mamba2": (
        text("Mamba2ForCausalLM", state_size=4, num_heads=8, head_dim=8, n_groups=2, expand=2, chunk_size=4),
        causal,
    ),
}


def case(name: str) -> Case:
    """The case of a model."""
    build, draw = MODELS[name]

    def drawn(model: nn.Module, generator: torch.Generator) -> Iterator[Batch]:
        yield draw(generator)

    return Case(f"named/{name}", build, drawn)
