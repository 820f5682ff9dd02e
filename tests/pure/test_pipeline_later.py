"""Weights' gradients that are put off are, bit by bit, those that autograd gives at once."""

import copy

import pytest
import torch
from torch import nn

from espalier.parallel.pipeline.weight_gradients import DeferredWeightGrads


def test_gradients_put_off_are_the_same() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(6, 8), nn.ReLU(inplace=True), nn.LayerNorm(8), nn.Linear(8, 5, bias=False))
    net.append(nn.Linear(5, 5)).append(net[4])  # used twice
    net[4].bias.requires_grad_(False)
    plain, later = copy.deepcopy(net), DeferredWeightGrads()
    for shape in ((3, 6), (2, 3, 6), (6, 6)):
        x = torch.randn(shape)
        ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
        before = net[0].weight.grad
        kept = None if before is None else before.clone()
        with later.of(net.parameters()):
            out = net(ours)
            out.square().sum().backward()
            now = net[0].weight.grad
            assert now is before and (kept is None or torch.equal(kept, before))
            assert net[2].weight.grad is not None  # it is no linear layer's
            later.do()
        assert all(type(p) is nn.Parameter and "later" not in p.__dict__ for p in net.parameters())
        wanted = plain(theirs)
        wanted.square().sum().backward()
        assert torch.equal(out, wanted) and torch.equal(ours.grad, theirs.grad)
        for p, q in zip(net.parameters(), plain.parameters(), strict=True):
            assert (p.grad is None and q.grad is None) or torch.equal(p.grad, q.grad)


def test_what_does_not_fit_is_not_put_off() -> None:
    net, later = nn.Linear(4, 4), DeferredWeightGrads()
    x = torch.randn(2, 4, requires_grad=True)
    with later.of(net.parameters()), torch.autocast("cpu", torch.bfloat16):
        net(x).float().sum().backward()
    assert net.weight.grad is not None
    with later.of(net.parameters()), torch.no_grad():
        assert not net(x).requires_grad
    with pytest.raises(RuntimeError, match="written to"), later.of(net.parameters()):
        entered = x * 1
        net(entered).sum().backward()
        entered.zero_()
        later.do()
    given = nn.functional.linear(input=x, weight=net.weight)
    assert torch.equal(given, x @ net.weight.t())
