"""``kvshelf rm``: deletes chosen objects of a shelf; without ``--yes`` it only says which.

Owns the command's options, the table and the summary; :mod:`kvshelf.tools.remove` does the work.
"""

from __future__ import annotations

import sys
from dataclasses import asdict
from typing import Annotated, Any

import typer

from kvshelf.cli.common import (
    JsonOption,
    ShelfArgument,
    duration,
    find_shelf,
    message,
    open_existing,
    open_to_change,
    size_text,
    time_text,
)
from kvshelf.cli.namespaces import NamespacesOption, find_folders
from kvshelf.cli.progress import Display
from kvshelf.cli.prompts import (
    GroupOption,
    ModelOption,
    PromptsOption,
    SaltFileOption,
    salt_group,
    token_prompts,
)
from kvshelf.errors import ConfigError, printable
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.remove import Choice, Found, RemoveReport, find_objects, remove_objects


def rm(
    shelf: ShelfArgument = None,
    namespaces: NamespacesOption = None,
    group: GroupOption = None,
    salt_file: SaltFileOption = None,
    prompts: PromptsOption = None,
    model: ModelOption = None,
    unused_for: Annotated[
        str | None,
        typer.Option(
            "--unused-for",
            metavar="AGE",
            help="Only what was neither stored nor used for so long (90s, 30m, 12h, 7d, 2w).",
            show_default=False,
        ),
    ] = None,
    pinned: Annotated[
        bool, typer.Option("--pinned", help="Also what is pinned; otherwise it stays.")
    ] = False,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Delete; without it nothing is changed.")
    ] = False,
    jobs: Annotated[
        int | None, typer.Option("--jobs", "-j", min=1, help="Objects deleted at once.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Delete objects of namespaces, a salt group, prompts or an age; first only say which."""
    chosen = salt_group(group, salt_file)
    age = None if unused_for is None else duration(unused_for, "--unused-for")
    if age is not None and age <= 0:
        raise ConfigError(
            f"--unused-for: found {unused_for}, which chooses everything; expected an age above"
            " zero, or no --unused-for to choose without regard to age"
        )
    wanted = None if prompts is None else token_prompts(prompts, model)
    if not namespaces and chosen is None and wanted is None and age is None:
        raise ConfigError(
            "found nothing to select by; give --namespace, --group, --salt-file, --prompts or"
            " --unused-for"
        )
    url, options = find_shelf(shelf)
    report = RemoveReport()
    display = Display("deleting", as_json=as_json)
    with open_to_change(url, options) if yes else Shelf(open_existing(url, options)) as opened:
        folders = find_folders(opened, namespaces)
        choice = Choice(folders, chosen, wanted, age, pinned)
        with Display("listing", as_json=as_json) as listing:
            found = find_objects(opened, choice, on_listed=listing.listed)
        for name, problem in found.unreadable_pins.items():
            message(f"the pin {name} pins nothing: {printable(problem)}")
        if not as_json:
            sys.stdout.write(_table(found))
        total = found.objects + len(found.leftovers)

        def delete() -> None:
            if yes:
                remove_objects(
                    opened,
                    found,
                    jobs=jobs,
                    report=report,
                    on_progress=lambda now: display.show(now.done, total, now.bytes),
                    on_problem=display.problem,
                )

        display.run(
            delete,
            row=lambda: _json(found, report, yes),
            summary=lambda: _summary(found, report, yes=yes),
            complete=lambda: not report.failed,
        )


def _table(found: Found) -> str:
    if not found.parts:
        return ""
    lines = [f"{'OBJECTS':>10}  {'SIZE':>10}  {'LAST USED':<16}  NAMESPACE/GROUP"]
    lines += [
        f"{part.objects:>10}  {size_text(part.bytes):>10}  {time_text(part.last_used):<16}  "
        f"{part.folder}/{part.group}"
        for part in found.parts
    ]
    return "\n".join(lines) + "\n\n"


def _summary(found: Found, report: RemoveReport, *, yes: bool) -> str:
    if yes:
        parts = [f"deleted {report.removed} files, {size_text(report.bytes)}"]
    else:
        parts = [f"would delete {found.objects} objects, {size_text(found.bytes)}"]
        if found.leftovers:
            parts[0] += f", and {len(found.leftovers)} files of quarantine and markers"
    for count, what in (
        (report.kept, "used meanwhile, left"),
        (report.gone, "gone meanwhile"),
        (report.failed, "failed"),
        (found.pinned, f"({size_text(found.pinned_bytes)}) pinned, left (see --pinned)"),
    ):
        if count:
            parts.append(f"{count} {what}")
    if not yes and (found.objects or found.leftovers):
        parts.append("nothing was changed; --yes deletes")
    return "; ".join(parts) + "\n"


def _json(found: Found, report: RemoveReport, yes: bool) -> dict[str, Any]:
    return {
        "dry_run": not yes,
        "objects": found.objects,
        "bytes": found.bytes,
        "leftovers": len(found.leftovers),
        "pinned": found.pinned,
        "pinned_bytes": found.pinned_bytes,
        "parts": [
            {
                "namespace": part.folder,
                "group": part.group,
                "objects": part.objects,
                "bytes": part.bytes,
                "last_used": part.last_used,
            }
            for part in found.parts
        ],
        "unreadable_pins": found.unreadable_pins,
        "deleted": asdict(report),
    }
