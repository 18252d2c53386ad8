"""A model of what is read ahead: requests that wait, memory with little room, and trouble."""

from __future__ import annotations

import tempfile
import threading
import time
from contextlib import ExitStack, closing
from pathlib import Path
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL
from kvshelf.memory.size_classes import SizeClasses
from kvshelf.shelf.view import ObjectRef
from kvshelf.tiers.memory_tier import MemoryTier
from kvshelf.transfer.load import Failure
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
        #: The chunks of requests that wait, in the order of their arrival.
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
            self.requests[name] = []
            self.ended.discard(name)
        known = self.requests[name]
        chunks = self.prompts[prompt][:length]
        if chunks[: len(known)] != known:
            return
        self.prefetcher.add(name, chunks[len(known) :])
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
TestPrefetch.settings = settings(max_examples=60, stateful_step_count=30)
