"""compat.accelerate.Accelerator against accelerate's own: one program, with other imports, under plans."""

from __future__ import annotations

import copy
import os
import runpy
import tempfile
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

accelerate = pytest.importorskip("accelerate")

from espalier import GatherWarning, Plan, full_tensor  # noqa: E402 - behind the skip
from espalier.compat import accelerate as accelerate_here  # noqa: E402 - behind the skip
from tests.compat.migrated import PROGRAMS, migrate  # noqa: E402 - behind the skip

PRELOAD = ("accelerate",)
TOLERANCE = 1e-6  # float32
EPOCHS = 4  # after the first a state is saved, after the second it is loaded


@contextmanager
def afresh() -> Iterator[None]:
    """accelerate knows of no other Accelerator."""
    from accelerate.state import AcceleratorState, GradientState

    before = dict(os.environ)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    os.environ.clear()
    os.environ.update(before)
    AcceleratorState._reset_state(True)
    GradientState._reset_state()


def run(name: str, folder: Path = PROGRAMS, **options: Any) -> list[float]:
    with afresh():
        return runpy.run_path(str(folder / f"{name}.py"))["main"](epochs=EPOCHS, **options)


def theirs(rank: int, world: int, batch: int) -> list[float]:
    return run("accelerator", batch=batch)


def close(expected: list[float], found: list[float], what: Any, tolerance: float = TOLERANCE) -> None:
    assert len(expected) == len(found), (what, expected, found)
    for i, (a, b) in enumerate(zip(expected, found, strict=True)):
        assert abs(a - b) < tolerance * max(1.0, abs(a)), (what, i, a, b)


def programs(rank: int, world: int, alone: list[float], folder: Path) -> None:
    expected = run("accelerator")
    close(expected, run("accelerator", folder), "as espalier migrate changes it")
    for options in ({}, {"plan": {"data": 2, "zero": 3}}):
        close(expected, run("accelerator_here", **options), options)
    for plan in ({"tensor": 2}, {"pipe": 2}, {"pipe": 2, "accumulate": 2}):
        close(alone, run("accelerator_here", batch=32, plan=plan), plan, 2e-6)


def early(rank: int, world: int, folder: str) -> None:
    """A state is loaded before a batch has said how parameters lie."""
    from espalier.compat.accelerate import Accelerator

    batches = [torch.randn(4, 6) for _ in range(3)]
    losses = []
    for going_on in (False, True):
        with afresh():
            accelerator = Accelerator(plan={"tensor": 2})
            torch.manual_seed(0 if not going_on else 1)
            net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6))
            model, optimizer = accelerator.prepare(net, torch.optim.AdamW(net.parameters()))
            if going_on:
                accelerator.load_state(folder)
            for x in batches[going_on:]:
                loss = model(x).square().mean()
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                losses.append(loss.item())
                if len(losses) == 1:
                    accelerator.save_state(folder)
    assert losses[3:] == losses[1:3]


def each() -> Iterator[Any]:
    """accelerate's own, and ours by two plans, each afresh."""
    kinds: list[tuple[Any, dict[str, Any]]] = [
        (accelerate.Accelerator, {"cpu": True}),
        (accelerate_here.Accelerator, {}),
        (accelerate_here.Accelerator, {"plan": {"data": 2, "zero": 3}}),
    ]
    for kind, options in kinds:
        with afresh():
            accelerator = kind(**options)
            torch.manual_seed(0)
            yield accelerator


def with_two(rank: int, world: int) -> None:
    """Two optimizers of one model, as accelerate itself steps them."""
    results = []
    for accelerator in each():
        net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
        first, second = (
            torch.optim.AdamW(net[0].parameters(), 0.01),
            torch.optim.SGD(net[2].parameters(), 0.1),
        )
        model, first, second = accelerator.prepare(net, first, second)
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            loss = model(torch.randn(4, 6, generator=generator, dtype=torch.float64)).square().mean()
            accelerator.backward(loss)
            for optimizer in (first, second) if step != 1 else (second,):
                optimizer.step()
                optimizer.zero_grad()
        results.append(accelerator.get_state_dict(model))
    for found in results[1:]:
        for name, x in results[0].items():
            assert (found[name] - x).abs().max() < 1e-12, name


