"""Parameters used in odd ways, under every stage, against the same model on one process, in float64."""

from __future__ import annotations

import copy
import dataclasses
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import espalier
from espalier.tensor import plain as plain_of
from tests.ranks.test_engine import TOLERANCE, apart


@dataclasses.dataclass
class Out:
    hidden: torch.Tensor
    note: str = ""


class Prompt(nn.Module):
    """Gives views of its parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.rows, self.unused = nn.Parameter(torch.randn(4, 6)), nn.Parameter(torch.randn(5))

    def forward(self, n: int) -> Any:
        return self.rows[:n], self.rows.t()[:, :1]


class Block(nn.Module):
    """Gives an object, keeps a loss aside, uses a weight detached, borrows another block's."""

    def __init__(self, other: list[nn.Linear]) -> None:
        super().__init__()
        self.line, self.norm = nn.Linear(6, 6), nn.LayerNorm(6)
        self.frozen = nn.Linear(6, 6).requires_grad_(False)
        self.low, self.high = nn.Parameter(torch.randn(6, 1)), nn.Parameter(torch.randn(1, 6))
        self.scale, self.tiny = nn.Parameter(torch.tensor(1.5)), nn.Parameter(torch.randn(2))
        self._other = other
        self.aside: Any = 0.0

    def forward(self, x: torch.Tensor) -> Out:
        h = self.frozen(self.norm(x)) + x @ self.low @ self.high
        h = F.gelu(self.line(h)) * self.scale + self.tiny.sum()
        h = h + F.linear(h, self.line.weight.detach())
        self.aside = (h * self.low.view(6)).square().mean()
        for line in self._other:
            h = h + F.linear(h, line.weight.t(), line.bias) * line.weight[0, 0]
        return Out(h + x)


