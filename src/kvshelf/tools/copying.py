"""Copies objects from one shelf to another and verifies each of them.

Owns the selection of objects (:class:`Selection`), what happens to each, and the counts of a copy
(:class:`CopyReport`). The shelf publishes and repairs objects.

Contracts
---------
* Only verified objects are published: header, size and the hash of every tensor. An object
  that fails is left out, counted and reported.
* An object that the target has with the right size is not touched, unless existing objects
  are verified and it is bad. One with the wrong size is replaced.
* An interrupted copy continues when it is started again: published objects are complete, and
  are skipped.
* The source is never changed. Objects that vanish from it during the copy are not a failure; a
  namespace folder that vanishes is an error, because the source may have been unmounted.
* Only objects and ``namespace.json`` are copied; marks, quarantine and foreign files are not.
  An existing folder of the namespace at the target is used, whatever its slug.
* A storage error with one object is retried after growing pauses, then counted and reported.
  The copy ends with an error if the target is read-only or full, or if every object fails.

Threads
-------
:func:`copy_shelf` lists and probes on the calling thread and copies on the threads of
:mod:`kvshelf.capacity.parallel`, each with one buffer that it reuses; large objects are copied one
after another. `on_progress` and `on_problem` are called on any of these threads, one call at a
time.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby, islice
from operator import itemgetter
from typing import Final

from kvshelf.capacity.parallel import PAUSES, Work, threads_for
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    StorageError,
    TransientStorageError,
)
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import STATE, WINDOW
from kvshelf.format.names import (
    ParsedName,
    object_name,
    parse_namespace_folder,
    parse_object_name,
)
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.shelf import Shelf
from kvshelf.shelf.view import NamespaceView, ObjectRef, Presence
from kvshelf.tools.naming import folders_named, shown
from kvshelf.tools.prompt_objects import prompt_chunks
from kvshelf.tools.prompts import Prompt

#: Objects that are probed at the target at once.
_BATCH: Final = 256
#: Objects over this size are copied one at a time, and those over the other one not at all: a
#: forged namespace may demand any size, and a copy holds objects in memory.
_LARGE_BYTES: Final = 256 << 20
_MOST_BYTES: Final = 4 << 30


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a shelf to copy; all of them by default.

    Attributes
    ----------
    namespaces : Sequence of str
        Names of them, as :func:`~kvshelf.tools.naming.folders_named` takes them.
    slugs : Sequence of str
        Namespaces whose folder begins with one of these.
    since, until : float or None
        Range of the objects' modification times, in seconds since the epoch.
    prompts : Sequence of Prompt or None
        Only the whole chunks of these prompts, which must be token ids. They are probed by
        their keys; nothing is listed.
    """

    namespaces: Sequence[str] = ()
    slugs: Sequence[str] = ()
    since: float | None = None
    until: float | None = None
    prompts: Sequence[Prompt] | None = None

    def has_model(self, folder: str) -> bool:
        """Whether a namespace folder is of a model that is selected."""
        return not self.slugs or folder[:-17] in self.slugs

    def has_time(self, mtime: float) -> bool:
        """Whether an object with this modification time is selected."""
        return (self.since is None or mtime >= self.since) and (
            self.until is None or mtime < self.until
        )


@dataclass(slots=True)
class CopyReport:
    """The result of a copy. Counts objects, except `bytes` and `seconds`.

    Attributes
    ----------
    found : int
        Selected at the source.
    copied : int
        Published by this copy, or by the copy that a dry run predicts.
    windows, states : int
        Of these, the ones of kind window and of kind state.
    repaired : int
        Of these, the ones that replaced a bad object.
    existed : int
        Already at the target.
    bad : int
        Not copied: the source's object is invalid.
    failed : int
        Not copied: the storage failed, or the target has a folder of that name.
    gone : int
        Vanished from the source before they were read.
    skipped_namespaces : int
        Left out, because without a namespace record objects cannot be verified.
    bytes : int
        Total size of the objects in `copied`.
    seconds : float
    """

    found: int = 0
    copied: int = 0
    windows: int = 0
    states: int = 0
    repaired: int = 0
    existed: int = 0
    bad: int = 0
    failed: int = 0
    gone: int = 0
    skipped_namespaces: int = 0
    bytes: int = 0
    seconds: float = 0.0

    @property
    def done(self) -> int:
        """Objects that are finished."""
        return self.copied + self.existed + self.bad + self.failed + self.gone

    @property
    def complete(self) -> bool:
        """Whether the target now has all selected objects."""
        return not (self.bad or self.failed or self.skipped_namespaces)


@dataclass(frozen=True, slots=True)
class _ToCopy:
    """One selected object; `fmt` is of its kind, `chunk` has its parent only if `parent_known`."""

    fmt: ObjectFormat
    name: str
    parsed: ParsedName
    chunk: Chunk
    size: int
    parent_known: bool = False
    present: bool = False


