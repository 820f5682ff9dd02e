"""Kernels in Triton: dropout in one pass, and attention with dropout or a mask that never holds its scores.

What is dropped is told by the hash of :mod:`espalier.tensor.random`, bit for bit, of an element's global
number. So nothing is kept for the backward pass, and values are those of the plain operations.

Triton takes no types of parameters but ``tl.constexpr``. Loaded by :mod:`espalier.tensor.fused_kernels`
alone, and only where there is Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.tensor.random import MIX1, MIX2, WEYL

_WEYL, _MIX1, _MIX2 = tl.constexpr(WEYL), tl.constexpr(MIX1), tl.constexpr(MIX2)
# what no compiled kernel hangs on: they change from call to call
_VARYING = ["first", "second", "threshold", "scale", "base"]


@triton.jit
def kept_at(index, first, second, threshold):
    """Whether elements of these global numbers (int64) stay: the top 24 bits of their hash reach a number."""
    x = (index + first) * _WEYL
    x = (x ^ ((x >> 30) & 0x3FFFFFFFF)) * _MIX1 + second
    x = (x ^ ((x >> 27) & 0x1FFFFFFFFF)) * _MIX2
    x = x ^ ((x >> 31) & 0x1FFFFFFFF)
    return ((x >> 40) & 0xFFFFFF) >= threshold


@triton.jit(do_not_specialize=_VARYING)
def drop(
    x, out, numel, first, second, threshold, scale, base,
    size1, size2, size3, step0, step1, step2, step3,
    DIMS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x times 0 or a scale (the bits of a float64).

    An element's global number is ``base`` and, for each of ``DIMS`` dims from the inside out, its place
    times a step.
    """
    place = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    there = place < numel
    index = base.to(tl.int64) + tl.zeros_like(place)
    rest = place
    if DIMS > 1:
        index += rest % size1 * step0
        rest = rest // size1
        if DIMS > 2:
            index += rest % size2 * step1
            rest = rest // size2
            if DIMS > 3:
                index += rest % size3 * step2
                rest = rest // size3
                index += rest * step3
            else:
                index += rest * step2
        else:
            index += rest * step1
    else:
        index += rest * step0
    kept = kept_at(index, first.to(tl.int64), second.to(tl.int64), threshold)
    value = tl.load(x + place, mask=there, other=0.0)
    factor = scale.to(tl.int64).to(tl.float64, bitcast=True)
    if value.dtype == tl.float64:
        value = value * kept.to(tl.float64) * factor
    else:
        value = value.to(tl.float32) * kept.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _products(
    q, k, bias, row, column, rows, columns, scale, ahead,
    bias_row, bias_column, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of queries [m, d] and keys [n, d]; minus infinity where nothing is seen."""
    scores = tl.dot(q, tl.trans(k), input_precision=PRECISION) * scale
    seen = (row < rows)[:, None] & (column < columns)[None, :]
    if CAUSAL:
        seen = seen & (row[:, None] + ahead >= column[None, :])
    if BIAS != "none":
        at = bias + row.to(tl.int64)[:, None] * bias_row + column.to(tl.int64)[None, :] * bias_column
        if BIAS == "bool":
            seen = seen & (tl.load(at, mask=seen, other=0) != 0)
        else:
            scores += tl.load(at, mask=seen, other=0.0).to(tl.float32)
    return tl.where(seen, scores, float("-inf"))


@triton.jit
def _kept(row, column, start, step, first, second, threshold):
    """Whether weights stay, [m, n]; ``start``: the global number of their head's first one here."""
    index = start + row.to(tl.int64)[:, None] * step + column.to(tl.int64)[None, :]
    return kept_at(index, first.to(tl.int64), second.to(tl.int64), threshold)


@triton.jit
def _tile(x, row, rows, step, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    """Rows of a matrix whose rows lie a step apart, with zeros behind both ends."""
    column = tl.arange(0, PADDED)
    at = x + row.to(tl.int64)[:, None] * step + column[None, :]
    return tl.load(at, mask=(row < rows)[:, None] & (column < WIDTH)[None, :], other=0.0)


@triton.jit
def _put(x, value, row, rows, step, WIDTH: tl.constexpr, PADDED: tl.constexpr):
    column = tl.arange(0, PADDED)
    at = x + row.to(tl.int64)[:, None] * step + column[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=(row < rows)[:, None] & (column < WIDTH)[None, :])


@triton.jit(do_not_specialize=[*_VARYING, "ahead"])
def attend(
    q, k, v, bias, out, lse,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, bias_batch, bias_head, bias_row, bias_column,
    heads, times, rows, columns, factor, ahead,
    first, second, threshold, scale, base, of_batch, of_head, of_row,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [b, h, s, e] and lse [b, h, s] of M queries of one head (Dao et al., 2022)."""
    part, batch, head = tl.program_id(1), tl.program_id(0) // heads, tl.program_id(0) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    row = part * M + tl.arange(0, M)
    q += batch * q_batch + head * q_head
    k += batch * k_batch + head // times * k_head
    v += batch * v_batch + head // times * v_head
    bias += batch * bias_batch + head * bias_head
    start = base.to(tl.int64) + batch * of_batch + head * of_head
    queries = _tile(q, row, rows, q_row, D, DP)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, EP], tl.float32)
    stop = columns
    if CAUSAL:
        stop = tl.minimum(columns, tl.maximum((part + 1) * M + ahead, 0))
    for place in range(0, stop, N):
        column = place + tl.arange(0, N)
        keys = _tile(k, column, columns, k_row, D, DP)
        scores = _products(
            queries, keys, bias, row, column, rows, columns, factor, ahead, bias_row, bias_column,
            BIAS, CAUSAL, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(most, tl.max(scores, 1))
        level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp(scores - level[:, None])
        before = tl.exp(most - level)
        total = total * before + tl.sum(weights, 1)
        if DROPS:
            kept = _kept(row, column, start, of_row, first, second, threshold)
            weights = tl.where(kept, weights * scale, 0.0)
        values = _tile(v, column, columns, v_row, E, EP)
        sums = sums * before[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        most = higher
    sums = sums / tl.where(total == 0.0, 1.0, total)[:, None]
    line = (batch * heads + head) * rows
    _put(out + line * E, sums, row, rows, E, E, EP)
    level = tl.where(total == 0.0, float("-inf"), most + tl.log(tl.where(total == 0.0, 1.0, total)))
    tl.store(lse + line + row, level, mask=row < rows)


@triton.jit(do_not_specialize=[*_VARYING, "ahead"])
def attend_back_keys(
    q, k, v, bias, grad, lse, delta, dk, dv,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, bias_batch, bias_head, bias_row, bias_column,
    heads, times, rows, columns, factor, ahead,
    first, second, threshold, scale, base, of_batch, of_head, of_row,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of N keys and values of one head, from all queries that it serves.

    grad [b, h, s, e], lse and delta (the sum of grad times output) [b, h, s] lie row behind row.
    """
    groups = heads // times
    part, batch, group = tl.program_id(1), tl.program_id(0) // groups, tl.program_id(0) % groups
    batch, group = batch.to(tl.int64), group.to(tl.int64)
    column = part * N + tl.arange(0, N)
    keys = _tile(k + batch * k_batch + group * k_head, column, columns, k_row, D, DP)
    values = _tile(v + batch * v_batch + group * v_head, column, columns, v_row, E, EP)
    of_keys = tl.zeros([N, DP], tl.float32)
    of_values = tl.zeros([N, EP], tl.float32)
    begin = 0
    if CAUSAL:
        begin = tl.maximum(part * N - ahead, 0) // M * M
    for turn in range(times):
        head = group * times + turn
        line = (batch * heads + head) * rows
        start = base.to(tl.int64) + batch * of_batch + head * of_head
        for place in range(begin, rows, M):
            row = place + tl.arange(0, M)
            queries = _tile(q + batch * q_batch + head * q_head, row, rows, q_row, D, DP)
            scores = _products(
                queries, keys, bias + batch * bias_batch + head * bias_head, row, column, rows, columns,
                factor, ahead, bias_row, bias_column, BIAS, CAUSAL, PRECISION,
            )  # fmt: skip
            weights = tl.exp(scores - tl.load(lse + line + row, mask=row < rows, other=0.0)[:, None])
            came = _tile(grad + line * E, row, rows, E, E, EP)
            moved = tl.dot(came, tl.trans(values), input_precision=PRECISION)
            used = weights
            if DROPS:
                kept = _kept(row, column, start, of_row, first, second, threshold)
                used = tl.where(kept, weights * scale, 0.0)
                moved = tl.where(kept, moved * scale, 0.0)
            of_values += tl.dot(tl.trans(used.to(came.dtype)), came, input_precision=PRECISION)
            less = tl.load(delta + line + row, mask=row < rows, other=0.0)
            of_scores = weights * (moved - less[:, None])
            of_keys += tl.dot(tl.trans(of_scores.to(queries.dtype)), queries, input_precision=PRECISION)
    line = (batch * groups + group) * columns
    _put(dk + line * D, of_keys * factor, column, columns, D, D, DP)
    _put(dv + line * E, of_values, column, columns, E, E, EP)


@triton.jit(do_not_specialize=[*_VARYING, "ahead"])
def attend_back_queries(
    q, k, v, bias, grad, lse, delta, dq,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, bias_batch, bias_head, bias_row, bias_column,
    heads, times, rows, columns, factor, ahead,
    first, second, threshold, scale, base, of_batch, of_head, of_row,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of M queries of one head; see :func:`attend_back_keys`."""
    part, batch, head = tl.program_id(1), tl.program_id(0) // heads, tl.program_id(0) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    row = part * M + tl.arange(0, M)
    line = (batch * heads + head) * rows
    start = base.to(tl.int64) + batch * of_batch + head * of_head
    queries = _tile(q + batch * q_batch + head * q_head, row, rows, q_row, D, DP)
    came = _tile(grad + line * E, row, rows, E, E, EP)
    level = tl.load(lse + line + row, mask=row < rows, other=0.0)
    less = tl.load(delta + line + row, mask=row < rows, other=0.0)
    sums = tl.zeros([M, DP], tl.float32)
    stop = columns
    if CAUSAL:
        stop = tl.minimum(columns, tl.maximum((part + 1) * M + ahead, 0))
    for place in range(0, stop, N):
        column = place + tl.arange(0, N)
        keys = _tile(k + batch * k_batch + head // times * k_head, column, columns, k_row, D, DP)
        values = _tile(v + batch * v_batch + head // times * v_head, column, columns, v_row, E, EP)
        scores = _products(
            queries, keys, bias + batch * bias_batch + head * bias_head, row, column, rows, columns,
            factor, ahead, bias_row, bias_column, BIAS, CAUSAL, PRECISION,
        )  # fmt: skip
        moved = tl.dot(came, tl.trans(values), input_precision=PRECISION)
        if DROPS:
            kept = _kept(row, column, start, of_row, first, second, threshold)
            moved = tl.where(kept, moved * scale, 0.0)
        of_scores = tl.exp(scores - level[:, None]) * (moved - less[:, None])
        sums += tl.dot(of_scores.to(keys.dtype), keys, input_precision=PRECISION)
    _put(dq + line * D, sums * factor, row, rows, D, D, DP)
