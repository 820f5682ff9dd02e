"""What all ranks of tests need, imported once for those that are forked."""

from espalier.later import uncollected

with uncollected():
    import torch
    import torch._dynamo  # noqa: F401 (optimizers import it at their first step)

    import espalier.api  # noqa: F401
