"""Cases of the functions that work element by element."""

from __future__ import annotations

import torch

from tests.ranks.brute import A, Case, X, bools, case, ints

SHAPES = ((4, 6), (5, 2), (1, 7))


def over(low: float, high: float, *args: object, **kwargs: object) -> list[A]:
    """One tensor in a range, in each of the shapes."""
    return [A(X(shape, low, high), *args, **kwargs) for shape in SHAPES]


def each(names: str, low: float, high: float, *args: object) -> list[Case]:
    """A case for each name."""
    return [case(name, *over(low, high, *args)) for name in names.split()]


UNARY = [
    *each("acos arccos arcsin asin erfinv atanh", -0.9, 0.9),
    *each("acosh", 1.1, 3),
    *each("lgamma log log10 log2 rsqrt sqrt digamma entr reciprocal", 0.1, 3),
    *each("log1p", -0.9, 3),
    *each("logit ndtri", 0.1, 0.9),
    case("mvlgamma", *over(3, 5, 2)),
    case("polygamma", A(1, X((5, 2), 0.5, 3)), A(X((5, 2), 0.5, 3), 1)),
    *each(
        """
        abs absolute angle arctan asinh atan ceil cos cosh deg2rad erf erfc exp exp2 expm1 fix
        floor frac isfinite isinf isnan isneginf isposinf isreal nan_to_num rad2deg round sgn sigmoid sign
        signbit sin sinc sinh square tan tanh trunc logical_not i0 expit log_ndtr ndtr relu relu6 elu selu
        celu gelu silu mish hardtanh hardsigmoid hardswish hardshrink softshrink tanhshrink softsign softplus
        logsigmoid leaky_relu bool int long short byte char
        """,
        -2,
        2,
    ),
    case("gammaln psi", A(X((5, 2), 0.5, 3)), most=6),
    case("multigammaln", A(X((5, 2), 3, 5), 2), most=6),
    case(
        """
        i0e i1 i1e erfcx airy_ai bessel_j0 bessel_j1 bessel_y0 bessel_y1 modified_bessel_i0 modified_bessel_i1
        modified_bessel_k0 modified_bessel_k1 scaled_modified_bessel_k0 scaled_modified_bessel_k1
        spherical_bessel_j0
        """,
        A(X((5, 2), 0.1, 3)),
        most=4,
    ),
    case("frexp", *over(-2, 2)),
    case("bitwise_not invert", A(ints((5, 2), -4, 5)), A(bools((4, 6)))),
    case("threshold", *over(-2, 2, 0.1, 7.0)),
    case("clamp clip", *over(-2, 2, -0.5, 0.7), A(X((5, 2)), X((5, 2)), X((2,)))),
    case("clamp_min clamp_max", *over(-2, 2, 0.3), A(X((5, 2)), X((5, 2)))),
    case("gelu", *[A(X(s), approximate="tanh") for s in SHAPES]),
    case("zeros_like ones_like", *over(-2, 2), A(ints((5, 2), 0, 3), dtype=torch.float64)),
    case("full_like", *over(-2, 2, 3.5)),
    case("empty_like", *over(-2, 2), shape_only=True),
    case("prelu", A(X((4, 6)), X((6,))), A(X((5, 2)), X((1,))), A(X((3, 5, 2)), X((5,)))),
]

_TWO = (
    A(X((4, 6)), X((4, 6))),
    A(X((5, 2)), X((2,))),
    A(X((5, 1)), X((2, 1, 7))),
    A(X((5, 2)), X(())),
    A(X((5, 2)), 0.75),
)
_INTS = (
    A(ints((4, 6), 0, 8), ints((4, 6), 0, 3)),
    A(ints((5, 2), 0, 8), ints((2,), 0, 3)),
    A(ints((5, 2), 0, 8), 2),
)
_BOOLS = (A(bools((4, 6)), bools((4, 6))), A(bools((5, 2)), bools((2,))))


