"""Stores and loads between a paged cache and a shelf: right, or not at all; never stuck."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest
import torch

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
from kvshelf.kv.caches import DONE, LayerRun, PendingCopy, layer_calls
from kvshelf.kv.layout import PagedLayout
from kvshelf.shelf import threads as threads_module
from kvshelf.transfer import store_history
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure
from kvshelf.transfer.stores import StoreOutcome
from tests.sim.storage import FAR, Fault, FaultyStorage, posix
from tests.support.formats import make_format, sealed
from tests.support.prompts import make_chunks
from tests.support.threads import none_can_be_started
from tests.support.transfers import Destination, Rig
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


def test_layers_that_do_not_fit_the_namespace_are_refused(rig: Rig) -> None:
    layout = PagedLayout.native_blocks(rig.caches[0])
    with pytest.raises(ConfigError, match="2 layers are registered"):
        layer_calls(rig.fmt, [LayerRun(0, rig.caches[:2], layout)])


# ------------------------------------------------------------------------- what is stored once


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


# ------------------------------------------------------------------------- bad objects


def test_bad_object_is_logged_once_and_repaired_by_the_next_store(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks(rig.fmt, 5)
    rig.put(chunks)
    path = rig.path(chunks[2], 1)
    data = path.read_bytes()
    path.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))

    load, items = rig.load(chunks, 20)
    assert load.failed_at == 2
    assert (chunks[2], Failure.BAD) in load.failures
    assert [rig.holds(item) for item in items[:2]] == [True, True]
    assert rig.count("load_failures_bad") == 1
    assert len([r for r in caplog.records if "was not loaded" in r.message]) == 1

    rig.load(chunks, 20)
    assert len([r for r in caplog.records if chunks[2].key.hex() in r.getMessage()]) == 1

    item = rig.items(chunks, 0)[2]
    assert rig.store(item, repair=True, age=1e9) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.transfer.take_repaired() == [chunks[2].key]
    assert rig.transfer.take_repaired() == []
    rig.comes_back(chunks, 40)


def test_what_was_repaired_is_remembered_within_bounds(
    backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_history, "_PUBLISHED_MEMORY", 2)
    with closing(Rig(backend)) as rig:
        chunks = make_chunks(rig.fmt, 3)
        rig.put(chunks)
        for item in rig.items(chunks, 0):
            assert rig.store(item, repair=True) == StoreOutcome.QUEUED
            assert rig.transfer.drain(PATIENCE) == 0
        assert rig.transfer.take_repaired() == [chunk.key for chunk in chunks[1:]]
        assert rig.transfer.take_repaired() == []


def test_good_object_is_never_replaced_by_a_repair(rig: Rig) -> None:
    (chunk,) = make_chunks(rig.fmt, 1)
    rig.put([chunk])
    before = rig.path(chunk, 0).stat()
    (item,) = rig.items([chunk], 0)
    assert rig.store(item, repair=True) == StoreOutcome.QUEUED
    rig.transfer.drain(PATIENCE)
    after = rig.path(chunk, 0).stat()
    assert (before.st_ino, before.st_mtime_ns) == (after.st_ino, after.st_mtime_ns)
    assert rig.count("repaired_objects") == 0
    assert rig.transfer.take_repaired() == [chunk.key]


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
        assert rig.store(item, on_done=fail) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    for item in rig.items(chunks, 20):
        load = rig.read([item], on_done=fail)
        until(lambda load=load: load.finished)
        assert load.failed_at is None
    rig.put(make_chunks(rig.fmt, 1, 7))
    assert len([r for r in caplog.records if "a completion callback raised" in r.getMessage()]) == 1
    assert rig.count("dropped_chunks_error") == rig.count("load_failures_error") == 0


# ------------------------------------------------------------------------- staging


def test_full_pool_drops_stores_and_keeps_loads_going(rig: Rig, backend: FaultyStorage) -> None:
    stored = make_chunks(rig.fmt, 2)
    rig.put(stored)
    gate = backend.hang("write")
    outcomes = [rig.store(item) for item in rig.items(make_chunks(rig.fmt, 12, 7), 0)]
    assert outcomes.count(StoreOutcome.STAGING_FULL) > 0
    assert outcomes.index(StoreOutcome.STAGING_FULL) == outcomes.count(StoreOutcome.QUEUED)
    assert rig.count("dropped_chunks_staging_full") == outcomes.count(StoreOutcome.STAGING_FULL)
    rig.comes_back(stored, 40)
    gate.set()
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.chunks_in_use == 0


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


def test_bound_of_the_shelf_drops_stores_before_they_take_memory(rig: Rig) -> None:
    stored, more = make_chunks(rig.fmt, 2), make_chunks(rig.fmt, 3, 7)
    rig.guard.bound = bound = Bound(1 << 40)
    rig.put(stored)
    assert bound.written == rig.count("stored_bytes") + len(rig.fmt.namespace.encoded)
    rig.put(stored)
    assert bound.written == rig.count("stored_bytes") + len(rig.fmt.namespace.encoded)
    bound.left = 1
    outcomes = [rig.store(item) for item in rig.items(more, 0)]
    assert outcomes == [StoreOutcome.NO_ROOM] + [StoreOutcome.PARENT_DROPPED] * 2
    assert rig.chunks_in_use == 0
    assert rig.count("dropped_chunks_no_room") == 1
    assert rig.load(stored, 40)[0].failed_at is None


def test_bound_that_is_reached_while_a_store_is_queued_drops_it(
    rig: Rig, backend: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    rig.put(make_chunks(rig.fmt, 1))
    rig.guard.bound = bound = Bound(1 << 40)
    gate = backend.hang("stat")
    (item,) = rig.items(make_chunks(rig.fmt, 1, 7), 0)
    assert rig.store(item) == StoreOutcome.QUEUED
    bound.left = rig.fmt.object_size(0)  # not for all objects of the chunk
    gate.set()
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.count("dropped_chunks_no_room") == 1
    assert rig.count("dropped_chunks_error") == bound.written == 0
    assert rig.guard.writes.is_closed, "this says nothing about the storage"
    assert not caplog.records
    bound.left = 1 << 40
    assert rig.store(item, age=PATIENCE) == StoreOutcome.QUEUED, "it is not published"


def test_store_that_fails_takes_those_behind_it_out_of_the_queue(
    rig: Rig, backend: FaultyStorage
) -> None:
    gate = threading.Event()
    chunks = make_chunks(rig.fmt, 4)
    error = TransientStorageError(5, "EIO")
    backend.add(Fault("write", f"*{chunks[1].key.hex()}*", wait=gate, error=error))
    ended: list[str] = []
    for item in rig.items(chunks, 0):
        rig.fill(item)
        outcome = rig.store(
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
    assert rig.chunks_in_use == 0


def test_gather_that_fails_gives_its_buffers_back(rig: Rig) -> None:
    (chunk,) = make_chunks(rig.fmt, 1)
    with pytest.raises(ValueError, match="slot_mapping"):
        rig.store(ChunkSlots(chunk, torch.tensor([0, 10_000])))
    assert rig.chunks_in_use == 0
    rig.put([chunk])
    assert rig.load([chunk], 20)[0].failed_at is None


def test_load_ends_when_a_scatter_fails_of_an_object_that_was_given_up(rig: Rig) -> None:
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


def test_scatter_that_fails_is_a_failed_load(rig: Rig) -> None:
    (chunk,) = make_chunks(rig.fmt, 1)
    rig.put([chunk])
    rig.start("r", [ChunkSlots(chunk, torch.tensor([0, 10_000]))])
    assert rig.finished().failed_at == 0
    assert rig.load([chunk], 20)[0].failed_at is None
    # The thread of another shard may have ended a moment after the load was given up.
    rig.transfer.close()
    assert rig.chunks_in_use == 0


# ------------------------------------------------------------------------- storage that is no help


@pytest.mark.parametrize(
    "error", [ReadOnlyStorageError(30, "EROFS"), NoSpaceStorageError(28, "ENOSPC")]
)
def test_storage_that_takes_no_writes_pauses_stores_only(
    rig: Rig, backend: FaultyStorage, error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    stored = make_chunks(rig.fmt, 1)
    rig.put(stored)
    backend.add(Fault("write", error=error))
    first, second, third = rig.items(make_chunks(rig.fmt, 3, 7), 0)
    assert rig.store(first) == StoreOutcome.QUEUED
    assert rig.transfer.drain(PATIENCE) == 0
    assert rig.store(second) == StoreOutcome.UNAVAILABLE
    assert rig.store(third) == StoreOutcome.UNAVAILABLE
    assert rig.count("dropped_chunks_error") == 1
    assert rig.count("dropped_chunks_unavailable") == 2
    assert len([r for r in caplog.records if "takes no stores" in r.getMessage()]) == 1
    assert rig.load(stored, 40)[0].failed_at is None


def test_read_only_shelf_costs_no_gather(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(Rig(posix(tmp_path / "shelf"))) as writer:
        chunks = make_chunks(writer.fmt, 2)
        writer.put(chunks)
    with closing(Rig(ReadOnlyBackend(posix(tmp_path / "shelf")))) as rig:
        gathered: list[object] = []
        monkeypatch.setattr(rig.cache, "gather", lambda *chunk: gathered.append(chunk))
        assert rig.store(rig.items(make_chunks(rig.fmt, 1, 7), 0)[0]) == StoreOutcome.UNAVAILABLE
        assert not gathered
        assert rig.load(chunks, 20)[0].failed_at is None


def test_loads_that_hang_are_given_up_and_later_ones_fail_at_once(
    backend: FaultyStorage, caplog: pytest.LogCaptureFixture
) -> None:
    with closing(Rig(backend, options={"load_threads": 2})) as rig:
        chunks = make_chunks(rig.fmt, 3)
        rig.put(chunks)
        gate = backend.hang("read")
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
        assert rig.store(rig.items(make_chunks(rig.fmt, 1, 7), 0)[0]) == StoreOutcome.UNAVAILABLE
        gate.set()
        until(lambda: rig.shelf.available)
        until(lambda: rig.chunks_in_use == 0)
        assert all(rig.untouched(item) for item in items)
        assert rig.load(chunks, 40)[0].failed_at is None
        until(lambda: rig.count("breaker_closes") == 1)
        assert len([r for r in caplog.records if r.name == "kvshelf.backends.guard"]) == 2


def test_one_object_that_hangs_does_not_fail_the_loads_of_others(
    backend: FaultyStorage,
) -> None:
    with closing(Rig(backend, options={"load_threads": 2})) as rig:
        chunks, others = make_chunks(rig.fmt, 2), make_chunks(rig.fmt, 4, 7)
        rig.put(chunks)
        rig.put(others)
        gate = backend.hang("read", f"*{chunks[1].key.hex()}-1-0of*")
        rig.start("hangs", rig.items(chunks, 20))
        rig.start("goes on", rig.items(others, 40))
        loads = {name: load.failed_at for name, load in rig.all_ended(2).items()}
        assert loads == {"hangs": 1, "goes on": None}
        assert rig.shelf.available
        gate.set()


@pytest.mark.parametrize("arrives", [0, 2])
def test_load_that_is_slower_than_computing_is_cut(backend: FaultyStorage, arrives: int) -> None:
    with closing(Rig(backend)) as rig:
        chunks = make_chunks(rig.fmt, 4)
        rig.put(chunks)
        gate = backend.hang("read", f"*{chunks[arrives].key.hex()}*")
        items = rig.items(chunks, 20)
        # It may take for ever, but not with so many chunks only.
        patience = [PATIENCE * 10] * 4
        patience[arrives] = 0.0
        rig.start("r", items, patience)
        while not (loads := rig.transfer.poll(0.01)):
            assert rig.transfer.loading
        (load,) = loads
        (piece,) = load.pieces.values()
        assert (piece.failed_at, piece.leading) == (arrives, arrives)
        assert piece.failures == [(chunks[arrives], Failure.CUT)]
        assert all(rig.holds(item) for item in items[:arrives])
        # It is no failure, neither of the storage nor of the objects.
        assert rig.count("cut_loads") == 1
        assert not [name for name in rig.counters.snapshot() if "failure" in name]
        gate.set()
        rig.comes_back(chunks, 40)


@pytest.mark.parametrize("at_once", [1, 2])
def test_few_chunks_are_read_at_once(backend: FaultyStorage, at_once: int) -> None:
    with closing(Rig(backend, options={"load_threads": 8}, memory_chunks=32)) as rig:
        chunks = make_chunks(rig.fmt, 4)
        rig.put(chunks)
        gates = [threading.Event() for _ in chunks]
        faults = [
            backend.add(Fault("read", f"*{chunk.key.hex()}*", wait=gate, times=100))
            for chunk, gate in zip(chunks, gates, strict=True)
        ]
        items = rig.items(chunks, 20)
        rig.start("r", items, at_once=at_once)
        for leading, gate in enumerate(gates):
            window = faults[leading : leading + at_once]
            until(lambda window=window: all(fault.times != 100 for fault in window))
            assert all(fault.times == 100 for fault in faults[leading + at_once :])
            gate.set()
        piece = rig.finished()
        assert piece.failed_at is None
        assert all(rig.holds(item) for item in items)


def test_beside_a_load_with_such_a_bound_no_other_is_read(backend: FaultyStorage) -> None:
    with closing(Rig(backend, options={"load_threads": 8}, memory_chunks=32)) as rig:
        first, second = make_chunks(rig.fmt, 4), make_chunks(rig.fmt, 4, seed=1)
        rig.put([*first, *second])
        gate = threading.Event()
        last = backend.add(Fault("read", f"*{first[-1].key.hex()}*", wait=gate))
        others = backend.add(Fault("read", f"*{second[0].key.hex()}*", times=100))
        for name, chunks in (("r", first), ("s", second)):
            rig.start(name, rig.items(chunks, 20), at_once=1)
        # The last chunk of the first is being read: nothing of it is left that others delay.
        until(lambda: others.times < 100)
        assert rig.count("loaded_bytes") >= 3 * rig.fmt.shards
        gate.set()
        assert last is not None
        assert all(piece.failed_at is None for piece in rig.all_ended(2).values())


def test_stores_that_hang_are_given_up_and_loads_go_on(backend: FaultyStorage) -> None:
    with closing(Rig(backend, backoff=Backoff(1000.0, 1000.0))) as rig:
        stored = make_chunks(rig.fmt, 2)
        rig.put(stored)
        gate = backend.hang("write")
        ended: list[str] = []
        prompts = [make_chunks(rig.fmt, 1, seed)[0] for seed in (7, 8)]
        for item in rig.items(prompts, 0):
            rig.fill(item)
            outcome = rig.store(item, on_done=lambda _, result: ended.append(result.value))
            assert outcome == StoreOutcome.QUEUED
        until(lambda: ended == ["failed", "failed"])
        until(lambda: rig.shelf.read_only)
        # Nobody waits for what the storage keeps, nor uses its buffers.
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.chunks_in_use == 2
        assert rig.store(rig.items(prompts, 0)[0]) == StoreOutcome.UNAVAILABLE
        assert rig.load(stored, 20)[0].failed_at is None
        gate.set()
        until(lambda: rig.chunks_in_use == 0)
        rig.guard.writes.retry_at = 0.0
        rig.put(prompts)
        assert rig.load(prompts, 40)[0].failed_at is None
        assert rig.guard.writes.state.value == "closed"


def test_no_store_is_taken_that_no_thread_is_left_for(
    backend: FaultyStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads_module, "MAX_STUCK", 1)
    with closing(Rig(backend)) as rig:
        gate = backend.hang("write")
        ended: dict[int, str] = {}
        chunks = make_chunks(rig.fmt, 3)
        *items, late = rig.items(chunks, 0)
        for item in items:
            rig.fill(item)
            # Seen missing later than any chunk was dropped: no parent was dropped after it.
            outcome = rig.store(
                item, age=-60.0, on_done=lambda c, result: ended.__setitem__(c.index, result.value)
            )
            assert outcome == StoreOutcome.QUEUED
        # The only thread is stuck; the queued store ends as well, and its memory is free.
        until(lambda: ended == {0: "failed", 1: "failed"})
        assert rig.transfer.drain(PATIENCE) == 0
        assert rig.chunks_in_use == 1
        assert not rig.shelf.read_only
        assert rig.store(late, age=-60.0) == StoreOutcome.UNAVAILABLE
        assert rig.count("dropped_chunks_error") == 1
        assert rig.count("dropped_chunks_unavailable") == 2
        gate.set()
        until(lambda: rig.chunks_in_use == 0)
        rig.put(chunks)
        assert rig.load(chunks, 20)[0].failed_at is None


def test_thread_that_is_given_up_as_its_call_returns_is_given_up_with_its_next_chunk(
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
            rig.store(
                item, age=-60.0, on_done=lambda c, result: ended.__setitem__(c.index, result.value)
            )
        until(lambda: ended == {0: "failed", 1: "failed"})
        for_ever.set()


# ------------------------------------------------------------------------- the end


def test_closing_publishes_what_is_staged(rig: Rig) -> None:
    chunks = make_chunks(rig.fmt, 5)
    for item in rig.items(chunks, 0):
        rig.fill(item)
        rig.store(item)
    assert rig.transfer.close(PATIENCE) == 0
    assert all(rig.path(chunk, s).is_file() for chunk in chunks for s in range(rig.fmt.shards))


def test_closing_waits_for_a_bounded_time_and_says_what_was_lost(
    rig: Rig, backend: FaultyStorage
) -> None:
    gate = backend.hang("write")
    for item in rig.items(make_chunks(rig.fmt, 3), 0):
        rig.store(item)
    assert rig.transfer.close(0.05) == 3
    assert rig.count("dropped_chunks_shutdown") == 3
    # Whether or not the thread has come back by now.
    assert rig.store(rig.items(make_chunks(rig.fmt, 1, 9), 0)[0]) == StoreOutcome.UNAVAILABLE
    gate.set()
    assert rig.store(rig.items(make_chunks(rig.fmt, 1, 9), 0)[0]) == StoreOutcome.UNAVAILABLE


def test_store_that_closing_overtakes_is_dropped_with_its_memory(
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
        assert rig.store(hangs) == StoreOutcome.QUEUED
        assert writing.wait(PATIENCE)
        outcome = step.submit(rig.store, slow)
        assert inside.wait(PATIENCE)
        assert rig.transfer.close() == 1
        gate.set()
        assert outcome.result(PATIENCE) == StoreOutcome.UNAVAILABLE
    # That of the store that hangs.
    assert rig.chunks_in_use == 1
    assert rig.count("dropped_chunks_unavailable") == 1
    hold.set()
    assert rig.transfer.drain(PATIENCE) == 0


def test_closing_ends_the_loads_that_hang(rig: Rig, backend: FaultyStorage) -> None:
    chunks = make_chunks(rig.fmt, 2)
    rig.put(chunks)
    gate = backend.hang("read")
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
        rig.begin()
    assert rig.guard.watchers == before[1]
    until(lambda: set(threading.enumerate()) <= before[0])


# ------------------------------------------------------------------------- anything
