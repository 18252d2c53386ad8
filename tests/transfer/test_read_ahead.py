"""Memory for requests that wait: what comes in, what there is room for, when it is given back."""

from __future__ import annotations

import gc
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.transfer.load import Failure, LoadPiece
from kvshelf.transfer.read_ahead import ReadAhead
from tests.sim.storage import Fault, FaultyStorage, posix
from tests.support.prompts import make_chunks
from tests.support.waiting import until
from tests.transfer.byte_transfers import ByteTransfers, chunk_is_loaded

SHARDS, LENGTH = 2, 4


class Waiting(ByteTransfers):
    """Transfers of an engine that reads ahead: so many chunks may be in memory for that."""

    def __init__(self, root: Path, chunks: int = 100, *, keeps: bool = False) -> None:
        self.root = root
        self.storage_calls = FaultyStorage(posix(root))
        super().__init__(self.storage_calls, {FULL: SHARDS}, memory_chunks=2 * chunks, keeps=keeps)
        self.contexts[FULL].shares.ahead.limit = chunks * self.contexts[FULL].places.slot_bytes
        self.ahead = ReadAhead(self.contexts[FULL], self.transfers.loads[FULL])

    def stored(self, seed: int, count: int = LENGTH) -> list[Chunk]:
        """The chunks of a prompt that another engine has stored."""
        chunks = make_chunks(self.formats[FULL], count, seed)
        with closing(ByteTransfers(posix(self.root), {FULL: SHARDS}, memory_chunks=64)) as other:
            other.put({FULL: chunks})
        return chunks

    def load(self, chunks: list[Chunk]) -> bool:
        """Load chunks, as when their request is scheduled; return whether all came, and right."""
        items = self.items({FULL: chunks})
        self.start("load", items)
        self.finished()
        return all(chunk_is_loaded(item, self.formats[FULL]) for item in items[FULL])

    def has_kept(self, chunks: list[Chunk]) -> int:
        """Make a step; return how many leading chunks are kept in memory."""
        self.ahead.take_failures()
        return self.kept(chunks)

    def kept(self, chunks: list[Chunk]) -> int:
        """Return how many leading chunks are kept in memory for requests."""
        places, pins = self.contexts[FULL].places, self.contexts[FULL].shares.ahead._pins
        slots = [self.host.ring._named.get(places.name(chunk)) for chunk in chunks]
        return next((n for n, slot in enumerate(slots) if slot not in pins), len(chunks))

    def take_memory(self) -> Callable[[], None]:
        """Take all memory that may be read ahead into; return what gives it back."""
        size, taken = self.contexts[FULL].places.slot_bytes, []
        while slot := self.host.ring.claim(None, size, self.contexts[FULL].shares.ahead):
            taken.append(slot)
        return lambda: self.host.ring.release(self.contexts[FULL].shares.ahead, taken)

    def opened(self) -> int:
        return self.storage_calls.counts["open"]

    def close(self) -> None:
        self.storage_calls.let_go()
        super().close()


