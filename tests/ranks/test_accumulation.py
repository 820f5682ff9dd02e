"""Accumulation and uneven inputs against the same model on one process and the whole batch, in float64."""

from __future__ import annotations

import copy
import gc
import warnings
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier.tensor import DTensor
from tests.ranks.test_engine import TOLERANCE, apart, batch, model, one_step_ledger

pytestmark = pytest.mark.filterwarnings("ignore:A global batch of")
PLANS = [
    {"data": 2},
    {"data": 2, "zero": 2, "offload": {"gradients": "host", "states": "host"}},
    {"data": 2, "zero": 3},
    {"data": 2, "tensor": 2},
    {"data": 2, "tensor": 2, "zero": 3},
]


def uneven(step: int = 0) -> list[dict[str, torch.Tensor]]:
    """Micro-batches of 3, 1 and 4 rows, of which the labels of the second are all ignored."""
    whole = batch(8, step)
    whole["labels"][3] = -100
    whole["labels"][5:, 2:] = -100
    return [{k: v[a:b] for k, v in whole.items()} for a, b in ((0, 3), (3, 4), (4, 8))]


def joined(parts: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    return {k: torch.cat([part[k] for part in parts]) for k in parts[0]}


def by_itself(rank: int, world: int) -> None:
    """One batch where several are expected is one: a pair is not two batches."""
    layer = torch.nn.Linear(3, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    engine = espalier.initialize(
        layer, optimizer, {"data": world, "accumulate": 2}, loss_fn=torch.nn.functional.cross_entropy
    )
    pair = torch.arange(12.0).view(4, 3), torch.tensor([0, 1, 1, 0])
    expected = engine.evaluate([pair])
    with torch.no_grad():
        assert abs(expected.item() - engine(pair).item()) < 1e-6
    assert engine.evaluate(pair) == engine.evaluate(list(pair)) == expected
    before = espalier.full_tensor(layer.weight.detach()).clone()
    engine.accumulate(pair)
    assert engine.step() and engine.evaluate(pair) != expected
    assert not torch.equal(espalier.full_tensor(layer.weight.detach()), before)


def of_a_layer_that_came_later(rank: int, world: int) -> None:
    """Gradients of what a model is given when it is laid out are means over the micro-batches, too."""
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    net, new = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)).double(), nn.Linear(2, 2).double()
    pairs = [(torch.randn(4, 3, dtype=torch.float64), torch.tensor([0, 1, 1, 0])) for _ in range(2)]
    told = []
    for m, layer in ((copy.deepcopy(net), copy.deepcopy(new)), (net, new)):
        model: Any = m
        if m is net:
            sgd = torch.optim.SGD(m.parameters(), lr=0.1)
            model, _ = espalier.prepare(m, sgd, plan={"data": world, "accumulate": 2})
            model(pairs[0][0])
        m.append(layer)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for x, y in pairs:
            loss = F.cross_entropy(model(x), y)
            model.engine.backward(loss) if m is net else (loss / 2).backward()
        optimizer.step()
        told.append([espalier.full_tensor(p).detach() for p in m.parameters()])
    assert all(
        torch.allclose(ours, theirs, rtol=0, atol=TOLERANCE) for ours, theirs in zip(*told, strict=True)
    )


def test_a_batch_by_itself(ranks: Any) -> None:
    ranks(2, of_a_layer_that_came_later)
    ranks(2, by_itself)


def trains(rank: int, world: int, plan: dict[str, Any]) -> None:
    net = model()
    plain = copy.deepcopy(net)
    ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
    engine = espalier.initialize(
        net, ours, {**plan, "accumulate": 3, "chunk_megabytes": 0.02}, max_grad_norm=0.5
    )
    for step in range(3):
        parts = uneven(step)
        expected = plain(**joined(parts)).loss
        expected.backward()
        if step == 0:
            with pytest.raises(ValueError, match="no gradients"):
                engine.step()
            for part in parts:
                engine.backward(engine(part))
            with torch.no_grad():
                engine(parts[0])  # a look
            assert abs(engine.evaluate(parts).item() - expected.item()) < TOLERANCE
            assert engine.evaluate(parts[0]) == engine.evaluate(parts[:1])
            engine.finish_gradients()
            assert apart(net, plain, gradients=True) < TOLERANCE
            assert engine.step()
        elif step == 1:
            done = []
            for part in parts[::-1]:
                engine.backward(engine(part))
                done.append(engine.step())
            assert done == [False, False, True]
        else:
            engine.train_step(joined(parts))
        assert engine.loss is not None and abs(engine.loss.item() - expected.item()) < TOLERANCE
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
        assert engine.grad_norm is not None and abs(engine.grad_norm.item() - norm.item()) < TOLERANCE
        theirs.step()
        theirs.zero_grad()
        assert apart(net, plain, gradients=False) < TOLERANCE


