"""``python -m espalier.cli`` is the same as ``espalier``."""

from espalier.cli import main

if __name__ == "__main__":
    main()
