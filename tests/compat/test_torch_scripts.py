"""What scripts for FSDP2 do around the training step, with torch's own and with ours on the same ranks."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.fsdp as torch_fsdp
import torch.distributed.tensor as torch_tensor
import torch.distributed.tensor.parallel as torch_parallel
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint import state_dict

import espalier
from espalier.compat.torch import DistributedDataParallel, fsdp

TORCHS = SimpleNamespace(
    fsdp=torch_fsdp, tensor=torch_tensor, parallel=torch_parallel, ddp=nn.parallel.DistributedDataParallel
)
OURS = SimpleNamespace(fsdp=fsdp, tensor=espalier, parallel=espalier, ddp=DistributedDataParallel)
WHOLE = state_dict.StateDictOptions(full_state_dict=True)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.RMSNorm(6), nn.Linear(6, 8), nn.Linear(8, 6, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.down(F.silu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(10, 6)
        self.layers = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(6, 10, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.embed(x)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)

    def init_weights(self) -> None:
        for p in self.parameters():
            nn.init.trunc_normal_(p, std=0.2) if p.ndim > 1 else nn.init.uniform_(p, 0.5, 1.5)


def plain(seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return Net().double()


def on_meta() -> Any:
    torch.manual_seed(0)
    with torch.device("meta"):
        return Net().double()


def sharded(of: Any, model: Any, **options: Any) -> Any:
    for layer in model.layers:
        of.fsdp.fully_shard(layer, **options)
    return of.fsdp.fully_shard(model, **options)


def tokens(step: int, rank: int) -> torch.Tensor:
    return torch.randint(0, 10, (4, 4), generator=torch.Generator().manual_seed(10 * step + rank))


def trained(model: Any, rank: int, *, first: int = 0, optimizer: Any = None) -> list[torch.Tensor]:
    """Norms, losses, and the weights after it."""
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), 0.01)
    told = []
    for step in range(first, first + 2):
        x = tokens(step, rank)
        loss = F.cross_entropy(model(x).flatten(0, 1), x.flatten())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.detach(), whole(norm)]
    return [*told, *map(whole, model.parameters())]


def whole(x: Any) -> torch.Tensor:
    return (x.full_tensor() if hasattr(x, "full_tensor") else x).detach().clone()


def both(program: Callable[[Any, int, int], Any], rank: int, world: int, tolerance: float = 1e-12) -> Any:
    """What a program gives is the same."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch's, of what it does itself
        theirs = program(TORCHS, rank, world)
    ours = program(OURS, rank, world)
    torch.testing.assert_close(ours, theirs, rtol=0, atol=tolerance, msg=lambda m: f"{program.__name__}: {m}")
    return ours


# ---- between fully_shard and the first call


def asked_before(of: Any, rank: int, world: int) -> list[Any]:
    model = sharded(of, plain())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    for p in model.parameters():
        assert isinstance(p, of.tensor.DTensor) and isinstance(p, nn.Parameter)
        assert p.placements == (of.tensor.Shard(0),)
        assert p.device_mesh.size() == world and p.device_mesh.ndim == 1
    assert all(isinstance(x, of.tensor.DTensor) for x in model.state_dict().values())
    told = [p.to_local().detach().clone() for p in model.parameters()]
    told += [x._local_tensor.clone() for x in model.parameters()]
    told += map(whole, model.parameters())
    with torch.no_grad():
        for p in model.parameters():
            p.to_local().mul_(0.9)
            p._local_tensor.add_(0.1)
    return [*told, *trained(model, rank, optimizer=optimizer)]


def asked_on_one_rank(of: Any, rank: int, world: int) -> list[Any]:
    """Before and after the first call; what is local needs nobody else."""
    model = sharded(of, plain())
    told = []
    if rank == 0:
        told = [model.embed.weight.to_local().detach().clone()]
        told += [torch.tensor(model.layers[0].up.weight._local_tensor.numel())]
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for step in range(2):
        x = tokens(step, rank)
        F.cross_entropy(model(x).flatten(0, 1), x.flatten()).backward()
        model.reshard()
        if rank == 0:
            for p in model.parameters():
                told += [p.to_local().detach().clone(), p.to_local().norm().detach()]
                told += [p.grad.to_local().clone()]
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            told += [p.to_local().sum().detach() for p in model.parameters()]
    return [*told, *map(whole, model.parameters())]