def copy_shelf(
    source: Shelf,
    target: Shelf,
    selection: Selection = Selection(),
    *,
    jobs: int | None = None,
    verify_existing: bool = False,
    dry_run: bool = False,
    report: CopyReport | None = None,
    on_progress: Callable[[CopyReport], None] = lambda report: None,
    on_problem: Callable[[str, str], None] = lambda name, text: None,
) -> CopyReport:
    """Copy the selected objects that the target does not have.

    Parameters
    ----------
    source, target : Shelf
        Open the source read-only if possible.
    selection : Selection
        The objects to copy.
    jobs : int, optional
        Objects copied at once; by default the useful concurrency of both storages, at most 16.
    verify_existing : bool
        Read and verify the target's existing objects, and replace bad ones.
    dry_run : bool
        Only count: do not change the target and do not read objects.
    report : CopyReport, optional
        Updated during the copy, so that it is available after an interruption.
    on_progress : Callable
        Called with the report after each change.
    on_problem : Callable
        Called with an object's name and a description of the problem.

    Returns
    -------
    CopyReport

    Raises
    ------
    ConfigError
        If the selection names a namespace or a model that the source does not have.
    StorageError
        If a shelf cannot be listed, a namespace vanishes from the source, or the target accepts
        no objects.
    """
    begin = time.monotonic()
    report = CopyReport() if report is None else report
    state = Work(report, on_progress, on_problem)
    folders: list[str] = []
    to_do = _to_do(
        _find(source, target, selection, state, folders, describe=not dry_run),
        state,
        verify_existing=verify_existing,
        dry_run=dry_run,
    )
    threads = jobs or threads_for(source.backend, target.backend)
    try:
        state.run_over(to_do, _Copier(source, target, state).copy, threads)
        if report.gone:
            _check_there(source, folders)
    finally:
        report.seconds = time.monotonic() - begin
    return report


def _to_do(
    items: Iterable[_ToCopy], state: Work[CopyReport], *, verify_existing: bool, dry_run: bool
) -> Iterator[_ToCopy]:
    """Yield what is to be copied or verified; count the rest."""
    for item in items:
        if dry_run:
            if item.present:
                state.count(existed=1)
            else:
                _count_copied(state, item, item.size)
        elif item.present and not verify_existing:
            state.count(existed=1)
        else:
            yield item


def _count_copied(state: Work[CopyReport], item: _ToCopy, nbytes: int) -> None:
    kind = item.parsed.kind
    state.count(copied=1, windows=int(kind == WINDOW), states=int(kind == STATE), bytes=nbytes)


# --------------------------------------------------------------------------- what to copy


def _find(
    source: Shelf,
    target: Shelf,
    selection: Selection,
    state: Work[CopyReport],
    complete: list[str],
    *,
    describe: bool,
) -> Iterator[_ToCopy]:
    """Yield the selected objects, and whether the target has each; note which folders are done."""
    formats = _formats(source, target, selection, state)
    described: set[bytes] = set()
    for folder, fmt in formats:
        if selection.prompts is None:
            items = _listed(source, folder, fmt, selection, state)
        else:
            items = _of_prompts(source, fmt, selection.prompts)
        while batch := list(islice(items, _BATCH)):
            state.count(found=len(batch))
            if describe and fmt.namespace.digest not in described:
                _describe(target, fmt, state)
                described.add(fmt.namespace.digest)
            refs = [(item.fmt, ObjectRef(item.chunk, item.parsed.shard)) for item in batch]
            for item, answer in zip(batch, _probe(target, refs), strict=True):
                # If the probe gave no answer, the write will detect an existing object.
                yield replace(item, present=answer is Presence.PRESENT)
        complete.append(folder)
        _check_there(source, [folder])


def _probe(shelf: Shelf, refs: Sequence[tuple[ObjectFormat, ObjectRef]]) -> list[Presence]:
    """Probe objects of several kinds of one namespace."""
    return NamespaceView.probe_together(
        [
            (shelf.view(fmt), [ref for _, ref in group])
            for fmt, group in groupby(refs, key=itemgetter(0))
        ]
    )


def _check_there(source: Shelf, folders: Sequence[str]) -> None:
    """Raise if a folder vanished from the source: its listing would just end, without an error."""
    there = set(source.backend.folders())
    for folder in folders:
        if folder not in there:
            raise StorageError(
                f"{source.url}: {folder} vanished while it was copied; check that the source is "
                "still mounted, and start it again"
            )


def _describe(target: Shelf, fmt: ObjectFormat, state: Work[CopyReport]) -> None:
    for pause in PAUSES:
        try:
            return target.view(fmt).describe()
        except TransientStorageError:
            if state.attempts.stop.wait(pause):
                return None
    return target.view(fmt).describe()


