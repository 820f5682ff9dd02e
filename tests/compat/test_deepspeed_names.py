"""What programs take from ``deepspeed`` beside its engine: whole values of parameters, also before there is
an engine, weights of a checkpoint, and names of its modules."""

from __future__ import annotations

import argparse
import importlib
import importlib.util
import json
import os
import pkgutil
import subprocess
import sys
import tempfile
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn import functional as F

from espalier.comm.ledger import ledger
from espalier.compat import deepspeed
from espalier.compat.absent import Absent
from espalier.compat.deepspeed import utils
from espalier.compat.deepspeed.monitor.config import get_monitor_config
from espalier.compat.deepspeed.monitor.monitor import MonitorMaster
from espalier.compat.deepspeed.profiling.flops_profiler import FlopsProfiler, get_model_profile
from espalier.compat.deepspeed.runtime import utils as runtime_utils
from espalier.compat.deepspeed.runtime.activation_checkpointing import checkpointing
from espalier.compat.deepspeed.runtime.config import DeepSpeedConfig, DeepSpeedConfigError
from espalier.compat.deepspeed.runtime.dataloader import DeepSpeedDataLoader, RepeatingLoader
from espalier.compat.deepspeed.runtime.pipe import topology
from espalier.compat.deepspeed.runtime.pipe.topology import (
    PipeDataParallelTopology,
    PipeModelDataParallelTopology,
)
from espalier.compat.deepspeed.runtime.zero import stage3, stage_1_and_2
from espalier.compat.deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
from espalier.compat.deepspeed.sequence.layer import DistributedAttention
from espalier.compat.deepspeed.utils import groups, zero_to_fp32

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


