"""How a shelf is doing, as far as that is known without a listing of it.

Owns what ``kvshelf status`` says: how full the shelf is, which bound ends stores first, what the
last sweep did, who sweeps now, and what is pinned. It reads what sweeps leave behind
(:mod:`kvshelf.capacity.lease`), pins, and the storage's free space; the cost grows with the number
of pins and of namespaces, not with the number of objects.

Contracts
---------
* Nothing is changed, and no object is read.
* What is not known is said: it is None, and :attr:`Status.unknown` has a sentence about it.
* The numbers are those of engines: the estimate of the bytes is the one that bounds stores, and the
  room that a bound leaves is what an engine would find that starts now.
* The record of sweeps is written by any process that stores to the shelf. What makes no sense in it
  is left out, and named.

All functions block on the storage, on the calling thread.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from kvshelf.backends import Backend
from kvshelf.backends.base import Space
from kvshelf.capacity import lease
from kvshelf.capacity.bound import ShelfBound, least_free
from kvshelf.capacity.files import time_of
from kvshelf.capacity.lease import BOUND_SECONDS, Finding, Lease, Record
from kvshelf.capacity.pins import Pins
from kvshelf.capacity.written import Written
from kvshelf.config import CapacityConfig
from kvshelf.format.names import parse_namespace_folder
from kvshelf.metrics import Counters
from kvshelf.tools.pinning import bytes_if_stored

#: Who gave a bound, where no configuration did.
DEFAULT: Final = "default"
A_SWEEP: Final = "an engine's sweep"


@dataclass(frozen=True, slots=True)
class Bound:
    """A bound of the shelf.

    Attributes
    ----------
    name : str
        The option of ``capacity``.
    value : float
        Bytes; seconds of ``max_age``.
    given_by : str
        The configuration of this machine, as the caller names it, :data:`DEFAULT` or
        :data:`A_SWEEP`.
    room : int or None
        Bytes that may be stored until it ends stores. None: not known, or it never does.
    """

    name: str
    value: float
    given_by: str
    room: int | None = None


@dataclass(frozen=True, slots=True)
class Status:
    """What is known of a shelf.

    Attributes
    ----------
    namespaces : int
        Namespace folders.
    used : int or None
        Bytes of everything on the shelf, estimated from the last sweep.
    free, total : int or None
        Bytes of the storage.
    bounds : tuple of Bound
        The bounds that are known.
    finding : Finding or None
        What the last sweep found, or the one that runs has found so far.
    sweeping : Record or None
        The record of the process that sweeps now; None: no process does.
    pins : Pins
    pin_bytes : Mapping of str and int or None
        By name of a pin, the bytes of its chunks if all of them are stored.
    now : float
        The time by which ages and ends count.
    unknown : tuple of str
        What is not known, and what shows it.
    problems : tuple of (str, str)
        Names of damaged files, and what is wrong.
    """

    namespaces: int
    used: int | None
    free: int | None
    total: int | None
    bounds: tuple[Bound, ...]
    finding: Finding | None
    sweeping: Record | None
    pins: Pins
    pin_bytes: Mapping[str, int | None]
    now: float
    unknown: tuple[str, ...]
    problems: tuple[tuple[str, str], ...]

    @property
    def acting(self) -> Bound | None:
        """The bound that ends stores first; None: no bound that is known does."""
        ending = [bound for bound in self.bounds if bound.room is not None]
        return min(ending, key=lambda bound: bound.room or 0, default=None)


def look(backend: Backend, capacity: CapacityConfig, given_by: str) -> Status:
    """Return what is known of a shelf.

    Parameters
    ----------
    backend : Backend
    capacity : CapacityConfig
        The bounds that this machine's configuration gives.
    given_by : str
        Names that configuration.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    folders = [name for name in backend.folders() if parse_namespace_folder(name)]
    space = backend.space()
    written = backend.info(lease.SWEEP)
    # A storage that is read only does not tell its time, but that of a file is by its clock.
    now = max(time_of(backend), 0.0 if written is None else written.mtime)
    own = Lease(backend)
    record = own.read(now).believed(space)
    used = _used(backend, record.finding, space, capacity, now)
    pins = Pins.read(backend, now)
    sizes = {name: bytes_if_stored(backend, pin) for name, pin in pins.all.items()}
    problem = lease.problem_of(backend)
    return Status(
        namespaces=len(folders),
        used=used,
        free=None if space is None else space.free,
        total=None if space is None else space.total,
        bounds=tuple(_bounds(record, space, used, capacity, given_by, now)),
        finding=record.finding,
        sweeping=record if own.is_others(record, now) else None,
        pins=pins,
        pin_bytes=sizes,
        now=now,
        unknown=tuple(_unknown(record, space, pins, sizes, now)),
        problems=() if problem is None else ((lease.SWEEP, problem),),
    )


