"""Cases of resampling and rearranging images."""

from __future__ import annotations

import torch
import torch.nn.functional as F

from tests.ranks.brute import A, Case, X, case

_nn = torch._C._nn
_SMALL = {1: X((2, 3, 4)), 2: X((2, 3, 4, 3)), 3: X((2, 1, 2, 3, 2))}


def _nearest(name: str, nd: int) -> Case:
    return case("", A(_SMALL[nd], None, [1.5] * nd), also=[getattr(_nn, f"{name}{nd}d")], most=20)


CASES = [
    *[_nearest(name, nd) for name in ("upsample_nearest", "_upsample_nearest_exact") for nd in (1, 2, 3)],
    case("", A(_SMALL[1], [7], True, None), also=[_nn.upsample_linear1d], most=20),
    case("", A(_SMALL[2], None, False, [1.5, 2.0]), also=[_nn.upsample_bilinear2d], most=20),
    case("", A(_SMALL[3], [3, 2, 4], False, None), also=[_nn.upsample_trilinear3d], most=20),
    case("", A(_SMALL[2], None, True, [1.5, 2.0]), also=[_nn.upsample_bicubic2d], most=20),
    case("", A(_SMALL[2], None, False, [0.5, 0.7]), also=[_nn._upsample_bilinear2d_aa], most=20),
    case("", A(_SMALL[2], None, False, [0.5, 0.7]), also=[_nn._upsample_bicubic2d_aa], most=20),
    case("pixel_shuffle", A(X((2, 8, 2, 3)), 2), A(X((18, 1, 4)), 3)),
    case("pixel_unshuffle", A(X((2, 2, 4, 6)), 2), A(X((3, 3, 6)), 3)),
    case("channel_shuffle", A(X((2, 4, 3)), 2)),
    case(
        "",
        A(_SMALL[2], X((2, 3, 5, 2), -1, 1), 0, 0, False),
        A(_SMALL[3], X((2, 2, 1, 3, 3), -1, 1), 0, 1, True),
        also=[torch.grid_sampler],
        most=40,
    ),
    case("", A(X((3, 2, 3)), [3, 1, 2, 4], False), also=[torch.affine_grid_generator]),
    case(
        "",
        A(X((2, 3, 4, 5)), (2, 3), (1, 1), (0, 1), (1, 2)),
        A(X((3, 4, 5)), (2, 2), (1, 2), (0, 0), (1, 1)),
        also=[_nn.im2col],
    ),
    case(
        "",
        A(X((2, 12, 6)), (3, 4), (2, 2), (1, 1), (0, 0), (1, 1)),
        A(X((8, 6)), (3, 4), (2, 2), (1, 1), (0, 0), (1, 1)),
        also=[_nn.col2im],
    ),
    # composites, entered
    case(
        "", A(_SMALL[2], scale_factor=1.5), A(_SMALL[2], (3, 5), mode="area"), also=[F.interpolate], most=12
    ),
    case("", A(X((2, 3, 4, 5)), 2), also=[F.unfold], most=12),
]
