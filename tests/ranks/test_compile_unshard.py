"""Compiled blocks of parameters that are cut (ZeRO-3): gathered before each block, released after it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

import espalier
from espalier.models import build
from tests.ranks.test_compile import Graphs

SIZES = {"vocab_size": 24, "max_positions": 8, "layers": 3, "hidden": 16, "heads": 4, "ffn": 24}
STEPS = 3


def batches(n: int = STEPS) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 24, (4, 8), generator=generator) for _ in range(n)]
    return [{"input_ids": x, "labels": x} for x in tokens]


class Trained(NamedTuple):
    """What a training gave; of the gradients the last step's, and what its two passes sent."""

    losses: list[float]
    grads: dict[str, torch.Tensor]
    state: dict[str, torch.Tensor]
    book: Any
    order: Any
    last: Any


def model(dropout: float = 0.0, layers: int = SIZES["layers"]) -> nn.Module:
    torch.manual_seed(0)
    return build("gpt2", {**SIZES, "dropout": dropout, "layers": layers}).double()


def trained(
    plan: Mapping[str, Any], compiled: Any, dropout: float, late: bool = False, layers: int = SIZES["layers"]
) -> Trained:
    net = model(dropout, layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine = espalier.initialize(net, optimizer, plan, compile=False if late else compiled)
    if late:
        engine.lay_out(batches(1)[0])
        engine.compile(compiled)
    torch.manual_seed(3)
    losses = []
    with espalier.ledger(engine.mesh) as book:
        for batch in batches():
            with espalier.ledger(engine.mesh) as last:
                engine.accumulate(engine.cut(batch))
            losses.append(float(engine.loss))
            if len(losses) < STEPS:
                engine.step()
    engine.finish_gradients()
    grads = {n: espalier.full_tensor(p.grad).clone() for n, p in net.named_parameters()}
    engine.step()
    prefetcher = engine._data.prefetcher  # type: ignore[union-attr]
    order = None if prefetcher is None else prefetcher.recorded
    return Trained(losses, grads, engine.full_state_dict(), book, order, last)


def plain(layers: int) -> Trained:
    """On one process, by torch alone."""
    net = model(layers=layers)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    losses, grads = [], {}
    for batch in batches():
        optimizer.zero_grad()
        loss = net(**batch).loss
        loss.backward()
        grads = {n: p.grad.clone() for n, p in net.named_parameters()}
        optimizer.step()
        losses.append(loss.item())
    return Trained(losses, grads, net.state_dict(), None, None, None)


def _trains(rank: int, world: int, plan: dict[str, Any], dropout: float, late: bool) -> None:
    graphs = Graphs()
    # the first, one with others before and after it, the last; recomputed or not, one less tells as much
    layers = 2 if "recompute" in plan else 3
    found = trained(plan, graphs, dropout, late, layers)
    eager = trained(plan, False, dropout, layers=layers)
    expected = eager if dropout else plain(layers)
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=1e-12)
    for ours, theirs in ((found.grads, expected.grads), (found.state, expected.state)):
        for name, x in theirs.items():
            assert torch.allclose(ours[name], x, rtol=0, atol=1e-11), name
    # what is sent is what the program not compiled sends, in its order, and as early
    assert list(map(repr, found.book.entries)) == list(map(repr, eager.book.entries))
    assert found.order == eager.order and len(found.order) >= 2 * layers
    # no block is broken into several graphs; they are alike, and so are compiled once
    kinds = list(plan["recompute"].values()) if isinstance(plan.get("recompute"), dict) else []
    programs, again = len(kinds) or 1, kinds.count("full") or layers * (plan.get("recompute") == "full")
    assert (len(graphs.forward), len(graphs.backward)) == (programs, programs)
    assert graphs.runs == (2 * layers + again) * (STEPS * plan.get("accumulate", 1) - 1)


@pytest.mark.parametrize(
    ("world", "plan", "dropout", "late"),
    [
        (2, {"data": 2, "zero": 3}, 0.0, False),
        (2, {"data": 2, "zero": 3, "prefetch_megabytes": 0.0, "accumulate": 2}, 0.0, True),
        (2, {"data": 2, "zero": 3, "offload": {"parameters": "host", "states": "host"}}, 0.1, False),
        (4, {"data": 2, "tensor": 2, "zero": 3}, 0.0, False),
        (2, {"data": 2, "zero": 3, "recompute": "full"}, 0.1, False),
        (2, {"data": 2, "zero": 3, "recompute": "full", "accumulate": 2}, 0.0, True),
        (2, {"data": 2, "zero": 3, "recompute": "selective", "accumulate": 2}, 0.0, False),
        (2, {"data": 2, "zero": 3, "recompute": {"*.0": "full", "*": "selective"}}, 0.1, True),
    ],
)
def test_trains_as_one_process(
    ranks: Callable[..., Any], world: int, plan: dict[str, Any], dropout: float, late: bool
) -> None:
    ranks(world, _trains, plan, dropout, late)