def _two(low: float, high: float) -> tuple[A, ...]:
    """Two tensors of which the second keeps off zero."""
    return (
        A(X((4, 6)), X((4, 6), low, high)),
        A(X((5, 2)), X((2,), low, high)),
        A(X((5, 2)), X((), low, high)),
        A(X((5, 2)), 1.5),
    )


BINARY = [
    case(
        "pow float_power",
        A(X((4, 6), 0.1, 2), X((4, 6))),
        A(X((5, 2), 0.1, 2), X((2,))),
        A(X((5, 2), 0.1, 2), 2),
        A(2, X((5, 2))),
    ),
    *[case(n, *_TWO) for n in ["maximum", "minimum", "fmax", "fmin", "logaddexp", "logaddexp2", "isclose"]],
    *[
        case(n, *_TWO)
        for n in [
            "eq",
            "ne",
            "lt",
            "le",
            "gt",
            "ge",
            "greater",
            "greater_equal",
            "less",
            "less_equal",
            "not_equal",
        ]
    ],
    *[
        case(n, *_two(0.5, 2))
        for n in ["atan2", "fmod", "remainder", "floor_divide", "hypot", "copysign", "mod", "floordiv"]
    ],
    case(
        "nextafter",
        A(X((4, 6), grad=False), X((4, 6), grad=False)),
        A(X((5, 2), grad=False), X((2,), grad=False)),
    ),
    case("xlogy", *_two(0.5, 2)),
    case(
        "heaviside",
        A(X((4, 6), grad=False), X((4, 6), grad=False)),
        A(X((5, 2), grad=False), X((2,), grad=False)),
    ),
    case("ldexp", A(X((4, 6)), ints((4, 6), 0, 4)), A(X((5, 2)), ints((2,), 0, 4))),
    *[case(n, *_BOOLS, _TWO[0]) for n in ["logical_and", "logical_or", "logical_xor"]],
    *[case(n, *_INTS, *_BOOLS) for n in ["bitwise_and", "bitwise_or", "bitwise_xor", "and", "or", "xor"]],
    *[case(n, *_INTS) for n in ["bitwise_left_shift", "bitwise_right_shift", "lshift", "rshift"]],
    case("gcd lcm", A(ints((5, 2), 1, 8), ints((2,), 1, 8)), most=6),
    case("igamma igammac gammainc gammaincc", A(X((5, 2), 0.5, 3, grad=False), X((2,), 0.5, 3)), most=6),
    case("xlog1py zeta arctan2", A(X((5, 2), 1.5, 3, grad=False), X((2,), 0.5, 3)), most=6),
    case("", A(X((5, 2), 0.5, 3), X((2,))), also=[torch.polar], most=6),
    case(
        """
        chebyshev_polynomial_t chebyshev_polynomial_u chebyshev_polynomial_v chebyshev_polynomial_w
        hermite_polynomial_h hermite_polynomial_he laguerre_polynomial_l legendre_polynomial_p
        shifted_chebyshev_polynomial_t shifted_chebyshev_polynomial_u shifted_chebyshev_polynomial_v
        shifted_chebyshev_polynomial_w
        """,
        A(X((5, 2), 0.1, 0.9, grad=False), ints((2,), 0, 4)),
        most=4,
    ),
]