@pytest.mark.parametrize("plan", PLANS, ids=str)
def test_micro_batches_make_the_whole_batch(ranks: Any, plan: dict[str, Any]) -> None:
    ranks(espalier.Plan.from_dict(plan).world_size, trains, plan)


def reduces_once(rank: int, world: int, zero: int) -> int:
    net = model()
    engine = espalier.initialize(net, None, {"data": 2, "zero": zero, "accumulate": 3})
    sent = []
    for part in uneven():
        loss = engine(part)
        with espalier.ledger(engine.mesh) as book:
            engine.backward(loss)
        once = sum(e.bytes for e in book.entries if e.op == "reduce_scatter")
        # what two ranks keep whole goes and comes back in one (small ones are of the batch of one row)
        both = sum(e.bytes for e in book.entries if e.op == "all_reduce" and e.bytes > 10_000)
        sent.append(once + both // 2)
    assert sent[2] > 0
    assert (sent[:2] == [0, 0]) == (zero < 2)
    return sent[2]


def test_only_the_last_reduces_where_the_stage_allows_it(ranks: Any) -> None:
    whole, *cut = ({*ranks(2, reduces_once, zero)} for zero in (0, 1, 2, 3))
    assert cut[0] == cut[1] == cut[2] and len(whole) == len(cut[0]) == 1
    assert max(whole) <= max(cut[0]), "of the flags each rank sends its share"


def labels(part: dict[str, torch.Tensor]) -> int:
    return int((part["labels"] != -100).sum())


@pytest.mark.parametrize("count", [None, labels])
def test_ledger_equals_dry_run(ranks: Any, count: Any) -> None:
    plan = {"data": 2, "tensor": 2, "zero": 3, "accumulate": 3}
    for real, dry in ranks(4, one_step_ledger, "gpt", plan, 7, count):
        assert real == dry


# ---- what a loss is a mean over


class Regression(nn.Module):
    """A model whose loss the test chooses."""

    def __init__(self, loss: Callable[..., Any]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.loss = nn.Linear(3, 4), loss

    def forward(self, x: torch.Tensor, y: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.loss(self.inner(x), y, mask, self.inner.weight)
        return found


def masked(z: Any, y: Any, m: Any, w: Any) -> Any:
    return ((z - y).square().sum(-1) * m).sum() / m.sum().clamp(min=1)


def masked_tokens(z: Any, y: Any, m: Any, w: Any) -> Any:
    losses = F.cross_entropy(z.flatten(0, 0), y.argmax(-1), reduction="none")
    return (losses.view(-1) * m).sum() / m.sum()


def classes(m: Any) -> Any:
    return torch.where(m > 0, 2, -100)


def by_frequency(z: Any, y: Any) -> Any:
    weights = 1 / (torch.bincount(y, minlength=4) + 1)
    return (F.cross_entropy(z, y, reduction="none") * weights[y]).mean()


def by_sums(z: Any, y: Any) -> Any:
    counts = torch.zeros(4, dtype=z.dtype).scatter_add(0, y, torch.ones_like(y, dtype=z.dtype))
    return (F.cross_entropy(z, y, reduction="none") / (1 + counts)[y]).mean()


SEEN: dict[str, Callable[..., Any]] = {
    "mse": lambda z, y, m, w: F.mse_loss(z, y),
    "mean": lambda z, y, m, w: 2 * (z - y).abs().mean() / 3,
    "regularized": lambda z, y, m, w: F.huber_loss(z, y) + 0.1 * w.square().sum(),
    "two": lambda z, y, m, w: F.mse_loss(z, y) - 0.5 * F.l1_loss(z, y, reduction="mean"),
    "sum": lambda z, y, m, w: F.mse_loss(z, y, reduction="sum"),
    "masked": masked,
    "masked alone": lambda z, y, m, w: ((z - y).square().sum(-1) * m).sum() / m.sum(),
    "masked tokens": lambda z, y, m, w: masked_tokens(z, y, m + 1, w),
    "ignored": lambda z, y, m, w: F.cross_entropy(z, classes(m)),
    "smooth": lambda z, y, m, w: nn.CrossEntropyLoss(label_smoothing=0.1)(z, classes(m)),
    "weighted": lambda z, y, m, w: F.cross_entropy(
        z, torch.where(m > 0, y.argmax(-1), -100), torch.arange(1.0, 5.0, dtype=z.dtype)
    ),
    "probabilities": lambda z, y, m, w: F.cross_entropy(z, y.softmax(-1)),
    "nll": lambda z, y, m, w: F.nll_loss(z.log_softmax(-1), classes(m)).float().double(),
    "rows": lambda z, y, m, w: F.multi_margin_loss(z, y.argmax(-1)),
    "kl": lambda z, y, m, w: F.kl_div(z.log_softmax(-1), y.softmax(-1), reduction="batchmean"),
    "composite": lambda z, y, m, w: F.gaussian_nll_loss(z, y, y.square() + 1),
    "weighed apart": lambda z, y, m, w: (
        ((z - y).square().sum(-1) * z[:, 0].exp().detach()).sum() / z[:, 0].exp().detach().sum()
    ),
    "two views": lambda z, y, m, w: F.mse_loss(*torch.cat([z.sin(), y]).chunk(2)),
    "some features": lambda z, y, m, w: F.mse_loss(z[:, 1:], y.narrow(1, 1, 3)),
}
UNSEEN: dict[str, tuple[Callable[..., Any], str]] = {
    "different counts": (lambda z, y, m, w: F.mse_loss(z, y) + F.cross_entropy(z, classes(m)), "adds up"),
    "a divided sum": (lambda z, y, m, w: F.mse_loss(z, y, reduction="sum") / len(z), "met in"),
    "a quotient": (lambda z, y, m, w: z.square().sum() / z.abs().sum(), "met in 'div'"),
    "weighed by itself": (
        lambda z, y, m, w: ((z - y).square().sum(-1) * z[:, 0].exp()).sum() / z[:, 0].exp().sum(),
        "met in 'div'",
    ),
    "normalized": (lambda z, y, m, w: ((z - y).abs().sum(-1) * m / m.mean()).mean(), "met in"),
    "a root": (lambda z, y, m, w: F.mse_loss(z, y).sqrt(), "met in 'sqrt'"),
    "statistics": (lambda z, y, m, w: F.mse_loss(z.mean(0), w.sum(-1)), "met in 'mean'"),
    "a correlation": (lambda z, y, m, w: (z.t() @ y / len(z) - 1).pow(2).sum(), "met in"),
    "its mean": (lambda z, y, m, w: 2 * (z.t() @ y).tanh().diagonal().mean(), "met in"),
    "a contrast": (lambda z, y, m, w: (z @ y.t()).logsumexp(-1).mean(), "met in"),
    "distances": (lambda z, y, m, w: torch.cdist(z, y).amin(-1).mean(), "met in"),
    "a mean of sums": (lambda z, y, m, w: torch.stack([F.l1_loss(z, y), w.sum()]).mean(), "met in 'stack'"),
    "nothing": (lambda z, y, m, w: w.sum(), "own means"),
    "pairs": (lambda z, y, m, w: F.softplus(z.split(4)[0] - y.split(4)[0]).mean(), "met in 'split'"),
    "the first rows": (lambda z, y, m, w: F.mse_loss(z[:3], y[:3]), "met in '__getitem__'"),
    "frequencies": (
        lambda z, y, m, w: F.cross_entropy(
            z, y.argmax(-1), torch.bincount(y.argmax(-1), minlength=4).to(z) + 1
        ),
        "met in",
    ),
    "frequencies of rows": (lambda z, y, m, w: by_frequency(z, y.argmax(-1)), "counts of each class"),
    "frequencies, added up": (lambda z, y, m, w: by_sums(z, y.argmax(-1)), "counts of each class"),
}
# by what Python is told of all labels
ASKED: tuple[Callable[..., Any], ...] = (
    lambda z, y, m, w: F.mse_loss(z, y) * (2 if (y.argmax(-1) == 0).any() else 1),
    lambda z, y, m, w: F.mse_loss(z, y) / m.sum().item(),
    lambda z, y, m, w: F.mse_loss(z, y) / len(y.argmax(-1).unique()),
)
# by what a micro-batch's loss is, or by whether there is anything
TURNS: tuple[Callable[..., Any], ...] = (
    lambda z, y, m, w: F.mse_loss(z, y) if F.mse_loss(z, y) > 0.1 else w.sum(),
    lambda z, y, m, w: F.mse_loss(z, y) if m.sum() >= 0.5 else w.sum(),
    lambda z, y, m, w: F.mse_loss(z, y) if m.sum() > 0 and not F.mse_loss(z, y).isnan() else w.sum(),
)


def numbers() -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(7, n, dtype=torch.float64, generator=generator) for n in (3, 4))
    return x, y, torch.tensor([1.0, 0, 0, 0, 1, 1, 1], dtype=torch.float64)


def sees(rank: int, world: int) -> None:
    for name, loss in SEEN.items():
        for cut in (1, 3):  # of the first, every row is masked in one of them
            net = Regression(loss).double()
            plain = copy.deepcopy(net)
            engine = espalier.initialize(net, None, {"data": world, "accumulate": 2})
            whole = numbers()
            plain(*whole).backward()
            for a, b in ((cut, 4), (4, 7)) if cut == 1 else ((0, 3), (3, 7)):
                engine.backward(engine(tuple(x[a:b] for x in whole)))
            engine.finish_gradients()
            if cut == 1:
                plain.zero_grad()
                plain(*(x[1:] for x in whole)).backward()
            assert apart(net, plain, gradients=True) < (1e-6 if name == "nll" else TOLERANCE), name
    for name, (loss, told) in UNSEEN.items():
        engine = espalier.initialize(Regression(loss).double(), None, {"data": world, "accumulate": 2})
        with pytest.raises(ValueError, match=rf"(?s){told}.*count="):
            engine(numbers())
            raise AssertionError(name)
    for i, loss in enumerate(TURNS):
        engine = espalier.initialize(Regression(loss).double(), None, {"data": world, "accumulate": 2})
        with pytest.warns(UserWarning, match="goes its own way") if i < 2 else nullcontext():
            engine(numbers())
    x, y, m = numbers()
    for i, loss in enumerate(ASKED):
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", message="unique has no sharding rule")
            engine = espalier.initialize(Regression(loss).double(), None, {"data": world, "accumulate": 2})
            with pytest.warns(UserWarning, match="all labels of a micro-batch together") as told:
                engine.accumulate(engine.cut((x, y, m)))
            assert {one.filename for one in told if "together" in str(one.message)} == {__file__}
            engine.finish_gradients()
            engine = espalier.initialize(Regression(loss).double(), None, {"data": world, "accumulate": 2})
            if i < 2:  # what all micro-batches answer alike, the whole batch does
                warnings.filterwarnings("error", message=".*together")
                engine.accumulate(engine.cut((x[:1].repeat(4, 1), y[:1].repeat(4, 1), m[:1].repeat(4))))


@pytest.mark.parametrize("world", [1, 2])
def test_what_a_loss_is_a_mean_over_is_seen_or_refused(ranks: Any, world: int) -> None:
    ranks(world, sees)


def frees(rank: int, world: int) -> None:
    sums = []

    def loss(z: Any, y: Any, m: Any, w: Any) -> Any:
        sums.append(weakref.ref(total := ((z - y).square().sum(-1) * m).sum()))
        return total / m.sum()

    engine = espalier.initialize(Regression(loss).double(), None, {"data": world, "accumulate": 2})
    gc.disable()
    try:
        engine.backward(engine(numbers()))
        assert sums[0]() is None
    finally:
        gc.enable()


def test_what_is_seen_is_not_held(ranks: Any) -> None:
    ranks(2, frees)


def told(rank: int, world: int) -> None:
    for count in (lambda batch: int(batch[2].sum()), lambda batch: (batch[2] > 0).sum(), "sum"):

        def loss(z: Any, y: Any, m: Any, w: Any, count: Any = count) -> Any:
            total = ((z - y).square().sum(-1) * m).sum()
            return total / (4 if count == "sum" else m.sum().item())

        net = Regression(loss).double()
        plain = copy.deepcopy(net)
        engine = espalier.initialize(net, None, {"data": world, "accumulate": 2}, count=count)
        for a, b in ((0, 3), (3, 7)):
            part = tuple(x[a:b] for x in numbers())
            if count != "sum":
                part = tuple(engine.local_batch(x[engine.batch_rows(b - a)], b - a) for x in part)
            engine.backward(engine(part))
        engine.finish_gradients()
        expected = plain(*numbers())
        expected.backward()
        assert apart(net, plain, gradients=True) < TOLERANCE
        assert engine.loss is not None and abs(engine.loss.item() - expected.item()) < TOLERANCE
    with pytest.raises(ValueError, match=r"finished(.|\n)*engine.step"):
        engine.backward(engine(numbers()))
    engine = espalier.initialize(
        Regression(masked).double(), None, {"data": world, "accumulate": 2}, count=lambda batch: 0
    )
    with pytest.raises(ValueError, match="a number above 0"):
        engine(numbers())
    engine = espalier.initialize(Regression(masked).double(), None, {"data": world, "accumulate": 2})
    engine(numbers())
    with pytest.raises(ValueError, match="2 were called"):
        engine.backward(engine(numbers()))
    with pytest.raises(ValueError, match="not clear what a micro-batch is"):
        engine.train_step((*numbers()[:2], torch.ones(3)))


def test_counts_that_are_told(ranks: Any) -> None:
    ranks(2, told)


# ---- uneven and exhausted inputs


def loads(rank: int, world: int, plan: dict[str, Any], shares: list[list[int]]) -> None:
    """Each data rank brings so many rows of a batch; -1 for none any more."""
    net = model()
    plain = copy.deepcopy(net)
    engine = espalier.initialize(net, torch.optim.SGD(net.parameters(), lr=0.1), plan)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    place = [engine.mesh.coordinate[engine.mesh.axis(a)] for a in engine.plan.batch_axes]
    me = place[0] * engine.plan.data + place[1] if len(place) == 2 else place[0]
    for step, share in enumerate(shares):
        have = [max(n, 0) for n in share]
        whole, start = batch(sum(have), step), sum(have[:me])
        whole["flags"] = torch.arange(sum(have)) % 2 == 0
        own = {k: v[start : start + have[me]] for k, v in whole.items()} if share[me] >= 0 else None
        given = engine.local_batch(own)
        if all(n < 0 for n in share):
            assert given is None
            continue
        ids = given["input_ids"]
        assert isinstance(ids, DTensor) and ids._layout.local_shape[0] == ids.to_local().shape[0]
        rows = sorted(ids.full_tensor().tolist())
        assert rows == sorted(whole["input_ids"].tolist())
        assert int(given.pop("flags").sum()) == int(whole.pop("flags").sum())
        if len(place) == 1:
            assert ids.full_tensor().tolist() == whole["input_ids"].tolist(), "in the order of the ranks"
        expected = plain(**whole).loss
        expected.backward()
        assert abs(engine.train_step(given).item() - expected.item()) < TOLERANCE
        theirs.step()
        theirs.zero_grad()
        assert apart(net, plain, gradients=False) < TOLERANCE


@pytest.mark.parametrize(
    ("plan", "shares"),
    [
        ({"data": 2}, [[3, 3], [5, 2], [4, -1], [-1, -1]]),
        ({"data": 2, "tensor": 2, "zero": 3, "accumulate": 2}, [[2, 3], [0, 5], [-1, 1], [-1, -1]]),
        ({"data": 2, "replicate": 2}, [[2, 2, 2, 2], [5, 0, 1, 3], [-1, 7, -1, 2], [-1] * 4]),
    ],
    ids=str,
)
def test_ranks_that_load_unevenly(ranks: Any, plan: dict[str, Any], shares: list[list[int]]) -> None:
    ranks(espalier.Plan.from_dict(plan).world_size, loads, plan, shares)


def misfits(rank: int, world: int) -> None:
    net = model()
    engine = espalier.initialize(net, None, {"data": 2, "tensor": 2})
    with espalier.ledger(engine.mesh) as book:
        engine.local_batch(batch(3))
    assert sum(e.bytes for e in book.entries) == 48 and len(book.entries) == 2
    data, tensor = engine.mesh.coordinate
    with pytest.raises(ValueError, match=r"(?s)rank 0: .*\(2, 7\).*rank 3: .*\(2, 8\).*pad to one length"):
        engine.local_batch({"x": torch.ones(2, 7 + data)})
    with pytest.raises(ValueError, match=r"(?s)rank 0: .*float32.*rank 2: .*float64"):
        engine.local_batch(torch.ones(2, dtype=torch.float64 if data else torch.float32))
    with pytest.raises(
        ValueError, match=r"(?s)rank 0: \{'a': \(2,\), 'b': \(2,\).*rank 3: \{'a': \(2,\), 'b': \(1,"
    ):
        engine.local_batch({"a": torch.ones(2), "b": torch.ones(1 if rank == 3 else 2)})
    with pytest.raises(ValueError, match=r"(?s)rank 0: no rows left.*rank 1: .*\(3, 2\)"):
        engine.local_batch(None if tensor == 0 else torch.ones(3, 2))


def test_batches_that_do_not_fit_are_told_on_all_ranks(ranks: Any) -> None:
    ranks(4, misfits)


def loaded_between(rank: int, world: int, zero: int) -> None:
    torch.manual_seed(0)
    net = torch.nn.Sequential(torch.nn.Linear(6, 4), torch.nn.Tanh(), torch.nn.Linear(4, 2)).double()
    plain = copy.deepcopy(net)
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1, momentum=0.9)
    ours, sgd = espalier.prepare(
        net,
        torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9),
        plan={"data": 2, "zero": zero, "accumulate": 2},
    )
    for i in range(6):
        x = torch.randn(4, 6, dtype=torch.float64)
        loss, expected = ours(x).square().mean(), plain(x).square().mean()
        ours.engine.backward(loss)
        ours.engine.step()
        (expected / 2).backward()
        if i % 2:
            theirs.step()
            theirs.zero_grad()
        assert abs(loss.item() - expected.item()) < TOLERANCE
        if i != 3:  # between the micro-batches of a step, and after one
            for m in (ours, plain):
                m.load_state_dict({name: 0.5 * value for name, value in m.state_dict().items()})
    found = ours.state_dict()
    assert all((found[name] - value).abs().max() < TOLERANCE for name, value in plain.state_dict().items())
    for i in range(5):  # passes of which no step is made
        for m, optimizer in ((ours, sgd), (plain, theirs)):
            if i == 3:
                for p in m.parameters():
                    p.grad.data.zero_()  # type: ignore[union-attr]
            else:
                optimizer.zero_grad(set_to_none=i % 2 == 0)
            (m(x * (i + 1)).square().mean()).backward()
        gradients = ours.engine.full_gradients()
        assert all(torch.allclose(gradients[n], p.grad) for n, p in plain.named_parameters()), i


