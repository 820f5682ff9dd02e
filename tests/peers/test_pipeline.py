"""Hugging Face's models, unchanged, through the real pipeline: equal to one process."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.models import generate
from espalier.models.sampling import KNOWN, keepers
from espalier.parallel.pipeline.arguments import leaves
from espalier.train.verify import Double
from tests.asked import left_to_sweeps
from tests.peers.test_split import made


def trains(rank: int, world: int, trials: list[tuple[str, dict[str, Any]]]) -> None:
    for name, plan in trials:
        net, batches = made(name)
        net = net.double().eval()  # its dropouts draw otherwise than plain torch's
        plain = copy.deepcopy(net)
        ours, theirs = (torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (net, plain))
        engine = espalier.initialize(net, ours, plan, max_grad_norm=0.5)
        # the second batch has another shape, and a mask on whose values control flow depends
        for batch in batches[:2]:
            data = {key: torch.cat([x, x.flip(0)]) for key, x in batch.items()}
            with Double():  # transformers computes the loss of causal models in float32
                expected = plain(**data).loss
            expected.backward()
            with Double():
                engine.accumulate(engine.cut(data))
            engine.finish_gradients()
            assert abs(engine.loss.item() - expected.item()) < 1e-10, (name, plan)
            found = engine.full_gradients()
            for key, q in plain.named_parameters():
                if q.grad is not None:
                    assert (found[key] - q.grad).abs().max() < 1e-10, (name, plan, key)
            norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.5)
            theirs.step()
            theirs.zero_grad()
            assert engine.step()
            assert abs(engine.grad_norm.item() - norm.item()) < 1e-10, (name, plan)
        with torch.no_grad(), Double():
            expected = plain(**data)
            assert abs(engine.evaluate(engine.cut(data)).item() - expected.loss.item()) < 1e-10
            output = engine.predict(data)
        assert type(output) is type(expected)
        for x, y in zip(leaves(output, torch.Tensor), leaves(expected, torch.Tensor), strict=False):
            assert type(x) is torch.Tensor
            torch.testing.assert_close(x, y, rtol=0, atol=1e-10)
        state = engine.full_state_dict()
        for key, value in plain.state_dict().items():
            assert (state[key] - value).abs().max() < 1e-10, (name, plan, key)
        if name in ("gpt2", "llama"):
            writes(engine, plain)


def writes(engine: Any, plain: nn.Module) -> None:
    """Prompts are continued as one process does, whatever the rows that a rank has."""
    for rows, given in ((1, {"temperature": 0.0}), (3, {"top_k": 5})):
        prompt = torch.arange(rows * 4).reshape(rows, 4) % 50 + 3
        texts = []
        for continued in (engine.generate, lambda *a, **k: generate(plain, *a, cache=False, **k)):
            texts.append(continued(prompt, 3, generator=torch.Generator().manual_seed(1), **given))
        assert torch.equal(*texts) and texts[0].shape == (rows, 7)


# of which transformers' models attention keeps keys and values: sizes as each calls them
SIZES = {
    "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "intermediate_size": 48, "n_embd": 32, "n_layer": 2, "n_head": 4, "head_dim": 8,
    "rotary_dim": 4, "sliding_window": None, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
CLASSES = "GPT2LMHeadModel GPTNeoXForCausalLM GPTJForCausalLM LlamaForCausalLM MistralForCausalLM"
CLASSES += " PhiForCausalLM Qwen2ForCausalLM Qwen3ForCausalLM"


@pytest.mark.parametrize("name", CLASSES.split())
def test_tokens_are_those_without_what_is_kept(name: str) -> None:
    torch.manual_seed(1)
    kind = getattr(pytest.importorskip("transformers"), name)
    net = kind(kind.config_class(**SIZES)).double()
    for p in net.parameters():
        nn.init.normal_(p, std=0.3)
    assert len(keepers(net)) == 2 and net.config.model_type in KNOWN
    lengths: list[int] = []
    net.register_forward_pre_hook(lambda m, args, kwargs: lengths.append(args[0].shape[1]), with_kwargs=True)
    prompt = torch.randint(0, 64, (3, 5))
    texts = [generate(net, prompt, 8, temperature=0.0, cache=cache) for cache in (True, False)]
    assert torch.equal(*texts) and lengths == [5, *[1] * 7, *range(5, 13)]
    net.config.sliding_window, net.config.use_sliding_window = 4, True
    assert not keepers(net)


def test_what_is_kept_is_known_of_each() -> None:
    assert len(KNOWN) == len(CLASSES.split())


@pytest.mark.long
@pytest.mark.parametrize(
    ("world", "trials"),
    left_to_sweeps(
        [
            (
                2,
                [
                    ("gpt2", {"pipe": 2, "accumulate": 2}),
                    ("bert", {"pipe": 2, "accumulate": 2, "schedule": "gpipe"}),
                    ("t5", {"pipe": 2, "accumulate": 3}),
                ],
            ),
            (
                4,
                [
                    ("llama", {"pipe": 2, "tensor": 2, "accumulate": 2, "schedule": "zb-h1"}),
                    ("t5", {"pipe": 4, "accumulate": 2}),
                    ("vit", {"pipe": 2, "data": 2, "accumulate": 2, "zero": 3}),
                ],
            ),
            (
                4,
                [
                    ("llama", {"pipe": 2, "tensor": 2, "accumulate": 2}),
                    ("gpt2", {"pipe": 2, "tensor": 2, "accumulate": 2, "schedule": "zb-h1"}),
                ],
            ),
        ],
        2,
        why="the model, the schedules and the axes are in others",
    ),
    ids=["2", "4", "4 more"],
)
def test_equals_one_process(ranks: Any, world: int, trials: list[Any]) -> None:
    ranks(world, trains, trials, timeout=300)


def packed(rank: int, world: int) -> None:
    """Positions that begin anew within a row: masks hang on whether there is a cache, asked for or not."""
    hf = pytest.importorskip("transformers")
    rows = [[*range(5), *range(4)], [*range(9)]]

    def losses(use_cache: bool | None, lay: Any) -> list[float]:
        torch.manual_seed(0)
        net = hf.LlamaForCausalLM(hf.LlamaConfig(**{**SIZES, "head_dim": None})).double()
        net, optimizer = lay(net, torch.optim.SGD(net.parameters(), 1.0))
        given = {} if use_cache is None else {"use_cache": use_cache}
        found = []
        for positions in ([rows[1], rows[1]], rows):
            ids = torch.randint(3, 64, (2, 9), generator=torch.Generator().manual_seed(len(found)))
            logits = net(ids, position_ids=torch.tensor(positions), **given).logits
            loss = F.cross_entropy(logits.flatten(0, 1), ids.flatten())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(loss.item())
        return found

    by_cache = {}
    for use_cache in (None, False):
        by_cache[use_cache] = expected = losses(use_cache, lambda *given: given)
        for plan, options in (({"pipe": 2}, {}), ({"data": 2}, {"compile": "eager"})):
            found = losses(use_cache, partial(espalier.prepare, plan=plan, **options))
            assert found == pytest.approx(expected, rel=0, abs=1e-10), (use_cache, plan)
    assert abs(by_cache[None][1] - by_cache[False][1]) > 1e-4


def test_rows_of_several_sequences(ranks: Any) -> None:
    ranks(2, packed)
