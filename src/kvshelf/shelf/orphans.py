"""What writers leave behind: temporaries of killed writers, and bad objects in quarantine.

Owns the rule by which a temporary is one of kvshelf's, and the removal of all this when the storage
is full (:class:`Orphans`): nothing else makes room there without a loss.

Contracts
---------
* Removed are files whose names are exactly those of temporaries of objects, descriptions and
  reserved files, and which nothing has changed for an hour; and files in quarantine, whatever their
  age.
* Nothing is followed or descended into that is not a folder of a namespace.
* Namespaces of other versions of the format stay as they are, quarantine and temporaries included.
* Best effort: trouble of the storage ends the removal, and is not raised.

Any thread may call all methods. They block on the storage, those of :class:`Orphans` for about
their time.
"""

from __future__ import annotations

import json
import logging
import math
import random
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Final

from kvshelf.backends import Backend
from kvshelf.backends.base import final_name
from kvshelf.errors import BadObjectError, ObjectMissingError, StorageError
from kvshelf.format.names import DESCRIPTION, parse_namespace_folder, parse_path
from kvshelf.format.namespace import FORMAT
from kvshelf.shelf.markers import MARKERS

logger = logging.getLogger(__name__)

#: The reserved folder, at the root and in each namespace folder.
RESERVED: Final = ".kvshelf"
#: The folder of bad objects inside a namespace folder.
QUARANTINE: Final = f"{RESERVED}/bad"
#: A temporary belongs to a killed writer when nothing has changed it for so many seconds.
TEMPORARY_SECONDS: Final = 3600.0

#: Seconds from one removal on a full storage to the next, and when all folders were looked into.
_PAUSE_SECONDS: Final = 60.0
_ROUND_SECONDS: Final = 600.0
#: Seconds that one takes, to the end of the call of the storage that is under way then.
_WORK_SECONDS: Final = 2.0
#: Seconds from the sweep of one folder to that of the next, and from one round to the next.
_SWEEP_SECONDS: Final = 10.0
_SWEEP_ROUND_SECONDS: Final = 3600.0
#: Most bytes of a description that are read.
_DESCRIPTION_BYTES: Final = 1 << 20


def read_record(backend: Backend, folder: str) -> Mapping[str, object]:
    """Return what a namespace's description says; nothing if it cannot be read as JSON.

    One that may not be read counts as that of another version: the namespace is left alone.

    Raises
    ------
    StorageError
        If the storage failed.
    """
    try:
        with backend.open(f"{folder}/{DESCRIPTION}") as reader:
            data = bytearray(min(reader.size, _DESCRIPTION_BYTES))
            count = reader.read_into(memoryview(data), 0)
        record = json.loads(bytes(data[:count]))
    except (ObjectMissingError, BadObjectError, ValueError, RecursionError):
        return {}
    except StorageError as error:
        if error.retryable:
            raise
        return {"format": ""}
    return record if isinstance(record, dict) else {}


def is_of_other_version(record: Mapping[str, object]) -> bool:
    """Whether a namespace's record says that it is of another version of the format."""
    said = record.get("format", FORMAT)
    return isinstance(said, str) and said != FORMAT


def is_written_by_us(name: str) -> bool:
    """Whether kvshelf writes a file of this name, relative to the root, by way of a temporary."""
    first, _, rest = name.partition("/")
    if first == RESERVED:
        return bool(rest)
    if parse_namespace_folder(first) is None:
        return False
    return rest == DESCRIPTION or rest.startswith(f"{RESERVED}/") or parse_path(name) is not None


def is_temporary(name: str) -> bool:
    """Whether a name, relative to the root, is that of a temporary of kvshelf."""
    folder, _, base = name.rpartition("/")
    final = final_name(base)
    return final is not None and is_written_by_us(f"{folder}/{final}")


