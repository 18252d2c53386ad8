"""``kvshelf copy``: copies a shelf, or a part of it.

Owns the command's options, the progress bar (only on a terminal, on standard error) and the
summary; :mod:`kvshelf.tools.copying` does the work.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import asdict
from datetime import datetime, timedelta
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

from kvshelf.backends import open_backend
from kvshelf.cli.common import (
    PROBLEM,
    JsonOption,
    exit_interrupted,
    is_local,
    is_missing,
    json_object,
    missing_error,
    printable,
    size_text,
    write_json,
)
from kvshelf.config import Config
from kvshelf.errors import ConfigError, StorageError
from kvshelf.format.namespace import slugify
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.tools.copying import CopyReport, Selection, copy_shelf
from kvshelf.tools.prompts import Prompt, read_prompts

#: No request waits for a copy, so slow storage has long deadlines before the breaker opens.
_DEADLINES = {"probe": 60.0, "read": 60.0, "write": 60.0, "bytes_per_second": 1e6}
_AGE = re.compile(r"(\d+(?:\.\d+)?)([smhdw])", re.ASCII)
_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 7 * 86400}

_WHEN = "An age (90s, 30m, 12h, 7d, 2w) or a date (2026-01-31, 2026-01-31T12:00)."


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or URL to copy from.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Directory or URL to copy to.")],
    namespaces: Annotated[
        list[str] | None,
        typer.Option(
            "--namespace",
            "-n",
            metavar="X",
            help="Only this namespace: its folder, or the 16 hex at the end of it. Repeatable.",
        ),
    ] = None,
    models: Annotated[
        list[str] | None,
        typer.Option(
            "--model", metavar="NAME", help="Only namespaces of models of this name. Repeatable."
        ),
    ] = None,
    since: Annotated[
        str | None, typer.Option(metavar="WHEN", help=f"Only objects written since then. {_WHEN}")
    ] = None,
    until: Annotated[
        str | None, typer.Option(metavar="WHEN", help="Only objects written before then.")
    ] = None,
    tokens: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Only the chunks of these prompts: per line a list of token ids, or an object "
            "with tokens and cache_salt.",
        ),
    ] = None,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Objects copied at once.")
    ] = None,
    verify_existing: Annotated[
        bool,
        typer.Option(
            "--verify-existing", help="Verify the objects that DST has, and replace bad ones."
        ),
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Count what would be copied; change nothing.")
    ] = False,
    source_options: Annotated[
        str | None, typer.Option(metavar="JSON", help="storage_options of SRC.")
    ] = None,
    target_options: Annotated[
        str | None, typer.Option(metavar="JSON", help="storage_options of DST.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a shelf, or a part of it: verified, in parallel, and only missing objects."""
    selection = Selection(
        tuple(name.rstrip("/") for name in namespaces or ()),
        tuple(slugify(name) for name in models or ()),
        _time(since, "--since"),
        _time(until, "--until"),
        None if tokens is None else _token_prompts(tokens),
    )
    report = CopyReport()
    display = _Display(as_json, dry_run)
    interrupted = False
    with (
        _open(source, source_options, "--source-options", read_only=True) as from_,
        _open(target, target_options, "--target-options", read_only=dry_run) as to,
    ):
        if from_.url == to.url and source_options == target_options:
            raise ConfigError(f"SRC and DST are both {from_.url}; expected two places")
        try:
            with display:
                copy_shelf(
                    from_,
                    to,
                    selection,
                    jobs=jobs,
                    verify_existing=verify_existing,
                    dry_run=dry_run,
                    report=report,
                    on_progress=display.show,
                    on_problem=display.problem,
                )
        except KeyboardInterrupt:
            interrupted = True
        except StorageError:
            if not as_json:
                sys.stdout.write(_summary(report, dry_run))
            raise
    if as_json:
        write_json(
            asdict(report)
            | {
                "dry_run": dry_run,
                "interrupted": interrupted,
                "problems": [{"name": name, "problem": text} for name, text in display.problems],
            }
        )
    else:
        sys.stdout.write(_summary(report, dry_run))
    if interrupted:
        exit_interrupted()
    if not report.complete:
        raise typer.Exit(PROBLEM)