def _recomputes(rank: int, world: int, kind: str, sequence: bool) -> None:
    layers = 2
    plan = {"tensor": world, "recompute": kind, "recompute_inputs": "sharded"}
    if sequence:
        plan |= {"sequence_parallel": True, "async_tensor_parallel": True}
    expected, backend = plain(layers), "aot_eager" if kind == "selective" else Graphs()
    found = trained(plan, backend, 0.0, kind == "full", layers)
    eager = trained(plan, False, 0.0, layers=layers)
    assert found.losses == pytest.approx(expected.losses, rel=0, abs=1e-12)
    for name, x in expected.state.items():
        assert torch.allclose(found.state[name], x, rtol=0, atol=1e-11), name
    if isinstance(backend, Graphs):
        assert (len(backend.forward), len(backend.backward)) == (1, 1)
        assert backend.runs == 3 * layers * (STEPS - 1)
    if kind == "selective":  # nothing of a block is sent twice, but for inputs that are kept in slices
        del plan["recompute"], plan["recompute_inputs"]
        once = trained(plan, False, 0.0, layers=layers)
        sent, eager_sent, expected_sent = (
            {key: size for key, (_, size) in run.last.by_op().items()} for run in (found, eager, once)
        )
        assert sum(eager_sent.values()) > sum(sent.values())
        if not sequence:
            slices = ("tensor", "all_gather")
            expected_sent[slices] = eager_sent[slices]
        assert sent == expected_sent
        return
    if sequence:
        return
    # an eager block stops when all is there that its backward pass asks for; a graph runs to its end
    (calls, sent), (before, bytes_before) = (
        run.book.by_op().pop(("tensor", "all_reduce")) for run in (found, eager)
    )
    assert calls == before + layers * (STEPS - 1) and sent > bytes_before


@pytest.mark.parametrize("kind", ["full", "selective"])
@pytest.mark.parametrize("sequence", [False, True])
def test_blocks_of_a_tensor_axis_are_recomputed(ranks: Callable[..., Any], kind: str, sequence: bool) -> None:
    ranks(2, _recomputes, kind, sequence)


def _eight_bits(rank: int, world: int) -> None:
    def losses(compiled: Any) -> list[float]:
        torch.manual_seed(0)
        net = build("gpt", {**SIZES, "hidden": 32, "ffn": 64, "layers": 2})
        plan = {"data": world, "zero": 3, "precision": "float8", "recompute": "full"}
        engine = espalier.initialize(
            net, torch.optim.AdamW(net.parameters(), lr=1e-2), plan, compile=compiled
        )
        return [engine.train_step(batch).item() for batch in batches()]

    graphs = Graphs()
    assert losses(graphs) == losses(False)
    assert (len(graphs.forward), len(graphs.backward)) == (1, 1)


def test_products_of_8_bits_are_compiled(ranks: Callable[..., Any]) -> None:
    ranks(2, _eight_bits)


class _Saved:
    """The bytes that autograd keeps, by memory: those of the parameters, which come and go, and others."""

    def __init__(self, emptied: dict[int, int]) -> None:
        self._emptied = emptied
        self.theirs: set[int] = set()
        self.others: dict[int, int] = {}
        self.hooks = saved_tensors_hooks(self._pack, lambda x: x)

    def _pack(self, x: torch.Tensor) -> torch.Tensor:
        storage = x.untyped_storage()
        if storage._cdata in self._emptied:
            self.theirs.add(self._emptied[storage._cdata])
        else:
            self.others[storage._cdata] = storage.nbytes()
        return x


