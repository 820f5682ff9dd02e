"""``colossalai.interface``: what ``booster.boost`` gives."""

import torch

from espalier.compat.absent import or_absent
from espalier.compat.colossalai.booster.boosted import Boosted as ModelWrapper

__path__: list[str] = []  # there are modules in it

OptimizerWrapper = torch.optim.Optimizer  # optimizers stay as they are

__all__ = ["ModelWrapper", "OptimizerWrapper"]

__getattr__ = or_absent(
    __name__,
    "colossalai.interface",
    {
        "pretrained": "from_pretrained of transformers reads weights",
        "AMPModelMixin": "plugins say the precision",
        "DistributedOptim": "optimizers stay as they are: parameters know how they lie",
        "PretrainedManager": "from_pretrained of transformers reads weights",
    },
    elsewhere={"model optimizer": __name__},
)
