"""``kvshelf show``: shows one object and verifies it.

If the namespace record lies beside the object, the whole file is verified exactly as by a load.
Without the record, the tensors are compared with the hashes in the header. A safetensors file of
another program has no hashes, and is only shown.
"""

from __future__ import annotations

import os
import re
import sys
from dataclasses import asdict, dataclass, field
from itertools import islice
from typing import Annotated, Any

import typer
from rich.console import Console

from kvshelf.backends import Backend, Reader
from kvshelf.cli.common import (
    PROBLEM,
    JsonOption,
    find_shelf,
    open_patiently,
    size_text,
    write_json,
)
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectMissingError,
    ObjectNameError,
    printable,
)
from kvshelf.format.invalid import describe_header, header_length
from kvshelf.format.names import ParsedName, parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import read_namespace
from kvshelf.tools.naming import shown
from kvshelf.tools.verify import check_own_hashes
from kvshelf.urls import shown_url

_KEY = re.compile(r"[0-9a-f]{4,64}", re.ASCII)
#: Objects of a key that an error names.
_MOST_OBJECTS = 10
_NAME_PARTS = 4  # namespace folder, group, fan-out, file


@dataclass(frozen=True, slots=True)
class _Place:
    """The location of an object: the root of its storage, its name, and the parsed name."""

    url: str
    storage_options: dict[str, Any]
    name: str
    parsed: ParsedName | None


@dataclass(slots=True)
class _Report:
    """The properties of an object; `checked` is ``all``, ``hashes`` or ``nothing``."""

    object: str
    size: int
    data_offset: int = 0
    metadata: dict[str, str] = field(default_factory=dict)
    tensors: list[dict[str, Any]] = field(default_factory=list)
    checked: str = "nothing"
    problem: str | None = None


def show(
    object_: Annotated[
        str,
        typer.Argument(
            metavar="OBJECT", help="A path, a URL, a name as `ls` prints it, or the begin of a key."
        ),
    ],
    shelf: Annotated[str | None, typer.Option("--shelf")] = None,
    as_json: JsonOption = False,
) -> None:
    """Show one object: header, metadata, tensors, and whether its bytes are intact."""
    place = _locate(object_, shelf)
    with (
        open_patiently(place.url, place.storage_options) as opened,
        opened.backend.open(place.name) as reader,
    ):
        report = _examine(opened.backend, place, reader)
    if as_json:
        write_json(asdict(report))
    else:
        _print(report)
    if report.problem is not None:
        raise typer.Exit(PROBLEM)


def _locate(text: str, shelf: str | None) -> _Place:
    root, name = _split(text)
    parsed = parse_path(name)
    if _KEY.fullmatch(text) and not os.path.lexists(text):
        return _of_key(text, shelf)
    relative = parsed is not None and not root and not text.startswith("/")
    if relative and (shelf is not None or not os.path.exists(text)):
        url, options = find_shelf(shelf)
        return _Place(url, options, name, parsed)
    if shelf is not None:
        raise ConfigError(
            "--shelf needs an object's name as printed by `kvshelf ls`; "
            f"{shown_url(text)!r} is a path or not an object"
        )
    if parsed is not None:
        # The root of "/" + name is "/"; that of a relative name is the working directory.
        url, options = find_shelf(root or ("/" if text.startswith("/") else "."))
        return _Place(url, options, name, parsed)
    if not os.path.lexists(text):
        raise ConfigError(
            f"{shown_url(text)!r} is neither a file nor the name of an object; "
            "expected a name as printed by `kvshelf ls --namespace X`"
        )
    folder, base = os.path.split(os.path.abspath(text))
    return _Place(folder, {}, base, None)


def _of_key(text: str, shelf: str | None) -> _Place:
    """Return the place of the one object whose key begins with a text."""
    url, options = find_shelf(shelf)
    with open_patiently(url, options) as opened:
        every = (each for each in opened.objects() if each.parsed.key.hex().startswith(text))
        found = list(islice(every, _MOST_OBJECTS))
        if len(found) == 1:
            return _Place(url, options, found[0].name, found[0].parsed)
        names = shown([each.name for each in found])
        raise ConfigError(f"{text} begins the keys of several objects, or of none: {names}")


def _split(text: str) -> tuple[str, str]:
    """Split a path or URL into the root and the object's name."""
    parts = text.split("/")
    return "/".join(parts[:-_NAME_PARTS]), "/".join(parts[-_NAME_PARTS:])


def _examine(backend: Backend, place: _Place, reader: Reader) -> _Report:
    report = _Report(f"{backend.url.rstrip('/')}/{place.name}", reader.size)
    try:
        start = _read(reader, 0, min(8, reader.size))
        header = _read(reader, 0, min(8 + header_length(start), reader.size))
        found = describe_header(header)
        report.data_offset = found["data_offset"]
        report.metadata = found["metadata"]
        report.tensors = found["tensors"]
        fmt = None if place.parsed is None else _format(backend, place.parsed)
        if place.parsed is not None and fmt is not None:
            report.checked = "all"
            fmt.of_name(place.parsed).check_named(reader, place.parsed)
        else:
            report.checked = "hashes"
            if not check_own_hashes(reader, found):
                report.checked = "nothing"
    except BadObjectError as error:
        report.problem = f"{type(error).__name__}: {error}"
    except ObjectNameError as error:
        report.problem = str(error)
    return report


def _read(reader: Reader, offset: int, length: int) -> bytes:
    data = bytearray(length)
    count = reader.read_into(memoryview(data), offset)
    return bytes(data[:count])


def _format(backend: Backend, parsed: ParsedName) -> ObjectFormat | None:
    """Return the format of an object's namespace, None without a valid record beside it."""
    folder = str(parsed.namespace)
    try:
        namespace = read_namespace(backend, folder)
        if not folder.endswith(f"-{namespace.digest.hex()[:16]}"):
            return None
        return ObjectFormat(namespace)
    except (ObjectMissingError, ValueError):  # also NotRegularError and ConfigError
        return None


_VERDICTS = {
    "all": "intact: header, size and every tensor are what they must be",
    "hashes": "tensors match their hashes (no namespace.json to compare the header with)",
    "nothing": "not checked: it holds no hashes of kvshelf",
}


def _print(report: _Report) -> None:
    console = Console(highlight=False, soft_wrap=True)
    console.print(report.object, style="bold", markup=False)
    rows = {
        "size": f"{report.size} bytes ({size_text(report.size)})",
        "data offset": str(report.data_offset),
        **{name: value for name, value in report.metadata.items() if name != "xxh3"},
    }
    for name, value in rows.items():
        sys.stdout.write(f"  {printable(name):<12} {printable(value)}\n")
    if report.tensors:
        hashes = report.metadata.get("xxh3", "").split(",")
        table = [["tensor", "dtype", "shape", "bytes", "xxh3"]]
        for number, tensor in enumerate(report.tensors):
            first, last = tensor["data_offsets"]
            table.append(
                [
                    printable(tensor["name"]),
                    printable(tensor["dtype"]),
                    " x ".join(map(str, tensor["shape"])),
                    str(last - first),
                    printable(hashes[number]) if number < len(hashes) else "",
                ]
            )
        widths = [max(map(len, column)) for column in zip(*table, strict=True)]
        for row in table:
            cells = (cell.ljust(width) for cell, width in zip(row, widths, strict=True))
            sys.stdout.write("  " + "  ".join(cells).rstrip() + "\n")
    if report.problem is None:
        console.print(_VERDICTS[report.checked], style="green", markup=False)
    else:
        console.print(printable(report.problem), style="red", markup=False)
