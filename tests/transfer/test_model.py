"""A model of transfers: whatever a storage, its memory and an engine do, a load brings the right
bytes or says from where on it has none, and ends.
"""

from __future__ import annotations

import itertools
import tempfile
import threading
import time
import zlib
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from kvshelf.errors import NoSpaceStorageError, TransientStorageError
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.kinds import DRAFT, FULL, STATE, WINDOW, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.ring import Share, Slot
from kvshelf.shelf.view import ShelfView
from kvshelf.transfer.context import ChunkSlots
from kvshelf.transfer.load import Failure, Load
from kvshelf.transfer.promises import Promises
from kvshelf.transfer.read_ahead import ReadAhead
from kvshelf.transfer.stores import StoreOutcome, StoreResult
from tests.sim.storage import Fault, FaultyStorage, LendingMemory, posix
from tests.support.prompts import make_chunks, prompt
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until
from tests.transfer.byte_transfers import ByteTransfers, bytes_of, chunk_is_loaded, content

KINDS: list[dict[Kind, int]] = [
    {FULL: 2},
    {FULL: 1, WINDOW: 2, STATE: 2},
    {FULL: 2, DRAFT: 2},
    {FULL: 1, STATE: 1, DRAFT: 1},
]
PROMPTS, LENGTH = 3, 4
ATTEMPTS = [f"{number:032x}" for number in range(3)]
#: Chunks at its end that a hit needs of a kind; all where there is no number.
NEEDED: Mapping[Kind, int] = {WINDOW: 2, STATE: 1}
#: A drop counts also for a lookup that came so much later.
SLACK_SECONDS = 0.1
#: More than all calls of the step thread take that wait for nothing.
AT_ONCE_SECONDS = 0.05
any_prompt = st.integers(0, PROMPTS - 1)
any_length = st.integers(1, LENGTH)
any_kind = st.integers(0, 3)


@dataclass
class RunningLoad:
    """A load, and what is known of its chunks.

    Attributes
    ----------
    whole : dict
        How many leading chunks of each kind were whole on the shelf when it began.
    is_calm : bool
        It fails for nothing but what was wrong on the shelf when it began.
    """

    load: Load
    items: dict[Kind, list[ChunkSlots]]
    whole: dict[Kind, int]
    is_calm: bool
    is_impatient: bool
    is_cancelled: bool = False


@dataclass
class StoredChunks:
    """When chunks of one kind were published and dropped, by key, as far as stores must know.

    Attributes
    ----------
    fmt : ObjectFormat
        Of the kind and the namespace.
    prompts : list
        The chunks of each prompt.
    """

    fmt: ObjectFormat
    prompts: list[list[Chunk]]
    published_at: dict[bytes, float] = field(default_factory=dict)
    dropped_at: dict[bytes, float] = field(default_factory=dict)
    in_flight: Counter[bytes] = field(default_factory=Counter)
    #: Their threads may come back, and have published them all the same.
    given_up: set[bytes] = field(default_factory=set)

    def follows_dropped(self, chunk: Chunk, seen: float) -> bool:
        return self.dropped_at.get(chunk.parent, -1.0) >= seen - SLACK_SECONDS

    def outcome(self, chunk: Chunk, age: float, repair: bool, chained: bool) -> StoreOutcome:
        """What becomes of a store for which there is staging."""
        seen = time.monotonic() - age
        if self.in_flight[chunk.key]:
            return StoreOutcome.QUEUED
        if not repair and self.published_at.get(chunk.key, -1.0) >= seen:
            return StoreOutcome.KNOWN
        if chained and self.follows_dropped(chunk, seen):
            return StoreOutcome.PARENT_DROPPED
        return StoreOutcome.QUEUED


