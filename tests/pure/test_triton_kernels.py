"""Kernels of our own compile for GPUs; Triton brings all that takes, so that no GPU is needed."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

import pytest
import torch

from espalier.tensor import fused_kernels
from tests.asked import left_to_sweeps
from tests.compiled import compiled

pytestmark = pytest.mark.skipif(find_spec("triton") is None, reason="needs Triton: pip install triton")

SMALLEST = 99 * 1024  # bytes that a program may share, on units from 8.0 on


@pytest.mark.parametrize(
    ("dtype", "width", "masked", "unit"),
    left_to_sweeps(
        [
            (torch.bfloat16, 128, True, 90),
            (torch.bfloat16, 256, False, 80),
            (torch.float32, 32, True, 80),
            (torch.float32, 64, True, 80),
        ],
        3,
        why="rows of as many bytes are compiled, and so are such products",
    ),
)
def test_kernels_compile_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, dtype: torch.dtype, width: int, masked: bool, unit: int
) -> None:
    """And fit into what the smallest units share."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")  # else Triton warns of what it will be
    shared = {}

    def launch(
        name: str, grid: Any, tensors: Any, key: Any, numbers: tuple[float, ...], **constants: Any
    ) -> None:
        kernel = compiled(name, (*tensors, *key, *numbers), constants, unit)
        assert "cubin" in kernel.asm
        shared[name] = kernel.metadata.shared

    monkeypatch.setattr(fused_kernels, "launch", launch)
    monkeypatch.setattr(fused_kernels, "has_triton", lambda device: True)
    groups = 1 if width == 256 else 2
    q, k = (torch.empty(groups, heads, 64, width, dtype=dtype) for heads in (groups * groups, groups))
    bias = torch.ones(64, 64, dtype=torch.bool) if masked else None
    given = q, k, k, bias, None if masked else 0, 0.1, fused_kernels.Dropout(1 << 40, 3, (1, 2, 3), 0.1)
    assert fused_kernels.attends(q, k, k)
    out, lse = fused_kernels.attention(*given)
    fused_kernels.attention_back(out, out, lse, *given)
    assert set(shared) == {"attend", "attend_back_keys", "attend_back_queries"}
    assert max(shared.values()) <= SMALLEST, shared


@pytest.mark.parametrize(
    ("sizes", "along"), [((100,), (1,)), ((10, 10), (20, 1)), ((2, 5, 5, 2), (400, 40, 4, 1))]
)
def test_dropout_compiles_for_gpus(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Any, sizes: tuple[int, ...], along: tuple[int, ...]
) -> None:
    """For elements numbered along one dim, two, and four."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_DEFAULT_FP_FUSION", "1")
    names = []

    def launch(
        name: str, grid: Any, tensors: Any, key: Any, numbers: tuple[float, ...], **constants: Any
    ) -> None:
        args = (*tensors, *key, *numbers)
        assert constants["DIMS"] == len(sizes) and "cubin" in compiled(name, args, constants, 80).asm
        names.append(name)

    monkeypatch.setattr(fused_kernels, "launch", launch)
    drawn = fused_kernels.Drawn.of(-(1 << 63), 0.1)
    numbering = fused_kernels.Numbering.of(sizes, 3, along)
    fused_kernels._Dropped.apply(torch.ones(sizes, dtype=torch.bfloat16), drawn, 1 / 0.9, numbering, False)
    assert names == ["drop"]
