"""Cases of normalisations (running statistics: ``tests/ranks/test_layers.py``)."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ranks.brute import A, X, case

_EVAL = (X((2,), grad=False), X((2,), 0.5, 2, grad=False))
_EVAL3 = (X((3,), grad=False), X((3,), 0.5, 2, grad=False))

CASES = [
    case(
        "",
        A(X((4, 2, 3)), None, None, None, None, True),
        A(X((5, 3)), None, None, X((3,)), X((3,)), True),
        A(X((1, 2, 3, 4)), None, None, weight=X((2,)), bias=X((2,)), training=True, eps=0.1),
        A(X((4, 2, 3)), *_EVAL, X((2,)), X((2,))),
        A(X((5, 3)), *_EVAL3),
        also=[F.batch_norm],
        most=60,
    ),
    case(
        "",
        A(X((4, 2, 3)), X((2,)), X((2,)), None, None, True, 0.1, 1e-5, False),
        A(X((5, 2, 1)), None, None, *_EVAL, False, 0.1, 1e-5, False),
        also=[torch.batch_norm],
        most=30,
    ),
    case(
        "",
        A(X((4, 2, 3))),
        A(X((2, 3, 2, 5)), None, None, X((3,)), X((3,)), eps=0.1),
        A(X((4, 2, 3)), *_EVAL, use_input_stats=False),
        also=[F.instance_norm],
        most=60,
    ),
    case(
        "",
        A(X((3, 2, 5)), X((2,)), X((2,)), None, None, True, 0.1, 1e-5, False),
        also=[torch.instance_norm],
        most=30,
    ),
    case(
        "layer_norm",
        A(X((4, 6)), (6,)),
        A(X((5, 2, 3)), (3,), X((3,)), X((3,))),
        A(X((5, 2, 3)), (2, 3), X((2, 3))),
    ),
    case("rms_norm", A(X((4, 6)), (6,)), A(X((5, 2, 3)), (3,), X((3,)), 1e-3)),
    case(
        "group_norm",
        A(X((4, 6, 3)), 2),
        A(X((5, 4)), 2, X((4,)), X((4,))),
        A(X((1, 6, 2, 3)), 3, X((6,)), X((6,)), 0.1),
    ),
    case(
        "normalize",
        A(X((4, 6))),
        A(X((5, 2, 3)), dim=-1),
        A(X((5, 2)), 1.0, 0),
        A(X((3, 4)), torch.inf),
        A(X(()), dim=0),
    ),
    case("local_response_norm", A(X((2, 5, 3)), 3), A(X((2, 3, 2, 2)), 2, 0.5, 0.6, 2.0)),
]
