"""Memory for requests that wait: what comes in, what there is room for, when it is given back."""

from __future__ import annotations

import gc
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.memory.size_classes import SizeClasses
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.transfer.load import Failure, Piece
from kvshelf.transfer.prefetch import Prefetcher
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.prompts import make_chunks
from tests.support.waiting import until
from tests.transfer.byte_transfers import ByteTransfers, chunk_is_loaded

SHARDS, LENGTH = 2, 4


class ReadAhead(ByteTransfers):
    """Transfers with memory for so many chunks in front, into which is read ahead."""

    def __init__(self, root: Path, chunks: int = 100, **options: Any) -> None:
        self.root = root
        self.storage_calls = FaultyStorage(posix(root))
        super().__init__(self.storage_calls, {FULL: SHARDS})
        self.transfers.end()
        rounded = SizeClasses(1 << 30).rounded(self.formats[FULL].object_size(0))
        self.tier = MemoryTier(chunks * SHARDS * rounded, counters=self.counters, lazy=True)
        self.memory_options = {"keeps": False, **options}
        self.begin(self.weights)
        self.memory = self.memories[FULL]
        self.prefetcher = Prefetcher(self.transfers.loads[FULL], self.memory)

    def stored(self, seed: int, count: int = LENGTH) -> list[Chunk]:
        """The chunks of a prompt that another engine has stored."""
        chunks = make_chunks(self.formats[FULL], count, seed)
        with closing(ByteTransfers(posix(self.root), {FULL: SHARDS}, staging_chunks=64)) as other:
            other.put({FULL: chunks})
        return chunks

    def load(self, chunks: list[Chunk]) -> bool:
        """Load chunks, as when their request is scheduled; return whether all came, and right."""
        items = self.items({FULL: chunks})
        self.transfers.load("load", items)
        self.finished()
        return all(chunk_is_loaded(item, self.formats[FULL]) for item in items[FULL])

    def has_kept(self, chunks: list[Chunk]) -> int:
        """Make a step; return how many leading chunks are kept in memory."""
        self.prefetcher.take_failures()
        return self.memory.kept(chunks)

    @property
    def pinned_bytes(self) -> int:
        assert self.tier is not None
        return self.tier.stats().pinned_bytes

    def opened(self) -> int:
        return self.storage_calls.counts["open"]

    def close(self) -> None:
        self.storage_calls.let_go()
        super().close()
        self.memory.close()