def ranks_that_differ(of: Any, rank: int, world: int) -> list[Any]:
    """Each rank's piece is of its own values."""
    model = sharded(of, plain(rank))
    assert model.embed.weight.placements == (of.tensor.Shard(0),)
    return [whole(p) for p in model.parameters()]


def emptied(of: Any, rank: int, world: int) -> list[Any]:
    model = sharded(of, on_meta())
    for p in model.parameters():
        assert p.placements == (of.tensor.Shard(0),) and p.is_meta
    model.to_empty(device="cpu")
    for p in model.parameters():
        assert p.placements == (of.tensor.Shard(0),) and not p.is_meta
        nn.init.constant_(p, 0.1 * p.ndim)
    return trained(model, rank)


def assigned(of: Any, rank: int, world: int) -> list[Any]:
    """A whole state dict, cut by hand as the model on meta lies: as torchtune and torch's examples do."""
    model = sharded(of, on_meta())
    lies, given = model.state_dict(), {}
    for name, value in plain().state_dict().items():
        like = lies[name]
        given[name] = nn.Parameter(of.tensor.distribute_tensor(value, like.device_mesh, like.placements))
    found = model.load_state_dict(given, strict=False, assign=True)
    assert not found.missing_keys and not found.unexpected_keys
    return trained(model, rank)


def sent(of: Any, rank: int, world: int) -> list[Any]:
    """Rank 0's whole state dict, into a model on meta."""
    model, states = sharded(of, on_meta()), plain(3).state_dict()
    options = state_dict.StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # torch calls what it deprecates
        state_dict.set_model_state_dict(model, states if rank == 0 else {}, options=options)
    return trained(model, rank)


def copied_before(of: Any, rank: int, world: int) -> list[Any]:
    """Ranks that drew weights of their own, and average them from before the first call on."""
    model = plain()
    model.register_buffer("flags", torch.tensor([rank == 0, True]))
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.1 * rank)
    model = of.ddp(model)
    average = copy.deepcopy(model.module)
    told = trained(model, rank)
    with torch.no_grad():
        for mean, p in zip(average.parameters(), model.module.parameters(), strict=True):
            mean.lerp_(p, 0.1)
    return [*told, average.flags, *map(whole, average.parameters())]


def of_two_models(of: Any, rank: int, world: int) -> list[Any]:
    """An encoder and what predicts a slow copy's codes, each wrapped by itself: one optimizer has both."""
    torch.manual_seed(0)
    encoder, predictor = (nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double() for _ in "ab")
    target = copy.deepcopy(encoder)
    encoder, predictor, target = map(of.ddp, (encoder, predictor, target))
    for p in target.parameters():
        p.requires_grad = False
    parts = (encoder, predictor)
    groups: list[Any] = [{"params": [p for p in m.parameters() if p.ndim > 1]} for m in parts]
    groups += [{"params": [p for p in m.parameters() if p.ndim == 1], "weight_decay": 0.0} for m in parts]
    optimizer, told = torch.optim.AdamW(groups, 0.05, weight_decay=0.1), list[Any]()
    for step in range(3):
        x = F.one_hot(tokens(step, rank).flatten() % 6, 6).double()
        with torch.no_grad():
            code = F.layer_norm(target(x), (6,))
        loss = F.smooth_l1_loss(predictor(encoder(x)), code)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for p, slow in zip(encoder.parameters(), target.parameters(), strict=True):
                slow.data.mul_(0.9).add_(0.1 * p.detach().data)
        told.append(loss.detach())
    return [*told, *(whole(p) for m in (*parts, target) for p in m.parameters())]