class Odd(nn.Module):
    """A head that borrows the embedding's weight, a layer used twice, one unused, one used sometimes."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.prompt = nn.Embedding(9, 6), Prompt()
        self.twice, self.never, self.rare = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        first = Block([])
        self.blocks = nn.ModuleList([first, Block([first.line, self.never])])
        self.how = "plain"

    def forward(self, ids: torch.Tensor, rare: bool) -> torch.Tensor:
        x = self.embed(ids)
        rows, column = self.prompt(3)
        x = torch.cat([rows.expand(len(ids), 3, 6), x], 1) + column.mean()
        for block in self.blocks:
            if self.how == "plain":
                x = block(x).hidden
            else:
                x = checkpoint(lambda x, b=block: b(x).hidden, x, use_reentrant=self.how == "reentrant")
        x = torch.tanh(self.twice(torch.tanh(self.twice(x))))
        x = self.rare(x) if rare else x
        logits = F.linear(x, self.embed.weight)
        loss = F.cross_entropy(logits[:, 3:].flatten(0, 1), ids.flatten())
        return loss + (sum(b.aside for b in self.blocks) if self.how == "plain" else 0.0)


def batch(step: int) -> torch.Tensor:
    return torch.randint(0, 9, (4, 5), generator=torch.Generator().manual_seed(step))


def penalty(net: Any) -> torch.Tensor:
    return sum(p.square().sum() for p in net.parameters()) * 1e-2


def odd(rank: int, world: int, plan: dict[str, Any]) -> None:
    torch.manual_seed(0)
    net = Odd().double()
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
    engine = espalier.initialize(net, ours, plan, layouts={} if "tensor" in plan else None)
    for step, (how, rare, more) in enumerate(
        [
            ("plain", False, ""),
            ("plain", True, ""),
            ("recompute", False, ""),
            ("reentrant", True, ""),
            ("plain", False, "before"),
            ("plain", False, "taken"),
            ("plain", True, "after"),
            ("plain", False, "two"),
            ("plain", False, "retain"),
            ("plain", True, "raise"),
            ("plain", False, "evaluate"),
        ]
    ):
        net.how = plain.how = how
        if more == "taken":  # gradients of parameters alone, which are used again before a forward
            for m in (net, plain):
                first, *_, last = [p for p in m.parameters() if p.requires_grad]
                torch.autograd.grad(first.norm() * last.norm() + last.square().sum(), [first, last])
        reg, reg_ = (penalty(net), penalty(plain)) if more in ("before", "taken") else (0.0, 0.0)
        if more == "raise":
            engine((batch(7), False))  # its backward is never called
            with pytest.raises((TypeError, AttributeError)):
                engine((None, False))
            with pytest.raises(TypeError):
                net.blocks[1](None)
        if more == "evaluate":
            with torch.no_grad():
                assert abs(engine((batch(8), True)).item() - plain(batch(8), True).item()) < TOLERANCE
        loss, expected = engine((batch(step), rare)), plain(batch(step), rare)
        assert abs(loss.item() - expected.item()) < TOLERANCE
        if more == "after":
            reg, reg_ = penalty(net), penalty(plain)
        if more == "two":
            reg, reg_ = engine((batch(9), True)), plain(batch(9), True)
        loss, expected = loss + reg, expected + reg_
        engine.backward(loss)
        expected.backward()
        engine.finish_gradients()
        assert apart(net, plain, gradients=True) < TOLERANCE, (step, how)
        for _ in range(more == "after"):
            for b in net.blocks:
                b.aside = 0.0
            twin = copy.deepcopy(net)
            assert apart(twin, plain, gradients=False) < TOLERANCE
            saved = {k: espalier.full_tensor(v).clone() for k, v in net.state_dict().items()}
            for k, v in plain.state_dict().items():
                assert (saved[k] - v).abs().max() < TOLERANCE
            with torch.no_grad():
                for p in net.parameters():
                    p.mul_(0.0)
            net.load_state_dict(saved)
        engine.step()
        theirs.step()
        theirs.zero_grad()
        assert apart(net, plain, gradients=False) < TOLERANCE
        prefetcher = engine._data.prefetcher  # type: ignore[union-attr]
        if prefetcher is not None:
            assert not any(g.is_whole or g.pending or g.storage.nbytes() for g in prefetcher.held)


class Turned(nn.Module):
    """A module with a parameter that all blocks share, and the model has for itself, too."""

    def __init__(self) -> None:
        super().__init__()
        self.angles = nn.Parameter(torch.randn(6))
        self.turn = staticmethod(torch.cos)  # of an object: no copy module knows it

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * self.turn(self.angles)


class SharedWithin(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned, self.line = Turned(), nn.Linear(6, 6)
        blocks = [
            nn.ModuleList([nn.LayerNorm(6), self.turned, nn.Linear(6, 12), nn.Linear(12, 6)])
            for _ in range(3)
        ]
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.turned(self.line(x))
        for norm, turned, up, down in self.blocks:  # type: ignore[misc]
            x = x + down(F.gelu(up(turned(norm(x)))))
        return x


def shared_within(rank: int, world: int, plan: dict[str, Any]) -> None:
    """Blocks keep all that is theirs in their chunks, whatever else stands in them."""
    torch.manual_seed(0)
    net = SharedWithin().double()
    twin = SharedWithin().double()
    twin.load_state_dict(net.state_dict())
    optimizer, other = torch.optim.AdamW(net.parameters(), 0.1), torch.optim.AdamW(twin.parameters(), 0.1)
    engine = espalier.initialize(net, optimizer, plan, loss_fn=lambda out, batch: out.square().mean())
    for step in range(3):
        x = torch.randn(8, 4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(step))
        other.zero_grad()
        twin(x).square().mean().backward()
        other.step()
        engine.train_step(x)
    data = engine.passes.data
    assert data is not None
    if engine.plan.pipe == 1:
        assert len([m for chunk in data.chunks for m in chunk.members]) == len([*twin.parameters()])
    found = engine.full_state_dict()
    for name, value in twin.state_dict().items():
        assert (found[name] - value).abs().max() < TOLERANCE, name


@pytest.mark.parametrize(
    "plan",
    [
        {"data": 4, "zero": 3},
        {"data": 2, "tensor": 2, "zero": 3, "sequence_parallel": True},
        {"data": 2, "pipe": 2},
    ],
    ids=str,
)
def test_blocks_that_share_a_module(ranks: Any, plan: dict[str, Any]) -> None:
    ranks(4, shared_within, plan)


@pytest.mark.parametrize("zero", [0, 1, 2, 3])
@pytest.mark.parametrize("plan", [{"data": 4}, {"replicate": 2, "data": 2}], ids=str)
def test_odd_models(ranks: Any, plan: dict[str, int], zero: int) -> None:
    ranks(4, odd, {**plan, "zero": zero, "chunk_megabytes": 0.001})


def test_odd_models_on_a_tensor_axis(ranks: Any) -> None:
    ranks(4, odd, {"data": 2, "tensor": 2, "zero": 3})


def same_bits(rank: int, world: int) -> None:
    found = []
    for zero in range(4):
        torch.manual_seed(0)
        net = Odd()
        plan = {"data": world, "zero": zero, "chunk_megabytes": 0.001}
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        engine = espalier.initialize(net, optimizer, plan, max_grad_norm=0.5)
        for step in range(4):
            engine.train_step((batch(step), step % 2 == 0))
        found.append(engine.full_state_dict())
    for zero in range(1, 4):
        assert all(torch.equal(x, found[zero][name]) for name, x in found[0].items()), zero


def test_stages_give_the_same_bits_of_odd_models(ranks: Any) -> None:
    ranks(4, same_bits)


class Small(nn.Module):
    """Two layers, one of which may be frozen."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 7, bias=False)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x.square().mean()


