"""The lease of a sweep, and what the last sweep of any process found.

Owns the file ``.kvshelf/sweep`` at the root of a shelf (:class:`Record`), which processes that
sweep the shelf write. A process that lists a whole shelf says so there, so that others need not
list it at the same time (the *lease*) or soon afterwards (the *finding*).

Contracts
---------
* Best effort: the file may be missing, damaged, forged or impossible to write. Several processes
  may then sweep at once, or list a shelf more often, or less often for an hour. Nothing is deleted
  that would not be deleted otherwise, since no deletion follows from what stands here: the bound of
  another engine only ends stores, and what cannot be true is left out.
* A lease ends by itself when its holder says nothing for :data:`LEASE_SECONDS`. A holder that was
  paused for as long finds out that it has lost the lease, and leaves another's alone.
* Times are those of the storage's clock.
* Reading and writing block on the storage. Used by one thread.
"""

from __future__ import annotations

import json
import logging
import math
import os
import platform
import secrets
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from kvshelf.backends import Backend
from kvshelf.backends.base import Space
from kvshelf.errors import NotRegularError, ObjectMissingError, StorageError, short_repr

logger = logging.getLogger(__name__)

#: Name of the file.
SWEEP: Final = ".kvshelf/sweep"
#: Seconds after which a lease ends unless it is renewed.
LEASE_SECONDS: Final = 60.0
#: Seconds for which the smallest ``max_bytes`` of all engines ends the stores of the others.
BOUND_SECONDS: Final = 3600.0

#: Seconds by which what two processes take for the storage's time may differ: an HTTP date is
#: whole seconds, and several servers may answer.
_APART_SECONDS: Final = 5.0
_VERSION: Final = 1
_MOST_BYTES: Final = 4096


@dataclass(frozen=True, slots=True)
class Finding:
    """What a listing of a whole shelf found.

    Attributes
    ----------
    at : float
        When the listing began.
    nbytes : int
        Bytes of everything on the shelf, less what the sweep deleted.
    seconds : float
        Processor time that the sweep took.
    free : int or None
        Bytes that were free on the storage at `at`, and what the sweep deleted. None: unknown.
    max_age : float or None
        The age at which the sweep deleted chunks.
    written : int or None
        The bytes that all writers had published at `at`, see :mod:`kvshelf.capacity.written`. None:
        unknown.
    by : str
        The process that swept, as :attr:`Lease.owner`; empty: unknown.
    deleted_files, deleted_bytes : int or None
        What it has deleted so far. None: it does not say.
    """

    at: float
    nbytes: int
    seconds: float
    free: int | None = None
    max_age: float | None = None
    written: int | None = None
    by: str = ""
    deleted_files: int | None = None
    deleted_bytes: int | None = None

    def less(self, nbytes: int, files: int) -> Finding:
        """Return the finding after `files` more with `nbytes` were deleted."""
        return replace(
            self,
            nbytes=max(0, self.nbytes - nbytes),
            free=_plus(self.free, nbytes),
            deleted_files=_plus(self.deleted_files, files),
            deleted_bytes=_plus(self.deleted_bytes, nbytes),
        )


