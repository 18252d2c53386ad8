"""The storage of tests: with faults, a distance, a clock of its own, and its calls counted.

It wraps any backend, so that a test can put it between a shelf and what keeps the bytes, and is
safe to use from many threads. In simulated time a wait of a fault costs nothing.
"""

from __future__ import annotations

import fnmatch
import math
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from kvshelf.backends import open_backend
from kvshelf.backends.base import (
    Backend,
    BytesLike,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    WriteMode,
    WriteResult,
    delete_each,
    delete_one,
)
from kvshelf.backends.guard import GuardedBackend
from kvshelf.backends.posix import PosixBackend
from kvshelf.backends.wrappers import WrappedBackend
from kvshelf.capacity.sweep import KEEPERS
from kvshelf.errors import StorageError, TransientStorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView, ObjectRef

#: Properties of a storage whose probes are dear, so that its answers are remembered.
FAR = {"probe_cost": 0.02, "concurrency": 8}
#: What the URL of a test's second storage ends with.
ELSEWHERE = "-elsewhere"
#: More calls than a test has waiting.
_MANY = 10_000


def posix(path: Path) -> PosixBackend:
    """Open a folder, which is made."""
    path.mkdir(exist_ok=True)
    return PosixBackend(path)


@dataclass(slots=True)
class Fault:
    """A fault that a :class:`FaultyStorage` injects.

    The attributes that are set act in this order: wait, error, damage.

    Attributes
    ----------
    operation : str
        ``stat``, ``info``, ``open``, ``read``, ``write``, ``publish`` (after a write
        succeeded, before the caller is told), ``list``, ``folders``, ``delete``, ``set_aside``,
        ``touch``, ``entries``, ``space``, ``close`` of a reader, or ``*``: all but ``close``.
    pattern : str
        Names to which it applies, as for :mod:`fnmatch`.
    wait : threading.Event, threading.Semaphore or float, optional
        Block until the event is set, until the semaphore was released once more, or for this many
        seconds.
    error : exception, or callable that returns one or None, optional
        Raised; in ``stat`` a :class:`~kvshelf.errors.StorageError` is the answer for the name.
    damage : callable, optional
        Changes a bytearray in place: the bytes that ``read`` returns or that ``write`` receives.
        May shorten both (a short read), and lengthen the bytes to write.
    times : int, optional
        Number of calls to which it applies; None: all.
    """

    operation: str
    pattern: str = "*"
    wait: threading.Event | threading.Semaphore | float | None = None
    error: BaseException | Callable[[], BaseException | None] | None = None
    damage: Callable[[bytearray], object] | None = None
    times: int | None = None


