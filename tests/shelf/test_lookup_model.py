"""Lookups and waits find what is there, whatever the storage, threads and others do.

Two prompts share their first chunks. We and others store and delete chunks, while lookups run one
after the other or wait together. What may be found, and what must be, is written down a second
time: in the times at which each chunk was there. The same for those who wait for chunks.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from threading import Thread

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from kvshelf.backends import Deadlines, StatResults
from kvshelf.backends.breaker import Backoff
from kvshelf.backends.guard import GuardedBackend
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL
from kvshelf.format.names import object_name
from kvshelf.metrics import Counters
from kvshelf.shelf import failed_keys
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.threads import StorageThreads
from kvshelf.shelf.waits import Wait, WaitService
from tests.sim.storage import NamesOnly
from tests.support.formats import make_format
from tests.support.prompts import prompt
from tests.support.threads import named, none_can_be_started
from tests.support.waiting import until

FMT = make_format(shards=2)
SIZE = FMT.chunk_size
CHUNKS, SHARED = 6, 2
PROMPTS = [prompt(CHUNKS, seed, SHARED * SIZE, unit=SIZE) for seed in range(2)]
THREADS = "kvshelf-lookup", "kvshelf-wait"

DEADLINE, TICK = 1.0, 0.25
USUAL = 0.05
#: Most questions of one lookup, one after the other.
ROUNDS = 8
#: For how long a storage far away is believed.
SEEN = 60.0
#: What other threads may do between two looks at a clock.
INEXACT = 0.04
NEARLY = DEADLINE - INEXACT

#: What happens, the likelier the more often it stands here.
OPERATIONS = (
    *("ask", "ask", "ask", "ask and go on", "ask and go on", "wait for"),
    *("ask and cancel", "we store", "we store", "others store", "others write half"),
    *("others delete", "we delete", "load fails", "others delete, forget"),
    *("pause 1.1", "pause 5", "pause 65"),
)
#: What is wrong meanwhile, until it is healed.
TROUBLES = (
    *("", "", "", "takes 0.3", "takes 0.999", "takes 1.001", "takes 1.6"),
    *("hangs", "hangs for a moment", "no threads", "hangs and no threads", "panics"),
)
#: What happens at once when a lookup is given up.
REACTIONS = ("", "", "goes on", "closes")
operations = st.tuples(
    st.sampled_from(OPERATIONS), st.integers(0, 1), st.sampled_from([0, 1, 3, CHUNKS - 1])
)
times = st.tuples(
    st.sampled_from(TROUBLES), st.sampled_from(REACTIONS), st.lists(operations, max_size=10)
)


class Storage(NamesOnly):
    """A storage that takes a while, or hangs, with an answer that may be old when it comes."""

    def __init__(self, probe_cost: float) -> None:
        super().__init__(probe_cost)
        self.takes, self.panics = USUAL, False
        #: When calls began that have not ended, and when one ended last that was late, or nearly.
        self._running: list[float] = []
        self._late = -math.inf

    def stat(self, names: Sequence[str]) -> StatResults:
        began = time.monotonic()
        if self.panics:
            self._late = began
            raise RuntimeError("a bug")
        self._running.append(began)
        answers = super().stat(names)
        time.sleep(self.takes)
        self._running.remove(began)
        if time.monotonic() > began + NEARLY:
            self._late = time.monotonic()
        return answers

    @property
    def troubled(self) -> float:
        """When it was late last, or would have been."""
        last = min(self._running, default=math.inf)
        now = (
            self.panics
            or not self.gate.is_set()
            or self.takes > NEARLY
            or time.monotonic() > last + NEARLY
        )
        return math.inf if now else self._late


@dataclass(eq=False)
class Asked:
    """A lookup, and what was so when it began."""

    lookup: Lookup
    chunks: Sequence[Chunk]
    began: float
    #: Nothing keeps the storage from answering, and no key counts as missing.
    calm: bool
    opens: float


@dataclass(eq=False)
class Waited:
    """A wait for chunks, and when it began."""

    wait: Wait
    chunks: Sequence[Chunk]
    began: float


class Life:
    """A shelf, lookups on it, and what the rule says of both."""

    def __init__(self, stack: ExitStack, *, far: bool) -> None:
        self.far = far
        self.others = threads()
        self.storage = Storage(0.02 if far else 0.0)
        self.guard = GuardedBackend(self.storage, Deadlines(*[DEADLINE] * 3), Backoff(0.02, 0.2))
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setitem(failed_keys._SECONDS, False, 3.0)
        self.failed, self.counters = FailedKeys(), Counters()
        view = Shelf(self.guard).view(FMT)
        self.service = LookupService(view, failed=self.failed, counters=self.counters)
        self.waits = WaitService({FULL: view}, counters=Counters())
        self.count = self.service._count
        for clean in (self.guard.close, self.service.close, self.waits.close, self.go_on):
            stack.callback(clean)
        self.refused = stack.enter_context(ExitStack())
        self.chains = [KeyChain(FMT.namespace.digest, SIZE).extend(tokens) for tokens in PROMPTS]
        #: When each chunk was there, and when we learned last that it was not, or stored it.
        self.there: dict[bytes, list[list[float]]] = defaultdict(list)
        self.gone: dict[bytes, float] = {}
        self.ours: dict[bytes, float] = {}
        self.forgotten = self.refused_at = -math.inf
        self.closed = False
        self.waiting: list[Asked] = []
        self.waited: list[Waited] = []
        self.once_given_up: Callable[[], None] | None = None

    # ------------------------------------------------------------------------------ operations

    def store(self, branch: int, last: int, *, ours: bool) -> None:
        """Store a prompt up to a chunk."""
        for chunk in self.chains[branch][: last + 1]:
            spans = self.there[chunk.key]
            if not spans or spans[-1][1] < math.inf:
                spans.append([time.monotonic(), math.inf])
            for shard in range(FMT.shards):
                self.storage.sizes[self.name(chunk, shard)] = FMT.object_size(shard)
            if ours:
                self.failed.forget(chunk.key)
                self.ours[chunk.key] = time.monotonic()

    def delete(self, branch: int, place: int, note: Callable[[bytes], None] | None = None) -> None:
        chunk = self.chains[branch][place]
        self.storage.sizes.pop(self.name(chunk, 1), None)
        for span in self.there[chunk.key][-1:]:
            span[1] = min(span[1], time.monotonic())
        if note is not None:
            note(chunk.key)
            self.gone[chunk.key] = time.monotonic()

    def note_failed(self, key: bytes) -> None:
        self.failed.add(key, bad=False)

    def ask(self, branch: int, last: int) -> Asked:
        chunks = self.chains[branch][: last + 1]

        def on_done(lookup: Lookup) -> None:
            then = self.once_given_up
            if lookup.given_up and then is not None:
                self.once_given_up = None
                then()
                time.sleep(TICK)

        calm = self.is_calm() and not any(chunk.key in self.failed for chunk in chunks)
        tokens, began = PROMPTS[branch][: len(chunks) * SIZE], time.monotonic()
        lookup = self.service.submit(
            tokens, lambda: KeyChain(FMT.namespace.digest, SIZE), on_done=on_done
        )
        asked = Asked(lookup, chunks, began, calm, self.opens())
        self.waiting.append(asked)
        # Its first question is on its way.
        time.sleep(USUAL / 2)
        return asked

    def opens(self) -> float:
        return self.counters.snapshot().get("breaker_opens", 0)

    def wait_for(self, branch: int, last: int) -> None:
        chunks, began = self.chains[branch][: last + 1], time.monotonic()
        wait = self.waits.submit([(FULL, chunk) for chunk in chunks], "")
        self.waited.append(Waited(wait, chunks, began))

    def stop_waiting(self) -> None:
        self.check()
        for waited in self.waited:
            waited.wait.cancel()
        self.waited.clear()

    def heal(self) -> None:
        """Let the storage answer, and see everything become as it was before."""
        self.once_given_up = None
        self.go_on()
        until(lambda: self.service.available, seconds=20.0)
        self.refused.close()
        until(lambda: self.guard.reads.is_closed and self.service.available, seconds=20.0)
        self.end_all()
        self.have(self.service._threads, self.count, lambda: self.service.submit((), lambda: None))
        piece = FULL, self.chains[0][0]
        self.have(self.waits._threads, 1, lambda: self.waits.submit([piece], "").cancel())
        self.check_waits()
        # Threads that are done may need a moment.
        time.sleep(0.1)
        assert not self.service.stalled(0.0)

    @staticmethod
    def have(threads: StorageThreads, count: int, wake: Callable[[], object]) -> None:
        def are_there() -> bool:
            # One that was late at the last moment sleeps, and ends with its next work.
            wake()
            return (len(threads._stuck), len(threads._working)) == (0, count)

        until(are_there, seconds=3.0)

    def go_on(self) -> None:
        self.storage.takes, self.storage.panics = USUAL, False
        self.storage.gate.set()

    def refuse(self) -> None:
        self.refused_at = math.inf
        patch = self.refused.enter_context(pytest.MonkeyPatch.context())
        self.refused.enter_context(none_can_be_started(patch, *THREADS))
        self.refused.callback(lambda: setattr(self, "refused_at", time.monotonic()))

    def forget(self) -> None:
        self.service.forget()
        self.forgotten = time.monotonic()
        self.gone.clear()

    def close(self) -> None:
        self.closed = True
        self.service.close()
        self.waits.close()
        if self.far:
            # Nobody watches any more over what other threads have begun.
            self.go_on()

    def end(self) -> None:
        """See all lookups end when the service is closed, and all threads."""
        before = [asked.lookup for asked in self.waiting if not self.closed]
        if not self.closed:
            self.close()
        elif not self.far:
            # No thread is left.
            self.end_all()
        assert self.ask(0, 0).lookup.given_up
        self.go_on()
        self.end_all()
        assert not any(lookup.given_up for lookup in before)
        until(lambda: threads() <= self.others, "threads without an end", seconds=10.0)

    def do(self, step: str, branch: int, last: int) -> None:
        what, _, value = step.partition(" ")
        if what == "ask":
            self.ask(branch, last)
            if value == "and cancel":
                self.waiting[-1].lookup.cancel()
            elif not value and self.storage.gate.is_set():
                self.end_all()
        elif what == "pause":
            if value != "1.1":
                # Nobody waits for so long.
                self.stop_waiting()
            time.sleep(float(value))
        elif what == "wait":
            self.wait_for(branch, last)
        elif value == "write half":
            # In place of what was there.
            self.delete(branch, last)
            name = self.name(self.chains[branch][last], 1)
            self.storage.sizes[name] = FMT.object_size(1) - 1
        elif value == "store":
            self.store(branch, last, ours=what == "we")
        else:
            notes = {"we": self.service.note_removed, "load": self.note_failed}
            self.delete(branch, last, notes.get(what))
            if value == "delete, forget":
                self.forget()

    def suffer(self, trouble: str, reaction: str) -> None:
        self.once_given_up = {"goes on": self.go_on, "closes": self.close}.get(reaction)
        if trouble.startswith("takes"):
            self.storage.takes = float(trouble.partition(" ")[2])
        if trouble.startswith("hangs"):
            self.storage.gate.clear()
        self.storage.panics = trouble == "panics"
        if trouble.endswith("no threads"):
            self.refuse()

    # --------------------------------------------------------------------------------- the rule

    def end_all(self) -> None:
        """See the lookups that wait end in time."""
        longest = ROUNDS * (DEADLINE + 2 * TICK)
        for asked in self.waiting:
            assert asked.lookup.wait(longest * len(self.waiting)), "a lookup without an end"
        self.check()

    def check(self) -> None:
        """Compare the answers that have come with what was there."""
        ended = [asked for asked in self.waiting if asked.lookup.done]
        if ended:
            # What took them is counted behind their ends.
            time.sleep(INEXACT)
        for asked in ended:
            self.waiting.remove(asked)
            lookup = asked.lookup
            if lookup.cancelled:
                assert not lookup.hit_chunks or lookup.chain is not None
            elif lookup.given_up:
                assert not lookup.hit_chunks and lookup.chain is None
                assert self.closed or asked.began <= max(self.trouble(), self.refused_at)
            else:
                self.check_answer(asked)

        now = time.monotonic()
        for waited in self.waited:
            wait, seen = waited.wait, waited.wait.seen
            assert not wait.gave_up and wait.complete is (seen == len(waited.chunks))
            for chunk in waited.chunks[:seen]:
                assert self.was_there(chunk, waited.began, now), "seen, but not there"

    def check_waits(self) -> None:
        """See those who wait get what is there."""
        for waited in self.waited:
            wait, count, now = waited.wait, 0, time.monotonic()
            for chunk in waited.chunks:
                if not self.was_there(chunk, now, now):
                    break
                count += 1
            until(lambda wait=wait, count=count: wait.seen >= count, seconds=5.0)  # type: ignore[misc]

    def check_answer(self, asked: Asked) -> None:
        hit, end, began = asked.lookup.hit_chunks, asked.lookup.as_of, asked.began
        since = began
        if self.far and hit:
            since = began - SEEN
            if self.forgotten < began:
                since = max(since, self.forgotten)
        for index in {0, hit - 1} if self.far and hit else range(hit):
            assert self.was_there(asked.chunks[index], since, end), "more than there was"
        for chunk in asked.chunks[:hit]:
            gone = self.gone.get(chunk.key, math.inf)
            assert gone > began or self.was_there(chunk, gone, end), "what we know is gone"
        if not asked.calm or began <= self.trouble() or self.opens() > asked.opens:
            return
        for chunk in asked.chunks[hit : hit + 1]:
            if chunk.key in self.gone and self.ours.get(chunk.key, began) > began:
                # Of what had gone, no answer counts that is older than a store.
                return
            first, last = (self.there[chunk.key] or [[math.inf, math.inf]])[-1]
            assert not first <= began <= end < last, "less than there was"

    def was_there(self, chunk: Chunk, since: float, end: float) -> bool:
        return any(first <= end and last >= since for first, last in self.there[chunk.key])

    def trouble(self) -> float:
        """Return when the storage was in trouble last."""
        return self.storage.troubled if self.guard.reads.is_closed else math.inf

    def is_calm(self) -> bool:
        return self.trouble() < math.inf and self.refused_at < math.inf

    @staticmethod
    def name(chunk: Chunk, shard: int) -> str:
        return f"{FMT.namespace.folder}/{object_name(chunk, shard, FMT.shards)}"


def threads() -> set[Thread]:
    return set().union(*map(named, THREADS))


def calm(*steps: str) -> list[tuple[str, str, list[tuple[str, int, int]]]]:
    return [("", "", [(step, 0, CHUNKS - 1) for step in steps])]


@example(True, calm("ask", "we store", "ask"), False)
@example(True, calm("we store", "ask", "others delete, forget", "ask"), False)
@example(True, calm("we store", "ask", "load fails", "pause 5", "ask"), False)
@example(True, calm("ask", "others store", "pause 1.1", "ask"), False)
@example(True, calm("we store", "ask and go on", "load fails", "pause 5", "ask"), False)
@example(True, calm("ask", "pause 1.1", "ask and go on", "we store", "ask", "ask"), False)
@example(True, [*calm("others store", "ask"), *calm("we delete", "we store", "ask")], False)
@example(False, [("hangs", "closes", [("ask and go on", 0, 1)] * 3)], False)
@given(st.booleans(), st.lists(times, max_size=8), st.booleans())
@settings(max_examples=60)
def test_lookups_and_waits_find_what_is_there_and_end(
    far: bool, life_of: list[tuple[str, str, list[tuple[str, int, int]]]], hangs: bool
) -> None:
    with ExitStack() as stack:
        life = Life(stack, far=far)
        for trouble, reaction, steps in life_of:
            life.suffer(trouble, reaction)
            for step in steps:
                if not life.closed:
                    life.do(*step)
                    life.check()
            if trouble != "hangs for a moment":
                life.end_all()
            if life.closed:
                break
            if trouble:
                life.heal()
        if hangs:
            life.storage.gate.clear()
        for place in () if life.closed else (CHUNKS, 1, 3, 2):
            life.ask(0, place - 1)
        life.end()
