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
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvshelf.cli.codes import PROBLEM
from kvshelf.cli.common import exit_code, interruption, message, size_text, write_json
from kvshelf.errors import StorageError, printable

#: Most problems that are kept for the JSON of a command.
_MOST_PROBLEMS: Final = 100_000
#: Files of a listing between two changes of what is shown.
_FILES: Final = 1000


class Display:
    """The progress bar of a command, and the problems that it finds.

    Parameters
    ----------
    doing : str
        What is done, such as ``copying``.
    as_json : bool
        Write one JSON object at the end, with the problems in it; otherwise print these at once.
    things : str
        What it is done to.
    """

    def __init__(self, doing: str, *, as_json: bool, things: str = "objects") -> None:
        self._problems: list[dict[str, Any]] = []
        self._left_out = 0
        self._listed = 0
        self._json = as_json
        self._doing = doing
        self._things = things
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[count]}"),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task(doing, total=None, amount="", count="")

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def listed(self) -> None:
        """Show that one more file was listed."""
        self._listed += 1
        if self._listed % _FILES == 0:
            self._bar.update(self._task, description="listing", count=f"{self._listed} files")

    def stage(self, text: str) -> None:
        """Show what is done before the objects."""
        self._bar.update(self._task, description=text)

    def show(self, done: int, total: int, nbytes: int | None = None) -> None:
        """Show how many objects of how many are done, and the bytes of them."""
        self._bar.update(
            self._task,
            description=self._doing,
            completed=done,
            total=total,
            count=f"{done}/{total} {self._things}",
            amount="" if nbytes is None else size_text(nbytes),
        )

    def problem(self, name: str, text: str, **more: object) -> None:
        """Print what is wrong with something, or keep it; `more` is for JSON only."""
        if not self._json:
            self._console.print(f"{printable(name)}: {printable(text)}", style="red", markup=False)
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
    ) -> None:
        """Do the work of a command, write what was done however it ends, and end the command.

        Parameters
        ----------
        work : Callable
            Ends early with KeyboardInterrupt.
        row : Callable
            Returns the JSON object, without problems.
        summary : Callable
            Returns the text that is written without ``--json``.
        complete : Callable
            Returns whether all went well.

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
            ended, interrupted = interruption(), True
        except StorageError as error:
            message(str(error))
            ended = typer.Exit(exit_code(error))
        if self._json:
            write_json(
                row()
                | {
                    "interrupted": interrupted,
                    "problems": self._problems,
                    "problems_left_out": self._left_out,
                }
            )
        else:
            sys.stdout.write(summary())
        if ended is not None:
            raise ended
        if not complete():
            raise typer.Exit(PROBLEM)
