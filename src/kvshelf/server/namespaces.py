"""The namespaces that clients have registered, and what names of objects mean.

Owns the records, which are checked and not trusted, and the name of an object in memory
(:func:`key_of`): as on the storage, but without the slug of the namespace's folder, which has no
meaning (see :class:`kvshelf.shelf.view.NamespaceView`). Names that begin with ``hash/`` are no
objects of the format; they are in memory only.

Everything but :func:`key_of` is used on the loop's thread.
"""

from __future__ import annotations

import errno
from collections import OrderedDict
from typing import Final, NamedTuple

from kvshelf.errors import BadObjectError, ConfigError, ObjectNameError, UnavailableStorageError
from kvshelf.format.invalid import Defect
from kvshelf.format.keys import Chunk
from kvshelf.format.kinds import SHARDS_FIELDS
from kvshelf.format.names import ParsedName, object_name, parse_path
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat

#: How names begin that are no objects of the format.
HASH: Final = "hash/"

#: Most namespaces that are known at a time; those that were used longest ago are forgotten.
_NAMESPACES: Final = 1024
_RECORD_BYTES: Final = 1 << 20
#: Most layers and shards of a namespace: the header of each shard's objects takes time to lay out.
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
    """

    name: str
    parsed: ParsedName
    fmt: ObjectFormat

    @property
    def chunk(self) -> Chunk:
        """The chunk, without its parent."""
        return self.fmt.named_chunk(self.parsed)

    def key_of_parent(self, chunk: Chunk) -> str | None:
        """Return the key of the object before this one in its prompt.

        Parameters
        ----------
        chunk : Chunk
            As it was verified, with its parent.
        """
        if not chunk.index:
            return None
        parent = Chunk(
            chunk.parent, b"", chunk.index - 1, self.fmt.chunk_size, False, chunk.salt_group
        )
        folder = key_of(self.name).partition("/")[0]
        return f"{folder}/{object_name(parent, self.parsed.shard, self.fmt.shards, self.fmt.kind)}"


def key_of(name: str) -> str:
    """Return an object's name in memory."""
    folder = name.find("/")
    return name[folder - 16 :] if folder > 16 else name


class Namespaces:
    """The records that clients have registered."""

    def __init__(self) -> None:
        self._known: OrderedDict[str, ObjectFormat] = OrderedDict()

    def register(self, record: bytes) -> None:
        """Take the record of a namespace.

        Parameters
        ----------
        record : bytes
            The bytes of its ``namespace.json``.

        Raises
        ------
        ConfigError
            If the record is not one, or a namespace of another digest has the same folder.
        """
        if len(record) > _RECORD_BYTES:
            raise ConfigError(f"a namespace record of {len(record)} bytes: at most {_RECORD_BYTES}")
        namespace = Namespace.from_bytes(record)
        layers, shards = _size_of(namespace)
        if layers > _LAYERS or shards > _SHARDS:
            raise ConfigError(
                f"a namespace of {layers} layers and {shards} shards: at most {_LAYERS} and"
                f" {_SHARDS} are served"
            )
        tag = namespace.digest.hex()[:16]
        known = self._known.get(tag)
        if known is None:
            self._known[tag] = ObjectFormat(namespace)
            if len(self._known) > _NAMESPACES:
                self._known.popitem(last=False)
        elif known.namespace != namespace:
            raise ConfigError(
                f"the namespace {namespace.digest.hex()} has the folder of another one,"
                f" {known.namespace.digest.hex()}: their objects cannot be told apart"
            )

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
        known = self._known.get(tag)
        if known is None:
            raise UnavailableStorageError(
                errno.EAGAIN, "its namespace is not registered with this server", name
            )
        self._known.move_to_end(tag)
        found = NamedObject(name, parsed, known.of_name(parsed))
        expected = found.fmt.object_size(parsed.shard, found.chunk.tokens)
        if nbytes is not None and nbytes != expected:
            raise wrong_size(name, nbytes, expected)
        return found


def wrong_size(name: str, nbytes: int, expected: int) -> BadObjectError:
    """Return the error for an object that was asked for with another size."""
    return BadObjectError(Defect.WRONG_SIZE, f"{name}: {nbytes} bytes, expected {expected}")


def _size_of(namespace: Namespace) -> tuple[int, int]:
    """Return the numbers of layers and of shards that a record names; 0 where it names none."""
    record = namespace.record
    names = record.get("layer_names", ())
    shards = [record.get(field, 0) for field in SHARDS_FIELDS.values()]
    return (
        len(names) if isinstance(names, list) else 0,
        max((count for count in shards if isinstance(count, int)), default=0),
    )
