"""How chunks move between the caches of one device and page-locked host memory.

Owns the interface of the two implementations, :mod:`kvshelf.kv.native_copier` for devices that the
compiled library supports, and :mod:`kvshelf.kv.tensor_copier` for all others, and the record of
what they copy. :mod:`kvshelf.kv.device` decides when they may.

Contracts
---------
* ``store`` and ``fence`` never wait: the engine's step thread calls them. ``wait``, ``load`` and
  ``drain`` wait, and belong on background threads.
* By the compiled library each direction has at most 0.2 ms of copies on the device, in several
  pieces: a copy of the engine's own waits no longer. Nothing is enqueued that has to wait for the
  engine.
* After an error nothing of that call is under way any more. Errors of the device are RuntimeErrors.
* Background threads make the device current only while they use it, and never touch another
  device: a context there would take several hundred megabytes.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from kvshelf.errors import UnsupportedError
from kvshelf.kv import ops
from kvshelf.kv.caches import LayerCall, tail_calls
from kvshelf.kv.layout import PagedLayout


@dataclass(frozen=True, slots=True)
class ChunkCopy:
    """What a copy of one chunk, or of one tail, consists of.

    Attributes
    ----------
    calls : Sequence[LayerCall]
        The copy calls of the first shard. The other shards differ only in their heads: each has
        those after the one before it.
    layouts : Sequence[PagedLayout]
        Of each call.
    shards : int
    payload_bytes : int
        Of each shard.
    tokens : int
        Slots of a chunk, of which each call uses some: see :attr:`LayerCall.first_slot`. For
        native layouts its blocks.
    """

    calls: Sequence[LayerCall]
    layouts: Sequence[PagedLayout]
    shards: int
    payload_bytes: int
    tokens: int

    def of_tail(self, tokens: int) -> ChunkCopy:
        """Return the copy of a tail, see :meth:`KVMemory.of_tail`.

        Raises
        ------
        ValueError
            If a chunk has no more tokens.
        UnsupportedError
            If chunks are whole blocks: no kernel copies single tokens of these.
        """
        if any(call.token_layout is not None for call in self.calls):
            raise UnsupportedError("caches on a device whose chunks are whole blocks have no tails")
        calls = tail_calls(self.calls, tokens)
        return ChunkCopy(calls, self.layouts, self.shards, max(call.end for call in calls), tokens)

    def check_slots(self, slots: Tensor) -> None:
        """Check a chunk's slots with the layouts that they are used for.

        Raises
        ------
        ValueError
            If a slot is not in the caches.
        """
        ranges = {
            (call.first_slot, call.count, layout)
            for call, layout in zip(self.calls, self.layouts, strict=True)
        }
        for first, count, layout in ranges:
            ops.check_slots(slots[first : first + count], layout)


class Copier(ABC):
    """Moves chunks between the caches of one device and page-locked host memory."""

    @abstractmethod
    def add_buffer(self, payloads: Tensor, *, for_loads: bool) -> None:
        """Use a device buffer from now on.

        Parameters
        ----------
        payloads : Tensor
            uint8 [shards, payload bytes], on the device; without shards, for loads that need none.
        for_loads : bool
            For loads, not for stores.
        """

    @abstractmethod
    def store(self, copy: ChunkCopy, slots: Tensor, payloads: Sequence[Tensor]) -> object | None:
        """Gather a chunk on the calling thread's stream, and have it copied to the host.

        Parameters
        ----------
        copy : ChunkCopy
            That of the copier, or one of its tails.
        slots : Tensor
            int64 [tokens], CPU, contiguous. Any memory: it is read during the call.
        payloads : Sequence[Tensor]
            uint8 [payload bytes] in host memory, of each shard.

        Returns
        -------
        object or None
            For :meth:`wait`; None while all device buffers are in use.

        Raises
        ------
        ValueError
            If a slot is not in the caches; nothing was enqueued.
        """

    @abstractmethod
    def wait(self, chunk: object) -> None:
        """Wait until a chunk is in host memory. Once for each chunk."""

    @abstractmethod
    def forget(self, chunk: object, payloads: Sequence[Tensor]) -> None:
        """Give up :meth:`wait`. Keeps the chunk's payloads alive while they are copied to."""

    @abstractmethod
    def run(self) -> None:
        """Copy to the host what was gathered, until :meth:`stop`. On a thread of its own."""

    @abstractmethod
    def drain(self) -> None:
        """Wait until nothing is under way to the host."""

    @abstractmethod
    def stop(self) -> None:
        """End :meth:`run` once it has copied what is left, and free the buffers then.

        No other call may be under way.
        """

    @abstractmethod
    def load(
        self,
        copy: ChunkCopy,
        first: int,
        slots: Tensor,
        payloads: Sequence[Tensor],
        fence: object | None,
    ) -> None:
        """Scatter consecutive shards of a chunk, and wait until they are in the caches.

        Parameters
        ----------
        copy : ChunkCopy
            As for :meth:`store`.
        first : int
            The place of the first of these shards among all shards of the caches.
        slots : Tensor
            As for :meth:`store`; −1 = skip.
        payloads : Sequence[Tensor]
            As for :meth:`store`, one for each of these shards.
        fence : object, optional
            What :meth:`fence` returned.

        Raises
        ------
        ValueError
            As for :meth:`store`.
        """

    @abstractmethod
    def check(self) -> None:
        """Query the device: raises if it failed for good. Never waits."""

    @abstractmethod
    def fence(self) -> object:
        """Return a mark of all that is on the calling thread's stream now."""

    @abstractmethod
    def rebind(self) -> None:
        """Read the addresses of the caches again. No copy may be under way."""
