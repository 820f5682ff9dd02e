"""Two ranks add their numbers: ``python -m espalier.cli.handshake``, used by the doctor."""

import os
import sys

import torch

from espalier.comm import all_reduce
from espalier.mesh import Mesh
from espalier.mesh.launch import launch
from espalier.mesh.process import finish, start

_RANKS = 2


def main() -> None:
    """Start the ranks, or be one of them."""
    if "RANK" not in os.environ:
        launch(["-m", "espalier.cli.handshake"], _RANKS)
        return
    process = start("cpu", timeout=20.0)
    try:
        total = all_reduce(torch.tensor([process.rank + 1.0]), Mesh.from_env({"data": _RANKS}), 0)
        if total.item() != _RANKS * (_RANKS + 1) / 2:
            sys.exit(f"the ranks added up to {total.item()}")
    finally:
        finish()


if __name__ == "__main__":
    main()
