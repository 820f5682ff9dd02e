"""What models remember of their forwards beside parameters: in stages of a pipeline as on one process."""

from __future__ import annotations

import copy
import random
import warnings
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.comm.control import gather_objects
from espalier.engine import stage_draws
from espalier.parallel.compose import UndividedWarning
from espalier.parallel.pipeline import remembered

TOLERANCE = 1e-10


class Net(nn.Module):
    """Four layers, of which the two in the middle may remember something."""

    def __init__(self, kind: Callable[[], nn.Module] = lambda: nn.Linear(8, 8)) -> None:
        super().__init__()
        self.enter, self.b, self.c, self.out = nn.Linear(6, 8), kind(), kind(), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.out(self.c(self.b(torch.tanh(self.enter(x)))))


class Layer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.l = nn.Linear(8, 8)


class Rebinds(Layer):
    """A load that is bound anew, a count, a list, a tensor that is written to, an average that comes late."""

    load: Any
    none: Any
    mean: Any

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(8))
        self.register_buffer("none", None)
        self.calls, self.seen, self.kept = 0, [torch.zeros(8)], torch.zeros(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(8))
        out = torch.tanh(self.l(x) - 0.1 * self.load - 0.1 * self.mean + 0.1 * self.seen[-1] + self.kept)
        if self.training:
            self.load = self.load + out.detach().square().mean(0)
            self.none = self.load if self.none is None else 0.5 * self.none
            self.seen.append(out.detach().mean(0))
            self.kept.mul_(0.9).add_(0.1 * self.seen[-1])
            with torch.no_grad():
                self.mean.lerp_(out.mean(0), 0.3)
        return out * (1 + 0.1 * self.calls)


class Cell(Layer):
    """Its class knows all that there are."""

    instances: ClassVar[list[Any]] = []

    def __init__(self) -> None:
        super().__init__()
        self.h: Any = None
        Cell.instances = [*Cell.instances[-1:], self]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.tanh(self.l(x) + (0 if self.h is None else self.h))
        self.h = x.detach()
        return x


