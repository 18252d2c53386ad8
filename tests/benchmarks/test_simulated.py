"""The rule of admission on simulated engines and storages keeps what the documentation promises."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import simulated
from benchmarks.plots import DATA
from benchmarks.simulated import (
    ENGINES,
    PUBLISHED,
    STORAGES,
    Engine,
    Storage,
    first_tokens,
    stored_tokens,
)
from benchmarks.stepped import ALWAYS, AUTO, COMPUTED
from kvshelf.admission import MOST_DELAY, AdmissionRule, Before, Hit

[ENGINE] = ENGINES
NFS = STORAGES[1]

storages = st.builds(
    Storage,
    name=st.just("any"),
    latency=st.floats(-4, 0).map(lambda power: 10.0**power),
    rate=st.floats(6, 10.5).map(lambda power: 10.0**power),
)


@given(storages, storages, st.integers(1, 64), st.integers(1, 2048))
def test_alone_no_first_token_is_later_than_the_bound(
    learned: Storage, real: Storage, chunks: int, new: int
) -> None:
    """Whatever the storage does, and whatever it did before."""
    prompts = [(256 * chunks + new, 256 * chunks)]
    rule = simulated.taught(ENGINE, learned)
    [found] = first_tokens(ENGINE, real, prompts, AUTO, rule)
    [computed] = first_tokens(ENGINE, real, prompts, COMPUTED)
    assert found <= (1 + MOST_DELAY) * computed + 1e-6


@given(storages, st.integers(1, 512), st.integers(1, 2048))
@example(STORAGES[3], 508, 1024)
@example(Storage("late", 1.0, 1e10), 144, 1)
@example(Storage("late, in rounds", 1.0, 10.0**9.25), 322, 1)
def test_no_steady_load_is_begun_and_then_cut(storage: Storage, chunks: int, new: int) -> None:
    prompts = [(256 * chunks + new, 256 * chunks)]
    [found] = first_tokens(ENGINE, storage, prompts, AUTO)
    [computed] = first_tokens(ENGINE, storage, prompts, COMPUTED)
    assert found <= 1.01 * computed


@pytest.mark.parametrize("storage", STORAGES, ids=lambda storage: storage.name)
def test_many_at_once_are_no_slower_than_the_better_of_both(storage: Storage) -> None:
    prompts = [(16384, stored_tokens(16384))] * 16

    def mean(policy: str) -> float:
        return statistics.fmean(first_tokens(ENGINE, storage, prompts, policy))

    assert mean(AUTO) <= 1.05 * min(mean(COMPUTED), mean(ALWAYS))


#: The small model of the benchmarks: 2,080 tokens take 1.2 s, and a step 10 ms more.
SMALL = Engine("small", 1.2 / 2080, 0.0, 8 << 10)
STEP = 0.01
READ_AT_ONCE = 16


def first_requests(rate: float, *, divisible: bool, computed: Sequence[int]) -> list[float]:
    """What the first requests take, one at a time, of an engine that has only `computed` some."""
    rule, storage, seconds = AdmissionRule(SMALL.step_tokens), Storage("", 1e-3, rate), []
    hit = Hit(0, 2048, 2080, 256, 2048 * SMALL.token_bytes, divisible)

    def compute(start: int, end: int) -> float:
        taken = STEP + SMALL.seconds(start, end)
        if rule.prefill.is_usual(end - start):
            rule.prefill.learn([(start, end)], 0, taken)
        return taken

    for tokens in computed:
        compute(0, tokens)
    for _ in range(18):
        if not rule.admits(hit, Before()):
            seconds.append(compute(0, 2080))
            continue
        patience, at_once = rule.patience(hit, Before()), rule.at_once(hit, Before())
        reads = min(at_once, READ_AT_ONCE)
        end, there = simulated.loaded(simulated.arrivals(storage, hit, reads, 0.0), patience)
        arrived = there + min(reads, hit.chunks - there) / (2 if there else 1)
        rule.storage.learn(hit.nbytes, end * hit.chunks / arrived, hit.chunks / at_once)
        kept = there if divisible or there == hit.chunks else 0
        seconds.append(end + compute(256 * kept, 2080))
    return seconds


@given(
    st.floats(6, 9.5).map(lambda power: 10.0**power),
    st.booleans(),
    st.sampled_from([(), (32,), (300, 300, 300), (2080,)]),
)
@example(2e6, True, ())
@example(2e6, False, (300, 300, 300))
def test_what_a_fresh_engine_does_not_know_costs_little(
    rate: float, divisible: bool, computed: Sequence[int]
) -> None:
    """All its prompts are on the shelf, so that it computes none unless it decides to."""
    first, _, *others = first_requests(rate, divisible=divisible, computed=computed)
    loaded = 1e-3 + 2048 * SMALL.token_bytes / rate + STEP + SMALL.seconds(2048, 2080)
    best = min(loaded, STEP + SMALL.seconds(0, 2080))
    assert first <= best + 1.25
    assert max(others) <= 1.15 * best


def test_long_prompts_are_loaded_from_a_storage_that_is_too_slow_for_short_ones() -> None:
    slow = STORAGES[3]
    for tokens, loads in ((8192, False), (250_000, True)):
        prompts = [(tokens, stored_tokens(tokens))]
        same = first_tokens(ENGINE, slow, prompts, AUTO) == first_tokens(
            ENGINE, slow, prompts, COMPUTED
        )
        assert same is not loads


@pytest.mark.parametrize("tokens", PUBLISHED)
def test_published_times_are_met(tokens: int) -> None:
    assert simulated.published(tokens) == pytest.approx(PUBLISHED[tokens], rel=0.1)


def test_a_table_is_printed(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert simulated.main(["--json", str(tmp_path / "simulated.json")]) == 0
    assert "16 ×  16,384 tokens" in capsys.readouterr().out
    kept = (DATA / "simulated.json").read_text()
    again = "run python -m benchmarks.simulated --json docs/data/simulated.json"
    assert (tmp_path / "simulated.json").read_text() == kept, again
