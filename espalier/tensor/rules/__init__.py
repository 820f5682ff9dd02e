"""The rules, by kind of function: importing a file puts the rules that it defines into the table."""

from espalier.sharding.spec import RULES
from espalier.tensor.rules import (  # noqa: F401
    across_ranks,
    attention,
    chunked_loss,
    composed,
    indexing,
    linalg,
    loss,
    matmul,
    meta,
    norm,
    pointwise,
    randomness,
    reduction,
    rows,
    views,
    windows,
)

__all__ = ["RULES"]
