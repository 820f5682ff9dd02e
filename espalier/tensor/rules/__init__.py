"""The rules, by kind of function: importing a file puts the rules that it defines into the table."""

from espalier.tensor.rules import (  # noqa: F401
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
from espalier.tensor.rules.table import RULES

__all__ = ["RULES"]
