"""Two engines that store and delete on a small filesystem, which is really full at times.

``python tests/soak/capacity.py [--seconds 300] [--seed N] [--json FILE]``

Two vLLM engines answer prompts of a pool whose KV is several times as large as ``max_bytes``, and
both keep the shelf within its bound. The shelf lies on a tmpfs of its own (an ext4 filesystem in a
file where that cannot be mounted). Now and then another file fills the filesystem to the last byte
for some seconds: every write fails with ENOSPC then, those of keepers' markers too.

A failure is: an answer that differs from the reference beyond rounding, one that takes longer than
:data:`soak.LONGEST`, an engine that ends, a traceback in a log, a shelf that holds more than 1.1
times ``max_bytes`` at any look (five a second), chunks that are not shared any more in the end, and
a run in which nothing was deleted or the filesystem was never full. Exit code 0 when nothing
failed. Needs root to mount.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from examples.models.make_model import make_model
from tests.soak.soak import (
    SETTINGS,
    Client,
    Report,
    check_logs,
    collect,
    make_prompts,
    recovered,
    references,
)
from tests.support.engines import SHELF_CONNECTOR, Engine, EngineError

FILESYSTEM = 64 << 20
MAX_BYTES = 24 << 20
MIN_FREE = 4 << 20
#: Most that the shelf may hold at any look, as a part of ``max_bytes``.
MOST = 1.1
LOOK_SECONDS = 0.2


class Ground:
    """A small filesystem of its own."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "ground"
        self.mount.mkdir()
        self.shelf = self.mount / "shelf"
        size = f"size={FILESYSTEM}"
        try:
            self._run("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(self.mount))
            self.kind = "tmpfs"
        except subprocess.CalledProcessError:
            image = folder / "image"
            with image.open("wb") as file:
                file.truncate(FILESYSTEM)
            self._run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
            self._run("mount", "-o", "loop", str(image), str(self.mount))
            self.kind = "ext4"

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def fill(self) -> None:
        """Take all that is free."""
        with contextlib.suppress(OSError), (self.mount / "ballast").open("ab") as file:
            while True:
                file.write(bytes(1 << 16))
                file.flush()
        # What is freed meanwhile is taken by the caller's next call.

    def relieve(self) -> None:
        (self.mount / "ballast").unlink(missing_ok=True)

    def free(self) -> int:
        found = os.statvfs(self.mount)
        return found.f_bavail * found.f_frsize

    def used(self) -> int:
        """Bytes of all files of the shelf."""
        total = 0
        for path in self.shelf.rglob("*"):
            with contextlib.suppress(FileNotFoundError):
                if path.is_file():
                    total += path.lstat().st_size
        return total

    def close(self) -> None:
        self.relieve()
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run("umount", "-l", str(self.mount))


@dataclass
class Looks:
    """What was seen of the shelf."""

    most_bytes: int = 0
    looks: int = 0
    above: int = 0
    full: int = 0
    filled: int = 0
    bytes: list[int] = field(default_factory=list)


class Watch:
    """Looks at the shelf, on a thread; another one fills the filesystem now and then."""

    def __init__(self, ground: Ground, report: Report, seed: int) -> None:
        self.looks = Looks()
        self._ground = ground
        self._report = report
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=work, daemon=True) for work in (self._look, self._fill)
        ]

    def __enter__(self) -> Looks:
        for thread in self._threads:
            thread.start()
        return self.looks

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        self._ground.relieve()

    def _look(self) -> None:
        looks = self.looks
        while not self._stop.wait(LOOK_SECONDS):
            used = self._ground.used()
            looks.looks += 1
            looks.bytes.append(used)
            looks.most_bytes = max(looks.most_bytes, used)
            looks.full += self._ground.free() < 1 << 16
            if used > MOST * MAX_BYTES:
                looks.above += 1
                self._report.fail(f"the shelf holds {used} bytes, max_bytes is {MAX_BYTES}")

    def _fill(self) -> None:
        while not self._stop.wait(self._rng.uniform(8.0, 20.0)):
            self.looks.filled += 1
            end = time.monotonic() + self._rng.uniform(2.0, 6.0)
            while time.monotonic() < end and not self._stop.wait(0.05):
                self._ground.fill()
            self._ground.relieve()


