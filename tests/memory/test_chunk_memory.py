"""The host memory for chunks: how it is taken, shared out and given back, and where objects lie."""

from __future__ import annotations

import logging
import mmap
import threading
import time
import weakref
from collections import Counter
from collections.abc import Iterator
from itertools import pairwise
from typing import Any
from unittest import mock

import pytest
import torch

from kvshelf.errors import ConfigError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import FULL, WINDOW
from kvshelf.memory import chunk_memory, pages
from kvshelf.memory.arena import Arena
from kvshelf.memory.chunk_memory import ChunkMemory, ChunkPlaces, Shares
from kvshelf.memory.pages import address_of
from kvshelf.memory.ring import ALIGNMENT as PAGE
from kvshelf.memory.ring import Share, Slot, rounded
from kvshelf.metrics import Counters
from tests.support.fake_cudart import FakeCudart, fake_cudart
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
#: What must be free for a memory of 8 MiB, and for its pieces.
FREE_FOR_ALL = "8912896 bytes have to be free, and 8912895 are (what is left)"
FREE_FOR_PIECE = "2228224 bytes have to be free, and 1048576 are (what is left)"


class System:
    """Memory of which so much is free, what is taken of it, and a GPU.

    Attributes
    ----------
    patch : MonkeyPatch
    cuda : FakeCudart
    free : list of int
        Bytes that are free: each time the next number, the last one again and again.
    memories : list of ChunkMemory
    pieces : list of tuple
        Begin and end of each piece that was taken.
    closed : int
        How often an arena was closed.
    is_taking, go_on : Event
        A memory's thread sets the first before it takes a piece, and waits for the second.
    """

    def __init__(self, patch: pytest.MonkeyPatch, cuda: FakeCudart) -> None:
        self.patch, self.cuda = patch, cuda
        self.free = [1 << 40]
        self.memories: list[ChunkMemory] = []
        self.pieces: list[tuple[int, int]] = []
        self.closed = 0
        self.is_taking, self.go_on = threading.Event(), threading.Event()
        self.go_on.set()
        make, take, close = ChunkMemory.__init__, Arena.take, Arena.close

        def make_noted(memory: ChunkMemory, *arguments: Any, **options: Any) -> None:
            make(memory, *arguments, **options)
            self.memories.append(memory)

        def take_when_told(arena: Arena, start: int, stop: int, *device: Any) -> None:
            if threading.current_thread().name == THREAD:
                self.is_taking.set()
                self.go_on.wait()
            take(arena, start, stop, *device)
            assert not self.closed, "memory was taken that was given back"
            self.pieces.append((start, stop))

        def close_noted(arena: Arena) -> None:
            self.closed += 1
            close(arena)

        patch.setattr(ChunkMemory, "__init__", make_noted)
        patch.setattr(Arena, "take", take_when_told)
        patch.setattr(Arena, "close", close_noted)
        patch.setattr(pages, "free_memory", self._free_memory)

    def _free_memory(self) -> tuple[int, str]:
        return self.free.pop(0) if len(self.free) > 1 else self.free[0], "what is left"


@pytest.fixture(autouse=True)
def system() -> Iterator[System]:
    """Behind the test all slots are released, and all memories are closed."""
    with fake_cudart() as cuda, pytest.MonkeyPatch.context() as patch:
        patch.setattr(chunk_memory, "_PIECE", PIECE)
        system = System(patch, cuda)
        yield system
        for memory in system.memories:
            shares = [memory.loads]
            for user in memory._users.values():
                shares += [user.stores, user.ahead]
            for share in shares:
                memory.ring.release(share, list(Counter(share._pins).elements()))
            memory.close()


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno > logging.INFO]


def claim_all(memory: ChunkMemory, share: Share, nbytes: int) -> list[Slot]:
    slots = []
    while (slot := memory.ring.claim(None, nbytes, share)) is not None:
        slots.append(slot)
    return slots