def of_two_models(rank: int, world: int) -> None:
    """One optimizer over two models, prepared in one call; a cast comes too late then."""
    results = []
    for accelerator in each():
        unet = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
        text = nn.Linear(6, 6).double()
        both = [*unet.parameters(), *text.parameters()]
        unet, text, optimizer = accelerator.prepare(unet, text, torch.optim.AdamW(both, 0.01))
        for step in range(3):
            generator = torch.Generator().manual_seed(10 * step + rank)
            x = torch.randn(4, 6, generator=generator, dtype=torch.float64)
            accelerator.backward(unet(text(x)).square().mean())
            accelerator.clip_grad_norm_(both, 0.1)
            optimizer.step()
            optimizer.zero_grad()
        results.append([*map(accelerator.get_state_dict, (unet, text))])
        if isinstance(accelerator, accelerate_here.Accelerator):
            with pytest.raises(ValueError, match="a cast of a prepared model is too late"):
                unet.half()
    for found in results[1:]:
        for a, b in zip(results[0], found, strict=True):
            for name, x in a.items():
                assert (b[name] - x).abs().max() < 1e-12, name


class Tagger(nn.Module):
    """A model of words, which a mask tells from padding."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed, self.out = nn.Embedding(9, 6), nn.Linear(6, 3)

    def forward(self, input_ids: Any, attention_mask: Any, labels: Any) -> tuple[Any, Any]:
        x, mask = self.embed(input_ids), attention_mask.unsqueeze(-1)
        logits = self.out(x + (x * mask).sum(1, keepdim=True) / mask.sum(1, keepdim=True))
        return nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()), logits


class Collator:
    """Pads to the longest row of those that it is given."""

    def __init__(self, side: str) -> None:
        self.tokenizer = SimpleNamespace(pad_token_id=8, padding_side=side)

    def __call__(self, rows: list[list[int]]) -> dict[str, torch.Tensor]:
        most, side = max(map(len, rows)), self.tokenizer.padding_side

        def padded(row: list[int], value: int) -> list[int]:
            more = [value] * (most - len(row))
            return more + row if side == "left" else row + more

        columns = {
            "input_ids": [padded(row, 8) for row in rows],
            "attention_mask": [padded([1] * len(row), 0) for row in rows],
            "labels": [padded([x % 3 for x in row], -100) for row in rows],
        }
        return {name: torch.tensor(column) for name, column in columns.items()}


def lengths_of_calls(rank: int, world: int) -> None:
    """What ranks give a model, with labels, is padded to the longest of all; without, it is refused."""
    from espalier.compat.torch import DistributedDataParallel

    rows = [[(i + j) % 8 for j in range(1 + 3 * i % 5)] for i in range(12)]
    for side in ("right", "left"):
        found = []
        for plan in (None, {"data": 2}, {"data": 2, "zero": 3}):
            with afresh(), warnings.catch_warnings(record=True) as told:
                warnings.simplefilter("always")
                net, collate, losses = Tagger().double(), Collator(side), []
                model: Any = net if plan is None else DistributedDataParallel(net, plan=plan)
                optimizer = torch.optim.Adam(model.parameters(), 0.1)
                for start in range(0, 12, 4):
                    some = rows[start : start + 4]
                    batch = collate(some if plan is None else some[2 * rank : 2 * rank + 2])
                    optimizer.zero_grad()
                    loss = model(**batch)[0]
                    loss.backward()
                    optimizer.step()
                    losses.append(float(loss.detach()))
            found.append(losses)
            assert plan is None or any("padded to the longest of all ranks" in str(x.message) for x in told)
        for more in found[1:]:
            assert max(abs(a - b) for a, b in zip(found[0], more, strict=True)) < 1e-12, found
    pooled = DistributedDataParallel(nn.Embedding(9, 6), plan={"data": 2})
    with pytest.raises(ValueError, match="pad to one length"):
        pooled(collate(rows[2 * rank : 2 * rank + 2])["input_ids"])


def lengths(rank: int, world: int) -> None:
    """Each rank's collator pads to its own longest row: they are as if one had collated all."""
    from espalier.compat.accelerate import Accelerator

    rows = [[(i + j) % 8 for j in range(1 + 3 * i % 5)] for i in range(11)]
    for side in ("right", "left"):
        found = []
        for plan in (None, {"data": 2}, {"data": 2, "zero": 3}):
            with afresh():
                net, collate, each = Tagger().double(), Collator(side), 4 if plan is None else 2
                optimizer = torch.optim.Adam(net.parameters(), 0.1)
                loader: Any = torch.utils.data.DataLoader(rows, each, collate_fn=collate, drop_last=True)
                model, accelerator = net, None
                if plan is not None:
                    accelerator = Accelerator(plan=plan)
                    model, optimizer, loader = accelerator.prepare(net, optimizer, loader)
                out: list[torch.Tensor] = []
                for epoch in range(2):
                    given = loader
                    if epoch and accelerator is not None:
                        given = accelerator.skip_first_batches(loader, 1)
                    for i, batch in enumerate(given):
                        if epoch and accelerator is None and not i:
                            continue
                        loss, logits = model(**batch)
                        if accelerator is None:
                            loss.backward()
                        else:
                            accelerator.backward(loss)
                            batch, logits = accelerator.gather_for_metrics((batch, logits))
                        optimizer.step()
                        optimizer.zero_grad()
                        out += [loss.detach(), logits.detach(), *(x.double() for x in batch.values())]
                found.append(out)
        for more in found[1:]:
            assert len(more) == len(found[0]) == 5 * 3
            for a, b in zip(found[0], more, strict=True):
                assert a.shape == b.shape and (a - b).abs().max() < 1e-12


