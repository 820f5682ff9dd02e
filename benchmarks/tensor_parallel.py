"""Tensor parallelism over two gloo ranks: Espalier, a block written by hand, ``parallelize_module``.

The work is the forward and backward pass of one pre-norm transformer block: width 256, 8 heads, MLP
of 1,024, batch 8, 128 tokens, float32, fused attention, one thread a rank. Its input needs a
gradient, as that of any block but the first does. All cut the same weights alike: attention by
heads, the MLP's first matrix by columns, its second by rows.

* *Megatron by hand*: two autograd functions, f (identity forward, all-reduce backward) and g (the
  reverse), around linear layers of local size, as in Shoeybi et al. 2019. Plain tensors, four
  all-reduces, in place; no library between the code and c10d. This is what Espalier is held to.
* *Espalier*: the plain block, ``espalier.initialize`` with ``layouts=``; nothing in the block is changed.
  It sends the same four all-reduces.
* *parallelize_module*: torch's ``ColwiseParallel`` and ``RowwiseParallel``, as its users write them: local
  tensors between the layers (``use_local_output``, the default), and a block that views its heads by
  ``-1``. Backward, q, k and v each reduce their input's gradient: six all-reduces.
* *the same, input prepared*: with torch's ``PrepareModuleInput`` around attention besides, which is the
  remedy for that (four all-reduces) where attention is a module of its own.

Before anything is timed, outputs, the input's gradient and all parameters' gradients of all
are compared with those of the same block on one process.

A timing begins when both ranks are ready and is that of the slower rank.

    python benchmarks/tensor_parallel.py
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import Report, in_turns, slowest_rank, step
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    parallelize_module,
)

import espalier
from espalier.mesh.launch import LaunchError, finish, launch, start

RANKS, ROUNDS = 2, 60
BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 8, 128, 256, 8, 1024
TOLERANCE = 1e-5
MISSED = 3  # the exit status of a rank that saw a bar missed
COLUMN, ROW = ("attention.q", "attention.k", "attention.v", "up"), ("attention.o", "down")


class Attention(nn.Module):
    """Self-attention, written for one device; of the heads, 1/share."""

    def __init__(self, share: int) -> None:
        super().__init__()
        inner = WIDTH // share
        self.q, self.k, self.v = (nn.Linear(WIDTH, inner) for _ in range(3))
        self.o = nn.Linear(inner, WIDTH)

    def heads(self, x: torch.Tensor) -> torch.Tensor:
        """The heads' outputs, side by side."""
        split = BATCH, TOKENS, -1, WIDTH // HEADS
        q, k, v = (f(x).view(split).transpose(1, 2) for f in (self.q, self.k, self.v))
        return F.scaled_dot_product_attention(q, k, v).transpose(1, 2).reshape(BATCH, TOKENS, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width]."""
        return self.o(self.heads(x))


class Block(nn.Module):
    """A pre-norm transformer block, written for one device."""

    def __init__(self, share: int = 1) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.attention = Attention(share)
        self.up, self.down = nn.Linear(WIDTH, HIDDEN // share), nn.Linear(HIDDEN // share, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


# ---- by hand


class _Enter(torch.autograd.Function):
    """Megatron's f: what follows differs from rank to rank, so its gradients must be added."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        grad = grad.contiguous()
        dist.all_reduce(grad)
        return grad


class _Leave(torch.autograd.Function):
    """Megatron's g: the ranks hold addends."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        dist.all_reduce(x)
        return x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad


class Megatron(Block):
    """The same block for one rank of two: local sizes, f and g, biases of row layers added after g."""

    def __init__(self, whole: Block, rank: int) -> None:
        super().__init__(share=RANKS)
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(own_part(name, whole.get_parameter(name), rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width], equal on both ranks."""
        inside = self.attention.heads(_Enter.apply(self.norm1(x)))
        x = x + _reduced(self.attention.o, inside)
        inside = F.gelu(self.up(_Enter.apply(self.norm2(x))))
        return x + _reduced(self.down, inside)


def _reduced(row: nn.Linear, x: torch.Tensor) -> torch.Tensor:
    return _Leave.apply(F.linear(x, row.weight)) + row.bias


def own_part(name: str, whole: torch.Tensor, rank: int, ranks: int = RANKS) -> torch.Tensor:
    """What a rank holds of a parameter."""
    owner, _, own = name.rpartition(".")
    if owner in COLUMN:
        return whole.chunk(ranks, 0)[rank]
    return whole.chunk(ranks, 1)[rank] if owner in ROW and own == "weight" else whole


