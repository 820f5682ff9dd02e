"""Tensor-parallel styles: equal to one process, forward and gradients, with the traffic of Megatron-LM."""

from __future__ import annotations

import copy
import warnings
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import espalier
from espalier import (
    ColwiseParallel,
    DTensor,
    Mesh,
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    PrepareModuleOutput,
    Replicate,
    RowwiseParallel,
    SequenceParallel,
    Shard,
    distribute_module,
    distribute_tensor,
    layout_of,
    loss_parallel,
    parallelize_module,
)

F64 = torch.float64
R = Replicate()
S = Shard


def seeded(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(sum(shape)))


class Attention(nn.Module):
    """Attention that works on local heads, plain, as programs for torch write it."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.width = hidden // heads
        self.wq, self.wk, self.wv, self.wo = (nn.Linear(hidden, hidden, bias=i == 3) for i in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, _ = x.shape
        q, k, v = (
            w(x).view(batch, length, -1, self.width).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(out.transpose(1, 2).reshape(batch, length, -1))


class MLP(nn.Module):
    def __init__(self, hidden: int, inner: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(hidden, inner), nn.Linear(inner, hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(hidden), nn.RMSNorm(hidden)
        self.attention, self.mlp = Attention(hidden, heads), MLP(hidden, 2 * hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Model(nn.Module):
    def __init__(self, vocab: int = 12, hidden: int = 8, heads: int = 4, layers: int = 2) -> None:
        super().__init__()
        torch.manual_seed(5)
        self.embed = nn.Embedding(vocab, hidden)
        self.blocks = nn.ModuleList(Block(hidden, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(hidden), nn.Linear(hidden, vocab)
        self.to(F64)
        for p in self.parameters():
            nn.init.normal_(p, std=0.5)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def plain_plan() -> dict[str, ParallelStyle]:
    """Whole activations, plain between the modules."""
    return {
        "embed": RowwiseParallel(input_layouts=R),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(),
        "head": ColwiseParallel(output_layouts=R),
    }


def sequence_plan() -> dict[str, ParallelStyle]:
    """Sequence parallel between the modules."""
    gathered: Any = {"input_layouts": (S(1),), "desired_input_layouts": (R,)}
    return {
        "embed": RowwiseParallel(input_layouts=R, output_layouts=S(1), use_local_output=False),
        "blocks.*.norm?": SequenceParallel(),
        "blocks.*.attention": PrepareModuleInput(**gathered),
        "blocks.*.attention.w[qkv]": ColwiseParallel(use_local_output=False),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=S(1), use_local_output=False),
        "blocks.*.mlp": PrepareModuleInput(**gathered),
        "blocks.*.mlp.up": ColwiseParallel(use_local_output=False),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=S(1), use_local_output=False),
        "norm": SequenceParallel(),
        "head": ColwiseParallel(input_layouts=S(1), use_local_output=False),
    }


def local_sequence_plan() -> dict[str, ParallelStyle]:
    """The same, with plain local parts between the modules."""
    plan = sequence_plan()
    local = {
        "embed": RowwiseParallel(input_layouts=R, output_layouts=S(1)),
        "blocks.*.norm?": SequenceParallel(use_local_output=True),
        "blocks.*.attention.w[qkv]": ColwiseParallel(),
        "blocks.*.attention.wo": RowwiseParallel(output_layouts=S(1)),
        "blocks.*.mlp": PrepareModuleInput(
            input_layouts=S(1), desired_input_layouts=R, use_local_output=True
        ),
        "blocks.*.mlp.up": ColwiseParallel(),
        "blocks.*.mlp.down": RowwiseParallel(output_layouts=S(1)),
    }
    return plan | local


def other_plan() -> dict[str, ParallelStyle]:
    """An embedding cut by columns; modules that are prepared inside and out."""
    both = PrepareModuleInputOutput(
        input_layouts=R, desired_input_layouts=R, output_layouts=R, desired_output_layouts=S(0)
    )
    return {
        "embed": ColwiseParallel(output_layouts=R),
        "blocks.*.mlp": PrepareModuleOutput(output_layouts=R, desired_output_layouts=R),
        "blocks.*.mlp.up": ColwiseParallel(input_layouts=R),
        "blocks.*.mlp.down": RowwiseParallel(use_local_output=False),
        "head": both,
    }


PLANS = {f.__name__: f for f in (plain_plan, sequence_plan, local_sequence_plan, other_plan)}


def reference(
    ids: torch.Tensor, labels: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    model = Model()
    logits = model(ids)
    loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten())
    loss.backward()
    return logits.detach(), loss.detach(), {name: p.grad for name, p in model.named_parameters()}


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    return tuple(torch.randint(0, 12, (4, 8), generator=drawn) for _ in range(2))  # type: ignore[return-value]


def whole(x: torch.Tensor) -> torch.Tensor:
    return espalier.full_tensor(x)


def equals_one_process(rank: int, world: int, plan: str) -> None:
    ids, labels = batch()
    logits, loss, grads = reference(ids, labels)
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("tp",))
    model = Model()
    before = {name: id(p) for name, p in model.named_parameters()}
    if rank and "sequence" in plan:
        for p in model.parameters():
            nn.init.zeros_(p)  # all are laid out, and rank 0's values sent
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert parallelize_module(model, mesh, PLANS[plan]()) is model
        out = model(ids)
        if plan == "other_plan":
            out = DTensor.from_local(out, mesh, [S(0)])
        with loss_parallel():
            own = F.cross_entropy(out.flatten(0, 1), labels.flatten())
            own.backward()
    assert {name: id(p) for name, p in model.named_parameters()} == before, "parameters stay who they are"
    torch.testing.assert_close(whole(out), logits)
    torch.testing.assert_close(whole(own), loss)
    for name, p in model.named_parameters():
        torch.testing.assert_close(whole(p.grad), grads[name], msg=lambda m, name=name: f"{name}: {m}")


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("plan", PLANS)
def test_equals_one_process(ranks: Any, plan: str, world: int) -> None:
    ranks(world, equals_one_process, plan)


def on_a_part_of_a_grid(rank: int, world: int) -> None:
    ids, labels = batch()
    _, loss, grads = reference(ids, labels)
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model = parallelize_module(Model(), mesh["tp"], sequence_plan())
    # each half of the batch on its own part; gradients are averaged by hand over the other axis
    half = slice(0, 2) if mesh.get_local_rank("dp") == 0 else slice(2, 4)
    own = F.cross_entropy(model(ids[half]).flatten(0, 1), labels[half].flatten())
    own.backward()
    for name, p in model.named_parameters():
        assert p.device_mesh == mesh["tp"] and p.grad.device_mesh is p.device_mesh
        total = p.grad.redistribute(placements=p.placements).to_local()
        torch.distributed.all_reduce(total, torch.distributed.ReduceOp.AVG, group=mesh.get_group("dp"))
        again = DTensor.from_local(total, mesh["tp"], p.placements)
        torch.testing.assert_close(again.full_tensor(), grads[name])
    mean = own.full_tensor()
    torch.distributed.all_reduce(mean, torch.distributed.ReduceOp.AVG, group=mesh["dp"].get_group())
    torch.testing.assert_close(mean.detach(), loss)
    with pytest.raises(ValueError, match="mesh\\['tp'\\]"):
        parallelize_module(Model(), mesh, sequence_plan())
    with Mesh.from_torch(mesh)["tp"]:
        inside = parallelize_module(Model(), None, {"head": ColwiseParallel()}, src_data_rank=None)
    assert inside.head.weight.device_mesh == mesh["tp"]


@pytest.mark.world(4)
def test_on_a_part_of_a_grid(ranks: Any) -> None:
    ranks(4, on_a_part_of_a_grid)


def traffic(rank: int, world: int) -> None:
    """Megatron's, and no more: one all-reduce each way, or a gather and a scatter each way."""
    mesh = Mesh.from_env({"tp": world})
    x = seeded(2, 4, 8)
    for sequence, forward, backward in (
        (False, ["all_reduce"], ["all_reduce"]),
        (True, ["all_gather", "reduce_scatter"], ["all_gather", "reduce_scatter"]),
    ):
        model = MLP(8, 12).to(F64)
        if sequence:
            down = RowwiseParallel(output_layouts=S(1), use_local_output=False)
            plan = {"up": ColwiseParallel(input_layouts=S(1), use_local_output=False), "down": down}
            given: torch.Tensor = distribute_tensor(x, mesh, [S(1)]).requires_grad_()
        else:
            plan = {"up": ColwiseParallel(), "down": RowwiseParallel()}
            given = x.clone().requires_grad_()
        parallelize_module(model, mesh, plan)
        with espalier.ledger(mesh) as book:
            out = model(given)
        assert [e.op for e in book.entries] == forward
        with espalier.ledger(mesh) as book:
            (out * out.detach()).sum().backward()
        assert [e.op for e in book.entries] == backward
    # the logits of a head that is cut are not gathered for the loss
    head = parallelize_module(nn.Linear(8, 10, dtype=F64), mesh, ColwiseParallel(use_local_output=False))
    logits = head(x.flatten(0, 1))
    with espalier.ledger(mesh) as book, loss_parallel():
        F.cross_entropy(logits, torch.zeros(8, dtype=torch.int64)).backward()
    assert {e.op for e in book.entries} == {"all_reduce"}
    assert all(e.bytes <= 2 * 8 * 8 * (world - 1) for e in book.entries if e.op == "all_reduce")