class Counted(nn.Module):
    """Divides by what it is told that all ranks have, as transformers' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 2)

    def forward(self, x: torch.Tensor, num_items_in_batch: int) -> torch.Tensor:
        return self.layer(x).square().sum() / num_items_in_batch


def counted(rank: int, world: int) -> None:
    """Accumulation over rows of several lengths, as in accelerate's own example: gradients of all tokens."""
    from espalier.compat.accelerate import Accelerator

    x = torch.arange(24.0).view(8, 3) / 10
    for plan in ({"data": 2, "zero": 3}, {"tensor": 2}):
        with afresh():
            accelerator = Accelerator(plan=plan)
            torch.manual_seed(0)
            plain = Counted()
            model = accelerator.prepare(Counted())
            model.load_state_dict(plain.state_dict())
            own = x.chunk(accelerator.num_processes)[accelerator.process_index]
            items = accelerator.gather(torch.tensor(len(own))).sum().item()
            loss = model(own, num_items_in_batch=items) * accelerator.num_processes
            accelerator.backward(loss)
            expected = plain(x, 8)
            expected.backward()
            total = accelerator.gather(loss.detach()).sum().item() / accelerator.num_processes
            assert abs(total - expected.item()) < TOLERANCE
            found = full_tensor(model.module.layer.weight.grad)
            assert plain.layer.weight.grad is not None
            assert (found - plain.layer.weight.grad).abs().max() < 1e-5, plan


def test_losses_divided_by_what_all_ranks_have(ranks: Any) -> None:
    ranks(2, counted)


