"""A disk: how fast chunks go to files and come back, beside plain ``dd`` past the page cache.

    python benchmarks/disk.py [folder]

``dd`` writes and reads one file with ``oflag=direct`` and ``iflag=direct``, by requests of 4 MiB. Espalier
writes and reads as many bytes as a step does with ``offload = {states = "disk"}``: chunk by chunk, the next
one on its way while one is there, with checksums, in space that was taken before, under another name until a
file is whole. Both take turns on the same disk; each figure is the median of five. Bar: at least 0.7 of what
``dd`` reaches, for writing and for reading. Tensors that are read are compared with those written.
"""

from __future__ import annotations

import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from pathlib import Path

import torch
from _common import table

from espalier.parallel.data.disk import Disk

BAR = 0.7
TURNS = 5
CHUNKS, CHUNK = 20, 25 << 20  # bytes
BYTES = CHUNKS * CHUNK
REQUEST = 1 << 22


def by_dd(of: list[str]) -> float:
    """Bytes a second, of what dd says of itself."""
    done = subprocess.run(
        ["dd", *of, f"bs={REQUEST}", f"count={-(-BYTES // REQUEST)}"],
        stderr=subprocess.PIPE,
        text=True,
        check=True,
        env={"LC_ALL": "C"},
    )
    said = re.search(r"(\d+) bytes .* copied, ([\d.e-]+) s", done.stderr)
    if said is None:
        raise RuntimeError(f"dd said: {done.stderr}")
    return int(said[1]) / float(said[2])


def chunk(seed: int) -> list[torch.Tensor]:
    """States of a chunk: tensors of several sizes, each where torch puts it."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [CHUNK // 32] * 6 + [CHUNK // 16 - 1000, 1000]
    return [torch.randn(size, generator=generator) for size in sizes]


def written(disk: Disk, chunks: list[list[torch.Tensor]]) -> float:
    """Bytes a second."""
    start = time.perf_counter()
    for done in [disk.write(f"{i}", chunk) for i, chunk in enumerate(chunks)]:
        done.result()
    return _nbytes(chunks) / (time.perf_counter() - start)


def read(disk: Disk, chunks: list[list[torch.Tensor]], look: bool = False) -> float:
    """Bytes a second, each chunk into memory of its own; ``look`` whether it is what was written."""
    took, start, coming = 0.0, time.perf_counter(), []
    for i in range(len(chunks) + 1):
        if i < len(chunks):
            into = disk.empty(f"{i}")
            coming.append((into, disk.read(f"{i}", into)))
        if i:
            came, done = coming.pop(0)
            done.result()
            took += time.perf_counter() - start
            if look and not all(map(torch.equal, came, chunks[i - 1])):
                raise RuntimeError("what was read is not what was written")
            del came
            start = time.perf_counter()
    return _nbytes(chunks) / took


def _nbytes(chunks: list[list[torch.Tensor]]) -> int:
    return sum(t.nbytes for chunk in chunks for t in chunk)


def main(folder: str) -> int:
    """Take turns, and print the table; gives the exit status."""
    speeds: dict[tuple[str, str], list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        disk, file = Disk(scratch), str(Path(scratch) / "dd")
        chunks = [chunk(i) for i in range(CHUNKS)]
        for i, tensors in enumerate(chunks):
            disk.reserve(f"{i}", _nbytes([tensors]))
        for turn in range(TURNS + 1):
            for way, of, run in (
                ("writing", ["if=/dev/zero", f"of={file}", "oflag=direct"], written),
                ("reading", [f"if={file}", "of=/dev/null", "iflag=direct"], read),
            ):
                theirs, mine = by_dd(of), run(disk, chunks)
                if not turn and way == "reading":
                    read(disk, chunks, look=True)
                if turn:  # the first takes what is new: files, memory
                    speeds[way, "dd"].append(theirs)
                    speeds[way, "espalier"].append(mine)
        direct = disk.is_direct
        disk.close()
    print(f"{_nbytes(chunks):,} bytes, {'direct' if direct else 'through the page cache'}")
    rows, missed = [("", "dd, GB/s", "espalier, GB/s", "ratio", "bar", "")], 0
    for way in ("writing", "reading"):
        theirs, mine = (statistics.median(speeds[way, who]) for who in ("dd", "espalier"))
        ratio = mine / theirs
        missed += ratio < BAR
        verdict = "ok" if ratio >= BAR else "MISSED"
        rows.append((way, f"{theirs / 1e9:.2f}", f"{mine / 1e9:.2f}", f"{ratio:.2f}", f"{BAR}", verdict))
    print(table(rows))
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main(*(sys.argv[1:] or [tempfile.gettempdir()])))
