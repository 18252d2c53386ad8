"""Three vLLM engines on one shelf that is damaged all the time: is every answer still right?

An engine with the inert connector first answers every prompt of a random
pool: the reference. Then two engines with equal settings, and one that has a memory tier, loads
within its steps and has few blocks, answer prompts of the pool for as long as asked, on one shelf.
Another thread spoils objects, takes them away, changes permissions, fills the filesystem, stops its
writes, makes it read-only and removes the shelf as a whole, and mends each of these after a while.
In the end all is mended, and the engines must share chunks again without a restart.

Everything computes in float32, each engine on one core. An answer whose tokens differ from the
reference's is a failure, unless where they first differ the reference's token was ahead of its
best rival by less than :data:`TOLERANCE` nats: the order of sums depends on the shapes of batches
in any vLLM. What else is a failure: an answer that takes longer than :data:`LONGEST`, an engine
that ends, a traceback in an engine's log, chunks that are not shared again in the end.

The memory, threads and open files of all engines' processes are sampled and reported.

Where the program may mount (as root), the shelf is an ext4 filesystem of its own in a file;
elsewhere it is a plain directory, and the faults that need a filesystem are left out, which the
report says. Exit code 0 when nothing failed, 1 otherwise.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import platform
import random
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT)]

from rich.console import Console
from rich.table import Table

from examples.models.make_model import RECIPES, make_model
from tests.support.engines import INERT_CONNECTOR, SHELF_CONNECTOR, Answer, Engine, EngineError
from tests.vllm.shelf_files import DAMAGE, ShelfFiles

#: Nats by which the reference's token must have been ahead for a difference to be a failure.
TOLERANCE = 0.01
#: Seconds that no answer may take, whatever the storage does.
LONGEST = 60.0
#: Seconds after which chunks must be shared again once all is mended. A storage that took no
#: writes is asked again after a minute, by stores that pause for half a minute.
RECOVERY = 120.0
#: Bytes of the shelf's filesystem, where it has one.
FILESYSTEM = 192 << 20
NEW_TOKENS = 8
SAMPLE_SECONDS = 2.0

SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 2048,
    "kv_cache_memory_bytes": 32 << 20,
    "max_num_batched_tokens": 1024,
}
#: What an engine has of its own, by name.
ENGINES: dict[str, dict[str, Any]] = {
    "A": {},
    "B": {},
    # Its worker is in the process of the scheduler. A few requests fill its cache.
    "C": {
        "extra_config": {"memory": "48MiB"},
        "distributed_executor_backend": "vllm.v1.executor.uniproc_executor.UniProcExecutor",
        "env": {"OMP_NUM_THREADS": "1"},
        "kv_cache_memory_bytes": 9 << 20,
    },
}


# ------------------------------------------------------------------- prompts and answers


def make_prompts(count: int, seed: int) -> list[list[int]]:
    """Return random prompts of 20 to 1800 tokens, most of which begin like another one."""
    rng = random.Random(seed)
    vocab = RECIPES["tiny"].vocab

    def tokens(length: int) -> list[int]:
        return [rng.randrange(2, vocab) for _ in range(length)]

    prompts: list[list[int]] = [tokens(rng.randint(600, 1500)) for _ in range(max(1, count // 8))]
    while len(prompts) < count:
        base = rng.choice(prompts)
        shared = rng.randint(0, len(base)) if rng.random() < 0.9 else 0
        prompts.append(base[:shared] + tokens(rng.randint(20, min(600, 1800 - shared))))
    return prompts[:count]


@dataclass(frozen=True)
class Difference:
    """Where an answer leaves the reference."""

    position: int
    gap: float
    found: list[int]
    expected: list[int]

    @property
    def failure(self) -> bool:
        """Whether rounding cannot be the cause."""
        return self.gap >= TOLERANCE


def compare(answer: Answer, expected: Answer) -> Difference | None:
    """Compare an answer, which may have been aborted, with the reference."""
    wanted = expected.tokens
    if answer.finish_reason == "abort":
        wanted = wanted[: len(answer.tokens)]
    if answer.tokens == wanted:
        return None
    pairs = zip(answer.tokens, wanted, strict=False)
    shorter = min(len(answer.tokens), len(wanted))
    where = next((i for i, (one, other) in enumerate(pairs) if one != other), shorter)
    # An answer of the wrong length differs for certain.
    gap = expected.gaps[where] if where < shorter else float("inf")
    return Difference(where, gap, answer.tokens, wanted)


# ------------------------------------------------------------------- the report


@dataclass
class Report:
    """What happened; written to by several threads, under the lock."""

    answers: int = 0
    tokens: int = 0
    aborted: int = 0
    near_ties: list[dict[str, Any]] = field(default_factory=list)
    failures: list[str] = field(default_factory=list)
    shelf_tokens: int = 0
    preemptions: int = 0
    prompt_tokens: int = 0
    longest_answer: float = 0.0
    faults: dict[str, int] = field(default_factory=dict)
    left_out: list[str] = field(default_factory=list)
    samples: list[dict[str, float]] = field(default_factory=list)
    counters: list[dict[str, float]] = field(default_factory=list)
    recovery_seconds: float | None = None

    def __post_init__(self) -> None:
        self.lock = threading.Lock()

    def fail(self, what: str) -> None:
        """Note a failure."""
        with self.lock:
            self.failures.append(what)
        print(f"FAILURE: {what}", flush=True)

    def judge(self, engine: str, prompt: int, answer: Answer, expected: Answer) -> None:
        """Note an answer."""
        difference = compare(answer, expected)
        with self.lock:
            self.answers += 1
            self.tokens += len(answer.tokens)
            self.aborted += answer.finish_reason == "abort"
            self.longest_answer = max(self.longest_answer, answer.seconds)
            if difference is not None and not difference.failure:
                self.near_ties.append({"engine": engine, "prompt": prompt, **asdict(difference)})
        if answer.finish_reason not in ("length", "abort"):
            self.fail(f"engine {engine}, prompt {prompt}: ended with {answer.finish_reason!r}")
        if difference is not None and difference.failure:
            self.fail(f"engine {engine}, prompt {prompt}: {difference}")
        if answer.seconds > LONGEST:
            self.fail(f"engine {engine}, prompt {prompt}: took {answer.seconds:.1f} s")

    def flatness(self) -> list[dict[str, Any]]:
        """Compare the second fifth of the samples with the last, for each thing sampled."""
        fifth = len(self.samples) // 5
        if not fifth:
            return []
        found = []
        for name in (key for key in self.samples[0] if key != "second"):
            early = median(s[name] for s in self.samples[fifth : 2 * fifth])
            late = median(s[name] for s in self.samples[-fifth:])
            most = max(s[name] for s in self.samples)
            found.append({"what": name, "early": early, "late": late, "most": most})
        return found


# ------------------------------------------------------------------- where the shelf is


class Ground:
    """The filesystem that a shelf lies on, and what can be done to it."""

    def __init__(self, folder: Path) -> None:
        self.mount = folder / "ground"
        self.mount.mkdir()
        self.shelf = self.mount / "shelf"
        self.why_plain = ""
        self._frozen = False
        image = folder / "image"
        with image.open("wb") as file:
            file.truncate(FILESYSTEM)
        try:
            self._run("mkfs.ext4", "-q", "-F", "-m", "0", str(image))
            self._run("mount", "-o", "loop", str(image), str(self.mount))
        except (OSError, subprocess.CalledProcessError) as error:
            self.why_plain = f"nothing can be mounted here ({error})"

    @staticmethod
    def _run(*command: str) -> None:
        subprocess.run(command, check=True, capture_output=True, timeout=60)

    @property
    def own(self) -> bool:
        """Whether the shelf has a filesystem of its own."""
        return not self.why_plain

    def stop_writes(self) -> None:
        """Let every write wait, in the kernel, until :meth:`mend`."""
        self._frozen = True
        self._run("fsfreeze", "-f", str(self.mount))

    def make_read_only(self) -> None:
        """Let every write fail with EROFS."""
        self._run("mount", "-o", "remount,ro", str(self.mount))

    def fill(self) -> None:
        """Let every write fail with ENOSPC."""
        with contextlib.suppress(OSError), (self.mount / "ballast").open("wb") as file:
            os.posix_fallocate(file.fileno(), 0, 64 << 10)
            while True:
                file.write(bytes(1 << 20))
                file.flush()

    def mend(self) -> None:
        """Undo all of these."""
        if not self.own:
            return
        if self._frozen:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._run("fsfreeze", "-u", str(self.mount))
            self._frozen = False
        with contextlib.suppress(subprocess.CalledProcessError):
            self._run("mount", "-o", "remount,rw", str(self.mount))
        (self.mount / "ballast").unlink(missing_ok=True)

    def close(self) -> None:
        """Unmount."""
        self.mend()
        if self.own:
            with contextlib.suppress(subprocess.CalledProcessError):
                self._run("umount", "-l", str(self.mount))


# ------------------------------------------------------------------- faults


class Trouble:
    """Makes random trouble on a shelf, on a thread of its own, and mends it.

    Parameters
    ----------
    ground : Ground
    report : Report
    seed : int
    """

    def __init__(self, ground: Ground, report: Report, seed: int) -> None:
        self._ground = ground
        self._report = report
        self._rng = random.Random(seed)
        self._files = ShelfFiles(ground.shelf)
        self._stop = threading.Event()
        self._moved = ground.mount / "shelf is away"
        self._modes: dict[Path, int] = {}
        self._thread = threading.Thread(target=self._run, name="trouble", daemon=True)
        # Objects are spoilt far more often than the whole shelf: only what is there can be.
        self._small: dict[str, Callable[[Path], None]] = {
            **DAMAGE,
            "deleted": self._delete,
            "cut at a random place": self._cut,
            "random byte flipped": self._flip,
            "zeros from somewhere on": self._zero,
            "replaced by random bytes": self._noise,
            "character device": self._device,
        }
        self._large: dict[str, Callable[[], None]] = {
            "folder of keys deleted": self._delete_fan_out,
            "namespace deleted": self._delete_namespace,
            "namespace.json spoilt": self._spoil_description,
            "shelf moved away": self._move_away,
            "no permission to read": lambda: self._forbid(0o300),
            "no permission to write": lambda: self._forbid(0o500),
            "object unreadable": self._forbid_object,
        }
        on_filesystem: dict[str, Callable[[], None]] = {
            "filesystem full": ground.fill,
            "writes stop": ground.stop_writes,
            "filesystem read-only": ground.make_read_only,
        }
        if ground.own:
            self._large |= on_filesystem
        else:
            report.left_out += [f"{name}: {ground.why_plain}" for name in on_filesystem]

    def __enter__(self) -> Trouble:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join(30)
        self._mend()

    def _run(self) -> None:
        while not self._stop.wait(self._rng.uniform(0.05, 0.5)):
            large = self._rng.random() < 0.05
            try:
                name = self._shelf_trouble() if large else self._object_trouble()
            except Exception:  # noqa: BLE001
                # What was to be spoilt is gone, or spoilt already so that it cannot be once more.
                name = None
            if name is not None:
                with self._report.lock:
                    faults = self._report.faults
                    faults[name] = faults.get(name, 0) + 1
            if large:
                self._stop.wait(self._rng.uniform(0.5, 4.0))
                self._mend()

    def _object_trouble(self) -> str | None:
        objects = sorted(self._files.objects())
        name = self._rng.choice(sorted(self._small))
        if name != "deleted":
            # Whoever opens a FIFO waits for somebody at its other end.
            objects = [path for path in objects if path.is_file() and not path.is_symlink()]
        if not objects:
            return None
        for path in self._rng.sample(objects, min(len(objects), self._rng.choice([1, 1, 2, 5]))):
            self._small[name](path)
        return name

    def _shelf_trouble(self) -> str:
        name = self._rng.choice(sorted(self._large))
        self._large[name]()
        return name

    def _mend(self) -> None:
        self._ground.mend()
        for path, mode in self._modes.items():
            with contextlib.suppress(OSError):
                path.chmod(mode)
        self._modes.clear()
        if self._moved.exists():
            if self._ground.shelf.exists():
                # The engines have begun a new one. Its objects are as good as the old.
                shutil.rmtree(self._moved, ignore_errors=True)
            else:
                self._moved.rename(self._ground.shelf)

    @staticmethod
    def _delete(path: Path) -> None:
        if path.is_dir() and not path.is_symlink():
            path.rmdir()
        else:
            path.unlink()

    def _cut(self, path: Path) -> None:
        os.truncate(path, self._rng.randrange(path.stat().st_size))

    def _flip(self, path: Path) -> None:
        with path.open("r+b") as file:
            at = self._rng.randrange(path.stat().st_size)
            file.seek(at)
            (byte,) = file.read(1)
            file.seek(at)
            file.write(bytes([byte ^ 1 << self._rng.randrange(8)]))

    def _zero(self, path: Path) -> None:
        size = path.stat().st_size
        os.truncate(path, self._rng.randrange(size))
        os.truncate(path, size)

    def _noise(self, path: Path) -> None:
        path.write_bytes(self._rng.randbytes(path.stat().st_size))

    @staticmethod
    def _device(path: Path) -> None:
        path.unlink()
        try:
            os.mknod(path, 0o600 | 0o020000, os.makedev(1, 5))
        except PermissionError:
            os.mkfifo(path)

    def _delete_fan_out(self) -> None:
        path = self._rng.choice(sorted(self._files.objects()))
        shutil.rmtree(path.parent, ignore_errors=True)

    def _delete_namespace(self) -> None:
        shutil.rmtree(self._rng.choice(self._files.namespaces()), ignore_errors=True)

    def _spoil_description(self) -> None:
        folder = self._rng.choice(self._files.namespaces())
        (folder / "namespace.json").write_bytes(self._rng.randbytes(100))

    def _move_away(self) -> None:
        self._ground.shelf.rename(self._moved)

    def _forbid(self, mode: int) -> None:
        folder = self._rng.choice([self._ground.shelf, *self._files.namespaces()])
        self._modes.setdefault(folder, folder.stat().st_mode & 0o7777)
        folder.chmod(mode)

    def _forbid_object(self) -> None:
        path = self._rng.choice(sorted(self._files.objects()))
        self._modes.setdefault(path, path.stat().st_mode & 0o7777)
        path.chmod(0)


# ------------------------------------------------------------------- engines


class Client:
    """Sends prompts of the pool to one engine, on a thread of its own, and has answers judged."""

    def __init__(
        self,
        name: str,
        engine: Engine,
        prompts: list[list[int]],
        expected: list[Answer],
        report: Report,
        seed: int,
    ) -> None:
        self._name = name
        self._engine = engine
        self._prompts = prompts
        self._expected = expected
        self._report = report
        self._rng = random.Random(seed)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"client {name}", daemon=True)
        self._thread.start()

    def stop(self) -> None:
        """Wait for the answers under way."""
        self._stop.set()
        self._thread.join(2 * LONGEST)
        if self._thread.is_alive():
            self._report.fail(f"engine {self._name}: a request never ended")

    @property
    def running(self) -> bool:
        """Whether the engine still answers."""
        return self._thread.is_alive()

    def _run(self) -> None:
        try:
            while not self._stop.is_set():
                self._batch()
        except (EngineError, OSError) as error:
            self._report.fail(f"engine {self._name}: {str(error)[:2000]}")

    def _batch(self) -> None:
        rng = self._rng
        numbers = [rng.randrange(len(self._prompts)) for _ in range(rng.choice([1, 1, 2, 4, 6]))]
        requests = [
            (number, self._engine.submit(self._prompts[number], max_tokens=NEW_TOKENS))
            for number in numbers
        ]
        if rng.random() < 0.1:
            time.sleep(rng.uniform(0, 0.05))
            requests[-1][1].abort()
        for number, request in requests:
            answer = request.result(LONGEST + 30)
            self._report.judge(self._name, number, answer, self._expected[number])
        # What vLLM remembers itself is not loaded.
        if rng.random() < 0.6:
            self._engine.reset_prefix_cache(connector=rng.random() < 0.05)


def sample(name: str, engine: Engine) -> dict[str, float]:
    """Return memory, threads and open files of all processes of an engine together."""
    memory = threads = files = 0
    for process in engine.processes():
        with contextlib.suppress(OSError):
            status = Path(f"/proc/{process}/status").read_text()
            fields = dict(line.split(":", 1) for line in status.splitlines())
            memory += int(fields["RssAnon"].split()[0]) + int(fields["RssShmem"].split()[0])
            threads += int(fields["Threads"])
            files += len(os.listdir(f"/proc/{process}/fd"))
    return {
        f"{name}: memory, MiB": memory / 1024,
        f"{name}: threads": threads,
        f"{name}: open files": files,
    }


@contextlib.contextmanager
def sampling(engines: dict[str, Engine], report: Report) -> Iterator[None]:
    """Sample the engines' processes while the context is open."""
    stop, begin = threading.Event(), time.monotonic()

    def run() -> None:
        while not stop.wait(SAMPLE_SECONDS):
            row = {"second": round(time.monotonic() - begin, 1)}
            for name, engine in engines.items():
                row |= sample(name, engine)
            report.samples.append(row)

    thread = threading.Thread(target=run, name="samples", daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def references(model: Path, logs: Path, prompts: list[list[int]], core: int) -> list[Answer]:
    """Answer all prompts without a shelf and without vLLM's prefix cache."""
    engine = Engine(model, logs / "reference.log", connector=INERT_CONNECTOR, core=core, **SETTINGS)
    with engine:
        answers = []
        for prompt in prompts:
            engine.reset_prefix_cache()
            answers.append(engine.generate(prompt, max_tokens=NEW_TOKENS))
    return answers


def recovered(engines: list[Engine], report: Report, seed: int) -> None:
    """Note how long it takes until one engine loads what the other has just stored."""
    begin, number = time.monotonic(), 0
    while time.monotonic() - begin < RECOVERY:
        number += 1
        [prompt] = make_prompts(1, seed + number)
        engines[0].generate(prompt, max_tokens=1)
        # What was stored last is reported, and written, by the next steps.
        time.sleep(0.5)
        engines[1].reset_prefix_cache()
        answer = engines[1].generate(prompt, max_tokens=1)
        if (answer.shelf_tokens or 0) >= 256:
            report.recovery_seconds = round(time.monotonic() - begin, 1)
            return
    report.fail(f"chunks are not shared again {RECOVERY:.0f} s after all was mended")


def check_logs(engines: dict[str, Engine], report: Report) -> None:
    """Note tracebacks: whatever a storage does is expected."""
    for name, engine in engines.items():
        lines = engine.log().splitlines()
        for number, line in enumerate(lines):
            if "Traceback (most recent call last)" in line:
                shown = "\n".join(lines[max(0, number - 2) : number + 30])
                report.fail(f"engine {name}: a traceback in its log:\n{shown}")
                break


def collect(engines: dict[str, Engine], report: Report) -> None:
    """Note what the engines counted."""
    for engine in engines.values():
        metrics = engine.metrics()
        report.counters.append(
            {
                name.removeprefix("vllm:kvshelf_").removesuffix("_total"): value
                for name, value in metrics.items()
                if name.startswith("vllm:kvshelf_") and name.endswith("_total")
            }
        )
        report.preemptions += int(metrics["vllm:num_preemptions_total"])
        report.shelf_tokens += int(metrics["vllm:external_prefix_cache_hits_total"])
        report.prompt_tokens += int(metrics["vllm:prompt_tokens_total"])


def run(seconds: float, folder: Path, seed: int, pool: int) -> Report:
    """Run the soak; everything it makes is inside `folder`."""
    report = Report()
    model = make_model(folder / "model", "tiny")
    prompts = make_prompts(pool, seed)
    cores = sorted(os.sched_getaffinity(0))
    print(f"references of {len(prompts)} prompts", flush=True)
    expected = references(model, folder, prompts, cores[0])
    ground = Ground(folder)
    engines: dict[str, Engine] = {}
    try:
        for i, (name, own) in enumerate(ENGINES.items()):
            shared = {
                "shared_storage_path": str(ground.shelf),
                "staging_bytes": 64 << 20,
                # Loads are compared, also where computing is sooner.
                "admission": "always",
            }
            engines[name] = Engine(
                model,
                folder / f"{name}.log",
                connector=SHELF_CONNECTOR,
                core=cores[i % len(cores)],
                heed_permissions=True,
                **SETTINGS | own | {"extra_config": shared | own.get("extra_config", {})},
            )
        for engine in engines.values():
            engine.wait_ready()
        print(f"{seconds:.0f} s of trouble, seed {seed}", flush=True)
        with sampling(engines, report):
            clients = [
                Client(name, engine, prompts, expected, report, seed + i)
                for i, (name, engine) in enumerate(engines.items())
            ]
            end = time.monotonic() + seconds
            with Trouble(ground, report, seed):
                while time.monotonic() < end and all(client.running for client in clients):
                    time.sleep(0.2)
            for client in clients:
                client.stop()
            if not report.failures:
                recovered(list(engines.values()), report, seed * 1000)
                collect(engines, report)
        check_logs(engines, report)
    except (EngineError, OSError) as error:
        report.fail(str(error)[:4000])
    finally:
        ground.mend()
        for engine in engines.values():
            engine.stop(at_once=True)
        ground.close()
    return report


# ------------------------------------------------------------------- output


def show(report: Report) -> None:
    """Print the report as tables."""
    console = Console(width=100)
    table = Table("what", "value", title="soak", title_justify="left")
    for what, value in {
        "answers compared": report.answers,
        "of these aborted": report.aborted,
        "tokens compared": report.tokens,
        f"near-ties below {TOLERANCE} nats": len(report.near_ties),
        "failures": len(report.failures),
        "prompt tokens": report.prompt_tokens,
        "of these from the shelf": report.shelf_tokens,
        "preemptions": report.preemptions,
        "longest answer, s": round(report.longest_answer, 2),
        "shared again after, s": report.recovery_seconds,
    }.items():
        table.add_row(what, str(value))
    console.print(table)
    table = Table("trouble", "times", title="trouble made", title_justify="left")
    for name, times in sorted(report.faults.items()):
        table.add_row(name, str(times))
    for name in report.left_out:
        table.add_row(f"left out: {name}", "0")
    console.print(table)
    table = Table("counter", *ENGINES, title="counted by the engines", title_justify="left")
    for name in sorted({name for counters in report.counters for name in counters}):
        row = [f"{counters.get(name, 0):,.0f}" for counters in report.counters]
        table.add_row(name, *row)
    console.print(table)
    table = Table(
        *("processes of", "early", "late", "most"),
        title="over the run (medians of the second and the last fifth)",
        title_justify="left",
    )
    for found in report.flatness():
        numbers = [f"{found[key]:,.0f}" for key in ("early", "late", "most")]
        table.add_row(found["what"], *numbers)
    console.print(table)
    for failure in report.failures:
        console.print(failure, markup=False)


def as_json(report: Report, seconds: float, seed: int) -> dict[str, Any]:
    """Return the report as plain data."""
    return {
        "seconds": seconds,
        "seed": seed,
        "tolerance_nats": TOLERANCE,
        "machine": f"{platform.machine()}, {len(os.sched_getaffinity(0))} processors",
        **asdict(report),
        "flatness": report.flatness(),
    }


def main() -> int:
    """Run the command line; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--seconds", type=float, default=600.0, help="of trouble; default 600")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="default: the time")
    parser.add_argument("--pool", type=int, default=160, help="different prompts; default 160")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the report to FILE")
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
    show(report)
    if arguments.json is not None:
        found = as_json(report, arguments.seconds, arguments.seed)
        arguments.json.write_text(json.dumps(found, indent=1) + "\n")
    return 1 if report.failures else 0


if __name__ == "__main__":
    sys.exit(main())
