"""GPT-NeoX of transformers, unchanged: attention and MLP of a layer on different ranks."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

import espalier


def train(rank: int, world: int) -> None:
    import transformers as hf

    torch.manual_seed(1)
    config = hf.GPTNeoXConfig(
        vocab_size=37, hidden_size=24, num_attention_heads=4, num_hidden_layers=2, intermediate_size=40,
        max_position_embeddings=16,
    )  # fmt: skip
    net = hf.GPTNeoXForCausalLM(config).double()
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-3) for m in (net, plain))
    engine = espalier.initialize(net, ours, {"branch": 2})
    for step in range(2):
        ids = torch.randint(0, 37, (4, 12), generator=torch.Generator().manual_seed(step))
        loss = engine.train_step({"input_ids": ids, "labels": ids})
        expected = plain(input_ids=ids, labels=ids).loss
        assert abs(loss.item() - expected.item()) < 1e-7  # its rotary angles are float32
        expected.backward()
        theirs.step()
        theirs.zero_grad()
    for name, x in engine.full_state_dict().items():
        assert (x - plain.state_dict()[name]).abs().max() < 1e-5, name


@pytest.mark.long
def test_attention_and_mlp_of_gpt_neox(ranks: Any) -> None:
    ranks(2, train)
