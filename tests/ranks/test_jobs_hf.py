"""Jobs of Hugging Face's models on text of one's own: any plan, any number of ranks, resumed or not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, models, pre_tokenizers

from espalier.train.job import Job
from espalier.train.trainer import train
from espalier.train.verify import Double

pytest.importorskip("transformers")

CHAT = "{% for m in messages %}<{{ m.role }}> {{ m.content }} <end> {% endfor %}"
CHAT += "{% if add_generation_prompt %}<assistant> {% endif %}"


def material(folder: Path) -> None:
    """A tokenizer, conversations, pairs and a plain text."""
    words = [f"w{i}" for i in range(60)]
    names = ["[UNK]", "<user>", "<assistant>", "<end>", *words]
    tokenizer = Tokenizer(models.WordLevel({n: i for i, n in enumerate(names)}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # type: ignore[assignment]
    (folder / "tokenizer").mkdir(parents=True)
    tokenizer.save(str(folder / "tokenizer" / "tokenizer.json"))
    config = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "chat_template": CHAT}
    (folder / "tokenizer" / "tokenizer_config.json").write_text(json.dumps(config))
    said = [" ".join(words[(7 * i + j) % 60] for j in range(3 + i % 5)) for i in range(40)]
    chats = [
        [{"role": "user", "content": said[i]}, {"role": "assistant", "content": said[-i]}] for i in range(40)
    ]
    (folder / "chats.jsonl").write_text("\n".join(json.dumps({"messages": chat}) for chat in chats))
    pairs = [{"q": said[i] + " ", "a": said[-i]} for i in range(40)]
    (folder / "pairs.jsonl").write_text("\n".join(map(json.dumps, pairs)))
    (folder / "text.txt").write_text(" ".join(said))


def tables(folder: Path, out: str, plan: dict[str, Any], steps: int = 4) -> dict[str, Any]:
    data: dict[str, Any] = {"tokenizer": str(folder / "tokenizer"), "cache": str(folder / "cache")}
    data |= {"rows": "padded", "val_fraction": 0.2}
    data["mixture"] = [
        {"source": str(folder / "chats.jsonl"), "chat": "messages", "weight": 2.0},
        {"source": str(folder / "pairs.jsonl"), "prompt": "q", "answer": "a"},
    ]
    config = {
        "model_type": "llama",
        "vocab_size": 64,
        "hidden_size": 16,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 16,
    }
    return {
        "model": {"kind": "hf", "config": config},
        "data": data,
        "plan": {"chunk_megabytes": 0.001, **plan},
        "optimizer": {"lr": 1e-2, "weight_decay": 0.1, "schedule": "wsd", "warmup": 1},
        "train": {
            "steps": steps,
            "batch_size": 6,
            "sequence": 12,
            "clip": 1.0,
            "log_every": 1,
            "dtype": "float64",
            "eval_every": 2,
            "eval_batches": 2,
            "sample_tokens": 3,
            "prompt": "w1 w2",
            "out": str(folder / out),
        },
        "evaluation": {"metrics": ["perplexity", "accuracy"]},
        "checkpoint": {"every": 2},
    }


def trained(rank: int, world: int, given: dict[str, Any], resume: bool = False) -> None:
    with Double():  # transformers takes logits to float32 for the loss
        train(Job.from_dict(given), resume=resume)


def results(folder: Path) -> tuple[list[list[float | None]], dict[str, torch.Tensor]]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    kept = [
        [x["loss"], x["grad_norm"], x["lr"], x["val_loss"], *(x["metrics"] or {}).values()] for x in lines
    ]
    return kept, load_file(folder / "model.safetensors")


def same(one: Any, other: Any, tolerance: float = 1e-9) -> None:
    assert len(one[0]) == len(other[0])
    for a, b in zip(one[0], other[0], strict=True):
        assert [x is None for x in a] == [x is None for x in b]
        assert all(abs(x - y) <= tolerance for x, y in zip(a, b, strict=True) if x is not None), (a, b)
    assert one[1].keys() == other[1].keys()
    for name, x in one[1].items():
        assert (x - other[1][name]).abs().max() <= tolerance, name


def test_any_plan_and_resumed(ranks: Any, tmp_path: Path) -> None:
    material(tmp_path)
    ranks(1, trained, tables(tmp_path, "one", {}))
    whole = results(tmp_path / "one")
    assert whole[0][-1][0] < whole[0][0][0]  # type: ignore[operator]
    ranks(2, trained, tables(tmp_path, "zero", {"data": 2, "zero": 3}))
    same(results(tmp_path / "zero"), whole)
    ranks(2, trained, tables(tmp_path, "half", {"tensor": 2}, steps=2) | {"optimizer": _constant()})
    again = tables(tmp_path, "half", {"data": 2, "accumulate": 3}) | {"optimizer": _constant()}
    ranks(2, trained, again, True)
    ranks(1, trained, tables(tmp_path, "straight", {}) | {"optimizer": _constant()})
    same(results(tmp_path / "half"), results(tmp_path / "straight"))
    _as_transformers_reads_it(tmp_path / "one", whole[1])


def _constant() -> dict[str, Any]:
    return {"lr": 1e-2, "weight_decay": 0.1}


def _as_transformers_reads_it(run: Path, weights: dict[str, torch.Tensor]) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(run, dtype=torch.float64)
    assert type(model).__name__ == "LlamaForCausalLM"
    for name, x in model.state_dict().items():
        assert torch.equal(x, weights[name]), name
    tokenizer = AutoTokenizer.from_pretrained(run)
    assert tokenizer.decode(tokenizer("w1 w5").input_ids).split() == ["w1", "w5"]
    assert tokenizer.chat_template == CHAT


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing`")  # peft asks transformers for it
def test_adapters(ranks: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    material(tmp_path)
    ranks(1, trained, tables(tmp_path, "base", {}, steps=1))
    losses = []
    for world, out, plan in ((1, "a", {}), (2, "b", {"data": 2, "zero": 3}), (2, "c", {"tensor": 2})):
        given = tables(tmp_path, out, plan, steps=2)
        given["model"] = {"kind": "hf", "path": str(tmp_path / "base"), "lora": {"rank": 2}}
        ranks(world, trained, given)
        losses.append(results(tmp_path / out))
    same(losses[1], losses[0])
    same(losses[2], losses[0])
    base = load_file(tmp_path / "base" / "model.safetensors")
    changed = {name for name, x in losses[0][1].items() if not torch.equal(x, base[name])}
    assert len(changed) == 14 and all(".q_proj" in n or ".mlp." in n or "self_attn" in n for n in changed)
    _merged_is_base_with_adapter(tmp_path, losses[0][1])


def test_muon_and_groups(ranks: Any, tmp_path: Path) -> None:
    material(tmp_path)
    told = []
    for world, out, plan in ((1, "alone", {}), (2, "zero", {"data": 2, "zero": 2})):
        given = tables(tmp_path, out, plan, steps=2)
        groups = [{"pattern": "*layers.0.*", "lr": 1e-3}, {"pattern": "lm_head*", "weight_decay": 0.0}]
        given["optimizer"] = {"name": "Muon", "lr": 1e-2, "rest": {"lr": 1e-3}, "groups": groups}
        ranks(world, trained, given)
        told.append(results(tmp_path / out))
    same(told[1], told[0], 1e-6)


def _merged_is_base_with_adapter(folder: Path, merged: dict[str, torch.Tensor]) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    base = AutoModelForCausalLM.from_pretrained(folder / "base", dtype=torch.float64)
    model = PeftModel.from_pretrained(base, folder / "a" / "adapter").merge_and_unload()
    for name, x in model.state_dict().items():
        assert (x - merged[name]).abs().max() < 1e-7, name
