"""Marks: the uses of chunks that no access time shows.

Where a process may not set the access times of objects (those of another user), or there are none
(S3), it writes the keys of the chunks that were used into files below ``.kvshelf/uses`` of the
root. Every process that deletes old chunks reads them. Owns the form of these files, what they mean
together, and how they are merged and deleted.

A file begins with one line of JSON, ``{"version": 1, "sections": [{"namespace": …, "kind": …,
"age": …, "keys": …}, …]}``, which ends in a newline. Behind it are the keys of all sections, in
order: the first 16 bytes of each chunk key. The objects of a section's kind of these chunks were
used `age` seconds before the file was written, which is its mtime: so no clock but the storage's
own counts.

Contracts
---------
* A mark says that a chunk was used, and nothing else. One that is lost, late or forged has a chunk
  deleted too early or too late. A file that cannot be read, or is not of this form, marks nothing.
* A file never changes. :func:`compact` writes what it merges before it deletes the originals, so
  that a reader finds each mark at least once.
* All functions block on storage. Any thread of any process may call them at the same time.
"""

from __future__ import annotations

import heapq
import json
import logging
import os
import re
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from kvshelf.backends import Backend
from kvshelf.backends.base import time_for_ages
from kvshelf.errors import NotRegularError, ObjectMissingError, PermanentStorageError
from kvshelf.format.kinds import FULL, KINDS, Kind
from kvshelf.format.names import parse_namespace_folder

logger = logging.getLogger(__name__)

#: The folder of marks below the root.
MARKS: Final = ".kvshelf/uses"
#: Bytes of a chunk key in a mark.
KEY_BYTES: Final = 16
#: Seconds for which marks are kept unless chunks are deleted at a lower age.
KEEP_SECONDS: Final = 30 * 86400.0

_VERSION: Final = 1
_NAME: Final = re.compile(r"[0-9]{1,10}-[0-9a-f]{16}", re.ASCII)
#: Most keys of one file, and most bytes of one that is read.
_FILE_KEYS: Final = 1 << 20
_FILE_BYTES: Final = 32 << 20
_HEADER_BYTES: Final = 1 << 20
#: Most keys that are read, of the newest files: 64 MiB of them.
_ALL_KEYS: Final = 4 << 20
#: Files from which on they are merged, because each sweep reads all: one of each of 500 processes
#: for each of 30 days were 15,000, and the bound above 279 keys in each.
_MANY_FILES: Final = 64
#: Errors of a file that has no marks, or may not be read.
_NOT_MARKS: Final = (
    NotRegularError,
    PermanentStorageError,
    ArithmeticError,
    ValueError,
    TypeError,
    KeyError,
    RecursionError,
)
#: Most repetitions of a listing because another process has merged files meanwhile.
_ATTEMPTS: Final = 3

_Words = npt.NDArray[np.uint64]
_Times = npt.NDArray[np.float64]


class Batch(NamedTuple):
    """Chunks of one kind that were used at the same time, as they are written.

    Attributes
    ----------
    folder : str
        The namespace folder.
    age : float
        How many seconds ago they were used.
    keys : bytes
        The first 16 bytes of the key of each.
    kind : Kind
    """

    folder: str
    age: float
    keys: bytes
    kind: Kind = FULL


@dataclass(frozen=True, slots=True)
class _Section:
    """Keys of one namespace folder, and when they were used, by the storage's clock."""

    folder: str
    keys: npt.NDArray[np.uint8]
    used: float
    kind: Kind = FULL


@dataclass(frozen=True, slots=True)
class _File:
    name: str
    mtime: float
    sections: tuple[_Section, ...]


