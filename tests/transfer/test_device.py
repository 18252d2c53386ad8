"""Stores and loads of a paged cache on a simulated device."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.errors import DeviceUnavailableError
from kvshelf.format.keys import KeyChain
from kvshelf.kv import caches, copier, device
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import slots_of
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.stores import StoreOutcome
from tests.native.emulation import emulated
from tests.sim.device import SimulatedStreams
from tests.sim.storage import LendingMemory, posix
from tests.support.formats import BLOCK, make_format
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real


@contextmanager
def on_device(folder: Path, seed: int = 0, **options: Any) -> Iterator[Rig]:
    streams = SimulatedStreams(seed, engine_at_once=True)
    options = {"options": {"load_threads": 1}} | options
    with emulated(), closing(streams), closing(Rig(posix(folder), streams=streams, **options)) as r:
        yield r


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
def test_host_and_device_share_a_shelf(tmp_path: Path, native: bool, shards: int) -> None:
    fmt = make_format(native=native, shards=shards)
    chunks = make_chunks(fmt, 4)
    folders = {"host": tmp_path / "host", "device": tmp_path / "device"}
    with closing(Rig(posix(folders["host"]), fmt, native)) as rig:
        rig.put(chunks)
        names = [(chunk, shard) for chunk in chunks for shard in range(shards)]
        stored = [rig.path(*name).read_bytes() for name in names]
    with on_device(folders["device"], fmt=fmt, native=native) as rig:
        rig.put(chunks)
        assert [rig.path(*name).read_bytes() for name in names] == stored
    with on_device(folders["host"], fmt=fmt, native=native) as rig:
        load, items = rig.load(chunks, 20)
        assert load.failed_at is None
        assert all(rig.holds(item) for item in items)
        assert rig.untouched(rig.items(chunks[:1], 40)[0])


@pytest.mark.parametrize("shards", [1, 2])
def test_host_and_device_share_the_tail_of_a_prompt(tmp_path: Path, shards: int) -> None:
    fmt = make_format(native=False, shards=shards)
    chain = KeyChain(fmt.namespace.digest, fmt.chunk_size)
    chain.extend(range(fmt.chunk_size + 6))
    tail = chain.tail()
    assert tail is not None
    there, here = (ChunkSlots(tail, slots_of([block, block + 5], BLOCK, 0, 6)) for block in (3, 20))
    held: list[torch.Tensor] = []
    stored = []
    for folder in ("host", "device"):
        on_host = closing(Rig(posix(tmp_path / folder), fmt, native=False))
        with (
            on_host if folder == "host" else on_device(tmp_path / folder, fmt=fmt, native=False)
        ) as rig:
            for layer, cache in enumerate(rig.caches):
                cache.copy_(torch.arange(layer, layer + cache.numel()).view(cache.shape))
            assert rig.store(there) == StoreOutcome.QUEUED
            assert rig.transfer.drain(PATIENCE) == 0
            held = [cache.clone() for cache in rig.caches]
            stored.append([rig.path(tail, shard).read_bytes() for shard in range(shards)])
    assert stored[0] == stored[1]
    with on_device(tmp_path / "host", fmt=fmt, native=False) as rig:
        rig.start("r", [here])
        assert rig.finished().failed_at is None
        for cache, old in zip(rig.caches, held, strict=True):
            expected = torch.zeros_like(cache)
            for block, tokens in ((0, BLOCK), (5, 2)):
                expected[20 + block, :, :tokens] = old[3 + block, :, :tokens]
            assert torch.equal(cache, expected)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lent_is_given_back_after_the_device_has_read_it(tmp_path: Path, seed: int) -> None:
    # Memory that is given back is spoiled at once.
    lending = LendingMemory(posix(tmp_path))
    chunks = make_chunks(make_format(), 6)
    with closing(Rig(posix(tmp_path))) as host:
        host.put(chunks)
    options = {"blocks": 100, "options": {"load_threads": 2}}
    with on_device(tmp_path, seed, memory=lending, **options) as rig:
        load, items = rig.load(chunks, 30)
        assert load.failed_at is None
        assert all(rig.holds(item) for item in items)
        until(lambda: all(loan.released for loan in lending.loans))
        assert {loan.released for loan in lending.loans} == {1}
        assert len(lending.loans) >= 6 * rig.fmt.shards


def streams_of(rig: Rig) -> SimulatedStreams:
    assert isinstance(rig.streams, SimulatedStreams)
    return rig.streams


def test_nothing_is_published_before_it_has_arrived(tmp_path: Path) -> None:
    with on_device(tmp_path) as rig:
        (item,) = rig.items(make_chunks(rig.fmt, 1), 0)
        rig.fill(item)
        with streams_of(rig).hold():
            assert rig.store(item) == StoreOutcome.QUEUED
            assert rig.transfer.drain(0.1) == 1
            assert not rig.path(item.chunk, 0).exists()
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.path(item.chunk, 0).exists()


def test_store_without_a_free_buffer_is_refused(tmp_path: Path) -> None:
    with on_device(tmp_path, buffer_bytes=1) as rig:
        items = rig.items(make_chunks(rig.fmt, 3), 0)
        assert rig.stores.room == 1
        with streams_of(rig).hold():
            answers = [rig.store(item) for item in items]
            assert answers == [
                StoreOutcome.QUEUED,
                StoreOutcome.STAGING_FULL,
                StoreOutcome.PARENT_DROPPED,
            ]
            assert rig.count("dropped_chunks_staging_full") == 1
            assert rig.chunks_in_use == 1
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.chunks_in_use == 0
        assert rig.store(items[1]) == StoreOutcome.QUEUED


def test_what_a_failed_device_copied_is_not_published(tmp_path: Path) -> None:
    with on_device(tmp_path) as rig:
        (item,) = rig.items(make_chunks(rig.fmt, 1), 0)
        with streams_of(rig).hold():
            assert rig.store(item) == StoreOutcome.QUEUED
            streams_of(rig).fail()
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.count("dropped_chunks_unavailable") == 1
        assert rig.chunks_in_use == 0
        assert not rig.path(item.chunk, 0).exists()


def test_memory_of_a_device_that_hangs_is_given_to_nobody_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (caches, copier):
        monkeypatch.setattr(module, "ANSWER_SECONDS", 0.1)
    monkeypatch.setattr(device, "_CLOSE_SECONDS", 0.2)
    with on_device(tmp_path) as rig:
        items = rig.items(make_chunks(rig.fmt, 2), 0)
        with streams_of(rig).hold():
            assert rig.store(items[0]) == StoreOutcome.QUEUED
            assert rig.transfer.drain(PATIENCE) == 0
            assert rig.count("stuck_threads") == 1
            assert rig.count("dropped_chunks_unavailable") == 1
            assert rig.chunks_in_use == 1
            # The device counts as failed, and shutdown goes on.
            until(lambda: bool(rig.cache.problem))
            assert rig.store(items[1], age=-1) == StoreOutcome.UNAVAILABLE
            begin = time.monotonic()
            rig.transfer.close(0.0)
            assert time.monotonic() - begin < PATIENCE / 2
            assert rig.chunks_in_use == 1


def test_memory_is_not_given_back_while_a_device_copies_into_it(tmp_path: Path) -> None:
    with on_device(tmp_path) as rig:
        items = rig.items(make_chunks(rig.fmt, 3), 0)
        with streams_of(rig).hold():
            for item in items:
                assert rig.store(item) == StoreOutcome.QUEUED
            closing_ = threading.Thread(target=rig.transfer.close)
            closing_.start()
            closing_.join(0.2)
            assert closing_.is_alive()
            assert rig.chunks_in_use == 3
        closing_.join(PATIENCE)
        assert not closing_.is_alive()
        until(lambda: rig.chunks_in_use == 0)


def test_what_is_read_ahead_asks_nothing_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device(tmp_path) as rig:
        chunks = make_chunks(rig.fmt, 2)
        rig.put(chunks)

        def broken(_: object) -> object:
            raise DeviceUnavailableError("the device failed")

        monkeypatch.setattr(DeviceKVCache, "fence", broken)
        none, ended = torch.empty(0, dtype=torch.int64), threading.Event()
        items = [ChunkSlots(chunk, none) for chunk in chunks]
        load = rig.read(items, early=True, on_done=lambda _: ended.set())
        assert ended.wait(PATIENCE)
        assert (load.failed_at, rig.context.places.leading(chunks)) == (None, 2)
        assert rig.load(chunks, 20)[0].failed_at == 0


def test_load_that_is_given_a_fence_records_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device(tmp_path) as rig:
        chunks, kind = make_chunks(rig.fmt, 1), rig.fmt.kind
        rig.put(chunks)
        fence, items = rig.cache.fence(), rig.items(chunks, 20)
        monkeypatch.setattr(DeviceKVCache, "fence", None)
        rig.transfer.load("r", {kind: rig.view}, {kind: items}, fences={kind: fence})
        assert rig.finished().failed_at is None
        assert rig.holds(items[0])
