"""Shared by the commands: errors, the choice of the shelf, output.

Contracts
---------
* Data goes to standard output, everything else to standard error. With ``--json`` nothing
  but JSON is on standard output: objects, each with what went wrong in ``errors``.
* A command ends by returning (exit code 0), by ``typer.Exit`` or by raising an error, which
  :func:`guarded` turns into one line and an exit code. An exception that is none of kvshelf's
  errors has a code of its own; its traceback is a debug line of the logger ``kvshelf``.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import sys
import traceback
import types
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec, TypeAlias

import typer
from rich.console import Console

from kvshelf.backends import Backend, open_backend
from kvshelf.cli.codes import INTERRUPTED, OK, PROBLEM, UNEXPECTED, UNREACHABLE, USAGE
from kvshelf.config import Config, default_shelf_path
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    KVShelfError,
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    StorageError,
    printable,
)
from kvshelf.format.names import parse_namespace_folder
from kvshelf.shelf.shelf import Shelf, is_missing
from kvshelf.tools.naming import folders_named
from kvshelf.urls import check_shelf

logger = logging.getLogger(__name__)

#: No request waits for a command, so slow storage has long deadlines before the breaker opens.
PATIENT: Final = types.MappingProxyType(
    {"probe": 60.0, "read": 60.0, "write": 60.0, "bytes_per_second": 1e6}
)
#: Most characters of a file that an option names.
_MOST_TEXT: Final = 1 << 20

_URL_OPTIONS: Final = "Options of a URL: KVSHELF_STORAGE_OPTIONS, as JSON."

ShelfArgument: TypeAlias = Annotated[
    str | None,
    typer.Argument(
        metavar="SHELF",
        help="Directory or URL; default: KVSHELF_SHARED_STORAGE_PATH, else the configured shelf."
        f" {_URL_OPTIONS}",
        show_default=False,
    ),
]
OneShelf: TypeAlias = Annotated[
    str, typer.Argument(metavar="SHELF", help=f"Directory or URL. {_URL_OPTIONS}")
]
YesOption: TypeAlias = Annotated[
    bool, typer.Option("--yes", "-y", help="Do it; without it nothing is changed.")
]
DryRunOption: TypeAlias = Annotated[
    bool, typer.Option("--dry-run", help="Only say what would be done; change nothing.")
]
JobsOption: TypeAlias = Annotated[
    int | None, typer.Option("--jobs", "-j", min=1, help="Objects worked on at once.")
]
JsonOption: TypeAlias = Annotated[bool, typer.Option("--json", help="Write JSON.")]

#: What went wrong in the command that runs, and no JSON says yet.
_errors: Final[list[dict[str, Any]]] = []

_P = ParamSpec("_P")


def guarded(command: Callable[_P, None]) -> Callable[_P, None]:
    """Turn what a command raises into one line and an exit code."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        _errors.clear()
        code = OK
        try:
            try:
                command(*args, **kwargs)
            except (BrokenPipeError, typer.Abort):
                raise
            except typer.Exit as left:
                code = left.exit_code
            except KVShelfError as error:
                message(str(error))
                code = exit_code(error)
            except Exception as error:
                logger.debug("kvshelf %s failed", command.__name__, exc_info=error)
                message(_unexpected(command.__name__, error))
                code = UNEXPECTED
            if _errors and kwargs.get("as_json"):
                write_json({})
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader (head, less) closed the pipe. Python still flushes at exit, so standard
            # output is redirected.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            code = OK
        if code != OK:
            raise typer.Exit(code)

    return run


def _unexpected(command: str, error: Exception) -> str:
    """Return one line about an exception that no command should meet."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (
        f"{command} ended early, because of something that kvshelf does not expect:"
        f" {type(error).__name__}: {printable(str(error), 500)}{place}. It may be a damaged file,"
        " which `kvshelf doctor` may name, or an error in kvshelf: please report it"
    )


def exit_code(error: KVShelfError) -> int:
    """Return the exit code for an error."""
    if isinstance(error, BadObjectError | ObjectMissingError | NotRegularError):
        return PROBLEM
    if isinstance(error, StorageError):
        return UNREACHABLE
    if isinstance(error, ConfigError | ObjectNameError):
        return USAGE
    return PROBLEM


def message(text: str, *, error: bool = True) -> None:
    """Print a message for the user on standard error; it may quote what a server answered.

    With `error`, the next JSON object has it in ``errors``: what is in that by itself, or no error,
    needs none.
    """
    if error:
        _errors.append({"name": None, "problem": text})
    shown = "\n".join(map(printable, text.splitlines()))
    Console(stderr=True, highlight=False).print(
        f"kvshelf: {shown}", style="red", markup=False, soft_wrap=True
    )


def write_json(row: dict[str, Any]) -> None:
    """Write one JSON object on a line of its own.

    Its ``errors`` are the messages since the last one, and what it says in ``problem`` or
    ``problems``.
    """
    errors = [*_errors, *row.get("problems", ())]
    _errors.clear()
    if row.get("problem") is not None:
        name = next((row[key] for key in ("object", "pin", "namespace") if key in row), None)
        errors.append({"name": name, "problem": row["problem"]})
    # ASCII: strings from a shelf may contain control characters or lone surrogates.
    sys.stdout.write(json.dumps(row | {"errors": errors}) + "\n")


def write(
    as_json: bool,
    row: Callable[_P, dict[str, Any]],
    text: Callable[_P, str],
    *args: _P.args,
    **kwargs: _P.kwargs,
) -> None:
    """Write what a command found, as the JSON object `row` or as text."""
    if as_json:
        write_json(row(*args, **kwargs))
    else:
        sys.stdout.write(text(*args, **kwargs))


def columns(*widths: int) -> Callable[..., str]:
    """Return what makes a line of a table: cells of these widths, negative ones to the left.

    The line ends in the last cell: its width is 0.
    """

    def line(*cells: object) -> str:
        padded = (
            str(cell).rjust(width) if width >= 0 else str(cell).ljust(-width)
            for cell, width in zip(cells, widths, strict=True)
        )
        return "  ".join(padded) + "\n"

    return line


def summary(parts: Sequence[str], *counts: tuple[int, str]) -> str:
    """Return one line: some parts, and of these counts those above zero."""
    return "; ".join([*parts, *(f"{count} {what}" for count, what in counts if count)]) + "\n"


def configuration(shelf: str | None) -> Config:
    """Return the options for a command; the command line's shelf replaces what they say.

    Raises
    ------
    ConfigError
        If the configuration cannot be used.
    """
    if shelf is None:
        return Config.load()
    check_shelf(shelf)
    # A command takes a path that is relative to the folder in which it runs.
    here = shelf if "://" in shelf else os.path.abspath(os.path.expanduser(shelf))
    return Config.load({"shared_storage_path": here, "server": None})


def find_shelf(shelf: str | None) -> tuple[str, dict[str, Any]]:
    """Return URL and storage options of the shelf for a command.

    Parameters
    ----------
    shelf : str or None
        The command line's shelf; None selects the configured shelf, else the private one.

    Raises
    ------
    ConfigError
        If the configuration cannot be used, or it names a node server, which alone knows its
        shelf.
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