class ReadAheadModel(RuleBasedStateMachine):
    """Requests that wait, in the order of their arrival, over a storage that hangs and fails."""

    @initialize(room=st.sampled_from([2, 3, 5, 100]), keeps=st.booleans())
    def start(self, room: int, keeps: bool) -> None:
        self.stack = ExitStack()
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        self.ahead = self.stack.enter_context(
            closing(Waiting(Path(folder) / "shelf", room, keeps=keeps))
        )
        self.read_ahead = self.ahead.ahead
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
        #: Memory that others have.
        self.taken = ExitStack()

    @rule(name=st.sampled_from("abcd"), prompt=st.integers(0, 3), length=st.integers(1, LENGTH))
    def add(self, name: str, prompt: int, length: int) -> None:
        if name not in self.requests:
            self.requests[name], self.named[name] = [], []
            self.ended.discard(name)
        chunks, named = self.prompts[prompt][:length], self.named[name]
        if chunks[: len(named)] != named:
            return
        self.read_ahead.add(name, self.ahead.views[FULL], chunks[len(named) :])
        self.named[name] = chunks
        if name not in self.ended:
            self.requests[name] = chunks

    @rule(name=st.sampled_from("abcd"))
    def cancel_reads(self, name: str) -> None:
        self.read_ahead.cancel_reads(name)
        self.ended.add(name)

    @rule(name=st.sampled_from("abcd"))
    def release(self, name: str) -> None:
        self.read_ahead.release(name)
        self.requests.pop(name, None)

    @rule()
    def release_all(self) -> None:
        self.read_ahead.release_all()
        self.requests.clear()

    @rule(name=st.sampled_from("abcd"))
    def load(self, name: str) -> None:
        """A request is scheduled: its load begins, and its chunks are released."""
        chunks = self.requests.get(name, [])
        self.storage_calls.let_go()
        self.taken.close()
        if chunks and not self.is_resting:
            self.read_ahead.cancel_reads(name)
            assert self.ahead.load(chunks) != bool(self.damaged.intersection(chunks))
        self.release(name)

    @rule(operation=st.sampled_from(["open", "read"]), times=st.integers(1, 3))
    def hang(self, operation: str, times: int) -> None:
        self.storage_calls.hang(operation, "*.safetensors", times=times)

    @rule()
    def answer(self) -> None:
        self.storage_calls.let_go()

    @rule(prompt=st.integers(0, 2), place=st.integers(0, LENGTH - 1), gone=st.booleans())
    def damage(self, prompt: int, place: int, gone: bool) -> None:
        chunk = self.prompts[prompt][place]
        if chunk in self.damaged or self.ahead.contexts[FULL].places.leading([chunk]):
            return
        # All shards: memory may have one of them.
        for shard in range(SHARDS):
            path = self.ahead.path(FULL, chunk, shard)
            path.unlink() if gone else path.write_bytes(b"no")
        self.damaged.add(chunk)

    @rule()
    def use_memory_up(self) -> None:
        """What is read ahead of other kinds has all memory that may be used for that."""
        self.taken.callback(self.ahead.take_memory())

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
        for chunk, failure in self.read_ahead.take_failures():
            assert chunk in self.damaged
            assert failure in (Failure.MISSING, Failure.BAD)
            for name, chunks in self.requests.items():
                if chunk in chunks and name not in self.ended:
                    # What is behind is of no use.
                    self.requests[name] = chunks[: chunks.index(chunk)]
                    self.ended.add(name)
        ahead = self.ahead.contexts[FULL].shares.ahead
        assert ahead.pinned_bytes <= ahead.limit

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
        kept = {chunk for chunk in of_all if self.ahead.kept([chunk])}
        assert kept <= wanted
        assert len(kept) <= self.room
        # What is reserved for a request stays so until it is released.
        reserved = kept.union(*(self.requests[name] for name in self.ended & self.requests.keys()))
        for name, chunks in self.requests.items():
            if name not in self.ended and self.ahead.kept(chunks) < len(chunks):
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
            self.read_ahead.add("next", self.ahead.views[FULL], chunks)
            until(lambda: self.ahead.has_kept(chunks) == len(chunks))


TestReadAhead = ReadAheadModel.TestCase
TestReadAhead.settings = settings(max_examples=25, stateful_step_count=30)


@pytest.fixture
def ahead(tmp_path: Path) -> Iterator[Waiting]:
    with closing(Waiting(tmp_path / "shelf")) as ahead:
        yield ahead


def test_requests_that_waited_read_nothing_when_their_turn_comes(ahead: Waiting) -> None:
    chunks = ahead.stored(0)
    for name in ("one", "other"):
        ahead.ahead.add(name, ahead.views[FULL], chunks[:2])
        ahead.ahead.add(name, ahead.views[FULL], chunks[2:])
    until(lambda: ahead.has_kept(chunks) == LENGTH)
    time.sleep(1.0)
    # What both want is read once.
    assert ahead.opened() == LENGTH * SHARDS
    assert ahead.load(chunks)
    ahead.ahead.release("one")
    assert ahead.opened() == LENGTH * SHARDS
    assert ahead.has_kept(chunks) == LENGTH
    counts = ahead.counters.snapshot()
    assert counts["loaded_chunks"] == LENGTH
    assert counts["prefetched_objects"] == LENGTH * SHARDS
    assert counts["memory_tier_loaded_objects"] == LENGTH * SHARDS
    assert counts["prefetched_bytes"] == LENGTH * SHARDS * ahead.formats[FULL].object_size(0)
    ahead.ahead.release("other")
    assert not ahead.pinned_bytes
    assert "prefetched_unused_objects" not in ahead.counters.snapshot()
    more = ahead.stored(1, 1)
    ahead.ahead.add("third", ahead.views[FULL], more)
    until(lambda: ahead.has_kept(more) == 1)
    ahead.ahead.release("third")
    assert ahead.count("prefetched_unused_objects") == SHARDS


