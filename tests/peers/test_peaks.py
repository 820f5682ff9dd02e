"""The most that lives at once on a rank, beside what a dry run says: plans and models drawn by lot.

Some are drawn here; with ``ESPALIER_SWEEP=n`` n of them, and each is printed with its error.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Callable
from itertools import zip_longest
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

import espalier
from espalier.models import GPT, GPTConfig
from espalier.tensor.live_memory import LiveMemory
from tests.asked import ASKED
from tests.ranks.test_plans import drawn_plan

PRELOAD = ["transformers.modeling_utils"]
HERE = (1, 21, 23, 39, 41, 60, 63)  # those that are drawn without it
WORDS, LENGTH, WIDTH, HEADS, LAYERS = 128, 64, 64, 4, 4
BAR = 0.01
KINDS = ("gpt", "llama", "gpt2", "bert")


class Draw(NamedTuple):
    """A model, the rows of its batches, and a plan."""

    world: int
    kind: str
    rows: int
    plan: dict[str, Any]


def drawn(seed: int) -> Draw:
    """The draw of a number."""
    lot = random.Random(seed)
    kind = KINDS[seed % len(KINDS)]
    world = 2 if seed // len(KINDS) % 2 == 0 else 4
    plan = drawn_plan(lot, world, kind, LAYERS)
    plan["precision"] = lot.choice(["float32", "float32", "bfloat16", "autocast-bfloat16"])
    return Draw(world, kind, 4 * plan["accumulate"] * plan.get("data", 1) * plan.get("replicate", 1), plan)


def built(kind: str) -> nn.Module:
    if kind == "gpt":
        sizes = {"layers": LAYERS, "hidden": WIDTH, "heads": HEADS}
        return GPT(GPTConfig(vocab_size=WORDS, max_positions=LENGTH, **sizes))
    import transformers as hf

    wide: dict[str, Any] = {"hidden_size": WIDTH, "intermediate_size": 2 * WIDTH, "num_hidden_layers": LAYERS}
    text = {"vocab_size": WORDS, "max_position_embeddings": LENGTH, "num_attention_heads": HEADS}
    if kind == "bert":
        return hf.BertForMaskedLM(hf.BertConfig(**wide, **text))
    if kind == "gpt2":
        sizes = {"n_embd": WIDTH, "n_layer": LAYERS, "n_head": HEADS, "n_positions": LENGTH}
        return hf.GPT2LMHeadModel(hf.GPT2Config(vocab_size=WORDS, **sizes, use_cache=False))
    return hf.LlamaForCausalLM(hf.LlamaConfig(**wide, **text, num_key_value_heads=2, use_cache=False))


def batch(rows: int, device: str) -> dict[str, torch.Tensor]:
    ids = (torch.arange(rows * LENGTH).view(rows, LENGTH) * 7 % WORDS).to(device)
    return {"input_ids": ids, "labels": ids}


class Settled(LiveMemory):
    """Gives gloo's threads, which let go of what they have sent a little later, the time for it."""

    patience, allowed = 0.0, 0

    @property
    def now(self) -> int:
        deadline = time.monotonic() + self.patience
        while (now := super().now) > self.allowed and time.monotonic() < deadline:
            time.sleep(0.001)
        self.allowed = max(self.allowed, now)
        return now


def real_and_dry(rank: int, world: int, draw: Draw, folder: str) -> tuple[int, int] | str | None:
    """The peaks of a real step and of a dry one of this rank; why the plan is refused, if it is.

    A dry run takes longer than all else here. So it is made on every rank in sweeps alone, else on the first
    of the first stage, on the last of the last, and on those of stages between.
    """
    warnings.filterwarnings("ignore", ".* cannot be met")
    plan, given = draw.plan, {"max_grad_norm": 1.0}
    if "disk" in plan["offload"].values():
        plan = {**plan, "offload": {**plan["offload"], "directory": folder}}
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("espalier.engine.report.LiveMemory", Settled)
        net, data = built(draw.kind), batch(draw.rows, "cpu")
        try:
            engine = espalier.initialize(
                net, torch.optim.AdamW(net.parameters()), plan, example=data, **given
            )
            engine.train_step(data)
        except (ValueError, NotImplementedError) as error:
            return str(error)
        if not ASKED and plan.get("pipe", 1) <= 2 and 0 < rank < world - 1:
            engine.train_step(data)
            return None
        with torch.device("meta"):
            twin = built(draw.kind)
        given |= {"optimizer": torch.optim.AdamW(twin.parameters()), "coordinate": engine.mesh.coordinate}
        told = espalier.dry_run(twin, plan, batch(draw.rows, "meta"), **given)
        watch = engine.watch()
        watch.live.patience, watch.live.allowed = 1.0, round(1.003 * told.peak_bytes)
        with espalier.ledger(engine.mesh) as book, watch:
            engine.train_step(data)
        if book.entries != told.ledger.entries:
            pairs = zip_longest(book.entries, told.ledger.entries)
            return f"other ledger: {[pair for pair in pairs if pair[0] != pair[1]][:3]}"
        return watch.peak, told.peak_bytes


@pytest.mark.world(4)
@pytest.mark.parametrize("seed", range(ASKED) if ASKED else HERE)
def test_a_real_peak_is_a_dry_one(ranks: Callable[..., Any], seed: int, tmp_path: Any) -> None:
    draw = drawn(seed)
    peaks = ranks(draw.world, real_and_dry, draw, str(tmp_path))
    refused = [x for x in peaks if isinstance(x, str)]
    if refused:
        assert not refused[0].startswith("other"), refused[0]
        pytest.skip(refused[0])
    errors = [real / dry - 1 for real, dry in filter(None, peaks)]
    if ASKED:
        print(f"\n{seed} {max(errors, key=abs):+.2%} {peaks} {draw}")
    assert max(map(abs, errors)) < BAR, (peaks, draw)
