"""What a hit needs of each kind."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

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
def test_rule_is_the_definition(
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
def test_record_says_the_rule(record: Mapping[str, object], rule: HitRule) -> None:
    assert HitRule.of(record) == rule
