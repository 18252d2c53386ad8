"""The chain of chunk keys over a prompt.

Owns :class:`KeyChain`, :class:`Chunk` (a chunk's address inside a namespace) and the salt
group that stands for a cache salt.

Contracts
---------
* Keys are pure functions of their arguments: equal on every machine, Python version, byte
  order and hash seed.
* Only SHA-256 separates the keys of tenants, so it must not be replaced by a faster hash that
  can be collided.
* No torch, no storage backend, no vLLM.

Threads
-------
Everything is safe to call from any thread; a :class:`KeyChain` belongs to one thread at a time.
"""

from __future__ import annotations

import hashlib
import re
import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from kvshelf.errors import ConfigError, ObjectNameError
from kvshelf.format.namespace import FORMAT

__all__ = ["Chunk", "KeyChain", "MultimodalItem", "salt_group_of"]

#: Largest u32.
MAX_U32: Final = 2**32 - 1

_SALT_GROUP: Final = re.compile(r"_|[0-9a-f]{16}", re.ASCII)


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
    key : bytes
        32 bytes.
    parent : bytes
        Key of the chunk before it; of chunk 0 the root of the key chain.
    index : int
        Chunk index: first token's position / chunk size.
    tokens : int
        Number of tokens: the chunk size, or fewer in a tail.
    tail : bool
        True for the shorter last piece of a prompt.
    salt_group : str
        Name of the salt group's folder: ``_`` or 16 hex.
    """

    key: bytes
    parent: bytes
    index: int
    tokens: int
    tail: bool = False
    salt_group: str = "_"


def check_chunk_size(chunk_size: int) -> int:
    """Return `chunk_size` if it is an integer in 1 … 2^32−1.

    Raises
    ------
    ConfigError
        If it is not.
    """
    if isinstance(chunk_size, bool) or not isinstance(chunk_size, int):
        raise ConfigError(f"chunk_size: found {chunk_size!r}, expected an integer")
    if not 1 <= chunk_size <= MAX_U32:
        raise ConfigError(f"chunk_size: found {chunk_size}, expected 1 to {MAX_U32}")
    return chunk_size


def _counted(data: bytes) -> bytes:
    return struct.pack("<I", len(data)) + data


def _pack_tokens(tokens: Sequence[int], position: int) -> bytes:
    """Return `tokens` as little-endian u32; `position` only appears in the error message."""
    try:
        packed = array("I", tokens)
    except (OverflowError, TypeError, ValueError) as error:
        for offset, token in enumerate(tokens):
            try:
                fits = 0 <= token.__index__() <= MAX_U32
            except (AttributeError, TypeError):
                fits = False
            if not fits:
                raise ValueError(
                    f"token {position + offset} is {token!r}: token ids are integers from 0 to "
                    f"{MAX_U32}"
                ) from None
        raise ValueError(f"tokens {position} and following cannot be packed: {error}") from error
    if sys.byteorder != "little":
        packed.byteswap()
    return packed.tobytes()


class KeyChain:
    """Incremental chunk keys of one prompt.

    Feed tokens in slices of any length with :meth:`extend`; the keys do not depend on the
    slicing. A chunk of 256 tokens costs about 5 µs, during which the GIL is held. A
    background thread that feeds a few chunks per call, and yields between calls, does not
    delay other threads.

    Parameters
    ----------
    namespace_digest : bytes
        32 bytes.
    chunk_size : int
        Tokens per chunk.
    salt : str
        The request's cache salt; empty when it has none.
    lora_digest : bytes
        32 raw bytes of the adapter's digest; empty without an adapter.
    items : Sequence[MultimodalItem]
        All multimodal items of the prompt, in any order.
    salt_group : str
        Salt group of the chunks made.

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

    def __init__(
        self,
        namespace_digest: bytes,
        chunk_size: int,
        *,
        salt: str = "",
        lora_digest: bytes = b"",
        items: Sequence[MultimodalItem] = (),
        salt_group: str = "_",
    ) -> None:
        if len(namespace_digest) != 32:
            raise ValueError(f"namespace digest: found {len(namespace_digest)} bytes, expected 32")
        if len(lora_digest) not in (0, 32):
            raise ValueError(f"LoRA digest: found {len(lora_digest)} bytes, expected 32 or none")
        self.chunk_size = check_chunk_size(chunk_size)
        self.salt_group = check_salt_group(salt_group)
        self.root = hashlib.sha256(
            FORMAT.encode() + namespace_digest + _counted(salt.encode()) + _counted(lora_digest)
        ).digest()
        self.chunks: list[Chunk] = []
        self._pending = b""
        self._prefix = struct.pack("<I", self.chunk_size)
        encoded: list[tuple[int, int, bytes]] = []
        for item in items:
            if not 0 <= item.length <= MAX_U32 or not 0 <= item.start < 2**62:
                raise ValueError(f"{item} is not in a prompt: negative or too large")
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
        """Append tokens; return the chunks that they complete.

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
        salt_group = self.salt_group
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
            new.append(Chunk(key, parent, index, size, False, salt_group))
            parent = key
            index += 1
        if index > MAX_U32 + 1:
            raise ValueError(f"a prompt has at most {MAX_U32 + 1} chunks")
        if used < count:
            pending += _pack_tokens(tokens[used:count], start + used)
        self._pending = pending
        self._next_item = next_item
        self.chunks += new
        return new

    def tail(self) -> Chunk | None:
        """Return the chunk of the tokens after the last complete chunk, None if there are none.

        A tail is never a parent. More tokens may be fed afterwards.
        """
        if not self._pending:
            return None
        return self._tail(len(self.chunks), self._pending, self._next_item)

    def tail_after(self, index: int, tokens: Sequence[int]) -> Chunk:
        """Return the tail that follows the first `index` chunks, whatever was fed behind them.

        Parameters
        ----------
        index : int
            Number of complete chunks before it.
        tokens : Sequence[int]
            Its token ids: at least one, and fewer than a chunk has.

        Raises
        ------
        ValueError
            If there are fewer than `index` chunks, the tokens are too few or too many, or one is
            not an integer in range.
        """
        if not 0 <= index <= len(self.chunks):
            raise ValueError(f"a tail after {index} chunks: the prompt has {len(self.chunks)}")
        if not 1 <= len(tokens) < self.chunk_size:
            raise ValueError(
                f"a tail of {len(tokens)} tokens: expected 1 to {self.chunk_size - 1}, fewer than a"
                " chunk has"
            )
        return self._tail(index, _pack_tokens(tokens, index * self.chunk_size), 0)

    def _tail(self, index: int, packed: bytes, next_item: int) -> Chunk:
        """Return the tail of packed tokens; `next_item`: as `first` of :meth:`_overlaps`."""
        parent = self.chunks[index - 1].key if index else self.root
        count = len(packed) // 4
        suffix, _ = self._overlaps(index * self.chunk_size, count, next_item)
        key = hashlib.sha256(parent + struct.pack("<I", count) + packed + suffix).digest()
        return Chunk(key, parent, index, count, True, self.salt_group)

    def _overlaps(self, start: int, count: int, first: int) -> tuple[bytes, int]:
        """Encode the items that overlap tokens [start, start + count).

        `first` is the index of the first item that can still overlap; the second value
        returned is that index for the next chunk.
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


def salt_group_of(salt: str | None) -> str:
    """Return the salt group of a cache salt: 16 hex of its SHA-256; ``_`` without a salt."""
    return hashlib.sha256(salt.encode()).hexdigest()[:16] if salt else "_"


def check_salt_group(salt_group: str) -> str:
    """Return `salt_group`.

    Raises
    ------
    ObjectNameError
        If it is not the name of a salt group's folder.
    """
    if not _SALT_GROUP.fullmatch(salt_group):
        raise ObjectNameError(f"salt group {salt_group!r}: expected '_' or 16 lowercase hex digits")
    return salt_group
