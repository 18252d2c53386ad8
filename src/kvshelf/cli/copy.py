"""``kvshelf copy``: copies a shelf, or a part of it.

Owns the command's options and the summary; :mod:`kvshelf.tools.copying` does the work.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshelf.cli.codes import GIVEN
from kvshelf.cli.common import DryRunOption, JsonOption, option, pace_text, summary
from kvshelf.cli.progress import Display
from kvshelf.cli.prompts import PromptsOption, token_prompts
from kvshelf.cli.shelves import (
    PATIENT,
    NamespacesOption,
    find_folders,
    is_inside,
    is_local,
    json_object,
    located,
    open_patiently,
    options_of,
    read_text,
)
from kvshelf.errors import ConfigError, size_text
from kvshelf.shelf.shelf import open_shelf
from kvshelf.tools.copying import CopyReport, copy_shelf


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or URL to copy from.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Directory or URL to copy to.")],
    namespaces: NamespacesOption = None,
    prompts: PromptsOption = None,
    dry_run: DryRunOption = False,
    source_options: Annotated[
        Path | None, option("--source-options", "FILE", "storage_options of SRC, a JSON object.")
    ] = None,
    target_options: Annotated[
        Path | None, option("--target-options", "FILE", "storage_options of DST, a JSON object.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a shelf, or a part of it: verified, in parallel, and only missing objects."""
    if GIVEN["storage_options"] is not None:
        raise ConfigError(
            "found --storage-options for two shelves; expected --source-options or --target-options"
        )
    source, target = located(source), located(target)
    of_source = options_of(source, _options(source_options, "--source-options"), target)
    of_target = options_of(target, _options(target_options, "--target-options"), source)
    # Two servers may have a bucket of the same name.
    same = of_source == of_target or is_local(source)
    if same and (is_inside(source, target) or is_inside(target, source)):
        raise ConfigError(f"SRC is {source} and DST is {target}; expected two places")
    wanted = None if prompts is None else token_prompts(prompts, None)
    report = CopyReport()
    display = Display("looking" if dry_run else "copying", as_json=as_json)
    with (
        open_patiently(source, of_source) as from_,
        open_shelf(
            target,
            storage_options=of_target,
            read_only=dry_run,
            keep_atime=True,
            deadlines=PATIENT,
        ) as to,
    ):
        folders = find_folders(from_, namespaces)
        display.run(
            lambda: copy_shelf(
                from_,
                to,
                folders,
                wanted,
                dry_run=dry_run,
                report=report,
                on_progress=lambda now: display.show(now.done, now.found, now.bytes),
                on_problem=display.problem,
            ),
            row=lambda: (
                asdict(report) | {"dry_run": dry_run, "source": from_.url, "target": to.url}
            ),
            summary=lambda: _summary(report, dry_run),
            complete=lambda: report.complete,
        )


def _options(file: Path | None, option: str) -> dict[str, Any] | None:
    return None if file is None else json_object(read_text(file, option), option)


def _summary(report: CopyReport, dry_run: bool) -> str:
    done = "" if dry_run else f" in {pace_text(report.bytes, report.seconds)}"
    return summary(
        [
            f"{'would copy' if dry_run else 'copied'} {report.copied} objects,"
            f" {size_text(report.bytes)}{done}",
            f"{report.existed} there already",
        ],
        (report.repaired, "of the copied in the place of bad ones"),
        (report.bad, "bad, left out"),
        (report.failed, "failed"),
        (report.gone, "gone meanwhile"),
        (report.skipped_namespaces, "namespaces left out"),
    )
