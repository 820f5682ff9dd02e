"""A rank of ``python -m espalier.compat.deepspeed``: runs the program as DeepSpeed's launcher calls it."""

import sys

from espalier.compat.deepspeed.launcher import run_as_rank

if __name__ == "__main__":
    run_as_rank(sys.argv[1:])