def claim(places: ChunkPlaces, chunk: Chunk) -> Slot:
    slot = places.claim(chunk, places.memory.loads)
    assert slot is not None
    return slot


def keep(places: ChunkPlaces, *chunks: Chunk) -> None:
    """Fill the slots of chunks, which stay."""
    memory = places.memory
    for chunk in chunks:
        slot = claim(places, chunk)
        memory.ring.seal(slot, stays=True)
        memory.ring.release(memory.loads, [slot])


def grow(memory: ChunkMemory) -> None:
    """Take the memory, and wait until it is there."""
    memory.grow()
    until(lambda: memory.ring.capacity == memory.nbytes)


# ---------------------------------------------------------------------------------------- growth


def test_memory_that_keeps_nothing_is_taken_when_it_is_written_to(system: System) -> None:
    system.free = [0]
    counters = Counters()
    memory = ChunkMemory(8 * MIB, counters=counters)
    memory.grow()
    assert memory.ring.capacity == memory.nbytes == 8 * MIB
    assert not memory.is_page_locked
    assert resident(memory.view) == 0
    assert not named(THREAD)
    assert counters.gauges()["memory_tier_limit_bytes"] == 0
    assert counters.gauges()["staging_limit_bytes"] == 8 * MIB


@pytest.mark.parametrize("device", [None, GPU])
def test_memory_of_pieces_has_one_at_once_and_the_others_from_a_thread(
    device: torch.device | None, system: System
) -> None:
    memory = ChunkMemory(7 * MIB - 100, keeps=device is None, device=device)
    shares = memory.serve("kind", 3, MIB)
    threading.Event().wait(100)
    assert memory.nbytes == 7 * MIB
    assert memory.ring.capacity == memory.ring.spare_bytes == resident(memory.view) == PIECE
    assert shares.stores.limit == shares.ahead.limit == 0
    with none_can_be_started(system.patch, THREAD):
        memory.grow()
        assert not named(THREAD)
    # It is tried again.
    grow(memory)
    assert resident(memory.view) == 7 * MIB
    assert memory.is_page_locked == (device is not None)
    assert shares.stores.limit == shares.ahead.limit == 2 * MIB
    for share, count in ((shares.stores, 2), (shares.ahead, 2), (memory.loads, 3)):
        assert len(claim_all(memory, share, MIB)) == count


@pytest.mark.parametrize(("nbytes", "first_piece"), [(8 * MIB, 3 * MIB), (MIB, MIB)])
def test_first_piece_of_memory_is_as_large_as_the_caller_needs(
    nbytes: int, first_piece: int
) -> None:
    memory = ChunkMemory(nbytes - 1, keeps=True, first_bytes=3 * MIB - 1)
    assert memory.ring.capacity == first_piece
    memory.grow()
    assert len(named(THREAD)) == (first_piece < nbytes)
    grow(memory)
    assert memory.nbytes == nbytes


def test_thread_rests_as_long_as_it_took_a_piece(system: System) -> None:
    begins = []
    take = Arena.take

    def take_slowly(arena: Arena, *arguments: Any) -> None:
        begins.append(time.monotonic())
        time.sleep(len(begins))
        take(arena, *arguments)

    system.patch.setattr(Arena, "take", take_slowly)
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


# -------------------------------------------------------------------------------- too little memory


@pytest.mark.parametrize(
    ("device", "free", "cause"),
    [
        (None, [8912895], FREE_FOR_ALL),
        (None, [1 << 40, MIB], FREE_FOR_PIECE),
        (GPU, [1 << 40, MIB], FREE_FOR_PIECE),
        (None, [1 << 40], "[Errno 12] Cannot allocate memory"),
    ],
)
def test_memory_that_the_system_does_not_give_is_refused_with_the_numbers(
    device: torch.device | None, free: list[int], cause: str, system: System
) -> None:
    system.free = list(free)
    if "Cannot" in cause:
        refusal = OSError(12, "Cannot allocate memory")
        system.patch.setattr(mmap, "mmap", mock.Mock(side_effect=refusal))
    with pytest.raises(ConfigError) as error:
        ChunkMemory(8 * MIB, keeps=True, device=device)
    assert " 8388608 bytes" in str(error.value)
    assert f": {cause}. Ask for less (memory of an engine" in str(error.value)
    assert system.pieces == []
    assert system.closed == (cause != FREE_FOR_ALL)
    assert system.cuda.registered == {}


