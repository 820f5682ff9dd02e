"""Selective recomputation: which results of a block are kept, and handed to what computes it again.

Korthikanti et al. 2022 (Reducing Activation Recomputation in Large Transformer Models).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import islice
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import SAC_IGNORED_OPS, CheckpointPolicy, SelectiveCheckpointContext
from torch.utils.weak import WeakIdKeyDictionary

from espalier.comm.custom_ops import copy_operator
from espalier.torch_private import (
    TorchDispatchMode,
    detached_here,
    memory_id,
    schema_of,
    traced_graph,
    version_of,
    with_effects,
)
from espalier.trees import tensors_in, tree_map

Policy = Callable[..., Any]

_aten = torch.ops.aten
_BATCHED = (_aten.bmm.default, _aten.baddbmm.default)
_KEPT = frozenset(
    getattr(_aten, name).default
    for name in (
        "mm addmm convolution _grouped_mm _scaled_mm _scaled_dot_product_flash_attention "
        "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention "
        "_scaled_dot_product_cudnn_attention _scaled_dot_product_fused_attention_overrideable"
    ).split()
    if hasattr(_aten, name)
)


def keep_products(ctx: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    """The policy of ``"selective"``: matrix products and outputs of attention are kept, the rest recomputed.

    A batched product that is larger than what it is made of is recomputed: the scores of an attention.
    """
    keep = op in _KEPT
    if op in _BATCHED:
        a, b = args[-2:]
        keep = a.shape[-2] * b.shape[-1] <= max(a.shape[-2] * a.shape[-1], b.shape[-2] * b.shape[-1])
    return CheckpointPolicy.MUST_SAVE if keep else CheckpointPolicy.PREFER_RECOMPUTE


def selective_contexts(policy: Policy) -> tuple[Any, Any]:
    """Around a block's first computation, and around the one for its backward pass.

    As torch's ``create_selective_checkpoint_contexts``; but what that refuses is computed again: results that
    somebody has written to since (an LSTM writes its gates over its products; ``x += 1`` after the block),
    also where torch does not see it, and operations that the first computation did not have (parameters that
    are gathered anew).
    """
    kept: dict[Any, dict[int, _Result]] = {}
    return _Keeping(policy, kept), _Handing(kept)


@dataclass
class _Result:
    """What an operation gave, and what tells that it is this operation, and as it was."""

    out: Any
    versions: list[int]
    shapes: list[torch.Size]

    @classmethod
    def of(cls, out: Any, args: Any) -> _Result:
        out = tree_map(lambda x: detached_here(x) if isinstance(x, torch.Tensor) else x, out)
        return cls(out, [version_of(x) for x in tensors_in(out)], _shapes(args))

    @property
    def is_written(self) -> bool:
        return [version_of(x) for x in tensors_in(self.out)] != self.versions


def _shapes(args: Any) -> list[torch.Size]:
    return [x.shape for x in tensors_in(args)]


class _Keeping(TorchDispatchMode):
    """The first computation."""

    def __init__(self, policy: Policy, kept: dict[Any, dict[int, _Result]]) -> None:
        super().__init__()
        self._policy, self._kept = policy, kept
        self._calls: Counter[Any] = Counter()
        self._of_storage: dict[int, list[tuple[Any, int]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        if self._of_storage:
            self._forget(_written(func, args, kwargs))
        out = func(*args, **kwargs)
        number = self._calls[func]
        self._calls[func] += 1
        if _keeps(self._policy, out, func, args, kwargs):
            result = _Result.of(out, args)
            self._kept.setdefault(func, {})[number] = result
            for x in tensors_in(result.out):
                self._of_storage.setdefault(memory_id(x), []).append((func, number))
        return out

    def _forget(self, written: list[torch.Tensor]) -> None:
        """A result that is written to is no longer what its operation gave."""
        for x in written:
            for func, number in self._of_storage.pop(memory_id(x), ()):
                self._kept[func].pop(number, None)


class _Handing(TorchDispatchMode):
    """The computation for the backward pass: a result that was kept is handed out, once."""

    def __init__(self, kept: dict[Any, dict[int, _Result]]) -> None:
        super().__init__()
        self._kept = kept
        self._calls: Counter[Any] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in SAC_IGNORED_OPS:
            return func(*args, **kwargs)
        number = self._calls[func]
        self._calls[func] += 1
        result = self._kept.get(func, {}).pop(number, None)
        if result is None or result.is_written:
            return func(*args, **kwargs)
        if result.shapes != _shapes(args):
            raise RuntimeError(
                f"recompute: the {number + 1}. {func} of a block was given tensors of the shapes "
                f"{[tuple(s) for s in result.shapes]} at first, and {[tuple(s) for s in _shapes(args)]} when "
                "it was computed again. Its forward must do the same both times: leave this block out of "
                'recompute, or let it be "full" there.'
            )
        return result.out


class _Looking(TorchDispatchMode):
    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """It asks for nothing that a tracer does not do anyway."""
        return True


class _MarkingKept(_Looking):
    """While a block is traced: tells the partitioner of its graph what is kept, and what computed again.

    Marks are those of torch's selective checkpointing in compiled regions. Of collectives, effects in a
    graph, nothing is said: they are never sent again, so what they give is kept if backward needs it.
    """

    def __init__(self, policy: Policy) -> None:
        super().__init__()
        self._policy = policy
        self._kept_of: WeakIdKeyDictionary = WeakIdKeyDictionary()  # whose memory is that of what is kept

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, graph = kwargs or {}, traced_graph()
        assert graph is not None
        before = len(graph.nodes)
        out = func(*args, **kwargs)
        made = list(islice(reversed(graph.nodes), len(graph.nodes) - before))
        if any(node.target is with_effects() for node in made):
            return out
        keeps = func not in SAC_IGNORED_OPS and _keeps(self._policy, out, func, args, kwargs)
        _mark(made, CheckpointPolicy.MUST_SAVE if keeps else CheckpointPolicy.PREFER_RECOMPUTE)
        for x in _written(func, args, kwargs):  # it is no longer what its operation gave
            _mark(self._kept_of.get(x, []), CheckpointPolicy.PREFER_RECOMPUTE)
        seen = _seen_again(func, args)
        for x in tensors_in(out):
            if keeps:
                self._kept_of[x] = made
            elif seen is not None and seen in self._kept_of:
                self._kept_of[x] = self._kept_of[seen]
        return out


class Tracing:
    """How a block is traced to a graph that computes again what a policy does not keep.

    What is computed again must find what the block found: of what it writes to, that is kept.
    """

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._written: set[int] = set()

    def __call__(self, program: Callable[..., Any], tensors: Sequence[torch.Tensor]) -> Any:
        """What a program gives for tensors."""
        if traced_graph() is None:  # AOTAutograd looks before it traces
            with _Writing(tensors) as writing:
                out = program(*tensors)
            self._written |= writing.to
            return out
        changed = [i for i in sorted(self._written) if not tensors[i].requires_grad]
        own = list(tensors)
        with _MarkingKept(lambda *_, **__: True):
            for i in changed:
                own[i] = copy_operator()(tensors[i])
        with _MarkingKept(self._policy):
            out = program(*own)
        for i in changed:
            tensors[i].copy_(own[i])
        return out


class _Writing(_Looking):
    """Sees which of some tensors are written to.

    Attributes:
        to: their numbers.
    """

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self._numbers: WeakIdKeyDictionary = WeakIdKeyDictionary()
        for i, x in enumerate(tensors):
            self._numbers[x] = i
        self.to: set[int] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        self.to |= {self._numbers[x] for x in _written(func, args, kwargs) if x in self._numbers}
        out, seen = func(*args, **kwargs), _seen_again(func, args)
        if seen is not None and seen in self._numbers:
            for x in tensors_in(out):
                self._numbers[x] = self._numbers[seen]
        return out


def _mark(nodes: Iterable[fx.Node], how: CheckpointPolicy) -> None:
    for node in nodes:
        node.meta["recompute"] = how


def _keeps(policy: Policy, out: Any, func: Any, args: Any, kwargs: Any) -> bool:
    context: Any = SelectiveCheckpointContext(is_recompute=False)
    context.op_output = out
    said = policy(context, func, *args, **kwargs)
    return said is True or said in (CheckpointPolicy.MUST_SAVE, CheckpointPolicy.PREFER_SAVE)


def _seen_again(func: Any, args: Any) -> torch.Tensor | None:
    """The argument whose memory is that of what an operator gives."""
    schema = schema_of(func)
    if func is not _aten._unsafe_view.default and all(r.alias_info is None for r in schema.returns):
        return None
    return next((x for x in args if isinstance(x, torch.Tensor)), None)


@cache
def _writes(func: Any) -> tuple[tuple[int, str], ...]:
    """The arguments that an operator writes to: of each the position and the name."""
    arguments = enumerate(schema_of(func).arguments)
    return tuple((i, a.name) for i, a in arguments if a.alias_info is not None and a.alias_info.is_write)


def _written(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    values = [args[i] if i < len(args) else kwargs.get(name) for i, name in _writes(func)]
    return tensors_in(values)
