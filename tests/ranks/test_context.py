"""The context axis against one process, in float64: attention over a cut sequence, and training."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import espalier
from espalier import DTensor, Mesh, Replicate, Shard
from espalier.comm.row_exchange import spans_of
from espalier.tensor.rules.ring import job, sends
from tests.ranks.test_engine import (
    batch,
    model,
    same_over_cut_sequences,
)
from tests.zoo.train import compared

# queries, keys, and what else there is
CALLS: list[tuple[int, int, dict[str, Any]]] = [
    (16, 16, {"is_causal": True}),
    (13, 13, {"is_causal": True}),
    (3, 3, {"is_causal": True}),
    (13, 7, {"is_causal": True}),
    (7, 13, {"is_causal": True}),
    (13, 13, {}),
    (13, 6, {"scale": 0.7}),
    (13, 13, {"attn_mask": "window"}),
    (13, 13, {"attn_mask": "padding"}),
    (13, 13, {"attn_mask": "added"}),
    (13, 13, {"kv_heads": 2, "is_causal": True}),
    (13, 13, {"kv_heads": 1}),
    (13, 13, {"kv_heads": 1, "is_causal": True}),
    (13, 13, {"dropout_p": 0.3, "is_causal": True}),
    (13, 13, {"dropout_p": 0.3, "attn_mask": "added", "kv_heads": 2}),
]


OPS = {"ring": "pass_on", "ulysses": "all_to_all", "gather": "all_gather"}


def mask_of(kind: str, s: int, t: int) -> torch.Tensor:
    if kind == "padding":
        return (torch.rand(2, 1, 1, t) < 0.7).index_fill_(0, torch.tensor([1]), False)  # a row sees nothing
    far = torch.arange(s).unsqueeze(1) - torch.arange(t)
    return (far >= 0) & (far < 4) if kind == "window" else torch.randn(1, 4, s, t, dtype=torch.float64)


def attended(inputs: list[torch.Tensor], mask: torch.Tensor | None, given: dict[str, Any]) -> torch.Tensor:
    torch.manual_seed(5)
    grouped = inputs[1].shape[1] not in (1, inputs[0].shape[1])  # a single head is broadcast
    return F.scaled_dot_product_attention(*inputs, attn_mask=mask, enable_gqa=grouped, **given)


def same_attention(mesh: Mesh, s: int, t: int, given: dict[str, Any], places: list[Any]) -> None:
    torch.manual_seed(0)
    given = dict(given)
    g, kind = given.pop("kv_heads", 4), given.pop("attn_mask", None)
    values = [torch.randn(2, h, n, 8, dtype=torch.float64) for h, n in ((4, s), (g, t), (g, t))]
    weights = torch.randn(2, 4, s, 8, dtype=torch.float64)
    mask = None if kind is None else mask_of(kind, s, t)
    values += [mask] if kind == "added" else []
    leaves = [x.clone().requires_grad_() for x in values]
    single = Mesh.single()
    alone = [DTensor.from_local(x, single, [Replicate()]) for x in leaves]
    right = espalier.full_tensor(attended(alone[:3], alone[3] if kind == "added" else mask, given))
    (right * weights).sum().backward()

    laid = [espalier.distribute_tensor(x, mesh, places).requires_grad_() for x in values]
    if kind == "added":
        mask = laid[3]
    with espalier.ledger(mesh) as book:
        out = attended(laid[:3], mask, given)
    assert list(out.placements) == places
    word = mesh.words.get("context")
    if word is not None:
        ops = {entry.op for entry in book.entries if entry.axis == "context" and entry.bytes}
        # a mask's rows are needed whole where heads are cut
        assert ops <= {OPS[word], *(["all_gather"] if mask is not None else [])}, (word, ops)
        if kind != "added":  # of one row, which is laid out like all else here
            assert "data" not in {entry.axis for entry in book.entries}
    (out * espalier.distribute_tensor(weights, mesh, places)).sum().backward()
    torch.testing.assert_close(out.full_tensor(), right, rtol=0, atol=1e-12)
    for x, leaf in zip(laid, leaves, strict=True):
        torch.testing.assert_close(x.grad.full_tensor(), leaf.grad, rtol=0, atol=1e-12)


def all_calls(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"context": world})
    for word in ("ring", "ulysses", "gather") if world != 3 else ("ring",):
        told = mesh.telling(context=word)
        for s, t, given in CALLS:
            same_attention(told, s, t, given, [Shard(2)])
        turned = [espalier.rand(1, 4, 2, 8, device_mesh=told, placements=[Shard(3)]).mT for _ in "qkv"]
        laid = [x.detach().requires_grad_() for x in turned]
        assert laid[0].to_local().stride(-1) != 1
        leaves = [x.full_tensor().detach().requires_grad_() for x in laid]
        for inputs in (laid, leaves):
            F.scaled_dot_product_attention(*inputs).mT.cos().sum().backward()
        for x, leaf in zip(laid, leaves, strict=True):
            torch.testing.assert_close(x.grad.full_tensor(), leaf.grad)
    few = [espalier.rand(1, 2, 8, 4, device_mesh=mesh.telling(context="ulysses"), placements=[Shard(2)])] * 3
    if world > 2:
        with pytest.raises(ValueError, match=f"2 heads cannot be cut among {world} ranks.*at most 2 ranks"):
            F.scaled_dot_product_attention(*few)


def calls_on_two_axes(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"one": 2, "two": 2})
    for words in ({}, {"one": "ring", "two": "ring"}, {"one": "ulysses"}, {"one": "gather"}):
        for s, t, given in CALLS:
            if given.get("kv_heads", 4) > 1:
                same_attention(mesh.telling(**words), s, t, given, [Shard(2), Shard(2)])
            if given.get("kv_heads", 4) == 4:
                same_attention(mesh.telling(**words), s, t, given, [Shard(2), Shard(1)])


def calls_beside_others(rank: int, world: int, axes: dict[str, int]) -> None:
    """The sequence is cut along ``context``, rows along ``data``, heads along ``tensor``."""
    mesh, dims = Mesh.from_env(axes), {"data": 0, "context": 2, "tensor": 1}
    places = [Shard(dims[name]) for name in axes]
    for word in ("ring", "ulysses", "gather"):
        for s, t, given in CALLS:
            same_attention(mesh.telling(context=word), s, t, given, places)


@pytest.mark.world(4)
@pytest.mark.parametrize("other", ["data", "tensor"])
def test_attention_is_of_the_kind_asked_for_on_two_axes(ranks: Any, other: str) -> None:
    ranks(4, calls_beside_others, {"context": 2, other: 2})
    ranks(4, calls_beside_others, {other: 2, "context": 2})


@pytest.mark.world(8)
def test_attention_is_of_the_kind_asked_for_on_three_axes(ranks: Any) -> None:
    ranks(8, calls_beside_others, {"data": 2, "context": 2, "tensor": 2}, timeout=300)


@pytest.mark.parametrize("world", [2, 3, 4])
def test_attention_over_a_cut_sequence(ranks: Any, world: int) -> None:
    ranks(world, all_calls)
    if world == 4:
        ranks(4, calls_on_two_axes)


def second_order(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"context": world})
    seen = torch.tensor([[[[True, False, True, True, True], [False] * 5]]]).repeat(1, 1, 3, 1)[:, :, :5]
    for given in ({}, {"is_causal": True}, {"attn_mask": seen}):
        torch.manual_seed(0)
        values = [torch.randn(1, 2, 5, 4, dtype=torch.float64) for _ in range(3)]
        found = []
        for lay in (lambda x: x.clone(), lambda x: espalier.distribute_tensor(x, mesh, [Shard(2)])):
            leaves = [lay(x).requires_grad_() for x in values]
            with sdpa_kernel(SDPBackend.MATH):  # of the kernels none has a second derivative
                out = F.scaled_dot_product_attention(*leaves, **given)
            grads = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
            sum(g.square().sum() for g in grads).backward()
            found.append([espalier.full_tensor(x.grad) for x in leaves])
        for a, b in zip(*found, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=1e-11)


def low_precision(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"context": world})
    torch.manual_seed(0)
    values = [torch.randn(1, 2, 64, 8) for _ in range(3)]
    exact = [x.double().requires_grad_() for x in values]
    right = F.scaled_dot_product_attention(*exact, is_causal=True)
    right.sum().backward()
    for dtype, bound in ((torch.float32, 1e-5), (torch.bfloat16, 0.05)):
        laid = [espalier.distribute_tensor(x.to(dtype), mesh, [Shard(2)]).requires_grad_() for x in values]
        out = F.scaled_dot_product_attention(*laid, is_causal=True)
        out.sum().backward()
        assert out.dtype == laid[0].grad.dtype == dtype
        pairs = [(out, right), *((x.grad, y.grad) for x, y in zip(laid, exact, strict=True))]
        assert max((a.full_tensor() - b).abs().max() / b.abs().max() for a, b in pairs) < bound


def bytes_sent(rank: int, world: int) -> None:
    mesh, s, width = Mesh.from_env({"context": world}), 24, 2 * 4 * 8
    laid = [
        espalier.rand(1, 2, s, 4, device_mesh=mesh, placements=[Shard(2)]).requires_grad_() for _ in "qkv"
    ]
    with espalier.ledger(mesh) as book:
        F.scaled_dot_product_attention(*laid).sum().backward()
    block = s // world * width // 2
    # two blocks forward, four backward, to each of the other ranks
    assert sum(e.bytes for e in book.entries if e.op == "pass_on") == 6 * (world - 1) * block
    assert {e.op for e in book.entries} == {"pass_on"}
    with espalier.ledger(mesh) as book:
        F.scaled_dot_product_attention(*laid, is_causal=True).sum().backward()
    assert {e.op for e in book.entries} == {"pass_on"}
    sent = torch.tensor(float(sum(e.bytes for e in book.entries)))
    torch.distributed.all_reduce(sent)
    # in three ranks there is one round, and in it one rank helps: rows of two heads, lse both ways
    rows, elements = s // world, 2 * block / 4
    assert sent.item() == 4 * (world * sends(world, elements, elements) + 2 * 2 * rows)


def test_orders_precisions_and_bytes(ranks: Any) -> None:
    for check in (second_order, low_precision, bytes_sent):
        ranks(3, check)


def test_causal_work_is_balanced() -> None:
    for n, s in ((4, 1024), (7, 1000), (8, 4096)):
        mesh = Mesh.dry({"context": n})
        have = spans_of(espalier.Layout(mesh, [Shard(0)], [s]), 0)
        sizes = [end - start for ((start, end),) in have]
        work, met = [size * (size + 1) // 2 for size in sizes], Counter()
        for rank in range(n):
            for step in range(1, n // 2 + 1):
                of = job(sizes, rank, step)
                assert of.early < of.late and rank in of[:2]
                work[rank] += (of.rows[1] - of.rows[0]) * sizes[of.early]
                met.update((of.late, row, of.early) for row in range(*of.rows))
        assert sum(work) == s * (s + 1) // 2
        assert max(work) / min(work) < 1.03, (n, s, work)
        assert set(met.values()) == {1}
        assert len(met) == sum(size * i for i, size in enumerate(sizes))


def same_training(rank: int, world: int, kind: str, plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        same_over_cut_sequences(kind, plan, "context", lambda block: [block])


PLANS = [
    {"context": 4, "zero": 1},
    {"context": 2, "data": 2, "zero": 2, "accumulate": 2, "context_kind": "ring"},
    {"context": 2, "data": 2, "zero": 3, "recompute": "full"},
    {"context": 2, "tensor": 2, "recompute": "selective", "context_kind": "ring"},
]


@pytest.mark.world(4)
def test_training_equals_one_process(ranks: Any) -> None:
    ranks(4, same_training, "gpt", PLANS, timeout=300)
    ranks(4, same_training, "gpt2", [{"context": 2, "tensor": 2, "sequence_parallel": True}])


@pytest.mark.world(4)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit"])
def test_transformers_models_equal_one_process(ranks: Any, name: str) -> None:
    plan = {"context": 4} if name == "llama" else {"context": 2, "data": 2, "zero": 3}
    for wrong, gathered in ranks(4, compared, f"named/{name}", plan, timeout=300):
        assert not wrong and not gathered


def real_and_dry(rank: int, world: int) -> None:
    plan = espalier.Plan(context=world)
    net = model("gpt")
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan)
    data = batch(2)
    for _ in range(2):
        engine.train_step(data)
    with torch.device("meta"):
        net = model("gpt")
    given = {name: x.to("meta") for name, x in data.items()}
    optimizer = torch.optim.AdamW(net.parameters())
    report = espalier.dry_run(net, plan, given, optimizer=optimizer, coordinate=engine.mesh.coordinate)
    assert engine.ledger() == report.ledger


def test_a_dry_run_tells_what_a_real_one_sends(ranks: Any) -> None:
    ranks(3, real_and_dry)