@pytest.mark.parametrize(
    ("device", "cause"), [(None, FREE_FOR_PIECE), (GPU, "cudaHostRegister failed")]
)
def test_memory_of_which_a_later_piece_is_refused_stays_as_it_is(
    device: torch.device | None, cause: str, system: System, caplog: pytest.LogCaptureFixture
) -> None:
    counters = Counters()
    system.free = [8912896]
    memory = ChunkMemory(8 * MIB, keeps=device is None, device=device, counters=counters)
    shares = memory.serve("kind", 1, PAGE)
    assert counters.gauges()["memory_tier_limit_bytes"] == (8 * MIB if memory.keeps else 0)
    system.free, system.cuda.most = [MIB if device is None else 1 << 40], 3 * MIB
    memory.grow()
    threading.Event().wait(1)
    (warning,) = warnings(caplog)
    assert warning.startswith(f"the memory for chunks stays at 2097152 of 8388608 bytes: {cause}")
    assert counters.gauges()["memory_tier_limit_bytes"] == (PIECE if memory.keeps else 0)
    # Nothing more is tried, and what is there goes on.
    system.free, system.cuda.most = [1 << 40], 1 << 40
    memory.grow()
    threading.Event().wait(100)
    keep(ChunkPlaces(memory, FMT, range(2)), *CHUNKS)
    assert memory.ring.capacity == memory.nbytes == PIECE
    assert shares.stores.limit == shares.ahead.limit == (PIECE - PAGE) // 2
    assert list(system.cuda.registered.values()) == ([] if device is None else [PIECE])
    assert memory.is_page_locked == (device is not None)
    assert len(warnings(caplog)) == 1


# ------------------------------------------------------------------------------------ page-locking


@pytest.mark.parametrize(
    ("cause", "keeps", "is_shared"),
    [
        ("there is no CUDA device", False, False),
        ("2228224 bytes have to be free", False, False),
        ("cudaHostRegister failed", False, False),
        ("cudaHostRegister failed", True, False),
        ("cudaHostRegister failed", False, True),
    ],
)
def test_memory_that_cannot_be_page_locked_is_ordinary_memory(
    cause: str, keeps: bool, is_shared: bool, system: System, caplog: pytest.LogCaptureFixture
) -> None:
    system.patch.setattr(torch.cuda, "is_available", lambda: "no CUDA" not in cause)
    system.free = [MIB if "free" in cause else 1 << 40]
    system.cuda.most = MIB
    shared: list[Arena] = []
    memory = ChunkMemory(
        6 * MIB, keeps=keeps, device=GPU, share=shared.append if is_shared else None
    )
    assert not memory.is_page_locked
    grow(memory)
    assert memory.nbytes == 6 * MIB
    assert system.cuda.registered == {}
    assert [arena.offset_of(memory.view) for arena in shared] == [0] * is_shared
    (warning,) = warnings(caplog)
    assert warning.startswith(f"could not pin the memory for chunks ({cause}")


# --------------------------------------------------------------------------------------- the end


@pytest.mark.parametrize("is_held", [False, True])
def test_memory_that_is_closed_while_a_piece_is_taken_is_given_back_once_behind_it(
    is_held: bool, system: System
) -> None:
    system.go_on.clear()
    memory = ChunkMemory(8 * MIB, device=GPU)
    slots = claim_all(memory, memory.loads, PIECE) if is_held else []
    memory.grow()
    system.is_taking.wait()
    memory.close()
    memory.ring.release(memory.loads, slots)
    assert system.closed == 0
    system.go_on.set()
    until(lambda: system.closed > 0 and not named(THREAD))
    assert system.cuda.registered == {}
    assert system.pieces == [(0, PIECE), (PIECE, 2 * PIECE)]
    assert system.closed == 1


