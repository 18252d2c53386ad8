"""Who a chunk is: namespace, chunk keys, object names, fingerprints of weights.

Owns
----
* the namespace record, its canonical bytes and digest (:class:`Namespace`);
* the chain of chunk keys over a prompt (:class:`KeyChain`);
* the object-name codec (:func:`object_name`, :func:`parse_object_name`);
* the fingerprint of the weight files that an engine loads
  (:func:`weight_files`, :func:`weights_fingerprint`, :func:`lora_digest`).

Contracts
---------
* Keys, names and digests are pure functions of their arguments: equal on every
  machine, Python version, byte order and hash seed.
* Whatever decides KV values is in the namespace digest or in the key; SHA-256 keeps
  one tenant's keys from another's, so nothing here may be swapped for a faster,
  collidable hash.
* No torch, no storage backend, no vLLM.

Threads
-------
Everything is safe to call from any thread; a :class:`KeyChain` belongs to one thread
at a time. Only fingerprints of weights read files: they use daemon threads of their
own, which end when the call ends (or, when a read hangs, with the process).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import queue
import re
import stat
import struct
import sys
import threading
import time
import unicodedata
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeAlias

import xxhash

from kvshelf.errors import (
    ConfigError,
    KVShelfError,
    ObjectNameError,
    TransientStorageError,
)

__all__ = [
    "FIELDS",
    "FORMAT",
    "Chunk",
    "FieldValue",
    "FingerprintCache",
    "FingerprintCancelledError",
    "KeyChain",
    "MultimodalItem",
    "Namespace",
    "ParsedName",
    "check_chunk_size",
    "group_of_salt",
    "lora_digest",
    "object_name",
    "parse_namespace_folder",
    "parse_object_name",
    "parse_path",
    "sampled_fingerprint",
    "slugify",
    "weight_files",
    "weights_fingerprint",
]

#: Name of the format; it starts every key root and stands in every header.
FORMAT: Final = "kvshelf/1"

FieldValue: TypeAlias = "int | str | Sequence[int] | Sequence[str]"

_MAX_U32: Final = 2**32 - 1
_MAX_JSON_INT: Final = 2**53 - 1

#: Every field a namespace record may hold, and the type of its value.
FIELDS: Final[Mapping[str, str]] = {
    "attention": "list[str]",
    "chunk_size": "int",
    "compute_dtype": "str",
    "config_overrides": "str",
    "data_offset": "int",
    "format": "str",
    "head_sizes": "list[int]",
    "kv_dtype": "str",
    "kv_heads": "int",
    "kv_scales": "str",
    "layer_dtypes": "list[str]",
    "layer_names": "list[str]",
    "layer_shapes": "list[str]",
    "layers": "int",
    "layouts": "list[str]",
    "mla_rank": "int",
    "quantization": "str",
    "rope": "str",
    "shards": "int",
    "signing_key": "str",
    "sliding_windows": "list[int]",
    "stages": "list[int]",
    "version": "str",
    "weights": "str",
}


# --------------------------------------------------------------------------- namespace


def _canonical_int(field: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ConfigError(
            f"namespace field {field!r}: found {value!r}, expected an integer "
            "(a float is written as its shortest decimal in a string)"
        )
    if not -_MAX_JSON_INT <= value <= _MAX_JSON_INT:
        raise ConfigError(f"namespace field {field!r}: {value} does not fit 53 bits")
    return int(value)


def _canonical_str(field: str, value: object) -> str:
    if not isinstance(value, str):
        raise ConfigError(f"namespace field {field!r}: found {value!r}, expected a string")
    normal = unicodedata.normalize("NFC", str(value))
    try:
        normal.encode("utf-8")
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"namespace field {field!r}: {value!r} holds a lone surrogate, which has no UTF-8"
        ) from error
    return normal


def _canonical_value(field: str, value: object) -> int | str | list[int] | list[str]:
    kind = FIELDS.get(field)
    if kind is None:
        raise ConfigError(
            f"namespace field {field!r} is not known to {FORMAT}; known are: "
            + ", ".join(sorted(FIELDS))
        )
    if kind == "int":
        return _canonical_int(field, value)
    if kind == "str":
        return _canonical_str(field, value)
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise ConfigError(f"namespace field {field!r}: found {value!r}, expected a {kind}")
    if kind == "list[int]":
        return [_canonical_int(field, item) for item in value]
    return [_canonical_str(field, item) for item in value]


class Namespace:
    """Everything except tokens that decides KV values and their layout.

    Immutable; two namespaces are equal when their canonical bytes are.

    Parameters
    ----------
    record : Mapping[str, int | str | Sequence[int] | Sequence[str]]
        The fields (``docs/format.md`` has the table). Absent fields are left out,
        never None. Strings are normalised to NFC.
    slug : str
        Readable start of the folder's name; not part of the identity.

    Attributes
    ----------
    encoded : bytes
        The canonical JSON.
    digest : bytes
        SHA-256 of `encoded`, 32 bytes.
    slug : str
        The slug, as :func:`slugify` makes it.
    folder : str
        ``<slug>-<first 16 hex of the digest>``.

    Raises
    ------
    ConfigError
        If a field is unknown, has a value of the wrong type, or ``format`` is not
        ``kvshelf/1``.
    """

    __slots__ = ("_record", "digest", "encoded", "folder", "slug")

    encoded: bytes
    digest: bytes
    slug: str
    folder: str

    def __init__(self, record: Mapping[str, FieldValue], slug: str = "model") -> None:
        canonical = {field: _canonical_value(field, record[field]) for field in sorted(record)}
        if canonical.get("format") != FORMAT:
            raise ConfigError(
                f"namespace field 'format': found {canonical.get('format')!r}, expected {FORMAT!r}"
            )
        encoded = json.dumps(canonical, ensure_ascii=False, separators=(",", ":")).encode("utf-8")
        digest = hashlib.sha256(encoded).digest()
        name = slugify(slug)
        set_once = object.__setattr__
        set_once(self, "_record", canonical)
        set_once(self, "encoded", encoded)
        set_once(self, "digest", digest)
        set_once(self, "slug", name)
        set_once(self, "folder", f"{name}-{digest.hex()[:16]}")

    @classmethod
    def from_bytes(cls, data: bytes, slug: str = "model") -> Namespace:
        """Decode canonical bytes; anything that is not exactly canonical is refused.

        Raises
        ------
        ConfigError
            If `data` is not the canonical encoding of a valid record.
        """

        def no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
            found = dict(pairs)
            if len(found) != len(pairs):
                raise ConfigError("namespace record: a field appears twice")
            return found

        try:
            record = json.loads(data.decode("utf-8"), object_pairs_hook=no_duplicates)
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ConfigError(f"namespace record: not UTF-8 JSON ({error})") from error
        except ConfigError:
            raise
        except ValueError as error:
            raise ConfigError(f"namespace record: a number is out of range ({error})") from error
        if not isinstance(record, dict):
            raise ConfigError(
                f"namespace record: found {type(record).__name__}, expected an object"
            )
        try:
            namespace = cls(record, slug)
        except ConfigError as error:
            # It shows values, which here may be forged and of any length.
            text = str(error)
            raise ConfigError(text if len(text) <= 400 else text[:397] + "...") from None
        if namespace.encoded != data:
            raise ConfigError(
                "namespace record: the bytes are valid JSON but not canonical (sorted keys, no "
                'spaces, NFC, no escapes except \\" \\\\ and control characters)'
            )
        return namespace

    @property
    def record(self) -> dict[str, int | str | list[int] | list[str]]:
        """The fields, as a fresh copy."""
        return {
            field: value.copy() if isinstance(value, list) else value
            for field, value in self._fields().items()
        }

    def _fields(self) -> Mapping[str, int | str | list[int] | list[str]]:
        fields: Mapping[str, int | str | list[int] | list[str]] = object.__getattribute__(
            self, "_record"
        )
        return fields

    def __setattr__(self, name: str, value: object) -> None:
        raise AttributeError(f"Namespace is immutable; {name!r} cannot be set")

    def __delattr__(self, name: str) -> None:
        raise AttributeError(f"Namespace is immutable; {name!r} cannot be deleted")

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Namespace) and self.encoded == other.encoded

    def __hash__(self) -> int:
        return hash(self.encoded)

    def __repr__(self) -> str:
        return f"Namespace({self.folder!r})"

    def __reduce__(self) -> tuple[Callable[[bytes, str], Namespace], tuple[bytes, str]]:
        return Namespace.from_bytes, (self.encoded, self.slug)


def slugify(model_name: str) -> str:
    """Return the readable part of a namespace folder for a model's name or path.

    The last path component, lowercased, each character outside ``[a-z0-9._-]``
    replaced by ``-``, at most 40 characters; ``model`` when nothing is left.
    """
    last = model_name.rstrip("/").rpartition("/")[2].lower()
    return re.sub(r"[^a-z0-9._-]", "-", last)[:40] or "model"


# --------------------------------------------------------------------------- chunk keys


@dataclass(frozen=True, slots=True)
class MultimodalItem:
    """One multimodal item (an image, a sound …) inside a prompt.

    Attributes
    ----------
    hash : str
        The engine's content identifier of the item.
    start : int
        Position of its first token in the prompt.
    length : int
        Number of tokens the whole item covers.
    """

    hash: str
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class Chunk:
    """A chunk's address inside a namespace.

    Attributes
    ----------
    key, parent : bytes
        32 bytes each; the parent of chunk 0 is the root of the key chain.
    index : int
        Chunk index: first token's position / chunk size.
    tokens : int
        Number of tokens: the chunk size, or fewer in a tail.
    tail : bool
        True for the shorter last piece of a prompt.
    group : str
        Name of the group folder: ``_`` or 16 hex.
    """

    key: bytes
    parent: bytes
    index: int
    tokens: int
    tail: bool = False
    group: str = "_"


def check_chunk_size(chunk_size: int) -> int:
    """Return `chunk_size` if it is an integer in 1 … 2^32−1.

    Raises
    ------
    ConfigError
        If it is not.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise ConfigError(f"chunk_size: found {chunk_size!r}, expected an integer")
    if not 1 <= chunk_size <= _MAX_U32:
        raise ConfigError(f"chunk_size: found {chunk_size}, expected 1 to {_MAX_U32}")
    return chunk_size


