"""What all ranks of tests need, imported once for those that are forked."""

from espalier.later import uncollected

with uncollected():
    import pytest  # noqa: F401 (the modules of tests import it)
    import torch
    import torch._dynamo  # optimizers import it at their first step
    import torch.distributed.pipelining  # noqa: F401 (the more modules there are, the longer it takes)

    import espalier.api  # noqa: F401
