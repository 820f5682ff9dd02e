"""Optimizers, micro-batches, outputs and wrappers of Colossal-AI on gloo ranks, against a plain loop."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from espalier.compat import colossalai
from espalier.compat.colossalai import zero
from espalier.compat.colossalai.booster.plugin import (
    GeminiPlugin,
    HybridParallelPlugin,
    LowLevelZeroPlugin,
)
from espalier.compat.colossalai.nn.optimizer import CAME, Adafactor, Lamb, Lars
from espalier.compat.colossalai.utils import share_of
from tests.compat.test_colossalai import (
    Strided,
    Taking,
    assert_same,
    dataset,
    judged,
    net,
    optimizer_of,
    plain,
)


def trained(model: Any, optimizer: Any, share: int = 1, here: int = 0) -> Any:
    """After an epoch of batches of 8 rows, of which these are a rank's."""
    for x, y in Strided(share, here):
        loss = F.cross_entropy(model(x), y)
        getattr(optimizer, "backward", lambda loss: loss.backward())(loss)
        optimizer.step()
        optimizer.zero_grad()
    return model


def others(rank: int, world: int) -> None:
    """Optimizers that torch lacks, micro-batches by their rows, what is wrapped without a booster."""
    exact: dict[str, Any] = {"precision": "fp32"}
    kinds = (
        lambda p: Lamb(p, lr=0.02, weight_decay=0.1, bias_correction=True),
        lambda p: Lars(p, lr=0.5, momentum=0.9, weight_decay=0.1, eeta=0.1),
        lambda p: CAME(p, lr=0.02, weight_decay=0.1),
        lambda p: Adafactor(p, beta1=0.9),
    )
    for kind in kinds:
        plain_model = net()
        before = [p.detach().clone() for p in plain_model.parameters()]
        right = [p.detach() for p in trained(plain_model, kind(plain_model.parameters())).parameters()]
        assert not any(torch.equal(x, y) for x, y in zip(before, right, strict=True))
        for plugin, share in (
            (LowLevelZeroPlugin(stage=2, **exact), world),
            (GeminiPlugin(**exact), world),
            (HybridParallelPlugin(tp_size=2, pp_size=1, **exact), 1),
        ):
            model = net()
            boosted_model, optimizer, *_ = colossalai.Booster(plugin=plugin).boost(
                model, kind(model.parameters())
            )
            assert optimizer.unwrap() is optimizer and optimizer.optim.param_groups is optimizer.param_groups
            assert_same(trained(boosted_model, optimizer, share, rank if share > 1 else 0), right)
            norm = optimizer.get_grad_norm()
            assert norm is not None and norm > 0

    right = plain(1)
    plugin = HybridParallelPlugin(tp_size=1, pp_size=2, microbatch_size=2, max_norm=0.5, **exact)
    stages = plugin.stage_manager
    assert stages is not None and (stages.stage, stages.num_stages) == (rank, 2)
    assert (stages.is_first_stage(), stages.is_last_stage(), stages.get_next_rank()) == (
        rank == 0, rank == 1, 1 - rank
    )  # fmt: skip
    assert (plugin.pp_size, plugin.tp_size, plugin.dp_size, plugin.sp_size) == (2, 1, 1, 1)
    assert [dist.get_rank(x) for x in (plugin.pp_group, plugin.dp_group, plugin.tp_group)] == [rank, 0, 0]
    booster, model = colossalai.Booster(plugin=plugin), Taking()
    boosted_model, optimizer, *_ = booster.boost(model, optimizer_of(model))
    for x, y in Strided(1, 0):
        rows = iter([{"x": x, "labels": y}])
        with torch.no_grad():
            logits = booster.execute_pipeline(
                iter([{"x": x, "labels": y}]), boosted_model, judged, return_loss=False, return_outputs=True
            )["outputs"]
        result = booster.execute_pipeline(rows, boosted_model, judged, optimizer, return_outputs=True)
        torch.testing.assert_close(result["loss"], F.cross_entropy(logits, y), rtol=0, atol=1e-12)
        if rank == world - 1:
            torch.testing.assert_close(result["outputs"], logits, rtol=0, atol=1e-12)
        else:
            assert result["outputs"] is None
        assert boosted_model.engine.plan.accumulate == 4
        optimizer.step()
        optimizer.zero_grad()
    assert_same(boosted_model, right)
    rows = iter([{"x": x[:6], "labels": y[:6]}, {"x": x[:5], "labels": y[:5]}])
    booster.execute_pipeline(rows, boosted_model, judged, optimizer)
    assert boosted_model.engine.plan.accumulate == 3
    optimizer.step()
    optimizer.zero_grad()
    with pytest.raises(ValueError, match="a batch of 5 rows; expected a multiple of microbatch_size = 2"):
        booster.execute_pipeline(rows, boosted_model, judged, optimizer)

    for stage in (1, 2):
        model = net()
        wrapped = zero.zero_model_wrapper(model, stage)
        optimizer = zero.zero_optim_wrapper(wrapped, optimizer_of(model), max_norm=0.5)
        assert_same(trained(wrapped, optimizer, world, rank), right)
        assert wrapped.engine.plan.zero == stage
    model = net()
    wrapped = zero.GeminiDDP(model, mixed_precision=torch.float32, device="any", pin_memory=True)
    optimizer = zero.GeminiOptimizer(optimizer_of(model), wrapped, max_norm=0.5, gpu_margin_mem_ratio=0.1)
    assert_same(trained(wrapped, optimizer, world, rank), right)
    assert wrapped.engine.plan.zero == 3 and [*wrapped.state_dict()] == [*net().state_dict()]
    with pytest.raises(ValueError, match="wrap its optimizer before"):
        zero.GeminiOptimizer(optimizer, wrapped)


