"""The plain models: shapes, causality, losses, configs and their errors."""

import ast
import math
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

import espalier.models
from espalier.models import GPT, GPT2, ConfigError, GPT2Config, GPTConfig, build, kinds, moe
from espalier.models.gpt import rotary_tables, rotate
from espalier.models.sampling import keepers

SMALL = {"vocab_size": 37, "max_positions": 16, "layers": 2, "hidden": 24, "heads": 4}
VARIANTS = [
    ("gpt", {}),
    ("gpt", {"kv_heads": 2, "bias": True, "tied": True}),
    ("gpt", {"hidden": 22, "heads": 3, "kv_heads": 1, "head_dim": 6, "ffn": 19}),
    ("gpt2", {}),
    ("gpt2", {"bias": False, "tied": False}),
    ("moe", {"experts": 4}),
    ("moe", {"experts": 5, "top_k": 3, "shared": 2, "kv_heads": 2, "ffn": 19, "normalize": False}),
]


def make(kind, **changes):
    torch.manual_seed(0)
    return build(kind, {**SMALL, **changes}).double()


def tokens(*shape, seed=1):
    return torch.randint(37, shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_output_and_gradients(kind, changes):
    model = make(kind, **changes)
    ids, labels = tokens(3, 11), tokens(3, 11, seed=2)
    labels[0, :4] = -100
    out = model(ids, labels)
    assert out.logits.shape == (3, 11, 37)
    assert model(ids).loss is None
    keep = labels != -100
    expected = F.cross_entropy(out.logits[keep], labels[keep])
    if kind == "moe":
        expected = expected + 0.01 * out.balance + 0.001 * out.z
    torch.testing.assert_close(out.loss, expected)
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())


@pytest.mark.parametrize(("kind", "changes"), VARIANTS)
def test_no_position_sees_a_later_one(kind, changes):
    model = make(kind, **changes)
    ids = tokens(2, 12)
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 37
    before, after = model(ids).logits, model(changed).logits
    torch.testing.assert_close(before[:, :7], after[:, :7])
    assert not torch.allclose(before[:, 7:], after[:, 7:])


def test_bert_sees_both_sides():
    model = make("bert")
    ids, labels = tokens(2, 12), tokens(2, 12, seed=2)
    labels[:, 3:] = -100
    out = model(ids, labels)
    torch.testing.assert_close(
        out.loss, F.cross_entropy(out.logits[:, :3].flatten(0, 1), labels[:, :3].flatten())
    )
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    changed = ids.clone()
    changed[:, 7:] = (changed[:, 7:] + 1) % 37
    assert not torch.allclose(out.logits[:, :7], model(changed).logits[:, :7])


def test_vit():
    model = build("vit", {"image": 8, "patch": 4, "channels": 1, "hidden": 24, "heads": 4, "layers": 2})
    images, labels = torch.randn(3, 1, 8, 8), torch.tensor([1, 0, 9])
    out = model(images, labels)
    assert out.logits.shape == (3, 10)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits, labels))
    out.loss.backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
    with pytest.raises(ValueError, match=r"expected \[batch, 1, 8, 8\]"):
        model(torch.randn(3, 1, 9, 8))
    with pytest.raises(ConfigError, match="image = 10 is not a multiple of patch = 4"):
        build("vit", {"image": 10})


def layer(**changes):
    return make("moe", experts=4, **changes).blocks[0].moe


def by_hand(moe, x, dropped=frozenset()):
    """Token by token, choice by choice."""
    chances = moe.router(x).softmax(-1)
    out = torch.zeros_like(x)
    for t, chance in enumerate(chances):
        best = chance.argsort(descending=True)[: moe.top_k].tolist()
        for e in best:
            if (t, e) in dropped:
                continue
            gate, up = moe.experts.gate_proj[e] @ x[t], moe.experts.up_proj[e] @ x[t]
            out[t] += chance[e] / chance[best].sum() * (moe.experts.down_proj[e] @ (F.silu(gate) * up))
    return out


def test_experts_by_hand():
    moe, x = layer(), torch.randn(2, 5, 24, dtype=torch.float64)
    torch.testing.assert_close(moe(x)[0].flatten(0, 1), by_hand(moe, x.flatten(0, 1)))
    shared = layer(shared=1)
    expected = by_hand(shared, x.flatten(0, 1)).view_as(x) + shared.shared(x)
    torch.testing.assert_close(shared(x)[0], expected)


