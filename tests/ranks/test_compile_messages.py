"""Messages of compiled regions: put together, begun early, in one order on all ranks."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import espalier
from espalier import Partial, Replicate, Shard
from espalier.tensor.bucketing import Bucketing
from espalier.torch_private import inductor

# what compiles imports when it first does
PRELOAD = ["torch._dynamo.backends.common", "torch._inductor.pattern_matcher"]


def _bucketed(rank: int, world: int, backend: str, dtype: torch.dtype) -> None:
    mesh = espalier.Mesh.from_env({"tensor": world})
    torch.manual_seed(0)
    rows = torch.randn(12, 5).to(dtype)
    whole = [torch.randn(5, 3 + i).to(dtype) for i in range(8)]

    def sums(x: Any, held: list[Any]) -> list[torch.Tensor]:
        return [(x @ w).square().mean(1) for w in held]

    def gathers(x: Any, held: list[Any]) -> list[torch.Tensor]:
        return [w.redistribute(placements=[Replicate()]).cos() for w in held]

    def scatters(x: Any, held: list[Any]) -> list[torch.Tensor]:
        return [(x.t() @ (x * w.sum())).redistribute(placements=[Shard(0)]) for w in held]

    def run(call: Any, cut: int | None) -> tuple[list[torch.Tensor], dict[Any, tuple[int, int]]]:
        x = espalier.distribute_tensor(rows, mesh, [Shard(0)])
        lay = Replicate() if cut is None else Shard(cut)
        held = [espalier.distribute_tensor(w, mesh, [lay]).requires_grad_() for w in whole]
        with espalier.ledger(mesh) as book:
            outs = call(x, held)
            torch.autograd.backward(outs, [torch.ones_like(y) for y in outs])
        values = [t.detach().full_tensor() for t in (*outs, *(w.grad for w in held))]
        return values, {op: said for (_, op), said in book.by_op().items()}

    for region, cut, ops in [
        (sums, None, {"all_reduce"}),
        (gathers, 1, {"all_gather"}),
        (scatters, None, {"reduce_scatter", "all_gather", "all_reduce"}),
    ]:
        if (backend, dtype) != ("aot_eager", torch.float64) and region is not scatters:
            continue  # slow; of these it has all three
        expected, plain = run(region, cut)
        assert plain.keys() == ops and {calls for calls, _ in plain.values()} == {8}
        small = 3 * max(w.nbytes for w in whole) / 1e6  # room for three of the largest
        for limit in (25.0, small, 0.0) if backend == "aot_eager" and region is sums else (25.0,):
            compiled = espalier.compile(region, backend=backend, bucket_megabytes=limit)
            run(compiled, cut)  # the first call runs as it is, and is recorded
            found, book = run(compiled, cut)
            # inductor itself adds in another order
            same = torch.equal if backend == "aot_eager" else torch.allclose
            assert all(map(same, found, expected)), (region.__name__, limit)
            calls = {"all_reduce": 2} if limit == small else dict.fromkeys(ops, 1 if limit else 8)
            assert {op: n for op, (n, _) in book.items()} == calls
            for op, (_, sent) in book.items():  # of sums that travel alone each is padded
                assert 0 <= plain[op][1] - sent < 8 * 2 * world**2 * dtype.itemsize * (op == "all_reduce") + 1


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(
    ("world", "backend", "dtype"),
    [(3, "aot_eager", torch.float64), (2, "aot_eager", torch.bfloat16), (2, "inductor", torch.float64)],
)
def test_eight_collectives_are_one(ranks: Any, world: int, backend: str, dtype: torch.dtype) -> None:
    """To the bit; of uneven pieces too."""
    ranks(world, _bucketed, backend, dtype, timeout=400)


def _early(rank: int, world: int) -> None:
    mesh = espalier.Mesh.from_env({"tensor": world})
    rewrite, programs = Bucketing(25e6), []

    def seen(graph: Any) -> None:
        rewrite(graph)
        calls = [node for node in graph.nodes if node.op == "call_function"]
        programs.append([str(n.args[1] if "with_effects" in str(n.target) else n.target) for n in calls])

    def sums(x: Any, w: Any) -> Any:
        # one rank's addend is the value, the other's zero, which hangs on nothing: their graphs differ
        total = x.sum(0).redistribute(placements=[Replicate()])
        again = total.redistribute(placements=[Partial()]).redistribute(placements=[Replicate()])
        for _ in range(4):
            w = (w @ w).tanh()
        return w + again * 2

    region = espalier.compile(sums, backend=inductor(None, None, seen))
    x = espalier.distribute_tensor(torch.arange(12.0).view(4, 3), mesh, [Shard(0)])
    w = espalier.distribute_tensor(torch.eye(3), mesh, [Replicate()]).requires_grad_()
    expected = sums(x, w).full_tensor()
    for _ in range(2):
        with espalier.ledger(mesh) as book:
            assert torch.equal(region(x, w).full_tensor(), expected)
        assert book.by_op()["tensor", "all_reduce"][0] == 2
    words = programs[0]  # forward
    products = [i for i, word in enumerate(words) if "mm" in word]
    begun, ended = ([i for i, w in enumerate(words) if name in w] for name in ("begin_bucket", "end_bucket"))
    assert len(products) == 4 and len(begun) == len(ended) == 2, words
    assert begun[0] < ended[0] < begun[1] < ended[1]
    # one of the two is under way while all products are made
    assert any(b < products[0] and products[-1] < e for b, e in zip(begun, ended, strict=True)), words


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_messages_begin_early_and_in_one_order(ranks: Any) -> None:
    ranks(2, _early, timeout=400)