def adapted(rank: int, world: int, folder: str) -> list[Any]:
    """Losses of adapters of peft, which are written, and read again."""
    peft = pytest.importorskip("peft")
    told: list[Any] = []
    booster = colossalai.Booster(plugin=LowLevelZeroPlugin(stage=1, precision="fp32"))
    config = peft.LoraConfig(r=2, target_modules=["0", "2"])
    for again in (False, True):
        options = {"pretrained_dir": folder} if again else {"lora_config": config}
        model = booster.enable_lora(net(), **options)
        if not again:  # adapters begin at nothing: these do not
            for name, p in model.named_parameters():
                torch.nn.init.normal_(p, generator=torch.Generator().manual_seed(len(name))) if (
                    "lora" in name
                ) else None
        held = [p for p in model.parameters() if p.requires_grad]
        boosted_model, optimizer, *_ = booster.boost(model, torch.optim.SGD(held, lr=0.1))
        x, y = next(iter(Strided(world, rank)))
        told.append(F.cross_entropy(boosted_model(x), y).item())
        if not again:
            trained(boosted_model, optimizer, world, rank)
            told.append(F.cross_entropy(boosted_model(x), y).item())
            booster.save_lora_as_pretrained(boosted_model, folder, use_safetensors=True)
    return told


@pytest.mark.world(2)
def test_optimizers_and_wrappers(ranks: Callable[..., Any], tmp_path: Path) -> None:
    """The parameters of a plain loop; adapters."""
    ranks(2, others)
    for before, after, read in ranks(2, adapted, str(tmp_path)):
        assert before != after == pytest.approx(read, rel=1e-12)
    with pytest.raises(ValueError, match=r"(?s)quantize.*lora_config = None: expected one of peft"):
        colossalai.Booster().enable_lora(net(), quantize=True)


def deep() -> nn.Module:
    """Of seven layers."""
    torch.manual_seed(0)
    inner = [layer for _ in range(2) for layer in (nn.Linear(16, 16), nn.GELU())]
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), *inner, nn.Linear(16, 4)).double()


def own_outputs(rank: int, world: int) -> None:
    """Of a step, where the last stage is, of the rows that a rank brings: more or fewer than others."""
    x, y = dataset().tensors
    for style, several, first in (("1f1b", 1, 4), ("1f1b", 1, 5), ("zbv", 2, 4)):
        plugin = HybridParallelPlugin(
            tp_size=1,
            pp_size=2,
            num_microbatches=4,
            precision="fp32",
            pp_style=style,
            num_model_chunks=several,
        )
        booster, model, plain_net = colossalai.Booster(plugin=plugin), Taking(), deep()
        model.net = deep()
        boosted_model, optimizer, *_ = booster.boost(model, optimizer_of(model))
        stages, place = plugin.stage_manager, share_of(plugin.plan(world), rank)[1]
        own = slice(0, first) if place == 0 else slice(first, 8)
        rows = iter([{"x": x[own], "labels": y[own]}])
        found = booster.execute_pipeline(rows, boosted_model, judged, optimizer, return_outputs=True)
        assert found["loss"].item() == pytest.approx(
            F.cross_entropy(plain_net(x[:8]), y[:8]).item(), rel=1e-12
        )
        assert stages is not None and (found["outputs"] is None) is not stages.is_last_stage()
        if stages.is_last_stage():
            torch.testing.assert_close(found["outputs"], plain_net(x[own]).detach(), rtol=0, atol=1e-12)


@pytest.mark.world(4)
def test_outputs_of_a_step(ranks: Callable[..., Any]) -> None:
    """Whatever the schedule, and with rows that the ranks share unevenly."""
    ranks(4, own_outputs)
