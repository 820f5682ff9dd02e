"""What a rank does by itself, while the others do the same: products, attention, what memory bounds.

Ranks of one machine share its memory: what one does alone is faster than what it does in a run.
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch.nn.functional import scaled_dot_product_attention

from espalier.comm.collectives import all_reduce
from espalier.device import copy_by, host_buffer, host_threads, is_accelerator, new_stream, pins, total_memory
from espalier.mesh import Mesh
from espalier.planner.calibrate.timing import level, timed, together
from espalier.planner.recording import noted
from espalier.texts import dtype_name
from espalier.torch_private import foreach_copy_, foreach_mul_, foreach_norms

Run = Callable[[], object]


class Sizes(NamedTuple):
    """What is measured of a device.

    Attributes:
        products: sides of matrices.
        sequences, widths, heads: of attention.
        elements: of operations that memory bounds.
        parameters: that are updated at once, and are in no cache.
        cold: bytes of operands that are used in turn, so that they are in no near cache.
    """

    products: tuple[int, ...]
    sequences: tuple[int, ...]
    widths: tuple[int, ...]
    heads: int
    elements: tuple[int, ...]
    parameters: int
    cold: int


ON_CPU = Sizes(
    (16, 64, 256, 1024),
    (16, 128, 512, 1024),
    (16, 64, 128),
    4,
    (2**6, 2**12, 2**15, 2**18, 2**21),
    2**23,
    2**23,
)
ON_ACCELERATOR = Sizes(
    (64, 512, 2048, 8192),
    (128, 512, 2048, 8192),
    (64, 128),
    16,
    (2**10, 2**14, 2**18, 2**22, 2**26),
    2**26,
    2**27,
)
_COLUMNS = 64  # of what is added up or made even along rows
_VOCABULARY = 512
_ROUNDS, _EACH = 2, 0.006  # in each, seconds for one size
_MOST_SETS = 12  # of operands
_COPIED = 2**26  # bytes that go between a host and a device, each way
_UPDATED, _TIMES = 2**23, 5  # parameters that a host updates for a device, and how often it is timed


def sizes_of(device: torch.device) -> Sizes:
    """What is measured of a device."""
    return ON_ACCELERATOR if is_accelerator(device) else ON_CPU


def products(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[tuple[float, ...], float]]:
    """Rows of m, n, k and 10^9 operations a second, each with its spread.

    A forward product and the two of its backward pass lie otherwise in memory: the mean of the three.
    """
    sizes = sizes_of(device)
    for m, n, k in itertools.product(sizes.products, repeat=3):
        sets = [
            [torch.randn(shape, dtype=dtype, device=device) for shape in ((m, k), (n, k), (m, n))]
            for _ in range(_sets(4 * (m * k + n * k + m * n), sizes))
        ]
        kinds: tuple[Callable[..., object], ...] = (
            lambda x, w, g: x @ w.t(),
            lambda x, w, g: g @ w,
            lambda x, w, g: g.t() @ x,
        )
        took = [timed([partial(kind, *operands) for operands in sets], _EACH, device) for kind in kinds]
        rate = 6e-9 * m * n * k / sum(x.seconds for x in took)
        yield (float(m), float(n), float(k), rate), statistics.median(x.spread for x in took)


def _sets(nbytes: int, sizes: Sizes) -> int:
    """How many sets of operands there are in turn, so that they are not all in a core's own cache."""
    return max(1, min(_MOST_SETS, sizes.cold // nbytes))


def attentions(dtype: torch.dtype, device: torch.device) -> Iterator[tuple[tuple[float, ...], float]]:
    """Rows of sequence, width, and 10^9 operations a second of causal attention and of its backward pass."""
    sizes = sizes_of(device)
    for sequence, width in itertools.product(sizes.sequences, sizes.widths):
        shape = 1, sizes.heads, sequence, width
        q, k, v = (torch.randn(shape, dtype=dtype, device=device, requires_grad=True) for _ in range(3))
        out = scaled_dot_product_attention(q, k, v, is_causal=True)
        seed = torch.ones_like(out)

        def forward(q: Any = q, k: Any = k, v: Any = v) -> None:
            with torch.no_grad():
                scaled_dot_product_attention(q, k, v, is_causal=True)

        def backward(out: Any = out, inputs: Any = (q, k, v), seed: Any = seed) -> None:
            torch.autograd.grad(out, inputs, seed, retain_graph=True)

        done = timed([forward], _EACH, device), timed([backward], _EACH, device)
        flops = [sum(op.flops for op in noted(run) if op.kind == "attention") for run in (forward, backward)]
        rates = [1e-9 * n / took.seconds for n, took in zip(flops, done, strict=True)]
        if all(rates):  # this device's attention is one operation
            yield (float(sequence), float(width), *rates), max(took.spread for took in done)


def operations(device: torch.device) -> Iterator[tuple[str, tuple[float, float], float]]:
    """By name, bytes read and written, and microseconds; each with its spread."""
    sizes = sizes_of(device)
    for elements in sizes.elements:
        samples = (_samples(elements, device) for _ in range(_sets(12 * elements, sizes)))
        for runs in zip(*samples, strict=True):
            op = max(noted(runs[0]), key=lambda op: op.moved)
            took = timed(runs, _EACH / 2, device)
            yield op.name, (float(op.moved), took.seconds * 1e6), took.spread
    for run in _updates(sizes.parameters, device):
        op = max(noted(run), key=lambda op: op.moved)
        took = timed([run], _EACH, device)
        yield op.name, (float(op.moved), took.seconds * 1e6), took.spread


def _samples(n: int, device: torch.device) -> Iterator[Run]:
    """Operations on so many elements each, on warm memory: what is fresh measures the system's pages."""
    aten, columns = torch.ops.aten, min(n, _COLUMNS)
    a, b, c = (torch.rand(n // columns, columns, device=device) + 0.1 for _ in range(3))
    row, column = torch.rand(columns, device=device), torch.rand(n // columns, 1, device=device)
    narrow, half = a.bfloat16(), columns // 2
    yield from (
        lambda: a + b,
        lambda: a * b,
        lambda: a * column,  # a norm's, along rows and along columns
        lambda: a * row,
        lambda: a / b,
        lambda: a - b,
        lambda: -a,
        lambda: a.pow(2),
        lambda: a.rsqrt(),
        lambda: a.exp(),
        lambda: c.copy_(a),
        lambda: a.clone(),
        lambda: narrow.float(),
        lambda: torch.cat((a[:, half:], a[:, :half]), -1),  # as positions turn heads
        lambda: a.mean(-1, keepdim=True),
        lambda: a.sum(0),
        lambda: a.amax(-1),
        lambda: c.zero_(),
        lambda: a.masked_fill(a > 0.5, 0.0),
        lambda: aten.gelu(a),
        lambda: aten.gelu_backward(a, b),
        lambda: aten.silu(a),
        lambda: aten.silu_backward(a, b),
        lambda: aten.native_dropout(a, 0.1, True),
        lambda: aten._softmax(a, -1, False),
        lambda: aten._softmax_backward_data(a, b, -1, torch.float32),
        lambda: aten.native_layer_norm(a, [columns], row, row, 1e-5),
        lambda: aten.native_layer_norm_backward(
            a, b, [columns], column, column, row, row, [True, True, True]
        ),
    )
    yield from _losses(n, device)
    yield from _updates(n, device)


def _losses(n: int, device: torch.device) -> Iterator[Run]:
    """Those of a vocabulary: looking tokens up, and the loss."""
    aten, wide = torch.ops.aten, min(n, _VOCABULARY)
    scores = torch.randn(max(1, n // wide), wide, device=device)
    tokens, targets = (torch.randint(wide, (len(scores),), device=device) for _ in range(2))
    logs, total = scores.log_softmax(-1), torch.tensor(float(len(scores)), device=device)
    seed, table = torch.ones((), device=device), torch.randn(wide, _COLUMNS, device=device)
    looked = torch.randint(wide, (max(1, n // _COLUMNS),), device=device)
    gradient = torch.randn(len(looked), _COLUMNS, device=device)
    yield lambda: aten._log_softmax(scores, -1, False)
    yield lambda: aten._log_softmax_backward_data(logs, logs, -1, torch.float32)
    yield lambda: aten.nll_loss_forward(logs, targets, None, 1, -100)
    yield lambda: aten.nll_loss_backward(seed, logs, targets, None, 1, -100, total)
    yield lambda: aten.embedding(table, looked)
    yield lambda: aten.embedding_dense_backward(gradient, looked, wide, -1, False)
    yield lambda: scores.gather(-1, tokens[:, None])


def _updates(n: int, device: torch.device) -> Iterator[Run]:
    """Those of an optimizer and of its gradients' buffers."""
    aten = torch.ops.aten
    p, g, mean, square = (torch.rand(n, device=device) for _ in range(4))
    step = torch.ones((), device=device)
    numbers = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.95, "weight_decay": 0.1, "eps": 1e-8}
    flags = {"amsgrad": False, "maximize": False}
    yield lambda: aten._fused_adamw_([p], [g], [mean], [square], [], [step], **numbers, **flags)
    yield lambda: foreach_norms([p])
    yield lambda: foreach_mul_([p], 1.0)
    yield lambda: foreach_copy_([p], [g])


def alone(mesh: Mesh, dtypes: Sequence[torch.dtype], say: Callable[[str], object]) -> dict[str, Any]:
    """All of it, in rounds, of which each figure is the quietest's; spreads stand under ``"spreads"``."""
    rounds = []
    for i in range(1, _ROUNDS + 1):
        rounds.append(_round(mesh, dtypes, partial(_say_of, say, i)))
    measured: dict[str, Any] = {}
    for kind, quickest in (("products", _fastest), ("attentions", _fastest), ("operations", _shortest)):
        of_kind = [x[kind] for x in rounds]
        measured[kind] = {
            name: [quickest(points) for points in zip(*(x[name] for x in of_kind), strict=True)]
            for name in of_kind[0]
        }
    spreads = [x["spreads"] for x in rounds]
    measured["spreads"] = {kind: list(itertools.chain(*(x[kind] for x in spreads))) for kind in spreads[0]}
    return measured


def _say_of(say: Callable[[str], object], number: int, text: str) -> None:
    say(f"{text}, round {number} of {_ROUNDS}")


def _fastest(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Of points that end in a rate."""
    return max(points, key=lambda point: point[-1])


def _shortest(points: Sequence[tuple[float, ...]]) -> tuple[float, ...]:
    """Of points that end in a time."""
    return min(points, key=lambda point: point[-1])


def _round(mesh: Mesh, dtypes: Sequence[torch.dtype], say: Callable[[str], object]) -> dict[str, Any]:
    """All of it, once."""
    device = mesh.device()
    shapes = len(sizes_of(device).products) ** 3
    measured: dict[str, Any] = {"products": {}, "attentions": {}, "operations": {}, "spreads": {}}

    def keep(kind: str, name: str, rows: Any) -> None:
        level(mesh)
        points = list(rows)
        if points:
            measured[kind][name] = [row for row, _ in points]
            measured["spreads"].setdefault(kind, []).extend(spread for _, spread in points)

    for dtype in dtypes:
        name = dtype_name(dtype)
        say(f"matrix products in {name}: {shapes} shapes")
        keep("products", name, products(dtype, device))
        say(f"attention in {name}")
        keep("attentions", name, attentions(dtype, device))
    say("operations that memory bounds")
    level(mesh)
    for name, point, spread in operations(device):
        measured["operations"].setdefault(name, []).append(point)
        measured["spreads"].setdefault("operations", []).append(spread)
    return measured


# ---- an accelerator's host


def beside_host(mesh: Mesh) -> dict[str, float]:
    """Of an accelerator and its host, while all others' do the same: 10^9 bytes a second.

    Copies go both ways at once, from and to pinned memory by a stream each, as offload's do; the host updates
    parameters with this rank's share of its cores.
    """
    device, cpu = mesh.device(), torch.device("cpu")
    host = [host_buffer([_COPIED], torch.uint8, pin=pins(device)).zero_() for _ in range(2)]
    there = [torch.zeros(_COPIED, dtype=torch.uint8, device=device) for _ in range(2)]
    down, up = new_stream(device), new_stream(device)

    def both_ways() -> None:
        ends = (
            copy_by(down, [(host[0], there[0])], device),
            copy_by(up, [(there[1], host[1])], device),
        )
        for end in ends:
            if end is not None:
                end.synchronize()

    copied = together(both_ways, _TIMES, mesh)
    update = next(_updates(_UPDATED, cpu))
    moved = max(op.moved for op in noted(update))
    with host_threads():
        updated = together(update, _TIMES, mesh)
    slowest = all_reduce(torch.tensor([copied.seconds, updated.seconds]), mesh, 0, "max").tolist()
    return {
        "to_device_gbs": _COPIED / slowest[0] / 1e9,
        "update_gbs": mesh.size() * moved / slowest[1] / 1e9,
        "memory": float(total_memory(device)),
        "spread": max(copied.spread, updated.spread),
    }
