"""One transformer block cut over two ranks: by hand, by Espalier, by torch, by megatron-core.

All cut the same weights alike: attention by heads, the MLP's first matrix by columns, its second by rows.
What stands for *sequence* is Megatron's sequence parallelism: the block's input and output are cut along the
sequence, and so are norms and sums between.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import Contender
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import espalier

RANKS = 2
BATCH, TOKENS = 8, 128
TOLERANCE = 1e-5
COLUMN, ROW = ("attention.q", "attention.k", "attention.v", "up"), ("attention.o", "down")


class Attention(nn.Module):
    """Self-attention, written for one device; of the heads, 1/share."""

    def __init__(self, width: int, share: int, causal: bool) -> None:
        super().__init__()
        inner, self.head, self.causal = width // share, width // 8, causal
        self.q, self.k, self.v = (nn.Linear(width, inner) for _ in range(3))
        self.o = nn.Linear(inner, width)

    def attend(self, *qkv: torch.Tensor) -> torch.Tensor:
        """The heads' outputs, side by side."""
        q, k, v = (x.view(BATCH, TOKENS, -1, self.head).transpose(1, 2) for x in qkv)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return y.transpose(1, 2).reshape(BATCH, TOKENS, -1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width]."""
        return self.o(self.attend(self.q(x), self.k(x), self.v(x)))


class Block(nn.Module):
    """A pre-norm transformer block of 8 heads, written for one device."""

    def __init__(self, width: int, share: int = 1, *, causal: bool = False) -> None:
        super().__init__()
        self.width, self.causal = width, causal
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attention = Attention(width, share, causal)
        self.up, self.down = nn.Linear(width, 4 * width // share), nn.Linear(4 * width // share, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width]."""
        x = x + self.attention(self.norm1(x))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


def own_part(name: str, whole: torch.Tensor, rank: int, ranks: int = RANKS) -> torch.Tensor:
    """What a rank holds of a parameter."""
    owner, _, own = name.rpartition(".")
    if owner in COLUMN:
        return whole.chunk(ranks, 0)[rank]
    return whole.chunk(ranks, 1)[rank] if owner in ROW and own == "weight" else whole


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


def _gathered(x: torch.Tensor) -> torch.Tensor:
    parts = [torch.empty_like(x) for _ in range(RANKS)]
    dist.all_gather(parts, x.contiguous())
    return torch.cat(parts, 1)


def _summed(x: torch.Tensor) -> torch.Tensor:
    """This rank's part of the sum, along dim 1. gloo's own reduce-scatter would send twice as much."""
    rows = torch.stack(x.chunk(RANKS, 1))
    got = torch.empty_like(rows)
    dist.all_to_all_single(got, rows)
    return got.sum(0)


enter, leave = _Enter.apply, _Leave.apply


class _Columns(torch.autograd.Function):
    """Column layers that share an input cut along the sequence, as megatron-core writes its one.

    Forward, the sequence is gathered; kept is the shard, and backward it is gathered again while the input's
    gradient is computed.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, *layers: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
        weights, biases = layers[::2], layers[1::2]
        ctx.biased = [b is not None for b in biases]
        ctx.save_for_backward(x, *weights)
        whole = _gathered(x)
        return tuple(F.linear(whole, w, b) for w, b in zip(weights, biases, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, *weights = ctx.saved_tensors
        x, parts = x.contiguous(), [torch.empty_like(x) for _ in range(RANKS)]
        work = dist.all_gather(parts, x, async_op=True)
        given = grads[0] @ weights[0]
        for grad, weight in zip(grads[1:], weights[1:], strict=True):
            given += grad @ weight
        work.wait()
        whole = torch.cat(parts, 1).flatten(0, 1)
        found: list[torch.Tensor | None] = [_summed(given)]
        for grad, biased in zip(grads, ctx.biased, strict=True):
            rows = grad.flatten(0, 1)
            found += [rows.T @ whole, rows.sum(0) if biased else None]
        return tuple(found)


class _Scatter(torch.autograd.Function):
    """After row layers: sums of shards; backward, the sequence together."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return _summed(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return _gathered(grad)


