"""What programs that fine-tune do, and models that are fine-tuned: under every plan as on one process."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import contextmanager
from contextvars import ContextVar
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

import espalier
from tests.ranks.habits import batch, compare

TOLERANCE = 1e-9
Lay = Callable[..., Any]  # a model and optimizers, as they are or prepared
WORDS, WIDE = 20, 8

_collected: ContextVar[list[torch.Tensor] | None] = ContextVar("collected", default=None)


def ids_of(step: int, long: int = 5) -> torch.Tensor:
    return torch.randint(0, WORDS, (8, long), generator=torch.Generator().manual_seed(step))


class Layer(nn.Module):
    """A layer with an adapter, which can be switched off; it may be recomputed."""

    recomputes = False

    def __init__(self) -> None:
        super().__init__()
        self.own, self.adapter = nn.Linear(WIDE, WIDE), nn.Linear(WIDE, WIDE, bias=False)
        self.is_off, self.kind = False, "tanh"

    def forward(self, x: torch.Tensor, places: torch.Tensor | None = None) -> torch.Tensor:
        if self.recomputes and torch.is_grad_enabled():
            given: torch.Tensor = checkpoint(self.computed, x, places, use_reentrant=False)
            return given
        return self.computed(x, places)

    def computed(self, x: torch.Tensor, places: torch.Tensor | None) -> torch.Tensor:
        y = self.own(x) if self.is_off else self.own(x) + self.adapter(x)
        y = y if places is None else y + y @ places.mT @ places
        return x + (y.tanh() if self.kind == "tanh" else F.gelu(y))


class Settings(SimpleNamespace):
    """A configuration that refuses to tell what is not the same in all layers, as transformers' do."""

    def __getattribute__(self, name: str) -> Any:
        if name == "width":
            raise RuntimeError(f"'{name}' may vary across layers")
        return super().__getattribute__(name)


class Words(nn.Module):
    """A language model, whose head may be the embedding's, as of libraries of models: it gives a dict."""

    def __init__(self, layers: int = 3, *, is_tied: bool = False, has_places: bool = False) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDE)
        self.layers = nn.ModuleList(Layer() for _ in range(layers))
        self.places = nn.Embedding(4, WIDE) if has_places else None
        self.head = nn.Linear(WIDE, WORDS, bias=False)
        self.config = Settings(gives_hidden=False, width=WIDE)
        if is_tied:
            self.head.weight = self.embed.weight

    def forward(self, ids: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x) if self.places is None else layer(x, self.places.weight)
        logits = self.head(x)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        more = {"hidden": x} if self.config.gives_hidden else {}
        return {"loss": loss, "logits": logits, **more}


