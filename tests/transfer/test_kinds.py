"""Loads of several kinds of KV: all of them or none; stores of each kind for itself."""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from kvshelf.backends import Backend, Deadlines
from kvshelf.backends.base import delete_one
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, STATE, WINDOW, Kind, kind_key
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.caches import DONE, KVMemory, PendingCopy
from kvshelf.kv.topology import ShardPlan
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import ObjectRef, Presence
from kvshelf.tiers.disk_tier import DiskTier
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.tiers.tiered import TieredShelf
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.load import Failure, Load
from kvshelf.transfer.loads import Loads
from kvshelf.transfer.prefetch import KindMemory
from kvshelf.transfer.shares import share_out
from kvshelf.transfer.staging import StagingPool
from kvshelf.transfer.stores import StoreOutcome
from kvshelf.transfer.transfers import Transfers
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.formats import format_of_kinds, make_format
from tests.support.prompts import make_chunks
from tests.support.waiting import PATIENCE, until

SHARDS: Mapping[Kind, int] = {FULL: 1, WINDOW: 2, STATE: 2}
FMT = format_of_kinds(SHARDS)
NONE = torch.empty(0, dtype=torch.int64)


def content(kind: Kind, chunk: Chunk, shard: int, size: int) -> bytes:
    """The payload of an object: different for every one."""
    seed = hashlib.sha256(kind_key(chunk.key, kind) + bytes((shard,))).digest()
    return random.Random(seed).randbytes(size)


class Place(KVMemory):
    """Where one kind of a chunk is, in place of blocks of a paged cache."""

    def __init__(self, kind: Kind, chunk: Chunk) -> None:
        self.kind = kind
        self.chunk = chunk
        self.loaded: dict[int, bytes] = {}
        self.fails = False

    def gather(self, slots: torch.Tensor, payloads: Sequence[torch.Tensor]) -> PendingCopy:
        for shard, payload in enumerate(payloads):
            data = bytearray(content(self.kind, self.chunk, shard, payload.numel()))
            payload.copy_(torch.frombuffer(data, dtype=torch.uint8))
        return DONE

    def scatter(
        self, shard: int, slots: torch.Tensor, payload: torch.Tensor, fence: object = None
    ) -> None:
        if self.fails:
            raise RuntimeError("the cache is gone")
        self.loaded[shard] = bytes(payload.numpy())

    @property
    def is_right(self) -> bool:
        """Whether all shards are here, as they were stored."""
        return self.loaded.keys() == set(range(SHARDS[self.kind])) and all(
            data == content(self.kind, self.chunk, shard, len(data))
            for shard, data in self.loaded.items()
        )


