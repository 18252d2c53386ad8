"""The command ``kvshelf``.

Owns the entry point. Each command is a function of a module of this package;
:mod:`kvshelf.cli.common` has the output, and :mod:`kvshelf.cli.shelves` the choice of the shelf.
Commands run on one thread, except ``doctor``, which enforces deadlines on storage, and those that
work on many objects at once.
"""

from __future__ import annotations

from kvshelf.cli.codes import in_one_line


def main() -> None:
    """Run the command line and exit with its code."""
    with in_one_line():
        from kvshelf.cli.app import app

        app(prog_name="kvshelf")
