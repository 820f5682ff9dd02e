"""What ``make gpu`` looks at on an accelerator, a check each: ``python tools/gpu_checks.py NAME``.

A check prints what it found, a line each, and fails where something is wrong. On one rank: ``offload``,
``waits``, ``sanitizer``, ``kernels``. On several, which it starts itself: ``plans``, ``killed``.
"""

from __future__ import annotations

import argparse
import copy
import math
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import espalier
from espalier.device import accelerator, count, peak_memory, restart_peak
from espalier.mesh.launch import LaunchError, launch
from espalier.mesh.process import finish, start
from espalier.models import build

SIZES = {"vocab_size": 512, "max_positions": 64, "hidden": 256, "heads": 8, "kv_heads": 4, "layers": 4}
BIG = {"vocab_size": 50304, "max_positions": 1024, "hidden": 768, "heads": 12, "layers": 12}
STEPS, CLOSE, NARROW = 3, 1e-4, 3e-2
LAUNCHES, PEAK = 1.05, 1.15  # the bars of `kernels`: against plain torch, and against the dry run

Batch = dict[str, torch.Tensor]

OFFLOADS: dict[str, dict[str, Any]] = {
    "states on the host": {"offload": {"states": "host"}},
    "half of the states": {"offload": {"states": {"place": "host", "ratio": 0.5}}},
    "states and gradients": {"offload": {"states": "host", "gradients": "host"}},
    "states on disk": {"offload": {"states": "disk", "directory": ""}},
}
OPTIMIZERS: dict[str, Any] = {
    "Adam": torch.optim.Adam,
    "AdamW": torch.optim.AdamW,
    "SGD": lambda ps, lr: torch.optim.SGD(ps, lr, momentum=0.9),
    "Adagrad": torch.optim.Adagrad,
}
ALONE: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": "bfloat16"},
    "autocast": {"precision": "autocast-bfloat16"},
    "accumulate": {"accumulate": 2},
    "recompute": {"recompute": "full"},
    "inputs on the host": {"recompute": "full", "recompute_inputs": "host"},
}
TOGETHER: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        **{f"zero {zero}": {"data": 2, "zero": zero} for zero in range(4)},
        "zero 3, bfloat16": {"data": 2, "zero": 3, "precision": "bfloat16"},
        "zero 3, all on the host": {
            "data": 2,
            "zero": 3,
            "offload": dict.fromkeys(("states", "gradients", "parameters"), "host"),
        },
        "tensor": {"tensor": 2},
        "sequence": {"tensor": 2, "sequence_parallel": True},
        "ring": {"context": 2, "context_kind": "ring"},
        "ulysses": {"context": 2, "context_kind": "ulysses"},
        "1f1b, tied": {"pipe": 2, "accumulate": 4},
        "zbv, tied": {"pipe": 2, "accumulate": 4, "schedule": "zbv", "stages_per_rank": 2},
        "experts": {"data": 2, "expert": 2},
    },
    4: {
        "2d": {"tensor": 4, "tensor_mode": "2d"},
        "pipe and data": {"pipe": 2, "data": 2, "zero": 2, "accumulate": 4},
        "data and tensor": {"data": 2, "tensor": 2, "zero": 3},
    },
}


def batch(step: int, sizes: Mapping[str, int] = SIZES, rows: int = 8) -> Batch:
    """A global batch, the same on all ranks; on the host."""
    draw = torch.Generator().manual_seed(step)
    ids = torch.randint(0, sizes["vocab_size"], (rows, sizes["max_positions"] + 1), generator=draw)
    return {"input_ids": ids[:, :-1].contiguous(), "labels": ids[:, 1:].contiguous()}


def model(name: str = "gpt", sizes: Mapping[str, Any] = SIZES) -> nn.Module:
    """The same everywhere."""
    torch.manual_seed(0)
    return build(name, dict(sizes))


def followed(
    plan: Mapping[str, Any], of: Any, name: str = "gpt", sizes: Mapping[str, Any] = SIZES
) -> list[float]:
    """The losses of a few steps by a plan."""
    net = model(name, sizes)
    engine = espalier.initialize(net, of(net.parameters(), lr=1e-3), dict(plan), max_grad_norm=1.0)
    if engine.mesh.device_type != accelerator():
        raise AssertionError(f"the plan {plan} lies on {engine.mesh.device_type}, not on {accelerator()}")
    return [engine.train_step(batch(step, sizes)).item() for step in range(STEPS)]


