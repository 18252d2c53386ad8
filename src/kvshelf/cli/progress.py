"""How commands over many objects work on them, show it, and end.

:class:`Work` calls a function for each object on threads, with retries, and counts what happens in
a report. :class:`Display` has the progress bar on standard error, which there is on a terminal
only, the lines about problems above it, and the end of the command: done, interrupted, or because
the storage failed.

Contracts
---------
* An error with one object that may pass is retried after pauses. If it remains although other
  objects succeed, it is the object's. If nothing has succeeded yet, or nothing since the error of
  another object, it ends the work.
* The methods of :class:`Work` may be called on any thread, those of :class:`Display` on any
  thread too, one call at a time.
"""

from __future__ import annotations

import contextlib
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Final, Generic, Protocol, TypeVar

import typer

from kvshelf.capacity.parallel import in_parallel
from kvshelf.cli.common import (
    COMMON_OPTIONS,
    PROBLEM,
    error_text,
    exit_code,
    interruption,
    warn,
    write_json,
    write_out,
)
from kvshelf.errors import (
    BadObjectError,
    NoSpaceStorageError,
    ObjectMissingError,
    ReadOnlyStorageError,
    StorageError,
    printable,
    size_text,
)

#: Seconds between the attempts for one object.
PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Most problems that are kept for the JSON of a command.
_MAX_PROBLEMS: Final = 100_000


class Report(Protocol):
    """The counts of a command over many objects."""

    found: int
    bytes: int

    @property
    def done(self) -> int:
        """Objects that are finished."""


_Report = TypeVar("_Report", bound=Report)


class Display:
    """The progress bar of a command, and the problems that it finds.

    Parameters
    ----------
    doing : str
        What is done, such as ``copying``.
    as_json : bool
        Write one JSON object at the end, with the problems in it; otherwise print these when they
        are found.

    Attributes
    ----------
    problems : list of dict
        The first problems, with `as_json` only.
    """

    def __init__(self, doing: str, *, as_json: bool = True) -> None:
        self.problems: list[dict[str, Any]] = []
        self._problems_left_out = 0
        self._listed_files = 0
        self._has_begun = False
        self._interrupted = False
        self._end: typer.Exit | None = None
        self._as_json = as_json
        self._doing = doing
        self._bar: Any = None
        if sys.stderr.isatty() and not COMMON_OPTIONS["quiet"]:
            from rich.console import Console
            from rich.progress import Progress

            self._bar = Progress(console=Console(stderr=True), transient=True)
            self._bar.add_task(doing, total=None)

    def __enter__(self) -> Display:
        if self._bar is not None:
            self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def listed(self, files: int) -> None:
        """Show that so many more files were listed."""
        self._listed_files += files
        self.stage(f"listing: {self._listed_files} files")

    def show(self, done: int, total: int, nbytes: int | None = None) -> None:
        """Show how many things of how many are done, and the bytes of them."""
        self._has_begun = True
        amount = "" if nbytes is None else f", {size_text(nbytes)}"
        self.stage(f"{self._doing}: {done}/{total}{amount}", completed=done, total=total)

    def stage(self, text: str, **fields: Any) -> None:
        """Show what is done now."""
        if self._bar is not None:
            self._bar.update(0, description=text, **fields)

    def problem(self, name: str, text: str, **more: object) -> None:
        """Print what is wrong with something, or keep it; `more` is for JSON only."""
        if not self._as_json:
            # The bar, while there is one, stands in for standard error.
            sys.stderr.write(f"{printable(name)}: {printable(text)}\n")
        elif len(self.problems) < _MAX_PROBLEMS:
            self.problems.append({"name": name, "problem": text, **more})
        else:
            self._problems_left_out += 1

    @contextlib.contextmanager
    def working(self, again: str = "to continue") -> Iterator[None]:
        """Show the work of a command; an interrupt or an error of the storage ends only the work.

        Parameters
        ----------
        again : str
            Why the command is started again after an interrupt.
        """
        try:
            with self:
                yield
        except KeyboardInterrupt:
            self._end, self._interrupted = interruption(again), True
        except StorageError as error:
            warn(error_text(error))
            self._end = typer.Exit(exit_code(error))

    def finish(self, row: dict[str, Any], text: str, *, complete: bool) -> None:
        """Write what was done, however the work ended, and end the command.

        Parameters
        ----------
        row : dict
            The JSON object, without problems.
        text : str
            Written without ``--json``, unless the work failed before it began.
        complete : bool
            Whether all went well.

        Raises
        ------
        typer.Exit
            With the command's exit code, unless all went well.
        """
        if self._as_json:
            row = row | {"interrupted": self._interrupted, "problems": self.problems}
            write_json(row | {"problems_left_out": self._problems_left_out})
        elif self._end is None or self._has_begun:
            write_out(text)
        if self._end is not None:
            raise self._end
        if not complete:
            raise typer.Exit(PROBLEM)


