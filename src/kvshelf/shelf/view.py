"""The objects of one namespace on a shelf: probe, publish, load, repair.

Owns what counts as present, when a bad object is replaced and when it is set aside
(:mod:`kvshelf.shelf.repairs` does both), the description, and the search for the namespace's
folders.

Contracts
---------
* Nothing here is decided from what another process wrote except after verification; a bad object
  costs a miss and is replaced only when the same object is published again.
* I/O errors (:class:`~kvshelf.errors.StorageError`) never delete, move or replace anything.
* A folder belongs to a namespace by the 16 hex at its end, whatever the slug before them. Objects
  are read from all such folders and written to one.
* All methods block on storage and may be called from any number of threads, never from an engine's
  step thread.
"""

from __future__ import annotations

import contextlib
import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from enum import Enum
from itertools import islice, repeat
from typing import Final, NamedTuple, Protocol, TypeAlias, TypeVar

from kvshelf.backends import NOT_REGULAR, BytesLike, StatResult, StatResults, Whole, WriteResult
from kvshelf.backends.base import delete_one
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import BadObjectError, ObjectMissingError, PermanentStorageError, StorageError
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import Kind
from kvshelf.format.names import (
    DESCRIPTION,
    ParsedName,
    object_name,
    object_names,
    parse_namespace_folder,
    shard_ends,
)
from kvshelf.format.objects import ObjectFormat, ReaderLike
from kvshelf.logs import RateLimitedLog
from kvshelf.metrics import Counters
from kvshelf.shelf import repairs
from kvshelf.shelf.leftovers import read_small
from kvshelf.shelf.markers import is_attempt, marker_name

logger = logging.getLogger(__name__)

_T = TypeVar("_T")


#: Most folders of one namespace that are looked into: each costs a round of probes.
_MAX_FOLDERS: Final = 8
#: Tails have many lengths.
_WHOLES_KEPT: Final = 1024
_DESCRIPTION_SECONDS: Final = 10.0
_FOLDERS_SECONDS: Final = 60.0
_NO_FOLDER_SECONDS: Final = 5.0
#: Where listings are refused or have no end, which costs requests and memory each time.
_REFUSED_FOLDERS_SECONDS: Final = 900.0


class ObjectRef(NamedTuple):
    """One object of a kind: a chunk's key, index and length name it, and a shard."""

    chunk: Chunk
    shard: int


class FailedRead(NamedTuple):
    """The shard of an object that could not be read, and why."""

    shard: int
    error: Exception


class Pinned(Protocol):
    """The bytes of one whole, verified object in memory of another owner.

    They are read in place, and must not be used after :meth:`release`. Any thread may call the
    methods; none blocks.
    """

    @property
    def view(self) -> memoryview:
        """The whole object, header included; it may be read-only."""

    def release(self) -> None:
        """Give the bytes back. Called exactly once."""


#: Keeps the memory of a buffer as it is, until the function that it returns is called; None: the
#: memory is needed for other things. Any thread may call both; none blocks.
Hold: TypeAlias = "Callable[[], Callable[[], None] | None]"


class Presence(Enum):
    """What a probe found in an object's place; all but PRESENT are misses for a load."""

    MISSING = "missing"
    PRESENT = "present"
    WRONG_SIZE = "wrong size"
    NOT_REGULAR = "not a regular file"
    ERROR = "error"