def apart(a: list[float], b: list[float]) -> float:
    """The largest relative difference."""
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def told(name: str, figure: float, limit: float) -> bool:
    """Print a figure beside its limit; whether it is within."""
    held = figure <= limit and math.isfinite(figure)
    print(f"{'ok  ' if held else 'MISS'} {name}: {figure:.3g} (at most {limit:g})", flush=True)
    return held


# ---- one rank


def offload(folder: str) -> bool:
    """Each optimizer in each precision, offloaded and not: the same losses."""
    held = True
    for precision in ("float32", "bfloat16"):
        for name, of in OPTIMIZERS.items():
            expected = followed({"precision": precision}, of)
            for where, plan in OFFLOADS.items():
                there = {
                    **plan["offload"],
                    **({"directory": folder} if "directory" in plan["offload"] else {}),
                }
                found = followed({"precision": precision, "offload": there}, of)
                limit = CLOSE if precision == "float32" else NARROW
                held &= told(f"{precision}, {name}, {where}: losses apart", apart(found, expected), limit)
    return held


def waits(folder: str) -> bool:
    """A step under ``set_sync_debug_mode("error")``: whoever waits for the device is an error."""
    module = torch.get_device_module(accelerator())
    if not hasattr(module, "set_sync_debug_mode"):
        print(f"{accelerator()} has no set_sync_debug_mode: not looked at")
        return True
    held = True
    for name, plan in ALONE.items():
        net = model()
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), dict(plan), max_grad_norm=1.0)
        for step in range(2):
            engine.train_step(batch(step))
        try:
            module.set_sync_debug_mode("error")
            engine.train_step(batch(2))
        except RuntimeError as error:
            held = False
            print(f"MISS {name}: {error}", flush=True)
        else:
            print(f"ok   {name}: no wait", flush=True)
        finally:
            module.set_sync_debug_mode("default")
    return held


def sanitizer(folder: str) -> bool:
    """Uses several streams, for torch's sanitizer, which the environment turns on; it ends the process."""
    for plan in (ALONE["inputs on the host"], {**OFFLOADS["states on the host"]}, {}):
        net = model()
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), dict(plan))
        for step in range(STEPS):
            engine.train_step(batch(step))
            engine.save(Path(folder, "saved"), asynchronous=True, keep=1)
        engine.wait_saved()
        print(f"ok   {plan or 'saved beside training'}", flush=True)
    return True


def kernels(folder: str) -> bool:
    """Kernels and launches a step beside plain torch, and the peak of memory beside the dry run's."""
    from torch.profiler import ProfilerActivity, profile

    device = torch.device(str(accelerator()))
    data = batch(0, BIG, 4)
    net = model("gpt2", BIG).to(device, torch.bfloat16)
    plain, counts = copy.deepcopy(net), {}
    theirs = torch.optim.AdamW(plain.parameters(), fused=True)

    def by_torch() -> None:
        plain(**{name: x.to(device) for name, x in data.items()}).loss.backward()
        theirs.step()
        theirs.zero_grad()

    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {})
    steps: dict[str, Callable[[], Any]] = {"torch": by_torch, "espalier": lambda: engine.train_step(data)}
    for name, step in steps.items():
        for _ in range(3):
            step()
        torch.accelerator.synchronize()
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
            step()
            torch.accelerator.synchronize()
        took = time.perf_counter() - began
        ran = [e for e in seen.events() or () if e.device_type == torch.profiler.DeviceType.CUDA]
        launched = sum(
            e.name in ("cudaLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernel")
            for e in seen.events() or ()
        )
        busy = sum(e.device_time for e in ran) / 1e6 / took
        counts[name] = len(ran), launched
        print(
            f"{name}: {len(ran)} kernels, {launched} launches, busy {busy:.0%} (with the profiler on)",
            flush=True,
        )
    held = told("kernels against plain torch", counts["espalier"][0] / max(counts["torch"][0], 1), LAUNCHES)
    held &= told("launches against plain torch", counts["espalier"][1] / max(counts["torch"][1], 1), LAUNCHES)
    restart_peak(engine.mesh.device())
    held_by_torch = sum(x.nbytes for x in [*plain.parameters(), *plain.buffers()])
    held_by_torch += sum(x.nbytes for state in theirs.state.values() for x in state.values())
    engine.train_step(data)
    torch.accelerator.synchronize()
    found = peak_memory(engine.mesh.device()) - held_by_torch
    with torch.device("meta"):
        twin = build("gpt2", dict(BIG)).to(torch.bfloat16)
    report = espalier.dry_run(
        twin,
        {},
        {name: x.to("meta") for name, x in data.items()},
        optimizer=torch.optim.AdamW(twin.parameters()),
    )
    return told("peak memory against the dry run", found / report.peak_bytes, PEAK) and held


