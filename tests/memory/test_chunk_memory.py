"""The host memory for chunks: how it is taken, shared out and given back, and where objects lie."""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from kvshelf import pages
from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, WINDOW, Kind
from kvshelf.format.objects import ObjectFormat
from kvshelf.kv.topology import ShardPlan
from kvshelf.memory import chunk_memory
from kvshelf.memory.arena import Arena
from kvshelf.memory.chunk_memory import ChunkMemory, ChunkPlaces, Shares
from kvshelf.memory.ring import ALIGNMENT as PAGE
from kvshelf.memory.ring import Share, Slot, rounded
from kvshelf.metrics import Counters
from kvshelf.pages import address_of
from kvshelf.server.segment import Segment
from kvshelf.shelf.shelf import Shelf, open_shelf
from kvshelf.transfer.context import TransferContext
from tests.native.fake_cudart import fake_cudart
from tests.support.formats import format_of_kinds, make_format, sealed
from tests.support.memory import resident
from tests.support.prompts import make_chunks, make_tail
from tests.support.threads import named, none_can_be_started
from tests.support.waiting import until

MIB = 1 << 20
PIECE = 2 * MIB
GPU = torch.device("cuda", 0)
FMT = make_format(shards=2, chunk_size=512)
CHUNKS = make_chunks(FMT, 8)
SLOT = sum(rounded(FMT.object_size(shard)) for shard in range(2))
THREAD = "kvshelf-memory"


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(chunk_memory, "_PIECE", PIECE)


class System:
    """What the system says of its memory.

    Attributes
    ----------
    free : int
        Bytes that are free.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.free = 1 << 40
        patch.setattr(pages, "free_memory", lambda: (self.free, "what is left"))


class Arenas:
    """The pieces that arenas take, and when arenas are closed.

    Attributes
    ----------
    pieces : list of tuple
        Begin and end of each piece that a thread took.
    closed : int
        How often an arena was closed.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.pieces: list[tuple[int, int]] = []
        self.closed = 0
        #: Set when a thread takes a piece; it goes on when `go_on` is set.
        self.is_taking, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        self._take, self._close = Arena.take, Arena.close

        def take(arena: Arena, *arguments: Any) -> None:
            self.take(arena, *arguments)

        def close(arena: Arena) -> None:
            self.close(arena)

        patch.setattr(Arena, "take", take)
        patch.setattr(Arena, "close", close)

    def take(self, arena: Arena, start: int, stop: int, device: torch.device | None = None) -> None:
        if threading.current_thread().name == THREAD:
            self.is_taking.set()
            self.go_on.wait()
        self._take(arena, start, stop, device)
        assert not self.closed, "memory was taken that was given back"
        self.pieces.append((start, stop))

    def close(self, arena: Arena) -> None:
        self.closed += 1
        self._close(arena)


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


def claim_all(memory: ChunkMemory, share: Share, nbytes: int) -> list[Slot]:
    slots = []
    while (slot := memory.ring.claim(None, nbytes, share)) is not None:
        slots.append(slot)
    return slots


def keep(places: ChunkPlaces, *chunks: Chunk) -> None:
    """Fill the slots of chunks, which stay."""
    memory = places.memory
    for chunk in chunks:
        slot = places.claim(chunk, memory.loads)
        assert slot is not None
        memory.ring.seal(slot, stays=True)
        memory.ring.release(memory.loads, [slot])


def grow(memory: ChunkMemory, nbytes: int | None = None) -> None:
    """Take the memory, and wait until it is there."""
    memory.grow()
    until(lambda: memory.ring.capacity == (nbytes or memory.nbytes))


# ---------------------------------------------------------------------------------------- growth


def test_memory_that_keeps_nothing_is_taken_when_it_is_written_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    System(monkeypatch).free = 0
    memory = ChunkMemory(8 * MIB)
    memory.grow()
    assert memory.ring.capacity == memory.nbytes == 8 * MIB
    assert not memory.is_pinned
    assert resident(memory.view) == 0
    assert not named(THREAD)
    memory.close()


