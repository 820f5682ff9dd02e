"""Hugging Face's own models, unchanged: laid out by inference, equal to one process."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.parallel import arrange
from espalier.parallel.tensor.infer import infer
from espalier.tensor import GatherWarning
from tests.ranks.test_verify import PLANS, check, compared

PRELOAD = ["transformers.modeling_utils"]
MODELS = ["hf-gpt2", "hf-llama", "hf-bert", "hf-vit"]


@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", MODELS)
def test_plan_equals_one_process(ranks: Any, name: str, plan: str) -> None:
    check(ranks, name, plan)


def gathers(rank: int, world: int, name: str) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        compared(rank, world, name, 2, 2)
    return [str(w.message) for w in caught if issubclass(w.category, GatherWarning)]


@pytest.mark.parametrize("name", MODELS)
def test_nothing_is_gathered_for_want_of_a_rule(ranks: Any, name: str) -> None:
    assert ranks(4, gathers, name)[0] == []


def small(name: str) -> tuple[Any, dict[str, torch.Tensor]]:
    import transformers as hf

    ids = torch.randint(0, 96, (1, 8))
    common = {"num_hidden_layers": 2, "hidden_size": 64, "intermediate_size": 96, "num_attention_heads": 4}
    if name == "llama":
        config = hf.LlamaConfig(vocab_size=96, num_key_value_heads=2, **common)
        return hf.LlamaForCausalLM(config), {"input_ids": ids, "labels": ids}
    if name == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(vocab_size=96, **common)), {"input_ids": ids, "labels": ids}
    if name == "vit":
        config = hf.ViTConfig(image_size=16, patch_size=4, num_labels=6, **common)
        images = {"pixel_values": torch.randn(1, 3, 16, 16), "labels": torch.tensor([1])}
        return hf.ViTForImageClassification(config), images
    config = hf.GPT2Config(vocab_size=96, n_embd=64, n_layer=2, n_head=4)
    return hf.GPT2LMHeadModel(config), {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize(
    ("name", "column", "row"),
    [
        ("llama", ["q_proj", "k_proj", "v_proj", "gate_proj", "up_proj", "lm_head"], ["o_proj", "down_proj"]),
        ("bert", ["query", "key", "value", "intermediate.dense"], ["attention.output.dense"]),
        ("vit", ["q_proj", "k_proj", "v_proj", "fc1"], ["o_proj", "fc2"]),
    ],
)
def test_inference_finds_megatrons_layouts(name: str, column: list[str], row: list[str]) -> None:
    model, batch = small(name)
    plan = espalier.Plan(tensor=2)
    layouts = arrange(model, plan, espalier.Mesh.dry(plan.axes), batch=batch)
    assert layouts is not None
    found = {name: layout.axes[-1] for name, layout in layouts.items() if isinstance(layout.axes[-1], int)}
    for parameter, _ in model.named_parameters():
        if parameter.endswith(tuple(f"{c}.weight" for c in column)):
            assert found[parameter] == 0, parameter
        elif parameter.endswith(tuple(f"{r}.weight" for r in row)):
            assert found[parameter] == 1, parameter
        elif "norm" in parameter.lower():
            assert parameter not in found, parameter


def test_inference_leaves_the_model_as_it_was() -> None:
    model, batch = small("bert")
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state = torch.get_rng_state()
    infer(model, batch, 2)
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())


class GeLUFunction(torch.autograd.Function):
    """As Bloom's, which no program has called before."""

    __module__ = "transformers.models.bloom.modeling_bloom"

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * x.sigmoid()


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 32), nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gated: torch.Tensor = GeLUFunction.apply(self.up(x))
        return self.down(gated)


def test_inference_knows_functions_of_libraries_before_they_are_called() -> None:
    (group,) = infer(Gated(), torch.randn(4, 8), 2)
    assert group == {"up.weight": 0, "up.bias": 0, "down.weight": 1}


def saved_by_hugging_face(rank: int, world: int, folder: str) -> None:
    import transformers as hf

    for i, (plan, whole) in enumerate(
        [({"data": world}, True), ({"data": world, "zero": 3}, False), ({"tensor": world}, False)]
    ):
        torch.manual_seed(0)
        net, batch = small("llama")
        rows = {name: x.repeat(4, 1) for name, x in batch.items()}
        engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
        engine.train_step(rows)
        wanted = engine.full_state_dict()
        path = f"{folder}/{i}"
        if rank == 0 and whole:
            net.save_pretrained(path)
        elif rank == 0:  # it asks alone: nothing may be gathered, and nothing written
            with pytest.raises(ValueError, match=r"engine\.export.*full_state_dict"):
                net.save_pretrained(path)
            assert not list(Path(path).glob("*.safetensors"))
            net.save_pretrained(path, state_dict=dict(wanted))
        if rank == 0:
            again = hf.LlamaForCausalLM.from_pretrained(path).state_dict()
            assert sorted(again) == sorted(wanted)
            assert all(torch.equal(x, wanted[name]) for name, x in again.items())


@pytest.mark.world(2)
def test_save_pretrained_writes_right_or_nothing(ranks: Any, tmp_path: Path) -> None:
    ranks(2, saved_by_hugging_face, str(tmp_path))
