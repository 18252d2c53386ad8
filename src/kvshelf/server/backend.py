"""The storage of a node server, as its client calls it.

Owns what is a call of the server's storage: probes, reads, listings and changes. Objects are stored
from the client's own segment, to which they are copied if they were not made there. Those that lie
in the server's memory are :mod:`kvshelf.server.memory`, the connection is
:mod:`kvshelf.server.channel`.

Contracts
---------
* While the server is gone, every call fails at once with UnavailableStorageError.
* Any thread may call anything.
"""

from __future__ import annotations

import errno
import itertools
import math
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, Final

from kvshelf.backends.base import (
    Backend,
    BytesLike,
    Deadlines,
    DeleteResults,
    ObjectInfo,
    Properties,
    Reader,
    Space,
    StatResults,
    Touched,
    WriteMode,
    WriteResult,
    check_folder,
    check_name,
    delete_each,
)
from kvshelf.errors import (
    PermanentStorageError,
    TransientStorageError,
)
from kvshelf.format.names import parse_path
from kvshelf.memory.arena import copy_bytes
from kvshelf.server import messages
from kvshelf.server.channel import Channel
from kvshelf.server.requests import answer_to, parts, probe
from kvshelf.server.segment import SegmentPart

#: Seconds for one message to the server and its answer. A probe of many names takes little longer.
_MESSAGE_SECONDS: Final = 150e-6
#: Threads of a client where the server's storage has low latency.
_LOW_LATENCY_CONCURRENCY: Final = 2
#: Seconds by which deadlines of a client are later than those of the server.
_LATER: Final = 1.0


