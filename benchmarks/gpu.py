"""A GPT's step on GPUs beside DDP, FSDP2, Megatron-core and DeepSpeed, on the devices that are visible.

12 layers of 768, 8 rows of 1024 tokens a rank, AdamW. Each of ours takes at most the time of the peer that
does the same: with parameters of bfloat16 of DDP and FSDP2, eager, with dropout, and compiled; with masters
of float32 of Megatron's distributed optimizer and DeepSpeed's ZeRO-3; with states on the host of DeepSpeed. A
peer that is not installed, or does not run here, is said to be.

    python benchmarks/gpu.py [--only NAME ...]

Where no GPU is visible it says so and ends well.
"""

from __future__ import annotations

import argparse
import gc
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import MISSED, Contender, Report, in_turns, on_ranks, slowest_rank
from _gpu_peers import Data, Step, deepspeed, megatron
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import espalier
from espalier.device import accelerator, count
from espalier.mesh.process import finish, start
from espalier.models import build

SIZES = {"vocab_size": 50304, "max_positions": 1024, "hidden": 768, "heads": 12, "layers": 12}
ROWS, ROUNDS = 8, 20
RATE, DROPOUT = 1e-4, 0.1


class Group(NamedTuple):
    """What is measured in turns: ways to train, and pairs of ours with a peer."""

    makers: Mapping[str, Callable[[], Step]]
    pairs: Sequence[tuple[str, str]]


def model(device: torch.device, dtype: torch.dtype = torch.bfloat16, dropout: float = 0.0) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return build("gpt2", {**SIZES, "dropout": dropout}).to(device, dtype)


def rows(device: torch.device) -> Data:
    """A rank's own."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, SIZES["max_positions"] + 1), generator=draw).to(device)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def plain(net: nn.Module, parameters: nn.Module, data: Data) -> Step:
    """The loop that everyone writes."""
    optimizer = torch.optim.AdamW(parameters.parameters(), lr=RATE, fused=True)

    def step() -> None:
        net(**data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(device: torch.device, data: Data, compiled: bool = False, dropout: float = 0.0) -> Step:
    """torch's DistributedDataParallel."""
    net: nn.Module = DistributedDataParallel(model(device, dropout=dropout), device_ids=[device.index])
    return plain(torch.compile(net) if compiled else net, net, data)  # type: ignore[arg-type]


