"""The presence cache: never a hit that is known to be none, never an old miss."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    rule,
)

from kvshelf.format.keys import KeyChain
from kvshelf.shelf import failed_keys as failed_module
from kvshelf.shelf import presence as presence_module
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.presence import Known, PresenceCache
from kvshelf.shelf.probes import Answer, RoundCosts
from kvshelf.shelf.search import PrefixSearch
from kvshelf.shelf.view import Presence
from tests.support.clocks import Clock
from tests.support.formats import make_format

FMT = make_format(shards=2)
SEEN, MISSING, GAP = 60.0, 1.0, 1800.0


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(1000.0)
    monkeypatch.setattr(presence_module, "time", clock)
    return clock


def known_of(cache: PresenceCache, key: bytes) -> Known:
    """What the cache knows about one chunk now."""
    prefix = cache.prefix([key])
    if prefix.end == 0:
        return Known.MISSING
    if prefix.seen:
        return Known.SEEN
    return Known.INFERRED if prefix.found else Known.NOTHING


# ------------------------------------------------------------------------------------- the rules


def test_answers_stand_for_their_time_from_when_they_were_asked_for(clock: Clock) -> None:
    known = PresenceCache()
    asked = known.ask()
    clock.now += MISSING / 2
    known.learn(b"there", True, asked)
    known.learn(b"gone", False, asked)
    assert known_of(known, b"there") is Known.SEEN
    assert known_of(known, b"gone") is Known.MISSING
    clock.now += MISSING / 2
    assert known_of(known, b"gone") is Known.NOTHING
    clock.now += SEEN
    assert known_of(known, b"there") is Known.NOTHING


def test_a_store_ends_a_miss_also_one_that_is_on_its_way() -> None:
    known = PresenceCache()
    asked = known.ask()
    known.learn(b"k", False, asked)
    asked = known.ask()
    known.note_published(b"k")
    assert known_of(known, b"k") is Known.NOTHING
    known.learn(b"k", False, asked)
    assert known_of(known, b"k") is Known.NOTHING
    known.learn(b"k", True, known.ask())
    known.note_published(b"k")
    assert known_of(known, b"k") is Known.SEEN


def test_memory_is_bounded_and_what_was_forgotten_is_not_learned_late() -> None:
    known = PresenceCache(limit=3)
    asked = known.ask()
    known.note_published(b"first")
    for i in range(10):
        known.learn(bytes([i]), True, known.ask())
    assert len(known) == 3
    known.learn(b"first", False, asked)
    assert known_of(known, b"first") is Known.NOTHING
    known.learn(b"first", False, known.ask())
    assert known_of(known, b"first") is Known.MISSING


def test_more_events_than_can_be_kept_forget_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    known = PresenceCache()
    asked = known.ask()
    known.learn(b"k", False, known.ask())
    for _ in range(presence_module._EVENTS + 1):
        known.note_published(b"other")
    assert known_of(known, b"k") is Known.NOTHING
    known.learn(b"k", False, asked)
    assert known_of(known, b"k") is Known.NOTHING


# ------------------------------------------------- searches on a storage that others change too


@dataclass
class _Stored:
    """One chunk as it really is."""

    shards: set[int]
    whole_since: float | None = None
    last_whole: float = -1e9
    #: When this engine published it last.
    stored_at: float = -1e9
    #: When one of its loads failed last.
    failed_at: float = -1e9


@dataclass
class _Held:
    """A search in its middle, and what the storage has answered but nobody has heard yet."""

    search: PrefixSearch
    costs: RoundCosts
    answers: list[Answer]


class Searches(RuleBasedStateMachine):
    """Searches in any state of completion, on a storage that this engine and others change.

    Two prompts share their first chunks. Answers of the storage are taken at one moment and
    arrive at another.
    """

    held = Bundle("held")

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.modules = SimpleNamespace(presence=presence_module.time, failed=failed_module.time)
        presence_module.time = failed_module.time = self.clock  # type: ignore[assignment]
        self.cache = PresenceCache(SEEN, MISSING, GAP, limit=64)
        self.failed = FailedKeys()
        self.failed.subscribe(self.cache.note_failed)
        shared = random.Random(0).choices(range(99), k=2 * FMT.chunk_size)
        self.chunks = []
        for branch in (1, 2):
            chain = KeyChain(FMT.namespace.digest, FMT.chunk_size)
            own = random.Random(branch).choices(range(99), k=3 * FMT.chunk_size)
            self.chunks.append(chain.extend(shared + own))
        self.storage = {c.key: _Stored(set()) for chunks in self.chunks for c in chunks}

    def teardown(self) -> None:
        presence_module.time = self.modules.presence
        failed_module.time = self.modules.failed

    def _tick(self) -> None:
        self.clock.now += 1e-4

    def _set(self, branch: int, index: int, shards: set[int]) -> _Stored:
        self._tick()
        stored = self.storage[self.chunks[branch][index].key]
        now = self.clock.now
        if len(stored.shards) == FMT.shards:
            stored.last_whole = now
        stored.shards = shards
        if len(shards) < FMT.shards:
            stored.whole_since = None
        elif stored.whole_since is None:
            stored.whole_since = now
        self._tick()
        return stored

    places = st.tuples(st.integers(0, 1), st.integers(0, 4))

    @rule(seconds=st.sampled_from((0.1, 0.6, 2.0, 35.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(
        branch=st.integers(0, 1), first=st.sampled_from((0, 0, 1, 3)), count=st.sampled_from((1, 5))
    )
    def others_store(self, branch: int, first: int, count: int) -> None:
        for index in range(first, min(5, first + count)):
            self._set(branch, index, set(range(FMT.shards)))

    @rule(place=places, shards=st.sampled_from((frozenset(), frozenset({0}))))
    def others_delete(self, place: tuple[int, int], shards: frozenset[int]) -> None:
        self._set(*place, set(shards))

    @rule(
        branch=st.integers(0, 1), first=st.sampled_from((0, 0, 1, 3)), count=st.sampled_from((1, 5))
    )
    def we_store(self, branch: int, first: int, count: int) -> None:
        for index in range(first, min(5, first + count)):
            # Not in the same instant in which a search that is held began.
            self._tick()
            stored = self._set(branch, index, set(range(FMT.shards)))
            key = self.chunks[branch][index].key
            self.cache.note_published(key)
            if not self.failed.is_bad(key):
                self.failed.forget(key)
            stored.stored_at = self.clock.now
            self._tick()

    @rule(
        target=held,
        branch=st.integers(0, 1),
        length=st.sampled_from((2, 4, 5, 5)),
        concurrency=st.sampled_from((1, 64)),
        rounds=st.sampled_from((0, 0, 1)),
        fails=st.integers(0, 9).map(lambda number: number == 9),
    )
    def look_up_and_hold(
        self, branch: int, length: int, concurrency: int, rounds: int, fails: bool
    ) -> _Held:
        search = self._begin(branch, length)
        costs = RoundCosts(1e-2, concurrency)
        for _ in range(rounds):
            if answers := self._ask(search, costs):
                search.take(answers)
        return _Held(search, costs, self._ask(search, costs, fails))

    @rule(held=consumes(held))
    def answer_late(self, held: _Held) -> None:
        if held.answers:
            held.search.take(held.answers)
        hit = self._finish(held.search, held.costs)
        if not any(answer is Presence.ERROR for answer, _ in held.answers):
            self._check(held.search, hit)

    @rule(
        branch=st.integers(0, 1),
        length=st.sampled_from((2, 4, 5, 5)),
        concurrency=st.sampled_from((1, 64)),
    )
    def look_up_and_load(self, branch: int, length: int, concurrency: int) -> None:
        search = self._begin(branch, length)
        hit = self._finish(search, RoundCosts(1e-2, concurrency))
        self._check(search, hit)
        for chunk in search._chunks[:hit]:
            self._tick()
            stored = self.storage[chunk.key]
            if len(stored.shards) < FMT.shards:
                stored.failed_at = self.clock.now
                self._tick()
                self.failed.add(chunk.key, bad=False)
                break

    @rule(place=places)
    def others_delete_what_was_found(self, place: tuple[int, int]) -> None:
        branch, index = place
        self.look_up_and_load(branch, 5, 1)
        self._set(branch, index, set())
        self.look_up_and_load(branch, 5, 1)
        # Longer than a failed key is taken for missing.
        self.clock.now += 12
        self.look_up_and_load(branch, 5, 1)

    def _begin(self, branch: int, length: int) -> PrefixSearch:
        self._tick()
        chunks = self.chunks[branch][:length]
        return PrefixSearch(chunks, self.cache, self.failed, FMT.shards)

    def _ask(
        self,
        search: PrefixSearch,
        costs: RoundCosts,
        fails: bool = False,
    ) -> list[Answer]:
        asked = self.cache.ask()
        self._tick()
        answers = []
        for ask in search.plan(costs, 1):
            there = self.storage[ask.chunk.key].shards.issuperset(range(ask.shards))
            presence = Presence.PRESENT if there else Presence.MISSING
            answers.append(Answer(Presence.ERROR if fails else presence, asked))
        self._tick()
        return answers

    def _finish(self, search: PrefixSearch, costs: RoundCosts) -> int:
        for _ in range(40):
            answers = self._ask(search, costs)
            if not answers:
                hit = search.finish()
                search.remember()
                return hit
            search.take(answers)
        raise AssertionError("a search without end")

    def _check(self, search: PrefixSearch, hit: int) -> None:
        """Compare an answer with what was true while it was looked for, and shortly before."""
        begin = search.began.at
        chunks = search._chunks
        stored = [self.storage[chunk.key] for chunk in chunks]
        for index in {0, hit - 1} if hit else ():
            assert self._whole_at_or_after(stored[index], begin - SEEN), "a hit that is long gone"
        for index in range(hit):
            failed_at = stored[index].failed_at
            if failed_at > begin - GAP / 2:
                assert self._whole_at_or_after(stored[index], failed_at), "a hit known to be none"
        due = 0
        for index, chunk in enumerate(chunks):
            since = stored[index].whole_since
            if since is None or chunk.key in self.failed:
                break
            ours = since <= stored[index].stored_at <= begin
            if stored[index].failed_at > begin or not (ours or since < begin - MISSING):
                break
            due = index + 1
        assert hit >= due, "a miss of what has been there"

    @staticmethod
    def _whole_at_or_after(stored: _Stored, moment: float) -> bool:
        return stored.whole_since is not None or stored.last_whole >= moment


@pytest.fixture(autouse=True)
def _real_time_afterwards() -> Iterator[None]:
    before = presence_module.time, failed_module.time
    yield
    presence_module.time, failed_module.time = before
