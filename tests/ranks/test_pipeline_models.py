"""Outputs and text under a plan, and what only one stage of a pipeline knows, against one process."""

from __future__ import annotations

import copy
import math
import warnings
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import get_gradient_edge

import espalier
from espalier.models import generate
from espalier.parallel.pipeline.weight_gradients import backward_for_inputs
from espalier.tensor import GatherWarning
from tests.ranks.test_engine import batch, model


def predicts(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        net = model("gpt", layers=4)
        plain = copy.deepcopy(net)
        engine = espalier.initialize(net, None, plan, example=batch(4))
        for rows in (5, 1):  # one row is computed by every rank that shares the batch
            found = engine.predict(batch(rows))
            expected = plain(**batch(rows))
            assert type(found) is type(expected) and type(found.logits) is torch.Tensor
            assert not found.logits.requires_grad
            torch.testing.assert_close(found, type(found)(*(x.detach() for x in expected)))
        prompt = batch(3)["input_ids"][:, :4]
        told: dict[str, Any] = {"temperature": 0.7, "top_k": 5}
        torch.manual_seed(4)
        ours = engine.generate(prompt, 3, **told)
        torch.manual_seed(4)
        assert torch.equal(ours, generate(plain, prompt, 3, **told)) and net.training


def test_outputs_and_text(ranks: Any) -> None:
    ranks(2, predicts, [{"data": 2, "zero": 3}, {"tensor": 2}, {"pipe": 2}])


class Images(nn.Sequential):
    """Batch norm keeps statistics, in blocks of both stages."""

    def __init__(self) -> None:
        def block() -> nn.Module:
            return nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU(inplace=True))

        super().__init__(*(block() for _ in range(4)), nn.Linear(6, 3))


def keeps(rank: int, world: int) -> None:
    torch.manual_seed(0)
    net = Images().double()
    plain = copy.deepcopy(net)
    given: dict[str, Any] = {"loss_fn": lambda out, target: nn.functional.cross_entropy(out, target)}
    sgd = torch.optim.SGD(net.parameters(), lr=0.1)
    engine = espalier.initialize(net, sgd, {"pipe": 2, "cuts": ("2",)}, **given)
    for step in range(2):
        g = torch.Generator().manual_seed(step)
        x, y = torch.randn(8, 6, generator=g).double(), torch.randint(0, 3, (8,), generator=g)
        loss = nn.functional.cross_entropy(plain(x), y)
        loss.backward()
        with torch.no_grad():
            for p in plain.parameters():
                p -= 0.1 * p.grad
                p.grad = None
        assert abs(engine.train_step((x, y)).item() - loss.item()) < 1e-12
    state = engine.full_state_dict()
    for name, value in plain.state_dict().items():
        torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=name)
    net.eval()
    plain.eval()
    torch.testing.assert_close(engine.predict(x), plain(x).detach(), rtol=0, atol=1e-12)


def test_statistics_of_a_stage_reach_the_state(ranks: Any) -> None:
    ranks(2, keeps)


def drops(rank: int, world: int) -> None:
    """Dropout draws in a pipeline what it draws in one stage, micro-batch by micro-batch."""
    losses = []
    for plan in ({"tensor": 2}, {"pipe": 2}, {"pipe": 2, "schedule": "interleaved", "stages_per_rank": 2}):
        net = model("gpt2", layers=4, dropout=0.3)
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = espalier.initialize(net, sgd, {**plan, "accumulate": 3})
        torch.manual_seed(5)
        losses.append(
            [engine.train_step(batch(6, step)).item() for step in range(3)] + [torch.rand(()).item()]
        )
    for other in losses[1:]:
        assert all(abs(a - b) < 1e-12 for a, b in zip(losses[0], other, strict=True)), losses


def test_dropout(ranks: Any) -> None:
    ranks(2, drops)


