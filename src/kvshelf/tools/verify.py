"""Verifies what is on a shelf, and repairs what can be repaired without inventing a byte.

Owns what is wrong with an object, with a namespace's description and with what lies beside them,
and what a repair does about it:

==================================  =============================================================
found                               repair
==================================  =============================================================
an object that is not what its      moved to the quarantine of its namespace folder, as by an
name and its namespace demand       engine; deleted where the storage cannot move
``namespace.json`` is missing or    written again, where its bytes are known: by a record whose
damaged                             digest the folder's name states
temporaries of killed writers,      deleted, as by an engine
old quarantine
marks, pins and a record of sweeps  none: another version may have written them
that cannot be read
==================================  =============================================================

Contracts
---------
* A record is known only if its canonical bytes have the digest that the folder's name states. It
  comes from the damaged file itself, or from another folder of the same namespace.
* Without a record, objects are compared with the hashes in their own headers, and stay where they
  are whatever is found.
* A folder whose description has its digest and is not of this format belongs to another version:
  nothing in it is read or touched.
* An error of the storage moves, deletes and rewrites nothing.
* A bad object is read again through a fresh open before it counts as bad. One of a wrong size that
  changed within the last minute may still be copied to its place: it is reported, and stays.

Threads
-------
:func:`verify_shelf` lists on the calling thread and reads on the threads of
:mod:`kvshelf.capacity.parallel`, with about a MiB of memory for each. `on_progress` and
`on_problem` are called on any of these threads, one call at a time.
"""

from __future__ import annotations

import hashlib
import json
import random
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import xxhash

from kvshelf.backends import Backend, Reader
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
    TransientStorageError,
)
from kvshelf.format.invalid import PayloadDamaged, WrongSize, describe_header, header_length
from kvshelf.format.names import DESCRIPTION, ParsedName, parse_namespace_folder, parse_path
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.leftovers import read_description
from kvshelf.shelf.shelf import Shelf
from kvshelf.tools.reserved import damaged_files

_PIECE_BYTES: Final = 1 << 20


@dataclass(frozen=True, slots=True)
class Sample:
    """How many of the objects are verified: a number, or a share of them between 0 and 1."""

    count: int | None = None
    share: float | None = None


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
        Without a record: their tensors have the hashes in their headers.
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
    rewritten : int
        Of these, the ones that a repair mended.
    reserved : int
        Files in the root's reserved folder that cannot be read.
    orphans, orphan_bytes : int
        Temporaries of killed writers, and entries of quarantine that are old.
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
    rewritten: int = 0
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
        mended = self.bad == self.moved and self.descriptions == self.rewritten
        return mended and self.failed == 0 and self.reserved == 0


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
    sample: Sample = Sample(),
    jobs: int | None = None,
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
    sample : Sample
        Which part of the objects; all by default.
    jobs : int, optional
        Objects read at once; by default the useful concurrency of the storage, at most 16.
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
    state = Work(report, on_progress, on_problem)
    backend = shelf.backend
    try:
        if repair and backend.properties.read_only:
            raise ReadOnlyStorageError(f"{shelf.url} is read-only: nothing can be repaired")
        verifier = _Verifier(shelf, state, repair=repair)
        threads = jobs or threads_for(backend)
        if names is not None:
            state.run_over(_named(backend, names, state), verifier.verify, threads)
            return report
        inventory = Scan(backend, folders=folders, parents=None).run(pace=on_listed)
        assert inventory is not None
        formats = _formats(backend, inventory, folders, state, repair=repair)
        items = _items(inventory, formats, sample, state)
        state.run_over(items, verifier.verify, threads)
        for name, problem in damaged_files(backend) if folders is None else ():
            state.problem("reserved", name, problem)
        _orphans(backend, inventory, state, repair=repair)
    finally:
        report.seconds = time.monotonic() - begin
    return report


# --------------------------------------------------------------------------- descriptions


class _Description(NamedTuple):
    """What the description of a folder says.

    `problem` is None only if the file is as it should be.
    """

    record: Namespace | None
    problem: str | None = None
    missing: bool = False
    other_version: bool = False


