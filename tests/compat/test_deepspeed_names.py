"""What programs take from ``deepspeed`` beside its engine: whole values of parameters, also before there is
an engine, and weights of a checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from espalier.compat import deepspeed
from espalier.compat.deepspeed import utils
from espalier.compat.deepspeed.utils import zero_to_fp32

ADAM, ROWS = {"type": "Adam", "params": {"lr": 0.01}}, 4


def net() -> nn.Sequential:
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3))


def made(stage: int, **more: Any) -> Any:
    torch.manual_seed(0)
    told = {"train_micro_batch_size_per_gpu": ROWS, "optimizer": ADAM, "gradient_clipping": 0.0, **more}
    return deepspeed.initialize(model=net(), config={**told, "zero_optimization": {"stage": stage}})[0]


def whole_values(rank: int, world: int, folder: str) -> None:
    """Of a parameter, its gradient and states, under each stage; masters are float32."""
    x = torch.randn(ROWS * world, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(ROWS * world) % 3
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    torch.manual_seed(0)
    plain = net()
    F.cross_entropy(plain(x), y).backward()
    right = plain[0].weight.grad
    assert right is not None
    for stage, is_low in ((0, False), (1, False), (2, True), (3, True), (3, False)):
        engine, near = made(stage, bf16={"enabled": is_low}), 2e-2 if is_low else 1e-6
        weight = engine.module[0].weight
        assert utils.safe_get_full_optimizer_state(weight, "exp_avg") is None
        engine.backward(F.cross_entropy(engine(x[own].to(weight.dtype)).float(), y[own]))
        grad = utils.safe_get_full_grad(weight)
        assert grad is not None and torch.allclose(grad, right, atol=near)
        engine.step()
        state = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert type(state) is torch.Tensor and torch.allclose(state, right / 10, atol=near)
        value = torch.full((16, 6), 0.123456789)
        utils.safe_set_full_fp32_param(weight, value)
        assert torch.equal(utils.safe_get_full_fp32_param(weight), value)
        assert torch.equal(weight.full_tensor().float(), value.to(weight.dtype).float())
        utils.safe_set_full_optimizer_state(weight, value, "exp_avg")
        state = utils.safe_get_full_optimizer_state(weight, "exp_avg")
        assert state is not None and torch.equal(state, value)
        with pytest.raises(ValueError, match="exp_avg, exp_avg_sq"):
            utils.safe_set_full_optimizer_state(weight, value, "momentum")
        engine.save_checkpoint(f"{folder}/{stage}{is_low}")
        state_dict = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(f"{folder}/{stage}{is_low}")
        assert torch.equal(state_dict["0.weight"], value) and [*state_dict] == [*plain.state_dict()]
    with pytest.raises(ValueError, match="is of no engine"):
        utils.safe_get_full_fp32_param(plain[0].weight)


@pytest.mark.world(2)
def test_whole_values(ranks: Any, tmp_path: Path) -> None:
    """As a plain model has them."""
    ranks(2, whole_values, str(tmp_path))


def before_there_is_an_engine(rank: int, world: int) -> None:
    """What one rank makes of parameters that ``zero.Init`` left without memory, all have."""
    torch.manual_seed(rank)
    with deepspeed.zero.Init():
        model = net()
    for _ in range(2):
        with deepspeed.zero.GatheredParameters([model[0].weight, model[2].bias], modifier_rank=world - 1):
            if rank == world - 1:
                with torch.no_grad():
                    model[0].weight.mul_(0).add_(rank + 1.0)
                    model[2].bias[1] = 5.0
    with deepspeed.zero.GatheredParameters(model[2].weight):
        drawn = model[2].weight.detach().clone()
        model[2].weight.data.zero_()
    told = {"train_micro_batch_size_per_gpu": ROWS, "optimizer": ADAM, "zero_optimization": {"stage": 3}}
    state = deepspeed.initialize(model=model, config=told)[0].module_state_dict()
    assert state["0.weight"].eq(world).all() and state["2.bias"][1] == 5
    if rank == 0:
        torch.manual_seed(0)
        right = net().state_dict()
        assert torch.equal(state["2.weight"], drawn) and torch.equal(drawn, right["2.weight"])
        assert torch.equal(state["0.bias"], right["0.bias"]), "as it is drawn in the whole model"


@pytest.mark.world(2)
def test_parameters_before_there_is_an_engine(ranks: Any) -> None:
    """Ranks draw different ones; rank 0's count."""
    ranks(2, before_there_is_an_engine)


def test_weights_of_a_checkpoint(tmp_path: Path) -> None:
    """In a model, in a file, in one of safetensors."""
    engine = made(2)
    right = {name: x.clone() for name, x in engine.module_state_dict().items()}
    engine.save_checkpoint(tmp_path / "saved", tag="first")
    model = zero_to_fp32.load_state_dict_from_zero_checkpoint(net(), tmp_path / "saved")
    assert all(torch.equal(x, right[name]) for name, x in model.state_dict().items())
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path / "saved", tmp_path / "out", tag="first")
    assert torch.load(tmp_path / "out" / "pytorch_model.bin", weights_only=True).keys() == right.keys()
    zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(
        tmp_path / "saved", tmp_path / "safe", safe_serialization=True
    )
    assert [x.name for x in (tmp_path / "safe").iterdir()] == ["model.safetensors"]
    with pytest.raises(ValueError, match="no file 'latest'"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)


def test_what_has_no_effect() -> None:
    """It is there, so that programs run."""
    model = net()
    assert utils.set_z3_leaf_modules(model, [nn.Linear]) == [model[0], model[2]]
    deepspeed.zero.register_external_parameter(model, model[0].weight)
    assert deepspeed.get_accelerator().device_name() == deepspeed.accelerator.get_accelerator().device_name()
