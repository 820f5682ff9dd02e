"""Which modules of a model are compiled, each as one graph."""

from __future__ import annotations

import warnings

from torch import nn

from espalier.blocks import blocks
from espalier.engine.recompute import chosen
from espalier.parallel import Plan
from espalier.parallel.experts import stacks
from espalier.tensor.observers import user_frame
from espalier.tensor.traces import run_as_written


def warn_of_compiled(model: nn.Module) -> None:
    """Tell what torch compiled of a model, which runs uncompiled."""
    if compiled := run_as_written(model):
        warnings.warn(
            f"{', '.join(repr(name) if name else 'The model' for name in compiled[:3])} "
            f"{'and others ' if len(compiled) > 3 else ''}was compiled by torch.compile, which cannot follow "
            "DTensors: it runs as it is written. espalier.compile(module) compiles it, collectives included.",
            stacklevel=user_frame()[0],
        )


def compilable(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The blocks of a model, each of which becomes one graph.

    Raises:
        ValueError: something in them hangs on values or on hooks, and no graph can have it.
    """
    listed = blocks(model)
    experts = stacks(model)
    refused = (
        (not listed, "the model has no list of blocks: espalier.compile(module) compiles what you name"),
        (plan.pipe > 1, "a pipeline's stages run what a trace of the model says: expected pipe = 1"),
        (
            "selective" in chosen(model, plan).values(),
            "what selective recomputation keeps no graph tells: expected recompute = full or none",
        ),
        (plan.tensor_mode != "1d", "products of 2d, 2.5d and 3d travel in panels: expected tensor_mode = 1d"),
        (bool(experts), "how many rows go to an expert hangs on values: compile attention by itself"),
    )
    wrong = [reason for is_so, reason in refused if is_so]
    if wrong:
        raise ValueError("compile: " + "; ".join(wrong) + ". Or leave compile out.")
    return [*listed.values()]