def _formats(
    backend: Backend,
    inventory: Inventory,
    wanted: Collection[str] | None,
    state: Work[VerifyReport],
    *,
    repair: bool,
) -> dict[int, ObjectFormat | None]:
    """Return the formats of the folders to verify, by their numbers; mend their descriptions."""
    names = [folder.name for folder in inventory.namespaces]
    tags = {name[-16:] for name in names if wanted is None or name in wanted}
    # The record of a namespace may be in another of its folders.
    found = {
        name: _description(backend, name)
        for name in backend.folders()
        if parse_namespace_folder(name) in tags
    }
    known = {
        one.record.digest.hex()[:16]: one.record for one in found.values() if one.record is not None
    }
    filled = set(np.unique(inventory.namespace).tolist())
    formats: dict[int, ObjectFormat | None] = {}
    for number, name in enumerate(names):
        if wanted is not None and name not in wanted:
            continue
        one = found.get(name)
        if one is None:
            continue  # it is gone meanwhile
        state.count(namespaces=1)
        if one.other_version:
            state.count(other_versions=1)
            continue
        record = one.record or known.get(name[-16:])
        # An engine makes the folder, and then describes it.
        if one.problem is not None and not (one.missing and number not in filled):
            lost = "" if record else "; an engine that stores to it writes a new one"
            state.problem("descriptions", f"{name}/{DESCRIPTION}", one.problem + lost)
            if repair and record is not None:
                backend.write(f"{name}/{DESCRIPTION}", [record.encoded], "replace")
                state.count(rewritten=1)
        formats[number] = _format(name, record, state)
    return formats


def _format(name: str, record: Namespace | None, state: Work[VerifyReport]) -> ObjectFormat | None:
    if record is None:
        return None
    try:
        return ObjectFormat(record)
    except ConfigError as error:
        state.problem("descriptions", f"{name}/{DESCRIPTION}", f"it describes no objects: {error}")
        return None


def _description(backend: Backend, folder: str) -> _Description:
    try:
        data = read_description(backend, folder)
    except ObjectMissingError:
        return _Description(None, "missing", missing=True)
    except (BadObjectError, ValueError) as error:
        return _Description(None, f"damaged: {error}")
    tag = parse_namespace_folder(folder)
    try:
        record = Namespace.from_bytes(data, folder[:-17])
        problem = f"it belongs to the digest {record.digest.hex()[:16]}"
        if record.digest.hex()[:16] == tag:
            return _Description(record)
    except ConfigError as error:
        problem = str(error)
        if hashlib.sha256(data).hexdigest()[:16] == tag:
            return _Description(None, problem, other_version=True)
    return _Description(recovered(data, folder), f"damaged: {problem}")


def recovered(data: bytes, folder: str) -> Namespace | None:
    """Return the record that damaged bytes of a ``namespace.json`` certainly were.

    That is so if their JSON, in whatever encoding, has canonical bytes with the digest in the
    folder's name: the file was reformatted, or something is behind its end.

    Parameters
    ----------
    data : bytes
    folder : str
        The namespace folder's name.
    """
    text = data.decode("utf-8", "replace").lstrip("\ufeff \t\r\n")
    try:
        record, _ = json.JSONDecoder().raw_decode(text)
        namespace = Namespace(record, folder[:-17])
    except (ValueError, TypeError, AttributeError, RecursionError):  # also ConfigError
        return None
    return namespace if namespace.digest.hex()[:16] == folder[-16:] else None


# --------------------------------------------------------------------------- objects


def _items(
    inventory: Inventory,
    formats: dict[int, ObjectFormat | None],
    sample: Sample,
    state: Work[VerifyReport],
) -> Iterator[_Item]:
    """Yield the objects to verify, a sample at random."""
    rows = np.flatnonzero(np.isin(inventory.namespace, list(formats)))
    size = len(rows)
    if sample.share is not None:
        size = round(size * sample.share) or min(1, size)
    if sample.count is not None:
        size = min(size, sample.count)
    if size < len(rows):
        chosen = random.SystemRandom().sample(range(len(rows)), size)
        rows = rows[np.sort(np.array(chosen, np.int64))]
    state.count(found=len(rows))
    for row in rows.tolist():
        name = inventory.name(row)
        parsed = parse_path(name)
        assert parsed is not None
        fmt = formats[int(inventory.namespace[row])]
        yield _Item(name, parsed, int(inventory.size[row]), fmt)


def _named(backend: Backend, names: Sequence[str], state: Work[VerifyReport]) -> Iterator[_Item]:
    """Yield the objects of these names."""
    formats: dict[str, ObjectFormat | None] = {}
    state.count(found=len(names))
    for name in names:
        parsed = parse_path(name)
        assert parsed is not None
        folder = str(parsed.namespace)
        if folder not in formats:
            formats[folder] = _format(folder, _description(backend, folder).record, state)
            state.count(namespaces=1)
        info = backend.info(name)
        if info is None:
            raise ObjectMissingError(f"{backend.url} has no object {name}")
        yield _Item(name, parsed, info.size, formats[folder])


