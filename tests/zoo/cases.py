"""What the zoo holds: models by name, how each is built, fed, and judged."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from tests.zoo import vision

Batch = Any
Draw = Callable[[nn.Module, torch.Generator], Iterator[Batch]]

GROUPS = ("transformers", "timm", "torchvision", "programs")


class Missing(RuntimeError):
    """A package that a model comes from is not there."""


@dataclass(frozen=True)
class Case:
    """One model.

    Attributes:
        name: its group and its own name: ``"transformers/llama"``, or ``"drawn/7"``.
        build: makes it, in float64, with values from torch's generator.
        draw: batches that it may take, the likeliest first; the first that works is taken.
        causal: what comes later in a sequence does not touch what is earlier: ``context`` applies.
        loop: trains it, where one optimizer and its loss are not all: ``loop(model, trainer, batches)``, with
            ``trainer(module, loss_fn)`` for each that is trained (see ``tests/zoo/train.py``); its losses.
    """

    name: str
    build: Callable[[], nn.Module]
    draw: Draw
    causal: bool = False
    loop: Callable[..., list[Any]] | None = None

    @property
    def group(self) -> str:
        """Where it comes from."""
        return self.name.partition("/")[0]

    def model(self) -> nn.Module:
        """With the same values each time."""
        torch.manual_seed(1)
        return self.build().to(torch.float64).train()

    def batch(self, model: nn.Module, number: int, seed: int) -> Batch:
        """A batch of the ``number``-th form that it may take.

        Raises:
            StopIteration: there are not so many.
        """
        generator = torch.Generator().manual_seed(seed)
        return next(itertools.islice(self.draw(model, generator), number, None))


def absent(group: str) -> str:
    """Why a group's models cannot be built here; "" if they can."""
    if group == "programs" or find_spec(group) is not None:
        return ""
    if group == "varied":
        return absent("transformers")
    return f"{group} is not installed: python -m pip install --no-deps {group}"


@functools.cache
def names(group: str) -> tuple[str, ...]:
    """All names of a group."""
    if absent(group):
        return ()
    if group == "transformers":
        from tests.zoo import architectures

        return tuple(f"transformers/{kind}" for kind in architectures.kinds())
    if group == "varied":
        from tests.zoo import architectures, inputs

        return tuple(f"varied/{kind}@{form}" for kind in architectures.kinds() for form in inputs.FORMS)
    if group == "programs":
        from tests.zoo import programs

        return tuple(f"programs/{name}" for name in programs.PROGRAMS)
    return tuple(f"{group}/{name}" for name in vision.families(group))


def case(name: str) -> Case:
    """The case of a name.

    Raises:
        KeyError: there is none.
    """
    group, _, own = name.partition("/")
    if group in ("transformers", "varied"):
        from tests.zoo import architectures, inputs

        kind, _, form = own.partition("@")
        return Case(
            name,
            functools.partial(architectures.built, kind),
            functools.partial(inputs.varied, form) if form else inputs.candidates,
            causal=architectures.is_causal(kind),
        )
    if group == "programs":
        from tests.zoo import programs

        return programs.case(own)
    if group == "drawn":
        from tests.zoo import drawn

        return drawn.case(int(own))
    if group == "wide":
        from tests.zoo import drawn_widely

        return drawn_widely.case(int(own))
    if group == "named":
        from tests.zoo import named

        return named.case(own)
    return Case(
        name, functools.partial(vision.built, group, own), functools.partial(vision.images, group, own)
    )
