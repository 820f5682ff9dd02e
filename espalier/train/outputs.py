"""What a run leaves for others: a folder that ``from_pretrained`` takes, a tokenizer, adapters, text."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from torch import nn

from espalier.files import write_file
from espalier.models import generate
from espalier.train.corpus import END_OF_TEXT, Corpus
from espalier.train.job import Job
from espalier.train.model_spec import HuggingFaceSpec

WEIGHTS = "model.safetensors"
_OF_TOKENIZER = tuple(
    "tokenizer_config.json special_tokens_map.json added_tokens.json vocab.json merges.txt "
    "vocab.txt tokenizer.model chat_template.jinja".split()
)


def write_companions(job: Job, corpus: Corpus | None) -> dict[str, str]:
    """Write what stands beside the weights in a run's folder; gives the files' names, by what they are."""
    files = {}
    if corpus is not None and corpus.tokenizer_file is not None:
        write_tokenizer(corpus.tokenizer_file, job.out, job)
        files["tokenizer"] = str(job.out / "tokenizer.json")
    if isinstance(job.model, HuggingFaceSpec):
        write_config(job.model, job.out, job.train.dtype)
        files["config"] = str(job.out / "config.json")
        if job.model.lora is not None:
            files["adapter"] = str(merge(job.model, job.out))
    return files


def write_tokenizer(made_by: Path, out: Path, job: Job) -> None:
    """A tokenizer as transformers reads it: with what stood beside it, or little where nothing did."""
    out.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(made_by, out / "tokenizer.json")
    there = [name for name in _OF_TOKENIZER if (made_by.parent / name).is_file()]
    for name in there:
        shutil.copyfile(made_by.parent / name, out / name)
    template = getattr(job.data, "chat_template", None)
    if template is not None:
        shutil.copyfile(template, out / "chat_template.jinja")
    if "tokenizer_config.json" not in there:
        end = END_OF_TEXT if Tokenizer.from_file(str(made_by)).token_to_id(END_OF_TEXT) is not None else None
        config: dict[str, Any] = {"tokenizer_class": "PreTrainedTokenizerFast"}
        if end is not None:
            config |= {"eos_token": end, "pad_token": end}
        write_file(out / "tokenizer_config.json", (json.dumps(config, indent=2) + "\n").encode())


def write_config(spec: HuggingFaceSpec, out: Path, dtype: str) -> None:
    """The config of a model of transformers, and how it generates, if its folder says so."""
    config = spec.config_object()
    config.dtype = dtype
    config.save_pretrained(out)
    if spec.path is not None and (Path(spec.path) / "generation_config.json").is_file():
        shutil.copyfile(Path(spec.path) / "generation_config.json", out / "generation_config.json")


def merge(spec: HuggingFaceSpec, out: Path) -> Path:
    """Put the adapters of a run into its weights; they stand by themselves in the folder that is given.

    The model is in memory for that, on this rank alone.
    """
    from peft import get_peft_model_state_dict
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils import ModulesToSaveWrapper

    path = out / WEIGHTS
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    model: Any = spec.build()
    state = load_file(path)
    model.load_state_dict(state)
    model = model.to(next(x.dtype for x in state.values() if x.is_floating_point()))
    folder = out / "adapter"
    folder.mkdir(exist_ok=True)
    config = model.peft_config["default"]
    config.base_model_name_or_path = spec.weights
    config.inference_mode = True
    config.save_pretrained(folder)
    adapters = get_peft_model_state_dict(model)
    named = {f"base_model.model.{name}": x.contiguous() for name, x in adapters.items()}
    save_file(named, folder / "adapter_model.safetensors", {"format": "pt"})
    plain: dict[str, torch.Tensor] = {}
    for name, module in model.named_modules():
        if isinstance(module, BaseTunerLayer):
            module.merge()
            plain |= _under(name, module.get_base_layer())
        elif isinstance(module, ModulesToSaveWrapper):
            plain |= _under(name, module.modules_to_save["default"])
    bare = replace(spec, lora=None).build().state_dict()
    merged = {name: plain.get(name, state.get(name)) for name in bare}
    save_file({n: x.contiguous().clone() for n, x in merged.items() if x is not None}, path, metadata)
    return folder


def _under(name: str, module: nn.Module) -> Mapping[str, torch.Tensor]:
    return {f"{name}.{key}": x.detach() for key, x in module.state_dict().items()}


def sample(job: Job, tokenizer: Tokenizer, weights: Path) -> str:
    """Text written by the plain model with the trained weights: the layout is gone from it."""
    model = bare(job).model.build()
    model.load_state_dict(load_file(weights))
    settings = job.train
    prompt = torch.tensor([tokenizer.encode(settings.prompt).ids])
    ids = generate(
        model,
        prompt,
        settings.sample_tokens,
        temperature=settings.temperature,
        top_k=50,
        generator=torch.Generator().manual_seed(settings.seed),
        max_positions=settings.sequence,
    )
    return str(tokenizer.decode(ids[0].tolist()))


def bare(job: Job) -> Job:
    """The job of the model without adapters, as its weights are once they are merged."""
    spec = job.model
    return replace(job, model=replace(spec, lora=None)) if isinstance(spec, HuggingFaceSpec) else job
