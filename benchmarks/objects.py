"""Rows ``load/*`` and ``publish/*``: one object between a buffer and a local directory.

Owns the floors: the work of a program without kvshelf on the same bytes, the same files and the
same buffer, which is reused for all samples of a row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import xxhash

from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.samples import LARGE, TINY, fill, make_chunks, make_format
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.transfer.staging import StagingPool


def _formats(settings: Settings) -> list[tuple[str, ObjectFormat]]:
    if settings.quick:
        return [("64 KiB", make_format(TINY, 2))]
    return [("4 MiB", make_format(LARGE, 8)), ("32 MiB", make_format(LARGE, 1))]


def _read_file(path: str, view: memoryview) -> None:
    """Fill `view` with a file: open, preadv, close."""
    fd = os.open(path, os.O_RDONLY)
    try:
        done = os.preadv(fd, [view], 0)
        if done != len(view):
            raise OSError(f"preadv read {done} of {len(view)} bytes of {path}")
    finally:
        os.close(fd)


def bench_load(settings: Settings) -> Iterator[Row]:
    """Measure the verified load of one object from the page cache into a staging buffer."""
    for label, fmt in _formats(settings):
        root = settings.folder(f"load-{fmt.shards}")
        with Shelf(open_backend(str(root))) as shelf:
            yield from _load_rows(settings, label, fmt, shelf, root)


def _load_rows(
    settings: Settings, label: str, fmt: ObjectFormat, shelf: Shelf, root: Path
) -> Iterator[Row]:
    [chunk] = make_chunks(fmt, 1)
    size = fmt.object_size(0)
    buffer = _staged(size)
    fmt.seal(buffer, chunk, 0)
    shelf.view(fmt).publish(ObjectRef(chunk, 0), buffer)
    path = str(root / shelf.view(fmt).name(ObjectRef(chunk, 0)))

    def read() -> None:
        _read_file(path, buffer)

    def read_and_hash() -> None:
        _read_file(path, buffer)
        xxhash.xxh3_128_digest(buffer)

    large = label == "32 MiB"
    for what, floor, text, goal in (
        ("preadv", read, "open, preadv, close", Goal(1.25) if large else None),
        (
            "preadv+xxh3",
            read_and_hash,
            "open, preadv, close, one-shot xxh3",
            None if large else Goal(1.1),
        ),
    ):
        times = measure_pairs(
            Work(lambda: shelf.view(fmt).load(ObjectRef(chunk, 0), buffer)),
            Work(floor),
            settings.pairs(51),
        )
        yield Row(
            f"load/{label.replace(' ', '')}/{what}",
            f"verified load, {label}, page cache → buffer",
            text,
            *times,
            goal=goal,
            extra={"bytes": size, "filesystem": shelf.backend.properties.filesystem},
        )


def _staged(size: int) -> memoryview:
    """Return a staging buffer of random bytes, owned by the caller."""
    buffers = StagingPool(8 * size, size).acquire_for_load()
    assert buffers is not None
    view = buffers[0].view[:size]
    fill(view)
    return view


class _FreshChunks:
    """Makes chunks with unused names, and deletes their objects."""

    def __init__(self, fmt: ObjectFormat, shelf: Shelf, root: Path) -> None:
        self._fmt = fmt
        self._shelf = shelf
        self._root = root
        self._base = make_chunks(fmt, 1)[0]
        self._number = 0
        self._written: list[str] = []

    def next(self) -> Chunk:
        """Return a chunk in the same fan-out folder as the others."""
        self._number += 1
        base = self._base
        key = base.key[:1] + self._number.to_bytes(31, "big")
        chunk = Chunk(key, base.parent, base.index, base.tokens)
        self._written.append(self._shelf.view(self._fmt).name(ObjectRef(chunk, 0)))
        return chunk

    def delete(self) -> None:
        for name in self._written:
            (self._root / name).unlink()
        self._written.clear()


class _RawFiles:
    """Writes files like a program without kvshelf."""

    def __init__(self, root: Path, view: memoryview, header: int) -> None:
        self._parts = [view[:header], view[header:]]
        self._root = root
        self._number = 0
        self._written: list[Path] = []

    def write(self) -> None:
        self._number += 1
        path = self._root / f"{self._number}.bin"
        temporary = self._root / f".{self._number}.tmp"
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            left = sum(map(len, self._parts))
            done = os.writev(fd, self._parts)
            if done != left:
                raise OSError(f"writev wrote {done} of {left} bytes")
        finally:
            os.close(fd)
        temporary.rename(path)
        self._written.append(path)

    def delete(self) -> None:
        for path in self._written:
            path.unlink()
        self._written.clear()


def bench_publish(settings: Settings) -> Iterator[Row]:
    """Measure the publish of one object, header and payload ready, and with its sealing."""
    for label, fmt in _formats(settings):
        root = settings.folder(f"publish-{fmt.shards}")
        with Shelf(open_backend(str(root))) as shelf:
            yield from _publish_rows(settings, label, fmt, shelf, root)


def _publish_rows(
    settings: Settings, label: str, fmt: ObjectFormat, shelf: Shelf, root: Path
) -> Iterator[Row]:
    fresh = _FreshChunks(fmt, shelf, root)
    size = fmt.object_size(0)
    buffer = _staged(size)
    fmt.seal(buffer, make_chunks(fmt, 1)[0], 0)
    files = _RawFiles(settings.folder(f"raw-{fmt.shards}"), buffer, fmt.data_offset)

    def publish() -> None:
        shelf.view(fmt).publish(ObjectRef(fresh.next(), 0), buffer)

    def seal_and_publish() -> None:
        chunk = fresh.next()
        fmt.seal(buffer, chunk, 0)
        shelf.view(fmt).publish(ObjectRef(chunk, 0), buffer)

    for what, work, text, goal in (
        ("write", publish, f"publish of a sealed object, {label}", Goal(1.15)),
        ("seal+write", seal_and_publish, f"hash, seal and publish, {label}", None),
    ):
        times = measure_pairs(
            Work(work, fresh.delete), Work(files.write, files.delete), settings.pairs(51)
        )
        yield Row(
            f"publish/{label.replace(' ', '')}/{what}",
            text,
            "writev + rename",
            *times,
            goal=goal,
            extra={"bytes": size, "filesystem": shelf.backend.properties.filesystem},
        )
