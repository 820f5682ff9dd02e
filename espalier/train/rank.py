"""A rank's process: ``python -m espalier.train.rank ACTION FOLDER``."""

from __future__ import annotations

import sys
from typing import NoReturn

from espalier.later import uncollected


def work() -> NoReturn:
    """Do the action, and exit with its code."""
    with uncollected():
        from espalier.mesh.launch import leave
        from espalier.train.run import main
    leave(main(sys.argv[1:]))


if __name__ == "__main__":
    work()
