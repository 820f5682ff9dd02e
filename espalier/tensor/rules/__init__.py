"""The rules, by kind of function. New functions are lines in these tables."""

from espalier.tensor.rules import (
    attention,
    composed,
    conv,
    fft,
    images,
    indexing,
    joining,
    linalg,
    loss,
    matmul,
    meta,
    norm,
    optim,
    order,
    pointwise,
    pool,
    randomness,
    reduction,
    rnn,
    rows,
    scatter,
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
    rows,
    indexing,
    conv,
    images,
    pool,
    rnn,
    scatter,
    order,
    linalg,
    fft,
    composed,
    norm,
    attention,
    loss,
    randomness,
    optim,
    meta,
):
    _part.register(RULES)

__all__ = ["RULES"]
