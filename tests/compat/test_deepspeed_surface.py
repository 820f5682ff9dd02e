"""DeepSpeed's engine by its public names: each answers alike, or says what to do in its place."""

from __future__ import annotations

import argparse
import importlib.util
import inspect
import json
import os
import string
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from espalier.compat import deepspeed
from espalier.compat.deepspeed.answers import GIVEN, INSTEAD, OFF
from espalier.compat.deepspeed.keys import KEYS

ROOT = Path(__file__).parents[2]
# every public name of DeepSpeedEngine and PipelineEngine (0.19), but for those of nn.Module
NAMES = (Path(__file__).parent / "deepspeed_surface.txt").read_text("utf-8").split()
ADAM = {"type": "Adam", "params": {"lr": 0.1, "torch_adam": True}}
CONFIGS: list[dict[str, Any]] = [
    {"optimizer": ADAM, "prescale_gradients": True},
    {
        "optimizer": {"type": "SGD", "params": {"lr": 0.1}},
        "zero_allow_untested_optimizer": True,
        "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 3}},
        "zero_optimization": {"stage": 2, "overlap_comm": True, "reduce_bucket_size": 1e6},
        "bf16": {"enabled": True},
        "data_types": {"grad_accum_dtype": "fp32"},
        "gradient_accumulation_steps": 3,
        "gradient_clipping": 0.0,
        "steps_per_print": 7,
        "wall_clock_breakdown": True,
        "checkpoint": {"tag_validation": "Fail", "load_universal": True},
        "flops_profiler": {"profile_step": 3, "module_depth": 2},
    },
    {
        "optimizer": ADAM,
        "fp16": {"initial_scale_power": 8, "hysteresis": 3},
        "zero_optimization": {"stage": 3, "stage3_prefetch_bucket_size": 1000, "sub_group_size": 5000},
        "dataloader_drop_last": True,
        "communication_data_type": "fp32",
        "zero_allow_untested_optimizer": True,
    },
    {
        "optimizer": ADAM,
        "fp16": {"loss_scale": 8},
        "zero_force_ds_cpu_optimizer": False,
        "zero_allow_untested_optimizer": True,
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "cpu"}},
    },
]
# what a method gives differs: docs/deepspeed.md says why
DIFFERENT = {
    "loss_scale",  # the scale of now, not the configuration's
    "get_batch_info",  # numbers, where DeepSpeed gives methods
    "module_state_dict",  # the masters, in float32
    "steps_per_print",  # 0 for never, in place of None
}


# these do something
DOING = {
    "allreduce_gradients",
    "buffered_allreduce_fallback",
    "clip_fp32_gradients",
    "coalesce_grad_reduction",
    "collect_python_gc",
    "compile",
    "destroy",
    "empty_partition_cache",
    "no_sync",
    "offload_states",
    "random_ltd_initialize",
    "reload_states",
    "reset_activation_shape",
    "step",
}


def engine(config: dict[str, Any], library: Any = deepspeed) -> Any:
    """Of a layer, on one process."""
    torch.manual_seed(0)
    return library.initialize(model=nn.Linear(3, 3), config={"train_batch_size": 6, **config})[0]


def answers(of: Any, names: list[str]) -> dict[str, str]:
    """What those methods give that take nothing, as text."""
    found = {}
    for name in names:
        if name in DIFFERENT or name in DOING or not hasattr(of, name):
            continue
        given = getattr(of, name)
        try:
            if callable(given):
                inspect.signature(given).bind()
                given = given()
        except (TypeError, AttributeError, AssertionError, ValueError):
            continue
        if isinstance(given, torch.dtype | bool | int | float | str | list | dict | tuple | None):
            found[name] = str(given)
    return found


