"""Programs for torch's wrappers: the same files with other imports have the same losses."""

from __future__ import annotations

import contextlib
import copy
import difflib
import multiprocessing
import os
import runpy
import warnings
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.fsdp as torch_fsdp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import apply_activation_checkpointing
from torch.distributed.algorithms._comm_hooks import default_hooks as fsdp_hooks
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.checkpoint import state_dict
from torch.distributed.fsdp import (
    CPUOffload,
    MixedPrecision,
    MixedPrecisionPolicy,
    OptimStateKeyType,
    ShardingStrategy,
    StateDictType,
)
from torch.utils.checkpoint import checkpoint

import espalier
from espalier.compat import torch as here
from espalier.compat.torch import pipelining
from tests.compat.migrated import PROGRAMS, migrate
from tests.compat.schedules import as_torchs, beside, scheduled, with_styles

TOLERANCE, STEPS = 1e-6, 20  # in float32


@contextlib.contextmanager
def joined() -> Iterator[None]:
    """Programs that join a world and leave it find themselves in one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dist, "init_process_group", lambda *args, **kwargs: None)
        patch.setattr(dist, "destroy_process_group", lambda *args, **kwargs: None)
        yield


def run(name: str, rank: int, world: int, folder: Path = PROGRAMS) -> list[float]:
    """The losses of a program."""
    names = runpy.run_path(str(folder / f"{name}.py"))
    torch.manual_seed(7)
    return names["train"](rank, world) if "train" in names else names["main"]()


def both(rank: int, world: int, names: list[str], folder: Path) -> None:
    with joined():
        for name in names:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                theirs = run(name, rank, world)
            ours = run(f"{name}_here", rank, world)
            assert len(theirs) == len(ours), (name, theirs, ours)
            assert len(ours) >= STEPS or (name == "pipelining" and rank < world - 1), (name, ours)
            for i, (a, b) in enumerate(zip(theirs, ours, strict=True)):
                assert abs(a - b) <= TOLERANCE * max(1.0, abs(a)), (name, i, a, b)
            if name in NAMES:
                assert run(name, rank, world, folder) == ours, f"{name}, as espalier migrate changes it"


def piped(rank: int, world: int) -> None:
    """Pipe(chunks=8) against the model alone."""
    ours = run("pipe_here", rank, world)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(here, "Pipe", lambda model, chunks: Plain(model))
        theirs = run("pipe_here", rank, world)
    assert len(ours) == STEPS + 1
    for a, b in zip(ours, theirs, strict=True):
        assert abs(a - b) <= TOLERANCE, (ours, theirs)


def added_up(rank: int, world: int) -> None:
    """A loop that never drops gradients, and goes back twice for one step, adds them up as on one process."""
    found = []
    for wrap in (lambda model: here.Pipe(model, chunks=4), lambda model: model):
        model = wrap(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        for i in (0, 1, 2, 3):
            x, y = batch(i, 0)
            loss = F.cross_entropy(model(x), y)
            loss.backward()
            if i != 1:
                optimizer.step()
            found.append(float(loss.detach()))
    for a, b in zip(found[:4], found[4:], strict=True):
        assert abs(a - b) < 1e-10, found


class Plain(nn.Module):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = self.model(x)
        out.local_value = lambda: out
        return out


NAMES = [
    "data_parallel",
    "distributed_data_parallel",
    "zero_optimizer",
    "fully_sharded",
    "fully_shard",
    "pipelining",
    "dtensor",
]
PREPARED = ["layerwise", "tensorwise"]  # one line more


def test_programs_with_other_imports_have_the_same_losses(ranks: Any, tmp_path: Path) -> None:
    """And so have those that ``espalier migrate`` gives them: its diff, applied."""
    migrate(NAMES, tmp_path)
    ranks(2, both, NAMES + PREPARED, tmp_path, timeout=60)


def test_pipe(ranks: Any) -> None:
    ranks(2, piped)
    ranks(2, added_up)


class OnTwo(nn.DataParallel[nn.Module]):
    """torch's own where there are two devices, which are the host here."""

    def __init__(self, module: nn.Module, device_ids: Any = None, output_device: Any = None, dim: int = 0):
        super().__init__(module)
        self.device_ids, self.dim = [0, 1] if device_ids is None else device_ids, dim

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([self.module(part) for part in x.chunk(len(self.device_ids), self.dim)], self.dim)


