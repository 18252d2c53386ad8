"""Store and load pipelines between a paged KV cache and a shelf.

Owns the background threads of a worker and everything in flight on them.

Store: the step thread gathers a chunk's shards into staging buffers (``store``), or where
the cache is on a device begins to; a store thread waits until they are there, looks whether
the object exists, hashes it and publishes it.
Load: a load thread reads an object into a staging buffer, verifies it and scatters it
into the paged cache; when all objects of a load are in or given up, the load is
``finished`` and says from which chunk on it failed. An object that does not come in
time is given up: its thread may hang for ever, the load does not.

Order: objects of a load are read from its beginning, as many at once as there are threads,
and scattered as they arrive. Every other object is one of the oldest load, so that each comes
to its end; every other one of the load with the least left, so that a long one holds up no
short one. Loads that equal one another are so read one after the other. *Early* loads, which
nobody waits for yet, get the threads that nobody else needs, but not all. What several loads
want at the same time is read once, for all of them.

Deadlines: each object has that of the shelf's backend (:mod:`kvshelf.backends.guard`). A
load as a whole has that of an object twice as large as everything that is to be loaded when
it comes, itself included: half of what is read may be of later ones. An early load has none.
While the storage is given a rest, loads fail at once and stores are dropped.

What is dropped: staging bounds the memory, and a store for which it has no room is dropped,
since the step must not wait. Behind a chunk that is not on the shelf no look-up finds
anything, so once a chunk is dropped, or its store fails, those that continue it are dropped
as well: staging is better used for prefixes that begin. Such a *hole* is known by its key,
so it holds for all requests that share the prefix, and ends when somebody stores the chunk
here. It does not hold for a request whose look-up came later: that has seen what is before
its first chunk, perhaps stored by another engine, and it stores the hole itself if not.

Contracts
---------
* ``store``, ``load``, ``poll`` and ``cancel`` are called on the step thread and never
  touch storage. What does not fit into staging is dropped and counted. Any number of
  other threads may call them too.
* Loads and stores have threads of their own, so that a storage which takes no writes
  cannot keep loads waiting. All are daemon threads: a call that never returns does not
  keep the process alive. A thread that the storage keeps is replaced
  (:mod:`kvshelf.threads`); its staging buffer stays with it.
* Of a paged cache only the slots given are touched: by a gather inside ``store``, by a
  scatter between ``load`` and the moment the load is reported finished, whatever its
  end: loaded, failed, cancelled, out of time.
* Nothing unverified is ever scattered.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Literal, Protocol

import torch

from kvshelf import device, ops
from kvshelf.backends import Properties
from kvshelf.backends.base import CHEAP_PROBE
from kvshelf.chunkfile import ObjectFormat
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    DeviceUnavailableError,
    NotRegularError,
    ObjectMissingError,
    StorageError,
    UnavailableStorageError,
    UnsupportedError,
)
from kvshelf.finite import FiniteCheck
from kvshelf.identity import Chunk, object_name
from kvshelf.layout import PagedLayout, PermutedLayout
from kvshelf.metrics import Counters
from kvshelf.shelf import Presence, Shelf
from kvshelf.staging import StagingBuffer, StagingPool
from kvshelf.threads import StorageThreads
from kvshelf.topology import ShardPlan

logger = logging.getLogger(__name__)

_STORED_MEMORY = 65536
_HOLES_MEMORY = 16384
#: Scheduler and worker tell each other times as ages, which grow on the way.
_HOLE_SLACK_SECONDS = 0.1
_JOIN_SECONDS = 0.5
_NEAR_THREADS = 2
_FAR_THREADS = 16


def useful_threads(properties: Properties) -> tuple[int, int]:
    """Return how many threads should load from a storage and how many store to it.

    A local disk is kept busy by two, which compete with the model for processors. Threads that
    wait for a network do not.
    """
    if properties.probe_cost < CHEAP_PROBE:
        return _NEAR_THREADS, _NEAR_THREADS // 2
    threads = max(_NEAR_THREADS, min(_FAR_THREADS, properties.concurrency))
    return threads, max(1, threads // 4)


class Failure(Enum):
    """Why an object could not be loaded."""

    MISSING = "missing"
    BAD = "bad"
    ERROR = "error"
    #: The storage is given a rest, or the device is not used: that says nothing of the object.
    UNAVAILABLE = "unavailable"


@dataclass(frozen=True, slots=True)
class LayerRun:
    """Consecutive layers of a stage whose paged caches have one layout.

    Attributes
    ----------
    first_layer : int
        Index of the first of them in the namespace's order of layers.
    caches : list of Tensor
        The paged cache of each layer.
    layout : PagedLayout or PermutedLayout
        How a block lies in each of them.
    """

    first_layer: int
    caches: list[torch.Tensor]
    layout: PagedLayout | PermutedLayout


class KVMemory(Protocol):
    """Where KV is gathered from and scattered to, cut into shards."""

    def gather(self, shard: int, slots: torch.Tensor, payload: torch.Tensor) -> None:
        """Copy the slots' KV of one shard into `payload` (uint8 ``[payload bytes]``)."""

    def scatter(self, shard: int, slots: torch.Tensor, payload: torch.Tensor) -> None:
        """Copy `payload` into the slots of one shard, skipping slots that are −1."""