def fsdp2(device: torch.device, data: Data, compiled: bool = False) -> Step:
    """torch's fully_shard on each block and the root."""
    net = model(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net.blocks:  # type: ignore[union-attr]
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return plain(net, net, data)


def ours(
    device: torch.device,
    data: Data,
    plan: Mapping[str, Any],
    *,
    masters: bool = False,
    compiled: bool = False,
    dropout: float = 0.0,
) -> Step:
    """A plan along the data axis."""
    net = model(device, torch.float32 if masters else torch.bfloat16, dropout)
    whole: dict[str, Any] = {"data": dist.get_world_size(), **plan}
    if masters:
        whole["precision"] = "bfloat16"
    optimizer = torch.optim.AdamW(net.parameters(), lr=RATE)
    engine = espalier.initialize(net, optimizer, whole, compile=compiled)

    def step() -> None:
        engine.train_step(engine.local_batch(data, size=ROWS * dist.get_world_size()))

    return step


def attention(device: torch.device, sharded: bool) -> Step:
    """Attention with dropout alone, forward and backward: torch's, or of DTensors."""
    torch.manual_seed(0)
    rows = [torch.randn(ROWS, 1024, 12, 64, device=device, dtype=torch.bfloat16) for _ in range(4)]
    q, k, v, grad = (x.transpose(1, 2) for x in rows)
    if sharded:
        mesh = espalier.Mesh.from_env({"data": dist.get_world_size()}, device.type)
        lies = partial(espalier.DTensor.from_local, device_mesh=mesh, placements=[espalier.Shard(0)])
        q, k, v, grad = map(lies, (q, k, v, grad))
    asked = [x.detach().requires_grad_() for x in (q, k, v)]

    def step() -> None:
        out = F.scaled_dot_product_attention(*asked, is_causal=True, dropout_p=DROPOUT)
        torch.autograd.grad(out, asked, grad)

    return step


def groups(device: torch.device, data: Data) -> dict[str, Group]:
    """All that is measured."""
    mine = partial(ours, device, data)
    away = {"zero": 2, "offload": {"states": "host"}}
    return {
        "eager": Group(
            {
                "DDP": partial(ddp, device, data),
                "FSDP2": partial(fsdp2, device, data),
                "stage 0": partial(mine, {"zero": 0}),
                "ZeRO-3": partial(mine, {"zero": 3}),
            },
            [("stage 0", "DDP"), ("ZeRO-3", "FSDP2")],
        ),
        "dropout": Group(
            {
                "DDP": partial(ddp, device, data, dropout=DROPOUT),
                "stage 0": partial(mine, {"zero": 0}, dropout=DROPOUT),
            },
            [("stage 0", "DDP")],
        ),
        "attention with dropout": Group(
            {
                "torch": partial(attention, device, sharded=False),
                "DTensor": partial(attention, device, sharded=True),
            },
            [("DTensor", "torch")],
        ),
        "compiled": Group(
            {
                "DDP": partial(ddp, device, data, compiled=True),
                "FSDP2": partial(fsdp2, device, data, compiled=True),
                "stage 0": partial(mine, {"zero": 0}, compiled=True),
                "ZeRO-3": partial(mine, {"zero": 3}, compiled=True),
            },
            [("stage 0", "DDP"), ("ZeRO-3", "FSDP2")],
        ),
        "masters": Group(
            {
                "Megatron-core": lambda: megatron(device, data, SIZES, RATE),
                "DeepSpeed": lambda: deepspeed(model(device), data, RATE, stage=3),
                "ZeRO-1": partial(mine, {"zero": 1}, masters=True),
                "ZeRO-3": partial(mine, {"zero": 3}, masters=True),
            },
            [("ZeRO-1", "Megatron-core"), ("ZeRO-3", "DeepSpeed")],
        ),
        "offload": Group(
            {
                "DeepSpeed": lambda: deepspeed(model(device), data, RATE, stage=2, offload=True),
                "states on the host": partial(mine, away, masters=True),
            },
            [("states on the host", "DeepSpeed")],
        ),
    }


def begun(makers: Mapping[str, Callable[[], Step]]) -> tuple[dict[str, Step], dict[str, str]]:
    """Those whose first step ends well, on every rank; and of the others, by whose error they do not."""
    steps, failed = {}, {}
    for name, make in makers.items():
        why = ""
        try:
            steps[name] = make()
            steps[name]()
        except Exception as error:
            why = f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        words: list[str] = [""] * dist.get_world_size()
        dist.all_gather_object(words, why)
        if any(words):
            steps.pop(name, None)
            failed[name] = next(f"rank {rank}: {word}" for rank, word in enumerate(words) if word)
    return steps, failed


def waited(step: Step) -> Callable[[], None]:
    """A step, with what the device has to do."""

    def whole() -> None:
        step()
        torch.accelerator.synchronize()

    return whole


def measure(name: str, group: Group) -> bool:
    """All of a group in turns, and its table; whether a bar was missed."""
    steps, failed = begun(group.makers)
    contenders = {each: Contender(waited(step), dist.barrier) for each, step in steps.items()}
    times = slowest_rank(in_turns(contenders, rounds=ROUNDS)) if contenders else {}
    report = Report()
    for mine, peer in group.pairs:
        if mine in times and peer in times:
            report.add(f"{name}, {dist.get_world_size()} ranks", times, mine, peer, 1.0)
    first = dist.get_rank() == 0
    missed = first and report.bars and report.show()
    for each, why in failed.items() if first else ():
        print(f"{name}, {each}: does not run here: {why}")
    print(flush=True)
    # a peer that does not run here is no measure; one of ours is a bar that is missed
    return bool(missed) or not failed.keys().isdisjoint(mine for mine, _ in group.pairs)


def measured(names: Sequence[str]) -> int:
    """On a rank: group after group; the exit status."""
    device = start(accelerator()).device
    missed = False
    for name, group in groups(device, rows(device)).items():
        if not names or name in names:
            missed |= measure(name, group)
            gc.collect()
            torch.accelerator.empty_cache()
    finish()
    return MISSED if missed else 0


def main() -> int:
    """One rank for each device."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rank", action="store_true")
    words.add_argument("--only", nargs="*", default=(), help="groups to measure; by default all")
    said = words.parse_args()
    if said.rank:
        return measured(said.only)
    if not count():
        print("No GPU is visible here: nothing is measured.")
        return 0
    return on_ranks(__file__, count(), "--only", *said.only)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
