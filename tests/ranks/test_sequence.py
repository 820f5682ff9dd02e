"""Megatron's sequence parallelism against one process, in float64; what it keeps, and what it sends."""

from __future__ import annotations

import copy
import time
from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.models import build
from espalier.tensor.live_memory import LiveMemory
from tests.ranks.test_engine import TOLERANCE, apart, one_step_ledger, same_over_cut_sequences, sees_cut
from tests.zoo.train import compared

OPTIONS = {"lr": 1e-2, "weight_decay": 0.1}
ASYNCHRONOUS = {"async_tensor_parallel": True}


def same_training(rank: int, world: int, kind: str, plans: list[dict[str, Any]]) -> None:
    def parts(block: nn.Module) -> list[Any]:
        return [block, block.attention, block.mlp_norm, block.mlp, block.dropout]

    for plan in plans:
        same_over_cut_sequences(kind, {"sequence_parallel": True, **plan}, "tensor", parts)


@pytest.mark.world(4)
@pytest.mark.parametrize(
    ("kind", "plans"),
    [
        (
            "gpt",
            [
                {"tensor": 4},
                {"data": 2, "tensor": 2, "zero": 3, "recompute": "full"},
                {"context": 2, "tensor": 2},
                {"tensor": 4, **ASYNCHRONOUS},
                {"data": 2, "tensor": 2, "zero": 3, "recompute": "full", **ASYNCHRONOUS},
            ],
        ),
        (
            "gpt2",
            [
                *({"data": 2, "tensor": 2, "zero": zero} for zero in (0, 1, 2)),
                {"data": 2, "tensor": 2, "zero": 1, "recompute": "selective", **ASYNCHRONOUS},
            ],
        ),
    ],
)
def test_training_equals_one_process(ranks: Any, kind: str, plans: list[dict[str, Any]]) -> None:
    ranks(4, same_training, kind, plans)


@pytest.mark.world(4)
@pytest.mark.parametrize(("kind", "sequence"), [("gpt", True), ("gpt2", "auto"), ("gpt", "asynchronous")])
def test_the_ledger_equals_that_of_a_dry_run(ranks: Any, kind: str, sequence: Any) -> None:
    plan = {"data": 2, "tensor": 2, "sequence_parallel": sequence}
    if sequence == "asynchronous":
        plan |= {"sequence_parallel": True, **ASYNCHRONOUS}
    for real, dry in ranks(4, one_step_ledger, kind, plan, 5):
        assert real == dry
        sent = {(entry.op, entry.axis) for entry in real}
        assert (("pass_on" if sequence == "asynchronous" else "reduce_scatter"), "tensor") in sent


# ten positions on four ranks; two heads of keys and values, too, for Llama
@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["gpt2", "llama", "bert", "vit"])
def test_transformers_models_equal_one_process(ranks: Any, name: str) -> None:
    plan = {"data": 2, "tensor": 2, "zero": 3} if name == "vit" else {"tensor": 4}
    plan = {**plan, "sequence_parallel": True}
    for wrong, gathered in ranks(4, compared, f"named/{name}", plan, timeout=300):
        assert not wrong and not gathered


class Tower(nn.Module):
    """torch's own encoder, whose attention multiplies by the weights of a module that it never calls."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(40, 16), nn.Linear(16, 40)
        layer = nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return F.cross_entropy(self.head(self.encoder(self.embed(x))).flatten(0, 1), y.flatten())


def torch_encoder(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = Tower().double()
    plain = copy.deepcopy(net)
    table = {"embed": "vocab", "*.self_attn": "column", "*.linear1": "column", "head": "column"}
    table |= {"*.out_proj": "row", "*.linear2": "row"}
    plan = {"data": 2, "tensor": 2, "sequence_parallel": True}
    engine = espalier.initialize(net, None, plan, layouts=table)
    for layer in net.encoder.layers:
        layer.register_forward_hook(sees_cut("tensor"))
    x, y = torch.randint(0, 40, (2, 4, 9)).unbind()
    loss, expected = engine({"x": x, "y": y}), plain(x, y)
    engine.backward(loss)
    expected.backward()
    engine.finish_gradients()
    assert abs(loss.item() - expected.item()) < TOLERANCE
    assert apart(net, plain, gradients=True) < TOLERANCE


@pytest.mark.world(4)
def test_torchs_encoder_equals_one_process(ranks: Any) -> None:
    ranks(4, torch_encoder)


class Both(nn.Module):
    """A norm, shared by its blocks, that meets shards of a sequence, and a vector that is whole."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.up, self.down = norm, nn.Linear(16, 32), nn.Linear(32, 16)
        self.more = nn.Parameter(torch.randn(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x)))) + self.norm(self.more)


class Blocks(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head, norm = nn.Embedding(40, 16), nn.Linear(16, 40), nn.LayerNorm(16)
        self.blocks = nn.ModuleList(Both(norm) for _ in range(3))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), y.flatten())


