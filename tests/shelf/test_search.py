"""The search for a hit finds what the rule says, in few rounds; no old answer is believed."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Mapping
from dataclasses import dataclass

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from kvshelf.format.hit_rule import HitRule
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind
from kvshelf.shelf import presence as presence_module
from kvshelf.shelf.presence import PresenceCache
from kvshelf.shelf.search import Ask, Search
from tests.support.clocks import Clock

SIZE = 8
#: Which kinds a namespace has, and the shards of each.
KINDS_OF: Mapping[str, dict[Kind, int]] = {
    "full": {FULL: 8},
    "full, one shard": {FULL: 1},
    "full and states": {FULL: 1, STATE: 1},
    "full and windows": {FULL: 2, WINDOW: 1},
    "all": {FULL: 1, WINDOW: 2, STATE: 2},
    "windows and states": {WINDOW: 1, STATE: 2},
    "states": {STATE: 2},
    "windows": {WINDOW: 2},
}


@dataclass
class Case:
    """For each kind and chunk how many shards are there, from the first on; what is remembered."""

    name: str
    count: int
    window: int
    first: int
    ends: list[int]
    there: dict[Kind, list[int]]
    remembered: int
    usable: int

    def is_whole(self, kind: Kind, index: int) -> bool:
        return self.there[kind][index] == KINDS_OF[self.name][kind]


@st.composite
def cases(draw: st.DrawFn, most: int = 150) -> Case:
    name = draw(st.sampled_from(sorted(KINDS_OF)))
    count = draw(st.integers(0, most))
    rng = random.Random(draw(st.integers(0, 1 << 32)))
    whole = draw(st.sampled_from([0.05, 0.5, 0.9, 1.0]))
    there = {
        kind: [number if rng.random() < whole else rng.randrange(number) for _ in range(count)]
        for kind, number in KINDS_OF[name].items()
    }
    ends = draw(st.none() | st.sets(st.integers(1, max(1, count)), max_size=40).map(sorted))
    return Case(
        name,
        count,
        draw(st.integers(0, 5 * SIZE)),
        draw(st.integers(0, min(5, count))),
        list(range(1, count + 1)) if ends is None else ends,
        there,
        draw(st.integers(0, count)),
        draw(st.just(count) | st.integers(0, count)),
    )


def run(case: Case, *, high_latency: bool) -> tuple[Search, list[list[Ask]]]:
    """Search where each answer is true; return the search, and what it asked for in each round."""
    shards = KINDS_OF[case.name]
    rule = HitRule.with_window(tuple(shards), case.window, SIZE)
    search = Search(rule, shards, case.count, case.first, case.ends, high_latency=high_latency)
    rounds, asked = search.rounds(case.remembered, case.usable), []
    answers: list[bool] | None = None
    with contextlib.suppress(StopIteration):
        while True:
            asked.append(rounds.send(answers))  # type: ignore[arg-type]
            assert len(set(asked[-1])) == len(asked[-1])
            assert len(asked) <= 2 * case.count + 8, "a search without an end"
            answers = [
                case.there[kind][n] >= (shards[kind] if whole else 1)
                for kind, n, whole in asked[-1]
            ]
    return search, asked


def expected(case: Case, full: int) -> int:
    """The longest hit that the rule allows behind `first`, of a prefix of `full` chunks."""
    shards = KINDS_OF[case.name]
    present = {kind: {n for n in range(full) if case.is_whole(kind, n)} for kind in shards}
    present[FULL] = set(range(full))
    if set(shards) == {FULL}:
        return full
    rule = HitRule.with_window(tuple(shards), case.window, SIZE)
    ends = [end for end in case.ends if case.first < end <= full]
    hits = [end for end in ends if not rule.missing(end, present, case.first)]
    return max(hits, default=case.first)


@given(cases())
def test_where_probes_are_cheap_a_hit_is_what_the_rule_says(case: Case) -> None:
    case.remembered = 0
    search, _ = run(case, high_latency=False)
    full = case.count
    if FULL in case.there:
        gone = (n for n in range(case.first, case.usable) if not case.is_whole(FULL, n))
        full = max(next(gone, case.usable), case.first)
    assert search.full_chunks == full
    assert search.hit_chunks == expected(case, full)
    for kind, seen in search.known.items():
        assert all(case.is_whole(kind, n) for n in seen)


@given(cases(), st.booleans())
def test_far_away_a_prefix_is_found_and_the_ends_of_any_hit_were_seen(
    case: Case, is_prefix: bool
) -> None:
    """A gap within a prefix may be overlooked, but not at its ends, nor one of other kinds."""
    if is_prefix and FULL in case.there:
        number = KINDS_OF[case.name][FULL]
        stored = next((n for n in range(case.count) if not case.is_whole(FULL, n)), case.count)
        # Behind it a copy of some files only.
        case.there[FULL] = [number if n < stored else min(1, number - 1) for n in range(case.count)]
        case.remembered = min(case.remembered, stored)
    search, asked = run(case, high_latency=True)
    full = search.full_chunks
    assert search.hit_chunks == expected(case, full)
    if FULL not in case.there:
        assert full == case.count
    elif is_prefix:
        assert full == max(min(stored, case.usable), case.first)
        assert len(asked) <= 12
    elif full > case.first:
        assert case.is_whole(FULL, full - 1)
        assert full <= case.usable


def stored(count: int, full: int, ends: tuple[int, ...] = (), name: str = "full") -> Case:
    """A prompt of which so many chunks are stored, and what hits of some ends need."""
    there = {kind: [0] * count for kind in KINDS_OF[name]}
    there[FULL][:full] = [KINDS_OF[name][FULL]] * full
    rule = HitRule.with_window(tuple(KINDS_OF[name]), 4 * SIZE, SIZE)
    for kind in set(there) - {FULL}:
        for end in ends:
            for n in rule.needs(end)[kind]:
                there[kind][n] = KINDS_OF[name][kind]
    return Case(name, count, 4 * SIZE, 0, list(range(1, count + 1)), there, 0, count)


@pytest.mark.parametrize(
    ("case", "hit", "rounds", "heads"),
    [
        (stored(512, 512), 512, 1, 48),
        (stored(512, 320), 320, 3, 80),
        (stored(512, 0), 0, 1, 48),
        (stored(4096, 4096), 4096, 1, 80),
        (stored(4096, 2560), 2560, 4, 128),
        (stored(512, 512, (512,), "all"), 512, 1, 80),
        (stored(512, 320, (320,), "all"), 320, 3, 240),
        (stored(512, 330, (24, 320), "all"), 320, 4, 240),
        (stored(4096, 4096, (4096,), "all"), 4096, 1, 80),
        # The latest end at which a state is lies far before the end of the full chunks.
        (stored(2048, 2048, (24,), "full and states"), 24, 11, 2200),
    ],
)
def test_rounds_and_probes_far_away(case: Case, hit: int, rounds: int, heads: int) -> None:
    search, asked = run(case, high_latency=True)
    shards = KINDS_OF[case.name]
    assert search.hit_chunks == hit
    assert len(asked) <= rounds
    assert sum(shards[kind] if whole else 1 for of in asked for kind, _, whole in of) <= heads


# ------------------------------------------------------------------------- what is remembered

_KEYS = [b"a", b"b", b"c"]
_EVENTS = ("seen", "inferred", "late", "drop", "clear", "wait")


@example([("seen", b"a"), ("wait", b"a"), ("late", b"a")])
@given(st.lists(st.tuples(st.sampled_from(_EVENTS), st.sampled_from(_KEYS)), max_size=12))
def test_what_is_remembered_is_the_newest_answer_for_its_time(
    events: list[tuple[str, bytes]],
) -> None:
    """Against a list of all that happened."""
    clock, real = Clock(1000.0), presence_module.time
    presence_module.time = clock  # type: ignore[assignment]
    try:
        cache = PresenceCache(seconds=60.0)
        #: By key: when the newest answer was asked for, and what it is.
        newest: dict[bytes, tuple[float, str]] = {}
        cleared = 0.0
        for event, key in events:
            clock.now += 50.0 if event == "wait" else 1.0
            asked = clock.now - (10.0 if event == "late" else 0.0)
            if event == "drop":
                cache.drop(key)
            elif event == "clear":
                cache.clear()
                newest, cleared = {}, clock.now
            elif event != "wait":
                cache.note([key], asked, seen=event != "inferred")
            if event in ("seen", "inferred", "late", "drop"):
                at = max(cleared, newest.get(key, (0.0, ""))[0])
                if asked > at:
                    newest[key] = asked, event
            for one in _KEYS:
                at, what = newest.get(one, (0.0, "drop"))
                lasts = clock.now < at + 60.0
                assert cache.has(one, seen=True) is (lasts and what in ("seen", "late"))
                assert cache.has(one, seen=False) is (lasts and what != "drop")
            there = [cache.has(one, seen=False) for one in _KEYS]
            assert cache.leading(_KEYS) == (*there, False).index(False)
    finally:
        presence_module.time = real


def test_oldest_answers_are_forgotten_first() -> None:
    cache = PresenceCache(limit=3)
    keys = [bytes([n]) for n in range(10)]
    for number, key in enumerate(keys):
        cache.note([key], 1.0 + number)
    assert cache._entries.keys() == set(keys[-3:])
