"""What a DTensor costs an operation: Espalier, torch's DTensor and plain tensors, in one run.

No network counts. One process plays rank 1 of a world of two in torch's fake process group: its
collectives return at once, so that what is measured is what the Python and C++ around the local
operations cost. (Rank 1, for Espalier has a little less to do on rank 0, whose addend of a sum is
the value itself.) Both libraries get the very same ``DeviceMesh``, the same layouts and the same
values; "plain" are ordinary tensors of the shapes that this rank holds, that is, what one would
compute by hand. So "Espalier / plain" is its whole overhead, and no speed-up of sharding hides in it.
Times are CPU time of this process: it has one thread, which never waits.

Two meshes are shown:

* ``1 rank``: an axis of one. Nothing needs to be moved and no arithmetic is repeated, so the
  ratios are those of dispatch alone.
* ``2 ranks``: tensor parallel (attention by heads, column then row in the MLP), so both libraries
  also decide on, and call, the (fake) collectives of a real step; plain does none.

The work:

* *block*: the forward and backward pass of a pre-norm transformer block, batch 2, 16 tokens, width
  64, 4 heads, MLP of 256; its input needs a gradient, as that of any block but the first does.
  Attention is written out (matmul, softmax, matmul) in all three. *Fused* is the same block with
  ``scaled_dot_product_attention`` as one would write it today. Torch's DTensor cannot differentiate
  that function on the CPU ("no sharding strategy"), so its user has to write attention out, and
  Espalier's fused block is held against that. Gradients are dropped between calls, untimed.
* *add, matmul, view*: the forward call alone, small tensors, recorded by autograd or not. With
  autograd the operands are results of operations, as activations are. ``R @ S(1)`` is a column-parallel
  product, ``S(1) @ S(0)`` a row-parallel one.
* *step*: a whole step of training, of a GPT of 12 blocks so small that its kernels cost next to nothing: what
  the host takes for it, which limits a fast device. A plain loop, DistributedDataParallel, and Espalier at
  stage 0: its engine's step, and *prepared* the plain loop behind ``espalier.prepare``. In a world of one
  process; and of two, where Espalier brings gradients to where they are summed, the plain loop does not, and
  DistributedDataParallel cannot run in the fake group.
* *AdamW*: a step over 30 parameters of a small transformer, as most programs call it and in all three
  forms that torch has. Plain parameters have the local shapes. Both ways: ``espalier.engine.update``, which
  the engine's ``step()`` calls, and ``optimizer.step()`` called directly on DTensor parameters, which runs on
  the local tensors where parameters, gradients and states lie alike. Of the fused form, which takes 6 µs for
  each of these small parameters, the direct call has no bar against plain tensors.

On two ranks with attention written out, the ratio to torch's DTensor swings about 0.25 from run to
run, so there it is shown without a bar.

    python benchmarks/dispatch.py
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import Contender, Report, step
from _common import in_turns as in_turns_by
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.nn.parallel import DistributedDataParallel
from torch.testing._internal.distributed.fake_pg import FakeStore

import espalier
from espalier.engine.update import update
from espalier.mesh.process import finish, start
from espalier.models import build

BATCH, TOKENS, WIDTH, HEADS, HIDDEN = 2, 16, 64, 4, 256
# the parameters that a tensor axis cuts, and the dim
CUTS = {
    "q.weight": 0, "q.bias": 0, "k.weight": 0, "k.bias": 0, "v.weight": 0, "v.bias": 0, "o.weight": 1,
    "up.weight": 0, "up.bias": 0, "down.weight": 1,
}  # fmt: skip

# one thread that waits for nothing: what other programs take of the machine does not count
in_turns = partial(in_turns_by, clock=time.process_time)

Distribute = Callable[[torch.Tensor, DeviceMesh, list[Placement]], torch.Tensor]


class Block(nn.Module):
    """A pre-norm transformer block, written for one device.

    Args:
        share: of the heads and of the hidden features, 1/share are computed (2: what one rank of
            two computes by hand).
        fused: use ``scaled_dot_product_attention``, else attention is written out.
    """

    def __init__(self, share: int = 1, fused: bool = False) -> None:
        super().__init__()
        inner, hidden = WIDTH // share, HIDDEN // share
        self.fused = fused
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.q, self.k, self.v = (nn.Linear(WIDTH, inner) for _ in range(3))
        self.o = nn.Linear(inner, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, hidden), nn.Linear(hidden, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [batch, tokens, width]."""
        x = x + self.o(self.attend(self.norm1(x)))
        return x + self.down(F.gelu(self.up(self.norm2(x))))

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """The heads' outputs, side by side."""
        size = WIDTH // HEADS
        q, k, v = (f(x).view(BATCH, TOKENS, -1, size).transpose(1, 2) for f in (self.q, self.k, self.v))
        if self.fused:
            out = F.scaled_dot_product_attention(q, k, v)
        else:
            out = torch.softmax(q @ k.transpose(-2, -1) * size**-0.5, dim=-1) @ v
        return out.transpose(1, 2).reshape(BATCH, TOKENS, -1)


