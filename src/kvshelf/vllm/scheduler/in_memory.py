"""Which chunks lie in the memory of this machine, as far as one engine can know.

Owns a list of what the engine stored and loaded last, as long as the memory that keeps it: the
memory tiers of its workers, or that of a node server.

Contracts
---------
* It only guides what is expected of loads. What other engines have a node server keep or evict, and
  what lay there before the engine started, it does not know.
* Runs on the engine's step thread.
"""

from __future__ import annotations

from collections import OrderedDict


class InMemory:
    """Kinds of chunks that were in use last, each by its kind key."""

    def __init__(self) -> None:
        self._nbytes_of: OrderedDict[bytes, int] = OrderedDict()
        self._nbytes = 0

    def note(self, key: bytes, nbytes: int, room: int) -> None:
        """Note that a kind of a chunk is stored or loaded, and forget the least recent ones.

        Parameters
        ----------
        key : bytes
        nbytes : int
            Of all ranks.
        room : int
            Bytes that the memory can hold.
        """
        self._nbytes += nbytes - self._nbytes_of.pop(key, 0)
        self._nbytes_of[key] = nbytes
        while self._nbytes > room:
            self._nbytes -= self._nbytes_of.popitem(last=False)[1]

    def __contains__(self, key: bytes) -> bool:
        return key in self._nbytes_of

    def __len__(self) -> int:
        return len(self._nbytes_of)