class Finder(nn.Module):
    """Has queries look for what each row shows, and divides by how many all processes have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale, self.queries, self.head = nn.Linear(3, 1), nn.Embedding(8, 4), nn.Linear(4, 2)

    def forward(self, x: torch.Tensor, labels: list[Any]) -> dict[str, torch.Tensor]:
        at = self.head(self.queries.weight.unsqueeze(0).repeat(len(x), 1, 1))
        boxes = [y if isinstance(y, torch.Tensor) else y["boxes"] for y in labels]
        assert len(boxes) == len(x)
        off = [(a[: len(b)] * s - b).square().sum() for a, b, s in zip(at, boxes, self.scale(x), strict=True)]
        count = torch.tensor([float(sum(map(len, boxes)))])
        if accelerate.PartialState._shared_state:  # as transformers' losses of boxes
            count = accelerate.utils.reduce(count) / accelerate.PartialState().num_processes
        return {"loss": torch.stack(off).sum() / count.item(), "at": at}


def boxes(rank: int, world: int) -> None:
    """What each row shows comes in lists; and a cut parameter has queries, which are no rows."""
    x = torch.arange(12.0).view(4, 3) / 10
    shown = [torch.full((k, 2), float(k)) for k in (1, 3, 0, 2)]
    given = [{"boxes": y} for y in shown], shown, [shown[1], shown[1], shown[0], shown[0]]
    torch.manual_seed(0)
    net = Finder()
    for plan in ({"data": 2}, {"data": 2, "zero": 3}, {"tensor": 2}):
        plain, told = copy.deepcopy(net), copy.deepcopy(net)
        optimizer: Any = torch.optim.SGD(plain.parameters(), 0.1)
        with afresh():
            expected = []
            for labels in given:
                out = plain(x, labels)
                out["loss"].backward()
                optimizer.step()
                optimizer.zero_grad()
                expected.append(out)
            accelerator = accelerate_here.Accelerator(plan=plan)
            model, optimizer = accelerator.prepare(told, torch.optim.SGD(told.parameters(), 0.1))
            n = len(x) // accelerator.num_processes
            own = slice(n * accelerator.process_index, n * (accelerator.process_index + 1))
            for labels, out in zip(given, expected, strict=True):
                found = model(x[own], labels=labels[own])
                accelerator.backward(found["loss"])
                optimizer.step()
                optimizer.zero_grad()
                assert abs(found["loss"].item() - out["loss"].item()) < TOLERANCE, plan
                torch.testing.assert_close(found["at"], out["at"][own])
            for p, q in zip(told.parameters(), plain.parameters(), strict=True):
                torch.testing.assert_close(full_tensor(p), q)


def test_lists_with_an_entry_for_each_row(ranks: Any) -> None:
    ranks(2, boxes)


def asked(rank: int, world: int) -> None:
    """What accelerate's own arguments become, and what is refused."""
    from accelerate.utils import (
        DDPCommunicationHookType,
        DistributedDataParallelKwargs,
        FullyShardedDataParallelPlugin,
        ParallelismConfig,
        TorchTensorParallelPlugin,
    )

    from espalier.compat.accelerate import Accelerator

    with afresh():
        plugin = FullyShardedDataParallelPlugin(
            fsdp_version=2,
            reshard_after_forward=False,
            activation_checkpointing=True,
            activation_checkpointing_offload=True,
        )
        accelerator = Accelerator(fsdp_plugin=plugin, mixed_precision="bf16")
        plan = accelerator.plan
        assert (plan.data, plan.zero, plan.recompute, plan.recompute_inputs) == (2, 2, "full", "host")
        torch.manual_seed(0)
        model = accelerator.prepare(nn.Linear(4, 2))
        out = model(torch.randn(3, 4))
        assert out.dtype == torch.float32 and plan.precision.autocast == "bfloat16"
        assert accelerator.unwrap_model(model) is model.module
        with pytest.raises(ValueError, match="join_uneven_inputs"):
            accelerator.join_uneven_inputs([model])
    handler = DistributedDataParallelKwargs(bucket_cap_mb=3, comm_hook=DDPCommunicationHookType.BF16)
    for options, means in (
        ({"parallelism_config": ParallelismConfig(dp_shard_size=2)}, {"data": 2, "zero": 3}),
        ({"parallelism_config": ParallelismConfig(dp_replicate_size=2)}, {"data": 2}),
        ({"parallelism_config": ParallelismConfig(cp_size=2)}, {"context": 2}),
        (
            {"kwargs_handlers": [handler]},
            {"data": 2, "chunk_megabytes": 3.0, "precision": {"reduce": "bfloat16"}},
        ),
    ):
        with afresh():
            assert Accelerator(**options).plan == Plan(**means)
    with afresh():
        accelerator = Accelerator(dynamo_backend="inductor")
        compiled: list[bool] = []
        with pytest.MonkeyPatch.context() as patch:
            make = accelerate_here.initialize
            patch.setattr(
                accelerate_here,
                "initialize",
                lambda *of, **how: compiled.append(how.pop("compile")) or make(*of, **how),
            )
            accelerator.prepare(nn.Linear(4, 2))
        assert compiled == ["inductor"]
        loader = accelerator.prepare(torch.utils.data.DataLoader(torch.arange(8), 2))
        later = accelerator.skip_first_batches(loader, 1)
        assert [x.tolist() for x in later] == [x.tolist() for x in loader][1:]
        with pytest.raises(ValueError, match="torch_tp_plugin"):
            Accelerator(torch_tp_plugin=object.__new__(TorchTensorParallelPlugin))
        with pytest.raises(ValueError, match=r"fp8(.|\n)*bf16"):
            Accelerator(mixed_precision="fp8")
    _asked_of_launchers_and_axes(rank)


