"""Kernels of our own on the simulated device, by Triton's interpreter: how many, and the CPU's values."""

from __future__ import annotations

import importlib
import itertools
import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F

import espalier
from espalier import Mesh, Replicate, Shard
from espalier.tensor import fused_kernels
from espalier.tensor.random import kept_at
from espalier.tensor.rules import attention_blocks
from tests.sim.transport import Shared

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")

DTYPES = torch.float16, torch.bfloat16, torch.float32, torch.float64
WRITES = {"drop": (1,), "attend": (4, 5), "attend_back_keys": (7, 8), "attend_back_queries": (7, 8)}


@lru_cache(maxsize=1)
def interpret() -> None:
    """Let Triton interpret kernels in this process: it asks whether to when it is imported, never again."""
    os.environ["TRITON_INTERPRET"] = "1"
    known = [name for name in sys.modules if f"{name}.".startswith("triton.") and "._C" not in name]
    for name in (*known, "espalier.tensor.triton_kernels"):
        sys.modules.pop(name, None)
    importlib.import_module("espalier.tensor.triton_kernels")
    interpreter: Any = importlib.import_module("triton.runtime.interpreter")
    patched = interpreter._patch_lang_tensor

    def readable(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        # Triton 3.6 reads bounds of loops in a way that numpy 2.4 no longer takes
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = readable


@contextmanager
def launching(shared: Shared, ours: bool = True) -> Iterator[list[str]]:
    """Let kernels of our own run on this device, if ``ours``; the names of those that are launched."""
    interpret()
    launched: list[str] = []
    launch = fused_kernels.launch

    def interpreted(name: str, grid: tuple[int, ...], tensors: Any, *args: Any, **constants: Any) -> None:
        launched.append(name)
        for i, x in enumerate(tensors):
            if x.is_contiguous():
                shared.sim.access(x, write=i in WRITES[name], by=name)
        with shared.sim.emulating():
            launch(name, grid, tensors, *args, **constants)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused_kernels, "has_triton", lambda device: ours)
        patch.setattr(fused_kernels, "launch", interpreted)
        yield launched


PLACEMENTS = Replicate(), Shard(0), Shard(1), Shard(2), Shard(3)


def dropped(shared: Shared, rank: int, world: int) -> tuple[list[Any], list[int]]:
    """Dropout by our kernel and plainly: where bits differ, and the kernels of one call, plain and ours."""
    mesh, wrong = Mesh.from_env({"tensor": world}), []
    kernels: list[int] = []
    for dtype, p, placement in itertools.product(DTYPES, (0.1, 1 / 3, 0.9), PLACEMENTS):
        torch.manual_seed(1)
        whole = torch.randn(3, 4, 5, 6).to(dtype)
        whole.view(-1)[:4] = torch.tensor([0.0, -0.0, 1.0, -1.0])
        outs = []
        for ours in (False, True):
            x: Any = espalier.distribute_tensor(whole.to("sim"), mesh, [placement]).requires_grad_()
            torch.manual_seed(2)
            with launching(shared, ours) as launched, shared.sim.watched(kernels=True) as told:
                y: Any = F.dropout(x, p)
                y.backward(y.detach())
            assert launched == ["drop"] * 2 * ours, launched
            assert {of.kind for of in told} <= {"kernel"}, told
            kernels = [*kernels[-1:], sum(told.values()) + len(launched)]
            outs.append([t.full_tensor().detach().cpu() for t in (y, x.grad)])
        for plain, own in zip(*outs, strict=True):
            # the interpreter cuts what is more than bfloat16 holds; devices round to nearest, as torch does
            near = 2**-6 if dtype is torch.bfloat16 else 0
            same = torch.allclose(own, plain, near, 0) and torch.equal(own.signbit(), plain.signbit())
            if not same or not torch.equal(own == 0, plain == 0):
                wrong.append((dtype, p, placement))
    return wrong, kernels


@pytest.mark.world(2)
def test_dropout_is_one_kernel_each_way(on_sim: Callable[..., list[Any]], figures: list[str]) -> None:
    """Of every dtype and layout, with the bits of the plain operations."""
    for wrong, (plain, own) in on_sim(2, dropped):
        assert wrong == []
        assert own == 2 < plain
    figures.append(f"dropout, both ways           {own} kernels; by plain operations {plain}")


def in_place(shared: Shared, rank: int, world: int) -> tuple[list[str], bool, bool]:
    """Of dropout in place: what is launched, whether values are as otherwise, and second gradients."""
    mesh = Mesh.from_env({"tensor": world})
    x: Any = espalier.distribute_tensor(torch.randn(6, 4, device="sim"), mesh, [Shard(0)])
    x.requires_grad_()
    values = []
    for inplace in (False, True):
        torch.manual_seed(3)
        with launching(shared) as launched:
            y: Any = F.dropout(x * x, 0.4, inplace=inplace)
            (grad,) = torch.autograd.grad(y.sum(), x, create_graph=True)
            (second,) = torch.autograd.grad((grad * x).sum(), x)
        values.append([espalier.full_tensor(t).detach().cpu() for t in (y, grad, second)])
    plain, written = values
    factor = (plain[0] != 0) / 0.6
    right = torch.allclose(plain[2], 4 * factor * espalier.full_tensor(x).detach().cpu())
    return launched, all(a.equal(b) for a, b in zip(plain, written, strict=True)), right


