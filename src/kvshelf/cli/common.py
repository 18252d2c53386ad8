"""Shared by the commands: errors, messages, output.

Contracts
---------
* Data goes to standard output, everything else to standard error. With ``--json`` nothing
  but JSON is on standard output: objects, each with what went wrong in ``errors``.
* A command ends by returning (exit code 0), by ``typer.Exit`` or by raising an error, which
  :func:`guarded` turns into one line and an exit code. An exception that is none of kvshelf's
  errors has a code of its own; ``--verbose`` shows its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import pwd
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec, TypeAlias

import typer

from kvshelf.cli.codes import (
    GIVEN,
    INTERRUPTED,
    OK,
    PROBLEM,
    UNEXPECTED,
    UNREACHABLE,
    USAGE,
    OutputError,
    write_out,
)
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    KVShelfError,
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    StorageError,
    UnavailableStorageError,
    printable,
    size_text,
)

logger = logging.getLogger(__name__)

#: Folders that could not be listed of which each has a line.
_MOST_FOLDERS: Final = 3


def option(name: str, metavar: str, about: str, short: str = "", **more: Any) -> Any:
    """Return the description of an option that has a value, and no default that is shown."""
    names = (name, short) if short else (name,)
    return typer.Option(*names, metavar=metavar, help=about, show_default=False, **more)


# All commands that change something take both. They differ in what they do without either.
YesOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--yes/--dry-run", "-y", help="Do it, or only say what would be done, which is the default."
    ),
]
DryRunOption: TypeAlias = Annotated[
    bool,
    typer.Option(
        "--dry-run/--yes", help="Only say what would be done, or do it, which is the default."
    ),
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
        with _log():
            try:
                command(*args, **kwargs)
            except (OutputError, typer.Abort):
                raise
            except typer.Exit as left:
                code = left.exit_code
            except KVShelfError as error:
                message(told(error))
                code = exit_code(error)
            except Exception as error:
                logger.debug("kvshelf %s failed", command.__name__, exc_info=error)
                message(_unexpected(command.__name__, error))
                code = UNEXPECTED
            if _errors and kwargs.get("as_json"):
                write_json({})
        if code != OK:
            raise typer.Exit(code)

    return run


class _Lines(logging.Handler):
    """Writes the log to standard error as it is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        sys.stderr.write(text if text.startswith("kvshelf: ") else f"kvshelf: {text}")
        sys.stderr.write("\n")


@contextlib.contextmanager
def _log() -> Iterator[None]:
    """Write the log of kvshelf as far as it is asked for while a command runs.

    Breakers say only with ``--verbose`` what they do: a command tells the error that opened one.
    """
    ours, breakers = logging.getLogger("kvshelf"), logging.getLogger("kvshelf.backends.guard")
    before = ours.level, breakers.level
    lines = _Lines()
    ours.addHandler(lines)
    usual = logging.ERROR if GIVEN["quiet"] else logging.WARNING
    ours.setLevel(logging.DEBUG if GIVEN["verbose"] else usual)
    breakers.setLevel(logging.NOTSET if GIVEN["verbose"] else logging.CRITICAL)
    try:
        yield
    finally:
        ours.removeHandler(lines)
        ours.setLevel(before[0])
        breakers.setLevel(before[1])


def _unexpected(command: str, error: Exception) -> str:
    """Return one line about an exception that no command should meet."""
    frames = traceback.extract_tb(error.__traceback__)
    place = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (
        f"{command} ended early, because of something that kvshelf does not expect:"
        f" {type(error).__name__}: {printable(str(error), 500)}{place}. It may be a damaged file,"
        " or an error in kvshelf: please report it, with what --verbose says"
    )


def told(error: Exception) -> str:
    """Return the text of an error, or of the one that led to it.

    Of a permission that is missing it says also whose the place is.
    """
    if isinstance(error, UnavailableStorageError) and error.reason:
        return error.reason
    text = str(error)
    is_permission = isinstance(error, StorageError) and error.errno in (errno.EACCES, errno.EPERM)
    if not isinstance(error, StorageError) or not is_permission or " belongs to " in text:
        return text
    place = Path(os.fsdecode(error.filename or ""))
    for path in (place, *place.parents) if place.is_absolute() else ():
        with contextlib.suppress(OSError):
            found = path.stat()
            return (
                f"{text}; {path} belongs to {_user(found.st_uid)}, mode"
                f" {stat.S_IMODE(found.st_mode):04o}, and you are {_user(os.geteuid())}"
            )
    return text


def _user(number: int) -> str:
    try:
        return pwd.getpwuid(number).pw_name
    except KeyError:
        return f"user {number}"


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
    typer.secho(f"kvshelf: {shown}", fg="red", err=True)


def tell_skipped(skipped: Mapping[str, StorageError]) -> None:
    """Name the first folders of a shelf that could not be listed, and say how many more."""
    for folder, error in list(skipped.items())[:_MOST_FOLDERS]:
        message(f"{printable(folder)} cannot be listed, and is left out: {printable(told(error))}")
    if (more := len(skipped) - _MOST_FOLDERS) > 0:
        message(f"{number(more, 'more folder')} cannot be listed")


def interruption(again: str) -> typer.Exit:
    """Print what it does when it is started again; return the exit after an interrupt."""
    message(f"interrupted; start it again {again}")
    return typer.Exit(INTERRUPTED)


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
    write_out(json.dumps(row | {"errors": errors}) + "\n")


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


def number(count: int, thing: str) -> str:
    """Return a number of things as text."""
    return f"{count} {thing}" if count == 1 else f"{count} {thing}s"


def age_text(seconds: float) -> str:
    """Return a length of time as readable text."""
    for unit, length in (("d", 86400), ("h", 3600), ("m", 60)):
        if seconds >= length:
            return f"{seconds / length:.3g} {unit}"
    return f"{seconds:.0f} s"


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
