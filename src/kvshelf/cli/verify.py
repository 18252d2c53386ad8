"""``kvshelf verify``: verifies a shelf, a sample of it or named objects, and repairs it.

Owns the command's options, how objects are named, and the texts; :mod:`kvshelf.tools.verify` does
the work.
"""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from kvshelf.cli.codes import write_out
from kvshelf.cli.common import (
    JsonOption,
    YesOption,
    number,
    option,
    pace_text,
    summary,
)
from kvshelf.cli.progress import Display
from kvshelf.cli.shelves import (
    NamespacesOption,
    ShelfArgument,
    find_folders,
    open_found,
    place_of,
)
from kvshelf.errors import BadObjectError, ConfigError, size_text
from kvshelf.format.names import parse_path
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.naming import shown
from kvshelf.tools.verify import VerifyReport, read_header, verify_shelf
from kvshelf.urls import shown_url

_KEY: Final = re.compile(r"[0-9a-f]{4,64}", re.ASCII)
_NAME_PARTS: Final = 4  # namespace folder, group, fan-out, file
_SAMPLE: Final = re.compile(r"([0-9]{1,12})|([0-9]{1,3}(?:\.[0-9]{1,12})?)%", re.ASCII)


def verify(
    shelf: ShelfArgument = None,
    objects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OBJECT",
            help="Check only these objects: each a path, a name inside the shelf, or a key or its"
            " first characters, which mean all objects of that key.",
            show_default=False,
        ),
    ] = None,
    namespaces: NamespacesOption = None,
    sample: Annotated[
        str | None,
        option("--sample", "N|P%", "Only so many objects, or such a part, chosen at random."),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also the header of each OBJECT.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="With --yes: rename bad objects, which nobody loads then, and delete renamed"
            " objects and temporary files that are older than an hour.",
        ),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read and verify the objects of a shelf; repair what can be repaired."""
    some = _sample(sample)
    if objects and (namespaces or sample):
        raise ConfigError("found OBJECT beside --namespace or --sample; give one of them")
    if long and not objects:
        raise ConfigError("found --long without OBJECT; give both, or neither")
    if yes and not repair:
        raise ConfigError("found --yes without --repair; give both, or neither")
    report = VerifyReport()
    display = Display("verifying", as_json=as_json)
    with open_found(shelf, change=yes) as opened:
        folders = find_folders(opened, namespaces)
        names = _names(opened, objects) if objects else None
        headers = [_header(opened, name) for name in names or ()] if long else []
        if not as_json:
            write_out("".join(json.dumps(header, indent=2) + "\n" for header in headers))
        display.run(
            lambda: verify_shelf(
                opened,
                folders,
                names=names,
                sample=some,
                repair=yes,
                report=report,
                on_listed=display.listed,
                on_progress=lambda now: display.show(now.done, now.found, now.bytes),
                on_problem=display.problem,
            ),
            row=lambda: (
                asdict(report)
                | {"sound": report.sound, "shelf": opened.url, "repair": repair}
                | {"dry_run": not yes, "headers": headers}
            ),
            summary=lambda: _summary(report, repair, yes),
            complete=lambda: report.sound is True,
            again="from the beginning",
        )


# ------------------------------------------------------------------------- named objects


def _names(shelf: Shelf, wanted: Sequence[str]) -> list[str]:
    """Return the names of the objects that a user names.

    Raises
    ------
    ConfigError
        If one of them is no path of an object of the shelf, and begins not exactly one key.
    """
    found: dict[str, None] = {}
    for text in wanted:
        parts = text.split("/")
        name, root = "/".join(parts[-_NAME_PARTS:]), "/".join(parts[:-_NAME_PARTS])
        if _KEY.fullmatch(text):
            found |= dict.fromkeys(_of_key(shelf, text))
        elif parse_path(name) and (not root or place_of(root) == place_of(shelf.url)):
            found[name] = None
        else:
            raise ConfigError(
                f"{shown_url(text)!r} is no object of {shelf.url}; expected a path on this shelf,"
                " or a key or how one begins"
            )
    return list(found)


def _of_key(shelf: Shelf, text: str) -> list[str]:
    """Return the names of all objects of the one key that begins with a text."""
    found = [each for each in shelf.objects() if each.parsed.key.hex().startswith(text)]
    keys = sorted({each.parsed.key.hex() for each in found})
    if not keys:
        raise ConfigError(f"no key on {shelf.url} begins with {text}")
    if len(keys) > 1:
        raise ConfigError(
            f"{len(keys)} keys on {shelf.url} begin with {text}: {shown(keys)}; give more of one"
        )
    return [each.name for each in found]


def _header(shelf: Shelf, name: str) -> dict[str, Any]:
    """Return what the header of an object says, as far as it can be read."""
    with shelf.backend.open(name) as reader:
        row: dict[str, Any] = {"name": name, "size": reader.size}
        with contextlib.suppress(BadObjectError):  # it is verified afterwards
            row |= read_header(reader)
    return row


# ------------------------------------------------------------------------------- the whole


def _sample(text: str | None) -> Callable[[int], int]:
    """Return what says how many objects of how many ``--sample`` means."""
    if text is None:
        return lambda count: count
    found = _SAMPLE.fullmatch(text)
    if found is None or float(found[2] or 0) > 100:
        raise ConfigError(
            f"--sample: found {text!r}; expected a number of objects such as 1000, or a part of"
            " them such as 1% or 0.1%"
        )
    if found[1]:
        return lambda count: min(count, int(found[1]))
    share = float(found[2]) / 100
    return lambda count: round(count * share) or min(1, count)


def _summary(report: VerifyReport, repair: bool, yes: bool) -> str:
    def mended(what: str, count: int, done: str) -> str:
        would = f"{what}, to be {done} by --yes" if repair else what
        return f"{what}, {count} {done}" if yes else would

    leftovers = f"leftovers ({size_text(report.leftover_bytes)})"
    return summary(
        [
            f"verified {report.done} of {report.found} objects in"
            f" {number(report.namespaces, 'namespace')}, {size_text(report.bytes)} in"
            f" {pace_text(report.bytes, report.seconds)}: {report.intact} intact"
        ],
        (report.unverified, "not verified, as the record of their namespace is no use"),
        (report.bad, mended("bad", report.moved, "moved aside")),
        (report.failed, "failed"),
        (report.gone, "gone meanwhile"),
        (report.incomplete, "incomplete chunks, of which objects are missing"),
        (report.descriptions, "namespace.json missing or damaged"),
        (report.reserved, "pins that cannot be read"),
        (report.unlisted, "folders that cannot be listed"),
        (report.leftovers, mended(leftovers, report.removed, "deleted")),
    )
