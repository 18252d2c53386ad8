"""Loads of many requests at once: who goes first, what is read, and what is not."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from kvshelf.backends import Reader
from kvshelf.backends.base import Deadlines, Properties
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.format.keys import Chunk
from kvshelf.kv.caches import HostKVCache
from kvshelf.transfer import loads
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, LoadPiece
from kvshelf.transfer.loads import Loads
from kvshelf.transfer.transfers import default_io_threads
from tests.sim.storage import FaultyStorage, posix
from tests.support.prompts import make_chunks
from tests.support.transfers import Rig
from tests.support.waiting import PATIENCE, until


class Gate(WrappedBackend):
    """Holds every object back until the test lets it go.

    Attributes
    ----------
    opened : list of str
        The names of all objects that were asked for.
    waiting : dict of str to int
        The objects that are held back, and the threads that wait for them.
    """

    def __init__(self, inner: FaultyStorage) -> None:
        super().__init__(inner)
        self.faults = inner
        self.opened: list[str] = []
        self.waiting: dict[str, int] = {}
        self._changed = threading.Condition()
        self._shut = False
        #: For each object that may pass and has not come yet, a part of its name.
        self._passes: list[str] = []

    def open(self, name: str) -> Reader:
        with self._changed:
            self.opened.append(name)
            self.waiting[name] = threading.get_ident()
            part = next((part for part in self._passes if part in name), None)
            if part is not None:
                self._passes.remove(part)
            if part is not None or not self._shut:
                del self.waiting[name]
            assert self._changed.wait_for(lambda: name not in self.waiting, PATIENCE)
        return self.inner.open(name)

    def shut(self) -> None:
        self.opened.clear()
        self._shut = True

    def let(self, objects: int, of: Chunk | None = None) -> None:
        """Let some objects pass, those of one chunk if it is given: first those that came first."""
        part = of.key.hex() if of else ""
        with self._changed:
            passing = [name for name in self.waiting if part in name][:objects]
            for name in passing:
                del self.waiting[name]
            self._passes += [part] * (objects - len(passing))
            self._changed.notify_all()

    def lift(self) -> None:
        with self._changed:
            self._shut = False
            self.waiting.clear()
            self._passes.clear()
            self._changed.notify_all()

    def reads_of(self, chunks: list[Chunk]) -> int:
        """How many of the objects of `chunks` were opened."""
        return sum(any(chunk.key.hex() in name for chunk in chunks) for name in self.opened)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(FaultyStorage(posix(tmp_path / "shelf")))


@pytest.fixture
def rig(gate: Gate) -> Iterator[Rig]:
    with closing(Rig(gate, blocks=400, memory_chunks=32, options={"load_threads": 2})) as rig:
        yield rig
        gate.lift()


def _next_open(gate: Gate, before: int) -> None:
    """Let one object go, and wait until a thread has come for the next."""
    gate.let(1)
    until(lambda: len(gate.opened) > before)


def test_short_load_is_not_held_up_by_a_long_one(rig: Rig, gate: Gate) -> None:
    long, short = make_chunks(rig.fmt, 60), make_chunks(rig.fmt, 2, 7)
    for chunks in (long, short):
        for first in range(0, len(chunks), 10):
            rig.put(chunks[first : first + 10])
    gate.shut()
    rig.start("long", rig.items(long, 20))
    until(lambda: len(gate.opened) == 2)
    rig.start("short", rig.items(short, 200))
    # The short one takes turns with the long one until it is over.
    for taken in range(2, 2 + 2 * 2 * rig.fmt.shards):
        _next_open(gate, taken)
    while not (ended := rig.ended(0.01)):
        gate.let(1)
    assert {name: load.failed_at for name, load in ended.items()} == {"short": None}
    assert gate.reads_of(short) == 2 * rig.fmt.shards
    assert gate.reads_of(long) < 60
    gate.lift()
    assert rig.all_ended(1).keys() == {"long"}


def test_equal_loads_end_one_after_the_other(rig: Rig, gate: Gate) -> None:
    prompts = [make_chunks(rig.fmt, 4, seed) for seed in range(3)]
    for chunks in prompts:
        rig.put(chunks)
    gate.shut()
    for number, chunks in enumerate(prompts):
        rig.start(str(number), rig.items(chunks, 20 + 20 * number))
    until(lambda: len(gate.opened) == 2)
    while len(gate.opened) < 12 * rig.fmt.shards:
        _next_open(gate, len(gate.opened))
    gate.lift()
    owners = [
        next(n for n, chunks in enumerate(prompts) if any(c.key.hex() in name for c in chunks))
        for name in gate.opened
    ]
    # Two threads may come in either order.
    first_of_last = owners.index(2)
    assert owners[: first_of_last - 1].count(0) == 4 * rig.fmt.shards
    assert all(load.failed_at is None for load in rig.all_ended(3).values())


def test_oldest_load_comes_to_its_end_whatever_comes_after_it(rig: Rig, gate: Gate) -> None:
    oldest = make_chunks(rig.fmt, 12)
    rig.put(oldest)
    others = [make_chunks(rig.fmt, 1, seed) for seed in range(1, 40)]
    for chunks in others:
        rig.put(chunks)
    gate.shut()
    rig.start("oldest", rig.items(oldest, 20))
    for number, chunks in enumerate(others):
        rig.start(f"short {number}", rig.items(chunks, 100 + 4 * number))
    until(lambda: len(gate.opened) == 2)
    while gate.reads_of(oldest) < len(oldest) * rig.fmt.shards:
        _next_open(gate, len(gate.opened))
    last = max(n for n, name in enumerate(gate.opened) if any(c.key.hex() in name for c in oldest))
    # Every other object is one of the oldest load's.
    assert last <= 2 * len(oldest) * rig.fmt.shards + 2


def test_objects_come_in_the_order_of_the_prompt_and_what_is_there_is_usable(
    rig: Rig, gate: Gate
) -> None:
    chunks = make_chunks(rig.fmt, 6)
    rig.put(chunks)
    gate.shut()
    items = rig.items(chunks, 20)
    load = rig.start("r", items)
    places = []
    for taken in range(2, 2 * 6 - 1):
        _next_open(gate, taken)
        places = [next(i for i, c in enumerate(chunks) if c.key.hex() in n) for n in gate.opened]
        assert all(abs(place - n // 2) <= 1 for n, place in enumerate(places))
        until(lambda taken=taken: load.leading >= (taken - 2) // 2)  # type: ignore[misc]
        assert all(rig.holds(item) for item in items[: load.leading])
    gate.lift()
    assert rig.finished().failed_at is None


def test_aborted_load_makes_no_further_reads(rig: Rig, gate: Gate) -> None:
    chunks, others = make_chunks(rig.fmt, 20), make_chunks(rig.fmt, 2, 7)
    rig.put(chunks[:10])
    rig.put(chunks[10:])
    rig.put(others)
    gate.shut()
    items = rig.items(chunks, 20)
    rig.start("r", items)
    until(lambda: len(gate.opened) == 2)
    assert rig.chunks_in_use == 1
    rig.transfer.cancel("r")
    assert rig.finished().cancelled
    rig.transfer.cancel("r")
    # What the reads under way write to is nobody else's before they return.
    assert rig.chunks_in_use == 1
    rig.start("s", rig.items(others, 100))
    gate.lift()
    assert rig.finished().failed_at is None
    until(lambda: rig.chunks_in_use == 0)
    assert gate.reads_of(chunks) == 2
    assert all(rig.untouched(item) for item in items)


def test_load_behind_one_that_reads_chunk_by_chunk_gets_all_threads_that_are_free(
    gate: Gate,
) -> None:
    with closing(Rig(gate, blocks=400, options={"load_threads": 4})) as rig:
        chunks, others = make_chunks(rig.fmt, 2), make_chunks(rig.fmt, 1, 7)
        rig.put(chunks)
        rig.put(others)
        gate.shut()
        rig.read(rig.items(chunks, 20), at_once=1, on_done=lambda _: None)
        until(lambda: len(gate.opened) == 2)
        rig.start("behind", rig.items(others, 100))
        time.sleep(0.1)
        assert gate.reads_of(others) == 0
        gate.let(2, chunks[0])
        time.sleep(0.1)
        assert gate.reads_of(others) == 2
        gate.lift()


# ------------------------------------------------------------------------- one read for several


def test_what_two_loads_want_is_read_once(rig: Rig, gate: Gate) -> None:
    chunks = make_chunks(rig.fmt, 3)
    rig.put(chunks)
    gate.shut()
    items = [rig.items(chunks, first) for first in (20, 40, 60)]
    for number, wanted in enumerate(items):
        rig.start(str(number), wanted)
    until(lambda: len(gate.opened) == 2)
    gate.lift()
    assert all(load.failed_at is None for load in rig.all_ended(3).values())
    assert all(rig.holds(item) for wanted in items for item in wanted)
    assert len(gate.opened) == 3 * rig.fmt.shards
    assert rig.count("loaded_chunks") == 9


def test_load_whose_later_chunk_fails_first_ends_at_the_earlier_one(gate: Gate) -> None:
    with closing(Rig(gate, blocks=400, options={"load_threads": 4})) as rig:
        chunks = make_chunks(rig.fmt, 3)
        rig.put(chunks)
        for chunk in chunks[1:]:
            rig.path(chunk, 0).unlink()
        gate.shut()
        load = rig.start("r", rig.items(chunks, 100))
        gate.let(2, chunks[0])
        until(lambda: gate.reads_of(chunks[1:]) == 4)
        for chunk in reversed(chunks[1:]):
            gate.let(2, chunk)
            until(lambda chunk=chunk: (chunk, Failure.MISSING) in load.failures)
        until(lambda: load.finished)
        assert load.failed_at == 1


def test_loads_that_share_a_read_that_hangs_fail_with_it_and_later_ones_read_anew(
    gate: Gate,
) -> None:
    with closing(Rig(gate, options={"load_threads": 2})) as rig:
        chunks = make_chunks(rig.fmt, 1)
        rig.put(chunks)
        hold = gate.faults.hang("read", f"*{chunks[0].key.hex()}-0-0of*", times=1)
        rig.start("r", rig.items(chunks, 20))
        shares: list[LoadPiece] = []
        # Its own deadline is far away.
        rig.read(rig.items(chunks, 40), bytes_ahead=1 << 40, on_done=shares.append)
        assert rig.finished().failed_at == 0
        until(lambda: rig.count("stuck_threads") == 1)
        until(lambda: [load.failed_at for load in shares] == [0])
        assert rig.load(chunks, 44)[0].failed_at is None
        before = [cache.clone() for cache in rig.caches]
        hold.set()
        until(lambda: rig.chunks_in_use == 0)
        assert all(map(torch.equal, before, rig.caches))


def test_thread_that_is_taken_for_kept_while_it_waits_is_watched_over_all_the_same(
    gate: Gate,
) -> None:
    with closing(Rig(gate, options={"load_threads": 2})) as rig:
        chunks = make_chunks(rig.fmt, 1)
        rig.put(chunks)
        loading = rig.loading
        # Their calls came back after they were seen to be late, and before anybody was told.
        until(lambda: len(loading._working) == 3)
        for thread in list(loading._working):
            assert not loading.on_late_call(thread.ident or 0)
        until(lambda: len(loading._working) == 3)
        gate.shut()
        hold = gate.faults.hang("read", f"*{chunks[0].key.hex()}*", times=2)
        rig.start("r", rig.items(chunks, 20))
        # Two threads come for an object each.
        until(lambda: len(gate.opened) == 2)
        gate.lift()
        assert rig.finished().failed_at == 0
        until(lambda: rig.count("breaker_closes") > 0)
        load = rig.start("s", rig.items(chunks, 40))
        assert rig.finished() is load
        assert load.failed_at is None
        hold.set()
        until(lambda: rig.chunks_in_use == 0)


# ------------------------------------------------------------------------- whole chunks


class Together(HostKVCache):
    """A cache that notes which whole chunks it gets."""

    got: list[list[int]]

    def scatter_chunk(
        self,
        shards: Sequence[int],
        slots: torch.Tensor,
        payloads: Sequence[torch.Tensor],
        fence: object = None,
    ) -> None:
        self.got.append(list(shards))
        super().scatter_chunk(shards, slots, payloads, fence)


def _together(rig: Rig) -> Together:
    cache = rig.cache
    cache.__class__ = Together
    assert isinstance(cache, Together)
    cache.got = []
    return cache


def _reading(rig: Rig, gate: Gate) -> tuple[Together, ChunkSlots, LoadPiece]:
    """Begin a load of two chunks; both objects of the first one are being read."""
    cache, chunks = _together(rig), make_chunks(rig.fmt, 2)
    rig.put(chunks)
    gate.shut()
    items = rig.items(chunks, 20)
    load = rig.start("r", items)
    until(lambda: len(gate.waiting) == 2)
    assert gate.reads_of(chunks[:1]) == 2
    return cache, items[0], load


def _leave(gate: Gate, item: ChunkSlots) -> str:
    """Let a thread have one object, until it goes on to the next chunk; return the other object."""
    gate.let(1, item.chunk)
    until(lambda: len(gate.opened) == 3)
    (other,) = [name for name in list(gate.waiting) if item.chunk.key.hex() in name]
    return other


def test_chunk_whose_objects_several_threads_read_is_scattered_once_by_the_last(
    rig: Rig, gate: Gate
) -> None:
    cache, item, load = _reading(rig, gate)
    _leave(gate, item)
    assert rig.untouched(item)
    assert cache.got == []
    gate.let(1, item.chunk)
    until(lambda: load.leading == 1)
    assert cache.got == [[0, 1]]
    assert rig.holds(item)
    gate.lift()
    assert rig.finished().failed_at is None
    until(lambda: rig.chunks_in_use == 0)


def test_slot_of_a_chunk_is_kept_until_the_thread_that_hangs_with_it_returns(
    rig: Rig, gate: Gate
) -> None:
    cache, item, _ = _reading(rig, gate)
    other = _leave(gate, item)
    assert rig.chunks_in_use == 2
    rig.loading.on_late_call(gate.waiting[other])
    assert rig.finished().failed_at == 0
    # Of the next chunk too: the load wants it no more, but a thread reads into its slot.
    assert rig.chunks_in_use == 2
    gate.lift()
    until(lambda: rig.chunks_in_use == 0)
    assert cache.got == []
    assert rig.untouched(item)


# ------------------------------------------------------------------------- early loads


def _early(rig: Rig, chunks: list[Chunk], ended: list[LoadPiece]) -> LoadPiece:
    none = torch.empty(0, dtype=torch.int64)
    items = [ChunkSlots(chunk, none) for chunk in chunks]
    return rig.read(items, early=True, keeps=True, on_done=ended.append)


def test_early_loads_leave_a_thread_to_others_and_go_on_behind_them(rig: Rig, gate: Gate) -> None:
    early, urgent = make_chunks(rig.fmt, 4), make_chunks(rig.fmt, 2, 7)
    rig.put(early)
    rig.put(urgent)
    gate.shut()
    ended: list[LoadPiece] = []
    piece = _early(rig, early, ended)
    until(lambda: len(gate.opened) == 1)
    assert not rig.transfer.loading
    rig.start("r", rig.items(urgent, 20))
    until(lambda: len(gate.opened) == 2)
    assert gate.reads_of(urgent) == 1
    gate.lift()
    assert rig.finished().failed_at is None
    until(lambda: bool(ended))
    assert sorted(piece.kept) == [0, 1, 2, 3]
    rig.loads.release(piece)
    names = [any(c.key.hex() in name for c in urgent) for name in gate.opened]
    assert names.index(True) == 1
    assert all(names[1:4])


def test_what_could_not_be_prefetched_is_not_said_to_be_computed(
    rig: Rig, caplog: pytest.LogCaptureFixture
) -> None:
    chunks = make_chunks(rig.fmt, 1)
    rig.put(chunks)
    rig.path(chunks[0], 0).unlink()
    ended: list[LoadPiece] = []
    _early(rig, chunks, ended)
    until(lambda: bool(ended))
    assert "was not prefetched" in caplog.text
    assert "computed" not in caplog.text
    assert rig.load(chunks, 20)[0].failed_at == 0
    assert "its tokens are computed instead" in caplog.text


def test_load_that_joins_an_early_one_has_the_memory_that_early_loads_lack(gate: Gate) -> None:
    with closing(Rig(gate, options={"load_threads": 1})) as rig:
        (chunk,) = make_chunks(rig.fmt, 1)
        (other,) = make_chunks(rig.fmt, 1, 7)
        rig.put([chunk])
        rig.context.shares.ahead.limit = 0
        held = rig.context.places.claim(other, rig.context.shares.ahead)
        assert held is not None
        ended: list[LoadPiece] = []
        piece = _early(rig, [chunk], ended)
        rig.start("r", rig.items([chunk], 20))
        assert rig.finished().failed_at is None
        until(lambda: bool(ended))
        assert piece.failures == [(chunk, Failure.UNAVAILABLE)]
        rig.host.ring.release(rig.context.shares.ahead, [held])


def test_load_has_time_for_the_bytes_of_other_kinds_before_it(rig: Rig) -> None:
    chunks = make_chunks(rig.fmt, 1)
    rig.put(chunks)
    ended: list[LoadPiece] = []
    ahead = rig.read(rig.items(chunks, 20), bytes_ahead=1 << 40, on_done=ended.append)
    until(lambda: len(ended) == 1)
    alone = rig.read(rig.items(chunks, 40), on_done=ended.append)
    until(lambda: len(ended) == 2)
    assert ahead.deadline > alone.deadline + 60.0


def test_early_loads_of_a_storage_at_rest_are_no_trouble(rig: Rig) -> None:
    chunks = make_chunks(rig.fmt, 2)
    rig.put(chunks)
    rig.guard.reads.trip("broken", 1000.0)
    ended: list[LoadPiece] = []
    _early(rig, chunks, ended)
    assert [load.failures for load in ended] == [[(chunks[0], Failure.UNAVAILABLE)]]
    assert rig.count("load_failures_unavailable") == 0


# ------------------------------------------------------------------------- how many threads


def test_threads_follow_the_storage() -> None:
    assert default_io_threads(Properties("ext4", concurrency=8, probe_cost=5e-6)) == (2, 1)
    assert default_io_threads(Properties("s3", concurrency=64, probe_cost=10e-3)) == (16, 4)
    assert default_io_threads(Properties("sftp", concurrency=4, probe_cost=10e-3)) == (4, 1)
    assert default_io_threads(Properties("odd", concurrency=1, probe_cost=10e-3)) == (2, 1)


class LookedAt(LoadPiece):
    """A load that counts how often a thread looks at it."""

    looks = 0

    @property
    def may_begin(self) -> bool:
        LookedAt.looks += 1
        return super().may_begin


def test_choice_among_hundreds_of_loads_looks_at_the_oldest_alone(rig: Rig) -> None:
    waiting = Loads(rig.context)
    for seed in range(300):
        items = [ChunkSlots(chunk, torch.empty(0)) for chunk in make_chunks(rig.fmt, 1, seed)]
        with waiting._lock:
            waiting._enqueue(LookedAt(rig.view, items, names=[seed]))
    for _ in range(4):
        with waiting._lock:
            assert waiting._take() is not None
    assert 0 < LookedAt.looks <= 2 * loads._COMPARED


def test_load_has_the_time_that_later_ones_may_take_from_it(
    gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Rig(gate, deadlines=Deadlines(read=5.0, bytes_per_second=1e3))) as rig:
        chunks = make_chunks(rig.fmt, 2)
        rig.put(chunks)
        now = [1000.0]
        clock = SimpleNamespace(monotonic=lambda: now[0], perf_counter=time.perf_counter)
        monkeypatch.setattr(loads, "time", clock)
        gate.shut()
        # The time of a load does not depend on what is read ahead.
        _early(rig, make_chunks(rig.fmt, 1, 7), [])
        both = [rig.start("first", rig.items(chunks, 20))]
        both.append(rig.start("second", rig.items(chunks, 40)))
        gate.let(2, chunks[0])
        until(lambda: [load.leading for load in both] == [1, 1])
        seconds = 2 * len(chunks) * rig.loads.chunk_bytes / 1e3
        for name, allowed in (("first", 5.0 + seconds), ("second", 5.0 + 2 * seconds)):
            now[0] = 1000.0 + allowed - 0.1
            assert not rig.ended()
            now[0] = 1000.0 + allowed + 0.1
            assert {name: load.failed_at for name, load in rig.ended().items()} == {name: 1}
        assert rig.shelf.available
        gate.lift()
