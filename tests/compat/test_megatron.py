"""Megatron-core's checkpoints in and out: its own, and such as are made here by its keys."""

from __future__ import annotations

import argparse
import importlib.util
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.nn import functional as F

import espalier
from espalier.checkpoint.foreign import Foreign, load_into
from espalier.checkpoint.index import FormatError
from espalier.checkpoint.megatron import in_names_of
from espalier.checkpoint.sinks import export
from espalier.checkpoint.sources import open_any
from tests.compat.megatron_program import EXPERTS, FORMS, SHAPE, WORDS, batch

pytest.importorskip("transformers")
PROGRAM = Path(__file__).with_name("megatron_program.py")
MIXED = ("mixtral", "qwen2_moe", "qwen3_moe", "glm4_moe", "deepseek_v3")
BIASED = {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1}
OWN: dict[str, dict[str, Any]] = {
    "qwen2_moe": {"shared_expert_intermediate_size": 24},
    "qwen3_moe": {"decoder_sparse_step": 2},  # the first layer has no experts
    "glm4_moe": {**BIASED, "n_routed_experts": EXPERTS["num_moe_experts"], "use_qk_norm": True},
    "deepseek_v3": {
        **BIASED,
        "q_lora_rank": 12,
        "kv_lora_rank": 16,
        "qk_nope_head_dim": 8,
        "qk_rope_head_dim": 4,
        "v_head_dim": 10,
        "n_routed_experts": EXPERTS["num_moe_experts"],
        "first_k_dense_replace": 0,
        "n_shared_experts": 2,
    },
}
LATENT = {
    "q_a_proj": "linear_q_down_proj.weight",
    "q_a_layernorm": "linear_q_up_proj.layer_norm_weight",
    "q_b_proj": "linear_q_up_proj.weight",
    "kv_a_proj_with_mqa": "linear_kv_down_proj.weight",
    "kv_a_layernorm": "linear_kv_up_proj.layer_norm_weight",
    "kv_b_proj": "linear_kv_up_proj.weight",
    "o_proj": "linear_proj.weight",
}
BIAS = "mlp.router.expert_bias"
MLP, SHARED = {"mlp.": "mlp."}, {"mlp.shared_experts.": "mlp.shared_expert."}
BACKENDS = {"sharded_backend": "torch_dist", "sharded_backend_version": 1}


def model_of(kind: str, seed: int) -> nn.Module:
    """transformers' model of the program's sizes, in float64, with weights of its own."""
    from transformers import AutoConfig, AutoModelForCausalLM

    sizes: dict[str, Any] = {
        "hidden_size": SHAPE["hidden_size"],
        "num_attention_heads": SHAPE["num_attention_heads"],
        "num_hidden_layers": SHAPE["num_layers"],
        "max_position_embeddings": 16,
        "vocab_size": WORDS,
        "bos_token_id": 0,
        "eos_token_id": 0,
    }
    inner = SHAPE["ffn_hidden_size"]
    if kind in MIXED:
        own = {"num_experts": EXPERTS["num_moe_experts"], **OWN.get(kind, {})}
        if "n_routed_experts" in own:
            del own["num_experts"]
        sizes |= {"num_experts_per_tok": 2, **own}
        sizes |= {"moe_intermediate_size": EXPERTS["moe_ffn_hidden_size"]}
        sizes |= {"head_dim": 8} if kind != "deepseek_v3" else {}
        sizes["experts_implementation"] = "eager"  # torch has no grouped products of float64
        rope = {"rope_type": "default", "rope_theta": 1e4}
        rope |= {"partial_rotary_factor": 0.5} if kind == "glm4_moe" else {}
        sizes |= {"rms_norm_eps": 1e-6, "rope_parameters": rope}
        inner = EXPERTS["moe_ffn_hidden_size"] if kind == "mixtral" else inner
    if kind == "gpt2":
        dropout = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
        config = AutoConfig.for_model(kind, n_inner=inner, activation_function="gelu", **dropout, **sizes)
    else:
        sizes |= {"head_dim": 16} if kind == "qwen3" else {}  # not hidden_size / heads
        groups = 4 if kind == "deepseek_v3" else 2
        config = AutoConfig.for_model(kind, intermediate_size=inner, num_key_value_heads=groups, **sizes)
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float64)
    with torch.no_grad():
        for p in model.parameters():  # also of norms and biases, which are 1 and 0
            p += 0.1 * torch.randn_like(p)
        for name, x in model.named_buffers():
            if name.endswith("e_score_correction_bias"):
                x += torch.randn_like(x)
    return model  # type: ignore[no-any-return]


