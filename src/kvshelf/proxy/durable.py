"""Whether a prompt's KV is on the store, and what is withheld from a client until it is.

A producer's params are a promise: it answers before its last stores have ended. A client that must
know waits for the object of the final key, in all its shards and kinds.

Threads
-------
:meth:`Durability.wait` runs on the event loop and calls no storage. A thread of its own reads the
description of a namespace, one at a time; those of :class:`~kvshelf.shelf.waits.WaitService` look
for objects. All are daemons: a storage that hangs does not delay the end of the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from typing import Any, Final

import anyio

from kvshelf.errors import KVShelfError, StorageError
from kvshelf.format.keys import Chunk, salt_group_of
from kvshelf.format.names import parse_namespace_folder
from kvshelf.format.objects import ObjectFormat
from kvshelf.metrics import Counters
from kvshelf.shelf.shelf import Shelf, read_namespace
from kvshelf.shelf.waits import Wait, WaitService
from kvshelf.vllm.handover import Handover, read_handover

logger = logging.getLogger(__name__)

#: Seconds between two polls of the threads' results, and for the description of a namespace.
_PAUSE: Final = 0.01
_DESCRIPTION_PAUSE: Final = 0.25
#: Services that are kept although no request waits, and descriptions of namespaces. New namespaces
#: come with each change of an engine's configuration, and old ones are not asked for again.
_MOST_IDLE: Final = 4
_MOST_FORMATS: Final = 64
#: The last event of a stream, and what ends an event.
_DONE: Final = b"data: [DONE]"
_EVENT_END: Final = b"\n\n"


class Durability:
    """Waits for the KV of hand-overs; belongs to one event loop.

    Parameters
    ----------
    shelf : Shelf
        The shelf that the engines store on.
    longest : float
        Longest wait, in seconds.
    """

    def __init__(self, shelf: Shelf, longest: float) -> None:
        self._shelf = shelf
        self._longest = longest
        self._formats: dict[bytes, ObjectFormat] = {}
        self._reading = anyio.Lock()
        #: By digest, and whether the objects are in the folders of salt groups: a service takes two
        #: objects of one key for the same. The one that was used last comes last.
        self._services: dict[tuple[bytes, bool], WaitService] = {}

    def close(self) -> None:
        """Stop the threads."""
        for service in self._services.values():
            service.close()

    async def wait(self, params: dict[str, Any] | None, salt: str) -> bool:
        """Wait until the KV is on the store; False if it is not there in time, or given up.

        Parameters
        ----------
        params : dict or None
            A producer's answer; without one there is nothing to wait for.
        salt : str
            The request's cache salt: where ``group_by_salt`` is set, it names the folder.
        """
        waits: list[Wait] = []
        try:
            promised = read_handover(params)
            if promised is None:
                return False
            with anyio.move_on_after(self._longest):
                family = await self._format(promised.namespace)
                waits = [
                    self._submit(family, promised, group) for group in {"_", salt_group_of(salt)}
                ]
                while not all(wait.ended for wait in waits):
                    if any(wait.complete for wait in waits):
                        break
                    await anyio.sleep(_PAUSE)
            return any(wait.complete for wait in waits)
        except (ValueError, KVShelfError, RuntimeError) as error:
            logger.warning("the KV of a hand-over cannot be looked for: %s", error)
            return False
        finally:
            for wait in waits:
                wait.cancel()
            self._close_idle()

    def _submit(self, family: ObjectFormat, promised: Handover, group: str) -> Wait:
        place = promised.namespace, group != "_"
        service = self._services.pop(place, None)
        if service is None:
            views = {kind: self._shelf.view(family.of(kind)) for kind in family.kinds}
            service = WaitService(views, counters=Counters())
        self._services[place] = service
        chunk = _chunk(promised, family.chunk_size, group)
        return service.submit([(kind, chunk) for kind in family.kinds], promised.attempt)

    def _close_idle(self) -> None:
        idle = [place for place, service in self._services.items() if not service.waiting]
        for place in idle[: max(0, len(self._services) - _MOST_IDLE)]:
            self._services.pop(place).close()

    async def _format(self, digest: bytes) -> ObjectFormat:
        """Return the format of a namespace, as soon as its description is on the shelf."""
        while True:
            async with self._reading:
                found = self._formats.get(digest) or await self._on_a_thread(digest)
                if found is not None:
                    if len(self._formats) >= _MOST_FORMATS:
                        del self._formats[next(iter(self._formats))]
                    self._formats[digest] = found
                    return found
            await anyio.sleep(_DESCRIPTION_PAUSE)

    async def _on_a_thread(self, digest: bytes) -> ObjectFormat | None:
        """Run :func:`_read_format` on a thread that may hang."""
        loop = asyncio.get_running_loop()
        ended = asyncio.Event()
        found: list[ObjectFormat] = []

        def run() -> None:
            try:
                found.extend(_read_format(self._shelf, digest))
            except KVShelfError as error:
                logger.debug("the shelf's namespaces cannot be read: %s", error)
            # The loop may be closed when a storage that hung answers.
            with contextlib.suppress(RuntimeError):
                loop.call_soon_threadsafe(ended.set)

        threading.Thread(target=run, name="kvshelf-namespace", daemon=True).start()
        await ended.wait()
        return found[0] if found else None


def _read_format(shelf: Shelf, digest: bytes) -> list[ObjectFormat]:
    """Return the format of a namespace; nothing while its description is not on the shelf."""
    backend = shelf.backend
    for folder in backend.folders():
        if parse_namespace_folder(folder) == digest.hex()[:16]:
            with contextlib.suppress(StorageError, ValueError):
                namespace = read_namespace(backend, folder)
                if namespace.digest == digest:
                    return [ObjectFormat(namespace)]
    return []


def _chunk(promised: Handover, size: int, group: str) -> Chunk:
    """Return the final chunk or tail of a hand-over.

    Raises
    ------
    ValueError
        If chunks of this size cannot end there.
    """
    index, rest = divmod(promised.tokens - promised.tail, size)
    if not promised.tail:
        index -= 1
    if rest or index < 0 or promised.tail >= size:
        raise ValueError(
            f"{promised.tokens} tokens with a tail of {promised.tail} do not fit chunks of {size}"
        )
    # Names and sizes of objects do not depend on the parent.
    return Chunk(promised.key, bytes(32), index, promised.tail or size, bool(promised.tail), group)


class LastEvent:
    """Withholds the last event of a stream, ``data: [DONE]``, and the bytes after it.

    vLLM ends each event with an empty line, whose ends are single line feeds
    (``entrypoints/openai/completion/serving.py``).
    """

    def __init__(self) -> None:
        self.withheld = b""

    def feed(self, piece: bytes) -> bytes:
        """Add bytes of the stream; return those that may be passed on now."""
        stream = self.withheld + piece
        at = 0
        while not stream.startswith(_DONE, at):
            end = stream.find(_EVENT_END, at)
            if end < 0:
                break
            at = end + len(_EVENT_END)
        self.withheld = stream[at:]
        return stream[:at]