def main() -> int:
    """Run everything and print the table."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", module="torch")
    report = Report()
    start("cpu")
    training_step(report, 1)
    finish()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    training_step(report, 2)
    names = ("tensor",)
    meshes = [
        DeviceMesh("cpu", [1], mesh_dim_names=names),
        init_device_mesh("cpu", (2,), mesh_dim_names=names),
    ]
    for mesh in meshes:
        block(report, mesh)
    for mesh in meshes:
        single_operations(report, mesh)
    adamw(report, meshes[1])
    status = report.show()
    dist.destroy_process_group()
    return status


# ---- a step of training


def training_step(report: Report, ranks: int) -> None:
    """A GPT of 12 tiny blocks: forward, backward, AdamW."""
    sizes = {"vocab_size": 64, "max_positions": 8, "hidden": 32, "heads": 2, "layers": 12}
    rows = torch.randint(0, 64, (ranks, 9))
    data = {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
    own = {name: x[-1:] for name, x in data.items()}
    nets = [build("gpt2", sizes) for _ in range(4)]
    plan = {"data": ranks, "zero": 0}
    engine = espalier.initialize(nets[2], torch.optim.AdamW(nets[2].parameters()), plan)
    prepared, optimizer = espalier.prepare(nets[3], torch.optim.AdamW(nets[3].parameters()), plan=plan)
    contenders = {
        "plain": Contender(partial(by_hand, nets[0], fused_adamw(nets[0]), own)),
        "Espalier": Contender(lambda: engine.train_step(engine.local_batch(own, size=ranks))),
        "Espalier, prepared": Contender(partial(by_hand, prepared, optimizer, data)),
    }
    peer, bar = "plain", 2.0
    if ranks == 1:
        ddp = DistributedDataParallel(nets[1])
        peer, bar = "DDP", 1.25
        contenders[peer] = Contender(partial(by_hand, ddp, fused_adamw(nets[1]), own))
    times = in_turns(contenders, rounds=100, warmup=10)
    name = f"step of a GPT, {ranks} rank{'s'[: ranks > 1]}"
    report.add(name, times, "Espalier", peer, bar)
    report.add(name, times, "Espalier, prepared", peer, bar)


def by_hand(net: nn.Module, optimizer: torch.optim.Optimizer, data: dict[str, torch.Tensor]) -> None:
    """The loop that everyone writes."""
    net(**data).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def fused_adamw(net: nn.Module) -> torch.optim.AdamW:
    """The optimizer that the engine's becomes."""
    return torch.optim.AdamW(net.parameters(), fused=True)


# ---- a block, forward and backward


def block(report: Report, mesh: DeviceMesh) -> None:
    """Forward and backward of the block, attention written out or by the fused function."""
    n = mesh.size()
    name = f"block, {n} rank{'s' * (n > 1)}"
    x, upstream = torch.randn(BATCH, TOKENS, WIDTH), torch.randn(BATCH, TOKENS, WIDTH)

    def entrant(share: int, fused: bool, distribute: Distribute | None = None) -> Contender:
        own = Block(share, fused)
        if distribute is None:
            return step(own, x.clone(), upstream.clone())
        given, back = (distribute(t, mesh, [Replicate()]) for t in (x, upstream))
        return step(laid_out(own, mesh, distribute), given, back)

    contenders = {
        "plain": entrant(n, False),
        "Espalier": entrant(1, False, here),
        "torch DTensor": entrant(1, False, there),
        "plain, fused": entrant(n, True),
        "Espalier, fused": entrant(1, True, here),
    }
    times = in_turns(contenders, rounds=300, warmup=10)
    report.add(name, times, "Espalier", "plain", 2.0)
    report.add(name, times, "Espalier", "torch DTensor", 0.25 if n == 1 else None)
    report.add(name, times, "Espalier, fused", "plain, fused", 2.0)
    report.add(name, times, "Espalier, fused", "torch DTensor", 0.25)
    report.add(name, times, "torch DTensor", "plain")


def laid_out(block: Block, mesh: DeviceMesh, distribute: Distribute) -> Block:
    """A copy of the block whose parameters lie on the mesh as ``CUTS`` says."""
    copy = Block(fused=block.fused)
    for name, parameter in block.named_parameters():
        placement: Placement = Shard(CUTS[name]) if name in CUTS else Replicate()
        owner, _, own = name.partition(".")
        value = distribute(parameter.detach(), mesh, [placement])
        setattr(copy.get_submodule(owner), own, nn.Parameter(value))
    return copy


