"""Copy objects from one shelf to another, every one of them verified on the way.

Owns which objects a copy is about (:class:`Selection`), what happens to each, and the counts
of it (:class:`CopyReport`). How an object is published and repaired is the shelf's business.

Contracts
---------
* Nothing is published that was not verified: header, size and the hash of every tensor. An
  object that fails is left out, counted and named.
* An object that the target has with the right size is left alone, its times included, unless
  it is to be verified and is bad; what has a wrong size is replaced.
* A copy that was broken off, by whatever means, goes on when it is started again: what is
  published is whole, and is skipped.
* The source is never changed. Objects that vanish from it meanwhile are no failure; a namespace
  whose folder vanishes is an error, as the source may have been unmounted.
* Only objects and ``namespace.json`` are copied; marks, quarantine and foreign files are not.
  A namespace goes to the folder that it has at the target, whatever the slug of that is.
* Storage trouble with one object is retried with growing pauses, then counted and named. The
  copy ends with an error when the target takes no writes, has no room, or when nothing at all
  succeeds any more.

Threads
-------
:func:`copy_shelf` lists and probes on the calling thread and copies on daemon threads of its
own, each with one buffer that it uses again. `on_progress` and `on_problem` are called on any
of them, one at a time.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Final, TypeVar

from kvshelf.chunkfile import ObjectFormat
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    NoSpaceStorageError,
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    ReadOnlyStorageError,
    StorageError,
    TransientStorageError,
)
from kvshelf.identity import (
    Chunk,
    KeyChain,
    ParsedName,
    group_of_salt,
    object_name,
    parse_namespace_folder,
)
from kvshelf.prompts import Prompt
from kvshelf.shelf import Presence, Shelf

#: Objects that are looked for at the target at once.
_BATCH: Final = 256
_MOST_JOBS: Final = 16
_QUEUED: Final = 1024
#: Seconds between the tries of one object.
_PAUSES: Final = (0.25, 0.5, 1.0, 2.0, 4.0, 8.0)
#: Seconds that a copy which is broken off waits for the objects it is at.
_END_SECONDS: Final = 5.0

_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Selection:
    """Which objects of a shelf to copy; all of them by default.

    Attributes
    ----------
    namespaces : Sequence of str
        Folders of namespaces, or the 16 hexadecimal digits at their ends.
    slugs : Sequence of str
        Namespaces whose folder begins with one of these.
    since, until : float or None
        Seconds since the epoch between which an object must have been written.
    prompts : Sequence of Prompt or None
        Only the whole chunks of these prompts, which must be given as token ids. They are
        looked for by their keys; nothing is listed.
    """

    namespaces: Sequence[str] = ()
    slugs: Sequence[str] = ()
    since: float | None = None
    until: float | None = None
    prompts: Sequence[Prompt] | None = None

    def has_folder(self, folder: str) -> bool:
        """Whether a namespace folder is selected."""
        tag = folder[-16:]
        if self.namespaces and not {folder, tag} & set(self.namespaces):
            return False
        return not self.slugs or folder[:-17] in self.slugs

    def has_time(self, mtime: float) -> bool:
        """Whether an object that was written then is selected."""
        return (self.since is None or mtime >= self.since) and (
            self.until is None or mtime < self.until
        )


@dataclass(slots=True)
class CopyReport:
    """What became of the objects of a copy. Objects, but for `bytes` and `seconds`.

    Attributes
    ----------
    found : int
        Selected at the source.
    copied : int
        Published by this copy; with a dry run, those that would be.
    repaired : int
        Of these, the ones in whose place a bad object stood.
    existed : int
        At the target already.
    bad : int
        Not copied: the source's object is not what it must be.
    failed : int
        Not copied: the storage failed, or the target has a folder in its place.
    gone : int
        Vanished from the source before they were read.
    skipped_namespaces : int
        Left out as a whole, since nothing says what their objects must be.
    bytes : int
        Of the objects in `copied`.
    seconds : float
    """

    found: int = 0
    copied: int = 0
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
        """Objects that are dealt with."""
        return self.copied + self.existed + self.bad + self.failed + self.gone

    @property
    def complete(self) -> bool:
        """Whether the target now has all that was selected."""
        return not (self.bad or self.failed or self.skipped_namespaces)


@dataclass(frozen=True, slots=True)
class _Item:
    """One selected object; `chunk` has its parent only if `parent_known`."""

    fmt: ObjectFormat
    name: str
    parsed: ParsedName
    chunk: Chunk
    size: int
    parent_known: bool = False
    present: bool = False


@dataclass(slots=True)
class _State:
    """What the threads of one copy share."""

    report: CopyReport
    on_progress: Callable[[CopyReport], None]
    on_problem: Callable[[str, str], None]
    #: Of namespaces at the source.
    folders: list[str] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)
    stop: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    successes: int = 0

    def count(self, name: str, more: int = 1, nbytes: int = 0) -> None:
        with self.lock:
            setattr(self.report, name, getattr(self.report, name) + more)
            self.report.bytes += nbytes
            self.on_progress(self.report)

    def problem(self, kind: str, name: str, text: str) -> None:
        with self.lock:
            setattr(self.report, kind, getattr(self.report, kind) + 1)
            self.on_problem(name, text)
            self.on_progress(self.report)

    def end(self, error: BaseException) -> None:
        with self.lock:
            if self.error is None:
                self.error = error
        self.stop.set()


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
        Where from and where to. The source had best been opened read-only.
    selection : Selection
        Which objects.
    jobs : int, optional
        Objects copied at once; by default what helps both storages, at most 16.
    verify_existing : bool
        Read and verify what the target has already, and replace what is bad.
    dry_run : bool
        Only count; the target is not changed, and no object is read.
    report : CopyReport, optional
        Is counted in, for those who look at it when the copy was broken off.
    on_progress : Callable
        Called with the report whenever it has changed.
    on_problem : Callable
        Called with a name and what is wrong with it.

    Returns
    -------
    CopyReport

    Raises
    ------
    ConfigError
        If the selection names a namespace or a model that the source does not have.
    StorageError
        If a shelf cannot be listed, a namespace vanishes from the source, or the target takes
        no objects.
    """
    begin = time.monotonic()
    report = CopyReport() if report is None else report
    state = _State(report, on_progress, on_problem)
    count = jobs or max(
        1,
        min(
            _MOST_JOBS,
            source.backend.properties.concurrency,
            target.backend.properties.concurrency,
        ),
    )
    work: queue.Queue[_Item | None] = queue.Queue(_QUEUED)
    workers = [
        _Worker(source, target, state, work, verify_existing, f"kvshelf-copy-{number}")
        for number in range(0 if dry_run else count)
    ]
    for worker in workers:
        worker.thread.start()
    try:
        for item in _find(source, target, selection, state, describe=not dry_run):
            if dry_run:
                if item.present:
                    state.count("existed")
                else:
                    state.count("copied", nbytes=item.size)
            elif item.present and not verify_existing:
                state.count("existed")
            else:
                _put(work, item, state)
            if state.stop.is_set():
                break
        for _ in workers:
            _put(work, None, state)
        for worker in workers:
            worker.ended.wait()
        if state.error is None and report.gone:
            _check_there(source, state.folders)
    except BaseException:
        # An interrupt, or a listing that failed: what is being copied is left to end.
        state.stop.set()
        deadline = time.monotonic() + _END_SECONDS
        for worker in workers:
            worker.ended.wait(max(0.0, deadline - time.monotonic()))
        raise
    finally:
        report.seconds = time.monotonic() - begin
    if state.error is not None:
        raise state.error
    return report


