"""Verifies what is on a shelf, and repairs what can be repaired without inventing a byte.

Owns what is wrong with an object, with a namespace's description and with what lies beside them,
and what a repair does about it:

==================================  =============================================================
found                               repair
==================================  =============================================================
an object that is not what its      set aside, however many they are, pinned ones too;
name and its namespace demand       deleted where the storage cannot rename
temporaries of killed writers and   deleted, as by an engine
other leftovers that are old
``namespace.json`` is missing or    none: an engine that stores to the namespace writes it again
damaged
pins that cannot be read            none: another version may have written them
folders that cannot be listed       none
==================================  =============================================================

Contracts
---------
* Objects without a record of their namespace are counted, and neither read nor touched.
* An error of the storage moves and deletes nothing.
* A bad object is read again through a fresh open before it counts as bad. One of a wrong size that
  changed within the last minute may still be copied to its place: it is reported, and stays.
* A shelf is listed twice: to count, and to read what was counted. What is stored in between is left
  out.

Threads
-------
:func:`verify_shelf` lists on the calling thread and reads on the threads of
:mod:`kvshelf.tools.work`, with about a MiB of memory for each. `on_progress` and
`on_problem` are called on any of these threads, one call at a time.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvshelf.backends import Backend, Reader
from kvshelf.capacity.keepers import time_for_ages
from kvshelf.capacity.parallel import threads_for
from kvshelf.capacity.sweep import Leftover, Part, Rules, delete, is_old
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectMissingError,
    ObjectNameError,
    ReadOnlyStorageError,
    StorageError,
)
from kvshelf.format.invalid import describe_header, header_length
from kvshelf.format.names import DESCRIPTION, ParsedName, parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.pins import PINS, Pins, pin_file
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.listing import list_parts, storage_time
from kvshelf.tools.prompt_objects import known_format
from kvshelf.tools.work import Work

#: Formats by folder; None where the description is no use.
_Formats = dict[str, ObjectFormat | None]


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
    descriptions : int
        Folders whose description is missing or damaged.
    incomplete : int
        Chunks of which some objects are there and others are missing.
    reserved : int
        Pins that cannot be read.
    unlisted : int
        Folders that cannot be listed.
    leftovers, leftover_bytes : int
        Temporaries of killed writers, what was set aside, and other leftovers that are old.
    removed : int
        Of these, the ones that a repair deleted.
    seconds : float
    finished : bool
        All that was selected has been looked at.
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
    descriptions: int = 0
    incomplete: int = 0
    reserved: int = 0
    unlisted: int = 0
    leftovers: int = 0
    leftover_bytes: int = 0
    removed: int = 0
    seconds: float = 0.0
    finished: bool = False

    @property
    def done(self) -> int:
        """Objects that are finished."""
        return self.intact + self.unverified + self.bad + self.failed + self.gone

    @property
    def sound(self) -> bool | None:
        """Whether nothing is wrong, or nothing any more; None where not all was looked at."""
        if not self.finished:
            return None
        wrong = self.descriptions or self.failed or self.reserved or self.unlisted
        return self.bad == self.moved and not wrong


class _Item(NamedTuple):
    """One object to verify; `fmt` is None without a record of its namespace."""

    name: str
    parsed: ParsedName
    fmt: ObjectFormat | None


def verify_shelf(
    shelf: Shelf,
    folders: Collection[str] | None = None,
    *,
    names: Sequence[str] | None = None,
    sample: Callable[[int], int] = lambda count: count,
    repair: bool = False,
    report: VerifyReport | None = None,
    on_listed: Callable[[int], None] = lambda files: None,
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
        Called with numbers of files that were listed, before anything is verified.
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
    threads = threads_for(backend)
    try:
        if names is not None:
            folders = {str(parsed.namespace) for name in names if (parsed := parse_path(name))}
            items = _named(backend, names, _formats(shelf, folders, work), work)
            work.run_over(items, lambda item: _verify(shelf, item, work, repair), threads)
        else:
            now = storage_time(backend) if repair else time.time()
            formats = _formats(shelf, folders, work)
            skipped: dict[str, StorageError] = {}
            parts = list_parts(backend, folders, now, skipped, on_listed=on_listed)
            total, old = _count(parts, formats, time_for_ages(now, shelf.url), work)
            work.count(found=min(total, sample(total)))
            for folder, error in skipped.items():
                work.problem("unlisted", folder, str(error))
            parts = list_parts(backend, folders, now, skipped)
            items = _listed(parts, formats, total, work)
            work.run_over(items, lambda item: _verify(shelf, item, work, repair), threads)
            if repair and old:
                outcome = delete(backend, ((one, one.reason) for one in old), now=now)
                work.count(removed=outcome.deleted.total())
                if outcome.error is not None:
                    raise outcome.error
            for name, problem in _damaged_pins(backend) if folders is None else ():
                work.problem("reserved", name, problem)
        report.finished = True
    finally:
        report.seconds = time.monotonic() - begin
    return report


def _formats(shelf: Shelf, wanted: Collection[str] | None, work: Work[VerifyReport]) -> _Formats:
    """Return the formats of the folders to verify."""
    formats: _Formats = {}
    for info in shelf.namespaces():
        if wanted is not None and info.folder not in wanted:
            continue
        work.count(namespaces=1)
        try:
            formats[info.folder] = known_format(info)
        except ConfigError as error:
            formats[info.folder] = None
            work.problem("descriptions", f"{info.folder}/{DESCRIPTION}", str(error))
    return formats


def _count(
    parts: Iterable[Part],
    formats: _Formats,
    old_at: float,
    work: Work[VerifyReport],
) -> tuple[int, list[Leftover]]:
    """Count what lies there; return the number of objects, and leftovers that are old."""
    total, rules = 0, Rules()
    old: list[Leftover] = []
    for part in parts:
        lacking: set[tuple[str, bytes]] = set()
        for unit in part.units:
            if unit.space in formats:
                total += len(unit.names)
                fmt = formats[unit.space]
                shards = fmt.of(unit.kind).shards if fmt and unit.kind in fmt.kinds else 0
                if len(unit.names) < shards:
                    lacking.add((unit.group, unit.key))
        work.count(incomplete=len(lacking))
        old += (one for one in part.leftovers if is_old(one, rules, old_at))
    work.count(leftovers=len(old), leftover_bytes=sum(one.nbytes for one in old))
    return total, old


def _listed(
    parts: Iterable[Part], formats: _Formats, total: int, work: Work[VerifyReport]
) -> Iterator[_Item]:
    """Yield the objects to verify, a sample at random of `total` ones."""
    chance, left = random.SystemRandom(), work.report.found
    for part in parts:
        for unit in part.units:
            for name in unit.names if unit.space in formats else ():
                if not left:
                    return
                if chance.random() * total < left:
                    left -= 1
                    parsed = parse_path(name)
                    assert parsed is not None
                    yield _Item(name, parsed, formats[unit.space])
                total -= 1
    work.count(gone=left)


def _named(
    backend: Backend,
    names: Sequence[str],
    formats: _Formats,
    work: Work[VerifyReport],
) -> Iterator[_Item]:
    """Yield the objects of these names."""
    work.count(found=len(names))
    for name in names:
        parsed = parse_path(name)
        assert parsed is not None
        if backend.info(name) is None:
            raise ObjectMissingError(f"{backend.url} has no object {name}")
        yield _Item(name, parsed, formats.get(str(parsed.namespace)))


def _verify(shelf: Shelf, item: _Item, work: Work[VerifyReport], repair: bool) -> None:
    """Verify one object; count what was found."""
    if item.fmt is None:
        return work.count(unverified=1)
    size = None
    try:
        own = item.fmt.of_name(item.parsed)
        # Before the storage is asked: no bytes can make this name right.
        own.named_chunk(item.parsed)
        size = own.object_size(item.parsed.shard, item.parsed.tail_tokens)
        try:
            _read(shelf.backend, own, item)
        except BadObjectError:
            # Caches of network filesystems show old sizes and contents to an old open.
            _read(shelf.backend, own, item)
    except (BadObjectError, ObjectNameError) as bad:
        named = None if isinstance(bad, ObjectNameError) else size
        moved = repair and shelf.view(item.fmt).set_aside_named(item.name, named, bad)
        stays = "" if moved or not repair else "; it stays: it changed within the last minute"
        work.problem("bad", item.name, f"{bad.kind}: {bad}{stays}")
        return work.count(moved=int(moved))
    return work.count(bytes=size, intact=1)


def _read(backend: Backend, own: ObjectFormat, item: _Item) -> None:
    with backend.open(item.name) as reader:
        own.read_named(reader, item.parsed)


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


def _damaged_pins(backend: Backend) -> Iterator[tuple[str, str]]:
    """Yield the files of pins that cannot be read, and what is wrong with each."""
    try:
        pins = Pins.read(backend)
    except StorageError as error:
        yield PINS, str(error)
        return
    unknown = ((name, problem) for name, (_, problem) in pins.unknown.items())
    for name, problem in (*pins.unreadable.items(), *unknown):
        yield pin_file(name), problem
