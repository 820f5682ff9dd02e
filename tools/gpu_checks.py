"""What ``make gpu`` looks at on an accelerator, a check each: ``python tools/gpu_checks.py NAME``.

A check prints what it found, a line each, and fails where something is wrong; one part's error is told, and
the others go on. On one rank: ``alone``, ``compiled``, ``offload``, ``waits``, ``sanitizer``, ``kernels``,
``lightning``, ``calibrated``. On several, that it starts: ``plans``, ``killed``. With ``--on cpu`` they run
without an accelerator, to try the checks themselves (but ``kernels``, which has nothing to count there).
"""

from __future__ import annotations

import argparse
import faulthandler
import gc
import math
import os
import runpy
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
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
from espalier.tensor.rules.float8 import refused

SIZES = {"vocab_size": 512, "max_positions": 64, "hidden": 256, "heads": 8, "kv_heads": 4, "layers": 4}
BIG = {"vocab_size": 50304, "max_positions": 1024, "hidden": 768, "heads": 12, "layers": 12}
STEPS, CLOSE, NARROW = 3, 1e-4, 3e-2
# the bars of `kernels`: against plain torch, and of the peak against the dry run
LAUNCHES, BUSY, BUSY_DROPPING, PEAK = 1.05, 1.0, 1.1, 1.15
A_PLAN = 75  # seconds, after which one that hangs is given up
EXAMPLES = Path(__file__).parents[1] / "examples" / "coming_from"
UNDER_WAY, MISSES = "under-way", "misses"  # files of `plans`: the part that runs, what was missed

CHECKPOINT = "from a checkpoint of zero 3 to tensor"
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
    "float8": {"precision": "float8"},
    "compiled": {},
}
COMPILED: dict[str, dict[str, Any]] = {
    "compiled, selective": {"recompute": "selective"},
    "compiled, full": {"recompute": "full"},
    "compiled, zero 3": {"zero": 3},
    "compiled, autocast": {"precision": "autocast-bfloat16", "recompute": "selective"},
}
TOGETHER: dict[int, dict[str, dict[str, Any]]] = {
    2: {
        **{f"zero {zero}": {"data": 2, "zero": zero} for zero in range(4)},
        "zero 1, bfloat16": {"data": 2, "zero": 1, "precision": "bfloat16", "chunk_megabytes": 0.5},
        "zero 3, bfloat16": {"data": 2, "zero": 3, "precision": "bfloat16"},
        "zero 3, all on the host": {
            "data": 2,
            "zero": 3,
            "offload": dict.fromkeys(("states", "gradients", "parameters"), "host"),
        },
        "tensor": {"tensor": 2},
        "sequence": {"tensor": 2, "sequence_parallel": True},
        "asynchronous": {"tensor": 2, "sequence_parallel": True, "async_tensor_parallel": True},
        "ring": {"context": 2, "context_kind": "ring"},
        "ulysses": {"context": 2, "context_kind": "ulysses"},
        "1f1b, tied": {"pipe": 2, "accumulate": 4},
        "zbv, tied": {"pipe": 2, "accumulate": 4, "schedule": "zbv", "stages_per_rank": 2},
        "experts": {"data": 2, "expert": 2},
        "compiled, zero 3": {"data": 2, "zero": 3},
        "compiled, sequence": {"tensor": 2, "sequence_parallel": True},
        "compiled, asynchronous": {"tensor": 2, "sequence_parallel": True, "async_tensor_parallel": True},
        "compiled, asynchronous, selective": {
            "tensor": 2,
            "sequence_parallel": True,
            "async_tensor_parallel": True,
            "recompute": "selective",
        },
    },
    4: {
        "2d": {"tensor": 4, "tensor_mode": "2d"},
        "pipe and data": {"pipe": 2, "data": 2, "zero": 2, "accumulate": 4},
        "data and tensor": {"data": 2, "tensor": 2, "zero": 3},
    },
}