def _put(work: queue.Queue[_Item | None], item: _Item | None, state: _State) -> None:
    while not state.stop.is_set():
        try:
            work.put(item, timeout=0.1)
        except queue.Full:
            continue
        return


# --------------------------------------------------------------------------- what to copy


def _find(
    source: Shelf, target: Shelf, selection: Selection, state: _State, *, describe: bool
) -> Iterator[_Item]:
    """Yield what is selected, with what the target has of it."""
    formats = _formats(source, target, selection, state)
    described: set[bytes] = set()
    for folder, fmt in formats:
        if selection.prompts is None:
            items = _listed(source, folder, fmt, selection, state)
        else:
            items = _of_prompts(source, fmt, selection.prompts)
        for batch in _batches(items, _BATCH):
            state.count("found", len(batch))
            if describe and fmt.namespace.digest not in described:
                _describe(target, fmt, state)
                described.add(fmt.namespace.digest)
            answers = target.probe(fmt, [(item.chunk, item.parsed.shard) for item in batch])
            for item, answer in zip(batch, answers, strict=True):
                # What could not be told now, the write will find out.
                yield replace(item, present=answer is Presence.PRESENT)
        state.folders.append(folder)
        _check_there(source, [folder])


def _check_there(source: Shelf, folders: Sequence[str]) -> None:
    """Raise if the source lost one of these folders: a listing ends quietly where one is gone."""
    there = set(source.backend.folders())
    for folder in folders:
        if folder not in there:
            raise StorageError(
                f"{source.url}: {folder} vanished while it was copied; check that the source is "
                "still mounted, and start it again"
            )


