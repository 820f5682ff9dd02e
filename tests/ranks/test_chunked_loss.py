"""A loss that never holds all logits: the same training, and the room that it takes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import espalier
from espalier import Mesh, Replicate, Shard
from tests.ranks.test_engine import batch, model

pytestmark = pytest.mark.skipif(not hasattr(F, "linear_cross_entropy"), reason="from torch 2.13 on")

PLANS: list[tuple[str, dict[str, Any]]] = [
    ("gpt", {"tensor": 2, "sequence_parallel": True}),
    ("gpt2", {"data": 2, "zero": 3, "accumulate": 2}),
    ("gpt", {"context": 2, "context_kind": "ring"}),
    ("gpt2", {"pipe": 2, "accumulate": 2}),
]


def trains(rank: int, world: int) -> None:
    """As the same model does whose loss is of logits, by plain torch on one process."""
    for kind, plan in PLANS:
        net, plain = model(kind, tied=kind == "gpt2", chunked_loss=True), model(kind, tied=kind == "gpt2")
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        engine = espalier.initialize(net, ours, plan)
        for step in range(2):
            data = batch(8, step)
            loss, expected = engine.train_step(data), plain(**data).loss
            assert abs(loss.item() - expected.item()) < 1e-9, plan
            expected.backward()
            theirs.step()
            theirs.zero_grad()
        found = engine.full_state_dict()
        worst = max(float((found[name] - x).abs().max()) for name, x in plain.state_dict().items())
        assert worst < 1e-9, plan


@pytest.mark.world(2)
def test_training_is_the_same(ranks: Callable[..., list[Any]]) -> None:
    ranks(2, trains)


class Largest(TorchDispatchMode):
    """The most elements that any tensor made had."""

    most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in out if isinstance(out, tuple | list) else (out,):
            if isinstance(x, torch.Tensor):
                self.most = max(self.most, x.numel())
        return out


ROWS, FEATURES, CLASSES = 96, 8, 64


def largest(rank: int, world: int) -> tuple[int, int]:
    """Of a loss over a cut vocabulary and its gradients: chunked, and from logits; both are the same."""
    mesh = Mesh.from_env({"tensor": world})
    torch.manual_seed(0)
    x, weight = (
        torch.randn(ROWS, FEATURES, dtype=torch.float64),
        torch.randn(CLASSES, FEATURES, dtype=torch.float64),
    )
    target = torch.randint(0, CLASSES, (ROWS,))
    found = []
    for options in (nn.LinearCrossEntropyOptions(batch_chunk_size=8), None):
        a = espalier.distribute_tensor(x, mesh, [Replicate()]).requires_grad_()
        b = espalier.distribute_tensor(weight, mesh, [Shard(0)]).requires_grad_()
        t = espalier.distribute_tensor(target, mesh, [Replicate()])
        with Largest() as seen:
            loss = F.linear_cross_entropy(a, b, t, options=options)
            loss.backward(retain_graph=True)
            loss.backward()
        found.append((seen.most, loss.item(), a.grad.full_tensor(), b.grad.full_tensor()))
    (most, *ours), (whole, *others) = found
    for one, other in zip(ours, others, strict=True):
        torch.testing.assert_close(one, other)
    return most, whole


@pytest.mark.world(2)
def test_no_tensor_is_as_large_as_the_logits(ranks: Callable[..., list[Any]]) -> None:
    for most, whole in ranks(2, largest):
        assert whole == ROWS * CLASSES // 2
        # the input, the weight's part, and a chunk's logits
        assert most == max(ROWS * FEATURES, CLASSES // 2 * FEATURES, 8 * CLASSES // 2)


def test_16_bits_are_added_up_in_32() -> None:
    """The gradient of a weight over many chunks is as near to the true one as that from whole logits."""
    mesh = Mesh.single(("data",), "cpu")
    torch.manual_seed(0)
    x, weight = torch.randn(4096, 8), torch.randn(16, 8)
    target = torch.randint(0, 16, (4096,))
    grads = []
    for options, dtype in (
        (nn.LinearCrossEntropyOptions(batch_chunk_size=16), torch.bfloat16),
        (None, torch.bfloat16),
        (None, torch.float32),
    ):
        a = espalier.distribute_tensor(x.bfloat16().to(dtype), mesh, [Replicate()])
        b = espalier.distribute_tensor(weight.bfloat16().to(dtype), mesh, [Replicate()]).requires_grad_()
        t = espalier.distribute_tensor(target, mesh, [Replicate()])
        loss = F.linear_cross_entropy(a, b, t, options=options)
        assert loss.dtype == dtype
        loss.backward()
        grads.append(espalier.full_tensor(b.grad).float())
    chunked, whole, true = grads
    assert (chunked - true).abs().max() <= 2 * (whole - true).abs().max()
