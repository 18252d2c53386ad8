"""The breaker of reads opens and closes as its rule says, whatever calls do and however late.

Calls come one after the other; some hang while others are made. The rule is that of
:mod:`kvshelf.backends.breaker`, written down a second time.
"""

from __future__ import annotations

import errno
import math
import threading
import time
from collections.abc import Sequence
from contextlib import closing, nullcontext
from functools import partial
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvshelf.backends import Deadlines, Reader
from kvshelf.backends.breaker import LEAST_FAILURES, WINDOW_SECONDS, Backoff
from kvshelf.backends.guard import LATE_WEIGHT, GuardedBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.errors import (
    ObjectMissingError,
    ProcessLimitError,
    TransientStorageError,
    UnavailableStorageError,
)
from tests.sim.storage import posix

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


class Storage(WrappedBackend):
    """A storage whose trials fail as long as it is ill."""

    def __init__(self, folder: Path) -> None:
        super().__init__(posix(folder))
        self.ill = False
        self.trials = 0

    def open(self, name: str) -> Reader:
        self.meet()
        return self.inner.open(name)

    def folders(self, prefix: str = "") -> Sequence[str]:
        self.meet()
        return self.inner.folders(prefix)

    def meet(self) -> None:
        self.trials += 1
        if self.ill:
            raise TransientStorageError(errno.EIO, "ill")


class Life:
    """A guard, the storage behind it, and what the rule says of both."""

    def __init__(self, folder: Path) -> None:
        self.storage = Storage(folder)
        self.storage.inner.write("o", [b"x"])
        self.guard = GuardedBackend(self.storage, Deadlines(*[DEADLINE] * 3), BACKOFF)
        self.guard.count_into(self.count)
        self.began, self.failures, self.successes = -math.inf, 0, 0
        self.open = False
        #: Late calls that ought to be noticed, and those that were.
        self.late = self.noticed = 0
        self.gate = threading.Event()
        self.stuck: list[tuple[float, threading.Thread]] = []

    def count(self, name: str) -> None:
        if name == "late_calls":
            self.noticed += 1
            self.fail(LATE_WEIGHT)

    def fail(self, weight: int) -> None:
        now = time.monotonic()
        if now - self.began > WINDOW_SECONDS:
            self.began, self.failures, self.successes = now, 0, 0
        self.failures += weight
        self.open |= self.failures >= LEAST_FAILURES and self.successes <= self.failures

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
            self.fail(1)
        elif how is None or how is ObjectMissingError:
            self.successes += 1

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
        if self.open and self.guard.reads.is_closed:
            # A late call is counted before the breaker hears of it.
            time.sleep(TICK)
        assert self.guard.reads.is_closed is not self.open
        now = time.monotonic()
        surely = sum(now > began + DEADLINE + 2 * TICK for began, _ in self.stuck)
        assert surely <= self.guard.late_calls <= len(self.stuck)

    def recover(self, ill: float) -> None:
        """See it stay open while the storage is ill, and close by itself afterwards."""
        self.storage.ill, self.storage.trials = True, 0
        until = time.monotonic() + ill
        while time.monotonic() < until:
            with pytest.raises(UnavailableStorageError):
                self.guard.read_by("o", 1, lambda: pytest.fail("asked while the breaker is open"))
            time.sleep(1.0)
            assert not self.guard.reads.is_closed
        # The back-off doubles, and up to half of it is left out; each time there are two trials.
        assert self.storage.trials <= 2 * math.log2(2 + 2 * ill / BACKOFF.first)
        self.storage.ill = False
        longest = BACKOFF.most
        if self.stuck and time.monotonic() > self.stuck[-1][0] + 5 * DEADLINE:
            # That they return shows that the storage works.
            self.go_on()
            longest = BACKOFF.first
        until = time.monotonic() + longest + 2 * TICK
        while not self.guard.reads.is_closed:
            assert time.monotonic() < until
            time.sleep(TICK)
        self.open, self.began = False, -math.inf


@given(st.lists(operations, min_size=4, max_size=24), st.sampled_from([0.0, 60.0]))
@example([("fails", 1), ("works", 8), ("fails", 4), ("works", 1)], 0.0)
@settings(max_examples=100)
def test_reads_stop_and_begin_again_as_the_rule_says(
    tmp_path_factory: pytest.TempPathFactory, steps: list[tuple[str, int]], ill: float
) -> None:
    life = Life(tmp_path_factory.mktemp("guard"))
    others = {"hangs": life.hang, "goes on": life.go_on, "pauses": partial(time.sleep, 0.5)}
    with closing(life.guard):
        for step, times in steps:
            for _ in range(times):
                if not life.open:
                    life.call(step) if step in CALLS else others[step]()
            life.check()
            if life.open:
                life.recover(ill)
        life.go_on()
        life.check()
        assert life.guard.late_calls == 0
        assert life.late <= life.noticed
