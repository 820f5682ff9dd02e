"""Compile kernels of our own for devices that need not be there."""

from __future__ import annotations

from typing import Any

import torch

TYPES = {torch.bfloat16: "*bf16", torch.float32: "*fp32", torch.bool: "*i1"}
VECTOR = 16  # bytes


def compiled(name: str, args: tuple[Any, ...], constants: dict[str, Any], unit: int) -> Any:
    """A kernel, compiled for a CUDA device."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from espalier.tensor import triton_kernels

    kernel = getattr(triton_kernels, name)
    options = {name: constants[name] for name in ("num_stages", "num_warps") if name in constants}
    types = {}
    for key, value in zip(kernel.arg_names, args, strict=False):
        if isinstance(value, torch.Tensor):
            types[key] = TYPES[value.dtype]
        else:
            wide = "i64" if abs(value) >= 1 << 31 else "i32"
            types[key] = "fp32" if isinstance(value, float) else wide
    # Triton takes ones as constants, as it does where it is asked to launch
    ones = {
        key: 1
        for key, value in zip(kernel.arg_names, args, strict=False)
        if type(value) is int and value == 1 and key not in kernel.do_not_specialize
    }
    fixed = {key: value for key, value in (constants | ones).items() if key in kernel.arg_names}
    signature = {key: "constexpr" if key in fixed else types[key] for key in kernel.arg_names}
    by_place = {(i,): fixed[key] for i, key in enumerate(kernel.arg_names) if key in fixed}
    # what begins at whole vectors, and steps by them, is read by them
    whole = {
        (i,): [["tt.divisibility", VECTOR]]
        for i, (key, value) in enumerate(zip(kernel.arg_names, args, strict=False))
        if key not in fixed
        and key not in kernel.do_not_specialize
        and (isinstance(value, torch.Tensor) or (type(value) is int and value % VECTOR == 0))
    }
    source = ASTSource(fn=kernel, signature=signature, constexprs=by_place, attrs=whole)
    return triton.compile(source, target=GPUTarget("cuda", unit, 32), options=options)
