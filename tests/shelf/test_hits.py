"""Lookups where a hit needs several kinds of KV: the right end, found in few rounds."""

from __future__ import annotations

import functools
import os
import random
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    Bundle,
    RuleBasedStateMachine,
    consumes,
    rule,
    run_state_machine_as_test,
)

from kvshelf.backends import Backend, open_backend
from kvshelf.format.hit_rule import HitRule
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf import failed_keys as failed_module
from kvshelf.shelf import presence as presence_module
from kvshelf.shelf.failed_keys import FailedKeys
from kvshelf.shelf.hits import HitSearch
from kvshelf.shelf.lookup import Lookup, LookupService
from kvshelf.shelf.presence import PresenceCache
from kvshelf.shelf.probes import Answer, RoundCosts
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import Tier, TieredShelf
from tests.sim.storage import NamesOnly
from tests.support import prompts
from tests.support.clocks import Clock
from tests.support.formats import format_of_kinds
from tests.support.waiting import PATIENCE

SIZE = 8

#: Which kinds a namespace has, and the shards of each.
KINDS_OF: Mapping[str, dict[Kind, int]] = {
    "full and states": {FULL: 1, STATE: 1},
    "full and windows": {FULL: 2, WINDOW: 1},
    "all": {FULL: 1, WINDOW: 2, STATE: 2},
    "windows and states": {WINDOW: 1, STATE: 2},
    "states": {STATE: 2},
    "windows": {WINDOW: 2},
}


FORMATS = {name: format_of_kinds(shards, SIZE) for name, shards in KINDS_OF.items()}


class Rig:
    """Lookups in a hybrid namespace."""

    def __init__(
        self, fmt: ObjectFormat, window: int, backend: Backend, tiers: Sequence[Tier] = ()
    ) -> None:
        self.fmt = fmt
        self.window = window
        self.backend = backend
        self.failed = FailedKeys()
        self.counters = Counters()
        shelf = TieredShelf(Shelf(backend), tiers)
        self.service = LookupService(
            shelf.view(fmt),
            failed=self.failed,
            counters=self.counters,
            others={kind: shelf.view(fmt.of(kind)) for kind in fmt.kinds[1:]},
            rule=HitRule.with_window(fmt.kinds, window, SIZE),
        )

    def name(self, kind: Kind, chunk: Chunk, shard: int) -> str:
        name = object_name(chunk, shard, self.fmt.of(kind).shards, kind)
        return f"{self.fmt.namespace.folder}/{name}"

    def put(self, kind: Kind, chunks: Iterable[Chunk], shards: Iterable[int] | None = None) -> None:
        fmt = self.fmt.of(kind)
        for chunk in chunks:
            for shard in range(fmt.shards) if shards is None else shards:
                name = self.name(kind, chunk, shard)
                self.backend.write(name, [bytes(fmt.object_size(shard))], "replace")

    def chunks(self, tokens: Sequence[int]) -> list[Chunk]:
        return self.chain().extend(tokens)

    def chain(self) -> KeyChain:
        return KeyChain(self.fmt.namespace.digest, SIZE)

    def look(
        self, tokens: Sequence[int], ends: Sequence[int] | None = None, first: int = 0
    ) -> Lookup:
        lookup = self.service.submit(tokens, self.chain, ends=ends, first_chunk=first)
        assert lookup.wait(PATIENCE)
        return lookup

    def close(self) -> None:
        self.service.close()


prompt = functools.partial(prompts.prompt, unit=SIZE)


@dataclass
class Case:
    """What is on a shelf: for each kind and chunk the shards that are there."""

    name: str
    count: int
    window: int
    first: int
    ends: list[int] | None
    there: dict[Kind, list[frozenset[int]]]
    failed: set[tuple[Kind, int]]


