"""Cases of slices, indices, gathers and scatters."""

from __future__ import annotations

import torch

from tests.ranks.brute import A, X, bools, case, ints

_ = slice(None)
_get, _set = torch.Tensor.__getitem__, torch.Tensor.__setitem__
_SIMPLE = [
    (X((4, 6)), 1),
    (X((5, 2)), -1),
    (X((5, 2)), slice(1, 4)),
    (X((5, 2)), (_, 0)),
    (X((5, 2)), (_, None)),
    (X((5, 2)), (..., slice(0, 1))),
    (X((5, 2)), ...),
    (X((5, 2)), None),
    (X((2, 5, 3)), (slice(None, None, 2), ..., 1)),
    (X((5, 2)), (3, 1)),
    (X((4, 6)), (_, slice(0, 6))),
    (X((7,)), slice(1, None, 3)),
    (X((5, 4)), (slice(2, 3), slice(1, 3))),
    (X((5, 2)), slice(3, 3)),
    (X((5, 2)), ()),
]
_TENSORS = [
    (X((4, 6)), ints((3,), 0, 4)),
    (X((5, 2)), (_, ints((2, 3), 0, 2))),
    (X((5, 2)), (ints((4,), 0, 5), ints((4,), 0, 2))),
    (X((5, 3, 4)), (ints((4,), 0, 5), _, ints((4,), 0, 4))),
    (X((5, 3, 4)), (ints((4, 1), 0, 5), ints((2,), 0, 3))),
    (X((5, 3, 4)), (_, ints((2,), 0, 3), 1)),
    (X((5, 2)), ints((), 0, 5)),
]
_LISTS = [
    (X((5, 2)), [0, 2, 2]),
    (X((5, 2)), (_, [1, -2])),
    (X((7, 3)), (ints((2,), -7, 7), slice(0, 2))),
    (X((7, 3)), (2, ints((2,), -3, 3))),
    (X((5, 2)), []),
]
_OTHER = [
    (X((5, 2)), bools((5,))),
    (X((5, 2)), bools((5, 2))),
    (X((5, 2)), (_, bools((2,)))),
    (X((5, 2)), True),
]

