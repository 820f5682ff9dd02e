"""Kernels in Triton: dropout in one pass, and attention with dropout or a mask that never holds its scores.

What is dropped is told by the hash of :func:`espalier.tensor.random.kept`, bit for bit, of an element's
global number. So nothing is kept for the backward pass, and values are those of the plain operations.

Triton takes no types of parameters but ``tl.constexpr``. Loaded by :mod:`espalier.tensor.fused_kernels`
alone, and only where there is Triton.
"""

from __future__ import annotations

import triton
import triton.language as tl

from espalier.tensor.random import HALF_MIX1, HALF_MIX2, HALF_WEYL, HIGH

_WEYL, _HIGH = tl.constexpr(HALF_WEYL), tl.constexpr(HIGH)
_MIX1, _MIX2 = tl.constexpr(HALF_MIX1), tl.constexpr(HALF_MIX2)
_LOG2E = tl.constexpr(1.4426950408889634)  # devices know powers of two: scores are taken times this
# what no compiled kernel hangs on; ``first`` and ``second``, of the key, change from call to call
_VARYING = ["first", "second", "threshold", "scale", "base"]
_SIZES = ["rows", "columns", "ahead"]


@triton.jit
def _kept(number, column, first, second, threshold, WIDE: tl.constexpr):
    """Whether elements stay, by the sum of two numbers (int64, int32).

    WIDE: it may reach 2^32. Else the parts of the hash's first product, which is that of a sum, are made of
    one and the other number alone: of a tile's rows and columns.
    """
    if WIDE:
        sums = number + column.to(tl.int64)
        high = (sums >> 32).to(tl.uint32) * _HIGH
        x = (sums.to(tl.uint32) + first.to(tl.uint32) + high) * _WEYL
        between = high + second.to(tl.uint32)
    else:
        x = (number.to(tl.uint32) + first.to(tl.uint32)) * _WEYL + column.to(tl.uint32) * _WEYL
        between = second.to(tl.uint32)
    x = (x ^ (x >> 16)) * _MIX1 + between
    x = (x ^ (x >> 15)) * _MIX2
    return x.to(tl.int32, bitcast=True) >= threshold


