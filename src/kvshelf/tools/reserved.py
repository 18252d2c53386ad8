"""Finds damaged files in the reserved folder at the root of a shelf.

Owns the look at marks, pins and the record of sweeps for ``kvshelf doctor`` and ``kvshelf verify``.
Sweeps skip what is damaged there, so nothing else reports it. Nothing is changed.

All functions block on the storage, on the calling thread.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Final

from kvshelf.backends import Backend
from kvshelf.capacity import lease, marks
from kvshelf.capacity.pins import Pins, pin_file

#: What is looked at, by the name of a check.
Problems = Iterator[tuple[str, str]]


def damaged_marks(backend: Backend) -> Problems:
    """Yield the files of marks that mark nothing, among the newest, and why.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    yield from marks.unreadable(backend)


def damaged_pins(backend: Backend) -> Problems:
    """Yield the files of pins that pin nothing, or more than they should, and why.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    pins = Pins.read(backend)
    for name, problem in pins.unreadable.items():
        yield pin_file(name), problem
    for name, (_, problem) in pins.unknown.items():
        yield pin_file(name), problem


def damaged_record(backend: Backend) -> Problems:
    """Yield the record of sweeps, if it makes no sense, and why.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    problem = lease.problem_of(backend)
    if problem is not None:
        yield lease.SWEEP, problem


#: The looks at a shelf, by what they look at.
LOOKS: Final[dict[str, Callable[[Backend], Problems]]] = {
    "marks": damaged_marks,
    "pins": damaged_pins,
    "sweep record": damaged_record,
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