@pytest.mark.parametrize("wrapper", ["DataParallel", "threads", "Pipe"])
def test_one_process_computes_the_same_and_tells_of_ranks(
    wrapper: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without several devices, ``device_ids`` has no effect, as torch's own has none; with such, it runs."""
    x, y = batch(0, 0)
    plain = net()
    if wrapper == "DataParallel":
        model: Any = here.DataParallel(net(), device_ids=[0, 1])
    else:
        monkeypatch.setattr("espalier.compat.common.count", lambda: 4)
        monkeypatch.setattr(nn, "DataParallel", OnTwo)
        with pytest.warns(UserWarning, match=r"in one process(.|\n)*espalier run -n 4"):
            model = here.Pipe(net()) if wrapper == "Pipe" else here.DataParallel(net(), None, None, 0)
    for of in (plain, model):
        optimizer = torch.optim.SGD(of.parameters(), lr=0.1)
        F.cross_entropy(of(x), y).backward()
        optimizer.step()
    assert torch.allclose(model(x), plain(x), rtol=0, atol=1e-12)
    if wrapper == "threads":
        assert not model.is_made  # the model is as torch's own has it
        assert list(model.state_dict()) == [f"module.{name}" for name in plain.state_dict()]
        with pytest.warns(UserWarning, match="a thread for each of 4 devices"):
            assert here.DataParallel(nn.Identity(), dim=1)(x).equal(x)  # ranks cut rows alone


def test_ranks_that_a_program_has_started_meet_without_an_address(monkeypatch: pytest.MonkeyPatch) -> None:
    told = []
    monkeypatch.setattr(dist, "init_process_group", lambda *given, **more: told.append((given, more)))
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    here.distributed.init_process_group("gloo", rank=0, world_size=2)
    assert "MASTER_ADDR" not in os.environ  # nobody has started this one: it may be one of several machines'
    monkeypatch.setattr(multiprocessing, "parent_process", lambda: SimpleNamespace(pid=20_007))
    here.distributed.init_process_group("gloo", rank=0, world_size=2)
    assert os.environ["MASTER_ADDR"] == "127.0.0.1" and os.environ["MASTER_PORT"] == "20007"
    assert told == [(("gloo", None), {"rank": 0, "world_size": 2})] * 2
    assert here.distributed.get_rank is dist.get_rank


@pytest.mark.parametrize("name", NAMES)
def test_the_two_files_differ_in_their_imports_alone(name: str) -> None:
    def body(of: str) -> str:
        text = (PROGRAMS / f"{of}.py").read_text("utf-8")
        return text.partition("\n\n\n")[2]

    assert body(name) == body(f"{name}_here")


@pytest.mark.parametrize("name", PREPARED)
def test_programs_that_were_laid_out_by_hand_differ_in_one_line(name: str) -> None:
    """And in what they import; layers that cut themselves are torch's own then."""
    theirs, ours = (
        (PROGRAMS / f"{of}.py").read_text("utf-8").partition("def digits")[2] for of in (name, f"{name}_here")
    )
    more = [line.strip() for line in difflib.ndiff(theirs.split("\n"), ours.split("\n")) if line[0] in "+-?"]
    assert len(more) == 1 and "= prepare(model, optimizer, plan=" in more[0], more


# ---- what wrappers make of their arguments


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)).double()