class Diffusion(nn.Module):
    """Draws times, noise and masks itself, in several ways, on different stages."""

    def __init__(self) -> None:
        super().__init__()
        self.enter, self.times = nn.Linear(8, 16), nn.Embedding(10, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Dropout(0.3), nn.Linear(32, 16)) for _ in range(4)
        )
        self.leave = nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        at = torch.randint(0, 10, (x.shape[0],), device=x.device)
        noise, share = torch.randn_like(x), torch.rand(x.shape[0], 1, dtype=x.dtype, device=x.device)
        h = self.enter(x * share + (1 - share) * noise) + self.times(at)
        for i, block in enumerate(self.blocks):
            h = h + block(h)
            if i == 2:
                h = h * torch.bernoulli(torch.full_like(h, 0.7))
                h = h + torch.empty(h.shape, dtype=h.dtype, device=h.device).normal_(0, 0.1)
                h = (h + torch.normal(0.0, 0.1, (16,), dtype=h.dtype))[:, torch.randperm(16, device=h.device)]
        h = h * (1 + 0.1 * torch.randn((16,), generator=None, dtype=h.dtype, device=h.device))
        return nn.functional.mse_loss(self.leave(h), noise)


def diffuses(rank: int, world: int, plans: list[dict[str, Any]]) -> list[Any]:
    found = []
    for plan in plans:
        torch.manual_seed(0)
        net = Diffusion().double()
        sgd = torch.optim.SGD(net.parameters(), lr=0.1)
        engine = espalier.initialize(net, sgd, {"accumulate": 4, **plan})
        torch.manual_seed(1)
        x = torch.randn(16, 8, dtype=torch.float64)
        losses = [engine.train_step((x,)).item() for _ in range(3)]
        state = {k: v.tolist() for k, v in engine.full_state_dict().items()}
        found.append(([*losses, torch.rand(()).item()], state))
    return found


def test_what_a_model_draws_itself_is_what_one_process_draws(ranks: Any) -> None:
    ((right, at_end),) = ranks(1, diffuses, [{}])[0]
    twice = {"schedule": "interleaved", "stages_per_rank": 2}
    plans = [{"pipe": 2}, {"pipe": 2, **twice, "recompute": "full"}, {"data": 2}]
    for plan, (losses, state) in zip(plans, ranks(2, diffuses, plans)[0], strict=True):
        assert losses == pytest.approx(right, abs=1e-12), plan
        for name, x in state.items():
            torch.testing.assert_close(torch.tensor(x), torch.tensor(at_end[name]), rtol=0, atol=1e-12)
    with torch.device("meta"):
        net, x = Diffusion(), torch.empty(16, 8)
    assert espalier.dry_run(net, {"pipe": 2, "accumulate": 4}, (x,)).peak_bytes


class Scaled(nn.Module):
    """Parameters of the module that is divided itself, which no block's gathering brings."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.scale, self.shift = nn.Parameter(torch.ones(8)), nn.Parameter(torch.randn(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = torch.tanh(block(x) * self.scale + self.shift)
        return x


class Moves(Scaled):
    """Says where it computes, in each way that there is, as programs do that lie on devices by hand."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c, d = self.blocks
        x = torch.tanh(a(x.to("cpu"))).to("cpu", torch.float32).to(device="cpu", dtype=torch.float64)
        x = x + torch.arange(8.0, device=x.device) * torch.ones(8)  # a default device beside the rank's
        x = torch.tanh(b(x)).cpu() * torch.full((8,), 0.5, device="cpu")
        x = torch.tanh(c(x.to(b.weight.device))).type("torch.DoubleTensor")
        return d(x) * self.scale.to("cpu") + self.shift


