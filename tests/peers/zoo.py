"""Real models and how they are compared: built small, trained unchanged on a mesh and on one process."""

from __future__ import annotations

import copy
import math
import random
import warnings
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.layout import local_box
from espalier.tensor import GatherWarning
from espalier.tensor.modules import lay_out_parameter
from espalier.train.double import Double

VOCABULARY, ROWS, LENGTH, STEPS = 96, 4, 10, 2
SIZES = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}

SIDES = {
    f"{side}_{key}": n
    for side in ("encoder", "decoder")
    for key, n in (("layers", 2), ("attention_heads", 4), ("ffn_dim", 48))
}

Batch = dict[str, Any]
Step = tuple[Callable[[Batch], torch.Tensor], Callable[[], None]]


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


def compared(
    rank: int, world: int, name: str, drawn: bool, plan: dict[str, Any] | None = None
) -> tuple[dict[str, float], list[str]]:
    """The largest differences from one process over some steps, and the functions that were gathered.

    Args:
        drawn: each parameter lies in a layout drawn at random, on data and on tensor, and the loop is
            torch's own; else the engine trains in the layouts that it infers.
        plan: the engine's; by default data 2 × tensor 2.
    """
    build, draw = MODELS[name]
    torch.manual_seed(1)
    model = build().to(torch.float64).train()
    reference = copy.deepcopy(model)
    generator = torch.Generator().manual_seed(5)
    batches = [draw(generator) for _ in range(STEPS)]
    with warnings.catch_warnings(record=True) as caught, Double():
        warnings.simplefilter("always")
        run = by_hand(model) if drawn else by_engine(model, plan)
        worst = differences(model, reference, run, batches)
    gathered = [str(w.message).split()[0] for w in caught if issubclass(w.category, GatherWarning)]
    other = [str(w.message) for w in caught if not issubclass(w.category, GatherWarning)]
    assert not other, other
    return worst, sorted(set(gathered))


def optimizer_of(model: nn.Module) -> torch.optim.Optimizer:
    """AdamW with an epsilon that keeps gradients of nearly zero from counting as much as the others."""
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1, eps=1e-4)


def by_engine(model: nn.Module, plan: dict[str, Any] | None = None) -> Step:
    """The engine, on data 2 × tensor 2, in the layouts that it infers."""
    engine = espalier.initialize(model, optimizer_of(model), plan or {"data": 2, "tensor": 2})

    def gradients(batch: Batch) -> torch.Tensor:
        loss = engine(batch)
        engine.backward(loss)
        engine.finish_gradients()
        return loss

    return gradients, engine.step


def by_hand(model: nn.Module) -> Step:
    """A plain loop on DTensors in layouts drawn at random, uneven and empty shards among them."""
    mesh = espalier.Mesh.from_env({"data": 2, "tensor": 2})
    rng = random.Random(7)

    def placement(ndim: int) -> espalier.Placement:
        dim = rng.randrange(-1, ndim)
        return espalier.Replicate() if dim < 0 else espalier.Shard(dim)

    for p in model.parameters():
        lay_out_parameter(p, espalier.Layout(mesh, [placement(p.ndim), placement(p.ndim)], p.shape))
    rows = [espalier.Shard(0), espalier.Replicate()]
    return plain_step(
        model,
        lambda x: espalier.distribute_tensor(x, mesh, rows) if isinstance(x, torch.Tensor) else x,
    )


def plain_step(model: nn.Module, enter: Callable[[Any], Any] = lambda x: x) -> Step:
    """The loop as anyone writes it."""
    optimizer = optimizer_of(model)

    def gradients(batch: Batch) -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(**{k: enter(v) for k, v in batch.items()}).loss
        loss.backward()
        return loss

    return gradients, optimizer.step


def held(x: torch.Tensor, whole: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank holds of a tensor, and that part of the whole; where it holds addends, their sum."""
    if not isinstance(x, espalier.DTensor) or espalier.layout_of(x).partial:
        return espalier.full_tensor(x), whole
    return x.to_local(), whole[local_box(espalier.layout_of(x)).slices]


def differences(model: nn.Module, reference: nn.Module, run: Step, batches: list[Batch]) -> dict[str, float]:
    """Train both, step by step; the largest absolute difference of each kind."""
    plain = plain_step(reference)
    worst = {"loss": 0.0, "gradient": 0.0, "parameter": 0.0, "buffer": 0.0}

    def note(kind: str, given: torch.Tensor, right: torch.Tensor) -> None:
        given, right = held(given.detach(), right.detach())
        gap = float((given - right).abs().max()) if right.numel() else 0.0
        worst[kind] = max(worst[kind], math.inf if math.isnan(gap) else gap)

    before = [p.detach().clone() for p in reference.parameters()]
    for batch in batches:
        note("loss", run[0](batch), plain[0](batch))
        for p, q in zip(model.parameters(), reference.parameters(), strict=True):
            if p.grad is not None and q.grad is not None:
                note("gradient", p.grad, q.grad)
            elif p.grad is not None or q.grad is not None:
                worst["gradient"] = math.inf
        run[1]()
        plain[1]()
        for kind, ours, theirs in (
            ("parameter", model.parameters(), reference.parameters()),
            ("buffer", model.buffers(), reference.buffers()),
        ):
            for x, y in zip(ours, theirs, strict=True):
                note(kind, x, y)
    moved = [not torch.equal(a, p) for a, p in zip(before, reference.parameters(), strict=True)]
    assert sum(moved) > len(moved) / 2, "the reference did not train"
    return worst