@dataclass(frozen=True, slots=True)
class Record:
    """The content of the file.

    Attributes
    ----------
    owner : str
        The last holder of the lease: a host, a process and a random id.
    until : float
        When the lease ends.
    finding : Finding or None
        What the last sweep found.
    max_bytes : int or None
        The smallest bound of the engines that have swept lately.
    max_bytes_at : float
        When an engine with that bound last swept.
    """

    owner: str = ""
    until: float = 0.0
    finding: Finding | None = None
    max_bytes: int | None = None
    max_bytes_at: float = 0.0

    def believed(self, space: Space | None) -> Record:
        """Return the record without a finding of more than the storage holds.

        Parameters
        ----------
        space : Space or None
            The storage's size and free space, if it reports these.
        """
        found = self.finding
        if found is None or space is None or max(found.nbytes, found.free or 0) <= space.total:
            return self
        return replace(self, finding=None)

    def bound(self, own: int, now: float) -> int:
        """Return the bound of the stores of an engine whose ``max_bytes`` is `own`."""
        return min(own, int(self.bounds(now).get("max_bytes", own)))

    def bounds(self, now: float) -> dict[str, float]:
        """Return the bounds, by option, within which sweeps keep the shelf at `now`."""
        bounds: dict[str, float] = {}
        if self.max_bytes is not None and now <= self.max_bytes_at + BOUND_SECONDS:
            bounds["max_bytes"] = self.max_bytes
        if self.finding is not None and self.finding.max_age is not None:
            bounds["max_age"] = self.finding.max_age
        return bounds

    def bounded_by(self, own: int | None, now: float) -> Record:
        """Return the record after a sweep by an engine whose ``max_bytes`` is `own`, if any."""
        if own is None or self.bound(own, now) < own:
            return self
        return replace(self, max_bytes=own, max_bytes_at=now)


class Lease:
    """One process's part in the sweeps of a shelf.

    Parameters
    ----------
    backend : Backend

    Attributes
    ----------
    owner : str
        The id of this process in the record.
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self.owner: Final = f"{platform.node()[:64]}:{os.getpid()}:{secrets.token_hex(8)}"
        #: Whether the record named this process as the holder, and no other process claimed the
        #: lease then.
        self._said = False
        #: What the last finding was, and since when another process has held the lease.
        self._held: tuple[float | None, float] | None = None

    def read(self, now: float) -> Record:
        """Return the record; an empty one where there is none, or it makes no sense.

        Parameters
        ----------
        now : float
            The storage's time. What claims to come from the future is left out.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        try:
            data = _content(self._backend)
        except NotRegularError:
            # A folder, a pipe or a link in its place must not end all sweeps.
            data = None
        return Record() if data is None else _decode(data, now)

    def is_others(self, record: Record, now: float) -> bool:
        """Whether another process holds the lease at `now`, the storage's time.

        A process that holds it for an hour without a finding does not sweep; its lease is ignored.
        """
        if record.owner == self.owner or now >= record.until:
            self._held = None
            return False
        found = None if record.finding is None else record.finding.at
        if self._held is None or self._held[0] != found:
            self._held = found, now
        return now < self._held[1] + BOUND_SECONDS

    def take(self, record: Record, now: float) -> Record | None:
        """Take the lease, for :data:`LEASE_SECONDS`; return the record, None if another has it.

        Two processes that take it at the same moment may both have it.

        Parameters
        ----------
        record : Record
            As read last.
        now : float
            The storage's time.

        Raises
        ------
        StorageError
            If the storage failed while the record was read again.
        """
        if self.is_others(record, now):
            return None
        taken = replace(record, owner=self.owner, until=now + LEASE_SECONDS)
        self._said = self._held is None and self._write(taken)
        # A full storage, or one that takes no such file, must be swept all the same.
        return taken if not self._said or self.read(now).owner == self.owner else None

    def renew(self, now: float, finding: Finding | None = None) -> Record | None:
        """Prolong the lease; return the record, None if the lease was lost.

        Parameters
        ----------
        now : float
            The storage's time.
        finding : Finding, optional
            What is known by now, for the others.

        Raises
        ------
        StorageError
            If the record could not be read.
        """
        found = self.read(now)
        if self._is_lost(found, now):
            return None
        renewed = replace(
            found,
            owner=self.owner,
            until=now + LEASE_SECONDS,
            finding=found.finding if finding is None else finding,
        )
        self._write(renewed)
        return renewed

    def release(self, record: Record, now: float) -> Record:
        """Give the lease back, and publish what was found, unless it was lost. Best effort.

        Returns
        -------
        Record
            What stands there now, as far as is known.
        """
        released = replace(record, owner=self.owner, until=0.0)
        try:
            found = self.read(now)
        except StorageError as error:
            logger.debug("the lease of a sweep was not given back: %s", error)
            return released
        if self._is_lost(found, now):
            return found
        self._write(released)
        return released

    def _is_lost(self, found: Record, now: float) -> bool:
        """Whether another process has taken the lease since this one did."""
        return found.owner != self.owner and (self._said or self.is_others(found, now))

    def _write(self, record: Record) -> bool:
        encoded = json.dumps({"version": _VERSION, **asdict(record)}).encode()
        try:
            self._backend.write(SWEEP, [encoded], "replace")
        except StorageError as error:
            logger.debug("the lease of a sweep was not written: %s", error)
            return False
        return True