def _describe(target: Shelf, fmt: ObjectFormat, state: _State) -> None:
    for pause in _PAUSES:
        try:
            return target.describe(fmt)
        except TransientStorageError:
            if state.stop.wait(pause):
                return None
    return target.describe(fmt)


def _batches(items: Iterable[_T], size: int) -> Iterator[list[_T]]:
    iterator = iter(items)
    while batch := list(islice(iterator, size)):
        yield batch


def _formats(
    source: Shelf, target: Shelf, selection: Selection, state: _State
) -> list[tuple[str, ObjectFormat]]:
    found = []
    infos = list(source.namespaces())
    known = [info.folder for info in infos]
    for info in infos:
        if not selection.has_folder(info.folder):
            continue
        namespace, problem = info.namespace, info.problem
        if namespace is None:
            # A tree that was copied in part may have its description in another folder of the
            # namespace, or at the other end.
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
                " stores to it writes its namespace.json anew",
            )
    names = {part for folder in known for part in (folder, folder[-16:])}
    slugs = {folder[:-17] for folder in known}
    missing = [f"namespace {name}" for name in selection.namespaces if name not in names]
    missing += [f"namespace of a model {slug}" for slug in selection.slugs if slug not in slugs]
    if missing:
        there = ", ".join(known[:10]) or "none"
        raise ConfigError(f"no {missing[0]} on {source.url}; it has: {there}")
    return found


def _listed(
    source: Shelf, folder: str, fmt: ObjectFormat, selection: Selection, state: _State
) -> Iterator[_Item]:
    for row in source.objects(folder):
        if not selection.has_time(row.mtime):
            continue
        try:
            chunk = fmt.named_chunk(row.parsed)
        except ObjectNameError as error:
            state.count("found")
            state.problem("bad", row.name, str(error))
            continue
        yield _Item(fmt, row.name, row.parsed, chunk, row.size)


def _of_prompts(source: Shelf, fmt: ObjectFormat, prompts: Sequence[Prompt]) -> Iterator[_Item]:
    """Yield the objects of prompts that the source has."""
    seen: set[tuple[bytes, str]] = set()

    def wanted() -> Iterator[tuple[Chunk, int]]:
        for prompt in prompts:
            groups = ["_", group_of_salt(prompt.salt)] if prompt.salt else ["_"]
            for group in groups:
                chain = KeyChain(
                    fmt.namespace.digest, fmt.chunk_size, salt=prompt.salt, group=group
                )
                for chunk in chain.extend(prompt.tokens or ()):
                    if (chunk.key, group) not in seen:
                        seen.add((chunk.key, group))
                        for shard in range(fmt.shards):
                            yield chunk, shard

    for batch in _batches(wanted(), _BATCH):
        for (chunk, shard), answer in zip(batch, source.probe(fmt, batch), strict=True):
            # One of wrong size goes on, to be found bad and named.
            if answer is Presence.MISSING:
                continue
            yield _Item(
                fmt,
                f"{fmt.namespace.folder}/{object_name(chunk, shard, fmt.shards)}",
                ParsedName(chunk.key, chunk.index, shard, fmt.shards, group=chunk.group),
                chunk,
                fmt.object_size(shard),
                parent_known=True,
            )