class Work(Generic[_Report]):
    """Work of a command on many objects, counted in a report that its threads share.

    Parameters
    ----------
    report : Report
        Has a number for each count, among them ``bad``, ``gone`` and ``failed``.
    display : Display
        Shows each change of the report, and the problems.
    pauses : Sequence of float, optional
        Seconds between the attempts; :data:`PAUSES` when absent.

    Attributes
    ----------
    report : Report
    stop : threading.Event
        Ends all pauses; nothing is retried afterwards.
    """

    def __init__(
        self, report: _Report, display: Display, pauses: Sequence[float] | None = None
    ) -> None:
        self.report = report
        self.stop = threading.Event()
        self._display = display
        self._lock = threading.Lock()
        self._pauses = PAUSES if pauses is None else pauses
        self._successes = 0
        self._successes_at_last_failure = 0

    def count(self, **amounts: int) -> None:
        """Add to counts of the report, by name."""
        with self._lock:
            self._add(amounts)

    def problem(self, count: str, name: str, text: str) -> None:
        """Report what is wrong with something, and add it to a count."""
        with self._lock:
            self._display.problem(name, text)
            self._add({count: 1})

    def _add(self, amounts: dict[str, int]) -> None:
        report = self.report
        for name, amount in amounts.items():
            setattr(report, name, getattr(report, name) + amount)
        self._display.show(report.done, report.found, report.bytes)

    def run_over(self, items: Iterable[Any], action: Callable[[Any], object], threads: int) -> None:
        """Call `action` for each item, again after errors that may pass; count what goes wrong.

        Objects that are missing count as ``gone``. Any other failure counts as ``bad`` or
        ``failed``, and is reported with the item's attribute ``name``.

        Raises
        ------
        StorageError
            If the storage answers no more, or takes no objects.
        """

        def attempt(item: Any) -> None:
            try:
                error = self.attempt(lambda: action(item))
            except ObjectMissingError:
                self.count(gone=1)
            except BadObjectError as bad:
                self.problem("bad", item.name, f"{bad.kind}: {bad}")
            else:
                if error is not None:
                    self.problem("failed", item.name, str(error))

        for _ in in_parallel(attempt, items, threads, self.stop):
            pass

    def attempt(self, call: Callable[[], object]) -> StorageError | None:
        """Make a call, again after errors that may pass; return the error that remains.

        Returns None also where `stop` is set before the call has succeeded.

        Raises
        ------
        ObjectMissingError, BadObjectError, ReadOnlyStorageError, NoSpaceStorageError
            Without a retry.
        StorageError
            If the storage seems to answer no more: no call has succeeded yet, or none since another
            call failed finally.
        """
        pauses = iter(self._pauses)
        while True:
            try:
                call()
            except (
                ObjectMissingError,
                BadObjectError,
                ReadOnlyStorageError,
                NoSpaceStorageError,
            ):
                raise
            except StorageError as error:
                pause = next(pauses, None) if error.retryable else None
                if pause is not None and not self.stop.wait(pause):
                    continue
                if self.stop.is_set():
                    return None
                # Two threads may both write it: a lost update only causes more retries.
                last_failure = self._successes_at_last_failure
                self._successes_at_last_failure = self._successes
                if self._successes == last_failure and error.retryable:
                    raise
                return error
            self._successes += 1
            return None
