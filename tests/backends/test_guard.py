"""Deadlines and breakers around a backend: what opens them, what closes them, what passes."""

from __future__ import annotations

import errno
import math
import os
import random
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest

from kvshelf.backends import (
    Backend,
    Checked,
    Deadlines,
    Touched,
    base,
    guard,
    trials,
)
from kvshelf.backends import breaker as breaker_module
from kvshelf.backends.base import WriteResult, delete_one
from kvshelf.backends.breaker import LEAST_FAILURES, Backoff, Breaker, BreakerState
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.oserrors import storage_error
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import (
    BoundReachedError,
    NoSpaceStorageError,
    NotRegularError,
    ObjectMissingError,
    PermanentStorageError,
    ProcessLimitError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
    UnavailableStorageError,
)
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until

NEVER = Backoff(1000.0, 1000.0)


def eio() -> TransientStorageError:
    return TransientStorageError(errno.EIO, "EIO")


class Rig:
    """A guarded folder with some objects, and what the guard said and counted."""

    def __init__(self, root: Path, backoff: Backoff) -> None:
        self.faults = FaultyStorage(posix(root))
        self.guard = GuardedBackend(self.faults, backoff=backoff)
        self.counts: dict[str, int] = {}
        self.guard.count_into(self.count)
        self.names = [f"o{i}" for i in range(8)]
        #: Those of other tests, some of which are stuck for good.
        self.other_trials = {t for t in threading.enumerate() if t.name == "kvshelf-trial"}
        for name in self.names:
            self.faults.inner.write(name, [name.encode()])

    def count(self, name: str) -> None:
        self.counts[name] = self.counts.get(name, 0) + 1

    def read(self, name: str) -> bytes:
        data = bytearray(2)
        with self.guard.open(name) as reader:
            assert reader.read_into(memoryview(data), 0) == 2
        return bytes(data)

    def trials(self) -> list[threading.Thread]:
        running = (t for t in threading.enumerate() if t.name == "kvshelf-trial")
        return [thread for thread in running if thread not in self.other_trials]

    def fail(self, times: int) -> None:
        for number in range(times):
            with pytest.raises(TransientStorageError, match="EIO"):
                self.guard.open(self.names[number % len(self.names)])


