"""Objects of chunks on one backend: write, probe, load, repair, list, delete.

Owns the rules about objects that are not what they should be: what counts as present, when a
bad one is replaced, when it is moved aside and how much of that is kept; the namespace's
description (``namespace.json``); and the search for a namespace's folder.

Contracts
---------
* Nothing here is decided from what another process wrote except after verification; a bad
  object costs a miss and is replaced only by a store of the same chunk.
* I/O errors (:class:`~kvshelf.errors.StorageError`) never delete, move or replace anything.
* A folder belongs to a namespace by the 16 hex at its end, whatever the slug before them.
  Objects are read from all such folders and written to one.
* A namespace that is written to is swept of what killed writers left: one folder at a time,
  seconds apart, after a write and on its thread.
* All methods block on storage and may be called from any number of threads, never from an
  engine's step thread.
"""

from __future__ import annotations

import contextlib
import logging
import os
import random
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum
from types import TracebackType
from typing import Any, Final, TypeVar

from kvshelf.backends import (
    NOT_REGULAR,
    Backend,
    Buffer,
    Deadlines,
    WriteMode,
    WriteResult,
    open_backend,
)
from kvshelf.backends.base import CHEAP_PROBE
from kvshelf.backends.guard import GuardedBackend
from kvshelf.chunkfile import (
    EmptyObject,
    ObjectFormat,
    ReaderLike,
    TruncatedObject,
    WrongSize,
)
from kvshelf.errors import (
    BadObjectError,
    ConfigError,
    NotRegularError,
    ObjectMissingError,
    ObjectNameError,
    PermanentStorageError,
    StorageError,
)
from kvshelf.identity import (
    Chunk,
    Namespace,
    ParsedName,
    object_name,
    parse_namespace_folder,
    parse_path,
)
from kvshelf.metrics import Counters

logger = logging.getLogger(__name__)

_T = TypeVar("_T")

#: An object of wrong size that changed within so many seconds may still be copied to its place.
COPY_SECONDS: Final = 60.0
#: Most entries kept in a namespace's ``.kvshelf/bad``.
BAD_COUNT: Final = 32
#: Most bytes kept there.
BAD_BYTES: Final = 1 << 30
#: Most bytes read of a ``namespace.json``.
_DESCRIPTION_BYTES: Final = 16 << 20

_DESCRIPTION: Final = "namespace.json"
_BAD: Final = ".kvshelf/bad"
#: Most folders of one namespace that are looked into: each costs a round of probes.
_MAX_FOLDERS: Final = 8
_FOLDERS_SECONDS: Final = 60.0
_NO_FOLDER_SECONDS: Final = 5.0
_DESCRIPTION_SECONDS: Final = 60.0
#: What killed writers leave behind is removed when nothing has changed it for so long.
_SWEEP_AGE: Final = 3600.0
#: Seconds from one folder that is swept to the next, and from one round to the next.
_SWEEP_SECONDS: Final = 10.0
_SWEEP_ROUND_SECONDS: Final = 3600.0
_PROBE_LOG_SECONDS: Final = 60.0
#: Ways to be bad that a file of the right size does not have.
_WRONG_SIZE_OR_KIND: Final = (EmptyObject, TruncatedObject, WrongSize, NotRegularError)


class Presence(Enum):
    """What a probe found in an object's place; all but PRESENT are misses for a load."""

    MISSING = "missing"
    PRESENT = "present"
    WRONG_SIZE = "wrong size"
    NOT_REGULAR = "not a regular file"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class NamespaceInfo:
    """One namespace folder of a shelf.

    Attributes
    ----------
    folder : str
        Its name.
    namespace : Namespace or None
        What its ``namespace.json`` says; None when that is missing or does not fit the folder.
    problem : str or None
        Why `namespace` is None.
    """

    folder: str
    namespace: Namespace | None
    problem: str | None = None


@dataclass(frozen=True, slots=True)
class ShelfObject:
    """One object in a listing.

    Attributes
    ----------
    name : str
        Relative to the shelf's root.
    parsed : ParsedName
        What the name says, the namespace folder included.
    size : int
        Bytes.
    mtime, atime : float
        Seconds since the epoch; `atime` is None where the storage has none.
    """

    name: str
    parsed: ParsedName
    size: int
    mtime: float
    atime: float | None = None