def _counted(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _pack_tokens(tokens: Sequence[int], position: int) -> bytes:
    """Return `tokens` as little-endian u32; `position` is only for the error's text."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        for offset, token in enumerate(tokens):
            try:
                fits = 0 <= token.__index__() <= _MAX_U32
            except (AttributeError, TypeError):
                fits = False
            if not fits:
                raise ValueError(
                    f"token {position + offset} is {token!r}: token ids are integers from 0 to "
                    f"{_MAX_U32}"
                ) from None
        raise ValueError(f"tokens {position} and following cannot be packed: {error}") from error
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


class KeyChain:
    """Incremental chunk keys of one prompt.

    Feed tokens in any pieces with :meth:`extend`; the keys do not depend on how the
    tokens were cut. Costs about 5 µs a chunk of 256 tokens and holds the GIL for one
    chunk at a time, so a background caller that feeds a few chunks a call and yields
    in between delays nobody.

    Parameters
    ----------
    namespace_digest : bytes
        32 bytes.
    chunk_size : int
        Tokens in a chunk.
    salt : str
        The request's cache salt; empty when it has none.
    lora_digest : bytes
        32 raw bytes of the adapter's digest; empty without an adapter.
    items : Sequence[MultimodalItem]
        All multimodal items of the prompt, in any order.
    group : str
        Group folder of the chunks made.

    Attributes
    ----------
    root : bytes
        32 bytes; parent of the first chunk.
    chunks : list[Chunk]
        All complete chunks so far; index in the list = chunk index.
    tokens : int
        Number of tokens fed so far.

    Raises
    ------
    ConfigError
        If `chunk_size` is out of range.
    ValueError
        If a digest has the wrong length or an item is malformed.
    """

    __slots__ = (
        "_items",
        "_next_item",
        "_pending",
        "_prefix",
        "chunk_size",
        "chunks",
        "group",
        "root",
    )

    def __init__(
        self,
        namespace_digest: bytes,
        chunk_size: int,
        *,
        salt: str = "",
        lora_digest: bytes = b"",
        items: Sequence[MultimodalItem] = (),
        group: str = "_",
    ) -> None:
        if len(namespace_digest) != 32:
            raise ValueError(f"namespace digest: found {len(namespace_digest)} bytes, expected 32")
        if len(lora_digest) not in (0, 32):
            raise ValueError(f"LoRA digest: found {len(lora_digest)} bytes, expected 32 or none")
        self.chunk_size = check_chunk_size(chunk_size)
        self.group = _check_group(group)
        self.root = hashlib.sha256(
            FORMAT.encode() + namespace_digest + _counted(salt.encode()) + _counted(lora_digest)
        ).digest()
        self.chunks: list[Chunk] = []
        self._pending = b""
        self._prefix = struct.pack("<I", self.chunk_size)
        encoded: list[tuple[int, int, bytes]] = []
        for item in items:
            if not 0 <= item.length <= _MAX_U32 or not 0 <= item.start < 2**62:
                raise ValueError(f"{item} is not a place in a prompt: negative or too large")
            if item.length:
                encoded.append((item.start, item.length, item.hash.encode()))
        encoded.sort()
        self._items = encoded
        self._next_item = 0

    @property
    def tokens(self) -> int:
        """Number of tokens fed so far."""
        return len(self.chunks) * self.chunk_size + len(self._pending) // 4

    def extend(self, tokens: Sequence[int]) -> list[Chunk]:
        """Feed further tokens; return the chunks that they complete.

        Parameters
        ----------
        tokens : Sequence[int]
            Token ids from 0 to 2^32−1. Lists and ``array('I')`` are fastest.

        Raises
        ------
        ValueError
            If a token is not an integer in range; the chain is then unchanged.
        """
        size = self.chunk_size
        count = len(tokens)
        start = self.tokens
        index = len(self.chunks)
        parent = self.chunks[-1].key if self.chunks else self.root
        pending = self._pending
        next_item = self._next_item
        new: list[Chunk] = []
        group = self.group
        prefix = self._prefix
        sha256 = hashlib.sha256
        used = 0
        need = size - len(pending) // 4
        while count - used >= need:
            packed = pending + _pack_tokens(tokens[used : used + need], start + used)
            used += need
            need = size
            pending = b""
            if self._items:
                suffix, next_item = self._overlaps(index * size, size, next_item)
            else:
                suffix = b"\0\0\0\0"
            key = sha256(parent + prefix + packed + suffix).digest()
            new.append(Chunk(key, parent, index, size, False, group))
            parent = key
            index += 1
        if index > _MAX_U32 + 1:
            raise ValueError(f"a prompt has at most {_MAX_U32 + 1} chunks")
        if used < count:
            pending += _pack_tokens(tokens[used:count], start + used)
        self._pending = pending
        self._next_item = next_item
        self.chunks += new
        return new

    def tail(self) -> Chunk | None:
        """Return the chunk of the tokens after the last complete chunk, None if there are none.

        A tail is never a parent; feeding further tokens afterwards is fine.
        """
        packed = self._pending
        if not packed:
            return None
        index = len(self.chunks)
        parent = self.chunks[-1].key if self.chunks else self.root
        count = len(packed) // 4
        suffix, _ = self._overlaps(index * self.chunk_size, count, self._next_item)
        key = hashlib.sha256(parent + struct.pack("<I", count) + packed + suffix).digest()
        return Chunk(key, parent, index, count, True, self.group)

    def _overlaps(self, start: int, count: int, first: int) -> tuple[bytes, int]:
        """Encode the items that overlap tokens [start, start + count).

        `first` is the index of the first item that may still matter; the second value
        returned is the same for the next chunk.
        """
        items = self._items
        while first < len(items) and items[first][0] + items[first][1] <= start:
            first += 1
        parts = [b""]
        for at, length, name in items[first:]:
            if at >= start + count:
                break
            if at + length > start:
                parts.append(_counted(name) + struct.pack("<qI", at - start, length))
        parts[0] = struct.pack("<I", len(parts) - 1)
        return b"".join(parts), first


def group_of_salt(salt: str | None) -> str:
    """Return the group folder of a cache salt: 16 hex of its SHA-256; ``_`` without a salt."""
    return hashlib.sha256(salt.encode()).hexdigest()[:16] if salt else "_"


# --------------------------------------------------------------------------- names

_GROUP: Final = re.compile(r"_|[0-9a-f]{16}", re.ASCII)
_DECIMAL: Final = r"0|[1-9][0-9]{0,9}"
_OBJECT: Final = re.compile(
    r"(?P<group>_|[0-9a-f]{16})/(?P<fan>[0-9a-f]{2})/(?P<key>(?P=fan)[0-9a-f]{62})"
    rf"-(?P<index>{_DECIMAL})(?:t(?P<tail>[1-9][0-9]{{0,9}}))?"
    rf"-(?P<shard>{_DECIMAL})of(?P<shards>[1-9][0-9]{{0,9}})\.safetensors",
    re.ASCII,
)
_FOLDER: Final = re.compile(r"(?P<slug>[a-z0-9._-]{1,40})-(?P<digest>[0-9a-f]{16})", re.ASCII)


def _check_group(group: str) -> str:
    if not _GROUP.fullmatch(group):
        raise ObjectNameError(f"group {group!r}: expected '_' or 16 lowercase hex digits")
    return group


@dataclass(frozen=True, slots=True)
class ParsedName:
    """What an object's name says.

    Attributes
    ----------
    key : bytes
        32 bytes.
    index, shard, shards : int
        Chunk index; shard number and their count.
    tail_tokens : int or None
        Number of tokens of a tail; None for a whole chunk.
    group : str
        The group folder.
    namespace : str or None
        The namespace folder, where the name was parsed with one.
    """

    key: bytes
    index: int
    shard: int
    shards: int
    tail_tokens: int | None = None
    group: str = "_"
    namespace: str | None = None


def object_name(chunk: Chunk, shard: int, shards: int) -> str:
    """Return the name of one shard of `chunk` inside its namespace folder.

    ``<group>/<2 hex>/<key>-<index>[t<n>]-<shard>of<shards>.safetensors``

    Raises
    ------
    ObjectNameError
        If a part is out of range.
    """
    if not 0 <= shard < shards <= _MAX_U32:
        raise ObjectNameError(f"shard {shard} of {shards}: expected 0 <= shard < shards")
    if len(chunk.key) != 32:
        raise ObjectNameError(f"key of {len(chunk.key)} bytes: expected 32")
    if not 0 <= chunk.index <= _MAX_U32:
        raise ObjectNameError(f"chunk index {chunk.index}: expected 0 to {_MAX_U32}")
    if not 1 <= chunk.tokens <= _MAX_U32:
        raise ObjectNameError(f"{chunk.tokens} tokens: expected 1 to {_MAX_U32}")
    key = chunk.key.hex()
    tail = f"t{chunk.tokens}" if chunk.tail else ""
    group = chunk.group if chunk.group == "_" else _check_group(chunk.group)
    return f"{group}/{key[:2]}/{key}-{chunk.index}{tail}-{shard}of{shards}.safetensors"


def parse_object_name(name: str) -> ParsedName | None:
    """Return what an object's name (without the namespace folder) says.

    The exact inverse of :func:`object_name`: any spelling that it would not produce
    (leading zeros, uppercase, a shard that is not below `shards`, a foreign file, a
    temporary) gives None.
    """
    found = _OBJECT.fullmatch(name)
    if found is None:
        return None
    tail = found["tail"]
    index, shard, shards = (
        int(found["index"]),
        int(found["shard"]),
        int(found["shards"]),
    )
    if index > _MAX_U32 or shards > _MAX_U32 or shard >= shards:
        return None
    if tail is not None and int(tail) > _MAX_U32:
        return None
    return ParsedName(
        bytes.fromhex(found["key"]),
        index,
        shard,
        shards,
        None if tail is None else int(tail),
        found["group"],
    )


def parse_namespace_folder(folder: str) -> str | None:
    """Return the 16 hex of a namespace folder's name, None for any other name."""
    found = _FOLDER.fullmatch(folder)
    return found["digest"] if found else None


def parse_path(path: str) -> ParsedName | None:
    """Return what a name with its namespace folder in front says, None for foreign names."""
    folder, _, name = path.partition("/")
    if parse_namespace_folder(folder) is None:
        return None
    parsed = parse_object_name(name)
    if parsed is None:
        return None
    return ParsedName(
        parsed.key,
        parsed.index,
        parsed.shard,
        parsed.shards,
        parsed.tail_tokens,
        parsed.group,
        folder,
    )


# --------------------------------------------------------------------------- weights


class FingerprintCancelledError(KVShelfError):
    """A fingerprint was given up because its caller asked for that."""


_READ_BYTES: Final = 8 * 2**20
_SAMPLE_BYTES: Final = 64 * 1024
_SAMPLES: Final = 16
_SETTLED_NS: Final = 2 * 10**9
_CACHE_ENTRIES: Final = 4096
_BLOB: Final = re.compile(r"[0-9a-f]{64}", re.ASCII)
_SAFETENSORS_FORMATS: Final = {
    "safetensors",
    "fastsafetensors",
    "instanttensor",
    "runai_streamer",
    "runai_streamer_sharded",
    "sharded_state",
}
_TRAINING_LEFTOVERS: Final = (
    "training_args.bin",
    "optimizer.bin",
    "optimizer.pt",
    "scheduler.pt",
    "scaler.pt",
)


def weight_files(model_dir: str | Path, load_format: str = "auto") -> list[Path]:
    """Return the weight files that vLLM's loader reads from a local model, sorted.

    Mirrors vLLM's default loader: ``consolidated*.safetensors`` (Mistral's own format)
    wins with ``auto``; otherwise ``*.safetensors``, else ``*.bin``, else ``*.pt``;
    safetensors files that an index does not name are left out, and so are the
    leftovers of training among ``*.bin`` and ``*.pt``.

    Parameters
    ----------
    model_dir : str or Path
        Folder of the model, or one weight file (GGUF).
    load_format : str
        vLLM's ``load_format``.

    Raises
    ------
    ConfigError
        If the format's weights are not files of this folder, the index names a file
        that is not there, or there are no weight files. The text says to set
        ``weights``.
    """
    folder = Path(model_dir)
    if folder.is_file():
        return [folder]
    remedy = "set `weights` to a string of your own that changes whenever the weights do"
    if not folder.is_dir():
        raise ConfigError(
            f"{folder} is not a local folder, so its weights cannot be read; {remedy}"
        )
    if load_format == "auto":
        consolidated = any(path.is_file() for path in folder.rglob("consolidated*.safetensors"))
        load_format = "mistral" if consolidated else "hf"
    index_file = "model.safetensors.index.json"
    if load_format in ("hf", "bitsandbytes"):
        patterns = ["*.safetensors", "*.bin", "*.pt"]
    elif load_format in _SAFETENSORS_FORMATS:
        patterns = ["*.safetensors"]
    elif load_format == "mistral":
        patterns = ["consolidated*.safetensors"]
        index_file = "consolidated.safetensors.index.json"
    elif load_format == "pt":
        patterns = ["*.pt"]
    elif load_format == "npcache":
        patterns = ["*.bin", "*.pt"]
    elif load_format == "gguf":
        patterns = ["*.gguf"]
    else:
        raise ConfigError(
            f"load_format {load_format!r} does not read weight files that kvshelf knows; {remedy}"
        )
    files: list[Path] = []
    for pattern in patterns:
        # Path.glob, unlike the loader's glob.glob, would match hidden files.
        files = [path for path in folder.glob(pattern) if not path.name.startswith(".")]
        if files:
            break
    if files and files[0].suffix == ".safetensors":
        files = _files_of_index(folder / index_file, files)
    elif load_format != "gguf":
        files = [path for path in files if not path.name.endswith(_TRAINING_LEFTOVERS)]
    if not files:
        raise ConfigError(f"{folder} holds no weight files ({', '.join(patterns)}); {remedy}")
    return sorted(files)


def _files_of_index(index: Path, files: list[Path]) -> list[Path]:
    if not index.is_file():
        return files
    try:
        weight_map = json.loads(index.read_bytes())["weight_map"]
        named = {index.parent / str(name) for name in weight_map.values()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ConfigError(f"{index} is not an index of safetensors files ({error})") from error
    missing = named.difference(files)
    if missing:
        names = ", ".join(sorted(path.name for path in missing))
        raise ConfigError(f"{index} names files that are not there: {names}")
    return [path for path in files if path in named]


class FingerprintCache:
    """Digests of weight files, remembered in one small JSON file.

    An entry is found again only for the same (device, inode, size, mtime_ns,
    ctime_ns). A missing, damaged or unwritable cache only costs hashing again.
    Several processes may use one cache at once.

    Parameters
    ----------
    path : str, Path or None
        The file; its folder is made (private) on the first write. None remembers
        nothing. :meth:`default_path` is the usual place.
    """

    def __init__(self, path: str | Path | None) -> None:
        self.path = None if path is None else Path(path)

    @staticmethod
    def default_path() -> Path:
        """Return ``fingerprints.json`` in ``$XDG_CACHE_HOME/kvshelf`` or ``~/.cache/kvshelf``."""
        base = os.environ.get("XDG_CACHE_HOME")
        # The XDG rules say that a relative path is to be ignored.
        folder = Path(base) if base and os.path.isabs(base) else Path("~/.cache").expanduser()
        return folder / "kvshelf" / "fingerprints.json"

    @staticmethod
    def _name(status: os.stat_result) -> str:
        numbers = (
            status.st_dev,
            status.st_ino,
            status.st_size,
            status.st_mtime_ns,
            status.st_ctime_ns,
        )
        return ":".join(map(str, numbers))

    def _entries(self) -> dict[str, str]:
        if self.path is None:
            return {}
        try:
            content = json.loads(self.path.read_bytes())
            files = content["xxh3-128"]
            return {
                name: digest
                for name, digest in files.items()
                if isinstance(digest, str) and re.fullmatch(r"[0-9a-f]{32}", digest, re.ASCII)
            }
        except (
            OSError,
            ValueError,
            KeyError,
            TypeError,
            AttributeError,
            RecursionError,
        ):
            return {}

    def get(self, status: os.stat_result) -> str | None:
        """Return the remembered xxh3-128 hex of the file with this status, or None."""
        return self._entries().get(self._name(status))

    def put(self, entries: Sequence[tuple[os.stat_result, str]]) -> None:
        """Remember xxh3-128 hex digests. Best effort: never raises for storage trouble."""
        if self.path is None or not entries:
            return
        with suppress(OSError), self._locked():
            merged = self._entries()
            for status, digest in entries:
                merged.pop(self._name(status), None)
                merged[self._name(status)] = digest
            newest = dict(list(merged.items())[-_CACHE_ENTRIES:])
            data = json.dumps({"xxh3-128": newest}, indent=0).encode()
            unique = f"{os.getpid()}-{threading.get_ident()}-{time.monotonic_ns()}"
            temporary = self.path.with_name(f".{self.path.name}.{unique}.tmp")
            try:
                temporary.write_bytes(data)
                os.replace(temporary, self.path)
            except OSError:
                with suppress(OSError):
                    temporary.unlink()
                raise

    @contextmanager
    def _locked(self) -> Iterator[None]:
        """Hold the lock file for a merge; after a second go on without it.

        Without the lock a concurrent merge may be lost, which only costs hashing
        again; waiting for ever for a lock on a network home would cost the engine.
        """
        assert self.path is not None
        self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        lock = os.open(
            self.path.with_name(self.path.name + ".lock"),
            os.O_RDWR | os.O_CREAT | os.O_CLOEXEC,
            0o600,
        )
        try:
            for _ in range(100):
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except OSError:
                    time.sleep(0.01)
            yield
        finally:
            os.close(lock)


def _hub_digest(path: Path) -> str | None:
    """Return the SHA-256 that a hub snapshot's link names, None for other files."""
    try:
        target = Path(os.readlink(path))
    except OSError:
        return None
    if target.parent.name == "blobs" and _BLOB.fullmatch(target.name) and path.is_file():
        return target.name
    return None


def _check_cancelled(cancel: threading.Event) -> None:
    if cancel.is_set():
        raise FingerprintCancelledError("the fingerprint of the weights was cancelled")


def _same_file(before: os.stat_result, after: os.stat_result) -> bool:
    return FingerprintCache._name(before) == FingerprintCache._name(after)


def _open_regular(path: Path) -> tuple[int, os.stat_result]:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    status = os.fstat(descriptor)
    if not stat.S_ISREG(status.st_mode):
        os.close(descriptor)
        raise ConfigError(f"weight file {path} is not a regular file")
    return descriptor, status


def _hash_content(
    path: Path, buffer: memoryview, cancel: threading.Event
) -> tuple[os.stat_result, str, bool]:
    """Return status, xxh3-128 hex of a file's content, and whether it may be remembered."""
    for _ in range(4):
        started = time.time_ns()
        descriptor, before = _open_regular(path)
        try:
            state = xxhash.xxh3_128()
            total = 0
            while True:
                _check_cancelled(cancel)
                count = os.readv(descriptor, [buffer])
                if not count:
                    break
                total += count
                state.update(buffer[:count])
            after = os.fstat(descriptor)
        finally:
            os.close(descriptor)
        if total == before.st_size and _same_file(before, after):
            # A write within the clock's granularity leaves the times as they are, so
            # a file that was written just now cannot be told from its next version.
            settled = started - max(before.st_mtime_ns, before.st_ctime_ns) > _SETTLED_NS
            return before, state.hexdigest(), settled
    raise TransientStorageError(
        f"weight file {path} keeps changing while it is read; wait until it is written"
    )


def _hash_samples(path: Path) -> str:
    descriptor, status = _open_regular(path)
    try:
        size = status.st_size
        state = xxhash.xxh3_128(struct.pack("<Q", size))
        last = max(size - _SAMPLE_BYTES, 0)
        for number in range(_SAMPLES):
            state.update(os.pread(descriptor, _SAMPLE_BYTES, last * number // (_SAMPLES - 1)))
        return state.hexdigest()
    finally:
        os.close(descriptor)


def _hash_files(
    files: Sequence[Path],
    cache: FingerprintCache,
    cancel: threading.Event,
    threads: int,
    on_thread_start: Callable[[], None] | None,
) -> dict[Path, str]:
    """Return the xxh3-128 hex of each file, from the cache or by hashing in parallel."""
    known: dict[Path, str] = {}
    todo: list[tuple[int, Path]] = []
    entries = cache._entries()
    for path in dict.fromkeys(files):
        status = os.stat(path)
        digest = entries.get(cache._name(status))
        if digest is not None:
            known[path] = digest
        else:
            todo.append((status.st_size, path))
    if not todo:
        return known
    # Largest first, so that no thread is left alone with a large file at the end.
    todo.sort(key=lambda entry: entry[0])
    lock = threading.Lock()
    results: queue.SimpleQueue[tuple[Path, tuple[os.stat_result, str, bool] | BaseException]]
    results = queue.SimpleQueue()
    stop = threading.Event()

    def work() -> None:
        if on_thread_start is not None:
            on_thread_start()
        buffer = memoryview(bytearray(_READ_BYTES))
        while True:
            with lock:
                if not todo or stop.is_set():
                    return
                _, path = todo.pop()
            try:
                results.put((path, _hash_content(path, buffer, stop)))
            except BaseException as error:  # noqa: BLE001 - whatever it is, the caller gets it
                results.put((path, error))
                return

    expected = len(todo)
    for number in range(min(max(threads, 1), expected)):
        threading.Thread(target=work, name=f"kvshelf-fingerprint-{number}", daemon=True).start()
    remembered: list[tuple[os.stat_result, str]] = []
    try:
        for _ in range(expected):
            while True:
                _check_cancelled(cancel)
                with suppress(queue.Empty):
                    path, result = results.get(timeout=0.05)
                    break
            if isinstance(result, BaseException):
                raise result
            status, digest, settled = result
            known[path] = digest
            if settled:
                remembered.append((status, digest))
    finally:
        stop.set()
        cache.put(remembered)
    return known


def _lines_digest(lines: Mapping[int, tuple[str, str]]) -> bytes:
    encoded = []
    for name, digest in lines.values():
        if "\n" in name:
            raise ConfigError(f"weight file {name!r}: a line break in its name is not allowed")
        encoded.append(f"{name} {digest}\n".encode("utf-8", "surrogateescape"))
    return hashlib.sha256(b"".join(sorted(encoded))).digest()


def _content_digest(
    files: Sequence[str | Path],
    cache: FingerprintCache | None,
    cancel: threading.Event | None,
    threads: int,
    on_thread_start: Callable[[], None] | None,
) -> bytes:
    paths = [Path(path) for path in files]
    if not paths:
        raise ConfigError("no weight files were given, so there is nothing to fingerprint")
    lines: dict[int, tuple[str, str]] = {}
    rest: list[Path] = []
    for number, path in enumerate(paths):
        digest = _hub_digest(path)
        if digest is not None:
            lines[number] = (path.name, f"sha256:{digest}")
        else:
            rest.append(path)
    hashed = _hash_files(
        rest,
        FingerprintCache(None) if cache is None else cache,
        threading.Event() if cancel is None else cancel,
        threads,
        on_thread_start,
    )
    for number, path in enumerate(paths):
        if number not in lines:
            lines[number] = (path.name, f"xxh3-128:{hashed[path]}")
    return _lines_digest(lines)


def weights_fingerprint(
    files: Sequence[str | Path],
    *,
    cache: FingerprintCache | None = None,
    cancel: threading.Event | None = None,
    threads: int = 2,
    on_thread_start: Callable[[], None] | None = None,
) -> str:
    """Return the fingerprint of weight files by content, as the namespace holds it.

    Blocks until all files are hashed or remembered; call it on a thread of your own.

    Parameters
    ----------
    files : Sequence[str | Path]
        The files, as :func:`weight_files` lists them. Order does not matter.
    cache : FingerprintCache or None
        Where digests are remembered.
    cancel : threading.Event or None
        When it is set the call returns within 0.1 s, even if a read hangs.
    threads : int
        Threads that read and hash.
    on_thread_start : Callable, optional
        Called first on each of these threads. It must not lower their priority: they need the
        GIL for microseconds between reads, and one that is not scheduled while it holds the GIL
        stops the engine. On busy processors the engine's longest stall was measured as 2.6 s
        with SCHED_IDLE, 1 s with nice 19 and 0.2 s with nice 10.

    Returns
    -------
    str
        ``sha256:<64 hex>``.

    Raises
    ------
    FingerprintCancelledError
        If `cancel` was set first.
    ConfigError
        If there are no files, or one is not a regular file.
    TransientStorageError
        If a file keeps changing.
    OSError
        If a file cannot be read.
    """
    return "sha256:" + _content_digest(files, cache, cancel, threads, on_thread_start).hex()


def sampled_fingerprint(files: Sequence[str | Path]) -> str:
    """Return a fingerprint from the size and 16 pieces of 64 KiB of each file.

    Takes milliseconds; misses a change between the pieces, so use it only where
    checkpoints are never edited in place.

    Returns
    -------
    str
        ``sampled:<64 hex>``.
    """
    paths = [Path(path) for path in files]
    if not paths:
        raise ConfigError("no weight files were given, so there is nothing to fingerprint")
    lines: dict[int, tuple[str, str]] = {}
    for number, path in enumerate(paths):
        hub = _hub_digest(path)
        lines[number] = (
            path.name,
            f"sha256:{hub}" if hub else f"sampled:{_hash_samples(path)}",
        )
    return "sampled:" + _lines_digest(lines).hex()


def adapter_files(adapter_dir: str | Path) -> list[Path]:
    """Return the files of a LoRA adapter that decide what it does.

    Raises
    ------
    ConfigError
        If the folder holds no adapter.
    """
    folder = Path(adapter_dir)
    config = folder / "adapter_config.json"
    names = [f"adapter_model.{kind}" for kind in ("safetensors", "bin", "pt")]
    weights = next((folder / name for name in names if (folder / name).is_file()), None)
    if weights is None or not config.is_file():
        raise ConfigError(
            f"{folder} is not a LoRA adapter: expected adapter_config.json and one of "
            + ", ".join(names)
        )
    return [config, weights]


def lora_digest(
    adapter_dir: str | Path,
    *,
    cache: FingerprintCache | None = None,
    cancel: threading.Event | None = None,
) -> bytes:
    """Return the digest of a LoRA adapter by content: 32 raw bytes.

    Over ``adapter_config.json`` and the weights that vLLM loads: the first of
    ``adapter_model.safetensors``, ``.bin``, ``.pt`` that is there.

    Raises
    ------
    ConfigError
        If the folder holds no adapter.
    FingerprintCancelledError, TransientStorageError, OSError
        As for :func:`weights_fingerprint`.
    """
    return _content_digest(adapter_files(adapter_dir), cache, cancel, 1, None)
