"""What computing and loading cost is learned from times that are as uneven as real ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.costs import Fit, LoadCosts, PrefillCosts

LINEAR, ATTENTION, DECODE, STEP = 3e-4, 6e-8, 2e-3, 4e-3
LENGTHS = [512, 1024, 2048, 8192]


def step_seconds(start: int, end: int, decodes: int) -> float:
    attended = (end * end - start * start) / 2
    return LINEAR * (end - start) + ATTENTION * attended + DECODE * decodes + STEP


def taught(chance: random.Random, steps: int, *, outliers: float = 0.0) -> PrefillCosts:
    costs = PrefillCosts(2048)
    for _ in range(steps):
        start = chance.randrange(0, 6145, 512)
        end = start + chance.randrange(64, 2049)
        decodes = chance.randrange(8)
        seconds = step_seconds(start, end, decodes) * chance.uniform(0.95, 1.1)
        costs.learn([(start, end)], decodes, seconds * (10 if chance.random() < outliers else 1))
    return costs


@pytest.mark.parametrize("length", LENGTHS)
@pytest.mark.parametrize("outliers", [0.0, 0.03])
def test_sixteen_steps_say_what_prompts_take(length: int, outliers: float) -> None:
    for seed in range(10):
        costs = taught(random.Random(seed), 16, outliers=outliers)
        assert costs.seconds(0, length) == pytest.approx(step_seconds(0, length, 0), rel=0.2)


def test_tokens_behind_others_cost_more() -> None:
    costs = taught(random.Random(1), 40)
    assert costs.seconds(6144, 8192) > 1.2 * costs.seconds(0, 2048)
    parts = costs.seconds(0, 4000) + costs.seconds(4000, 8000)
    assert parts == pytest.approx(costs.seconds(0, 8000))
    assert costs.seconds(100, 100) == 0


def test_an_engine_that_becomes_slower_is_followed() -> None:
    costs, chance = taught(random.Random(2), 100), random.Random(3)
    before = costs.seconds(0, 2048)
    for _ in range(100):
        end = chance.randrange(64, 2049)
        costs.learn([(0, end)], 0, 3 * step_seconds(0, end, 0))
    assert costs.seconds(0, 2048) == pytest.approx(3 * before, rel=0.2)


@given(
    st.lists(
        st.tuples(st.floats(0, 1e9), st.floats(0, 1e9), st.floats(0, 1e4)), min_size=1, max_size=40
    )
)
def test_more_work_is_never_cheaper(learned: list[tuple[float, float, float]]) -> None:
    fit = Fit((1e3, 1e6))
    for first, second, seconds in learned:
        fit.learn((first, second), seconds)
    assert 0 <= fit.seconds((1.0, 1.0)) <= fit.seconds((2.0, 1.0)) <= fit.seconds((2.0, 2.0))


def load_seconds(nbytes: float) -> float:
    return 0.004 + nbytes / 2e9


def test_loads_are_expected_to_take_longer_than_most_took() -> None:
    chance, costs = random.Random(4), LoadCosts()
    for _ in range(64):
        nbytes = chance.choice([12e6, 50e6, 100e6])
        costs.learn(nbytes, load_seconds(nbytes) * chance.uniform(0.9, 1.5))
    for nbytes in (12e6, 50e6, 100e6):
        assert 1.2 <= costs.seconds(nbytes) / load_seconds(nbytes) <= 1.6


@pytest.mark.parametrize("seconds", [0.2, 1.0, 2.05, 9.0])
def test_two_loads_in_a_row_show_that_a_storage_has_changed(seconds: float) -> None:
    """Or the fit would lay what they took longer to the rounds of later loads."""
    costs = LoadCosts()
    for _ in range(32):
        costs.learn(97e6, 0.58)
    for _ in range(2):
        costs.learn(97e6, seconds)
    costs.learn(97e6, seconds, 3.1)
    assert costs.seconds(97e6) == pytest.approx(seconds, rel=0.1)
    assert costs.seconds(97e6, 31) == pytest.approx(seconds, rel=0.2)


def test_one_late_load_changes_little_and_four_say_that_a_storage_is_slow() -> None:
    costs = LoadCosts()
    for _ in range(32):
        costs.learn(50e6, load_seconds(50e6))
    usual = costs.seconds(50e6)
    costs.learn(50e6, 25.0)
    assert costs.seconds(50e6) == pytest.approx(usual, rel=0.1)
    for _ in range(3):
        costs.learn(50e6, 25.0)
    assert costs.seconds(50e6) == pytest.approx(25.0, rel=0.1)


def test_a_storage_that_becomes_fast_again_is_believed_after_as_many_loads() -> None:
    costs = LoadCosts()
    for _ in range(32):
        costs.learn(50e6, 25.0)
    for _ in range(14):
        costs.learn(50e6, load_seconds(50e6))
    assert costs.seconds(50e6) == pytest.approx(load_seconds(50e6), rel=0.2)


def test_a_storage_that_answers_late_is_told_from_one_that_is_slow() -> None:
    """Once loads of one size were read in several rounds, which take longer where answers do."""
    late, slow = LoadCosts(), LoadCosts()
    for rounds in (1, 1, 4, 4):
        late.learn(80e6, 0.1 * rounds, rounds)
        slow.learn(80e6, 0.8, rounds)
    assert late.seconds(80e6) == pytest.approx(0.1, rel=0.1)
    assert slow.seconds(10e6) == pytest.approx(0.1, rel=0.1)
    # So many chunks are there in time; at least one is read.
    assert late.at_once(10e6, 0, 0.2, 8) == 8
    assert slow.at_once(10e6, 0, 0.25, 8) == 2
    assert slow.at_once(10e6, 10e6, 0.25, 8) == 1
    assert slow.at_once(10e6, 0, 0.05, 8) == 1


def test_while_loads_are_of_one_size_their_bytes_count() -> None:
    costs = LoadCosts()
    for _ in range(8):
        costs.learn(50e6, 1.0)
    assert costs.seconds(50e6) == pytest.approx(1.0, rel=0.01)
    assert costs.seconds(5e6) == pytest.approx(0.1, rel=0.05)


def test_one_time_says_what_up_to_four_times_as_much_work_takes() -> None:
    prefill, load = PrefillCosts(2048), LoadCosts()
    assert not load.knows(1)
    prefill.learn([(0, 100)], 0, 0.05)
    load.learn(10e6, 0.5)
    assert [prefill.knows(tokens) for tokens in (400, 401)] == [True, False]
    assert [load.knows(nbytes) for nbytes in (40e6, 41e6)] == [True, False]
    # What is far larger is no surprise.
    load.learn(100e6, 0.6)
    assert load.seconds(100e6) == pytest.approx(0.6, rel=0.05)


def test_a_storage_that_has_become_fast_is_known_after_two_loads() -> None:
    costs = LoadCosts()
    for _ in range(16):
        costs.learn(12e6, 2.4)
        costs.learn(100e6, 20.0)
    # Small reads, far faster than any before: the first of them alone could be an accident.
    costs.learn(3e6, 0.010)
    assert costs.seconds(100e6) == pytest.approx(20.0, rel=0.1)
    costs.learn(3e6, 0.013)
    assert costs.seconds(100e6) < 0.6


def test_an_accident_behind_a_small_one_changes_nothing() -> None:
    costs = LoadCosts()
    for _ in range(9):
        costs.learn(12e6, 0.02)
    costs.learn(12e6, 0.04)
    costs.learn(12e6, 6.0)
    assert costs.seconds(12e6) < 0.1
