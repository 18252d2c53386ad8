"""The exit codes of commands, and how an interrupt or a standard output that fails ends one.

Owns what is needed before the module of a command is imported, also the options that all commands
have; it imports no other part of kvshelf.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any, Final

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
    INTERRUPTED: "the command was interrupted",
}


#: The options that stand before or behind a command's name, as they were given.
GIVEN: Final[dict[str, Any]] = {
    "verbose": False,
    "quiet": False,
    "config": None,
    "storage_options": None,
}


@contextlib.contextmanager
def ending_at_once() -> Iterator[None]:
    """Have an interrupt end the process at once: torch takes one for an error of its import."""

    def end(*_: object) -> None:
        sys.stdout.flush()
        sys.stderr.write("kvshelf: interrupted\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    before = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


class OutputError(Exception):
    """Standard output takes no more."""


def write_out(text: str) -> None:
    """Write to standard output.

    Raises
    ------
    OutputError
        If it cannot be written; the text says why, and is empty where its reader has closed it.
    """
    try:
        sys.stdout.write(text)
        if not text:
            sys.stdout.flush()
    except BrokenPipeError:
        raise OutputError from None
    except OSError as error:
        raise OutputError(f"standard output cannot be written: {error.strerror}") from None


@contextlib.contextmanager
def in_one_line() -> Iterator[None]:
    """End the process in one line after an interrupt, and where standard output fails."""
    try:
        if sys.stdout is None:
            # What is opened next would be standard output.
            raise OutputError("standard output is closed")
        try:
            yield
        finally:
            write_out("")
    except KeyboardInterrupt:
        sys.stderr.write("kvshelf: interrupted\n")
        sys.exit(INTERRUPTED)
    except OutputError as error:
        if sys.stdout is not None:
            # Python flushes it once more at exit.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if str(error):
            sys.stderr.write(f"kvshelf: {error}\n")
            sys.exit(PROBLEM)
        sys.exit(OK)
