"""Attention over a cut sequence on the simulated device: a mask's values are not asked for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.library import Library

import espalier
from espalier import Mesh, Shard
from espalier.tensor.rules import attention_blocks
from tests.sim.transport import Shared


def masked(shared: Shared, rank: int, world: int) -> set[str]:
    """A ring of blocks some of which a mask hides: what the device tells. Values are those of the CPU."""
    mesh = Mesh.from_env({"context": world})
    torch.manual_seed(0)
    plain: list[Any] = [torch.randn(2, 1, 8, 4, dtype=torch.float64).requires_grad_() for _ in range(3)]
    half = torch.arange(8) // 4
    mask = half.unsqueeze(1) == half  # each rank's queries see its own keys
    expected: Any = F.scaled_dot_product_attention(plain[0], plain[1], plain[2], attn_mask=mask)
    expected.square().sum().backward()
    cut: list[Any] = [
        espalier.distribute_tensor(x.detach().to("sim"), mesh, [Shard(2)]).requires_grad_() for x in plain
    ]
    seen: Any = espalier.distribute_tensor(mask.to("sim"), mesh, [Shard(0)])
    with espalier.ledger(mesh) as book, shared.sim.watched() as told:
        out: Any = F.scaled_dot_product_attention(cut[0], cut[1], cut[2], attn_mask=seen)
        out.square().sum().backward()
    assert {op for _, op in book.by_op()} <= {"pass_on", "all_reduce"}, book
    torch.testing.assert_close(out.full_tensor().cpu(), expected)
    for x, y in zip(cut, plain, strict=True):
        torch.testing.assert_close(espalier.full_tensor(x.grad).cpu(), y.grad)
    return {telling.kind for telling in told}


@pytest.mark.world(2)
def test_a_mask_keeps_no_host_waiting(on_sim: Callable[..., list[Any]]) -> None:
    assert on_sim(2, masked) == [set(), set()]


class Flash:
    """CUDA's flash attention for this device, by the CPU's; refuses what that would, and counts calls."""

    def __init__(self, shared: Shared) -> None:
        self._shared, self._cpu = shared, torch.ops.aten
        self.calls: list[str] = []

    def _there(self, xs: tuple[Any, ...]) -> list[torch.Tensor]:
        assert all(x.dtype is torch.bfloat16 and x.stride(-1) == 1 for x in xs)
        for x in xs:
            self._shared.sim.access(x.contiguous(), write=False, by="flash")
        with self._shared.sim.emulating():
            return [x.cpu() for x in xs]

    def _here(self, *xs: torch.Tensor) -> list[torch.Tensor]:
        with self._shared.sim.emulating():
            return [x.to("sim") for x in xs]

    def forward(
        self, q: Any, k: Any, v: Any, dropout: float = 0.0, causal: bool = False, *, scale: Any = None
    ) -> tuple[Any, ...]:
        assert k.shape[1] < q.shape[1] and not (causal and q.shape[-2] != k.shape[-2])
        self.calls.append("forward")
        q, k, v = self._there((q, k, v))
        k, v = (x.repeat_interleave(q.shape[1] // k.shape[1], 1) for x in (k, v))
        flash = self._cpu._scaled_dot_product_flash_attention_for_cpu
        out, lse = self._here(*flash(q, k, v, dropout, causal, scale=scale))
        return out, lse, None, None, q.shape[-2], k.shape[-2], out, out, out

    def backward(
        self, grad: Any, q: Any, k: Any, v: Any, out: Any, lse: Any, first: Any, second: Any, rows: Any,
        columns: Any, dropout: Any, causal: Any, seed: Any, offset: Any, *, scale: Any = None,
    ) -> tuple[Any, ...]:  # fmt: skip
        assert (rows, columns) == (q.shape[-2], k.shape[-2])
        assert lse.dtype is torch.float32 and lse.is_contiguous() and lse.shape == q.shape[:3]
        self.calls.append("backward")
        grad, q, k, v, out = self._there((grad, q, k, v, out))
        times = q.shape[1] // k.shape[1]
        with self._shared.sim.emulating():
            lse = lse.cpu()
        spread = [x.repeat_interleave(times, 1) for x in (k, v)]
        flash = self._cpu._scaled_dot_product_flash_attention_for_cpu_backward
        dq, *grads = flash(grad, q, *spread, out, lse, dropout, causal, scale=scale)
        return (*self._here(dq, *(x.unflatten(1, (-1, times)).sum(2) for x in grads)),)


def by_flash(shared: Shared, rank: int, world: int) -> tuple[set[str], list[str], int]:
    """A causal ring of grouped queries: what is told, calls of flash, keys and values spread."""
    mesh = Mesh.from_env({"context": world}).telling(context="ring")
    flash, library = Flash(shared), Library("aten", "IMPL")
    library.impl("_scaled_dot_product_flash_attention", flash.forward, "PrivateUse1")
    library.impl("_scaled_dot_product_flash_attention_backward", flash.backward, "PrivateUse1")
    torch.manual_seed(0)
    shapes = (2, 4, 8, 16), (2, 2, 8, 16), (2, 2, 8, 16)
    plain: list[Any] = [torch.randn(shape).bfloat16().requires_grad_() for shape in shapes]
    cut: list[Any] = [
        espalier.distribute_tensor(x.detach().to("sim"), mesh, [Shard(2)]).requires_grad_() for x in plain
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attention_blocks, "flash_serves", lambda device: True)
        with shared.sim.watched(kernels=True) as told:
            out: Any = F.scaled_dot_product_attention(cut[0], cut[1], cut[2], is_causal=True, enable_gqa=True)
            out.float().square().sum().backward()
    wide: list[Any] = [x.detach().double().requires_grad_() for x in plain]
    expected: Any = F.scaled_dot_product_attention(wide[0], wide[1], wide[2], is_causal=True, enable_gqa=True)
    expected.square().sum().backward()
    torch.testing.assert_close(out.full_tensor().cpu().double(), expected, atol=2e-2, rtol=2e-2)
    for x, y in zip(cut, wide, strict=True):
        torch.testing.assert_close(espalier.full_tensor(x.grad).cpu().double(), y.grad, atol=6e-2, rtol=5e-2)
    spread = sum(n for telling, n in told.items() if "repeat_interleave" in telling.what)
    return {telling.kind for telling in told} - {"kernel"}, flash.calls, spread


@pytest.mark.world(2)
def test_a_ring_takes_flash_and_spreads_no_keys(on_sim: Callable[..., list[Any]]) -> None:
    """Of 16 bits, without a mask: a call for each block of the ring, each way."""
    for told, calls, spread in on_sim(2, by_flash):
        assert told == set() and spread == 0
        # its own block, and half of the one in which the two ranks meet
        assert calls == ["forward"] * 2 + ["backward"] * 2
