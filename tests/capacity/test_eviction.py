"""The order in which objects are deleted when space is needed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.capacity import eviction
from kvshelf.capacity.eviction import Units, Victims, choose
from kvshelf.format.forest import GONE, UNKNOWN
from kvshelf.format.kinds import FULL_BIT, STATE_BIT, WINDOW_BIT

NOW = 1_000_000.0
ALL = 1 << 40


def units(
    index: Sequence[int],
    *,
    age: Sequence[float] | float = 3600.0,
    parent: Sequence[int] | int = UNKNOWN,
    full: Sequence[int] | int = 10,
    window: Sequence[int] | int = 0,
    state: Sequence[int] | int = 0,
    hit: Sequence[bool] | bool = True,
    pinned: Sequence[bool] | bool = False,
) -> Units:
    """Rows of a storage; what is one value is that of all."""
    size = len(index)

    def column(values: object, dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        return np.broadcast_to(np.asarray(values, dtype), (size,)).copy()

    used = NOW - column(age, np.float64)
    return Units(
        used=used,
        born=used.copy(),
        index=column(index, np.uint32),
        parent=column(parent, np.int64),
        full=column(full, np.int64),
        window=column(window, np.int64),
        state=column(state, np.int64),
        hit=column(hit, np.bool_),
        pinned=column(pinned, np.bool_),
    )


def chain(length: int, **columns: object) -> Units:
    """One prompt."""
    return units(range(length), parent=[GONE, *range(length - 1)], **columns)  # type: ignore[arg-type]


def select(
    of: Units, free: int = ALL, *, windows: int = 0, max_age: float | None = None
) -> Victims:
    return choose(of, free=free, now=NOW, resolution=60.0, reach=windows, max_age=max_age)


def steps(victims: Victims) -> list[tuple[int, int]]:
    """The rows and kinds."""
    return list(zip(victims.rows.tolist(), victims.kinds.tolist(), strict=True))


def test_what_was_used_longest_ago_goes_first_and_no_more_than_is_needed() -> None:
    found = select(units([0, 0, 0, 0], age=[600, 7200, 3600, 60]), 15)
    assert found.rows.tolist() == [1, 2]
    assert found.kinds.tolist() == [FULL_BIT, FULL_BIT]
    assert found.nbytes.tolist() == [10, 10]


@pytest.mark.long
@pytest.mark.parametrize("seed", range(4))
def test_many_units_are_taken_in_the_order_of_all(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever their sizes, and though they are judged in parts and not all of them sorted."""
    random = np.random.default_rng(seed)
    of = units(
        random.integers(0, 9, 1000).tolist(),
        age=random.integers(60, 9000, 1000).tolist(),
        full=(random.pareto(0.5, 1000) * 10).astype(np.int64).clip(0, 1 << 30).tolist(),
        hit=(random.random(1000) < 0.5).tolist(),
        pinned=(random.random(1000) < random.choice([0.1, 0.9])).tolist(),
    )
    whole = select(of)
    held = np.cumsum(whole.nbytes)
    assert sorted(whole.rows) == np.flatnonzero(~of.pinned & (of.full > 0)).tolist()
    monkeypatch.setattr(eviction, "_AT_ONCE", 7)
    for free in [1, *random.integers(1, held[-1], 20), held[-1]]:
        count = int(np.searchsorted(held, free)) + 1
        assert steps(select(of, int(free))) == steps(whole)[:count]
    old = set(np.flatnonzero(~of.pinned & (of.full > 0) & (of.used < NOW - 5000)).tolist())
    assert set(select(of, 0, max_age=5000).rows.tolist()) == old


def test_nothing_goes_without_need() -> None:
    assert len(select(units([0, 1]), 0).rows) == 0
    assert len(select(units([0, 1]), -5).rows) == 0
    assert len(select(units([]), 100).rows) == 0


def test_of_what_was_used_together_the_end_of_a_prompt_goes_first() -> None:
    assert select(units([2, 0, 3, 1], age=[3601, 3602, 3603, 3604])).rows.tolist() == [2, 0, 3, 1]


def test_where_all_is_young_a_coarse_resolution_makes_no_uses_equal() -> None:
    of = units([0, 1, 2, 3], age=[400, 300, 200, 100])
    found = choose(of, free=ALL, now=NOW, resolution=3600.0)
    assert found.rows.tolist() == [0, 1, 2, 3]


