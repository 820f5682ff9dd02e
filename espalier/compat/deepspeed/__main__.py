"""``python -m espalier.compat.deepspeed``: see :mod:`espalier.compat.deepspeed.launcher`."""

import sys

from espalier.compat.deepspeed.launcher import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