def _used(
    backend: Backend,
    finding: Finding | None,
    space: Space | None,
    capacity: CapacityConfig,
    now: float,
) -> int | None:
    """Return the estimate that an engine would make."""
    if finding is None:
        return None
    published = None
    if space is None and finding.written is not None:
        published = Written(backend).look(now)
    bound = ShelfBound(capacity, Counters(), backend.url, lambda: None)
    return bound.estimate(finding, space, now, published)


def _bounds(
    record: Record,
    space: Space | None,
    used: int | None,
    capacity: CapacityConfig,
    given_by: str,
    now: float,
) -> Iterator[Bound]:
    """Yield the bounds that are known, by this machine's configuration and by sweeps."""
    own, sweeps = capacity.max_bytes, record.bounds(now)
    swept, swept_age = sweeps.get("max_bytes"), sweeps.get("max_age")
    most = min((bound for bound in (own, swept) if bound is not None), default=None)
    if most is not None:
        room = None if used is None else int(most) - used
        yield Bound("max_bytes", most, given_by if most == own else A_SWEEP, room)
    if space is not None and (kept := least_free(space, capacity.min_free)):
        by = DEFAULT if capacity.min_free is None else given_by
        yield Bound("min_free", kept, by, space.free - kept)
    if capacity.max_age is not None and (swept_age is None or capacity.max_age <= swept_age):
        yield Bound("max_age", capacity.max_age, given_by)
    elif swept_age is not None:
        yield Bound("max_age", swept_age, A_SWEEP)
    if capacity.group_max_bytes is not None:
        yield Bound("group_max_bytes", capacity.group_max_bytes, given_by)


def _unknown(
    record: Record,
    space: Space | None,
    pins: Pins,
    sizes: Mapping[str, int | None],
    now: float,
) -> Iterator[str]:
    finding = record.finding
    if finding is None:
        yield (
            "how much is on the shelf: no process with max_bytes, max_age or group_max_bytes has"
            " swept it; `kvshelf du` counts"
        )
    elif finding.deleted_bytes is None:
        yield "what the last sweep deleted: the version of kvshelf that swept does not say it"
    if space is None:
        yield "the free space: the storage does not report it"
    yield (
        "the bounds of other machines: the shelf tells the smallest max_bytes of those that swept"
        " within an hour, and the max_age of the last sweep; other bounds are those of this machine"
    )
    if record.max_bytes is not None and now > record.max_bytes_at + BOUND_SECONDS:
        yield (
            f"whether an engine still has max_bytes {record.max_bytes}: none has said so for an"
            " hour"
        )
    yield "what `kvshelf gc` and `kvshelf rm` deleted: they leave no record"
    for name, pin in pins.all.items():
        if sizes[name] is not None or pin.expired(now):
            continue
        if pin.keys is None:
            yield f"the bytes of the pin {name}: it has no list of chunks; `kvshelf du` counts"
        else:
            yield f"the bytes of the pin {name}: the size of its chunks is not known"