@pytest.mark.parametrize("zero", [1, 3])
def test_weights_loaded_between_micro_batches(ranks: Any, zero: int) -> None:
    ranks(2, loaded_between, zero)


def ragged(rank: int, world: int, zero: int) -> None:
    net = model()
    plain = copy.deepcopy(net)
    engine = espalier.initialize(
        net, torch.optim.SGD(net.parameters(), lr=0.1), {"data": 4, "zero": zero, "accumulate": 2}
    )
    theirs = torch.optim.SGD(plain.parameters(), lr=0.1)
    for rows in (3, 1, 6):
        data = batch(rows, rows)
        expected = plain(**data).loss
        expected.backward()
        with pytest.warns(UserWarning, match="without work"):
            assert abs(engine.train_step(data).item() - expected.item()) < TOLERANCE
        theirs.step()
        theirs.zero_grad()
        assert apart(net, plain, gradients=False) < TOLERANCE


@pytest.mark.parametrize("zero", [0, 3])
def test_batches_smaller_than_the_plan(ranks: Any, zero: int) -> None:
    ranks(4, ragged, zero)


# ---- the engine's tables


def tells(rank: int, world: int, plan: dict[str, Any]) -> None:
    net = model().float()
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), {"prefetch_megabytes": 0, **plan})
    with pytest.raises(ValueError, match="No step was recorded"):
        engine.ledger()
    books = []
    for step in range(4):
        with espalier.ledger(engine.mesh) as book:
            engine.backward(engine(batch(4, step)))
            engine.finish_gradients()
            during = engine.memory()
            engine.step()
        books.append(engine.ledger())
        assert engine.ledger() == book and not engine.mesh.ledgers
    assert books[0] is not books[1] and books[1] is books[2] is books[3]
    with engine.recording():
        engine.train_step(batch(4))
    assert engine.ledger() is not books[3]
    n, zero = plan["data"], plan.get("zero", 0)
    data = engine._data
    assert data is not None
    whole = 4 * sum(m.size for m in data.members)
    after = engine.memory()
    for kind, times, least in (("parameters", 1, 3), ("gradients", 1, 2), ("states", 2, 1)):
        cut = n if zero >= least else 1
        found = during[kind] if kind == "gradients" else after[kind]
        assert found.formula == times * whole // cut
        if kind == "gradients" and zero == 1:
            continue  # whole addends until they are sent, pieces then
        assert 0.98 * found.formula <= found.total <= 1.05 * found.formula + 256, (kind, found)
    assert after["gradients"].total == 0
    told = str(after)
    assert told.splitlines()[1].split() == ["bytes", "on", "this", "rank", "cpu", "formula"]
    assert f"{after['states'].total:,}" in told and "host" not in told
    order = engine.order()
    names = [name for name, _ in net.named_parameters()]
    sums = [name for moved in order if moved.what == "sum gradients" for name in moved.parameters]
    assert sorted(sums) == sorted(names)
    gathers = [moved.parameters for moved in order if moved.what == "gather for forward"]
    assert (sorted(name for g in gathers for name in g) == sorted(names)) if zero == 3 else not gathers
    assert len(str(order).splitlines()) == len(order) + 1 and "sum gradients" in str(order)


