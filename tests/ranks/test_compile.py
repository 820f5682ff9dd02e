"""``espalier.compile``: compiled regions give what the plain program gives, collectives in one graph."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import flex_attention as flex

import espalier
from espalier import Replicate, Shard
from espalier.models.gpt import GPT, GPTConfig
from espalier.models.gpt2 import GPT2, GPT2Config
from espalier.tensor.dispatch import forget

# what compiles imports when it first does
PRELOAD = ["torch._dynamo.backends.common", "torch._inductor.pattern_matcher"]
SIZES = {"vocab_size": 24, "max_positions": 8, "layers": 2, "hidden": 16, "heads": 4, "ffn": 24}
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all")


class Graphs:
    """A backend that keeps the traced graphs, runs them as they are, and counts that."""

    def __init__(self) -> None:
        self.forward: list[Any] = []
        self.backward: list[Any] = []
        self.runs = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        from torch._dynamo.backends.common import aot_autograd
        from torch._functorch.aot_autograd import make_boxed_func

        def keep(graphs: list[Any]) -> Callable[..., Any]:
            def compiler(graph: Any, inputs: Any) -> Any:
                graphs.append(graph)

                def run(*args: Any) -> Any:
                    self.runs += 1
                    return graph.forward(*args)

                return make_boxed_func(run)

            return compiler

        return aot_autograd(fw_compiler=keep(self.forward), bw_compiler=keep(self.backward))(module, inputs)


def collectives(graph: Any) -> list[str]:
    """The names of a graph's collectives, in order."""
    words = [str(word) for n in graph.graph.nodes for word in (n.target, *n.args) if n.op == "call_function"]
    return [w.split(".")[1] for w in words if w.startswith("espalier.") and w.split(".")[1] in COLLECTIVES]


