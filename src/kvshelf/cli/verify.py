"""``kvshelf verify``: verifies a shelf, or a sample of it, and repairs it.

Owns the command's options and the summary; :mod:`kvshelf.tools.verify` does the work.
"""

from __future__ import annotations

import re
from dataclasses import asdict
from typing import Annotated, Final

import typer

from kvshelf.cli.common import (
    DryRunOption,
    JobsOption,
    JsonOption,
    ShelfArgument,
    open_found,
    pace_text,
    size_text,
    summary,
)
from kvshelf.cli.namespaces import NamespacesOption, find_folders
from kvshelf.cli.progress import Display
from kvshelf.errors import ConfigError
from kvshelf.tools.verify import Sample, VerifyReport, verify_shelf

_SAMPLE: Final = re.compile(r"([0-9]{1,12})|([0-9]{1,3}(?:\.[0-9]{1,12})?)%", re.ASCII)


def verify(
    shelf: ShelfArgument = None,
    namespaces: NamespacesOption = None,
    sample: Annotated[
        str | None,
        typer.Option(
            metavar="N|P%",
            help="Only so many objects, or such a part of them, chosen at random.",
            show_default=False,
        ),
    ] = None,
    jobs: JobsOption = None,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Move bad objects aside, write namespace.json again where its bytes are known,"
            " delete temporaries of killed writers and old quarantine.",
        ),
    ] = False,
    dry_run: DryRunOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read and verify the objects of a shelf; repair what can be repaired."""
    wanted = _sample(sample)
    repair = repair and not dry_run
    report = VerifyReport()
    display = Display("verifying", as_json=as_json)
    with open_found(shelf, change=repair) as opened:
        folders = find_folders(opened, namespaces)
        display.run(
            lambda: verify_shelf(
                opened,
                folders,
                sample=wanted,
                jobs=jobs,
                repair=repair,
                report=report,
                on_listed=display.listed,
                on_progress=lambda now: display.show(now.done, now.found, now.bytes),
                on_problem=display.problem,
            ),
            row=lambda: (
                asdict(report)
                | {
                    "sound": report.sound,
                    "shelf": opened.url,
                    "repair": repair,
                    "dry_run": not repair,
                }
            ),
            summary=lambda: _summary(report, repair),
            complete=lambda: report.sound,
        )


def _sample(text: str | None) -> Sample:
    if text is None:
        return Sample()
    found = _SAMPLE.fullmatch(text)
    if found is None or (found[2] is not None and float(found[2]) > 100):
        raise ConfigError(
            f"--sample: found {text!r}; expected a number of objects such as 1000, or a part of"
            " them such as 1% or 0.1%"
        )
    if found[1] is not None:
        return Sample(count=int(found[1]))
    return Sample(share=float(found[2]) / 100)


def _summary(report: VerifyReport, repair: bool) -> str:
    def mended(what: str, count: int, done: str) -> str:
        return f"{what}, {count} {done}" if repair else what

    orphans = f"orphans ({size_text(report.orphan_bytes)})"
    lost = "namespace.json missing or damaged"
    return summary(
        [
            f"verified {report.done} of {report.found} objects in {report.namespaces} namespaces, "
            f"{size_text(report.bytes)} in {pace_text(report.bytes, report.seconds)}: "
            f"{report.intact} intact",
        ],
        (report.unverified, "match their own hashes, without a record of their namespace"),
        (report.bad, mended("bad", report.moved, "moved aside")),
        (report.failed, "failed"),
        (report.gone, "gone meanwhile"),
        (report.descriptions, mended(lost, report.rewritten, "rewritten")),
        (report.reserved, "damaged in .kvshelf"),
        (report.other_versions, "namespaces of other versions left alone"),
        (report.orphans, mended(orphans, report.removed, "deleted")),
    )