class PrefetchModel(RuleBasedStateMachine):
    """Requests that wait, in the order of their arrival, over a storage that hangs and fails."""

    @initialize(room=st.sampled_from([2, 3, 5, 100]), keeps=st.booleans())
    def start(self, room: int, keeps: bool) -> None:
        self.stack = ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.ahead = self.stack.enter_context(
            closing(ReadAhead(Path(folder) / "shelf", room, keeps=keeps))
        )
        self.prefetcher = self.ahead.prefetcher
        self.room, self.keeps = room, keeps
        self.prompts = [self.ahead.stored(seed) for seed in range(3)]
        # The last one begins as the first.
        self.prompts.append([*self.prompts[0][:2], *self.prompts[1][2:]])
        #: The chunks of requests that wait, in the order of their arrival: those that were named
        #: to be read, and those of them that are of use.
        self.named: dict[str, list[Chunk]] = {}
        self.requests: dict[str, list[Chunk]] = {}
        #: Of those, the requests for which nothing more is read.
        self.ended: set[str] = set()
        self.damaged: set[Chunk] = set()
        self.is_resting = False
        #: What others have of memory and staging.
        self.taken = ExitStack()

    @rule(name=st.sampled_from("abcd"), prompt=st.integers(0, 3), length=st.integers(1, LENGTH))
    def add(self, name: str, prompt: int, length: int) -> None:
        if name not in self.requests:
            self.requests[name], self.named[name] = [], []
            self.ended.discard(name)
        chunks, named = self.prompts[prompt][:length], self.named[name]
        if chunks[: len(named)] != named:
            return
        self.prefetcher.add(name, chunks[len(named) :])
        self.named[name] = chunks
        if name not in self.ended:
            self.requests[name] = chunks

    @rule(name=st.sampled_from("abcd"))
    def cancel_reads(self, name: str) -> None:
        self.prefetcher.cancel_reads(name)
        self.ended.add(name)

    @rule(name=st.sampled_from("abcd"))
    def release(self, name: str) -> None:
        self.prefetcher.release(name)
        self.requests.pop(name, None)

    @rule()
    def release_all(self) -> None:
        self.prefetcher.release_all()
        self.requests.clear()

    @rule(name=st.sampled_from("abcd"))
    def load(self, name: str) -> None:
        """A request is scheduled: its load begins, and its chunks are released."""
        chunks = self.requests.get(name, [])
        self.storage_calls.let_go()
        self.taken.close()
        if chunks and not self.is_resting:
            self.prefetcher.cancel_reads(name)
            assert self.ahead.load(chunks) != bool(self.damaged.intersection(chunks))
        self.release(name)

    @rule(operation=st.sampled_from(["open", "read"]), times=st.integers(1, 3))
    def hang(self, operation: str, times: int) -> None:
        gate = threading.Event()
        self.storage_calls.add(Fault(operation, "*.safetensors", wait=gate, times=times))

    @rule()
    def answer(self) -> None:
        self.storage_calls.let_go()

    @rule(prompt=st.integers(0, 2), place=st.integers(0, LENGTH - 1), gone=st.booleans())
    def damage(self, prompt: int, place: int, gone: bool) -> None:
        chunk = self.prompts[prompt][place]
        if chunk in self.damaged or self.ahead.memory.leading([chunk]):
            return
        # All shards: memory may have one of them.
        for shard in range(SHARDS):
            path = self.ahead.path(FULL, chunk, shard)
            path.unlink() if gone else path.write_bytes(b"no")
        self.damaged.add(chunk)

    @rule()
    def use_memory_up(self) -> None:
        """Loads of other kinds have all of the memory, and stores all of the staging."""
        pool, tier = self.ahead.pools[FULL], self.ahead.tier
        assert tier is not None
        while buffers := pool.acquire_for_load(timeout=0.0):
            self.taken.callback(pool.release, *buffers)
        for other in make_chunks(self.ahead.formats[FULL], 2 * self.room, seed=77):
            if (room := tier.reserve(self.ahead.formats[FULL], ObjectRef(other, 0))) is not None:
                self.taken.callback(room.release)

    @rule()
    def rest(self) -> None:
        """The circuit breaker of reads opens."""
        self.ahead.guard.reads.trip("a test", 1000.0)
        self.is_resting = True

    @rule(seconds=st.sampled_from([0.001, 0.01, 1.5]))
    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    @property
    def storage_calls(self) -> FaultyStorage:
        return self.ahead.storage_calls

    @invariant()
    def step(self) -> None:
        for chunk, failure in self.prefetcher.take_failures():
            assert chunk in self.damaged
            assert failure in (Failure.MISSING, Failure.BAD)
            for name, chunks in self.requests.items():
                if chunk in chunks and name not in self.ended:
                    # What is behind is of no use.
                    self.requests[name] = chunks[: chunks.index(chunk)]
                    self.ended.add(name)
        assert self.ahead.pinned_bytes <= self.ahead.tier.max_bytes

    @rule()
    def settle(self) -> None:
        """Without trouble memory is as full as it can be, and has what came first."""
        self.answer()
        self.taken.close()
        self.ahead.guard.reads.close()
        self.is_resting = False
        for _ in range(40):
            time.sleep(0.1)
            self.step()
        wanted = {chunk for chunks in self.requests.values() for chunk in chunks}
        of_all = {chunk for prompt in self.prompts for chunk in prompt}
        kept = {chunk for chunk in of_all if self.ahead.memory.kept([chunk])}
        assert kept <= wanted
        assert len(kept) <= self.room
        # What is reserved for a request stays so until it is released.
        reserved = kept.union(*(self.requests[name] for name in self.ended & self.requests.keys()))
        for name, chunks in self.requests.items():
            if name not in self.ended and self.ahead.memory.kept(chunks) < len(chunks):
                assert len(reserved) >= self.room
                # Nothing is read for those behind it.
                return

    def teardown(self) -> None:
        if not hasattr(self, "is_resting"):
            return
        with self.stack:
            self.settle()
            self.release_all()
            self.settle()
            assert not self.ahead.pinned_bytes
            entered = self.ahead.count("memory_tier_stored_objects")
            chunks = self.ahead.stored(9, 1)
            assert self.ahead.load(chunks)
            # Nothing is admitted any more for those that are gone.
            stored = self.ahead.count("memory_tier_stored_objects") - entered
            assert stored == SHARDS * self.keeps
            # Nothing has kept the room.
            chunks = self.ahead.stored(8, min(self.room, 9))
            self.prefetcher.add("next", chunks)
            until(lambda: self.ahead.has_kept(chunks) == len(chunks))


