"""Caches of unknown layout that are the same on all ranks: sparse MLA. Simulated engines."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvshelf.errors import ConfigError
from kvshelf.format.namespace import Namespace
from tests.support.prompts import prompt
from tests.vllm.simulated import SimulatedEngine, engines_on
from tests.vllm.test_blocks_and_chunks import check_load

pytestmark = pytest.mark.usefixtures("one_thread")

Start = Callable[..., SimulatedEngine]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Start engines with MLA of unknown layout on one shelf; they are closed at the end."""
    options: dict[str, Any] = {"latent": True, "chunk_size": 32, "blocks": 48, "heads": (1, 1)}
    with engines_on(tmp_path / "shelf", **options) as start:
        yield lambda ranks, **options: start("odd", tensor_parallel=ranks, **options)


def test_the_record_says_that_ranks_hold_the_same(
    start: Start, caplog: pytest.LogCaptureFixture
) -> None:
    record = Namespace.from_bytes(start(4).namespace).record
    assert all(layout.startswith("replicated-") for layout in record["layouts"])
    assert record["attention"] == ["mla", "mla"]
    assert (record["shards"], record["kv_heads"]) == (1, 1)
    assert "exactly like this one, with any number of tensor-parallel ranks," in caplog.text
    # Where vLLM does not say so, each rank writes a copy of its own.
    alone = Namespace.from_bytes(start(4, latent=False).namespace).record
    assert all(layout.startswith("opaque-") for layout in alone["layouts"])
    assert alone["shards"] == 4


def test_replicas_of_prefill_context_parallelism_take_turns_too(start: Start) -> None:
    tokens = prompt(200)
    writer = start(2, prefill_context=2)
    writer.prefill(tokens)
    stored = [rank.worker.counters.take().get("stored_chunks", 0) for rank in writer.ranks]
    assert sorted(stored) == [1, 1, 2, 2]
    assert check_load(start(1, seed=1), tokens) == 192


def test_tokens_that_are_spread_over_ranks_are_refused(start: Start) -> None:
    with pytest.raises(ConfigError, match=r"is unknown.*set decode_context_parallel_size to 1"):
        start(2, decode_context=2)
