"""Models that are built without memory, each rank's part at once: the values of a plain constructor."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import espalier
from espalier.models import build
from espalier.tensor import DTensor
from tests.ranks.test_engine import SIZES, batch


class Odd(nn.Module):
    """Initial values that are computed, asked for, shared, cut from others, and drawn again."""

    def __init__(self) -> None:
        super().__init__()
        self.rates = [x.item() for x in torch.linspace(0, 0.5, 3)]
        self.scales = torch.linspace(0, 1, 3).tolist()
        self.a, self.b = nn.Linear(6, 10), nn.Linear(10, 6)
        self.embed = nn.Embedding(10, 6, padding_idx=2)
        self.kernel = nn.Parameter(torch.Tensor(6, 6))
        self.heat = nn.Parameter(torch.tensor([0.5, self.rates[1]]))
        self.b.weight = nn.Parameter(self.a.weight.detach().t().clone())
        nn.init.orthogonal_(self.a.weight)
        nn.init.trunc_normal_(self.embed.weight, std=0.8, a=-0.9, b=0.9)  # draws again until all are inside
        nn.init.dirac_(self.kernel.unsqueeze(-1))
        with torch.no_grad():
            self.kernel[1:3].uniform_().mul_(self.scales[1])
            self.kernel.add_(torch.eye(6) * self.embed.weight.mean())
            self.a.bias.copy_(torch.randperm(10))
        self.register_buffer("noise", torch.randn(4))
        self.table = torch.arange(4.0)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.b(self.a(self.embed(x))) @ self.kernel * self.heat.sum()
        return (y * self.noise.sum()).square().mean() + self.table.sum()  # type: ignore[operator]


def hugging_face(kind: str) -> nn.Module:
    import transformers as hf

    if kind == "gpt2":
        config: Any = hf.GPT2Config(
            vocab_size=37, n_embd=24, n_layer=2, n_head=4, n_positions=16, bos_token_id=0, eos_token_id=0
        )
    else:
        config = hf.LlamaConfig(
            vocab_size=37, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
            num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
        )  # fmt: skip
    model: nn.Module = hf.AutoModelForCausalLM.from_config(config)
    return model


def sequential() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.ReLU(), nn.Linear(8, 5)).to(torch.bfloat16)


MAKERS: dict[str, Callable[[], nn.Module]] = {
    "gpt": lambda: build("gpt", SIZES["gpt"]),
    "gpt2": lambda: build("gpt2", {**SIZES["gpt2"], "tied": True}).double(),
    "sequential": sequential,
    "odd": Odd,
    "hf-gpt2": lambda: hugging_face("gpt2"),
    "hf-llama": lambda: hugging_face("llama").to(torch.float64),
}


def sample(kind: str) -> Any:
    if kind == "sequential":
        return (torch.randn(4, 6, dtype=torch.bfloat16, generator=torch.Generator().manual_seed(0)),)
    return (torch.arange(8).view(2, 4) % 10,) if kind == "odd" else batch(4)


def equal(rank: int, world: int) -> None:
    for kind, make in MAKERS.items():
        torch.manual_seed(3)
        plain = make()
        after = torch.get_rng_state()
        for zero in (0, 1, 2, 3) if kind in ("gpt", "odd") else (0, 3):
            torch.manual_seed(3 if kind == "odd" else 3 + rank)  # rank 0's counts
            with espalier.deferred():
                net = make()
            assert all(p.is_meta for p in net.parameters())
            optimizer = torch.optim.AdamW(net.parameters())
            held = [id(p) for p in net.parameters()]
            plan = {"data": 2, "tensor": 2, "zero": zero}
            engine = espalier.initialize(
                net,
                optimizer,
                plan,
                example=sample(kind),
                loss_fn=lambda out, _: getattr(out, "loss", out).mean(),
            )
            assert torch.equal(torch.get_rng_state(), after), kind
            assert [id(p) for p in net.parameters()] == held, "the optimizer holds them"
            assert all(isinstance(p, DTensor) and isinstance(p, nn.Parameter) for p in net.parameters())
            whole = engine.full_state_dict()
            assert list(whole) == list(plain.state_dict())
            for name, value in plain.state_dict().items():
                assert whole[name].dtype == value.dtype and torch.equal(whole[name], value), (
                    kind,
                    zero,
                    name,
                )
            if kind == "odd":
                assert torch.equal(net.table, plain.table), "an attribute"  # type: ignore[arg-type]
                assert net.rates == plain.rates
            if zero == 3:
                engine.train_step(sample(kind))
                assert all(not x.is_meta for x in (*net.parameters(), *net.buffers()))


def seeded_apart(rank: int, world: int) -> None:
    torch.manual_seed(rank)
    with espalier.deferred():
        net = nn.Sequential(Odd())
        torch.rand(()).item()  # torch 2.11's trunc_normal_ asks for nothing
    with pytest.raises(ValueError, match="Seed all ranks alike"):
        espalier.initialize(net, None, {"data": world})


def states(rank: int, world: int) -> None:
    losses = []
    for context in (nullcontext, espalier.deferred):
        torch.manual_seed(0)
        with context():
            net = build("gpt", SIZES["gpt"])
            optimizer = torch.optim.Adagrad(net.parameters(), lr=0.1, initial_accumulator_value=0.1)
        engine = espalier.initialize(net, optimizer, {"data": world, "zero": 2})
        losses.append([engine.train_step(batch(4)).item() for _ in range(2)])
    assert losses[0] == losses[1]
    with espalier.deferred():
        net = build("gpt", SIZES["gpt"])
    with pytest.raises(ValueError, match="Adagrad"):
        espalier.initialize(net, torch.optim.Adagrad(net.parameters()), {"data": world})


def test_states_that_an_optimizer_makes_at_once(ranks: Any) -> None:
    ranks(2, states)


def test_ranks_that_drew_other_values_are_told(ranks: Any) -> None:
    ranks(2, seeded_apart)


def test_values_are_those_of_a_plain_constructor(ranks: Any) -> None:
    ranks(4, equal)


class Memory(TorchDispatchMode):
    """The most bytes of real memory that lived at once."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._held: dict[int, Any] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            out = func(*args, **(kwargs or {}))
            for x in out if isinstance(out, tuple | list) else (out,):
                if isinstance(x, torch.Tensor) and not x.is_meta:
                    storage = x.untyped_storage()
                    self._held[storage._cdata] = weakref.ref(storage)
        living = [storage for ref in self._held.values() if (storage := ref()) is not None]
        self.peak = max(self.peak, sum(storage.nbytes() for storage in living))
        return out


