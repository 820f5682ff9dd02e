"""The optimizer that a job names: its parameter groups, its arguments, the share of the rate in each step."""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn

from espalier.device import accelerator
from espalier.later import uncollected
from espalier.parallel.several import Several
from espalier.texts import Mistake
from espalier.train.sections import OptimizerSection, as_arguments


def rate(section: OptimizerSection, step: int, steps: int) -> float:
    """The share of ``lr`` used in optimizer step ``step``, counted from 0, of ``steps``."""
    if step < section.warmup:
        return (step + 1) / section.warmup
    if section.schedule == "constant":
        return 1.0
    begin = section.warmup
    if section.schedule == "wsd":
        begin = max(begin, steps - max(round(section.cooldown * steps), 1))
    progress = min(max(step - begin, 0) / max(steps - 1 - begin, 1), 1.0)
    left = 0.5 * (1 + math.cos(math.pi * progress)) if section.schedule == "cosine" else 1 - progress
    return section.final_lr + (1 - section.final_lr) * left


def build_optimizer(section: OptimizerSection, model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer over all parameters of the model that are trained.

    Raises:
        ValueError: it cannot train them.
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    if not named:
        raise ValueError("no parameter of this model is trained: all of them are frozen")
    try:
        if section.name != "Muon":
            return _one(section, section.name, named, section.arguments)
        inner = _matrices(model, named)
        rest = {name: p for name, p in named.items() if name not in inner}
        if not inner:
            raise ValueError("Muon is for matrices inside of a model, and this one has none")
        muon = _one(section, "Muon", inner, section.arguments)
        if not rest:
            return muon
        options = {"lr": section.lr, **as_arguments(section.rest)}
        return Several([muon, _one(section, "AdamW", rest, options)])
    except ValueError as error:
        raise ValueError(
            f"optimizer.name = {section.name!r}: it cannot train this model: {error}. Give another."
        ) from error


def _one(
    section: OptimizerSection, name: str, named: Mapping[str, nn.Parameter], options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    kind: Any = getattr(torch.optim, name)
    accepted = inspect.signature(kind).parameters
    decay = options.get("weight_decay", accepted["weight_decay"].default if "weight_decay" in accepted else 0)
    exempt = section.decay == "matrices" and decay != 0
    groups: list[dict[str, Any]] = []
    by_options: dict[tuple[int, bool], dict[str, Any]] = {}
    for path, p in named.items():
        place, own = _own_arguments(section, path)
        own = {key: value for key, value in own.items() if key in accepted}
        bare = exempt and p.ndim < 2 and "weight_decay" not in own
        group = by_options.get((place, bare))
        if group is None:
            group = by_options[place, bare] = {"params": [], **own, **({"weight_decay": 0.0} if bare else {})}
            groups.append(group)
        group["params"].append(p)
    optimizer: torch.optim.Optimizer = kind(groups, **options)
    return optimizer


def _own_arguments(section: OptimizerSection, path: str) -> tuple[int, dict[str, Any]]:
    """The group of [[optimizer.groups]] that a parameter belongs to, and its arguments; -1 for none."""
    for i, group in enumerate(section.groups):
        if any(fnmatchcase(path, pattern) for pattern in patterns(group)):
            return i, as_arguments({key: x for key, x in group.items() if key != "pattern"})
    return -1, {}


def patterns(group: Mapping[str, Any]) -> list[str]:
    """The patterns of a group: one, or a list of them."""
    said = group.get("pattern")
    return [said] if isinstance(said, str) else list(said or ())


def _matrices(model: nn.Module, named: Mapping[str, nn.Parameter]) -> dict[str, nn.Parameter]:
    """The matrices inside of a model: neither embeddings nor what maps to the vocabulary or to classes."""
    outside = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    head = getattr(model, "get_output_embeddings", lambda: None)()
    last = [m for m in model.modules() if isinstance(m, nn.Linear)][-1:]
    outside |= {id(m.weight) for m in (head, *last) if m is not None}
    return {name: p for name, p in named.items() if p.ndim == 2 and id(p) not in outside}


# ---- what may be wrong with it


def optimizer_mistakes(section: OptimizerSection) -> Iterator[Mistake]:
    """What torch says of the arguments, tried on a parameter of one element."""
    for name, options in _tried(section):
        chosen = getattr(torch.optim, name)
        # On the CPU: the launcher, and ranks that have no device yet, would open a context on the first one.
        # So what only accelerators can is left out where there is one.
        p = nn.Parameter(torch.zeros(1, 1, device="cpu"))
        p.grad = torch.ones_like(p)
        left_out = {"capturable"} if accelerator() is not None else set()
        try:
            with uncollected():  # the first one brings torch's compiler, which takes a second or two
                chosen([p], **{k: v for k, v in options.items() if k not in left_out}).step()
        except (ValueError, TypeError, RuntimeError, AssertionError, ArithmeticError) as error:
            yield Mistake("optimizer", dict(options), f"torch.optim.{name} says: {error}")
            return


def _tried(section: OptimizerSection) -> Iterator[tuple[str, Mapping[str, Any]]]:
    accepted = inspect.signature(getattr(torch.optim, section.name)).parameters
    yield section.name, section.arguments
    if section.name == "Muon":
        yield "AdamW", {"lr": section.lr, **as_arguments(section.rest)}
    for group in section.groups:
        own = {k: v for k, v in as_arguments(group).items() if k != "pattern" and k in accepted}
        yield section.name, {**section.arguments, **own}
