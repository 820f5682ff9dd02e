"""Files of tensors: what was written comes back, and nothing that goes wrong is silent."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from espalier.files import get, put
from espalier.parallel.data import disk as module
from espalier.parallel.data.disk import PIECE, Disk, DiskError


def some(seed: int, scale: int = 1) -> list[torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    return [
        torch.randn(3, 5 * scale, generator=g),
        torch.randn((), generator=g),
        torch.randn(0, 4),
        torch.randn(1001 * scale, generator=g, dtype=torch.float64),
        torch.randn(7, generator=g).bfloat16(),
        torch.randint(0, 9, (2, 3), generator=g),
    ]


def same(found: list[torch.Tensor], expected: list[torch.Tensor]) -> bool:
    return all(
        a.dtype == b.dtype and a.shape == b.shape and torch.equal(a, b)
        for a, b in zip(found, expected, strict=True)
    )


def read(disk: Disk, key: str) -> list[torch.Tensor]:
    out = disk.empty(key)
    disk.read(key, out).result()
    return out


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Disk]:
    disk = Disk(tmp_path)
    yield disk
    disk.close()
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("reserved", [False, True])
def test_what_was_written_comes_back(disk: Disk, reserved: bool) -> None:
    if reserved:
        disk.reserve("other", 10_000)
    for scale in (1, 2 * PIECE // 8008 + 1):  # one piece, and more
        disk.write("a", some(1, scale)).result()
        disk.write("b", some(2, scale)).result()
        assert same(read(disk, "a"), some(1, scale)) and same(read(disk, "b"), some(2, scale))
    mapped = disk.mapped("a")
    assert same(mapped, some(1, scale))
    for seed in (5, 4, 3):  # the space of what was there before is taken again, but not of what is mapped
        disk.write("a", some(seed)).result()
    assert same(read(disk, "a"), some(3)) and same(mapped, some(1, scale))
    mapped[0].zero_()
    assert same(disk.mapped("a"), some(3))


@pytest.mark.parametrize("at", ["data", "table", "tail"])
def test_a_flipped_bit_is_named(disk: Disk, at: str) -> None:
    disk.write("a", some(1, PIECE // 8008 + 1)).result()
    path = disk.folder / "a"
    size = path.stat().st_size
    place = {"data": 4096, "table": size - 45, "tail": size - 20}[at]
    with open(path, "r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ 4]))
    with pytest.raises(DiskError, match=r"/a is damaged: .*(not those written|not the one written)"):
        read(disk, "a")


@pytest.mark.parametrize("left", [0, 100, -1, -41])
def test_a_cut_file_is_named(disk: Disk, left: int) -> None:
    disk.write("a", some(1)).result()
    path = disk.folder / "a"
    os.truncate(path, left % path.stat().st_size)
    with pytest.raises(DiskError, match="/a is damaged"):
        read(disk, "a")


def test_a_file_of_another_time_or_none_is_named(disk: Disk) -> None:
    disk.write("a", some(1)).result()
    old = (disk.folder / "a").read_bytes()
    disk.write("a", some(2)).result()
    (disk.folder / "a").write_bytes(old)
    with pytest.raises(DiskError, match="not the one written"):
        read(disk, "a")
    (disk.folder / "a").unlink()
    with pytest.raises(DiskError, match="No such file"):
        read(disk, "a")


def test_several_requests_are_under_way(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of one file: each waits here until there is another."""
    pairs = threading.Barrier(2, timeout=20)
    tensors = [torch.arange(PIECE // 4).float(), torch.arange(PIECE // 8).double()]

    def in_pairs(request: Callable[..., object]) -> Callable[..., object]:
        # the table of checksums goes behind the two pieces, by itself
        return lambda *args: (args[2] < 2 * PIECE and pairs.wait(), request(*args))[1]

    monkeypatch.setattr(module, "get", in_pairs(get))
    monkeypatch.setattr(module, "put", in_pairs(put))
    disk.write("a", tensors).result()
    assert same(read(disk, "a"), tensors)


def odd(seed: int) -> list[torch.Tensor]:
    """Tensors at addresses, and of sizes, that no block begins or ends at; one reaches over two pieces."""
    g = torch.Generator().manual_seed(seed)
    sizes = (3, PIECE // 8 + 5, 1, PIECE // 4 + 7, 0, 1001)
    return [torch.randn(size + 1, generator=g)[1:] for size in sizes]


@pytest.mark.parametrize("direct", [True, False])
def test_requests_go_past_the_page_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, direct: bool
) -> None:
    """Where the file system takes that: by whole blocks, at whole blocks of memory; elsewhere as ever."""
    if not direct:
        monkeypatch.setattr(module, "_takes_direct", lambda folder: False)
    disk = Disk(tmp_path)
    if direct and not disk.is_direct:
        pytest.skip("this file system is read and written through the page cache alone")
    requests: list[tuple[bool, int]] = []

    def noted(request: Callable[..., object]) -> Callable[..., object]:
        def note(file: int, piece: memoryview, at: int) -> object:
            address = torch.frombuffer(piece, dtype=torch.uint8).data_ptr()
            is_direct = bool(fcntl.fcntl(file, fcntl.F_GETFL) & os.O_DIRECT)
            requests.append((is_direct, (address | at | len(piece)) % 4096))
            return request(file, piece, at)

        return note

    monkeypatch.setattr(module, "get", noted(get))
    monkeypatch.setattr(module, "put", noted(put))
    for seed in (1, 2):
        disk.write("a", odd(seed)).result()
        into = [torch.empty(x.numel() + 1)[1:] for x in odd(seed)]
        disk.read("a", into).result()
        assert (
            same(into, odd(seed)) and same(read(disk, "a"), odd(seed)) and same(disk.mapped("a"), odd(seed))
        )
    # twice a write and two reads, of three requests and one for the table
    assert requests == [(direct, 0)] * 2 * 3 * (2 + 1)
    disk.close()


def test_what_was_read_goes_back_without_a_copy(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    disk.write("a", odd(1)).result()
    copies: list[int] = []
    memmove = ctypes.memmove
    monkeypatch.setattr(ctypes, "memmove", lambda a, b, n: (copies.append(n), memmove(a, b, n)))
    tensors = read(disk, "a")
    for x in tensors:
        x.add_(1)
    disk.write("a", tensors).result()
    assert same(read(disk, "a"), [x + 1 for x in odd(1)]) and not copies
    disk.write("a", odd(2)).result()
    assert sum(copies) == sum(x.nbytes for x in odd(2))


@pytest.mark.parametrize("call", ["_take_space", "pwrite"])
def test_a_full_disk_leaves_what_was_there(disk: Disk, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    disk.write("a", some(1, 2000)).result()
    with monkeypatch.context() as patched:
        full, real, calls = OSError(errno.ENOSPC, "No space left on device"), os.pwrite, []

        def second(*args: object) -> int:
            calls.append(args)
            if call == "pwrite" and len(calls) < 3:
                return real(args[0], args[1][:4096], args[2])  # type: ignore[index, arg-type]
            raise full

        patched.setattr(module if call == "_take_space" else os, call, second)
        writing = disk.write("a", some(2, 2000))
        with pytest.raises(DiskError, match=r"No space left.* bytes were needed, .* are free. Make space in"):
            writing.result()
    assert same(read(disk, "a"), some(1, 2000))
    assert sorted(os.listdir(disk.folder)) == ["a", "lock"]
    disk.write("a", some(2, 2000)).result()
    assert same(read(disk, "a"), some(2, 2000))


def test_what_is_reserved_is_kept_until_it_is_written(disk: Disk, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a disk where nothing can be had beyond it: first some of the tensors, then all, again and again."""
    size = sum(t.numel() * t.element_size() + 128 for t in some(1, 500))
    disk.reserve("a", size)

    def full(file: int, start: int, nbytes: int) -> None:
        if nbytes > 512 * os.fstat(file).st_blocks + reserved_elsewhere():
            raise OSError(errno.ENOSPC, "No space left on device")
        os.posix_fallocate(file, start, nbytes)

    def reserved_elsewhere() -> int:
        """What was given back, and can be had again."""
        return held - sum(512 * path.stat().st_blocks for path in disk.folder.iterdir())

    held = sum(512 * path.stat().st_blocks for path in disk.folder.iterdir())
    monkeypatch.setattr(module, "_take_space", full)
    disk.write("a", some(1, 500)[:2], keep=True).result()
    assert same(read(disk, "a"), some(1, 500)[:2])
    for seed in range(3):
        disk.write("a", some(seed, 500)).result()
        assert same(read(disk, "a"), some(seed, 500))
    with pytest.raises(DiskError, match="No space left"):
        disk.write("b", some(1, 1000)).result()
    assert same(read(disk, "a"), some(2, 500))


def test_a_small_file_system(tmp_path: Path) -> None:
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(tmp_path)], capture_output=True
    )
    if mounted.returncode:
        pytest.skip("mounting is not allowed here")
    try:
        disk = Disk(tmp_path)
        with pytest.raises(DiskError, match="2,000,000 bytes were needed"):
            disk.reserve("b", 2_000_000)
        disk.write("a", some(1, 50)).result()
        with pytest.raises(DiskError, match="No space left"):
            disk.write("a", some(2, 200)).result()
        assert same(read(disk, "a"), some(1, 50))
        disk.reserve("c", 250_000)
        with contextlib.suppress(OSError), open(tmp_path / "other", "wb", buffering=0) as file:
            while True:
                file.write(bytes(4096))
        disk.write("c", some(1, 20)[:3], keep=True).result()
        for seed in range(3):
            disk.write("c", some(seed, 25)).result()
            assert same(read(disk, "c"), some(seed, 25))
        disk.close()
    finally:
        subprocess.run(["umount", str(tmp_path)], check=True)


def test_folders_of_dead_processes_are_removed(tmp_path: Path) -> None:
    script = (
        "import sys, torch; from espalier.parallel.data.disk import Disk\n"
        "disk = Disk(sys.argv[1]); disk.write('a', [torch.ones(10)]).result(); print('ready', flush=True)\n"
        "sys.stdin.read()"
    )
    other = subprocess.Popen(
        [sys.executable, "-c", script, str(tmp_path)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
    )
    assert other.stdout is not None and other.stdin is not None
    assert other.stdout.readline() == "ready\n"
    Disk(tmp_path).close()  # one that lives is left alone
    assert len(list(tmp_path.iterdir())) == 1
    other.send_signal(signal.SIGKILL)
    other.communicate()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        Disk(tmp_path).close()
    assert "bytes), which a process left that was killed" in str(told[0].message)
    assert not list(tmp_path.iterdir())


def test_garbage_waits_for_no_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It may be collected while a thread starts, which the end of any other waits for."""
    disk, waits = Disk(tmp_path), []
    disk.write("x", [torch.ones(10)]).result()
    disk._thread.submit(int).result()  # its thread has let go of the write
    folder, circle = disk.folder, [disk]
    circle.append(circle)
    monkeypatch.setattr(threading.Thread, "join", lambda thread, timeout=None: waits.append(thread))
    del disk, circle
    gc.collect()
    assert not folder.exists() and not waits


def test_a_folder_that_cannot_be(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(DiskError, match="Nothing can be written to .*directory = "):
        Disk(tmp_path / "file")
