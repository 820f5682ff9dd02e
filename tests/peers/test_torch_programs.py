"""Programs for torch.distributed.tensor run after a change of their imports, to the same results."""

from __future__ import annotations

from typing import Any

import pytest
import torch

TORCH = """
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import (
    DTensor, Partial, Replicate, Shard, distribute_module, distribute_tensor, ones, randn, zeros,
)
from torch.distributed.tensor.experimental import implicit_replication, local_map
from torch.distributed.tensor.parallel import (
    ColwiseParallel, ParallelStyle, PrepareModuleInput, PrepareModuleInputOutput, PrepareModuleOutput,
    RowwiseParallel, SequenceParallel, loss_parallel, parallelize_module,
)
"""
NAMES = """
    init_device_mesh DTensor Partial Replicate Shard distribute_module distribute_tensor ones randn zeros
    implicit_replication local_map ColwiseParallel ParallelStyle PrepareModuleInput
    PrepareModuleInputOutput PrepareModuleOutput RowwiseParallel SequenceParallel loss_parallel
    parallelize_module
"""
OURS = f"from espalier import {', '.join(NAMES.split())}\n"

COMMON = """
import torch, torch.distributed as dist, torch.nn as nn, torch.nn.functional as F
torch.manual_seed(0)
torch.set_default_dtype(torch.float64)

def whole(x):
    return x.full_tensor() if isinstance(x, DTensor) else x
"""

# a transformer with tensor and sequence parallelism, clipped, stepped and saved
TRANSFORMER = """
class Attention(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads, self.width = heads, dim // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(dim, dim, bias=False) for _ in range(4))

    def forward(self, x):
        b, t, _ = x.shape
        q, k, v = (w(x).view(b, t, -1, self.width).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        scores = (q @ k.transpose(2, 3)) / self.width**0.5
        out = F.softmax(scores, dim=-1) @ v
        return self.wo(out.transpose(1, 2).contiguous().view(b, t, -1))

class FeedForward(nn.Module):
    def __init__(self, dim, inner):
        super().__init__()
        self.w1, self.w2, self.w3 = nn.Linear(dim, inner), nn.Linear(inner, dim), nn.Linear(dim, inner)

    def forward(self, x):
        return self.w2(F.silu(self.w1(x)) * self.w3(x))

class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.attention_norm, self.ffn_norm = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attention, self.feed_forward = Attention(dim, heads), FeedForward(dim, 2 * dim)

    def forward(self, x):
        x = x + self.attention(self.attention_norm(x))
        return x + self.feed_forward(self.ffn_norm(x))

class Transformer(nn.Module):
    def __init__(self, vocab=16, dim=8, heads=4, length=8):
        super().__init__()
        self.tok_embeddings = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(2)])
        self.norm, self.output = nn.LayerNorm(dim), nn.Linear(dim, vocab, bias=False)

    def forward(self, tokens):
        x = self.tok_embeddings(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.output(self.norm(x))

mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("tp",))
model = Transformer()
model = parallelize_module(model, mesh, {
    "tok_embeddings": RowwiseParallel(input_layouts=Replicate(), output_layouts=Shard(1)),
    "norm": SequenceParallel(),
    "output": ColwiseParallel(input_layouts=Shard(1), output_layouts=Shard(-1), use_local_output=False),
})
for layer in model.layers:
    attention = layer.attention
    attention.heads //= mesh.size()
    parallelize_module(layer, mesh, {
        "attention_norm": SequenceParallel(),
        "attention": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "attention.w[qkv]": ColwiseParallel(),
        "attention.wo": RowwiseParallel(output_layouts=Shard(1)),
        "ffn_norm": SequenceParallel(),
        "feed_forward": PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),)),
        "feed_forward.w1": ColwiseParallel(),
        "feed_forward.w2": RowwiseParallel(output_layouts=Shard(1)),
        "feed_forward.w3": ColwiseParallel(),
    })

optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=FOREACH)
losses, norms = [], []
generator = torch.Generator().manual_seed(3)
for step in range(3):
    tokens = torch.randint(16, (2, 9), generator=generator)
    optimizer.zero_grad()
    logits = model(tokens[:, :-1])
    assert isinstance(logits, DTensor) and logits.placements == (Shard(2),)
    with loss_parallel():
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        loss.backward()
    norms.append(whole(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)).item())
    optimizer.step()
    losses.append(whole(loss).item())

# saved by hand: names, and each parameter whole
state = {name: whole(p).detach().clone() for name, p in model.state_dict().items()}
assert all(isinstance(p, DTensor) for p in model.parameters())
result = {"losses": torch.tensor(losses), "norms": torch.tensor(norms), **state}
"""

# tensor parallelism inside, data parallelism by hand outside
TWO_AXES = """
mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
dp, tp = mesh["dp"], mesh["tp"]
assert mesh.ndim == 2 and mesh.shape == (2, 2) and tp.size() == 2 and mesh.mesh_dim_names == ("dp", "tp")

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.net1, self.relu, self.net2 = nn.Linear(6, 12), nn.ReLU(), nn.Linear(12, 5)

    def forward(self, x):
        return self.net2(self.relu(self.net1(x)))

model = Net()
parallelize_module(model, tp, {"net1": ColwiseParallel(), "net2": RowwiseParallel()})
optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
generator = torch.Generator().manual_seed(1)
losses = []
for step in range(3):
    x, y = torch.randn(8, 6, generator=generator), torch.randn(8, 5, generator=generator)
    rows = torch.arange(8).chunk(dp.size())[dp.get_local_rank()]
    loss = F.mse_loss(model(x[rows]), y[rows])
    optimizer.zero_grad()
    loss.backward()
    for p in model.parameters():
        dist.all_reduce(p.grad._local_tensor, group=dp.get_group())
        p.grad._local_tensor.div_(dp.size())
    optimizer.step()
    total = loss.detach().clone()
    dist.all_reduce(total, group=mesh.get_group("dp"))
    losses.append(total.item() / dp.size())
for p in model.parameters():
    assert p.device_mesh == tp and p.shape == p.full_tensor().shape and p._spec.mesh == tp
result = {"losses": torch.tensor(losses), **{n: whole(p).detach() for n, p in model.named_parameters()}}
"""

