"""The hash by which ranks compare tensors."""

from __future__ import annotations

import pytest
import torch

from espalier.tensor import compare as module

DTYPES = [
    torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64, torch.float16, torch.bfloat16,
    torch.float32, torch.float64, torch.complex64, torch.complex128, torch.float8_e4m3fn,
]  # fmt: skip


def of(x: torch.Tensor) -> int:
    return int(module.fingerprint(x))


def values(dtype: torch.dtype, *shape: int) -> torch.Tensor:
    x = torch.randn(*shape, 2, generator=torch.Generator().manual_seed(0)) * 50
    return torch.view_as_complex(x).to(dtype) if dtype.is_complex else x[..., 0].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_equal_bytes_and_only_they_are_equal(dtype: torch.dtype) -> None:
    x = values(dtype, 5, 7)
    assert of(x) == of(x.clone()) == of(x.t().contiguous().t())
    for at in (0, 17, 34):
        y = x.clone()
        raw = y.view(torch.uint8).view(-1)
        raw[at * y.element_size()] ^= 1
        assert of(y) != of(x)
    assert of(x[1:]) == of(x[1:].clone()), "an odd start in memory"
    if dtype != torch.bool:
        y = x.clone()
        y[0], y[1] = x[1], x[0]
        assert of(y) != of(x), "places count"


def test_nan_zero_views_and_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    nan = torch.tensor([1.0, float("nan"), -0.0])
    assert of(nan) == of(nan.clone()) != of(torch.tensor([1.0, float("nan"), 0.0]))
    x = values(torch.complex64, 6)
    assert of(x.conj()) == of(x.conj().resolve_conj()) != of(x)
    assert of(torch.empty(0)) == of(torch.empty(0, 3)) == 0
    assert of(torch.tensor(3.0)) != of(torch.tensor(4.0))
    big = values(torch.float32, 1001)
    whole = of(big)
    monkeypatch.setattr(module, "_PIECE", 64)
    assert of(big) == whole