def runs_of_this_rank(rank: int, world: int) -> None:
    """Of stage 3: of each parameter, as DeepSpeed cuts it; gradients that the program changes."""
    x = torch.randn(ROWS * world, 6, generator=torch.Generator().manual_seed(1))
    y = torch.arange(ROWS * world) % 3
    own = slice(rank * ROWS, (rank + 1) * ROWS)
    engine = made(3)
    torch.manual_seed(0)
    plain = net()
    optimizer = torch.optim.Adam(plain.parameters(), lr=0.01)
    held = [(engine.module[0].weight, plain[0].weight), (engine.module[2].bias, plain[2].bias)]
    assert len({p.ds_id for p, _ in held}) == 2
    for step in range(3):
        engine.backward(F.cross_entropy(engine(x[own]), y[own]))
        F.cross_entropy(plain(x), y).backward()
        for p, right in held:
            assert p.ds_status is ZeroParamStatus.NOT_AVAILABLE and p.ds_shape == right.shape
            assert p.ds_numel == right.numel()
            size = -(-right.numel() // world)
            grad = utils.safe_get_local_grad(p)
            assert right.grad is not None and grad is not None
            filled = F.pad(right.grad.flatten(), (0, size * world - right.numel()))
            assert torch.allclose(grad, filled[rank * size : (rank + 1) * size], atol=1e-6)
            if step == 1:
                utils.safe_set_local_grad(p, grad * (rank + 2))
                factors = torch.arange(2, world + 2).repeat_interleave(size)[: right.numel()]
                right.grad.mul_(factors.view(right.shape))
            elif step == 2:
                utils.safe_update_full_grad_vectorized([p], lambda grad, _: grad * 3)
                right.grad.mul_(3)
        engine.step()
        optimizer.step()
        optimizer.zero_grad()
        for p, right in held:
            value = utils.safe_get_full_fp32_param(p)
            assert torch.allclose(value, right, atol=1e-6)
            utils.safe_set_local_fp32_param(p, utils.safe_get_local_fp32_param(p) + rank)
            with torch.no_grad():
                added = torch.arange(world).repeat_interleave(-(-right.numel() // world))
                right.add_(added[: right.numel()].view(right.shape))
            state = utils.safe_get_local_optimizer_state(p, "exp_avg")
            assert state is not None
            utils.safe_set_local_optimizer_state(p, state / 2, "exp_avg")
            optimizer.state[right]["exp_avg"].div_(2)
    weight, bias = held[0][0], held[1][0]
    with ledger(engine.engine.mesh) as sent:  # rows that are divided evenly are runs
        utils.safe_get_local_fp32_param(weight)
        utils.safe_get_local_optimizer_state(weight, "exp_avg")
    assert not any(sent.by_axis().values())
    with ledger(engine.engine.mesh) as sent:
        utils.safe_get_local_fp32_param(bias)
    assert 0 <= sum(sent.by_axis().values()) <= 4 * bias.numel()
    with pytest.raises(ValueError, match=r"has 48 elements, .* got 3"):
        utils.safe_set_local_fp32_param(weight, torch.ones(3))
    with pytest.raises(ValueError, match="between backward and step"):
        utils.safe_set_full_grad(weight, held[0][1])
    with deepspeed.zero.GatheredParameters(weight, modifier_rank=1):
        assert weight.ds_status is ZeroParamStatus.AVAILABLE
        weight.data.fill_(rank + 5.0)
    assert weight.full_tensor().eq(6).all() and weight.ds_status is ZeroParamStatus.NOT_AVAILABLE
    told = [(groups._get_data_parallel_world_size(), groups.get_data_parallel_rank()) for _ in "12"]
    assert told == [(world, rank)] * 2 and groups._get_data_parallel_group_ranks() == [*range(world)]
    assert groups._get_model_parallel_world_size() == 1 and groups._get_sequence_parallel_rank() == 0
    assert engine.data_parallel_group is dist.group.WORLD
    alone = groups.get_tensor_model_parallel_group()
    assert dist.get_world_size(alone) == 1 and groups.get_tensor_model_parallel_group() is alone
    summed = torch.full((2,), rank + 1.0)
    deepspeed.comm.all_reduce(summed, group=groups._get_data_parallel_group(), prof=True, log_name="x")
    assert summed.tolist() == [3.0, 3.0]


def attention(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Of [sequence, batch, heads, size]."""
    found = F.scaled_dot_product_attention(*(x.permute(1, 2, 0, 3) for x in (q, k, v)))
    return found.permute(2, 0, 1, 3)


def shared_sequences_and_answers(rank: int, world: int) -> None:
    """Attention over parts of a sequence is that of the whole; a model that is cut answers as the whole."""
    torch.manual_seed(0)
    whole = torch.randn(3, 4 * world, 2, 2 * world, 3, dtype=torch.float64, requires_grad=True)
    right = attention(*whole)
    (right_grad,) = torch.autograd.grad(right.square().sum(), whole)
    part = whole.detach().chunk(world, 1)[rank].requires_grad_()
    found = DistributedAttention(attention, dist.group.WORLD)(*part, 1)  # type: ignore[misc]
    (grad,) = torch.autograd.grad(found.square().sum(), part)
    assert torch.allclose(found, right.chunk(world)[rank], rtol=0, atol=1e-12)
    assert torch.allclose(grad, right_grad.chunk(world, 1)[rank], rtol=0, atol=1e-12)

    plain, x = net().double(), torch.randn(ROWS, 6, dtype=torch.float64)
    state = plain.state_dict()
    right = plain(x).detach()
    with deepspeed.OnDevice(dtype=torch.float64, device="meta"):
        model = net()
    assert model[0].weight.is_meta and torch.get_default_dtype() is torch.float32
    told: dict[str, Any] = {"dtype": torch.float64, "tensor_parallel": {"tp_size": world}}
    with pytest.raises(ValueError, match="needs example=inputs"):
        deepspeed.init_inference(model, told, checkpoint="weights.pt")
    engine = deepspeed.init_inference(model, told, example=x, replace_with_kernel_inject=True)
    engine.load_state_dict(state)
    found = engine(x)
    assert type(found) is torch.Tensor and not found.requires_grad and not engine.training
    assert torch.allclose(found, right, rtol=0, atol=1e-12)
    assert engine.engine.plan.tensor == world == engine.mp_world_size
    with pytest.raises(ValueError, match=r"(?s)tp_size = 3: expected a divisor.*|quant.*weights are not"):
        deepspeed.init_inference(net(), tensor_parallel={"tp_size": 3}, quant={"enabled": True})

    model = deepspeed.tp_model_init(net(), tp_size=world, dtype=torch.float32)
    told = {"train_micro_batch_size_per_gpu": ROWS, "optimizer": ADAM}
    assert deepspeed.initialize(model=model, config=told)[0].plan.tensor == world
    with pytest.raises(ValueError, match="expected the same"):
        deepspeed.initialize(model=model, config={**told, "tensor_parallel": {"autotp_size": 4}})


@pytest.mark.world(2)
def test_names_on_ranks(ranks: Any) -> None:
    """Runs, gradients, groups, sequences, answers."""
    ranks(2, runs_of_this_rank)
    ranks(2, shared_sequences_and_answers)


def test_every_module_has_its_names() -> None:
    """All can be imported; what has no meaning here says what to do, and is nothing's class."""
    modules = pkgutil.walk_packages(deepspeed.__path__, f"{deepspeed.__name__}.")
    for module in [importlib.import_module(x.name) for x in modules if not x.name.endswith("__main__")]:
        for name in getattr(module, "__all__", ()):
            assert not isinstance(getattr(module, name), Absent)
        assert not hasattr(module, "no_such_name")
    absent: Any = deepspeed.DeepSpeedHybridEngine
    for use in (lambda: absent(), lambda: absent.step, lambda: types.new_class("Own", (absent,))):
        with pytest.raises(NotImplementedError, match="DeepSpeedHybridEngine is not there"):
            use()
    assert not isinstance(3, absent)
    with pytest.raises(NotImplementedError, match=r"CheckOverflow is not there: engine\.skipped_steps"):
        runtime_utils.CheckOverflow()
    with pytest.raises(NotImplementedError, match=r"comm\.mpi_discovery is not there: init_distr"):
        deepspeed.comm.mpi_discovery()


def test_a_namespace_goes_with_a_checkpoint(tmp_path: Path) -> None:
    """As Megatron's arguments do, with what is in them."""
    engine = made(1)
    args = argparse.Namespace(dtype=torch.float16, path=tmp_path, names={"a", "b"}, inner={"lr": 0.1})
    engine.save_checkpoint(tmp_path, client_state={"args": args, "iteration": 3})
    assert engine.load_checkpoint(tmp_path)[1] == {"args": args, "iteration": 3}


def test_what_an_optimizer_shows() -> None:
    """As DeepSpeed's own, of the last step."""
    engine = made(1, fp16={"enabled": True, "initial_scale_power": 4, "hysteresis": 1})
    optimizer: Any = engine.optimizer
    assert (optimizer.cur_scale, optimizer.overflow, optimizer.dynamic_loss_scale) == (16, False, True)
    for factor, right in ((1.0, (16, False)), (1e9, (8, True)), (1.0, (8, False))):
        before = engine.module[0].weight.full_tensor().clone()
        optimizer.backward(engine(torch.ones(ROWS, 6).half()).float().sum() * factor)
        assert engine.losses is not None
        engine.step()
        assert (optimizer.cur_scale, optimizer.overflow) == right
        assert torch.equal(before, engine.module[0].weight.full_tensor()) == right[1]
    assert engine.tput_timer.global_step_count == 3 and engine.tput_timer.avg_samples_per_sec() > 0


def plain_values() -> dict[str, Any]:
    """What functions of DeepSpeed's modules give, wherever they come from (``import`` decides)."""
    grid = PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3)
    found: dict[str, Any] = {
        "ranks": [grid.get_rank(pipe=1, data=2, model=0), grid.get_coord(7).data, grid.get_dim("none")],
        "lists": [grid.get_axis_comm_lists(axis) for axis in ("pipe", "data", "model")],
        "match": [grid.filter_match(pipe=0, data=1), grid.get_axis_list("model", 1), grid.get_rank_repr(5)],
        "pairs": [str(PipeDataParallelTopology(2, 2).get_coord(3)), grid.get_axis_names(), grid.world_size()],
        "parts": [runtime_utils.partition_uniform(n, k) for n, k in ((10, 4), (3, 5), (8, 4), (11, 3))],
        "sums": runtime_utils.prefix_sum_inc([3, 4, 5]),
        "call": runtime_utils.call_to_str("f", 1, "a", k=2),
        "zero2": [
            stage_1_and_2.estimate_zero2_model_states_mem_needs(10**9 + 7, n, m, away)
            for n, m, away in ((1, 1, True), (8, 2, False), (3, 2, True))
        ],
        "zero3": [
            stage3.estimate_zero3_model_states_mem_needs(10**9 + 7, 10**7, n, m, states, parameters, built)
            for n, m in ((1, 1), (8, 2))
            for states, parameters in ((True, True), (True, False), (False, False))
            for built in (True, False)
        ],
    }
    model = nn.Sequential(nn.Conv2d(2, 4, 3), nn.Flatten(), nn.Linear(64, 5, bias=False))
    found["macs"] = get_model_profile(model, (3, 2, 6, 6), print_profile=False, as_string=False)[1:]
    config = DeepSpeedConfig({"train_batch_size": 6, "gradient_accumulation_steps": 2, "optimizer": ADAM})
    with tempfile.TemporaryDirectory() as folder:
        section = {"enabled": True, "output_path": folder, "job_name": "run"}
        monitors = MonitorMaster(
            DeepSpeedConfig({"train_batch_size": 6, "csv_monitor": section}).monitor_config
        )
        for i in range(2):
            monitors.write_events([("Train/loss of all", 0.5 + i, i), ("lr", 1.0, i)])
        found["csv"] = {x.name: x.read_text() for x in sorted(Path(folder, "run").iterdir())}
        found["monitors"] = monitors.enabled
    off = get_monitor_config({"tensorboard": {"job_name": "x"}})
    found["off"] = [off.enabled, off.tensorboard.job_name, off.wandb.project, off.csv_monitor.output_path]
    found["config"] = [
        config.train_micro_batch_size_per_gpu, config.optimizer_name, config.zero_enabled,
        config.zero_config.stage, config.gradient_clipping, config.optimizer_params, config.dump_state,
    ]  # fmt: skip
    return found


QUESTIONS = (
    "get_stage_id get_data_parallel_id get_global_rank get_pipe_parallel_rank get_pipe_parallel_world_size "
    "get_pipeline_model_parallel_rank get_pipeline_model_parallel_world_size get_data_parallel_rank "
    "get_data_parallel_world_size get_data_parallel_group_ranks get_model_parallel_rank "
    "get_model_parallel_world_size get_slice_parallel_rank get_slice_parallel_world_size "
    "get_tensor_model_parallel_rank get_tensor_model_parallel_world_size get_pipe_parallel_group "
    "get_data_parallel_group get_model_parallel_group get_slice_parallel_group"
).split()
PLACES = (
    "global_rank world_size data_parallel_size pipe_parallel_size model_parallel_size slice_parallel_size "
    "stage_id data_parallel_id ds_model_world_size ds_model_rank dp_group dp_groups is_first_stage "
    "is_last_stage p2p_groups pp_group pipe_groups slice_group ds_model_proc_group dp_proc_group "
    "pp_proc_group slice_proc_group"
).split()


def grids(where: Any, become: Callable[[int, int], None]) -> list[Any]:
    """What grids answer on each rank; ``become(rank, ranks)`` makes this process one of them, whose groups
    are their ranks."""
    make, found = where.PipelineParallelGrid, []
    for given in (
        where.PipeModelDataParallelTopology(num_pp=2, num_mp=2, num_dp=3),
        where.PipeDataParallelTopology(3, 2),
        where.ProcessTopology(["data", "pipe"], [2, 2]),
        12,
    ):
        ranks = given if isinstance(given, int) else given.world_size()
        for rank in range(ranks):
            become(rank, ranks)
            grid = make(None if isinstance(given, int) else given)
            found.append([getattr(grid, name)() for name in QUESTIONS])
            found.append([getattr(grid, name) for name in PLACES])
            found.append([str(grid.topology()), grid.stage_to_global(grid.pipe_parallel_size - 1)])
    return found


REFERENCE = """
import contextlib, io, json, sys, types
sys.path.insert(0, {root!r})
import deepspeed
deepspeed.init_distributed(dist_backend="gloo", distributed_port=0)
for name in [*sys.modules]:
    if name == "deepspeed" or name.startswith("deepspeed."):
        sys.modules["espalier.compat." + name] = sys.modules[name]
import espalier.compat
espalier.compat.deepspeed = deepspeed
import tests.compat.test_deepspeed_names as names
assert names.stage3.__name__ == "deepspeed.runtime.zero.stage3"
values = names.plain_values()

def become(rank, ranks):
    where.dist = types.SimpleNamespace(
        get_rank=lambda: rank, get_world_size=lambda: ranks, new_group=lambda ranks: sorted(ranks)
    )

where = names.topology
with contextlib.redirect_stdout(io.StringIO()):
    values["grids"] = names.grids(where, become)
json.dump(values, open(sys.argv[1], "w"))
"""


def test_values_are_deepspeeds(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Grids, parts, estimates, products, configurations, files of a monitor."""
    from espalier.compat.deepspeed import topologies  # which DeepSpeed has not

    def become(rank: int, ranks: int) -> None:
        monkeypatch.setattr(topologies, "running_rank", lambda: rank)
        monkeypatch.setattr(topologies, "running_size", lambda: ranks)
        monkeypatch.setattr(topologies, "group_of", sorted)

    ours = plain_values() | {"grids": grids(topology, become)}
    monkeypatch.undo()
    assert plain_values()["macs"] == (3 * (16 * 4 * 18 + 64 * 5), 4 * 18 + 4 + 64 * 5)
    stage3.estimate_zero3_model_states_mem_needs_all_live(net(), 8, 2)
    stage_1_and_2.estimate_zero2_model_states_mem_needs_all_live(net(), 1, 1)
    assert capsys.readouterr().out.count("GB |") == 16
    if importlib.util.find_spec("deepspeed") is None:
        pytest.skip("needs DeepSpeed: see tests/compat/test_deepspeed.py")
    script, to = tmp_path / "reference.py", tmp_path / "found.json"
    script.write_text(REFERENCE.format(root=str(Path(__file__).parents[2])))
    done = subprocess.run(
        [sys.executable, str(script), str(to)], capture_output=True, text=True,
        env={
            **os.environ, "DS_ACCELERATOR": "cpu", "RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0",
        },
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    theirs, ours = json.loads(to.read_text()), json.loads(json.dumps(ours))
    assert {name for name, x in theirs.items() if ours[name] != x} == set() and {*theirs} == {*ours}


def test_what_takes_a_model_or_rows(capsys: pytest.CaptureFixture[str]) -> None:
    """Norms, loaders, recomputation, memory, timers."""
    model, x = net(), torch.randn(5, 6)
    model(x).sum().backward()
    right = float(nn.utils.get_total_norm([p.grad for p in model.parameters() if p.grad is not None]))
    assert runtime_utils.get_grad_norm(model.parameters()) == pytest.approx(right)
    assert float(runtime_utils.clip_grad_norm_(model.parameters(), right / 2)) == pytest.approx(right)
    assert runtime_utils.get_grad_norm(model.parameters()) == pytest.approx(right / 2)
    assert runtime_utils.get_weight_norm([torch.tensor([3.0]), torch.tensor([4.0])]) == pytest.approx(5)
    assert runtime_utils.get_global_norm_of_tensors([torch.tensor([float("nan")])]) == -1
    loader = DeepSpeedDataLoader(list(range(7)), 2, False, -1, None, dataloader_drop_last=True)  # type: ignore[arg-type]
    again = RepeatingLoader(loader)
    assert len(loader) == 3 and len([next(again) for _ in range(7)]) == 7
    own = DeepSpeedDataLoader(list(range(8)), 2, False, 0, None, data_parallel_world_size=2,
                              data_parallel_rank=1)  # type: ignore[arg-type]  # fmt: skip
    assert len(own) == 2
    with checkpointing.get_cuda_rng_tracker().fork():
        checkpointing.model_parallel_cuda_manual_seed(3)
    assert torch.equal(checkpointing.checkpoint(model, x), model(x))
    profiler = FlopsProfiler(model)
    profiler.start_profile()
    model(x)
    profiler.stop_profile()
    profiler.print_model_profile()
    assert "163 parameters" in capsys.readouterr().out and profiler.get_total_flops() == 2 * 5 * 144
    runtime_utils.see_memory_usage("here")
    assert not capsys.readouterr().out
    runtime_utils.see_memory_usage("here", force=True)
    assert capsys.readouterr().out.startswith("here\nallocated 0.00 GB")
    timer = utils.timer.ThroughputTimer(batch_size=4, start_step=1)
    assert timer.avg_samples_per_sec() == float("-inf")
    with pytest.raises(DeepSpeedConfigError, match="train_batchsize"):
        DeepSpeedConfig({"train_batchsize": 3})


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