# distribute_module, local_map, hand-made layouts, a style of its own
BY_HAND = """
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
rank = dist.get_rank()

def shard_params(name, module, mesh):
    if isinstance(module, nn.Linear):
        for key, p in list(module.named_parameters(recurse=False)):
            module.register_parameter(key, nn.Parameter(distribute_tensor(p, mesh, [Shard(0)])))

def take(module, inputs, mesh):
    return DTensor.from_local(inputs[0], mesh, [Replicate()], run_check=True)

def give(module, outputs, mesh):
    return outputs.redistribute(placements=[Replicate()]).full_tensor()

model = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4))
model = distribute_module(model, mesh, partition_fn=shard_params, input_fn=take, output_fn=give)
x = torch.randn(3, 6, generator=torch.Generator().manual_seed(2))
out = model(x)
out.square().sum().backward()
result = {"out": out.detach(), **{n: whole(p.grad) for n, p in model.named_parameters()}}

# products of local parts, of which the ranks hold addends
w = distribute_tensor(torch.arange(48.0).view(6, 8), mesh, [Shard(1)])
v = distribute_tensor(torch.arange(40.0).view(8, 5), mesh, [Shard(0)])
product = local_map(
    lambda a, b: a @ b, out_placements=[Partial()], in_placements=([Shard(1)], [Shard(0)]), device_mesh=mesh
)(w, v)
assert product.placements == (Partial(),)
result["product"] = product.full_tensor()
result["scattered"] = product.redistribute(mesh, [Shard(0)]).to_local().sum(0)
dist.all_reduce(result["scattered"])

# factories and pointwise functions
cut = {"device_mesh": mesh, "placements": [Shard(1)]}
a = zeros(4, 8, **cut) + 3 * ones((4, 8), **cut)
with implicit_replication():
    a = a * torch.arange(8.0)
assert a.placements == (Shard(1),) and a.size() == (4, 8) and a.stride() == (8, 1)
result["a"] = a.full_tensor()
result["sum"] = torch.stack([whole(a.sum()), whole(a.mean()), whole(a.max())])

# uneven parts, with the global shape said
mine = torch.arange(7.0).chunk(mesh.size())
part = mine[rank] if rank < len(mine) else torch.empty(0)
b = DTensor.from_local(part, mesh, [Shard(0)], run_check=False, shape=torch.Size([7]), stride=(1,))
result["b"] = b.full_tensor()

class Scaled(ParallelStyle):
    def __init__(self, factor):
        self.factor = factor

    def _apply(self, module, device_mesh):
        module.register_forward_hook(lambda m, args, out: out * self.factor)
        return module

linear = nn.Linear(4, 4)
parallelize_module(linear, mesh, Scaled(2.5))
result["scaled"] = linear(torch.ones(4)).detach()
both = PrepareModuleInputOutput(
    input_layouts=(Shard(0),), desired_input_layouts=(Replicate(),), use_local_input=True,
    output_layouts=Replicate(), desired_output_layouts=Shard(0), use_local_output=False,
)
prepared = parallelize_module(nn.Identity(), mesh, both)(torch.full((2, 3), float(rank)))
assert prepared.placements == (Shard(0),)
result["prepared"] = prepared.full_tensor()
"""

# the meta device first, values later
DEFERRED = """
mesh = init_device_mesh("cpu", (dist.get_world_size(),))
with torch.device("meta"):
    model = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4))
parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
assert all(p.is_meta for p in model.parameters())
model.to_empty(device="cpu")
with torch.no_grad():
    for i, p in enumerate(model.parameters()):
        p.fill_(0.1 * (i + 1))
x = torch.linspace(0, 1, 12).view(3, 4)
loss = model(x).square().mean()
loss.backward()
half = {name: (torch.full(p.shape, 0.5), mesh, p.placements) for name, p in model.named_parameters()}
loaded = {name: distribute_tensor(*given) for name, given in half.items()}
result = {"loss": loss.detach(), **{n: whole(p.grad) for n, p in model.named_parameters()}}
model.load_state_dict(loaded)
result["after"] = model(x).detach()
"""

PROGRAMS = {"transformer": TRANSFORMER, "two axes": TWO_AXES, "by hand": BY_HAND, "deferred": DEFERRED}


def compared(rank: int, world: int, name: str) -> None:
    found = []
    for imports in (TORCH, OURS):
        space: dict[str, Any] = {"FOREACH": False if name == "transformer" else None}
        dtype = torch.get_default_dtype()
        try:
            exec(compile(COMMON + imports + PROGRAMS[name], f"<{name}>", "exec"), space)
        finally:
            torch.set_default_dtype(dtype)
        found.append(space["result"])
    theirs, ours = found
    assert theirs.keys() == ours.keys()
    for key, value in theirs.items():
        assert type(ours[key]) is torch.Tensor
        torch.testing.assert_close(ours[key], value.detach(), msg=lambda m, key=key: f"{key}: {m}")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.world(4)
def test_a_program_for_torch_runs_after_changing_the_import(ranks: Any, name: str) -> None:
    ranks(4, compared, name)
