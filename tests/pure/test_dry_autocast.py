"""Autocast of tensors without data, against autocast on the CPU."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import espalier
from espalier.models import GPT, GPTConfig
from espalier.tensor.dry_autocast import DryAutocast, autocast_dtype


class Casts(TorchDispatchMode):
    """Notes what is cast."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default:
            self.seen.append((tuple(out.shape), args[0].dtype, out.dtype))
        return out


class Twice(nn.Module):
    """Uses a parameter twice, and closes and opens autocast by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(torch.tanh(self.inner(x)))
        with torch.autocast("cpu", enabled=False):
            x = F.linear(x.float(), self.inner.weight)
        with torch.autocast("cpu", torch.get_autocast_dtype("cpu"), cache_enabled=False):
            return self.inner(x)


def joined(x: torch.Tensor) -> torch.Tensor:
    return torch.cat([x, x.to(torch.bfloat16)], -1).softmax(-1)


CASES: list[Callable[[], Callable[[torch.Tensor], torch.Tensor]]] = [
    Twice,
    lambda: nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.GELU(), nn.Linear(16, 4)),
    lambda: nn.Conv1d(8, 8, 3),
    lambda: joined,
    lambda: lambda x: torch.einsum("bij,bkj->bik", x, x).double() @ x.double().mT.transpose(1, 2)[:, :8],
]


def casts(case: int, device: str, low: torch.dtype) -> Any:
    """What is cast in forward and in backward, in any order, and what comes out."""
    with torch.device(device):
        net, x = CASES[case](), torch.zeros(4, 8, 16).requires_grad_()
    with DryAutocast() if device == "meta" else nullcontext(), Casts() as found:
        with torch.autocast("cpu", low):
            out = net(x)
            loss = F.mse_loss(out, torch.zeros_like(out))
        loss.backward()
    return Counter(found.seen), out.dtype, loss.dtype


@pytest.mark.parametrize("low", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", range(len(CASES)))
def test_casts_are_those_of_the_cpu(case: int, low: torch.dtype) -> None:
    real, dry = (casts(case, device, low) for device in ("cpu", "meta"))
    assert real == dry and real[0]


def test_nothing_is_left_behind() -> None:
    x = torch.zeros(2, 2, device="meta")
    cast = DryAutocast()
    with cast.autocast(torch.bfloat16), cast, DryAutocast():
        assert (x @ x).dtype is autocast_dtype("meta") is torch.bfloat16
    for _ in range(2):
        with torch.autocast("cpu", torch.bfloat16):
            assert autocast_dtype("meta") is None and (x @ x).dtype is torch.float32
        with pytest.raises(ZeroDivisionError), cast:
            raise ZeroDivisionError
    with cast:
        assert (x @ x).dtype is torch.float32


def test_copies_of_parameters_live_as_long_as_real_ones() -> None:
    plan = {"precision": "autocast-bfloat16", "recompute": "selective"}
    nets = []
    for device in ("cpu", "meta"):
        with torch.device(device):
            nets.append(GPT(GPTConfig(vocab_size=128, max_positions=64, layers=4, hidden=64, heads=4)))
    ids = torch.arange(256).view(4, 64) % 128
    engine = espalier.initialize(
        nets[0], torch.optim.AdamW(nets[0].parameters()), plan, example={"input_ids": ids, "labels": ids}
    )
    engine.train_step({"input_ids": ids, "labels": ids})
    watch = engine.watch()
    with watch:
        engine.train_step({"input_ids": ids, "labels": ids})
    optimizer, told = torch.optim.AdamW(nets[1].parameters()), {"input_ids": ids, "labels": ids}
    assert espalier.dry_run(nets[1], plan, told, optimizer=optimizer).peak_bytes == pytest.approx(
        watch.peak, rel=1e-3
    )


@pytest.mark.parametrize("plan", [{"zero": 3}, {"recompute": "full", "accumulate": 2}])
def test_casts_of_parameters_go_with_what_uses_them(plan: dict[str, Any]) -> None:
    """So a layer more adds nothing but its parts of parameters, gradients and states, and its input."""
    peaks = []
    for layers in (4, 8):
        with torch.device("meta"):
            net = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(layers)))
            x = torch.empty(32, 256)
        told = espalier.dry_run(
            net,
            {"data": 8, "precision": "autocast-bfloat16", "chunk_megabytes": 0.01, **plan},
            (x, x),
            optimizer=torch.optim.SGD(net.parameters()),
            loss_fn=F.mse_loss,
        )
        peaks.append(told.peak_bytes)
    held = 4 * 256 * 256 * (2 / 8 if "zero" in plan else 2)
    assert peaks[1] - peaks[0] < 4 * (held + 256 * 256)  # a cast has twice as many bytes as elements
