"""What became of chunks in one process: what was missed, refused, dropped, evicted or not loaded.

Owns the *history*: a file of bounded size on the machine of the process, in which the youngest
events replace the oldest, and the reader of such files. ``kvshelf explain`` reads them to say why a
prompt missed. An engine has one for each of its processes.

A history file is a header, JSON padded with spaces to a newline, and then slots of 32 bytes
(:data:`RECORD`). The field `records_at` of the header says where they begin. Records hold the
first 16 bytes of chunk keys; there are no tokens, no salts, no credentials in the file.

Contracts
---------
* :meth:`History.note` appends to a queue in memory: no lock, no storage, any thread, the step
  thread too. A thread of its own, ``kvshelf-history``, writes the file about once a second; a
  process that is killed loses what it noted in its last second.
* Only that thread waits for the file, and :meth:`History.close` for a second. A file that cannot be
  made or written ends the history with one log line, and nothing else.
* Files are made with mode 0600, in a folder of mode 0700, and are locked (``flock``) while their
  process lives. Of the others a new history keeps the youngest :data:`KEPT`.
* The reader takes nothing on trust: files of any content give a history or none, no error.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import os
import stat
import struct
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from kvshelf.background import THREAD_LIMIT, Background
from kvshelf.format.kinds import KINDS, kind_of_key
from kvshelf.shelf.pacing import GilPace

logger = logging.getLogger(__name__)

#: Largest size of the files of one engine together, in bytes.
LARGEST: Final = 1 << 20
#: Bytes of a header, and of one that can hold the record of a namespace.
HEADER: Final = 8192
WITH_RECORD: Final = 64 << 10
#: Files of processes that have ended which a new history leaves.
KEPT: Final = 31
#: Bytes of a chunk key that a record holds.
KEY_BYTES: Final = 16
#: One event. `time` is in seconds since the epoch, `event` 0 in a slot that was never written,
#: `kind` a place in :data:`~kvshelf.format.kinds.KINDS`.
RECORD: Final = np.dtype(
    [
        ("time", "<f8"),
        ("key", "u1", (KEY_BYTES,)),
        ("chunk", "<u4"),
        ("event", "u1"),
        ("detail", "u1"),
        ("kind", "u1"),
        ("unused", "u1"),
    ]
)

_PACK: Final = struct.Struct(f"<d{KEY_BYTES}sIBBBx")
_VERSION: Final = 1
_SUFFIX: Final = ".history"
_WRITE_SECONDS: Final = 1.0
#: Characters of a text in the header, and how many names of objects it holds.
_LONGEST: Final = 250
_NAMES: Final = 16


class Event(IntEnum):
    """What happened to a chunk. The numbers are part of the file."""

    #: A lookup found everything before this chunk, and not this chunk.
    MISSED = 1
    #: A request was computed although this chunk may be on the shelf.
    NOT_LOADED = 2
    #: A load of the chunk failed.
    FAILED_LOAD = 3
    #: The engine does not store such chunks.
    REFUSED_STORE = 4
    #: The chunk was computed, and its store was given up.
    DROPPED_STORE = 5
    #: The chunk was deleted from the shelf.
    EVICTED = 6


class Reason(IntEnum):
    """Why it happened: the `detail` of an event. The numbers are part of the file."""

    UNKNOWN = 0
    #: No object of its name.
    ABSENT = 1
    #: An earlier load of it had failed.
    FAILED_BEFORE = 2
    TIMED_OUT = 3
    #: A circuit breaker was open, or the storage takes no writes.
    UNAVAILABLE = 4
    BAD = 5
    #: The storage raised an error.
    ERROR = 6
    STAGING_FULL = 7
    #: The chunk before it was dropped.
    PARENT_DROPPED = 8
    ADAPTER_UNKNOWN = 10
    WEIGHTS_CHANGED = 11
    SHUTDOWN = 12
    #: The shelf is full: `min_free` or `max_bytes`.
    NO_ROOM = 13
    #: vLLM had freed its blocks.
    BLOCKS_FREED = 14
    #: A sweep for `max_bytes` or `max_age`.
    BOUNDS = 15
    #: Such a request is computed without a look at the shelf.
    NOT_ASKED = 17
    #: The engine had just started, and did not know its namespace.
    STARTING = 18
    #: A state that is not worth its bytes.
    NOT_WORTH = 19
    #: Computing was expected to be sooner.
    SLOWER = 20


class History:
    """The history of this process.

    Parameters
    ----------
    folder : Path
        Made if it is missing.
    nbytes : int
        Largest size of the file.
    header_bytes : int
        Size of the header.
    header : Mapping
        What :meth:`describe` begins with.

    Attributes
    ----------
    path : Path or None
        The file, once it is made.
    """

    def __init__(
        self, folder: Path, nbytes: int, header_bytes: int, header: Mapping[str, Any]
    ) -> None:
        self.path: Path | None = None
        self._folder = folder
        self._file = -1
        self._records_at = header_bytes
        self._slots = (nbytes - header_bytes) // RECORD.itemsize
        self._describing = threading.Lock()
        self._header: dict[str, Any] = {
            "version": _VERSION,
            "records_at": header_bytes,
            "pid": os.getpid(),
        }
        self.describe(started=time.time(), **header)
        self._fresh: deque[tuple[float, Event, bytes, int, int]] = deque(maxlen=self._slots)
        self._next = 0
        self._thread: Background | None = None
        self._has_looked = False
        self._ended = False
        self._writing = threading.Lock()

    @classmethod
    def open(
        cls,
        folder: str | os.PathLike[str],
        *,
        nbytes: int = LARGEST,
        header_bytes: int = HEADER,
        on_thread_start: Callable[[], None] | None = None,
        **header: Any,
    ) -> History | None:
        """Begin the history of this process; does not wait for the file.

        Parameters
        ----------
        folder : path
            Made if it is missing.
        nbytes : int
            Largest size of the file.
        header_bytes : int
            How much of it is for what the file says of the process: :data:`WITH_RECORD` if it is to
            have the record of a namespace.
        on_thread_start : Callable, optional
            Called first on the thread, to set its processors.
        **header
            What the file says of the process, see :meth:`describe`.

        Returns
        -------
        History or None
            None, with a log line, if no thread can be started.
        """
        history = cls(Path(folder), nbytes, header_bytes, header)
        thread = Background("kvshelf-history", history._step, on_start=on_thread_start)
        if not thread.start():
            logger.info("%s: no history is kept: %s", folder, THREAD_LIMIT)
            return None
        history._thread = thread
        return history

    def note(self, event: Event, key: bytes, *, chunk: int = 0, detail: int = 0) -> None:
        """Note an event. Any thread; does not block.

        Parameters
        ----------
        event : Event
        key : bytes
            A chunk key, or the :func:`~kvshelf.format.kinds.kind_key` of one kind of it.
        chunk : int
            Index of the chunk in its prompt.
        detail : int
            A :class:`Reason`.
        """
        self._fresh.append((time.time(), event, key, chunk, detail))

    def note_evicted(self, key: bytes, chunk: int) -> None:
        """Note that something of a chunk was deleted to keep the shelf within its bounds."""
        self.note(Event.EVICTED, key, chunk=chunk, detail=Reason.BOUNDS)

    def note_bad(self, name: str) -> None:
        """Note the name of a bad object, with its namespace folder; the latest 16 are kept."""
        with self._describing:
            bad: dict[str, float] = {**self._header.get("bad", {})}
            bad.pop(name[:_LONGEST], None)
            bad[name[:_LONGEST]] = time.time()
            self._header = {**self._header, "bad": dict(list(bad.items())[-_NAMES:])}
            self._header_changed = True

    def describe(self, **header: Any) -> None:
        """Let the file say something of the process, beside what it says already.

        Parameters
        ----------
        **header
            Values of JSON, by name: ``role``, ``shelf`` (a URL without secrets; of an engine with a
            node server the server's socket), ``socket`` (of a node server), ``release``,
            ``namespace`` and ``record`` (its folder and its record, once they are known),
            ``group_by_salt`` (as the option), ``refuses`` (why the process stores
            nothing; empty if it stores), ``disabled`` (why it neither stores nor loads). Long text
            is cut.
        """
        short = {
            name: value[:_LONGEST] if isinstance(value, str) else value
            for name, value in header.items()
        }
        with self._describing:
            self._header = {**self._header, **short}
            self._header_changed = True

    def flush(self) -> None:
        """Write what was noted."""
        with self._writing:
            if not self._ended:
                try:
                    self._write()
                except OSError as error:
                    logger.info("%s: no history is kept: %s", self.path or self._folder, error)
                    self._end()

    def close(self) -> None:
        """Write what was noted and close the file, which stays. Waits for a second at most."""
        if self._writing.acquire(timeout=_WRITE_SECONDS):
            try:
                if not self._ended:
                    with contextlib.suppress(OSError):
                        self._write()
                    self._end()
            finally:
                self._writing.release()

    def _end(self) -> None:
        self._ended = True
        if self._thread is not None:
            self._thread.close()
        if self._file >= 0:
            os.close(self._file)

    def _step(self) -> float:
        self.flush()
        if self.path is not None and not self._has_looked:
            self._has_looked = True
            _remove_old(self._folder)
        return _WRITE_SECONDS

    def _make(self) -> None:
        """Make the file."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._file, name = tempfile.mkstemp(_SUFFIX, f"{os.getpid()}-", self._folder)
        self.path = Path(name)
        # Another process may look at this moment whether this one is alive, see `_is_running`.
        fcntl.flock(self._file, fcntl.LOCK_EX)

    def _write(self) -> None:
        """Make the file, if there is none; write the header, if it has changed, and new records."""
        if self.path is None:
            self._make()
        if self._header_changed:
            self._header_changed = False
            text = _encoded(self._header)
            if len(text) >= self._records_at:
                text = _encoded({**self._header, "record": None})
            os.pwrite(self._file, text.ljust(self._records_at - 1) + b"\n", 0)
        records, pace = bytearray(), GilPace()
        with contextlib.suppress(IndexError):
            while len(records) < self._slots * RECORD.itemsize:
                records += _packed(*self._fresh.popleft())
                pace.rest()
        # To the end of the file first, then from its beginning.
        rest = memoryview(records)
        while rest:
            part = rest[: (self._slots - self._next) * RECORD.itemsize]
            _write_all(self._file, part, self._records_at + self._next * RECORD.itemsize)
            self._next = (self._next + len(part) // RECORD.itemsize) % self._slots
            rest = rest[len(part) :]


def _encoded(header: Mapping[str, Any]) -> bytes:
    # What is not UTF-8 becomes an escape of JSON.
    return json.dumps(header, ensure_ascii=False).encode(errors="backslashreplace")


def _packed(when: float, event: int, key: bytes, chunk: int, detail: int) -> bytes:
    kind = KINDS.index(kind_of_key(key))
    return _PACK.pack(when, key[:KEY_BYTES], min(chunk, 2**32 - 1), event, detail, kind)


def _write_all(file: int, data: memoryview, offset: int) -> None:
    while data:
        done = os.pwrite(file, data, offset)
        data, offset = data[done:], offset + done


def _remove_old(folder: Path) -> None:
    """Remove the files of processes that have ended, but for the youngest."""
    ended = sorted((path for path in _files(folder) if not _is_running(path)), key=_mtime)
    for path in ended[:-KEPT]:
        with contextlib.suppress(OSError):
            path.unlink()


def _files(folder: Path) -> Iterator[Path]:
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(_SUFFIX) and entry.is_file(follow_symlinks=False):
                yield Path(entry.path)


def _mtime(path: Path) -> float:
    try:
        return path.lstat().st_mtime
    except OSError:
        return 0.0


def _is_running(path: Path) -> bool:
    """Whether the process of a history is alive, as far as this one knows."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(file)
    return False


@dataclass(frozen=True, slots=True)
class Past:
    """A history that was read.

    Attributes
    ----------
    path : Path
    header : Mapping
        See :meth:`History.describe`; besides these ``pid``, ``started`` (in seconds since the
        epoch) and ``bad`` (names of bad objects, and when they were noted).
    events : array
        :data:`RECORD`, the oldest first.
    running : bool
        The process was alive.
    """

    path: Path
    header: Mapping[str, Any]
    events: npt.NDArray[np.void]
    running: bool

    def of(self, key: bytes) -> npt.NDArray[np.void]:
        """Return the events of a chunk key, all kinds, the oldest first."""
        wanted = np.frombuffer(key[:KEY_BYTES], np.uint8)
        found: npt.NDArray[np.void] = self.events[(self.events["key"] == wanted).all(axis=1)]
        return found


def read_histories(folder: str | os.PathLike[str]) -> list[Past]:
    """Return the histories in a folder, the youngest last; files that are none are left out."""
    paths = sorted(_files(Path(folder)), key=_mtime)
    return [past for path in paths if (past := _read(path)) is not None]


def _read(path: Path) -> Past | None:
    running = _is_running(path)
    try:
        file = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(file, "rb") as opened:
            if not stat.S_ISREG(os.fstat(file).st_mode):
                return None
            content = opened.read(LARGEST)
        header = json.loads(content[: content.find(b"\n") + 1])
    except (OSError, ValueError, RecursionError):
        return None
    if not isinstance(header, dict) or header.get("version") != _VERSION:
        return None
    begin = header.get("records_at")
    if not isinstance(begin, int) or not 0 <= begin <= len(content):
        return None
    records = content[begin:]
    count = len(records) // RECORD.itemsize
    events = np.frombuffer(records, RECORD, count)
    events = events[(events["event"] > 0) & np.isfinite(events["time"])]
    return Past(path, header, events[np.argsort(events["time"], kind="stable")], running)
