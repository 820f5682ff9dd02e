"""Autograd functions, transforms and operators of one's own on DTensors, without a rule and with."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import espalier
from espalier import DTensor, Mesh, Partial, Replicate, Shard, distribute_tensor
from espalier.tensor import fallback

R, P, S = Replicate(), Partial(), Shard
F64 = torch.float64
Tensors = tuple[torch.Tensor, ...]


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def told(*where: Any) -> Callable[[str], str]:
    """What an error begins with."""
    return lambda text: f"{' '.join(map(str, where))}: {text}"


class Cube(torch.autograd.Function):
    """As most people write one."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        assert type(x) is torch.Tensor
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x**2 * grad


class Scaled(torch.autograd.Function):
    """With setup_context, two tensors, a number by its name and two outputs, one without a gradient."""

    @staticmethod
    def forward(x: torch.Tensor, w: torch.Tensor, power: float = 2.0) -> tuple[torch.Tensor, torch.Tensor]:
        return x * w.softmax(-1) * power, (x > 0).sum()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        x, w, ctx.power = inputs
        ctx.mark_non_differentiable(output[1])
        ctx.save_for_backward(x, w)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor, _: Any) -> Any:
        x, w = ctx.saved_tensors
        s = w.softmax(-1)
        back = (grad * x * ctx.power).sum(0)
        return grad * s * ctx.power, s * (back - (s * back).sum()), None


class Centered(torch.autograd.Function):
    """All elements hang on all: nothing of it is right on a part."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x - x.mean()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return grad - grad.mean()


class Doubled_(torch.autograd.Function):
    """In place."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


class Reversed(torch.autograd.Function):
    """Keeps nothing, and computes a module again in the backward pass: with parameters it is not given."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, module: nn.Module) -> torch.Tensor:
        ctx.save_for_backward(x)
        ctx.module = module
        return module(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            torch.autograd.backward(ctx.module(x), grad)
        assert x.grad is not None
        return x.grad, None


def cube(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Cube.apply(x * w)


def scaled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    out, count = Scaled.apply(x, w, 3.0)
    return out * count


def centered(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return Centered.apply(x * w) * w


def doubled(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    h = x * w
    y = Doubled_.apply(h)
    return y * h + h


def twice(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Differentiated twice."""
    h = x * w
    (g,) = torch.autograd.grad(Cube.apply(h).sum(), h, create_graph=True)
    return g * x


