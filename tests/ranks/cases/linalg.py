"""Cases of linear algebra on batches of matrices, and of Fourier transforms."""

from __future__ import annotations

import math

import torch

from tests.ranks.brute import A, X, case

# well conditioned, and symmetric: 3 on the diagonal
_EYE = tuple(3.0 if i == j else 0.25 + 0.125 * abs(i - j) for i in range(3) for j in range(3))

# torch 2.11's own gradient of a tall matrix has a 1 beside the diagonal
TALL = () if torch.func.grad(torch.trace)(torch.zeros(5, 3)).sum() > 3 else (A(X((5, 3))),)


def spd(*batch: int) -> X:
    """Positive definite 3 x 3 matrices."""
    n = math.prod(batch)
    return X((*batch, 3, 3), values=tuple(v * (1 + 0.25 * b) + 0.1 * (v > 2) for b in range(n) for v in _EYE))


def skew(*batch: int) -> X:
    """Invertible 3 x 3 matrices, not symmetric."""
    n = math.prod(batch)
    return X(
        (*batch, 3, 3),
        values=tuple(
            v + 0.25 * b + 0.2 * k * (k in (1, 5)) for b in range(n) for k, v in enumerate(_EYE)
        ),
    )  # fmt: skip


_PIVOTS = X((4, 3), dtype=torch.int32, values=(1, 2, 3, 2, 2, 3, 3, 3, 3, 1, 3, 3))
_COMPLEX = torch.complex128

BATCHED = [
    # the representative of them all
    case("inv", A(skew(4)), A(skew(5)), A(skew(2, 3)), A(skew())),
    case("inverse inv_ex det slogdet matrix_exp", A(skew(5)), most=4),
    case("logdet cholesky cholesky_ex cholesky_inverse eigh eigvalsh", A(spd(5)), most=4),
    case("cholesky_solve", A(X((5, 3, 2)), spd(5)), A(X((1, 3, 2)), spd(5)), most=12),
    case("qr svdvals pinverse", A(X((4, 4, 3))), A(X((5, 3, 3))), most=4),
    case("svd", A(X((5, 3, 2)), False), most=4),
    # from torch 2.14 on
    *[
        case("", A(spd(5)), also=[vars(torch.linalg)[name]], most=4)
        for name in ("matrix_sqrth", "polar")
        if hasattr(torch.linalg, name)
    ],
    case("pinv", A(X((5, 4, 3))), A(X((5, 3, 3)), atol=X((), 0.1, 0.2, grad=False)), most=4),
    case(
        "",
        A(X((5, 4, 3))),
        A(X((5, 3, 3)), atol=X((), 0.1, 0.2, grad=False)),
        most=4,
        also=[torch.linalg.matrix_rank],
    ),
    case("eigvals", A(X((5, 3, 3), grad=False)), A(X((2, 3, 3), grad=False, dtype=_COMPLEX)), most=4),
    case("lu_factor lu_factor_ex ldl_factor ldl_factor_ex", A(spd(5)), most=4),
    case("", A(X((5, 3, 3), grad=False)), also=[torch.linalg.eig], most=4),
    case("", A(skew(5)), A(skew(5), pivot=False), also=[torch.linalg.lu], most=4),
    case("matrix_power", A(skew(5), 3), A(skew(5), -2), most=4),
    case("", A(skew(5)), A(skew(5), 1), also=[torch.linalg.cond], most=4),
    case(
        "",
        A(skew(5), X((5, 3, 2))),
        A(skew(2, 5), X((5, 3, 1))),
        A(skew(5), X((5, 3))),
        A(skew(4), X((3,))),
        also=[torch.linalg.solve, torch.linalg.solve_ex],
        most=20,
    ),
    case(
        "",
        A(X((5, 4, 3)), X((5, 4, 2))),
        A(X((5, 3, 3), grad=False), X((5, 3, 2), grad=False), driver="gels"),
        also=[torch.linalg.lstsq],
        most=12,
    ),
    case(
        "",
        A(skew(5), X((5, 3, 2)), upper=True),
        A(skew(5), X((3, 2)), upper=False, unitriangular=True),
        also=[torch.linalg.solve_triangular],
        most=12,
    ),
    case("triangular_solve", A(X((5, 3, 2)), skew(5)), most=6),
    case(
        "",
        A(skew(4), _PIVOTS, X((4, 3, 2))),
        A(skew(4), _PIVOTS, X((1, 3, 2))),
        also=[torch.linalg.lu_solve],
        most=12,
    ),
    case("", A(X((4, 3, 2)), skew(4), _PIVOTS), also=[torch.lu_solve, torch.Tensor.lu_solve], most=6),
    case("ldl_solve", A(spd(4), _PIVOTS, X((4, 3, 2))), most=6),
    case("lu_unpack", A(skew(4), _PIVOTS), most=6),
    case("householder_product orgqr", A(X((5, 4, 3)), X((5, 3))), most=6),
    case("ormqr", A(X((5, 3, 3)), X((5, 3)), X((5, 3, 2))), most=6),
    case("geqrf", A(X((5, 4, 3))), most=4),
    case("vander", A(X((5, 3))), A(X((5, 3)), N=4), A(X((5,), grad=False)), most=4),
    case("cross", A(X((4, 3)), X((4, 3))), A(X((5, 3, 2)), X((1, 3, 2)), dim=1), most=20),
    case("vecdot", A(X((4, 6)), X((4, 6))), A(X((5, 2)), X((2,))), A(X((5, 1)), X((5, 2)), dim=0), most=20),
    case(
        "",
        A(X((4, 6)), X((6, 2)), 1),
        A(X((2, 5, 3)), X((3, 5, 2)), ([1, 2], [1, 0])),
        A(X((5, 2)), X((5, 2)), ([0], [0])),
        A(X((5, 2)), X((3,)), 0),
        also=[torch.tensordot],
        most=20,
    ),
    case("inner", A(X((4, 6)), X((6,))), A(X((2, 5)), X((3, 5))), A(X((5, 2)), X(())), most=20),
    case("trace", A(X((4, 6))), *TALL),
    case(
        "addmv",
        A(X((4,)), X((4, 6)), X((6,))),
        A(X(()), X((5, 3)), X((3,)), beta=2, alpha=3),
        most=30,
        gathers_in_place=True,
    ),
    case(
        "addr",
        A(X((4, 6)), X((4,)), X((6,))),
        A(X((3,)), X((5,)), X((3,)), beta=2, alpha=3),
        most=30,
        gathers_in_place=True,
    ),
    case(
        "addbmm",
        A(X((4, 2)), X((3, 4, 6)), X((3, 6, 2))),
        A(X((2, 2)), X((5, 2, 3)), X((5, 3, 2)), alpha=3),
        most=30,
        gathers_in_place=True,
    ),
    case(
        "bilinear",
        A(X((4, 2)), X((4, 3)), X((5, 2, 3)), X((5,))),
        A(X((2, 5, 2)), X((2, 5, 3)), X((4, 2, 3))),
        most=40,
    ),
    case(
        "matrix_norm",
        *[A(X((5, 3, 2)), o) for o in ("fro", "nuc", 1, -1, 2, -2, math.inf, -math.inf)],
        A(X((2, 5, 3)), 1, (1, 0), True),
        A(X((2, 5, 3)), "nuc", (0, 2), True),
        most=4,
    ),
    case(
        "",
        A(X((5, 3))),
        A(X((5, 3)), 1),
        A(X((5, 3)), dim=0),
        A(X((5, 3)), 3, 1, True),
        A(X((2, 5, 3)), "fro", (0, 1)),
        A(X((5,)), math.inf),
        A(X((2, 5, 3)), dim=(0, 2)),
        also=[torch.linalg.norm],
        most=4,
    ),
    case("multi_dot", A([X((4, 2)), X((2, 5)), X((5, 3))]), A([X((5,)), X((5, 2)), X((2,))]), most=12),
    case("chain_matmul", A(X((4, 2)), X((2, 5)), X((5, 3))), A(X((4, 2))), most=6),
]

