"""What commands over many objects show meanwhile and at their end.

Owns the progress bar on standard error, which there is on a terminal only, the lines about problems
above it, and how such a command ends: done, interrupted, or because the storage failed. The methods
of :class:`Display` may be called on any thread, one call at a time.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any, Final

import typer

from kvshelf.cli.codes import GIVEN, PROBLEM, write_out
from kvshelf.cli.common import exit_code, interruption, message, told, write_json
from kvshelf.errors import StorageError, printable, size_text

#: Most problems that are kept for the JSON of a command.
_MOST_PROBLEMS: Final = 100_000


class Display:
    """The progress bar of a command, and the problems that it finds.

    Parameters
    ----------
    doing : str
        What is done, such as ``copying``.
    as_json : bool
        Write one JSON object at the end, with the problems in it; otherwise print these at once.
    """

    def __init__(self, doing: str, *, as_json: bool) -> None:
        self._problems: list[dict[str, Any]] = []
        self._left_out = 0
        self._listed = 0
        self._begun = False
        self._json = as_json
        self._doing = doing
        self._bar: Any = None
        if sys.stderr.isatty() and not GIVEN["quiet"]:
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
        self._listed += files
        self.stage(f"listing: {self._listed} files")

    def show(self, done: int, total: int, nbytes: int | None = None) -> None:
        """Show how many things of how many are done, and the bytes of them."""
        self._begun = True
        amount = "" if nbytes is None else f", {size_text(nbytes)}"
        self.stage(f"{self._doing}: {done}/{total}{amount}", completed=done, total=total)

    def stage(self, text: str, **fields: Any) -> None:
        """Show what is done now."""
        if self._bar is not None:
            self._bar.update(0, description=text, **fields)

    def problem(self, name: str, text: str, **more: object) -> None:
        """Print what is wrong with something, or keep it; `more` is for JSON only."""
        if not self._json:
            # The bar, while there is one, stands in for standard error.
            sys.stderr.write(f"{printable(name)}: {printable(text)}\n")
        elif len(self._problems) < _MOST_PROBLEMS:
            self._problems.append({"name": name, "problem": text, **more})
        else:
            self._left_out += 1

    def run(
        self,
        work: Callable[[], object],
        *,
        row: Callable[[], dict[str, Any]],
        summary: Callable[[], str],
        complete: Callable[[], bool],
        again: str = "to continue",
    ) -> None:
        """Do the work of a command, write what was done however it ends, and end the command.

        Parameters
        ----------
        work : Callable
            Ends early with KeyboardInterrupt.
        row : Callable
            Returns the JSON object, without problems.
        summary : Callable
            Returns the text that is written without ``--json``, unless the work failed before it
            began.
        complete : Callable
            Returns whether all went well.
        again : str
            Why the command is started again after an interrupt.

        Raises
        ------
        typer.Exit
            With the command's exit code, unless all went well.
        """
        ended, interrupted = None, False
        try:
            with self:
                work()
        except KeyboardInterrupt:
            ended, interrupted = interruption(again), True
        except StorageError as error:
            message(told(error))
            ended = typer.Exit(exit_code(error))
        if self._json:
            more = {"interrupted": interrupted, "problems": self._problems}
            write_json(row() | more | {"problems_left_out": self._left_out})
        elif ended is None or self._begun:
            write_out(summary())
        if ended is None and not complete():
            ended = typer.Exit(PROBLEM)
        if ended is not None:
            raise ended
