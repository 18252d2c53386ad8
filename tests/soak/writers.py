"""Many processes that store at a steady rate on a bounded shelf, and keep it within its bound.

``python tests/soak/writers.py [--storage directory|s3] [--processes 10] [--rate 30]
[--objects 20000] [--seconds 120] [--json FILE]``

Each process has a keeper and stores objects of 4 KiB, ``--rate`` a second, as far as it may; no
vLLM. The shelf is bounded to ``--objects`` of them, and begins 85 % full. The directory lies on a
tmpfs of its own, whose free space nobody else changes; the bucket is one of ``rclone serve s3``,
which keeps it as a folder.

Said are how much was offered, how much of that was not stored, the most that the shelf held of its
bound at any look (one a second), the objects that were evicted a second, and the processor time
of that. Needs root to mount.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from kvshelf.backends import open_backend
from kvshelf.capacity.keeper import Keeper
from kvshelf.config import CapacityConfig
from kvshelf.errors import NoSpaceStorageError, StorageError
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from tests.support.servers import BUCKET, rclone_s3

NAMESPACE = "soak-0123456789abcdef"
OBJECT_BYTES = 4096
#: Part of the bound that is in use when the processes begin.
BEGIN = 0.85
LOOK_SECONDS = 1.0
PROMPT_CHUNKS = 40


def name_of(number: int) -> str:
    """Return the name of a new chunk."""
    key = os.urandom(32).hex()
    return f"{NAMESPACE}/_/{key[:2]}/{key}-{number % PROMPT_CHUNKS}-0of1.safetensors"


def write(url: str, options: dict[str, Any], rate: float, max_bytes: int, seconds: float) -> None:
    """Be one of the processes; print what it counted."""
    counters = Counters()
    shelf = Shelf(open_backend(url, storage_options=options))
    capacity = CapacityConfig.model_validate({"max_bytes": max_bytes})
    keeper = Keeper(shelf.backend, capacity, counters)
    keeper.start()
    guard, data = shelf.backend, bytes(OBJECT_BYTES)
    found: Counter[str] = Counter()
    # The shelf is known before anything is stored.
    while not counters.snapshot().get("visits"):
        time.sleep(0.02)
    print(flush=True)
    sys.stdin.readline()
    begin = time.monotonic()
    while (now := time.monotonic()) < begin + seconds:
        if found["offered"] >= rate * (now - begin):
            time.sleep(1 / rate)
            continue
        found["offered"] += 1
        if not guard.allows(OBJECT_BYTES):
            found["dropped"] += 1
            continue
        try:
            guard.write(name_of(found["offered"]), [data])
        except NoSpaceStorageError:
            found["dropped"] += 1
        except StorageError:
            found["failed"] += 1
    keeper.close()
    found["late"] = int(max(0.0, rate * seconds - found["offered"]))
    print(json.dumps({**found, **counters.snapshot()}), flush=True)
    # A call that hangs in the storage must not keep the process.
    os._exit(0)


class Watch:
    """Looks at the bytes of the shelf, on a thread."""

    def __init__(self, folder: Path) -> None:
        self.found: list[int] = []
        self._folder = folder
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Watch:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)

    def _run(self) -> None:
        while not self._stop.wait(LOOK_SECONDS):
            self.found.append(held(self._folder))


def held(folder: Path) -> int:
    """Return the bytes of all objects in a folder: all are of one size."""
    count = 0
    with contextlib.suppress(FileNotFoundError):
        for entry in os.scandir(folder):
            if entry.is_dir(follow_symlinks=False):
                count += held(Path(entry.path)) // OBJECT_BYTES
            else:
                count += entry.name.endswith(".safetensors")
    return count * OBJECT_BYTES


def fill(folder: Path, count: int) -> None:
    """Put objects of the last day on the shelf."""
    data, now = bytes(OBJECT_BYTES), time.time()
    for fan in range(256):
        (folder / NAMESPACE / "_" / f"{fan:02x}").mkdir(parents=True)
    for number in range(count):
        path = folder / name_of(number)
        path.write_bytes(data)
        at = now - 86400 * (count - number) / count
        os.utime(path, (at, at))


@contextlib.contextmanager
def directory(folder: Path, nbytes: int) -> Iterator[tuple[str, dict[str, Any], Path]]:
    mount = folder / "ground"
    mount.mkdir()
    subprocess.run(
        ["mount", "-t", "tmpfs", "-o", f"size={nbytes}", "tmpfs", str(mount)], check=True
    )
    try:
        shelf = mount / "shelf"
        shelf.mkdir()
        yield str(shelf), {}, shelf
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=False)


@contextlib.contextmanager
def bucket(folder: Path) -> Iterator[tuple[str, dict[str, Any], Path]]:
    with rclone_s3(folder) as server:
        yield f"s3://{BUCKET}/shelf", server.options(), folder / BUCKET / "shelf"


def run(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """Run the processes; return what was seen."""
    max_bytes = args.objects * OBJECT_BYTES
    ground = bucket(folder) if args.storage == "s3" else directory(folder, 8 * max_bytes)
    with ground as (url, options, shelf):
        fill(shelf, int(BEGIN * args.objects))
        command = [sys.executable, __file__, "--write", url, json.dumps(options)]
        command += ["--rate", str(args.rate), "--objects", str(args.objects)]
        command += ["--seconds", str(args.seconds)]
        processes: list[subprocess.Popen[str]] = []
        try:
            for _ in range(args.processes):
                # One after the other: each lists something of the bucket.
                process = subprocess.Popen(
                    command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
                )
                processes.append(process)
                assert process.stdout is not None
                process.stdout.readline()
            with Watch(shelf) as watch:
                begin = time.monotonic()
                for process in processes:
                    assert process.stdin is not None
                    process.stdin.write("\n")
                    process.stdin.flush()
                wait = args.seconds + 120
                outputs = [process.communicate(timeout=wait)[0] for process in processes]
                seconds = time.monotonic() - begin
        finally:
            for process in processes:
                process.kill()
        left = held(shelf)
    found: Counter[str] = Counter()
    for output in outputs:
        found.update(json.loads(output))
    evicted, spent = found["shelf_evicted_objects"], found["visit_seconds"]
    return {
        "storage": args.storage,
        "processes": args.processes,
        "objects": args.objects,
        "rate": args.rate,
        "seconds": round(seconds, 1),
        "offered": found["offered"],
        "not_offered_in_time": found["late"],
        "dropped": found["dropped"],
        "dropped_part": round(found["dropped"] / max(1, found["offered"]), 4),
        "failed": found["failed"],
        "most_part": round(max(watch.found) / max_bytes, 4),
        "left_part": round(left / max_bytes, 4),
        "looks": len(watch.found),
        "visits": found["visits"],
        "evicted": evicted,
        "evicted_a_second": round(evicted / seconds, 1),
        "visit_seconds": round(spent, 2),
        "median_part": round(median(watch.found) / max_bytes, 4),
    }


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--storage", choices=("directory", "s3"), default="directory")
    parser.add_argument("--processes", type=int, default=10)
    parser.add_argument("--rate", type=float, default=30.0, help="objects a second of each")
    parser.add_argument("--objects", type=int, default=20_000, help="the bound")
    parser.add_argument("--seconds", type=float, default=120.0)
    parser.add_argument("--json", type=Path, metavar="FILE")
    parser.add_argument("--write", nargs=2, metavar=("URL", "OPTIONS"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.write is not None:
        url, options = args.write
        write(url, json.loads(options), args.rate, args.objects * OBJECT_BYTES, args.seconds)
        return 0
    with tempfile.TemporaryDirectory(prefix="kvshelf-writers-") as folder:
        text = json.dumps(run(args, Path(folder)), indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)
    return 0


if __name__ == "__main__":
    sys.exit(main())