def _asked_of_launchers_and_axes(rank: int) -> None:
    from accelerate.utils import MegatronLMPlugin, ParallelismConfig

    from espalier.compat.accelerate import Accelerator

    for kind in ("FSDP", "DEEPSPEED"):  # as accelerate launch --use_fsdp and --use_deepspeed ask
        with afresh(), pytest.MonkeyPatch.context() as patch:
            launched = property(lambda self, kind=kind: accelerate.DistributedType[kind])
            patch.setattr(accelerate.Accelerator, "distributed_type", launched)
            with pytest.raises(ValueError, match=rf"distributed_type(.|\n)*{kind}(.|\n)*espalier run"):
                Accelerator()
    with afresh():
        accelerator = Accelerator(parallelism_config=ParallelismConfig(tp_size=2))
        assert accelerator.plan.axes["tensor"] == 2
        own = accelerator.gather_for_metrics([f"row of {rank}"], use_gather_object=True)
        assert own == ["row of 0"]
        assert accelerator.gather(torch.tensor([7])).tolist() == [7]
        assert accelerator.reduce(torch.tensor(3.0)).item() == 3.0
        with pytest.raises(
            ValueError,
            match=r"2 mistakes(.|\n)*megatron_lm(.|\n)*plan.acc",
        ):
            plan = {"data": 2, "accumulate": 2}
            Accelerator(megatron_lm_plugin=object.__new__(MegatronLMPlugin), plan=plan)
        with pytest.raises(ValueError, match=r"mixed_precision(.|\n)*bfloat16(.|\n)*espalier.prepare"):
            Accelerator(mixed_precision="fp16", plan={"pipe": 2})


def said(rank: int, world: int) -> None:
    """What is said by position, by a launcher or by a handler; what ranks that share rows ask one another."""
    from accelerate.utils import AutocastKwargs, FullyShardedDataParallelPlugin

    from espalier.compat.accelerate import Accelerator

    with afresh():
        assert Accelerator(True, False, "bf16").plan.precision.autocast == "bfloat16"
    with afresh(), pytest.MonkeyPatch.context() as patch:
        patch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
        assert Accelerator().plan.precision.autocast == "bfloat16"
        patch.setenv("ACCELERATE_USE_PARALLELISM_CONFIG", "true")
        with pytest.raises(ValueError, match=r"PARALLELISM_CONFIG(.|\n)*write plan="):
            Accelerator()
    with afresh():
        handlers = [AutocastKwargs(enabled=False)]
        assert Accelerator(mixed_precision="bf16", kwargs_handlers=handlers).plan.precision.autocast is None
    with afresh(), pytest.raises(ValueError, match=r"ignored_modules(.|\n)*the engine's"):
        Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(ignored_modules=[nn.Linear(2, 2)]))
    with afresh():
        accelerator = Accelerator(plan={"tensor": 2})
        if rank:
            accelerator.set_trigger()
        assert [accelerator.check_trigger() for _ in range(2)] == [True, False]
        with accelerator.split_between_processes([1, 2, 3]) as part:
            assert part == [1, 2, 3]
        model = accelerator.prepare(nn.Linear(4, 4))
        model(torch.ones(2, 4))
        total = accelerator.reduce(model.weight.detach(), "mean")
        assert torch.equal(total, accelerator.get_state_dict(model)["weight"])
        _asked_of_rows(accelerator, rank, 1)
    with afresh():
        accelerator = Accelerator(plan={"data": 2})
        _asked_of_rows(accelerator, rank, 2)
        net = nn.Linear(4, 1, bias=False)
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        x = torch.full((2, 4), 1.0 + rank)
        with accelerator.no_sync(model), accelerator.trigger_sync_in_backward(model):
            accelerator.backward(model(x).sum())
            assert accelerator.clip_grad_norm_(model.parameters(), 10.0).item() == pytest.approx(6.0)
        optimizer.step()
        optimizer.zero_grad()
        alone(accelerator, model, optimizer, x)
    with afresh():
        accelerator = Accelerator(plan={"pipe": 2})
        net = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 1))
        model, optimizer = accelerator.prepare(net, torch.optim.SGD(net.parameters(), 0.1))
        alone(accelerator, model, optimizer, torch.ones(2, 4))
        with pytest.warns(GatherWarning, match="reduce takes tensors"):
            found = [accelerator.reduce(p.detach(), "mean") for p in model.parameters()]
        for x, (name, p) in zip(found, accelerator.get_state_dict(model).items(), strict=True):
            assert torch.allclose(x, p), name
        loss = model(torch.ones(2, 4)).square().mean()  # of outputs that are yet to be computed
        expected = [loss.item()] * 3
        assert accelerator.gather_for_metrics(loss.repeat(3)).tolist() == pytest.approx(expected)
        accelerator.backward(loss)
        for found in (accelerator.reduce(loss), accelerator.gather(loss.detach())):
            assert found.reshape(-1).tolist() == pytest.approx(expected[:1])


