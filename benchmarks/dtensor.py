"""Espalier's DTensor beside torch's, in one run: the table that docs/figures.md publishes.

Overheads are measured as in ``dispatch.py``: one process plays rank 1 of two in torch's fake process
group, so that no network counts; both libraries get the same mesh, layouts and values, and "plain"
are ordinary tensors of what this rank holds. Times are CPU time of this process. Memory is what
torch's CPU allocator gave out, event by event, so it is exact. Transitions are carried out twice: on
the fake group (what Python and C++ around them cost) and, with larger tensors, on two real gloo
ranks. Where torch's DTensor cannot carry a call out, a dash stands.

* *ops*: forty common calls, forward alone, and forward with backward.
* *redistribute*: each kind of transition.
* *optimizer*: a step on DTensor parameters, directly and through the engine.
* *memory*: the peak of a step of a column and row parallel MLP whose input is sharded over the tokens.
* *first call*: the model of `espalier demo`, built and run for its first step, against its tenth.
* *coverage*: torch's own database of operators, each called on DTensors in drawn layouts.

    python benchmarks/dtensor.py [--only SECTION] [--write docs/figures.md]
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from _common import Contender, Section, duration, in_turns, ratio_of
from _coverage import HUNG, outcomes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor as TorchDTensor
from torch.distributed.tensor import Partial, Placement, Replicate, Shard
from torch.distributed.tensor import distribute_tensor as torch_distribute
from torch.testing._internal.distributed.fake_pg import FakeStore

import espalier
from espalier.engine.update import update
from espalier.models import GPT, GPTConfig
from espalier.tensor.random import Seeding, Stream

LIBRARIES = ("plain", "Espalier", "torch")
S0, S1, R = Shard(0), Shard(1), Replicate()

Given = tuple[torch.Tensor, Placement]


# ---- the two libraries, and neither


def laid(library: str, x: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.Tensor:
    """``x`` as a library lays it; plain: what this rank holds."""
    if library == "Espalier":
        if placement.is_partial():
            return espalier.DTensor.from_local(x, mesh, [placement])
        return espalier.distribute_tensor(x, mesh, [placement], src_data_rank=None)
    whole = (
        TorchDTensor.from_local(x, mesh, [placement], run_check=False)
        if placement.is_partial()
        else torch_distribute(x, mesh, [placement], src_data_rank=None)
    )
    if library == "torch":
        return whole
    assert isinstance(whole, TorchDTensor)
    return whole.to_local().clone()


def measured(
    contenders: dict[str, Contender], *, clock: Callable[[], float] = time.process_time, **options: Any
) -> dict[str, list[float]]:
    """The times of those contenders that run at all."""
    able = {}
    for name, contender in contenders.items():
        try:
            contender.before()
            contender.run()
        except Exception:
            if name == "Espalier":
                raise
            continue
        able[name] = contender
    return in_turns(able, clock=clock, **options)


def cells(times: dict[str, list[float]], names: Sequence[str] = LIBRARIES) -> list[str]:
    """Median times, a dash for what could not run."""
    return [duration(statistics.median(times[n])) if n in times else "–" for n in names]


def ratio(times: dict[str, list[float]], mine: str = "Espalier", other: str = "torch") -> float | None:
    """As :func:`ratio_of`; None where the other could not run."""
    return ratio_of(times, mine, other) if other in times else None


def shown(value: float | None) -> str:
    """A ratio, or a dash."""
    return "–" if value is None else f"{value:.2f}"


# ---- ops


def calls() -> dict[str, tuple[Callable[..., torch.Tensor], list[Given]]]:
    """Forty common calls on small tensors; what is floating-point gets a gradient."""
    rows, other, square = torch.rand(16, 64) + 0.5, torch.rand(16, 64) + 0.5, torch.rand(64, 64)
    batch, image = torch.rand(4, 8, 16), torch.rand(4, 6, 8, 8)
    heads = torch.rand(4, 4, 8, 16)
    ids, classes = torch.randint(0, 64, (16, 8)), torch.randint(0, 64, (16,))
    mask, weight, bias = rows > 1, torch.rand(64), torch.rand(64)
    unary: dict[str, Callable[..., torch.Tensor]] = {
        "neg": torch.neg, "exp": torch.exp, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "tanh": torch.tanh,
        "sigmoid": torch.sigmoid, "relu": F.relu, "gelu": F.gelu, "silu": F.silu,
        "clamp": lambda x: x.clamp(0.2, 1.2), "scale (x * 2.0)": lambda x: x * 2.0,
        "softmax": lambda x: x.softmax(-1), "log_softmax": lambda x: x.log_softmax(-1),
        "sum(-1)": lambda x: x.sum(-1), "sum() to Partial": lambda x: x.sum(),
        "mean(-1)": lambda x: x.mean(-1),
        "amax(-1)": lambda x: x.amax(-1), "cumsum(-1)": lambda x: x.cumsum(-1),
        "view": lambda x: x.view(-1, 4, 16), "transpose": lambda x: x.transpose(0, 1),
        "unsqueeze": lambda x: x.unsqueeze(1), "x[:, 1:]": lambda x: x[:, 1:],
        "chunk": lambda x: x.chunk(2, -1)[0], "to(float64)": lambda x: x.double(), "clone": torch.clone,
        "dropout": lambda x: F.dropout(x, 0.1),
    }  # fmt: skip
    return {
        **{name: (function, [(rows, S0)]) for name, function in unary.items()},
        "add": (torch.add, [(rows, S0), (other, S0)]),
        "mul": (torch.mul, [(rows, S0), (other, S0)]),
        "div": (torch.div, [(rows, S0), (other, S0)]),
        "where": (torch.where, [(mask, S0), (rows, S0), (other, S0)]),
        "cat": (lambda x, y: torch.cat([x, y], -1), [(rows, S0), (other, S0)]),
        "matmul, column": (torch.matmul, [(rows, R), (square, S1)]),
        "matmul, row": (torch.matmul, [(rows, S1), (square, S0)]),
        "linear": (F.linear, [(rows, S0), (square, R), (bias, R)]),
        "bmm": (torch.bmm, [(batch, S0), (batch.transpose(1, 2).contiguous(), S0)]),
        "layer_norm": (lambda x, w, b: F.layer_norm(x, (64,), w, b), [(rows, S0), (weight, R), (bias, R)]),
        "embedding": (F.embedding, [(ids, S0), (square, R)]),
        "gather": (lambda x, i: x.gather(1, i), [(rows, S0), (ids, S0)]),
        "cross_entropy": (F.cross_entropy, [(rows, S0), (classes, S0)]),
        "cross_entropy, classes cut": (F.cross_entropy, [(rows, S1), (classes, R)]),
        "attention (SDPA), heads cut": (F.scaled_dot_product_attention, [(heads, S1)] * 3),
        "conv2d": (lambda x, w: F.conv2d(x, w, padding=1), [(image, S0), (torch.rand(6, 6, 3, 3), R)]),
    }


def ops(mesh: DeviceMesh) -> Section:
    """Each call, forward alone and forward with backward."""
    section = Section(
        "Overhead of common calls",
        "CPU time a call on rank 1 of 2, fake network: forward as autograd records it, then with backward, "
        "until the gradient lies as its tensor does.",
        [
            (
                "call",
                "plain",
                "Espalier",
                "torch",
                "E / torch",
                "fwd+bwd: plain",
                "Espalier",
                "torch",
                "E / torch",
            )
        ],
    )
    forward: dict[str, float] = {}
    both: dict[str, float] = {}
    for name, (function, given) in calls().items():
        once, whole = {}, {}
        for library in LIBRARIES:
            leaves = [laid(library, x, mesh, p) for x, p in given]
            once[library] = Contender(partial(function, *[_recorded(x) for x in leaves]))
            whole[library] = _with_backward(function, leaves)
        first = measured(once, rounds=40, calls=40, warmup=10)
        second = measured(whole, rounds=40, calls=1, warmup=10)
        for ratios, times in ((forward, first), (both, second)):
            if "torch" in times:
                ratios[name] = ratio_of(times, "Espalier", "torch")
        section.rows.append(
            (name, *cells(first), shown(ratio(first)), *cells(second), shown(ratio(second)))
        )  # fmt: skip
    # its values hash each element's global index; torch's are of the local shape, and wrong for it
    dropout = forward.pop("dropout"), both.pop("dropout")
    for what, ratios, median in (("forward", forward, 0.6), ("forward and backward", both, 0.6)):
        section.bar(f"{what}, the median call over torch's", statistics.median(ratios.values()), median)
        worst = max(ratios, key=ratios.__getitem__)
        section.bar(f"{what}, the worst call ({worst}) over torch's", ratios[worst], 1.0)
    section.bar("dropout over torch's", max(dropout), 2.0)
    return section


def _recorded(x: torch.Tensor) -> torch.Tensor:
    return x.detach().requires_grad_() * 1.0 if x.is_floating_point() else x


def _with_backward(function: Callable[..., torch.Tensor], leaves: Sequence[torch.Tensor]) -> Contender:
    needing = [x.detach().requires_grad_() if x.is_floating_point() else x for x in leaves]
    upstream: list[torch.Tensor] = []

    def run() -> None:
        out = function(*needing)
        if not upstream:
            upstream.append(torch.ones_like(out.detach()))
        out.backward(upstream[0])
        for x in needing:
            # torch leaves the gradient of a replicated tensor Partial: whoever uses it must still reduce it
            if isinstance(x.grad, TorchDTensor) and x.grad.placements[0].is_partial():
                x.grad = x.grad.redistribute(placements=[R])

    def before() -> None:
        for x in needing:
            x.grad = None

    return Contender(run, before)


# ---- transitions


KINDS: dict[str, tuple[Placement, Placement]] = {
    "P → R (all-reduce)": (Partial(), R),
    "P → S(0) (reduce-scatter)": (Partial(), S0),
    "S(0) → R (all-gather)": (S0, R),
    "R → S(0) (slice)": (R, S0),
    "S(0) → S(1) (all-to-all)": (S0, S1),
    "R → P": (R, Partial()),
    "S(0) → R, uneven": (S0, R),
}


def transitions(mesh: DeviceMesh, size: int, rounds: int, clock: Callable[[], float]) -> dict[str, Any]:
    """Times of each kind of transition of a [size, size] tensor, with its backward."""
    found = {}
    for name, (src, dst) in KINDS.items():
        rows = size + 1 if "uneven" in name else size
        contenders = {}
        for library in ("Espalier", "torch"):
            x = laid(library, torch.ones(rows, size), mesh, src).detach().requires_grad_()
            contenders[library] = _with_backward(lambda x, to=dst: x.redistribute(placements=[to]), [x])
        found[name] = measured(contenders, rounds=rounds, warmup=5, clock=clock)
    return found


def redistribute(mesh: DeviceMesh) -> Section:
    """Overhead on the fake group, and real time on two gloo ranks."""
    section = Section(
        "Transitions",
        "`redistribute` and its backward: [32, 32] without a network, and [1024, 1024] on two gloo ranks.",
        [("transition", "Espalier", "torch", "E / torch", "gloo: Espalier", "torch", "E / torch")],
    )
    small = transitions(mesh, 32, 100, time.process_time)
    large = espalier.spawn(gloo_transitions, {"tensor": 2})[0]
    overheads, real = [], []
    for name in KINDS:
        a, b = ratio(small[name]), ratio(large[name])
        if a is not None and b is not None:
            overheads.append(a)
            real.append(b)
        names = ("Espalier", "torch")
        section.rows.append(
            (name, *cells(small[name], names), shown(a), *cells(large[name], names), shown(b))
        )
    section.bar("overhead, the worst kind over torch's", max(overheads), 1.0)
    section.bar("on gloo, the median kind over torch's", statistics.median(real), 1.0)
    return section


def gloo_transitions(mesh: espalier.Mesh) -> dict[str, Any]:
    """On a real rank."""
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore", module="torch")
    return transitions(mesh.to_torch(), 1024, 30, time.perf_counter)


# ---- the optimizer


def optimizers(mesh: DeviceMesh) -> Section:
    """A step over 30 parameters, half of them cut."""
    section = Section(
        "Optimizer steps",
        "30 parameters of a small transformer, half of them cut. *Engine*: what `engine.step()` calls.",
        [("optimizer", "plain", "E engine", "E direct", "torch", "engine / plain", "direct / torch")],
    )
    kinds: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
        "SGD, momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "Adam, for-loop": lambda p: torch.optim.Adam(p, foreach=False),
        "AdamW, for-loop": lambda p: torch.optim.AdamW(p, foreach=False),
        "AdamW, foreach": lambda p: torch.optim.AdamW(p, foreach=True),
        "AdamW, fused": lambda p: torch.optim.AdamW(p, fused=True),
        "Adagrad": torch.optim.Adagrad,
        "RMSprop": torch.optim.RMSprop,
    }
    for name, make in kinds.items():
        contenders = {
            "plain": Contender(make(parameters("plain", mesh)).step),
            "E engine": Contender(partial(update, make(parameters("Espalier", mesh)))),
            "Espalier": Contender(make(parameters("Espalier", mesh)).step),
            "torch": Contender(make(parameters("torch", mesh)).step),
        }
        times = measured(contenders, rounds=40, calls=2)
        engine, direct = ratio_of(times, "E engine", "plain"), ratio(times)
        order = ("plain", "E engine", "Espalier", "torch")
        section.rows.append((name, *cells(times, order), shown(engine), shown(direct)))
        section.bar(f"{name}, engine over plain", engine, 1.3)
        if direct is not None:
            section.bar(f"{name}, direct over torch's", direct, 1.0)
    return section


def parameters(library: str, mesh: DeviceMesh) -> list[torch.nn.Parameter]:
    """Matrices and vectors of three layers, with gradients."""
    shapes: list[tuple[tuple[int, ...], Placement]] = [
        ((64,), R), ((64,), R), ((192, 64), S0), ((192,), S0), ((64, 64), S1),
        ((64,), R), ((256, 64), S0), ((256,), S0), ((64, 256), S1), ((64,), R),
    ]  # fmt: skip
    made = []
    for shape, placement in shapes * 3:
        value, grad = (laid(library, torch.randn(shape), mesh, placement) for _ in range(2))
        made.append(torch.nn.Parameter(value))
        made[-1].grad = grad
    return made


# ---- memory


def memory(mesh: DeviceMesh) -> Section:
    """The peak of a step, above what lives before it."""
    section = Section(
        "Memory",
        "Peak bytes that torch's allocator gave out during forward and backward of an MLP (256 → 1024 → 256, "
        "512 tokens, column then row) whose input and output are sharded over the tokens: what is gathered "
        "for the first product is kept by torch until the backward pass, by Espalier as its shard.",
        [("layers", "Espalier", "torch", "E / torch")],
    )
    for depth in (1, 4):
        peaks = {library: peak(step_of_mlp(library, mesh, depth)) for library in ("Espalier", "torch")}
        value = peaks["Espalier"] / peaks["torch"]
        section.rows.append((str(depth), *(f"{n / 2**20:.2f} MiB" for n in peaks.values()), shown(value)))
        section.bar(f"{depth} layer(s), over torch's", value, 1.0)
    return section


def step_of_mlp(library: str, mesh: DeviceMesh, depth: int) -> Callable[[], None]:
    """Forward and backward; called once to fill caches and make gradients."""
    x = laid(library, torch.rand(512, 256), mesh, S0)
    ups = [laid(library, torch.rand(1024, 256) / 256, mesh, S0).requires_grad_() for _ in range(depth)]
    downs = [laid(library, torch.rand(256, 1024) / 256, mesh, S1).requires_grad_() for _ in range(depth)]

    def run() -> None:
        h = x
        for up, down in zip(ups, downs, strict=True):
            whole = h if library == "Espalier" else h.redistribute(placements=[R])  # type: ignore[operator]
            out = F.linear(F.gelu(F.linear(whole, up)), down)
            h = h + out.redistribute(placements=[S0])  # type: ignore[operator]
        h.sum().backward()

    run()
    return run


def peak(run: Callable[[], None]) -> int:
    """Most bytes that lived at once, of those allocated in ``run``."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as seen:
        run()
    events = [e for e in seen.profiler.kineto_results.events() if e.name() == "[memory]"]
    now = most = 0
    for event in sorted(events, key=lambda e: e.start_ns()):
        now += event.nbytes()
        most = max(most, now)
    return most


