"""Models that are hard to split: what of their glue is done again, and what is refused."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from espalier.parallel.pipeline.split import SplitError, split
from tests.pure.test_split import equal

X = torch.randn(6, 8, generator=torch.Generator().manual_seed(1)).double()


class Block(nn.Module):
    def __init__(self, n: int = 8) -> None:
        super().__init__()
        self.norm, self.linear = nn.LayerNorm(n), nn.Linear(n, n)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + F.gelu(self.linear(self.norm(x)))


class Blocks(nn.Module):
    """A list of blocks, for models below."""

    def __init__(self, n: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(n))

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
        return x


class Grouped(nn.Module):
    """Rows by groups, each with a matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(2, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.grouped_mm(x, self.weight, offs=torch.tensor([2, 6], dtype=torch.int32))


class Skips(Blocks):
    """A U-Net's connections, across several stages."""

    def forward(self, x: torch.Tensor) -> Any:
        kept = []
        for i, block in enumerate(self.blocks):
            if i >= len(self.blocks) // 2:
                x = torch.cat((x, kept.pop()), -1).view(*x.shape, 2).mean(-1)
            x = block(x)
            if i < len(self.blocks) // 2:
                kept.append(x)
        return x


@dataclass
class Found:
    first: torch.Tensor
    rest: tuple[torch.Tensor, ...]
    kind: str
    nothing: None = None


class Many(Blocks):
    """Several inputs and outputs, of several kinds."""

    def forward(
        self, x: torch.Tensor, pair: Any, *, scale: float, flag: bool = False, none: Any = None
    ) -> Any:
        if flag and none is None:
            x = x * scale + pair[0] * pair[1]["b"]
        every = []
        for block in self.blocks:
            x = block(x)
            every.append(x)
        return Found(x, tuple(every[:2]), "kind")


class InPlace(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        mask = torch.zeros_like(x)
        mask[:, ::2] = 1.0
        sums = torch.zeros(len(self.blocks), *x.shape, dtype=x.dtype)
        for i, block in enumerate(self.blocks):
            x = block(x)
            sums[i] = x
            x *= 0.5
            x[:, :2] += mask[:, :2]
            mask[:, i] = 3.0
        return x * mask, sums


class Glue(Blocks):
    """A parameter of the divided module itself, modes of torch, randomness."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(8))
        self.register_buffer("shift", torch.arange(8.0))
        self.frozen = nn.Linear(8, 8).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> Any:
        x = F.dropout(x, 0.2, self.training)
        for block in self.blocks:
            with torch.no_grad():
                norm = x.norm(dim=-1, keepdim=True)
            with torch.autocast("cpu", torch.bfloat16):
                low = F.linear(x.float(), torch.eye(8))
            x = self.frozen(block(x) / norm) * self.scale + self.shift + low.to(x.dtype)
            x = F.dropout(x, 0.1, self.training) + torch.rand_like(x)
        return x


class Shared(nn.Module):
    """One block, applied again and again (ALBERT)."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = Block(), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> Any:
        for _ in range(4):
            x = self.layer(x)
        return self.head(x)


class Sums(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return grad * 2


class Routed(Block):
    """A block that reads its activations, and uses a function of its own."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = (x.mean(-1) > 0).nonzero().flatten().tolist()
        y = torch.zeros_like(x)
        for i in rows:
            y[i] = self.linear(x[i])
        return Sums.apply(self.norm(x) + y)


class Routes(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Routed() for _ in range(4))


class LayerDrop(Blocks):
    layerdrop = 0.0

    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            if self.training and torch.rand([]) < self.layerdrop:
                continue
            x = block(x)
        return x


class Lengths(Blocks):
    """Its control flow depends on the batch."""

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> Any:
        n = int(mask.sum(-1).max())
        x = x[:, :n] if mask.all() else F.pad(x[:, : n - 1], (0, 9 - n))
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("kind", [Blocks, Skips, InPlace, Glue, Shared, Routes, LayerDrop])
def test_odd(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    for number in (2, 3, 4):
        for training in (True, False):
            model = kind().double().train(training)
            equal(model, X, split(model, number, X), exact=kind not in (Skips, Glue, Shared))


def test_of_several_inputs_and_outputs() -> None:
    batch = {"x": X, "pair": (X.clone(), {"b": X + 1}), "scale": 0.5, "flag": True, "none": None}
    model = Many().double()
    found = split(model, 4, batch)
    equal(model, batch, found)
    equal(model, {**batch, "scale": 2.0}, found)
    equal(model, {**batch, "flag": False}, found)


def test_control_flow_may_depend_on_the_batch() -> None:
    model = Lengths().double()
    mask = torch.ones(6, 8, dtype=torch.bool)
    short = mask.clone()
    short[:, 5:] = False
    found = split(model, 4, (X, mask))
    for other in (mask, short, mask):
        equal(model, (X, other), found)
    assert found.at((X, mask)) is found.at((X, mask.clone())) is not found.at((X, short))


def test_repeated_modules_and_who_uses_which_parameter() -> None:
    model = Shared().double()
    found = split(model, 3, X, ["layer@2", "layer@4"])
    equal(model, X, found, exact=False)
    assert found.users["layer.linear.weight"] == (0, 1, 2)
    assert found.users["head.weight"] == (2,)


class Reads(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            x = block(x)
            if x.mean() > 0:
                x = -x
        return x


class Called(Reads):
    """With a call of its own, as gpytorch's modules have."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.forward(*args, **kwargs)


class Counts(Blocks):
    steps = 0

    def forward(self, x: torch.Tensor) -> Any:
        self.steps += 1
        return super().forward(x)


class Buffers(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> Any:
        x = super().forward(x)
        self.mean.lerp_(x.detach().mean(0), 0.1)
        return x


class Stashes(Blocks):
    """Hands a tensor to a block by the back door."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks[2].forward = self.late  # type: ignore[method-assign]

    def late(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.kept[0]

    def forward(self, x: torch.Tensor) -> Any:
        self.kept = [x * 2]
        return super().forward(x)


class Cache:
    def __init__(self) -> None:
        self.seen: list[torch.Tensor] = []


class Caches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Cached() for _ in range(4))

    def forward(self, x: torch.Tensor) -> Any:
        cache = Cache()
        for block in self.blocks:
            x = block(x, cache)
        return x


class Cached(Block):
    def forward(self, x: torch.Tensor, cache: Cache) -> torch.Tensor:  # type: ignore[override]
        cache.seen.append(x)
        return super().forward(torch.stack(cache.seen).sum(0))


class Drops(Blocks):
    def forward(self, x: torch.Tensor) -> Any:
        for block in self.blocks:
            if random.random() < 0.9:
                x = block(x)
        return x


class Deep(nn.Module):
    """As deep as it is told to be; counts in a buffer that it gives."""

    def __init__(self, counts: bool = False) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.BatchNorm1d(8) if counts else nn.Identity()

    def forward(self, x: torch.Tensor, depth: int) -> Any:
        x = self.norm(x)
        for block in self.blocks[:depth]:
            x = block(x).tanh()
        return (x, self.norm.running_mean) if isinstance(self.norm, nn.BatchNorm1d) else x


def test_a_forward_that_leaves_out_where_a_stage_begins() -> None:
    """Stages have the weights that they had, and the last one of a shallow pass none."""
    model, x = Deep(), torch.randn(4, 8)
    division = split(model, 2, (x, 3), cuts=("blocks.1",))
    for depth in (2, 1):
        equal(model, (x, depth), other := division.at((x, depth)))
        assert [len(stage.parameters()) for stage in other.stages] == [2, 2 * (depth - 1)]


def test_what_is_given_as_it_is_belongs_to_the_last_stage() -> None:
    with pytest.raises(SplitError, match="buffer 'norm.running_mean' is written to in stage 0 and used in"):
        split(Deep(counts=True), 2, (torch.ones(4, 8), 3), cuts=("blocks.1",))


@pytest.mark.parametrize(
    ("kind", "said"),
    [
        (Reads, "the forward of 'the model'.*depends on the values of activations or parameters.*__bool__"),
        (Called, "the forward of 'the model'.*depends on the values of activations or parameters.*__bool__"),
        (Counts, r"the model' \(Counts\), which is divided among stages, sets 'steps'"),
        (Buffers, "lerp_ in the forward of 'the model'.*writes to the buffer 'mean'"),
        (Stashes, "sets 'kept'|'blocks.2' uses a tensor of the shape .6, 8. that was made outside"),
        (Caches, "'blocks.0' is given a Cache that holds tensors"),
        (Drops, "draws random numbers from Python"),
    ],
)
def test_what_stages_would_lose_is_refused(kind: type[nn.Module], said: str) -> None:
    model = kind().double()
    before = {name: dict(vars(m)) for name, m in model.named_modules()}
    with pytest.raises(SplitError, match=said):
        split(model, 2, X)
    assert {name: dict(vars(m)) for name, m in model.named_modules()} == before


def test_the_same_within_one_stage_is_not() -> None:
    torch.manual_seed(0)
    for kind in (Reads, Counts, Buffers, Stashes, Caches):
        model = nn.Sequential(Block(), kind(), Block()).double()
        equal(model, X, split(model, 3, X, ["1", "2"]))


def test_hooks() -> None:
    model, seen = Blocks().double(), []
    model.blocks[2].register_forward_hook(lambda module, args, out: seen.append(1) or out * 2)
    found = split(model, 2, X)
    equal(model, X, found)
    assert len(seen) == 2  # the model, a stage; not the trace
    model.register_forward_hook(lambda *given: None)
    with pytest.raises(SplitError, match="has hooks, and is divided"):
        split(model, 2, X)


def test_nothing_is_changed_by_a_trace() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    before = {k: v.clone() for k, v in model.state_dict().items()}
    state, held = torch.get_rng_state(), list(model.parameters())
    found = split(model, 2, X.float())
    assert all(a is b for a, b in zip(held, model.parameters(), strict=True))
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(before[k], v) for k, v in model.state_dict().items())
    with torch.device("meta"):
        bare = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(), nn.Linear(8, 8))
    other = split(bare, 2, X.float())
    assert other.cuts == found.cuts and other.stages[0].outputs == found.stages[0].outputs


def test_autocast_and_frozen_parameters() -> None:
    model = Blocks()
    for p in model.blocks[:2].parameters():
        p.requires_grad_(False)
    found = split(model, 3, X.float(), ["blocks.1", "blocks.2"])
    assert [v.grad for s in found.stages for v in s.outputs] == [False, False]
    with torch.autocast("cpu", torch.bfloat16):
        equal(model, X.float(), found)
    equal(model, X.float(), found)
    model.requires_grad_(True)
    equal(model, X.float(), found)


class Lazy(Blocks):
    """What its first forward pass sets up is no reason to refuse it."""

    table: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> Any:
        if self.table is None:
            self.table = torch.arange(8.0).to(x.dtype)
        return super().forward(x + self.table)


def test_what_is_set_up_once() -> None:
    model = Lazy().double()
    found = split(model, 2, X)
    assert model.table is None
    equal(model, X, found)


class SharedNorm(nn.Module):
    """One batch norm, whose statistics two places write to."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.blocks = nn.BatchNorm1d(8), nn.ModuleList(Block() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = self.norm(block(x))
        return x


def test_a_buffer_that_two_stages_write_to_is_refused() -> None:
    model = SharedNorm().double()
    with pytest.raises(SplitError, match="'norm.(running_mean|running_var|num_batches_tracked)"):
        split(model, 2, X, ["blocks.2"])
    equal(model, X, split(model, 2, X), exact=False)  # one stage has all uses
    equal(model.eval(), X, split(model, 2, X), exact=False)


class Bare(nn.Module):
    """Calls no module: its weights are its own."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(8, 8).double())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.weight) @ self.weight.t()


def test_a_model_without_modules_is_one_piece() -> None:
    with pytest.raises(SplitError, match="2 stages, but only 1 place"):
        split(Bare(), 2, X)
    net = Bare()
    equal(net, X, split(net, 1, X))


class Graphs(nn.Module):
    """Convolves over a graph that it holds, that it is given, or that it makes."""

    def __init__(self, held: torch.Tensor | None, makes: bool = False) -> None:
        super().__init__()
        self.enter, self.out, self.makes = nn.Linear(6, 8), nn.Linear(8, 4), makes
        self.register_buffer("graph", held, persistent=False)

    def forward(self, x: torch.Tensor, graph: torch.Tensor) -> torch.Tensor:
        graph = graph.to_sparse() if self.makes else graph if self.graph is None else self.graph
        return self.out(graph @ self.enter(x))


@pytest.mark.parametrize(
    ("held", "given", "said"),
    [
        (torch.sparse_coo, torch.strided, r"its buffer 'graph' is sparse \(torch.sparse_coo\)"),
        (torch.sparse_csr, torch.strided, r"its buffer 'graph' is sparse \(torch.sparse_csr\)"),
        (None, torch.sparse_coo, "a tensor of its batch is sparse"),
        (None, torch.strided, "what to_sparse gives in its forward is sparse"),
    ],
)
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta")
def test_sparse_tensors_are_told(held: torch.layout | None, given: torch.layout, said: str) -> None:
    def graph(layout: torch.layout) -> torch.Tensor:
        return torch.eye(5) if layout is torch.strided else torch.eye(5).to_sparse(layout=layout)

    model = Graphs(None if held is None else graph(held), makes="gives" in said)
    with pytest.raises(SplitError, match=said):
        split(model, 2, (torch.ones(5, 6), graph(given)))


class Sparse(Block):
    """A block that makes a sparse tensor of some weights, and a dense one of that, as adapters do (SHiRA)."""

    def __init__(self) -> None:
        super().__init__()
        self.some = nn.Parameter(torch.ones(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        more = torch.sparse_coo_tensor(torch.tensor([[0, 2, 5], [1, 3, 0]]), self.some, (8, 8))
        return super().forward(x) + x @ (self.linear.weight + more)


class SparseBlocks(Blocks):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sparse() for _ in range(4))


def test_sparse_tensors_within_blocks_are_told() -> None:
    """torch has no data of them, by which they would be remembered, either."""
    for _ in range(2):
        with pytest.raises(SplitError, match="what sparse_coo_tensor gives in its forward is sparse"):
            split(SparseBlocks().double(), 2, X)


class Reversible(torch.autograd.Function):
    """Keeps what blocks give, and finds what they were given by going back, block by block."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, blocks: Any) -> torch.Tensor:
        for block in blocks:
            first, second = x.chunk(2, -1)
            first = first + block(second)
            x = torch.cat([second, first], -1)
        ctx.out, ctx.blocks = x.detach(), list(blocks)
        return x

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[Any, ...]:
        x, (grad,) = ctx.out, grads
        for block in reversed(ctx.blocks):
            (second, first), (of_second, of_first) = x.chunk(2, -1), grad.chunk(2, -1)
            with torch.enable_grad():
                second = second.detach().requires_grad_()
                added = block(second)
                added.backward(of_first)
            assert second.grad is not None
            x = torch.cat([first - added.detach(), second.detach()], -1)
            grad = torch.cat([of_first, of_second + second.grad], -1)
        return grad, None


class ReversibleTrunk(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block(4) for _ in range(blocks))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Reversible.apply(x, self.blocks)
        return out


class AroundTrunk(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.trunk, self.out = nn.Linear(8, 8), ReversibleTrunk(6), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.out(self.trunk(self.enter(x)))
        return out


def test_autograd_functions_that_call_modules_lie_in_one_stage() -> None:
    model: nn.Module = AroundTrunk().double()
    found = split(model, 2, X)
    assert found.cuts == ("trunk",)
    equal(model, X, found, exact=False)
    (why,) = found.whole
    assert "Reversible, an autograd function, is called in the forward of 'trunk'" in str(why)
    model = nn.Sequential(nn.Linear(8, 8), *(ReversibleTrunk(2) for _ in range(4))).double()
    found = split(model, 2, X)
    assert found.cuts == ("3",) and not found.whole
    equal(model, X, found, exact=False)
    with pytest.raises(SplitError, match="Reversible, an autograd function, .* uses modules itself"):
        split(ReversibleTrunk(4).double(), 2, X)


class Picked(nn.Module):
    """Does more with the rows that a mask of the batch picks."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        rows, x = mask.nonzero()[:, 0], self.layers[0](x)
        some = x[rows]
        for layer in [*self.layers][1:]:
            some = layer(some).tanh()
        return x.index_add(0, rows, some)


def test_sizes_by_values() -> None:
    """What stages send hangs on how many rows a mask picks: they are those of a mask that picks as many."""
    torch.manual_seed(0)
    model, x = Picked(), torch.randn(6, 4)
    masks = [torch.tensor(rows) > 0 for rows in ([0, 1, 1, 0, 0, 1], [1, 1, 0, 1, 0, 0], [0] * 6, [1] * 6)]
    stages = split(model, 2, (x, masks[0]), cuts=["layers.2"])
    assert stages.at((x, masks[1])) is stages
    found = []
    for mask in masks:
        found.append(stages.at((x, mask)))
        first, last = found[-1].stages
        torch.testing.assert_close(last(first((), (x, mask)), (x, mask)), model(x, mask))
        assert [value.shape for value in last.inputs][-1] == (int(mask.sum()), 4)
    assert len(set(map(id, found))) == 3


def test_products_by_groups_are_followed_without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch makes their shapes of bfloat16 alone; run on values, a layer of experts takes its memory."""

    def valued(*given: Any) -> Any:
        raise AssertionError("a module was run on values")

    monkeypatch.setattr("espalier.parallel.pipeline.model_stand_ins.some", valued)
    model = nn.Sequential(Grouped(), nn.Linear(8, 8), Grouped(), nn.Linear(8, 8))
    x = X.float()
    equal(model, x, split(model, 2, x))