TestPrefetch = PrefetchModel.TestCase
TestPrefetch.settings = settings(max_examples=25, stateful_step_count=30)


@pytest.fixture
def ahead(tmp_path: Path) -> Iterator[ReadAhead]:
    with closing(ReadAhead(tmp_path / "shelf")) as ahead:
        yield ahead


def test_requests_that_waited_read_nothing_when_their_turn_comes(ahead: ReadAhead) -> None:
    chunks = ahead.stored(0)
    for name in ("one", "other"):
        ahead.prefetcher.add(name, chunks[:2])
        ahead.prefetcher.add(name, chunks[2:])
    until(lambda: ahead.has_kept(chunks) == LENGTH)
    time.sleep(1.0)
    # What both want is read once.
    assert ahead.opened() == LENGTH * SHARDS
    assert ahead.load(chunks)
    ahead.prefetcher.release("one")
    assert ahead.opened() == LENGTH * SHARDS
    assert ahead.has_kept(chunks) == LENGTH
    counts = ahead.counters.snapshot()
    assert counts["loaded_chunks"] == LENGTH
    assert counts["prefetched_objects"] == LENGTH * SHARDS
    assert counts["memory_tier_loaded_objects"] == LENGTH * SHARDS
    assert counts["prefetched_bytes"] == LENGTH * SHARDS * ahead.formats[FULL].payload_size(0)
    ahead.prefetcher.release("other")
    assert not ahead.pinned_bytes
    assert "prefetched_unused_objects" not in ahead.counters.snapshot()
    more = ahead.stored(1, 1)
    ahead.prefetcher.add("third", more)
    until(lambda: ahead.has_kept(more) == 1)
    ahead.prefetcher.release("third")
    assert ahead.count("prefetched_unused_objects") == SHARDS


def test_chunks_that_are_in_memory_already_are_kept_up_to_a_part_of_it(tmp_path: Path) -> None:
    with closing(ReadAhead(tmp_path / "shelf", 8, keeps=True, share=0.5)) as ahead:
        chunks = make_chunks(ahead.formats[FULL], 6)
        ahead.put({FULL: chunks})
        ahead.prefetcher.add("r", chunks)
        assert ahead.has_kept(chunks) == 4
        # Stores and loads of others go through the rest.
        others = make_chunks(ahead.formats[FULL], 6, seed=1)
        ahead.put({FULL: others})
        assert ahead.memory.leading(others[-1:])
        assert ahead.has_kept(chunks) == 4
        assert ahead.opened() == 0
        # Nothing is kept for requests of weights that are gone.
        ahead.memory.close()
        assert not ahead.pinned_bytes
        assert not ahead.memory.retain(ObjectRef(others[-1], 0), fresh=True)
        assert not ahead.pinned_bytes