def optimizer_of(model: nn.Module, lr: float = 1.0) -> torch.optim.Optimizer:
    """Two groups, as Megatron makes them."""
    held = list(model.parameters())
    groups = [{"params": [p for p in held if p.ndim > 1]}, {"params": [p for p in held if p.ndim == 1]}]
    return torch.optim.AdamW(groups, lr=lr)


def loss_of(out: Any, labels: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(out.logits.flatten(0, 1), labels.flatten())


# ---- made here, by the keys of the format


def as_theirs(kind: str, state: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A model's tensors as Megatron lays them out, by reshaping whole ones."""
    n, heads, hidden = SHAPE["num_layers"], SHAPE["num_attention_heads"], SHAPE["hidden_size"]
    head = hidden // heads

    def stacked(name: str, start: str) -> torch.Tensor:
        return torch.stack([state[f"{start}{i}.{name}"] for i in range(n)])

    def padded(x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, torch.full((4, x.shape[1]), 7.0, dtype=x.dtype)])

    made: dict[str, torch.Tensor] = {}
    if kind == "gpt2":
        start = "transformer.h."
        for word in ("weight", "bias"):
            qkv = stacked(f"attn.c_attn.{word}", start)
            qkv = qkv.mT if word == "weight" else qkv.unsqueeze(-1)
            parts = [x.reshape(n, heads, head, -1) for x in qkv.chunk(3, dim=1)]
            qkv = torch.cat(parts, dim=2).reshape(n, 3 * hidden, -1)
            made[f"self_attention.linear_qkv.{word}"] = qkv if word == "weight" else qkv.squeeze(-1)
            for theirs, name in (
                ("self_attention.linear_proj", "attn.c_proj"),
                ("mlp.linear_fc1", "mlp.c_fc"),
                ("mlp.linear_fc2", "mlp.c_proj"),
            ):
                x = stacked(f"{name}.{word}", start)
                made[f"{theirs}.{word}"] = x.mT.contiguous() if word == "weight" else x
            made[f"self_attention.linear_qkv.layer_norm_{word}"] = stacked(f"ln_1.{word}", start)
            made[f"mlp.linear_fc1.layer_norm_{word}"] = stacked(f"ln_2.{word}", start)
        outside = {
            "embedding.word_embeddings.weight": padded(state["transformer.wte.weight"]),
            "embedding.position_embeddings.weight": state["transformer.wpe.weight"],
            "decoder.final_layernorm.weight": state["transformer.ln_f.weight"],
            "decoder.final_layernorm.bias": state["transformer.ln_f.bias"],
        }
    else:
        start = "model.layers."
        if kind == "deepseek_v3":
            for name, theirs in LATENT.items():
                made[f"self_attention.{theirs}"] = stacked(f"self_attn.{name}.weight", start)
            made["input_layernorm.weight"] = stacked("input_layernorm.weight", start)
        else:
            split = [stacked(f"self_attn.{x}_proj.weight", start).reshape(n, 2, -1, hidden) for x in "qkv"]
            made["self_attention.linear_qkv.weight"] = torch.cat(split, dim=2).reshape(n, -1, hidden)
            made["self_attention.linear_proj.weight"] = stacked("self_attn.o_proj.weight", start)
            made["self_attention.linear_qkv.layer_norm_weight"] = stacked("input_layernorm.weight", start)
        if kind.startswith("qwen2"):
            split = [stacked(f"self_attn.{x}_proj.bias", start).reshape(n, 2, -1) for x in "qkv"]
            made["self_attention.linear_qkv.bias"] = torch.cat(split, dim=2).flatten(1)
        if kind.startswith("qwen3"):
            for x in "qk":
                made[f"self_attention.{x}_layernorm.weight"] = stacked(f"self_attn.{x}_norm.weight", start)
        if f"{start}0.mlp.gate.e_score_correction_bias" in state:
            made[BIAS] = stacked("mlp.gate.e_score_correction_bias", start)
        if kind in ("mixtral", "qwen2_moe", "deepseek_v3"):
            made["mlp.router.weight"] = stacked("mlp.gate.weight", start)
            made["mlp.experts.experts.linear_fc1.weight"] = stacked("mlp.experts.gate_up_proj", start)
            made["mlp.experts.experts.linear_fc2.weight"] = stacked("mlp.experts.down_proj", start)
        others = {"qwen2_moe": SHARED, "mixtral": {}}
        others["deepseek_v3"] = {"mlp.shared_experts.": "mlp.shared_experts."}
        for theirs, ours in others.get(kind, MLP).items():
            gated = [stacked(f"{ours}{x}_proj.weight", start) for x in ("gate", "up")]
            made[f"{theirs}linear_fc1.weight"] = torch.cat(gated, dim=1)
            made[f"{theirs}linear_fc2.weight"] = stacked(f"{ours}down_proj.weight", start)
        if kind == "qwen2_moe":
            made["mlp.shared_experts.gate_weight"] = stacked("mlp.shared_expert_gate.weight", start)
        norm = "pre_mlp_layernorm." if kind in MIXED and kind != "qwen3_moe" else "mlp.linear_fc1.layer_norm_"
        made[f"{norm}weight"] = stacked("post_attention_layernorm.weight", start)
        outside = {
            "embedding.word_embeddings.weight": padded(state["model.embed_tokens.weight"]),
            "output_layer.weight": padded(state["lm_head.weight"]),
            "decoder.final_layernorm.weight": state["model.norm.weight"],
        }
    return {f"decoder.layers.{key}": x for key, x in made.items()} | outside


def in_layers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The same with a tensor for each layer, and the first norm a module of its own."""
    apart = {key: x for key, x in tensors.items() if not key.startswith("decoder.layers.")}
    for key in tensors.keys() - apart.keys():
        end = key.removeprefix("decoder.layers.").replace(
            "self_attention.linear_qkv.layer_norm", "input_layernorm."
        )
        apart |= {f"decoder.layers.{i}.{end.replace('._', '.')}": x for i, x in enumerate(tensors[key])}
    return apart


def write(folder: Path, tensors: Mapping[str, Any], common: dict[str, Any]) -> None:
    """As Megatron lays files out; its arguments are an object of a class."""
    planner = dcp.DefaultSavePlanner(flatten_state_dict=False)  # values stay whole
    dcp.save(tensors, checkpoint_id=folder, no_dist=True, planner=planner)
    torch.save({"args": argparse.Namespace(bf16=True), "iteration": 3, **common}, folder / "common.pt")
    (folder / "metadata.json").write_text(json.dumps(BACKENDS))


def trained(kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = model_of(kind, seed=1)
    optimizer = optimizer_of(model, lr=0.01)
    for number in range(2):
        ids, labels = batch(number)
        loss_of(model(ids), labels).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize(
    ("kind", "master"),
    [
        *((kind, master) for kind in ("gpt2", "llama") for master in ("param", "fp32_param", None)),
        *((kind, "param") for kind in ("mistral", "qwen2", "qwen3", "mixtral", "qwen2_moe", "deepseek_v3")),
    ],
)
def test_by_the_keys_of_the_format(tmp_path: Path, kind: str, master: str | None) -> None:
    """In, as the distributed optimizer, the one for 16 bits and the plain one write; and out again."""
    model, optimizer = trained(kind)
    state = dict(model.state_dict())
    names = dict(model.named_parameters())
    kinds = ("exp_avg", "exp_avg_sq")
    states = {key: {name: optimizer.state[p][key] for name, p in names.items()} for key in kinds}
    tensors = as_theirs(kind, state)
    for key, held in states.items():
        tensors |= {f"optimizer.state.{key}.{at}": x for at, x in as_theirs(kind, held).items()}
    if master is not None:  # weights beside masters are rounded
        held = {at: x for at, x in as_theirs(kind, state).items() if not at.endswith(BIAS)}
        tensors |= {f"optimizer.state.{master}.{at}": x for at, x in held.items()}
        tensors |= {at: x.bfloat16() for at, x in held.items()}
    given = {"lr": 0.01, "betas": (0.9, 0.999), "eps": 1e-8, "lr_mult": 1.0}
    groups = [{**given, "weight_decay": 0.01 * i, "wd_mult": float(i)} for i in (0, 1)]
    said: dict[str, Any] = {"param_groups": groups, "state": {"common_step": torch.tensor(2.0)}}
    if master == "param":
        said = {"optimizer": {"param_groups": [{**group, "step": 2} for group in groups]}}
    write(tmp_path / "run" / "iter_0000003", tensors, {"optimizer": said})
    (tmp_path / "run" / "latest_checkpointed_iteration.txt").write_text("3")

    def check(path: Path) -> None:
        other = model_of(kind, seed=2)
        adam = optimizer_of(other)
        load_into(other, path)
        assert all(torch.equal(x, state[name]) for name, x in other.state_dict().items())
        found = Foreign(open_any(path), other, adam)
        for name in names:
            for key in kinds:
                assert torch.equal(found.read(f"optimizer.state.{name}.{key}"), states[key][name])
            assert found.read(f"optimizer.state.{name}.step") == 2
        decay = {
            n: g["options"]["weight_decay"] for g in found.values["optimizer"]["groups"] for n in g["names"]
        }
        assert decay == {name: 0.01 * (p.ndim > 1) for name, p in names.items()}

    check(tmp_path / "run")
    if master != "param":
        return
    model.config.save_pretrained(tmp_path / "hub")  # type: ignore[operator,union-attr]
    export(tmp_path / "run", tmp_path / "back", "megatron", companions=tmp_path / "hub")
    back = dcp.FileSystemReader(tmp_path / "back").read_metadata().state_dict_metadata
    found = {
        key: torch.empty(x.size, dtype=x.properties.dtype) for key, x in back.items() if hasattr(x, "size")
    }
    dcp.load(found, checkpoint_id=tmp_path / "back", no_dist=True)
    for key, x in found.items():
        apart = key.startswith("optimizer.") or key.endswith(BIAS)
        right = tensors[key if apart else f"optimizer.state.param.{key}"]
        rows = (slice(0, WORDS),) if "word_embeddings" in key or "output_layer" in key else (...,)
        assert torch.equal(x, right[rows]), key
    assert found.keys() == {key for key in tensors if not key.startswith("optimizer.state.param.")}
    check(tmp_path / "back")
    assert export(tmp_path / "run", tmp_path / "ours", "espalier", companions=tmp_path / "hub") == len(
        state
    ) - (kind == "gpt2")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_layers_apart_and_what_is_told(tmp_path: Path) -> None:
    model = model_of("llama", seed=1)
    state = dict(model.state_dict())
    tensors = as_theirs("llama", state)
    apart = in_layers(tensors)
    write(tmp_path / "apart", apart, {})
    other = model_of("llama", seed=2)
    load_into(other, tmp_path / "apart")
    assert all(torch.equal(x, state[name]) for name, x in other.state_dict().items())

    with pytest.raises(FormatError, match="holds no optimizers"):
        Foreign(open_any(tmp_path / "apart"), other, optimizer_of(other))
    with pytest.raises(FormatError, match=r"linear_fc1.weight is \[96, 32\], expected \[48, 32\]"):
        load_into(model_of("gpt2", seed=2), tmp_path / "apart")
    write(tmp_path / "other", {**apart, "decoder.layers.0.mlp.gate.weight": torch.ones(2)}, {})
    with pytest.raises(FormatError, match=r"layers.0.mlp.gate.weight is not in it"):
        load_into(other, tmp_path / "other")
    start = "optimizer.distributed.dp_group_idx_0.gbuf_idx_0.dtype_(torch.bfloat16, torch.float32)"
    bucket = {f"{start}.bucket_idx_0.{kind}": torch.zeros(64) for kind in ("param", "exp_avg")}
    write(tmp_path / "buckets", {**apart, **bucket}, {})
    load_into(other, tmp_path / "buckets")
    with pytest.raises(
        FormatError,
        match=r"no weight has the values that stand at 0(.|\n)*--dist-ckpt-optim-fully-reshardable",
    ):
        Foreign(open_any(tmp_path / "buckets"), other, optimizer_of(other))
    with pytest.raises(FormatError, match=r"give a folder with the config.json .*--like"):
        export(tmp_path / "apart", tmp_path / "out")
    flat = {"optimizer.state.exp_avg.output_layer.weight": torch.zeros(1, 1, 4)}
    write(tmp_path / "flat", {**apart, **flat}, {})
    with pytest.raises(FormatError, match=r"is flat, as megatron.core before 0.14"):
        load_into(other, tmp_path / "flat")


def shards_of(kind: str, tensors: dict[str, torch.Tensor], rank: int) -> Iterator[tuple[str, torch.Tensor]]:
    """What one of two ranks that share its tensors holds of each layer, in the order of the local layers."""
    words = ("qkv.layer_norm", "linear_proj", "linear_qkv", "fc1.layer_norm", "linear_fc1", "linear_fc2")
    for layer in range(SHAPE["num_layers"]):
        for word in words:
            for end in ("weight", "bias"):
                for key in (k for k in tensors if word in k and k.endswith(end)):
                    if "layer_norm" in key and "layer_norm" not in word:
                        continue
                    x = tensors[key][layer]
                    if word == "linear_fc1" and kind == "llama":
                        x = torch.cat([half.chunk(2)[rank] for half in x.chunk(2)])
                    elif word in ("linear_qkv", "linear_fc1"):
                        x = x.chunk(2)[rank]
                    elif word in ("linear_proj", "linear_fc2") and end == "weight":
                        x = x.chunk(2, dim=1)[rank]
                    yield f"{layer}", x


def buckets_of(kind: str, tensors: dict[str, torch.Tensor], stage: int, rank: int) -> list[torch.Tensor]:
    """The buffer of one of two ranks that share its tensors, on one of two stages: two buckets."""
    held = [x for layer, x in shards_of(kind, tensors, rank) if int(layer) == stage]
    if stage == 0:
        positions = [tensors[k] for k in tensors if "position_embeddings" in k]
        held = [tensors["embedding.word_embeddings.weight"].chunk(2)[rank], *positions, *held]
    else:
        held += [tensors[k] for k in tensors if "final_layernorm" in k]
        ends = ("output_layer.weight", "embedding.word_embeddings.weight")  # the last stage's own copy
        held += [next(tensors[k] for k in ends if k in tensors).chunk(2)[rank]]
    flats: list[list[torch.Tensor]] = [[], []]
    for number, x in enumerate(reversed(held)):
        into = flats[number > 4]
        if n := sum(len(y) for y in into):
            into.append(torch.full((-n % 64,), 5.0, dtype=x.dtype))
        into.append(x.flatten())
    return [torch.cat(flat) for flat in flats]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("kind", ["gpt2", "llama"])
def test_buckets_by_the_keys_of_the_format(tmp_path: Path, kind: str) -> None:
    """Two stages of two ranks; several norms are alike once they are rounded, and one bucket is damaged."""
    model, optimizer = trained(kind)
    names = dict(model.named_parameters())
    with torch.no_grad():
        for name, p in names.items():
            if name.endswith(("norm.weight", "ln_1.weight", "ln_2.weight")):
                p.copy_(1 + 1e-6 * p)
    state = {name: x.float() for name, x in model.state_dict().items()}
    trees = {"param": state} | {
        key: {name: optimizer.state[p][key].float() for name, p in names.items()}
        for key in ("exp_avg", "exp_avg_sq")
    }
    tensors = {at: x.bfloat16() for at, x in as_theirs(kind, state).items()}
    for key, tree in trees.items():
        # the head of GPT-2 is tied: the stages' copies are one tensor
        if kind == "gpt2":
            tree["lm_head.weight"] = tree["transformer.wte.weight"]
        theirs = as_theirs(kind, tree)
        for stage, rank in itertools.product(range(2), range(2)):
            start = f"optimizer.distributed.dp_group_idx_{2 * stage + rank}.gbuf_idx_0.dtype_(a, b)"
            for i, flat in enumerate(buckets_of(kind, theirs, stage, rank)):
                tensors[f"{start}.bucket_idx_{i}.{key}"] = flat
    group = {"lr": 0.01, "wd_mult": 1.0, "lr_mult": 1.0, "step": 2}
    said = {"optimizer": {"param_groups": [group], "param_state_sharding_type": "dp_reshardable"}}
    write(tmp_path / "whole", tensors, said)
    other = model_of(kind, seed=2).float()
    found = Foreign(open_any(tmp_path / "whole"), other, torch.optim.AdamW(other.parameters()))
    for name in names:
        assert torch.equal(found.read(f"model.{name}"), state[name]), name
        for key in ("exp_avg", "exp_avg_sq"):
            assert torch.equal(found.read(f"optimizer.state.{name}.{key}"), trees[key][name]), name
        assert found.read(f"optimizer.state.{name}.step") == 2

    joined: dict[str, Any] = {key: x for key, x in tensors.items() if "bucket_idx" not in key}
    for group in range(4):
        start = f"optimizer.distributed.dp_group_idx_{group}"
        kinds = {
            key: torch.cat(
                [tensors[f"{start}.gbuf_idx_0.dtype_(a, b).bucket_idx_{i}.{key}"] for i in range(2)]
            )
            for key in trees
        }
        state_of = {"buckets_coalesced": True, 0: {(torch.bfloat16, torch.float32): kinds}}
        joined[f"{start}.param_state/shard_0_1"] = [state_of]
    write(tmp_path / "joined", joined, said)
    gathered = Foreign(open_any(tmp_path / "joined"), other, torch.optim.AdamW(other.parameters()))
    for name in gathered.entries:
        assert torch.equal(gathered.read(name), found.read(name)), name

    damaged = next(k for k in tensors if k.endswith("bucket_idx_1.param"))
    tensors[damaged] = tensors[damaged].flip(0)
    write(tmp_path / "damaged", tensors, said)
    load_into(other, tmp_path / "damaged")
    with pytest.raises(FormatError, match=r"no weight has the values that stand at 0 of .*bucket_idx_1"):
        Foreign(open_any(tmp_path / "damaged"), other, torch.optim.AdamW(other.parameters()))


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_each_expert_apart(tmp_path: Path) -> None:
    """As ``singleton_local_shards`` writes them, gate and up too, beside a layer without experts; a model of
    transformers before 5 had a tensor for each as well.
    """
    model = model_of("qwen3_moe", seed=1)
    state = dict(model.state_dict())
    dense = {n.replace("model.layers.1.mlp", "model.layers.0.mlp"): x for n, x in state.items()}
    dense |= {n.replace(".0.mlp.", ".1.mlp."): x for n, x in state.items() if ".0.mlp." in n} | {
        n: x for n, x in state.items() if ".mlp." not in n or ".0.mlp." in n
    }
    tensors = in_layers(as_theirs("qwen3_moe", dense))
    tensors = {key: x for key, x in tensors.items() if not re.match(r".*\.1\.mlp\.linear_fc\d\.weight", key)}
    gate_up = tensors.pop("decoder.layers.0.mlp.linear_fc1.weight")
    for key, x in zip("wv", gate_up.chunk(2), strict=True):
        tensors[f"decoder.layers.0.mlp.linear_fc1.weight_{key}"] = x
    routed = "decoder.layers.1.mlp.experts.experts"
    old = {n: x for n, x in state.items() if ".experts." not in n}
    for e in range(EXPERTS["num_moe_experts"]):
        gate, up = state["model.layers.1.mlp.experts.gate_up_proj"][e].chunk(2)
        down = state["model.layers.1.mlp.experts.down_proj"][e]
        each = {"linear_fc1.weight_w": gate, "linear_fc1.weight_v": up, "linear_fc2.weight": down}
        tensors |= {f"{routed}.{e}.{key}": x for key, x in each.items()}
        each = {"gate_proj": gate, "up_proj": up, "down_proj": down}
        old |= {f"model.layers.1.mlp.experts.{e}.{word}.weight": x for word, x in each.items()}
    tensors["decoder.layers.1.mlp.router.weight"] = state["model.layers.1.mlp.gate.weight"]
    write(tmp_path / "single", tensors, {})
    other = model_of("qwen3_moe", seed=2)
    load_into(other, tmp_path / "single")
    assert all(torch.equal(x, state[name]) for name, x in other.state_dict().items())

    config = model.config.to_dict() | {"transformers_version": "4.57.1"}  # type: ignore[operator]
    before = in_names_of(open_any(tmp_path / "single"), config)
    assert before.entries.keys() == {f"model.{name}" for name in old}
    assert all(torch.equal(before.read(f"model.{name}"), x) for name, x in old.items())


# ---- Megatron's own


def program(folder: Path, kind: str, action: str) -> None:
    """Run it, on two ranks; experts of plain optimizers on one."""
    path = os.pathsep.join(x for x in (str(PROGRAM.parents[2]), *sys.path) if x)
    ranks = "1" if (kind, action) == ("mixtral", "load") else "2"
    command = [sys.executable, str(PROGRAM), str(folder), kind, ranks, action]
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        timeout=200,
    )
    assert done.returncode == 0, done.stderr.decode()[-3000:]


def onward(rank: int, world: int, folder: str, kind: str) -> None:
    """Three steps from what Megatron saved, on another plan than its."""
    model = model_of(kind, seed=2)
    optimizer = optimizer_of(model)
    plans = {"gpt2": {"data": 2, "zero": 3}, "llama": {"tensor": 2}, "mixtral": {"data": 2, "expert": 2}}
    plan = plans[kind]
    engine = espalier.initialize(model, optimizer, plan, loss_fn=loss_of, example=batch(0)[0])
    engine.load_weights(f"{folder}/theirs", optimizer=True)
    for number in range(2, 5):
        engine.train_step(batch(number))
    kept = engine.save(f"{folder}/kept")
    if rank == 0:
        model.config.save_pretrained(f"{folder}/hub")  # type: ignore[operator,union-attr]
        export(kept, f"{folder}/ours", "megatron", companions=f"{folder}/hub")


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs Megatron: pip install --no-deps megatron-core"
)
@pytest.mark.parametrize("kind", ["gpt2", "llama", "mixtral"])
def test_training_goes_on(ranks: Any, tmp_path: Path, kind: str) -> None:
    """There, here, and there again; transformers' Llama takes norms in float32. The last two were trained by
    Megatron's distributed optimizer, whose states lie in buckets.
    """
    near = {"rtol": 1e-9, "atol": 1e-12} if kind == "gpt2" else {"rtol": 1e-5, "atol": 2e-6}
    program(tmp_path, kind, "save")
    plain = model_of(kind, seed=3)
    load_into(plain, tmp_path / "theirs")
    with torch.no_grad():
        logits = plain.eval()(batch(9)[0]).logits
    torch.testing.assert_close(logits, torch.load(tmp_path / "logits.pt"), **near)

    exact = Foreign(open_any(tmp_path / "theirs"), plain, optimizer_of(plain))
    for form in FORMS[1:] if kind != "gpt2" else ():  # which Megatron gathers in float32
        other = Foreign(open_any(tmp_path / form), plain, optimizer_of(plain))
        assert other.entries.keys() == exact.entries.keys()
        for name in exact.entries:
            assert torch.equal(other.read(name).float(), exact.read(name).float()), (form, name)

    ranks(2, onward, str(tmp_path), kind)
    program(tmp_path, kind, "load")
    for ours, theirs in (("ours", "end"), ("again", "late")):
        found, right = model_of(kind, seed=4), model_of(kind, seed=5)
        load_into(found, tmp_path / ours)
        load_into(right, tmp_path / theirs)
        for name, x in found.state_dict().items():
            torch.testing.assert_close(x, right.state_dict()[name], **near)


@pytest.mark.skipif(
    importlib.util.find_spec("megatron") is None, reason="needs Megatron: pip install --no-deps megatron-core"
)
def test_fully_sharded(tmp_path: Path) -> None:
    """Of two ranks that Megatron-FSDP gave pieces of weights and states, in layers with experts, whose router
    has a bias, and without; and what we write of it has the tensors that Megatron's own stacks have.
    """
    program(tmp_path, "glm4_moe", "fsdp")
    right = torch.load(tmp_path / "right.pt")
    plain = model_of("glm4_moe", seed=3)
    load_into(plain, tmp_path / "theirs")
    with torch.no_grad():
        logits = plain.eval()(batch(9)[0]).logits
    torch.testing.assert_close(logits, right["logits"], rtol=1e-5, atol=2e-6)

    found = Foreign(open_any(tmp_path / "iter_0000002"), plain, optimizer_of(plain))
    names = dict(plain.named_parameters())
    trees = {"model": {name: found.read(f"model.{name}") for name in plain.state_dict()}}
    for kind in ("exp_avg", "exp_avg_sq"):
        trees[kind] = {name: found.read(f"optimizer.state.{name}.{kind}") for name in names}
    for name, x in right["whole"].items():
        kind, _, key = name.partition(".")
        rows = slice(0, WORDS) if "word_embeddings" in key or "output_layer" in key else slice(None)
        assert torch.equal(of_layer(key, trees[kind]), x[rows]), name
    for name, p in names.items():
        assert found.read(f"optimizer.state.{name}.step") == 2
        group = next(g for g in found.values["optimizer"]["groups"] if name in g["names"])
        assert group["options"]["weight_decay"] == 0.1 * (p.ndim > 1) and group["options"]["lr"] == 0.01
    with pytest.raises(FormatError, match="give a folder with the config.json"):
        export(tmp_path / "iter_0000002", tmp_path / "out")

    plain.config.save_pretrained(tmp_path / "hub")  # type: ignore[operator,union-attr]
    export(tmp_path / "iter_0000002", tmp_path / "ours", "megatron", companions=tmp_path / "hub")
    back = Foreign(open_any(tmp_path / "ours"), plain, optimizer_of(plain))
    assert all(torch.equal(back.read(name), found.read(name)) for name in back.entries)
    there, ours = (
        dcp.FileSystemReader(tmp_path / of).read_metadata().state_dict_metadata for of in ("theirs", "ours")
    )
    more = {key for key in ours if key.startswith("optimizer.") or ".core_attention." in key}
    assert set(ours) - more == set(there)


def of_layer(key: str, tree: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """What Megatron's parameter is, of tensors of transformers' GLM."""
    outside = {"embedding.word_embeddings": "model.embed_tokens", "output_layer": "lm_head"}
    outside["decoder.final_layernorm"] = "model.norm"
    name, _, word = key.rpartition(".")
    if name in outside:
        return tree[f"{outside[name]}.{word}"]
    number, _, rest = key.removeprefix("decoder.layers.").partition(".")
    layer = f"model.layers.{number}."
    if rest == "self_attention.linear_qkv.weight":
        split = [
            tree[f"{layer}self_attn.{x}_proj.weight"].reshape(2, -1, SHAPE["hidden_size"]) for x in "qkv"
        ]
        return torch.cat(split, dim=1).flatten(0, 1)
    if expert := re.fullmatch(r"mlp.experts.local_experts.(\d).linear_fc(\d).weight", rest):
        kind = "gate_up_proj" if expert[2] == "1" else "down_proj"
        return tree[f"{layer}mlp.experts.{kind}"][int(expert[1])]
    if rest.endswith("linear_fc1.weight"):
        start = layer + rest.removesuffix("linear_fc1.weight")
        return torch.cat([tree[f"{start}{x}_proj.weight"] for x in ("gate", "up")])
    names = {
        "self_attention.linear_proj": "self_attn.o_proj",
        "self_attention.q_layernorm": "self_attn.q_norm",
        "self_attention.k_layernorm": "self_attn.k_norm",
        "pre_mlp_layernorm": "post_attention_layernorm",
        "mlp.router.expert_bias": "mlp.gate.e_score_correction_bias",
        "mlp.router": "mlp.gate",
        "linear_fc2": "down_proj",
    }
    for theirs, ours in names.items():
        rest = rest.replace(theirs, ours)
    return tree[f"{layer}{rest}"]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_fully_sharded_by_the_keys_of_the_format(tmp_path: Path) -> None:
    """Experts of one module have a tensor each; the parts of an interleaved pipeline are told."""
    model = model_of("mixtral", seed=1)
    state = dict(model.state_dict())
    tensors: dict[str, Any] = {"checkpoint_version": 3.0}
    names = "optimizer.{}.module.module.{}.{}"
    for key, x in in_layers(as_theirs("mixtral", state)).items():
        parts = {key: x}
        if ".experts.experts." in key:
            start, _, end = key.partition("experts.experts.")
            parts = {f"{start}experts.{end}{e}": each for e, each in enumerate(x)}
        for name, each in parts.items():
            gated = name.rpartition(".")[0].endswith("linear_fc1")
            halves = (
                {f"{name}_{h}": y for h, y in zip("wv", each.chunk(2), strict=True)}
                if gated
                else {name: each}
            )
            tensors |= {f"model.module.{half}": y for half, y in halves.items()}
            tensors |= {names.format("state", half, "exp_avg"): 2 * y for half, y in halves.items()}
            tensors[names.format("param_to_group_meta", name, "lr")] = 0.5
            tensors[names.format("param_to_group_meta", name, "step")] = 4
    dcp.save(tensors, checkpoint_id=tmp_path / "run", no_dist=True)
    other = model_of("mixtral", seed=2)
    found = Foreign(open_any(tmp_path / "run"), other, torch.optim.SGD(other.parameters(), lr=1.0))
    for name in dict(other.named_parameters()):
        assert torch.equal(found.read(f"model.{name}"), state[name]), name
        assert torch.equal(found.read(f"optimizer.state.{name}.exp_avg"), 2 * state[name]), name
        assert found.read(f"optimizer.state.{name}.step") == 4
    assert [group["options"] for group in found.values["optimizer"]["groups"]] == [{"lr": 0.5}]
    parts = {key.replace("model.", "model0.", 1): x for key, x in tensors.items()}
    dcp.save(parts, checkpoint_id=tmp_path / "parts", no_dist=True)
    with pytest.raises(FormatError, match="interleaved pipeline"):
        load_into(other, tmp_path / "parts")
