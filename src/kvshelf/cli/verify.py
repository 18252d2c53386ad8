"""``kvshelf verify``: verifies a shelf, a sample of it or named objects, and repairs it.

Owns the command's options, how objects are named, and the texts; :mod:`kvshelf.tools.verify` does
the work.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import asdict
from typing import Annotated, Any, Final

import typer

from kvshelf.cli.common import (
    JobsOption,
    JsonOption,
    ShelfArgument,
    YesOption,
    is_local,
    open_found,
    pace_text,
    size_text,
    summary,
)
from kvshelf.cli.namespaces import NamespacesOption, find_folders
from kvshelf.cli.progress import Display
from kvshelf.errors import BadObjectError, ConfigError, printable
from kvshelf.format.names import parse_path
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.naming import shown
from kvshelf.tools.verify import Sample, VerifyReport, read_header, verify_shelf
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
            help="Only these: paths, names inside the shelf, or keys or how these begin, of which"
            " all objects are meant.",
            show_default=False,
        ),
    ] = None,
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
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also the header of each OBJECT.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="With --yes: move bad objects aside, write namespace.json again where its bytes"
            " are known, delete temporaries of killed writers and old quarantine.",
        ),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read and verify the objects of a shelf; repair what can be repaired."""
    wanted = _sample(sample)
    if objects and (namespaces or sample):
        raise ConfigError("found OBJECT beside --namespace or --sample; give one of them")
    if (long and not objects) or (yes and not repair):
        raise ConfigError(
            "found --long without OBJECT, or --yes without --repair; give both, or neither"
        )
    report = VerifyReport()
    display = Display("verifying", as_json=as_json)
    with open_found(shelf, change=yes) as opened:
        folders = find_folders(opened, namespaces)
        names = _names(opened, objects) if objects else None
        headers = [_header(opened, name) for name in names or ()] if long else []
        if not as_json:
            for header in headers:
                sys.stdout.write(_header_text(header))
        display.run(
            lambda: verify_shelf(
                opened,
                folders,
                names=names,
                sample=wanted,
                jobs=jobs,
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
            complete=lambda: report.sound,
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
        elif parse_path(name) is not None and (not root or _is_at(shelf.url, root)):
            found[name] = None
        else:
            raise ConfigError(
                f"{shown_url(text)!r} is no object of {shelf.url}; expected a path on this shelf,"
                " or a key or how one begins"
            )
    return list(found)


def _is_at(url: str, root: str) -> bool:
    if not is_local(url):
        return root == url.rstrip("/")
    return os.path.realpath(root.removeprefix("file://")) == os.path.realpath(url)


def _of_key(shelf: Shelf, text: str) -> list[str]:
    """Return the names of all objects of the one key that begins with a text."""
    found = [each for each in shelf.objects() if each.parsed.key.hex().startswith(text)]
    keys = sorted({each.parsed.key.hex() for each in found})
    if len(keys) != 1:
        raise ConfigError(
            f"{text} begins {len(keys)} keys on {shelf.url}: {shown(keys)}; expected one"
        )
    return [each.name for each in found]


def _header(shelf: Shelf, name: str) -> dict[str, Any]:
    """Return what the header of an object says, as far as it can be read."""
    with shelf.backend.open(name) as reader:
        row: dict[str, Any] = {"name": name, "size": reader.size}
        with contextlib.suppress(BadObjectError):  # it is verified afterwards
            row |= read_header(reader)
    return row


def _header_text(row: dict[str, Any]) -> str:
    metadata = row.get("metadata", {})
    rows = {
        "size": f"{row['size']} bytes ({size_text(row['size'])})",
        "data offset": str(row.get("data_offset", "?")),
        **{name: value for name, value in metadata.items() if name != "xxh3"},
    }
    lines = [row["name"]]
    lines += [f"  {printable(name):<12} {printable(value)}" for name, value in rows.items()]
    tensors = row.get("tensors", [])
    hashes = metadata.get("xxh3", "").split(",") + [""] * len(tensors)
    table = [["tensor", "dtype", "shape", "bytes", "xxh3"]]
    for tensor, digest in zip(tensors, hashes, strict=False):
        first, last = tensor["data_offsets"]
        shape = " x ".join(map(str, tensor["shape"]))
        cells = (tensor["name"], tensor["dtype"], shape, str(last - first), digest)
        table.append([printable(cell) for cell in cells])
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table if tensors else ():
        padded = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
        lines.append("  " + "  ".join(padded).rstrip())
    return "\n".join(lines) + "\n"


# ------------------------------------------------------------------------------- the whole


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


def _summary(report: VerifyReport, repair: bool, yes: bool) -> str:
    def mended(what: str, count: int, done: str) -> str:
        would = f"{what}, to be {done} by --yes" if repair else what
        return f"{what}, {count} {done}" if yes else would

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
