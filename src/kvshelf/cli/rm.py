"""``kvshelf rm``: deletes chosen objects of a shelf; without ``--yes`` it only says which.

Owns the command's options, the table and the summary. :mod:`kvshelf.tools.remove` selects objects,
and :mod:`kvshelf.capacity.deletion` deletes them.
"""

from __future__ import annotations

import errno
import sys
from typing import Annotated, Any

import typer

from kvshelf.capacity.deletion import Outcome, carry_out
from kvshelf.capacity.parallel import PAUSES
from kvshelf.capacity.rules import Choice
from kvshelf.cli.common import (
    JobsOption,
    JsonOption,
    ShelfArgument,
    YesOption,
    columns,
    message,
    open_found,
    size_text,
    summary,
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
from kvshelf.cli.values import age
from kvshelf.errors import ConfigError, ReadOnlyStorageError, printable
from kvshelf.tools.naming import group_named
from kvshelf.tools.remove import Found, find_objects


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
    yes: YesOption = False,
    jobs: JobsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Delete objects of namespaces, a salt group, prompts or an age; first only say which."""
    chosen = salt_group(group, salt_file)
    unused = None if unused_for is None else age(unused_for, "--unused-for")
    if unused == 0:
        raise ConfigError(
            f"--unused-for: found {unused_for}, which chooses everything; expected an age above"
            " zero, or no --unused-for to choose without regard to age"
        )
    wanted = None if prompts is None else token_prompts(prompts, model)
    if not namespaces and chosen is None and wanted is None and unused is None:
        raise ConfigError(
            "found nothing to select by; give --namespace, --group, --salt-file, --prompts or"
            " --unused-for"
        )
    outcome = Outcome()
    display = Display("deleting", as_json=as_json)
    with open_found(shelf, change=yes) as opened:
        folders = find_folders(opened, namespaces)
        chosen = None if chosen is None else group_named(opened, chosen, folders)
        # What engines use meanwhile is deleted as well, unless an age was given.
        choice = Choice(
            chosen, unused, pinned, leftovers=chosen is None and wanted is None and unused is None
        )
        with Display("listing", as_json=as_json) as listing:
            found = find_objects(opened, choice, folders, wanted, on_listed=listing.listed)
        for name, problem in found.unreadable_pins.items():
            message(f"the pin {name} pins nothing: {printable(problem)}")
        if found.plan.problem is not None:
            message(found.plan.problem)
        if not as_json:
            sys.stdout.write(_table(found))
        total = found.objects + len(found.plan.leftovers)

        def delete() -> None:
            if not yes:
                return
            if opened.backend.properties.read_only:
                raise ReadOnlyStorageError(errno.EROFS, "nothing can be deleted", opened.url)
            carry_out(
                opened.backend,
                found.plan,
                pauses=PAUSES,
                threads=jobs,
                on_progress=lambda now: display.show(now.done, total, now.nbytes),
                on_problem=display.problem,
                outcome=outcome,
            )
            if not outcome.finished and outcome.error is not None and outcome.error.retryable:
                raise outcome.error

        display.run(
            delete,
            row=lambda: _json(found, outcome, yes) | {"shelf": opened.url},
            summary=lambda: _summary(found, outcome, yes=yes),
            complete=lambda: not outcome.failed and found.plan.problem is None,
        )


_row = columns(10, 10, -16, 0)


def _table(found: Found) -> str:
    if not found.parts:
        return ""
    lines = [_row("OBJECTS", "SIZE", "LAST USED", "NAMESPACE/GROUP")]
    for part in found.parts:
        used, where = time_text(part.last_used), f"{part.folder}/{part.group}"
        lines.append(_row(part.objects, size_text(part.bytes), used, where))
    return "".join(lines) + "\n"


def _summary(found: Found, outcome: Outcome, *, yes: bool) -> str:
    leftovers, pinned = found.plan.leftovers, found.plan.pinned
    if yes:
        text = f"deleted {outcome.count} files, {size_text(outcome.nbytes)}"
    else:
        text = f"would delete {found.objects} objects, {size_text(found.bytes)}"
        if leftovers:
            text += f", and {len(leftovers)} files of quarantine and markers"
    text = summary(
        [text],
        (outcome.kept.count, "used meanwhile, left"),
        (outcome.gone, "gone meanwhile"),
        (outcome.failed, "failed"),
        (pinned.count, f"({size_text(pinned.nbytes)}) pinned, left (see --pinned)"),
    )
    if not yes and (found.objects or leftovers):
        text = text.rstrip() + "; nothing was changed; --yes deletes\n"
    return text


def _json(found: Found, outcome: Outcome, yes: bool) -> dict[str, Any]:
    return {
        "dry_run": not yes,
        "objects": found.objects,
        "bytes": found.bytes,
        "leftovers": len(found.plan.leftovers),
        "pinned": found.plan.pinned.count,
        "pinned_bytes": found.plan.pinned.nbytes,
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
        "deleted": {
            "removed": outcome.count,
            "bytes": outcome.nbytes,
            "kept": outcome.kept.count,
            "gone": outcome.gone,
            "failed": outcome.failed,
        },
    }