def here(x: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """Espalier's DTensor."""
    return espalier.distribute_tensor(x, mesh, placements, src_data_rank=None)


def there(x: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """Torch's DTensor."""
    return torch_distribute(x, mesh, placements, src_data_rank=None)


# ---- single operations


def single_operations(report: Report, mesh: DeviceMesh) -> None:
    """add, matmul and view, forward only, recorded by autograd or not."""
    rows, columns = torch.randn(16, WIDTH), torch.randn(WIDTH, WIDTH)
    pairs: dict[str, tuple[Callable[..., torch.Tensor], list[tuple[torch.Tensor, Placement]]]] = {
        "add S(0) + S(0)": (torch.add, [(rows, Shard(0)), (rows, Shard(0))]),
        "matmul R @ S(1)": (torch.matmul, [(rows, Replicate()), (columns, Shard(1))]),
        "matmul S(1) @ S(0)": (torch.matmul, [(rows, Shard(1)), (columns, Shard(0))]),
        "view of S(0)": (split_columns, [(rows, Shard(0))]),
    }
    n = mesh.size()
    for name, (function, operands) in pairs.items():
        for recorded in (False, True):
            contenders = {}
            for library, distribute in (("plain", local), ("Espalier", here), ("torch DTensor", there)):
                inputs = [ready(distribute(x, mesh, [p]), recorded) for x, p in operands]
                contenders[library] = Contender(partial(function, *inputs))
            times = in_turns(contenders, rounds=60, calls=100, warmup=20)
            work = f"{name}, {n} rank{'s' * (n > 1)}{', autograd' if recorded else ''}"
            report.add(work, times, "Espalier", "torch DTensor", 0.6)
            report.add(work, times, "Espalier", "plain")


def split_columns(x: torch.Tensor) -> torch.Tensor:
    """A view of [rows, 64] as [rows, 4, 16]; a function so that all pay for the same Python."""
    return x.view(-1, HEADS, WIDTH // HEADS)


def ready(x: torch.Tensor, recorded: bool) -> torch.Tensor:
    """An operand; if autograd is to record, the result of an operation on a leaf."""
    return x.requires_grad_() * 1.0 if recorded else x


def local(x: torch.Tensor, mesh: DeviceMesh, placements: list[Placement]) -> torch.Tensor:
    """What this rank holds of ``x``, plain."""
    whole = there(x, mesh, placements)
    assert isinstance(whole, TorchDTensor)
    return whole.to_local().clone()


# ---- the optimizer


def adamw(report: Report, mesh: DeviceMesh) -> None:
    """AdamW over 30 parameters, half of them cut in two."""
    forms: dict[str, dict[str, bool]] = {
        "by default": {},
        "for-loop": {"foreach": False},
        "foreach": {"foreach": True},
        "fused": {"fused": True},
    }
    for name, options in forms.items():
        contenders = {
            "plain": Contender(optimizer(mesh, local, options).step),
            "Espalier engine": Contender(partial(update, optimizer(mesh, here, options))),
            "Espalier direct": Contender(optimizer(mesh, here, options).step),
            "torch DTensor": Contender(optimizer(mesh, there, options).step),
        }
        times = in_turns(contenders, rounds=60, calls=2)
        report.add(f"AdamW {name}", times, "Espalier engine", "plain", 1.3)
        report.add(f"AdamW {name}", times, "Espalier direct", "torch DTensor", 1.0)
        report.add(f"AdamW {name}", times, "Espalier direct", "plain", None if name == "fused" else 1.3)
        report.add(f"AdamW {name}", times, "torch DTensor", "plain")


def optimizer(mesh: DeviceMesh, distribute: Distribute, options: dict[str, bool]) -> torch.optim.AdamW:
    """AdamW over the matrices and vectors of three layers of a small transformer, with gradients."""
    shapes: list[tuple[tuple[int, ...], Placement]] = [
        ((WIDTH,), Replicate()),
        ((WIDTH,), Replicate()),
        ((3 * WIDTH, WIDTH), Shard(0)),
        ((3 * WIDTH,), Shard(0)),
        ((WIDTH, WIDTH), Shard(1)),
        ((WIDTH,), Replicate()),
        ((HIDDEN, WIDTH), Shard(0)),
        ((HIDDEN,), Shard(0)),
        ((WIDTH, HIDDEN), Shard(1)),
        ((WIDTH,), Replicate()),
    ]
    parameters = []
    for shape, placement in shapes * 3:
        value, grad = (distribute(torch.randn(shape), mesh, [placement]) for _ in range(2))
        parameters.append(nn.Parameter(value))
        parameters[-1].grad = grad
    return torch.optim.AdamW(parameters, **options)  # type: ignore[arg-type]


if __name__ == "__main__":
    sys.exit(main())
