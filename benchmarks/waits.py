"""Rows ``waits/*``: how soon a stored object is noticed by those who wait for it, and at what cost.

Owns these measurements, and the producer, which is a process of its own. On a local directory and
on a real S3 server behind a delay: the time from the beginning of an object's write until its wait
tells of it, while 1, 10 and 100 wait; processor time of the waiting process while nothing comes,
and while the producer stores objects that no wait needs. The same with watchdog in the place of
kvshelf's own reader of inotify, and with neither, in turn. There is no model.
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from benchmarks.measure import Goal, Row, median, percentile
from benchmarks.proxy import DelayingProxy
from benchmarks.samples import TINY, make_chunks, make_format
from benchmarks.servers import BUCKET, MissingServerError, S3Server
from benchmarks.settings import Settings
from kvshelf.backends import Backend, Properties, open_backend
from kvshelf.backends.notices import Notices
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef
from kvshelf.shelf.waits import Wait, WaitService

#: Mean time between two objects, and the time after which asking slows down.
_GAP_SECONDS: Final = 10e-3
_QUIET_SECONDS: Final = 1.3
_DELAY_SECONDS: Final = 20e-3
_ATTEMPT: Final = "0123456789abcdef" * 2
_CHECKOUT: Final = str(Path(__file__).resolve().parents[1])


class _Otherwise(WrappedBackend):
    """A directory whose notices come from elsewhere, or that has none.

    Parameters
    ----------
    url : str
    notices : Callable, optional
    """

    def __init__(self, url: str, notices: Callable[[str], Notices] | None = None) -> None:
        super().__init__(open_backend(url))
        self._notices = notices
        self._properties = replace(self.inner.properties, notifications=notices is not None)

    @property
    def properties(self) -> Properties:
        return self._properties

    def notices(self) -> Notices | None:
        return None if self._notices is None else self._notices(self.url)


class _Producer:
    """A process that stores objects, one after another, with pauses of random length.

    Parameters
    ----------
    url : str
    options : dict
        Of the storage.
    names : Sequence of str
    nbytes : int
        Size of each object.
    gap : float
        Mean pause, seconds; the pauses are distributed evenly from a half to three halves of it.
    """

    def __init__(
        self, url: str, options: dict[str, Any], names: Sequence[str], nbytes: int, gap: float
    ) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.waits"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            cwd=_CHECKOUT,
            text=True,
        )
        self._send({"url": url, "options": options, "names": names, "nbytes": nbytes, "gap": gap})
        self._receive()

    def __enter__(self) -> _Producer:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def start(self) -> None:
        """Begin to store."""
        self._send({})

    def times(self) -> tuple[list[float], list[float]]:
        """Wait for the end.

        Returns
        -------
        list of float, list of float
            ``time.monotonic()`` at the beginning of each write, and by how many seconds each pause
            was longer than it should have been.
        """
        times, late = self._receive()
        return times, late

    def _send(self, message: dict[str, Any]) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(message) + "\n")
        self._process.stdin.flush()

    def _receive(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise RuntimeError("the producer ended")
        return json.loads(line)


def _produce() -> None:
    """Be the producer's process."""
    task = json.loads(sys.stdin.readline())
    backend = open_backend(task["url"], storage_options=task["options"])
    data = bytes(task["nbytes"])
    # Makes the folders of the namespace, and what the backend needs for its first request.
    backend.write(f"{task['names'][0]}.first", [data])
    draw = random.Random(1)  # noqa: S311  not for secrets
    sys.stdout.write("{}\n")
    sys.stdout.flush()
    sys.stdin.readline()
    times: list[float] = []
    late: list[float] = []
    for name in task["names"]:
        pause, begin = task["gap"] * draw.uniform(0.5, 1.5), time.monotonic()
        time.sleep(pause)
        times.append(time.monotonic())
        late.append(times[-1] - begin - pause)
        backend.write(name, [data])
    sys.stdout.write(json.dumps([times, late]) + "\n")
    sys.stdout.flush()
    backend.close()


class _Consumer:
    """A service on which several wait, each for as many pieces as the others."""

    def __init__(self, backend: Backend, waiting: int, pieces: int, seed: int) -> None:
        self.fmt = make_format(TINY, 1)
        self.shelf = Shelf(backend)
        self.seen: dict[bytes, float] = {}
        self.view = self.shelf.view(self.fmt)
        self.service = WaitService({FULL: self.view}, counters=Counters(), on_seen=self._note)
        self.prompts = [
            make_chunks(self.fmt, pieces, seed=seed + number) for number in range(waiting)
        ]
        self.waits: list[Wait] = []

    def _note(self, keys: Sequence[bytes]) -> None:
        now = time.monotonic()
        for key in keys:
            self.seen.setdefault(key, now)

    def submit(self) -> None:
        """Let all wait."""
        self.waits = [
            self.service.submit([(FULL, chunk) for chunk in prompt], _ATTEMPT)
            for prompt in self.prompts
        ]

    def in_turn(self) -> list[Chunk]:
        """Return all chunks in the order in which they are stored: a piece of each in turn."""
        return [chunk for row in zip(*self.prompts, strict=True) for chunk in row]

    def names(self, chunks: Sequence[Chunk]) -> list[str]:
        return [self.view.name(ObjectRef(chunk, 0)) for chunk in chunks]

    def close(self) -> None:
        self.service.close()
        self.shelf.close()


