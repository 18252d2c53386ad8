"""Rows ``gc/*``: ``kvshelf gc`` over a shelf of a million small objects, and an engine's sweeps.

Owns the shelf, which is made without kvshelf, and the measurement: the time of each command, and
the most memory that its process had. The objects are 300 bytes, so their number counts, not their
size; the folder should be on tmpfs, where they take 5 GiB.

The rows ``gc/evict*`` are of a sweeper in this process, whose shelf is at its bound while more is
offered than it has room for: how many objects it evicts a second, of time and of processor time.
They begin when it has swept once. Their objects have 4 KiB, which filesystems do not round up: what
becomes of the free space is what was written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.measure import Goal, Row
from benchmarks.samples import TINY, make_format
from benchmarks.servers import BUCKET, MissingServerError, S3Server
from benchmarks.settings import Settings
from kvshelf.backends import open_backend
from kvshelf.capacity.sweeper import Sweeper
from kvshelf.config import CapacityConfig
from kvshelf.errors import StorageError
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf

_OBJECTS: Final = 1_000_000
_QUICK_OBJECTS: Final = 2_000
_PROMPT_CHUNKS: Final = 40
_GOAL_SECONDS: Final = 120.0
_GOAL_BYTES: Final = 300 << 20
#: Bytes of the objects that are evicted, and seconds until a store that was refused is tried again.
_EVICTED_BYTES: Final = 4096
_REFUSED_SECONDS: Final = 1e-3
#: Seconds for which evictions are counted, and most until a shelf was swept for the first time.
_EVICT_SECONDS: Final = 150.0
_FIRST_SECONDS: Final = 300.0
_CHECKOUT: Final = str(Path(__file__).resolve().parents[1])


def _fill(root: Path, count: int, nbytes: int = 0) -> int:
    """Make objects with true names and beginnings, and at least so long; return all bytes."""
    fmt = make_format(TINY, 1)
    folder = root / fmt.namespace.folder
    for fan in range(256):
        (folder / "_" / f"{fan:02x}").mkdir(parents=True)
    (folder / "namespace.json").write_bytes(fmt.namespace.encoded)
    begin = (
        (fmt.data_offset - 8).to_bytes(8, "little")
        + b'{"__metadata__":{"format":"kvshelf/1","namespace":"%s",'
        % fmt.namespace.digest.hex().encode()
    )
    base, key, held = str(folder / "_"), b"", 0
    for number in range(count):
        index = number % _PROMPT_CHUNKS
        parent = key if index else number.to_bytes(32, "little")
        key = hashlib.sha256(parent).digest()
        text = key.hex()
        data = begin + f'"key":"{text}","parent":"{parent.hex()}","chunk":"{index}"'.encode()
        path = f"{base}/{text[:2]}/{text}-{index}-0of1.safetensors"
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        held += os.write(file, data.ljust(nbytes))
        os.close(file)
    return held


def _run(*arguments: str) -> tuple[float, int]:
    """Run ``kvshelf gc``; return its seconds and the most bytes that it had in memory."""
    begin = time.monotonic()
    process = subprocess.Popen(  # noqa: S603  our own module
        [sys.executable, "-m", "kvshelf", "gc", *arguments],
        cwd=_CHECKOUT,
        stdout=subprocess.DEVNULL,
        env={name: value for name, value in os.environ.items() if not name.startswith("KVSHELF_")},
    )
    try:
        _, status, used = os.wait4(process.pid, 0)
    except BaseException:
        process.kill()
        raise
    seconds = time.monotonic() - begin
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise RuntimeError(f"kvshelf gc ended with {process.returncode}; see above")
    return seconds, used.ru_maxrss << 10


def bench_gc(settings: Settings) -> Iterator[Row]:
    """Measure a dry run without and with a look at parents, and the deletion of a half."""
    count = _QUICK_OBJECTS if settings.quick else _OBJECTS
    root = settings.folder("gc")
    settings.progress(f"gc: making {count} objects")
    held = _fill(root, count)
    bound = f"--max-bytes={held // 2}"
    for name, what, arguments in (
        ("plan", "a dry run", [bound, "--no-orphans"]),
        ("orphans", "a dry run that reads all parents", [bound, "--orphans"]),
        ("delete", "the deletion of the older half", [bound, "--no-orphans", "--yes"]),
    ):
        settings.progress(f"gc: {what}")
        seconds, nbytes = _run(str(root), *arguments)
        yield Row(
            f"gc/{name}",
            f"`kvshelf gc` of {count:,} objects: {what}, with {nbytes >> 20} MiB at most",
            ours=[seconds],
            goal=Goal(_GOAL_SECONDS, "seconds"),
            note=f"The goal for memory is {_GOAL_BYTES >> 20} MiB.",
            extra={"objects": count, "resident_bytes": nbytes, "goal_resident_bytes": _GOAL_BYTES},
        )
    yield from _evictions(settings)


@dataclass(frozen=True, slots=True)
class _Pressure:
    """A shelf to which more is offered than it has room for.

    Attributes
    ----------
    name, what : str
        Of the row.
    objects : int
        The bound. A sweep that was followed by a hundred times its processor time was repeated
        within the measurement, with so many.
    threads : int
        Threads that store.
    """

    name: str
    what: str
    objects: int
    threads: int


_DIRECTORY: Final = _Pressure("gc/evict", "a directory", 20_000, 1)
_BUCKET: Final = _Pressure("gc/evict-s3", "a bucket of rclone on this machine", 2_000, 8)


def _evictions(settings: Settings) -> Iterator[Row]:
    folder = settings.folder("evict")
    yield _evict(settings, _DIRECTORY, folder, str(folder), {})
    place = settings.folder("evict-s3")
    try:
        with S3Server(place) as server:
            root = server.bucket / "evict"
            root.mkdir()
            options = server.options(server.port)
            yield _evict(settings, _BUCKET, root, f"s3://{BUCKET}/evict", options)
    except MissingServerError as error:
        yield Row(_BUCKET.name, f"evictions from {_BUCKET.what}", skipped=str(error))


def _evict(
    settings: Settings, pressure: _Pressure, root: Path, url: str, options: dict[str, Any]
) -> Row:
    """Store as much as a sweeper lets, and count what that evicts."""
    count = 200 if settings.quick else pressure.objects
    seconds = 0.5 if settings.quick else _EVICT_SECONDS
    settings.progress(f"gc: sweeping {pressure.what}")
    bound = _fill(root, count, _EVICTED_BYTES)
    counters, ended = Counters(), threading.Event()
    shelf = Shelf(open_backend(url, storage_options=options))
    guard = shelf.backend
    name = make_format(TINY, 1).namespace.folder

    def store(first: int) -> None:
        data, number = bytes(_EVICTED_BYTES), first
        while not ended.is_set():
            number += pressure.threads
            key = hashlib.sha256(number.to_bytes(8, "little")).hexdigest()
            if not guard.allows(_EVICTED_BYTES):
                ended.wait(_REFUSED_SECONDS)
                continue
            # A write that finds no room any more is one that was refused.
            with contextlib.suppress(StorageError):
                guard.write(f"{name}/_/{key[:2]}/{key}-0-0of1.safetensors", [data])

    capacity = CapacityConfig.model_validate({"max_bytes": bound, "min_free": 0})
    sweeper = Sweeper(shelf, capacity, counters)
    with closing(shelf), closing(sweeper), ThreadPoolExecutor(pressure.threads) as pool:
        sweeper.start()
        # Without a listing there is no bound.
        _wait_for_sweep(counters)
        stores = [pool.submit(store, number) for number in range(pressure.threads)]
        before, begin = counters.snapshot(), time.monotonic()
        try:
            wait(stores, seconds, FIRST_EXCEPTION)
            after, passed = counters.snapshot(), time.monotonic() - begin
        finally:
            ended.set()
        for stored in stores:
            stored.result()

    def counted(name: str) -> float:
        return after.get(name, 0.0) - before.get(name, 0.0)

    evicted, spent = counted("shelf_evicted_objects"), counted("sweep_seconds")
    rates = {
        "evicted_a_second": evicted / passed,
        "evicted_a_sweeping_second": evicted / spent if spent else 0.0,
        "share_of_a_core": spent / passed,
    }
    return Row(
        pressure.name,
        f"an object evicted from {pressure.what} of {count:,} that is at its bound: "
        f"{rates['evicted_a_second']:,.0f} a second,"
        f" {rates['evicted_a_sweeping_second']:,.0f} a second of sweeping",
        ours=[passed / max(1.0, evicted)],
        extra={"objects": count, "evicted": evicted, "seconds": passed, "sweeping": spent, **rates},
    )


def _wait_for_sweep(counters: Counters) -> None:
    end = time.monotonic() + _FIRST_SECONDS
    while not counters.snapshot().get("sweeps"):
        if time.monotonic() > end:
            raise RuntimeError(f"nothing was swept within {_FIRST_SECONDS:g} s")
        time.sleep(0.05)