def peaks(rank: int, world: int) -> tuple[int, int, int, int]:
    def make() -> nn.Module:
        return build("gpt", {**SIZES["gpt"], "hidden": 48, "layers": 6}).to(torch.float64)

    whole = sum(p.numel() for p in make().parameters()) * 8
    largest = max(p.numel() for p in make().parameters()) * 8
    memory = Memory()
    with memory:
        with espalier.deferred():
            net = make()
        built = memory.peak
        memory.peak = 0
        engine = espalier.initialize(net, None, {"data": 2, "tensor": 2, "zero": 3})
    assert engine
    return whole, largest, built, memory.peak


def test_memory_is_the_shards_and_a_parameter_or_two(ranks: Any) -> None:
    for whole, largest, built, peak in ranks(4, peaks):
        assert built == 0
        assert peak < 1.02 * whole / 4 + 2.5 * largest, (whole, largest)  # two of them, and one in float32


def test_what_cannot_be_recorded_is_told() -> None:
    mesh = espalier.Mesh.single({"data": 1, "tensor": 1})
    with torch.device("meta"):
        net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match=r"with espalier\.deferred\(\)"):
        espalier.initialize(net, None, {}, mesh=mesh)
    with espalier.deferred():
        net = nn.Linear(2, 2)
    nn.init.zeros_(net.bias)
    with pytest.raises(ValueError, match="was written to after"):
        espalier.initialize(net, None, {}, mesh=mesh)
    with espalier.deferred():
        net = nn.Linear(2, 2)
    with pytest.raises(ValueError, match="What casts or replaces them"):
        espalier.initialize(net.double(), None, {}, mesh=mesh)
    with pytest.raises(NotImplementedError, match="random state was set"), espalier.deferred():
        nn.Linear(2, 2)
        torch.manual_seed(1)
        nn.Linear(2, 2)
    x = torch.ones(2)
    with pytest.raises(NotImplementedError, match="holds memory already"), espalier.deferred():
        x.normal_()
