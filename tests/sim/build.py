"""The C++ side of the simulated device, compiled once for each state of its sources and version of torch."""

from __future__ import annotations

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

HERE = Path(__file__).parent
UNITS = ("autocast.cpp", "device.cpp")
TORCH = Path(torch.__file__).parent
# -O0: the sources are short, torch's headers long; what runs is torch's own code
PLAIN = ("-std=c++20", "-O0", "-fPIC", "-w", "-pthread")
# else GCC looks for garbage, for a tenth of its time
FLAGS = (*PLAIN, "--param", "ggc-min-expand=1000", "--param", "ggc-min-heapsize=4000000")
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
        # one source: both read torch's headers
        source, whole = Path(place, "whole.cpp"), Path(place, "whole.so")
        source.write_text("".join(f'#include "{HERE / unit}"\n' for unit in UNITS))
        _declare_few(Path(place, "ATen"))
        sources = (f"-I{place}", *INCLUDES, "-shared", str(source))
        _compile((*FLAGS, *sources, "-o", str(whole), *LINKS))
        whole.replace(built)


def _declare_few(folder: Path) -> None:
    """Headers in place of those by which torch's of autocast declares all operators: those that it casts."""
    torchs = TORCH / "include/ATen"
    cast = set(re.findall(r"\b_\((\w+)[,)]", (torchs / "autocast_mode.h").read_text()))
    operators = (f"ATen/ops/{name}_ops.h" for name in sorted(cast) if (torchs / f"ops/{name}_ops.h").exists())
    functions = re.findall(r"^#define ATEN_FN.*$", (torchs / "Operators.h").read_text(), re.MULTILINE)
    headers = {
        "ATen.h": ["ATen/Context.h", "ATen/core/Tensor.h"],
        "NativeFunctions.h": [],
        "Operators.h": operators,
    }
    folder.mkdir()
    for name, included in headers.items():
        lines = ["#pragma once", *functions, *(f"#include <{header}>" for header in included)]
        (folder / name).write_text("\n".join(lines) + "\n")


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