def shares(rank: int, world: int, plans: list[dict[str, Any]], kind: type[Scaled] = Scaled) -> None:
    for plan in plans:
        torch.manual_seed(0)
        net = kind().double()
        plain = copy.deepcopy(net)
        sgd, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain))
        engine = espalier.initialize(net, sgd, plan, loss_fn=nn.functional.mse_loss)
        for step in range(2):
            x = torch.randn(8, 8, generator=torch.Generator().manual_seed(step)).double()
            loss = nn.functional.mse_loss(plain(x), x.flip(0))
            loss.backward()
            theirs.step()
            theirs.zero_grad()
            assert abs(engine.train_step((x, x.flip(0))).item() - loss.item()) < 1e-12, plan
        state = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-12, msg=f"{plan}: {name}")


def test_parameters_that_all_stages_use(ranks: Any) -> None:
    pipe = {"pipe": 2, "data": 2, "accumulate": 2}
    ranks(4, shares, [{**pipe, "zero": 3}, {**pipe, "zero": 2, "recompute": "full"}])


def test_a_model_that_says_where_it_computes(ranks: Any) -> None:
    pipe = {"pipe": 2, "accumulate": 2}
    ranks(2, shares, [pipe, {**pipe, "cuts": ["blocks.1"]}], Moves)


class Decides(nn.Module):
    """Asks for what it computes, and for what a mask and a buffer say, within a block."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.register_buffer("least", torch.tensor(2))

    def forward(self, x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        if not mask.all():
            x = x * mask[..., None]
        h = torch.tanh(self.up(x))
        if (h.mean(0) > 0).any() and h.sum() > 0:  # of what is computed: a trace cannot know
            h = h * 2
        shift = int(h.mean((0, 1)).argmax())
        assert f"{h.sum() * 2:.3f}"  # no question, so no answer either
        h = h.roll(shift, -1) * (1 + h.abs().max().item())
        h = h + h[..., h.mean((0, 1)).argmin(), None]  # which torch reads, not Python
        h = nn.functional.pad(h, (self.least - 1, self.least))[..., self.least - 1 : -self.least]
        return x + self.down(self._routed(h)) / self.least.item()

    @staticmethod
    def _routed(h: torch.Tensor) -> torch.Tensor:
        """Some tokens, as their values say, are worked on by themselves: what is so many of them is told."""
        tokens = h.flatten(0, 1)
        chosen = tokens[:, 0] > 0
        (rows,) = torch.where(chosen)
        tokens = tokens.index_add(0, rows, tokens[chosen].sin())
        others = torch.nonzero(~chosen).squeeze(-1)
        return tokens.index_add(0, others, tokens[others].cos()).view(h.shape)


class Tied(nn.Module):
    """Is given the module whose weight it uses, as Perceiver's decoder of embeddings."""

    def forward(self, x: torch.Tensor, other: nn.Linear) -> torch.Tensor:
        return x @ other.weight


class Deciding(nn.Module):
    """Blocks that decide by values."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = Tied()
        self.blocks = nn.ModuleList(Decides(8) for _ in range(4))
        self.leave = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, mask: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        near = torch.arange(x.shape[1]) < 4  # made on the CPU, wherever the model is
        mask = torch.logical_and(mask, near.to(x.device))
        for block in self.blocks:
            x = block(x, mask)
        x = self.tied(self.leave(x), self.leave)
        return nn.functional.mse_loss(self.leave(x), y)


def _undecided(step: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Batches of which some masks leave something out, in one micro-batch or both."""
    g = torch.Generator().manual_seed(step)
    x, y = torch.randn(8, 5, 8, generator=g).double(), torch.randn(8, 5, 3, generator=g).double()
    mask = torch.ones(8, 5, dtype=torch.bool)
    mask[1, 3:] = step % 2 == 0
    mask[6, 2:] = step % 3 == 0
    return x, mask, y


