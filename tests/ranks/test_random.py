"""Random values hang on the seed and the element's global index: on no layout, on no number of ranks."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import torch.utils.checkpoint
from torch import nn

import espalier
from espalier import DTensor, Mesh, Placement, Replicate, Shard
from espalier.comm import control as side

SHAPE = (5, 7)
WORLDS = [1, 2, 3, 4]
Placements = list[Placement]


def meshes(world: int) -> list[Mesh]:
    found = [Mesh.from_env({"data": world})]
    if world == 4:
        found.append(Mesh.from_env({"data": 2, "tensor": 2}))
    return found


def layouts(world: int, dims: int = 2) -> Iterator[tuple[Mesh, Placements]]:
    """Every placement without Partials, on one axis and, for four ranks, on two."""
    options: list[Placement] = [Replicate(), *(Shard(d) for d in range(dims))]
    for mesh in meshes(world):
        for placements in itertools.product(options, repeat=mesh.ndim):
            yield mesh, list(placements)


def laid(value: torch.Tensor, mesh: Mesh, placements: Placements, grad: bool = False) -> DTensor:
    return espalier.distribute_tensor(value.clone().requires_grad_(grad), mesh, placements)


Draw = Callable[[DTensor], torch.Tensor]
DRAWS: dict[str, Draw] = {
    "dropout": lambda x: F.dropout(x, 0.4),
    "dropout in place": lambda x: F.dropout(x, 0.4, inplace=True),
    "nn.Dropout": lambda x: nn.Dropout(0.3)(x),
    "rand_like": torch.rand_like,
    "randn_like": torch.randn_like,
    "randn_like float64": lambda x: torch.randn_like(x, dtype=torch.float64),
    "normal_": lambda x: x.normal_(1.0, 2.0),
    "uniform_": lambda x: x.uniform_(-1, 3),
    "bernoulli_": lambda x: x.bernoulli_(0.3),
    "bernoulli": lambda x: torch.bernoulli(torch.sigmoid(x)),
    "random_": lambda x: x.random_(3, 9),
    "exponential_": lambda x: x.exponential_(2.0),
    "geometric_": lambda x: x.geometric_(0.2),
    "cauchy_": lambda x: x.cauchy_(1.0, 2.0),
    "log_normal_": lambda x: x.log_normal_(0.5, 0.2),
    "randint_like": lambda x: torch.randint_like(x, -3, 9),
    "bernoulli p": lambda x: torch.bernoulli(x, 0.3),
    "normal": lambda x: torch.normal(x, x.abs()),
    "poisson": lambda x: torch.poisson(x.exp()),
    "alpha_dropout": lambda x: F.alpha_dropout(x, 0.4, True),
    "dropout1d": lambda x: F.dropout1d(x, 0.4),
    "rrelu": lambda x: F.rrelu(x, training=True),
    "gumbel_softmax": lambda x: F.gumbel_softmax(x, dim=0),
    "orthogonal_": nn.init.orthogonal_,
    "sparse_": lambda x: nn.init.sparse_(x, 0.4),
    "trunc_normal_": lambda x: nn.init.trunc_normal_(x, 0.5, 1.0, -1.0, 1.0),
    "kaiming_uniform_": lambda x: nn.init.kaiming_uniform_(x, a=math.sqrt(5)),
    "xavier_normal_": nn.init.xavier_normal_,
}

# what these give may lie otherwise than their input
FREE = {"gumbel_softmax"}


def drawn(rank: int, world: int, expected: dict[str, torch.Tensor] | None) -> dict[str, torch.Tensor]:
    """The values of each function, which are those expected under every layout."""
    value = torch.linspace(-2, 2, math.prod(SHAPE)).view(SHAPE)
    found: dict[str, torch.Tensor] = dict(expected or {})
    for mesh, placements in layouts(world):
        for name, draw in DRAWS.items():
            torch.manual_seed(11)
            out = draw(laid(value, mesh, placements))
            assert isinstance(out, DTensor), name
            assert out.placements == tuple(placements) or name in FREE, (name, out.placements)
            whole = out.full_tensor()
            assert torch.equal(found.setdefault(name, whole), whole), (name, placements)
    return found if expected is None else {}


def test_values_are_the_same_under_every_layout_and_rank_count(ranks: Any) -> None:
    expected = ranks(1, drawn, None)[0]
    for world in WORLDS[1:]:
        ranks(world, drawn, expected)
    assert torch.equal(expected["dropout"], expected["dropout in place"])


def filled_anew(rank: int, world: int) -> None:
    """In a pipeline, whichever rank has a weight, all go on with the same random numbers."""
    found = []
    for plan in ({"data": 2}, {"pipe": 2}):
        torch.manual_seed(0)
        net: Any = nn.Sequential(*(nn.Linear(6, 6) for _ in range(4)))
        net, optimizer = espalier.prepare(net, torch.optim.SGD(net.parameters(), 0.1), plan=plan)
        net(torch.ones(4, 6)).sum().backward()
        optimizer.step()
        for fill in (nn.init.orthogonal_, nn.init.trunc_normal_, DRAWS["sparse_"]):
            for layer in net:
                fill(layer.weight)
            found.append(torch.rand(3))
        found += net.state_dict().values()
    half = len(found) // 2
    assert all(torch.equal(a, b) for a, b in zip(found[:half], found[half:], strict=True))


def test_weights_that_are_filled_anew_in_stages(ranks: Any) -> None:
    ranks(2, filled_anew)


def factories(rank: int, world: int) -> list[list[torch.Tensor]]:
    found = []
    for mesh, placements in layouts(world, 3):
        torch.manual_seed(3)
        generator = torch.Generator().manual_seed(8)
        found.append(
            [
                espalier.rand(4, 3, 5, device_mesh=mesh, placements=placements).full_tensor(),
                espalier.randn((4, 3, 5), device_mesh=mesh, placements=placements).full_tensor(),
                espalier.randn(
                    7, 2, 3, device_mesh=mesh, placements=placements, dtype=torch.bfloat16
                ).full_tensor(),
                espalier.randint(-5, 99, (4, 3, 5), device_mesh=mesh, placements=placements).full_tensor(),
                espalier.rand(
                    1, 2, 3, device_mesh=mesh, placements=placements, dtype=torch.float64, generator=generator
                ).full_tensor(),
            ]
        )
    return found


def test_factories_are_the_same_under_every_layout_and_rank_count(ranks: Any) -> None:
    expected = ranks(1, factories)[0][0]
    for world in WORLDS:
        for found in itertools.chain.from_iterable(ranks(world, factories)):
            assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def shuffled(rank: int, world: int) -> list[torch.Tensor]:
    found = []
    for mesh, placements in layouts(world, 1):
        torch.manual_seed(3)
        found.append(espalier.randperm(7, device_mesh=mesh, placements=placements).full_tensor())
        weights = laid(torch.linspace(0, 1, 5), mesh, [Replicate()] * mesh.ndim)
        found.append(torch.multinomial(weights, 4).full_tensor())
        found.append(torch.multinomial(weights, 4, replacement=True).full_tensor())
    return found


def test_orders_and_samples_are_the_same_under_every_layout_and_rank_count(ranks: Any) -> None:
    expected = ranks(1, shuffled)[0][:3]
    assert sorted(expected[0].tolist()) == list(range(7))
    assert len(set(expected[1].tolist())) == 4 and 0 not in expected[1]
    for world in WORLDS:
        for found in ranks(world, shuffled):
            assert all(torch.equal(a, expected[i % 3]) for i, a in enumerate(found))


def dropout_gradients(rank: int, world: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    value = torch.linspace(1, 2, math.prod(SHAPE), dtype=torch.float64).view(SHAPE)
    found = []
    for mesh, placements in layouts(world):
        torch.manual_seed(4)
        x = laid(value, mesh, placements, grad=True)
        y = F.dropout(x * 2, 0.5)
        (y * value).sum().backward()
        assert isinstance(x.grad, DTensor)
        found.append((y.full_tensor().detach(), x.grad.full_tensor()))
    return found


def test_the_gradient_of_dropout_has_the_mask_of_its_values(ranks: Any) -> None:
    value = torch.linspace(1, 2, math.prod(SHAPE), dtype=torch.float64).view(SHAPE)
    for world in WORLDS:
        for out, grad in itertools.chain.from_iterable(ranks(world, dropout_gradients)):
            mask = (out != 0).double()
            assert 0 < mask.mean() < 1
            torch.testing.assert_close(out, 4 * value * mask)
            torch.testing.assert_close(grad, 4 * value * mask)


def attention_dropped(rank: int, world: int) -> list[list[torch.Tensor]]:
    generator = torch.Generator().manual_seed(1)
    values = [torch.randn(2, 4, 3, 2, dtype=torch.float64, generator=generator) for _ in range(3)]
    found = []
    for mesh, placements in layouts(world, 3):
        for causal in (False, True):
            torch.manual_seed(6)
            q, k, v = (laid(x, mesh, placements, grad=True) for x in values)
            out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4, is_causal=causal)
            (out * out).sum().backward()
            assert all(isinstance(x.grad, DTensor) for x in (q, k, v))
            wholes = [out.full_tensor().detach(), *(x.grad.full_tensor() for x in (q, k, v))]
            found.append([torch.tensor(causal), *wholes])
    return found


def test_attention_dropout_is_the_same_under_every_layout(ranks: Any) -> None:
    expected = ranks(1, attention_dropped)[0][:2]
    for world in WORLDS:
        for causal, *found in itertools.chain.from_iterable(ranks(world, attention_dropped)):
            for a, b in zip(found, expected[int(causal)][1:], strict=True):
                torch.testing.assert_close(a, b, atol=1e-12, rtol=0)


def attention_is_scaled(rank: int, world: int) -> None:
    # with values of one, what is left of the weights is seen: each a multiple of 1/(1-p) of its own
    mesh = Mesh.from_env({"tensor": world})
    zeros, ones = torch.zeros(2, 4, 50, 2), torch.ones(2, 4, 50, 2)
    q, k, v = (laid(x, mesh, [Shard(1)]) for x in (zeros, zeros, ones))
    out = F.scaled_dot_product_attention(q, k, v, dropout_p=0.4).full_tensor()
    assert abs(out.mean().item() - 1) < 0.05
    counts = out[..., 0] * 50 * 0.6
    torch.testing.assert_close(counts, counts.round(), atol=1e-3, rtol=0)
    heads = [tuple(h.flatten().tolist()) for h in out[..., 0].transpose(0, 1)]
    assert len(set(heads)) == 4, "every head has a mask of its own"


def test_attention_dropout_masks_and_scales(ranks: Any) -> None:
    ranks(2, attention_is_scaled)


def seeds(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"data": world})
    x = laid(torch.ones(6, 4), mesh, [Shard(0)])

    def draw() -> torch.Tensor:
        return torch.rand_like(x).full_tensor()

    torch.manual_seed(1)
    first, second = draw(), draw()
    assert not torch.equal(first, second), "each operation draws a key of its own"
    torch.manual_seed(1)
    assert torch.equal(draw(), first) and torch.equal(draw(), second)
    torch.manual_seed(2)
    assert not torch.equal(draw(), first)

    torch.manual_seed(1)
    with torch.random.fork_rng():
        draw()
        torch.manual_seed(9)
        draw()
    assert torch.equal(draw(), first), "what happens in a fork stays there"

    state = torch.get_rng_state()
    third = draw()
    torch.set_rng_state(state)
    assert torch.equal(draw(), third)

    torch.manual_seed(5)
    plain = torch.rand(3)
    torch.manual_seed(5)
    assert torch.equal(torch.rand(3), plain)
    generator = torch.Generator().manual_seed(2)
    state = torch.get_rng_state()
    own = x.clone().normal_(generator=generator).full_tensor()
    assert torch.equal(torch.get_rng_state(), state), "with its own generator, torch's is left alone"
    assert torch.equal(x.clone().normal_(generator=generator.manual_seed(2)).full_tensor(), own)
    torch.manual_seed(5)
    F.dropout(x, 0.5, training=False)
    F.dropout(x, 0.0)
    assert torch.equal(torch.rand(3), plain), "no dropout, no key"


def test_seeds_forks_and_states_are_honoured(ranks: Any) -> None:
    ranks(2, seeds)


def local_masks(rank: int, world: int, shape: dict[str, int]) -> tuple[tuple[int, ...], list[list[float]]]:
    mesh = Mesh.from_env(shape)
    placements = [Shard(0), Shard(1)][: mesh.ndim]
    x = laid(torch.ones(16, 16), mesh, placements)
    found = [F.dropout(x, 0.5), torch.rand_like(x), torch.randn_like(x)]
    return mesh.coordinate, [y.to_local().flatten().tolist() for y in found]


@pytest.mark.parametrize("shape", [{"data": 2}, {"data": 4}, {"data": 2, "tensor": 2}], ids=str)
def test_no_two_shards_carry_the_same_values(ranks: Any, shape: dict[str, int]) -> None:
    world = math.prod(shape.values())
    found = ranks(world, local_masks, shape)
    for kind in range(3):
        assert len({tuple(values[kind]) for _, values in found}) == world


def same_replicas(rank: int, world: int) -> list[float]:
    mesh = Mesh.from_env({"data": 2, "tensor": 2})
    x = laid(torch.ones(8, 8), mesh, [Replicate(), Shard(0)])
    return F.dropout(x, 0.5).to_local().flatten().tolist()


def test_replicas_carry_the_same_values(ranks: Any) -> None:
    found = ranks(4, same_replicas)
    assert found[0] == found[2] and found[1] == found[3] and found[0] != found[1]


def moments(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"data": world})

    def check(x: DTensor, mean: float, std: float, low: float, high: float) -> torch.Tensor:
        value = x.full_tensor().double()
        error = 5 * std / math.sqrt(value.numel())
        assert abs(value.mean().item() - mean) < error
        assert abs(value.std().item() - std) < 5 * error
        assert low <= value.min().item() and value.max().item() <= high
        # neighbours along both dims are not correlated
        for d in (0, 1):
            a, b = (value.narrow(d, i, value.shape[d] - 1).flatten() for i in (0, 1))
            assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1].item()) < 0.03
        return value

    x = espalier.empty(200, 300, device_mesh=mesh, placements=[Shard(0)], dtype=torch.float32)
    third = 1 / math.sqrt(12)
    uniform = check(torch.rand_like(x), 0.5, third, 0, 1 - 2**-24)
    assert torch.histc(uniform, 20).std() < 5 * math.sqrt(60_000 / 20)
    check(x.clone().uniform_(-1, 3), 1, 4 * third, -1, 3)
    normal = check(torch.randn_like(x), 0, 1, -6, 6)
    assert abs((normal**4).mean().item() - 3) < 0.2 and abs((normal**3).mean().item()) < 0.1
    check(x.clone().normal_(2, 0.5), 2, 0.5, -1, 5)
    check(x.clone().bernoulli_(0.3), 0.3, math.sqrt(0.21), 0, 1)
    check(x.clone().random_(0, 10), 4.5, math.sqrt(99 / 12), 0, 9)
    check(x.clone().exponential_(2.0), 0.5, 0.5, 0, 20)
    check(F.dropout(torch.ones_like(x), 0.25), 1, math.sqrt(1 / 3), 0, 1 / 0.75 + 1e-6)
    # a normal variable cut off at one: its variance is 1 - 2 phi(1) / (2 Phi(1) - 1)
    check(nn.init.trunc_normal_(x.clone(), 0, 1, -1, 1), 0, math.sqrt(0.29112), -1, 1)
    bound = math.sqrt(6 / 300)
    check(nn.init.kaiming_uniform_(x.clone()), 0, 2 * bound * third, -bound, bound)
    check(x.clone().geometric_(0.25), 4, math.sqrt(12), 1, 200)
    check(
        x.clone().log_normal_(0, 0.5), math.exp(0.125), math.exp(0.125) * math.sqrt(math.expm1(0.25)), 0, 20
    )
    check(torch.randint_like(x, -2, 8), 2.5, math.sqrt(99 / 12), -2, 7)
    check(torch.normal(torch.ones_like(x), 2.0), 1, 2, -12, 14)
    for rate in (0.3, 40.0, 2000.0):
        check(torch.poisson(torch.full_like(x, rate)), rate, math.sqrt(rate), 0, 2 * rate + 9)
    # what keeps zero mean and unit variance
    check(F.alpha_dropout(torch.randn_like(x), 0.3, True), 0, 1, -9, 9)
    quartile = (
        x.clone().cauchy_(3.0, 2.0).full_tensor().double().quantile(torch.tensor([0.25, 0.5, 0.75]).double())
    )
    torch.testing.assert_close(quartile, torch.tensor([1.0, 3.0, 5.0]).double(), atol=0.08, rtol=0)
    weights = espalier.distribute_tensor(torch.tensor([0.1, 0.0, 0.4, 0.5]).expand(3000, 4), mesh, [Shard(0)])
    first = torch.multinomial(weights, 2).full_tensor()
    again = torch.multinomial(weights, 2, replacement=True).full_tensor()
    assert (first[:, 0] != first[:, 1]).all()
    for found in (first[:, 0], again[:, 0], again[:, 1]):
        shares = torch.bincount(found, minlength=4) / 3000
        torch.testing.assert_close(shares, torch.tensor([0.1, 0.0, 0.4, 0.5]), atol=0.04, rtol=0)
    two = [torch.rand_like(x).full_tensor().flatten() for _ in range(2)]
    assert abs(torch.corrcoef(torch.stack(two))[0, 1].item()) < 0.03


def test_moments(ranks: Any) -> None:
    ranks(2, moments)


def refused(rank: int, world: int) -> None:
    mesh = Mesh.from_env({"data": world})
    with pytest.raises(ValueError, match="cannot be Partial"):
        espalier.rand(3, device_mesh=mesh, placements=[espalier.Partial()])
    x = laid(torch.ones(4), mesh, [Shard(0)])
    with pytest.raises(ValueError, match="between 0 and 1"):
        F.dropout(x, 1.5)


def test_wrong_uses_are_told(ranks: Any) -> None:
    ranks(2, refused)


def seeded_by_rank(rank: int, world: int) -> list[torch.Tensor]:
    """Draws of all kinds after ``manual_seed(rank)``: whole values."""
    mesh, value = meshes(world)[-1], torch.linspace(-2, 2, math.prod(SHAPE)).view(SHAPE)
    whole = [Replicate()] * mesh.ndim
    cut = [Shard(0), *whole[1:]]

    def all_kinds() -> list[torch.Tensor]:
        found = [draw(laid(value, mesh, pl)) for pl in (whole, cut) for draw in DRAWS.values()]
        found += [draw(4, 3, device_mesh=mesh) for draw in (espalier.rand, espalier.randn)]
        found += [espalier.randint(99, (4, 3), device_mesh=mesh), espalier.randperm(9, device_mesh=mesh)]
        weights = laid(torch.linspace(0, 1, 5), mesh, whole)
        found += [torch.multinomial(weights, 4), torch.multinomial(weights, 9, True)]
        q = laid(value.view(1, 1, *SHAPE), mesh, whole)
        found.append(F.scaled_dot_product_attention(q, q, q, dropout_p=0.4))
        found += [F.fractional_max_pool2d(q, 2, output_size=3), torch.svd_lowrank(q[0, 0], 3)[1]]
        z = laid(value.abs() + 0.1, mesh, cut)  # these draw until a number fits
        found.append(torch.distributions.Gamma(z, z, validate_args=False).rsample())
        found.append(torch.distributions.Dirichlet(z, validate_args=False).rsample())
        # what each rank has, not what rank 0 has
        return [x.redistribute(placements=whole).to_local().detach().clone() for x in found]

    torch.manual_seed(rank)
    first = all_kinds()
    plain = torch.rand(3)
    with espalier.ledger(mesh) as book, sent_to_the_store() as asked:
        second = [torch.rand_like(laid(value, mesh, [*whole])) for _ in range(5)]
    assert not asked, "no message an operation"
    assert not [e for e in book.entries if e.op != "broadcast"]
    # a plain draw is each rank's own, and changes nothing for the others
    for _ in range(rank):
        torch.rand(2)
    after = torch.rand_like(laid(value, mesh, whole)).to_local()
    # reseeded: with the same seed (rank 0's was 0 all along), with others, and as all alike
    torch.manual_seed(rank)
    again = all_kinds()
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    torch.manual_seed(7)
    alike = all_kinds()
    torch.manual_seed(0 if rank == 0 else 10 + rank)
    third = all_kinds()
    assert all(torch.equal(a, b) for a, b in zip(first, third, strict=True)), "those of the first rank's seed"
    own = torch.Generator().manual_seed(rank)
    given = laid(value, mesh, whole).normal_(generator=own).to_local()
    assert torch.initial_seed() == (0 if rank == 0 else 10 + rank)
    return [plain, torch.tensor(len(first)), *first, *[x.to_local() for x in second], after, *alike, given]


@contextlib.contextmanager
def sent_to_the_store() -> Iterator[list[str]]:
    """What the library asks the world's store while open."""
    asked: list[str] = []
    before = side.default_store

    def store() -> Any:
        asked.append("a question")
        return before()

    side.default_store = store
    try:
        yield asked
    finally:
        side.default_store = before