def test_memory_that_is_closed_before_it_grows_takes_no_further_piece(system: System) -> None:
    memory = ChunkMemory(8 * MIB, keeps=True)
    keep(ChunkPlaces(memory, FMT, range(2)), *CHUNKS)
    memory.close()
    memory.grow()
    assert system.closed == 1
    assert system.pieces == [(0, PIECE)]
    assert not named(THREAD)


@pytest.mark.parametrize("is_shared", [False, True])
@pytest.mark.parametrize("keeps", [False, True])
@pytest.mark.parametrize("device", [None, GPU])
def test_memory_that_is_closed_is_given_back_with_its_last_slot(
    device: torch.device | None, keeps: bool, is_shared: bool, system: System
) -> None:
    shared: list[Arena] = []
    memory = ChunkMemory(
        7 * MIB, keeps=keeps, device=device, share=shared.append if is_shared else None
    )
    in_pieces = keeps or device is not None
    assert memory.ring.capacity == (PIECE if in_pieces else 7 * MIB)
    grow(memory)
    assert in_pieces or not named(THREAD)
    assert memory.is_page_locked == (device is not None)
    locked = list(system.cuda.registered.values())
    pieces = [PIECE, PIECE, PIECE, MIB] if in_pieces else [7 * MIB]
    assert locked == (pieces if memory.is_page_locked else [])
    slots = claim_all(memory, memory.loads, 300 * PAGE) + claim_all(memory, memory.loads, PAGE)
    assert memory.loads.pinned_bytes == 7 * MIB
    for slot in slots:
        part = slice(slot.offset, slot.offset + slot.size)
        memory.tensor[part] = 7
        assert memory.view[part.stop - 1] == 7
        assert system.cuda.holds(memory.view[part]) == memory.is_page_locked
        assert [arena.offset_of(memory.view[part]) for arena in shared] == [slot.offset] * is_shared
    mapped = weakref.ref(memory.view.obj)
    memory.ring.release(memory.loads, slots[1:])
    for _ in range(2):
        memory.close()
    assert memory.ring.claim(None, PAGE, memory.loads) is None
    # A copy may still be under way.
    assert list(system.cuda.registered.values()) == locked
    assert len(memory.view) == len(memory.tensor) == 7 * MIB
    memory.ring.release(memory.loads, slots[:1])
    assert system.cuda.registered == {}
    assert len(memory.view) == 0
    shared.clear()
    assert mapped() is None


# ---------------------------------------------------------------------------------- spares, shares


@pytest.mark.parametrize("size", [PAGE, 3 * PAGE - 1])
def test_memory_for_less_than_three_chunks_is_refused_with_the_numbers(size: int) -> None:
    memory = ChunkMemory(3 * rounded(size) - PAGE)
    expected = (
        rf"has {memory.nbytes} bytes, of which {memory.nbytes} are left for chunks of {size} bytes:"
        r" expected at least three of these\. Give more \(memory of an engine"
    )
    with pytest.raises(ConfigError, match=expected):
        memory.serve("kind", 9, size)
    memory = ChunkMemory(3 * rounded(size))
    shares = memory.serve("kind", 9, size)
    assert shares.threads == 1
    for share in (shares.stores, shares.ahead, memory.loads):
        assert len(claim_all(memory, share, size)) == 1


def test_kinds_have_their_parts_of_what_is_not_spare_also_when_they_change() -> None:
    memory = ChunkMemory(100 * PAGE)
    full = memory.serve("full", 2, 4 * PAGE)
    assert full.stores.limit == full.ahead.limit == 46 * PAGE
    window = memory.serve("window", 2, 2 * PAGE)
    state = memory.serve("state", 1, 8 * PAGE, share=0.25)
    for full_pages, spare_pages in ((4, 20), (12, 20 + 2 * 12)):
        assert memory.serve("full", 2, full_pages * PAGE) is full
        assert memory.ring.spare_bytes == spare_pages * PAGE
        half = (100 - spare_pages) * PAGE // 2
        for shares, pages_of_kind in ((full, full_pages), (window, 2), (state, 2)):
            limit = half * pages_of_kind // (full_pages + 2 + 2)
            assert shares.stores.limit == shares.ahead.limit == limit


