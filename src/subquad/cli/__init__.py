"""The command line, one file per command."""

from subquad.cli.main import app, main

__all__ = ["app", "main"]