scatter = _Scatter.apply


def columns_of(x: torch.Tensor, *layers: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """Column layers, weight and bias of each, of an input that is cut along the sequence."""
    return _Columns.apply(x, *layers)


class Megatron(Block):
    """The same block for one rank of two: local sizes, f and g, biases of row layers added after g."""

    def __init__(self, whole: Block, rank: int, *, sequence: bool = False) -> None:
        super().__init__(whole.width, share=RANKS, causal=whole.causal)
        self.sequence = sequence
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                parameter.copy_(own_part(name, whole.get_parameter(name), rank))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width], or this rank's part along the sequence."""
        a = self.attention
        inside = a.attend(*self._entered(self.norm1(x), a.q, a.k, a.v))
        x = x + self._left(a.o, inside)
        (inside,) = self._entered(self.norm2(x), self.up)
        return x + self._left(self.down, F.gelu(inside))

    def _entered(self, x: torch.Tensor, *columns: nn.Linear) -> tuple[torch.Tensor, ...]:
        if self.sequence:
            return columns_of(x, *(p for layer in columns for p in (layer.weight, layer.bias)))
        x = enter(x)
        return tuple(layer(x) for layer in columns)

    def _left(self, row: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        together = scatter if self.sequence else leave
        out: torch.Tensor = together(F.linear(x, row.weight)) + row.bias
        return out

    def met(self) -> list[nn.Parameter]:
        """What meets shards under sequence parallelism."""
        return [self.attention.o.bias, self.down.bias, *self.norm1.parameters(), *self.norm2.parameters()]

    def finish(self) -> None:
        """Under sequence parallelism: what is left to do after a backward pass."""
        sum_gradients(self.met())


def sum_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Sum gradients over the ranks, in one message."""
    grads = [p.grad for p in parameters if p.grad is not None]
    flat = torch.cat([g.view(-1) for g in grads])
    dist.all_reduce(flat)
    parts = flat.split([g.numel() for g in grads])
    torch._foreach_copy_(grads, [x.view_as(g) for x, g in zip(parts, grads, strict=True)])


class MegatronCore(Block):
    """The block of megatron-core's column and row linears, which know f and g."""

    def __init__(self, whole: Block, rank: int) -> None:
        from megatron.core import ModelParallelConfig
        from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

        super().__init__(whole.width, share=RANKS, causal=whole.causal)
        self.config = config = ModelParallelConfig(
            tensor_model_parallel_size=RANKS, use_cpu_initialization=True, params_dtype=torch.float32
        )

        def column(n: int, m: int, bias: bool = True) -> nn.Module:
            return _First(
                ColumnParallelLinear(
                    n, m, config=config, init_method=nn.init.zeros_, bias=bias, gather_output=False
                )
            )

        self.column = column

        def row(n: int, m: int) -> nn.Module:
            return _First(
                RowParallelLinear(
                    n,
                    m,
                    config=config,
                    init_method=nn.init.zeros_,
                    bias=True,
                    input_is_parallel=True,
                    skip_bias_add=False,
                )
            )

        width, attention = whole.width, self.attention
        for name in "qkv":
            setattr(attention, name, column(width, width))
        attention.o, self.up, self.down = (
            row(width, width),
            column(width, 4 * width),
            row(4 * width, width),
        )
        with torch.no_grad():
            for name, parameter in self.named_parameters():
                name = name.replace(".inner.", ".")
                parameter.copy_(own_part(name, whole.get_parameter(name), rank))


class _First(nn.Module):
    """A layer that gives its output, and not a bias beside it."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.inner(x)[0]
        return out


# ---- by libraries


def by_espalier(whole: Block, *, sequence: bool = False) -> espalier.Engine:
    """The engine of the block: while it is held, gradients are summed within the backward pass."""
    block = Block(whole.width)
    block.load_state_dict(whole.state_dict())
    layouts = dict.fromkeys(COLUMN, "column") | dict.fromkeys(ROW, "row")
    plan = {"tensor": RANKS, "sequence_parallel": sequence}
    return espalier.initialize(block, plan=plan, layouts=layouts)


def by_torch(whole: Block, *, prepared: bool = False, sequence: bool = False) -> nn.Module:
    """The block given to ``parallelize_module``."""
    block = Block(whole.width)
    block.load_state_dict(whole.state_dict())
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tensor",))
    return parallelize_module(block, mesh, styles(prepared=prepared, sequence=sequence))


def styles(*, prepared: bool = False, sequence: bool = False) -> dict[str, ParallelStyle]:
    """torch's table for a block."""
    cut, there = Shard(1), Replicate()
    if sequence:
        found: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in COLUMN[:3]}
        found |= {"norm1": SequenceParallel(), "norm2": SequenceParallel()}
        found |= {name: RowwiseParallel(output_layouts=cut) for name in ROW}
        found["up"] = ColwiseParallel(input_layouts=cut)
        found["attention"] = PrepareModuleInput(input_layouts=(cut,), desired_input_layouts=(there,))
        return found
    found = {name: ColwiseParallel() for name in COLUMN}
    found |= {name: RowwiseParallel() for name in ROW}
    if prepared:
        found["attention"] = PrepareModuleInput(input_layouts=(there,), desired_input_layouts=(there,))
    return found


