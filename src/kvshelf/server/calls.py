"""Calls of clients that go to the server's storage as they are.

Owns the arguments and answers of each method of :class:`kvshelf.server.messages.Call`, and the
listings that clients are in the middle of:

=================  ===========================  =================================================
method             arguments                    answer
=================  ===========================  =================================================
``stat``           names                        :class:`~kvshelf.server.messages.FoundSizes`
``info``           name                         the fields of ``ObjectInfo``, or None
``read``           name, offset, bytes          ``[size of the object, bytes]``
``list``           folder, number or None,      ``[rows as those of info, number or None]``
                   start, end, flat
``entries``        the same                     the same, of what is hidden too
``folders``        folder                       names
``write``          name, mode; bytes as data    ``created``, ``existed`` or ``replaced``
``delete``         name                         bool
``set_aside``      name                         bool
``touch``          name, seconds                ``touched`` or ``refused``
``space``                                       ``[free, total, memory]``, or None
=================  ===========================  =================================================

A listing comes in pages: the number in an answer asks for the next one, None is the last.

Contracts
---------
* Names are checked by the backend: none reaches outside the shelf's root.
* Objects are not written here: the server publishes only what it has verified.
* All methods may be called from any thread. :meth:`Calls.perform` blocks on the storage.
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from functools import partial
from itertools import islice
from typing import Any, Final

import msgspec

from kvshelf.backends import NotRegular, ObjectInfo, Properties, StatResults, WriteMode
from kvshelf.backends.base import delete_one
from kvshelf.backends.guard import GuardedBackend
from kvshelf.errors import ObjectNameError, PermanentStorageError
from kvshelf.format.names import parse_path
from kvshelf.server.messages import (
    MAX_INLINE,
    MISSING,
    NOT_REGULAR,
    UNKNOWN,
    Facts,
    Fault,
    FoundSizes,
)

#: Rows of a page, and listings that one client may be in the middle of.
_PAGE: Final = 1000
_LISTINGS: Final = 16

#: What changes the storage.
CHANGES: Final = frozenset(("write", "delete", "set_aside", "touch"))
#: The properties of a storage that its facts repeat.
_PROPERTIES: Final = {field.name for field in fields(Properties)} & set(Facts.__struct_fields__)


class Calls:
    """The methods of one backend for all clients.

    Parameters
    ----------
    backend : GuardedBackend
    """

    def __init__(self, backend: GuardedBackend) -> None:
        self._backend = backend
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._listings: dict[bytes, dict[int, Iterator[ObjectInfo]]] = {}
        self._methods: dict[str, tuple[Any, Callable[..., Any]]] = {
            "stat": (tuple[list[str]], lambda names: found(backend.stat(names))),
            "info": (tuple[str], self._info),
            "read": (tuple[str, int, int], self._read),
            "folders": (tuple[str], lambda folder: list(backend.folders(folder))),
            "delete": (tuple[str], partial(delete_one, backend)),
            "set_aside": (tuple[str], backend.set_aside),
            "touch": (tuple[str, float], lambda *use: backend.touch(*use).value),
            "space": (tuple[()], self._space),
        }

    def perform(self, client: bytes, method: str, args: Sequence[Any], data: bytes) -> Any:
        """Call the storage.

        Parameters
        ----------
        client : bytes
        method : str
        args : Sequence
        data : bytes
            What ``write`` writes.

        Raises
        ------
        ObjectNameError
            If a name is not safe, or ``write`` names an object.
        PermanentStorageError
            If there is no such method, or the arguments are not those of the method.
        StorageError
            If the storage failed.
        """
        listing = tuple[str, int | None, str | None, str | None, bool]
        own: dict[str, tuple[Any, Callable[..., Any]]] = {
            "list": (listing, partial(self._list, client)),
            "entries": (listing, partial(self._list, client, hidden=True)),
            "write": (tuple[str, WriteMode], lambda *rest: self._write(data, *rest)),
        }
        known = own.get(method) or self._methods.get(method)
        if known is None:
            raise PermanentStorageError(f"{method!r} is no method of the server's storage")
        types, perform = known
        try:
            values = msgspec.convert(tuple(args), types)
        except msgspec.ValidationError as error:
            raise PermanentStorageError(f"the arguments of {method}: {error}") from None
        return perform(*values)

    def forget(self, client: bytes) -> None:
        """Drop the listings of a client that is gone."""
        with self._lock:
            self._listings.pop(client, None)

    def _info(self, name: str) -> list[Any] | None:
        info = self._backend.info(name)
        return None if info is None else [*info]

    def _read(self, name: str, offset: int, nbytes: int) -> list[Any]:
        if not 0 <= nbytes <= MAX_INLINE or offset < 0:
            raise PermanentStorageError(f"{nbytes} bytes at {offset}: at most {MAX_INLINE} at once")
        with self._backend.open(name) as reader:
            data = bytearray(max(0, min(nbytes, reader.size - offset)))
            count = reader.read_into(memoryview(data), offset) if data else 0
            return [reader.size, bytes(data[:count])]

    def _write(self, data: bytes, name: str, mode: WriteMode) -> str:
        if parse_path(name) is not None:
            raise ObjectNameError(f"{name!r} is the name of an object, which only Store writes")
        return self._backend.write(name, [data], mode).value

    def _space(self) -> list[Any] | None:
        space = self._backend.space()
        return None if space is None else [space.free, space.total, space.memory]

    def _list(
        self,
        client: bytes,
        folder: str,
        number: int | None,
        start: str | None,
        end: str | None,
        flat: bool,
        *,
        hidden: bool = False,
    ) -> list[Any]:
        rows: Iterator[ObjectInfo] | None
        if number is None:
            rows = self._backend.list(folder, hidden=hidden, start=start, end=end, flat=flat)
        else:
            with self._lock:
                rows = self._listings.get(client, {}).pop(number, None)
            if rows is None:
                raise PermanentStorageError(f"there is no listing {number}; begin another one")
        page = [[*info] for info in islice(rows, _PAGE)]
        if len(page) < _PAGE:
            return [page, None]
        number = next(self._numbers)
        with self._lock:
            listings = self._listings.setdefault(client, {})
            if len(listings) >= _LISTINGS:
                # One that was given up.
                del listings[next(iter(listings))]
            listings[number] = rows
        return [page, number]


def found(answers: StatResults) -> FoundSizes:
    """Return the message for the answers of a probe."""
    sizes: list[int] = []
    fault = None
    for answer in answers:
        if isinstance(answer, int):
            sizes.append(answer)
        elif answer is None:
            sizes.append(MISSING)
        elif isinstance(answer, NotRegular):
            sizes.append(NOT_REGULAR)
        else:
            fault = fault or Fault.of(answer)
            sizes.append(UNKNOWN)
    return FoundSizes(sizes, fault)


def facts(backend: GuardedBackend) -> Facts:
    """Return what clients may rely on at present. Never blocks."""
    known, deadlines = backend.properties, backend.deadlines
    return Facts(
        backend.url,
        **{name: getattr(known, name) for name in _PROPERTIES},
        probe_seconds=deadlines.probe,
        read_seconds=deadlines.read,
        write_seconds=deadlines.write,
        bytes_per_second=deadlines.bytes_per_second,
    )
