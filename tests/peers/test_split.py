"""Hugging Face's models, unchanged, as stages run one after another in one process."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from espalier.parallel.pipeline.split import split
from tests.pure.test_split import equal

SIZES = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
IDS = torch.arange(24).reshape(2, 12) % 60 + 3


def tokens(ids: torch.Tensor, *, masked: bool = False) -> dict[str, torch.Tensor]:
    batch = {"input_ids": ids, "labels": ids}
    if masked:
        mask = torch.ones_like(ids)
        mask[0, -3:] = 0
        batch["attention_mask"] = mask
    return batch


def made(name: str) -> tuple[torch.nn.Module, list[Any]]:
    """A model, and batches: of what it is split for, and others."""
    import transformers as hf

    hf.logging.set_verbosity_error()
    torch.manual_seed(0)
    texts = [tokens(IDS), tokens(IDS[:, :7].repeat(2, 1), masked=True), tokens(IDS, masked=True)]
    token = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 64}
    common = {**SIZES, **token}
    if name == "gpt2":
        config = hf.GPT2Config(n_embd=32, n_layer=4, n_head=4, use_cache=False, **token)
        return hf.GPT2LMHeadModel(config), texts
    if name == "llama":
        return hf.LlamaForCausalLM(hf.LlamaConfig(num_key_value_heads=2, **common)), texts
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**common)), texts
    if name == "t5":
        config = hf.T5Config(
            d_model=32, d_kv=8, d_ff=48, num_layers=3, num_heads=4, decoder_start_token_id=0, **token
        )
        return hf.T5ForConditionalGeneration(config), texts
    if name == "mixtral":
        config = hf.MixtralConfig(
            num_key_value_heads=2, num_local_experts=4, output_router_logits=True, **common
        )
        config._experts_implementation = "eager"  # the grouped product takes no float64
        return hf.MixtralForCausalLM(config), texts
    if name == "clip":
        vision = {**SIZES, "num_hidden_layers": 3, "image_size": 16, "patch_size": 4}
        config = hf.CLIPConfig(text_config=dict(common), vision_config=vision, projection_dim=16)
        images = torch.randn(2, 3, 16, 16).double()
        return hf.CLIPModel(config), [{"input_ids": IDS, "pixel_values": images, "return_loss": True}]
    config = hf.ViTConfig(image_size=16, patch_size=4, num_labels=6, **SIZES)
    images = torch.randn(3, 3, 16, 16).double()
    batch = {"pixel_values": images, "labels": torch.tensor([1, 5, 0])}
    return hf.ViTForImageClassification(config), [{k: v[:2] for k, v in batch.items()}, batch]


@pytest.mark.parametrize(
    ("name", "number", "training"),
    [
        ("gpt2", 2, True),
        ("llama", 4, True),
        ("bert", 4, True),
        ("t5", 4, True),
        ("vit", 2, False),
        ("mixtral", 2, True),
        ("clip", 4, False),
    ],
)
def test_stages_are_the_model(name: str, number: int, training: bool) -> None:
    model, batches = made(name)
    model = model.double().train(training)
    found = split(model, number, batches[0])
    for batch in batches:
        # the encoder's output has gradients of all stages of the decoder, summed in another order
        equal(model, batch, found, exact=name != "t5")


def test_what_travels() -> None:
    model, batches = made("t5")
    found = split(model.double(), 4, batches[0])
    encoded = [[v.name for v in s.inputs].count("encoder.dropout") for s in found.stages]
    assert found.cuts[0].startswith("encoder.block")
    assert encoded[-1] == 1 and found.users["shared.weight"] == (0, *found.users["shared.weight"][1:])
    model, batches = made("llama")
    found = split(model.double(), 4, batches[1], ["model.layers.1", "model.layers.3", "model.norm"])
    assert [[v.name for v in s.inputs] for s in found.stages[1:]] == [
        ["model.layers.0"],
        ["model.layers.2"],
        ["model.layers.3"],
    ]  # no masks and no rotary tables
    equal(model, batches[1], found)


def test_hidden_states_of_all_stages_reach_the_output() -> None:
    model, batches = made("bert")
    model = model.double()
    batch = {**batches[0], "output_hidden_states": True}
    found = split(model, 3, batch)
    equal(model, batch, found)
    assert len(found.stages[2].inputs) == len(found.stages[1].inputs) + 1 or len(found.stages[2].inputs) > 2
