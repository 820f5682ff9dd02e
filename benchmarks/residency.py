"""Residency: what training takes of the memory when parameters, gradients and states are elsewhere.

On any machine: a GPT of 40 blocks whose AdamW states (8 bytes a parameter) are four times a cap on memory. It
trains with parameters, gradients and states on disk and with recomputed activations. Bars:

* the losses are those of the same run with everything in memory, bit for bit;
* the peak of all tensors stays below the cap, and so does what the process's own memory grows by (what the
  kernel keeps of files is not the process's own: RssAnon; a small run before has loaded all code).

Each run is a process of its own; malloc is told to give memory back, so that the process shows what it uses.

Where there is a CUDA device: GPT-2 in four sizes in plain torch, and with states on the device, on the host
and half of them on each; then the largest GPT-2 whose parameters, gradients and states fit into 120 GiB of
the host's memory. Step times are set beside those that the bus alone would need. This part has not been run
yet.

    python benchmarks/residency.py
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import torch

import espalier
from espalier.models import build

SIZES = {"vocab_size": 256, "hidden": 256, "heads": 4, "layers": 40, "max_positions": 32}
STEPS, ROWS, TOKENS = 4, 4, 32
GPT2 = {"124M": (768, 12, 12), "355M": (1024, 24, 16), "774M": (1280, 36, 20), "1.6B": (1600, 48, 25)}
HOST = 120 * 2**30


def batch(step: int, rows: int, tokens: int, vocabulary: int) -> dict[str, torch.Tensor]:
    """Random tokens, the same in all runs."""
    ids = torch.randint(0, vocabulary, (rows, tokens), generator=torch.Generator().manual_seed(step))
    return {"input_ids": ids, "labels": ids}


class Growth(threading.Thread):
    """The most that the process's own memory has grown since this was made."""

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.start_bytes, self.peak, self.done = _anonymous(), 0, False
        self.start()

    def run(self) -> None:
        """Look every few milliseconds."""
        while not self.done:
            self.peak = max(self.peak, _anonymous() - self.start_bytes)
            time.sleep(0.003)


def _anonymous() -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("RssAnon"):
            return int(line.split()[1]) * 1024
    raise RuntimeError("the kernel does not tell RssAnon")


def train(offload: dict[str, Any], sizes: dict[str, int]) -> dict[str, Any]:
    """Losses and peaks of one run."""
    torch.manual_seed(0)
    before = Growth()
    model = build("gpt", sizes)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    plan = {"offload": offload, "recompute": "full", "prefetch_megabytes": 0.0}
    engine = espalier.initialize(model, optimizer, plan, max_grad_norm=1.0)
    before.done = True
    growth = Growth()
    growth.start_bytes = before.start_bytes
    losses = []
    watch = engine.watch()
    with watch:
        for step in range(STEPS):
            losses.append(engine.train_step(batch(step, ROWS, TOKENS, 256)).item())
    growth.done = True
    return {
        "losses": losses,
        "tensors": watch.peak,
        "process": growth.peak,
        "states": 8 * sum(p.numel() for p in model.parameters()),
    }


def show(name: str, value: int, limit: int) -> bool:
    """Print one bar; says whether it holds."""
    good = value < limit
    print(f"{name:<44} {value / 1e6:9.1f} MB   cap {limit / 1e6:7.1f} MB   {'ok' if good else 'MISSED'}")
    return good


def on_any_machine() -> bool:
    """The runs, and whether all bars hold."""
    with tempfile.TemporaryDirectory() as folder:
        disk = {"parameters": "disk", "gradients": "disk", "states": "disk", "directory": folder}
        found = {name: _run(offload) for name, offload in (("memory", {}), ("disk", disk))}
    kept, away = found["memory"], found["disk"]
    cap = away["states"] // 4
    print(
        f"GPT of {away['states'] // 8:,} parameters; states of {away['states'] / 1e6:.1f} MB, 4 times the cap"
    )
    print(f"{'in memory: tensors':<44} {kept['tensors'] / 1e6:9.1f} MB")
    print(f"{'in memory: process':<44} {kept['process'] / 1e6:9.1f} MB")
    good = show("on disk: tensors", away["tensors"], cap)
    good &= show("on disk: process", away["process"], cap)
    same = kept["losses"] == away["losses"]
    print(
        f"losses {away['losses']}: {'the same bits' if same else 'MISSED: in memory ' + str(kept['losses'])}"
    )
    return good and same


