"""``python -m espalier.compat.deepspeed``: see :mod:`espalier.compat.deepspeed.launcher`."""

import sys

from espalier.compat.deepspeed.launcher import main
from espalier.mesh.launch import leave

if __name__ == "__main__":
    leave(main(sys.argv[1:]))