def _open(url: str, options: str | None, name: str, *, read_only: bool) -> Shelf:
    storage_options = _options(url, options, name)
    if read_only:
        # Opening it this way creates nothing, so a missing source is detected.
        backend = open_backend(url, storage_options=storage_options, read_only=True)
        missing = is_missing(backend)
        backend.close()
        if missing and name == "--source-options":
            raise missing_error(backend)
    return open_shelf(
        url, storage_options=storage_options, read_only=read_only, deadlines=_DEADLINES
    )


def _options(url: str, text: str | None, name: str) -> dict[str, Any]:
    if text is None:
        # The configured options belong to a URL; a directory uses none of them.
        return {} if is_local(url) else Config.load({"shared_storage_path": url}).storage_options
    return json_object(text, name)


def _time(text: str | None, name: str) -> float | None:
    if text is None:
        return None
    age = _AGE.fullmatch(text)
    try:
        if age is not None:
            return time.time() - timedelta(seconds=float(age[1]) * _UNITS[age[2]]).total_seconds()
        # Without a time zone it is local time, as in listings.
        return datetime.fromisoformat(text).astimezone().timestamp()
    except (ValueError, OverflowError):
        raise ConfigError(
            f"{name}: found {text!r}; expected an age such as 12h or 7d, or a date such as "
            "2026-01-31"
        ) from None


def _token_prompts(path: Path) -> list[Prompt]:
    prompts = read_prompts(path)
    for prompt in prompts:
        if prompt.tokens is None:
            raise ConfigError(
                f"{path}: line {prompt.line} is text; expected token ids, because a copy has no "
                "tokenizer"
            )
    return prompts


class _Display:
    """The progress bar, and the objects that were not copied."""

    def __init__(self, as_json: bool, dry_run: bool) -> None:
        self.problems: list[tuple[str, str]] = []
        self._json = as_json
        self._console = Console(stderr=True, highlight=False, soft_wrap=True)
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.completed:.0f}/{task.total:.0f} objects"),
            TextColumn("{task.fields[amount]}"),
            TimeElapsedColumn(),
            console=self._console,
            transient=True,
            disable=not self._console.is_terminal,
        )
        self._task = self._bar.add_task("looking" if dry_run else "copying", total=0, amount="")

    def __enter__(self) -> _Display:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def show(self, report: CopyReport) -> None:
        self._bar.update(
            self._task,
            completed=report.done,
            total=report.found,
            amount=size_text(report.bytes),
        )

    def problem(self, name: str, text: str) -> None:
        if self._json:
            self.problems.append((name, text))
        else:
            self._console.print(f"{printable(name)}: {printable(text)}", style="red", markup=False)


def _summary(report: CopyReport, dry_run: bool) -> str:
    rate = report.bytes / report.seconds if report.seconds else 0.0
    kinds = report.windows or report.states
    parts = [
        f"{'would copy' if dry_run else 'copied'} {report.copied} objects, "
        f"{size_text(report.bytes)}"
        + (f" ({report.windows} of windows, {report.states} of states)" if kinds else "")
        + ("" if dry_run else f" in {report.seconds:.1f} s ({size_text(int(rate))}/s)"),
        f"{report.existed} there already",
    ]
    for count, what in (
        (report.repaired, "of the copied in the place of bad ones"),
        (report.bad, "bad, left out"),
        (report.failed, "failed"),
        (report.gone, "gone meanwhile"),
        (report.skipped_namespaces, "namespaces left out"),
    ):
        if count:
            parts.append(f"{count} {what}")
    return "; ".join(parts) + "\n"
