"""Hugging Face's own models with masks, unchanged, in dry runs: what real ranks do, to the byte."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest
import torch

import espalier
from espalier import Plan
from espalier.tensor.dry_runs import Recalled
from tests.asked import left_to_sweeps

PRELOAD = ["transformers.modeling_utils"]
WORDS, ROWS, LENGTH = 64, 4, 16
NAMES = ["llama", "gpt2", "qwen2", "mistral", "bert", "t5", "mixtral"]
PLANS: dict[str, dict[str, Any]] = {
    "data": {"data": 2, "zero": 1},
    "tensor": {"tensor": 2},
    "pipe": {"pipe": 2, "accumulate": 2},
}


def built(name: str) -> Any:
    import transformers as hf

    wide = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
    text = {"vocab_size": WORDS, "max_position_embeddings": 32, "bos_token_id": 1, "eos_token_id": 2}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "bert":
            no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
            return hf.BertForMaskedLM(hf.BertConfig(**wide, **no_dropout, **text))
        if name == "gpt2":
            still = {"resid_pdrop": 0.0, "embd_pdrop": 0.0, "attn_pdrop": 0.0, "use_cache": False}
            sizes = {"n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 32, "vocab_size": WORDS}
            return hf.GPT2LMHeadModel(hf.GPT2Config(**sizes, **still, bos_token_id=1, eos_token_id=2))
        if name == "t5":
            sizes = {"d_model": 32, "d_ff": 64, "num_layers": 2, "num_heads": 4, "d_kv": 8}
            still = {"dropout_rate": 0.0, "use_cache": False, "decoder_start_token_id": 0}
            return hf.T5ForConditionalGeneration(hf.T5Config(vocab_size=WORDS, **sizes, **still))
        more: dict[str, Any] = {"num_key_value_heads": 2, "use_cache": False, **wide, **text}
        if name == "mistral":
            return hf.MistralForCausalLM(hf.MistralConfig(sliding_window=8, **more))
        if name == "mixtral":
            return routed_evenly(hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=4, **more)))
        kinds = {
            "llama": (hf.LlamaForCausalLM, hf.LlamaConfig),
            "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config),
        }
        model, config = kinds[name]
        return model(config(**more))


def routed_evenly(net: Any) -> Any:
    """With weights by which every expert gets as many tokens: a dry run takes that they do."""
    experts = torch.eye(4).to(net.device)
    with torch.no_grad():
        net.model.embed_tokens.weight[:, :4] = 10 * experts.repeat(WORDS // 4, 1)
        for layer in net.model.layers:
            layer.mlp.gate.weight[:, :4] = experts + experts.roll(1, 0) / 2
    return net


def batch(mask: str, device: str) -> dict[str, torch.Tensor]:
    ids = (torch.arange(ROWS * LENGTH).view(ROWS, LENGTH) * 7 % WORDS).to(device)
    given = {"input_ids": ids, "labels": ids}
    if mask != "none":
        given["attention_mask"] = torch.ones(ROWS, LENGTH, dtype=torch.int64)
    if mask == "padded":
        given["attention_mask"][:, LENGTH - 4 :] = 0
    return given


def dry(name: str, plan: Plan, mask: str, coordinate: Any) -> Any:
    with torch.device("meta"):
        net = built(name)
    optimizer = torch.optim.AdamW(net.parameters())
    return espalier.dry_run(net, plan, batch(mask, "meta"), optimizer=optimizer, coordinate=coordinate)


def real_and_dry(rank: int, world: int, name: str, mask: str) -> dict[str, Any]:
    found = {}
    for key, table in PLANS.items():
        plan, net, data = Plan(**table), built(name), batch(mask, "cpu")
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan, example=data)
        engine.train_step(data)
        watch, work = engine.watch(), Recalled()
        with espalier.ledger(engine.mesh) as book, work, watch:
            engine.train_step(data)
        told = dry(name, plan, mask, engine.mesh.coordinate)
        found[key] = (
            book.entries == told.ledger.entries,
            (work.flops, told.flops),
            (watch.peak, told.peak_bytes),
        )
    return found


@pytest.mark.parametrize(
    ("name", "mask"),
    left_to_sweeps(
        [*product(NAMES, ("none", "padded")), ("llama", "ones")],
        8,
        why="test_peaks.py has BERT without masks",
    ),
)
def test_a_dry_run_is_a_real_one(ranks: Any, name: str, mask: str) -> None:
    wrong = []
    for of_rank in ranks(2, real_and_dry, name, mask):
        for plan, (same, flops, peaks) in of_rank.items():
            if not same or flops[0] != flops[1] or abs(peaks[0] / peaks[1] - 1) > 0.01:
                wrong.append((plan, same, flops, peaks))
    assert not wrong