def decides(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    for plan in plans:
        torch.manual_seed(0)
        net = Deciding().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (net, plain))
        engine = espalier.initialize(net, ours, {"accumulate": 2, **plan}, count=lambda b: b[2].numel())
        ways = set()
        for step in range(4):
            x, mask, y = _undecided(step)
            total = 0.0
            for rows in zip(*(t.chunk(2) for t in (x, mask, y)), strict=True):
                loss = plain(*rows) / 2
                loss.backward()
                total += loss.item()
                ways.add(bool(rows[1].all()))
            theirs.step()
            theirs.zero_grad()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", GatherWarning)  # of nonzero, where
                assert abs(engine.train_step((x, mask, y)).item() - total) < 1e-12, (plan, step)
        assert len(ways) == 2
        state = engine.full_state_dict()
        for name, value in plain.state_dict().items():
            torch.testing.assert_close(state[name], value, rtol=0, atol=1e-11, msg=f"{plan}: {name}")


def test_blocks_that_decide_by_values(ranks: Any) -> None:
    ranks(2, decides, [{"pipe": 2}, {"pipe": 2, "schedule": "interleaved", "stages_per_rank": 2}])
    ranks(4, decides, [{"pipe": 2, "data": 2}, {"pipe": 2, "tensor": 2}])


class Shortens(nn.Module):
    """Gives as many columns as what it computes says."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x * self.weight
        return x[:, : 4 if x.sum() > 0 else 2]


def shortens(rank: int, world: int) -> None:
    net = nn.Sequential(Shortens(), nn.Tanh(), Shortens(), nn.Tanh()).double()
    engine = espalier.initialize(net, None, {"pipe": 2, "cuts": ("2",)}, loss_fn=lambda out, y: out.mean())
    some = torch.ones(4, 6).double()
    ends = []
    for x in (some, -some, some):
        try:
            with torch.no_grad():
                ends.append(engine((x, x)).item())
        except RuntimeError as error:
            ends.append(str(error))
    told = [end for end in ends if isinstance(end, str)]
    assert told and all(
        "Stage 0 gives other tensors than when it was run without data" in end for end in told
    )
    right = [math.tanh(math.tanh(1.0)), math.tanh(math.tanh(-1.0)), math.tanh(math.tanh(1.0))]
    pairs = zip(ends, right, strict=True)
    assert all(isinstance(end, str) or abs(end - value) < 1e-12 for end, value in pairs) and len(told) < 3


def test_other_answers_than_agreed_on_are_told(ranks: Any) -> None:
    ranks(2, shortens)


class Recurrent(nn.Module):
    """An LSTM looks at its weights by weak references, whether they are the same still."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, 8)
        self.lstm = nn.LSTM(8, 8, num_layers=2, batch_first=True)
        self.out = nn.Linear(8, 11)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.out(self.lstm(self.embed(ids))[0])


