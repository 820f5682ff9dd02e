"""Cases of convolutions."""

from __future__ import annotations

from tests.ranks.brute import A, X, case

CASES = [
    case(
        "conv1d",
        A(X((4, 6, 5)), X((2, 6, 3)), X((2,))),
        A(X((5, 3, 6)), X((7, 3, 2)), None, 2, 1),
        A(X((2, 4, 6)), X((4, 2, 3)), X((4,)), groups=2),
        A(X((2, 6, 9)), X((3, 2, 3)), None, 2, 2, 2, 3),
        A(X((1, 2, 5)), X((2, 2, 4)), padding="same", dilation=2),
        A(X((1, 2, 3)), X((2, 2, 5)), padding=2),
        A(X((2, 7)), X((3, 2, 3)), X((3,)), padding="valid"),
        A(X((1, 1, 7)), X((1, 1, 1)), stride=3, padding=2),
        most=60,
    ),
    case(
        "conv2d",
        A(X((2, 3, 5, 4)), X((5, 3, 2, 2)), X((5,))),
        A(X((2, 3, 4, 4)), X((2, 3, 2, 3)), stride=(2, 1), padding=(1, 2)),
        A(X((2, 4, 3, 5)), X((4, 1, 3, 3)), X((4,)), padding="same", groups=4),
        most=60,
    ),
    case("conv3d", A(X((2, 3, 4, 3, 3)), X((2, 3, 2, 2, 2)), X((2,)), padding=1), most=40),
    case(
        "conv_transpose1d",
        A(X((4, 2, 5)), X((2, 3, 3)), X((3,))),
        A(X((2, 3, 4)), X((3, 2, 2)), None, 3, 1, 1),
        A(X((2, 4, 3)), X((4, 1, 3)), X((2,)), 2, groups=2, dilation=2),
        A(X((2, 5)), X((2, 2, 1)), stride=4, output_padding=3),
        most=60,
    ),
    case(
        "conv_transpose2d",
        A(X((2, 3, 3, 4)), X((3, 2, 3, 2)), X((2,)), stride=2, padding=1, output_padding=1),
        most=60,
    ),
    case("conv_transpose3d", A(X((1, 2, 3, 2, 3)), X((2, 2, 2, 2, 2)), X((2,))), most=30),
]
