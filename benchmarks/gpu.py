"""A GPT's step on GPUs beside torch's DDP and FSDP2, eager and compiled, on the devices that are visible.

12 layers of 768 in bfloat16, 8 rows of 1024 tokens a rank, AdamW (fused) everywhere. Bars: stage 0 takes at
most the time of DDP, ZeRO-3 at most that of FSDP2; the compiled figures of the peers are shown beside them.

    python benchmarks/gpu.py

Where no GPU is visible it says so and ends well.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from _common import MISSED, Contender, Report, in_turns, on_ranks, slowest_rank
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
RATE = 1e-4

Step = Callable[[], object]
OURS = ("stage 0", "ZeRO-3")


def model(device: torch.device) -> nn.Module:
    """The same on every rank."""
    torch.manual_seed(0)
    return build("gpt2", dict(SIZES)).to(device, torch.bfloat16)


def rows(device: torch.device) -> dict[str, torch.Tensor]:
    """A rank's own."""
    draw = torch.Generator().manual_seed(dist.get_rank())
    ids = torch.randint(0, SIZES["vocab_size"], (ROWS, SIZES["max_positions"] + 1), generator=draw).to(device)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def plain(net: nn.Module, parameters: nn.Module, data: dict[str, torch.Tensor]) -> Step:
    """The loop that everyone writes."""
    optimizer = torch.optim.AdamW(parameters.parameters(), lr=RATE, fused=True)

    def step() -> None:
        net(**data).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def ddp(device: torch.device, data: dict[str, torch.Tensor], *, compiled: bool) -> Step:
    """torch's DistributedDataParallel."""
    net: nn.Module = DistributedDataParallel(model(device), device_ids=[device.index])
    return plain(torch.compile(net) if compiled else net, net, data)  # type: ignore[arg-type]


def fsdp2(device: torch.device, data: dict[str, torch.Tensor], *, compiled: bool) -> Step:
    """torch's fully_shard on each block and the root."""
    net = model(device)
    mesh = init_device_mesh(device.type, (dist.get_world_size(),))
    for block in net.blocks:  # type: ignore[union-attr]
        if compiled:
            block.compile()
        fully_shard(block, mesh=mesh)
    fully_shard(net, mesh=mesh)
    return plain(net, net, data)


def ours(device: torch.device, data: dict[str, torch.Tensor], *, zero: int) -> Step:
    """A plan; the parameters are bfloat16 as the peers', without masters."""
    net = model(device)
    plan = {"data": dist.get_world_size(), "zero": zero}
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters(), lr=RATE), plan)

    def step() -> None:
        engine.train_step(engine.local_batch(data, size=ROWS * dist.get_world_size()))

    return step


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


def measured() -> int:
    """On a rank: all in turns; the exit status."""
    device = start(accelerator()).device
    data = rows(device)
    makers: dict[str, Callable[[], Step]] = {
        "ddp": lambda: ddp(device, data, compiled=False),
        "ddp, compiled": lambda: ddp(device, data, compiled=True),
        "fsdp2": lambda: fsdp2(device, data, compiled=False),
        "fsdp2, compiled": lambda: fsdp2(device, data, compiled=True),
        "stage 0": lambda: ours(device, data, zero=0),
        "ZeRO-3": lambda: ours(device, data, zero=3),
    }
    steps, failed = begun(makers)
    contenders = {name: Contender(waited(step), dist.barrier) for name, step in steps.items()}
    times = slowest_rank(in_turns(contenders, rounds=ROUNDS))
    report = Report()
    for mine, peers in (("stage 0", ("ddp", "ddp, compiled")), ("ZeRO-3", ("fsdp2", "fsdp2, compiled"))):
        for peer in peers:
            if mine in times and peer in times:
                limit = None if "compiled" in peer else 1.0
                report.add(f"{dist.get_world_size()} ranks", times, mine, peer, limit)
    missed = report.show() if dist.get_rank() == 0 else 0
    for name, why in failed.items() if dist.get_rank() == 0 else ():
        print(f"{name} does not run here: {why}")
    finish()
    # a peer that does not run here is no measure; one of ours is a bar that is missed
    return MISSED if missed or not failed.keys().isdisjoint(OURS) else 0


def main() -> int:
    """One rank for each device."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--rank", action="store_true")
    if words.parse_args().rank:
        return measured()
    if not count():
        print("No GPU is visible here: nothing is measured.")
        return 0
    return on_ranks(__file__, count())


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    sys.exit(main())
