"""The slots of chunks in a worker's paged cache.

A slot mapping has one entry for each token where chunks are stored canonically, and one for each
block where blocks are stored whole. vLLM's blocks and kvshelf's chunks need not end together.
Tokens that a load must not touch are −1: vLLM has them already, the hit ends before them, or, with
decode context parallelism, another rank holds them (:mod:`kvshelf.kv.interleave`).

Pure functions of a :class:`~kvshelf.vllm.registration.Registration` that has memory.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kvshelf.format.keys import Chunk
from kvshelf.kv.layout import native_slots_of
from kvshelf.transfer.context import ChunkSlots
from kvshelf.vllm.metadata import NULL_BLOCK
from kvshelf.vllm.registration import Registration


def slots_of(
    registration: Registration, block_ids: Sequence[int], start: int, count: int
) -> torch.Tensor:
    """Return slots of a request's tokens, or ids of whole blocks where these are stored.

    Parameters
    ----------
    registration : Registration
    block_ids : Sequence of int
        The request's blocks, in the order of its tokens.
    start, count : int
        The first token, counted from the first block on, and the number of tokens.

    Returns
    -------
    Tensor
        int64, CPU.
    """
    caches, memory = registration.caches, registration.memory
    assert caches is not None and memory is not None
    unit = caches.unit_tokens
    if unit == 1:
        return memory.blocks.slots_of(block_ids, start, count)
    return native_slots_of(block_ids, memory.blocks.block_size, unit, start, count)


def slots_to_load(
    registration: Registration,
    chunks: Sequence[Chunk],
    block_ids: Sequence[int],
    start: int,
    end: int,
    chunk_size: int,
) -> list[ChunkSlots]:
    """Return slot mappings of a load's chunks, −1 outside its tokens and in null blocks.

    Chunks of which no token is wanted are left out: a sliding window has passed them, or other
    ranks of a context-parallel group hold all their tokens.

    Parameters
    ----------
    registration : Registration
    chunks : Sequence of Chunk
        All chunks that overlap tokens ``[start, end)``.
    block_ids : Sequence of int
        The request's blocks from position 0 on.
    start, end : int
        The tokens to load.
    chunk_size : int

    Raises
    ------
    ValueError
        If `chunks` are too few or too many.
    """
    caches, memory = registration.caches, registration.memory
    assert caches is not None and memory is not None
    unit = caches.unit_tokens
    first = start // chunk_size
    count = -(-end // chunk_size) - first
    if len(chunks) != count:
        raise ValueError(f"{len(chunks)} chunks cannot fill tokens {start} to {end} of a request")
    ids = slots_of(registration, block_ids, start, end - start)
    # All requests share the null block.
    ids[ids // (memory.blocks.block_size // unit) == NULL_BLOCK] = -1
    slots = torch.full((count * chunk_size // unit,), -1, dtype=torch.int64)
    at = (start - first * chunk_size) // unit
    slots[at : at + len(ids)] = ids
    rows = slots.view(count, -1)
    wanted = (rows >= 0).any(dim=1).tolist()
    return [
        ChunkSlots(chunk, row)
        for chunk, row, is_wanted in zip(chunks, rows.unbind(), wanted, strict=True)
        if is_wanted
    ]
