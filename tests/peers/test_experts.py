"""Mixture-of-experts models of transformers, unchanged, with their experts on different ranks."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.parallel.experts import stacks
from tests.ranks.test_engine import apart

PRELOAD = ["transformers.modeling_utils"]
COMMON = {
    "vocab_size": 37, "hidden_size": 24, "num_attention_heads": 4, "num_key_value_heads": 2,
    "num_hidden_layers": 2, "num_experts_per_tok": 2, "max_position_embeddings": 16,
    "output_router_logits": True, "router_aux_loss_coef": 0.1,
}  # fmt: skip


def model(kind: str) -> nn.Module:
    import transformers as hf

    torch.manual_seed(1)
    if kind == "mixtral":
        made = hf.MixtralForCausalLM(hf.MixtralConfig(num_local_experts=4, intermediate_size=10, **COMMON))
    else:
        config = hf.Qwen2MoeConfig(
            num_experts=4, moe_intermediate_size=10, shared_expert_intermediate_size=12, **COMMON
        )
        made = hf.Qwen2MoeForCausalLM(config)
    made.config._experts_implementation = "eager"  # the other kernels don't know float64
    return made.double()


def batch(seed: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 37, (4, 12), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": ids, "labels": ids}


def train(rank: int, world: int, kind: str, plan: dict[str, Any]) -> list[str]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", espalier.GatherWarning)
        net = model(kind)
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (net, plain))
        engine = espalier.initialize(net, ours, plan)
        for step in range(2):
            data = batch(step)
            loss, expected = engine(data), plain(**data).loss
            # the router's chances and the balance loss are float32 in these models
            assert abs(loss.item() - expected.item()) < 1e-6
            engine.backward(loss)
            expected.backward()
            engine.finish_gradients()
            assert apart(net, plain, gradients=True) < 1e-6
            engine.step()
            theirs.step()
            theirs.zero_grad()
        assert apart(net, plain, gradients=False) < 1e-5
    assert len(stacks(net)) == 2
    return [str(w.message) for w in caught if issubclass(w.category, espalier.GatherWarning)]


@pytest.mark.parametrize("kind", ["mixtral", "qwen"])
@pytest.mark.parametrize(
    "plan", [{"data": 2, "expert": 2, "zero": 3}, {"data": 2, "expert": 2, "tensor": 2}], ids=str
)
def test_training_equals_one_process(ranks: Any, kind: str, plan: dict[str, Any]) -> None:
    world = espalier.Plan.from_dict(plan).world_size
    assert ranks(world, train, kind, plan)[0] == []


def test_dry_runs_divide_the_work_of_experts() -> None:
    def run(data: int, expert: int) -> espalier.DryReport:
        with torch.device("meta"):
            net = model("mixtral").float()
            tokens = {name: x.to("meta") for name, x in batch(0).items()}
        return espalier.dry_run(net, {"data": data, "expert": expert}, tokens)

    one, four = run(1, 1), run(4, 4)
    assert one.flops == 4 * four.flops
    experts = 2 * 4 * 3 * 24 * 10 * 4
    assert one.parameter_bytes - four.parameter_bytes == experts * 3 // 4
