"""A vLLM engine on a shelf that is damaged all the time: is every answer still right?

An engine with the inert connector first answers every prompt of a random pool: the reference. Then
an engine that keeps chunks in memory, has few blocks and a bounded shelf answers prompts of the
pool for as long as asked. A thread spoils objects, takes them away, and now and then harms the
shelf as a whole: it removes or spoils folders, and fills the filesystem, stops its writes or makes
it read-only. It mends that after a while. In the end all is mended, and the engine must hit again
without a restart.

Everything computes in float32 on one core. An answer whose tokens differ from the reference's is a
failure, unless where they first differ the reference's token was ahead of its best rival by less
than :data:`TOLERANCE` nats: the order of sums depends on the shapes of batches in any vLLM. Other
failures are an answer that takes longer than :data:`LONGEST`, an engine that ends, a traceback in
its log, a shelf above its bound, memory, threads or open files that grow, and no hit in the end.

Where the program may mount, as root, the shelf is an ext4 filesystem of its own in a file.
Elsewhere it is a plain directory, and the faults that need a filesystem are left out, which the
report says. The report is JSON. The exit code is 0 when nothing failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from examples.models.make_model import RECIPES, make_model
from tests.support.engines import (
    INERT_CONNECTOR,
    SHELF_CONNECTOR,
    Answer,
    Engine,
    EngineError,
    ShelfFiles,
    assert_same,
    flip_byte,
    replace_by_fifo,
)

#: Nats by which the reference's token must have been ahead for a difference to be a failure.
TOLERANCE = 0.01
#: Seconds that no answer may take, whatever the storage does.
LONGEST = 60.0
#: Seconds after which there must be hits again once all is mended. A storage that took no writes is
#: asked again after a minute, by stores that pause for half a minute.
RECOVERY_SECONDS = 120.0
FILESYSTEM_BYTES = 192 << 20
MAX_BYTES = 24 << 20
#: What a process may have more in the last fifth of the run than in the second one.
GROWTH = {"memory, MiB": 300.0, "threads": 30.0, "open files": 30.0}

ENGINE: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    # A few requests fill the cache.
    "kv_cache_memory_bytes": 9 << 20,
    "max_num_batched_tokens": 1024,
}
OPTIONS = {
    # Loads are compared, also where computing is sooner.
    "admission": "always",
    "memory": "16MiB",
    "capacity": {"max_bytes": f"{MAX_BYTES}B"},
    "least_free": 4 << 20,
}


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Return random prompts of 20 to 1800 tokens, most of which begin like another one."""
    draw = random.Random(seed)

    def tokens(length: int) -> list[int]:
        return draw.choices(range(2, RECIPES["tiny"].vocab), k=length)

    prompts = [tokens(draw.randint(600, 1500)) for _ in range(max(1, count // 8))]
    while len(prompts) < count:
        base = draw.choice(prompts)
        shared = draw.randint(0, len(base)) if draw.random() < 0.9 else 0
        prompts.append(base[:shared] + tokens(draw.randint(20, min(600, 1800 - shared))))
    return prompts[:count]


class Report:
    """What happened; several threads add to it."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.faults: Counter[str] = Counter()
        self.failures: list[str] = []
        self.figures: dict[str, Any] = {}

    def fail(self, what: str) -> None:
        """Note a failure."""
        self.failures.append(what[:4000])
        print(f"FAILURE: {what}", flush=True)


class Ground:
    """The filesystem that a shelf lies on, and what can be done to it."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "ground"
        self.mount.mkdir()
        self.shelf = self.mount / "shelf"
        self.is_mounted = self._is_frozen = False
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(FILESYSTEM_BYTES)
        with contextlib.suppress(OSError, subprocess.CalledProcessError):
            self._run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
            self._run("mount", "-o", "loop", str(image), str(self.mount))
            self.is_mounted = True

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    def stop_writes(self) -> None:
        """Let every write wait, in the kernel, until :meth:`mend`."""
        self._is_frozen = True
        self._run("fsfreeze", "-f", str(self.mount))

    def make_read_only(self) -> None:
        """Let every write fail with EROFS."""
        self._run("mount", "-o", "remount,ro", str(self.mount))

    def fill(self) -> None:
        """Let every write fail with ENOSPC."""
        with contextlib.suppress(OSError), (self.mount / "ballast").open("wb") as file:
            while True:
                file.write(bytes(1 << 20))
                file.flush()

    def mend(self) -> None:
        """Undo all of these."""
        if not self.is_mounted:
            return
        with contextlib.suppress(subprocess.CalledProcessError):
            if self._is_frozen:
                self._run("fsfreeze", "-u", str(self.mount))
            self._is_frozen = False
            self._run("mount", "-o", "remount,rw", str(self.mount))
        (self.mount / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount."""
        self.mend()
        if self.is_mounted:
            self._run("umount", "-l", str(self.mount))


class Worker:
    """Repeats something on a thread while the context is open."""

    def __init__(self, report: Report) -> None:
        self.report = report
        self.stopping = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> None:
        self.thread.start()

    def __exit__(self, *_: object) -> None:
        self.stopping.set()
        self.thread.join(2 * LONGEST)
        if self.thread.is_alive():
            self.report.fail(f"{type(self).__name__} did not end")

    def _run(self) -> None:
        while not self.stopping.is_set():
            self.repeat()

    def repeat(self) -> None:
        raise NotImplementedError


class Trouble(Worker):
    """Makes random trouble on a shelf, and mends what harms all of it."""

    def __init__(self, ground: Ground, report: Report, seed: int) -> None:
        super().__init__(report)
        self._ground, self._draw = ground, random.Random(seed)
        self._files = ShelfFiles(ground.shelf)
        self._away = ground.mount / "shelf is away"
        # Only what is there can be spoilt: objects are spoilt far more often than the shelf.
        self._of_objects: dict[str, Callable[[Path], object]] = {
            "byte flipped": flip_byte,
            "FIFO": replace_by_fifo,
            "deleted": Path.unlink,
            "cut": lambda path: os.truncate(path, self._draw.randrange(path.stat().st_size)),
            "noise": lambda path: path.write_bytes(self._draw.randbytes(path.stat().st_size)),
            "zeros from somewhere on": self._zero,
            "of another chunk": lambda path: shutil.copyfile(self._object(), path),
            "directory": lambda path: (path.unlink(), path.mkdir()),
        }
        self._of_shelf: dict[str, Callable[[], object]] = {
            "folder of keys deleted": lambda: shutil.rmtree(self._object().parent),
            "namespace deleted": lambda: shutil.rmtree(self._namespace()),
            "namespace.json spoilt": lambda: (self._namespace() / "namespace.json").write_bytes(
                self._draw.randbytes(100)
            ),
            "shelf moved away": lambda: ground.shelf.rename(self._away),
        }
        on_filesystem = {
            "filesystem full": ground.fill,
            "writes stop": ground.stop_writes,
            "filesystem read-only": ground.make_read_only,
        }
        if ground.is_mounted:
            self._of_shelf |= on_filesystem
        else:
            report.figures["left out, as nothing can be mounted"] = list(on_filesystem)

    def repeat(self) -> None:
        self.stopping.wait(self._draw.uniform(0.05, 0.5))
        harms_shelf = self._draw.random() < 0.1
        name = self._draw.choice(sorted(self._of_shelf if harms_shelf else self._of_objects))
        # What was to be spoilt may be gone, or spoilt already.
        with contextlib.suppress(OSError, IndexError, ValueError, subprocess.SubprocessError):
            if harms_shelf:
                self._of_shelf[name]()
            for _ in range(0 if harms_shelf else self._draw.choice([1, 1, 2, 5])):
                self._of_objects[name](self._object())
            self.report.faults[name] += 1
        if harms_shelf:
            self.stopping.wait(self._draw.uniform(0.5, 4.0))
            self.mend()

    def mend(self) -> None:
        """Undo what harms the whole shelf."""
        self._ground.mend()
        if not self._away.exists():
            return
        if self._ground.shelf.exists():
            # The engine has begun a new one. Its objects are as good as the old.
            shutil.rmtree(self._away, ignore_errors=True)
        else:
            self._away.rename(self._ground.shelf)

    def _object(self) -> Path:
        """Return some object that is a file: whoever opens a FIFO waits for its other end."""
        return self._draw.choice(sorted(filter(Path.is_file, self._files.objects())))

    def _namespace(self) -> Path:
        return self._draw.choice(self._files.namespaces())

    def _zero(self, path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, self._draw.randrange(size))
        os.truncate(path, size)


class Client(Worker):
    """Sends prompts of the pool to the engine, and compares every answer."""

    def __init__(
        self,
        engine: Engine,
        prompts: list[list[int]],
        expected: list[Answer],
        report: Report,
        seed: int,
    ) -> None:
        super().__init__(report)
        self._engine, self._prompts, self._expected = engine, prompts, expected
        self._draw = random.Random(seed)

    def repeat(self) -> None:
        try:
            self._batch()
        except (EngineError, OSError) as error:
            self.report.fail(str(error))
            self.stopping.set()

    def _batch(self) -> None:
        draw, begin = self._draw, time.monotonic()
        numbers = draw.choices(range(len(self._prompts)), k=draw.choice([1, 1, 2, 4, 6]))
        requests = [self._engine.submit(self._prompts[number]) for number in numbers]
        if draw.random() < 0.1:
            time.sleep(draw.uniform(0, 0.05))
            requests[-1].abort()
        for number, request in zip(numbers, requests, strict=True):
            self._judge(number, request.result(LONGEST + 30))
        seconds = time.monotonic() - begin
        longest = max(seconds, self.report.figures.get("longest batch, s", 0.0))
        self.report.figures["longest batch, s"] = round(longest, 2)
        if seconds > LONGEST:
            self.report.fail(f"prompts {numbers} took {seconds:.1f} s")
        # What vLLM remembers itself is not loaded.
        if draw.random() < 0.6:
            self._engine.reset_prefix_cache(connector=draw.random() < 0.05)

    def _judge(self, number: int, answer: Answer) -> None:
        counts, expected = self.report.counts, self._expected[number]
        was_aborted = answer.finish_reason == "abort"
        tokens = expected.tokens[: len(answer.tokens)] if was_aborted else expected.tokens
        counts["answers"] += 1
        counts["aborted"] += was_aborted
        if answer.tokens == tokens:
            return
        counts["near-ties"] += 1
        try:
            assert_same(answer, expected, TOLERANCE)
            assert was_aborted or len(answer.tokens) == len(tokens), answer.finish_reason
        except AssertionError as error:
            self.report.fail(f"prompt {number}: {error}")


class Samples(Worker):
    """Looks at the shelf's size and at the engine's processes every two seconds."""

    def __init__(self, engine: Engine, shelf: Path, report: Report) -> None:
        super().__init__(report)
        self._engine, self._files = engine, ShelfFiles(shelf)
        self._rows: list[Counter[str]] = []

    def repeat(self) -> None:
        self.stopping.wait(2.0)
        row: Counter[str] = Counter()
        for process in self._engine.processes():
            with contextlib.suppress(OSError):
                status = Path(f"/proc/{process}/status").read_text()
                fields = dict(line.split(":", 1) for line in status.splitlines())
                kibibytes = (int(fields[name].split()[0]) for name in ("RssAnon", "RssShmem"))
                row["memory, MiB"] += sum(kibibytes) >> 10
                row["threads"] += int(fields["Threads"])
                row["open files"] += len(os.listdir(f"/proc/{process}/fd"))
        self._rows.append(row)
        used = 0
        for path in self._files.objects():
            with contextlib.suppress(OSError):  # it was deleted, or moved away
                used += path.lstat().st_size
        if used > 1.1 * MAX_BYTES:
            self.report.fail(f"the shelf holds {used} bytes, max_bytes is {MAX_BYTES}")

    def compare(self) -> None:
        """Compare the second fifth of the run with the last one."""
        fifth = len(self._rows) // 5
        for name, growth in GROWTH.items() if fifth else ():
            early = median(row[name] for row in self._rows[fifth : 2 * fifth])
            late = median(row[name] for row in self._rows[-fifth:])
            self.report.figures[name] = {"early": early, "late": late}
            if late > early + growth:
                self.report.fail(f"{name} grew from {early} to {late}")


def recover(engine: Engine, report: Report, seed: int) -> None:
    """Note how long it takes until the engine loads what it has just stored."""
    begin = time.monotonic()
    for number in range(10_000):
        [prompt] = make_prompts(1, seed + number)
        engine.generate(prompt, max_tokens=1)
        # What was stored last is reported by the next steps.
        time.sleep(0.5)
        engine.reset_prefix_cache()
        hit = engine.generate(prompt, max_tokens=1).shelf_tokens or 0
        seconds = time.monotonic() - begin
        if hit >= 256:
            report.figures["hits again after, s"] = round(seconds, 1)
            return
        if seconds > RECOVERY_SECONDS:
            report.fail(f"there is no hit {seconds:.0f} s after all was mended")
            return


def run(seconds: float, folder: Path, seed: int, pool: int) -> Report:
    """Run the soak; everything it makes is inside `folder`."""
    report = Report()
    model = make_model(folder / "model", "tiny")
    prompts, expected = make_prompts(pool, seed), []
    print(f"references of {len(prompts)} prompts", flush=True)
    with Engine(model, folder / "reference.log", connector=INERT_CONNECTOR, **ENGINE) as inert:
        for prompt in prompts:
            inert.reset_prefix_cache()
            expected.append(inert.generate(prompt))
    ground = Ground(folder)
    options = OPTIONS | {"shared_storage_path": str(ground.shelf)}
    engine = Engine(
        model, folder / "engine.log", connector=SHELF_CONNECTOR, extra_config=options, **ENGINE
    )
    try:
        engine.wait_ready()
        print(f"{seconds:.0f} s of trouble, seed {seed}", flush=True)
        trouble, samples = Trouble(ground, report, seed), Samples(engine, ground.shelf, report)
        client = Client(engine, prompts, expected, report, seed)
        with samples, client, trouble:
            client.stopping.wait(seconds)
        trouble.mend()
        samples.compare()
        if not report.failures:
            recover(engine, report, seed * 1000)
            report.figures["counted"] = {
                name.removeprefix("vllm:kvshelf_"): value
                for name, value in engine.metrics().items()
                if value and name.startswith("vllm:kvshelf_") and name.endswith("_total")
            }
        if "Traceback (most recent call last)" in engine.log():
            report.fail(engine.log().partition("Traceback (most recent call last)")[2])
    except (EngineError, OSError) as error:
        report.fail(str(error))
    finally:
        ground.mend()
        engine.stop(at_once=True)
        ground.close()
    return report


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of trouble; default 600")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--pool", type=int, default=160, help="different prompts; default 160")
    parser.add_argument("--keep", type=Path, metavar="DIR", help="keep logs in this new folder")
    arguments = parser.parse_args()
    if arguments.keep is not None:
        arguments.keep.mkdir(parents=True)
    folder = arguments.keep or Path(tempfile.mkdtemp(prefix="kvshelf-soak-"))
    try:
        report = run(arguments.seconds, folder, arguments.seed, arguments.pool)
    finally:
        if arguments.keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps({"seed": arguments.seed, "machine": os.cpu_count(), **vars(report)}, indent=1))
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
