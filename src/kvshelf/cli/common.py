"""What the commands share: exit codes, how a shelf is found, output.

Contracts
---------
* Data goes to standard output, everything else to standard error. With ``--json`` nothing
  but JSON is on standard output.
* A command ends by returning (exit code 0), by ``typer.Exit`` or by one of kvshelf's errors,
  which :func:`guarded` turns into a message and an exit code.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Final, ParamSpec, TypeAlias

import typer
from rich.console import Console

from kvshelf.backends import Backend, open_backend
from kvshelf.backends.posix import PosixBackend
from kvshelf.config import Config, default_shelf_path
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    KVShelfError,
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    StorageError,
)

OK: Final = 0
PROBLEM: Final = 1
USAGE: Final = 2
UNREACHABLE: Final = 3

EXIT_CODES: Final = {
    OK: "all is well",
    PROBLEM: "a problem was found",
    USAGE: "the command line or the configuration cannot be used",
    UNREACHABLE: "the shelf cannot be reached",
}

ShelfArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="SHELF",
        help="Directory or URL; default: the shelf that an engine started here would use.",
        show_default=False,
    ),
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Write JSON.")]

_P = ParamSpec("_P")


def guarded(command: Callable[_P, None]) -> Callable[_P, None]:
    """Turn kvshelf's errors, raised by a command, into a message and an exit code."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        try:
            command(*args, **kwargs)
            sys.stdout.flush()
        except KVShelfError as error:
            message(str(error))
            raise typer.Exit(exit_code(error)) from None
        except BrokenPipeError:
            # The reader (head, less) has seen enough. What Python still wants to flush at
            # exit must go somewhere else.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None

    return run


def exit_code(error: KVShelfError) -> int:
    """Return the exit code that an error means."""
    if isinstance(error, BadObjectError | ObjectMissingError | NotRegularError):
        return PROBLEM
    if isinstance(error, StorageError):
        return UNREACHABLE
    if isinstance(error, ConfigError | ObjectNameError):
        return USAGE
    return PROBLEM


def message(text: str) -> None:
    """Tell the user something that is not data."""
    Console(stderr=True, highlight=False).print(
        f"kvshelf: {text}", style="red", markup=False, soft_wrap=True
    )


def write_json(value: object) -> None:
    """Write one JSON value on a line of its own."""
    # ASCII: strings from a shelf may hold what no terminal should get, or lone surrogates.
    sys.stdout.write(json.dumps(value) + "\n")


def printable(text: str) -> str:
    """Return `text` with whatever is not printable escaped: it comes from a shelf."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def find_shelf(shelf: str | None) -> tuple[str, dict[str, Any]]:
    """Return URL and storage options of the shelf that a command is about.

    Parameters
    ----------
    shelf : str or None
        As given on the command line; None takes the configured one, else the private one.

    Raises
    ------
    ConfigError
        If the configuration cannot be used.
    """
    config = Config.load({} if shelf is None else {"shared_storage_path": shelf})
    if config.shared_storage_path is None:
        return str(default_shelf_path()), config.storage_options
    return config.shared_storage_path, config.storage_options


def open_existing(url: str, storage_options: dict[str, Any]) -> Backend:
    """Open a storage to read from it; nothing is created.

    Raises
    ------
    ConfigError
        If URL or options cannot be used.
    StorageError
        If it is missing or cannot be opened.
    """
    backend = open_backend(url, storage_options=storage_options, read_only=True)
    if is_missing(backend):
        backend.close()
        raise StorageError(
            f"{backend.url} does not exist; check the path, or mount what belongs there"
        )
    return backend


def is_missing(backend: Backend) -> bool:
    """Tell whether `backend` is a directory that is not there.

    Other storages have no root that could be missing.
    """
    return isinstance(backend, PosixBackend) and not os.path.isdir(backend.root)


def size_text(count: int) -> str:
    """Return a number of bytes for people."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} PiB"


def time_text(seconds: float) -> str:
    """Return a time since the epoch for people, in the local time zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