class Orphans:
    """Removes orphans from a storage that is full, at most once a minute.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._next = 0.0
        #: Goes on where the last removal ended.
        self._left: Iterator[str] | None = None

    def remove(self, folder: str | None = None) -> int:
        """Remove orphans, for about two seconds; go on there the next time.

        Parameters
        ----------
        folder : str, optional
            Begin with this one, of the file that found no room.

        Returns
        -------
        int
            Number of temporaries that were removed. 0 also if another thread removes orphans, or
            some were removed within the last minute.
        """
        with self._lock:
            now = time.monotonic()
            if now < self._next:
                return 0
            self._next = math.inf
        removed = 0
        pause = _PAUSE_SECONDS
        try:
            if folder is not None:
                removed += self._sweep(folder)
            if self._left is None:
                self._left = self._folders()
            while time.monotonic() < now + _WORK_SECONDS:
                following = next(self._left, None)
                if following is None:
                    self._left = None
                    pause = _ROUND_SECONDS
                    break
                removed += self._sweep(following)
        except StorageError as error:
            self._left = None
            logger.debug("orphans could not be removed: %s", error)
        finally:
            self._next = time.monotonic() + pause
        if removed:
            logger.info(
                "%s is full: %d temporaries of killed writers were removed",
                self._backend.url,
                removed,
            )
        return removed

    def _sweep(self, folder: str) -> int:
        if folder.endswith(QUARANTINE):
            self._backend.trim(folder, 0, 0)
            return 0
        return self._backend.sweep(
            folder, TEMPORARY_SECONDS, lambda name: is_written_by_us(f"{folder}/{name}")
        )

    def _folders(self) -> Iterator[str]:
        """Yield all folders with orphans: quarantine first, which is found without a search."""
        backend = self._backend
        namespaces = [f for f in backend.folders() if parse_namespace_folder(f) is not None]
        # Of many engines that find a storage full at once each begins elsewhere.
        chance = random.SystemRandom()
        chance.shuffle(namespaces)
        ours: list[str] = []
        for namespace in namespaces:
            if not is_of_other_version(read_record(backend, namespace)):
                ours.append(namespace)
                yield f"{namespace}/{QUARANTINE}"
        yield RESERVED
        for namespace in ours:
            yield namespace
            yield f"{namespace}/{MARKERS}"
            groups = [f"{namespace}/{name}" for name in backend.folders(namespace)]
            chance.shuffle(groups)
            for group in groups:
                inner = [f"{group}/{name}" for name in backend.folders(group)]
                chance.shuffle(inner)
                yield from inner


class SlowSweep:
    """Removes the temporaries of killed writers while a namespace is written to.

    One folder at a time, seconds apart, after a write and on its thread. Best effort.

    Parameters
    ----------
    backend : Backend
    """

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        #: Folders of this round that are not swept yet; taken from the end.
        self._unswept: list[str] = []
        self._swept_until = 0.0

    def written(self, namespace_folder: str) -> None:
        """Note a write; now and then remove the temporaries of killed writers in one more folder.

        Parameters
        ----------
        namespace_folder : str
        """
        if not self._backend.properties.temporaries:
            return
        with self._lock:
            now = time.monotonic()
            if now < self._swept_until:
                return
            if not self._unswept:
                self._unswept.append(namespace_folder)
            folder = self._unswept.pop()
            self._swept_until = now + _SWEEP_SECONDS
        try:
            self._backend.sweep(
                folder,
                TEMPORARY_SECONDS,
                lambda name: is_written_by_us(f"{folder}/{name}"),
            )
            # Objects lie in <namespace>/<group>/<2 hex>.
            inner = [] if folder.count("/") == 2 else list(self._backend.folders(folder))
        except StorageError as exc:
            logger.debug("temporaries could not be removed: %s", exc)
            return
        # Of many engines that begin a round at once each begins elsewhere.
        random.SystemRandom().shuffle(inner)
        with self._lock:
            self._unswept += [f"{folder}/{name}" for name in inner]
            if not self._unswept:
                self._swept_until = now + _SWEEP_ROUND_SECONDS