class _Verifier:
    """Verifies objects; called by any of the threads."""

    def __init__(self, shelf: Shelf, state: Work[VerifyReport], *, repair: bool) -> None:
        self._shelf = shelf
        self._backend = shelf.backend
        self._state = state
        self._repair = repair

    def verify(self, item: _Item) -> None:
        """Verify one object; count what was found."""
        try:
            try:
                self._read(item)
            except BadObjectError:
                # Caches of network filesystems show old sizes and contents to an old open.
                self._read(item)
        except (BadObjectError, ObjectNameError) as bad:
            self._handle_bad(item, bad)
        else:
            self._state.count(bytes=item.size)
            self._state.count(**{"intact" if item.fmt is not None else "unverified": 1})

    def _read(self, item: _Item) -> None:
        if item.fmt is not None:
            # Before the storage is asked: no bytes can make this name right.
            item.fmt.of_name(item.parsed).named_chunk(item.parsed)
        least = self._backend.properties.part_bytes
        large = least and item.size >= least and item.fmt is not None
        with self._backend.open(item.name, item.size if large else None) as reader:
            if item.fmt is None:
                self._check_alone(reader)
            else:
                item.fmt.of_name(item.parsed).check_named(reader, item.parsed)

    @staticmethod
    def _check_alone(reader: Reader) -> None:
        """Check an object of an unknown namespace."""
        if not check_own_hashes(reader, read_header(reader)):
            raise NoHashes("its header has not the hashes of its tensors")

    def _handle_bad(self, item: _Item, bad: BadObjectError | ObjectNameError) -> None:
        moved = False
        text = f"{type(bad).__name__}: {bad}"
        if self._repair and item.fmt is not None:
            size = None
            if isinstance(bad, BadObjectError):
                own = item.fmt.of_name(item.parsed)
                size = own.object_size(item.parsed.shard, item.parsed.tail_tokens)
            moved = self._shelf.view(item.fmt).quarantine_named(item.name, size, bad)
            if not moved:
                text += "; it stays: it may still be copied to its place, or is another now"
        self._state.problem("bad", item.name, text)
        if moved:
            self._state.count(moved=1)


def read_header(reader: Reader) -> dict[str, Any]:
    """Return what the header of a safetensors file says.

    Raises
    ------
    BadObjectError
        If it has none.
    StorageError
        If the storage failed.
    """
    start = _read(reader, 0, min(8, reader.size))
    header = _read(reader, 0, min(8 + header_length(start), reader.size))
    return describe_header(header)


class NoHashes(BadObjectError):  # noqa: N818  as the errors of kvshelf.format.invalid
    """A safetensors file without kvshelf's hashes."""


def check_own_hashes(reader: Reader, found: Mapping[str, Any]) -> bool:
    """Compare the tensors of any safetensors file with the hashes in its header.

    Parameters
    ----------
    reader : Reader
        The opened file.
    found : Mapping
        Its header, see :func:`kvshelf.format.invalid.describe_header`.

    Returns
    -------
    bool
        False: there are no hashes.

    Raises
    ------
    BadObjectError
        If its size is not what its header describes, or a tensor is not what its hash says.
    TransientStorageError
        If fewer bytes were read than the file has.
    StorageError
        If the storage failed.
    """
    tensors, offset = found["tensors"], found["data_offset"]
    end = offset + max((tensor["data_offsets"][1] for tensor in tensors), default=0)
    if reader.size != end:
        raise WrongSize(f"found {reader.size} bytes, but its header describes {end}")
    hashes = found["metadata"].get("xxh3", "").split(",")
    if len(hashes) != len(tensors) or not all(hashes):
        return False
    if sum(t["data_offsets"][1] - t["data_offsets"][0] for t in tensors) != end - offset:
        raise PayloadDamaged("its tensors overlap, or there are gaps between them")
    for tensor, wanted in zip(tensors, hashes, strict=True):
        first, last = tensor["data_offsets"]
        digest = xxhash.xxh3_128()
        for at in range(first, last, _PIECE_BYTES):
            digest.update(_read(reader, offset + at, min(_PIECE_BYTES, last - at)))
        if digest.hexdigest() != wanted:
            raise PayloadDamaged(f"tensor {tensor['name']!r} does not match its hash")
    return True


def _read(reader: Reader, offset: int, length: int) -> bytes:
    data = bytearray(length)
    count = reader.read_into(memoryview(data), offset)
    if count != length:
        raise TransientStorageError(
            f"short read: found {count} bytes at {offset}, expected {length}"
        )
    return bytes(data)


# --------------------------------------------------------------------------- orphans


def _orphans(
    backend: Backend, inventory: Inventory, state: Work[VerifyReport], *, repair: bool
) -> None:
    """Count the temporaries and the quarantined objects that are old; delete them in a repair."""
    found = plan(inventory, Rules(markers=None, tails=None))
    state.count(orphans=len(found.leftovers))
    state.count(orphan_bytes=sum(leftover.size for leftover, _ in found.leftovers))
    if repair and found.leftovers:
        outcome = carry_out(backend, found)
        state.count(removed=outcome.count)
        if outcome.error is not None:
            raise outcome.error
