"""Products of 8-bit floats: against the same arithmetic by hand, under every layout, and counted dry."""

from __future__ import annotations

import math
from typing import Any
from unittest import mock

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.models.gpt import GPT, GPTConfig
from espalier.tensor.rules import float8

SIZES = {"vocab_size": 24, "max_positions": 8, "layers": 2, "hidden": 32, "heads": 2, "ffn": 64}
LAYERS = 2 * 7  # linear, of two blocks


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The values that 8 bits hold, in float32."""
    most = torch.finfo(dtype).max / x.abs().max().double().clamp(min=1e-12)
    factor = 2.0 ** math.floor(math.log2(most))
    return (x.float() * factor).to(dtype).float() / factor


class ByHand(torch.autograd.Function):
    """A linear layer's product of rounded operands, in float32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return (rounded(x, torch.float8_e4m3fn) @ rounded(weight, torch.float8_e4m3fn).t()).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        g = rounded(grad, torch.float8_e5m2).flatten(0, -2)
        of_x = (g @ rounded(weight, torch.float8_e4m3fn)).view_as(x)
        return of_x.to(x.dtype), (g.t() @ rounded(x, torch.float8_e4m3fn).flatten(0, -2)).to(x.dtype)


def by_hand(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    product: torch.Tensor = ByHand.apply(x, weight)
    return product if bias is None else product + bias


@pytest.mark.parametrize("tokens", [16, 21])  # a sum over 21 tokens is one over 32
def test_product_and_gradients(tokens: int) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(3, tokens, 32).bfloat16(), (torch.randn(48, 32) * 40).bfloat16()
    upstream = torch.randn(3, tokens, 48).bfloat16() * 1e-4
    results = []
    for call in (float8.float8_linear, by_hand):
        leaves = [x.clone().requires_grad_(), weight.clone().requires_grad_()]
        y = call(*leaves, torch.ones(48).bfloat16())
        y.backward(upstream)
        results.append([y.detach(), *(leaf.grad for leaf in leaves)])
    plain = F.linear(x.float(), weight.float(), torch.ones(48))
    for found, expected in zip(*results, strict=True):
        # to the rounding of bfloat16, of sums in another order
        torch.testing.assert_close(found, expected, rtol=2**-7, atol=float(expected.abs().max()) * 2**-9)
    assert (results[0][0].float() - plain).abs().max() > 0.01 * plain.abs().max()  # it was rounded


def engine_of(plan: dict[str, Any], precision: Any, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    model = GPT(GPTConfig(**SIZES))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return espalier.initialize(model, optimizer, {**plan, "precision": precision})


def losses(engine: Any) -> list[float]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 24, (4, 8), generator=generator) for _ in range(3)]
    return [engine.train_step({"input_ids": x, "labels": x}).item() for x in tokens]


def _trains(rank: int, world: int, expected: list[float]) -> None:
    for plan in (
        {"data": world, "zero": 3},
        {"tensor": world, "sequence_parallel": True},
        {"data": world, "zero": 1, "recompute": "full"},
    ):
        engine = engine_of(plan, "float8")
        assert losses(engine) == pytest.approx(expected, abs=1e-2), plan
        assert len(engine.arrangement.float8) == LAYERS


def test_trains_under_every_layout(ranks: Any) -> None:
    """Ranks scale what they multiply: losses differ by what that rounds otherwise."""
    expected = losses(engine_of({}, "float8"))
    plain = losses(engine_of({}, "bfloat16"))
    with mock.patch("espalier.parallel.compose.float8_linear", by_hand):
        assert losses(engine_of({}, "float8")) == pytest.approx(expected, abs=2e-3)
    assert expected != plain and expected == pytest.approx(plain, abs=3e-2)
    ranks(2, _trains, expected)


def test_values_that_were_rounded_are_rounded_to_themselves() -> None:
    """By a power of two again; so what was gathered in 8 bits is multiplied as it came."""
    torch.manual_seed(0)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        for scale in (1e-7, 1.0, 448.0, 3e5):
            eight, factor = float8.rounded(torch.randn(64, 32) * scale, dtype)
            shown = (eight.float() * factor).bfloat16()
            again, other = float8.rounded(shown, dtype)
            assert torch.equal(again.float() * other, eight.float() * factor)
            assert factor.log2().frac() == 0 and factor / other in (1, 2)


def test_what_is_no_number_stays_none() -> None:
    """Else a gradient that overflowed would be taken for one of another size."""
    for value in (torch.inf, -torch.inf, torch.nan):
        for i in range(2):
            operands = [torch.ones(16, 16), torch.ones(16, 16)]
            operands[i][3, 5] = value
            assert not float8.product(*operands, (float8.FORWARD, float8.FORWARD)).isfinite().all()


