"""The C++ side of the simulated device, compiled once for each state of its sources and version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

HERE = Path(__file__).parent
UNITS = ("device.cpp", "autocast.cpp")
TORCH = Path(torch.__file__).parent
# -O0: the sources are short, torch's headers long; what runs is torch's own code
FLAGS = ("-std=c++20", "-O0", "-fPIC", "-w", "-pthread")
INCLUDES = tuple(f"-I{TORCH / 'include' / part}" for part in ("", "torch/csrc/api/include"))
LINKS = (f"-L{TORCH / 'lib'}", "-lc10", "-ltorch_cpu", "-ltorch", f"-Wl,-rpath,{TORCH / 'lib'}")


def compiler() -> str | None:
    """The C++ compiler at hand: ``$CXX``, or one of the usual names."""
    for name in (os.environ.get("CXX"), "g++", "clang++", "c++"):
        if name and shutil.which(name):
            return name
    return None


def why_not() -> str | None:
    """Why the device cannot be simulated here, if so."""
    if sys.platform != "linux":
        return "the simulated device needs Linux (it closes memory by mprotect)"
    if compiler() is None:
        return "the simulated device needs a C++ compiler: set CXX, or install g++"
    return None


def library() -> Path:
    """The library, compiled now if these sources have not been yet.

    It lies in ``$ESPALIER_SIM_CACHE``, or a folder of this user's in the one for temporary files.

    Raises:
        RuntimeError: the compiler refuses; its words.
    """
    folder = os.environ.get("ESPALIER_SIM_CACHE")
    cache = Path(folder) if folder else Path(tempfile.gettempdir(), f"espalier-sim-{os.getuid()}")
    cache.mkdir(mode=0o700, parents=True, exist_ok=True)
    built = cache / f"libsim-{_key()}.so"
    with (cache / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the processes of one run build it once
        if not built.exists():
            _build(built)
    return built


def _build(built: Path) -> None:
    with tempfile.TemporaryDirectory(dir=built.parent) as place:
        objects = [Path(place, unit).with_suffix(".o") for unit in UNITS]
        steps = [
            (*FLAGS, *INCLUDES, "-c", str(HERE / unit), "-o", str(made))
            for unit, made in zip(UNITS, objects, strict=True)
        ]
        with ThreadPoolExecutor() as pool:
            list(pool.map(_compile, steps))
        whole = Path(place, "whole.so")
        _compile(("-shared", *map(str, objects), "-o", str(whole), *LINKS))
        whole.replace(built)


def _key() -> str:
    """What a build hangs on."""
    told = hashlib.sha256(repr((torch.__version__, compiler(), FLAGS, sys.version_info[:2])).encode())
    for name in (*UNITS, "order.h"):
        told.update((HERE / name).read_bytes())
    return told.hexdigest()[:16]


def _compile(arguments: tuple[str, ...]) -> None:
    ran = subprocess.run([str(compiler()), *arguments], capture_output=True, text=True, check=False)
    if ran.returncode:
        raise RuntimeError(f"the simulated device does not compile:\n{ran.stderr[-4000:]}")
