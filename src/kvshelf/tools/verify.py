"""Verifies what is on a shelf, and repairs what can be repaired without inventing a byte.

Owns what is wrong with an object, with a namespace's description and with what lies beside them,
and what a repair does about it:

==================================  =============================================================
found                               repair
==================================  =============================================================
an object that is not what its      set aside, however many they are, pinned ones too;
name and its namespace demand       deleted where the storage cannot rename
temporaries of killed writers, and  deleted, as by an engine
what was set aside an hour ago
``namespace.json`` is missing or    none: an engine that stores to the namespace writes it again
damaged
marks, pins and a record of sweeps  none: another version may have written them
that cannot be read
==================================  =============================================================

Contracts
---------
* Objects without a record of their namespace are counted, and neither read nor touched; those of
  another version of the format are not even counted.
* An error of the storage moves and deletes nothing.
* A bad object is read again through a fresh open before it counts as bad. One of a wrong size that
  changed within the last minute may still be copied to its place: it is reported, and stays.

Threads
-------
:func:`verify_shelf` lists on the calling thread and reads on the threads of
:mod:`kvshelf.capacity.parallel`, with about a MiB of memory for each. `on_progress` and
`on_problem` are called on any of these threads, one call at a time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from kvshelf.backends import Backend, Reader
from kvshelf.capacity import lease, marks
from kvshelf.capacity.collect import plan
from kvshelf.capacity.deletion import carry_out
from kvshelf.capacity.inventory import Inventory, Scan
from kvshelf.capacity.parallel import Work, threads_for
from kvshelf.capacity.rules import Rules
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectMissingError,
    ObjectNameError,
    ReadOnlyStorageError,
)
from kvshelf.format.invalid import describe_header, header_length
from kvshelf.format.kinds import KINDS
from kvshelf.format.names import DESCRIPTION, ParsedName, parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.leftovers import is_of_other_version, read_record
from kvshelf.shelf.pins import Pins, pin_file
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.prompt_objects import known_format


@dataclass(slots=True)
class VerifyReport:
    """The result. Counts objects, unless said otherwise.

    Attributes
    ----------
    found : int
        Selected: all in the listing, or the sample.
    intact : int
        Everything is as namespace and name demand.
    unverified : int
        Without a record of their namespace.
    bad : int
        Not what they should be.
    moved : int
        Of these, the ones that a repair moved aside or deleted.
    failed : int
        Not verified: the storage failed.
    gone : int
        Vanished before they were read.
    bytes : int
        Read and verified.
    namespaces : int
        Folders.
    other_versions : int
        Folders of namespaces that another version of the format describes; left alone.
    descriptions : int
        Folders whose description is missing or damaged.
    incomplete : int
        Chunks of which some objects are there and others are missing.
    reserved : int
        Files in the root's reserved folder that cannot be read.
    orphans, orphan_bytes : int
        Temporaries of killed writers, and what was set aside an hour ago.
    removed : int
        Of these, the ones that a repair deleted.
    seconds : float
    """

    found: int = 0
    intact: int = 0
    unverified: int = 0
    bad: int = 0
    moved: int = 0
    failed: int = 0
    gone: int = 0
    bytes: int = 0
    namespaces: int = 0
    other_versions: int = 0
    descriptions: int = 0
    incomplete: int = 0
    reserved: int = 0
    orphans: int = 0
    orphan_bytes: int = 0
    removed: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Objects that are finished."""
        return self.intact + self.unverified + self.bad + self.failed + self.gone

    @property
    def sound(self) -> bool:
        """Whether nothing is wrong, or nothing any more."""
        return self.bad == self.moved and not (self.descriptions or self.failed or self.reserved)


class _Item(NamedTuple):
    """One object to verify; `fmt` is None without a record of its namespace."""

    name: str
    parsed: ParsedName
    size: int
    fmt: ObjectFormat | None