_REAL = X((4, 6))


def _of(names: str, *samples: A, most: int = 4):
    return case("", *samples, also=[getattr(torch.fft, n) for n in names.split()], most=most)


FOURIER = [
    _of("fft", A(_REAL), A(X((5, 2)), 3, 0), A(X((5, 2), dtype=_COMPLEX), dim=0, norm="ortho"), most=20),
    _of("ifft", A(_REAL), A(X((5, 2), dtype=_COMPLEX), None, 0)),
    _of("rfft ihfft", A(_REAL), A(X((5, 2)), 4, 0)),
    _of("irfft hfft", A(X((5, 3), dtype=_COMPLEX)), A(X((5, 2), dtype=_COMPLEX), 4, 0)),
    _of("fft2 ifft2 rfft2 ihfft2", A(X((5, 2, 3))), A(X((2, 5, 3)), (2, 2), (0, 2))),
    _of("irfft2 hfft2", A(X((5, 2, 3), dtype=_COMPLEX)), A(X((2, 5, 3), dtype=_COMPLEX), dim=(0, 2))),
    _of("fftn ifftn rfftn ihfftn", A(X((5, 2, 3)), (2, 2)), A(X((2, 5, 3)), dim=(0, 2)), A(X((5, 2)))),
    _of("irfftn hfftn", A(X((5, 2, 3), dtype=_COMPLEX), (2, 2)), A(X((2, 5, 3), dtype=_COMPLEX), dim=(0,))),
    _of("fftshift ifftshift", A(X((5, 3))), A(X((5, 3)), 1), A(X((5, 3)), (0,))),
    case(
        "stft",
        A(X((5, 8)), 4, 2, window=X((4,), 0.5, 1, grad=False), return_complex=True),
        A(X((8,)), 4, center=False, return_complex=True),
        most=6,
    ),
    case("istft", A(X((5, 3, 5), dtype=_COMPLEX), 4, 2, window=X((4,), 0.5, 1, grad=False)), most=6),
]
