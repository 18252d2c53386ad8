"""``kvshelf ls``: lists the namespaces of a shelf, or the objects of one namespace.

Rows are written while the shelf is listed; the listing is not kept in memory.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass, field
from typing import Annotated, Any

import typer

from kvshelf.cli.common import (
    JsonOption,
    ShelfArgument,
    columns,
    namespace_folder,
    open_found,
    size_text,
    time_text,
    write,
)
from kvshelf.errors import printable
from kvshelf.format.kinds import FULL, KINDS, Kind
from kvshelf.shelf.shelf import NamespaceInfo, Shelf, ShelfObject


def ls(
    shelf: ShelfArgument = None,
    namespace: Annotated[
        str | None,
        typer.Option(
            "--namespace",
            "-n",
            help="Objects of this namespace: its folder, its 16 hex, or how either begins.",
        ),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Count each namespace's objects and bytes.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """List the namespaces of a shelf, or the objects of one; --json writes one object per line."""
    with open_found(shelf) as opened:
        if namespace is None:
            _namespaces(opened, long, as_json)
        else:
            _objects(opened, namespace_folder(opened, namespace), as_json)


def _namespaces(shelf: Shelf, long: bool, as_json: bool) -> None:
    count = 0
    for info in shelf.namespaces():
        usage = _usage(shelf, info.folder) if long else None
        if not count and not as_json:
            head = _row("LAYERS", "HEADS", "KV DTYPE", "CHUNK", "SHARDS", "")
            sys.stdout.write(head.rstrip("\n") + (_USAGE_HEAD if long else "") + "NAMESPACE\n")
        write(as_json, _namespace_json, _namespace_row, info, usage)
        sys.stdout.flush()
        count += 1
    if not count and not as_json:
        sys.stdout.write(f"{shelf.url} holds no namespaces yet\n")


@dataclass(slots=True)
class _Usage:
    """Objects and bytes of a namespace, also by kind."""

    count: int = 0
    size: int = 0
    kinds: dict[Kind, tuple[int, int]] = field(default_factory=dict)

    def add(self, found: ShelfObject) -> None:
        kind = found.parsed.kind
        count, size = self.kinds.get(kind, (0, 0))
        self.kinds[kind] = count + 1, size + found.size
        self.count += 1
        self.size += found.size

    def by_kind(self) -> str:
        """Return the counts of each kind as text; empty if all objects are of kind full."""
        if not self.kinds.keys() - {FULL}:
            return ""
        rows = ((kind, *self.kinds[kind]) for kind in KINDS if kind in self.kinds)
        return "  (" + ", ".join(f"{k} {n}: {size_text(size)}" for k, n, size in rows) + ")"


def _usage(shelf: Shelf, folder: str) -> _Usage:
    usage = _Usage()
    for found in shelf.objects(folder):
        usage.add(found)
    return usage


def _namespace_json(info: NamespaceInfo, usage: _Usage | None) -> dict[str, Any]:
    row: dict[str, Any] = {"namespace": info.folder, "problem": info.problem}
    if info.namespace is not None:
        row["digest"] = info.namespace.digest.hex()
        row["record"] = dict(info.namespace.record)
    if usage is not None:
        row["objects"], row["bytes"] = usage.count, usage.size
        row["kinds"] = {
            kind: {"objects": count, "bytes": size} for kind, (count, size) in usage.kinds.items()
        }
    return row


_row = columns(6, 5, -10, 5, 6, 0)
_USAGE_HEAD = f"{'OBJECTS':>8}  {'SIZE':>10}  "


def _namespace_row(info: NamespaceInfo, usage: _Usage | None) -> str:
    record = info.namespace.record if info.namespace else {}
    fields = ("layers", "kv_heads", "kv_dtype", "chunk_size", "shards")
    shown = (printable(str(record.get(field, "?"))) for field in fields)
    counted = "" if usage is None else f"{usage.count:>8}  {size_text(usage.size):>10}  "
    row = _row(*shown, counted + info.folder).rstrip("\n")
    if usage is not None:
        row += usage.by_kind()
    if info.problem:
        row += f"  ({printable(info.problem)})"
    return row + "\n"


_object_line = columns(10, -16, 6, -6, 7, 0)


def _objects(shelf: Shelf, folder: str, as_json: bool) -> None:
    usage = _Usage()
    for found in shelf.objects(folder):
        if not usage.count and not as_json:
            sys.stdout.write(_object_line("SIZE", "WRITTEN", "CHUNK", "KIND", "SHARD", "NAME"))
        write(as_json, _object_json, _object_row, found)
        usage.add(found)
    if not as_json:
        sys.stdout.write(f"{usage.count} objects, {size_text(usage.size)}{usage.by_kind()}\n")


def _object_json(found: ShelfObject) -> dict[str, Any]:
    parsed = found.parsed
    return {
        "name": found.name,
        "namespace": parsed.namespace,
        "group": parsed.salt_group,
        "key": parsed.key.hex(),
        "chunk": parsed.index,
        "tail_tokens": parsed.tail_tokens,
        "kind": parsed.kind,
        "shard": parsed.shard,
        "shards": parsed.shards,
        "size": found.size,
        "mtime": found.mtime,
        "atime": found.atime,
    }


def _object_row(found: ShelfObject) -> str:
    parsed = found.parsed
    tail = "" if parsed.tail_tokens is None else f"t{parsed.tail_tokens}"
    chunk, shard = f"{parsed.index}{tail}", f"{parsed.shard}of{parsed.shards}"
    size, written = size_text(found.size), time_text(found.mtime)
    return _object_line(size, written, chunk, parsed.kind, shard, found.name)
