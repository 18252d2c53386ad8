"""The chunks of a prompt at the node server, by tokens or by an engine's block hashes.

Owns both modes. With *tokens*, a chunk is that of the format, and every engine and program with
this namespace shares it. With *block hashes*, an engine names a chunk by the hash of its last
block. Such a hash stands for the tokens and what else the engine puts into it, but for neither
weights nor layout. So its chunks lie in a namespace of their own, which is that of the model with
another version, and which is volatile: the server keeps its objects in memory alone.

Contracts
---------
* Chunks are pure functions of namespace and prompt.
* Any thread may call everything.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from itertools import islice
from typing import Final

from kvshelf.cache import PromptIdentity
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_names
from kvshelf.format.namespace import Namespace
from kvshelf.format.objects import ObjectFormat

#: A prompt that its tokens identify.
PLAIN: Final = PromptIdentity()

#: Longest block hash. vLLM's have 32 bytes.
MAX_HASH: Final = 64


def striding_block_hashes(block_hashes: Sequence[bytes], blocks_in_chunk: int) -> list[bytes]:
    """Return the hash of the last block of each whole chunk.

    A block's hash stands for all blocks before it, so the last one stands for the chunk
    (``striding_block_hashes`` in
    vllm/distributed/kv_transfer/kv_connector/v1/lmcache_integration/multi_process_adapter.py).

    Parameters
    ----------
    block_hashes : Sequence[bytes]
        A hash for each block, in the order of the prompt.
    blocks_in_chunk : int
        Blocks in a chunk.
    """
    return list(islice(block_hashes, blocks_in_chunk - 1, None, blocks_in_chunk))


def check_mode(
    what: str, block_hashes: Sequence[bytes] | None, token_ids: Sequence[int] | None
) -> None:
    """Refuse what is not exactly in one mode.

    Raises
    ------
    ValueError
        With `what` as the subject.
    """
    if (token_ids is None) == (block_hashes is None):
        raise ValueError(
            f"{what} got {'neither' if token_ids is None else 'both'} of block_hashes and"
            " token_ids: expected exactly one"
        )


def hashed_namespace(namespace: Namespace) -> Namespace:
    """Return the namespace of a model's chunks that block hashes name."""
    record = {**namespace.record}
    record["version"] = f"{record.get('version', '')} by block hashes"
    return Namespace(record, namespace.slug)


def token_chain(fmt: ObjectFormat, identity: PromptIdentity) -> KeyChain:
    """Return the keys of a prompt, still without tokens."""
    return KeyChain(
        fmt.namespace.digest,
        fmt.chunk_size,
        salt=identity.salt,
        lora_digest=identity.lora_digest,
        items=identity.items,
    )


def hashed_chunk(fmt: ObjectFormat, block_hash: bytes) -> Chunk:
    """Return the chunk that the hash of its last block names.

    Raises
    ------
    ValueError
        If the hash is empty or longer than :data:`MAX_HASH`.
    """
    if not 0 < len(block_hash) <= MAX_HASH:
        raise ValueError(f"a block hash of {len(block_hash)} bytes: expected 1 to {MAX_HASH}")
    key = hashlib.sha256(fmt.namespace.digest + block_hash).digest()
    # Workers with the same heads share stores by the index.
    index = int.from_bytes(key[:4], "little")
    return Chunk(key, bytes(32), index, fmt.chunk_size)


class HashChain(KeyChain):
    """The chunks that block hashes name, as a lookup makes them: a hash is its token.

    Parameters
    ----------
    fmt : ObjectFormat
    hashes : Sequence of bytes
        One for each chunk.
    """

    def __init__(self, fmt: ObjectFormat, hashes: Sequence[bytes]) -> None:
        super().__init__(fmt.namespace.digest, 1)
        self._fmt = fmt
        self._hashes = hashes

    @property
    def tokens(self) -> int:
        """Number of chunks so far."""
        return len(self.chunks)

    def extend(self, tokens: Sequence[int]) -> list[Chunk]:
        """Append the chunks of the hashes with these numbers."""
        chunks = [hashed_chunk(self._fmt, self._hashes[number]) for number in tokens]
        self.chunks += chunks
        return chunks


def names_of(fmt: ObjectFormat, chunks: Sequence[Chunk]) -> list[str]:
    """Return the names of all objects of some chunks."""
    refs = [(chunk, shard) for chunk in chunks for shard in range(fmt.shards)]
    folder = fmt.namespace.folder
    return [f"{folder}/{name}" for name in object_names(refs, fmt.shards, fmt.kind)]
