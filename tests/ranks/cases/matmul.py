"""Cases of products, normalisations and attention."""

from __future__ import annotations

import torch

from tests.ranks.brute import A, X, case, ints

CASES = [
    case(
        "linear",
        A(X((4, 6)), X((2, 6))),
        A(X((5, 3)), X((7, 3)), X((7,))),
        A(X((2, 5, 4)), X((3, 4)), bias=X((3,))),
        A(input=X((5, 3)), weight=X((7, 3))),
        A(X((5,)), X((3, 5))),
        A(X((5, 3)), X((3,))),
    ),
    case(
        "matmul",
        A(X((4, 6)), X((6, 2))),
        A(X((5, 3)), X((3, 7))),
        A(X((5,)), X((5,))),
        A(X((5,)), X((5, 2))),
        A(X((2, 5)), X((5,))),
        A(X((3, 2, 5)), X((5, 4))),
        A(X((3, 1, 2, 5)), X((2, 5, 2))),
        A(X((5,)), X((3, 5, 2))),
    ),
    case("mm", A(X((4, 6)), X((6, 2))), A(X((5, 3)), X((3, 7)))),
    case("bmm", A(X((4, 2, 6)), X((4, 6, 2))), A(X((5, 2, 3)), X((5, 3, 1)))),
    case("mv", A(X((4, 6)), X((6,))), A(X((5, 2)), X((2,)))),
    case("dot vdot", A(X((6,)), X((6,))), A(X((5,)), X((5,))), A(X((1,)), X((1,)))),
    case("", A(X((5, 2)), X((3, 5))), also=[torch.Tensor.__rmatmul__]),
    case(
        "addmm",
        A(X((4, 2)), X((4, 6)), X((6, 2))),
        A(X((7,)), X((5, 3)), X((3, 7)), beta=2, alpha=3),
        A(X(()), X((5, 3)), X((3, 2))),
    ),
    case("baddbmm", A(X((5, 2, 1)), X((5, 2, 3)), X((5, 3, 1))), A(X((4, 1)), X((2, 4, 3)), X((2, 3, 4)))),
    case("outer ger", A(X((4,)), X((6,))), A(X((5,)), X((2,)))),
    case(
        "einsum",
        A("ij,jk->ik", X((4, 6)), X((6, 2))),
        A("bij,bjk->bik", X((5, 2, 3)), X((5, 3, 2))),
        A("ij->j", X((5, 2))),
        A("ij,jk", X((5, 3)), X((3, 2))),
        A("ij->", X((5, 2))),
        A("i,j->ij", X((5,)), X((2,))),
        A("bhqd,bhkd->bhqk", X((2, 3, 2, 4)), X((2, 3, 5, 4))),
        A("ij,ij->i", X((5, 1)), X((5, 2))),
        A("ij,jk,kl->il", X((4, 2)), X((2, 3)), X((3, 5))),
        A("...d,...d->...", X((5, 2, 4)), X((5, 2, 4))),
        A("b...c,cd->b...d", X((4, 2, 6)), X((6, 2))),
        A("i...,...j->...", X((4, 3)), X((5, 3, 2))),
        A("...ij,...j", X((4, 1, 2, 3)), X((5, 3))),
        A("b...,k->k", X((4, 3, 2)), X((2,))),
        also=[torch.functional.einsum],
    ),
    case(
        "embedding",
        A(ints((5, 2), 0, 7), X((7, 3))),
        A(ints((4,), 0, 6), X((6, 4))),
        A(ints((4,), 0, 2), X((2, 5))),
        A(ints((4, 3), 0, 7), X((7, 7)), 2),
        A(ints((7,), 0, 7), X((7, 2)), padding_idx=-1),
        A(ints((7, 7), 0, 7), X((7, 7))),
        A(ints((), 0, 7), X((7, 2))),
        A(weight=X((7, 3)), input=ints((5, 2), 0, 7)),
        A(X((7, 3)), ints((5, 2), 0, 7)),
        A(X((7, 7)), ints((7, 7), 0, 7)),
        A(X((7, 2)), ints((4,), 0, 7), 1),
        A(ints((5, 2), 0, 4), X((4, 3)), scale_grad_by_freq=True),
        A(X((4, 3)), ints((5, 2), 0, 4), -1, True),
        # sparse gradients, of which there are none
        A(ints((5, 2), 0, 7), X((7, 3), grad=False), sparse=True),
        A(ints((7, 7), 0, 7), X((7, 7), grad=False), 2, sparse=True),
        A(X((7, 2), grad=False), ints((4,), 0, 7), 1, sparse=True),
    ),
    case(
        "",
        A(ints((5, 2), 0, 7), X((7, 3))),
        A(ints((4, 3), 0, 6), X((6, 4)), mode="max"),
        A(ints((4, 3), 0, 6), X((6, 4)), mode="sum", per_sample_weights=X((4, 3)), padding_idx=2),
        A(ints((4, 3), 0, 6), X((6, 4), grad=False), mode="sum", sparse=True),
        also=[torch.nn.functional.embedding_bag],
        most=40,
    ),
    case(
        "",
        A(X((7, 3), grad=False), ints((6,), 0, 7), ints((2,), 0, 1)),
        A(X((7, 3), grad=False), ints((6,), 0, 7), ints((2,), 0, 1), False, 0, True),
        also=[torch.embedding_bag],
        gathers=True,
        most=20,
    ),
    case(
        "",
        A(X((7, 3), grad=False), ints((5, 2), 0, 7), 0.5, 2.0),
        also=[torch.embedding_renorm_],
        gathers_in_place=True,
    ),
]