def uneven(rank: int, world: int) -> None:
    """Features that the ranks do not divide, with plain local parts between the layers."""
    mesh = Mesh.from_env({"tp": world})
    x = seeded(3, 5)
    model, right = MLP(5, 7).to(F64), None
    right = copy.deepcopy(model)
    for p, q in zip(model.parameters(), right.parameters(), strict=True):
        torch.distributed.broadcast(p.data, 0)
        q.data.copy_(p.data)
    parallelize_module(model, mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})
    inner = model.up(x)
    assert inner.shape == (3, -(-7 // world) if rank < 7 // -(-7 // world) else 7 % -(-7 // world))
    (model(x) ** 2).sum().backward()
    (right(x) ** 2).sum().backward()
    for p, q in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(whole(p.grad), q.grad)


class Doubled(ParallelStyle):
    """A style of a user's: rows cut, whole in, whole out."""

    def _apply(self, module: nn.Module, device_mesh: Any) -> nn.Module:
        def partition(name: str, part: nn.Module, mesh: Any) -> None:
            for key, p in list(part.named_parameters(recurse=False)):
                cut = distribute_tensor(p, mesh, [S(0)], src_data_rank=self.src_data_rank)
                part.register_parameter(key, nn.Parameter(cut, requires_grad=p.requires_grad))

        return distribute_module(
            module,
            device_mesh,
            partition,
            lambda part, inputs, mesh: (DTensor.from_local(inputs[0], mesh, [R]),),
            lambda part, out, mesh: 2 * out.redistribute(mesh, [R]).to_local(grad_placements=[R]),
        )


def laid_by_apply(mesh: Mesh) -> None:
    """The RFC's own form: a function of two arguments that lays all parameters out by ``_apply``."""

    def shard(part: nn.Module, mesh: Any) -> None:
        part._apply(lambda t: distribute_tensor(t, mesh, [S(0)]))

    torch.manual_seed(mesh.rank)  # rank 0's values count
    model = nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    ).double()
    model[2][0].weight = model[0].weight
    before = list(model.parameters())
    optimizer = torch.optim.SGD(before, lr=0.1)

    def enter(inputs: Any, mesh: Any) -> Any:
        return (DTensor.from_local(inputs[0], mesh, [R]),)

    distribute_module(model, mesh, shard, enter, lambda out, mesh: out.full_tensor())
    assert all(p is q for p, q in zip(model.parameters(), before, strict=True)), "also the tied one"
    assert all(isinstance(p, DTensor) and p.placements == (S(0),) for p in before)
    right = nn.Sequential(
        nn.Linear(6, 6), nn.Tanh(), nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4))
    ).double()
    right[2][0].weight = right[0].weight
    right.load_state_dict({name: whole(p).detach() for name, p in model.state_dict().items()})
    plain = torch.optim.SGD(right.parameters(), lr=0.1)
    for _ in range(2):
        for each, stepped in ((model, optimizer), (right, plain)):
            stepped.zero_grad()
            each(seeded(3, 6)).square().sum().backward()
            stepped.step()
    for p, q in zip(model.parameters(), right.parameters(), strict=True):
        torch.testing.assert_close(whole(p), q)
    model.float()
    for p, q in zip(before, right.parameters(), strict=True):
        assert p.dtype == torch.float32 and p.shape == q.shape
    # what lies so already is given back
    assert distribute_tensor(before[0], mesh, [S(0)]) is before[0]


