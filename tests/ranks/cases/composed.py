"""Cases of functions put together from others."""

from __future__ import annotations

import torch

from tests.ranks.brute import A, X, bools, case, ints

_PAIR = A([X((4, 6)), X((4, 6))])
_ALL = (X((4, 6)), X((5, 2)))

SHAPED = [
    case(
        "atleast_1d atleast_2d atleast_3d", A(X(())), A(X((5,))), A(X((5, 2))), A(X((5,)), X((2, 3))), most=4
    ),
    case(
        "hstack vstack row_stack dstack column_stack",
        _PAIR,
        A([X((5,)), X((5,))]),
        A((X(()), X(()))),
        A([X((5, 1)), X((5, 1))]),
        most=6,
    ),
    case("hsplit", A(X((4, 6)), 2), A(X((5,)), (1, 3)), A(X((4, 6)), 1, 3), most=6),
    case("vsplit", A(X((4, 6)), 2), A(X((5, 2)), (1, 3)), most=6),
    case("dsplit", A(X((2, 3, 6)), 3), A(X((1, 2, 5)), (1, 3)), most=6),
    case("fliplr flipud", A(X((5, 2))), A(X((2, 5, 3))), most=4),
    case("rot90", *[A(X((5, 2)), k) for k in range(4)], A(X((2, 5, 3)), 1, (2, 0)), most=4),
    case("tile", A(X((5, 2)), (2,)), A(X((5, 2)), (3, 1, 1)), A(X((5, 2)), 2, 1), most=4),
    case("adjoint", A(X((5, 2))), A(X((2, 5, 3), dtype=torch.complex128)), most=4),
    case(
        "",
        A(X((5, 2))),
        A(X((5, 2), dtype=torch.complex128)),
        most=4,
        also=[torch.Tensor.H.__get__, torch.Tensor.mH.__get__],
    ),  # type: ignore[attr-defined]
    case("kron", A(X((5, 2)), X((2, 3))), A(X((5,)), X((2, 3))), A(X(()), X(())), most=20),
    case("block_diag", A(X((5, 2)), X((2, 3))), A(X((3,)), X(()), X((2, 2))), most=20),
    case("cartesian_prod", A(X((5,)), X((3,))), A(X((5,))), most=8),
    case("combinations", A(X((5,))), A(X((4,)), 3, True), most=4),
    case(
        "meshgrid", A(X((5,)), X((3,)), indexing="ij"), A([X((5,)), X((2,)), X(())], indexing="xy"), most=40
    ),
    case("select_scatter", A(X((5, 2)), X((2,)), 0, 3), A(X((4, 6)), X((4,)), -1, 0), most=12),
    case(
        "slice_scatter", A(X((5, 2)), X((2, 2)), 0, 1, 4, 2), A(X((4, 6)), X((4, 3)), dim=1, start=3), most=12
    ),
    case("diagonal_scatter", A(X((5, 2)), X((2,))), A(X((2, 5, 3)), X((5, 2)), 0, 2, 0), most=12),
    case("sum_to_size", A(X((5, 2)), 1, 2), A(X((2, 5, 3)), (5, 1)), A(X((5, 2)), 5, 2), most=6),
    case("diagonal", A(X((5, 2))), A(X((2, 5, 3)), 1, 0, 2), A(X((4, 3)), -1), most=12),
    case("diagonal_copy", A(X((2, 5, 3)), 1, 0, 2), most=4),
    case("diag_embed", A(X((5, 2))), A(X((5, 2)), 1, 0, 2), A(X((4,)), -1)),
    case("diag diagflat", A(X((5,))), A(X((5, 2)), 1), A(X((4,)), -1), most=6),
    case("glu", A(X((4, 6))), A(X((4, 5)), 0), A(X((2, 5)), dim=0), most=8),
    case("fill", A(X((5, 2)), 1.5), A(X((5, 2)), X(())), most=8),
]