def optimizers(rank: int, world: int) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for zero in range(4):
        for name in ("Adafactor", "Muon"):
            if not hasattr(torch.optim, name):
                continue
            torch.manual_seed(0)
            net = Small().double()
            plain = copy.deepcopy(net)
            ours, theirs = (
                getattr(torch.optim, name)([p for p in m.parameters() if p.ndim > 1], lr=1e-2)
                for m in (net, plain)
            )
            engine = espalier.initialize(net, ours, {"data": world, "zero": zero})
            for _ in range(3):
                with espalier.ledger(engine.mesh) as book:
                    engine.train_step((x,))
                if name == "Muon" and zero:  # rank 1's pieces of both matrices go to rank 0, and come back
                    assert book.by_op()["data", "all_to_all"] == (4, 2 * (5 * 3 + 3 * 5)), str(book)
                plain(x).backward()
                theirs.step()
                plain.zero_grad()
                assert apart(net, plain, gradients=False) < TOLERANCE, (zero, name)


def gradients_of_gradients(rank: int, world: int) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for zero in range(4):
        torch.manual_seed(0)
        net = Small().double()
        plain = copy.deepcopy(net)
        engine = espalier.initialize(net, None, {"data": world, "zero": zero})
        loss, expected = engine((x,)), plain(x)
        found = torch.autograd.grad(loss, list(net.parameters()), create_graph=True)
        wanted = torch.autograd.grad(expected, list(plain.parameters()), create_graph=True)
        for g, h in zip(found, wanted, strict=True):
            assert (espalier.full_tensor(g) - h).abs().max() < TOLERANCE
        engine.backward(loss + sum(g.square().sum() for g in found))
        (expected + sum(g.square().sum() for g in wanted)).backward()
        engine.finish_gradients()
        assert apart(net, plain, gradients=True) < TOLERANCE, zero


def test_backward_through_backward(ranks: Any) -> None:
    ranks(2, gradients_of_gradients)


class Critic(nn.Module):
    """A critic used three times; its gradients, for what is given and for its weights, are in the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.last = nn.Embedding(9, 6), nn.Linear(6, 1)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(4)])

    def score(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        between = (0.3 * x).detach().requires_grad_() if ids[0] % 2 else 0.3 * x
        (g,) = torch.autograd.grad(self.score(between).sum(), between, create_graph=True)
        loss = self.score(x * 2).mean()
        weights = [p for p in self.blocks.parameters() if p.ndim > 1]
        of_weights = torch.autograd.grad(loss, weights, create_graph=True)
        fake = self.score(x * 3).square().mean()
        (h,) = torch.autograd.grad(fake, x, create_graph=True)
        penalty = (g.norm(dim=1) - 1).square().mean() + h.pow(4).mean()
        return fake - loss + penalty + 0.1 * sum(w.square().sum() for w in of_weights)


def penalized(rank: int, world: int) -> None:
    stages: list[dict[str, Any]] = [{"zero": zero} for zero in range(4)]
    for more in (*stages, {"zero": 3, "prefetch_megabytes": 0}, {"zero": 3, "recompute": "full"}):
        torch.manual_seed(0)
        net = Critic().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        engine = espalier.initialize(net, ours, {"data": world, **more})
        for step in range(4):
            ids = batch(step)[:, 0]
            loss, expected = engine.train_step(ids), plain(ids)
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            assert abs(loss.item() - expected.item()) < TOLERANCE, (more, step)
            assert apart(net, plain, gradients=False) < TOLERANCE, (more, step)


def test_gradients_in_the_loss(ranks: Any) -> None:
    ranks(2, penalized)


class Mapped(nn.Module):
    """Weights of a block that a function of local tensors computes with, in another one's forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 5)
        self.blocks = nn.ModuleList([nn.Linear(6, 6), nn.Linear(6, 6, bias=False)])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.blocks[0](self.embed(ids))
        product = torch.matmul
        if isinstance(x, espalier.DTensor):
            product = espalier.local_map(torch.matmul, out_placements=x.placements)
        x = product(x, self.blocks[1].weight)
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten() % 5)


