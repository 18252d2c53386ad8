"""Programs whose shelf is bounded: ``ChunkCache`` keeps it so."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from kvshelf import ChunkCache, Config
from kvshelf.capacity import keeper
from tests.support.prompts import prompt
from tests.support.waiting import until
from tests.test_cache import CHUNK, facts, put, truth

TOKENS = prompt(12 * CHUNK)


def opened(tmp_path: Path, **capacity: Any) -> ChunkCache:
    shelf = {"shared_storage_path": str(tmp_path / "shelf"), "chunk_size": CHUNK}
    return ChunkCache.open(Config(**shelf, capacity=capacity), facts())


def objects(tmp_path: Path) -> list[Path]:
    return list((tmp_path / "shelf").rglob("*.safetensors"))


def test_a_storage_without_space_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keeper, "least_free", lambda _: 1 << 50)
    with opened(tmp_path) as cache:
        until(lambda: not cache.shelf.backend.allows(1))
        report = cache.store(TOKENS, kv=truth(TOKENS))
        assert report.published == 0
        assert report.dropped == report.chunks == len(TOKENS) // CHUNK
        assert cache.counters.snapshot()["dropped_chunks_no_room"] == 1
    assert not objects(tmp_path)


def test_small_bound_is_used(tmp_path: Path) -> None:
    """What has no room waits for the next visit: prompts of twelve chunks, a bound of eighty."""
    with opened(tmp_path) as cache:
        put(cache, TOKENS[:CHUNK])
    nbytes = sum(path.stat().st_size for path in objects(tmp_path))
    with opened(tmp_path, max_bytes=80 * nbytes) as cache:
        for number in range(12):
            tokens = prompt(12 * CHUNK, seed=number)
            report = cache.store(tokens, kv=truth(tokens))
            assert report.published + report.existed == report.chunks == 12
            held = sum(path.stat().st_size for path in objects(tmp_path))
            assert min(0.85 * 80, 12 * number) * nbytes <= held <= 80 * nbytes
        assert "dropped_chunks_no_room" not in cache.counters.snapshot()