class ShelfView(ABC):
    """The part of a shelf that stores, loads and lookups of one kind in one namespace need.

    Parameters
    ----------
    backend : GuardedBackend
        The storage.
    fmt : ObjectFormat
        Format of the kind's objects.

    Attributes
    ----------
    chunk_bytes : int
        Bytes of the kind's objects of one whole chunk.
    """

    def __init__(self, backend: GuardedBackend, fmt: ObjectFormat) -> None:
        self.backend = backend
        self.fmt = fmt
        self._sizes = tuple(fmt.object_size(shard) for shard in range(fmt.shards))
        self.chunk_bytes = sum(self._sizes)

    @property
    def available(self) -> bool:
        """Whether anything can be loaded: False while the breaker is open."""
        return self.backend.reads.is_closed

    def size(self, chunk: Chunk, shard: int) -> int:
        """Return the bytes of an object, as :meth:`ObjectFormat.object_size` does, quickly."""
        return self.fmt.object_size(shard, chunk.tokens) if chunk.tail else self._sizes[shard]

    @abstractmethod
    def probe(self, refs: Sequence[ObjectRef]) -> list[Presence]:
        """Return for many objects what is in their places.

        Parameters
        ----------
        refs : Sequence of ObjectRef
            Cheapest when shards of one chunk follow one another.

        Returns
        -------
        list of Presence
            One for each object, in order. An error of the storage is ERROR, never an exception.
        """

    def find(self, refs: Sequence[ObjectRef]) -> list[Presence]:
        """Probe for objects that can be loaded, from the storage or from a tier in front of it."""
        return find_together([(self, refs)])[0]

    def nearby(self, refs: Sequence[ObjectRef]) -> list[Presence | None]:
        """Return what :meth:`find` answers without the storage; None where it must be probed."""
        return [None] * len(refs)

    @property
    @abstractmethod
    def on_storage(self) -> NamespaceView:
        """The view of the storage alone, without tiers."""

    def load(self, ref: ObjectRef, buffer: memoryview) -> None:
        """Read and verify one object.

        Parameters
        ----------
        ref : ObjectRef
        buffer : memoryview
            Writable, of the object's size; holds the whole file afterwards. After an exception its
            content means nothing.

        Raises
        ------
        ObjectMissingError
            If there is no such object.
        BadObjectError
            If it is bad, also when read again through a fresh open. It may have been set aside, see
            :mod:`kvshelf.shelf.repairs`.
        StorageError
            If the storage failed; the object may be good.
        """
        failed = self.load_all(ref.chunk, (ref.shard,), (buffer,))
        if failed is not None:
            raise failed.error

    @abstractmethod
    def load_all(
        self,
        chunk: Chunk,
        shards: Sequence[int],
        buffers: Sequence[memoryview],
        hold: Hold | None = None,
    ) -> FailedRead | None:
        """Read and verify objects of a chunk, in one call of the storage where it can do that.

        Parameters
        ----------
        chunk : Chunk
        shards : Sequence of int
            At least one.
        buffers : Sequence of memoryview
            As for :meth:`load`, one for each object.
        hold : Hold, optional
            Of the memory of the buffers. Without it no tier gets a copy of the objects.

        Returns
        -------
        FailedRead or None
            One of the objects that could not be had, and what :meth:`load` raises for it. Others
            may not have been looked at; no buffer means anything then.
        """

    @property
    def pins(self) -> bool:
        """Whether :meth:`pin_all` may return objects."""
        return False

    def pin_all(
        self, chunks: Sequence[Chunk], shards: Sequence[int], *, is_early: bool = False
    ) -> Sequence[Mapping[int, Pinned]]:
        """Return objects of chunks where they lie in memory, whole and verified, to be read there.

        Parameters
        ----------
        chunks : Sequence of Chunk
            The first is wanted now. The others are wanted soon: of these come those that are in
            memory now.
        shards : Sequence of int
            Of each chunk; at least one.
        is_early : bool
            No request waits for them yet.

        Returns
        -------
        Sequence of Mapping of int to Pinned
            For each chunk by shard; the caller releases each once. What is not there
            :meth:`load_all` may have.

        Raises
        ------
        ObjectMissingError, BadObjectError, StorageError
            As for :meth:`load`, if an object of the first chunk cannot be had.
        """
        return [{} for _ in chunks]

    @abstractmethod
    def publish(
        self, ref: ObjectRef, buffer: BytesLike, *, suspect: bool = False, hold: Hold | None = None
    ) -> WriteResult:
        """Publish one object, or replace the one in its place if that is bad.

        Parameters
        ----------
        ref : ObjectRef
        buffer : BytesLike
            The whole file, header included.
        suspect : bool
            What stands in the object's place may be bad. It is read and verified first, and left
            alone only if it is good: another engine may have replaced it already. Otherwise an
            object of the right size is left alone. In both cases an object of wrong size is
            replaced, and something that is not a regular file is moved out of the way.
        hold : Hold, optional
            As for :meth:`load_all`.

        Returns
        -------
        WriteResult
            CREATED; EXISTED when the object was left alone; REPLACED when something else had stood
            in its place.

        Raises
        ------
        ValueError
            If `buffer` does not have the object's size.
        StorageError
            If the storage refused or failed, also while verifying: nothing is replaced then.
        """


