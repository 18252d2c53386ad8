"""What a hit needs of each kind: for one prompt, and for all chunks of a shelf at once."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from kvshelf.format.forest import GONE, UNKNOWN, Forest, HitRules

from kvshelf.format.hit_rule import UNLIMITED, HitRule
from kvshelf.format.kinds import FULL, KINDS, STATE, WINDOW, Kind

SIZE = 8

some_kinds = st.sets(st.sampled_from(KINDS), min_size=1).map(
    lambda kinds: tuple(kind for kind in KINDS if kind in kinds)
)


def needed(kinds: tuple[Kind, ...], window: int, end: int) -> set[tuple[Kind, int]]:
    """What a hit of `end` chunks needs, from the definition: token by token."""
    pieces: set[tuple[Kind, int]] = set()
    if FULL in kinds:
        pieces |= {(FULL, token // SIZE) for token in range(end * SIZE)}
    if WINDOW in kinds:
        # The next token attends to itself and to window - 1 tokens before it.
        pieces |= {(WINDOW, t // SIZE) for t in range(end * SIZE) if t > end * SIZE - window}
    if STATE in kinds and end:
        pieces.add((STATE, end - 1))
    return pieces


@given(
    some_kinds,
    st.integers(1, 6 * SIZE) | st.just(1 << 70),
    st.integers(0, 6),
    st.dictionaries(st.sampled_from(KINDS), st.sets(st.integers(0, 11))),
    st.sets(st.integers(1, 12)).map(sorted),
)
def test_the_rule_is_the_definition(
    kinds: tuple[Kind, ...], window: int, first: int, lost: dict[Kind, set[int]], ends: list[int]
) -> None:
    rule = HitRule.with_window(kinds, window, SIZE)
    gone = {kind: lost.get(kind, set()) for kind in KINDS}
    present = {kind: set(range(12)) - gone[kind] for kind in KINDS}
    possible = []
    for end in range(13):
        pieces = {(kind, n) for kind, n in needed(kinds, window, end) if n >= first}
        found = [(kind, n) for kind, indices in rule.needs(end, first).items() for n in indices]
        assert len(found) == len(pieces) and set(found) == pieces
        missing = {(kind, n) for kind, n in pieces if n in gone[kind]}
        assert set(rule.missing(end, present, first)) == missing
        if end in ends and not missing:
            possible.append(end)
    assert rule.possible(ends, gone, first) == possible
    assert rule.possible(reversed(ends), lost, first) == possible[::-1]
    whole = [end for end in ends if not any(n in gone[k] for k, n in needed(kinds, window, end))]
    assert rule.longest(ends, present) == max(whole, default=0)


@pytest.mark.parametrize(
    ("record", "rule"),
    [
        ({"chunk_size": 8}, HitRule((FULL,), 0)),
        ({"kinds": ["full", "state"], "chunk_size": 8}, HitRule((FULL, STATE), 0)),
        (
            {"kinds": ["state", "window", "full", "window"], "sliding_windows": [-1, 9, -1, 18]},
            HitRule(KINDS, UNLIMITED),
        ),
        (
            {
                "kinds": ["state", "window", "full", "window"],
                "sliding_windows": [-1, 9, -1, 18],
                "chunk_size": 8,
            },
            HitRule(KINDS, 3),
        ),
        # What a record does not say, or says wrongly, makes hits need more.
        ({"kinds": ["window"], "chunk_size": 8}, HitRule((WINDOW,))),
        ({"kinds": ["window"], "sliding_windows": [-1], "chunk_size": 8}, HitRule((WINDOW,))),
        ({"kinds": ["window"], "sliding_windows": [9], "chunk_size": 0}, HitRule((WINDOW,))),
        ({"kinds": ["window"], "sliding_windows": [9, 9], "chunk_size": 8}, HitRule((WINDOW,))),
        ({"kinds": ["window"], "sliding_windows": ["9"], "chunk_size": 8}, HitRule((WINDOW,))),
        ({"kinds": 3, "chunk_size": 8}, HitRule(())),
        ({}, HitRule(())),
    ],
)
def test_a_record_says_the_rule(record: Mapping[str, object], rule: HitRule) -> None:
    assert HitRule.of(record) == rule


@st.composite
def shelves(draw: st.DrawFn) -> tuple[list[int], list[int], list[HitRule], dict[Kind, list[bool]]]:
    """Parents, indices, the rule of each chunk's namespace, and which chunks have each kind."""
    size = draw(st.integers(1, 24))
    parent: list[int] = []
    index: list[int] = []
    rules: list[HitRule] = []
    own = st.builds(HitRule, some_kinds, st.sampled_from([0, 1, 2, 3, UNLIMITED]))
    for row in range(size):
        before = draw(st.integers(-1, row - 1))
        if before >= 0:
            index.append(index[before] + 1)
            parent.append(before)
            rules.append(rules[before])
        else:
            index.append(draw(st.sampled_from([0, 0, 3])))
            parent.append(draw(st.sampled_from([GONE, UNKNOWN])) if index[-1] else GONE)
            rules.append(draw(own))
    flags = st.lists(st.booleans() | st.just(True), min_size=size, max_size=size)
    return parent, index, rules, {kind: draw(flags) for kind in KINDS}


@given(shelves())
def test_the_array_form_says_of_each_chunk_what_the_rule_says_of_its_prompt(
    made: tuple[list[int], list[int], list[HitRule], dict[Kind, list[bool]]],
) -> None:
    parent, index, rules, whole = made
    size = len(parent)
    paths: list[dict[int, int]] = []
    for row in range(size):
        paths.append({**(paths[parent[row]] if parent[row] >= 0 else {}), index[row]: row})

    def is_there(row: int, kind: Kind, n: int) -> bool:
        if n in paths[row]:
            return whole[kind][paths[row][n]]
        # Before a chunk without a known parent.
        return kind != FULL or parent[paths[row][min(paths[row])]] != GONE

    found = HitRules(
        Forest(np.array(parent, np.int64), np.array(index, np.uint32)),
        np.array([rule.mask for rule in rules], np.uint8),
        np.array([rule.reach for rule in rules], np.int64),
        {kind: np.array(flags) for kind, flags in whole.items()},
    )
    used: set[tuple[Kind, int]] = set()
    for row, rule in enumerate(rules):
        pieces = [(k, n) for k, needs in rule.needs(index[row] + 1).items() for n in needs]
        full = [(k, n) for k, n in pieces if k == FULL]
        assert found.reached[row] == all(is_there(row, *piece) for piece in full)
        assert found.ends[row] == all(is_there(row, *piece) for piece in pieces)
        if found.ends[row]:
            used |= {(kind, paths[row][n]) for kind, n in pieces if n in paths[row]}
    for kind in KINDS:
        rows = [row for row in range(size) if kind in rules[row].kinds]
        assert found.has(kind).nonzero()[0].tolist() == rows
        needed_rows = found.needed(kind)
        assert {row for row in rows if needed_rows[row]} == {r for k, r in used if k == kind}


def test_parents_that_are_not_the_chunk_before_are_none() -> None:
    forest = Forest(np.array([GONE, 0, 1, 1], np.int64), np.array([0, 1, 5, 2], np.uint32))
    assert forest.followers().tolist() == [1, 1, 0, 0]