LINEAR = [
    case(
        "neg negative positive clone contiguous detach resolve_conj resolve_neg "
        "float double half bfloat16 cpu",
        *over(-2, 2),
    ),
    case(
        "to",
        A(X((5, 2)), torch.float32),
        A(X((5, 2)), torch.int64),
        A(X((5, 2)), torch.bool),
        A(X((5, 2)), "cpu"),
        A(X((5, 2)), "cpu", torch.float32),
        A(X((5, 2)), dtype=torch.float32),
        A(X((5, 2)), X((3,), grad=False)),
        A(X((5, 2)), dtype=torch.int32),
        A(X((5, 2)), torch.float64),
        A(X((5, 2)), torch.float64, False, True),
        A(X((5, 2)), ints((3,), 0, 2)),
    ),
    case(
        "type",
        A(X((5, 2)), torch.float32),
        A(X((5, 2)), torch.int64),
        A(X((5, 2)), "torch.LongTensor"),
        A(X((5, 2))),
    ),
    case("type_as", A(X((5, 2)), ints((3,), 0, 2)), A(X((5, 2)), X((3, 4), dtype=torch.float32, grad=False))),
    case(
        "add sub subtract",
        A(X((5, 2)), 0),
        A(X((5, 2)), 0.0),
        *_TWO,
        A(X((4, 6)), X((5, 1, 6)), alpha=3),
        A(X((4, 6)), X((4, 6)), alpha=3),
    ),
    case("conj conj_physical", *over(-2, 2), A(X((5, 2), dtype=torch.complex128)), most=8),
    case("complex", A(X((5, 2)), X((2,))), A(X((4, 6)), X((4, 6))), most=20),
    case("view_as_real", A(X((5, 2), dtype=torch.complex128)), A(X((4,), dtype=torch.complex128))),
    case("view_as_complex", A(X((5, 2))), A(X((4, 3, 2)))),
    case("view_as_real_copy", A(X((5, 2), dtype=torch.complex128)), most=4),
    case("view_as_complex_copy", A(X((5, 2))), most=4),
    case(
        "real imag",
        A(X((5, 2), dtype=torch.complex128)),
        also=[torch.Tensor.real.__get__, torch.Tensor.imag.__get__],  # type: ignore[attr-defined]
    ),
    case("rsub", *_TWO),
    case("mul multiply", *_TWO),
    case(
        "div divide true_divide truediv", *_two(0.5, 2), A(X((5, 2)), X((2,), 0.5, 2), rounding_mode="floor")
    ),
    case("", *_two(0.5, 2), also=[torch.Tensor.__idiv__]),
    case("", A(X((5, 2), 0.5, 2), 1.5), also=[torch.Tensor.__rdiv__]),
    case(
        "where",
        A(bools((4, 6)), X((4, 6)), X((4, 6))),
        A(bools((5, 1)), X((2,)), X((5, 2))),
        A(bools((5, 2)), X((5, 2)), 0.0),
        A(bools((5, 2)), 1.0, X((5, 2))),
        A(bools((5, 2)), 1.0, 2.0),
        A(X((5, 2)), bools((5, 2)), X((5, 2))),
        A(X((5, 1)), bools(()), X((5, 6))),
        A(X((5, 2)), bools((5, 2)), 0.0),
    ),
    case(
        "masked_fill",
        A(X((4, 6)), bools((4, 6)), -1.5),
        A(X((5, 2)), bools((5, 1)), 0.0),
        A(X((5, 2)), bools((2,)), X(())),
    ),
    case("addcmul", A(X((4, 6)), X((4, 6)), X((4, 6))), A(X((5, 2)), X((5, 1)), X((2,)), value=3)),
    case(
        "addcdiv",
        A(X((4, 6)), X((4, 6)), X((4, 6), 0.5, 2)),
        A(X((5, 2)), X((5, 1)), X((2,), 0.5, 2), value=3),
    ),
    case("lerp", A(X((4, 6)), X((4, 6)), 0.25), A(X((5, 2)), X((2,)), X((5, 2)))),
    case(
        "",
        A(X((4, 6)), X((4, 6))),
        A(X((5, 2)), X((2,))),
        A(X((5, 2)), 1.5),
        A(X((5, 2)), ints((5, 2), 0, 3)),
        also=[torch.Tensor.copy_],
    ),
    case(
        "", A(X((4, 1)), X((6,))), A(X((5, 2)), X((1, 2)), X(())), also=[torch.functional.broadcast_tensors]
    ),
    case("zero_", *over(-2, 2)),
    case("fill_", *over(-2, 2, 3.5), A(X((5, 2)), X(()))),
]