@triton.jit(do_not_specialize=_VARYING)
def drop(
    x, out, first, second, numel, threshold, scale, base,
    size1, size2, size3, step0, step1, step2, step3,
    DIMS: tl.constexpr, WIDE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out = x times 0 or a scale (the bits of a float64).

    An element's global number is ``base`` and, for each of ``DIMS`` dims from the inside out, its place
    times a step. WIDE: it may reach 2^32, or places 2^31.
    """
    whole: tl.constexpr = tl.int64 if WIDE else tl.uint32
    place = tl.program_id(0).to(whole) * BLOCK + tl.arange(0, BLOCK).to(whole)
    there = place < tl.cast(numel, whole)
    index = base.to(whole) + tl.zeros_like(place)
    rest = place
    if DIMS > 1:
        index += rest % tl.cast(size1, whole) * tl.cast(step0, whole)
        rest = rest // tl.cast(size1, whole)
        if DIMS > 2:
            index += rest % tl.cast(size2, whole) * tl.cast(step1, whole)
            rest = rest // tl.cast(size2, whole)
            if DIMS > 3:
                index += rest % tl.cast(size3, whole) * tl.cast(step2, whole)
                rest = rest // tl.cast(size3, whole)
                index += rest * tl.cast(step3, whole)
            else:
                index += rest * tl.cast(step2, whole)
        else:
            index += rest * tl.cast(step1, whole)
    else:
        index += rest * tl.cast(step0, whole)
    kept = _kept(index, tl.zeros_like(place), first, second, threshold, WIDE)
    value = tl.load(x + place, mask=there, other=0.0)
    factor = scale.to(tl.int64).to(tl.float64, bitcast=True)
    if value.dtype == tl.float64:
        value = value * kept.to(tl.float64) * factor
    else:
        value = value.to(tl.float32) * kept.to(tl.float32) * factor.to(tl.float32)
    tl.store(out + place, value.to(out.dtype.element_ty), mask=there)


@triton.jit
def _scores(
    x, y, bias, row, column, rows, columns, factor, ahead, bias_row, bias_column,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Scores of queries and keys, or of keys and queries, times log2(e); minus infinity: not seen.

    ``row`` and ``column`` number the queries and keys along their dims. EDGE: some may not be seen, or not
    be there.
    """
    scores = tl.dot(x, tl.trans(y), input_precision=PRECISION) * (factor * _LOG2E)
    if EDGE or BIAS != "none":
        seen = (row < rows) & (column < columns)
        if CAUSAL:
            seen = seen & (row + ahead >= column)
        if BIAS != "none":
            at = bias + row.to(tl.int64) * bias_row + column.to(tl.int64) * bias_column
            if BIAS == "bool":
                seen = seen & (tl.load(at, mask=seen, other=0) != 0)
            else:
                scores += tl.load(at, mask=seen, other=0.0).to(tl.float32) * _LOG2E
        scores = tl.where(seen, scores, float("-inf"))
    return scores


@triton.jit
def _tile(
    x, begin, size, step,
    SIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr, EDGE: tl.constexpr,
):  # fmt: skip
    """SIDE rows of a matrix of ``size`` rows a step apart, from one on, with zeros behind both ends.

    EDGE: the last ones may not be there.
    """
    row, column = tl.arange(0, SIDE), tl.arange(0, PADDED)
    at = x + tl.cast(begin, tl.int64) * step + row.to(tl.int64)[:, None] * step + column[None, :]
    if EDGE:
        return tl.load(at, mask=(begin + row < size)[:, None] & (column < WIDTH)[None, :], other=0.0)
    if WIDTH == PADDED:
        return tl.load(at)
    return tl.load(at, mask=(column < WIDTH)[None, :], other=0.0)


@triton.jit
def _put(
    x, value, begin, size, step, SIDE: tl.constexpr, WIDTH: tl.constexpr, PADDED: tl.constexpr
):  # fmt: skip
    """Store such rows."""
    row, column = tl.arange(0, SIDE), tl.arange(0, PADDED)
    at = x + tl.cast(begin, tl.int64) * step + row.to(tl.int64)[:, None] * step + column[None, :]
    there = (begin + row < size)[:, None] & (column < WIDTH)[None, :]
    tl.store(at, value.to(x.dtype.element_ty), mask=there)


@triton.jit
def _attended(
    most, total, sums, queries, k, v, bias, begin, stop, row, number, first, second, threshold,
    k_row, v_row, bias_row, bias_column, rows, columns, factor, ahead,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """What queries make of some of their keys: the highest score, the sum of weights, that of values."""
    for place in range(begin, stop, N):
        column = place + tl.arange(0, N)
        keys = _tile(k, place, columns, k_row, N, D, DP, EDGE)
        scores = _scores(
            queries, keys, bias, row[:, None], column[None, :], rows, columns, factor, ahead, bias_row,
            bias_column, EDGE, BIAS, CAUSAL, PRECISION,
        )  # fmt: skip
        higher = tl.maximum(most, tl.max(scores, 1))
        level = higher
        if EDGE or BIAS != "none":
            level = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - level[:, None])
        before = tl.exp2(most - level)
        total = total * before + tl.sum(weights, 1)
        if DROPS:
            kept = _kept(number[:, None], column[None, :], first, second, threshold, WIDE)
            weights = tl.where(kept, weights, 0.0)
        values = _tile(v, place, columns, v_row, N, E, EP, EDGE)
        sums = sums * before[:, None] + tl.dot(weights.to(values.dtype), values, input_precision=PRECISION)
        most = higher
    return most, total, sums


@triton.jit
def _bounds(begin, columns, ahead, M: tl.constexpr, N: tl.constexpr, CAUSAL: tl.constexpr):
    """How many keys M queries from one on all see, in whole tiles, and how many some of them do."""
    whole, stop = columns, columns
    if CAUSAL:
        whole = tl.minimum(columns, tl.maximum(begin + ahead + 1, 0))
        stop = tl.minimum(columns, tl.maximum(begin + M + ahead, 0))
    return whole // N * N, stop


@triton.jit(do_not_specialize=[*_VARYING, *_SIZES])
def attend(
    q, k, v, bias, out, lse, first, second,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, bias_batch, bias_head, bias_row, bias_column,
    out_batch, out_head, out_row, heads, times, rows, columns, factor, ahead,
    threshold, scale, base, of_batch, of_head, of_row,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Output [b, h, s, e] and lse [b, h, s] of M queries of one head (Dao et al., 2022)."""
    begin, batch, head = tl.program_id(1) * M, tl.program_id(0) // heads, tl.program_id(0) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    row = begin + tl.arange(0, M)
    k += batch * k_batch + head // times * k_head
    v += batch * v_batch + head // times * v_head
    bias += batch * bias_batch + head * bias_head
    number = base.to(tl.int64) + batch * of_batch + head * of_head + row.to(tl.int64) * of_row
    queries = _tile(q + batch * q_batch + head * q_head, begin, rows, q_row, M, D, DP, True)
    most = tl.full([M], float("-inf"), tl.float32)
    total = tl.zeros([M], tl.float32)
    sums = tl.zeros([M, EP], tl.float32)
    whole, stop = _bounds(begin, columns, ahead, M, N, CAUSAL)
    most, total, sums = _attended(
        most, total, sums, queries, k, v, bias, 0, whole, row, number, first, second, threshold,
        k_row, v_row, bias_row, bias_column, rows, columns, factor, ahead,
        D, E, DP, EP, N, False, BIAS, CAUSAL, DROPS, WIDE, PRECISION,
    )  # fmt: skip
    most, total, sums = _attended(
        most, total, sums, queries, k, v, bias, whole, stop, row, number, first, second, threshold,
        k_row, v_row, bias_row, bias_column, rows, columns, factor, ahead,
        D, E, DP, EP, N, True, BIAS, CAUSAL, DROPS, WIDE, PRECISION,
    )  # fmt: skip
    some = tl.where(total == 0.0, 1.0, total)
    if DROPS:
        sums *= scale
    out += batch * out_batch + head * out_head
    _put(out, sums / some[:, None], begin, rows, out_row, M, E, EP)
    level = tl.where(total == 0.0, float("-inf"), (most + tl.log2(some)) / _LOG2E)
    tl.store(lse + (batch * heads + head) * rows + row, level, mask=row < rows)


@triton.jit
def _back_to_queries(
    sums, queries, came, level, less, k, v, bias, begin, stop, row, number, first, second, threshold,
    k_row, v_row, bias_row, bias_column, rows, columns, factor, ahead,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, N: tl.constexpr,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of some keys in the gradients of queries."""
    for place in range(begin, stop, N):
        column = place + tl.arange(0, N)
        keys = _tile(k, place, columns, k_row, N, D, DP, EDGE)
        values = _tile(v, place, columns, v_row, N, E, EP, EDGE)
        scores = _scores(
            queries, keys, bias, row[:, None], column[None, :], rows, columns, factor, ahead, bias_row,
            bias_column, EDGE, BIAS, CAUSAL, PRECISION,
        )  # fmt: skip
        weights = tl.exp2(scores - level[:, None])
        used = weights
        moved = tl.dot(came, tl.trans(values), input_precision=PRECISION)
        if DROPS:
            kept = _kept(number[:, None], column[None, :], first, second, threshold, WIDE)
            used = tl.where(kept, weights, 0.0)
        of_scores = used * moved - weights * less[:, None]
        sums += tl.dot(of_scores.to(keys.dtype), keys, input_precision=PRECISION)
    return sums


@triton.jit(do_not_specialize=[*_VARYING, *_SIZES])
def attend_back_queries(
    q, k, v, bias, grad, out, lse, delta, dq, first, second,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, bias_batch, bias_head, bias_row, bias_column,
    grad_batch, grad_head, grad_row, out_batch, out_head, out_row, dq_batch, dq_head, dq_row,
    heads, times, rows, columns, factor, ahead,
    threshold, scale, base, of_batch, of_head, of_row,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of M queries of one head; and delta [b, h, s], the sum of grad times out.

    lse and delta lie row behind row. What is kept is taken times ``scale`` at the end; delta is less by it.
    """
    begin, batch, head = tl.program_id(1) * M, tl.program_id(0) // heads, tl.program_id(0) % heads
    batch, head = batch.to(tl.int64), head.to(tl.int64)
    row = begin + tl.arange(0, M)
    k += batch * k_batch + head // times * k_head
    v += batch * v_batch + head // times * v_head
    bias += batch * bias_batch + head * bias_head
    line = (batch * heads + head) * rows
    number = base.to(tl.int64) + batch * of_batch + head * of_head + row.to(tl.int64) * of_row
    queries = _tile(q + batch * q_batch + head * q_head, begin, rows, q_row, M, D, DP, True)
    came = _tile(grad + batch * grad_batch + head * grad_head, begin, rows, grad_row, M, E, EP, True)
    gave = _tile(out + batch * out_batch + head * out_head, begin, rows, out_row, M, E, EP, True)
    less = tl.sum(came.to(tl.float32) * gave.to(tl.float32), 1)
    less = tl.where(scale == 0.0, 0.0, less / scale)
    tl.store(delta + line + row, less, mask=row < rows)
    level = tl.load(lse + line + row, mask=row < rows, other=0.0) * _LOG2E
    came = came.to(queries.dtype)
    sums = tl.zeros([M, DP], tl.float32)
    whole, stop = _bounds(begin, columns, ahead, M, N, CAUSAL)
    sums = _back_to_queries(
        sums, queries, came, level, less, k, v, bias, 0, whole, row, number, first, second, threshold,
        k_row, v_row, bias_row, bias_column, rows, columns, factor, ahead,
        D, E, DP, EP, N, False, BIAS, CAUSAL, DROPS, WIDE, PRECISION,
    )  # fmt: skip
    sums = _back_to_queries(
        sums, queries, came, level, less, k, v, bias, whole, stop, row, number, first, second,
        threshold, k_row, v_row, bias_row, bias_column, rows, columns, factor, ahead,
        D, E, DP, EP, N, True, BIAS, CAUSAL, DROPS, WIDE, PRECISION,
    )  # fmt: skip
    _put(dq + batch * dq_batch + head * dq_head, sums * (factor * scale), begin, rows, dq_row, M, D, DP)


@triton.jit
def _back_to_keys(
    of_keys, of_values, keys, values, q, grad, lse, delta, bias, begin, stop, column, start, first, second,
    threshold, q_row, grad_row, bias_row, bias_column, of_row, rows, columns, factor, ahead,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr,
    EDGE: tl.constexpr, BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr,
    WIDE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The part of some queries in the gradients of keys and values; scores lie [keys, queries]."""
    for place in range(begin, stop, M):
        row = place + tl.arange(0, M)
        queries = _tile(q, place, rows, q_row, M, D, DP, EDGE)
        came = _tile(grad, place, rows, grad_row, M, E, EP, EDGE).to(queries.dtype)
        if EDGE:
            level = tl.load(lse + row, mask=row < rows, other=0.0)
            less = tl.load(delta + row, mask=row < rows, other=0.0)
        else:
            level, less = tl.load(lse + row), tl.load(delta + row)
        scores = _scores(
            keys, queries, bias, row[None, :], column[:, None], rows, columns, factor, ahead, bias_row,
            bias_column, EDGE, BIAS, CAUSAL, PRECISION,
        )  # fmt: skip
        weights = tl.exp2(scores - (level * _LOG2E)[None, :])
        moved = tl.dot(values, tl.trans(came), input_precision=PRECISION)
        used = weights
        if DROPS:
            number = start + row.to(tl.int64) * of_row
            kept = _kept(number[None, :], column[:, None], first, second, threshold, WIDE)
            used = tl.where(kept, weights, 0.0)
        of_values += tl.dot(used.to(came.dtype), came, input_precision=PRECISION)
        of_scores = used * moved - weights * less[None, :]
        of_keys += tl.dot(of_scores.to(queries.dtype), queries, input_precision=PRECISION)
    return of_keys, of_values


@triton.jit(do_not_specialize=[*_VARYING, *_SIZES])
def attend_back_keys(
    q, k, v, bias, grad, lse, delta, dk, dv, first, second,
    q_batch, q_head, q_row, k_batch, k_head, k_row,
    v_batch, v_head, v_row, bias_batch, bias_head, bias_row, bias_column,
    grad_batch, grad_head, grad_row, dk_batch, dk_head, dk_row, dv_batch, dv_head, dv_row,
    heads, times, rows, columns, factor, ahead,
    threshold, scale, base, of_batch, of_head, of_row,
    D: tl.constexpr, E: tl.constexpr, DP: tl.constexpr, EP: tl.constexpr, M: tl.constexpr, N: tl.constexpr,
    BIAS: tl.constexpr, CAUSAL: tl.constexpr, DROPS: tl.constexpr, WIDE: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of N keys and values of one head, from all queries that it serves; needs delta."""
    groups = heads // times
    begin, batch, group = tl.program_id(1) * N, tl.program_id(0) // groups, tl.program_id(0) % groups
    batch, group = batch.to(tl.int64), group.to(tl.int64)
    column = begin + tl.arange(0, N)
    keys = _tile(k + batch * k_batch + group * k_head, begin, columns, k_row, N, D, DP, True)
    values = _tile(v + batch * v_batch + group * v_head, begin, columns, v_row, N, E, EP, True)
    of_keys = tl.zeros([N, DP], tl.float32)
    of_values = tl.zeros([N, EP], tl.float32)
    # queries that may see some of these keys, those that see all of them, and the last, of no whole tile
    one, two, three = 0, 0, rows // M * M
    if CAUSAL:
        one = tl.minimum(tl.maximum(begin - ahead, 0) // M * M, three)
        two = tl.minimum(tl.maximum(begin + N - 1 - ahead + M - 1, 0) // M * M, three)
    for turn in range(times):
        head = group * times + turn
        line = (batch * heads + head) * rows
        start = base.to(tl.int64) + batch * of_batch + head * of_head
        of_head_q, of_head_grad = (
            q + batch * q_batch + head * q_head,
            grad + batch * grad_batch + head * grad_head,
        )
        of_head_bias = bias + batch * bias_batch + head * bias_head
        if CAUSAL:
            of_keys, of_values = _back_to_keys(
                of_keys, of_values, keys, values, of_head_q, of_head_grad, lse + line, delta + line,
                of_head_bias, one, two, column, start, first, second, threshold,
                q_row, grad_row, bias_row, bias_column, of_row, rows, columns, factor, ahead,
                D, E, DP, EP, M, True, BIAS, CAUSAL, DROPS, WIDE, PRECISION,
            )  # fmt: skip
        of_keys, of_values = _back_to_keys(
            of_keys, of_values, keys, values, of_head_q, of_head_grad, lse + line, delta + line,
            of_head_bias, two, three, column, start, first, second, threshold,
            q_row, grad_row, bias_row, bias_column, of_row, rows, columns, factor, ahead,
            D, E, DP, EP, M, False, BIAS, CAUSAL, DROPS, WIDE, PRECISION,
        )  # fmt: skip
        of_keys, of_values = _back_to_keys(
            of_keys, of_values, keys, values, of_head_q, of_head_grad, lse + line, delta + line,
            of_head_bias, three, rows, column, start, first, second, threshold,
            q_row, grad_row, bias_row, bias_column, of_row, rows, columns, factor, ahead,
            D, E, DP, EP, M, True, BIAS, CAUSAL, DROPS, WIDE, PRECISION,
        )  # fmt: skip
    of_values *= scale
    _put(
        dk + batch * dk_batch + group * dk_head, of_keys * (factor * scale), begin, columns, dk_row, N, D, DP
    )
    _put(dv + batch * dv_batch + group * dv_head, of_values, begin, columns, dv_row, N, E, EP)