class Spectral(nn.Module):
    """Filters that are viewed as complex numbers, beside parameters of odd sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.odd, self.filter = nn.Parameter(torch.randn(3)), nn.Parameter(torch.randn(5, 2))
        self.embed, self.one = nn.Embedding(9, 8), nn.Parameter(torch.randn(1))
        self.shift, self.out = nn.Parameter(torch.randn(5, 2)), nn.Linear(8, 5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = torch.fft.rfft(self.embed(ids)) * torch.view_as_complex(self.filter) * self.odd.sum()
        x = torch.fft.irfft(x + torch.view_as_complex(self.shift), n=8) * self.one
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten() % 5)


class Mixed(nn.Module):
    """A block that may share a layer, or a layer's weight, with another one, or borrow its weight."""

    def __init__(
        self,
        down: nn.Linear | None = None,
        tied: nn.Linear | None = None,
        lender: list[nn.Linear] | None = None,
    ) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6) if down is None else down
        if tied is not None:
            self.up.weight = tied.weight
        self._lender = lender or []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(torch.tanh(self.up(x)))
        for line in self._lender:
            x = x + F.linear(torch.tanh(x), line.weight).mean(-1, keepdim=True)
        return x


class Shared(nn.Module):
    """One block's layer in a second, its weight in a third, lent to a fourth; it is called once more."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 5)
        first = Mixed()
        others = [Mixed(down=first.down), Mixed(lender=[first.up]), Mixed(tied=first.up), first]
        self.blocks = nn.ModuleList([first, *others])

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids).detach()  # nothing tells when the first block's backward is done
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.out(x).flatten(0, 1), ids.flatten() % 5)


def viewed_or_shared(rank: int, world: int, kind: type[nn.Module]) -> None:
    for zero in range(4):
        torch.manual_seed(0)
        net = kind().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        engine = espalier.initialize(net, ours, {"data": world, "zero": zero})
        for step in range(2):
            assert all(plain_of(p.detach()).data_ptr() % 64 == 0 for p in net.parameters())
            with torch.no_grad():
                assert abs(engine(batch(step)).item() - plain(batch(step)).item()) < TOLERANCE
            loss, expected = engine.train_step(batch(step)), plain(batch(step))
            expected.backward()
            theirs.step()
            theirs.zero_grad()
            assert abs(loss.item() - expected.item()) < TOLERANCE, (zero, step)
            assert apart(net, plain, gradients=False) < TOLERANCE, (zero, step)
        if isinstance(net, Shared) and zero == 3:  # each block that has a layer of the first gathers it
            chunk_of = {id(m.p): g.number for g in engine._data.prefetcher.held for m in g.chunk.members}
            first = chunk_of[id(net.blocks[0].down.weight)]
            uses = [u.chunk for u in engine._data.prefetcher.recorded if u.phase == "forward"]
            assert uses.count(first) == 4, uses


@pytest.mark.parametrize("kind", [Spectral, Mapped, Shared])
def test_parameters_that_are_viewed_mapped_or_shared(ranks: Any, kind: type[nn.Module]) -> None:
    ranks(2, viewed_or_shared, kind)


def test_optimizers_that_are_not_elementwise(ranks: Any) -> None:
    ranks(2, optimizers)


class Beside(nn.Module):
    """Is given what it does not use: what made that has no gradient, and is not decayed."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(6, 6), nn.Embedding(4, 6), Uses()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, second, inner = self.parts
        beside = torch.tanh(second(torch.arange(len(x)) % 4)).flip(0)
        beside.register_hook(lambda grad: 2 * grad)
        return inner(torch.tanh(first(x)), F.linear(beside, first.weight))


class Uses(nn.Module):
    """Uses one of two inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 3)

    def forward(self, x: torch.Tensor, beside: torch.Tensor) -> torch.Tensor:
        return self.line(x).square().mean()


def without_gradients(rank: int, world: int) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for zero in range(4):
        torch.manual_seed(0)
        net = Beside().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (net, plain))
        plan = {"data": world, "zero": zero, "chunk_megabytes": 0.0001}
        engine = espalier.initialize(net, ours, plan)
        for _ in range(2):
            engine.train_step((x,))
            plain(x).backward()
            assert plain.parts[1].weight.grad is None
            theirs.step()
            theirs.zero_grad()
            assert apart(net, plain, gradients=False) < TOLERANCE, zero


def test_what_the_loss_does_not_hang_on_has_no_gradient(ranks: Any) -> None:
    ranks(2, without_gradients)
