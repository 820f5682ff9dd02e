"""Kernels of our own are launched past Triton's look at each argument: the driver is given the same.

The driver stands here in C: it computes nothing, and notes what it is to launch.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

pytestmark = pytest.mark.skipif(
    find_spec("triton") is None or shutil.which("cc") is None, reason="needs Triton and a C compiler"
)

# what Triton asks of CUDA's driver; of the rest it is told that all went well
ASKED = (
    "cuCtxGetCurrent cuCtxGetDevice cuCtxGetLimit cuCtxSetCurrent cuCtxSetLimit cuDeviceGet "
    "cuDevicePrimaryCtxRetain cuDriverGetVersion cuFuncSetAttribute cuFuncSetCacheConfig cuGetErrorString "
    "cuModuleGetFunction cuModuleLoadData cuModuleUnload"
)
DRIVER = """
#include <stdint.h>
#include <string.h>
int launches, count;
uint32_t given[64], shape[7];
int cuDeviceGetAttribute(int *v, int what, int d) { *v = 1 << 17; return 0; }
int cuStreamIsCapturing(void *stream, int *is_so) { *is_so = 0; return 0; }
int cuFuncGetAttribute(int *v, int what, void *f) { *v = what ? 32 : 1024; return 0; }
int cuPointerGetAttribute(uint64_t *out, int what, uint64_t p) { *out = p; return 0; }
int cuLaunchKernelEx(const void *config, void *f, void **args, void **extra) {
  launches++;
  for (int i = 0; i < count; i++) memcpy(&given[i], args[i], 4);
  memcpy(shape, config, sizeof shape);
  return 0;
}
"""
LAUNCHES = """
import ctypes
driver = ctypes.CDLL("libcuda.so.1", mode=ctypes.RTLD_GLOBAL)
import torch, triton
from triton.backends.compiler import GPUTarget
from triton.backends.nvidia.driver import CudaDriver, CudaLauncher, CudaUtils
from espalier.tensor import fused_kernels, triton_kernels

class Driver(CudaDriver):
    def __init__(self):
        self.utils, self.launcher_cls = CudaUtils(), CudaLauncher
        self.get_device_capability = lambda device=0: (9, 0)
        self.get_current_stream = self.get_current_device = lambda *_: 0

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

triton.runtime.driver.set_active(Driver())
launch, seen = fused_kernels.launch, []

def noted(call, count):
    ctypes.c_int.in_dll(driver, "count").value = count
    before = ctypes.c_int.in_dll(driver, "launches").value
    call()
    assert ctypes.c_int.in_dll(driver, "launches").value == before + 1
    return [list((ctypes.c_uint32 * n).in_dll(driver, name)) for name, n in (("given", count), ("shape", 7))]

def both(name, grid, tensors, key, numbers, **constants):
    kernel, other = getattr(triton_kernels, name), (key[0] + 5, key[1] - 7)
    # what Triton has made a constant is no argument
    free = [x for x, n in zip(kernel.arg_names[len(tensors) + 2 :], numbers)
            if not (type(n) is int and n == 1 and x not in kernel.do_not_specialize)]
    count = len(tensors) + 2 + len(free)
    expected = noted(lambda: kernel[grid](*tensors, *other, *numbers, **constants), count)
    launch(name, grid, tensors, key, numbers, **constants)
    searches = []
    run, kernel.run = kernel.run, lambda *_, **__: searches.append(name)
    found = noted(lambda: launch(name, grid, tensors, other, numbers, **constants), count)
    kernel.run = run
    hook, heard = triton.knobs.runtime.launch_enter_hook, []
    hook.add(heard.append)  # as a profiler does
    launch(name, grid, tensors, other, numbers, **constants)
    hook.remove(heard.append)
    assert [told.get()["name"] for told in heard] == [name]
    assert found == expected and not searches, (name, expected, found)
    seen.append(name)

fused_kernels.launch = both
drawn = fused_kernels.Drawn.of(12345678901234, 0.1)
for sizes, along in (((1000,), (1,)), ((100, 10), (20, 1))):
    numbering = fused_kernels.Numbering.of(sizes, 3, along)
    fused_kernels._Dropped.apply(torch.ones(sizes), drawn, 1 / 0.9, numbering, False)
q = torch.ones(2, 3, 40, 16, dtype=torch.bfloat16)
given = q, q, q, None, 0, 0.1, fused_kernels.Dropout(12345678901234, 0, (4800, 1600, 40), 0.1)
out, lse = fused_kernels.attention(*given)
fused_kernels.attention_back(out, out, lse, *given)
print(*seen)
"""


def test_the_driver_is_given_the_same(tmp_path: Path) -> None:
    """And Triton is not asked for a kernel that is known."""
    rest = "".join(f"int {name}(int *a) {{ if (a) *a = 13000; return 0; }}\n" for name in ASKED.split())
    (tmp_path / "driver.c").write_text(DRIVER + rest)
    library = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", "libcuda.so.1", "driver.c"]
    subprocess.run([shutil.which("cc") or "cc", *library], cwd=tmp_path, check=True)
    env = {
        **os.environ,
        "LD_LIBRARY_PATH": str(tmp_path),
        "TRITON_LIBCUDA_PATH": str(tmp_path),
        "TRITON_CACHE_DIR": str(tmp_path / "cache"),
        "PYTHONPATH": str(Path(__file__).parents[2]),
    }
    ran = subprocess.run(
        [sys.executable, "-c", LAUNCHES], env=env, capture_output=True, text=True, timeout=300, check=False
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    assert ran.stdout.split() == ["drop", "drop", "attend", "attend_back_queries", "attend_back_keys"]
