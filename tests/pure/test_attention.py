"""Attention on one process: where rules have a formula of their own, its edges are torch's."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F

import espalier
from espalier import Mesh, Replicate


@pytest.mark.parametrize("added", [False, True])
@pytest.mark.parametrize("rate", [0.0, 1e-12])
def test_rows_that_see_nothing_are_zeros(added: bool, rate: float) -> None:
    """Of padding, say: with dropout they were no numbers, and so were gradients of all others."""
    mesh = Mesh.single(("data",), "cpu")
    torch.manual_seed(1)
    whole = [torch.randn(2, 4, 9, 8, dtype=torch.float64) for _ in range(3)]
    mask = torch.rand(2, 1, 9, 9) > 0.4
    mask[:, :, 3] = False
    if added:
        mask = torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)
    plain = [x.clone().requires_grad_() for x in whole]
    expected = F.scaled_dot_product_attention(*plain, attn_mask=mask)
    expected.square().sum().backward()
    ours = [espalier.distribute_tensor(x, mesh, [Replicate()]).requires_grad_() for x in whole]
    seen = espalier.distribute_tensor(mask, mesh, [Replicate()])
    out = F.scaled_dot_product_attention(*ours, attn_mask=seen, dropout_p=rate)
    out.square().sum().backward()
    for x, y in zip((expected, *(x.grad for x in plain)), (out, *(x.grad for x in ours)), strict=True):
        torch.testing.assert_close(espalier.full_tensor(y), x, atol=1e-9, rtol=0)