def kind() -> str:
    """The type of device that is looked at."""
    return os.environ.get("ESPALIER_GPU_CHECKS_ON") or accelerator() or "cpu"


def here() -> torch.device:
    """This rank's own."""
    index = torch.accelerator.current_device_index() if kind() != "cpu" else None
    return torch.device(kind()) if index is None else torch.device(kind(), index)


def each(parts: Mapping[str, Callable[[], bool]]) -> bool:
    """Look at one part after the other; an error is told, and the next one goes on."""
    held = True
    for name, part in parts.items():
        try:
            held &= part()
        except Exception as error:
            held = False
            first = (str(error).strip().splitlines() or [""])[0]
            print(f"MISS {name}: {type(error).__name__}: {first}", flush=True)
            traceback.print_exc()
    return held


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
    plan: Mapping[str, Any], of: Any, name: str = "gpt", sizes: Mapping[str, Any] = SIZES, **more: Any
) -> list[float]:
    """The losses of a few steps by a plan."""
    net = model(name, sizes)
    engine = espalier.initialize(net, of(net.parameters(), lr=1e-3), dict(plan), max_grad_norm=1.0, **more)
    if engine.mesh.device_type != kind():
        raise AssertionError(f"the plan {plan} lies on {engine.mesh.device_type}, not on {kind()}")
    return [engine.train_step(batch(step, sizes)).item() for step in range(STEPS)]


def by_torch(name: str = "gpt", sizes: Mapping[str, Any] = SIZES) -> list[float]:
    """The losses of the same steps by torch alone, in float32."""
    net = model(name, sizes).to(here())
    losses, optimizer = [], torch.optim.AdamW(net.parameters(), lr=1e-3)
    for step in range(STEPS):
        loss = net(**{key: x.to(here()) for key, x in batch(step, sizes).items()}).loss
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def apart(a: list[float], b: list[float]) -> float:
    """The largest relative difference; infinite where a value is none."""
    if not all(map(math.isfinite, (*a, *b))):
        return math.inf
    return max(abs(x - y) / abs(y) for x, y in zip(a, b, strict=True))


def told(name: str, figure: float, limit: float) -> bool:
    """Print a figure beside its limit; whether it is within."""
    held = figure <= limit and math.isfinite(figure)
    print(f"{'ok  ' if held else 'MISS'} {name}: {figure:.3g} (at most {limit:g})", flush=True)
    return held


# ---- one rank


def able(name: str) -> bool:
    """Whether this device can do what one of :data:`ALONE` asks for; said where it cannot."""
    why = refused(here()) if name == "float8" else None
    if why is not None:
        print(f"left out, {name}: {why}", flush=True)
    return why is None


def alone(folder: str) -> bool:
    """Plans of one rank: the losses of torch in float32."""
    return like_torch(ALONE, by_torch())


def compiled(folder: str) -> bool:
    """The same of compiled blocks."""
    return like_torch(COMPILED, by_torch())


def like_torch(plans: Mapping[str, dict[str, Any]], expected: list[float]) -> bool:
    """Plans of one rank, each beside losses of torch."""

    def like(name: str) -> bool:
        losses = followed(plans[name], torch.optim.AdamW, compile="compiled" in name)
        narrow = "precision" in plans[name]
        return told(f"{name}: losses apart", apart(losses, expected), NARROW if narrow else CLOSE)

    return each({name: partial(like, name) for name in plans if able(name)})


def offload(folder: str) -> bool:
    """Each optimizer in each precision, offloaded and not: the same losses."""

    def compared(precision: str, name: str) -> bool:
        of, held = OPTIMIZERS[name], True
        expected = followed({"precision": precision}, of)

        def placed(where: str) -> bool:
            there = dict(OFFLOADS[where]["offload"])
            if "directory" in there:
                there["directory"] = folder
            found = followed({"precision": precision, "offload": there}, of)
            limit = CLOSE if precision == "float32" else NARROW
            return told(f"{precision}, {name}, {where}: losses apart", apart(found, expected), limit)

        held &= each({f"{precision}, {name}, {where}": partial(placed, where) for where in OFFLOADS})
        return held

    pairs = [(precision, name) for precision in ("float32", "bfloat16") for name in OPTIMIZERS]
    return each({", ".join(pair): partial(compared, *pair) for pair in pairs})