def problem_of(backend: Backend) -> str | None:
    """Return what makes no sense in the file of a shelf; None if nothing, or there is no file.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    try:
        data = _content(backend)
    except NotRegularError as error:
        return str(error)
    info = backend.info(SWEEP)
    if data is None or info is None:
        return None
    found = _object(data)
    if found is None:
        return f"found {short_repr(data[:50])}; expected an object of version {_VERSION}"
    # Its writer knew nothing later than that.
    known, none = _decode(data, info.mtime), Record()
    for name in ("owner", "until", "finding", "max_bytes"):
        said, ignored = found.get(name), getattr(none, name)
        if said != ignored and said is not None and getattr(known, name) == ignored:
            return f"its {name} makes no sense, and is ignored: found {short_repr(said)}"
    return None


def _content(backend: Backend) -> bytes | None:
    """Return the beginning of the file, as much as a record may have; None without a file."""
    try:
        with backend.open(SWEEP) as reader:
            data = bytearray(min(reader.size, _MOST_BYTES + 1))
            count = reader.read_into(memoryview(data), 0)
    except ObjectMissingError:
        return None
    return bytes(data[:count])


def _object(data: bytes) -> dict[str, Any] | None:
    """Return the object that a file of this version holds, None for anything else."""
    try:
        found = json.loads(data)
    except (ValueError, RecursionError):
        return None
    return found if isinstance(found, dict) and found.get("version") == _VERSION else None


def _decode(data: bytes, now: float) -> Record:
    """Return what the bytes of the file say; what makes no sense is left out."""
    found = _object(data)
    if found is None:
        return Record()
    # Nothing may claim more of the future than a lease lasts: clocks may step back.
    latest = now + LEASE_SECONDS
    owner, until = found.get("owner"), _time(found.get("until"), latest)
    max_bytes, bound_at = _count(found.get("max_bytes")), _time(found.get("max_bytes_at"), latest)
    return Record(
        owner=owner if isinstance(owner, str) else "",
        until=until or 0.0,
        finding=_finding(found.get("finding"), now),
        max_bytes=None if bound_at is None else max_bytes or None,
        max_bytes_at=bound_at or 0.0,
    )


def _finding(found: Any, now: float) -> Finding | None:
    if not isinstance(found, dict):
        return None
    at, nbytes = _time(found.get("at"), now), _count(found.get("nbytes"))
    seconds = _number(found.get("seconds"))
    if at is None or nbytes is None or seconds is None:
        return None
    max_age = _number(found.get("max_age"))
    free, written = _count(found.get("free")), _count(found.get("written"))
    by, said = found.get("by"), ("deleted_files", "deleted_bytes")
    return Finding(
        *(at, nbytes, seconds, free, max_age, written),
        by if isinstance(by, str) else "",
        *(_count(found.get(name)) for name in said),
    )


def _plus(count: int | None, more: int) -> int | None:
    return None if count is None else count + more


def _time(value: Any, latest: float) -> float | None:
    """Return a time up to `latest`, which one a little later counts as; None for anything else."""
    found = _number(value, latest + _APART_SECONDS)
    return None if found is None else min(found, latest)


def _number(value: Any, most: float = math.inf) -> float | None:
    """Return a finite number from 0 to `most`, None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return float(value) if 0 <= value <= min(most, 1e18) else None


def _count(value: Any) -> int | None:
    """Return a number of bytes, None for anything else."""
    return value if isinstance(value, int) and 0 <= value < 1 << 63 and value is not True else None
