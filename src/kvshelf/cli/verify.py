"""``kvshelf verify``: verifies what is on a shelf, and repairs it without inventing a byte.

Owns what is wrong with an object, with a namespace's description and with other files, what a
repair does about it, and the command:

==================================  =============================================================
problem                             repair
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
* A bad object is read again through a fresh open before it counts as bad. An object of a wrong size
  that changed within the last minute may still be copied to its place: it is reported, and stays.
* A shelf is listed twice: to count, and to read what was counted. Objects that are stored in
  between are left out.

:func:`verify_shelf` lists on the calling thread and reads on the threads of
:class:`~kvshelf.cli.progress.Work`, with about a MiB of memory for each.
"""

from __future__ import annotations

import contextlib
import json
import random
import re
import time
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any, Final, NamedTuple

import typer

from kvshelf.backends import Backend, Reader
from kvshelf.capacity.keepers import time_for_ages
from kvshelf.capacity.parallel import threads_for
from kvshelf.capacity.sweep import Leftover, Part, Rules, delete, is_old
from kvshelf.cli.common import (
    JsonOption,
    YesOption,
    count_text,
    option,
    pace_text,
    summary,
    write_out,
)
from kvshelf.cli.listing import format_of, list_parts, storage_time
from kvshelf.cli.progress import Display, Work
from kvshelf.cli.shelves import (
    NamespacesOption,
    ShelfArgument,
    find_folders,
    open_found,
    place_of,
)
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    ObjectMissingError,
    ObjectNameError,
    ReadOnlyStorageError,
    StorageError,
    size_text,
)
from kvshelf.format.invalid import describe_header, header_length
from kvshelf.format.names import DESCRIPTION, ParsedName, parse_path
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.pins import PINS, Pins, pin_file
from kvshelf.shelf.shelf import Shelf
from kvshelf.urls import shown_url

_NAME_PARTS: Final = 4  # namespace folder, group, fan-out, file
_SAMPLE: Final = re.compile(r"([0-9]{1,12})|([0-9]{1,3}(?:\.[0-9]{1,12})?)%", re.ASCII)

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


