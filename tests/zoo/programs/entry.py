"""How a program is entered into the zoo, and the batches that programs share."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from tests.zoo.cases import Case

ROWS, WIDTH, CLASSES = 8, 12, 5
Tensor = torch.Tensor
Generator = torch.Generator
Batch = dict[str, Any]


@dataclass(frozen=True)
class Program:
    """A program: its model, its batches, and, where one optimizer is not all, its loop."""

    build: Callable[[], nn.Module]
    draw: Callable[[Generator], Batch]
    loop: Callable[..., Any] | None = None


PROGRAMS: dict[str, Program] = {}


def program(name: str, draw: Callable[[Generator], Batch], *, loop: Any = None) -> Any:
    """Enter a model into the zoo."""

    def enter(build: Callable[[], nn.Module]) -> Callable[[], nn.Module]:
        PROGRAMS[name] = Program(build, draw, loop)
        return build

    return enter


def case(name: str) -> Case:
    """The case of a program."""
    of = PROGRAMS[name]

    def drawn(model: nn.Module, generator: Generator) -> Iterator[Batch]:
        yield of.draw(generator)

    return Case(f"programs/{name}", of.build, drawn, loop=of.loop)


# ---- batches


def floats(generator: Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def classes(generator: Generator, n: int = CLASSES, *shape: int) -> Tensor:
    return torch.randint(0, n, shape or (ROWS,), generator=generator)


def points(generator: Generator) -> Batch:
    """Rows of features, and their classes."""
    return {"x": floats(generator, ROWS, WIDTH), "y": classes(generator)}


def views(generator: Generator) -> Batch:
    """Rows of features, seen twice."""
    x = floats(generator, ROWS, WIDTH)
    return {"x": x + 0.1 * floats(generator, ROWS, WIDTH), "z": x + 0.1 * floats(generator, ROWS, WIDTH)}


def images(generator: Generator) -> Batch:
    """Images, and their classes."""
    return {"x": floats(generator, ROWS, 3, 8, 8), "y": classes(generator)}


def texts(generator: Generator) -> Batch:
    """Token ids."""
    return {"ids": classes(generator, 20, ROWS, 10)}


def mlp(*sizes: int, act: type[nn.Module] = nn.Tanh, last: bool = False) -> nn.Sequential:
    """Linear layers, with something between them."""
    layers: list[nn.Module] = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), act()]
    return nn.Sequential(*(layers if last else layers[:-1]))
