"""The pool of host buffers: bounded, never waiting for stores, always something for loads."""

from __future__ import annotations

import itertools
import mmap
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from kvshelf import pages
from kvshelf.errors import ConfigError
from kvshelf.memory import arena
from kvshelf.server.segment import Segment
from kvshelf.transfer.staging import STAGING_ALIGNMENT, StagingBuffer, StagingPool
from tests.native.fake_cudart import fake_cudart

SIZE = 10_000
ROUNDED = 12_288
GPU = torch.device("cuda", 0)


@pytest.fixture(autouse=True)
def buffers_come_back() -> Iterator[None]:
    """Release what a test still has: it stands for the transfers that would."""
    taken: list[StagingBuffer] = []

    def note(acquire: Callable[..., list[StagingBuffer] | None]) -> Callable[..., Any]:
        def acquire_and_note(*arguments: Any, **options: Any) -> list[StagingBuffer] | None:
            buffers = acquire(*arguments, **options)
            taken.extend(buffers or ())
            return buffers

        return acquire_and_note

    with pytest.MonkeyPatch.context() as patch:
        for method in ("acquire_for_store", "acquire_for_load"):
            patch.setattr(StagingPool, method, note(getattr(StagingPool, method)))
        yield
    for buffer in dict.fromkeys(taken):
        pool = buffer._pool
        if pool.in_use and buffer not in pool._free:
            buffer.release()


def test_buffers_are_aligned_and_writable_both_ways() -> None:
    pool = StagingPool(16 * ROUNDED, SIZE)
    (buffer,) = pool.acquire_for_load() or ()
    assert buffer.tensor.data_ptr() % STAGING_ALIGNMENT == 0
    assert len(buffer.view) == buffer.tensor.numel() == ROUNDED
    buffer.view[5] = 7
    assert int(buffer.tensor[5]) == 7


def _take_all(pool: StagingPool) -> list[StagingBuffer]:
    taken: list[StagingBuffer] = []
    while one := pool.acquire_for_load(timeout=0):
        taken += one
    return taken


def test_memory_is_bounded_and_reused() -> None:
    pool = StagingPool(16 * ROUNDED, SIZE)
    used = set()
    for _ in range(100):
        (buffer,) = pool.acquire_for_load() or ()
        used.add(buffer.tensor.data_ptr())
        pool.release(buffer)
    assert len(used) == 1
    assert pool.in_use == 0
    starts = sorted(buffer.tensor.data_ptr() for buffer in _take_all(pool))
    assert all(end - start >= ROUNDED for start, end in itertools.pairwise(starts))
    assert len(starts) == pool.in_use == 16


def test_the_buffer_used_last_is_handed_out_first() -> None:
    pool = StagingPool(16 * ROUNDED, SIZE)
    first, second = pool.acquire_for_load(2) or ()
    pool.release(first)
    pool.release(second)
    assert pool.acquire_for_load() == [second]


def test_stores_leave_a_share_for_loads_and_never_wait() -> None:
    pool = StagingPool(16 * ROUNDED, SIZE)
    stores = [pool.acquire_for_store() for _ in range(12)]
    assert all(stores)
    assert pool.acquire_for_store() is None
    loads = [pool.acquire_for_load(timeout=0) for _ in range(4)]
    assert all(loads)


def test_the_buffers_of_one_store_come_all_or_none() -> None:
    pool = StagingPool(16 * ROUNDED, SIZE, together=8)
    taken = pool.acquire_for_store(8)
    assert taken is not None
    assert pool.acquire_for_store(8) is None
    assert pool.in_use == 8
    for buffer in taken:
        pool.release(buffer)
    assert pool.acquire_for_store(8) is not None


def test_the_buffers_of_a_load_come_all_or_none_and_stores_always_leave_so_many() -> None:
    pool = StagingPool(16 * ROUNDED, SIZE)
    stores = pool.acquire_for_store(12)
    assert stores is not None
    assert pool.for_loads == 4
    loads = pool.acquire_for_load(3, 0)
    assert loads is not None
    assert pool.acquire_for_load(2, 0) is None
    assert pool.in_use == 12 + 3
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(pool.acquire_for_load(4, 20)))
    thread.start()
    pool.release(*loads)
    thread.join(20)
    assert got
    assert got[0] is not None
    assert pool.in_use == 16


def test_closing_wakes_loads_and_refuses_everything() -> None:
    pool = StagingPool(4 * ROUNDED, SIZE)
    while pool.acquire_for_load(timeout=0):
        pass
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(pool.acquire_for_load(timeout=20)))
    thread.start()
    pool.close()
    thread.join(20)
    assert got == [None]
    assert pool.acquire_for_store() is None
    assert pool.acquire_for_load() is None


@pytest.mark.parametrize("together", [1, 2, 8])
def test_too_little_staging_is_refused_with_the_number_that_is_enough(together: int) -> None:
    with pytest.raises(ConfigError, match="staging_bytes=") as info:
        StagingPool(3 * ROUNDED, SIZE, together=together)
    enough = int(str(info.value).split("staging_bytes=")[1].split()[0])
    assert StagingPool(enough, SIZE, together=together).acquire_for_store(together) is not None
    with pytest.raises(ConfigError):
        StagingPool(enough - 1, SIZE, together=together)