# ---- the first call


def first_call() -> Section:
    """Build the model, lay it out, and run its first step; then nine more."""
    section = Section(
        "First call",
        "The GPT of `espalier demo` on two gloo ranks, batch 16: building it, `initialize` and the first "
        "step (torch's own imports done); the tenth step; and how much of the allowance is used: twice the "
        "tenth, and one second.",
        [("plan", "build + first step", "tenth step", "allowed", "used")],
    )
    for plan in ({"data": 2, "tensor": 1}, {"data": 1, "tensor": 2}):
        first, tenth = espalier.spawn(first_steps, plan, plan)[0]
        allowed = 2 * tenth + 1
        words = " × ".join(f"{k} {v}" for k, v in plan.items())
        section.rows.append((words, *map(duration, (first, tenth, allowed)), f"{first / allowed:.0%}"))
        section.bar(f"{words}: first over allowed", first / allowed, 1.0)
    return section


def first_steps(mesh: espalier.Mesh, plan: dict[str, int]) -> tuple[float, float]:
    """Seconds to build and run the first step, and of the tenth."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    batches = [torch.randint(0, 2048, (16, 129)) for _ in range(10)]
    torch.optim.AdamW([torch.zeros(1)])  # torch's first optimizer imports its compiler, in seconds
    start = time.perf_counter()
    model = GPT(GPTConfig(vocab_size=2048, max_positions=128, layers=4, hidden=128, heads=4, ffn=352))
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    engine = espalier.initialize(model, optimizer, plan, mesh=mesh, max_grad_norm=1.0)
    taken = []
    for ids in batches:
        engine.train_step({"input_ids": ids[:, :-1], "labels": ids[:, 1:]}).item()
        taken.append(time.perf_counter() - start)
        start = time.perf_counter()
    return taken[0], taken[9]


# ---- coverage


def covered() -> Section:
    """How the operators of torch's database end, by library."""
    section = Section(
        "Coverage",
        "Each operator of torch's own test database on two gloo ranks: some of its samples, in float32 and "
        "with float64 gradients, its tensors laid out at random (replicated, sharded on any dim, Partial), "
        "against the plain call. An operator counts by the worst of its calls; those that draw randomly "
        "are left out. *Rule*: carried out where the shards lie. *Fallback*: right, but gathered, or entered "
        "as a composite. *Refused*: an error that says why; for torch any error. *Wrong*: another result; "
        "the process ended or hung; for Espalier also an error where the plain call has none.",
        [("library", "operators", "rule", "fallback", "refused", "wrong")],
    )
    for library in ("Espalier", "torch"):
        ends = list(outcomes(library).values())
        kinds = [("rule",), ("entered", "gathered"), ("refused",), ("wrong", HUNG)]
        counts = [sum(ends.count(word) for word in words) for words in kinds]
        section.rows.append((library, str(len(ends)), *map(str, counts)))
        if library == "Espalier":
            section.bar("wrong operators", counts[3], 0)
            section.bar("refused operators", counts[2], 6)
            section.bar("fallback, as a share of all", counts[1] / len(ends), 0.4)
    return section