def batches(n: int) -> list[dict[str, torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    tokens = [torch.randint(0, 24, (4, 8), generator=generator) for _ in range(n)]
    return [{"input_ids": x, "labels": x} for x in tokens]


def trained(mesh: Any, dropout: float, compiled: str, backend: Any) -> tuple[list[float], Any, Any]:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES, dropout=dropout)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    axes = dict(zip(mesh.names, mesh.shape, strict=True))
    engine = espalier.initialize(model, optimizer, axes, mesh=mesh)
    for part in {"no": [], "whole": [model], "blocks": list(model.blocks)}[compiled]:
        assert espalier.compile(part, backend=backend) is part
    torch.manual_seed(3)
    with espalier.ledger(mesh) as book:
        losses = [engine.train_step(batch).item() for batch in batches(3)]
    return losses, book, engine.full_state_dict()


def _trains(rank: int, world: int, compiled: str) -> None:
    mesh = espalier.Mesh.from_env({"data": world // 2, "tensor": 2})
    graphs = Graphs()
    losses, book, state = trained(mesh, 0.1, "no", None)
    found, other, compiled_state = trained(mesh, 0.1, compiled, graphs)
    # keys of dropout are drawn at each call, in the same order: the same masks
    assert found == pytest.approx(losses, rel=0, abs=1e-12)
    for name, x in state.items():
        assert torch.allclose(x, compiled_state[name], rtol=0, atol=1e-12), name
    # the ledger is that of the program not compiled, in the same order; but what the loss divides by is not
    # sent before a model that is one graph
    ordered = sorted if compiled == "whole" else list
    assert ordered(map(repr, other.entries)) == ordered(map(repr, book.entries))
    regions = 1 if compiled == "whole" else 2
    assert (len(graphs.forward), len(graphs.backward)) == (regions, regions)
    per_block = (["all_reduce"] * 2, ["all_reduce"] * 2)
    if compiled == "blocks":
        for forward, backward in zip(graphs.forward, graphs.backward, strict=True):
            assert (collectives(forward), collectives(backward)) == per_block


@pytest.mark.parametrize(("world", "compiled"), [(2, "blocks"), (4, "whole")])
def test_trains_as_uncompiled(ranks: Any, world: int, compiled: str) -> None:
    ranks(world, _trains, compiled)


def _trains_as_plain(rank: int, world: int) -> None:
    torch.manual_seed(0)
    model = GPT(GPTConfig(**SIZES)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plain = []
    for batch in batches(3):
        loss = model(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        plain.append(loss.item())
    mesh = espalier.Mesh.from_env({"data": 2, "tensor": 2})
    losses, _, state = trained(mesh, 0.0, "blocks", "eager")
    assert losses == pytest.approx(plain, rel=0, abs=1e-12)
    for name, x in model.state_dict().items():
        assert torch.allclose(x, state[name], rtol=0, atol=1e-12), name


def test_trains_as_the_plain_model(ranks: Any) -> None:
    ranks(4, _trains_as_plain)


def _mlp(x: torch.Tensor, weights: list[torch.Tensor], target: torch.Tensor) -> Any:
    """Sequence in and out, hidden features between; a loss over sharded classes."""
    h = F.gelu(F.linear(F.layer_norm(x, x.shape[-1:]), weights[0]))
    y = x + F.linear(h, weights[1])
    z = y
    if isinstance(y, espalier.DTensor):
        y = y.redistribute(placements=x.placements)
        z = y.redistribute(placements=[Replicate()])
    return y, F.cross_entropy(F.linear(z, weights[2]).flatten(0, 1), target)


def _sequence(rank: int, world: int, tokens: int) -> None:
    axes = {"tensor": 2} if world == 2 else {"tensor": 4}
    mesh = espalier.Mesh.from_env(axes)
    torch.manual_seed(0)
    plain = [torch.randn(*s, dtype=torch.float64) for s in [(2, tokens, 6), (7, 6), (6, 7), (9, 6)]]
    target = torch.randint(0, 9, (2 * tokens,))
    target[0] = -100
    cuts = [Shard(1), Shard(0), Shard(1), Shard(0)]
    graphs = Graphs()
    region = espalier.compile(_mlp, backend=graphs)

    def run(call: Any, tensors: list[torch.Tensor], target: Any) -> tuple[list[Any], Any]:
        leaves = [t.detach().clone().requires_grad_() for t in tensors]
        y, loss = call(leaves[0], leaves[1:], target)
        (loss + y.square().sum()).backward()
        return [espalier.full_tensor(t.detach()) for t in (y, loss, *(x.grad for x in leaves))], y

    expected, _ = run(_mlp, plain, target)
    laid = [espalier.distribute_tensor(x, mesh, [cut]) for x, cut in zip(plain, cuts, strict=True)]
    whole = espalier.distribute_tensor(target, mesh)
    with espalier.ledger(mesh) as uncompiled:
        _, y = run(_mlp, laid, whole)
    for _ in range(2):
        with espalier.ledger(mesh) as book:
            found, z = run(region, laid, whole)
        for a, b in zip(found, expected, strict=True):
            assert torch.allclose(a, b, rtol=0, atol=1e-12)
        assert espalier.layout_of(z) is espalier.layout_of(y)
        assert book == uncompiled, (book.by_op(), uncompiled.by_op())
    assert len(graphs.forward) == len(graphs.backward) == 1
    # what the loss sums over the classes is inside, too
    assert {"all_gather", "reduce_scatter", "all_reduce"} <= set(collectives(graphs.forward[0]))
    # what was gathered is not kept for the backward pass, but gathered again, and used
    nodes = graphs.backward[0].graph.nodes
    gathered = [node for node in nodes if "espalier.all_gather.default" in map(str, node.args)]
    given = [user for n in gathered for user in n.users if user.args[1] == 1]
    assert len(given) == len(gathered) > 0
    assert all(node.users for node in given)


@pytest.mark.parametrize(("world", "tokens"), [(2, 5), (4, 4), (4, 3)])
def test_sequence_parallel(ranks: Any, world: int, tokens: int) -> None:
    """Even, uneven and empty shards; gathers whose tensors are not kept for the backward pass."""
    ranks(world, _sequence, tokens)


def _in_pieces(rank: int, world: int, kind: str, backend: str, plan: dict[str, Any]) -> None:
    exact = "precision" not in plan
    dtype, tolerance = (torch.float64, 1e-12) if exact else (torch.float32, 3e-2)

    def net() -> nn.Module:
        torch.manual_seed(0)
        if kind == "gpt":
            return GPT(GPTConfig(**{**SIZES, "layers": 1})).to(dtype)
        return GPT2(GPT2Config(vocab_size=24, max_positions=8, layers=2, hidden=16, heads=4)).to(dtype)

    def losses(net: Any, optimizer: Any, step: Callable[[Any, Any], Any]) -> list[float]:
        # an uneven sequence
        return [step(net, {k: x[:, :7] for k, x in batch.items()}).item() for batch in batches(3)]

    def plain_step(net: nn.Module, batch: Any) -> torch.Tensor:
        loss: torch.Tensor = net(**batch).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        return loss

    plain = net()
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    expected = losses(plain, optimizer, plain_step)
    plan = {"tensor": 2, "data": world // 2, "sequence_parallel": True, "async_tensor_parallel": True, **plan}
    sent = []
    for compiled in (False, backend):
        model = net()
        engine = espalier.initialize(
            model, torch.optim.AdamW(model.parameters(), lr=1e-2), plan, compile=compiled
        )
        found = losses(model, None, lambda _, batch, engine=engine: engine.train_step(batch))
        assert found == pytest.approx(expected, rel=0, abs=tolerance)
        state = engine.full_state_dict()
        for name, x in plain.state_dict().items():
            assert torch.allclose(x, state[name], rtol=0, atol=tolerance), name
        with espalier.ledger(engine.mesh) as book:
            engine.train_step({k: x[:, :7] for k, x in batches(1)[0].items()})
        counts = book.by_op()
        sent.append(
            [counts.get(("tensor", op)) for op in ("pass_on", "reduce_scatter")]
            + [counts["tensor", "all_gather"][1]]  # of which some are one message
        )
    assert sent[1] == sent[0] and sent[0][0][0] > 8


@pytest.mark.long
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize(
    ("world", "kind", "backend", "plan"),
    [
        (4, "gpt2", "aot_eager", {"zero": 3}),
        (2, "gpt", "inductor", {}),
        (2, "gpt2", "aot_eager", {"precision": "autocast-bfloat16"}),
    ],
)
def test_compiled_blocks_multiply_pieces(
    ranks: Any, world: int, kind: str, backend: str, plan: dict[str, Any]
) -> None:
    """Asynchronous tensor parallelism: the messages of what is not compiled, on an uneven sequence."""
    if backend == "inductor" and torch.__version__ < "2.13":
        pytest.skip("its graphs take the sums of attention in float64 for float32")
    ranks(world, _in_pieces, kind, backend, plan, timeout=400)


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(6, 8), nn.Linear(8, 6)
        self.dropout, self.scale = nn.Dropout(0.5), 1.0
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor, extra: float = 0.0) -> dict[str, Any]:
        self.seen.add_(x.detach().abs().sum())
        with torch.no_grad():
            shift = x.mean()
        y = self.dropout(F.gelu(self.up(x))) * self.scale
        return {"out": self.down(y) - shift + extra, "same": x, "two": 2}


def net(mesh: Any) -> Net:
    torch.manual_seed(0)
    model = Net().double()

    for name, module in model.named_modules():
        for key, p in module._parameters.items():
            cut = Shard(0) if name == "up" else Shard(1) if key == "weight" else Replicate()
            module._parameters[key] = espalier.distribute_tensor(p, mesh, [cut])
        for key, buffer in module._buffers.items():
            module._buffers[key] = espalier.distribute_tensor(buffer, mesh)
    return model


class Counting:
    """A backend that compiles nothing and counts how often it is asked."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, module: Any, inputs: Any) -> Any:
        self.count += 1
        return module.forward


def _inductor(rank: int, world: int) -> None:
    mesh = espalier.Mesh.from_env({"tensor": world})
    x = espalier.distribute_tensor(torch.randn(4, 6, dtype=torch.float64), mesh, [Replicate()])
    results = []
    for compiled in (False, True):
        model = net(mesh)
        if compiled:
            espalier.compile(model)
        torch.manual_seed(1)
        runs = []
        for _ in range(3):
            out = model(x)["out"]
            out.square().sum().backward()
            runs.append(out.full_tensor().detach())
        assert not torch.equal(runs[1], runs[2])  # another mask each time
        results.append(runs + [p.grad.full_tensor() for p in model.parameters()] + [model.seen.full_tensor()])
    for a, b in zip(*results, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=1e-12)


def _compared(rank: int, world: int, backend: str) -> None:
    mesh = espalier.Mesh.from_env({"tensor": world})
    scale = torch.ones((), dtype=torch.float64)
    value = torch.arange(12, dtype=torch.float64).view(4, 3)

    @espalier.compile(backend=backend)
    def compute(a: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        return (a.to_local() ** 2 * factor).sum() + (a.sin().full_tensor() * factor).sum()

    line = compute._call.__code__.co_firstlineno + 2
    for run in range(3):
        x = espalier.distribute_tensor(value, mesh, [Replicate()]).requires_grad_()
        compute(x, scale).backward()
        torch.testing.assert_close(x.grad.full_tensor(), 2 * value + value.cos())
        x.grad = None
        loss = compute(x, scale * (rank + 1))
        with pytest.raises(
            ValueError, match=rf"test_compile.py:{line}\).*\(grad_placements=\[Partial\(\)\]\)"
        ):
            loss.backward()
        with torch.no_grad(), espalier.ledger(mesh) as book:
            compute(x, scale * (rank + 1))
        assert not book.entries, run


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
@pytest.mark.parametrize("backend", ["eager", "aot_eager", "inductor"])
def test_gradients_of_local_values_are_compared(ranks: Any, backend: str) -> None:
    ranks(2, _compared, backend, timeout=400)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_inductor(ranks: Any) -> None:
    ranks(2, _inductor, timeout=400)


def test_compiles_again_when_it_must() -> None:
    mesh = espalier.Mesh.single(("tensor",))
    model, backend = net(mesh), Counting()
    plain = copy.deepcopy(model)
    assert espalier.compile(model, backend=backend) is model
    assert model.state_dict().keys() == plain.state_dict().keys()
    x = espalier.distribute_tensor(torch.randn(4, 6, dtype=torch.float64), mesh)

    def check(count: int, *args: Any, times: int = 2) -> None:
        for _ in range(times):
            torch.manual_seed(5)
            found = model(*args)
            torch.manual_seed(5)
            expected = plain(*args)
            assert torch.equal(found["out"].full_tensor(), expected["out"].full_tensor())
            assert found["same"] is args[0] and found["two"] == 2
            assert espalier.layout_of(found["out"]) is espalier.layout_of(expected["out"])
            assert torch.equal(model.seen.full_tensor(), plain.seen.full_tensor())
        assert backend.count == count

    check(1, x)
    check(2, x, 0.5)
    check(3, espalier.ones(2, 6, device_mesh=mesh, dtype=torch.float64))
    check(4, x.redistribute(placements=[Shard(0)]))
    check(5, x.clone().requires_grad_())
    check(6, x.t().contiguous().t())
    with torch.no_grad():
        check(7, x)
        for m in (model, plain):
            m.eval()
        check(8, x)
        for m in (model, plain):
            m.scale = 2.0
        check(9, x)
        for m in (model, plain):
            m.down = nn.Identity()
        check(10, x)


def test_one_tensor_twice() -> None:
    mesh, backend = espalier.Mesh.single(("tensor",)), Counting()
    add = espalier.compile(lambda a, b: a + 2 * b, backend=backend)
    x, y = espalier.ones(3, device_mesh=mesh), espalier.zeros(3, device_mesh=mesh)
    for a, b, value in [(x, x, 3.0), (x, y, 1.0), (y, x, 2.0), (y, y, 0.0)]:
        assert add(a, b).tolist() == [value] * 3
    assert backend.count == 2

    @espalier.compile(backend=backend)
    def write(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        a.add_(b)
        return a + b

    assert write(x, y).tolist() == [1.0] * 3
    assert write(x.clone(), x.clone()).tolist() == [3.0] * 3
    shared = x.clone()
    assert write(shared, shared.view(3)).tolist() == [4.0] * 3  # each sees what the other wrote


def test_refusals() -> None:
    mesh = espalier.Mesh.single(("tensor",))
    x = espalier.ones(4, device_mesh=mesh)
    hidden = {espalier.ones(4, device_mesh=mesh)}
    model = nn.Linear(4, 4)

    def counts(x: torch.Tensor) -> torch.Tensor:
        model.calls = getattr(model, "calls", 0) + 1
        return x

    regions: list[tuple[Callable[[torch.Tensor], Any], str]] = [
        (lambda x: x * x.sum().item(), "item reads a tensor's value"),
        (lambda x: x if x.sum() > 0 else -x, "reads a tensor's value"),
        (lambda x: x[x > 0], "hangs on values"),
        (lambda x: torch.nonzero(x), "hangs on values"),
        (lambda x: x * next(iter(hidden)), "neither an argument"),
        (lambda x: x.requires_grad_().sum().backward(), "backward"),
        (lambda x: {"mesh": mesh, "x": x}, "returns a Mesh"),
        (counts, "sets calls"),
    ]
    for region, message in regions:
        with pytest.raises(RuntimeError, match=message):
            espalier.compile(region, backend="eager")(x.clone())
    flex_attention = flex.flex_attention  # as it is now, not as it was imported
    heads = espalier.ones(1, 1, 4, 16, device_mesh=mesh)
    functional: list[tuple[Callable[[torch.Tensor], Any], str]] = [
        (lambda x: torch.vmap(lambda row: row * 2)(x), r"torch\.vmap.* each on its own"),
        (lambda x: torch.func.grad(lambda y: (y * y).sum())(x), r"torch\.func\.grad.* each on its own"),
        (lambda x: flex_attention(heads, heads, heads), "flex_attention is called .*attn_mask="),
    ]
    for region, message in functional:
        with pytest.raises(NotImplementedError, match=message):
            espalier.compile(region, backend="eager")(x.clone())
    with pytest.raises(ValueError, match="shapes are static"):
        espalier.compile(model, dynamic=True)
    with pytest.raises(ValueError, match="are inductor's"):
        espalier.compile(model, backend="eager", mode="max-autotune")
    assert espalier.compile(counts, disable=True) is counts


class _Product(torch.autograd.Function):
    """A product as DeepSpeed's ZeRO-3 puts it in place of torch's; it has no rule."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        y = x @ weight.t()
        return y if bias is None else y + bias

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, weight = ctx.saved_tensors
        rows = grad.flatten(0, -2)
        of_bias = rows.sum(0) if ctx.needs_input_grad[2] else None
        return grad @ weight, rows.t() @ x.flatten(0, -2), of_bias


class _Waves(torch.autograd.Function):
    """Two outputs, and a context that is set up apart."""

    @staticmethod
    def forward(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return x.sin(), x.cos()

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(*output)

    @staticmethod
    def backward(ctx: Any, of_sin: torch.Tensor, of_cos: torch.Tensor) -> torch.Tensor:
        sin, cos = ctx.saved_tensors
        return of_sin * cos - of_cos * sin


class _Square(torch.autograd.Function):
    """Element by element, and says so."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad * ctx.saved_tensors[0]


def _own_functions(rank: int, world: int) -> None:
    mesh = espalier.Mesh.from_env({"tensor": world})
    espalier.register_rule(_Square)(espalier.elementwise)
    torch.manual_seed(0)
    values, weight = torch.randn(4, 6, dtype=torch.float64), torch.randn(5, 6, dtype=torch.float64)
    regions: dict[str, Callable[..., torch.Tensor]] = {
        "without a rule": lambda x, w: _Product.apply(x * 2, w, None).sin(),
        "of an argument": lambda x, w: _Product.apply(x, w, w[:, 0]),
        "several outputs": lambda x, w: _Waves.apply(x * 2)[0] * _Waves.apply(x)[1] @ w.t(),
        "with a rule": lambda x, w: _Square.apply(x * 2) @ w.t(),
        "no function, no rule": lambda x, w: F.pdist(x * 2) * w.sum(),
        "a view of what was moved": lambda x, w: (x * 2)[0] @ w.t(),
    }

    def run(call: Callable[..., torch.Tensor], cut: Any) -> list[torch.Tensor]:
        x, w = (
            espalier.distribute_tensor(t, mesh, [at]).requires_grad_()
            for t, at in ((values, cut), (weight, Replicate()))
        )
        y = call(x, w)
        y.square().sum().backward()
        return [espalier.full_tensor(t) for t in (y.detach(), x.grad, w.grad)]

    for name, region in regions.items():
        for cut in (Replicate(), Shard(0), Shard(1)):
            graphs = Graphs()
            compiled = espalier.compile(region, backend=graphs)
            expected = run(region, cut)
            for _ in range(2):
                for a, b in zip(run(compiled, cut), expected, strict=True):
                    assert torch.allclose(a, b, rtol=0, atol=1e-12), (name, cut)
            assert (len(graphs.forward), len(graphs.backward)) == (1, 1), (name, cut)


@pytest.mark.filterwarnings("ignore::espalier.GatherWarning")
def test_functions_of_the_program_itself(ranks: Any) -> None:
    """Autograd functions, and functions without a rule, are a part of the graph."""
    ranks(2, _own_functions)


def _sequences(rank: int, world: int) -> None:
    """Queries that need no move are taken as they were given."""
    mesh, graphs = espalier.Mesh.from_env({"context": 2}), Graphs()
    q, k, v = torch.randn(3, 2, 4, 6, 4, generator=torch.Generator().manual_seed(2)).double()
    q, k, v = (espalier.distribute_tensor(x, mesh, [Shard(2)]) for x in (q, k[:, :1], v[:, :1]))
    mask = torch.ones(6, 6, dtype=torch.bool).tril().expand(2, 1, 6, 6)
    attention = espalier.compile(F.scaled_dot_product_attention, backend=graphs)
    expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask).full_tensor()
    for _ in range(2):
        found = attention(q, k, v, attn_mask=mask).full_tensor()
        assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert graphs.runs == 1


def test_attention_along_a_cut_sequence_is_a_graph(ranks: Any) -> None:
    ranks(2, _sequences)


def test_what_rules_try_is_no_part_of_a_graph() -> None:
    """A call that nobody made before is tried on tensors without data first."""
    mesh, codes = espalier.Mesh.single(("tensor",)), []

    def kept(graph: Any, inputs: Any) -> Any:
        codes.append(graph.code)
        return graph.forward

    def compute(x: torch.Tensor) -> torch.Tensor:
        y = F.scaled_dot_product_attention(x, x, x, dropout_p=0.5, is_causal=True)
        return F.cross_entropy(torch.linalg.inv(y @ y.mT + torch.eye(3)).flatten(0, 2), torch.arange(6) % 3)

    for call in (compute, F.scaled_dot_product_attention):
        forget()
        x = espalier.distribute_tensor(torch.randn(1, 2, 3, 4), mesh)
        torch.manual_seed(0)
        args = (x,) if call is compute else (x, x, x)
        found = espalier.compile(call, backend=kept)(*args)
        torch.manual_seed(0)
        assert torch.equal(found.full_tensor(), call(*args).full_tensor())
    assert len(codes) == 2 and not any("meta" in code for code in codes)


def test_dry_runs_are_not_compiled() -> None:
    backend = Counting()
    reports = []
    for compiled in (False, True):
        with torch.device("meta"):
            model = GPT(GPTConfig(**SIZES))
            tokens = torch.zeros(4, 8, dtype=torch.int64)
        if compiled:
            espalier.compile(model, backend=backend)
        batch = {"input_ids": tokens, "labels": tokens}
        reports.append(espalier.dry_run(model, {"data": 2, "tensor": 2}, batch))
    assert reports[0].ledger == reports[1].ledger and backend.count == 0


def test_blocks_of_a_model_by_initialize() -> None:
    """Each block runs as one graph, without a break. What can be in none is refused, in words."""

    def losses(compile: Any, **plan: Any) -> list[float]:
        torch.manual_seed(0)
        model = GPT(GPTConfig(**SIZES)).double()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        engine = espalier.initialize(model, optimizer, plan, compile=compile)
        torch.manual_seed(3)
        return [engine.train_step(batch).item() for batch in batches(3)]

    recomputed = [{"recompute": kind} for kind in ("full", "selective")]
    for plan in ({}, {"accumulate": 2, "precision": "autocast-bfloat16"}, *recomputed):
        graphs = Graphs()
        assert losses(graphs, **plan) == losses(False, **plan)
        assert (len(graphs.forward), len(graphs.backward)) == (1, 1)
        # all but the first call of each, forward and backward
        passes = 3 if plan.get("recompute") == "full" else 2
        assert graphs.runs == passes * SIZES["layers"] * (3 * plan.get("accumulate", 1) - 1)
    with pytest.warns(UserWarning, match="Linear runs as it is written.*no list of blocks"):
        espalier.initialize(nn.Linear(2, 2), None, {}, compile=True)


class _Slope(nn.Module):
    """Its output is a gradient, or, after some calls, has one added to it."""

    def __init__(self, since: int = 0) -> None:
        super().__init__()
        self.since, self.calls = since, 0
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(6, 6), nn.Tanh()) for _ in range(2))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.detach().requires_grad_()
        y = x
        for layer in self.layers:
            y = layer(y)
        self.calls += 1
        return y if self.calls <= self.since else torch.autograd.grad(y.sum(), x, create_graph=True)[0]


@pytest.mark.parametrize("plan", [{}, {"recompute": "full"}])
def test_gradients_of_gradients(plan: dict[str, Any]) -> None:
    """No compiled graph has them: what takes them in its first step runs as it is written."""

    def losses(compile: Any, since: int = 0) -> list[float]:
        torch.manual_seed(0)
        model = _Slope(since).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = espalier.initialize(model, optimizer, plan, loss_fn=F.mse_loss, compile=compile)
        torch.manual_seed(3)
        return [
            engine.train_step((torch.randn(4, 6).double(), torch.ones(4, 6).double())).item() for _ in "123"
        ]

    expected = losses(False)
    with pytest.warns(UserWarning, match="Sequential runs as it is written.*gradients of gradients"):
        assert losses("aot_eager") == expected
    with pytest.raises(RuntimeError, match="double backward") as met:
        losses("aot_eager", since=1)
    words = [str(met.value), *getattr(met.value, "__notes__", ())]  # torch before 2.13 itself says nothing
    assert any("eave compile out" in text for text in words)


class _Mixing(nn.Module):
    """Two lists of single layers, which are recomputed, and compiled, as one; a product is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.ups, self.downs = (
            nn.ModuleList(nn.Linear(*sizes) for _ in range(2)) for sizes in ((6, 9), (9, 6))
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for up, down in zip(self.ups, self.downs, strict=True):
            x = x + down(F.relu_(up(x)).sin()).tanh()
        return x


class _Mixed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = _Mixing(), _Mixing()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.second(self.first(x))
        return y


def test_a_graph_keeps_what_the_policy_says() -> None:
    """And not what was written to since, which runs that are not compiled compute again, too."""

    def kept(compile: Any, policy: Any) -> tuple[list[float], list[str]]:
        torch.manual_seed(0)
        model = _Mixed().double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        engine = espalier.initialize(
            model, optimizer, {"recompute": "selective"}, loss_fn=F.mse_loss, layouts={},
            recompute_policy=policy, compile=compile,
        )  # fmt: skip
        rows = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
        losses = [engine.train_step((rows, rows.cos())).item() for _ in range(3)]
        if not compile:
            return losses, []
        assert len(compile.forward) == len(compile.backward) == 2
        (*_, out) = compile.forward[0].graph.nodes
        return losses, [x.target._opname for x in out.args[0][1:] if x.op == "call_function"]

    def tanh(context: Any, op: Any, *args: Any, **kwargs: Any) -> bool:
        return op is torch.ops.aten.tanh.default

    for policy, expected in ((None, ["addmm"] * 2), (tanh, ["tanh"] * 2)):
        losses, names = kept(Graphs(), policy)
        assert losses == kept(None, policy)[0]
        assert names == expected


class _Counted(nn.Module):
    """What it gives hangs on buffers that it writes to: some writes torch's versions do not tell."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.BatchNorm1d(6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.register_buffer("seen", torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm(x) + self.seen
        self.seen.add_(x.detach().abs().mean())
        y: torch.Tensor = x + self.down((self.up(x) * self.seen).sin())
        return y


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated")
def test_a_graph_computes_again_from_what_was_there() -> None:
    def trained(compile: Any, kind: str) -> tuple[list[float], list[torch.Tensor]]:
        torch.manual_seed(0)
        model = nn.Sequential(_Counted(), nn.Linear(6, 6)).double()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        plan = {"recompute": {"0": kind} if kind == "selective" else kind}
        engine = espalier.initialize(model, optimizer, plan, loss_fn=F.mse_loss, layouts={}, compile=compile)
        rows = torch.linspace(-1, 1, 24, dtype=torch.float64).view(4, 6)
        losses = [engine.train_step((rows, rows.cos())).item() for _ in range(3)]
        return losses, [espalier.full_tensor(x) for x in (*model.parameters(), *model.buffers())]

    expected, ends = trained(False, "none")
    for compile in (Graphs(), "aot_eager", "inductor"):
        losses, found = trained(compile, "selective")
        assert losses == pytest.approx(expected, rel=0, abs=1e-12), compile
        for x, y in zip(found, ends, strict=True):
            assert torch.allclose(x, y, rtol=0, atol=1e-12), compile


class _Views(nn.Module):
    """Of two buffers one is a part of the other, which is first used as it is written to."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("whole", torch.zeros(4))
        self.register_buffer("part", self.whole[:2])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.whole.add_(1)
        return x * self.part


def test_buffers_that_share_memory_run_as_written() -> None:
    mesh = espalier.Mesh.single(("tensor",))
    region = espalier.compile(_Views(), backend="aot_eager")
    x = espalier.ones(2, device_mesh=mesh)
    for name, buffer in region.named_buffers():
        region._buffers[name] = espalier.DTensor.from_local(buffer, mesh, [Replicate()], run_check=False)
    for step in (1, 2, 3):
        assert region(x).full_tensor().tolist() == [step, step]