class Marks:
    """All marks of a shelf.

    Parameters
    ----------
    sections : Iterable
        As :meth:`read` has them.
    """

    def __init__(self, sections: Iterable[_Section] = ()) -> None:
        found: dict[tuple[str, Kind], list[_Section]] = {}
        for section in sections:
            # A namespace may have several folders: they have the end of their names in common.
            found.setdefault((section.folder[-16:], section.kind), []).append(section)
        self._tables = {what: _table(of_kind) for what, of_kind in found.items()}

    def __len__(self) -> int:
        return sum(len(used) for _, _, used in self._tables.values())

    @classmethod
    def read(cls, backend: Backend) -> Marks:
        """Read the marks of a shelf.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        return cls(section for file in _read_all(backend)[0] for section in file.sections)

    def used(
        self, namespace_folder: str, keys: npt.NDArray[np.uint8], kind: Kind | None = None
    ) -> _Times:
        """Return when chunks were used last, as far as marks show.

        Parameters
        ----------
        namespace_folder : str
        keys : ndarray
            uint8 [chunks, 32], the chunk keys; 16 bytes of each are enough.
        kind : Kind, optional
            The kind whose use is wanted; if absent, that of any kind.

        Returns
        -------
        ndarray
            float64 [chunks], seconds since the epoch by the storage's clock; 0 without a mark.
        """
        last = np.zeros(len(keys))
        places = [(namespace_folder[-16:], one) for one in (KINDS if kind is None else (kind,))]
        tables = [self._tables[place] for place in places if place in self._tables]
        if not tables or not len(keys):
            return last
        wanted_high, wanted_low = _words(keys[:, :KEY_BYTES])
        for high, low, used in tables:
            place = np.minimum(np.searchsorted(high, wanted_high), len(high) - 1)
            same = (high[place] == wanted_high) & (low[place] == wanted_low)
            np.maximum(last, used[place], out=last, where=same)
        return last

    @staticmethod
    def compact(
        backend: Backend, *, max_age: float | None = None, resolution: float = 3600.0
    ) -> int:
        """Delete old marks, and merge the others where they are many files.

        Parameters
        ----------
        backend : Backend
        max_age : float, optional
            Seconds after its last use at which a chunk is deleted: older marks are useless. They
            are kept for 30 days at most.
        resolution : float
            Seconds by which the time of a use may be wrong after the merge.

        Returns
        -------
        int
            Number of files deleted.

        Raises
        ------
        StorageError
            If the storage refused or failed; what was merged is there all the same.
        """
        files, unread = _read_all(backend)
        times = [file.mtime for file in files] + list(unread.values())
        if not times:
            return 0
        reported = backend.now()
        # A storage that does not report its time gave the files theirs.
        now = max(times) if reported is None else reported
        aged_at = min(now, time.time()) if reported is None else time_for_ages(now, backend.url)
        oldest = aged_at - min(max_age or KEEP_SECONDS, KEEP_SECONDS)
        gone = [name for name, mtime in unread.items() if mtime < oldest]
        gone += [file.name for file in files if file.mtime < oldest]
        rest = [file for file in files if file.mtime >= oldest]
        if len(rest) >= _MANY_FILES:
            merged = Marks(section for file in rest for section in file.sections)
            folders = {s.folder[-16:]: s.folder for file in rest for s in file.sections}
            write(backend, merged._sections(folders, now, oldest, resolution))
            gone += [file.name for file in rest]
        return sum(backend.delete(name) for name in gone)

    def _sections(
        self, folders: Mapping[str, str], now: float, oldest: float, resolution: float
    ) -> list[Batch]:
        """Return what :func:`write` takes, each kind of a chunk with its last use alone."""
        found: list[Batch] = []
        for (tag, kind), (high, low, used) in self._tables.items():
            packed = np.stack([high, low], axis=1).astype(">u8")
            rounded = np.floor(used / resolution)
            for time_of in np.unique(rounded[used >= oldest]):
                chosen = (rounded == time_of) & (used >= oldest)
                age = max(0.0, now - float(used[chosen].max()))
                found.append(Batch(folders[tag], age, packed[chosen].tobytes(), kind))
        return found


def write(backend: Backend, batches: Iterable[Batch]) -> None:
    """Write marks.

    Raises
    ------
    StorageError
        If the storage refused or failed.
    """
    of_file: list[Batch] = []
    count = 0
    for batch in batches:
        for begin in range(0, len(batch.keys), _FILE_KEYS * KEY_BYTES):
            piece = batch._replace(keys=batch.keys[begin : begin + _FILE_KEYS * KEY_BYTES])
            keys = len(piece.keys) // KEY_BYTES
            if of_file and count + keys > _FILE_KEYS:
                _write_file(backend, of_file)
                of_file, count = [], 0
            of_file.append(piece)
            count += keys
    if of_file:
        _write_file(backend, of_file)


def _write_file(backend: Backend, batches: Sequence[Batch]) -> None:
    described = [
        {
            "namespace": batch.folder,
            "kind": batch.kind,
            "age": round(batch.age, 3),
            "keys": len(batch.keys) // KEY_BYTES,
        }
        for batch in batches
    ]
    header = json.dumps({"version": _VERSION, "sections": described}).encode() + b"\n"
    # The hour is for people: they see it in a listing.
    name = f"{MARKS}/{int(time.time() // 3600)}-{os.urandom(8).hex()}"
    backend.write(name, [header, *(batch.keys for batch in batches)])


def _read_all(backend: Backend) -> tuple[list[_File], dict[str, float]]:
    """Return the files of marks, the newest first, and the mtimes of those that are none."""
    for attempt in range(_ATTEMPTS):
        rows = [row for row in backend.list(MARKS) if _NAME.fullmatch(row.name[len(MARKS) + 1 :])]
        rows.sort(key=lambda row: row.mtime, reverse=True)
        files: list[_File] = []
        unread: dict[str, float] = {}
        keys, gone = 0, False
        for row in rows:
            sections: tuple[_Section, ...] = ()
            try:
                if row.size <= _FILE_BYTES and keys < _ALL_KEYS:
                    sections = _read_file(backend, row.name, row.size, row.mtime)
            except ObjectMissingError:
                gone = True
                continue
            except _NOT_MARKS as error:
                logger.debug("%s marks nothing: %s", row.name, error)
            if sections:
                keys += sum(len(section.keys) for section in sections)
                files.append(_File(row.name, row.mtime, sections))
            else:
                unread[row.name] = row.mtime
        if not gone or attempt == _ATTEMPTS - 1:
            break
        # Another process has merged files after the listing, which has the new one.
    return files, unread


def unreadable(backend: Backend, most: int = _MANY_FILES) -> Iterator[tuple[str, str]]:
    """Yield the names of files that mark nothing, and why, among the newest files of marks.

    Parameters
    ----------
    backend : Backend
    most : int
        So many files are looked at: sweeps merge them when they are more.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    rows = [row for row in backend.list(MARKS) if _NAME.fullmatch(row.name[len(MARKS) + 1 :])]
    for row in heapq.nlargest(most, rows, key=lambda row: row.mtime):
        if row.size > _FILE_BYTES:
            yield row.name, f"it has {row.size} bytes; expected at most {_FILE_BYTES}"
            continue
        try:
            _read_file(backend, row.name, row.size, row.mtime)
        except ObjectMissingError:
            continue
        except _NOT_MARKS as error:
            yield row.name, f"it is not a file of marks ({type(error).__name__}: {error})"


