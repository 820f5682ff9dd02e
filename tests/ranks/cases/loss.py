"""Cases of the losses."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from tests.ranks.brute import A, X, case, ints

_TARGETS = X((5,), dtype=torch.int64, values=(-100, 3, 0, -100, 6))
# with the tokens sharded, rank 0 has nothing to count
_FRONT = X((6,), dtype=torch.int64, values=(-100, -100, -100, 1, 0, 1))
_NLL = [
    A(X((4, 6)), ints((4,), 0, 6)),
    A(X((5, 7)), _TARGETS),
    A(X((6, 2)), _FRONT),
    A(X((5, 2)), ints((5,), 0, 2), reduction="sum"),
    A(X((5, 7)), _TARGETS, reduction="none"),
    A(X((2, 3, 4)), ints((2, 4), 0, 3)),
    A(X((5, 2, 3)), ints((5, 3), 0, 2), reduction="none"),
    A(X((5,)), ints((), 0, 5)),
    A(X((5, 3)), ints((5,), 0, 3), ignore_index=1),
    A(X((4, 6)), ints((4,), 0, 6), X((6,), 0.5, 2, grad=False)),
    A(X((5, 3)), ints((5,), 0, 3), weight=X((3,), 0.5, 2, grad=False), reduction="none", ignore_index=2),
    A(X((5, 3)), ints((5,), 0, 3), weight=X((3,), 0.5, 2, grad=False), reduction="sum"),
    A(X((2, 3, 4)), ints((2, 4), 0, 3), X((3,), 0.5, 2, grad=False)),
]
_HEAD = X((7, 3))
_IN_CHUNKS = (
    []
    if not hasattr(F, "linear_cross_entropy")
    else [
        case(
            "",
            A(X((5, 3)), _HEAD, _TARGETS, options=nn.LinearCrossEntropyOptions(batch_chunk_size=2)),
            A(X((6, 3)), X((2, 3)), _FRONT, linear_bias=X((2,)), options=nn.LinearCrossEntropyOptions()),
            A(
                X((5, 3)),
                _HEAD,
                _TARGETS,
                weight=X((7,), 0.5, 2, grad=False),
                ignore_index=3,
                options=nn.LinearCrossEntropyOptions(batch_chunk_size=1),
                reduction="sum",
            ),
            A(
                X((5, 3)),
                _HEAD,
                _TARGETS,
                weight=X((7,), 0.5, 2, grad=False),
                options=nn.LinearCrossEntropyOptions(batch_chunk_size=4),
            ),
            A(
                X((5, 3)),
                _HEAD,
                ints((5,), 0, 7),
                linear_bias=X((7,)),
                reduction="none",
                options=nn.LinearCrossEntropyOptions(),
            ),
            A(X((5, 3)), _HEAD, ints((5,), 0, 7), label_smoothing=0.1),
            also=[F.linear_cross_entropy],
            most=60,
        )
    ]
)
_SIGNS = X((4, 6), values=(1, -1, -1) * 8, grad=False)
_LOGS = X((5, 3, 4), -4, -0.1)
_PAIRS = [
    A(X((4, 6)), X((4, 6))),
    A(X((5, 2)), X((5, 2)), reduction="sum"),
    A(X((5, 2)), X((5, 2)), reduction="none"),
    A(X((5, 2)), X((5, 2)), None, None, "sum"),
    A(X(()), X(())),
]

CASES = [
    case(
        "",
        *_NLL,
        A(X((5, 3)), ints((5,), 0, 3), label_smoothing=0.1),
        A(X((6, 2)), _FRONT, label_smoothing=0.1),
        A(X((5, 3)), ints((5,), 0, 3), X((3,), 0.5, 2, grad=False), label_smoothing=0.1),
        A(X((5, 7)), _TARGETS, label_smoothing=0.1, reduction="none"),
        A(X((5, 3)), ints((5,), 0, 3), label_smoothing=0.1, reduction="sum"),
        A(X((5, 3)), X((5, 3), 0, 1)),
        A(X((5, 3)), X((5, 3), 0, 1), reduction="sum"),
        A(X((2, 3, 4)), X((2, 3, 4), 0, 1), reduction="none"),
        A(X((5, 3)), X((5, 3), 0, 1), weight=X((3,), 0.5, 2, grad=False), label_smoothing=0.1),
        A(X((3,)), X((3,), 0, 1)),
        A(X((2, 3, 2)), ints((2, 2), 0, 3), X((3,), 0.5, 2, grad=False), None, -100, None, "sum", 0.2),
        also=[F.cross_entropy],
    ),
    *_IN_CHUNKS,
    case("", *_NLL, also=[F.nll_loss]),
    case("", *_PAIRS, also=[F.smooth_l1_loss]),
    *[
        case("", *_PAIRS, A(X((5, 2)), X((5, 2)), weight=X((5, 2), 0.5, 2)), also=[f])
        for f in (F.mse_loss, F.l1_loss, F.huber_loss)
    ],
    case(
        "",
        A(X((4, 6), 0.1, 0.9), X((4, 6), 0, 1)),
        A(X((5, 2), 0.1, 0.9), X((5, 2), 0, 1), X((2,), 0.5, 2, grad=False)),
        A(X((5, 2), 0.1, 0.9), X((5, 2), 0, 1), reduction="none"),
        also=[F.binary_cross_entropy],
    ),
    case(
        "",
        A(X((4, 6)), X((4, 6), 0, 1)),
        A(X((5, 2)), X((5, 2), 0, 1), pos_weight=X((2,), 0.5, 2, grad=False)),
        A(X((5, 2)), X((5, 2), 0, 1), X((2,), 0.5, 2, grad=False), reduction="sum"),
        also=[F.binary_cross_entropy_with_logits],
    ),
    case(
        "",
        A(X((4, 6)), X((4, 6), grad=False)),
        A(X((5, 2)), X((5, 2), grad=False), reduction="none"),
        also=[F.soft_margin_loss],
    ),
    case(
        "",
        A(X((4, 6)), X((4, 6), 0.1, 1), reduction="sum"),
        A(X((5, 2)), X((5, 2)), reduction="batchmean", log_target=True),
        A(X((5, 2)), X((5, 2), 0.1, 1), None, None, "none"),
        also=[F.kl_div],
    ),
    case(
        "",
        A(X((4, 6)), X((4, 6), 1.5, 4)),
        A(X((5, 2), 0.1, 2), X((5, 2), 1.5, 4), False, True, reduction="sum"),
        also=[F.poisson_nll_loss],
    ),
    case(
        "", A(X((4, 6)), _SIGNS), A(X((4, 6)), _SIGNS, 0.5, reduction="none"), also=[F.hinge_embedding_loss]
    ),
    case(
        "", A(X((4, 6)), X((4, 6)), _SIGNS), A(X((4, 6)), X((6,)), _SIGNS, 0.5), also=[F.margin_ranking_loss]
    ),
    case(
        "",
        A(X((5, 3)), X((5, 3)), X((5,), values=(1, -1, -1, 1, 1), grad=False)),
        A(X((4, 3)), X((4, 3)), X((4,), values=(1, -1, -1, 1), grad=False), 0.5, reduction="none"),
        A(X((3,)), X((3,)), X((), values=(1,), grad=False)),
        also=[F.cosine_embedding_loss],
        most=60,
    ),
    case(
        "",
        A(X((5, 3)), X((5, 3)), X((5, 3))),
        A(X((4, 3)), X((4, 3)), X((4, 3)), 2.0, swap=True, reduction="none"),
        A(X((4, 3)), X((4, 3)), X((4, 3)), reduction="sum"),
        also=[F.triplet_margin_loss],
        most=60,
    ),
    case(
        "",
        A(X((5, 3)), ints((5,), 0, 3)),
        A(X((4, 3)), ints((4,), 0, 3), weight=X((3,), 0.5, 2, grad=False), reduction="none"),
        A(X((3,)), ints((), 0, 3)),
        also=[F.multi_margin_loss],
        most=60,
    ),
    case(
        "",
        A(X((2, 3)), X((2, 3), dtype=torch.int64, values=(2, -1, 0, 1, 0, -1))),
        A(X((2, 3)), X((2, 3), dtype=torch.int64, values=(2, -1, 0, 1, 0, -1)), reduction="none"),
        also=[F.multilabel_margin_loss],
    ),
    case(
        "",
        A(_LOGS, ints((3, 2), 1, 4), (5, 4, 5), (2, 1, 0)),
        A(_LOGS, ints((3, 2), 1, 4), ints((3,), 4, 6), ints((3,), 1, 3), reduction="none"),
        A(_LOGS, ints((3, 2), 1, 4), ints((3,), 4, 6), ints((3,), 1, 3), 0, "sum", True),
        also=[F.ctc_loss],
        most=40,
    ),
]