class TransferModel(RuleBasedStateMachine):
    """Loads, stores and read-ahead of an engine with all that may go wrong, against the shelf."""

    @initialize(
        shards=st.sampled_from(KINDS),
        load_threads=st.sampled_from([1, 2, 4]),
        memory_chunks=st.sampled_from([3, 16, 100]),
        keeps=st.booleans(),
        lends=st.booleans(),
        replicas=st.sampled_from([1, 1, 2]),
    )
    def start(self, lends: bool, **options: Any) -> None:
        self.stack = ExitStack()
        self.patch = self.stack.enter_context(pytest.MonkeyPatch.context())
        folder = self.stack.enter_context(tempfile.TemporaryDirectory())
        storage = posix(Path(folder) / "shelf")
        self.storage = FaultyStorage(storage)
        self.lending = LendingMemory(storage, self.storage)
        self.lending.lends = lambda name: False
        self.bytes = ByteTransfers(self.storage, lending=self.lending if lends else None, **options)
        self.threads = ExitStack()
        #: Slots of memory that the test has.
        self.taken: list[tuple[Share, Slot]] = []
        self.is_calm = True
        #: When objects last came onto the shelf.
        self.changed_at = 0.0
        self.numbers = itertools.count(1)
        self.loads: dict[str, RunningLoad] = {}
        self.ended: list[tuple[RunningLoad, list[dict[int, bytes]]]] = []
        #: Results of stores: the first that was not looked at, and whose they are.
        self.results: list[tuple[StoredChunks, Kind, Chunk, StoreResult, float]] = []
        self.reported: Counter[int] = Counter()
        self.queued = 0
        #: Objects that the test has damaged.
        self.damaged: set[Path] = set()
        self.broken: set[str] = set()
        self.promises = Promises(self.bytes.counters)
        #: Of kind full, of each namespace.
        self.views: list[ShelfView] = []
        self.ahead = ReadAhead(self.bytes.contexts[FULL], self.bytes.transfers.loads[FULL])
        self.begin_namespace()

    def begin_namespace(self) -> None:
        self.prompts = {
            kind: [
                KeyChain(fmt.namespace.digest, fmt.chunk_size).extend(
                    # The second begins as the first.
                    prompt(
                        LENGTH, seed, shared=2 * fmt.chunk_size * (seed < 2), unit=fmt.chunk_size
                    )
                )
                for seed in range(PROMPTS)
            ]
            for kind, fmt in self.bytes.formats.items()
        }
        self.stored = {
            kind: StoredChunks(fmt, self.prompts[kind]) for kind, fmt in self.bytes.formats.items()
        }
        self.views.append(self.bytes.views[FULL])
        self.read_ahead_chunks = [0] * PROMPTS

    def needed(self, kind: Kind, prompt: int, length: int) -> list[Chunk]:
        return self.prompts[kind][prompt][:length][-NEEDED.get(kind, length) :]

    def disturb(self) -> None:
        """From now on loads may fail though the shelf has what they need."""
        self.is_calm = False
        self.disturb_loads()

    def disturb_loads(self) -> None:
        for running in self.loads.values():
            running.is_calm = False

    # ------------------------------------------------------------------------- the engine

    @rule(
        number=any_kind,
        prompt=any_prompt,
        length=any_length,
        age=st.sampled_from([0.0, 60.0]),
        repair=st.booleans(),
        attempt=st.sampled_from([None, None, *ATTEMPTS]),
    )
    def store(
        self, number: int, prompt: int, length: int, age: float, repair: bool, attempt: str | None
    ) -> None:
        """Store the chunks of a prompt of one kind; another engine may wait for them."""
        kind = list(self.bytes.shards)[number % len(self.bytes.shards)]
        for chunk in self.needed(kind, prompt, length):
            self.store_chunk(kind, chunk, age, repair, attempt)

    def store_chunk(
        self, kind: Kind, chunk: Chunk, age: float, repair: bool, attempt: str | None = None
    ) -> None:
        stored = self.stored[kind]
        number, begun = next(self.numbers), time.monotonic()
        promises, view = self.promises, self.views[-1]
        promised = None if attempt is None else promises.watch(view, attempt)

        def ended(chunk: Chunk, result: StoreResult) -> None:
            self.reported[number] += 1
            stored.in_flight[chunk.key] -= 1
            self.changed_at = now = time.monotonic()
            if result.is_stored:
                stored.published_at[chunk.key] = now
            elif result is not StoreResult.LOST:
                stored.dropped_at[chunk.key] = now
                stored.given_up.add(chunk.key)
            self.results.append((stored, kind, chunk, result, begun))
            if promised is not None:
                assert attempt is not None
                if not result.is_stored:
                    self.broken.add(attempt)
                promised(chunk, result)

        chained = kind in (FULL, DRAFT)
        expected = {stored.outcome(chunk, age, repair, chained)}
        if chunk.index % self.bytes.replicas:
            # Another worker writes it.
            expected = {StoreOutcome.KNOWN}
            if chained and stored.follows_dropped(chunk, begun - age):
                stored.dropped_at[chunk.key] = begun
        # What is read ahead may lie so that larger chunks have no room.
        in_use = self.bytes.pinned_bytes
        (item,) = self.bytes.items({kind: [chunk]})[kind]
        outcome = self.bytes.store(
            kind, item, repair=repair, age=age, promised=promised is not None, on_done=ended
        )
        assert time.monotonic() - begun < AT_ONCE_SECONDS
        # Another thread may have run meanwhile.
        expected.add(stored.outcome(chunk, age, repair, chained))
        if outcome is StoreOutcome.QUEUED:
            self.queued += 1
            stored.in_flight[chunk.key] += 1
            if not self.reported[number]:
                stored.dropped_at.pop(chunk.key, None)
        elif outcome is not StoreOutcome.KNOWN:
            stored.dropped_at[chunk.key] = begun
        if promised is not None:
            assert attempt is not None
            promises.note(view, attempt, outcome)
            if outcome not in (StoreOutcome.QUEUED, StoreOutcome.KNOWN):
                self.broken.add(attempt)
        if outcome not in expected:
            # A thread that has ended a store has not told of it yet.
            time.sleep(0.001)
            expected.add(stored.outcome(chunk, time.monotonic() - begun + age, repair, chained))
        if outcome in expected:
            return
        if outcome is StoreOutcome.STAGING_FULL:
            assert in_use and StoreOutcome.QUEUED in expected, "memory is full of nothing"
        elif outcome is StoreOutcome.KNOWN:
            assert chunk.key in stored.given_up
        elif outcome is StoreOutcome.QUEUED:
            # A store notes its end a moment before it tells of it.
            assert stored.outcome(chunk, age - 0.01, repair, chained) is outcome
        else:
            assert outcome is StoreOutcome.UNAVAILABLE and not self.is_calm, (outcome, expected)

    @rule()
    def forget_stored(self) -> None:
        self.bytes.transfers.forget_stored()
        for stored in self.stored.values():
            stored.published_at.clear()

    @rule(
        prompt=any_prompt,
        length=any_length,
        patience=st.sampled_from([(), (), (), (0.0,), (5.0,)]),
        at_once=st.sampled_from([0, 0, 1]),
    )
    def load(self, prompt: int, length: int, patience: tuple[float, ...], at_once: int) -> None:
        begun = time.monotonic()
        items = self.bytes.items(
            {kind: self.needed(kind, prompt, length) for kind in self.bytes.shards}
        )
        whole = {
            kind: next(
                (
                    place
                    for place, item in enumerate(of_kind)
                    if not all(
                        self.bytes.has(kind, item.chunk, shard)
                        for shard in range(self.bytes.shards[kind])
                    )
                ),
                len(of_kind),
            )
            for kind, of_kind in items.items()
        }
        name = f"load {next(self.numbers)}"
        load = self.bytes.start(name, items, patience, at_once)
        assert time.monotonic() - begun < AT_ONCE_SECONDS
        # It may share a read that was begun before the objects were there.
        shares = begun < self.changed_at + 1.0
        is_calm = self.is_calm and not shares
        self.loads[name] = RunningLoad(load, items, whole, is_calm, bool(patience))

    @rule(number=st.integers(0, 9))
    def cancel(self, number: int) -> None:
        if not self.loads:
            return
        running = list(self.loads.values())[number % len(self.loads)]
        running.is_cancelled = not running.load.finished
        self.bytes.transfers.cancel(running.load.request_id)

    @rule(prompt=any_prompt, length=any_length)
    def read_ahead(self, prompt: int, length: int) -> None:
        known = self.read_ahead_chunks[prompt]
        self.ahead.add(str(prompt), self.views[-1], self.prompts[FULL][prompt][known:length])
        self.read_ahead_chunks[prompt] = max(known, length)

    @rule(prompt=any_prompt, stays=st.booleans())
    def end_reading_ahead(self, prompt: int, stays: bool) -> None:
        if stays:
            self.ahead.cancel_reads(str(prompt))
        else:
            self.ahead.release(str(prompt))
            self.read_ahead_chunks[prompt] = 0

    @rule(seconds=st.sampled_from([0.001, 0.3, 7.0, 100.0]))
    def wait(self, seconds: float) -> None:
        """Let threads run while the engine makes no step."""
        time.sleep(seconds)

    @rule()
    def change_weights(self) -> None:
        """Go on with new weights, as a worker does: it gives loads up, and stores are published."""
        self.disturb_loads()
        for running in self.loads.values():
            running.is_cancelled = running.is_cancelled or not running.load.finished
            self.bytes.transfers.cancel(running.load.request_id)
        self.ahead.release_all()
        self.bytes.begin(f"user:weights {next(self.numbers)}")
        self.begin_namespace()

    # ------------------------------------------------------------------------- the storage

    @rule(number=any_kind, prompt=any_prompt, length=any_length)
    def another_engine_stores(self, number: int, prompt: int, length: int) -> None:
        kind = list(self.bytes.shards)[number % len(self.bytes.shards)]
        for chunk in self.needed(kind, prompt, length):
            for shard in range(self.bytes.shards[kind]):
                self.write_object(kind, chunk, shard)

    def write_object(self, kind: Kind, chunk: Chunk, shard: int) -> None:
        fmt, path = self.bytes.formats[kind], self.bytes.path(kind, chunk, shard)
        data = bytearray(fmt.object_size(shard))
        data[fmt.data_offset :] = content(kind, chunk, shard, len(data) - fmt.data_offset)
        fmt.seal(memoryview(data), chunk, shard)
        self.changed_at = time.monotonic()
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(data)

    @rule(
        number=any_kind,
        prompt=any_prompt,
        place=st.integers(0, LENGTH - 1),
        shard=st.integers(0, 1),
        how=st.sampled_from(["flip", "cut", "remove", "exchange"]),
    )
    def damage(self, number: int, prompt: int, place: int, shard: int, how: str) -> None:
        kind = list(self.bytes.shards)[number % len(self.bytes.shards)]
        chunks = self.prompts[kind][prompt]
        shard %= self.bytes.shards[kind]
        path = self.bytes.path(kind, chunks[place], shard)
        if not path.is_file():
            return
        self.disturb_loads()
        self.damaged.add(path)
        data = bytearray(path.read_bytes())
        if how == "remove":
            path.unlink()
            return
        if how == "cut":
            del data[-7:]
        elif how == "flip":
            data[-1] ^= 1
        else:
            other = self.bytes.path(kind, chunks[place - 1], shard)
            data[:] = other.read_bytes() if other.is_file() else b""
        path.write_bytes(data)

    @rule(
        operation=st.sampled_from(["open", "read", "write", "stat", "pin", "publish"]),
        how=st.sampled_from(["fail", "full", "hang", "late", "slow", "short", "damage"]),
        times=st.integers(1, 3),
    )
    def fail(self, operation: str, how: str, times: int) -> None:
        """Let the next calls of one kind fail, hang, come late, or bring wrong bytes."""
        self.disturb()
        fault = Fault(operation, "*.safetensors", times=times)
        if how == "fail":
            fault.error = TransientStorageError(5, "EIO")
        elif how == "full":
            fault.error = NoSpaceStorageError(28, "ENOSPC")
        elif how == "hang":
            fault.wait = threading.Event()
        elif how in ("late", "slow"):
            fault.wait = 8.0 if how == "late" else 0.2
        elif operation == "read":
            fault.damage = bytearray.reverse if how == "damage" else lambda data: data.pop()
        self.storage.add(fault)

    @rule()
    def answer(self) -> None:
        """Let all calls that hang go on."""
        self.storage.let_go()

    @rule(share=st.integers(0, 3))
    def lend(self, share: int) -> None:
        """Lend a part of the objects from now on."""
        self.lending.lends = lambda name: zlib.crc32(name.encode()) % 3 < share

    # ------------------------------------------------------------------------- the machine

    @rule()
    def use_memory_up(self) -> None:
        """Stores and what is read ahead have all memory that they may have: loads go on."""
        ring = self.bytes.host.ring
        contexts = self.bytes.contexts.values()
        for share in [one for of in contexts for one in (of.shares.stores, of.shares.ahead)]:
            while slot := ring.claim(None, 4096, share):
                self.taken.append((share, slot))

    @rule()
    def free_memory(self) -> None:
        while self.taken:
            share, slot = self.taken.pop()
            self.bytes.host.ring.release(share, [slot])

    @rule()
    def refuse_threads(self) -> None:
        self.disturb()
        self.allow_threads()
        refused = none_can_be_started(self.patch, "kvshelf-load", "kvshelf-store")
        self.threads.enter_context(refused)

    @rule()
    def allow_threads(self) -> None:
        self.threads.close()

    @rule()
    def settle(self) -> None:
        """End all trouble, and wait until nothing of it is left."""
        self.answer()
        self.free_memory()
        self.allow_threads()
        until(lambda: not self.notice_ends() and not self.loads, "loads end", 600.0)
        guard = self.bytes.guard
        until(lambda: guard.reads.is_closed, "loads are tried again", 600.0)
        for seed in range(100, 110):
            if not guard.writes.is_closed:
                # A storage that refused a store is tried again by a later one.
                time.sleep(61.0)
                self.store_chunk(
                    FULL, make_chunks(self.bytes.formats[FULL], 1, seed)[0], 0.0, False
                )
                self.bytes.transfers.drain(PATIENCE)
        assert guard.writes.is_closed
        assert self.bytes.transfers.drain(PATIENCE) == 0
        kept = self.bytes.contexts[FULL].shares.ahead
        until(lambda: self.bytes.pinned_bytes <= kept.pinned_bytes, "memory is free", 600.0)
        self.is_calm = True

    # ------------------------------------------------------------------------- what must hold

    @invariant()
    def notice_ends(self) -> None:
        """Check all loads that have ended, and the results of stores."""
        self.ahead.take_failures()
        for load in self.bytes.transfers.poll():
            running = self.loads.pop(load.request_id)
            self.check_load(running)
            brought = [dict(place.loaded) for place in bytes_of(running.items)]
            self.ended = [*self.ended[-9:], (running, brought)]
        for running, brought in self.ended:
            # Nothing is written for a load that has ended.
            assert [place.loaded for place in bytes_of(running.items)] == brought
        results, self.results = self.results, []
        for stored, kind, chunk, result, _ in results:
            if result.is_stored:
                self.check_stored(stored, kind, chunk)

    def check_load(self, running: RunningLoad) -> None:
        load = running.load
        assert load.finished
        assert load.cancelled == running.is_cancelled
        for kind, items in running.items.items():
            piece, fmt = load.pieces[kind], self.bytes.formats[kind]
            assert piece.finished and piece.leading >= piece.wanted
            assert all(place.has_no_wrong_bytes for place in bytes_of({kind: items}))
            assert all(chunk_is_loaded(item, fmt) for item in items[: piece.leading])
            assert bool(piece.failures) == (piece.failed_at is not None)
            reasons = {failure for _, failure in piece.failures}
            assert running.is_impatient or Failure.CUT not in reasons
            if running.is_calm and not running.is_impatient:
                assert reasons <= {Failure.MISSING, Failure.BAD}
        if running.is_calm and not (running.is_impatient or load.cancelled):
            self.check_calm_load(running)

    @property
    def in_memory(self) -> bool:
        """Whether memory may have what the shelf lacks."""
        return self.bytes.keeps or self.bytes.host.ring.has_content

    def check_calm_load(self, running: RunningLoad) -> None:
        """A load fails where the shelf lacks something, unless memory has it, and only then."""
        load = running.load
        lacking = [kind for kind in load.needed if running.whole[kind] < len(running.items[kind])]
        assert load.failed <= bool(lacking)
        if lacking and not self.in_memory and self.bytes.lending is None:
            assert load.failed
            if len(load.needed) == 1:
                assert load.pieces[FULL].failed_at == running.whole[FULL]

    def check_stored(self, stored: StoredChunks, kind: Kind, chunk: Chunk) -> None:
        """What was stored is in the namespace of its chunk, whatever the weights are now."""
        for shard in range(self.bytes.shards[kind]):
            path = self.bytes.path(kind, chunk, shard, stored.fmt)
            known = any(chunk in prompt for prompt in stored.prompts)
            if known and path not in self.damaged:
                assert self.bytes.has(kind, chunk, shard, stored.fmt)

    def teardown(self) -> None:
        if not hasattr(self, "promises"):
            return
        with self.stack:
            self.settle()
            opened = self.bytes.count("breaker_opens")
            self.forget_stored()
            self.comes_back()
            self.ahead.release_all()
            self.promises.close(PATIENCE)
            self.check_markers(opened)
            self.bytes.close()
            # Each store that was queued ends once.
            assert Counter(self.reported.values())[1] == self.queued == self.reported.total()
            assert all(loan.released == 1 for loan in self.lending.loans)
            until(lambda: not self.bytes.pinned_bytes, "memory is free")

    def check_markers(self, breakers_opened: float) -> None:
        """A marker tells of each broken promise, unless the storage took no writes."""
        marked: set[str] = set()
        for view in self.views:
            found = view.on_storage.gave_up(ATTEMPTS)
            marked |= {attempt for attempt, there in zip(ATTEMPTS, found, strict=True) if there}
        assert marked <= self.broken
        if not breakers_opened:
            assert marked == self.broken

    def comes_back(self) -> None:
        """All that is stored now can be loaded, whatever was before."""
        self.bytes.replicas = 1
        for number in range(PROMPTS):
            for kind in self.bytes.shards:
                for chunk in self.prompts[kind][number]:
                    for shard in range(self.bytes.shards[kind]):
                        path = self.bytes.path(kind, chunk, shard)
                        path.unlink(missing_ok=True)
                        self.write_object(kind, chunk, shard)
        for number in range(PROMPTS):
            self.load(number, LENGTH, (), 0)
        until(lambda: not self.notice_ends() and not self.loads)


TestTransfers = TransferModel.TestCase
TestTransfers.settings = settings(max_examples=60, stateful_step_count=30)
