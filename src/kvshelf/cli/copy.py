"""``kvshelf copy``: copies a shelf, or a part of it.

Owns the command's options and the summary; :mod:`kvshelf.tools.copying` does the work.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from kvshelf.cli.common import (
    PATIENT,
    DryRunOption,
    JobsOption,
    JsonOption,
    is_local,
    json_object,
    open_patiently,
    pace_text,
    read_text,
    size_text,
    summary,
)
from kvshelf.cli.namespaces import NamespacesOption
from kvshelf.cli.progress import Display
from kvshelf.cli.values import moment
from kvshelf.config import Config
from kvshelf.errors import ConfigError
from kvshelf.format.namespace import slugify
from kvshelf.shelf.shelf import open_shelf
from kvshelf.tools.copying import CopyReport, Selection, copy_shelf
from kvshelf.tools.prompts import Prompt, read_prompts

_WHEN = "An age (90s, 30m, 12h, 7d, 2w) or a date (2026-01-31, 2026-01-31T12:00)."


def copy(
    source: Annotated[str, typer.Argument(metavar="SRC", help="Directory or URL to copy from.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Directory or URL to copy to.")],
    namespaces: NamespacesOption = None,
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
    prompts: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Only the chunks of these prompts: per line a list of token ids, or an object "
            "with tokens and cache_salt.",
        ),
    ] = None,
    jobs: JobsOption = None,
    verify_existing: Annotated[
        bool,
        typer.Option(
            "--verify-existing", help="Verify the objects that DST has, and replace bad ones."
        ),
    ] = False,
    dry_run: DryRunOption = False,
    source_options: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="storage_options of SRC: a JSON object in a file, as others can read command"
            " lines.",
        ),
    ] = None,
    target_options: Annotated[
        Path | None, typer.Option(metavar="FILE", help="storage_options of DST.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Copy a shelf, or a part of it: verified, in parallel, and only missing objects."""
    selection = Selection(
        tuple(namespaces or ()),
        tuple(slugify(name) for name in models or ()),
        None if since is None else moment(since, "--since"),
        None if until is None else moment(until, "--until"),
        None if prompts is None else _token_prompts(prompts),
    )
    of_source = _options(source, source_options, "--source-options")
    of_target = _options(target, target_options, "--target-options")
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
        if from_.url == to.url and of_source == of_target:
            raise ConfigError(f"SRC and DST are both {from_.url}; expected two places")
        display.run(
            lambda: copy_shelf(
                from_,
                to,
                selection,
                jobs=jobs,
                verify_existing=verify_existing,
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


def _options(url: str, file: Path | None, option: str) -> dict[str, Any]:
    """Return the options of one side: from a file, or the configured."""
    if file is not None:
        return json_object(read_text(file, option), option)
    # The configured options belong to a URL; a directory uses none of them.
    return {} if is_local(url) else Config.load({"shared_storage_path": url}).storage_options


def _token_prompts(path: Path) -> list[Prompt]:
    prompts = read_prompts(path)
    for prompt in prompts:
        if prompt.tokens is None:
            raise ConfigError(
                f"{path}: line {prompt.line} is text; expected token ids, because a copy has no "
                "tokenizer"
            )
    return prompts


def _summary(report: CopyReport, dry_run: bool) -> str:
    kinds = report.windows or report.states
    return summary(
        [
            f"{'would copy' if dry_run else 'copied'} {report.copied} objects, "
            f"{size_text(report.bytes)}"
            + (f" ({report.windows} of windows, {report.states} of states)" if kinds else "")
            + ("" if dry_run else f" in {pace_text(report.bytes, report.seconds)}"),
            f"{report.existed} there already",
        ],
        (report.repaired, "of the copied in the place of bad ones"),
        (report.bad, "bad, left out"),
        (report.failed, "failed"),
        (report.gone, "gone meanwhile"),
        (report.skipped_namespaces, "namespaces left out"),
    )