class ServedBackend(Backend):
    """A storage that a node server calls.

    Parameters
    ----------
    channel : Channel
        Has been connected once; closed together with the backend.
    """

    def __init__(self, channel: Channel) -> None:
        assert channel.welcome is not None
        self.url = channel.url
        self._channel = channel
        self._welcome = channel.welcome
        #: Notified when a part of the segment is free again.
        self._freed = threading.Condition()
        channel.on_connect(self._connected)

    def __repr__(self) -> str:
        return f"ServedBackend({self.url!r})"

    @property
    def properties(self) -> Properties:
        """Those of the server's storage; a probe takes a message at least."""
        facts = self._welcome.facts
        low_latency = facts.probe_cost < _MESSAGE_SECONDS
        return Properties(
            filesystem=f"{facts.filesystem} through a node server",
            cache_seconds=facts.cache_seconds,
            concurrency=_LOW_LATENCY_CONCURRENCY if low_latency else facts.concurrency,
            probe_cost=max(_MESSAGE_SECONDS, facts.probe_cost),
            read_only=facts.read_only,
            sets_aside=facts.sets_aside,
            renews=facts.renews,
            shared=facts.shared,
            versions=facts.versions,
            # The server says itself that its storage is late, if it can.
            deadlines=Deadlines(
                probe=facts.probe_seconds + _LATER,
                read=facts.read_seconds + _LATER,
                write=facts.write_seconds + _LATER,
                bytes_per_second=facts.bytes_per_second,
            ),
        )

    # ------------------------------------------------------------------------------- probes

    def stat(self, names: Sequence[str]) -> StatResults:
        """Probe the storage, past the server's memory."""
        checked = list(map(check_name, names))
        return probe(
            self._channel, names, [messages.Call("stat", [part]) for part in parts(checked)]
        )

    def info(self, name: str) -> ObjectInfo | None:
        """Ask the storage for size and times of one entry."""
        row = self._call("info", check_name(name))
        return None if row is None else ObjectInfo(*row)

    # -------------------------------------------------------------------------------- reads

    def open(self, name: str) -> Reader:
        """Open an object of the storage, past the server's memory: its bytes come in messages."""
        return _ServedReader(self, check_name(name))

    def read(self, name: str, offset: int, nbytes: int) -> tuple[int, bytes]:
        """Return the size of an object, and at most `nbytes` of its bytes.

        Raises
        ------
        ObjectMissingError, NotRegularError, StorageError
            As :meth:`open`.
        """
        size, data = self._call("read", name, offset, nbytes)
        return size, data

    # ------------------------------------------------------------------------------- writes

    def write(
        self, name: str, buffers: Sequence[BytesLike], mode: WriteMode = "create"
    ) -> WriteResult:
        """Have the server verify and publish an object; other files have to be small."""
        check_name(name)
        views = [memoryview(buffer).cast("B") for buffer in buffers]
        size = sum(view.nbytes for view in views)
        if parse_path(name) is None:
            if size > messages.MAX_INLINE:
                raise PermanentStorageError(
                    errno.EFBIG,
                    f"{size} bytes that are no object of the format: a node server writes"
                    f" {messages.MAX_INLINE} at most",
                    f"{self.url}/{name}",
                )
            return WriteResult(self._call("write", name, mode, data=b"".join(views)))
        segment = self._channel.segment
        if segment is not None and len(views) == 1 and size:
            offset = segment.offset_of(views[0])
            if offset is not None:
                return self._store(name, offset, size, mode)
        part = self._reserve(name, size)
        try:
            start = 0
            for view in filter(len, views):
                copy_bytes(part.view[start : start + view.nbytes], view)
                start += view.nbytes
            return self._store(name, part.offset, size, mode)
        finally:
            with self._freed:
                part.release()
                self._freed.notify_all()

    def _store(self, name: str, offset: int, nbytes: int, mode: WriteMode) -> WriteResult:
        stored = self._channel.request(messages.Store(name, offset, nbytes, mode))
        return WriteResult(answer_to(stored, messages.Stored).result)

    def _reserve(self, name: str, nbytes: int) -> SegmentPart:
        segment = self._channel.segment
        if segment is None:
            raise PermanentStorageError(errno.ENOBUFS, "this client stores nothing", name)
        until = time.monotonic() + self.properties.deadlines.to_write(nbytes)
        with self._freed:
            while (part := segment.reserve(nbytes)) is None:
                if nbytes > segment.nbytes or not self._freed.wait(until - time.monotonic()):
                    raise TransientStorageError(
                        errno.ENOBUFS,
                        f"{nbytes} bytes are not free of the {segment.nbytes} bytes through which"
                        " objects are stored",
                        f"{self.url}/{name}",
                    )
        return part

    def delete(self, names: Sequence[str]) -> DeleteResults:
        """Delete from the storage and from the server's memory."""
        return delete_each(names, lambda name: bool(self._call("delete", name)))

    def set_aside(self, name: str) -> bool:
        """Rename an entry, which is gone from the server's memory as well."""
        return bool(self._call("set_aside", check_name(name)))

    def touch(self, name: str, before: float = math.inf) -> Touched:
        """Record a use, with the rights of the server."""
        return Touched(self._call("touch", check_name(name), before))

    def space(self) -> Space | None:
        """Ask how much of the server's storage is free."""
        found = self._call("space")
        return None if found is None else Space(*found)

    # ----------------------------------------------------------------------------- listings

    def list(
        self,
        prefix: str = "",
        *,
        hidden: bool = False,
        start: str | None = None,
        end: str | None = None,
        flat: bool = False,
    ) -> Iterator[ObjectInfo]:
        """Stream the storage's listing, in pages."""
        check_folder(prefix)

        method: messages.Method = "entries" if hidden else "list"
        number: int | None = None
        while True:
            rows, number = self._call(method, prefix, number, start, end, flat)
            yield from itertools.starmap(ObjectInfo, rows)
            if number is None:
                return

    def folders(self, prefix: str = "") -> Sequence[str]:
        """List folders of the storage."""
        check_folder(prefix)
        found: Sequence[str] = self._call("folders", prefix)
        return found

    # ------------------------------------------------------------------------------- others

    def _connected(self, welcome: messages.Welcome) -> None:
        """Take the facts of a server that may have just started."""
        self._welcome = welcome

    def close(self) -> None:
        """End the connection. Idempotent."""
        self._channel.close()

    def _call(self, method: messages.Method, *args: Any, data: bytes = b"") -> Any:
        future = self._channel.request(messages.Call(method, [*args], data))
        return answer_to(future, messages.Result).value


class _ServedReader(Reader):
    """Reads an object of the server's storage by messages.

    What is larger than a message may be replaced between two of them by an object of the same size.
    Loads verify what they have read.

    Parameters
    ----------
    backend : ServedBackend
    name : str
    """

    def __init__(self, backend: ServedBackend, name: str) -> None:
        self._backend = backend
        self._name = name
        # One version of most of what is read like this.
        self.size, self._beginning = backend.read(name, 0, messages.MAX_INLINE)

    def read_into(self, buffer: memoryview, offset: int) -> int:
        target = buffer.cast("B")
        count = 0
        while count < target.nbytes and offset + count < self.size:
            data = self._piece(offset + count, target.nbytes - count)
            if not data:
                break
            target[count : count + len(data)] = data
            count += len(data)
        return count

    def _piece(self, offset: int, nbytes: int) -> memoryview | bytes:
        beginning = memoryview(self._beginning)[offset : offset + nbytes]
        if beginning:
            return beginning
        size, data = self._backend.read(
            self._name, offset, min(nbytes, self.size - offset, messages.MAX_INLINE)
        )
        if size != self.size:
            raise TransientStorageError(
                errno.ESTALE,
                f"the object had {self.size} bytes when it was opened, and has {size} now",
                f"{self._backend.url}/{self._name}",
            )
        return data

    def close(self) -> None:
        self._beginning = b""