def test_capacity_drops_the_last_and_counts_them():
    moe, x = layer(capacity=0.5, top_k=2), torch.randn(1, 12, 24, dtype=torch.float64)
    room, taken, dropped = 3, [0] * 4, set()  # half of 12 tokens × 2 choices / 4 experts
    for t, chance in enumerate(moe.router(x[0]).softmax(-1)):
        for e in chance.argsort(descending=True)[:2].tolist():
            taken[e] += 1
            if taken[e] > room:
                dropped.add((t, e))
    out, routing = moe(x)
    assert dropped and routing.dropped.item() == len(dropped)
    torch.testing.assert_close(out[0], by_hand(moe, x[0], dropped))


def test_balance_is_one_where_shares_are_equal_and_the_number_of_experts_at_worst():
    moe, x = layer(top_k=1), torch.randn(1, 4, 24, dtype=torch.float64)
    with torch.no_grad():
        moe.router.weight.zero_()
        assert moe(x)[1].balance.item() == pytest.approx(1)
        assert moe(x)[1].z.item() == pytest.approx(math.log(4) ** 2)
        moe.router.weight[2] = 1e3 * torch.linalg.pinv(x[0]).sum(1)
        assert moe(x)[1].balance.item() == pytest.approx(4)


def test_losses_of_the_router_are_left_out_of_an_evaluation():
    model, ids = make("moe").eval(), tokens(2, 8)
    out = model(ids, ids)
    torch.testing.assert_close(out.loss, F.cross_entropy(out.logits.flatten(0, 1), ids.flatten()))


def test_rotary_scores_depend_on_distance_alone():
    cos, sin = rotary_tables(32, 8, 10_000.0)
    q, k = torch.randn(1, 1, 1, 8), torch.randn(1, 1, 1, 8)
    turned_q, turned_k = (rotate(x.expand(1, 1, 32, 8), cos, sin) for x in (q, k))
    scores = (turned_q @ turned_k.transpose(-1, -2))[0, 0]
    torch.testing.assert_close(scores[3, 1], scores[20, 18])
    torch.testing.assert_close(turned_q.norm(dim=-1), q.norm(dim=-1).expand(1, 1, 32))


def test_rotary_tables_are_not_saved():
    assert not {"cos", "sin"} & set(make("gpt").state_dict())


def test_residual_weights_start_smaller():
    model = build("gpt", {"hidden": 128, "heads": 4, "layers": 8})
    block = model.blocks[0]
    assert block.mlp.up_proj.weight.std().item() == pytest.approx(0.02, rel=0.05)
    assert block.mlp.down_proj.weight.std().item() == pytest.approx(0.02 / 4, rel=0.05)


def test_tied_head_is_one_parameter():
    model = make("gpt2")
    assert model.head.weight is model.embed.weight
    assert "head.weight" not in dict(model.named_parameters())


@pytest.mark.parametrize("kind", ["gpt", "gpt2"])
def test_dropout_only_while_training(kind):
    model = make(kind, dropout=0.5)
    ids = tokens(2, 8)
    assert not torch.equal(model(ids).logits, model(ids).logits)
    model.eval()
    assert torch.equal(model(ids).logits, model(ids).logits)


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "moe"])
def test_generate(kind):
    model = make(kind, dropout=0.1)
    prompt = tokens(2, 3)

    def draw(**options):
        return model.generate(prompt, 20, generator=torch.Generator().manual_seed(3), **options)

    ids = draw(top_k=5)
    assert ids.shape == (2, 23)
    assert torch.equal(ids[:, :3], prompt)
    assert torch.equal(ids, draw(top_k=5))
    assert model.training
    assert torch.equal(draw(temperature=0.0), draw(top_k=1))
    likeliest = model.eval()(prompt).logits[:, -1].argmax(-1)
    assert torch.equal(draw(temperature=0.0)[:, 3], likeliest)


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_experts_answer_for_each_token_alone_if_they_have_room(capacity):
    model = make("moe", capacity=capacity)
    assert len(keepers(model)) == (model.config.layers if capacity is None else 0)
    texts = [model.generate(tokens(3, 4), 6, temperature=0.0, cache=cache) for cache in (True, False)]
    assert torch.equal(*texts)


@pytest.mark.parametrize(
    ("options", "message"),
    [({"temperature": -1.0}, "temperature must be 0"), ({"top_k": 0}, "top_k must be at least 1")],
)
def test_generate_refuses(options, message):
    with pytest.raises(ValueError, match=message):
        make("gpt").generate(tokens(1, 2), 1, **options)


