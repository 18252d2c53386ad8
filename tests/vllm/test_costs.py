"""What computing and loading cost is learned from times that are as uneven as real ones."""

from __future__ import annotations

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.vllm.scheduler.costs import Fit, LoadCosts, PrefillCosts

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


def test_engine_that_becomes_slower_is_followed() -> None:
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


def taught_loads(chance: random.Random, latency: float, rate: float) -> LoadCosts:
    costs = LoadCosts()
    for number in range(64):
        nbytes = 4e6 * 2 ** (number * 7 % 10)
        costs.learn(nbytes, (latency + nbytes / rate) * chance.uniform(0.8, 1.2))
    return costs


@pytest.mark.parametrize(("latency", "rate"), [(0.15, 11.5e9), (5e-4, 7e9), (0.0, 50e6)])
def test_loads_of_many_sizes_say_what_each_takes(latency: float, rate: float) -> None:
    costs = taught_loads(random.Random(4), latency, rate)
    for nbytes in (67e6, 1e9, 8e9):
        assert costs.seconds(nbytes) == pytest.approx(latency + nbytes / rate, rel=0.25)


def test_one_late_load_changes_little_and_five_say_that_a_storage_is_slow() -> None:
    costs = LoadCosts()
    for _ in range(8):
        costs.learn(50e6, 1.0)
    costs.learn(50e6, 30.0)
    assert costs.seconds(50e6) < 2.05
    for _ in range(4):
        costs.learn(50e6, 30.0)
    assert costs.seconds(50e6) > 15


def test_storage_that_has_become_fast_is_believed_at_once() -> None:
    costs = LoadCosts()
    for _ in range(16):
        costs.learn(12e6, 2.4)
        costs.learn(100e6, 20.0)
    costs.learn(12e6, 0.010)
    assert costs.seconds(100e6) < 0.5


def test_storage_that_answers_late_is_told_from_one_that_is_slow() -> None:
    chance = random.Random(5)
    late, slow = taught_loads(chance, 0.1, 1e10), taught_loads(chance, 0.0, 80e6)
    # So many chunks are there in time; at least one is read.
    assert late.at_once(10e6, 0, 0.2, 8) == 8
    assert slow.at_once(10e6, 0, 0.32, 8) == 2
    assert slow.at_once(10e6, 10e6, 0.32, 8) == 1
    assert slow.at_once(10e6, 0, 0.05, 8) == 1


def test_while_loads_are_of_one_size_their_bytes_count() -> None:
    costs = LoadCosts()
    for _ in range(8):
        costs.learn(50e6, 1.0)
    assert costs.seconds(50e6) == pytest.approx(1.0)
    assert costs.seconds(5e6) == pytest.approx(0.19)


def test_one_time_says_what_up_to_four_times_as_much_work_takes() -> None:
    prefill, load = PrefillCosts(2048), LoadCosts()
    assert not load.knows(1)
    prefill.learn([(0, 100)], 0, 0.05)
    load.learn(10e6, 0.5)
    assert [prefill.knows(tokens) for tokens in (400, 401)] == [True, False]
    assert [load.knows(nbytes) for nbytes in (40e6, 41e6)] == [True, False]


def test_step_in_less_than_half_of_its_time_shortens_all_that_was_learned() -> None:
    costs = PrefillCosts(2048)
    for _ in range(20):
        costs.learn([(0, 2048)], 0, 2.0)
    assert costs.is_certain(2048)
    costs.learn([(0, 2048)], 0, 0.2)
    assert costs.seconds(0, 2048) == pytest.approx(0.2, rel=0.05)
    assert (costs.speedups, costs.is_certain(2048)) == (1, False)


@pytest.mark.parametrize(
    ("tokens", "began_slowly", "learned"),
    [(511, True, False), (512, True, True), (511, False, True)],
)
def test_slow_step_is_learned_unless_it_is_small_and_follows_a_pause(
    tokens: int, began_slowly: bool, learned: bool
) -> None:
    costs = PrefillCosts(2048)
    costs.learn([(0, 2048)], 0, 1.0)
    before = costs.seconds(0, tokens)
    costs.learn([(0, tokens)], 0, 9.0, began_slowly=began_slowly)
    assert (costs.seconds(0, tokens) > before) is learned