def test_spare_slots_take_no_more_than_half_of_what_other_users_leave() -> None:
    memory = ChunkMemory(20 * PAGE)
    assert memory.serve("a", 3, 2 * PAGE).threads == 3
    assert memory.serve("b", 9, PAGE).threads == 5
    assert memory.serve("c", 2, PAGE).threads == 1
    with pytest.raises(ConfigError, match="of which 0 are left for chunks of 4096 bytes"):
        memory.serve("d", 1, PAGE)
    # The next call for the same user counts it once.
    assert memory.serve("b", 9, PAGE).threads == 3


@pytest.mark.parametrize(
    ("sizes", "nbytes"),
    [((10,), count * 10) for count in (3, 4, 5, 6, 100)]
    + [(sizes, count * 10) for sizes in ((10, 4), (4, 10)) for count in (9, 12, 100)],
)
def test_each_load_thread_of_each_kind_finds_a_slot_whatever_else_is_held(
    sizes: tuple[int, ...], nbytes: int
) -> None:
    memory = ChunkMemory(nbytes * PAGE)
    users = [memory.serve(size, 3, size * PAGE - 1) for size in sizes]
    for size in (*sizes, 1):
        for user in users:
            for share in (user.stores, user.ahead):
                claim_all(memory, share, size * PAGE)
    for user in users:
        for _ in range(user.threads):
            assert memory.ring.claim(None, user.slot_bytes, memory.loads) is not None


# --------------------------------------------------------------------------------------- metrics


def test_report_counts_what_was_kept_and_evicted_once() -> None:
    counters = Counters()
    memory = ChunkMemory(5 * SLOT, keeps=True, counters=counters)
    places = ChunkPlaces(memory, FMT, range(2))
    shares = memory.serve("kind", 1, SLOT)
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
    names = ("stored_objects", "stored_bytes", "evicted_objects", "evicted_bytes")
    assert [counts[f"memory_tier_{name}"] for name in names] == [6, 3 * SLOT, 4, 2 * SLOT]


def test_reports_of_two_threads_count_what_was_kept_once(system: System) -> None:
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

    system.patch.setattr(memory.ring, "stats", stats_slowly)
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
    assert counters.gauges()["memory_tier_used_bytes"] == 2 * SLOT


# ---------------------------------------------------------------------------------------- places


@pytest.mark.parametrize("shards", [(0, 1, 2, 3), (1, 3), (2,)])
def test_objects_of_a_chunk_or_a_tail_lie_one_behind_the_other_in_its_slot(
    shards: tuple[int, ...],
) -> None:
    fmt = make_format(shards=4, chunk_size=500, shape="2,*,4,8")
    with torch.inference_mode():
        memory = ChunkMemory(MIB)
    places = ChunkPlaces(memory, fmt, shards)
    sizes = [fmt.object_size(shard) for shard in shards]
    assert places.chunk_bytes == sum(sizes) < places.slot_bytes == sum(map(rounded, sizes))
    chunks = [make_tail(fmt, 3), make_tail(fmt, 300), *make_chunks(fmt, 2)]
    slots = [claim(places, chunk) for chunk in chunks]
    assert slots[0].nbytes < slots[1].nbytes < slots[2].nbytes == places.slot_bytes
    assert len({places.name(chunk) for chunk in chunks}) == len(chunks)
    objects = [
        (slot, chunk, shard) for slot, chunk in zip(slots, chunks, strict=True) for shard in shards
    ]
    for slot, chunk, shard in objects:
        assert (slot.nbytes, slot.objects) == (places._layout(chunk)[0], len(shards))
        places.view(slot, chunk, shard)[:] = sealed(fmt, chunk, shard)
    for slot, chunk, shard in objects:
        view, image = places.view(slot, chunk, shard), sealed(fmt, chunk, shard)
        assert view == image
        start = address_of(view) - address_of(memory.view)
        assert start % PAGE == address_of(view) % PAGE == 0
        assert slot.offset <= start < start + len(view) <= slot.offset + slot.size
        payload = places.payload(slot, chunk, shard)
        assert payload.dtype == torch.uint8
        assert bytes(payload.numpy()) == image[fmt.data_offset :]
        payload.fill_(3)
        assert view[: fmt.data_offset] == image[: fmt.data_offset]
        assert set(view[fmt.data_offset :]) == {3}


