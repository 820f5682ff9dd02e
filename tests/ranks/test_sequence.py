"""Megatron's sequence parallelism against one process, in float64; what it keeps, and what it sends."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from tests.peers.zoo import compared
from tests.ranks.test_engine import TOLERANCE, apart, batch, model, same_backward, same_steps

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}


def cut_over_the_sequence(module: nn.Module, given: tuple[Any, ...], out: Any) -> None:
    axis = out._layout.mesh.axis("tensor")
    assert [x._layout.axes[axis] for x in (given[0], out)] == [1, 1], (given[0]._layout, out._layout)


def same_training(rank: int, world: int, kind: str, plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        net = model(kind, tied=kind == "gpt2")
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), **OPTIONS) for m in (net, plain))
        engine = espalier.initialize(net, ours, {"sequence_parallel": True, **plan}, max_grad_norm=0.5)
        for block in net.blocks:
            for layer in (block, block.attention, block.mlp_norm, block.mlp, block.dropout):
                layer.register_forward_hook(cut_over_the_sequence)
        same_steps(engine, plain, theirs, 2)
        # on four ranks 2, 2, 1 and 0 positions; the graph is the same
        short = {name: x[:, :5] for name, x in batch(4, 7).items()}
        same_backward(engine, plain, short)
        engine.finish_gradients()
        assert apart(net, plain, gradients=True) < TOLERANCE


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        ("gpt", [{"tensor": 4}, {"data": 2, "tensor": 2, "zero": 3, "recompute": "full"}]),
        ("gpt2", [{"data": 2, "tensor": 2, "zero": zero} for zero in (0, 1, 2)]),
    ],
)
def test_training_equals_one_process(ranks: Any, kind: str, plans: list[dict[str, Any]]) -> None:
    ranks(4, same_training, kind, plans)


# ten positions on four ranks; two heads of keys and values, too, for Llama
@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_transformers_models_equal_one_process(ranks: Any, name: str) -> None:
    plan = {"data": 2, "tensor": 2, "zero": 3} if name == "vit" else {"tensor": 4}
    for worst, gathered in ranks(4, compared, name, False, {"sequence_parallel": True, **plan}, timeout=300):
        assert max(worst.values()) < TOLERANCE, worst
        assert not gathered