def drawn(rank: int, world: int) -> None:
    """What a model on meta draws when it has memory: if nobody asked, what one process draws."""
    alone = on_meta().to_empty(device="cpu")
    asked, unasked = (sharded(OURS, on_meta()) for _ in range(2))
    assert asked.head.weight.placements == (espalier.Shard(0),)
    assert all(p.device_mesh for p in asked.parameters())
    for one in (alone, asked.to_empty(device="cpu"), unasked.to_empty(device="cpu")):
        torch.manual_seed(5)
        with torch.no_grad():
            one.init_weights()
    unasked(tokens(0, rank))
    for p, q, r in zip(alone.parameters(), unasked.parameters(), asked.parameters(), strict=True):
        assert torch.equal(p, whole(q))
        values = whole(r)
        assert values.unique().numel() == values.numel(), "no rank draws what another does"


# ---- parts that the loop calls


def called_apart(of: Any, rank: int, world: int) -> list[Any]:
    """No module has them all; one optimizer does."""
    torch.manual_seed(0)
    parts = [Block().double() for _ in range(3)]
    for part in parts:
        of.fsdp.fully_shard(part)
    optimizer = torch.optim.AdamW([p for part in parts for p in part.parameters()], 0.01)
    told = []
    for step in range(2):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + rank))
        for part in parts:
            x = part(x)
        (loss := x.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.detach())
    return [*told, *(whole(p) for part in parts for p in part.parameters())]


def called_beside_the_model(of: Any, rank: int, world: int) -> list[Any]:
    """Parts of a model that is sharded as a whole, too."""
    model = sharded(of, plain())
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    told = []
    for step in range(2):
        x = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + rank))
        for layer in model.layers:
            x = layer(x)
        (loss := x.square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.detach())
    return [*told, *map(whole, model.parameters())]


