"""The exit codes of commands, and how an interrupt ends one.

Owns what is needed before the module of a command is imported; it imports no other part of
kvshelf.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Final

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3
UNEXPECTED: Final = 4
INTERRUPTED: Final = 130

EXIT_CODES: Final = {
    OK: "all is well",
    PROBLEM: "a problem was found",
    USAGE: "the command line or the configuration cannot be used",
    UNREACHABLE: "the shelf cannot be reached",
    UNEXPECTED: "the command met something that kvshelf does not expect",
}


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """End the process after an interrupt, with one line and a code of its own."""
    try:
        yield
    except KeyboardInterrupt:
        sys.stderr.write("kvshelf: interrupted\n")
        sys.exit(INTERRUPTED)