def verify_shelf(
    shelf: Shelf,
    folders: Collection[str] | None = None,
    *,
    names: Sequence[str] | None = None,
    sample: Callable[[int], int] = lambda count: count,
    repair: bool = False,
    report: VerifyReport | None = None,
    on_listed: Callable[[], None] = lambda: None,
    on_progress: Callable[[VerifyReport], None] = lambda report: None,
    on_problem: Callable[[str, str], None] = lambda name, text: None,
) -> VerifyReport:
    """Verify the objects and descriptions of a shelf.

    Parameters
    ----------
    shelf : Shelf
        Writable if `repair`.
    folders : Collection of str, optional
        Namespace folders; all when absent.
    names : Sequence of str, optional
        Only these objects, and nothing else.
    sample : Callable
        Returns how many of so many objects are verified, chosen at random.
    repair : bool
        Change what is wrong; see the module.
    report : VerifyReport, optional
        Updated meanwhile, so that it is available after an interruption.
    on_listed : Callable
        Called for each file that is listed, before anything is verified.
    on_progress : Callable
        Called with the report after each change.
    on_problem : Callable
        Called with the name of what is wrong, and a description.

    Raises
    ------
    StorageError
        If the shelf cannot be listed, takes no changes, or does not answer any more.
    """
    begin = time.monotonic()
    report = VerifyReport() if report is None else report
    work = Work(report, on_progress, on_problem)
    backend = shelf.backend
    if repair and backend.properties.read_only:
        raise ReadOnlyStorageError(f"{shelf.url} is read-only: nothing can be repaired")
    try:
        inventory = None
        if names is not None:
            folders = {str(parsed.namespace) for name in names if (parsed := parse_path(name))}
            formats = _formats(shelf, folders, work)
            items = _named(backend, names, formats, work)
        else:
            inventory = Scan(backend, folders=folders, parents=None).run(pace=on_listed)
            assert inventory is not None
            formats = _formats(shelf, folders, work)
            items = _listed(inventory, formats, sample, work)
        threads = threads_for(backend)
        work.run_over(items, lambda item: _verify(shelf, item, work, repair), threads)
        if inventory is not None:
            _look_beside(backend, inventory, formats, work, repair=repair)
            for name, problem in _damaged(backend) if folders is None else ():
                work.problem("reserved", name, problem)
    finally:
        report.seconds = time.monotonic() - begin
    return report


def _formats(
    shelf: Shelf, wanted: Collection[str] | None, work: Work[VerifyReport]
) -> dict[str, ObjectFormat | None]:
    """Return the formats of the folders to verify; None where the description is no use."""
    formats: dict[str, ObjectFormat | None] = {}
    for info in shelf.namespaces():
        if wanted is not None and info.folder not in wanted:
            continue
        work.count(namespaces=1)
        try:
            formats[info.folder] = known_format(info)
        except ConfigError as error:
            if is_of_other_version(read_record(shelf.backend, info.folder)):
                work.count(other_versions=1)
                continue
            formats[info.folder] = None
            work.problem("descriptions", f"{info.folder}/{DESCRIPTION}", str(error))
    return formats


def _listed(
    inventory: Inventory,
    formats: dict[str, ObjectFormat | None],
    sample: Callable[[int], int],
    work: Work[VerifyReport],
) -> Iterator[_Item]:
    """Yield the objects to verify, a sample at random."""
    spaces = [number for number, one in enumerate(inventory.namespaces) if one.name in formats]
    rows = np.flatnonzero(np.isin(inventory.namespace, spaces))
    size = min(len(rows), sample(len(rows)))
    if size < len(rows):
        chosen = random.SystemRandom().sample(range(len(rows)), size)
        rows = rows[np.sort(np.array(chosen, np.int64))]
    work.count(found=len(rows))
    for row in rows.tolist():
        name = inventory.name(row)
        parsed = parse_path(name)
        assert parsed is not None
        yield _Item(name, parsed, int(inventory.size[row]), formats[str(parsed.namespace)])