@pytest.mark.parametrize(
    "plan", [{"data": 2}, {"data": 2, "zero": 1}, {"data": 2, "tensor": 2, "zero": 3}], ids=str
)
def test_the_engines_tables(ranks: Any, plan: dict[str, Any]) -> None:
    ranks(espalier.Plan.from_dict(plan).world_size, tells, plan)


def places(rank: int, world: int) -> None:
    net = model().float()
    plan = {"data": 2, "zero": 2, "precision": "bfloat16", "offload": {"states": "host"}}
    engine = espalier.initialize(net, torch.optim.AdamW(net.parameters()), plan)
    engine.train_step(batch(4))
    found = engine.memory()
    for name, itemsize in (("parameters", 4), ("masters", 4), ("states", 8)):
        kind = found[name]  # two bytes for each parameter; four, and eight, for each of the half of them
        pads = len(list(net.parameters())) * 32 * itemsize  # each fills its last vector of 64 bytes
        assert kind.formula is not None and kind.formula <= kind.total <= kind.formula + pads
        assert kind.bytes["host"] == (0 if name == "parameters" else kind.total)
        assert kind.formula * 2 == itemsize * sum(p.numel() for p in net.parameters())
    assert "host" in str(found).splitlines()[1] and "disk" not in str(found)


def test_the_table_of_memory_tells_places_apart(ranks: Any) -> None:
    ranks(2, places)
