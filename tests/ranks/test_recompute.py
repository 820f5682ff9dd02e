"""Activation recomputation: exact under every plan, and memory as it should be."""

from __future__ import annotations

import copy
import warnings
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy

import espalier
from espalier.blocks import blocks
from espalier.engine.recompute import chosen, recompute
from espalier.engine.selective import keep_products
from espalier.models import build
from espalier.tensor.dispatch import forget
from espalier.tensor.live_memory import LiveMemory
from tests.ranks.test_engine import SIZES, TOLERANCE, apart, batch, model

PER_BLOCK = {"blocks.0": "none", "blocks.*": "full"}
PLANS: list[dict[str, Any]] = [
    {"recompute": "none"},
    {"recompute": "full"},
    {"recompute": "full", "recompute_inputs": "sharded"},
    {"recompute": "full", "recompute_inputs": "host"},
    {"recompute": "selective"},
    {"recompute": PER_BLOCK},
]


def trained(plan: dict[str, Any], kind: str, rows: int) -> Any:
    """Losses and parameters after two steps, and how often a Linear of each block was called."""
    net = model(kind, dropout=0.2)
    calls: Counter[str] = Counter()
    for name, block in blocks(net).items():
        first = next(m for m in block.modules() if isinstance(m, nn.Linear))
        first.register_forward_pre_hook(lambda *_, name=name: calls.update([name]))
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan, max_grad_norm=0.5)
    torch.manual_seed(5)
    losses = [engine.train_step(batch(rows, s)).item() for s in range(2)]
    return losses, [espalier.full_tensor(p).detach() for p in net.parameters()], calls


def alone(rank: int, world: int, kind: str, rows: int) -> Any:
    return trained({}, kind, rows)


def exact(rank: int, world: int, axes: dict[str, int], kind: str, rows: int, expected: Any) -> None:
    warnings.filterwarnings("ignore", "A global batch of")
    for zero, plans in ((0, PLANS[1:6:2]), (3, PLANS[2:6])):
        for how in plans:
            losses, parameters, calls = trained({**axes, "zero": zero, **how}, kind, rows)
            assert losses == pytest.approx(expected[0], abs=TOLERANCE), (zero, how)
            for p, q in zip(parameters, expected[1], strict=True):
                assert (p - q).abs().max() < TOLERANCE, (zero, how)
            assert calls == {"blocks.0": 2 if how["recompute"] == PER_BLOCK else 4, "blocks.1": 4}


# of three rows the last of four ranks has none
@pytest.mark.parametrize(
    ("axes", "kind", "rows"),
    [({"data": 2}, "gpt", 6), ({"data": 2, "tensor": 2}, "gpt2", 6), ({"data": 4}, "gpt", 3)],
    ids=str,
)
def test_recomputed_equals_one_process(ranks: Any, axes: dict[str, int], kind: str, rows: int) -> None:
    expected = ranks(1, alone, kind, rows)[0]
    ranks(espalier.Plan.from_dict(axes).world_size, exact, axes, kind, rows, expected)


def small(kind: str, layers: int) -> nn.Module:
    torch.manual_seed(0)
    return build(kind, {**SIZES[kind], "hidden": 32, "layers": layers, "max_positions": 64})