def again(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    """Recomputed."""
    return checkpoint(lambda a, b: cube(centered(a, b), b), x, w, use_reentrant=False)


def reentrant(x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
    return checkpoint(lambda a, b: cube(centered(a, b), b), x, w, use_reentrant=True)


PROGRAMS: list[Callable[[Any, Any], torch.Tensor]] = [
    cube, scaled, centered, doubled, twice, again, reentrant,
]  # fmt: skip
PLACES = [([R], [R]), ([S(0)], [R]), ([S(1)], [S(0)]), ([S(1)], [R])]


def compare(program: Callable[[Any, Any], torch.Tensor], mesh: Mesh, at: Any, of_w: Any) -> None:
    """The program on DTensors and on plain tensors: value, gradients, and those of what a mean gives."""
    x, w = values(5, 3), values(3, seed=1)
    plain = [t.clone().requires_grad_() for t in (x, w)]
    laid = [distribute_tensor(t.clone().requires_grad_(), mesh, p) for t, p in ((x, at), (w, of_w))]
    expected, found = program(*plain), program(*laid)
    assert isinstance(found, DTensor), program.__name__
    where = f"{program.__name__} {at} {of_w} {found}"
    torch.testing.assert_close(found.full_tensor(), expected, msg=lambda m: f"{where}: {m}")
    weights = values(*expected.shape, seed=2)
    (expected * weights).square().mean().backward()
    (found * weights).square().mean().backward()
    for a, b in zip(laid, plain, strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad, msg=lambda m: f"{where}: {m}")  # type: ignore[union-attr]


def without_a_rule(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    fallback._warn_of.cache_clear()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        for program in PROGRAMS:
            for at, of_w in PLACES:
                compare(program, mesh, at, of_w)
    told = [str(w.message) for w in seen]
    for name in ("Cube", "Scaled", "Centered", "Doubled_"):
        own = [m for m in told if f"function {name} " in m]
        # once each, and not where nothing had to be gathered
        assert len(own) == (world > 1), (name, told)
        assert all(f"espalier.register_rule({name})(espalier.elementwise)" in m for m in own)
    # what comes out is cut again, as what went in
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        out = Cube.apply(distribute_tensor(values(5, 3), mesh, [S(1)]))
        assert out.placements == (S(1),)
        # a Partial is summed first
        p = DTensor.from_local(values(4, seed=rank), mesh, [P])
        torch.testing.assert_close(Cube.apply(p).full_tensor(), p.full_tensor() ** 3)


class Gathered(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> Any:
        parts = [torch.zeros_like(x) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, x)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        dist.all_reduce(grad)
        return grad.chunk(dist.get_world_size())[dist.get_rank()]


def that_gathers_itself(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    with pytest.warns(UserWarning, match="Gathered calls all_gather itself(.|\n)*Leave Gathered out"):
        Gathered.apply(distribute_tensor(values(4, 3), mesh, [S(0)]))


def test_a_function_that_gathers_itself_is_told_of(ranks: Any) -> None:
    ranks(2, that_gathers_itself)


@pytest.mark.parametrize("world", [1, 2, 3])
def test_functions_without_a_rule_are_right(ranks: Any, world: int) -> None:
    ranks(world, without_a_rule)


def around_modules(rank: int, world: int) -> None:
    """A function that uses DTensors which it is not given."""
    mesh = Mesh.from_env({"data": 2, "tensor": 2})
    torch.manual_seed(0)
    whole = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    laid = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 6)).double()
    laid.load_state_dict(whole.state_dict())
    for name, at in (("0.weight", S(0)), ("0.bias", S(0)), ("2.weight", S(1)), ("2.bias", R)):
        owner, _, own = name.partition(".")
        p = distribute_tensor(laid.get_parameter(name).detach(), mesh, [R, at])
        setattr(laid.get_submodule(owner), own, nn.Parameter(p))
    x = values(4, 6)
    inputs = x.clone().requires_grad_(), distribute_tensor(x.clone().requires_grad_(), mesh, [S(0), R])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for module, given in zip((whole, laid), inputs, strict=True):
            for _ in range(2):
                (Reversed.apply(given * 2, module) * given).square().sum().backward()
    torch.testing.assert_close(inputs[1].grad.full_tensor(), inputs[0].grad)  # type: ignore[union-attr]
    # a plain tensor, the same on all ranks, and a module whose parameters are DTensors
    alone = x.clone().requires_grad_(), x.clone().requires_grad_()
    for module, given in zip((whole, laid), alone, strict=True):
        out = Reversed.apply(given, module)
        assert type(out) is torch.Tensor
        out.square().sum().backward()
    torch.testing.assert_close(alone[1].grad, alone[0].grad)
    for a, b in zip(laid.parameters(), whole.parameters(), strict=True):
        torch.testing.assert_close(a.grad.full_tensor(), b.grad)  # type: ignore[union-attr]


def test_functions_may_use_what_they_are_not_given(ranks: Any) -> None:
    ranks(4, around_modules)


# ---- with a rule


class Relu6(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, scale)
        return x.clamp(0, 6) * scale

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, scale = ctx.saved_tensors
        within = ((x > 0) & (x < 6)).to(x.dtype)
        return grad * within * scale, (grad * x.clamp(0, 6)).reshape(-1, *scale.shape).sum(0)


class RootMeanSquare(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        return x * x.square().mean(-1, keepdim=True).rsqrt() * weight

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        with torch.enable_grad():
            x, weight = (t.detach().requires_grad_() for t in ctx.saved_tensors)
            out = x * x.square().mean(-1, keepdim=True).rsqrt() * weight
        return torch.autograd.grad(out, (x, weight), grad)


class Pair(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.clone(), x.clone()


def named(module: str, function: Any) -> Any:
    """A function as a library would define it."""
    return type(function.__name__, (function,), {"__module__": module, "__qualname__": function.__qualname__})


def with_a_rule(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    espalier.register_rule(Relu6)(espalier.elementwise)
    espalier.register_rule(RootMeanSquare)(espalier.rowwise)
    espalier.register_rule(Pair)(espalier.elementwise)
    relu6, rms = (lambda x, w, f=f: f.apply(x, w) for f in (Relu6, RootMeanSquare))
    relu6.__name__, rms.__name__ = "relu6", "rms"
    for program in (relu6, rms):
        for at, of_w in PLACES:
            compare(program, mesh, at, of_w)
    x = distribute_tensor(values(6, 4), mesh, [S(0)])
    with espalier.ledger(mesh) as book:
        assert Relu6.apply(x, torch.ones(4, dtype=F64)).placements == (S(0),)
        assert RootMeanSquare.apply(x, torch.ones(4, dtype=F64)).placements == (S(0),)
    assert not book.entries
    with pytest.raises(ValueError, match="this rank gets 1 output"):
        Pair.apply(x)
    # a library's own, known by its name; two of that name of anyone else are not
    swish = named("timm.layers.activations_me", type("SwishAutoFn", (Cube,), {"__qualname__": "SwishAutoFn"}))
    with espalier.ledger(mesh) as book:
        assert torch.allclose(swish.apply(x).full_tensor(), x.full_tensor() ** 3)
    assert len(book.entries) == 2  # those of full_tensor
    own = named("program", swish)
    if world > 1:
        with pytest.warns(espalier.GatherWarning, match="SwishAutoFn has no rule"):
            own.apply(x)


Case = tuple[Any, tuple[Any, ...], list[Any]]  # a function, its arguments, where they lie


def of_transformers() -> list[Case]:
    from transformers.models.bloom.modeling_bloom import GeLUFunction
    from transformers.models.ibert.quant_modules import SymmetricQuantFunction, floor_ste, round_ste
    from transformers.models.phimoe.modeling_phimoe import PhimoeMultiplier
    from transformers.models.recurrent_gemma.modeling_recurrent_gemma import SqrtBoundDerivative
    from transformers.models.reformer.modeling_reformer import ReverseSort
    from transformers.models.sew_d.modeling_sew_d import XSoftmax
    from transformers.models.yoso.modeling_yoso import YosoCumulation

    mask = torch.tensor([[[1, 1, 0, 1]], [[1, 0, 1, 1]]])
    order = torch.stack([torch.randperm(5, generator=torch.Generator().manual_seed(i)) for i in range(8)])
    order = order.view(2, 4, 5)
    chosen = torch.tensor([[0], [2], [1], [2], [0]])
    unit = F.normalize(values(2, 3, 4).abs(), dim=-1) * 0.9
    masks = torch.ones(2, 3, dtype=F64), torch.ones(2, 3, dtype=F64)
    return [
        (GeLUFunction, (values(4, 6),), [[S(0)], [S(1)]]),
        (SqrtBoundDerivative, (values(4, 6).abs(),), [[S(0)], [S(1)]]),
        (floor_ste, (values(4, 6),), [[S(0)]]),
        (round_ste, (values(4, 6),), [[S(1)]]),
        (SymmetricQuantFunction, (values(4, 6), 8, False, torch.tensor([0.1], dtype=F64)), [[S(0)], [S(1)]]),
        (XSoftmax, (values(2, 3, 4), mask, -1), [[S(0)], [S(1)]]),
        (ReverseSort, (values(2, 4, 5, 3), values(2, 4, 5), order, order.argsort(-1)), [[S(0)], [S(1)]]),
        (
            PhimoeMultiplier,
            (values(5, 3), values(5, 1), chosen, values(5, 3).softmax(-1), torch.ones(5, 1, dtype=F64)),
            [[S(0)]],
        ),
        (
            YosoCumulation,
            (*masks, unit, unit.flip(1), values(2, 3, 4), {"hash_code_len": 3}),
            [[S(0)], [S(1)]],
        ),
    ]


def libraries(rank: int, world: int) -> None:
    """Functions of transformers and torch: as on one process, nothing gathered."""
    pytest.importorskip("transformers")
    from torch.nn.modules import _functions
    from transformers.models.sew_d.modeling_sew_d import XDropout

    mesh = Mesh.from_env({"axis": world})
    for function, args, places in of_transformers():
        for at in places:
            plain, laid = [], []
            for a in args:
                learnt = isinstance(a, torch.Tensor) and a.is_floating_point() and a.numel() > 1
                plain.append(a.clone().requires_grad_(learnt) if isinstance(a, torch.Tensor) else a)
                here = at if isinstance(a, torch.Tensor) and a.shape[:1] == args[0].shape[:1] else [R]
                laid.append(
                    distribute_tensor(a.clone().requires_grad_(learnt), mesh, here)
                    if isinstance(a, torch.Tensor)
                    else a
                )
            found, expected = function.apply(*laid), function.apply(*plain)
            pairs = (
                list(zip(found, expected, strict=True)) if isinstance(found, tuple) else [(found, expected)]
            )
            for a, b in pairs:
                torch.testing.assert_close(a.full_tensor(), b, msg=lambda m, f=function: f"{f}: {m}")
            sum((a * (i + 2)).square().sum() for i, (a, _) in enumerate(pairs)).backward()
            sum((b * (i + 2)).square().sum() for i, (_, b) in enumerate(pairs)).backward()
            for a, b in zip(laid, plain, strict=True):
                if isinstance(b, torch.Tensor) and b.grad is not None:
                    torch.testing.assert_close(
                        a.grad.full_tensor(), b.grad, msg=lambda m, f=function: f"{f}: {m}"
                    )
    # a dropout draws the same values however its input lies
    torch.manual_seed(3)
    x = distribute_tensor(torch.ones(6, 4, dtype=F64), mesh, [S(0)])
    cut = XDropout.apply(x, 0.5)
    torch.manual_seed(3)
    whole = XDropout.apply(x.redistribute(placements=[R]), 0.5)
    assert (
        torch.equal(cut.full_tensor(), whole.full_tensor()) and 0 < whole.full_tensor().count_nonzero() < 24
    )
    # torch's own: a batch norm is that of the whole batch anyway
    norm, batch = nn.BatchNorm1d(4, dtype=F64), values(6, 4)
    mean, var = torch.zeros(4, dtype=F64), torch.ones(4, dtype=F64)
    out = _functions.SyncBatchNorm.apply(
        distribute_tensor(batch, mesh, [S(0)]), norm.weight, norm.bias, mean, var, 1e-5, 0.1, None, world
    )
    torch.testing.assert_close(out.full_tensor(), norm(batch))
    torch.testing.assert_close(mean, norm.running_mean)
    torch.testing.assert_close(var, norm.running_var)


@pytest.mark.parametrize("body", [with_a_rule, libraries])
def test_functions_with_a_rule(ranks: Any, body: Any) -> None:
    ranks(2, body)


# ---- transforms, operators of one's own


@torch.library.custom_op("tests::centred", mutates_args=())
def centred(x: torch.Tensor) -> torch.Tensor:
    return x - x.mean()


@centred.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


torch.library.register_autograd("tests::centred", lambda ctx, grad: grad - grad.mean())


@torch.library.custom_op("tests::add_mean_", mutates_args=("x",))
def add_mean_(x: torch.Tensor) -> None:
    x += x.mean()


class Holder:
    """As tensordict's: it gives its tensors to ``vmap`` itself, in C++."""

    def __init__(self, held: torch.Tensor) -> None:
        self.held = held

    def apply(self, fn: Callable[[torch.Tensor], torch.Tensor]) -> Holder:
        return Holder(fn(self.held))

    def _add_batch_dim(self) -> None:
        raise NotImplementedError


def _times_held(holder: Holder, row: torch.Tensor) -> torch.Tensor:
    assert type(holder.held) is torch.Tensor
    return holder.held * row


def transforms(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    net = nn.Linear(3, 2).double()
    laid_net = nn.Linear(3, 2).double()
    for name, p in net.named_parameters():
        setattr(laid_net, name, nn.Parameter(distribute_tensor(p.detach(), mesh, [S(0)])))

    def loss(parameters: Any, row: torch.Tensor, module: nn.Module) -> torch.Tensor:
        return torch.func.functional_call(module, parameters, (row,)).tanh().square().sum()

    def programs(x: Any, w: Any, module: nn.Module) -> list[Any]:
        parameters = dict(module.named_parameters())
        value, back = torch.func.vjp(lambda a: a * w.sin(), x)
        out, push = torch.func.linearize(lambda a: a.sin() * 2, x)
        return [
            torch.vmap(torch.sin)(x),
            torch.vmap(lambda row: row @ w)(x),  # w is captured
            torch.vmap(lambda row: module(row).sum())(x),  # and so are parameters
            torch.func.grad(lambda a: (a * w).pow(3).sum())(x),
            torch.func.grad_and_value(lambda a: (a * w).pow(3).sum())(x)[1],
            *torch.func.jvp(torch.sin, (x,), (x,)),
            torch.func.jacrev(lambda a: (a * w).sum(-1))(x),
            torch.func.jacfwd(lambda a: (a * w).sum(-1))(x),
            torch.func.hessian(lambda a: a.pow(3).sum())(x),
            value,
            back(value)[0],
            out,
            push(x),
            # gradients for each row
            *torch.vmap(torch.func.grad(lambda p, r: loss(p, r, module)), (None, 0))(parameters, x).values(),
            centred(x * w),
            torch.autograd.grad((x * w).sin(), x, torch.stack([x, 2 * x]), is_grads_batched=True)[0]
            if x.requires_grad
            else x,
        ]

    x, w = values(4, 3), values(3, seed=1)
    for at, of_w in PLACES:
        plain = [t.clone().requires_grad_() for t in (x, w)]
        laid = [distribute_tensor(t.clone().requires_grad_(), mesh, p) for t, p in ((x, at), (w, of_w))]
        expected, found = programs(*plain, net), programs(*laid, laid_net)
        for module in (net, laid_net):
            module.zero_grad()
        for i, (a, b) in enumerate(zip(found, expected, strict=True)):
            assert isinstance(a, DTensor), i
            torch.testing.assert_close(a.full_tensor(), b, msg=told(i, at, of_w))
        sum((a * (i + 1)).square().sum() for i, a in enumerate(found) if a.requires_grad).backward()
        sum((b * (i + 1)).square().sum() for i, b in enumerate(expected) if b.requires_grad).backward()
        for p, q in zip((*laid, *laid_net.parameters()), (*plain, *net.parameters()), strict=True):
            torch.testing.assert_close(p.grad.full_tensor(), q.grad, msg=told(at, of_w))
    y = distribute_tensor(x.clone(), mesh, [S(0)])
    add_mean_(y)
    torch.testing.assert_close(y.full_tensor(), x + x.mean())
    with pytest.raises(NotImplementedError, match="Give it back"):
        torch.vmap(lambda row: y.add_(1).sum() + row)(x)
    # plain ones stay plain
    assert type(torch.vmap(torch.sin)(x)) is torch.Tensor
    factor = distribute_tensor(w, mesh, [S(0)])
    out = torch.vmap(_times_held, (None, 0))(Holder(factor), x)
    torch.testing.assert_close(out.full_tensor(), x * w)


@pytest.mark.filterwarnings(
    "ignore::espalier.GatherWarning",
    "ignore:.*torch.jit.script",
    "ignore:Attempted to insert a get_attr",  # torch's own, of linearize
)
def test_transforms_are_right(ranks: Any) -> None:
    ranks(2, transforms)


# ---- flex_attention, counting


def flexed(rank: int, world: int) -> None:
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    mesh = Mesh.from_env({"axis": world})
    bias, slopes = values(4, 9, seed=5), values(4, seed=6)

    def program(leaves: Any, how: str) -> Any:
        q, k, v, b = leaves

        def relative(score: Any, batch: Any, head: Any, i: Any, j: Any) -> Any:
            return score + b[head, i - j + 4] + slopes[head] * (i - j)

        def causal(batch: Any, head: Any, i: Any, j: Any) -> Any:
            return (i >= j) | (head == 2) | (batch == 1)

        mask = create_block_mask(causal, 2, 4, 5, 5, device="cpu") if "mask" in how else None
        given = {"enable_gqa": True} if k.shape[1] != 4 else {}
        if "aux" in how:
            out, aux = flex_attention(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True), **given)
            return out * aux.lse.unsqueeze(-1)
        return flex_attention(q, k, v, relative if "score" in how else None, mask, 0.3, **given)

    def right(leaves: Any, how: str) -> torch.Tensor:
        """The same written out."""
        q, k, v, b = leaves
        k, v = (x.repeat_interleave(4 // x.shape[1], 1) for x in (k, v))
        scores = q @ k.mT * (q.shape[-1] ** -0.5 if "aux" in how else 0.3)
        i, j = torch.arange(5).unsqueeze(1), torch.arange(5)
        if "score" in how:
            scores = scores + b[:, i - j + 4] + slopes.view(4, 1, 1) * (i - j)
        if "mask" in how:
            seen = (i >= j) | (torch.arange(4) == 2).view(4, 1, 1) | (torch.arange(2) == 1).view(2, 1, 1, 1)
            scores = scores.masked_fill(~seen, -float("inf"))
        out = scores.softmax(-1) @ v
        return out * scores.logsumexp(-1, keepdim=True) if "aux" in how else out

    for how in ("plain", "score mask", "mask aux"):
        for heads in (4, 2, 1):
            given = values(2, 4, 5, 3), values(2, heads, 5, 3, seed=1), values(2, heads, 5, 2, seed=2), bias
            for at in (R, S(0), S(1), S(2)):
                plain = [t.clone().requires_grad_() for t in given]
                places = (at, R if at == S(1) and heads == 1 else at, R, R)
                laid = [
                    distribute_tensor(t.clone().requires_grad_(), mesh, [p])
                    for t, p in zip(given, places, strict=True)
                ]
                found, expected = program(laid, how), right(plain, how)
                where = f"{how} {heads} {at}"
                torch.testing.assert_close(found.full_tensor(), expected, msg=lambda m, w=where: f"{w}: {m}")
                found.square().sum().backward()
                expected.square().sum().backward()
                for p, q in zip(laid, plain, strict=True):
                    if q.grad is not None:
                        torch.testing.assert_close(
                            p.grad.full_tensor(), q.grad, msg=lambda m, w=where: f"{w}: {m}"
                        )
    q = distribute_tensor(values(2, 4, 5, 3), mesh, [S(1)])
    with espalier.ledger(mesh) as book:
        assert flex_attention(q, q, q).placements == (S(1),)
    assert not book.entries
    with pytest.raises(ValueError, match="multiple of"):
        flex_attention(q, q[:, :3], q[:, :3])


def counted(rank: int, world: int) -> None:
    """Counters of floating-point operations see what this rank does, forward and backward."""
    from torch.utils.flop_counter import FlopCounterMode

    mesh = Mesh.from_env({"axis": world})
    totals = []
    for cut in (False, True):
        net = nn.Sequential(nn.Linear(6, 8), nn.GELU(), nn.Linear(8, 6)).double()
        x = values(4, 6)
        if cut:
            for name, at in (("0.weight", S(0)), ("0.bias", S(0)), ("2.weight", S(1)), ("2.bias", R)):
                owner, _, own = name.partition(".")
                p = distribute_tensor(net.get_parameter(name).detach(), mesh, [at])
                setattr(net.get_submodule(owner), own, nn.Parameter(p))
            x = distribute_tensor(x, mesh, [R])
        optimizer = torch.optim.AdamW(net.parameters())
        with FlopCounterMode(display=False) as counter:
            for use in (False, True):
                loss = (checkpoint(net, x, use_reentrant=False) if use else net(x)).square().sum()
                loss.backward()
            optimizer.step()
        totals.append(counter.get_total_flops())
    assert totals[0] == totals[1] * world > 0, totals


@pytest.mark.filterwarnings("ignore:.*torch.jit.script")
@pytest.mark.parametrize("body", [flexed, counted])
def test_attention_and_counters(ranks: Any, body: Any) -> None:
    ranks(2, body)


# ---- optimizers


class Seen(torch.optim.AdamW):
    """Somebody's own: its step is torch's, with something before."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                p.grad.mul_(2)
        return super().step(closure)


def stepped(rank: int, world: int) -> None:
    """Steps whose gradients, states or arguments lie otherwise; closures, and hooks that see DTensors."""
    mesh = Mesh.from_env({"axis": world})
    places = [R, S(0), S(1)]
    given = [values(4, 6, seed=i) for i in range(3)]
    lr = torch.tensor(0.1, dtype=F64)
    makers: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "AdamW": lambda p: torch.optim.AdamW(p, 0.1),
        "SGD": lambda p: torch.optim.SGD(p, 0.1, momentum=0.9),
        "foreach": lambda p: torch.optim.AdamW(p, 0.1, foreach=True),
        "own": lambda p: Seen(p, 0.1),
        "capturable lr": lambda p: torch.optim.Adam(p, lr.clone(), foreach=False),
    }
    for name, make in makers.items():
        plain = [nn.Parameter(x.clone()) for x in given]
        laid = [nn.Parameter(distribute_tensor(x, mesh, [p])) for x, p in zip(given, places, strict=True)]
        ours, theirs = make(laid), make(plain)
        kinds: list[Any] = []

        def look(o: Any, args: Any, kwargs: Any, kinds: list[Any] = kinds) -> None:
            kinds.append(type(o.param_groups[0]["params"][0]))

        ours.register_step_pre_hook(look)
        ours.register_step_post_hook(look)

        def loss_of(ps: Any, o: Any) -> Callable[[], torch.Tensor]:
            def closure() -> torch.Tensor:
                assert torch.is_grad_enabled() and all(type(p) is type(ps[0]) for p in ps)
                o.zero_grad()
                loss = sum((p * (i + 1)).sin().sum() for i, p in enumerate(ps))
                loss.backward()  # type: ignore[union-attr]
                return loss  # type: ignore[return-value]

            return closure

        for step in range(4):
            if step == 3 and name == "SGD":
                for group in (*ours.param_groups, *theirs.param_groups):
                    group["lr"] = 0.05
            closures = loss_of(laid, ours), loss_of(plain, theirs)
            if step % 2 and name != "own":
                a, b = ours.step(closures[0]), theirs.step(closures[1])  # type: ignore[arg-type]
            else:
                a, b = closures[0](), closures[1]()
                if step == 2:
                    # set by hand, in another layout; what is Partial is summed where it is set
                    laid[0].grad = laid[0].grad.redistribute(placements=[S(0)])  # type: ignore[union-attr]
                ours.step()
                theirs.step()
            torch.testing.assert_close(a.full_tensor(), b)
            for p, q in zip(laid, plain, strict=True):
                torch.testing.assert_close(p.full_tensor(), q.detach(), msg=lambda m, n=name: f"{n}: {m}")
        assert set(kinds) == {type(laid[0])} and isinstance(laid[0], DTensor)
        assert len(kinds) == (16 if name == "own" else 8)
        for p in laid:
            for key, state in ours.state[p].items():
                assert state is None or key == "step" or state._layout is p._layout, (name, key)
        # a state that lies otherwise than its parameter
        key = "momentum_buffer" if name == "SGD" else "exp_avg"
        ours.state[laid[1]][key] = ours.state[laid[1]][key].redistribute(placements=[R])
        loss_of(laid, ours)()
        loss_of(plain, theirs)()
        ours.step()
        theirs.step()
        torch.testing.assert_close(
            laid[1].full_tensor(), plain[1].detach(), msg=lambda m, n=name: f"{n}: {m}"
        )


@pytest.mark.parametrize("world", [1, 2])
def test_optimizers_step_on_locals_where_they_can(ranks: Any, world: int) -> None:
    ranks(world, stepped)


# ---- the engine


class Gate(nn.Module):
    """Functions without a rule, one of which takes a parameter; a transform; one with a rule of a library."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.weight = nn.Parameter(torch.rand(8) + 0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h, _ = Scaled.apply(Centered.apply(self.up(x)).flatten(0, -2), self.weight)
        h = self.down(Library.apply(h).view(*x.shape[:-1], 8))
        return x + torch.vmap(lambda row: row - row.mean())(h)


Library = type(
    "SwishAutoFn",
    (Cube,),
    {"__module__": "timm.layers.activations_me", "__qualname__": "SwishAutoFn"},
)
ENGINES: list[dict[str, Any]] = [
    {"data": 2},
    {"data": 2, "zero": 3},
    {"tensor": 2},
    {"tensor": 2, "sequence_parallel": True},
    {"data": 2, "recompute": "full"},
    {"pipe": 2, "accumulate": 2},
]


def trained(rank: int, world: int) -> None:
    for plan in ENGINES:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(6, 6), Gate(), Gate(), nn.Linear(6, 3)).double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        engine = espalier.initialize(net, ours, plan, loss_fn=F.mse_loss)
        parts = plan.get("accumulate", 1)
        for step in range(3):
            x, y = values(4, 5, 6, seed=step), values(4, 5, 3, seed=9 + step)
            loss = engine.train_step((x, y))
            theirs.zero_grad()
            # what looks at all rows sees those of a part
            expected = sum(
                F.mse_loss(plain(a), b) / parts for a, b in zip(x.chunk(parts), y.chunk(parts), strict=True)
            )
            expected.backward()  # type: ignore[union-attr]
            theirs.step()
            assert abs(loss.item() - expected.item()) < 1e-12, plan  # type: ignore[union-attr]
        state = engine.full_state_dict()
        for name, p in plain.state_dict().items():
            torch.testing.assert_close(state[name], p, msg=told(plan, name))


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning", "ignore:.*torch.jit.script")
def test_functions_without_a_rule_train_under_every_plan(ranks: Any) -> None:
    ranks(2, trained)
