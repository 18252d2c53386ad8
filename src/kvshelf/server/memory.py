"""The memory of a node server, as its client asks for objects there.

Owns which objects are expected, requested ahead, and leased to the threads that load them
(:class:`ServedMemory`). The connection is :mod:`kvshelf.server.channel`.

Contracts
---------
* While the server is gone, every call fails at once with UnavailableStorageError.
* What was expected and is not pinned is given back after :data:`EXPECTED_SECONDS`, or half the time
  of a lease if that is less.
* Any thread may call anything. :meth:`ServedMemory.expect` does not block. The thread
  `kvshelf-expected` gives back what was not pinned.
"""

from __future__ import annotations

import threading
import time
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from typing import Final

from kvshelf.backends.base import StatResults, check_name
from kvshelf.background import Background
from kvshelf.errors import NoSpaceStorageError
from kvshelf.server import messages
from kvshelf.server.channel import Channel
from kvshelf.server.connection import Leased
from kvshelf.server.requests import parts, probe

#: Seconds for which an expected object is kept until it is pinned.
EXPECTED_SECONDS: Final = 10.0
#: Part of the server's arena that one client's expectations may take; a server has many clients.
_EXPECTED_SHARE: Final = 1 / 8
#: Most objects that one message asks for ahead. An engine's step thread sends the first.
_ASKED_AT_ONCE: Final = 32
#: Seconds by which a client waits longer than the server for the storage.
_LATER: Final = 0.5
#: The leases of this client are ended one by one.
_SESSION: Final = ""


class ServedMemory:
    """The objects in a node server's memory.

    An :class:`~kvshelf.tiers.object_memory.ObjectMemory`.

    Parameters
    ----------
    channel : Channel
        Has been connected once; the caller closes it.
    in_place : bool
        Objects are read where they lie. Otherwise they are copied from there, unless the memory is
        page-locked (:meth:`Channel.page_lock`): then a GPU copies from it.
    """

    def __init__(self, channel: Channel, *, in_place: bool = True) -> None:
        assert channel.welcome is not None
        self._channel = channel
        self._welcome = channel.welcome
        self._in_place = in_place
        self._lock = threading.Lock()
        self._closed = False
        #: Objects that are expected and not requested yet: bytes, and when the expectation ends.
        self._later: OrderedDict[str, tuple[int, float]] = OrderedDict()
        #: Objects that were requested ahead: the answer, bytes, when they are given back.
        self._expected: OrderedDict[str, tuple[Future[Leased], int, float]] = OrderedDict()
        self._expected_bytes = 0
        self._thread = Background("kvshelf-expected", self._give_back_unused)
        channel.on_connect(self._connected)

    @property
    def pins(self) -> bool:
        """Whether objects are read in place."""
        return self._in_place or self._channel.page_locked

    @property
    def nbytes(self) -> int:
        """Bytes of the server's arena."""
        return self._welcome.arena_bytes

    def find(self, names: Sequence[str], sizes: Sequence[int]) -> StatResults:
        """Probe the server's memory, and its storage for what is not there."""
        return probe(
            self._channel,
            names,
            [
                messages.Find(part, of_part)
                for part, of_part in zip(parts(names), parts(sizes), strict=True)
            ],
        )

    def expect(self, names: Sequence[str], sizes: Sequence[int]) -> None:
        """Have the server read objects and lease them to this client.

        Few messages serve a load of many objects: the first of them are asked for now, and more
        when these are pinned.
        """
        until = time.monotonic() + self._keep_seconds
        with self._lock:
            if self._closed:
                return
            for name, size in zip(names, sizes, strict=True):
                if name not in self._expected:
                    self._later[name] = size, until
            self._ask_ahead()

    @property
    def _keep_seconds(self) -> float:
        return min(EXPECTED_SECONDS, self._welcome.lease_seconds / 2)

    @property
    def _most_expected(self) -> int:
        return int(self._welcome.arena_bytes * _EXPECTED_SHARE)

    def _ask_ahead(self) -> None:
        """Ask for expected objects, within the bytes that may be expected. The lock is held."""
        now = time.monotonic()
        left = self._most_expected - self._expected_bytes
        names: list[str] = []
        sizes: list[int] = []
        while self._later and len(names) < _ASKED_AT_ONCE:
            name, (size, until) = next(iter(self._later.items()))
            if until > now:
                left -= size
                if left < 0:
                    break
                names.append(name)
                sizes.append(size)
            del self._later[name]
        if not names:
            return
        futures = self._channel.fetch(_SESSION, names, sizes)
        until = now + self._keep_seconds
        for name, size, future in zip(names, sizes, futures, strict=True):
            self._expected[name] = future, size, until
            self._expected_bytes += size
        self._thread.start()
        self._thread.wake()

    def pin(self, name: str, size: int) -> Leased | None:
        """Lease an object in the server's memory, read or not yet."""
        check_name(name)
        with self._lock:
            self._later.pop(name, None)
            future, nbytes, _ = self._expected.pop(name, (None, 0, 0.0))
            self._expected_bytes -= nbytes
        if future is not None and nbytes != size:
            _give_back(future)
            future = None
        if future is None:
            if size > self._welcome.arena_bytes // 2:
                # More than one client may hold.
                return None
            [future] = self._channel.fetch(_SESSION, [name], [size])
        if (
            self._later
            and len(self._expected) <= _ASKED_AT_ONCE // 2
            and self._expected_bytes <= self._most_expected // 2
        ):
            with self._lock:
                self._ask_ahead()
        # Past this the server's memory is full: a late storage it would have reported.
        facts = self._welcome.facts
        seconds = facts.read_seconds + size / facts.bytes_per_second + _LATER
        try:
            return future.result(seconds)
        except NoSpaceStorageError:
            return None
        except FutureTimeoutError:
            if future.cancel():
                return None
            return future.result()

    def _give_back_unused(self) -> float | None:
        """Release what was expected and not pinned in time; return the seconds to the next."""
        while True:
            with self._lock:
                first = next(iter(self._expected.values()), None)
                if first is None:
                    if self._closed:
                        self._thread.close()
                    return None
                left = first[2] - time.monotonic()
                if left > 0 and not self._closed:
                    return left
                _, (future, nbytes, _) = self._expected.popitem(last=False)
                self._expected_bytes -= nbytes
            _give_back(future)

    def _connected(self, welcome: messages.Welcome) -> None:
        self._welcome = welcome
        with self._lock:
            # These have failed with the old connection.
            self._expected.clear()
            self._expected_bytes = 0

    def close(self) -> None:
        """Release the leases of expected objects. Idempotent."""
        with self._lock:
            self._closed = True
        self._thread.wake()


def _give_back(future: Future[Leased]) -> None:
    """Release what a future brings, whenever that is."""

    def release(done: Future[Leased]) -> None:
        if done.exception() is None:
            done.result().release()

    future.add_done_callback(release)
