"""Finds damaged files in the reserved folder at the root of a shelf.

Owns the look at marks, pins and the record of sweeps for ``kvshelf doctor`` and ``kvshelf verify``.
Sweeps skip what is damaged there, so nothing else reports it. Nothing is changed.

All functions block on the storage, on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final, TypeAlias

from kvshelf.backends import Backend
from kvshelf.capacity import lease, marks
from kvshelf.capacity.pins import Pins, pin_file

Problems: TypeAlias = Iterator[tuple[str, str]]


def _pins(backend: Backend) -> Problems:
    pins = Pins.read(backend)
    unknown = {name: problem for name, (_, problem) in pins.unknown.items()}
    for name, problem in (dict(pins.unreadable) | unknown).items():
        yield pin_file(name), problem


def _record(backend: Backend) -> Problems:
    problem = lease.problem_of(backend)
    if problem is not None:
        yield lease.SWEEP, problem


#: What yields the damaged files of each sort, and what is wrong with each: marks that mark nothing,
#: pins that pin nothing or more than they should, a record that makes no sense. Each raises
#: StorageError if the storage failed.
LOOKS: Final[dict[str, Callable[[Backend], Problems]]] = {
    "marks": marks.unreadable,
    "pins": _pins,
    "sweep record": _record,
}


def damaged_files(backend: Backend) -> Problems:
    """Yield the names of all damaged files of the reserved folder, and what is wrong with each.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    for look in LOOKS.values():
        yield from look(backend)
