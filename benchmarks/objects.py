"""Rows ``load/*`` and ``publish/*``: one object between a buffer and a local directory.

Owns the floors: the work of a program without kvshelf on the same bytes, the same files and the
same buffer, which is reused for all samples of a row.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import xxhash

from benchmarks.measure import Goal, Row, Work, measure_pairs
from benchmarks.samples import LARGE, TINY, fill, make_chunks, make_format
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import Arena
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef


def _formats(settings: Settings) -> list[tuple[str, ObjectFormat]]:
    if settings.quick:
        return [("64 KiB", make_format(TINY, 2))]
    return [("4 MiB", make_format(LARGE, 8)), ("32 MiB", make_format(LARGE, 1))]


def _sealed(fmt: ObjectFormat, chunk: Chunk) -> memoryview:
    """Return memory of an engine that holds the object of a chunk of random bytes."""
    view = Arena(fmt.object_size(0), lazy=True).view
    fill(view)
    fmt.seal(view, chunk, 0)
    return view


def bench_load(settings: Settings) -> Iterator[Row]:
    """Measure the verified load of one object from the page cache into memory."""
    for label, fmt in _formats(settings):
        root = settings.folder(f"load-{fmt.shards}")
        [chunk] = make_chunks(fmt, 1)
        buffer, ref = _sealed(fmt, chunk), ObjectRef(chunk, 0)
        with Shelf(open_backend(str(root))) as shelf:
            view = shelf.view(fmt)
            view.publish(ref, buffer)
            path = str(root / view.name(ref))

            def read(path: str = path, buffer: memoryview = buffer) -> None:
                fd = os.open(path, os.O_RDONLY)
                try:
                    if os.preadv(fd, [buffer], 0) != len(buffer):
                        raise OSError(f"{path} was not read as a whole")
                finally:
                    os.close(fd)

            def read_and_hash(buffer: memoryview = buffer) -> None:
                read()
                xxhash.xxh3_128_digest(buffer)

            work = Work(partial(view.load, ref, buffer))
            for what, floor, text, goal in (
                ("preadv", read, "open, preadv, close", Goal(1.25)),
                ("preadv+xxh3", read_and_hash, "open, preadv, close, one-shot xxh3", Goal(1.1)),
            ):
                yield Row(
                    f"load/{label.replace(' ', '')}/{what}",
                    f"verified load, {label}, page cache → buffer",
                    text,
                    *measure_pairs(work, Work(floor), settings.pairs(51)),
                    goal=goal if (what == "preadv") == (label == "32 MiB") else None,
                    extra={"bytes": len(buffer)},
                )


class _Writer:
    """Writes the same bytes under fresh names: by a shelf, and like a program without kvshelf."""

    def __init__(self, shelf: Shelf, fmt: ObjectFormat, root: Path, raw: Path) -> None:
        self._view, self._fmt, self._root, self._raw = shelf.view(fmt), fmt, root, raw
        [self._base] = make_chunks(fmt, 1)
        self._buffer = _sealed(fmt, self._base)
        self._number = 0
        self._written: list[Path] = []

    def publish(self, *, seal: bool = False) -> None:
        self._number += 1
        base = self._base
        # In the same fan-out folder as the others.
        key = base.key[:1] + self._number.to_bytes(31, "big")
        chunk = Chunk(key, base.parent, base.index, base.tokens)
        if seal:
            self._fmt.seal(self._buffer, chunk, 0)
        ref = ObjectRef(chunk, 0)
        self._view.publish(ref, self._buffer)
        self._written.append(self._root / self._view.name(ref))

    def write(self) -> None:
        self._number += 1
        path = self._raw / f"{self._number}.bin"
        temporary = path.with_suffix(".tmp")
        fd = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        try:
            if os.writev(fd, [self._buffer]) != len(self._buffer):
                raise OSError(f"{temporary} was not written as a whole")
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
            writer = _Writer(shelf, fmt, root, settings.folder(f"raw-{fmt.shards}"))
            for seal, text in ((False, "publish of a sealed object"), (True, "seal and publish")):
                yield Row(
                    f"publish/{label.replace(' ', '')}/{'seal+write' if seal else 'write'}",
                    f"{text}, {label}",
                    "writev + rename",
                    *measure_pairs(
                        Work(partial(writer.publish, seal=seal), writer.delete),
                        Work(writer.write, writer.delete),
                        settings.pairs(51),
                    ),
                    goal=None if seal else Goal(1.15),
                    extra={"bytes": fmt.object_size(0)},
                )