class FaultyStorage(WrappedBackend):
    """Counts calls, then lets them meet faults, see :class:`Fault`.

    Parameters
    ----------
    inner : Backend
        What keeps the bytes.
    *faults : Fault
    touched : Touched, optional
        What it answers when an access time is set, in place of its own answer.
    **properties
        Fields of :class:`Properties` that it states otherwise.

    Attributes
    ----------
    counts : collections.Counter
        Calls by operation (``stat``, ``open``, ``read``, ``write``, …); ``stat_names`` counts
        the names probed, ``read_bytes`` and ``write_bytes`` the bytes moved.
    touches : list of str
        Names whose access time was set.
    """

    def __init__(
        self,
        inner: Backend,
        *faults: Fault,
        touched: Touched | None = None,
        **properties: Any,
    ) -> None:
        super().__init__(inner)
        self.counts: Counter[str] = Counter()
        self.touches: list[str] = []
        self.touched = touched
        self._stated = properties
        self._faults: list[Fault] = [*faults]
        #: All that calls have waited for.
        self._waits: list[threading.Event | threading.Semaphore] = []
        self._lock = threading.Lock()

    @property
    def properties(self) -> Properties:
        """Those of what is wrapped, but for what the test states."""
        return replace(self.inner.properties, **self._stated)

    def add(self, fault: Fault) -> Fault:
        """Inject this fault from now on."""
        with self._lock:
            self._faults.append(fault)
        return fault

    def hang(
        self, operation: str, pattern: str = "*", *, times: int | None = None
    ) -> threading.Event:
        """Have the calls of an operation wait from now on for the event that is returned."""
        gate = threading.Event()
        self.add(Fault(operation, pattern, wait=gate, times=times))
        return gate

    def heal(self) -> None:
        """Remove all faults."""
        with self._lock:
            self._faults.clear()

    def let_go(self) -> None:
        """Remove all faults, and let the calls go on that wait in one."""
        self.heal()
        for wait in self._waits:
            if isinstance(wait, threading.Event):
                wait.set()
            else:
                wait.release(_MANY)

    def meet(self, operation: str, name: str) -> Sequence[Callable[[bytearray], object]]:
        """Wait or fail as the faults of an operation say; return what damages its bytes."""
        damages: list[Callable[[bytearray], object]] = []
        with self._lock:
            met = [
                fault
                for fault in self._faults
                if fault.operation in (operation, "*")
                and fnmatch.fnmatchcase(name, fault.pattern)
                and fault.times != 0
            ]
            for fault in met:
                if fault.times is not None:
                    fault.times -= 1
                if isinstance(fault.wait, threading.Event | threading.Semaphore):
                    self._waits.append(fault.wait)
        for fault in met:
            if isinstance(fault.wait, threading.Event):
                fault.wait.wait()
            elif isinstance(fault.wait, threading.Semaphore):
                fault.wait.acquire()
            elif fault.wait is not None:
                threading.Event().wait(fault.wait)
            error = fault.error() if callable(fault.error) else fault.error
            if error is not None:
                try:
                    raise error
                finally:
                    # It would keep this frame, and so all that its callers have.
                    del error
            if fault.damage is not None:
                damages.append(fault.damage)
        return damages

    def _count(self, operation: str, amount: int = 1) -> None:
        with self._lock:
            self.counts[operation] += amount

    def _call(self, operation: str, name: str = "") -> Sequence[Callable[[bytearray], object]]:
        self._count(operation)
        return self.meet(operation, name)

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe: in one call where no fault can meet a name."""
        self._count("stat")
        self._count("stat_names", len(names))
        if not any(fault.operation in ("stat", "*") for fault in self._faults):
            return self.inner.stat(names)
        answers: StatResults = []
        for name in names:
            try:
                self.meet("stat", name)
            except StorageError as exc:
                answers.append(exc)
            else:
                answers.extend(self.inner.stat([name]))
        return answers

    def info(self, name: str) -> ObjectInfo | None:
        """Probe one name."""
        self._call("info", name)
        return self.inner.info(name)

    def open(self, name: str) -> Reader:
        """Open, with faults now and at every read."""
        self._call("open", name)
        return _Reads(self, name, self.inner.open(name))

    @property
    def reads_whole(self) -> bool:
        """Not: each read can meet a fault."""
        return False

    def read_whole(self, *args: Any, **options: Any) -> None:
        """Leave all objects to :meth:`open`."""

    def read_part(self, name: str, part: memoryview) -> int:
        """Take bytes that were read; return how many the caller gets."""
        damages = self._call("read", name)
        self._count("read_bytes", len(part))
        if not damages:
            return len(part)
        data = bytearray(part)
        for damage in damages:
            damage(data)
        part[: len(data)] = data
        return len(data)

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Publish."""
        self._count("write_bytes", sum(memoryview(buffer).nbytes for buffer in buffers))
        damages = self._call("write", name)
        if damages:
            data = bytearray().join(memoryview(buffer).cast("B") for buffer in buffers)
            for damage in damages:
                damage(data)
            buffers = [data]
        result = self.inner.write(name, buffers, mode)
        self.meet("publish", name)
        return result

    def list(
        self, prefix: str = "", *, hidden: bool = False, **options: Any
    ) -> Iterator[ObjectInfo]:
        """List, with faults before each entry: with what is hidden, those of ``entries``."""
        operation = "entries" if hidden else "list"
        self._count(operation)
        return self._entries(operation, self.inner.list(prefix, hidden=hidden, **options))

    def _entries(self, operation: str, found: Iterator[ObjectInfo]) -> Iterator[ObjectInfo]:
        for info in found:
            self.meet(operation, info.name)
            yield info

    def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders."""
        self._call("folders", prefix)
        return self.inner.folders(prefix)

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Delete: in one call where no fault can meet a name."""
        if not any(fault.operation in ("delete", "*") for fault in self._faults):
            self._count("delete", len(names))
            return self.inner.delete(names)
        return delete_each(names, self._delete)

    def _delete(self, name: str) -> bool:
        self._call("delete", name)
        return delete_one(self.inner, name)

    def set_aside(self, name: str) -> bool:
        """Rename."""
        self._call("set_aside", name)
        return self.inner.set_aside(name)

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Record a use."""
        self._call("touch", name)
        self.touches.append(name)
        done = self.inner.touch(name, before)
        return done if self.touched is None else self.touched

    def space(self) -> Space | None:
        """Ask how much room there is."""
        self._call("space")
        return self.inner.space()


class _Reads(Reader):
    def __init__(self, storage: FaultyStorage, name: str, inner: Reader) -> None:
        self._storage, self._name, self._inner = storage, name, inner
        self.size = inner.size

    def read_into(self, buffer: memoryview, offset: int) -> int:
        count = self._inner.read_into(buffer, offset)
        return self._storage.read_part(self._name, buffer.cast("B")[:count])

    def close(self) -> None:
        if any(fault.operation == "close" for fault in self._storage._faults):
            self._storage.meet("close", self._name)
        self._inner.close()


class Gate:
    """Lets writes of objects through one by one.

    Attributes
    ----------
    waiting : threading.Semaphore
        Released by each write that comes to the gate.
    """

    def __init__(self, backend: FaultyStorage) -> None:
        self.waiting = threading.Semaphore(0)
        self._permits = threading.Semaphore(0)
        backend.add(Fault("write", "*.safetensors", damage=self._meet))

    def _meet(self, data: bytearray) -> None:
        self.waiting.release()
        self._permits.acquire()

    def let(self, count: int) -> None:
        """Let some more through."""
        self._permits.release(count)

    def shut(self) -> None:
        """Let none through of those that would have been."""
        while self._permits.acquire(blocking=False):
            pass


class NamesOnly(FaultyStorage):
    """A storage with names and sizes only, near or far away.

    What is asked while `gate` is closed is answered, by what was there when it was asked, once it
    is open, and after `seconds`. Names in `broken` cannot be probed.

    Attributes
    ----------
    sizes : dict
        The objects.
    asked : list of lists of str
        The names of each question.
    listed : int
        Questions for folders.
    """

    def __init__(
        self, probe_cost: float = 0.02, *, seconds: float = 0.0, folders: Sequence[str] = ()
    ) -> None:
        inner = open_backend(f"memory://names-{os.urandom(8).hex()}")
        super().__init__(inner, probe_cost=probe_cost)
        self.sizes: dict[str, int] = {}
        self.asked: list[list[str]] = []
        self.listed = 0
        self.broken: set[str] = set()
        self.gate = threading.Event()
        self.gate.set()
        self._seconds = seconds
        self._folders = folders

    @property
    def rounds(self) -> int:
        """Times that somebody waited for the storage."""
        return len(self.asked) + self.listed

    @property
    def heads(self) -> int:
        """Names that were asked for."""
        return sum(map(len, self.asked))

    def stat(self, names: Sequence[str]) -> StatResults:
        self.asked.append(list(names))
        answers: StatResults = [
            TransientStorageError(5, "broken") if name in self.broken else self.sizes.get(name)
            for name in names
        ]
        if self._seconds:
            time.sleep(self._seconds)
        self.gate.wait()
        return answers

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        self.sizes[name] = sum(memoryview(buffer).nbytes for buffer in buffers)
        return WriteResult.CREATED

    def folders(self, prefix: str = "") -> Sequence[str]:
        self.listed += 1
        return self._folders


class LaterBackend(WrappedBackend):
    """A storage whose clock is some days ahead: nobody can set the time of a file's last change.

    It is so for the markers of keepers, by which they know the time. By the fixture ``clocks`` this
    machine's clock is as much ahead, unless `alone` is set.

    Attributes
    ----------
    ahead : float
        Seconds.
    """

    #: Seconds that this machine's clock is ahead, where ages are judged.
    own_ahead = 0.0

    def __init__(self, inner: Backend, ahead: float) -> None:
        super().__init__(inner)
        self.alone = False
        self.ahead = ahead

    @property
    def ahead(self) -> float:
        return self._ahead

    @ahead.setter
    def ahead(self, seconds: float) -> None:
        self._ahead = seconds
        if not self.alone:
            LaterBackend.own_ahead = seconds

    def now(self) -> float:
        return time.time() + self.ahead

    def _later(self, info: ObjectInfo) -> ObjectInfo:
        return info._replace(mtime=info.mtime + self.ahead)

    def info(self, name: str) -> ObjectInfo | None:
        info = super().info(name)
        return info if info is None or not name.startswith(f"{KEEPERS}/") else self._later(info)

    def list(self, prefix: str = "", **options: Any) -> Iterator[ObjectInfo]:
        for info in super().list(prefix, **options):
            yield self._later(info) if info.name.startswith(f"{KEEPERS}/") else info


@dataclass(eq=False)
class Loan:
    """One object that was lent.

    Attributes
    ----------
    name : str
    view : memoryview
        Read-only, as the memory of another process would be.
    released : int
        Calls of :meth:`release`.
    """

    name: str
    data: bytearray
    view: memoryview
    released: int = 0

    def release(self) -> None:
        """Count, and spoil the bytes, so that a later use shows."""
        self.released += 1
        self.data[:] = b"\xa5" * len(self.data)


class LendingMemory:
    """A memory in which those objects of a storage lie that `lends` chooses.

    Parameters
    ----------
    storage : Backend
        Where objects are read from.
    faults : FaultyStorage, optional
        Its faults of ``pin`` are met.

    Attributes
    ----------
    pins : bool
        Objects are read in place.
    asked : list of str
        Names of all objects that somebody wanted to pin, noted before any fault.
    loans : list of Loan
    lends : Callable[[str], bool]
    on_lend : Callable[[Loan], None]
        Called with each loan before the borrower has it.
    """

    def __init__(self, storage: Backend, faults: FaultyStorage | None = None) -> None:
        self._storage = storage
        self._faults = faults
        self.pins = True
        self.asked: list[str] = []
        self.loans: list[Loan] = []
        self.lends: Callable[[str], bool] = lambda name: True
        self.on_lend: Callable[[Loan], None] = lambda loan: None
        self._lock = threading.Lock()

    def pin(self, name: str, size: int) -> Loan | None:
        """Lend an object, read from the storage."""
        self.asked.append(name)
        if self._faults is not None:
            self._faults.meet("pin", name)
        if not self.lends(name):
            return None
        data = bytearray(size)
        with self._storage.open(name) as reader:
            assert reader.read_into(memoryview(data), 0) == size
        loan = Loan(name, data, memoryview(data).toreadonly())
        self.on_lend(loan)
        with self._lock:
            self.loans.append(loan)
        return loan


class LendingView(NamespaceView):
    """The objects of one kind on a storage, some of which lie in a memory."""

    def __init__(
        self,
        backend: GuardedBackend,
        fmt: ObjectFormat,
        counters: Counters,
        lending: LendingMemory,
    ) -> None:
        super().__init__(backend, fmt, counters)
        self._lending = lending

    @property
    def pins(self) -> bool:
        return self._lending.pins

    def pin_all(
        self, chunks: Sequence[Chunk], shards: Sequence[int], *, is_early: bool = False
    ) -> list[dict[int, Loan]]:
        loans: list[dict[int, Loan]] = []
        for chunk in chunks:
            try:
                loans.append(self._pin_chunk(chunk, shards))
            except Exception:
                # Of the chunks that are wanted soon comes what there is.
                if not loans:
                    raise
                loans.append({})
        return loans

    def _pin_chunk(self, chunk: Chunk, shards: Sequence[int]) -> dict[int, Loan]:
        loans: dict[int, Loan] = {}
        try:
            for shard in shards:
                ref = ObjectRef(chunk, shard)
                name, size = self.name(ref), self.size(*ref)
                pin = partial(self._lending.pin, name, size)
                loan = self.backend.read_by(name, size, pin)
                if loan is not None:
                    loans[shard] = loan
                    self.fmt.verify(loan.view, *ref, payload=False)
        except BaseException:
            for loan in loans.values():
                loan.release()
            raise
        return loans


class LendingShelf(Shelf):
    """A shelf some of whose objects lie in a memory."""

    def __init__(self, backend: Backend, lending: LendingMemory, counters: Counters) -> None:
        super().__init__(backend, counters)
        self._lending = lending

    def _make_view(self, fmt: ObjectFormat) -> NamespaceView:
        return LendingView(self.backend, fmt, self._counters, self._lending)
