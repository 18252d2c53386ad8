"""``python -m kvshelf``: the command line."""

from __future__ import annotations

from kvshelf.cli import main

main()