def _run(offload: dict[str, Any]) -> dict[str, Any]:
    """A run in a process of its own."""
    # below these sizes freed memory would stay with the process
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536"}
    done = subprocess.run(
        [sys.executable, __file__, json.dumps(offload)], env=environment, stdout=subprocess.PIPE, check=True
    )
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


# ---- with a GPU


def gpt2(hidden: int, layers: int, heads: int) -> torch.nn.Module:
    """A GPT-2 of those sizes."""
    sizes = {"vocab_size": 50304, "hidden": hidden, "layers": layers, "heads": heads, "max_positions": 1024}
    return build("gpt2", sizes)


def seconds(step: Any, times: int = 5) -> float:
    """Of a step, after two to warm up."""
    for i in range(times + 2):
        if i == 2:
            torch.cuda.synchronize()
            start = time.perf_counter()
        step(i)
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / times


def bus() -> float:
    """Bytes a second from pinned memory to the device."""
    here = torch.empty(2**30, dtype=torch.uint8, pin_memory=True)
    there = torch.empty_like(here, device="cuda")
    return here.numel() / seconds(lambda _: there.copy_(here, non_blocking=True))


def placements(rate: float) -> None:
    """GPT-2 sizes: plain torch, and states in three places."""
    for name, (hidden, layers, heads) in GPT2.items():
        model = gpt2(hidden, layers, heads).cuda()
        count = sum(p.numel() for p in model.parameters())
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)

        def plain(step: int, model: Any = model, optimizer: Any = optimizer) -> None:
            data = {key: x.cuda() for key, x in batch(step, 4, 1024, 50304).items()}
            model(**data).loss.backward()
            optimizer.step()
            optimizer.zero_grad()

        print(f"GPT-2 {name}: plain torch {seconds(plain):.3f} s a step")
        del model, optimizer, plain
        for place in ("device", "host", {"place": "host", "ratio": 0.5}):
            model = gpt2(hidden, layers, heads)
            optimizer = torch.optim.AdamW(model.parameters())
            engine = espalier.initialize(model, optimizer, {"offload": {"states": place}})
            torch.cuda.reset_peak_memory_stats()
            took = seconds(lambda step, e=engine: e.train_step(batch(step, 4, 1024, 50304)))
            share = 0.0 if place == "device" else 1.0 if place == "host" else 0.5
            # gradients and parameters come, parameters go back
            limit = 12 * count * share / rate
            peak = torch.cuda.max_memory_allocated() / 2**30
            print(f"  states {place!s:<36} {took:.3f} s, peak {peak:.1f} GiB; the bus alone {limit:.3f} s")
            del model, optimizer, engine


def largest(rate: float) -> None:
    """The largest GPT-2 of hidden size 8192 whose 16 bytes a parameter fit into the host's memory."""
    layers = int(HOST / 16 / (12 * 8192**2)) - 1
    model = gpt2(8192, layers, 64)
    count = sum(p.numel() for p in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters())
    offload = {"parameters": "host", "gradients": "host", "states": "host"}
    plan = {"precision": "bfloat16", "recompute": "full", "offload": offload}
    engine = espalier.initialize(model, optimizer, plan)
    took = seconds(lambda step: engine.train_step(batch(step, 4, 1024, 50304)), 2)
    # in bfloat16: parameters come twice, gradients go
    limit = 6 * count / rate
    print(f"GPT-2 of {count / 1e9:.1f} billion: {took:.1f} s a step; the bus alone {limit:.1f} s")


if __name__ == "__main__":
    if len(sys.argv) > 1:
        given = json.loads(sys.argv[1])
        train(given, {**SIZES, "hidden": 32, "layers": 2})  # what code alone takes is not counted
        print(json.dumps(train(given, SIZES)))
        sys.exit()
    passed = on_any_machine()
    if torch.cuda.is_available():
        speed = bus()
        placements(speed)
        largest(speed)
    sys.exit(0 if passed else 1)
