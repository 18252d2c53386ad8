"""Stores and loads of a paged cache on a device that is made of loops."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf.errors import DeviceUnavailableError, UnsupportedError
from kvshelf.format.keys import KeyChain
from kvshelf.kv.caches import LayerRun, layer_calls
from kvshelf.kv.device import DeviceKVCache
from kvshelf.kv.layout import PermutedLayout, permutation_bytes, slots_of
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.stores import StoreOutcome
from tests.native.emulation import emulation
from tests.native.fake_streams import FakeEvent, FakeStreams
from tests.native.simulated_device import SimulatedStreams
from tests.sim.storage import LendingMemory, posix
from tests.support.formats import BLOCK, HEAD_SIZE, HEADS, LAYERS, make_format
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until

pytestmark = pytest.mark.real


@contextmanager
def on_device(folder: Path, streams: FakeStreams, **options: Any) -> Iterator[Rig]:
    with emulation().in_use():
        rig = Rig(posix(folder), streams=streams, options={"load_threads": 1}, **options)
        with closing(rig):
            try:
                yield rig
            finally:
                streams.ended.set()


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
    with on_device(folders["device"], FakeStreams(), fmt=fmt, native=native) as rig:
        rig.put(chunks)
        assert emulation().launches
        assert [rig.path(*name).read_bytes() for name in names] == stored
    with on_device(folders["host"], FakeStreams(), fmt=fmt, native=native) as rig:
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
    caches: list[torch.Tensor] = []
    stored = []
    for folder in ("host", "device"):
        on_host = closing(Rig(posix(tmp_path / folder), fmt, native=False))
        with (
            on_host
            if folder == "host"
            else on_device(tmp_path / folder, FakeStreams(), fmt=fmt, native=False)
        ) as rig:
            for layer, cache in enumerate(rig.caches):
                cache.copy_(torch.arange(layer, layer + cache.numel()).view(cache.shape))
            assert rig.store(there) == StoreOutcome.QUEUED
            assert rig.transfer.drain(PATIENCE) == 0
            caches = [cache.clone() for cache in rig.caches]
            stored.append([rig.path(tail, shard).read_bytes() for shard in range(shards)])
    assert stored[0] == stored[1]
    with on_device(tmp_path / "host", FakeStreams(), fmt=fmt, native=False) as rig:
        rig.start("r", [here])
        assert rig.finished().failed_at is None
        for cache, old in zip(rig.caches, caches, strict=True):
            expected = torch.zeros_like(cache)
            for block, tokens in ((0, BLOCK), (5, 2)):
                expected[20 + block, :, :tokens] = old[3 + block, :, :tokens]
            assert torch.equal(cache, expected)


@pytest.mark.parametrize("seed", range(4))
def test_what_is_lent_is_given_back_after_the_device_has_read_it(tmp_path: Path, seed: int) -> None:
    # Memory that is given back is spoiled at once.
    storage = posix(tmp_path)
    lending = LendingMemory(storage)
    chunks = make_chunks(make_format(), 6)
    with closing(Rig(posix(tmp_path))) as host:
        host.put(chunks)
    streams = SimulatedStreams(seed, engine_at_once=True, rate=1e8)
    with (
        closing(streams),
        closing(
            Rig(storage, memory=lending, streams=streams, blocks=100, options={"load_threads": 2})
        ) as rig,
    ):
        load, items = rig.load(chunks, 30)
        assert load.failed_at is None
        assert all(rig.holds(item) for item in items)
        until(lambda: all(loan.released for loan in lending.loans))
        assert [loan.released for loan in lending.loans] == [1] * 6 * rig.fmt.shards
    assert not streams.problems


def test_nothing_is_published_before_it_has_arrived(tmp_path: Path) -> None:
    streams = FakeStreams()
    with on_device(tmp_path, streams) as rig:
        (item,) = rig.items(make_chunks(rig.fmt, 1), 0)
        rig.fill(item)
        streams.ended.clear()
        assert rig.store(item) == StoreOutcome.QUEUED
        assert rig.transfer.drain(0.1) == 1
        assert not rig.path(item.chunk, 0).exists()
        streams.ended.set()
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.path(item.chunk, 0).exists()


def test_stores_are_dropped_while_the_device_has_no_buffer(tmp_path: Path) -> None:
    streams = FakeStreams()
    with on_device(tmp_path, streams, ring=2) as rig:
        items = rig.items(make_chunks(rig.fmt, 4), 0)
        streams.ended.clear()
        answers = [rig.store(item) for item in items]
        assert answers == [
            StoreOutcome.QUEUED,
            StoreOutcome.QUEUED,
            StoreOutcome.STAGING_FULL,
            StoreOutcome.PARENT_DROPPED,
        ]
        assert rig.count("dropped_chunks_staging_full") == 1
        assert rig.chunks_in_use == 2
        streams.ended.set()
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.chunks_in_use == 0
        assert rig.store(items[2]) == StoreOutcome.QUEUED


def test_what_a_failed_device_copied_is_not_published(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: FakeEvent) -> None:
        raise RuntimeError("CUDA error: unspecified launch failure")

    streams = FakeStreams()
    with on_device(tmp_path, streams) as rig:
        (item,) = rig.items(make_chunks(rig.fmt, 1), 0)
        streams.ended.clear()
        monkeypatch.setattr(FakeEvent, "synchronize", fail)
        assert rig.store(item) == StoreOutcome.QUEUED
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.count("dropped_chunks_unavailable") == 1
        assert rig.chunks_in_use == 0
        assert not rig.path(item.chunk, 0).exists()


def test_a_load_comes_after_what_the_engine_had_enqueued_when_it_began(tmp_path: Path) -> None:
    streams = FakeStreams()
    with on_device(tmp_path, streams) as rig:
        chunks = make_chunks(rig.fmt, 1)
        rig.put(chunks)
        streams.log.clear()
        load, _ = rig.load(chunks, 20)
        assert load.failed_at is None
        (kind, fence, stream), *rest = streams.log
        assert (kind, stream) == ("record", streams.engine)
        waits = [entry for entry in rest if entry[0] == "wait"]
        kernels = {stream for _, stream, _ in waits}
        assert {stream for _, stream, what in waits if what is fence} == kernels
        assert {stream.name for stream in kernels} == {"urgent"}  # type: ignore[attr-defined]


def test_memory_is_not_given_back_while_a_device_copies_into_it(tmp_path: Path) -> None:
    streams = FakeStreams()
    with on_device(tmp_path, streams) as rig:
        items = rig.items(make_chunks(rig.fmt, 3), 0)
        streams.ended.clear()
        for item in items:
            assert rig.store(item) == StoreOutcome.QUEUED
        closing_ = threading.Thread(target=rig.transfer.close)
        closing_.start()
        closing_.join(0.2)
        assert closing_.is_alive()
        assert rig.chunks_in_use == 3
        streams.ended.set()
        closing_.join(PATIENCE)
        assert not closing_.is_alive()
        until(lambda: rig.chunks_in_use == 0)


def test_permuted_caches_on_a_device_are_refused() -> None:
    fmt = make_format(native=False)
    caches = [torch.zeros(4, HEADS, BLOCK, 2 * HEAD_SIZE, dtype=torch.int16) for _ in range(LAYERS)]
    positions = torch.arange(2 * BLOCK * HEAD_SIZE).view(2, BLOCK, HEAD_SIZE).flip(1)
    layout = PermutedLayout(
        block_size=BLOCK,
        block_stride=caches[0].stride(0) * 2,
        head_stride=caches[0].stride(1) * 2,
        kv_planes=2,
        heads=HEADS,
        head_size=HEAD_SIZE,
        item_bytes=2,
        num_blocks=4,
        permutation=permutation_bytes(positions),
    )
    with pytest.raises(UnsupportedError, match="permuted inside their blocks"):
        DeviceKVCache(layer_calls(fmt, [LayerRun(0, caches, layout)]), streams=FakeStreams())


def test_what_is_read_ahead_asks_nothing_of_the_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with on_device(tmp_path, FakeStreams()) as rig:
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