# ---- comparing


def local(x: torch.Tensor | None) -> torch.Tensor:
    """This rank's part of any kind of tensor, without its history."""
    assert x is not None
    with torch.no_grad():
        return (x.to_local() if isinstance(x, espalier.DTensor | TorchDTensor) else x).detach()


class Entrant:
    """A cut block, with its input and the gradient of its output.

    Args:
        cut: input and output are this rank's parts along the sequence.
        finish: what is left to do after a backward pass.
        ready: waits until all ranks are.
    """

    def __init__(
        self,
        module: nn.Module | espalier.Engine,
        x: torch.Tensor,
        upstream: torch.Tensor,
        *,
        cut: bool = False,
        finish: Callable[[], None] = lambda: None,
        ready: Callable[[], object] = dist.barrier,
    ) -> None:
        self.held = module
        self.module = module.module if isinstance(module, espalier.Engine) else module
        self.x, self.upstream = x.requires_grad_(), upstream
        self.cut, self.finish, self.ready = cut, finish, ready
        self.out: torch.Tensor | None = None

    def contender(self) -> Contender:
        """Forward and backward, beginning together."""

        def run() -> None:
            self.out = self.module(self.x)
            assert self.out is not None
            self.out.backward(self.upstream)
            self.finish()

        def before() -> None:
            self.x.grad = self.out = None
            self.module.zero_grad()
            self.ready()

        return Contender(run, before)

    def check(
        self,
        name: str,
        whole: Block,
        x: torch.Tensor,
        upstream: torch.Tensor,
        rank: int,
        ranks: int = RANKS,
    ) -> None:
        """Compare one step with that of the whole block on one process."""
        given = x.clone().requires_grad_()
        whole.zero_grad()
        expected = whole(given)
        expected.backward(upstream)
        contender = self.contender()
        contender.before()
        contender.run()

        def part(whole: torch.Tensor | None) -> torch.Tensor:
            assert whole is not None
            return whole.chunk(ranks, 1)[rank] if self.cut else whole

        pairs = {
            "the output": (self.out, part(expected)),
            "the input's gradient": (self.x.grad, part(given.grad)),
        }
        for key, parameter in self.module.named_parameters():
            key = key.replace(".inner.", ".")
            grad = whole.get_parameter(key).grad
            assert grad is not None
            mine = parameter.grad
            if isinstance(mine, TorchDTensor) and any(p.is_partial() for p in mine.placements):
                mine = mine.redistribute(placements=[Replicate()])
            pairs[f"the gradient of {key}"] = (mine, own_part(key, grad, rank, ranks))
        for what, (mine, other) in pairs.items():
            # the gradient of k.bias is zero but for rounding, hence the floor
            size = local(other).abs().max().clamp(min=1.0)
            off = float((local(mine) - local(other)).abs().max() / size)
            if off > TOLERANCE:
                raise ValueError(
                    f"{name}: {what} is off by {off:.1e} of its largest value; at most {TOLERANCE:g}"
                )