def tokens(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.zeros(rows, 64, dtype=torch.int64)
    return {"input_ids": ids, "labels": ids}


def kept(rank: int, world: int, axes: dict[str, Any]) -> list[float]:
    """What a further block adds to the memory held after the forward pass, in elements of its input."""
    found = []
    for how in PLANS[:5]:
        held = []
        for layers in (1, 2):
            net = small("gpt", layers)
            engine = espalier.initialize(net, None, {**axes, **how})
            engine(tokens(4))  # so that what is made once is there
            memory = LiveMemory()
            for p in net.parameters():
                memory.hold(p)
            before = memory.now
            with memory:
                loss = engine(tokens(4))
                held.append(memory.now - before)
            del loss
        found.append((held[1] - held[0]) / (4 // axes["data"] * 64 * 32 * 4))
    return found


def test_memory_of_a_block(ranks: Any) -> None:
    none, full, sharded, host, selective = ranks(4, kept, {"data": 2, "tensor": 2})[0]
    assert full == pytest.approx(1, rel=0.1) and sharded == pytest.approx(0.5, rel=0.2)
    assert host < 0.1, "nothing of it is on the device"
    assert full < selective < 0.7 * none, (full, selective, none)


def dry(plan: dict[str, Any]) -> espalier.DryReport:
    with torch.device("meta"):
        net, data = small("gpt", 4), tokens(32)
    return espalier.dry_run(net, plan, data, optimizer=torch.optim.SGD(net.parameters()))


@pytest.mark.parametrize("zero", [0, 3])
def test_peaks_of_a_step(zero: int) -> None:
    none, full, sharded, host, selective = (
        dry({"data": 2, "tensor": 2, "zero": zero, **how}) for how in PLANS[:5]
    )
    peaks = [r.peak_bytes for r in (none, selective, full)]
    assert peaks == sorted(peaks, reverse=True) and peaks[2] < 0.6 * peaks[0], peaks
    assert sharded.peak_bytes < full.peak_bytes and host.peak_bytes < full.peak_bytes
    assert none.flops == selective.flops < full.flops  # no product is computed twice, nor an attention
    assert 1.25 < full.flops / none.flops < 4 / 3


def ledgers(rank: int, world: int, plan: dict[str, Any]) -> Any:
    net = small("gpt", 2)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters()), plan)
    engine.train_step(tokens(4))
    with espalier.ledger(engine.mesh) as book:
        engine.train_step(tokens(4))
    with torch.device("meta"):
        twin, data = small("gpt", 2), tokens(4)
    report = espalier.dry_run(
        twin, plan, data, optimizer=torch.optim.SGD(twin.parameters()), coordinate=engine.mesh.coordinate
    )
    return book.entries, report.ledger.entries


@pytest.mark.parametrize("how", [PLANS[2], PLANS[4]], ids=str)
def test_ledger_equals_dry_run(ranks: Any, how: dict[str, str]) -> None:
    for real, foretold in ranks(4, ledgers, {"data": 2, "tensor": 2, "zero": 3, **how}):
        assert real == foretold


def policies(rank: int, world: int) -> None:
    seen: Counter[Any] = Counter()

    def policy(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        if op is torch.ops.aten.mm.default:
            seen[tuple(args[0].shape), tuple(args[1].shape)] += 1
        return keep_products(ctx, op, *args, **kwargs)

    net = model("gpt", hidden=32)
    plain = copy.deepcopy(net)
    plan = {"data": 2, "tensor": 2, "recompute": "selective"}
    engine = espalier.initialize(net, None, plan, recompute_policy=policy)
    engine.backward(engine(batch(4)))
    engine.finish_gradients()
    plain(**batch(4)).loss.backward()
    assert apart(net, plain, gradients=True) < TOLERANCE
    # two rows of 12 positions, and half of the hidden features of each half of the MLP: what is local
    assert seen[(24, 32), (32, 44)] == 4 and seen[(24, 44), (44, 32)] == 2, seen
    copied = copy.deepcopy(net.blocks[0])  # type: ignore[index]
    assert copied.forward.__self__ is copied


def test_a_policy_of_ones_own_sees_local_operations(ranks: Any) -> None:
    ranks(4, policies)


class Gates(nn.Module):
    """Blocks whose products are written to: by torch's own recurrent layers, and by what comes after them."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.lstm, self.gru = nn.LSTM(8, 12, 2, batch_first=True), nn.GRU(12, 12, batch_first=True)
        self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)
        self.out = nn.Linear(12, 20)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x, _ = self.lstm(self.embed(tokens))
        lengths = torch.arange(tokens.shape[0]) % 3 + 4
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, _ = nn.utils.rnn.pad_packed_sequence(self.gru(packed)[0], batch_first=True, total_length=6)
        y = y + x
        y += 1
        z = self.down(self.up(y).relu_())
        z.mul_(0.5).add_(y)
        return self.out(z)


def written(rank: int, world: int, plans: list[dict[str, Any]]) -> list[torch.Tensor]:
    ends = []
    for plan in plans:
        torch.manual_seed(0)
        net = Gates().double()
        engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), 0.5), plan)
        for step in range(3):
            tokens = torch.randint(0, 20, (6, 6), generator=torch.Generator().manual_seed(step))
            engine.backward(
                nn.functional.cross_entropy(engine.outputs(tokens).flatten(0, 1), tokens.flatten())
            )
            engine.step()
        ends.append(torch.cat([espalier.full_tensor(p).detach().flatten() for p in net.parameters()]))
    return ends


@pytest.mark.filterwarnings("ignore:lstm has no sharding rule", "ignore:gru has no sharding rule")
@pytest.mark.filterwarnings("ignore:.*_pack_padded_sequence has no sharding rule")
def test_products_that_are_written_to_are_computed_again(ranks: Any) -> None:
    """Torch's selective checkpointing gives what was written in their place, in silence, or refuses."""
    expected, selective = ranks(1, written, [{}, {"recompute": "selective"}])[0]
    plans = [{"data": 2, "zero": zero, "recompute": "selective"} for zero in (0, 3)]
    for end in (selective, *ranks(2, written, plans)[0]):
        assert (end - expected).abs().max() < TOLERANCE


class Swapped(nn.Module):
    """Whose two layers change their places with each call."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = [nn.Linear(4, 4), nn.Linear(4, 6)]
        self.lines = nn.ModuleList(self.layers)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        ends = [line(x).tanh().sum() for line in self.layers]
        object.__setattr__(self, "layers", self.layers[::-1])
        return ends[0] + ends[1]


def test_a_block_that_does_something_else_the_second_time_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    net = nn.Sequential(Swapped())
    monkeypatch.setattr("espalier.tensor.before.Before.swap", lambda self: lambda: None)  # knows of it
    recompute(net, {"0": "selective"}, "whole")
    with pytest.raises(RuntimeError, match=r"leave this block out of recompute"):
        net(torch.randn(4, 4)).backward()


def hugging_face(rank: int, world: int) -> None:
    import transformers as hf

    for kind in ("gpt2", "bamba", "llama"):
        torch.manual_seed(0)
        if kind == "gpt2":
            config: Any = hf.GPT2Config(vocab_size=37, n_embd=24, n_layer=2, n_head=4, n_positions=16)
        elif kind == "bamba":  # states, with other methods than keys and values have
            config = hf.BambaConfig(
                vocab_size=37, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, attn_layer_indices=[1],
                mamba_n_heads=4, mamba_d_head=12, mamba_d_state=8, mamba_n_groups=1, mamba_chunk_size=4,
            )  # fmt: skip
        else:
            config = hf.LlamaConfig(
                vocab_size=37, hidden_size=24, intermediate_size=32, num_hidden_layers=2,
                num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=16,
            )  # fmt: skip
        net = hf.AutoModelForCausalLM.from_config(config).double()
        expected: Any = None
        for how in ({"recompute": "none"}, {"recompute": "full"}, {"recompute": "selective"}):
            twin = copy.deepcopy(net)
            engine = espalier.initialize(twin, None, {"data": 2, "zero": 3, **how})
            data = batch(4)
            data["labels"] = data["input_ids"]
            torch.manual_seed(7)
            loss = engine({**data, "use_cache": True})
            engine.backward(loss)
            engine.finish_gradients()
            found = [loss.detach(), *(espalier.full_tensor(p.grad) for p in twin.parameters())]
            expected = expected or found
            for a, b in zip(found, expected, strict=True):
                assert (a - b).abs().max() < TOLERANCE, (kind, how)


def test_hugging_face_blocks_with_caches(ranks: Any) -> None:
    ranks(2, hugging_face)


class Filled:
    """A cache that is written to in place."""

    def __init__(self) -> None:
        self.sums = torch.zeros(8)

    def get_seq_length(self) -> int:
        return 0

    def update(self, x: torch.Tensor) -> None:
        self.sums.add_(x.sum(0))


class Caching(nn.Linear):
    """Hangs on what its cache held."""

    def forward(self, x: torch.Tensor, cache: Filled) -> torch.Tensor:  # type: ignore[override]
        out = super().forward(x) + cache.sums
        cache.update(x.detach())
        return out.tanh()


def test_a_cache_that_is_not_empty_and_is_written_to_in_place_is_refused() -> None:
    net = nn.ModuleList([Caching(8, 8)])
    recompute(net, {"0": "full"}, "whole")
    with pytest.raises(ValueError, match=r"Filled held already.*use_cache=False"):
        net[0](torch.randn(4, 8), Filled())


class Keeps(nn.Module):
    """Writes to buffers in its forward: statistics of batches, and vectors on which its output hangs."""

    def __init__(self) -> None:
        super().__init__()
        self.lin = nn.utils.parametrizations.spectral_norm(nn.Linear(8, 8))
        self.norm, self.drop = nn.BatchNorm1d(8), nn.Dropout(0.1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.drop(self.norm(torch.tanh(self.lin(x))))


def buffers(rank: int, world: int, plan: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Sequential(Keeps(), Keeps()), nn.Linear(8, 1)).double()
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = espalier.initialize(net, sgd, plan, loss_fn=nn.functional.mse_loss)
    torch.manual_seed(3)
    data = [torch.randn(6, 8).double() for _ in range(4)]
    with torch.device("cpu"):  # a mode: not what records a program
        losses = [engine.train_step((x, x.sum(1, keepdim=True))).item() for x in data]
    return losses, {k: v.tolist() for k, v in engine.full_state_dict().items()}


def test_buffers_are_written_once(ranks: Any) -> None:
    """What is computed again finds them as the first time, and leaves them as they are."""
    for world, plan in ((1, {}), (2, {"data": 2})):
        expected = ranks(world, buffers, plan)
        assert any("running_mean" in name for name in expected[0][1])
        for how in ({"recompute": "full"}, {"recompute": "selective", "recompute_inputs": "host"}):
            assert ranks(world, buffers, {**plan, **how}) == expected, (world, how)


class Gate(nn.Module):
    """Computes with what others have put into it."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Linear(8, 8)
        self.scale: torch.Tensor = torch.ones(())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.sin(self.last(x)) * self.scale.sin()


class Lent(nn.Module):
    """Blocks that are called several times before one backward pass, each time with other weights."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8)) for _ in "ab")
        nn.utils.parametrizations.weight_norm(self.blocks[1][0])
        self.gates = nn.ModuleList([Gate()])
        self.maker = nn.Linear(8, 64)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        (gate,) = self.gates
        for step in (1.0, 0.5, 0.25):
            for block in self.blocks:
                weights = {name: p * step for name, p in block.named_parameters()}
                x = x + torch.func.functional_call(block, weights, (x,))
            gate.scale = x.square().mean() + step
            made = {"last.weight": self.maker(x).mean(0).view(8, 8)}
            x = torch.func.functional_call(gate, made, (x,))
            own = gate.last._parameters.pop("bias")
            gate.last.bias = x.mean(0)
            x = gate(x)
            del gate.last.bias
            gate.last._parameters["bias"] = own
        return x.square().mean()


def lent(rank: int, world: int, plan: dict[str, Any]) -> Any:
    torch.manual_seed(0)
    net = Lent().double()
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    torch.manual_seed(3)
    losses = [engine.train_step((torch.randn(6, 8).double(),)).item() for _ in range(3)]
    return losses, {k: v.tolist() for k, v in engine.full_state_dict().items()}


def test_blocks_are_computed_again_with_the_weights_they_were_lent(ranks: Any) -> None:
    for world, plan in ((1, {}), (2, {"data": 2}), (2, {"data": 2, "zero": 3})):
        (losses, state), (right, at_end) = (
            ranks(world, lent, {**plan, **how})[0] for how in ({"recompute": "full"}, {})
        )
        assert losses == pytest.approx(right, rel=0, abs=1e-14), plan
        assert state.keys() == at_end.keys()
        for name, x in state.items():
            assert (torch.tensor(x) - torch.tensor(at_end[name])).abs().max() < 1e-14, (plan, name)


class Slid(nn.Module):
    """Windows whose shapes a rule asks of torch, when it sees a call for the first time."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.slide, self.norm = nn.Conv2d(4, 4, 3, padding=1, bias=bias), nn.GroupNorm(2, 4)
        self.back = nn.ConvTranspose2d(4, 4, 3, padding=1, bias=bias)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.back(self.norm(self.slide(x)).relu())


def test_what_rules_try_is_not_kept() -> None:
    for bias in (False, True):
        torch.manual_seed(0)
        start = nn.Sequential(Slid(bias), Slid(bias), nn.Flatten(1), nn.Linear(64, 3)).double()
        data = torch.randn(6, 4, 4, 4, dtype=torch.float64), torch.tensor([0, 1, 2, 0, 1, 2])
        found = []
        for how in ("selective", "none"):
            forget()
            net = copy.deepcopy(start)
            optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
            plan = {"recompute": how}
            engine = espalier.initialize(net, optimizer, plan, loss_fn=nn.functional.cross_entropy)
            found.append([engine.train_step(data).item() for _ in range(3)])
        assert found[0] == found[1]


def test_patterns_that_match_nothing() -> None:
    mesh = espalier.Mesh.dry({"data": 2, "tensor": 1})
    with pytest.raises(ValueError, match=r"'block\.1' matches no block; close: blocks\.1"):
        espalier.initialize(model(), None, {"data": 2, "recompute": {"block.1": "full"}}, mesh=mesh)
    with pytest.raises(ValueError, match=r"recompute = 'half': expected \"none\", \"full\", \"selective\""):
        espalier.Plan(recompute="half")
    with pytest.raises(ValueError, match="recompute_inputs = 'disk'"):
        espalier.Plan(recompute_inputs="disk")


@pytest.mark.parametrize("inputs", ["host", "sharded"])
def test_kept_inputs_lie_in_memory_as_they_did(inputs: str) -> None:
    """Images become tokens by a transposition: a block that finds them otherwise does other operations."""
    sizes = {"image": 8, "patch": 4, "hidden": 24, "heads": 4, "layers": 2, "classes": 5}
    flops = []
    for how in ("whole", inputs):
        with torch.device("meta"):
            net = build("vit", sizes)
            data = {"pixel_values": torch.empty(12, 3, 8, 8), "labels": torch.empty(12, dtype=torch.int64)}
        plan = {"tensor": 4, "tensor_mode": "2d" if inputs == "host" else "1d", "recompute": "selective"}
        flops.append(espalier.dry_run(net, {**plan, "recompute_inputs": how}, data).flops)
    assert flops[0] == flops[1]


class Stage(nn.Module):
    def __init__(self, inner: int, outer: int) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv2d(inner, outer, 3, padding=1), nn.BatchNorm2d(outer)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(nn.functional.gelu(self.norm(self.conv(x))).square())


class Staged(nn.Module):
    """Blocks beside each other, in no list, as a U-Net is written down."""

    def __init__(self) -> None:
        super().__init__()
        self.down, self.middle, self.up = Stage(3, 8), Stage(8, 8), Stage(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.up(self.middle(self.down(x))) - x).square().mean()


class Coded(nn.Module):
    """Sequences of single layers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder, self.decoder = (
            nn.Sequential(
                nn.Flatten(), nn.Linear(192, 192), nn.GELU(), nn.LayerNorm(192), nn.Linear(192, 192)
            )
            for _ in range(2)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.decoder(torch.tanh(self.encoder(x))) - x.flatten(1)).square().mean()


class Wrapper(nn.Module):
    """One model within another, as who adds a loss does."""

    def __init__(self) -> None:
        super().__init__()
        self.net = Staged()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x) * 2


class Counted(nn.Module):
    """Goes by what its layers have counted in arrays."""

    class Layer(nn.Linear):
        def __init__(self) -> None:
            super().__init__(192, 192)
            self.calls = np.zeros(2)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.calls[1] += 1
            return torch.tanh(super().forward(x) / self.calls[1])

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = self.Layer(), self.Layer()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (self.last(self.first(x.flatten(1))) - x.flatten(1)).square().mean()


UNLISTED = {
    Staged: ["down", "middle", "up"],
    Coded: ["encoder", "decoder"],
    Wrapper: ["net.down", "net.middle", "net.up"],
}


def unlisted(rank: int, world: int, plan: dict[str, Any]) -> list[Any]:
    found = []
    for kind in (*UNLISTED, Counted):
        torch.manual_seed(0)
        net = kind().double()
        engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
        losses = [engine.train_step((torch.randn(4, 3, 8, 8, dtype=torch.float64),)).item() for _ in range(3)]
        found.append((losses, {k: v.tolist() for k, v in engine.full_state_dict().items()}))
    return found


def test_a_model_without_a_list_is_recomputed_by_its_children(ranks: Any) -> None:
    (expected,) = ranks(1, unlisted, {})
    for plan in ({"data": 2, "zero": 3}, {"data": 2}, {"pipe": 2}):
        for (losses, state), (right, at_end) in zip(
            ranks(2, unlisted, {**plan, "recompute": "full"})[0], expected, strict=True
        ):
            assert losses == pytest.approx(right, abs=TOLERANCE), plan
            for name, x in state.items():
                torch.testing.assert_close(
                    torch.tensor(x), torch.tensor(at_end[name]), rtol=0, atol=TOLERANCE
                )


def test_what_is_recomputed_of_models_without_lists_takes_no_memory() -> None:
    for kind, names in UNLISTED.items():
        peaks = []
        for how in ("none", "full"):
            with torch.device("meta"):
                net, x = kind(), torch.empty(2048, 3, 8, 8)
            peaks.append(espalier.dry_run(net, {"recompute": how}, (x,)).peak_bytes)
        assert peaks[1] < 0.8 * peaks[0], (kind, peaks)
        assert list(chosen(kind(), espalier.Plan(recompute="full"))) == names
    assert list(chosen(nn.Linear(2, 2), espalier.Plan(recompute="full"))) == [""]
    assert chosen(Coded(), espalier.Plan(recompute={"encoder": "full"})) == {"encoder": "full"}
    inner = chosen(Coded(), espalier.Plan(recompute={"encoder*": "full"}))
    assert list(inner) == ["encoder.1", "encoder.3", "encoder.4"]
    called = nn.Module()  # by itself: a ModuleList is not called, its layers are
    called.embed, called.layers = nn.Embedding(5, 6), nn.ModuleList([nn.LSTM(6, 6), nn.LSTM(6, 6)])
    assert list(chosen(called, espalier.Plan(recompute="full"))) == ["layers.0", "layers.1"]
    called.encoder = Coded()
    names = list(chosen(called, espalier.Plan(recompute="full")))
    assert names == ["embed", "encoder", "layers.0", "layers.1"]
