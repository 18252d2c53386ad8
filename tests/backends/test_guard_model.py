"""What the breaker of reads promises, whatever calls do and however late.

A storage that fails is soon asked no more, and is used again soon after it works. One that mostly
works is always asked. A storage that flaps is left alone longer each time. Calls come one after the
other; some hang while others are made.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvshelf.backends import Deadlines
from kvshelf.backends.breaker import LEAST_FAILURES, WINDOW_SECONDS, Backoff
from kvshelf.backends.guard import LATE_WEIGHT, GuardedBackend
from kvshelf.errors import (
    ObjectMissingError,
    ProcessLimitError,
    TransientStorageError,
    UnavailableStorageError,
)
from tests.sim.storage import Fault, FaultyStorage, posix

DEADLINE = 1.0
TICK = 0.25
BACKOFF = Backoff(5.0, 80.0)
#: What a call does: after how many seconds, and how it ends.
CALLS = {
    "works": (0.1, None),
    "has nothing": (0.1, "nothing"),
    "fails": (0.1, TransientStorageError),
    "is missing": (0.1, ObjectMissingError),
    "has no files": (0.1, ProcessLimitError),
    "works late": (1.6, None),
    "works just late": (1.001, None),
    "fails late": (1.6, TransientStorageError),
    "is just in time": (0.999, None),
}
operations = st.one_of(
    st.tuples(st.sampled_from(sorted(CALLS)), st.integers(1, 8)),
    st.tuples(st.sampled_from(["hangs", "goes on"]), st.just(1)),
    st.tuples(st.just("pauses"), st.sampled_from([1, 8, 22])),
)


class Life:
    """A guard, the storage behind it, and what became of calls since the guard closed last."""

    def __init__(self, folder: Path) -> None:
        self.storage = FaultyStorage(posix(folder))
        self.storage.inner.write("o", [b"x"])
        self.guard = GuardedBackend(self.storage, Deadlines(*[DEADLINE] * 3), BACKOFF)
        self.guard.count_into(self.count)
        #: Times of failures, with their weights; successes have the weight 0.
        self.outcomes: list[tuple[float, int]] = []
        #: Late calls that ought to be noticed, and those that were.
        self.late = self.noticed = 0
        #: When the storage was last used again, and how long the guard had left it alone.
        self.closed_at, self.rest = -math.inf, 0.0
        self.gate = threading.Event()
        self.stuck: list[tuple[float, threading.Thread]] = []

    def count(self, name: str) -> None:
        if name == "late_calls":
            self.noticed += 1
            self.note(LATE_WEIGHT)

    def note(self, weight: int) -> None:
        self.outcomes.append((time.monotonic(), weight))

    def call(self, what: str) -> None:
        seconds, how = CALLS[what]

        def read() -> bytes | None:
            time.sleep(seconds)
            if isinstance(how, type):
                raise how(errno.EIO, what)
            return None if how else b"x"

        with pytest.raises(how) if isinstance(how, type) else nullcontext():
            self.guard.read_by("o", 1, read)
        if seconds > DEADLINE:
            self.late += 1
        elif how is TransientStorageError:
            self.note(1)
        elif how is None or how is ObjectMissingError:
            self.note(0)

    def hang(self) -> None:
        gate, begun = self.gate, threading.Event()

        def read() -> None:
            begun.set()
            gate.wait()

        thread = threading.Thread(target=self.guard.read_by, args=("o", 1, read), daemon=True)
        thread.start()
        begun.wait()
        self.stuck.append((time.monotonic(), thread))

    def go_on(self) -> None:
        """Let those that hang return."""
        self.gate.set()
        now = time.monotonic()
        for began, thread in self.stuck:
            thread.join()
            self.late += now > began + DEADLINE + 2 * TICK
        self.stuck.clear()
        self.gate = threading.Event()

    def check(self) -> None:
        # A late call is counted before the breaker hears of it.
        time.sleep(TICK)
        if self.guard.reads.is_closed:
            assert not self.fails_surely()
        else:
            assert self.may_have_failed()
        now = time.monotonic()
        surely = sum(now > began + DEADLINE + 2 * TICK for began, _ in self.stuck)
        assert surely <= self.guard.late_calls <= len(self.stuck)

    def fails_surely(self) -> bool:
        """Whether so many calls failed in a row that every window has enough of them."""
        failures = 0
        for at, weight in reversed(self.outcomes):
            if not weight or at < self.outcomes[-1][0] - WINDOW_SECONDS:
                break
            failures += weight
        return failures >= 2 * LEAST_FAILURES

    def may_have_failed(self) -> bool:
        """Whether in some window enough calls failed, and no more succeeded."""
        for begin, _ in self.outcomes:
            window = [w for at, w in self.outcomes if begin <= at <= begin + WINDOW_SECONDS]
            for end in range(1, len(window) + 1):
                failures = sum(window[:end])
                if failures >= LEAST_FAILURES and window[:end].count(0) <= failures:
                    return True
        return False

    def recover(self, ill: float) -> None:
        """See it stay open while the storage is ill, and close by itself afterwards."""
        self.storage.add(Fault("*", error=TransientStorageError(errno.EIO, "ill")))
        self.storage.counts.clear()
        begin = time.monotonic()
        while time.monotonic() < begin + ill:
            with pytest.raises(UnavailableStorageError):
                self.guard.read_by("o", 1, lambda: pytest.fail("asked while the breaker is open"))
            time.sleep(1.0)
            assert not self.guard.reads.is_closed
        # The back-off doubles, and up to half of it is left out; each time there are two trials.
        trials = self.storage.counts["open"] + self.storage.counts["folders"]
        assert trials <= 2 * math.log2(2 + 2 * ill / BACKOFF.first)
        self.storage.heal()
        longest = BACKOFF.most
        hears = bool(self.stuck) and time.monotonic() > self.stuck[-1][0] + 5 * DEADLINE
        if hears:
            # That they return shows that the storage works.
            self.go_on()
            longest = BACKOFF.first
        until = time.monotonic() + longest + 2 * TICK
        while not self.guard.reads.is_closed:
            assert time.monotonic() < until
            time.sleep(TICK)
        rest, now = time.monotonic() - begin, time.monotonic()
        if begin < self.closed_at + BACKOFF.most - 1 and not hears:
            # It flaps: the back-off has doubled, of which up to half is left out.
            assert rest >= min(self.rest, BACKOFF.most / 2) - 2 * TICK
        self.closed_at, self.rest = now, rest
        self.outcomes.clear()


@given(st.lists(operations, min_size=4, max_size=24), st.sampled_from([0.0, 60.0]))
@example([("fails", 1), ("works", 8), ("fails", 4), ("works", 1)], 0.0)
@example([("fails", 3), ("pauses", 22), ("fails", 1)], 0.0)
@example([("fails", 8)] * 12, 0.0)
@settings(max_examples=100)
def test_reads_stop_and_begin_again_as_promised(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], ill: float
) -> None:
    life = Life(tmp_path_factory.mktemp("guard"))
    others = {"hangs": life.hang, "goes on": life.go_on, "pauses": partial(time.sleep, 0.5)}
    with closing(life.guard):
        for step, times in steps:
            for _ in range(times):
                if life.guard.reads.is_closed:
                    life.call(step) if step in CALLS else others[step]()
            life.check()
            if not life.guard.reads.is_closed:
                life.recover(ill)
        life.go_on()
        life.check()
        assert life.guard.late_calls == 0
        assert life.late <= life.noticed