class PagedKVCache:
    """The paged KV cache of one worker, as the objects of a namespace see it.

    Parameters
    ----------
    fmt : ObjectFormat
    runs : Sequence[LayerRun]
        All layers of the worker's stage, in order.
    plan : ShardPlan, optional
        The shards whose heads the worker holds; all of them when absent.

    Raises
    ------
    ConfigError
        If layers and heads do not match those of the namespace.
    """

    def __init__(
        self, fmt: ObjectFormat, runs: Sequence[LayerRun], plan: ShardPlan | None = None
    ) -> None:
        self._fmt = fmt
        self._calls: dict[int, list[tuple[LayerRun, int, int, int, int]]] = {}
        layers = sum(len(run.caches) for run in runs)
        shards = (plan or ShardPlan.whole(fmt.shards)).shards
        for place, shard in enumerate(shards):
            specs = fmt.tensors(shard)
            if layers != len(specs):
                raise ConfigError(
                    f"{layers} layers are registered, but objects of this namespace hold"
                    f" {len(specs)}: the engine's model does not match the namespace"
                )
            calls = []
            for run in runs:
                start = specs[run.first_layer].offset
                last = specs[run.first_layer + len(run.caches) - 1]
                end = last.offset + last.nbytes
                heads = run.layout.heads // len(shards)
                if heads * len(shards) != run.layout.heads:
                    raise ConfigError(
                        f"{run.layout.heads} KV heads cannot be split over {len(shards)}"
                        " shards: set `shards` to a divisor"
                    )
                slots, rest = divmod(
                    end - start, len(run.caches) * run.layout.chunk_bytes(1, heads)
                )
                if rest or fmt.chunk_size % max(1, slots):
                    raise ConfigError(
                        f"objects of this namespace hold {end - start} bytes of"
                        f" {len(run.caches)} layers, which are no whole rows of"
                        f" {run.layout.chunk_bytes(1, heads)} bytes of the registered caches:"
                        " the engine's model does not match the namespace"
                    )
                calls.append((run, start, end, place * heads, heads))
            self._calls[shard] = calls

    def calls(self, shard: int) -> Sequence[tuple[LayerRun, int, int, int, int]]:
        """Return each run with its bytes in a payload, its first head and number of heads."""
        return self._calls[shard]

    def gather(self, shard: int, slots: torch.Tensor, payload: torch.Tensor) -> None:
        """Copy the slots' KV of one shard into `payload` (uint8 ``[payload bytes]``)."""
        for run, start, end, first_head, heads in self._calls[shard]:
            ops.gather_kv(run.caches, slots, payload[start:end], run.layout, first_head, heads)

    def scatter(self, shard: int, slots: torch.Tensor, payload: torch.Tensor) -> None:
        """Copy `payload` into the slots of one shard, skipping slots that are −1."""
        for run, start, end, first_head, heads in self._calls[shard]:
            ops.scatter_kv(run.caches, slots, payload[start:end], run.layout, first_head, heads)


class DeviceKVCache:
    """The paged KV cache of one worker on a device, behind buffers and streams of its own.

    Parameters
    ----------
    fmt : ObjectFormat
    runs : Sequence[LayerRun]
        All layers of the worker's stage, in order; their caches are on one device.
    plan : ShardPlan, optional
        The shards whose heads the worker holds; all of them when absent.
    ring : int
        Chunks that may be on their way from the device at once.
    loads : int
        Objects that may be on their way to it: the number of threads that load.
    pinned : bool
        Staging is page-locked.
    streams : Streams, optional
        The device's own when absent.

    Raises
    ------
    ConfigError
        If layers and heads do not match those of the namespace, or the device has no memory
        for the buffers.
    UnsupportedError
        If the elements of a cache are permuted, which no kernel serves.
    """

    def __init__(
        self,
        fmt: ObjectFormat,
        runs: Sequence[LayerRun],
        plan: ShardPlan | None = None,
        *,
        ring: int = device.DEFAULT_RING,
        loads: int = 2,
        pinned: bool = False,
        streams: device.Streams | None = None,
    ) -> None:
        self._shards = (plan or ShardPlan.whole(fmt.shards)).shards
        # All shards of a worker are alike but for their heads.
        calls = [
            device.LayerCall(run.caches, _strided(run), start, end, heads)
            for run, start, end, _, heads in PagedKVCache(fmt, runs, plan).calls(self._shards[0])
        ]
        self._path = device.DevicePath(
            calls, len(self._shards), ring=ring, loads=loads, pinned=pinned, streams=streams
        )

    @property
    def problem(self) -> str:
        """See :attr:`kvshelf.device.DevicePath.problem`."""
        return self._path.problem

    def gather(self, slots: torch.Tensor, payloads: Sequence[torch.Tensor]) -> device.Copied | None:
        """See :meth:`kvshelf.device.DevicePath.gather`: all shards of the worker at once."""
        return self._path.gather(slots, payloads)

    def scatter(
        self, shard: int, slots: torch.Tensor, payload: torch.Tensor, fence: object
    ) -> None:
        """See :meth:`kvshelf.device.DevicePath.scatter`."""
        self._path.scatter(self._shards.index(shard), slots, payload, fence)

    def fence(self) -> object:
        """See :meth:`kvshelf.device.DevicePath.fence`."""
        return self._path.fence()

    def pause(self) -> None:
        """See :meth:`kvshelf.device.DevicePath.pause`."""
        self._path.pause()

    def resume(self) -> None:
        """See :meth:`kvshelf.device.DevicePath.resume`."""
        self._path.resume()

    def close(self) -> None:
        """See :meth:`kvshelf.device.DevicePath.close`."""
        self._path.close()


def _strided(run: LayerRun) -> PagedLayout:
    if isinstance(run.layout, PermutedLayout):
        raise UnsupportedError(
            f"the KV caches on {run.caches[0].device} are permuted inside their blocks; gather and"
            " scatter of such caches exist for CPUs only"
        )
    return run.layout


@dataclass(frozen=True, slots=True)
class ChunkSlots:
    """One chunk and where it lies in the paged cache.

    Attributes
    ----------
    chunk : Chunk
    slots : Tensor
        int64 CPU tensor: a slot for each token, or for native layouts a block id for
        each block of the chunk; −1 = skip (loads only).
    memory : KVMemory, optional
        Where the slots are; the transfer's own paged cache when absent.
    """

    chunk: Chunk
    slots: torch.Tensor
    memory: KVMemory | None = None