REFERENCE = """
import json, logging, sys
sys.path.insert(0, {root!r})
import deepspeed
from deepspeed.runtime.engine import DeepSpeedEngine
from deepspeed.runtime.pipe.engine import PipelineEngine
from deepspeed.utils import logger
from torch import nn
from tests.compat.test_deepspeed_surface import CONFIGS, answers, engine

logger.setLevel(logging.ERROR)
deepspeed.init_distributed(dist_backend="gloo", distributed_port=0)
kinds = DeepSpeedEngine, PipelineEngine
names = sorted({{n for kind in kinds for n in dir(kind) if n[0] in {letters!r}}} - {{*dir(nn.Module)}})
found = [answers(engine(config, deepspeed), names) for config in CONFIGS]
json.dump([names, found], open(sys.argv[1], "w"))
"""


def test_it_is_deepspeeds(tmp_path: Path) -> None:
    """The list of names is DeepSpeed's own, and its engine answers as this one."""
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: see tests/compat/test_deepspeed.py")
    script, to = tmp_path / "reference.py", tmp_path / "found.json"
    script.write_text(REFERENCE.format(root=str(ROOT), letters=string.ascii_lowercase))
    alone = {"DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1"}
    alone |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    done = subprocess.run(
        [sys.executable, str(script), str(to)], capture_output=True, text=True, env={**os.environ, **alone}
    )
    assert done.returncode == 0, done.stderr[-3000:]
    names, theirs = json.loads(to.read_text())
    assert names == NAMES
    for config, right in zip(CONFIGS, theirs, strict=True):
        ours = answers(engine(config), names)
        different = {n: (x, ours[n]) for n, x in right.items() if n in ours and ours[n] != x}
        assert not different, json.dumps(different)
        assert len(ours) > 80


def test_every_name_answers_or_says_what_to_do() -> None:
    """A method, or an error that says what is there in its place."""
    kinds = deepspeed.DeepSpeedEngine, deepspeed.PipelineEngine
    there = {name for kind in kinds for name in dir(kind)} | {*GIVEN} | {*OFF}
    assert [n for n in NAMES if n not in there and n not in INSTEAD] == []
    assert {*GIVEN, *OFF, *INSTEAD} <= {*NAMES} and not there & {*INSTEAD}
    assert [key for key, _ in GIVEN.values() if key not in KEYS] == []
    made = engine({"optimizer": ADAM})
    for name in INSTEAD:
        with pytest.raises(AttributeError, match=f"{name} is not there: "):
            getattr(made, name)
    with pytest.raises(AttributeError, match=r"no attribute 'zero_offloading'(.|\n)*docs/deepspeed.md"):
        _ = made.zero_offloading


# ---- what does something


