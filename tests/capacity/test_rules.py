"""The three rules of an evictor, by models: any sequence of calls, in any time."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

from hypothesis import example, given
from hypothesis import strategies as st

from kvshelf.backends.base import Space
from kvshelf.capacity import limits
from kvshelf.capacity.budget import StoreBudget, least_free
from kvshelf.capacity.limits import FANS, HOUR
from kvshelf.capacity.order import EvictionOrder, score_to_free
from kvshelf.capacity.schedule import Schedule
from kvshelf.capacity.sweep import Unit
from kvshelf.format.kinds import FULL

BOUND, TOTAL = 1000, 100_000
SIZES = st.integers(1, 300)
SECONDS = st.floats(0.0, 100.0)

# ----------------------------------------------------------------------------- what may be stored

STORES = st.one_of(
    st.tuples(st.just("begin"), SIZES | st.just(BOUND + 1)),
    st.tuples(st.just("begin"), st.sampled_from([100, 250])),
    st.tuples(st.just("end"), st.booleans()),
    st.tuples(st.just("sweep"), st.sampled_from([0.0, 0.0, 0.0, 0.5, 1.0])),
    st.tuples(st.just("look"), st.integers(-300, 300)),
    st.tuples(st.just("wait"), SECONDS),
)


@given(
    st.sampled_from([None, BOUND]),
    st.sampled_from([0, 94_400]),
    st.integers(1, 4),
    st.lists(STORES, min_size=20, max_size=40),
)
@example(BOUND, 0, 1, [("sweep", 0.0), ("begin", 250)] * 9)
def test_budget_keeps_bound_and_reserve_and_returns_what_was_not_written(
    bound: int | None, others: int, keepers: int, calls: list[tuple[str, Any]]
) -> None:
    """The shelf and the disk are as the budget was told last, but for its own writes."""
    budget, now, stored, begun = StoreBudget(bound), 0.0, 0, list[int]()
    budget.unknown, budget.keepers = 0, keepers
    reserve = least_free(Space(0, TOTAL))

    def free() -> int:
        return TOTAL - stored - others

    budget.look(Space(free(), TOTAL), now, is_full=False)
    # Before the first sweep nothing is stored.
    assert budget.allows(1, now) is (bound is None)
    for call, value in calls:
        if call == "begin" and budget.allows(value, now):
            budget.begin(value)
            begun.append(value)
        elif call == "end" and begun:
            before, nbytes = (budget.credit, budget.free), begun.pop()
            budget.end(nbytes, written=value)
            stored += nbytes * value
            given_back = 0 if value else nbytes
            assert (budget.credit, budget.free) == tuple(part + given_back for part in before)
        elif call == "sweep":
            # It lists all, and deletes a part.
            budget.begin_sweep()
            assert not budget.refused and not budget.written
            stored -= int(stored * value)
            budget.listed_bytes, budget.unlisted_bytes = stored, 0.0
            budget.look(Space(free(), TOTAL), now, is_full=False)
            budget.grant(now, 1.0)
        elif call == "look":
            others = min(max(0, others + value), TOTAL - stored - reserve - sum(begun) - 1)
            budget.look(Space(free(), TOTAL), now, is_full=False)
        elif call == "wait":
            now += value
        assert budget.begun == sum(begun)
        if bound is not None:
            assert stored + sum(begun) <= bound
            assert not budget.can_wait(bound + 1) and budget.largest <= bound
        if not budget.pays:
            assert free() - sum(begun) >= reserve


@given(st.integers(1, 300), st.integers(1, 50), st.integers(0, BOUND), st.floats(0.0, 1e6), SECONDS)
def test_budgets_of_all_keepers_take_turns_where_room_is_short(
    count: int, largest: int, used: int, ahead: float, now: float
) -> None:
    """Those who have a turn at one time may store no more than there is room for."""
    budgets = [StoreBudget(BOUND) for _ in range(count)]
    for rank, budget in enumerate(budgets):
        budget.keepers, budget.unknown, budget.rank = count, 0, rank
        budget.clock_ahead, budget.largest, budget.listed_bytes = ahead, largest, used
        budget.grant(now, 1 / FANS)
    granted = [budget.granted for budget in budgets]
    room = max(0, BOUND - used)
    assert sum(granted) <= room + largest
    if room >= 2 * largest:
        assert any(nbytes >= largest for nbytes in granted)
    for budget in budgets:
        left = budget.turn_left(now)
        assert (left > 0) is (budget.granted > 0) or room < largest
        # Whoever has no turn gets one in a round of all.
        assert left > -(count + 1) * limits.TURN_SECONDS


@given(st.lists(st.sampled_from([*3 * ("again",), "wrote", "hour"]), max_size=30))
def test_budget_that_pays_for_a_quota_frees_ever_more_until_it_frees_nothing(
    events: list[str],
) -> None:
    budget, now = StoreBudget(None), 0.0
    budget.largest, disk = 10, Space(50_000, TOTAL)
    asked, short_until, pauses_until = limits.FREED_AT_ONCE, -math.inf, -math.inf
    for event in events:
        if event == "again":
            if budget.pays:
                budget.pay(budget.bytes_to_free, disk, now)
            if now >= short_until:
                asked = limits.FREED_AT_ONCE
            elif budget.free > 0 and asked < limits.MOST_FREED_AT_ONCE:
                asked *= 4
            elif budget.free > 0 and not budget.written:
                pauses_until = now + limits.FULL_SECONDS
            short_until = now + HOUR
            budget.run_short("quota", now)
            assert budget.free == 0 and budget.refused
        elif event == "wrote" and budget.free >= 10:
            budget.begin(10)
            budget.end(10, written=True)
        elif event == "hour":
            now += HOUR / 3
        why = budget.look(disk, now, is_full=False)
        assert budget.pays is (pauses_until <= now < short_until) is (why is not None)
        expected = max(asked * budget.largest - budget.free, 0) if budget.pays else 0
        assert budget.bytes_to_free == expected


# ----------------------------------------------------------------------------- what goes

GROUPS = ("_", "a" * 16, "b" * 16)


def unit_of(group: str, nbytes: int, age: float) -> Unit:
    unit = Unit("m", group, bytes(32), FULL, 0, tail=False, used=1e6 - age, hit=True)
    unit.nbytes = nbytes
    return unit


UNITS = st.lists(
    st.builds(unit_of, st.sampled_from(GROUPS), SIZES, st.floats(0.0, 9e5)), min_size=1, max_size=40
)


@given(
    st.lists(UNITS, min_size=1, max_size=6),
    st.sampled_from([None, BOUND]),
    st.sampled_from([None, 400]),
    st.integers(0, 500),
    st.data(),
)
def test_order_takes_the_oldest_as_far_as_bounds_need_and_not_twice_as_much(
    sweeps: list[list[Unit]],
    bound: int | None,
    quota: int | None,
    to_free: int,
    data: st.DataObject,
) -> None:
    """Each sweep lists the whole of another shelf; pinned units are no candidates."""
    order, now = EvictionOrder(bound, quota), 1e6
    for units in sweeps:
        held = Counter[str]()
        for unit in units:
            held[unit.where] += unit.nbytes
        shares = dict.fromkeys(held, 1.0)
        used = order.note(units, shares, held)
        assert order.nbytes == held and used == sum(held.values())
        pinned = data.draw(st.sets(st.integers(0, len(units) - 1)))
        free = [(now - unit.used, unit) for i, unit in enumerate(units) if i not in pinned]
        free.sort(key=lambda pair: pair[0], reverse=True)
        cuts = order.thresholds(
            free,
            shares,
            shelf_share=1.0,
            used_bytes=used,
            bytes_to_free=to_free,
            largest=0,
            weight=1.0,
            now=now,
        )
        assert cuts.keys() <= {"", *held} and "m/_" not in cuts
        candidates = [pair for pair in free if bound is not None or pair[1].used < now - HOUR]
        high, low = (
            to_free if bound is None else max(used - part * bound, to_free)
            for part in (limits.HIGH, limits.LOW)
        )
        check(candidates, cuts[""], low, high)
        for where, cut in cuts.items() if quota is not None else ():
            mine = [pair for pair in free if pair[1].where == where]
            if where:
                low, high = (held[where] - part * quota for part in (limits.LOW, limits.HIGH))  # type: ignore[operator]
                check(mine, cut, low, high)
        assert order.evicts_after is None or order.evicts_after >= 1.0


def check(candidates: list[tuple[float, Unit]], cut: float, low: float, high: float) -> None:
    """What is at or above a cut has as many bytes as is needed, and no more than twice of it."""
    taken = sum(unit.nbytes for score, unit in candidates if score >= cut)
    above = sum(unit.nbytes for score, unit in candidates if score > cut)
    assert taken >= min(high, sum(unit.nbytes for _, unit in candidates))
    assert above < max(limits.MOST_PART * low, 1) and (low > 0 or not taken)


@given(st.lists(st.tuples(st.floats(0.05, 1.0), UNITS), min_size=1, max_size=9))
def test_order_smooths_over_slices_and_forgets_groups_that_are_gone(
    sweeps: list[tuple[float, list[Unit]]],
) -> None:
    order, learned = EvictionOrder(BOUND, None), list[float]()
    for share, units in sweeps:
        there = {unit.where for unit in units}
        before = dict(order.nbytes)
        order.note(units, dict.fromkeys(there, share), there)
        assert order.nbytes.keys() == there
        for where, nbytes in order.nbytes.items():
            seen = sum(unit.nbytes for unit in units if unit.where == where) / share
            ends = sorted((seen, before.get(where, seen)))
            assert ends[0] - 1e-6 <= nbytes <= ends[1] + 1e-6
        scored = sorted(((1e6 - unit.used, unit.nbytes) for unit in units), reverse=True)
        learned.append(score_to_free(scored, 10.0))
        order.threshold("", scored, 10.0, 0.0, max(share, 1 / limits.SMOOTH))
        assert order.evicts_after is not None
        assert max(min(learned), 1) - 1e-6 <= order.evicts_after <= max(*learned, 1.0) + 1e-6


# ----------------------------------------------------------------------------- when to sweep

EVENTS = st.one_of(
    st.tuples(st.just("write"), SIZES),
    st.tuples(st.just("sweep"), st.floats(0.0, 10.0)),
    st.tuples(st.just("full"), st.just(0)),
    st.tuples(st.just("leave"), st.just(0)),
    st.tuples(st.just("block"), SECONDS),
    st.tuples(st.just("vain"), st.integers(0, 600)),
    st.tuples(st.just("wait"), st.floats(0.0, 4000.0)),
)


@given(
    st.sampled_from([None, BOUND]),
    st.sampled_from([None, 4 * HOUR]),
    st.sampled_from([None, 400]),
    st.lists(EVENTS, max_size=30),
)
def test_schedule_sweeps_for_a_cause_alone_and_rests_as_long_as_it_may(
    bound: int | None, age: float | None, quota: int | None, events: list[tuple[str, Any]]
) -> None:
    schedule, budget, now = Schedule(age, quota), StoreBudget(bound), 1e6
    budget.unknown = 0
    cost = listed_at = full_again_at = 0.0
    for event, value in events:
        if event == "write":
            if budget.allows(value, now):
                budget.begin(value)
                budget.end(value, written=True)
        elif event == "sweep":
            cost, listed_at, gained = value, now, schedule.folders_without_gain
            budget.begin_sweep()
            budget.listed_bytes += value
            schedule.listed(64, 512, now)
            assert schedule.width == FANS
            budget.grant(now, 1.0)
            schedule.ended(now, now + value, value)
            assert schedule.folders_without_gain == gained
            full_again_at = full_again_at if schedule.full_folders else now + limits.FULL_SECONDS
            now += value
        elif event == "full":
            had = schedule.full_folders
            schedule.found_full(now)
            assert schedule.full_folders == (had or FANS * (now >= full_again_at))
        elif event == "leave":
            schedule.leaves_until = now + limits.LEAVES_SECONDS
        elif event == "block":
            schedule.blocked_until = now + value
        elif event == "vain":
            schedule.folders_without_gain = value
        else:
            now += value
        seconds = schedule.seconds_to_sweep(now, budget)
        due_at, since = now + seconds, now - schedule.ended_at
        assert due_at >= schedule.blocked_until - 1e-3
        needs_room = bound is not None and (
            budget.needs_sweep(now, budget.written / max(since, limits.LEAST_PAUSE) * cost)
            or not schedule.ended_at
            or budget.used_bytes > limits.HIGH * bound
        )
        for_age = age is not None or now < schedule.leaves_until
        for_quota = quota is not None and budget.written > 0
        assert (seconds < math.inf) is bool(
            needs_room or for_age or for_quota or schedule.full_folders
        )
        if schedule.full_folders and schedule.may_free:
            pause = limits.RUSH if budget.refused else limits.HURRY
            expected = max(pause * cost - since, schedule.blocked_until - now)
            assert seconds <= expected + 1e-3
        if not (needs_room or schedule.full_folders) and seconds < math.inf:
            # Nobody waits: 1 % of a core.
            assert seconds >= limits.REST * cost - since - 1e-3
        if for_age and seconds < math.inf:
            idle_at = schedule.ended_at + limits.REST * cost
            latest = max(idle_at, listed_at + HOUR, schedule.blocked_until)
            assert due_at <= latest + 1e-3