@pytest.mark.filterwarnings("ignore:(_standard_gamma|The autograd function _Dirichlet) has no")
@pytest.mark.parametrize("world", [2, 4])
def test_values_are_the_same_on_ranks_that_are_seeded_differently(ranks: Any, world: int) -> None:
    found = ranks(world, seeded_by_rank)
    one = ranks(1, seeded_by_rank)[0]
    for plain, *values in found[1:]:
        assert not torch.equal(plain, found[0][0]), "plain values stay each rank's own"
        for mine, first in zip(values, found[0][1:], strict=True):
            assert torch.equal(mine, first)
    # and they are those of one process with the first rank's seed, up to that process's own plain draws
    n = int(one[1])
    for many, alone in zip(found[0][1 : n + 2], one[1 : n + 2], strict=True):
        assert torch.equal(many, alone)


def recomputed(rank: int, world: int) -> list[torch.Tensor]:
    """Recomputation, forks and saved states where the ranks' generators differ."""
    mesh = meshes(world)[-1]
    whole = [Replicate()] * mesh.ndim
    torch.manual_seed(100 + rank)
    x = laid(torch.ones(6, 8), mesh, whole, grad=True)
    found = []
    for _ in range(2):
        x.grad = None
        torch.rand(rank + 1)  # plain draws, more on some ranks

        def forward(a: torch.Tensor) -> torch.Tensor:
            return F.dropout(F.dropout(a, 0.5).tanh(), 0.5)

        out = torch.utils.checkpoint.checkpoint(forward, x, use_reentrant=False)
        out.sum().backward()
        kept = out.to_local(grad_placements=whole).detach()
        assert torch.equal(x.grad.to_local() != 0, kept != 0), "the masks of the forward pass"
        found += [kept, x.grad.to_local()]
    state = torch.get_rng_state()
    first = torch.rand_like(x).to_local()
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(rank)
        found.append(torch.rand_like(x).to_local())
    if rank == 0:  # what one rank does with its generator, and takes back, concerns nobody
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            torch.rand(7)
    found += [first, torch.rand_like(x).to_local()]
    torch.set_rng_state(state)
    assert torch.equal(torch.rand_like(x).to_local(), first)
    # two meshes: their keys are not each other's
    part = mesh[mesh.names[-1]]
    y = laid(torch.ones(6, 8), part, [Replicate()])
    pairs = [(torch.rand_like(x).to_local(), torch.rand_like(y).to_local()) for _ in range(3)]
    seen = [tuple(v.flatten().tolist()) for pair in pairs for v in pair]
    assert len(set(seen)) == len(seen)
    return found + [a for a, _ in pairs]


@pytest.mark.parametrize("world", [2, 4])
def test_what_is_drawn_again_is_the_same_on_ranks_that_are_seeded_differently(ranks: Any, world: int) -> None:
    first, *others = ranks(world, recomputed)
    for values in others:
        assert all(torch.equal(a, b) for a, b in zip(first, values, strict=True))