def test_chunks_in_memory_already_are_kept_up_to_the_share_of_read_ahead(tmp_path: Path) -> None:
    with closing(Waiting(tmp_path / "shelf", 4, keeps=True)) as ahead:
        chunks = make_chunks(ahead.formats[FULL], 6)
        ahead.put({FULL: chunks[:3]})
        ahead.put({FULL: chunks[3:]})
        ahead.ahead.add("r", ahead.views[FULL], chunks)
        until(lambda: ahead.has_kept(chunks) == 4)
        # Stores and loads of others go through the rest.
        for seed in range(1, 10):
            ahead.put({FULL: make_chunks(ahead.formats[FULL], 3, seed)})
        assert ahead.has_kept(chunks) == 4
        assert ahead.opened() == 0
        assert ahead.host.ring.stats().evicted_objects > 0
        # Nothing is kept for requests of weights that are gone.
        ahead.ahead.release_all()
        assert not ahead.pinned_bytes


def test_storage_that_rests_is_tried_once_a_second_and_nothing_grows(
    ahead: Waiting, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks = ahead.stored(0)
    loads, begun = ahead.transfers.loads[FULL], []
    load = loads.load

    def noted(piece: LoadPiece) -> None:
        begun.append(time.monotonic())
        load(piece)

    def loads_alive() -> int:
        gc.collect()
        return sum(type(one) is LoadPiece for one in gc.get_objects())

    before = loads_alive()
    monkeypatch.setattr(loads, "load", noted)
    ahead.guard.reads.trip("a test", 1000.0)
    ahead.ahead.add("r", ahead.views[FULL], chunks)
    for _ in range(500):
        assert ahead.ahead.take_failures() == []
        time.sleep(0.01)
    assert 5 <= len(begun) <= 6
    assert loads_alive() <= before + 2
    ahead.guard.reads.close()
    until(lambda: ahead.has_kept(chunks) == LENGTH)


def test_chunk_that_the_storage_fails_to_read_is_reported(ahead: Waiting) -> None:
    chunks = ahead.stored(0)
    error = TransientStorageError(5, "EIO")
    ahead.storage_calls.add(Fault("open", f"*{chunks[1].key.hex()}*", error=error))
    ahead.ahead.add("r", ahead.views[FULL], chunks)
    failures: list[tuple[Chunk, Failure]] = []
    until(lambda: bool(failures.extend(ahead.ahead.take_failures()) or failures))
    assert failures == [(chunks[1], Failure.ERROR)]
    assert ahead.has_kept(chunks) == 1


def test_chunk_that_is_read_when_its_request_gives_it_up_leaves_nothing(tmp_path: Path) -> None:
    with closing(Waiting(tmp_path / "shelf", LENGTH)) as ahead:
        chunks, others = ahead.stored(0), ahead.stored(1, LENGTH - 1)
        ahead.path(FULL, chunks[1]).unlink()
        gate = ahead.storage_calls.hang("read", f"*{chunks[2].key.hex()}*")
        ahead.ahead.add("r", ahead.views[FULL], chunks[:2])
        ahead.ahead.add("r", ahead.views[FULL], chunks[2:3])
        until(lambda: bool(ahead.ahead.take_failures()))
        gate.set()
        # The scheduler learns of the failure later.
        ahead.ahead.add("r", ahead.views[FULL], chunks[3:])
        # What the request needs no more keeps no room.
        ahead.ahead.add("next", ahead.views[FULL], others)
        until(lambda: ahead.has_kept(others) == len(others))
        assert ahead.kept(chunks) == 1


def test_request_that_ends_while_it_is_read_for_leaves_nothing(tmp_path: Path) -> None:
    with closing(Waiting(tmp_path / "shelf", LENGTH)) as ahead:
        chunks, others = ahead.stored(0), ahead.stored(1)
        gate = ahead.storage_calls.hang("read")
        ahead.ahead.add("r", ahead.views[FULL], chunks)
        until(lambda: ahead.opened() == 1)
        ahead.ahead.release("r")
        gate.set()
        time.sleep(1.0)
        assert ahead.has_kept(chunks) == 0
        assert ahead.opened() == 1
        assert not ahead.pinned_bytes
        assert ahead.count("cancelled_loads") == 0
        ahead.ahead.add("next", ahead.views[FULL], others)
        until(lambda: ahead.has_kept(others) == LENGTH)


def test_read_ahead_that_finds_no_memory_waits_for_none_and_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with closing(Waiting(tmp_path / "shelf", LENGTH)) as ahead:
        chunks = ahead.stored(0)
        give_back = ahead.take_memory()
        loads, begun = ahead.transfers.loads[FULL], list[LoadPiece]()
        load = loads.load
        monkeypatch.setattr(loads, "load", lambda piece: begun.append(piece) or load(piece))
        ahead.ahead.add("r", ahead.views[FULL], chunks)
        time.sleep(0.1)
        assert [load.finished for load in begun] == [True]
        assert ahead.has_kept(chunks) == 0
        give_back()
        until(lambda: ahead.has_kept(chunks) == LENGTH)
