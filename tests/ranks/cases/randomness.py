"""Cases of the random functions: equal to the same call on one rank, whatever the layout."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ranks.brute import A, X, case, ints

_BOTH = (A(X((4, 6))), A(X((5, 2))))


def _filled(name: str, *samples: A):
    return case("", *_BOTH, *samples, also=[getattr(torch.Tensor, name)], random=True)


CASES = [
    case(
        "",
        *_BOTH,
        A(X((5, 2)), 0.3),
        A(X((5, 2)), 0.3, False),
        A(X((5, 2)), 1.0),
        A(X((5, 2)), p=0.0),
        A(X((5, 2)), inplace=True),
        also=[F.dropout],
        random=True,
    ),
    case(
        "",
        A(X((4, 6)), 0.3, True),
        A(X((5, 2)), 0.3, False),
        also=[torch.dropout, torch.dropout_],
        random=True,
    ),
    case("rand_like randn_like", *_BOTH, A(X((5, 2)), dtype=torch.float32), random=True),
    case("bernoulli", A(X((4, 6), 0, 1)), A(X((5, 2), 0, 1)), random=True),
    _filled("uniform_", A(X((5, 2)), -1.0, 2.0), A(X((5, 2)), to=3.0)),
    _filled("normal_", A(X((5, 2)), 2.0, 0.5), A(X((5, 2)), std=0.1)),
    _filled(
        "bernoulli_",
        A(X((5, 2)), 0.3),
        A(X((5, 2)), p=0.7),
        A(X((5, 2)), X((5, 2), 0, 1, grad=False)),
        A(ints((5, 2), 0, 2), 0.3),
    ),
    _filled("random_", A(X((5, 2)), 7), A(ints((5, 2), 0, 9), 3, 8), A(ints((5, 2), 0, 9))),
    _filled("exponential_", A(X((5, 2)), 2.0)),
    *(_filled(name, A(X((5, 2)), 0.5)) for name in ("geometric_", "cauchy_", "log_normal_")),
    _filled("geometric_", A(ints((5, 2), 0, 2), 0.3)),
    case(
        "feature_dropout alpha_dropout feature_alpha_dropout",
        A(X((4, 6)), 0.3, True),
        A(X((4, 3, 2)), 0.5, True),
        A(X((3, 4, 1, 5)), 0.5, True),
        A(X((5, 2)), 0.5, False),
        A(X((5, 2)), 0.0, True),
        A(X((5, 2)), 1.0, True),
        random=True,
    ),
    case(
        "",
        A(X((4, 3, 2)), 0.5),
        A(X((3, 2, 4)), 0.5, True, True),
        also=[F.dropout1d, F.feature_alpha_dropout, F.alpha_dropout],
        random=True,
    ),
    case("", A(X((2, 3, 4, 2)), 0.5), also=[F.dropout2d, F.dropout3d], random=True),
    case(
        "",
        A(X((4, 6)), 0.1, 0.4, True),
        A(X((5, 2)), training=True),
        A(X((5, 2))),
        also=[torch.rrelu, torch.rrelu_, F.rrelu],
        random=True,
    ),
    case(
        "",
        A(X((4, 6)), 7),
        A(X((5, 2)), -3, 5, dtype=torch.int64),
        A(ints((5, 2), 0, 3), high=4),
        also=[torch.randint_like],
        random=True,
    ),
    case("bernoulli", A(X((5, 2)), 0.3), A(X((5, 2)), p=0.7), random=True),
    case(
        "",
        A(X((4, 6)), X((4, 6), 0, 2)),
        A(X((5, 1)), X((2,), 0, 2)),
        A(X((5, 2)), 0.5),
        A(X((5, 2))),
        A(1.0, X((5, 2), 0, 1)),
        also=[torch.normal],
        random=True,
    ),
    case("", A(X((4, 6), 0, 9)), A(X((5, 2), 0, 0.1)), also=[torch.poisson], random=True),
    case(
        "multinomial",
        A(X((4, 6), 0, 1, grad=False), 3),
        A(X((5, 2), 0.1, 1, grad=False), 4, True),
        A(X((6,), 0.1, 1, grad=False), 6),
        A(X((5, 3), 0.1, 1, grad=False), num_samples=2, replacement=True),
        random=True,
    ),
    case(
        "scaled_dot_product_attention",
        A(X((2, 3, 3, 2)), X((2, 3, 3, 2)), X((2, 3, 3, 2)), dropout_p=0.5),
        A(X((3, 5, 2)), X((3, 4, 2)), X((3, 4, 2)), None, 0.3),
        A(X((1, 4, 3, 2)), X((1, 2, 3, 2)), X((1, 2, 3, 2)), dropout_p=0.5, is_causal=True, enable_gqa=True),
        random=True,
        most=40,
    ),
]
