"""The names of a chunk's objects at the node server, by tokens or by an engine's block hashes.

Owns both modes. With *tokens*, a chunk's objects are those of the format: their names come from the
chain of chunk keys, and every engine and program with this namespace shares them. With *block
hashes*, an engine names a chunk by the hash of its last block. Such a hash stands for the tokens
and what else the engine puts into it, but for neither weights nor layout: the namespace's digest
stands before it. No object of the format has such a name, and the server keeps it in memory only.

Contracts
---------
* Names are pure functions of namespace and prompt.
* A chunk exists when all of its names do: every shard of every kind of KV.

Threads
-------
Any thread may call everything.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Final, TypeAlias

from kvshelf.cache import PromptIdentity
from kvshelf.format.keys import Chunk, KeyChain
from kvshelf.format.names import object_name
from kvshelf.format.objects import ObjectFormat

#: A chunk by its tokens, or by the hash of its last block.
NamedChunk: TypeAlias = "Chunk | bytes"

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


def chunks_of(
    fmt: ObjectFormat, token_ids: Sequence[int], end: int, identity: PromptIdentity
) -> list[Chunk]:
    """Return the whole chunks of the first `end` tokens of a prompt.

    Takes about 5 µs for a chunk of 256 tokens.

    Raises
    ------
    ValueError
        If a token is no token id.
    """
    chain = KeyChain(
        fmt.namespace.digest,
        fmt.chunk_size,
        salt=identity.salt,
        lora_digest=identity.lora_digest,
        items=identity.items,
    )
    return chain.extend(token_ids[: end // fmt.chunk_size * fmt.chunk_size])


def names_of(fmt: ObjectFormat, chunk: NamedChunk) -> list[str]:
    """Return the names of all objects of a chunk: every shard of every kind.

    Raises
    ------
    ValueError
        As :func:`check_hash`.
    """
    return [
        name_of(fmt.of(kind), chunk, shard)
        for kind in fmt.kinds
        for shard in range(fmt.of(kind).shards)
    ]


def name_of(fmt: ObjectFormat, chunk: NamedChunk, shard: int) -> str:
    """Return the name of one object: the format's, or with a block hash one in memory only."""
    if isinstance(chunk, Chunk):
        return f"{fmt.namespace.folder}/{object_name(chunk, shard, fmt.shards, fmt.kind)}"
    digest = fmt.namespace.digest.hex()
    return f"hash/{digest}/{check_hash(chunk).hex()}/{fmt.kind}-{shard}of{fmt.shards}"


def check_hash(block_hash: bytes) -> bytes:
    """Return a block hash.

    Raises
    ------
    ValueError
        If it is empty or longer than :data:`MAX_HASH`.
    """
    if not 0 < len(block_hash) <= MAX_HASH:
        raise ValueError(f"a block hash of {len(block_hash)} bytes: expected 1 to {MAX_HASH}")
    return block_hash
