"""Rows ``gil/*``: how long the load of a chunk of 8 objects keeps the GIL, from ``Loads`` down.

A thread that has the GIL delays an engine's step thread. The objects lie in the page cache, and go
to a paged cache that discards them. Owns the clock: the processor time of all threads without that
of the calls that release the GIL, and without its own. Reading and hashing leave nothing of Python
in the processor's caches, so objects of real size cost more than those of a few KiB.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import xxhash

from benchmarks.far import Nowhere, RepeatedLoads, store
from benchmarks.measure import Goal, Row
from benchmarks.samples import LARGE, TINY, Shape, make_chunks, make_format
from benchmarks.settings import Settings
from kvshelf.backends import native, open_backend, posix_folders
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.transfer.transfers import default_io_threads

_CHUNKS = 16
_WARM_UP = 2
_CALLS = 10_000
#: What releases the GIL for long: an object and the name of its function.
_RELEASING: Sequence[tuple[Any, str]] = (
    *((os, name) for name in ("open", "fstat", "stat", "preadv", "close")),
    (posix_folders.libc, "syscall"),
    (xxhash, "xxh3_128_hexdigest"),
)


class _Whole(Nowhere):
    """Discards whole chunks at once, as caches on a GPU copy them."""

    whole_chunks = True

    def scatter_chunk(
        self,
        shards: Sequence[int],
        slots: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        fence: object = None,
    ) -> None:
        """Discard the payloads."""


class _Clock:
    """The processor time outside of the functions that it was told of."""

    def __init__(self) -> None:
        self._inside = self._calls = 0
        plain = SimpleNamespace(run=lambda: None)
        alone = self._seconds_of(plain.run)
        with self.told_of(plain, "run"):
            #: What it adds to each call.
            self._own = self._seconds_of(plain.run) - alone - self._inside / _CALLS

    @staticmethod
    def _seconds_of(run: Callable[[], object]) -> float:
        begin = time.thread_time_ns()
        for _ in range(_CALLS):
            run()
        return (time.thread_time_ns() - begin) / _CALLS

    @contextmanager
    def told_of(self, owner: Any, name: str) -> Iterator[None]:
        """Measure the calls of a function."""
        function = getattr(owner, name)

        def measured(*arguments: Any, **options: Any) -> Any:
            begin = time.thread_time_ns()
            try:
                return function(*arguments, **options)
            finally:
                # Two threads that add at once would lose one addition in thousands.
                self._inside += time.thread_time_ns() - begin
                self._calls += 1

        setattr(owner, name, measured)
        try:
            yield
        finally:
            setattr(owner, name, function)

    def seconds(self, work: Callable[[], object]) -> float:
        """Return the seconds of processor time of all threads outside of these functions."""
        self._inside = self._calls = 0
        begin = time.process_time_ns()
        work()
        spent = time.process_time_ns() - begin
        return (spent - self._inside - self._calls * self._own) / 1e9


def bench_gil(settings: Settings) -> Iterator[Row]:
    """Measure the GIL time of loads from a local directory."""
    shapes = [("4MiB", LARGE), ("32KiB", Shape(LARGE.layers, LARGE.kv_heads, 1))]
    for label, shape in [("quick", TINY)] if settings.quick else shapes:
        fmt = make_format(shape, shape.kv_heads)
        root = settings.folder(f"gil-{label}")
        with Shelf(open_backend(str(root))) as shelf:
            yield _load_row(settings, label, fmt, shelf, root)


def _load_row(settings: Settings, label: str, fmt: ObjectFormat, shelf: Shelf, root: Path) -> Row:
    chunks = make_chunks(fmt, 2 if settings.quick else _CHUNKS)
    store(shelf, fmt, chunks)
    view = shelf.view(fmt)
    paths = [
        str(root / view.name(ObjectRef(chunk, shard)))
        for chunk in chunks
        for shard in range(fmt.shards)
    ]
    buffer = memoryview(bytearray(fmt.object_size(0)))
    threads = default_io_threads(shelf.backend.properties)[0]
    pairs = settings.pairs(31)
    times: tuple[list[float], list[float]] = ([], [])
    clock = _Clock()
    with ExitStack() as stack:
        loads = RepeatedLoads(view, chunks, threads, _Whole())
        stack.callback(loads.transfer.close)
        if native.can_read_files():
            library = SimpleNamespace(read=native._library())
            stack.enter_context(clock.told_of(library, "read"))
            found, native._library = native._library, lambda: library.read  # type: ignore[assignment]
            stack.callback(setattr, native, "_library", found)
        for owner, name in _RELEASING:
            stack.enter_context(clock.told_of(owner, name))

        def plainly() -> None:
            for path in paths:
                fd = os.open(path, os.O_RDONLY)
                os.preadv(fd, [buffer], 0)
                os.close(fd)
                xxhash.xxh3_128_hexdigest(buffer)

        gc.disable()
        stack.callback(gc.enable)
        for pair in range(-_WARM_UP, pairs):
            order = (0, 1) if pair % 2 else (1, 0)
            for side in order:
                seconds = clock.seconds((loads.load, plainly)[side])
                if pair >= 0:
                    times[side].append(seconds / len(chunks))
            gc.collect()
    return Row(
        f"gil/load/{label}",
        f"GIL time of a chunk of {fmt.shards} objects of {len(buffer) >> 10} KiB, verified load",
        "of open, preadv, close, xxh3 in plain Python",
        *times,
        goal=Goal(100e-6, "seconds"),
        note="" if native.can_read_files() else "without the compiled library",
        extra={"bytes": len(buffer), "threads": threads},
    )