def batch(step: int, place: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(10 * step + place)
    x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
    return x, torch.randint(0, 4, (4,), generator=generator)


def plain_losses(ranks: int) -> list[float]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        loss = torch.stack([F.cross_entropy(model(x), y) for x, y in (batch(step, i) for i in range(ranks))])
        loss.mean().backward()
        optimizer.step()
        losses.append(loss.mean().item())
    return losses


def trained(model: Any, place: int) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.05)
    losses = []
    for step in range(3):
        optimizer.zero_grad()
        x, y = batch(step, place)
        loss = F.cross_entropy(model(x), y)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def mean(losses: list[float]) -> list[float]:
    told = torch.tensor(losses, dtype=torch.float64)
    dist.all_reduce(told)
    return (told / dist.get_world_size()).tolist()


def strategies(rank: int, world: int, plan: dict[str, int]) -> None:
    data = world // (2 if "tensor" in plan else 1)
    place = rank // (world // data)
    expected = plain_losses(data)
    made = []
    for strategy in ShardingStrategy:
        for offload in (None, CPUOffload(True)) if strategy is ShardingStrategy.FULL_SHARD else (None,):
            made.append(here.FullyShardedDataParallel(net(), None, strategy, offload, plan=plan))
    made.append(here.DistributedDataParallel(net(), bucket_cap_mb=1, static_graph=True, plan=plan))
    made.append(here.fully_shard(net(), reshard_after_forward=False, plan=plan))
    made.append(here.fully_shard(torch.compile(net(), backend="eager"), plan=plan))
    for model in made:
        for a, b in zip(mean(trained(model, place)), expected, strict=True):
            assert abs(a - b) < 1e-10, (model.engine.plan, a, b)
    plans = [model.engine.plan for model in made]
    assert [p.zero for p in plans] == [3, 3, 2, 0, 3, 2, 0, 2, 3]
    assert plans[1].offload.parameters.place == "host" and plans[6].chunk_megabytes == 1
    fsdp = made[0]
    held = fsdp.state_dict()
    with here.fsdp.FullyShardedDataParallel.state_dict_type(fsdp, StateDictType.SHARDED_STATE_DICT):
        cut = fsdp.state_dict()
    for name, x in net().state_dict().items():
        assert held[name].shape == x.shape and torch.equal(cut[name].full_tensor(), held[name])
    optimizer = fsdp.engine.optimizer
    states = here.FullyShardedDataParallel.optim_state_dict(fsdp, optimizer)
    assert states["state"]["0.weight"]["exp_avg"].shape == (8, 6)
    before = {name: x["exp_avg"].clone() for name, x in states["state"].items()}
    optimizer.load_state_dict(here.FullyShardedDataParallel.optim_state_dict_to_load(fsdp, optimizer, states))
    x, y = batch(0, place)
    F.cross_entropy(fsdp(x), y).backward()
    optimizer.step()
    after = here.FullyShardedDataParallel.optim_state_dict(fsdp, optimizer)["state"]
    grads = (after["0.weight"]["exp_avg"] - 0.9 * before["0.weight"]) / 0.1
    assert 0 < grads.abs().max() < 1
    FSDP = here.FullyShardedDataParallel
    whole = FSDP.full_optim_state_dict(fsdp, optimizer)
    assert bool(whole) == (dist.get_rank() == 0)
    numbered = FSDP.scatter_full_optim_state_dict(whole or None, fsdp, optim=optimizer)
    assert torch.equal(numbered["state"][0]["exp_avg"], after["0.weight"]["exp_avg"])
    named = FSDP.rekey_optim_state_dict(numbered, OptimStateKeyType.PARAM_NAME, fsdp, optim=optimizer)
    assert list(named["state"]) == list(after)
    again = FSDP.rekey_optim_state_dict(named, OptimStateKeyType.PARAM_ID, fsdp)
    assert again["param_groups"][0]["params"] == [0, 1, 2, 3] and list(again["state"]) == [0, 1, 2, 3]
    assert FSDP.get_state_dict_type(fsdp).kind is StateDictType.FULL_STATE_DICT
    fsdp.load_state_dict(held)
    assert all(torch.equal(x, held[name]) for name, x in fsdp.state_dict().items())


