"""The allocator of buffers: what it hands out never overlaps, and comes back whole."""

from __future__ import annotations

import enum
import mmap
import os
import random
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from kvshelf import buffers as buffers_module
from kvshelf.buffers import BUFFER_ALIGNMENT, Buffer, BufferPool
from kvshelf.errors import ConfigError, UnsupportedError
from kvshelf.pages import address_of, map_pages  # noqa: TID251

MakePool = Callable[..., BufferPool]
CAPACITY = 64 * BUFFER_ALIGNMENT


class Memory:
    """The memory that pools take from the system, each piece until it is given back."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._pieces: list[tuple[int, int, Callable[[], object]]] = []
        patch.setattr(buffers_module, "map_pages", self._map)

    def _map(self, nbytes: int, **options: Any) -> memoryview:
        view = map_pages(nbytes, **options)
        self._pieces.append((address_of(view), nbytes, weakref.ref(view.obj)))
        return view

    @property
    def pieces(self) -> list[tuple[int, int]]:
        """Address and bytes of each piece."""
        return [(address, nbytes) for address, nbytes, owner in self._pieces if owner() is not None]

    @property
    def held(self) -> int:
        """Bytes of all pieces."""
        return sum(nbytes for _, nbytes in self.pieces)


@pytest.fixture
def memory(monkeypatch: pytest.MonkeyPatch) -> Memory:
    return Memory(monkeypatch)


@dataclass(eq=False)
class Block:
    """One allocation: its views, rounded size, and the byte written all over it."""

    views: set[Buffer]
    address: int
    nbytes: int
    stamp: int


class PoolMachine(RuleBasedStateMachine):
    """Allocations, views and releases in any order, against a list of what is out."""

    buffers: Bundle[Buffer] = Bundle("buffers")
    segment_bytes: int | None = None

    def __init__(self) -> None:
        super().__init__()
        self.patch = pytest.MonkeyPatch()
        self.memory = Memory(self.patch)
        self.pool = self.make_pool()
        self.blocks: list[Block] = []
        self.stamps = 0

    def make_pool(self) -> BufferPool:
        return BufferPool(CAPACITY, segment_bytes=self.segment_bytes)

    def pieces(self) -> list[tuple[int, int]]:
        """Address and bytes of each piece of memory that the pool has."""
        return self.memory.pieces

    def free_ranges(self) -> list[int]:
        """Sizes of all that is free between what is out."""
        out = sorted((block.address, block.nbytes) for block in self.blocks)
        free = []
        for start, nbytes in self.pieces():
            inside = [(at, size) for at, size in out if start <= at < start + nbytes]
            ends = [start, *(at + size for at, size in inside)]
            starts = [*(at for at, _ in inside), start + nbytes]
            free += [begin - end for end, begin in zip(ends, starts, strict=True)]
        return free

    def block_of(self, buffer: Buffer) -> Block:
        return next(block for block in self.blocks if buffer in block.views)

    @rule(target=buffers, nbytes=st.integers(1, 20 * BUFFER_ALIGNMENT))
    def allocate(self, nbytes: int) -> Buffer | object:
        size = -(-nbytes // BUFFER_ALIGNMENT) * BUFFER_ALIGNMENT
        fits = any(size <= free for free in self.free_ranges())
        held = sum(nbytes for _, nbytes in self.pieces())
        buffer = self.pool.allocate(nbytes)
        if buffer is None:
            assert not fits
            assert size > self.pool.capacity - held
            return _Nothing()
        assert (sum(nbytes for _, nbytes in self.pieces()) > held) == (not fits)
        assert buffer.nbytes == nbytes == buffer.tensor.numel() == len(buffer.view)
        assert buffer.tensor.data_ptr() % BUFFER_ALIGNMENT == 0
        self.stamps = self.stamps % 255 + 1
        buffer.tensor.fill_(self.stamps)
        self.blocks.append(Block({buffer}, buffer.tensor.data_ptr(), size, self.stamps))
        return buffer

    @rule(target=buffers, buffer=buffers, data=st.data())
    def share(self, buffer: Buffer | object, data: st.DataObject) -> Buffer | object:
        if not isinstance(buffer, Buffer) or not buffer.views:
            return _Nothing()
        offset = data.draw(st.integers(0, buffer.nbytes - 1))
        nbytes = data.draw(st.integers(1, buffer.nbytes - offset))
        view = buffer.share(offset, nbytes)
        assert view.tensor.data_ptr() == buffer.tensor.data_ptr() + offset
        block = self.block_of(buffer)
        block.views.add(view)
        assert view.views == buffer.views == len(block.views)
        return view

    @rule(buffer=consumes(buffers))
    def release(self, buffer: Buffer | object) -> None:
        if not isinstance(buffer, Buffer) or not buffer.views:
            return
        block = self.block_of(buffer)
        buffer.release()
        block.views.remove(buffer)
        assert buffer.views == 0
        if not block.views:
            self.blocks.remove(block)
        with pytest.raises(ValueError, match="released"):
            buffer.release()

    @invariant()
    def nobody_wrote_over_anybody(self) -> None:
        for block in self.blocks:
            for view in block.views:
                assert bool((view.tensor == block.stamp).all())

    @invariant()
    def bytes_are_accounted_for(self) -> None:
        held = sum(nbytes for _, nbytes in self.pieces())
        out = sum(block.nbytes for block in self.blocks)
        free = self.free_ranges()
        assert held <= self.pool.capacity <= CAPACITY
        assert min(free, default=0) >= 0
        assert sum(free) == held - out
        assert [live.nbytes for live in self.pool.live()] == [b.nbytes for b in self.blocks]
        assert [live.views for live in self.pool.live()] == [len(b.views) for b in self.blocks]

    def teardown(self) -> None:
        for block in self.blocks:
            for view in block.views:
                view.release()
        assert self.pool.live() == []
        # Free neighbours were joined: each piece is one range again.
        pieces = sorted(nbytes for _, nbytes in self.pieces())
        for nbytes in reversed(pieces):
            assert self.pool.allocate(nbytes) is not None
        assert sorted(nbytes for _, nbytes in self.pieces()) == pieces
        self.patch.undo()


class _Nothing:
    """Stands for a buffer that there was no room for."""


class SegmentedPoolMachine(PoolMachine):
    segment_bytes = 24 * BUFFER_ALIGNMENT


class TensorPoolMachine(PoolMachine):
    def make_pool(self) -> BufferPool:
        # It starts between two multiples of the alignment, and has another dtype.
        tensor = torch.zeros(CAPACITY // 4 + BUFFER_ALIGNMENT, dtype=torch.int32)
        skip = -tensor.data_ptr() % BUFFER_ALIGNMENT // 4 + 1
        self.start = tensor[skip - 1 :].data_ptr() + BUFFER_ALIGNMENT
        return BufferPool.over(tensor[skip : skip + (CAPACITY + BUFFER_ALIGNMENT) // 4 - 1])

    def pieces(self) -> list[tuple[int, int]]:
        return [(self.start, self.pool.capacity)]


TestOneSegment = PoolMachine.TestCase
TestOneSegment.settings = settings(max_examples=20, stateful_step_count=40)
TestTensor = TensorPoolMachine.TestCase
TestTensor.settings = settings(max_examples=20, stateful_step_count=40)
TestManySegments = SegmentedPoolMachine.TestCase
TestManySegments.settings = settings(max_examples=20, stateful_step_count=40)


@given(
    sizes=st.lists(st.integers(1, 12 * BUFFER_ALIGNMENT), max_size=40),
    order=st.randoms(use_true_random=False),
)
def test_buffers_released_in_any_order_leave_one_free_range(
    sizes: list[int], order: random.Random
) -> None:
    pool = BufferPool(CAPACITY)
    buffers = [buffer for size in sizes if (buffer := pool.allocate(size)) is not None]
    order.shuffle(buffers)
    for buffer in buffers:
        buffer.release()
    assert pool.allocate(CAPACITY) is not None


def test_buffer_takes_memory_that_one_of_its_size_released_before_fresh_memory(
    make_pool: MakePool,
) -> None:
    pool = make_pool(CAPACITY)
    buffers = [pool.allocate(units * BUFFER_ALIGNMENT) for units in (1, 2, 1)]
    address = buffers[1].tensor.data_ptr()
    for buffer in buffers:
        buffer.release()
    with pool.allocate(2 * BUFFER_ALIGNMENT) as again:
        assert again.tensor.data_ptr() == address


def test_buffer_of_a_closed_pool_can_be_shared(make_pool: MakePool, memory: Memory) -> None:
    pool = make_pool(CAPACITY)
    with pool.allocate(1) as buffer:
        pool.close()
        view = buffer.share()
    with view:
        assert memory.held == CAPACITY
    assert memory.held == 0


def test_released_view_cannot_be_used(make_pool: MakePool) -> None:
    pool = make_pool(4 * BUFFER_ALIGNMENT)
    buffer = pool.allocate(10)
    assert buffer is not None
    with buffer:
        assert buffer.views == 1
    assert buffer.views == 0
    for use in (
        lambda: buffer.tensor,
        lambda: buffer.view,
        buffer.share,
        buffer.release,
    ):
        with pytest.raises(ValueError, match="released"):
            use()


@pytest.mark.parametrize(("offset", "nbytes"), [(-1, 2), (0, 0), (0, 11), (10, None), (5, 6)])
def test_view_stays_inside_its_buffer(make_pool: MakePool, offset: int, nbytes: int | None) -> None:
    with (
        make_pool(4 * BUFFER_ALIGNMENT).allocate(10) as buffer,
        pytest.raises(ValueError, match="of the"),
    ):
        buffer.share(offset, nbytes)


def test_memory_is_taken_in_segments_and_given_back_at_the_end(
    make_pool: MakePool, memory: Memory
) -> None:
    pool = make_pool(10 * BUFFER_ALIGNMENT, segment_bytes=4 * BUFFER_ALIGNMENT)
    assert memory.held == 0
    small = pool.allocate(1)
    assert memory.held == 4 * BUFFER_ALIGNMENT
    large = pool.allocate(5 * BUFFER_ALIGNMENT)
    assert memory.held == 9 * BUFFER_ALIGNMENT
    assert pool.allocate(4 * BUFFER_ALIGNMENT) is None
    assert small is not None
    assert large is not None
    pool.close()
    assert pool.allocate(1) is None
    assert memory.held == 9 * BUFFER_ALIGNMENT
    small.release()
    large.view[0] = 1
    large.release()
    assert memory.held == 0


def test_system_without_memory_is_a_full_pool(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*args: object) -> mmap.mmap:
        raise OSError(12, "Cannot allocate memory")

    pool = make_pool(16 * BUFFER_ALIGNMENT)
    monkeypatch.setattr(mmap, "mmap", refuse)
    assert pool.allocate(1) is None
    assert pool.allocate(1) is None
    assert len(caplog.records) == 1
    monkeypatch.undo()
    with pool.allocate(1):
        pass


def test_device_pool_has_tensors_and_no_memoryviews(make_pool: MakePool) -> None:
    pool = make_pool(4 * BUFFER_ALIGNMENT, kind="device", device="cpu")
    with pool.allocate(10) as buffer:
        assert buffer.tensor.device == torch.device("cpu")
        assert buffer.tensor.data_ptr() % BUFFER_ALIGNMENT == 0
        with pytest.raises(ValueError, match="use its tensor"):
            _ = buffer.view


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_pinned_memory_without_a_gpu_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="kind='host'"):
        BufferPool(1 << 20, kind="pinned")


class Cuda:
    """CUDA that refuses to pin memory, and keeps the error as the real one does."""

    class Result(enum.Enum):
        OUT_OF_MEMORY = 2

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.kept = False
        zeros = torch.zeros

        def launch(*size: int, device: str = "cpu", **options: object) -> torch.Tensor:
            if device.startswith("cuda") and self.kept:
                self.kept = False
                raise RuntimeError("CUDA error: out of memory")
            return zeros(*size, **options)

        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch, "zeros", launch)

    def cudaHostRegister(self, *_: int) -> Result:  # noqa: N802
        self.kept = True
        return self.Result.OUT_OF_MEMORY

    def cudaGetErrorString(self, result: Result) -> str:  # noqa: N802
        return result.name


def test_memory_that_cannot_be_pinned_leaves_no_error_for_the_engines_next_launch(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cuda = Cuda(monkeypatch)
    assert make_pool(1 << 20, kind="pinned").allocate(1) is None
    assert "failed after 0 of 1048576 bytes with error 2: OUT_OF_MEMORY" in caplog.text
    assert not cuda.kept


@pytest.mark.real
def test_forked_process_has_no_copy_of_pinned_memory(
    make_pool: MakePool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(buffers_module, "page_lock", lambda view, device: lambda: None)
    for kind in ("host", "pinned"):
        buffer = make_pool(1 << 20, kind=kind).allocate(1)
        assert buffer is not None
        with buffer:
            child = os.fork()
            if not child:
                os._exit(_is_mapped(buffer.tensor.data_ptr()))
            _, status = os.waitpid(child, 0)
        assert os.waitstatus_to_exitcode(status) == (kind == "host")


def _is_mapped(address: int) -> bool:
    with open("/proc/self/maps") as maps:
        ranges = [line.split()[0].split("-") for line in maps]
    return any(int(first, 16) <= address < int(end, 16) for first, end in ranges)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensor_on_a_gpu_is_divided() -> None:
    tensor = torch.zeros(1 << 20, dtype=torch.uint8, device="cuda")
    pool = BufferPool.over(tensor)
    assert pool.kind == "device"
    with pool.allocate(1000) as buffer:  # type: ignore[union-attr]
        buffer.tensor.fill_(1)
        with pytest.raises(ValueError, match="use its tensor"):
            _ = buffer.view
    assert int(tensor.sum()) == 1000


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("kind", ["pinned", "device"])
def test_gpu_memory(make_pool: MakePool, memory: Memory, kind: str) -> None:
    device = "cuda" if kind == "device" else None
    before = torch.cuda.memory_allocated()
    pool = make_pool(1 << 24, kind=kind, device=device)
    with pool.allocate(1 << 20) as buffer:
        assert buffer.tensor.data_ptr() % BUFFER_ALIGNMENT == 0
        assert buffer.tensor.is_pinned() == (kind == "pinned")
        buffer.tensor.fill_(3)
        assert int(buffer.tensor.sum()) == 3 << 20
        assert memory.held + torch.cuda.memory_allocated() - before >= 1 << 24
    pool.close()
    assert memory.held == 0
    assert torch.cuda.memory_allocated() == before


@pytest.mark.parametrize(
    ("capacity", "options", "problem"),
    [
        (0, {}, "capacity is 0"),
        (511, {}, "capacity is 511"),
        (1 << 20, {"segment_bytes": 0}, "segment_bytes 0"),
        (1 << 20, {"alignment": 256}, "alignment is 256"),
        (1 << 20, {"alignment": 1000}, "alignment is 1000"),
        (1 << 20, {"kind": "gpu"}, "'gpu'"),
        (1 << 20, {"kind": "device"}, "give a device"),
        (1 << 20, {"device": "cpu"}, "give a device"),
    ],
)
def test_contradictions_are_refused(
    capacity: int, options: dict[str, object], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        BufferPool(capacity, **options)  # type: ignore[arg-type]


def test_callers_tensor_is_divided_and_kept_no_longer_than_needed() -> None:
    memory = mmap.mmap(-1, 1000 * 1024 * 4)
    kept = weakref.ref(memory)
    tensor = torch.frombuffer(memory, dtype=torch.float32).view(1000, 1024)
    pool = BufferPool.over(tensor, alignment=4096)
    assert pool.kind == "host"
    assert 4_091_904 <= pool.capacity <= 4_096_000
    buffer = pool.allocate(4096)
    assert buffer is not None
    assert buffer.tensor.data_ptr() % 4096 == 0
    buffer.view[:4] = b"\0\0\x80?"
    assert float(tensor.sum()) == 1.0
    del tensor, memory
    pool.close()
    assert int(buffer.tensor[2]) == 128
    assert kept() is not None
    buffer.release()
    assert kept() is None


@pytest.mark.parametrize(
    ("tensor", "problem"),
    [
        (torch.zeros(64, 64).T, "expected a contiguous one"),
        (torch.zeros(8), "capacity is"),
    ],
)
def test_tensors_that_cannot_be_divided_are_refused(tensor: torch.Tensor, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        BufferPool.over(tensor)


@pytest.mark.parametrize("nbytes", [0, -1])
def test_nothing_is_not_a_buffer(make_pool: MakePool, nbytes: int) -> None:
    with pytest.raises(ValueError, match="at least 1"):
        make_pool(1 << 20).allocate(nbytes)