def _formats(
    source: Shelf, target: Shelf, selection: Selection, state: Work[CopyReport]
) -> list[tuple[str, ObjectFormat]]:
    found = []
    infos = list(source.namespaces())
    known = [info.folder for info in infos]
    wanted = {
        folder for name in selection.namespaces for folder in folders_named(name, known, source.url)
    }
    for info in infos:
        if (wanted and info.folder not in wanted) or not selection.has_model(info.folder):
            continue
        namespace, problem = info.namespace, info.problem
        if namespace is None:
            # In a partly copied tree the record may be in another folder of the namespace, or at
            # the target.
            tag = parse_namespace_folder(info.folder)
            namespace = next(
                (
                    other.namespace
                    for other in (*infos, *target.namespaces())
                    if other.namespace is not None and other.namespace.digest.hex()[:16] == tag
                ),
                None,
            )
        try:
            if namespace is None:
                raise ConfigError(str(problem))
            found.append((info.folder, ObjectFormat(namespace)))
        except ConfigError as error:
            state.problem(
                "skipped_namespaces",
                info.folder,
                f"its objects cannot be verified, and are left out: {error}; an engine that"
                " stores to it writes a new namespace.json",
            )
    slugs = {folder[:-17] for folder in known}
    if missing := [slug for slug in selection.slugs if slug not in slugs]:
        raise ConfigError(
            f"no namespace of a model {missing[0]} on {source.url}; it has: {shown(known)}"
        )
    return found


def _listed(
    source: Shelf, folder: str, fmt: ObjectFormat, selection: Selection, state: Work[CopyReport]
) -> Iterator[_ToCopy]:
    for row in source.objects(folder):
        if not selection.has_time(row.mtime):
            continue
        try:
            own = fmt.of_name(row.parsed)
            chunk = own.named_chunk(row.parsed)
        except ObjectNameError as error:
            state.count(found=1)
            state.problem("bad", row.name, str(error))
            continue
        yield _ToCopy(own, row.name, row.parsed, chunk, row.size)


def _of_prompts(source: Shelf, fmt: ObjectFormat, prompts: Sequence[Prompt]) -> Iterator[_ToCopy]:
    """Yield the objects of the prompts that the source has, of all kinds."""
    wanted = (
        (own, ObjectRef(chunk, shard))
        for chunk in prompt_chunks(fmt, prompts)
        for own in map(fmt.of, fmt.kinds)
        for shard in range(own.shards)
    )
    while batch := list(islice(wanted, _BATCH)):
        for (own, (chunk, shard)), answer in zip(batch, _probe(source, batch), strict=True):
            # Objects of the wrong size are yielded too, so that they are reported as bad.
            if answer is Presence.MISSING:
                continue
            name = object_name(chunk, shard, own.shards, own.kind)
            parsed = parse_object_name(name)
            assert parsed is not None
            yield _ToCopy(
                own,
                f"{fmt.namespace.folder}/{name}",
                parsed,
                chunk,
                own.object_size(shard),
                parent_known=True,
            )


# --------------------------------------------------------------------------- copying


class _Copier:
    """Copies objects; called by any of the threads."""

    def __init__(self, source: Shelf, target: Shelf, state: Work[CopyReport]) -> None:
        self._source = source
        self._target = target
        self._state = state
        self._own = threading.local()
        self._large = threading.Lock()

    def _buffer(self, size: int) -> memoryview:
        """Return this thread's buffer, which each of its objects uses again."""
        buffer = getattr(self._own, "buffer", b"")
        if len(buffer) < size:
            buffer = self._own.buffer = bytearray(size)
        return memoryview(buffer)[:size]

    def copy(self, item: _ToCopy) -> None:
        """Copy one object, and count it."""
        size = item.fmt.object_size(item.parsed.shard, item.parsed.tail_tokens)
        if size > _MOST_BYTES:
            text = f"it cannot be copied: {size} bytes, more than {_MOST_BYTES}"
            self._state.problem("failed", item.name, text)
        elif size > _LARGE_BYTES:
            with self._large:
                self._copy_through(item, memoryview(bytearray(size)))
        else:
            self._copy_through(item, self._buffer(size))

    def _copy_through(self, item: _ToCopy, buffer: memoryview) -> None:
        bad = False
        if item.present:
            try:
                self._read(self._target, item, buffer)
            except ObjectMissingError:
                pass
            except BadObjectError:
                bad = True
            else:
                return self._state.count(existed=1)
        chunk = self._read(self._source, item, buffer)
        ref = ObjectRef(chunk, item.parsed.shard)
        try:
            result = self._target.view(item.fmt).publish(ref, buffer, suspect=bad)
        except NotRegularError as error:
            return self._state.problem(
                "failed",
                item.name,
                f"it cannot be published: {error}; remove it, then start the copy again",
            )
        if result.value == "existed":
            return self._state.count(existed=1)
        if result.value == "replaced":
            self._state.count(repaired=1)
        return _count_copied(self._state, item, len(buffer))

    @staticmethod
    def _read(shelf: Shelf, item: _ToCopy, buffer: memoryview) -> Chunk:
        chunk = shelf.view(item.fmt).load_named(item.parsed, buffer)
        if item.parent_known and chunk != item.chunk:
            item.fmt.verify_buffer(buffer, item.chunk, item.parsed.shard)
        return chunk