def run(seconds: float, folder: Path, seed: int, pool: int) -> tuple[Report, Looks, str]:
    """Run the soak; everything it makes is inside `folder`."""
    report, looks = Report(), Looks()
    model = make_model(folder / "model", "tiny")
    prompts = make_prompts(pool, seed)
    cores = sorted(os.sched_getaffinity(0))
    print(f"references of {len(prompts)} prompts", flush=True)
    expected = references(model, folder, prompts, cores[0])
    ground = Ground(folder)
    engines: dict[str, Engine] = {}
    try:
        for number, name in enumerate("AB"):
            engines[name] = Engine(
                model,
                folder / f"{name}.log",
                connector=SHELF_CONNECTOR,
                extra_config={
                    "shared_storage_path": str(ground.shelf),
                    "staging_bytes": 64 << 20,
                    "capacity": {"max_bytes": f"{MAX_BYTES}B"},
                    "least_free": MIN_FREE,
                },
                core=cores[number % len(cores)],
                **SETTINGS,
            )
        for engine in engines.values():
            engine.wait_ready()
        print(f"{seconds:.0f} s on {ground.kind}, seed {seed}", flush=True)
        clients = [
            Client(name, engine, prompts, expected, report, seed + number)
            for number, (name, engine) in enumerate(engines.items())
        ]
        end = time.monotonic() + seconds
        with Watch(ground, report, seed) as looks:
            while time.monotonic() < end and all(client.running for client in clients):
                time.sleep(0.2)
            for client in clients:
                client.stop()
        if not report.failures:
            recovered(list(engines.values()), report, seed * 1000)
            collect(engines, report)
        check_logs(engines, report)
        evicted = sum(found.get("shelf_evicted_objects", 0) for found in report.counters)
        if not report.failures and not (evicted and looks.full):
            report.fail(f"{evicted:g} objects were deleted, {looks.full} looks saw a full disk")
    except (EngineError, OSError) as error:
        report.fail(str(error)[:4000])
    finally:
        for engine in engines.values():
            engine.stop(at_once=True)
        ground.close()
    return report, looks, ground.kind


def as_json(report: Report, looks: Looks, kind: str, seconds: float, seed: int) -> dict[str, Any]:
    names = ("visits", "visit_seconds", "shelf_evicted_objects", "shelf_evicted_bytes")
    names += ("stored_chunks", "loaded_chunks", "breaker_opens", "late_calls")
    ordered = sorted(looks.bytes)
    return {
        "seconds": seconds,
        "seed": seed,
        "filesystem": kind,
        "filesystem_bytes": FILESYSTEM,
        "max_bytes": MAX_BYTES,
        "most_bytes": looks.most_bytes,
        "most_part": round(looks.most_bytes / MAX_BYTES, 3),
        "median_part": round(ordered[len(ordered) // 2] / MAX_BYTES, 3) if ordered else 0.0,
        "looks": looks.looks,
        "looks_at_a_full_filesystem": looks.full,
        "times_filled": looks.filled,
        "answers": report.answers,
        "near_ties": len(report.near_ties),
        "longest_answer_seconds": round(report.longest_answer, 2),
        "prompt_tokens": report.prompt_tokens,
        "shelf_tokens": report.shelf_tokens,
        "shared_again_after_seconds": report.recovery_seconds,
        "counters": [
            {name: found[name] for name in found if name in names or "dropped" in name}
            for found in report.counters
        ],
        "failures": report.failures,
    }


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=300.0)
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--pool", type=int, default=120, help="prompts; default 120")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="kvshelf-capacity-") as folder:
        report, looks, kind = run(args.seconds, Path(folder), args.seed, args.pool)
    found = as_json(report, looks, kind, args.seconds, args.seed)
    text = json.dumps(found, indent=1)
    if args.json is not None:
        args.json.write_text(text + "\n")
    print(text)
    return 1 if report.failures else 0


if __name__ == "__main__":
    # The default action would leave the filesystem mounted.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    sys.exit(main())