@pytest.fixture
def rig(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(tmp_path / "shelf", getattr(request, "param", Backoff()))
    with closing(rig.guard):
        yield rig


def make_clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Let the clock of guard and breaker stand, at what the list holds."""
    now = [1000.0]
    for module in (guard, breaker_module):
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic=lambda: now[0]))
    return now


def start(rig: Rig, call: Callable[[Rig], object]) -> threading.Thread:
    """Make a call that may fail on a thread of its own."""

    def body() -> None:
        with suppress(StorageError):
            call(rig)

    thread = threading.Thread(target=body, daemon=True)
    thread.start()
    return thread


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == guard.__name__]


# ------------------------------------------------------------------------- errors


@pytest.mark.parametrize("rig", [NEVER], indirect=True)
def test_storage_that_fails_is_not_asked_any_more(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    rig.faults.add(Fault("open", error=eio))
    rig.fail(LEAST_FAILURES)
    assert rig.guard.reads.state is BreakerState.OPEN
    assert not rig.guard.properties.available
    rig.faults.counts.clear()
    for call in (
        lambda: rig.guard.open("o1"),
        lambda: rig.guard.info("o1"),
        lambda: rig.guard.write("new", [b"x"]),
        rig.guard.folders,
        lambda: list(rig.guard.list()),
        lambda: delete_one(rig.guard, "o1"),
        lambda: rig.guard.set_aside("o1"),
    ):
        with pytest.raises(UnavailableStorageError, match="not tried") as caught:
            call()
        assert "EIO" in caught.value.reason
    answers = rig.guard.stat(rig.names)
    assert all(isinstance(answer, UnavailableStorageError) for answer in answers)
    assert len(answers) == len(rig.names)
    rig.guard.touch("o1")
    assert not rig.faults.counts
    assert rig.counts == {"breaker_opens": 1}
    (line,) = lines(caplog)
    assert "circuit breaker open ([Errno 5] EIO)" in line


SUCCESSES: dict[str, Callable[[Rig], object]] = {
    "read": lambda rig: rig.read("o1"),
    "missing": lambda rig: rig.guard.open("none"),
    "no file": lambda rig: rig.guard.open("folder"),
}


@pytest.mark.parametrize("success", SUCCESSES)
def test_storage_that_answers_more_often_than_it_fails_is_asked_on(rig: Rig, success: str) -> None:
    def fail() -> None:
        assert rig.guard.reads.is_closed
        with pytest.raises(TransientStorageError):
            rig.guard.open("o2")

    rig.faults.inner.write("folder/o", [b"x"])
    rig.faults.add(Fault("open", "o2", error=eio))
    fail()
    for _ in range(LEAST_FAILURES + 1):
        with suppress(ObjectMissingError, NotRegularError):
            SUCCESSES[success](rig)
    # To open is a success too, where it is one.
    for _ in range((LEAST_FAILURES + 1) * (1 + (success == "read")) - 1):
        fail()
    assert not rig.guard.reads.is_closed


def limit() -> ProcessLimitError:
    return ProcessLimitError(errno.EMFILE, "EMFILE")


@pytest.mark.parametrize("rig", [NEVER], indirect=True)
def test_calls_that_are_late_for_want_of_files_open_no_breaker(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "is_out_of_files", lambda: True)
    gate = threading.Event()
    rig.faults.add(Fault("open", wait=gate, error=limit))
    threads = [start(rig, lambda rig: rig.guard.open("o1")) for _ in range(LEAST_FAILURES)]
    until(lambda: rig.counts.get("late_calls") == LEAST_FAILURES)
    gate.set()
    for thread in threads:
        thread.join(60)
    assert rig.guard.reads.is_closed


@pytest.mark.parametrize("hangs", [True, False])
@pytest.mark.parametrize("has_worked", [True, False])
def test_trial_whose_call_does_not_work_reads_what_worked_last_or_lists_the_root(
    rig: Rig, has_worked: bool, hangs: bool
) -> None:
    """The call that failed may be the only one that does, or hang for ever."""
    rig.faults.add(Fault("open", "o[02]", error=eio, times=LEAST_FAILURES if hangs else None))
    gate = rig.faults.hang("open", "o[02]" if hangs else "none")
    if has_worked:
        assert rig.read("o1") == b"o1"
    for name in ("o0", "o2") * (LEAST_FAILURES // 2):
        with pytest.raises(TransientStorageError):
            rig.guard.open(name)
    until(lambda: rig.guard.reads.is_closed)
    assert rig.faults.counts["folders"] == (not has_worked)
    assert rig.guard.reads.failed_trials == hangs
    gate.set()
    until(lambda: not rig.trials())


def test_trial_that_finds_the_object_gone_shows_that_the_storage_works(rig: Rig) -> None:
    fault = rig.faults.add(Fault("open", "o1", error=eio, times=0))
    assert rig.read("o1") == b"o1"
    fault.times = None
    for _ in range(LEAST_FAILURES):
        with pytest.raises(TransientStorageError):
            rig.guard.open("o1")
    assert delete_one(rig.faults.inner, "o1")
    rig.faults.heal()
    until(lambda: rig.guard.reads.is_closed)
    assert rig.faults.counts["folders"] == 0


def test_trial_reads_what_it_opens(rig: Rig) -> None:
    """That it can be opened does not show that its bytes can be read."""
    assert rig.read("o1") == b"o1"
    rig.faults.add(Fault("read", error=eio))
    for _ in range(LEAST_FAILURES):
        with suppress(TransientStorageError):
            rig.read("o1")
        with suppress(TransientStorageError):
            rig.read("o2")
    until(lambda: rig.guard.reads.failed_trials > 2)
    assert not rig.guard.reads.is_closed
    # A later thread may have the identity of a trial's.
    rig.faults.counts.clear()
    for _ in range(4):
        start(rig, CALLS["read"]).join()
    assert not rig.faults.counts
    rig.faults.heal()
    until(lambda: rig.guard.reads.is_closed)


def test_guard_that_is_closed_has_no_thread_and_one_unwatched_tells_nobody(rig: Rig) -> None:
    watch, former = Watch(), Watch()
    rig.guard.watch(watch)
    rig.guard.watch(former)
    rig.guard.unwatch(former)
    rig.guard.reads.trip("it was so")
    assert watch.stopped.is_set() and not former.stopped.is_set()
    threads = [thread for thread in threading.enumerate() if thread.name == "kvshelf-guard"]
    rig.guard.close()
    until(lambda: not any(thread.is_alive() for thread in threads))


def test_trial_that_fails_after_another_worked_does_not_stop_it_again() -> None:
    told: list[str] = []
    breaker = Breaker(["read"], Backoff(0.0, 60.0), lambda _, reason: told.append(reason))
    breaker.trip("broken")
    assert breaker.try_half_open()
    for _ in range(2):
        breaker.close()
    breaker.trip("a trial that hung", trial=True)
    assert breaker.state is BreakerState.CLOSED
    assert told == ["broken", ""]


def test_backoff_grows_up_to_a_bound_and_differs(monkeypatch: pytest.MonkeyPatch) -> None:
    now = make_clock(monkeypatch)
    seen: set[float] = set()
    numbers_of_the_program = random.getstate()
    for _ in range(5):
        breaker = Breaker(["read"], Backoff(1.0, 60.0), lambda *_: None)
        breaker.trip("broken")
        for rest in range(12):
            longest = min(2.0**rest, 60.0)
            pause = breaker.retry_at - now[0]
            assert longest / 2 <= pause <= longest
            seen.add(round(pause / longest, 6))
            assert not breaker.try_half_open()
            now[0] = breaker.retry_at
            assert breaker.try_half_open()
            assert breaker.state is BreakerState.HALF_OPEN
            breaker.record_failure("read", "still broken")
            assert breaker.state is BreakerState.OPEN
    assert len(seen) > 30
    assert random.getstate() == numbers_of_the_program


# ------------------------------------------------------------------------- deadlines


def test_deadlines_come_from_the_backend_unless_they_are_given(tmp_path: Path) -> None:
    inner = FaultyStorage(posix(tmp_path), deadlines=Deadlines(probe=7.0))
    assert GuardedBackend(inner).deadlines.probe == 7.0
    given = Deadlines(probe=3.0)
    assert GuardedBackend(inner, given).deadlines is given
    assert Deadlines().to_read(100_000_000) == Deadlines().to_write(100_000_000) == 7.0


CALLS = {
    "stat": lambda rig: rig.guard.stat(["o1"]),
    "info": lambda rig: rig.guard.info("o1"),
    "open": lambda rig: rig.guard.open("o1"),
    "read": lambda rig: rig.read("o1"),
    "list": lambda rig: list(rig.guard.list()),
    "folders": lambda rig: rig.guard.folders(),
    "write": lambda rig: rig.guard.write("new", [b"x"]),
    "delete": lambda rig: delete_one(rig.guard, "o1"),
    "set_aside": lambda rig: rig.guard.set_aside("o1"),
    "touch": lambda rig: rig.guard.touch("o1"),
    "entries": lambda rig: list(rig.guard.list(hidden=True)),
    "space": lambda rig: rig.guard.space(),
}


class Watch:
    """Hears what the guard notices."""

    def __init__(self, enough: int = 1000) -> None:
        self.late: list[int] = []
        self.stopped = threading.Event()
        self._enough = enough

    def on_late_call(self, thread: int) -> bool:
        self.late.append(thread)
        return len(self.late) >= self._enough

    def on_reads_open(self) -> None:
        self.stopped.set()


@pytest.mark.parametrize("rig", [NEVER], indirect=True)
@pytest.mark.parametrize(
    ("operation", "breaker"),
    [("stat", "reads"), ("read", "reads"), ("close", "reads"), ("write", "writes")],
)
def test_calls_that_never_return_open_the_breaker(rig: Rig, operation: str, breaker: str) -> None:
    """A mount may ask its server when a file is closed, too, and the server may be gone."""
    gate = rig.faults.hang(operation)
    watch = Watch()
    rig.guard.watch(watch)
    call = CALLS["read" if operation == "close" else operation]
    threads = [start(rig, call)]
    until(lambda: watch.late == [threads[0].ident])
    assert rig.guard.late_calls == 1
    assert getattr(rig.guard, breaker).is_closed
    threads.append(start(rig, call))
    until(lambda: not getattr(rig.guard, breaker).is_closed)
    assert watch.stopped.wait(PATIENCE if breaker == "reads" else 0.0) is (breaker == "reads")
    if breaker == "writes":
        assert rig.read("o1") == b"o1"
        with pytest.raises(UnavailableStorageError):
            delete_one(rig.guard, "o1")
        assert rig.guard.properties.read_only
        with pytest.raises(UnavailableStorageError):
            rig.guard.write("new", [b"x"])
    gate.set()
    until(lambda: rig.guard.late_calls == 0)


@pytest.mark.parametrize("rig", [NEVER], indirect=True)
def test_too_many_stuck_threads_open_it_whatever_else_goes_well(rig: Rig) -> None:
    gate = rig.faults.hang("read", "o0")
    rig.guard.watch(Watch(enough=1))
    start(rig, lambda rig: rig.read("o0"))
    while rig.guard.reads.is_closed:
        with suppress(UnavailableStorageError):
            rig.read("o1")
    gate.set()


@pytest.mark.long
@pytest.mark.parametrize("operation", ["*", "close"])
def test_frozen_storage_is_asked_by_few_threads_and_used_when_it_thaws(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, operation: str
) -> None:
    monkeypatch.setattr(trials, "_MOST", 2)
    assert rig.read("o1") == b"o1"
    gate = rig.faults.hang(operation)
    for name in ("o2", "o3"):
        start(rig, partial(Rig.read, name=name))
    until(lambda: rig.guard.reads.failed_trials > 3)
    asking = rig.trials()
    assert 0 < len(asking) <= 2
    gate.set()
    until(lambda: rig.guard.reads.state is BreakerState.CLOSED)
    assert rig.read("o1") == b"o1"
    until(lambda: not any(thread.is_alive() for thread in asking))


def test_trials_that_are_never_heard_of_again_have_failed(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trials, "TRIAL_BYTES", 0)
    gate = threading.Event()
    with monkeypatch.context() as patch:
        # As when the thread is kept outside of any call.
        patch.setattr(rig.guard._trials, "_call", lambda kind, name: gate.wait())
        rig.guard.reads.trip("it was so")
        until(lambda: rig.guard.reads.failed_trials > 0)
    until(lambda: rig.guard.reads.state is BreakerState.CLOSED)
    assert rig.read("o1") == b"o1"
    gate.set()
    until(lambda: not rig.trials())


@pytest.mark.parametrize("rig", [NEVER], indirect=True)
def test_all_reads_of_an_object_have_one_deadline(rig: Rig) -> None:
    rig.faults.add(Fault("read", wait=1.0))

    def trickle() -> None:
        with rig.guard.open("o1") as reader:
            for _ in range(20):
                reader.read_into(memoryview(bytearray(2)), 0)

    with pytest.raises(TransientStorageError, match="longer than"):
        trickle()


@pytest.mark.parametrize("rig", [Backoff(0.02, 0.05)], indirect=True)
def test_it_is_asked_again_when_no_thread_could_be_started_for_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    rig.faults.add(Fault("*", error=eio))
    rig.fail(LEAST_FAILURES)
    with none_can_be_started(monkeypatch, "kvshelf-"):
        trials = rig.guard.reads.failed_trials
        until(lambda: rig.guard.reads.failed_trials > trials + 2)
    rig.faults.heal()
    until(lambda: rig.guard.reads.state is BreakerState.CLOSED)
    assert rig.read("o1") == b"o1"


def test_nothing_is_asked_while_no_thread_can_watch_over_it(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with none_can_be_started(monkeypatch, "kvshelf-"):
        for _ in range(3):
            with pytest.raises(UnavailableStorageError, match="no thread could be started"):
                rig.read("o1")
    assert not rig.faults.counts
    assert rig.guard.late_calls == 0
    assert rig.read("o1") == b"o1"
    assert rig.guard._thread is not None
    assert rig.guard._thread.is_alive()


def test_rest_ends_though_no_thread_could_watch_when_it_began(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    with none_can_be_started(monkeypatch, "kvshelf-"):
        rig.guard.reads.trip("it was so")
        with pytest.raises(UnavailableStorageError):
            rig.read("o1")
    with pytest.raises(UnavailableStorageError):
        rig.read("o1")
    until(lambda: rig.guard.reads.state is BreakerState.CLOSED)
    assert rig.read("o1") == b"o1"


def test_calls_of_a_process_that_was_stopped_are_not_late(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = make_clock(monkeypatch)
    looks: list[float] = []
    look = rig.guard._check_calls
    monkeypatch.setattr(rig.guard, "_check_calls", lambda now: (looks.append(now), look(now)))
    gate = rig.faults.hang("info")
    thread = start(rig, CALLS["info"])
    until(lambda: bool(looks))
    clock[0] += 3600.0
    until(lambda: looks[-1] == clock[0])
    gate.set()
    thread.join(PATIENCE)
    assert not rig.counts


# ------------------------------------------------------------------------- refused writes


@pytest.mark.parametrize("code", ["ENOSPC", "EDQUOT", "EROFS", "EACCES", "EPERM"])
def test_refused_write_stops_writes_for_half_a_minute_and_nothing_else(
    rig: Rig, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse() -> StorageError:
        number = getattr(errno, code)
        return storage_error(OSError(number, os.strerror(number)), "writing", "x", writing=True)

    errors: list[NoSpaceStorageError] = []
    rig.guard.on_full = errors.append
    rig.faults.add(Fault("write", "new", error=refuse, times=3))
    for refused in range(1, 4):
        with pytest.raises(StorageError, match=code):
            rig.guard.write("new", [b"x"])
        rest_ends = time.monotonic() + guard.REFUSED_SECONDS
        assert len(errors) == refused * (code in ("ENOSPC", "EDQUOT"))
        assert rig.guard.takes_no_stores and rig.guard.properties.read_only
        assert rig.guard.properties.available
        with pytest.raises(UnavailableStorageError):
            rig.guard.write("new", [b"x"])
        assert rig.read("o1") == b"o1"
        # What frees space, what decides about it, and what needs none.
        assert delete_one(rig.guard, f"o{refused + 1}")
        assert rig.guard.touch("o1") is Touched.TOUCHED
        assert rig.guard.write(f"empty{refused}", [b""]) is WriteResult.CREATED
        assert rig.guard.properties.read_only, "a deletion says nothing of writes"
        until(lambda: not rig.guard.properties.read_only)
        assert time.monotonic() >= rest_ends
        assert delete_one(rig.guard, f"empty{refused}")
        assert rig.guard.writes.state is BreakerState.HALF_OPEN
    assert len(rig.faults.touches) == 3 and not rig.guard.written
    rig.guard.write("new", [b"x"])
    assert rig.guard.written == {"new"}
    assert rig.guard.writes.is_closed and not rig.guard.takes_no_stores
    assert rig.counts == {"breaker_opens": 1, "breaker_closes": 1}
    first, second = lines(caplog)
    assert "takes no stores" in first
    assert code in first
    assert "write circuit breaker closed" in second


def test_writes_that_fail_after_a_refusal_stop_deletions_too(rig: Rig) -> None:
    """A storage that fails is another one than a storage that is full."""
    full = storage_error(OSError(errno.ENOSPC, "full"), "writing", "x", writing=True)
    rig.faults.add(Fault("write", error=full, times=1))
    with pytest.raises(StorageError, match="full"):
        rig.guard.write("new", [b"x"])
    rig.faults.add(Fault("write", error=eio))
    until(lambda: not rig.guard.properties.read_only)
    with pytest.raises(TransientStorageError):
        rig.guard.write("new", [b"x"])
    with pytest.raises(UnavailableStorageError):
        delete_one(rig.guard, "o1")
    rig.guard.touch("o1")
    assert not rig.guard.takes_no_stores and not rig.faults.touches
    assert rig.guard.stat(["o1"]) == [2]


def test_writes_that_work_are_not_stopped_by_some_that_never_will(rig: Rig) -> None:
    rig.faults.add(Fault("write", "bad*", error=PermanentStorageError(errno.EINVAL, "no")))
    for number in range(3 * LEAST_FAILURES):
        for twice in range(2):
            rig.guard.write(f"good{number}{twice}", [b"x"])
        with pytest.raises(PermanentStorageError):
            rig.guard.write(f"bad{number}", [b"x"])
    assert rig.guard.writes.is_closed


@pytest.mark.parametrize("error", [ReadOnlyStorageError, PermanentStorageError])
def test_deletion_that_is_refused_says_nothing_of_writes(
    rig: Rig, error: type[StorageError]
) -> None:
    """Many users may write and not delete."""
    rig.faults.add(Fault("delete", error=error(errno.EACCES, "not yours")))
    for _ in range(3 * LEAST_FAILURES):
        with pytest.raises(error):
            delete_one(rig.guard, "o1")
    assert rig.guard.write("new", [b"x"]) is WriteResult.CREATED


# ------------------------------------------------------------------------- whole objects


class Whole(WrappedBackend):
    """Answers as it is told for objects that are read whole, after a wait if there is one."""

    reads_whole = True

    def __init__(self, inner: Backend) -> None:
        super().__init__(inner)
        self.answer: Checked | StorageError | None = None
        self.gate: threading.Event | None = None
        self.seconds: list[float] = []

    def read_whole(
        self,
        start: str,
        text: bytes,
        wholes: Sequence[base.Whole],
        buffers: Sequence[memoryview],
        seconds: float = math.inf,
    ) -> Checked | None:
        self.seconds.append(seconds)
        if self.gate is not None:
            assert self.gate.wait(PATIENCE)
        if isinstance(self.answer, StorageError):
            raise self.answer
        return self.answer


@pytest.fixture
def whole(rig: Rig) -> Whole:
    rig.guard.inner = inner = Whole(rig.faults)
    return inner


def read_whole(rig: Rig) -> Checked | None:
    wholes = [base.Whole(str(i), b"", b"", b"", array("q", (0, 500))) for i in range(3)]
    buffers = [memoryview(bytearray(500)) for _ in wholes]
    return rig.guard.read_whole("o", b"", wholes, buffers)


def test_each_object_that_is_read_whole_is_a_success(rig: Rig, whole: Whole) -> None:
    outcomes = rig.guard.reads._outcomes["read"]
    assert rig.guard.reads_whole
    whole.answer = Checked([False, True, True], 0.1, 0.1)
    assert read_whole(rig) == whole.answer
    assert outcomes.successes == 2
    assert rig.guard._trials.worked == "o1"
    assert whole.seconds == [rig.guard.deadlines.to_read(3 * 500)]
    # That none was is no evidence.
    for answer in (None, Checked([False] * 3, 0.1, 0.1)):
        whole.answer = answer
        assert read_whole(rig) == answer
    assert outcomes.successes == 2
    assert not rig.guard._calls


def test_storage_that_fails_to_read_whole_objects_is_not_asked_any_more(
    rig: Rig, whole: Whole
) -> None:
    whole.answer = eio()
    for _ in range(LEAST_FAILURES):
        with pytest.raises(TransientStorageError, match="EIO"):
            read_whole(rig)
    with pytest.raises(UnavailableStorageError):
        read_whole(rig)
    assert len(whole.seconds) == LEAST_FAILURES


@pytest.mark.parametrize("rig", [NEVER], indirect=True)
@pytest.mark.parametrize("done", [True, False])
def test_whole_objects_have_one_deadline(rig: Rig, whole: Whole, done: bool) -> None:
    whole.answer, whole.gate = Checked([True, True, done], 0.1, 0.1), threading.Event()
    ended: list[object] = []

    def body() -> None:
        try:
            ended.append(read_whole(rig))
        except TransientStorageError as error:
            ended.append(error.errno)

    thread = threading.Thread(target=body)
    thread.start()
    until(lambda: rig.counts.get("late_calls") == 1)
    whole.gate.set()
    thread.join(PATIENCE)
    # What was read of them all is no less good for it.
    assert ended == [whole.answer if done else errno.ETIMEDOUT]


class RoomFor:
    """A bound that has room for so many bytes."""

    def __init__(self, nbytes: int) -> None:
        self.left = nbytes

    def allows(self, nbytes: int) -> bool:
        return nbytes <= self.left

    def begin(self, nbytes: int) -> bool:
        allowed = self.allows(nbytes)
        self.left -= nbytes if allowed else 0
        return allowed

    def end(self, nbytes: int, written: bool) -> None:
        self.left += 0 if written else nbytes


def test_write_uses_up_its_room_while_it_goes_on_and_when_it_has_written(rig: Rig) -> None:
    rig.guard.bound = bound = RoomFor(15)
    gate = threading.Event()
    fault = rig.faults.add(Fault("write", wait=gate))
    first = start(rig, lambda rig: rig.guard.write("x", [bytes(10)]))
    until(lambda: rig.faults.counts["write"] == 1)
    with pytest.raises(BoundReachedError):
        rig.guard.write("y", [bytes(10)])
    gate.set()
    first.join()
    assert bound.left == 5
    assert rig.guard.write("o1", [bytes(5)]) is WriteResult.EXISTED
    fault.error = eio()
    with pytest.raises(TransientStorageError):
        rig.guard.write("z", [bytes(5)])
    assert bound.left == 5


def test_what_the_storage_cannot_do_at_all_stops_stores_and_is_told_once(
    rig: Rig, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(guard, "REFUSED_SECONDS", 0.05)
    refused = PermanentStorageError(errno.ENOSYS, "this mount renames no files; use s3://")
    rig.faults.add(Fault("write", error=refused, times=LEAST_FAILURES))
    for number in range(LEAST_FAILURES):
        assert not rig.guard.takes_no_stores
        with pytest.raises(PermanentStorageError):
            rig.guard.write(f"new{number}", [b"x"])
    assert rig.guard.takes_no_stores and rig.guard.properties.read_only
    with pytest.raises(UnavailableStorageError):
        rig.guard.write("new", [b"x"])
    assert rig.read("o1") == b"o1"
    assert delete_one(rig.guard, "o7")
    (line,) = lines(caplog)
    assert "takes no stores: [Errno 38] this mount renames no files; use s3://" in line
    until(lambda: not rig.guard.properties.read_only)
    rig.guard.write("new", [b"x"])
    assert not rig.guard.takes_no_stores


# ------------------------------------------------------------------------- many names, forks


@pytest.mark.parametrize(
    ("operation", "names", "seconds", "is_late"),
    [
        ("stat", 256, 0.9, False),
        ("stat", 256, 1.1, True),
        ("stat", 4096, 15.9, False),
        ("stat", 4096, 16.1, True),
        ("delete", 1, 5.1, True),
        ("delete", 5, 14.9, False),
        ("delete", 5, 15.1, True),
    ],
)
def test_call_for_many_names_has_the_time_of_its_requests(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    operation: str,
    names: int,
    seconds: float,
    is_late: bool,
) -> None:
    """A distant mount answers 256 probes in a second; this storage deletes two by one request."""
    now, counts = make_clock(monkeypatch), list[str]()

    def answer(names: Sequence[str]) -> list[None]:
        now[0] += seconds
        return [None] * len(names)

    inner = FaultyStorage(posix(tmp_path), deletes_at_once=2)
    monkeypatch.setattr(inner, operation, answer)
    with closing(GuardedBackend(inner)) as guarded:
        guarded.count_into(counts.append)
        assert getattr(guarded, operation)(["o"] * names) == [None] * names
    assert counts == ["late_calls"] * is_late


@pytest.mark.real
def test_in_a_forked_child_calls_fail_at_once(tmp_path: Path) -> None:
    read, write = os.pipe()
    with closing(GuardedBackend(posix(tmp_path))) as opened:
        assert opened.stat(["o"]) == [None]
        if (child := os.fork()) == 0:
            answer = opened.stat(["o"])[0]
            with closing(GuardedBackend(posix(tmp_path))) as again:
                os.write(write, f"{answer}; {again.stat(['o'])[0]}".encode())
            os._exit(0)
        os.waitpid(child, 0)
        said = os.read(read, 1000).decode()
        assert "opened before a fork of the process; open it again" in said
        assert said.endswith("; None")
        assert opened.stat(["o"]) == [None]
    os.close(read)
    os.close(write)