def waits(folder: str) -> bool:
    """A step under ``set_sync_debug_mode("error")``: whoever waits for the device is an error."""
    module = torch.get_device_module(kind())
    if not hasattr(module, "set_sync_debug_mode"):
        print(f"{kind()} has no set_sync_debug_mode: not looked at")
        return True

    def without(name: str) -> bool:
        net = model()
        plan, compiled = dict(ALONE[name]), name == "compiled"
        engine = espalier.initialize(
            net, torch.optim.AdamW(net.parameters()), plan, max_grad_norm=1.0, compile=compiled
        )
        for step in range(2):
            engine.train_step(batch(step))
        try:
            module.set_sync_debug_mode("error")
            engine.train_step(batch(2))
        finally:
            module.set_sync_debug_mode("default")
        print(f"ok   {name}: no wait", flush=True)
        return True

    return each({name: partial(without, name) for name in ALONE if able(name)})


def sanitizer(folder: str) -> bool:
    """Uses several streams, for torch's sanitizer, which the environment turns on; it ends the process."""

    def saved(plan: Mapping[str, Any], where: Path) -> bool:
        net = model()
        engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), dict(plan))
        for step in range(STEPS):
            engine.train_step(batch(step))
            engine.save(where, asynchronous=True, keep=1)
        engine.wait_saved()
        print(f"ok   {plan or 'saved beside training'}", flush=True)
        return True

    some: tuple[dict[str, Any], ...] = (ALONE["inputs on the host"], {**OFFLOADS["states on the host"]}, {})
    return each({str(plan): partial(saved, plan, Path(folder, f"saved-{i}")) for i, plan in enumerate(some)})


def kernels(folder: str) -> bool:
    """Kernels, launches and the device's time a step beside plain torch; the peak beside the dry run's."""
    data, held = batch(0, BIG, 4), True
    for dropout, most in ((0.0, BUSY), (0.1, BUSY_DROPPING)):
        with_dropout = f", dropout {dropout}" if dropout else ""
        expected = counted(f"torch{with_dropout}", plain_step(data, dropout))
        gc.collect()  # torch's would be in our peak
        engine = large(dropout)
        found = counted(f"espalier{with_dropout}", partial(engine.train_step, data))
        bars = {"the device's time": most} | ({} if dropout else {"kernels": LAUNCHES, "launches": LAUNCHES})
        for what, limit in bars.items():
            if expected[what]:
                ratio = found[what] / expected[what]
                held &= told(f"{what}{with_dropout} against plain torch", ratio, limit)
            else:  # say the driver lets nobody but root count
                print(f"MISS {what} against plain torch: the profiler saw none of torch's", flush=True)
                held = False
        if not dropout:
            held &= peaks(engine, data)
        del engine
    return held


def large(dropout: float) -> Any:
    """An engine of one rank for the large model."""
    net = model("gpt2", {**BIG, "dropout": dropout}).to(here(), torch.bfloat16)
    return espalier.initialize(net, torch.optim.AdamW(net.parameters()), {})


def peaks(engine: Any, data: Batch) -> bool:
    """The peak of a step beside the dry run's."""
    device = here()
    restart_peak(device)
    engine.train_step(data)
    torch.accelerator.synchronize()
    peak = peak_memory(device)
    with torch.device("meta"):
        twin = build("gpt2", dict(BIG)).to(torch.bfloat16)
    optimizer = torch.optim.AdamW(twin.parameters())
    report = espalier.dry_run(twin, {}, {name: x.to("meta") for name, x in data.items()}, optimizer=optimizer)
    return told("peak memory against the dry run", peak / report.peak_bytes, PEAK)


