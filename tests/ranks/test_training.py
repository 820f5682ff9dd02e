"""Programs of training, run on a module of DTensors and on the plain one: what they give must be equal."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

from espalier import DTensor, Mesh, Replicate, Shard, distribute_tensor, full_tensor

F64 = torch.float64
LAYOUTS = {"a.weight": Shard(0), "a.bias": Shard(0), "b.weight": Shard(1)}
Program = Callable[[nn.Module, torch.Tensor], Any]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.n = nn.Linear(6, 8), nn.Linear(8, 6), nn.LayerNorm(6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.n(self.b(self.a(x).relu()))


def built(mesh: Mesh | None) -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    model, x = Block().to(F64), torch.randn(4, 6, dtype=F64).requires_grad_()
    if mesh is None:
        return model, x
    for name, p in list(model.named_parameters()):
        module, _, leaf = name.rpartition(".")
        at = [LAYOUTS.get(name, Replicate())]
        setattr(model.get_submodule(module), leaf, distribute_tensor(p, mesh, at))
    return model, distribute_tensor(x, mesh, [Shard(0)])


def _module_hooks(m: nn.Module, x: torch.Tensor) -> Any:
    kinds: list[bool] = []

    def seen(*grads: Any) -> None:
        kinds.extend(type(g) is type(x) for g in grads if g is not None)

    m.a.register_forward_pre_hook(lambda _, given: (given[0] * 2,))
    m.a.register_forward_hook(lambda _, given, out: out + 1)
    m.b.register_full_backward_pre_hook(lambda _, grads: (seen(*grads), tuple(g * 3 for g in grads))[1])
    m.a.register_full_backward_hook(lambda _, ins, outs: (seen(*ins, *outs), tuple(g * 2 for g in ins))[1])
    m(x).square().sum().backward()
    return kinds


def _reentrant(m: nn.Module, x: torch.Tensor) -> Any:
    def several(x: torch.Tensor) -> Any:
        return m(x), x * 2, 5

    y, z, five = checkpoint(several, x, use_reentrant=True)
    (y * z).square().sum().backward()
    return type(y) is type(x), five, y


def _nested(m: nn.Module, x: torch.Tensor) -> None:
    def outer(x: torch.Tensor) -> torch.Tensor:
        return m(checkpoint(m, x, use_reentrant=False))

    with torch.autograd.graph.save_on_cpu():
        y = checkpoint(outer, x, use_reentrant=False)
    y.square().sum().backward()


def _selective(m: nn.Module, x: torch.Tensor) -> None:
    def policy(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        return CheckpointPolicy.MUST_SAVE if "mm" in str(op) else CheckpointPolicy.PREFER_RECOMPUTE

    contexts = functools.partial(create_selective_checkpoint_contexts, policy)
    checkpoint(m, x, use_reentrant=False, context_fn=contexts).square().sum().backward()


def _several_roots(m: nn.Module, x: torch.Tensor) -> None:
    y = m.a(x)
    torch.autograd.backward(y, torch.ones(4, 8, dtype=F64), retain_graph=True)
    torch.autograd.backward([y.sum(), (y * 2).sin().sum()])


def _unused(m: nn.Module, x: torch.Tensor) -> Any:
    y, z = m(x).square().sum(), x.detach().clone().requires_grad_()
    return (
        *torch.autograd.grad(y, [x, z], allow_unused=True, retain_graph=True),
        *torch.autograd.grad(y, [x, z], materialize_grads=True),
    )


def _second(m: nn.Module, x: torch.Tensor) -> None:
    (g,) = torch.autograd.grad(checkpoint(m, x, use_reentrant=False).square().sum(), x, create_graph=True)
    g.square().sum().backward()


def _data(m: nn.Module, x: torch.Tensor) -> Any:
    m(x).sum().backward()
    m.zero_grad()
    vector = nn.utils.parameters_to_vector(m.parameters()).detach()
    nn.utils.vector_to_parameters(vector * 2, m.parameters())
    m.a.bias.data[2] = 5.0
    m.b.weight.data.mul_(3)
    m(x).square().sum().backward()
    return list(m.parameters())


def _autocast(m: nn.Module, x: torch.Tensor) -> Any:
    with torch.autocast("cpu", torch.bfloat16):
        h = F.linear(x.float(), m.a.weight.float())
        with torch.autocast("cpu", enabled=False):
            whole = F.linear(x, m.a.weight)
    whole.square().sum().backward()
    return h.dtype, whole.dtype, whole


def _scaled(m: nn.Module, x: torch.Tensor, bad: bool = False) -> Any:
    optimizer = torch.optim.SGD(m.parameters(), lr=0.1, momentum=0.9)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(m(x).square().sum()).backward()
        grad = m.a.weight.grad
        if bad and step == 1:
            # on one rank alone
            if not isinstance(grad, DTensor):
                grad[-1, 0] = float("inf")
            elif grad.device_mesh.rank == 1:
                grad.to_local()[-1, 0] = float("inf")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(m.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return scaler.state_dict(), list(m.parameters())


def _optimized(m: nn.Module, x: torch.Tensor, name: str = "", **options: Any) -> Any:
    optimizer = getattr(torch.optim, name)(m.parameters(), **options)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss = m(x).square().sum()
        loss.backward()
        return loss

    for _ in range(3):
        optimizer.step(closure)
    return list(m.parameters())


OPTIMIZERS = "Adagrad RMSprop Adadelta NAdam RAdam Adamax ASGD Rprop Adafactor LBFGS"
PROGRAMS: dict[str, Program] = {
    "hooks of modules": _module_hooks,
    "reentrant checkpoint": _reentrant,
    "nested checkpoints, offloaded": _nested,
    "selective checkpoint": _selective,
    "several roots": _several_roots,
    "unused inputs": _unused,
    "second derivative of a checkpoint": _second,
    "data and vectors": _data,
    "autocast": _autocast,
    "scaler": _scaled,
    "an overflow on one rank": functools.partial(_scaled, bad=True),
    **{name: functools.partial(_optimized, name=name) for name in OPTIMIZERS.split()},
}


def flat(tree: Any) -> list[Any]:
    return [y for x in tree for y in flat(x)] if isinstance(tree, tuple | list) else [tree]


def run(rank: int, world: int) -> list[str]:
    mesh = Mesh.from_env({"a": world})
    wrong = []
    for name, program in PROGRAMS.items():
        results = []
        for on in (mesh, None):
            model, x = built(on)
            out = program(model, x)
            results.append([*flat(out), x.grad, *(p.grad for p in model.parameters())])
        for i, (a, b) in enumerate(zip(*results, strict=True)):
            if isinstance(b, torch.Tensor):
                a, b = full_tensor(a.detach()), b.detach()
                if a.dtype != b.dtype or not torch.allclose(a, b, rtol=1e-9, atol=1e-9):
                    wrong.append(f"{name}: result {i} is wrong")
            elif a != b:
                wrong.append(f"{name}: result {i} is {a}, not {b}")
    return wrong


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning")
def test_programs_give_what_the_plain_module_gives(ranks: Any) -> None:
    assert ranks(2, run) == [[], []]


def in_step(rank: int, world: int) -> None:
    """Three heads on four ranks: one has none, and its attention saves nothing for the backward pass."""
    mesh = Mesh.from_env({"a": world})
    x = torch.randn(2, 3, 4, 2, dtype=F64, generator=torch.Generator().manual_seed(0))
    found = []
    for use in (True, False):
        leaf = distribute_tensor(x.clone().requires_grad_(), mesh, [Shard(0)])

        def block(x: torch.Tensor) -> torch.Tensor:
            h = x.sin().redistribute(placements=[Shard(1)])  # type: ignore[attr-defined]
            return F.scaled_dot_product_attention(h, h, h).redistribute(placements=[Shard(0)])  # type: ignore[attr-defined]

        y = checkpoint(block, leaf, use_reentrant=False) if use else block(leaf)
        y.square().sum().backward()
        found.append(leaf.grad.full_tensor())  # type: ignore[union-attr]
    assert torch.equal(*found)


def test_ranks_that_hold_nothing_recompute_in_step(ranks: Any) -> None:
    ranks(4, in_step, timeout=60)