def hooked(rank: int, world: int) -> None:
    model = here.DistributedDataParallel(net().float())
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    x, _ = batch(0, rank)
    model(x.float()).sum().backward()
    assert model.engine.plan.precision.reduce == "bfloat16"
    with pytest.raises(ValueError, match="before the first call"):
        model.register_comm_hook(None, default_hooks.fp16_compress_hook)
    with pytest.raises(ValueError, match=r"powerSGD(.|\n)*allreduce_hook, fp16"):
        here.DistributedDataParallel(net()).register_comm_hook(None, powerSGD_hook)
    model = here.DistributedDataParallel(net().float()).double()  # a cast counts until the first call
    assert model(x).dtype == torch.float64
    with pytest.raises(ValueError, match="cast of a prepared model is too late"):
        model.float()
    half = MixedPrecision(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = here.FullyShardedDataParallel(net().float(), mixed_precision=half)
    assert model(x.float()).dtype == torch.bfloat16
    assert model.engine.plan.precision.reduce == "float32" and model.engine.plan.zero == 3
    model = here.FullyShardedDataParallel(net().float())
    model.register_comm_hook(None, fsdp_hooks.fp16_compress_hook)
    assert model.engine.plan.precision.reduce == "float16"
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16, output_dtype=torch.float32)
    model = here.fully_shard(net().float(), mp_policy=policy)
    model.set_reshard_after_forward(False)
    model.set_requires_all_reduce(False)
    assert model(x.float()).dtype == torch.float32 and model.engine.plan.zero == 2
    with pytest.raises(ValueError, match="leave it out"):
        model.set_custom_all_gather(model)


class Extractor(nn.Sequential):
    def features(self, x: torch.Tensor) -> torch.Tensor:
        return self[1](self[0](x))


def fully(rank: int, world: int) -> None:
    """What modules of fully_shard are told, against torch's own on the same ranks."""
    results = []
    mesh = dist.init_device_mesh("cpu", (world,))
    for of in (torch_fsdp, here.fsdp):
        model: Any = Extractor(*net())
        for module in (model[0], model):
            of.fully_shard(module, mesh=mesh)
            module.set_gradient_divide_factor(1.0)
        of.register_fsdp_forward_method(model, "features")
        model.unshard(async_op=True).wait()
        x, y = batch(0, rank)
        F.cross_entropy(model(x), y).backward()
        grads = [p.grad.full_tensor() for p in model.parameters()]
        model.set_is_last_backward(True)
        features = model.features(x).detach()
        results.append([features, *grads])
    torch.testing.assert_close(*results, rtol=0, atol=1e-12)
    model[0].set_gradient_divide_factor(2.0)
    with pytest.raises(ValueError, match=r"divide_factor(.|\n)*one for all modules"):
        model(x)


class Recomputed(nn.Sequential):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self:
            x = checkpoint(part, x, use_reentrant=False)
        return x


def recomputed(rank: int, world: int) -> None:
    """Sharded parts that the model's forward checkpoints, or that are wrapped so after they were sharded."""
    results = []
    for of in (torch_fsdp, here.fsdp):
        for wraps in (False, True):
            torch.manual_seed(0)
            parts = [nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2)]
            model: Any = (nn.Sequential if wraps else Recomputed)(*parts, nn.Linear(6, 4)).double()
            for module in (*model[:2], model):
                of.fully_shard(module)
            if wraps:
                apply_activation_checkpointing(model, check_fn=parts.__contains__)
            optimizer = torch.optim.AdamW(model.parameters(), 0.1)
            losses = []
            for step in range(2):
                x, y = batch(step, rank)
                (loss := F.cross_entropy(model(x), y)).backward()
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.detach())
            results.append([*losses, *(p.full_tensor() for p in model.parameters())])
    for result in results[1:]:
        torch.testing.assert_close(result, results[0], rtol=0, atol=1e-12)


