"""Waits: pieces are seen when they come, whatever the storage does, and no thread ends a wait."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from kvshelf.backends import Backend, Deadlines
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import TransientStorageError
from kvshelf.format.keys import KeyChain
from kvshelf.format.kinds import FULL, STATE, WINDOW, kind_key
from kvshelf.format.names import object_name
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.waits import AwaitedPiece, Wait, WaitService
from tests.sim.storage import Fault, FaultyStorage, NamesOnly, posix
from tests.support.formats import format_of_kinds
from tests.support.prompts import make_chunks
from tests.support.threads import none_can_be_started
from tests.support.waiting import PATIENCE, until

FMT = format_of_kinds({FULL: 2, WINDOW: 1, STATE: 2})
ATTEMPT = "0123456789abcdef" * 2
MARKERS = f"{FMT.namespace.folder}/.kvshelf/gave-up"


def full(count: int, seed: int = 0) -> list[AwaitedPiece]:
    return [(FULL, chunk) for chunk in make_chunks(FMT, count, seed)]


def all_kinds(count: int) -> list[AwaitedPiece]:
    """The pieces that a hybrid model may need of `count` chunks."""
    chunks = make_chunks(FMT, count)
    return [*full(count), (WINDOW, chunks[-1]), (STATE, chunks[-1])]


def with_tail() -> list[AwaitedPiece]:
    chain = KeyChain(FMT.namespace.digest, FMT.chunk_size)
    chain.extend(range(2 * FMT.chunk_size + 3))
    tail = chain.tail()
    assert tail is not None
    return [*((FULL, chunk) for chunk in chain.chunks), (FULL, tail)]


def key(piece: AwaitedPiece) -> bytes:
    return kind_key(piece[1].key, piece[0])


def name(piece: AwaitedPiece, shard: int) -> str:
    kind, chunk = piece
    return f"{FMT.namespace.folder}/{object_name(chunk, shard, FMT.of(kind).shards, kind)}"


def shards_of(piece: AwaitedPiece) -> range:
    return range(FMT.of(piece[0]).shards)


def size(piece: AwaitedPiece, shard: int) -> int:
    kind, chunk = piece
    return FMT.of(kind).object_size(shard, chunk.tokens if chunk.tail else None)


class Rig:
    """A shelf, waits on it, and objects that another program stores."""

    def __init__(self, backend: Backend) -> None:
        self.faults = FaultyStorage(backend)
        self.other = backend
        self.guard = GuardedBackend(self.faults)
        self.shelf = Shelf(self.guard)
        self.counters = Counters()
        self.service = WaitService(
            {kind: self.shelf.view(FMT.of(kind)) for kind in FMT.kinds},
            counters=self.counters,
        )

    def put(self, piece: AwaitedPiece) -> None:
        for shard in shards_of(piece):
            self.other.write(name(piece, shard), [bytes(size(piece, shard))], "replace")

    def submit(self, pieces: Sequence[AwaitedPiece]) -> Wait:
        return self.service.submit(pieces, ATTEMPT)

    def close(self) -> None:
        self.faults.heal()
        self.service.close()
        self.shelf.close()


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[Rig]:
    rig = Rig(posix(tmp_path / "shelf"))
    yield rig
    rig.close()


def test_pieces_win_over_a_marker(rig: Rig) -> None:
    """Also where they come while it is looked for."""
    pieces, gate, looks = all_kinds(2), threading.Event(), threading.Event()

    def pause() -> None:
        looks.set()
        gate.wait(PATIENCE)

    rig.other.write(f"{MARKERS}/{ATTEMPT}", [])
    rig.faults.add(Fault("stat", f"{MARKERS}/*", error=pause))
    wait = rig.submit(pieces)
    assert looks.wait(PATIENCE)
    for piece in pieces:
        rig.put(piece)
    gate.set()
    until(lambda: wait.ended)
    assert wait.complete and not wait.gave_up


def test_wait_goes_on_after_the_folders_could_not_be_listed(rig: Rig) -> None:
    piece = full(1)[0]
    rig.faults.add(Fault("folders", error=TransientStorageError(5, "no answer"), times=3))
    wait = rig.submit([piece])
    rig.put(piece)
    until(lambda: wait.complete)


def test_nothing_to_wait_for_is_complete(tmp_path: Path) -> None:
    shelf = Shelf(posix(tmp_path / "shelf"))
    service = WaitService({FULL: shelf.view(FMT)}, counters=Counters())
    assert service.submit([], ATTEMPT).complete
    assert not service._waits
    service.close()


def test_wait_needs_the_objects_of_its_own_kinds_and_ends_at_its_own_marker(rig: Rig) -> None:
    chunks = [chunk for _, chunk in with_tail()]
    rig.put((FULL, chunks[0]))
    rig.put((WINDOW, chunks[0]))
    waits = [
        rig.submit([(kind, chunk) for chunk in chunks for kind in kinds])
        for kinds in ((FULL, STATE), (WINDOW,), (STATE,))
    ]
    other = rig.service.submit([(FULL, chunks[-1])], "f" * 32)
    until(lambda: [wait.seen for wait in waits] == [1, 1, 0])
    rig.other.write(f"{MARKERS}/{ATTEMPT}", [])
    until(lambda: all(wait.gave_up for wait in waits))
    assert [wait.seen for wait in waits] == [1, 1, 0] and not other.ended
    assert list(rig.service._waits) == [other]
    rig.put((FULL, chunks[-1]))
    until(lambda: other.complete)


# --------------------------------------------------------------------------------- the step thread


def test_who_sleeps_is_woken_by_progress_and_no_progress_is_lost(rig: Rig) -> None:
    pieces = full(2)
    wait = rig.submit(pieces)
    assert not rig.service.sleep(0.0)
    rig.put(pieces[0])
    until(lambda: wait.seen == 1)
    # It came before the sleep.
    assert rig.service.sleep(PATIENCE)
    assert not rig.service.sleep(0.0)
    threading.Timer(0.01, lambda: rig.put(pieces[1])).start()
    assert rig.service.sleep(PATIENCE)
    assert wait.complete


def test_closing_ends_the_thread_and_nobody_is_left_waiting(rig: Rig) -> None:
    wait = rig.submit(full(1))
    rig.service.close()
    rig.service.close()
    assert not rig.service._waits
    until(lambda: not rig.service._threads.any)
    late = rig.submit(full(1))
    rig.put(full(1)[0])
    assert not rig.service.sleep(0.0)
    assert not wait.ended and not late.ended and not rig.service._waits


# -------------------------------------------------------------------------------- what is asked


class Names(NamesOnly):
    """A storage with names and sizes only, near or far away."""

    def __init__(self, *, high_latency: bool) -> None:
        super().__init__(10e-3 if high_latency else 3e-6, folders=[FMT.namespace.folder])

    def put(self, piece: AwaitedPiece) -> None:
        for shard in shards_of(piece):
            self.sizes[name(piece, shard)] = size(piece, shard)


@dataclass
class Far:
    backend: Names
    service: WaitService


def far(*, high_latency: bool) -> Far:
    backend = Names(high_latency=high_latency)
    shelf = Shelf(GuardedBackend(backend, Deadlines(PATIENCE, PATIENCE, PATIENCE)))
    for breaker in (shelf.backend.reads, shelf.backend.writes):
        breaker.trip = lambda *_, **__: None  # type: ignore[method-assign]
    views = {kind: shelf.view(FMT.of(kind)) for kind in FMT.kinds}
    return Far(backend, WaitService(views, counters=Counters()))


@pytest.fixture(params=[False, True], ids=["near", "far"])
def distant(request: pytest.FixtureRequest) -> Iterator[Far]:
    rig = far(high_latency=request.param)
    yield rig
    rig.backend.gate.set()
    rig.service.close()


def test_wait_that_is_cancelled_during_a_round_stays_as_it_was(distant: Far) -> None:
    others, window = full(1, seed=1), all_kinds(1)[1]
    for piece in (window, *others):
        distant.backend.put(piece)
    distant.backend.gate.clear()
    wait = distant.service.submit([window], "")
    until(lambda: len(distant.backend.asked) == 1)
    wait.cancel()
    other = distant.service.submit(others, "")
    distant.backend.gate.set()
    until(lambda: other.complete)
    assert (wait.seen, wait.ended) == (0, False)


# ------------------------------------------------------------------------------- when things fail


def test_without_a_thread_there_is_no_service_and_a_thread_that_is_missing_is_started_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with none_can_be_started(monkeypatch, "kvshelf-wait"), pytest.raises(RuntimeError):
        Rig(posix(tmp_path / "shelf"))
    rig = Rig(posix(tmp_path / "shelf"))
    gate = threading.Event()
    pieces = full(1)
    with none_can_be_started(monkeypatch, "kvshelf-wait"):
        rig.faults.add(Fault("stat", "*.safetensors", wait=gate, times=1))
        wait = rig.submit(pieces)
        until(lambda: len(rig.service._threads._stuck) == 1)
    rig.put(pieces[0])
    until(lambda: rig.service.sleep(0.0) or wait.complete)
    until(lambda: wait.complete)
    gate.set()
    rig.close()
