"""A script as people write it (transformers, datasets, a DataLoader, a schedule) under five plans."""

from __future__ import annotations

import inspect
import os
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader

import espalier

pytest.importorskip("datasets", reason="needs datasets: pip install datasets")
transformers = pytest.importorskip("transformers", reason="needs transformers: pip install transformers")

PLANS: list[dict[str, Any]] = [
    {"data": 2},
    {"data": 2, "zero": 3, "recompute": "full"},
    {"tensor": 2, "sequence_parallel": True},
    {"pipe": 2, "accumulate": 2, "clip": 1.0},
    {"context": 2, "zero": 1},
]
EPOCHS, ROWS, LENGTH = 2, 4, 16


def tokenizer() -> Any:
    from tokenizers import Tokenizer, models, pre_tokenizers

    letters = {letter: i for i, letter in enumerate(["<pad>", *map(chr, range(32, 127))])}
    raw = Tokenizer(models.WordLevel(letters, unk_token="<pad>"))
    raw.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    return transformers.PreTrainedTokenizerFast(tokenizer_object=raw, pad_token="<pad>")


def fine_tuned(plan: dict[str, Any] | None) -> list[float]:
    """The losses of the script; ``plan`` adds its one line."""
    from datasets import Dataset

    words = tokenizer()
    texts = [line for line in inspect.getsource(os).splitlines() if line.strip()][:16]
    data = Dataset.from_dict({"text": texts}).map(
        lambda row: words(row["text"], truncation=True, padding="max_length", max_length=LENGTH),
        batched=True,
        remove_columns=["text"],
    )
    collate = transformers.DataCollatorForLanguageModeling(words, mlm=False)
    loader = DataLoader(data, batch_size=ROWS, shuffle=True, collate_fn=collate)
    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        vocab_size=len(words),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=LENGTH,
    )
    model = transformers.LlamaForCausalLM(config).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = transformers.get_linear_schedule_with_warmup(optimizer, 2, EPOCHS * len(loader))
    if plan is not None:
        model, optimizer, loader, schedule = espalier.prepare(model, optimizer, loader, schedule, plan=plan)
    losses = []
    torch.manual_seed(1)
    for _ in range(EPOCHS):
        for batch in loader:
            loss = model(**batch).loss
            loss.backward()
            if (
                plan is None or "clip" not in plan
            ):  # in a pipeline no rank has all gradients: a warning says so
                torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses


def under_plans(rank: int, world: int) -> None:
    expected = fine_tuned(None)
    assert len(expected) == EPOCHS * 4 and expected[-1] < 0.9 * expected[0]
    for plan in PLANS:
        # transformers takes the loss in float32
        assert fine_tuned(plan) == pytest.approx(expected, rel=1e-6), plan


@pytest.mark.filterwarnings("ignore:Each rank loads all rows of each batch")
def test_one_line_and_any_plan(ranks: Any) -> None:
    ranks(2, under_plans)