def test_storage_that_rests_is_tried_once_a_second_and_nothing_grows(
    ahead: ReadAhead, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = ahead.stored(0)
    loads, begun = ahead.transfers.loads[FULL], []
    load = loads.load

    def noted(*args: Any, **options: Any) -> Piece:
        begun.append(time.monotonic())
        return load(*args, **options)

    def loads_alive() -> int:
        gc.collect()
        return sum(type(one) is Piece for one in gc.get_objects())

    before = loads_alive()
    monkeypatch.setattr(loads, "load", noted)
    ahead.guard.reads.trip("a test", 1000.0)
    ahead.prefetcher.add("r", chunks)
    for _ in range(500):
        assert ahead.prefetcher.take_failures() == []
        time.sleep(0.01)
    assert 5 <= len(begun) <= 6
    assert loads_alive() <= before + 2
    ahead.guard.reads.close()
    until(lambda: ahead.has_kept(chunks) == LENGTH)


def test_chunk_that_the_storage_fails_to_read_is_reported(ahead: ReadAhead) -> None:
    chunks = ahead.stored(0)
    error = TransientStorageError(5, "EIO")
    ahead.storage_calls.add(Fault("open", f"*{chunks[1].key.hex()}*", error=error))
    ahead.prefetcher.add("r", chunks)
    failures: list[tuple[Chunk, Failure]] = []
    until(lambda: bool(failures.extend(ahead.prefetcher.take_failures()) or failures))
    assert failures == [(chunks[1], Failure.ERROR)]
    assert ahead.has_kept(chunks) == 1


def test_chunk_that_is_read_when_its_request_gives_it_up_leaves_nothing(tmp_path: Path) -> None:
    with closing(ReadAhead(tmp_path / "shelf", LENGTH)) as ahead:
        chunks, others = ahead.stored(0), ahead.stored(1, LENGTH - 1)
        ahead.path(FULL, chunks[1]).unlink()
        gate = threading.Event()
        ahead.storage_calls.add(Fault("read", f"*{chunks[2].key.hex()}*", wait=gate))
        ahead.prefetcher.add("r", chunks[:2])
        ahead.prefetcher.add("r", chunks[2:3])
        until(lambda: bool(ahead.prefetcher.take_failures()))
        gate.set()
        # The scheduler learns of the failure later.
        ahead.prefetcher.add("r", chunks[3:])
        # What the request needs no more keeps no room.
        ahead.prefetcher.add("next", others)
        until(lambda: ahead.has_kept(others) == len(others))
        assert ahead.memory.kept(chunks) == 1


def test_request_that_ends_while_it_is_read_for_leaves_nothing(tmp_path: Path) -> None:
    with closing(ReadAhead(tmp_path / "shelf", LENGTH)) as ahead:
        chunks, others = ahead.stored(0), ahead.stored(1)
        gate = threading.Event()
        ahead.storage_calls.add(Fault("read", wait=gate))
        ahead.prefetcher.add("r", chunks)
        until(lambda: ahead.opened() == 1)
        ahead.prefetcher.release("r")
        gate.set()
        time.sleep(1.0)
        assert ahead.has_kept(chunks) == 0
        assert ahead.opened() == 1
        assert not ahead.pinned_bytes
        assert ahead.count("cancelled_loads") == 0
        ahead.prefetcher.add("next", others)
        until(lambda: ahead.has_kept(others) == LENGTH)


def test_object_that_is_retained_twice_is_dropped_at_once(tmp_path: Path) -> None:
    with closing(ReadAhead(tmp_path / "shelf", keeps=True)) as ahead:
        chunks = make_chunks(ahead.formats[FULL], 1)
        ahead.put({FULL: chunks})
        for _ in range(2):
            assert ahead.memory.retain(ObjectRef(chunks[0], 0))
        ahead.memory.drop([chunks[0].key])
        assert not ahead.pinned_bytes


def test_read_ahead_that_finds_no_memory_waits_for_none_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(ReadAhead(tmp_path / "shelf", LENGTH)) as ahead, ExitStack() as taken:
        chunks = ahead.stored(0)
        fmt, pool, tier = ahead.formats[FULL], ahead.pools[FULL], ahead.tier
        assert tier is not None
        while buffers := pool.acquire_for_load(timeout=0.0):
            taken.callback(pool.release, *buffers)
        for other in make_chunks(fmt, LENGTH, seed=1):
            for shard in range(SHARDS):
                room = tier.reserve(fmt, ObjectRef(other, shard))
                assert room is not None
                taken.callback(room.release)
        loads, begun = ahead.transfers.loads[FULL], []
        load = loads.load

        def noted(*args: Any, **options: Any) -> Piece:
            begun.append(load(*args, **options))
            return begun[-1]

        monkeypatch.setattr(loads, "load", noted)
        ahead.prefetcher.add("r", chunks)
        time.sleep(0.1)
        assert [load.finished for load in begun] == [True]
        assert ahead.has_kept(chunks) == 0
        taken.close()
        until(lambda: ahead.has_kept(chunks) == LENGTH)
