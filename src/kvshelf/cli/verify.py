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
    ShelfOption,
    find_shelf,
    open_to_change,
    open_to_look,
    size_text,
)
from kvshelf.cli.namespaces import NamespacesOption, find_folders
from kvshelf.cli.progress import Display
from kvshelf.errors import ConfigError
from kvshelf.tools.verify import Sample, VerifyReport, verify_shelf

_SAMPLE: Final = re.compile(r"([0-9]{1,12})|([0-9]{1,3}(?:\.[0-9]{1,12})?)%", re.ASCII)


def verify(
    shelf: ShelfArgument = None,
    shelf_option: ShelfOption = None,
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
    url, options = find_shelf(shelf, shelf_option)
    report = VerifyReport()
    display = Display("verifying", as_json=as_json)
    with open_to_change(url, options) if repair else open_to_look(url, options) as opened:
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
    rate = report.bytes / report.seconds if report.seconds else 0.0
    parts = [
        f"verified {report.done} of {report.found} objects in {report.namespaces} namespaces, "
        f"{size_text(report.bytes)} in {report.seconds:.1f} s ({size_text(int(rate))}/s): "
        f"{report.intact} intact",
    ]
    for count, mended, what, done in (
        (report.unverified, 0, "match their own hashes, without a record of their namespace", ""),
        (report.bad, report.moved, "bad", "moved aside"),
        (report.failed, 0, "failed", ""),
        (report.gone, 0, "gone meanwhile", ""),
        (report.descriptions, report.rewritten, "namespace.json missing or damaged", "rewritten"),
        (report.reserved, 0, "damaged in .kvshelf", ""),
        (report.other_versions, 0, "namespaces of other versions left alone", ""),
        (
            report.orphans,
            report.removed,
            f"orphans ({size_text(report.orphan_bytes)})",
            "deleted",
        ),
    ):
        if count:
            parts.append(f"{count} {what}" + (f", {mended} {done}" if repair and done else ""))
    return "; ".join(parts) + "\n"