def plain_step(data: Batch, dropout: float) -> Callable[[], None]:
    """A step of torch alone."""
    net = model("gpt2", {**BIG, "dropout": dropout}).to(here(), torch.bfloat16)
    optimizer = torch.optim.AdamW(net.parameters(), fused=True)

    def step() -> None:
        net(**{name: x.to(here()) for name, x in data.items()}).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def counted(name: str, step: Callable[[], object]) -> dict[str, float]:
    """A step's kernels, launches and milliseconds of the device, as the profiler sees them.

    Printed beside them are those of the host, until a step without the profiler returns, and the share of
    such a step in which the device is busy: where that is small, a step waits for the host.
    """
    from torch.profiler import DeviceType, ProfilerActivity, profile

    for _ in range(3):
        step()
    torch.accelerator.synchronize()
    began = time.perf_counter()
    step()
    host = 1e3 * (time.perf_counter() - began)
    torch.accelerator.synchronize()
    whole = 1e3 * (time.perf_counter() - began)
    # torch 2.11 warns of what is lost between cycles, also where there is one
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA], acc_events=True) as seen:
        step()
        torch.accelerator.synchronize()
    events = list(seen.events() or ())
    # annotations span others
    ran = [e for e in events if e.device_type == DeviceType.CUDA and not e.is_user_annotation]
    launched = [e for e in events if e.name.startswith(("cudaLaunch", "cuLaunch", "hipLaunch"))]
    busy = sum(e.time_range.elapsed_us() for e in ran) / 1e3
    figures = f"{len(ran)} kernels, {len(launched)} launches"
    times = f"{busy:.1f} ms of the device, {host:.1f} ms of the host, busy {busy / whole:.0%}"
    print(f"{name}: {figures}, {times}", flush=True)
    return {"kernels": len(ran), "launches": len(launched), "the device's time": busy}


# ---- several ranks


def plans(folder: str, names: Sequence[str]) -> bool:
    """On a rank: plans, each as one rank alone, and a checkpoint; what is missed goes to a file.

    A plan that hangs ends the process, with what its threads stand at.
    """
    ranks = int(os.environ["WORLD_SIZE"])
    for name in names:
        Path(folder, UNDER_WAY).write_text(name)
        faulthandler.dump_traceback_later(A_PLAN, exit=True)
        difference, limit = checkpoint(folder) if name == CHECKPOINT else planned(name, TOGETHER[ranks][name])
        everywhere = torch.tensor([difference], device="cpu")
        dist.all_reduce(everywhere, dist.ReduceOp.MAX)
        faulthandler.cancel_dump_traceback_later()
        if dist.get_rank() == 0 and not told(
            f"{ranks} ranks, {name}: losses apart", everywhere.item(), limit
        ):
            with Path(folder, MISSES).open("a") as file:
                file.write(f"{name}\n")
    return True


def planned(name: str, plan: Mapping[str, Any]) -> tuple[float, float]:
    """How far the losses of a plan are from those of one rank alone, and how far they may be."""
    net_name = "moe" if "expert" in plan else "gpt"
    sizes = {**SIZES, "tied": "tied" in name}
    losses = followed(plan, torch.optim.AdamW, net_name, sizes, compile="compiled" in name)
    # the balance of experts is over each rank's own tokens
    limit = NARROW if "bfloat16" in name or net_name == "moe" else CLOSE
    return apart(losses, by_torch(net_name, sizes)), limit


def checkpoint(folder: str) -> tuple[float, float]:
    """The same of training that goes on from what zero 3 has saved, by tensor."""
    ranks, folder = int(os.environ["WORLD_SIZE"]), str(Path(folder, "checkpoint"))
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
    return apart([again.train_step(batch(step)).item() for step in (1, 2)], after), CLOSE


