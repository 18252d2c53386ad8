"""Loads of several kinds of KV: all of them or none; stores of each kind for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import closing, suppress
from pathlib import Path

import pytest

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.tiered import TieredShelf
from kvshelf.transfer.loads import Loads
from kvshelf.transfer.stores import StoreOutcome
from tests.sim.storage import FaultyStorage, posix
from tests.support.formats import format_of_kinds, hold_buffer
from tests.support.prompts import make_chunks
from tests.support.waiting import PATIENCE, until
from tests.transfer.byte_transfers import ByteTransfers, bytes_of

SHARDS: Mapping[Kind, int] = {FULL: 1, WINDOW: 2, STATE: 2}
FMT = format_of_kinds(SHARDS)


@pytest.fixture
def kinds(backend: FaultyStorage) -> Iterator[ByteTransfers]:
    with closing(ByteTransfers(backend)) as kinds:
        yield kinds
        backend.heal()


@pytest.fixture
def wanted() -> dict[Kind, list[Chunk]]:
    """What a hit of six chunks needs."""
    chunks = make_chunks(FMT, 6)
    return {FULL: chunks, WINDOW: chunks[4:], STATE: chunks[5:]}


# ------------------------------------------------------------------------------- loads


def test_what_was_stored_of_all_kinds_comes_back(
    kinds: ByteTransfers, wanted: dict[Kind, list[Chunk]]
) -> None:
    kinds.put(wanted)
    items = kinds.items(wanted)
    started = kinds.start("r", items)
    load = kinds.finished()
    assert load is started and load.finished and not load.failed and load.failures == []
    assert all(place.has_no_wrong_bytes and place.loaded for place in bytes_of(items))
    assert not kinds.transfers.loading
    assert kinds.count("stored_chunks") == kinds.count("loaded_chunks") == 9
    for name in ("stored", "loaded"):
        assert kinds.count(f"window_{name}_chunks") == 2
        assert kinds.count(f"state_{name}_chunks") == 1
        for kind, number in ((WINDOW, 2), (STATE, 1)):
            fmt = FMT.of(kind)
            size = sum(fmt.object_size(shard) for shard in range(fmt.shards))
            assert kinds.count(f"{kind}_{name}_bytes") == number * size
    assert kinds.count("loaded_bytes") == kinds.count("stored_bytes")


def test_load_that_failed_is_reported_when_nothing_is_written_for_it_any_more(
    kinds: ByteTransfers, wanted: dict[Kind, list[Chunk]]
) -> None:
    kinds.put(wanted)
    (state,) = wanted[STATE]
    kinds.path(STATE, state).unlink()
    begun, gate = threading.Event(), threading.Event()
    items = kinds.items(wanted)

    def hold() -> None:
        begun.set()
        gate.wait()

    bytes_of(items)[0].on_scatter = hold
    load = kinds.start("r", items)
    assert begun.wait(PATIENCE)
    until(lambda: load.failed)
    assert kinds.transfers.poll() == []
    assert kinds.transfers.loading and not load.finished
    gate.set()
    assert kinds.finished() is load
    written = sum(bool(place.loaded) for place in bytes_of(items))
    assert not kinds.transfers.loading
    assert written == sum(bool(place.loaded) for place in bytes_of(items))


def test_other_parts_are_not_read_on_after_one_has_failed(backend: FaultyStorage) -> None:
    chunks = make_chunks(FMT, 6)
    wanted: dict[Kind, list[Chunk]] = {FULL: chunks, STATE: chunks[5:]}
    with closing(ByteTransfers(backend, {FULL: 1, STATE: 2})) as kinds:
        kinds.put(wanted)
        kinds.path(STATE, chunks[5]).unlink()
        gate = backend.hang("read", "*-[0-9]-0of1.*")
        load = kinds.start("r", kinds.items(wanted))
        until(lambda: load.failed)
        # Threads that read into staging are not waited for.
        assert kinds.finished() is load
        assert load.pieces[FULL].leading == 0
        gate.set()
        # Two threads had begun to read chunks.
        assert backend.counts["open"] <= 2 + 2 * SHARDS[STATE]


def test_aborted_load_counts_once_and_is_still_reported(
    kinds: ByteTransfers, backend: FaultyStorage, wanted: dict[Kind, list[Chunk]]
) -> None:
    kinds.put(wanted)
    gate = backend.hang("read")
    load = kinds.start("r", kinds.items(wanted))
    kinds.transfers.cancel("r")
    assert load.cancelled
    gate.set()
    assert kinds.finished() is load
    assert kinds.count("cancelled_loads") == 1
    kinds.transfers.cancel("r")
    assert kinds.count("cancelled_loads") == 1


def test_part_that_cannot_be_started_fails_the_load_and_leaves_nothing_running(
    kinds: ByteTransfers, wanted: dict[Kind, list[Chunk]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds.put(wanted)

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(kinds.transfers.loads[STATE], "load", broken)
    kinds.start("r", kinds.items(wanted))
    assert kinds.finished().failed
    assert not kinds.transfers.loading


@pytest.mark.parametrize("calls", range(6))
def test_load_that_fails_before_its_first_piece_leaves_no_trace(
    kinds: ByteTransfers,
    wanted: dict[Kind, list[Chunk]],
    monkeypatch: pytest.MonkeyPatch,
    calls: int,
) -> None:
    kinds.put(wanted)
    answers = [0] * calls
    monkeypatch.setattr(Loads, "loading_bytes", property(lambda self: answers.pop()))
    with suppress(IndexError):
        kinds.start("r", kinds.items(wanted))
        kinds.finished()
    assert not kinds.transfers.loading


def test_no_load_is_without_an_end(kinds: ByteTransfers, wanted: dict[Kind, list[Chunk]]) -> None:
    kinds.start("empty", {kind: [] for kind in SHARDS})
    assert kinds.finished().request_id == "empty"


# ------------------------------------------------------------------------------- stores


def test_keys_of_what_was_repaired_tell_the_kind(tmp_path: Path) -> None:
    (chunk,) = make_chunks(FMT, 1)
    wanted: dict[Kind, list[Chunk]] = {kind: [chunk] for kind in SHARDS}
    expected = [kind_key(chunk.key, kind) for kind in SHARDS]
    with closing(ByteTransfers(FaultyStorage(posix(tmp_path / "shelf")))) as kinds:
        kinds.put(wanted)
        for kind, (item,) in kinds.items(wanted).items():
            assert kinds.store(kind, item, repair=True) == StoreOutcome.QUEUED
        assert kinds.transfers.drain(PATIENCE) == 0
        assert kinds.transfers.take_repaired() == expected
        assert kinds.transfers.take_repaired() == []


def test_only_full_chunks_are_dropped_because_one_before_them_was(
    backend: FaultyStorage,
) -> None:
    with closing(ByteTransfers(backend, memory_chunks=6)) as kinds:
        chunks = make_chunks(FMT, 8)
        gate = backend.hang("write")
        items = kinds.items(dict.fromkeys(SHARDS, chunks))
        outcomes: dict[Kind, list[StoreOutcome]] = {kind: [] for kind in items}
        for place in range(6):
            for kind, of_kind in items.items():
                outcomes[kind].append(kinds.store(kind, of_kind[place], age=60.0))
        assert all(StoreOutcome.QUEUED in of_kind for of_kind in outcomes.values())
        gate.set()
        backend.heal()
        assert kinds.transfers.drain(PATIENCE) == 0
        for kind, of_kind in items.items():
            for item in of_kind[6:]:
                outcomes[kind].append(kinds.store(kind, item, age=60.0))
                assert kinds.transfers.drain(PATIENCE) == 0
        assert outcomes[FULL][6:] == [StoreOutcome.PARENT_DROPPED] * 2
        assert StoreOutcome.PARENT_DROPPED in outcomes[FULL][:6]
        for kind in (WINDOW, STATE):
            assert StoreOutcome.STAGING_FULL in outcomes[kind]
            assert StoreOutcome.PARENT_DROPPED not in outcomes[kind]
            assert outcomes[kind][6:] == [StoreOutcome.QUEUED] * 2
            dropped = outcomes[kind].count(StoreOutcome.STAGING_FULL)
            assert kinds.count(f"{kind}_dropped_chunks") == dropped
        assert kinds.transfers.drain(PATIENCE) == 0


@pytest.mark.long
def test_what_is_left_at_the_end_is_counted_by_kind(backend: FaultyStorage) -> None:
    kinds = ByteTransfers(backend)
    (chunk,) = make_chunks(FMT, 1)
    gate = backend.hang("write")
    for kind, (item,) in kinds.items({kind: [chunk] for kind in SHARDS}).items():
        kinds.store(kind, item)
    assert kinds.transfers.drain(0.01) == 3
    assert kinds.transfers.close(0.0) == 3
    assert kinds.count("dropped_chunks_shutdown") == 3
    assert kinds.count("state_dropped_chunks") == kinds.count("window_dropped_chunks") == 1
    gate.set()
    kinds.guard.close()


# ------------------------------------------------------------------------------- tiers


def test_copies_in_tiers_are_of_one_kind(tmp_path: Path) -> None:
    (chunk,) = make_chunks(FMT, 1)
    with closing(ByteTransfers(posix(tmp_path / "shelf"))) as kinds:
        kinds.put({kind: [chunk] for kind in SHARDS})
        tier = DiskTier(tmp_path / "tier", 1 << 30, counters=kinds.counters)
        shelf = TieredShelf(kinds.storage, [tier])
        views = {kind: shelf.view(FMT.of(kind)) for kind in SHARDS}
        state = views[STATE]
        for shard in range(SHARDS[STATE]):
            buffer = bytearray(state.fmt.object_size(shard))
            assert state.load_all(chunk, [shard], [memoryview(buffer)], hold_buffer) is None
        assert tier.drain(PATIENCE)
        for kind in SHARDS:
            kinds.path(kind, chunk).unlink()
        refs = [ObjectRef(chunk, 0)]
        assert tier.holds(FMT.of(STATE), refs) == [True]
        for kind in (FULL, WINDOW):
            assert tier.holds(FMT.of(kind), refs) == [False]
            assert views[kind].find(refs) == [Presence.MISSING]
        assert state.find(refs) == [Presence.PRESENT]
        shelf.close()