def _asked_of_rows(accelerator: Any, rank: int, readers: int) -> None:
    """By what a program multiplies, and which rows of gathered ones are its own."""
    from accelerate.utils import ProfileKwargs

    assert (accelerator.num_processes, accelerator.process_index) == (readers, rank % readers)
    assert accelerator.is_main_process == (rank == 0) and accelerator.is_last_process == (rank == 1)
    mine = torch.arange(3) + 3 * accelerator.process_index
    everyone, n, i = accelerator.gather(mine), accelerator.num_processes, accelerator.process_index
    assert torch.equal(everyone[i * 3 : (i + 1) * 3], mine) and len(everyone) == 3 * n
    rates = []
    with pytest.MonkeyPatch.context() as patch, tempfile.TemporaryDirectory() as folder:
        written: list[str] = []
        patch.setattr(torch.profiler.profile, "export_chrome_trace", lambda self, path: written.append(path))
        with accelerator.profile(ProfileKwargs(activities=["cpu"], output_trace_dir=folder)):
            pass
        assert [Path(path).name for path in written] == [f"profile_{rank}.json"]
    p = nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([p], 1.0)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 / (1 + step))
    schedule = accelerator.prepare(schedule)
    for _ in range(3):  # as examples make schedules longer by num_processes
        schedule.step()
        rates.append(schedule.get_last_lr()[0])
    assert rates == [1 / (1 + n * step) for step in (1, 2, 3)]


def alone(accelerator: Any, model: Any, optimizer: Any, x: torch.Tensor) -> None:
    from accelerate.local_sgd import LocalSGD

    with (
        pytest.raises(ValueError, match=r"within no_sync(.|\n)*LocalSGD"),
        LocalSGD(accelerator, model, 2),
    ):
        accelerator.backward(model(x).sum())
        optimizer.step()


@pytest.mark.long
def test_a_program_with_another_import(ranks: Any, tmp_path: Path) -> None:
    migrate(["accelerator"], tmp_path)
    (alone,) = ranks(1, theirs, 32)
    ranks(2, programs, alone, tmp_path)


def test_a_state_before_the_first_batch(ranks: Any, tmp_path: Path) -> None:
    ranks(2, early, str(tmp_path))


def test_two_optimizers_of_one_model(ranks: Any) -> None:
    ranks(2, with_two)


def test_one_optimizer_of_two_models(ranks: Any) -> None:
    ranks(2, of_two_models)


def test_rows_of_several_lengths(ranks: Any) -> None:
    ranks(2, lengths)
    ranks(2, lengths_of_calls)


def test_what_is_asked_of_it(ranks: Any) -> None:
    ranks(2, asked)
    ranks(2, said)


def test_the_two_files_differ_in_their_imports_alone() -> None:
    bodies = [
        (PROGRAMS / f"{name}.py").read_text("utf-8").partition("\n\n\n")[2]
        for name in ("accelerator", "accelerator_here")
    ]
    assert bodies[0] == bodies[1] != ""