def _releases(rank: int, world: int, megabytes: float) -> None:
    def whole(compiled: Any) -> tuple[list[Any], _Saved]:
        """After each block, forward and backward, the parameters' bytes; and what is kept for backward."""
        net: Any = model()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        plan = {"data": world, "zero": 3, "prefetch_megabytes": megabytes}
        engine = espalier.initialize(net, optimizer, plan, compile=compiled)
        engine.lay_out()
        held = engine._data.prefetcher.held  # type: ignore[union-attr]
        seen: list[Any] = []

        def note(*_: Any) -> None:
            seen.append([g.storage.nbytes() for g in held if not g.chunk.stays])

        for block in net.blocks:
            block.register_forward_hook(note)
            block.register_full_backward_pre_hook(note)
        for batch in batches():
            seen.clear()
            saved = _Saved({g.storage._cdata: g.number for g in held})
            with saved.hooks:
                loss = engine(batch)
            engine.backward(loss)
            engine.step()
            assert not any(g.storage.nbytes() for g in held)
        return seen, saved

    seen, saved = whole("aot_eager")
    expected, others = whole(False)
    assert seen == expected and len(seen) == 2 * SIZES["layers"]
    if megabytes == 0:  # nothing of a block is whole behind it, in the forward pass
        assert not any(map(sum, seen[: SIZES["layers"]]))
    # no copy of a weight is kept: they lie in the memory that comes and goes
    assert saved.theirs == others.theirs and len(saved.theirs) >= SIZES["layers"]
    assert sum(saved.others.values()) <= sum(others.others.values())


@pytest.mark.parametrize("megabytes", [0.0, 25.0])
def test_parameters_are_released_after_their_block(ranks: Callable[..., Any], megabytes: float) -> None:
    ranks(2, _releases, megabytes)


class _Block(nn.Module):
    """Writes to buffers; ``down`` may be another block's, too."""

    def __init__(self, down: nn.Linear | None = None, tied: nn.Linear | None = None) -> None:
        super().__init__()
        self.norm, self.up = nn.BatchNorm1d(8), nn.Linear(8, 16)
        self.down = nn.Linear(16, 8) if down is None else down
        if tied is not None:
            self.up.weight = tied.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.gelu(self.up(self.norm(x))))


class _Net(nn.Module):
    def __init__(self, shared: bool) -> None:
        super().__init__()
        first = _Block()
        others = [_Block(first.down)] if shared else [_Block(), _Block(tied=first.up)]
        self.blocks = nn.ModuleList([first, *others, _Block()])
        self.head = nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        y: torch.Tensor = self.head(x)
        return y


class _Runs:
    """A backend that counts what it compiles, and the runs of that."""

    def __init__(self) -> None:
        self.compiled = self.runs = 0

    def __call__(self, graph: Any, inputs: Any) -> Any:
        self.compiled += 1

        def run(*args: Any) -> Any:
            self.runs += 1
            return graph.forward(*args)

        return run


def _shared(rank: int, world: int, shared: bool) -> None:
    def trained(compiled: Any) -> tuple[list[float], dict[str, torch.Tensor]]:
        torch.manual_seed(0)
        net = _Net(shared).double()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        engine = espalier.initialize(
            net, optimizer, {"data": world, "zero": 3}, loss_fn=F.mse_loss, layouts={}, compile=compiled
        )
        generator = torch.Generator().manual_seed(2)
        rows = [torch.randn(8, 9, generator=generator, dtype=torch.float64) for _ in range(STEPS)]
        losses = [engine.train_step((x[:, :8], x[:, 8:])).item() for x in rows]
        before = dict(vars(compiled)) if compiled else {}
        twin = copy.deepcopy(espalier.EngineModule(engine)) if compiled else None
        if twin is not None:  # a copy runs as it is written
            assert torch.isfinite(espalier.full_tensor(twin.eval()(rows[0][:, :8]))).all()
            assert before == vars(compiled)
        return losses, engine.full_state_dict()

    runs = _Runs()
    losses, state = trained(False)
    found, compiled_state = trained(runs)
    assert found == pytest.approx(losses, rel=0, abs=1e-12)
    for name, x in state.items():
        assert torch.allclose(compiled_state[name], x, rtol=0, atol=1e-12), name
    # also where they write to buffers: the first step's calls are recorded as they run
    blocks = 3 if shared else 4
    # what comes to the first block needs no gradient
    assert (runs.compiled, runs.runs) == (2, blocks * (STEPS - 1))


@pytest.mark.parametrize("shared", [False, True])
def test_blocks_share_parameters_and_write_to_buffers(ranks: Callable[..., Any], shared: bool) -> None:
    """A module of two blocks, or a parameter of two modules."""
    ranks(2, _shared, shared)


def _refused(rank: int, world: int) -> None:
    """What gathers inside of a region is no part of a graph."""
    for whole in (False, True):
        net: Any = model()
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": world, "zero": 3})
        espalier.compile(net if whole else net.blocks[0], backend="eager")
        with pytest.raises(NotImplementedError, match=r"initialize\(\.\.\., compile=True\)"):
            engine.train_step(batches(1)[0])


def test_a_region_that_gathers_is_refused(ranks: Callable[..., Any]) -> None:
    ranks(2, _refused)
