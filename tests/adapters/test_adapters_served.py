"""The adapters over a node server in a process of its own."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from kvshelf import ChunkCache, Config, PagedKV, Shelf, open_cache
from kvshelf.backends import open_backend
from kvshelf.errors import ConfigError
from kvshelf.kv.layout import slots_of
from tests.adapters.test_adapters import (
    BLOCK,
    BLOCKS,
    CHUNK,
    MODES,
    PER_CHUNK,
    Engine,
    asked,
    caches,
    facts,
    layout_of,
    names,
    namespace,
    op,
)
from tests.server.serve_process import PATIENT, ServeProcess
from tests.support.prompts import prompt
from tests.support.waiting import until

pytestmark = [pytest.mark.real, pytest.mark.slow]


@pytest.fixture
def shelf(tmp_path: Path) -> Path:
    (tmp_path / "shelf").mkdir()
    return tmp_path / "shelf"


@pytest.fixture
def node(tmp_path: Path, shelf: Path) -> Iterator[ServeProcess]:
    socket = tmp_path / "sockets" / "node.sock"
    with ServeProcess(shelf, socket, KVSHELF_CHUNK_SIZE=str(CHUNK), **PATIENT) as node:
        yield node


def connect(node: ServeProcess, seed: int | None = None) -> Engine:
    """An engine whose adapters have a connection each."""
    return Engine(caches(seed), node.url)


def until_connected(engine: Engine) -> None:
    until(
        lambda: not any("not connected" in repr(one) for one in (engine.scheduler, engine.worker))
    )


@pytest.mark.parametrize("mode", MODES)
def test_engines_share_what_they_store(mode: str, node: ServeProcess) -> None:
    with connect(node, 1) as one, connect(node) as other:
        ids = [5, 3, 60, 7, 8, 9, 1, 0]
        one.store("a", op(mode, ids, 2))
        assert other.hit("b", **asked(mode, 3)) == 2 * CHUNK
        assert other.load("b", op(mode, ids, 2)) == set()
        assert torch.equal(other.blocks(ids), one.blocks(ids))
        unused = sorted(set(range(BLOCKS)) - set(ids))
        assert not other.blocks(unused).any()
        until(lambda: node.metrics()["lent_bytes"] > 0)
        other.scheduler.free_lookup_locks(start=0, end=CHUNK, request_id="b")
        rest = op(mode, ids[PER_CHUNK:], 1, first=1)
        assert other.load("c", rest) == set()
        other.scheduler.end_session("b")
        until(lambda: node.metrics()["lent_bytes"] == 0)


def test_tokens_are_on_the_shelf_and_hashes_are_not(node: ServeProcess, shelf: Path) -> None:
    """What is stored by tokens is there for all programs; by hashes, until the server ends."""
    ids = list(range(PER_CHUNK))
    with connect(node, 1) as one:
        one.store("t", op("tokens", ids, 1))
        one.store("h", op("hashes", ids, 1, seed=1))
        truth = one.blocks(ids).clone()
        node.kill()
        node.start()
        until_connected(one)
        assert one.hit("t", **asked("tokens", 1)) == CHUNK
        assert one.hit("h", **asked("hashes", 1, seed=1)) == 0
    files = [path.name for path in shelf.rglob("*") if path.is_file()]
    objects = [name for name in files if name.endswith(".safetensors")]
    assert len(objects) == one.worker.fmt.shards
    assert "namespace.json" in files
    kv = caches()
    with (
        Shelf(open_backend(str(shelf))) as opened,
        ChunkCache(opened, namespace()) as cache,
    ):
        mapping = slots_of(ids, BLOCK, 0, CHUNK)
        found = cache.retrieve(
            prompt(CHUNK), kv=PagedKV([kv[name] for name in names()], layout_of(kv), mapping)
        )
    assert bool(found.all())
    assert torch.equal(torch.stack([kv[name][ids] for name in names()]), truth)


def test_server_that_is_killed_and_comes_back(node: ServeProcess) -> None:
    ids = list(range(PER_CHUNK))
    with connect(node, 1) as engine:
        engine.store("a", op("tokens", ids, 1))
        node.kill()
        # Whether or not the end of the socket was noticed already, nothing waits for the server.
        assert engine.hit("b", **asked("tokens", 1)) == 0
        assert engine.load("b", op("tokens", ids, 1)) == set(ids)
        engine.store("b", op("tokens", ids, 1, seed=1))
        node.start()
        until_connected(engine)
        assert engine.hit("c", **asked("tokens", 1)) == CHUNK
        assert engine.load("c", op("tokens", ids, 1)) == set()
        engine.store("d", op("tokens", ids, 1, seed=2))
        assert engine.hit("d", **asked("tokens", 1, seed=2)) == CHUNK


def test_program_shares_chunks_through_the_server(node: ServeProcess) -> None:
    """What an engine stores, a program retrieves over the same server, and the other way round."""
    ids = list(range(2 * PER_CHUNK))
    mapping = slots_of(ids, BLOCK, 0, 2 * CHUNK)
    config = Config(server=node.url, chunk_size=CHUNK)
    kv = caches()
    with connect(node, 1) as engine, open_cache(config, facts()) as cache:
        engine.store("a", op("tokens", ids, 2))
        paged = PagedKV([kv[name] for name in names()], layout_of(kv), mapping)
        assert cache.lookup(prompt(2 * CHUNK)) == 2 * CHUNK
        assert bool(cache.retrieve(prompt(2 * CHUNK), kv=paged).all())
        assert torch.equal(torch.stack([kv[name][ids] for name in names()]), engine.blocks(ids))
        assert cache.store(prompt(2 * CHUNK, seed=1), kv=paged).complete
        assert engine.hit("b", **asked("tokens", 2, seed=1)) == 2 * CHUNK


def test_cache_needs_a_server() -> None:
    with pytest.raises(ConfigError, match="no node server is configured"):
        open_cache(Config(), facts())