def _gathers(rank: int, world: int, more: dict[str, Any]) -> None:
    found, gathered = {}, {}
    for name, zero, precision in (("whole", 2, "float8"), ("cut", 3, "float8"), ("16 bits", 3, "bfloat16")):
        engine = engine_of({"data": world, "zero": zero, **more}, precision)
        found[name] = losses(engine), engine.full_state_dict()
        book = engine.ledger().by_op()
        gathered[name] = book["data", "all_gather"] if zero == 3 else (0, 0)
        if name == "cut":
            held = engine._data.prefetcher.held
            assert sum(len(g.float8.members) for g in held if g.float8 is not None) == LAYERS
            saved = (world - 1) * sum(m.slot for g in held if g.float8 is not None for m in g.float8.members)
    assert found["cut"][0] == found["whole"][0]
    for name, x in found["whole"][1].items():
        assert torch.equal(x, found["cut"][1][name]), name
    calls, sent = gathered["cut"]
    assert calls == gathered["16 bits"][0]
    # of each of these weights one byte for an element, not two, each time it is gathered
    times, rest = divmod(gathered["16 bits"][1] - sent, saved)
    assert rest == 0 and times in (1, 2), (gathered, saved)


@pytest.mark.parametrize("more", [{}, {"gradients": "in-place"}, {"recompute": "full"}], ids=str)
def test_weights_are_gathered_in_8_bits(ranks: Any, more: dict[str, Any]) -> None:
    """And no value differs from where they are whole on all ranks, and only products round."""
    ranks(2, _gathers, more)


def _written(rank: int, world: int) -> None:
    """What is written to a whole weight counts, and nothing but that: what 8 bits cut off is there yet."""
    results = []
    for zero in (2, 3):
        engine = engine_of({"data": world, "zero": zero}, "float8")
        losses(engine)
        name = engine.arrangement.float8[0]
        layer = engine.module.get_submodule(name)

        def write(module: nn.Module, args: Any) -> None:
            with torch.no_grad():
                module.weight[3].fill_(0.25)  # type: ignore[index, operator, union-attr]

        layer.register_forward_pre_hook(write)
        tokens = torch.zeros(4, 8, dtype=torch.int64)
        with torch.no_grad():
            engine.module.eval()
            engine({"input_ids": tokens, "labels": tokens})
        results.append(engine.full_state_dict()[f"{name}.weight"])
        assert (results[-1][3] == 0.25).all()
    assert torch.equal(*results)


def test_what_is_written_to_a_whole_weight_counts(ranks: Any) -> None:
    ranks(2, _written)


def _counted(rank: int, world: int, plan: dict[str, Any], counted: Any) -> None:
    engine = engine_of(plan, "float8")
    losses(engine)
    assert engine.ledger().by_op() == counted


def test_dry_run_counts_the_same_work(ranks: Any) -> None:
    reports = []
    plan = {"data": 2, "zero": 3}
    for precision in ("bfloat16", "float8"):
        with torch.device("meta"):
            model = GPT(GPTConfig(**SIZES))
            tokens = torch.zeros(4, 8, dtype=torch.int64)
        optimizer = torch.optim.AdamW(model.parameters())
        batch = {"input_ids": tokens, "labels": tokens}
        report = espalier.dry_run(model, {**plan, "precision": precision}, batch, optimizer=optimizer)
        reports.append(report)
    assert reports[0].flops == reports[1].flops > 0
    sent = [report.ledger.by_op()["data", "all_gather"] for report in reports]
    assert sent[0][0] == sent[1][0] and 0.5 < sent[1][1] / sent[0][1] < 0.7
    ranks(2, _counted, plan, reports[1].ledger.by_op())


def test_layers_that_are_converted() -> None:
    engine = engine_of({}, {"compute": "float8", "keep": ["*.0.*"]})
    losses(engine)
    names = engine.arrangement.float8
    assert len(names) == LAYERS // 2 and all(".1." in name for name in names)
    assert isinstance(engine.module.get_submodule(names[0]), nn.Linear)


def test_refusals() -> None:
    with pytest.raises(ValueError, match="tensor_mode = '1d'"):
        espalier.Plan(tensor=4, tensor_mode="2d", precision="float8")
    with (
        mock.patch.object(float8, "scaled_mm", None),
        pytest.raises(ValueError, match="cannot multiply 8-bit"),
    ):
        losses(engine_of({}, "float8"))

    def unsupported(*args: Any, **kwargs: Any) -> Any:
        raise RuntimeError("only on compute capability 8.9 and above\nand more")

    with (
        mock.patch.object(float8, "scaled_mm", unsupported),
        pytest.raises(ValueError, match="8.9 and above$"),
    ):
        losses(engine_of({}, "float8"))
    narrow = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 20))
    with pytest.raises(ValueError, match="multiples of 16"):
        espalier.initialize(narrow, None, {"precision": "float8"})
