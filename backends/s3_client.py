"""What S3Backend needs of a client of an S3 store, and the event loop of its calls.

Owns the interface (:class:`Client`). :mod:`kvshelf.backends.s3_obstore` and
:mod:`kvshelf.backends.s3_s3fs` implement it. Calls raise what the library raises, which
:meth:`Client.error` makes a typed error, and FileNotFoundError where there is no such object.
"""

from __future__ import annotations

import asyncio
import time
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import Future
from enum import Enum, auto
from typing import Any, Final, NamedTuple, TypeVar

from kvshelf.backends.base import ObjectInfo
from kvshelf.backends.s3_errors import ALREADY_THERE
from kvshelf.errors import StorageError

PROBES_AT_ONCE: Final = 64
#: Most objects that one request removes.
DELETES_AT_ONCE: Final = 1000
#: A body arrives in pieces of about this size.
STREAM_BYTES: Final = 1 << 20

T = TypeVar("T")


class Put(Enum):
    """What became of an object that was put."""

    DONE = auto()
    #: There was one already.
    EXISTS = auto()
    #: Another writer is creating the same name.
    CONFLICT = auto()
    #: The store knows no conditions.
    UNSUPPORTED = auto()


class RangeError(Exception):
    """A request for a range was not answered with that range.

    Attributes
    ----------
    whole : bool
        It was answered with the whole object: the server knows no ranges.
    """

    def __init__(self, *, whole: bool) -> None:
        super().__init__("the whole object" if whole else "no such range")
        self.whole = whole


class Body(NamedTuple):
    """The body of an answer, of which nothing was read yet.

    Attributes
    ----------
    size : int
        Of the whole object.
    etag : str or None
        Its version.
    pieces : Iterator of memoryview
        Its bytes as they arrive.
    close : Callable
        Drops the rest.
    """

    size: int
    etag: str | None
    pieces: Iterator[memoryview]
    close: Callable[[], object]


class Part(NamedTuple):
    """A part of an object: the whole object's size, its bytes, and how long they took to arrive."""

    size: int
    pieces: Sequence[memoryview]
    seconds: float


def _refused_put(codes: set[str]) -> Put | None:
    """Return what the answer to a conditional PUT means; None for an error."""
    if "409" in codes:
        return Put.CONFLICT
    if codes & ALREADY_THERE:
        return Put.EXISTS
    return Put.UNSUPPORTED if codes & {"501", "NotImplemented"} else None


class Client(ABC):
    """A client of a bucket's objects below a prefix, to which names are relative.

    Attributes
    ----------
    library : str
    """

    library: str

    @abstractmethod
    def head(self, name: str) -> ObjectInfo:
        """Probe one object."""

    @abstractmethod
    def get(
        self, name: str, start: int = 0, end: int | None = None, etag: str | None = None
    ) -> Body:
        """Request an object, or a part of it, if it still is the version `etag`."""

    def put(self, name: str, data: Any, *, create: bool) -> Put:
        """Write an object; `create`: on the condition that there is none."""
        try:
            self._put(name, data, create=create)
        except Exception as exc:
            refused = _refused_put(self._codes(exc)) if create else None
            if refused is None:
                raise
            return refused
        return Put.DONE

    @abstractmethod
    def _put(self, name: str, data: Any, *, create: bool) -> None:
        """Make a PUT request."""

    @abstractmethod
    def _codes(self, exc: Exception) -> set[str]:
        """Return the error code and the status of the answer that an exception is about."""

    @abstractmethod
    def delete(self, names: Sequence[str]) -> None:
        """Remove objects, whether they are there or not; raise if one of them stays."""

    @abstractmethod
    def now(self) -> float | None:
        """Return the server's time."""

    @abstractmethod
    def error(self, exc: Exception, what: str, name: str, *, writing: bool = False) -> StorageError:
        """Return the typed error for an exception of a call."""

    @abstractmethod
    def close(self) -> None:
        """Give up what the client holds. Idempotent."""

    # ------------------------------------------------------------------------- on the event loop

    @abstractmethod
    def _loop(self) -> asyncio.AbstractEventLoop:
        """Return the running loop, or raise StorageError."""

    @abstractmethod
    async def _head(self, name: str) -> ObjectInfo: ...

    @abstractmethod
    async def _part(self, name: str, start: int, end: int) -> tuple[int, Any, Any]:
        """Request a part: the object's size, an asynchronous iterator of pieces, its close."""

    @abstractmethod
    def _pages(
        self, prefix: str, count: int, after: str | None
    ) -> Callable[[], Awaitable[Sequence[ObjectInfo]]]:
        """Return a function that returns the next rows of a listing, none at its end."""

    @abstractmethod
    async def _folders(self, prefix: str) -> Sequence[str]: ...

    def _start(self, call: Coroutine[Any, Any, T]) -> Future[T]:
        try:
            return asyncio.run_coroutine_threadsafe(call, self._loop())
        except StorageError:
            call.close()
            raise

    def _wait(self, call: Callable[[], Awaitable[T]], seconds: float | None = None) -> T:
        """Make a call and return its answer; TimeoutError after `seconds`, and it is dropped."""

        async def bounded() -> T:
            return await asyncio.wait_for(call(), seconds)

        return self._start(bounded()).result()

    def heads(self, names: Sequence[str]) -> Sequence[ObjectInfo | BaseException]:
        """Probe many objects in parallel."""
        free = asyncio.Semaphore(PROBES_AT_ONCE)

        async def head(name: str) -> ObjectInfo:
            async with free:
                return await self._head(name)

        async def heads() -> Sequence[ObjectInfo | BaseException]:
            return await asyncio.gather(*map(head, names), return_exceptions=True)

        return self._wait(heads)

    def part(self, name: str, start: int, end: int) -> Future[Part]:
        """Begin to fetch a part of an object."""

        async def fetch() -> Part:
            size, stream, close = await self._part(name, start, end)
            begin, left = time.monotonic(), end - start
            pieces: list[memoryview] = []
            try:
                async for piece in stream:
                    pieces.append(memoryview(piece).cast("B")[:left])
                    left -= len(pieces[-1])
                    if not left:
                        break
            finally:
                close()
            return Part(size, pieces, time.monotonic() - begin)

        return self._start(fetch())

    def check(self, seconds: float) -> None:
        """Fail now if every later call would fail; TimeoutError after `seconds`."""
        next(self.rows("", 1, seconds), None)

    def rows(
        self, prefix: str, count: int, seconds: float, after: str | None = None
    ) -> Iterator[Sequence[ObjectInfo]]:
        """List objects behind `after`, `count` at once; TimeoutError if the next take `seconds`."""
        following = self._pages(prefix, count, after)
        while rows := self._wait(following, seconds):
            yield rows

    def folders(self, prefix: str, seconds: float) -> Sequence[str]:
        """Return the names of the folders in `prefix`; TimeoutError after `seconds`."""
        return self._wait(lambda: self._folders(prefix), seconds)