@dataclass
class Kinds:
    """Transfers of all kinds between :class:`Place` and a shelf."""

    backend: Backend
    kinds: tuple[Kind, ...] = (FULL, WINDOW, STATE)
    staging_chunks: int = 8
    deadlines: Deadlines | None = None
    counters: Counters = field(default_factory=Counters)

    def __post_init__(self) -> None:
        self.guard = GuardedBackend(self.backend, self.deadlines)
        self.shelf = Shelf(self.guard, self.counters)
        self.transfers = Transfers(self.context(kind) for kind in self.kinds)

    def context(self, kind: Kind) -> TransferContext:
        fmt = FMT.of(kind)
        size = max(fmt.object_size(shard) for shard in range(fmt.shards))
        room = self.staging_chunks * fmt.shards * -(-size // 4096) * 4096
        pool = StagingPool(room, size, together=fmt.shards)
        plan = ShardPlan.whole(fmt.shards)
        return TransferContext(self.shelf.view(fmt), None, pool, self.counters, plan)

    def store(self, kind: Kind, item: ChunkSlots, **options: Any) -> StoreOutcome:
        return self.transfers.stores[kind].store(item, **options)

    def items(self, chunks: Mapping[Kind, Sequence[Chunk]]) -> dict[Kind, list[ChunkSlots]]:
        return {
            kind: [ChunkSlots(chunk, NONE, Place(kind, chunk)) for chunk in of_kind]
            for kind, of_kind in chunks.items()
        }

    def put(self, chunks: Mapping[Kind, Sequence[Chunk]]) -> None:
        for kind, items in self.items(chunks).items():
            for item in items:
                assert self.store(kind, item) == StoreOutcome.QUEUED
        assert self.transfers.drain(PATIENCE) == 0

    def finished(self) -> Load:
        """Wait for one load to end."""
        while not (loads := self.transfers.poll(PATIENCE)):
            assert self.transfers.loading, "no load is running"
        (load,) = loads
        return load

    def delete(self, kind: Kind, chunk: Chunk, shard: int = 0) -> None:
        name = object_name(chunk, shard, SHARDS[kind], kind)
        assert delete_one(self.guard, f"{FMT.namespace.folder}/{name}")

    def count(self, name: str) -> float:
        return self.counters.snapshot().get(name, 0)

    def close(self) -> None:
        self.transfers.close()
        self.guard.close()


@pytest.fixture
def kinds(backend: FaultyStorage) -> Iterator[Kinds]:
    with closing(Kinds(backend)) as kinds:
        yield kinds
        backend.heal()


def places(items: Mapping[Kind, Sequence[ChunkSlots]]) -> list[Place]:
    found = [item.memory for of_kind in items.values() for item in of_kind]
    assert all(isinstance(place, Place) for place in found)
    return found  # type: ignore[return-value]


@pytest.fixture
def wanted() -> dict[Kind, list[Chunk]]:
    """What a hit of six chunks needs."""
    chunks = make_chunks(FMT, 6)
    return {FULL: chunks, WINDOW: chunks[4:], STATE: chunks[5:]}


# ------------------------------------------------------------------------------- loads


def test_what_was_stored_of_all_kinds_comes_back(
    kinds: Kinds, wanted: dict[Kind, list[Chunk]]
) -> None:
    kinds.put(wanted)
    items = kinds.items(wanted)
    started = kinds.transfers.load("r", items)
    load = kinds.finished()
    assert load is started and load.finished and not load.failed and load.failures == []
    assert all(place.is_right for place in places(items))
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


@pytest.mark.parametrize("kind", [FULL, WINDOW, STATE])
@pytest.mark.parametrize("place", [0, -1])
def test_a_piece_that_is_missing_fails_the_whole_load(
    kinds: Kinds, wanted: dict[Kind, list[Chunk]], kind: Kind, place: int
) -> None:
    kinds.put(wanted)
    gone = wanted[kind][place]
    kinds.delete(kind, gone)
    kinds.transfers.load("r", kinds.items(wanted))
    load = kinds.finished()
    assert load.failed and load.finished and not load.cancelled
    assert load.failures == [(kind, gone, Failure.MISSING)]
    assert kinds.count("cancelled_loads") == 0, "nobody aborted the request"
    # The next load is not disturbed by what the first one left.
    kinds.put({kind: [gone]})
    items = kinds.items(wanted)
    kinds.transfers.load("r", items)
    assert not kinds.finished().failed
    assert all(place.is_right for place in places(items))


def test_a_load_that_failed_is_reported_when_nothing_is_written_for_it_any_more(
    kinds: Kinds, backend: FaultyStorage, wanted: dict[Kind, list[Chunk]]
) -> None:
    kinds.put(wanted)
    (state,) = wanted[STATE]
    kinds.delete(STATE, state)
    begun, gate = threading.Event(), threading.Event()

    class Slow(Place):
        def scatter(
            self, shard: int, slots: torch.Tensor, payload: torch.Tensor, fence: object = None
        ) -> None:
            begun.set()
            gate.wait()
            super().scatter(shard, slots, payload)

    items = kinds.items(wanted)
    slow = Slow(FULL, wanted[FULL][0])
    items[FULL][0] = ChunkSlots(wanted[FULL][0], NONE, slow)
    load = kinds.transfers.load("r", items)
    assert begun.wait(PATIENCE)
    until(lambda: load.failed)
    assert kinds.transfers.poll() == []
    assert kinds.transfers.loading and not load.finished
    gate.set()
    assert kinds.finished() is load
    written = sum(bool(place.loaded) for place in places(items))
    assert not kinds.transfers.loading
    assert written == sum(bool(place.loaded) for place in places(items))


def test_other_parts_are_not_read_on_after_one_has_failed(
    backend: FaultyStorage, tmp_path: Path
) -> None:
    chunks = make_chunks(FMT, 6)
    wanted: dict[Kind, list[Chunk]] = {FULL: chunks, STATE: chunks[5:]}
    with closing(Kinds(backend, (FULL, STATE))) as kinds:
        kinds.put(wanted)
        kinds.delete(STATE, chunks[5])
        gate = threading.Event()
        backend.add(Fault("read", "*-[0-9]-0of1.*", wait=gate))
        load = kinds.transfers.load("r", kinds.items(wanted))
        until(lambda: load.failed)
        # Threads that read into staging are not waited for.
        assert kinds.finished() is load
        assert load.pieces[FULL].leading == 0
        gate.set()
        # Two threads had begun to read chunks.
        assert backend.counts["open"] <= 2 + 2 * SHARDS[STATE]


def test_an_aborted_load_counts_once_and_is_still_reported(
    kinds: Kinds, backend: FaultyStorage, wanted: dict[Kind, list[Chunk]]
) -> None:
    kinds.put(wanted)
    gate = threading.Event()
    backend.add(Fault("read", wait=gate))
    load = kinds.transfers.load("r", kinds.items(wanted))
    kinds.transfers.cancel("r")
    assert load.cancelled
    gate.set()
    assert kinds.finished() is load
    assert kinds.count("cancelled_loads") == 1
    kinds.transfers.cancel("r")
    assert kinds.count("cancelled_loads") == 1


def test_a_part_that_cannot_be_started_fails_the_load_and_leaves_nothing_running(
    kinds: Kinds, wanted: dict[Kind, list[Chunk]], monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds.put(wanted)

    def broken(*args: object, **options: object) -> None:
        raise RuntimeError("no memory")

    monkeypatch.setattr(kinds.transfers.loads[STATE], "load", broken)
    kinds.transfers.load("r", kinds.items(wanted))
    assert kinds.finished().failed
    assert not kinds.transfers.loading


@pytest.mark.parametrize("calls", range(6))
def test_load_that_fails_before_its_first_piece_leaves_no_trace(
    kinds: Kinds, wanted: dict[Kind, list[Chunk]], monkeypatch: pytest.MonkeyPatch, calls: int
) -> None:
    kinds.put(wanted)
    answers = [0] * calls
    monkeypatch.setattr(Loads, "loading_bytes", property(lambda self: answers.pop()))
    with suppress(IndexError):
        kinds.transfers.load("r", kinds.items(wanted))
        kinds.finished()
    assert not kinds.transfers.loading


def test_several_loads_end_for_themselves(kinds: Kinds) -> None:
    prompts = [make_chunks(FMT, 4, seed) for seed in range(6)]
    wanted: list[dict[Kind, list[Chunk]]] = [
        {FULL: chunks, WINDOW: chunks[2:], STATE: chunks[3:]} for chunks in prompts
    ]
    for each in wanted:
        kinds.put(each)
    for bad in (1, 4):
        kinds.delete(WINDOW, wanted[bad][WINDOW][0], shard=1)
    items = [kinds.items(each) for each in wanted]
    for number, of_load in enumerate(items):
        kinds.transfers.load(str(number), of_load)
    ended: dict[str, Load] = {}
    while kinds.transfers.loading:
        ended |= {load.request_id: load for load in kinds.transfers.poll(PATIENCE)}
    assert {name for name, load in ended.items() if load.failed} == {"1", "4"}
    for number, of_load in enumerate(items):
        if number not in (1, 4):
            assert all(place.is_right for place in places(of_load))


@pytest.mark.parametrize("kind", [FULL, STATE])
def test_a_part_that_hangs_ends_the_load_in_time(
    backend: FaultyStorage, wanted: dict[Kind, list[Chunk]], kind: Kind
) -> None:
    with closing(Kinds(backend)) as kinds:
        kinds.put(wanted)
        gate = threading.Event()
        pattern = "*-state-*" if kind == STATE else "*-[0-9]-0of1.*"
        backend.add(Fault("read", pattern, wait=gate))
        kinds.transfers.load("r", kinds.items(wanted))
        load = kinds.finished()
        assert load.failed and not load.cancelled
        assert {of for of, _, _ in load.failures} == {kind}
        reasons = {failure for _, _, failure in load.failures}
        # The read that is late opens the circuit breaker, which refuses those behind it.
        assert Failure.ERROR in reasons and reasons <= {Failure.ERROR, Failure.UNAVAILABLE}
        gate.set()


def test_loads_are_refused_as_a_whole_while_the_breaker_is_open(
    kinds: Kinds, wanted: dict[Kind, list[Chunk]]
) -> None:
    kinds.put(wanted)
    kinds.guard.reads.trip("a test", PATIENCE)
    items = kinds.items(wanted)
    kinds.transfers.load("r", items)
    (load,) = kinds.transfers.poll()
    assert {failure for _, _, failure in load.failures} == {Failure.UNAVAILABLE}
    assert not any(place.loaded for place in places(items))


def test_no_load_is_without_an_end(kinds: Kinds, wanted: dict[Kind, list[Chunk]]) -> None:
    kinds.transfers.load("empty", {kind: [] for kind in SHARDS})
    assert kinds.finished().request_id == "empty"


# ------------------------------------------------------------------------------- stores


def test_keys_of_what_was_repaired_tell_the_kind(tmp_path: Path) -> None:
    (chunk,) = make_chunks(FMT, 1)
    wanted: dict[Kind, list[Chunk]] = {kind: [chunk] for kind in SHARDS}
    expected = [kind_key(chunk.key, kind) for kind in SHARDS]
    with closing(Kinds(FaultyStorage(posix(tmp_path / "shelf")))) as kinds:
        kinds.put(wanted)
        for kind, (item,) in kinds.items(wanted).items():
            assert kinds.store(kind, item, repair=True) == StoreOutcome.QUEUED
        assert kinds.transfers.drain(PATIENCE) == 0
        assert kinds.transfers.take_repaired() == expected
        assert kinds.transfers.take_repaired() == []


def test_only_full_chunks_are_dropped_because_one_before_them_was(
    backend: FaultyStorage,
) -> None:
    with closing(Kinds(backend, staging_chunks=4)) as kinds:
        chunks = make_chunks(FMT, 8)
        gate = threading.Event()
        backend.add(Fault("write", wait=gate))
        outcomes: dict[Kind, list[StoreOutcome]] = {}
        items = kinds.items(dict.fromkeys(SHARDS, chunks))
        for kind, of_kind in items.items():
            outcomes[kind] = [kinds.store(kind, item, age=60.0) for item in of_kind[:6]]
            assert StoreOutcome.QUEUED in outcomes[kind]
        gate.set()
        backend.heal()
        assert kinds.transfers.drain(PATIENCE) == 0
        for kind, of_kind in items.items():
            outcomes[kind] += [kinds.store(kind, item, age=60.0) for item in of_kind[6:]]
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
    kinds = Kinds(backend)
    (chunk,) = make_chunks(FMT, 1)
    gate = threading.Event()
    backend.add(Fault("write", wait=gate))
    for kind, (item,) in kinds.items({kind: [chunk] for kind in SHARDS}).items():
        kinds.store(kind, item)
    assert kinds.transfers.drain(0.01) == 3
    assert kinds.transfers.close(0.0) == 3
    assert kinds.count("dropped_chunks_shutdown") == 3
    assert kinds.count("state_dropped_chunks") == kinds.count("window_dropped_chunks") == 1
    gate.set()
    kinds.guard.close()


def test_what_was_stored_is_known_by_kind_until_it_is_forgotten(kinds: Kinds) -> None:
    (chunk,) = make_chunks(FMT, 1)
    kinds.put({FULL: [chunk]})
    items = kinds.items({kind: [chunk] for kind in SHARDS})
    told = {kind: kinds.store(kind, item, age=60.0) for kind, (item,) in items.items()}
    assert told == {
        FULL: StoreOutcome.KNOWN,
        WINDOW: StoreOutcome.QUEUED,
        STATE: StoreOutcome.QUEUED,
    }
    assert kinds.transfers.drain(PATIENCE) == 0
    kinds.transfers.forget_stored()
    told = {kind: kinds.store(kind, item, age=60.0) for kind, (item,) in items.items()}
    assert set(told.values()) == {StoreOutcome.QUEUED}


# ------------------------------------------------------------------------------- tiers


def test_copies_in_tiers_are_of_one_kind(tmp_path: Path) -> None:
    (chunk,) = make_chunks(FMT, 1)
    with closing(Kinds(posix(tmp_path / "shelf"))) as kinds:
        kinds.put({kind: [chunk] for kind in SHARDS})
        tier = DiskTier(tmp_path / "tier", 1 << 30, counters=kinds.counters)
        kept = MemoryTier(1 << 20, counters=kinds.counters)
        memory = KindMemory(kept, FMT.of(STATE), kinds.counters)
        shelf = TieredShelf(kinds.shelf, [memory, tier])
        views = {kind: shelf.view(FMT.of(kind)) for kind in SHARDS}
        state = views[STATE]
        for shard in range(SHARDS[STATE]):
            buffer = bytearray(state.fmt.object_size(shard))
            state.load(ObjectRef(chunk, shard), memoryview(buffer))
        assert tier.drain(PATIENCE)
        for kind in SHARDS:
            kinds.delete(kind, chunk)
        refs = [ObjectRef(chunk, 0)]
        assert tier.holds(FMT.of(STATE), refs) == memory.holds(FMT.of(STATE), refs) == [True]
        for kind in (FULL, WINDOW):
            assert tier.holds(FMT.of(kind), refs) == memory.holds(FMT.of(kind), refs) == [False]
            assert views[kind].find(refs) == [Presence.MISSING]
            buffer = bytearray(FMT.of(kind).object_size(0))
            assert not memory.load(FMT.of(kind), refs[0], memoryview(buffer))
        assert state.find(refs) == [Presence.PRESENT]
        shelf.close()
        kept.close()


# ------------------------------------------------------------------------------- memory


@given(
    st.sampled_from([(FULL, STATE), (FULL, WINDOW), (FULL, WINDOW, STATE), (WINDOW, STATE)]),
    st.integers(0, 1 << 22),
)
def test_each_kind_gets_what_it_needs_and_all_together_no_more_than_there_is(
    some: tuple[Kind, ...], more: int
) -> None:
    formats = [FMT.of(kind) for kind in some]
    plans = {kind: ShardPlan.whole(SHARDS[kind]) for kind in some}
    with pytest.raises(ConfigError, match="staging has 100 bytes, but") as refused:
        share_out(100, formats, plans)
    needed = int(str(refused.value).partition("staging_bytes=")[2].split()[0])
    total = needed + more
    shares = share_out(total, formats, plans)
    assert list(shares) == list(some)
    assert sum(shares.values()) <= total
    for fmt in formats:
        sizes = [fmt.object_size(shard) for shard in range(fmt.shards)]
        with closing(StagingPool(shares[fmt.kind], max(sizes), together=fmt.shards)) as pool:
            assert pool.limit >= 2 * fmt.shards
    with pytest.raises(ConfigError, match=f"staging_bytes={needed}"):
        share_out(needed - 1, formats, plans)
    assert sum(share_out(100, formats, plans, chunks=0).values()) <= 100


def test_a_state_counts_a_quarter_when_memory_is_shared_out() -> None:
    plans = {kind: ShardPlan.whole(shards) for kind, shards in SHARDS.items()}
    formats: list[ObjectFormat] = [FMT.of(kind) for kind in SHARDS]
    shares = share_out(1 << 40, formats, plans)
    sizes = {
        fmt.kind: sum(fmt.object_size(shard) for shard in range(fmt.shards)) for fmt in formats
    }
    chunks = {kind: shares[kind] / sizes[kind] for kind in SHARDS}
    assert chunks[WINDOW] == pytest.approx(chunks[FULL])
    assert chunks[STATE] == pytest.approx(chunks[FULL] / 4)


def test_a_namespace_of_one_kind_uses_all_memory() -> None:
    fmt = make_format()
    plans: dict[Kind, ShardPlan] = {FULL: ShardPlan.whole(fmt.shards)}
    assert share_out(12345, [fmt], plans) == {FULL: 12345}