# ---- all of it


def main() -> int:
    """Measure, print, perhaps write; 1 if a bar was missed."""
    parser = argparse.ArgumentParser(description="Espalier's DTensor beside torch's.")
    parser.add_argument("--only", nargs="*", metavar="SECTION", help="of: " + ", ".join(SECTIONS))
    parser.add_argument("--write", metavar="FILE", help="a Markdown page of the tables")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    warnings.filterwarnings("ignore", module="torch")
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=2)
    # the fake group has no other rank that could agree: both draw alike
    Seeding.known(Seeding.tag(torch.default_generator)).append(Stream(frozenset({0, 1}), 0, None))
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tensor",))
    sections = []
    for name in asked.only or SECTIONS:
        sections.append(SECTIONS[name](mesh))
        print(sections[-1].text(), flush=True)
    dist.destroy_process_group()
    missed = sum(s.missed for s in sections)
    print(f"{sum(len(s.bars) for s in sections) - missed} of {sum(len(s.bars) for s in sections)} bars hold")
    if asked.write:
        with open(asked.write, "w", encoding="utf-8") as page:
            page.write("\n".join([INTRODUCTION, *(s.markdown() for s in sections)]))
    return 1 if missed else 0


SECTIONS: dict[str, Callable[[DeviceMesh], Section]] = {
    "ops": ops,
    "redistribute": redistribute,
    "optimizer": optimizers,
    "memory": memory,
    "first-call": lambda mesh: first_call(),
    "coverage": lambda mesh: covered(),
}

INTRODUCTION = f"""# Figures

Espalier's DTensor beside torch's ({torch.__version__}), measured in one run by

    python benchmarks/dtensor.py --write docs/figures.md

on two CPU cores, one thread a rank. A dash: torch's DTensor refuses the call.
"""

if __name__ == "__main__":
    sys.exit(main())
