"""What is still in use when a test in simulated time has ended: memory, leases, loads.

Owns the list of what a test has made that hands out memory (:class:`Owners`). Nothing of the
product is imported here: a run without torch has no transfers. A test that leaves a storage which
hangs, or a request that waits, need not end them: :meth:`Owners.settle` does.
"""

from __future__ import annotations

import functools
import sys
import time
from collections.abc import Iterator
from typing import Any

import pytest

#: By class, the modules in which it is; those that nobody has imported make nothing.
_OWNERS = {
    "FaultyStorage": "tests.sim.storage",
    "Desk": "tests.server.desk",
    "Loads": "kvshelf.transfer.loads",
    "Stores": "kvshelf.transfer.stores",
    "ReadAhead": "kvshelf.transfer.read_ahead",
    "ChunkMemory": "kvshelf.memory.chunk_memory",
    "HostMemory": "kvshelf.memory.host_memory",
}
#: Simulated seconds in which all must end, and the longest pause between two looks.
_SECONDS = 600.0
_LONGEST_PAUSE = 1.0


class Owners:
    """What a test makes that hands out memory, from now on until `patch` is undone."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self._made: dict[str, list[Any]] = {name: [] for name in _OWNERS}
        for name, module in _OWNERS.items():
            if module in sys.modules:
                self._watch(patch, getattr(sys.modules[module], name), self._made[name])

    @staticmethod
    def _watch(patch: pytest.MonkeyPatch, kind: Any, made: list[Any]) -> None:
        make = kind.__init__

        @functools.wraps(make)
        def noted(owner: Any, *args: Any, **options: Any) -> None:
            make(owner, *args, **options)
            made.append(owner)

        patch.setattr(kind, "__init__", noted)

    def _all(self, *names: str) -> Iterator[Any]:
        for name in names:
            yield from self._made[name]

    def settle(self) -> list[str]:
        """End what waits, and return what is in use when all that can end has ended."""
        for storage in self._all("FaultyStorage"):
            storage.let_go()
        for desk in self._all("Desk"):
            desk.end()
        for ahead in self._all("ReadAhead"):
            ahead.release_all()
        deadline, pause = time.monotonic() + _SECONDS, 0.001
        while (unfinished := list(self._unfinished())) and time.monotonic() < deadline:
            # What is late is given up when its caller asks for it.
            for loads in self._all("Loads"):
                loads.check()
            time.sleep(pause)
            pause = min(2 * pause, _LONGEST_PAUSE)
        return unfinished or list(self._in_use())

    def _unfinished(self) -> Iterator[str]:
        for loads in self._all("Loads"):
            if loads._active:
                yield f"{len(loads._active)} loads have not ended"
        for stores in self._all("Stores"):
            if stores._in_flight or stores._running:
                yield f"{len(stores._in_flight)} stores have not ended"
        for memory in self._all("ChunkMemory"):
            if pinned := memory.ring.stats().pinned_bytes:
                yield f"{pinned} bytes are pinned in {memory}"

    def _in_use(self) -> Iterator[str]:
        for memory in self._all("HostMemory"):
            if memory.pinned_bytes:
                yield f"{memory.pinned_bytes} bytes are pinned or reserved in {memory}"