def by_a_method(of: Any, rank: int, world: int) -> list[Any]:
    """Of a part, beside calls of the model, which has a forward of its own put on it."""
    model = plain()
    own = model.forward
    model.forward = lambda x: own(x) * 0.5
    sharded(of, model)
    part = model.layers[0]
    part.scaled = lambda x: part.up(x) * 0.5
    of.fsdp.register_fsdp_forward_method(part, "scaled")
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    told = []
    for step in range(2):
        x = tokens(step, rank)
        (loss := F.cross_entropy(model(x).flatten(0, 1), x.flatten())).backward()
        h = torch.randn(4, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2 * step + rank))
        (other := part.scaled(h).square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
        told += [loss.detach(), other.detach()]
    return [*told, *map(whole, model.parameters())]


def in_micro_batches(rank: int, world: int) -> None:
    """Parts that the loop calls, whose gradients wait, and are divided by another number: as one process."""
    chains = []
    for of, finalizes in ((None, False), (OURS, False), (OURS, True)):
        torch.manual_seed(0)
        parts: Any = nn.ModuleList(Block().double() for _ in range(2))
        for part in parts if of else ():
            of.fsdp.fully_shard(part)
            part.set_gradient_divide_factor(3.0)
        optimizer = torch.optim.SGD(parts.parameters(), 0.1)
        for step in range(4):
            for place in (rank,) if of else range(world):
                generator = torch.Generator().manual_seed(2 * step + place)
                x = torch.randn(4, 6, dtype=torch.float64, generator=generator)
                for part in parts:
                    if of:
                        part.set_requires_gradient_sync(step % 2 == 1 and not finalizes)
                    x = part(x)
                (x.square().mean() / (1 if of else 3)).backward()
            for part in parts if step % 2 and finalizes else ():  # as torch has it from 2.15 on
                part.set_requires_gradient_sync(True)
                part.finalize_backward(async_op=True).wait()
            if step % 2:
                optimizer.step()
                optimizer.zero_grad()
        chains.append([whole(p) for p in parts.parameters()])
    for chain in chains[1:]:
        torch.testing.assert_close(chain, chains[0], rtol=0, atol=1e-12)


def within_a_plain_model(of: Any, rank: int, world: int) -> list[Any]:
    model = plain()
    for layer in model.layers:
        of.fsdp.fully_shard(layer)
    optimizer = torch.optim.SGD(model.layers.parameters(), 0.1)
    told = []
    for step in range(2):
        x = tokens(step, rank)
        (loss := F.cross_entropy(model(x).flatten(0, 1), x.flatten())).backward()
        optimizer.step()
        optimizer.zero_grad()
        told.append(loss.detach())
    return [*told, *map(whole, model.layers.parameters())]


# ---- mixed precision: state dicts are of float32


def in_bfloat16(rank: int, world: int) -> None:
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    for keeps in (False, True):
        model = sharded(OURS, plain().float(), mp_policy=policy, reshard_after_forward=not keeps)
        optimizer = torch.optim.AdamW(model.parameters(), 0.01)
        x = tokens(0, rank)
        for _ in range(2):
            F.cross_entropy(model(x).flatten(0, 1).float(), x.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
        states = {name: whole(p) for name, p in model.state_dict().items()}
        assert any(not torch.equal(p, p.bfloat16().float()) for p in states.values())
        by_torch = state_dict.get_model_state_dict(model, options=WHOLE)
        masters = model.engine.full_state_dict()
        for name, p in states.items():
            assert p.dtype == torch.float32 and torch.equal(p, by_torch[name]), name
            assert torch.equal(p, masters[name]), name
        whole_output = model(x).detach()
        other = sharded(OURS, plain(4).float(), mp_policy=policy, reshard_after_forward=not keeps)
        other(x)
        state_dict.set_model_state_dict(other, copy.deepcopy(by_torch), options=WHOLE)
        assert torch.equal(other(x), whole_output)
        other = sharded(OURS, plain(5).float(), mp_policy=policy, reshard_after_forward=not keeps)
        other(x)
        other.load_state_dict(model.state_dict())
        for again in (other.state_dict(), state_dict.get_model_state_dict(other)):
            assert all(torch.equal(whole(p), states[name]) for name, p in again.items())
        assert torch.equal(other(x), whole_output)
        written = other.state_dict()
        with torch.no_grad():
            for p in written.values():
                p.mul_(0.5)
        if keeps and world > 1:
            with pytest.warns(UserWarning, match=r"model.state_dict\(\) gave was written to"):
                other(x)
            continue
        other(x)
        found = other.state_dict()
        assert all(torch.equal(whole(p), states[name] * 0.5) for name, p in found.items())
        assert not torch.equal(other(x), whole_output)


def saved(of: Any, rank: int, world: int) -> list[Any]:
    """An asynchronous checkpoint, and the way back into models that were not called yet."""
    folder = [tempfile.mkdtemp() if rank == 0 else None]
    dist.broadcast_object_list(folder)
    model = sharded(of, plain())
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    trained(model, rank, optimizer=optimizer)
    states = dict(zip(("model", "optimizer"), state_dict.get_state_dict(model, optimizer), strict=True))
    dcp.async_save(states, checkpoint_id=folder[0]).result()
    dist.barrier()
    model = sharded(of, plain(3))
    optimizer = torch.optim.AdamW(model.parameters(), 0.01)
    states = dict(zip(("model", "optimizer"), state_dict.get_state_dict(model, optimizer), strict=True))
    dcp.load(states, checkpoint_id=folder[0])
    state_dict.set_state_dict(
        model, optimizer, model_state_dict=states["model"], optim_state_dict=states["optimizer"]
    )
    told = trained(model, rank, first=2, optimizer=optimizer)
    dist.barrier()
    for file in Path(folder[0] or "").iterdir() if rank == 0 else ():
        file.unlink()
    return told


def hybrid(of: Any, rank: int, world: int) -> list[Any]:
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model = sharded(of, plain(), mesh=mesh)
    told = [p.to_local().detach().clone() for p in model.parameters()]
    assert all(p.placements == (of.tensor.Replicate(), of.tensor.Shard(0)) for p in model.parameters())
    return [*told, *trained(model, rank)]


def scripts(rank: int, world: int) -> None:
    for program in (asked_before, ranks_that_differ, emptied, assigned, sent, called_apart):
        both(program, rank, world)
    for program in (by_a_method, called_beside_the_model, within_a_plain_model):
        both(program, rank, world)
    for program in (asked_on_one_rank, saved, copied_before, of_two_models):
        both(program, rank, world)
    in_micro_batches(rank, world)
    drawn(rank, world)
    in_bfloat16(rank, world)


def test_scripts(ranks: Any) -> None:
    ranks(2, scripts)


def test_copies_and_pieces(ranks: Any) -> None:
    ranks(4, both_hybrid)


def both_hybrid(rank: int, world: int) -> None:
    both(hybrid, rank, world)


def styled(of: Any) -> tuple[Any, Any]:
    """A model with layers cut by styles along one axis, and the mesh."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, shard, whole_ = plain(), of.tensor.Shard, of.tensor.Replicate()
    of.parallel.parallelize_module(
        model,
        mesh["tp"],
        {
            "embed": of.parallel.RowwiseParallel(input_layouts=whole_, output_layouts=shard(1)),
            "layers.*": of.parallel.PrepareModuleInput(
                input_layouts=(shard(1),), desired_input_layouts=(shard(1),)
            ),
            "layers.*.norm": of.parallel.SequenceParallel(),
            "layers.*.up": of.parallel.ColwiseParallel(input_layouts=shard(1)),
            "layers.*.down": of.parallel.RowwiseParallel(output_layouts=shard(1), use_local_output=False),
            "head": of.parallel.ColwiseParallel(input_layouts=shard(1), output_layouts=whole_),
        },
    )
    return model, mesh


def on_two_axes(of: Any, rank: int, world: int) -> list[Any]:
    """Sharded along the other axis, whose rows are a rank's."""
    model, mesh = styled(of)
    return trained(sharded(of, model, mesh=mesh["dp"]), rank // 2)


class Heads(nn.Module):
    """Attention of more queries than keys."""

    def __init__(self) -> None:
        super().__init__()
        self.n_heads, self.n_kv_heads, self.head_dim = 4, 2, 2
        self.wq, self.wk, self.wv = (nn.Linear(6, n, bias=False) for n in (8, 4, 4))
        self.wo = nn.Linear(8, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        b, t, _ = x.shape
        q = self.wq(x).view(b, t, self.n_heads, self.head_dim).transpose(1, 2)
        k = self.wk(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        v = self.wv(x).view(b, t, self.n_kv_heads, self.head_dim).transpose(1, 2)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return x + self.wo(out.transpose(1, 2).contiguous().view(b, t, -1))


def with_heads_of_a_rank(of: Any, rank: int, world: int) -> list[Any]:
    """The script has divided numbers of heads, as torch's own examples do."""
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
    model, whole_ = plain(), of.tensor.Replicate()
    ends = {
        "embed": of.parallel.RowwiseParallel(input_layouts=whole_),
        "head": of.parallel.ColwiseParallel(output_layouts=whole_),
    }
    of.parallel.parallelize_module(model, mesh["tp"], ends)
    for i in range(2):
        torch.manual_seed(i)
        model.layers[i] = layer = Heads().double()
        layer.n_heads, layer.n_kv_heads = layer.n_heads // mesh["tp"].size(), layer.n_kv_heads // 2
        columns = {name: of.parallel.ColwiseParallel() for name in ("wq", "wk", "wv")}
        of.parallel.parallelize_module(layer, mesh["tp"], {**columns, "wo": of.parallel.RowwiseParallel()})
    model = sharded(of, model, mesh=mesh["dp"])
    if of is TORCHS:
        return trained(model, rank // 2)
    with pytest.warns(UserWarning, match="Leave the number of heads as it is"):
        return trained(model, rank // 2)


def both_on_two_axes(rank: int, world: int) -> None:
    both(with_heads_of_a_rank, rank, world)
    told = both(on_two_axes, rank, world)
    model, mesh = styled(OURS)
    wrapped = fsdp.FullyShardedDataParallel(model, device_mesh=mesh["dp"], use_orig_params=True)
    torch.testing.assert_close(trained(wrapped, rank // 2), told, rtol=0, atol=1e-12)
    mesh = dist.init_device_mesh("cpu", (2, 2), mesh_dim_names=("tp", "dp"))
    model = plain()
    espalier.parallelize_module(model, mesh["tp"], {"head": espalier.ColwiseParallel()})
    sharded(OURS, model, mesh=mesh["dp"])
    with pytest.raises(ValueError, match=r"parallelize_module(.|\n)*expected the mesh's last axis"):
        model(tokens(0, rank))


def test_layers_cut_by_styles(ranks: Any) -> None:
    ranks(4, both_on_two_axes)
