"""Cases of pooling."""

from __future__ import annotations

import torch

from tests.ranks.brute import A, X, case

_PLACES = (3, 0, 1, 1, 2, 2, 3, 0)

CASES = [
    case(
        "max_pool1d max_pool1d_with_indices",
        A(X((2, 3, 7)), 2),
        A(X((1, 2, 9)), 3, 2, 1, 2, True),
        A(X((3, 5)), 3, stride=1, padding=1),
    ),
    case(
        "max_pool2d max_pool2d_with_indices",
        A(X((2, 2, 5, 4)), 2),
        A(X((1, 2, 4, 7)), (2, 3), (1, 2), (1, 0), 1, True),
    ),
    case("max_pool3d max_pool3d_with_indices", A(X((2, 1, 4, 3, 5)), 2, 1), most=50),
    case(
        "avg_pool1d",
        A(X((2, 3, 7)), 2),
        A(X((1, 2, 9)), 3, 2, 1, True),
        A(X((3, 8)), 4, 3, 2, ceil_mode=True, count_include_pad=False),
    ),
    case(
        "avg_pool2d",
        A(X((2, 2, 5, 4)), 2),
        A(X((1, 2, 4, 7)), (2, 3), (1, 2), (1, 0), True, False),
        A(X((1, 2, 5, 5)), 3, 2, 1, True, True),
        A(X((2, 6, 4)), 3, 1, 1, divisor_override=2),
    ),
    case("avg_pool3d", A(X((2, 1, 4, 3, 5)), 2, 1, 1, count_include_pad=False), most=50),
    case("adaptive_avg_pool1d", A(X((2, 3, 7)), 1), A(X((2, 6)), 3), A(X((2, 1, 5)), 3)),
    case(
        "adaptive_avg_pool2d", A(X((2, 3, 5, 4)), 1), A(X((1, 2, 6, 5)), (3, None)), A(X((2, 4, 6)), (1, 3))
    ),
    case("adaptive_avg_pool3d", A(X((2, 1, 4, 3, 5)), (2, 1, 5)), most=50),
    case("adaptive_max_pool1d adaptive_max_pool1d_with_indices", A(X((2, 3, 7)), 1), A(X((2, 6)), 3)),
    case(
        "adaptive_max_pool2d adaptive_max_pool2d_with_indices",
        A(X((1, 2, 6, 5)), (3, None)),
        A(X((2, 4, 6)), (4, 3)),
    ),
    case("adaptive_max_pool3d adaptive_max_pool3d_with_indices", A(X((2, 1, 4, 3, 5)), (2, 1, 5)), most=50),
    case(
        "",
        A(X((2, 1, 2, 2)), X((2, 1, 2, 2), dtype=torch.int64, values=_PLACES), (2, 3)),
        also=[torch._C._nn.max_unpool2d],
    ),
    case(
        "",
        A(
            X((2, 2, 2, 1, 1)),
            X((2, 2, 2, 1, 1), dtype=torch.int64, values=_PLACES),
            (2, 2, 1),
            (2, 2, 1),
            (0, 0, 0),
        ),
        also=[torch._C._nn.max_unpool3d],
    ),
]
