"""The simulation of stored states counts what can be counted by hand."""

from __future__ import annotations

import pytest

from benchmarks import state_policy
from benchmarks.state_policy import Prompt, Rule, Setting, simulate

BLOCK = state_policy.TRACE_BLOCK


def prompt(arrival: float, ids: list[int], extra: int = 1) -> Prompt:
    """A prompt of whole trace blocks, and `extra` tokens of a block that no other prompt has."""
    return Prompt(arrival, len(ids) * BLOCK + extra, 1, [*ids, -len(ids) - int(arrival)])


@pytest.fixture
def siblings() -> list[Prompt]:
    """Three prompts, far apart in time, that share 17 of their 20 blocks."""
    return [
        prompt(100.0 * number, [*range(17), *(1000 * number + i for i in range(17, 20))])
        for number in range(1, 4)
    ]


ONE = Setting(chunk=BLOCK, budget=16 * BLOCK, engines=1)


def test_steps_end_at_multiples_of_the_budget_and_at_the_last_full_chunk() -> None:
    """20 chunks and a token: states after 16 and after 20 chunks, and no other."""
    outcome = simulate([prompt(0.0, list(range(20)))], ONE, Rule(1))
    assert (outcome.states, outcome.hits, outcome.tokens) == (2, 0, 20 * BLOCK + 1)


def test_a_prompt_of_whole_chunks_ends_a_step_one_chunk_earlier() -> None:
    """A hit leaves one token to compute, so the state that serves a repeat is one chunk earlier."""
    again = [prompt(0.0, list(range(4)), 0), prompt(100.0, list(range(4)), 0)]
    assert simulate(again, ONE, Rule()).hits == 3 * BLOCK


def test_states_at_step_ends_serve_siblings_from_the_second_on(siblings: list[Prompt]) -> None:
    outcome = simulate(siblings, ONE, Rule(1))
    # The third finds the state of the junction, where the second stopped.
    assert outcome.hits == (16 + 17) * BLOCK


def test_without_an_interval_the_second_sibling_finds_nothing(siblings: list[Prompt]) -> None:
    rule = Rule(junctions=False, shared=False)
    assert simulate(siblings[:2], ONE, rule).hits == 0
    assert simulate(siblings, ONE, Rule(shared=False)).hits == 17 * BLOCK


def test_engines_without_a_common_cache_share_what_the_shelf_saw_twice(
    siblings: list[Prompt],
) -> None:
    """No engine sees two of the prompts, so none has a junction."""
    three = Setting(chunk=BLOCK, budget=16 * BLOCK, engines=3)
    assert simulate(siblings, three, Rule(shared=False)).hits == 0
    assert simulate(siblings, three, Rule()).hits == 16 * BLOCK


def test_the_interval_counts_from_the_last_stored_state() -> None:
    small = Setting(chunk=BLOCK, budget=2 * BLOCK, engines=1)
    prompts = [prompt(0.0, list(range(13)))]
    assert simulate(prompts, small, Rule(1)).states == 7  # 2, 4, …, 12 and 13
    assert simulate(prompts, small, Rule(5)).states == 3  # 6, 12 and 13
    assert simulate(prompts, small, Rule()).states == 1


def test_a_state_after_each_chunk_is_the_most_there_can_be(siblings: list[Prompt]) -> None:
    outcome = simulate(siblings, ONE, Rule(dense=True))
    assert outcome.states == 17 + 3 * 3
    assert outcome.hits == 2 * 17 * BLOCK
