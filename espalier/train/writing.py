"""Text written by a model that was trained: a run's folder, one of checkpoints, or one of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import safe_open
from tokenizers import Tokenizer

from espalier.checkpoint import Checkpoint, checkpoints, newest
from espalier.checkpoint.folder import INDEX
from espalier.checkpoint.foreign import load_into
from espalier.models import generate
from espalier.texts import Mistake, MistakeError
from espalier.train.corpus import end_of
from espalier.train.model_spec import HuggingFaceSpec, ModelSpec, read_model
from espalier.train.outputs import WEIGHTS
from espalier.train.sources import Template


class Written(NamedTuple):
    """What a model wrote.

    Attributes:
        text: what it wrote.
        whole: the prompt, and that behind it.
    """

    text: str
    whole: str


class Trained(NamedTuple):
    """A model on disk.

    Attributes:
        spec: which.
        weights: where they are.
        tokenizer: file ``tokenizer.json``.
    """

    spec: ModelSpec
    weights: Path
    tokenizer: Path


def write(
    path: Path,
    prompt: str,
    tokens: int,
    *,
    temperature: float = 0.7,
    top_k: int | None = 50,
    seed: int = 0,
    chat: bool = False,
    tokenizer: Path | None = None,
) -> Written:
    """Let a model go on with a prompt, on this process.

    Args:
        path: a run's folder, a checkpoint or a folder of them, or a folder with ``config.json`` and weights.
        prompt: what it goes on with; with ``chat`` what a user says.
        tokens: at most so many; it stops at the end of a text.
        temperature: 0 takes the likeliest token.
        top_k: draw among so many.
        seed: of the draws.
        chat: put the prompt into the tokenizer's chat template.
        tokenizer: a ``tokenizer.json`` or a folder that has one; that beside the model when None.

    Raises:
        ValueError: there is no such model, it writes no text, or its tokenizer is not to be found.
    """
    trained = find(path, tokenizer)
    if trained.spec.facts.labels not in ("next", "same"):
        raise ValueError(f"{path} holds a model that writes no text: it was trained for other labels")
    model = trained.spec.build().eval()
    load_into(model, trained.weights)
    used = Tokenizer.from_file(str(trained.tokenizer))
    asked = prompt
    if chat:
        asked = Template(trained.tokenizer).render([{"role": "user", "content": prompt}], asks=True)
    ids = used.encode(asked, add_special_tokens=not chat).ids
    if not ids:
        raise ValueError("the prompt has no tokens: give some text, --prompt TEXT")
    new = generate(
        model,
        torch.tensor([ids]),
        tokens,
        temperature=temperature,
        top_k=top_k,
        generator=torch.Generator().manual_seed(seed),
        max_positions=trained.spec.facts.max_positions,
    )[0, len(ids) :].tolist()
    end = end_of(used, trained.tokenizer)
    if end in new:
        new = new[: new.index(end)]
    return Written(str(used.decode(new)), str(used.decode([*ids, *new])))


def find(path: Path, tokenizer: Path | None = None) -> Trained:
    """The model that stands at a path.

    Raises:
        ValueError: there is none.
    """
    if not path.is_dir():
        raise ValueError(f"{path} is no folder: give that of a run, of a checkpoint, or one with config.json")
    raw, weights = _job_of(path), path
    if raw is None and not (path / "config.json").is_file():
        raise ValueError(
            f"{path} says nothing of its model: expected a run's folder ({WEIGHTS}), checkpoints of a job, "
            "or a folder with config.json and weights"
        )
    mistakes: list[Mistake] = []
    table: Mapping[str, Any] = {"kind": "hf", "path": str(path)}
    if raw is not None and not (path / "config.json").is_file():
        table = raw["model"]
    spec = read_model(table, mistakes)
    if spec is None:
        raise MistakeError(str(path), mistakes)
    if isinstance(spec, HuggingFaceSpec) and (path / WEIGHTS).is_file():
        spec = replace(spec, lora=None)  # merged
    return Trained(spec, weights, _tokenizer(path, raw, tokenizer))


def _job_of(path: Path) -> dict[str, Any] | None:
    """The tables of the job that a run, or a checkpoint, is of."""
    if (path / WEIGHTS).is_file():
        with safe_open(path / WEIGHTS, framework="pt") as file:
            text = (file.metadata() or {}).get("job")
        return None if text is None else dict(json.loads(text))
    if (path / INDEX).exists() or checkpoints(path):
        at = path if (path / INDEX).exists() else newest(path)
        if at is None:
            raise ValueError(f"no checkpoint in {path} is whole: see espalier checkpoint {path}")
        job = Checkpoint(at).values.get("extra", {}).get("job")
        if job is None:
            raise ValueError(f"{at} was not saved by espalier train: it says nothing of its model")
        return dict(job)
    return None


def _tokenizer(path: Path, raw: Mapping[str, Any] | None, tokenizer: Path | None) -> Path:
    data = {} if raw is None else raw.get("data", {})
    named = [tokenizer, path, path.parent, path.parent.parent]
    named += [Path(data["tokenizer"])] if isinstance(data.get("tokenizer"), str) else []
    for place in named if tokenizer is None else [tokenizer]:
        if place is not None:
            file = place / "tokenizer.json" if place.is_dir() else place
            if file.is_file() and file.suffix == ".json":
                return file
    raise ValueError(f"there is no tokenizer.json beside {path}: name it, --tokenizer FILE")