class Collected(nn.Module):
    """What layers give is collected by hooks, which the first forward puts and a flag stands for."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Words()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        if not getattr(self, "has_hooks", False):
            self.has_hooks = True
            for layer in self.body.layers:
                layer.register_forward_hook(_collect)
        found: list[torch.Tensor] = []
        token = _collected.set(found)
        try:
            loss = self.body(ids)["loss"]
        finally:
            _collected.reset(token)
        assert len(found) == len(self.body.layers)
        return loss + sum(i * x.square().mean() for i, x in enumerate(found))


def _collect(module: nn.Module, args: Any, out: torch.Tensor) -> None:
    if (found := _collected.get()) is not None:
        found.append(out)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer, step: int) -> float:
    """A step; the loss is asked of the output after it went back."""
    output = model(ids_of(step))
    output["loss"].backward()
    optimizer.step()
    optimizer.zero_grad()
    return output["loss"].item()


class Product(torch.autograd.Function):
    """A function that is in no table: a weight made of two."""

    @staticmethod
    def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(a, b)
        return a @ b

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        a, b = ctx.saved_tensors
        return grad @ b.mT, a.mT @ grad


class Factored(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Parameter(torch.randn(WIDE, 2)), nn.Parameter(torch.randn(2, WIDE))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + (x @ Product.apply(self.a, self.b)).tanh()


def weights_made_of_factors(lay: Lay) -> list[Any]:
    """It is asked for its output first, without gradients."""
    model = nn.Sequential(nn.Embedding(WORDS, WIDE), Factored(), Factored(), nn.Linear(WIDE, WORDS))
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out: list[Any] = []
    for step in range(2):
        with torch.no_grad():
            out.append(model(ids_of(step)).sum().item())
        loss = F.cross_entropy(model(ids_of(step)).mT, ids_of(step + 1))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return [*out, *model.state_dict().values()]


@contextmanager
def off(model: Any) -> Any:
    for layer in model.layers:
        layer.is_off = True
        layer.adapter.requires_grad_(False)
    yield
    for layer in model.layers:
        layer.is_off = False
        layer.adapter.requires_grad_(True)


def adapters_switched_off_and_on(lay: Lay) -> list[Any]:
    """A reference is the model without its adapters; a layer computes in another way later."""
    model = Words()
    for name, p in model.named_parameters():
        p.requires_grad_("adapter" in name)
    model, optimizer = lay(model, torch.optim.Adam([p for p in model.parameters() if p.requires_grad], 0.1))
    out: list[Any] = []
    for step in range(4):
        with torch.no_grad(), off(model):
            out.append(model(ids_of(step))["logits"].sum().item())
        if step == 2:
            model.layers[0].kind = "gelu"
        out.append(trained(model, optimizer, step))
    return [*out, *model.state_dict().values()]


def hooks_that_a_forward_puts(lay: Lay) -> list[Any]:
    model = Collected()
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.05))
    out: list[Any] = []
    for step in range(3):
        with torch.no_grad():
            out.append(model(ids_of(step, 4 + step)).item())
        loss = model(ids_of(step, 4 + step))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(loss.item())
    return [*out, *model.state_dict().values()]


def weights_as_arguments(lay: Lay) -> list[Any]:
    """Layers are given the weight of a module that nobody calls."""
    model = Words(has_places=True)
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 0.05))
    return [*[trained(model, optimizer, step) for step in range(3)], *model.state_dict().values()]


def settings_that_change(lay: Lay) -> list[Any]:
    """An output has more parts, and layers are recomputed, from a step on."""
    model = Words()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out: list[Any] = []
    for step in range(4):
        model.config.gives_hidden = step in (1, 2)
        for layer in model.layers:
            layer.recomputes = step >= 2
        output = model(ids_of(step))
        assert len(output) == (3 if step in (1, 2) else 2)
        output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
        out.append(output["loss"].item())
    return [*out, *model.state_dict().values()]


def parts_of_an_output(lay: Lay) -> list[Any]:
    """The loss is asked for by its name once more, after it went back, divided or not."""
    model = Words()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out: list[Any] = []
    for step in range(3):
        for i in range(2):
            output = model(ids_of(2 * step + i))
            (output["loss"] / 2).backward()
            out.append(output["loss"].item())
            with pytest.raises(RuntimeError, match=r"second time|went back already"):
                output["loss"].backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*out, *model.state_dict().values()]


def files_without_ties(lay: Lay) -> list[Any]:
    """A file has one name of a tied weight, and goes into the model with strict=False."""
    model = Words(is_tied=True)
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out: list[Any] = [trained(model, optimizer, 0)]
    kept = {name: x.detach().clone() for name, x in copy.copy(model.state_dict()).items()}
    out.append(trained(model, optimizer, 1))
    del kept["head.weight"]
    assert model.load_state_dict(kept, strict=False).missing_keys == ["head.weight"]
    out.append(trained(model, optimizer, 1))
    assert abs(out[-1] - out[-2]) < TOLERANCE
    return [*out, *model.state_dict().values()]


def first_calls_in_inference_mode(lay: Lay) -> list[Any]:
    """By the first call a model is laid out, and is trained afterwards."""
    model = Words()
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    with torch.inference_mode():
        out: list[Any] = [model(ids_of(9))["logits"].sum().item()]
    return [*out, *[trained(model, optimizer, step) for step in range(2)], *model.state_dict().values()]


def averages_of_the_plain_model(lay: Lay) -> list[Any]:
    """Made before the model is laid out, of the model itself: they stay whole on every rank."""
    model = plain = Words()
    averages = [
        AveragedModel(plain, multi_avg_fn=get_ema_multi_avg_fn(0.5)),
        AveragedModel(plain, avg_fn=get_ema_avg_fn(0.5)),
    ]
    model, optimizer = lay(model, torch.optim.SGD(model.parameters(), 0.5))
    out: list[Any] = []
    for step in range(3):
        out.append(trained(model, optimizer, step))
        for average in averages:
            average.update_parameters(plain)
            assert not any(isinstance(p, espalier.DTensor) for p in average.parameters())
    return [*out, *averages[0].parameters(), *averages[1].parameters()]


class Signs(torch.optim.Optimizer):
    """Adds signs up, in fewer bits than parameters have: torch gives loaded states those of parameters."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, {"lr": lr})

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        for held in self.state.values():
            held["sum"] = held["sum"].to(torch.float32)

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for p in (p for p in group["params"] if p.grad is not None):
                state = self.state[p]
                if not state:
                    state["sum"] = torch.zeros_like(p, dtype=torch.float32)
                assert state["sum"].dtype is torch.float32
                state["sum"].mul_(0.5).add_((p.grad * 1e4).round().sign().float())
                p.add_(state["sum"].to(p.dtype), alpha=-group["lr"])


