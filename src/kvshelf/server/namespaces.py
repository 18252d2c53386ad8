"""The namespaces that clients have registered, and what names of objects mean.

Owns the records, which are checked and not trusted, and the name of an object in the server's
memory (:func:`memory_name`): as on the storage, but without the slug of the namespace's folder,
which has no meaning (see :class:`kvshelf.shelf.view.NamespaceView`).

Any thread may call everything.
"""

from __future__ import annotations

import errno
import threading
from collections import OrderedDict
from typing import Final, NamedTuple

from kvshelf.errors import BadObjectError, ConfigError, ObjectNameError, UnavailableStorageError
from kvshelf.format.invalid import Defect
from kvshelf.format.kinds import SHARDS_FIELDS
from kvshelf.format.names import ParsedName, parse_path
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat
from kvshelf.shelf.view import ObjectRef

#: Namespaces that are known at a time; those that were used longest ago are forgotten.
_NAMESPACES: Final = 1024
_RECORD_BYTES: Final = 1 << 20
#: Layers and shards of a namespace: the header of each shard's objects takes time to lay out.
_LAYERS: Final = 1024
_SHARDS: Final = 1024


class NamedObject(NamedTuple):
    """An object that a client has named.

    Attributes
    ----------
    name : str
        With the namespace's folder, as on the storage.
    parsed : ParsedName
    fmt : ObjectFormat
        Of its kind.
    is_volatile : bool
        It is kept in the server's memory alone.
    """

    name: str
    parsed: ParsedName
    fmt: ObjectFormat
    is_volatile: bool

    @property
    def ref(self) -> ObjectRef:
        """The object, without the parent of its chunk."""
        return ObjectRef(self.fmt.named_chunk(self.parsed), self.parsed.shard)

    @property
    def size(self) -> int:
        """Bytes of the object."""
        chunk, shard = self.ref
        return self.fmt.object_size(shard, chunk.tokens)


def memory_name(name: str) -> str:
    """Return an object's name in the server's memory."""
    folder = name.find("/")
    return name[folder - 16 :] if folder > 16 else name


class Namespaces:
    """The records that clients have registered."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        #: By the last 16 hex of the folder: the objects, and whether they are volatile.
        self._registered: OrderedDict[str, tuple[ObjectFormat, bool]] = OrderedDict()

    def register(self, record: bytes, slug: str, *, is_volatile: bool = False) -> None:
        """Take the record of a namespace.

        Parameters
        ----------
        record : bytes
            The bytes of its ``namespace.json``.
        slug : str
            Readable beginning of its folder's name, where it has no folder yet.
        is_volatile : bool
            Its objects are never published.

        Raises
        ------
        ConfigError
            If the record is not one, or a namespace of another digest has the same folder, or it
            was registered with the other value of `is_volatile`.
        """
        if len(record) > _RECORD_BYTES:
            raise ConfigError(f"a namespace record of {len(record)} bytes: at most {_RECORD_BYTES}")
        namespace = Namespace.from_bytes(record, slug)
        layers, shards = _size_of(namespace)
        if layers > _LAYERS or shards > _SHARDS:
            raise ConfigError(
                f"a namespace of {layers} layers and {shards} shards: at most {_LAYERS} and"
                f" {_SHARDS} are served"
            )
        tag = namespace.digest.hex()[:16]
        fmt = ObjectFormat(namespace)
        with self._lock:
            registered = self._registered.setdefault(tag, (fmt, is_volatile))
            self._registered.move_to_end(tag)
            if len(self._registered) > _NAMESPACES:
                self._registered.popitem(last=False)
        if registered[0].namespace != namespace or registered[1] != is_volatile:
            raise ConfigError(
                f"the namespace {namespace.digest.hex()} has the folder of another one,"
                f" {registered[0].namespace.digest.hex()}: their objects cannot be told apart"
            )

    def format_of(self, folder: str) -> ObjectFormat | None:
        """Return the objects of a namespace's folder; None if it is not registered."""
        registered = self._registered.get(folder[-16:])
        return None if registered is None else registered[0]

    def is_volatile(self, name: str) -> bool:
        """Whether an object is kept in the server's memory alone."""
        registered = self._registered.get(name.partition("/")[0][-16:])
        return registered is not None and registered[1]

    def object(self, name: str, nbytes: int | None = None) -> NamedObject:
        """Return what is known of an object by its name.

        Parameters
        ----------
        name : str
        nbytes : int, optional
            The size that its sender claims.

        Raises
        ------
        ObjectNameError
            If it is not the name of an object.
        UnavailableStorageError
            If its namespace is not registered.
        BadObjectError
            If the object does not have so many bytes.
        """
        parsed = parse_path(name)
        if parsed is None:
            raise ObjectNameError(f"{name!r} is not the name of an object of a shelf")
        tag = name[: name.index("/")][-16:]
        with self._lock:
            registered = self._registered.get(tag)
            if registered is not None:
                self._registered.move_to_end(tag)
        if registered is None:
            raise UnavailableStorageError(
                errno.EAGAIN, "its namespace is not registered with this server", name
            )
        fmt, is_volatile = registered
        named = NamedObject(name, parsed, fmt.of_name(parsed), is_volatile)
        expected = named.size
        if nbytes is not None and nbytes != expected:
            raise BadObjectError(Defect.WRONG_SIZE, f"{name}: {nbytes} bytes, expected {expected}")
        return named


def _size_of(namespace: Namespace) -> tuple[int, int]:
    """Return the numbers of layers and of shards that a record names; 0 where it names none."""
    record = namespace.record
    names = record.get("layer_names", ())
    shards = [record.get(field, 0) for field in SHARDS_FIELDS.values()]
    return (
        len(names) if isinstance(names, list) else 0,
        max((count for count in shards if isinstance(count, int)), default=0),
    )