def test_what_was_never_hit_ages_faster() -> None:
    of = units([0, 0, 0], age=[1000, 1900, 2200], hit=[False, True, True])
    assert select(of).rows.tolist() == [2, 0, 1]


def test_what_was_used_for_long_ages_more_slowly() -> None:
    of = units([0, 0, 0], age=[1000, 1900, 2200])
    of.born[1:] -= 86_400
    assert select(of).rows.tolist() == [2, 0, 1]


def test_a_use_counts_for_all_chunks_before_it() -> None:
    of = chain(3, age=[9000, 9000, 600])
    other = units([0, *of.index], age=[4000, 9000, 9000, 600], parent=[GONE, GONE, 1, 2])
    assert select(other).rows.tolist() == [0, 3, 2, 1]


def test_what_is_too_old_goes_without_need_of_space() -> None:
    found = select(units([0, 1, 2, 3], age=[100, 90_000, 80_000, 100]), 0, max_age=86_400)
    assert found.rows.tolist() == [1]
    # It counts for the space that is needed.
    found = select(units([0, 1, 2, 3], age=[100, 90_000, 80_000, 100]), 20, max_age=86_400)
    assert found.rows.tolist() == [1, 2]


def test_pinned_units_stay() -> None:
    found = select(units([0, 1, 2], pinned=[False, True, False], age=90_000), max_age=1)
    assert found.rows.tolist() == [2, 0]


def test_chunks_whose_parent_is_gone_go_first() -> None:
    of = units([0, 4, 5, 4], age=[9000, 600, 700, 10], parent=[GONE, GONE, 1, GONE])
    # The last one was stored just now: the chunk before it may still come.
    assert select(of).rows.tolist() == [2, 1, 0, 3]


def test_times_in_the_future_are_now() -> None:
    assert select(units([0, 1], age=[-1e9, 30])).rows.tolist() == [1, 0]


def test_kv_behind_the_last_state_goes_first() -> None:
    of = chain(5, state=[0, 70, 0, 0, 0], age=[9000, 9000, 900, 900, 900])
    found = steps(select(of))
    assert found[:3] == [(4, FULL_BIT), (3, FULL_BIT), (2, FULL_BIT)]
    # With the last state of a prompt goes the KV of its chunk, then what is before.
    assert found[3:] == [(1, FULL_BIT | STATE_BIT), (0, FULL_BIT)]


def test_kv_of_a_prompt_that_is_still_computed_stays() -> None:
    of = chain(5, age=[900, 800, 700, 600, 10], state=[0, 0, 0, 0, 0])
    of.needs = np.full(5, FULL_BIT | STATE_BIT, np.uint8)
    other = units([*of.index, 0], age=[900, 800, 700, 600, 10, 5000], parent=[-2, 0, 1, 2, 3, -2])
    other.needs = np.array([*of.needs, FULL_BIT], np.uint8)
    assert select(other, 10).rows.tolist() == [5]


def test_a_state_goes_before_its_kv_if_an_older_one_stays() -> None:
    of = chain(6, state=[0, 70, 0, 70, 0, 70])
    of.used[:] = NOW - 600
    of.state_used = np.array([0, NOW - 9000, 0, NOW - 8000, 0, NOW - 600])
    assert steps(select(of)) == [
        (3, STATE_BIT),
        (5, FULL_BIT | STATE_BIT),
        (4, FULL_BIT),
        (3, FULL_BIT),
        (2, FULL_BIT),
        (1, FULL_BIT | STATE_BIT),
        (0, FULL_BIT),
    ]


def test_windows_that_no_state_needs_go_first() -> None:
    of = chain(6, window=5, state=[0, 0, 70, 0, 0, 70])
    found = steps(select(of, 10, windows=2))
    assert found == [(3, WINDOW_BIT), (0, WINDOW_BIT)]


def test_windows_inside_a_prompt_go_before_those_where_prompts_end_or_part() -> None:
    # 0-1-2-3-4-5, and another prompt that begins with 0-1-2.
    of = units(
        [0, 1, 2, 3, 4, 5, 3],
        parent=[GONE, 0, 1, 2, 3, 4, 2],
        window=5,
        hit=False,
        age=[600, 600, 600, 600, 600, 600, 500],
    )
    assert steps(select(of, 10, windows=2)) == [(3, WINDOW_BIT), (0, WINDOW_BIT)]
    # What was hit there stays as long as other chunks.
    of.hit[:] = True
    of.window_used = of.used + 100
    assert steps(select(of, 10, windows=2))[0] == (5, FULL_BIT | WINDOW_BIT)


