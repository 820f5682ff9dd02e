"""Blocks of models as they are, compiled: one graph, or as they are written; the values are the same."""

from __future__ import annotations

import copy
import warnings
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import espalier
from espalier.models import build
from espalier.torch_private import FakeTensorMode

WIDE, TOLERANCE = 6, 1e-12
PLANS: list[dict[str, Any]] = [
    {"data": 2},
    {"data": 2, "zero": 3, "chunk_megabytes": 0.0005},
    {"tensor": 2},
    {"data": 2, "recompute": "full"},
    {"data": 2, "recompute": "selective"},
]


class Cache:
    """What blocks have remembered, as transformers' caches: an object that they write to."""

    def __init__(self) -> None:
        self.layers: list[SimpleNamespace] = []

    def update(self, x: torch.Tensor, place: int) -> torch.Tensor:
        if len(self.layers) <= place:
            self.layers.append(SimpleNamespace(seen=x))
        else:
            self.layers[place].seen = torch.cat([self.layers[place].seen, x])
        seen: torch.Tensor = self.layers[place].seen
        return seen


class Block(nn.Module):
    def __init__(self, place: int, looks: bool) -> None:
        super().__init__()
        self.place, self.looks = place, looks
        self.up, self.norm, self.dropout = nn.Linear(WIDE, WIDE), nn.BatchNorm1d(WIDE), nn.Dropout(0.2)

    def forward(
        self, x: torch.Tensor, cache: Cache | None = None, states: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Of an encoder's states it does nothing: what made them has no gradients, and is not decayed."""
        y = self.dropout(self.norm(self.up(x)))
        if self.looks and y.abs().max() > 1e3:  # no graph has both ways
            y = y / 2
        if cache is not None:
            y = cache.update(y, self.place)[-len(y) :]
        return x + y.tanh()


class Model(nn.Module):
    """Two views of each row go through the same blocks, so that a step calls each block twice."""

    def __init__(self, looks: bool = False) -> None:
        super().__init__()
        self.encoder = nn.Linear(WIDE, WIDE)
        self.blocks = nn.ModuleList(Block(i, looks) for i in range(2))
        self.config = SimpleNamespace(use_cache=True)

    def forward(
        self, x: torch.Tensor, use_cache: bool | None = None, labels: torch.Tensor | None = None
    ) -> SimpleNamespace:
        use_cache = self.config.use_cache if use_cache is None else use_cache
        cache = Cache() if use_cache else None
        views, states = [], self.encoder(x)
        for view in (x, x.flip(1)):
            for block in self.blocks:
                view = block(view, cache, states)
            views.append(view)
        loss = (views[0] - views[1].cos()).square().mean()
        return SimpleNamespace(loss=loss, cache=cache)


class Counting:
    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        return module.forward


def rows(step: int) -> torch.Tensor:
    return torch.randn(8, WIDE, dtype=torch.float64, generator=torch.Generator().manual_seed(step))


def trained(net: nn.Module, plan: dict[str, Any], compile: Any) -> tuple[list[float], dict[str, Any], Any]:
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    engine = espalier.initialize(net, optimizer, plan, compile=compile)
    torch.manual_seed(5)
    losses = [engine.train_step({"x": rows(step)}).item() for step in range(4)]
    return losses, engine.full_state_dict(), engine


def same(plan: dict[str, Any], looks: bool) -> Counting:
    torch.manual_seed(0)
    net, backend = Model(looks).double(), Counting()
    expected, values, _ = trained(copy.deepcopy(net), plan, False)
    losses, given, engine = trained(net, plan, backend)
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < TOLERANCE
    assert all((given[name] - x).abs().max() < TOLERANCE for name, x in values.items())
    assert engine.module.config.use_cache
    return backend


def models(rank: int, world: int) -> None:
    for plan in PLANS:
        assert same(plan, looks=False).count == 2  # of what needs a gradient, and not; in all steps
        with pytest.warns(UserWarning, match="Block runs as it is written.*reads a tensor's value"):
            assert same(plan, looks=True).count == 0


def test_models_as_they_are(ranks: Any) -> None:
    ranks(2, models)


def programs_of_ranks(rank: int, world: int) -> None:
    """The first rank keeps a gradient that lies on all, the others drop theirs: none sends anything."""
    mesh = espalier.Mesh.from_env({"one": 1, "both": world})
    with FakeTensorMode():  # what a tracer works with; a part of the mesh is none of that
        part = mesh["both"]
    assert part.ranks == tuple(range(world)) and part.coordinate == (rank,)
    for plan in ({"tensor": 2}, {"tensor": 2, "sequence_parallel": True}):
        losses = []
        for backend in (False, "aot_eager"):
            torch.manual_seed(0)
            net = Model().double()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            engine = espalier.initialize(net, optimizer, plan, layouts={}, compile=backend)
            torch.manual_seed(5)
            losses.append([engine.train_step({"x": rows(step)}).item() for step in range(3)])
        assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < TOLERANCE


def test_programs_of_ranks_differ_where_nothing_is_sent(ranks: Any) -> None:
    ranks(2, programs_of_ranks)


def whole_models(rank: int, world: int) -> None:
    """Of a pipeline, and of a model without a list of blocks, nothing is compiled."""
    torch.manual_seed(0)
    net = Model().double()
    with pytest.warns(UserWarning, match="Model runs as it is written.*pipeline's stages"):
        espalier.initialize(net, None, {"pipe": 2}, compile="aot_eager")
    with pytest.warns(UserWarning, match="Block runs as it is written.*no list of blocks"):
        espalier.initialize(net.blocks[0], None, {"data": 2}, compile="aot_eager")


def test_what_has_no_blocks_to_compile_runs_as_it_is_written(ranks: Any) -> None:
    ranks(2, whole_models)


class Sliding(nn.Module):
    """What slides along one position lies otherwise than tracers are told, and is looked at in one piece."""

    def __init__(self) -> None:
        super().__init__()
        self.slide = nn.Conv1d(WIDE, WIDE, 3, padding=3, groups=WIDE)
        self.down = nn.Linear(5 * WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.slide(x.unsqueeze(1).transpose(1, 2))
        return x + self.down(y.transpose(1, 2).flatten(1)).tanh()


class Slides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Sliding() for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def test_what_lies_otherwise_than_tracers_are_told() -> None:
    torch.manual_seed(0)
    net = Slides().double()
    expected, _, _ = trained(copy.deepcopy(net), {"data": 1}, False)
    losses, _, _ = trained(net, {"data": 1}, "aot_eager")
    assert max(abs(a - b) for a, b in zip(losses, expected, strict=True)) < TOLERANCE


def test_a_cache_is_filled_at_each_call() -> None:
    torch.manual_seed(0)
    net, backend = Model().double(), Counting()
    *_, engine = trained(copy.deepcopy(net), {"data": 1}, False)
    assert engine(x=rows(0)).cache is not None  # as the model has it
    *_, engine = trained(net, {"data": 1}, backend)
    assert engine(x=rows(0)).cache is None
    with warnings.catch_warnings(record=True) as said, torch.no_grad():
        warnings.simplefilter("always")
        for step in range(3):
            cache = engine(x=rows(step)).cache
            assert [len(layer.seen) for layer in cache.layers] == [16, 16]
    words = [str(w.message) for w in said]
    assert len(words) == 2 and all("use_cache=False" in text for text in words)  # one of each block
    engine.train_step({"x": rows(9)})
    assert backend.count == 2
    with torch.no_grad():  # what gives a loss is compiled
        assert engine(x=rows(0), labels=rows(0)).cache is None
    assert backend.count == 3


def test_blocks_are_compiled_after_a_generation() -> None:
    """What a block does while text is made, with keys and values kept or at many lengths, is no training."""
    sizes = {"vocab_size": 20, "hidden": 12, "heads": 2, "kv_heads": 1, "layers": 2, "max_positions": 32}
    ids = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(3))
    for cache in (True, False):
        torch.manual_seed(0)
        net, backend = build("gpt", sizes).double(), Counting()
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
        engine = espalier.initialize(net, optimizer, {}, compile=backend)
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            engine.generate(ids[:, :3], 20, cache=cache)
        words = "is used that is neither" if cache else "more than 16 kinds of inputs"
        assert sum(words in str(w.message) for w in said) == len(said) == 2  # one of each block
        before = backend.count
        for _ in range(3):
            engine.train_step({"input_ids": ids, "labels": ids})
        assert backend.count == before + 1
        with torch.no_grad():
            engine.generate(ids[:, :3], 2, cache=cache)
        engine.train_step({"input_ids": ids, "labels": ids})
        assert backend.count == before + 1


def test_hooks_see_each_call() -> None:
    torch.manual_seed(0)
    net, seen = Model().double(), list[str]()
    for name, module in net.named_modules():
        if name in ("blocks.0", "blocks.1.norm"):
            module.register_forward_hook(lambda module, args, output, name=name: seen.append(name))
    with pytest.warns(UserWarning, match="norm has hooks"):
        trained(net, {"data": 1}, Counting())
    assert seen.count("blocks.0") == seen.count("blocks.1.norm") == 8


class Aside(nn.Module):
    """Gives what the next block makes use of, and of the last one nobody: there are no gradients then."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.aside = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.up(x * y).tanh(), self.aside(y)


class Asides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Aside() for _ in range(2))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        y = x
        for block in self.blocks:
            x, y = block(x, y)
        return SimpleNamespace(loss=x.square().mean())


def test_no_gradients_of_outputs_that_nobody_uses() -> None:
    torch.manual_seed(0)
    net = Asides().double()
    start = copy.deepcopy(net)
    losses, values, _ = trained(copy.deepcopy(net), {"data": 1}, False)
    with pytest.warns(UserWarning, match="outputs that are trained"):
        given, found, _ = trained(net, {"data": 1}, Counting())
    assert given == losses and all(torch.equal(found[name], x) for name, x in values.items())
    assert torch.equal(values["blocks.1.aside.weight"], start.blocks[1].aside.weight)  # not decayed


class Score(nn.Module):
    """Gives what came, and a score of it that nobody makes use of: only the first block's is."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.score = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x + self.up(x).tanh(), self.score(x)


class Scores(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Score() for _ in range(2))

    def forward(self, x: torch.Tensor) -> SimpleNamespace:
        x, first = self.blocks[0](x)
        x, _ = self.blocks[1](x)
        return SimpleNamespace(loss=(x.square() + first.sin()).mean())


def scores(rank: int, world: int) -> None:
    """Graphs whose outputs hang on different parameters give no gradients of zero."""
    torch.manual_seed(0)
    start = Scores().double()
    for plan in (*PLANS, {"tensor": 2, "recompute": "full"}):
        losses, values, _ = trained(copy.deepcopy(start), plan, False)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message=".*as it is written")
            given, found, _ = trained(copy.deepcopy(start), plan, "aot_eager")
        assert max(abs(a - b) for a, b in zip(losses, given, strict=True)) < TOLERANCE
        assert all((found[name] - x).abs().max() < TOLERANCE for name, x in values.items()), plan
        unused = "blocks.1.score.weight"
        assert torch.equal(found[unused], start.state_dict()[unused])  # not decayed