@pytest.mark.world(2)
def test_dropout_in_place_and_its_second_gradient(on_sim: Callable[..., list[Any]]) -> None:
    for launched, same, right in on_sim(2, in_place):
        assert launched == ["drop"] * 2 and same and right


def far(shared: Shared, rank: int, world: int) -> list[bool]:
    """Whether elements are kept as plainly, of numbers that reach 2^32."""
    same = []
    for sizes, steps in (((40, 50), (1 << 31, 3)), ((2, 3, 4, 50), (1 << 34, 5000, 70, 1))):
        base = (1 << 32) - 77
        numbering = fused_kernels.Numbering.of(sizes, base, steps)
        assert numbering is not None and numbering.wide
        index = torch.full(sizes, base)
        for dim, (n, step) in enumerate(zip(sizes, steps, strict=True)):
            index += (torch.arange(n) * step).view(-1, *[1] * (len(sizes) - dim - 1))
        drawn = fused_kernels.Drawn.of(12345678901234, 0.3)
        with launching(shared):
            out: Any = fused_kernels._apply(torch.ones(sizes, device="sim"), drawn, 1.0, numbering, False)
        same.append(torch.equal(out.cpu() != 0, kept_at(index, 12345678901234, 0.3)))
    return same


@pytest.mark.world(1)
def test_dropout_of_numbers_beyond_32_bits(on_sim: Callable[..., list[Any]]) -> None:
    assert on_sim(1, far) == [[True, True]]


SHAPES = (2, 4, 48, 16), (2, 2, 48, 16), (2, 2, 48, 16)
MASK = torch.arange(48).unsqueeze(1) - torch.arange(48)  # rows after columns
MASKS = {
    "none": None,
    "window": (MASK >= 0) & (MASK < 20),
    "documents": torch.arange(48).unsqueeze(1) // 30 == torch.arange(48) // 30,
    "slopes": -0.1 * MASK.abs().float(),
}


def attended(shared: Shared, rank: int, world: int, mask: str, causal: bool, p: float) -> set[Any]:
    """Attention under every layout, by our kernels, and plainly on one process: what is launched."""
    mesh = Mesh.from_env({"context": world}).telling(context="ring")
    alone = Mesh.single(("context",), device_type="sim")
    torch.manual_seed(0)
    whole = [torch.randn(shape, device="sim") for shape in SHAPES]
    seen = MASKS[mask]
    found, results = set(), []
    for place, placement in (("alone", Replicate()), *((str(i), Shard(i)) for i in range(3))):
        here = alone if place == "alone" else mesh
        cut: list[Any] = [
            espalier.distribute_tensor(x, here, [placement]).detach().requires_grad_() for x in whole
        ]
        rows = [Shard(0)] if place == "2" else [Replicate()]
        bias = None if seen is None else espalier.distribute_tensor(seen.to("sim"), here, rows)
        torch.manual_seed(5)
        with launching(shared, place != "alone") as launched, shared.sim.watched(kernels=True) as told:
            out: Any = F.scaled_dot_product_attention(
                cut[0], cut[1], cut[2], attn_mask=bias, dropout_p=p, is_causal=causal, enable_gqa=True
            )
            out.backward(torch.ones_like(out) / 7 + out.detach())
        results.append([espalier.full_tensor(x).detach().cpu() for x in (out, *(x.grad for x in cut))])
        if place != "alone":
            scores = {of.what for of in told if of.what in ("aten::_softmax", "aten::logsumexp", "aten::bmm")}
            assert {of.kind for of in told} == {"kernel"} and not scores, (place, scores)
            found.add((place == "2", tuple(launched)))
    for result in results[1:]:
        for ours, plain in zip(result, results[0], strict=True):
            torch.testing.assert_close(ours, plain, atol=2e-5, rtol=2e-4)
    return found


ONE_EACH = ("attend", "attend_back_queries", "attend_back_keys")


@pytest.mark.world(2)
@pytest.mark.parametrize(
    ("mask", "causal", "p"),
    [("none", False, 0.2), ("none", True, 0.2), *((mask, False, 0.2) for mask in MASKS if mask != "none")],
)
def test_attention_with_dropout_holds_no_scores(
    on_sim: Callable[..., list[Any]], mask: str, causal: bool, p: float
) -> None:
    """One kernel forward, two backward; in a ring, of each block. Values: plain ones' on one rank."""
    for found in on_sim(2, attended, mask, causal, p):
        for around, launched in found:
            assert launched == (ONE_EACH[:1] * 2 + ONE_EACH[1:] * 2 if around else ONE_EACH)