def _counts(settings: Settings) -> list[int]:
    """Return how many wait, for one row each."""
    return [2] if settings.quick else [1, 10, 100]


def bench_waits(settings: Settings) -> Iterator[Row]:
    """Measure how soon objects are noticed, and what waiting costs."""
    quick = settings.quick
    events = 20 if quick else 1000
    for waiting in _counts(settings):
        root = settings.folder(f"waits-{waiting}")
        settings.progress(f"{waiting} waiting, {events} objects")
        yield _delays("local", "local directory", str(root), {}, waiting, events, _GAP_SECONDS)
    waiting, few = (2, 2) if quick else (100, 20)
    settings.progress(f"{waiting} waiting, {few} objects with long pauses")
    root = settings.folder("waits-quiet")
    gap = _GAP_SECONDS if quick else _QUIET_SECONDS
    yield _delays("local-quiet", "local directory, long pauses", str(root), {}, waiting, few, gap)
    for waiting in _counts(settings):
        root = settings.folder(f"waits-idle-{waiting}")
        settings.progress(f"{waiting} waiting, nothing comes")
        yield _idle(str(root), waiting, 0.1 if quick else 5.0, quick)
    settings.progress("others' objects come")
    root = settings.folder("waits-others")
    _make_folders(root)
    yield _others(str(root), 20 if quick else 1000, 0.0 if quick else _QUIET_SECONDS)
    yield from _compare(settings)
    yield from _far(settings, events)


