"""What dropout costs in kernels of our own: instructions of a thread for each element that it draws.

The kernels are compiled for a GPU, which need not be there (Triton brings all that takes), and taken apart
again. Counted is, of attention, the loop over keys that all of a tile's queries see, or over such queries,
with dropout and without; of dropout alone, the whole kernel. Bars: what was reached when the hash of masks
became one of 32 bits, by Triton 3.7 and 3.9; one of 64 bits took 23.6, 23.7, 27.6 and 36.0 (3.7).

    python benchmarks/kernels.py [--unit 90]
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from _common import Row, table

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from espalier.tensor import fused_kernels
from tests.compiled import compiled

LINE = re.compile(r"/\*[0-9a-f]{4,}\*/\s+(.*?);")
WARP = 32  # threads
BARS = {"attend": 12.0, "attend_back_queries": 10.0, "attend_back_keys": 12.5, "drop": 18.5}


def instructions(kernel: Any) -> tuple[int, int]:
    """How many a kernel has, and the leanest of its loops over tiles."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as binary:
        binary.write(kernel.asm["cubin"])
        binary.flush()
        told = subprocess.run([tool, "-c", binary.name], capture_output=True, text=True, check=True).stdout
    count, begins, loops = 0, {}, []
    for line in told.splitlines():
        if label := re.match(r"\s*(\.L\w*):", line):
            begins[label[1]] = count
        elif code := LINE.search(line):
            count += 1
            if back := re.search(r"BRA.*`\((\.L\w*)\)", code[1]):
                loops.append(count - begins.get(back[1], count))
    return count, min((n for n in loops if n > 1), default=0)  # the last one jumps to itself, behind the end


def launched(p: float) -> Iterator[tuple[str, tuple[Any, ...], dict[str, Any]]]:
    """What is launched for attention with so much dropout, and for dropout alone: arguments and constants."""
    told: list[tuple[str, tuple[Any, ...], dict[str, Any]]] = []

    def launch(name: str, grid: Any, tensors: Any, key: Any, numbers: Any, **constants: Any) -> None:
        told.append((name, (*tensors, *key, *numbers), constants))

    with mock.patch.multiple(fused_kernels, launch=launch, has_triton=lambda device: True):
        x = torch.empty(2, 4, 512, 64, dtype=torch.bfloat16)
        drops = fused_kernels.Dropout(1 << 40, 0, (4 << 18, 1 << 18, 512), p) if p else None
        out, lse = fused_kernels.attention(x, x, x, None, 0, 0.1, drops)
        fused_kernels.attention_back(out, out, lse, x, x, x, None, 0, 0.1, drops)
        if p:
            numbering = fused_kernels.Numbering.of((1 << 20,), 0, (1,))
            fused_kernels._apply(x.new_empty(1 << 20), fused_kernels.Drawn.of(1, p), 1.1, numbering, False)
    yield from told


def counted(p: float, unit: int) -> dict[str, float]:
    """Instructions for each element: of attention's leanest loop, of whole tiles; of all of dropout."""
    counts = {}
    for name, args, constants in launched(p):
        whole, loop = instructions(compiled(name, args, constants, unit))
        threads = WARP * constants.get("num_warps", 4)
        if loop:
            counts[name] = loop * threads / (constants["M"] * constants["N"])
        else:
            counts[name] = whole * threads / constants["BLOCK"]
    return counts


def main() -> int:
    """The table; the exit status: 1 if a bar is missed."""
    words = argparse.ArgumentParser(description=__doc__)
    words.add_argument("--unit", type=int, default=90)
    unit = words.parse_args().unit
    if find_spec("triton") is None:
        print("Triton is not there to compile kernels: pip install triton")
        return 0
    os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns of what it will be
    plain, dropping = counted(0.0, unit), counted(0.1, unit)
    rows: list[Row] = [("kernel", "without dropout", "with", "more", "bar", "")]
    missed = 0
    for name, limit in BARS.items():
        before, after = plain.get(name, 0.0), dropping[name]
        more = after - before
        missed += more > limit
        figures = (f"{x:.1f}" for x in (before, after, more, limit))
        rows.append((name, *figures, "" if more <= limit else "MISS"))
    print(table(rows, left=(0, 5)))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