def states_of_fewer_bits(lay: Lay) -> list[Any]:
    model, out = Words(), []
    model, optimizer = lay(model, Signs(model.parameters(), 0.01))
    for step in range(4):
        out.append(trained(model, optimizer, step))
        if step == 1:
            optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    return [*out, *model.state_dict().values()]


class Pooled(nn.Module):
    """Averages over all positions, padded ones among them."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(WIDE, 2, 12, dropout=0.0, batch_first=True)
        self.words, self.head = nn.Embedding(WORDS, WIDE), nn.Linear(WIDE, 3)
        self.encoder = nn.TransformerEncoder(layer, 2, norm=nn.LayerNorm(WIDE))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.encoder(self.words(ids), src_key_padding_mask=ids == 0)
        given: torch.Tensor = self.head(x.mean(1))
        return given


def padded_positions_left_out(lay: Lay) -> list[Any]:
    """In evaluation torch makes zeros of them, if they are at the ends of rows."""
    model, out = Pooled(), []
    model, optimizer = lay(model, torch.optim.Adam(model.parameters(), 1e-2))
    for step in range(2):
        ids = ids_of(step, 6).clamp(min=1)
        ids[::2, 4:] = 0
        model.train()
        loss = model(ids).logsumexp(-1).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        model.eval()
        with torch.no_grad():
            out += [loss.item(), model(ids), model(ids.flip(1)), model(ids[:3, :5])]
    return [*out, *model.state_dict().values()]


class Recalling(nn.Module):
    """Follows what it sees by a buffer that is given other data."""

    def __init__(self) -> None:
        super().__init__()
        self.line = nn.Linear(6, 6)
        self.register_buffer("mean", torch.ones(6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.mean.data = 0.9 * self.mean.data + 0.1 * x.detach().mean(0)
        return torch.tanh(self.line(x)) * self.mean


def values_of_losses_after_steps(lay: Lay) -> list[Any]:
    """Of losses with factors that are trained, scaled, and of parts called once more."""
    model = nn.Sequential(Recalling(), Recalling(), nn.Linear(6, 4)).double()
    weight = nn.Parameter(torch.zeros((), dtype=torch.float64))
    model, optimizer = lay(model, torch.optim.SGD([*model.parameters(), weight], 0.2))
    out: list[Any] = []
    for step in range(4):
        x, y = batch(step)
        given = model(x)
        loss = weight.exp() * F.cross_entropy(given, y) + 0.1 * given.square().mean()
        if step % 2:
            loss = weight * loss + 0.1 * F.linear(given, model[2].weight.t()).square().mean()
        optimizer.zero_grad()
        (1024 * loss).backward()
        for p in (*model.parameters(), weight):
            p.grad /= 1024
        optimizer.step()
        out += [loss.item(), weight.detach().clone()]
        model.eval()
        with torch.inference_mode():
            out.append(model(batch(9)[0][:4]).sum().item())
        model.train()
    return [*out, *model.state_dict().values()]


PROGRAMS = (
    values_of_losses_after_steps,
    padded_positions_left_out,
    averages_of_the_plain_model,
    states_of_fewer_bits,
    first_calls_in_inference_mode,
    adapters_switched_off_and_on,
    hooks_that_a_forward_puts,
    weights_as_arguments,
    parts_of_an_output,
    settings_that_change,
    files_without_ties,
    weights_made_of_factors,
)
PLANS: tuple[dict[str, Any], ...] = (
    {"data": 2, "zero": 2},
    {"data": 2, "zero": 3},
    {"data": 2, "zero": 3, "recompute": "full"},
    {"tensor": 2},
    {"pipe": 2},
    {"pipe": 2, "accumulate": 2},
)


def compared(rank: int, world: int) -> None:
    for program in PROGRAMS:
        # of parts it would be a sum of means over tokens and over features
        whole = program in (hooks_that_a_forward_puts, values_of_losses_after_steps)
        compare(program, [(plan, {}) for plan in PLANS if not (whole and "accumulate" in plan)], TOLERANCE)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.filterwarnings("ignore:A global batch of 1 rows leaves")
@pytest.mark.filterwarnings("ignore:The autograd function Product has no rule")
@pytest.mark.filterwarnings("ignore:p.grad is None here")  # in steps of one's own
@pytest.mark.filterwarnings("ignore:The tensor-parallel layouts of")
@pytest.mark.filterwarnings("ignore:Sequential cannot be split")  # a buffer is given other data
@pytest.mark.filterwarnings("ignore:The model.s forward writes to its own weights")
@pytest.mark.filterwarnings("ignore:torch.autograd.grad.*, or a loss that multiplies an output")
@pytest.mark.filterwarnings("ignore:.*in several stages or branches:espalier.GatherWarning")
def test_habits_of_tuning(ranks: Any) -> None:
    ranks(2, compared)
