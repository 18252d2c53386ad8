"""The codec of object names.

Owns :func:`object_name` and its exact inverse :func:`parse_object_name`, and the names of
namespace folders.

Contracts
---------
* Names are pure functions of the chunk, its kind, the shard and the number of shards. The parser
  accepts only names that :func:`object_name` produces.
* No torch, no storage backend, no vLLM.

Threads
-------
Everything is safe to call from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, cast

from kvshelf.errors import ObjectNameError
from kvshelf.format.keys import MAX_U32, Chunk, check_salt_group
from kvshelf.format.kinds import FULL, KINDS, Kind

#: Name of a namespace's description in its folder.
DESCRIPTION: Final = "namespace.json"

_DECIMAL: Final = r"0|[1-9][0-9]{0,9}"
_OBJECT: Final = re.compile(
    r"(?P<group>_|[0-9a-f]{16})/(?P<fan>[0-9a-f]{2})/(?P<key>(?P=fan)[0-9a-f]{62})"
    rf"-(?P<index>{_DECIMAL})(?:t(?P<tail>[1-9][0-9]{{0,9}}))?(?:-(?P<kind>window|state))?"
    rf"-(?P<shard>{_DECIMAL})of(?P<shards>[1-9][0-9]{{0,9}})\.safetensors",
    re.ASCII,
)
_FOLDER: Final = re.compile(r"(?P<slug>[a-z0-9._-]{1,40})-(?P<digest>[0-9a-f]{16})", re.ASCII)


@dataclass(frozen=True, slots=True)
class ParsedName:
    """The parts of an object's name.

    Attributes
    ----------
    key : bytes
        32 bytes.
    index, shard, shards : int
        Chunk index; shard, and number of shards.
    tail_tokens : int or None
        Number of tokens of a tail; None for a whole chunk.
    salt_group : str
        Folder of the salt group: ``_`` or 16 hex.
    namespace : str or None
        The namespace folder, if the parsed name included it.
    kind : Kind
        Kind of KV in the object.
    """

    key: bytes
    index: int
    shard: int
    shards: int
    tail_tokens: int | None = None
    salt_group: str = "_"
    namespace: str | None = None
    kind: Kind = FULL


def object_name(chunk: Chunk, shard: int, shards: int, kind: Kind = FULL) -> str:
    """Return the name of one shard of one kind of `chunk` inside its namespace folder.

    ``<group>/<2 hex>/<key>-<index>[t<n>][-window|-state]-<shard>of<shards>.safetensors``

    Parameters
    ----------
    chunk : Chunk
    shard, shards : int
        Number of the shard, and number of shards of this kind.
    kind : Kind

    Raises
    ------
    ObjectNameError
        If a part is out of range.
    """
    if not 0 <= shard < shards <= MAX_U32:
        raise ObjectNameError(f"shard {shard} of {shards}: expected 0 <= shard < shards")
    if len(chunk.key) != 32:
        raise ObjectNameError(f"key of {len(chunk.key)} bytes: expected 32")
    if not 0 <= chunk.index <= MAX_U32:
        raise ObjectNameError(f"chunk index {chunk.index}: expected 0 to {MAX_U32}")
    if not 1 <= chunk.tokens <= MAX_U32:
        raise ObjectNameError(f"{chunk.tokens} tokens: expected 1 to {MAX_U32}")
    if kind not in KINDS:
        raise ObjectNameError(f"kind {kind!r}: expected one of {', '.join(KINDS)}")
    key = chunk.key.hex()
    tail = f"t{chunk.tokens}" if chunk.tail else ""
    middle = tail if kind == FULL else f"{tail}-{kind}"
    group = chunk.salt_group if chunk.salt_group == "_" else check_salt_group(chunk.salt_group)
    return f"{group}/{key[:2]}/{key}-{chunk.index}{middle}-{shard}of{shards}.safetensors"


@lru_cache
def shard_ends(shards: int) -> tuple[str, ...]:
    """Return the ends of the names of a chunk's objects, by shard: all in which they differ."""
    return tuple(f"{shard}of{shards}.safetensors" for shard in range(shards))


def object_names(refs: Iterable[tuple[Chunk, int]], shards: int, kind: Kind) -> list[str]:
    """Return what :func:`object_name` does for many objects of one kind, quickly.

    Parameters
    ----------
    refs : Iterable of (Chunk, int)
        Chunk and shard of each; cheapest when shards of one chunk follow one another.
    shards : int
    kind : Kind
    """
    ends = shard_ends(shards)
    names: list[str] = []
    last: Chunk | None = None
    start = ""
    for chunk, shard in refs:
        if chunk is not last:
            last, start = chunk, object_name(chunk, 0, shards, kind)[: -len(ends[0])]
        names.append(start + ends[shard])
    return names


def parse_object_name(name: str, namespace: str | None = None) -> ParsedName | None:
    """Parse an object's name (without the namespace folder).

    The exact inverse of :func:`object_name`. Returns None for any spelling that it does not
    produce: leading zeros, uppercase, a shard not below `shards`, a foreign file, a temporary.
    """
    match = _OBJECT.fullmatch(name)
    if match is None:
        return None
    tail = match["tail"]
    index, shard, shards = int(match["index"]), int(match["shard"]), int(match["shards"])
    if index > MAX_U32 or shards > MAX_U32 or shard >= shards:
        return None
    if tail is not None and int(tail) > MAX_U32:
        return None
    return ParsedName(
        bytes.fromhex(match["key"]),
        index,
        shard,
        shards,
        None if tail is None else int(tail),
        match["group"],
        namespace,
        cast("Kind", match["kind"] or FULL),
    )


def parse_namespace_folder(folder: str) -> str | None:
    """Return the 16 hex digits of a namespace folder's name, None for any other name."""
    match = _FOLDER.fullmatch(folder)
    return match["digest"] if match else None


def parse_path(path: str) -> ParsedName | None:
    """Parse an object's name that begins with the namespace folder; None for foreign names."""
    folder, _, name = path.partition("/")
    if parse_namespace_folder(folder) is None:
        return None
    return parse_object_name(name, folder)