def ringed(shared: Shared, rank: int, world: int, mask: str) -> list[str]:
    """A ring with a mask, without dropout: what is launched; values are plain ones'."""
    mesh = Mesh.from_env({"context": world}).telling(context="ring")
    torch.manual_seed(0)
    plain: list[Any] = [torch.randn(shape).requires_grad_() for shape in SHAPES]
    bias: Any = MASKS[mask]
    expected: Any = F.scaled_dot_product_attention(
        plain[0], plain[1], plain[2], attn_mask=bias, enable_gqa=True
    )
    expected.square().sum().backward()
    cut: list[Any] = [
        espalier.distribute_tensor(x.detach().to("sim"), mesh, [Shard(2)]).requires_grad_() for x in plain
    ]
    seen: Any = espalier.distribute_tensor(bias.to("sim"), mesh, [Shard(0)])
    with launching(shared) as launched, shared.sim.watched(kernels=True) as told:
        out: Any = F.scaled_dot_product_attention(cut[0], cut[1], cut[2], attn_mask=seen, enable_gqa=True)
        out.square().sum().backward()
    assert {of.kind for of in told} == {"kernel"} and not any("bmm" in of.what for of in told)
    for ours, torchs in ((out, expected), *((x.grad, y.grad) for x, y in zip(cut, plain, strict=True))):
        torch.testing.assert_close(espalier.full_tensor(ours).cpu(), torchs, atol=2e-5, rtol=2e-4)
    return launched


@pytest.mark.world(2)
@pytest.mark.parametrize("mask", [mask for mask in MASKS if mask != "none"])
def test_a_ring_with_a_mask_holds_no_scores(on_sim: Callable[..., list[Any]], mask: str) -> None:
    for launched in on_sim(2, ringed, mask):
        assert launched == [*ONE_EACH[:1] * 2, *ONE_EACH[1:] * 2]


def blocks(shared: Shared, rank: int, world: int, dtype: torch.dtype) -> list[Any]:
    """Blocks of attention by our kernels beside the plain formula in float32: those that differ."""
    (b, h, g, s, t, d, e), wrong = (2, 4, 2, 37, 50, 12, 20), []
    torch.manual_seed(0)
    q, k, v = (torch.randn(n, device="sim").to(dtype) for n in ((b, h, s, d), (b, g, t, d), (b, g, t, e)))
    some = torch.rand(b, 1, s, t) > 0.3
    some[:, :, 3] = False  # a query that sees nothing
    slopes = torch.randn(h, 1, t).expand(1, h, s, t)
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    for bias, ahead, p in (
        *((bias, None, p) for bias in (None, some, slopes, some[:, :, :1]) for p in (0.0, 0.3)),
        *((None, ahead, p) for ahead in (0, 9, -20) for p in (0.0, 0.3)),
    ):
        bias_on = None if bias is None else bias.to("sim")
        # with masks numbers stay below 2^32, else they reach it within a row of the second head
        base = 77 if ahead is None else (1 << 32) - s * t - 9
        drops = fused_kernels.Dropout(-(10**15), base, (2 * h * s * t, s * t, t), p) if p else None
        factors = None
        if drops is not None:
            place: Any = sum(n.view(-1, *[1] * i) * step for i, n, step in zip(
                (3, 2, 1, 0), map(torch.arange, (b, h, s, t)), (*drops.steps, 1), strict=True
            ))  # fmt: skip
            kept = kept_at(place + drops.base, drops.key, p)
            factors = Factors((kept / (1 - p)).to("sim"))
        keep: Any = factors
        whole = q.float(), k.float(), v.float()
        block = attention_blocks.Block(*whole, 0.3, bias_on, False, keep, True, ahead)
        grad = torch.randn(b, h, s, e, device="sim")
        out, lse = attention_blocks.forward(block)
        finite = lse.masked_fill(lse == -math.inf, 0.0)
        plain = [out, lse, *attention_blocks.backward(block, grad, out, finite)[:3]]
        with launching(shared):
            own = [*fused_kernels.attention(q, k, v, bias_on, ahead, 0.3, drops)]
            own += fused_kernels.attention_back(
                grad.to(dtype), out.to(dtype), finite, q, k, v, bias_on, ahead, 0.3, drops
            )
        for i, (a, c) in enumerate(zip(own, plain, strict=True)):
            near = tolerance * (1 if i < 2 else 20)
            if not torch.allclose(a.cpu().float(), c.cpu().float(), near, near):
                wrong.append((i, None if bias is None else bias.dtype, ahead, p))
    return wrong


class Factors(NamedTuple):
    """In place of :class:`attention_blocks.Kept`."""

    values: torch.Tensor

    def factors(self, like: torch.Tensor) -> torch.Tensor:
        return self.values


@pytest.mark.world(1)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_blocks_are_those_of_the_formula(on_sim: Callable[..., list[Any]], dtype: torch.dtype) -> None:
    """Masks of every shape, queries that see nothing, keys and values of other widths, cut causal blocks."""
    assert on_sim(1, blocks, dtype) == [[]]
