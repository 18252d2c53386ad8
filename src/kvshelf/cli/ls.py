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
    ShelfOption,
    find_shelf,
    namespace_folder,
    open_existing,
    size_text,
    time_text,
    write_json,
)
from kvshelf.errors import printable
from kvshelf.format.kinds import FULL, KINDS, Kind
from kvshelf.shelf.shelf import NamespaceInfo, Shelf, ShelfObject


def ls(
    shelf: ShelfArgument = None,
    shelf_option: ShelfOption = None,
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
    url, options = find_shelf(shelf, shelf_option)
    with Shelf(open_existing(url, options)) as opened:
        if namespace is None:
            _namespaces(opened, long, as_json)
        else:
            _objects(opened, namespace_folder(opened, namespace), as_json)


def _namespaces(shelf: Shelf, long: bool, as_json: bool) -> None:
    count = 0
    for info in shelf.namespaces():
        usage = _usage(shelf, info.folder) if long else None
        if as_json:
            write_json(_namespace_json(info, usage))
        else:
            if not count:
                sys.stdout.write(_HEAD + (_USAGE_HEAD if long else "") + "  NAMESPACE\n")
            sys.stdout.write(_namespace_row(info, usage))
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


_HEAD = f"{'LAYERS':>6}  {'HEADS':>5}  {'KV DTYPE':<10}  {'CHUNK':>5}  {'SHARDS':>6}"
_USAGE_HEAD = f"  {'OBJECTS':>8}  {'SIZE':>10}"


def _namespace_row(info: NamespaceInfo, usage: _Usage | None) -> str:
    record = info.namespace.record if info.namespace else {}

    def shown(field: str) -> str:
        return printable(str(record.get(field, "?")))

    row = (
        f"{shown('layers'):>6}  {shown('kv_heads'):>5}  {shown('kv_dtype'):<10}  "
        f"{shown('chunk_size'):>5}  {shown('shards'):>6}"
    )
    if usage is not None:
        row += f"  {usage.count:>8}  {size_text(usage.size):>10}"
    row += f"  {info.folder}"
    if usage is not None:
        row += usage.by_kind()
    if info.problem:
        row += f"  ({printable(info.problem)})"
    return row + "\n"


_OBJECTS_HEAD = f"{'SIZE':>10}  {'WRITTEN':<16}  {'CHUNK':>6}  {'KIND':<6}  {'SHARD':>7}  NAME\n"


def _objects(shelf: Shelf, folder: str, as_json: bool) -> None:
    usage = _Usage()
    for found in shelf.objects(folder):
        if as_json:
            write_json(_object_json(found))
        else:
            if not usage.count:
                sys.stdout.write(_OBJECTS_HEAD)
            sys.stdout.write(_object_row(found))
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
    return (
        f"{size_text(found.size):>10}  {time_text(found.mtime):<16}  "
        f"{f'{parsed.index}{tail}':>6}  {parsed.kind:<6}  "
        f"{f'{parsed.shard}of{parsed.shards}':>7}  {found.name}\n"
    )
