"""``python -m espalier``: the command line."""

from espalier.cli.main import main

if __name__ == "__main__":
    main()
