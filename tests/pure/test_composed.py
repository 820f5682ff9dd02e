"""Composed of shallow dry runs is what the deep dry run tells, for models and plans drawn at random.

Some are drawn here; with ``ESPALIER_SWEEP=n`` in the environment n of them.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.models import BERT, GPT, BERTConfig, GPTConfig, MoE, MoEConfig, ViT, ViTConfig
from espalier.planner import Totals, composed
from espalier.planner.cells import LEAST_ZERO
from tests.asked import ASKED

HERE = (16, 17, 26)  # those that are drawn without it
WIDTH, HEADS, SEQUENCE, VOCABULARY = 48, 4, 16, 136
Made = tuple[nn.Module, Callable[[int], dict[str, torch.Tensor]], str]


def text(rows: int) -> dict[str, torch.Tensor]:
    tokens = torch.empty(rows, SEQUENCE, dtype=torch.int64, device="meta")
    return {"input_ids": tokens, "labels": tokens}


def images(rows: int) -> dict[str, torch.Tensor]:
    labels = torch.empty(rows, dtype=torch.int64, device="meta")
    return {"pixel_values": torch.empty(rows, 3, 32, 32, device="meta"), "labels": labels}


def hugging(name: str, **sizes: Any) -> nn.Module:
    transformers = pytest.importorskip("transformers")
    config = getattr(transformers, f"{name}Config")(vocab_size=VOCABULARY, **sizes)
    model: nn.Module = getattr(transformers, f"{name}ForCausalLM")(config)
    return model


def model(kind: str, layers: int, lot: random.Random) -> Made:
    """A model of a kind, what makes a batch for it, and the list of its blocks; empty: there are two."""
    sizes: dict[str, Any] = {"layers": layers, "hidden": WIDTH, "heads": HEADS}
    words = {"vocab_size": VOCABULARY, "max_positions": SEQUENCE}
    dropout = lot.choice([0.0, 0.1])
    with torch.device("meta"):
        if kind == "gpt":
            tied = lot.random() < 0.5
            return GPT(GPTConfig(**sizes, **words, tied=tied, dropout=dropout)), text, "blocks"
        if kind == "moe":
            return MoE(MoEConfig(**sizes, **words, experts=4)), text, "blocks"
        if kind == "bert":
            return BERT(BERTConfig(**sizes, **words, dropout=dropout)), text, "blocks"
        if kind == "vit":
            return ViT(ViTConfig(**sizes, image=32, patch=8, classes=8)), images, "blocks"
        named = {"hidden_size": WIDTH, "intermediate_size": 96, "num_hidden_layers": layers}
        named |= {"num_attention_heads": HEADS, "num_key_value_heads": lot.choice([2, HEADS])}
        llama = hugging("Llama", **named, tie_word_embeddings=kind == "llama tied")
        return llama, text, "model.layers"


def t5(layers: int) -> Made:
    transformers = pytest.importorskip("transformers")
    sizes = {"d_model": WIDTH, "d_kv": 12, "d_ff": 96, "num_heads": HEADS, "num_layers": layers}
    config = transformers.T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, use_cache=False, **sizes)
    with torch.device("meta"):
        return transformers.T5ForConditionalGeneration(config), text, ""


KINDS = ("gpt", "llama", "llama tied", "moe", "bert", "vit", "t5")


def drawn(seed: int) -> tuple[str, dict[str, Any], Made]:
    """A model, and a plan for it."""
    lot = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    layers = lot.randint(8, 9)
    made = t5(layers) if kind == "t5" else model(kind, layers, lot)
    blocks = made[2]
    ways: list[dict[str, Any]] = [
        {},
        {"tensor": 2},
        {"tensor": 2, "sequence_parallel": True},
        {"context": 2},
        {"tensor": 4, "tensor_mode": "2d"},
        {"tensor": 8, "tensor_mode": "2.5d", "depth": 2},
        {"tensor": 8, "tensor_mode": "3d"},
    ]
    if kind in ("vit", "bert", "t5", "moe"):
        ways = ways[:3]
    plan: dict[str, Any] = {
        "data": lot.choice([1, 2, 3, 4]),
        "zero": lot.choice([0, 1, 2, 3]),
        "precision": lot.choice(["float32", "bfloat16"]),
        "recompute": lot.choice(["none", "full", "selective"]),
        "accumulate": lot.choice([1, 1, 1, 6]),
        "chunk_megabytes": 0.01,
        "prefetch_megabytes": 0.01,
        **lot.choice(ways),
    }
    if kind == "moe" and lot.random() < 0.6:
        plan |= {"data": 4, "expert": lot.choice([2, 4])}
    if blocks and kind not in ("moe",) and "tensor_mode" not in plan and lot.random() < 0.35:
        schedule = lot.choice(["gpipe", "1f1b", "zb-h1", "interleaved", "zbv"])
        stages = 4 if schedule in ("interleaved", "zbv") else 2
        cut = sorted(lot.sample(range(2, layers - 1), stages - 1))
        plan |= {"pipe": 2, "schedule": schedule, "accumulate": lot.choice([2, 6])}
        plan |= {"cuts": tuple(f"{blocks}.{i}" for i in cut), "stages_per_rank": stages // 2}
        plan |= {"zero": min(plan["zero"], 1), "data": min(plan["data"], 2)}
    elif plan["zero"]:
        plan["offload"] = lot.choice([{}, {}, {"states": "host"}])
    if lot.random() < 0.5:
        plan["offload"] = offload(lot, plan)
    return kind, plan, made


def offload(lot: random.Random, plan: dict[str, Any]) -> dict[str, Any]:
    """What of a plan's states, gradients and parameters is off the device."""
    alone = plan["data"] == 1 and "context" not in plan
    kinds = [kind for kind, least in LEAST_ZERO.items() if alone or plan["zero"] >= least]
    places = {kind: lot.choice(["device", "host", "host", "disk"]) for kind in kinds}
    return {**places, "directory": "nowhere"}


def labels(batch: Any) -> torch.Tensor:
    return (batch["labels"] != -100).sum()


@pytest.mark.parametrize("seed", range(ASKED) if ASKED else HERE)
def test_composed_is_the_whole(seed: int) -> None:
    kind, plan, (net, batch, _) = drawn(seed)
    rows = plan["data"] * plan["accumulate"] * (8 if "tensor_mode" in plan else 1)
    given: dict[str, Any] = {"optimizer": torch.optim.AdamW(net.parameters()), "max_grad_norm": 1.0}
    if kind == "moe":
        given["count"] = labels
    if "pipe" in plan:
        given["coordinate"] = {"pipe": seed % 2}
    try:
        report = espalier.dry_run(net, plan, batch(rows), **given)
    except (ValueError, NotImplementedError) as error:
        with pytest.raises(type(error)):
            composed(net, plan, batch(rows), **given)
        if ASKED:
            print(f"\n{seed} {kind} {plan} refused: {str(error)[:300]}")
        return
    short = composed(net, plan, batch(rows), **given)
    if ASKED:
        print(f"\n{seed} {kind} {short.runs} {short.why} {plan}")
    assert not short.differs(Totals.of(report)), (kind, plan, short.why)
