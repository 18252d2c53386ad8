"""Shared by the commands: exit codes, errors, messages, output.

Owns the options that stand before or behind a command's name (:data:`COMMON_OPTIONS`).

Contracts
---------
* Data goes to standard output, everything else to standard error. With ``--json`` nothing
  but JSON is on standard output: objects, each with what went wrong in ``errors``.
* A command ends by returning (exit code 0), by ``typer.Exit`` or by raising an error, which
  :func:`guarded` turns into one line and an exit code. An exception that is none of kvshelf's
  errors has an exit code of its own; ``--verbose`` shows its traceback.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import pwd
import signal
import stat
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Final, ParamSpec, TypeAlias

import typer

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
COMMON_OPTIONS: Final[dict[str, Any]] = {
    "verbose": False,
    "quiet": False,
    "config": None,
    "storage_options": None,
}

#: Folders that could not be listed of which each has a line.
_MAX_SKIPPED_LINES: Final = 3


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

# ------------------------------------------------------------------------- how a command ends

#: The problems of the running command that no JSON object has reported yet.
_errors: Final[list[dict[str, Any]]] = []

_P = ParamSpec("_P")


class OutputError(Exception):
    """Standard output takes no more."""


@contextlib.contextmanager
def ending_in_one_line() -> Iterator[None]:
    """End the process in one line after an interrupt, and where standard output fails."""
    try:
        if sys.stdout is None:
            # The next file that is opened would become standard output.
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


@contextlib.contextmanager
def ending_immediately() -> Iterator[None]:
    """Have an interrupt end the process: torch takes an exception for an error of its import."""

    def end(*_: object) -> None:
        sys.stdout.flush()
        sys.stderr.write("kvshelf: interrupted\n")
        sys.stderr.flush()
        os._exit(INTERRUPTED)

    handler = signal.signal(signal.SIGINT, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)


def guarded(command: Callable[_P, None]) -> Callable[_P, None]:
    """Turn what a command raises into one line and an exit code."""

    @functools.wraps(command)
    def run(*args: _P.args, **kwargs: _P.kwargs) -> None:
        _errors.clear()
        code = OK
        with _logging():
            try:
                command(*args, **kwargs)
            except (OutputError, typer.Abort):
                raise
            except typer.Exit as end:
                code = end.exit_code
            except KVShelfError as error:
                warn(error_text(error))
                code = exit_code(error)
            except Exception as error:
                logger.debug("kvshelf %s failed", command.__name__, exc_info=error)
                warn(_unexpected(command.__name__, error))
                code = UNEXPECTED
            if _errors and kwargs.get("as_json"):
                write_json({})
        if code != OK:
            raise typer.Exit(code)

    return run


class _StandardError(logging.Handler):
    """Writes the log to standard error as it is at the time."""

    def emit(self, record: logging.LogRecord) -> None:
        text = self.format(record)
        sys.stderr.write(text if text.startswith("kvshelf: ") else f"kvshelf: {text}")
        sys.stderr.write("\n")


@contextlib.contextmanager
def _logging() -> Iterator[None]:
    """Write kvshelf's log while a command runs, as much as ``--verbose`` and ``--quiet`` ask for.

    Circuit breakers log only with ``--verbose``: a command tells the error that opened one.
    """
    ours, breakers = logging.getLogger("kvshelf"), logging.getLogger("kvshelf.backends.guard")
    levels = ours.level, breakers.level
    handler = _StandardError()
    ours.addHandler(handler)
    usual = logging.ERROR if COMMON_OPTIONS["quiet"] else logging.WARNING
    ours.setLevel(logging.DEBUG if COMMON_OPTIONS["verbose"] else usual)
    breakers.setLevel(logging.NOTSET if COMMON_OPTIONS["verbose"] else logging.CRITICAL)
    try:
        yield
    finally:
        ours.removeHandler(handler)
        ours.setLevel(levels[0])
        breakers.setLevel(levels[1])


def _unexpected(command: str, error: Exception) -> str:
    """Return one line about an exception that no command should meet."""
    frames = traceback.extract_tb(error.__traceback__)
    frame_text = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    return (
        f"{command} ended early, because of something that kvshelf does not expect:"
        f" {type(error).__name__}: {printable(str(error), 500)}{frame_text}. It may be a damaged"
        " file, or an error in kvshelf: please report it, with what --verbose says"
    )


def error_text(error: Exception) -> str:
    """Return the text of an error, or of the error that led to it.

    The text of a missing permission names the owner of the place too.
    """
    if isinstance(error, UnavailableStorageError) and error.reason:
        return error.reason
    text = str(error)
    is_permission = isinstance(error, StorageError) and error.errno in (errno.EACCES, errno.EPERM)
    if not isinstance(error, StorageError) or not is_permission or " belongs to " in text:
        return text
    error_path = Path(os.fsdecode(error.filename or ""))
    for path in (error_path, *error_path.parents) if error_path.is_absolute() else ():
        with contextlib.suppress(OSError):
            status = path.stat()
            return (
                f"{text}; {path} belongs to {_user_name(status.st_uid)}, mode"
                f" {stat.S_IMODE(status.st_mode):04o}, and you are {_user_name(os.geteuid())}"
            )
    return text


def _user_name(user_id: int) -> str:
    try:
        return pwd.getpwuid(user_id).pw_name
    except KeyError:
        return f"user {user_id}"


def exit_code(error: KVShelfError) -> int:
    """Return the exit code for an error."""
    if isinstance(error, BadObjectError | ObjectMissingError | NotRegularError):
        return PROBLEM
    if isinstance(error, StorageError):
        return UNREACHABLE
    if isinstance(error, ConfigError | ObjectNameError):
        return USAGE
    return PROBLEM


def interruption(again: str) -> typer.Exit:
    """Say why an interrupted command is started again; return its exit."""
    warn(f"interrupted; start it again {again}")
    return typer.Exit(INTERRUPTED)


# ------------------------------------------------------------------------- output


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


def write_json(row: dict[str, Any]) -> None:
    """Write one JSON object on a line of its own.

    Its ``errors`` are the warnings since the last object, and what it says in ``problem`` or
    ``problems``.
    """
    errors = [*_errors, *row.get("problems", ())]
    _errors.clear()
    if row.get("problem") is not None:
        name = next((row[key] for key in ("object", "pin", "namespace") if key in row), None)
        errors.append({"name": name, "problem": row["problem"]})
    # ASCII: strings from a shelf may contain control characters or lone surrogates.
    write_out(json.dumps(row | {"errors": errors}) + "\n")


def warn(text: str, *, is_error: bool = True) -> None:
    """Print a message for the user on standard error; it may quote what a server answered.

    With `is_error` the next JSON object has it in ``errors``.
    """
    if is_error:
        _errors.append({"name": None, "problem": text})
    lines = "\n".join(map(printable, text.splitlines()))
    typer.secho(f"kvshelf: {lines}", fg="red", err=True)


def warn_of_skipped(skipped: Mapping[str, StorageError]) -> None:
    """Name the first folders of a shelf that could not be listed, and say how many more."""
    for folder, error in list(skipped.items())[:_MAX_SKIPPED_LINES]:
        reason = printable(error_text(error))
        warn(f"{printable(folder)} cannot be listed, and is left out: {reason}")
    if (more := len(skipped) - _MAX_SKIPPED_LINES) > 0:
        warn(f"{count_text(more, 'more folder')} cannot be listed")


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
    """Return one line: some parts, and those of the counts that are above zero."""
    return "; ".join([*parts, *(f"{count} {text}" for count, text in counts if count)]) + "\n"


def count_text(count: int, thing: str) -> str:
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
