"""A rank's process: ``python -m espalier.train.rank ACTION FOLDER``."""

from __future__ import annotations

import gc
import sys


def work() -> int:
    """Do the action; the exit code."""
    gc.disable()  # what is imported is no garbage; to look for some takes a fifth of the start
    from espalier.train.run import main

    gc.enable()
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(work())
