"""What an engine reads ahead into memory, for requests that wait to be scheduled.

Owns which chunks each request still wants, and how many may be in memory for all of them. The
reading itself is an early load (:mod:`kvshelf.transfer.loads`), which pins each chunk that it has
read until the request's own load has used the chunk, or the request has ended.

Contracts
---------
* Requests are served in order of arrival: the chunks that are needed first come first. Nothing is
  read that would not fit beside what is pinned already, but for one chunk.
* A chunk that several requests need is read once.
* A chunk that cannot be read ends the reading for the requests that need it. Where the storage or
  the memory was unavailable, all reading rests for a second, and the chunk is read again.
* All methods run on the worker's step thread, and none calls the storage.
"""

from __future__ import annotations

import time
from collections import Counter, OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import torch

from kvshelf.format.keys import Chunk
from kvshelf.shelf.view import ShelfView
from kvshelf.transfer.context import ChunkSlots, TransferContext
from kvshelf.transfer.load import Failure, LoadPiece
from kvshelf.transfer.loads import Loads

#: Seconds until the next attempt after the storage or memory was unavailable.
_RETRY_SECONDS: Final = 1.0
_NO_SLOTS: Final = torch.empty(0, dtype=torch.int64)


@dataclass(eq=False, slots=True)
class _Request:
    """A waiting request.

    Attributes
    ----------
    view : ShelfView
        The objects of the namespace of its chunks.
    chunks : deque of Chunk
        What is not read yet.
    pieces : list of LoadPiece
        The early loads that were started.
    ended : bool
        Nothing more is read for it.
    """

    view: ShelfView
    chunks: deque[Chunk] = field(default_factory=deque)
    pieces: list[LoadPiece] = field(default_factory=list)
    ended: bool = False


class ReadAhead:
    """What is read ahead of one kind of KV.

    Parameters
    ----------
    context : TransferContext
    loads : Loads
        Of the same context.
    """

    def __init__(self, context: TransferContext, loads: Loads) -> None:
        self._loads = loads
        self._shares = context.shares
        self._slot_bytes = context.places.slot_bytes
        self._requests: OrderedDict[str, _Request] = OrderedDict()
        #: How many requests have each chunk that is being read or has come.
        self._users: Counter[bytes] = Counter()
        #: Early loads that have ended; any thread appends.
        self._finished: deque[LoadPiece] = deque()
        self._retry_at = 0.0

    def add(self, request_id: str, view: ShelfView, chunks: Sequence[Chunk]) -> None:
        """Read further chunks for a waiting request, all of one namespace."""
        request = self._requests.setdefault(request_id, _Request(view))
        if not request.ended:
            request.chunks.extend(chunks)
        self._read()

    def cancel_reads(self, request_id: str) -> None:
        """Stop reading for a request, since its load has begun. Chunks in memory stay."""
        request = self._requests.get(request_id)
        if request is not None:
            self._end(request)

    def release(self, request_id: str) -> None:
        """Give up what is kept for a request."""
        request = self._requests.pop(request_id, None)
        if request is not None:
            for piece in request.pieces:
                self._release(piece, 0)
            self._read()

    def release_all(self) -> None:
        """Give up what is kept for all requests."""
        # All reads are cancelled first, so that no request takes the memory of another.
        for request in self._requests.values():
            self._end(request)
        for request_id in list(self._requests):
            self.release(request_id)

    def take_failures(self) -> list[tuple[Chunk, Failure]]:
        """Return the chunks that could not be read since the last call, and read on.

        Called once per step. Chunks of a storage that was unavailable are not among them.
        """
        failures: dict[Chunk, Failure] = {}
        while self._finished:
            piece = self._finished.popleft()
            if not piece.cancelled and piece.failed_at is not None:
                failures |= self._note_failed(piece)
        self._read()
        return list(failures.items())

    def _end(self, request: _Request) -> None:
        request.ended = True
        request.chunks.clear()
        for piece in request.pieces:
            self._loads.cancel(piece)

    def _release(self, piece: LoadPiece, first: int) -> None:
        """Give up what an early load keeps, all of it or from an item on."""
        for item in piece.items[first:]:
            key = item.chunk.key
            self._users[key] -= 1
            if not self._users[key]:
                del self._users[key]
        self._loads.release(piece, first)

    def _note_failed(self, piece: LoadPiece) -> dict[Chunk, Failure]:
        """Queue the chunks that an early load did not bring again, or end its request."""
        request = next(
            (waiting for waiting in self._requests.values() if piece in waiting.pieces), None
        )
        if request is None:
            return {}
        first = piece.leading
        lost: dict[Chunk, Failure] = {
            chunk: failure
            for chunk, failure in piece.failures
            if failure is not Failure.UNAVAILABLE
        }
        unread = [item.chunk for item in piece.items[first:]]
        # Chunks that came behind the failure are unpinned. The next read finds them in memory.
        self._release(piece, first)
        piece.items = piece.items[:first]
        if lost:
            # Early loads of chunks before the failure go on.
            request.ended = True
            request.chunks.clear()
            for later_piece in list(request.pieces):
                if later_piece.items and later_piece.items[0].chunk.index > unread[0].index:
                    self._release(later_piece, 0)
                    request.pieces.remove(later_piece)
        elif not request.ended:
            unread += request.chunks
            request.chunks = deque(sorted(unread, key=lambda chunk: chunk.index))
            self._retry_at = time.monotonic() + _RETRY_SECONDS
        if not first:
            request.pieces.remove(piece)
        return lost

    def _read(self) -> None:
        """Read the next chunks of requests, as many as fit."""
        if time.monotonic() < self._retry_at:
            return
        room = self._shares.ahead.limit - self._shares.copies.pinned_bytes
        capacity = max(1, room // self._slot_bytes)
        for request in self._requests.values():
            chunks = []
            while request.chunks:
                key = request.chunks[0].key
                if key not in self._users and len(self._users) >= capacity:
                    break
                self._users[key] += 1
                chunks.append(request.chunks.popleft())
            if chunks:
                items = [ChunkSlots(chunk, _NO_SLOTS) for chunk in chunks]
                ended = self._finished.append
                piece = LoadPiece(request.view, items, early=True, keeps=True, on_done=ended)
                self._loads.load(piece)
                request.pieces.append(piece)
            if request.chunks:
                # Later requests would take the memory that this one waits for.
                return
