"""Shared by the commands: exit codes, the choice of the shelf, output.

Contracts
---------
* Data goes to standard output, everything else to standard error. With ``--json`` nothing
  but JSON is on standard output.
* A command ends by returning (exit code 0), by ``typer.Exit`` or by raising an error of
  kvshelf, which :func:`guarded` turns into a message and an exit code.
"""

from __future__ import annotations

import functools
import json
import os
import sys
from collections.abc import Callable
from datetime import datetime
from typing import Annotated, Any, Final, NoReturn, ParamSpec, TypeAlias

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
_INTERRUPTED: Final = 130

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
            # The reader (head, less) closed the pipe. Python still flushes at exit, so standard
            # output is redirected.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            raise typer.Exit(OK) from None

    return run


def exit_code(error: KVShelfError) -> int:
    """Return the exit code for an error."""
    if isinstance(error, BadObjectError | ObjectMissingError | NotRegularError):
        return PROBLEM
    if isinstance(error, StorageError):
        return UNREACHABLE
    if isinstance(error, ConfigError | ObjectNameError):
        return USAGE
    return PROBLEM


def message(text: str) -> None:
    """Print a message for the user on standard error."""
    Console(stderr=True, highlight=False).print(
        f"kvshelf: {text}", style="red", markup=False, soft_wrap=True
    )


def write_json(value: object) -> None:
    """Write one JSON value on a line of its own."""
    # ASCII: strings from a shelf may contain control characters or lone surrogates.
    sys.stdout.write(json.dumps(value) + "\n")


def printable(text: str) -> str:
    """Return `text`, which comes from a shelf, with unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def configuration(shelf: str | None) -> Config:
    """Return the options for a command; the command line's shelf replaces what they say.

    Raises
    ------
    ConfigError
        If the configuration cannot be used.
    """
    return Config.load({} if shelf is None else {"shared_storage_path": shelf, "server": None})


def find_shelf(shelf: str | None) -> tuple[str, dict[str, Any]]:
    """Return URL and storage options of the shelf for a command.

    Parameters
    ----------
    shelf : str or None
        The command line's shelf; None selects the configured shelf, else the private one.

    Raises
    ------
    ConfigError
        If the configuration cannot be used, or names a node server, which alone knows its shelf.
    """
    config = configuration(shelf)
    if config.server is not None:
        raise ConfigError(
            f"server is {config.server}, so the shelf is an option of that server: name the shelf"
            " on the command line"
        )
    if config.shared_storage_path is None:
        return str(default_shelf_path()), config.storage_options
    return config.shared_storage_path, config.storage_options


def open_existing(url: str, storage_options: dict[str, Any]) -> Backend:
    """Open a storage for reading; nothing is created.

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
        raise missing_error(backend)
    return backend


def missing_error(backend: Backend) -> StorageError:
    """Return the error for a directory that does not exist."""
    return StorageError(f"{backend.url} does not exist; check the path, or mount the filesystem")


def is_missing(backend: Backend) -> bool:
    """Whether `backend` is a directory that does not exist.

    Other storages have no root that could be missing.
    """
    return isinstance(backend, PosixBackend) and not os.path.isdir(backend.root)


def is_local(url: str) -> bool:
    """Whether a shelf's path or URL names a directory of this machine."""
    return "://" not in url or url.startswith(("file://", "local://"))


def json_object(text: str, option: str) -> dict[str, Any]:
    """Parse the JSON object that is the value of an option.

    Raises
    ------
    ConfigError
        If it is not a JSON object.
    """
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"{option}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise ConfigError(f'{option}: expected a JSON object, such as {{"name": "value"}}')
    return value


def exit_interrupted() -> NoReturn:
    """Tell the user how to continue, and exit as after an interrupt."""
    message("interrupted; start it again to continue")
    raise typer.Exit(_INTERRUPTED)


def size_text(count: int) -> str:
    """Return a number of bytes as readable text."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} PiB"


def time_text(seconds: float) -> str:
    """Return a time since the epoch as readable text, in the local time zone."""
    return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
