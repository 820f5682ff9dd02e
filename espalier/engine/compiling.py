"""Which modules of a model are compiled, each as one graph."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from torch import nn

from espalier.blocks import blocks
from espalier.engine.recompute import chosen, recompute_in_graphs
from espalier.engine.selective import Policy, Tracing, keep_products
from espalier.parallel import Plan
from espalier.parallel.experts import stacks
from espalier.tensor import compile as compile_region
from espalier.tensor.alike import Alike
from espalier.tensor.compiled import Backend, compile_forward, compiler_of_blocks


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
    """Let each of these be one graph; those that are alike are compiled once.

    Args:
        recomputed: how blocks are recomputed, by name; those whose graphs do so themselves are taken out.
        policy: in place of :func:`~espalier.engine.selective.keep_products`.
    """
    by: Callable[..., Any] = compile_forward if plan.zero == 3 or recomputed else compile_region
    names = {model.get_submodule(name): name for name, kind in recomputed.items() if kind == "selective"}
    policy = policy or keep_products
    compiler = partial(compiler_of_blocks, backend, plan.async_tensor_parallel)
    asking = not callable(backend)  # one of the caller's own rewrites nothing for which ranks ask each other
    alike = Alike(compiler(), asking)
    for block in blocks:
        if block not in names:
            by(block, backend=alike.of_region())
    keeping = [names[block] for block in blocks if block in names]
    alike_too = Alike(compiler(partial(Tracing, policy)), asking)
    regions = {name: compile_forward(model.get_submodule(name), alike_too.of_region()) for name in keeping}
    recompute_in_graphs(model, regions, plan.recompute_inputs, policy)
    for name in keeping:
        del recomputed[name]
