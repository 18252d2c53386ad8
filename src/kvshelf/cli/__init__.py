"""The command ``kvshelf``.

Owns the entry point. Each command is a module of its own in this package;
:mod:`kvshelf.cli.common` holds what they share: exit codes, how a shelf is found, output.
Commands run on one thread; only ``doctor`` uses others, to put a deadline on storage.
"""

from __future__ import annotations


def main() -> None:
    """Run the command line and exit with its code."""
    from kvshelf.cli.app import app

    app(prog_name="kvshelf")
