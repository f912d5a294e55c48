"""The command line: a command reads its options, calls one library function, prints the result."""

from linearize.cli import making, using
from linearize.cli.terminal import app, main

__all__ = ["app", "main", "making", "using"]