@dataclass(eq=False, slots=True)
class Load:
    """One load, and its outcome once ``finished``.

    Attributes
    ----------
    request_id : str
    items : Sequence[ChunkSlots]
        In the order of the prompt.
    failed_at : int or None
        Index in `items` of the first chunk that is not in the cache.
    failures : list
        The chunks that failed, with the reason. Those given up after a failure before
        them are not listed.
    early : bool
        Nobody waits for it yet.
    cancelled, finished : bool
    """

    request_id: str
    items: Sequence[ChunkSlots]
    early: bool = False
    failed_at: int | None = None
    failures: list[tuple[Chunk, Failure]] = field(default_factory=list)
    cancelled: bool = False
    finished: bool = False
    #: Objects of each item that are in the cache, and number of leading items with all.
    _arrived: list[int] = field(default_factory=list)
    _leading: int = 0
    #: Objects that were taken, counted over items and shards, and the first that was not.
    _taken: bytearray = field(default_factory=bytearray)
    _next: int = 0
    #: The item of each key.
    _places: dict[bytes, int] = field(default_factory=dict)
    #: Threads that are copying into the cache at this moment.
    _scattering: int = 0
    _deadline: float = 0.0
    _bytes: int = 0
    #: What the engine had enqueued on the cache's device before.
    _fence: object = None
    _on_done: Callable[[Load], None] | None = None

    @property
    def leading(self) -> int:
        """Number of leading items that are in the cache, however the load ended."""
        return self._leading

    @property
    def _wanted(self) -> int:
        """Number of leading items that are still of use."""
        if self.cancelled:
            return 0
        return len(self.items) if self.failed_at is None else self.failed_at


@dataclass(eq=False, slots=True)
class _Piece:
    """One object on its way."""

    load: Load
    item: int
    shard: int
    arrived: bool = False
    late: bool = False
    #: The same object for other loads.
    sharers: list[_Piece] = field(default_factory=list)

    @property
    def object(self) -> tuple[bytes, int]:
        """What is to be read: a chunk's key and a shard."""
        return self.load.items[self.item].chunk.key, self.shard


@dataclass(eq=False, slots=True)
class _StoreJob:
    chunk: Chunk
    buffers: list[StagingBuffer]
    repair: bool
    #: When the chunk was last seen missing.
    seen: float
    on_done: Callable[[Chunk, StoreResult], None] | None
    #: Those who asked for the same meanwhile.
    waiting: list[Callable[[Chunk, StoreResult], None]] = field(default_factory=list)
    ended: bool = False
    copied: device.Copied = device.ENDED

    def tell(self, result: StoreResult, call: Callable[..., None]) -> None:
        """Tell everybody how it ended."""
        if self.on_done is not None:
            call(self.on_done, self.chunk, result)
        for on_done in self.waiting:
            call(on_done, self.chunk, "existed" if result in ("published", "repaired") else result)


StoreOutcome = Literal["queued", "known", "full", "hole", "paused"]
StoreResult = Literal["published", "existed", "repaired", "failed", "lost"]