def _noticed(
    backend: Backend,
    options: dict[str, Any],
    waiting: int,
    events: int,
    gap: float,
    in_vain: int = 0,
) -> tuple[list[float], list[float]]:
    """Return the time from each write until the wait tells of it, and the producer's lateness.

    All wait for `in_vain` further objects, and so until the end.
    """
    consumer = _Consumer(backend, waiting, max(1, events // waiting) + in_vain, seed=1000)
    try:
        chunks = consumer.in_turn()[:events]
        names = consumer.names(chunks)
        nbytes = consumer.fmt.object_size(0)
        with _Producer(backend.url, options, names, nbytes, gap) as producer:
            consumer.submit()
            producer.start()
            times, late = producer.times()
            end = time.monotonic() + 30
            while len(consumer.seen) < len(chunks) and time.monotonic() < end:
                consumer.service.sleep(0.1)
        return [consumer.seen[c.key] - at for c, at in zip(chunks, times, strict=True)], late
    finally:
        consumer.close()


def _delays(
    name: str,
    where: str,
    url: str,
    options: dict[str, Any],
    waiting: int,
    events: int,
    gap: float,
) -> Row:
    """Measure the time from each write until the wait tells of it."""
    backend = open_backend(url, storage_options=options)
    delays, late = _noticed(backend, options, waiting, events, gap)
    p50, p99 = percentile(delays, 0.5), percentile(delays, 0.99)
    return Row(
        f"waits/delay/{name}/{waiting}",
        f"{where}, {waiting} waiting: 99th percentile from an object's write to its notice",
        "99th percentile of the producer's lateness after a sleep",
        ours=[p99],
        floors=[percentile(late, 0.99)],
        goal=Goal(10e-3, "seconds") if name == "local" else None,
        note=f"{len(delays)} objects, median {p50 * 1e3:.2f} ms",
        extra={"p50_seconds": p50, "p99_seconds": p99, "most_seconds": max(delays)},
    )


def _make_folders(root: Path) -> None:
    """Make the folders of all chunks, as they are on a shelf that has been used for a while."""
    for number in range(256):
        (root / make_format(TINY, 1).namespace.folder / f"_/{number:02x}").mkdir(parents=True)


def _share(seconds: float) -> tuple[float, float]:
    """Return the processor time of this process in the next `seconds`, and the time that passed."""
    begin, used = time.monotonic(), time.process_time()
    time.sleep(seconds)
    return time.process_time() - used, time.monotonic() - begin


def _idle(root: str, waiting: int, seconds: float, quick: bool) -> Row:
    """Measure the processor time of waiting in vain."""
    consumer = _Consumer(open_backend(root), waiting, 4, seed=5000)
    try:
        consumer.submit()
        if not quick:
            time.sleep(_QUIET_SECONDS)
        used, passed = _share(seconds)
    finally:
        consumer.close()
    return Row(
        f"waits/idle/{waiting}",
        f"{waiting} waiting, nothing comes: processor time in a second",
        ours=[used / passed],
        goal=Goal(50e-3, "seconds"),
        extra={"share": used / passed},
    )


def _beside_others(backend: Backend, events: int, quiet: float) -> tuple[float, float]:
    """Let 100 wait, for `quiet` seconds alone, while objects come that no wait needs.

    Returns
    -------
    float, float
        Processor time of a second, and objects in it.
    """
    consumer = _Consumer(backend, 100, 4, seed=7000)
    try:
        names = consumer.names(make_chunks(consumer.fmt, events, seed=9))
        nbytes = consumer.fmt.object_size(0)
        with _Producer(backend.url, {}, names, nbytes, _GAP_SECONDS / 5) as producer:
            consumer.submit()
            time.sleep(quiet)
            producer.start()
            begin, used = time.monotonic(), time.process_time()
            producer.times()
            used, passed = time.process_time() - used, time.monotonic() - begin
        return used / passed, events / passed
    finally:
        consumer.close()


def _others(root: str, events: int, quiet: float) -> Row:
    """Measure the processor time of waiting while objects come that no wait needs."""
    share, rate = _beside_others(open_backend(root), events, quiet)
    return Row(
        "waits/others",
        f"100 waiting, {rate:.0f} objects of others in a second: processor time",
        ours=[share],
        extra={"share": share, "objects_in_a_second": rate},
    )


def _compare(settings: Settings) -> Iterator[Row]:
    """Measure kvshelf's own reader of inotify, and what could be in its place, in turn."""
    try:
        from benchmarks.watching import WatchdogNotices
    except ImportError as error:
        yield Row("waits/compared", "other ways to learn what appears", skipped=str(error))
        return
    own = "own"
    # A shelf has at most 256 folders for one namespace.
    ways: dict[str, Callable[[str], Backend]] = {
        own: open_backend,
        "watchdog": partial(_Otherwise, notices=WatchdogNotices),
        "watchdog-256": partial(_Otherwise, notices=partial(WatchdogNotices, most=256)),
        "polling": _Otherwise,
    }
    rounds, counts, events, others = settings.pairs(5), _counts(settings), 300, 1000
    quiet = _QUIET_SECONDS
    if settings.quick:
        rounds, events, others, quiet = 1, 10, 20, 0.0
    delays: dict[tuple[str, int], list[list[float]]] = {}
    shares: dict[str, list[tuple[float, float]]] = {}
    for number in range(rounds):
        for way in ways if number % 2 else reversed(ways):
            settings.progress(f"round {number + 1} of {rounds}, {way}")
            for waiting in counts:
                root = settings.folder(f"waits-{way}-{waiting}-{number}")
                _make_folders(root)
                backend = ways[way](str(root))
                found, _ = _noticed(backend, {}, waiting, events, _GAP_SECONDS, in_vain=1)
                delays.setdefault((way, waiting), []).append(found)
            root = settings.folder(f"waits-{way}-others-{number}")
            _make_folders(root)
            shares.setdefault(way, []).append(_beside_others(ways[way](str(root)), others, quiet))
    floor = "kvshelf's own reader of inotify"
    for way in ways:
        for waiting in counts:
            medians = {of: [median(part) for part in delays[of, waiting]] for of in (way, own)}
            found = [delay for part in delays[way, waiting] for delay in part]
            yield Row(
                f"waits/compared/{way}/{waiting}",
                f"{way}, {waiting} waiting: median from an object's write to its notice",
                floor,
                ours=medians[way],
                floors=medians[own],
                goal=Goal(2e-3, "seconds"),
                extra={"p50_seconds": median(found), "p99_seconds": percentile(found, 0.99)},
            )
        rate = median([rate for _, rate in shares[way]])
        yield Row(
            f"waits/compared/{way}/others",
            f"{way}, 100 waiting, {rate:.0f} objects of others in a second: processor time",
            floor,
            ours=[share for share, _ in shares[way]],
            floors=[share for share, _ in shares[own]],
            goal=Goal(50e-3, "seconds"),
            extra={"objects_in_a_second": rate},
        )


def _far(settings: Settings, events: int) -> Iterator[Row]:
    """Measure the delay on an S3 server behind a delay."""
    events = min(events, 200)
    try:
        with S3Server(settings.folder("waits-s3")) as server:
            for waiting in _counts(settings):
                settings.progress(f"S3, {waiting} waiting")
                with DelayingProxy("127.0.0.1", server.port, _DELAY_SECONDS) as proxy:
                    yield _delays(
                        "s3",
                        f"S3 at {_DELAY_SECONDS * 1e3:g} ms",
                        f"s3://{BUCKET}/{waiting}",
                        server.options(proxy.port),
                        waiting,
                        events,
                        _GAP_SECONDS,
                    )
    except MissingServerError as error:
        yield Row("waits/s3", "S3", skipped=str(error))


if __name__ == "__main__":
    _produce()
