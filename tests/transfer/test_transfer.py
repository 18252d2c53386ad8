"""Stores and loads between a paged cache and a shelf: right, or not at all; never stuck."""

from __future__ import annotations

import os
import random
import tempfile
import threading
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from kvshelf.backends import open_backend
from kvshelf.backends.breaker import Backoff
from kvshelf.backends.wrappers import ReadOnlyBackend
from kvshelf.errors import (
    ConfigError,
    NoSpaceStorageError,
    ReadOnlyStorageError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.names import parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import DONE, HostKVCache, LayerRun, PendingCopy, layer_calls
from kvshelf.kv.layout import PagedLayout
from kvshelf.metrics import Counters
from kvshelf.shelf import threads as threads_module
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import TieredShelf
from kvshelf.transfer import known_chunks, stores
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure
from kvshelf.transfer.prefetch import KindMemory
from kvshelf.transfer.stores import StoreOutcome
from tests.sim.storage import FAR, Fault, FaultyStorage, LendingMemory, Loan, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.threads import none_can_be_started
from tests.support.transfers import Destination, Rig, content
from tests.support.waiting import PATIENCE, until


@pytest.fixture
def rig(backend: FaultyStorage) -> Iterator[Rig]:
    with closing(Rig(backend)) as rig:
        yield rig


# ------------------------------------------------------------------------- what works


@pytest.mark.parametrize("native", [True, False])
@pytest.mark.parametrize("shards", [1, 2])
@pytest.mark.parametrize("url", ["memory://transfer-{native}-{shards}", "{tmp_path}"])
def test_what_was_stored_comes_back_into_other_blocks(
    tmp_path: Path, native: bool, shards: int, url: str
) -> None:
    fmt = make_format(native=native, shards=shards)
    backend = open_backend(url.format(tmp_path=tmp_path, native=native, shards=shards))
    with closing(Rig(backend, fmt, native)) as rig:
        chunks = make_chunks(fmt, 5)
        rig.put(chunks)
        rig.comes_back(chunks, 20)
        assert rig.untouched(rig.items(chunks[:1], 40)[0])
        assert rig.count("stored_chunks") == rig.count("loaded_chunks") == 5
    with closing(Rig(backend, fmt, native)) as other:
        other.comes_back(chunks, 0)


def test_skipped_slots_stay_as_they_are(rig: Rig) -> None:
    (chunk,) = make_chunks(rig.fmt, 1)
    rig.put([chunk])
    whole = rig.items([chunk], 20)[0]
    half = ChunkSlots(chunk, whole.slots.clone())
    half.slots[0] = -1
    rig.start("r", [half])
    assert rig.finished().failed_at is None
    kept, loaded = rig.block_ids(whole)
    assert not any(cache[kept].any() for cache in rig.caches)
    assert all(cache[loaded].any() for cache in rig.caches)


def test_layers_that_do_not_fit_the_namespace_are_refused() -> None:
    rig = Rig(open_backend("memory://unused"))
    rig.close()
    layout = PagedLayout.native_blocks(rig.caches[0])
    with pytest.raises(ConfigError, match="2 layers are registered"):
        layer_calls(rig.fmt, [LayerRun(0, rig.caches[:2], layout)])


# ------------------------------------------------------------------------- what is stored once


def test_a_chunk_in_flight_or_published_is_not_gathered_again(
    rig: Rig, backend: FaultyStorage
) -> None:
    gate = threading.Event()
    backend.add(Fault("write", wait=gate))
    (item,) = rig.items(make_chunks(rig.fmt, 1), 0)
    assert rig.stores.store(item, age=60.0) == StoreOutcome.QUEUED
    assert rig.stores.store(item, age=60.0) == StoreOutcome.KNOWN
    gate.set()
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.stores.store(item, age=60.0) == StoreOutcome.KNOWN
    # Seen missing after it was published: somebody deleted it.
    assert rig.stores.store(item, age=0.0) == StoreOutcome.QUEUED
    rig.transfer.drain(PATIENCE)
    rig.transfer.forget_stored()
    assert rig.stores.store(item, age=60.0) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.count("stored_chunks") == 1
    assert rig.count("existing_chunks") == 2


def test_store_on_storage_far_away_probes_only_after_a_write_that_found_an_object(
    tmp_path: Path,
) -> None:
    backend = FaultyStorage(posix(tmp_path / "shelf"), **FAR)
    with closing(Rig(backend)) as rig:
        first, stored, cut, last = make_chunks(rig.fmt, 4)

        def probes_of(chunk: Chunk) -> int:
            before = backend.counts["stat_names"]
            rig.put([chunk])
            return backend.counts["stat_names"] - before

        assert probes_of(first) == 0
        rig.path(cut, 0).parent.mkdir(exist_ok=True)
        rig.path(cut, 0).write_bytes(b"cut")
        # The write finds it, and it is looked at then.
        assert probes_of(cut) == 1
        assert rig.count("repaired_objects") == 1
        for shard in range(rig.fmt.shards):
            rig.path(stored, shard).parent.mkdir(exist_ok=True)
            rig.path(stored, shard).write_bytes(sealed(rig.fmt, stored, shard))
        assert probes_of(stored) == rig.fmt.shards
        assert rig.count("existing_chunks") == 1
        assert probes_of(last) == rig.fmt.shards


def test_a_deleted_chunk_is_stored_again(rig: Rig) -> None:
    chunks = make_chunks(rig.fmt, 1)
    rig.put(chunks)
    rig.path(chunks[0], 1).unlink()
    assert rig.load(chunks, 20)[0].failures == [(chunks[0], Failure.MISSING)]
    rig.put(chunks)
    assert rig.load(chunks, 20)[0].failed_at is None


def test_two_engines_storing_the_same_chunks_at_once_leave_one_good_object_each(
    tmp_path: Path,
) -> None:
    backend = posix(tmp_path / "shelf")
    with closing(Rig(backend)) as one, closing(Rig(backend)) as two:
        chunks = make_chunks(one.fmt, 4)
        for rig in (one, two):
            for item in rig.items(chunks, 0):
                rig.fill(item)
        for a, b in zip(one.items(chunks, 0), two.items(chunks, 0), strict=True):
            assert one.stores.store(a) == two.stores.store(b) == StoreOutcome.QUEUED
        assert one.transfer.drain(PATIENCE) == two.transfer.drain(PATIENCE) == 0
        assert one.load(chunks, 20)[0].failed_at is None
    assert len(list((tmp_path / "shelf").rglob("*.safetensors"))) == 4 * one.fmt.shards
    assert not list((tmp_path / "shelf").rglob("*.tmp"))


# ------------------------------------------------------------------------- bad objects


def _flip(at: int) -> Callable[[Path], None]:
    def damage(path: Path) -> None:
        data = bytearray(path.read_bytes())
        data[at] ^= 1
        path.write_bytes(data)

    return damage


def _fifo(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def _of_another(path: Path) -> None:
    """Put an object of equal size but of another chunk there."""
    with tempfile.TemporaryDirectory() as folder, closing(Rig(posix(Path(folder)))) as rig:
        chunks = make_chunks(rig.fmt, 5, seed=99)
        rig.put(chunks)
        path.write_bytes(rig.path(chunks[2], 1).read_bytes())


#: One of each way in which a read ends; the tests of the format and of shelves have the others.
DAMAGES: dict[str, Callable[[Path], None]] = {
    "a flipped byte": _flip(-1),
    "truncated": lambda path: os.truncate(path, path.stat().st_size // 2),
    "of another chunk": _of_another,
    "a FIFO": _fifo,
}


@pytest.mark.parametrize("damage", list(DAMAGES))
def test_a_bad_object_is_a_miss_from_there_on_and_repaired_by_the_next_store(
    rig: Rig, damage: str, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks(rig.fmt, 5)
    rig.put(chunks)
    DAMAGES[damage](rig.path(chunks[2], 1))

    load, items = rig.load(chunks, 20)
    assert load.failed_at == 2
    assert (chunks[2], Failure.BAD) in load.failures
    assert [rig.holds(item) for item in items[:2]] == [True, True]
    for item in items[2:]:
        # Of each shard there is what must be there, or nothing.
        for i, block in enumerate(rig.block_ids(item)):
            for layer, cache in enumerate(rig.caches):
                for found, right in zip(cache[block], content(item.chunk, layer, i), strict=True):
                    assert not found.any() or torch.equal(found, right)
    assert rig.count("load_failures_bad") == 1
    assert len([r for r in caplog.records if "was not loaded" in r.message]) == 1

    rig.load(chunks, 20)
    assert len([r for r in caplog.records if chunks[2].key.hex() in r.getMessage()]) == 1

    item = rig.items(chunks, 0)[2]
    assert rig.stores.store(item, repair=True, age=1e9) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.transfer.take_repaired() == [chunks[2].key]
    assert rig.transfer.take_repaired() == []
    rig.comes_back(chunks, 40)


def test_what_was_repaired_is_remembered_within_bounds(
    backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known_chunks, "_PUBLISHED_MEMORY", 2)
    with closing(Rig(backend)) as rig:
        chunks = make_chunks(rig.fmt, 3)
        rig.put(chunks)
        for item in rig.items(chunks, 0):
            assert rig.stores.store(item, repair=True) == StoreOutcome.QUEUED
            assert rig.transfer.drain(PATIENCE) == 0
        assert rig.transfer.take_repaired() == [chunk.key for chunk in chunks[1:]]
        assert rig.transfer.take_repaired() == []


def test_a_good_object_is_never_replaced_by_a_repair(rig: Rig) -> None:
    (chunk,) = make_chunks(rig.fmt, 1)
    rig.put([chunk])
    before = rig.path(chunk, 0).stat()
    (item,) = rig.items([chunk], 0)
    assert rig.stores.store(item, repair=True) == StoreOutcome.QUEUED
    rig.transfer.drain(PATIENCE)
    after = rig.path(chunk, 0).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert rig.count("repaired_objects") == 0
    assert rig.transfer.take_repaired() == [chunk.key]


def test_an_object_that_is_damaged_while_it_is_read_is_read_again(
    rig: Rig, backend: FaultyStorage
) -> None:
    chunks = make_chunks(rig.fmt, 2)
    rig.put(chunks)
    backend.add(Fault("read", damage=lambda data: data.reverse(), times=1))
    rig.comes_back(chunks, 20)


@pytest.mark.parametrize("operation", ["open", "read"])
def test_storage_errors_are_misses_that_change_nothing(
    rig: Rig, backend: FaultyStorage, operation: str
) -> None:
    chunks = make_chunks(rig.fmt, 3)
    rig.put(chunks)
    names = {path for path in Path(backend.url).rglob("*") if path.is_file()}
    pattern = f"*{chunks[1].key.hex()}*"
    backend.add(Fault(operation, pattern, error=lambda: TransientStorageError(5, "EIO")))
    load, items = rig.load(chunks, 20)
    assert load.failed_at == 1
    assert {failure for _, failure in load.failures} == {Failure.ERROR}
    assert rig.holds(items[0])
    assert rig.untouched(items[1])
    assert {path for path in Path(backend.url).rglob("*") if path.is_file()} == names
    backend.heal()
    # A breaker that a repeated call has opened closes by another.
    until(lambda: rig.load(chunks, 40)[0].failed_at is None)


def test_log_lines_are_few(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    for seed in range(40):
        rig.load(make_chunks(rig.fmt, 1, seed), 20)
    assert rig.count("load_failures_missing") >= 40
    # A thread may have been told that it may, and not have written its line yet.
    until(lambda: len(caplog.records) >= 10)
    assert len(caplog.records) == 10


def test_a_callback_that_raises_ends_no_thread(rig: Rig, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*_: object) -> None:
        raise KeyError("nobody knows it")

    chunks = make_chunks(rig.fmt, 4)
    for item in rig.items(chunks, 0):
        rig.fill(item)
        assert rig.stores.store(item, on_done=fail) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    for item in rig.items(chunks, 20):
        load = rig.loads.load([item], on_done=fail)
        until(lambda load=load: load.finished)
        assert load.failed_at is None
    rig.put(make_chunks(rig.fmt, 1, 7))
    assert len([r for r in caplog.records if "a completion callback raised" in r.getMessage()]) == 1
    assert rig.count("dropped_chunks_error") == rig.count("load_failures_error") == 0


# ------------------------------------------------------------------------- staging


def test_a_full_pool_drops_stores_and_keeps_loads_going(rig: Rig, backend: FaultyStorage) -> None:
    stored = make_chunks(rig.fmt, 2)
    rig.put(stored)
    gate = threading.Event()
    backend.add(Fault("write", wait=gate))
    outcomes = [rig.stores.store(item) for item in rig.items(make_chunks(rig.fmt, 12, 7), 0)]
    assert outcomes.count(StoreOutcome.STAGING_FULL) > 0
    assert outcomes.index(StoreOutcome.STAGING_FULL) == outcomes.count(StoreOutcome.QUEUED)
    assert rig.count("dropped_chunks_staging_full") == outcomes.count(StoreOutcome.STAGING_FULL)
    rig.comes_back(stored, 40)
    gate.set()
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.staging.in_use == 0


class Bound:
    """Allows so many bytes."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.written = 0

    def allows(self, nbytes: int) -> bool:
        return nbytes <= self.left

    def begin(self, nbytes: int) -> bool:
        return self.allows(nbytes)

    def end(self, nbytes: int, written: bool) -> None:
        self.written += nbytes if written else 0


def test_a_bound_of_the_shelf_drops_stores_before_they_take_memory(rig: Rig) -> None:
    stored, more = make_chunks(rig.fmt, 2), make_chunks(rig.fmt, 3, 7)
    rig.guard.bound = bound = Bound(1 << 40)
    rig.put(stored)
    assert bound.written == rig.count("stored_bytes") + len(rig.fmt.namespace.encoded)
    rig.put(stored)
    assert bound.written == rig.count("stored_bytes") + len(rig.fmt.namespace.encoded)
    bound.left = 1
    outcomes = [rig.stores.store(item) for item in rig.items(more, 0)]
    assert outcomes == [StoreOutcome.NO_ROOM] + [StoreOutcome.PARENT_DROPPED] * 2
    assert rig.staging.in_use == 0
    assert rig.count("dropped_chunks_no_room") == 1
    assert rig.load(stored, 40)[0].failed_at is None


def test_a_bound_that_is_reached_while_a_store_is_queued_drops_it(
    rig: Rig, backend: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    rig.put(make_chunks(rig.fmt, 1))
    rig.guard.bound = bound = Bound(1 << 40)
    gate = threading.Event()
    backend.add(Fault("stat", wait=gate))
    (item,) = rig.items(make_chunks(rig.fmt, 1, 7), 0)
    assert rig.stores.store(item) == StoreOutcome.QUEUED
    bound.left = rig.fmt.object_size(0)  # not for all objects of the chunk
    gate.set()
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.count("dropped_chunks_no_room") == 1
    assert rig.count("dropped_chunks_error") == bound.written == 0
    assert rig.guard.writes.is_closed, "this says nothing about the storage"
    assert not caplog.records
    bound.left = 1 << 40
    assert rig.stores.store(item, age=PATIENCE) == StoreOutcome.QUEUED, "it is not published"


def test_once_a_chunk_is_dropped_those_behind_it_are_too_and_others_are_not(
    rig: Rig, backend: FaultyStorage
) -> None:
    gate = threading.Event()
    backend.add(Fault("write", wait=gate))
    long, other = make_chunks(rig.fmt, 10), make_chunks(rig.fmt, 2, 7)
    began = time.monotonic()

    def store(item: ChunkSlots) -> str:
        rig.fill(item)
        return rig.stores.store(item, age=time.monotonic() - began)

    outcomes = [store(item) for item in rig.items(long, 0)]
    full = outcomes.index(StoreOutcome.STAGING_FULL)
    assert outcomes == [StoreOutcome.QUEUED] * full + [StoreOutcome.STAGING_FULL] + [
        StoreOutcome.PARENT_DROPPED
    ] * (10 - full - 1)
    gate.set()
    assert rig.transfer.drain(PATIENCE) == 0
    # There is room again. No lookup could find children of the dropped chunk.
    items = rig.items(long, 0)
    assert store(items[full + 1]) == StoreOutcome.PARENT_DROPPED
    assert [store(item) for item in rig.items(other, 40)] == [
        StoreOutcome.QUEUED,
        StoreOutcome.QUEUED,
    ]
    # A request that stores the dropped chunk may store its children.
    assert [store(item) for item in items[full:]] == [StoreOutcome.QUEUED] * (10 - full)
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.count("dropped_chunks_staging_full") == 1
    assert rig.count("dropped_chunks_parent_dropped") == 10 - full - 1 + 1
    assert rig.load(long, 20)[0].failed_at is None


def test_a_hole_does_not_hold_for_who_looked_later(
    rig: Rig, backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = make_chunks(rig.fmt, 3)
    for item in rig.items(chunks, 0):
        rig.fill(item)
    first, second, third = rig.items(chunks, 0)
    refused = Fault("write", error=TransientStorageError(5, "EIO"), times=1)
    backend.add(refused)
    assert rig.stores.store(first, age=60.0) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.stores.store(second, age=60.0) == StoreOutcome.PARENT_DROPPED
    # This request's look-up has found the chunk before it, which another engine stored.
    later = SimpleNamespace(
        monotonic=lambda: time.monotonic() + 10.0, perf_counter=time.perf_counter
    )
    monkeypatch.setattr(stores, "time", later)
    assert rig.stores.store(third, age=5.0) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0


def test_a_store_that_fails_takes_those_behind_it_out_of_the_queue(
    rig: Rig, backend: FaultyStorage
) -> None:
    gate = threading.Event()
    chunks = make_chunks(rig.fmt, 4)
    error = TransientStorageError(5, "EIO")
    backend.add(Fault("write", f"*{chunks[1].key.hex()}*", wait=gate, error=error))
    ended: list[str] = []
    for item in rig.items(chunks, 0):
        rig.fill(item)
        outcome = rig.stores.store(
            item,
            age=60.0,
            on_done=lambda chunk, result: ended.append(f"{chunk.index} {result.value}"),
        )
        assert outcome == StoreOutcome.QUEUED
    gate.set()
    assert rig.transfer.drain(PATIENCE) == 0
    until(lambda: len(ended) == 4)
    assert ended == ["0 published", "1 failed", "2 dropped", "3 dropped"]
    assert rig.count("dropped_chunks_error") == 1
    assert rig.count("dropped_chunks_parent_dropped") == 2
    assert not rig.path(chunks[3], 0).exists()
    assert rig.staging.in_use == 0


def test_a_gather_that_fails_gives_its_buffers_back(rig: Rig) -> None:
    (chunk,) = make_chunks(rig.fmt, 1)
    with pytest.raises(ValueError, match="slot_mapping"):
        rig.stores.store(ChunkSlots(chunk, torch.tensor([0, 10_000])))
    assert rig.staging.in_use == 0
    rig.put([chunk])
    assert rig.load([chunk], 20)[0].failed_at is None


def test_a_load_ends_when_a_scatter_fails_of_an_object_that_was_given_up(rig: Rig) -> None:
    chunks = make_chunks(rig.fmt, 1)
    rig.put(chunks)

    class Late(Destination):
        def scatter(
            self, shard: int, slots: torch.Tensor, payload: torch.Tensor, fence: object = None
        ) -> None:
            # The storage had answered at the very moment at which it was too late.
            rig.loading.on_late_call(threading.get_ident())
            raise RuntimeError("broken")

    (item,) = rig.items(chunks, 20)
    rig.start("r", [ChunkSlots(item.chunk, item.slots, Late())])
    assert rig.finished().failed_at == 0


def test_a_scatter_that_fails_is_a_failed_load(rig: Rig) -> None:
    (chunk,) = make_chunks(rig.fmt, 1)
    rig.put([chunk])
    rig.start("r", [ChunkSlots(chunk, torch.tensor([0, 10_000]))])
    assert rig.finished().failed_at == 0
    assert rig.load([chunk], 20)[0].failed_at is None
    # The thread of another shard may have ended a moment after the load was given up.
    rig.transfer.close()
    assert rig.staging.in_use == 0


# ------------------------------------------------------------------------- storage that is no help


@pytest.mark.parametrize(
    "error", [ReadOnlyStorageError(30, "EROFS"), NoSpaceStorageError(28, "ENOSPC")]
)
def test_a_storage_that_takes_no_writes_pauses_stores_only(
    rig: Rig, backend: FaultyStorage, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stored = make_chunks(rig.fmt, 1)
    rig.put(stored)
    backend.add(Fault("write", error=error))
    first, second, third = rig.items(make_chunks(rig.fmt, 3, 7), 0)
    assert rig.stores.store(first) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.stores.store(second) == StoreOutcome.UNAVAILABLE
    assert rig.stores.store(third) == StoreOutcome.UNAVAILABLE
    assert rig.count("dropped_chunks_error") == 1
    assert rig.count("dropped_chunks_unavailable") == 2
    assert len([r for r in caplog.records if "takes no stores" in r.getMessage()]) == 1
    assert rig.load(stored, 40)[0].failed_at is None


def test_a_read_only_shelf_costs_no_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Rig(posix(tmp_path / "shelf"))) as writer:
        chunks = make_chunks(writer.fmt, 2)
        writer.put(chunks)
    with closing(Rig(ReadOnlyBackend(posix(tmp_path / "shelf")))) as rig:
        gathered: list[object] = []
        monkeypatch.setattr(rig.cache, "gather", lambda *chunk: gathered.append(chunk))
        assert (
            rig.stores.store(rig.items(make_chunks(rig.fmt, 1, 7), 0)[0])
            == StoreOutcome.UNAVAILABLE
        )
        assert not gathered
        assert rig.load(chunks, 20)[0].failed_at is None


def test_a_shelf_that_vanishes_is_a_miss_and_comes_back(tmp_path: Path) -> None:
    with closing(Rig(posix(tmp_path / "shelf"))) as rig:
        chunks = make_chunks(rig.fmt, 3)
        rig.put(chunks)
        (tmp_path / "shelf").rename(tmp_path / "elsewhere")
        load, items = rig.load(chunks, 20)
        assert load.failed_at == 0
        assert all(rig.untouched(item) for item in items)
        (tmp_path / "elsewhere").rename(tmp_path / "shelf")
        # A read of before may still be ending, and a load that joins it shares its failure.
        until(lambda: rig.load(chunks, 20)[0].failed_at is None)


def _note(event: threading.Event) -> Exception:
    event.set()
    return TransientStorageError(5, "EIO")


def test_loads_that_hang_are_given_up_and_later_ones_fail_at_once(
    backend: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Rig(backend, options={"load_threads": 2})) as rig:
        chunks = make_chunks(rig.fmt, 3)
        rig.put(chunks)
        gate = threading.Event()
        backend.add(Fault("read", wait=gate))
        items = rig.items(chunks, 20)
        rig.start("r", items)
        load = rig.finished()
        assert load.failed_at == 0
        assert (chunks[0], Failure.ERROR) in load.failures
        # Two reads that do not come back are enough: nobody is sent after them.
        until(lambda: not rig.shelf.available)
        rig.start("s", items)
        (load,) = rig.ended().values()
        assert load.failures == [(chunks[0], Failure.UNAVAILABLE)]
        assert rig.count("load_failures_unavailable") == 1
        # The second read may be noticed a moment later.
        until(lambda: rig.count("late_calls") >= rig.count("stuck_threads") >= 2)
        assert (
            rig.stores.store(rig.items(make_chunks(rig.fmt, 1, 7), 0)[0])
            == StoreOutcome.UNAVAILABLE
        )
        gate.set()
        until(lambda: rig.shelf.available)
        until(lambda: rig.staging.in_use == 0)
        assert all(rig.untouched(item) for item in items)
        assert rig.load(chunks, 40)[0].failed_at is None
        until(lambda: rig.count("breaker_closes") == 1)
        assert len([r for r in caplog.records if r.name == "kvshelf.backends.guard"]) == 2


@pytest.mark.long
def test_loads_go_on_when_threads_can_be_started_again(
    backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Rig(backend, options={"load_threads": 1})) as rig:
        chunks, others = make_chunks(rig.fmt, 1), make_chunks(rig.fmt, 2, 7)
        rig.put(chunks)
        rig.put(others)
        gate = threading.Event()
        backend.add(Fault("read", f"*{chunks[0].key.hex()}*", wait=gate))
        with none_can_be_started(monkeypatch, "kvshelf-load"):
            assert rig.load(chunks, 20)[0].failed_at == 0
            until(lambda: rig.count("breaker_closes") > 0)
            assert rig.load(others, 30)[0].failures == [(others[0], Failure.UNAVAILABLE)]
        # What hangs still does.
        rig.comes_back(others, 40)
        assert len(rig.loading._stuck) == 1
        gate.set()


def test_one_object_that_hangs_does_not_fail_the_loads_of_others(
    backend: FaultyStorage,
) -> None:
    with closing(Rig(backend, options={"load_threads": 2})) as rig:
        chunks, others = make_chunks(rig.fmt, 2), make_chunks(rig.fmt, 4, 7)
        rig.put(chunks)
        rig.put(others)
        gate = threading.Event()
        backend.add(Fault("read", f"*{chunks[1].key.hex()}-1-0of*", wait=gate))
        rig.start("hangs", rig.items(chunks, 20))
        rig.start("goes on", rig.items(others, 40))
        loads = {name: load.failed_at for name, load in rig.all_ended(2).items()}
        assert loads == {"hangs": 1, "goes on": None}
        assert rig.shelf.available
        gate.set()


@pytest.mark.parametrize("arrives", [0, 2])
def test_a_load_that_is_slower_than_computing_is_cut(backend: FaultyStorage, arrives: int) -> None:
    with closing(Rig(backend)) as rig:
        chunks = make_chunks(rig.fmt, 4)
        rig.put(chunks)
        gate = threading.Event()
        backend.add(Fault("read", f"*{chunks[arrives].key.hex()}*", wait=gate))
        items = rig.items(chunks, 20)
        # It may take for ever, but not with so many chunks only.
        patience = [PATIENCE * 10] * 4
        patience[arrives] = 0.0
        rig.transfer.load("r", {rig.fmt.kind: items}, patience)
        while not (loads := rig.transfer.poll(0.01)):
            assert rig.transfer.loading
        (load,) = loads
        (piece,) = load.pieces.values()
        assert (piece.failed_at, piece.leading) == (arrives, arrives)
        assert piece.failures == [(chunks[arrives], Failure.CUT)]
        assert all(rig.holds(item) for item in items[:arrives])
        if piece.started is None:
            assert load.seconds_of_all is None
        else:
            waited = piece.started - load.begun
            # Two threads read the two objects of one chunk: of the first one, maybe all is there.
            expected = waited + (load.seconds - waited) * 4 / (arrives + 0.5 if arrives else 1)
            assert load.seconds_of_all == pytest.approx(expected)
        # It is no failure, neither of the storage nor of the objects.
        assert rig.count("cut_loads") == 1
        assert not [name for name in rig.counters.snapshot() if "failure" in name]
        gate.set()
        rig.comes_back(chunks, 40)


@pytest.mark.parametrize("at_once", [1, 2])
def test_few_chunks_are_read_at_once(backend: FaultyStorage, at_once: int) -> None:
    with closing(Rig(backend, options={"load_threads": 8}, staging_objects=32)) as rig:
        chunks = make_chunks(rig.fmt, 4)
        rig.put(chunks)
        gates = [threading.Event() for _ in chunks]
        faults = [
            backend.add(Fault("read", f"*{chunk.key.hex()}*", wait=gate, times=100))
            for chunk, gate in zip(chunks, gates, strict=True)
        ]
        items = rig.items(chunks, 20)
        rig.transfer.load("r", {rig.fmt.kind: items}, at_once=at_once)
        for leading, gate in enumerate(gates):
            window = faults[leading : leading + at_once]
            until(lambda window=window: all(fault.times != 100 for fault in window))
            assert all(fault.times == 100 for fault in faults[leading + at_once :])
            gate.set()
        piece = rig.finished()
        assert piece.failed_at is None
        assert all(rig.holds(item) for item in items)


def test_beside_a_load_with_such_a_bound_no_other_is_read(backend: FaultyStorage) -> None:
    with closing(Rig(backend, options={"load_threads": 8}, staging_objects=32)) as rig:
        first, second = make_chunks(rig.fmt, 4), make_chunks(rig.fmt, 4, seed=1)
        rig.put([*first, *second])
        gate = threading.Event()
        last = backend.add(Fault("read", f"*{first[-1].key.hex()}*", wait=gate))
        others = backend.add(Fault("read", f"*{second[0].key.hex()}*", times=100))
        for name, chunks in (("r", first), ("s", second)):
            rig.transfer.load(name, {rig.fmt.kind: rig.items(chunks, 20)}, at_once=1)
        # The last chunk of the first is being read: nothing of it is left that others delay.
        until(lambda: others.times < 100)
        assert rig.count("loaded_bytes") >= 3 * rig.fmt.shards
        gate.set()
        assert last is not None
        assert all(piece.failed_at is None for piece in rig.all_ended(2).values())


def test_a_load_that_is_cut_before_anything_was_read_says_nothing(backend: FaultyStorage) -> None:
    with closing(Rig(backend, options={"load_threads": 1})) as rig:
        first, second = make_chunks(rig.fmt, 2), make_chunks(rig.fmt, 2, seed=1)
        rig.put([*first, *second])
        gate = threading.Event()
        backend.add(Fault("read", f"*{first[0].key.hex()}*", wait=gate))
        rig.transfer.load("r", {rig.fmt.kind: rig.items(first, 20)}, at_once=1)
        rig.transfer.load("s", {rig.fmt.kind: rig.items(second, 30)}, [0.0], at_once=1)
        while not (loads := rig.transfer.poll(0.01)):
            assert rig.transfer.loading
        assert [(load.request_id, load.seconds_of_all) for load in loads] == [("s", None)]
        gate.set()


def test_a_load_is_not_cut_in_time(rig: Rig) -> None:
    chunks = make_chunks(rig.fmt, 4)
    rig.put(chunks)
    items = rig.items(chunks, 20)
    rig.transfer.load("r", {rig.fmt.kind: items}, [PATIENCE])
    piece = rig.finished()
    assert piece.failed_at is None
    assert all(rig.holds(item) for item in items)


def test_stores_that_hang_are_given_up_and_loads_go_on(
    backend: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Rig(backend, backoff=Backoff(1000.0, 1000.0))) as rig:
        stored = make_chunks(rig.fmt, 2)
        rig.put(stored)
        gate = threading.Event()
        backend.add(Fault("write", wait=gate))
        ended: list[str] = []
        prompts = [make_chunks(rig.fmt, 1, seed)[0] for seed in (7, 8)]
        for item in rig.items(prompts, 0):
            rig.fill(item)
            outcome = rig.stores.store(item, on_done=lambda _, result: ended.append(result.value))
            assert outcome == StoreOutcome.QUEUED
        until(lambda: ended == ["failed", "failed"])
        until(lambda: rig.shelf.read_only)
        # Nobody waits for what the storage keeps, nor uses its buffers.
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.staging.in_use == 2 * rig.fmt.shards
        assert rig.stores.store(rig.items(prompts, 0)[0]) == StoreOutcome.UNAVAILABLE
        assert rig.load(stored, 20)[0].failed_at is None
        gate.set()
        until(lambda: rig.staging.in_use == 0)
        rig.guard.writes.retry_at = 0.0
        rig.put(prompts)
        assert rig.load(prompts, 40)[0].failed_at is None
        assert rig.guard.writes.state.value == "closed"


def test_no_store_is_taken_that_no_thread_is_left_for(
    backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads_module, "MAX_STUCK", 1)
    with closing(Rig(backend)) as rig:
        gate = threading.Event()
        backend.add(Fault("write", wait=gate))
        ended: dict[int, str] = {}
        chunks = make_chunks(rig.fmt, 3)
        *items, late = rig.items(chunks, 0)
        for item in items:
            rig.fill(item)
            # Seen missing later than any chunk was dropped: no parent was dropped after it.
            outcome = rig.stores.store(
                item, age=-60.0, on_done=lambda c, result: ended.__setitem__(c.index, result.value)
            )
            assert outcome == StoreOutcome.QUEUED
        # The only thread is stuck; the queued store ends as well, and its memory is free.
        until(lambda: ended == {0: "failed", 1: "failed"})
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.staging.in_use == rig.fmt.shards
        assert not rig.shelf.read_only
        assert rig.stores.store(late, age=-60.0) == StoreOutcome.UNAVAILABLE
        assert rig.count("dropped_chunks_error") == 1
        assert rig.count("dropped_chunks_unavailable") == 2
        gate.set()
        until(lambda: rig.staging.in_use == 0)
        rig.put(chunks)
        assert rig.load(chunks, 20)[0].failed_at is None


def test_a_thread_that_is_given_up_as_its_call_returns_is_given_up_with_its_next_chunk(
    backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Rig(backend)) as rig:
        gate, for_ever = threading.Event(), threading.Event()
        chunks = make_chunks(rig.fmt, 2)
        backend.add(Fault("write", f"*{chunks[0].key.hex()}-0-0of*", wait=gate))
        backend.add(Fault("write", f"*{chunks[1].key.hex()}-1-0of*", wait=for_ever))
        add = rig.counters.add

        def slowly(name: str, amount: float = 1) -> None:
            add(name, amount)
            if name == "dropped_chunks_error" and not gate.is_set():
                gate.set()
                until(lambda: [job.chunk for job in rig.stores._running.values()] == chunks[1:])

        monkeypatch.setattr(rig.counters, "add", slowly)
        ended: dict[int, str] = {}
        for item in rig.items(chunks, 0):
            rig.fill(item)
            rig.stores.store(
                item, age=-60.0, on_done=lambda c, result: ended.__setitem__(c.index, result.value)
            )
        until(lambda: ended == {0: "failed", 1: "failed"})
        for_ever.set()


def test_a_failed_chunk_waits_for_those_before_it(rig: Rig, backend: FaultyStorage) -> None:
    chunks = make_chunks(rig.fmt, 4)
    rig.put(chunks)
    gate = threading.Event()
    failed = threading.Event()
    backend.add(Fault("read", f"*{chunks[0].key.hex()}-0-0of*", wait=gate))
    backend.add(Fault("open", f"*{chunks[2].key.hex()}*", error=lambda: _note(failed)))
    items = rig.items(chunks, 20)
    rig.start("r", items)
    assert failed.wait(PATIENCE)
    assert not rig.ended()
    gate.set()
    load = rig.finished()
    assert load.failed_at == 2
    assert rig.holds(items[0])
    assert rig.holds(items[1])


# ------------------------------------------------------------------------- the end


def test_closing_publishes_what_is_staged(rig: Rig) -> None:
    chunks = make_chunks(rig.fmt, 5)
    for item in rig.items(chunks, 0):
        rig.fill(item)
        rig.stores.store(item)
    assert rig.transfer.close(PATIENCE) == 0
    assert all(rig.path(chunk, s).is_file() for chunk in chunks for s in range(rig.fmt.shards))


def test_closing_waits_for_a_bounded_time_and_says_what_was_lost(
    rig: Rig, backend: FaultyStorage
) -> None:
    gate = threading.Event()
    backend.add(Fault("write", wait=gate))
    for item in rig.items(make_chunks(rig.fmt, 3), 0):
        rig.stores.store(item)
    assert rig.transfer.close(0.05) == 3
    assert rig.count("dropped_chunks_shutdown") == 3
    # Whether or not the thread has come back by now.
    assert rig.stores.store(rig.items(make_chunks(rig.fmt, 1, 9), 0)[0]) == StoreOutcome.UNAVAILABLE
    gate.set()
    assert rig.stores.store(rig.items(make_chunks(rig.fmt, 1, 9), 0)[0]) == StoreOutcome.UNAVAILABLE


def test_a_store_that_closing_overtakes_is_dropped_with_its_memory(
    rig: Rig, backend: FaultyStorage
) -> None:
    inside, gate = threading.Event(), threading.Event()
    writing, hold = threading.Event(), threading.Event()
    backend.add(Fault("write", damage=lambda _: writing.set() or hold.wait(PATIENCE)))

    class Slow(Destination):
        def gather(self, slots: torch.Tensor, payloads: Sequence[torch.Tensor]) -> PendingCopy:
            inside.set()
            assert gate.wait(PATIENCE)
            return DONE

    hangs, item = rig.items(make_chunks(rig.fmt, 2), 0)
    slow = ChunkSlots(item.chunk, item.slots, Slow())
    with ThreadPoolExecutor() as step:
        assert rig.stores.store(hangs) == StoreOutcome.QUEUED
        assert writing.wait(PATIENCE)
        outcome = step.submit(rig.stores.store, slow)
        assert inside.wait(PATIENCE)
        assert rig.transfer.close() == 1
        gate.set()
        assert outcome.result(PATIENCE) == StoreOutcome.UNAVAILABLE
    # That of the store that hangs.
    assert rig.staging.in_use == rig.fmt.shards
    assert rig.count("dropped_chunks_unavailable") == 1
    hold.set()
    assert rig.transfer.drain(PATIENCE) == 0


def test_closing_ends_the_loads_that_hang(rig: Rig, backend: FaultyStorage) -> None:
    chunks = make_chunks(rig.fmt, 2)
    rig.put(chunks)
    gate = threading.Event()
    backend.add(Fault("read", wait=gate))
    items = rig.items(chunks, 20)
    rig.start("r", items)
    assert rig.transfer.close(0.0) == 0
    (load,) = rig.ended().values()
    assert load.failed_at == 0
    gate.set()
    assert all(rig.untouched(item) for item in items)


def test_where_no_thread_can_store_none_is_left_that_loads(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(threading.enumerate()), rig.guard.watchers
    with (
        none_can_be_started(monkeypatch, "kvshelf-store"),
        pytest.raises(RuntimeError, match="no thread kvshelf-store could be started"),
    ):
        rig.begin(rig.shelf)
    assert rig.guard.watchers == before[1]
    until(lambda: set(threading.enumerate()) <= before[0])


# ------------------------------------------------------------------------- anything

PROMPTS = 3
LENGTH = 3


@settings(max_examples=40)
@given(
    st.lists(
        st.one_of(
            st.tuples(st.just("store"), st.integers(0, PROMPTS - 1), st.booleans()),
            st.tuples(st.just("load"), st.integers(0, PROMPTS - 1), st.booleans()),
            st.tuples(st.just("damage"), st.integers(0, PROMPTS - 1), st.integers(0, 2**16)),
            st.tuples(st.just("fault"), st.sampled_from(["open", "read", "write", "stat", "pin"])),
            st.tuples(st.just("heal")),
            st.tuples(st.just("lend"), st.integers(0, 3), st.integers(1, 4)),
            st.tuples(st.just("poll")),
            st.tuples(st.just("drain")),
        ),
        max_size=25,
    ),
    st.booleans(),
    st.sampled_from([0, 1, 5, 1000]),
)
def test_whatever_happens_a_load_delivers_the_right_bytes_or_says_from_where_not(
    steps: list[tuple[object, ...]], whole_chunks: bool, in_memory: int
) -> None:
    with tempfile.TemporaryDirectory() as folder, pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostKVCache, "whole_chunks", whole_chunks)
        storage = posix(Path(folder) / "shelf")
        backend = FaultyStorage(storage)
        lending = LendingMemory(storage, backend)
        lending.lends = lambda name: False
        fmt = make_format()
        memory = MemoryTier(max(1, in_memory) * 4 * fmt.object_size(0))
        tiers = [KindMemory(memory, fmt, Counters())] if in_memory else []
        in_front = lambda shelf: TieredShelf(shelf, tiers)  # noqa: E731
        with (
            closing(memory),
            closing(Rig(backend, fmt=fmt, blocks=400, in_front=in_front, memory=lending)) as rig,
        ):
            _live(rig, backend, lending, steps)
            assert rig.transfer.drain(PATIENCE) == 0
            # Reads of cancelled loads end a little later than the loads.
            until(lambda: rig.staging.in_use == 0)
            until(lambda: all(loan.released for loan in lending.loans))
            until(lambda: not memory.stats().pinned_bytes)
        assert all(loan.released == 1 for loan in lending.loans)


class _Bytes:
    """A reader of bytes in memory."""

    def __init__(self, data: bytearray) -> None:
        self._data = data
        self.size = len(data)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        part = self._data[offset : offset + len(buffer)]
        buffer[: len(part)] = part
        return len(part)


def _lend(lending: LendingMemory, fmt: ObjectFormat, share: int, every: int) -> None:
    """Lend some of the objects from now on, and take the bytes of some loans back at once."""

    def lend(loan: Loan) -> None:
        parsed = parse_path(loan.name)
        assert parsed is not None
        fmt.read_named(_Bytes(loan.data), parsed, memoryview(bytearray(len(loan.data))))
        if every > 1 and len(lending.loans) % every == 0:
            loan.valid_now = False
            loan.data[fmt.data_offset :] = bytes(len(loan.data) - fmt.data_offset)

    lending.lends = lambda name: zlib.crc32(name.encode()) % 3 < share
    lending.on_lend = lend


def _live(
    rig: Rig, backend: FaultyStorage, lending: LendingMemory, steps: list[tuple[object, ...]]
) -> None:
    prompts = [make_chunks(rig.fmt, LENGTH, seed) for seed in range(PROMPTS)]
    home = [rig.items(chunks, i * LENGTH * rig.per_chunk) for i, chunks in enumerate(prompts)]
    for items in home:
        for item in items:
            rig.fill(item)
    free = PROMPTS * LENGTH * rig.per_chunk
    running: dict[str, tuple[list[ChunkSlots], bool]] = {}

    def check(wait: float = 0.0) -> None:
        for name, load in rig.ended(wait).items():
            items, cancelled = running.pop(name)
            good = len(items) if load.failed_at is None else load.failed_at
            if not load.cancelled:
                assert all(rig.holds(item) for item in items[:good])
            assert load.cancelled <= cancelled
            assert bool(load.failures) == (load.failed_at is not None)

    for number, (action, *arguments) in enumerate(steps):
        if action == "store":
            prompt, repair = arguments
            for item in home[prompt]:
                outcome = rig.stores.store(item, repair=repair)
                assert isinstance(outcome, StoreOutcome)
        elif action == "load" and free + LENGTH * rig.per_chunk <= rig.blocks:
            prompt, cancel = arguments
            items = rig.items(prompts[prompt], free)
            free += LENGTH * rig.per_chunk
            running[str(number)] = items, cancel
            rig.start(str(number), items)
            if cancel:
                rig.transfer.cancel(str(number))
        elif action == "damage":
            prompt, seed = arguments
            chance = random.Random(seed)
            path = rig.path(chance.choice(prompts[prompt]), chance.randrange(rig.fmt.shards))
            if path.is_file():
                _flip(chance.randrange(path.stat().st_size))(path)
        elif action == "fault":
            error = TransientStorageError(5, "EIO")
            backend.add(Fault(str(arguments[0]), error=error, times=3))
        elif action == "heal":
            backend.heal()
        elif action == "lend":
            share, every = arguments
            assert isinstance(share, int) and isinstance(every, int)
            _lend(lending, rig.fmt, share, every)
        elif action == "poll":
            check()
        elif action == "drain":
            assert rig.transfer.drain(PATIENCE) == 0
    while running:
        check(PATIENCE)