@st.composite
def cases(draw: st.DrawFn, *, gaps: bool, most: int = 150) -> Case:
    """Any sets of objects; with `gaps`, of full ones too."""
    name = draw(st.sampled_from(sorted(KINDS_OF)))
    shards = KINDS_OF[name]
    count = draw(st.integers(0, most))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    whole = draw(st.sampled_from([0.05, 0.5, 0.9, 1.0]))
    there: dict[Kind, list[frozenset[int]]] = {}
    for kind, number in shards.items():
        every = frozenset(range(number))
        there[kind] = [
            every if rng.random() < whole else frozenset(s for s in every if rng.random() < 0.5)
            for _ in range(count)
        ]
    if FULL in there and not gaps:
        prefix = rng.randint(0, count)
        there[FULL] = [
            frozenset(range(shards[FULL])) if i < prefix else frozenset() for i in range(count)
        ]
    ends = draw(st.none() | st.sets(st.integers(1, max(1, count)), max_size=40).map(sorted))
    kinds = [kind for kind in shards if kind != FULL or gaps]
    failed = {
        (rng.choice(kinds), rng.randrange(count))
        for _ in range(draw(st.integers(0, 3)) if count and kinds else 0)
    }
    window = draw(st.integers(0, 5 * SIZE))
    return Case(name, count, window, draw(st.integers(0, 5)), ends, there, failed)


