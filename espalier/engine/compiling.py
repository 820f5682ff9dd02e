"""Which modules of a model are compiled, each as one graph."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from torch import nn

from espalier.blocks import blocks
from espalier.engine.recompute import Policy, chosen, recompute_in_graphs
from espalier.parallel import Plan
from espalier.parallel.experts import stacks
from espalier.tensor import compile as compile_region
from espalier.tensor.compiled import Backend, compile_forward


def compilable(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The blocks of a model, each of which becomes one graph.

    Selective recomputation is done by a graph itself, so what is recomputed so as one is one.

    Raises:
        ValueError: something in them hangs on values or on hooks, and no graph can have it.
    """
    listed = blocks(model)
    for outer in (name for name, kind in chosen(model, plan).items() if kind == "selective"):
        within = [name for name in listed if name.startswith(f"{outer}." if outer else "")]
        listed = {name: block for name, block in listed.items() if name not in within}
        listed |= {outer: model.get_submodule(outer)} if within else {}
    experts = stacks(model)
    refused = (
        (not listed, "the model has no list of blocks: espalier.compile(module) compiles what you name"),
        (plan.pipe > 1, "a pipeline's stages run what a trace of the model says: expected pipe = 1"),
        (plan.tensor_mode != "1d", "products of 2d, 2.5d and 3d travel in panels: expected tensor_mode = 1d"),
        (bool(experts), "how many rows go to an expert hangs on values: compile attention by itself"),
    )
    wrong = [reason for is_so, reason in refused if is_so]
    if wrong:
        raise ValueError("compile: " + "; ".join(wrong) + ". Or leave compile out.")
    return [*listed.values()]


def compile_blocks(
    model: nn.Module,
    blocks: Sequence[nn.Module],
    plan: Plan,
    recomputed: dict[str, str],
    backend: str | Backend,
    policy: Policy | None,
) -> None:
    """Let each of these be one graph.

    Args:
        recomputed: how blocks are recomputed, by name; those whose graphs do so themselves are taken out.
        policy: as for :func:`~espalier.engine.recompute.recompute_in_graphs`.
    """
    by = compile_forward if plan.zero == 3 or recomputed else compile_region
    names = {model.get_submodule(name): name for name, kind in recomputed.items() if kind == "selective"}
    for block in blocks:
        if block not in names:
            by(block, backend=backend, async_tensor_parallel=plan.async_tensor_parallel)
    keeping = [names[block] for block in blocks if block in names]
    compile = partial(compile_forward, backend=backend, async_tensor_parallel=plan.async_tensor_parallel)
    recompute_in_graphs(model, keeping, plan.recompute_inputs, compile, policy)
    for name in keeping:
        del recomputed[name]