def powerSGD_hook(state: Any, bucket: Any) -> Any: ...


def on_two(rank: int, world: int) -> None:
    strategies(rank, world, {})
    hooked(rank, world)
    fully(rank, world)
    recomputed(rank, world)
    scheduled(rank, world)
    as_torchs(rank, world)


@pytest.mark.filterwarnings("ignore:.*was compiled by torch.compile")
def test_strategies_and_hooks(ranks: Any) -> None:
    ranks(2, on_two, timeout=60)
    ranks(4, beside)
    ranks(4, with_styles)


class Ends(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        pipelining.pipe_split()
        return x + 1


def test_what_cannot_be_done_is_refused_in_words() -> None:
    DDP, FSDP = here.DistributedDataParallel, here.FullyShardedDataParallel
    with pytest.raises(ValueError, match="rows are cut"):
        here.DataParallel(net(), dim=1)
    with pytest.raises(ValueError, match="leave join"):
        DDP(net()).join()
    with pytest.raises(ValueError, match=r"2 mistakes(.|\n)*ignored_modules(.|\n)*deferred"):
        FSDP(net(), ignored_modules=[net()], param_init_fn=print)
    with pytest.raises(ValueError, match="flat"):
        FSDP.set_state_dict_type(FSDP(net()), StateDictType.LOCAL_STATE_DICT)
    with pytest.raises(ValueError, match="deferred_batch_norm"):
        here.Pipe(net(), deferred_batch_norm=True)
    with pytest.raises(ValueError, match=r"nothing behind it(.|\n)*no such module"):
        here.pipeline(net(), split_spec={"2": here.SplitPoint.END, "9": here.SplitPoint.BEGINNING})
    assert pipelining.get_schedule_class("interleaved1f1b") is pipelining.ScheduleInterleaved1F1B
    with pytest.raises(ValueError, match=r"Zero(.|\n)*GPipe, 1F1B(.|\n)*ZBVZeroBubble"):
        pipelining.get_schedule_class("Zero")
    stages = [pipelining.PipelineStage(net(), i, 4) for i in (0, 3)]
    with pytest.raises(ValueError, match="at least as many micro-batches as stages, 4"):
        pipelining.ScheduleDualPipeV(stages, 3, F.cross_entropy)
    pipelining.pipe_split()
    with pytest.raises(ValueError, match=r"pipe_split(.|\n)*no module is called behind it"):
        pipelining.pipeline(Ends(), (torch.ones(2),))
    pipe = pipelining.pipeline(net(), split_spec={"2": pipelining.SplitPoint.BEGINNING})
    stage = pipelining.build_stage(pipe.get_stage_module(1), 1, pipe.info())
    assert stage.is_last and stage.cuts == ("2",)
    model = DDP(net())
    assert (
        espalier.EngineModule in type(model).__mro__ and next(iter(model.state_dict())) == "module.0.weight"
    )


def test_two_optimizers_of_one_model_have_a_part_each() -> None:
    plain, model = net(), here.DistributedDataParallel(net())
    pairs = [
        [torch.optim.SGD(whole[i].parameters(), lr=0.1 + i) for i in (0, 2)]
        for whole in (plain, model.module)
    ]
    for whole, optimizers in zip((plain, model), pairs, strict=True):
        for step in range(3):
            whole(batch(step, 0)[0]).square().mean().backward()
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
    for p, q in zip(plain.parameters(), model.parameters(), strict=True):
        assert torch.equal(p, espalier.full_tensor(q))


def test_a_parameter_in_two_optimizers_is_refused() -> None:
    model = here.DistributedDataParallel(net())
    kept = [torch.optim.SGD(part.parameters(), lr=0.1) for part in (model.module, model.module[2])]
    with pytest.raises(ValueError, match=r"2 parameter\(s\) are held by two of the optimizers"):
        model(batch(0, 0)[0])
    del kept


def written(rank: int, world: int) -> None:
    plain, ours = net(), net()
    model = here.FullyShardedDataParallel(ours)
    for step in range(2):
        for whole in (plain, model):
            whole(batch(step, 0)[0]).sum().backward()
            whole.zero_grad()
        with here.FullyShardedDataParallel.summon_full_params(model), torch.no_grad():
            for of in (plain, ours):
                of[0].weight.mul_(2)
                of[0].weight[1:3, ::2] += 1
                of[0].bias[1] = 3.0
                of[2].weight.copy_(torch.full(of[2].weight.shape, 0.5))
                nn.init.constant_(of[2].bias, 0.1)
    states = model.state_dict()
    for name, x in plain.state_dict().items():
        assert torch.equal(x, states[name]), name


def test_what_is_written_to_whole_parameters_is_carried_over(ranks: Any) -> None:
    ranks(2, written)


def state_dicts_by_torch(rank: int, world: int) -> None:
    """By torch.distributed.checkpoint.state_dict, of each wrapper: names and values of one process."""
    x, y = torch.randn(8, 6, generator=torch.Generator().manual_seed(1)), torch.arange(8) % 3
    own = slice(rank * 4, rank * 4 + 4)

    def made(wrap: Any) -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        model = wrap(nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.Linear(16, 3)))
        return model, torch.optim.Adam(model.parameters(), lr=0.01)

    def train(model: Any, optimizer: torch.optim.Optimizer, rows: slice) -> None:
        F.cross_entropy(model(x[rows]), y[rows]).backward()
        optimizer.step()
        optimizer.zero_grad()

    plain, by = made(lambda model: model)
    train(plain, by, slice(None))
    right, states = plain.state_dict(), state_dict.get_optimizer_state_dict(plain, by)["state"]
    whole = state_dict.StateDictOptions(full_state_dict=True)
    sent = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    prepared = partial(espalier.prepare, plan={"data": world, "zero": 3}, rows="own")
    for wrap in (here.FullyShardedDataParallel, here.DistributedDataParallel, prepared):
        model, optimizer = made(wrap)
        train(model, optimizer, own)
        assert [*optimizer.state] == [*model.parameters()], "on all ranks in one order"
        found = state_dict.get_optimizer_state_dict(model, optimizer, options=whole)["state"]
        assert {*found} == {*states}
        for name, of in states.items():
            for key, value in of.items():
                assert torch.allclose(found[name][key], value, atol=1e-6), (name, key)
        parts = state_dict.get_state_dict(model, optimizer)
        again, other = made(wrap)
        train(again, other, own)
        train(again, other, own)
        state_dict.set_state_dict(
            again, other, model_state_dict=parts[0], optim_state_dict=copy.deepcopy(parts[1])
        )
        train(model, optimizer, own)
        train(again, other, own)
        one, two = (state_dict.get_model_state_dict(m, options=whole) for m in (model, again))
        assert all(torch.equal(value, two[name]) for name, value in one.items())
        for told, options in ((right, whole), (right if rank == 0 else {}, sent)):
            state_dict.set_model_state_dict(again, {k: v.clone() for k, v in told.items()}, options=options)
            found = state_dict.get_model_state_dict(again, options=whole)
            assert [*found] == [*right] and all(torch.allclose(found[k], v) for k, v in right.items())


@pytest.mark.world(2)
def test_state_dicts_by_torch(ranks: Any) -> None:
    """Of FSDP, DDP and ``espalier.prepare``; states stand in one order on all ranks."""
    ranks(2, state_dicts_by_torch)


def test_names_of_fsdp() -> None:
    """All that torch has beside it; what means nothing here says what to do."""
    import torch.distributed.fsdp as theirs

    assert [name for name in theirs.__all__ if not hasattr(here.fsdp, name)] == []
    assert here.fsdp.lambda_auto_wrap_policy is theirs.wrap.lambda_auto_wrap_policy
    with pytest.raises(NotImplementedError, match=r"FlatParameter is not there: the engine gathers"):
        here.fsdp.FlatParameter()