# ---- by libraries


def by_espalier(whole: Block) -> tuple[nn.Module, espalier.Mesh]:
    """The block laid out by ``espalier.initialize``, and the mesh on which it lies."""
    block = Block()
    block.load_state_dict(whole.state_dict())
    layouts = dict.fromkeys(COLUMN, "column") | dict.fromkeys(ROW, "row")
    engine = espalier.initialize(block, plan={"tensor": RANKS}, layouts=layouts)
    return engine.module, engine.mesh


def by_torch(whole: Block, *, prepared: bool) -> nn.Module:
    """The block given to ``parallelize_module``."""
    block = Block()
    block.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    styles: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMN}
    styles |= {name: RowwiseParallel() for name in ROW}
    if prepared:
        there = (Replicate(),)
        styles["attention"] = PrepareModuleInput(input_layouts=there, desired_input_layouts=there)
    return parallelize_module(block, mesh, styles)


# ---- comparing


def local(x: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of any kind of tensor, without its history."""
    assert x is not None
    with torch.no_grad():
        return (x.to_local() if isinstance(x, espalier.DTensor | TorchDTensor) else x).detach()


def check(
    name: str,
    module: nn.Module,
    x: torch.Tensor,
    upstream: torch.Tensor,
    whole: Block,
    rank: int,
    ranks: int = RANKS,
) -> None:
    """Compare one step with that of the whole block on one process."""
    given = local(x).clone().requires_grad_()
    expected = whole(given)
    whole.zero_grad()
    expected.backward(local(upstream))
    x.requires_grad_()
    out: torch.Tensor = module(x)
    out.backward(upstream)
    pairs = {"the output": (out, expected), "the input's gradient": (x.grad, given.grad)}
    for key, parameter in module.named_parameters():
        grad = whole.get_parameter(key).grad
        assert grad is not None
        pairs[f"the gradient of {key}"] = (parameter.grad, own_part(key, grad, rank, ranks))
    for what, (mine, other) in pairs.items():
        # the gradient of k.bias is zero but for rounding, hence the floor
        size = local(other).abs().max().clamp(min=1.0)
        off = float((local(mine) - local(other)).abs().max() / size)
        if off > TOLERANCE:
            raise ValueError(
                f"{name}: {what} is off by {off:.1e} of its largest value; at most {TOLERANCE:g}"
            )


def compare() -> int:
    """What each rank runs; rank 0 prints."""
    process = start("cpu")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    whole, x, upstream = Block(), torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)
    laid_out, mesh = by_espalier(whole)
    there = [Replicate()] * mesh.ndim
    entrants = {
        "Megatron by hand": (Megatron(whole, process.rank), x.clone(), upstream.clone()),
        "Espalier": (
            laid_out,
            espalier.distribute_tensor(x, mesh, there),
            espalier.distribute_tensor(upstream, mesh, there),
        ),
        "parallelize_module": (by_torch(whole, prepared=False), x.clone(), upstream.clone()),
        "the same, input prepared": (by_torch(whole, prepared=True), x.clone(), upstream.clone()),
    }
    for name, entrant in entrants.items():
        check(name, *entrant, whole, process.rank)
    times = in_turns(
        {name: step(*entrant, ready=dist.barrier) for name, entrant in entrants.items()},
        rounds=ROUNDS,
        warmup=3,
    )
    times = slowest_rank(times)
    status = 0
    if process.rank == 0:
        report, work = Report(), f"block of width {WIDTH}, {RANKS} ranks"
        report.add(work, times, "Espalier", "Megatron by hand", 1.15)
        report.add(work, times, "Espalier", "parallelize_module", 1.0)
        report.add(work, times, "Espalier", "the same, input prepared", 1.0)
        report.add(work, times, "parallelize_module", "Megatron by hand")
        report.add(work, times, "the same, input prepared", "Megatron by hand")
        print(f"outputs and gradients agree with one process to {TOLERANCE:g} of the largest value\n")
        status = MISSED if report.show() else 0
    finish()
    return status


def main() -> int:
    """Start the ranks; the exit status is rank 0's."""
    try:
        launch([str(Path(__file__).resolve()), "--rank"], RANKS)
    except LaunchError as error:
        if error.exit_code != MISSED:
            print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(compare() if "--rank" in sys.argv else main())
