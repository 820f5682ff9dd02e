"""Which modules of a model are compiled, each as one graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import nn

from espalier.blocks import around, blocks
from espalier.engine.recompute import chosen, recompute_in_graphs
from espalier.engine.selective import Policy, Tracing, keep_products
from espalier.parallel import Plan
from espalier.parallel.experts import stacks
from espalier.parallel.pipeline.model_stand_ins import caching, uncached
from espalier.tensor.alike import Alike
from espalier.tensor.compiled import Backend, compile_forward, compiler_of_blocks
from espalier.tensor.observers import tell


def compilable(model: nn.Module, plan: Plan) -> list[nn.Module]:
    """The blocks of a model, each of which becomes one graph; of a block with experts what is beside these.

    How many rows go to an expert hangs on values, which no graph can have. Selective recomputation is done by
    a graph itself, so what is recomputed so as one is one. Where there are none, or the plan leaves none, the
    model runs as it is written, with a warning.
    """
    listed = blocks(model)
    for outer in (name for name, kind in chosen(model, plan).items() if kind == "selective"):
        within = [name for name in listed if name.startswith(f"{outer}." if outer else "")]
        listed = {name: block for name, block in listed.items() if name not in within}
        whole = model.get_submodule(outer)
        listed |= {outer: whole} if within and not stacks(whole) else {}
    parts = [part for block in listed.values() for part in _beside_experts(block)]
    reasons = (
        (not listed, "it has no list of blocks (espalier.compile(module) compiles what you name)"),
        (bool(listed) and not parts, "all of its blocks is experts, whose rows hang on values"),
        (plan.pipe > 1, "a pipeline's stages run what a trace of the model says (pipe = 1 has graphs)"),
        (plan.tensor_mode != "1d", "products of 2d, 2.5d and 3d travel in panels (those of 1d do not)"),
    )
    if wrong := [reason for is_so, reason in reasons if is_so]:
        tell(
            f"compile: {type(model).__name__} runs as it is written, uncompiled: {'; '.join(wrong)}. "
            "Leave compile out to say so."
        )
        return []
    return parts


def _beside_experts(block: nn.Module) -> list[nn.Module]:
    """A block, or, of one with experts, the modules in it that have none, and are worth a graph."""
    if not stacks(block):
        return [block]
    children = [child for child in block.children() if any(True for _ in child.children())]
    return [child for child in children if type(child).forward is not nn.Module.forward and not stacks(child)]


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
    if blocks and (configs := caching(model.modules())):
        around(model, partial(_without_caches, configs))
    names = {model.get_submodule(name): name for name, kind in recomputed.items() if kind == "selective"}
    policy = policy or keep_products
    compiler = partial(compiler_of_blocks, backend, plan.async_tensor_parallel)
    asking = not callable(backend)  # one of the caller's own rewrites nothing for which ranks ask each other
    alike = Alike(compiler(), asking)
    for block in blocks:
        if block not in names:
            compile_forward(block, alike.of_region())
    keeping = [names[block] for block in blocks if block in names]
    _tell_of_parts(blocks, names)
    alike_too = Alike(compiler(partial(Tracing, policy)), asking)
    regions = {name: compile_forward(model.get_submodule(name), alike_too.of_region()) for name in keeping}
    recompute_in_graphs(model, regions, plan.recompute_inputs, policy)
    for name in keeping:
        del recomputed[name]


def _tell_of_parts(blocks: Sequence[nn.Module], recomputed: Mapping[nn.Module, str]) -> None:
    """Warn if parts of blocks are graphs that blocks recomputed selectively cannot call."""
    within = {part for block in recomputed for part in block.modules() if part is not block}
    if kinds := sorted({type(block).__name__ for block in blocks if block in within}):
        tell(
            f"compile: {', '.join(kinds)} run as they are written, uncompiled, while they are trained: "
            'what is beside experts in a block of recompute = "selective". With "full", or "none", they are '
            "compiled."
        )


def _without_caches(
    configs: Sequence[Any],
    module: nn.Module,
    own: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
) -> Any:
    """A model's call; where it gives a loss or is trained, no cache of keys and values is filled unasked.

    That is an object, another one at each call, which blocks write to: none of them could be one graph.
    """
    for_loss = torch.is_grad_enabled() or kwargs.get("labels") is not None
    asking = [config for config in configs if config.use_cache is True] if for_loss else []
    with uncached(asking, kwargs):
        return own(*args, **kwargs)
