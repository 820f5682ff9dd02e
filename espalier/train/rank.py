"""A rank's process: ``python -m espalier.train.rank ACTION FOLDER``."""

from __future__ import annotations

import sys

from espalier.later import importing


def work() -> int:
    """Do the action; the exit code."""
    with importing():
        from espalier.train.run import main
    return main(sys.argv[1:])


if __name__ == "__main__":
    sys.exit(work())