def test_names_of_kinds_and_namespaces_differ() -> None:
    fmt = format_of_kinds({FULL: 2, WINDOW: 2})
    other = format_of_kinds({FULL: 2, WINDOW: 2}, weights="user:other")
    memory = ChunkMemory(MIB)
    formats = [fmt.of(FULL), fmt.of(WINDOW), other.of(FULL)]
    places = [ChunkPlaces(memory, of_kind, range(2)) for of_kind in formats]
    chunks = [*(2 * make_chunks(fmt, 1)), *make_chunks(other, 1)]
    for of_kind, chunk in zip(places, chunks, strict=True):
        keep(of_kind, chunk)
    assert memory.ring.stats().stored_objects == 6
    assert memory.ring.forget(places[0].name(chunks[0]))
    here = [of_kind.leading([chunk]) for of_kind, chunk in zip(places, chunks, strict=True)]
    assert here == [0, 1, 1]


def test_leading_chunks_are_those_before_the_first_that_is_not_here() -> None:
    memory = ChunkMemory(8 * SLOT + PAGE, keeps=True)
    places = ChunkPlaces(memory, FMT, range(2))
    assert places.most_chunks == len(CHUNKS)
    assert places.leading([]) == places.leading(CHUNKS) == 0
    keep(places, *CHUNKS[:2], *CHUNKS[3:])
    assert places.leading(CHUNKS) == 2
    keep(places, CHUNKS[2])
    assert places.leading(CHUNKS) == len(CHUNKS)
    assert memory.ring.stats().evicted_objects == 0


def test_claim_of_a_chunk_without_a_name_or_with_a_deadline_is_one_of_the_ring() -> None:
    memory = ChunkMemory(2 * SLOT)
    places = ChunkPlaces(memory, FMT, range(2))
    unnamed = places.claim(CHUNKS[0], memory.loads, is_named=False)
    assert unnamed is not None
    memory.ring.seal(unnamed, stays=True)
    assert places.leading(CHUNKS) == 0
    assert claim(places, CHUNKS[0]).name == places.name(CHUNKS[0])
    begin = time.monotonic()
    assert places.claim(CHUNKS[1], Share(SLOT), deadline=begin + 20) is None
    assert 20 <= time.monotonic() - begin < 21


def test_slot_that_is_held_once_more_stays_pinned_until_that_ends() -> None:
    memory = ChunkMemory(2 * SLOT)
    places = ChunkPlaces(memory, FMT, range(2))
    first, second = claim(places, CHUNKS[0]), claim(places, CHUNKS[1])
    shares = Shares(1, SLOT, 1.0, ahead=Share(2 * SLOT), copies=Share(SLOT))
    end = places.hold(first, shares)
    assert end is not None
    assert places.hold(second, shares) is None
    # Also where read-ahead has all that it shares with the queue.
    shares.ahead.pinned_bytes = SLOT
    shares.copies.limit = 2 * SLOT
    assert places.hold(second, shares) is None
    memory.ring.release(memory.loads, [first])
    assert claim_all(memory, memory.loads, SLOT) == []
    end()
    assert claim_all(memory, memory.loads, SLOT) == [first]