@dataclass(slots=True)
class _Known:
    """What a shelf remembers of one namespace; races only repeat a look at the storage."""

    folders: tuple[str, ...]
    sizes: tuple[int, ...]
    #: Ends of the names of a chunk's objects, by shard.
    ends: tuple[str, ...]
    folders_until: float = 0.0
    described_until: float = 0.0
    #: Folders of this round that are not swept yet; taken from the end.
    unswept: list[str] = field(default_factory=list)
    swept_until: float = 0.0
    tail_sizes: dict[tuple[int, int], int] = field(default_factory=dict)


class Shelf:
    """A store of chunks: one backend, any number of namespaces.

    Parameters
    ----------
    backend : Backend
        Closed together with the shelf.
    counters : Counters, optional
        Gets the times of probes, reads, verifications and writes.
    deadlines : Deadlines, optional
        How long its calls may take; those of its properties when absent. Of no meaning for a
        backend that is guarded already.

    Attributes
    ----------
    backend : GuardedBackend
        `backend` itself, or around it: all calls have deadlines, and a storage that fails is
        given a rest.
    """

    def __init__(
        self,
        backend: Backend,
        counters: Counters | None = None,
        *,
        deadlines: Deadlines | None = None,
    ) -> None:
        self.backend = (
            backend if isinstance(backend, GuardedBackend) else GuardedBackend(backend, deadlines)
        )
        self._counters = Counters() if counters is None else counters
        self._known: dict[bytes, _Known] = {}
        self._next_probe_log = 0.0
        self._lock = threading.Lock()

    def __repr__(self) -> str:
        return f"Shelf({self.url!r})"

    def __enter__(self) -> Shelf:
        return self

    def __exit__(
        self,
        exc_type: type[BaseException] | None,
        exc: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        self.close()

    @property
    def url(self) -> str:
        """Where the shelf is, without secrets."""
        return self.backend.url

    @property
    def read_only(self) -> bool:
        """Whether writes are known to be refused, by option or by the storage."""
        return self.backend.properties.read_only

    @property
    def available(self) -> bool:
        """Whether the storage is asked at all: False while it is given a rest."""
        return not self.backend.reads.stopped

    def close(self) -> None:
        """Release what the backend holds. Idempotent."""
        self.backend.close()

    # ------------------------------------------------------------------------------------ naming

    def _of(self, fmt: ObjectFormat) -> _Known:
        digest = fmt.namespace.digest
        known = self._known.get(digest)
        if known is None:
            known = _Known(
                folders=(fmt.namespace.folder,),
                sizes=tuple(fmt.object_size(shard) for shard in range(fmt.shards)),
                ends=tuple(f"{shard}of{fmt.shards}.safetensors" for shard in range(fmt.shards)),
            )
            with self._lock:
                known = self._known.setdefault(digest, known)
        return known

    def _find_folders(self, fmt: ObjectFormat, known: _Known) -> tuple[str, ...]:
        """Folders of the namespace, the one to write to first."""
        now = time.monotonic()
        if now < known.folders_until:
            return known.folders
        if known.folders_until:
            # One caller looks, the others go on. So do all where it fails: what is read and probed
            # well is not to be given a rest because each of them asks for a listing in vain.
            known.folders_until = now + _FOLDERS_SECONDS
        own = fmt.namespace.folder
        tag = fmt.namespace.digest.hex()[:16]
        try:
            found = [f for f in self.backend.folders() if parse_namespace_folder(f) == tag]
        except PermanentStorageError:
            # Listing may be forbidden where reading is not.
            found = [own]
        except StorageError:
            if known.folders_until:
                return known.folders
            raise
        if own in found:
            found.remove(own)
            found.insert(0, own)
        known.folders = tuple(found[:_MAX_FOLDERS]) or (own,)
        known.folders_until = now + (_FOLDERS_SECONDS if found else _NO_FOLDER_SECONDS)
        return known.folders

    def name(self, fmt: ObjectFormat, chunk: Chunk, shard: int) -> str:
        """Name, relative to the shelf's root, under which a store writes this object."""
        folder = self._find_folders(fmt, self._of(fmt))[0]
        return f"{folder}/{object_name(chunk, shard, fmt.shards)}"

    @staticmethod
    def _size(fmt: ObjectFormat, known: _Known, chunk: Chunk, shard: int) -> int:
        if not chunk.tail:
            return known.sizes[shard]
        key = (shard, chunk.tokens)
        size = known.tail_sizes.get(key)
        if size is None:
            size = known.tail_sizes[key] = fmt.object_size(shard, chunk.tokens)
        return size

    # ------------------------------------------------------------------------------------ probes

    def probe(self, fmt: ObjectFormat, items: Sequence[tuple[Chunk, int]]) -> list[Presence]:
        """Tell for many (chunk, shard) pairs what stands in their objects' places.

        Parameters
        ----------
        fmt : ObjectFormat
            Format of the namespace's objects.
        items : Sequence of (Chunk, int)
            Cheapest when shards of one chunk follow one another.

        Returns
        -------
        list of Presence
            One for each item, in order. Storage trouble is ERROR, never an exception.
        """
        known = self._of(fmt)
        names: list[str] = []
        sizes: list[int] = []
        last: Chunk | None = None
        start = ""
        cut = len(known.ends[0])
        for chunk, shard in items:
            if chunk is not last:
                # Only the end of the name differs between the shards of a chunk.
                start, last = object_name(chunk, 0, fmt.shards)[:-cut], chunk
            names.append(start + known.ends[shard])
            sizes.append(self._size(fmt, known, chunk, shard))
        try:
            folders = self._find_folders(fmt, known)
        except StorageError as exc:
            self._say_unseen(exc)
            return [Presence.ERROR] * len(names)
        answers = self._probe(folders[0], names, sizes)
        for folder in folders[1:]:
            open_ = [i for i, answer in enumerate(answers) if answer is not Presence.PRESENT]
            if not open_:
                break
            others = self._probe(folder, [names[i] for i in open_], [sizes[i] for i in open_])
            for i, other in zip(open_, others, strict=True):
                if other is Presence.PRESENT:
                    answers[i] = other
        return answers

    def _probe(self, folder: str, names: list[str], sizes: list[int]) -> list[Presence]:
        start = folder + "/"
        answers: list[Presence] = []
        begin = time.perf_counter()
        stats = self.backend.stat([start + name for name in names])
        self._counters.observe("probe", time.perf_counter() - begin)
        error: StorageError | None = None
        for found, size in zip(stats, sizes, strict=True):
            if found == size:
                answers.append(Presence.PRESENT)
            elif found is None:
                answers.append(Presence.MISSING)
            elif found is NOT_REGULAR:
                answers.append(Presence.NOT_REGULAR)
            elif isinstance(found, int):
                answers.append(Presence.WRONG_SIZE)
            else:
                error = found
                answers.append(Presence.ERROR)
        if error is not None:
            self._say_unseen(error)
        return answers

    def _say_unseen(self, error: StorageError) -> None:
        """Say now and then that the storage could not answer probes."""
        now = time.monotonic()
        # What passes by itself the guard speaks of, if it lasts.
        if error.retryable or now < self._next_probe_log:
            logger.debug("a probe failed: %s", error)
        else:
            self._next_probe_log = now + _PROBE_LOG_SECONDS
            logger.warning("what is on the shelf cannot be seen, and counts as missing: %s", error)

    def present(
        self, fmt: ObjectFormat, chunks: Sequence[Chunk], shards: Sequence[int] | None = None
    ) -> list[bool]:
        """Tell for each of `chunks` whether all its objects are there with the right size.

        Parameters
        ----------
        fmt : ObjectFormat
            Format of the namespace's objects.
        chunks : Sequence of Chunk
            The chunks.
        shards : Sequence of int, optional
            Look at these shards only; default all.
        """
        wanted = range(fmt.shards) if shards is None else shards
        step = len(wanted)
        answers = self.probe(fmt, [(chunk, shard) for chunk in chunks for shard in wanted])
        there = Presence.PRESENT
        return [
            all(answer is there for answer in answers[i * step : i * step + step])
            for i in range(len(chunks))
        ]

    # ------------------------------------------------------------------------------------ writes

    def write(
        self,
        fmt: ObjectFormat,
        chunk: Chunk,
        shard: int,
        buffers: Sequence[Buffer],
        *,
        mode: WriteMode = "create",
    ) -> WriteResult:
        """Publish one object.

        Parameters
        ----------
        fmt : ObjectFormat
            Format of the namespace's objects.
        chunk, shard : Chunk, int
            Which object.
        buffers : Sequence of Buffer
            The whole file, header included, in pieces.
        mode : {"create", "replace"}
            ``create`` leaves an object of the right size alone; one of wrong size is replaced,
            and something that is not a regular file moved aside.

        Returns
        -------
        WriteResult
            CREATED, EXISTED, or REPLACED when something else had stood there.

        Raises
        ------
        ValueError
            If `buffers` do not have the object's size together.
        StorageError
            If the storage refused or failed; see its subclasses.
        """
        known = self._of(fmt)
        size = self._size(fmt, known, chunk, shard)
        given = sum(memoryview(buffer).nbytes for buffer in buffers)
        if given != size:
            raise ValueError(f"buffers hold {given} bytes: expected {size}, the object's size")
        begin = time.perf_counter()
        folder = self._find_folders(fmt, known)[0]
        self._describe(fmt, known, folder)
        name = f"{folder}/{object_name(chunk, shard, fmt.shards)}"
        result = self._write(folder, name, buffers, size, mode)
        self._counters.observe("publish", time.perf_counter() - begin)
        self._sweep(known, folder)
        return result

    def _write(
        self, folder: str, name: str, buffers: Sequence[Buffer], size: int, mode: WriteMode
    ) -> WriteResult:
        if mode == "replace":
            try:
                return self.backend.write(name, buffers, "replace")
            except NotRegularError:
                self._set_aside(folder, name)
                self.backend.write(name, buffers, "replace")
                return WriteResult.REPLACED
        result = self.backend.write(name, buffers)
        if result is not WriteResult.EXISTED:
            return result
        found = self.backend.stat([name])[0]
        if found == size:
            return result
        if isinstance(found, StorageError):
            raise found
        if found is None:
            return self.backend.write(name, buffers)
        if found is NOT_REGULAR:
            with self._best_effort():
                self._set_aside(folder, name)
            self.backend.write(name, buffers, "replace")
            return WriteResult.REPLACED
        # While its size is no evidence of damage, replacing it is right all the same: a copier
        # goes on with a file that has no name any more.
        if self.backend.properties.sets_aside and self._is_surely_of_wrong_size(name):
            with self._best_effort():
                self._set_aside(folder, name)
        self.backend.write(name, buffers, "replace")
        return WriteResult.REPLACED

    def repair(
        self, fmt: ObjectFormat, chunk: Chunk, shard: int, buffers: Sequence[Buffer]
    ) -> WriteResult:
        """Publish an object whose earlier version was found bad.

        What stands in its place is verified again first, and replaced only if it really is
        bad: another engine may have been quicker.

        Parameters
        ----------
        fmt, chunk, shard, buffers
            As for :meth:`write`.

        Returns
        -------
        WriteResult
            EXISTED when the object there is good, REPLACED when it was bad, CREATED when
            there was none.

        Raises
        ------
        StorageError
            If the storage failed, also while verifying: nothing is replaced then.
        """
        known = self._of(fmt)
        scratch = memoryview(bytearray(self._size(fmt, known, chunk, shard)))
        try:
            self._read(fmt, chunk, shard, scratch)
        except BadObjectError as bad:
            with self._best_effort():
                self.set_bad_aside(fmt, chunk, shard, bad)
            self.write(fmt, chunk, shard, buffers, mode="replace")
            return WriteResult.REPLACED
        except ObjectMissingError:
            return self.write(fmt, chunk, shard, buffers)
        return WriteResult.EXISTED

    def describe(self, fmt: ObjectFormat) -> None:
        """Publish the namespace's description if it is not there; a write does so as well.

        Raises
        ------
        StorageError
            If the storage refused or failed.
        """
        known = self._of(fmt)
        self._describe(fmt, known, self._find_folders(fmt, known)[0])

    def _describe(self, fmt: ObjectFormat, known: _Known, folder: str) -> None:
        """Publish the namespace's description if it is not there (any more)."""
        if time.monotonic() < known.described_until:
            return
        name = f"{folder}/{_DESCRIPTION}"
        encoded = fmt.namespace.encoded
        dear = self.backend.properties.probe_cost >= CHEAP_PROBE
        # Where probes are dear the first look is left to the create: a backend learns from it.
        first = dear and not known.described_until
        if first or self.backend.stat([name])[0] != len(encoded):
            self._write(folder, name, [encoded], len(encoded), "create")
        if dear:
            known.described_until = time.monotonic() + _DESCRIPTION_SECONDS

    def _sweep(self, known: _Known, namespace_folder: str) -> None:
        """Now and then, remove what killed writers left in one more folder of a namespace."""
        if not self.backend.properties.temporaries:
            return
        with self._lock:
            now = time.monotonic()
            if now < known.swept_until:
                return
            if not known.unswept:
                known.unswept.append(namespace_folder)
            folder = known.unswept.pop()
            known.swept_until = now + _SWEEP_SECONDS
        try:
            self.backend.sweep(
                folder,
                _SWEEP_AGE,
                lambda name: name == _DESCRIPTION or parse_path(f"{folder}/{name}") is not None,
            )
            # Objects lie in <namespace>/<group>/<2 hex>.
            inner = [] if folder.count("/") == 2 else list(self.backend.folders(folder))
        except StorageError as exc:
            logger.debug("temporaries could not be removed: %s", exc)
            return
        # Of many engines that begin a round at once each begins elsewhere.
        random.shuffle(inner)
        with self._lock:
            known.unswept += [f"{folder}/{name}" for name in inner]
            if not known.unswept:
                known.swept_until = now + _SWEEP_ROUND_SECONDS

    # ------------------------------------------------------------------------------------- loads

    def load(self, fmt: ObjectFormat, chunk: Chunk, shard: int, image: memoryview) -> None:
        """Read and verify one object.

        Parameters
        ----------
        fmt : ObjectFormat
            Format of the namespace's objects.
        chunk, shard : Chunk, int
            Which object.
        image : memoryview
            Writable, of the object's size; holds the whole file afterwards. After an
            exception its content means nothing.

        Raises
        ------
        ObjectMissingError
            If there is no such object.
        BadObjectError
            If it is bad, also when read again through a fresh open. It was moved aside where
            the storage can do that and the shelf is writable.
        StorageError
            If the storage failed; the object may be good.
        """
        try:
            self._read(fmt, chunk, shard, image)
        except BadObjectError as bad:
            with self._best_effort():
                self.set_bad_aside(fmt, chunk, shard, bad)
            raise

    def load_named(self, fmt: ObjectFormat, parsed: ParsedName, image: memoryview) -> Chunk:
        """Read and verify one object of which only the name is known; nothing is moved aside.

        Parameters
        ----------
        fmt, image
            As for :meth:`load`.
        parsed : ParsedName
            The object's name; its namespace folder is of no meaning.

        Returns
        -------
        Chunk
            Its parent is the one that the object names, see :meth:`ObjectFormat.read_named`.

        Raises
        ------
        ObjectNameError
            If no object of this namespace has such a name.
        ObjectMissingError, BadObjectError, StorageError
            As for :meth:`load`.
        """
        name = object_name(fmt.named_chunk(parsed), parsed.shard, fmt.shards)
        return self._read_from(
            fmt, name, len(image), lambda reader: fmt.read_named(reader, parsed, image)
        )

    def _read(self, fmt: ObjectFormat, chunk: Chunk, shard: int, image: memoryview) -> None:
        name = object_name(chunk, shard, fmt.shards)
        self._read_from(fmt, name, len(image), lambda reader: fmt.read(reader, chunk, shard, image))

    def _read_from(
        self, fmt: ObjectFormat, name: str, size: int, read: Callable[[ReaderLike], _T]
    ) -> _T:
        folders = self._find_folders(fmt, self._of(fmt))
        for folder in folders[:-1]:
            with contextlib.suppress(ObjectMissingError):
                return self._read_twice(f"{folder}/{name}", size, read)
        return self._read_twice(f"{folders[-1]}/{name}", size, read)

    def _read_twice(self, name: str, size: int, read: Callable[[ReaderLike], _T]) -> _T:
        try:
            return self._read_once(name, size, read)
        except BadObjectError:
            # Caches of network filesystems show old sizes and contents to an old open.
            return self._read_once(name, size, read)

    def _read_once(self, name: str, size: int, read: Callable[[ReaderLike], _T]) -> _T:
        begin = time.monotonic()
        # Not known before a storage is open that is opened late.
        least = self.backend.properties.part_bytes
        large = least and size >= least
        backend = self.backend
        with backend.open_large(name, size) if large else backend.open(name) as reader:
            result = read(reader)
            end = time.monotonic()
        self._counters.observe("read", reader.seconds)
        self._counters.observe("verify", end - begin - reader.seconds)
        return result

    # ------------------------------------------------------------------------------- bad objects

    def set_bad_aside(
        self, fmt: ObjectFormat, chunk: Chunk, shard: int, bad: BadObjectError
    ) -> bool:
        """Move an object that was found bad to ``.kvshelf/bad`` of its namespace folder.

        Does nothing where the storage cannot move things or takes no writes. A file of wrong
        size stays where it is, to be replaced by a store, when it changed within the last minute
        (it may still be copied to its place) and where caches of the storage may show the size
        of an earlier file: what stands there now may be good. So does one that was found bad for
        its size or kind and is a file of the right size now: another stands in its place. Of
        what was moved there the newest 32 entries and 1 GiB are kept.

        Parameters
        ----------
        fmt, chunk, shard : ObjectFormat, Chunk, int
            Which object.
        bad : BadObjectError
            What was found wrong with it.

        Returns
        -------
        bool
            Whether something was moved.

        Raises
        ------
        StorageError
            If the storage failed.
        """
        properties = self.backend.properties
        if properties.read_only or not properties.sets_aside:
            return False
        known = self._of(fmt)
        for folder in self._find_folders(fmt, known):
            name = f"{folder}/{object_name(chunk, shard, fmt.shards)}"
            found = self.backend.stat([name])[0]
            if found is None:
                continue
            if isinstance(found, StorageError):
                raise found
            if isinstance(found, int):
                if found != self._size(fmt, known, chunk, shard):
                    if not self._is_surely_of_wrong_size(name):
                        return False
                elif isinstance(bad, _WRONG_SIZE_OR_KIND):
                    return False
            return self._set_aside(folder, name)
        return False

    @staticmethod
    @contextlib.contextmanager
    def _best_effort() -> Iterator[None]:
        """Go on when a bad object cannot be moved aside: keeping it is a courtesy."""
        try:
            yield
        except StorageError as exc:
            logger.debug("a bad object could not be moved aside: %s", exc)

    def _is_surely_of_wrong_size(self, name: str) -> bool:
        """Whether a wrong size that was seen shows that the object is bad."""
        if self.backend.properties.cache_seconds:
            return False
        info = self.backend.info(name)
        return info is None or abs(time.time() - info.mtime) >= COPY_SECONDS

    def _set_aside(self, folder: str, name: str) -> bool:
        # The time makes names sort by age, which is how trim() finds the oldest.
        bad = f"{folder}/{_BAD}"
        target = f"{bad}/{time.time_ns():020d}-{os.urandom(4).hex()}-{name.rpartition('/')[2]}"
        moved = self.backend.set_aside(name, target)
        if moved:
            self.backend.trim(bad, BAD_COUNT, BAD_BYTES)
        return moved

    # ---------------------------------------------------------------------------------- listings

    def namespaces(self) -> Iterator[NamespaceInfo]:
        """Yield the namespace folders of the shelf, by name.

        Raises
        ------
        StorageError
            If the storage failed; trouble with one description is that entry's `problem`.
        """
        for folder in self.backend.folders():
            tag = parse_namespace_folder(folder)
            if tag is None:
                continue
            try:
                namespace = self._read_description(folder)
            except ObjectMissingError:
                yield NamespaceInfo(folder, None, f"it has no {_DESCRIPTION}")
            except (StorageError, ConfigError, BadObjectError, ValueError) as exc:
                yield NamespaceInfo(folder, None, f"its {_DESCRIPTION} cannot be used: {exc}")
            else:
                if namespace.digest.hex()[:16] == tag:
                    yield NamespaceInfo(folder, namespace)
                else:
                    problem = (
                        f"its {_DESCRIPTION} belongs to the digest {namespace.digest.hex()[:16]}"
                    )
                    yield NamespaceInfo(folder, None, problem)

    def _read_description(self, folder: str) -> Namespace:
        with self.backend.open(f"{folder}/{_DESCRIPTION}") as reader:
            if reader.size > _DESCRIPTION_BYTES:
                raise ValueError(f"found {reader.size} bytes, expected a few thousand")
            data = bytearray(reader.size)
            count = reader.read_into(memoryview(data), 0)
        return Namespace.from_bytes(bytes(data[:count]), folder[:-17])

    def objects(self, namespace_folder: str | None = None) -> Iterator[ShelfObject]:
        """Stream the objects of one namespace folder or of all; foreign files are skipped.

        Parameters
        ----------
        namespace_folder : str, optional
            Name of the folder, as in :class:`NamespaceInfo`.

        Raises
        ------
        ObjectNameError
            If `namespace_folder` is not the name of a namespace folder.
        StorageError
            If the storage failed.
        """
        if namespace_folder is None:
            folders = [f for f in self.backend.folders() if parse_namespace_folder(f) is not None]
        elif parse_namespace_folder(namespace_folder) is None:
            raise ObjectNameError(
                f"{namespace_folder!r} is not a namespace folder: expected <slug>-<16 hex>"
            )
        else:
            folders = [namespace_folder]
        for folder in folders:
            for info in self.backend.list(folder):
                parsed = parse_path(info.name)
                if parsed is not None:
                    yield ShelfObject(info.name, parsed, info.size, info.mtime, info.atime)

    def delete(self, name: str) -> bool:
        """Delete one object by its name in a listing; False when it was not there.

        Raises
        ------
        ObjectNameError
            If `name` is not that of an object: nothing else is ever deleted.
        StorageError
            If the storage failed.
        """
        if parse_path(name) is None:
            raise ObjectNameError(f"{name!r} is not the name of an object of a shelf")
        return self.backend.delete(name)


def open_shelf(
    url: str | os.PathLike[str],
    *,
    storage_options: Mapping[str, Any] | None = None,
    read_only: bool = False,
    counters: Counters | None = None,
    deadlines: Mapping[str, float] | None = None,
) -> Shelf:
    """Open the shelf at `url`.

    Parameters
    ----------
    url : str or os.PathLike
        A directory or a URL, see :func:`kvshelf.backends.open_backend`.
    storage_options : Mapping, optional
        Options of the storage.
    read_only : bool
        Refuse every change.
    counters : Counters, optional
        Gets the times of probes, reads, verifications and writes.
    deadlines : Mapping, optional
        Fields of :class:`~kvshelf.backends.Deadlines` that replace those of the storage.

    Raises
    ------
    ConfigError
        If the URL or the options cannot be used.
    StorageError
        If the storage could not be opened.

    Examples
    --------
    >>> with open_shelf("memory://example") as shelf:
    ...     list(shelf.objects())
    []
    """
    backend = open_backend(url, storage_options=storage_options, read_only=read_only)
    wanted = replace(backend.properties.deadlines, **(deadlines or {}))
    return Shelf(backend, counters, deadlines=wanted)