def _named(
    backend: Backend,
    names: Sequence[str],
    formats: dict[str, ObjectFormat | None],
    work: Work[VerifyReport],
) -> Iterator[_Item]:
    """Yield the objects of these names."""
    work.count(found=len(names))
    for name in names:
        parsed, info = parse_path(name), backend.info(name)
        assert parsed is not None
        if info is None:
            raise ObjectMissingError(f"{backend.url} has no object {name}")
        yield _Item(name, parsed, info.size, formats.get(str(parsed.namespace)))


def _verify(shelf: Shelf, item: _Item, work: Work[VerifyReport], repair: bool) -> None:
    """Verify one object; count what was found."""
    if item.fmt is None:
        return work.count(unverified=1)
    own = size = None
    try:
        own = item.fmt.of_name(item.parsed)
        size = own.object_size(item.parsed.shard, item.parsed.tail_tokens)
        # Before the storage is asked: no bytes can make this name right.
        own.named_chunk(item.parsed)
        try:
            _read(shelf.backend, own, item)
        except BadObjectError:
            # Caches of network filesystems show old sizes and contents to an old open.
            _read(shelf.backend, own, item)
    except (BadObjectError, ObjectNameError) as bad:
        named = None if isinstance(bad, ObjectNameError) else size
        moved = repair and shelf.view(item.fmt).set_aside_named(item.name, named, bad)
        stays = "" if moved or not repair else "; it stays: it changed within the last minute"
        work.problem("bad", item.name, f"{type(bad).__name__}: {bad}{stays}")
        return work.count(moved=int(moved))
    return work.count(bytes=item.size, intact=1)


def _read(backend: Backend, own: ObjectFormat, item: _Item) -> None:
    with backend.open(item.name) as reader:
        own.check_named(reader, item.parsed)


def read_header(reader: Reader) -> dict[str, Any]:
    """Return what the header of a safetensors file says.

    Raises
    ------
    BadObjectError
        If it has none.
    StorageError
        If the storage failed.
    """
    return describe_header(_bytes(reader, 8 + header_length(_bytes(reader, 8))))


def _bytes(reader: Reader, length: int) -> bytes:
    data = bytearray(min(length, reader.size))
    return bytes(data[: reader.read_into(memoryview(data), 0)])


# --------------------------------------------------------------------------- beside objects


def _look_beside(
    backend: Backend,
    inventory: Inventory,
    formats: dict[str, ObjectFormat | None],
    work: Work[VerifyReport],
    *,
    repair: bool,
) -> None:
    """Count what cannot be a hit, and what is old; delete the latter in a repair."""
    counts, space = inventory.object_counts(), inventory.namespace[inventory.first_rows]
    for number, folder in enumerate(inventory.namespaces):
        if (fmt := formats.get(folder.name)) is not None:
            there = counts[space == number]
            full = [fmt.of(kind).shards if kind in fmt.kinds else 0 for kind in KINDS]
            work.count(incomplete=int(((there > 0) & (there < full)).any(axis=1).sum()))
    found = plan(inventory, Rules(markers=None, tails=None))
    work.count(orphans=len(found.leftovers))
    work.count(orphan_bytes=sum(leftover.size for leftover, _ in found.leftovers))
    if repair and found.leftovers:
        outcome = carry_out(backend, found)
        work.count(removed=outcome.count)
        if outcome.error is not None:
            raise outcome.error


def _damaged(backend: Backend) -> Iterator[tuple[str, str]]:
    """Yield the damaged files of the root's reserved folder, and what is wrong with each."""
    yield from marks.unreadable(backend)
    pins = Pins.read(backend)
    unknown = {name: problem for name, (_, problem) in pins.unknown.items()}
    yield from (
        (pin_file(name), problem) for name, problem in [*pins.unreadable.items(), *unknown.items()]
    )
    if (problem := lease.problem_of(backend)) is not None:
        yield lease.SWEEP, problem