def modules(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"tp": world})
    x = seeded(3, 6)
    # a user's style
    linear = nn.Linear(6, 6, dtype=F64)
    torch.distributed.broadcast(linear.weight.data, 0), torch.distributed.broadcast(linear.bias.data, 0)
    right = copy.deepcopy(linear)
    parallelize_module(linear, mesh, Doubled(), src_data_rank=None)
    given, plain = x.clone().requires_grad_(), x.clone().requires_grad_()
    linear(given).square().sum().backward()
    (2 * right(plain)).square().sum().backward()
    torch.testing.assert_close(given.grad, plain.grad)
    torch.testing.assert_close(whole(linear.weight.grad), right.weight.grad)
    # by default everything is replicated, buffers too
    norm = nn.BatchNorm1d(6, dtype=F64)
    norm.running_mean.fill_(float(rank))
    distribute_module(norm, mesh)
    assert all(isinstance(t, DTensor) and t.placements == (R,) for t in norm.state_dict().values())
    assert not norm.running_mean.full_tensor().any(), "rank 0's"
    with pytest.raises(ValueError, match="can be called once"):
        distribute_module(norm, mesh)
    for name in ("partition_fn", "input_fn", "output_fn"):
        with pytest.raises(ValueError, match=f"{name} takes 1 argument"):
            distribute_module(nn.Linear(2, 2), mesh, **{name: lambda module: None})
    laid_by_apply(mesh)
    # a tied weight is one, and stays one
    tied = nn.ModuleDict({"embed": nn.Embedding(8, 6), "head": nn.Linear(6, 8, bias=False)})
    tied["head"].weight = tied["embed"].weight
    parallelize_module(tied, mesh, {"embed": RowwiseParallel(input_layouts=R), "head": ColwiseParallel()})
    assert tied["head"].weight is tied["embed"].weight and layout_of(tied["head"].weight).axes == (0,)
    with pytest.raises(ValueError, match="two modules share it"):
        fresh = nn.Linear(6, 8, bias=False)
        fresh.weight = tied["embed"].weight
        parallelize_module(fresh, mesh, RowwiseParallel())
    # inputs by keyword
    pair = PrepareModuleInput(
        input_kwarg_layouts={"x": S(0)}, desired_input_kwarg_layouts={"x": R}, use_local_output=True
    )
    seen = parallelize_module(Names(), mesh, pair)(x=x[:1] + rank, other=3)
    assert type(seen) is torch.Tensor and torch.equal(seen, torch.cat([x[:1] + i for i in range(world)]))
    # what a plan may get wrong
    with pytest.raises(NotImplementedError, match="not LayerNorm"):
        parallelize_module(nn.LayerNorm(4), mesh, ColwiseParallel())
    with pytest.raises(ValueError, match="input_layouts speaks of 2"):
        two = PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R, None))
        parallelize_module(nn.Linear(6, 6), mesh, two)(x)
    with pytest.raises(ValueError, match="gave 1 output"):
        two = PrepareModuleOutput(output_layouts=(R, R), desired_output_layouts=(R, R))
        parallelize_module(nn.Linear(6, 6, dtype=F64), mesh, two)(x)
    with pytest.raises(ValueError, match="same number"):
        PrepareModuleInput(input_layouts=(R, R), desired_input_layouts=(R,))
    with pytest.raises(TypeError, match="parallelize_plan"):
        parallelize_module(nn.Linear(2, 2), mesh, 3)  # type: ignore[arg-type]
    with pytest.warns(UserWarning, match="matches no module"):
        parallelize_module(Model(), mesh, {"blocks.*.nothing": ColwiseParallel()})
    with pytest.warns(UserWarning, match="does nothing"):
        parallelize_module(Model(), mesh)


class Names(nn.Module):
    def forward(self, x: torch.Tensor, other: int) -> torch.Tensor:
        assert other == 3
        return x


@pytest.mark.parametrize("world", [2, 4])
@pytest.mark.parametrize("check", [traffic, uneven, modules])
def test_styles(ranks: Any, check: Any, world: int) -> None:
    ranks(world, check)