def test_a_state_without_its_windows_is_of_no_use() -> None:
    of = chain(4, window=[5, 5, 0, 5], state=[0, 70, 0, 70])
    found = steps(select(of, 90, windows=2))
    assert found == [(3, FULL_BIT | WINDOW_BIT | STATE_BIT), (2, FULL_BIT)]


def test_without_known_parents_nothing_of_a_branch_is_judged() -> None:
    of = units([0, 1, 2, 3], state=[0, 0, 0, 70], age=[600, 600, 600, 9000])
    assert select(of, 10).rows.tolist() == [3]


def test_kinds_of_which_a_shard_is_missing_are_of_no_use() -> None:
    of = chain(3, age=[600, 600, 600])
    of.broken = np.array([0, FULL_BIT, 0], np.uint8)
    assert select(of, 20).rows.tolist() == [2, 1]


@st.composite
def forests(draw: st.DrawFn) -> tuple[Units, int]:
    """Units of one namespace with all parents known, some of them gone, and its window."""
    size = draw(st.integers(1, 24))
    kinds = draw(st.sampled_from([FULL_BIT, 3, 5, 7]))
    index: list[int] = []
    parent: list[int] = []
    for row in range(size):
        before = draw(st.integers(-1, row - 1))
        index.append(index[before] + 1 if before >= 0 else draw(st.sampled_from([0, 0, 3])))
        parent.append(before if before >= 0 else GONE)

    def column(values: st.SearchStrategy[int]) -> list[int]:
        return draw(st.lists(values, min_size=size, max_size=size))

    ages = st.sampled_from([0, 100, 400, 5000, 5000, 90_000])
    of = units(
        index,
        parent=parent,
        age=column(ages),
        full=column(st.sampled_from([0, 10, 10, 10, 10])),
        window=column(st.sampled_from([0, 5, 5, 5])) if kinds & WINDOW_BIT else 0,
        state=column(st.sampled_from([0, 0, 70])) if kinds & STATE_BIT else 0,
        hit=[bool(value) for value in column(st.integers(0, 1))],
        pinned=[not value for value in column(st.integers(0, 9))],
    )
    of.born -= np.array(column(st.sampled_from([0, 50, 50_000])), np.float64)
    of.needs = np.full(size, kinds, np.uint8)
    if kinds != FULL_BIT and draw(st.booleans()):
        of.window_used = NOW - np.array(column(ages), np.float64)
        of.state_used = NOW - np.array(column(ages), np.float64)
    return of, draw(st.integers(1, 5))


@given(forests(), st.integers(0, 400), st.sampled_from([None, 3600.0]))
def test_deletions_may_stop_anywhere(
    made: tuple[Units, int], free: int, max_age: float | None
) -> None:
    of, windows = made
    victims = select(of, free, windows=windows, max_age=max_age)
    held = {FULL_BIT: of.full.copy(), WINDOW_BIT: of.window.copy(), STATE_BIT: of.state.copy()}
    there = of.full > 0
    followers = {row: np.flatnonzero(of.parent == row) for row in range(len(of))}
    freed = 0
    for row, kinds, nbytes in zip(victims.rows, victims.kinds, victims.nbytes, strict=True):
        assert not of.pinned[row]
        taken = sum(int(sizes[row]) for bit, sizes in held.items() if kinds & bit)
        assert taken == nbytes > 0
        for bit, sizes in held.items():
            if kinds & bit:
                sizes[row] = 0
        freed += taken
        if kinds & FULL_BIT:
            # Its windows and its state have gone before, or go with it.
            assert not held[WINDOW_BIT][row]
            assert not held[STATE_BIT][row]
            # What follows has gone before; what is pinned stays anyway.
            there[row] = False
            assert not (there & ~of.pinned)[followers[row]].any()
    movable = int(sum(sizes[~of.pinned].sum() for sizes in (of.full, of.window, of.state)))
    assert freed >= min(free, movable)
    if max_age is None and freed:
        assert freed - victims.nbytes[-1] < free