def _read_file(backend: Backend, name: str, size: int, mtime: float) -> tuple[_Section, ...]:
    """Read one file.

    Raises
    ------
    ArithmeticError, ValueError, TypeError, KeyError
        If it is not one of marks.
    StorageError
        If it cannot be read.
    """
    data = np.empty(size, np.uint8)
    with backend.open(name) as reader:
        count = reader.read_into(data.data, 0)
    head, newline, _ = data[: min(count, _HEADER_BYTES)].tobytes().partition(b"\n")
    if not newline:
        raise ValueError("its first line does not end")
    header = json.loads(head)
    if header["version"] != _VERSION:
        raise ValueError(f"version {header['version']!r}, expected {_VERSION}")
    place = len(head) + 1
    sections: list[_Section] = []
    for described in header["sections"]:
        folder, kind, age = described["namespace"], described["kind"], float(described["age"])
        end = place + int(described["keys"]) * KEY_BYTES
        known = kind in KINDS and parse_namespace_folder(folder) is not None
        if not (known and age >= 0 and place < end <= count):
            raise ValueError("a section is not one of marks")
        keys = data[place:end].reshape(-1, KEY_BYTES)
        sections.append(_Section(folder, keys, max(0.0, mtime - age), kind))
        place = end
    return tuple(sections)


def _words(keys: npt.NDArray[np.uint8]) -> tuple[_Words, _Words]:
    """Return the two halves of keys of 16 bytes as numbers."""
    halves = np.ascontiguousarray(keys).view(">u8").astype(np.uint64)
    return np.ascontiguousarray(halves[:, 0]), np.ascontiguousarray(halves[:, 1])


def _table(sections: Sequence[_Section]) -> tuple[_Words, _Words, _Times]:
    """Return the keys of sections, sorted and each once, with the last use of each."""
    high, low = _words(np.concatenate([section.keys for section in sections]))
    used = np.repeat([s.used for s in sections], [len(s.keys) for s in sections])
    order = np.lexsort((used, low, high))
    high, low, used = high[order], low[order], used[order]
    last = np.ones(len(used), bool)
    last[:-1] = (high[1:] != high[:-1]) | (low[1:] != low[:-1])
    return high[last], low[last], used[last]
