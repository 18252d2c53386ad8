"""The rule of admission on simulated engines and storages keeps what the documentation promises."""

from __future__ import annotations

import statistics
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from benchmarks import simulated
from benchmarks.plots import DATA
from benchmarks.simulated import ENGINES, PUBLISHED, STORAGES, Storage, first_tokens, stored_tokens
from benchmarks.stepped import ALWAYS, AUTO, COMPUTED
from kvshelf.admission import MOST_DELAY

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


def row(tokens: int, rate: float | None, requests: int = 1) -> dict[str, Any]:
    """A row of the benchmark, of an engine with the rates of ENGINE."""
    storage, stored = Storage("", 0.0, rate or 1e12), stored_tokens(tokens)
    means, each = {}, {}
    for policy in (COMPUTED, ALWAYS):
        found = first_tokens(ENGINE, storage, [(tokens, stored)] * requests, policy)
        means[policy], each[policy] = [statistics.fmean(found)] * 3, found * 3
    extra = {
        "rate": rate,
        "tokens": tokens,
        "stored_tokens": stored,
        "token_bytes": ENGINE.token_bytes,
        "means": means,
        "requests": each,
    }
    return {"work": f"{tokens} tokens", "extra": extra}


def test_what_was_measured_is_simulated_beside_it() -> None:
    rows = [row(2048, None), row(16384, 1e9), row(2048, 1e9, 16), row(16384, 4e9)]
    engine = simulated.fitted(rows)
    assert engine.linear == pytest.approx(ENGINE.linear)
    assert engine.attention == pytest.approx(ENGINE.attention)
    points = simulated.met(rows)
    assert [point.work for point in points] == ["16384 tokens", "2048 tokens", "16384 tokens"]
    for point in points:
        assert point.simulated == pytest.approx(point.measured)
