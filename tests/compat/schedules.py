"""Schedules of ``torch.distributed.pipelining`` by their names, against a model alone and torch's own."""

from __future__ import annotations

import copy
from itertools import pairwise
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.pipelining as torch_pipelining
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.compat import torch as here
from espalier.compat.torch import pipelining

WIDTHS, MICRO = (6, 8, 8, 8, 4), 4


def tower() -> nn.Sequential:
    torch.manual_seed(0)
    layers = (nn.Sequential(nn.Linear(a, b), nn.Tanh()) for a, b in pairwise(WIDTHS))
    return nn.Sequential(*layers).double()


def rows(step: int, place: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    """Of the micro-batches' targets unequal numbers count; torch takes the mean of their means."""
    generator = torch.Generator().manual_seed(10 * step + place)
    x = torch.randn(2 * MICRO, 6, dtype=torch.float64, generator=generator)
    y = torch.randint(0, 4, (2 * MICRO,), generator=generator)
    y[0] = y[3] = -100
    return x, y


def scheduled(rank: int, world: int) -> None:
    """Each of torch's schedules by its name, of stages that each rank has alone: the model alone."""
    right = tower()
    plain = torch.optim.SGD(right.parameters(), lr=0.1)
    expected, outputs, weights = [], [], []
    for step in range(3):
        x, y = rows(step)
        output = right(x)
        losses = [F.cross_entropy(*part) for part in zip(output.chunk(MICRO), y.chunk(MICRO), strict=True)]
        torch.stack(losses).mean().backward()
        expected.append(torch.stack(losses).detach())
        outputs.append(output.detach())
        plain.step()
        plain.zero_grad()
        weights.append([p.detach().clone() for p in right.parameters()])
    for name, each in SCHEDULES.items():
        layers, n = tower(), each * world
        size = len(layers) // n
        is_v = name in ("ZBVZeroBubble", "DualPipeV")
        places = [rank, 2 * world - 1 - rank] if is_v else range(rank, n, world)
        parts = {i: layers[i * size : (i + 1) * size] for i in places}
        stages = [pipelining.PipelineStage(part, i, n) for i, part in parts.items()]
        made = pipelining.get_schedule_class(name)(stages if each > 1 else stages[0], MICRO, F.cross_entropy)
        optimizer = torch.optim.SGD([p for part in parts.values() for p in part.parameters()], lr=0.1)
        last = 0 if is_v else world - 1
        for step in range(3):
            x, y = rows(step)
            losses, given = [], (x,) if rank == 0 else ()
            target = y if rank == last else None
            more = {"return_outputs": False} if step == 2 else {"loss_kwargs": {"reduction": "mean"}}
            if step == 1:  # as torch takes them from 2.14 on
                more["arg_mbs"] = [(part,) for part in x.chunk(MICRO)] if given else None
                more["target_mbs"] = None if target is None else [*target.chunk(MICRO)]
                given, target = (), None
            output = made.step(*given, target=target, losses=losses, **more)
            optimizer.step()
            optimizer.zero_grad()
            told = torch.stack(losses)
            here_right = expected[step] if rank == last else expected[step].mean().expand(MICRO)
            torch.testing.assert_close(told, here_right, rtol=0, atol=1e-12, msg=f"{name} {step}")
            assert (output is not None) == (step < 2 and rank == last), name
            if output is not None:
                torch.testing.assert_close(output, outputs[step], rtol=0, atol=1e-12, msg=f"{name} {step}")
            for i, part in parts.items():
                whole = [p.full_tensor() for p in part.parameters()]
                torch.testing.assert_close(
                    whole, weights[step][2 * size * i :][: 2 * size], rtol=0, atol=1e-12
                )
        x, _ = rows(7)
        for given in ((x,) if rank == 0 else (), {"arg_mbs": [*zip(x.chunk(MICRO))]} if rank == 0 else {}):
            output = made.eval(**given) if isinstance(given, dict) else made.eval(*given)
            assert (output is not None) == (rank == last), name
            if output is not None:
                torch.testing.assert_close(output, right(x).detach(), rtol=0, atol=1e-12)


class Masked(nn.Module):
    """A stage with an argument of its own."""

    def __init__(self, wide: int, by: int) -> None:
        super().__init__()
        torch.manual_seed(by)
        self.linear = nn.Linear(6, wide).double()

    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        pipelining.pipe_split()
        return self.linear(x) * (1 if mask is None else mask)


def as_torchs(rank: int, world: int) -> None:
    """What a schedule is told, against torch's own on the same ranks."""
    generator = torch.Generator().manual_seed(3)
    x, y, mask = (
        torch.randn(8, n, generator=generator, dtype=torch.float64).abs()
        for n in (6, 4, 6 if rank == 0 else 4)
    )
    by_rows = {"mask": pipelining.TensorChunkSpec(0)}
    cases: list[tuple[dict[str, Any], dict[str, Any]]] = [
        ({"scale_grads": False}, {"mask": mask}),
        ({"args_chunk_spec": None, "kwargs_chunk_spec": by_rows}, {"mask": mask}),
        ({"output_merge_spec": pipelining.TensorChunkSpec(1)}, {}),
    ]
    for options, named in cases:
        results: list[tuple[Any, list[Any]]] = []
        for of in (torch_pipelining, pipelining):
            part = Masked(6 if rank == 0 else 4, rank)
            stage = of.PipelineStage(part, rank, world, torch.device("cpu"))
            made = of.Schedule1F1B(stage, MICRO, F.mse_loss, **options)
            # gradients add up until the program drops them; torch scales those that are there once more
            for times in (1, 2) if "scale_grads" in options else (1,):
                given = (x * times,) if rank == 0 else ()
                output = made.step(*given, target=y if rank else None, **named)
            grads = [p.grad.full_tensor() if of is pipelining else p.grad for p in part.parameters()]
            results.append((None if output is None else output.detach(), grads))
        torch.testing.assert_close(*results, rtol=0, atol=1e-12, msg=str(options))
    with pytest.raises(ValueError, match=r"inputs(.|\n)*of 3 rows(.|\n)*expected one for each of 4"):
        made.step(*((x[:3],) if rank == 0 else ()), target=y[:3] if rank else None)
    whole = nn.Sequential(Masked(6, 0), Masked(4, 1))
    pipe = pipelining.Pipe.from_tracing(whole, (x[:2],))
    assert pipe.cuts == ("0.linear", "1.linear") and "3 stages" in str(pipe)
    with pytest.raises(ValueError, match=r"stage_index(.|\n)*expected 0 to 1"):
        pipelining.PipelineStage(whole, 2, 2)
    stuck = pipelining.PipelineStage(Masked(6 if rank == 0 else 4, rank), rank, world)
    if rank:
        stuck.submod.of = lambda x: x
    with pytest.raises(ValueError, match=r"of rank 1(.|\n)*cannot(.|\n)*pickle(.|\n)*cut by pipeline"):
        pipelining.ScheduleGPipe(stuck, MICRO, F.mse_loss).step(x, target=y)
    swapped = pipelining.ScheduleGPipe(pipelining.PipelineStage(whole, 1 - rank, world), MICRO, F.mse_loss)
    with pytest.raises(ValueError, match=rf"stage_index(.|\n)*on rank {rank}(.|\n)*expected {rank}"):
        swapped.step(x, target=y)


def beside(rank: int, world: int) -> None:
    """Two pipelines beside each other, each with rows of its own, and ZeRO as a wrapper says it."""
    right = tower()
    plain = torch.optim.AdamW(right.parameters(), lr=0.1)
    for step in range(2):
        for place in (0, 1):
            x, y = rows(step, place)
            parts = zip(right(x).chunk(MICRO), y.chunk(MICRO), strict=True)
            (torch.stack([F.cross_entropy(*part) for part in parts]).mean() / 2).backward()
        plain.step()
        plain.zero_grad()
    groups = [dist.new_group(ranks) for ranks in ([0, 2], [1, 3])]
    for inner in (False, True):
        index, place = (rank % 2, rank // 2) if inner else (rank // 2, rank % 2)
        part = tower()[2 * index : 2 * index + 2]
        here.fully_shard(part)
        stage: nn.Module = part
        if inner:  # a wrapper of the ranks that have the same stage
            stage = here.DistributedDataParallel(part, process_group=groups[index])
            with pytest.raises(ValueError, match=r"process_group(.|\n)*of 2 ranks(.|\n)*all of it"):
                stage(rows(0)[0])
        made = pipelining.ScheduleGPipe(pipelining.PipelineStage(stage, index, 2), MICRO, F.cross_entropy)
        optimizer = torch.optim.AdamW(part.parameters(), lr=0.1)
        for step in range(2):
            x, y = rows(step, place)
            losses: list[Any] = []
            output = made.step(*((x,) if index == 0 else ()), target=y if index else None, losses=losses)
            optimizer.step()
            optimizer.zero_grad()
            if output is not None:  # of a pipeline's own rows
                parts = zip(output.chunk(MICRO), y.chunk(MICRO), strict=True)
                torch.testing.assert_close(losses, [F.cross_entropy(*part) for part in parts])
        output = made.eval(*((x,) if index == 0 else ()))
        assert output is None or output.shape == (len(x), 4)
        assert made.engine.plan.zero == 3 and made.engine.plan.data == 2
        whole = [p.full_tensor() for p in part.parameters()]
        expected = [p.detach() for p in right.parameters()][4 * index : 4 * index + 4]
        torch.testing.assert_close(whole, expected, rtol=0, atol=1e-12, msg=str(inner))


def with_styles(rank: int, world: int) -> None:
    """Stages on meta that ``parallelize_module`` and ``fully_shard`` cut, as torchtitan makes them."""
    mesh = espalier.init_device_mesh("cpu", (2, 1, 2), mesh_dim_names=("pp", "dp", "tp"))
    index, (x, y), right = mesh["pp"].get_local_rank(), rows(0), tower()
    own = right[2 * index : 2 * index + 2]
    stage = copy.deepcopy(own).to("meta")
    names = [f"{name}.0" for name, _ in stage.named_children()]
    styles = espalier.ColwiseParallel(), espalier.RowwiseParallel()
    espalier.parallelize_module(stage, mesh["tp"], dict(zip(names, styles, strict=True)))
    here.fully_shard(stage, mesh=mesh["dp"])
    made = pipelining.ScheduleGPipe(pipelining.PipelineStage(stage, index, 2), MICRO, F.cross_entropy)
    stage.to_empty(device="cpu")
    with torch.no_grad():
        for p, value in zip(stage.parameters(), own.parameters(), strict=True):
            p.copy_(value)
    made.step(*((x,) if index == 0 else ()), target=y if index else None)
    parts = zip(right(x).chunk(MICRO), y.chunk(MICRO), strict=True)
    torch.stack([F.cross_entropy(*part) for part in parts]).mean().backward()
    grads = [p.grad.full_tensor() for p in stage.parameters()]
    torch.testing.assert_close(grads, [p.grad for p in own.parameters()], rtol=0, atol=1e-12)
    assert made.engine.plan.tensor == 2 and made.engine.plan.zero == 3


SCHEDULES = {
    "GPipe": 1,
    "1F1B": 1,
    "Interleaved1F1B": 2,
    "LoopedBFS": 2,
    "InterleavedZeroBubble": 2,
    "ZBVZeroBubble": 2,
    "DualPipeV": 2,
}