def expected(case: Case) -> tuple[int, int]:
    """The hit and the full prefix, from the definition of a hit, behind `first`."""
    shards = KINDS_OF[case.name]
    first = min(case.first, case.count)

    def whole(kind: Kind, index: int) -> bool:
        return index < first or (
            len(case.there[kind][index]) == shards[kind] and (kind, index) not in case.failed
        )

    full = case.count
    if FULL in shards:
        full = next((i for i in range(case.count) if not whole(FULL, i)), case.count)
    hit = first
    for end in range(1, case.count + 1) if case.ends is None else case.ends:
        if not first < end <= full:
            continue
        before = range(end * SIZE)
        reached = {token // SIZE for token in before if token > end * SIZE - case.window}
        if STATE in shards and not whole(STATE, end - 1):
            continue
        if WINDOW in shards and not all(whole(WINDOW, index) for index in reached):
            continue
        hit = max(hit, end)
    return hit - first, max(full, first) - first


def check(case: Case, backend: Backend) -> None:
    with closing(Rig(FORMATS[case.name], case.window, backend)) as rig:
        tokens = prompt(case.count, rest=3)
        chunks = rig.chunks(tokens)
        for kind, of_kind in case.there.items():
            for chunk, shards in zip(chunks, of_kind, strict=True):
                rig.put(kind, [chunk], shards)
        for kind, index in case.failed:
            rig.failed.add(kind_key(chunks[index].key, kind), bad=True)
        for _ in range(2):
            lookup = rig.look(tokens, case.ends, case.first)
            assert (lookup.hit_chunks, lookup.full_chunks) == expected(case)
            assert lookup.chain is not None and lookup.chain.chunks == chunks
            for kind, known in lookup.known.items():
                assert all(len(case.there[kind][i]) == KINDS_OF[case.name][kind] for i in known)


@given(cases(gaps=True))
def test_a_hit_is_what_the_definition_says_on_a_near_storage(case: Case) -> None:
    check(case, NamesOnly(0.0))


@given(cases(gaps=False))
def test_a_hit_is_what_the_definition_says_on_a_far_storage(case: Case) -> None:
    backend = NamesOnly(0.02)
    check(case, backend)
    # The second lookup asks for nothing but gaps.
    assert len(backend.asked) <= 12 + len(case.failed)


@settings(max_examples=15)
@given(cases(gaps=True, most=40), st.booleans())
def test_a_hit_is_what_the_definition_says_with_real_objects(case: Case, on_disk: bool) -> None:
    with tempfile.TemporaryDirectory() as root:
        memory = f"memory://hits-{os.urandom(8).hex()}"
        check(case, open_backend(root if on_disk else memory))


@pytest.fixture
def far() -> Iterator[Rig]:
    with closing(Rig(FORMATS["all"], 2 * SIZE, NamesOnly(0.02))) as rig:
        yield rig
        names(rig).gate.set()


def names(rig: Rig) -> NamesOnly:
    assert isinstance(rig.backend, NamesOnly)
    return rig.backend


def put_all(rig: Rig, chunks: Sequence[Chunk]) -> None:
    for kind in rig.fmt.kinds:
        rig.put(kind, chunks)


def test_a_state_that_we_store_is_found_at_once(far: Rig) -> None:
    tokens = prompt(6)
    chunks = far.chunks(tokens)
    for kind in (FULL, WINDOW):
        far.put(kind, chunks)
    lookup = far.look(tokens)
    assert (lookup.hit_chunks, lookup.full_chunks) == (0, 6)
    far.put(STATE, chunks[3:4])
    assert far.look(tokens).hit_chunks == 0, "a miss is not asked for again at once"
    far.service.note_published([kind_key(chunks[3].key, STATE)])
    lookup = far.look(tokens)
    assert lookup.hit_chunks == 4
    assert lookup.known[STATE] == {3}
    assert {2, 3} <= lookup.known[WINDOW]


def test_a_state_that_went_away_is_not_a_hit_once_a_load_has_failed(far: Rig) -> None:
    tokens = prompt(8)
    chunks = far.chunks(tokens)
    put_all(far, chunks)
    assert far.look(tokens).hit_chunks == 8
    del names(far).sizes[far.name(STATE, chunks[7], 1)]
    far.failed.add(kind_key(chunks[7].key, STATE), bad=False)
    far.failed.clear()
    assert far.look(tokens).hit_chunks == 7


def test_a_load_that_fails_during_a_search_makes_its_hit_shorter() -> None:
    """However long ago it failed: the search saw the state before."""
    tokens = prompt(3)
    chunks = KeyChain(bytes(32), SIZE).extend(tokens)
    key = kind_key(chunks[1].key, STATE)
    for failed, hit in ((b"another", 2), (key, 1)):
        cache = PresenceCache()
        for state in (kind_key(chunks[0].key, STATE), key):
            cache.learn(state, there=True, asked=cache.ask())
        search = HitSearch(chunks, 0, [1, 2], HitRule((STATE,)), cache, FailedKeys(), {STATE: 1})
        cache.note_failed(failed)
        search.finish()
        assert search.hit_chunks == hit


def test_an_error_is_no_answer(far: Rig) -> None:
    tokens = prompt(8)
    chunks = far.chunks(tokens)
    put_all(far, chunks)
    broken = names(far).broken
    broken.add(far.name(STATE, chunks[7], 0))
    broken.add(far.name(WINDOW, chunks[5], 1))
    assert far.look(tokens).hit_chunks == 5
    assert far.counters.snapshot()["probe_errors"] > 0
    broken.clear()
    assert far.look(tokens).hit_chunks == 8, "it was not remembered as missing"


@pytest.mark.parametrize("cost", [0.0, 0.02], ids=["near", "far"])
def test_what_a_tier_has_is_not_asked_of_the_storage(tmp_path: Path, cost: float) -> None:
    tokens = prompt(6)
    fmt = FORMATS["all"]
    tier = DiskTier(tmp_path, 1 << 30)
    backend = NamesOnly(cost)
    with closing(Rig(fmt, 2 * SIZE, backend, [tier])) as rig:
        chunks = rig.chunks(tokens)
        for kind in (FULL, WINDOW):
            rig.put(kind, chunks)
        for shard in range(fmt.of(STATE).shards):
            size = fmt.of(STATE).object_size(shard)
            tier.keep(fmt.of(STATE), ObjectRef(chunks[5], shard), bytes(size))
        assert tier.drain(PATIENCE)
        backend.asked.clear()
        assert rig.look(tokens).hit_chunks == 6
        asked = {name for names in backend.asked for name in names}
        assert not any(rig.name(STATE, chunks[5], shard) in asked for shard in (0, 1))
        if cost:
            assert len(backend.asked) == 1, "all kinds are asked for together"
    tier.close()


# ------------------------------------------------------------------------------- in time


@dataclass
class Stored:
    """What is true of one kind of one chunk, and since when."""

    shards: frozenset[int] = frozenset()
    whole_since: float | None = None
    last_whole: float = 0.0
    ours_at: float = 0.0
    failed_at: float = 0.0


@dataclass
class Held:
    """A search whose answers are on their way, and when it began."""

    search: HitSearch
    begun: float
    answers: list[Answer]
    fails: bool


class Searches(RuleBasedStateMachine):
    """Searches in any state of completion, on a storage that this engine and others change.

    Answers of the storage are taken at one moment and arrive at another.
    """

    held = Bundle("held")
    seen_seconds, missing_seconds = 60.0, 1.0

    def __init__(self) -> None:
        super().__init__()
        self.clock = Clock(1000.0)
        self.modules = presence_module.time, failed_module.time
        presence_module.time = failed_module.time = self.clock  # type: ignore[assignment]
        self.fmt = FORMATS["all"]
        self.rule = HitRule.with_window(self.fmt.kinds, 2 * SIZE, SIZE)
        self.cache = PresenceCache(self.seen_seconds, self.missing_seconds, limit=64)
        self.failed = FailedKeys()
        self.failed.subscribe(self.cache.note_failed)
        self.chunks = KeyChain(self.fmt.namespace.digest, SIZE).extend(prompt(6))
        self.shards = {kind: self.fmt.of(kind).shards for kind in self.fmt.kinds}
        self.stored = {(kind, i): Stored() for kind in self.shards for i in range(6)}

    def teardown(self) -> None:
        presence_module.time, failed_module.time = self.modules

    def _tick(self) -> None:
        self.clock.now += 1e-4

    def _key(self, piece: tuple[Kind, int]) -> bytes:
        return kind_key(self.chunks[piece[1]].key, piece[0])

    def _set(self, piece: tuple[Kind, int], shards: frozenset[int]) -> Stored:
        self._tick()
        stored = self.stored[piece]
        if stored.whole_since is not None:
            stored.last_whole = self.clock.now
        stored.shards = shards
        if len(shards) < self.shards[piece[0]]:
            stored.whole_since = None
        elif stored.whole_since is None:
            stored.whole_since = self.clock.now
        self._tick()
        return stored

    def _whole(self, kind: Kind) -> frozenset[int]:
        return frozenset(range(self.shards[kind]))

    kinds = st.sampled_from((FULL, WINDOW, STATE))
    places = st.tuples(kinds, st.integers(0, 5))

    @rule(seconds=st.sampled_from((0.1, 0.6, 2.0, 12.0, 35.0)))
    def wait(self, seconds: float) -> None:
        self.clock.now += seconds

    @rule(ours=st.booleans(), states=st.sets(st.integers(0, 5)), count=st.sampled_from((2, 6)))
    def store(self, ours: bool, states: set[int], count: int) -> None:
        pieces: list[tuple[Kind, int]] = [
            (kind, i) for kind in (FULL, WINDOW) for i in range(count)
        ]
        for piece in [*pieces, *((STATE, i) for i in states)]:
            stored = self._set(piece, self._whole(piece[0]))
            if ours:
                self.cache.note_published(self._key(piece))
                self.failed.forget(self._key(piece))
                stored.ours_at = self.clock.now
            self._tick()

    @rule(piece=places, shards=st.sampled_from((frozenset(), frozenset({0}))))
    def others_delete(self, piece: tuple[Kind, int], shards: frozenset[int]) -> None:
        self._set(piece, shards & self._whole(piece[0]) if shards else shards)

    def _begin(self, ends: Sequence[int]) -> HitSearch:
        self._tick()
        return HitSearch(
            self.chunks, 0, sorted(ends), self.rule, self.cache, self.failed, self.shards
        )

    def _ask(self, search: HitSearch, concurrency: int = 1, *, fails: bool = False) -> list[Answer]:
        asked = self.cache.ask()
        self._tick()
        answers = []
        for kind, chunk, shards in search.plan(RoundCosts(1e-2, concurrency), 1):
            there = self.stored[kind, chunk.index].shards.issuperset(range(shards))
            answer = Presence.PRESENT if there else Presence.MISSING
            answers.append(Answer(Presence.ERROR if fails else answer, asked))
        self._tick()
        return answers

    def _finish(self, search: HitSearch, concurrency: int = 1) -> int:
        for _ in range(20):
            answers = self._ask(search, concurrency)
            if not answers:
                search.finish()
                search.remember()
                return search.hit_chunks
            search.take(answers)
        raise AssertionError("a search without end")

    ends = st.sets(st.integers(1, 6), min_size=1)

    @rule(
        target=held,
        ends=ends,
        concurrency=st.sampled_from((1, 64)),
        rounds=st.sampled_from((0, 0, 1)),
        fails=st.integers(0, 9).map(lambda number: number == 9),
    )
    def look_up_and_hold(self, ends: set[int], concurrency: int, rounds: int, fails: bool) -> Held:
        begun = self.clock.now
        search = self._begin(list(ends))
        for _ in range(rounds):
            if answers := self._ask(search, concurrency):
                search.take(answers)
        return Held(search, begun, self._ask(search, concurrency, fails=fails), fails)

    @rule(held=consumes(held), concurrency=st.sampled_from((1, 64)))
    def answer_late(self, held: Held, concurrency: int) -> None:
        if held.answers:
            held.search.take(held.answers)
        hit = self._finish(held.search, concurrency)
        self._check_hit(hit, held.begun)

    @rule(ends=ends, concurrency=st.sampled_from((1, 64)))
    def look_up_and_load(self, ends: set[int], concurrency: int) -> None:
        begun = self.clock.now
        hit = self._finish(self._begin(list(ends)), concurrency)
        self._check_hit(hit, begun)
        assert hit >= self._due(ends, begun), "a miss of what has been there"
        for piece in self._needs(hit):
            stored = self.stored[piece]
            if stored.whole_since is None:
                stored.failed_at = self.clock.now
                self._tick()
                self.failed.add(self._key(piece), bad=False)
                self._tick()
                break

    def _needs(self, end: int) -> list[tuple[Kind, int]]:
        return [(kind, i) for kind, needed in self.rule.needs(end).items() for i in needed]

    def _check_hit(self, hit: int, begun: float) -> None:
        """Whatever a hit needs was there while the search ran, or shortly before."""
        for kind, index in self._needs(hit):
            stored = self.stored[kind, index]
            # Full chunks in the middle are taken for granted.
            if kind == FULL and index not in (0, hit - 1):
                continue
            since = max(begun - self.seen_seconds, stored.failed_at)
            assert stored.whole_since is not None or stored.last_whole >= since

    def _due(self, ends: Iterable[int], begun: float) -> int:
        """The longest hit that a search must find: nothing says that anything is missing."""

        def certain(piece: tuple[Kind, int]) -> bool:
            stored = self.stored[piece]
            since = stored.whole_since
            if since is None or self._key(piece) in self.failed:
                return False
            ours = since <= stored.ours_at <= begun
            return ours or since < begun - self.missing_seconds

        return max((end for end in ends if all(map(certain, self._needs(end)))), default=0)


def test_searches_announce_what_is_there_and_miss_nothing_for_long() -> None:
    run_state_machine_as_test(
        Searches,
        settings=settings(
            max_examples=200,
            stateful_step_count=30,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        ),
    )
