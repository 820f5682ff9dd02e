"""The command line: ``espalier train``, ``verify``, ``dry``, ``export``, ``run``, ``doctor``, ..."""

from espalier.cli.main import app, main

__all__ = ["app", "main"]