def _presence(found: StatResult, size: int) -> Presence:
    """Return what the answer of a storage about an object of `size` bytes means."""
    if found == size:
        return Presence.PRESENT
    if found is None:
        return Presence.MISSING
    if found is NOT_REGULAR:
        return Presence.NOT_REGULAR
    return Presence.WRONG_SIZE if isinstance(found, int) else Presence.ERROR


def find_together(asked: Sequence[tuple[ShelfView, Sequence[ObjectRef]]]) -> list[list[Presence]]:
    """Find objects of several kinds of one namespace, with at most one call of the storage.

    Parameters
    ----------
    asked : Sequence of pairs
        A view, and the objects to find there, see :meth:`ShelfView.find`.

    Returns
    -------
    list of lists of Presence
        The answers of each view, in order.
    """
    nearby = [view.nearby(refs) for view, refs in asked]
    names: list[str] = []
    sizes: list[int] = []
    for (view, refs), near in zip(asked, nearby, strict=True):
        unknown = [ref for ref, answer in zip(refs, near, strict=True) if answer is None]
        more = view.on_storage._names_and_sizes(unknown)
        names += more[0]
        sizes += more[1]
    storage = asked[0][0].on_storage
    answers = iter(storage._probe_named(names, sizes, find=True) if names else ())
    return [[next(answers) if answer is None else answer for answer in near] for near in nearby]


def find_pieces(
    views: Mapping[Kind, ShelfView], pieces: Sequence[tuple[Kind, Chunk, range]]
) -> list[list[Presence]]:
    """Find some shards of kinds of chunks, with at most one call of the storage.

    Parameters
    ----------
    views : Mapping[Kind, ShelfView]
    pieces : Sequence of (Kind, Chunk, range)
        The range is of shards.

    Returns
    -------
    list of lists of Presence
        The answers for each piece, in order.
    """
    refs: dict[Kind, list[ObjectRef]] = {}
    for kind, chunk, shards in pieces:
        # Quicker than a call of the class for each, which lookups would notice.
        refs.setdefault(kind, []).extend(map(ObjectRef._make, zip(repeat(chunk), shards)))
    requests = [(views[kind], of_kind) for kind, of_kind in refs.items()]
    presences = (
        [view.find(of) for view, of in requests] if len(requests) == 1 else find_together(requests)
    )
    answers = dict(zip(refs, map(iter, presences), strict=True))
    return [list(islice(answers[kind], len(shards))) for kind, _, shards in pieces]


