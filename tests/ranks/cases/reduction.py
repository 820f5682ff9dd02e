"""Cases of the reductions and of functions along a dim."""

from __future__ import annotations

import math

import torch

from tests.ranks.brute import A, X, bools, case, ints

_X = (X((4, 6)), X((5, 2)))


def _dims(*extra: A) -> list[A]:
    return [
        *(A(x) for x in _X),
        *(A(x, d) for x in _X for d in (0, -1)),
        A(X((2, 5, 3)), (0, 2)),
        A(X((5, 2)), 1, True),
        A(X((5, 2)), dim=0, keepdim=True),
        A(X(())),
        *extra,
    ]


def _along(*extra: A) -> list[A]:
    return [*(A(x, d) for x in _X for d in (0, -1)), A(X((2, 5, 3)), dim=1), *extra]


CASES = [
    case(
        "sum",
        *_dims(
            A(X((5, 2)), None, dtype=torch.float32),
            A(ints((5, 2), 0, 5), 0),
            A(bools((5, 2))),
            A(X((5, 2)), axis=0),
        ),
    ),
    case("mean", *_dims(A(X((5, 2)), 0, dtype=torch.float32), A(input=X((5, 2))), A(X((5, 2)), ()))),
    case("amax amin", *_dims()),
    case(
        "max min",
        A(X((4, 6))),
        A(X((5, 2))),
        A(X((5, 2)), 0),
        A(X((4, 6)), 1, True),
        A(X((5, 2)), X((2,))),
        A(X((5, 2)), dim=-1),
    ),
    case("argmax argmin", A(X((4, 6))), A(X((5, 2)), 0), A(X((5, 2)), 1, True), A(X((5, 2)), keepdim=True)),
    case(
        "var std",
        A(X((4, 6))),
        A(X((5, 2)), 0),
        A(X((5, 2)), False),
        A(X((4, 6)), 1, False, True),
        A(X((4, 6)), dim=0, correction=2),
        A(X((5, 3)), (0, 1), keepdim=True),
    ),
    case("all any", A(bools((4, 6))), A(bools((5, 2)), 0), A(X((5, 2)), 1, True), A(bools((5, 2)), (0, 1))),
    case("_is_all_true _is_any_true", A(bools((4, 6))), A(bools((5, 2)))),
    case(
        "logsumexp",
        A(X((4, 6)), 0),
        A(X((5, 2)), 0),
        A(X((5, 2)), -1, True),
        A(X((2, 5, 3)), (0, 1)),
        A(input=X((5, 4)), dim=0),
    ),
    case("prod", A(X((4, 6))), A(X((5, 2)), 0), A(X((5, 2)), 1, True)),
    case("count_nonzero", A(ints((4, 6), 0, 3)), A(ints((5, 2), 0, 2), 0), A(X((5, 2)), (0, 1))),
    case("cumsum", *_along(A(X((5, 2)), 0, dtype=torch.float32))),
    case("cumprod logcumsumexp", *_along()),
    case("softmax log_softmax softmin", *_along(A(X((5, 2)), -1, dtype=torch.float32), A(X(()), 0))),
    case(
        "sort",
        A(X((4, 6))),
        *_along(),
        A(X((5, 2)), 0, True),
        A(X((5, 2)), dim=0, descending=True),
        A(X((5, 2)), descending=True),
    ),
    case("cummax cummin", *_along()),
    case("argsort", A(X((4, 6))), *_along(), A(X((5, 2)), 0, True), A(X((5, 2)), dim=0, stable=True)),
    case("topk", A(X((4, 6)), 2), A(X((5, 2)), 2, 0), A(X((5, 7)), k=3, dim=-1, largest=False)),
    case(
        "vector_norm",
        *_dims(),
        A(X((5, 2)), 2, 0),
        A(X((5, 2)), 1, (0, 1)),
        A(X((4, 6)), 3.0, -1, True),
        A(X((5, 2)), math.inf),
        A(X((5, 2)), 0, 0),
        A(X((4, 6)), ord=2, dim=0, dtype=torch.float64),
    ),
    case("tril triu", A(X((4, 6))), A(X((5, 2, 3)), 1), A(X((5, 2)), diagonal=-1)),
]
