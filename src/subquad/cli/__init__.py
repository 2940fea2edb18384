"""The command line, one file a command."""

from subquad.cli.main import app, main

__all__ = ["app", "main"]
