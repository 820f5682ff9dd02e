"""Whole modules of torch on DTensors against one process: values, gradients, buffers, three steps of SGD."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import espalier
from espalier import DTensor, Mesh, Replicate, Shard, distribute_tensor

R = Replicate()
S = Shard
F64 = torch.float64


def grid() -> Mesh:
    return Mesh.from_env({"data": 2, "space": 2})


def values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, dtype=F64, generator=torch.Generator().manual_seed(seed))


def laid(model: nn.Module, mesh: Mesh, place: Callable[[str, torch.Tensor], Any]) -> nn.Module:
    """A copy of the model with its parameters and buffers as DTensors."""
    twin = copy.deepcopy(model)
    for prefix, module in twin.named_modules():
        for name, p in list(module.named_parameters(recurse=False)):
            at = place(f"{prefix}.{name}", p)
            setattr(module, name, nn.Parameter(distribute_tensor(p.detach(), mesh, at)))
        for name, b in list(module.named_buffers(recurse=False)):
            setattr(module, name, distribute_tensor(b, mesh, place(f"{prefix}.{name}", b)))
    return twin


def whole(name: str, p: torch.Tensor) -> list[Any]:
    return [R, R]


def same(model: nn.Module, twin: nn.Module) -> None:
    right = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    for name, found in {**dict(twin.named_parameters()), **dict(twin.named_buffers())}.items():
        assert isinstance(found, DTensor)
        torch.testing.assert_close(found.full_tensor(), right[name], msg=lambda m, n=name: f"{n}: {m}")


def trained(
    model: nn.Module, twin: nn.Module, batches: list[Any], lay: Callable[..., Any], loss: Callable[..., Any]
) -> None:
    """Three steps of both; all parameters and buffers stay equal."""
    ours, theirs = (torch.optim.SGD(m.parameters(), 0.1, momentum=0.9) for m in (twin, model))
    for batch in batches:
        losses = []
        for m, optimizer, inputs in ((model, theirs, batch), (twin, ours, lay(batch))):
            optimizer.zero_grad()
            value = loss(m, *inputs)
            value.backward()
            optimizer.step()
            losses.append(espalier.full_tensor(value.detach()))
        torch.testing.assert_close(losses[1], losses[0])
    same(model, twin)


# ---- images


class Block(nn.Module):
    def __init__(self, n: int, m: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(n, m, 3, stride, 1, bias=False),
            nn.BatchNorm2d(m),
            nn.ReLU(),
            nn.Conv2d(m, m, 3, padding="same", groups=2),
            nn.BatchNorm2d(m, momentum=None),
        )
        self.skip = nn.Conv2d(n, m, 1, stride)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(self.body(x) + self.skip(x))


def small_resnet() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 7, 2, 3),
        nn.MaxPool2d(3, 2, 1),
        Block(4, 4, 1),
        Block(4, 6, 2),
        nn.GroupNorm(3, 6),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(6, 5),
    ).double()


def images(rank: int, world: int) -> None:
    mesh = grid()
    model = small_resnet()
    for at in ([S(0), S(2)], [S(2), S(3)], [R, S(3)]):
        plain = copy.deepcopy(model)
        twin = laid(plain, mesh, whole)
        batches = [(values(3, 3, 21, 18, seed=i), torch.tensor([i, 4, 2])) for i in range(3)]

        def lay(batch: Any, at: Any = at) -> Any:
            return distribute_tensor(batch[0], mesh, at), distribute_tensor(batch[1], mesh, [R, R])

        trained(plain, twin, batches, lay, lambda m, x, y: F.cross_entropy(m(x), y))
        plain.eval(), twin.eval()
        x = values(2, 3, 21, 18, seed=9)
        torch.testing.assert_close(twin(distribute_tensor(x, mesh, at)).full_tensor(), plain(x))


def test_a_resnet_over_data_and_space(ranks: Any) -> None:
    ranks(4, images)


def borders(rank: int, world: int) -> None:
    """A convolution of sharded space sends its halo, not its input; nothing else is sent forward."""
    mesh = Mesh.from_env({"space": world})
    x = distribute_tensor(values(2, 3, 12, 4), mesh, [S(2)])
    w = distribute_tensor(values(5, 3, 3, 3), mesh)
    with espalier.ledger(mesh) as book:
        y = F.conv2d(x, w, padding=1)
    assert y.placements == (S(2),)
    sides = (rank > 0) + (rank < world - 1)
    assert [(e.op, e.bytes) for e in book.entries] == [("all_to_all", sides * 2 * 3 * 4 * 8)]
    with warnings.catch_warnings():
        # torch warns of even kernels
        warnings.simplefilter("ignore", UserWarning)
        w = values(5, 3, 4, 2)
        for at in (R, S(2), S(3)):
            x = distribute_tensor(values(2, 3, 5, 4), mesh, [at])
            found = F.conv2d(x, distribute_tensor(w, mesh), padding="same")
            torch.testing.assert_close(found.full_tensor(), F.conv2d(values(2, 3, 5, 4), w, padding="same"))


def test_a_convolution_sends_its_borders(ranks: Any) -> None:
    ranks(3, borders)


def statistics(rank: int, world: int) -> None:
    mesh = grid()
    make: list[Callable[[], nn.Module]] = [
        lambda: nn.BatchNorm1d(4),
        lambda: nn.BatchNorm1d(4, momentum=None, affine=False),
        lambda: nn.BatchNorm1d(4, track_running_stats=False),
        lambda: nn.InstanceNorm1d(4, affine=True, track_running_stats=True),
    ]
    for build in make:
        for at, own in (
            ([S(0), S(2)], [R, R]),
            ([S(2), R], [R, R]),
            ([S(0), S(1)], [R, S(0)]),
            ([S(0), S(1)], [R, R]),
            ([S(1), S(1)], [S(0), S(0)]),
            ([R, R], [R, S(0)]),
        ):
            model = build().double()
            twin = laid(model, mesh, lambda name, p, own=own: own if p.ndim else [R, R])
            for step in range(3):
                if step == 2:
                    model.eval(), twin.eval()
                plain = values(5, 4, 3, seed=step).requires_grad_()
                x = distribute_tensor(plain.detach(), mesh, at).requires_grad_()
                right, y = model(plain), twin(x)
                torch.testing.assert_close(y.full_tensor(), right)
                right.pow(3).sum().backward()
                y.pow(3).sum().backward()
                torch.testing.assert_close(x.grad.full_tensor(), plain.grad)  # type: ignore[union-attr]
            same(model, twin)
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                torch.testing.assert_close(q.grad.full_tensor(), p.grad)  # type: ignore[union-attr]
    x = distribute_tensor(values(1, 4, 1), mesh, [S(0), R])
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        F.batch_norm(x, None, None, training=True)


def test_running_statistics_are_those_of_the_whole_batch(ranks: Any) -> None:
    ranks(4, statistics)


# ---- second derivatives


def twice(call: Callable[..., torch.Tensor], inputs: list[torch.Tensor]) -> list[torch.Tensor]:
    first = torch.autograd.grad(call(*inputs).pow(3).sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(g.pow(2).sum() for g in first), inputs)
    return [espalier.full_tensor(g) for g in (*first, *second)]


def second(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"axis": world})
    calls: list[tuple[Callable[..., torch.Tensor], list[torch.Tensor]]] = [
        (lambda x, w, b: F.conv1d(x, w, b, 2, 2), [values(2, 3, 5), values(4, 3, 3), values(4)]),
        (lambda x, w: F.conv1d(x, w, padding=1), [values(2, 3, 2), values(4, 3, 3)]),
        (lambda x, w: F.conv_transpose1d(x, w, None, 2, 1), [values(2, 3, 4), values(3, 2, 3)]),
        (lambda x: F.avg_pool1d(x, 3, 2, 1), [values(2, 3, 7)]),
        (lambda x, w, b: F.batch_norm(x, None, None, w, b, True), [values(4, 2, 3), values(2), values(2)]),
        (lambda x, w: F.batch_norm(x, None, None, w, None, True), [values(2, 2, 3), values(2)]),
        (lambda x, w: F.group_norm(x, 2, w), [values(2, 4, 5), values(4)]),
        (lambda x, w, b: F.layer_norm(x, (5,), w, b), [values(3, 5), values(5), values(5)]),
        (lambda x, w: F.rms_norm(x, (5,), w), [values(3, 5), values(5)]),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 4, -100]), reduction="none"), [values(3, 5)]),
        (lambda x: F.cross_entropy(x, torch.tensor([1, 4, -100])), [values(3, 5)]),
        (lambda x: F.cross_entropy(x, x.detach().softmax(1), reduction="none"), [values(3, 5)]),
        (F.linear, [values(3, 5), values(4, 5), values(4)]),
    ]
    for call, inputs in calls:
        shapes = [x.shape for x in inputs]
        right = twice(call, [x.clone().requires_grad_() for x in inputs])
        for dim in range(inputs[0].ndim):
            for small in (R, S(0)):
                given = [distribute_tensor(inputs[0], mesh, [S(dim)])]
                given += [distribute_tensor(x, mesh, [small]) for x in inputs[1:]]
                found = twice(call, [x.requires_grad_() for x in given])
                for i, (a, b) in enumerate(zip(found, right, strict=True)):
                    torch.testing.assert_close(a, b, msg=lambda m, at=(shapes, dim, small, i): f"{at}: {m}")


@pytest.mark.parametrize("world", [2, 3])
def test_second_derivatives(ranks: Any, world: int) -> None:
    ranks(world, second)


# ---- sequences


class Tagger(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(11, 4)
        self.lstm = nn.LSTM(4, 3, 2, batch_first=True, bidirectional=True)
        self.gru = nn.GRU(6, 4)
        self.cell = nn.LSTMCell(4, 4)
        self.out = nn.Linear(4, 11)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y, (h, _) = self.lstm(self.table(x))
        y, _ = self.gru(y.transpose(0, 1))
        z, _ = self.cell(y[-1])
        return self.out(y + z + h.mean())


def sequences(rank: int, world: int) -> None:
    mesh = grid()
    torch.manual_seed(0)
    model = Tagger().double()
    twin = laid(model, mesh, whole)
    batches = [(torch.arange(15 * i, 15 * i + 15).view(5, 3) % 11,) for i in range(3)]
    trained(
        model,
        twin,
        batches,
        lambda batch: [distribute_tensor(batch[0], mesh, [S(0), R])],
        lambda m, x: F.cross_entropy(m(x).permute(1, 2, 0), x),
    )


def test_recurrent_modules(ranks: Any) -> None:
    ranks(4, sequences)


def heads(rank: int, world: int) -> None:
    mesh = grid()
    torch.manual_seed(0)
    x, key = values(4, 6, 8), values(4, 5, 8, seed=1)
    padding = torch.zeros(4, 5, dtype=torch.bool)
    padding[0, 3:] = padding[2, 4:] = True
    causal = torch.ones(6, 5, dtype=torch.bool).triu(1)
    for options in ({}, {"bias": False}, {"kdim": 8, "vdim": 8, "add_bias_kv": True, "add_zero_attn": True}):
        model = nn.MultiheadAttention(8, 2, batch_first=True, **options).double()  # type: ignore[arg-type]

        def place(name: str, p: torch.Tensor) -> list[Any]:
            # the fused projection by rows, the last by columns
            return [R, S(1)] if name == ".out_proj.weight" else [R, S(0)] if p.shape[0] == 24 else [R, R]

        twin = laid(model, mesh, place)
        for train in (True, False):
            model.train(train), twin.train(train)
            for given in (
                {"key_padding_mask": padding},
                {"attn_mask": causal, "need_weights": False},
                {"attn_mask": causal, "average_attn_weights": False},
            ):
                with torch.set_grad_enabled(train):
                    right = model(x, key, key, **given)
                    placed = {
                        k: distribute_tensor(v, mesh) if isinstance(v, torch.Tensor) else v
                        for k, v in given.items()
                    }
                    q, k = (distribute_tensor(t, mesh, [S(0), R]) for t in (x, key))
                    found = twin(q, k, k, **placed)
                for a, b in zip(found, right, strict=True):
                    assert (a is None) == (b is None)
                    if b is not None:
                        torch.testing.assert_close(a.full_tensor(), b)
                if train:
                    model.zero_grad(), twin.zero_grad()
                    right[0].pow(2).sum().backward()
                    found[0].pow(2).sum().backward()
                    for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                        torch.testing.assert_close(q.grad.full_tensor(), p.grad)  # type: ignore[union-attr]


def test_multihead_attention(ranks: Any) -> None:
    ranks(4, heads)


def transformers(rank: int, world: int) -> None:
    mesh = grid()
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 12, 0.0, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).double()
    x = values(4, 6, 8)
    padding = torch.zeros(4, 6, dtype=torch.bool)
    padding[1, 4:] = True
    twin = laid(encoder, mesh, whole)
    spread = distribute_tensor(x, mesh, [S(0), R])
    # in eval mode torch would take its fused path, with nested tensors where there is padding
    for train in (False, True):
        encoder.train(train), twin.train(train)
        for mask in (None, padding):
            given = None if mask is None else distribute_tensor(mask, mesh, [S(0), R])
            with torch.set_grad_enabled(train), warnings.catch_warnings():
                warnings.filterwarnings("ignore", ".*[Nn]ested.*", UserWarning)
                right = encoder(x, src_key_padding_mask=mask)
                found = twin(spread, src_key_padding_mask=given).full_tensor()
            if mask is not None:
                # what is padded has no meaning: the fused path gives zeros
                right, found = (t.masked_fill(mask.unsqueeze(-1), 0) for t in (right, found))
            torch.testing.assert_close(found, right)
    model = nn.Transformer(8, 2, 1, 1, 12, 0.0, batch_first=True).double()
    batches = [(values(4, 5, 8, seed=i), values(4, 3, 8, seed=9 + i)) for i in range(3)]
    mask = nn.Transformer.generate_square_subsequent_mask(3, dtype=F64)

    def loss(m: Any, source: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        return m(source, target, tgt_mask=mask, tgt_is_causal=True).pow(2).mean()

    trained(
        model,
        laid(model, mesh, whole),
        batches,
        lambda batch: [distribute_tensor(t, mesh, [S(0), S(1)]) for t in batch],
        loss,
    )


def test_transformer_modules(ranks: Any) -> None:
    ranks(4, transformers)
