"""A node server in this process, behind a channel's interface: tests decide when it answers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from kvshelf.errors import ObjectMissingError, UnavailableStorageError
from kvshelf.format.names import parse_path
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.memory.arena import Arena
from kvshelf.server.calls import Calls
from kvshelf.server.messages import (
    Call,
    Done,
    Facts,
    FoundSizes,
    LookedUp,
    LookUpChunks,
    Register,
    Result,
    Store,
    Stored,
    Welcome,
)
from kvshelf.server.segment import Segment
from kvshelf.server.storage import Copied


@dataclass
class Loan:
    """A leased object; `good` turns False when its lease has expired."""

    view: memoryview
    good: bool = True
    released: int = 0

    def valid(self) -> bool:
        return self.good

    def release(self) -> None:
        self.released += 1


class ScriptedChannel:
    """The server and one connection to it.

    `holding`: messages of these types are kept in `held` until :meth:`answer`, as by a server that
    hangs.
    """

    def __init__(self, chunk_size: int, *, segment_bytes: int = 1 << 24) -> None:
        self.url = "ipc:///not/used"
        facts = Facts("memory://", "memory")
        self.welcome: Welcome | None = Welcome(bytes(16), 1 << 24, 0, 30.0, chunk_size, facts)
        self.connected = True
        self.page_locked = False
        self.locked_for: list[Any] = []
        self.segment = Segment(segment_bytes)
        assert self.segment.fd is not None
        self.stored_bytes = Arena.of(self.segment.fd, self.segment.nbytes).view
        self.calls: Calls | None = None
        self.objects: dict[str, bytes] = {}
        self.formats: dict[str, ObjectFormat] = {}
        self.sessions: dict[str, list[str]] = {}
        self.ended: list[str] = []
        self.loans: list[Loan] = []
        self.stores: list[Store] = []
        self.fetches: list[list[str]] = []
        self.holding: tuple[str, ...] = ()
        self.held: list[Callable[[], None]] = []
        self.refuses: set[str] = set()
        self.closed = False
        self._lock = threading.Lock()
        self._on_connect: list[Callable[[Any], None]] = []

    # ------------------------------------------------------------------ as Channel

    def register(self, record: bytes) -> None:
        self.on_connect(lambda _: self.serve(Register(record)))

    def page_lock(self, device: Any) -> None:
        self.locked_for.append(device)

    def wait_connected(self, timeout: float) -> bool:
        return self.connected

    def on_connect(self, callback: Callable[[Any], None]) -> None:
        self._on_connect.append(callback)
        if self.connected:
            callback(self.welcome)

    def request(self, message: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._do(type(message).__name__, future, lambda: self.serve(message))
        return future

    def fetch(self, session: str, names: Sequence[str], sizes: Sequence[int]) -> list[Future[Loan]]:
        self.fetches.append(list(names))
        futures: list[Future[Loan]] = []
        for name, size in zip(names, sizes, strict=True):
            held = self.sessions.get(session, [])
            if name in held:
                held.remove(name)
            if not held:
                self.sessions.pop(session, None)
            future: Future[Loan] = Future()
            futures.append(future)
            self._do("Fetch", future, lambda name=name, size=size: self._loan(name, size))
        return futures

    def end_session(self, session: str) -> None:
        self.ended.append(session)
        self.sessions.pop(session, None)

    def close(self) -> None:
        self.closed = True

    # ------------------------------------------------------------------ for tests

    def change_welcome(self, **fields: Any) -> None:
        """State other facts to whoever connects or looks from now on."""
        assert self.welcome is not None
        self.welcome = msgspec.structs.replace(self.welcome, **fields)

    def lose(self) -> None:
        """End the connection, as when the server dies."""
        self.connected = False
        self.answer()

    def come_back(self) -> None:
        """Connect again, to a server that remembers nothing."""
        self.objects.clear()
        self.formats.clear()
        self.connected = True
        for callback in self._on_connect:
            callback(self.welcome)

    def answer(self) -> None:
        """Let everything that is held be answered."""
        with self._lock:
            held, self.held = self.held, []
        for work in held:
            work()

    # ------------------------------------------------------------------ inside

    def _do(self, kind: str, future: Future[Any], work: Callable[[], Any]) -> None:
        def run() -> None:
            if not self.connected:
                future.set_exception(UnavailableStorageError("the server is gone"))
                return
            try:
                result = work()
            except Exception as error:  # noqa: BLE001
                future.set_exception(error)
            else:
                future.set_result(result)

        with self._lock:
            if kind in self.holding and self.connected:
                self.held.append(run)
                return
        run()

    def serve(self, message: Any) -> Any:
        if isinstance(message, Register):
            namespace = Namespace.from_bytes(message.record)
            self.formats[namespace.digest.hex()[:16]] = ObjectFormat(namespace)
            return Done()
        if isinstance(message, LookUpChunks):
            chunks = 0
            for names in message.chains:
                if not all(name in self.objects for name in names):
                    break
                self.sessions.setdefault(message.session, []).extend(names)
                chunks += 1
            return LookedUp(chunks)
        if isinstance(message, Call):
            assert self.calls is not None
            found = self.calls.perform(b"", message.method, message.args, message.data)
            return found if isinstance(found, FoundSizes) else Result(found)
        assert isinstance(message, Store)
        self.stores.append(message)
        if message.name in self.refuses:
            raise UnavailableStorageError("no")
        data = bytes(self.stored_bytes[message.offset : message.offset + message.nbytes])
        parsed = parse_path(message.name)
        if message.memory_only:
            assert parsed is None and message.name.startswith("hash/")
            assert xxhash.xxh3_64_intdigest(data) == message.checksum
        else:
            assert parsed is not None and parsed.namespace is not None
            fmt = self.formats[parsed.namespace[-16:]]
            assert fmt.read_named(
                Copied(memoryview(data)), parsed, memoryview(bytearray(len(data)))
            ).key
        existed = message.name in self.objects
        self.objects.setdefault(message.name, data)
        return Stored("existed" if existed else "created")

    def _loan(self, name: str, size: int) -> Loan:
        data = self.objects.get(name)
        if data is None:
            raise ObjectMissingError(name)
        loan = Loan(memoryview(data))
        self.loans.append(loan)
        return loan
