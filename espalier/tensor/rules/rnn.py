"""Recurrent layers: the batch sharded, time, features and weights whole.

Packed sequences have no batch dim to shard; they have no rule and are gathered.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from espalier.tensor.random import draw_key
from espalier.tensor.rules.randomness import keep_mask
from espalier.tensor.rules.spec import Dims, Operand, Placed, Spec, bound_to, of_nothing
from espalier.tensor.rules.table import rule

_NAMES = "input hx params has_biases num_layers dropout train bidirectional batch_first"


@rule("lstm gru rnn_tanh rnn_relu")
def recurrent(
    input: Operand, hx: Any, params: Any, has_biases: Any, num_layers: Any, *rest: Any, **kwargs: Any
) -> Spec | None:
    """lstm, gru, rnn_tanh and rnn_relu: input[t, b, i] or [b, t, i], states[layers, b, h]."""
    states = [hx] if isinstance(hx, Operand) else list(hx)
    if not isinstance(params, tuple | list) or any(s.ndim != 3 for s in states):
        return None  # packed: data, batch_sizes, hx, params, ...
    named = bound_to(_NAMES, (input, hx, params, has_biases, num_layers, *rest), kwargs)
    layers, ways = num_layers, 2 if named["bidirectional"] else 1
    state: Dims = (None, "b", None)
    dims: Dims = ("b", None, None) if named["batch_first"] else state
    ins = [dims, *(state for _ in states), *((None,) * p.ndim for p in params)]
    shape = (*input.shape[:2], ways * states[0].shape[2])

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        bound = bound_to(_NAMES, args, kwargs)
        x, hx, params = bound["input"], bound["hx"], list(bound["params"])
        drops = bound["dropout"] if bound["train"] else 0.0
        if not x.numel():
            for _ in range(layers - 1 if drops else 0):
                draw_key(placed.mesh)  # all ranks draw alike
            given = (x, *([hx] if isinstance(hx, torch.Tensor) else hx), *params)
            return tuple(of_nothing(placed, *given, out=k) for k in range(1 + len(states)))
        if not drops or layers == 1:
            return func(*args, **kwargs)
        return _layered(func, bound, placed, layers, ways)

    return Spec(ins, [dims, *(state for _ in states)], [shape, *(s.shape for s in states)], run=run)


def _layered(func: Callable[..., Any], bound: dict[str, Any], placed: Placed, layers: int, ways: int) -> Any:
    """Layer by layer, for the mask of torch's dropout depends on what one rank holds."""
    x, params = bound["input"], list(bound["params"])
    alone = isinstance(bound["hx"], torch.Tensor)
    states = [bound["hx"]] if alone else list(bound["hx"])
    per = len(params) // layers
    last: list[Sequence[torch.Tensor]] = []
    for i in range(layers):
        if i:
            x = x * keep_mask(placed, bound["dropout"], x)
        own = [s[i * ways : (i + 1) * ways] for s in states]
        x, *ends = func(
            x, own[0] if alone else own, params[i * per : (i + 1) * per], bound["has_biases"], 1, 0.0,
            bound["train"], bound["bidirectional"], bound["batch_first"],
        )  # fmt: skip
        last.append(ends)
    return (x, *(torch.cat(each) for each in zip(*last, strict=True)))


@rule("lstm_cell gru_cell rnn_tanh_cell rnn_relu_cell")
def cell(
    input: Operand, hx: Any, w_ih: Operand, w_hh: Operand, b_ih: Operand | None = None,
    b_hh: Operand | None = None,
) -> Spec:  # fmt: skip
    """One step: input[b, i], states[b, h]."""
    states = [hx] if isinstance(hx, Operand) else list(hx)
    rows: Dims = ("b", None)
    small = [(None,) * o.ndim for o in (w_ih, w_hh, b_ih, b_hh) if isinstance(o, Operand)]

    def run(func: Callable[..., Any], args: Any, kwargs: Any, placed: Placed) -> Any:
        bound = bound_to("input hx w_ih w_hh b_ih b_hh", args, kwargs)
        x, hx = bound["input"], bound["hx"]
        if x.numel():
            return func(*args, **kwargs)
        given = [p for name, p in bound.items() if name not in ("input", "hx") and p is not None]
        given = [x, *([hx] if len(states) == 1 else hx), *given]
        out = tuple(of_nothing(placed, *given, out=k) for k in range(len(states)))
        return out[0] if len(states) == 1 else out

    return Spec(
        [rows, *(rows for _ in states), *small], [rows] * len(states), [s.shape for s in states], run=run
    )
