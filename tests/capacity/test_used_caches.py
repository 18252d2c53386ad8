"""What programs retrieve through ChunkCache is recorded as used, and their shelf is bounded."""

from __future__ import annotations

import threading
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf import ChunkCache, Shelf, empty_tuples
from kvshelf.capacity import budget
from kvshelf.capacity.uses import Uses
from kvshelf.config import Config
from kvshelf.format.names import parse_path
from kvshelf.metrics import Counters
from tests.sim.storage import FaultyStorage, posix
from tests.support.waiting import PATIENCE, until
from tests.test_cache_kinds import CHUNK, TOKENS, facts, fill, random_kv


@pytest.fixture
def uses() -> Iterator[Uses]:
    with closing(Uses(Counters())) as uses:
        yield uses


@pytest.fixture
def cache(tmp_path: Path, uses: Uses) -> Iterator[ChunkCache]:
    namespace = facts().namespace(chunk_size=CHUNK, shards=4)
    shelf = Shelf(FaultyStorage(posix(tmp_path)))
    with ChunkCache(shelf, namespace, memory_bytes=1 << 20, timeout_s=PATIENCE, uses=uses) as cache:
        fill(cache, full=5, windows=5, states=(2, 5))
        yield cache
    assert not uses.closed, "who opened it closes it"


def used(cache: ChunkCache, uses: Uses) -> dict[str, set[int]]:
    """The chunks of each kind of which all objects were touched, and nothing else was."""
    assert uses.flush(PATIENCE)
    touches = cache.shelf.backend.inner
    assert isinstance(touches, FaultyStorage)
    found: dict[tuple[str, int], set[int]] = defaultdict(set)
    for name in touches.touches:
        parsed = parse_path(name)
        assert parsed is not None
        found[parsed.kind, parsed.index].add(parsed.shard)
    kinds: dict[str, set[int]] = defaultdict(set)
    for (kind, index), shards in found.items():
        assert len(shards) == cache.fmt.of(kind).shards  # type: ignore[arg-type]
        kinds[kind].add(index)
    return dict(kinds)


def retrieve(cache: ChunkCache, kind: Any, tokens: list[int], first: int = 0) -> None:
    of_kind = cache.of(kind)
    mask = torch.arange(len(tokens)) >= first * CHUNK
    kv = empty_tuples(of_kind.fmt, len(tokens))
    assert torch.equal(of_kind.retrieve(tokens, mask, kv=kv), mask)


def test_of_windows_and_states_only_those_that_are_retrieved_are_used(
    cache: ChunkCache, uses: Uses
) -> None:
    retrieve(cache, "window", TOKENS, 3)
    assert used(cache, uses) == {"window": {3, 4}}
    assert cache.retrieve_state(TOKENS[: 2 * CHUNK]) is not None
    assert used(cache, uses) == {"window": {3, 4}, "state": {1}}


def test_questions_are_no_use(cache: ChunkCache, uses: Uses) -> None:
    assert cache.lookup(TOKENS) == len(TOKENS) == cache.prefetch(TOKENS)
    assert cache.find_hit(TOKENS) == 2 * CHUNK
    cache.store(TOKENS, kv=random_kv(cache))
    assert used(cache, uses) == {}


def recorders() -> int:
    return sum(thread.name == "kvshelf-uses" for thread in threading.enumerate())


def test_caches_of_all_kinds_record_on_one_thread(tmp_path: Path) -> None:
    namespace = facts().namespace(chunk_size=CHUNK, shards=4)
    with ChunkCache(Shelf(posix(tmp_path)), namespace, memory_bytes=1 << 20) as cache:
        fill(cache, full=5, windows=5, states=())
        for kind in ("full", "window"):
            retrieve(cache, kind, TOKENS)
        assert recorders() == 1
        cache.of("window").close()
        until(lambda: not recorders())


def test_cache_that_is_opened_records_uses(tmp_path: Path) -> None:
    config = Config(shared_storage_path=str(tmp_path), chunk_size=CHUNK)
    with ChunkCache.open(config, facts()) as cache:
        fill(cache, full=5, windows=0, states=())
        retrieve(cache, "full", TOKENS)
    assert cache.counters.snapshot()["touched_objects"] == 10
    until(lambda: not recorders())


def test_storage_without_free_space_gets_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(budget, "least_free", lambda _: 1 << 50)
    config = Config(shared_storage_path=str(tmp_path), chunk_size=CHUNK)
    with ChunkCache.open(config, facts()) as cache:
        until(lambda: not cache.shelf.backend.allows(1))
        report = cache.store(TOKENS, kv=random_kv(cache))
        assert report.published == 0
        assert report.dropped == report.chunks == len(TOKENS) // CHUNK
        assert cache.counters.snapshot()["dropped_chunks_no_room"] == 1
    assert not list(tmp_path.rglob("*.safetensors"))
