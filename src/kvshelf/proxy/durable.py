"""Whether a prompt's KV is on the store, and what is withheld from a client until it is.

A producer's params are a promise: it answers before its last stores have ended. A client that must
know waits for the object of the final key, in all its shards and kinds.

Threads
-------
:meth:`Durability.wait` runs on the event loop; each look at the storage on a thread of a small
pool. Looks of one request come further and further apart.
"""

from __future__ import annotations

import logging
import time
from typing import Any, Final

import anyio

from kvshelf.errors import KVShelfError, StorageError
from kvshelf.format.keys import Chunk, salt_group_of
from kvshelf.format.names import parse_namespace_folder
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf, read_namespace
from kvshelf.vllm.handover import Handover, read_handover

logger = logging.getLogger(__name__)

#: Looks at the storage at the same time.
_LOOKS: Final = 8
#: Seconds between two looks, at first and at most.
_FIRST_PAUSE: Final = 0.005
_LONGEST_PAUSE: Final = 0.5
#: The last event of a stream, and what ends an event.
_DONE: Final = b"data: [DONE]"
_EVENT_END: Final = b"\n\n"


class Durability:
    """Looks for the KV of hand-overs.

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
        self._threads = anyio.CapacityLimiter(_LOOKS)

    async def wait(self, params: dict[str, Any] | None, salt: str) -> bool:
        """Wait until the KV is on the store; False if it is not there in time, or given up.

        Parameters
        ----------
        params : dict or None
            A producer's answer; without one there is nothing to wait for.
        salt : str
            The request's cache salt: where ``group_by_salt`` is set, it names the folder.
        """
        try:
            promised = read_handover(params)
        except ValueError as error:
            logger.warning("a prefill engine's params cannot be used: %s", error)
            return False
        if promised is None:
            return False
        groups = {"_", salt_group_of(salt)}
        until = time.monotonic() + self._longest
        pause = _FIRST_PAUSE
        while True:
            found = await anyio.to_thread.run_sync(
                self._look, promised, groups, abandon_on_cancel=True, limiter=self._threads
            )
            left = until - time.monotonic()
            if found is not None or left <= 0:
                return found is True
            await anyio.sleep(min(pause, left))
            pause = min(pause * 1.5, _LONGEST_PAUSE)

    def _look(self, promised: Handover, groups: set[str]) -> bool | None:
        """Whether all objects of the final key are there; None while nothing is decided.

        Runs on a thread of the pool.
        """
        try:
            family = self._format(promised.namespace)
            if family is None:
                return None
            size = family.chunk_size
            index, rest = divmod(promised.tokens - promised.tail, size)
            if not promised.tail:
                index -= 1
            if rest or index < 0 or promised.tail >= size:
                return False
            formats = [family.of(kind) for kind in family.kinds]
            for group in groups:
                chunk = _chunk(promised, index, size, group)
                if all(self._shelf.view(fmt).present([chunk])[0] for fmt in formats):
                    return True
            return False if self._shelf.view(family).gave_up([promised.attempt])[0] else None
        except KVShelfError as error:
            logger.debug("the shelf did not tell whether KV is there: %s", error)
            return None

    def _format(self, digest: bytes) -> ObjectFormat | None:
        """Return the format of a namespace; None while its description is not on the shelf."""
        found = self._formats.get(digest)
        if found is not None:
            return found
        backend = self._shelf.backend
        for folder in backend.folders():
            if parse_namespace_folder(folder) != digest.hex()[:16]:
                continue
            try:
                namespace = read_namespace(backend, folder)
            except (StorageError, ValueError):
                continue
            if namespace.digest == digest:
                return self._formats.setdefault(digest, ObjectFormat(namespace))
        return None


def _chunk(promised: Handover, index: int, size: int, group: str) -> Chunk:
    # Names and sizes of objects do not depend on the parent.
    return Chunk(promised.key, bytes(32), index, promised.tail or size, bool(promised.tail), group)


class LastEvent:
    """Withholds the last event of a stream of events: ``data: [DONE]``, and what follows it.

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