def test_outputs_that_hang_on_different_parameters(ranks: Any) -> None:
    ranks(2, scores)


def test_one_graph_or_an_error() -> None:
    mesh = espalier.Mesh.single(("data",))
    block = Block(0, looks=True).double()
    with pytest.raises(RuntimeError, match="reads a tensor's value"):
        espalier.compile(block, backend="eager")(espalier.distribute_tensor(rows(0), mesh))


def experts(rank: int, world: int) -> None:
    ids = torch.randint(0, 20, (4, 8), generator=torch.Generator().manual_seed(3))
    sizes = {"vocab_size": 20, "hidden": 12, "heads": 2, "kv_heads": 1, "layers": 2, "max_positions": 8}
    for plan in ({"data": 2, "expert": 2}, {"data": 2, "zero": 3}):
        losses = []
        for backend in (False, Counting()):
            torch.manual_seed(0)
            net = build("moe", {**sizes, "ffn": 8, "experts": 3, "top_k": 2, "shared": 1}).double()
            optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
            engine = espalier.initialize(net, optimizer, plan, compile=backend)
            losses.append([engine.train_step({"input_ids": ids, "labels": ids}).item() for _ in range(3)])
        assert max(abs(a - b) for a, b in zip(*losses, strict=True)) < TOLERANCE
        assert isinstance(backend, Counting) and backend.count == 1  # attention, of both blocks
    net = build("moe", {**sizes, "ffn": 8, "experts": 3, "top_k": 2, "shared": 1})
    with pytest.warns(UserWarning, match="run as they are written.*beside experts"):
        espalier.initialize(net, None, {"data": 2, "recompute": "selective"}, compile=Counting())


def test_blocks_with_experts_have_their_attention_compiled(ranks: Any) -> None:
    ranks(2, experts)