class _ListedObject(NamedTuple):
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
    display: Display | None = None,
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
        Updated during the work, so that it is available after an interruption.
    display : Display, optional
        Shows the listing, the report after each change, and each problem.

    Raises
    ------
    StorageError
        If the shelf cannot be listed, takes no changes, or does not answer any more.
    """
    begin = time.monotonic()
    report = VerifyReport() if report is None else report
    display = Display("verifying") if display is None else display
    work = Work(report, display)
    backend = shelf.backend
    if repair and backend.properties.read_only:
        raise ReadOnlyStorageError(f"{shelf.url} is read-only: nothing can be repaired")

    def verify_all(objects: Iterator[_ListedObject]) -> None:
        threads = threads_for(backend)
        work.run_over(objects, lambda item: _verify_object(shelf, item, work, repair), threads)

    try:
        if names is not None:
            folders = {str(parsed.namespace) for name in names if (parsed := parse_path(name))}
            verify_all(_named_objects(backend, names, _formats(shelf, folders, work), work))
        else:
            now = storage_time(backend) if repair else time.time()
            formats = _formats(shelf, folders, work)
            skipped: dict[str, StorageError] = {}
            parts = list_parts(backend, folders, now, skipped, on_listed=display.listed)
            total, leftovers = _count(parts, formats, time_for_ages(now, shelf.url), work)
            work.count(found=min(total, sample(total)))
            for folder, error in skipped.items():
                work.problem("unlisted", folder, str(error))
            parts = list_parts(backend, folders, now, skipped)
            verify_all(_sampled_objects(parts, formats, total, work))
            if repair and leftovers:
                picked = ((leftover, leftover.reason) for leftover in leftovers)
                outcome = delete(backend, picked, now=now)
                work.count(removed=outcome.deleted.total())
                if outcome.error is not None:
                    raise outcome.error
            for name, problem in _damaged_pins(backend) if folders is None else ():
                work.problem("reserved", name, problem)
        report.finished = True
    finally:
        report.seconds = time.monotonic() - begin
    return report


def _formats(shelf: Shelf, folders: Collection[str] | None, work: Work[VerifyReport]) -> _Formats:
    """Return the formats of the folders to verify."""
    formats: _Formats = {}
    for info in shelf.namespaces():
        if folders is not None and info.folder not in folders:
            continue
        work.count(namespaces=1)
        try:
            formats[info.folder] = format_of(info)
        except ConfigError as error:
            formats[info.folder] = None
            work.problem("descriptions", f"{info.folder}/{DESCRIPTION}", str(error))
    return formats


def _count(
    parts: Iterable[Part], formats: _Formats, old_at: float, work: Work[VerifyReport]
) -> tuple[int, list[Leftover]]:
    """Count what is listed; return the number of objects, and leftovers that are old."""
    total, rules = 0, Rules()
    old: list[Leftover] = []
    for part in parts:
        incomplete: set[tuple[str, bytes]] = set()
        for unit in part.units:
            if unit.space in formats:
                total += len(unit.names)
                fmt = formats[unit.space]
                shards = fmt.of(unit.kind).shards if fmt and unit.kind in fmt.kinds else 0
                if len(unit.names) < shards:
                    incomplete.add((unit.group, unit.key))
        work.count(incomplete=len(incomplete))
        old += (leftover for leftover in part.leftovers if is_old(leftover, rules, old_at))
    work.count(leftovers=len(old), leftover_bytes=sum(leftover.nbytes for leftover in old))
    return total, old


def _sampled_objects(
    parts: Iterable[Part], formats: _Formats, total: int, work: Work[VerifyReport]
) -> Iterator[_ListedObject]:
    """Yield the objects to verify: of `total` ones as many, at random, as the report selects."""
    chance, remaining = random.SystemRandom(), work.report.found
    for part in parts:
        for unit in part.units:
            for name in unit.names if unit.space in formats else ():
                if not remaining:
                    return
                if chance.random() * total < remaining:
                    remaining -= 1
                    parsed = parse_path(name)
                    assert parsed is not None
                    yield _ListedObject(name, parsed, formats[unit.space])
                total -= 1
    work.count(gone=remaining)


def _named_objects(
    backend: Backend, names: Sequence[str], formats: _Formats, work: Work[VerifyReport]
) -> Iterator[_ListedObject]:
    """Yield the objects of these names."""
    work.count(found=len(names))
    for name in names:
        parsed = parse_path(name)
        assert parsed is not None
        if backend.info(name) is None:
            raise ObjectMissingError(f"{backend.url} has no object {name}")
        yield _ListedObject(name, parsed, formats.get(str(parsed.namespace)))


def _verify_object(
    shelf: Shelf, item: _ListedObject, work: Work[VerifyReport], repair: bool
) -> None:
    """Verify one object; count the result."""
    if item.fmt is None:
        return work.count(unverified=1)
    size = None
    try:
        fmt = item.fmt.of_name(item.parsed)
        # Before the storage is asked: no bytes can make this name right.
        fmt.named_chunk(item.parsed)
        size = fmt.object_size(item.parsed.shard, item.parsed.tail_tokens)
        try:
            _read(shelf.backend, fmt, item)
        except BadObjectError:
            # Caches of network filesystems show old sizes and contents to an old open.
            _read(shelf.backend, fmt, item)
    except (BadObjectError, ObjectNameError) as bad:
        named_size = None if isinstance(bad, ObjectNameError) else size
        moved = repair and shelf.view(item.fmt).set_aside_named(item.name, named_size, bad)
        stays = "" if moved or not repair else "; it stays: it changed within the last minute"
        work.problem("bad", item.name, f"{bad.kind}: {bad}{stays}")
        return work.count(moved=int(moved))
    return work.count(bytes=size, intact=1)


def _read(backend: Backend, fmt: ObjectFormat, item: _ListedObject) -> None:
    with backend.open(item.name) as reader:
        fmt.read_named(reader, item.parsed)


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


# ----------------------------------------------------------------------------- the command


def verify(
    shelf: ShelfArgument = None,
    objects: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="OBJECT",
            help="Check only these objects: each a path, or a name inside the shelf.",
            show_default=False,
        ),
    ] = None,
    namespaces: NamespacesOption = None,
    sample: Annotated[
        str | None,
        option("--sample", "N|P%", "Only so many objects, or such a part, chosen at random."),
    ] = None,
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also the header of each OBJECT.")
    ] = False,
    repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="With --yes: rename bad objects, which nobody loads then, and delete renamed"
            " objects and temporary files that are older than an hour.",
        ),
    ] = False,
    yes: YesOption = False,
    as_json: JsonOption = False,
) -> None:
    """Read and verify the objects of a shelf; repair what can be repaired."""
    sample_size = _sample_size(sample)
    if objects and (namespaces or sample):
        raise ConfigError("found OBJECT beside --namespace or --sample; give one of them")
    if long and not objects:
        raise ConfigError("found --long without OBJECT; give both, or neither")
    if yes and not repair:
        raise ConfigError("found --yes without --repair; give both, or neither")
    report = VerifyReport()
    display = Display("verifying", as_json=as_json)
    with open_found(shelf, change=yes) as opened:
        folders = find_folders(opened, namespaces)
        names = None
        if objects:
            names = list(dict.fromkeys(_object_name(opened, text) for text in objects))
        headers = [_header(opened, name) for name in names or ()] if long else []
        if not as_json:
            write_out("".join(json.dumps(header, indent=2) + "\n" for header in headers))
        with display.working("from the beginning"):
            verify_shelf(
                opened,
                folders,
                names=names,
                sample=sample_size,
                repair=yes,
                report=report,
                display=display,
            )
        row = asdict(report) | {"sound": report.sound, "shelf": opened.url, "repair": repair}
        row |= {"dry_run": not yes, "headers": headers}
        display.finish(row, _summary(report, repair, yes), complete=report.sound is True)


def _object_name(shelf: Shelf, text: str) -> str:
    """Return the name of the object that a user names, by a path or a name inside the shelf.

    Raises
    ------
    ConfigError
        If it is no path of an object of the shelf.
    """
    parts = text.split("/")
    name, root = "/".join(parts[-_NAME_PARTS:]), "/".join(parts[:-_NAME_PARTS])
    if parse_path(name) and (not root or place_of(root) == place_of(shelf.url)):
        return name
    raise ConfigError(
        f"{shown_url(text)!r} is no object of {shelf.url}; expected a path on this shelf, or the"
        " name of an object inside it"
    )


def _header(shelf: Shelf, name: str) -> dict[str, Any]:
    """Return what the header of an object says, as far as it can be read."""
    with shelf.backend.open(name) as reader:
        row: dict[str, Any] = {"name": name, "size": reader.size}
        with contextlib.suppress(BadObjectError):  # it is verified afterwards
            row |= describe_header(_first_bytes(reader, 8 + header_length(_first_bytes(reader, 8))))
    return row


def _first_bytes(reader: Reader, length: int) -> bytes:
    data = bytearray(min(length, reader.size))
    return bytes(data[: reader.read_into(memoryview(data), 0)])


def _sample_size(text: str | None) -> Callable[[int], int]:
    """Return a function from the number of all objects to the number that ``--sample`` means."""
    if text is None:
        return lambda count: count
    match = _SAMPLE.fullmatch(text)
    if match is None or float(match[2] or 0) > 100:
        raise ConfigError(
            f"--sample: found {text!r}; expected a number of objects such as 1000, or a part of"
            " them such as 1% or 0.1%"
        )
    if match[1]:
        return lambda count: min(count, int(match[1]))
    share = float(match[2]) / 100
    return lambda count: round(count * share) or min(1, count)


def _summary(report: VerifyReport, repair: bool, yes: bool) -> str:
    def with_repair(text: str, count: int, done: str) -> str:
        if yes:
            return f"{text}, {count} {done}"
        return f"{text}, to be {done} by --yes" if repair else text

    leftovers = f"leftovers ({size_text(report.leftover_bytes)})"
    return summary(
        [
            f"verified {report.done} of {report.found} objects in"
            f" {count_text(report.namespaces, 'namespace')}, {size_text(report.bytes)} in"
            f" {pace_text(report.bytes, report.seconds)}: {report.intact} intact"
        ],
        (report.unverified, "not verified, as the record of their namespace is no use"),
        (report.bad, with_repair("bad", report.moved, "moved aside")),
        (report.failed, "failed"),
        (report.gone, "gone meanwhile"),
        (report.incomplete, "incomplete chunks, of which objects are missing"),
        (report.descriptions, "namespace.json missing or damaged"),
        (report.reserved, "pins that cannot be read"),
        (report.unlisted, "folders that cannot be listed"),
        (report.leftovers, with_repair(leftovers, report.removed, "deleted")),
    )