def batch(i: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Six rows."""
    generator = torch.Generator().manual_seed(i)
    return torch.randn(6, 3, generator=generator).double(), torch.randint(3, (6,), generator=generator)


def net() -> nn.Module:
    """In float64."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 3)).double()


@pytest.mark.parametrize("stage", [0, 2])
def test_the_batch_changes_on_the_way(stage: int) -> None:
    """Steps of 1, 3 and 2 micro-batches, clipped at 1.0 as by default: as a plain loop."""
    config = {"train_batch_size": 6, "optimizer": ADAM, "zero_optimization": {"stage": stage}}
    made = deepspeed.initialize(model=net(), config=config)[0]
    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    at = 0
    for size in (1, 3, 3, 2, 1):
        made.set_train_batch_size(6 * size)
        assert made.get_batch_info() == (6 * size, 6, size)
        for i in range(at, at + size):
            x, y = batch(i)
            made.backward(5 * F.cross_entropy(made(x), y))
            assert made.is_gradient_accumulation_boundary() == (i == at + size - 1)
            made.step()
            (5 * F.cross_entropy(plain(x), y) / size).backward()
        at += size
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        assert made.get_global_grad_norm() == pytest.approx(float(norm), rel=1e-12) and norm > 1
        for p, right in zip(made.module.parameters(), plain.parameters(), strict=True):
            assert torch.allclose(p.full_tensor(), right, rtol=0, atol=1e-12)
    assert made.global_steps == 5 and made.micro_steps == 10
    made.set_train_micro_batch_size(4)
    assert made.get_batch_info() == (4, 4, 1)
    with pytest.raises(ValueError, match="expected a multiple of 4 rows"):
        made.set_train_batch_size(6)
    made(batch(0)[0]).sum().backward()
    with pytest.raises(ValueError, match="a step is begun"):
        made.set_train_batch_size(8)


def test_a_loss_that_is_scaled_by_hand() -> None:
    """engine.scale(loss).backward() is engine.backward(loss), and its value is DeepSpeed's."""
    found = []
    for by_hand in (False, True):
        torch.manual_seed(0)
        made = engine({"optimizer": ADAM, "fp16": {"enabled": True, "initial_scale_power": 4}})
        x, y = batch(0)
        loss = F.cross_entropy(made(x.half()).float(), y)
        if by_hand:
            scaled = made.scale(loss)
            assert scaled.item() == pytest.approx(16 * loss.item())
            scaled.backward()
        else:
            made.backward(loss)
        made.step()
        found.append((made.get_global_grad_norm(), made.module.weight.full_tensor()))
    assert found[0][0] == found[1][0] and torch.equal(found[0][1], found[1][1])


def test_timers() -> None:
    """Of the engine, and of the program."""
    made = engine({"optimizer": ADAM, "wall_clock_breakdown": True})
    x, y = batch(0)
    made.backward(F.cross_entropy(made(x.float()), y))
    made.step()
    told = made.get_wall_clock_timers()
    assert {*told} == {"fwd", "bwd", "step"} and min(told.values()) > 0
    timer = made.timers("own")
    timer.start()
    with pytest.raises(ValueError, match=r"runs already. Call stop\(\)"):
        timer.start()
    timer.stop()
    assert timer.elapsed(reset=False) == timer.mean() > 0 and timer.elapsed() > 0 == timer.elapsed()
    with pytest.raises(ValueError, match=r"does not run. Call start\(\)"):
        timer.stop()
    assert made.timers.get_mean(["fwd", "other"]) == {"fwd": pytest.approx(told["fwd"])}


def test_compiled() -> None:
    """The blocks, if there are some: the same steps."""
    with pytest.warns(UserWarning, match="no list of blocks"):
        engine({"optimizer": ADAM}).compile()
    found = []
    for compiles in (False, True):
        torch.manual_seed(0)
        blocks = nn.ModuleList([nn.Sequential(nn.Linear(3, 3), nn.GELU()) for _ in range(3)])
        made = deepspeed.initialize(model=Stacked(blocks), config={"train_batch_size": 6, "optimizer": ADAM})[
            0
        ]
        assert not made.is_compiled
        if compiles:
            made.compile(backend="aot_eager")
            assert made.is_compiled
        losses = []
        for i in range(3):
            x, y = batch(i)
            loss = F.cross_entropy(made(x.float()), y)
            made.backward(loss)
            made.step()
            losses.append(loss.item())
        found.append(losses)
    assert found[0] == pytest.approx(found[1], abs=1e-6) and found[0][2] != found[0][0]


class Stacked(nn.Module):
    """Blocks one after the other."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = blocks

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def test_what_is_offloaded(tmp_path: Path) -> None:
    """As the configuration says it, in its present and its former words."""
    told = []
    for section in (
        {"stage": 1, "offload_optimizer": {"device": "cpu", "ratio": 0.5}},
        {"stage": 2, "cpu_offload": True},
        {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": str(tmp_path)}},
        {"stage": 3, "offload_param": {"device": "cpu"}},
    ):
        made = engine({"optimizer": ADAM, "zero_optimization": section})
        kinds = made.zero_cpu_offload(), made.zero_nvme_offload_optimizer(), made.zero_use_cpu_optimizer()
        at = [
            None if x is None else x.device
            for x in (made.zero_offload_optimizer(), made.zero_offload_param())
        ]
        told.append((*kinds, made.zero_partial_offload(), *at))
        assert (made.plan.offload.states.place == "device") is (at[0] is None)
        assert (made.plan.offload.parameters.place == "device") is (at[1] is None)
    assert told == [
        (True, False, True, 0.5, "cpu", None),
        (True, False, True, 1.0, "cpu", None),
        (False, True, True, 1.0, "nvme", None),
        (False, False, False, 1.0, None, "cpu"),
    ]


def test_what_programs_take_from_submodules() -> None:
    """Recomputation gives the same gradients; optimizers under all of their names."""
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    gradients = []
    for call in (deepspeed.checkpointing.checkpoint, lambda function, *of: function(*of)):
        (gradient,) = torch.autograd.grad(call(torch.sin, x * x).sum(), x)
        gradients.append(gradient)
    assert torch.equal(*gradients)
    assert deepspeed.ops.lion.DeepSpeedCPULion is deepspeed.ops.lion.FusedLion
    assert deepspeed.ops.lamb.FusedLamb([torch.nn.Parameter(x.detach())]).defaults["lr"] > 0


@pytest.mark.skipif(torch.accelerator.is_available(), reason="answers of a CPU")
def test_small_answers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the accelerator, of utilities and of timers, on a machine without a GPU."""
    here, x = deepspeed.get_accelerator(), torch.tensor([3.0, 4.0])
    here.set_device(0)
    here.manual_seed(3)
    state = here.get_rng_state()
    drawn = torch.rand(2)
    here.set_rng_state(state)
    free, whole = here.available_memory(), here.total_memory()
    assert torch.equal(torch.rand(2), drawn) and here.initial_seed() == 3 and 0 < free <= whole
    assert here.supported_dtypes() == [torch.float32, torch.bfloat16, torch.float16]
    assert here.pin_memory(x) is x and here.on_accelerator(x) and here.random() is torch.random
    answers = [
        (here.current_device_name(), "cpu"),
        (here.current_device(), 0),
        (here.device_count(), 1),
        (here.communication_backend_name(), "gloo"),
        (here.is_bf16_supported(), True),
        (here.is_triton_supported(), False),
        (here.max_memory_reserved(), 0),
        (here.is_pinned(x), False),
        (here.Stream() or here.current_stream() or here.Event(), None),
        (here.FloatTensor, torch.FloatTensor),
    ]
    utilities = deepspeed.runtime.utils
    answers += [
        (utilities.get_global_norm([3.0, 4.0]), 5.0),
        (bool(utilities.has_inf_or_nan(x)), False),
        (bool(utilities.has_inf_or_nan(x / 0)), True),
        (utilities.clip_tensors_by_global_norm([y := x.clone()], 1.0, eps=0.0), 5.0),
        (utilities.move_to_device({"a": [x, 1]}, "meta")["a"][0].device.type, "meta"),
        (utilities.get_ma_status(), 0),
    ]
    copied = utilities.copy_to_device([x, drawn], "cpu", lambda each: each is x)
    assert copied[0] is not x and torch.equal(copied[0], x) and copied[1] is drawn
    torch.testing.assert_close(y, x / 5)
    for answer, right in answers:
        assert answer == right
    monkeypatch.setattr("espalier.compat.deepspeed.runtime.running_rank", lambda: 1)
    utilities.memory_status("two", print_rank=0)
    utilities.see_memory_usage("three", force=True)
    assert not capsys.readouterr().out
    utilities.memory_status("one", print_rank=1)
    assert capsys.readouterr().out.startswith("one\nallocated 0.00 GB")


def test_the_configuration_comes_by_the_command_line(tmp_path: Path) -> None:
    """As ``add_config_arguments`` reads it."""
    file = tmp_path / "ds.json"
    file.write_text(
        json.dumps({"train_batch_size": 6, "optimizer": {"type": "AdamW", "params": {"lr": 0.25}}})
    )
    parser = deepspeed.add_config_arguments(argparse.ArgumentParser())
    arguments = parser.parse_args(["--deepspeed", "--deepspeed_config", str(file)])
    model = nn.Linear(2, 2)
    engine, optimizer, *_ = deepspeed.initialize(arguments, model, model_parameters=model.parameters())
    assert engine.train_batch_size() == 6 and optimizer.param_groups[0]["lr"] == 0.25
    assert not parser.parse_args([]).deepspeed
