"""The command ``kvshelf``.

Owns the entry point. Each command is a module of this package; :mod:`kvshelf.cli.common` has the
choice of the shelf and the output. Commands run on one thread, except ``doctor``, which enforces
deadlines on storage, and ``copy``.
"""

from __future__ import annotations

from kvshelf.cli.codes import interruptible


def main() -> None:
    """Run the command line and exit with its code."""
    with interruptible():
        from kvshelf.cli.app import app

        app(prog_name="kvshelf")