NUMERIC = [
    case("dist", A(X((5, 2)), X((5, 2))), A(X((4, 6)), X((6,)), 1), most=12),
    case(
        "diff",
        A(X((4, 6))),
        A(X((5, 2)), 2, 0),
        A(X((5, 2)), dim=0, prepend=X((1, 2)), append=X((2, 2))),
        A(bools((5, 2)), dim=0),
        A(X((5, 2)), 3),
        most=12,
    ),
    case(
        "trapezoid trapz",
        A(X((4, 6))),
        A(X((5, 2)), dx=0.5, dim=0),
        A(X((5, 2)), X((5,)), dim=0),
        A(X((5, 2)), X((5, 2)), dim=0),
        most=8,
    ),
    case(
        "cumulative_trapezoid",
        A(X((4, 6))),
        A(X((5, 2)), dx=0.5, dim=0),
        A(X((5, 2)), X((5,)), dim=0),
        most=8,
    ),
    case("renorm", A(X((5, 2)), 2, 0, 1.5), A(X((4, 6)), 1, 1, 3.0), most=8),
    case(
        "cov",
        A(X((4, 6))),
        A(X((5,))),
        A(X((3, 5)), correction=0, fweights=ints((5,), 1, 4)),
        A(X((3, 5)), aweights=X((5,), 0.5, 2, grad=False), fweights=ints((5,), 1, 4)),
        most=8,
    ),
    case("corrcoef", A(X((4, 6))), A(X((3, 5), dtype=torch.complex128)), most=6),
    case(
        "var_mean std_mean",
        A(X((4, 6))),
        A(X((5, 2)), 0),
        A(X((5, 2)), False),
        A(X((4, 6)), 1, False, True),
        A(X((4, 6)), dim=(0, 1), correction=2, keepdim=True),
        most=6,
    ),
    case("aminmax", A(X((4, 6))), A(X((5, 2)), dim=0), A(X((5, 2)), dim=1, keepdim=True), most=6),
    case(
        "nansum nanmean",
        A(X((4, 6))),
        A(X((5, 2)), 0),
        A(X((2, 5, 3)), (0, 2), True),
        A(X((2, 2), values=(1.0, float("nan"), 3.0, float("nan"))), 1),
        most=8,
    ),
    case("msort", A(X((5, 2))), most=4),
    case("is_nonzero", A(X((1, 1))), A(ints((1,), 0, 1)), most=6),
    case("allclose equal", A(X((5, 2)), X((5, 2))), A(ints((4, 6), 0, 1), ints((4, 6), 0, 1)), most=6),
    case("pairwise_distance", A(X((5, 3)), X((5, 3))), A(X((5, 2)), X((2,)), 1.0, keepdim=True), most=12),
    case(
        "cosine_similarity",
        A(X((5, 3)), X((5, 3))),
        A(X((5, 2)), X((1, 2)), 0),
        A(X((2, 5, 3)), X((2, 5, 3)), dim=1),
        A(X((2, 2), values=(0.0, 0.0, 0.25, 0.0)), X((2, 2)), eps=1.0),
        most=12,
    ),
    case(
        "",
        A(X((5, 3)), X((5, 1), 0.5, 2)),
        A(X((4, 6)), X((1, 6), 0.5, 2), 1),
        A(X((5, 2)), X((), 0.5, 2), -1),
        A(X((2, 3, 4)), X((2, 1, 1), 0.5, 2), 0),
        most=12,
        also=[torch._weight_norm],
    ),
    case("norm_except_dim", A(X((5, 3))), A(X((4, 6)), 2, 1), A(X((5, 2)), 2, -1), most=6),
    case(
        "bincount",
        A(ints((5,), 0, 4)),
        A(ints((7,), 0, 4), X((7,), grad=False), 6),
        A(ints((5,), 0, 3), ints((5,), 0, 3)),
        most=8,
    ),
]

ORDER = [
    case("median nanmedian", A(X((4, 6))), A(X((5, 2)), 0), A(X((5, 3)), -1, True), most=6),
    case("mode", A(ints((4, 6), 0, 3)), A(X((5, 2)), 0), A(ints((5, 3), 0, 3), -1, True), most=6),
    case("kthvalue", A(X((4, 6)), 2), A(X((5, 2)), 3, 0), A(X((5, 3)), k=1, dim=0, keepdim=True), most=6),
    case(
        "quantile nanquantile",
        A(X((4, 6)), 0.25),
        A(X((5, 2)), X((3,), 0.1, 0.9, grad=False), 0),
        A(X((5, 2)), 0.5, 1, True, interpolation="nearest"),
        most=6,
    ),
    case(
        "searchsorted",
        A(X((5,), values=(-1.0, 0.0, 0.5, 1.0, 1.5), grad=False), X((4, 6), grad=False)),
        A(X((2, 3), values=(-1.0, 0.0, 1.0, -0.5, 0.5, 1.5), grad=False), X((2, 5), grad=False), right=True),
        A(X((3,), values=(-1.0, 0.0, 1.0), grad=False), 0.25),
        most=12,
    ),
    case(
        "bucketize",
        A(X((4, 6), grad=False), X((3,), values=(-1.0, 0.0, 1.0), grad=False)),
        A(X((5, 2), grad=False), X((1,), grad=False), right=True),
        most=12,
    ),
    case("isin", A(ints((5, 2), 0, 5), ints((3,), 0, 5)), A(ints((4, 6), 0, 5), 3, invert=True), most=12),
    case(
        "histc",
        A(X((4, 6), grad=False), 4, -1, 1),
        A(X((5, 2), grad=False), 3),
        A(X((5,), grad=False), 5, -1.0, 1.5),
        most=8,
    ),
    case(
        "gradient",
        A(X((4, 6))),
        A(X((5, 2, 3)), dim=0),
        A(X((5, 3)), spacing=0.5, dim=(0, 1)),
        A(X((5, 3)), spacing=(X((5,), values=(0.0, 1.0, 3.0, 4.0, 6.0), grad=False),), dim=0),
        most=6,
    ),
    case(
        "cdist",
        A(X((4, 2)), X((3, 2))),
        A(X((2, 5, 3)), X((2, 4, 3)), 1.0),
        A(X((1, 4, 2)), X((3, 5, 2))),
        most=12,
    ),
]