class _LineLimit:
    """At most ten lines a minute, and one for each object."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lines: deque[float] = deque()
        self._seen: OrderedDict[object, None] = OrderedDict()

    def allows(self, about: object) -> bool:
        now = time.monotonic()
        with self._lock:
            if about in self._seen:
                return False
            while self._lines and self._lines[0] < now - 60:
                self._lines.popleft()
            if len(self._lines) >= 10:
                return False
            self._lines.append(now)
            self._seen[about] = None
            while len(self._seen) > 4096:
                self._seen.popitem(last=False)
            return True


class Transfer:
    """The store and load pipelines of one worker.

    Parameters
    ----------
    shelf : Shelf
    fmt : ObjectFormat
    cache : KVMemory or DeviceKVCache or None
        None where every :class:`ChunkSlots` names its own memory. A cache on a device is
        closed with the transfer.
    staging : StagingPool
        Its buffers must hold the largest object of `fmt`.
    counters : Counters
    plan : ShardPlan, optional
        The shards that this worker reads and writes; all of them when absent.
    load_threads, store_threads : int
    check_finite : bool
        Do not store chunks that hold NaN or infinity.
    on_thread_start : Callable, optional
        Called first on each thread with ``"load"`` or ``"store"``, to set its processors.

    Raises
    ------
    RuntimeError
        If the system allows no thread that loads, or none that stores.
    """

    def __init__(
        self,
        shelf: Shelf,
        fmt: ObjectFormat,
        cache: KVMemory | DeviceKVCache | None,
        staging: StagingPool,
        *,
        counters: Counters,
        plan: ShardPlan | None = None,
        load_threads: int = 2,
        store_threads: int = 1,
        check_finite: bool = False,
        on_thread_start: Callable[[str], None] | None = None,
    ) -> None:
        self._shelf = shelf
        self._fmt = fmt
        self._cache = cache
        self._staging = staging
        self._counters = counters
        self._plan = plan or ShardPlan.whole(fmt.shards)
        self._reads = self._plan.shards
        self._finite = FiniteCheck(fmt) if check_finite else None
        self._log = _LineLimit()
        self._closing = False
        self._deadlines = shelf.backend.deadlines
        shelf.backend.count_into(counters.add)

        self._load_lock = threading.Lock()
        self._load_work = threading.Condition(self._load_lock)
        self._load_done = threading.Condition(self._load_lock)
        #: Loads of which not all objects were taken, the oldest first.
        self._loads: deque[Load] = deque()
        self._early: deque[Load] = deque()
        self._oldest_next = True
        self._most_early = max(1, load_threads - max(1, load_threads // 4))
        self._active: dict[str, Load] = {}
        self._active_early: dict[str, Load] = {}
        self._finished: list[Load] = []
        #: What each load thread is at.
        self._pieces: dict[int, _Piece] = {}
        #: Objects that are being read, with the piece that others may share.
        self._reading: dict[tuple[bytes, int], _Piece] = {}
        self._chunk_bytes = sum(fmt.object_size(shard) for shard in self._reads)

        self._store_lock = threading.Lock()
        self._store_work = threading.Condition(self._store_lock)
        self._store_idle = threading.Condition(self._store_lock)
        self._stores: deque[_StoreJob] = deque()
        #: What each store thread is at.
        self._storing: dict[int, _StoreJob] = {}
        self._in_flight: dict[bytes, _StoreJob] = {}
        self._holes: OrderedDict[bytes, float] = OrderedDict()
        self._stored_at: OrderedDict[bytes, float] = OrderedDict()
        #: The youngest, for there may be nobody who takes them.
        self._repaired: deque[bytes] = deque(maxlen=_STORED_MEMORY)
        #: What look-ups elsewhere have to hear of; where probes are cheap they ask again anyway.
        self._published: deque[bytes] = deque(maxlen=_STORED_MEMORY)
        self._notes_published = shelf.backend.properties.probe_cost >= CHEAP_PROBE

        self._load_threads = self._threads(
            "load", load_threads, self._run_loads, on_thread_start, self._load_late, self._rest
        )
        self._store_threads = self._threads(
            "store", store_threads, self._run_stores, on_thread_start, self._store_late, self._pause
        )
        self._load_threads.start()
        try:
            self._store_threads.start()
        except RuntimeError:
            # Nobody can close what was not made.
            self._closing = True
            self._load_threads.close()
            with self._load_lock:
                self._load_work.notify_all()
            raise

    def _threads(
        self,
        kind: str,
        count: int,
        run: Callable[[], None],
        on_thread_start: Callable[[str], None] | None,
        on_kept: Callable[[int], None],
        on_stop: Callable[[], None],
    ) -> StorageThreads:
        return StorageThreads(
            f"kvshelf-{kind}",
            count,
            run,
            self._shelf.backend,
            count_kept=lambda: self._counters.add("kept_threads"),
            on_kept=on_kept,
            on_stop=on_stop,
            on_thread_start=None if on_thread_start is None else lambda: on_thread_start(kind),
        )

    # ---------------------------------------------------------------- stores

    def _memory(self, item: ChunkSlots) -> KVMemory | DeviceKVCache:
        memory = self._cache if item.memory is None else item.memory
        if memory is None:
            raise ValueError("this transfer has no paged cache: the chunk must name its memory")
        return memory

    def store(
        self,
        item: ChunkSlots,
        *,
        repair: bool = False,
        age: float = 0.0,
        wait: float = 0.0,
        on_done: Callable[[Chunk, StoreResult], None] | None = None,
    ) -> StoreOutcome:
        """Gather one chunk and queue it for publishing. Step thread, unless it may wait.

        Parameters
        ----------
        item : ChunkSlots
            Slots of all tokens of the chunk.
        repair : bool
            What stands at the chunk's name was found bad: verify and replace it.
        age : float
            Seconds since the chunk was last seen missing. A chunk that was published
            here later than that is not gathered again, and one whose parent was dropped
            later than that is dropped.
        wait : float
            Seconds to wait for staging when it is used up.
        on_done : Callable, optional
            Called once for a chunk that was queued, on the thread that ended its store,
            with ``published``, ``existed``, ``repaired``, ``failed`` or ``lost`` (at
            shutdown). Must not block.

        Returns
        -------
        str
            ``queued``; ``known`` (in flight, published, or another worker's to write); or
            dropped: ``full`` (staging is used up), ``hole`` (the chunk before it was dropped),
            ``paused`` (the storage takes no writes for now or keeps all threads that store, the
            device is not used, or the transfer is closed).
        """
        key = item.chunk.key
        now = time.monotonic()
        shards = self._plan.writes(item.chunk.index)
        if not shards:
            # Another worker with the same heads writes it, but not behind a hole.
            self._behind_hole(item.chunk, now - age)
            if repair:
                with self._store_lock:
                    self._repaired.append(key)
            return "known"
        properties = self._shelf.backend.properties
        takes = properties.available and not properties.read_only and not self._closing
        if not (takes and self._store_threads.ready()):
            self._counters.add("store_dropped_paused")
            self._note_hole(key)
            self._say_read_only()
            return "paused"
        with self._store_lock:
            job = self._in_flight.get(key)
            if job is not None:
                if on_done is None:
                    return "known"
                job.waiting.append(on_done)
                return "queued"
            stored_at = self._stored_at.get(key)
            if stored_at is not None and stored_at >= now - age and not repair:
                return "known"
        if self._behind_hole(item.chunk, now - age):
            self._counters.add("store_dropped_hole")
            return "hole"
        memory = self._memory(item)
        buffers = self._staging.acquire_for_store(len(shards), wait)
        if buffers is None:
            self._counters.add("store_dropped_full")
            self._note_hole(key)
            return "full"
        begin = time.perf_counter()
        copied = None
        try:
            copied = self._gather(memory, shards, item.slots, buffers)
        except DeviceUnavailableError:
            self._counters.add("store_dropped_paused")
            return "paused"
        finally:
            if copied is None:
                for buffer in buffers:
                    self._staging.release(buffer)
                self._note_hole(key)
        if copied is None:
            self._counters.add("store_dropped_full")
            return "full"
        self._counters.observe("gather", time.perf_counter() - begin)
        job = _StoreJob(item.chunk, buffers, repair, now - age, on_done, copied=copied)
        with self._store_lock:
            taken = not self._closing and self._store_threads.any
            if taken:
                self._holes.pop(key, None)
                self._in_flight[key] = job
                self._stores.append(job)
                self._store_work.notify()
        if taken:
            return "queued"
        self._release(job)
        self._counters.add("store_dropped_paused")
        self._note_hole(key)
        return "paused"

    def _say_read_only(self) -> None:
        """Say, once, what no failed write could tell."""
        backend = self._shelf.backend
        read_only = not backend.writes.stopped and backend.properties.read_only
        if read_only and self._log.allows("read-only"):
            logger.warning("%s takes no writes: nothing is stored", self._shelf.url)

    def _note_hole(self, key: bytes) -> None:
        """Remember a chunk that is not stored."""
        with self._store_lock:
            self._holes[key] = time.monotonic()
            self._holes.move_to_end(key)
            while len(self._holes) > _HOLES_MEMORY:
                self._holes.popitem(last=False)

    def _behind_hole(self, chunk: Chunk, seen: float) -> bool:
        """Whether the chunk before `chunk` was dropped after `seen`; it is a hole then as well."""
        hole = self._holes.get(chunk.parent)
        if hole is None or hole < seen - _HOLE_SLACK_SECONDS:
            return False
        self._note_hole(chunk.key)
        return True

    def _gather(
        self,
        memory: KVMemory | DeviceKVCache,
        shards: Sequence[int],
        slots: torch.Tensor,
        buffers: Sequence[StagingBuffer],
    ) -> device.Copied | None:
        """Copy a chunk into staging, or begin to; None when the device has no room for it."""
        offset = self._fmt.data_offset
        payloads = [
            buffer.tensor[offset : self._fmt.object_size(shard)]
            for shard, buffer in zip(shards, buffers, strict=True)
        ]
        if isinstance(memory, DeviceKVCache):
            return memory.gather(slots, payloads)
        for shard, payload in zip(shards, payloads, strict=True):
            memory.gather(shard, slots, payload)
        return device.ENDED

    def take_repaired(self) -> list[bytes]:
        """Return the keys whose bad objects were replaced since the last call."""
        with self._store_lock:
            keys = list(self._repaired)
            self._repaired.clear()
            return keys

    def take_published(self) -> list[bytes]:
        """Return the keys of chunks that stores since the last call left on the shelf.

        Nothing where probes are cheap: what is not remembered need not be corrected.
        """
        with self._store_lock:
            keys = list(self._published)
            self._published.clear()
            return keys

    def forget_stored(self) -> None:
        """Forget what was published here, so that it is stored again when missing."""
        with self._store_lock:
            self._stored_at.clear()

    def _next_job(self) -> _StoreJob | None:
        """Take the next chunk to store, waiting for one. Store threads."""
        with self._store_lock:
            while not self._stores:
                if self._closing:
                    return None
                self._store_work.wait()
            job = self._stores.popleft()
            self._storing[threading.get_ident()] = job
            return job

    def _run_stores(self) -> None:
        while not self._store_threads.replaced() and (job := self._next_job()) is not None:
            result: StoreResult = "failed"
            try:
                job.copied.wait()
                if self._behind_hole(job.chunk, job.seen):
                    self._counters.add("store_dropped_hole")
                else:
                    result = self._publish(job)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                self._store_failed(job, error)
            finally:
                for buffer in job.buffers:
                    self._staging.release(buffer)
                self._end_store(threading.get_ident(), job, result)

    def _pause(self) -> None:
        """Drop the stores that no thread is left for."""
        if self._store_threads.any:
            return
        for job in self._take_waiting():
            self._counters.add("store_dropped_paused")
            self._note_hole(job.chunk.key)
            self._drop(job, "failed")

    def _take_waiting(self) -> list[_StoreJob]:
        with self._store_lock:
            waiting = list(self._stores)
            self._stores.clear()
            return waiting

    def _drop(self, job: _StoreJob, result: StoreResult) -> None:
        """End a store that no thread is at."""
        self._release(job)
        with self._store_lock:
            job.ended = True
            if self._in_flight.get(job.chunk.key) is job:
                del self._in_flight[job.chunk.key]
            self._store_idle.notify_all()
        job.tell(result, self._call)

    def _release(self, job: _StoreJob) -> None:
        # A device that is still copying into a buffer would write into memory given back.
        with contextlib.suppress(RuntimeError):
            job.copied.wait()
        for buffer in job.buffers:
            self._staging.release(buffer)

    def _store_late(self, thread: int) -> None:
        """Give up the store of a thread that the storage keeps, with its buffers."""
        with self._store_lock:
            job = self._storing.get(thread)
        if job is not None:
            self._counters.add("store_errors")
            self._note_hole(job.chunk.key)
            self._end_store(thread, job, "failed")

    def _end_store(self, thread: int, job: _StoreJob, result: StoreResult) -> None:
        """Report the end of a store, once: a thread that was given up may come back."""
        key = job.chunk.key
        with self._store_lock:
            self._storing.pop(thread, None)
            if result != "failed":
                self._stored_at[key] = time.monotonic()
                self._stored_at.move_to_end(key)
                while len(self._stored_at) > _STORED_MEMORY:
                    self._stored_at.popitem(last=False)
                if job.repair:
                    self._repaired.append(key)
                if self._notes_published:
                    self._published.append(key)
            if job.ended:
                return
            job.ended = True
            if self._in_flight.get(key) is job:
                del self._in_flight[key]
            self._store_idle.notify_all()
        job.tell(result, self._call)

    def _publish(self, job: _StoreJob) -> StoreResult:
        fmt, shelf, chunk = self._fmt, self._shelf, job.chunk
        written = 0
        repaired = 0
        shards = self._plan.writes(chunk.index)
        if self._finite is not None and not self._is_finite(self._finite, job):
            return "failed"
        answers = shelf.probe(fmt, [(chunk, shard) for shard in shards])
        for shard, answer, buffer in zip(shards, answers, job.buffers, strict=True):
            if answer is Presence.PRESENT and not job.repair:
                continue
            size = fmt.object_size(shard)
            image = buffer.view[:size]
            fmt.seal(image, chunk, shard)
            if answer is Presence.MISSING:
                shelf.write(fmt, chunk, shard, [image])
                written += size
            elif answer is not Presence.PRESENT or job.repair:
                result = shelf.repair(fmt, chunk, shard, [image])
                if result.value != "existed":
                    repaired += 1
                    written += size
                    self._say_replaced(chunk, shard, answer)
        if written:
            self._counters.add("stored_chunks")
            self._counters.add("stored_bytes", written)
        else:
            self._counters.add("store_existed")
        if repaired:
            self._counters.add("store_repaired", repaired)
        return "repaired" if repaired else "published" if written else "existed"

    def _is_finite(self, check: FiniteCheck, job: _StoreJob) -> bool:
        offset = self._fmt.data_offset
        for shard, buffer in zip(self._plan.writes(job.chunk.index), job.buffers, strict=True):
            layer = check.first_bad(shard, buffer.tensor[offset : self._fmt.object_size(shard)])
            if layer is not None:
                self._counters.add("store_not_finite")
                if self._log.allows("not finite"):
                    logger.warning(
                        "a chunk was not stored: the engine's KV holds NaN or infinity in layer"
                        " %s; further ones are only counted",
                        layer,
                    )
                return False
        return True

    def _say_replaced(self, chunk: Chunk, shard: int, found: Presence) -> None:
        name = object_name(chunk, shard, self._fmt.shards)
        # A load that met the object has said so already.
        if self._log.allows(("load", name)):
            logger.warning("object %s was bad (%s) and has been replaced", name, found.value)

    def _store_failed(self, job: _StoreJob, error: Exception) -> None:
        if job.ended:
            # It was counted when it was given up.
            return
        chunk = job.chunk
        self._note_hole(chunk.key)
        if isinstance(error, (UnavailableStorageError, DeviceUnavailableError)):
            self._counters.add("store_dropped_paused")
            return
        self._counters.add("store_errors")
        if isinstance(error, StorageError):
            # The guard has said so already where the whole storage takes no writes.
            if not self._shelf.read_only and self._log.allows(("store", chunk.key)):
                logger.warning("a chunk was not stored: %s", error)
        elif self._log.allows(("store", type(error))):
            logger.error("a chunk was not stored", exc_info=error)

    # ---------------------------------------------------------------- loads

    def load(
        self,
        request_id: str,
        items: Sequence[ChunkSlots],
        *,
        early: bool = False,
        on_done: Callable[[Load], None] | None = None,
    ) -> Load:
        """Start to load chunks into the paged cache. Step thread; returns at once.

        Parameters
        ----------
        request_id : str
            Different from those of all loads that are not yet finished; early ones have
            names of their own.
        items : Sequence of ChunkSlots
        early : bool
            Nobody waits for it yet: other loads go first. Needs `on_done`.
        on_done : Callable, optional
            Called once when the load is finished, perhaps before this method returns, on
            the thread that ended it and with a lock held: it must not block, and must not
            call the transfer. Such a load is not returned by :meth:`poll`; whoever waits
            for it calls :meth:`check` now and then.
        """
        load = Load(
            request_id,
            items,
            early,
            _arrived=[0] * len(items),
            _bytes=len(items) * self._chunk_bytes,
            _taken=bytearray(len(items) * len(self._reads)),
            _places={item.chunk.key: place for place, item in enumerate(items)},
            _on_done=on_done,
        )
        if early and on_done is None:
            raise ValueError("an early load needs on_done: it is not returned by poll()")
        usable = True
        if isinstance(self._cache, DeviceKVCache) and any(item.memory is None for item in items):
            try:
                load._fence = self._cache.fence()
            except DeviceUnavailableError:
                usable = False
        with self._load_lock:
            ahead = sum(other._bytes for other in self._active.values() if not other.finished)
            seconds = self._deadlines.to_read(2 * (ahead + load._bytes))
            load._deadline = time.monotonic() + seconds
            (self._active_early if early else self._active)[request_id] = load
            if not items:
                self._complete(load)
            elif not (
                usable
                and self._shelf.available
                and not self._closing
                and self._load_threads.ready()
            ):
                self._refuse(load)
            else:
                (self._early if early else self._loads).append(load)
                for piece in self._reading.values():
                    self._share(piece, load)
                self._load_work.notify(len(items) * len(self._reads))
        return load

    def cancel(self, request_id: str) -> None:
        """Give a load up, and the early one of the same name.

        It is still reported finished, once no thread touches the cache. What was not begun to
        be read is not read any more.
        """
        with self._load_lock:
            load = self._active.get(request_id)
            if load is not None and not load.finished:
                load.cancelled = True
                self._counters.add("load_cancelled")
                self._settle(load)
        self.cancel_early(request_id)

    def cancel_early(self, request_id: str) -> None:
        """Do as :meth:`cancel` does, to an early load only."""
        with self._load_lock:
            load = self._active_early.get(request_id)
            if load is not None and not load.finished:
                load.cancelled = True
                self._settle(load)

    def poll(self, wait: float = 0.0) -> list[Load]:
        """Return the loads that finished since the last call.

        Parameters
        ----------
        wait : float
            Seconds to wait for the first one while any load is running: for steps that
            have nothing else to do.
        """
        with self._load_lock:
            if wait > 0 and not self._finished and self._active:
                self._load_done.wait(wait)
            if self._active and not self._finished:
                self._give_up_late()
            finished, self._finished = self._finished, []
            for load in finished:
                if self._active.get(load.request_id) is load:
                    del self._active[load.request_id]
            return finished

    def check(self) -> None:
        """Give up the loads for which storage took too long, as :meth:`poll` does too."""
        with self._load_lock:
            if self._active:
                self._give_up_late()

    def _give_up_late(self) -> None:
        """Fail the loads that as a whole took too long. Holds the lock."""
        now = time.monotonic()
        for load in list(self._active.values()):
            if now > load._deadline and not load.finished and load._leading < load._wanted:
                self._give_up(load, load._leading)

    def _give_up(self, load: Load, item: int) -> None:
        """Fail a load from an item on that did not come in time. Holds the lock."""
        self._counters.add("load_stalled")
        chunk = load.items[item].chunk
        self._fail(load, item, Failure.ERROR)
        self._settle(load)
        if not load.early and self._log.allows("stalled"):
            logger.warning(
                "%s did not deliver chunk %d of a request in time, its tokens are computed instead",
                self._shelf.url,
                chunk.index,
            )

    def _load_late(self, thread: int) -> None:
        """Give up the object that a thread waits for which the storage keeps."""
        with self._load_lock:
            kept = self._pieces.pop(thread, None)
            if kept is None:
                return
            # Whoever wants it from now on has it read anew.
            self._forget_reading(kept)
            for piece in (kept, *kept.sharers):
                piece.late = True
                load = piece.load
                if not load.finished and piece.item < load._wanted:
                    self._give_up(load, piece.item)

    def _rest(self) -> None:
        """Give up all loads: the storage is given a rest, and no tier is in front of it."""
        if self._shelf.available and self._load_threads.any:
            # What is in no tier fails at once.
            return
        with self._load_lock:
            for load in [*self._active.values(), *self._active_early.values()]:
                if not load.finished and load._leading < load._wanted:
                    self._refuse(load)

    def _refuse(self, load: Load) -> None:
        """Fail what is left of a load without asking the storage. Holds the lock."""
        if not load.early:
            self._counters.add("load_paused")
        self._fail(load, load._leading, Failure.UNAVAILABLE)
        self._settle(load)

    def _next_piece(self) -> _Piece | None:
        """Take the next object to read, waiting for one. Load threads."""
        with self._load_lock:
            while (piece := self._take()) is None:
                if self._closing:
                    return None
                self._load_work.wait()
            self._pieces[threading.get_ident()] = piece
            return piece

    def _take(self) -> _Piece | None:
        """Take the next object, for all loads that want it. Holds the lock."""
        load = self._choose()
        if load is None:
            return None
        item, place = divmod(load._next, len(self._reads))
        piece = _Piece(load, item, self._reads[place])
        self._note_taken(load, load._next)
        self._reading[piece.object] = piece
        for other in [*self._loads, *self._early]:
            self._share(piece, other)
        return piece

    def _share(self, piece: _Piece, load: Load) -> None:
        """Let `load` have what is read for `piece`, if it wants it. Holds the lock."""
        key, shard = piece.object
        item = load._places.get(key)
        if item is None:
            return
        number = item * len(self._reads) + self._reads.index(shard)
        if not load._taken[number]:
            piece.sharers.append(_Piece(load, item, shard))
            self._note_taken(load, number)

    def _note_taken(self, load: Load, number: int) -> None:
        """Note that an object of a load is being read. Holds the lock."""
        load._taken[number] = 1
        left = load._taken.find(0, load._next)
        load._next = len(load._taken) if left < 0 else left
        self._leave_queue(load)

    def _leave_queue(self, load: Load) -> None:
        """Forget a load of which all that is of use was taken. Holds the lock."""
        queue = self._early if load.early else self._loads
        if load._next >= load._wanted * len(self._reads) and load in queue:
            queue.remove(load)

    def _choose(self) -> Load | None:
        """Return the load whose turn it is, see the module. Holds the lock."""
        if self._loads:
            self._oldest_next = not self._oldest_next
            if not self._oldest_next:
                return self._loads[0]
            shards = len(self._reads)
            return min(self._loads, key=lambda load: load._wanted * shards - load._next)
        if self._early:
            early = sum(piece.load.early for piece in self._pieces.values())
            if early < self._most_early:
                return self._early[0]
        return None

    def _run_loads(self) -> None:
        while not self._load_threads.replaced() and (piece := self._next_piece()) is not None:
            buffer = self._staging_for(piece)
            try:
                failure = None if buffer is None else self._read(piece, buffer)
                taker: _Piece | None = piece
                while taker is not None:
                    self._deliver(taker, buffer, failure)
                    taker = self._next_sharer(piece)
            finally:
                if buffer is not None:
                    self._staging.release(buffer)

    def _staging_for(self, piece: _Piece) -> StagingBuffer | None:
        """Take a buffer; wait for one as long as anybody who wants the object has time."""
        # One that nobody waits for is of no use when memory is short.
        deadline = 0.0 if piece.load.early else piece.load._deadline
        while True:
            buffer = self._staging.acquire_for_load(deadline - time.monotonic())
            if buffer is not None:
                return buffer
            with self._load_lock:
                waiting = [
                    share.load._deadline
                    for share in piece.sharers
                    if not share.load.early
                    and not share.load.finished
                    and share.item < share.load._wanted
                ]
                deadline = max(waiting, default=0.0)
                if deadline <= time.monotonic() or self._closing:
                    # Under this lock, so that nobody joins what has failed.
                    self._forget_reading(piece)
                    return None

    def _read(self, piece: _Piece, buffer: StagingBuffer) -> Failure | None:
        """Read and verify an object; return why that failed, if it did."""
        chunk = piece.load.items[piece.item].chunk
        image = buffer.view[: self._fmt.object_size(piece.shard)]
        try:
            self._shelf.load(self._fmt, chunk, piece.shard, image)
        except ObjectMissingError as error:
            return self._load_failed(piece, Failure.MISSING, error)
        except (BadObjectError, NotRegularError) as error:
            return self._load_failed(piece, Failure.BAD, error)
        except (UnavailableStorageError, DeviceUnavailableError) as error:
            return self._load_failed(piece, Failure.UNAVAILABLE, error)
        except Exception as error:  # noqa: BLE001 - the thread must go on
            return self._load_failed(piece, Failure.ERROR, error)
        return None

    def _deliver(
        self, piece: _Piece, buffer: StagingBuffer | None, failure: Failure | None
    ) -> None:
        """Scatter what was read for one of the loads that want it."""
        if buffer is None:
            failure = Failure.UNAVAILABLE
            if not piece.load.early:
                error = TimeoutError("no staging buffer became free")
                failure = self._load_failed(piece, Failure.ERROR, error)
        elif failure is None:
            try:
                self._scatter(piece, buffer)
            except Exception as error:  # noqa: BLE001 - the thread must go on
                failure = self._load_failed(piece, Failure.ERROR, error)
        self._piece_done(piece, failure)

    def _scatter(self, piece: _Piece, buffer: StagingBuffer) -> None:
        if not self._begin_scatter(piece):
            return
        item, size = piece.load.items[piece.item], self._fmt.object_size(piece.shard)
        begin = time.perf_counter()
        try:
            memory, payload = self._memory(item), buffer.tensor[self._fmt.data_offset : size]
            if isinstance(memory, DeviceKVCache):
                memory.scatter(piece.shard, item.slots, payload, piece.load._fence)
            else:
                memory.scatter(piece.shard, item.slots, payload)
            piece.arrived = True
        finally:
            with self._load_lock:
                piece.load._scattering -= 1
        if not piece.load.early:
            self._counters.observe("scatter", time.perf_counter() - begin)
            self._counters.add("loaded_bytes", size)

    def _next_sharer(self, piece: _Piece) -> _Piece | None:
        """Return a further load's share in what was read; without one, the piece is over."""
        with self._load_lock:
            if piece.sharers:
                return piece.sharers.pop(0)
            self._pieces.pop(threading.get_ident(), None)
            self._forget_reading(piece)
            return None

    def _forget_reading(self, piece: _Piece) -> None:
        """Let nobody share what is read for `piece` any more. Holds the lock."""
        if self._reading.get(piece.object) is piece:
            del self._reading[piece.object]

    def _begin_scatter(self, piece: _Piece) -> bool:
        """Whether the object is still wanted; if so its load waits for the scatter to end."""
        with self._load_lock:
            load = piece.load
            if load.finished or piece.item >= load._wanted:
                return False
            load._scattering += 1
            return True

    def _load_failed(self, piece: _Piece, failure: Failure, error: Exception) -> Failure:
        if piece.late or failure is Failure.UNAVAILABLE:
            # It was counted when it was given up, or nothing was asked.
            return failure
        if failure is Failure.MISSING:
            self._counters.add("load_missing")
        elif failure is Failure.BAD:
            self._counters.add("load_bad")
        else:
            self._counters.add("load_errors")
        name = object_name(piece.load.items[piece.item].chunk, piece.shard, self._fmt.shards)
        early = all(share.load.early for share in [piece, *piece.sharers])
        if self._log.allows(("early" if early else "load", name)):
            text = "prefetched" if early else "loaded, its tokens are computed instead"
            logger.warning("object %s was not %s: %s", name, text, error)
        return failure

    def _piece_done(self, piece: _Piece, failure: Failure | None) -> None:
        with self._load_lock:
            load = piece.load
            if load.finished:
                return
            if failure is not None:
                # One that is late was given up before; its load may have waited for its scatter.
                if not piece.late:
                    self._fail(load, piece.item, failure)
            elif piece.arrived:
                load._arrived[piece.item] += 1
                items, shards = len(load.items), len(self._reads)
                while load._leading < items and load._arrived[load._leading] == shards:
                    load._leading += 1
            self._settle(load)

    def _fail(self, load: Load, item: int, failure: Failure) -> None:
        """Note that an item will not arrive. Holds the lock."""
        load.failures.append((load.items[item].chunk, failure))
        if load.failed_at is None or item < load.failed_at:
            load.failed_at = item

    def _settle(self, load: Load) -> None:
        """Complete a load of which nothing more is wanted. Holds the lock."""
        wanted = load._wanted
        # What comes after a failed chunk is of no use to this request.
        self._leave_queue(load)
        if load._leading >= wanted and not load._scattering:
            self._complete(load)

    def _complete(self, load: Load) -> None:
        load.finished = True
        if load._wanted and not load.early:
            self._counters.add("loaded_chunks", load._wanted)
        if load._on_done is None:
            self._finished.append(load)
            self._load_done.notify_all()
        else:
            active = self._active_early if load.early else self._active
            if active.get(load.request_id) is load:
                del active[load.request_id]
            self._call(load._on_done, load)

    def _call(self, on_done: Callable[..., None], *values: object) -> None:
        """Tell somebody, whose mistakes must end no thread of ours."""
        try:
            on_done(*values)
        except Exception as error:
            if self._log.allows(("on_done", type(error))):
                logger.error("who was told of an end made a mistake", exc_info=error)

    # ---------------------------------------------------------------- end

    @property
    def loading(self) -> bool:
        """Whether any load is running or not yet polled, early ones apart."""
        return bool(self._active)

    def drain(self, seconds: float) -> int:
        """Wait until all stores are published; return how many were not in time."""
        deadline = time.monotonic() + seconds
        with self._store_lock:
            while self._stores or self._storing:
                left = deadline - time.monotonic()
                if left <= 0:
                    break
                self._store_idle.wait(left)
            return len(self._stores) + len(self._storing)

    def close(self, drain_seconds: float = 0.0) -> int:
        """Drain, stop the threads, and return how many chunks were lost.

        A thread that storage keeps is not waited for: it ends with the process. Others are,
        since Python cannot end a thread that is inside compiled code without a crash.
        """
        lost = self.drain(drain_seconds)
        if lost:
            self._counters.add("store_lost", lost)
        self._closing = True
        self._load_threads.close()
        self._store_threads.close()
        for job in self._take_waiting():
            self._drop(job, "lost")
        with self._store_lock:
            self._store_work.notify_all()
        with self._load_lock:
            for load in [*self._active.values(), *self._active_early.values()]:
                if not load.finished and load._leading < load._wanted:
                    self._fail(load, load._leading, Failure.ERROR)
                    self._settle(load)
            self._load_work.notify_all()
        self._staging.close()
        deadline = time.monotonic() + _JOIN_SECONDS
        for threads in (self._load_threads, self._store_threads):
            threads.join(max(0.0, deadline - time.monotonic()))
        if isinstance(self._cache, DeviceKVCache):
            self._cache.close()
        return lost
