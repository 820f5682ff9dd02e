"""``espalier init``: a job file with a comment on each line that is likely to be changed.

Imports nothing that takes time: what is written is then read as `espalier train` would read it.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from espalier.texts import did_you_mean, toml_value

MODELS = ("gpt", "gpt2", "bert", "vit", "moe")
Ask = Callable[[str, str], str]


@dataclass(frozen=True)
class Answers:
    """What a job file is made of.

    Attributes:
        model: a kind of Espalier's own, a folder of Hugging Face's, or ``module:function``.
        data: "stdlib", or a file or folder of text, records, tokens or images.
        field: column that holds the text; "" for the usual ones.
        chat: column that holds conversations; "" for none.
        ranks: on the data axis.
        zero: stage of ZeRO.
        lora: rank of adapters; 0 to train all weights.
        steps: to train.
    """

    model: str = "gpt"
    data: str = "stdlib"
    field: str = ""
    chat: str = ""
    ranks: int = 1
    zero: int = 0
    lora: int = 0
    steps: int = 200


_QUESTIONS = {
    "model": "Model: gpt, gpt2, bert, vit, moe, a folder with config.json, or module:function",
    "data": "Data: stdlib, or a file or folder (.txt, .jsonl, .parquet, .bin, datasets, images)",
    "ranks": "Ranks",
    "steps": "Steps",
}


def asked(answers: Answers, ask: Ask, tell: Callable[[str], None]) -> Answers:
    """The answers, each confirmed or changed.

    Args:
        ask: of a question and the answer that stands, gives the answer.
        tell: of what is wrong with an answer; the question is put again.
    """
    for name, question in _QUESTIONS.items():
        before, good = getattr(answers, name), None
        while good is None:
            said = ask(question, str(before)).strip() or str(before)
            try:
                changed: dict[str, Any] = {name: _like(name, before, said)}
                good = replace(answers, **changed)
                written(good)
            except ValueError as error:
                tell(str(error))
                good = None
        answers = good
    return answers


def _like(name: str, before: object, said: str) -> object:
    if not isinstance(before, int):
        return said
    if not said.isdecimal() or int(said) < 1:
        raise ValueError(f"{name}: expected a whole number of 1 or more, got {said!r}")
    return int(said)


def written(answers: Answers) -> str:
    """The job file.

    Raises:
        ValueError: there is no such model or data.
    """
    parts = [_model(answers), _data(answers), _plan(answers), _optimizer(answers), _train(answers)]
    head = "# Train it: espalier train FILE. See what it needs first: espalier dry FILE.\n"
    head += "# Change a value for one run: --set train.steps=50. All keys stand in the documentation,\n"
    head += "# on its page of the command line.\n"
    return "\n".join([head, *parts])


def _model(answers: Answers) -> str:
    named = answers.model
    if ":" in named:
        return (
            '[model]\nkind = "module"\n'
            f"build = {toml_value(named)}    # a function that gives a torch.nn.Module\n"
            'labels = "same"       # what it wants: same (it shifts them), next (shifted), masked, classes\n'
            "vocab_size = 32000    # number of tokens\n# arguments = {}       # of the function\n"
        )
    if (Path(named) / "config.json").is_file():
        lora = (
            "# [model.lora]      # adapters in place of all weights: pip install 'espalier[hf]'\n# rank = 8\n"
        )
        if answers.lora:
            lora = f"\n[model.lora]\nrank = {answers.lora}\nalpha = {2 * answers.lora}\n"
        return (
            f'[model]\nkind = "hf"\npath = {toml_value(named)}    # config.json, and weights to begin with\n'
            f"# fresh = true      # begin with new weights\n{lora}"
        )
    if named not in MODELS:
        hint = did_you_mean(named, MODELS, lead="; ")
        known = ", ".join(MODELS)
        raise ValueError(
            f"model {named!r}: expected one of {known}, a folder with config.json, or module:function{hint}"
        )
    if named == "vit":
        classes = _classes(Path(answers.data)) or 10
        sizes = f"image = 32\npatch = 4\nclasses = {classes}\nlayers = 6\nhidden = 192\nheads = 3\n"
        return '[model]\nkind = "vit"\n' + sizes
    cut = Path(answers.data).suffix in (".bin", ".npy")
    vocabulary = "above every token" if cut else "a tokenizer of this size is trained on the text"
    return (
        f'[model]\nkind = "{named}"\n'
        f"vocab_size = 4096     # {vocabulary}\n"
        "max_positions = 256\nlayers = 6\nhidden = 256\nheads = 8\n"
    )


def _classes(folder: Path) -> int:
    """The classes of images: folders, or those of what is there to train on."""
    inner = folder / "train" if (folder / "train").is_dir() else folder
    return sum(path.is_dir() for path in inner.iterdir()) if inner.is_dir() else 0


def _data(answers: Answers) -> str:
    source = Path(answers.data)
    if answers.data != "stdlib" and not source.exists():
        raise ValueError(f"data {answers.data!r} is neither a file nor a folder")
    if answers.model == "vit":
        if answers.data == "stdlib":
            return '[data]\nkind = "images"       # random ones: name a folder of images by --data\n'
        return f'[data]\nkind = "image-folder"\nsource = {toml_value(answers.data)}\nflip = true\n'
    lines = ["[data]", f"source = {toml_value(answers.data)}"]
    if answers.chat:
        lines += [
            f"chat = {toml_value(answers.chat)}      # the loss is on the answers alone",
            'rows = "padded"',
        ]
    elif answers.field:
        lines.append(f"field = {toml_value(answers.field)}")
    lines.append("val_fraction = 0.05   # kept for validation")
    lines.append('# tokenizer = "..."   # a tokenizer.json, or a folder that has one')
    return "\n".join(lines) + "\n"


def _plan(answers: Answers) -> str:
    return (
        f"[plan]                # ranks in all: data x tensor x pipe\ndata = {answers.ranks}\n"
        f"zero = {answers.zero}              # 1: cut optimizer states, 2: gradients too, 3: parameters too\n"
        '# tensor = 1\n# precision = "bfloat16"\n# recompute = "full"  # less memory, more time\n'
    )


def _optimizer(answers: Answers) -> str:
    rate = "1e-4" if answers.lora else "2e-5" if Path(answers.model).is_dir() else "1e-3"
    warmup = max(answers.steps // 20, 1)
    return (
        f'[optimizer]\nname = "AdamW"\nlr = {rate}\nweight_decay = 0.1    # not of norms and biases\n'
        f'warmup = {warmup}\nschedule = "cosine"   # or constant, linear, wsd\n'
    )


def _positions(model: str) -> int:
    """Tokens of a row: 256, or fewer where the model takes no more."""
    file = Path(model) / "config.json"
    config = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    most = config.get("max_position_embeddings", config.get("n_positions", 256))
    return min(256, most) if isinstance(most, int) else 256


def _train(answers: Answers) -> str:
    steps = answers.steps
    size = "" if answers.model == "vit" else f"sequence = {_positions(answers.model)}\n"
    every = max(steps // 4, 1)
    metrics = 'metrics = ["loss", "accuracy"]\n' if answers.model == "vit" else ""
    if answers.model != "vit" and answers.data != "stdlib":
        size += 'prompt = "The "       # how the sample begins that it writes at the end\n'
    return (
        f"[train]\nsteps = {steps}\n"
        f"batch_size = {16 * answers.ranks}       # rows of all ranks together\n{size}"
        f"clip = 1.0\neval_every = {every}\n\n"
        f"[evaluation]          # the best weights are kept\n{metrics}"
        "patience = 0          # validations without a better one, after which it stops; 0: never\n\n"
        f"[checkpoint]          # go on by espalier train --resume\nevery = {every}\n"
    )
