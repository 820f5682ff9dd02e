"""Cases of views, reshapes, and of joining and cutting."""

from __future__ import annotations

import torch

from tests.ranks.brute import A, X, case, ints

CASES = [
    case(
        "view reshape",
        A(X((4, 6)), 24),
        A(X((4, 6)), 2, 2, 6),
        A(X((5, 6)), (5, 2, 3)),
        A(X((6, 5)), 3, -1),
        A(X((2, 6, 5)), (12, 5)),
        A(X((5, 4)), (20,)),
        A(X((12,)), (4, 3)),
        A(X((7,)), (1, 7, 1)),
        A(X((1, 7, 1)), (7,)),
        A(X((4, 6)), (6, 4)),
        A(X((1,)), ()),
        A(X(()), (1, 1)),
        A(X((0, 3)), (3, 0)),
        A(X((2, 3, 4)), 2, -1),
        A(X((2, 3, 4)), -1, 4),
        A(X((6, 2)), (2, 3, 2)),
    ),
    case(
        "view_as reshape_as",
        A(X((4, 6)), X((2, 12), grad=False)),
        A(X((5, 2)), ints((10,), 0, 3)),
        A(X((5, 6)), X((5, 2, 3), grad=False)),
    ),
    case(
        "flatten",
        A(X((4, 6))),
        A(X((2, 5, 3)), 1),
        A(X((5, 2, 3)), 0, 1),
        A(X(())),
        A(X((5, 2)), start_dim=0),
    ),
    case("ravel", A(X((4, 6))), A(X((5, 2)))),
    case(
        "unflatten",
        A(X((4, 6)), 1, (2, 3)),
        A(X((6, 5)), 0, (-1, 3)),
        A(X((5, 2)), -1, (2, 1)),
        A(X((12,)), 0, (4, 3)),
    ),
    case("transpose swapaxes swapdims", A(X((4, 6)), 0, 1), A(X((2, 5, 3)), -1, 0)),
    case(
        "permute",
        A(X((4, 6)), (1, 0)),
        A(X((2, 5, 3)), (2, 0, -2)),
        A(X((2, 5, 3)), 2, 0, 1),
        A(X((2, 5)), dims=(1, 0)),
    ),
    case("movedim moveaxis", A(X((2, 5, 3)), 0, 2), A(X((2, 5, 3)), (0, 1), (-1, 0))),
    case("t", A(X((4, 6))), A(X((5,)))),
    case("", A(X((4, 6))), A(X((5, 2))), also=[torch.Tensor.T.__get__]),  # type: ignore[attr-defined]
    case("", A(X((4, 6))), A(X((2, 5, 3))), also=[torch.Tensor.mT.__get__]),  # type: ignore[attr-defined]
    case("unsqueeze", A(X((4, 6)), 0), A(X((5, 2)), -1), A(X(()), 0)),
    case(
        "squeeze",
        A(X((4, 1, 6))),
        A(X((1, 5, 2)), 0),
        A(X((2, 1)), -1),
        A(X((5, 2)), 1),
        A(X((1, 3, 1)), (0, 2)),
        A(X((3, 1)), dim=1),
        A(X((2, 3))),
    ),
    case(
        "expand",
        A(X((4, 1)), 4, 6),
        A(X((5, 1)), (2, 5, 3)),
        A(X((5, 2)), -1, 2),
        A(X((2,)), 5, -1),
        A(X(()), 3),
        A(X((1, 1)), 4, -1),
        A(X((5, 1)), size=(5, 3)),
    ),
    case("expand_as", A(X((4, 1)), X((4, 6), grad=False)), A(X((2,)), X((5, 2), grad=False))),
    case("broadcast_to", A(X((4, 1)), (4, 6)), A(X((5, 2)), (3, 5, 2))),
    case("repeat", A(X((4, 6)), 1, 2), A(X((5, 2)), (3, 1, 1)), A(X((5, 2)), 2, 1)),
    case("repeat_interleave", A(X((4, 6)), 3, 1), A(X((5, 2)), 2, 0), A(X((5, 2)), repeats=2, dim=-1)),
    case(
        "flip",
        A(X((4, 6)), (0,)),
        A(X((5, 2)), (0, 1)),
        A(X((5, 2)), [1]),
        A(X((5, 2)), 0),
        A(X((5, 2)), dims=(1,)),
    ),
    case("roll", A(X((4, 6)), 1), A(X((5, 2)), 2, 0), A(X((5, 2)), (1, 1), (0, 1))),
    case(
        "pad",
        A(X((4, 6)), (1, 2)),
        A(X((5, 2)), [0, 0, 1, 1], "constant", 3.0),
        A(X((2, 3, 4)), (1, 1), mode="reflect"),
    ),
]

JOINING = [
    case(
        "cat concat concatenate",
        A([X((4, 6)), X((4, 6))]),
        A([X((5, 2)), X((3, 2)), X((1, 2))], 0),
        A((X((5, 2)), X((5, 3))), dim=-1),
        A(tensors=[X((5, 2)), X((5, 1))], dim=1),
    ),
    case("stack", A([X((4, 6)), X((4, 6))]), A((X((5, 2)), X((5, 2))), -1), A([X(()), X(())])),
    case(
        "split",
        A(X((4, 6)), 2),
        A(X((5, 2)), 2, 0),
        A(X((5, 7)), [3, 4], 1),
        A(X((5, 7)), 3, dim=-1),
        A(X((5, 2)), split_size_or_sections=2),
    ),
    case("split_with_sizes", A(X((4, 6)), [1, 3]), A(X((5, 7)), (3, 4), 1)),
    case("chunk", A(X((4, 6)), 2), A(X((5, 2)), 3, 0), A(X((5, 7)), 3, -1)),
    case("tensor_split", A(X((4, 6)), 2), A(X((5, 7)), 3, 1), A(X((5, 2)), (1, 3))),
    case("unbind", A(X((4, 6))), A(X((5, 2)), -1), A(X((2, 5, 3)), dim=1)),
]