# ---- several ranks


def plans(folder: str) -> bool:
    """Every plan on the ranks that there are; each as one rank alone. Then a checkpoint, read by others."""
    ranks = int(os.environ["WORLD_SIZE"])
    held = True
    for name, plan in TOGETHER[ranks].items():
        kind = "moe" if "expert" in plan else "gpt"
        sizes = {**SIZES, "tied": "tied" in name}
        of = torch.optim.AdamW
        found = followed(plan, of, kind, sizes)
        net = model(kind, sizes).to(
            torch.device(str(accelerator()), torch.accelerator.current_device_index())
        )
        expected, own = [], of(net.parameters(), lr=1e-3)
        for step in range(STEPS):
            loss = net(**{key: x.to(net.head.weight.device) for key, x in batch(step, sizes).items()}).loss  # type: ignore
            loss.backward()
            nn.utils.clip_grad_norm_(net.parameters(), 1.0)
            own.step()
            own.zero_grad()
            expected.append(loss.item())
        # the balance of experts is over each rank's own tokens
        limit = NARROW if "bfloat16" in name or kind == "moe" else CLOSE
        difference = torch.tensor([apart(found, expected)], device="cpu")
        dist.all_reduce(difference, dist.ReduceOp.MAX)
        if dist.get_rank() == 0:
            held &= told(f"{ranks} ranks, {name}: losses apart", difference.item(), limit)
    net = model()
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": ranks, "zero": 3})
    engine.train_step(batch(0))
    engine.save(folder, asynchronous=True)
    after = [engine.train_step(batch(step)).item() for step in (1, 2)]
    engine.wait_saved()
    other = model()
    again = espalier.initialize(other, torch.optim.AdamW(other.parameters()), {"tensor": ranks})
    again.lay_out(batch(0))
    again.load(folder)
    difference = torch.tensor(
        [apart([again.train_step(batch(step)).item() for step in (1, 2)], after)], device="cpu"
    )
    dist.all_reduce(difference, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        held &= told(
            f"{ranks} ranks, from a checkpoint of zero 3 to tensor: losses apart", difference.item(), CLOSE
        )
    return held


def dying(folder: str) -> bool:
    """The last rank is killed in the third step."""
    net = model()
    world = int(os.environ["WORLD_SIZE"])
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"data": world, "zero": 3})
    for step in range(100):
        if step == 2 and dist.get_rank() == world - 1:
            os.kill(os.getpid(), signal.SIGKILL)
        engine.train_step(batch(step)).item()
    return False


def killed(folder: str) -> bool:
    """A rank is killed: the others end, in words, and soon."""
    began = time.perf_counter()
    try:
        launch([str(Path(__file__).resolve()), "dying", "--rank", "--folder", folder], 2)
    except LaunchError as error:
        took = time.perf_counter() - began
        print(str(error).splitlines()[0])
        return told("seconds until all have ended", took, 120)
    print("MISS the launch ended well, though a rank was killed")
    return False


CHECKS: dict[str, Callable[[str], bool]] = {
    "offload": offload,
    "waits": waits,
    "sanitizer": sanitizer,
    "kernels": kernels,
    "plans": plans,
    "dying": dying,
    "killed": killed,
}


def main() -> int:
    """Run a check; the exit status: 1 if something is missed."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("check", choices=CHECKS)
    words.add_argument("--rank", action="store_true", help="this process is a rank of several")
    words.add_argument("--ranks", type=int, default=2, help="of `plans`")
    words.add_argument("--folder", help="for files")
    said = words.parse_args()
    if accelerator() is None:
        print("no accelerator is visible here")
        return 1
    with nullcontext(said.folder) if said.folder else tempfile.TemporaryDirectory() as folder:
        if said.check == "plans" and not said.rank:
            if count() < said.ranks:
                os.environ["ESPALIER_SHARE_DEVICE"] = "1"
            try:
                launch([__file__, "plans", "--rank", "--folder", folder], said.ranks)
            except LaunchError as error:
                print(error)
                return 1
            return 0
        if said.check == "killed":
            if count() < 2:
                os.environ["ESPALIER_SHARE_DEVICE"] = "1"
            return 0 if killed(folder) else 1
        start(accelerator())
        try:
            return 0 if CHECKS[said.check](folder) else 1
        finally:
            finish()


if __name__ == "__main__":
    sys.exit(main())