def test_a_system_without_memory_is_a_full_pool(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    pool = StagingPool(16 * ROUNDED, SIZE)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert pool.acquire_for_store() is None
    assert pool.acquire_for_load(timeout=0) is None
    assert len(caplog.records) == 1
    monkeypatch.undo()
    assert pool.acquire_for_store() is not None


def test_a_store_that_may_wait_gets_what_comes_back() -> None:
    pool = StagingPool(4 * ROUNDED, SIZE)
    stores = pool.acquire_for_store(3)
    assert stores is not None
    assert pool.acquire_for_store(1, 0.01) is None
    got: list[object] = []
    thread = threading.Thread(target=lambda: got.append(pool.acquire_for_store(2, 20)))
    thread.start()
    for buffer in stores:
        pool.release(buffer)
    thread.join(20)
    assert len(got) == 1
    assert got[0] is not None


def test_load_gets_a_buffer_that_is_too_little_for_a_store_that_waited_before() -> None:
    pool = StagingPool(4 * ROUNDED, SIZE, together=2)
    taken = pool.acquire_for_load(4)
    assert taken is not None
    got: list[object] = []
    threading.Thread(target=pool.acquire_for_store, args=(2, 20.0)).start()
    time.sleep(1)
    load = threading.Thread(target=lambda: got.append(pool.acquire_for_load()))
    load.start()
    time.sleep(1)
    pool.release(taken[0])
    load.join(1)
    assert got == [[taken[0]]]
    # The store waits no more.
    pool.close()


@pytest.mark.usefixtures("no_leaks")
def test_a_closed_pool_has_given_all_its_memory_back() -> None:
    pool = StagingPool(16 * ROUNDED, SIZE)
    (late,) = pool.acquire_for_load() or ()
    pool.close()
    late.view[0] = 1
    pool.release(late)
    pool.close()


def test_staging_of_a_gpu_is_page_locked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    locked: list[int] = []

    def pin(view: memoryview, device: torch.device | None, unit: int) -> Callable[[], None]:
        locked.append(view.nbytes)
        return locked.clear

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arena, "page_lock", pin)
    pool = StagingPool(16 * ROUNDED, SIZE, device=GPU)
    assert locked == [16 * ROUNDED]
    taken = pool.acquire_for_store()
    assert taken is not None
    pool.close()
    # A copy may still be under way.
    assert locked
    pool.release(taken[0])
    assert not locked


@pytest.mark.parametrize("enough", [True, False])
def test_large_staging_is_page_locked_in_pieces_or_not_at_all(
    enough: bool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(pages, "LOCKED_AT_ONCE", 6 * ROUNDED)
    with fake_cudart() as runtime:
        runtime.most = 16 * ROUNDED if enough else 12 * ROUNDED
        pool = StagingPool(16 * ROUNDED, SIZE, device=GPU)
        assert pool.pinned == enough
        locked = [6 * ROUNDED, 6 * ROUNDED, 4 * ROUNDED] if enough else []
        assert list(runtime.registered.values()) == locked
        assert ("staging memory (cudaHostRegister failed" in caplog.text) != enough
        taken = pool.acquire_for_load(16, 0)
        assert taken is not None
        assert all(runtime.holds(one.view) == enough for one in taken)
        pool.release(*taken)
        pool.close()
        assert runtime.registered == {}


def test_staging_that_cannot_be_page_locked_is_ordinary_memory(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(_: memoryview, device: torch.device | None, unit: int) -> Callable[[], None]:
        raise RuntimeError("cudaHostRegister failed")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(arena, "page_lock", refuse)
    pool = StagingPool(16 * ROUNDED, SIZE, device=GPU)
    assert "could not pin staging memory" in caplog.text
    assert pool.acquire_for_load(timeout=0) is not None
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert StagingPool(16 * ROUNDED, SIZE, device=GPU).acquire_for_load(timeout=0) is not None


# ------------------------------------------------------------------------------------ lent memory


@pytest.mark.parametrize("pinned", [False, True])
def test_staging_may_lie_in_memory_of_somebody_else(pinned: bool) -> None:
    with fake_cudart() as runtime:
        segment = Segment(4096, regions=1 << 20)
        pool = StagingPool(
            16 * ROUNDED, SIZE, device=GPU if pinned else None, regions=segment.take_region
        )
        assert pool.pinned == pinned
        taken = pool.acquire_for_load(16, 0)
        assert taken is not None
        offsets = [segment.offset_of(buffer.view) for buffer in taken]
        assert sorted(offset for offset in offsets if offset is not None) == [
            *range(0, 16 * ROUNDED, ROUNDED)
        ]
        assert all(runtime.holds(buffer.view) == pinned for buffer in taken)
        pool.release(*taken[1:])
        pool.close()
        # A copy may still be under way.
        assert runtime.holds(taken[0].view) == pinned
        assert segment.take_region(1 << 20) is None
        pool.release(taken[0])
        assert runtime.registered == {}
        assert segment.take_region(1 << 20) is not None


def test_staging_that_nobody_lends_is_of_the_system() -> None:
    segment = Segment(1 << 20, regions=8 * ROUNDED)
    pool = StagingPool(16 * ROUNDED, SIZE, regions=segment.take_region)
    taken = pool.acquire_for_load(16, 0)
    assert taken is not None
    assert {segment.offset_of(buffer.view) for buffer in taken} == {None}
    pool.close()


def test_lent_memory_that_cannot_be_page_locked_is_staging_all_the_same() -> None:
    with fake_cudart() as runtime:
        runtime.most = 0
        segment = Segment(4096, regions=16 * ROUNDED + 4096)
        pool = StagingPool(16 * ROUNDED, SIZE, device=GPU, regions=segment.take_region)
        assert not pool.pinned
        (buffer,) = pool.acquire_for_load() or ()
        assert segment.offset_of(buffer.view) is not None
        pool.close()