# --------------------------------------------------------------------------- copying


class _Worker:
    """A thread that copies one object after the other."""

    def __init__(
        self,
        source: Shelf,
        target: Shelf,
        state: _State,
        work: queue.Queue[_Item | None],
        verify_existing: bool,
        name: str,
    ) -> None:
        self._source = source
        self._target = target
        self._state = state
        self._work = work
        self._verify_existing = verify_existing
        self._buffer = bytearray()
        # An interrupted join() takes the thread for ended, in some versions of Python.
        self.ended = threading.Event()
        self.thread = threading.Thread(target=self._run, name=name, daemon=True)

    def _run(self) -> None:
        try:
            self._work_off()
        finally:
            self.ended.set()

    def _work_off(self) -> None:
        state = self._state
        while not state.stop.is_set():
            try:
                item = self._work.get(timeout=0.1)
            except queue.Empty:
                continue
            if item is None:
                return
            try:
                self._copy_patiently(item)
            except BaseException as error:  # noqa: BLE001  raised again by the caller's thread
                state.end(error)

    def _copy_patiently(self, item: _Item) -> None:
        """Copy one object; repeat what may succeed later."""
        state = self._state
        before = state.successes
        pauses = iter(_PAUSES)
        while True:
            try:
                return self._copy(item)
            except ObjectMissingError:
                return state.count("gone")
            except (ReadOnlyStorageError, NoSpaceStorageError):
                raise
            except BadObjectError as error:
                return state.problem("bad", item.name, f"{type(error).__name__}: {error}")
            except StorageError as error:
                pause = next(pauses, None) if isinstance(error, TransientStorageError) else None
                if pause is not None and not state.stop.wait(pause):
                    continue
                if state.stop.is_set():
                    return None
                if state.successes == before and error.retryable:
                    # Nothing succeeded in all that time, on any thread.
                    raise
                return state.problem("failed", item.name, str(error))

    def _copy(self, item: _Item) -> None:
        size = item.fmt.object_size(item.parsed.shard, item.parsed.tail_tokens)
        if len(self._buffer) < size:
            self._buffer = bytearray(size)
        image = memoryview(self._buffer)[:size]
        bad = False
        if item.present:
            try:
                self._read(self._target, item, image)
            except ObjectMissingError:
                pass
            except BadObjectError:
                bad = True
            else:
                return self._succeeded("existed")
        chunk = self._read(self._source, item, image)
        publish = self._target.repair if bad else self._target.write
        try:
            result = publish(item.fmt, chunk, item.parsed.shard, [image])
        except NotRegularError as error:
            return self._state.problem(
                "failed",
                item.name,
                f"it cannot be published: {error}; remove it, then start the copy again",
            )
        if result.value == "existed":
            return self._succeeded("existed")
        if result.value == "replaced":
            self._state.count("repaired")
        return self._succeeded("copied", size)

    @staticmethod
    def _read(shelf: Shelf, item: _Item, image: memoryview) -> Chunk:
        chunk = shelf.load_named(item.fmt, item.parsed, image)
        if item.parent_known and chunk != item.chunk:
            item.fmt.verify_image(image, item.chunk, item.parsed.shard)
        return chunk

    def _succeeded(self, name: str, nbytes: int = 0) -> None:
        # Races only make a copy more patient.
        self._state.successes += 1
        self._state.count(name, nbytes=nbytes)
