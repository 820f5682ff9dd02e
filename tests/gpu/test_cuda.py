"""One NCCL rank: random values are the CPU's, and training follows the CPU's in float64."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn

import espalier
from espalier import DTensor, Mesh, Replicate, Shard, distribute_tensor
from espalier.device import accelerator
from espalier.mesh.process import finish, start
from espalier.models import build
from tests.ranks import habits as loops
from tests.ranks import habits_of_functions, habits_of_optimizers
from tests.ranks import test_habits as habits
from tests.ranks.habits import TOLERANCE, as_it_is, numbers

SIZES = {"vocab_size": 37, "hidden": 24, "heads": 4, "kv_heads": 2, "layers": 2, "max_positions": 16}


@pytest.fixture(scope="module", autouse=True)
def nccl() -> Iterator[None]:
    """A world of one rank on the first device."""
    kept = {name: os.environ.pop(name) for name in ("RANK", "WORLD_SIZE") if name in os.environ}
    start("cuda")
    assert "nccl" in dist.get_backend()
    yield
    finish()
    os.environ.update(kept)


DRAWS: dict[str, Callable[[DTensor], torch.Tensor]] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "rand_like": torch.rand_like,
    "uniform_": lambda x: x.uniform_(-1, 3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "random_": lambda x: x.random_(3, 9),
    "randn_like": torch.randn_like,
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, 0.5, 1.0, -1.0, 1.0),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=1.0),
}
EXACT = {"dropout", "rand_like", "bernoulli_", "random_"}


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", DRAWS)
def test_random_values_are_those_of_the_cpu(name: str, dtype: torch.dtype) -> None:
    if dtype is torch.bfloat16 and name == "trunc_normal_":
        pytest.skip("erfinv_ near its ends magnifies the rounding of bfloat16")
    found = []
    for mesh in (Mesh.single(("data",), "cpu"), Mesh.single(("data",), "cuda")):
        torch.manual_seed(7)
        x = espalier.ones(64, 33, device_mesh=mesh, placements=[Shard(0)], dtype=dtype)
        out = DRAWS[name](x)
        assert isinstance(out, DTensor) and out.device.type == mesh.device_type
        found.append((out.full_tensor().cpu(), torch.rand(2)))
    (ours, after), (theirs, after_too) = found
    assert torch.equal(after, after_too), "as many keys were drawn"
    if name in EXACT:
        assert torch.equal(ours, theirs)
    else:
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("dtype", "near"), [(torch.float32, 1e-4), (torch.bfloat16, 5e-2)], ids=str)
def test_attention_drops_what_the_cpu_drops(dtype: torch.dtype, near: float, masked: bool) -> None:
    """By a kernel of our own, which holds no scores; grouped queries, causal or in a window."""
    torch.manual_seed(2)
    whole = [torch.randn(2, heads, 100, 64).to(dtype) for heads in (4, 2, 2)]
    apart = torch.arange(100).unsqueeze(1) - torch.arange(100)
    window = (apart >= 0) & (apart < 30) if masked else None
    found = []
    for kind, compute in (("cpu", torch.float32), ("cuda", dtype)):
        mesh = Mesh.single(("data",), kind)
        xs = [distribute_tensor(x.to(kind, compute), mesh, [Replicate()]).requires_grad_() for x in whole]
        seen = None if window is None else distribute_tensor(window.to(kind), mesh, [Replicate()])
        torch.manual_seed(7)
        out = F.scaled_dot_product_attention(
            *xs, attn_mask=seen, dropout_p=0.2, is_causal=not masked, enable_gqa=True
        )
        out.float().square().mean().backward()
        grads = [x.grad for x in xs]
        found.append([espalier.full_tensor(x).detach().float().cpu() for x in (out, *grads) if x is not None])
    assert len(found[0]) == 4
    for ours, theirs in zip(*found, strict=True):
        assert (ours - theirs).norm() <= near * theirs.norm()


def test_a_key_from_a_cuda_generator_is_refused() -> None:
    with pytest.raises(ValueError, match="CPU generator"):
        espalier.rand(3, device_mesh=Mesh.single(("data",), "cuda"), generator=torch.Generator("cuda"))


def batch(seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    ids, labels = (torch.randint(0, SIZES["vocab_size"], (4, 12), generator=generator) for _ in range(2))
    return {"input_ids": ids, "labels": labels}


@pytest.mark.parametrize("options", [{}, {"foreach": True}, {"fused": True}], ids=str)
def test_training_follows_the_cpu(options: dict[str, bool]) -> None:
    torch.manual_seed(1)
    plain = build("gpt", SIZES).double()
    net = copy.deepcopy(plain).cuda()
    theirs = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    ours = torch.optim.AdamW(net.parameters(), lr=1e-2, **options)  # type: ignore[arg-type]
    engine = espalier.initialize(net, ours, {"data": 1, "tensor": 1}, max_grad_norm=0.5)
    assert engine.mesh.device_type == "cuda"
    for step in range(3):
        data = batch(step)
        expected = plain(**data).loss
        expected.backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        theirs.step()
        theirs.zero_grad()
        loss = engine.train_step({name: x.cuda() for name, x in data.items()})
        assert abs(loss.item() - expected.item()) < 1e-9
    for p, q in zip(net.parameters(), plain.parameters(), strict=True):
        assert p.device.type == "cuda"
        torch.testing.assert_close(espalier.full_tensor(p).cpu(), q, atol=1e-9, rtol=0)


def trained(mesh: Mesh, data: Any) -> list[torch.Tensor]:
    """Steps on DTensors directly, with dropout."""
    torch.manual_seed(5)
    net = nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Dropout(0.3), nn.Linear(16, 2)).double()
    for module, placement in ((net[0], Shard(0)), (net[3], Replicate())):
        for name, p in list(module.named_parameters()):
            setattr(module, name, distribute_tensor(p, mesh, [placement]))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    losses = []
    for _ in range(3):
        loss = net(distribute_tensor(data, mesh, [Shard(0)])).square().mean()
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.full_tensor().detach().cpu())
    return losses


def test_dropout_trains_as_on_the_cpu() -> None:
    data = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    found = [trained(Mesh.from_env({"data": 1}, kind), data) for kind in ("cuda", "cpu")]
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, atol=1e-9, rtol=0)


AWAY: dict[str, Any] = {"offload": {"states": "host"}}
ALL_AWAY: dict[str, Any] = {"offload": dict.fromkeys(("states", "gradients", "parameters"), "host")}


def apart_on(kind: str, program: Any, plan: dict[str, Any], patch: pytest.MonkeyPatch) -> float:
    """How far a program by a plan, all on a device of this type, is from plain torch's on the CPU."""
    before, on_cpu, draw = torch.get_default_dtype(), habits.batch, torch.Tensor.uniform_

    def moved(step: int) -> tuple[torch.Tensor, ...]:
        """Drawn on the CPU: where another device is the default one, its generator would have to draw."""
        with torch.device("cpu"):
            return tuple(x.to(kind) for x in on_cpu(step))

    def drawn(x: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        """A device has a generator of its own, which gives other numbers."""
        return x.copy_(draw(torch.empty(x.shape, dtype=x.dtype, device="cpu"), *args, **kwargs))

    torch.set_default_dtype(torch.float64)
    try:
        torch.manual_seed(0)
        expected = numbers(program(as_it_is))
        torch.manual_seed(0)
        for module in (habits, habits_of_functions, habits_of_optimizers, loops):  # each has it
            patch.setattr(module, "batch", moved)
        patch.setattr(torch.Tensor, "uniform_", drawn)
        with torch.device(kind):
            found = program(partial(espalier.prepare, plan=plan))
        given = numbers([espalier.full_tensor(torch.as_tensor(v)).detach().cpu() for v in found])
    finally:
        torch.set_default_dtype(before)
        patch.undo()
    return float((given - expected).abs().max())


@pytest.mark.parametrize("program", habits.PROGRAMS, ids=lambda program: program.__name__)
@pytest.mark.parametrize("plan", [{}, AWAY, ALL_AWAY], ids=["", "states away", "all away"])
@pytest.mark.filterwarnings("ignore")
def test_habits(monkeypatch: pytest.MonkeyPatch, program: Any, plan: dict[str, Any]) -> None:
    """What programs do around a prepared model; their tensors are made on the device, by the CPU's draws."""
    if plan and program is habits.optimizers_around_others:
        pytest.skip("it has an optimizer update stand-ins of what it holds")
    if plan is ALL_AWAY and program in habits.OF_DATA:
        pytest.skip("beside tensors of the device it computes with p.data, which is in the host's memory")
    assert apart_on(accelerator() or "cuda", program, plan, monkeypatch) < TOLERANCE


def test_saved_beside_training_with_the_stream_of_the_device(tmp_path: Path) -> None:
    """An asynchronous save is of its step though updates follow, and the device's own draws go on."""
    torch.manual_seed(1)
    net = build("gpt", SIZES).cuda()
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters(), lr=1e-2), {"data": 1})
    data = [{name: x.cuda() for name, x in batch(step).items()} for step in range(4)]
    engine.train_step(data[0])
    for _ in range(2):
        before = {name: x.clone() for name, x in engine.full_state_dict().items()}
        engine.save(tmp_path, asynchronous=True)
        drawn = torch.rand(5, device="cuda")
        losses = [engine.train_step(x).item() for x in data[1:]]
        engine.wait_saved()
        engine.load(tmp_path)
        assert all(torch.equal(x, before[name]) for name, x in engine.full_state_dict().items())
        assert torch.equal(torch.rand(5, device="cuda"), drawn)
        again = [engine.train_step(x).item() for x in data[1:]]
        assert max(abs(a - b) for a, b in zip(again, losses, strict=True)) < 1e-4