def recurs(rank: int, world: int, plan: dict[str, Any], deferred: bool) -> None:
    def loss(out: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return nn.functional.cross_entropy(out.flatten(0, 1), target.flatten())

    torch.manual_seed(0)
    plain = Recurrent()
    torch.manual_seed(0)
    with espalier.deferred() if deferred else nullcontext():
        net = Recurrent()
    ours, theirs = (torch.optim.Adam(m.parameters(), lr=1e-2) for m in (net, plain))
    engine = espalier.initialize(net, ours, plan, loss_fn=loss)
    for step in range(3):
        ids = torch.randint(0, 11, (4, 6), generator=torch.Generator().manual_seed(step))
        expected = loss(plain(ids), ids)
        expected.backward()
        theirs.step()
        theirs.zero_grad()
        assert abs(engine.train_step((ids, ids)).item() - expected.item()) < 1e-5, (plan, step)


def test_recurrent_modules(ranks: Any) -> None:
    for plan in ({"pipe": 2, "accumulate": 2}, {"data": 2, "zero": 3}):
        for deferred in (False, True):
            ranks(2, recurs, plan, deferred)


def test_what_weights_alone_give_out_counts() -> None:
    """As T5's position biases, which later stages use too: an output that no input of the stage leads to."""
    x, w = (torch.arange(1.0, 4.0, requires_grad=True) for _ in range(2))
    bias = w * 2
    outs = (x * 3 + bias, bias)
    later = backward_for_inputs([get_gradient_edge(y) for y in outs], [torch.ones(3)] * 2, [x])
    later()
    assert x.grad is not None and x.grad.tolist() == [3.0] * 3
    assert w.grad is not None and w.grad.tolist() == [4.0] * 3


class Aside(nn.Module):
    """Gives more than its loss: what the loss does not hang on has no gradient, and is not decayed."""

    def __init__(self) -> None:
        super().__init__()
        self.aside, self.last = nn.Linear(6, 6), nn.Linear(6, 6)
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        aside = torch.tanh(self.aside(x))
        for block in self.blocks:
            x = torch.tanh(block(x))
        aside = self.last(aside)
        return {"loss": x.square().mean(), "aside": aside}


def one_of(name: str) -> Any:
    return lambda out, targets: out[name].mean()


def rows_of(batch: Any) -> int:
    return len(batch[0])


def leaves_aside(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for plan, taken in ((plan, taken) for plan in plans for taken in ("", "loss", "aside")):
        loss_fn = one_of(taken) if taken else None
        torch.manual_seed(0)
        net = Aside().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (net, plain))
        engine = espalier.initialize(
            net, ours, {**plan, "accumulate": 4}, loss_fn=loss_fn, count=rows_of if taken else None
        )
        for _ in range(2):
            engine.train_step((x,))
            out = plain(x)
            (loss_fn(out, None) if loss_fn else out["loss"]).backward()
            theirs.step()
            theirs.zero_grad()
        state = engine.full_state_dict()
        for name, p in plain.state_dict().items():
            assert (state[name] - p).abs().max() < 1e-12, (plan, name)


def test_what_crosses_and_has_no_gradient(ranks: Any) -> None:
    interleaved = {"schedule": "interleaved", "stages_per_rank": 2}
    plans: list[dict[str, Any]] = [{}, interleaved, {"schedule": "zb-h1"}, {"recompute": "full"}]
    ranks(2, leaves_aside, [{"pipe": 2, **plan} for plan in plans])


class Looks(nn.Module):
    """Heads that several stages use, of which some look only: what decides has no gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.late, self.early, self.never = (nn.Linear(6, 6) for _ in range(3))
        self.blocks = nn.ModuleList(nn.Linear(6, 6) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for i, block in enumerate(self.blocks):
            with torch.set_grad_enabled(i == 0):
                early = self.early(x)
            with torch.set_grad_enabled(i == 3):
                late = self.late(x)
            with torch.no_grad():
                never = self.never(x)
            x = torch.tanh(block(x)) + early * (late > 0) + late * (never > 0)
        return x.square().mean()


def looks(rank: int, world: int, plans: list[dict[str, Any]]) -> None:
    x = torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(3))
    for plan in plans:
        torch.manual_seed(0)
        net = Looks().double()
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2, weight_decay=0.1) for m in (net, plain))
        engine = espalier.initialize(net, ours, {**plan, "accumulate": 2}, max_grad_norm=0.1)
        for _ in range(3):
            engine.train_step((x,))
            plain(x).backward()
            assert plain.never.weight.grad is None
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.1)
            assert engine.grad_norm is not None and abs(float(engine.grad_norm) - float(norm)) < 1e-12, plan
            theirs.step()
            theirs.zero_grad()
        state = engine.full_state_dict()
        for name, p in plain.state_dict().items():
            assert (state[name] - p).abs().max() < 1e-12, (plan, name)


def test_stages_that_share_what_only_some_have_gradients_of(ranks: Any) -> None:
    interleaved = {"schedule": "interleaved", "stages_per_rank": 2}
    ranks(2, looks, [{"pipe": 2}, {"pipe": 2, **interleaved}])
    zero = [{"pipe": 2, "data": 2, "zero": zero} for zero in range(4)]
    ranks(4, looks, [*zero, {"pipe": 2, "tensor": 2}])