def deferred(rank: int, world: int, plans: list[dict[str, Any]]) -> list[list[Any]]:
    table = {"embed": "vocab", "*.up": "column", "*.down": "row", "head": "column"}
    found = []
    for plan in plans:
        torch.manual_seed(0)
        net = Blocks().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), **OPTIONS) for m in (net, plain))
        plan = {"data": 2, "tensor": 2, "accumulate": 2, "sequence_parallel": True, **plan}
        engine = espalier.initialize(net, ours, plan, layouts=table, max_grad_norm=0.1)
        for _ in range(2):
            x, y = torch.randint(0, 40, (2, 8, 9)).unbind()
            loss = engine.train_step({"x": x, "y": y})
            theirs.zero_grad()
            expected = plain(x, y)
            expected.backward()
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            theirs.step()
            assert abs(loss.item() - expected.item()) < TOLERANCE
            assert abs(float(engine.grad_norm) - norm.item()) < TOLERANCE
        assert apart(net, plain, gradients=False) < TOLERANCE
        x, y = torch.randint(0, 40, (2, 8, 9)).unbind()
        for i in (0, 4):
            engine.backward(engine({"x": x[i : i + 4], "y": y[i : i + 4]}))
        engine.finish_gradients()
        theirs.zero_grad()
        plain(x, y).backward()
        assert apart(net, plain, gradients=True) < TOLERANCE
        found.append([e.op for e in engine.ledger().entries if e.axis == "tensor" and e.bytes <= 1024])
    return found


@pytest.mark.world(4)
def test_the_gradients_of_norms_are_summed_in_one_message_a_step(ranks: Any) -> None:
    plans = [{"zero": zero} for zero in range(4)] + [{"data": 1, "tensor": 4}]
    for found in ranks(4, deferred, plans):
        # of each micro-batch the loss sends two, and the three vectors that are no norm's one each
        assert [ops.count("all_reduce") for ops in found] == [2 * 5 + 1] * len(plans), found


B, S, H, A = 2, 64, 32, 4


def settled(live: LiveMemory) -> int:
    """The bytes that live once gloo's threads have let go of what they sent, which is a little later."""
    seen = [live.now]
    while len(seen) < 20 or seen[-1] != seen[-20]:
        time.sleep(0.01)
        seen.append(live.now)
    return seen[-1]


def of_one_layer(
    plan: dict[str, Any], dry: bool, dropout: float = 0.1
) -> tuple[int, Counter[Any], Counter[Any]]:
    """What a layer keeps for the backward pass; what it sends forward and backward, (op, bytes) counted."""

    def of(layers: int) -> tuple[int, Counter[Any], Counter[Any]]:
        sizes = {"vocab_size": 16, "hidden": H, "heads": A, "max_positions": S, "dropout": dropout}
        with torch.device("meta" if dry else "cpu"):
            net = build("gpt2", {**sizes, "layers": layers})
            ids = torch.zeros(B, S, dtype=torch.int64)
        made = espalier.Plan(**plan, precision="bfloat16")
        mesh = espalier.Mesh.dry(made.axes) if dry else espalier.Mesh.from_env(made.axes)
        engine = espalier.initialize(net, torch.optim.SGD(net.parameters()), made, mesh=mesh)
        engine.train_step({"input_ids": ids, "labels": ids})
        live = engine.watch().live
        with live, espalier.ledger(mesh) as forward:
            before = settled(live)
            loss = engine({"input_ids": ids, "labels": ids})
            kept = settled(live) - before
        with engine.no_sync(), espalier.ledger(mesh) as backward:
            engine.backward(loss)
        return kept, *(Counter((e.op, e.bytes) for e in book.entries) for book in (forward, backward))

    more, less = of(3), of(2)
    return more[0] - less[0], more[1] - less[1], more[2] - less[2]


def formula(t: int, statistic: int) -> int:
    """Bytes that a layer keeps (2205.05198), with two statistics a row and norm, and the causal mask."""
    return (34 * S * B * H + 5 * A * S * S * B + 4 * statistic * S * B) // t + S * S


@pytest.mark.parametrize("t", [1, 2, 4])
def test_a_layer_keeps_its_share_and_sends_what_1d_sends(t: int) -> None:
    kept, forward, backward = of_one_layer({"tensor": t, "sequence_parallel": True}, dry=True)
    assert kept == formula(t, 4)
    if t == 1:
        assert not forward and not backward
        return
    # bfloat16, by ring algorithms
    piece = (t - 1) * 2 * B * S * H // t
    _, forward_1d, backward_1d = of_one_layer({"tensor": t}, dry=True)
    assert forward_1d == backward_1d == {("all_reduce", 2 * piece): 2}
    assert forward == {("all_gather", piece): 2, ("reduce_scatter", piece): 2}
    # the gathering of what the column layers were given; the norms' parameters are summed after it
    assert backward == forward + Counter({("all_gather", piece): 2})
    # by the ring the same, piece by piece
    apart = of_one_layer({"tensor": t, "sequence_parallel": True, **ASYNCHRONOUS}, dry=True)
    passed = Counter({("pass_on", piece // (t - 1)): 4 * (t - 1)})
    assert apart == (kept, passed, passed + Counter({("all_gather", piece): 2}))


def real_layer(rank: int, world: int) -> list[int]:
    plan = {"tensor": world, "sequence_parallel": True}
    return [of_one_layer(plan, dry=False, dropout=rate)[0] for rate in (0.1, 0.0)]


@pytest.mark.world(2)
def test_a_layer_keeps_its_share_on_real_ranks(ranks: Any) -> None:
    # torch's CPU norm keeps its statistics in bfloat16
    found = ranks(2, real_layer)
    # without dropout: no masks and no scores, but their logsumexp
    fused = formula(2, 2) - (2 * S * B * H + 5 * A * S * S * B) // 2 - S * S + 4 * A * S * B // 2
    assert found == [[formula(2, 2), fused]] * 2
    # on a dry mesh the norm's are in float32
    kept = of_one_layer({"tensor": 2, "sequence_parallel": True}, dry=True, dropout=0.0)[0]
    assert kept == fused + formula(2, 4) - formula(2, 2)
