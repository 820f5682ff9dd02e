"""The cases of the brute force, in groups of about equal cost."""

from tests.ranks.cases import (
    conv,
    images,
    indexing,
    loss,
    matmul,
    norm,
    pointwise,
    pool,
    randomness,
    reduction,
    rnn,
    views,
)

CASES = {
    "unary": pointwise.UNARY,
    "binary": pointwise.BINARY,
    "linear": pointwise.LINEAR,
    "matmul": matmul.CASES,
    "attention": matmul.ATTENTION,
    "conv": conv.CASES,
    "images": images.CASES,
    "norm": norm.CASES,
    "pool": pool.CASES,
    "reduction": reduction.CASES,
    "rnn": rnn.CASES,
    "views": views.CASES,
    "joining": views.JOINING,
    "indexing": indexing.CASES,
    "loss": loss.CASES,
    "randomness": randomness.CASES,
}