CASES = [
    case("", *(A(x, i) for x, i in [*_SIMPLE, *_TENSORS, *_LISTS]), also=[_get]),
    # which elements a mask picks is not known beforehand
    case("", *(A(x, i) for x, i in _OTHER), also=[_get], gathers=True),
    case(
        "",
        *(A(x, i, 1.5) for x, i in _SIMPLE),
        A(X((5, 2)), bools((5,)), 1.5),
        A(X((5, 2)), bools((5, 2)), X(())),
        A(X((5, 2)), slice(1, 3), X((2, 2))),
        A(X((4, 6)), (_, slice(1, 3)), X((4, 2))),
        A(X((4, 6)), (_, 0), X((4,))),
        A(X((5, 2)), slice(0, 2), X((2,))),
        A(X((5, 2)), 0, X(())),
        A(X((2, 5, 3)), (_, slice(1, 5, 2), 1), X((2, 1))),
        A(X((5, 3)), (slice(1, 4), -1), X((3,))),
        A(X((5, 3)), (None, slice(1, 4), -1), X((1, 3))),
        *(A(x, i, 1.5) for x, i in [*_TENSORS, *_LISTS[:2], *_LISTS[3:]]),
        A(X((5, 2)), X((2,), dtype=torch.int64, values=(3, -1)), X((2,))),
        A(X((5, 2)), X((2,), dtype=torch.int64, values=(3, 0)), X((2, 2))),
        A(X((5, 3, 2)), ([0, 3], _, [1, 0]), X((2, 3))),
        also=[_set],
    ),
    case(
        "",
        *(A(x, i, 1.5) for x, i in [*_OTHER, _LISTS[2]]),
        also=[_set],
        gathers=True,
    ),
    case(
        "index_put",
        A(X((5, 2)), (X((2,), dtype=torch.int64, values=(3, -1)),), X((2,))),
        A(
            X((5, 2)),
            (X((2,), dtype=torch.int64, values=(3, 3)), X((2,), dtype=torch.int64, values=(1, 1))),
            X((2,)),
            True,
        ),
        A(X((4, 3)), [ints((), 0, 4)], X((3,)), accumulate=True),
        gathers_in_place=True,
        most=40,
    ),
    case(
        "index_select",
        A(X((4, 6)), 0, ints((3,), 0, 4)),
        A(X((5, 2)), -1, ints((4,), 0, 2)),
        A(X((5, 2)), dim=0, index=ints((7,), 0, 5)),
        A(X((7, 3)), 0, ints((2,), 0, 7)),
        A(X((7, 3)), 0, ints((), 0, 7)),
    ),
    case(
        "gather",
        A(X((4, 6)), 0, ints((3, 6), 0, 4)),
        A(X((5, 2)), -1, ints((5, 3), 0, 2)),
        A(X((5, 2)), 0, ints((2, 1), 0, 5)),
        A(X((7, 3)), 0, ints((2, 3), 0, 7)),
    ),
    case(
        "take_along_dim",
        A(X((5, 2)), ints((3,), 0, 10)),
        A(X((7, 3)), ints((1, 3), 0, 7), 0),
        A(X((7, 1)), ints((2, 3), 0, 7), 0),
        A(X((4, 6)), ints((3, 6), 0, 4), 0),
        A(X((5, 2)), ints((5, 1), 0, 2), dim=-1),
        A(X((7, 3)), ints((1, 3), -9, 16), 0),
    ),
    case(
        "scatter",
        A(X((4, 6)), 0, X((2, 6), dtype=torch.int64, values=(0, 1, 2, 3, 0, 1, 1, 2, 3, 0, 1, 2)), X((2, 6))),
        A(X((5, 2)), -1, X((5, 1), dtype=torch.int64, values=(0, 1, 0, 1, 1)), X((5, 1))),
        A(X((5, 2)), 0, ints((2, 1), 0, 5), 1.5),
        gathers_in_place=True,
    ),
    case(
        "scatter_add",
        A(X((4, 6)), 0, ints((3, 6), 0, 4), X((3, 6))),
        A(X((5, 2)), -1, ints((5, 3), 0, 2), X((5, 3))),
        A(X((5, 2)), 0, ints((3, 1), 0, 5), X((4, 2))),
        gathers_in_place=True,
    ),
    case(
        "scatter_reduce",
        A(X((4, 6)), 0, ints((3, 6), 0, 4), X((3, 6)), "sum"),
        A(X((5, 2)), -1, ints((5, 3), 0, 2), X((5, 3)), reduce="amax"),
        gathers_in_place=True,
    ),
    case(
        "narrow",
        A(X((4, 6)), 0, 1, 2),
        A(X((5, 2)), -1, 0, 1),
        A(X((5, 2)), 0, -2, 2),
        A(X((5, 2)), dim=0, start=1, length=3),
    ),
    case("narrow_copy", A(X((5, 2)), 0, 1, 2), most=6),
    case("select", A(X((4, 6)), 0, 1), A(X((5, 2)), -1, -1)),
    case("select_copy", A(X((5, 2)), 0, -1), most=6),
    case(
        "take",
        A(X((5, 2)), ints((3,), -10, 10)),
        A(X((7,)), ints((2, 2), 0, 7)),
        A(X(()), ints((2,), 0, 1)),
        most=20,
    ),
    case(
        "put",
        A(X((5, 2)), X((2,), dtype=torch.int64, values=(3, -1)), X((2,))),
        A(X((7,)), X((2,), dtype=torch.int64, values=(3, 3)), X((2,)), True),
        most=20,
        gathers_in_place=True,
    ),
    case(
        "index_add",
        A(X((5, 2)), 0, ints((3,), 0, 5), X((3, 2))),
        A(X((4, 6)), 1, ints((3,), 0, 6), X((4, 3)), alpha=2),
        most=60,
        gathers_in_place=True,
    ),
    case(
        "index_copy",
        A(X((5, 2)), 0, X((3,), dtype=torch.int64, values=(4, 0, 2)), X((3, 2))),
        A(X((4, 6)), -1, X((2,), dtype=torch.int64, values=(4, 0)), X((4, 2))),
        most=40,
        gathers_in_place=True,
    ),
    case(
        "index_fill",
        A(X((5, 2)), 0, ints((3,), 0, 5), 1.5),
        A(X((5, 2)), 1, ints((1,), 0, 2), X(())),
        most=40,
        gathers_in_place=True,
    ),
    case(
        "index_reduce",
        A(X((5, 2)), 0, ints((3,), 0, 5), X((3, 2)), "prod"),
        A(X((4, 6)), 1, ints((3,), 0, 6), X((4, 3)), "amax", include_self=False),
        most=40,
        gathers_in_place=True,
    ),
    case("one_hot", A(ints((4,), 0, 5), 5), A(ints((5, 2), 0, 3), num_classes=3)),
]