class NamespaceView(ShelfView):
    """The objects of one kind on one storage; made by :meth:`kvshelf.shelf.shelf.Shelf.view`.

    Races of its threads only repeat a look at the storage.

    Parameters
    ----------
    backend, fmt
        As for :class:`ShelfView`.
    counters : Counters
        Gets the times of probes, reads, verifications and writes.
    """

    def __init__(self, backend: GuardedBackend, fmt: ObjectFormat, counters: Counters) -> None:
        super().__init__(backend, fmt)
        self._counters = counters
        self._log = RateLimitedLog(logger)
        self._folders: tuple[str, ...] = (fmt.namespace.folder,)
        self._folders_until = 0.0
        self._ends = shard_ends(fmt.shards)
        #: By shard and number of tokens.
        self._wholes: dict[tuple[int, int], Whole] = {}
        #: By folder.
        self._described_until: dict[str, float] = {}

    def __repr__(self) -> str:
        return f"NamespaceView({self.backend.url!r}, {self.fmt.namespace.folder!r})"

    @property
    def on_storage(self) -> NamespaceView:
        """The view itself."""
        return self

    # ------------------------------------------------------------------------------------ naming

    def _find_folders(self) -> tuple[str, ...]:
        """Folders of the namespace, the one to write to first."""
        now = time.monotonic()
        if now < self._folders_until:
            return self._folders
        is_known = self._folders_until > 0.0
        if is_known:
            # One caller looks, the others continue. So do all of them where the listing fails:
            # reads and probes work, and failed listings of each caller must not open the breaker.
            self._folders_until = now + _FOLDERS_SECONDS
        own_folder = self.fmt.namespace.folder
        tag = self.fmt.namespace.digest.hex()[:16]
        try:
            folders = [f for f in self.backend.folders() if parse_namespace_folder(f) == tag]
            seconds = _FOLDERS_SECONDS if folders else _NO_FOLDER_SECONDS
        except PermanentStorageError:
            # Listing may be forbidden where reading is not.
            folders, seconds = [], _REFUSED_FOLDERS_SECONDS
        except StorageError:
            if is_known:
                return self._folders
            raise
        folders.sort(key=lambda folder: folder != own_folder)
        self._folders = tuple(folders[:_MAX_FOLDERS]) or (own_folder,)
        self._folders_until = now + seconds
        return self._folders

    def folder(self) -> str:
        """Name of the namespace's folder that is written to.

        Raises
        ------
        StorageError
            If it is not known yet and the storage failed.
        """
        return self._find_folders()[0]

    def _base(self, ref: ObjectRef) -> str:
        """Name relative to the namespace's folder."""
        return object_name(ref.chunk, ref.shard, self.fmt.shards, self.fmt.kind)

    def name(self, ref: ObjectRef) -> str:
        """Name, relative to the shelf's root, under which a store writes this object."""
        return f"{self.folder()}/{self._base(ref)}"

    def names(self, ref: ObjectRef) -> list[str]:
        """Names, relative to the shelf's root, under which this object may be."""
        base = self._base(ref)
        return [f"{folder}/{base}" for folder in self._find_folders()]

    # ------------------------------------------------------------------------------------ probes

    def probe(self, refs: Sequence[ObjectRef]) -> list[Presence]:
        """Return for many objects what is in their places, see :meth:`ShelfView.probe`."""
        return self._probe_named(*self._names_and_sizes(refs))

    def find(self, refs: Sequence[ObjectRef]) -> list[Presence]:
        """Probe for objects that can be loaded, see :meth:`ShelfView.find`."""
        return self._probe_named(*self._names_and_sizes(refs), find=True)

    def _names_and_sizes(self, refs: Sequence[ObjectRef]) -> tuple[list[str], list[int]]:
        chunk_sizes = self._sizes
        sizes = [self.size(chunk, n) if chunk.tail else chunk_sizes[n] for chunk, n in refs]
        return object_names(refs, self.fmt.shards, self.fmt.kind), sizes

    def _probe_named(
        self, names: list[str], sizes: list[int], *, find: bool = False
    ) -> list[Presence]:
        try:
            folders = self._find_folders()
        except StorageError as exc:
            self._log_failed_probe(exc)
            return [Presence.ERROR] * len(names)
        answers = self._probe(folders[0], names, sizes, find)
        for folder in folders[1:]:
            open_ = [i for i, answer in enumerate(answers) if answer is not Presence.PRESENT]
            if not open_:
                break
            open_answers = self._probe(
                folder, [names[i] for i in open_], [sizes[i] for i in open_], find
            )
            for i, open_answer in zip(open_, open_answers, strict=True):
                if open_answer is Presence.PRESENT:
                    answers[i] = open_answer
        return answers

    def _probe(self, folder: str, names: list[str], sizes: list[int], find: bool) -> list[Presence]:
        named = [f"{folder}/{name}" for name in names]
        begin = time.perf_counter()
        stats = self._ask(named, sizes) if find else self.backend.stat(named)
        self._counters.observe("probe", time.perf_counter() - begin)
        if stats == sizes:
            # The usual answer of a lookup, by far the quickest.
            return [Presence.PRESENT] * len(sizes)
        errors = [result for result in stats if isinstance(result, StorageError)]
        if errors:
            self._log_failed_probe(errors[-1])
        return list(map(_presence, stats, sizes))

    def _ask(self, names: list[str], sizes: list[int]) -> StatResults:
        """Probe objects that are to be loaded."""
        return self.backend.stat(names)

    def _log_failed_probe(self, error: StorageError) -> None:
        """Log that the storage did not answer probes."""
        if error.retryable:
            # If the error persists, the breaker opens and its guard logs that.
            logger.debug("a probe failed: %s", error)
        else:
            self._log.warning(
                "could not probe the shelf; objects are treated as missing: %s", error
            )

    # ------------------------------------------------------------------------------------ writes

    def publish(
        self, ref: ObjectRef, buffer: BytesLike, *, suspect: bool = False, hold: Hold | None = None
    ) -> WriteResult:
        """Publish one object, or replace a bad one, see :meth:`ShelfView.publish`."""
        size = self.size(*ref)
        given = memoryview(buffer).nbytes
        if given != size:
            raise ValueError(f"the buffer holds {given} bytes: expected {size}, the object's size")
        bad = False
        if suspect:
            try:
                self._read(ref, memoryview(bytearray(size)))
            except ObjectMissingError:
                pass
            except BadObjectError:
                bad = True
            else:
                return WriteResult.EXISTED
        begin = time.perf_counter()
        folder = self.folder()
        name = f"{folder}/{self._base(ref)}"
        self.describe(folder)
        if bad:
            result = repairs.replace(self.backend, name, buffer)
        else:
            result = repairs.create(self.backend, name, buffer, size)
        self._counters.observe("publish", time.perf_counter() - begin)
        return result

    def describe(self, folder: str) -> None:
        """Publish the description of the namespace in one of its folders, if it is not there.

        To be called before an object is published: every ten seconds it makes sure that the
        description is there, and once that its bytes are right. Races of threads only repeat this.

        Raises
        ------
        StorageError
            If the storage refused or failed.
        """
        until = self._described_until.get(folder, 0.0)
        if time.monotonic() < until:
            return
        name, encoded = f"{folder}/{DESCRIPTION}", self.fmt.namespace.encoded
        first, size = not until, len(encoded)
        # On a high-latency storage the create serves as the first probe: a backend learns from it.
        creates = first and self.backend.properties.high_latency
        if creates or self.backend.stat([name])[0] != size:
            first &= repairs.create(self.backend, name, encoded, size) is WriteResult.EXISTED
        if first:
            self._compare(name, encoded)
        self._described_until[folder] = time.monotonic() + _DESCRIPTION_SECONDS

    def _compare(self, name: str, encoded: bytes) -> None:
        """Replace a description of the right size but other bytes, as a power loss leaves it."""
        try:
            content = read_small(self.backend, name, len(encoded))
        except (StorageError, ValueError) as error:
            logger.debug("%s could not be compared: %s", name, error)
            return
        if len(content) == len(encoded) and content != encoded:
            logger.warning(
                "%s/%s is damaged: its bytes are not those of the namespace; it is replaced",
                self.backend.url,
                name,
            )
            repairs.replace(self.backend, name, encoded)

    def delete(self, ref: ObjectRef) -> bool:
        """Delete one object, from all folders of the namespace; whether there was one.

        Raises
        ------
        StorageError
            If the storage refused or failed.
        """
        deleted = [delete_one(self.backend, name) for name in self.names(ref)]
        return any(deleted)

    # ----------------------------------------------------------------------------------- markers

    def give_up(self, attempt: str) -> bool:
        """Write the marker of a hand-over whose promise is broken, once.

        Parameters
        ----------
        attempt : str
            The attempt's id, see :mod:`kvshelf.shelf.markers`.

        Returns
        -------
        bool
            False if there was one.

        Raises
        ------
        ObjectNameError
            If `attempt` is not 32 lowercase hex digits.
        StorageError
            If the storage refused or failed.
        """
        name = marker_name(attempt)
        folder = self.folder()
        self.describe(folder)
        return self.backend.write(f"{folder}/{name}", []) is not WriteResult.EXISTED

    def gave_up(self, attempts: Sequence[str]) -> list[bool]:
        """Look for the markers of many hand-overs, in one call of the storage for each folder.

        Parameters
        ----------
        attempts : Sequence of str
            Ids of attempts, as clients sent them. What is not an id has no marker.

        Returns
        -------
        list of bool
            One for each attempt, in order. An error of the storage is False, never an exception.
        """
        markers = [attempt for attempt in dict.fromkeys(attempts) if is_attempt(attempt)]
        given_up: set[str] = set()
        with contextlib.suppress(StorageError):
            for folder in self._find_folders() if markers else ():
                answers = self.backend.stat(
                    [f"{folder}/{marker_name(marker)}" for marker in markers]
                )
                given_up |= {
                    marker for marker, answer in zip(markers, answers, strict=True) if answer == 0
                }
        return [attempt in given_up for attempt in attempts]

    # ------------------------------------------------------------------------------------- loads

    def load_all(
        self,
        chunk: Chunk,
        shards: Sequence[int],
        buffers: Sequence[memoryview],
        hold: Hold | None = None,
    ) -> FailedRead | None:
        """Read and verify objects, see :meth:`ShelfView.load_all`."""
        shard = shards[0]
        try:
            objects_read = self._read_whole(chunk, shards, buffers)
            if objects_read is not None and all(objects_read):
                return None
            for index, shard in enumerate(shards):
                if objects_read is None or not objects_read[index]:
                    self._read(ObjectRef(chunk, shard), buffers[index])
        except BadObjectError as bad:
            self.set_aside(ObjectRef(chunk, shard), bad)
            return FailedRead(shard, bad)
        except Exception as error:  # noqa: BLE001 - the caller learns of which object it is
            return FailedRead(shard, error)
        return None

    def _read_whole(
        self, chunk: Chunk, shards: Sequence[int], buffers: Sequence[memoryview]
    ) -> Sequence[bool] | None:
        """Let the storage read and verify objects in one call; return for which it has done so."""
        if not self.backend.reads_whole:
            return None
        wholes = []
        for shard in shards:
            expected = self._wholes.get((shard, chunk.tokens)) or self._whole(chunk, shard)
            if expected is None:
                return None
            wholes.append(expected)
        name = f"{self._find_folders()[0]}/{self._base(ObjectRef(chunk, shards[0]))}"
        start = name[: -len(wholes[0].end)]
        checked = self.backend.read_whole(start, self.fmt.text_of(chunk), wholes, buffers)
        if checked is None:
            return None
        objects_read = sum(checked.done)
        if objects_read:
            # Only the time that all took together is known.
            self._counters.observe("read", checked.reading / objects_read, objects_read)
            self._counters.observe("verify", checked.checking / objects_read, objects_read)
        return checked.done

    def _whole(self, chunk: Chunk, shard: int) -> Whole | None:
        expected = self.fmt.expected(chunk, shard)
        if expected is None:
            return None
        expected_object = Whole(self._ends[shard], *expected)
        if len(self._wholes) >= _WHOLES_KEPT:
            self._wholes.clear()
        self._wholes[shard, chunk.tokens] = expected_object
        return expected_object

    def load_named(self, parsed: ParsedName, buffer: memoryview) -> Chunk:
        """Read and verify one object of which only the name is known; nothing is set aside.

        Parameters
        ----------
        parsed : ParsedName
            The object's name. If it has a namespace folder, that is looked into first: it may be
            newer than the last listing.
        buffer : memoryview
            As for :meth:`load`.

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
        fmt = self.fmt
        name = object_name(fmt.named_chunk(parsed), parsed.shard, fmt.shards, fmt.kind)
        return self._read_from(
            self.folders_from(parsed.namespace),
            name,
            lambda reader: fmt.read_named(reader, parsed, buffer),
        )

    def folders_from(self, first: str | None) -> Iterator[str]:
        """Yield the folders of the namespace, that of this name first if it is not None.

        Raises
        ------
        StorageError
            If they are not known yet and the storage failed.
        """
        if first is not None:
            yield first
        yield from (folder for folder in self._find_folders() if folder != first)

    def _read(self, ref: ObjectRef, buffer: memoryview) -> None:
        self._read_from(
            self._find_folders(),
            self._base(ref),
            lambda reader: self.fmt.read(reader, *ref, buffer),
        )

    def _read_from(self, folders: Iterable[str], name: str, read: Callable[[ReaderLike], _T]) -> _T:
        """Read an object from the first of some folders that has it."""
        missing: ObjectMissingError | None = None
        for folder in folders:
            try:
                return self._read_twice(f"{folder}/{name}", read)
            except ObjectMissingError as error:
                missing = error
        assert missing is not None, "a namespace has a folder"
        raise missing

    def _read_twice(self, name: str, read: Callable[[ReaderLike], _T]) -> _T:
        try:
            return self._read_once(name, read)
        except BadObjectError:
            # Caches of network filesystems show old sizes and contents to an old open.
            return self._read_once(name, read)

    def _read_once(self, name: str, read: Callable[[ReaderLike], _T]) -> _T:
        begin = time.monotonic()
        with self.backend.open(name) as reader:
            result = read(reader)
            end = time.monotonic()
        self._counters.observe("read", reader.seconds)
        self._counters.observe("verify", end - begin - reader.seconds)
        return result

    # ------------------------------------------------------------------------------- bad objects

    def set_aside(self, ref: ObjectRef, bad: BadObjectError) -> bool:
        """Set aside an object that was found bad; return whether something was moved.

        Does nothing where the storage cannot rename things or takes no writes, nor where
        :mod:`kvshelf.shelf.repairs` says that it stays. Errors of the storage are not raised.

        Parameters
        ----------
        ref : ObjectRef
        bad : BadObjectError
            What was found wrong with it.
        """
        properties = self.backend.properties
        if properties.read_only or not properties.sets_aside:
            return False
        try:
            for name in self.names(ref):
                moved = repairs.set_aside(self.backend, name, self.size(*ref), bad)
                if moved is not None:
                    return moved
        except StorageError as error:
            logger.debug("a bad object was not set aside: %s", error)
        return False

    def set_aside_named(self, name: str, size: int | None, bad: Exception) -> bool:
        """Set aside a file that was found bad, as its user wants; return whether it was moved.

        It is exactly this file: another folder of the namespace may have a good one. Where the
        storage cannot rename things, it is deleted. Neither pins nor the number of such files
        matter. Parameters and errors are those of :meth:`kvshelf.shelf.repairs.set_aside`.
        """
        return repairs.set_aside(self.backend, name, size, bad, wanted=True) or False