_QKV = (X((2, 4, 3, 5)), X((2, 4, 3, 5)), X((2, 4, 3, 5)))
ATTENTION = [
    case(
        "scaled_dot_product_attention",
        A(*_QKV),
        A(X((1, 2, 5, 3)), X((1, 2, 4, 3)), X((1, 2, 4, 2)), scale=0.5),
        A(*_QKV, is_causal=True),
        A(X((1, 4, 3, 2)), X((1, 2, 3, 2)), X((1, 2, 3, 2)), enable_gqa=True),
        A(X((1, 6, 3, 2)), X((1, 3, 3, 2)), X((1, 3, 3, 2)), enable_gqa=True, is_causal=True),
        most=40,
    ),
    case("scaled_dot_product_attention", A(X((3, 3, 2)), X((3, 4, 2)), X((3, 4, 2)))),
    # dims that are broadcast: one head of keys and values for all queries, one batch, fewer dims
    case(
        "scaled_dot_product_attention",
        A(X((2, 4, 3, 2)), X((2, 1, 5, 2)), X((2, 1, 5, 3))),
        A(X((2, 4, 3, 2)), X((2, 1, 3, 2)), X((2, 1, 3, 2)), enable_gqa=True, is_causal=True),
        A(X((2, 1, 3, 2)), X((1, 4, 3, 2)), X((2, 4, 3, 2)), is_causal=True),
        A(X((4, 3, 2)), X((2, 1, 5, 2)), X((2, 4, 5, 2)), X((4, 3, 5))),
        most=40,
    ),
    case(
        "scaled_dot_product_attention",
        A(X((2, 3, 2)), X((2, 3, 2)), X((2, 3, 2)), X((2, 3, 3))),
        A(
            X((2, 3, 2)),
            X((2, 3, 2)),
            X((2, 3, 2)),
            attn_mask=X((2, 3, 3), 0, 2, torch.bool, values=(True, False, True) * 6),
        ),
        A(X((1, 2, 3, 2)), X((1, 2, 3, 2)), X((1, 2, 3, 2)), attn_mask=X((3, 3), -1, 1, grad=False)),
        A(X((4, 2, 3, 2)), X((4, 2, 3, 2)), X((4, 2, 3, 2)), attn_mask=X((3, 3), -1, 1)),
        most=40,
    ),
]