def test_generate_needs_a_prompt():
    with pytest.raises(ValueError, match="at least one token"):
        make("gpt").generate(torch.empty(1, 0, dtype=torch.int64), 1)


@pytest.mark.parametrize("kind", ["gpt", "gpt2", "bert"])
def test_too_long_a_sequence(kind):
    with pytest.raises(ValueError, match="17 tokens is longer than max_positions = 16"):
        make(kind)(tokens(1, 17))


def test_build_on_meta():
    with torch.device("meta"):
        for kind in kinds():
            assert all(p.is_meta for p in build(kind, {}).parameters())


def test_every_mistake_at_once():
    with pytest.raises(ConfigError) as caught:
        build("gpt", {"hiddn": 3, "layers": "four", "dropout": 0.1, "biass": True})
    text = str(caught.value)
    assert "hiddn = 3: unknown key; did you mean hidden?" in text
    assert "did you mean bias?" in text
    assert "layers = 'four': expected a valid integer" in text


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden": 25}, "hidden = 25 is not a multiple of heads = 4"),
        ({"hidden": 12}, "the width of a head, 3, must be even"),
        ({"kv_heads": 3}, "heads = 4 is not a multiple of kv_heads = 3"),
        ({"layers": 0}, "layers = 0 must be at least 1"),
        ({"dropout": 1.0}, "dropout = 1.0 must be"),
    ],
)
def test_sizes_that_do_not_fit(changes, message):
    with pytest.raises(ConfigError, match=message):
        build("gpt", {**SMALL, **changes})


def test_gpt2_sizes_that_do_not_fit():
    with pytest.raises(ConfigError, match=r"hidden = 25 is not a multiple of heads = 4\n  dropout = -1.0"):
        build("gpt2", {**SMALL, "hidden": 25, "dropout": -1.0})


def test_moe_sizes_that_do_not_fit():
    text = "top_k = 9 must be at least 1 and at most experts = 8\n  capacity = 0.0 must be above 0"
    with pytest.raises(ConfigError, match=text):
        build("moe", {"top_k": 9, "capacity": 0.0})


def test_unknown_kind():
    with pytest.raises(ConfigError, match="did you mean 'gpt2'"):
        build("gtp2", {})


def test_dataclasses_build_directly():
    assert GPT(GPTConfig(layers=1, hidden=60)).config.size_of_ffn == 160
    assert GPT2(GPT2Config(layers=1)).config.size_of_ffn == 768


def test_models_know_nothing_of_the_rest():
    folder = Path(espalier.models.__file__).parent
    allowed = "espalier.texts", "espalier.blocks", "espalier.device", "espalier.later"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("espalier"):
                assert node.module.startswith("espalier.models") or node.module in allowed, path


@pytest.mark.skipif(not hasattr(F, "grouped_mm"), reason="this torch has no products of groups")
@pytest.mark.parametrize("sizes", [[3, 0, 5, 4], [0, 0, 0, 12], [12, 0, 0, 0]])
def test_grouped_products_are_those_of_a_loop(monkeypatch, sizes):
    """Experts without rows too; values and gradients, by the CPU's own operator."""
    torch.manual_seed(0)
    experts = moe.Experts(moe.MoEConfig(**SMALL, experts=4, ffn=16)).bfloat16()
    with torch.no_grad():
        for parameter in experts.parameters():
            parameter.normal_(std=0.3)
    rows = torch.randn(12, 24, dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(12, 24, dtype=torch.bfloat16)
    results, products = [], []
    grouped = F.grouped_mm

    def counted(*given, **more):
        products.append(None)
        return grouped(*given, **more)

    monkeypatch.setattr(F, "grouped_mm", counted)
    for in_groups in (False, True):
        monkeypatch.setattr(moe, "has_grouped_products", lambda kind, there=in_groups: there)
        out = experts.of_sorted(rows, sizes)
        results.append([out, *torch.autograd.grad((out * weight).sum(), [rows, *experts.parameters()])])
        assert len(products) == 3 * in_groups
    for loop, groups in zip(*results, strict=True):
        torch.testing.assert_close(groups, loop, atol=0.05, rtol=0.02)
    for i, n in enumerate(sizes):
        assert all((grad[i] == 0).all() == (n == 0) for grad in results[1][2:])