def all_plans(folder: str, ranks: int, names: Sequence[str] = ()) -> bool:
    """Start the ranks, and start them again behind a plan that failed.

    Args:
        names: of plans; by default all but those that are compiled, and a checkpoint.
    """
    left = [*names] or [*(name for name in TOGETHER[ranks] if "compiled" not in name), CHECKPOINT]
    failed = []
    under_way, misses = Path(folder, UNDER_WAY), Path(folder, MISSES)
    while left:
        under_way.unlink(missing_ok=True)
        words = ["--rank", "--folder", folder, "--on", kind(), "--names", *left]
        try:
            launch([str(Path(__file__).resolve()), "plans", *words], ranks)
            break
        except LaunchError as error:
            print(error)
            if not under_way.exists():
                print(f"MISS {ranks} ranks do not start: what is left is not looked at: {', '.join(left)}")
                return False
            failed.append(under_way.read_text())
            print(f"MISS {ranks} ranks, {failed[-1]}: see above", flush=True)
            left = left[left.index(failed[-1]) + 1 :]
    return not failed and not misses.exists()


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
        words = ["dying", "--rank", "--folder", folder, "--on", kind()]
        launch([str(Path(__file__).resolve()), *words], 2)
    except LaunchError as error:
        took = time.perf_counter() - began
        print(str(error).splitlines()[0])
        if error.exit_code != -signal.SIGKILL:
            print(f"MISS the ranks ended before one was killed: {error}")
            return False
        return told("seconds until all have ended", took, 120)
    print("MISS the launch ended well, though a rank was killed")
    return False


def lightning(folder: str) -> bool:
    """Lightning's ``16-mixed``, whose scaler is its own: an example's values beside Lightning's own."""
    finish()  # its Trainer starts the world itself
    values = []
    for name in ("lightning_trainer_here", "lightning_trainer"):
        program = Path(folder, f"{name}.py")
        text = (EXAMPLES / program.name).read_text("utf-8")
        program.write_text(text.replace('accelerator="cpu"', 'accelerator="auto"'), "utf-8")
        main: Any = runpy.run_path(str(program))["main"]
        values.append(main(devices=1, precision="16-mixed"))
    found, expected = values
    return told("16-mixed: values apart", max(abs(x - y) for x, y in zip(found, expected, strict=True)), 0.1)


def calibrated(folder: str) -> bool:
    """``espalier calibrate`` of this device: what it writes."""
    from espalier.planner.calibrate import calibrate, show

    finish()  # it starts ranks
    print("\n".join(calibrate(1, show, anyway=True, device_type=kind()).told()), flush=True)
    return True


CHECKS: dict[str, Callable[[str], bool]] = {
    "alone": alone,
    "compiled": compiled,
    "lightning": lightning,
    "calibrated": calibrated,
    "offload": offload,
    "waits": waits,
    "sanitizer": sanitizer,
    "kernels": kernels,
    "dying": dying,
    "killed": killed,
}


def main() -> int:
    """Run a check; the exit status: 1 if something is missed."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("check", choices=[*CHECKS, "plans"])
    words.add_argument("--rank", action="store_true", help="this process is a rank of several")
    words.add_argument("--ranks", type=int, default=2, help="of `plans`")
    words.add_argument("--names", nargs="*", default=(), help="of plans, for a rank")
    words.add_argument("--folder", help="for files")
    words.add_argument("--on", help="a type of device; by default the accelerator's")
    said = words.parse_args()
    if said.on:
        os.environ["ESPALIER_GPU_CHECKS_ON"] = said.on
    elif accelerator() is None:
        print("no accelerator is visible here")
        return 1
    with nullcontext(said.folder) if said.folder else tempfile.TemporaryDirectory() as folder:
        if not said.rank and said.check in ("plans", "killed"):
            if kind() != "cpu" and count() < (said.ranks if said.check == "plans" else 2):
                os.environ["ESPALIER_SHARE_DEVICE"] = "1"
            held = killed(folder) if said.check == "killed" else all_plans(folder, said.ranks, said.names)
            return 0 if held else 1
        start(kind())
        try:
            held = plans(folder, said.names) if said.check == "plans" else CHECKS[said.check](folder)
            return 0 if held else 1
        finally:
            finish()


if __name__ == "__main__":
    sys.exit(main())
