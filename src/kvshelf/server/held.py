"""The objects in the server's arena.

Owns how the arena is divided: it begins with a table of generations (uint64, one for each slot of
:class:`~kvshelf.memory.residents.Residents`), behind which the objects lie. A client that has used
the memory of a slot reads from the table whether the memory was still the object's.

Any thread may call all methods. None blocks.
"""

from __future__ import annotations

from typing import Final

from kvshelf.errors import ConfigError
from kvshelf.memory.arena import Arena
from kvshelf.memory.residents import Residents, Slot

_ALIGNMENT: Final = 4096
_GENERATION_BYTES: Final = 8


class Held:
    """An arena and what is in it.

    Parameters
    ----------
    arena : Arena

    Attributes
    ----------
    residents : Residents
        Places, pins, eviction.
    slots : int
        Number of generations at the arena's beginning.

    Raises
    ------
    ConfigError
        If the arena is too small.
    """

    def __init__(self, arena: Arena) -> None:
        self.slots = arena.nbytes // _ALIGNMENT
        self._start = -(-self.slots * _GENERATION_BYTES // _ALIGNMENT) * _ALIGNMENT
        if arena.nbytes < self._start + _ALIGNMENT:
            raise ConfigError(
                f"the server's memory is {arena.nbytes} bytes; expected room for objects"
            )
        self._memory = arena.view[self._start :]
        self._generations = arena.view[: self.slots * _GENERATION_BYTES].cast("Q")
        self.residents = Residents(
            arena.nbytes - self._start,
            alignment=_ALIGNMENT,
            # Clients page-lock the arena for their GPUs.
            borders=[border - self._start for border in arena.borders],
            on_generation=self._generations.__setitem__,
        )

    def buffer(self, slot: Slot) -> memoryview:
        """Return the memory of a slot, writable."""
        return self._memory[slot.offset : slot.offset + slot.nbytes]

    def offset(self, slot: Slot) -> int:
        """Return where a slot lies, in bytes from the arena's beginning."""
        return self._start + slot.offset