class Codebook(Layer):
    """Follows what it quantizes; begins with what comes first."""

    done: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.book = nn.Parameter(torch.randn(5, 8), requires_grad=False)
        self.shift = nn.Parameter(torch.zeros(8))
        self.register_buffer("done", torch.tensor(0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = self.l(x)
        with torch.no_grad():
            if self.training and self.done.item() == 0:
                self.shift.copy_(-z.mean(0))
                self.done.fill_(1)
            near = F.one_hot(torch.cdist(z, self.book).argmin(-1), 5).to(z.dtype)
            if self.training:
                self.book.mul_(0.9).add_(0.1 * (near.T @ z))
        return 0.5 * z + 0.5 * (near @ self.book) + self.shift


class Recurrent(nn.Module):
    """Cannot be divided, and goes on from what it found last."""

    load: Any

    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(6, 8, batch_first=True), nn.Linear(8, 4)
        self.h: Any = None
        self.register_buffer("load", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, h = self.rnn(x[:, None], self.h)
        self.h = tuple(part.detach() for part in h)
        self.load = self.load + out.detach().mean((0, 1))
        return self.head(out[:, 0] - 0.01 * self.load)


class Counts(Net):
    """Every second call goes another way."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = torch.tanh(self.enter(x))
        return self.out(self.c(torch.tanh(self.b(x)) if self.calls % 2 else x))


class First(Net):
    """The first call alone is another."""

    def __init__(self) -> None:
        super().__init__()
        self.is_new = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.is_new:
            self.is_new = False
            return 2 * x
        return x


class Tempered(Net):
    """Is told a temperature by the program, which also registers a scale late."""

    def __init__(self) -> None:
        super().__init__()
        self.temperature = 1.0

    def forward(self, x: Any) -> torch.Tensor:
        x = self.c(torch.tanh(self.b(torch.tanh(self.enter(x)))))
        return self.out(x * self.b.scale if hasattr(self.b, "scale") else x) / self.temperature


class Projects(Layer):
    """Draws a projection the first time, and noise each time."""

    def __init__(self) -> None:
        super().__init__()
        self.projection: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.projection is None:
            self.projection = torch.randn(8, 8)
        out = self.l(x) @ self.projection
        return torch.tanh(out + 0.1 * torch.rand_like(x) if self.training else out)


class Rejects(Layer):
    """Draws as many numbers as values say: of what it computes, and of a prior."""

    def __init__(self) -> None:
        super().__init__()
        self.prior = torch.full((8,), 0.7)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        z = F.softplus(self.l(x)) + 0.1
        if not self.training:
            return z
        shares = torch.distributions.Dirichlet(z, validate_args=False).rsample()
        parts = torch.distributions.Gamma(z, 1 + z, validate_args=False).rsample()
        return torch.tanh(
            shares + parts + torch.distributions.Gamma(self.prior, 1.0).sample() + torch.rand(8)
        )


class Normalizes(Net):
    """Is divided, and goes by what it has seen first: of the batch, and of its sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.mean: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.mean is None:
            self.mean, self.sizes = x.mean(0), tuple(x.shape)
            self.register_buffer("mask", torch.linspace(0, 1, x.shape[-1]))
        x = self.b(torch.tanh(self.enter((x - self.mean) * self.mask)))
        return self.out(self.c(torch.tanh(x)) * self.sizes[-1])


class Shares(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.state = {"n": 0}

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.state["n"] += 1
        return torch.tanh(self.l(x)) * (1 + 0.1 * self.state["n"])


class Shared(Net):
    """Two layers that change one dict."""

    def __init__(self) -> None:
        super().__init__(Shares)
        vars(self.c)["state"] = vars(self.b)["state"]


class Collects(Layer):
    """Writes to buffers, one of which has a name for a part of it, and to all kinds of containers."""

    load: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(8)
        self.register_buffer("load", torch.zeros(4, 8))
        self.row = self.load[1]
        self.counted: Counter[str] = Counter()
        self.by_name: dict[str, float] = defaultdict(float)
        self.ordered: OrderedDict[int, int] = OrderedDict()
        self.last: deque[int] = deque(maxlen=2)
        self.array = np.zeros(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.norm(self.l(x)) + 0.1 * self.row + 0.01 * self.counted["calls"])
        self.counted["calls"] += 1
        self.by_name["x"] += 1.5
        self.ordered[self.counted["calls"]] = len(self.ordered)
        self.last.append(len(self.ordered))
        self.array[1] += 0.5
        if self.training:
            with torch.no_grad():
                self.load[self.counted["calls"] % 2].lerp_(out.mean(0), 0.5)
        return out * (1 + self.by_name["x"] + float(self.array.sum()))

    def collected(self) -> list[Any]:
        """What is in them."""
        dicts = [*self.counted.values(), *self.by_name.values(), *self.ordered, *self.ordered.values()]
        return [*dicts, *self.last, *self.array, self.row]


class Noisy(Layer):
    """Draws from generators of its own, or of another layer."""

    def __init__(self) -> None:
        super().__init__()
        self.torchs, self.numpys = torch.Generator().manual_seed(3), np.random.default_rng(3)
        self.pythons = random.Random(3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        noise = torch.randn(8, generator=self.torchs) + torch.from_numpy(self.numpys.normal(size=8))
        return torch.tanh(self.l(x)) + 0.1 * (noise + self.pythons.random())

    def drawn(self) -> list[Any]:
        """What they draw next, of copies."""
        of_torch, of_numpy, of_python = copy.deepcopy((self.torchs, self.numpys, self.pythons))
        return [torch.rand((), generator=of_torch), of_numpy.random(), of_python.random()]


class Alike(Net):
    """Two layers draw from the same generators."""

    def __init__(self) -> None:
        super().__init__(Noisy)
        for key in ("torchs", "numpys", "pythons"):
            setattr(self.c, key, getattr(self.b, key))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "noisy": lambda: Net(Noisy),
    "noisy alike": Alike,
    "collects": lambda: Net(Collects),
    "rebinds": lambda: Net(Rebinds),
    "cell": lambda: Net(Cell),
    "codebook": lambda: Net(Codebook),
    "recurrent": Recurrent,
    "counts": Counts,
    "first": First,
    "tempered": Tempered,
    "shared": Shared,
    "normalizes": Normalizes,
    "projects": lambda: Net(Projects),
    "rejects": lambda: Net(Rejects),
}
WHOLE = {"recurrent", "counts", "first"}  # which cannot be divided
OF_ROWS = {"cell", "recurrent"}  # remember rows: a micro-batch's are others
LAID_OUT = {"rebinds", "cell", "codebook", "rejects"}  # whose layers are cut, or draw, under tensor
DRAWING = {"projects", "rejects"}  # of keys: one process is one of the library's


def batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(8, 6, generator=generator), torch.randint(0, 4, (8,), generator=generator)


def followed(kind: str, plan: dict[str, Any] | None, folder: Path, parts: int = 1) -> list[Any]:
    """Losses, asked for before and after backward or not; evaluations; state dicts; what modules remember."""
    torch.manual_seed(0)
    model: Any = MODELS[kind]()
    optimizer = torch.optim.SGD(model.parameters(), 0.2, momentum=0.9)
    given = model
    if plan is not None:
        options: dict[str, Any] = {"count": lambda rows: 8 // parts} if parts > 1 else {}
        given, optimizer = espalier.prepare(model, optimizer, plan=plan, **options)
    out: list[Any] = []
    for step in range(4):
        if kind == "tempered":
            given.temperature = 1.0 + step // 2
            if step == 2:
                model.b.register_buffer("scale", torch.full((8,), 1.5))
        x, y = batch(step)
        optimizer.zero_grad()
        if plan is None or "pipe" not in plan:
            total = 0.0
            for some, labels in zip(x.chunk(parts), y.chunk(parts), strict=True):
                loss = F.cross_entropy(given(some), labels) / parts
                loss.backward()
                total += loss.item()
            out.append(total)
        else:
            loss = F.cross_entropy(given(x), y)
            if step % 2 == 0:
                before = loss.item()
            loss.backward()
            out.append(loss.item())
            assert step % 2 or abs(before - out[-1]) < TOLERANCE
        optimizer.step()
        if step < 2:
            given.eval()
            with torch.no_grad():
                out.append(given(batch(50)[0]))
            given.train()
        if step == 2 and plan is not None:
            given.engine.save(folder)
            given.engine.load(folder)
    given.eval()
    with torch.no_grad():
        out.append(given(batch(51)[0]))
    out += [x for _, x in sorted(given.state_dict().items())]
    out += list(model.buffers())
    for module in model.modules():
        found = vars(module)
        out += module.collected() if isinstance(module, Collects) else ()
        out += module.drawn() if isinstance(module, Noisy) else ()
        out += [found[key] for key in ("calls", "kept", "projection", "mean") if key in found]
        out += found.get("seen", ())
        h = found.get("h")
        out += list(h) if isinstance(h, tuple) else [] if h is None else [h]
    return [espalier.full_tensor(torch.as_tensor(x)).detach().flatten().double().clone() for x in out]


def compared(rank: int, world: int, plans: list[dict[str, Any]], folder: Path) -> None:
    for plan in plans:
        parts = plan.get("accumulate", 1)
        for kind in MODELS:
            if (parts > 1 and kind in OF_ROWS) or ("tensor" in plan and kind not in LAID_OUT):
                continue
            alone = {"data": world} if kind in DRAWING else None
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                expected = followed(kind, alone, folder / f"{kind}alone", parts)
                given = followed(kind, plan, folder / f"{kind}{plans.index(plan)}", parts)
            assert (kind in WHOLE) == any(w.category is UndividedWarning for w in caught), kind
            assert len(given) == len(expected), kind
            for i, (a, b) in enumerate(zip(given, expected, strict=True)):
                assert a.shape == b.shape and (a - b).abs().max() < TOLERANCE, f"{kind} under {plan}: {i}"


def in_float64(rank: int, world: int, plans: list[dict[str, Any]], folder: Path) -> None:
    torch.set_default_dtype(torch.float64)
    try:
        compared(rank, world, plans, folder)
        if world == 2:
            told_of_what_the_loss_hangs_on()
            told_of_what_is_asked_too_early()
            told_as_tensors()
            told_of_what_is_slow_or_other()
    finally:
        torch.set_default_dtype(torch.float32)


class Routed(Layer):
    def __init__(self) -> None:
        super().__init__()
        self.aux: Any = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.l(x))
        self.aux = out.square().mean()
        return out


def told_of_what_the_loss_hangs_on() -> None:
    """A loss of what modules keep would take what the last step has left there."""
    model: Any = Net(Routed)
    given, _ = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan={"pipe": 2})
    x, y = batch(0)
    loss = F.cross_entropy(given(x), y)
    for _ in range(2):
        with pytest.raises(ValueError, match=r"b\.aux is set by the model's forward"):
            0.1 * model.b.aux
        with pytest.raises(ValueError, match=r"b\.aux is set by the model's forward"):
            (loss + model.b.aux).backward()
        with pytest.raises(ValueError, match=r"c\.aux is set by the model's forward"):
            sum([model.c.aux, model.b.aux])
        assert loss.item() > 0
    loss.backward()
    assert model.b.aux > 0 and model.c.aux > 0


class Buffers(Layer):
    """A count, and a buffer that is bound anew."""

    load: torch.Tensor
    calls = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("load", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        self.load = self.load + x.detach().mean(0)
        return torch.tanh(self.l(x))


def told_of_what_is_asked_too_early() -> None:
    """Who asks for a number between the call and backward gets that of the step before, and is told once."""
    model: Any = Net(Buffers)
    plan = {"pipe": 2, "cuts": ("c",)}
    given, _ = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    x, y = batch(0)
    said, seen = [], []
    for step in range(4):
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            loss = F.cross_entropy(given(x), y)
            if step == 1:
                seen.append((model.b.calls, float(model.c.load.sum()), Buffers.calls))
            if step == 2:
                seen.append((model.b.calls, "calls" in vars(model.c), hasattr(Buffers, "load")))
            if step == 3:
                model.b.calls = 10  # the program's own
            loss.backward()
        said.append([str(w.message) for w in caught])
        assert model.b.calls == model.c.calls + (7 if step == 3 else 0) and Buffers.calls == 0
        assert "load" not in vars(Buffers)
    assert seen[0][0] == 1 and seen[0][2] == 0 and seen[1] == (2, True, False)
    assert said[0] == said[2] == said[3] == []
    ((first,),) = said[1:2]
    assert first.startswith("b.calls, c.load was asked for between the call of the model and loss.backward()")


class Holds(Layer):
    """Keeps tensors of two sizes, of the same shapes each time."""

    held: Any = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = torch.tanh(self.l(x))
        self.held = {"rows": out.detach(), "wide": [out.detach().repeat(1, 1024)]}
        return out


class HoldsAndCounts(Holds):
    calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        return super().forward(x)


def told_as_tensors() -> None:
    """Nothing of a model that remembers nothing; of others two numbers, what has changed, and tensors."""
    traffic = []
    for kind in (lambda: nn.Linear(8, 8), Holds, HoldsAndCounts):
        model: Any = Net(kind)
        plan = {"pipe": 2, "cuts": ("c",)}
        given, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
        for step in range(3):
            x, y = batch(step)
            with espalier.ledger(given.engine.mesh) as book:
                optimizer.zero_grad()
                F.cross_entropy(given(x), y).backward()
                optimizer.step()
        traffic.append(Counter((e.op, e.bytes) for e in book.entries))
        if kind is Holds:
            assert torch.equal(model.b.held["wide"][0][:, 8:16], model.b.held["rows"])
            assert type(model.c.held["rows"]) is torch.Tensor and len(model.c.held["wide"]) == 1
    nothing, tensors, numbers = traffic
    rows, wide = 8 * 8 * 8, 8 * 8 * 8 * 1024
    assert not any(op in ("broadcast", "all_gather") for op, _ in nothing)
    # of each stage; the one that gets them sends nothing
    each = {("broadcast", 0): 2, ("broadcast", rows): 1, ("broadcast", wide): 1, ("all_gather", 16): 1}
    assert tensors - nothing == each
    ((op, nbytes), times), *others = (numbers - tensors).items()
    assert (op, times, others) == ("all_gather", 1, []) and nbytes < 300


class Unsure(Layer):
    """Draws as often as what it computes says, and keeps what is long."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.kept = self.l(x).detach().repeat(1, 64)
        often = 1 + int(self.kept.abs().sum() * 1000) % 7
        return torch.tanh(self.l(x)) + torch.rand(often).mean()


def told_of_what_is_slow_or_other() -> None:
    """Each once: what takes long to send, and draws that other stages cannot know. Ranks stay in step."""
    model: Any = Net(Unsure)
    plan = {"pipe": 2, "cuts": ("c",)}
    given, optimizer = espalier.prepare(model, torch.optim.SGD(model.parameters(), 0.1), plan=plan)
    stage_draws._warn_of_draws.cache_clear()
    with pytest.MonkeyPatch.context() as patch, warnings.catch_warnings(record=True) as caught:
        patch.setattr(remembered, "_MUCH", 1 << 14)
        warnings.simplefilter("always")
        for step in range(6):
            x, y = batch(step)
            optimizer.zero_grad()
            F.cross_entropy(given(x), y).backward()
            optimizer.step()
    said = [str(w.message) for w in caught]
    assert sum("sets b.kept and 1 more. In a pipeline that goes to all" in word for word in said) == 1
    assert sum("has drawn other random numbers than its run without data" in word for word in said) == 1
    drawn = gather_objects(torch.rand(3).tolist(), given.engine.mesh)
    assert drawn[0] == drawn[1]


@pytest.mark.long
def test_equals_one_process(ranks: Any, tmp_path: Path) -> None:
    ranks(2, in_float64, [{"pipe": 2, "accumulate": 2}], tmp_path / "2")
    ranks(4, in_float64, [{"pipe": 2, "data": 2, "zero": 3}, {"pipe": 2, "tensor": 2}], tmp_path / "4")
