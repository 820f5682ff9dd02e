"""The rules, by kind of function. New functions are lines in these tables."""

from espalier.tensor.rules import (
    attention,
    conv,
    images,
    indexing,
    joining,
    loss,
    matmul,
    meta,
    norm,
    optim,
    pointwise,
    pool,
    randomness,
    reduction,
    rnn,
    views,
)
from espalier.tensor.rules.spec import Rules

RULES = Rules()
for _part in (
    pointwise,
    matmul,
    reduction,
    views,
    joining,
    indexing,
    conv,
    images,
    pool,
    rnn,
    norm,
    attention,
    loss,
    randomness,
    optim,
    meta,
):
    _part.register(RULES)

__all__ = ["RULES"]