@pytest.mark.parametrize("device", [None, GPU])
def test_memory_has_one_piece_at_once_and_the_others_from_a_thread(
    device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_cudart():
        memory = ChunkMemory(7 * MIB - 100, keeps=device is None, device=device)
        shares = memory.serve("kind", 1, PAGE)
        threading.Event().wait(100)
        assert memory.nbytes == 7 * MIB
        assert memory.ring.capacity == resident(memory.view) == PIECE
        assert shares.stores.limit == shares.ahead.limit == (PIECE - PAGE) // 2
        with none_can_be_started(monkeypatch, THREAD):
            memory.grow()
            assert not named(THREAD)
        # It is tried again.
        grow(memory)
        assert resident(memory.view) == 7 * MIB
        assert shares.stores.limit == shares.ahead.limit == (7 * MIB - PAGE) // 2
        assert memory.is_pinned == (device is not None)
        memory.close()


def test_first_piece_is_as_large_as_the_caller_needs() -> None:
    memory = ChunkMemory(8 * MIB, keeps=True, first_bytes=3 * MIB - 1)
    assert memory.ring.capacity == 3 * MIB
    grow(memory)
    memory.close()


def test_memory_of_one_piece_needs_no_thread() -> None:
    memory = ChunkMemory(MIB, keeps=True, first_bytes=3 * MIB)
    memory.grow()
    assert memory.ring.capacity == memory.nbytes == MIB
    assert not named(THREAD)
    memory.close()


def test_thread_rests_as_long_as_it_took_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    begins = []
    take = Arena.take

    def take_slowly(arena: Arena, *arguments: Any) -> None:
        begins.append(time.monotonic())
        time.sleep(len(begins))
        take(arena, *arguments)

    monkeypatch.setattr(Arena, "take", take_slowly)
    started = []
    memory = ChunkMemory(
        8 * MIB,
        keeps=True,
        on_thread_start=lambda: started.append(threading.current_thread().name),
    )
    grow(memory)
    assert started == [THREAD]
    gaps = [later - sooner for sooner, later in pairwise(begins[1:])]
    assert gaps == [pytest.approx(2 * 2, abs=0.1), pytest.approx(2 * 3, abs=0.1)]
    memory.close()


def test_no_slot_lies_across_two_pieces() -> None:
    memory = ChunkMemory(8 * MIB, keeps=True)
    grow(memory)
    slots = claim_all(memory, memory.loads, 300 * PAGE)
    assert len(slots) == 4
    assert all(slot.offset // PIECE == (slot.offset + slot.size - 1) // PIECE for slot in slots)
    memory.ring.release(memory.loads, slots)
    memory.close()


# -------------------------------------------------------------------------------- too little memory


def test_memory_that_is_not_free_is_refused_with_the_numbers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    system, arenas = System(monkeypatch), Arenas(monkeypatch)
    system.free = 8 * MIB
    expected = (
        r"there is no memory for 8388608 bytes of chunks: 8912896 bytes have to be free, and"
        r" 8388608 are \(what is left\)\. Ask for less \(memory of an engine"
    )
    with pytest.raises(ConfigError, match=expected):
        ChunkMemory(8 * MIB, keeps=True)
    assert not arenas.pieces
    system.free += 512 << 10
    memory = ChunkMemory(8 * MIB, keeps=True)
    grow(memory)
    memory.close()


def test_memory_for_a_gpu_of_which_no_piece_is_free_is_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    System(monkeypatch).free = MIB
    with fake_cudart() as runtime:
        memory = ChunkMemory(8 * MIB, device=GPU)
        assert not memory.is_pinned
        assert memory.ring.capacity == memory.nbytes == 8 * MIB
        assert runtime.registered == {}
        memory.close()
    assert [warning.split("; ")[0] for warning in warnings(caplog)] == [
        "could not pin the memory for chunks (2228224 bytes have to be free, and 1048576 are (what"
        " is left))"
    ]


@pytest.mark.parametrize("device", [None, GPU])
def test_memory_of_which_others_take_the_first_piece_is_refused(
    device: torch.device | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    arenas, answers = Arenas(monkeypatch), iter([1 << 40, MIB])
    monkeypatch.setattr(pages, "free_memory", lambda: (next(answers), "what is left"))
    with fake_cudart() as runtime:
        expected = r"2228224 bytes have to be free, and 1048576 are \(what is left\)\. Ask for less"
        with pytest.raises(ConfigError, match=expected):
            ChunkMemory(8 * MIB, keeps=True, device=device)
        assert runtime.registered == {}
    assert arenas.closed == 1


def test_memory_that_the_system_does_not_map_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    monkeypatch.setattr(mmap, "mmap", refuse)
    with pytest.raises(ConfigError, match=r"8388608 bytes: .*Cannot allocate memory\. Ask for"):
        ChunkMemory(8 * MIB)


def test_memory_that_others_take_while_it_grows_stays_as_it_is(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    system, arenas = System(monkeypatch), Arenas(monkeypatch)
    arenas.go_on.clear()
    counters = Counters()
    memory = ChunkMemory(8 * MIB, keeps=True, counters=counters)
    shares = memory.serve("kind", 1, PAGE)
    memory.grow()
    arenas.is_taking.wait()
    assert counters.gauges()["memory_tier_limit_bytes"] == 8 * MIB
    system.free = MIB
    arenas.go_on.set()
    until(lambda: bool(warnings(caplog)))
    assert warnings(caplog) == [
        "the memory for chunks stays at 2097152 of 8388608 bytes: 2228224 bytes have to be free,"
        " and 1048576 are (what is left)"
    ]
    # Nothing more is tried, and what is there goes on.
    system.free = 1 << 40
    places = ChunkPlaces(memory, FMT, range(2))
    for _ in range(3):
        keep(places, *CHUNKS)
        memory.grow()
        memory.report()
        threading.Event().wait(100)
    assert places.leading(CHUNKS) == len(CHUNKS)
    assert memory.ring.capacity == memory.nbytes == PIECE
    assert shares.stores.limit == shares.ahead.limit == (PIECE - PAGE) // 2
    assert counters.gauges()["memory_tier_limit_bytes"] == PIECE
    assert counters.gauges()["staging_limit_bytes"] == PIECE
    assert len(warnings(caplog)) == 1
    memory.close()
    assert arenas.closed == 1


# ------------------------------------------------------------------------------------ page-locking


def test_memory_for_a_gpu_is_page_locked_in_pieces_until_nobody_uses_it() -> None:
    with fake_cudart() as runtime:
        memory = ChunkMemory(7 * MIB, device=GPU)
        assert memory.is_pinned
        grow(memory)
        assert list(runtime.registered.values()) == [PIECE, PIECE, PIECE, MIB]
        slots = claim_all(memory, memory.loads, 300 * PAGE) + claim_all(memory, memory.loads, PAGE)
        assert memory.loads.pinned_bytes == 7 * MIB
        assert all(
            runtime.holds(memory.tensor[slot.offset : slot.offset + slot.size]) for slot in slots
        )
        memory.ring.release(memory.loads, slots[1:])
        memory.close()
        # A copy may still be under way.
        assert len(runtime.registered) == 4
        memory.ring.release(memory.loads, slots[:1])
        assert runtime.registered == {}


def test_memory_for_a_gpu_without_cuda_is_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    memory = ChunkMemory(8 * MIB, device=GPU)
    assert not memory.is_pinned
    assert memory.ring.capacity == 8 * MIB
    assert len(warnings(caplog)) == 1
    memory.close()


@pytest.mark.parametrize("keeps", [False, True])
def test_memory_that_cannot_be_page_locked_is_ordinary_memory(
    keeps: bool, caplog: pytest.LogCaptureFixture
) -> None:
    with fake_cudart() as runtime:
        runtime.most = MIB
        memory = ChunkMemory(8 * MIB, keeps=keeps, device=GPU)
        assert not memory.is_pinned
        grow(memory)
        assert runtime.registered == {}
        places = ChunkPlaces(memory, FMT, range(2))
        keep(places, *CHUNKS)
        assert places.leading(CHUNKS) == len(CHUNKS)
        memory.close()
    (warning,) = warnings(caplog)
    assert warning.startswith("could not pin the memory for chunks (cudaHostRegister failed")


def test_memory_of_which_a_later_piece_cannot_be_page_locked_stays_as_it_is(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_cudart() as runtime:
        runtime.most = 5 * MIB
        memory = ChunkMemory(8 * MIB, device=GPU)
        memory.grow()
        until(lambda: bool(warnings(caplog)))
        (warning,) = warnings(caplog)
        assert warning.startswith(
            "the memory for chunks stays at 4194304 of 8388608 bytes: cudaHostRegister failed"
        )
        assert memory.is_pinned
        assert list(runtime.registered.values()) == [PIECE, PIECE]
        assert memory.ring.capacity == memory.nbytes == 4 * MIB
        slots = claim_all(memory, memory.loads, MIB)
        assert all(runtime.holds(memory.view[slot.offset :][: slot.size]) for slot in slots)
        memory.ring.release(memory.loads, slots)
        memory.close()


# --------------------------------------------------------------------------------------- the end


def test_memory_that_is_closed_while_a_piece_is_taken_is_given_back_once_behind_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arenas = Arenas(monkeypatch)
    arenas.go_on.clear()
    with fake_cudart() as runtime:
        memory = ChunkMemory(8 * MIB, device=GPU)
        memory.grow()
        arenas.is_taking.wait()
        memory.close()
        memory.close()
        assert arenas.closed == 0
        assert len(arenas.pieces) == 1
        arenas.go_on.set()
        until(lambda: arenas.closed > 0)
        assert runtime.registered == {}
        until(lambda: not named(THREAD))
    assert arenas.pieces == [(0, PIECE), (PIECE, 2 * PIECE)]
    assert arenas.closed == 1


def test_memory_whose_last_slot_is_released_while_a_piece_is_taken_is_given_back_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arenas = Arenas(monkeypatch)
    arenas.go_on.clear()
    memory = ChunkMemory(8 * MIB, keeps=True)
    slot = memory.ring.claim("a", PAGE, memory.loads)
    assert slot is not None
    memory.grow()
    arenas.is_taking.wait()
    memory.close()
    memory.ring.release(memory.loads, [slot])
    assert arenas.closed == 0
    arenas.go_on.set()
    until(lambda: arenas.closed > 0 and not named(THREAD))
    assert arenas.closed == 1


def test_memory_that_is_closed_before_it_grows_takes_no_further_piece(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    arenas = Arenas(monkeypatch)
    memory = ChunkMemory(8 * MIB, keeps=True)
    memory.close()
    memory.grow()
    assert arenas.closed == 1
    assert arenas.pieces == [(0, PIECE)]
    assert not named(THREAD)


def test_memory_that_is_closed_is_given_back_with_its_last_slot() -> None:
    memory = ChunkMemory(8 * MIB)
    stores = memory.serve("kind", 1, PAGE).stores
    mapped = weakref.ref(memory.view.obj)
    slot = memory.ring.claim("a", PAGE, memory.loads)
    other = memory.ring.claim("b", PAGE, stores)
    assert slot is not None
    assert other is not None
    memory.close()
    memory.close()
    assert memory.ring.claim("c", PAGE, memory.loads) is None
    memory.ring.release(stores, [other])
    memory.tensor[slot.offset : slot.offset + PAGE] = 7
    assert memory.view[slot.offset] == 7
    memory.ring.release(memory.loads, [slot])
    assert mapped() is None
    assert len(memory.view) == 0


def test_closed_memory_that_nobody_uses_is_given_back_at_once() -> None:
    memory = ChunkMemory(8 * MIB, keeps=True)
    grow(memory)
    mapped = weakref.ref(memory.view.obj)
    keep(ChunkPlaces(memory, FMT, range(2)), *CHUNKS)
    memory.close()
    assert mapped() is None


# ------------------------------------------------------------------------------------ lent memory


@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("device", [None, GPU])
def test_memory_may_be_that_of_another_owner_until_nobody_uses_it(
    device: torch.device | None, keeps: bool
) -> None:
    with fake_cudart() as runtime:
        segment = Segment(4096, regions=8 * MIB)
        memory = ChunkMemory(6 * MIB, keeps=keeps, device=device, regions=segment.take_region)
        assert memory.is_pinned == (device is not None)
        assert memory.ring.capacity == memory.nbytes == 6 * MIB
        memory.grow()
        assert not named(THREAD)
        slots = claim_all(memory, memory.loads, MIB)
        views = [memory.view[slot.offset : slot.offset + slot.size] for slot in slots]
        offsets = sorted(segment.offset_of(view) or 0 for view in views)
        assert offsets == [offsets[0] + n * MIB for n in range(6)]
        assert all(runtime.holds(view) == memory.is_pinned for view in views)
        memory.tensor[slots[0].offset] = 7
        assert views[0][0] == 7
        memory.ring.release(memory.loads, slots[1:])
        memory.close()
        # A copy may still be under way.
        assert runtime.holds(views[0]) == (device is not None)
        assert segment.take_region(6 * MIB) is None
        memory.ring.release(memory.loads, slots[:1])
        assert runtime.registered == {}
        assert segment.take_region(6 * MIB) is not None


def test_memory_that_nobody_lends_is_of_the_system() -> None:
    asked: list[int] = []
    memory = ChunkMemory(8 * MIB - 1, keeps=True, regions=asked.append)
    assert asked == [8 * MIB]
    assert memory.ring.capacity == PIECE
    grow(memory)
    memory.close()


def test_lent_memory_that_cannot_be_page_locked_is_used_all_the_same(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with fake_cudart() as runtime:
        runtime.most = 0
        segment = Segment(4096, regions=8 * MIB)
        memory = ChunkMemory(6 * MIB, device=GPU, regions=segment.take_region)
        assert not memory.is_pinned
        slot = memory.ring.claim("a", PAGE, memory.loads)
        assert slot is not None
        assert segment.offset_of(memory.view[slot.offset : slot.offset + PAGE]) is not None
        memory.ring.release(memory.loads, [slot])
        memory.close()
        assert segment.take_region(6 * MIB) is not None
    assert len(warnings(caplog)) == 1


# ---------------------------------------------------------------------------------- spares, shares


@pytest.mark.parametrize("threads", [1, 2, 9])
@pytest.mark.parametrize("size", [PAGE, 3 * PAGE - 1])
def test_memory_for_less_than_three_chunks_is_refused_with_the_numbers(
    threads: int, size: int
) -> None:
    memory = ChunkMemory(3 * rounded(size) - PAGE)
    expected = (
        rf"has {memory.nbytes} bytes, of which {memory.nbytes} are left for chunks of {size} bytes:"
        r" expected at least three of these\. Give more \(memory of an engine"
    )
    with pytest.raises(ConfigError, match=expected):
        memory.serve("kind", threads, size)
    memory.close()
    memory = ChunkMemory(3 * rounded(size))
    shares = memory.serve("kind", threads, size)
    assert shares.threads == 1
    held = fill(memory, [shares], size)
    assert [len(slots) for _, slots in held] == [1, 1, 1]
    release_all(memory, held)
    memory.close()


def fill(
    memory: ChunkMemory, users: Sequence[Shares], nbytes: int
) -> list[tuple[Share, list[Slot]]]:
    """Let stores, what is read ahead, and then loads, pin all that they can in slots of a size."""
    shares = [share for user in users for share in (user.stores, user.ahead)]
    return [(share, claim_all(memory, share, nbytes)) for share in (*shares, memory.loads)]


def release_all(memory: ChunkMemory, held: Sequence[tuple[Share, list[Slot]]]) -> None:
    for share, slots in held:
        memory.ring.release(share, slots)


def test_stores_and_what_is_read_ahead_pin_half_each_of_what_is_not_spare() -> None:
    memory = ChunkMemory(64 * PAGE)
    shares = memory.serve("kind", 3, 4 * PAGE - 1)
    assert shares.threads == 3
    assert shares.stores.limit == shares.ahead.limit == 26 * PAGE
    held = fill(memory, [shares], 4 * PAGE)
    assert [len(slots) for _, slots in held] == [6, 6, 4]
    assert [slot.is_spare for slot in held[2][1]] == [False, True, True, True]
    release_all(memory, held)
    memory.close()


def test_each_kind_has_its_part_of_what_is_not_spare() -> None:
    memory = ChunkMemory(100 * PAGE)
    full = memory.serve("full", 2, 4 * PAGE)
    assert full.stores.limit == full.ahead.limit == 46 * PAGE
    window = memory.serve("window", 2, 2 * PAGE)
    state = memory.serve("state", 1, 8 * PAGE, share=0.25)
    half = (100 - 2 * 4 - 2 * 2 - 8) * PAGE // 2
    for shares, part in ((full, 4), (window, 2), (state, 2)):
        assert shares.stores.limit == shares.ahead.limit == half * part // 8
    memory.close()


def test_user_that_is_served_again_has_its_shares_changed() -> None:
    memory = ChunkMemory(100 * PAGE)
    first, other = memory.serve("a", 2, 4 * PAGE), memory.serve("b", 2, 4 * PAGE)
    again = memory.serve("a", 2, 4 * PAGE)
    assert again is first
    assert memory.ring.spare_bytes == 4 * 4 * PAGE
    assert first.stores.limit == other.stores.limit == 21 * PAGE
    again = memory.serve("a", 3, 12 * PAGE)
    assert again is first
    assert memory.ring.spare_bytes == (4 * 4 + 3 * 12) * PAGE
    assert (first.stores.limit, other.stores.limit) == (18 * PAGE, 6 * PAGE)
    memory.close()


def test_spare_slots_take_no_more_than_half_of_what_other_users_leave() -> None:
    memory = ChunkMemory(20 * PAGE)
    assert memory.serve("a", 3, 2 * PAGE).threads == 3
    assert memory.serve("b", 9, PAGE).threads == 5
    assert memory.serve("c", 2, PAGE).threads == 1
    with pytest.raises(ConfigError, match="of which 0 are left for chunks of 4096 bytes"):
        memory.serve("d", 1, PAGE)
    # The next call for the same user counts it once.
    assert memory.serve("b", 9, PAGE).threads == 3
    memory.close()


def contexts_of(
    shelf: Shelf, memory: ChunkMemory, fmt: ObjectFormat, kinds: Sequence[Kind]
) -> list[TransferContext]:
    return [
        TransferContext(
            shelf.view(fmt.of(kind)),
            None,
            memory,
            Counters(),
            ShardPlan.whole(fmt.of(kind).shards),
            load_threads=3,
        )
        for kind in kinds
    ]


@pytest.mark.parametrize(
    ("kinds", "chunks"),
    [((FULL,), count) for count in (3, 4, 5, 6, 100)]
    + [(kinds, count) for kinds in ((FULL, WINDOW), (WINDOW, FULL)) for count in (9, 12, 100)],
)
def test_each_load_thread_of_each_kind_finds_a_slot_whatever_else_is_held(
    kinds: tuple[Kind, ...], chunks: int, tmp_path: Path
) -> None:
    fmt = format_of_kinds({FULL: 2, WINDOW: 1}, chunk_size=512)
    memory = ChunkMemory(chunks * 10 * PAGE)
    with open_shelf(tmp_path) as shelf:
        contexts = contexts_of(shelf, memory, fmt, kinds)
    held = [
        (share, claim_all(memory, share, size))
        for size in (*(context.places.slot_bytes for context in contexts), PAGE)
        for context in contexts
        for share in (context.shares.stores, context.shares.ahead)
    ]
    loads = [
        context.places.claim(chunk, memory.loads)
        for context in contexts
        for chunk in make_chunks(fmt, context.shares.threads)
    ]
    found = [slot for slot in loads if slot is not None]
    release_all(memory, [*held, (memory.loads, found)])
    memory.close()
    assert len(found) == len(loads)


def test_each_load_thread_finds_a_slot_in_memory_that_has_grown() -> None:
    memory = ChunkMemory(8 * MIB, keeps=True)
    shares = memory.serve("kind", 3, MIB)
    assert memory.ring.spare_bytes == PIECE
    grow(memory)
    held = fill(memory, [shares], MIB)
    assert sum(slot.is_spare for slot in held[2][1]) == 3
    assert shares.stores.limit == shares.ahead.limit == 5 * MIB // 2
    release_all(memory, held)
    memory.close()


# --------------------------------------------------------------------------------------- metrics


def test_report_counts_what_was_kept_and_evicted_once() -> None:
    counters = Counters()
    memory = ChunkMemory(5 * SLOT, keeps=True, counters=counters)
    places = ChunkPlaces(memory, FMT, range(2))
    shares = memory.serve("kind", 1, SLOT)
    assert counters.take() == {
        "staging_limit_bytes": 5 * SLOT,
        "staging_used_bytes": 0,
        "memory_tier_limit_bytes": 5 * SLOT,
        "memory_tier_used_bytes": 0,
        "memory_tier_pinned_bytes": 0,
    }
    keep(places, *CHUNKS[:3])
    ahead = memory.ring.find(places.name(CHUNKS[0]), shares.ahead)
    filled = places.claim(CHUNKS[3], shares.stores)
    assert ahead is not None
    assert filled is not None
    memory.report()
    assert counters.take() == {
        "memory_tier_stored_objects": 6,
        "memory_tier_stored_bytes": 3 * SLOT,
        "staging_limit_bytes": 5 * SLOT,
        "staging_used_bytes": 2 * SLOT,
        "memory_tier_limit_bytes": 5 * SLOT,
        "memory_tier_used_bytes": 3 * SLOT,
        "memory_tier_pinned_bytes": SLOT,
    }
    memory.report()
    assert counters.take() == {}
    memory.ring.release(shares.stores, [filled])
    keep(places, *CHUNKS[4:7])
    memory.report()
    counts = counters.take()
    assert counts["memory_tier_stored_objects"] == 6
    assert counts["memory_tier_stored_bytes"] == 3 * SLOT
    assert counts["memory_tier_evicted_objects"] == 4
    assert counts["memory_tier_evicted_bytes"] == 2 * SLOT
    memory.ring.release(shares.ahead, [ahead])
    memory.close()


def test_reports_of_two_threads_count_what_was_kept_once(monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters()
    memory = ChunkMemory(MIB, keeps=True, counters=counters)
    places = ChunkPlaces(memory, FMT, range(2))
    has_read, go_on = threading.Event(), threading.Event()
    stats = memory.ring.stats

    def stats_slowly() -> Any:
        taken = stats()
        if threading.current_thread().name == "late":
            has_read.set()
            # The other report may wait for this one.
            go_on.wait(10)
        return taken

    monkeypatch.setattr(memory.ring, "stats", stats_slowly)
    keep(places, CHUNKS[0])
    late = threading.Thread(target=memory.report, name="late")
    late.start()
    has_read.wait()
    keep(places, CHUNKS[1])
    memory.report()
    go_on.set()
    late.join()
    memory.report()
    assert counters.snapshot()["memory_tier_stored_objects"] == 4
    assert counters.gauges()["memory_tier_used_bytes"] == 2 * places.slot_bytes
    memory.close()


def test_memory_that_keeps_nothing_reports_no_limit_of_what_is_kept() -> None:
    counters = Counters()
    memory = ChunkMemory(MIB, counters=counters)
    assert counters.gauges()["memory_tier_limit_bytes"] == 0
    assert counters.gauges()["staging_limit_bytes"] == MIB
    memory.close()


# ---------------------------------------------------------------------------------------- places


def claimed(places: ChunkPlaces, chunk: Chunk) -> Slot:
    slot = places.claim(chunk, places.memory.loads)
    assert slot is not None
    return slot


def check_views(
    places: ChunkPlaces, fmt: ObjectFormat, chunk: Chunk, shards: Sequence[int], slot: Slot
) -> None:
    """Check that the objects of a chunk lie in its slot, aligned and apart from each other."""
    memory = places.memory
    base, end = address_of(memory.view), 0
    for shard in shards:
        view = places.view(slot, chunk, shard)
        assert len(view) == fmt.object_size(shard, chunk.tokens)
        start = address_of(view) - base - slot.offset
        assert start % PAGE == address_of(view) % PAGE == 0
        assert end <= start
        end = start + len(view)
    assert end <= slot.size <= slot.nbytes
    assert slot.nbytes == places.slot_bytes_of(chunk)
    assert slot.objects == len(shards)


@pytest.mark.parametrize("shards", [(0, 1, 2, 3), (1, 3), (2,)])
def test_objects_of_a_chunk_lie_one_behind_the_other_in_a_slot(shards: tuple[int, ...]) -> None:
    fmt = make_format(shards=4, chunk_size=500, shape="2,*,4,8")
    memory = ChunkMemory(MIB)
    places = ChunkPlaces(memory, fmt, shards)
    sizes = [fmt.object_size(shard) for shard in shards]
    assert places.chunk_bytes == sum(sizes)
    assert places.slot_bytes == sum(map(rounded, sizes))
    assert places.chunk_bytes < places.slot_bytes
    chunks = make_chunks(fmt, 2)
    slots = [claimed(places, chunk) for chunk in chunks]
    for chunk, slot in zip(chunks, slots, strict=True):
        check_views(places, fmt, chunk, shards, slot)
    memory.ring.release(memory.loads, slots)
    memory.close()


def test_tail_has_a_slot_of_its_own_size() -> None:
    memory = ChunkMemory(MIB)
    places = ChunkPlaces(memory, FMT, range(2))
    tails = [make_tail(FMT, tokens) for tokens in (3, 300)]
    slots = [claimed(places, chunk) for chunk in (*tails, CHUNKS[0])]
    assert slots[0].nbytes < slots[1].nbytes < slots[2].nbytes == places.slot_bytes
    for chunk, slot in zip((*tails, CHUNKS[0]), slots, strict=True):
        check_views(places, FMT, chunk, range(2), slot)
        for shard in range(2):
            image = sealed(FMT, chunk, shard)
            places.view(slot, chunk, shard)[:] = image
            assert bytes(places.payload(slot, chunk, shard).numpy()) == image[FMT.data_offset :]
    assert len({places.name(chunk) for chunk in (*tails, CHUNKS[0])}) == 3
    memory.ring.release(memory.loads, slots)
    memory.close()


def test_payload_is_the_object_behind_its_header() -> None:
    memory = ChunkMemory(MIB)
    places = ChunkPlaces(memory, FMT, range(2))
    other, slot = claimed(places, CHUNKS[1]), claimed(places, CHUNKS[0])
    images = [sealed(FMT, CHUNKS[0], shard) for shard in range(2)]
    for shard, image in enumerate(images):
        places.view(slot, CHUNKS[0], shard)[:] = image
    for shard, image in enumerate(images):
        payload = places.payload(slot, CHUNKS[0], shard)
        assert payload.dtype == torch.uint8
        assert not payload.is_inference()
        assert bytes(payload.numpy()) == image[FMT.data_offset :]
        payload.fill_(3)
        view = places.view(slot, CHUNKS[0], shard)
        assert view[: FMT.data_offset] == image[: FMT.data_offset]
        assert set(view[FMT.data_offset :]) == {3}
    assert not any(places.view(other, CHUNKS[1], 0))
    memory.ring.release(memory.loads, [slot, other])
    memory.close()


def test_payload_can_be_written_to_when_it_was_made_in_inference_mode() -> None:
    with torch.inference_mode():
        memory = ChunkMemory(MIB)
    places = ChunkPlaces(memory, FMT, range(2))
    slot = claimed(places, CHUNKS[0])
    places.payload(slot, CHUNKS[0], 1).fill_(3)
    memory.ring.release(memory.loads, [slot])
    memory.close()


def test_names_of_kinds_and_namespaces_differ() -> None:
    fmt = format_of_kinds({FULL: 2, WINDOW: 2})
    other = format_of_kinds({FULL: 2, WINDOW: 2}, weights="user:other")
    memory = ChunkMemory(MIB)
    kinds: tuple[Kind, ...] = (FULL, WINDOW)
    full, window = (ChunkPlaces(memory, fmt.of(kind), range(2)) for kind in kinds)
    theirs = ChunkPlaces(memory, other.of(FULL), range(2))
    (chunk,), (their_chunk,) = make_chunks(fmt, 1), make_chunks(other, 1)
    keep(full, chunk)
    assert (full.leading([chunk]), window.leading([chunk])) == (1, 0)
    assert theirs.leading([their_chunk]) == 0
    keep(window, chunk)
    keep(theirs, their_chunk)
    assert memory.ring.stats().stored_objects == 6
    assert memory.ring.forget(full.name(chunk))
    assert (full.leading([chunk]), window.leading([chunk])) == (0, 1)
    assert theirs.leading([their_chunk]) == 1
    memory.close()


def test_leading_chunks_are_those_before_the_first_that_is_not_here() -> None:
    memory = ChunkMemory(MIB)
    places = ChunkPlaces(memory, FMT, range(2))
    assert places.leading([]) == places.leading(CHUNKS) == 0
    keep(places, *CHUNKS[:2], *CHUNKS[3:])
    assert places.leading(CHUNKS) == 2
    keep(places, CHUNKS[2])
    assert places.leading(CHUNKS) == len(CHUNKS)
    memory.close()


def test_slot_without_a_name_is_never_found() -> None:
    memory = ChunkMemory(MIB)
    places = ChunkPlaces(memory, FMT, range(2))
    slot = places.claim(CHUNKS[0], memory.loads, is_named=False)
    assert slot is not None
    memory.ring.seal(slot, stays=True)
    assert places.leading(CHUNKS) == 0
    named_slot = claimed(places, CHUNKS[0])
    assert named_slot.name == places.name(CHUNKS[0])
    memory.ring.release(memory.loads, [slot, named_slot])
    memory.close()


def test_as_many_chunks_as_fit_are_kept_without_eviction() -> None:
    memory = ChunkMemory(8 * SLOT + PAGE, keeps=True)
    places = ChunkPlaces(memory, FMT, range(2))
    keep(places, *CHUNKS)
    assert places.leading(CHUNKS) == 8
    assert memory.ring.stats().evicted_objects == 0
    memory.close()


def test_claim_of_a_chunk_waits_until_its_deadline() -> None:
    memory = ChunkMemory(SLOT)
    places = ChunkPlaces(memory, FMT, range(2))
    slot = claimed(places, CHUNKS[0])
    begin = time.monotonic()
    assert places.claim(CHUNKS[1], Share(SLOT), deadline=begin + 20) is None
    assert 20 <= time.monotonic() - begin < 21
    memory.ring.release(memory.loads, [slot])
    memory.close()