def open_existing(url: str, storage_options: dict[str, Any], *, change: bool = False) -> Backend:
    """Open a storage that exists, to look at it or to change it: reads are not uses.

    Raises
    ------
    ConfigError
        If URL or options cannot be used.
    StorageError
        If it is missing or cannot be opened.
    """
    if is_local(url):
        storage_options = storage_options | {"create": False}
    backend = open_backend(
        url, storage_options=storage_options, read_only=not change, keep_atime=True
    )
    if is_missing(backend):
        backend.close()
        raise StorageError(f"{backend.url} does not exist; check the path, or mount the filesystem")
    return backend


def open_patiently(url: str, storage_options: dict[str, Any], *, change: bool = False) -> Shelf:
    """Open a shelf that exists, with long deadlines; see :func:`open_existing`."""
    backend = open_existing(url, storage_options, change=change)
    return Shelf(backend, deadlines=replace(backend.properties.deadlines, **PATIENT))


def open_found(shelf: str | None, *, change: bool = False) -> Shelf:
    """Open the shelf of a command: :func:`find_shelf`, :func:`open_patiently`."""
    return open_patiently(*find_shelf(shelf), change=change)


def namespace_folder(shelf: Shelf, wanted: str) -> str:
    """Return the one namespace folder of a shelf that a user names.

    Raises
    ------
    ConfigError
        If there is none, or more than one.
    StorageError
        If the storage failed.
    """
    found = namespace_folders(shelf, wanted)
    if len(found) == 1:
        return found[0]
    raise ConfigError(f"{wanted} names {len(found)} folders; give one: {', '.join(found)}")


def namespace_folders(shelf: Shelf, wanted: str) -> list[str]:
    """Return the namespace folders of a shelf that a user names.

    Raises
    ------
    ConfigError
        If there is none, or more than one namespace.
    StorageError
        If the storage failed.
    """
    return folders_named(wanted, filter(parse_namespace_folder, shelf.backend.folders()), shelf.url)


def is_local(url: str) -> bool:
    """Whether a shelf's path or URL names a directory of this machine."""
    return "://" not in url or url.startswith(("file://", "local://"))


def read_text(file: Path, option: str) -> str:
    """Return the text of a file that the value of an option names; at most 1 MiB.

    Raises
    ------
    ConfigError
        If it cannot be read as such.
    """
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            return opened.read(_MOST_TEXT)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option}: {file} cannot be read: {error}") from None


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


def interruption() -> typer.Exit:
    """Print how to continue; return the exit after an interrupt."""
    message("interrupted; start it again to continue")
    return typer.Exit(INTERRUPTED)


def size_text(count: int) -> str:
    """Return a number of bytes as readable text."""
    amount = float(count)
    for unit in ("B", "KiB", "MiB", "GiB", "TiB"):
        if amount < 1024:
            return f"{amount:.0f} {unit}" if unit == "B" else f"{amount:.1f} {unit}"
        amount /= 1024
    return f"{amount:.1f} PiB"


def pace_text(nbytes: int, seconds: float) -> str:
    """Return how long so many bytes took, and the bytes per second."""
    rate = nbytes / seconds if seconds else 0.0
    return f"{seconds:.1f} s ({size_text(int(rate))}/s)"


def time_text(seconds: float) -> str:
    """Return a time since the epoch as readable text, in the local time zone.

    Storages return any number: it is ``?`` where there is no such date.
    """
    try:
        return datetime.fromtimestamp(seconds).astimezone().strftime("%Y-%m-%d %H:%M")
    except (ValueError, OverflowError, OSError):
        return "?"


def address(option: str, text: str) -> tuple[str, int]:
    """Return the address and the port that ``[HOST:]PORT`` names; without HOST this machine's own.

    Raises
    ------
    ConfigError
        If it is none.
    """
    host, _, port = text.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not port.isdecimal() or int(port) > 65535:
        raise ConfigError(f"{option} is {text!r}; expected a port, or an address and a port")
    return host or "127.0.0.1", int(port)


def shown_address(host: str, port: int) -> str:
    """Return the URL of an address and a port."""
    return f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
