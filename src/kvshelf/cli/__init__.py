"""The command ``kvshelf``.

Owns the entry point. Each command is a module of this package: the function that does its work,
and below it the command with its options and output. :mod:`kvshelf.cli.common` has the output, and
:mod:`kvshelf.cli.shelves` the choice of the shelf. Commands run on one thread, except ``doctor``,
which enforces deadlines on storage, and commands that work on many objects in parallel.
"""

from __future__ import annotations

import sys


def main() -> None:
    """Run the command line and exit with its code."""
    try:
        from kvshelf.cli.app import app
    except KeyboardInterrupt:
        # Before the module that ends commands in one line is there.
        sys.stderr.write("kvshelf: interrupted\n")
        sys.exit(130)
    app(prog_name="kvshelf")
